"""A small DistilBERT that reads weather reports, trained by eight stations that see different weather.

The reports, the vocabulary and the model are made up here; a model of yours comes from `from_pretrained`. All weights
are trained. From the root of the checkout, alone or on several ranks:

    python examples/hf_classifier.py
    torchrun --standalone --nproc-per-node=2 examples/hf_classifier.py

Both print the same line. docs/transformers.md shows classification from the command line.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

import fedmpi
from fedmpi.plugins.torchvision import ready_torchvision

ready_torchvision()  # transformers imports torchvision: needed only where that does not fit torch
from transformers import DistilBertConfig, DistilBertForSequenceClassification  # noqa: E402

KINDS = {  # weather: what is said of it
    "dry": ["not a drop", "clear sky", "bright sun", "dust on the road"],
    "wet": ["heavy rain", "drizzle at noon", "puddles on the road", "grey and soaked"],
    "snow": ["white fields", "flakes at noon", "ice on the road", "not a bird in the white sky"],
}
PLACES = ["in the valley", "near the lake", "on the pass", "by the old mill"]
WORDS = ["<pad>", *sorted({w for said in (*KINDS.values(), PLACES) for text in said for w in text.split()})]


def reports(count: int, seed: int) -> dict[str, Tensor]:
    """Return reports as padded tokens with their mask, and the weather they speak of."""
    rng = np.random.default_rng(seed)
    labels = torch.from_numpy(rng.integers(len(KINDS), size=count))
    said = [f"{rng.choice(PLACES)} {rng.choice(list(KINDS.values())[kind])}" for kind in labels]
    tokens = [torch.tensor([WORDS.index(word) for word in text.split()]) for text in said]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True, padding_value=0)
    ids = torch.nn.functional.pad(ids, (0, 10 - ids.shape[1]))
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "label": labels}


def main() -> None:
    """Train and print the accuracy."""
    torch.manual_seed(0)  # before the model is made; on several ranks, rank 0's weights count
    shape = {
        "dim": 32,
        "hidden_dim": 64,
        "n_layers": 2,
        "n_heads": 2,
        "max_position_embeddings": 10,
        "initializer_range": 0.1,
    }
    model = DistilBertForSequenceClassification(DistilBertConfig(vocab_size=len(WORDS), num_labels=len(KINDS), **shape))
    result = fedmpi.train(
        model,
        reports(600, seed=0),
        reports(150, seed=1),
        split="dirichlet",
        alpha=0.5,
        clients=8,
        cohort=4,
        rounds=20,
        local={"lr": 0.02, "batch": 16, "epochs": 2},
        threads=1,
        quiet=True,
    )
    if result.rank == 0:
        sha = hashlib.sha256(b"".join(t.numpy().tobytes() for t in result.model.state_dict().values())).hexdigest()
        print(f"accuracy {result.reports[-1]['test_accuracy']:.3f}, sha256 {sha}")


if __name__ == "__main__":
    main()

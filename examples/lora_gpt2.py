"""A small GPT-2 with a LoRA adapter, trained by four speakers who share nothing but the adapter.

The texts are made up here, and so is the base model: it learns the common language for a few seconds, and is then
frozen. Every speaker has a favourite subject of its own. From the root of the checkout, alone or on several ranks:

    python examples/lora_gpt2.py
    torchrun --standalone --nproc-per-node=2 examples/lora_gpt2.py
    mpiexec -n 2 python -m mpi4py examples/lora_gpt2.py

All of them print the same adapter, to the last bit. With a folder as argument, the script writes the base model, its
tokenizer and the lines there, for `fedmpi train --model hf:... --data hf:...`: docs/transformers.md continues there.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import fedmpi
from fedmpi.plugins.torchvision import ready_torchvision

ready_torchvision()  # transformers imports torchvision: needed only where that does not fit torch
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast  # noqa: E402

LETTERS = "\nabcdefghijklmnopqrstuvwxyz .,"  # a token each; a line ends with the first
LENGTH = 64
WHO = ["the king", "a fool", "my lord", "the queen", "a ghost", "good night"]
DOES = ["sees", "loves", "hears", "fears", "brings", "takes"]
COMMON = ["the cold wind", "a warm house", "the old road", "the quick fox", "jumping over", "my lazy black dog"]
FAVOURITES = {  # speaker: what it speaks of
    "sailor": ["the stormy sea", "a broken mast", "the harbour bell"],
    "gardener": ["the red rose", "an apple tree", "the winter frost"],
    "soldier": ["the sharp sword", "a cold camp", "the marching drum"],
    "cook": ["the sour soup", "a silver spoon", "the burning bread"],
}


def lines(things: list[str], count: int, rng: np.random.Generator) -> list[str]:
    """Return made-up lines about some things."""
    words = [[str(rng.choice(some)) for some in (WHO, DOES, things)] for _ in range(count)]
    return [" ".join(line) + "." for line in words]


def blocks(some: list[str]) -> dict[str, Tensor]:
    """Return lines as blocks of tokens. Labels repeat them: the model is asked for the next token."""
    tokens = torch.tensor([LETTERS.index(letter) for line in some for letter in line + "\n"])
    ids = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return {"input_ids": ids, "labels": ids}


def loss_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Return the mean loss of the next token."""
    return cross_entropy(model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def base_model(steps: int = 80) -> GPT2LMHeadModel:
    """Return a model that knows the common words, but nobody's favourites. The same on every rank: one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    shape = {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=len(LETTERS), bos_token_id=0, eos_token_id=0, **shape, **still))
    common = blocks(lines(COMMON, 400, np.random.default_rng(1)))["input_ids"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        ids = common[torch.randint(len(common), (16,))]
        loss = loss_of(model, ids)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


def write(folder: Path) -> None:
    """Write the base model with a tokenizer, and the speakers' lines, for the command line."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, "\n"))
    letters.pre_tokenizer, letters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    base_model().save_pretrained(folder / "base")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="\n", model_max_length=LENGTH)
    tokenizer.save_pretrained(folder / "base")
    rng = np.random.default_rng(0)
    rows = [{"text": line, "speaker": name} for name, things in FAVOURITES.items() for line in lines(things, 120, rng)]
    (folder / "lines.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    """Train the adapter and print what it changes, and what it costs."""
    rng = np.random.default_rng(0)
    clients = {name: blocks(lines(things, 120, rng)) for name, things in FAVOURITES.items()}
    test = blocks([line for things in FAVOURITES.values() for line in lines(things, 20, rng)])
    base = base_model()
    with torch.no_grad():
        before = math.exp(loss_of(base, test["input_ids"]))
    result = fedmpi.train(
        base,
        clients,
        test,
        lora="r=8,alpha=16,targets=c_attn+c_proj+c_fc",
        rounds=5,
        local={"lr": 0.1, "batch": 8},
        mask="gma",
        evaluate="perplexity",
        threads=1,
        quiet=True,
    )
    if result.rank == 0:
        last, adapter = result.reports[-1], [p for n, p in result.model.named_parameters() if "lora_" in n]
        sha = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in adapter)).hexdigest()
        print(f"perplexity {before:.2f} before, {last['test_perplexity']:.2f} after; adapter {sha}")
        whole = 4 * sum(p.numel() for p in base.parameters())
        print(f"bytes per round: {last['client_bytes_up'] // last['clients']} per client up, instead of {whole}")
        print(f"bytes per round between ranks: {last['bytes_sent']}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        write(Path(sys.argv[1]))
    else:
        main()

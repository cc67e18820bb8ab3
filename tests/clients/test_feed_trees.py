"""Training on samples of several tensors: in memory and from Datasets, padded and of any length, on any ranks."""

from __future__ import annotations

import types
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from federation import SIZES
from shell import CPU
from test_feed import Items, batch, final
from torch import Tensor, nn

import fedmpi
from fedmpi.clients.feed import ArrayFeed, DatasetFeed
from fedmpi.data import Arrays, Data, Datasets, Pad, as_data
from fedmpi.data.objective import CAUSAL, Objective
from fedmpi.data.trees import IGNORE

TOKENS = 11


class Reader(nn.Module):
    """A small causal language model that takes and returns what those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(TOKENS, 8), nn.GRU(8, 8, batch_first=True), nn.Linear(8, TOKENS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> types.SimpleNamespace:
        assert input_ids.dtype == torch.int64 and attention_mask.dtype == torch.int64
        hidden, _ = self.mix(self.embed(input_ids) * attention_mask.unsqueeze(2))
        return types.SimpleNamespace(logits=self.head(hidden))


def sentence(index: int) -> dict[str, Any]:
    """Return a sentence of 2 to 6 tokens, as a tokenizer gives it: lists of numbers."""
    rng = torch.Generator().manual_seed(index)
    ids = torch.randint(1, TOKENS, (2 + index % 5,), generator=rng).tolist()
    return {"input_ids": ids, "labels": ids}


def sentences(count: int, offset: int = 0) -> Items:
    return Items(*(sentence(offset + index) for index in range(count)))


def as_sets() -> Datasets:
    return Datasets(sentences(sum(SIZES)), sentences(20, 500), name="text", collate=Pad(), tokens=TOKENS)


def as_arrays() -> Data:
    """The same sentences, all padded to the longest."""
    pad = Pad()
    parts = [
        pad([items[index] for index in range(len(items))]) for items in (sentences(sum(SIZES)), sentences(20, 500))
    ]
    return as_data(*parts, name="text")


def test_a_batch_is_as_long_as_its_longest_sentence_from_either_source() -> None:
    data = as_arrays()
    assert isinstance(data, Arrays) and data.goal is CAUSAL
    feeds = ArrayFeed(data, CPU), DatasetFeed(as_sets(), CPU)
    for chosen, longest in (([0, 5], 2), ([1, 2], 4), ([4, 0, 1], 6)):
        (x, y), (other_x, other_y) = (feed.train(batch(chosen)) for feed in feeds)
        assert x["input_ids"].shape == (len(chosen), longest) and y.shape == x["input_ids"].shape
        assert torch.equal(y, other_y) and list(x) == list(other_x)
        assert all(torch.equal(x[name], other_x[name]) for name in x)
        assert (y == IGNORE).equal(x["attention_mask"] == 0)


def test_training_on_padded_sentences_has_the_same_bits_from_either_source_on_any_ranks() -> None:
    expected = final(as_sets(), 1, Reader)
    for data, ranks in ((as_sets(), 2), (as_sets(), 3), (as_arrays(), 1), (as_arrays(), 2)):
        assert torch.equal(final(data, ranks, Reader), expected), ranks


@pytest.mark.processes
def test_worker_processes_change_nothing_and_stay_for_the_next_client() -> None:
    assert torch.equal(final(as_sets(), 1, Reader, workers=2), final(as_sets(), 1, Reader))
    feed = DatasetFeed(as_sets(), CPU, workers=2)
    list(feed.ahead(iter([batch([1]), batch([2])])))
    (pool,) = feed.idle
    started = [worker.pid for worker in pool.loader._iterator._workers]  # type: ignore[union-attr]
    list(feed.test([torch.tensor([1]), torch.tensor([2])]))
    list(feed.ahead(iter([batch([3])])))
    assert feed.idle == [pool], "one pool for all clients, and for both parts"
    assert [worker.pid for worker in pool.loader._iterator._workers] == started  # type: ignore[union-attr]
    feed.close()
    assert not feed.idle


class Two(nn.Module):
    """A model of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4), nn.Linear(2, 4)

    def forward(self, x: Tensor, z: Tensor) -> tuple[Tensor, str]:
        return self.one(x) + self.other(z), "what the objective does not read"


def two(count: int, seed: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rng = torch.Generator().manual_seed(seed)
    x, z = torch.randn(count, 3, generator=rng), torch.randn(count, 2, generator=rng)
    return (x, z), (x.sum(1) > z.sum(1)).long()


def test_a_tuple_of_inputs_is_the_arguments_of_the_model() -> None:
    pairs, tests = two(60, 0), two(40, 1)
    clients = [((pairs[0][0][i::3], pairs[0][1][i::3]), pairs[1][i::3]) for i in range(3)]
    result = fedmpi.train(Two(), clients, tests, rounds=15, lr=0.3, quiet=True)
    assert result.reports[-1]["test_accuracy"] > 0.8


def reading(outputs: Any, given: Any, reduction: str) -> Tensor:
    """The loss over the positions that the batch's own mask has, times a weight per sample that the model ignores."""
    loss = F.cross_entropy(outputs.logits.transpose(1, 2), given["labels"], reduction="none", ignore_index=IGNORE)
    loss = (loss * given["attention_mask"]).sum(1)
    return loss.sum() / len(loss) if reduction == "mean" else loss.sum()


class Counting(Reader):
    """The same, with the labels among the inputs, as for models that compute their own loss."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> types.SimpleNamespace:  # type: ignore[override]
        assert labels.shape == input_ids.shape
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("source", [as_sets, as_arrays])
def test_an_objective_may_read_the_whole_batch(source: Any) -> None:
    goal = Objective(
        "read", reading, "hits", lambda o, b: (o.logits.argmax(2) == b["labels"]).sum(), batch=True, by_class=False
    )
    data = source()
    moved = final(replace(data, objective=goal), 2, Counting)
    assert torch.equal(moved, final(replace(data, objective=goal), 1, Counting)) and moved.isfinite().all()

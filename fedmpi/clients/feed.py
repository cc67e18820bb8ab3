"""From samples by number to what a model takes, on one rank's device.

`ArrayFeed` has everything in memory: a batch is picked by index, augmented, rendered and normalised when it is used.
`DatasetFeed` reads a user's map-style Dataset, item by item, in this process or in `workers` others that read ahead.
What a Dataset's own transforms draw (from torch, numpy or random) is seeded for every item, so that it depends on
(seed, round, client, batch, sample) and not on the workers.
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from ..data import Arrays, Data, Datasets
from ..errors import RunError, UserError, one_line
from .augment import make_augment

log = logging.getLogger("fedmpi")

AHEAD = 2**19  # elements of samples that are made ready at once

Pair = tuple[Tensor, Tensor]
"""what the model takes, and the labels"""


class Batch(NamedTuple):
    """Train samples by their index, the seed of what is drawn for them, and, where they were read ahead, themselves."""

    samples: Tensor
    seed: int
    data: Pair | None = None
    version: int = 0
    """that of the data's memory when it was written: a model may have overwritten its inputs since"""


class Feed(Protocol):
    """The data of a task."""

    tests: int
    """how many test samples there are"""

    def train(self, batch: Batch) -> Pair:
        """A training batch."""

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches, read ahead where reading takes time."""

    def test(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Test samples, block by block."""

    def plain(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Train samples as their clients have them, but not augmented, block by block."""


class ArrayFeed:
    """Data in memory."""

    def __init__(self, arrays: Arrays, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.kind, self.device, self.dtype, self.tests = arrays.kind, device, dtype, len(arrays.test_y)
        self.x, self.test_x = arrays.x.to(device), arrays.test_x.to(device)
        whole = arrays.goal.whole
        self.y, self.test_y = (t.to(device) if whole else t.to(device, dtype) for t in (arrays.y, arrays.test_y))
        self.augment = make_augment(arrays.augment) if self.kind == "images" else None
        self.styles = arrays.styles
        self.style: Tensor | None = None
        self.test_style: Tensor | None = None
        if self.styles is not None:
            assert arrays.style is not None and arrays.test_style is not None, "call assign_styles first"
            self.table = self.styles.table.to(device, dtype)
            self.style, self.test_style = arrays.style.to(device), arrays.test_style.to(device)
        if self.kind == "images":
            self.scale, self.shift = (
                torch.tensor(v, device=device, dtype=dtype).view(1, -1, 1, 1) for v in normalisation(arrays)
            )

    def train(self, batch: Batch) -> Pair:
        """A training batch, augmented."""
        if batch.data is not None and batch.data[0]._version == batch.version:
            return batch.data
        return self.pick(batch.samples, batch.seed)

    def pick(self, samples: Tensor, seed: int) -> Pair:
        """Training samples by their index, augmented from the seed."""
        raw = self.x[samples]
        if self.augment is not None:
            raw = self.augment(raw, seed)
        return self.inputs(raw, None if self.style is None else self.style[samples]), self.y[samples]

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches with their data, made for several at once: a call of torch costs as much as a small batch. What
        an augmentation draws belongs to one batch, so there they are as they are."""
        if self.augment is not None:
            yield from batches
            return
        waiting = iter(batches)
        for first in waiting:
            most = max(1, AHEAD // max(1, self.x[0].numel() * len(first.samples)))
            some = [first, *itertools.islice(waiting, most - 1)]
            x, y = self.pick(torch.cat([batch.samples for batch in some]), 0)
            lengths = [len(batch.samples) for batch in some]
            for batch, data in zip(some, zip(*(torch.split(t, lengths) for t in (x, y)), strict=True), strict=True):
                yield batch._replace(data=data, version=x._version)

    def test(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Test samples, block by block."""
        return self.unchanged(blocks, self.test_x, self.test_y, self.test_style)

    def plain(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Train samples, rendered as their clients have them, block by block."""
        return self.unchanged(blocks, self.x, self.y, self.style)

    def unchanged(self, blocks: Sequence[Tensor], x: Tensor, y: Tensor, style: Tensor | None) -> Iterator[Pair]:
        """Samples by their index, block by block, as they are."""
        for block in blocks:
            samples = block.to(self.device)
            yield self.inputs(x[samples], None if style is None else style[samples]), y[samples]

    def inputs(self, raw: Tensor, style: Tensor | None = None) -> Tensor:
        """Samples as the model takes them: images rendered and normalised, tokens as indices."""
        if self.kind == "sequences":
            return raw.to(torch.int64)
        numbers = raw.to(self.dtype)
        if self.kind == "numbers":
            return numbers
        if self.styles is not None and style is not None:
            numbers = self.styles.apply_style(numbers, self.table[style])
        return numbers.mul_(self.scale).add_(self.shift)


def normalisation(arrays: Arrays) -> tuple[list[float], list[float]]:
    """Scale and shift a channel, so that raw * scale + shift has mean 0 and deviation 1 over the training set."""
    mean, std = np.asarray(arrays.mean), np.asarray(arrays.std)
    return (1 / (255 * std)).tolist(), (-mean / std).tolist()


class Seeded(Dataset[Any]):
    """A Dataset whose items are asked for by (index, seed)."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return self.dataset[index]


class DatasetFeed:
    """Data behind map-style Datasets."""

    def __init__(
        self, datasets: Datasets, device: torch.device, dtype: torch.dtype = torch.float32, workers: int = 0
    ) -> None:
        self.parts = {"train": Seeded(datasets.train), "test": Seeded(datasets.test)}
        self.device, self.dtype, self.workers = device, dtype, workers
        self.datasets, self.whole, self.tests = datasets, datasets.goal.whole, datasets.tests

    def train(self, batch: Batch) -> Pair:
        """A training batch, as it was read ahead or read now."""
        return self.convert(batch.data or next(self.read("train", [keys_of(batch.samples, batch.seed)], workers=0)))

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """The batches with their data."""
        wanted = list(batches)
        pairs = self.read("train", [keys_of(b.samples, b.seed) for b in wanted], self.workers)
        return (b._replace(data=pair) for b, pair in zip(wanted, pairs, strict=True))

    def test(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Test samples, block by block."""
        return self.unchanged("test", blocks)

    def plain(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Train samples, block by block; a Dataset's own transforms cannot be left out."""
        return self.unchanged("train", blocks)

    def unchanged(self, part: str, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Samples by their index, block by block; what their transforms draw is always the same."""
        try:
            for pair in self.read(part, [keys_of(block, 0) for block in blocks], self.workers):
                yield self.convert(pair)
        except UserError:
            raise
        except Exception as error:
            raise RunError(
                f"{part} samples of '{self.datasets.name}' cannot be read and put together: {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error

    def read(self, part: str, keys: list[list[tuple[int, int]]], workers: int) -> Iterator[Pair]:
        """Pairs of samples and labels for lists of keys, in their order."""
        items, done = self.parts[part], 0
        try:
            if workers and keys:
                for pair in DataLoader(items, batch_sampler=keys, num_workers=min(workers, len(keys))):
                    yield pair
                    done += 1
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):  # an item's own error begins otherwise
                raise
            log.warning("a process that reads ahead died (%s); reading on without", one_line(error))
        for some in keys[done:]:
            yield collate(items, some)

    def convert(self, pair: Pair) -> Pair:
        """A pair on the device, in the kinds that model and loss take; labels that are no classes are refused."""
        x, y = pair
        if self.whole and not 0 <= int(y.min()) <= int(y.max()) < self.datasets.kinds:
            raise self.datasets.wrong_labels(int(y.max() if int(y.min()) >= 0 else y.min()))
        x, y = x.to(self.device), y.to(self.device)
        x = x.to(self.dtype) / 255 if x.dtype == torch.uint8 and x.ndim == 4 else x
        x = x.to(self.dtype) if x.is_floating_point() else x.to(torch.int64)
        return x, y.to(torch.int64 if self.whole else self.dtype)


def collate(items: Seeded, keys: list[tuple[int, int]]) -> Pair:
    """Items put together; read with one thread, as worker processes do: the last bits of long sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pair: Pair = default_collate([items[key] for key in keys])
    finally:
        torch.set_num_threads(threads)
    return pair


def keys_of(samples: Tensor, seed: int) -> list[tuple[int, int]]:
    """Samples with a seed each, of 63 bits."""
    return [(i, (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**63) for i in samples.tolist()]


def make_feed(data: Data, device: torch.device, dtype: torch.dtype = torch.float32, workers: int = 0) -> Feed:
    """The feed for data of either kind."""
    return ArrayFeed(data, device, dtype) if isinstance(data, Arrays) else DatasetFeed(data, device, dtype, workers)

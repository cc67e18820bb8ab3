"""Turn sample indices into model inputs on one rank's device.

`ArrayFeed` holds everything in memory: a batch is indexed, augmented, coloured and normalised when it is used.
`DatasetFeed` reads a user's map-style Dataset item by item, in this process or in `workers` processes that prefetch.
The random state of torch, numpy and random is seeded per item, so that a Dataset's own transforms depend on (seed,
round, client, batch, sample) and not on the workers.
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
from ..device import CPU, upload
from ..errors import RunError, UserError, one_line
from .augment import make_augment

log = logging.getLogger("fedmpi")

AHEAD = 2**19  # sample elements that are prefetched at once

Pair = tuple[Tensor, Tensor]  # model inputs and labels


class Batch(NamedTuple):
    """Indices of train samples, the seed of their random draws, and the samples themselves if they were prefetched."""

    samples: Tensor
    seed: int
    data: Pair | None = None
    drawn: Tensor | None = None  # random numbers of the augmentation, if they are on the device already
    version: int = 0  # torch's version counter of the prefetched inputs: a model that overwrites them raises it


class Feed(Protocol):
    """The data of a task."""

    tests: int  # number of test samples
    index_device: torch.device  # where sample indices are read

    def train(self, batch: Batch) -> Pair:
        """Return the inputs and labels of a training batch."""

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches, with their data prefetched where that saves time."""

    def test(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Yield blocks of test samples."""

    def plain(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Yield blocks of train samples as their clients have them, without augmentation."""


class ArrayFeed:
    """A feed from arrays in memory: that of the device, or with `on_host` the host's, from where batches are copied."""

    def __init__(
        self, arrays: Arrays, device: torch.device, dtype: torch.dtype = torch.float32, on_host: bool = False
    ) -> None:
        self.kind, self.device, self.dtype, self.tests = arrays.kind, device, dtype, len(arrays.test_y)
        self.index_device = home = CPU if on_host else device
        self.x, self.test_x = arrays.x.to(home), arrays.test_x.to(home)
        whole = arrays.goal.whole
        self.y, self.test_y = (t.to(home) if whole else t.to(home, dtype) for t in (arrays.y, arrays.test_y))
        self.augment = make_augment(arrays.augment) if self.kind == "images" else None
        self.styles = arrays.styles
        self.style: Tensor | None = None
        self.test_style: Tensor | None = None
        if self.styles is not None:
            assert arrays.style is not None and arrays.test_style is not None, "call styles.assign_styles first"
            self.table = self.styles.table.to(device, dtype)
            self.style, self.test_style = arrays.style.to(home), arrays.test_style.to(home)
        if self.kind == "images":  # raw * scale + shift has mean 0 and deviation 1 on the train set, per channel
            mean, std = np.asarray(arrays.mean), np.asarray(arrays.std)
            numbers = ((1 / (255 * std)).tolist(), (-mean / std).tolist())
            self.scale, self.shift = (
                torch.tensor(v, device=device, dtype=dtype).view(1, -1, 1, 1) for v in numbers
            )

    def train(self, batch: Batch) -> Pair:
        if batch.data is not None and batch.data[0]._version == batch.version:
            return batch.data
        return self.pick(batch.samples, batch.seed, batch.drawn)

    def pick(self, samples: Tensor, seed: int, drawn: Tensor | None = None) -> Pair:
        """Return training samples by index, augmented with draws from the seed."""
        raw, y = upload(self.x[samples], self.device), upload(self.y[samples], self.device)
        if self.augment is not None:
            raw = self.augment(raw, seed) if drawn is None else self.augment.apply(raw, drawn)
        return self.inputs(raw, None if self.style is None else self.style[samples]), y

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the batches with their data, prepared for several at once: the overhead of a torch call is as large as
        the work of a small batch. Augmented batches are not prefetched, but their draws are copied at once."""
        if self.augment is not None:
            if not (wanted := list(batches)):
                return
            draws = [self.augment.draw(len(batch.samples), batch.seed) for batch in wanted]
            on_device = upload(torch.cat(draws, 1), self.device)
            for batch, drawn in zip(wanted, torch.split(on_device, [d.shape[1] for d in draws], 1), strict=True):
                yield batch._replace(drawn=drawn)
            return
        waiting = iter(batches)
        for first in waiting:
            most = max(1, AHEAD // max(1, self.x[0].numel() * len(first.samples)))
            some = [first, *itertools.islice(waiting, most - 1)]
            x, y = self.pick(torch.cat([batch.samples for batch in some]), 0)
            lengths = [len(batch.samples) for batch in some]
            pairs = zip(torch.split(x, lengths), torch.split(y, lengths), strict=True)
            for batch, pair in zip(some, pairs, strict=True):
                yield batch._replace(data=pair, version=x._version)

    def test(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        return self.unaugmented(blocks, self.test_x, self.test_y, self.test_style)

    def plain(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        return self.unaugmented(blocks, self.x, self.y, self.style)

    def unaugmented(self, blocks: Sequence[Tensor], x: Tensor, y: Tensor, style: Tensor | None) -> Iterator[Pair]:
        """Yield blocks of samples by index."""
        for block in blocks:
            samples = upload(block, self.index_device)
            raw = upload(x[samples], self.device)
            yield self.inputs(raw, None if style is None else style[samples]), upload(y[samples], self.device)

    def inputs(self, raw: Tensor, style: Tensor | None = None) -> Tensor:
        """Return samples as model inputs: images coloured or turned and normalised, tokens as indices."""
        if self.kind == "sequences":
            return raw.to(torch.int64)
        numbers = raw.to(self.dtype)
        if self.kind == "numbers":
            return numbers
        if self.styles is not None and style is not None:
            numbers = self.styles.apply_style(numbers, self.table[upload(style, self.device)])
        return numbers.mul_(self.scale).add_(self.shift)


class Seeded(Dataset[Any]):
    """A Dataset with keys (index, seed): seeds all random generators before it reads an item."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset

    def __getitem__(self, key: tuple[int, int]) -> Any:
        index, seed = key
        random.seed(seed)
        np.random.seed(seed % 2**32)
        torch.default_generator.manual_seed(seed)
        return self.dataset[index]


class DatasetFeed:
    """A feed from map-style Datasets."""

    def __init__(
        self, datasets: Datasets, device: torch.device, dtype: torch.dtype = torch.float32, workers: int = 0
    ) -> None:
        self.parts = {"train": Seeded(datasets.train), "test": Seeded(datasets.test)}
        self.device, self.dtype, self.workers, self.index_device = device, dtype, workers, CPU
        self.datasets, self.whole, self.tests = datasets, datasets.goal.whole, datasets.tests

    def train(self, batch: Batch) -> Pair:
        return self.convert(batch.data or next(self.read("train", [keys_of(batch.samples, batch.seed)], workers=0)))

    def ahead(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        wanted = list(batches)
        pairs = self.read("train", [keys_of(b.samples, b.seed) for b in wanted], self.workers)
        return (b._replace(data=pair) for b, pair in zip(wanted, pairs, strict=True))

    def test(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        return self.with_fixed_seed("test", blocks)

    def plain(self, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Yield blocks of train samples; a Dataset's own transforms cannot be skipped."""
        return self.with_fixed_seed("train", blocks)

    def with_fixed_seed(self, part: str, blocks: Sequence[Tensor]) -> Iterator[Pair]:
        """Yield blocks of samples by index; their transforms draw the same numbers every time."""
        try:
            for pair in self.read(part, [keys_of(block, 0) for block in blocks], self.workers):
                yield self.convert(pair)
        except UserError:
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {one_line(error)}"
            raise RunError(f"{part} samples of '{self.datasets.name}' cannot be read and collated: {what}") from error

    def read(self, part: str, keys: list[list[tuple[int, int]]], workers: int) -> Iterator[Pair]:
        """Yield inputs and labels for each list of keys, in order."""
        items, done = self.parts[part], 0
        try:
            if workers and keys:
                for pair in DataLoader(items, batch_sampler=keys, num_workers=min(workers, len(keys))):
                    yield pair
                    done += 1
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):  # then an item raised it
                raise
            log.warning("a worker process died (%s); continuing without workers", one_line(error))
        for some in keys[done:]:
            yield collate(items, some)

    def convert(self, pair: Pair) -> Pair:
        """Move a pair to the device and convert it to the types of model and loss; check the range of class labels."""
        x, y = pair
        if self.whole and not 0 <= int(y.min()) <= int(y.max()) < self.datasets.kinds:
            raise self.datasets.wrong_labels(int(y.max() if int(y.min()) >= 0 else y.min()))
        x, y = upload(x, self.device), upload(y, self.device)
        x = x.to(self.dtype) / 255 if x.dtype == torch.uint8 and x.ndim == 4 else x
        x = x.to(self.dtype) if x.is_floating_point() else x.to(torch.int64)
        return x, y.to(torch.int64 if self.whole else self.dtype)


def collate(items: Seeded, keys: list[tuple[int, int]]) -> Pair:
    """Read and collate items with one thread, as worker processes do: the last bits of long sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        pair: Pair = default_collate([items[key] for key in keys])
    finally:
        torch.set_num_threads(threads)
    return pair


def keys_of(samples: Tensor, seed: int) -> list[tuple[int, int]]:
    """Return (index, seed) per sample, with 63-bit seeds."""
    return [(i, (seed + (i + 1) * 0x9E3779B97F4A7C15) % 2**63) for i in samples.tolist()]


def make_feed(
    data: Data, device: torch.device, dtype: torch.dtype = torch.float32, workers: int = 0, on_host: bool = False
) -> Feed:
    """Return the feed for data of either kind."""
    if isinstance(data, Arrays):
        return ArrayFeed(data, device, dtype, on_host)
    assert isinstance(data, Datasets)
    return DatasetFeed(data, device, dtype, workers)

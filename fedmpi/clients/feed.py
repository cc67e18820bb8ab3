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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from ..data import Arrays, Data, Datasets
from ..data.trees import IGNORE, Tree, as_pair, mapped, trimmed, versions
from ..device import CPU, upload
from ..errors import RunError, UserError, one_line
from .augment import make_augment

log = logging.getLogger("fedmpi")

AHEAD = 2**19  # sample elements that are prefetched at once

Pair = tuple[Tree, Tree]  # model inputs and labels


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

    def close(self) -> None:
        """End the processes that read for this feed; it can still be used, and then starts others."""


class ArrayFeed:
    """A feed from arrays in memory: that of the device, or with `on_host` the host's, from where batches are copied."""

    def __init__(
        self, arrays: Arrays, device: torch.device, dtype: torch.dtype = torch.float32, on_host: bool = False
    ) -> None:
        self.kind, self.device, self.dtype, self.tests = arrays.kind, device, dtype, len(arrays.test_y)
        self.index_device = home = CPU if on_host else device
        self.x, self.test_x = (mapped(lambda t: t.to(home), x) for x in (arrays.x, arrays.test_x))
        self.trims = self.kind == "trees" and device.type == "cpu"  # elsewhere the host would wait for the device
        self.batch = arrays.goal.batch
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
            self.scale, self.shift = (torch.tensor(v, device=device, dtype=dtype).view(1, -1, 1, 1) for v in numbers)

    def train(self, batch: Batch) -> Pair:
        if batch.data is not None and versions(batch.data[0]) == batch.version:
            return batch.data
        return self.pick(batch.samples, batch.seed, batch.drawn)

    def pick(self, samples: Tensor, seed: int, drawn: Tensor | None = None) -> Pair:
        """Return training samples by index, augmented with draws from the seed."""
        raw, y = self.rows(self.x, samples), self.rows(self.y, samples)
        if self.augment is not None:
            raw = self.augment(raw, seed) if drawn is None else self.augment.apply(raw, drawn)
        return self.finished(raw, y, None if self.style is None else self.style[samples])

    def close(self) -> None:
        return

    def rows(self, x: Tree, samples: Tensor) -> Tree:
        """Return samples by index, on the device."""
        return mapped(lambda t: upload(t[samples], self.device), x)

    def finished(self, raw: Tree, y: Tensor, style: Tensor | None) -> Pair:
        """Return samples and labels as model and objective take them."""
        x = self.inputs(raw, style)
        if self.trims:
            x, y = trimmed(x, y)
        return whole_batch(x, y) if self.batch else (x, y)

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
        if self.kind == "trees":  # batches differ in length
            for batch in batches:
                pair = self.pick(batch.samples, batch.seed)
                yield batch._replace(data=pair, version=versions(pair[0]))
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

    def unaugmented(self, blocks: Sequence[Tensor], x: Tree, y: Tensor, style: Tensor | None) -> Iterator[Pair]:
        """Yield blocks of samples by index."""
        for block in blocks:
            samples = upload(block, self.index_device)
            raw, labels = self.rows(x, samples), self.rows(y, samples)
            yield self.finished(raw, labels, None if style is None else style[samples])

    def inputs(self, raw: Tree, style: Tensor | None = None) -> Tree:
        """Return samples as model inputs: images coloured or turned and normalised, tokens as indices."""
        if self.kind == "trees":
            return mapped(lambda t: as_input(t, self.dtype), raw)
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


class Parts(Dataset[Any]):
    """Several Datasets with keys, as one whose keys begin with the name of the part."""

    def __init__(self, parts: Mapping[str, Seeded]) -> None:
        self.parts = parts

    def __getitem__(self, key: tuple[str, tuple[int, int]]) -> Any:
        part, inner = key
        return self.parts[part][inner]


class Pool:
    """Worker processes that read batches, one iteration at a time."""

    def __init__(self, parts: Mapping[str, Seeded], collate: Callable[[Sequence[Any]], Any], workers: int) -> None:
        self.keys: list[list[tuple[str, tuple[int, int]]]] = []
        self.loader = DataLoader(
            Parts(parts), batch_sampler=self.keys, num_workers=workers, collate_fn=collate, persistent_workers=True
        )

    def read(self, part: str, keys: list[list[tuple[int, int]]]) -> Iterator[Any]:
        """Yield a batch for each list of keys, in order."""
        self.keys[:] = [[(part, key) for key in some] for some in keys]  # read by the loader when it starts
        return iter(self.loader)


class DatasetFeed:
    """A feed from map-style Datasets."""

    def __init__(
        self, datasets: Datasets, device: torch.device, dtype: torch.dtype = torch.float32, workers: int = 0
    ) -> None:
        self.parts = {"train": Seeded(datasets.train), "test": Seeded(datasets.test)}
        self.device, self.dtype, self.workers, self.index_device = device, dtype, workers, CPU
        self.datasets, self.goal, self.tests = datasets, datasets.goal, datasets.tests
        self.idle: list[Pool] = []

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
        done = 0
        if workers and keys:
            for pair in self.prefetched(part, keys):
                yield pair
                done += 1
        items = self.parts[part]
        for some in keys[done:]:
            with one_thread():
                batch = self.datasets.collate([items[key] for key in some])
            yield as_pair(batch)

    def close(self) -> None:
        self.idle.clear()

    def prefetched(self, part: str, keys: list[list[tuple[int, int]]]) -> Iterator[Pair]:
        """Yield inputs and labels from worker processes, which then wait for the next client; stop if one dies."""
        pool = self.idle.pop() if self.idle else Pool(self.parts, self.datasets.collate, self.workers)
        try:
            yield from map(as_pair, pool.read(part, keys))
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker"):  # then an item raised it
                self.idle.append(pool)
                raise
            log.warning("a worker process died (%s); continuing without workers", one_line(error))
        else:
            self.idle.append(pool)

    def convert(self, pair: Pair) -> Pair:
        """Move a pair to the device and convert it to the types of model and loss; check the range of class labels."""
        x, y = pair
        if self.goal.whole and isinstance(y, Tensor):
            self.check_range(y if y.dim() < 2 else y[y != IGNORE])
        x, y = (mapped(lambda t: upload(t, self.device), tree) for tree in (x, y))
        if isinstance(x, Tensor) and x.dtype == torch.uint8 and x.ndim == 4:
            x = x.to(self.dtype) / 255
        x = x.to(torch.int64) if isinstance(x, Tensor) and x.dtype == torch.bool else x
        x = mapped(lambda t: as_input(t, self.dtype), x)
        if isinstance(y, Tensor):
            y = y.to(torch.int64 if self.goal.whole else self.dtype)
        else:
            y = mapped(lambda t: as_input(t, self.dtype), y)
        return whole_batch(x, y) if self.goal.batch else (x, y)

    def check_range(self, y: Tensor) -> None:
        """Raise a UserError for a label that is not one of the classes."""
        low, high = (int(y.min()), int(y.max())) if y.numel() else (0, 0)
        if low < 0 or (self.datasets.kinds and high >= self.datasets.kinds):
            raise self.datasets.wrong_labels(high if low >= 0 else low)


def as_input(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a tensor in the type that models take: floats in that of the parameters, integers as int64."""
    return t.to(dtype) if t.is_floating_point() else t if t.dtype == torch.bool else t.to(torch.int64)


def whole_batch(x: Tree, y: Tree) -> Pair:
    """Return what model and objective get if the objective asks for whole batches: a dict has the labels, too."""
    if isinstance(x, dict):
        x = {**x, "labels": y}
        return x, x
    return x, (x, y)


@contextmanager
def one_thread() -> Iterator[None]:
    """Read and collate items with one thread, as worker processes do: the last bits of long sums depend on it."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


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

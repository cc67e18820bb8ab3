"""A user's own data: tensors, map-style Datasets, or one of either per client.

Data that do not fit into memory are `Datasets`, whose items are read when they are needed. Everything else becomes
`Arrays`. `--data package.module:name` names a function that returns either, or something that `as_data` accepts.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fedmpi.data.arrays import Arrays, Data, Ints
from fedmpi.data.objective import Objective
from fedmpi.data.store import moments
from fedmpi.errors import UserError, one_line
from fedmpi.plugins import call_with, import_path

log = logging.getLogger("fedmpi")


@dataclass(frozen=True)
class Datasets(Data):
    """Map-style Datasets of (sample, label) pairs, for data that are not held in memory.

    A sample is a float tensor (used as it is), a uint8 image [channels, height, width] (divided by 255), or a sequence
    of integers, each below `tokens`. A label is an integer, or a float (tensor) to predict.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int = 0  # 0: the largest label plus one
    name: str = "your data"
    labels: Any = None  # of the train samples; None: the Dataset's attribute targets or labels, else all items are read
    owner: Any = None  # the client of each train sample, 0 .. k - 1
    tokens: int = 0
    objective: Objective | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for part, dataset in (("train", self.train), ("test", self.test)):
            if not is_map(dataset):
                raise self.refuse(f"a {part} part of {type(dataset).__name__}", "a map-style Dataset")
            if not length(dataset):
                raise self.refuse(f"no {part} sample", "at least one")
            try:
                item = dataset[0]
            except Exception as error:
                raise self._unreadable(f"its first {part} item", error) from error
            if not isinstance(item, Sequence) or len(item) != 2 or not is_tensor(item[0]) or not is_label(item[1]):
                kinds = [type(v).__name__ for v in item] if isinstance(item, Sequence) else type(item).__name__
                fix = "for images add a transform such as torchvision's ToTensor()"
                raise self.refuse(f"{part} items of {kinds}", f"pairs of a tensor and a number or tensor: {fix}")
        if self.owner is not None:
            self.check_owner(np.asarray(self.owner))
        if self.goal.whole and self.sample[1].ndim and not self.classes:
            raise self.refuse("one label per position", "classes, the number of classes")
        if self.kind == "sequences" and self.tokens < 1:
            raise self.refuse("sequences", "tokens, the size of the vocabulary")
        found = labels_of(self.test) if self.goal.whole and self.classes else None
        if found is not None and found.dtype.kind in "iu" and int(found.max()) >= self.classes:
            raise self.wrong_labels(int(found.max()))

    def _unreadable(self, what: str, error: Exception) -> UserError:
        why = f"{what} raised {type(error).__name__}: {one_line(error)}"
        return UserError(f"data set '{self.name}' cannot be read: {why}")

    def wrong_labels(self, one: int) -> UserError:
        """Return the error for a label that is not one of the classes."""
        return self.refuse(f"labels like {one}", f"0 to {self.kinds - 1} for {self.kinds} classes")

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        x, y = self.train[0]
        return torch.as_tensor(x), torch.as_tensor(y)

    @property
    def tests(self) -> int:
        return length(self.test)

    @property
    def samples(self) -> int:
        return length(self.train)

    @property
    def kind(self) -> str:
        x = self.sample[0]
        return "sequences" if not x.is_floating_point() and x.ndim == 1 else "numbers"

    @cached_property
    def kinds(self) -> int:
        return self.classes or int(self.known_labels.max()) + 1

    @property
    def owners(self) -> Ints | None:
        return None if self.owner is None else np.asarray(self.owner).astype(np.int64)

    def class_labels(self, needed: bool) -> Ints | None:
        if not self.goal.whole:
            return None
        if not needed and self.labels is None and labels_of(self.train) is None:
            return None
        return self.known_labels

    @cached_property
    def known_labels(self) -> Ints:
        """Return the class of each train sample: given, an attribute of the Dataset, or read item by item."""
        found = self.labels if self.labels is not None else labels_of(self.train)
        if found is None:
            log.info("reading the labels of all %d samples of '%s'; pass `labels` to skip it", self.samples, self.name)
            found = []
            try:
                for index in range(self.samples):  # of several labels per item, the last one
                    found.append(int(torch.as_tensor(self.train[index][1]).reshape(-1)[-1]))
            except Exception as error:
                raise self._unreadable(f"the label of train item {len(found)}", error) from error
        labels = np.asarray(found)
        if labels.shape != (self.samples,) or labels.dtype.kind not in "iu" or int(labels.min()) < 0:
            given = f"labels {labels.dtype} {list(labels.shape)}"
            raise self.refuse(given, f"an integer >= 0 for each of its {self.samples} samples")
        if self.classes and int(labels.max()) >= self.classes:
            raise self.wrong_labels(int(labels.max()))
        return labels.astype(np.int64)


def length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]


def labels_of(dataset: Dataset[Any]) -> npt.NDArray[Any] | None:
    """Return the labels that a Dataset holds, under the names that torch and torchvision use; None if it has none."""
    if isinstance(dataset, Subset):
        whole = labels_of(dataset.dataset)
        return None if whole is None else whole[np.asarray(dataset.indices)]
    if isinstance(dataset, ConcatDataset):
        parts = [labels_of(part) for part in dataset.datasets]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if len(known) == len(parts) else None
    if isinstance(dataset, TensorDataset):
        return dataset.tensors[-1].numpy()
    found = getattr(dataset, "targets", getattr(dataset, "labels", None))
    return None if found is None else np.asarray(found)


def load_own(path: str, root: Path | None) -> Data:
    """Return the data that the function at an import path returns; it may take `root`, the data root or None."""
    made = call_with("data set", path, import_path("data set", path), {"root": root})
    if isinstance(made, Arrays | Datasets):
        return made
    if isinstance(made, Sequence) and len(made) == 2:
        return as_data(made[0], made[1], path)
    raise UserError(
        f"data set '{path}' returned {type(made).__name__}; it must return Arrays, Datasets, or a pair of the train "
        "and the test part: see docs/own-data.md"
    )


def as_data(train: Any, test: Any, name: str = "your data") -> Data:
    """Return data made of a train and a test part. A part is a Dataset or a pair (samples, labels) of arrays; the train
    part may be a list or a dict of them, one per client."""
    if isinstance(train, Mapping):
        train = list(train.values())
    if is_part(train):
        parts, owner = [train], None
    elif isinstance(train, Sequence) and train and all(is_part(part) for part in train):
        parts = list(train)
        sizes = [len(part[1]) if is_pair(part) else length(part) for part in parts]
        if 0 in sizes:
            raise UserError(f"{name}: client {sizes.index(0)} has no samples; leave it out")
        owner = torch.from_numpy(np.repeat(np.arange(len(parts)), sizes))
    else:
        valid = "a Dataset, a pair (samples, labels) of arrays, or a list of these, one per client"
        raise UserError(f"{name} has a train part of {type(train).__name__}; it must be {valid}")
    if not is_part(test):
        valid = "a Dataset or a pair (samples, labels) of arrays"
        raise UserError(f"{name} has a test part of {type(test).__name__}; it must be {valid}")
    if all(is_pair(part) for part in (*parts, test)):
        return as_arrays(parts, test, name, owner)
    sets = [as_dataset(part) for part in parts]
    whole = sets[0] if owner is None else ConcatDataset(sets)
    return Datasets(whole, as_dataset(test), name=name, owner=owner)


def is_pair(part: Any) -> bool:
    """Return whether this is a pair (samples, labels) of arrays."""
    return isinstance(part, tuple | list) and len(part) == 2 and all(is_tensor(a) and a.ndim for a in part)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def is_label(value: Any) -> bool:
    """Return whether this is a number or a tensor of numbers."""
    return isinstance(value, int | float | np.number) or (is_tensor(value) and np.asarray(value).dtype.kind in "biuf")


def is_map(value: Any) -> bool:
    """Return whether this is a map-style Dataset."""
    return hasattr(value, "__getitem__") and hasattr(value, "__len__")


def is_part(part: Any) -> bool:
    """Return whether this is a Dataset or a pair of arrays."""
    plain = isinstance(part, Sequence | Mapping | Tensor | np.ndarray | str)
    return is_pair(part) or (is_map(part) and not plain)


def as_dataset(part: Any) -> Dataset[Any]:
    """Return a part as a Dataset."""
    made: Dataset[Any] = TensorDataset(*map(torch.as_tensor, part)) if is_pair(part) else part
    return made


def as_arrays(parts: list[Any], test: Any, name: str, owner: Tensor | None) -> Arrays:
    """Return pairs of arrays as one `Arrays`: grey images get a channel, labels become int64, and doubles floats."""
    samples, labels = ([torch.as_tensor(part[i]) for part in (*parts, test)] for i in (0, 1))
    samples = [x.unsqueeze(1) if x.dtype == torch.uint8 and x.ndim == 3 else x for x in samples]
    samples = [x.float() if x.is_floating_point() else x for x in samples]
    labels = [y.float() if y.is_floating_point() else y.to(torch.int64) for y in labels]
    for what, tensors in (("samples", samples), ("labels", labels)):
        shapes = {(t.dtype, t.shape[1:]) for t in tensors}
        if len(shapes) > 1:
            given = ", ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in shapes))
            raise UserError(f"{name} has {what} of different kinds: {given}; all parts must have the same")
    if not len(labels[-1]):
        raise UserError(f"{name} has no test sample; it needs at least one")
    one = len(parts) == 1  # no copy: it may be mapped from a file
    x, y = (tensors[0] if one else torch.cat(tensors[:-1]) for tensors in (samples, labels))
    mean, std = moments(x)
    std = tuple(s or 1.0 for s in std)  # a constant channel has 0
    tokens = highest(x, samples[-1]) + 1 if not x.is_floating_point() and x.ndim == 2 else 0
    classes = 0 if y.is_floating_point() else highest(y, labels[-1]) + 1
    return Arrays(name, classes, x, y, samples[-1], labels[-1], mean, std, owner=owner, tokens=tokens)


def highest(train: Tensor, test: Tensor) -> int:
    """Return the largest integer of both; -1 if the train part, which is refused later, is empty."""
    return int(max(train.max(), test.max())) if len(train) else -1

"""A user's own data: tensors, map-style Datasets, or one of either per client.

Data that do not fit into memory are `Datasets`, whose items are read when they are needed. Everything else becomes
`Arrays`. `--data package.module:name` names a function that returns either, or something that `as_data` accepts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
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
from fedmpi.data.trees import (
    PAD,
    Tree,
    as_pair,
    as_tree,
    collate,
    is_pair_of_trees,
    label_of,
    leaves,
    mapped,
    shapes,
    zipped,
)
from fedmpi.errors import UserError, one_line
from fedmpi.plugins import call_with, import_path

log = logging.getLogger("fedmpi")


@dataclass(frozen=True)
class Datasets(Data):
    """Map-style Datasets of (sample, label) pairs, or of dicts with `labels`, for data that are not held in memory.

    A sample is a float tensor (used as it is), a uint8 image [channels, height, width] (divided by 255), a sequence
    of integers, each below `tokens`, or a tuple or dict of tensors: the arguments of the model. A label is an integer,
    integers (one per position, of which -100 are ignored), or a float (tensor) to predict.
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
    collate: Callable[[Sequence[Any]], Any] = collate  # items -> a batch, in the form of an item

    def __post_init__(self) -> None:
        if not callable(self.collate):
            raise self.refuse(f"collate of {type(self.collate).__name__}", "a function of a list of items")
        for part, dataset in (("train", self.train), ("test", self.test)):
            if not is_map(dataset):
                raise self.refuse(f"a {part} part of {type(dataset).__name__}", "a map-style Dataset")
            if not length(dataset):
                raise self.refuse(f"no {part} sample", "at least one")
            try:
                item = dataset[0]
            except Exception as error:
                raise self._unreadable(f"its first {part} item", error) from error
            self._check_item(part, item)
        if self.owner is not None:
            self.check_owner(np.asarray(self.owner))
        if self.objective is None and not isinstance(self.sample[1], Tensor):
            raise self.refuse("labels of several tensors", "an objective, whose loss reads them")
        classes = self.goal.whole and self.goal.by_class
        if classes and self.sample[1].ndim and not self.classes:
            raise self.refuse("one label per position", "classes, the number of classes")
        if self.kind == "sequences" and self.tokens < 1:
            raise self.refuse("sequences", "tokens, the size of the vocabulary")
        found = labels_of(self.test) if classes and self.classes else None
        if found is not None and found.dtype.kind in "iu" and int(found.max()) >= self.classes:
            raise self.wrong_labels(int(found.max()))

    def _check_item(self, part: str, item: Any) -> None:
        """Check that an item is a pair of trees. A collate function of the user's own takes what it likes."""
        if self.collate is not collate:
            return
        valid = "pairs of a tensor and a number or tensor, or dicts with labels"
        if not is_pair_of_trees(item):
            found = [type(v).__name__ for v in item] if isinstance(item, Sequence) else type(item).__name__
            found = f"dicts of {list(item)}" if isinstance(item, Mapping) else found
            raise self.refuse(f"{part} items of {found}", valid)
        inputs, labels = as_pair(item)
        why = ""
        try:
            plain = is_tensor(inputs) or isinstance(inputs, tuple | Mapping)
            if plain and (is_label(labels) or isinstance(labels, list | tuple | Mapping)):
                as_tree((inputs, labels) if isinstance(item, Sequence) else item)
                return
        except TypeError as error:
            why = f" ({error})"
        fix = "for images add a transform such as torchvision's ToTensor()"
        if isinstance(item, Mapping):
            fix = "remove the columns that the model does not take, or give a collate function"
        raise self.refuse(f"{part} items of {[type(v).__name__ for v in (inputs, labels)]}{why}", f"{valid}: {fix}")

    def _unreadable(self, what: str, error: Exception) -> UserError:
        why = f"{what} raised {type(error).__name__}: {one_line(error)}"
        return UserError(f"data set '{self.name}' cannot be read: {why}")

    def wrong_labels(self, one: int) -> UserError:
        """Return the error for a label that is not one of the classes."""
        return self.refuse(f"labels like {one}", f"0 to {self.kinds - 1} for {self.kinds} classes")

    @cached_property
    def sample(self) -> tuple[Tree, Tree]:
        if self.collate is not collate:
            x, y = as_pair(self._collated(0))
            return mapped(lambda t: t[0], x), mapped(lambda t: t[0], y)
        x, y = as_pair(self.train[0])
        return as_tree(x), as_tree(y)

    def _collated(self, index: int) -> Any:
        """Return a batch of one train item."""
        try:
            batch = self.collate([self.train[index]])
        except Exception as error:
            raise self._unreadable("its collate function", error) from error
        if not is_pair_of_trees(batch) or not any(True for _ in leaves(batch)):
            found = f"a dict of {list(batch)}" if isinstance(batch, Mapping) else type(batch).__name__
            raise self.refuse(f"a collate function that returns {found}", "a pair of tensors, or a dict with labels")
        return batch

    @property
    def tests(self) -> int:
        return length(self.test)

    @property
    def samples(self) -> int:
        return length(self.train)

    @property
    def kind(self) -> str:
        x = self.sample[0]
        if not isinstance(x, Tensor):
            return "trees"
        return "sequences" if not x.is_floating_point() and x.ndim == 1 else "numbers"

    @cached_property
    def kinds(self) -> int:
        if not self.goal.by_class:
            return self.classes or self.tokens
        return self.classes or int(self.known_labels.max()) + 1

    @property
    def owners(self) -> Ints | None:
        return None if self.owner is None else np.asarray(self.owner).astype(np.int64)

    def class_labels(self, needed: bool) -> Ints | None:
        if not self.goal.whole or not self.goal.by_class:
            return None
        if self.labels is None and self.sample[1].ndim and self.collate is not collate:
            return None  # padded: there is no label at the last position
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
                    item = self.train[index] if self.collate is collate else self._collated(index)
                    found.append(int(torch.as_tensor(as_pair(item)[1]).reshape(-1)[-1]))
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
    if found is None and (name := label_of(dict.fromkeys(getattr(dataset, "column_names", None) or ()))):
        found = dataset[name]  # a column of a Hugging Face data set
    try:
        return None if found is None else np.asarray(found)
    except ValueError:  # labels per position, of different lengths
        return None


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
    if isinstance(train, Mapping) and not is_trees(train):
        train = list(train.values())
    if is_part(train):
        parts, owner = [train], None
    elif isinstance(train, Sequence) and train and all(is_part(part) for part in train):
        parts = list(train)
        sizes = [len(as_pair(part)[1]) if is_trees(part) or is_pair(part) else length(part) for part in parts]
        if 0 in sizes:
            raise UserError(f"{name}: client {sizes.index(0)} has no samples; leave it out")
        owner = torch.from_numpy(np.repeat(np.arange(len(parts)), sizes))
    else:
        valid = "a Dataset, a pair (samples, labels) of arrays, a dict of arrays with labels, or a list of these"
        raise UserError(f"{name} has a train part of {type(train).__name__}; it must be {valid}")
    if not is_part(test):
        valid = "a Dataset, a pair (samples, labels) of arrays, or a dict of arrays with labels"
        raise UserError(f"{name} has a test part of {type(test).__name__}; it must be {valid}")
    if all(is_pair(part) for part in (*parts, test)):
        return as_arrays(parts, test, name, owner)
    if all(is_trees(part) for part in (*parts, test)):
        return as_tree_arrays(parts, test, name, owner)
    sets = [as_dataset(part) for part in parts]
    whole = sets[0] if owner is None else ConcatDataset(sets)
    return Datasets(whole, as_dataset(test), name=name, owner=owner)


def is_pair(part: Any) -> bool:
    """Return whether this is a pair (samples, labels) of arrays."""
    return isinstance(part, tuple | list) and len(part) == 2 and all(is_tensor(a) and a.ndim for a in part)


def is_trees(part: Any) -> bool:
    """Return whether this is a dict of arrays with labels, or a pair of a tuple or dict of arrays, and labels."""
    if isinstance(part, Mapping):
        return is_pair_of_trees(part) and all(is_array_tree(value) for value in part.values())
    if not isinstance(part, tuple | list) or len(part) != 2 or is_pair(part):
        return False
    return isinstance(part[0], tuple | Mapping) and is_array_tree(part[0]) and is_tensor(part[1]) and part[1].ndim > 0


def is_array_tree(value: Any) -> bool:
    """Return whether this is made of arrays alone, in tuples and dicts, at least one."""
    if isinstance(value, tuple | Mapping):
        inner = list(value.values()) if isinstance(value, Mapping) else list(value)
        return bool(inner) and all(map(is_array_tree, inner))
    return is_tensor(value) and value.ndim > 0


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
    return is_pair(part) or is_trees(part) or (is_map(part) and not plain)


def as_dataset(part: Any) -> Dataset[Any]:
    """Return a part as a Dataset."""
    if is_trees(part):
        raise UserError("some clients have arrays in dicts or tuples, and others Datasets; use one kind for all")
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


def as_tree_arrays(parts: list[Any], test: Any, name: str, owner: Tensor | None) -> Arrays:
    """Return dicts or tuples of arrays as one `Arrays`: doubles become floats, and `input_ids` of different lengths are
    padded to the longest, with all that is as long."""
    pairs = [as_pair(as_tree(part)) for part in (*parts, test)]
    pairs = [(mapped(single, inputs), single(labels)) for inputs, labels in pairs]
    tokens = [inputs["input_ids"] for inputs, _ in pairs if isinstance(inputs, Mapping) and "input_ids" in inputs]
    if len(tokens) == len(pairs) and len({t.shape[1:] for t in tokens}) > 1:
        longest = max(t.shape[1] for t in tokens)
        pairs = [PAD.widen(inputs, labels, longest) for inputs, labels in pairs]
    kinds = {repr(mapped(lambda t: (t.dtype, tuple(t.shape[1:])), pair)) for pair in pairs}
    if len(kinds) > 1:
        given = " and ".join(sorted({f"{shapes(inputs)} with labels {shapes(labels)}" for inputs, labels in pairs}))
        raise UserError(f"{name} has samples of different kinds: {given}; all parts must have the same, but for length")
    *train, (test_x, test_y) = pairs
    x, y = (zipped(lambda *ts: ts[0] if len(ts) == 1 else torch.cat(ts), *trees) for trees in zip(*train, strict=True))
    most = -1 if y.is_floating_point() else max(int(t.max()) if t.numel() else -1 for t in (y, test_y))
    vocabulary = max((int(t.max()) + 1 for t in tokens if t.numel()), default=0)
    return Arrays(name, max(most, 0) + 1 if most >= 0 else 0, x, y, test_x, test_y, owner=owner, tokens=vocabulary)


def single(t: Tensor) -> Tensor:
    """Return a tensor in the types of `Arrays`: doubles as floats, integer labels and tokens as int64."""
    return t.float() if t.is_floating_point() else t if t.dtype == torch.bool else t.to(torch.int64)


def highest(train: Tensor, test: Tensor) -> int:
    """Return the largest integer of both; -1 if the train part, which is refused later, is empty."""
    return int(max(train.max(), test.max())) if len(train) else -1

"""A user's own data: tensors, map-style Datasets, or one of either for each client.

What does not fit into memory is a `Datasets`, whose items are read when they are needed. Everything else becomes
`Arrays`. `--data package.module:name` names a function that returns either, or what `as_data` can make one of.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from fedmpi.data.arrays import Arrays, Ints, offers
from fedmpi.data.objective import Objective, objective_of
from fedmpi.data.store import moments
from fedmpi.data.styles import Styles
from fedmpi.errors import UserError, one_line
from fedmpi.plugins import call_with, import_path

log = logging.getLogger("fedmpi")


@dataclass(frozen=True)
class Datasets:
    """Map-style Datasets of (sample, label) pairs, for data that are not held in memory.

    A sample is a float tensor (taken as it is), a uint8 image [channels, height, width] (divided by 255), or a sequence
    of whole numbers, each below `tokens`. A label is a whole number, or a float (tensor) to predict.
    """

    train: Dataset[Any]
    test: Dataset[Any]
    classes: int = 0
    """how many kinds of labels; 0: one more than the largest"""
    name: str = "your data"
    labels: Any = None
    """those of the train samples; None: the attribute targets or labels of the Dataset, else all items are read"""
    owner: Any = None
    """the client of each train sample, 0 .. k - 1"""
    tokens: int = 0
    objective: Objective | None = None
    note: str = ""

    def __post_init__(self) -> None:
        for part, dataset in (("train", self.train), ("test", self.test)):
            if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
                raise UserError(
                    f"data set '{self.name}' has a {part} part of {type(dataset).__name__}; it must be a map-style "
                    "Dataset, with __getitem__ and __len__"
                )
            if not length(dataset):
                raise UserError(f"data set '{self.name}' has no {part} sample; it needs at least one")
            self._check_item(part, dataset)
        if self.owner is not None:
            self._check_owner(np.asarray(self.owner))
        if self.goal.whole and self.sample[1].ndim and not self.classes:
            raise UserError(f"data set '{self.name}' has labels for each position; it needs the number of classes, too")
        if self.kind == "sequences" and self.tokens < 1:
            raise UserError(f"data set '{self.name}' has sequences; it needs tokens, the number of kinds of tokens")
        found = labels_of(self.test) if self.goal.whole and self.classes else None
        if found is not None and found.dtype.kind in "iu" and int(found.max()) >= self.classes:
            raise self.wrong_labels(int(found.max()))

    def _check_owner(self, owner: npt.NDArray[Any]) -> None:
        """Raise unless owner numbers the clients 0 .. k - 1, each with a sample."""
        samples = self.samples
        numbers = owner.shape == (samples,) and owner.dtype.kind in "iu"
        if not numbers or not 0 <= int(owner.min()) <= int(owner.max()) < samples or 0 in np.bincount(owner):
            raise UserError(
                f"data set '{self.name}' has owners {owner.dtype} {list(owner.shape)} for {samples} samples; it needs "
                "a whole number for each, 0 to k - 1, each with a sample"
            )

    def wrong_labels(self, one: int) -> UserError:
        """The error for a label that is not one of the classes."""
        return UserError(
            f"data set '{self.name}' has labels like {one}; it needs 0 to {self.kinds - 1}, as its classes"
        )

    def _check_item(self, part: str, dataset: Dataset[Any]) -> None:
        """Raise unless the first item is a pair of a tensor and a label."""
        try:
            item = dataset[0]
        except Exception as error:
            raise UserError(
                f"data set '{self.name}': reading its first {part} item raised {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        if not isinstance(item, Sequence) or len(item) != 2 or not is_tensor(item[0]) or not is_label(item[1]):
            kinds = [type(v).__name__ for v in item] if isinstance(item, Sequence) else type(item).__name__
            raise UserError(
                f"data set '{self.name}' has {part} items of {kinds}; an item must be a pair of a tensor and a number, "
                "or tensor of numbers: for pictures add a transform such as torchvision's ToTensor()"
            )

    @cached_property
    def sample(self) -> tuple[Tensor, Tensor]:
        """The first train sample and its label."""
        x, y = self.train[0]
        return torch.as_tensor(x), torch.as_tensor(y)

    @property
    def tests(self) -> int:
        """How many test samples there are."""
        return length(self.test)

    @property
    def samples(self) -> int:
        """How many train samples there are."""
        return length(self.train)

    @property
    def kind(self) -> str:
        """numbers or sequences."""
        x = self.sample[0]
        return "sequences" if not x.is_floating_point() and x.ndim == 1 else "numbers"

    @property
    def goal(self) -> Objective:
        """What is learned."""
        return self.objective or objective_of(self.sample[1])

    @property
    def styles(self) -> Styles | None:
        """Return None: own data are used as they are."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """What a model gets of one sample."""
        return tuple(self.sample[0].shape)

    @property
    def offers(self) -> dict[str, Any]:
        """What a model can be made to fit, by the names that its function may ask for."""
        classes = self.kinds if self.goal.whole else 0
        return offers(self.shape, self.kind, self.tokens, classes, self.sample[1].numel())

    @cached_property
    def kinds(self) -> int:
        """How many classes there are."""
        return self.classes or int(self.known_labels.max()) + 1

    def class_labels(self, needed: bool) -> Ints | None:
        """The class of each train sample; None where labels are no classes, or would have to be read and are not
        `needed`."""
        if not self.goal.whole:
            return None
        if not needed and self.labels is None and labels_of(self.train) is None:
            return None
        return self.known_labels

    def split_labels(self, needed: bool) -> Ints | None:
        """What splits by label go by: the class of each train sample."""
        return self.class_labels(needed)

    @cached_property
    def known_labels(self) -> Ints:
        """The class of each train sample, as told, or found, or read item by item."""
        found = self.labels if self.labels is not None else labels_of(self.train)
        if found is None:
            log.info(
                "reading the labels of all %d samples of '%s' once; `labels` would save it", self.samples, self.name
            )
            found = self._read_labels()
        labels = np.asarray(found)
        if labels.shape != (self.samples,) or labels.dtype.kind not in "iu" or int(labels.min()) < 0:
            raise UserError(
                f"data set '{self.name}' has labels {labels.dtype} {list(labels.shape)}; it needs a whole number >= 0 "
                f"for each of its {self.samples} samples"
            )
        if self.classes and int(labels.max()) >= self.classes:
            raise self.wrong_labels(int(labels.max()))
        return labels.astype(np.int64)

    def _read_labels(self) -> list[int]:
        """The label of each item; of one with several, the last."""
        found: list[int] = []
        try:
            for index in range(self.samples):
                found.append(int(torch.as_tensor(self.train[index][1]).reshape(-1)[-1]))
        except Exception as error:
            raise UserError(
                f"data set '{self.name}': reading the label of train item {len(found)} raised {type(error).__name__}: "
                f"{one_line(error)}"
            ) from error
        return found

    @property
    def owners(self) -> Ints | None:
        """The client of each train sample."""
        return None if self.owner is None else np.asarray(self.owner).astype(np.int64)


def length(dataset: Dataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]


def labels_of(dataset: Dataset[Any]) -> npt.NDArray[Any] | None:
    """The labels of a Dataset where it has them at hand, by what torch and torchvision call them."""
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


Data: TypeAlias = Arrays | Datasets
Pair: TypeAlias = Sequence[Any]


def load_own(path: str, root: Path | None) -> Data:
    """What the function at an import path returns as data; it may ask for `root`, the data root or None."""
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
    """Data from a train and a test part. A part is a Dataset or a pair (samples, labels) of arrays; the train part may
    be a list or a dict of them, one for each client."""
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
        raise UserError(
            f"{name} has a train part of {type(train).__name__}; it must be a Dataset, a pair (samples, labels) of "
            "arrays, or a list of these, one for each client"
        )
    if not is_part(test):
        raise UserError(
            f"{name} has a test part of {type(test).__name__}; it must be a Dataset or a pair (samples, labels) of "
            "arrays"
        )
    if all(is_pair(part) for part in (*parts, test)):
        return as_arrays(parts, test, name, owner)
    sets = [as_dataset(part) for part in parts]
    whole = sets[0] if owner is None else ConcatDataset(sets)
    return Datasets(whole, as_dataset(test), name=name, owner=owner)


def is_pair(part: Any) -> bool:
    """Whether this is (samples, labels) in arrays."""
    return isinstance(part, tuple | list) and len(part) == 2 and all(is_tensor(a) and a.ndim for a in part)


def is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray)


def is_label(value: Any) -> bool:
    """Whether this is a number, or numbers in a tensor."""
    return isinstance(value, int | float | np.number) or (is_tensor(value) and np.asarray(value).dtype.kind in "biuf")


def is_part(part: Any) -> bool:
    """Whether this is a Dataset or a pair of arrays."""
    return is_pair(part) or (hasattr(part, "__getitem__") and hasattr(part, "__len__") and not _plain(part))


def _plain(part: Any) -> bool:
    return isinstance(part, Sequence | Mapping | Tensor | np.ndarray | str)


def as_dataset(part: Any) -> Dataset[Any]:
    """A part as a Dataset."""
    if not is_pair(part):
        found: Dataset[Any] = part
        return found
    return TensorDataset(*(torch.as_tensor(a) for a in part))


def as_arrays(parts: list[Pair], test: Pair, name: str, owner: Tensor | None) -> Arrays:
    """Pairs of arrays as one `Arrays`."""
    samples, labels = ([as_samples(p[0]) for p in (*parts, test)], [as_labels(p[1]) for p in (*parts, test)])
    for what, tensors in (("samples", samples), ("labels", labels)):
        shapes = {(t.dtype, t.shape[1:]) for t in tensors}
        if len(shapes) > 1:
            given = ", ".join(sorted(f"{dtype} {list(shape)}" for dtype, shape in shapes))
            raise UserError(f"{name} has {what} of different kinds: {given}; they must be alike in all parts")
    if not len(labels[-1]):
        raise UserError(f"{name} has no test sample; it needs at least one")
    one = len(parts) == 1  # which may be mapped from a file: no copy
    x, y = (tensors[0] if one else torch.cat(tensors[:-1]) for tensors in (samples, labels))
    mean, std = moments(x)
    if std and min(std) == 0:
        std = tuple(s or 1.0 for s in std)  # a channel that is the same everywhere
    tokens = 0
    if not x.is_floating_point() and x.ndim == 2 and len(x):
        tokens = int(max(x.max(), samples[-1].max())) + 1
    whole = not y.is_floating_point()
    classes = int(max(y.max(), labels[-1].max())) + 1 if whole and len(y) and len(labels[-1]) else 0
    return Arrays(name, classes, x, y, samples[-1], labels[-1], mean, std, owner=owner, tokens=tokens)


def as_samples(array: Any) -> Tensor:
    """Samples as a tensor of a kind that `Arrays` takes: grey images get a channel, doubles become floats."""
    x = torch.as_tensor(array)
    if x.dtype == torch.uint8 and x.ndim == 3:
        return x.unsqueeze(1)
    return x.float() if x.is_floating_point() else x


def as_labels(array: Any) -> Tensor:
    """Labels as int64, or float32 where they are not whole."""
    y = torch.as_tensor(array)
    return y.float() if y.is_floating_point() else y.to(torch.int64)

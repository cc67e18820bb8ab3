"""The interface of a data set, and data sets held in memory: images, sequences, numbers, or several tensors per sample.

Samples in memory stay as small as they are on disk (one byte per pixel or character) and are converted to model inputs
on the device, batch by batch: sixty thousand images take 47 MB instead of 188.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmpi.data.objective import Objective, usual
from fedmpi.data.styles import Styles
from fedmpi.data.trees import IGNORE, Tree, leaves, mapped, shapes, structure
from fedmpi.errors import UserError

Ints = npt.NDArray[np.int64]


class Data(Protocol):
    """A data set: `Arrays` in memory, or a user's `Datasets`, which are read item by item."""

    name: str
    note: str  # what a user should know about the origin of the data
    tokens: int  # size of the vocabulary of sequences
    objective: Objective | None  # None: classification if labels are integers, else regression
    styles: Styles | None = None  # how images are coloured or turned

    @property
    def kind(self) -> str:
        """Return the kind of samples: images, sequences, numbers, or trees (of several tensors)."""

    @property
    def sample(self) -> tuple[Tree, Tree]:
        """Return the first train sample and its label."""

    @property
    def kinds(self) -> int:
        """Return the number of classes."""

    @property
    def samples(self) -> int:
        """Return the number of train samples."""

    @property
    def tests(self) -> int:
        """Return the number of test samples."""

    @property
    def owners(self) -> Ints | None:
        """Return the natural client of each train sample; None if unknown."""

    def class_labels(self, needed: bool) -> Ints | None:
        """Return the class of each train sample (of a sequence, that of its last position); None if labels are not
        classes, or if they would have to be read item by item and are not `needed`."""

    def split_labels(self, needed: bool) -> Ints | None:
        """Return the labels that splits by label use: the classes, unless the data define others."""
        return self.class_labels(needed)

    @property
    def goal(self) -> Objective:
        """Return the objective: if none is given, the one that the labels suggest."""
        return self.objective or usual(*self.sample)

    @property
    def shape(self) -> Any:
        """Return the shape of one sample as the model gets it: a tuple, or a tree of them."""
        if self.kind == "trees":
            return mapped(lambda t: tuple(t.shape), self.sample[0])
        shape = tuple(self.sample[0].shape)
        return shape if self.styles is None else (self.styles.channels, *shape[1:])

    @property
    def offers(self) -> dict[str, Any]:
        """Return the arguments that a model's function may ask for: `classes`, or `outputs` for numbers to predict."""
        offered: dict[str, Any] = {"shape": self.shape}
        if self.tokens:
            offered["tokens"] = self.tokens
        if self.kind == "sequences":
            offered["length"] = self.shape[0]
        elif self.kind != "trees" and len(self.shape) == 3:
            offered |= dict(zip(("channels", "height", "width"), self.shape, strict=True))
        if self.goal.whole:
            return offered | ({"classes": self.kinds} if self.kinds else {})
        return offered | {"outputs": sum(t.numel() for t in leaves(self.sample[1]))}

    def check_owner(self, owner: npt.NDArray[Any]) -> None:
        """Check that owner numbers the natural clients 0 .. k - 1, each with a sample."""
        numbers = owner.shape == (self.samples,) and owner.dtype.kind in "iu"
        if not numbers or not 0 <= int(owner.min()) <= int(owner.max()) < self.samples or 0 in np.bincount(owner):
            given = f"owners {owner.dtype} {list(owner.shape)} for {self.samples} samples"
            raise self.refuse(given, "one number per train sample, 0 to k - 1, each with a sample")

    def refuse(self, given: str, valid: str) -> UserError:
        """Return the error for invalid data."""
        return UserError(f"data set '{self.name}' has {given}; it needs {valid}")


@dataclass(frozen=True)
class Arrays(Data):
    """A data set in memory: train and test samples, their labels, and the owners of train samples if known.

    Samples are one of
      images      uint8 [n, channels, height, width], normalised by `mean` and `std`
      sequences   integers [n, length], each below `tokens`
      numbers     floating point [n, ...], used as they are
      trees       a tuple or dict of several such tensors, float32, integers or bool: the arguments of the model
    Labels are classes, int64 [n] (or [n, length], one per position, of which -100 are ignored), or numbers to predict,
    floating point [n, ...].
    """

    name: str
    classes: int  # 0 if labels are numbers to predict
    x: Tree
    y: Tensor
    test_x: Tree
    test_y: Tensor
    mean: tuple[float, ...] = ()  # of images / 255, per channel
    std: tuple[float, ...] = ()
    owner: Tensor | None = None  # int64 [n]: the natural client (writer, role) of each train sample
    strata: Tensor | None = None  # int64 [n]: labels for splits by label (the digit, where a class is five digits)
    tokens: int = 0
    objective: Objective | None = None
    augment: str = "none"  # augmentation of training images: crop:PIXELS and flip, joined by +
    note: str = ""
    styles: Styles | None = None
    style: Tensor | None = None  # int64 [n]: index into the styles per train sample; set by `styles.assign_styles`
    test_style: Tensor | None = None
    sha256: str = ""  # of the file that the tensors were read from, if any

    def __post_init__(self) -> None:
        noun = "images" if isinstance(self.x, Tensor) and self.x.ndim == 4 else "samples"
        for part, x, y in (("train", self.x, self.y), ("test", self.test_x, self.test_y)):
            self._check_samples(part, noun, x, len(y))
            self._check_labels(part, y)
        if structure(mapped(lambda t: t[0], self.x)) != structure(mapped(lambda t: t[0], self.test_x)):
            given = f"train {noun} {_about(self.x)} and test {noun} {_about(self.test_x)}"
            raise self.refuse(given, "the same shape and kind in both")
        if self.kind == "sequences" and self.tokens < 1:
            raise self.refuse(f"sequences and tokens = {self.tokens}", "tokens, the size of the vocabulary")
        channels = self.shape[0] if self.kind == "images" else 0
        sound = len(self.mean) == len(self.std) == channels and all(s > 0 for s in self.std)
        if self.kind == "images" and not sound:
            given = f"mean {self.mean} and std {self.std}"
            raise self.refuse(given, f"one mean and one positive std for each of {channels} channels")
        for what, numbers in (("an owner", self.owner), ("strata", self.strata)):
            if numbers is not None and (numbers.dtype != torch.int64 or numbers.shape != self.y.shape[:1]):
                given = f"{what} of {_about(numbers)}"
                raise self.refuse(given, f"torch.int64 [{len(self.y)}], one per train sample")
        if self.owner is not None:
            self.check_owner(self.owner.numpy())

    @property
    def kind(self) -> str:
        if not isinstance(self.x, Tensor):
            return "trees"
        if self.x.is_floating_point():
            return "numbers"
        return "images" if self.x.ndim == 4 and self.x.dtype == torch.uint8 else "sequences"

    @property
    def sample(self) -> tuple[Tree, Tensor]:
        return mapped(lambda t: t[0], self.x), self.y[0]

    @property
    def nbytes(self) -> int:
        """Return the memory that the tensors take."""
        return sum(t.nbytes for value in vars(self).values() for t in leaves(value))

    @property
    def kinds(self) -> int:
        return self.classes

    @property
    def samples(self) -> int:
        return len(self.y)

    @property
    def tests(self) -> int:
        return len(self.test_y)

    @property
    def owners(self) -> Ints | None:
        return None if self.owner is None else self.owner.numpy()

    def class_labels(self, needed: bool) -> Ints | None:
        if not self.goal.whole or not self.goal.by_class:
            return None
        labels = (self.y if self.y.ndim == 1 else self.y[:, -1]).numpy()
        return None if (labels == IGNORE).any() else labels

    def split_labels(self, needed: bool) -> Ints | None:
        return self.class_labels(needed) if self.strata is None else self.strata.numpy()

    def _check_samples(self, part: str, noun: str, x: Tree, labels: int) -> None:
        """Check that x are samples of one kind, one for each label."""
        if not labels or any(not t.ndim or len(t) != labels for t in leaves(x)):
            found = sorted({len(t) if t.ndim else 0 for t in leaves(x)})
            given = f"{' and '.join(map(str, found))} {part} {noun} and {labels} {part} labels"
            raise self.refuse(given, "one label each, and at least one sample")
        if not isinstance(x, Tensor):
            odd = [t for t in leaves(x) if t.dtype == torch.float64 or t.is_complex()]
            if odd:
                raise self.refuse(f"{part} {noun} of {_about(odd[0])}", "torch.float32, integers or bool in a tree")
            return
        images, sequences = x.dtype == torch.uint8 and x.ndim == 4, not x.is_floating_point() and x.ndim == 2
        if not (images or sequences or (x.dtype == torch.float32 and x.ndim >= 2)) or x.dtype == torch.bool:
            valid = "torch.uint8 [n, channels, height, width], integers [n, length] or torch.float32 [n, ...]"
            raise self.refuse(f"{part} {noun} of {_about(x)}", valid)
        if sequences and not 0 <= int(x.min()) <= int(x.max()) < max(self.tokens, 1):
            given = f"{part} tokens from {int(x.min())} to {int(x.max())}"
            raise self.refuse(given, f"0 to tokens - 1 = {self.tokens - 1}")

    def _check_labels(self, part: str, y: Tensor) -> None:
        """Check that labels are classes in range, or numbers to predict."""
        if not self.goal.whole:
            if y.dtype != torch.float32:
                raise self.refuse(f"{part} labels of {_about(y)}", "torch.float32 [n, ...] for regression")
            return
        if y.dtype != torch.int64 or not 1 <= y.ndim <= 2:
            raise self.refuse(f"{part} labels of {_about(y)}", "torch.int64 [n], or [n, length]")
        if not self.goal.by_class:
            return
        if self.classes < 1:
            raise self.refuse(f"{self.classes} classes", "at least one")
        counted = y if y.ndim == 1 else y[y != IGNORE]
        if counted.numel() and not 0 <= int(counted.min()) <= int(counted.max()) < self.classes:
            given = f"{part} labels from {int(counted.min())} to {int(counted.max())}"
            raise self.refuse(given, f"0 to {self.classes - 1} for {self.classes} classes")


def _about(x: Tree) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, Tensor) else shapes(x)

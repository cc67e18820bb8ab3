"""The interface of a data set, and data sets held in memory: images, sequences or numbers.

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

from fedmpi.data.objective import Objective, objective_of
from fedmpi.data.styles import Styles
from fedmpi.errors import UserError

Ints = npt.NDArray[np.int64]


class Data(Protocol):
    """A data set: `Arrays` in memory, or a user's `Datasets`, which are read item by item."""

    @property
    def name(self) -> str: ...
    @property
    def note(self) -> str:
        """Return what a user should know about the origin of the data."""
    @property
    def kind(self) -> str:
        """Return the kind of samples: images, sequences or numbers."""
    @property
    def goal(self) -> Objective:
        """Return the objective."""
    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Return the first train sample and its label."""
    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample as the model gets it."""
    @property
    def styles(self) -> Styles | None:
        """Return how images are coloured or turned."""
    @property
    def offers(self) -> dict[str, Any]:
        """Return the arguments that a model's function may ask for, by name."""
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


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: train and test samples, their labels, and the owners of train samples if known.

    Samples are one of
      images      uint8 [n, channels, height, width], normalised by `mean` and `std`
      sequences   integers [n, length], each below `tokens`
      numbers     floating point [n, ...], used as they are
    Labels are classes, int64 [n] (or [n, length], one per position), or numbers to predict, floating point [n, ...].
    """

    name: str
    classes: int
    """number of classes; 0 if labels are numbers to predict"""
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor
    mean: tuple[float, ...] = ()
    """of images / 255, per channel"""
    std: tuple[float, ...] = ()
    owner: Tensor | None = None
    """int64 [n]: the natural client (writer, role) of each train sample, 0 .. k - 1, none empty"""
    strata: Tensor | None = None
    """int64 [n]: labels for splits by label, if not the labels themselves (the digit, where a class is five digits)"""
    tokens: int = 0
    """size of the vocabulary of sequences"""
    objective: Objective | None = None
    """None: classification if labels are integers, else regression"""
    augment: str = "none"
    """augmentation of training images: crop:PIXELS and flip, joined by +, or none"""
    note: str = ""
    """what a user should know about the origin of the data"""
    styles: Styles | None = None
    """how images are coloured or turned, by client or class"""
    style: Tensor | None = None
    """index into the styles per train sample, int64 [n]; set by `styles.assign_styles`"""
    test_style: Tensor | None = None
    sha256: str = ""
    """of the file that the tensors were read from, if any"""

    def __post_init__(self) -> None:
        self._check_samples("train", self.x, self.y)
        self._check_samples("test", self.test_x, self.test_y)
        if self.x.shape[1:] != self.test_x.shape[1:] or self.x.dtype != self.test_x.dtype:
            self._refuse(
                f"train {self._noun} {_about(self.x)} and test {self._noun} {_about(self.test_x)}",
                "the same shape and kind in both",
            )
        if self.kind == "images":
            self._check_normalisation()
        if self.kind == "sequences" and self.tokens < 1:
            self._refuse(f"sequences and tokens = {self.tokens}", "tokens, the size of the vocabulary")
        if self.owner is not None:
            self._check_owner(self.owner)
        if self.strata is not None and (self.strata.dtype != torch.int64 or self.strata.shape != self.y.shape[:1]):
            self._refuse(f"strata of {_about(self.strata)}", f"torch.int64 [{len(self.y)}], one per train sample")

    @property
    def kind(self) -> str:
        """Return images, sequences or numbers."""
        if self.x.is_floating_point():
            return "numbers"
        return "images" if self.x.ndim == 4 and self.x.dtype == torch.uint8 else "sequences"

    @property
    def goal(self) -> Objective:
        """Return the objective."""
        return self.objective or objective_of(self.y)

    @property
    def sample(self) -> tuple[Tensor, Tensor]:
        """Return the first train sample and its label."""
        return self.x[0], self.y[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of one sample as the model gets it."""
        shape = tuple(self.x.shape[1:])
        return shape if self.styles is None else (self.styles.channels, *shape[1:])

    @property
    def offers(self) -> dict[str, Any]:
        """Return the arguments that a model's function may ask for, by name."""
        return offers(self, self.tokens)

    @property
    def kinds(self) -> int:
        """Return the number of classes."""
        return self.classes

    @property
    def samples(self) -> int:
        """Return the number of train samples."""
        return len(self.y)

    @property
    def tests(self) -> int:
        """Return the number of test samples."""
        return len(self.test_y)

    @property
    def owners(self) -> Ints | None:
        """Return the natural client of each train sample."""
        return None if self.owner is None else self.owner.numpy()

    def split_labels(self, needed: bool) -> Ints | None:
        """Return the strata, else the classes."""
        return self.class_labels(needed) if self.strata is None else self.strata.numpy()

    def class_labels(self, needed: bool) -> Ints | None:
        """Return the class of each train sample; None if labels are numbers to predict."""
        if not self.goal.whole:
            return None
        return (self.y if self.y.ndim == 1 else self.y[:, -1]).numpy()

    @property
    def _noun(self) -> str:
        return "images" if self.x.ndim == 4 else "samples"

    def _check_samples(self, part: str, x: Tensor, y: Tensor) -> None:
        """Check that x are samples of one of the kinds, with a label each."""
        images, sequences = x.dtype == torch.uint8 and x.ndim == 4, not x.is_floating_point() and x.ndim == 2
        if not (images or sequences or (x.dtype == torch.float32 and x.ndim >= 2)) or x.dtype == torch.bool:
            valid = "torch.uint8 [n, channels, height, width], integers [n, length] or torch.float32 [n, ...]"
            self._refuse(f"{part} {self._noun} of {_about(x)}", valid)
        if len(x) != len(y) or len(x) == 0:
            self._refuse(
                f"{len(x)} {part} {self._noun} and {len(y)} {part} labels", "one label each, and at least one sample"
            )
        if sequences and not images and not 0 <= int(x.min()) <= int(x.max()) < max(self.tokens, 1):
            self._refuse(f"{part} tokens from {int(x.min())} to {int(x.max())}", f"0 to tokens - 1 = {self.tokens - 1}")
        if self.goal.whole:
            self._check_classes(part, y)
        elif y.dtype != torch.float32:
            self._refuse(f"{part} labels of {_about(y)}", "torch.float32 [n, ...] for regression")

    def _check_classes(self, part: str, y: Tensor) -> None:
        """Check that y are classes in range."""
        if y.dtype != torch.int64 or not 1 <= y.ndim <= 2:
            self._refuse(f"{part} labels of {_about(y)}", "torch.int64 [n], or [n, length]")
        if self.classes < 1:
            self._refuse(f"{self.classes} classes", "at least one")
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self.classes:
            self._refuse(f"{part} labels from {low} to {high}", f"0 to {self.classes - 1} for {self.classes} classes")

    def _check_normalisation(self) -> None:
        """Check that there are a mean and a deviation for each channel of the model's inputs."""
        channels = self.shape[0]
        if len(self.mean) != channels or len(self.std) != channels or not all(s > 0 for s in self.std):
            self._refuse(
                f"mean {self.mean} and std {self.std}", f"one mean and one positive std for each of {channels} channels"
            )

    def _check_owner(self, owner: Tensor) -> None:
        """Check that owner numbers the natural clients 0 .. k - 1, each with a sample."""
        if owner.dtype != torch.int64 or owner.shape != self.y.shape[:1]:
            self._refuse(f"an owner of {_about(owner)}", f"torch.int64 [{len(self.y)}], one per train sample")
        low, high = int(owner.min()), int(owner.max())
        if low < 0 or high >= len(owner) or bool((torch.bincount(owner) == 0).any()):
            self._refuse(f"owners from {low} to {high} with gaps", "numbers 0 to k - 1, each with a sample")

    def _refuse(self, given: str, valid: str) -> None:
        raise UserError(f"data set '{self.name}' has {given}; it needs {valid}")


def _about(t: Tensor) -> str:
    return f"{t.dtype} {list(t.shape)}"


def offers(data: Data, tokens: int) -> dict[str, Any]:
    """Return the arguments that a model's function may ask for: `classes`, or `outputs` for numbers to predict."""
    offered: dict[str, Any] = {"shape": data.shape}
    if data.kind == "sequences":
        offered |= {"tokens": tokens, "length": data.shape[0]}
    elif len(data.shape) == 3:
        offered |= dict(zip(("channels", "height", "width"), data.shape, strict=True))
    return offered | ({"classes": data.kinds} if data.goal.whole else {"outputs": data.sample[1].numel()})

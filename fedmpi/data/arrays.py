"""A data set as arrays in memory, and the two things every data set on disk needs: a folder and a lock.

Samples stay uint8 images and are normalised on the device batch by batch, so sixty thousand of them cost 47 MB and
not 188. Files that several ranks may want to write at the same moment are made under a lock and appear by a rename,
so no reader ever sees half of one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedmpi.errors import UserError


@dataclass(frozen=True)
class Arrays:
    """A data set in memory: train and test images, their labels, and who wrote each train image where that is known."""

    name: str
    classes: int
    x: Tensor  # train images, uint8 [n, channels, height, width]
    y: Tensor  # their labels, int64 [n], 0 .. classes - 1
    test_x: Tensor
    test_y: Tensor
    mean: tuple[float, ...]  # one a channel, of x / 255
    std: tuple[float, ...]
    owner: Tensor | None = None  # int64 [n]: the natural client (writer) of each train sample, 0 .. k - 1, none empty

    def __post_init__(self) -> None:
        if self.classes < 1:
            self._refuse(f"{self.classes} classes", "at least one")
        self._check_images("train", self.x, self.y)
        self._check_images("test", self.test_x, self.test_y)
        if self.x.shape[1:] != self.test_x.shape[1:]:
            self._refuse(
                f"train images {_shape(self.x)} and test images {_shape(self.test_x)}", "the same image shape in both"
            )
        channels = self.x.shape[1]
        if len(self.mean) != channels or len(self.std) != channels or not all(s > 0 for s in self.std):
            self._refuse(
                f"mean {self.mean} and std {self.std}", f"one mean and one positive std for each of {channels} channels"
            )
        if self.owner is not None:
            self._check_owner(self.owner)

    def _check_images(self, part: str, x: Tensor, y: Tensor) -> None:
        """Raise unless x are uint8 images and y is one label in range for each."""
        if x.dtype != torch.uint8 or x.ndim != 4:
            self._refuse(f"{part} images of {x.dtype} {_shape(x)}", "torch.uint8 [n, channels, height, width]")
        if y.dtype != torch.int64 or y.ndim != 1:
            self._refuse(f"{part} labels of {y.dtype} {_shape(y)}", "torch.int64 [n]")
        if len(x) != len(y) or len(x) == 0:
            self._refuse(
                f"{len(x)} {part} images and {len(y)} {part} labels", "one label an image, and at least one image"
            )
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= self.classes:
            self._refuse(
                f"{part} labels from {low} to {high}", f"0 to {self.classes - 1}, as there are {self.classes} classes"
            )

    def _check_owner(self, owner: Tensor) -> None:
        """Raise unless owner numbers the natural clients 0 .. k - 1, each with a sample."""
        if owner.dtype != torch.int64 or owner.shape != self.y.shape:
            self._refuse(
                f"an owner of {owner.dtype} {_shape(owner)}", f"torch.int64 [{len(self.y)}], one a train sample"
            )
        if int(owner.min()) < 0 or bool((torch.bincount(owner) == 0).any()):
            self._refuse(
                f"owners from {int(owner.min())} to {int(owner.max())} with gaps",
                "numbers 0 to k - 1, each with a sample",
            )

    def _refuse(self, given: str, valid: str) -> None:
        raise UserError(f"data set '{self.name}' has {given}; it needs {valid}")


def cache_folder() -> Path:
    """The folder for files that can be made again: $FEDMPI_CACHE, else $XDG_CACHE_HOME/fedmpi, else ~/.cache/fedmpi."""
    if given := os.environ.get("FEDMPI_CACHE"):
        return Path(given).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "fedmpi"
    return Path("~/.cache/fedmpi").expanduser()


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock file `path`; yields whether another process wrote into it while this one waited.

    Where locking is impossible (a read-only folder, a file system without locks) it goes on without: whatever is made
    under the lock is renamed into place, so the lock saves work and does not carry correctness.
    """
    with contextlib.ExitStack() as stack:
        size = before = 0
        with contextlib.suppress(OSError):
            handle = stack.enter_context(open(path, "a"))
            before = size = os.fstat(handle.fileno()).st_size
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle.fileno()).st_size
        yield size != before


def _shape(t: Tensor) -> str:
    return str(list(t.shape))

"""Real data for tests: the shared folder, and converters from it to the layouts in which data sets are published.

Each `*_layout` writes into a given root; each `*_root` makes a root once a session, for tests that only read it.
"""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from conftest import need
from PIL import Image

REPO = Path(__file__).resolve().parents[1]
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def shared_data() -> Path:
    """The folder of the real data; skips the test where it is not there."""
    folder = Path(os.environ.get("FEDMPI_TEST_DATA", REPO.parent / "shared" / "data"))
    need("data", folder.is_dir(), f"there is no folder {folder}; set FEDMPI_TEST_DATA to the one of the real data")
    return folder


def new_root() -> Path:
    """An empty folder that lasts as long as the session."""
    folder = tempfile.mkdtemp(prefix="fedmpi-data-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def tiles(sheet: Path, count: int) -> Bytes:
    """The first pictures of a sheet of 32 x 32 tiles, row by row: uint8 [count, 32, 32, 3]."""
    pixels = np.asarray(Image.open(sheet).convert("RGB"))
    down, across = pixels.shape[0] // 32, pixels.shape[1] // 32
    return pixels.reshape(down, 32, across, 32, 3).swapaxes(1, 2).reshape(-1, 32, 32, 3)[:count]


def records(images: Bytes, *labels: Bytes) -> bytes:
    """Pictures [n, 32, 32, 3] in CIFAR's binary format, with their labels in front of each."""
    planes = images.transpose(0, 3, 1, 2).reshape(len(images), -1)
    return np.column_stack([*(label.astype(np.uint8) for label in labels), planes]).tobytes()


def cifar_layout(folder: Path, name: str, keys: tuple[str, ...], files: tuple[str, ...]) -> None:
    """Write sheets of the shared folder `name`, with those labels, as binary files into the folder."""
    shared = shared_data() / name
    folder.mkdir(parents=True)
    for file in files:
        with np.load(shared / f"{file}.labels.npz") as stored:
            labels = [stored[key] for key in keys]
        images = tiles(shared / f"{file}.webp", len(labels[0]))
        (folder / f"{file}.bin").write_bytes(records(images, *labels))


def cifar10_layout(root: Path) -> None:
    """Write CIFAR-10's binary version: two of the five train files, and the test file."""
    files = ("data_batch_1", "data_batch_2", "test_batch")
    cifar_layout(root / "cifar-10-batches-bin", "cifar10", ("labels",), files)


def cifar100_layout(root: Path) -> None:
    """Write CIFAR-100's binary version: the first 1,117 and 916 pictures."""
    cifar_layout(root / "cifar-100-binary", "cifar100", ("coarse_labels", "fine_labels"), ("train", "test"))


def tiny_archive() -> Path:
    """Tiny-ImageNet with 40 and 10 pictures a class, packed."""
    return shared_data() / "tiny-imagenet" / "tiny-imagenet-200-subset.zip"


def tiny_layout(root: Path, unpacked: bool = False) -> None:
    """Put Tiny-ImageNet's archive there, or the folder unpacked from it."""
    if unpacked:
        with zipfile.ZipFile(tiny_archive()) as archive:
            archive.extractall(root)
    else:
        (root / "tiny-imagenet-200.zip").symlink_to(tiny_archive())


@functools.cache
def cifar10_root() -> Path:
    """A root with CIFAR-10."""
    root = new_root()
    cifar10_layout(root)
    return root


@functools.cache
def cifar100_root() -> Path:
    """A root with CIFAR-100."""
    root = new_root()
    cifar100_layout(root)
    return root


@functools.cache
def tiny_root() -> Path:
    """A root with Tiny-ImageNet's archive."""
    root = new_root()
    tiny_layout(root)
    return root

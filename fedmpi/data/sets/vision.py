"""MNIST and Fashion-MNIST, read from the original idx files.

The four files of either set are in torchvision's layout under a data root, `MNIST/raw/` or `FashionMNIST/raw/`, with or
without .gz. Fashion-MNIST is also found in the folder of Debian's package. A file of the published size must have the
published content.

The idx format (LeCun): two zero bytes, a type (8 = unsigned byte), the number of axes, each axis as a big-endian
uint32, the bytes.
"""

from __future__ import annotations

import struct
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.data.arrays import Arrays
from fedmpi.data.files import complete, fetch_file, read_published, wrong
from fedmpi.data.store import Source, Tensors, load
from fedmpi.plugins.torchvision import import_torchvision

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# SHA-256 of the decompressed files: compressed ones may differ in their headers
PUBLISHED = {
    "MNIST": (
        "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
    ),
    "FashionMNIST": (
        "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
        "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
        "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
        "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
    ),
}
SIZES = (47_040_016, 60_008, 7_840_016, 10_008)


class Family(NamedTuple):
    """A data set in MNIST's format: torchvision's class and folder name, a system folder, and its normalisation."""

    name: str
    folder: str
    system: Path | None
    hint: str
    mean: float
    std: float


MNIST = Family("mnist", "MNIST", None, "", 0.1307, 0.3081)
FMNIST = Family(
    "fmnist",
    "FashionMNIST",
    Path("/usr/share/datasets/fashion-mnist"),
    "install the Debian package dataset-fashion-mnist, or ",
    0.2860,
    0.3530,
)


def read(family: Family, root: Path | None = None) -> Arrays:
    """Load a data set of the family, from a root or the default places."""
    stored = load(source_of(family, root), root)
    return stored.arrays(family.name, 10, mean=(family.mean,), std=(family.std,))


def source_of(family: Family, root: Path | None = None) -> Source:
    """Return the source of a data set. With an explicit root, only that folder is searched."""
    system = [family.system] if family.system and root is None else []
    return Source(
        family.name,
        version=1,
        read=partial(read_files, published=PUBLISHED[family.folder]),
        find=lambda base: next(filter(None, (complete(f, FILES) for f in (base / family.folder / "raw", *system))), []),
        wanted=f"{family.hint}put the four files {', '.join(f'{name}[.gz]' for name in FILES)} into "
        f"{{root}}/{family.folder}/raw",
        fetch=partial(fetch, family),
        published=(60_000, 10_000),
    )


mnist, mnist_source = partial(read, MNIST), partial(source_of, MNIST)
fmnist, fmnist_source = partial(read, FMNIST), partial(source_of, FMNIST)


def read_files(files: list[Path], published: tuple[str, ...]) -> Tensors:
    """Return the tensors of the four files."""
    named = zip(files, SIZES, published, strict=True)
    raw = [parse_idx(path, read_published(path, size, sha256)) for path, size, sha256 in named]
    tensors: Tensors = {}
    for part, i in (("", 0), ("test_", 2)):
        x, y = raw[i], raw[i + 1]
        if x.shape[1:] != (28, 28):
            raise wrong(files[i], f"holds {list(x.shape)}, not images [n, 28, 28]")
        if y.ndim != 1 or len(y) != len(x) or len(y) == 0 or int(y.max()) > 9:
            needed = f"one label of 0 to 9 for each of the {len(x)} images of {files[i].name}"
            raise wrong(files[i + 1], f"does not hold {needed}")
        tensors[f"{part}x"] = torch.from_numpy(x).unsqueeze(1)
        tensors[f"{part}y"] = torch.from_numpy(y.astype(np.int64))
    return tensors


def parse_idx(path: Path, data: bytearray) -> npt.NDArray[np.uint8]:
    """Return the array of bytes in an idx file."""
    head = bytes(data[:4])
    axes = head[3] if len(head) == 4 else 0
    start = 4 + 4 * axes
    if head[:3] != b"\0\0\x08" or not 1 <= axes <= 3 or len(data) < start:
        raise wrong(path, f"is not an idx file of bytes (it begins with {head.hex() or 'nothing'})")
    shape = struct.unpack(f">{axes}I", data[4:start])
    size = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != size:
        raise wrong(path, f"declares {size} bytes of data and holds {len(data) - start}")
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def fetch(family: Family, base: Path) -> None:
    """Download the four files, compressed, to torchvision's folder."""
    kind: Any = getattr(import_torchvision().datasets, family.folder)
    for name, md5 in kind.resources:
        fetch_file([f"{mirror}{name}" for mirror in kind.mirrors], base / family.folder / "raw" / name, md5)

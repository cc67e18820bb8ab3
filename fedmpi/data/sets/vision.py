"""MNIST and Fashion-MNIST, read from the original idx files.

The four files of either set lie in torchvision's layout under a root folder, `MNIST/raw/` or `FashionMNIST/raw/`,
packed (.gz) or unpacked. Fashion-MNIST is also found where Debian's package puts it. A file of the published size must
have the published content.

The idx format (LeCun): two zero bytes, a type (8 = unsigned byte), the number of axes, each axis as a big-endian
uint32, the bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import struct
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmpi.data.arrays import Arrays
from fedmpi.data.fetch import fetch_file
from fedmpi.data.store import Source, Tensors, load
from fedmpi.errors import UserError
from fedmpi.plugins.torchvision import import_torchvision

FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

# SHA-256 of what is in the files, unpacked: packed ones may differ in their headers
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
    """A set in MNIST's format: torchvision's class and folder name, a folder of the system, its normalisation."""

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


def mnist(root: Path | None = None) -> Arrays:
    """MNIST's 60,000 and 10,000 digits."""
    return read(MNIST, root)


def fmnist(root: Path | None = None) -> Arrays:
    """Fashion-MNIST's 60,000 and 10,000 pictures of clothes."""
    return read(FMNIST, root)


def mnist_source(root: Path | None = None) -> Source:
    """Where MNIST comes from."""
    return source_of(MNIST, root)


def fmnist_source(root: Path | None = None) -> Source:
    """Where Fashion-MNIST comes from."""
    return source_of(FMNIST, root)


def read(family: Family, root: Path | None) -> Arrays:
    """A set of the family, from a root or from its usual places."""
    stored = load(source_of(family, root), root)
    return stored.arrays(family.name, 10, mean=(family.mean,), std=(family.std,))


def source_of(family: Family, root: Path | None) -> Source:
    """Where the set comes from. Who names a root means that folder and no other."""
    folders = [] if root is not None or family.system is None else [family.system]
    return Source(
        family.name,
        version=1,
        read=partial(read_files, published=PUBLISHED[family.folder]),
        find=lambda base: find_files([base / family.folder / "raw", *folders]),
        wanted=f"{family.hint}put the four files {', '.join(f'{name}[.gz]' for name in FILES)} into "
        f"{{root}}/{family.folder}/raw",
        fetch=partial(fetch, family),
        published=(60_000, 10_000),
    )


def find_files(folders: list[Path]) -> list[Path]:
    """The four files, unpacked before packed, of the first folder that has all; none where no folder has."""
    for folder in folders:
        found = [next((f for f in (folder / name, folder / f"{name}.gz") if f.is_file()), None) for name in FILES]
        complete = [f for f in found if f is not None]
        if len(complete) == len(FILES):
            return complete
    return []


def read_files(files: list[Path], published: tuple[str, ...]) -> Tensors:
    """The tensors of the four files."""
    raw = [read_published(*each) for each in zip(files, SIZES, published, strict=True)]
    tensors: dict[str, Tensor] = {}
    for part, i in (("", 0), ("test_", 2)):
        x, y = raw[i], raw[i + 1]
        check_pair(files[i], x, files[i + 1], y)
        tensors[f"{part}x"] = torch.from_numpy(x).unsqueeze(1)
        tensors[f"{part}y"] = torch.from_numpy(y.astype(np.int64))
    return tensors


def check_pair(image_file: Path, x: npt.NDArray[np.uint8], label_file: Path, y: npt.NDArray[np.uint8]) -> None:
    """Refuse, by file name, images that are not [n, 28, 28] or labels that are not n digits."""
    if x.shape[1:] != (28, 28):
        raise UserError(f"{image_file} holds {list(x.shape)}, not images [n, 28, 28]; replace it by the original file")
    if y.ndim != 1 or len(y) != len(x) or len(y) == 0 or int(y.max()) > 9:
        raise UserError(
            f"{label_file} does not hold one label of 0 to 9 for each of the {len(x)} images of {image_file.name}; "
            "replace both by the original files"
        )


def read_published(path: Path, size: int, sha256: str) -> npt.NDArray[np.uint8]:
    """The array in an idx file, which must be the published one where it has that one's size."""
    data = unpacked(path)
    if len(data) == size and hashlib.sha256(data).hexdigest() != sha256:
        raise UserError(f"{path} is damaged: its SHA-256 is not that of the published file; replace it by the original")
    return parse_idx(path, data)


def unpacked(path: Path) -> bytearray:
    """The bytes of a file, packed by gzip or not; one that cannot be read is refused by its name."""
    try:
        return bytearray(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged or cut short ({error}); replace it by the original file") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); make it readable or replace it") from error


def parse_idx(path: Path, data: bytearray) -> npt.NDArray[np.uint8]:
    """The array of bytes in the content of an idx file; one that is not sound is refused by its name."""
    head = bytes(data[:4])
    axes = head[3] if len(head) == 4 else 0
    start = 4 + 4 * axes
    if head[:3] != b"\0\0\x08" or not 1 <= axes <= 3 or len(data) < start:
        raise UserError(f"{path} is not an idx file of bytes (it begins with {head.hex() or 'nothing'}); replace it")
    shape = struct.unpack(f">{axes}I", data[4:start])
    size = int(np.prod(shape, dtype=np.int64))
    if len(data) - start != size:
        raise UserError(
            f"{path} announces {size} bytes of data and holds {len(data) - start}; replace it by the original file"
        )
    return np.frombuffer(data, dtype=np.uint8, offset=start).reshape(shape)


def fetch(family: Family, base: Path) -> None:
    """Download the four files, packed, to where torchvision would put them."""
    kind: Any = getattr(import_torchvision().datasets, family.folder)
    for name, md5 in kind.resources:
        fetch_file([f"{mirror}{name}" for mirror in kind.mirrors], base / family.folder / "raw" / name, md5)

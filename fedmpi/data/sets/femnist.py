"""FEMNIST: handwritten characters with their writers, a natural federation with one client per writer.

LEAF's FEMNIST (62 classes, dark ink on a background of 1.0) is read if its json files are in `femnist/train` and
`femnist/test` under a data root, or in `femnist/data/...` as in LEAF's repository. Creating it takes long, so there is
a substitute for download: MNIST's digits, with the writers that QMNIST (Yadav and Bottou, 2019) traced back to the same
collection of NIST. It has 539 train writers and 297 other test writers.

QMNIST's label files: 12 bytes of header, then rows of big-endian int32: class, series of forms, writer, and more. Row i
of the train file is MNIST's train image i; the first 10,000 rows of the test file are MNIST's test images.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.data import leaf
from fedmpi.data.arrays import Arrays
from fedmpi.data.files import complete, fetch_file, read_published, wrong
from fedmpi.data.sets import vision
from fedmpi.data.store import Source, Tensors, load
from fedmpi.plugins.torchvision import import_torchvision

SIDE = 28
CLASSES = 62  # digits, capitals, small letters
LABELS = {  # file -> SHA-256 of its decompressed content
    "qmnist-train-labels-idx2-int": "bb1b6e1ec7b04fd5696f1ed50b5f58f8ef195118edd5c93c81783df9740b8ac5",
    "qmnist-test-labels-idx2-int": "92d0ccb8c25f9c6534270fb4be7e1d24a1c6d315edfc8a638bfbd31c70f362dd",
}
LABELS_SIZE = 1_920_012


def femnist(root: Path | None = None) -> Arrays:
    """Load LEAF's FEMNIST (10 classes if it has digits only), else MNIST by QMNIST's writers; the note says which."""
    stored = load(femnist_source(root), root)
    highest = max(int(stored.tensors[part].max()) for part in ("y", "test_y"))
    writers = int(stored.tensors["owner"].max()) + 1
    note = f"MNIST's digits by QMNIST's {writers} writers, in place of LEAF's FEMNIST"
    if any(".json" in name for name in stored.sources):
        note = ""
    return stored.arrays("femnist", 10 if highest < 10 else CLASSES, note=note)


def femnist_source(root: Path | None = None) -> Source:
    """Return the source of FEMNIST."""
    return Source(
        "femnist",
        version=1,
        read=read,
        find=find,
        wanted="put the json files that LEAF makes (repository TalwalkarLab/leaf, data/femnist: ./preprocess.sh -s "
        "niid --sf 1.0 -t user) into {root}/femnist/train and {root}/femnist/test; or, to stand in for them, MNIST's "
        "four files into {root}/MNIST/raw and "
        f"{' and '.join(f'{name}[.gz]' for name in LABELS)} into {{root}}/QMNIST/raw",
        fetch=fetch,
    )


def find(base: Path) -> list[Path]:
    """Return LEAF's files, else MNIST's four and QMNIST's two."""
    if files := leaf.find(base, "femnist"):
        return files
    digits, labels = complete(base / "MNIST" / "raw", vision.FILES), complete(base / "QMNIST" / "raw", LABELS)
    return [*digits, *labels] if digits and labels else []


def read(files: list[Path]) -> Tensors:
    """Return the tensors of either source."""
    return leaf.read(files, convert) if ".json" in files[0].name else read_digits(files[:4], files[4:])


def convert(x: list[Any], y: list[Any]) -> leaf.Samples:
    """Return a writer's images as bytes, and their classes."""
    try:
        pixels, labels = np.asarray(x), np.asarray(y)
    except ValueError as error:
        raise ValueError("samples of different lengths, or lists among numbers or labels") from error
    if pixels.ndim != 2 or pixels.shape[1] != SIDE * SIDE or pixels.dtype.kind not in "fiu":
        raise ValueError(f"samples that are not lists of {SIDE * SIDE} numbers")
    if not ((pixels >= 0) & (pixels <= 1)).all():  # false for nan, too
        raise ValueError(f"numbers from {pixels.min():g} to {pixels.max():g}, not from 0 to 1")
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or not 0 <= labels.min() <= labels.max() < CLASSES:
        raise ValueError(f"labels that are not whole numbers from 0 to {CLASSES - 1}")
    images = np.rint(pixels * 255).astype(np.uint8)
    return images.reshape(-1, 1, SIDE, SIDE), labels.astype(np.int64)


def read_digits(digit_files: list[Path], label_files: list[Path]) -> Tensors:
    """Return MNIST's tensors, with the writer of each train sample."""
    tensors = vision.read_files(digit_files, vision.PUBLISHED["MNIST"])
    writers = []
    for path, sha256, part in zip(label_files, LABELS.values(), ("y", "test_y"), strict=True):
        labels = tensors[part].numpy()
        rows = read_rows(path, sha256)[: len(labels)]
        if not np.array_equal(rows[:, 0], labels):
            raise wrong(path, "does not belong to the digits of MNIST: its classes differ")
        writers.append(rows[:, 2])
    train, test = writers
    if both := np.intersect1d(train, test).tolist():
        raise wrong(label_files[1], f"has writer {both[0]}, who is also in {label_files[0].name}")
    owner = np.unique(train, return_inverse=True)[1].astype(np.int64)
    return tensors | {"owner": torch.from_numpy(owner)}


def read_rows(path: Path, sha256: str) -> npt.NDArray[np.int32]:
    """Return the rows of a label file of QMNIST."""
    data = read_published(path, LABELS_SIZE, sha256)
    kind, rows, columns = struct.unpack(">3I", data[:12]) if len(data) >= 12 else (0, 0, 0)
    if kind != 0x0C02 or columns < 3 or len(data) - 12 != 4 * rows * columns:  # 0C: int32, 02: two axes
        raise wrong(path, "is not a label file of QMNIST, or is cut short")
    return np.frombuffer(data, dtype=">i4", offset=12).reshape(rows, columns).astype(np.int32)


def fetch(base: Path) -> None:
    """Download the missing files of the substitute to torchvision's folders."""
    if not complete(base / "MNIST" / "raw", vision.FILES):
        vision.fetch(vision.MNIST, base)
    resources = import_torchvision().datasets.QMNIST.resources
    known = {url.rsplit("/", 1)[-1]: (url, md5) for part in resources.values() for url, md5 in part}
    raw = base / "QMNIST" / "raw"
    for name in LABELS:
        if not complete(raw, [name]):
            url, md5 = known[f"{name}.gz"]
            fetch_file([url], raw / f"{name}.gz", md5)

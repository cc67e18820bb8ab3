"""CIFAR-10 and CIFAR-100, read from the files of their own site.

A data root has one of these, searched in this order (`cifar-10` stands for either set):
  the Python version   its folder, cifar-10-batches-py/ or cifar-100-python/, or the archive cifar-10-python.tar.gz
  the binary version   its folder, cifar-10-batches-bin/ or cifar-100-binary/, or the archive cifar-10-binary.tar.gz
Archives are read in place, member by member: nothing is unpacked to disk, so no member can escape its folder.

The Python version consists of pickles, and loading a pickle can call any function. So a pickle is loaded only if its
md5 is the published one, and then only by an unpickler that accepts nothing but numpy arrays, and replaces those by
inert objects: an md5 can be forged with some effort.

The binary version is a sequence of records: one byte per label (the class; in CIFAR-100 after the superclass) and 3072
bytes, the red, the green and the blue plane. It may be a subset: fewer records, or fewer of the train files.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import pickle
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fedmpi.data.arrays import Arrays
from fedmpi.data.fetch import fetch_file
from fedmpi.data.files import damaged, unreadable
from fedmpi.data.store import Source, Tensors, load
from fedmpi.errors import UserError
from fedmpi.plugins.torchvision import import_torchvision

Samples = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""pictures [n, 3072] and their classes [n]"""

PUBLISHED = (50_000, 10_000)
PIXELS = 3 * 32 * 32
LONGEST = 1 << 28  # bytes; the files are shorter, so a file that is cut here fails the checks


class Version(NamedTuple):
    """One of the two formats in which a set is published."""

    folder: str
    archive: str
    suffix: str
    """of the names of its files"""
    binary: bool


class Family(NamedTuple):
    """A data set in CIFAR's formats."""

    name: str
    kind: str
    """torchvision's class for it"""
    versions: tuple[Version, Version]
    train: tuple[str, ...]
    test: str
    labels: tuple[tuple[str, int], ...]
    """name in a pickle and number of values of each label, in record order; the last one is the class"""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def classes(self) -> int:
        return self.labels[-1][1]


CIFAR10 = Family(
    "cifar10",
    "CIFAR10",
    (
        Version("cifar-10-batches-py", "cifar-10-python.tar.gz", "", binary=False),
        Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", binary=True),
    ),
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test_batch",
    (("labels", 10),),
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
CIFAR100 = Family(
    "cifar100",
    "CIFAR100",
    (
        Version("cifar-100-python", "cifar-100-python.tar.gz", "", binary=False),
        Version("cifar-100-binary", "cifar-100-binary.tar.gz", ".bin", binary=True),
    ),
    ("train",),
    "test",
    (("coarse_labels", 20), ("fine_labels", 100)),
    (0.5071, 0.4866, 0.4409),
    (0.2673, 0.2564, 0.2762),
)


def read(family: Family, root: Path | None = None) -> Arrays:
    """Load a data set of the family, from a root or the default one."""
    stored = load(source_of(family), root)
    return stored.arrays(family.name, family.classes, mean=family.mean, std=family.std, augment="crop:4+flip")


def source_of(family: Family, root: Path | None = None) -> Source:
    """Return the source of a data set."""
    python, binary = family.versions
    return Source(
        family.name,
        version=1,
        read=partial(read_files, family),
        find=partial(find_files, family),
        wanted=f"put {python.archive} or all of its folder {python.folder}, or the binary version ({binary.archive} or "
        f"{binary.folder}), into {{root}}",
        fetch=partial(fetch, family),
        published=PUBLISHED,
    )


cifar10, cifar10_source = partial(read, CIFAR10), partial(source_of, CIFAR10)
cifar100, cifar100_source = partial(read, CIFAR100), partial(source_of, CIFAR100)


def find_files(family: Family, base: Path) -> list[Path]:
    """Return the files of the first version that is present, or its archive; [] if there is neither."""
    for version in family.versions:
        names = [f"{name}{version.suffix}" for name in (*family.train, family.test)]
        there = [base / version.folder / name for name in names if (base / version.folder / name).is_file()]
        subset = version.binary and len(there) > 1 and there[-1].name == names[-1]
        if subset or len(there) == len(names):
            return there
        if (base / version.archive).is_file():
            return [base / version.archive]
    return []


def read_files(family: Family, files: list[Path]) -> Tensors:
    """Return the tensors of a version's files, or of its archive."""
    first = files[0]
    packed = first.name in [v.archive for v in family.versions]
    version = next(v for v in family.versions if (first.name == v.archive if packed else first.suffix == v.suffix))
    md5s, archive_md5 = ({}, "") if version.binary else published_md5s(family)
    if packed:
        names = [f"{version.folder}/{name}{version.suffix}" for name in (*family.train, family.test)]
        contents = read_archive(first, names, archive_md5)
    else:
        contents = ((file, read_file(file)) for file in files)

    parts: dict[str, Samples] = {}
    for file, content in contents:
        name = file.name.removesuffix(version.suffix)
        if version.binary:
            parts[name] = parse_records(family, file, content)
        else:
            check_md5(file, [content], md5s[name])
            parts[name] = parse_pickle(family, file, content)

    train = [name for name in family.train if name in parts]
    if family.test not in parts or not train or not (version.binary or len(train) == len(family.train)):
        needed = ", ".join(f"{version.folder}/{name}{version.suffix}" for name in (*family.train, family.test))
        raise UserError(f"{first} does not have all of the files {needed}; replace it by the original")
    return joined("", [parts[name] for name in train]) | joined("test_", [parts[family.test]])


def joined(prefix: str, parts: list[Samples]) -> Tensors:
    """Return the pictures and classes of several files as tensors."""
    x = np.concatenate([x for x, _ in parts]).reshape(-1, 3, 32, 32)
    return {f"{prefix}x": torch.from_numpy(x), f"{prefix}y": torch.from_numpy(np.concatenate([y for _, y in parts]))}


# The binary version


def parse_records(family: Family, file: Path, content: bytes) -> Samples:
    """Return the pictures and classes of a binary file."""
    labels = len(family.labels)
    record = labels + PIXELS
    most = PUBLISHED[1] if file.stem == family.test else PUBLISHED[0] // len(family.train)
    count, rest = divmod(len(content), record)
    if rest or not 1 <= count <= most:
        raise UserError(
            f"{file} holds {len(content):,} bytes, not 1 to {most:,} records of {record:,} bytes; replace it by the "
            "original file"
        )
    rows = np.frombuffer(content, np.uint8).reshape(count, record)
    for column, (name, kinds) in enumerate(family.labels):
        check_labels(file, name, rows[:, column].tolist(), kinds)
    return rows[:, labels:], rows[:, labels - 1].astype(np.int64)


def check_labels(file: Path, name: str, labels: Iterable[Any], kinds: int) -> None:
    """Check that labels are integers below `kinds`."""
    for number, label in enumerate(labels):
        if not (isinstance(label, int) and 0 <= label < kinds):
            raise UserError(
                f"{file} has {name} {label!r} at record {number}, not one of 0 to {kinds - 1}; replace it by the "
                "original file"
            )


# The Python version


def latin1(text: str, encoding: str) -> bytes:
    """Restore bytes from old pickles, as `_codecs.encode` does, but with this codec only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding}")
    return text.encode("latin1")


class Inert:
    """Replaces a numpy array or dtype in a pickle: stores the arguments without using them, because invalid arguments
    from a pickle can make numpy crash the process."""

    def __init__(self, *made_from: Any) -> None:
        self.made_from = made_from
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


ALLOWED = {
    ("numpy.core.multiarray", "_reconstruct"): Inert,  # up to numpy 1
    ("numpy._core.multiarray", "_reconstruct"): Inert,
    ("numpy", "ndarray"): Inert,
    ("numpy", "dtype"): Inert,
    ("_codecs", "encode"): latin1,
}


class ArrayUnpickler(pickle.Unpickler):
    """An unpickler of plain values and numpy arrays, which raises an error for any other class or function."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no numpy array needs")
        return ALLOWED[module, name]


def pixels(array: Any) -> npt.NDArray[np.uint8] | None:
    """Return the pictures [n, 3072] of an array in a pickle; None if it is not an array of such bytes."""
    match array:
        case Inert(state=(_, (int(count), int(width)), Inert(made_from=("u1", *_)), turned, bytes() | str() as data)):
            content = data if isinstance(data, bytes) else data.encode("latin1", "ignore")  # a str of Python 2
            if width == PIXELS and count > 0 and len(content) == count * width:
                return np.frombuffer(content, np.uint8).reshape(count, width, order="F" if turned else "C")
    return None


def parse_pickle(family: Family, file: Path, content: bytes) -> Samples:
    """Return the pictures and classes of a pickle."""
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a broken pickle may raise nearly anything
        raise UserError(f"{file} is not a pickle of arrays: {error}; replace it by the original file") from error
    x = pixels(batch.get("data")) if isinstance(batch, dict) else None
    if x is None:
        raise UserError(f"{file} has no array 'data' of bytes [n, {PIXELS}]; replace it by the original file")
    for name, kinds in family.labels:
        labels = batch.get(name)
        if not isinstance(labels, list) or len(labels) != len(x):
            raise UserError(f"{file} has no list '{name}' of {len(x):,} numbers; replace it by the original file")
        check_labels(file, name, labels, kinds)
    return x, np.array(labels, np.int64)


def published_md5s(family: Family) -> tuple[dict[str, str], str]:
    """Return torchvision's md5 of each file of the Python version, and of its archive."""
    kind: Any = getattr(import_torchvision().datasets, family.kind)
    return dict([*kind.train_list, *kind.test_list]), kind.tgz_md5


def check_md5(file: Path, chunks: Iterable[bytes], published: str) -> None:
    """Check that a file has the published content."""
    md5 = hashlib.md5(usedforsecurity=False)
    for chunk in chunks:
        md5.update(chunk)
    if md5.hexdigest() != published:
        raise UserError(
            f"{file} is not the published file: its md5 is {md5.hexdigest()}, not {published}; replace it by the "
            "original, or remove it"
        )


def fetch(family: Family, base: Path) -> None:
    """Download the archive of the Python version to torchvision's folder."""
    kind: Any = getattr(import_torchvision().datasets, family.kind)
    fetch_file([kind.url], base / kind.filename, kind.tgz_md5)


# Files and archives


def read_file(file: Path) -> bytes:
    """Return the content of a file."""
    try:
        with file.open("rb") as handle:
            return handle.read(LONGEST)
    except OSError as error:
        raise unreadable(file, error) from error


def read_archive(path: Path, names: list[str], md5: str) -> Iterator[tuple[Path, bytes]]:
    """Yield the archive's regular members of those names, as archive/name, with their content. Raise a UserError if the
    archive is damaged, or if an md5 is given and differs."""
    try:
        with path.open("rb") as file:
            if md5:
                check_md5(path, iter(partial(file.read, 1 << 20), b""), md5)
                file.seek(0)
            with gzip.open(file) as unpacked, tarfile.open(fileobj=unpacked, mode="r:") as archive:
                for member in archive:
                    if member.name in names and member.isreg() and (content := archive.extractfile(member)):
                        yield path / member.name, content.read(LONGEST)
                while unpacked.read(1 << 20):  # to the end, where gzip checks its checksum
                    pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise unreadable(path, error) from error

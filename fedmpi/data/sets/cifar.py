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
from fedmpi.data.files import damaged, fetch_file, unpacked, unreadable, wrong
from fedmpi.data.store import Source, Tensors, load
from fedmpi.plugins.torchvision import import_torchvision

Samples = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]
"""pictures [n, 3072] and their classes [n]"""

PUBLISHED = (50_000, 10_000)
PIXELS = 3 * 32 * 32
LONGEST = 1 << 28  # bytes of an archive's member; the files are shorter, so one that is cut here fails the checks


class Version(NamedTuple):
    """One of the two formats in which a set is published."""

    folder: str
    archive: str
    suffix: str  # of the names of its files; the binary version has one


class Family(NamedTuple):
    """A data set in CIFAR's formats."""

    name: str
    versions: tuple[Version, Version]
    train: tuple[str, ...]
    test: str
    labels: tuple[tuple[str, int], ...]  # name and number of values of each, in record order; the last is the class
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def published(self) -> Any:
        """Return torchvision's class, which has the addresses and md5s."""
        return getattr(import_torchvision().datasets, self.name.upper())

    def members(self, version: Version) -> list[str]:
        """Return all files of a version, with its folder."""
        return [f"{version.folder}/{name}{version.suffix}" for name in (*self.train, self.test)]


CIFAR10 = Family(
    "cifar10",
    (
        Version("cifar-10-batches-py", "cifar-10-python.tar.gz", ""),
        Version("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin"),
    ),
    tuple(f"data_batch_{i}" for i in range(1, 6)),
    "test_batch",
    (("labels", 10),),
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
CIFAR100 = Family(
    "cifar100",
    (
        Version("cifar-100-python", "cifar-100-python.tar.gz", ""),
        Version("cifar-100-binary", "cifar-100-binary.tar.gz", ".bin"),
    ),
    ("train",),
    "test",
    (("coarse_labels", 20), ("fine_labels", 100)),
    (0.5071, 0.4866, 0.4409),
    (0.2673, 0.2564, 0.2762),
)


def read(family: Family, root: Path | None = None) -> Arrays:
    """Load a data set of the family, from a root or the default one."""
    stored, classes = load(source_of(family), root), family.labels[-1][1]
    return stored.arrays(family.name, classes, mean=family.mean, std=family.std, augment="crop:4+flip")


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
        fetch=lambda base: fetch_file(
            [family.published.url], base / family.published.filename, family.published.tgz_md5
        ),
        published=PUBLISHED,
    )


cifar10, cifar10_source = partial(read, CIFAR10), partial(source_of, CIFAR10)
cifar100, cifar100_source = partial(read, CIFAR100), partial(source_of, CIFAR100)


def find_files(family: Family, base: Path) -> list[Path]:
    """Return the files of the first version that is present, or its archive; [] if there is neither."""
    for version in family.versions:
        files = [base / name for name in family.members(version)]
        there = [file for file in files if file.is_file()]
        subset = version.suffix and len(there) > 1 and there[-1] == files[-1]
        if subset or there == files:
            return there
        if (base / version.archive).is_file():
            return [base / version.archive]
    return []


def read_files(family: Family, files: list[Path]) -> Tensors:
    """Return the tensors of a version's files, or of its archive."""
    first = files[0]
    version = next(v for v in family.versions if first.name == v.archive or first.suffix == v.suffix)
    if first.name == version.archive:
        contents = read_archive(first, family.members(version), "" if version.suffix else family.published.tgz_md5)
    else:
        contents = ((file, unpacked(file)) for file in files)

    md5s = {} if version.suffix else dict([*family.published.train_list, *family.published.test_list])
    parts: dict[str, Samples] = {}
    for file, content in contents:
        if version.suffix:
            parts[file.stem] = parse_records(family, file, content)
        else:
            check_md5(file, content, md5s[file.name])
            parts[file.name] = parse_pickle(family, file, content)

    train = [name for name in family.train if name in parts]
    if family.test not in parts or not train or not (version.suffix or len(train) == len(family.train)):
        raise wrong(first, f"does not have all of the files {', '.join(family.members(version))}")
    tensors = {}
    for prefix, names in (("", train), ("test_", [family.test])):
        x, y = (np.concatenate([parts[name][i] for name in names]) for i in (0, 1))
        tensors[f"{prefix}x"] = torch.from_numpy(x.reshape(-1, 3, 32, 32))
        tensors[f"{prefix}y"] = torch.from_numpy(y)
    return tensors


# The binary version


def parse_records(family: Family, file: Path, content: bytes | bytearray) -> Samples:
    """Return the pictures and classes of a binary file."""
    labels = len(family.labels)
    record = labels + PIXELS
    most = PUBLISHED[1] if file.stem == family.test else PUBLISHED[0] // len(family.train)
    count, rest = divmod(len(content), record)
    if rest or not 1 <= count <= most:
        raise wrong(file, f"holds {len(content):,} bytes, not 1 to {most:,} records of {record:,} bytes")
    rows = np.frombuffer(content, np.uint8).reshape(count, record)
    for column, (name, kinds) in enumerate(family.labels):
        check_labels(file, name, rows[:, column].tolist(), kinds)
    return rows[:, labels:], rows[:, labels - 1].astype(np.int64)


def check_labels(file: Path, name: str, labels: Iterable[Any], kinds: int) -> None:
    """Check that labels are integers below `kinds`."""
    for number, label in enumerate(labels):
        if not (isinstance(label, int) and 0 <= label < kinds):
            raise wrong(file, f"has {name} {label!r} at record {number}, not one of 0 to {kinds - 1}")


# The Python version


def latin1(text: str, encoding: str) -> bytes:
    """Restore bytes from old pickles, as `_codecs.encode` does, but with this codec only."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it asks for the codec {encoding}")
    return text.encode("latin1")


class Inert:
    """Stands for a numpy array or dtype in a pickle: numpy can crash on a pickle's invalid arguments."""

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


def parse_pickle(family: Family, file: Path, content: bytes | bytearray) -> Samples:
    """Return the pictures and classes of a pickle."""
    try:
        batch = ArrayUnpickler(io.BytesIO(content), encoding="latin1").load()
    except Exception as error:  # a broken pickle may raise nearly anything
        raise wrong(file, f"is not a pickle of arrays: {error}") from error
    x = pixels(batch.get("data")) if isinstance(batch, dict) else None
    if x is None:
        raise wrong(file, f"has no array 'data' of bytes [n, {PIXELS}]")
    for name, kinds in family.labels:
        labels = batch.get(name)
        if not isinstance(labels, list) or len(labels) != len(x):
            raise wrong(file, f"has no list '{name}' of {len(x):,} numbers")
        check_labels(file, name, labels, kinds)
    return x, np.array(labels, np.int64)


def check_md5(file: Path, content: bytes | bytearray, published: str) -> None:
    """Check that a file has the published content."""
    if (md5 := hashlib.md5(content, usedforsecurity=False).hexdigest()) != published:
        raise wrong(file, f"is not the published file: its md5 is {md5}, not {published}")


def read_archive(path: Path, names: list[str], md5: str) -> Iterator[tuple[Path, bytes | bytearray]]:
    """Yield an archive's regular members of those names, as archive/name, with their content; check its `md5`."""
    try:
        packed = path.read_bytes()
        if md5:
            check_md5(path, packed, md5)
        with gzip.open(io.BytesIO(packed)) as plain, tarfile.open(fileobj=plain, mode="r:") as archive:
            for member in archive:
                if member.name in names and member.isreg() and (content := archive.extractfile(member)):
                    yield path / member.name, content.read(LONGEST)
            while plain.read(1 << 20):  # to the end, where gzip checks its checksum
                pass
    except (tarfile.TarError, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, error) from error
    except OSError as error:
        raise unreadable(path, error) from error

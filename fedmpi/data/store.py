"""Data sets on disk: where they lie, and how each is prepared once and then shared by all who read it.

A data set comes from a source: files in their public layout under a data root, or a generator. The first process that
wants it reads the source under a lock and writes the tensors, with a SHA-256, into one safetensors file in the folder
`prepared` of the root (in the user's cache where the root cannot be written). The file appears by a rename, so nobody
meets half of it; and it is mapped into memory, so that the ranks of a node share its pages instead of holding copies.

A prepared file that is damaged, or older than its source, is made again from the source; where there is no source any
more, a damaged one is refused by its name.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedmpi.data.arrays import Arrays
from fedmpi.errors import UserError

log = logging.getLogger("fedmpi")

LEFT_SECONDS = 3600.0  # a file aside that is older is nobody's

Tensors = dict[str, Tensor]
"""x, y, test_x, test_y and, where samples have owners, owner: what `Arrays` is made of"""


@dataclass(frozen=True)
class Source:
    """Where a data set comes from and how it is read."""

    name: str
    """also that of the prepared file"""
    version: int
    """part of that file's name: raise it with any change to the tensors"""
    read: Callable[[list[Path]], Tensors]
    """the tensors from the source's files; what is not sound is refused by the file's name"""
    find: Callable[[Path], list[Path]] = lambda root: []
    """the files of the source under a data root, cheaply; nothing where they are not all there"""
    wanted: str = ""
    """which files belong where under the root, in words"""
    fetch: Callable[[Path], None] | None = None
    """downloads the files to where `find` will find them, under the root"""
    generated: bool = False
    """whether there are no files: `read` makes it up"""
    published: tuple[int, int] | None = None
    """how many train and test samples the full set has"""


@dataclass(frozen=True)
class Stored:
    """A data set as it was prepared."""

    tensors: Tensors
    mean: tuple[float, ...]
    """of x / 255, one a channel, where x are images"""
    std: tuple[float, ...]
    sources: list[str]
    """names of the files it was read from"""
    path: Path | None
    """the prepared file that the tensors are mapped from; None where there was no folder to write it to"""
    published: tuple[int, int] | None = None
    """how many train and test samples the full set has"""
    sha256: str = ""
    """of the tensors, where there is a prepared file"""

    @property
    def note(self) -> str:
        """How much of the full set this is, where it is not all of it."""
        there = (len(self.tensors["y"]), len(self.tensors["test_y"]))
        if self.published is None or self.published == there:
            return ""
        train, test = (f"{here:,} of {full:,}" for here, full in zip(there, self.published, strict=True))
        return f"a subset, {train} train and {test} test samples: its results do not compare with those of the full set"

    def arrays(self, name: str, classes: int, **about: Any) -> Arrays:
        """The data set, with what is said about it; mean and deviation are those of its images unless they are."""
        fields: dict[str, Any] = {"mean": self.mean, "std": self.std, "note": self.note, "sha256": self.sha256}
        fields |= about | self.tensors
        return Arrays(name, classes, **fields)


def cache_folder() -> Path:
    """The folder for files that can be made again: $FEDMPI_CACHE, else $XDG_CACHE_HOME/fedmpi, else ~/.cache/fedmpi."""
    if given := os.environ.get("FEDMPI_CACHE"):
        return Path(given).expanduser()
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base).expanduser() / "fedmpi"
    try:
        return Path("~/.cache/fedmpi").expanduser()
    except RuntimeError:
        raise UserError("this user has no home folder; set FEDMPI_CACHE to a folder for files to be kept in") from None


def data_root(root: Path | None) -> Path:
    """The folder to look for data sets in: the argument, else $FEDMPI_DATA, else `data` in the cache folder."""
    given = root or os.environ.get("FEDMPI_DATA")
    if not given:
        return cache_folder() / "data"
    path, what = Path(given).expanduser(), "--data_root" if root else "FEDMPI_DATA"
    try:
        if path.exists() and not path.is_dir():
            raise UserError(f"{what} {path} is not a folder; give one, or leave it out")
        if not path.is_dir() and not path.absolute().parent.is_dir():
            raise UserError(f"{what} {path}: there is no such folder; give one that is there, or make it")
    except OSError as error:
        raise UserError(f"{what} {path} cannot be looked into ({error.strerror}); give another") from error
    return path


def load(source: Source, root: Path | None = None) -> Stored:
    """The data set, mapped from its prepared file; prepared first where that is not there."""
    base = data_root(root)
    for path in prepared_files(source, base):
        if (stored := read_prepared(path, source, base)) is not None:
            return stored
    return prepare(source, base)


def prepared_files(source: Source, base: Path) -> list[Path]:
    """Where the prepared file may lie: in the root, or else in the user's cache."""
    name = f"{source.name}-v{source.version}.safetensors"
    # Of several nodes with copies of their own under one name, none replaces another's file.
    about = json.dumps([str(base.absolute()), fingerprint(source, base)])
    key = hashlib.sha256(about.encode()).hexdigest()[:12]
    return [base / "prepared" / name, cache_folder() / "prepared" / key / name]


def prepare(source: Source, base: Path) -> Stored:
    """Read the source and keep the result, in one process while the others wait for it; what stopped that one stops
    the others in the same words."""
    check_source(source, base)
    path = next((p for p in prepared_files(source, base) if can_write(p.parent)), None)
    if path is None:
        log.warning("no folder can be written to keep '%s' in: each process reads it for itself", source.name)
        tensors = read_source(source, base)
        names = [file.name for file in find_files(source, base)]
        return Stored(tensors, *moments(tensors["x"]), names, None, source.published, digest(tensors))
    lock = path.with_name(f".{source.name}.lock")
    with locked(lock) as sentence:
        if sentence:
            raise UserError(sentence.splitlines()[-1])
        if (stored := read_prepared(path, source, base, quiet=True)) is None:
            try:
                write_prepared(path, source, base, read_source(source, base))
            except UserError as error:
                with contextlib.suppress(OSError), lock.open("a") as note:
                    note.write(f"{error}\n")
                raise
            stored = read_prepared(path, source, base)
    if stored is None:
        raise UserError(f"{path} cannot be read back; is the disk sound? Remove the file, or give another --data_root")
    return stored


def find_files(source: Source, base: Path) -> list[Path]:
    """The files of a source under a root; a root that cannot be searched is refused."""
    try:
        return source.find(base)
    except OSError as error:
        raise UserError(f"{base} cannot be searched for '{source.name}' ({error.strerror or error})") from error


def check_source(source: Source, base: Path) -> None:
    """Refuse a source that is missing and cannot be downloaded."""
    if source.generated or find_files(source, base):
        return
    if source.fetch is None:
        raise missing(source, base, "and there is no place to download it from")
    if os.environ.get("FEDMPI_OFFLINE"):
        raise missing(source, base, "FEDMPI_OFFLINE forbids a download")


def read_source(source: Source, base: Path) -> Tensors:
    """The tensors from the source's files, which are downloaded where they are missing."""
    if not source.generated and not find_files(source, base):
        assert source.fetch is not None, "checked before"
        try:
            base.mkdir(exist_ok=True, parents=base == cache_folder() / "data")
        except OSError as error:
            raise missing(source, base, f"and that folder cannot be made ({error.strerror})") from error
        try:
            source.fetch(base)
        except UserError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise missing(source, base, f"and the download failed ({reason.rstrip(':')})") from error
    return source.read(find_files(source, base))


def missing(source: Source, base: Path, why: str) -> UserError:
    """The error for a data set that is nowhere, with the ways to get it; names a damaged prepared file, if any."""
    damaged = [str(path) for path in prepared_files(source, base) if path.exists()]
    sound = f" (what was prepared of it, {damaged[0]}, is damaged)" if damaged else ""
    fetched = ", or run once where there is a network" if source.fetch is not None else ""
    return UserError(
        f"data set '{source.name}' is not under {base}, {why}{sound}; {source.wanted.format(root=base)}, or name the "
        f"folder that has them by --data_root or FEDMPI_DATA{fetched}"
    )


def can_write(folder: Path) -> bool:
    """Whether files can be made in a folder, which is made where it is missing. A folder that nobody may write to is
    left alone, also by root, who could."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        if not there.stat().st_mode & 0o222:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError:
        return False
    return True


def fingerprint(source: Source, base: Path) -> list[list[Any]]:
    """Name, size and time of change of each file of a source: another one means another source."""
    try:
        stats = [(file, file.stat()) for file in find_files(source, base)]
    except OSError as error:
        raise UserError(f"{error.filename} of '{source.name}' cannot be looked at ({error.strerror})") from error
    return [[file.name, stat.st_size, stat.st_mtime_ns] for file, stat in stats]


def digest(tensors: Tensors) -> str:
    """The SHA-256 of names, kinds, shapes and content."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 for each channel of uint8 images, by counting values: exact."""
    if x.dtype != torch.uint8 or x.ndim != 4:
        return (), ()
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in range(x.shape[1]):
        count = np.zeros(256)
        for start in range(0, len(x), 1000):
            count += np.bincount(x[start : start + 1000, channel].numpy().ravel(), minlength=256)
        mean = float((count * values).sum() / count.sum())
        means.append(mean)
        deviations.append(float(np.sqrt((count * (values - mean) ** 2).sum() / count.sum())))
    return tuple(means), tuple(deviations)


def read_prepared(path: Path, source: Source, base: Path, quiet: bool = False) -> Stored | None:
    """The data set in a prepared file; None where there is none, or none that is sound and not older than its source
    (said in the log unless `quiet`)."""
    say = log.debug if quiet else log.warning
    try:
        with safetensors.safe_open(path, "pt") as file:
            about = file.metadata() or {}
        tensors = safetensors.torch.load_file(path)
    except FileNotFoundError:
        return None
    except (OSError, safetensors.SafetensorError) as error:
        say("cannot read %s (%s); preparing it again", path, error)
        return None
    if about.get("sha256") != digest(tensors):
        say("%s is damaged (its content does not match its SHA-256); preparing it again", path)
        return None
    now = fingerprint(source, base)
    if now and json.loads(about["sources"]) != now:
        say("%s was prepared from other files than those there now; preparing it again", path)
        return None
    mean, std = (tuple(map(float, json.loads(about[key]))) for key in ("mean", "std"))
    names = [name for name, *_ in json.loads(about["sources"])]
    return Stored(tensors, mean, std, names, path, source.published, about["sha256"])


def write_prepared(path: Path, source: Source, base: Path, tensors: Tensors) -> None:
    """Write tensors into a prepared file by way of a name of its own."""
    mean, std = moments(tensors["x"])
    about = {
        "sha256": digest(tensors),
        "sources": json.dumps(fingerprint(source, base)),
        "mean": json.dumps(mean),
        "std": json.dumps(std),
    }
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        for left in path.parent.glob(f".{path.name}.*"):  # by a process that was killed
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                left.unlink(missing_ok=True)
        aside.touch()  # with the permissions that the umask gives: a group may share the folder
        mode = aside.stat().st_mode
        safetensors.torch.save_file({k: t.contiguous() for k, t in tensors.items()}, aside, about)
        aside.chmod(mode)
        os.replace(aside, path)
    except (OSError, safetensors.SafetensorError) as error:
        raise UserError(f"{path} cannot be written ({error}); make room, or give another --data_root") from error
    finally:
        aside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[str]:
    """Hold the lock file `path`; yields what another process wrote into it while this one waited.

    Where locking is impossible (a file system without locks) it goes on without: whatever is made under the lock is
    renamed into place, so the lock saves work and does not carry correctness.
    """
    with contextlib.ExitStack() as stack:
        text = ""
        with contextlib.suppress(OSError):
            handle = stack.enter_context(open(path, "a+"))
            before = os.fstat(handle.fileno()).st_size
            fcntl.flock(handle, fcntl.LOCK_EX)
            handle.seek(before)
            text = handle.read()
        yield text

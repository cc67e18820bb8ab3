"""Data sets on disk: each is prepared once, and then shared by all processes that read it.

A data set comes from a source: files in their public layout under a data root, or a generator. The first process that
needs it reads the source under a lock and writes the tensors, with a SHA-256, to one safetensors file in the folder
`prepared` of the root (in the user's cache if the root is not writable). The file is renamed into place, so nobody
reads a partial one, and mapped into memory, so that the ranks of a node share its pages instead of holding copies.

A prepared file that is damaged, or older than its source, is created again from the source; without a source, a damaged
file is an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedmpi.data.arrays import Arrays
from fedmpi.errors import UserError

log = logging.getLogger("fedmpi")

LEFT_SECONDS = 3600.0  # a temporary file that is older was left by a killed process

Tensors = dict[str, Tensor]  # x, y, test_x, test_y and, if samples have owners, owner: the tensors of `Arrays`


@dataclass(frozen=True)
class Source:
    """The files of a data set, and how to read them."""

    name: str  # also names the prepared file
    version: int  # part of that file's name: raise it with any change to the tensors
    read: Callable[[list[Path]], Tensors]  # reads the files; raises a UserError that names an invalid one
    find: Callable[[Path], list[Path]] = lambda root: []  # finds them under a root, cheaply; [] if not complete
    wanted: str = ""  # instructions for the user: which files belong where under the root
    fetch: Callable[[Path], None] | None = None  # downloads the files to where `find` finds them
    generated: bool = False  # whether `read` generates the data without files
    published: tuple[int, int] | None = None  # number of train and test samples of the full set


@dataclass(frozen=True)
class Stored:
    """A prepared data set."""

    tensors: Tensors
    mean: tuple[float, ...]  # of x / 255, per channel, if x are images
    std: tuple[float, ...]
    sources: list[str]  # names of the files it was read from
    path: Path | None  # the prepared file that the tensors are mapped from; None if no folder was writable
    published: tuple[int, int] | None = None
    sha256: str = ""  # of the tensors

    @property
    def note(self) -> str:
        """Return how much of the full set this is; '' if it is complete."""
        there = (len(self.tensors["y"]), len(self.tensors["test_y"]))
        if self.published is None or self.published == there:
            return ""
        train, test = (f"{here:,} of {full:,}" for here, full in zip(there, self.published, strict=True))
        return f"a subset, {train} train and {test} test samples: its results do not compare with those of the full set"

    def arrays(self, name: str, classes: int, **about: Any) -> Arrays:
        """Return the data set with the fields `about`; mean and std default to those of its images."""
        fields: dict[str, Any] = {"mean": self.mean, "std": self.std, "note": self.note, "sha256": self.sha256}
        fields |= about | self.tensors
        return Arrays(name, classes, **fields)


def as_tensors(**arrays: npt.NDArray[Any]) -> Tensors:
    """Return arrays as tensors, without a copy."""
    return {name: torch.from_numpy(array) for name, array in arrays.items()}


def cache_folder() -> Path:
    """Return the cache folder: $FEDMPI_CACHE, else $XDG_CACHE_HOME/fedmpi, else ~/.cache/fedmpi."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(os.environ.get("FEDMPI_CACHE") or f"{base}/fedmpi").expanduser()
    except RuntimeError:
        raise UserError("this user has no home folder; set FEDMPI_CACHE to a folder for files to be kept in") from None


def data_root(root: Path | None) -> Path:
    """Return the data root: the argument, else $FEDMPI_DATA, else `data` in the cache folder."""
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
    """Return the data set, mapped from its prepared file, which is created first if it is missing."""
    base = data_root(root)
    for path in prepared_files(source, base):
        if (stored := read_prepared(path, source, base)) is not None:
            return stored
    return prepare(source, base)


def prepared_files(source: Source, base: Path) -> list[Path]:
    """Return the possible paths of the prepared file: in the root, else in the user's cache."""
    name = f"{source.name}-v{source.version}.safetensors"
    # The key keeps nodes that have different copies under the same path from replacing each other's file.
    about = json.dumps([str(base.absolute()), fingerprint(source, base)])
    key = hashlib.sha256(about.encode()).hexdigest()[:12]
    return [base / "prepared" / name, cache_folder() / "prepared" / key / name]


def prepare(source: Source, base: Path) -> Stored:
    """Read the source and store the result, in one process while the others wait; if it fails, all raise its error."""
    needed_fetch(source, base)  # raises before anything is written
    path = next((p for p in prepared_files(source, base) if can_write(p.parent)), None)
    if path is None:
        log.warning("no writable folder for the prepared '%s': each process reads its source", source.name)
        tensors = read_source(source, base)
        names = [file.name for file in find_files(source, base)]
        return Stored(tensors, *moments(tensors["x"]), names, None, source.published, digest(tensors))
    lock = path.with_name(f".{source.name}.lock")
    with locked(lock) as message:
        if message:
            raise UserError(message.splitlines()[-1])
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
    """Return the files of a source under a root; raise a UserError if the root cannot be searched."""
    try:
        return source.find(base)
    except OSError as error:
        raise UserError(f"{base} cannot be searched for '{source.name}' ({error.strerror or error})") from error


def needed_fetch(source: Source, base: Path) -> Callable[[Path], None] | None:
    """Return the download that a source needs, None if its files are here; raise a UserError if there is no way."""
    if source.generated or find_files(source, base):
        return None
    if source.fetch is None:
        raise missing(source, base, "and there is no place to download it from")
    if os.environ.get("FEDMPI_OFFLINE"):
        raise missing(source, base, "FEDMPI_OFFLINE forbids a download")
    return source.fetch


def read_source(source: Source, base: Path) -> Tensors:
    """Return the tensors from the source's files, which are downloaded if they are missing."""
    if fetch := needed_fetch(source, base):
        try:
            base.mkdir(exist_ok=True, parents=base == cache_folder() / "data")
            fetch(base)
        except UserError:
            raise
        except Exception as error:
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            raise missing(source, base, f"and the download failed ({reason.rstrip(':')})") from error
    return source.read(find_files(source, base))


def missing(source: Source, base: Path, why: str) -> UserError:
    """Return the error for a missing data set, with the ways to get it; it names a damaged prepared file, if any."""
    damaged = [str(path) for path in prepared_files(source, base) if path.exists()]
    sound = f" (what was prepared of it, {damaged[0]}, is damaged)" if damaged else ""
    fetched = ", or run once where there is a network" if source.fetch is not None else ""
    return UserError(
        f"data set '{source.name}' is not under {base}, {why}{sound}; {source.wanted.format(root=base)}, or name the "
        f"folder that has them by --data_root or FEDMPI_DATA{fetched}"
    )


def can_write(folder: Path) -> bool:
    """Return whether files can be created in a folder, made if missing; read-only ones are respected even by root."""
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    try:
        if not there.stat().st_mode & 0o222:
            return False
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def fingerprint(source: Source, base: Path) -> list[list[Any]]:
    """Return name, size and modification time of each file of a source: they change with the source."""
    stats = [(file.name, file.stat()) for file in find_files(source, base)]
    return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]


def digest(tensors: Tensors) -> str:
    """Return the SHA-256 of names, types, shapes and content."""
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        sha.update(tensor.contiguous().numpy().data)
    return sha.hexdigest()


def moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of x / 255 per channel of uint8 images, exactly, by counting values."""
    if x.dtype != torch.uint8 or x.ndim != 4:
        return (), ()
    values = np.arange(256) / 255
    means, deviations = [], []
    for channel in x.unbind(1):
        blocks = torch.split(channel, 1000)
        count = np.sum([np.bincount(block.numpy().ravel(), minlength=256) for block in blocks], axis=0)
        mean = float((count * values).sum() / count.sum())
        means.append(mean)
        deviations.append(float(np.sqrt((count * (values - mean) ** 2).sum() / count.sum())))
    return tuple(means), tuple(deviations)


def read_verified(path: Path) -> tuple[Tensors, dict[str, str]]:
    """Return the tensors and metadata of a prepared file; raise an OSError or a SafetensorError if it is damaged."""
    with safetensors.safe_open(path, "pt") as file:
        about: dict[str, str] = file.metadata() or {}
    tensors = safetensors.torch.load_file(path)
    if about.get("sha256") != digest(tensors):
        raise safetensors.SafetensorError("its content does not match its SHA-256")
    return tensors, about


def read_prepared(path: Path, source: Source, base: Path, quiet: bool = False) -> Stored | None:
    """Return the data set in a prepared file; None if it is missing, damaged or older than its source."""
    warn = log.debug if quiet else log.warning
    try:
        tensors, about = read_verified(path)
    except FileNotFoundError:
        return None
    except (OSError, safetensors.SafetensorError) as error:
        warn("%s is damaged (%s); preparing it again", path, error)
        return None
    now = fingerprint(source, base)
    if now and json.loads(about["sources"]) != now:
        warn("%s was prepared from other files than are there now; preparing it again", path)
        return None
    mean, std = (tuple(map(float, json.loads(about[key]))) for key in ("mean", "std"))
    names = [name for name, *_ in json.loads(about["sources"])]
    return Stored(tensors, mean, std, names, path, source.published, about["sha256"])


def write_prepared(path: Path, source: Source, base: Path, tensors: Tensors) -> None:
    """Write tensors to a temporary file, and rename it to the prepared file."""
    mean, std = moments(tensors["x"])
    values = {"sources": fingerprint(source, base), "mean": mean, "std": std}
    about = {"sha256": digest(tensors)} | {key: json.dumps(value) for key, value in values.items()}
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        for left in path.parent.glob(f".{path.name}.*"):  # left by killed processes
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                left.unlink(missing_ok=True)
        aside.touch()  # with the umask's permissions: a group may share the folder
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
    """Hold the lock file `path`; yield what another process wrote to it while this one waited. Without locks in the
    file system this does nothing: files are renamed into place, so a lock only avoids duplicate work."""
    with contextlib.ExitStack() as stack:
        text = ""
        with contextlib.suppress(OSError):
            handle = stack.enter_context(open(path, "a+"))
            before = os.fstat(handle.fileno()).st_size
            fcntl.flock(handle, fcntl.LOCK_EX)
            handle.seek(before)
            text = handle.read()
        yield text

"""Remove the files of killed runs from a node's memory file system at the next start.

A run that is killed while it creates shared memory, or while its ranks connect, leaves a folder `fedmpi-...`; MPICH
leaves a file `mpich_shm_...` after every kill. Both occupy memory until they are removed. A file is removed only if it
belongs to this user, is older than a start takes, and is not in use: our folders are locked while a process of the run
is alive, MPICH's files are mapped.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator
from pathlib import Path

MEMORY = Path("/dev/shm")
OURS, MPI = re.compile(r"fedmpi-[\w-]+"), re.compile(r"(?:mpich_shm|ucx_shm_posix)_[0-9a-f]+(?:_\d+)?")
OUR_SECONDS, MPI_SECONDS = 60.0, 600.0  # minimum time since the last change


@contextlib.contextmanager
def in_use(folder: Path, lock_type: int = fcntl.LOCK_SH) -> Iterator[None]:
    """Mark a folder as in use by this process and its forks, until all of them have ended."""
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, lock_type)
        yield
    finally:
        os.close(lock)


def leftovers(memory: Path = MEMORY) -> list[Path]:
    """Return the files and folders of this user's killed runs."""
    paths: list[Path] = []
    with contextlib.suppress(OSError):
        paths = sorted(memory.iterdir())
    ours = [p for p in paths if OURS.fullmatch(p.name) and old(p, stat.S_IFDIR, OUR_SECONDS) and not locked(p)]
    mpi = [p for p in paths if MPI.fullmatch(p.name) and old(p, stat.S_IFREG, MPI_SECONDS)]
    mapped = mapped_files() if mpi else set()
    return ours + [p for p in mpi if str(p) not in mapped]


def sweep(memory: Path = MEMORY) -> None:
    """Remove the files and folders of this user's killed runs."""
    for path in leftovers(memory):
        with contextlib.suppress(OSError):  # another process may be removing it too
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def old(path: Path, kind: int, seconds: float) -> bool:
    """Return whether a path is of that kind, this user's, and has not changed for a while."""
    try:
        about = path.lstat()
    except OSError:
        return False
    ours = stat.S_IFMT(about.st_mode) == kind and about.st_uid == os.geteuid()
    return ours and time.time() - about.st_mtime > seconds


def locked(folder: Path) -> bool:
    """Return whether a living process marks a folder as in use."""
    try:
        with in_use(folder, fcntl.LOCK_EX | fcntl.LOCK_NB):
            return False
    except OSError:
        return True


def mapped_files() -> set[str]:
    """Return the files in /dev/shm that are mapped by this user's processes."""
    found: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # another user's process, or one that has ended
            found.update(line.split(maxsplit=5)[5] for line in maps.read_text().splitlines() if line.count("/dev/shm/"))
    return found

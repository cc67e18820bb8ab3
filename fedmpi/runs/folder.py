"""A run folder: its files, who owns it, and how files are written.

    config.yaml environment.json partition.json      what runs
    metrics.jsonl tensorboard/ wandb/ mlflow/        the results so far
    checkpoints/                                     what it resumes from (checkpoint/)
    model.safetensors finished.json attack.json      when it is done; the last where the model was attacked
    adapter_model.safetensors adapter_config.json merged/ generated.txt     of a transformers model (export.py)
    starts.jsonl stopped.json lock                   one line per start; how the last one stopped; who runs it now
    job.json lives.jsonl cancelled slurm/            where it was submitted (cluster/status.py)

The folder is private to the user. One run at a time owns it: rank 0 holds a lock that the system itself releases when
the process is gone, for whatever reason. What must never be read half written is written aside, synced and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from ..comm.env import Place, job_names
from ..errors import FileError, RunError, UserError, reason, short_path
from .schema import Damaged, Owner, Start, Stopped, checked, load, opened, parse, read, records

log = logging.getLogger("fedmpi")

CONFIG, FINISHED, MODEL, METRICS = "config.yaml", "finished.json", "model.safetensors", "metrics.jsonl"
STARTS, STOPPED, LOCK, CHECKPOINTS = "starts.jsonl", "stopped.json", "lock", "checkpoints"
ATTACK = "attack.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
MERGED, GENERATED = "merged", "generated.txt"
RESULTS = (FINISHED, MODEL, ATTACK, ADAPTER, ADAPTER_CONFIG, MERGED, GENERATED)  # what a finished run has
WAIT_SECONDS = 10.0  # for the process before, which may not be gone yet
LEASE_SECONDS = 300.0  # the same after a restart: a file server learns late that a node is gone
BEGINNINGS = (LOCK, ".writable", f".{CONFIG}")  # all that a run leaves if it is killed at once
LOCK_BYTES = 1 << 16  # read at most so much of a lock
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def check(out: Path) -> None:
    """Refuse a folder that holds somebody's other files or cannot be read."""
    try:
        if out.exists() and not (out / CONFIG).exists() and any(one.name not in BEGINNINGS for one in out.iterdir()):
            raise UserError(f"--out {out} holds files that are no run of fedmpi; choose another folder")
    except OSError as error:
        name = short_path(str(out))
        raise UserError(f"--out {name} cannot be read ({error.strerror}); choose another folder") from None
    check_writable(out)


def check_writable(out: Path) -> None:
    """Refuse a folder that does not exist and cannot be made, before any work is done for its content."""
    try:
        if out.exists():
            return
        above = next(path for path in out.absolute().parents if path.exists())
        os.rmdir(tempfile.mkdtemp(prefix=".fedmpi-", dir=above))
    except OSError as error:
        raise unwritable(out, error) from None


def unwritable(out: Path, error: OSError) -> UserError:
    """Return the error for a folder that cannot be written."""
    return UserError(f"--out {short_path(str(out))} cannot be written ({error.strerror}); choose a folder that can")


def make(out: Path) -> None:
    """Make the run folder, private to the user."""
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (out / CONFIG).exists():
            out.chmod(0o700)  # the user may have made it
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise unwritable(out, error) from None


def start_over(out: Path) -> None:
    """Remove what an earlier run left, so that nothing of it is taken for the new one's."""
    for name in ("tensorboard", "wandb", "mlflow", CHECKPOINTS, METRICS, *RESULTS):
        remove(out / name)


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


_held: set[int] = set()
"""the descriptors of the locks that this process holds"""


def _release_in_child() -> None:
    """Close the locks in a forked child: whoever has the descriptor holds the lock, and a child may outlive a killed
    owner."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_release_in_child)


@contextmanager
def held(out: Path, place: Place, environ: Mapping[str, str], timeout: float) -> Iterator[None]:
    """Hold the lock of the folder. If another run holds it, raise a `UserError` that names it; after a restart a
    `RunError`, as it may be the process before. A file system without locks is used without."""
    try:
        handle = own_handle(out / LOCK, os.O_RDWR, 0o600)
    except OSError as error:
        raise FileError(f"{out / LOCK} cannot be used ({reason(error)}); remove it and try again") from None
    _held.add(handle)
    try:
        again = restarts(environ) > 0
        seconds = min(LEASE_SECONDS, timeout / 2) if again else WAIT_SECONDS
        if take(handle, out, seconds, RunError if again else UserError):
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "launcher": place.launcher, "ranks": place.size}
            owner |= {**job_names(environ), "since": time.time()}
            os.ftruncate(handle, 0)
            os.write(handle, (json.dumps(owner) + "\n").encode())
        yield
    finally:
        if handle in _held:
            _held.remove(handle)
            os.close(handle)


def take(handle: int, out: Path, seconds: float, refusal: type[RunError] | type[UserError]) -> bool:
    """Take the lock, waiting for a process that is about to end, else raise; return False if the file system has no
    locks."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                what = f"--out {out} is in use by {owner_in_words(out)}"
                raise refusal(f"{what}; wait for it, stop it, or choose another folder") from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("the file system of %s has no locks: make sure that no other run uses this folder", out)
            return False
        time.sleep(0.2)


def holder(out: Path, lock: str = LOCK) -> Owner | None:
    """Return who runs in a folder now, as far as is known: {} while the lock is being written, None if nobody does."""
    path = out / lock
    try:
        with opened(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                raw = file.read(LOCK_BYTES)
    except (OSError, Damaged):
        return None
    try:
        return checked(path, parse(path, raw), Owner)
    except Damaged:
        return {}


def owner_in_words(out: Path) -> str:
    """Return who holds the lock, for an error message."""
    owner = holder(out) or {}
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner['host']}{job}" if {"pid", "host"} <= owner.keys() else "another run"


def write(path: Path, content: str | bytes, aside: str = "", mode: int = 0o666) -> None:
    """Write a file aside, sync and rename it, so that nobody ever reads half of it. `aside` is a suffix that keeps
    processes apart which may write it at the same time; `mode` are the permissions."""
    temporary = aside_of(path, aside)
    with open(own_handle(temporary, os.O_WRONLY | os.O_TRUNC, mode), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        raise not_regular(path) from None
    sync(path.parent)


def write_by(path: Path, save: Callable[[Path], object]) -> None:
    """Like `write`, with a function that writes the file, in place of its content."""
    temporary = aside_of(path)
    handle = own_handle(temporary, os.O_WRONLY | os.O_TRUNC)
    mode = stat.S_IMODE(os.fstat(handle).st_mode)
    os.close(handle)
    save(temporary)
    os.chmod(temporary, mode)  # it may have been replaced by a file of other permissions
    sync(temporary)
    try:
        os.replace(temporary, path)
    except IsADirectoryError:
        raise not_regular(path) from None
    sync(path.parent)


def aside_of(path: Path, suffix: str = "") -> Path:
    """Return the name of a file while it is written."""
    return path.with_name(f".{path.name}{suffix}")


def append(path: Path, line: str) -> None:
    """Append a line to a file, which is made if there is none."""
    with open(own_handle(path, os.O_WRONLY | os.O_APPEND), "w", encoding="utf-8") as file:
        file.write(line + "\n")


def own_handle(path: Path, flags: int, mode: int = 0o666) -> int:
    """Open a file of the run folder for writing: a regular one, and no link, which may lead out of the folder."""
    try:
        handle = os.open(path, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP, errno.ENXIO):
            raise not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise not_regular(path)
    return handle


def not_regular(path: Path) -> OSError:
    """Return the error for something other than a regular file."""
    return OSError(errno.EBADF, f"{path.name} is no regular file", str(path))


def sync(path: Path) -> None:
    """Make sure that a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def write_failed(out: Path, why: str, kept: int) -> str:
    """Return the error message for a run folder that cannot be written any more; `kept` is the round of the newest
    checkpoint."""
    safe = f"the checkpoint of round {kept} is kept" if kept else "there is no checkpoint yet"
    return f"{out} cannot be written ({why}); {safe}: put that right and start the same command again"


def attempt(work: Callable[[], object]) -> str:
    """Do something that writes into the folder; return why it failed, '' if it did not."""
    try:
        work()
    except (OSError, SafetensorError, FileError) as error:
        return reason(error)
    return ""


def add_start(out: Path, place: Place, comm: str, round: int, environ: Mapping[str, str]) -> None:
    """Record a start in the folder; the record of the last stop is removed."""
    record = {
        "time": time.time(),
        "round": round,
        "ranks": place.size,
        "launcher": place.launcher,
        "comm": comm,
        "host": socket.gethostname(),
        **job_names(environ),
        "restart": restarts(environ),
        "launch": launches(environ),
    }
    append(out / STARTS, json.dumps(record))
    remove(out / STOPPED)


def add_stop(out: Path, round: int, why: str, environ: Mapping[str, str]) -> None:
    """Record that the run stopped in good order, and in whose launch."""
    record = {"round": round, "why": why, "time": time.time(), "launch": launches(environ)}
    write(out / STOPPED, json.dumps(record) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Return a small record that may be rewritten at any time; {} if there is none that can be read."""
    try:
        found = parse(path, load(path))
    except (OSError, Damaged):
        return {}
    return found if isinstance(found, dict) else {}


def launches(environ: Mapping[str, str]) -> list[str]:
    """Return names for what launched this process; they are the same after a restart."""
    names = []
    if "TORCHELASTIC_RUN_ID" in environ:
        names.append(f"torchrun {environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    if "SLURM_JOB_ID" in environ:
        names.append(f"slurm {environ['SLURM_JOB_ID']}")
    if "FEDMPI_LAUNCH" in environ:
        names.append(f"script {environ['FEDMPI_LAUNCH']}")
    return names


def begun_before(out: Path, environ: Mapping[str, str]) -> bool:
    """Return whether this launch has begun the run already and is restarting it."""
    if not restarts(environ):
        return False
    here = set(launches(environ))
    return any(here & set(start.get("launch", [])) for start in records(out / STARTS, Start))


def stopped_before(out: Path, environ: Mapping[str, str]) -> Stopped | None:
    """Return how this very launch has stopped already, if torchrun takes that for a failure and restarts the ranks."""
    record = read(out / STOPPED, Stopped)
    here = [name for name in launches(environ) if name.startswith("torchrun")]  # a requeued Slurm job resumes
    again = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return record if record and again and set(here) & set(record.get("launch", [])) else None


def restarts(environ: Mapping[str, str]) -> int:
    """Return how often the launcher has restarted this job."""
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FEDMPI_RESTART_COUNT")
    return sum(int(environ[name]) for name in names if environ.get(name, "").isdecimal())

"""A run folder: whose it is, what lies in it, and how files get there.

    config.yaml environment.json partition.json      what runs
    metrics.jsonl tensorboard/ wandb/ mlflow/        what it has come to so far
    checkpoints/                                     where it goes on from (checkpoint.py)
    model.safetensors finished.json attack.json      when it is done; the last where the model was attacked
    starts.jsonl stopped.json lock                   its lives: one line each; how the last one stopped; who runs it now
    job.json lives.jsonl cancelled slurm/            where it was submitted (jobs.py)

The folder is private to the user. One run at a time has it: rank 0 holds a lock that the system itself takes back when
the process is gone, however it went. Whatever must not be read in halves is written aside, synced and renamed.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from .env import Place, job_names
from .errors import RunError, UserError

log = logging.getLogger("fedmpi")

CONFIG, FINISHED, MODEL, METRICS = "config.yaml", "finished.json", "model.safetensors", "metrics.jsonl"
STARTS, STOPPED, LOCK, CHECKPOINTS = "starts.jsonl", "stopped.json", "lock", "checkpoints"
ATTACK = "attack.json"
WAIT_SECONDS = 10.0  # for the last life of this run, which may be dying still
LEASE_SECONDS = 300.0  # for the same after a restart: a file server learns late that a node is gone
BEGINNINGS = (LOCK, ".writable", f".{CONFIG}")  # all that a run killed before its first word leaves
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)


def check(out: Path) -> None:
    """Refuse a folder that holds somebody's other files or cannot be read."""
    try:
        if out.exists() and not (out / CONFIG).exists() and any(one.name not in BEGINNINGS for one in out.iterdir()):
            raise UserError(f"--out {out} holds files that are no run of fedmpi; choose another folder")
    except OSError as error:
        raise UserError(f"--out {out} cannot be read ({error.strerror}); choose another folder") from None


def make(out: Path) -> None:
    """Make the run folder, private to the user."""
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not (out / CONFIG).exists():
            out.chmod(0o700)  # it may have been made by hand
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose a folder that can") from None


def start_over(out: Path) -> None:
    """Remove what an earlier run has left, so that nothing of it is taken for the new one's."""
    (out / FINISHED).unlink(missing_ok=True)
    for name in ("tensorboard", "wandb", "mlflow", CHECKPOINTS):
        shutil.rmtree(out / name, ignore_errors=True)
    for name in (METRICS, MODEL, ATTACK):
        (out / name).unlink(missing_ok=True)


_held: set[int] = set()
"""the descriptors of the locks that this process has"""


def _let_go() -> None:
    """In a forked child: a lock is had by all who have its descriptor, and a child may outlive a killed owner."""
    for handle in _held:
        os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def held(out: Path, place: Place, environ: Mapping[str, str], timeout: float) -> Iterator[None]:
    """Have the folder to oneself. Where somebody else has it: a `UserError` that names them; a `RunError` after a
    restart, when it may be the life before. On a file system without locks, go on without."""
    handle = os.open(out / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    _held.add(handle)
    try:
        again = restarts(environ) > 0
        if take(handle, out, min(LEASE_SECONDS, timeout / 2) if again else WAIT_SECONDS):
            owner = {"host": socket.gethostname(), "pid": os.getpid(), "launcher": place.launcher, "ranks": place.size}
            owner |= {**job_names(environ), "since": time.time()}
            os.ftruncate(handle, 0)
            os.write(handle, (json.dumps(owner) + "\n").encode())
        yield
    except Taken:
        sentence = f"--out {out} is in use by {owner_in_words(out)}; wait for it, stop it, or choose another folder"
        raise RunError(sentence) if again else UserError(sentence) from None
    finally:
        if handle in _held:
            _held.remove(handle)
            os.close(handle)


class Taken(Exception):
    """Somebody else has the lock."""


def take(handle: int, out: Path, seconds: float) -> bool:
    """Take the lock, waiting for a life that is on its way out; False where there are no locks."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise Taken from None
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            log.warning("the file system of %s has no locks: make sure that no other run uses this folder", out)
            return False
        time.sleep(0.2)


def holder(out: Path) -> dict[str, Any] | None:
    """Who runs in a folder now, as far as that can be told; None: nobody."""
    try:
        with open(out / LOCK, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return None
            except BlockingIOError:
                found = json.loads(file.readline() or "{}")
                return found if isinstance(found, dict) else {}
    except ValueError:  # it is being written
        return {}
    except OSError:
        return None


def owner_in_words(out: Path) -> str:
    """Who has the lock, for an error."""
    owner = holder(out) or {}
    job = f", Slurm job {owner['job']}" if owner.get("job") else ""
    return f"process {owner['pid']} on {owner['host']}{job}" if {"pid", "host"} <= owner.keys() else "another run"


def write(path: Path, text: str, aside: str = "") -> None:
    """Write a file aside, sync and rename it, so that nobody ever reads half of it. `aside` tells apart those who may
    write it at the same time."""
    beside = path.with_name(f".{path.name}{aside}")
    with open(beside, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    sync(path.parent)


def sync(path: Path) -> None:
    """See that a file's content, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


def reason(error: BaseException) -> str:
    """Why something could not be written, in a few words."""
    return (error.strerror if isinstance(error, OSError) else None) or str(error).split("\n")[0]


def lost(out: Path, why: str, kept: int) -> str:
    """The sentence for a run folder that cannot be written any more, with the round whose checkpoint is kept."""
    safe = f"the checkpoint of round {kept} is kept" if kept else "there is no checkpoint yet"
    return f"{out} cannot be written ({why}); {safe}: put that right and start the same command again"


def attempt(work: Callable[[], object]) -> str:
    """Do something that writes into the folder; returns why that could not be done, empty where it was."""
    try:
        work()
    except (OSError, SafetensorError) as error:
        return reason(error)
    return ""


def add_start(out: Path, place: Place, comm: str, round: int, environ: Mapping[str, str]) -> None:
    """Note a start in the folder; how the last life stopped is history now."""
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
    with open(out / STARTS, "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    (out / STOPPED).unlink(missing_ok=True)


def add_stop(out: Path, round: int, why: str, environ: Mapping[str, str]) -> None:
    """Note that the run stopped in good order, and by whose launch."""
    record = {"round": round, "why": why, "time": time.time(), "launch": launches(environ)}
    write(out / STOPPED, json.dumps(record) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A small record of a run folder; empty where there is none that can be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def launches(environ: Mapping[str, str]) -> list[str]:
    """Names for what has launched this process, which are the same when that starts it again."""
    names = []
    if "TORCHELASTIC_RUN_ID" in environ:
        names.append(f"torchrun {environ['TORCHELASTIC_RUN_ID']} {socket.gethostname()} {os.getppid()}")
    if "SLURM_JOB_ID" in environ:
        names.append(f"slurm {environ['SLURM_JOB_ID']}")
    if "FEDMPI_LAUNCH" in environ:
        names.append(f"script {environ['FEDMPI_LAUNCH']}")
    return names


def begun_before(out: Path, environ: Mapping[str, str]) -> bool:
    """Whether this launch has begun the run already, and is starting it again."""
    if not restarts(environ):
        return False
    here = set(launches(environ))
    return any(here & set(start.get("launch", [])) for start in lines_of(out / STARTS))


def stopped_before(out: Path, environ: Mapping[str, str]) -> dict[str, Any] | None:
    """How this very launch has stopped already, where torchrun takes that for a failure and starts its ranks again."""
    record = read_json(out / STOPPED)
    here = [name for name in launches(environ) if name.startswith("torchrun")]  # a requeued Slurm job is to go on
    again = environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    return record if again and set(here) & set(record.get("launch") or []) else None


def lines_of(path: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """The JSON objects in a file of lines, or in its last `tail` bytes; a torn line is left out."""
    try:
        with open(path, "rb") as file:
            if tail is not None:
                file.seek(max(0, path.stat().st_size - tail))
            raw = file.read().splitlines()
    except OSError:
        return []
    out = []
    for line in raw:
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            out.append(found)
    return out


def restarts(environ: Mapping[str, str]) -> int:
    """How often the launcher has started this job again."""
    names = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FEDMPI_RESTART_COUNT")
    return sum(int(environ[name]) for name in names if environ.get(name, "").isdecimal())

"""The processes of runs on this machine: a number of them at a time, each with its own log file.

A run that is signalled saves and exits after its round (runs/stop.py). Its process leads a session of its own, so that
a Ctrl-C in the terminal reaches only the sweep, which then signals its runs. If the sweep itself is killed, its runs
keep running; the next sweep in the same folder sees their locks and waits for them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...cluster.requeue import may_restart, stopped_cleanly
from ...cluster.status import newest_checkpoint
from ...runs.folder import FINISHED, holder

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RunSpec:
    """A run to start."""

    name: str
    run: Path
    config: Path
    log: Path


@dataclass
class RunningProcess:
    """A run that this process has started."""

    spec: RunSpec
    process: subprocess.Popen[bytes]
    slot: int
    saved: int
    """the round of its newest checkpoint at its start"""
    logged: int
    """the bytes of its log at its start"""
    why: str = ""
    """why it was given up"""
    signalled: bool = False
    """whether it was signalled because the sweep ends"""


@dataclass(frozen=True)
class EndedRun:
    """A run whose process has ended."""

    spec: RunSpec
    code: int
    why: str
    """why it was given up"""
    progressed: bool
    """whether it saved a new checkpoint"""
    last_line: str
    """the last line of its log, preferably fedmpi's own error message"""
    signalled: bool = False
    """whether it was signalled because the sweep ends"""

    @property
    def finished(self) -> bool:
        return (self.spec.run / FINISHED).exists()

    @property
    def stopped(self) -> bool:
        return stopped_cleanly(self.code, self.spec.run)

    @property
    def interrupted(self) -> bool:
        """Return whether it was signalled at its start, before it could save. A failure leaves an error message."""
        ours = self.signalled and not self.finished and not self.stopped
        return ours and not self.last_line.startswith("fedmpi: ")

    @property
    def may_restart(self) -> bool:
        """Return whether it failed and has made progress since its start."""
        wanted = not (self.finished or self.stopped or self.why or self.signalled)
        return wanted and may_restart(self.code, wasted=0 if self.progressed else 1, limit=1)


class Processes:
    """The processes of a sweep's runs on this machine."""

    def __init__(self, at_once: int, ranks: int, environ: Mapping[str, str]) -> None:
        self.at_once, self.ranks, self.environ = at_once, ranks, environ
        self.running: dict[str, RunningProcess] = {}

    @property
    def free(self) -> int:
        return self.at_once - len(self.running)

    def start(self, spec: RunSpec) -> bool:
        """Start a run; return False if another process runs in its folder."""
        if holder(spec.run) is not None:
            return False
        slot = min(set(range(self.at_once)) - {one.slot for one in self.running.values()})
        devices = share_of_devices(self.environ, slot, self.at_once)
        with open(spec.log, "ab") as log:
            logged = log.tell()
            process = subprocess.Popen(
                command(spec.config, self.ranks),
                env={**self.environ, **devices, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        saved = newest_checkpoint(spec.run) or 0
        self.running[spec.name] = RunningProcess(spec, process, slot=slot, saved=saved, logged=logged)
        return True

    def ended(self) -> list[EndedRun]:
        """Return the runs whose processes have ended since the last call."""
        ended = [one for one in self.running.values() if one.process.poll() is not None]
        for one in ended:
            del self.running[one.spec.name]
        return [
            EndedRun(
                spec=one.spec,
                code=one.process.returncode,
                why=one.why,
                progressed=(newest_checkpoint(one.spec.run) or 0) > one.saved,
                last_line=last_line(one.spec.log, one.logged),
                signalled=one.signalled,
            )
            for one in ended
        ]

    def give_up(self, name: str, why: str) -> None:
        """Signal a run to save and exit for good."""
        one = self.running[name]
        if not one.why:
            one.why = why
            one.process.terminate()

    def close(self) -> None:
        """Signal all runs to save and exit, and wait for them, however long their rounds take."""
        for one in self.running.values():
            one.signalled = True
            one.process.terminate()
        for one in self.running.values():
            one.process.wait()


def last_line(log: Path, start: int = 0) -> str:
    """Return the last line of a log after its first `start` bytes, or fedmpi's own error message if there is one:
    launchers print a lot after it."""
    try:
        with open(log, "rb") as file:
            file.seek(start)
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    lines = [line.strip() for line in text.split("\n") if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("fedmpi: ")), lines[-1] if lines else "")


def command(config: Path, ranks: int) -> list[str]:
    """Return the command that runs a configuration on this many ranks of this machine."""
    launch = ["--ranks", str(ranks), "--max_restarts", "0"] if ranks > 1 else []
    return [sys.executable, "-m", "fedmpi", "train", *launch, "--config", str(config)]


def share_of_devices(environ: Mapping[str, str], slot: int, at_once: int) -> dict[str, str]:
    """Return the variable with one run's share of the visible GPUs, if several are named and several runs share
    them."""
    names = [name for name in environ.get(DEVICES, "").split(",") if name]
    if len(names) < 2 or at_once < 2:
        return {}
    return {DEVICES: ",".join(names[slot::at_once] or [names[slot % len(names)]])}


@contextmanager
def caught_signals() -> Iterator[list[int]]:
    """Yield a list that SIGINT and SIGTERM are appended to; a second one interrupts at once."""
    caught: list[int] = []

    def note(number: int, _: object) -> None:
        if caught:
            raise KeyboardInterrupt
        caught.append(number)

    before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield caught
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

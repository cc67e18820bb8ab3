"""Runs on this machine, so many at a time, each a process of its own with its log in a file.

A run that is told to end saves and leaves (stop.py), when its round is done. Its process is the head of a session of
its own, so that a Ctrl-C in the terminal reaches the sweep alone, which then tells its runs. Whoever kills the sweep
leaves its runs running; the next sweep in the same folder sees that by their locks, and waits for them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ...cluster.status import newest_checkpoint, stopped_well
from ...runs.folder import FINISHED, holder

DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Order:
    """A run to be made."""

    name: str
    run: Path
    config: Path
    log: Path


@dataclass
class Live:
    """A run that this process has started."""

    order: Order
    process: subprocess.Popen[bytes]
    slot: int
    saved: int
    """the round of its newest checkpoint when it was started"""
    logged: int
    """the bytes of its log that are of earlier lives"""
    why: str = ""
    """why it was given up"""
    told: bool = False
    """whether it was told to end with the sweep"""


@dataclass(frozen=True)
class Ended:
    """A run whose process has ended."""

    order: Order
    code: int
    why: str
    moved: bool
    """whether it saved more rounds than it had, so that another life may bring it further"""
    last_words: str
    """the last thing that it said, its own error first"""
    told: bool = False
    """whether it was told to end with the sweep"""

    @property
    def finished(self) -> bool:
        return (self.order.run / FINISHED).exists()

    @property
    def stopped(self) -> bool:
        return stopped_well(self.code, self.order.run)

    @property
    def interrupted(self) -> bool:
        """Whether it was told to end before it could save: while it started. What failed by itself has said why."""
        ours = self.told and not self.finished and not self.stopped
        return ours and not self.last_words.startswith("fedmpi: ")


class Crew:
    """The runs of a sweep that are under way on this machine."""

    def __init__(self, at_once: int, ranks: int, environ: Mapping[str, str]) -> None:
        self.at_once, self.ranks, self.environ = at_once, ranks, environ
        self.live: dict[str, Live] = {}

    @property
    def free(self) -> int:
        return self.at_once - len(self.live)

    def start(self, order: Order) -> bool:
        """Start a run; False where somebody else runs in its folder."""
        if holder(order.run) is not None:
            return False
        slot = min(set(range(self.at_once)) - {one.slot for one in self.live.values()})
        with open(order.log, "ab") as log:
            logged = log.tell()
            process = subprocess.Popen(
                command(order.config, self.ranks),
                env=dict(self.environ) | share_of_devices(self.environ, slot, self.at_once) | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.live[order.name] = Live(order, process, slot, newest_checkpoint(order.run) or 0, logged)
        return True

    def ended(self) -> list[Ended]:
        """The runs whose processes have ended since this was last asked."""
        gone = [one for one in self.live.values() if one.process.poll() is not None]
        for one in gone:
            del self.live[one.order.name]
        return [self._ended(one) for one in gone]

    def _ended(self, one: Live) -> Ended:
        moved = (newest_checkpoint(one.order.run) or 0) > one.saved
        said = last_words(one.order.log, one.logged)
        return Ended(one.order, one.process.returncode, one.why, moved, said, one.told)

    def give_up(self, name: str, why: str) -> None:
        """Tell a run to save and leave for good."""
        one = self.live[name]
        if not one.why:
            one.why = why
            one.process.terminate()

    def close(self) -> None:
        """Tell all runs to save and leave, and wait for them, however long their rounds take."""
        for one in self.live.values():
            one.told = True
            one.process.terminate()
        for one in self.live.values():
            one.process.wait()


def last_words(log: Path, start: int = 0) -> str:
    """The last line of a log from a byte on, or that of fedmpi's own error: a launcher may say a lot behind it."""
    try:
        with open(log, "rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return next((line for line in reversed(said) if line.startswith("fedmpi: ")), said[-1] if said else "")


def command(config: Path, ranks: int) -> list[str]:
    """What runs a configuration on so many ranks of this machine."""
    launch = ["--ranks", str(ranks), "--max_restarts", "0"] if ranks > 1 else []
    return [sys.executable, "-m", "fedmpi", "train", *launch, "--config", str(config)]


def share_of_devices(environ: Mapping[str, str], slot: int, at_once: int) -> dict[str, str]:
    """Of the GPUs that are to be used, where several are named, those of one of the runs at a time."""
    names = [name for name in environ.get(DEVICES, "").split(",") if name]
    if len(names) < 2 or at_once < 2:
        return {}
    return {DEVICES: ",".join(names[slot::at_once] or [names[slot % len(names)]])}


@contextmanager
def told_to_end() -> Iterator[list[int]]:
    """A list that fills with the signals that ask this process to end; a second one interrupts at once."""
    told: list[int] = []

    def note(number: int, _: object) -> None:
        if told:
            raise KeyboardInterrupt
        told.append(number)

    before = {one: signal.signal(one, note) for one in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield told
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)

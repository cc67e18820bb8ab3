"""A sweep on this machine: a number of runs at a time until all are finished, given up or failed.

A run that is signalled saves and exits after its round (runs/stop.py). Its process leads a session of its own, so that
a Ctrl-C in the terminal reaches only the sweep, which then signals its runs. If the sweep itself is killed, its runs
keep running; the next sweep in the same folder sees their locks and waits for them. Several sweeps may share a folder:
each holds the lock of its own file there, by which `fedmpi cancel` finds it.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ...cluster.requeue import may_restart, stopped_cleanly
from ...cluster.status import newest_checkpoint
from ...runs import folder
from ...runs.folder import CONFIG, FINISHED
from ...runs.text import duration
from .overview import Row, Screen, last_line, row_of
from .pick import Pruner
from .plan import CONFIGS, LOGS, SweepPlan, is_over, mark_given_up, write_file

POLL = 0.2  # seconds between two looks at the processes
DRAWN = 1.0  # seconds between two looks at the progress of the runs
PREFIX = "process-"


@dataclass
class Process:
    """The process of a run, which may have ended."""

    run: Path
    log: Path
    process: subprocess.Popen[bytes]
    slot: int
    saved: int  # the round of its newest checkpoint at its start
    logged: int  # the bytes of its log at its start
    why: str = ""  # why it was given up
    signalled: bool = False  # whether it was signalled because the sweep ends

    @property
    def state(self) -> str:
        """Return how it has ended. If it was signalled at its start, before it could save, it was interrupted; a
        failure leaves an error message."""
        if (self.run / FINISHED).exists():
            return "finished"
        if self.why:
            return "given up"
        if stopped_cleanly(self.process.returncode, self.run):
            return "stopped"
        failed = not self.signalled or last_line(self.log, self.logged).startswith("fedmpi: ")
        return "failed" if failed else "interrupted"

    @property
    def may_restart(self) -> bool:
        """Return whether it failed and has saved a new checkpoint since its start."""
        wasted = 0 if (newest_checkpoint(self.run) or 0) > self.saved else 1
        failed = self.state == "failed" and not self.signalled
        return failed and may_restart(self.process.returncode, wasted=wasted, limit=1)

    def in_words(self, row: Row) -> str:
        """Return one line about how it has ended."""
        took = f" in {duration(row.minutes)}" if row.minutes else ""
        score = f", {row.metric} {row.value:.4f}" if row.value is not None else ""
        message = last_line(self.log, self.logged) or "no error message"
        texts = {
            "finished": f"finished: {row.round} rounds{took}{score}",
            "given up": f"given up after round {row.round}: {self.why}",
            "stopped": f"stopped after round {row.round}",
            "interrupted": "interrupted during its start; the same command resumes it",
            "failed": f"failed with exit code {self.process.returncode}: {message}",
        }
        return f"{row.name} {texts[self.state]}"


class LocalSweep:
    """The unfinished runs of a sweep on this machine."""

    def __init__(self, plan: SweepPlan, at_once: int, ranks: int, screen: Screen) -> None:
        self.plan, self.at_once, self.ranks, self.screen = plan, at_once, ranks, screen
        self.pruner = Pruner(plan.sweep, plan.points, plan.home)
        self.points = {point.name: point for point in plan.points}
        self.waiting = [point.name for point in plan.left]
        self.elsewhere: list[str] = []  # runs of other processes
        self.running: dict[str, Process] = {}
        self.rows = {name: self.row(name, "waiting") for name in self.points}
        for name in (CONFIGS, LOGS):
            (plan.home / name).mkdir(mode=0o700, exist_ok=True)
        for name in self.waiting:
            write_file(self.config(name), yaml.safe_dump(dataclasses.asdict(plan.configs[name]), sort_keys=False))

    def config(self, name: str) -> Path:
        return self.plan.home / CONFIGS / f"{name}.yaml"

    def run(self) -> bool:
        """Run all of them; return whether a signal ended the sweep before that."""
        plan, done, next_look = self.plan, len(self.points) - len(self.waiting), 0.0
        self.screen.say(
            f"{plan.sweep.name}: {len(self.points)} runs in {plan.home}, {done} done, {self.at_once} at a time"
            f"{plan.threads_text}"
        )
        with caught_signals() as caught, announced(plan.home):
            try:
                while (self.waiting or self.elsewhere or self.running) and not caught:
                    self.start_some()
                    self.take_ended()
                    if time.monotonic() >= next_look:
                        self.look()
                        next_look = time.monotonic() + DRAWN
                    time.sleep(POLL)
            finally:
                self.stop()
                self.take_ended()
        return bool(caught)

    def start_some(self) -> None:
        """Start runs while there is room; wait for those of other processes."""
        released = [name for name in self.elsewhere if folder.holder(self.plan.home / name) is None]
        self.elsewhere = [name for name in self.elsewhere if name not in released]
        self.waiting += released
        while self.waiting and len(self.running) < self.at_once:
            name = self.waiting.pop(0)
            run = self.plan.home / name
            if is_over(run):
                self.screen.say(f"{name} is done: another process has run it")
                self.rows[name] = self.row(name, "waiting")
            elif why := self.pruner.why(self.points[name]):
                mark_given_up(run, why)
                self.screen.say(f"{name} given up: {why}")
                self.rows[name] = self.row(name, "waiting")
            elif folder.holder(run) is not None:
                self.screen.say(f"{name} is run by {folder.owner_in_words(run)}: waiting for that")
                self.elsewhere.append(name)
            else:
                self.start(name)
                if not self.screen.live:
                    self.screen.say(f"{name} started")

    def start(self, name: str) -> None:
        """Start the process of a run."""
        run, path = self.plan.home / name, self.plan.home / LOGS / f"{name}.log"
        slot = min(set(range(self.at_once)) - {one.slot for one in self.running.values()})
        launch = ["--ranks", str(self.ranks), "--max_restarts", "0"] if self.ranks > 1 else []
        with open(path, "ab") as log:
            logged = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", "fedmpi", "train", *launch, "--config", str(self.config(name))],
                env={**os.environ, **share_of_devices(slot, self.at_once), "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        saved = newest_checkpoint(run) or 0
        self.running[name] = Process(run, path, process, slot=slot, saved=saved, logged=logged)

    def take_ended(self) -> None:
        """Report the runs that have ended; restart those that failed after they had made progress."""
        for name, one in list(self.running.items()):
            if one.process.poll() is None:
                continue
            del self.running[name]
            if one.state != "finished" and folder.holder(one.run) is not None:  # another process was faster
                self.elsewhere.append(name)
            elif one.may_restart:
                code = one.process.returncode
                self.screen.say(f"{name} ended with exit code {code}; restarting from its checkpoint")
                self.waiting.insert(0, name)
            else:
                interrupted = one.state == "interrupted"  # that is no failure
                self.rows[name] = self.row(name, "stopped" if interrupted else one.state)
                self.screen.say(one.in_words(self.rows[name]))
                if interrupted and (one.run / CONFIG).exists():
                    folder.add_stop(one.run, newest_checkpoint(one.run) or 0, "interruption", {})

    def look(self) -> None:
        """Read the progress of the runs, give up those that fall behind, and draw."""
        for name, one in self.running.items():
            self.rows[name] = self.row(name, "running")
            why = self.pruner.why(self.points[name], self.rows[name].round)
            if why and not one.why:
                mark_given_up(one.run, why)
                one.why = why
                one.process.terminate()
        self.screen.draw(list(self.rows.values()), self.at_once)

    def stop(self) -> None:
        """Signal all runs to save and exit, and wait for them, however long their rounds take."""
        if self.running:
            self.screen.say("stopping: the runs save and exit after their rounds")
        for one in self.running.values():
            one.signalled = True
            one.process.terminate()
        for one in self.running.values():
            one.process.wait()

    def row(self, name: str, state: str) -> Row:
        """Return the status of a run of this machine."""
        run = self.plan.home / name
        if state == "waiting" and is_over(run):
            state = "finished" if (run / FINISHED).exists() else "given up"
        return row_of(run, state, "") if (run / CONFIG).exists() else Row(name, state)


def share_of_devices(slot: int, at_once: int) -> dict[str, str]:
    """Return the variable with one run's share of the visible GPUs, if several runs share several."""
    if at_once < 2:
        return {}
    from ...device import accelerator, count, share  # imports torch

    return share(os.environ, slot, at_once, accelerator(), count())


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


@contextmanager
def announced(home: Path) -> Iterator[None]:
    """Hold a lock file in the folder of a sweep that names this process."""
    path = home / f"{PREFIX}{socket.gethostname()}-{os.getpid()}"
    with open(path, "w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}) + "\n")
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def processes(home: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the processes that run a sweep now, by their lock files; those left by killed ones do not count."""
    found = {path: folder.holder(home, path.name) for path in sorted(home.glob(f"{PREFIX}*"))}
    return {path: one for path, one in found.items() if one and {"host", "pid"} <= one.keys()}

"""A sweep on this machine: a number of runs at a time until all are finished, given up or failed."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque

import yaml

from ...cluster.status import newest_checkpoint
from ...runs import folder
from ...runs.folder import CONFIG, FINISHED
from ...runs.text import duration
from .grid import Point
from .overview import Row, Screen, row_of
from .pick import Pruner
from .plan import CONFIGS, LOGS, SweepPlan, is_over, mark_given_up, write_file
from .presence import announced
from .processes import EndedRun, Processes, RunSpec, caught_signals

POLL = 0.2  # seconds between two looks at the processes
DRAWN = 1.0  # seconds between two looks at the progress of the runs


class LocalSweep:
    """The unfinished runs of a sweep on this machine."""

    def __init__(self, plan: SweepPlan, at_once: int, ranks: int, screen: Screen) -> None:
        self.plan, self.screen = plan, screen
        self.pruner = Pruner(plan.sweep, plan.points, plan.home)
        self.processes = Processes(at_once, ranks, os.environ)
        self.points = {point.name: point for point in plan.points}
        self.waiting = deque(write_spec(plan, point) for point in plan.left)
        self.elsewhere = deque[RunSpec]()
        """runs of other processes"""
        self.rows = {point.name: self.row(point, "waiting") for point in plan.points}
        self.next_look = 0.0

    def run(self) -> bool:
        """Run all of them; return whether a signal ended the sweep before that."""
        plan, done = self.plan, len(self.points) - len(self.waiting)
        threads = f", {plan.threads_text}" if plan.threads else ""
        self.screen.say(
            f"{plan.sweep.name}: {len(self.points)} runs in {plan.home}, {done} done, "
            f"{self.processes.at_once} at a time{threads}"
        )
        with caught_signals() as caught, announced(plan.home):
            try:
                while (self.waiting or self.elsewhere or self.processes.running) and not caught:
                    self.start_some()
                    self.take_ended()
                    if time.monotonic() >= self.next_look:
                        self.look()
                        self.next_look = time.monotonic() + DRAWN
                    time.sleep(POLL)
            finally:
                if self.processes.running:
                    self.screen.say("stopping: the runs save and exit after their rounds")
                self.processes.close()
                self.take_ended()
        return bool(caught)

    def start_some(self) -> None:
        """Start runs while there is room; wait for those of other processes."""
        for _ in range(len(self.elsewhere)):
            spec = self.elsewhere.popleft()
            (self.waiting if folder.holder(spec.run) is None else self.elsewhere).append(spec)
        while self.waiting and self.processes.free:
            spec = self.waiting.popleft()
            point = self.points[spec.name]
            if is_over(spec.run):
                self.screen.say(f"{spec.name} is done: another process has run it")
                self.rows[spec.name] = self.row(point, "waiting")
            elif why := self.pruner.why(point):
                mark_given_up(spec.run, why)
                self.screen.say(f"{spec.name} given up: {why}")
                self.rows[spec.name] = self.row(point, "waiting")
            elif not self.processes.start(spec):
                self.screen.say(f"{spec.name} is run by {folder.owner_in_words(spec.run)}: waiting for that")
                self.elsewhere.append(spec)
            elif not self.screen.live:
                self.screen.say(f"{spec.name} started")

    def take_ended(self) -> None:
        """Report the runs that have ended; restart those that failed after they had made progress."""
        for ended in self.processes.ended():
            spec = ended.spec
            if not ended.finished and folder.holder(spec.run) is not None:  # another process was faster
                self.elsewhere.append(spec)
                continue
            if ended.may_restart:
                self.screen.say(f"{spec.name} ended with exit code {ended.code}; restarting from its checkpoint")
                self.waiting.appendleft(spec)
                continue
            row = self.row(self.points[spec.name], state_of(ended))
            self.rows[spec.name] = row
            self.screen.say(in_words(ended, row))
            if ended.interrupted and (spec.run / CONFIG).exists():  # that is no failure
                folder.add_stop(spec.run, newest_checkpoint(spec.run) or 0, "interruption", {})

    def look(self) -> None:
        """Read the progress of the runs, give up those that fall behind, and draw."""
        for name, running in self.processes.running.items():
            point = self.points[name]
            self.rows[name] = self.row(point, "running")
            why = self.pruner.why(point, self.rows[name].round)
            if why and not running.why:
                mark_given_up(self.plan.run(point), why)
                self.processes.give_up(name, why)
        self.screen.draw(list(self.rows.values()), self.processes.at_once)

    def row(self, point: Point, state: str) -> Row:
        """Return the status of a run of this machine."""
        run = self.plan.run(point)
        if state == "waiting" and is_over(run):
            state = "finished" if (run / FINISHED).exists() else "given up"
        return row_of(run, state, "") if (run / CONFIG).exists() else Row(point.name, state)


def write_spec(plan: SweepPlan, point: Point) -> RunSpec:
    """Write the configuration file of a run; return what is needed to start it."""
    for name in (CONFIGS, LOGS):
        (plan.home / name).mkdir(mode=0o700, exist_ok=True)
    config = plan.home / CONFIGS / f"{point.name}.yaml"
    write_file(config, yaml.safe_dump(dataclasses.asdict(plan.configs[point.name]), sort_keys=False))
    return RunSpec(point.name, run=plan.run(point), config=config, log=plan.home / LOGS / f"{point.name}.log")


def state_of(ended: EndedRun) -> str:
    """Return the state in which a run has ended."""
    if ended.finished:
        return "finished"
    return "given up" if ended.why else "stopped" if ended.stopped or ended.interrupted else "failed"


def in_words(ended: EndedRun, row: Row) -> str:
    """Return one line about how a run has ended."""
    name = ended.spec.name
    if ended.finished:
        took = f" in {duration(row.minutes)}" if row.minutes else ""
        score = f", {row.metric} {row.value:.4f}" if row.value is not None else ""
        return f"{name} finished: {row.round} rounds{took}{score}"
    if ended.why:
        return f"{name} given up after round {row.round}: {ended.why}"
    if ended.stopped:
        return f"{name} stopped after round {row.round}"
    if ended.interrupted:
        return f"{name} interrupted during its start; the same command resumes it"
    return f"{name} failed with exit code {ended.code}: {ended.last_line or 'no error message'}"

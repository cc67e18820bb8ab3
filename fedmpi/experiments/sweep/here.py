"""A sweep on this machine: so many runs at a time until all are done, given up or failed."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import deque
from pathlib import Path

import yaml

from ...cluster.status import newest_checkpoint
from ...runs import folder
from ...runs.folder import CONFIG, FINISHED
from ...runs.text import duration
from .crew import Crew, Ended, Order, told_to_end
from .grid import Point
from .orders import CONFIGS, LOGS, Todo, at_its_end, keep, note_given_up
from .overview import Row, Screen, row_of
from .pick import due, out_of_it, without_hope
from .presence import announced

POLL = 0.2  # seconds between two looks at the processes
DRAWN = 1.0  # seconds between two looks at what the runs have come to


class Here:
    """The runs of a sweep that are not done, on this machine."""

    def __init__(self, todo: Todo, at_once: int, ranks: int, screen: Screen) -> None:
        self.todo, self.screen = todo, screen
        self.crew = Crew(at_once, ranks, os.environ)
        self.points = {point.name: point for point in todo.points}
        self.waiting = deque(write_order(todo, point) for point in todo.left)
        self.elsewhere = deque[Order]()
        """what somebody else runs"""
        self.rows = {point.name: self.row(point, "waiting") for point in todo.points}
        self.compared: dict[str, int] = {}
        """the round at which a run was last compared with others"""
        self.next_look = 0.0

    def run(self) -> bool:
        """Run all of them; whether it was told to end before that."""
        count, at_once = len(self.points), self.crew.at_once
        done = count - len(self.waiting)
        threads = f", {self.todo.threads} thread{'s' * (self.todo.threads != 1)} per rank" if self.todo.threads else ""
        self.screen.say(
            f"{self.todo.sweep.name}: {count} runs in {self.todo.home}, {done} done, {at_once} at a time{threads}"
        )
        with told_to_end() as told, announced(self.todo.home):
            try:
                while (self.waiting or self.elsewhere or self.crew.live) and not told:
                    self.start_some()
                    self.take_ended()
                    if time.monotonic() >= self.next_look:
                        self.look()
                        self.next_look = time.monotonic() + DRAWN
                    time.sleep(POLL)
            finally:
                if self.crew.live:
                    self.screen.say("told to end: the runs save and leave when their rounds are done")
                self.crew.close()
                self.take_ended()
        return bool(told)

    def start_some(self) -> None:
        """Start runs while there is room; those that somebody else runs are waited for."""
        for _ in range(len(self.elsewhere)):
            order = self.elsewhere.popleft()
            (self.waiting if folder.holder(order.run) is None else self.elsewhere).append(order)
        while self.waiting and self.crew.free:
            order = self.waiting.popleft()
            point = self.points[order.name]
            if at_its_end(order.run):
                self.screen.say(f"{order.name} is done: somebody else has run it")
                self.rows[order.name] = self.row(point, "waiting")
            elif why := out_of_it(point, self.todo.points, self.todo.home, self.todo.sweep):
                note_given_up(order.run, why)
                self.screen.say(f"{order.name} given up: {why}")
                self.rows[order.name] = self.row(point, "waiting")
            elif not self.crew.start(order):
                self.screen.say(f"{order.name} is run by {folder.owner_in_words(order.run)}: waiting for that")
                self.elsewhere.append(order)
            elif not self.screen.live:
                self.screen.say(f"{order.name} begins")

    def take_ended(self) -> None:
        """Tell of the runs that have ended; one that a fault has ended begins again if it had got further."""
        for ended in self.crew.ended():
            order = ended.order
            if not ended.finished and folder.holder(order.run) is not None:  # which began at the same moment
                self.elsewhere.append(order)
                continue
            if ended.moved and not (ended.finished or ended.stopped or ended.why or ended.told):
                self.screen.say(f"{order.name} ended with code {ended.code}; it goes on from its checkpoint")
                self.waiting.appendleft(order)
                continue
            row = self.row(self.points[order.name], state_of(ended))
            self.rows[order.name] = row
            self.screen.say(in_words(ended, row))
            if ended.interrupted and (order.run / CONFIG).exists():
                note_interrupted(order.run)

    def look(self) -> None:
        """See how far the runs have come, give up those without hope, and draw."""
        for name in self.crew.live:
            point = self.points[name]
            self.rows[name] = self.row(point, "running")
            stop = self.todo.sweep.stop
            at = 0 if stop is None else due(self.rows[name].round, stop)
            why = out_of_it(point, self.todo.points, self.todo.home, self.todo.sweep)
            if at > self.compared.get(name, 0):
                self.compared[name] = at
                why = why or without_hope(point, self.todo.points, self.todo.home, self.todo.sweep)
            if why and not self.crew.live[name].why:
                note_given_up(self.todo.run(point), why)
                self.crew.give_up(name, why)
        self.screen.draw(list(self.rows.values()), self.crew.at_once)

    def row(self, point: Point, state: str) -> Row:
        """How it stands with a run of this machine."""
        run = self.todo.run(point)
        if state == "waiting" and at_its_end(run):
            state = "finished" if (run / FINISHED).exists() else "given up"
        return row_of(run, state, "") if (run / CONFIG).exists() else Row(point.name, state)


def write_order(todo: Todo, point: Point) -> Order:
    """What a run is started with, written down."""
    for name in (CONFIGS, LOGS):
        (todo.home / name).mkdir(mode=0o700, exist_ok=True)
    config = todo.home / CONFIGS / f"{point.name}.yaml"
    keep(config, yaml.safe_dump(dataclasses.asdict(todo.configs[point.name]), sort_keys=False))
    return Order(point.name, todo.run(point), config, todo.home / LOGS / f"{point.name}.log")


def state_of(ended: Ended) -> str:
    """The state in which a run has ended."""
    if ended.finished:
        return "finished"
    return "given up" if ended.why else "stopped" if ended.stopped or ended.interrupted else "failed"


def note_interrupted(run: Path) -> None:
    """Note in a run folder that its last start was interrupted: that is no failure."""
    folder.add_stop(run, newest_checkpoint(run) or 0, "interruption", {})


def in_words(ended: Ended, row: Row) -> str:
    """How a run has ended, in a line."""
    name = ended.order.name
    if ended.finished:
        took = f" in {duration(row.minutes)}" if row.minutes else ""
        score = f", {row.metric} {row.value:.4f}" if row.value is not None else ""
        return f"{name} finished: {row.round} rounds{took}{score}"
    if ended.why:
        return f"{name} given up after round {row.round}: {ended.why}"
    if ended.stopped:
        return f"{name} stopped after round {row.round}"
    if ended.interrupted:
        return f"{name} interrupted while it started; the same command resumes it"
    return f"{name} failed with code {ended.code}: {ended.last_words or 'it did not say why'}"

"""Searches: choosing the best labels of some axes, and giving up runs that fall behind.

A cell is one label of every axis that is not chosen from. In each cell the labels that are chosen from compete by the
mean over their runs; the papers' criterion is the smallest mean training loss of the last 20 rounds. A run that failed
or was given up excludes its labels: their other runs are given up as well, but never the last remaining labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from ...runs.folder import FINISHED
from ..measures import Measure, measure
from ..runs import Run, is_run, read_run
from .grid import Choose, Point, Stop, Sweep

GIVEN_UP, CHOSEN = "given-up.json", "chosen.json"
FEWEST = 2  # rivals that a run must be compared with
Labels = dict[str, str]
Key = tuple[tuple[str, str], ...]  # labels as a key of a dict


@dataclass(frozen=True)
class Tried:
    """Labels that competed in a cell."""

    labels: Labels
    value: float | None
    """the mean over the runs; None: not all of them finished"""
    runs: list[str]


@dataclass(frozen=True)
class Choice:
    """The best labels of a cell."""

    cell: Labels
    best: Labels | None
    """None: no labels have all their runs finished"""
    tried: list[Tried]


def judge(rule: Choose) -> Measure:
    """Return the measure by which a rule compares runs."""
    return measure("best" if rule.by == "test" else f"train_loss{rule.last}")


def pick(sweep: Sweep, points: list[Point], folder: Path) -> list[Choice]:
    """Return the best labels of each cell among the finished runs."""
    rule = sweep.choose
    if rule is None:
        return []
    cells: dict[Key, dict[Key, list[Point]]] = {}
    for point in points:
        cell, inside = others(point, (*rule.over, *rule.share)), {axis: point.labels[axis] for axis in rule.over}
        cells.setdefault(tuple(cell.items()), {}).setdefault(tuple(inside.items()), []).append(point)
    return [make_choice(dict(cell), tried, rule, folder) for cell, tried in cells.items()]


def others(point: Point, axes: tuple[str, ...]) -> Labels:
    """Return the labels of a point on all other axes than these."""
    return {axis: label for axis, label in point.labels.items() if axis not in axes}


def make_choice(cell: Labels, tried: dict[Key, list[Point]], rule: Choose, folder: Path) -> Choice:
    """Return the best labels of one cell."""
    found, rises = [], False
    for labels, points in tried.items():
        runs = [read_run(folder / p.name) for p in points if (folder / p.name / FINISHED).exists()]
        values = [value for run in runs if (value := judge(rule).of(run)) is not None]
        rises = rises or any(judge(rule).rises(run) for run in runs)
        mean = fmean(values) if len(values) == len(points) else None
        found.append(Tried(dict(labels), mean, [p.name for p in points]))
    ended = [one for one in found if one.value is not None]
    best = (max if rises else min)(ended, key=lambda one: one.value or 0.0, default=None)
    return Choice(cell, best.labels if best else None, found)


def in_words(choices: list[Choice], rule: Choose, masks: Mapping[str, str]) -> str:
    """Return the choices as text, one line per cell. `masks`: the mask of each run, by its name."""
    what = f"mean training loss of the last {rule.last} rounds" if rule.by == "train_loss" else "best test metric"
    lines = [f"chosen by {what}:"]
    for choice in choices:
        used = dict.fromkeys(masks[name] for one in choice.tried for name in one.runs if name in masks)
        cell = ", ".join(label for axis, label in choice.cell.items() if axis != "mask") or "all"
        cell += f" + {' and '.join(used)}" if used else ""
        if choice.best is None:
            lines.append(f"  {cell}: nothing; no labels have all their runs finished with a finite value")
            continue
        value = next(one.value for one in choice.tried if one.labels == choice.best)
        best = ", ".join(f"{axis} {label}" for axis, label in choice.best.items())
        ended = sum(one.value is not None for one in choice.tried)
        lines.append(f"  {cell}: {best} ({value:.4f}; {ended} of {len(choice.tried)} finished)")
    return "\n".join(lines)


# Giving up


class Pruner:
    """Decides which runs of a sweep are given up, and compares each run once per round of comparison."""

    def __init__(self, sweep: Sweep, points: list[Point], folder: Path) -> None:
        self.rule, self.stop, self.points, self.folder = sweep.choose, sweep.stop, points, folder
        self.compared: dict[str, int] = {}
        """run -> the round at which it was last compared"""

    def why(self, point: Point, round: int = 0) -> str:
        """Return why a run that has completed this many rounds is given up; '' if it is not."""
        if self.rule is None:
            return ""
        why = self.excluded(point, self.rule)
        at = 0 if self.stop is None else due(round, self.stop)
        if self.stop is not None and at > self.compared.get(point.name, 0):
            self.compared[point.name] = at
            why = why or self.behind(point, self.rule, self.stop)
        return why

    def excluded(self, point: Point, rule: Choose) -> str:
        """Return which run with the same labels was given up, so that they cannot be chosen; '' if none was."""
        given_up = self.rivals(point, rule)[labels_over(point, rule)]
        return f"{given_up} was given up and has the same labels to choose from" if given_up else ""

    def behind(self, point: Point, rule: Choose, stop: Stop) -> str:
        """Return in what a run is behind most others of its cell and seed, at the last round of comparison that it and
        enough of them have reached; '' if it is not behind, or has the last labels that can still be chosen."""
        left = [labels for labels, given_up in self.rivals(point, rule).items() if not given_up]
        if left == [labels_over(point, rule)] or not left or not is_run(self.folder / point.name):
            return ""
        run = read_run(self.folder / point.name)
        same = [p for p in self.points if p.seed == point.seed and others(p, rule.over) == others(point, rule.over)]
        folders = [self.folder / p.name for p in same if p.name != point.name]
        reached = [read_run(folder) for folder in folders if is_run(folder)]
        furthest = sorted((rounds_of(one) for one in reached), reverse=True)
        at = due(min(rounds_of(run), furthest[FEWEST - 1]), stop) if len(reached) >= FEWEST else 0
        if not at:
            return ""
        judged = judge(rule)
        sign = -1 if judged.rises(run) else 1  # so that smaller is better
        values = [sign * standing(one, at, judged) for one in reached if rounds_of(one) >= at]
        own, bar = sign * standing(run, at, judged), quantile(values, 1 - stop.quantile)
        if own <= bar and (own < math.inf or min(values) == math.inf):
            return ""
        value = "not finite" if own == math.inf else f"{sign * own:.4f}"
        return (
            f"{judged.name} was {value} by round {at}, behind {sign * bar:.4f}, which is level with "
            f"{stop.quantile:.0%} of {len(values)} others"
        )

    def rivals(self, point: Point, rule: Choose) -> dict[tuple[str, ...], str]:
        """Return the labels that compete with those of a point, and its own, each with a run of theirs that was given
        up, '' if none was: whatever their seeds and the labels that share a choice."""
        kept = (*rule.over, *rule.share)
        found: dict[tuple[str, ...], str] = {}
        for p in self.points:
            if others(p, kept) == others(point, kept):
                given_up = p.name if was_given_up(self.folder / p.name) else ""
                found[labels_over(p, rule)] = given_up or found.get(labels_over(p, rule), "")
        return found


def due(round: int, stop: Stop) -> int:
    """Return the last round up to this one at which runs are compared; 0: none yet."""
    return 0 if round < stop.after else stop.after + (round - stop.after) // stop.every * stop.every


def was_given_up(run: Path) -> bool:
    """Return whether a run was given up; it may have finished before the signal reached it."""
    return (run / GIVEN_UP).exists() and not (run / FINISHED).exists()


def labels_over(point: Point, rule: Choose) -> tuple[str, ...]:
    """Return the labels of a point that are chosen from."""
    return tuple(point.labels[axis] for axis in rule.over)


def rounds_of(run: Run) -> int:
    """Return the completed rounds of a run."""
    return int(run.records[-1]["round"]) if run.records else 0


def standing(run: Run, at: int, judged: Measure) -> float:
    """Return the measure of a run up to a round; values that are not finite are the worst."""
    value = judged.of(replace(run, records=[r for r in run.records if r["round"] <= at]))
    return value if value is not None else -math.inf if judged.rises(run) else math.inf


def quantile(values: list[float], share: float) -> float:
    """Return the quantile of the values, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low, high = ordered[int(place)], ordered[math.ceil(place)]
    return low if low == high else low + (place - int(place)) * (high - low)  # equal ones may be infinite

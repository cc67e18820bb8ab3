"""Searches: choosing the best labels of some axes, and giving up runs that fall behind.

A cell is one label of every axis that is not chosen from. In each cell the labels that are chosen from compete by the
mean over their runs; the papers' criterion is the smallest mean training loss of the last 20 rounds. A run that failed
or was given up excludes its labels: their other runs are given up as well, but never the last remaining labels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ...runs.folder import FINISHED
from ..measures import Measure, measure
from ..runs import Run, is_run, read_run
from .grid import Choose, Point, Stop, Sweep

GIVEN_UP, CHOSEN = "given-up.json", "chosen.json"
FEWEST = 2  # rivals that a run must be compared with
Labels = dict[str, str]


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
    cells: dict[tuple[tuple[str, str], ...], dict[tuple[tuple[str, str], ...], list[Point]]] = {}
    for point in points:
        outside = {k: v for k, v in point.labels.items() if k not in (*rule.over, *rule.share)}
        inside = {axis: point.labels[axis] for axis in rule.over}
        cells.setdefault(tuple(outside.items()), {}).setdefault(tuple(inside.items()), []).append(point)
    return [make_choice(dict(cell), tried, rule, folder) for cell, tried in cells.items()]


def make_choice(
    cell: Labels, tried: dict[tuple[tuple[str, str], ...], list[Point]], rule: Choose, folder: Path
) -> Choice:
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


def record(choices: list[Choice], rule: Choose) -> dict[str, Any]:
    """Return the content of chosen.json."""
    return {"by": rule.by, "last": rule.last, "over": list(rule.over), "cells": [asdict(choice) for choice in choices]}


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
        self.sweep, self.points, self.folder = sweep, points, folder
        self.compared: dict[str, int] = {}
        """run -> the round at which it was last compared"""

    def why(self, point: Point, round: int = 0) -> str:
        """Return why a run that has completed this many rounds is given up; '' if it is not."""
        why = excluded(point, self.points, self.folder, self.sweep)
        at = 0 if self.sweep.stop is None else due(round, self.sweep.stop)
        if at > self.compared.get(point.name, 0):
            self.compared[point.name] = at
            why = why or behind(point, self.points, self.folder, self.sweep)
        return why


def due(round: int, stop: Stop) -> int:
    """Return the last round up to this one at which runs are compared; 0: none yet."""
    return 0 if round < stop.after else stop.after + (round - stop.after) // stop.every * stop.every


def excluded(point: Point, points: list[Point], folder: Path, sweep: Sweep) -> str:
    """Return which run with the same labels was given up, so that they cannot be chosen; '' if none was."""
    if sweep.choose is None:
        return ""
    given_up = given_up_labels(point, points, folder, sweep.choose).get(labels_over(point, sweep.choose))
    return f"{given_up} was given up and has the same labels to choose from" if given_up else ""


def behind(point: Point, points: list[Point], folder: Path, sweep: Sweep) -> str:
    """Return in what a run is behind most others of its cell and seed, at the last round of comparison that it and
    enough of them have reached; '' if it is not behind, or has the last labels that can still be chosen."""
    rule, stop = sweep.choose, sweep.stop
    if rule is None or stop is None or not is_run(folder / point.name):
        return ""
    out = given_up_labels(point, points, folder, rule)
    if {labels_over(p, rule) for p in points if same_choice(p, point, rule)} - out.keys() <= {labels_over(point, rule)}:
        return ""
    run = read_run(folder / point.name)
    rivals = [p for p in points if p.seed == point.seed and p.name != point.name and same_cell(p, point, rule)]
    reached = [read_run(folder / p.name) for p in rivals if is_run(folder / p.name)]
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
        f"{judged.name} was {value} by round {at}, behind {sign * bar:.4f}, which is level with {stop.quantile:.0%} of "
        f"{len(values)} others"
    )


def given_up_labels(point: Point, points: list[Point], folder: Path, rule: Choose) -> dict[tuple[str, ...], str]:
    """Return the excluded labels among the rivals of a point, each with a run of theirs that was given up."""
    rivals = [p for p in points if same_choice(p, point, rule)]
    return {labels_over(p, rule): p.name for p in rivals if was_given_up(folder / p.name)}


def was_given_up(run: Path) -> bool:
    """Return whether a run was given up; it may have finished before the signal reached it."""
    return (run / GIVEN_UP).exists() and not (run / FINISHED).exists()


def labels_over(point: Point, rule: Choose) -> tuple[str, ...]:
    """Return the labels of a point that are chosen from."""
    return tuple(point.labels[axis] for axis in rule.over)


def same_choice(one: Point, other: Point, rule: Choose) -> bool:
    """Return whether two points compete, whatever their seeds and the labels that share a choice."""
    kept = (*rule.over, *rule.share)
    return all(one.labels[axis] == label for axis, label in other.labels.items() if axis not in kept)


def rounds_of(run: Run) -> int:
    """Return the completed rounds of a run."""
    return int(run.records[-1]["round"]) if run.records else 0


def standing(run: Run, at: int, judged: Measure) -> float:
    """Return the measure of a run up to a round; values that are not finite are the worst."""
    value = judged.of(replace(run, records=[r for r in run.records if r["round"] <= at]))
    return value if value is not None else -math.inf if judged.rises(run) else math.inf


def same_cell(one: Point, other: Point, rule: Choose) -> bool:
    """Return whether two points differ only in what is chosen from."""
    return all(one.labels[axis] == label for axis, label in other.labels.items() if axis not in rule.over)


def quantile(values: list[float], share: float) -> float:
    """Return the quantile of the values, interpolated linearly."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == ordered[high]:  # infinite values cannot be interpolated
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])

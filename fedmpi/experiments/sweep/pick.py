"""What a search is for: the best labels of some axes, and runs that are given up because others do better.

A cell is one label of every axis that is not chosen from. In each cell the labels that are chosen from compete, by the
mean over their runs: the papers' rule is the smallest mean training loss of the last 20 rounds. A run that failed, or
was given up, takes its labels out of the competition: their other runs are given up as well, and the last labels that
are left are not.
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
FEWEST = 2  # others that a run must be behind
Labels = dict[str, str]


@dataclass(frozen=True)
class Tried:
    """Labels that were in the competition of a cell."""

    labels: Labels
    value: float | None
    """the mean over the runs; None: not all of them came to an end"""
    runs: list[str]


@dataclass(frozen=True)
class Choice:
    """What is best in a cell."""

    cell: Labels
    best: Labels | None
    """None: nothing came to an end"""
    tried: list[Tried]


def judge(rule: Choose) -> Measure:
    """The measure by which a rule compares runs."""
    return measure("best" if rule.by == "test" else f"train_loss{rule.last}")


def pick(sweep: Sweep, points: list[Point], folder: Path) -> list[Choice]:
    """The best labels in each cell, as far as the runs have come."""
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
    """The competition in one cell."""
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
    """The choices as they stand in chosen.json."""
    return {"by": rule.by, "last": rule.last, "over": list(rule.over), "cells": [asdict(choice) for choice in choices]}


def in_words(choices: list[Choice], rule: Choose, masks: Mapping[str, str]) -> str:
    """The choices, a line for each cell, with the masks of its runs, which `masks` has by their names."""
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
        lines.append(f"  {cell}: {best} ({value:.4f}; {ended} of {len(choice.tried)} came to an end)")
    return "\n".join(lines)


# Runs without hope


def due(round: int, stop: Stop) -> int:
    """The last round up to this one at which runs are compared; 0: none yet."""
    return 0 if round < stop.after else stop.after + (round - stop.after) // stop.every * stop.every


def out_of_it(point: Point, points: list[Point], folder: Path, sweep: Sweep) -> str:
    """Why a run need not be made: another one with its labels was given up, so they cannot be chosen. Else empty."""
    if sweep.choose is None:
        return ""
    given_up = given_up_labels(point, points, folder, sweep.choose).get(labels_over(point, sweep.choose))
    return f"{given_up} was given up, which has the same labels to choose from" if given_up else ""


def without_hope(point: Point, points: list[Point], folder: Path, sweep: Sweep) -> str:
    """Why a run is to be given up: it is behind most others of its cell and seed, at the last round of comparison that
    it and enough of them have come to. Empty: it may go on, or is the last that is left to be chosen."""
    rule, stop = sweep.choose, sweep.stop
    if rule is None or stop is None or not is_run(folder / point.name):
        return ""
    out = given_up_labels(point, points, folder, rule)
    if {labels_over(p, rule) for p in points if same_choice(p, point, rule)} - out.keys() <= {labels_over(point, rule)}:
        return ""
    run = read_run(folder / point.name)
    rivals = [p for p in points if p.seed == point.seed and p.name != point.name and same_cell(p, point, rule)]
    there = [read_run(folder / p.name) for p in rivals if is_run(folder / p.name)]
    furthest = sorted((rounds_of(one) for one in there), reverse=True)
    at = due(min(rounds_of(run), furthest[FEWEST - 1]), stop) if len(there) >= FEWEST else 0
    if not at:
        return ""
    judged = judge(rule)
    sign = -1 if judged.rises(run) else 1  # so that less is better
    values = [sign * standing(one, at, judged) for one in there if rounds_of(one) >= at]
    own, bar = sign * standing(run, at, judged), quantile(values, 1 - stop.quantile)
    if own <= bar and (own < math.inf or min(values) == math.inf):
        return ""
    told = "not finite" if own == math.inf else f"{sign * own:.4f}"
    level = f"{sign * bar:.4f} is level with {stop.quantile:.0%} of {len(values)} others"
    return f"{judged.name} was {told} by round {at}, and {level}"


def given_up_labels(point: Point, points: list[Point], folder: Path, rule: Choose) -> dict[tuple[str, ...], str]:
    """The labels that are out in the competition of a point, each with a run of theirs that was given up."""
    rivals = [p for p in points if same_choice(p, point, rule)]
    return {labels_over(p, rule): p.name for p in rivals if was_given_up(folder / p.name)}


def was_given_up(run: Path) -> bool:
    """Whether a run was given up; it may have finished before it heard of that."""
    return (run / GIVEN_UP).exists() and not (run / FINISHED).exists()


def labels_over(point: Point, rule: Choose) -> tuple[str, ...]:
    """The labels of a point that are chosen from."""
    return tuple(point.labels[axis] for axis in rule.over)


def same_choice(one: Point, other: Point, rule: Choose) -> bool:
    """Whether two points are in one competition, whatever their seeds and the labels that share a choice."""
    kept = (*rule.over, *rule.share)
    return all(one.labels[axis] == label for axis, label in other.labels.items() if axis not in kept)


def rounds_of(run: Run) -> int:
    """The rounds that a run has done."""
    return int(run.records[-1]["round"]) if run.records else 0


def standing(run: Run, at: int, judged: Measure) -> float:
    """What a run had come to by a round; what is not finite is behind all that is."""
    value = judged.of(replace(run, records=[r for r in run.records if r["round"] <= at]))
    return value if value is not None else -math.inf if judged.rises(run) else math.inf


def same_cell(one: Point, other: Point, rule: Choose) -> bool:
    """Whether two points differ in nothing but what is chosen from."""
    return all(one.labels[axis] == label for axis, label in other.labels.items() if axis not in rule.over)


def quantile(values: list[float], share: float) -> float:
    """The value that this share of them is below, between two of them in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    if place == low or ordered[low] == ordered[high]:  # between two that are not finite there is nothing
        return ordered[low]
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])

"""What all sections are made from: the groups with their places, and curves of them in pictures."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from ...runs import Group, Run, counted
from ...stats import band, summarise
from ..arrange import MOST_PANELS, Placed, by_metric, by_panel
from ..figures import curves
from ..figures.curves import Line, Panel
from ..figures.rows import Mark
from ..figures.style import Look, Picture

Curve = Mapping[int, float]
STEEP = 60  # times the median, from which on the largest value asks for a logarithmic scale


@dataclass(frozen=True)
class Material:
    """The runs of a report, in groups with their places, and what it is asked for."""

    runs: Sequence[Run]
    placed: Sequence[Placed]
    sweep: Mapping[str, Any]
    """sweep.json, where all runs are of one sweep"""
    reach: Sequence[float] = ()
    smooth: int = 1

    @property
    def groups(self) -> list[Group]:
        return [one.group for one in self.placed]


@dataclass(frozen=True)
class Plot:
    """A picture of curves: what it is called and says, and what its axes are."""

    name: str
    about: str
    """what it shows, in the middle of a sentence"""
    across: str
    down: str
    factor: float = 1.0
    """what values are multiplied by: 100 for percent"""


def smoothed(curve: Curve, over: int) -> dict[int, float]:
    """The running mean over a value and those before it, `over` in all."""
    rounds, values = list(curve), list(curve.values())
    windows = [values[max(0, i + 1 - over) : i + 1] for i in range(len(values))]
    return {number: sum(window) / len(window) for number, window in zip(rounds, windows, strict=True)}


def summed(curve: Curve) -> dict[int, float]:
    """What has come together up to each round."""
    total, found = 0.0, {}
    for number, value in curve.items():
        total += value
        found[number] = total
    return found


def line(one: Placed, down: Sequence[Curve], across: Sequence[Curve] | None = None) -> Line | None:
    """The mean of the seeds' curves with its band, over the rounds or over the mean of other curves; None where there
    is nothing to draw."""
    there = [i for i, curve in enumerate(down) if curve]
    found = band([down[i] for i in there])
    if not found.rounds:
        return None
    x: Sequence[float] = found.rounds
    if across is not None:
        x = [sum(across[i].get(n, 0.0) for i in there) / len(there) for n in found.rounds]
    spread = (found.lower, found.upper) if found.count > 1 else (None, None)
    return Line(one.label, one.look, x, found.mean, *spread)


def plot(
    what: Plot, placed: Sequence[Placed], lines: Callable[[Placed], Sequence[Line | None]], smooth: int = 1
) -> list[Picture]:
    """Pictures of the lines of each group, in the panels of the groups, as many panels as fit a picture."""
    panels = {
        title: [scaled(found, what.factor) for one in inside for found in lines(one) if found is not None]
        for title, inside in by_panel(placed).items()
    }
    said = caption(what, placed, smooth)
    return [
        Picture(
            what.name + ending,
            alt(what, some),
            said if all(curves.sharing(some).values()) else f"{said} Panels have scales of their own.",
            lambda width, some=some: curves.draw(some, what.across, what.down, width, log=steep(some)),  # type: ignore[misc]
        )
        for ending, some in in_pictures(panels)
    ]


def caption(what: Plot, placed: Sequence[Placed], smooth: int) -> str:
    """What curves show, of how many seeds, and what the band is."""
    counts = [len(counted(one.group)) for one in placed]
    if max(counts, default=1) == 1:
        seeds = "one seed each"
    else:
        several = f"{min(counts)} seeds" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)} seeds"
        seeds = f"mean of {several}; the band is one standard deviation over the seeds to either side"
    running = f"; running mean over {smooth} scored rounds" if smooth > 1 else ""
    return f"{what.about[:1].upper()}{what.about[1:]}, {seeds}{running}."


def scaled(found: Line, factor: float) -> Line:
    """The line with its values in the unit that is shown."""
    if factor == 1:
        return found
    low, high = (None if side is None else [factor * v for v in side] for side in (found.low, found.high))
    return replace(found, y=[factor * v for v in found.y], low=low, high=high)


def in_pictures(panels: Mapping[str, Sequence[Line]]) -> Iterator[tuple[str, list[Panel]]]:
    """The panels that have lines, as many as fit a picture at a time, each time with an ending for the name."""
    every = [Panel(title, lines) for title, lines in panels.items() if lines]
    pictures = math.ceil(len(every) / MOST_PANELS)
    size = math.ceil(len(every) / pictures) if pictures else 1  # 16 are two of 8, not 12 and 4
    for at in range(0, len(every), size):
        yield f"-{at // size + 1}" if at else "", every[at : at + size]


def steep(panels: Sequence[Panel]) -> bool:
    """Whether some values are so large that the others could not be seen beside them."""
    values = [value for panel in panels for found in panel.lines for value in found.y]
    return min(values) > 0 and max(values) > STEEP * median(values)


def alt(what: Plot, panels: Sequence[Panel]) -> str:
    """What the picture shows, in words: the axes, and where each line ends."""
    ends = [
        f"{panel.title + ', ' if panel.title else ''}{found.label} ends at {found.y[-1]:.4g}"
        for panel in panels
        for found in panel.lines
    ]
    more = f"; and {len(ends) - 12} more" if len(ends) > 12 else ""
    return f"Line chart of {what.down} against {what.across}. {'; '.join(ends[:12])}{more}."


def unit(metric: str) -> tuple[str, float]:
    """A metric as an axis names it, and what its values are multiplied by there."""
    return ("accuracy, %", 100.0) if metric == "accuracy" else (metric, 1.0)


def slug(text: str) -> str:
    """Some words as part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "metric"


def apart(material: Material) -> list[tuple[str, list[Group]]]:
    """The groups that share a metric, with an ending for the names of what is made of them."""
    found = by_metric(material.placed)
    return [
        (f"-{slug(metric)}" if len(found) > 1 else "", [one.group for one in placed])
        for metric, placed in found.items()
    ]


def has_scores(groups: Sequence[Group]) -> bool:
    """Whether any run of them was scored."""
    return any(run.series(run.score) for group in groups for run in group.runs)


def mark(label: str, look: Look, found: Sequence[float | None], factor: float) -> Mark:
    """The mean of seeds as a mark, with the value of each where there are several."""
    told = summarise(found)
    if told is None:
        return Mark(label, look, None)
    seeds = [factor * value for value in found if value is not None] if told.count > 1 else []
    return Mark(label, look, factor * told.mean, seeds=seeds)

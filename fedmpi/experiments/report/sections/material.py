"""What sections are made from: the groups with their places in figures, and curves of them."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from ...runs import Group, Run, counted
from ...stats import band, summarise
from ..figures import curves
from ..figures.curves import Line, Panel
from ..figures.rows import Mark
from ..figures.style import Picture, Style
from ..layout import MOST_PANELS, Placed, by_metric, by_panel

Curve = Mapping[int, float]
STEEP = 60  # a largest value of so many medians asks for a logarithmic scale


@dataclass(frozen=True)
class Material:
    """The runs of a report and its options."""

    runs: Sequence[Run]
    placed: Sequence[Placed]
    sweep: Mapping[str, Any]
    """sweep.json if all runs belong to one sweep"""
    reach: Sequence[float] = ()
    smooth: int = 1

    @property
    def groups(self) -> list[Group]:
        return [one.group for one in self.placed]


@dataclass(frozen=True)
class Plot:
    """A figure of curves: its file name, its content and its axes."""

    name: str
    about: str
    """content, in the middle of a sentence"""
    across: str
    down: str
    factor: float = 1.0
    """factor of the values: 100 for percent"""


def smoothed(curve: Curve, over: int) -> dict[int, float]:
    """Return the running mean over up to `over` values."""
    numbers = list(curve.values())
    return {t: fmean(numbers[max(0, i + 1 - over) : i + 1]) for i, t in enumerate(curve)}


def summed(curve: Curve) -> dict[int, float]:
    """Return the running sum."""
    return dict(zip(curve, accumulate(curve.values()), strict=True))


def line(one: Placed, down: Sequence[Curve], across: Sequence[Curve] | None = None) -> Line | None:
    """Return the mean of the seeds' curves with its band, over rounds or over the mean of other curves; None if
    there is nothing to draw."""
    present = [i for i, curve in enumerate(down) if curve]
    found = band([down[i] for i in present])
    if not found.rounds:
        return None
    x: Sequence[float] = found.rounds
    if across is not None:
        x = [fmean(across[i].get(t, 0.0) for i in present) for t in found.rounds]
    spread = (found.lower, found.upper) if found.count > 1 else (None, None)
    return Line(one.label, one.style, x, found.mean, *spread)


def plot(
    what: Plot, placed: Sequence[Placed], lines: Callable[[Placed], Sequence[Line | None]], smooth: int = 1
) -> list[Picture]:
    """Return figures of the lines of each group in their panels, with up to `MOST_PANELS` panels each."""

    def picture(name: str, panels: list[Panel]) -> Picture:
        own = "" if all(curves.shared_scales(panels).values()) else " Panels have scales of their own."
        text, log = caption(what, placed, smooth) + own, steep(panels)
        return Picture(name, alt(what, panels), text, lambda: curves.draw(panels, what.across, what.down, log))

    panels = {
        title: [scaled(found, what.factor) for one in inside for found in lines(one) if found is not None]
        for title, inside in by_panel(placed).items()
    }
    return [picture(what.name + ending, some) for ending, some in in_figures(panels)]


def caption(what: Plot, placed: Sequence[Placed], smooth: int) -> str:
    """Return what curves show, of how many seeds, and what the band is."""
    counts = sorted({len(counted(one.group)) for one in placed})
    if counts[-1:] in ([], [1]):
        seeds = "one seed each"
    else:
        seeds = f"mean of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds with a band of ± 1 sd"
    running = f"; running mean over {smooth} scored rounds" if smooth > 1 else ""
    return f"{what.about[:1].upper()}{what.about[1:]}, {seeds}{running}."


def scaled(found: Line, factor: float) -> Line:
    """Return the line with its values multiplied by a factor."""
    if factor == 1:
        return found
    low, high = (None if side is None else [factor * v for v in side] for side in (found.low, found.high))
    return replace(found, y=[factor * v for v in found.y], low=low, high=high)


def in_figures(panels: Mapping[str, Sequence[Line]]) -> Iterator[tuple[str, list[Panel]]]:
    """Yield the panels of each figure with a suffix for its name; panels without lines are left out."""
    every = [Panel(title, lines) for title, lines in panels.items() if lines]
    figures = math.ceil(len(every) / MOST_PANELS)
    size = math.ceil(len(every) / figures) if figures else 1  # 16 are two of 8, not 12 and 4
    for at in range(0, len(every), size):
        yield f"-{at // size + 1}" if at else "", every[at : at + size]


def steep(panels: Sequence[Panel]) -> bool:
    """Return whether a linear scale would hide most values."""
    values = [value for panel in panels for found in panel.lines for value in found.y]
    return min(values) > 0 and max(values) > STEEP * median(values)


def alt(what: Plot, panels: Sequence[Panel]) -> str:
    """Return the axes and the last value of each line in words."""
    ends = [
        f"{panel.title + ', ' if panel.title else ''}{found.label} ends at {found.y[-1]:.4g}"
        for panel in panels
        for found in panel.lines
    ]
    more = f"; and {len(ends) - 12} more" if len(ends) > 12 else ""
    return f"Line chart of {what.down} against {what.across}. {'; '.join(ends[:12])}{more}."


def unit(metric: str) -> tuple[str, float]:
    """Return the name of a metric on an axis, and the factor of its values there."""
    return ("accuracy, %", 100.0) if metric == "accuracy" else (metric, 1.0)


def slug(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "metric"


def by_suffix(placed: Sequence[Placed]) -> dict[str, list[Placed]]:
    """Return the groups that share a metric by a suffix for file names: '' if there is one metric."""
    found = by_metric(placed)
    return {f"-{slug(metric)}" if len(found) > 1 else "": some for metric, some in found.items()}


def mark(label: str, style: Style, found: Sequence[float | None], factor: float) -> Mark:
    """Return the mean over seeds as a mark, with the value of each if there are several."""
    summary = summarise(found)
    if summary is None:
        return Mark(label, style, None)
    seeds = [factor * value for value in found if value is not None] if summary.count > 1 else []
    return Mark(label, style, factor * summary.mean, seeds=seeds)

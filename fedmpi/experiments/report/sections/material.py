"""What sections are made from: the groups with their places in figures, and the figures that several sections draw."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from typing import Any

from ...runs import Group, Run, counted
from ...stats import band, summarise
from ..figures import curves, rows
from ..figures.curves import Line, Panels
from ..figures.rows import Mark, Row
from ..figures.style import Picture, Style
from ..layout import MOST_PANELS, Placed

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
    """A figure of curves: its file name, its content, its axes and what is done to the values."""

    name: str
    about: str
    """content, in the middle of a sentence"""
    down: str
    smooth: int = 1
    """scored rounds of a running mean"""
    factor: float = 1.0
    """factor of the values: 100 for percent"""
    across: str = "round"


def by_suffix(placed: Sequence[Placed]) -> dict[str, list[Placed]]:
    """Return the groups that share a metric by a suffix for file names: '' if there is one metric."""
    found: dict[str, list[Placed]] = {}
    for one in placed:
        found.setdefault(one.group.metric, []).append(one)
    return {f"-{slug(metric)}" if len(found) > 1 else "": some for metric, some in found.items()}


def unit(metric: str) -> tuple[str, float]:
    """Return the name of a metric on an axis, and the factor of its values there."""
    return ("accuracy, %", 100.0) if metric == "accuracy" else (metric, 1.0)


def slug(text: str) -> str:
    """Return a text as part of a file name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", text).strip("-").lower() or "metric"


def capitalised(text: str) -> str:
    return text[:1].upper() + text[1:]


# Curves


def smoothed(curve: Curve, over: int) -> dict[int, float]:
    """Return the running mean over up to `over` values."""
    numbers = list(curve.values())
    return {t: fmean(numbers[max(0, i + 1 - over) : i + 1]) for i, t in enumerate(curve)}


def summed(curve: Curve) -> dict[int, float]:
    """Return the running sum."""
    return dict(zip(curve, accumulate(curve.values()), strict=True))


def line(what: Plot, one: Placed, down: Sequence[Curve], across: Sequence[Curve] = ()) -> Line | None:
    """Return the mean of the seeds' curves with its band, over rounds or the mean of other curves."""
    present = [i for i, curve in enumerate(down) if curve]
    found = band([smoothed(down[i], what.smooth) for i in present])
    if not found:
        return None
    x = [fmean(across[i].get(t, 0.0) for i in present) for t in found] if across else list(found)
    y, low, high = ([what.factor * (p.mean + side * (p.sd or 0.0)) for p in found.values()] for side in (0, -1, 1))
    spread = (low, high) if len(present) > 1 else (None, None)
    return Line(one.label, one.style, x, y, *spread)


def plot(what: Plot, placed: Sequence[Placed], drawn: Iterable[tuple[str, Line | None]]) -> list[Picture]:
    """Return figures of the lines, each with the title of its panel, with up to `MOST_PANELS` panels each."""
    panels: dict[str, list[Line]] = {}
    for title, one in drawn:
        if one is not None:
            panels.setdefault(title, []).append(one)
    every = list(panels.items())
    figures = max(1, math.ceil(len(every) / MOST_PANELS))
    size = max(1, math.ceil(len(every) / figures))  # 16 are two of 8, not 12 and 4
    parts = [dict(every[at : at + size]) for at in range(0, len(every), size)]
    return [picture(what, part, number, caption(what, placed)) for number, part in enumerate(parts)]


def picture(what: Plot, panels: Panels, number: int, text: str) -> Picture:
    """Return the figure of some panels, with a number in its name if it is not the first."""
    values = [value for lines in panels.values() for one in lines for value in one.y]
    log = min(values) > 0 and max(values) > STEEP * median(values)  # a linear scale would hide most values
    own = "" if all(curves.shared_scales(panels).values()) else " Panels have scales of their own."
    name = f"{what.name}-{number + 1}" if number else what.name
    return Picture(name, alt(what, panels), text + own, lambda: curves.draw(panels, what.across, what.down, log))


def caption(what: Plot, placed: Sequence[Placed]) -> str:
    """Return what curves show, of how many seeds, and what the band is."""
    counts = sorted({len(counted(one.group)) for one in placed})
    if counts[-1:] in ([], [1]):
        seeds = "one seed each"
    else:
        seeds = f"mean of {' to '.join(map(str, dict.fromkeys((counts[0], counts[-1]))))} seeds with a band of ± 1 sd"
    running = f"; running mean over {what.smooth} scored rounds" if what.smooth > 1 else ""
    return f"{capitalised(what.about)}, {seeds}{running}."


def alt(what: Plot, panels: Panels) -> str:
    """Return the axes and the last value of each line in words."""
    ends = [
        f"{title + ', ' if title else ''}{one.label} ends at {one.y[-1]:.4g}"
        for title, lines in panels.items()
        for one in lines
    ]
    more = f"; and {len(ends) - 12} more" if len(ends) > 12 else ""
    return f"Line chart of {what.down} against {what.across}. {'; '.join(ends[:12])}{more}."


# Rows of dots


def mark(label: str, style: Style, found: Sequence[float | None], factor: float = 1.0) -> Mark:
    """Return the mean over seeds as a mark, with the value of each if there are several."""
    summary = summarise(found)
    if summary is None:
        return Mark(label, style, None)
    seeds = [factor * value for value in found if value is not None] if summary.count > 1 else []
    return Mark(label, style, factor * summary.mean, seeds=seeds)


def dots(name: str, about: str, caption: str, drawn: Sequence[Row], across: str, **how: Any) -> Picture:
    """Return rows of marks; `how` as in `rows.draw`."""
    alt = f"Dot plot of {about}; the table has the numbers."
    return Picture(name, alt, caption, lambda: rows.draw(drawn, across, **how))

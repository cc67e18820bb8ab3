"""Curves with a band over seeds, in panels that share their axes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .style import Look, grid, legend, name_axes, panels, put_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEIGHT, SINGLE, MARKED = 2.3, 3.0, 8  # of a panel, and of one alone; about so many markers a line
UNLIKE = 3.0  # times that the values of one panel may be those of another, and both share a scale


@dataclass(frozen=True)
class Line:
    """A curve: its mean and, where there are several seeds, a band around it."""

    label: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Panel:
    """Curves that share a pair of axes."""

    title: str
    lines: Sequence[Line]


def draw(
    parts: Sequence[Panel], across: str, down: str, width: float, log: bool = False, ticks: Sequence[float] = ()
) -> Figure:
    """Panels of curves over one scale, and a legend for all. `log`: values on a logarithmic scale; `ticks`: so is what
    they stand against, and these are marked on it."""
    single = len(parts) == 1
    figure, axes = panels(len(parts), width, SINGLE if single else HEIGHT, **sharing(parts))
    handles: dict[str, object] = {}
    for part, where in zip(parts, axes, strict=True):
        for number, line in enumerate(part.lines):
            handles.setdefault(line.label, draw_line(where, line, number / max(1, len(part.lines))))
        put_title(where, part.title, width)
        grid(where)
    for where in axes:
        set_scales(where, log, ticks, 10 if single else 5)
    name_axes(axes, across, down)
    legend(figure, list(handles.values()), list(handles), width)
    return figure


def sharing(parts: Sequence[Panel]) -> dict[str, bool]:
    """Which scales the panels share."""
    return {
        "sharex": alike([max(line.x) for line in part.lines] for part in parts),
        "sharey": alike([max(map(abs, line.y)) for line in part.lines] for part in parts),
    }


def alike(ends: Iterable[Sequence[float]]) -> bool:
    """Whether panels with such values can share a scale, and none of them ends up in a corner of it."""
    most = [max(values) for values in ends]
    return max(most) <= UNLIKE * min(most)


def set_scales(axes: Axes, log: bool, ticks: Sequence[float], most: int) -> None:
    """Scales and ticks; few of them in small panels, as drawing them takes most of the time."""
    if log:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
    else:
        axes.locator_params(axis="y", nbins=min(most, 6))
    if ticks:
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.locator_params(axis="x", integer=True, nbins=most)


def draw_line(axes: Axes, line: Line, shift: float) -> object:
    """One curve; its markers stand a little apart from those of others. Returns what the legend shows."""
    look = line.look
    every = max(1, len(line.x) // MARKED)
    first = min(int(shift * every), max(0, len(line.x) - 1))
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=look.colour, alpha=0.16, linewidth=0)
    (drawn,) = axes.plot(
        np.asarray(line.x),
        np.asarray(line.y),
        color=look.colour,
        linestyle=look.dash,
        linewidth=1.6,
        marker=look.marker,
        markersize=4.5,
        markevery=(first, every),
        markerfacecolor=look.face,
        markeredgewidth=1.1,
    )
    return drawn

"""Curves with a band over seeds, in panels that share their axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .style import Style, grid, legend, name_axes, panels, set_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

HEIGHT, SINGLE = 2.3, 3.0  # of a panel, and of a single one
MARKED = 8  # markers per line, about
UNLIKE = 3.0  # panels whose largest values differ by more than this factor do not share a scale


@dataclass(frozen=True)
class Line:
    """A curve: its mean and, for several seeds, a band around it."""

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


Panels = Mapping[str, Sequence[Line]]
"""the curves that share a pair of axes, by the title of these"""


def draw(parts: Panels, across: str, down: str, log: bool = False, ticks: Sequence[float] = ()) -> Figure:
    """Draw panels of curves with one legend. `log`: logarithmic values; `ticks`: a logarithmic x axis with these."""
    single = len(parts) == 1
    figure, axes = panels(len(parts), SINGLE if single else HEIGHT, **shared_scales(parts))
    handles: dict[str, Line2D] = {}
    for (title, lines), one in zip(parts.items(), axes, strict=True):
        for number, line in enumerate(lines):
            handles.setdefault(line.label, draw_line(one, line, number / len(lines)))
        set_title(one, title)
        grid(one)
    for one in axes:
        set_scales(one, log, ticks, 10 if single else 5)
    name_axes(axes, across, down)
    legend(figure, handles)
    return figure


def shared_scales(parts: Panels) -> dict[str, bool]:
    """Return which scales the panels share."""
    across = [max(max(line.x) for line in lines) for lines in parts.values()]
    down = [max(max(map(abs, line.y)) for line in lines) for lines in parts.values()]
    return {"sharex": max(across) <= UNLIKE * min(across), "sharey": max(down) <= UNLIKE * min(down)}


def set_scales(axes: Axes, log: bool, ticks: Sequence[float], most: int) -> None:
    """Set scales and ticks; few in small panels, as drawing ticks takes most of the time."""
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


def draw_line(axes: Axes, line: Line, shift: float) -> Line2D:
    """Draw a curve, its markers shifted against those of the others, and return its handle for the legend."""
    style, every = line.style, max(1, len(line.x) // MARKED)
    if line.low is not None and line.high is not None:
        axes.fill_between(line.x, line.low, line.high, color=style.colour, alpha=0.16, linewidth=0)
    (drawn,) = axes.plot(
        list(line.x),
        list(line.y),
        color=style.colour,
        linestyle=style.dash,
        linewidth=1.6,
        marker=style.marker,
        markersize=4.5,
        markevery=(min(int(shift * every), max(0, len(line.x) - 1)), every),
        markerfacecolor=style.face,
        markeredgewidth=1.1,
    )
    return drawn

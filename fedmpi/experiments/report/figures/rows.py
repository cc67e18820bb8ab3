"""Figures of rows: a name above each row, and its values along a common scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .style import COLOURS, FAINT, HATCHES, INK, PAPER, WIDTH, Style, grid, legend, shortened

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, MARGIN, NAME = 0.46, 0.85, 0.36  # heights of a row and of the margins; distance of a name above its row
LETTERS, NOTED = 12.5, 0.67  # letters of a name per inch; largest share of a line for its note
DOTTED: dict[str, Any] = {"color": FAINT, "linewidth": 1, "linestyle": (0, (2, 2)), "zorder": 0}


@dataclass(frozen=True)
class Mark:
    """A value with its interval and the values of the seeds, where known."""

    label: str
    style: Style
    value: float | None
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = ()


@dataclass(frozen=True)
class Row:
    """Values on one line, and a note at its end."""

    label: str
    marks: Sequence[Mark] = ()
    note: str = ""


def new_figure(rows: int) -> Figure:
    """Return a figure with the height of so many rows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, rows * ROW + MARGIN), layout="constrained")


def draw(rows: Sequence[Row], across: str, line: float | None = None, whole: bool = False) -> Figure:
    """Draw rows of marks along one scale, with a vertical line at `line`. `whole`: the scale has whole numbers."""
    figure = new_figure(len(rows))
    axes = figure.subplots()
    handles = draw_rows(axes, rows, WIDTH)
    if line is not None:
        axes.axvline(line, **DOTTED)
    low, high = axes.get_xlim()
    if whole and high - low < 2:
        axes.set_xlim(low - 1, high + 1)  # so that there are whole numbers to mark
    axes.locator_params(axis="x", integer=whole)
    axes.set_xlabel(across)
    legend(figure, handles)
    return figure


def draw_pairs(pairs: Sequence[tuple[Row, Mark]], across: str) -> Figure:
    """Draw rows of two values with those of their seeds on the left, the mark of their difference on the right."""
    figure = new_figure(len(pairs))
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    handles = draw_rows(left, [row for row, _ in pairs], 0.58 * WIDTH, joined=True)
    draw_rows(right, [Row("", [gap]) for _, gap in pairs], 0.38 * WIDTH)
    right.axvline(0, **DOTTED)
    reach = max((abs(v) for _, gap in pairs for v in (gap.low, gap.high, gap.value) if v is not None), default=1)
    right.set_xlim(-1.15 * (reach or 1), 1.15 * (reach or 1))  # zero in the middle
    left.set_xlabel(across)
    right.set_xlabel("difference with 95% interval")
    legend(figure, handles)
    return figure


def draw_rows(axes: Axes, rows: Sequence[Row], width: float, joined: bool = False) -> dict[str, Any]:
    """Draw rows from top to bottom and return the legend's handles by label."""
    handles: dict[str, Any] = {}
    room, place = int(width * LETTERS), axes.get_yaxis_transform()
    for at, row in enumerate(rows):
        note = shortened(row.note, int(NOTED * room))
        name = shortened(row.label, room - (len(note) + 3 if note else 0))
        axes.text(0.0, at - NAME, name, transform=place, va="center", fontsize=8.5, color=INK)
        axes.text(1.0, at - NAME, note, transform=place, ha="right", va="center", fontsize=8, color=FAINT)
        known = [mark.value for mark in row.marks if mark.value is not None]
        if joined and known:
            axes.plot([min(known), max(known)], [at, at], color=FAINT, linewidth=1, zorder=1)
        for mark in row.marks:
            if mark.value is not None:
                handles.setdefault(mark.label, draw_mark(axes, at, mark, mark.value))
    axes.set_ylim(len(rows) - 0.55, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    grid(axes, "x")
    axes.locator_params(axis="x", nbins=max(3, int(width * 1.2)))
    return handles


def draw_mark(axes: Axes, at: float, mark: Mark, value: float) -> Any:
    """Draw a value with its interval and seeds, and return its handle for the legend."""
    style = mark.style
    if mark.low is not None and mark.high is not None:
        bar: dict[str, Any] = {"linewidth": 2.2, "alpha": 0.55, "solid_capstyle": "butt"}
        axes.plot([mark.low, mark.high], [at, at], color=style.colour, zorder=2, **bar)
    for seed in mark.seeds:
        axes.plot([seed], [at], marker="|", markersize=7, color=style.colour, alpha=0.7, linestyle="none")
    shape: dict[str, Any] = {"marker": style.marker, "markersize": 6.5, "markerfacecolor": style.face}
    (drawn,) = axes.plot([value], [at], color=style.colour, linestyle="none", markeredgewidth=1.3, zorder=3, **shape)
    return drawn


def draw_stacks(stacks: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], across: str) -> Figure:
    """Draw one bar per (label, lengths), its parts distinguished by colour and hatching."""
    figure = new_figure(len(stacks))
    axes = figure.subplots()
    draw_rows(axes, [Row(label) for label, _ in stacks], WIDTH)
    handles: dict[str, Any] = {}
    for at, (_, lengths) in enumerate(stacks):
        left = 0.0
        for number, (name, length) in enumerate(zip(names, lengths, strict=True)):
            fill: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "hatch": HATCHES[number % len(HATCHES)]}
            bar = axes.barh(at, length, left=left, height=0.34, edgecolor=PAPER, linewidth=0.6, **fill)
            handles.setdefault(name, bar)
            left += length
    axes.set_xlim(left=0)
    axes.set_xlabel(across)
    legend(figure, handles)
    return figure

"""Pictures of rows: a name above each row, and its values along a common scale.

The names stand inside the picture, above what they name, so that they have its whole width and none is cut on a phone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .style import COLOURS, FAINT, HATCHES, INK, NARROW, PAPER, Look, grid, legend, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW, MARGIN, NAME = 0.46, 0.85, 0.36  # heights of a row and of what is around them; how far above a row its name is
LETTERS, NOTED = 12.5, 0.67  # letters of a name in an inch; the most of a line that its note takes


@dataclass(frozen=True)
class Mark:
    """A value with what is known of its spread: an interval, and the values of the seeds."""

    label: str
    look: Look
    value: float | None
    low: float | None = None
    high: float | None = None
    seeds: Sequence[float] = ()


@dataclass(frozen=True)
class Row:
    """Values that stand on one line."""

    label: str
    marks: Sequence[Mark]
    note: str = ""
    """said at the end of the line with its name"""


@dataclass(frozen=True)
class Pair:
    """Two values and their difference, second less first, with its interval where there is one."""

    row: Row
    difference: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Stack:
    """A bar that is made of pieces."""

    label: str
    pieces: Sequence[float]


def figure_of(rows: int, width: float) -> Figure:
    """A figure that is high enough for so many rows."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, rows * ROW + MARGIN), layout="constrained")


def draw(rows: Sequence[Row], across: str, width: float, line: float | None = None, whole: bool = False) -> Figure:
    """Rows of marks along one scale, which has `whole` numbers; a thin upright line where `line` is."""
    figure = figure_of(len(rows), width)
    axes = figure.subplots()
    handles = put_rows(axes, rows, width)
    if line is not None:
        axes.axvline(line, color=FAINT, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    low, high = axes.get_xlim()
    if whole and high - low < 2:
        axes.set_xlim(low - 1, high + 1)  # so that there are whole numbers to mark
    axes.locator_params(axis="x", integer=whole)
    axes.set_xlabel(across)
    legend(figure, list(handles.values()), list(handles), width)
    return figure


def draw_pairs(pairs: Sequence[Pair], across: str, width: float) -> Figure:
    """On the left both values and those of their seeds, on the right the difference with its interval; below each other
    where the page is narrow."""
    narrow = width <= NARROW
    if narrow:
        figure = figure_of(2 * len(pairs) + 2, width)
        left, right = figure.subplots(2, 1)
    else:
        figure = figure_of(len(pairs), width)
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    handles = put_rows(left, [pair.row for pair in pairs], width if narrow else 0.58 * width, joined=True)
    names = [Row(pair.row.label if narrow else "", ()) for pair in pairs]
    put_rows(right, names, width if narrow else 0.38 * width)
    for at, pair in enumerate(pairs):
        put_spread(right, at, pair.low, pair.high, INK)
        right.plot([pair.difference], [at], marker="D", markersize=5, color=INK, linestyle="none")
    right.axvline(0, color=FAINT, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    reach = max((abs(v) for pair in pairs for v in (pair.low, pair.high, pair.difference) if v is not None), default=1)
    right.set_xlim(-1.15 * (reach or 1), 1.15 * (reach or 1))  # zero in the middle, so that sides can be compared
    left.set_xlabel(across)
    right.set_xlabel("difference, with its interval")
    legend(figure, list(handles.values()), list(handles), width)
    return figure


def put_rows(axes: Axes, rows: Sequence[Row], width: float, joined: bool = False) -> dict[str, Any]:
    """Draw rows from above down; returns what the legend shows of each label."""
    handles: dict[str, Any] = {}
    room = int(width * LETTERS)
    for at, row in enumerate(rows):
        note = short(row.note, int(NOTED * room))
        name = short(row.label, room - (len(note) + 3) * bool(note))
        axes.text(0.0, at - NAME, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8.5, color=INK)
        known = [(mark, mark.value) for mark in row.marks if mark.value is not None]
        if joined and known:
            ends = [value for _, value in known]
            axes.plot([min(ends), max(ends)], [at, at], color=FAINT, linewidth=1, zorder=1)
        for mark, middle in known:
            put_spread(axes, at, mark.low, mark.high, mark.look.colour)
            for value in mark.seeds:
                axes.plot([value], [at], marker="|", markersize=7, color=mark.look.colour, alpha=0.7, linestyle="none")
            (drawn,) = axes.plot(
                [middle],
                [at],
                marker=mark.look.marker,
                markersize=6.5,
                markerfacecolor=mark.look.face,
                markeredgewidth=1.3,
                color=mark.look.colour,
                linestyle="none",
                zorder=3,
            )
            handles.setdefault(mark.label, drawn)
        if note:
            place = axes.get_yaxis_transform()
            axes.text(1.0, at - NAME, note, transform=place, ha="right", va="center", fontsize=8, color=FAINT)
    axes.set_ylim(len(rows) - 0.55, -0.6)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    grid(axes, "x")
    axes.locator_params(axis="x", nbins=max(3, int(width * 1.2)))
    return handles


def put_spread(axes: Axes, at: float, low: float | None, high: float | None, colour: str) -> None:
    """An interval as a bar across its row."""
    if low is not None and high is not None:
        axes.plot([low, high], [at, at], color=colour, linewidth=2.2, alpha=0.55, solid_capstyle="butt", zorder=2)


def draw_stacks(stacks: Sequence[Stack], names: Sequence[str], across: str, width: float) -> Figure:
    """A bar a row, its pieces told apart by colours and hatches."""
    figure = figure_of(len(stacks), width)
    axes = figure.subplots()
    put_rows(axes, [Row(stack.label, ()) for stack in stacks], width)
    handles: dict[str, Any] = {}
    for at, stack in enumerate(stacks):
        left = 0.0
        for number, (name, piece) in enumerate(zip(names, stack.pieces, strict=True)):
            bar = axes.barh(
                at,
                piece,
                left=left,
                height=0.34,
                color=COLOURS[number % len(COLOURS)],
                hatch=HATCHES[number % len(HATCHES)],
                edgecolor=PAPER,
                linewidth=0.6,
            )
            handles.setdefault(name, bar)
            left += piece
    axes.set_xlim(left=0)
    axes.set_xlabel(across)
    legend(figure, list(handles.values()), list(handles), width)
    return figure

"""The picture of a split: the samples per client and class on the left, and on the right some samples of some clients
and of the test set as a model sees them.

Classes differ in their numbers as well as in colours, amounts in lightness: it can be read in black and white. Lengths
are in inches.
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from torch import Tensor

from ....data import Ints
from ....errors import UserError
from .style import FAINT, INK, WIDTH

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

BARS, COLOURED = 40, 20  # most clients and classes shown as bars; more become a heat map
PALETTE = "#332288 #88ccee #117733 #ddcc77 #cc6677 #44aa99 #882255 #999933 #aa4499 #dddddd".split()
"""distinct for any colour vision"""
PLAIN = "#557799"
LEFT, GAP, TILE, BAR, LINE, MARGIN, TITLE = 5.5, 0.2, 0.6, 0.2, 0.135, 1.2, 0.3
DPI = 150


class Row(NamedTuple):
    """Some samples of one client, or of the test set: images [k, channels, height, width] or lines of text."""

    label: str
    content: Tensor | list[str]


class View(NamedTuple):
    """The content of a picture."""

    title: str
    counts: Ints
    """[clients, classes]: samples of the first clients; one column if there are no classes"""
    clients: int
    labelled: bool
    """whether there are classes"""
    rows: list[Row]
    """samples of the first clients, then of the test set; empty for data that are neither images nor text"""


def draw(view: View) -> Figure:
    """Draw the picture of a split."""
    from matplotlib.figure import Figure

    text = bool(view.rows) and isinstance(view.rows[0].content, list)
    columns = max((len(row.content) for row in view.rows), default=0)
    width = (6.1 if text else columns * TILE + 0.9) if view.rows else 0.01
    lines = sum(len(row.content) + 1.6 for row in view.rows) * LINE if text else len(view.rows) * TILE
    bars = len(view.counts) * BAR
    clients = max(bars, min(2 * bars, lines), 2.0) if as_bars(view) else min(max(lines, 5.0), 8.0)
    heights = [clients + MARGIN, lines + MARGIN]
    figure = Figure(figsize=(LEFT + GAP + width, max(heights) + TITLE), dpi=DPI, layout="constrained")
    title = textwrap.fill(view.title, int((LEFT + width) * 9))
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    grid, parts = figure.add_gridspec(1, 3, width_ratios=(LEFT, GAP, width)), []
    for column, height in zip((0, 2), heights, strict=True):
        rows = grid[column].subgridspec(2, 1, height_ratios=(height, max(heights) - height + 0.01))
        parts.append(figure.add_subfigure(rows[0]))
    (draw_bars if as_bars(view) else draw_heat)(parts[0], view)
    if view.rows:
        (draw_texts if text else draw_images)(parts[1].subplots(), view.rows)
    return figure


def draw_labels(counts: Ints, clients: int, labelled: bool) -> Figure:
    """Draw the samples per client and class alone: bars for few clients, else shades."""
    from matplotlib.figure import Figure

    view = View("", counts, clients, labelled, [])
    height = max(2.0, 1.2 * len(counts) * BAR + 1.0) if as_bars(view) else 4.2
    figure = Figure(figsize=(0.75 * WIDTH, height), layout="constrained")
    part = figure.subfigures(1, 1, squeeze=False)[0, 0]
    (draw_bars if as_bars(view) else draw_heat)(part, view)
    return figure


def as_bars(view: View) -> bool:
    """Return whether clients and classes are few enough for one bar per client."""
    return len(view.counts) <= BARS and view.counts.shape[1] <= COLOURED


def draw_bars(part: SubFigure, view: View) -> None:
    """Draw one bar per client with one piece per class; wide pieces contain the number of their class."""
    axes = part.subplots()
    clients, classes = view.counts.shape
    sizes, ends = view.counts.sum(axis=1), view.counts.cumsum(axis=1)
    for c in range(classes):
        pieces, colour = view.counts[:, c], PALETTE[c % len(PALETTE)] if view.labelled else PLAIN
        box = {"facecolor": colour, "edgecolor": "none", "pad": 0.6}  # no hatching behind the number
        axes.barh(
            range(clients),
            pieces,
            left=ends[:, c] - pieces,
            height=0.82,
            color=colour,
            hatch="////" if c >= len(PALETTE) else "",
            edgecolor="white",
            linewidth=0.5,
            label=str(c),
        )
        if view.labelled:
            for row in np.flatnonzero(pieces > 0.035 * sizes.max()).tolist():
                middle = float(ends[row, c] - pieces[row] / 2)
                axes.text(middle, row, str(c), ha="center", va="center", fontsize=7, color=ink_on(colour), bbox=box)
    for row, size in enumerate(sizes.tolist()):
        axes.text(size + 0.01 * max(sizes), row, f"{size:,}", va="center_baseline", fontsize=7, color=FAINT)
    axes.set_xlim(0, 1.1 * sizes.max())
    axes.set_ylim(clients - 0.4, -0.6)
    axes.set_yticks(range(0, clients, 1 if clients <= 20 else 2))
    axes.set_xlabel("samples (the number inside a bar is the class)" if view.labelled else "samples")
    if view.labelled:  # for pieces that are too narrow for a number
        tight = {"borderaxespad": 0.2, "handlelength": 0.9, "handletextpad": 0.3, "columnspacing": 0.8}
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=7, ncols=10, **tight)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    finish(axes, view, head=True)


def ink_on(colour: str) -> str:
    """Return the text colour that is readable on a colour."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return INK if 0.3 * red + 0.59 * green + 0.11 * blue > 140 else "white"


def draw_heat(part: SubFigure, view: View) -> None:
    """Draw one line per client, darker for more of a class, and its size; without classes the sizes alone."""
    if view.labelled:
        axes, side = part.subplots(1, 2, sharey=True, width_ratios=(3.6, 1))
        draw_shades(part, axes, view.counts)
        side.tick_params(left=False, labelleft=False)
    else:
        axes = side = part.subplots()
    clients, sizes = len(view.counts), view.counts.sum(axis=1)
    side.barh(range(clients), sizes, height=1.0, color=PLAIN, antialiased=False)  # no light between the bars
    side.set_xlim(0, 1.05 * sizes.max())
    side.set_xlabel("samples")
    side.locator_params(axis="x", nbins=2 if view.labelled else 6, integer=True)
    axes.set_ylim(clients - 0.5, -0.5)
    axes.locator_params(axis="y", nbins=10, integer=True)
    finish(side, view)
    finish(axes, view, head=True)


def draw_shades(part: SubFigure, axes: Axes, counts: Ints) -> None:
    """Draw clients down and classes across, shaded by their samples, with the colour bar below."""
    from matplotlib.colors import LogNorm

    low, high = int(counts[counts > 0].min()), int(counts.max())
    present = np.ma.masked_equal(counts, 0)  # zeros stay white
    shades = axes.imshow(present, aspect="auto", interpolation="nearest", cmap="YlGnBu", norm=LogNorm(low / 2, high))
    ticks = np.unique(np.geomspace(low, high, 4).round())
    scale = part.colorbar(
        shades, ax=axes, location="bottom", aspect=40, ticks=ticks, format="{x:,.0f}", label="samples (white: none)"
    )
    scale.minorticks_off()
    scale.ax.tick_params(labelsize=8)
    scale.ax.set_xlim(min(low, high / 2), high)
    axes.locator_params(axis="x", nbins=counts.shape[1] if counts.shape[1] <= COLOURED else 10, integer=True)
    axes.set_xlabel("class")


def finish(axes: Axes, view: View, head: bool = False) -> None:
    """Format the axes of a panel of clients; the first one (`head`) gets the title."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    if head:
        shown = f"the first {len(view.counts)} of " if len(view.counts) < view.clients else ""
        kinds = f", {view.counts.shape[1]} classes" if view.labelled else ""
        axes.set_title(f"{shown}{view.clients:,} clients{kinds}", loc="left", fontsize=10, color=INK)
        axes.set_ylabel("client")


def draw_images(axes: Axes, rows: list[Row]) -> None:
    """Draw one row of images per client and, a little apart, one of the test set."""
    some = rows[0].content
    assert isinstance(some, Tensor)
    height, width = some.shape[-2:]
    gap = max(1, height // 14)
    down, across = height + gap, width + gap
    apart = down // 2
    columns = max(len(row.content) for row in rows)
    canvas = np.full((len(rows) * down + apart, columns * across, 3), 255, dtype=np.uint8)
    middles = []
    for i, row in enumerate(rows):
        top = i * down + (apart if i == len(rows) - 1 else 0)
        middles.append(top + height / 2)
        for j, image in enumerate(row.content):
            assert isinstance(image, Tensor)
            pixels = image.permute(1, 2, 0).numpy()
            canvas[top : top + height, j * across : j * across + width] = pixels  # one channel becomes three equal ones
    axes.imshow(canvas, interpolation="nearest")
    axes.set_yticks(middles, [row.label for row in rows], fontsize=8)
    axes.set_xticks([])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_anchor("N")
    axes.set_title("samples, as the model sees them", loc="left", fontsize=10, color=INK)


def draw_texts(axes: Axes, rows: list[Row]) -> None:
    """Draw lines of text below the name of each client."""
    axes.set_axis_off()
    lines = sum(len(row.content) + 1.6 for row in rows)
    axes.set_ylim(lines, 0)
    at = 0.5
    for row in rows:
        axes.text(0, at, row.label, fontsize=8, color=INK, weight="bold", va="center")
        for line in row.content:
            at += 1
            axes.text(0, at, line, fontsize=7.8, family="monospace", color=INK, va="center", parse_math=False)
        at += 1.6
    axes.set_title("samples, and the letter that follows each", loc="left", fontsize=10, color=INK)


def save(figure: Figure, out: Path) -> None:
    """Write a picture to a file."""
    try:
        figure.savefig(out, metadata={"Software": None})  # without a version: equal splits, equal bytes
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror or error}); name another file") from error

"""Heat maps: layers down, rounds across, darker where more; and who has how much of which class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from fedmpi.data import Ints

from .style import RULE, SHADES, WIDE, name_axes, panels, put_title, short

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYER, LETTERS = 0.17, 22  # inches a layer; of a layer's name


@dataclass(frozen=True)
class Map:
    """Values of layers over rounds; NaN where there is none."""

    title: str
    names: Sequence[str]
    rounds: Sequence[int]
    values: npt.NDArray[np.float64]  # [layers, rounds]


def draw(maps: Sequence[Map], label: str, width: float) -> Figure:
    """A heat map a panel, over one scale from 0 to 1, whose bar stands below."""
    layers = max(len(one.names) for one in maps)
    figure, axes = panels(len(maps), width, max(1.5, layers * LAYER + 0.6), columns=2)
    figure.set_figheight(figure.get_figheight() + 0.6)
    for one, where in zip(maps, axes, strict=True):
        first, last = (one.rounds[0], one.rounds[-1]) if one.rounds else (0, 1)
        shown = where.imshow(
            np.ma.masked_invalid(one.values),
            aspect="auto",
            interpolation="nearest",
            cmap=SHADES,
            vmin=0,
            vmax=1,
            extent=(first - 0.5, last + 0.5, len(one.names) - 0.5, -0.5),
        )
        put_title(where, one.title, width, beside=1.2)
        where.set_yticks(range(len(one.names)), [short(name, LETTERS) for name in one.names], fontsize=7.5)
        where.set_facecolor(RULE)  # where nothing was measured
        where.locator_params(axis="x", nbins=6, integer=True)
        where.tick_params(length=2)
    name_axes(axes, "round", "")
    figure.colorbar(shown, ax=axes, location="bottom", aspect=40, shrink=0.7, label=label)
    return figure


def draw_labels(counts: Ints, clients: int, labelled: bool, width: float) -> Figure:
    """Who has how much of which class: bars of the first clients, or shades where they are many."""
    from matplotlib.figure import Figure

    from fedmpi.experiments.report.figures.split import BAR, View, as_bars, draw_bars, draw_heat

    view = View("", counts, clients, labelled, [])
    height = max(2.0, 1.2 * len(counts) * BAR + 1.0) if as_bars(view) else 4.2
    figure = Figure(figsize=(min(width, 0.75 * WIDE), height), layout="constrained")
    part = figure.subfigures(1, 1, squeeze=False)[0, 0]
    (draw_bars if as_bars(view) else draw_heat)(part, view)
    if not as_bars(view):
        for bar in part.axes[-1 if not labelled else 1].patches:
            bar.set_antialiased(False)  # bars without gaps: no light between them
    return figure

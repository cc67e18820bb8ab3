"""Heat maps of layers over rounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from .style import RULE, name_axes, panels, set_title, shortened

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LAYER, LETTERS = 0.17, 22  # height of a layer, letters of its name
SHADES = "viridis_r"  # even steps of lightness: readable in grey


@dataclass(frozen=True)
class Map:
    """Values of layers over rounds; NaN where there is none."""

    title: str
    names: Sequence[str]
    rounds: Sequence[int]
    values: npt.NDArray[np.float64]  # [layers, rounds]


def draw(maps: Sequence[Map], label: str) -> Figure:
    """Draw one heat map per panel on one scale from 0 to 1, with its colour bar below."""
    layers = max(len(one.names) for one in maps)
    figure, axes = panels(len(maps), max(1.5, layers * LAYER + 0.6), columns=2)
    figure.set_figheight(figure.get_figheight() + 0.6)
    for one, where in zip(maps, axes, strict=True):
        shown = where.imshow(
            np.ma.masked_invalid(one.values),
            aspect="auto",
            interpolation="nearest",
            cmap=SHADES,
            vmin=0,
            vmax=1,
            extent=(one.rounds[0] - 0.5, one.rounds[-1] + 0.5, len(one.names) - 0.5, -0.5),
        )
        set_title(where, one.title, margin=1.2)
        where.set_yticks(range(len(one.names)), [shortened(name, LETTERS) for name in one.names], fontsize=7.5)
        where.set_facecolor(RULE)  # where nothing was measured
        where.locator_params(axis="x", nbins=6, integer=True)
        where.tick_params(length=2)
    name_axes(axes, "round", "")
    figure.colorbar(shown, ax=axes, location="bottom", aspect=40, shrink=0.7, label=label)
    return figure

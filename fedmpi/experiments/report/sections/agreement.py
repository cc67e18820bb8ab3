"""Agreement of the clients: by layer over the rounds, and the share below tau against heterogeneity."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...measures import mean_of
from ...runs import Group, counted
from ...stats import summarise
from ..figures import curves, heat, rows
from ..figures.curves import Line, Panel
from ..figures.heat import Map
from ..figures.rows import Row
from ..figures.style import Picture, Style, assign_styles, numbered_style
from ..layout import MOST_PANELS, axes_of, words
from ..page import Absent, Named, Part, Section
from ..results import agreement_table
from .material import Material, mark


def section(material: Material) -> Section:
    """Return agreement per layer as heat maps, and the share of parameters below the threshold."""
    parts: list[Part] = [Named("agreement", agreement_table(material.groups))]
    maps = [made for group in material.groups if (made := layer_map(group)) is not None]
    if maps:
        parts.append(layers_picture(maps[:MOST_PANELS]))
    if len(maps) > MOST_PANELS:
        parts.append(Absent(f"The first {MOST_PANELS} of {len(maps)} groups; a report of fewer runs shows the others."))
    measured = [group for group in material.groups if any(value is not None for value in below_tau(group))]
    skewed = [group for group in measured if group.config["split"] == "dirichlet"]
    alphas = sorted({float(group.config["skew.alpha"]) for group in skewed})
    if len(alphas) > 1:
        parts.append(alpha_picture(skewed, alphas))
    if measured and (len(alphas) < 2 or len(skewed) < len(measured)):
        parts.append(share_picture(measured))
    if not maps or not measured:
        parts.append(Absent("Not measured by layer and against tau; train with --evaluate agreement."))
    return Section("agreement", "Agreement of the clients", parts)


def layer_map(group: Group) -> Map | None:
    """Return the agreement per layer and round, mean over seeds; None if it was not measured."""
    runs = counted(group)
    names = list(dict.fromkeys(n for run in runs for r in run.records for n in r.get("layers") or {}))
    series = {name: [run.series("layers", name, "agreement") for run in runs] for name in names}
    measured = sorted({t for found in series.values() for curve in found for t in curve})
    if not measured:
        return None
    rounds = range(measured[0], measured[-1] + 1)
    values = np.full((len(names), len(rounds)), np.nan)
    for row, name in enumerate(names):
        for column, t in enumerate(rounds):
            summary = summarise(curve.get(t) for curve in series[name])
            values[row, column] = np.nan if summary is None else summary.mean
    return Map(group.label, names, rounds, values)


def layers_picture(maps: Sequence[Map]) -> Picture:
    means = "; ".join(f"{one.title} {np.nanmean(one.values):.2f}" for one in maps)
    return Picture(
        "layers",
        f"Heat maps of agreement by layer, from input (top) to output, over rounds. Means: {means}.",
        "Agreement |mean of the clients' signs|, mean over the parameters of a layer and over seeds; layers from input "
        "(top) to output. Darker is more.",
        lambda: heat.draw(maps, "agreement"),
    )


def below_tau(group: Group) -> list[float | None]:
    """Return the share below tau per seed, mean over rounds."""
    return [mean_of(run, "below_tau") for run in counted(group)]


def alpha_picture(groups: Sequence[Group], alphas: Sequence[float]) -> Picture:
    """Return the share below tau against alpha, one line per combination of the other axes."""
    alpha_axes = axes_of(groups, "skew.alpha")
    members: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        kind = words(group, lambda axis: axis not in (*alpha_axes, "mask")) or str(group.config["algorithm"])
        members.setdefault((kind, group.first.mask), []).append(group)
    styles = assign_styles(list(members))
    lines = [alpha_line(f"{kind} + {mask}", styles[kind, mask], inside) for (kind, mask), inside in members.items()]
    ends = "; ".join(f"{one.label}: {one.y[0]:.0f}% to {one.y[-1]:.0f}%" for one in lines)
    return Picture(
        "share-alpha",
        f"Line chart of the share of parameters below tau against the concentration alpha of the labels. {ends}.",
        "Share of parameters whose agreement is below tau against the concentration of the labels (small alpha: "
        "heterogeneous clients); mean over rounds and seeds with a band of ± 1 sd over seeds.",
        lambda: curves.draw([Panel("", lines)], "alpha", "below tau, %", ticks=alphas),
    )


def alpha_line(label: str, style: Style, groups: Sequence[Group]) -> Line:
    found = [(float(group.config["skew.alpha"]), summarise(below_tau(group))) for group in groups]
    points = sorted(((alpha, summary) for alpha, summary in found if summary), key=lambda point: point[0])
    low, high = ([100 * (one.mean + sign * (one.sd or 0.0)) for _, one in points] for sign in (-1, 1))
    return Line(label, style, [alpha for alpha, _ in points], [100 * one.mean for _, one in points], low, high)


def share_picture(groups: Sequence[Group]) -> Picture:
    label = "mean over rounds and seeds"
    drawn = [Row(group.label, [mark(label, numbered_style(1), below_tau(group), 100.0)]) for group in groups]
    return Picture(
        "share",
        "Dot plot of the share of parameters below tau, by group; the table has the numbers.",
        "Share of parameters whose agreement is below tau: mean over rounds and seeds, with a tick per seed.",
        lambda: rows.draw(drawn, "below tau, %"),
    )

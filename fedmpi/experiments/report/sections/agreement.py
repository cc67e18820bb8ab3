"""How far the clients agreed: layer by layer over the rounds, and against how different their data are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...measures import mean_of
from ...runs import Group, counted
from ...stats import summarise
from ..arrange import MOST_PANELS, Placed, telling, words
from ..figures import curves, heat, rows
from ..figures.curves import Line, Panel
from ..figures.heat import Map
from ..figures.rows import Row
from ..figures.style import Look, Picture, looks
from ..page import Absent, Named, Part, Section
from ..results import agreement_table
from .comparing import MASKED
from .material import Material, mark

ASK = "train with --evaluate agreement"


def layers(material: Material) -> Section:
    """Agreement of every layer over the rounds, as heat maps."""
    parts: list[Part] = [Named("agreement", agreement_table(material.groups))]
    maps = [made for group in material.groups if (made := layer_map(group)) is not None]
    if maps:
        parts.append(heat_picture(maps[:MOST_PANELS]))
    if len(maps) > MOST_PANELS:
        parts.append(Absent(f"The first {MOST_PANELS} of {len(maps)} groups; a report of fewer runs shows the others."))
    if not maps:
        parts.append(Absent(f"No run measured agreement by layer; {ASK}."))
    return Section("agreement", "Agreement of the clients, by layer", parts)


def layer_map(group: Group) -> Map | None:
    """The mean over the seeds of each layer's agreement in each round; None where it was not measured."""
    runs = counted(group)
    names = list(dict.fromkeys(n for run in runs for r in run.records for n in r.get("layers") or {}))
    curves_of = {name: [run.series("layers", name, "agreement") for run in runs] for name in names}
    seen = sorted({number for found in curves_of.values() for curve in found for number in curve})
    if not seen:
        return None
    rounds = range(seen[0], seen[-1] + 1)
    values = np.full((len(names), len(rounds)), np.nan)
    for row, name in enumerate(names):
        for column, number in enumerate(rounds):
            told = summarise(curve.get(number) for curve in curves_of[name])
            values[row, column] = np.nan if told is None else told.mean
    return Map(group.label, names, rounds, values)


def heat_picture(maps: Sequence[Map]) -> Picture:
    """A panel for each group."""
    means = "; ".join(f"{one.title} {np.nanmean(one.values):.2f}" for one in maps)
    return Picture(
        "layers",
        f"Heat maps of agreement by layer, from the input down to the output, over rounds. Means: {means}.",
        "Mean agreement |mean of the clients' signs| of the parameters of each layer, mean over seeds; the layers from "
        "the input down to the output. Darker is more.",
        lambda width: heat.draw(maps, "agreement", width),
    )


def share(material: Material) -> Section:
    """The share of parameters below the threshold against how heterogeneous the clients are."""
    measured = [one for one in material.placed if any(share is not None for share in below(one.group))]
    skewed = [one for one in measured if one.group.config["split"] == "dirichlet"]
    alphas = sorted({float(one.group.config["skew.alpha"]) for one in skewed})
    parts: list[Part] = []
    if len(alphas) > 1:
        parts.append(alpha_picture(skewed, alphas))
    if measured and (len(alphas) < 2 or len(skewed) < len(measured)):
        parts.append(share_picture([one.group for one in measured]))
    if not measured:
        parts.append(Absent(f"No run measured the share of parameters below tau; {ASK}."))
    elif len(alphas) < 2:
        parts.append(Absent("The runs have no two values of --skew.alpha, so the share is shown by group."))
    return Section("share", "Share below tau and heterogeneity", parts)


def below(group: Group) -> list[float | None]:
    """The mean share below tau over the rounds, of each seed."""
    return [mean_of(run, "below_tau") for run in counted(group)]


def alpha_picture(skewed: Sequence[Placed], alphas: Sequence[float]) -> Picture:
    """The share against alpha, a line for what differs beside it."""
    groups = [one.group for one in skewed]
    alpha_axes = telling(groups, "skew.alpha")
    members: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        kind = words(group, lambda axis: axis not in (*alpha_axes, "mask")) or str(group.config["algorithm"])
        members.setdefault((kind, group.first.mask), []).append(group)
    looking = looks(list(members))
    lines = [alpha_line(f"{kind} + {mask}", looking[kind, mask], inside) for (kind, mask), inside in members.items()]
    ends = "; ".join(
        f"{one.label}: {one.y[0]:.0f}% at {one.x[0]:g} to {one.y[-1]:.0f}% at {one.x[-1]:g}" for one in lines
    )
    return Picture(
        "share-alpha",
        f"Line chart of the share of parameters below tau against the concentration alpha of the labels. {ends}.",
        "Share of parameters whose agreement is below tau, mean over rounds and seeds, against the concentration of "
        "the labels (small alpha: clients differ much); the band is one standard deviation to either side.",
        lambda width: curves.draw([Panel("", lines)], "alpha", "below tau, %", width, ticks=alphas),
    )


def alpha_line(label: str, look: Look, groups: Sequence[Group]) -> Line:
    """The share of groups against their alpha, with a band where there are several seeds."""
    found = [(float(group.config["skew.alpha"]), summarise(below(group))) for group in groups]
    points = sorted(((alpha, told) for alpha, told in found if told is not None), key=lambda point: point[0])
    low, high = ([100 * (told.mean + sign * (told.sd or 0.0)) for _, told in points] for sign in (-1, 1))
    return Line(label, look, [alpha for alpha, _ in points], [100 * told.mean for _, told in points], low, high)


def share_picture(groups: Sequence[Group]) -> Picture:
    """The share of each group as a dot."""
    drawn = [Row(group.label, [mark("mean over rounds and seeds", MASKED, below(group), 100.0)]) for group in groups]
    return Picture(
        "share",
        "Dot plot of the share of parameters below tau, by group; the table above has the numbers.",
        "Share of parameters whose agreement is below tau, over all rounds: mean of the seeds and a stroke for each.",
        lambda width: rows.draw(drawn, "below tau, %", width),
    )

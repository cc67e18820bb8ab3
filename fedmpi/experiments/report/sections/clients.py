"""The clients: how far they agree, by layer and below tau, and the labels that they have (partition.json)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from ....data import Ints
from ....runs.schema import Dealt, read
from ...measures import mean_of
from ...runs import MOST_PARTITION, PARTITION, Group, Run, counted, word
from ...stats import summarise
from ...tables import Table
from ..figures import curves, heat, split
from ..figures.curves import Line
from ..figures.heat import Map
from ..figures.rows import Row
from ..figures.style import Picture, assign_styles, numbered_style
from ..layout import MOST_PANELS, axes_of, words
from ..page import Absent, Named, Part
from .material import Material, dots, mark
from .results import means_table

MOST_SPLITS, MOST_CLIENTS = 4, 100  # shown
SKEW = {"dirichlet": "skew.alpha", "quantity": "skew.beta", "classes": "skew.classes", "mixed": "skew.classes"}


def agreement(material: Material) -> list[Part]:
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
        label, style = "mean over rounds and seeds", numbered_style(1)
        drawn = [Row(group.label, [mark(label, style, below_tau(group), 100.0)]) for group in measured]
        caption = "Share of parameters whose agreement is below tau: mean over rounds and seeds, with a tick per seed."
        parts.append(dots("share", "the share of parameters below tau, by group", caption, drawn, "below tau, %"))
    if not maps or not measured:
        parts.append(Absent("Not measured by layer and against tau; train with --evaluate agreement."))
    return parts


def agreement_table(groups: Sequence[Group]) -> Table:
    """Return the agreement of the clients and what the masks kept, over all rounds."""

    def read(run: Run) -> list[float | None]:
        return [mean_of(run, key) for key in ("agreement", "below_tau", "kept")]

    digits = {"agreement": 3, "below tau": 3, "kept": 3}
    notes = ["Means over all rounds. Below tau: the share of parameters whose agreement is below the threshold."]
    return means_table("Agreement of the clients", groups, digits, read, notes)


def layer_map(group: Group) -> Map | None:
    """Return the agreement per layer and round, mean over seeds; None if it was not measured."""
    runs = counted(group)
    names = list(dict.fromkeys(n for run in runs for r in run.records for n in r.get("layers") or {}))
    series = {name: [run.series("layers", name, "agreement") for run in runs] for name in names}
    measured = sorted({t for found in series.values() for curve in found for t in curve})
    if not measured:
        return None
    rounds = range(measured[0], measured[-1] + 1)
    summaries = [[summarise(curve.get(t) for curve in series[name]) for t in rounds] for name in names]
    values = [[np.nan if one is None else one.mean for one in row] for row in summaries]
    return Map(group.label, names, rounds, np.array(values))


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
    lines = []
    for (kind, mask), inside in members.items():
        found = [(float(group.config["skew.alpha"]), summarise(below_tau(group))) for group in inside]
        points = sorted(((alpha, one.mean, one.sd or 0.0) for alpha, one in found if one), key=lambda point: point[0])
        x, y, low, high = zip(*((a, 100 * y, 100 * (y - sd), 100 * (y + sd)) for a, y, sd in points), strict=True)
        lines.append(Line(f"{kind} + {mask}", styles[kind, mask], x, y, low, high))
    ends = "; ".join(f"{one.label}: {one.y[0]:.0f}% to {one.y[-1]:.0f}%" for one in lines)
    return Picture(
        "share-alpha",
        f"Line chart of the share of parameters below tau against the concentration alpha of the labels. {ends}.",
        "Share of parameters whose agreement is below tau against the concentration of the labels (small alpha: "
        "heterogeneous clients); mean over rounds and seeds with a band of ± 1 sd over seeds.",
        lambda: curves.draw({"": lines}, "alpha", "below tau, %", ticks=alphas),
    )


# Labels


def labels(material: Material) -> list[Part]:
    """Return one figure per split, of its first seed."""
    splits: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in material.runs:
        found = dict(read(run.folder / PARTITION, Dealt, MOST_PARTITION) or {})
        kind = {key: found.get(key) for key in ("data", "split", "skew", "clients")}
        if found:
            splits.setdefault(json.dumps(kind, sort_keys=True, default=str), (run, found))
    parts: list[Part] = []
    for number, (run, found) in enumerate(list(splits.values())[:MOST_SPLITS], 1):
        parts.append(split_part(run, found, f"labels-{number}" if len(splits) > 1 else "labels"))
    if len(splits) > MOST_SPLITS:
        parts.append(Absent(f"The first {MOST_SPLITS} of {len(splits)} splits; 'fedmpi data show' draws any of them."))
    return parts


def split_part(run: Run, found: dict[str, Any], name: str) -> Part:
    """Return the figure of a split, or for very many clients the summary that partition.json has."""
    config, counts = run.config, histogram(found)
    knob = SKEW.get(config["split"], "")
    detail = f" ({knob} {word(config[knob])})" if config.get(knob) is not None else ""
    about = f"{config['data']}, split {config['split']}{detail}"
    if counts is not None:
        first = f"the first {MOST_CLIENTS} of " if len(counts) > MOST_CLIENTS else ""
        labelled = counts.shape[1] > 1
        what = f"{'samples per class' if labelled else 'samples'} of {first}{found.get('clients')} clients"
        sizes, kinds = counts.sum(axis=1), (counts > 0).sum(axis=1)
        classes = f" and {kinds.mean():.1f} of {counts.shape[1]} classes on average" if labelled else ""
        spread = f"A client has {sizes.min():,} to {sizes.max():,} samples{classes}."
        caption = f"{about}, seed {run.seed}: {what}. {spread}"
        return Picture(name, caption, caption, lambda: split.draw_labels(counts[:MOST_CLIENTS], len(counts), labelled))
    try:
        low, high = found["sizes"]["min"], found["sizes"]["max"]
        quartiles = ", ".join(f"{float(value):,.0f}" for value in found["sizes"]["quartiles"])
        return (
            f"{about}: {found['clients']:,} clients with {low:,} to {high:,} samples each (quartiles {quartiles}) and "
            f"{float(found['classes_per_client']):.1f} classes on average; too many clients to store their labels."
        )
    except (KeyError, TypeError, ValueError):
        return Absent(f"{about}: partition.json has no samples per client.")


def histogram(found: dict[str, Any]) -> Ints | None:
    """Return samples [clients, classes]; None if partition.json has no such table."""
    try:
        counts = np.asarray(found["histogram"], dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return counts if counts.ndim == 2 and counts.size and counts.sum() > 0 and counts.min() >= 0 else None

"""Who has how much of which class, from the partition.json of the runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ....data import Ints
from ....runs.schema import Dealt, read
from ...runs import MOST_PARTITION, PARTITION, Run, word
from ..figures import heat
from ..figures.style import Picture
from ..page import Absent, Part, Section
from .material import Material

MOST, SHOWN = 4, 100  # splits in a report, clients of one


def section(material: Material) -> Section:
    """A picture for each way in which data were dealt out, of its first seed."""
    splits: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in material.runs:
        told = dict(read(run.folder / PARTITION, Dealt, MOST_PARTITION) or {})
        kind = {key: told.get(key) for key in ("data", "split", "skew", "clients")}
        if told:
            splits.setdefault(json.dumps(kind, sort_keys=True, default=str), (run, told))
    parts: list[Part] = []
    for number, (run, told) in enumerate(list(splits.values())[:MOST], 1):
        parts += split_parts(run, told, f"labels-{number}" if len(splits) > 1 else "labels")
    if len(splits) > MOST:
        more = len(splits) - MOST
        parts.append(Absent(f"{more} more split{'s' * (more > 1)} not shown; 'fedmpi data show' draws any of them."))
    if not splits:
        parts.append(Absent("No run has a partition.json, so it is not known who had what."))
    return Section("labels", "Labels of the clients", parts)


def split_parts(run: Run, told: dict[str, Any], name: str) -> list[Part]:
    """The picture of a split, or what is known of it in a sentence."""
    config, clients = run.config, told.get("clients")
    skew = {"dirichlet": "skew.alpha", "quantity": "skew.beta", "classes": "skew.classes", "mixed": "skew.classes"}
    knob = skew.get(config["split"])
    value = config.get(knob) if knob else None
    detail = f" ({knob} {word(value)})" if value is not None else ""
    about = f"{config['data']}, split {config['split']}{detail}"
    counts = histogram(told)
    if counts is None:
        return [summary(about, told)]
    first = f"the first {SHOWN} of " if len(counts) > SHOWN else ""
    labelled = counts.shape[1] > 1
    what = "samples of each class" if labelled else "samples"
    return [
        Picture(
            name,
            f"The {what} that {first}{clients} clients have: {about}. {spread(counts)}",
            f"{about}, seed {run.seed}: {what} of {first}{clients} clients. {spread(counts)}",
            lambda width: heat.draw_labels(counts[:SHOWN], len(counts), labelled, width),
            adapts=False,
        )
    ]


def histogram(told: dict[str, Any]) -> Ints | None:
    """[clients, classes]: samples; None where it is not told, or is no such table."""
    try:
        counts = np.asarray(told["histogram"], dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return counts if counts.ndim == 2 and counts.size and counts.sum() > 0 and counts.min() >= 0 else None


def spread(counts: Ints) -> str:
    """How different clients are, in a sentence."""
    sizes, kinds = counts.sum(axis=1), (counts > 0).sum(axis=1)
    text = f"A client has {sizes.min():,} to {sizes.max():,} samples"
    return text + (f" and {kinds.mean():.1f} of {counts.shape[1]} classes on average." if counts.shape[1] > 1 else ".")


def summary(about: str, told: dict[str, Any]) -> Part:
    """What a partition of very many clients tells in few numbers."""
    try:
        low, high = told["sizes"]["min"], told["sizes"]["max"]
        quarters = [float(value) for value in told["sizes"]["quartiles"]]
        kinds = float(told["classes_per_client"])
        return (
            f"{about}: {told['clients']:,} clients with {low:,} to {high:,} samples each (quartiles "
            f"{', '.join(f'{value:,.0f}' for value in quarters)}) and {kinds:.1f} classes on average; with so many of "
            "them no run keeps each client's labels."
        )
    except (KeyError, TypeError, ValueError):
        return Absent(f"{about}: partition.json does not tell who had what.")

"""Samples per client and class, from the partition.json of the runs."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from ....data import Ints
from ....runs.schema import Dealt, read
from ...runs import MOST_PARTITION, PARTITION, Run, word
from ..figures import split
from ..figures.style import Picture
from ..page import Absent, Part, Section
from .material import Material

MOST_SPLITS, MOST_CLIENTS = 4, 100  # shown
SKEW = {"dirichlet": "skew.alpha", "quantity": "skew.beta", "classes": "skew.classes", "mixed": "skew.classes"}


def section(material: Material) -> Section:
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
    return Section("labels", "Labels of the clients", parts or [Absent("No run has a partition.json.")])


def split_part(run: Run, found: dict[str, Any], name: str) -> Part:
    """Return the figure of a split, or a summary for very many clients."""
    config, counts = run.config, histogram(found)
    knob = SKEW.get(config["split"], "")
    detail = f" ({knob} {word(config[knob])})" if config.get(knob) is not None else ""
    about = f"{config['data']}, split {config['split']}{detail}"
    if counts is None:
        return summary(about, found)
    first = f"the first {MOST_CLIENTS} of " if len(counts) > MOST_CLIENTS else ""
    labelled = counts.shape[1] > 1
    what = f"{'samples per class' if labelled else 'samples'} of {first}{found.get('clients')} clients"
    caption = f"{about}, seed {run.seed}: {what}. {spread(counts)}"
    return Picture(name, caption, caption, lambda: split.draw_labels(counts[:MOST_CLIENTS], len(counts), labelled))


def histogram(found: dict[str, Any]) -> Ints | None:
    """Return samples [clients, classes]; None if partition.json has no such table."""
    try:
        counts = np.asarray(found["histogram"], dtype=np.int64)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    return counts if counts.ndim == 2 and counts.size and counts.sum() > 0 and counts.min() >= 0 else None


def spread(counts: Ints) -> str:
    """Return how much clients differ, in a sentence."""
    sizes, kinds = counts.sum(axis=1), (counts > 0).sum(axis=1)
    text = f"A client has {sizes.min():,} to {sizes.max():,} samples"
    return text + (f" and {kinds.mean():.1f} of {counts.shape[1]} classes on average." if counts.shape[1] > 1 else ".")


def summary(about: str, found: dict[str, Any]) -> Part:
    """Return the summary that partition.json has of very many clients."""
    try:
        low, high = found["sizes"]["min"], found["sizes"]["max"]
        quartiles = ", ".join(f"{float(value):,.0f}" for value in found["sizes"]["quartiles"])
        return (
            f"{about}: {found['clients']:,} clients with {low:,} to {high:,} samples each (quartiles {quartiles}) and "
            f"{float(found['classes_per_client']):.1f} classes on average; too many clients to store their labels."
        )
    except (KeyError, TypeError, ValueError):
        return Absent(f"{about}: partition.json has no samples per client.")

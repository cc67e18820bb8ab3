"""A sweep as data: a base, axes of labels, and seeds; and its points, each of which is one run.

A point is one label of every axis, and a seed. Its settings are those of the base, then of its labels in the order of
the axes, then of every `where` that applies to it; later ones win. The file format is in sweepfile.py.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import yaml

from ...errors import UserError
from ...plugins.knobs import knobs
from ...runs import extend
from ...runs.config import Config

Knobs = dict[str, Any]
"""values by the dotted names of their knobs"""

KNOWN = knobs(Config())
GROUPS = {name for name, value in KNOWN.items() if is_dataclass(value)} | set(extend.GROUPS)
MOST_RUNS = 100_000
NAME = 200  # characters of a run folder's name; file systems allow 255


@dataclass(frozen=True)
class Where:
    """Settings for the points with these labels."""

    labels: dict[str, frozenset[str]]
    knobs: Knobs


@dataclass(frozen=True)
class Choose:
    """How to choose the best labels of some axes, for each combination of the others."""

    over: tuple[str, ...]
    """the axes to choose from"""
    by: str = "train_loss"
    """train_loss: the smallest mean training loss of the last rounds; test: the best test metric"""
    last: int = 20
    """rounds that count, for train_loss"""
    share: tuple[str, ...] = ()
    """axes whose labels share one choice, as AVG and GMA do in the papers: [mask]"""


@dataclass(frozen=True)
class Stop:
    """When to give up a run: the measure of `choose` is behind that of most others of its cell."""

    after: int = 20
    """rounds before the first comparison"""
    every: int = 10
    """rounds between two comparisons"""
    quantile: float = 0.5
    """the share of the others that it must be level with; 0.5: the median"""


@dataclass(frozen=True)
class Sweep:
    """The content of a sweep file."""

    name: str
    about: str = ""
    base: Knobs = field(default_factory=dict)
    fixed: Knobs = field(default_factory=dict)
    """rules from the base's `config` file, which sets them for its own algorithm, and that algorithm"""
    axes: dict[str, dict[str, Knobs]] = field(default_factory=dict)
    """variants and grid alike: axis -> label -> knobs"""
    where: tuple[Where, ...] = ()
    seeds: tuple[int, ...] = (0,)
    choose: Choose | None = None
    stop: Stop | None = None
    reach: tuple[float, ...] = ()
    published: tuple[dict[str, Any], ...] = ()
    """tables of a paper, each of one measure"""


@dataclass(frozen=True)
class Point:
    """One run of a sweep."""

    name: str
    """of its folder"""
    labels: dict[str, str]
    seed: int
    knobs: Knobs
    """with the seed"""


def points(sweep: Sweep) -> list[Point]:
    """Return the runs of a sweep: all of the first seed, then all of the next."""
    count = len(sweep.seeds) * math.prod(map(len, sweep.axes.values()))
    if count > MOST_RUNS:
        raise UserError(f"sweep '{sweep.name}' has {count:,} runs; it may have at most {MOST_RUNS:,}")
    found: dict[str, Point] = {}
    every = list(itertools.product(*(list(labels) for labels in sweep.axes.values())))
    for seed, chosen in itertools.product(sweep.seeds, every):
        labels = dict(zip(sweep.axes, chosen, strict=True))
        own: Knobs = {}
        for axis, label in labels.items():
            own |= sweep.axes[axis][label]
        for one in sweep.where:
            if all(labels[axis] in wanted for axis, wanted in one.labels.items()):
                own |= one.knobs
        name = folder_name(sweep, labels, seed)
        if name in found:
            raise UserError(f"two runs of sweep '{sweep.name}' would have the folder '{name}'; change their labels")
        refuse_renaming(name, sweep, own)
        found[name] = Point(name, labels, seed, sweep.base | own | {"seed": seed})
    return list(found.values())


def refuse_renaming(name: str, sweep: Sweep, own: Knobs) -> None:
    """Refuse a run that would be named after one algorithm but have the rules of another."""
    theirs, wanted = sweep.fixed.get("algorithm"), (sweep.base | own).get("algorithm")
    rules = [f"{rule} {value}" for rule, value in sweep.fixed.items() if rule != "algorithm" and rule not in own]
    if rules and wanted != theirs:
        raise UserError(
            f"run '{name}' has algorithm {wanted}, but base.config fixes {' and '.join(rules)} for its own algorithm "
            f"{theirs}; use a file without these rules"
        )


def folder_name(sweep: Sweep, labels: Mapping[str, str], seed: int) -> str:
    """Return the folder name of a run: its labels and its seed, numbers with the name of their knob."""
    shorts = [axis.rpartition(".")[2] for axis in sweep.axes]
    words = []
    for axis, label in labels.items():
        short = axis.rpartition(".")[2]
        number = not isinstance(sweep.axes[axis][label].get(axis, ""), str)
        words.append(((short if shorts.count(short) == 1 else axis) if number else "") + label)
    name = "_".join([*(re.sub(r"[^\w.+-]+", "-", word) for word in words), f"s{seed}"])
    if len(name) > NAME:
        raise UserError(f"a folder of sweep '{sweep.name}' would have a name of {len(name)} characters; shorten labels")
    return name


def label_of(value: Any) -> str:
    """Return a value as a label."""
    return yaml.safe_dump(value).split("\n")[0] if value is None or isinstance(value, bool) else str(value)

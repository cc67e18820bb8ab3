"""The configuration of a sweep's file itself, without --set and --seeds: what published numbers belong to.

sweep.json has it under `recipe`, as the resolved settings of each combination of labels: those `common` to all, and its
`own`. A sweep.json of an older version lacks it; for a bundled recipe it is then read from the recipe itself.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ...errors import UserError
from ...plugins.knobs import knobs
from ...runs.config import Config
from ...runs.options import from_values, is_sweep, read_yaml, recipes
from ..runs import IDLE
from .grid import Knobs, Point, Sweep, points
from .sweepfile import read_sweep

LATER = ("model",)  # filled in by a run once it has its data


@dataclass(frozen=True)
class Reference:
    """The settings that a sweep's file gives its runs, and its seeds."""

    seeds: tuple[int, ...]
    runs: dict[str, Knobs]
    """by the labels, see `key_of`"""

    def of(self, labels: Mapping[str, str]) -> Knobs | None:
        """Return the knobs of the run with these labels; None if they are unknown."""
        return self.runs.get(key_of(labels))


def key_of(labels: Mapping[str, str]) -> str:
    return json.dumps(dict(labels), sort_keys=True)


def comparable(cfg: Config) -> Knobs:
    """Return the knobs of a resolved configuration that change what is learnt or measured."""
    found = {name: value for name, value in knobs(cfg).items() if not dataclasses.is_dataclass(value)}
    known = {name: value for name, value in found.items() if not name.startswith(IDLE) and name != "seed"}
    return {name: value for name, value in known.items() if value is not None or name not in LATER}


def make_reference(recipe: Sweep, chosen: Iterable[Point], known: Mapping[str, Config] | None = None) -> Reference:
    """Return the resolved configurations that the file gives the labels of these points. `known` are configurations
    that are resolved already, by the name of the point. Labels whose runs are only valid with --set have no
    reference."""
    from ...runs.build import prepare

    of_file = {key_of(point.labels): point for point in reversed(points(recipe))}  # with the first seed
    runs: dict[str, Knobs] = {}
    for point in chosen:
        key = key_of(point.labels)
        if key in runs or key not in of_file:
            continue
        try:
            cfg = known[point.name] if known is not None else prepare(from_values(of_file[key].knobs)).cfg
        except UserError:  # the file is only valid with --set: nothing to compare with
            continue
        runs[key] = comparable(cfg)
    return Reference(recipe.seeds, runs)


def write_reference(now: Reference, before: Reference | None) -> dict[str, Any]:
    """Return the reference as sweep.json has it; runs of earlier commands stay in it."""
    runs = (before.runs if before is not None else {}) | now.runs
    every = list(runs.values())
    first = every[0] if every else {}
    common = {name: value for name, value in first.items() if all(name in one and one[name] == value for one in every)}
    own = [
        {"labels": json.loads(key), "knobs": {name: value for name, value in one.items() if name not in common}}
        for key, one in runs.items()
    ]
    return {"seeds": list(now.seeds), "common": common, "own": own}


def read_reference(record: Any) -> Reference | None:
    """Return the reference in a sweep.json; None if there is none."""
    try:
        common = dict(record["common"])
        runs = {key_of(one["labels"]): common | dict(one["knobs"]) for one in record["own"]}
        return Reference(tuple(int(seed) for seed in record["seeds"]), runs)
    except (KeyError, TypeError, ValueError):
        return None


def bundled_reference(sweep: Mapping[str, Any]) -> Reference | None:
    """Return the reference of the bundled recipe with the name and the axes of a sweep; None if there is none. For a
    sweep.json of a version that recorded no reference."""
    path = recipes().get(str(sweep.get("name")))
    if path is None or not is_sweep(read_yaml(path, str(path))):
        return None
    recipe = read_sweep(str(path))
    if {axis: list(labels) for axis, labels in recipe.axes.items()} != sweep.get("axes"):
        return None
    wanted = {key_of({k: v for k, v in labels.items() if k != "seed"}) for labels in sweep["runs"].values()}
    return make_reference(recipe, [point for point in points(recipe) if key_of(point.labels) in wanted])

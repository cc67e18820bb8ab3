"""The configuration in a run folder as plain values, whatever version wrote it: one flat dict, dotted knob -> value,
with the behaviour of that version for knobs that it did not have yet.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..knobs import VARIANTS
from ..plugins.knobs import knobs
from ..runs.config import Config, renamed
from ..runs.folder import CONFIG
from ..runs.schema import Goal

DEFAULTS = {name: value for name, value in knobs(Config()).items() if not dataclasses.is_dataclass(value)}
BEFORE: dict[str, Any] = {"local.clip": 0.0, "local.clip_update": 0.0}
BEFORE |= {"meta.size": 0, "meta.lr": 0.0, "meta.share": False}
"""the behaviour of versions without these knobs; null, today's default, means 'the algorithm's own'"""
NEEDED: dict[str, type | tuple[type, ...]] = {
    "algorithm": str,
    "mask": str,
    "tau": (int, float),
    "data": str,
    "rounds": int,
    "seed": int,
}
"""knobs that every version wrote"""
READ: dict[str, type | tuple[type, ...]] = {"split": str, "skew.alpha": (int, float), "server.variant": str}
"""further knobs whose type matters here, if they are present"""


def flat(tree: Any) -> dict[str, Any]:
    """Return a configuration by dotted knobs, with those that its version did not have; raise a ValueError if it is
    none."""
    if not isinstance(tree, dict):
        raise ValueError(f"{CONFIG} has no knobs")
    found: dict[str, Any] = {}
    for name, value in renamed(tree).items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    given = {name: DEFAULTS[name] for name in READ} | found
    for name, kind in (NEEDED | READ).items():
        if not isinstance(given.get(name), kind):
            raise ValueError(f"{CONFIG} has no valid '{name}'")
    for name, value in found.items():  # anything else is damage, and may be too large for memory
        if not all(one is None or isinstance(one, str | int | float) for one in each(value)):
            raise ValueError(f"'{name}' in {CONFIG} is not a knob's value")
    whole = {str(name): value for name, value in (DEFAULTS | BEFORE | found).items()}
    variant = VARIANTS.get(whole["server.variant"])  # what null stood for in the first versions
    filled = {"server.b2": variant.b2, "server.eps": variant.eps} if variant else {}
    return whole | {name: value for name, value in filled.items() if whole[name] is None}


def each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_goal(objective: Goal | None, records: list[dict[str, Any]]) -> tuple[str, bool]:
    """Return the metric of a run and whether more is better, from its rounds and the objective in its partition.json.
    The first versions wrote none: they only had accuracy."""
    goal = objective or {}
    names = (key.removeprefix("test_") for record in records for key in record if key.startswith("test_"))
    metric = next((name for name in names if name != "loss"), None) or str(goal.get("metric", "accuracy"))
    return metric, bool(goal.get("rises", metric == "accuracy"))

"""The configuration in a run folder as plain values, whatever version wrote it: one flat dict, dotted knob -> value, in
which what its version did not know yet stands as that version did it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from ..plugins.builtin import VARIANTS
from ..plugins.knobs import knobs
from ..runs.config import Config, renamed
from ..runs.folder import CONFIG
from ..runs.schema import Goal

DEFAULTS = {name: value for name, value in knobs(Config()).items() if not dataclasses.is_dataclass(value)}
BEFORE: dict[str, Any] = {"local.clip": 0.0, "local.clip_update": 0.0}
BEFORE |= {"meta.size": 0, "meta.lr": 0.0, "meta.share": False}
"""what versions did that had not these knobs yet, where null, today's default, says 'the algorithm's own'"""
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
"""further knobs that are reckoned with, where they are written"""


def flat(tree: Any) -> dict[str, Any]:
    """A configuration as dotted knobs, with what its version did not have yet; a ValueError for what is none."""
    if not isinstance(tree, dict):
        raise ValueError(f"{CONFIG} holds no knobs")
    found: dict[str, Any] = {}
    for name, value in renamed(tree).items():
        found |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    told = {name: DEFAULTS[name] for name in READ} | found
    for name, kind in (NEEDED | READ).items():
        if not isinstance(told.get(name), kind):
            raise ValueError(f"{CONFIG} has no '{name}', or not as a run writes it")
    for name, value in found.items():  # more is no knob, and may be more than a memory holds
        if not all(one is None or isinstance(one, str | int | float) for one in each(value)):
            raise ValueError(f"'{name}' in {CONFIG} is no value of a knob")
    whole = {str(name): value for name, value in (DEFAULTS | BEFORE | found).items()}
    variant = VARIANTS.get(whole["server.variant"])  # what null stood for in the first versions
    filled = {"server.b2": variant.b2, "server.eps": variant.eps} if variant else {}
    return whole | {name: value for name, value in filled.items() if whole[name] is None}


def each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_goal(objective: Goal | None, records: list[dict[str, Any]]) -> tuple[str, bool]:
    """The metric of a run and whether it rises, from its rounds and the objective in its partition.json. The first
    versions wrote none: they knew accuracy alone."""
    said = objective or {}
    names = (key.removeprefix("test_") for record in records for key in record if key.startswith("test_"))
    metric = next((name for name in names if name != "loss"), None) or str(said.get("metric", "accuracy"))
    return metric, bool(said.get("rises", metric == "accuracy"))

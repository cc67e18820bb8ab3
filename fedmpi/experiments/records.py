"""The files of a run folder as plain values, whatever version wrote them.

A configuration is one flat dict, dotted knob -> value, in which what its version did not know yet stands as that
version did it. Rounds are the sound lines of metrics.jsonl, and numbers that are not finite are None.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import yaml

from ..config import Config, knobs, renamed
from ..folder import CONFIG

LOADER: type[yaml.SafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DEEPEST = 3  # a knob's list in a group

DEFAULTS = {name: value for name, value in knobs(Config()).items() if not dataclasses.is_dataclass(value)}
BEFORE: dict[str, Any] = {"local.clip": 0.0, "local.clip_update": 0.0}
BEFORE |= {"meta.size": 0, "meta.lr": 0.0, "meta.share": False}
"""what versions did that had not these knobs yet, where null, today's default, says 'the algorithm's own'"""
VARIANTS = {"reddi": {"server.b2": 0.99, "server.eps": 1e-3}, "torch": {"server.b2": 0.999, "server.eps": 1e-8}}
"""what null stood for in the first versions, by server.variant; torch need not be imported to know it"""
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

NUMBERS: tuple[str, ...] = ("clients", "train_loss", "kept", "agreement", "bytes_sent", "dropped", "below_tau")
NUMBERS += ("client_bytes_up", "client_bytes_down")
PARTS = ("seconds", "layers")  # records in a record
SIDES = "clients_"  # and before the metric's name, those of --evaluate clients


def tree_of(text: str) -> Any:
    """What a configuration's YAML says. By libyaml where it is here, as a report may read a thousand; it would overrun
    the stack on brackets in brackets, so these are refused before."""
    depth = 0
    for event in yaml.parse(text, Loader=LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            raise ValueError(f"{CONFIG} has more than {DEEPEST} groups in each other")
    return yaml.load(text, Loader=LOADER)


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
    filled = VARIANTS.get(whole["server.variant"], {}).items()
    return whole | {name: value for name, value in filled if whole[name] is None}


def each(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def read_record(line: bytes) -> dict[str, Any] | None:
    """The round in a line of metrics.jsonl; None where it is torn or no round."""
    try:
        record = json.loads(line)
        return {key: finite(value) for key, value in record.items()} if is_round(record) else None
    except (ValueError, RecursionError):
        return None


def is_round(record: Any) -> bool:
    """Whether it has a round's number, and numbers where they are looked for."""
    if not isinstance(record, dict) or type(record.get("round")) is not int or record["round"] < 1:
        return False
    parts = [key for key in record if key in PARTS or key.startswith(SIDES)]
    known = [key for key in record if key in NUMBERS or key.startswith(("test_", "train_"))]
    return all(
        record[key] is None or (isinstance(record[key], dict) == (key in parts) and numeric(record[key]))
        for key in [*parts, *known]
    )


def numeric(value: Any) -> bool:
    """Whether it is a number that can be reckoned with, None, or a dict of such."""
    if isinstance(value, dict):
        return all(numeric(inner) for inner in value.values())
    return value is None or isinstance(value, float) or (isinstance(value, int) and abs(value) < 2**63)


def finite(value: Any) -> Any:
    """The value with None for numbers that are not finite, which older versions may have written as NaN."""
    if isinstance(value, dict):
        return {key: finite(inner) for key, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_goal(objective: Any, records: list[dict[str, Any]]) -> tuple[str, bool]:
    """The metric of a run and whether it rises, from its rounds and the objective in its partition.json. The first
    versions wrote none: they knew accuracy alone."""
    said = objective if isinstance(objective, dict) else {}
    names = (key.removeprefix("test_") for record in records for key in record if key.startswith("test_"))
    metric = next((name for name in names if name != "loss"), None) or str(said.get("metric", "accuracy"))
    return metric, bool(said.get("rises", metric == "accuracy"))

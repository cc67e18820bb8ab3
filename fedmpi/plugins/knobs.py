"""Knobs: fields of frozen dataclasses with bounds next to their defaults, declared beside the code that reads them."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import field
from pathlib import Path
from typing import Any

from ..errors import UserError

MOST = 3e38  # what float32 holds


def knob(
    default: Any, low: float = -math.inf, high: float = math.inf, open_low: bool = False, open_high: bool = False
) -> Any:
    """A field with bounds; `open_low` and `open_high` leave the bound itself out."""
    return field(default=default, metadata={"low": low, "high": high, "open_low": open_low, "open_high": open_high})


def knobs(part: Any, prefix: str = "") -> dict[str, Any]:
    """Every knob of a dataclass of the configuration by its dotted name, and the groups among them."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(part):
        name, value = f"{prefix}{f.name}", getattr(part, f.name)
        out |= {name: value} | (knobs(value, f"{name}.") if dataclasses.is_dataclass(value) else {})
    return out


def check_bounds(part: Any, prefix: str) -> None:
    """Check the bounds of every field of a dataclass and of those inside it."""
    for f in dataclasses.fields(part):
        value = getattr(part, f.name)
        if dataclasses.is_dataclass(value):
            check_bounds(value, f"{prefix}{f.name}.")
        elif value is None and "None" not in str(f.type):
            raise UserError(f"--{prefix}{f.name} is null; it must have a value, and {f.default} is the default")
        elif isinstance(value, str):
            check_word(f"--{prefix}{f.name}", value)
        elif "low" in f.metadata and value is not None:
            if abs(value) == math.inf:
                raise UserError(f"--{prefix}{f.name} is {value}; it must be a finite number")
            if abs(value) > MOST:
                raise UserError(f"--{prefix}{f.name} is {value}; it must be at most {MOST:g}")
            if not within(value, **f.metadata):
                raise UserError(f"--{prefix}{f.name} is {value}; it must be {interval(**f.metadata)}")


def check_word(option: str, word: str) -> None:
    """Refuse what can be neither a name nor a path."""
    if "\0" in word:
        raise UserError(f"{option} is '{word}'; it cannot have a zero byte in it")
    if word.startswith("~"):
        try:
            Path(word).expanduser()
        except RuntimeError:
            raise UserError(f"{option} is '{word}'; there is no home folder of that user") from None


def within(value: float, low: float, high: float, open_low: bool, open_high: bool) -> bool:
    """Whether a value keeps its bounds."""
    return low <= value <= high and not (open_low and value == low) and not (open_high and value == high)


def interval(low: float, high: float, open_low: bool, open_high: bool) -> str:
    """Bounds in words."""
    least, most = (f"{bound:.0f}" if float(bound).is_integer() else f"{bound:g}" for bound in (low, high))
    if high == math.inf:
        return f"above {least}" if open_low else f"at least {least}"
    return f"in {'(' if open_low else '['}{least}, {most}{')' if open_high else ']'}"

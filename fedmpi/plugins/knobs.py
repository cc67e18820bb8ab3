"""Knobs: fields of frozen dataclasses that carry their bounds and choices next to their defaults.

A rule's knobs are declared once (`fedmpi/knobs.py`, or a plug-in's module); `option` turns such a field into the field
of the configuration that a user sets, `handed_over` turns the configured values back into the rule's knobs.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, field, fields, is_dataclass, make_dataclass
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from ..errors import UserError, unknown

T = TypeVar("T")
MOST = 3e38  # what float32 holds


@dataclasses.dataclass(frozen=True)
class Bounds:
    """The interval that a number must lie in; `open_low` and `open_high` leave the bound itself out."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False

    def __contains__(self, value: float) -> bool:
        inside = self.low <= value <= self.high
        return inside and not (self.open_low and value == self.low) and not (self.open_high and value == self.high)

    def __str__(self) -> str:
        least, most = (f"{bound:.0f}" if float(bound).is_integer() else f"{bound:g}" for bound in (self.low, self.high))
        if self.low == -math.inf:
            return "a finite number" if self.high == math.inf else f"{'below' if self.open_high else 'at most'} {most}"
        if self.high == math.inf:
            return f"above {least}" if self.open_low else f"at least {least}"
        return f"in {'(' if self.open_low else '['}{least}, {most}{')' if self.open_high else ']'}"


def knob(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    open_low: bool = False,
    open_high: bool = False,
    choices: Iterable[str] = (),
    by_row: bool = False,
    none: Any = None,
    otherwise: Any = None,
    short: str = "",
) -> Any:
    """Return a field with bounds, or with the words to choose from.

    The rest is for built-in knobs that a named algorithm may have defaults for. `by_row`: the option is null unless
    given, and falls back on the algorithm's row, then on this default. `none`: how a None is then written in a
    configuration. `otherwise`: what fields of the configuration itself, whose default is null, fall back on. `short`: a
    second name for an option of a command, such as -n.
    """
    metadata = {"bounds": Bounds(low, high, open_low, open_high), "choices": tuple(choices), "by_row": by_row}
    return field(default=default, metadata={**metadata, "none": none, "otherwise": otherwise, "short": short})


def walk(part: Any, prefix: str = "") -> Iterator[tuple[str, dataclasses.Field[Any], Any]]:
    """Yield the dotted name, the field and the value of every knob of a dataclass, and of the groups among them."""
    for f in fields(part):
        name, value = f"{prefix}{f.name}", getattr(part, f.name)
        yield name, f, value
        if is_dataclass(value):
            yield from walk(value, f"{name}.")


def knobs(part: Any) -> dict[str, Any]:
    """Return every knob of a dataclass of the configuration by its dotted name, and the groups among them."""
    return {name: value for name, _, value in walk(part)}


def plain_knobs(part: Any) -> dict[str, Any]:
    """Return every knob of a dataclass of the configuration by its dotted name, without the groups."""
    return {name: value for name, _, value in walk(part) if not is_dataclass(value)}


def fallbacks(part: Any) -> dict[str, Any]:
    """Return what the knobs that an algorithm's row fills in fall back on, by their dotted names."""
    found = {name: f.metadata.get("otherwise") for name, f, _ in walk(part)}
    return {name: otherwise for name, otherwise in found.items() if otherwise is not None}


def with_values(part: Any, values: Mapping[str, Any]) -> Any:
    """Return a configuration, or a group of it, with these values by their dotted names."""
    own: dict[str, Any] = {}
    groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        group, dot, inner = name.partition(".")
        if dot:
            groups.setdefault(group, {})[inner] = value
        else:
            own[name] = value
    own |= {group: with_values(getattr(part, group), inner) for group, inner in groups.items()}
    return dataclasses.replace(part, **own)


def option(name: str, kind: Any, default: Any, metadata: Mapping[str, Any]) -> tuple[str, Any, Any]:
    """Return the field of the configuration for a knob that a rule declares, as `make_dataclass` takes it."""
    if not metadata.get("by_row"):
        return name, kind, field(default=default, metadata=metadata)
    otherwise = metadata["none"] if default is None else default
    return name, "float | None", field(default=None, metadata={**metadata, "otherwise": otherwise})


def options(name: str, declared: type, run: type | None = None) -> Any:
    """Return a group of options, a frozen dataclass: the knobs that rules declare and, before them, those of the run
    and the learning rate."""
    rules, own = (
        {f.name: option(f.name, f.type, f.default, f.metadata) for f in (fields(part) if part else ())}
        for part in (declared, run)
    )
    first = {"rule": own["rule"], "lr": rules["lr"]} if run else {}
    space = {"__module__": CONFIG, "__doc__": (run or declared).__doc__, "documented": (declared, run or declared)}
    return make_dataclass(name, (first | own | rules).values(), frozen=True, namespace=space)


def extended(group: type, declared: type, base: type) -> Any:
    """Return a group of options with the knobs that a plug-in's class declares beyond those of the built-in `base`; one
    of those that it declares anew has the plug-in's default and bounds."""
    kinds, known = get_type_hints(declared), {f.name: f for f in fields(base)}
    more = []
    for f in fields(declared):
        if known.get(f.name) is f:
            continue
        if f.default is MISSING:
            raise UserError(f"knob '{f.name}' of {declared.__name__} has no default; give it one: knob(0.5, low=0)")
        if f.name not in known and hasattr(group, f.name):
            raise UserError(f"knob '{f.name}' of {declared.__name__} is an option of every run; give it another name")
        metadata = dict(f.metadata)
        if f.name in known:
            usual = known[f.name].metadata
            metadata = {**usual, **f.metadata, "by_row": usual.get("by_row"), "none": usual.get("none")}
        more.append(option(f.name, kinds[f.name], f.default, metadata))
    sources = (declared, *getattr(group, "documented", ()))
    space = {"__module__": CONFIG, "__doc__": group.__doc__, "documented": sources}
    return make_dataclass(group.__name__, more, bases=(group,), frozen=True, namespace=space)


CONFIG = "fedmpi.runs.config"  # the module of the options


def handed_over(declared: type[T], *groups: Any, **values: Any) -> T:
    """Return the knobs that a rule declares, with what the groups of the configuration say and these values."""
    kind: Any = declared
    wanted = {f.name for f in fields(kind)} - values.keys()
    for group in groups:
        for f in fields(group):
            if f.name in wanted:
                value, none = getattr(group, f.name), f.metadata.get("none")
                values[f.name] = None if none is not None and value == none else value
    return declared(**values)


def help_texts(declared: type) -> dict[str, str]:
    """Return the strings that stand under the fields of a class in its source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(declared)))
    except (OSError, TypeError, SyntaxError):  # built-in, or typed into a prompt
        return {}
    body = next((one.body for one in tree.body if isinstance(one, ast.ClassDef)), [])
    found = {}
    for one, text in zip(body, body[1:], strict=False):
        if isinstance(one, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[ast.unparse(one.target)] = " ".join(str(text.value.value).split())
    return found


def check_bounds(part: Any) -> None:
    """Check the bounds of every field of a dataclass and of those inside it."""
    for name, f, value in walk(part):
        if value is None:
            if not any(word in str(f.type) for word in ("None", "Optional")):
                raise UserError(f"--{name} is null; it must have a value, and {f.default} is the default")
        elif isinstance(value, str):
            check_word(f"--{name}", value, f.metadata.get("choices"))
        elif "bounds" in f.metadata:
            check_number(f"--{name}", value, f.metadata["bounds"])


def check_number(option: str, value: float, bounds: Bounds) -> None:
    """Refuse a number that is infinite, too large for float32 or out of its bounds."""
    if math.isinf(value):
        raise UserError(f"{option} is {value}; it must be a finite number")
    if abs(value) > MOST:
        raise UserError(f"{option} is {value}; it must be at most {MOST:g}")
    if value not in bounds:
        raise UserError(f"{option} is {value}; it must be {bounds}")


def check_word(option: str, word: str, choices: Iterable[str] | None = None) -> None:
    """Refuse what is not among the choices, or can be neither a name nor a path."""
    if choices and word not in choices:
        raise unknown(option, word, choices)
    if "\0" in word:
        raise UserError(f"{option} is '{word}'; it cannot have a zero byte in it")
    if word.startswith("~"):
        try:
            Path(word).expanduser()
        except RuntimeError:
            raise UserError(f"{option} is '{word}'; there is no home folder of that user") from None

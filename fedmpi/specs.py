"""Knobs that are a name with numbers behind it (`uniform:0.3,1.0`, `step:30,0.1`), or several names
(`clients,agreement`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .errors import UserError, nearest, unknown


def read_spec(option: str, text: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, float]]:
    """The name and its numbers by the names that `known` gives them; one that ends in '?' may be left out."""
    name, colon, rest = text.partition(":")
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean '{form(near, known[near])}'? " if near else ""
        raise UserError(f"unknown {option} '{text}'; {hint}known: {', '.join(form(n, known[n]) for n in known)}")
    wanted = known[name]
    given = rest.split(",") if colon else []
    least = sum(not w.endswith("?") for w in wanted)
    try:
        numbers = [float(word) for word in given]
        sound = least <= len(numbers) <= len(wanted) and all(map(math.isfinite, numbers))
    except ValueError:
        sound = False
    if not sound:
        numbers_ = ", with numbers" if wanted else ""
        raise UserError(f"{option} is '{text}'; write it as {form(name, wanted)}{numbers_}")
    return name, dict(zip((w.rstrip("?") for w in wanted), numbers, strict=False))


def form(name: str, wanted: tuple[str, ...]) -> str:
    """How a spec is written: name:first,second[,third]."""
    if not wanted:
        return name
    words = ",".join(w for w in wanted if not w.endswith("?"))
    spare = "".join(f"[,{w[:-1]}]" if words else f"[:{w[:-1]}]" for w in wanted if w.endswith("?"))
    return f"{name}:{words}{spare}" if words else f"{name}{spare}"


def read_names(kind: str, text: str, known: Iterable[str]) -> list[str]:
    """The names in a list with commas, each once; `none` stands for no name."""
    names, known = [name.strip() for name in text.split(",")], [*known, "none"]
    for name in names:
        if name and name not in known:
            raise unknown(kind, name, known)
    return list(dict.fromkeys(name for name in names if name not in ("", "none")))

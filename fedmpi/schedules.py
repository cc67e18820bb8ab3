"""Values that change over rounds or clients, given as words, and the parser of such words.

A learning rate schedule is `constant`, `step:30,0.1` (times 0.1 every 30 rounds) or `cosine` (half a cosine from the
full rate towards 0; `cosine:0.01` towards a hundredth of it), each optionally after a linear warm-up:
`warmup:5+cosine`. A rate depends on the round number alone, so a run can resume anywhere. The same words describe the
rate over the steps of a round (`warmup:10+cosine`: 10 steps).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

from .errors import UserError, nearest, unknown

Rate = Callable[[int], float]  # the learning rate of round t = 1, 2, ...
SCHEDULES = {"constant": (), "step": ("rounds", "factor"), "cosine": ("last?",)}
WARM_UP = {"warmup": ("rounds",)}


def as_rate(lr: float | Rate) -> Rate:
    """Return the rate itself, or the one that is the same in every round."""
    return lr if callable(lr) else lambda t: lr


def make_rate(option: str, schedule: str, lr: float, rounds: int, unit: str = "rounds") -> Rate:
    """Return the learning rate lr under a schedule over that many rounds in all, or steps of a round (`unit`)."""

    def whole(what: str, number: float) -> int:
        if number < 1 or number != int(number):
            raise UserError(f"{option} is '{schedule}'; a {what} takes a whole number of {unit}, 1 or more")
        return int(number)

    later, first = (
        {name: tuple(unit if word == "rounds" else word for word in words) for name, words in table.items()}
        for table in (SCHEDULES, WARM_UP)
    )
    front, plus, back = schedule.partition("+")
    name, numbers = read_spec(option, front, later | first)
    if plus and (name != "warmup" or not back):
        right = f"a '+' stands between a warm-up and a schedule: warmup:{unit}+cosine"
        raise UserError(f"{option} is '{schedule}'; {right}")
    warm = 0
    if name == "warmup":
        warm = whole("warm-up", numbers[unit])
        name, numbers = read_spec(option, back or "constant", later)
    every = whole("step", numbers.get(unit, 1))
    low = numbers.get("factor", numbers.get("last", 0.0))
    if not 0 <= low <= 1:
        raise UserError(f"{option} is '{schedule}'; its factor must lie in [0, 1]")
    factors: dict[str, Rate] = {  # of rounds 1, 2, ... after the warm-up
        "constant": lambda t: 1.0,
        "step": lambda t: low ** ((t - 1) // every),
        "cosine": lambda t: low + (1 - low) * (1 + math.cos(math.pi * (t - 1) / max(rounds - warm, 1))) / 2,
    }
    factor = factors[name]
    return lambda t: lr * t / (warm + 1) if t <= warm else lr * factor(t - warm)


def read_spec(option: str, text: str, known: Mapping[str, tuple[str, ...]]) -> tuple[str, dict[str, float]]:
    """Return the name and its numbers by the names that `known` gives them; one that ends in '?' may be left out."""
    name, colon, rest = text.partition(":")
    if name not in known:
        near = nearest(name, known)
        hint = f"did you mean '{form(near, known[near])}'? " if near else ""
        raise UserError(f"unknown {option} '{text}'; {hint}known: {', '.join(form(n, known[n]) for n in known)}")
    wanted = known[name]
    least = sum(not w.endswith("?") for w in wanted)
    try:
        numbers = [float(word) for word in rest.split(",")] if colon else []
        sound = least <= len(numbers) <= len(wanted) and all(map(math.isfinite, numbers))
    except ValueError:
        sound = False
    if not sound:
        raise UserError(f"{option} is '{text}'; write it as {form(name, wanted)}{', with numbers' if wanted else ''}")
    return name, dict(zip((w.rstrip("?") for w in wanted), numbers, strict=False))


def form(name: str, wanted: tuple[str, ...]) -> str:
    """Return how a spec is written: name:first,second[,third]."""
    words = ",".join(w for w in wanted if not w.endswith("?"))
    spare = "".join(f"[,{w[:-1]}]" if words else f"[:{w[:-1]}]" for w in wanted if w.endswith("?"))
    return f"{name}:{words}{spare}" if words else f"{name}{spare}"


def read_names(kind: str, text: str, known: Iterable[str], own: bool = False) -> list[str]:
    """Return the names in a comma-separated list, each once; `none` is the empty list. `own` allows import paths."""
    names, known = [name.strip() for name in text.split(",")], [*known, "none"]
    for name in names:
        if name and name not in known and not (own and ":" in name):
            raise unknown(kind, name, known, own)
    return list(dict.fromkeys(name for name in names if name not in ("", "none")))

"""Learning rates over the rounds, for clients and for the server.

A schedule is a word: `constant`, `step:30,0.1` (every 30 rounds times 0.1), `cosine` (half a cosine from the full rate
towards 0, or `cosine:0.01` towards a hundredth of it), each also behind a warm-up that rises in a line:
`warmup:5+cosine`. A rate depends on the number of the round alone, so a run can be taken up anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from .errors import UserError
from .specs import read_spec

Rate = Callable[[int], float]
"""the learning rate of round t = 1, 2, ..."""

SCHEDULES = {"constant": (), "step": ("rounds", "factor"), "cosine": ("last?",)}
ALL = SCHEDULES | {"warmup": ("rounds",)}


def as_rate(lr: float | Rate) -> Rate:
    """The rate itself, or the one that is the same in every round."""
    return lr if callable(lr) else lambda t: lr


def make_rate(option: str, schedule: str, lr: float, rounds: int) -> Rate:
    """The learning rate lr under a schedule, over that many rounds in all."""
    front, plus, back = schedule.partition("+")
    name, numbers = read_spec(option, front, ALL)
    warm, after = 0, front
    if name == "warmup":
        warm = whole(option, schedule, "warm-up", numbers["rounds"])
        after = back or "constant"
    if plus and (name != "warmup" or not back):
        raise UserError(
            f"{option} is '{schedule}'; a '+' stands between a warm-up and a schedule: warmup:rounds+cosine"
        )
    factor = decay(option, after, max(rounds - warm, 1))

    def rate(t: int) -> float:
        return lr * t / (warm + 1) if t <= warm else lr * factor(t - warm)

    return rate


def decay(option: str, schedule: str, rounds: int) -> Rate:
    """The factor of round t = 1 ... rounds of a schedule without its warm-up."""
    name, numbers = read_spec(option, schedule, SCHEDULES)
    if name == "step":
        every = whole(option, schedule, "step", numbers["rounds"])
        factor = share(option, schedule, numbers["factor"])
        return lambda t: factor ** ((t - 1) // every)
    if name == "cosine":
        last = share(option, schedule, numbers.get("last", 0.0))
        return lambda t: last + (1 - last) * (1 + math.cos(math.pi * (t - 1) / rounds)) / 2
    return lambda t: 1.0


def whole(option: str, schedule: str, what: str, number: float) -> int:
    if number < 1 or number != int(number):
        raise UserError(f"{option} is '{schedule}'; a {what} takes a whole number of rounds, 1 or more")
    return int(number)


def share(option: str, schedule: str, number: float) -> float:
    if not 0 <= number <= 1:
        raise UserError(f"{option} is '{schedule}'; its factor must lie in [0, 1]")
    return number

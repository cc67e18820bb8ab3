"""The results of a run as single numbers: the measures of the papers, functions of a run; None if there is no value.

    best            the best test metric: the largest, or the smallest if less is better
    last10, last20  the mean test metric of the scored rounds among the last 10 or 20, at least one
    final           the test metric of the last scored round
    test_loss       the test loss of the last scored round
    rounds:0.8      the first scored round whose test metric reaches a value
    train_loss20    the mean training loss of the last 20 rounds; None if one is not finite
    participating   the metric on the clients of the last round scored by --evaluate clients
    others          the same on the other clients

A round is scored if the model was evaluated on the test set (--eval.every).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from ..errors import UserError
from .runs import Run

PHASES = ("local", "wait", "reduce", "server", "gather", "meta", "eval")
NAMES = "best, final, lastN, rounds:VALUE, test_loss, train_lossN, participating or others"


@dataclass(frozen=True)
class Measure:
    """A named function of a run."""

    name: str
    of: Callable[[Run], float | None]
    kind: str
    """metric, rounds or loss"""

    def rises(self, run: Run) -> bool:
        """Return whether more is better."""
        return self.kind == "metric" and run.rises


def measure(name: str) -> Measure:
    """Return the measure of that name; raise a `UserError` if there is none."""
    plain: dict[str, tuple[Callable[[Run], float | None], str]] = {
        "best": (best, "metric"),
        "final": (final, "metric"),
        "test_loss": (final_loss, "loss"),
        "participating": (partial(final_side, side="participating"), "metric"),
        "others": (partial(final_side, side="others"), "metric"),
    }
    if name in plain:
        return Measure(name, *plain[name])
    if found := re.fullmatch(r"(last|train_loss)([1-9]\d{0,8})", name):
        mean, kind = (mean_last, "metric") if found[1] == "last" else (train_loss, "loss")
        return Measure(name, partial(mean, count=int(found[2])), kind)
    if found := re.fullmatch(r"rounds:(\d{1,9}(?:\.\d+)?)", name):
        return Measure(name, partial(rounds_to, value=float(found[1])), "rounds")
    raise UserError(f"unknown measure '{name}'; known: {NAMES}")


def best(run: Run) -> float | None:
    """Return the best test metric."""
    return (max if run.rises else min)(run.series(run.score).values(), default=None)


def mean_last(run: Run, count: int) -> float | None:
    """Return the mean test metric of the scored rounds among the last `count`."""
    return mean_of_last(run, run.series(run.score), count)


def mean_of_last(run: Run, curve: Mapping[int, float], count: int) -> float | None:
    """Return the mean of a curve (round -> value) over the run's last `count` rounds; its last value if it has none."""
    if not curve:
        return None
    last = [value for number, value in curve.items() if number > run.records[-1]["round"] - count]
    return fmean(last or [curve[max(curve)]])


def final(run: Run) -> float | None:
    """Return the test metric of the last scored round."""
    return mean_last(run, 1)


def final_loss(run: Run) -> float | None:
    """Return the test loss of the last scored round; None if it was not finite."""
    scored = run.series(run.score)
    return run.series("test_loss").get(max(scored)) if scored else None


def final_side(run: Run, side: str) -> float | None:
    """Return the last metric on participating clients, or on the others."""
    return next(reversed(run.series(run.sides, side).values()), None)


def rounds_to(run: Run, value: float) -> int | None:
    """Return the first scored round with a test metric as good as `value`; None if there is none."""
    scored = run.series(run.score).items()
    return next((number for number, found in scored if (found >= value if run.rises else found <= value)), None)


def train_loss(run: Run, count: int) -> float | None:
    """Return the mean training loss of the last rounds; None if one is not finite, as the others would flatter it."""
    losses, last = run.series("train_loss"), run.records[-count:]
    values = [losses[record["round"]] for record in last if record["round"] in losses]
    return fmean(values) if values and len(values) == len(last) else None


def total_bytes(run: Run) -> float:
    """Return the bytes that all ranks sent in all rounds."""
    return sum(run.series("bytes_sent").values())


def client_bytes(run: Run, way: str) -> float | None:
    """Return the bytes that all clients uploaded (`way` up) or downloaded (down) in all rounds; None if a version that
    did not count them ran some rounds."""
    series = run.series(f"client_bytes_{way}")
    return sum(series.values()) if series and len(series) == len(run.records) else None


def bytes_per_client(run: Run, way: str) -> float | None:
    """Return the same per client and round, over clients that delivered; dropped ones have downloaded, too."""
    sent, taken = run.series(f"client_bytes_{way}"), run.series("clients")
    left_out = run.series("dropped") if way == "down" else {}
    clients = sum(taken.get(number, 0.0) + left_out.get(number, 0.0) for number in sent)
    return sum(sent.values()) / clients if clients else None


def total_seconds(run: Run) -> dict[str, float]:
    """Return the seconds of all rounds by phase, in the order of a round, as far as they were timed."""
    named = in_order(phase for record in run.records for phase in record.get("seconds") or {})
    return {phase: sum(run.series("seconds", phase).values()) for phase in named}


def in_order(phases: Iterable[str]) -> list[str]:
    """Return each phase once, in the order of a round; unknown ones last."""
    named = dict.fromkeys(phases)
    return [*(phase for phase in PHASES if phase in named), *(phase for phase in named if phase not in PHASES)]


def round_seconds(run: Run) -> dict[int, float]:
    """Return round -> seconds in all phases."""
    parts = {record["round"]: (record.get("seconds") or {}).values() for record in run.records}
    return {number: sum(value for value in values if value is not None) for number, values in parts.items()}


def mean_of(run: Run, *path: str) -> float | None:
    """Return the mean over rounds of a number by its keys: agreement, below_tau, kept."""
    values = run.series(*path).values()
    return fmean(values) if values else None

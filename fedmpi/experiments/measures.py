"""What a run came to, in one number: the measures of the papers, each a function of a run, None where there is none.

    best            the best test metric: the largest, or the smallest where it falls
    last10, last20  the mean test metric of the scored rounds among the last 10 or 20, of one such at least
    final           the test metric of the last scored round
    test_loss       the test loss of the last scored round
    rounds:0.8      the first scored round at which the test metric has reached a value
    train_loss20    the mean training loss of the last 20 rounds, None where one of them is not finite
    participating   the metric on the clients of the last round that was scored by --evaluate clients
    others          that on the clients that did not take part in it

A round is scored when the test set was looked at in it (--eval.every).
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
    """A measure by its name."""

    name: str
    of: Callable[[Run], float | None]
    kind: str
    """metric, rounds or loss: what it is a number of"""

    def rises(self, run: Run) -> bool:
        """Whether more of it is better."""
        return self.kind == "metric" and run.rises


def measure(name: str) -> Measure:
    """The measure of that name; a `UserError` where there is none."""
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
    """The best test metric."""
    return (max if run.rises else min)(run.series(run.score).values(), default=None)


def mean_last(run: Run, count: int) -> float | None:
    """The mean test metric of the scored rounds among the last `count`."""
    return mean_of_last(run, run.series(run.score), count)


def mean_of_last(run: Run, curve: Mapping[int, float], count: int) -> float | None:
    """The mean of a curve, round -> value, over what it has of the run's last rounds; where that is nothing, its last
    value."""
    if not curve:
        return None
    last = [value for number, value in curve.items() if number > run.records[-1]["round"] - count]
    return fmean(last or [curve[max(curve)]])


def final(run: Run) -> float | None:
    """The test metric of the last scored round."""
    return mean_last(run, 1)


def final_loss(run: Run) -> float | None:
    """The test loss of the last scored round, None where it was not finite."""
    scored = run.series(run.score)
    return run.series("test_loss").get(max(scored)) if scored else None


def final_side(run: Run, side: str) -> float | None:
    """The metric on the clients that took part in the last round that was scored so, or on the others."""
    return next(reversed(run.series(run.sides, side).values()), None)


def rounds_to(run: Run, value: float) -> int | None:
    """The first scored round with a test metric as good as `value`; None where it was never reached."""
    scored = run.series(run.score).items()
    return next((number for number, found in scored if (found >= value if run.rises else found <= value)), None)


def train_loss(run: Run, count: int) -> float | None:
    """The mean training loss of the last rounds. None where one of them is not finite: the others would flatter it."""
    losses, last = run.series("train_loss"), run.records[-count:]
    values = [losses[record["round"]] for record in last if record["round"] in losses]
    return fmean(values) if values and len(values) == len(last) else None


def total_bytes(run: Run) -> float:
    """What all ranks sent in all rounds."""
    return sum(run.series("bytes_sent").values())


def client_bytes(run: Run, way: str) -> float | None:
    """What all clients uploaded to the server (`way` up) or downloaded from it (down) in all rounds; None where some
    rounds are of a version that did not count it."""
    series = run.series(f"client_bytes_{way}")
    return sum(series.values()) if series and len(series) == len(run.records) else None


def bytes_per_client(run: Run, way: str) -> float | None:
    """The same per client and round: over the clients that delivered in the rounds that were counted; those that were
    left out have downloaded, too."""
    sent, taken = run.series(f"client_bytes_{way}"), run.series("clients")
    left_out = run.series("dropped") if way == "down" else {}
    clients = sum(taken.get(number, 0.0) + left_out.get(number, 0.0) for number in sent)
    return sum(sent.values()) / clients if clients else None


def total_seconds(run: Run) -> dict[str, float]:
    """The seconds of all rounds by phase, in the order of a round, as far as the run's version timed them."""
    named = in_order(phase for record in run.records for phase in record.get("seconds") or {})
    return {phase: sum(run.series("seconds", phase).values()) for phase in named}


def in_order(phases: Iterable[str]) -> list[str]:
    """Each phase once, in the order of a round; what is not known behind."""
    named = dict.fromkeys(phases)
    return [*(phase for phase in PHASES if phase in named), *(phase for phase in named if phase not in PHASES)]


def round_seconds(run: Run) -> dict[int, float]:
    """round -> its seconds in all phases."""
    parts = {record["round"]: (record.get("seconds") or {}).values() for record in run.records}
    return {number: sum(value for value in values if value is not None) for number, values in parts.items()}


def mean_of(run: Run, *path: str) -> float | None:
    """The mean over the rounds of what stands under these keys: agreement, below_tau, kept."""
    values = run.series(*path).values()
    return fmean(values) if values else None

"""The score on the test set, or on train samples, over the ranks: blocks of a fixed size are dealt to the ranks in turn
and whole numbers are summed, so the result is the same on any number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from ...clients.task import Scored, Task, Total
from ...errors import RunError, UserError
from ...flat import tiles
from ...rounds import State

if TYPE_CHECKING:
    from ...comm import Comm
    from .base import Ranks

UNIT = 2.0**20  # sums are whole numbers of 1 / UNIT
MOST = 2.0**20  # per label; beyond it the model has diverged


class Score(NamedTuple):
    """How well a model does on samples: the mean metric (accuracy, ...) and loss; NaN where it has diverged."""

    metric: float
    loss: float
    classes: tuple[float, ...] = ()
    """where asked, the mean metric of the samples of each class; NaN also for a class without samples"""
    more: Mapping[str, float] = {}
    """where asked, further metrics by name"""


def readable(scores: Iterator[Scored], where: str) -> Iterator[Scored]:
    """Yield the scores; raise a `RunError` for a sample that cannot be used: it is read for the first time."""
    try:
        yield from scores
    except UserError as error:
        raise RunError(f"in the {where} set: {error}") from error


def evaluate(
    task: Task,
    state: State,
    comm: Comm,
    block: int,
    classes: int = 0,
    metrics: Mapping[str, Total] | None = None,
) -> Score:
    """Return the model's score on the whole test set, on each of so many classes of it, and by further metrics.
    Collective."""
    task.load(state.model_N, state.ints)
    mine = list(tiles(0, len(task.tests), block))[comm.rank :: comm.size]
    scores = task.score(mine, by_class=classes > 0, metrics=metrics)
    return add_up(readable(scores, "test"), comm, classes, list(metrics or {}))


def add_up(scores: Iterable[Scored], comm: Comm | Ranks, classes: int = 0, metrics: Iterable[str] = ()) -> Score:
    """Return the means over what all ranks have scored. Collective."""
    place = {name: 2 + classes + i for i, name in enumerate(metrics)}
    rows = [[0, 0, 0] for _ in range(2 + classes + len(place))]  # each: the sum in units, labels, unsound blocks
    for scored in scores:
        found = {0: (scored.metric, scored.labels), 1: (scored.loss, scored.labels)}
        found |= {2 + c: one for c, one in scored.classes.items()}
        found |= {place[name]: one for name, one in scored.more.items()}
        for i, (total, labels) in found.items():
            sound = abs(total) < MOST * labels  # false for NaN too; and the sum cannot overflow
            more = round(total * UNIT) if sound else 0, labels, not sound
            rows[i] = [a + b for a, b in zip(rows[i], more, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64)
    comm.sum(table)
    means = [mean_of(*row) for row in table.tolist()]
    return Score(means[0], means[1], tuple(means[2 : 2 + classes]), {name: means[i] for name, i in place.items()})


def mean_of(total: int, labels: int, unsound: int) -> float:
    """Return the mean over labels; NaN where there are none, or where a block was no number."""
    return math.nan if unsound or not labels else total / UNIT / labels

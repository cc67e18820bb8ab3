"""The score on the test set, or on train samples, over the ranks: blocks of a fixed size go round the ranks and whole
numbers are summed, so the result is the same on any number of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ...aggregate.tiling import tiles
from ...clients.task import Scored, Task
from ...comm import Comm
from ...errors import RunError, UserError
from ...rounds import State

UNIT = 2.0**20  # sums are whole numbers of 1 / UNIT
MOST = 2.0**20  # a label; beyond it the model has diverged


class Score(NamedTuple):
    """How well a model does on samples: the mean metric (accuracy, ...) and loss; NaN where it has diverged."""

    metric: float
    loss: float
    classes: tuple[float, ...] = ()
    """where asked, the mean metric of the samples of each class; NaN also for a class without samples"""


def told(scores: Iterator[Scored], where: str) -> Iterator[Scored]:
    """The scores; what is wrong with a sample that nobody has read before is a fault of the run by now."""
    try:
        yield from scores
    except UserError as error:
        raise RunError(f"in the {where} set: {error}") from error


def evaluate(task: Task, state: State, comm: Comm, block: int, classes: int = 0) -> Score:
    """The model's score on the whole test set, and on each of so many classes of it. Collective."""
    task.load(state.model_N, state.ints)
    mine = list(tiles(0, len(task.tests), block))[comm.rank :: comm.size]
    return add_up(told(task.score(mine, by_class=classes > 0), "test"), comm, classes)


def evaluate_train(task: Task, state: State, comm: Comm, block: int, samples: Tensor) -> Score:
    """The model's score on these train samples, as their clients have them but not augmented. Collective."""
    task.load(state.model_N, state.ints)
    mine = torch.split(samples, block)[comm.rank :: comm.size]
    return add_up(told(task.score_train(mine), "train"), comm)


def add_up(scores: Iterable[Scored], comm: Comm, classes: int = 0) -> Score:
    """The means over what all ranks have scored. Collective."""
    rows = [[0, 0, 0] for _ in range(2 + classes)]  # metric, loss, classes: the sum in units, labels, unsound blocks
    for scored in scores:
        whole = {0: (scored.metric, scored.labels), 1: (scored.loss, scored.labels)}
        for i, (total, labels) in (whole | {2 + c: found for c, found in scored.classes.items()}).items():
            sound = abs(total) < MOST * labels  # false for NaN too; and the sum cannot overflow
            more = round(total * UNIT) if sound else 0, labels, not sound
            rows[i] = [a + b for a, b in zip(rows[i], more, strict=True)]
    table = torch.tensor(rows, dtype=torch.int64)
    comm.sum(table)
    metric, loss, *by_class = (mean_of(*row) for row in table.tolist())
    return Score(metric, loss, tuple(by_class))


def mean_of(total: int, labels: int, unsound: int) -> float:
    """The mean over labels; NaN where there are none, or where a block was no number."""
    return math.nan if unsound or not labels else total / UNIT / labels

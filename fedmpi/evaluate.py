"""The test set's score, over the ranks: blocks of a fixed size go round the ranks and whole numbers are summed, so the
result is the same on any number of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from .comm import Comm
from .errors import RunError, UserError
from .rounds import State
from .tally import chunks
from .task import Scored, Task

UNIT = 2.0**20  # sums are whole numbers of 1 / UNIT
MOST = 2.0**20  # a label; beyond it the model has diverged


class Score(NamedTuple):
    """How well a model does on the test set: the mean metric (accuracy, ...) and loss; NaN where it has diverged."""

    metric: float
    loss: float


def told(scores: Iterator[Scored]) -> Iterator[Scored]:
    """The scores; what is wrong with a test sample that nobody has read before is a fault of the run by now."""
    try:
        yield from scores
    except UserError as error:
        raise RunError(f"in the test set: {error}") from error


def evaluate(task: Task, state: State, comm: Comm, block: int) -> Score:
    """The model's score on the whole test set. Collective."""
    task.load(state.model_N, state.ints)
    mine = list(chunks(len(task.tests), block))[comm.rank :: comm.size]
    sums, bad = torch.zeros(2, 2, dtype=torch.int64)
    labels = torch.zeros(1, dtype=torch.int64)
    for scored in told(task.score(mine)):
        labels += scored.labels
        for i, total in enumerate((scored.metric, scored.loss)):
            sound = abs(total) < MOST * scored.labels  # false for NaN too; and the sum cannot overflow
            sums[i] += round(total * UNIT) if sound else 0
            bad[i] += not sound
    together = torch.cat([sums, bad, labels])
    comm.sum(together)
    metric, loss, bad_metric, bad_loss, count = together.tolist()
    return Score(
        math.nan if bad_metric else metric / UNIT / count,
        math.nan if bad_loss else loss / UNIT / count,
    )

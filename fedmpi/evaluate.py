"""Test accuracy and loss, over the ranks: blocks of a fixed size go round the ranks and whole numbers are summed, so
the result is the same on any number of them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .comm import Comm
from .tally import chunks
from .task import Task
from .train import State

LOSS_UNIT = 2.0**20
MOST_LOSS = 2.0**20  # a sample; beyond it the model has diverged


class Score(NamedTuple):
    """How well a model does on the test set; the loss is NaN where the model has diverged."""

    accuracy: float
    loss: float


def evaluate(task: Task, state: State, comm: Comm, block: int) -> Score:
    """The model's score on the whole test set. Collective."""
    task.load(state.model_N, state.ints)
    right_loss_bad = torch.zeros(3, dtype=torch.int64)
    for number, part in enumerate(chunks(len(task.test_y), block)):
        if number % comm.size == comm.rank:
            right, loss = task.score(part)
            sound = abs(loss) < MOST_LOSS * (part.stop - part.start)  # false for NaN too; and the sum cannot overflow
            right_loss_bad += torch.tensor([right, round(loss * LOSS_UNIT) if sound else 0, not sound])
    comm.sum(right_loss_bad)
    right, total, bad = right_loss_bad.tolist()
    count = len(task.test_y)
    return Score(right / count, math.nan if bad else total / LOSS_UNIT / count)

"""Outputs and losses of a run's model for samples, selected by index.

For sequences, the loss of a sample is the mean over its positions, and the output is the one at the last position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...data import Ints
from ...data.objective import Objective, cross_entropy, squared_error
from ...data.trees import IGNORE, call
from ...errors import RunError, UserError, one_line
from .attackers import Floats
from .rebuild import AGAIN, Rebuilt

NEAR = 1e-3  # relative tolerance: rounding differs between machines


@dataclass(frozen=True)
class Answers:
    """Outputs and losses of a model for samples."""

    values: Floats
    """outputs, [n, width]; for a sequence those at the last position"""
    losses: Floats
    """loss per sample, [n]"""
    metric: float
    """mean over the labels"""
    labels: Floats
    """how many labels a sample has that count, [n]"""


@torch.inference_mode()
def ask(rebuilt: Rebuilt, numbers: Ints, test: bool) -> Answers:
    """Return the outputs and losses of the model for train or test samples."""
    goal = rebuilt.data.goal
    values, losses, counts, total, labels = list[Tensor](), list[Tensor](), list[Tensor](), 0.0, 0
    try:
        for x, y in rebuilt.samples(numbers, test):
            outputs, y = goal.align(call(rebuilt.model, x), y)
            losses.append(sample_losses(goal, outputs, y).cpu())
            last = outputs[:, -1] if goal.whole and outputs.ndim == 3 and y.ndim == 2 else outputs
            values.append(last.reshape(len(y), -1).float().cpu())
            counts.append(labels_of_each(y).cpu())
            total, labels = total + float(goal.total(outputs, y)), labels + int(goal.count(y))
    except (UserError, RunError):
        raise
    except Exception as error:  # raised by a user's Dataset, model or objective
        part = "test" if test else "train"
        raise RunError(
            f"evaluating the {part} samples of '{rebuilt.data.name}' failed: {type(error).__name__}: {one_line(error)}"
        ) from error
    outputs, each, weights = (torch.cat(parts).double().numpy() for parts in (values, losses, counts))
    found = Answers(outputs, each, total / labels, weights)
    if not np.isfinite(found.values).all() or not np.isfinite(found.losses).all():
        raise UserError(
            f"the model of '{rebuilt.run.folder}' has outputs or losses that are not finite: training diverged, so "
            "there is nothing to attack; train with a smaller learning rate"
        )
    return found


def sample_losses(goal: Objective, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss per sample, the mean over its labels. A user's own loss is called once per sample, because it
    need not support reduction "none"."""
    if goal.loss is cross_entropy:
        each = exact_cross_entropy(outputs.double(), y.clamp_min(0)).reshape(len(y), -1)
        if y.ndim < 2 or int(y.min()) >= 0:
            return each.mean(1)
        counted = (y != IGNORE).reshape(len(y), -1)
        return each.mul(counted).sum(1) / counted.sum(1).clamp_min(1)
    if goal.loss is squared_error:
        return goal.loss(outputs.double(), y.double(), "none").reshape(len(y), -1).mean(1)
    own = [goal.loss(outputs[i : i + 1], y[i : i + 1], "sum") / y[i].numel() for i in range(len(y))]
    return torch.stack([one.reshape(()) for one in own])


def labels_of_each(y: Tensor) -> Tensor:
    """Return how many labels of each sample count."""
    ragged = y.ndim > 1 and not y.is_floating_point()
    return (y != IGNORE).reshape(len(y), -1).sum(1) if ragged else torch.full((len(y),), y[0].numel())


def exact_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy per label, as log(1 + sum over other classes of exp(logit - label's logit)). It is tiny
    for memorised samples, down to 1e-24; torch's own rounds one in twenty of these to 0, even in double precision."""
    place = labels.unsqueeze(-1)
    others = outputs.scatter(-1, place, -torch.inf).logsumexp(-1)
    return torch.logaddexp(torch.zeros_like(others), others - outputs.gather(-1, place).squeeze(-1))


def check_score(rebuilt: Rebuilt, asked: Ints, answers: Answers) -> None:
    """Refuse a model whose mean loss on the test samples that the run was scored on differs from the recorded one: data
    or code have changed. `asked`: samples whose answers are known; others are evaluated."""
    losses, scored = np.full(rebuilt.data.tests, np.nan), rebuilt.scored
    labels = losses.copy()
    losses[asked], labels[asked] = answers.losses, answers.labels
    missing = np.setdiff1d(scored, asked)
    if len(missing):
        more = ask(rebuilt, missing, test=True)
        losses[missing], labels[missing] = more.losses, more.labels
    loss = float((losses[scored] * labels[scored]).sum() / labels[scored].sum())
    recorded = rebuilt.run.finished.get("test_loss")
    if isinstance(recorded, int | float) and not math.isclose(loss, recorded, rel_tol=NEAR, abs_tol=NEAR / 10):
        raise UserError(
            f"the model of '{rebuilt.run.folder}' has a test loss of {loss:.6g} on '{rebuilt.data.name}', but had "
            f"{recorded:.6g} when it was trained: the data or the model's code have changed{AGAIN}"
        )

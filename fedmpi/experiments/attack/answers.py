"""What a run's model answers for samples by their numbers, and what each of them costs it.

Of sequences, the loss of a sample is the mean over its positions, and the answer is that at the last one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...data import Ints
from ...data.objective import Objective, cross_entropy, squared_error
from ...errors import RunError, UserError, one_line
from .attackers import Floats
from .rebuild import Rebuilt


@dataclass(frozen=True)
class Answers:
    """What a model makes of samples."""

    values: Floats
    """its outputs, [n, width]; of a sequence those at the last position"""
    losses: Floats
    """[n]"""
    metric: float
    """its mean over the labels"""


@torch.inference_mode()
def ask(rebuilt: Rebuilt, numbers: Ints, test: bool) -> Answers:
    """Return what the model answers for train or test samples."""
    goal = rebuilt.data.goal
    values, losses, total, labels = list[Tensor](), list[Tensor](), 0.0, 0
    try:
        for x, y in rebuilt.samples(numbers, test):
            outputs = rebuilt.model(x)
            losses.append(sample_losses(goal, outputs, y).cpu())
            last = outputs[:, -1] if goal.whole and outputs.ndim == 3 and y.ndim == 2 else outputs
            values.append(last.reshape(len(y), -1).float().cpu())
            total, labels = total + float(goal.total(outputs, y)), labels + y.numel()
    except (UserError, RunError):
        raise
    except Exception as error:  # of a user's Dataset, model or objective
        part = "test" if test else "train"
        raise RunError(
            f"the {part} samples of '{rebuilt.data.name}' could not be asked: {type(error).__name__}: {one_line(error)}"
        ) from error
    found = Answers(torch.cat(values).double().numpy(), torch.cat(losses).double().numpy(), total / labels)
    if not np.isfinite(found.values).all() or not np.isfinite(found.losses).all():
        raise UserError(
            f"the model of '{rebuilt.run.folder}' answers with numbers that are not finite: it has diverged, and there "
            "is nothing to attack; train it with a smaller learning rate"
        )
    return found


def sample_losses(goal: Objective, outputs: Tensor, y: Tensor) -> Tensor:
    """Return the loss of each sample, the mean over its labels. A user's own is asked for one sample after another: it
    need not know another way."""
    if goal.loss is cross_entropy:
        return exact_cross_entropy(outputs.double(), y).reshape(len(y), -1).mean(1)
    if goal.loss is squared_error:
        return goal.loss(outputs.double(), y.double(), "none").reshape(len(y), -1).mean(1)
    each = [goal.loss(outputs[i : i + 1], y[i : i + 1], "sum") / y[i].numel() for i in range(len(y))]
    return torch.stack([one.reshape(()) for one in each])


def exact_cross_entropy(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the cross entropy per label, as log(1 + sum of the others' exp(logit - the label's)). Of a sample that was
    learnt by heart it is tiny, down to 1e-24, where torch's own, in double precision, is 0 for one in twenty."""
    place = labels.unsqueeze(-1)
    others = outputs.scatter(-1, place, -torch.inf).logsumexp(-1)
    return torch.logaddexp(torch.zeros_like(others), others - outputs.gather(-1, place).squeeze(-1))


def scored_loss(rebuilt: Rebuilt, asked: Ints, answers: Answers) -> float:
    """Return the mean loss on the test samples that the run was scored on; ask for those that were not asked yet."""
    losses, scored = np.full(rebuilt.data.tests, np.nan), rebuilt.scored
    losses[asked] = answers.losses
    missing = np.setdiff1d(scored, asked)
    if len(missing):
        losses[missing] = ask(rebuilt, missing, test=True).losses
    return float(losses[scored].mean())

"""What is learned: the loss to descend and the metric to report. It belongs to the data, not to the model.

Labels that are integers are classes: one per sample, or one per position of a sequence, such as the next character.
Other labels are numbers to predict. A user's data may define an `Objective` of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError, one_line


@dataclass(frozen=True)
class Objective:
    """A loss and a metric, as functions of a model's outputs and the labels."""

    name: str
    loss: Callable[[Tensor, Tensor, str], Tensor]  # (outputs, labels, "mean" or "sum") -> loss over all labels
    metric: str  # reported as test_<metric>
    total: Callable[[Tensor, Tensor], Tensor]  # (outputs, labels) -> the metric, summed over all labels
    rises: bool = True  # whether more of the metric is better
    whole: bool = True  # whether labels are classes: what a split by labels needs

    def __post_init__(self) -> None:
        if not self.metric.isidentifier() or self.metric == "loss":
            valid = "a name such as accuracy, and not loss: it is reported as test_<metric>, next to test_loss"
            raise UserError(f"an objective's metric is '{self.metric}'; it must be {valid}")


def cross_entropy(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of logits [..., classes] and labels [...]."""
    return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction=reduction)


def count_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return how often the largest logit is that of the label."""
    return (outputs.argmax(-1) == labels).sum()


def squared_error(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the squared error of outputs with as many elements as the labels."""
    return F.mse_loss(outputs.reshape(labels.shape), labels, reduction=reduction)


def absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the distances."""
    return (outputs.reshape(labels.shape) - labels).abs().sum()


CLASSIFY = Objective("classification", cross_entropy, "accuracy", count_right)
NEXT = Objective("next character", cross_entropy, "accuracy", count_right)
REGRESS = Objective("regression", squared_error, "error", absolute_error, rises=False, whole=False)


def try_objective(objective: Objective, outputs: Tensor, labels: Tensor) -> None:
    """Check that an objective returns one number for a model's outputs."""
    calls: dict[str, Callable[[], object]] = {
        "loss for 'mean'": lambda: objective.loss(outputs, labels, "mean"),
        "loss for 'sum'": lambda: objective.loss(outputs, labels, "sum"),
        "total": lambda: objective.total(outputs, labels),
    }
    for what, call in calls.items():
        where = f"objective '{objective.name}': its {what}"
        try:
            made = call()
        except (Exception, SystemExit) as error:
            raise UserError(f"{where} raised {type(error).__name__}: {one_line(error)}") from error
        if not isinstance(made, Tensor) or made.numel() != 1:
            raise UserError(f"{where} returned {described(made)}; it must be a tensor of one number")


def check_outputs(outputs: object, labels: Tensor, classes: int, objective: Objective, model: str) -> None:
    """Check that outputs of a model fit the labels; further outputs than classes are allowed."""
    if objective not in (CLASSIFY, NEXT, REGRESS):
        return  # the user's own may take anything
    wanted = [*labels.shape, classes] if objective.whole else list(labels.shape)
    if objective.whole:
        shape = list(outputs.shape) if isinstance(outputs, Tensor) else []
        fits = shape[:-1] == wanted[:-1] and shape[-1:] >= [classes]
    else:
        fits = isinstance(outputs, Tensor) and outputs.numel() == labels.numel()
    if not fits:
        raise UserError(
            f"model '{model}' returned {described(outputs)} for {len(labels)} samples; {objective.name} needs a tensor "
            f"{wanted}"
        )


def described(made: object) -> str:
    """Return what a user's function returned, for an error message."""
    return f"a tensor {list(made.shape)}" if isinstance(made, Tensor) else type(made).__name__

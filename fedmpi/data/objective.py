"""What is learned: the loss to descend and the metric to report. It belongs to the data, not to the model.

Labels that are integers are classes: one per sample, or one per position of a sequence, such as the next character.
Labels of -100 count neither in the loss nor in the metric. Other labels are numbers to predict. A user's data may
define an `Objective` of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import UserError, one_line
from .trees import IGNORE, leaves

Align = Callable[[Any, Any], tuple[Any, Any]]


def as_given(outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return outputs and labels unchanged."""
    return outputs, labels


def count_labels(labels: Any) -> int:
    """Return how many labels count; of a batch that is no tensor, how many samples it has."""
    if not isinstance(labels, Tensor):
        return len(next(leaves(labels)))
    if labels.is_floating_point() or labels.dim() < 2:
        return labels.numel()
    return int((labels != IGNORE).sum())


@dataclass(frozen=True)
class Objective:
    """A loss and a metric, as functions of a model's outputs and the labels."""

    name: str
    loss: Callable[[Any, Any, str], Tensor]  # (outputs, labels, "mean" or "sum") -> loss over all labels
    metric: str  # reported as test_<metric>
    total: Callable[[Any, Any], Tensor]  # (outputs, labels) -> the metric, summed over all labels
    rises: bool = True  # whether more of the metric is better
    whole: bool = True  # whether labels are classes
    batch: bool = False  # whether `loss` and `total` get the whole batch for labels, and the model a dict with labels
    count: Callable[[Any], Any] = count_labels  # labels -> how many of them count
    align: Align = as_given  # what is done to outputs and labels before anything else sees them
    by_class: bool = True  # whether a sample has a class, which splits by label need; read if `whole`

    def __post_init__(self) -> None:
        if not self.metric.isidentifier() or self.metric == "loss":
            valid = "a name such as accuracy, and not loss: it is reported as test_<metric>, next to test_loss"
            raise UserError(f"an objective's metric is '{self.metric}'; it must be {valid}")


def logits(outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return the logits of what a model returns (a tensor, a tuple that begins with it, or an object or dict with
    `logits`) in float32, and the labels."""
    if not isinstance(outputs, Tensor):
        if isinstance(outputs, Mapping):
            outputs = outputs.get("logits", outputs)
        elif isinstance(outputs, tuple | list) and outputs:
            outputs = outputs[0]
        outputs = getattr(outputs, "logits", outputs)
    if isinstance(outputs, Tensor) and outputs.dtype in (torch.bfloat16, torch.float16):
        outputs = outputs.float()
    return outputs, labels


def next_tokens(outputs: Any, labels: Any) -> tuple[Any, Any]:
    """Return the logits, and for each position the label of the next one: what a causal language model predicts."""
    return logits(outputs, F.pad(labels[:, 1:], (0, 1), value=IGNORE))


def cross_entropy(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the cross entropy of logits [..., classes] and labels [...]. The mean is 0 if no label counts."""
    if reduction != "mean" or labels.dim() < 2:
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction=reduction)
    total = F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), reduction="sum")
    return total / (labels != IGNORE).sum().clamp_min(1)


def count_right(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return how often the largest logit is that of the label."""
    return (outputs.argmax(-1) == labels).sum()


def squared_error(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """Return the squared error of outputs with as many elements as the labels."""
    return F.mse_loss(outputs.reshape(labels.shape), labels, reduction=reduction)


def absolute_error(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the distances."""
    return (outputs.reshape(labels.shape) - labels).abs().sum()


CLASSIFY = Objective("classification", cross_entropy, "accuracy", count_right, align=logits)
NEXT = Objective("next character", cross_entropy, "accuracy", count_right, align=logits)
REGRESS = Objective("regression", squared_error, "error", absolute_error, rises=False, whole=False, align=logits)
CAUSAL = Objective("next token", cross_entropy, "accuracy", count_right, align=next_tokens, by_class=False)
BUILT_IN = (CLASSIFY, NEXT, REGRESS, CAUSAL)


def usual(inputs: Any, labels: Any) -> Objective:
    """Return the objective of data that define none, by their first sample. Labels that repeat `input_ids`, as language
    models have them in transformers, ask for the next token."""
    if not isinstance(labels, Tensor) or labels.is_floating_point():
        return REGRESS
    tokens = inputs.get("input_ids") if isinstance(inputs, Mapping) else None
    if isinstance(tokens, Tensor) and labels.dim() and tokens.shape == labels.shape:
        counts = labels != IGNORE
        if bool(counts.any()) and bool((tokens == labels)[counts].all()):
            return CAUSAL
    return CLASSIFY


def try_objective(objective: Objective, outputs: Any, labels: Any) -> None:
    """Check that an objective returns one number for a model's aligned outputs."""
    calls: dict[str, Callable[[], object]] = {
        "loss for 'mean'": lambda: objective.loss(outputs, labels, "mean"),
        "loss for 'sum'": lambda: objective.loss(outputs, labels, "sum"),
        "total": lambda: objective.total(outputs, labels),
        "count": lambda: torch.as_tensor(objective.count(labels)),
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
    """Check that aligned outputs of a model fit the labels; further outputs than classes are allowed."""
    if objective not in BUILT_IN:
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

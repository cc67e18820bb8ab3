"""Further metrics of the test set: functions of (outputs, labels), recorded as test_<name>."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...data.objective import count_labels
from ...data.trees import IGNORE, leaves, shapes
from ...errors import UserError
from ...plugins import users_code
from ...rounds import Report
from .base import Measure, Numbers, Run


class Metric(Measure):
    """The mean of a function of (outputs, labels) over the test set, in scored rounds.

    The function returns a value per sample, or per label, or their sum over the labels of the block.
    """

    def __init__(self, label: str, function: Callable[[Tensor, Tensor], Any]) -> None:
        self.label, self.function = label, function
        self.count: Callable[[Any], Any] = count_labels

    def prepare(self, run: Run) -> None:
        if self.label in (*run.metrics, run.task.goal.metric, "loss"):
            raise UserError(
                f"measurement '{self.name}' is recorded as test_{self.label}, which is there already; rename the "
                "function, or leave it out of --evaluate"
            )
        self.count = run.task.goal.count
        valid = "a function of the model's outputs and the labels, or a subclass of fedmpi.runs.measures.Measure"
        with users_code(f"measurement '{self.name}'", f" for the first test samples; it must be {valid}"):
            next(run.task.score([slice(0, 2)], metrics={self.label: self.total}))
        run.metrics[self.label] = lambda *block: run.comm.keep(self.name, partial(self.total, *block), (0.0, 0))

    def total(self, outputs: Tensor, labels: Tensor) -> tuple[float, int]:
        """Return the sum over a block, and how many values were summed."""
        found, count = self.function(outputs, labels), self.count(labels)
        if isinstance(found, int | float):
            return float(found), int(count)
        if not isinstance(found, Tensor):
            raise TypeError(f"it returned {type(found).__name__}; it must return a tensor or a number")
        whole = next(leaves(labels))
        if found.ndim and found.shape not in (whole.shape, whole.shape[:1]):
            raise ValueError(
                f"it returned a tensor {list(found.shape)} for labels {shapes(labels)}; it must return one value "
                "per sample or label, or their sum as a single number"
            )
        if found.ndim > 1 and isinstance(labels, Tensor) and not labels.is_floating_point():
            found = found[labels != IGNORE]
        return float(found.double().sum()), found.numel() if found.ndim else int(count)

    def after_round(self, run: Run, report: Report) -> Numbers | None:
        return None if run.score is None else {f"test_{self.label}": run.score.more[self.label]}


def top5(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return whether the label is among the five largest logits, per label."""
    if labels.is_floating_point() or outputs.shape[-1] <= 5:
        raise ValueError("top5 needs classes, and more than five of them")
    return (outputs.topk(5, -1).indices == labels.unsqueeze(-1)).any(-1)

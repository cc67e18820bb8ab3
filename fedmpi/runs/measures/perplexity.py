"""The perplexity of the test set: exp of the mean loss per label that counts."""

from __future__ import annotations

import math

from ...data.objective import cross_entropy
from ...errors import UserError
from ...rounds import Report
from .base import Measure, Numbers, Run


class Perplexity(Measure):
    """exp(test_loss), in scored rounds; None if the model has diverged."""

    def prepare(self, run: Run) -> None:
        if run.task.goal.loss is not cross_entropy:
            raise UserError(
                f"--evaluate perplexity is of a cross entropy, and the loss of '{run.data.name}' is that of "
                f"{run.task.goal.name}; leave it out"
            )

    def after_round(self, run: Run, report: Report) -> Numbers | None:
        if run.score is None:
            return None
        loss = run.score.loss
        return {"test_perplexity": math.exp(loss) if loss < 700 else None}  # false for NaN, too

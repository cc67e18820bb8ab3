"""The test score of the clients that took part in the round, and of the others (Tenison et al., TMLR 2023, tables 4 and
5)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ...cohort import draw
from ...data import Ints, Partition
from ...errors import UserError
from ...plugins import users_code
from ...rounds import Plan, Report
from .base import Measure, Numbers, Run


class Holdings:
    """How many samples of which class clients have of their own: a row per client and class that it has, so that a
    million clients cost megabytes."""

    def __init__(self, partition: Partition, labels: Ints, kinds: int) -> None:
        owner = np.repeat(np.arange(partition.clients), np.diff(partition.offsets))
        cells, self.count = np.unique(owner * kinds + labels[partition.order], return_counts=True)
        self.clients, self.client, self.kind = partition.clients, cells // kinds, cells % kinds

    def means(self, classes: Sequence[float], took_part: Iterable[int]) -> dict[str, float | None]:
        """Return the mean score of the clients that took part and of the others; None where there are none.

        A client's test set is the test set in its own mix of classes: its score is the mean of the scores of the
        classes, weighted by its samples of each. Classes that the test set does not have (NaN) are left out, and so is
        a client that has no others.
        """
        score = np.asarray(classes)[self.kind]
        known = np.isfinite(score)
        client, count = self.client[known], self.count[known]
        size = np.bincount(client, weights=count, minlength=self.clients)
        total = np.bincount(client, weights=count * score[known], minlength=self.clients)
        inside = np.zeros(self.clients, dtype=bool)
        inside[list(took_part)] = True
        sides = {"participating": inside & (size > 0), "others": ~inside & (size > 0)}
        return {
            side: float((total[those] / size[those]).mean()) if those.any() else None for side, those in sides.items()
        }


class ClientScores(Measure):
    """The mean test score of both sides, each client by its own mix of classes, in scored rounds."""

    def prepare(self, run: Run) -> None:
        labels = run.data.class_labels(needed=True)
        if labels is None:
            raise UserError(
                f"--evaluate clients goes by class, and '{run.data.name}' has numbers for labels; leave clients out"
            )
        what = "--evaluate clients scores the samples of a class by themselves, which"
        with users_code(what, " for the outputs of the model; leave clients out"):
            next(run.task.score([slice(0, 2)], by_class=True))
        self.holdings = Holdings(run.task.partition, labels, run.data.kinds)
        run.classes = run.data.kinds

    def after_round(self, run: Run, report: Report) -> Numbers | None:
        if run.score is None:
            return None
        took = took_part(report, run.plan, run.task.partition)
        return {f"clients_{run.task.goal.metric}": self.holdings.means(run.score.classes, took)}


def took_part(report: Report, plan: Plan, partition: Partition) -> set[int]:
    """Return the clients whose updates were used in a round."""
    drawn = draw(plan.seed, report.round, partition.sizes, plan.cohort, 1, at_home=True)
    return set(drawn.cids) - set(report.dropped)

"""The test score of the clients that took part in the round, and of the others (Tenison et al., TMLR 2023, tables 4 and
5). Clients with private parameters are scored with their own."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from ...cohort import draw
from ...data import Ints, Partition
from ...errors import UserError
from ...flat import tiles
from ...local import PRIVATE
from ...plugins import users_code
from ...rounds import Plan, Report
from .base import Measure, Numbers, Run
from .score import UNIT, readable

Floats = npt.NDArray[np.float64]


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
        return self.sides(self.scores(classes), took_part)

    def scores(self, classes: Sequence[float]) -> Floats:
        """Return the score of each client; NaN for one without a score."""
        score = np.asarray(classes)[self.kind]
        known = np.isfinite(score)
        client, count = self.client[known], self.count[known]
        size = np.bincount(client, weights=count, minlength=self.clients).astype(float)
        total = np.bincount(client, weights=count * score[known], minlength=self.clients).astype(float)
        return mean_of_each(total, size)

    def sides(self, scores: Floats, took_part: Iterable[int]) -> dict[str, float | None]:
        """Return the mean score of both sides."""
        inside = np.zeros(self.clients, dtype=bool)
        inside[list(took_part)] = True
        sides = {"participating": inside & ~np.isnan(scores), "others": ~inside & ~np.isnan(scores)}
        return {side: float(scores[those].mean()) if those.any() else None for side, those in sides.items()}


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
        took, scores = took_part(report, run.plan, run.task.partition), self.holdings.scores(run.score.classes)
        if len(run.task.private):
            self.score_own(run, scores)
        return {f"clients_{run.task.goal.metric}": self.holdings.sides(scores, took)}

    def score_own(self, run: Run, scores: Floats) -> None:
        """Replace the scores of the clients that have private parameters of their own, each scored by the rank that
        owns its memory: as many passes over the test set as there are such clients."""
        units = torch.zeros(2, len(scores), dtype=torch.int64)  # the score of each, and a 1 where it has one
        blocks = list(tiles(0, len(run.task.tests), run.cfg.eval.batch))
        for cid in run.state.memory:
            run.task.load(run.state.model_N, run.state.ints, run.state.memory.read(cid)[PRIVATE])
            classes = np.zeros((2, run.classes))
            for scored in readable(run.task.score(blocks, by_class=True), "test"):
                for kind, (total, labels) in scored.classes.items():
                    classes[:, kind] += total, labels
            score = self.holdings.scores(mean_of_each(*classes).tolist())[cid]
            if np.isfinite(score):
                units[:, cid] = torch.tensor([round(score * UNIT), 1])
        run.comm.sum(units)
        sums, own = units.numpy()
        scores[own > 0] = sums[own > 0] / UNIT


def mean_of_each(totals: Floats, counts: Floats) -> Floats:
    """Return totals / counts; NaN where nothing was counted."""
    means = np.full(len(totals), np.nan)
    means[counts > 0] = totals[counts > 0] / counts[counts > 0]
    return means


def took_part(report: Report, plan: Plan, partition: Partition) -> set[int]:
    """Return the clients whose updates were used in a round."""
    drawn = draw(plan.seed, report.round, partition.sizes, plan.cohort, 1)
    return set(drawn.cids) - set(report.dropped)

"""The score on samples that the model was trained on, to compare with the test score (Tenison et al., TMLR 2023, figure
3a)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...clients.task import choose_tests
from ...data import Partition
from ...rounds import Report
from .base import Measure, Numbers, Run
from .score import add_up, readable


class Gap(Measure):
    """Metric and loss on train samples, in scored rounds."""

    def prepare(self, run: Run) -> None:
        self.samples = choose_train(run.task.partition, len(run.task.tests))

    def after_round(self, run: Run, report: Report) -> Numbers | None:
        if run.score is None:
            return None
        run.task.load(run.state.model_N, run.state.ints)
        mine = torch.split(self.samples, run.cfg.eval.batch)[run.comm.rank :: run.comm.size]
        score = add_up(readable(run.task.score_train(mine), "train"), run.comm)
        return {f"train_{run.task.goal.metric}": score.metric, "train_sample_loss": score.loss}


def choose_train(partition: Partition, wanted: int) -> Tensor:
    """Return as many train samples that clients have as are wanted, or all, always the same ones."""
    pool = torch.from_numpy(np.concatenate([partition.order, partition.shared]))
    return pool[choose_tests(len(pool), wanted)]

"""Stochastic gradient descent with momentum, or AdamW: the client of FedAvg (McMahan et al., 2017)."""

from __future__ import annotations

import torch

from ..schedules import Rate
from .descent import Descent
from .job import Job, LocalResult, LocalRule


def sgd(lr: float | Rate, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None) -> LocalRule:
    """Return SGD with momentum (zero at the start of every round), weight decay and clipped gradients."""
    return plain(Descent(lr, momentum, weight_decay, clip))


def plain(descent: Descent, in_place: bool = False) -> LocalRule:
    """Return the rule that descends and sends where that led. With `in_place`, the delta takes the place of `job.x_P`,
    unless that is still needed or the momentum was in `job.delta_P`: memory that nothing writes to takes no pages."""
    unwritten = in_place and (not descent.momentum or descent.other is not None)

    def run(job: Job) -> LocalResult:
        descent.run(job)
        into_P = job.x_P if unwritten and not job.private else job.delta_P
        return LocalResult(torch.sub(job.x_P, job.start_P, out=into_P))

    return LocalRule(run)

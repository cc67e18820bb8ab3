"""Stochastic gradient descent with momentum, or AdamW: the client of FedAvg (McMahan et al., 2017)."""

from __future__ import annotations

import torch

from ..schedules import Rate
from .descent import Descent
from .job import Job, LocalResult, LocalRule


def sgd(lr: float | Rate, momentum: float = 0.0, weight_decay: float = 0.0, clip: float | None = None) -> LocalRule:
    """Return SGD with momentum (zero at the start of every round), weight decay and clipped gradients."""
    return plain(Descent(lr, momentum, weight_decay, clip))


def plain(descent: Descent) -> LocalRule:
    """Return the rule that descends and sends where that led."""

    def run(job: Job) -> LocalResult:
        descent.run(job)
        return LocalResult(torch.sub(job.x_P, job.start_P, out=job.delta_P))

    return LocalRule(run)

"""FedProx (Li et al., MLSys 2020): SGD pulled back towards the global model w with strength mu, so that a client with
much work does not run away: the loss gains mu / 2 * |x - w|^2. Uneven work is `--local.work`."""

from __future__ import annotations

import torch
from torch import Tensor

from .descent import Descent
from .job import Job, LocalResult, LocalRule


def prox(descent: Descent, mu: float) -> LocalRule:
    """Return SGD whose gradient gains mu * (x - w); mu = 0 is SGD, bit for bit."""

    def run(job: Job) -> LocalResult:
        def pull(g_P: Tensor, x_P: Tensor) -> None:
            g_P.add_(x_P - job.start_P, alpha=mu)

        descent.run(job, pull if mu else None)
        return LocalResult(torch.sub(job.x_P, job.start_P, out=job.delta_P))

    return LocalRule(run)

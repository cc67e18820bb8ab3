"""Stochastic gradient descent with momentum: the client of FedAvg (McMahan et al., 2017)."""

from __future__ import annotations

import torch

from .job import Job, LocalResult, LocalRule


def sgd(lr: float, momentum: float = 0.0, weight_decay: float = 0.0) -> LocalRule:
    """SGD with momentum rho (zero at the start of every round) and weight decay."""

    def run(job: Job) -> LocalResult:
        x_P = job.x_P
        v_P = torch.zeros_like(x_P)
        for batch in job.batches():
            g_P = job.grad(x_P, batch)
            if weight_decay:
                g_P.add_(x_P, alpha=weight_decay)
            v_P.mul_(momentum).add_(g_P)
            x_P.sub_(v_P, alpha=lr)
        return LocalResult(torch.sub(x_P, job.start_P, out=job.delta_P))

    return run

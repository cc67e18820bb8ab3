"""The loop that the rules have in common: SGD with momentum, weight decay and clipping.

One step, with learning rate eta, momentum rho and weight decay l, from v = 0 in every round:

    g = clip(gradient) + l x,  changed by the rule's own pull;  v = rho v + g;  x = x - eta v
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..knobs import LocalKnobs
from ..schedules import Rate, as_rate
from .job import Job

Pull = Callable[[Tensor, Tensor], object]
"""(g_P, x_P): changes the gradient g_P in place before the step from x_P"""


@dataclass(frozen=True)
class Descent:
    """SGD as all rules run it."""

    lr: float | Rate
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None

    @classmethod
    def of(cls, knobs: LocalKnobs) -> Descent:
        """Return the descent of a rule with these knobs."""
        return cls(knobs.lr, knobs.momentum, knobs.weight_decay, knobs.clip)

    def rate(self, job: Job) -> float:
        """Return the learning rate of the job's round."""
        return as_rate(self.lr)(job.round)

    def run(self, job: Job, pull: Pull | None = None) -> Stepped:
        """Train `job.x_P` over the job's batches. The momentum is in `job.delta_P` meanwhile: page faults on fresh
        memory of a large model cost more than a step's arithmetic on it."""
        lr, v_P, g_P, steps = self.rate(job), None, None, 0
        for batch in job.batches():
            g_P = self.gradient(job, batch, pull)
            if self.momentum:  # from zero: the first gradient is the first v
                v_P = job.delta_P.copy_(g_P) if v_P is None else torch.add(g_P, v_P, alpha=self.momentum, out=v_P)
            job.x_P.sub_(g_P if v_P is None else v_P, alpha=lr)
            steps += 1
        return Stepped(steps, g_P)

    def step(self, job: Job, batch: Any, v_P: Tensor, lr: float) -> None:
        """Take one step of `job.x_P` and the momentum v_P, in place. (torch's fused step takes no less time.)"""
        torch.add(self.gradient(job, batch), v_P, alpha=self.momentum, out=v_P)
        job.x_P.sub_(v_P, alpha=lr)

    def gradient(self, job: Job, batch: Any, pull: Pull | None = None) -> Tensor:
        """Return the gradient at `job.x_P` as a step uses it."""
        g_P = self.shape(job.grad(job.x_P, batch), job.x_P)
        if pull is not None:
            pull(g_P, job.x_P)
        return g_P

    def shape(self, g_P: Tensor, x_P: Tensor) -> Tensor:
        """Clip the gradient to norm `clip` and add the weight decay, in place."""
        if self.clip is not None:
            g_P.mul_(clipping(g_P, self.clip))
        if self.weight_decay:
            g_P.add_(x_P, alpha=self.weight_decay)
        return g_P

    def weight(self, steps: int) -> float:
        """Return how many plain gradients that many steps add up to, |a|_1 of FedNova: x_K - x_0 = -lr * sum a_k g_k.
        Through the momentum the last gradient counts 1, the one before 1 + rho, and so on."""
        rho = self.momentum
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else float(steps)


class Stepped(NamedTuple):
    """What a descent returns besides x_P."""

    steps: int
    last_P: Tensor | None  # the gradient of the last step as it was used, valid until the next call of `grad`


def clipping(g_P: Tensor, most: float) -> Tensor:
    """Return the factor, at most 1, that brings a gradient's norm down to `most`. A tensor: nothing waits for a GPU."""
    factor: Tensor = most / torch.linalg.vector_norm(g_P).clamp_min(1e-30)
    return factor.clamp_max(1.0)


def whole_gradient(job: Job, x_P: Tensor, counted: bool = False) -> Tensor:
    """Return the gradient of the client's whole loss at x_P, in memory of its own. Unless it is `counted` as training
    it leaves no trace in buffers and loss."""
    total_P = torch.zeros_like(x_P)
    with nullcontext() if counted else job.without_side_effects():
        for batch, share in job.everything():
            total_P.add_(job.grad(x_P, batch), alpha=share)
    return total_P

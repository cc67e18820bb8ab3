"""Unbiased gradient aggregation (Yao et al., 2019, section 3.1 and algorithm 1).

A client takes the steps of its first E - 1 epochs, w -> w_n = h(w), and then evaluates its whole loss there. What it
sends is the gradient of that loss with respect to the **global** w, through all the steps:

    delta_n = - d L(h(w)) / d w

Clients' gradients are then derivatives at the same point and can be averaged without bias. The server's learning rate
is the paper's eta_g. With E = 1 there are no steps, and this is one step of gradient descent on all of the data.
(`--local.steps K` asks for K steps before the evaluation.)

The steps are differentiated backwards, one at a time. For one step v' = rho v + g(x) + l x, x' = x - eta v', with a =
dL/dx' and b = dL/dv' of what comes after:

    u = b - eta a;   dL/dx = a + (H(x) + l) u;   dL/dv = rho u

where H u is a product with the second derivative of that batch's loss at x, by a graph of one step alone
(`Job.linearise`). So memory does not grow with the steps but for the points x themselves, and of those only every s-th
is kept where they are many; the others are computed again on the way back. The paper's steps are plain gradient
descent; momentum, decay and clipping are followed exactly where they are asked for. The gradient that comes out can be
very long where the loss is sharply curved, as a product of many steps' derivatives: `--local.clip_update` bounds it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .descent import Descent, clipping, whole_gradient
from .job import Job, LocalResult, LocalRule

TRACE_BYTES = 256 << 20


def uga(descent: Descent, trace_bytes: int = TRACE_BYTES) -> LocalRule:
    """Return a rule that sends the gradient of the client's loss after its steps, with respect to their start."""

    descent.needs_sgd("UGA differentiates the steps of SGD")

    def run(job: Job) -> LocalResult:
        trace = Trace(descent, job, trace_bytes)
        trace.forward()
        a_P = whole_gradient(job, job.x_P, counted=True)  # the last epoch
        with job.without_side_effects():
            gradient_P = trace.backward(a_P)
        return LocalResult(torch.neg(gradient_P, out=job.delta_P))

    return LocalRule(run, trains=False)


class Trace:
    """The steps of one client, kept so that they can be differentiated backwards: cut into segments, with (x, v) at the
    beginning of each and the points of one segment at a time."""

    def __init__(self, descent: Descent, job: Job, trace_bytes: int) -> None:
        self.descent, self.job, lr = descent, job, descent.rate(job)
        self.steps: list[tuple[list[Any], float]] = [(b, lr * f) for b, f in descent.steps_of(job, leave=1)]
        fits = trace_bytes // max(job.x_P.nbytes, 1)
        self.length = max(min(fits, len(self.steps)), math.isqrt(max(len(self.steps) - 1, 0)) + 1)
        self.begins: list[tuple[Tensor, Tensor]] = []
        self.points: list[Tensor] = []

    def forward(self) -> None:
        """Take all steps."""
        v_P = torch.zeros_like(self.job.x_P)
        for first in range(0, len(self.steps), self.length):
            self.begins.append((self.job.x_P.clone(), v_P.clone()))
            self.walk(first, v_P)

    def walk(self, first: int, v_P: Tensor) -> None:
        """Take the steps of one segment from job.x_P and v_P, in place, keeping its points."""
        self.points = []
        for batches, lr in self.steps[first : first + self.length]:
            self.points.append(self.job.x_P.clone())
            torch.add(self.descent.gradient(self.job, batches), v_P, alpha=self.descent.momentum, out=v_P)
            self.job.x_P.sub_(v_P, alpha=lr)

    def backward(self, a_P: Tensor) -> Tensor:
        """Turn the derivative with respect to the end of the steps into that with respect to their start, in place."""
        b_P = torch.zeros_like(a_P)
        for number in reversed(range(len(self.begins))):
            first = number * self.length
            if number < len(self.begins) - 1:  # the points of the last segment are still there
                x_P, v_P = self.begins[number]
                self.job.x_P.copy_(x_P)
                self.walk(first, v_P)
            for batches, lr in reversed(self.steps[first : first + self.length]):
                self.job.x_P.copy_(self.points.pop())
                self.step_back(batches, lr, a_P, b_P)
        return a_P

    def step_back(self, batches: list[Any], lr: float, a_P: Tensor, b_P: Tensor) -> None:
        """Go back one step, which began at job.x_P: from dL/dx', dL/dv' to dL/dx, dL/dv, in place."""
        u_P = b_P.sub_(a_P, alpha=lr)
        linear = [self.job.linearise(batch) for batch in batches]
        g_P = linear[0][0] if len(linear) == 1 else torch.stack([g_P for g_P, _ in linear]).mean(0)
        unclipped_P = unclip(g_P, u_P, self.descent.clip)
        for _, times_hessian in linear:
            a_P.add_(times_hessian(unclipped_P), alpha=1 / len(batches))
        if self.descent.weight_decay:
            a_P.add_(u_P, alpha=self.descent.weight_decay)
        b_P.mul_(self.descent.momentum)


def unclip(g_P: Tensor, u_P: Tensor, most: float | None) -> Tensor:
    """Return the transposed derivative of clipping the gradient g to a norm, applied to u."""
    if most is None:
        return u_P
    size = torch.linalg.vector_norm(g_P)
    if float(size) <= most:
        return u_P
    along_P = g_P / size
    across_P: Tensor = u_P - along_P * torch.dot(along_P, u_P)
    return across_P.mul_(clipping(g_P, most))

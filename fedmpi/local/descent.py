"""The loop that the rules have in common: SGD with momentum, weight decay and clipping, or another optimizer.

One step of SGD, with learning rate eta, momentum rho and weight decay l, from v = 0 in every round:

    g = clip(gradient) + l x,  changed by the rule's own pull;  v = rho v + g;  x = x - eta v

The gradient is the mean over `accumulate` batches; eta may follow a schedule over the steps of the round. Another
optimizer (optimizers.py) gets the clipped and pulled gradient, and decays weights in its own way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import UserError
from ..knobs import LocalKnobs
from ..schedules import Rate, as_rate, make_rate
from .job import Job, Piece
from .optimizers import OwnSteps, find_optimizer

Pull = Callable[[Tensor, Tensor], object]
"""(g_P, x_P): changes the gradient g_P in place before the step from x_P"""


@dataclass(frozen=True)
class Descent:
    """SGD as all rules run it, or another optimizer in its place."""

    lr: float | Rate
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float | None = None
    accumulate: int = 1
    schedule: str = "constant"  # over the steps of a round
    other: OwnSteps | None = None

    def __post_init__(self) -> None:
        self.factors(1)  # refuses a wrong schedule

    @classmethod
    def of(cls, knobs: LocalKnobs) -> Descent:
        """Return the descent of a rule with these knobs."""
        other = find_optimizer(knobs.optimizer, knobs)
        return cls(
            knobs.lr, knobs.momentum, knobs.weight_decay, knobs.clip, knobs.accumulate, knobs.step_schedule, other
        )

    def rate(self, job: Job) -> float:
        """Return the learning rate of the job's round."""
        return as_rate(self.lr)(job.round)

    def factors(self, steps: int) -> Rate:
        """Return the factor of the learning rate in step 1, 2, ... of that many."""
        return make_rate("--local.step_schedule", self.schedule, 1.0, steps, unit="steps")

    def steps_of(self, job: Job, leave: int = 0) -> Iterator[tuple[list[Any], float]]:
        """Yield the batches of each step, and the factor of its learning rate."""
        steady = self.schedule == "constant"
        factor = self.factors(1 if steady else -(-job.steps(leave) // self.accumulate))
        for number, batches in enumerate(grouped(job.batches(leave), self.accumulate), 1):
            yield batches, factor(number)

    def run(self, job: Job, pull: Pull | None = None, last: bool = False) -> Stepped:
        """Train `job.x_P` over the job's batches; return the last gradient if it is asked for."""
        lr, factors, g_P = self.rate(job), list[float](), None
        other = None if self.other is None else self.other.begin(job, lr)
        changed = pull is not None or self.clip is not None or self.weight_decay or self.accumulate > 1
        for batches, factor in self.steps_of(job):
            if other is None and not changed and not last:
                pieces = job.pieces(batches[0])
            else:
                g_P = self.gradient(job, batches, pull)
                pieces = [Piece(slice(0, len(g_P)), g_P)]
            if other is None:
                self.step(job, pieces, lr * factor, first=not factors)
            else:
                other(pieces[0].g, factor)
            factors.append(factor)
            del pieces  # of a large model: before there are the next ones
        return Stepped(g_P, factors)

    def step(self, job: Job, pieces: Iterable[Piece], lr: float, first: bool) -> None:
        """Take a step of SGD, in place. The momentum is in `job.delta_P` meanwhile: page faults on fresh memory of a
        large model cost more than a step's arithmetic on it. Pieces of a gradient pass the cache once."""
        for at, g in pieces:
            v = job.delta_P[at] if self.momentum else g
            if self.momentum and first:  # from zero: the first gradient is the first v
                v.copy_(g)
            elif self.momentum:
                torch.add(g, v, alpha=self.momentum, out=v)
            job.x_P[at].sub_(v, alpha=lr)

    def gradient(self, job: Job, batches: Sequence[Any], pull: Pull | None = None) -> Tensor:
        """Return the mean gradient of the batches at `job.x_P` as a step uses it."""
        g_P = job.grad(job.x_P, batches[0])
        if len(batches) > 1:
            g_P = g_P.clone()
            for batch in batches[1:]:
                g_P.add_(job.grad(job.x_P, batch))
            g_P.div_(len(batches))
        self.shape(g_P, job.x_P)
        if pull is not None:
            pull(g_P, job.x_P)
        return g_P

    def shape(self, g_P: Tensor, x_P: Tensor) -> Tensor:
        """Clip the gradient to norm `clip` and add the weight decay of SGD, in place."""
        if self.clip is not None:
            g_P.mul_(clipping(g_P, self.clip))
        if self.weight_decay and self.other is None:
            g_P.add_(x_P, alpha=self.weight_decay)
        return g_P

    def weight(self, factors: Sequence[float]) -> float:
        """Return how many plain gradients steps with these factors add up to, |a|_1 of FedNova: x_K - x_0 = -lr * sum
        a_k g_k. With a constant rate, the last gradient counts 1, the one before 1 + rho through the momentum, ..."""
        rho, steps = self.momentum, len(factors)
        if self.schedule != "constant":
            return sum(f * (1 - rho**k) / (1 - rho) for k, f in enumerate(factors, 1))
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho) if rho else float(steps)

    def needs_sgd(self, why: str) -> None:
        """Refuse another optimizer than SGD."""
        if self.other is not None:
            raise UserError(f"--local.optimizer is {self.other.name}, and {why}; use sgd, or another --local.rule")


class Stepped(NamedTuple):
    """What a descent returns besides x_P."""

    last_P: Tensor | None  # the gradient of the last step as it was used, valid until the next call of `grad`
    factors: list[float]  # of the learning rate, in each step

    @property
    def steps(self) -> int:
        """Return how many steps were taken."""
        return len(self.factors)


def grouped(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield that many batches at a time; the last group may be short."""
    waiting = iter(batches)
    while group := list(islice(waiting, size)):
        yield group


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

"""torch's optimizers for a client's steps, beside the SGD of `descent.py`: AdamW, and any other by its import path.

Every client starts with a new one in every round, so that its result depends on nothing but its round. One that treats
every element by itself takes the whole vector as one tensor, in a few kernels; others (Muon, Adafactor) get the
parameters in their shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..errors import UserError, raised, unknown
from ..knobs import OPTIMIZERS, LocalKnobs
from ..plugins import call_with, import_path

if TYPE_CHECKING:
    from .job import Job

Advance = Callable[[Tensor, float], object]
"""(g_P, factor): takes one step of a job's x_P with the gradient g_P and the learning rate times the factor"""


@dataclass(frozen=True)
class OwnSteps:
    """How an optimizer takes the steps of a client."""

    name: str
    make: Callable[[list[Tensor], float], Optimizer]  # (parameters, learning rate)
    flat: bool  # whether it treats every element by itself

    def begin(self, job: Job, lr: float) -> Advance:
        """Return what takes a step of `job.x_P`, with fresh moments."""
        x = [job.x_P.detach()] if self.flat else job.tensors(job.x_P)  # other tensors in the same memory
        optimizer = self.make(x, lr)
        rates = [group["lr"] for group in optimizer.param_groups]

        def step(g_P: Tensor, factor: float) -> None:
            for one, g in zip(x, [g_P] if self.flat else job.tensors(g_P), strict=True):
                one.grad = g
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimizer.step()

        return step


def find_optimizer(name: str, knobs: LocalKnobs) -> OwnSteps | None:
    """Return the steps of the optimizer of that name or import path; None for the SGD of all rules."""
    if name == "sgd":
        return None
    if name == "adamw":
        betas, eps, decay = (knobs.b1, knobs.b2), knobs.eps, knobs.weight_decay

        def adamw(x: list[Tensor], lr: float) -> Optimizer:
            return torch.optim.AdamW(x, lr, betas, eps, decay, fused=True)

        return OwnSteps(name, adamw, flat=True)
    if ":" not in name:
        raise unknown("--local.optimizer", name, OPTIMIZERS, own=True)
    own = import_path("optimizer", name)

    def call(x: list[Tensor], lr: float) -> Optimizer:
        offers = {"params": x, "lr": lr, "weight_decay": knobs.weight_decay}
        made = call_with("optimizer", name, own, offers)
        if not isinstance(made, Optimizer):
            what = f"optimizer '{name}' returned {type(made).__name__}"
            raise UserError(f"{what}; it must be a torch.optim.Optimizer, or a function (params, lr) that returns one")
        return made

    if not callable(own):
        raise UserError(f"optimizer '{name}' is {type(own).__name__}; it must be a class or a function (params, lr)")
    return OwnSteps(name, call, is_elementwise(name, call))


def is_elementwise(name: str, make: Callable[[list[Tensor], float], Optimizer]) -> bool:
    """Return whether an optimizer does to one vector what it does to the matrices that are cut from it."""
    rng = torch.Generator().manual_seed(0)
    start, gradients = (torch.randn(n, 16, generator=rng, dtype=torch.float64) for n in (1, 3))

    def after(*shapes: tuple[int, ...]) -> Tensor:
        x, size = start[0].clone(), 16 // len(shapes)
        views = [part.view(shape) for part, shape in zip(torch.split(x, size), shapes, strict=True)]
        optimizer = make(views, 0.1)
        for g in gradients:
            for view, part in zip(views, torch.split(g, size), strict=True):
                view.grad = part.view(view.shape)
            optimizer.step()
        return x

    try:
        cut = after((2, 4), (4, 2))
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        fix = "give one that needs gradients alone: no closure, no sparse ones"
        raise UserError(f"optimizer '{name}' raised {raised(error)} when it was tried; {fix}") from error
    try:
        return torch.allclose(after((16,)), cut, rtol=1e-9, atol=1e-12)
    except Exception:  # as Muon does, which takes matrices only
        return False

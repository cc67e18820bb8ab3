"""How a client's step is computed: the layout in memory, the precision, compiled or not, several clients at once.

The defaults are what wins nearly everywhere (benchmarks/step.py). None of it is chosen by a clock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import UserError, one_line
from .feed import Pair

if TYPE_CHECKING:
    from .task import Task



@dataclass(frozen=True)
class Path:
    """How the model is called in training."""

    precision: str = "float32"
    """float32, or bf16: under autocast, with parameters, outputs and gradients in float32 all the same"""
    compile: str = "none"
    """none, or a mode of torch.compile"""

    @property
    def uncompiled(self) -> Path:
        """The same, not compiled: for second derivatives, which compiled code does not have."""
        return replace(self, compile="none")

    def forward(self, model: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """The model as training calls it."""
        call = model if self.compile == "none" else compiled(model, self.compile)
        if self.precision == "float32":
            return call

        def forward(*given: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                outputs = call(*given)
            return outputs.float() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs

        return forward


PLAIN = Path()


def compiled(model: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """The model behind torch.compile: built at its first call, and once more for the first batch of another length."""
    try:
        return torch.compile(model, mode=mode)
    except RuntimeError as error:
        raise UserError(f"--step.compile is {mode}, but torch.compile: {one_line(error)}; leave it out") from error


def try_path(task: Task, name: str, samples: Pair, batch: int) -> None:
    """Refuse a path that the model does not take, before anything has started; the model stays as it is."""
    if task.path == PLAIN:
        return
    start = task.start()
    x, y = (several(t, batch).to(task.device) for t in samples)
    task.model.train()
    try:
        torch.autograd.backward(task.goal.loss(task.forward(x), y, "mean"))
    except Exception as error:
        options = [f"--step.precision {task.path.precision}"] * (task.path.precision != "float32")
        options += [f"--step.compile {task.path.compile}"] * (task.path.compile != "none")
        hint = " (on a CPU a C++ compiler is needed: g++, or what CXX names)" if task.path.compile != "none" else ""
        raise UserError(
            f"model '{name}' cannot be trained with {' and '.join(options)}: {type(error).__name__}: "
            f"{one_line(error)}{hint}; leave it out"
        ) from error
    task.load(*start)


def several(some: Tensor, count: int) -> Tensor:
    """A few samples over and over, until there are that many."""
    return some.repeat(-(-count // len(some)), *[1] * (some.dim() - 1))[:count]

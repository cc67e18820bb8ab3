"""Execution modes: the precision of a client's step, and whether the model is compiled.

The defaults are the fastest nearly everywhere (benchmarks/step.py). No mode is chosen by timing, so bits do not depend
on the load of a machine.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..data.trees import mapped
from ..device import out_of_memory
from ..errors import UserError, one_line
from .feed import Pair
from .still import changes_still

if TYPE_CHECKING:
    from .task import Task


@dataclass(frozen=True)
class Mode:
    """How training calls the model."""

    precision: str = "float32"  # tf32, or bf16: autocast of the forward pass; parameters and gradients stay float32
    compile: str = "none"  # or a mode of torch.compile

    @property
    def uncompiled(self) -> Mode:
        """Return the same mode without compilation: compiled code has no second derivatives."""
        return replace(self, compile="none")

    @property
    def options(self) -> str:
        """Return the command-line options that select this mode."""
        given = {"--step.precision": (self.precision, "float32"), "--step.compile": (self.compile, "none")}
        return " and ".join(f"{option} {value}" for option, (value, default) in given.items() if value != default)

    def forward(self, model: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
        """Return the model as training calls it."""
        call = without_cache(model if self.compile == "none" else compiled(model, self.compile), model)
        if self.precision != "bf16":
            return call

        def forward(*given: Any, **named: Any) -> Any:
            with torch.autocast(device.type, torch.bfloat16):
                outputs = call(*given, **named)
            return outputs.float() if isinstance(outputs, Tensor) and outputs.is_floating_point() else outputs

        return forward


def without_cache(call: Callable[..., Any], model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call of a model without the keys and values that a language model of transformers keeps to generate
    text: nobody reads them here."""
    inner: Any = model.get_base_model() if hasattr(model, "get_base_model") else model
    if not hasattr(inner, "config") or "use_cache" not in inspect.signature(inner.forward).parameters:
        return call
    return partial(call, use_cache=False)


PLAIN = Mode()


def compiled(model: Callable[..., Any], mode: str) -> Callable[..., Any]:
    """Return the compiled model. It is built at the first call, and again for the first batch of another length."""
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)  # tells the compiler as well
    try:
        return torch.compile(model, mode=mode)
    except RuntimeError as error:
        raise UserError(f"--step.compile is {mode}, but torch.compile: {one_line(error)}; leave it out") from error


def try_mode(task: Task, name: str, samples: Pair, batch: int) -> None:
    """Raise a UserError if the model cannot be trained in the task's mode, or on an accelerator at all: some of its
    kernels are not deterministic; or if training changes what is frozen. The model is left unchanged."""
    if task.mode == PLAIN and task.device.type == "cpu" and not task.still:
        return
    start = task.start()
    x, y = (mapped(lambda t: repeat(t, batch).to(task.device), tree) for tree in samples)
    task.model.train()
    try:
        torch.autograd.backward(task.mean_loss(x, y))
    except Exception as error:
        hint = "" if task.mode.compile == "none" else " (on a CPU torch.compile needs a C++ compiler: g++, or set CXX)"
        how, fix = f"with {task.mode.options}" if task.mode.options else f"on {task.device}", "leave it out"
        if out_of_memory(error):
            fix = f"lower --local.batch, which is {batch}"
        elif "deterministic" in str(error):
            fix = "add --deterministic false (the same seed may then give other bits), or use another model"
        elif not task.mode.options:
            fix = "use another model, or --device cpu"
        raise UserError(
            f"model '{name}' cannot be trained {how}: {type(error).__name__}: {one_line(error)}{hint}; {fix}"
        ) from error
    task.model.zero_grad()
    task.load(*start)
    if task.still.written:
        raise UserError(f"model '{name}': {changes_still(task.still.written)}")


def repeat(samples: Tensor, count: int) -> Tensor:
    """Repeat samples until there are `count` of them."""
    return samples.repeat(-(-count // len(samples)), *[1] * (samples.dim() - 1))[:count]

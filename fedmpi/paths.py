"""How a client's step is computed: the layout in memory, the precision, compiled or not, several clients at once.

The defaults are what wins nearly everywhere (benchmarks/step.py). None of it is chosen by a clock but the layout, and
that only where `--step.layout try` asks for it: then rank 0's choice is that of all, and goes into config.yaml.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .config import Step
from .errors import UserError
from .feed import Pair
from .plugins import one_line

if TYPE_CHECKING:
    from .task import Task
    from .work import Work

TRIALS = 7  # timed steps of each layout; the median counts


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


def describe(step: Step, by_hand: bool = False) -> str:
    """The path in words, for the head of a run."""
    words = [step.layout, step.precision] + ["gradient by hand"] * by_hand
    words += [f"compiled ({step.compile})"] if step.compile != "none" else []
    words += [f"{step.together} clients at once"] if step.together > 1 else []
    return ", ".join(words)


def check_step(step: Step) -> None:
    """Refuse what does not go together."""
    if step.together > 1 and step.compile != "none":
        raise UserError(
            f"--step.together is {step.together} and --step.compile is {step.compile}; a stacked model is not "
            "compiled: leave one of them out"
        )


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


def faster_layout(make: Callable[[str], Task], work: Work) -> str:
    """The layout with which a few steps on the largest client's data take less time: `make` makes the task of one."""
    names = ("contiguous", "channels_last")
    tasks = {name: make(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cid = int(tasks[names[0]].partition.sizes.argmax())
    try:
        batches = {name: next(iter(task.job(*task.start(), 1, cid, work).batches())) for name, task in tasks.items()}
        for turn in range(TRIALS + 2):
            for name in names:
                started = time.perf_counter()
                tasks[name].gradient(batches[name])
                wait_for(tasks[name].device)
                if turn > 1:  # the first ones allocate
                    seconds[name].append(time.perf_counter() - started)
    except Exception as error:
        raise UserError(
            f"--step.layout is try, but a step of client {cid} raised {type(error).__name__}: {one_line(error)}; name "
            f"a layout instead: {' or '.join(names)}"
        ) from error
    return min(names, key=lambda name: sorted(seconds[name])[TRIALS // 2])


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)

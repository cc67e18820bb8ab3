"""CUDA graphs of a client's step (`--step.graphs`): a recorded forward and backward pass is one launch instead of one
per kernel, which is most of the time of a small model's step. The authors have had no GPU: this has run on the stand-in
of the tests only.

A graph has fixed addresses. The model's parameters, its buffers and the gradient have them anyway, as views of flat
vectors; a batch is copied into memory of its own. There is one graph per shape of a batch. Random layers draw from the
device's generator, whose seed is read at every replay.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..data.trees import Tree, leaves, mapped, structure, zipped
from ..device import module

WARM_UP = 3  # passes before a recording, in which libraries choose their kernels and allocate


class Recorded(NamedTuple):
    """A recorded step, and the memory that it reads and writes."""

    graph: Any
    x: Tree
    y: Tree
    loss: Tensor


class Graphs:
    """Replays a function of a batch that writes gradients and returns the loss. `buffers` are what it changes besides
    those: restored after a recording, which counts as no step."""

    def __init__(self, step: Callable[[Tree, Tree], Tensor], buffers: Callable[[], list[Tensor]]) -> None:
        self.step, self.buffers = step, buffers
        self.recorded: dict[object, Recorded] = {}

    def __call__(self, x: Tree, y: Tree) -> Tensor:
        """Return the loss of a batch."""
        shape = repr(structure((x, y)))
        if shape not in self.recorded:
            self.recorded[shape] = self.record(x, y)
        recorded = self.recorded[shape]
        zipped(Tensor.copy_, (recorded.x, recorded.y), (x, y))
        recorded.graph.replay()
        return recorded.loss.clone()

    def record(self, x: Tree, y: Tree) -> Recorded:
        """Record the step for batches of this shape."""
        device = next(leaves(x)).device
        accelerator = module(device)
        (x, y), kept = mapped(Tensor.clone, (x, y)), [buffer.clone() for buffer in self.buffers()]
        draws = accelerator.get_rng_state(device)
        side = accelerator.Stream(device)
        side.wait_stream(accelerator.current_stream())
        with accelerator.stream(side):
            for _ in range(WARM_UP):
                self.step(x, y)
        accelerator.current_stream().wait_stream(side)
        graph = accelerator.CUDAGraph()
        with accelerator.graph(graph):
            loss = self.step(x, y)
        torch._foreach_copy_(self.buffers(), kept)
        accelerator.set_rng_state(draws, device)
        return Recorded(graph, x, y, loss)

"""CUDA graphs on the pretend device: kernels are written down while they run once, and run again at every replay.

As on CUDA, a replay reads and writes the addresses of the recording, draws from the device's generator as it is then,
and is one launch. What makes the host wait cannot be recorded, nor can copies from or to the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import kernels
from .counting import counts
from .kernels import tensors_in
from .memory import alias


class CUDAGraph:
    """A recorded sequence of kernels."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], None]] = []

    def replay(self) -> None:
        """Run the kernels again."""
        with counts.one("graph"), torch.no_grad():
            for call in self.calls:
                call()


@contextlib.contextmanager
def graph(cuda_graph: CUDAGraph) -> Iterator[None]:
    """Record the kernels of a block."""

    def note(run: Callable[[], Any], out: Any) -> None:
        cuda_graph.calls.append(lambda: deliver(run(), out))

    kernels.recorder = note
    try:
        yield
    finally:
        kernels.recorder = None


def deliver(found: Any, out: Any) -> None:
    """Write the results of a kernel to where they were in the recording."""
    for new, old in zip(tensors_in(found), tensors_in(out), strict=True):
        if new.data_ptr() != old.data_ptr():
            alias(old).copy_(alias(new))

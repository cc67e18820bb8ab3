"""Ranks as threads of one process: for tests, and for reading what the verbs mean.

Rows travel through one queue for each ordered pair of ranks; a row is copied when it is sent, as a wire would.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import RunError
from .base import Comm

T = TypeVar("T")


class World:
    """What the threads share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.boxes = {(a, b): queue.SimpleQueue[Tensor]() for a in range(size) for b in range(size)}
        self.meeting = threading.Barrier(size)
        self.aborted = threading.Event()


class ThreadComm(Comm):
    """One thread's end of a `World`."""

    name = "threads"

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world

    def _swap(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> None:
        if self.world.aborted.is_set():
            raise RunError("another rank aborted")
        for rank, x in send.items():
            self.world.boxes[self.rank, rank].put(x.clone())
        missing = []
        for rank, x in recv.items():
            try:
                x.copy_(self.world.boxes[rank, self.rank].get(timeout=self.world.timeout))
            except queue.Empty:
                missing.append(rank)
        if missing:
            raise RunError(f"no answer from ranks {missing} within {self.world.timeout:g} s")

    def _sum(self, x: Tensor) -> None:
        rows = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._swap({r: x for r in self.others}, {r: rows[r] for r in self.others})
        rows[self.rank] = x
        x.copy_(rows[0])
        for row in rows[1:]:
            x.add_(row)

    def _broadcast(self, x: Tensor, root: int) -> None:
        if self.rank == root:
            self._swap({r: x for r in self.others}, {})
        else:
            self._swap({}, {root: x})

    def barrier(self) -> None:
        try:
            self.world.meeting.wait(self.world.timeout)
        except threading.BrokenBarrierError:
            raise RunError(f"not every rank came within {self.world.timeout:g} s") from None

    def abort(self, code: int = 1) -> NoReturn:
        self.world.aborted.set()
        self.world.meeting.abort()
        raise SystemExit(code)


def run_threads(size: int, work: Callable[[Comm], T], timeout: float = 60.0) -> list[T]:
    """What `work(comm)` returned on each of `size` thread ranks; the first rank's error is raised if there was one."""
    world = World(size, timeout)
    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(work, ThreadComm(world, rank)) for rank in range(size)]
        return [future.result() for future in futures]

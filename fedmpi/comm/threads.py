"""Ranks as threads of one process: for tests, and as the simplest transport to read.

Rows are sent through one queue per ordered pair of ranks, and copied when they are sent, as on a network.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

import torch
from torch import Tensor

from ..errors import RunError
from .base import Comm, Wait

T = TypeVar("T")


class World:
    """The state that the threads share."""

    def __init__(self, size: int, timeout: float) -> None:
        self.size, self.timeout = size, timeout
        self.boxes = {(a, b): queue.SimpleQueue[Tensor]() for a in range(size) for b in range(size)}
        self.barrier = threading.Barrier(size)
        self.aborted = threading.Event()


class ThreadComm(Comm):
    """One thread's endpoint of a `World`."""

    name = "threads"

    def __init__(self, world: World, rank: int) -> None:
        super().__init__(rank, world.size)
        self.world = world
        self.awaited: dict[int, deque[Tensor]] = {r: deque() for r in range(world.size)}  # in start order

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        if self.world.aborted.is_set():
            raise RunError("another rank aborted")
        for rank, x in send.items():
            self.world.boxes[self.rank, rank].put(x.clone())
        for rank, x in recv.items():
            self.awaited[rank].append(x)

        def wait() -> None:
            missing = [rank for rank, x in recv.items() if not self._receive(rank, x)]
            if missing:
                raise RunError(f"no answer from ranks {missing} within {self.world.timeout:g} s")

        return wait

    def _receive(self, rank: int, until: Tensor) -> bool:
        """Receive from a rank up to the tensor `until`; return whether it arrived in time."""
        while any(x is until for x in self.awaited[rank]):
            try:
                received = self.world.boxes[rank, self.rank].get(timeout=self.world.timeout)
            except queue.Empty:
                return False
            self.awaited[rank].popleft()[: len(received)].copy_(received)  # it may be shorter than expected
        return True

    def _sum(self, x: Tensor) -> None:
        rows = torch.empty(self.size, *x.shape, dtype=x.dtype)
        self._start({r: x for r in self.others}, {r: rows[r] for r in self.others})()
        rows[self.rank] = x
        x.copy_(rows[0])
        for row in rows[1:]:
            x.add_(row)

    def _broadcast(self, x: Tensor, root: int) -> None:
        if self.rank == root:
            self._start({r: x for r in self.others}, {})()
        else:
            self._start({}, {root: x})()

    def barrier(self) -> None:
        try:
            self.world.barrier.wait(self.world.timeout)
        except threading.BrokenBarrierError:
            raise RunError(f"not all ranks reached a barrier within {self.world.timeout:g} s") from None

    def abort(self, code: int = 1) -> NoReturn:
        self.world.aborted.set()
        self.world.barrier.abort()
        raise SystemExit(code)


def run_threads(size: int, work: Callable[[Comm], T], timeout: float = 60.0) -> list[T]:
    """Run `work(comm)` on `size` thread ranks and return their results; raise the error of the first failed rank."""
    world = World(size, timeout)
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(world, rank))
        except BaseException as error:
            errors[rank] = error

    # No executor: processes that are forked in its threads, such as workers of a DataLoader, cannot end in good order.
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[min(errors)]
    return [results[rank] for rank in range(size)]

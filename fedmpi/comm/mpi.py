"""The MPI transport, over mpi4py: any MPI library with its own launcher.

Rows are non-blocking sends and receives, the small operations non-blocking collectives, so that a waiting rank can
check its timeout: MPI itself has none. Tensors are on the host, and passed without a copy. bfloat16 is sent as int16
and never summed here: MPI has no such type, and Open MPI silently sums it to garbage.

After a timeout each rank sends a byte to all others and listens for a few seconds: a silent rank is missing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..errors import RunError, UserError
from .base import ROLL_CALL_SECONDS, Comm, Wait
from .env import Place, check_mpi_world

if TYPE_CHECKING:
    from mpi4py import MPI

SPINS = 100  # polls before a waiting rank starts to yield its core


def import_mpi() -> Any:
    """Return mpi4py's MPI module; raise a `UserError` that says how to install an MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--comm mpi needs mpi4py and an MPI library, but: {error}; "
            "install one (pip install mpich, or your cluster's MPI module) or use --comm torch"
        ) from None
    return MPI


def import_world(place: Place) -> MPI.Comm:
    """Return MPI's world, after checking that it is the one that the launcher started."""
    world: MPI.Comm = import_mpi().COMM_WORLD
    check_mpi_world(place, world.Get_rank(), world.Get_size())
    return world


def bits(x: Tensor) -> Any:
    """Return a view of x as an array that MPI can send: bfloat16 as int16 with the same bits."""
    return (x.view(torch.int16) if x.dtype == torch.bfloat16 else x).detach().numpy()


def numbers(x: Tensor) -> Any:
    """Return a view of x as an array that MPI can sum."""
    if x.dtype == torch.bfloat16:
        raise UserError("bfloat16 cannot be summed over MPI, which has no such type; use float32 or --comm torch")
    return x.detach().numpy()


class MpiComm(Comm):
    """MPI's world, or another communicator of mpi4py."""

    name = "mpi"

    def __init__(self, world: MPI.Comm, timeout: float, ends_mpi: bool = False) -> None:
        self.MPI = import_mpi()
        self.world, self.line = world, world.Dup()  # roll calls on the first, operations on the second: never mixed up
        super().__init__(world.Get_rank(), world.Get_size())
        self.timeout, self.ends_mpi = timeout, ends_mpi

    def finish(self, requests: list[MPI.Request]) -> None:
        """Wait for all requests; after the timeout, raise a `RunError` that names the missing ranks."""
        spins, deadline = 0, time.monotonic() + self.timeout
        while not self.MPI.Request.Testall(requests):
            spins += 1
            if spins > SPINS:
                time.sleep(0)
                if time.monotonic() > deadline:
                    raise RunError(self.roll_call())

    def roll_call(self) -> str:
        """Return an error message with the ranks that are silent for a few seconds."""
        word = np.zeros(1, dtype=np.int8)
        for rank in self.others:
            self.world.Isend(word, rank)
        silent, deadline = set(self.others), time.monotonic() + ROLL_CALL_SECONDS
        while silent and time.monotonic() < deadline:
            status = self.MPI.Status()
            while self.world.Iprobe(self.MPI.ANY_SOURCE, self.MPI.ANY_TAG, status):
                self.world.Recv(word, status.Get_source(), status.Get_tag())
                silent.discard(status.Get_source())
            time.sleep(0.05)
        if not silent:
            return f"a rank of {self.size} was late by more than the timeout of {self.timeout:g} s; raise --timeout"
        which = ", ".join(map(str, sorted(silent)))
        return f"rank {which} of {self.size} did not answer: hung for longer than the timeout of {self.timeout:g} s"

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        requests = [self.line.Irecv(bits(x), source) for source, x in recv.items()]
        requests += [self.line.Isend(bits(x), to) for to, x in send.items()]
        return lambda: self.finish(requests)

    def _sum(self, x: Tensor) -> None:
        self.finish([self.line.Iallreduce(self.MPI.IN_PLACE, numbers(x))])

    def _broadcast(self, x: Tensor, root: int) -> None:
        self.finish([self.line.Ibcast(numbers(x), root)])

    def barrier(self) -> None:
        self.finish([self.line.Ibarrier()])

    def abort(self, code: int = 1) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(1)  # mpiexec drops output that it has not forwarded yet
        self.world.Abort(code)
        raise SystemExit(code)

    def close(self) -> None:
        self.line.Free()
        if self.ends_mpi:  # else mpi4py treats a later non-zero exit code as a crash and aborts the job
            self.MPI.Finalize()

"""mpi4py: any MPI library with its own launcher.

Rows travel as non-blocking sends and receives, the small verbs as non-blocking collectives, so that a rank that waits
can look at the clock: MPI itself has no timeout. A CPU tensor is handed over as the memory it lies in; anything numpy
cannot view (a CUDA tensor) is staged through host memory. bfloat16 travels as int16 and is never summed here: MPI has
no such type, and Open MPI sums it to garbage in silence.

After a timeout each rank sends a word to all others and listens a little: who is silent is missing.
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
from .base import Comm, Wait
from .env import Place, check_mpi_world

if TYPE_CHECKING:
    from mpi4py import MPI

ROLL_CALL_SECONDS = 5.0
SPINS = 100  # polls before a waiting rank begins to give its core away


def import_mpi() -> Any:
    """mpi4py's MPI module, or a `UserError` that says how to get an MPI library."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"--comm mpi needs mpi4py and an MPI library, but: {error}; "
            "install one (pip install mpich, or your cluster's MPI module) or use --comm torch"
        ) from None
    return MPI


def import_world(place: Place) -> MPI.Comm:
    """MPI's world, once it is known to be the one that the launcher promised."""
    world: MPI.Comm = import_mpi().COMM_WORLD
    check_mpi_world(place, world.Get_rank(), world.Get_size())
    return world


def connect_mpi(place: Place, timeout: float) -> Comm:
    """This rank's end of MPI's world; closing it ends MPI."""
    return MpiComm(import_world(place), timeout, ends_mpi=True)


def host_view(x: Tensor) -> Tensor:
    """x itself where numpy can view it, else a copy in host memory."""
    if x.dtype == torch.bfloat16:
        raise UserError("bfloat16 cannot be summed over MPI, which has no such type; use float32 or --comm torch")
    return x.detach() if x.device.type == "cpu" and x.is_contiguous() else x.detach().cpu().contiguous()


def bits(x: Tensor) -> Tensor:
    """x as something that MPI can carry: bfloat16 as the int16 of the same bits."""
    return x.view(torch.int16) if x.dtype == torch.bfloat16 else x


class MpiComm(Comm):
    """MPI's world, or another communicator of mpi4py."""

    name = "mpi"

    def __init__(self, world: MPI.Comm, timeout: float, ends_mpi: bool = False) -> None:
        self.MPI = import_mpi()
        self.world, self.line = world, world.Dup()  # roll calls on the first, verbs on the second: never mixed up
        super().__init__(world.Get_rank(), world.Get_size())
        self.timeout, self.ends_mpi = timeout, ends_mpi

    def finish(self, requests: list[MPI.Request]) -> None:
        """Return when all requests are done; after the timeout, raise with the ranks that are missing."""
        spins, deadline = 0, time.monotonic() + self.timeout
        while not self.MPI.Request.Testall(requests):
            spins += 1
            if spins > SPINS:
                time.sleep(0)
                if time.monotonic() > deadline:
                    raise RunError(self.roll_call())

    def roll_call(self) -> str:
        """A sentence naming the ranks that say nothing within a few seconds."""
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
            return f"a rank of {self.size} came too late, after the timeout of {self.timeout:g} s; raise --timeout"
        which = ", ".join(map(str, sorted(silent)))
        return f"rank {which} of {self.size} did not answer: hung for longer than the timeout of {self.timeout:g} s"

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        recv = {source: bits(x) for source, x in recv.items()}
        here = {source: host_view(x) for source, x in recv.items()}
        requests = [self.line.Irecv(x.numpy(), source) for source, x in here.items()]
        requests += [self.line.Isend(host_view(bits(x)).numpy(), to) for to, x in send.items()]

        def wait() -> None:
            self.finish(requests)
            for source, x in recv.items():
                if here[source].data_ptr() != x.data_ptr():
                    x.copy_(here[source])

        return wait

    def _sum(self, x: Tensor) -> None:
        here = host_view(x)
        self.finish([self.line.Iallreduce(self.MPI.IN_PLACE, here.numpy())])
        if here.data_ptr() != x.data_ptr():
            x.copy_(here)

    def _broadcast(self, x: Tensor, root: int) -> None:
        here = host_view(x)
        self.finish([self.line.Ibcast(here.numpy(), root)])
        if here.data_ptr() != x.data_ptr():
            x.copy_(here)

    def barrier(self) -> None:
        self.finish([self.line.Ibarrier()])

    def abort(self, code: int = 1) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(1)  # mpiexec drops what it has not passed on yet
        self.world.Abort(code)
        raise SystemExit(code)

    def close(self) -> None:
        self.line.Free()
        if self.ends_mpi:  # else mpi4py takes a later exit code that is not 0 for a crash and aborts the job
            self.MPI.Finalize()

"""Choose the transport for the launcher of this process, and connect the ranks; and the transport of a single rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import AgreedError, CommonError, UserError, unknown
from .base import Comm, Wait, agreed
from .env import Place

TRANSPORTS = ("auto", "torch", "mpi")
EARLY_SECONDS = 120.0  # for reading a command line and importing the modules that it names

T = TypeVar("T")


class SoloComm(Comm):
    """A world of one: every operation is a no-op."""

    name = "solo"

    def __init__(self) -> None:
        super().__init__(rank=0, size=1)

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        return lambda: None

    def _sum(self, x: Tensor) -> None: ...

    def _broadcast(self, x: Tensor, root: int) -> None: ...

    def barrier(self) -> None: ...


def pick(which: str, place: Place, device: str = "cpu") -> str:
    """Return the transport to use for sums on a type of device: as requested; for auto: solo for one rank, mpi under an
    MPI launcher if the sums are on the host, else torch."""
    if which not in TRANSPORTS:
        raise unknown("transport (--comm)", which, TRANSPORTS)
    if which == "mpi" and device != "cpu":
        raise UserError("--comm is mpi, which sums on the host, but --sums is device; use --sums host or --comm torch")
    if which == "mpi":
        return "mpi"
    if place.size == 1:
        return "solo"
    return "mpi" if which == "auto" and place.launcher == "mpi" and device == "cpu" else "torch"


def agree_early(place: Place, over_mpi: bool, find: Callable[[], T]) -> T:
    """Return the result of `find`, which runs before the ranks are connected. Under MPI, all ranks raise the error of
    any: the others would wait forever for a rank that exits before it has initialised MPI."""
    if not over_mpi or place.size == 1:
        return find()
    from .mpi import MpiComm, import_world

    comm = MpiComm(import_world(place), EARLY_SECONDS, ends_mpi=True)
    try:
        with agreed(comm):
            found = find()
    except (UserError, CommonError) as error:
        comm.close()
        raise (AgreedError(str(error)) if isinstance(error, UserError) else error) from None
    comm.ends_mpi = False
    comm.close()
    return found


def connect(which: str, place: Place, device: torch.device, timeout: float, environ: Mapping[str, str]) -> Comm:
    """Connect this rank over the transport `which` (auto, torch, mpi). Ranks of one node share memory only after
    `share_node`. Collective: returns when every rank has called."""
    transport = pick(which, place, device.type)
    if transport == "solo":
        return SoloComm()
    if transport == "mpi":
        from .mpi import MpiComm, import_world

        return MpiComm(import_world(place), timeout, ends_mpi=True)  # closing it finalizes MPI
    from .torch import connect_torch

    return connect_torch(place, device, timeout, environ)

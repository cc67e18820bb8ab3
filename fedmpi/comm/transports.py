"""Choose the transport that fits whoever launched this process, and connect the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from ..errors import AgreedError, CommonError, UserError, unknown
from .base import Comm, agreed
from .env import Place
from .solo import SoloComm

TRANSPORTS = ("auto", "torch", "mpi")
EARLY_SECONDS = 120.0  # for reading a command line, and the modules that it names

T = TypeVar("T")


def pick(which: str, place: Place) -> str:
    """The transport for this launch: the one asked for; else solo alone, mpi under an MPI launcher, torch otherwise."""
    if which not in TRANSPORTS:
        raise unknown("transport (--comm)", which, TRANSPORTS)
    if which == "mpi":
        return "mpi"
    if place.size == 1:
        return "solo"
    return "mpi" if which == "auto" and place.launcher == "mpi" else "torch"


def agree_early(place: Place, over_mpi: bool, find: Callable[[], T]) -> T:
    """What `find` returns, before the ranks are connected. Where they will be over MPI, one rank's mistake becomes that
    of all: a rank that left without having started MPI would be waited for in vain."""
    if not over_mpi or place.size == 1:
        return find()
    from .mpi import MpiComm, import_world

    comm = MpiComm(import_world(place), EARLY_SECONDS, ends_mpi=True)
    try:
        with agreed(comm):
            found = find()
    except UserError as error:
        comm.close()
        raise AgreedError(str(error)) from None
    except CommonError:
        comm.close()
        raise
    comm.ends_mpi = False
    comm.close()
    return found


def connect(which: str, place: Place, device: torch.device, timeout: float, environ: Mapping[str, str]) -> Comm:
    """This rank's end of the transport `which` (auto, torch, mpi). Collective: returns when every rank has come.

    Until `share_node` is called, ranks of one node send to each other too.
    """
    transport = pick(which, place)
    if transport == "solo":
        return SoloComm()
    if transport == "mpi":
        from .mpi import connect_mpi

        return connect_mpi(place, timeout)
    from .torch import connect_torch

    return connect_torch(place, device, timeout, environ)

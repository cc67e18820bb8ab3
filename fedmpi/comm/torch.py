"""The torch.distributed transport: gloo for what is on the host, NCCL for what is on GPUs (--sums device).

In host memory, rows are sent point to point. Measured on gloo with 11.2 million float32 on 2 ranks: point to point 11
ms, all-to-all 18 ms, all-gather 43 ms; reduce-scatter is slower still. On GPUs, NCCL's own reduce-scatter and
all-gather take whole slices: it knows the links between GPUs and between nodes. That has not been tested on hardware.
Small records and barriers are on the host, so they go over gloo in any case: a rank that waits for a dead one fails at
once there, while NCCL would end the process after the timeout.

When an operation fails (a rank died, or the timeout passed), the survivors hold a roll call over the rendezvous store,
which needs no collective: each signs in, waits a few seconds for the others, and reports the ranks that did not.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

# Before there is a process group: its functions store the default group as a default argument. Imported later, as by
# torch._dynamo, they would keep the group alive after `close`, and its threads would abort the process at exit.
import torch.distributed.nn.functional
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from ..device import identity
from ..errors import RunError, UserError
from .base import ROLL_CALL_SECONDS, Comm, Wait
from .env import SECRET, STORE, Place, rendezvous
from .sealed import SealedStore, serve

AGENT_LIMIT = timedelta(seconds=10)
# Newer versions of torch have other names for them, and warn of these.
REDUCE_SCATTER = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class TorchComm(Comm):
    """A process group over a rendezvous store that the caller made."""

    name = "torch"

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout: float) -> None:
        super().__init__(rank, size)
        self.base = store  # keep the reference: a store written in Python is not owned by torch
        self.store, self.device, self.timeout = PrefixStore("fedmpi", store), device, timeout
        self.calls = 0
        self.guard(self._join)

    def _join(self) -> None:
        if dist.is_initialized():
            raise UserError(
                "this process has already called torch.distributed.init_process_group; leave that to fedmpi, or "
                "destroy the process group first"
            )
        self._compare_devices()
        limit, backend = timedelta(seconds=self.timeout), "gloo"
        if self.device.type != "cpu":
            backend = f"cpu:gloo,{self.device.type}:{dist.get_default_backend_for_device(self.device)}"
        dist.init_process_group(backend, store=self.store, rank=self.rank, world_size=self.size, timeout=limit)

    def _compare_devices(self) -> None:
        """Raise a `UserError` on all ranks unless the sums are on the host, or each rank has an accelerator of its own,
        all of one type. NCCL would say so later and worse, or wait for its timeout."""
        self.store.set(f"device/{self.rank}", json.dumps([self.device.type, str(self.device), identity(self.device)]))
        if self.rank == 0:
            told = [json.loads(self.store.get(f"device/{rank}")) for rank in range(self.size)]
            self.store.set("devices", device_trouble(told))
        if trouble := self.store.get("devices").decode():
            raise UserError(trouble)

    def guard(self, call: Callable[[], object]) -> None:
        """Call torch.distributed; on failure, raise a `RunError` that names the missing ranks."""
        self.calls += 1
        started = time.monotonic()
        try:
            call()
        except RunError:
            self.close()
            raise
        except RuntimeError as error:
            hung = time.monotonic() - started >= self.timeout
            why = f"hung for longer than the timeout of {self.timeout:g} s" if hung else "dead, or disconnected"
            self.close()  # others may be waiting for this rank only: let them fail now, and answer the roll call
            raise RunError(f"{self.roll_call()}: {why} ({first_line(error)})") from error

    def roll_call(self) -> str:
        """Return an error message with the ranks that do not sign in at the store."""
        try:
            self.store.set(f"here/{self.rank}", str(self.calls))
            deadline = time.monotonic() + ROLL_CALL_SECONDS
            missing = [r for r in range(self.size) if not self.store.check([f"here/{r}"])]
            while missing and time.monotonic() < deadline:
                time.sleep(0.1)
                missing = [r for r in missing if not self.store.check([f"here/{r}"])]
        except RuntimeError:
            return f"rank 0 of {self.size} or the launcher, which holds the rendezvous store, did not answer"
        if not missing:
            return f"the {self.size} ranks lost their connections, but all of them answer"
        return f"rank {', '.join(map(str, missing))} of {self.size} did not answer"

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        ops = [dist.P2POp(dist.irecv, x, source) for source, x in recv.items()]
        ops += [dist.P2POp(dist.isend, x, to) for to, x in send.items()]
        if not ops:
            return lambda: None
        works: list[dist.Work] = []
        self.guard(lambda: works.extend(dist.batch_isend_irecv(ops)))
        return lambda: self.guard(lambda: [work.wait() for work in works])

    def reduces(self, device: torch.device) -> bool:
        return device.type != "cpu"

    def _start_reduce(self, block: Tensor, sum: Tensor) -> Wait:
        return self._started(lambda: REDUCE_SCATTER(sum, block.view(-1), async_op=True))

    def _start_gather(self, x_N: Tensor, own: Tensor) -> Wait:
        return self._started(lambda: ALL_GATHER(x_N, own, async_op=True))

    def _started(self, call: Callable[[], dist.Work]) -> Wait:
        """Call a collective of torch.distributed that returns at once; return how to wait for it."""
        works: list[dist.Work] = []
        self.guard(lambda: works.append(call()))
        return lambda: self.guard(lambda: works[0].wait())

    def _sum(self, x: Tensor) -> None:
        self.guard(lambda: dist.all_reduce(x))

    def _broadcast(self, x: Tensor, root: int) -> None:
        self.guard(lambda: dist.broadcast(x, root))

    def barrier(self) -> None:
        self._sum(torch.zeros(1, dtype=torch.int32))

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()


def device_trouble(told: Sequence[tuple[str, str, str]]) -> str:
    """Return what is wrong with the devices of the sums, given type, name and identity of each rank's; '' if nothing
    is."""
    ranks: dict[str, list[int]] = {}
    for rank, (kind, _, uuid) in enumerate(told):
        ranks.setdefault(kind if kind == "cpu" else uuid, []).append(rank)
    if list(ranks) == ["cpu"]:
        return ""
    kinds = sorted({kind for kind, _, _ in told})
    if len(kinds) > 1:
        each = "; ".join(f"rank {rank}: {name}" for rank, (_, name, _) in enumerate(told))
        return f"--sums is device, but the ranks have devices of different types ({each}); use --sums host"
    shared = [f"ranks {', '.join(map(str, some))} share {told[some[0]][1]}" for some in ranks.values() if len(some) > 1]
    if not shared:
        return ""
    return f"--sums is device, which needs an accelerator per rank, but {'; '.join(shared)}; use --sums host"


def backends() -> list[str]:
    """Return the backends that this torch was built with."""
    return [name for name in ("gloo", "nccl") if dist.is_available() and getattr(dist, f"is_{name}_available")()]


def first_line(error: BaseException) -> str:
    """Return the first sentence of an error message, without torch's C++ source position."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if "Last error:" in lines[:-1]:  # of NCCL: what happened comes last
        return lines[lines.index("Last error:") + 1].strip()
    return re.sub(r"^\[[^\]]*\.cc:\d+\] ", "", lines[0]).partition(". ")[0].rstrip(".")


def connect_torch(place: Place, device: torch.device, timeout: float, environ: Mapping[str, str]) -> Comm:
    """Connect this rank to the process group at the launcher's rendezvous."""
    if place.size == place.local_size:  # one node: use the loopback interface unless the user set another
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if os.path.exists("/sys/class/net/lo") else "lo0")
    limit = timedelta(seconds=timeout)
    try:
        store = store_over_mpi(place, limit) if place.launcher == "mpi" else meet(place, limit, environ)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise RunError(f"rank {place.rank} of {place.size} found no rendezvous: {first_line(error)}") from error
    return TorchComm(store, place.rank, place.size, device, timeout)


def meet(place: Place, limit: timedelta, environ: Mapping[str, str]) -> Store:
    """Return the launcher's rendezvous store: a file, or an address at which torchrun's agent may already listen."""
    if environ.get(STORE):
        return FileStore(environ[STORE], place.size)
    meeting = rendezvous(place, environ)
    if meeting is None:
        raise UserError(
            f"{place.size} ranks were launched ({place.launcher}) without a rendezvous address; "
            "set MASTER_ADDR and MASTER_PORT, or start with 'fedmpi train --ranks'"
        )
    if environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        host, port = meeting
        one_node = place.size == place.local_size
        if one_node and "MASTER_ADDR" not in environ:
            host = "127.0.0.1"
        inner = TCPStore(host, port, place.size, False, timeout=limit, wait_for_workers=False) if place.rank else None
        inner = inner or serve(host, port, place.size, one_node, limit)
        return SealedStore(inner, environ[SECRET]) if environ.get(SECRET) else inner
    # The agent starts before its ranks: if it is gone, so is the launch. Its store outlives a restart of the ranks, so
    # each attempt uses its own keys.
    store = TCPStore(*meeting, place.size, False, timeout=min(limit, AGENT_LIMIT))
    store.set_timeout(limit)
    return PrefixStore(f"attempt{environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def store_over_mpi(place: Place, limit: timedelta) -> Store:
    """Return a store on a free port of rank 0; MPI broadcasts its address and a secret. So NCCL works under mpirun."""
    from .mpi import import_world

    world = import_world(place)
    one_node = place.size == place.local_size
    address = "127.0.0.1" if one_node else socket.gethostname()
    inner = serve(address, 0, place.size, one_node, limit) if place.rank == 0 else None
    meeting = (address, inner.port, secrets.token_hex(32)) if inner is not None else None
    address, port, secret = world.bcast(meeting, root=0)
    return SealedStore(inner or TCPStore(address, port, place.size, False, timeout=limit), secret)

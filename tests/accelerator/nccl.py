"""A strict stand-in for NCCL: importing this module makes the backend "strict" known to torch.distributed.

    dist.init_process_group("cpu:gloo,pretend:strict", ...)     CPU tensors to gloo, the device's tensors to this
    dist.init_process_group("strict", ...)                      the device's tensors only

It has NCCL's manners. It takes contiguous tensors of one device, and only the types that NCCL has. It works on a stream
of its own, in the order of issue, after what the current stream was given before; `wait` orders the current stream
after it and says nothing to the host. Until then what is received is poisoned, and what is sent must not change. Point
to point operations that need each other must be issued as one batch. Two ranks on one device are refused at the first
collective. The bytes travel by an inner gloo.

torch 2.13 lets Python write a process group but not a backend of one (torch._C._distributed_c10d.Backend cannot be
constructed, and has no virtual functions for Python). A creator that returns a process group replaces the one that
`init_process_group` was building, so this one holds the gloo for CPU tensors itself.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store
from torch.distributed import distributed_c10d as c10d

from . import streams
from .counting import counts
from .kernels import order_access, tensors_in
from .memory import NAME, alias
from .pretend import uuid_of

BACKEND = "strict"
TYPES = {
    torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
}  # fmt: skip
DUPLICATE = (
    "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, invalid usage (run with NCCL_DEBUG=WARN for "
    "details), NCCL version 2.29.7\n"
    "ncclInvalidUsage: This usually reflects invalid usage of NCCL library.\n"
    "Last error:\n"
    "Duplicate GPU detected : rank {} and rank {} both on CUDA device 1000"
)
traffic: Counter[str] = Counter()  # calls by name, "messages" and "bytes" sent point to point


class Transfer:
    """What one operation sends and receives: copies of the one, places for the other."""

    def __init__(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> None:
        self.sent, self.received = list(sent), list(received)
        self.snapshots = [alias(t).clone() for t in sent]
        self.arrived = [torch.empty(t.shape, dtype=t.dtype) for t in received]
        self.addresses = {t.data_ptr() for t in received}
        for t in received:
            streams.poison(alias(t))

    def finish(self) -> None:
        """Check that nobody touched the tensors, and deliver."""
        for t, snapshot in zip(self.sent, self.snapshots, strict=True):
            if t.data_ptr() not in self.addresses and not streams.same_bytes(alias(t), snapshot):
                raise streams.Fault("what is being sent was changed before wait()")
        for t, value in zip(self.received, self.arrived, strict=True):
            low = alias(t)
            if not streams.is_poison(low):
                raise streams.Fault("a receive buffer was written before wait()")
            low.copy_(value)


class StrictWork(dist.Work):
    """An operation under way."""

    def __init__(self, transfers: list[Transfer], on: streams.Stream) -> None:
        super().__init__()
        self.transfers, self.on = transfers, on
        self.clock = dict(on.clock)
        self.done = threading.Event()
        self.error: Exception | None = None

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Let the current stream wait; what was received is there for what follows on it."""
        self.done.wait()
        if self.error is not None:
            raise dist.DistBackendError(str(self.error)) from self.error
        with streams.lock:
            streams.merge(streams.current_stream(self.on.device_index).clock, self.clock)
        transfers, self.transfers = self.transfers, []
        for transfer in transfers:
            transfer.finish()
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self.done.is_set()

    def is_success(self) -> bool:
        return self.done.is_set() and self.error is None

    def exception(self) -> Exception | None:
        return self.error


def serve(jobs: queue.SimpleQueue[tuple[StrictWork, Callable[[], None]] | None]) -> None:
    """Do the operations of a process group one after the other."""
    while (job := jobs.get()) is not None:
        work, run = job
        try:
            run()
        except Exception as error:
            work.error = error
        work.done.set()


class StrictGroup(dist.ProcessGroup):
    """A process group for the pretend device, and for the CPU where gloo was asked for as well."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.store = store
        self.inner: Any = ProcessGroupGloo(PrefixStore("device", store), rank, size, timeout=timeout)
        self.host: Any = ProcessGroupGloo(PrefixStore("host", store), rank, size, timeout=timeout)
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.queues: dict[int, streams.Stream] = {}
        self.batch: list[tuple[Transfer, Callable[[], Any]]] | None = None
        self.met = False
        self.worker = threading.Thread(target=serve, args=(self.jobs,), daemon=True, name=BACKEND)
        self.worker.start()

    def getBackendName(self) -> str:
        return BACKEND

    # What NCCL refuses

    def takes(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Return whether these are tensors for this backend, and not for gloo; raise if they are for neither."""
        kinds = {t.device.type for t in tensors}
        if kinds == {"cpu"} and "cpu:gloo" in c10d._world.pg_backend_config.get(self, ""):
            return False
        if kinds != {NAME}:
            raise RuntimeError(f"No backend type associated with device type {' '.join(sorted(kinds - {NAME}))}")
        for t in tensors:
            if t.dtype not in TYPES:
                raise TypeError(f"Input tensor data type is not supported for NCCL process group: {t.dtype}")
            if not t.is_contiguous():
                raise ValueError("Tensors must be contiguous")
        self.meet(tensors[0].device.index)
        return True

    def meet(self, index: int) -> None:
        """Compare the devices of all ranks, once."""
        if self.met or self.size() == 1:
            return
        self.met = True
        self.store.set(f"device of {self.rank()}", uuid_of(index))
        seen: dict[bytes, int] = {}
        for rank in range(self.size()):
            found = self.store.get(f"device of {rank}")
            if found in seen:
                raise dist.DistBackendError(DUPLICATE.format(seen[found], rank))
            seen[found] = rank

    # How an operation is issued

    def issue(self, name: str, transfer: Transfer, run: Callable[[], None]) -> StrictWork:
        """Queue one operation behind those before it, and behind what the current stream was given."""
        return self.launch(name, [transfer], run)

    def queue_of(self, index: int) -> streams.Stream:
        """Return the stream on which this group works on a device."""
        if index not in self.queues:
            self.queues[index] = streams.Stream(index)
        return self.queues[index]

    def launch(self, name: str, transfers: list[Transfer], run: Callable[[], None]) -> StrictWork:
        """Queue what becomes one kernel on a device."""
        counts.kernel(f"nccl {name}")
        index = [*transfers[0].sent, *transfers[0].received][0].device.index
        on = self.queue_of(index)
        with streams.lock:
            on.wait_stream(streams.current_stream(index))
            number = on.issue()
        for transfer in transfers:
            order_access(transfer.sent, transfer.received, on, number, f"nccl {name}")
        work = StrictWork(transfers, on)
        self.jobs.put((work, run))
        return work

    def point(self, transfer: Transfer, start: Callable[[], Any]) -> StrictWork | None:
        """Issue a send or a receive, or add it to the batch that is being put together."""
        if self.batch is not None:
            self.batch.append((transfer, start))
            return None
        return self.launch("send or receive", [transfer], lambda: wait_for([start()]))

    def grouped(self, ops: list[Any]) -> list[Any]:
        """Issue point to point operations as one."""
        if not self.takes([op.tensor for op in ops]):
            return [op.op(op.tensor, group=op.group, tag=op.tag, **peer(op)) for op in ops]
        traffic["batches"] += 1
        self.batch = []
        try:
            for op in ops:
                op.op(op.tensor, group=op.group, tag=op.tag, **peer(op))
            batch = self.batch
        finally:
            self.batch = None
        starts = [start for _, start in batch]
        return [self.launch("batch", [transfer for transfer, _ in batch], lambda: wait_for([go() for go in starts]))]

    # The operations

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Sum, or what else is asked for, over all ranks."""
        opts = opts or dist.AllreduceOptions()
        if not self.takes(tensors):
            return self.host.allreduce(tensors, opts)
        traffic["all_reduce"] += 1
        (t,) = tensors
        transfer = Transfer([t], [t])

        def run() -> None:
            transfer.arrived[0].copy_(transfer.snapshots[0])
            self.reduce_on_cpu(transfer.arrived[0], opts)

        return self.issue("all_reduce", transfer, run)

    def reduce_on_cpu(self, low: torch.Tensor, opts: Any) -> None:
        """Reduce a CPU tensor over all ranks."""
        given, op = opts.reduceOp, dist.AllreduceOptions()
        average = given == dist.ReduceOp.AVG
        op.reduceOp = dist.ReduceOp.SUM if average else given
        moved = low.to(torch.uint8) if low.dtype == torch.bool else low
        self.inner.allreduce([moved], op).wait()
        low.copy_(moved / self.size() if average else moved)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Send from one rank to all."""
        if not self.takes(tensors):
            return self.host.broadcast(tensors, opts)
        traffic["broadcast"] += 1
        (t,) = tensors
        root = opts.rootRank == self.rank()
        transfer = Transfer([t], []) if root else Transfer([], [t])
        low = raw(transfer.snapshots[0] if root else transfer.arrived[0])
        return self.issue("broadcast", transfer, lambda: wait_for([self.inner.broadcast([low], opts)]))

    def all_gather_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Put the tensors of all ranks one after the other."""
        if not self.takes([output, given]):
            return self.host._allgather_base(output, given)
        if output.numel() != given.numel() * self.size():
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        traffic["all_gather"] += 1
        inside = shares_memory(output, given)  # in place: the rank's part of the output is what it sends
        transfer = Transfer([given], [output])
        if inside:
            transfer.addresses.add(given.data_ptr())
        parts = list(raw(transfer.arrived[0]).view(self.size(), -1).unbind(0))
        low = raw(transfer.snapshots[0]).reshape(-1)
        return self.issue("all_gather", transfer, lambda: wait_for([self.inner.allgather([parts], [low])]))

    def reduce_scatter_single(self, output: torch.Tensor, given: torch.Tensor, opts: Any = None) -> Any:
        """Sum over all ranks, and keep this rank's part."""
        opts = opts or dist.ReduceScatterOptions()
        if not self.takes([output, given]):
            return self.host._reduce_scatter_base(output, given, opts)
        if given.numel() != output.numel() * self.size():
            raise ValueError("input tensor must be the same size as output size times world size")
        traffic["reduce_scatter"] += 1
        transfer = Transfer([given], [output])
        if shares_memory(output, given):
            transfer.addresses.add(given.data_ptr())

        def run() -> None:
            whole = transfer.snapshots[0].clone()
            self.reduce_on_cpu(whole, opts)
            transfer.arrived[0].copy_(whole.view(self.size(), -1)[self.rank()].view(output.shape))

        return self.issue("reduce_scatter", transfer, run)

    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # their names before torch 2.12

    def send(self, tensors: list[torch.Tensor], to: int, tag: int = 0) -> Any:
        """Send to a rank."""
        if not self.takes(tensors):
            return self.host.send(tensors, to, tag)
        traffic["messages"] += 1
        traffic["bytes"] += tensors[0].nbytes
        transfer = Transfer(tensors, [])
        low = raw(transfer.snapshots[0])
        return self.point(transfer, lambda: self.inner.send([low], to, 0))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int = 0) -> Any:
        """Receive from a rank."""
        if not self.takes(tensors):
            return self.host.recv(tensors, source, tag)
        transfer = Transfer([], tensors)
        low = raw(transfer.arrived[0])
        return self.point(transfer, lambda: self.inner.recv([low], source, 0))

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; unlike everything else, this makes the host wait."""
        if opts is not None and opts.device is not None and opts.device.type == "cpu":
            return self.host.barrier()
        index = streams.current_device()
        self.meet(index)
        one = torch.zeros(1, dtype=torch.int32, device=torch.device(NAME, index))
        work = self.allreduce([one])
        work.wait()
        counts.wait("nccl barrier")
        streams.reach(work.clock)
        return work

    # What only gloo does here: the collectives of objects need it

    def on_host(self, name: str, *args: Any) -> Any:
        """Run an operation on CPU tensors."""
        if self.takes(tensors_in(list(args))):
            raise NotImplementedError(f"the stand-in for NCCL has no {name}")
        return getattr(self.host, name)(*args)

    allgather = functools.partialmethod(on_host, "allgather")
    alltoall = functools.partialmethod(on_host, "alltoall")
    all_to_all_single = functools.partialmethod(on_host, "alltoall_base")
    alltoall_base = functools.partialmethod(on_host, "alltoall_base")
    gather = functools.partialmethod(on_host, "gather")
    reduce = functools.partialmethod(on_host, "reduce")
    reduce_scatter = functools.partialmethod(on_host, "reduce_scatter")
    scatter = functools.partialmethod(on_host, "scatter")
    recv_anysource = functools.partialmethod(on_host, "recv_anysource")

    def shutdown(self) -> None:
        """Stop working, and end the threads of gloo, which must not outlive the interpreter."""
        self.abort(patience=10.0)

    def abort(self, patience: float = 0.0) -> None:
        """Stop without waiting for what is under way."""
        self.jobs.put(None)
        self.worker.join(patience)
        self.inner = self.host = None


def raw(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor's bytes."""
    return t.reshape(-1).view(torch.uint8)


def wait_for(works: list[Any]) -> None:
    """Wait for operations of the inner gloo."""
    for work in works:
        work.wait()


def peer(op: Any) -> dict[str, int]:
    """Return the keyword that names the other rank of a P2POp."""
    return {"group_dst" if op.op is dist.isend else "group_src": op.group_peer}


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two device tensors overlap."""
    return streams.overlap(streams.extent(a), streams.extent(b))


def install() -> None:
    """Register the backend, and group what is issued as a batch."""
    dist.Backend.register_backend(BACKEND, StrictGroup, devices=[NAME])
    one_by_one = dist.batch_isend_irecv

    @functools.wraps(one_by_one)
    def batch_isend_irecv(ops: list[Any]) -> list[Any]:
        group = ops[0].group if ops and ops[0].group is not None else c10d._get_default_group()
        return group.grouped(ops) if isinstance(group, StrictGroup) else one_by_one(ops)

    dist.batch_isend_irecv = c10d.batch_isend_irecv = batch_isend_irecv


install()

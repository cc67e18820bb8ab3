"""The memory of the pretend device: CPU memory under another device's name, which no CPU kernel reaches.

A tensor changes its device by way of DLPack, whose device type kDLExtDev torch reads as PrivateUse1: same memory, other
name. Every allocation is a `Block` for as long as its storage lives, so memory can be counted, can run out, and can
remember which stream used which part of it.
"""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from . import streams
from .streams import Accesses, Fault, Stream

NAME = "pretend"
DLPACK_CPU, DLPACK_EXTENSION = 1, 12
DEVICES = int(os.environ.get("PRETEND_DEVICES", "1"))
TOTAL = int(os.environ.get("PRETEND_MEMORY", 16 * 2**30))
aten = torch.ops.aten

capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
capsule_pointer.restype, capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class ManagedTensor(ctypes.Structure):
    """The first fields of DLPack's DLManagedTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


def renamed(t: torch.Tensor, device_type: int, index: int) -> torch.Tensor:
    """Return a tensor on the same memory, of another device."""
    capsule = to_dlpack(t)
    managed = ctypes.cast(capsule_pointer(capsule, b"dltensor"), ctypes.POINTER(ManagedTensor)).contents
    managed.device_type, managed.device_id = device_type, index
    return from_dlpack(capsule)


def alias(t: torch.Tensor) -> torch.Tensor:
    """Return the CPU's tensor on the memory of a device tensor, without its history and version."""
    if not t.numel():
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype)
    return renamed(t.detach(), DLPACK_CPU, 0)


@dataclass(eq=False)
class Block:
    """One allocation: which stream owns it, and the last access of each stream to each range of it."""

    index: int
    nbytes: int
    owner: Stream
    writes: Accesses = field(default_factory=dict)
    reads: Accesses = field(default_factory=dict)
    storage: Any = None


class Memory:
    """All blocks, by address, and how much of each device they take."""

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self.allocated: dict[int, int] = {}
        self.peak: dict[int, int] = {}
        self.freed_in_use: list[tuple[Block, dict[int, int]]] = []
        self.limit = int(os.environ["PRETEND_OOM"]) if os.environ.get("PRETEND_OOM") else None
        self.failing: list[int] | None = None  # larger than, after, times

    def adopt(self, t: torch.Tensor, index: int, number: int | None = None) -> torch.Tensor:
        """Return the device's tensor on the memory of a fresh CPU tensor."""
        if not t.numel():
            one = renamed(torch.empty(1, dtype=t.dtype), DLPACK_EXTENSION, index)
            return aten.as_strided.default(one, t.shape, t.stride(), 0)
        storage = t.untyped_storage()
        nbytes, address = storage.nbytes(), storage.data_ptr()
        self.reserve(nbytes, index)
        on = streams.current_stream(index)
        number = on.clock.get(on.stream_id, 0) if number is None else number
        block = Block(index, nbytes, on)
        block.writes = {on.stream_id: {(address, address + nbytes): number}}
        made = renamed(t, DLPACK_EXTENSION, index)
        with streams.lock:
            self.reused(on)
            key = made.untyped_storage().data_ptr()
            block.storage = weakref.ref(storage, self.free(key, block))
            self.blocks[key] = block
            self.allocated[index] = self.allocated.get(index, 0) + nbytes
            self.peak[index] = max(self.peak.get(index, 0), self.allocated[index])
        return made

    def free(self, key: int, block: Block) -> Callable[[Any], None]:
        """Return what is called when the memory of a block is gone."""

        def gone(_: Any) -> None:
            with streams.lock:
                if self.blocks.get(key) is block:
                    del self.blocks[key]
                self.allocated[block.index] -= block.nbytes
                others: dict[int, int] = {}
                for accesses in (block.writes, block.reads):
                    for stream, ranges in accesses.items():
                        if stream != block.owner.stream_id and ranges:
                            others[stream] = max(others.get(stream, 0), *ranges.values())
                if others:
                    self.freed_in_use.append((block, others))

        return gone

    def reused(self, on: Stream) -> None:
        """Check that memory freed to a stream's pool is not in use on other streams when that stream allocates."""
        left, wrong = [], None
        for block, others in self.freed_in_use:
            waiting = {key: number for key, number in others.items() if not on.after(key, number)}
            if block.owner is not on:
                left.append((block, others))
            elif waiting:
                wrong = block
        self.freed_in_use[:] = left
        if wrong is not None:
            raise Fault(
                f"{wrong.nbytes} bytes were freed and allocated again while another stream used them: keep the tensor, "
                "call record_stream, or let the stream that allocated it wait"
            )

    def record_stream(self, t: torch.Tensor, stream: Stream) -> None:
        """Keep the memory of a tensor until a stream is done with it, also when the tensor is gone."""
        block = self.block(t)
        if block is not None:
            block.storage = weakref.ref(block.storage(), self.free_quietly(t.untyped_storage().data_ptr(), block))

    def free_quietly(self, key: int, block: Block) -> Callable[[Any], None]:
        """Return what is called when the memory of a block is gone that was recorded for other streams."""

        def gone(_: Any) -> None:
            with streams.lock:
                if self.blocks.get(key) is block:
                    del self.blocks[key]
                self.allocated[block.index] -= block.nbytes

        return gone

    def block(self, t: torch.Tensor) -> Block | None:
        """Return the block that a device tensor lies in, unless it has no elements."""
        return self.blocks.get(t.untyped_storage().data_ptr())

    def reserve(self, nbytes: int, index: int) -> None:
        """Raise torch.OutOfMemoryError where a test, or the size of the device, asks for it."""
        free = TOTAL - self.allocated.get(index, 0)
        fails = nbytes > free or (self.limit is not None and nbytes > self.limit)
        if self.failing is not None and nbytes > self.failing[0]:
            with streams.lock:
                self.failing[1] -= 1
                if self.failing[1] < 0:
                    self.failing[2] -= 1
                    fails = True
                if self.failing[2] <= 0:
                    self.failing = None
        if fails:
            raise torch.OutOfMemoryError(
                f"{NAME} out of memory. Tried to allocate {readable(nbytes)}. Device {index} has a total capacity of "
                f"{readable(TOTAL)} of which {readable(free)} is free. Of the allocated memory "
                f"{readable(TOTAL - free)} is allocated by PyTorch."
            )


def readable(nbytes: int) -> str:
    """Return a size as CUDA's message writes it."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} bytes"


memory = Memory()


def fail_allocation(larger_than: int = 0, after: int = 0, times: int = 1) -> None:
    """Let allocations of more than `larger_than` bytes fail: `times` of them, once `after` of them have succeeded."""
    memory.failing = [larger_than, after, times]


def allow_allocations() -> None:
    """Take back `fail_allocation` and PRETEND_OOM."""
    memory.failing = memory.limit = None


# Pinned memory of the host: by address, for as long as the storage lives

_pinned: dict[int, tuple[Any, int]] = {}
_pinned_lock = threading.RLock()


def pinned_like(t: torch.Tensor) -> torch.Tensor:
    """Return a tensor with the same values in pinned memory."""
    return mark_pinned(t.clone(memory_format=torch.contiguous_format).detach())


def mark_pinned(t: torch.Tensor) -> torch.Tensor:
    """Declare the memory of a CPU tensor as pinned."""
    storage = t.untyped_storage()
    address = storage.data_ptr()
    if address:
        with _pinned_lock:
            _pinned[address] = (weakref.ref(storage, lambda dead: unpin(address, dead)), storage.nbytes())
    return t


def unpin(address: int, dead: Any) -> None:
    """Forget pinned memory that is gone."""
    with _pinned_lock:
        if address in _pinned and _pinned[address][0] is dead:
            del _pinned[address]


def is_pinned(t: torch.Tensor) -> bool:
    """Return whether a CPU tensor lies in pinned memory."""
    start = t.data_ptr()
    with _pinned_lock:
        if t.untyped_storage().data_ptr() in _pinned:
            return True
        return any(address <= start < address + nbytes for address, (_, nbytes) in _pinned.items())

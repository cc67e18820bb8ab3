"""The kernels: every one runs on CPU tensors that share the device's memory.

`kernel` serves all operations. It refuses what CUDA refuses, checks the order of streams, lets random numbers come from
the device's own generator, and counts the kernel and the wait where the host needs the result.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import streams
from .counting import counts
from .memory import DEVICES, NAME, TOTAL, alias, is_pinned, mark_pinned, memory
from .refusals import check_deterministic
from .streams import Fault, Stream, current_stream, device_number

CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)
aten = torch.ops.aten

INDEXED = ("index", "index_put", "_index_put_impl", "_unsafe_index")  # these take indices of the CPU as well
WAITS = {
    "_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive",
    "unique_dim_consecutive", "bincount", "repeat_interleave",
}  # fmt: skip

default_generators = [torch.Generator() for _ in range(DEVICES)]
_swapped = threading.RLock()
recorder: Callable[[Callable[[], Any], Any], None] | None = None  # of a graph: takes a kernel and its result


class Signature:
    """What the checks need to know about an operation; one a dispatcher's name."""

    def __init__(self, op: Any) -> None:
        schema = op._schema
        self.title = str(op)
        self.name = schema.name.removeprefix("aten::")
        self.base = self.name.removesuffix("_")
        self.order = [a.name for a in schema.arguments]
        self.written = {a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write}
        self.out = {a.name for a in schema.arguments if a.is_out}
        self.draws = "generator" in self.order
        self.seeded = torch.Tag.nondeterministic_seeded in op.tags
        self.waits = self.base in WAITS and not (self.base == "repeat_interleave" and "output_size" not in self.order)
        self.indexed = self.base in INDEXED


signatures: dict[Any, Signature] = {}


class Lowering:
    """The CPU's tensors for the device's in one call, and back."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.low: dict[int, torch.Tensor] = {}
        self.back: dict[int, torch.Tensor] = {}

    def add(self, t: torch.Tensor, low: torch.Tensor) -> None:
        """Let the CPU tensor `low` stand for t."""
        self.low[id(t)], self.back[id(low)] = low, t

    def down(self, value: Any) -> Any:
        """Return an argument with the CPU's tensors and device."""
        if isinstance(value, torch.Tensor):
            return self.low.get(id(value), value)
        if isinstance(value, torch.device):
            return torch.device("cpu")
        return type(value)(self.down(v) for v in value) if isinstance(value, list | tuple) else value

    def up(self, value: Any, number: int) -> Any:
        """Return a result with the device's tensors."""
        if isinstance(value, torch.Tensor):
            known = self.back.get(id(value))
            return memory.adopt(value, self.index, number) if known is None else known
        return type(value)(self.up(v, number) for v in value) if isinstance(value, list | tuple) else value


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors of one argument."""
    if isinstance(value, torch.Tensor):
        return [value]
    return [t for v in value for t in tensors_in(v)] if isinstance(value, list | tuple) else []


def order_access(reads: list[torch.Tensor], writes: list[torch.Tensor], on: Stream, number: int, what: str) -> None:
    """Check that an operation is ordered with those of other streams on the same memory, and remember it."""
    with streams.lock:
        for write, operands in ((False, reads), (True, writes)):
            for t in operands:
                block = memory.block(t)
                if block is None:
                    continue
                where = streams.extent(t)
                if (other := streams.unordered(block.writes, where, on)) is not None:
                    raise Fault(f"{what} on {on} uses memory that stream {other} writes, without waiting for it")
                if write and (other := streams.unordered(block.reads, where, on)) is not None:
                    raise Fault(f"memory was overwritten while it was copied: {what} on {on} did not wait for {other}")
                streams.remember(block.writes if write else block.reads, where, on, number)


def kernel(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Run any kernel of the device."""
    sig = signatures.get(op)
    if sig is None:
        sig = signatures[op] = Signature(op)
    counts.kernel(sig.title)
    named = dict(zip(sig.order, args, strict=False)) | kwargs
    operands = [(name, t) for name, value in named.items() for t in tensors_in(value)]
    index = next((t.device.index for _, t in operands if t.device.type == NAME), None)
    index = device_number(kwargs.get("device")) if index is None else index
    lowering = Lowering(index)
    waits = check_operands(sig, operands, index)
    check_deterministic(sig.name, [t for _, t in operands])
    on = current_stream(index)
    with streams.lock:
        number = on.issue()
    mine = [(name, t) for name, t in operands if t.device.type == NAME]
    reads = [t for name, t in mine if name not in sig.out]
    order_access(reads, [t for name, t in mine if name in sig.written], on, number, sig.title)
    for name, t in mine:
        if id(t) not in lowering.low:
            resized = name in sig.out and not t.numel()
            lowering.add(t, torch.empty(0, dtype=t.dtype) if resized else alias(t))
    out = run(op, sig, [lowering.down(v) for v in args], {k: lowering.down(v) for k, v in kwargs.items()}, index)
    for name, t in mine:
        low = lowering.low[id(t)]
        if name in sig.out and low.shape != t.shape:
            replace(t, memory.adopt(low, index, number))
    if waits or sig.waits:
        counts.wait(waits or sig.name)
        if sig.name == "_local_scalar_dense":
            counts.bytes_to_host += args[0].element_size()
        streams.reach(on.clock)
    result = lowering.up(out, number)
    if recorder is not None:
        refuse_in_graph(sig.title, waits or sig.waits)
        recorder(lambda: kernel(op, *args, **kwargs), result)
    return result


def refuse_in_graph(title: str, waits: object) -> None:
    """Raise for a kernel that cannot be recorded."""
    if waits:
        raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing ({title})")


def check_operands(sig: Signature, operands: list[tuple[str, torch.Tensor]], index: int) -> str:
    """Raise where the operands are of several devices; return what makes the host wait in taking them, if anything."""
    waits = ""
    for name, t in operands:
        if t.device.type == NAME and t.device.index == index:
            if sig.indexed and name == "indices" and t.dtype in (torch.bool, torch.uint8):
                waits = waits or f"{sig.name} by a mask"
        elif t.device.type == "cpu" and sig.indexed and name == "indices":
            waits = f"{sig.name} by indices of the CPU"
        elif t.device.type != "cpu" or t.dim():
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:{index} and "
                f"{t.device}! (when checking argument {name} of {sig.title})"
            )
    return waits


def run(op: Any, sig: Signature, args: list[Any], kwargs: dict[str, Any], index: int) -> Any:
    """Run a kernel on the CPU's tensors; random numbers come from the device's own generator."""
    own = default_generators[index]
    if sig.draws:
        at = sig.order.index("generator")
        given = args[at] if at < len(args) else kwargs.get("generator")
        if given is not None and implementation(given) != implementation(own):
            raise RuntimeError(f"Expected a '{NAME}' device type for generator but found '{given.device}'")
        if at < len(args):
            args[at] = own
        else:
            kwargs["generator"] = own
        return op(*args, **kwargs)
    if not sig.seeded:
        return op(*args, **kwargs)
    with own_randomness(index):
        return op(*args, **kwargs)


@contextlib.contextmanager
def own_randomness(index: int) -> Iterator[None]:
    """Let the CPU's default generator continue the device's own in the block."""
    own = default_generators[index]
    with _swapped:
        before = torch.default_generator.get_state()
        torch.default_generator.set_state(own.get_state())
        try:
            yield
        finally:
            own.set_state(torch.default_generator.get_state())
            torch.default_generator.set_state(before)


def implementation(generator: torch.Generator) -> int:
    """Return the address of torch's generator behind Python's object, of which there may be several."""
    return ctypes.c_void_p.from_address(id(generator) + object.__basicsize__).value or 0


def replace(t: torch.Tensor, by: torch.Tensor) -> None:
    """Give a tensor another one's memory and shape."""
    place = by.untyped_storage(), by.storage_offset(), by.shape, by.stride()
    aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, t, *place)


# Kernels with a body of their own


def fills(made: torch.Tensor) -> None:
    """Count the kernel with which torch fills new memory while algorithms are deterministic."""
    if torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory:
        counts.kernel("fill uninitialized memory")


def empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **_: Any) -> torch.Tensor:
    """Allocate memory."""
    wanted = math.prod(size) * (dtype or torch.get_default_dtype()).itemsize
    if wanted > TOTAL:  # the CPU may not have it either
        memory.reserve(wanted, device_number(device))
    made = torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format)
    fills(made)
    return memory.adopt(made, device_number(device))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    """Allocate memory with given strides."""
    made = torch.empty_strided(size, stride, dtype=dtype)
    fills(made)
    return memory.adopt(made, device_number(device))


def resize(t: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Change the shape, and the memory where it is too small."""
    new = torch.empty(size, dtype=t.dtype, device=t.device)
    if new.nbytes + t.storage_offset() * t.element_size() > t.untyped_storage().nbytes():
        kept = min(t.numel(), new.numel())
        if kept:
            alias(new).view(-1)[:kept].copy_(alias(t.reshape(-1))[:kept])
        replace(t, new)
    else:
        place = t.untyped_storage(), t.storage_offset(), new.shape, new.stride()
        aten.set_.source_Storage_storage_offset.redispatch(CPU_KEYS, t, *place)
    return t


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Copy between devices, or on one."""
    counts.kernel("copy")
    index = (source if source.device.type == NAME else target).device.index
    on = current_stream(index)
    with streams.lock:
        number = on.issue()
    if target.device.type == "cpu":
        copy_to_host(source, target, non_blocking, on, number)
    elif source.device.type == "cpu":
        copy_to_device(source, target, non_blocking, on, number)
    else:
        with streams.lock:  # between devices, torch lets the streams of both wait for each other
            other = current_stream(target.device.index)
            streams.merge(on.clock, other.clock)
            streams.merge(other.clock, on.clock)
        order_access([source], [target], on, number, "copy")
        alias(target).copy_(alias(source))
    if recorder is not None:
        refuse_in_graph("copy", "cpu" in (source.device.type, target.device.type))
        recorder(lambda: copy_from(source, target), target)
    return target


def copy_to_host(source: torch.Tensor, target: torch.Tensor, non_blocking: bool, on: Stream, number: int) -> None:
    """Copy to the host: at once if it waits, else when it does."""
    counts.bytes_to_host += target.nbytes
    value = torch.empty_like(target).copy_(alias(source))
    try:
        order_access([source], [], on, number, "copy")
    except Fault:
        value = streams.poison_like(target)
    low = target.detach().data
    if non_blocking and is_pinned(target):
        streams.copy_to_pinned(low, value, on, number)
        return
    counts.wait("non_blocking copy to memory that is not pinned" if non_blocking else "copy to the host")
    streams.reach(on.clock)
    low.copy_(value)


def copy_to_device(source: torch.Tensor, target: torch.Tensor, non_blocking: bool, on: Stream, number: int) -> None:
    """Copy to the device: the host need not wait only if it copies from pinned memory."""
    counts.bytes_to_device += source.nbytes
    order_access([], [target], on, number, "copy")
    if non_blocking and is_pinned(source):
        alias(target).copy_(streams.copy_from_pinned(source.detach().data, on, number))
        return
    counts.wait("non_blocking copy from memory that is not pinned" if non_blocking else "copy to the device")
    streams.reach(on.clock)
    alias(target).copy_(source)


def to_copy(t: torch.Tensor, **how: Any) -> torch.Tensor:
    """Copy to another type, device or layout; to the CPU without blocking goes to pinned memory, as with CUDA."""
    non_blocking = how.pop("non_blocking", False)
    how.pop("pin_memory", None)
    made = torch.empty_like(t, **{key: value for key, value in how.items() if value is not None})
    if non_blocking and made.device.type == "cpu":
        mark_pinned(made)
    return made.copy_(t, non_blocking)


def dropout(x: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Drop elements out as the CPU does, counted as CUDA's one kernel."""
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if p == 0 or not train or not x.numel():
        return x
    if p == 1:
        return x * torch.zeros((), dtype=x.dtype)
    with counts.one("aten.native_dropout.default"), torch.no_grad():
        noise = torch.empty_like(x, requires_grad=False).bernoulli_(1 - p).div_(1 - p)
    return x * noise


# Autocast


def cast(value: Any, dtype: torch.dtype, only: torch.dtype | None = None) -> Any:
    """Return an argument with its device tensors of floating point in another type."""
    if isinstance(value, torch.Tensor):
        fits = value.device.type == NAME and value.is_floating_point() and value.dtype != torch.float64
        return value.to(dtype) if fits and (only is None or value.dtype == only) else value
    return type(value)(cast(v, dtype, only) for v in value) if isinstance(value, list | tuple) else value


def autocast(op: Any, kind: str) -> Callable[..., Any]:
    """Return the kernel of an operation under autocast."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
            if kind == "lower":
                dtype = torch.get_autocast_dtype(NAME)
            elif kind == "full":
                dtype = torch.float32
            else:
                floats = [t.dtype for v in args for t in tensors_in(v) if t.is_floating_point()]
                dtype = torch.float32 if torch.float32 in floats else torch.get_autocast_dtype(NAME)
            return op(*cast(args, dtype), **{key: cast(value, dtype) for key, value in kwargs.items()})

    return call

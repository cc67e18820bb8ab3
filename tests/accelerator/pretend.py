"""A pretend accelerator: importing this module registers torch.device("pretend"), written in Python alone.

It lets the code for GPUs run, and checks it strictly, where there is no GPU. Its tensors belong to torch's PrivateUse1
backend. Every kernel runs on a CPU tensor that shares the memory, so results are those of the CPU to the bit; before
it runs, what CUDA would refuse is refused, and afterwards the kernel and what it made the host wait for are counted.

Import it once a process, before the first tensor is made. Set by the environment: PRETEND_DEVICES (number of devices,
1), PRETEND_UUIDS ("a,b": their UUIDs), PRETEND_MEMORY (bytes of each), PRETEND_OOM (allocations of more bytes fail).

Unlike CUDA: kernels are done at once, so nothing is fast or slow; torch.compile knows no such device; torch.Stream and
torch.Event are empty shells here (use torch.get_device_module(device).Stream); `torch.Generator("pretend")` cannot be
made (use `default_generators`); attention takes the plain path, not the CPU's fused one.
"""

from __future__ import annotations

import ctypes
import os
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import backend_registration

from . import graphs, kernels, recurrent, streams
from .counting import counted, counts
from .kernels import CPU_KEYS, aten, default_generators, kernel
from .memory import (
    DEVICES,
    NAME,
    TOTAL,
    allow_allocations,
    fail_allocation,
    is_pinned,
    mark_pinned,
    memory,
    pinned_like,
)
from .streams import Event, Fault, Stream, current_stream, default_stream, device_number, set_stream, stream

__all__ = ["Event", "Fault", "Stream", "allow_allocations", "counted", "counts", "device", "fail_allocation", "memory"]

UUIDS = tuple(filter(None, os.environ.get("PRETEND_UUIDS", "").split(",")))
KEY = "PrivateUse1"


# torch.get_device_module("pretend")


@dataclass(frozen=True)
class Properties:
    """What get_device_properties returns."""

    name: str
    total_memory: int
    uuid: str
    major: int = 8
    minor: int = 0
    multi_processor_count: int = 1


class Device:
    """A context manager that makes a device the current one; None changes nothing."""

    def __init__(self, device: Any) -> None:
        self.index = None if device is None else device_number(device)

    def __enter__(self) -> None:
        self.before = streams.current_device()
        if self.index is not None:
            set_device(self.index)

    def __exit__(self, *_: object) -> None:
        set_device(self.before)


def set_device(device: Any) -> None:
    """Change this thread's current device."""
    index = device_number(device)
    if not 0 <= index < DEVICES:
        raise RuntimeError(f"{NAME} error: invalid device ordinal {index} of {DEVICES}")
    streams.set_device_number(index)


def uuid_of(index: int) -> str:
    """Return the UUID of a device: the same in every process of this machine."""
    return UUIDS[index] if index < len(UUIDS) else str(uuid.uuid5(uuid.NAMESPACE_DNS, f"{NAME}-{index}"))


class Module:
    """The device's module: the calls that torch.cuda has."""

    Stream, Event, device = Stream, Event, Device
    CUDAGraph, graph = graphs.CUDAGraph, staticmethod(graphs.graph)
    default_generators = default_generators
    current_device = staticmethod(streams.current_device)
    set_device = staticmethod(set_device)
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    stream, set_stream = staticmethod(stream), staticmethod(set_stream)
    synchronize = staticmethod(streams.synchronize_device)

    @staticmethod
    def is_available() -> bool:
        return DEVICES > 0

    @staticmethod
    def is_initialized() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def init() -> None:
        """Do nothing."""

    @staticmethod
    def device_count() -> int:
        return DEVICES

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed the current device only."""
        default_generators[streams.current_device()].manual_seed(int(seed))

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for generator in default_generators:
            generator.manual_seed(int(seed))

    @staticmethod
    def initial_seed() -> int:
        return default_generators[streams.current_device()].initial_seed()

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        return default_generators[device_number(device)].get_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        default_generators[device_number(device)].set_state(state)

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        return Module.get_device_properties(device).name

    @staticmethod
    def get_device_capability(device: Any = None) -> tuple[int, int]:
        return 8, 0

    @staticmethod
    def get_device_properties(device: Any = None) -> Properties:
        index = device_number(device)
        if not 0 <= index < DEVICES:
            raise AssertionError("Invalid device id")
        return Properties("Pretend accelerator", TOTAL, uuid_of(index))

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        return memory.allocated.get(device_number(device), 0)

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        return memory.peak.get(device_number(device), 0)

    memory_reserved, max_memory_reserved = memory_allocated, max_memory_allocated

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        index = device_number(device)
        memory.peak[index] = memory.allocated.get(index, 0)

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        now, peak = Module.memory_allocated(device), Module.max_memory_allocated(device)
        kinds = ("allocated_bytes", "reserved_bytes", "active_bytes")
        return {f"{kind}.all.current": now for kind in kinds} | {f"{kind}.all.peak": peak for kind in kinds}

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        return TOTAL - Module.memory_allocated(device), TOTAL

    @staticmethod
    def empty_cache() -> None:
        """Count the call."""
        counts.cache_emptied += 1

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return True

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


device = Device


# Registration

# torch's kernels for these only change the tensor's metadata, and serve any device.
VIEWS = (
    "as_strided", "view", "_reshape_alias", "unfold", "view_as_real", "view_as_complex",
    "set_.source_Storage_storage_offset", "set_.source_Tensor", "set_.source_Storage",
)  # fmt: skip

# CPU autocast's choice of operations (not CUDA's), so that bits can be compared.
LOWER = (
    "conv1d", "conv2d", "conv3d", "_convolution", "conv_transpose1d", "conv_transpose2d.input",
    "conv_transpose3d.input", "linear", "mm", "addmm", "addbmm", "matmul", "bmm", "baddbmm",
)  # fmt: skip
FULL = (
    "nll_loss", "nll_loss2d", "mse_loss", "cross_entropy_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div",
    "binary_cross_entropy_with_logits", "binary_cross_entropy", "prod",
)  # fmt: skip
WIDEST = ("cat", "stack")


def overload(name: str) -> Any:
    """Return an operation by name."""
    base, _, variant = name.partition(".")
    return getattr(getattr(aten, base), variant or "default")


def through(op: Any) -> Callable[..., Any]:
    """Return a kernel that changes metadata only."""
    return lambda *args, **kwargs: op.redispatch(CPU_KEYS, *args, **kwargs)


def direct(op: Any) -> Callable[..., Any]:
    """Return the general kernel of one operation."""
    return lambda *args, **kwargs: kernel(op, *args, **kwargs)


def with_cpu_kernel() -> Iterator[str]:
    """Yield the operations that the CPU and CUDA run in one kernel though torch can also compose them of others."""
    composite = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::_foreach_") and has(name, composite[0]) and not name.endswith("out"):
            yield name.removeprefix("aten::")
        elif name.startswith("aten::") and has(name, "CPU") and any(has(name, key) for key in composite):
            yield name.removeprefix("aten::")


def install() -> None:
    """Make the device known to torch."""
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module)
    one, every = torch.library.Library("aten", "IMPL"), torch.library.Library("_", "IMPL")
    own = {
        "empty.memory_format": kernels.empty,
        "empty_strided": kernels.empty_strided,
        "resize_": kernels.resize,
        "_copy_from": kernels.copy_from,
        "_to_copy": kernels.to_copy,
        "_fused_sdp_choice": lambda *_, **__: 0,
    }
    both = {"dropout": kernels.dropout} | {
        name: recurrent.layer(overload(name), cell) for name, cell in recurrent.CELLS.items()
    }
    own |= {name: through(overload(name)) for name in VIEWS} | both
    own |= {name: direct(overload(name)) for name in ("convolution", "convolution_backward")}
    own |= {name: direct(overload(name)) for name in with_cpu_kernel() if name not in own}
    for name, call in own.items():
        one.impl(name, call, KEY)
    for name, call in both.items():
        one.impl(name, call, f"Autograd{KEY}")
    for kind, names in (("lower", LOWER), ("full", FULL), ("widest", WIDEST)):
        for name in names:
            one.impl(name, kernels.autocast(overload(name), kind), f"Autocast{KEY}")
    every.fallback(kernel, KEY)
    every.fallback(torch.library.fallthrough_kernel, f"Autocast{KEY}")
    Module.libraries = one, every  # the registrations go when nobody holds them
    patch()
    if DEVICES > 1:
        announce_devices(DEVICES)


def announce_devices(count: int) -> None:
    """Let autograd know of more than one device: the guard that torch makes for Python says 1 and cannot be asked to
    say more, so its table of virtual functions is replaced by a copy with another `deviceCount`."""
    header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    body = header.read_text().partition("struct C10_API DeviceGuardImplInterface")[2].partition("virtual ~")[0]
    functions = re.findall(r"^\s*virtual\s[^;{(]*?(\w+)\(", body, flags=re.MULTILINE)
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    registry = (ctypes.c_void_p * 64).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guard = ctypes.cast(registry[int(torch._C._autograd.DeviceType.PrivateUse1)], ctypes.POINTER(ctypes.c_void_p))
    slots = len(functions) + 2  # the destructor takes two
    table = (ctypes.c_void_p * (slots + 2))()  # with the two words in front
    ctypes.memmove(table, guard[0] - 16, ctypes.sizeof(table))
    answer = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)(lambda _: count)
    table[2 + functions.index("deviceCount")] = ctypes.cast(answer, ctypes.c_void_p).value
    guard[0] = ctypes.addressof(table) + 16
    Module.guard = table, answer


def patch() -> None:
    """Replace what torch offers no hook for."""
    deepcopied, record = torch.Tensor.__deepcopy__, torch.Tensor.record_stream
    run_backward = torch.autograd.graph._engine_run_backward

    def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
        if self.device.type != "cpu":
            raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")
        return self if is_pinned(self) else pinned_like(self)

    def pinned(self: torch.Tensor, device: Any = None) -> bool:
        return self.device.type == "cpu" and is_pinned(self)

    def deepcopy(self: torch.Tensor, memo: dict[Any, Any]) -> torch.Tensor:
        if self.device.type != NAME or isinstance(self, torch.nn.Parameter) or id(self) in memo:
            return deepcopied(self, memo)
        if not self.is_leaf:
            return deepcopied(self, memo)  # which refuses
        store, made = self.untyped_storage(), memo.setdefault("torch", {})
        copy = torch.empty_like(self, requires_grad=False)
        if self.numel():  # copy all of the memory, once
            if store._cdata not in made:
                whole = torch.empty(0, dtype=torch.uint8, device=self.device).set_(store, 0, (store.nbytes(),), (1,))
                made[store._cdata] = whole.clone().untyped_storage()
            copy.set_(made[store._cdata], self.storage_offset(), self.shape, self.stride())
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        memo[id(self)] = copy.requires_grad_(self.requires_grad)
        return copy

    def record_stream(self: torch.Tensor, on: Any) -> None:
        if self.device.type != NAME:
            return record(self, on)
        memory.record_stream(self, on)

    def backward(*args: Any, **kwargs: Any) -> Any:
        streams.remember_for_backward()
        return run_backward(*args, **kwargs)

    def with_pinning(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def made(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
            new = make(*args, **kwargs)
            return mark_pinned(new) if pin_memory and new.device.type == "cpu" else new

        return made

    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin_memory, pinned
    torch.Tensor.__deepcopy__, torch.Tensor.record_stream = deepcopy, record_stream
    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = backward
    for name in ("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "empty_strided", "tensor"):
        setattr(torch, name, with_pinning(getattr(torch, name)))
    torch.serialization.register_package(1, location_of, restore)
    accelerator()


def location_of(store: Any) -> str | None:
    """Return where torch.save says that a storage was, or None if it is not this device's."""
    return str(store.device) if store.device.type == NAME else None


def restore(store: Any, location: str) -> Any:
    """Return a storage that was loaded to the CPU on the device that `location` names, or None if not on this one."""
    if not location.startswith(NAME):
        return None
    return torch.empty(0, dtype=torch.uint8).set_(store).to(location).untyped_storage()


def accelerator() -> None:
    """Let torch.accelerator reach this device's module."""
    core = torch._C

    def exchange(index: int) -> int:
        before = streams.current_device()
        if index >= 0:
            set_device(index)
        return before

    core._accelerator_getDeviceIndex = streams.current_device
    core._accelerator_setDeviceIndex = set_device
    core._accelerator_exchangeDevice = core._accelerator_maybeExchangeDevice = exchange
    core._accelerator_synchronizeDevice = streams.synchronize_device
    core._accelerator_getStream = current_stream
    core._accelerator_setStream = set_stream
    core._accelerator_isAllocatorInitialized = lambda: True
    core._accelerator_emptyCache = Module.empty_cache
    core._accelerator_getDeviceStats = Module.memory_stats
    core._accelerator_resetPeakStats = Module.reset_peak_memory_stats
    core._accelerator_getMemoryInfo = Module.mem_get_info


install()

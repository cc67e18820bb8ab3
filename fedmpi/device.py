"""Accelerators: the only module that knows them. CUDA, ROCm, XPU and others take the same code, through
`torch.get_device_module`; Apple's MPS as far as it has the same functions.

A rank trains its clients on one device, the CPU or an accelerator. Ranks of a node take the accelerators in turn, and
several ranks may share one. Where the sums of a round are made is another choice (`sums_device`): on the host, in the
memory that the ranks of a node share, or on the device.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import UserError, unknown

CPU = torch.device("cpu")
HOST_ONLY = ("mps",)  # without float64, which exact sums need
VISIBLE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}
KNOWN = ("cuda", "xpu", "mps", "npu", "hpu", "mtia")  # named here to tell a missing device from a misspelt one
SUMS = ("auto", "host", "device")
PRECISIONS = ("float32", "tf32", "bf16")
UNKNOWN = "unknown"
DRIVER = {"driver": "driver_version", "mig": "mig.mode.current", "compute_mode": "compute_mode"}  # -> nvidia-smi's name
MPS_PROCESS = "nvidia-cuda-mps"  # the first 15 letters of its daemon and its server, as Linux has them


# ------------------------------------------------------------------------------------------------------------ Choosing


def accelerator() -> str:
    """Return the type of this machine's accelerators, such as "cuda"; "" if there are none."""
    if not torch.accelerator.is_available():
        return ""
    found = torch.accelerator.current_accelerator()
    return "" if found is None else found.type


def count() -> int:
    """Return how many accelerators this process sees. Makes no context on them."""
    kind = accelerator()
    return int(torch.get_device_module(kind).device_count()) if kind else 0


def device_of(local_rank: int, want: str) -> torch.device:
    """Return the device of a rank, by its number on its node and --device."""
    return torch.device(choose(local_rank, want, accelerator(), count()))


def choose(local_rank: int, want: str, kind: str, devices: int) -> str:
    """Return the device of a rank, "cpu" or "cuda:N", for "auto", "cpu", "cuda" or "cuda:N" on a machine with that many
    accelerators of that kind. The ranks of a node use the visible devices in turn; if Slurm shows each task only
    its own, every rank uses device 0."""
    match = re.fullmatch(r"([a-z]+)(?::(\d+))?", want)
    word, number = match.groups() if match else ("", None)
    if word not in ("auto", "cpu", kind, *KNOWN) or not word or (word in ("auto", "cpu") and number is not None):
        other = kind or "cuda"
        raise unknown("device", want, ("auto", "cpu", other, f"{other}:N"))
    if word == "cpu" or (word == "auto" and devices == 0):
        return "cpu"
    if devices == 0 or word not in ("auto", kind):
        what = "CUDA" if word == "cuda" else word
        raise UserError(
            f"device '{want}' but no {what} device is visible: use 'cpu' or 'auto', or check CUDA_VISIBLE_DEVICES"
        )
    if number is None:
        return f"{kind}:{local_rank % devices}"
    if int(number) >= devices:
        raise UserError(f"device '{want}' but {devices} are visible, numbered from 0; use '{kind}' for one per rank")
    return f"{kind}:{number}"


def share(environ: Mapping[str, str], slot: int, at_once: int, kind: str, devices: int) -> dict[str, str]:
    """Return the variable that gives one of several processes at a time, number `slot`, its share of the accelerators
    that are visible; {} if there is nothing to share."""
    variable = VISIBLE.get(kind, "")
    names = environ[variable].split(",") if environ.get(variable) else [str(number) for number in range(devices)]
    if not variable or len(names) < 2 or at_once < 2:
        return {}
    return {variable: ",".join(names[slot::at_once] or [names[slot % len(names)]])}


def survives_fork() -> bool:
    """Return whether processes that have imported torch can be forked: the runtimes of accelerators do not allow it."""
    return not torch.backends.cuda.is_built() and accelerator() not in KNOWN  # type: ignore[no-untyped-call]


def sums_device(device: torch.device, where: str) -> torch.device:
    """Return where the model and the sums of a round are, for --sums. `auto` is the host: it works for any number of
    ranks per accelerator, for mixed devices and over MPI, and CPU runs use the same code."""
    if where == "device" and device.type in HOST_ONLY:
        raise UserError(f"--sums is device, but {device.type} has no float64, which sums need; use --sums host")
    return device if where == "device" else CPU


# ------------------------------------------------------------------------------------------------------------- Set up


def module(device: torch.device) -> Any:
    """Return torch's module for an accelerator, such as torch.cuda."""
    return torch.get_device_module(device)


def set_up(device: torch.device, deterministic: bool, precision: str = "float32") -> None:
    """Make an accelerator the current device of this thread, and select its kernels: repeatable ones, and float32 that
    is float32 unless `precision` is tf32."""
    if precision == "tf32" and device.type != "cuda":
        raise UserError(f"--step.precision is tf32, but {device.type} has no such format; use float32 or bf16")
    if device.type == "cpu":
        return
    make_current(device)
    if device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.set_deterministic_debug_mode("error")  # use_deterministic_algorithms imports torch's compiler, 0.7 s
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a kernel per allocation


def make_current(device: torch.device) -> None:
    """Make an accelerator the current device of this thread."""
    if device.type != "cpu" and hasattr(module(device), "set_device"):
        module(device).set_device(device)


def seed_layers(device: torch.device, number: int) -> None:
    """Seed the random draws of layers on this device. (`torch.manual_seed` seeds every device, and takes 60 times as
    long; a module's own `manual_seed` seeds the current device, whichever that is.)"""
    if device.type == "cpu":
        torch.default_generator.manual_seed(number)
        return
    generators = getattr(module(device), "default_generators", ())
    if generators:
        generators[device.index or 0].manual_seed(number)
    else:  # the device has not been used yet
        module(device).manual_seed(number)


def own_draws() -> Any:
    """Return a context that restores the random state of the CPU and of the current accelerator."""
    kind = accelerator()
    here = torch.get_device_module(kind) if kind else None
    used = here is not None and hasattr(here, "current_device") and getattr(here, "is_initialized", lambda: True)()
    return torch.random.fork_rng([here.current_device()] if here and used else [], device_type=kind or "cuda")


def synchronise(device: torch.device) -> None:
    """Wait until a device has done everything that it was given."""
    if device.type not in ("cpu", "meta"):  # meta: of `fedmpi plan`
        module(device).synchronize()


# ------------------------------------------------------------------------------------------------------------- Copies


def upload(x: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the host on a device, without waiting for the copy."""
    if x.device.type != "cpu" or not x.numel() or not pins(device):
        return x.to(device)
    return x.pin_memory().to(device, non_blocking=True)


def pins(device: torch.device) -> bool:
    """Return whether copies from and to this device can be made while the host goes on."""
    return device.type != "cpu" and hasattr(module(device), "Stream")


def has_tf32(device: torch.device) -> bool:
    """Return whether a device computes in TF32: NVIDIA's since Ampere."""
    return device.type == "cuda" and torch.version.hip is None and properties(device).major >= 8


def records_graphs(device: torch.device) -> bool:
    """Return whether kernels of this device can be recorded and replayed."""
    return device.type != "cpu" and hasattr(module(device), "CUDAGraph")


class Download:
    """Copies tensors to the host on a stream of its own, while the device computes on.

    What is copied is staged on the device first, in memory that is used again, so that the caller may overwrite it at
    once. The host's side is pinned memory, two sets in turn: what one call of `start` brings stays readable until the
    next but one.
    """

    def __init__(self, device: torch.device) -> None:
        self.module = module(device)
        self.stream = self.module.Stream(device)
        self.staged: dict[str, Tensor] = {}
        self.hosts: tuple[dict[str, Tensor], dict[str, Tensor]] = ({}, {})
        self.done: Any = None

    def start(self, tensors: dict[str, Tensor]) -> Callable[[], dict[str, Tensor]]:
        """Start to copy tensors; the function that is returned waits for them and returns them on the host."""
        self.hosts = self.hosts[::-1]
        current, host = self.module.current_stream(), self.hosts[0]
        if self.done is not None:  # the staging memory is free when the copy before is done
            current.wait_event(self.done)
        for name, x in tensors.items():
            if name not in self.staged or self.staged[name].shape != x.shape or self.staged[name].dtype != x.dtype:
                self.staged[name] = torch.empty_like(x)
            if name not in host or host[name].shape != x.shape or host[name].dtype != x.dtype:
                host[name] = torch.empty(x.shape, dtype=x.dtype).pin_memory()
            self.staged[name].copy_(x)
        self.stream.wait_stream(current)
        with self.module.stream(self.stream):
            for name in tensors:
                host[name].copy_(self.staged[name], non_blocking=True)
        done = self.done = self.stream.record_event()

        def wait() -> dict[str, Tensor]:
            done.synchronize()
            return {name: host[name] for name in tensors}

        return wait


# ------------------------------------------------------------------------------------------------------ Out of memory


def free_bytes(device: torch.device) -> float:
    """Return the free memory of a device; infinity for a CPU, and where it cannot be asked."""
    if device.type == "cpu" or not hasattr(module(device), "mem_get_info"):
        return float("inf")
    return float(module(device).mem_get_info(device)[0])


def out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that a device is out of memory."""
    return isinstance(error, torch.OutOfMemoryError)


def allocated_bytes(device: torch.device, peak: bool = False) -> int:
    """Return the memory of a device that this process has allocated, now or at most; 0 if it cannot be asked."""
    ask = getattr(module(device), "max_memory_allocated" if peak else "memory_allocated", None)
    return 0 if ask is None else int(ask(device))


def forget_peak(device: torch.device) -> None:
    """Let the peak of allocated memory begin anew."""
    if hasattr(module(device), "reset_peak_memory_stats"):
        module(device).reset_peak_memory_stats(device)


def free_memory(device: torch.device) -> None:
    """Return cached memory to the device."""
    if device.type != "cpu" and hasattr(module(device), "empty_cache"):
        module(device).empty_cache()


# ---------------------------------------------------------------------------------------------------------- What it is


def identity(device: torch.device) -> str:
    """Return what tells an accelerator from every other one, on any node; "" for a CPU."""
    if device.type == "cpu":
        return ""
    return str(getattr(properties(device), "uuid", "")) or f"{os.uname().nodename} {device}"


def properties(device: torch.device) -> Any:
    """Return torch's description of an accelerator; None if there is none."""
    describe_it = getattr(module(device), "get_device_properties", None)
    return None if describe_it is None else describe_it(device)


def kind_of(device: torch.device) -> str:
    """Return the name of a kind of device, such as "NVIDIA A100-SXM4-40GB", or "cpu"."""
    return device.type if device.type == "cpu" else str(getattr(properties(device), "name", device.type))


def describe(device: torch.device) -> dict[str, object]:
    """Return the record of a device for environment.json: bits depend on it, and float32 on TF32."""
    if device.type == "cpu":
        return {}
    about, version = properties(device), torch.version
    record: dict[str, object] = {"name": getattr(about, "name", device.type), "uuid": identity(device)}
    record["memory"] = getattr(about, "total_memory", None)
    if device.type == "cuda":
        record |= {"capability": f"{about.major}.{about.minor}", "cuda": version.cuda, "hip": version.hip}
        nccl: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        cudnn = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
        record |= {"cudnn": cudnn, "nccl": ".".join(map(str, nccl))}
        record["tf32"] = torch.backends.cudnn.allow_tf32
    return record


def details(device: torch.device) -> dict[str, object]:
    """Return all that torch and the driver tell about an accelerator; "unknown" for what neither does. Slow: it starts
    nvidia-smi."""
    about, here = properties(device), module(device)
    record = describe(device) | {"uuid": str(getattr(about, "uuid", UNKNOWN))}
    if hasattr(about, "major"):
        record["capability"] = f"{about.major}.{about.minor}"
    if device.type == "cuda":
        backends = torch.backends
        record["tf32"] = {"cudnn": backends.cudnn.allow_tf32, "matmul": backends.cuda.matmul.allow_tf32}
    free = free_bytes(device)
    record["free"] = UNKNOWN if free == float("inf") else int(free)
    for name in ("memory", "capability", "cuda", "hip", "cudnn", "nccl", "tf32"):
        record[name] = UNKNOWN if record.get(name) is None else record[name]
    can_access = getattr(here, "can_device_access_peer", None)
    others = [other for other in range(count()) if other != device.index]
    record["peers"] = UNKNOWN if can_access is None else [other for other in others if can_access(device.index, other)]
    record["visible"] = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    record["mps"] = "running" if mps_runs() else "not running"
    return record | dict.fromkeys(DRIVER, UNKNOWN) | ask_driver(str(record["uuid"]))


def ask_driver(uuid: str) -> dict[str, object]:
    """Return what nvidia-smi tells about a GPU: {} if it cannot be asked, and of all GPUs of the node if it lists none
    by this UUID, which may be that of a part of one."""
    command = ["nvidia-smi", f"--query-gpu=uuid,{','.join(DRIVER.values())}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    rows = [line.split(", ") for line in done.stdout.splitlines()]
    rows = [row for row in rows if uuid in row[0]] or rows
    return {name: " or ".join(sorted({row[at] for row in rows})) for at, name in enumerate(DRIVER, 1)} if rows else {}


def mps_runs() -> bool:
    """Return whether NVIDIA's MPS runs on this machine: with it, processes use a GPU at the same time."""
    if os.environ.get("CUDA_MPS_PIPE_DIRECTORY"):
        return True
    for path in Path("/proc").glob("[0-9]*/comm"):
        with suppress(OSError):  # a process that has ended meanwhile
            if path.read_text().startswith(MPS_PROCESS):
                return True
    return False


def takes_turns(device: torch.device) -> bool:
    """Return whether processes on this GPU wait for each other, because NVIDIA's MPS could run and does not."""
    return device.type == "cuda" and torch.version.hip is None and not mps_runs()


def without_fused_rnn(model: torch.nn.Module) -> Any:
    """Return a context in which a model can be differentiated twice: cuDNN's recurrent layers cannot."""
    recurrent = any(isinstance(part, torch.nn.RNNBase) for part in model.modules())
    return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()

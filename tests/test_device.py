"""Choosing a device: what runs on one is tested in tests/accelerator."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fedmpi import device
from fedmpi.comm.env import find_place
from fedmpi.device import (
    CPU,
    ask_driver,
    choose,
    describe,
    device_of,
    identity,
    mps_runs,
    out_of_memory,
    set_up,
    share,
    sums_device,
    upload,
)
from fedmpi.errors import UserError


@pytest.mark.parametrize(
    ("want", "kind", "devices", "device"),
    [
        ("auto", "", 0, "cpu"),
        ("auto", "cuda", 4, "cuda:3"),
        ("auto", "xpu", 2, "xpu:1"),
        ("cpu", "cuda", 4, "cpu"),
        ("cuda", "cuda", 4, "cuda:3"),
        ("cuda", "cuda", 2, "cuda:1"),  # shared by two ranks of this node
        ("cuda", "cuda", 1, "cuda:0"),
        ("cuda:2", "cuda", 4, "cuda:2"),
        ("xpu", "xpu", 2, "xpu:1"),
        ("pretend:1", "pretend", 2, "pretend:1"),
    ],
)
def test_ranks_of_a_node_take_the_accelerators_in_turn(want: str, kind: str, devices: int, device: str) -> None:
    assert choose(3, want, kind, devices) == device


SRUN = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_STEP_NUM_TASKS": "8"}
SRUN |= {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}


@pytest.mark.parametrize(
    ("visible", "devices"),
    [
        ("0,1,2,3", [0, 1, 2, 3]),  # srun --gpus-per-node=4: all tasks see all of them
        ("0,1", [0, 1, 0, 1]),
        ("own", [0, 0, 0, 0]),  # srun --gpus-per-task=1: each sees its own, as number 0
    ],
)
def test_tasks_of_srun_take_a_device_each(visible: str, devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By their number on the node, not in the job: these are ranks 4 to 7, on the second node."""
    monkeypatch.setattr(device, "accelerator", lambda: "cuda")
    monkeypatch.setattr(device, "count", lambda: len(os.environ["CUDA_VISIBLE_DEVICES"].split(",")))
    for local, number in enumerate(devices):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", str(local) if visible == "own" else visible)
        place = find_place(SRUN | {"SLURM_PROCID": str(4 + local), "SLURM_LOCALID": str(local)})
        assert (place.launcher, place.rank, place.local_rank) == ("srun", 4 + local, local)
        assert (
            device_of(place.local_rank, "auto") == device_of(place.local_rank, "cuda") == torch.device("cuda", number)
        )


@pytest.mark.parametrize(
    ("want", "kind", "devices", "message"),
    [
        ("cuda", "", 0, "no CUDA"),
        ("cuda:0", "", 0, "no CUDA"),
        ("cuda", "xpu", 2, "no CUDA"),
        ("xpu", "cuda", 2, "no xpu"),
        ("cuda:2", "cuda", 2, "2 are visible"),
        ("gpu", "cuda", 2, "unknown device"),
        ("cuda:", "cuda", 2, "unknown"),
        ("cpu:1", "cuda", 2, "unknown"),
        ("auto:0", "cuda", 2, "unknown"),
        ("", "", 0, "unknown"),
    ],
)
def test_no_such_device(want: str, kind: str, devices: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose(0, want, kind, devices)


@pytest.mark.parametrize(
    ("given", "kind", "devices", "at_once", "shares"),
    [
        (None, "cuda", 8, 4, ["0,4", "1,5", "2,6", "3,7"]),
        (None, "cuda", 2, 4, ["0", "1", "0", "1"]),
        ("2,3,5", "cuda", 3, 2, ["2,5", "3"]),
        ("GPU-a,GPU-b", "cuda", 2, 2, ["GPU-a", "GPU-b"]),
    ],
)
def test_processes_share_the_visible_gpus(
    given: str | None, kind: str, devices: int, at_once: int, shares: list[str]
) -> None:
    environ = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    found = [share(environ, slot, at_once, kind, devices) for slot in range(at_once)]
    assert found == [{"CUDA_VISIBLE_DEVICES": some} for some in shares]


@pytest.mark.parametrize(
    ("given", "kind", "devices", "at_once"),
    [
        (None, "cuda", 1, 4),
        (None, "cuda", 8, 1),
        ("3", "cuda", 1, 4),
        ("", "cuda", 0, 4),
        (None, "", 0, 4),
        (None, "mps", 1, 2),
    ],
)
def test_there_may_be_nothing_to_share(given: str | None, kind: str, devices: int, at_once: int) -> None:
    assert share({} if given is None else {"CUDA_VISIBLE_DEVICES": given}, 0, at_once, kind, devices) == {}


def test_sums_are_on_the_host_unless_asked_otherwise() -> None:
    cuda, mps = torch.device("cuda:1"), torch.device("mps")
    assert sums_device(cuda, "auto") == sums_device(cuda, "host") == sums_device(CPU, "device") == CPU
    assert sums_device(cuda, "device") == cuda
    with pytest.raises(UserError, match="float64"):
        sums_device(mps, "device")


def test_a_cpu_needs_no_copies_and_no_description() -> None:
    x = torch.ones(3)
    assert upload(x, CPU) is x
    assert describe(CPU) == {} and identity(CPU) == ""


def test_tf32_is_refused_without_a_gpu_that_has_it() -> None:
    with pytest.raises(UserError, match="tf32"):
        set_up(CPU, deterministic=True, precision="tf32")


def test_out_of_memory_is_told_by_its_type() -> None:
    assert out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
    assert not out_of_memory(RuntimeError("out of ideas"))


SMI = """#!/bin/sh
echo 'GPU-1111, 550.54, [N/A], Default'
echo 'GPU-2222, 550.54, Enabled, Exclusive_Process'
"""


def test_the_driver_is_asked_about_one_gpu_or_else_about_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert ask_driver("2222") == {}, "there is no nvidia-smi"
    (tmp_path / "nvidia-smi").write_text(SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert ask_driver("2222") == {"driver": "550.54", "mig": "Enabled", "compute_mode": "Exclusive_Process"}
    assert ask_driver("a part of 1111")["compute_mode"] == "Default or Exclusive_Process"


def test_mps_is_found_by_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)
    assert not mps_runs()
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert mps_runs()


def test_no_test_has_brought_the_pretend_device_into_this_process() -> None:
    """It would be the device of every other test."""
    assert not hasattr(torch, "pretend")

"""What fedmpi sets up on a device, and how it times its phases, in a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.accelerator.launch import call, need_device

pytestmark = pytest.mark.accelerator

SET_UP = """
from tests.accelerator import pretend
import sys, torch
from fedmpi.clients.execution import compiled
from fedmpi.device import set_up
from fedmpi.runs.run import undisturbed

device, settings = torch.device("pretend:1"), torch.utils.deterministic
set_up(device, deterministic=False)
assert settings.fill_uninitialized_memory and not torch.are_deterministic_algorithms_enabled()
set_up(device, deterministic=True)
assert torch.get_device_module(device).current_device() == 1 and torch.are_deterministic_algorithms_enabled()
assert not torch.is_deterministic_algorithms_warn_only_enabled()
assert not settings.fill_uninitialized_memory, "a kernel per allocation"
with undisturbed():
    torch.set_deterministic_debug_mode("warn")
assert torch.get_deterministic_debug_mode() == 2
assert "torch._inductor" not in sys.modules, "0.7 s at the start of every rank"
compiled(torch.nn.Linear(2, 2), "default")
assert torch._inductor.config.deterministic, "the compiler knows"
"""

CLOCK = """
from tests.accelerator import pretend
import torch
from fedmpi.aggregate.clock import Clock

device, host = torch.device("pretend"), torch.zeros(8).pin_memory()
clock = Clock("local", device)
host.copy_(torch.ones(8, device=device), non_blocking=True)
clock.switch("local")
assert not host.eq(1).any(), "the phase goes on"
with clock("wait"):
    assert host.eq(1).all(), "the phase before has ended"
    host.copy_(torch.full((8,), 2.0, device=device), non_blocking=True)
assert host.eq(2).all() and set(clock.seconds) == {"local", "wait"}
"""


@pytest.mark.parametrize("script", [SET_UP, CLOCK], ids=["kernels", "clock"])
def test_a_device_is_set_up_and_timed(script: str, tmp_path: Path) -> None:
    need_device()
    done = call([sys.executable, "-c", script], tmp_path, PRETEND_DEVICES="2")
    assert done.returncode == 0, done.stderr

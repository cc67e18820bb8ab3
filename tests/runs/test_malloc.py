"""What a step frees is kept for the next one."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
from conftest import rank_environment

from fedmpi.runs.malloc import CHOSEN, keep_freed_memory

FAULTS = """
import resource
import torch
from fedmpi.runs.malloc import keep_freed_memory
from fedmpi.models.vision import resnet18_gn
kept = keep_freed_memory()
torch.set_num_threads(1)
model, x = resnet18_gn(3, 16, 16, 10), torch.randn(4, 3, 16, 16)
for turn in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.autograd.grad(model(x).sum(), list(model.parameters()))
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults() -> tuple[str, int]:
    """Whether memory is kept, and the pages that the fifth step of a ResNet-18 has to ask for."""
    command = [sys.executable, "-c", FAULTS]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    kept, count = done.stdout.split()
    return kept, int(count)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is asked")
def test_memory_that_was_freed_is_not_asked_for_again() -> None:
    kept, count = faults()
    assert kept == "True" and count < 500, "it would be 8,600 in most processes"


@pytest.mark.parametrize("name", CHOSEN)
def test_what_the_user_has_chosen_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})

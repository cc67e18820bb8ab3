"""Start processes that have the pretend device, and read what they leave."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from conftest import BIN, need, rank_environment
from torch.utils import backend_registration

SECONDS = 220
TORCHRUN = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node"]


def need_device() -> None:
    """Skip where this torch cannot have a device written in Python."""
    present = hasattr(backend_registration, "_setup_privateuseone_for_python_backend")
    need("accelerator", present, "this torch has no backends written in Python, so no pretend accelerator")


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], str]) -> str:
    """Return what `make` returns for a new folder: called by one of the workers of pytest-xdist, for all of them."""
    own = factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / f"{name}.json"
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(make(factory.mktemp(name)))
    return kept.read_text()


def call(command: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    environment = rank_environment() | variables
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS)


def fedmpi(folder: Path, *arguments: str, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command of fedmpi with the device, under torchrun if on several ranks."""
    launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
    return call([*launcher, "-m", "tests.accelerator.run", *arguments], folder, **variables)


def models(out: Path) -> dict[str, str]:
    """Return the SHA-256 of every model below a folder."""
    found = sorted(out.glob("*/model.safetensors"))
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def train_cases(
    folder: Path,
    names: list[str],
    launcher: list[str],
    comm: str = "auto",
    sums: str = "auto",
    device: str = "pretend",
    options: Sequence[str] = (),
    **variables: str,
) -> dict[str, str]:
    """Train cases under a launcher; return their models."""
    folder.mkdir(exist_ok=True)
    command = [*launcher, "-m", "tests.accelerator.cases", str(folder), comm, device, sums, *names, *options]
    done = call(command, folder, **variables)
    assert done.returncode == 0, done.stderr[-3000:]
    found = models(folder)
    assert sorted(found) == sorted(names)
    return found

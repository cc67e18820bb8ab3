"""A run with time enough to interfere: many short rounds, watched from outside; and what comes of it undisturbed."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from conftest import rank_environment

LONG = (
    "--data glyphs --model logistic --clients 40 --cohort 4 --local.steps 2 --algorithm fedyogi --rounds 300 "
    "--eval.every 300 --threads 1 --log_to none --checkpoint.every 20"
).split()


def train_alone(out: Path) -> str:
    """The digest of the model that one rank trains undisturbed."""
    command = [sys.executable, "-m", "fedmpi", "train", *LONG, "--out", str(out)]
    subprocess.run(command, env=rank_environment(), check=True, capture_output=True, timeout=120)
    return digest(out)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def lines(path: Path) -> list[dict]:
    """The records in a file of JSON lines, without a last one that is not whole yet; empty where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(what: Callable[[], object], seconds: float = 120, on_timeout: Callable[[], object] = str) -> None:
    """Return when something is so; an error with what there is to tell where it does not come to that."""
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, on_timeout()
        time.sleep(0.05)

"""The benchmarks that take --device, at small sizes on the pretend device: their figures mean nothing there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import REPO

from tests.accelerator.launch import call, need_device

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

PRESENT = "from tests.accelerator import nccl, pretend\n"  # in every process, also those that a benchmark starts
TINY = {
    "step": ["--models", "logistic", "--paths", "contiguous", "bf16", "--seconds", "0.1"],
    "round": ["--turns", "1", "--rounds", "1", "--variants", "fedmpi exact mean", "--fedmpi", "--clients", "600"],
    "collective": ["--ranks", "2", "--parameters", "5000", "--turns", "1"],
}


def rows_of(name: str, folder: Path) -> list[dict[str, Any]]:
    """Return what a benchmark prints with the device."""
    need_device()
    (folder / "sitecustomize.py").write_text(PRESENT)
    options = ["--json", "--device", "pretend", *TINY[name]]
    command = [sys.executable, str(REPO / "benchmarks" / f"{name}.py"), *options]
    done = call(command, folder, PYTHONPATH=f"{folder}:{REPO}", PRETEND_DEVICES="2")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_step(tmp_path: Path) -> None:
    rows = rows_of("step", tmp_path)
    assert [row["path"] for row in rows] == ["plain", "contiguous", "bf16"]
    assert all(row["ratio"] > 0 for row in rows)


def test_a_round(tmp_path: Path) -> None:
    rows = rows_of("round", tmp_path)
    assert len(rows) == 2 and all(row["device"] == "pretend" and row["seconds_a_round"] > 0 for row in rows)


def test_the_collective(tmp_path: Path) -> None:
    rows = rows_of("collective", tmp_path)
    assert [row["case"] for row in rows][-1] == "bf16 on the wire" and len(rows) == 4
    assert all(row["transport"] == "strict" and row["ratio"] > 0 for row in rows)

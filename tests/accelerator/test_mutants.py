"""The pretend device catches the mistakes that it is there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.accelerator.launch import call, models, need_device
from tests.accelerator.mutants import MUTANTS

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

RUN = "--data glyphs --clients 6 --cohort 4 --local.steps 2 --threads 1 --log_to none --eval.samples 100 --rounds 2"
TRAIN = ["train", *RUN.split(), "--device", "pretend:1", "--model", "cnn"]


def train(folder: Path, mutant: str) -> str:
    """Return the SHA-256 of the model, or the error message of the run."""
    command = [sys.executable, "-m", "tests.accelerator.mutants", mutant, *TRAIN, "--out", "run"]
    done = call(command, folder, PRETEND_DEVICES="2")
    return done.stderr if done.returncode else models(folder)["run"]


def test_mutants_are_caught(tmp_path: Path) -> None:
    need_device()
    found = {}
    for number, name in enumerate(MUTANTS):
        (folder := tmp_path / str(number)).mkdir()
        found[name] = train(folder, name)
    sound = found.pop("none")
    assert len(sound) == 64, sound
    alive = [name for name, result in found.items() if result == sound]
    assert not alive

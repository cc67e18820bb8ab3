"""The pretend device catches the mistakes that it is there for."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.accelerator.launch import call, models, need_device
from tests.accelerator.mutants import MUTANTS

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

RUN = "--data glyphs --clients 150 --cohort 4 --local.steps 2 --threads 1 --log_to none --eval.samples 100 --rounds 2"
TRAIN = ["train", *RUN.split(), "--device", "pretend:1", "--model", "cnn"]


def test_mutants_are_caught(tmp_path: Path) -> None:
    need_device()
    done = call(
        [sys.executable, "-m", "tests.accelerator.mutants", *TRAIN, "--out", "run"], tmp_path, PRETEND_DEVICES="2"
    )
    assert done.returncode == 0, done.stderr
    sound, *found = (models(tmp_path / str(number)).get("run", "it failed") for number in range(len(MUTANTS)))
    assert len(sound) == 64, done.stderr
    assert sound not in found, [name for name, model in zip(list(MUTANTS)[1:], found, strict=True) if model == sound]

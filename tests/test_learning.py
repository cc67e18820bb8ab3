"""Every algorithm learns with its defaults: generated digits, 100 clients with 2 classes each, 10 per round."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shell import metrics

from fedmpi.algorithms import ALGORITHMS
from fedmpi.comm import SoloComm
from fedmpi.comm.env import Place
from fedmpi.runs.build import prepare
from fedmpi.runs.options import parse
from fedmpi.runs.run import run

# Rounds, and the accuracy to reach in them (chance is 0.1); the comments have the best accuracy measured.
REACHES = {
    "fedavg": (20, 0.5),  # 0.67
    "fedavgm": (20, 0.6),  # 0.84
    "fedprox": (20, 0.5),  # 0.70
    "scaffold": (20, 0.6),  # 0.80
    "fednova": (20, 0.5),  # 0.66
    "fedadam": (20, 0.6),  # 0.82
    "fedyogi": (20, 0.6),  # 0.81
    "fedadagrad": (20, 0.5),  # 0.72
    "uga": (18, 0.25),  # 0.40
    "fedmeta": (20, 0.6),  # 0.85
    "fedmeta-uga": (15, 0.3),  # 0.54
    "fedshare": (8, 0.7),  # 0.91
    "fedgma2021": (20, 0.45),  # 0.63
}


ALWAYS = ("fedavg", "scaffold", "fedgma2021")  # the others with -m long


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "algorithm", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.long]) for name in ALGORITHMS]
)
def test_it_learns_from_clients_with_two_classes(algorithm: str, tmp_path: Path) -> None:
    rounds, least = REACHES[algorithm]
    federation = ["--data", "glyphs", "--split", "classes", "--clients", "100", "--cohort", "10", "--model", "lenet"]
    options = ["--algorithm", algorithm, "--rounds", str(rounds), "--eval.every", "2", "--log_to", "none"]
    options += ["--eval.samples", "2000"]
    spec = prepare(parse([*federation, *options, "--out", str(tmp_path / "run")]))
    run(spec, SoloComm(), Place("alone", 0, 1, 0, 1), torch.device("cpu"), {})
    tested = [m["test_accuracy"] for m in metrics(tmp_path / "run") if m["test_accuracy"] is not None]
    assert max(tested) > least, tested
    assert tested[0] < max(tested) - 0.2, "with two classes per client it is hard at first"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_uga_learns_from_writers_as_in_its_paper(tmp_path: Path) -> None:
    """A federation like the paper's, each client one writer with all classes, at higher rates."""
    federation = ["--data", "glyphs", "--split", "natural", "--clients", "500", "--cohort", "10", "--model", "lenet"]
    options = ["--algorithm", "uga", "--local.lr", "0.03", "--server.lr", "0.3", "--rounds", "20", "--eval.every", "2"]
    rest = ["--eval.samples", "2000", "--log_to", "none", "--out", str(tmp_path / "run")]
    run(prepare(parse([*federation, *options, *rest])), SoloComm(), Place("alone", 0, 1, 0, 1), torch.device("cpu"), {})
    tested = [m["test_accuracy"] for m in metrics(tmp_path / "run") if m["test_accuracy"] is not None]
    assert max(tested) > 0.5, tested  # measured 0.74

"""It really learns: the embedded digits, 100 clients with 2 classes each, 10 a round, gradient masked averaging."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from shell import metrics

from fedmpi.comm import SoloComm
from fedmpi.env import Place
from fedmpi.options import parse
from fedmpi.run import prepare, run


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("algorithm", "rounds"), [("fedavg", 30), ("fedyogi", 20)])
def test_masked_averaging_learns_from_clients_with_two_classes(algorithm: str, rounds: int, tmp_path: Path) -> None:
    options = ["--algorithm", algorithm, "--rounds", str(rounds), "--eval.every", "2", "--log", "none"]
    prepared = prepare(parse(["--config", "glyphs-noniid-100", *options, "--out", str(tmp_path / "run")]))
    run(prepared, SoloComm(), Place("alone", 0, 1, 0, 1), torch.device("cpu"), {})
    tested = [m["test_accuracy"] for m in metrics(tmp_path / "run") if m["test_accuracy"] is not None]
    assert max(tested) > 0.7, tested  # chance is 0.1; measured 0.81 and 0.81
    assert max(tested[:3]) < 0.5, "with two classes a client it is hard at first"

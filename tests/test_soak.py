"""The crash test in short: random kills of real launchers and ranks, and every run ends with the right bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import soak

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(800)]


def test_runs_that_are_killed_again_and_again_end_as_undisturbed_ones(tmp_path: Path, mpiexec: list[str]) -> None:
    said: list[str] = []
    figures = soak.soak_for(10, 5, soak.LAUNCHERS, soak.ALGORITHMS, 2, 25, tmp_path, said.append)
    assert figures["wrong"] == [] and figures["kills"] >= 10, (figures, said)
    assert figures["runs"] >= 2 and figures["kills while writing a checkpoint"] >= 1, (figures, said)


def test_a_soak_sees_what_is_wrong(tmp_path: Path) -> None:
    """Check a run with other bits, and one that lacks a round."""
    (tmp_path / "model.safetensors").write_bytes(b"bits")
    (tmp_path / "metrics.jsonl").write_text('{"round": 1, "seconds": {}}\n{"round": 2, "seconds": {}}\n')
    (tmp_path / "starts.jsonl").write_text("{}\n")
    (tmp_path / "run.log").touch()
    right = soak.ending(tmp_path)
    for wanted, message in (
        (right, None),
        (("other", right[1]), "other bits"),
        ((right[0], right[1][:1]), "metrics.jsonl differs"),
    ):
        one = soak.Soak(1, 2, soak.LAUNCHERS, tmp_path.parent, {"fedavg": wanted}, print)
        run = soak.Run(one, tmp_path.name, "fedavg", soak.random.Random(0))
        run.log = tmp_path / "run.log"
        if message is None:
            run.compare()
            continue
        with pytest.raises(soak.Wrong, match=message):
            run.compare()

"""How much training gives a device to do, as upper bounds: the only speed that can be tested without one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.launch import call, need_device, once

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

LENET_BYTES, RESNET18_BYTES = 4 * 61_706, 4 * 11_173_962


@pytest.fixture(scope="module")
def counts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    need_device()

    def measure(folder: Path) -> str:
        done = call([sys.executable, "-m", "tests.accelerator.budgets"], folder)
        assert done.returncode == 0, done.stderr
        return done.stdout

    found: dict[str, Any] = json.loads(once(tmp_path_factory, "budgets", measure))
    return found


TRAINED = ("lenet", "augmented", "data on host", "batchnorm", "dataset", "scaffold", "graphs")


@pytest.mark.xdist_group("budgets")
class TestBudgets:
    @pytest.mark.parametrize("name", TRAINED)
    def test_the_host_never_waits_in_a_step_and_once_per_client(self, counts: dict[str, Any], name: str) -> None:
        assert counts[name]["step"]["waits"] == 0
        assert counts[name]["client"]["waits"] == 1  # for the update of the client before
        assert counts[name]["round"]["waits"] <= 4  # the state is copied to the device

    @pytest.mark.parametrize(("name", "kernels"), [("lenet", 50), ("augmented", 65), ("scaffold", 52), ("graphs", 12)])
    def test_kernels_per_step(self, counts: dict[str, Any], name: str, kernels: int) -> None:
        assert 0 < counts[name]["step"]["kernels"] <= kernels

    @pytest.mark.parametrize(("name", "kernels"), [("lenet", 20), ("batchnorm", 25), ("scaffold", 40)])
    def test_kernels_per_client_besides_its_steps(self, counts: dict[str, Any], name: str, kernels: int) -> None:
        """They do not depend on the size of the model."""
        assert 0 < counts[name]["client"]["kernels"] - 3 * counts[name]["step"]["kernels"] <= kernels

    def test_a_fold_on_the_device_is_few_kernels_on_any_number_of_ranks(self, counts: dict[str, Any]) -> None:
        (rounded,), (exact,) = (set(counts["fold"][kind]) for kind in ("float32", "exact"))
        assert 0 < rounded < exact <= 30

    def test_a_phase_ends_when_the_device_has_done_its_work(self, counts: dict[str, Any]) -> None:
        """Else the clock shows how long it took to launch the kernels. With sums on the host, nothing is launched."""
        assert counts["phase ends"]["host"] == 0 and 5 <= counts["phase ends"]["device"] <= 20

    def test_an_update_crosses_the_bus_once(self, counts: dict[str, Any]) -> None:
        to_host = counts["lenet"]["client"]["to_host"]
        assert LENET_BYTES <= to_host <= LENET_BYTES + 64  # its delta and its loss
        assert counts["lenet"]["step"]["to_host"] == counts["lenet"]["step"]["to_device"] == 0
        assert LENET_BYTES <= counts["lenet"]["round"]["to_device"] <= LENET_BYTES + 100_000  # the model, and indices

    def test_scaffold_brings_what_it_sends_and_keeps(self, counts: dict[str, Any]) -> None:
        assert 3 * LENET_BYTES <= counts["scaffold"]["client"]["to_host"] <= 3 * LENET_BYTES + 64

    def test_stacked_clients_are_fewer_kernels(self, counts: dict[str, Any]) -> None:
        """What --step.together is for: a small model's step is as long as its launches."""
        assert counts["together"]["8"] <= 0.6 * counts["together"]["1"]

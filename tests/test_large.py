"""The benchmark of large models and many ranks (benchmarks/large.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest
from conftest import REPO, need, rank_environment

SMALL = ["--parameters", "200000", "--clients", "4", "--cohort", "4", "--rounds", "2", "--json"]


def large(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the benchmark."""
    command = [sys.executable, str(REPO / "benchmarks" / "large.py"), *options]
    return subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=200)


def measured(*options: str) -> list[dict]:
    """Return the rows that the benchmark prints."""
    done = large(*SMALL, *options)
    need("link", "could not be made" not in done.stderr, done.stderr.splitlines()[-1] if done.stderr else "")
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(row: dict) -> None:
    """Check that a row has what was measured next to what was planned."""
    assert 100e6 < row["rank_bytes"] < row["node_bytes"] + 400e6 and row["planned_rank_bytes"] > 100e6
    assert 0.5 < row["rank_ratio"] < 1.5 and row["clients"] == 4
    assert 0 < row["outside_share"] < 1 and row["seconds"]["local"] > 0


@pytest.mark.launchers
def test_it_measures_ranks_of_a_node() -> None:
    (row,) = measured("--topology", "1x2")
    check(row)
    assert (row["topology"], row["ranks"], row["bytes_between_nodes"]) == ("1x2", 2, 0)


@pytest.mark.launchers
def test_it_measures_several_nodes() -> None:
    need("link", os.geteuid() == 0, "network namespaces are made by root only")
    need("link", bool(shutil.which("ip") and shutil.which("tc")), "ip and tc were not found: install iproute2")
    (row,) = measured("--topology", "2x2", "--sum", "float32")
    check(row)
    planned = row["planned_bytes_between_nodes"]
    assert 0.9 * planned < row["bytes_between_nodes"] < 1.1 * planned and planned > 2 * 4 * 200_000


def test_what_does_not_fit_is_not_started() -> None:
    (row,) = measured("--topology", "1x2", "--reserve", "1000000")
    assert row["planned_node_bytes"] > 0 and "rank_bytes" not in row


def test_a_topology_that_cannot_be_is_refused() -> None:
    done = large("--topology", "0x2")
    assert done.returncode == 2 and "'0x2' must be 1 to 16 nodes times 1 to 16 ranks" in done.stderr

"""The benchmark over emulated links (benchmarks/link.py): what travels, two versions, the timeline, no leftovers."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import REPO, need, rank_environment

LINK = [sys.executable, str(REPO / "benchmarks" / "link.py")]
TINY = ["--parameters", "100000", "--turns", "1", "--json"]


def start(*options: str) -> subprocess.Popen[str]:
    """Start the benchmark; skip the test where there cannot be a network."""
    need("link", os.geteuid() == 0, "network namespaces are made by root only")
    need("link", bool(shutil.which("ip") and shutil.which("tc")), "ip and tc were not found: install iproute2")
    command = [*LINK, *TINY, *options]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=rank_environment())


def finish(process: subprocess.Popen[str]) -> tuple[list[dict], str]:
    """Return the rows that the benchmark prints, and its error messages; nothing of it may be left behind."""
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.terminate()
    need("link", "could not be made" not in err, err.splitlines()[-1] if err else "")  # bridges, shaping: the kernel's
    assert not namespaces(process), "nothing is left behind"
    return [json.loads(line) for line in out.splitlines()], err


def measured(*options: str) -> list[dict]:
    """Run the benchmark and return its rows."""
    process = start(*options)
    rows, err = finish(process)
    assert process.returncode == 0, err
    return rows


def namespaces(process: subprocess.Popen[str]) -> list[str]:
    """Return the network namespaces that a benchmark has made and not removed."""
    return [path.name for path in Path("/run/netns").glob(f"fedmpi-{process.pid}-*")]


@pytest.mark.launchers
def test_it_counts_the_bytes_that_travel() -> None:
    rows = {row["case"]: row for row in measured("--ranks", "2", "--transport", "gloo")}
    sent = {case: row["payload_bytes"] / 100_000 / 2 for case, row in rows.items()}  # bytes an element that a rank has
    assert sent["plain all-reduce (mean)"] == 4.0
    assert (sent["GMA float32"], sent["GMA float32 with the last fold"]) == (4.25, 4.25)
    assert sent["GMA bf16 on the wire"] == 2.25
    assert sent["GMA exact"] == pytest.approx(4.75, abs=0.001), "5 bytes per number, and the sizes of the tiles"
    for row in rows.values():
        assert row["port_bytes"] * 2 > row["payload_bytes"] * 0.99, "it went through the ports, and not through memory"


@pytest.mark.launchers
@pytest.mark.parametrize("transport", ["gloo", "mpi"])
def test_ranks_of_a_node_share_its_link(transport: str, request: pytest.FixtureRequest) -> None:
    if transport == "mpi":
        request.getfixturevalue("mpiexec")
    rows = measured("--topology", "2x2", "--transport", transport, "--cases", "float32", "fold", "--mbit", "5000")
    assert {(row["topology"], row["nodes"], row["ranks"], row["mbit"]) for row in rows} == {("2x2", 2, 4, 5000)}
    assert {row["case"]: row["baseline"] for row in rows} == {
        "plain all-reduce (mean)": "plain all-reduce (mean)",
        "GMA float32": "plain all-reduce (mean)",
        "plain all-reduce with the last fold": "plain all-reduce with the last fold",
        "GMA float32 with the last fold": "plain all-reduce with the last fold",
    }
    for row in rows:
        assert row["port_bytes"] > 4 * 100_000, "a node has to get what the other one has"
        assert row["port_bytes"] < row["payload_bytes"], "what the ranks of a node exchange is not on its link"


@pytest.mark.launchers
def test_it_measures_two_versions_in_turn() -> None:
    two = ["--ranks", "2", "--transport", "gloo", "--cases", "exact", "--against", str(REPO), "--launches", "2"]
    rows = measured(*two)
    assert [row["version"] for row in rows] == ["this", "against"] * 2
    assert len({row["payload_bytes"] for row in rows if row["case"] == "GMA exact"}) == 1


@pytest.mark.launchers
def test_it_draws_one_round_over_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "link.png"
    (row,) = measured("--topology", "2x1", "--mbit", "200", "--parameters", "500000", "--timeline", str(picture))
    assert picture.read_bytes().startswith(b"\x89PNG") and 10_000 < picture.stat().st_size < 150_000
    assert row["ideal_ms"] == pytest.approx(4.5 * 500_000 * 8 / 200e3, rel=0.1)
    assert row["milliseconds"] > row["ideal_ms"] * 0.9 and 0 <= row["busy"] <= 1


@pytest.mark.launchers
def test_a_rank_that_fails_ends_it(tmp_path: Path) -> None:
    (tmp_path / "fedmpi").mkdir()
    (tmp_path / "fedmpi" / "__init__.py").write_text("raise RuntimeError('a version that does not start')")
    process = start("--ranks", "2", "--transport", "gloo", "--cases", "one", "--against", str(tmp_path))
    _, err = finish(process)
    assert process.returncode == 1 and "a version that does not start" in err and "ended with the codes" in err


@pytest.mark.launchers
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_behind(number: int, code: int) -> None:
    process = start("--topology", "2x2", "--transport", "gloo", "--turns", "100000")
    deadline = time.monotonic() + 60
    while process.poll() is None and len(namespaces(process)) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # the ranks are starting
    process.send_signal(number)
    finish(process)
    assert process.returncode == code


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--ranks", "1"], "--ranks 1 must be 2 to 16"),
        (["--topology", "1x4"], "'1x4' must be 2 to 16 nodes"),
        (["--topology", "2x2", "--ranks", "2"], "--ranks and --topology exclude each other"),
        (["--against", "nowhere"], "--against nowhere has no fedmpi/__init__.py"),
        (["--timeline", "link.svg"], "--timeline link.svg must end in .png"),
    ],
)
def test_it_refuses_what_it_cannot_do(options: list[str], message: str) -> None:
    done = subprocess.run([*LINK, *options], capture_output=True, text=True, timeout=100, env=rank_environment())
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr

"""`fedmpi doctor` with accelerators, and `--gpu`: on the pretend device, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmpi.commands.doctor import Finding
from fedmpi.commands.gpu import RULE, anonymous, block
from tests.accelerator.launch import TORCHRUN, call, need_device

pytestmark = [pytest.mark.accelerator, pytest.mark.processes]

OPTIONS = ["--device", "pretend", "--threads", "1"]
SECTIONS = {"device", "fold", "client", "alone", "rounds", "steps", "times", "exchange", "memory"}
Lines = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def device_present() -> None:
    need_device()


def doctor(folder: Path, *options: str, ranks: int = 1, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command at small sizes, with the device."""
    launcher = [sys.executable] if ranks == 1 else [*TORCHRUN, str(ranks)]
    return call([*launcher, "-m", "tests.accelerator.examined", "doctor", *OPTIONS, *options], folder, **variables)


def parsed(done: subprocess.CompletedProcess[str]) -> Lines:
    """Return the lines of --json."""
    return [json.loads(line) for line in done.stdout.splitlines()]


def failed(lines: Lines) -> set[str]:
    """Return the checks that failed."""
    return {line["check"] for line in lines if line["level"] == "FAIL"}


def about(check: str, lines: Lines) -> list[str]:
    """Return what is said of a check."""
    return [line["finding"] for line in lines if line["check"] == check]


def test_one_rank_is_examined_and_has_a_block_to_paste(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--gpu", PRETEND_MEMORY="3000000000")
    assert done.returncode == 0, done.stdout + done.stderr
    lines, record = done.stdout.splitlines(), json.loads((tmp_path / "gpu.json").read_text())
    assert lines[-1] == RULE and lines.count(RULE) == 2
    pasted = lines[lines.index(RULE) :]
    assert not any(line.startswith("FAIL") for line in lines) and any("gpu memory" in line for line in pasted)
    for private in (os.uname().nodename, str(tmp_path), str(Path.home()), "cache", "network", "disk"):
        assert private not in "\n".join(pasted)
    assert SECTIONS <= record.keys() and record["device"][0]["memory"] == 3_000_000_000
    assert record["device"][0]["driver"] == "unknown"
    assert (tmp_path / "gpu.json").stat().st_mode & 0o777 == 0o600


def test_two_ranks_share_a_device_with_sums_on_the_host(tmp_path: Path) -> None:
    """Devices are told apart by their UUIDs, and not by their number."""
    done = doctor(tmp_path, "--gpu", "--json", ranks=2, PRETEND_DEVICES="2", PRETEND_UUIDS="same,same")
    lines = parsed(done)
    assert done.returncode == 0 and failed(lines) == set(), done.stdout + done.stderr
    assert about("devices", lines)[-1] == "2 ranks on 1 accelerator: ranks 0, 1 share one"
    assert len(about("gpu device", lines)) == 2
    assert about("gpu rounds", lines)[0].startswith("two rounds on one rank and on 2 give the same model: ")


def test_two_ranks_on_two_devices_sum_on_them(tmp_path: Path) -> None:
    """Over the strict stand-in for NCCL, which takes no tensor of the host."""
    done = doctor(tmp_path, "--gpu", "--json", "--sums", "device", ranks=2, PRETEND_DEVICES="2")
    lines = parsed(done)
    assert done.returncode == 0 and failed(lines) == set(), done.stdout + done.stderr
    assert about("ranks", lines)[0].startswith("2 ranks met over torch, and tried collectives on pretend:0; ")
    assert about("devices", lines)[-1] == "2 ranks on 2 accelerators"
    assert json.loads((tmp_path / "gpu.json").read_text())["sums"] == "pretend"


def test_sums_on_one_device_of_two_ranks_are_refused(tmp_path: Path) -> None:
    variables = {"PRETEND_DEVICES": "2", "PRETEND_UUIDS": "same,same"}
    done = doctor(tmp_path, "--json", "--sums", "device", ranks=2, **variables)
    lines = parsed(done)
    assert done.returncode == 1 and failed(lines) == {"ranks"}
    assert lines[-1]["finding"].endswith("but ranks 0, 1 share pretend:0") and lines[-1]["fix"] == "use --sums host"


def test_a_device_with_wrong_kernels_is_found(tmp_path: Path) -> None:
    """The fold rounds, and training multiplies matrices: sums are on the host here."""
    done = doctor(tmp_path, "--gpu", "--json", BROKEN="rounding,product")
    lines = parsed(done)
    assert done.returncode == 1 and failed(lines) == {"gpu fold", "gpu client", "gpu rounds"}, done.stdout + done.stderr
    assert about("gpu client", lines)[0] == "training a client twice gives other bits: lenet, cnn, gru"


@pytest.mark.skipif(torch.accelerator.is_available(), reason="this machine has an accelerator")
def test_without_an_accelerator_there_is_nothing_to_examine(tmp_path: Path) -> None:
    done = call([sys.executable, "-m", "fedmpi", "doctor", "--gpu"], tmp_path)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("fedmpi: --gpu checks accelerators, but torch sees none on this machine; ")


def test_a_block_has_the_problems_of_other_ranks_and_no_names() -> None:
    slow = Finding("FAIL", "gpu fold", f"of {os.uname().nodename} in {Path.home()}/x.py, at 3 GB/s", "leave")
    mine = [Finding("ok", "network", "n is 127.0.0.1"), Finding("ok", "gpu fold", "fine")]
    _, _, first, other, _ = block([mine, [slow]], 2).splitlines()
    assert first == "ok    gpu fold       fine" and other == "FAIL  gpu fold       rank 1: of HOST in PATH, at 3 GB/s"
    assert anonymous("see ~/a/b, /tmp/c/d.py:3; a/b") == "see PATH, PATH:3; a/b"
    assert anonymous("peer [10.0.0.7]:29 [1], NCCL 2.29.7") == "peer ADDRESS [1], NCCL 2.29.7"

"""The whole command under the real launchers: the same model to the last bit, and a clear end when something fails."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import BIN, rank_environment
from matrix import COMBINATIONS, SMALL

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(900)]

HERE = Path(__file__).parents[1]
ALONE = [sys.executable]
MODULE = ["-m", "fedmpi", "train"]


def torchrun(ranks: int) -> list[str]:
    return [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}"]


def mpi(mpiexec: list[str], ranks: int) -> list[str]:
    return [*mpiexec, "-n", str(ranks), sys.executable, "-m", "mpi4py"]


def launch(command: list[str], timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=rank_environment() | env, capture_output=True, text=True, timeout=timeout)


def by_hand() -> dict[str, str]:
    """What two ranks that nobody launches need to know, but for their numbers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def result(out: Path) -> tuple[str, list[dict]]:
    """The digest of the model that a run left, and its metrics without times and bytes."""
    digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
    assert json.loads((out / "finished.json").read_text())["model_sha256"] == digest
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return digest, [{k: v for k, v in m.items() if not k.startswith(("seconds", "bytes_"))} for m in metrics]


def test_same_bits_on_any_number_of_ranks_under_any_launcher(tmp_path: Path, mpiexec: list[str]) -> None:
    """Train every algorithm, and FedAvg with every mask: alone, on 4 ranks of torchrun and on 3 of mpiexec."""
    launches = {"alone": (ALONE, "auto"), "torchrun": (torchrun(4), "torch"), "mpiexec": (mpi(mpiexec, 3), "mpi")}
    for name, (launcher, comm) in launches.items():
        done = launch([*launcher, str(HERE / "matrix.py"), str(tmp_path / name), comm])
        assert done.returncode == 0, f"{name}: {done.stderr}"
    for algorithm, mask in COMBINATIONS:
        found = {name: result(tmp_path / name / f"{algorithm}-{mask}") for name in launches}
        digests = {name: digest for name, (digest, _) in found.items()}
        assert len(set(digests.values())) == 1, (algorithm, mask, digests)
        assert all(metrics == found["alone"][1] for _, metrics in found.values()), (algorithm, mask)
    models = {result(tmp_path / "alone" / f"{a}-{m}")[0] for a, m in COMBINATIONS}
    assert len(models) == len(COMBINATIONS), "different algorithms and masks give different models"


def test_same_bits_from_the_commands_of_the_readme(tmp_path: Path, mpiexec: list[str]) -> None:
    launches = {
        "alone": [*ALONE, *MODULE],
        "torchrun-1": [*torchrun(1), *MODULE],
        "torchrun": [*torchrun(2), *MODULE],
        "mpi": [*mpi(mpiexec, 2), *MODULE, "--comm", "mpi"],
        "gloo-under-mpi": [*mpi(mpiexec, 2), *MODULE, "--comm", "torch"],
    }
    for name, command in launches.items():
        done = launch([*command, *SMALL, "--algorithm", "fedyogi", "--mask", "gma", "--out", str(tmp_path / name)])
        assert done.returncode == 0, f"{name}: {done.stderr}"
        assert "round 2/2" in done.stdout and f"done: {tmp_path / name}" in done.stdout
    assert len({result(tmp_path / name)[0] for name in launches}) == 1


def test_ranks_started_by_hand_meet_at_the_address_they_are_given(tmp_path: Path) -> None:
    world = by_hand()
    command = [sys.executable, "-m", "fedmpi", "train", *SMALL, "--out", str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(command, env=rank_environment() | world | {"RANK": str(r), "LOCAL_RANK": str(r)})
        for r in (0, 1)
    ]
    assert [rank.wait(100) for rank in ranks] == [0, 0]
    assert (tmp_path / "run" / "finished.json").exists()


@pytest.mark.parametrize("options", [["--tau", "1.5"], ["--data", "mnist", "--data_root", "nowhere"]])
def test_a_users_mistake_is_one_line_from_all_ranks(options: list[str], tmp_path: Path, mpiexec: list[str]) -> None:
    command = [*mpi(mpiexec, 2), *MODULE, *SMALL, *options, "--out", str(tmp_path / "run")]
    done = launch(command, FEDMPI_OFFLINE="1")
    assert done.returncode == 2
    # Before the ranks have met, mpiexec does not end rank 1 when rank 0 leaves: it prints the same error later.
    said = {line.replace("rank 1: ", "") for line in done.stderr.splitlines() if line.strip()}
    assert len(said) == 1 and said.pop().startswith("fedmpi: "), done.stderr
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_a_single_rank_is_reported_too(tmp_path: Path) -> None:
    """Started by hand, one rank with another argument: it says why it leaves, the other one that it is gone."""
    world = by_hand()
    command = [sys.executable, "-m", "fedmpi", "train", *SMALL, "--timeout", "8", "--out", str(tmp_path / "run")]
    ranks = [
        subprocess.Popen(
            command + ["--mask", "gma", "--tau", tau],
            env=rank_environment() | world | {"RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, tau in (("0", "0.4"), ("1", "2"))
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [1, 2]
    assert said[1] == "fedmpi: rank 1: --tau is 2.0; it must be in [0, 1]\n"
    assert "rank 1 of 2 did not answer" in said[0] and "Traceback" not in said[0]


FAULTY = """
import sys
from fedmpi import commands
from fedmpi.clients import task
from mpi4py import MPI

def score(self, block, **more):
    raise RuntimeError("a fault of rank 1 alone")

if MPI.COMM_WORLD.rank == 1:
    task.Task.score = score
sys.exit(commands.main(sys.argv[1:]))
"""


def test_an_uncaught_error_of_one_rank_ends_the_whole_mpi_job(tmp_path: Path, mpiexec: list[str]) -> None:
    """At once: the run's own timeout, 600 s, is longer than the test's."""
    command = [*mpiexec, "-n", "3", sys.executable, "-c", FAULTY, "train", *SMALL, "--comm", "mpi"]
    done = launch([*command, "--out", str(tmp_path / "run")])
    assert done.returncode not in (0, 2)
    assert "rank 1: Traceback" in done.stderr and "a fault of rank 1 alone" in done.stderr


def test_a_killed_rank_ends_the_run_and_the_model_is_not_called_finished(tmp_path: Path) -> None:
    out = tmp_path / "run"
    many = [
        "--clients",
        "40",
        "--cohort",
        "7",
        "--rounds",
        "500",
        "--threads",
        "1",
        "--log_to",
        "none",
        "--out",
        str(out),
    ]
    job = subprocess.Popen([*torchrun(2), *MODULE, *many], env=rank_environment(), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").read_text():
            assert time.monotonic() < deadline and job.poll() is None
            time.sleep(0.1)
        victim = ranks_of(job.pid)[1]
        os.kill(victim, signal.SIGKILL)
        assert job.wait(60) != 0
    finally:
        job.kill()
        job.wait()
        job.stderr.close()
    assert not (out / "finished.json").exists()
    for line in (out / "metrics.jsonl").read_text().splitlines():
        json.loads(line)  # what was written is whole


def ranks_of(agent: int) -> list[int]:
    """The process ids of the ranks that a torchrun agent started."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return [int(pid) for pid in children if b"fedmpi" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_one_ranks_mistake_ends_all_of_mpi_at_once(tmp_path: Path, mpiexec: list[str]) -> None:
    """A rank that left before MPI had started would be waited for in vain: a file that one node lacks, say."""
    rank = [sys.executable, "-m", "mpi4py", *MODULE, "--comm", "mpi", *SMALL, "--out", str(tmp_path / "run")]
    for first, second in (([], ["--tau", "2"]), (["--mask", "nowhere:mask"], [])):
        done = launch([*mpiexec, "-n", "1", *rank, *first, ":", "-n", "1", *rank, *second], timeout=60)
        assert done.returncode == 2, done.stderr
        said = [line for line in done.stderr.splitlines() if line.strip()]
        assert len(said) == 1 and said[0].startswith(f"fedmpi: rank {1 if second else 0}: "), done.stderr
        assert not (tmp_path / "run").exists()

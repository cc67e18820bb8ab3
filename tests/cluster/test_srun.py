"""Under a real Slurm of two nodes: srun's ranks and submitit's find each other and give the bits of one rank alone."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_box
from conftest import need, rank_environment
from matrix import SMALL

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(300)]

TRAIN = [sys.executable, "-m", "fedmpi", "train", *SMALL, "--algorithm", "fedyogi", "--mask", "gma"]
TWO_NODES = ["srun", "--nodes=2", "--ntasks-per-node=1", "--time=3"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Variables of a running cluster."""
    absent = slurm_box.missing()
    need("slurm", not absent, f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)")
    with slurm_box.slurm() as variables:
        yield rank_environment() | variables


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the model that one rank trains."""
    out = tmp_path_factory.mktemp("alone") / "run"
    subprocess.run([*TRAIN, "--out", str(out)], env=rank_environment(), check=True, capture_output=True, timeout=100)
    return digest(out)


def digest(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def run(command: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)


def test_ranks_of_srun_meet_over_gloo(cluster: dict[str, str], alone: str, tmp_path: Path) -> None:
    done = run([*TWO_NODES, *TRAIN, "--out", str(tmp_path / "run")], cluster)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (torch)" in done.stdout and digest(tmp_path / "run") == alone


def test_ranks_of_srun_meet_over_mpi(cluster: dict[str, str], alone: str, tmp_path: Path, mpiexec: list[str]) -> None:
    done = run([*TWO_NODES, "--mpi=pmi2", *TRAIN, "--comm", "mpi", "--out", str(tmp_path / "run")], cluster)
    assert done.returncode == 0, done.stderr
    assert "2 ranks (mpi)" in done.stdout and digest(tmp_path / "run") == alone


def test_a_world_of_lone_mpi_ranks_is_refused_with_the_fix(
    cluster: dict[str, str], tmp_path: Path, mpiexec: list[str]
) -> None:
    done = run([*TWO_NODES, "--mpi=none", *TRAIN, "--comm", "mpi", "--out", str(tmp_path / "run")], cluster)
    assert done.returncode == 2
    assert "MPI sees a world of 1, so each rank would train alone: start with 'srun --mpi=pmi2'" in done.stderr
    assert not (tmp_path / "run").exists()


SUBMIT = """
import sys, time, warnings
import submitit
from fedmpi.commands import main

warnings.simplefilter("ignore")  # without accounting submitit warns at every look at the job's state
executor = submitit.SlurmExecutor(folder=sys.argv[1], python=sys.executable)
executor.update_parameters(nodes=2, ntasks_per_node=1, time=3, job_name="fedmpi")
job = executor.submit(main, sys.argv[2:])
deadline = time.monotonic() + 100
while not all(job._paths.folder.joinpath(f"{job.job_id}_{rank}_result.pkl").exists() for rank in (0, 1)):
    assert time.monotonic() < deadline, job.stderr()
    time.sleep(0.2)
time.sleep(0.5)  # a result is written before it is whole
print([task.result() for task in (job.task(0), job.task(1))])
"""


def test_tasks_of_submitit_are_ranks(cluster: dict[str, str], alone: str, tmp_path: Path) -> None:
    words = TRAIN[TRAIN.index("train") :]
    done = run([sys.executable, "-c", SUBMIT, str(tmp_path / "jobs"), *words, "--out", str(tmp_path / "run")], cluster)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().endswith("[0, 0]") and digest(tmp_path / "run") == alone

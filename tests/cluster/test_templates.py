"""The sbatch templates on a real Slurm of two nodes: stopped by their own signal, they are queued again and go on to
the bits of one rank alone; a mistake is not tried again."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_box
from conftest import BIN, REPO, need, rank_environment
from long import LONG, digest, lines, train_alone, wait_for

from fedmpi.cluster.arrays import BATCH_SRUN, SEAL

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]

TEMPLATES = ("srun", "torchrun", "mpi")


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Variables of a running cluster, for jobs that use this Python."""
    absent = slurm_box.missing()
    need("slurm", not absent, f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)")
    with slurm_box.slurm() as variables:
        yield rank_environment() | variables | {"PYTHON": sys.executable, "RANKS_PER_NODE": "2"}


def sbatch(template: str, arguments: list[str], log: Path, env: dict[str, str]) -> str:
    """The number of a job of two nodes with a rank each, or, with one launcher per node, two."""
    few = ["--ntasks-per-node=1", "--cpus-per-task=1", "--time=5", f"--output={log}"]
    command = ["sbatch", "--parsable", *few, str(REPO / "slurm" / f"{template}.sbatch"), *arguments]
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def job(number: str, env: dict[str, str]) -> dict[str, str]:
    """What Slurm knows of a job."""
    command = ["scontrol", "show", "job", number]
    shown = subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout
    return dict(re.findall(r"(\w+)=(\S*)", shown))


def ended(number: str, env: dict[str, str]) -> bool:
    return job(number, env)["JobState"] in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def test_templates_stop_in_time_and_resume_to_the_bits_of_one_rank(cluster: dict[str, str], tmp_path: Path) -> None:
    need("mpi", (BIN / "mpiexec").exists(), "no MPI next to this Python: pip install mpich")
    batch = {f"{name}-batch": name for name in TEMPLATES}  # here the batch script itself gets the signal, and a SIGTERM
    runs = {name: name for name in TEMPLATES} | batch
    logs = {name: tmp_path / f"{name}.log" for name in (*runs, "mistake")}
    jobs = {run: sbatch(name, [*LONG, "--out", str(tmp_path / run)], logs[run], cluster) for run, name in runs.items()}
    wrong = sbatch("torchrun", [*LONG, "--tau", "3", f"--out={tmp_path / 'mistake'}"], logs["mistake"], cluster)

    waiting = dict(jobs)
    while (
        waiting
    ):  # each gets the signal of its template as soon as it has begun, without the batch script: as from Slurm
        wait_for(
            lambda: any(lines(tmp_path / name / "metrics.jsonl") for name in waiting),
            on_timeout=lambda: {name: log.read_text() for name, log in logs.items() if log.exists()},
        )
        for name, number in list(waiting.items()):
            if lines(tmp_path / name / "metrics.jsonl"):
                signal = ["--batch", "--signal=TERM"] if name in batch else ["--signal=USR2"]
                subprocess.run(["scancel", *signal, number], env=cluster, check=True, timeout=60)
                del waiting[name]
    alone = train_alone(tmp_path / "alone")
    for number in (*jobs.values(), wrong):
        wait_for(lambda number=number: ended(number, cluster), 150)

    for name, number in jobs.items():
        text = logs[name].read_text()
        assert job(number, cluster)["JobState"] == "COMPLETED", text
        assert job(number, cluster)["Restarts"] == "1", text
        first, second = lines(tmp_path / name / "starts.jsonl")
        ranks = 4 if runs[name] == "torchrun" else 2
        assert (first["round"], first["ranks"], first["restart"]) == (0, ranks, 0)
        assert 0 < second["round"] < 300 and (second["ranks"], second["restart"]) == (ranks, 1)
        assert f"stopped after round {second['round']} (SIGUSR2)" in text, "the log has both starts"
        assert digest(tmp_path / name) == alone

    text = logs["mistake"].read_text()
    assert (job(wrong, cluster)["JobState"], job(wrong, cluster)["ExitCode"]) == ("FAILED", "2:0"), text
    assert job(wrong, cluster)["Restarts"] == "0" and "--tau is 3.0; it must be in [0, 1]" in text


def test_templates_are_alike_and_say_what_slurm_needs() -> None:
    """What every template needs for its job to be warned, started again and ended as a whole."""
    for name in TEMPLATES:
        text = (REPO / "slurm" / f"{name}.sbatch").read_text()
        for line in ("#SBATCH --signal=USR2@120", "#SBATCH --requeue", "#SBATCH --open-mode=append"):
            assert f"\n{line}\n" in text, (name, line)
        assert "srun" in text and "--kill-on-bad-exit=1" in text
        assert SEAL in text and BATCH_SRUN in text, "as in the scripts of 'fedmpi submit'"
        checked = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, timeout=20)
        assert checked.returncode == 0, checked.stderr


def test_a_template_without_python_is_a_one_line_error(tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "PYTHON"} | {"SLURM_JOB_ID": "1"}
    for name in TEMPLATES:
        command = ["bash", str(REPO / "slurm" / f"{name}.sbatch"), "--out", "a"]
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=20)
        assert done.returncode == 2
        assert "no .venv/bin/python here: submit from the root of the checkout" in done.stderr

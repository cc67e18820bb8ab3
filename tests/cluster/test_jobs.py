"""Jobs for real, on a Slurm of two nodes and on this machine: runs are submitted, looked at, stopped, killed and
cancelled, and end with the bits of one that nobody disturbed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_box
from conftest import need, rank_environment

from fedmpi.cluster.slurm import slurm_job
from fedmpi.cluster.status import look, supervisor_alive
from fedmpi.commands import main

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(800)]

# A mask of the user's own, found in the folder of the submission: its rounds take long enough to step in between.
PACE = """
import time
from pathlib import Path

def slow(knobs):
    def mask(votes, clients):
        if len(votes) > 1000:  # not when it is tried before the run
            time.sleep(0.1)
            if Path("broken").exists():
                raise RuntimeError("broken on purpose")
        return votes.abs().float() / clients
    return mask
"""
ROUNDS = 80
RUN = (
    f"train --mask pace:slow --rounds {ROUNDS} --checkpoint.every 1 --data glyphs --model logistic --split iid "
    "--clients 20 --cohort 5 --local.steps 3 --eval.samples 200 --threads 1 --log_to none --out"
).split()
FEDMPI = [sys.executable, "-m", "fedmpi"]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that everything is submitted from, with no launcher's variables around."""
    pytest.importorskip("submitit")
    folder = tmp_path_factory.mktemp("here")
    (folder / "pace.py").write_text(PACE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        clean = rank_environment()
        for name in set(os.environ) - set(clean):
            patch.delenv(name)
        for name, value in clean.items():
            patch.setenv(name, value)
        yield folder
        for run in ("kept", "dropped"):  # after a failure
            if supervisor_alive(folder / run):
                main(["cancel", str(folder / run)])


@pytest.fixture(scope="module")
def cluster(here: Path) -> Iterator[None]:
    """A running Slurm of two nodes, which the commands of this process talk to."""
    absent = slurm_box.missing()
    need("slurm", not absent, f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)")
    with slurm_box.slurm() as variables, pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def alone(here: Path) -> str:
    """The digest of the model that one rank trains undisturbed."""
    done = subprocess.run([*FEDMPI, *RUN, "alone"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return digest(Path("alone"))


def digest(run: Path) -> str:
    return hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()


def submit(capsys: pytest.CaptureFixture[str], *options: str, run: str, more: tuple[str, ...] = ()) -> str:
    """Submit a run in this process, which has everything imported; returns the job's id."""
    assert main(["submit", *options, "--", *RUN, run, *more]) == 0
    match = re.search(r"submitted (?:Slurm|local) job (\d+): ", capsys.readouterr().out)
    assert match is not None
    return match[1]


def slurm(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def until(true: Callable[[], Any], what: str, seconds: float = 150) -> Any:
    """Wait for something to come true."""
    deadline = time.monotonic() + seconds
    while not (value := true()):
        assert time.monotonic() < deadline, f"{what} took longer than {seconds} seconds\n{logs()}"
        time.sleep(0.05)
    return value


def logs() -> str:
    """The ends of all logs, for a test that failed."""
    return "\n".join(f"{path}:\n{path.read_text()[-2000:]}" for path in sorted(Path().glob("*/slurm/*log*")))


def rounds(run: str) -> int:
    with contextlib.suppress(OSError):
        return Path(run, "metrics.jsonl").read_bytes().count(b"\n")
    return 0


def starts(run: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(run, "starts.jsonl").read_text().splitlines()]


def state(run: str) -> str:
    return str(look(Path(run))["state"])


def ranks(run: str) -> list[int]:
    """The processes of a Slurm job's ranks by their numbers, or of a local job's, in the order of their start."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if words[0].endswith(b"python") and str(Path(run, "slurm").absolute()).encode() in b" ".join(words):
                if b"fedmpi.cluster.supervisor" in words:
                    return list(map(int, (folder / "task" / folder.name / "children").read_text().split()))
                variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
                if b"submitit.core._submit" in words and "SLURM_PROCID" in variables:
                    found[int(variables["SLURM_PROCID"])] = int(folder.name)
    return [found[number] for number in sorted(found)]


def is_set_up(pid: int) -> bool:
    """Whether --setup has run before this process."""
    return "SET_UP=yes" in Path(f"/proc/{pid}/environ").read_text().split("\0")


def disturb_all(disturb: dict[str, Callable[[], Any]]) -> None:
    """Do something to each run as soon as it has had ten rounds."""
    while disturb:
        run = until(lambda: next((run for run in disturb if rounds(run) >= 10), None), f"a round of {list(disturb)}")
        assert state(run) == "running", "it is in the middle"
        disturb.pop(run)()


def test_jobs_on_two_nodes_survive_whatever_happens_to_them(
    cluster: None, alone: str, capsys: pytest.CaptureFixture[str], mpiexec: list[str]
) -> None:
    """All in the queue at once. Five are disturbed after ten rounds; four of them are to go on by themselves."""
    slurm("scontrol", "update", "PartitionName=main", "State=DOWN")
    two = ("--nodes", "2", "--time", "8")
    jobs = {name: submit(capsys, *two, run=name) for name in ("warned", "batch", "requeued", "killed", "cancelled")}
    jobs["mpi"] = submit(capsys, *two, "--mpi", "pmi2", run="mpi", more=("--comm", "mpi"))
    jobs["unread"] = submit(capsys, run="unread", more=("--data", "mnist", "--data_root", "nowhere"))
    for run, job in jobs.items():
        seen = look(Path(run))
        assert (seen["state"], seen["job"], seen["round"], seen["rounds"]) == ("queued", job, 0, ROUNDS)
        assert "PartitionDown" in seen["why"] and Path(run).stat().st_mode & 0o777 == 0o700
    assert main(["submit", "--", *RUN, "warned"]) == 2
    assert f"belongs to Slurm job {jobs['warned']}, which is PENDING" in capsys.readouterr().err
    slurm("scontrol", "update", "PartitionName=main", "State=UP")

    disturb: dict[str, Callable[[], Any]] = {
        "warned": lambda: slurm("scancel", "--signal=USR2", jobs["warned"]),
        "batch": lambda: slurm("scancel", "--batch", "--signal=TERM", jobs["batch"]),
        "requeued": lambda: slurm("scontrol", "requeue", jobs["requeued"]),
        "killed": lambda: os.kill(ranks("killed")[1], signal.SIGKILL),
        "cancelled": lambda: main(["cancel", "cancelled"]),
    }
    disturb_all(disturb)
    said = capsys.readouterr().out
    assert re.search(rf"cancelled: Slurm job {jobs['cancelled']} cancelled; the checkpoint of round \d+ is kept", said)
    assert state("cancelled") == "cancelled" and len(starts("cancelled")) == 1
    assert main(["cancel", "cancelled"]) == 2 and "is not running: it is cancelled" in capsys.readouterr().err
    again = submit(capsys, "--nodes", "1", "--ranks_per_node", "2", run="cancelled")
    assert int(again) > int(jobs["cancelled"]), "a new job, as the old one is not revived"

    for run in ("warned", "batch", "requeued", "killed", "cancelled", "mpi"):
        until(lambda run=run: Path(run, "finished.json").exists(), f"the end of {run}")
        assert digest(Path(run)) == alone and state(run) == "finished"
        lives = starts(run)
        assert len(lives) == (1 if run == "mpi" else 2) and all(life["ranks"] == 2 for life in lives)
        assert run == "mpi" or 0 < lives[1]["round"] < ROUNDS, "it resumed from a checkpoint"
    assert starts("mpi")[0]["comm"] == "mpi"
    assert [life["job"] for life in starts("warned")] == [jobs["warned"]] * 2
    first, *_ = Path("warned", "lives.jsonl").read_text().splitlines()  # Slurm may end one more before it has begun
    assert json.loads(first)["round"] == starts("warned")[1]["round"]

    seen = until(lambda: (s := look(Path("unread")))["state"] == "failed" and s, "the end of a run that has no data")
    assert "exit code 2; not restarted" in seen["why"] and "nowhere" in "\n".join(seen["error"])


def test_a_fault_that_comes_again_ends_a_job_after_its_retries(
    cluster: None, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "own").mkdir()
    with contextlib.chdir("own"):
        (here / "own" / "pace.py").write_text(PACE)
        (here / "own" / "broken").touch()
        submit(capsys, "--retries", "1", run="broken-run")
        until(lambda: state("broken-run") == "requeued", "the second life in the queue")
        seen = until(lambda: (s := look(Path("broken-run")))["state"] == "failed" and s, "the last fault")
        assert "exit code 1; not restarted: no round was added to the 0 saved ones in 2 attempts" == seen["why"]
        assert any("broken on purpose" in line for line in seen["error"])
        assert main(["status", "broken-run"]) == 0 and "broken on purpose" in capsys.readouterr().out


STUBBORN = """#!/bin/bash
#SBATCH --output=stubborn.log --requeue
trap '' TERM
touch stubborn
until [ -e go ]; do sleep 0.1; done
{python} -m fedmpi requeue 75
"""


def test_a_cancelled_job_is_not_revived_by_its_own_script(cluster: None) -> None:
    """Most scripts die when they are cancelled; this one survives for Slurm's KillWait, long enough to ask."""
    Path("stubborn.sh").write_text(STUBBORN.format(python=sys.executable))
    job = slurm("sbatch", "--parsable", "stubborn.sh").strip()
    until(Path("stubborn").exists, "a script")
    slurm("scancel", job)
    Path("go").touch()
    said = until(lambda: re.search(".*queued again.*", Path("stubborn.log").read_text()), "its word")[0]
    assert said == f"fedmpi: job {job} stopped in good order; not queued again: it is COMPLETING already"
    facts = until(lambda: (facts := slurm_job(job)) and facts["JobState"] == "CANCELLED" and facts, "its end")
    assert facts["Restarts"] == "0"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--partition", "nowhere"], "sbatch refused the job: invalid partition specified: nowhere"),
        (["--constraint", "moon"], "sbatch refused the job: Batch job submission failed: Invalid feature"),
    ],
)
def test_a_refusal_by_sbatch_is_a_one_line_error_and_leaves_nothing(
    options: list[str], said: str, cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", *options, "--", *RUN, "refused"]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not Path("refused").exists()


def test_a_job_that_waits_for_more_than_there_is_says_so_and_can_be_cancelled(
    cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    submit(capsys, "--nodes", "3", run="hopeless")
    seen = until(lambda: (s := look(Path("hopeless")))["why"].startswith("PartitionNodeLimit") and s, "the reason")
    assert seen["state"] == "queued"
    assert main(["cancel", "hopeless"]) == 0
    assert "cancelled; no checkpoint was written" in capsys.readouterr().out and state("hopeless") == "cancelled"


def test_mpi_needs_a_word_on_how_srun_starts_it(cluster: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--nodes", "2", "--", *RUN, "refused", "--comm", "mpi"]) == 2
    assert "add --mpi pmi2 (MPICH) or --mpi pmix (Open MPI)" in capsys.readouterr().err
    assert not Path("refused").exists()


def test_local_jobs_resume_after_a_stop_and_a_kill_and_end_when_cancelled(
    here: Path, alone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at once, each with two ranks; the command that submits returns while they run, and its output is closed."""
    local = ["--executor", "local", "--ranks_per_node", "2", "--setup", "export SET_UP=yes"]
    done = subprocess.run([*FEDMPI, "submit", *local, "--", *RUN, "kept"], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "submitted local job" in done.stdout and not done.stderr
    submit(capsys, *local, run="dropped")
    assert state("kept") == "running" and state("dropped") == "running"
    assert main(["submit", "--executor", "local", "--", *RUN, "kept"]) == 2
    assert "which is running" in capsys.readouterr().err

    supervisor = int(json.loads(Path("dropped", "job.json").read_text())["job"])
    assert os.getsid(supervisor) == supervisor, "it keeps running when the terminal is closed"

    disturb: dict[str, Callable[[], Any]] = {
        "kept": lambda: os.kill(ranks("kept")[1], signal.SIGUSR2),
        "dropped": lambda: main(["cancel", "dropped"]),
    }
    disturb_all(disturb)
    assert "cancelled; the checkpoint of round" in capsys.readouterr().out
    assert state("dropped") == "cancelled" and len(starts("dropped")) == 1 and not ranks("dropped")
    until(lambda: len(starts("kept")) == 2 and rounds("kept") >= starts("kept")[1]["round"] + 5, "its second life")
    rank = ranks("kept")[0]
    assert is_set_up(rank)
    os.kill(rank, signal.SIGKILL)
    submit(capsys, "--executor", "local", run="dropped")
    for run in ("kept", "dropped"):
        until(lambda run=run: Path(run, "finished.json").exists(), f"the end of {run}")
        assert digest(Path(run)) == alone and state(run) == "finished"
    assert [life["restart"] for life in starts("kept")] == [0, 1, 2] and len(starts("dropped")) == 2
    ends = [json.loads(line) for line in Path("kept", "lives.jsonl").read_text().splitlines()]
    assert [end["code"] for end in ends] == [75, 1] and all(end["again"] for end in ends)
    assert main(["logs", "kept"]) == 0 and "rank 0 of 2 was killed by SIGKILL; restarting" in capsys.readouterr().out
    rounds_before = [life["round"] for life in starts("kept")]
    assert 0 < rounds_before[1] < rounds_before[2] < ROUNDS
    until(
        lambda: not supervisor_alive(Path("kept")) and not supervisor_alive(Path("dropped")),
        "the end of the supervisors",
    )

"""Several runs as one job array: what is handed to Slurm, and an array for real on a Slurm of two nodes, where elements
are warned, killed and cancelled, and each ends with the bits of the same run alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_box
from conftest import need, rank_environment
from long import LONG, digest, lines, wait_for
from run_folders import make_run

from fedmpi.cluster import arrays, slurm
from fedmpi.cluster.slurm import slurm_job
from fedmpi.cluster.status import look, newest_checkpoint, states_of
from fedmpi.cluster.submit import SubmitOptions, submit_runs
from fedmpi.commands import main
from fedmpi.errors import RunError, UserError
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Config
from fedmpi.runs.options import parse

# A mask of the user's own, found in the folder of the submission: rounds drag on until a file lets them go.
GATE = """
import itertools
import time
from pathlib import Path

def slow(knobs):
    rounds = itertools.count()
    def mask(votes, clients):
        tried_out = votes.numel() < 100
        if not tried_out and next(rounds) > 10 and not Path("go").exists():
            time.sleep(0.5)
        return votes.abs().float() / clients
    return mask
"""
ROUNDS = 60
RUN = [*LONG, "--mask", "gate:slow", "--rounds", str(ROUNDS), "--eval.every", "10", "--checkpoint.every", "5"]


# What is handed over


def test_each_element_asks_for_its_own_run_to_be_requeued(tmp_path: Path) -> None:
    """The lines after srun, run by bash as in an element: a mistake (code 2) is recorded in that run folder only."""
    submitit = pytest.importorskip("submitit")
    runs = [make_run(tmp_path / name) for name in ("plain", "it's $HOME", "x")]
    given = arrays.slurm_parameters(SubmitOptions(ranks_per_node=2), runs, tmp_path / "home", 2)
    text = submitit.slurm.slurm._make_sbatch_string(command="COMMAND", folder=tmp_path, map_count=3, **given)
    before, _, after = text.partition("COMMAND\n")
    for option in ("array=0-2%2", "job-name=fedmpi-home", "ntasks-per-node=2", "requeue"):
        assert f"#SBATCH --{option}\n" in before, option
    element = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}
    for code in (2, 0):
        script = f"(exit {code})\n{after}\n"
        done = subprocess.run(["bash", "-c", script], env=rank_environment() | element, timeout=60, capture_output=True)
        assert done.returncode == code, done.stderr
    assert not (runs[0] / "lives.jsonl").exists() and not (runs[2] / "lives.jsonl").exists()
    [life] = lines(runs[1] / "lives.jsonl")
    assert (life["job"], life["element"], life["code"], life["again"]) == ("10", "9_1", 2, False)


@pytest.mark.parametrize(
    ("said", "kind", "word"),
    [
        ("sbatch: error: Batch job submission failed: Invalid job array specification", UserError, "MaxArraySize"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", RunError, "'sinfo' works"),
        ("", UserError, "no reason given"),
    ],
)
def test_a_refusal_says_what_helps(said: str, kind: type[Exception], word: str) -> None:
    error = arrays.refusal(said)
    assert type(error) is kind and word in str(error) and "sbatch: error" not in str(error)


# For real


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that everything is submitted from, and a Slurm of two nodes that this process talks to."""
    pytest.importorskip("submitit")
    absent = slurm_box.missing()
    need("slurm", not absent, f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)")
    folder = tmp_path_factory.mktemp("here")
    with slurm_box.slurm() as variables, pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        (folder / "gate.py").write_text(GATE)
        clean = rank_environment()
        for name in set(os.environ) - set(clean):
            patch.delenv(name)
        for name, value in (clean | variables).items():
            patch.setenv(name, value)
        yield folder


def a_config(*more: str) -> Config:
    return prepare(parse([*RUN, *more])).cfg


def some_runs(home: Path, names: str) -> list[tuple[Config, Path]]:
    """Runs with these names, each with a seed of its own."""
    outs = [home / name for name in names.split()]
    return [(a_config("--seed", str(seed), "--out", str(out)), out) for seed, out in enumerate(outs)]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


def running_elements(array: str) -> list[str]:
    """The elements that Slurm runs at this moment. One that is COMPLETING is not throttled any more, but its processes
    have not ended, so that `fedmpi status` shows it as running, while the next element starts."""
    return command("squeue", "--array", "--noheader", "--states=RUNNING", "--format=%K", f"--jobs={array}").split()


def ranks_of(job: str) -> dict[str, int]:
    """The processes of an element's ranks by their numbers."""
    first, _, place = job.partition("_")
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"submitit.core._submit" in (folder / "cmdline").read_bytes():
                variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
                if (variables.get("SLURM_ARRAY_JOB_ID"), variables.get("SLURM_ARRAY_TASK_ID")) == (first, place):
                    found[variables["SLURM_PROCID"]] = int(folder.name)
    return found


def logs(home: Path) -> str:
    """The ends of all logs, for a test that failed."""
    files = [*sorted((home / "slurm").glob("*log*")), *sorted(home.glob("*/lives.jsonl"))]
    return "\n".join(f"{path}:\n{path.read_text()[-1500:]}" for path in files)


@pytest.mark.launchers
@pytest.mark.timeout(500)
def test_elements_of_an_array_live_and_die_each_for_itself(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five runs, two at a time. Two are warned, one of them the last to be taken, which has the number of the array;
    one is killed; one is cancelled while it runs and one while it waits, and both are submitted again."""
    home = here / "sweep"
    runs = some_runs(home, "warned killed cancelled waiting last")
    outs = {out.name: out for _, out in runs}
    options = SubmitOptions(ranks_per_node=2, time=8)

    command("scontrol", "update", "PartitionName=main", "State=DOWN")
    made = submit_runs(options, runs, home, at_once=2)
    number = made[0].id.partition("_")[0]
    ids = {name: f"{number}_{place}" for place, name in enumerate(outs)}
    assert [job.id for job in made] == list(ids.values()) and all(job.executor == "slurm" for job in made)
    for name, out in outs.items():
        record = json.loads((out / "job.json").read_text())
        assert (record["job"], record["ranks"], record["logs"]) == (ids[name], 2, "../slurm")
        assert out.stat().st_mode & 0o777 == 0o700 and (out / "slurm" / "submitted.yaml").exists()
    assert (home / "slurm").stat().st_mode & 0o777 == 0o700
    asks: list[tuple[str, ...]] = []
    real = slurm.ask_slurm
    with monkeypatch.context() as patch:
        patch.setattr(slurm, "ask_slurm", lambda *words: asks.append(words) or real(*words))
        assert states_of(list(outs.values())) == [("queued", "PartitionDown")] * 5
    assert asks == [("scontrol", "--oneliner", "show", "job", number)]
    with pytest.raises(UserError, match=f"belongs to Slurm job {ids['warned']}, which is PENDING"):
        submit_runs(options, runs[:1], home)
    assert (slurm_job(ids["warned"]) or {})["ArrayTaskThrottle"] == "2"
    assert main(["cancel", str(outs["waiting"])]) == 0
    assert f"Slurm job {ids['waiting']} cancelled; no checkpoint was written" in capsys.readouterr().out
    assert [state for state, _ in states_of(list(outs.values()))] == ["queued"] * 3 + ["cancelled", "queued"]
    command("scontrol", "update", "PartitionName=main", "State=UP")

    def warn(name: str) -> None:  # its step: for the job, Slurm 22.05 sends it again and again while others wait
        command("scancel", "--signal=USR2", f"{ids[name]}.0")

    disturb: dict[str, Callable[[], Any]] = {
        "warned": lambda: warn("warned"),
        "killed": lambda: os.kill(ranks_of(ids["killed"])["1"], signal.SIGKILL),
        "cancelled": lambda: main(["cancel", str(outs["cancelled"])]),
        "last": lambda: warn("last"),
    }
    while disturb:
        wait_for(lambda: any(newest_checkpoint(outs[name]) for name in disturb), 150, lambda: logs(home))
        name = next(name for name in disturb if newest_checkpoint(outs[name]))
        states = dict(zip(outs, states_of(list(outs.values())), strict=True))
        assert states[name] == ("running", ""), "it is in the middle"
        assert len(running_elements(number)) <= 2
        disturb.pop(name)()
    assert states_of([outs["cancelled"]]) == [("cancelled", "")]

    (here / "go").touch()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1")  # as from within an element of some array
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    [again] = submit_runs(options, [runs[2]], home, at_once=2)
    config = ["--config", str(outs["waiting"] / "config.yaml")]
    assert main(["submit", "--time", "8", "--", "train", *config]) == 0
    for seed, name in enumerate(outs):
        assert main(["train", *RUN, "--seed", str(seed), "--out", str(here / "alone" / name)]) == 0
    capsys.readouterr()

    for name, out in outs.items():
        wait_for(lambda out=out: (out / "finished.json").exists(), 150, lambda: logs(home))
        assert digest(out) == digest(here / "alone" / name), name
    assert states_of(list(outs.values())) == [("finished", "")] * 5
    lives = {name: lines(out / "starts.jsonl") for name, out in outs.items()}
    assert [len(lives[name]) for name in outs] == [2, 2, 2, 1, 2]
    for name in ("warned", "killed", "last"):
        assert [start["element"] for start in lives[name]] == [ids[name]] * 2
        assert 0 < lives[name][1]["round"] < ROUNDS and lives[name][1]["restart"] == 1, "it resumed from a checkpoint"
        ended, *_ = lines(outs[name] / "lives.jsonl")
        assert (ended["element"], ended["again"], ended["round"]) == (ids[name], True, lives[name][1]["round"])
    assert lives["last"][0]["job"] == ids["last"] and lives["warned"][0]["job"].isdecimal()
    assert again.id.isdecimal() and lives["cancelled"][1]["job"] == again.id and 0 < lives["cancelled"][1]["round"]
    assert len({start["job"] for starts in lives.values() for start in starts[:1]}) == 5, "a number for each"


@pytest.mark.launchers
@pytest.mark.timeout(200)
def test_an_element_that_fails_shows_its_own_errors(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = here / "pair"
    (here / "go").touch()
    unread = a_config("--data", "mnist", "--data_root", "nowhere")
    submit_runs(SubmitOptions(), [(unread, home / "unread"), (a_config(), home / "read")], home)
    wait_for(lambda: states_of([home / "unread"])[0][0] == "failed", 100, lambda: logs(home))
    seen = look(home / "unread")
    assert "exit code 2; not restarted: it would fail in the same way" in seen["why"]
    assert seen["error"][0] == f"{home}/slurm/{seen['job']}_0_log.err:" and "nowhere" in "\n".join(seen["error"])
    wait_for((home / "read" / "finished.json").exists, 100, lambda: logs(home))
    assert main(["status", str(home / "unread"), str(home / "read")]) == 0
    said = capsys.readouterr().out
    assert "failed (exit code 2; not restarted" in said and "finished" in said and "nowhere" in said


@pytest.mark.launchers
@pytest.mark.timeout(100)
def test_a_refused_call_leaves_nothing(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = here / "refused"
    runs = some_runs(home, "a b")
    nowhere = SubmitOptions(partition="nowhere")
    with pytest.raises(UserError, match="sbatch refused the job: invalid partition specified: nowhere"):
        submit_runs(nowhere, runs, home)
    assert not home.exists()
    (home / "slurm").mkdir(parents=True)
    (home / "sweep.json").write_text("{}")
    make_run(home / "a")
    with pytest.raises(UserError, match="sbatch refused the job"):
        submit_runs(nowhere, runs, home)
    assert sorted(path.name for path in home.iterdir()) == ["a", "slurm", "sweep.json"]
    assert not list((home / "slurm").iterdir()) and (home / "a" / "config.yaml").read_text() == "rounds: 10\n"

    ours = SubmitOptions()
    with pytest.raises(UserError, match="--comm is mpi but Slurm jobs start no MPI ranks by themselves"):
        submit_runs(ours, [runs[0], (a_config("--comm", "mpi"), home / "b")], home)
    with pytest.raises(UserError, match="has a character with a special meaning for Slurm"):
        submit_runs(ours, runs, home / "50%")
    (home / "a" / "finished.json").write_text('{"rounds": 300}')
    with pytest.raises(UserError, match="already holds a finished run"):
        submit_runs(ours, runs, home)
    assert submit_runs(ours, [], home) == [] and not (home / "b").exists()

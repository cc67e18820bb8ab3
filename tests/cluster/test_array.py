"""Several runs as one job array: what is handed to Slurm, what is told of it, and the array for real on a Slurm of two
nodes, where elements are warned, killed and cancelled, and each ends with the bits of the same run alone."""

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
from hypothesis import given
from hypothesis import strategies as st
from long import LONG, digest, lines, wait_for

from fedmpi.cluster import arrays as array
from fedmpi.cluster import slurm
from fedmpi.cluster import status as jobs
from fedmpi.cluster import submit as cluster
from fedmpi.cluster.arrays import submit_runs
from fedmpi.cluster.slurm import slurm_job
from fedmpi.cluster.status import Job, job_of, look, newest_checkpoint, state_of, states_of
from fedmpi.cluster.submit import Submission
from fedmpi.comm.env import job_names
from fedmpi.commands import main
from fedmpi.errors import RunError, UserError
from fedmpi.runs.config import Config
from fedmpi.runs.options import parse

# As scontrol of Slurm 22.05 prints them, shortened: three wait as one, one runs, one was queued again.
SAID = """\
JobId=4304 ArrayJobId=4304 ArrayTaskId=3,5-6%2 JobState=PENDING Reason=JobArrayTaskLimit Restarts=0 StartTime=X
JobId=4306 ArrayJobId=4304 ArrayTaskId=1 JobState=RUNNING Reason=None Restarts=0 NodeList=n1
JobId=4305 ArrayJobId=4304 ArrayTaskId=0 JobState=PENDING Reason=BeginTime Restarts=1 StartTime=X
"""


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


# What Slurm says


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.integers(1, 9)), max_size=8))
def test_places_in_an_array_are_read_as_slurm_writes_them(pieces: list[tuple[int, int, int]]) -> None:
    texts, places = [], []
    for first, more, step in pieces:
        last = first + more * step
        texts.append(str(first) if not more else f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}")
        places += [first + n * step for n in range(more + 1)]
    assert slurm.places_in(",".join(texts)) == slurm.places_in(",".join(texts) + "%3") == places


@pytest.mark.parametrize("text", ["", "%", "N/A", "1-", "-1", "1-2:0", "[1-2]", "x,y", "5-3"])
def test_what_names_no_place_is_none(text: str) -> None:
    assert slurm.places_in(text) == []


def test_records_go_by_every_name_that_they_have() -> None:
    known = slurm.records_of(SAID)
    assert {name: facts["JobState"] for name, facts in known.items()} == {
        "4304": "PENDING",
        "4304_0": "PENDING",
        "4304_1": "RUNNING",
        "4304_3": "PENDING",
        "4304_5": "PENDING",
        "4304_6": "PENDING",
        "4305": "PENDING",
        "4306": "RUNNING",
    }
    assert "StartTime" not in known["4304_5"], "it is that of the first that waits"
    assert known["4304_0"]["StartTime"] == "X" and known["4304_0"]["Restarts"] == "1"
    assert slurm.records_of("JobId=7 JobName=a JobState=RUNNING\n") == {
        "7": {"JobId": "7", "JobName": "a", "JobState": "RUNNING"}
    }
    assert slurm.records_of("No jobs in the system\n") == {}


def test_accounting_is_read_with_its_ranges() -> None:
    kept = slurm.states_kept("7|COMPLETED\n8_0|CANCELLED by 1000\n8_[1-2%1]|PENDING\n9|\n\n")
    states = {name: facts.get("JobState") for name, facts in kept.items() if name}
    assert states == {"7": "COMPLETED", "8_0": "CANCELLED", "8_1": "PENDING", "8_2": "PENDING", "9": None}


def answers(
    monkeypatch: pytest.MonkeyPatch, answer: Callable[[tuple[str, ...]], tuple[int, str, str] | None]
) -> list[tuple[str, ...]]:
    """What Slurm is asked from now on, and is to answer: exit code, output, error; None: nothing."""
    asked: list[tuple[str, ...]] = []

    def ask(*command: str) -> subprocess.CompletedProcess[str] | None:
        asked.append(command)
        said = answer(command)
        return None if said is None else subprocess.CompletedProcess(command, *said)

    monkeypatch.setattr(slurm, "ask_slurm", ask)
    return asked


def test_an_array_is_asked_about_once_and_who_does_not_answer_is_not_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = answers(
        monkeypatch, lambda command: (0, SAID, "") if command[0] == "scontrol" else (1, "", "no accounting")
    )
    known = slurm.slurm_jobs(["4304_1", "4304_5"])
    assert [facts and facts["JobState"] for facts in known.values()] == ["RUNNING", "PENDING"] and len(asked) == 1
    assert slurm.slurm_job("4304_4") == {}, "it was cancelled while it waited: nothing is known of it"
    asked = answers(monkeypatch, lambda command: None)
    assert slurm.slurm_jobs(["1_0", "1_1", "2", "3"]) == {"1_0": None, "1_1": None, "2": None, "3": None}
    assert len(asked) == 1


def test_what_scontrol_has_forgotten_accounting_may_know(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = (1, "", "slurm_load_jobs error: Invalid job id specified\n")
    answers(monkeypatch, lambda command: gone if command[0] == "scontrol" else (0, "8_0|FAILED\n8_1|TIMEOUT\n", ""))
    assert slurm.slurm_jobs(["8_0", "8_1", "8_2"]) == {
        "8_0": {"JobState": "FAILED"},
        "8_1": {"JobState": "TIMEOUT"},
        "8_2": {},
    }


# Names


@pytest.mark.parametrize(
    ("variables", "names"),
    [
        ({}, {"job": None}),
        ({"SLURM_JOB_ID": "7"}, {"job": "7"}),
        (
            {"SLURM_JOB_ID": "4306", "SLURM_ARRAY_JOB_ID": "4304", "SLURM_ARRAY_TASK_ID": "1"},
            {"job": "4306", "element": "4304_1"},
        ),
        (
            {"SLURM_JOB_ID": "4304", "SLURM_ARRAY_JOB_ID": "4304", "SLURM_ARRAY_TASK_ID": "6"},
            {"job": "4304_6", "element": "4304_6"},
        ),
    ],
)
def test_a_job_has_a_name_that_means_no_other(variables: dict[str, str], names: dict[str, str | None]) -> None:
    assert job_names(variables) == names


def a_run(folder: Path, **job: Any) -> Path:
    """A run folder that says it is this job."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("rounds: 10\n")
    if job:
        (folder / "job.json").write_text(json.dumps({"executor": "slurm", "host": "n1"} | job))
    return folder


def test_an_element_stays_itself_whatever_number_it_runs_under(tmp_path: Path) -> None:
    run = a_run(tmp_path / "run", job="4304_1")
    assert job_of(run) == Job("4304_1", "slurm", "n1")
    (run / "starts.jsonl").write_text('{"time": 1.0, "job": "4306", "element": "4304_1"}\n')
    assert job_of(run) == Job("4304_1", "slurm", "n1")
    (run / "lives.jsonl").write_text(
        '{"job": "4306", "element": "4304_1", "code": 1, "again": false, "why": "of this"}\n'
    )
    assert state_of(run, job_of(run), {}) == ("failed", "exit code 1; not started again, as of this")
    with open(run / "starts.jsonl", "a") as file:
        file.write('{"time": 2.0, "job": "4400"}\n')
    assert job_of(run) == Job("4400", "slurm"), "a batch script ran it since"
    (run / "job.json").write_text('{"job": "4500_0", "executor": "slurm"}')
    assert job_of(run) == Job("4500_0", "slurm"), "and an array since then"


def test_the_logs_of_an_array_are_found_from_each_run(tmp_path: Path) -> None:
    run = a_run(tmp_path / "home" / "run", job="4304_1", logs="../slurm")
    (tmp_path / "home" / "slurm").mkdir()
    (tmp_path / "home" / "slurm" / "4304_1_0_log.err").write_text("what went wrong\n")
    (tmp_path / "home" / "slurm" / "4304_11_0_log.err").write_text("of another element\n")
    assert jobs.errors_of(run, job_of(run))[1:] == ["  what went wrong"]


def test_states_of_many_runs_are_those_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [a_run(tmp_path / f"run-{n}", job=f"4304_{n}") for n in (0, 1, 5)]
    runs += [a_run(tmp_path / "no-job"), tmp_path / "not-there"]
    (runs[1] / "finished.json").write_text('{"rounds": 1}')
    asked = answers(monkeypatch, lambda command: (0, SAID, ""))
    assert states_of(runs) == [
        ("requeued", "BeginTime, start expected X"),
        ("finished", ""),
        ("queued", "JobArrayTaskLimit"),
        ("unknown", "it has not begun"),
        ("unknown", "it has not begun"),
    ]
    assert len(asked) == 1
    assert states_of(runs[:4]) == [(seen["state"], seen["why"]) for seen in map(look, runs[:4])]


# What is handed over


def test_each_element_asks_for_its_own_run_to_be_queued_again(tmp_path: Path) -> None:
    """The lines behind srun, run by bash as in an element: a mistake (code 2) is noted with that run alone."""
    submitit = pytest.importorskip("submitit")
    runs = [a_run(tmp_path / name) for name in ("plain", "it's $HOME", "x")]
    given = array.array_parameters(Submission(ranks_per_node=2), runs, tmp_path / "home", 2)
    text = submitit.slurm.slurm._make_sbatch_string(command="COMMAND", folder=tmp_path, map_count=3, **given)
    before, _, behind = text.partition("COMMAND\n")
    for option in ("array=0-2%2", "job-name=fedmpi-home", "ntasks-per-node=2", "requeue"):
        assert f"#SBATCH --{option}\n" in before, option
    element = {"SLURM_JOB_ID": "10", "SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_ID": "1"}
    for code in (2, 0):
        script = f"(exit {code})\n{behind}\n"
        done = subprocess.run(["bash", "-c", script], env=rank_environment() | element, timeout=60, capture_output=True)
        assert done.returncode == code, done.stderr
    assert not (runs[0] / "lives.jsonl").exists() and not (runs[2] / "lives.jsonl").exists()
    [life] = lines(runs[1] / "lives.jsonl")
    assert (life["job"], life["element"], life["code"], life["again"]) == ("10", "9_1", 2, False)


@pytest.mark.parametrize(
    ("said", "kind", "word"),
    [
        ("sbatch: error: Batch job submission failed: Invalid job array specification", UserError, "MaxArraySize"),
        ("sbatch: error: Unable to contact slurm controller (connect failure)", RunError, "'sinfo' answers"),
        ("", UserError, "it did not say why"),
    ],
)
def test_a_refusal_says_what_helps(said: str, kind: type[Exception], word: str) -> None:
    error = cluster.refusal(said)
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
    return parse([*RUN, *more])


def some_runs(home: Path, names: str) -> list[tuple[Config, Path]]:
    """Runs with these names, each with a seed of its own."""
    return [(a_config("--seed", str(seed)), home / name) for seed, name in enumerate(names.split())]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout


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
    asked = Submission(ranks_per_node=2, time=8)

    command("scontrol", "update", "PartitionName=main", "State=DOWN")
    made = submit_runs(asked, runs, home, at_once=2)
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
        submit_runs(asked, runs[:1], home)
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
        assert [state for state, _ in states.values()].count("running") <= 2
        disturb.pop(name)()
    assert states_of([outs["cancelled"]]) == [("cancelled", "")]

    (here / "go").touch()
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1")  # as from within an element of some array
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "5")
    [again] = submit_runs(asked, [runs[2]], home, at_once=2)
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
        assert 0 < lives[name][1]["round"] < ROUNDS and lives[name][1]["restart"] == 1, "it went on from a checkpoint"
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
    submit_runs(Submission(), [(unread, home / "unread"), (a_config(), home / "read")], home)
    wait_for(lambda: states_of([home / "unread"])[0][0] == "failed", 100, lambda: logs(home))
    seen = look(home / "unread")
    assert "exit code 2; not started again, as it would end in the same way" in seen["why"]
    assert seen["error"][0] == f"{home}/slurm/{seen['job']}_0_log.err:" and "nowhere" in "\n".join(seen["error"])
    wait_for((home / "read" / "finished.json").exists, 100, lambda: logs(home))
    assert main(["status", str(home / "unread"), str(home / "read")]) == 0
    said = capsys.readouterr().out
    assert "failed (exit code 2; not started again" in said and "finished" in said and "nowhere" in said


@pytest.mark.launchers
@pytest.mark.timeout(100)
def test_what_is_refused_leaves_nothing_behind(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = here / "refused"
    runs = some_runs(home, "a b")
    nowhere = Submission(partition="nowhere")
    with pytest.raises(UserError, match="sbatch refused the job: invalid partition specified: nowhere"):
        submit_runs(nowhere, runs, home)
    assert not home.exists()
    (home / "slurm").mkdir(parents=True)
    (home / "sweep.json").write_text("{}")
    a_run(home / "a")
    with pytest.raises(UserError, match="sbatch refused the job"):
        submit_runs(nowhere, runs, home)
    assert sorted(path.name for path in home.iterdir()) == ["a", "slurm", "sweep.json"]
    assert not list((home / "slurm").iterdir()) and (home / "a" / "config.yaml").read_text() == "rounds: 10\n"

    ours = Submission()
    with pytest.raises(UserError, match="run 'b': --tau is 3.0; it must be in"):
        submit_runs(ours, [runs[0], (a_config("--tau", "3"), home / "b")], home)
    with pytest.raises(UserError, match="several runs have the folder"):
        submit_runs(ours, [runs[1], runs[1]], home)
    with pytest.raises(UserError, match="0 runs are to run at once"):
        submit_runs(ours, runs, home, at_once=0)
    with pytest.raises(UserError, match="has a character that Slurm takes for more than itself"):
        submit_runs(ours, runs, home / "50%")
    (home / "a" / "finished.json").write_text('{"rounds": 300}')
    with pytest.raises(UserError, match="already holds a finished run"):
        submit_runs(ours, runs, home)
    assert submit_runs(ours, [], home) == [] and not (home / "b").exists()

"""What Slurm answers about jobs, arrays and their elements: no Slurm needed."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_folders import make_run

from fedmpi.cluster import slurm, status
from fedmpi.cluster.status import Job, job_of, look, state_of, states_of
from fedmpi.comm.env import job_names

# As scontrol of Slurm 22.05 prints them, shortened: three wait as one, one runs, one was queued again.
PRINTED = """\
JobId=4304 ArrayJobId=4304 ArrayTaskId=3,5-6%2 JobState=PENDING Reason=JobArrayTaskLimit Restarts=0 StartTime=X
JobId=4306 ArrayJobId=4304 ArrayTaskId=1 JobState=RUNNING Reason=None Restarts=0 NodeList=n1
JobId=4305 ArrayJobId=4304 ArrayTaskId=0 JobState=PENDING Reason=BeginTime Restarts=1 StartTime=X
"""


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 40), st.integers(1, 9)), max_size=8))
def test_indices_of_an_array_are_read_as_slurm_writes_them(pieces: list[tuple[int, int, int]]) -> None:
    texts, places = [], []
    for first, more, step in pieces:
        last = first + more * step
        texts.append(str(first) if not more else f"{first}-{last}" if step == 1 else f"{first}-{last}:{step}")
        places += [first + n * step for n in range(more + 1)]
    assert slurm.indices_in(",".join(texts)) == slurm.indices_in(",".join(texts) + "%3") == places


@pytest.mark.parametrize("text", ["", "%", "N/A", "1-", "-1", "1-2:0", "[1-2]", "x,y", "5-3"])
def test_text_without_indices_has_none(text: str) -> None:
    assert slurm.indices_in(text) == []


def test_records_go_by_every_name_that_they_have() -> None:
    known = slurm.records_of(PRINTED)
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
    kept = slurm.accounting_states("7|COMPLETED\n8_0|CANCELLED by 1000\n8_[1-2%1]|PENDING\n9|\n\n")
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
        monkeypatch, lambda command: (0, PRINTED, "") if command[0] == "scontrol" else (1, "", "no accounting")
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


def test_an_element_stays_itself_whatever_number_it_runs_under(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", job="4304_1")
    assert job_of(run) == Job("4304_1", "slurm", "n1")
    (run / "starts.jsonl").write_text('{"time": 1.0, "job": "4306", "element": "4304_1"}\n')
    assert job_of(run) == Job("4304_1", "slurm", "n1")
    (run / "lives.jsonl").write_text(
        '{"job": "4306", "element": "4304_1", "code": 1, "again": false, "why": "of this"}\n'
    )
    assert state_of(run, job_of(run), {}) == ("failed", "exit code 1; not restarted: of this")
    with open(run / "starts.jsonl", "a") as file:
        file.write('{"time": 2.0, "job": "4400"}\n')
    assert job_of(run) == Job("4400", "slurm"), "a batch script ran it since"
    (run / "job.json").write_text('{"job": "4500_0", "executor": "slurm"}')
    assert job_of(run) == Job("4500_0", "slurm"), "and an array since then"


def test_the_logs_of_an_array_are_found_from_each_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "home" / "run", job="4304_1", logs="../slurm")
    (tmp_path / "home" / "slurm").mkdir()
    (tmp_path / "home" / "slurm" / "4304_1_0_log.err").write_text("what went wrong\n")
    (tmp_path / "home" / "slurm" / "4304_11_0_log.err").write_text("of another element\n")
    assert status.errors_of(run, job_of(run))[1:] == ["  what went wrong"]


def test_states_of_many_runs_are_those_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [make_run(tmp_path / f"run-{n}", job=f"4304_{n}") for n in (0, 1, 5)]
    runs += [make_run(tmp_path / "no-job"), tmp_path / "not-there"]
    (runs[1] / "finished.json").write_text('{"rounds": 1}')
    asked = answers(monkeypatch, lambda command: (0, PRINTED, ""))
    assert states_of(runs) == [
        ("requeued", "BeginTime, start expected X"),
        ("finished", ""),
        ("queued", "JobArrayTaskLimit"),
        ("unknown", "not started"),
        ("unknown", "not started"),
    ]
    assert len(asked) == 1
    assert states_of(runs[:4]) == [(seen["state"], seen["why"]) for seen in map(look, runs[:4])]

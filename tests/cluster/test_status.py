"""The status of runs as seen from outside: `fedmpi status`, and what `fedmpi cancel` refuses; no Slurm needed."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from made_runs import records as made_records
from made_runs import write_run
from run_folders import add, save

from fedmpi.cluster import status
from fedmpi.cluster.cancel import wait_until
from fedmpi.cluster.status import Job, in_words, look, state_of
from fedmpi.commands import main

pytestmark = pytest.mark.usefixtures("no_launch")


def a_round(number: int, seconds: float = 2.0, **values: Any) -> dict[str, Any]:
    return {"round": number, "seconds": {"local": seconds / 2, "wait": seconds / 2}, "test_loss": 1.0} | values


def test_progress_counts_complete_rounds_only(run: Path) -> None:
    rounds = [a_round(n, seconds=2.0, test_accuracy=0.1 * n) for n in (1, 2, 3)]
    add(run / "metrics.jsonl", *rounds, a_round(4, seconds=2.0, test_accuracy=None))
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"round": 5, "seco')
    save(run, 2)
    save(run, 3)
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write('{"host": "n1", "pid": 12, "launcher": "torchrun", "ranks": 2, "job": null}\n')
        lock.flush()
        seen = look(run)
    assert (seen["state"], seen["why"]) == ("running", "process 12 on n1, launched by torchrun")
    assert (seen["round"], seen["rounds"], seen["checkpoint"]) == (4, 10, 3)
    assert seen["rounds_a_minute"] == pytest.approx(30) and seen["minutes_left"] == pytest.approx(0.2)
    assert (seen["metric"], seen["scored"]) == ("accuracy", 3) and seen["value"] == pytest.approx(0.3)
    text = in_words(seen)
    assert "4 of 10, 30.0 per minute, 12 s left" in text and "0.3000 (round 3)" in text
    assert look(run)["minutes_left"] is None, "nobody runs it any more"


def test_the_rate_is_that_of_the_last_rounds(run: Path) -> None:
    slow, fast = [a_round(n, seconds=60.0) for n in range(1, 31)], [a_round(n, seconds=1.0) for n in range(31, 61)]
    add(run / "metrics.jsonl", *slow, *fast)
    assert look(run)["rounds_a_minute"] == pytest.approx(60)


def test_only_the_end_of_a_long_log_is_read(run: Path) -> None:
    add(run / "metrics.jsonl", *(a_round(n, test_mae=0.5, padding="x" * 100) for n in range(1, 2001)))
    seen = look(run)
    assert (run / "metrics.jsonl").stat().st_size > 2 * status.TAIL_BYTES
    assert (seen["round"], seen["metric"]) == (2000, "mae")


@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"[]", b"{", b"3", b'"x"', b"null", b'{"round": "x", "time": "y"}']
)
def test_files_that_make_no_sense_are_no_traceback(
    content: bytes, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics.jsonl", "starts.jsonl", "lives.jsonl", "stopped.json", "cancelled", "job.json", "lock"):
        (run / name).write_bytes(content)
    (run / "config.yaml").write_bytes(content)
    for words in (["status"], ["status", "--json"], ["cancel"]):
        assert main([*words, str(run)]) == 1
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and said.startswith(f"fedmpi: {run / 'job.json'} ")
    for name in ("job.json", "stopped.json", "cancelled"):
        (run / name).unlink()
    assert main(["status", str(run)]) == 0, "lines and locks are written in pieces, and a bad one does not count"


def test_without_a_folder_status_shows_all_runs_and_cancel_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["cancel"]) == 2 and "needs a run folder" in capsys.readouterr().err
    for _ in range(2):
        assert main(["status"]) == 0
        assert capsys.readouterr().out.startswith("no runs under runs/ here; ")
        Path("runs/empty").mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(("old", "deep/er/down", "new", "much/too/deep/down")):
        run = write_run(Path("runs") / name, made_records([0.25, 0.5]), mask="mean")
        for file in run.iterdir():
            os.utime(file, (number, number))
    assert main(["status"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in printed] == ["runs/new", "runs/deep/er/down", "runs/old"], "newest first"
    done = "fedavg + mean  finished  [####################] 2/2  accuracy 0.5000"
    assert printed[0] == f"runs/new           {done}"
    (Path("runs") / "new" / "sweep.json").write_text("{}")  # a sweep that cannot be read is shown as that
    assert main(["status"]) == 0 and "is no record of a sweep" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_the_callers_mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    for command in ("status", "cancel"):
        assert main([command, str(tmp_path / "nowhere")]) == 2 and "is no folder" in capsys.readouterr().err
        assert main([command, str(tmp_path / "empty")]) == 2 and "holds no run" in capsys.readouterr().err


SLURM = Job("7", "slurm")


@pytest.mark.parametrize(
    ("facts", "state", "why"),
    [
        ({"JobState": "PENDING", "Reason": "Resources", "StartTime": "Unknown"}, "queued", "Resources"),
        (
            {"JobState": "PENDING", "Reason": "BeginTime", "Restarts": "2", "StartTime": "2026-11-16T15:21:09"},
            "requeued",
            "BeginTime, start expected 2026-11-16 15:21:09",
        ),
        ({"JobState": "RUNNING"}, "running", "starting or ending"),
        ({"JobState": "CONFIGURING"}, "running", "configuring"),
        ({"JobState": "CANCELLED"}, "cancelled", "by scancel"),
        ({"JobState": "FAILED"}, "failed", "it ended before it was finished"),
        ({"JobState": "OUT_OF_MEMORY"}, "failed", "out of memory"),
        ({"JobState": "TIMEOUT"}, "failed", "timeout"),
        ({}, "unknown", "Slurm has forgotten the job, and the run never started"),
        (None, "unknown", "Slurm does not answer here"),
    ],
)
def test_states_by_what_slurm_says(facts: dict[str, str] | None, state: str, why: str, run: Path) -> None:
    assert state_of(run, SLURM, facts) == (state, why)


def test_the_folder_knows_what_slurm_has_forgotten(run: Path) -> None:
    add(run / "starts.jsonl", {"time": 100.0, "job": "7", "ranks": 2})
    assert state_of(run, SLURM, {}) == ("failed", "it ended before it was finished")
    add(run / "lives.jsonl", {"job": "7", "code": 137, "again": False, "why": "of this"})
    assert state_of(run, SLURM, {}) == ("failed", "exit code 137; not restarted: of this")
    (run / "stopped.json").write_text('{"round": 5, "why": "SIGTERM", "time": 105}')
    assert state_of(run, SLURM, {}) == ("stopped", "by SIGTERM after round 5; not restarted: of this")
    (run / "cancelled").write_text('{"time": 101.0}')
    assert state_of(run, SLURM, {}) == ("cancelled", "")
    (run / "finished.json").write_text('{"rounds": 5}')
    assert state_of(run, SLURM, {}) == ("finished", "")
    queued = {"JobState": "PENDING", "Reason": "Priority"}
    assert state_of(run, SLURM, queued) == ("queued", "Priority"), "for more rounds"


def test_the_newest_job_of_a_folder_counts_whoever_started_it(run: Path) -> None:
    assert status.job_of(run) is None
    add(run / "starts.jsonl", {"time": 1.0, "job": "5"})
    assert status.job_of(run) == Job("5", "slurm")
    (run / "job.json").write_text('{"job": "9", "executor": "slurm", "host": "n1"}')
    assert status.job_of(run) == Job("9", "slurm", "n1")
    add(run / "starts.jsonl", {"time": 2.0, "job": "11"})
    assert status.job_of(run) == Job("11", "slurm")


def test_a_failed_run_shows_the_tail_of_its_errors(run: Path) -> None:
    add(run / "starts.jsonl", {"time": 1.0, "job": "7"})
    (run / "slurm").mkdir()
    (run / "slurm" / "6_0_log.err").write_text("of an older job\n")
    (run / "slurm" / "7_0_log.err").write_text("")
    lines = "\n".join(f"line {n}" for n in range(20))
    (run / "slurm" / "7_1_log.err").write_text(f"{lines}\nsubmitit WARNING - noise\n\nfedmpi: what went wrong\n")
    shown = status.errors_of(run, SLURM)
    assert shown[0] == f"{run}/slurm/7_1_log.err:" and shown[-1] == "  fedmpi: what went wrong"
    assert len(shown) == 1 + status.SHOWN and not any("noise" in line or "older" in line for line in shown)


def test_a_run_that_is_no_job_is_not_cancelled(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "stopped.json").write_text('{"round": 5, "why": "SIGINT", "time": 105}')
    assert main(["cancel", str(run)]) == 2
    assert "is not running: it is stopped (by SIGINT after round 5)" in capsys.readouterr().err
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write('{"host": "n1", "pid": 12, "launcher": "torchrun", "ranks": 2, "job": null}\n')
        lock.flush()
        assert main(["cancel", str(run)]) == 2
    assert "is run by process 12 on n1, not as a job: end it where it was started" in capsys.readouterr().err
    assert not (run / "cancelled").exists()


def test_status_as_json_is_a_list_with_all_runs(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run), str(run), "--json"]) == 0
    assert [seen["state"] for seen in json.loads(capsys.readouterr().out)] == ["unknown", "unknown"]


def test_looking_at_runs_needs_neither_torch_nor_submitit(run: Path) -> None:
    """A batch script asks on every node, and somebody asks every minute."""
    look_and_tell = f"from fedmpi.commands import main; main(['status', {str(run)!r}]); import sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", look_and_tell], capture_output=True, text=True, timeout=60, check=True)
    assert "fedmpi.cluster.status" in done.stdout and not {"torch", "submitit"} & set(done.stdout.split())


def test_waiting_ends_when_it_comes_true_or_takes_too_long() -> None:
    later = time.monotonic() + 0.1
    assert wait_until(lambda: time.monotonic() > later)
    assert not wait_until(lambda: False, seconds=0.1)

"""What is known of runs from outside, when a job begins again, and what `fedmpi submit` refuses: no Slurm needed."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_runs import records as made_records
from made_runs import write_run
from shell import sandbox

from fedmpi.cluster import status as jobs
from fedmpi.cluster import submit as cluster
from fedmpi.cluster.status import Job, in_words, look, state_of, verdict
from fedmpi.commands import main
from fedmpi.runs.build import prepare
from fedmpi.runs.checkpoint import sealed
from fedmpi.runs.options import parse
from fedmpi.runs.rank import Rank
from fedmpi.runs.schema import Restart, records


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT", "FEDMPI_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    with sandbox():
        yield


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of 10 rounds in which nothing has happened yet."""
    out = tmp_path / "run"
    out.mkdir()
    (out / "config.yaml").write_text("rounds: 10\n")
    return out


def add(path: Path, *records: dict[str, Any]) -> None:
    with open(path, "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def save(run: Path, number: int) -> None:
    (run / "checkpoints" / f"round-{number}").mkdir(parents=True)
    (run / "checkpoints" / f"round-{number}" / "manifest.json").write_text("{}")


def a_round(number: int, seconds: float = 2.0, **values: Any) -> dict[str, Any]:
    return {"round": number, "seconds": {"local": seconds / 2, "wait": seconds / 2}, "test_loss": 1.0} | values


# When a job begins again


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (75, 99, True), (1, 0, True), (137, 2, True), (1, 3, False)],
)
def test_without_a_folder_a_stop_begins_again_and_a_fault_as_often_as_asked(
    code: int, restarts: int, again: bool, tmp_path: Path
) -> None:
    assert verdict(code, None, 3, "7", restarts)[0] is again
    assert verdict(code, tmp_path, 3, "7", restarts)[0] is again, "a folder that is no run's keeps no count"


@pytest.mark.parametrize("code", [75, 1, 137])
def test_lives_in_vain_are_counted_from_the_last_round_that_was_saved(code: int, run: Path) -> None:
    save(run, 4)
    for life in range(3):
        assert verdict(code, run, 3, "7", life) == (True, "")
        add(run / "lives.jsonl", {"job": "7", "round": 4})
    assert verdict(code, run, 3, "7", 3) == (False, "no round was added to the 4 that are saved in 4 lives")
    assert verdict(code, run, 3, "8", 0)[0], "the lives of another job do not count"
    save(run, 5)
    assert verdict(code, run, 3, "7", 99)[0], "with one more round the count begins anew"


def test_a_run_without_retries_gives_up_at_its_first_fault_but_not_at_a_stop(run: Path) -> None:
    assert verdict(1, run, 0, "7", 0) == (False, "no round was added to the 0 that are saved in this life")
    assert verdict(75, run, 0, "7", 0)[0]
    (run / "stopped.json").write_text('{"round": 1}')
    assert verdict(1, run, 0, "7", 0)[0], "torchrun makes 1 of 75"
    assert not verdict(2, run, 0, "7", 0)[0]


def test_a_finished_or_cancelled_run_does_not_begin_again(run: Path) -> None:
    add(run / "starts.jsonl", {"time": 100.0})
    (run / "cancelled").write_text('{"time": 99.0}')
    assert verdict(75, run, 3, "7", 0)[0], "it was started since"
    (run / "cancelled").write_text('{"time": 101.0}')
    assert verdict(75, run, 3, "7", 0) == (False, "the run was cancelled")
    (run / "finished.json").touch()
    assert verdict(75, run, 3, "7", 0) == (False, "the run is done")


def test_torn_records_do_not_count(run: Path) -> None:
    (run / "lives.jsonl").write_bytes(b'{"job": "7", "round": 0}\n[1]\n\xff\n{"job": "7", "rou')
    (run / "starts.jsonl").write_text('{"ti')
    (run / "cancelled").write_text("{")
    (run / "checkpoints" / "round-9").mkdir(parents=True)  # without its manifest
    assert verdict(1, run, 1, "7", 0)[0] is False and verdict(1, run, 2, "7", 0)[0] is True


def test_requeue_hands_its_code_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["requeue", "0"]) == 0
    assert main(["requeue", "75"]) == 2 and "SLURM_JOB_ID is not set" in capsys.readouterr().err
    for wrong in (["-1"], ["256"], ["x"], [], ["1", "--retries", "-1"]):
        assert main(["requeue", *wrong]) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert main(["requeue", "9"]) == 9
    assert capsys.readouterr().err == (
        "fedmpi: job 7 ended with exit code 9; not queued again: it was started again 3 times\n"
    )


def test_requeue_notes_each_life_in_the_folder_of_a_run_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    save(run, 3)
    assert main(["requeue", "2", "--run", str(run)]) == 2
    [restart] = records(run / "lives.jsonl", Restart)
    assert {name: restart[name] for name in ("job", "restart", "code", "round", "again")} == {
        "job": "7",
        "restart": 0,
        "code": 2,
        "round": 3,
        "again": False,
    }
    (run / "lives.jsonl").unlink()
    (run / "lives.jsonl").mkdir()
    assert main(["requeue", "2", "--run", str(run)]) == 1 and "so job 7 is not started again" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    for other in ("other", "nowhere"):
        assert main(["requeue", "2", "--run", str(tmp_path / other)]) == 2
    assert not list((tmp_path / "other").iterdir()) and not (tmp_path / "nowhere").exists()


# How it stands with a run


def test_progress_is_told_from_the_rounds_that_are_whole(run: Path) -> None:
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
    assert "4 of 10, 30.0 a minute, 12 s left" in text and "0.3000 (round 3)" in text
    assert look(run)["minutes_left"] is None, "nobody runs it any more"


def test_the_rate_is_that_of_the_last_rounds(run: Path) -> None:
    slow, fast = [a_round(n, seconds=60.0) for n in range(1, 31)], [a_round(n, seconds=1.0) for n in range(31, 61)]
    add(run / "metrics.jsonl", *slow, *fast)
    assert look(run)["rounds_a_minute"] == pytest.approx(60)


def test_only_the_end_of_a_long_log_is_read(run: Path) -> None:
    add(run / "metrics.jsonl", *(a_round(n, test_mae=0.5, padding="x" * 100) for n in range(1, 2001)))
    seen = look(run)
    assert (run / "metrics.jsonl").stat().st_size > 2 * jobs.TAIL_BYTES
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
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told] == ["runs/new", "runs/deep/er/down", "runs/old"], "newest first"
    done = "fedavg + mean  finished  [####################] 2/2  accuracy 0.5000"
    assert told[0] == f"runs/new           {done}"
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
        ({"JobState": "FAILED"}, "failed", "it ended before it was done"),
        ({"JobState": "OUT_OF_MEMORY"}, "failed", "out of memory"),
        ({"JobState": "TIMEOUT"}, "failed", "timeout"),
        ({}, "unknown", "Slurm has forgotten the job, and the run never began"),
        (None, "unknown", "Slurm does not answer here"),
    ],
)
def test_states_by_what_slurm_says(facts: dict[str, str] | None, state: str, why: str, run: Path) -> None:
    assert state_of(run, SLURM, facts) == (state, why)


def test_the_folder_knows_what_slurm_has_forgotten(run: Path) -> None:
    add(run / "starts.jsonl", {"time": 100.0, "job": "7", "ranks": 2})
    assert state_of(run, SLURM, {}) == ("failed", "it ended before it was done")
    add(run / "lives.jsonl", {"job": "7", "code": 137, "again": False, "why": "of this"})
    assert state_of(run, SLURM, {}) == ("failed", "exit code 137; not started again, as of this")
    (run / "stopped.json").write_text('{"round": 5, "why": "SIGTERM", "time": 105}')
    assert state_of(run, SLURM, {}) == ("stopped", "by SIGTERM after round 5; not started again, as of this")
    (run / "cancelled").write_text('{"time": 101.0}')
    assert state_of(run, SLURM, {}) == ("cancelled", "")
    (run / "finished.json").write_text('{"rounds": 5}')
    assert state_of(run, SLURM, {}) == ("finished", "")
    queued = {"JobState": "PENDING", "Reason": "Priority"}
    assert state_of(run, SLURM, queued) == ("queued", "Priority"), "for more rounds"


def test_the_newest_job_of_a_folder_counts_whoever_started_it(run: Path) -> None:
    assert jobs.job_of(run) is None
    add(run / "starts.jsonl", {"time": 1.0, "job": "5"})
    assert jobs.job_of(run) == Job("5", "slurm")
    (run / "job.json").write_text('{"job": "9", "executor": "slurm", "host": "n1"}')
    assert jobs.job_of(run) == Job("9", "slurm", "n1")
    add(run / "starts.jsonl", {"time": 2.0, "job": "11"})
    assert jobs.job_of(run) == Job("11", "slurm")


def test_a_failed_run_shows_the_tail_of_its_errors(run: Path) -> None:
    add(run / "starts.jsonl", {"time": 1.0, "job": "7"})
    (run / "slurm").mkdir()
    (run / "slurm" / "6_0_log.err").write_text("of an older job\n")
    (run / "slurm" / "7_0_log.err").write_text("")
    lines = "\n".join(f"line {n}" for n in range(20))
    (run / "slurm" / "7_1_log.err").write_text(f"{lines}\nsubmitit WARNING - noise\n\nfedmpi: what went wrong\n")
    shown = jobs.errors_of(run, SLURM)
    assert shown[0] == f"{run}/slurm/7_1_log.err:" and shown[-1] == "  fedmpi: what went wrong"
    assert len(shown) == 1 + jobs.SHOWN and not any("noise" in line or "older" in line for line in shown)


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


# What submit refuses

TINY = ["--data", "glyphs", "--clients", "4", "--cohort", "2", "--rounds", "1"]
LOCAL = ["--executor", "local"]


@pytest.mark.parametrize(
    ("options", "train", "said"),
    [
        ([], None, "submit was given nothing to run; write it behind its options: fedmpi submit ... -- train ..."),
        ([], ["compare"], "submit was given 'compare' to run"),
        (["--nodes", "0"], ["train"], "--nodes is 0; it must be at least 1"),
        (["--nodez", "1"], ["train"], "unknown option '--nodez'; did you mean '--nodes'?"),
        (["--executor", "slrm"], ["train"], "unknown executor 'slrm'; did you mean 'slurm'?"),
        (["--mpi", "pmi3"], ["train"], "unknown --mpi 'pmi3'; did you mean 'pmix'? known: none, pmi2, pmix"),
        (["--partition", "a\nb"], ["train"], "--partition is 'a\\nb'; it must be a word in one line"),
        ([*LOCAL, "--nodes", "2"], ["train"], "--nodes is 2 but --executor local has this machine only"),
        ([*LOCAL, "--time", "5"], ["train"], "--time cannot be used with --executor local"),
        (["--time", "1", "--signal_seconds", "50"], ["train"], "it must be at most half of that"),
        ([*LOCAL], ["train", "--tau", "2"], "--tau is 2.0; it must be in [0, 1]"),
        ([*LOCAL], ["train", "--algorithm", "fedadm"], "unknown algorithm 'fedadm'; did you mean 'fedadam'?"),
        ([*LOCAL], ["train", "--comm", "mpi"], "--comm is mpi but local jobs start no MPI ranks by themselves"),
        ([*LOCAL], ["train", "--ranks", "2"], "--ranks is 2 but a job has ranks of its own; use 'submit"),
        ([*LOCAL, "--mpi", "pmi2"], ["train"], "--mpi pmi2 is srun's, but --executor is local"),
        ([*LOCAL], ["train", "--out", "runs/50%j"], "has a character that Slurm takes for more than itself"),
    ],
)
def test_a_wrong_submission_is_one_sentence_and_leaves_nothing_behind(
    options: list[str],
    train: list[str] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    behind = [] if train is None else ["--", *train]
    assert main(["submit", *options, *behind]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("fedmpi: ")
    assert not list(tmp_path.iterdir())


def test_submitting_needs_sbatch_or_says_what_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "--", "train", *TINY, "--out", str(tmp_path / "run")]) == 2
    assert "sbatch and srun were not found" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_submitting_needs_submitit_and_nothing_else_does(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert main(["submit", *LOCAL, "--", "train", *TINY, "--out", str(tmp_path / "new")]) == 2
    assert "pip install submitit" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["status", str(run)]) == 0 and main(["requeue", "0"]) == 0


def test_folders_of_others_of_finished_and_of_running_runs_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(out: Path, *more: str) -> str:
        before = sorted(out.rglob("*"))
        assert main(["submit", *LOCAL, "--", "train", *TINY, *more, "--out", str(out)]) == 2
        assert sorted(out.rglob("*")) == before
        return capsys.readouterr().err

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    assert "holds files that are no run of fedmpi" in refused(other)
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write('{"host": "n1", "pid": 12, "launcher": "srun", "ranks": 2, "job": "5"}\n')
        lock.flush()
        assert "is in use by process 12 on n1, Slurm job 5" in refused(run)
    (run / "slurm").mkdir()
    (run / "job.json").write_text('{"job": "12", "executor": "local", "host": "n1"}')
    with open(run / "slurm" / "keeper", "w") as keeper:
        fcntl.flock(keeper, fcntl.LOCK_EX)
        assert "belongs to local job 12 on n1, which is running" in refused(run)
    (run / "finished.json").write_text('{"rounds": 1}')
    assert "already holds a finished run" in refused(run)


def test_other_settings_than_those_of_the_checkpoint_are_told_at_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 3)
    manifest = run / "checkpoints" / "round-3" / "manifest.json"
    about: dict[str, Any] = {"format": 1, "torch": "2", "round": 3, "ranks": 1, "vectors": [], "ints": [], "parts": []}
    about |= {"config": {"seed": 5, "rounds": 1, "threads": 1, "device": "cpu"}, "prints": {}, "best": None, "last": {}}
    manifest.write_text(sealed(about))
    assert main(["submit", *LOCAL, "--", "train", *TINY, "--out", str(run)]) == 2
    said = capsys.readouterr().err
    assert "with other settings: --seed is 0 and was 5; give the same" in said
    manifest.write_text(sealed(about | {"format": 99}))
    assert main(["submit", *LOCAL, "--", "train", *TINY, "--out", str(run)]) == 2
    assert "has format 99" in capsys.readouterr().err


# What is handed over


def test_the_script_asks_for_what_was_asked_and_requeues_right_behind_the_run(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    asked = cluster.Submission(2, 4, "gpu", 30, 6, 4, 1.5, "acc", "high", "a100", "my run", mpi="pmi2", setup="true")
    given = cluster.slurm_parameters(asked, tmp_path / "a run")
    text = submitit.slurm.slurm._make_sbatch_string(command="COMMAND", folder=tmp_path / "a run" / "slurm", **given)
    lines = text.splitlines()
    for option in (
        "nodes=2 ntasks-per-node=4 partition=gpu time=30 cpus-per-task=6 gpus-per-node=4 mem=1536M account=acc "
        "qos=high constraint=a100 signal=USR2@120 open-mode=append requeue"
    ).split():
        assert f"#SBATCH --{option}" in lines
    assert "#SBATCH --job-name='my run'" in lines and "wckey" not in text
    at = next(i for i, line in enumerate(lines) if line.startswith("srun --"))
    for option in ("--kill-on-bad-exit=1", "--open-mode=append", "--mpi=pmi2", "--cpus-per-task=6"):
        assert option in lines[at].split(), option
    behind = [line for line in lines[at + 1 :] if line and not line.startswith("#")]
    again = f"{sys.executable} -m fedmpi requeue --retries 3 --run '{tmp_path}/a run' $?"
    assert behind == [again, "exit $?"] and lines.index("true") < at


@pytest.mark.parametrize(("minutes", "seconds"), [(1, 15), (4, 60), (8, 120), (600, 120)])
def test_the_warning_leaves_most_of_a_short_life(minutes: int, seconds: int) -> None:
    assert cluster.Submission(time=minutes).warning_seconds == seconds


def test_a_task_trains_and_leaves_with_the_code_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str]] = []
    codes = iter([0, 75])

    def train(self: Rank, arguments: list[str]) -> int:
        heard.append(arguments)
        return next(codes)

    monkeypatch.setattr(Rank, "train", train)
    task = cluster.Train(["--config", "submitted.yaml"])
    task()
    with pytest.raises(SystemExit) as left:
        task()
    assert left.value.code == 75 and heard == [["--config", "submitted.yaml"]] * 2


def test_ranks_that_differ_ask_for_what_their_job_needs() -> None:
    keeper = pytest.importorskip("fedmpi.cluster.supervisor")
    asks = {(0, 0): 0, (75, 75): 75, (0, 75): 75, (-9, 1): 137, (144, -9): 75, (2, 1): 2, (0, 1): 1}
    assert {codes: keeper.overall(list(codes)) for codes in asks} == asks


def test_a_path_is_shown_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert cluster.shown(tmp_path / "runs" / "a") == Path("runs/a")
    assert cluster.shown(Path("/elsewhere")) == Path("/elsewhere")


def test_waiting_ends_when_it_comes_true_or_takes_too_long() -> None:
    later = time.monotonic() + 0.1
    assert cluster.wait_until(lambda: time.monotonic() > later)
    assert not cluster.wait_until(lambda: False, seconds=0.1)


def test_a_job_trains_what_was_checked_whatever_becomes_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("seed: 1\nrounds: 2\ndata: tiny\ndata_root: here\n")
    Path("here").mkdir()
    asked = cluster.Submission(time=10)
    cfg, out = cluster.checked_run(asked, ["--config", "my.yaml", "--out", "run", "--model", "logistic"])
    cluster.make_folder(out, cfg)
    arguments = cluster.frozen(asked, cfg, out)
    Path("my.yaml").write_text("seed: 99\n")
    monkeypatch.chdir("/")
    kept = prepare(parse(arguments)).cfg
    minutes = 10 - asked.warning_seconds / 60
    assert kept == replace(cfg, out=str(out), data_root=str(tmp_path / "here"), max_minutes=minutes)
    assert kept.seed == 1 and kept.rounds == 2
    with_own = replace(cfg, max_minutes=3.0)
    assert prepare(parse(cluster.frozen(asked, with_own, out))).cfg.max_minutes == 3.0, "a budget of one's own counts"

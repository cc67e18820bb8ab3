"""When a run is restarted, and `fedmpi requeue`: no Slurm needed."""

from __future__ import annotations

from pathlib import Path

import pytest
from run_folders import add, save

from fedmpi.cluster.requeue import decide, may_restart
from fedmpi.commands import main
from fedmpi.runs.schema import Restart, records

pytestmark = pytest.mark.usefixtures("no_launch")


@pytest.mark.parametrize(
    ("code", "wasted", "limit", "again"),
    [(0, 0, 3, False), (2, 0, 3, False), (1, 0, 0, False), (1, 2, 3, True), (1, 3, 3, False), (75, 0, 1, True)],
)
def test_a_run_is_restarted_up_to_the_limit_without_progress(code: int, wasted: int, limit: int, again: bool) -> None:
    assert may_restart(code, wasted, limit) is again


@pytest.mark.parametrize(
    ("code", "restarts", "again"),
    [(0, 0, False), (2, 0, False), (75, 99, True), (1, 0, True), (137, 2, True), (1, 3, False)],
)
def test_without_a_folder_a_stop_is_restarted_always_and_a_failure_up_to_the_limit(
    code: int, restarts: int, again: bool, tmp_path: Path
) -> None:
    assert decide(code, None, 3, "7", restarts)[0] is again
    assert decide(code, tmp_path, 3, "7", restarts)[0] is again, "a folder without a run keeps no count"


@pytest.mark.parametrize("code", [75, 1, 137])
def test_restarts_without_progress_are_counted_from_the_newest_checkpoint(code: int, run: Path) -> None:
    save(run, 4)
    for attempt in range(3):
        assert decide(code, run, 3, "7", attempt) == (True, "")
        add(run / "lives.jsonl", {"job": "7", "round": 4})
    assert decide(code, run, 3, "7", 3) == (False, "no round was added to the 4 saved ones in 4 attempts")
    assert decide(code, run, 3, "8", 0)[0], "attempts of another job do not count"
    save(run, 5)
    assert decide(code, run, 3, "7", 99)[0], "a new checkpoint resets the count"


def test_without_retries_a_failure_is_final_but_a_stop_is_not(run: Path) -> None:
    assert decide(1, run, 0, "7", 0) == (False, "no round was added to the 0 saved ones in this attempt")
    assert decide(75, run, 0, "7", 0)[0]
    (run / "stopped.json").write_text('{"round": 1}')
    assert decide(1, run, 0, "7", 0)[0], "torchrun turns 75 into 1"
    assert not decide(2, run, 0, "7", 0)[0]


def test_a_finished_or_cancelled_run_is_not_restarted(run: Path) -> None:
    add(run / "starts.jsonl", {"time": 100.0})
    (run / "cancelled").write_text('{"time": 99.0}')
    assert decide(75, run, 3, "7", 0)[0], "it was started after that"
    (run / "cancelled").write_text('{"time": 101.0}')
    assert decide(75, run, 3, "7", 0) == (False, "the run was cancelled")
    (run / "finished.json").touch()
    assert decide(75, run, 3, "7", 0) == (False, "the run is finished")


def test_torn_records_do_not_count(run: Path) -> None:
    (run / "lives.jsonl").write_bytes(b'{"job": "7", "round": 0}\n[1]\n\xff\n{"job": "7", "rou')
    (run / "starts.jsonl").write_text('{"ti')
    (run / "cancelled").write_text("{")
    (run / "checkpoints" / "round-9").mkdir(parents=True)  # without its manifest
    assert decide(1, run, 1, "7", 0)[0] is False and decide(1, run, 2, "7", 0)[0] is True


def test_requeue_returns_the_code_of_the_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["requeue", "0"]) == 0
    assert main(["requeue", "75"]) == 2 and "SLURM_JOB_ID is not set" in capsys.readouterr().err
    for wrong in (["-1"], ["256"], ["x"], [], ["1", "--retries", "-1"]):
        assert main(["requeue", *wrong]) == 2
    assert "Traceback" not in capsys.readouterr().err
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    assert main(["requeue", "9"]) == 9
    assert capsys.readouterr().err == (
        "fedmpi: job 7 ended with exit code 9; not queued again: it was restarted 3 times\n"
    )


def test_requeue_records_each_attempt_in_run_folders_only(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    save(run, 3)
    assert main(["requeue", "2", "--run", str(run)]) == 2
    [life] = records(run / "lives.jsonl", Restart)
    assert {name: life[name] for name in ("job", "restart", "code", "round", "again")} == {
        "job": "7",
        "restart": 0,
        "code": 2,
        "round": 3,
        "again": False,
    }
    (run / "lives.jsonl").unlink()
    (run / "lives.jsonl").mkdir()
    assert main(["requeue", "2", "--run", str(run)]) == 1 and "so job 7 is not restarted" in capsys.readouterr().err
    (tmp_path / "other").mkdir()
    for other in ("other", "nowhere"):
        assert main(["requeue", "2", "--run", str(tmp_path / other)]) == 2
    assert not list((tmp_path / "other").iterdir()) and not (tmp_path / "nowhere").exists()

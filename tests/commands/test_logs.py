"""`fedmpi logs`: where a run's output is, the last lines of it, and following it to its end."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from reported import a_round, write_run

from fedmpi.commands import logs, main


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "LOOK", 0.05)
    monkeypatch.setattr(logs, "POLL", 0.02)


def test_the_status_of_a_terminal_run_comes_from_its_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lost = a_round(3, 0.5, train_loss=None, test_loss=None)
    run = write_run(tmp_path / "run", [a_round(1, 0.25), a_round(2, None), lost])
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"round": 4, "torn')
    assert main(["logs", str(run)]) == 0
    logged = capsys.readouterr().out.splitlines()
    assert logged[0].startswith("round 1/3  acc 0.2500  loss 1.0000  train 2.0000  kept 0.60  agree 0.50")
    assert logged[1].startswith("round 2/3  train 1.0000") and logged[2].startswith("round 3/3  acc 0.5000  loss nan")
    assert logged[3] == '{"round": 4, "torn', "what cannot be read is shown as it is"
    assert main(["logs", str(run), "-n", "2"]) == 0 and capsys.readouterr().out.splitlines() == logged[2:]
    assert main(["logs", str(run), "-n", "0"]) == 0 and capsys.readouterr() == ("", "")


def test_the_logs_of_a_job_are_those_of_all_its_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "sweep" / "run", [a_round(1, 0.25)])
    files = tmp_path / "sweep" / "slurm"
    files.mkdir()
    (run / "job.json").write_text(json.dumps({"job": "7_1", "executor": "slurm", "logs": "../slurm"}))
    for name, text in {"7_1_0_log.out": "one\ntwo\n", "7_1_0_log.err": "oops\n", "7_1_1_log.out": ""}.items():
        (files / name).write_text(text)
    (files / "7_0_0_log.out").write_text("another run\n")
    assert main(["logs", str(run), "-n", "1"]) == 0
    out, err = files / "7_1_0_log.out", files / "7_1_0_log.err"
    assert capsys.readouterr().out == f"==> {out} <==\ntwo\n==> {err} <==\noops\n"


def test_a_run_is_followed_to_its_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "sweep"
    run = write_run(home / "run", [a_round(1, 0.25)], done=False)
    (home / "logs").mkdir()
    log = home / "logs" / "run.log"
    log.write_text("first\nsecond\n")
    (run / "lock").touch()

    def goes_on() -> None:
        with open(log, "a") as file:
            for text in ("thi", "rd\n", "last words, no end of line"):
                time.sleep(0.1)
                file.write(text)
                file.flush()
        (run / "finished.json").write_text(json.dumps({"rounds": 1}))

    with pytest.MonkeyPatch.context() as patch:
        seen = logs.look
        patch.setattr(logs, "look", lambda run: seen(run) | ({} if (run / "finished.json").exists() else RUNNING))
        writer = threading.Thread(target=goes_on)
        writer.start()
        assert main(["logs", "--follow", str(run), "-n", "1"]) == 0
        writer.join()
    logged = capsys.readouterr()
    assert logged.out == "second\nthird\nlast words, no end of line\n" and logged.err == f"fedmpi: {run} is finished\n"


RUNNING = {"state": "running", "why": ""}


def test_a_run_without_a_log_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "sweep" / "run", [])
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"axes": {}, "runs": {"run": {"seed": "0"}}}))
    assert main(["logs", str(run)]) == 0 and "has printed nothing yet; it is finished" in capsys.readouterr().err
    for words, said in (
        ([], "logs needs a run folder"),
        ([str(tmp_path / "nowhere")], "is no folder"),
        ([str(tmp_path / "sweep")], f"is a sweep; name one of its runs, such as {run}"),
        ([str(run), "-n", "-1"], "--lines is -1; it must be at least 0"),
    ):
        assert main(["logs", *words]) == 2
        assert said in capsys.readouterr().err

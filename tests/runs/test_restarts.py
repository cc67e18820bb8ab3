"""What must not be lost when a run is restarted: by an error that passes, by a lock that is freed late, by one bad
line."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from shell import ALONE, CPU, metrics, sandbox, settings_of
from shell import train as train_alone

from fedmpi.comm import SoloComm
from fedmpi.data import store
from fedmpi.data.store import Source
from fedmpi.errors import CommonError, RunError, UserError
from fedmpi.runs import folder
from fedmpi.runs.build import prepare
from fedmpi.runs.checkpoint import format, save
from fedmpi.runs.checkpoint.format import rounds_in
from fedmpi.runs.config import Checkpoint, Config
from fedmpi.runs.run import run
from fedmpi.runs.stop import Stopped

EACH = Checkpoint(every=1, minutes=0)


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


def of(out: Path, **changes: Any) -> Config:
    return settings_of(out, **{"checkpoint": EACH, "threads": 1} | changes)


def begin(out: Path, **changes: Any) -> None:
    """A run of three rounds that is stopped after two."""
    cut_short(of(out, **changes), 2)


def cut_short(cfg: Config, rounds: int) -> None:
    """Run until the time is up, after that many rounds."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        done: list[int] = []
        patch.setattr("fedmpi.runs.stop.Stop.round_done", lambda self: done.append(1))
        patch.setattr("fedmpi.runs.stop.Stop.flags", property(lambda self: [0, 0, 0, int(len(done) >= rounds)]))
        run(prepare(cfg), SoloComm(), ALONE, CPU, {})


def starts(out: Path) -> list[int]:
    return [json.loads(line)["round"] for line in (out / "starts.jsonl").read_text().splitlines()]


def refuse(*_: Any, **__: Any) -> Any:
    raise OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize("what", ["slice", "manifest"])
def test_a_checkpoint_that_cannot_be_read_for_a_moment_is_not_given_up(
    what: str, tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(format, "opened" if what == "slice" else "load", refuse)
        with pytest.raises(CommonError, match=r"round-2 cannot be read \(Input/output error\); nothing was changed"):
            train_alone(of(tmp_path))
    assert rounds_in(tmp_path / "checkpoints") == [2, 1] and len(metrics(tmp_path)) == 2
    train_alone(of(tmp_path))
    assert starts(tmp_path) == [0, 2]


def test_what_was_found_damaged_is_kept_for_whoever_wants_to_see_it(tmp_path: Path) -> None:
    begin(tmp_path)
    (tmp_path / "checkpoints" / "round-2" / "manifest.json").write_text("{}")
    train_alone(of(tmp_path))
    assert starts(tmp_path) == [0, 1]
    assert [path.name.rpartition("-")[0] for path in (tmp_path / "checkpoints").glob("damaged-*")] == [
        "damaged-round-2"
    ]


def test_old_files_stay_if_their_need_is_unknown(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, algorithm="scaffold")
    clients = tmp_path / "checkpoints" / "clients"
    before = {path.name for path in clients.iterdir()}
    patch.setattr(save, "read_manifest", refuse)
    train_alone(of(tmp_path, algorithm="scaffold"))
    assert before <= {path.name for path in clients.iterdir()} and rounds_in(tmp_path / "checkpoints") == [3, 2, 1]


def test_after_a_restart_a_lock_that_is_freed_late_is_a_fault_and_no_mistake(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setattr(folder, "WAIT_SECONDS", 0.0)
    patch.setattr(folder, "LEASE_SECONDS", 0.0)
    with folder.held(tmp_path, ALONE, {}, 60.0):
        with pytest.raises(UserError, match="is in use by process"):
            train_alone(of(tmp_path))
        with pytest.raises(RunError, match="is in use by process"):
            run(prepare(of(tmp_path)), SoloComm(), ALONE, CPU, {"SLURM_RESTART_COUNT": "1"})
    train_alone(of(tmp_path))


def test_a_run_that_finishes_while_another_waits_for_its_folder_stays_as_it_is(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    train_alone(of(tmp_path / "done"))
    out = tmp_path / "out"
    held = threading.Event()

    def other() -> None:
        with folder.held(out, ALONE, {}, 60.0):
            held.set()
            time.sleep(0.5)
            (tmp_path / "done" / "finished.json").rename(out / "finished.json")

    out.mkdir()
    thread = threading.Thread(target=other)
    thread.start()
    held.wait(10)
    (out / "config.yaml").touch()
    with pytest.raises(UserError, match="already holds a finished run"):
        train_alone(of(out, resume="never"))
    thread.join()
    assert (out / "finished.json").exists()


def test_one_bad_line_among_the_metrics_costs_that_line_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path)
    file = tmp_path / "metrics.jsonl"
    first, second = file.read_text().splitlines()
    file.write_text(f"{first[:20]}\n[1]\n{second}\n")
    train_alone(of(tmp_path))
    assert [record["round"] for record in metrics(tmp_path)] == [2, 3]
    assert first[:20] in (tmp_path / "metrics.jsonl.damaged-1").read_text()


def test_resume_never_is_meant_for_the_first_start_of_a_launch(tmp_path: Path) -> None:
    begin(tmp_path)
    job = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "1"}
    run(prepare(of(tmp_path, resume="never")), SoloComm(), ALONE, CPU, job)  # restarted before it had begun
    assert starts(tmp_path) == [0, 0]
    (tmp_path / "finished.json").unlink()
    run(prepare(of(tmp_path, resume="never")), SoloComm(), ALONE, CPU, job)
    assert starts(tmp_path) == [0, 0, 3]


def test_resume_never_is_meant_for_the_first_start_under_a_supervisor_too(tmp_path: Path) -> None:
    begin(tmp_path)
    for restart in ("0", "1"):
        environ = {"FEDMPI_LAUNCH": "keeper 7", "FEDMPI_RESTART_COUNT": restart}
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
            patch.setattr("fedmpi.runs.stop.Stop.flags", property(lambda self: [1, 0, 0, 0]))
            run(prepare(of(tmp_path, resume="never")), SoloComm(), ALONE, CPU, environ)
    assert starts(tmp_path) == [0, 0, 1]


def test_a_finished_run_is_kept_from_a_restarted_job_that_is_not_its_own(tmp_path: Path) -> None:
    train_alone(of(tmp_path))
    before = (tmp_path / "model.safetensors").stat().st_mtime_ns
    for resume in ("never", "auto"):
        with pytest.raises(UserError, match="already holds a finished run"):
            job = {"SLURM_JOB_ID": "8", "SLURM_RESTART_COUNT": "1"}
            run(prepare(of(tmp_path, resume=resume)), SoloComm(), ALONE, CPU, job)
    assert (tmp_path / "model.safetensors").stat().st_mtime_ns == before


def test_data_have_the_same_fingerprint_where_they_cannot_be_kept(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    tensors = {name: torch.arange(4) for name in ("x", "y", "test_x", "test_y")}
    source = Source("made", 1, lambda files: tensors, generated=True)
    kept = store.load(source, tmp_path)
    patch.setattr(store, "can_write", lambda folder: False)
    patch.setattr(store, "prepared_files", lambda source, base: [])
    loose = store.load(source, tmp_path)
    assert loose.path is None and kept.path is not None and loose.sha256 == kept.sha256 != ""


def test_a_folder_that_was_made_by_hand_becomes_private(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir(mode=0o755)
    train_alone(replace(of(out), rounds=1))
    assert out.stat().st_mode & 0o777 == 0o700

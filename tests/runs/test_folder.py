"""A run folder: one run at a time has it, however the last one ended; what lies in it is whole and private."""

from __future__ import annotations

import errno
import json
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import rank_environment
from shell import ALONE, sandbox, settings_of, train

from fedmpi.comm.env import Place
from fedmpi.errors import UserError
from fedmpi.runs import folder
from fedmpi.runs.checkpoint.format import rounds_in

OWNER = """
import os, sys, time
from pathlib import Path
from fedmpi.runs import folder
from fedmpi.comm.env import Place

with folder.held(Path(sys.argv[1]), Place("torchrun", 0, 3, 0, 3), {"SLURM_JOB_ID": "77"}, 60.0):
    child = os.fork() if "fork" in sys.argv else None
    if child == 0:
        print(os.getpid(), flush=True)
        time.sleep(100)
    if child is None:
        print("held", flush=True)
    time.sleep(100)
"""


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


@pytest.fixture
def owners() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are gone when the test is over."""
    ours: list[subprocess.Popen[str]] = []
    yield ours
    for one in ours:
        one.kill()
        one.wait()
        assert one.stdout is not None
        one.stdout.close()


def own(out: Path, owners: list[subprocess.Popen[str]], *words: str) -> tuple[subprocess.Popen[str], str]:
    """A process that has the folder, and its first word."""
    command = [sys.executable, "-c", OWNER, str(out), *words]
    owner = subprocess.Popen(command, env=rank_environment(), stdout=subprocess.PIPE, text=True)
    owners.append(owner)
    assert owner.stdout is not None
    return owner, owner.stdout.readline().strip()


# The lock


@pytest.mark.processes
def test_two_runs_on_one_folder_refuse_each_other_and_a_killed_owner_frees_it(
    tmp_path: Path, patch: pytest.MonkeyPatch, owners: list[subprocess.Popen[str]]
) -> None:
    patch.setattr(folder, "WAIT_SECONDS", 0.3)
    assert folder.holder(tmp_path) is None
    owner, _ = own(tmp_path, owners)
    found = folder.holder(tmp_path)
    assert found is not None and found["since"] <= time.time()
    known = {"host": found["host"], "pid": owner.pid, "launcher": "torchrun", "ranks": 3, "job": "77"}
    assert found == known | {"since": found["since"]}
    with pytest.raises(UserError) as caught:
        train(settings_of(tmp_path))
    assert str(caught.value) == (
        f"--out {tmp_path} is in use by process {owner.pid} on {found['host']}, Slurm job 77; wait for it, stop it, or "
        "choose another folder"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["lock"], "nothing was touched"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert folder.holder(tmp_path) is None
    train(settings_of(tmp_path))
    assert (tmp_path / "finished.json").exists() and folder.holder(tmp_path) is None


@pytest.mark.processes
def test_children_of_a_killed_owner_do_not_keep_the_folder(tmp_path: Path, owners: list[subprocess.Popen[str]]) -> None:
    """Such as those that read a Dataset ahead."""
    owner, child = own(tmp_path, owners, "fork")
    try:
        found = folder.holder(tmp_path)
        assert found is not None and found["pid"] == owner.pid != int(child)
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        os.kill(int(child), 0)  # still there
        assert folder.holder(tmp_path) is None
    finally:
        os.kill(int(child), signal.SIGKILL)


def test_a_new_start_waits_for_the_dying_one(tmp_path: Path) -> None:
    """As that of ranks which the launcher is just starting anew."""
    ready, go = threading.Event(), threading.Event()

    def other() -> None:
        with folder.held(tmp_path, ALONE, {}, 60.0):
            ready.set()
            go.wait(20)

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(20)
    threading.Timer(0.5, go.set).start()
    with folder.held(tmp_path, ALONE, {}, 60.0):
        found = folder.holder(tmp_path)
        assert found is not None and found["job"] is None
    thread.join()


def test_a_run_has_its_folder_while_it_runs_and_looking_does_not_disturb(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Any] | None] = []
    add_start = folder.add_start

    def look(*given: Any) -> None:
        seen.extend(folder.holder(tmp_path) for _ in range(3))
        add_start(*given)

    patch.setattr(folder, "add_start", look)
    train(settings_of(tmp_path))
    assert [one and one["pid"] for one in seen] == [os.getpid()] * 3
    assert folder.holder(tmp_path) is None


def test_a_lock_that_says_nothing_yet_is_somebodys(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(folder, "WAIT_SECONDS", 0.0)
    with folder.held(tmp_path, ALONE, {}, 60.0):
        for text in ("", '{"host": "a', "[]", "7"):
            (tmp_path / "lock").write_text(text)
            assert folder.holder(tmp_path) == {}
            with pytest.raises(UserError, match="is in use by another run; wait for it"):
                train(settings_of(tmp_path))


def test_a_file_system_without_locks_is_warned_of_once(
    tmp_path: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: Any) -> None:
        raise OSError(folder.NO_LOCKS[0], "No locks available")

    patch.setattr(folder.fcntl, "flock", none)
    train(settings_of(tmp_path))
    assert [record.message for record in caplog.records] == [
        f"the file system of {tmp_path} has no locks: make sure that no other run uses this folder"
    ]


# What lies in it


@pytest.mark.parametrize("left", [["lock"], ["lock", ".writable"], ["lock", ".config.yaml"]])
def test_a_run_killed_before_its_first_word_can_be_started_again(tmp_path: Path, left: list[str]) -> None:
    for name in left:
        (tmp_path / name).write_text("{")
    train(settings_of(tmp_path))
    assert (tmp_path / "finished.json").exists() and not (tmp_path / ".writable").exists()


def test_everything_in_the_folder_is_the_users_alone(tmp_path: Path) -> None:
    out = tmp_path / "a" / "run"
    train(settings_of(out, algorithm="scaffold"))
    made = [out, *(path for path in (out / "checkpoints").rglob("*") if path.is_dir())]
    assert len(made) >= 3 and {stat.S_IMODE(path.stat().st_mode) for path in made} == {0o700}


def test_every_start_is_logged(tmp_path: Path) -> None:
    environ = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "2", "TORCHELASTIC_RESTART_COUNT": "1"}
    folder.write(tmp_path / "stopped.json", "{}")
    folder.add_start(tmp_path, Place("slurm", 0, 4, 0, 2), "torch", 0, {})
    folder.add_start(tmp_path, Place("torchrun", 0, 3, 0, 3), "mpi", 7, environ)
    first, second = (json.loads(line) for line in (tmp_path / "starts.jsonl").read_text().splitlines())
    assert set(first) == {"time", "round", "ranks", "launcher", "comm", "host", "job", "restart", "launch"}
    assert [first[k] for k in ("round", "ranks", "launcher", "comm", "job", "restart")] == [
        *(0, 4, "slurm", "torch", None, 0)
    ]
    assert [second[k] for k in ("round", "ranks", "launcher", "comm", "job", "restart")] == [
        *(7, 3, "torchrun", "mpi", "12", 3)
    ]
    assert not (tmp_path / "stopped.json").exists(), "that is history now"


def test_status_shows_how_a_run_stopped(tmp_path: Path) -> None:
    folder.add_stop(tmp_path, 5, "SIGTERM", {"TORCHELASTIC_RUN_ID": "abc"})
    record = json.loads((tmp_path / "stopped.json").read_text())
    assert (record["round"], record["why"]) == (5, "SIGTERM") and record["time"] <= time.time()
    assert len(record["launch"]) == 1 and record["launch"][0].startswith("torchrun abc ")


def test_only_the_launch_that_stopped_a_run_is_kept_from_starting_it_again(tmp_path: Path) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "abc", "TORCHELASTIC_RESTART_COUNT": "1"}
    assert folder.stopped_before(tmp_path, torchrun) is None
    folder.add_stop(tmp_path, 5, "SIGTERM", torchrun)
    again = folder.stopped_before(tmp_path, torchrun)
    assert again is not None and again["round"] == 5
    for other in (
        {},
        torchrun | {"TORCHELASTIC_RUN_ID": "other"},
        torchrun | {"TORCHELASTIC_RUN_ID": "none"},
        torchrun | {"TORCHELASTIC_RESTART_COUNT": "0"},
        torchrun | {"TORCHELASTIC_RESTART_COUNT": "0", "SLURM_RESTART_COUNT": "1"},  # requeued, the same --rdzv-id
    ):
        assert folder.stopped_before(tmp_path, other) is None, other


def test_what_is_written_is_there_in_one_piece_or_not_at_all(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    folder.write(tmp_path / "a", "before")

    def fail(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    patch.setattr(folder.os, "fsync", fail)
    with pytest.raises(OSError):
        folder.write(tmp_path / "a", "after")
    assert (tmp_path / "a").read_text() == "before"


@pytest.mark.parametrize("text", ["", "{", "[1]", "7", '"word"', "\x00", "\udcff"])
def test_a_record_that_cannot_be_read_is_empty(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_bytes(text.encode(errors="surrogateescape"))
    assert folder.read_json(tmp_path / "a.json") == {} == folder.read_json(tmp_path) == folder.read_json(tmp_path / "b")


def test_an_error_of_the_disk_says_what_is_kept(tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    assert folder.attempt(lambda: None) == "" and folder.attempt(full) == "No space left on device"
    for kept, words in ((0, "there is no checkpoint yet"), (3, "the checkpoint of round 3 is kept")):
        assert folder.write_failed(tmp_path, folder.attempt(full), kept) == (
            f"{tmp_path} cannot be written (No space left on device); {words}: put that right and start the same "
            "command again"
        )


def test_rounds_are_found_by_name_newest_first(tmp_path: Path) -> None:
    for name in ("round-2", "round-10", "round-0", "round-x", ".round-11-ab", "round-3-old", "clients"):
        (tmp_path / name).mkdir()
    assert rounds_in(tmp_path) == [10, 2] and rounds_in(tmp_path / "none") == []

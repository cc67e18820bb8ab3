"""What killed runs leave in memory is removed at the next start, and nothing else is."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import rank_environment

from fedmpi.cluster.launcher import meeting_folder
from fedmpi.comm import leftovers
from fedmpi.comm.env import Place
from fedmpi.comm.leftovers import MEMORY, in_use, sweep
from fedmpi.commands.doctor import DoctorOptions, disk

LONG_AGO = time.time() - 3600


def made(path: Path, age: float = LONG_AGO, folder: bool = False) -> Path:
    path.mkdir() if folder else path.write_bytes(bytes(4096))
    os.utime(path, (age, age))
    return path


def test_what_is_ours_old_and_in_use_by_nobody_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = {made(tmp_path / "fedmpi-1f-0-0", folder=True), made(tmp_path / "mpich_shm_1f470011_0")}
    (tmp_path / "fedmpi-1f-0-0" / "vector").touch()
    os.utime(tmp_path / "fedmpi-1f-0-0", (LONG_AGO, LONG_AGO))
    kept = {
        made(tmp_path / "fedmpi-young", time.time(), folder=True),
        made(tmp_path / "mpich_shm_2f470011_0", time.time() - 120),
        made(tmp_path / "sem.mp-abc"),
        made(tmp_path / "mpich_shm_mine"),
        made(tmp_path / "fedmpi-file"),
        made(tmp_path / "fedmpi-locked", folder=True),
    }
    link = tmp_path / "fedmpi-link"
    link.symlink_to(tmp_path / "fedmpi-1f-0-0")
    with in_use(tmp_path / "fedmpi-locked"):
        assert set(leftovers.leftovers(tmp_path)) == dead
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not leftovers.leftovers(tmp_path), "another user's"
        monkeypatch.undo()
        sweep(tmp_path)
        assert set(tmp_path.iterdir()) == kept | {link}
    sweep(tmp_path)
    assert not (tmp_path / "fedmpi-locked").exists()


def test_memory_that_a_process_maps_stays_and_the_doctor_lists_the_rest() -> None:
    if not os.access(MEMORY, os.W_OK):
        pytest.skip(f"no {MEMORY}")
    name = f"{os.getpid():x}"
    mapped, left = made(MEMORY / f"mpich_shm_{name}_0"), made(MEMORY / f"mpich_shm_{name}_1")
    try:
        with open(mapped, "r+b") as file, mmap.mmap(file.fileno(), 0):
            assert mapped not in leftovers.leftovers() and left in leftovers.leftovers()
            text = list(disk(Place("alone", 0, 1, 0, 1), DoctorOptions()))[-1].text
            assert left.name in text and mapped.name not in text and "left by killed runs" in text
            sweep()
            assert mapped.exists() and not left.exists()
    finally:
        for path in (mapped, left):
            path.unlink(missing_ok=True)


HOLDS = """
import os, sys, time
from fedmpi.cluster.launcher import meeting_folder
with meeting_folder() as folder:
    if os.fork() == 0:
        print(folder, os.getpid(), flush=True)
        time.sleep(60)
    os.kill(os.getpid(), 9)
"""


def test_where_ranks_meet_is_in_use_as_long_as_one_of_them_is_alive() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], env=rank_environment(), stdout=subprocess.PIPE, text=True
    ) as job:
        assert job.stdout is not None
        folder, rank = job.stdout.readline().split()
        assert job.wait(30) == -9
        os.utime(folder, (LONG_AGO, LONG_AGO))
        assert Path(folder) not in leftovers.leftovers() and Path(folder).stat().st_mode & 0o777 == 0o700
        os.kill(int(rank), 9)
        deadline = time.monotonic() + 10
        while Path(folder) not in leftovers.leftovers():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        sweep()
        assert not Path(folder).exists()


def test_a_launch_leaves_nothing_where_its_ranks_met() -> None:
    with meeting_folder() as folder:
        assert folder.stat().st_mode & 0o777 == 0o700 and leftovers.locked(folder)
    assert not folder.exists()

"""slurm/local/up and down: a real Slurm in a folder, wherever it is called, however its daemons ended."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurm_box
from conftest import need
from slurm_box import LOCAL, control

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(120)]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path (munged's socket goes below it) whose clusters are ended with the test."""
    absent = slurm_box.missing()
    need("slurm", not absent, f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-") as made:
        yield Path(made)
        for box in Path(made).glob("*/made-by-slurm-local-up"):
            control("down", "--quiet", "--dir", str(box.parent))


def call(script: str, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [str(LOCAL / script), *arguments]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=60)


def ask(box: Path, *command: str) -> str:
    env = os.environ | {"SLURM_CONF": str(box / "slurm.conf")}
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True, timeout=60).stdout


def daemons(box: Path) -> dict[str, int]:
    """The process ids that the daemons of a cluster wrote."""
    return {file.stem: int(file.read_text()) for file in box.glob("*.pid")}


def lives(pid: int) -> bool:
    """Whether a process is there and no zombie: nobody collects those where process 1 does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def listening(pids: set[int]) -> set[str]:
    """The addresses on which processes listen, in the kernel's words."""
    sockets = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            try:
                sockets.add(os.readlink(fd))
            except FileNotFoundError:  # closed since
                continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in sockets:
                found.add(local.partition(":")[0])
    return found


def test_two_clusters_side_by_side_listen_on_loopback_only_and_leave_nothing(folder: Path) -> None:
    one, two = folder / "one", folder / "two"
    assert control("up", "--quiet", "--dir", str(one)) == f"export SLURM_CONF={one}/slurm.conf\n"
    script = f'cd {folder} && eval "$("{LOCAL}/up" --nodes 3 --dir two)" && srun -N3 -l hostname'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "3 nodes up" in done.stderr
    assert sorted(done.stdout.split()) == sorted(
        f"{n}: {socket.gethostname()}".split()[i] for n in range(3) for i in (0, 1)
    )
    assert ask(one, "sinfo", "-h", "-N", "-o", "%N %T").split() == ["127.0.0.1", "idle", "127.0.0.2", "idle"]

    pids = daemons(one) | {f"{name} of two": pid for name, pid in daemons(two).items()}
    assert len(pids) == 4 + 5 and all(lives(pid) for pid in pids.values())
    assert listening(set(pids.values())) == {"0100007F"}, "127.0.0.1"
    assert one.stat().st_mode & 0o777 == 0o700

    control("down", "--quiet", "--dir", str(two))
    assert not two.exists() and ask(one, "srun", "-N2", "hostname"), "the other one is not touched"
    control("down", "--quiet", "--dir", str(one))
    assert list(folder.iterdir()) == [] and not any(lives(pid) for pid in pids.values())


def test_twice_is_a_message_going_up_and_nothing_going_down(folder: Path) -> None:
    box = folder / "box"
    control("up", "--dir", str(box))
    again = call("up", "--dir", str(box))
    assert again.returncode == 2 and again.stdout == ""
    assert f"already up in {box}: use it with 'export SLURM_CONF={box}/slurm.conf'" in again.stderr
    assert ask(box, "srun", "-N2", "hostname"), "and it still runs"
    for said in ("is removed", "nothing is running in"):
        done = call("down", "--dir", str(box))
        assert done.returncode == 0 and said in done.stderr


@pytest.mark.parametrize("dead", ["slurmctld", "slurmd-127.0.0.2", "all"])
def test_down_ends_the_jobs_too_when_a_daemon_died(dead: str, folder: Path) -> None:
    box = folder / "box"
    control("up", "--dir", str(box))
    touch = folder / "pid"
    script = f"#!/bin/bash\nsrun --nodes=2 bash -c 'echo $$ > {touch}-$SLURM_PROCID; exec sleep 900'\n"
    (folder / "job").write_text(script)
    ask(box, "sbatch", "--nodes=2", f"--output={folder}/log", str(folder / "job"))
    deadline = time.monotonic() + 40
    while not all((folder / f"pid-{n}").exists() and (folder / f"pid-{n}").read_text() for n in (0, 1)):
        assert time.monotonic() < deadline, (folder / "log").read_text()
        time.sleep(0.1)
    ranks = [int((folder / f"pid-{n}").read_text()) for n in (0, 1)]

    pids = daemons(box)
    for name, pid in pids.items():
        if dead in (name, "all"):
            os.kill(pid, signal.SIGKILL)
    if dead == "all":  # as after a reboot, but for the jobs: going up again clears away what is left
        control("up", "--dir", str(box))
        assert ask(box, "squeue", "-h") == ""
    else:
        refused = call("up", "--dir", str(box))
        assert refused.returncode == 2 and f"half up in {box} (a daemon died)" in refused.stderr
    assert [lives(rank) for rank in ranks] == ([False, False] if dead == "all" else [True, True])
    control("down", "--dir", str(box))
    assert not box.exists()
    assert not any(lives(pid) for pid in [*ranks, *pids.values()])


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests show it where they are not run by root")
def test_root_is_not_needed(folder: Path) -> None:
    nobody = pwd.getpwnam("nobody")
    shutil.copytree(LOCAL, folder / "slurm" / "local")  # the checkout may be closed to others
    folder.chmod(0o755)
    (folder / "mine").mkdir()
    os.chown(folder / "mine", nobody.pw_uid, nobody.pw_gid)
    script = (
        'eval "$(../slurm/local/up --quiet --dir box)" && srun -N2 id -un && sbatch -N2 --wrap "srun sleep 900" '
        "&& ../slurm/local/down --quiet --dir box"
    )
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder / "mine",
        env={"PATH": os.defpath + ":/usr/local/bin:/usr/bin:/bin"},
        user=nobody.pw_uid,
        group=nobody.pw_gid,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["nobody", "nobody"] and not (folder / "mine" / "box").exists()


@pytest.mark.parametrize(
    "script, arguments, message",
    [
        ("up", ["--nodes", "0"], "--nodes is '0'; it must be a whole number from 1 to 99"),
        ("up", ["--nodes"], "--nodes needs a value"),
        ("up", ["--node", "2"], "unknown argument '--node'; known: --nodes N, --dir DIR, --quiet"),
        ("up", ["--dir", "full"], "it exists or its parent cannot be written"),
        ("up", ["--dir", "with space"], "has characters that are not allowed in Slurm's settings"),
        ("up", ["--dir", "x" * 120], "is longer than 90 characters"),
        ("down", ["--dir", "full"], "was not made by slurm/local/up, so it is not removed"),
        ("down", ["--all"], "unknown argument '--all'; known: --dir DIR, --quiet"),
    ],
)
def test_a_mistake_is_one_error_message(
    script: str, arguments: list[str], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    (folder / "full").mkdir()
    (folder / "full" / "mine").touch()
    done = call(script, *arguments)
    assert done.returncode == 2 and done.stdout == ""
    assert message in done.stderr and len(done.stderr.splitlines()) == 1
    assert (folder / "full" / "mine").exists()


def test_the_error_of_a_missing_program_names_the_packages(folder: Path) -> None:
    few = folder / "bin"
    few.mkdir()
    for name in ("bash", "env", "dirname", "id", "realpath"):
        (few / name).symlink_to(str(shutil.which(name)))
    done = call("up", "--dir", str(folder / "box"), PATH=str(few))
    assert done.returncode == 2 and not (folder / "box").exists()
    assert "srun not installed; on Debian and Ubuntu: apt-get install slurm-wlm munge" in done.stderr

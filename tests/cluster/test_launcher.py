"""`fedmpi train --ranks`: its options, a mistake, restarts and stops with the right bits, ranks that do not outlive
their launcher, and a stranger on the same machine."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BIN, REPO, need, rank_environment
from long import LONG, digest, lines, train_alone, wait_for
from matrix import SMALL

from fedmpi import commands as cli
from fedmpi.cluster import launcher
from fedmpi.comm.env import Place, find_place
from fedmpi.errors import UserError
from fedmpi.runs.config import Launch
from fedmpi.runs.options import split_launch

ALONE, TRAIN = Place("alone", 0, 1, 0, 1), [sys.executable, "-m", "fedmpi", "train"]
ON_TWO_NODES = Place("srun", 1, 2, 0, 1)
MARK = "FEDMPI_TEST_LAUNCH"  # in the environment of every process of a launch, which is how they are found


def test_the_options_of_the_launcher_are_taken_out_of_a_command_line() -> None:
    assert split_launch(["--tau", "0.3", "--ranks", "4", "--out=a"]) == (Launch(4), ["--tau", "0.3", "--out=a"])
    assert split_launch(["--ranks=2", "--max_restarts=0"]) == (Launch(2, 0), [])
    assert split_launch(["--ranks", "1"]) == (Launch(), [])


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--ranks two", "--ranks is 'two'; it must be a whole number"),
        ("--ranks 0", "--ranks is 0; it must be"),
        ("--ranks 2 --max_restarts -1", "--max_restarts is -1; it must be"),
        ("--max_restarts 1", "--ranks is 1; give --ranks 2 or more"),
        ("--ranks", "--ranks needs a value"),
        ("--ranks_per_gpu --out x", "--ranks_per_gpu needs a value"),
        ("--max_restarts --ranks 2", "--max_restarts needs a value"),
        ("--ranks= --out x", "--ranks needs a value"),
    ],
)
def test_a_wrong_option_of_the_launcher_is_a_one_line_error(
    options: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert said in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("place", "comm", "restarts", "said"),
    [
        (Place("torchrun", 0, 2, 0, 2), "auto", None, "torchrun has started 2 ranks already"),
        (Place("mpi", 0, 3, 0, 3), "auto", None, "mpi has started 3 ranks already"),
        (Place("srun", 0, 4, 0, 2), "auto", None, "srun has started 4 ranks already"),
        (Place("fedmpi", 0, 2, 0, 2), "auto", None, "fedmpi has started 2 ranks already"),
        (ALONE, "mpi", None, "mpiexec -n 2 python -m mpi4py -m fedmpi train --comm mpi"),
        (ON_TWO_NODES, "auto", 1, "the ranks are on 2 nodes"),
    ],
)
def test_ranks_in_ranks_and_mpi_ranks_are_refused(place: Place, comm: str, restarts: int | None, said: str) -> None:
    with pytest.raises(UserError, match=said):
        launcher.check(Launch(2, restarts), place, comm)


def test_ranks_of_one_node_meet_in_a_private_file_and_those_of_several_at_an_address(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher.check(Launch(2), ALONE, "auto")
    launcher.check(Launch(2), ON_TWO_NODES, "auto")
    worlds = launcher.variables(2, ALONE, tmp_path / "store", attempt=1)
    for world in worlds:
        assert world["FEDMPI_STORE"] == str(tmp_path / "store") and "MASTER_ADDR" not in world
        assert world["FEDMPI_RESTART_COUNT"] == "1"
    places = [find_place(world) for world in worlds]
    assert places == [Place("fedmpi", 0, 2, 0, 2), Place("fedmpi", 1, 2, 1, 2)]

    for name, value in {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "n[1-2]"}.items():
        monkeypatch.setenv(name, value)
    worlds = launcher.variables(3, ON_TWO_NODES, tmp_path / "store", attempt=0)
    assert all((world["FEDMPI_STORE"], world["MASTER_ADDR"]) == ("", "n1") for world in worlds)
    places = [find_place(world) for world in worlds]
    assert places == [Place("fedmpi", rank, 6, rank - 3, 3) for rank in (3, 4, 5)]


# Real processes


class Marked(subprocess.Popen[str]):
    """A launch and the mark in the environment of all its processes."""

    mark: str


@contextlib.contextmanager
def started(command: list[str], log: Path, **more: str) -> Iterator[Marked]:
    """A launch that writes to a log; whatever is left of it is killed at the end."""
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    with open(log, "a") as file:
        process = Marked(command, env=rank_environment() | {MARK: mark} | more, stdout=file, stderr=file, text=True)
    process.mark = mark
    try:
        yield process
    finally:
        for pid in processes(mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(30)


def processes(mark: str) -> list[int]:
    """The processes of a launch, whoever their parent is now."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


@pytest.mark.launchers
@pytest.mark.timeout(120)
def test_a_mistake_is_a_one_line_error(tmp_path: Path) -> None:
    """Found when options are read, and found by the ranks."""
    for options, said in ((["--tau", "3"], "--tau is 3.0; it must be in [0, 1]\n"), (["--data", "glyphz"], "unknown ")):
        command = [*TRAIN, "--ranks", "2", *SMALL, *options, "--out", str(tmp_path / "run")]
        done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=100)
        assert done.returncode == 2 and not done.stdout
        assert done.stderr.startswith(f"fedmpi: {said}") and done.stderr.count("\n") == 1
        assert not (tmp_path / "run").exists()


@pytest.mark.launchers
@pytest.mark.timeout(300)
def test_ranks_restart_stop_and_resume_on_another_number_of_ranks(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    command = [*TRAIN, *LONG, "--out", str(out)]

    def rounds() -> int:
        return len(lines(out / "metrics.jsonl"))

    with started([*command, "--ranks", "2", "--max_restarts", "1"], log) as process:
        for starts in (1, 2):  # the second death is one too many
            wait_for(lambda n=starts: len(lines(out / "starts.jsonl")) == n, on_timeout=log.read_text)
            before = rounds()
            wait_for(lambda n=before: rounds() > n, on_timeout=log.read_text)
            os.kill(json.loads((out / "lock").read_text())["pid"], signal.SIGKILL)
        assert process.wait(60) == 1, log.read_text()
    text = log.read_text()
    assert "fedmpi: rank 0 of 2 was killed by SIGKILL; restart 1 of 1\n" in text and "Traceback" not in text

    with started([*command, "--ranks", "3"], log) as process:
        before = rounds()
        wait_for(lambda: rounds() > before + 3 or process.poll() is not None, on_timeout=log.read_text)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75, log.read_text()
    assert "(SIGTERM); the same command resumes from there" in log.read_text()

    with started(command, log) as process:
        assert process.wait(100) == 0, log.read_text()
    assert [start["ranks"] for start in lines(out / "starts.jsonl")] == [2, 2, 3, 1]
    assert digest(out) == train_alone(tmp_path / "alone")


def torchrun(out: Path) -> list[str]:
    return [
        str(BIN / "torchrun"),
        "--standalone",
        "--nproc-per-node=2",
        "-m",
        "fedmpi",
        "train",
        *LONG,
        "--out",
        str(out),
    ]


@pytest.mark.launchers
@pytest.mark.timeout(200)
def test_ranks_leave_when_their_launcher_is_killed(tmp_path: Path) -> None:
    """In a round, in a collective that another rank does not come to, and at the start, where ranks wait for others."""
    need("mpi", (BIN / "mpiexec").exists(), "no MPI next to this Python: pip install mpich")
    endless = ["--rounds", "100000"]
    launches: dict[str, Callable[[Path], list[str]]] = {
        "fedmpi": lambda out: [*TRAIN, "--ranks", "2", *LONG, "--out", str(out), *endless],
        "torchrun": lambda out: [*torchrun(out), *endless],
        "mpirun.sh": lambda out: ["bash", str(REPO / "launch" / "mpirun.sh"), "2", *LONG, "--out", str(out), *endless],
    }
    for name, command in launches.items():
        log, out = tmp_path / f"{name}.log", tmp_path / name
        with started(command(out), log) as process:
            wait_for(lambda at=out: lines(at / "metrics.jsonl"), on_timeout=log.read_text)
            frozen = json.loads((out / "lock").read_text())["pid"] if name == "fedmpi" else None
            if frozen is not None:
                os.kill(frozen, signal.SIGSTOP)  # the other rank waits in a collective now
                time.sleep(0.5)
            if name == "mpirun.sh":  # what is open to others is mpiexec's own port, which has no option for that
                open_to_others = [at for at in listeners(process.mark).values() if at != "0100007F"]
                assert open_to_others == ["00000000"]
            killed = time.monotonic()
            process.kill()
            process.wait()
            mark = process.mark
            wait_for(lambda m=mark, f=frozen: set(processes(m)) <= {f}, 20, on_timeout=log.read_text)
            if frozen is not None:
                os.kill(frozen, signal.SIGCONT)
                wait_for(lambda m=mark: not processes(m), 20 - (time.monotonic() - killed), on_timeout=log.read_text)

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    wrapped = ["sh", "-c", '"$@"; true', "sh", *TRAIN, *LONG, "--out", str(tmp_path / "start")]
    with started(wrapped, tmp_path / "log", TORCHELASTIC_RUN_ID="7", GROUP_WORLD_SIZE="1", **world) as process:

        def listens() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        wait_for(listens)  # rank 0 waits for rank 1 there
        process.kill()
        process.wait()
        wait_for(lambda: not processes(process.mark), 20)


# A stranger on the same machine


@pytest.fixture
def stranger() -> Iterator[str]:
    """An account of its own for the test, removed behind it."""
    tools = all(shutil.which(tool) for tool in ("useradd", "userdel"))
    need("root", os.geteuid() == 0 and tools, "a second account takes root and useradd")
    name = f"fedmpi{os.getpid()}"
    subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", name], check=True, timeout=60)
    try:
        yield name
    finally:
        subprocess.run(["userdel", "--force", name], check=True, capture_output=True, timeout=60)


def listeners(mark: str) -> dict[int, str]:
    """The TCP ports at which processes of a launch listen, with their addresses in hexadecimal as /proc has them."""
    inodes = set()
    for pid in processes(mark):
        for handle in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                inodes.add(os.readlink(handle))
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                address, port = words[1].split(":")
                found[int(port, 16)] = address
    return found


ATTACK = """
import os, pathlib, pickle, socket, struct, sys
marker, *ports = sys.argv[1:]

class Payload:
    def __reduce__(self):
        return os.system, (f"touch {marker}",)

def text(word):
    return struct.pack("<Q", len(word)) + word

payload = pickle.dumps(Payload())
for port in ports:
    for message in (payload, b"\\x00" + text(b"store") + text(payload)):
        with socket.socket() as line:
            line.settimeout(2)
            try:
                line.connect(("127.0.0.1", int(port)))
                line.sendall(message)
            except OSError as error:
                print(port, error)
for folder in pathlib.Path("/dev/shm").glob("fedmpi-*"):
    try:
        os.listdir(folder)
        print("entered", folder)
    except PermissionError:
        pass
    except FileNotFoundError:
        pass
"""


@pytest.mark.launchers
@pytest.mark.timeout(200)
def test_a_stranger_reaches_neither_the_store_nor_a_socket_of_the_run(stranger: str, tmp_path: Path) -> None:
    out, log, marker = tmp_path / "run", tmp_path / "log", Path(f"/tmp/{stranger}.marker")
    with started([*TRAIN, "--ranks", "2", *LONG, "--out", str(out)], log) as process:
        wait_for(lambda: lines(out / "metrics.jsonl"), on_timeout=log.read_text)
        found = listeners(process.mark)
        assert found and set(found.values()) == {"0100007F"}, "gloo listens on 127.0.0.1, and nothing else does"
        assert list(Path("/dev/shm").glob("fedmpi-launch-*")), "there is something to be kept out of"
        python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
        need("python3", python is not None, "no python3 that another account may start")
        command = [str(python), "-I", "-c", ATTACK, str(marker), *map(str, found)]
        who = pwd.getpwnam(stranger)
        attack = subprocess.run(
            command,
            user=who.pw_uid,
            group=who.pw_gid,
            extra_groups=[],
            cwd="/",
            env={},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert attack.returncode == 0 and "entered" not in attack.stdout, attack
        assert process.wait(100) == 0, log.read_text()
    assert not marker.exists() and digest(out) == train_alone(tmp_path / "alone")

    with started(torchrun(tmp_path / "torchrun"), log) as process:  # what is looked for here is found there
        wait_for(lambda: "00000000000000000000000000000000" in listeners(process.mark).values())

"""`fedmpi doctor`: what it finds alone and under the real launchers, what is broken with its fix, and that it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
import slurm_box
import torch
from conftest import BIN, need, rank_environment
from shell import sandbox

from fedmpi import commands as cli
from fedmpi.comm import Comm, Wait
from fedmpi.comm.env import Place
from fedmpi.comm.threads import ThreadComm, run_threads
from fedmpi.commands import doctor
from fedmpi.commands.doctor import DoctorOptions, Finding

ALONE = Place("alone", 0, 1, 0, 1)
PAIR = Place("torchrun", 0, 2, 0, 2)  # on one node
APART = Place("srun", 0, 2, 0, 1)  # on two
MODULE = ["-m", "fedmpi", "doctor"]
Lines = list[dict[str, object]]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Remove launchers' variables; restore threads and logger."""
    for name in set(os.environ) - set(rank_environment()):
        monkeypatch.delenv(name)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    with sandbox() as patch:
        patch.undo()  # places are found for real here
        monkeypatch.chdir(tmp_path)
        yield


def parsed(text: str) -> Lines:
    return [json.loads(line) for line in text.splitlines()]


def about(check: str, lines: Lines) -> tuple[object, str, str]:
    """Return level, finding and fix of the last line of a check."""
    line = [line for line in lines if line["check"] == check][-1]
    return line["level"], str(line["finding"]), str(line["fix"])


def examined(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Lines]:
    """Return exit code and lines of the command in this process."""
    code = cli.main(["doctor", "--json", *arguments])
    return code, parsed(capfd.readouterr().out)


# Alone


def test_alone_every_check_is_listed_and_none_fails(capfd: pytest.CaptureFixture[str]) -> None:
    code, lines = examined(capfd)
    assert code == 0
    checks = "python torch torchvision llm mpi slurm disk launcher devices network ranks".split()
    assert set(checks) <= {line["check"] for line in lines}
    assert all(line["level"] in ("ok", "--", "warn") for line in lines)
    assert all(line["fix"] for line in lines if line["level"] != "ok")
    assert about("torch", lines)[1].startswith(torch.__version__)
    assert about("launcher", lines)[1] == "alone: one rank; transport solo"


def test_a_line_per_finding_with_its_fix_below() -> None:
    assert doctor.rendered(Finding("ok", "torch", "2.0"), as_json=False) == "ok    torch          2.0"
    failed = Finding("FAIL", "mpi", "not\nusable", "install it")
    assert doctor.rendered(failed, as_json=False, ranks=[1, 3]).splitlines() == [
        "FAIL  mpi            ranks 1, 3: not usable",
        "                     fix: install it",
    ]


def test_ranks_are_named_for_problems_that_rank_0_does_not_have() -> None:
    low, late, well = Finding("warn", "disk", "few"), Finding("FAIL", "ranks", "late"), Finding("ok", "disk", "many")
    assert doctor.of_others([[well], [low, late, well], [low]]) == {low: [1, 2], late: [1]}
    assert doctor.of_others([[low], [low]]) == {}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--comm", "tourch"], "unknown transport (--comm) 'tourch'; did you mean 'torch'? known: auto, mpi, torch"),
        (["--timeout", "0"], "--timeout is 0.0; it must be in (0, 1000000]"),
        (["--timeout", "soon"], "--timeout is 'soon'; it must be a number"),
        (["--devise", "cpu"], "unknown option '--devise'; did you mean '--device'?"),
        (["--device", "gpu"], "unknown device 'gpu'; known: auto, cpu, cuda, cuda:N"),
        (["--threads", "0"], "--threads is 0; it must be in [1, 256]"),
        (["--sums", "cpu"], "unknown --sums 'cpu'; known: auto, device, host"),
        (["--gpu", "--device", "cpu"], "--gpu checks accelerators, but --device is cpu; start it where there is one, "),
        (["now"], "unknown option 'now'; 'fedmpi doctor --help' lists all options"),
    ],
)
def test_a_wrong_argument_exits_with_2(words: list[str], said: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *words]) == 2
    seen = capfd.readouterr()
    assert seen.out == "" and seen.err.startswith(f"fedmpi: {said}") and seen.err.count("\n") == 1


def test_help_explains_levels_and_exit_codes(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor", "--help"])
    out = " ".join(capfd.readouterr().out.split())
    assert left.value.code == 0 and "ok, warn, FAIL, or --" in out and "Exit code: 0 if" in out and "--timeout" in out


# What is broken, and its fix


def test_without_mpi_only_who_needs_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI library for this test')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, lines = examined(capfd)
    assert (code, about("mpi", lines)[0]) == (0, "--")
    code, lines = examined(capfd, "--comm", "mpi")
    assert code == 1
    level, text, fix = about("mpi", lines)
    assert (level, text) == ("FAIL", "not usable: ImportError: no MPI library for this test") and "mpich" in fix


def test_a_run_folder_that_is_a_file_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    code, lines = examined(capfd, "--out", str(tmp_path / "taken" / "run"))
    bad = [line for line in lines if line["level"] == "FAIL"]
    assert code == 1 and [line["check"] for line in bad] == ["disk"] and "--out" in str(bad[0]["fix"])


def test_a_meeting_point_that_does_not_resolve_fails_at_once(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A run would retry until its timeout."""
    world = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "n0.invalid", "MASTER_PORT": "9"}
    for name, value in world.items():
        monkeypatch.setenv(name, value)
    code, lines = examined(capfd)
    level, text, fix = about("network", lines)
    assert (code, level) == (1, "FAIL") and "n0.invalid, which does not resolve" in text and "MASTER_ADDR" in fix
    assert "ranks" not in {line["check"] for line in lines}, "connecting was not tried"


def test_conflicting_launchers_fail(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "SLURM_PROCID": "0", "SLURM_NTASKS": "2"}.items():
        monkeypatch.setenv(name, value)
    code, lines = examined(capfd)
    assert code == 1 and about("launcher", lines)[0] == "FAIL" and "RANK=1" in about("launcher", lines)[1]


def test_names_that_other_nodes_cannot_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def found(place: Place, host: str) -> tuple[str, str]:
        monkeypatch.setattr(socket, "gethostname", lambda: host)
        (finding,) = doctor.network(place, DoctorOptions())
        return finding.level, finding.text

    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "9")
    assert found(ALONE, "localhost")[0] == found(PAIR, "localhost")[0] == "ok"
    level, text = found(APART, "localhost")
    assert level == "warn" and "which other nodes do not reach" in text
    assert found(ALONE, "this-node.invalid") == ("warn", "host name this-node.invalid does not resolve")


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "available_cores", lambda: 4)
    (finding,) = doctor.devices(PAIR, DoctorOptions(device="cpu"))
    assert finding.level == "ok" and "4 cores for 2 ranks of this node, 2 threads each" in finding.text
    (crowded,) = doctor.devices(Place("torchrun", 0, 8, 0, 8), DoctorOptions(device="cpu"))
    assert crowded.level == "warn" and "at most 4 ranks" in crowded.fix


def test_little_space_is_a_warning_with_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))

    def levels(place: Place) -> list[str]:
        return [finding.level for finding in doctor.disk(place, DoctorOptions()) if "free" in finding.text]

    assert levels(ALONE) == ["warn", "warn", "ok"], "a rank alone shares no memory"
    assert levels(PAIR) == ["warn"] * 3 and next(doctor.disk(PAIR, DoctorOptions())).fix


class Garbled(ThreadComm):
    """A rank that receives a wrong number."""

    def _broadcast(self, x: torch.Tensor, root: int) -> None:
        super()._broadcast(x, root)
        x.add_(self.rank == 1)


class Torn(ThreadComm):
    """A rank that receives a wrong bit in what does not begin at an aligned address."""

    def _start(self, send: Mapping[int, torch.Tensor], recv: Mapping[int, torch.Tensor]) -> Wait:
        wait = super()._start(send, recv)

        def finish() -> None:
            wait()
            for x in recv.values():
                if self.rank == 1 and x.dtype == torch.int8 and x.storage_offset() % 16:
                    x[0] ^= 1

        return finish


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(ThreadComm, []), (Garbled, ["broadcast"]), (Torn, ["exchange of int8, unaligned"])],
)
def test_wrong_results_are_found_by_the_rank_that_has_them(kind: type[ThreadComm], wrong: list[str]) -> None:
    def look(comm: Comm) -> list[str]:
        comm.__class__ = kind
        return doctor.wrong_verbs(comm)

    assert run_threads(3, look) == [[], wrong, []]


def test_every_rank_receives_the_text_of_every_rank() -> None:
    words = ["", "\u00e9t\u00e9", "a much longer text than the others"]
    assert run_threads(3, lambda comm: doctor.tell_all(comm, words[comm.rank])) == [words] * 3


# Under the real launchers

NEVER_COMES = """
import os, sys, time
if os.environ["PMI_RANK"] == "1":
    time.sleep(250)
from fedmpi import commands
from fedmpi.commands import doctor
doctor.GRACE = 2
sys.exit(commands.main(sys.argv[1:]))
"""


def launched(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.launchers(pytest.mark.timeout(300)(test))


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=rank_environment() | env, capture_output=True, text=True, timeout=120)


def start(command: list[str], **env: str) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=rank_environment() | env, stdout=pipe, stderr=pipe, text=True)


def by_hand(ranks: list[str]) -> list[subprocess.Popen[str]]:
    """Ranks of a world of two that nobody launches; rank 1 with another number of threads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, *MODULE, "--timeout", "60" if len(ranks) > 1 else "2"]
    threads = {"0": "1", "1": "2"}
    return [start([*command, "--threads", threads[rank]], **world, RANK=rank, LOCAL_RANK=rank) for rank in ranks]


@launched
def test_under_torchrun() -> None:
    done = run([str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", *MODULE, "--json"])
    assert done.returncode == 0, done.stderr
    lines = parsed(done.stdout)
    assert about("launcher", lines)[1] == "torchrun: rank 0 of 2, 2 on this node; transport torch"
    level, said, fix = about("torchrun", lines)
    assert level == "warn" and "unpickles what it finds there" in said and "fedmpi train --ranks" in fix
    ranks = [str(line["finding"]) for line in lines if line["check"] == "ranks"]
    assert ranks[0].startswith("2 ranks met over torch, and tried collectives on the host; a sum of 4 MB takes ")
    assert ranks[1] == "the ranks of a node share memory"


@launched
def test_under_mpiexec(mpiexec: list[str]) -> None:
    done = run([*mpiexec, "-n", "2", sys.executable, "-m", "mpi4py", *MODULE])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(" launcher ") == 1, "only rank 0 prints"
    assert "mpi: rank 0 of 2, 2 on this node; transport mpi" in done.stdout
    assert "2 ranks met over mpi, " in done.stdout and "the ranks of a node share memory" in done.stdout


@launched
def test_a_rank_that_differs_is_named_and_so_is_one_that_never_comes(mpiexec: list[str]) -> None:
    """Three launches side by side: by hand, rank 1 with other threads; by hand, without rank 1; and MPI without it,
    where its start waits in C and no thread of Python can run."""
    jobs = [*by_hand(["0", "1"]), *by_hand(["0"])]
    jobs.append(start([*mpiexec, "-n", "2", sys.executable, "-c", NEVER_COMES, "doctor", "--timeout", "2"]))
    try:
        said = [job.communicate(timeout=100) for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    assert [job.returncode for job in jobs] == [0, 0, 1, 1], said
    assert all("Traceback" not in out + err for out, err in said)
    first, second, lonely, over_mpi = (out for out, _ in said)
    assert "rank 1: threads 2, but rank 0 has 1" in first and second == ""
    assert "FAIL  ranks          rank 1 of 2 did not answer" in lonely and "fix: check that" in lonely
    assert over_mpi.splitlines()[-1] == "ok    connect        connecting 2 ranks, for at most 4 s"
    assert "ok    torch" in over_mpi and "Timeout" in said[-1][1], "stderr shows where it hangs"


@pytest.fixture(scope="module")
def cluster() -> Iterator[dict[str, str]]:
    """Variables of a running Slurm."""
    absent = slurm_box.missing()
    need("slurm", not absent, f"{', '.join(absent)} not installed (Debian: slurm-wlm, munge)")
    with slurm_box.slurm() as variables:
        yield variables


@launched
def test_under_srun_with_and_without_mpi(cluster: dict[str, str], mpiexec: list[str]) -> None:
    """Over gloo; over MPI; and over MPI without its process manager, where each rank is a world of one."""
    srun = ["srun", "--nodes=2", "--ntasks-per-node=1", "--time=3"]
    rank = [sys.executable, *MODULE]
    done = run([*srun, *rank, "--json"], **cluster)
    assert done.returncode == 0, done.stderr
    lines = parsed(done.stdout)
    assert about("launcher", lines)[1] == "srun: rank 0 of 2, 1 on this node; transport torch"
    assert about("mpi", lines)[0] == "ok"
    level, text, _ = about("slurm", lines)
    assert level == "ok" and " up: 2 " in text
    done = run([*srun, "--mpi=pmi2", *rank, "--comm", "mpi"], **cluster)
    assert done.returncode == 0 and "2 ranks met over mpi" in done.stdout, done.stderr
    done = run([*srun, "--mpi=none", *rank, "--comm", "mpi"], **cluster)
    assert done.returncode == 1
    assert "FAIL  ranks          srun started 2 ranks but MPI sees a world of 1, so each rank would" in done.stdout
    assert "fix: start with 'srun --mpi=pmi2' (MPICH)" in done.stdout


@launched
def test_a_controller_that_does_not_answer_is_a_warning(
    cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "nowhere.conf"))
    finding = next(doctor.slurm(ALONE, DoctorOptions()))
    assert finding.level == "warn" and "the controller does not answer" in finding.text and finding.fix


def test_the_extra_for_transformers_is_named_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    (found,) = doctor.hub(ALONE, doctor.DoctorOptions())
    assert found.level == doctor.OK and re.fullmatch(r"transformers [\d.]+, peft [\d.]+, datasets [\d.]+", found.text)
    find = doctor.importlib.util.find_spec
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None if name == "peft" else find(name))
    (found,) = doctor.hub(ALONE, doctor.DoctorOptions())
    assert found.level == doctor.ABSENT and found.text == "peft not installed" and "fedmpi[llm]" in found.fix

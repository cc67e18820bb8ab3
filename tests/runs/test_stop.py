"""Stopping in time: whichever rank gets the signal, all save and exit together, and the same command resumes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import BIN, rank_environment
from federation import arrays
from shell import CPU, metrics, sandbox, settings_of, without_seconds

import fedmpi
from fedmpi.comm import Comm
from fedmpi.comm.env import Place
from fedmpi.comm.threads import run_threads
from fedmpi.runs.build import prepare
from fedmpi.runs.config import Checkpoint
from fedmpi.runs.run import run
from fedmpi.runs.stop import ALL, KINDS, Stop, Stopped, in_words

ROUNDS = 150
RUN = "-m fedmpi train --data glyphs --model logistic --clients 24 --cohort 6 --local.steps 3 --algorithm scaffold"
RUN += " --mask gma"
RUN += f" --rounds {ROUNDS} --eval.every 50 --eval.samples 100 --threads 1 --log_to none --checkpoint.minutes 0"
ON_RANK = (b"LOCAL_RANK=", b"PMI_RANK=")


# Flags


def test_each_kind_of_signal_is_a_flag_of_its_own() -> None:
    stop = Stop(ALL)
    assert stop.flags == [0, 0, 0, 0]
    stop.notice(signal.SIGUSR2)
    stop.notice(signal.SIGUSR1)
    assert stop.flags == [0, 0, 1, 0]
    assert (
        in_words([2, 0, 1, 0]) == "SIGTERM and SIGUSR2" and in_words([0, 0, 0, 1]) == "time" and not in_words([0] * 4)
    )


def test_a_ctrl_c_that_comes_twice_within_a_second_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun passes it on to ranks that have it from the terminal already."""
    left: list[int] = []
    now = [100.0]
    monkeypatch.setattr("fedmpi.runs.stop.time.monotonic", lambda: now[0])
    monkeypatch.setattr("fedmpi.runs.stop.os._exit", left.append)
    stop = Stop(ALL)
    stop.notice(signal.SIGINT)
    now[0] += 0.9
    stop.notice(signal.SIGINT)
    assert stop.flags == [0, 1, 0, 0] and not left
    now[0] += 0.2
    stop.notice(signal.SIGINT)
    assert left == [130], "measured from the first one"


def test_the_next_round_must_fit_into_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("fedmpi.runs.stop.time.monotonic", lambda: now[0])
    stop = Stop(minutes=1)
    for seconds, flag in ((10, 0), (20, 0), (5, 0), (5, 0), (1, 1)):  # the longest took 20: 41 + 20 > 60
        now[0] += seconds
        stop.round_done()
        assert stop.flags[KINDS.index("time")] == flag
    early = Stop(minutes=1, began=now[0] - 59.5)
    now[0] += 1
    early.round_done()
    assert early.flags[3] == 1, "what came before the rounds counts"


def test_signals_are_caught_while_it_lasts_and_handlers_put_back() -> None:
    before = {number: signal.getsignal(number) for number in ALL}
    with Stop(ALL) as stop:
        for number in ALL:
            os.kill(os.getpid(), number)
        wait_until(lambda: stop.flags == [1, 1, 1, 0])
    assert {number: signal.getsignal(number) for number in ALL} == before
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "fedmpi-stop"]


def test_without_signals_and_away_from_the_main_thread_nothing_is_caught() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Stop():
        assert signal.getsignal(signal.SIGTERM) is before

    def elsewhere() -> None:
        with Stop(ALL):
            assert signal.getsignal(signal.SIGTERM) is before

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()


@pytest.mark.processes
def test_a_signal_to_a_forked_child_is_not_the_runs() -> None:
    """As to a process that reads a Dataset ahead."""
    with Stop(ALL) as stop:
        child = os.fork()
        if child == 0:
            for number in ALL:
                os.kill(os.getpid(), number)
            time.sleep(0.2)
            os._exit(0)
        os.waitpid(child, 0)
        os.kill(os.getpid(), signal.SIGUSR2)
        wait_until(lambda: stop.flags[2] == 1)
        assert stop.flags == [0, 0, 1, 0]


@pytest.mark.processes
def test_it_ends_while_a_forked_child_lives_on() -> None:
    """As one that waits for the next client's samples."""
    with Stop(ALL):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(0)
    assert os.waitpid(child, os.WNOHANG) == (0, 0)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def wait_until(ready: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


# Runs in this process


def test_one_ranks_time_is_up_and_all_stop_after_the_same_round(tmp_path: Path) -> None:
    """The ranks' clocks differ: what counts is the sum of the flags."""
    cfg = settings_of(tmp_path / "a", rounds=4, max_minutes=1e-6, checkpoint=Checkpoint(minutes=0))

    def work(comm: Comm) -> tuple[int, str, Any]:
        began = time.monotonic() + (0 if comm.rank == 1 else 1000)
        with pytest.raises(Stopped) as caught:
            run(prepare(cfg), comm, Place("test", comm.rank, 3, comm.rank, 3), CPU, {}, began=began)
        return caught.value.round, caught.value.why, caught.value.code

    with sandbox():
        for round in (1, 2):
            assert run_threads(3, work) == [(round, "time", 75)] * 3
            record = json.loads((tmp_path / "a" / "stopped.json").read_text())
            assert (record["round"], record["why"]) == (round, "time")
            assert (tmp_path / "a" / "checkpoints" / f"round-{round}").is_dir()


def test_a_flag_in_the_last_round_stops_nothing(tmp_path: Path) -> None:
    with sandbox():
        cfg = settings_of(tmp_path, rounds=1, max_minutes=1e-6)
        run_threads(2, lambda comm: run(prepare(cfg), comm, Place("test", comm.rank, 2, comm.rank, 2), CPU, {}))
    assert (tmp_path / "finished.json").exists() and not (tmp_path / "stopped.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2])
def test_training_from_python_raises_stopped_and_the_same_call_resumes(tmp_path: Path, number: signal.Signals) -> None:
    knobs: dict[str, Any] = {"split": "iid", "clients": 7, "cohort": 3, "threads": 1, "quiet": True, "rounds": 100}
    knobs |= {"algorithm": "scaffold", "local": {"batch": 4}, "eval": {"every": 50}}
    out, before = tmp_path / "a", {one: signal.getsignal(one) for one in ALL}

    def send() -> None:
        wait_until(lambda: (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text()) > 0)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    with pytest.raises(SystemExit) as caught:
        fedmpi.train("logistic", arrays(), out=out, **knobs)
    sender.join()
    assert isinstance(caught.value, Stopped) and caught.value.code == 75 and caught.value.why == number.name
    assert {one: signal.getsignal(one) for one in ALL} == before
    assert len(metrics(out)) == caught.value.round < 100
    fedmpi.train("logistic", arrays(), out=out, **knobs)
    fedmpi.train("logistic", arrays(), out=tmp_path / "b", **knobs)
    assert (out / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    assert without_seconds(metrics(out)) == without_seconds(metrics(tmp_path / "b"))


# Real processes


@dataclass
class Job:
    """A launcher with its ranks; what they say goes to a file."""

    command: list[str]
    said: Path

    def __enter__(self) -> Job:
        with open(self.said, "w") as file:
            self.process = subprocess.Popen(
                self.command, env=rank_environment(), stdout=file, stderr=file, start_new_session=True
            )
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [*self.ranks(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def ranks(self) -> list[int]:
        """The process ids of the ranks, in their order."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                with contextlib.suppress(OSError):
                    names = (entry / "environ").read_bytes().split(b"\0")
                    numbers = [name.split(b"=")[1] for name in names if name.startswith(ON_RANK)]
                    if numbers and str(self.out).encode() in (entry / "cmdline").read_bytes():
                        found[int(numbers[0])] = int(entry.name)
        return [pid for _, pid in sorted(found.items())]

    @property
    def out(self) -> Path:
        return Path(self.command[self.command.index("--out") + 1])

    def rounds(self) -> int:
        with contextlib.suppress(OSError):
            return (self.out / "metrics.jsonl").read_bytes().count(b"\n")
        return 0

    def starts(self) -> int:
        with contextlib.suppress(OSError):
            return (self.out / "starts.jsonl").read_bytes().count(b"\n")
        return 0

    def wait_for_rounds(self, starts: int, done: int) -> None:
        """Wait until this start has done a round."""
        wait_until(lambda: self.process.poll() is not None or (self.starts() > starts and self.rounds() > done))
        assert self.process.poll() is None, self.said.read_text()


def torchrun(ranks: int) -> list[str]:
    agent = [str(BIN / "torchrun"), "--standalone", f"--nproc-per-node={ranks}", "--max-restarts=1"]
    return [*agent, "--monitor-interval=0.1"]


def to_rank(which: int, number: signal.Signals) -> Callable[[Job], None]:
    return lambda job: os.kill(job.ranks()[which], number)


def to_launcher(number: signal.Signals) -> Callable[[Job], None]:
    return lambda job: os.kill(job.process.pid, number)


def at_a_terminal(job: Job) -> None:
    """Ctrl-C: every process of the terminal gets it, and the launcher passes it on."""
    ranks = job.ranks()
    os.killpg(job.process.pid, signal.SIGINT)
    for pid in ranks:
        if os.getpgid(pid) != job.process.pid:
            os.kill(pid, signal.SIGINT)


@pytest.fixture
def ways(mpiexec: list[str]) -> Iterator[list[tuple[str, list[str], Callable[[Job], None], str, set[int]]]]:
    """Ways to stop: name, launcher, who gets the signal, the reason that is recorded, and the launcher's exit codes."""
    mpi = [*mpiexec, "-n", "2", sys.executable, "-m", "mpi4py"]
    alone = [sys.executable]
    yield [
        ("alone, Ctrl-C", alone, to_launcher(signal.SIGINT), "SIGINT", {75}),
        ("alone, SIGTERM", alone, to_launcher(signal.SIGTERM), "SIGTERM", {75}),
        ("torchrun, a rank", torchrun(4), to_rank(1, signal.SIGUSR2), "SIGUSR2", {1}),
        ("torchrun, its agent", torchrun(2), to_launcher(signal.SIGTERM), "SIGTERM", {1, -15, 143}),
        ("torchrun at a terminal", torchrun(3), at_a_terminal, "SIGINT", {1, -2, 130}),
        ("mpiexec, a rank", mpi, to_rank(1, signal.SIGTERM), "SIGTERM", {75}),
        ("mpiexec, itself", mpi, to_launcher(signal.SIGINT), "SIGINT", {75}),
    ]


@pytest.mark.launchers
@pytest.mark.timeout(600)
def test_every_way_to_stop_saves_and_the_run_resumes_to_the_right_bits(tmp_path: Path, ways: list[Any]) -> None:
    """One run that is stopped in seven ways, and finished by the eighth start."""
    out, done = tmp_path / "restarted", 0
    for count, (name, launcher, stop, why, codes) in enumerate(ways):
        with Job([*launcher, *RUN.split(), "--out", str(out)], tmp_path / f"{count}.txt") as job:
            job.wait_for_rounds(count, done)
            stop(job)
            code = job.process.wait(60)
            said = job.said.read_text()
        assert code in codes, (name, code, said)
        record = json.loads((out / "stopped.json").read_text())
        assert record["why"] == why and done < record["round"] < ROUNDS, (name, record)
        done = record["round"]
        assert (out / "checkpoints" / f"round-{done}" / "manifest.json").exists(), name
        assert f"fedmpi: stopped after round {done} ({why}); the same command resumes from there" in said, (name, said)
        assert [json.loads(line)["round"] for line in (out / "starts.jsonl").read_text().splitlines()][-1] < done
        assert job.starts() == count + 1, f"{name}: nobody else restarted it"
        assert "fedmpi: rank" not in said, f"{name}: nobody had to complain"
    command = [sys.executable, *RUN.split(), "--out"]
    for folder in (out, tmp_path / "whole"):
        subprocess.run([*command, str(folder)], env=rank_environment(), check=True, capture_output=True, timeout=100)
    digests = {
        hashlib.sha256((one / "model.safetensors").read_bytes()).hexdigest() for one in (out, tmp_path / "whole")
    }
    assert len(digests) == 1
    results = [
        [{k: v for k, v in r.items() if not k.startswith("bytes_")} for r in without_seconds(metrics(one))]
        for one in (out, tmp_path / "whole")
    ]
    assert results[0] == results[1] and not (out / "stopped.json").exists()


@pytest.mark.launchers
def test_a_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    """In the middle of a round that would take minutes."""
    slow = RUN.replace("--local.steps 3", "--local.steps 1000000").split()
    with Job([sys.executable, *slow, "--out", str(tmp_path / "run")], tmp_path / "said.txt") as job:
        wait_until(lambda: "1 thread each" in job.said.read_text())
        job.process.send_signal(signal.SIGINT)
        wait_until(lambda: "SIGINT: stopping after this round; Ctrl-C again ends it at once" in job.said.read_text())
        time.sleep(1.2)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(30) == 130
    assert job.said.read_text().endswith("fedmpi: interrupted\n") and "Traceback" not in job.said.read_text()

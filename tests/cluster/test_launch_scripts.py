"""launch/torchrun.sh and launch/mpirun.sh: a dead rank is started again, a signal stops the run in good order, and the
caller gets the code of the ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from conftest import BIN, REPO, need, rank_environment
from long import LONG, digest, lines, train_alone, wait_for
from matrix import SMALL

pytestmark = [pytest.mark.launchers, pytest.mark.timeout(600)]

SCRIPTS = ("torchrun", "mpirun")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of the model that one rank trains."""
    return train_alone(tmp_path_factory.mktemp("alone") / "run")


@contextmanager
def started(script: str, *arguments: str, log: Path) -> Iterator[subprocess.Popen[str]]:
    """A script of launch/ that writes to a log; ended with its ranks where it has not ended by itself."""
    if script == "mpirun":
        need("mpi", (BIN / "mpiexec").exists(), "no MPI next to this Python: pip install mpich")
    command = ["bash", str(REPO / "launch" / f"{script}.sh"), *arguments]
    with open(log, "a") as file:
        process = subprocess.Popen(
            command, env=rank_environment(), stdout=file, stderr=file, text=True, start_new_session=True
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            for sent in (signal.SIGINT, signal.SIGINT):  # twice: at once
                process.send_signal(sent)
                time.sleep(1.5)
        end_session(process.pid)
        process.wait(30)


def end_session(leader: int) -> None:
    """Kill what is left of the processes of a session: ranks would outlive a script that was killed."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            if int(stat.read_text().rpartition(")")[2].split()[3]) == leader:
                os.kill(int(stat.parent.name), signal.SIGKILL)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_dead_rank_is_started_again_and_a_signal_stops_in_good_order(script: str, alone: str, tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    command = (script, "2", *LONG, "--out", str(out))

    def lives() -> int:
        return len(lines(out / "starts.jsonl"))

    with started(*command, log=log) as process:
        wait_for((out / "checkpoints" / "round-20").exists, on_timeout=log.read_text)
        os.kill(json.loads((out / "lock").read_text())["pid"], signal.SIGKILL)
        wait_for(lambda: lives() == 2 or process.poll() is not None, on_timeout=log.read_text)
        rounds = len(lines(out / "metrics.jsonl"))
        wait_for(
            lambda: len(lines(out / "metrics.jsonl")) > rounds or process.poll() is not None, on_timeout=log.read_text
        )
        process.send_signal(signal.SIGUSR2)
        assert process.wait(120) == 75, log.read_text()
    stopped = json.loads((out / "stopped.json").read_text())["round"]
    assert not (out / "finished.json").exists() and f"stopped after round {stopped} (SIG" in log.read_text()

    with started(*command, log=log) as process:
        assert process.wait(120) == 0, log.read_text()
    starts = [start["round"] for start in lines(out / "starts.jsonl")]
    assert len(starts) == 3 and 0 == starts[0] < 20 <= starts[1] < starts[2] == stopped < 300
    assert digest(out) == alone


def test_torchrun_prints_a_mistake_once_and_does_not_retry(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with started("torchrun", *SMALL, "--tau", "3", "--out", str(tmp_path / "run"), log=log) as process:
        assert process.wait(100) == 2, log.read_text()
    assert log.read_text().count("--tau is 3.0; it must be in [0, 1]") == 1
    assert not (tmp_path / "run").exists()


def test_a_second_interrupt_ends_ranks_in_the_middle_of_a_round(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "log"
    endless = [*LONG, "--local.steps", "1000000"]
    with started("torchrun", *endless, "--out", str(out), log=log) as process:
        wait_for(lambda: lines(out / "starts.jsonl"), on_timeout=log.read_text)
        rank = json.loads((out / "lock").read_text())["pid"]
        time.sleep(1)  # the first client's endless round has begun
        process.send_signal(signal.SIGINT)
        wait_for(lambda: "Ctrl-C again ends it at once" in log.read_text(), on_timeout=log.read_text)
        time.sleep(1.5)  # within a second it would be the same press
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, log.read_text()
    assert not Path(f"/proc/{rank}").exists() and not (out / "stopped.json").exists()


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("arguments", [["--max-restarts", "some"], ["2", "--max-restarts"], ["--max-restarts=-1"]])
def test_a_wrong_number_of_restarts_is_a_one_line_error(script: str, arguments: list[str], tmp_path: Path) -> None:
    with started(script, *arguments, log=tmp_path / "log") as process:
        assert process.wait(20) == 2
    (said,) = (tmp_path / "log").read_text().splitlines()
    assert "--max-restarts is '" in said and "it must be a whole number of at least 0" in said


@pytest.mark.parametrize("script", [*SCRIPTS, "submit"])
def test_help_is_the_text_at_the_top_or_the_commands_own(script: str) -> None:
    command = ["bash", str(REPO / "launch" / f"{script}.sh"), "--help"]
    done = subprocess.run(command, env=rank_environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and not done.stderr
    assert ("--ranks_per_node" if script == "submit" else "--max-restarts") in done.stdout


def test_set_up_and_quickstart_say_what_they_take() -> None:
    def said(*words: str) -> tuple[int, str]:
        done = subprocess.run(["bash", *words], cwd=REPO, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    code, text = said("launch/setup.sh", "--help")
    assert code == 0 and "run: what running needs" in text
    assert said("launch/setup.sh", "all") == (2, "setup: unknown extra 'all'; known: dev, run, test\n")
    assert said("launch/quickstart.sh", "--help")[0] == 0

"""Sweeps for real: processes on this machine, signalled and resumed; what is not run twice, and what is refused."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import need
from slurm_box import missing, slurm

from fedmpi.cluster.status import newest_checkpoint
from fedmpi.cluster.submit import SubmitOptions
from fedmpi.comm.env import Place
from fedmpi.commands import main
from fedmpi.errors import UserError
from fedmpi.experiments.sweep.command import check, parse
from fedmpi.experiments.sweep.overview import Row, Screen, lines_of, minutes_left, summary, table
from fedmpi.experiments.sweep.plan import SweepPlan, describe
from fedmpi.experiments.sweep.slurm import with_cores
from fedmpi.runs import folder

TINY: dict[str, Any] = {
    "base": {
        "data": "glyphs",
        "model": "logistic",
        "clients": 6,
        "cohort": 3,
        "rounds": 3,
        "log": "none",
        "local": {"steps": 5},
        "eval": {"samples": 100},
        "checkpoint": {"every": 1, "minutes": 0},
    },
    "grid": {"mask": ["mean", "gma"]},
    "seeds": 2,
}
NAMES = ["mean_s0", "gma_s0", "mean_s1", "gma_s1"]


def write(tmp_path: Path, **changes: Any) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(TINY | changes, sort_keys=False))
    return path


def base(**changes: Any) -> dict[str, Any]:
    return TINY["base"] | changes


def start(*arguments: object, **environ: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedmpi", "sweep", *map(str, arguments)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=os.environ | environ)


def fedmpi(*arguments: object, **environ: str) -> tuple[int, str, str]:
    """Run any command in a process of its own."""
    command = [sys.executable, "-m", "fedmpi", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environ, timeout=150)
    return done.returncode, done.stdout, done.stderr


def sweep(*arguments: object, **environ: str) -> tuple[int, str, str]:
    with start(*arguments, **environ) as process:
        try:
            out, err = process.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            process.terminate()  # and with it the runs
            raise
    return process.returncode, out, err


def wait_for(true: Callable[[], bool], seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)


def sha(run: Path) -> str:
    return str(json.loads((run / "finished.json").read_text())["model_sha256"])


def starts(run: Path) -> int:
    return len((run / "starts.jsonl").read_text().splitlines())


def alone(out: Path, *more: str) -> str:
    """Return the SHA-256 of the model of one of the runs, trained by hand."""
    knobs = "--data glyphs --model logistic --clients 6 --cohort 3 --rounds 3 --local.steps 5 --eval.samples 100"
    assert main(["train", *knobs.split(), "--threads", "1", "--log_to", "none", *more, "--out", str(out)]) == 0
    return sha(out)


@pytest.mark.processes
def test_a_sweep_runs_what_is_not_done(tmp_path: Path) -> None:
    file, home = write(tmp_path), tmp_path / "out"
    code, out, err = sweep(file, "--out", home, "--jobs", 2)
    assert (code, err) == (0, ""), err
    assert "tiny: 4 runs in" in out and out.count(" finished: 3 rounds") == 4 and "fedmpi report" in out
    record = json.loads((home / "sweep.json").read_text())
    assert list(record["runs"]) == NAMES and record["axes"] == {"mask": ["mean", "gma"]}
    assert record["runs"]["gma_s1"] == {"mask": "gma", "seed": "1"}
    assert oct(home.stat().st_mode & 0o777) == "0o700"
    assert sha(home / "gma_s1") == alone(tmp_path / "alone", "--mask", "gma", "--seed", "1")
    (home / "mean_s1" / "finished.json").unlink()  # as if it had been killed at its very end
    code, out, _ = sweep(file, "--out", home)
    assert code == 0 and "3 done, 1 at a time" in out and out.count(" started") == 1
    assert [starts(home / name) for name in NAMES] == [1, 1, 2, 1]


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_on_a_signal_the_runs_save_and_the_same_command_resumes(tmp_path: Path, number: signal.Signals) -> None:
    knobs = base(rounds=60, local={"steps": 100}, checkpoint={"every": 2, "minutes": 0, "keep": 200})
    file, home = write(tmp_path, base=knobs, seeds=1, grid={"mask": ["gma"]}), tmp_path / "out"
    with start(file, "--out", home) as process:
        try:
            wait_for(lambda: (home / "gma_s0" / "checkpoints" / "round-2").exists())
        finally:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "the same command resumes it" in err
    assert "gma_s0 stopped after round" in out and folder.holder(home / "gma_s0") is None
    code, out, _ = sweep(file, "--out", home)
    assert code == 0 and "gma_s0 finished: 60 rounds" in out
    assert starts(home / "gma_s0") == 2
    assert sha(home / "gma_s0") == alone(tmp_path / "alone", "--mask", "gma", "--rounds", "60", "--local.steps", "100")


@pytest.mark.processes
def test_a_run_that_is_interrupted_while_it_starts_has_not_failed(tmp_path: Path) -> None:
    file, home = write(tmp_path, seeds=1, grid={"mask": ["gma"]}), tmp_path / "out"
    with start(file, "--out", home) as process:
        assert process.stdout is not None
        try:
            [process.stdout.readline() for _ in range(2)]  # it has started, and not imported torch yet
        finally:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 75 and "gma_s0 interrupted during its start" in out and "failed" not in out, (out, err)
    assert "failed" not in fedmpi("status", home)[1]
    code, out, _ = sweep(file, "--out", home)
    assert code == 0 and "gma_s0 finished: 3 rounds" in out
    assert sorted(one.name for one in home.iterdir()) == ["configs", "gma_s0", "logs", "sweep.json"]


@pytest.mark.processes
def test_a_sweep_is_looked_at_followed_and_cancelled_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    knobs = base(rounds=100_000, local={"steps": 100}, checkpoint={"every": 2, "minutes": 0, "keep": 2})
    home = Path("runs") / "tiny"
    with start(write(tmp_path, base=knobs)) as process:
        try:
            wait_for(lambda: (newest_checkpoint(home / "mean_s0") or 0) >= 4)
            assert main(["status", str(home)]) == 0
            shown = capsys.readouterr().out
            assert "mean_s0  fedavg + mean     running " in shown and "gma_s1   fedavg + gma 0.4  waiting " in shown
            assert "4 runs: 1 running, 3 waiting; about" in shown and shown.endswith("; 1 thread per rank\n")
            assert main(["status", str(home), "--json"]) == 0
            states = {Path(one["run"]).name: one["state"] for one in json.loads(capsys.readouterr().out)}
            assert states == dict(zip(NAMES, ["running", *["waiting"] * 3], strict=True))
            follow = [sys.executable, "-m", "fedmpi", "logs", "-f", "-n", "2", str(home / "mean_s0")]
            with subprocess.Popen(follow, stdout=-1, stderr=-1, text=True) as following:
                assert following.stdout is not None and following.stdout.readline().startswith("round ")
                assert main(["cancel", str(home)]) == 0
                out, err = following.communicate(timeout=60)
        except BaseException:
            process.send_signal(signal.SIGTERM)
            raise
        assert process.wait(60) == 75
    assert "round" in out and "mean_s0 is stopped (by SIGTERM after round" in err and following.returncode == 0
    shown = capsys.readouterr().out
    assert f"the sweep's process {process.pid} ended" in shown and "mean_s0: stopped; the checkpoint of round" in shown
    assert "1 stopped, 3 waiting; the same 'fedmpi sweep' resumes it" in shown
    assert main(["cancel", str(home)]) == 2 and "has no running or queued runs" in capsys.readouterr().err
    assert main(["status"]) == 0
    assert capsys.readouterr().out.startswith("runs/tiny  sweep, 4 runs: 1 stopped, 3 waiting; about ")


def test_threads_are_part_of_the_sweep_wherever_it_runs(tmp_path: Path) -> None:
    home = tmp_path / "out"

    def plan(*options: str, **changes: Any) -> SweepPlan:
        return check(parse([str(write(tmp_path, **changes)), "--out", str(home), "--dry_run", *options]))

    def threads(*options: str, **changes: Any) -> set[int | None]:
        return {cfg.threads for cfg in plan(*options, **changes).configs.values()}

    assert threads() == threads("--executor", "slurm") == {1}
    assert threads("--executor", "slurm", base=base(threads=2)) == threads("--set", "threads=2") == {2}
    describe(plan("--set", "threads=2"))
    assert threads() == threads("--executor", "slurm") == {2}, "as the sweep has begun"
    with pytest.raises(UserError, match="holds a sweep with 2 threads per rank, and threads is 3 now"):
        threads("--set", "threads=3")
    (home / "mean_s0").mkdir()
    older = dataclasses.asdict(plan().configs["mean_s0"]) | {"threads": 4}  # of a version that left it to the machine
    (home / "mean_s0" / "config.yaml").write_text(yaml.safe_dump(older))
    assert threads() == {2, 4}
    options = with_cores(SubmitOptions(), plan(), Screen(io.StringIO()))
    assert options.cpus_per_rank == 4
    with pytest.raises(UserError, match="--cpus_per_rank is 3, but a rank of this sweep has 4 threads"):
        with_cores(SubmitOptions(cpus_per_rank=3), plan(), Screen(io.StringIO()))


@pytest.mark.processes
def test_a_run_that_fails_is_named_and_tried_again(tmp_path: Path) -> None:
    (tmp_path / "faulty.py").write_text("def data(root):\n    raise OSError('the disk is on fire')\n")
    bad = {"algorithm": {"good": {}, "bad": {"data": "faulty:data"}}}
    file, home = write(tmp_path, variants=bad, grid={}, seeds=1), tmp_path / "out"
    for _ in range(2):  # the first time, and again
        code, out, err = sweep(file, "--out", home, PYTHONPATH=str(tmp_path))
        assert code == 1 and f"1 of 2 runs are not done: bad_s0; see {home / 'logs' / 'bad_s0.log'};" in err
        assert "bad_s0 failed with exit code 2: fedmpi: data set 'faulty:data'" in out and "the disk is on fire" in out
        assert (home / "good_s0" / "finished.json").exists()
    assert starts(home / "good_s0") == 1
    shown = sweep(file, "--out", home, "--status", PYTHONPATH=str(tmp_path))[1]
    assert re.search(r"bad_s0   fedavg \+ \w+( 0.4)?  +failed", shown) and "the disk is on fire" in shown


@pytest.mark.processes
def test_two_sweeps_that_begin_together_divide_the_work(tmp_path: Path) -> None:
    file, home = write(tmp_path, base=base(local={"steps": 60})), tmp_path / "out"
    with start(file, "--out", home) as one, start(file, "--out", home) as other:
        said = [process.communicate(timeout=200) for process in (one, other)]
    assert (one.returncode, other.returncode) == (0, 0), said
    assert not any("failed" in out or err for out, err in said), said
    assert [starts(home / name) for name in NAMES] == [1, 1, 1, 1]


@pytest.mark.processes
def test_a_sweep_continues_when_its_output_is_closed(tmp_path: Path) -> None:
    file, home = write(tmp_path), tmp_path / "out"
    with start(file, "--out", home) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(200) == 0 and process.stderr.read() == ""
    assert all((home / name / "finished.json").exists() for name in NAMES)


@pytest.mark.processes
def test_a_search_stops_bad_runs_and_picks_from_the_rest(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        base=base(rounds=20, mask="mean"),
        grid={"local.lr": [0.001, 0.002, 5.0]},
        where=[{"if": {"local.lr": 5.0}, "set": {"rounds": 100_000}}],  # it would go on for an hour
        seeds=1,
        choose={"over": ["local.lr"], "by": "train_loss", "last": 5},
        stop={"after": 10, "every": 5},
    )
    home = tmp_path / "out"
    code, out, err = sweep(file, "--out", home)
    assert (code, err) == (0, ""), err
    assert "lr5.0_s0 given up after round" in out and "2 of 3 finished" in out
    chosen = json.loads((home / "chosen.json").read_text())["cells"][0]
    values = {tried["labels"]["local.lr"]: tried["value"] for tried in chosen["tried"]}
    assert values["5.0"] is None
    assert chosen["best"] == {"local.lr": min(("0.001", "0.002"), key=lambda label: values[label])}
    assert "given up" in sweep(file, "--out", home, "--status")[1]
    code, out, _ = sweep(file, "--out", home)
    assert code == 0 and " started" not in out  # not run again


@pytest.mark.processes
def test_a_run_of_somebody_else_is_waited_for(tmp_path: Path) -> None:
    file, home = write(tmp_path, seeds=1, grid={"mask": ["gma"]}), tmp_path / "out"
    run = home / "gma_s0"
    run.mkdir(parents=True)
    (home / "sweep.json").write_text('{"runs": {}, "axes": {}}')
    with folder.held(run, Place("alone", 0, 1, 0, 1), {}, 10):
        process = start(file, "--out", home)
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
    with process:
        out, _ = process.communicate(timeout=120)
    assert f"is run by process {os.getpid()}" in lines[1]
    assert process.returncode == 0 and "gma_s0 finished" in out


@pytest.mark.launchers
def test_runs_of_several_ranks_have_the_same_bits(tmp_path: Path) -> None:
    file, home = write(tmp_path, seeds=1, grid={"mask": ["gma"]}), tmp_path / "out"
    code, _, err = sweep(file, "--out", home, "--ranks_per_node", 2)
    assert code == 0, err
    assert json.loads((home / "gma_s0" / "starts.jsonl").read_text())["ranks"] == 2
    assert sha(home / "gma_s0") == alone(tmp_path / "alone", "--mask", "gma")


@pytest.mark.launchers
def test_runs_of_several_ranks_stop_in_good_order(tmp_path: Path) -> None:
    knobs = base(rounds=600, local={"steps": 100}, checkpoint={"every": 2, "minutes": 0})
    file, home = write(tmp_path, base=knobs, seeds=1, grid={"mask": ["gma"]}), tmp_path / "out"
    with start(file, "--out", home, "--ranks_per_node", 2) as process:
        try:
            wait_for(lambda: (home / "gma_s0" / "checkpoints" / "round-2").exists())
        finally:
            process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=100)
    assert process.returncode == 75, (out, err)
    log = (home / "logs" / "gma_s0.log").read_text()
    assert "gma_s0 stopped after round" in out and "death signal" not in log and "stopped after round" in log


@pytest.mark.launchers
def test_on_slurm_a_sweep_is_one_job_array(tmp_path: Path) -> None:
    need("slurm", not missing(), f"{missing()} not found; apt-get install slurm-wlm munge")
    file, home = write(tmp_path), tmp_path / "out"
    with slurm(nodes=2) as variables:
        code, out, err = sweep(file, "--out", home, "--executor", "slurm", "--jobs", 2, "--watch", **variables)
        assert code == 0, err
        jobs = {json.loads((home / name / "job.json").read_text())["job"] for name in NAMES}
        assert len({job.partition("_")[0] for job in jobs}) == 1 and len(jobs) == 4
        assert "4 submitted as job array" in out and "4 runs: 4 finished" in out
        code, out, err = sweep(file, "--out", home, "--executor", "slurm", **variables)
        assert code == 0 and "4 done" in out and "submitted" not in out
        long, options = tmp_path / "long", ["--set", "rounds=100000", "--executor", "slurm", "--jobs", "1"]
        assert sweep(file, "--out", long, *options, **variables)[0] == 0
        wait_for(lambda: folder.holder(long / NAMES[0]) is not None)
        out = fedmpi("status", long, **variables)[1]
        assert "gma_s1   fedavg + gma 0.4  queued" in out and "1 running, 3 queued" in out
        code, out, err = fedmpi("cancel", long, **variables)
        assert code == 0 and len(re.findall(r"Slurm job \d+_\d cancelled; ", out)) == 4, err
        assert "4 cancelled; the same 'fedmpi sweep' resumes it" in out
        code, _, err = fedmpi("cancel", long, **variables)
        assert code == 2 and "has no running or queued runs: 4 cancelled" in err
    assert sha(home / "gma_s1") == alone(tmp_path / "alone", "--mask", "gma", "--seed", "1"), "with one thread, as here"


def test_nothing_is_started_where_something_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "out"

    def says(*arguments: object) -> str:
        assert main(["sweep", *map(str, arguments)]) == 2
        return capsys.readouterr().err

    assert "given no file" in says()
    assert "neither a file nor a recipe" in says(tmp_path / "nothing.yaml")
    assert "run 'gam_s0': unknown mask 'gam'" in says(write(tmp_path, grid={"mask": ["mean", "gam"]}), "--out", home)
    assert "run 'mean_s0': --rounds is -1" in says(write(tmp_path, base=base(rounds=-1)), "--out", home)
    file = write(tmp_path)
    assert "must be different" in says(file, "--seeds", "1", "1", "--out", home)
    assert "--jobs is 0" in says(file, "--jobs", "0", "--out", home)
    assert "unknown --executor 'slrum'" in says(file, "--executor", "slrum", "--out", home)
    assert "--partition cannot be used" in says(file, "--partition", "x", "--out", home)
    assert "--retries and --watch cannot be used" in says(file, "--watch", "--retries", "1", "--out", home)
    assert "run 'mean_s0': --comm is mpi" in says(file, "--set", "comm=mpi", "--out", home)
    assert "--rounds is 0" in says(file, "--set", "rounds=0", "--set", "clients=7", "--out", home)
    lost = "run 'gma_s1': data set 'shakespeare' is not under"
    assert lost in says(file, "--set", f"data_root={tmp_path}", "data=shakespeare", "model=gru", "--out", home)
    assert not home.exists()
    home.mkdir()
    (home / "thesis.tex").touch()
    assert "no sweep" in says(file, "--out", home)
    assert [one.name for one in home.iterdir()] == ["thesis.tex"]
    (home / "thesis.tex").rename(home / ".sweep.json-of-one-that-was-killed")
    assert main(["sweep", str(file), "--out", str(home), "--dry_run"]) == 0
    (home / "sweep.json").write_text('{"runs": {}, "axes": {"tau": ["0.1"]}}')
    assert "holds a sweep over tau, but 'tiny' is over mask" in says(file, "--out", home)


def test_a_run_with_other_knobs_is_not_taken_for_this_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = tmp_path / "out"
    home.mkdir()
    (home / "sweep.json").write_text("{}")
    alone(home / "mean_s0", "--mask", "mean", "--rounds", "1")
    assert main(["sweep", str(write(tmp_path)), "--out", str(home)]) == 2
    assert "rounds was 1 and is 3" in capsys.readouterr().err
    knobs = base(rounds=1, local={"steps": None})
    assert main(["sweep", str(write(tmp_path, base=knobs)), "--out", str(home)]) == 2
    assert "local.steps was 5 and is null" in capsys.readouterr().err
    assert main(["sweep", str(write(tmp_path)), "--out", str(home), "--set", "rounds=1", "--dry_run"]) == 0
    shown = capsys.readouterr().out
    assert "gma_s1  fedavg + gma 0.4, seed 1" in shown and "4 runs in" in shown
    assert f"{home}, 1 thread per rank; nothing was started" in shown


def test_an_overview_in_words() -> None:
    rows = [
        Row("a", "finished", round=10, rounds=10, metric="accuracy", value=0.5, minutes=4.0),
        Row("b", "running", round=5, rounds=10, metric="accuracy", value=0.25, minutes_left=1.0, minutes=2.0),
        Row("c", "waiting"),
    ]
    assert minutes_left(rows, 1) == 1 + 3  # what is left of b, and the mean of 4 and 2
    assert minutes_left(rows, 4) == 3  # the longest of them
    assert minutes_left(rows[2:], 1) is None
    assert summary(rows, 1) == "3 runs: 1 finished, 1 running, 1 waiting; about 4 min left"
    assert lines_of(rows)[1] == "b  running   [##########..........] 5/10  accuracy 0.2500  1 min left"
    labelled = Row("c", "waiting", label="fedavg + gma", threads=2)
    assert table([rows[0], labelled], 1).splitlines()[1].startswith("c  fedavg + gma  waiting ")
    assert summary([labelled], 1) == "1 runs: 1 waiting; 2 threads per rank"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_is_drawn_over_and_a_file_is_not() -> None:
    rows = [Row("b", "running", round=1, rounds=2), Row("c", "waiting")]
    terminal, file = Terminal(), io.StringIO()
    for out in (terminal, file):
        screen = Screen(out)
        screen.draw(rows, 1)
        screen.draw(rows, 1)
        screen.say("done")
    assert file.getvalue() == "done\n"
    assert terminal.getvalue().count("\x1b[2F\x1b[J") == 2 and terminal.getvalue().endswith("\x1b[Jdone\n")
    assert "2 runs: 1 running, 1 waiting" in terminal.getvalue()

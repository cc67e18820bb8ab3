"""`fedmpi submit`: what it refuses and what it hands over; no Slurm needed."""

from __future__ import annotations

import fcntl
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from run_folders import save

from fedmpi.cluster import arrays, submit
from fedmpi.comm.env import Place
from fedmpi.commands import main
from fedmpi.runs.build import prepare
from fedmpi.runs.checkpoint.format import sealed
from fedmpi.runs.options import parse

TINY = ["--data", "glyphs", "--clients", "4", "--cohort", "2", "--rounds", "1"]
LOCAL = ["--executor", "local"]


pytestmark = pytest.mark.usefixtures("no_launch")


@pytest.mark.parametrize(
    ("options", "train", "said"),
    [
        ([], None, "submit was given nothing to run; write it after the options: fedmpi submit ... -- train ..."),
        ([], ["compare"], "submit was given 'compare' to run"),
        (["--nodes", "0"], ["train"], "--nodes is 0; it must be at least 1"),
        (["--nodez", "1"], ["train"], "unknown option '--nodez'; did you mean '--nodes'?"),
        (["--executor", "slrm"], ["train"], "unknown --executor 'slrm'; did you mean 'slurm'?"),
        (["--mpi", "pmi3"], ["train"], "unknown --mpi 'pmi3'; did you mean 'pmix'? known: none, pmi2, pmix"),
        (["--partition", "a\nb"], ["train"], "--partition is 'a\\nb'; it must be printable text on one line"),
        ([*LOCAL, "--nodes", "2"], ["train"], "--nodes is 2 but --executor local is this machine only"),
        ([*LOCAL, "--time", "5"], ["train"], "--time cannot be used with --executor local"),
        (["--time", "1", "--signal_seconds", "50"], ["train"], "it must be at most half of that"),
        ([*LOCAL], ["train", "--tau", "2"], "--tau is 2.0; it must be in [0, 1]"),
        ([*LOCAL], ["train", "--algorithm", "fedadm"], "unknown algorithm 'fedadm'; did you mean 'fedadam'?"),
        ([*LOCAL], ["train", "--comm", "mpi"], "--comm is mpi but local jobs start no MPI ranks by themselves"),
        ([*LOCAL], ["train", "--ranks", "2"], "--ranks is 2 but a job starts its own ranks; use 'submit"),
        ([*LOCAL, "--mpi", "pmi2"], ["train"], "--mpi cannot be used with --executor local"),
        ([*LOCAL], ["train", "--out", "runs/50%j"], "has a character with a special meaning for Slurm"),
    ],
)
def test_a_wrong_submission_is_a_one_line_error_and_leaves_nothing(
    options: list[str],
    train: list[str] | None,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    after = [] if train is None else ["--", *train]
    assert main(["submit", *options, *after]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and err.startswith("fedmpi: ")
    assert not list(tmp_path.iterdir())


def test_submitting_needs_sbatch_or_says_what_else_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", "--", "train", *TINY, "--out", str(tmp_path / "run")]) == 2
    assert "sbatch and srun were not found" in capsys.readouterr().err and not (tmp_path / "run").exists()


def test_submitting_to_slurm_needs_submitit_and_nothing_else_does(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setattr(submit.shutil, "which", lambda name: name)  # sbatch and srun
    assert main(["submit", "--", "train", *TINY, "--out", str(tmp_path / "new")]) == 2
    assert "pip install submitit" in capsys.readouterr().err and not (tmp_path / "new").exists()
    assert main(["status", str(run)]) == 0 and main(["requeue", "0"]) == 0


def test_folders_of_others_of_finished_and_of_running_runs_are_refused(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(out: Path, *more: str) -> str:
        before = sorted(out.rglob("*"))
        assert main(["submit", *LOCAL, "--", "train", *TINY, *more, "--out", str(out)]) == 2
        assert sorted(out.rglob("*")) == before
        return capsys.readouterr().err

    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").touch()
    assert "holds files that are no run of fedmpi" in refused(other)
    with open(run / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        lock.write('{"host": "n1", "pid": 12, "launcher": "srun", "ranks": 2, "job": "5"}\n')
        lock.flush()
        assert "is in use by process 12 on n1, Slurm job 5" in refused(run)
    (run / "slurm").mkdir()
    (run / "job.json").write_text('{"job": "12", "executor": "local", "host": "n1"}')
    with open(run / "slurm" / "keeper", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert "belongs to local job 12 on n1, which is running" in refused(run)
    (run / "finished.json").write_text('{"rounds": 1}')
    assert "already holds a finished run" in refused(run)


def test_settings_that_differ_from_the_checkpoint_are_refused_at_once(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(run, 3)
    manifest = run / "checkpoints" / "round-3" / "manifest.json"
    about: dict[str, Any] = {"format": 1, "torch": "2", "round": 3, "ranks": 1, "vectors": [], "ints": [], "parts": []}
    about |= {"config": {"seed": 5, "rounds": 1, "threads": 1, "device": "cpu"}, "prints": {}, "best": None, "last": {}}
    manifest.write_text(sealed(about))
    assert main(["submit", *LOCAL, "--", "train", *TINY, "--out", str(run)]) == 2
    said = capsys.readouterr().err
    assert "with other settings: --seed is 0 and was 5; give the same" in said
    manifest.write_text(sealed(about | {"format": 99}))
    assert main(["submit", *LOCAL, "--", "train", *TINY, "--out", str(run)]) == 2
    assert "has format 99" in capsys.readouterr().err


# What is handed over


def test_the_script_asks_for_what_was_asked_and_requeues_right_after_the_run(tmp_path: Path) -> None:
    submitit = pytest.importorskip("submitit")
    options = submit.SubmitOptions(
        2, 4, "gpu", 30, 6, 4, 1.5, "acc", "high", "a100", "my run", mpi="pmi2", setup="true"
    )
    given = arrays.slurm_parameters(options, [tmp_path / "a run"], tmp_path / "a run")
    text = submitit.slurm.slurm._make_sbatch_string(command="COMMAND", folder=tmp_path / "a run" / "slurm", **given)
    lines = text.splitlines()
    for option in (
        "nodes=2 ntasks-per-node=4 partition=gpu time=30 cpus-per-task=6 gpus-per-node=4 mem=1536M account=acc "
        "qos=high constraint=a100 signal=USR2@120 open-mode=append requeue"
    ).split():
        assert f"#SBATCH --{option}" in lines
    assert "#SBATCH --job-name='my run'" in lines and "wckey" not in text
    at = next(i for i, line in enumerate(lines) if line.startswith("srun --"))
    for option in ("--kill-on-bad-exit=1", "--open-mode=append", "--mpi=pmi2", "--cpus-per-task=6"):
        assert option in lines[at].split(), option
    after = [line for line in lines[at + 1 :] if line and not line.startswith("#")]
    again = f'{sys.executable} -m fedmpi requeue --retries 3 --run "${{runs[${{SLURM_ARRAY_TASK_ID:-0}}]}}" $code'
    assert after == ["code=$?", f"runs=('{tmp_path}/a run')", again, "exit $?"] and lines.index("true") < at


@pytest.mark.parametrize(("minutes", "seconds"), [(1, 15), (4, 60), (8, 120), (600, 120)])
def test_the_warning_leaves_most_of_a_short_time_limit(minutes: int, seconds: int) -> None:
    assert submit.SubmitOptions(time=minutes).warning_seconds == seconds


def test_a_task_trains_and_leaves_with_the_code_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[list[str]] = []
    codes = iter([0, 75])

    def train(arguments: list[str], place: Place, began: float) -> int:
        heard.append(arguments)
        return next(codes)

    monkeypatch.setattr("fedmpi.runs.rank.train", train)
    task = submit.Train(["--config", "submitted.yaml"])
    task()
    with pytest.raises(SystemExit) as left:
        task()
    assert left.value.code == 75 and heard == [["--config", "submitted.yaml"]] * 2


def test_a_path_is_shown_as_one_would_type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    options, job = submit.SubmitOptions(), submit.Job("7", "slurm")
    assert "\nrun folder  runs/a\n" in submit.summary(options, job, tmp_path / "runs" / "a")
    assert "\nrun folder  /elsewhere\n" in submit.summary(options, job, Path("/elsewhere"))


def test_a_job_trains_what_was_checked_whatever_becomes_of_the_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("seed: 1\nrounds: 2\ndata: tiny\ndata_root: here\n")
    Path("here").mkdir()
    options = submit.SubmitOptions(time=10)
    cfg, out = submit.checked_run(["--config", "my.yaml", "--out", "run", "--model", "logistic"])
    arguments = submit.prepare_folder(options, cfg, out).arguments
    Path("my.yaml").write_text("seed: 99\n")
    monkeypatch.chdir("/")
    kept = prepare(parse(arguments)).cfg
    minutes = 10 - options.warning_seconds / 60
    assert kept == replace(cfg, out=str(out), data_root=str(tmp_path / "here"), max_minutes=minutes)
    assert kept.seed == 1 and kept.rounds == 2
    with_own = replace(cfg, max_minutes=3.0)
    arguments = submit.prepare_folder(options, with_own, out).arguments
    assert prepare(parse(arguments)).cfg.max_minutes == 3.0, "a limit of one's own counts"

"""A run folder that somebody or something has changed: every command ends with 0, 1 or 2 and at most one message, never
with a traceback or a hang, touches nothing outside, and resumes from the newest sound checkpoint."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from shell import ALONE, CPU, metrics, sandbox, settings_of

from fedmpi import commands as cli
from fedmpi.comm import SoloComm
from fedmpi.errors import FileError, UserError
from fedmpi.rounds import Report, State
from fedmpi.runs import folder, rank, schema
from fedmpi.runs.build import prepare
from fedmpi.runs.checkpoint.format import Progress, sealed
from fedmpi.runs.checkpoint.save import Saver
from fedmpi.runs.config import Checkpoint
from fedmpi.runs.log import Log
from fedmpi.runs.metrics import history, lacking, read_lines
from fedmpi.runs.run import run
from fedmpi.runs.schema import Damaged, Finished, read
from fedmpi.runs.stop import Stopped

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
SECONDS = 20  # that a case may take, of which it takes a fraction of one
ROUNDS, STOPPED_AT = 5, 4
OPTIONS = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 5 --log none --local.batch 10"
OPTIONS += " --local.lr 0.05 --eval.batch 25 --algorithm scaffold --mask gma --threads 1 --checkpoint.every 2"


@pytest.fixture(autouse=True, scope="module")
def patch() -> Iterator[pytest.MonkeyPatch]:
    def abort(*_: Any) -> None:
        raise AssertionError("a rank was aborted")  # and not this process with it

    with sandbox() as patch:
        patch.setattr(SoloComm, "abort", abort)
        patch.setattr(rank, "keep_code", lambda code: None)
        yield patch


@pytest.fixture
def here() -> Iterator[Path]:
    """A folder of this test's own, in memory where that can be: syncing a disk takes most of the time."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as name:
        yield Path(name)


def config(out: Path) -> Any:
    return settings_of(out, algorithm="scaffold", rounds=ROUNDS, threads=1, checkpoint=Checkpoint(every=2), quiet=True)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was stopped after round 4, with checkpoints of 2 and 4, and the same one finished."""
    base = tmp_path_factory.mktemp("runs")
    cfg = config(base / "stopped")
    done = Saver.round_done

    def stop(self: Saver, state: State, progress: Progress, flags: list[int], last: bool) -> list[int]:
        return done(self, state, progress, [int(state.round == STOPPED_AT), *flags[1:]], last)

    with pytest.MonkeyPatch.context() as inner, pytest.raises(Stopped):
        inner.setattr(Saver, "round_done", stop)
        run(prepare(cfg), SoloComm(), ALONE, CPU, {})
    shutil.copytree(base / "stopped", base / "whole")
    run(prepare(replace(cfg, out=str(base / "whole"))), SoloComm(), ALONE, CPU, {})
    job = {"job": "999999", "executor": "local", "host": "here", "ranks": 1, "logs": "slurm"}
    (base / "stopped" / "job.json").write_text(json.dumps(job))
    (base / "whole" / "job.json").write_text(json.dumps(job))
    (base / "whole" / "attack.json").write_text(json.dumps({"judged": 4, "loss": {"accuracy": 0.5}}))
    return {name: base / name for name in ("stopped", "whole")}


def model_of(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


# ------------------------------------------------------------------------------------------------- Kinds of damage


def replaced(content: bytes) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.write_bytes(content)

    return damage


def special(make: Callable[[Path], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink(missing_ok=True)
        make(path)

    return damage


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "empty": replaced(b""),
    "binary": replaced(bytes(range(256)) * 4),
    "a list": replaced(b"[1, 2]\n"),
    "a number": replaced(b"7\n"),
    "null": replaced(b"null\n"),
    "no keys": replaced(b"{}\n"),
    "deep": replaced(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
    "brackets": replaced(b"[" * 100_000),
    "long number": replaced(b'{"round": 1' + b"0" * 5000 + b', "rounds": 1' + b"0" * 5000 + b"}"),
    "a folder": special(Path.mkdir),
    "a pipe": special(os.mkfifo),
    "a link to itself": special(lambda path: path.symlink_to(path.name)),
    "a link to nowhere": special(lambda path: path.symlink_to("/nonexistent/outside")),
    "a device": special(lambda path: path.symlink_to("/dev/zero")),
    "3 GB": sparse,
}
FILES = ["config.yaml", "metrics.jsonl", "finished.json", "stopped.json", "starts.jsonl", "job.json", "lives.jsonl"]
FILES += ["lock", "cancelled", "partition.json", "environment.json", "attack.json", "checkpoints/round-4/manifest.json"]
FILES += ["checkpoints/round-4/part-0.json", "checkpoints/round-4/slice-0-of-1.safetensors"]
READ_BY_TRAIN = ["config.yaml", "metrics.jsonl", "finished.json", "stopped.json", "lock", *FILES[-3:]]


def keyed(name: str, **changes: Any) -> Callable[[Path], None]:
    """Change keys of a JSON file in the folder; None takes a key away."""

    def damage(out: Path) -> None:
        path = out / name
        record = json.loads(path.read_text()) if path.exists() else {}
        record |= changes
        text = json.dumps({key: value for key, value in record.items() if value != "GONE"})
        path.write_text(text)

    return damage


def lines(change: Callable[[list[dict[str, Any]]], list[Any]]) -> Callable[[Path], None]:
    def damage(out: Path) -> None:
        path = out / "metrics.jsonl"
        path.write_text("".join(json.dumps(one) + "\n" for one in change(metrics(out))))

    return damage


def manifest(**changes: Any) -> Callable[[Path], None]:
    """Change the newest manifest and seal it again, as only somebody who means it can."""

    def damage(out: Path) -> None:
        path = out / "checkpoints" / "round-4" / "manifest.json"
        about = json.loads(path.read_text()) | changes
        del about["sha256"]
        path.write_text(sealed({key: value for key, value in about.items() if value != "GONE"}))

    return damage


def part(**changes: Any) -> Callable[[Path], None]:
    """Change the newest list of parts, and its SHA-256 in the manifest with it."""

    def damage(out: Path) -> None:
        path = out / "checkpoints" / "round-4" / "part-0.json"
        record = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in record.items() if value != "GONE"}))
        manifest(parts=[hashlib.sha256(path.read_bytes()).hexdigest()])(out)

    return damage


def renamed(old: str, new: str) -> Callable[[Path], None]:
    return lambda out: os.rename(out / "checkpoints" / old, out / "checkpoints" / new)


def swapped(out: Path) -> None:
    base = out / "checkpoints"
    for old, new in (("round-2", "aside"), ("round-4", "round-2"), ("aside", "round-4")):
        os.rename(base / old, base / new)


A_SLICE = {"name": "slice-0-of-1.safetensors", "sha256": "", "bytes": 1}
OLDER: dict[str, Callable[[Path], None]] = {
    "renamed to a later round": renamed("round-4", "round-7"),
    "renamed to an absurd round": renamed("round-4", "round-99999999999999999999999"),
    "renamed to another script": renamed("round-4", "round-\u0664"),
    "an older one put in its place": lambda out: (
        shutil.rmtree(out / "checkpoints/round-4"),
        shutil.copytree(out / "checkpoints/round-2", out / "checkpoints/round-4"),
    )[0],
    **{
        f"manifest: {key} is {value!r}": manifest(**{key: value})
        for key, values in {
            "round": ("4", 4.0, None, True, 0, -4, [4], "GONE", 3),
            "ranks": ("1", 0, 2, 1.5, "GONE"),
            "parts": ("x", [], [1], {}, [None], "GONE", ["a", "b"]),
            "vectors": ("model", [1], None, "GONE", ["other"]),
            "ints": ("x", ["a"], [1.5], None, "GONE", [2**70]),
            "config": ([], "x", {}, {"threads": None}, {"threads": "1"}, {"threads": 0}, "GONE"),
            "prints": ([], {"model": 1}, "x", "GONE"),
            "best": ("high", [], True, "GONE"),
            "last": ([], "x", None, 7, "GONE"),
            "torch": (2, None, "GONE"),
        }.items()
        for value in values
    },
    **{
        f"part: {key} is {value!r}"[:80]: part(**{key: value})
        for key, values in {
            "slice": ("x", [], None, {}, "GONE", A_SLICE | {"bytes": "1"}, A_SLICE | {"sha256": 5}, A_SLICE)
            + (A_SLICE | {"name": "../../../x"}, A_SLICE | {"name": 7}, A_SLICE | {"bytes": -1}),
            "clients": ("x", {}, [1], ["x"], None, "GONE", [A_SLICE | {"name": "/etc/passwd"}]),
        }.items()
        for value in values
    },
}
"""what spoils the newest checkpoint alone"""

WRONG: dict[str, Callable[[Path], None]] = {
    "rounds twice": lines(lambda rounds: [*rounds[:2], *rounds[1:]]),
    "out of order": lines(lambda rounds: [rounds[1], rounds[0], *rounds[2:]]),
    "backwards": lines(lambda rounds: rounds[::-1]),
    "a text for the round": lines(lambda rounds: [*rounds[:2], rounds[2] | {"round": "3"}, rounds[3]]),
    "a fraction for the round": lines(lambda rounds: [*rounds[:2], rounds[2] | {"round": 2.5}, rounds[3]]),
    "round 0": lines(lambda rounds: [rounds[0] | {"round": 0}, *rounds[1:]]),
    "a text for a loss": lines(lambda rounds: [rounds[0] | {"train_loss": "low"}, *rounds[1:]]),
    "a list for a loss": lines(lambda rounds: [rounds[0] | {"test_loss": [1]}, *rounds[1:]]),
    "true for a share": lines(lambda rounds: [rounds[0] | {"kept": True}, *rounds[1:]]),
    "a text for seconds": lines(lambda rounds: [rounds[0] | {"seconds": "long"}, *rounds[1:]]),
    "no seconds": lines(lambda rounds: [rounds[0] | {"seconds": None}, *rounds[1:]]),
    "texts among seconds": lines(lambda rounds: [rounds[0] | {"seconds": {"local": "x"}}, *rounds[1:]]),
    "texts among clients": lines(lambda rounds: [rounds[0] | {"dropped_clients": ["x"]}, *rounds[1:]]),
    "a text for the metric": lines(lambda rounds: [rounds[0] | {"test_accuracy": "good"}, *rounds[1:]]),
    "keys missing": lines(lambda rounds: [{"round": 1}, *rounds[1:]]),
    "another object": lines(lambda rounds: [{"hello": 1}, *rounds[1:]]),
}
"""metrics.jsonl from which nobody can resume with the right history"""

KEYS: dict[str, Callable[[Path], None]] = {
    **{f"finished.json: rounds is {one!r}": keyed("finished.json", rounds=one) for one in ("5", None, -1, "GONE")},
    **{f"finished.json: sha is {value!r}": keyed("finished.json", model_sha256=value) for value in (5, None, [])},
    **{f"stopped.json: round is {value!r}": keyed("stopped.json", round=value) for value in ("4", None, 1.5, "GONE")},
    **{f"stopped.json: launch is {value!r}": keyed("stopped.json", launch=value) for value in (5, "x", [1], {})},
    **{f"job.json: job is {one!r}": keyed("job.json", job=one) for one in (7, None, "-1", "--all", "../x", "GONE")},
    **{f"job.json: logs is {value!r}": keyed("job.json", logs=value) for value in (7, None, [])},
    **{f"cancelled: time is {value!r}": keyed("cancelled", time=value) for value in ("now", None, [])},
    **{f"attack.json: loss is {value!r}": keyed("attack.json", loss=value) for value in ("x", 7, {"accuracy": "x"})},
    **{f"partition.json: {value!r}": keyed("partition.json", objective=value) for value in (7, {"metric": 5}, [])},
    **{f"environment.json: {value!r}": keyed("environment.json", versions=value) for value in (7, [])},
}


# ------------------------------------------------------------------------------------------------------- The commands


class Late(Exception):
    """The case hangs."""


@contextlib.contextmanager
def in_time() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise Late

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def called(*words: str) -> tuple[int, list[str], list[str]]:
    """The exit code of a command, its messages, and its warnings."""
    out, err = io.StringIO(), io.StringIO()
    with in_time(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.main(words)
    said = err.getvalue().splitlines()
    assert "Traceback" not in err.getvalue() and "Error:" not in err.getvalue(), err.getvalue()
    warnings = [line for line in said if line.startswith(("WARNING: ", "INFO: "))]
    return code, [line for line in said if line not in warnings], warnings


def trained(out: Path, *words: str) -> tuple[int, list[str], list[str]]:
    return called("train", *OPTIONS.split(), "--out", str(out), *words)


def sound(code: int, said: list[str], case: str) -> None:
    """A command that failed has said so in one message, and one that did not has none."""
    assert code in (0, 1, 2), (case, code, said)
    assert len(said) == (code != 0), (case, code, said)
    assert not said or said[0].startswith("fedmpi: "), (case, said)


def copied(source: Path, base: Path) -> Path:
    """A copy of a run folder in a folder of its own, in which anything else would be seen."""
    out = base / "run"
    base.mkdir()
    shutil.copytree(source, out)
    return out


def outside(base: Path) -> None:
    assert {path.name for path in base.iterdir()} <= {"run", "page"} and not os.path.exists("/nonexistent")


@pytest.mark.parametrize("name", FILES)
def test_anything_in_the_place_of_a_file(name: str, runs: dict[str, Path], here: Path) -> None:
    """A stopped run resumes with the right model or says why not, and a finished one is read or refused."""
    for number, (kind, damage) in enumerate(DAMAGES.items()):
        out = copied(runs["stopped"], here / str(number))
        damage(out / name)
        for words in (("status", str(out)), ("compare", str(out))):
            code, said, _ = called(*words)
            sound(code, said, f"{words[0]}: {name} is {kind}")
            assert code != 2, (said, "damage is a fault")
        if name in READ_BY_TRAIN or kind in ("a pipe", "a folder"):  # in whose place others are put
            code, said, warnings = trained(out)
            sound(code, said, f"train: {name} is {kind}")
            if name.startswith("checkpoints"):
                assert code == 0 and any("round 4 is damaged" in line for line in warnings), (kind, said, warnings)
            if code == 0:
                assert model_of(out) == model_of(runs["whole"]), (name, kind)
                assert read(out / "finished.json", Finished), (name, kind)
        outside(out.parent)
        shutil.rmtree(out.parent)


@pytest.mark.parametrize("name", [*FILES[:3], "partition.json", "model.safetensors"])
def test_a_finished_run_is_attacked_or_refused(name: str, runs: dict[str, Path], here: Path) -> None:
    for number, (kind, damage) in enumerate(DAMAGES.items()):
        out = copied(runs["whole"], here / str(number))
        damage(out / name)
        code, said, _ = called("attack", str(out), "--repeats", "1", "--samples", "20")
        sound(code, said, f"attack: {name} is {kind}")
        gone = (name, kind) == ("finished.json", "a link to nowhere")
        assert code == (2 if gone else 1) or (code == 0 and name == "metrics.jsonl"), (name, kind, code, said)
        outside(out.parent)
        shutil.rmtree(out.parent)


def test_a_report_of_damaged_runs_is_one_message(
    runs: dict[str, Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawing is left out: it takes seconds, and reads no file."""
    from fedmpi.experiments.report import command

    drawn = b'<svg viewBox="0 0 1 1"></svg>'
    monkeypatch.setattr(command, "render", lambda part, kinds, *_: dict.fromkeys(kinds, drawn))
    names = ("metrics.jsonl", "finished.json", "partition.json", "environment.json", "attack.json", "starts.jsonl")
    cases = [(name, kind) for name in names for kind in ("no keys", "deep", "a pipe", "a folder", "3 GB", "binary")]
    for number, (name, kind) in enumerate(cases):
        out = copied(runs["whole"], here / str(number))
        DAMAGES[kind](out / name)
        code, said, _ = called("report", str(out), "--out", str(out.parent / "page"), "--formats", "none")
        sound(code, said, f"report: {name} is {kind}")
        assert code != 2 and (code == 0) == (out.parent / "page").exists(), (name, kind, code, said)
        outside(out.parent)
        shutil.rmtree(out.parent)


def test_a_spoilt_checkpoint_is_named_and_the_older_one_taken(runs: dict[str, Path], here: Path) -> None:
    assert len(OLDER) > 60
    for number, (case, damage) in enumerate(OLDER.items()):
        out = copied(runs["stopped"], here / str(number))
        damage(out)
        code, said, warnings = trained(out)
        assert (code, said) == (0, []), (case, said, warnings)
        last = json.loads((out / "starts.jsonl").read_text().splitlines()[-1])
        assert last["round"] == 2 and model_of(out) == model_of(runs["whole"]), case
        assert [one["round"] for one in metrics(out)] == [1, 2, 3, 4, 5], case
        outside(out.parent)
        shutil.rmtree(out.parent)


def test_checkpoints_that_were_swapped_are_both_refused_and_the_run_starts_over(
    runs: dict[str, Path], here: Path
) -> None:
    out = copied(runs["stopped"], here / "0")
    swapped(out)
    code, said, warnings = trained(out)
    assert (code, said) == (0, []) and model_of(out) == model_of(runs["whole"])
    assert "manifest.json is that of round 2, and its folder is round-4" in warnings[0] and "round-2" in warnings[1]


def test_tensors_that_do_not_fit_are_one_message(runs: dict[str, Path], here: Path) -> None:
    out = copied(runs["stopped"], here / "0")
    manifest(ints=[1, 2, 3])(out)
    code, said, _ = trained(out)
    assert code == 1 and "it has 3 whole numbers, not 0" in said[0] and "--resume never" in said[0]
    code, said, _ = trained(out, "--resume", "never")
    assert code == 0 and model_of(out) == model_of(runs["whole"])


@pytest.mark.parametrize("case", KEYS)
def test_a_record_of_the_wrong_shape_is_one_message(case: str, runs: dict[str, Path], here: Path) -> None:
    name = case.partition(":")[0]
    for which in ("stopped", "whole"):
        out = copied(runs[which], here / which)
        KEYS[case](out)
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"}
        code, said, _ = called("status", str(out))
        sound(code, said, case)
        if name in ("finished.json", "job.json") or (which == "stopped" and name in ("stopped.json", "cancelled")):
            assert code == 1 and str(out / name) in said[0] and "restore it from a copy, or move it away" in said[0]
        code, said, _ = trained(out)
        sound(code, said, case)
        if code == 1:
            assert str(out / name) in said[0]
            assert before == {path: path.read_bytes() for path in before}, "nothing was changed"
        elif code == 0:
            assert which == "stopped" and model_of(out) == model_of(runs["whole"])


# ------------------------------------------------------------------------------------------------------- metrics.jsonl


@pytest.mark.parametrize("case", WRONG)
def test_no_run_resumes_with_a_wrong_history(case: str, runs: dict[str, Path], here: Path) -> None:
    out = copied(runs["stopped"], here / "0")
    WRONG[case](out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"}
    code, said, _ = trained(out)
    assert code == 1 and len(said) == 1, (code, said)
    assert f"{out / 'metrics.jsonl'} is damaged: line " in said[0] and "--resume never" in said[0]
    assert before == {path: path.read_bytes() for path in before}, "nothing was changed"
    (out / "metrics.jsonl").unlink()  # as the message says
    assert trained(out)[0] == 0 and model_of(out) == model_of(runs["whole"])


@pytest.mark.parametrize(
    ("left", "absent"), [(None, "rounds 1 to 3"), ([], "rounds 1 to 3"), ([1, 2], "round 3"), ([1, 4], "rounds 2 to 3")]
)
def test_a_run_whose_metrics_are_gone_ends_well_and_says_which(
    left: list[int] | None, absent: str, runs: dict[str, Path], here: Path
) -> None:
    """The last round is also in the checkpoint."""
    out = copied(runs["stopped"], here / "0")
    if left is None:
        (out / "metrics.jsonl").unlink()
    else:
        lines(lambda rounds: [one for one in rounds if one["round"] in left])(out)
    code, said, warnings = trained(out)
    assert (code, said) == (0, []) and [line for line in warnings if "lacks" in line] == [
        f"WARNING: {out / 'metrics.jsonl'} lacks {absent}; the model is not affected"
    ]
    assert [one["round"] for one in metrics(out)] == sorted({*(left or ()), 4, 5})
    assert model_of(out) == model_of(runs["whole"])
    assert (out / "finished.json").read_text() == (runs["whole"] / "finished.json").read_text()


def test_the_history_of_a_resumed_run_has_the_rounds_that_there_are(runs: dict[str, Path], here: Path) -> None:
    out = copied(runs["stopped"], here / "0")
    (out / "metrics.jsonl").unlink()
    outcome = run(prepare(config(out)), SoloComm(), ALONE, CPU, {})
    assert [report.round for report in outcome.history] == [4, 5] and outcome.last.round == 5
    (out / "metrics.jsonl").unlink()
    (out / "finished.json").unlink()
    assert run(prepare(config(out)), SoloComm(), ALONE, CPU, {}).last.round == 5, "none was left to train"


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_metrics_that_are_removed_while_a_run_writes_them(
    how: str, runs: dict[str, Path], here: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out, log_round = here / "run", Log.round

    def meddle(self: Log, report: Report) -> None:
        if report.round == 3:
            (out / "metrics.jsonl").unlink()
            if how == "replaced":
                (out / "metrics.jsonl").write_text("")
        log_round(self, report)

    with pytest.MonkeyPatch.context() as inner:
        inner.setattr(Log, "round", meddle)
        run(prepare(config(out)), SoloComm(), ALONE, CPU, {})
    assert [one["round"] for one in metrics(out)] == [3, 4, 5] and model_of(out) == model_of(runs["whole"])
    logged = f"{out / 'metrics.jsonl'} was removed: a new file has the rounds from 3 on"
    assert [line.message for line in caplog.records] == ([logged] if how == "removed" else [])
    caplog.clear()
    more = replace(config(out), rounds=6, resume="force")
    run(prepare(more), SoloComm(), ALONE, CPU, {})
    assert f"{out / 'metrics.jsonl'} lacks rounds 1 to 2; the model is not affected" in caplog.messages


def test_missing_rounds_in_words() -> None:
    def words(*there: int, done: int = 9) -> str:
        return lacking([{"round": t} for t in there], done)

    assert words(*range(1, 10)) == "" and words(done=4) == "rounds 1 to 4" and words(1, 2, 3, done=4) == "round 4"
    assert words(2, 3, 7) == "rounds 1, 4 to 6, 8 to 9"
    assert words(*range(2, 30, 2), done=30) == "rounds 1, 3, 5, 7, 9, 11 more"


def test_a_disk_that_fails_is_a_fault_for_every_reader(
    runs: dict[str, Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = copied(runs["stopped"], here / "0")
    real = schema.opened

    def failing(path: Path) -> Any:
        if path.name == "metrics.jsonl":
            raise OSError(5, "Input/output error")
        return real(path)

    monkeypatch.setattr(schema, "opened", failing)
    for words in (("status", str(out)), ("compare", str(out)), ("report", str(out), "--out", str(here / "page"))):
        code, said, _ = called(*words)
        assert code == 1 and "metrics.jsonl cannot be read (Input/output error); nothing was changed" in said[0], words
    code, said, _ = trained(out)
    assert code == 1 and "metrics.jsonl cannot be read (Input/output error); nothing was changed" in said[0]
    monkeypatch.undo()
    assert trained(out)[0] == 0 and model_of(out) == model_of(runs["whole"])


# ---------------------------------------------------------------------------------------------------------- The reader


def test_lines_are_read_one_by_one_and_a_line_has_an_end(here: Path) -> None:
    with open(here / "metrics.jsonl", "wb") as file:
        file.write(b'{"round": 1}\n')
        file.write(b'{"round": 2, "x": "' + b"x" * schema.LONGEST)
    stream = read_lines(here)
    first = next(stream)
    assert first.record == {"round": 1}
    with pytest.raises(Damaged, match="has a line 2 of more than"):
        next(stream)
    assert history(here / "none", 3) == []


@pytest.mark.parametrize("key", ["x" * 100_000, "a\nb", "\x1b[31m"])
def test_a_message_is_one_short_line_whatever_stands_in_a_file(key: str, here: Path) -> None:
    (here / "finished.json").write_text(json.dumps({"rounds": key}))
    with pytest.raises(FileError) as caught:
        read(here / "finished.json", Finished)
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_keys_that_no_version_knows_yet_are_kept(here: Path) -> None:
    (here / "finished.json").write_text('{"rounds": 3, "novel": [[1]]}')
    assert read(here / "finished.json", Finished) == {"rounds": 3, "novel": [[1]]}
    assert read(here / "none.json", Finished) is None


def test_a_link_in_the_place_of_a_file_leads_no_writer_out_of_the_folder(here: Path) -> None:
    (here / "precious").write_text("precious")
    for name in ("lock", "starts.jsonl", ".config.yaml"):
        (here / name).symlink_to("precious")
    with pytest.raises(FileError, match="lock cannot be used"), folder.held(here, ALONE, {}, 1.0):
        pass
    for write, name in ((folder.append, "starts.jsonl"), (folder.write, "config.yaml")):
        with pytest.raises(OSError, match="is no regular file"):
            write(here / name, "x")
    assert (here / "precious").read_text() == "precious"


# ---------------------------------------------------------------------------------------------------------- Paths


@pytest.mark.parametrize("command", "status compare report attack cancel sweep plan train data".split())
def test_a_name_that_is_too_long_is_a_mistake(command: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    long = "x" * 5000
    words = {"train": ["train", *OPTIONS.split(), "--out", long], "plan": ["plan", "--config", long]}
    words |= {"data": ["data", "prepare", "femnist", "--data_root", long]}
    code, said, _ = called(*words.get(command, [command, long]))
    assert code == 2 and len(said) == 1 and len(said[0]) < 12_000, said
    code, said, _ = called(*[word if word != long else "y" * 300 for word in words.get(command, [command, long])])
    assert code == 2 and len(said) == 1, said


@pytest.mark.parametrize("command", ["report", "train", "sweep"])
def test_a_folder_that_cannot_be_made_is_refused_before_any_work(
    command: str, runs: dict[str, Path], here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedmpi.experiments.report import command as reporting
    from fedmpi.runs import run as running

    def work(*_: Any) -> None:
        raise AssertionError("it has begun to work")

    monkeypatch.setattr(reporting, "find_runs", work)
    monkeypatch.setattr(running, "load_data", work)
    (here / "sweep.yaml").write_text("base: {data: glyphs, rounds: 1}\ngrid:\n  mask: [gma, mean]\n")
    words = {"report": ["report", str(runs["whole"])], "train": ["train", *OPTIONS.split()]}
    words |= {"sweep": ["sweep", str(here / "sweep.yaml")]}
    code, said, _ = called(*words[command], "--out", "/proc/1/x")
    assert code == 2 and "--out /proc/1/x cannot be written (No such file or directory)" in said[0], said
    with pytest.raises(UserError, match="cannot be written"):
        folder.check_writable(Path("/proc/1/x/y/z"))
    folder.check_writable(here / "a" / "b")
    assert not (here / "a").exists(), "nothing is left of the trial"

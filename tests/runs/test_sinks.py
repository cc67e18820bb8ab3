"""Other people's tools: what TensorBoard, Weights & Biases and MLflow are shown, read back with their own readers."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import BIN, need, rank_environment
from shell import sandbox
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedmpi import __version__
from fedmpi.errors import UserError
from fedmpi.rounds import Report
from fedmpi.runs import metrics as fedmpi_metrics
from fedmpi.runs import sinks
from fedmpi.runs.log import Log, sink_names
from fedmpi.runs.sinks import About
from fedmpi.runs.sinks.base import Sink, SinkWithRuns, scalars
from fedmpi.runs.sinks.mlflow import address

TINY = "--data glyphs --split iid --model logistic --clients 5 --cohort 5 --local.steps 1 --eval.samples 50 --threads 1"
ALL = "tensorboard,wandb,mlflow"
SECONDS = dict.fromkeys(("local", "wait", "reduce", "server", "gather"), 0.5)


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    for package in ("wandb", "mlflow", "sqlalchemy", "alembic"):
        need("sinks", importlib.util.find_spec(package) is not None, f"{package} is not installed")


class Ear:
    """A proxy that nobody should call: whatever speaks HTTP or HTTPS to anywhere would come here."""

    def __enter__(self) -> Ear:
        self.calls: list[bytes] = []
        self.server = socket.create_server(("127.0.0.1", 0))
        self.thread = threading.Thread(target=self.listen)
        self.thread.start()
        return self

    def listen(self) -> None:
        while True:
            with self.server.accept()[0] as caller:
                said = caller.recv(200)
            if said == b"enough":
                return
            self.calls.append(said)

    def __exit__(self, *_: object) -> None:
        with socket.create_connection(self.server.getsockname()) as line:
            line.sendall(b"enough")
        self.thread.join()
        self.server.close()

    @property
    def environ(self) -> dict[str, str]:
        proxy = f"http://127.0.0.1:{self.server.getsockname()[1]}"
        return {"HTTP_PROXY": proxy, "HTTPS_PROXY": proxy, "http_proxy": proxy, "https_proxy": proxy, "NO_PROXY": ""}


def python(*arguments: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run Python with warnings as errors, as a user would: the tools behave otherwise where they see a test or CI."""
    seen = ("PYTEST_", "WANDB_", "MLFLOW_")
    theirs = {name: value for name, value in rank_environment().items() if not name.startswith(seen) and name != "CI"}
    done = subprocess.run(
        [sys.executable, "-W", "error", *arguments],
        env=theirs | environ,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


def train(out: Path, *more: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "fedmpi", "train", *TINY.split(), "--out", str(out), *more, code=code, **environ)


def metrics(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def by_wandb(out: Path) -> list[list[dict[str, Any]]]:
    """The records in each file of W&B, oldest first, as its own command prints them."""
    found = []
    for path in sorted((out / "wandb").glob("offline-run-*/*.wandb")):
        command = [str(BIN / "wandb"), "leet", "inspect", "--json", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "incomplete" not in done.stderr, done.stderr
        found.append([json.loads(line) for line in done.stdout.splitlines()])
    return found


def history(files: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """What was logged to W&B, without its own additions."""
    rounds = [record["history"]["item"] for records in files for record in records if record["type"] == "history"]
    assert all(one["_step"] == one["round"] for one in rounds)
    return [{name: value for name, value in one.items() if name[0] != "_"} for one in rounds]


def id_in(home: Path) -> str:
    return str(json.loads((home / "fedmpi.json").read_text())["id"])


def last_of(records: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = [record[kind] for record in records if record["type"] == kind][-1]
    return found


def by_mlflow(out: Path, *names: str) -> list[tuple[Any, list[dict[str, float]]]]:
    """The runs in MLflow's store, oldest first, each with its rounds: all metrics, or those that are named."""
    from mlflow import MlflowClient

    client = MlflowClient(address(out / "mlflow" / "mlflow.db"))
    experiments = client.search_experiments(filter_string="name = 'fedmpi'")
    found = []
    for run in client.search_runs([experiments[0].experiment_id], order_by=["attributes.start_time ASC"]):
        rounds: dict[int, dict[str, float]] = {}
        for name in names or run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                one = rounds.setdefault(metric.step, {})
                assert name not in one, f"{name} is there twice at {metric.step}"
                one[name] = metric.value
        found.append((run, [rounds[step] for step in sorted(rounds)]))
    return found


def by_tensorboard(out: Path) -> dict[str, dict[int, float]]:
    events = EventAccumulator(str(out / "tensorboard")).Reload()
    for tag in events.Tags()["scalars"]:
        steps = [event.step for event in events.Scalars(tag)]
        assert len(steps) == len(set(steps)), f"{tag} has a round twice: {steps}"
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


# A run, from the command line


@dataclass(frozen=True)
class Lived:
    """A run that stopped after its first round, and went on to a fourth."""

    out: Path
    config: dict[str, Any]
    """of its first life"""
    wandb: list[list[dict[str, Any]]]
    """a file for each life"""
    mlflow: list[tuple[Any, list[dict[str, float]]]]
    """after each life, the one run and its rounds"""
    calls: list[bytes]


@pytest.fixture(scope="module")
def lived(tmp_path_factory: pytest.TempPathFactory) -> Lived:
    out = tmp_path_factory.mktemp("lived") / "my run"
    options = ["--evaluate", "agreement", "--log_to", ALL]
    with Ear() as ear:
        stopped = train(out, *options, "--rounds", "3", "--max_minutes", "0.0001", code=75, **ear.environ)
        [first], config = by_mlflow(out), yaml.safe_load((out / "config.yaml").read_text())
        ended = train(out, *options, "--rounds", "4", "--resume", "force", **ear.environ)
        [second] = by_mlflow(out)
    for said in (stopped.stderr, ended.stderr):
        assert "wandb" not in said and "mlflow" not in said, said
    return Lived(out, flat(config), by_wandb(out), [first, second], ear.calls)


def test_all_tools_have_the_numbers_of_metrics_jsonl(lived: Lived) -> None:
    rounds = [scalars(record) for record in metrics(lived.out)]
    assert [one["round"] for one in rounds] == [1, 2, 3, 4]
    assert {"test_accuracy", "seconds/local", "layers/1.weight/agreement", "layers/1.bias/below_tau"} <= set(rounds[0])
    assert history(lived.wandb) == rounds
    assert lived.mlflow[1][1] == rounds
    read = by_tensorboard(lived.out)
    assert set(read) == set(rounds[0])
    for name, values in read.items():
        assert values == {one["round"]: pytest.approx(one[name], rel=1e-6) for one in rounds}, name


def read(text: str) -> Any:
    """Return a value that MLflow keeps as text. YAML takes 1e-08 for a word."""
    return float(text) if re.fullmatch(r"\d+e-\d+", text) else yaml.safe_load(text)


def test_they_know_the_configuration_the_name_and_the_tags(lived: Lived) -> None:
    tags = {"algorithm": "fedavg", "mask": "mean", "data": "glyphs", "seed": "0", "fedmpi": __version__}
    run, shown = lived.mlflow[0][0], last_of(lived.wandb[0], "run")
    assert {name: read(value) for name, value in run.data.params.items()} == lived.config
    assert {name: value for name, value in shown["config"]["update"].items() if name[0] != "_"} == lived.config
    assert run.info.run_name == "my run" and tags.items() <= run.data.tags.items()
    assert shown["display_name"] == "my run" and shown["tags"] == [f"{name}:{value}" for name, value in tags.items()]
    assert shown["project"] == "fedmpi"


def test_a_resumed_run_is_the_same_run(lived: Lived) -> None:
    first, second = lived.wandb
    assert last_of(first, "run")["run_id"] == last_of(second, "run")["run_id"] == id_in(lived.out / "wandb")
    assert [len(history([one])) for one in (first, second)] == [1, 3]
    assert last_of(second, "run")["config"]["update"]["rounds"] == 4
    before, after = (run for run, _ in lived.mlflow)
    assert before.info.run_id == after.info.run_id
    assert after.data.params["rounds"] == "3", "MLflow keeps the first value"


def test_they_know_how_it_ended(lived: Lived) -> None:
    first, second = lived.wandb
    assert last_of(first, "exit")["exit_code"] == 75 and any(record["type"] == "preempting" for record in first)
    assert last_of(second, "exit")["exit_code"] == 0
    assert [run.info.status for run, _ in lived.mlflow] == ["KILLED", "FINISHED"]


def test_nobody_is_called_and_nothing_lies_elsewhere(lived: Lived) -> None:
    assert lived.calls == []
    assert [path.name for path in lived.out.parent.iterdir()] == ["my run"]
    assert {path.name for path in (lived.out / "mlflow").iterdir()} == {"fedmpi.json", "rounds.txt", "mlflow.db"}


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in config.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


# Runs that end badly

LIVE = """
import os, shutil, signal, sys
from pathlib import Path
from fedmpi.runs.log import Log, set_up, sink_names
from fedmpi.runs.metrics import history
from fedmpi.rounds import Report

assert sink_names("tensorboard,wandb,mlflow") == ["tensorboard", "wandb", "mlflow"]
assert not {"wandb", "mlflow", "sqlalchemy", "alembic", "tensorboard"} & set(sys.modules), "looked for, not imported"

out = Path(sys.argv[1])
out.mkdir(exist_ok=True)
set_up(0, 1)

def report(round, loss):
    layers = {f"a?{n}": {"agreement": n / 8, "below_tau": loss} for n in range(505 if round == 2 else 1)}
    seconds = dict.fromkeys(("local", "wait", "reduce", "server", "gather"), 0.5)
    return Report(round, 2, (), loss, 0.5, 0.5, 8, seconds, measures={"layers": layers})

def live(done, last, loss, tools=("wandb", "mlflow"), **config):
    config = {"seed": 0, "rounds": last, "long": "x" * 7000, **{f"k{n}": n for n in range(150)}, **config}
    with Log(out, last, list(tools), True, done=done, config=config, records=history(out, done)) as log:
        for round in range(done + 1, last + 1):
            log.round(report(round, loss / round))
            yield round
"""


def test_a_killed_run_resumes_without_logging_a_round_twice(tmp_path: Path) -> None:
    """1000 metrics is what MLflow takes at once, 100 params, 6000 characters of one; these have more of everything.
    W&B may lack what it had in memory when it was killed."""
    out = tmp_path / "run"
    die = "for round in live(0, 9, 1.0):\n    if round == 5:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    python("-c", LIVE + die, str(out), code=-9)
    assert [one["round"] for one in metrics(out)] == [1, 2, 3, 4, 5]
    [killed] = (out / "wandb").glob("offline-run-*")
    shutil.rmtree(killed)  # nobody can say what is in it
    go_on = "print(list(live(3, 7, 1.0)))\nassert list(live(6, 7, 2.0, lr=0.5)) == [7]\n"
    python("-c", LIVE + go_on, str(out))
    layer = "layers/a_504/agreement"
    [(first, rounds), (second, branch)] = by_mlflow(out, "round", "train_loss", layer)
    assert [one["round"] for one in rounds] == [one["round"] for one in branch] == [1, 2, 3, 4, 5, 6, 7]
    assert [one["train_loss"] for one in rounds] == [1 / n for n in range(1, 8)]
    assert [one["train_loss"] for one in branch] == [1 / n for n in range(1, 7)] + [2 / 7]
    assert [layer in one for one in rounds] == [n == 2 for n in range(1, 8)] and rounds[1][layer] == 504 / 8
    assert len(first.data.metrics) > 1010
    assert (first.data.params["k149"], len(first.data.params["long"])) == ("149", 6000)
    assert "lr" not in first.data.params and second.data.params["lr"] == "0.5"
    files = by_wandb(out)
    ids = [last_of(records, "run")["run_id"] for records in files]
    assert len(set(ids)) == 2 and id_in(out / "wandb") == ids[-1]
    assert [one["round"] for one in history(files[:1])] == [6, 7], "the killed one has had 1 to 5"
    branched = history(files[1:])
    assert [one["round"] for one in branched] == [1, 2, 3, 4, 5, 6, 7] and branched[6]["train_loss"] == 2 / 7
    assert [one["round"] for one in metrics(out)] == [1, 2, 3, 4, 5, 6, 7]


def test_tensorboard_has_every_round_before_a_kill_and_what_it_has_missed(tmp_path: Path) -> None:
    out, shown = tmp_path / "run", '["tensorboard"]'
    die = f"for round in live(0, 9, 1.0, {shown}):\n    if round == 5:\n        os._exit(9)\n"
    python("-c", LIVE + die, str(out), code=9)
    assert by_tensorboard(out)["train_loss"] == {n: pytest.approx(1 / n) for n in range(1, 6)}
    python("-c", LIVE + f"list(live(4, 6, 1.0, []))\nassert list(live(6, 7, 1.0, {shown})) == [7]\n", str(out))
    read = by_tensorboard(out)
    assert read["train_loss"] == {n: pytest.approx(1 / n) for n in range(1, 8)}
    assert list(read["layers/a?504/agreement"]) == [2] and list(read["seconds/local"]) == list(range(1, 8))
    python("-c", LIVE + f"list(live(3, 5, 2.0, [], lr=0.5))\nlist(live(5, 6, 2.0, {shown}, lr=0.5))\n", str(out))
    branch = {n: pytest.approx((1 if n <= 3 else 2) / n) for n in range(1, 7)}
    assert by_tensorboard(out)["train_loss"] == branch, (
        "rounds that came again with other knobs, and no sink was called"
    )


def test_tools_that_fail_do_not_end_a_run(tmp_path: Path) -> None:
    """W&B's own process is killed, MLflow's store is removed; the run continues and logs one warning for each."""
    out = tmp_path / "run"
    code = """
for round in live(0, 5, 1.0):
    if round == 2:
        tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
        children = [int(pid) for task in tasks for pid in task.read_text().split()]
        [core] = [pid for pid in children if "wandb-core" in Path(f"/proc/{pid}/cmdline").read_text()]
        os.kill(core, signal.SIGKILL)
        os.waitpid(core, 0)
        shutil.rmtree(out / "mlflow")
        (out / "mlflow").touch()
"""
    need("proc", Path("/proc/self/task").exists(), "there is no /proc")
    done = python("-W", "ignore::ResourceWarning", "-c", LIVE + code, str(out))
    assert [one["round"] for one in metrics(out)] == [1, 2, 3, 4, 5]
    said = done.stderr.splitlines()
    assert len(said) == 2, done.stderr
    failed = {"WARNING: --log_to wandb failed", "WARNING: --log_to mlflow failed"}
    assert {line.split(" (")[0] for line in said} == failed
    assert all(line.endswith("); continuing without it") for line in said)


def test_a_store_that_does_not_answer_is_a_mistake_at_the_start_and_a_warning_later(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        nobody = f"http://127.0.0.1:{server.getsockname()[1]}"
    store = {"MLFLOW_TRACKING_URI": nobody, "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
    code = """
from fedmpi.errors import UserError
try:
    list(live(0, 2, 1.0))
except UserError as error:
    print(error)
with Log(out, 1, ["wandb"], speaks=True) as log:
    log.round(report(1, 1.0))
print(list(live(1, 2, 1.0)))
"""
    done = python("-c", LIVE + code, str(tmp_path / "run"), **store)
    said = done.stdout.splitlines()
    assert said[0].startswith("--log_to mlflow cannot start (ConnectionRefusedError: ") and "leave it out" in said[0]
    assert said[-1] == "[2]" and [one["round"] for one in metrics(tmp_path / "run")] == [1, 2]
    assert done.stderr.count("WARNING: --log_to mlflow failed (ConnectionRefusedError: ") == 1, done.stderr


class Broken(Sink):
    """A tool that takes so many rounds and no more."""

    takes = 0

    def __init__(self, about: About) -> None:
        self.taken = 0

    def add(self, numbers: dict[str, Any], step: int) -> None:
        self.taken += 1
        if self.taken > self.takes:
            raise OSError(28, "No space left on device")

    def end(self, record: dict[str, Any], more: dict[str, Any]) -> None:
        raise AssertionError("nothing was measured at the end")

    def close(self, how: str) -> None:
        raise RuntimeError("closed already,\n  twice") from None


@pytest.mark.parametrize(
    ("takes", "why"), [(1, "OSError: No space left on device"), (9, "RuntimeError: closed already, twice")]
)
def test_a_failure_is_reported_once(
    takes: int, why: str, tmp_path: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch.setitem(sinks.SINKS, "tensorboard", Broken)
    patch.setattr(Broken, "takes", takes)
    with Log(tmp_path, 4, ["tensorboard"], speaks=True) as log:
        for round in range(1, 5):
            log.round(Report(round, 2, (), 1.0, 0.5, 0.5, 8, SECONDS))
    [said] = caplog.records
    assert said.getMessage() == f"--log_to tensorboard failed ({why}); continuing without it"
    assert len(metrics(tmp_path)) == 4


@pytest.mark.parametrize("how", ["removed", "a file"])
def test_a_tensorboard_folder_that_is_removed_is_one_warning(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """And no traceback of a thread, which pytest would take for a failure, too."""
    with Log(tmp_path, 6, ["tensorboard"], speaks=True, quiet=True) as log:
        for round in range(1, 7):
            if round == 3:
                shutil.rmtree(tmp_path / "tensorboard")
                if how == "a file":
                    (tmp_path / "tensorboard").touch()
            log.round(Report(round, 2, (), 1.0, 0.5, 0.5, 8, SECONDS))
    [said] = caplog.messages
    assert said.startswith("--log_to tensorboard failed (") and said.endswith("; continuing without it")
    assert [one["round"] for one in metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert capfd.readouterr() == ("", "")


# What is not installed

BLOCKED = """
import sys
class Nothing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"wandb", "mlflow", "alembic"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Nothing())
from fedmpi.commands import main
"""


def test_without_the_packages_everything_else_works(tmp_path: Path) -> None:
    code = f"""
def run(*more):
    return main(["train", *{TINY.split()!r}, "--rounds", "1", "--log_to", *more])

import fedmpi, fedmpi.api, fedmpi.runs.sinks
assert run("wandb", "--out", {str(tmp_path / "a")!r}) == 2
assert run("tensorboard,mlflow", "--out", {str(tmp_path / "b")!r}) == 2
assert run("tensorboard", "--out", {str(tmp_path / "c")!r}) == 0
"""
    done = python("-c", BLOCKED + code)
    message = (
        "fedmpi: --log_to {0} needs the package {0}, which cannot be imported (No module named '{0}'); "
        "pip install 'fedmpi[{0}]', or leave it out"
    )
    assert done.stderr.splitlines() == [message.format("wandb"), message.format("mlflow")]
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_a_folder_of_that_name_is_no_package(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wandb").mkdir()
    patch.setattr(sys, "path", [str(tmp_path), *(path for path in sys.path if "site-packages" not in path)])
    patch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UserError, match=r"--log_to wandb needs the package wandb, .*\(No module named 'wandb'\)"):
        sink_names("wandb")


def test_a_damaged_package_is_reported_too(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(sys.modules, "wandb.proto", None)
    with pytest.raises(UserError, match=r"--log_to wandb needs the package wandb.proto, which cannot be imported \("):
        sinks.base.imported("wandb", "wandb.proto")


def test_each_tool_is_reported_once() -> None:
    assert sink_names("wandb, mlflow,wandb") == ["wandb", "mlflow"]


# Parts


def test_nested_numbers_are_joined_by_slashes() -> None:
    record = {"round": 3, "loss": None, "names": [1, 2], "a": {"b": 0.5, "c": {"d": 1, "e": None}}, "word": "x"}
    assert scalars(record) == {"round": 3, "a/b": 0.5, "a/c/d": 1}


def test_tensorboard_shows_layers(tmp_path: Path) -> None:
    layers = {"conv1.weight": {"agreement": 0.25, "below_tau": 0.5}}
    for done, rounds in ((0, 3), (1, 2)):  # the second life repeats round 2
        with Log(tmp_path, 3, ["tensorboard"], True, done=done, records=fedmpi_metrics.history(tmp_path, done)) as log:
            for round in range(done + 1, rounds + 1):
                log.round(Report(round, 2, (), 1.0, 0.5, 0.5, 8, SECONDS, measures={"layers": layers}))
    read = by_tensorboard(tmp_path)
    assert read["layers/conv1.weight/agreement"] == {1: 0.25, 2: 0.25}
    assert read["layers/conv1.weight/below_tau"] == {1: 0.5, 2: 0.5}


def test_a_run_has_one_id_until_its_rounds_come_again_with_other_knobs(tmp_path: Path) -> None:
    def id(done: int, last: int, **config: Any) -> str:
        if (tmp_path / "rounds.txt").exists():
            with open(tmp_path / "rounds.txt", "a") as file:
                file.write(f"{id_in(tmp_path)} {last}\n")
        tool = SinkWithRuns(tmp_path, About(tmp_path, done, config))
        assert tool.last == (0 if tool.new else last)
        return tool.id

    first = id(0, 0, lr=0.1, rounds=5)
    assert first == id_in(tmp_path) == id(3, 5, lr=0.1, rounds=5)
    assert id(3, 5, lr=0.1, rounds=9, out="b", **{"checkpoint.every": 2}) == first, "not what is trained"
    assert id(5, 5, lr=0.2) == first, "resumes with other knobs: no round is repeated"
    assert id(5, 7, lr=0.2) == first
    assert id(5, 7, lr=0.3) != first
    (tmp_path / "rounds.txt").unlink()
    assert SinkWithRuns(tmp_path, About(tmp_path, 6, {"lr": 0.3})).last == 6, "of a version that did not mark rounds"
    (tmp_path / "fedmpi.json").write_text('{"id": "../../x"}')
    assert SinkWithRuns(tmp_path, About(tmp_path, 0)).new


def test_what_was_measured_at_the_end_is_there_too(tmp_path: Path) -> None:
    code = """
with Log(out, 2, ["tensorboard", "wandb", "mlflow"], True, quiet=True) as log:
    for round in (1, 2):
        log.round(report(round, 1.0))
    more = {"attack": {"auc": 0.5}}
    last = report(2, 1.0)
    log.end(Report(**{**vars(last), "measures": last.measures | more}), more)
"""
    python("-c", LIVE + code, str(tmp_path / "run"))
    out = tmp_path / "run"
    assert [one.get("attack") for one in metrics(out)] == [None, {"auc": 0.5}]
    assert by_tensorboard(out)["attack/auc"] == {2: 0.5}
    [(_, rounds)] = by_mlflow(out, "attack/auc")
    assert rounds == [{"attack/auc": 0.5}]
    [records] = by_wandb(out)
    updates = [update for record in records if record["type"] == "summary" for update in record["summary"]["update"]]
    assert "attack" in json.dumps(updates) and len(history([records])) == 2


def test_a_store_is_not_put_where_a_path_ends_early(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="store cannot be in .*'?' ends a URI"):
        address(tmp_path / "why?" / "mlflow.db")
    assert address(tmp_path / "a b" / "mlflow.db") == f"sqlite:///{tmp_path}/a b/mlflow.db"

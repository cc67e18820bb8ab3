"""One run from a configuration to a folder: what it leaves, what repeats, and what it refuses before it starts."""

from __future__ import annotations

import hashlib
import json
import math
import stat
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import federation
import numpy as np
import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
import yaml
from conftest import rank_environment
from safetensors.torch import load_file
from shell import ALONE, CLASSES, CPU, data_row, metrics, sandbox, settings_of, tiny, train, without_seconds
from torch import nn

from fedmpi import data
from fedmpi.algorithms import ALGORITHMS
from fedmpi.clients.task import Scored, Task, choose_tests
from fedmpi.comm import Comm, SoloComm, from_first
from fedmpi.comm.blocks import NodeBlocks
from fedmpi.comm.threads import run_threads
from fedmpi.data.splits import Partition, SplitSpec, split
from fedmpi.errors import RunError, UserError
from fedmpi.models import find_model, make_model
from fedmpi.runs import config
from fedmpi.runs.build import Overrides, prepare
from fedmpi.runs.config import Config, Eval, Local, Meta, Server, Skew, Step
from fedmpi.runs.folder import check, make
from fedmpi.runs.options import parse
from fedmpi.runs.run import compare_ranks, fingerprint_of, run, same_everywhere, trained_tensors, trained_views

FILES = {"config.yaml", "environment.json", "partition.json", "metrics.jsonl", "model.safetensors", "finished.json"}
FILES |= {"checkpoints", "starts.jsonl", "lock"}
KEYS = {
    "round",
    "client_bytes_up",
    "client_bytes_down",
    "test_accuracy",
    "test_loss",
    "train_loss",
    "clients",
    "dropped",
    "dropped_clients",
    "kept",
    "agreement",
    "bytes_sent",
    "bytes_between_nodes",
    "seconds",
}
SECONDS = {"local", "wait", "reduce", "server", "gather", "meta", "eval"}


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


def sha256(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def finished(out: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((out / "finished.json").read_text())
    return record


# What a run leaves


def test_a_run_leaves_the_documented_files_and_no_others(tmp_path: Path) -> None:
    train(settings_of(tmp_path / "bare"))
    assert {path.name for path in (tmp_path / "bare").iterdir()} == FILES
    train(settings_of(tmp_path / "full", log_to="tensorboard"))
    assert {path.name for path in (tmp_path / "full").iterdir()} == FILES | {"tensorboard"}
    assert len(list((tmp_path / "full" / "tensorboard").iterdir())) == 1


def test_the_folder_is_private_and_its_parents_are_made(tmp_path: Path) -> None:
    out = tmp_path / "a" / "b" / "run"
    train(settings_of(out))
    assert stat.S_IMODE(out.stat().st_mode) == 0o700


def test_metrics_have_every_key_every_round(tmp_path: Path) -> None:
    train(settings_of(tmp_path, eval=Eval(every=2), rounds=3))
    rounds = metrics(tmp_path)
    assert [r["round"] for r in rounds] == [1, 2, 3]
    for r in rounds:
        assert set(r) == KEYS and set(r["seconds"]) == SECONDS
        assert all(t >= 0 for t in r["seconds"].values())
        assert 0 <= r["kept"] <= 1 and 0 <= r["agreement"] <= 1 and r["train_loss"] > 0
        assert (r["clients"], r["dropped"], r["dropped_clients"], r["bytes_sent"]) == (4, 0, [], 0)


def test_rounds_between_evaluations_are_not_scored_but_the_last_is(tmp_path: Path) -> None:
    train(settings_of(tmp_path, rounds=5, eval=Eval(every=2)))
    scored = [r["round"] for r in metrics(tmp_path) if r["test_accuracy"] is not None]
    assert scored == [2, 4, 5]
    assert all((r["test_loss"] is None) == (r["test_accuracy"] is None) for r in metrics(tmp_path))
    assert all((r["seconds"]["eval"] == 0) == (r["test_accuracy"] is None) for r in metrics(tmp_path))


@pytest.mark.parametrize("name", ["logistic", "lenet"])
def test_the_model_loads_into_plain_torch_and_scores_what_was_reported(tmp_path: Path, name: str) -> None:
    report = train(settings_of(tmp_path, model=name, rounds=6))
    arrays = tiny()
    model = make_model(name, find_model(name), arrays.offers, "tiny")
    model.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    images = (arrays.test_x.float() / 255 - arrays.mean[0]) / arrays.std[0]
    with torch.no_grad():
        logits = model.eval()(images)
    assert report.test_accuracy == float((logits.argmax(1) == arrays.test_y).sum()) / 60
    assert report.test_loss == pytest.approx(float(F.cross_entropy(logits, arrays.test_y)), abs=1e-5)
    last = metrics(tmp_path)[-1]
    assert (last["test_accuracy"], last["test_loss"]) == (report.test_accuracy, report.test_loss)


class Tied(nn.Module):
    """Two names of one weight, and one in channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 3, 3)
        self.encode, self.decode = nn.Linear(12, 12), nn.Linear(12, 12)
        self.decode.weight = self.encode.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lines = x.mean((1, 2)) + self.second(self.first(x)).mean((1, 2, 3))[:, None]
        return self.decode(torch.tanh(self.encode(lines)))[:, :3]


def test_the_model_is_written_without_a_copy_of_it(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path, rounds=1, step=Step(layout="channels_last"))
    outcome = run(prepare(cfg, Overrides(model=Tied())), SoloComm(), ALONE, CPU, {})
    views, copies = trained_views(outcome.task, outcome.state), trained_tensors(outcome.task, outcome.state)
    vector = outcome.task.x_N.untyped_storage().data_ptr()
    shared = {name for name, t in views.items() if t.untyped_storage().data_ptr() == vector}
    assert views.keys() - shared == {"second.weight", "decode.weight"}, "another order, and a second name"
    assert not any(t.untyped_storage().data_ptr() == vector for t in copies.values())
    content = (tmp_path / "model.safetensors").read_bytes()
    assert content == safetensors.torch.save(copies, metadata={"format": "pt"})
    assert json.loads((tmp_path / "finished.json").read_text())["model_sha256"] == hashlib.sha256(content).hexdigest()
    usual, written = (stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("finished.json", "model.safetensors"))
    assert usual == written


def test_a_run_learns(tmp_path: Path) -> None:
    report = train(settings_of(tmp_path, rounds=5))
    assert report.test_accuracy is not None and report.test_accuracy > 0.9
    assert metrics(tmp_path)[-1]["train_loss"] < metrics(tmp_path)[0]["train_loss"]


def test_the_mark_of_a_finished_run_holds_its_outcome(tmp_path: Path) -> None:
    report = train(settings_of(tmp_path, rounds=4))
    done = finished(tmp_path)
    assert done["rounds"] == 4 and done["model_sha256"] == sha256(tmp_path)
    assert (done["test_accuracy"], done["test_loss"]) == (report.test_accuracy, report.test_loss)
    assert done["best_test_accuracy"] == max(r["test_accuracy"] for r in metrics(tmp_path))


def test_the_partition_is_written_as_it_was_dealt(tmp_path: Path) -> None:
    train(settings_of(tmp_path, split="classes", skew=Skew(classes=1), clients=6, cohort=2, seed=4))
    written = json.loads((tmp_path / "partition.json").read_text())
    dealt = split(SplitSpec("classes", tiny().y.numpy(), 6, 4, classes_per_client=1))
    assert written["sha256"] == dealt.manifest(tiny().y.numpy(), CLASSES)["sha256"]
    assert (written["data"], written["split"], written["seed"], written["clients"]) == ("tiny", "classes", 4, 6)
    assert written["skew"]["classes"] == 1
    assert all(sum(count > 0 for count in row) == 1 for row in written["histogram"])


def test_the_environment_is_recorded(tmp_path: Path) -> None:
    train(settings_of(tmp_path))
    written = json.loads((tmp_path / "environment.json").read_text())
    assert written["versions"]["torch"] == torch.__version__
    assert (written["launcher"], written["size"], written["device"]) == ("alone", 1, "cpu")
    assert written["threads"] == torch.get_num_threads()


def test_the_written_configuration_is_the_resolved_one(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path, algorithm="fedyogi", local=Local(batch=10))
    train(cfg)
    written = yaml.safe_load((tmp_path / "config.yaml").read_text())
    row = ALGORITHMS["fedyogi"]
    assert (written["local"]["rule"], written["local"]["lr"]) == (row.local, 0.01)
    assert (written["server"]["rule"], written["server"]["lr"]) == (row.server, row.defaults.get("server.lr", 1.0))
    assert written["server"]["momentum"] == row.defaults.get("server.momentum", 0.0)
    assert (written["server"]["b2"], written["server"]["eps"]) == (0.99, 1e-3)
    threads, step = torch.get_num_threads(), Step(layout="contiguous")  # the choices are written down: they decide bits
    assert parse(["--config", str(tmp_path / "config.yaml")]) == replace(prepare(cfg).cfg, threads=threads, step=step)


# Every algorithm


@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_the_written_configuration_of_every_algorithm_reads_back_and_repeats_the_run(tmp_path: Path, name: str) -> None:
    held = Meta(size=30, weights=[2.0, 1.0, 1.0]) if ALGORITHMS[name].defaults.get("meta.size") else Meta()
    work = Local(batch=10, work="uniform:0.5,1.0", schedule="warmup:1+cosine", option="I", gradient="initial")
    cfg = settings_of(tmp_path / "first", algorithm=name, rounds=2, local=work, meta=held)
    train(cfg)
    read = parse(["--config", str(tmp_path / "first" / "config.yaml")])
    assert read == replace(prepare(cfg).cfg, threads=torch.get_num_threads(), step=Step(layout="contiguous"))
    train(replace(read, out=str(tmp_path / "again")))
    assert sha256(tmp_path / "first") == sha256(tmp_path / "again")
    assert without_seconds(metrics(tmp_path / "first")) == without_seconds(metrics(tmp_path / "again"))
    assert {path.name for path in (tmp_path / "first").iterdir()} == FILES, "no memory is left behind"


def test_every_algorithm_learns_and_is_another_model(tmp_path: Path) -> None:
    models = {}
    for name in ALGORITHMS:
        held = Meta(size=30) if ALGORITHMS[name].defaults.get("meta.size") else Meta()
        report = train(settings_of(tmp_path / name, algorithm=name, rounds=6, local=Local(batch=10), meta=held))
        models[name] = sha256(tmp_path / name)
        assert report.test_accuracy is not None and report.test_accuracy > 0.6, name
    assert len(set(models.values())) == len(ALGORITHMS)


@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_memories_lie_where_they_were_asked_for_and_change_no_bit(
    tmp_path: Path, patch: pytest.MonkeyPatch, limit: float
) -> None:
    made: set[str] = set()
    on_disk = NodeBlocks.on_disk

    def watched(self: NodeBlocks, sizes: Sequence[int], folder: Path) -> torch.Tensor:
        made.add(str(folder))
        return on_disk(self, sizes, folder)

    patch.setattr(NodeBlocks, "on_disk", watched)
    patch.setattr("fedmpi.local.memory.BLOCK_BYTES", 1 << 12)
    (tmp_path / "disk").mkdir()
    train(settings_of(tmp_path / "usual", algorithm="scaffold"))
    assert made == set(), "4 GiB are enough for this one"
    for out, folder in (("a", None), ("b", str(tmp_path / "disk"))):
        train(settings_of(tmp_path / out, algorithm="scaffold", memory=config.Memory(limit=limit, folder=folder)))
        assert sha256(tmp_path / out) == sha256(tmp_path / "usual")
    assert made == ({str(tmp_path / "a"), str(tmp_path / "disk")} if limit == 0 else set())
    assert list((tmp_path / "disk").iterdir()) == []


# What repeats


def test_the_written_configuration_repeats_the_run_bit_for_bit(tmp_path: Path) -> None:
    first, again = tmp_path / "first", tmp_path / "again"
    train(settings_of(first, algorithm="fedadam", mask="and", tau=0.6, seed=11, local=Local(lr=0.03, steps=5, batch=7)))
    train(parse(["--config", str(first / "config.yaml"), "--out", str(again)]))
    assert sha256(first) == sha256(again)
    assert without_seconds(metrics(first)) == without_seconds(metrics(again))
    assert (first / "partition.json").read_bytes() == (again / "partition.json").read_bytes()
    assert finished(first) == finished(again)


def test_another_seed_is_another_model(tmp_path: Path) -> None:
    for seed in (0, 0, 1):
        out = tmp_path / f"{seed}-{(tmp_path / f'{seed}-False').exists()}"
        train(settings_of(out, seed=seed))
    assert sha256(tmp_path / "0-False") == sha256(tmp_path / "0-True")
    assert sha256(tmp_path / "0-False") != sha256(tmp_path / "1-False")


def test_what_happened_before_in_the_process_does_not_matter(tmp_path: Path) -> None:
    train(settings_of(tmp_path / "a", model="lenet"))
    torch.manual_seed(99), torch.rand(5)
    train(settings_of(tmp_path / "b", model="lenet"))
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")


def test_scoring_less_often_or_in_other_blocks_changes_no_model(tmp_path: Path) -> None:
    often = train(settings_of(tmp_path / "a"))
    seldom = train(settings_of(tmp_path / "b", eval=Eval(every=3, batch=7)))
    assert sha256(tmp_path / "a") == sha256(tmp_path / "b")
    assert often.test_accuracy == seldom.test_accuracy


@pytest.mark.parametrize("seed", [0, 1])
def test_fewer_test_samples_are_always_the_same_ones(tmp_path: Path, seed: int) -> None:
    cfg = settings_of(tmp_path / "few", seed=seed, rounds=1, eval=Eval(batch=7, samples=20))
    report = train(cfg)
    train(settings_of(tmp_path / "all", seed=seed, rounds=1))
    assert sha256(tmp_path / "few") == sha256(tmp_path / "all"), "what is scored changes no model"
    some, arrays = choose_tests(60, 20), tiny()
    model = make_model("logistic", find_model("logistic"), arrays.offers, "tiny")
    model.load_state_dict(load_file(tmp_path / "few" / "model.safetensors"))
    with torch.no_grad():
        logits = model((arrays.test_x[some].float() / 255 - arrays.mean[0]) / arrays.std[0])
    assert report.test_accuracy == int((logits.argmax(1) == arrays.test_y[some]).sum()) / 20
    assert report.test_loss == pytest.approx(float(F.cross_entropy(logits, arrays.test_y[some])), abs=1e-5)
    together = run_threads(3, lambda comm: run(prepare(replace(cfg, out=str(tmp_path / "3"))), comm, ALONE, CPU, {}))
    assert [(r.last.test_metric, r.last.test_loss) for r in together] == [(report.test_metric, report.test_loss)] * 3


def test_more_test_samples_than_there_are_is_all_of_them(tmp_path: Path) -> None:
    reports = [train(settings_of(tmp_path / str(n), eval=Eval(samples=n))) for n in (None, 60, 1000)]
    assert len({(r.test_metric, r.test_loss) for r in reports}) == 1


def test_the_data_sets_own_augmentation_is_used_unless_another_is_given(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    patch.setitem(data.DATASETS, "flipped", data_row(lambda root: replace(tiny(), augment="flip")))
    shas = {}
    for name, given in (("tiny", None), ("tiny", "flip"), ("flipped", None), ("flipped", "none"), ("tiny", "crop:1")):
        train(settings_of(tmp_path / f"{name}-{given}", data=name, augment=given))
        shas[name, given] = sha256(tmp_path / f"{name}-{given}")
    assert shas["flipped", None] == shas["tiny", "flip"] and shas["flipped", "none"] == shas["tiny", None]
    assert len(set(shas.values())) == 3
    train(parse(["--config", str(tmp_path / "tiny-flip" / "config.yaml"), "--out", str(tmp_path / "again")]))
    assert sha256(tmp_path / "again") == shas["tiny", "flip"]


def test_model_and_skew_are_those_of_the_data_set_unless_given(patch: pytest.MonkeyPatch) -> None:
    patch.setitem(data.DATASETS, "own", replace(data_row(tiny), model="logistic", classes=7))
    cfg = prepare(Config(data="own")).cfg
    assert (cfg.model, cfg.skew.classes) == ("logistic", 7)
    cfg = prepare(Config(data="own", model="lenet", skew=Skew(classes=3))).cfg
    assert (cfg.model, cfg.skew.classes) == ("lenet", 3)


def test_the_mask_and_tau_change_the_model_and_tau_0_is_the_mean(tmp_path: Path) -> None:
    shas = {}
    for mask, tau in [("mean", 0.9), ("gma", 0.9), ("and", 0.9), ("gma", 0.0), ("and", 0.0)]:
        out = tmp_path / f"{mask}{tau}"
        train(settings_of(out, mask=mask, tau=tau))
        shas[mask, tau] = sha256(out)
    assert len({shas["mean", 0.9], shas["gma", 0.9], shas["and", 0.9]}) == 3
    assert shas["gma", 0.0] == shas["and", 0.0] == shas["mean", 0.9]


# Folders


def test_a_finished_run_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    train(settings_of(tmp_path))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="already holds a finished run; choose another folder or remove it"):
        train(settings_of(tmp_path, seed=1))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_somebodys_other_files_are_refused_and_left(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match="holds files that are no run of fedmpi"):
        train(settings_of(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    train(settings_of(tmp_path))
    assert (tmp_path / "finished.json").exists()


def test_an_unfinished_run_is_started_over(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    broken, whole = tmp_path / "broken", tmp_path / "whole"
    with pytest.raises(RunError, match="0 of 4 clients"):
        train(settings_of(broken, local=Local(lr=1e38)))
    assert (broken / "config.yaml").exists() and not (broken / "finished.json").exists()
    (broken / "metrics.jsonl").write_text('{"round": 1}\n{"rou')
    train(settings_of(broken))
    train(settings_of(whole))
    assert {path.name for path in broken.iterdir()} == FILES
    assert sha256(broken) == sha256(whole)
    assert without_seconds(metrics(broken)) == without_seconds(metrics(whole))


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UserError, match=r"taken cannot be read \(Not a directory\); choose another folder"):
        train(settings_of(tmp_path / "taken"))
    with pytest.raises(UserError, match=r"taken/run cannot be written \(Not a directory\); choose a folder that can"):
        train(settings_of(tmp_path / "taken" / "run"))
    assert (tmp_path / "taken").read_text() == "mine"


def test_a_link_to_nowhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="link cannot be written"):
        train(settings_of(tmp_path / "link"))


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def full(self: Path) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(Path, "touch", full)
    with pytest.raises(UserError, match=r"cannot be written \(No space left on device\)"):
        make(tmp_path / "run")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    def forbidden(self: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    patch.setattr(Path, "iterdir", forbidden)
    with pytest.raises(UserError, match=r"cannot be read \(Permission denied\)"):
        check(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": "mnist"}, "data set 'mnist' is not under .*FEDMPI_OFFLINE forbids a download"),
        ({"clients": 201}, "201 clients"),
        ({"split": "natural", "clients": 21}, "21 clients, but the data have 20 owners"),
        ({"split": "natural", "skew": Skew(owners="merg")}, "unknown .*'merg'; did you mean 'merge'"),
        ({"split": "feature"}, "split 'feature'"),
        ({"data": "small", "model": "gru"}, "model 'gru' takes sequences; 'tiny' has images"),
        ({"data": "small", "model": "lenet"}, "lenet and cnn need images of at least 12x12; these are 5x5"),
    ],
)
def test_data_that_are_not_there_or_do_not_do_leave_no_folder(
    tmp_path: Path, patch: pytest.MonkeyPatch, changes: dict[str, Any], message: str
) -> None:
    def small(root: Path | None) -> data.Arrays:
        whole = tiny()
        return replace(whole, x=whole.x[..., :5, :5], test_x=whole.test_x[..., :5, :5])

    patch.setitem(data.DATASETS, "small", data_row(small))
    patch.setenv("FEDMPI_OFFLINE", "1")
    out, root = tmp_path / "run", tmp_path / "data"
    with pytest.raises(UserError, match=message):
        train(settings_of(out, data_root=str(root), **changes))
    assert not out.exists() and not root.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tau": 2.0}, "--tau is 2.0"),
        ({"data": "mnits"}, "unknown data set 'mnits'; did you mean 'mnist'"),
        ({"split": "clases"}, "unknown split 'clases'; did you mean 'classes'"),
        ({"sum": "exat"}, "unknown --sum 'exat'; did you mean 'exact'"),
        ({"model": "lent"}, "unknown model 'lent'; did you mean 'lenet'"),
        ({"log_to": "tensorboard,wand"}, "unknown sink"),
        ({"algorithm": "fedav"}, "unknown algorithm 'fedav'; did you mean 'fedavg'"),
        ({"mask": "sant"}, "unknown mask 'sant'; did you mean 'sand'"),
        ({"local": Local(work="ful")}, "unknown --local.work 'ful'; did you mean 'full'"),
        ({"local": Local(schedule="const")}, "unknown --local.schedule 'const'; "),
        ({"augment": "flop"}, "unknown --augment 'flop'; did you mean 'flip'"),
        ({"augment": "crop:0"}, "--augment is 'crop:0'; crop needs a whole number"),
        ({"meta": Meta(weights=[0.0])}, r"--meta.weights are \[0.0\]"),
    ],
)
def test_what_needs_no_data_is_found_first(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prepare(replace(Config(), **changes))


def test_the_folder_is_named_after_the_run_unless_given() -> None:
    named = replace(Config(), algorithm="fedyogi", mask="and", data="tiny", seed=3)
    assert prepare(named).out == Path("runs/fedyogi-and-tiny-3")
    assert prepare(replace(Config(), out="here")).out == Path("here")


# What may go wrong on the way


def test_a_client_that_fails_is_left_out_and_named(
    tmp_path: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepared = prepare(settings_of(tmp_path, clients=4, rounds=2))
    sound = prepared.algorithm.local

    def rule(job: Any) -> Any:
        result = sound(job)
        if job.cid == 2:
            result.delta_P.fill_(math.nan)
        return result

    prepared = replace(prepared, algorithm=replace(prepared.algorithm, local=replace(sound, run=rule)))
    run(prepared, SoloComm(), ALONE, CPU, {})
    assert [(r["clients"], r["dropped"], r["dropped_clients"]) for r in metrics(tmp_path)] == [(3, 1, [2])] * 2
    assert [r.getMessage().partition(":")[0] for r in caplog.records] == ["round 1", "round 2"]
    assert "client 2 left out" in caplog.text


def test_a_model_that_has_diverged_is_scored_as_null(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr("fedmpi.clients.task.Task.score", lambda self, blocks, **_: (Scored(0, math.nan, 25) for _ in blocks))
    report = train(settings_of(tmp_path, rounds=1))
    assert report.test_loss is not None and math.isnan(report.test_loss)
    assert metrics(tmp_path)[0]["test_loss"] is None and metrics(tmp_path)[0]["test_accuracy"] == 0
    assert finished(tmp_path)["test_loss"] is None


def test_ranks_started_differently_are_refused_on_all_of_them() -> None:
    def work(comm: Comm) -> str:
        try:
            same_everywhere("configuration", comm, b"seed 1" if comm.rank == 2 else b"seed 0")
        except UserError as error:
            return str(error)
        return "went on"

    said = run_threads(3, work)
    assert said == ["ranks [2] have another configuration than rank 0; give all ranks the same"] * 3


def test_ranks_started_alike_continue() -> None:
    assert run_threads(3, lambda comm: same_everywhere("configuration", comm, b"seed 0")) == [None] * 3


@pytest.mark.parametrize("value", [None, "", [3, None], {"a": {"b": 0.1}, "ä": "\0"}])
def test_all_ranks_get_the_value_of_the_first(value: Any) -> None:
    assert run_threads(3, lambda comm: from_first(comm, comm.rank or value)) == [value] * 3
    assert from_first(SoloComm(), value) == value


def test_a_reader_that_goes_away_does_not_end_the_run(tmp_path: Path) -> None:
    """`fedmpi train ... | head -n 1`"""
    options = "--rounds 2 --clients 20 --cohort 2 --local.steps 1 --threads 1 --log_to none".split()
    command = [sys.executable, "-m", "fedmpi", "train", *options, "--out", str(tmp_path / "run")]
    job = subprocess.Popen(command, env=rank_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    job.stdout.readline()
    job.stdout.close()
    with job.stderr:
        said = job.stderr.read()
    assert job.wait(60) == 0, said
    assert said == "" and (tmp_path / "run" / "finished.json").exists()


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ({}, "runs/fedavg-mean-glyphs-0"),
        ({"local": Local(rule="prox")}, "runs/fedavg-prox-mean-glyphs-0"),
        (
            {"local": Local(rule="prox"), "server": Server(rule="yogi"), "seed": 3},
            "runs/fedavg-prox-yogi-mean-glyphs-3",
        ),
        ({"algorithm": "fedprox", "local": Local(rule="prox"), "mask": "gma"}, "runs/fedprox-gma-glyphs-0"),
    ],
)
def test_the_default_folder_names_the_rules_that_are_not_the_algorithms_own(changes: dict, folder: str) -> None:
    assert prepare(Config(**changes)).out == Path(folder)


def test_ranks_with_other_models_data_or_splits_are_refused_on_all_of_them() -> None:
    def task(features: int = 36, cut: int = 5, tests: int = 0) -> Task:
        data = federation.arrays()
        test_y = data.test_y if not tests else (data.test_y + 1) % 3
        whole = federation.partition()
        part = Partition(np.concatenate([[0, cut], whole.offsets[2:]]), whole.order)
        model = nn.Sequential(nn.Flatten(), nn.Linear(36, features), nn.Linear(features, 3))
        return Task(model, replace(data, test_y=test_y), part, seed=0, device=CPU)

    prepared = prepare(Config())
    meta = np.zeros(0, dtype=np.int64)
    changes: dict[str, dict[str, int]] = {"model": {"features": 35}, "data set or split of it": {"cut": 6}}
    for what, change in [*changes.items(), ("data set or split of it", {"tests": 1}), ("", {})]:
        tasks = [task(), task(**change)]
        datas = [replace(federation.arrays(), test_y=t.feed.test_y) for t in tasks]

        def work(comm: Comm, tasks: Any = tasks, datas: Any = datas) -> str:
            try:
                compare_ranks(fingerprint_of(prepared, tasks[comm.rank], datas[comm.rank], meta, CPU), comm)
            except UserError as error:
                return str(error)
            return ""

        expected = f"ranks [1] have another {what} than rank 0; give all ranks the same" if what else ""
        assert run_threads(2, work) == [expected] * 2


def test_a_threshold_that_no_mask_reads_is_refused() -> None:
    for changes in ({"tau": 0.3}, {"algorithm": "scaffold", "tau": 0.9}):
        with pytest.raises(UserError, match="averages plainly unless a mask is named; add --mask gma"):
            prepare(Config(**changes))
    for changes in (
        {"tau": 0.3, "mask": "gma"},
        {"tau": 0.3, "mask": "mean"},
        {"tau": 0.0},
        {"tau": 0.3, "evaluate": "agreement"},
        {"tau": 0.3, "algorithm": "fedgma2021"},
    ):
        prepare(Config(**changes))

"""What the papers train, on their real data: every pair of data set and model learns, ResNets have the same bits on one
and two ranks, and a GRU learns Shakespeare's characters."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import realdata
import torch
from conftest import need, rank_environment
from shell import ALONE, CPU, metrics, sandbox

from fedmpi.clients.feed import Batch
from fedmpi.comm import SoloComm
from fedmpi.data import Arrays, load
from fedmpi.runs.build import Overrides, load_data, make_task, prepare
from fedmpi.runs.config import Config, Eval, Local, Skew
from fedmpi.runs.run import Outcome, run

RESNETS = ("resnet18-gn", "resnet18-bn")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with everything that there is, in the public layouts."""
    folder, shared = tmp_path_factory.mktemp("root"), realdata.shared_data()
    system = Path("/usr/share/datasets/fashion-mnist")
    need("data", system.is_dir(), "Debian's dataset-fashion-mnist is not installed")
    for name, target in {
        "MNIST": shared / "mnist" / "MNIST",
        "QMNIST/raw": shared / "mnist" / "QMNIST-writers",
        "FashionMNIST/raw": system,
        "shakespeare/train": shared / "shakespeare" / "leaf" / "train",
        "shakespeare/test": shared / "shakespeare" / "leaf" / "test",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(target)
    realdata.cifar10_layout(folder)
    realdata.cifar100_layout(folder)
    realdata.tiny_layout(folder)
    return folder


def some_of(arrays: Arrays, count: int) -> Arrays:
    """The data with that many train samples, of four classes where there are more, and a few test samples."""
    few = np.unique(arrays.y.numpy())[:4]
    able = np.flatnonzero(np.isin(arrays.y.numpy(), few))
    chosen = torch.from_numpy(np.random.default_rng(0).choice(able, count, replace=False))
    strata = None if arrays.strata is None else arrays.strata[chosen]
    cut = replace(arrays, x=arrays.x[chosen], y=arrays.y[chosen], owner=None, strata=strata)
    return replace(cut, test_x=arrays.test_x[:20], test_y=arrays.test_y[:20])


def loss_on_all(outcome: Outcome) -> float:
    """The trained model's loss on every train sample, in training mode with fixed draws."""
    return loss_of(outcome.task, outcome.state.model_N)


def loss_of(task: Any, model_N: torch.Tensor) -> float:
    task.load(model_N, task.start()[1])
    task.model.train()
    order = torch.from_numpy(np.sort(task.partition.order))
    with torch.no_grad():
        losses = [float(task.loss(Batch(part, 5))) * len(part) for part in torch.split(order, 16)]
    return sum(losses) / len(order)


# data set, model, split, samples, steps of a client in each of two rounds, learning rate
PAIRS = [
    ("mnist", "lenet", "classes", 64, 6, 0.05),
    ("mnist", "logistic", "classes", 64, 6, 0.01),
    ("fmnist", "lenet", "classes", 64, 6, 0.05),
    ("cifar10", "resnet18-gn", "classes", 16, 3, 0.01),
    ("cifar10", "resnet18-gn", "quantity", 16, 3, 0.01),
    ("cifar10", "resnet18-bn", "classes", 16, 3, 0.01),
    ("cifar10", "cnn", "iid", 64, 6, 0.05),
    ("cifar100", "resnet18-gn", "classes", 16, 3, 0.01),
    ("tinyimagenet", "resnet18-gn", "classes", 8, 2, 0.01),
    ("femnist", "lenet", "iid", 64, 6, 0.05),
    ("femnist", "cnn", "iid", 64, 8, 0.05),
    ("fedcmnist", "lenet", "feature", 64, 8, 0.01),
    ("fedcmnist", "cnn", "mixed", 64, 8, 0.01),
    ("fedrotmnist", "lenet", "mixed", 64, 6, 0.05),
    ("fedrotmnist-clients", "lenet", "feature", 64, 6, 0.05),
    ("cmnist2", "cnn", "mixed", 64, 12, 0.03),
    ("shakespeare", "gru", "iid", 64, 6, 0.5),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "model", "split", "samples", "steps", "lr"), PAIRS)
def test_every_pair_of_the_papers_learns(
    root: Path, tmp_path: Path, name: str, model: str, split: str, samples: int, steps: int, lr: float
) -> None:
    with sandbox():
        whole = load(name, str(root))
        assert isinstance(whole, Arrays)
        cfg = Config(
            mask="gma",
            data=name,
            split=split,
            model=model,
            clients=2,
            cohort=2,
            rounds=2,
            threads=1,
            log_to="none",
            local=Local(lr=lr, steps=steps, batch=8),
            skew=Skew(classes=2),
            out=str(tmp_path / "run"),
        )
        spec = prepare(cfg, Overrides(data=some_of(whole, samples)))
        data, partition, meta = load_data(spec.cfg, spec.given)
        _, fresh = make_task(spec, data, partition, meta, 1, CPU)
        before = loss_of(fresh, fresh.start()[0])
        outcome = run(spec, SoloComm(), ALONE, CPU, {})
        assert outcome.last.clients == 2, "no client was left out"
        assert loss_on_all(outcome) < 0.95 * before


@pytest.mark.launchers
@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", RESNETS)
def test_a_resnet_has_the_same_bits_on_one_and_two_ranks(model: str, tmp_path: Path) -> None:
    """Cohorts of three, so that one rank has one client and the other two; augmented, and scored as well."""
    options = f"--data cifar10 --model {model} --clients 400 --cohort 3 --rounds 2 --local.steps 2 --local.batch 4"
    options += " --eval.samples 8 --eval.batch 4 --threads 1 --log_to none"
    done = {}
    for ranks in (1, 2):
        out = tmp_path / str(ranks)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += ["-m", "fedmpi", "train", "--data_root", str(realdata.cifar10_root()), "--out", str(out)]
        ran = subprocess.run(
            [*command, *options.split()], env=rank_environment(), capture_output=True, text=True, timeout=140
        )
        assert ran.returncode == 0, ran.stderr
        done[ranks] = json.loads((out / "finished.json").read_text())
        assert "20,000 of 50,000" in ran.stdout, "a subset is named"
    assert done[1] == done[2]
    assert 0 < done[1]["test_loss"] < 20


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_gru_learns_more_of_shakespeare_than_how_often_letters_occur(root: Path, tmp_path: Path) -> None:
    """By role, scored on roles that did not train: better than always answering the commonest character, and than
    answering each as often as it occurs."""
    cfg = Config(
        data="shakespeare",
        data_root=str(root),
        split="natural",
        mask="mean",
        clients=54,
        cohort=6,
        rounds=10,
        threads=1,
        log_to="none",
        local=Local(lr=0.8, momentum=0.0, steps=8, batch=16),
        eval=Eval(every=10, samples=1500),
        out=str(tmp_path / "run"),
    )
    with sandbox():
        outcome = run(prepare(cfg), SoloComm(), ALONE, CPU, {})
        data = load("shakespeare", str(root))
    assert isinstance(data, Arrays) and outcome.cfg.model == "gru"
    share = np.bincount(data.y.numpy(), minlength=80) / len(data.y)
    scored = data.test_y.numpy()[outcome.task.tests.numpy()]
    commonest = float((scored == share.argmax()).mean())
    unigram = float(-np.log(np.maximum(share, 1e-9))[scored].mean())
    last = metrics(tmp_path / "run")[-1]
    assert last["test_accuracy"] > commonest + 0.02, (last["test_accuracy"], commonest)
    assert last["test_loss"] < unigram - 0.05, (last["test_loss"], unigram)

"""The private part of a model: every client trains its own, and nobody else sees it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from federation import arrays, partition
from safetensors.torch import load_file
from shell import CPU, metrics, sandbox, settings_of
from torch import Tensor, nn

from fedmpi.clients.task import Task
from fedmpi.clients.training import Start
from fedmpi.cohort import Work
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.blocks import NodeBlocks
from fedmpi.comm.env import Place
from fedmpi.comm.node import share_node
from fedmpi.errors import UserError
from fedmpi.knobs import LocalKnobs
from fedmpi.local import PRIVATE, Descent, LocalRule, make_local, scaffold, sgd
from fedmpi.local.memory import Memory
from fedmpi.runs.build import Overrides, prepare
from fedmpi.runs.config import Step
from fedmpi.runs.run import Outcome, run

HEAD = ("4.weight", "4.bias")


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    with sandbox():
        yield


def net(images: int = 6) -> nn.Module:
    torch.manual_seed(3)
    side = images - 2
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(3 * side * side, 3))


def train(comm: Comm, out: Path, **changes: Any) -> Outcome:
    """A run in which clients come back, so that they find what they have kept."""
    share_node(comm)
    local = changes.pop("local", {})
    cfg = settings_of(out, **({"model": None, "resume": "force", "rounds": 4} | changes))
    cfg = replace(cfg, local=replace(cfg.local, **({"private": "4,bn"} | local)))
    with sandbox():
        return run(prepare(cfg, Overrides(model=net(12))), comm, Place("alone", comm.rank, comm.size, 0, 1), CPU, {})


def train_there(comm: Comm, out: Path, changes: dict[str, Any]) -> None:
    train(comm, out, **changes)


def sha256(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


# One client


def one_round(rule: LocalRule, own: Tensor | None, names: set[str]) -> tuple[Task, Any]:
    """A task, and the update of a client of it that starts from a private part."""
    task = Task(net(), arrays(), partition(), seed=11, device=CPU, private=names)
    start_N, ints = task.start()
    keeps = {name: torch.zeros(task.layout.params) for name in rule.keeps}
    shared = {channel.name: torch.zeros_like(start_N) for channel in rule.sends}
    memory = {**keeps, PRIVATE: task.first_private if own is None else own}
    job = task.job(Start(start_N, ints, 1, 2, Work(epochs=2, batch=4), shared, memory))
    with torch.no_grad():
        return task, job.deliver(rule(job))()


@pytest.mark.parametrize("rule", [sgd(0.05, 0.9), scaffold(Descent(0.05, 0.9))], ids=["sgd", "scaffold"])
@pytest.mark.parametrize("names", [set(HEAD), {"0.weight", "1.weight", "1.bias", "1.running_mean", "1.running_var"}])
def test_a_client_trains_as_if_everything_were_shared_and_keeps_its_part(rule: LocalRule, names: set[str]) -> None:
    """From the same start every element moves as without a private part: those of N as deltas, the others as values."""
    whole, everything = one_round(rule, None, set())
    begun = net().state_dict()
    task, update = one_round(rule, None, names)
    for span in task.layout.spans:
        (there,) = [one for one in whole.layout.spans if one.name == span.name]
        assert span.name not in names and torch.equal(span.view(update.delta_N), there.view(everything.delta_N))
    kept = update.result.keeps[PRIVATE]
    assert {span.name for span in task.layout.private.spans} == names and len(kept) == task.layout.private.length
    state = dict(whole.model.state_dict())
    for span in task.layout.private.spans:
        assert torch.equal(span.view(kept), state[span.name]), span.name
        assert not torch.equal(span.view(kept), begun[span.name])
    for name, vector_P in update.result.sends.items():
        trained = [span for span in task.layout.spans if span.start < task.layout.params]
        for span in trained:
            (there,) = [one for one in whole.layout.spans if one.name == span.name]
            assert torch.equal(span.view(vector_P), there.view(everything.result.sends[name]))


def test_a_client_starts_from_its_own_part() -> None:
    own = torch.randn(3 * 48 + 3, generator=torch.Generator().manual_seed(1))
    task, update = one_round(sgd(0.0), own, set(HEAD))
    assert torch.equal(update.result.keeps[PRIVATE], own)
    _, trained = one_round(sgd(0.05), own, set(HEAD))
    assert not torch.equal(trained.result.keeps[PRIVATE], own)
    task.load(*task.start())
    weight, bias = (task.model.get_parameter(name) for name in HEAD)
    torch.manual_seed(3)
    assert torch.equal(weight, net().get_parameter(HEAD[0])) and torch.equal(bias, net().get_parameter(HEAD[1]))


def test_only_what_is_sent_is_bounded() -> None:
    bound = make_local("sgd", LocalKnobs(lr=0.05, clip_update=0.01))
    task, free = one_round(sgd(0.05, 0.9), None, set(HEAD))
    _, update = one_round(bound, None, set(HEAD))
    params = task.layout.params
    assert float(torch.linalg.vector_norm(update.delta_N[:params])) == pytest.approx(0.01, rel=1e-5)
    assert torch.equal(update.result.keeps[PRIVATE], free.result.keeps[PRIVATE])


# Runs


@pytest.mark.processes
@pytest.mark.parametrize(
    "changes",
    [{}, {"algorithm": "scaffold", "mask": "and"}, {"algorithm": "fednova", "mask": "mean", "memory_limit": 0}],
    ids=["fedavg", "scaffold", "fednova-mapped"],
)
def test_equal_bits_on_any_number_of_ranks_and_after_a_resume(
    changes: dict[str, Any], gloo: Callable[..., None], tmp_path: Path
) -> None:
    if "memory_limit" in changes:
        memory = replace(settings_of(tmp_path).memory, limit=changes["memory_limit"])
        changes = {k: v for k, v in changes.items() if k != "memory_limit"} | {"memory": memory}
    changes |= {"evaluate": "clients"}
    one = train(SoloComm(), tmp_path / "1", **changes)
    gloo(3, train_there, tmp_path / "3", changes)
    gloo(2, train_there, tmp_path / "2-then-1", changes | {"rounds": 2})
    resumed = train(SoloComm(), tmp_path / "2-then-1", **changes)
    names = ("1", "3", "2-then-1")
    assert len({sha256(tmp_path / name) for name in names}) == 1
    scores = [[r["clients_accuracy"] for r in metrics(tmp_path / name)] for name in names]
    assert scores[0] == scores[1] == scores[2] and len(scores[0]) == 4
    kept, again = one.state.memory, resumed.state.memory
    assert list(kept) == list(again) and len(kept)
    for cid in kept:
        for name, vector in kept.read(cid).items():
            assert torch.equal(vector, again.read(cid)[name])


def test_clients_are_scored_with_their_own_part(tmp_path: Path) -> None:
    """The measurement by hand: every client's own model on the test set, in its mix of classes."""
    outcome = train(SoloComm(), tmp_path / "run", evaluate="clients", split="classes")
    task, state, data = outcome.task, outcome.state, outcome.task.feed
    x, y = next(data.test([torch.arange(len(task.tests))]))
    scores = []
    for cid in range(8):
        task.load(state.model_N, state.ints, state.memory.read(cid)[PRIVATE])
        task.model.eval()
        right = (task.model(x).argmax(1) == y).double()
        mine = data.y[torch.from_numpy(task.partition.of(cid))]
        means = torch.stack([right[y == label].mean() for label in mine.unique()])
        scores.append(float((means * torch.bincount(mine)[mine.unique()]).sum() / len(mine)))
    found = metrics(tmp_path / "run")[-1]["clients_accuracy"]
    sides = [value for value in found.values() if value is not None]
    assert min(scores) - 1e-5 <= min(sides) and max(sides) <= max(scores) + 1e-5
    weight = 4 / 8  # of the cohort among the clients
    assert weight * found["participating"] + (1 - weight) * found["others"] == pytest.approx(sum(scores) / 8, abs=1e-5)
    assert len({tuple(state.memory.read(cid)[PRIVATE].tolist()) for cid in state.memory}) == len(state.memory)


def test_what_is_private_is_neither_sent_nor_in_the_model_file(tmp_path: Path) -> None:
    outcome = train(SoloComm(), tmp_path / "run", local={"private": "4"})
    saved = load_file(tmp_path / "run" / "model.safetensors")
    assert not saved.keys() & set(HEAD) and "1.running_mean" in saved
    moved = sum(p.numel() for name, p in net(12).named_parameters() if name not in HEAD) + 2 * 3
    assert outcome.history[0].client_bytes_up == 4 * (4 * moved + 8)


def test_without_a_private_part_it_is_a_run_like_any_other(tmp_path: Path) -> None:
    train(SoloComm(), tmp_path / "none", local={"private": None})
    train(SoloComm(), tmp_path / "head", local={"private": "4"})
    assert len({sha256(tmp_path / name) for name in ("none", "head")}) == 2


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"local": {"private": "5"}}, "--local.private: '5' matches nothing in the model; it has 0.weight"),
        ({"local": {"private": "*"}}, "takes all trained parameters"),
        ({"local": {"private": "4", "freeze": "4.bias"}}, "'4.bias' is frozen"),
        ({"algorithm": "uga"}, "sends gradients and trains no model of its own"),
        ({"step": Step(together=2)}, "--local.private and --step.together"),
    ],
)
def test_what_cannot_be_private_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message.replace("*", r"\*")):
        train(SoloComm(), tmp_path / "run", **changes)
    assert not (tmp_path / "run").exists()


def test_memories_of_different_lengths_come_back(tmp_path: Path) -> None:
    first = {"b": torch.tensor([5.0])}
    memory = Memory(("a", "b"), 3, folder=tmp_path, limit_bytes=0, first=first)
    memory.connect(np.ones(3, dtype=np.int64), NodeBlocks(SoloComm()))
    assert {name: v.tolist() for name, v in memory.read(1).items()} == {"a": [0, 0, 0], "b": [5]}
    memory.reserve([1])
    memory.stage(1, {"a": torch.tensor([1.0, 2.0, 3.0]), "b": torch.tensor([4.0])})
    memory.commit([1])
    assert {name: v.tolist() for name, v in memory.read(1).items()} == {"a": [1, 2, 3], "b": [4]}
    assert torch.equal(memory.read(2)["b"], first["b"])

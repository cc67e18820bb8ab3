"""`fedmpi.train`: what it takes, what it refuses, what it gives back, and that it is the command line's machinery."""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import BIN, REPO, rank_environment
from safetensors.torch import load_file
from shell import ALONE, metrics, sandbox, tiny, without_seconds
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import fedmpi
from fedmpi import Algorithm, Arrays, Datasets, Objective, Result, Row, api
from fedmpi.algorithms import MetaStep
from fedmpi.commands import main
from fedmpi.errors import RunError, UserError
from fedmpi.local import LocalKnobs, make_local, sgd
from fedmpi.masks import make_mask
from fedmpi.runs.config import Eval, Local
from fedmpi.server import ServerKnobs, make_server

FEATURES, CLASSES = 4, 3
QUICK: dict[str, Any] = {"rounds": 2, "threads": 1, "quiet": True}
A_NUMBER: Any = 3
LOCAL = {"lr": 0.1, "batch": 8, "momentum": 0.0}
PAGE = (REPO / "docs" / "own-data.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A folder of its own to work in, no launcher's variables seen, no connection kept."""
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(api, "find_place", lambda environ: ALONE)
        patch.setattr(api, "_connected", [])
        patch.setattr(sys, "dont_write_bytecode", True)
        yield patch


def pair(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Samples of four numbers in three classes."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(count, FEATURES, generator=rng)
    return x, x[:, :CLASSES].argmax(1)


def pairs() -> list[tuple[Tensor, Tensor]]:
    """Three clients of different sizes."""
    return [pair(count, count) for count in (24, 16, 9)]


TEST = pair(50, 0)


def linear(seed: int = 0, features: int = FEATURES, outputs: int = CLASSES) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Linear(features, outputs)


def train(model: Any, data: Any, test: Any = TEST, **changes: Any) -> Result:
    """A quick and quiet training."""
    local = {"batch": 8} if isinstance(changes.get("algorithm"), Algorithm) else LOCAL  # which has its rates
    return fedmpi.train(model, data, test, **({"local": local} | QUICK | changes))


def refused(model: Any, data: Any, test: Any = TEST, **changes: Any) -> str:
    """The error message of a refused call."""
    with pytest.raises(UserError) as caught:
        train(model, data, test, **changes)
    return str(caught.value)


def weights(result: Result) -> dict[str, Tensor]:
    return dict(result.model.state_dict())


def same(a: Result, b: Result) -> bool:
    """Whether two results are the same to the bit."""
    one, other = weights(a), weights(b)
    alike = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    return alike and without_seconds(a.reports) == without_seconds(b.reports)


class Items(Dataset):
    """A Dataset that has nothing but items; with noise, random ones."""

    def __init__(self, x: Any, y: Any, noise: float = 0.0) -> None:
        self.x, self.y, self.noise = x, y, noise

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        x = self.x[index]
        if self.noise:
            x = x + self.noise * (torch.randn(x.shape) + random.random() + float(np.random.rand()))
        return x, self.y[index]


class WithNorm(nn.Module):
    """Layers with buffers of both kinds, one of them not saved, and a layer that goes by two names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, CLASSES)
        self.again = self.last
        self.register_buffer("scale", torch.tensor([0.5]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu()) * self.scale


# The package


def test_the_names_of_the_package() -> None:
    groups = {"Checkpoint", "Eval", "Local", "Memory", "Meta", "Server", "Skew", "Step"}
    assert set(fedmpi.__all__) == {"Algorithm", "Arrays", "Datasets", "Objective", "Result", "Row", "train"} | groups
    assert all(getattr(fedmpi, name).__name__ == name for name in fedmpi.__all__)
    with pytest.raises(AttributeError, match="module 'fedmpi' has no attribute 'nonsense'"):
        _ = fedmpi.nonsense


def test_importing_the_package_imports_no_torch() -> None:
    code = "import fedmpi, sys; print('torch' in sys.modules); fedmpi.Arrays; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=rank_environment(), capture_output=True, text=True, timeout=100
    )
    assert done.stdout.split() == ["False", "True"], done.stderr


# Kinds of data: all of them the same samples, so all of them the same result


@pytest.fixture(scope="module")
def reference() -> Result:
    """The result for clients as pairs of tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "find_place", lambda environ: ALONE)
        return train(linear(), pairs())


def cut(x: Tensor, y: Tensor) -> Dataset:
    """A data set in two parts, one of them a choice from a larger one."""
    more = TensorDataset(torch.cat([torch.zeros(1, FEATURES), x]), torch.cat([torch.zeros(1, dtype=torch.int64), y]))
    return ConcatDataset([Subset(more, [1, 2, 3]), TensorDataset(x[3:], y[3:])])


KINDS = {
    "dict": lambda: ({"Aare": pairs()[0], "Birs": pairs()[1], "Emme": pairs()[2]}, TEST),
    "tuple": lambda: (tuple(pairs()), list(TEST)),
    "numpy": lambda: ([(x.double().numpy(), y.numpy().astype(np.int32)) for x, y in pairs()], TEST),
    "tensor datasets": lambda: ([TensorDataset(x, y) for x, y in pairs()], TensorDataset(*TEST)),
    "own datasets": lambda: ({n: Items(x, y.tolist()) for n, (x, y) in enumerate(pairs())}, Items(*TEST)),
    "subsets": lambda: ([cut(x, y) for x, y in pairs()], TEST),
    "mixed": lambda: ([pairs()[0], *(TensorDataset(x, y) for x, y in pairs()[1:])], TEST),
    "a dataset to test on": lambda: (pairs(), Items(*TEST)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_clients_may_be_given_in_many_ways(kind: str, reference: Result) -> None:
    data, test = KINDS[kind]()
    assert same(train(linear(), data, test), reference)


def test_the_clients_are_those_that_were_given(reference: Result) -> None:
    assert (reference.config.clients, reference.config.cohort, reference.config.split) == (3, 3, "natural")
    assert reference.reports[-1]["clients"] == 3
    many = train(linear(), [pair(4, seed) for seed in range(12)], rounds=1)
    assert (many.config.clients, many.config.cohort) == (12, 10), "ten a round where there are more"
    assert train(linear(), pairs(), cohort=2).config.cohort == 2


def pooled() -> tuple[Tensor, Tensor, Tensor]:
    """All clients' samples and their owners."""
    x, y = (torch.cat(parts) for parts in zip(*pairs(), strict=True))
    return x, y, torch.repeat_interleave(torch.arange(3), torch.tensor([24, 16, 9]))


def test_arrays_and_datasets_with_owners_are_those_clients_too(reference: Result) -> None:
    x, y, owner = pooled()
    arrays = Arrays("mine", CLASSES, x, y, *TEST, owner=owner)
    datasets = Datasets(TensorDataset(x, y), TensorDataset(*TEST), owner=owner)
    for data in (arrays, datasets):
        assert same(train(linear(), data, None, split="natural", clients=3, cohort=3), reference)


@pytest.mark.parametrize("split", ["iid", "classes", "dirichlet", "quantity"])
def test_arrays_and_datasets_are_dealt_out_alike(split: str) -> None:
    x, y, _ = pooled()
    arrays = Arrays("mine", CLASSES, x, y, *TEST)
    read, known = Datasets(Items(x, y), Items(*TEST)), Datasets(cut(x, y), Items(*TEST))
    results = [train(linear(), data, None, split=split, clients=4, cohort=2) for data in (arrays, read, known)]
    assert same(results[0], results[1]) and same(results[0], results[2]) and results[0].config.split == split


class Pictures(Dataset):
    """A Dataset as torchvision has them: with `targets`, and items that it counts."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.data, self.targets, self.read = x, y.tolist(), 0

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.read += 1
        return self.data[index], self.targets[index]


@pytest.mark.parametrize("split", ["iid", "classes", "dirichlet", "quantity"])
def test_one_data_set_is_split_among_clients(split: str) -> None:
    x, y, _ = pooled()
    expected = train(linear(), Arrays("mine", CLASSES, x, y, *TEST), None, split=split, clients=4, cohort=4)
    given = [TensorDataset(x, y), (x, y), (x.numpy(), y.numpy()), Items(x, y), Subset(TensorDataset(x, y), range(49))]
    for data in (*given, Pictures(x, y)):
        result = train(linear(), data, TEST, split=split, clients=4)
        assert same(result, expected) and result.config.cohort == 4


def test_labels_at_hand_are_not_read_item_by_item() -> None:
    x, y, _ = pooled()
    pictures = Pictures(x, y)
    knobs = {"num_clients": 30, "alpha": 0.5, "cohort": 1, "rounds": 1, "local": {"steps": 1}}
    train(linear(), pictures, TEST, split="dirichlet", **knobs)
    assert pictures.read < 49


def test_knobs_by_the_names_of_other_tools() -> None:
    x, y, _ = pooled()
    theirs = {"lr": 0.1, "batch_size": 8, "client_momentum": 0.0, "local": {}, "num_clients": 4, "partition": "iid"}
    assert same(train(linear(), (x, y), **theirs), train(linear(), (x, y), clients=4, split="iid"))
    assert refused(linear(), (x, y), split="natural", clients=4).startswith("split 'natural' needs a data set that kn")
    with pytest.raises(UserError, match="dataset is not an option here; fedmpi.train takes it as its argument data"):
        train(linear(), (x, y), dataset="mnist", clients=4)


def test_data_by_name_and_by_import_path(tmp_path: Path) -> None:
    (tmp_path / "api_data.py").write_text("from shell import tiny\n\n\ndef make():\n    return tiny()\n")
    knobs = {"split": "iid", "clients": 8, "cohort": 4}
    results = [train("logistic", data, None, **knobs) for data in ("tiny", "api_data:make", tiny())]
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert [r.config.data for r in results] == ["tiny", "api_data:make", "tiny"]


def test_regression_reports_the_error() -> None:
    def of(samples: Tensor) -> tuple[Tensor, Tensor]:
        return samples, samples @ torch.tensor([1.0, -2.0, 0.5, 0.0])

    clients, test = [of(x) for x, _ in pairs()], of(TEST[0])
    results = [train(model, clients, test, rounds=20) for model in (None, linear(outputs=1))]
    for result in results:
        assert "test_accuracy" not in result.reports[-1]
        outputs = result.model(test[0]).detach().squeeze(1)
        assert result.reports[-1]["test_error"] == pytest.approx(float((outputs - test[1]).abs().mean()), abs=1e-5)
        assert result.reports[-1]["test_error"] < 0.5 * result.reports[0]["test_error"]


def test_sequences_and_an_objective_of_ones_own() -> None:
    rng = torch.Generator().manual_seed(0)
    x = torch.randint(0, 5, (40, 6), generator=rng)
    last = train(None, [(x[:20], x[:20, 0]), (x[20:], x[20:, 0])], (x, x[:, 0]))
    assert last.config.model == "gru" and 0 <= last.reports[-1]["test_accuracy"] <= 1
    torch.manual_seed(0)
    every = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))  # a class for each position
    assert train(every, [(x[:20], x[:20]), (x[20:], x[20:])], (x, x), rounds=60).reports[-1]["test_accuracy"] == 1.0

    def loss(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(outputs, labels, reduction=reduction)

    several = Objective("several", loss, "hits", lambda o, y: ((o > 0) == (y > 0.5)).sum(), whole=False)
    samples, labels = TEST[0], (TEST[0][:, :2] > 0).float()
    arrays = Arrays("several", 0, samples, labels, samples, labels, objective=several)
    result = train(linear(outputs=2), arrays, None, split="iid", clients=5, cohort=5, rounds=30, local={"lr": 0.5})
    assert result.reports[-1]["test_hits"] > 0.9 > result.reports[0]["test_hits"]


# Models


def test_a_model_that_was_handed_over_is_left_as_it_was() -> None:
    model = WithNorm()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    result = train(model, pairs()[:2])
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert model.training and all(p.grad is None for p in model.parameters())
    assert any(not torch.equal(before[name], tensor) for name, tensor in weights(result).items())
    assert result.config.model == "WithNorm"


def test_the_start_is_the_model_that_was_handed_over() -> None:
    assert same(train(linear(1), pairs()), train(linear(1), pairs()))
    assert not same(train(linear(1), pairs()), train(linear(2), pairs()))
    tiny_step = train(linear(1), pairs(), local={"lr": 1e-12}, rounds=1)
    assert torch.allclose(tiny_step.model.weight, linear(1).weight, atol=1e-9)


def test_models_by_name_and_by_default(tmp_path: Path) -> None:
    assert same(train(None, pairs()), train("logistic", pairs()))
    (tmp_path / "api_model.py").write_text(
        "from torch import nn\n\n\ndef wide(shape, classes, hidden=7):\n"
        "    return nn.Sequential(nn.Linear(shape[0], hidden), nn.Linear(hidden, classes))\n"
    )
    result = train("api_model:wide", pairs())
    assert result.model[0].weight.shape == (7, FEATURES) and result.config.model == "api_model:wide"


def test_lazy_layers_are_made_to_fit() -> None:
    lazy = nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(CLASSES))
    assert train(lazy, pairs()).model[0].weight.shape == (5, FEATURES)
    assert isinstance(lazy[0], nn.LazyLinear), "the one that was handed over still is one"


def test_frozen_layers_stay() -> None:
    model = nn.Sequential(linear(1, outputs=6), nn.ReLU(), linear(2, features=6))
    model[0].requires_grad_(False)
    result = train(model, pairs())
    assert torch.equal(result.model[0].weight, model[0].weight) and not result.model[0].weight.requires_grad
    assert not torch.equal(result.model[2].weight, model[2].weight) and result.model[2].weight.requires_grad


# Algorithms


def put_together(**changes: Any) -> Algorithm:
    rules = Algorithm(sgd(0.1), make_mask("gma", 0.4), make_server("adam", ServerKnobs(lr=0.02)))
    return replace(rules, **changes)


def test_an_algorithm_by_name_as_a_row_and_from_rules_are_the_same() -> None:
    row = Row("sgd", "adam", local_lr=0.1, server_lr=0.02, local_momentum=0.0)
    masked = {"mask": "gma"}
    given: list[tuple[Any, dict[str, str]]] = [(put_together(), {}), (row, masked), ("fedadam", masked)]
    results = [train(linear(), pairs(), algorithm=algorithm, **mask) for algorithm, mask in given]
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert [r.config.algorithm for r in results] == ["own", "own", "fedadam"]
    assert not same(results[0], train(linear(), pairs()))


def test_knobs_override_a_row() -> None:
    row = Row("sgd", "sgd", mask="and", tau=0.9)
    result = train(linear(), pairs(), algorithm=row, tau=0.5)
    assert (result.config.mask, result.config.tau, result.config.local.lr) == ("and", 0.5, 0.1)
    assert same(result, train(linear(), pairs(), mask="and", tau=0.5))


def test_an_algorithm_with_a_meta_step() -> None:
    stepping = put_together(server=make_server("sgd", ServerKnobs()), meta=MetaStep(0.05))
    result = train(linear(), pairs(), algorithm=stepping, meta={"size": 10})
    assert same(result, train(linear(), pairs(), algorithm="fedmeta", mask="gma", meta={"size": 10, "lr": 0.05}))
    assert not same(result, train(linear(), pairs(), algorithm=replace(stepping, meta=None), meta={"size": 10}))
    said = refused(linear(), pairs(), algorithm=stepping)
    assert said == "the algorithm has a meta step, but meta has no size; give meta={'size': SAMPLES}"


def test_an_algorithm_with_a_memory() -> None:
    rule = make_local("scaffold", LocalKnobs(lr=0.1, momentum=0.0))
    server = make_server("sgd", ServerKnobs())
    a = train(linear(), pairs(), algorithm=put_together(local=rule, server=server), rounds=3)
    assert same(a, train(linear(), pairs(), algorithm="scaffold", mask="gma", rounds=3))


# Knobs


def test_groups_are_dicts_dataclasses_or_dotted() -> None:
    results = [
        train(linear(), pairs(), local={"lr": 0.1, "batch": 8}),
        train(linear(), pairs(), local=Local(lr=0.1, batch=8)),
        fedmpi.train(linear(), pairs(), TEST, **QUICK, **{"local.lr": 0.1, "local.batch": 8}),
    ]
    assert same(results[0], results[1]) and same(results[0], results[2])
    assert all(r.config.local.batch == 8 and r.config.local.momentum == 0.9 for r in results)
    assert train(linear(), pairs(), rounds=np.int64(1), mask="gma", tau=np.float32(0.5)).config.tau == 0.5
    scored = train(linear(), pairs(), rounds=3, eval=Eval(every=2, samples=20)).reports
    assert [h["test_accuracy"] is not None for h in scored] == [False, True, True]


WRONG_KNOBS: dict[str, tuple[dict[str, Any], str]] = {
    "nearest": ({"ronds": 3}, "unknown option 'ronds' in fedmpi.train; did you mean 'rounds'?"),
    "nearest in a group": (
        {"local": {"lrr": 1}},
        "unknown option 'local.lrr' in fedmpi.train; did you mean 'local.lr'?",
    ),
    "nothing near": (
        {"colour": "red"},
        "unknown option 'colour' in fedmpi.train; 'fedmpi train --help-all' lists all options",
    ),
    "dotted": ({"eval.evry": 2}, "unknown option 'eval.evry' in fedmpi.train; did you mean 'eval.every'?"),
    "an option twice": ({"local.lr": 1}, "local and local.lr are the same option, local.lr; give one of them"),
    "an option by two names": ({"lr": 1}, "local and lr are the same option, local.lr; give one of them"),
    "what other tools call it, but not clearly": ({"momentum": 1}, "unknown option 'momentum' in fedmpi.train; --loc"),
    "no group": ({"local": 5}, "'local' in fedmpi.train holds 5; it must hold options"),
    "no value": ({"rounds": None}, "--rounds is null; it must have a value, and 50 is the default"),
    "a word for a number": ({"rounds": "many"}, "--rounds is 'many'; it must be a whole number"),
    "a float for a whole number": ({"rounds": 2.5}, "--rounds is '2.5'; it must be a whole number"),
    "true for a number": ({"rounds": True}, "--rounds is 'True'; it must be a whole number"),
    "a number for a word": ({"mask": 3}, "--mask is '3'; it must be a word or null"),
    "out of bounds": ({"tau": 2}, "--tau is 2.0; it must be in [0, 1]"),
    "too many a round": ({"cohort": 4}, "--cohort is 4 but there are only 3 clients"),
    "unknown name": ({"algorithm": "fedadm"}, "unknown algorithm 'fedadm'; did you mean 'fedadam'?"),
    "unknown mask": ({"mask": "gam"}, "unknown mask 'gam'; did you mean 'gma'?"),
    "no algorithm": ({"algorithm": 3}, "algorithm is int; it must be a name, a Row or an Algorithm"),
    "a row with a number for a word": ({"algorithm": Row("sgd", A_NUMBER)}, "algorithm 'own' has server = 3; "),
    "a row with an unknown rule": ({"algorithm": Row("sdg", "sgd")}, "unknown local rule 'sdg'; did you mean 'sgd'?"),
    "a split of one's own": ({"split": "iid"}, "split or clients is given with 3 data sets, one per client"),
    "a number of clients": ({"clients": 3}, "split or clients is given with 3 data sets, one per client"),
    "an empty folder name": ({"out": ""}, "--out is ''; name a folder, or leave it out"),
    "no such device": ({"device": "cuda:99"}, "device 'cuda:99' but "),
}


@pytest.mark.parametrize("case", WRONG_KNOBS)
def test_a_wrong_knob_is_a_one_line_error(case: str) -> None:
    knobs, said = WRONG_KNOBS[case]
    assert refused(linear(), pairs(), **knobs).startswith(said)


@pytest.mark.parametrize("name", ["data", "model", "out", "algorithm"])
def test_what_has_an_argument_of_its_own_is_no_knob(name: str) -> None:
    said = f"{name} is not an option here; fedmpi.train takes it as its argument {name}"
    with pytest.raises(UserError, match=said):
        api.choose(linear(), pairs(), TEST, "fedavg", None, {name: "x"})


# Data and models that do not do


class Endless:
    """No length."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(FEATURES), 0


NONE = (torch.zeros(0, FEATURES), torch.zeros(0, dtype=torch.int64))
WRONG_DATA: dict[str, tuple[Any, Any, str]] = {
    "an empty list": ([], TEST, "data is empty; give one data set per client"),
    "an empty dict": ({}, TEST, "data is empty; give one data set per client"),
    "nothing": (None, TEST, "data is NoneType; it must be a list or dict of the clients' data sets, one Dataset or"),
    "one pair": (TEST, TEST, "data is one data set; give clients=, and split= such as"),
    "one Dataset": (TensorDataset(*TEST), TEST, "data is one data set; give clients=, and split= such as"),
    "an array": (TEST[0], TEST, "data is Tensor; it must be a list or dict of the clients' data sets"),
    "words": (["a", "b"], TEST, "your data has a train part of list; it must be"),
    "no length": ([Endless()], TEST, "your data has a train part of list; it must be"),
    "a client without samples": ([pairs()[0], NONE], TEST, "your data: client 1 has no samples; leave it out"),
    "a dataset without samples": (
        {"Aare": TensorDataset(*NONE), "Birs": TensorDataset(*TEST)},
        TEST,
        "your data: client 0 has no samples; leave it out",
    ),
    "no test": (pairs(), None, "test is missing; give the test data"),
    "a test of the wrong kind": (pairs(), 3, "your data has a test part of int; it must be a Dataset, a pair"),
    "tests by client": (pairs(), [TEST, TEST], "your data has a test part of list; it must be"),
    "an empty test": ([TensorDataset(*TEST)], TensorDataset(*NONE), "data set 'your data' has no test sample"),
    "a test beside arrays": (tiny(), TEST, "test is given, but the data have their own; leave it out"),
    "a test beside a name": ("tiny", TEST, "test is given, but the data have their own; leave it out"),
    "an unknown name": ("tniy", None, "unknown data set 'tniy'; did you mean 'tiny'?"),
    "no such module": ("nowhere:make", None, "data set 'nowhere:make': there is no module 'nowhere'"),
    "shapes that differ": ([TEST, (torch.zeros(9, 3), torch.zeros(9, dtype=torch.int64))], TEST, "your data has sam"),
    "labels that differ": ([(TEST[0], TEST[0][:, 0])], TEST, "your data has labels of different kinds: "),
    "a label too few": ([(TEST[0], TEST[1][1:])], TEST, "data set 'your data' has 50 train samples and 49 train lab"),
    "labels below zero": ([(TEST[0], TEST[1] - 1)], TEST, "data set 'your data' has train labels from -1 to 1"),
    "labels below zero in a dataset": ([Items(TEST[0], [-1] * 50)], TEST, "data set 'your data' has labels int64"),
    "a class that the train samples lack": (
        [TensorDataset(*TEST)],
        TensorDataset(TEST[0], TEST[1] + 1),
        "data set 'your data' has labels like 3; it needs 0 to 2",
    ),
    "words for labels": ([Items(TEST[0], ["cat"] * 50)], TEST, "data set 'your data' has train items of ['Tensor', 's"),
    "a list of items": ([[(1, 2, 3)]], TEST, "your data has a train part of list"),
    "pictures that are no tensors": (
        [Items(["picture"], [0])],
        Items(["picture"], [0]),
        "data set 'your data' has train items of ['str', 'int']; it needs pairs of a tensor and a number",
    ),
    "an item that cannot be read": (
        [Items([], [0])],
        TEST,
        "data set 'your data' cannot be read: its first train item raised IndexError: list index out of range",
    ),
}


@pytest.mark.parametrize("case", WRONG_DATA)
def test_wrong_data_are_a_one_line_error(case: str) -> None:
    data, test, said = WRONG_DATA[case]
    assert refused(linear(), data, test).startswith(said)


WRONG_MODELS: dict[str, tuple[Any, str]] = {
    "a number": (3, "model is int; it must be a torch.nn.Module, a name, or None"),
    "a class": (nn.Linear, "model is type; it must be a torch.nn.Module, a name, or None"),
    "an unknown name": ("logistc", "unknown model 'logistc'; did you mean 'logistic'?"),
    "one for pictures": ("lenet", "model 'lenet' takes images; 'your data' has numbers: use "),
    "other inputs": (linear(features=5), "model 'Linear' raised RuntimeError for samples [2, 4] of 'your data'"),
    "too few outputs": (linear(outputs=2), "model 'Linear' returned a tensor [2, 2] for 2 samples; classification "),
    "doubles": (linear().double(), "model 'Linear' raised RuntimeError for samples [2, 4]"),
    "nothing to train": (linear().requires_grad_(False), "the model has no trainable parameter; check requires_grad"),
}


@pytest.mark.parametrize("case", WRONG_MODELS)
def test_a_wrong_model_is_a_one_line_error(case: str) -> None:
    model, said = WRONG_MODELS[case]
    assert refused(model, pairs()).startswith(said)


@pytest.mark.parametrize(
    "case",
    [
        *("nearest", "a client without samples", "no test", "labels below zero", "labels that differ"),
        *("pictures that are no tensors", "an item that cannot be read", "no such module"),
        *("other inputs", "too few outputs"),
    ],
)
def test_errors_read_as_the_page_says(case: str) -> None:
    model, data, test, knobs = linear(), pairs(), TEST, {}
    if case in WRONG_DATA:
        data, test, _ = WRONG_DATA[case]
    elif case in WRONG_MODELS:
        model, _ = WRONG_MODELS[case]
    else:
        knobs, _ = WRONG_KNOBS[case]
    said = refused(model, data, test, **knobs).replace(": addmm: ", ": ")  # torch 2.15 names the operation
    assert f"`{said}`" in PAGE


def test_a_split_that_needs_what_the_data_do_not_have() -> None:
    x, y, _ = pooled()
    without_owner = refused(linear(), Arrays("mine", CLASSES, x, y, *TEST), None, split="natural", clients=3, cohort=1)
    assert without_owner.startswith("split 'natural' needs a data set that knows")
    numbers = Arrays("mine", 0, x, x[:, 0], TEST[0], TEST[0][:, 0])
    said = refused(None, numbers, None, split="classes", clients=3, cohort=1)
    assert said.startswith("split 'classes' goes by class, and 'mine' has numbers for labels")
    assert f"`{said}`" in PAGE


def test_a_batch_of_one_sample_leaves_the_client_of_a_batch_norm_out(caplog: pytest.LogCaptureFixture) -> None:
    result = train(WithNorm(), pairs())  # nine samples in batches of eight
    assert result.reports[-1]["dropped_clients"] == [2]
    assert "client 2 left out: its training raised ValueError('Expected more than 1 value per channel" in caplog.text
    with pytest.raises(RunError, match="0 of 1 clients delivered a usable update"):
        train(WithNorm(), pairs()[2:])


# What a call leaves behind


@pytest.mark.parametrize("threads", [1, 2])
def test_random_numbers_and_threads_are_as_before(threads: int) -> None:
    model, lost = linear(), linear(features=7)
    torch.set_num_threads(threads)  # the sandbox puts it back
    torch.manual_seed(11)
    before = torch.random.get_rng_state()
    train(model, pairs(), threads=3 - threads)
    assert torch.get_num_threads() == threads and torch.equal(before, torch.random.get_rng_state())
    train("logistic", pairs(), threads=3 - threads)
    assert refused(lost, pairs(), threads=3 - threads).startswith("model 'Linear' raised")
    assert torch.get_num_threads() == threads and torch.equal(before, torch.random.get_rng_state())


def test_random_numbers_are_as_before_a_dataset_that_draws() -> None:
    def seed() -> None:
        random.seed(11)
        np.random.seed(11)
        torch.manual_seed(11)

    seed()
    wanted = random.random(), np.random.rand(), float(torch.rand(()))
    for call, model in ((train, "logistic"), (refused, "lenet")):
        seed()
        call(model, [Items(*TEST, noise=0.1)], Items(*TEST, noise=0.1))
        assert (random.random(), np.random.rand(), float(torch.rand(()))) == wanted


def test_what_the_caller_has_drawn_does_not_matter() -> None:
    model, results = linear(), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        results.append(train(model, [Items(x, y, noise=0.1) for x, y in pairs()], Items(*TEST, noise=0.1)))
    assert same(*results)


def test_without_a_folder_nothing_is_written_anywhere(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    for name in ("work", "tmp", "home"):
        (tmp_path / name).mkdir()
    patch.chdir(tmp_path / "work")
    for name in ("HOME", "XDG_CACHE_HOME", "FEDMPI_CACHE", "FEDMPI_DATA"):
        patch.setenv(name, str(tmp_path / "home"))
    patch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for knobs in ({"log": "tensorboard"}, {"algorithm": "scaffold", "memory": {"limit": 0.0}}):
        assert train(linear(), pairs(), **knobs).out is None
    assert not [path for name in ("work", "tmp", "home") for path in (tmp_path / name).iterdir()]


def test_quiet_prints_nothing_and_loud_a_line_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    train(linear(), pairs())
    assert capsys.readouterr() == ("", "")
    train(linear(), pairs(), quiet=False)
    said = capsys.readouterr().out.splitlines()
    assert said[1] == "Linear, 15 parameters; step: contiguous, float32"
    assert said[2].startswith("your data split natural over 3 clients")
    assert [line.split()[1] for line in said[3:]] == ["1/2", "2/2"]


# The result


def score(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(TEST[0]).argmax(1) == TEST[1]).double().mean())


@pytest.mark.parametrize("model", [linear(), WithNorm(), "logistic"], ids=["linear", "norm", "logistic"])
def test_the_model_has_the_score_of_the_last_round(model: Any) -> None:
    result = train(model, pairs()[:2], rounds=5)
    assert not result.model.training
    assert score(result.model) == pytest.approx(result.reports[-1]["test_accuracy"], abs=1e-9)
    assert [h["round"] for h in result.reports] == [1, 2, 3, 4, 5]


def test_the_state_dict_saves_and_loads() -> None:
    result, file = train(WithNorm(), pairs()[:2]), io.BytesIO()
    torch.save(result.model.state_dict(), file)
    assert len(file.getvalue()) < 20_000
    file.seek(0)
    again = WithNorm()
    again.load_state_dict(torch.load(file, weights_only=True))
    assert score(again.eval()) == pytest.approx(result.reports[-1]["test_accuracy"], abs=1e-9)


def test_the_tensors_of_the_model_lie_in_memory_of_their_own() -> None:
    model = train(WithNorm(), pairs()[:2]).model
    tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name != "scale")]
    assert all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert model.again is model.last and all(p.grad is None for p in model.parameters())
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())


def test_the_result_can_be_trained_on() -> None:
    first = train(linear(), pairs())
    kept = {name: tensor.clone() for name, tensor in weights(first).items()}
    second = train(first.model, pairs())
    assert not same(first, second) and all(torch.equal(kept[name], t) for name, t in weights(first).items())
    nn.functional.cross_entropy(first.model(TEST[0]), TEST[1]).backward()
    assert first.model.weight.grad is not None


def test_two_calls_in_a_row_give_the_same() -> None:
    model = WithNorm()
    data = [Items(x, y, noise=0.1) for x, y in pairs()[:2]]
    first, second = (train(model, data, algorithm="fedadam") for _ in range(2))
    assert same(first, second)
    assert not same(first, train(model, data, algorithm="fedadam", seed=1))


# The run folder, and the command line


def test_a_run_folder_is_that_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = train(linear(), pairs(), out=tmp_path / "run")
    assert result.out == tmp_path / "run"
    names = {path.name for path in result.out.iterdir()}
    assert names == {
        "checkpoints",
        "lock",
        "starts.jsonl",
        "config.yaml",
        "environment.json",
        "partition.json",
        "metrics.jsonl",
        "model.safetensors",
        "finished.json",
    }
    saved = load_file(result.out / "model.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights(result).items())
    assert metrics(result.out) == json.loads(json.dumps(result.reports))
    assert [sum(c) for c in json.loads((result.out / "partition.json").read_text())["histogram"]] == [24, 16, 9]
    train(linear(), pairs(), algorithm=put_together(), out="own", log_to="tensorboard")
    assert (tmp_path / "own" / "tensorboard").is_dir()
    capsys.readouterr()
    assert main(["compare", "run", "own"]) == 0
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split()[:2] for row in rows] == [["run", "fedavg"], ["own", "own"]]
    assert f"{result.reports[-1]['test_accuracy']:.4f}" in rows[0]


def test_a_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    train(linear(), pairs(), out="run")
    assert refused(linear(), pairs(), out="run") == (
        "--out run already holds a finished run; choose another folder or remove it, or resume it with more "
        "--rounds and --resume force"
    )


@pytest.mark.parametrize(
    "options", ["", "--algorithm fedyogi --mask and --tau 0.3", "--algorithm scaffold --sum float32"]
)
def test_the_command_line_gives_the_same_bits(options: str, tmp_path: Path) -> None:
    (tmp_path / "api_same.py").write_text("from shell import tiny\n\n\ndef make():\n    return tiny()\n")
    same_knobs = "--split dirichlet --clients 8 --cohort 4 --rounds 3 --threads 1 --local.lr 0.05 --local.batch 10"
    command = f"train --data api_same:make --model logistic {same_knobs} {options} --log_to none --out cli"
    assert main(command.split()) == 0
    words = options.replace("--", "").split()
    knobs = dict(zip(words[::2], words[1::2], strict=True)) | {"local": {"lr": 0.05, "batch": 10}}
    if "tau" in knobs:
        knobs["tau"] = float(knobs["tau"])
    result = train("logistic", tiny(), None, split="dirichlet", clients=8, cohort=4, **(knobs | {"rounds": 3}))
    saved = load_file(tmp_path / "cli" / "model.safetensors")
    assert saved.keys() == weights(result).keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in weights(result).items())
    assert without_seconds(metrics(tmp_path / "cli")) == without_seconds(json.loads(json.dumps(result.reports)))


# Several ranks

RANKS = """
import json, os, sys
import test_api as t
from fedmpi.errors import UserError

out, rank = sys.argv[1], int(os.environ["RANK"])
shown = t.calls(rank, out)
wrong = t.linear(features=5), t.linear(features=4 + rank), t.linear()  # on both ranks, on one, on one before it begins
for model, tau in zip(wrong, (0, 0, 2 * rank)):
    try:
        t.train(model, t.pairs(), mask="gma", tau=tau)
    except UserError as error:
        shown.append(str(error))
shown.append(t.numbers(t.train("logistic", t.pairs())))  # and on they go
with open(f"{out}-{rank}.json", "w") as file:
    json.dump(shown, file)
"""


def calls(rank: int, out: str | None) -> list[Any]:
    """The results of several calls on this rank, which starts with weights of its own."""
    noisy = [Items(x, y, noise=0.1) for x, y in pairs()]
    return [
        numbers(train(linear(seed=rank), pairs(), algorithm=put_together(), rounds=3)),
        numbers(train(linear(), noisy, Items(*TEST), algorithm="scaffold", out=out)),
        numbers(train(linear(), Items(*TEST, noise=0.1), TEST, split="dirichlet", clients=5)),
    ]


def numbers(result: Result) -> Any:
    """A result as JSON, without what depends on the clock or on the number of ranks."""
    history = [{k: v for k, v in h.items() if not k.startswith("bytes_")} for h in without_seconds(result.reports)]
    return json.loads(json.dumps([{name: t.tolist() for name, t in weights(result).items()}, history]))


@pytest.mark.launchers
@pytest.mark.timeout(300)
def test_two_ranks_give_the_same_bits_as_one_and_raise_the_same(tmp_path: Path) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    command = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "ranks.py", str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, env=rank_environment(), capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    shown = [json.loads((tmp_path / f"run-{rank}.json").read_text()) for rank in (0, 1)]
    assert shown[0] == shown[1]
    assert shown[0][:3] == calls(0, None), "rank 0's weights count"
    assert [said.partition(" of ")[0] for said in shown[0][3:6]] == [
        "rank 0: model 'Linear' raised RuntimeError for samples [2, 4]",
        "rank 1: model 'Linear' raised RuntimeError for samples [2, 4]",
        "rank 1: --tau is 2.0; it must be in [0, 1]",
    ]
    assert shown[0][6:] == [numbers(train("logistic", pairs()))]
    assert (tmp_path / "run" / "finished.json").exists() and done.stdout == ""


@pytest.mark.parametrize(
    ("knobs", "named"),
    [
        ({"mask": "gma"}, "mask"),
        ({"local": {"lr": 0.5, "batch": 4}, "tau": 0.3}, "local.lr, tau"),
        ({"server": {"lr": 2.0}}, "server"),
        ({"local": Local(momentum=0.5)}, "local.momentum"),
        ({"lr": 0.5}, "local.lr"),
    ],
)
def test_knobs_that_an_algorithm_has_already_are_refused(knobs: dict[str, Any], named: str) -> None:
    said = refused(linear(), pairs(), algorithm=put_together(), **knobs)
    assert said.startswith(f"{named} is given with an Algorithm, which has its own rules; leave it out")


def test_an_algorithm_is_made_of_rules() -> None:
    said = refused(linear(), pairs(), algorithm=replace(put_together(), mask="gma"))
    assert said == "the algorithm's mask is str; see docs/own-algorithm.md for what it is"


def test_small_things_a_caller_gets_wrong_or_right() -> None:
    assert refused(linear(), pairs(), out=3) == "out is int; it must be the name of a folder, or None"
    assert train(linear(outputs=10), pairs()).rank == 0, "more outputs than classes do no harm"
    assert {"train", "Arrays", "Datasets"} <= set(dir(fedmpi))

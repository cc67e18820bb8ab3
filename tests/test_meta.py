"""The meta step (FedMeta) and shared samples (FedShare): a gradient over all ranks, and the set it is taken on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federation import CPU, SIZES, algorithm, arrays, federate, norm_model, partition, plain_model, plan, tasks
from safetensors.torch import load_file
from shell import CLASSES, metrics, sandbox, settings_of, tiny, train

from fedmpi.algorithms import ALGORITHMS, MetaStep
from fedmpi.clients.task import Task
from fedmpi.clients.training import Start
from fedmpi.comm import Comm
from fedmpi.comm.threads import run_threads
from fedmpi.data import Partition
from fedmpi.errors import CommonError, UserError
from fedmpi.local import LocalResult, LocalRule
from fedmpi.meta import take_meta_step
from fedmpi.models import find_model
from fedmpi.rounds import begin, make_sums
from fedmpi.runs.build import load_data, prepare
from fedmpi.runs.config import Config, Local, Meta

META = np.random.default_rng(1).choice(sum(SIZES), 23, replace=False)


def moving(by: float) -> LocalRule:
    """Clients that train nothing and move every parameter alike."""
    return LocalRule(lambda job: LocalResult(job.delta_P.fill_(by)))


def gradient(w_P: torch.Tensor, which: np.ndarray) -> torch.Tensor:
    """That of the plain model's mean loss on some samples, in float64 by torch alone."""
    data, task = arrays(), tasks(1, plain_model)[0]
    x = (data.x[which].double() / 255 - data.mean[0]) / data.std[0]
    w = w_P.double().requires_grad_()
    spans = {span.name: span for span in task.layout.spans}
    weight, bias = (w[spans[k].start : spans[k].start + spans[k].shape.numel()] for k in ("1.weight", "1.bias"))
    F.cross_entropy(F.linear(x.flatten(1), weight.view(3, 36), bias), data.y[which]).backward()
    return w.grad


# The step


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 4, 23, 100])
@pytest.mark.parametrize("by", [0.0, 0.125])
def test_it_is_a_step_down_the_gradient_on_the_whole_set_from_where_the_server_went(
    size: int, batch: int, by: float
) -> None:
    """23 samples in blocks of 4: the last one is short, and counts for less."""
    algo = algorithm("mean", local=moving(by), meta=MetaStep(lr=0.5, batch=batch))
    states, reports = federate(size, algo, plan(rounds=1), plain_model, META)
    params = tasks(1, plain_model)[0].layout.params
    w_P = tasks(1, plain_model)[0].start()[0][:params] + by
    want = w_P.double() - 0.5 * gradient(w_P, META)
    assert gradient(w_P, META).abs().max() > 0.05
    for state in states:
        assert torch.allclose(state.model_N[:params].double(), want, atol=1e-6)
    assert set(reports[0].seconds) >= {"meta"}


@pytest.mark.parametrize("make", [plain_model, norm_model])
@pytest.mark.parametrize("batch", [3, 8, 64])
def test_it_is_the_same_bits_on_any_number_of_ranks(make, batch: int) -> None:
    """Ranks with more blocks than others, and with none."""
    algo = algorithm("gma", "yogi", lr=0.1, meta=MetaStep(lr=0.1, batch=batch))
    length = tasks(1, make)[0].layout.length
    alone, reports = federate(1, algo, None, make, META)
    plain, _ = federate(1, replace(algo, meta=None), None, make, META)
    assert not torch.equal(alone[0].model_N, plain[0].model_N)
    for size in range(2, 8):
        states, theirs = federate(size, algo, None, make, META)
        for state in states:
            assert torch.equal(state.model_N[:length], alone[0].model_N[:length])
        assert [r.train_loss for r in theirs] == [r.train_loss for r in reports]


def test_it_is_exact_where_the_clients_sums_are_not() -> None:
    """Clients that stay where they are: what is left is the meta step, the same bits under float32 too."""
    algo = algorithm("mean", local=moving(0.0), meta=MetaStep(lr=0.1, batch=4))
    models = [federate(size, algo, plan(sum="float32"), plain_model, META)[0][0].model_N[:111] for size in (1, 2, 3)]
    assert torch.equal(models[0], models[1]) and torch.equal(models[0], models[2])


def test_the_models_buffers_are_left_alone() -> None:
    """The gradient is taken as in training, which moves BatchNorm's statistics: they are forgotten."""
    task = tasks(1)[0]
    start_N, ints = task.start()
    algo = algorithm("mean", local=moving(0.0), meta=MetaStep(lr=0.5, batch=4))
    for size in (1, 3):
        states, _ = federate(size, algo, plan(rounds=2), meta=META)
        buffers = slice(task.layout.params, task.layout.length)
        assert torch.equal(states[0].model_N[buffers], start_N[buffers]) and torch.equal(states[0].ints, ints)
        assert not torch.equal(states[0].model_N[: buffers.start], start_N[: buffers.start])


def test_its_learning_rate_scales_the_step() -> None:
    def step(lr: float) -> torch.Tensor:
        algo = algorithm("mean", local=moving(0.0), meta=MetaStep(lr=lr))
        return federate(2, algo, plan(rounds=1), plain_model, META)[0][0].model_N[:111] - start_N[:111]

    start_N, _ = tasks(1, plain_model)[0].start()
    assert torch.allclose(step(0.5), step(0.25) * 2, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("spoil", ["nan", "huge"])
def test_a_diverged_model_fails_on_every_rank_with_the_same_message(size: int, spoil: str) -> None:
    """Two blocks of the set: on three ranks one has none, and raises all the same."""
    ours = tasks(size, plain_model, META)
    algo = algorithm(meta=MetaStep(lr=0.1, batch=12))

    def work(comm: Comm) -> tuple[str, bool]:
        task = ours[comm.rank]
        state = begin(task, algo, comm)
        if spoil == "nan":
            state.model_N[0] = float("nan")
        else:
            task.feed.scale.mul_(1e9)  # a gradient is as large as the images are
        before = state.model_N.clone()
        sums = make_sums(plan(), algo, task, comm, state.model_N)
        with pytest.raises(CommonError) as caught:
            take_meta_step(state.model_N, state.ints, 7, algo.meta, task, sums.meta, comm)
        return str(caught.value), torch.equal(before.nan_to_num(), state.model_N.nan_to_num())

    results = run_threads(size, work)
    assert results == [results[0]] * size
    assert results[0] == (
        "round 7: the gradient on the meta set is not a number or beyond 131072: the model has diverged; "
        "lower --meta.lr, --server.lr or --local.lr",
        True,
    )


def test_an_algorithm_without_a_meta_step_has_no_memory_for_one() -> None:
    def work(comm: Comm) -> list[bool]:
        task = tasks(1)[0]
        model_N, _ = task.start()
        both = [make_sums(plan(), algorithm(meta=m), task, comm, model_N) for m in (None, MetaStep(0.1))]
        return [sums.meta is None for sums in both]

    assert run_threads(1, work) == [[True, False]]


def test_it_costs_an_exchange_of_4_to_6_bytes_and_a_gather_of_4() -> None:
    size = 3
    with_it, without = (
        federate(size, algorithm(meta=meta), plan(rounds=1), plain_model, META)[1][0].bytes_sent
        for meta in (MetaStep(0.1), None)
    )
    padded = -(-111 // size) * size
    a_count, headers = 2 * 8 * (size - 1) // size, (size - 1) * 2 * 8
    low, high = (size * ((each + 4) * padded * (size - 1) // size + a_count) for each in (4, 6))
    assert low <= with_it - without <= high + size * headers


# Shared samples


def test_every_client_trains_on_the_shared_samples_and_weighs_as_much_more() -> None:
    torch.manual_seed(3)
    dealt = partition()
    shared = np.array([1, 4, 2])
    task = Task(plain_model(), arrays(), Partition(dealt.offsets, dealt.order, shared), seed=11, device=CPU)
    assert task.partition.sizes.tolist() == [size + 3 for size in SIZES]
    start_N, ints = task.start()
    for cid in range(len(SIZES)):
        job = task.job(Start(start_N, ints, 1, cid, plan().work))
        an_epoch = [i for batch in list(job.batches())[: -(-(SIZES[cid] + 3) // 4)] for i in batch.samples.tolist()]
        assert sorted(an_epoch) == sorted([*dealt.of(cid).tolist(), 1, 4, 2])


# The set, from a configuration


@pytest.fixture(autouse=True)
def patch() -> Iterator[pytest.MonkeyPatch]:
    with sandbox() as patch:
        yield patch


def config(algorithm: str, out: Path | str = "unused", **meta: Any) -> Config:
    return settings_of(Path(out), algorithm=algorithm, meta=Meta(**{"size": 30, **meta}))


def dealt(cfg: Config) -> tuple[Partition, np.ndarray]:
    _, partition, meta = load_data(prepare(cfg).cfg)
    return partition, meta


@pytest.mark.parametrize("name", ["fedmeta", "fedmeta-uga"])
@pytest.mark.parametrize("split", ["iid", "classes", "dirichlet", "quantity", "natural"])
def test_the_meta_set_is_nobodys(name: str, split: str) -> None:
    partition, meta = dealt(replace(config(name), split=split, clients=6))
    own = [set(partition.of(cid).tolist()) for cid in range(6)]
    assert len(meta) == 30 and not set(meta.tolist()) & set().union(*own)
    assert sum(map(len, own)) == len(set().union(*own)) <= 170
    assert partition.sizes.tolist() == [len(s) for s in own]
    if split == "natural":  # owners are those of the samples that are left, not of the first 170
        owner = tiny().owner.numpy()
        assert all(len({owner[i] for i in s}) == 1 for s in own)


def test_the_shared_set_is_everybodys_too() -> None:
    partition, meta = dealt(config("fedshare"))
    for cid in range(8):
        mine = partition.of(cid).tolist()
        assert mine[-30:] == meta.tolist() and len(set(mine)) == len(mine)
    assert partition.sizes.sum() == 170 + 8 * 30
    assert np.array_equal(meta, dealt(config("fedmeta"))[1]), "the same seed holds out the same samples"


def test_without_a_meta_set_everything_is_dealt() -> None:
    partition, meta = dealt(settings_of(Path("unused")))
    assert len(meta) == 0 and sorted(partition.order.tolist()) == list(range(200))


def test_the_size_the_seed_and_the_weights_say_what_is_held_out() -> None:
    y = tiny().y.numpy()
    _, usual = dealt(config("fedmeta"))
    assert [len(dealt(config("fedmeta", size=n))[1]) for n in (1, 7, 100)] == [1, 7, 100]
    assert not np.array_equal(usual, dealt(config("fedmeta", seed=1))[1])
    assert np.array_equal(usual, dealt(replace(config("fedmeta"), seed=9))[1]), "--seed draws the split alone"
    _, odd = dealt(config("fedmeta", weights=[3.0, 0.0, 1.0]))
    assert np.bincount(y[odd], minlength=3).tolist() == [23, 0, 7]  # 22.5 and 7.5: the first of equal remainders
    assert np.bincount(y[usual], minlength=3).min() > 3


def test_the_held_out_set_is_written_with_the_partition(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, said, shared in (
        ("fedmeta", "; 30 samples held out (meta step lr 0.05); ", False),
        ("fedshare", "; 30 samples held out (a copy for every client); ", True),
        ("fedavg", "; 30 samples held out (not used); ", False),  # what FedMeta is to be compared with
    ):
        train(config(name, tmp_path / name, seed=4, weights=[1.0, 1.0, 0.0]))
        _, meta = dealt(config(name, seed=4, weights=[1.0, 1.0, 0.0]))
        written = json.loads((tmp_path / name / "partition.json").read_text())
        sha = hashlib.sha256(b"".join(int(i).to_bytes(8, "little") for i in meta)).hexdigest()
        assert written["meta"] == {"seed": 4, "sha256": sha, "histogram": [15, 15, 0], "shared": shared}
        assert sum(map(sum, written["histogram"])) == 170
        assert said in capsys.readouterr().out.replace("\n    ", " ").splitlines()[2]
    train(settings_of(tmp_path / "plain"))
    assert "meta" not in json.loads((tmp_path / "plain" / "partition.json").read_text())
    assert "held out" not in capsys.readouterr().out


def recall(out: Path) -> list[float]:
    """The share of each class of the test set that a run's model finds."""
    data = tiny()
    model = find_model("logistic").make(tuple(data.x.shape[1:]), CLASSES)
    model.load_state_dict(load_file(out / "model.safetensors"))
    images = (data.test_x.float() / 255 - data.mean[0]) / data.std[0]
    with torch.no_grad():
        found = model(images).argmax(1)
    return [float((found[data.test_y == c] == c).float().mean()) for c in range(CLASSES)]


def test_what_the_meta_set_is_made_of_steers_the_model(tmp_path: Path) -> None:
    """Clients that hardly train: a meta set of one class alone pulls the model to that class, away from the others."""
    rows = []
    for kind in range(CLASSES):
        weights = [float(c == kind) for c in range(CLASSES)]
        out = tmp_path / str(kind)
        train(replace(config("fedmeta", out, weights=weights, lr=1.0), rounds=2, local=Local(lr=1e-6)))
        rows.append(recall(out))
    for kind in range(CLASSES):
        others = [rows[k][kind] for k in range(CLASSES) if k != kind]
        assert rows[kind][kind] == 1.0 and max(others) < 0.8


def test_a_meta_step_is_timed_and_shown_and_other_runs_do_not_mention_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(replace(config("fedmeta", tmp_path / "a"), verbose=True))
    assert "  meta " in capsys.readouterr().out
    assert all(r["seconds"]["meta"] > 0 for r in metrics(tmp_path / "a"))
    train(settings_of(tmp_path / "b", verbose=True))
    assert "  meta " not in capsys.readouterr().out
    assert all(r["seconds"]["meta"] == 0 for r in metrics(tmp_path / "b"))


@pytest.mark.parametrize(
    ("name", "meta", "message"),
    [
        ("fedmeta", {"size": 200}, "--meta.size is 200 but there are only 200 samples; leave some for the clients"),
        ("fedshare", {"size": 0}, "--meta.share is true but --meta.size is 0; give the number of samples to hold out"),
        ("fedmeta", {"size": 0}, "--meta.lr is 0.05 but --meta.size is 0; give the number of samples to hold out"),
        ("fedmeta", {"weights": [1.0]}, "--meta.weights are 1 numbers, but the data have 3 classes: give one each"),
        ("fedmeta", {"weights": [0.0] * 3}, "--meta.weights are [0.0, 0.0, 0.0]; they must be numbers >= 0, and ..."),
        (
            "fedmeta",
            {"size": 80, "weights": [1.0, 0, 0]},
            "--meta.weights ask for 80 samples of class 0, which has 67...",
        ),
        (
            "fedmeta",
            {"size": 195},
            "split 'iid' got 8 clients, each of which needs 1 or more, but there are only 5 samples...",
        ),
    ],
)
def test_a_set_that_cannot_be_had_or_is_not_used_is_refused_before_there_is_a_folder(
    tmp_path: Path, name: str, meta: dict[str, Any], message: str
) -> None:
    out = tmp_path / "run"
    with pytest.raises(UserError) as caught:
        train(config(name, out, **meta))
    start, dots, _ = message.partition("...")
    assert str(caught.value) == message or (dots and str(caught.value).startswith(start))
    assert not out.exists()


def test_any_algorithm_may_have_a_meta_step_or_shared_samples(tmp_path: Path) -> None:
    assert ALGORITHMS["fedmeta"] == replace(ALGORITHMS["fedavg"], meta_size=600, meta_lr=0.05)
    for number, (name, meta) in enumerate(
        [("scaffold", {"lr": 0.1}), ("fednova", {"share": True}), ("uga", {"lr": 0.1, "share": True})]
    ):
        report = train(config(name, tmp_path / str(number), **meta))
        assert report.clients == 4 and report.dropped == ()

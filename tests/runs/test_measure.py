"""The measurements of `--evaluate`: by hand, the same on any number of ranks, and without a trace in the model."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from federation import algorithm, federate, norm_model, plan, tasks
from hypothesis import given, settings
from hypothesis import strategies as st
from quadratic import Client, QuadraticTask, descend, losing
from safetensors.torch import load_file
from shell import ALONE, CPU, data_row, metrics, sandbox, settings_of, tiny, without_seconds
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi import api, data
from fedmpi import commands as cli
from fedmpi.clients.feed import make_feed
from fedmpi.clients.task import each_class
from fedmpi.cohort import Work, draw
from fedmpi.comm import Comm, SoloComm
from fedmpi.comm.env import Place
from fedmpi.comm.threads import run_threads
from fedmpi.data import Arrays, Datasets, Partition
from fedmpi.data.objective import CLASSIFY, NEXT, Objective
from fedmpi.data.styles import Styles, tint
from fedmpi.errors import CommonError, UserError
from fedmpi.flat import Layout, Span
from fedmpi.local import sgd
from fedmpi.masks import Mask, make_mask
from fedmpi.models import find_model, make_model
from fedmpi.rounds import Report, State
from fedmpi.runs import run
from fedmpi.runs.build import load_data, plan_of, prepare
from fedmpi.runs.checkpoint.format import Progress
from fedmpi.runs.checkpoint.save import Saver
from fedmpi.runs.config import Checkpoint, Config, Eval, Meta, Skew
from fedmpi.runs.log import Log, line, record, report_of
from fedmpi.runs.measures import measure_names
from fedmpi.runs.measures.agreement import Agreement, threshold
from fedmpi.runs.measures.clients import Holdings, took_part
from fedmpi.runs.measures.gap import choose_train
from fedmpi.runs.measures.metric import top5
from fedmpi.runs.measures.score import evaluate
from fedmpi.runs.run import Outcome
from fedmpi.runs.stop import Stopped

KEYS = ["round", "clients", "train_loss", "kept", "agreement", "bytes_sent", "seconds"]
KEYS += ["bytes_between_nodes", "client_bytes_up", "client_bytes_down", "test_loss"]
KEYS += ["dropped_clients", "dropped", "test_accuracy"]
EVERY_ROUND = {"below_tau", "layers"}
SCORED = {"clients_accuracy", "train_accuracy", "train_sample_loss"}


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """A folder of its own to work in, no launcher's variables seen, no connection kept."""
    with sandbox() as patch:
        patch.chdir(tmp_path)
        patch.setattr(api, "find_place", lambda environ: ALONE)
        patch.setattr(api, "_connected", [])
        yield patch


def settings_with(out: Path, names: str, **changes: Any) -> Config:
    """A run whose clients differ in size and in their classes, and which has not learnt all when it ends."""
    cfg = settings_of(out, evaluate=names, split="dirichlet", skew=Skew(alpha=0.1), threads=1)
    return replace(cfg, local=replace(cfg.local, lr=0.0005), **changes)


def live(cfg: Config, ranks: int = 1, stop: int = 0) -> list[Outcome]:
    """One life of a run on threads, to its end or until it is stopped after a round: how it ended, on every rank."""
    real = Saver.round_done

    def watched(self: Saver, state: State, progress: Progress, flags: list[int], last: bool) -> list[int]:
        return real(self, state, progress, [int(state.round == stop), *flags[1:]], last)

    def work(comm: Comm) -> Outcome:
        place = Place("test", comm.rank, comm.size, comm.rank, comm.size)
        return run.run(prepare(cfg), comm, place, CPU, {})

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Saver, "round_done", watched)
        return run_threads(ranks, work, timeout=60)


def logged(out: Path) -> list[dict[str, Any]]:
    """The rounds of a run, without what depends on the ranks or on the clock."""
    rounds = without_seconds(metrics(out))
    return [{name: value for name, value in r.items() if not name.startswith("bytes_")} for r in rounds]


def sha256(out: Path) -> str:
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


def answers(out: Path, x: Tensor, arrays: Arrays) -> Tensor:
    """What the model of a run says to raw images, by plain torch."""
    model = make_model("logistic", find_model("logistic"), arrays.offers, "tiny")
    model.load_state_dict(load_file(out / "model.safetensors"), strict=True)
    with torch.no_grad():
        outputs: Tensor = model.eval()((x.float() / 255 - arrays.mean[0]) / arrays.std[0])
    return outputs


# Names


@pytest.mark.parametrize(
    ("names", "wanted"),
    [
        ("none", []),
        ("", []),
        ("gap", ["gap"]),
        (" clients ,agreement,none, clients", ["clients", "agreement"]),
        ("clients,agreement,gap,membership", ["clients", "agreement", "gap", "membership"]),
    ],
)
def test_measurements_are_named_in_a_list(names: str, wanted: list[str]) -> None:
    assert measure_names(names) == wanted
    assert prepare(Config(evaluate=names)).cfg.evaluate == names


def test_an_unknown_measurement_is_exit_code_2_and_leaves_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--data", "tiny", "--evaluate", "gap,clinets", "--out", "run"]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err == (
        "fedmpi: unknown measurement (--evaluate) 'clinets'; did you mean 'clients'? known: agreement, clients, gap, "
        "membership, none, perplexity, top5, or your own as package.module:name\n"
    )
    assert not Path("run").exists()


# Agreement


@st.composite
def counted(draw: st.DrawFn) -> dict[str, Any]:
    """Layers of any size, none or several of them in a piece, over buffers that nobody votes on; and votes."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(any))
    clients = draw(st.integers(1, 200))
    params = sum(sizes)
    votes = draw(st.lists(st.integers(-clients, clients), min_size=params, max_size=params))
    cuts = sorted({0, params, *draw(st.lists(st.integers(0, params), max_size=5))})
    return {"sizes": sizes, "clients": clients, "votes": votes, "cuts": cuts, "tau": draw(st.sampled_from(TAUS))}


TAUS = (0.1, 0.25, 1 / 3, 0.4, 0.5, 0.6, 0.9, 1.0)


def layout_of(sizes: list[int], buffers: int = 3) -> Layout:
    starts = np.cumsum([0, *sizes]).tolist()
    spans = [Span(f"layer{i}", starts[i], torch.Size([n]), False) for i, n in enumerate([*sizes, buffers])]
    return Layout(tuple(spans), starts[-1], starts[-1] + buffers, ())


@settings(max_examples=200)
@given(case=counted())
def test_layers_are_counted_in_any_pieces_on_any_ranks_as_in_the_whole(case: dict[str, Any]) -> None:
    """Pieces dealt out to two ranks, whose counts are summed, against the definition, element by element."""
    clients, tau, layout = case["clients"], case["tau"], layout_of(case["sizes"])
    kind = torch.int8 if clients <= 127 else torch.int32
    sizes = torch.tensor(case["votes"]).abs().to(kind)
    ranks = [Agreement(), Agreement()]
    for rank in ranks:
        rank.start(layout, tau, CPU)
    for i, (start, stop) in enumerate(zip(case["cuts"], case["cuts"][1:], strict=False)):
        ranks[i % 2].on_tile(SimpleNamespace(start=start, votes=sizes[start:stop]), torch.ones(()), clients)
    ranks[0].counts += ranks[1].counts
    found = ranks[0].read(SoloComm(), clients)

    least = math.ceil(round(tau * clients, 6))  # A < tau, in whole votes; the taus have few digits
    assert found["below_tau"] == sum(abs(v) < least for v in case["votes"]) / len(case["votes"])
    wanted = {}
    for span in layout.spans[:-1]:
        mine = [abs(v) for v in case["votes"][span.start : span.start + span.shape.numel()]]
        if mine:
            below = sum(v < least for v in mine)
            wanted[span.name] = {"agreement": sum(mine) / len(mine) / clients, "below_tau": below / len(mine)}
    assert found["layers"] == wanted and list(found["layers"]) == list(wanted)


class TwoLayers(QuadraticTask):
    """Two parameters, each a tensor of its own."""

    layout = Layout(
        spans=(Span("first", 0, torch.Size([1]), False), Span("second", 1, torch.Size([1]), False)),
        params=2,
        length=2,
        ints=(),
    )


def pulls(*lowest: tuple[float, float]) -> list[Client]:
    return [Client((1.0, 1.0), b, 4) for b in lowest]


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("mask", ["mean", "gma", "and"])
def test_agreement_by_hand(size: int, mask: str) -> None:
    """From 0, clients pull the first parameter up, all five of them; the second goes up twice, down once and twice it
    does not move: A = 1 and 1/5. With one client lost that pulls it up: 1 and 0."""
    clients = pulls((1, 1), (2, 1), (3, -1), (4, 0), (5, 0))
    algo = replace(algorithm(mask, local=sgd(0.1)))
    how = plan(seed=0, rounds=1, cohort=5, work=Work(steps=1))

    def make(ranks: int) -> QuadraticTask:
        return TwoLayers(clients, (0.0, 0.0), ranks)

    report = descend(size, make, algo, how, 0.4).reports[0]
    assert report.measures == {
        "below_tau": 0.5,
        "layers": {"first": {"agreement": 1.0, "below_tau": 0.0}, "second": {"agreement": 0.2, "below_tau": 1.0}},
    }
    lost = descend(size, make, replace(algo, local=losing(algo.local, 1, {1})), how, 0.4).reports[0]
    assert lost.dropped == (1,)
    assert lost.measures["layers"]["second"] == {"agreement": 0.0, "below_tau": 1.0}
    assert lost.measures["layers"]["first"] == {"agreement": 1.0, "below_tau": 0.0}


def test_a_tie_at_tau_is_not_below_it() -> None:
    """Of five clients three pull up, one down and one does not move: |votes| = 2 = 0.4 * 5."""
    clients = pulls((1, 1), (1, 1), (1, 1), (1, -1), (1, 0))
    how = plan(seed=0, rounds=1, cohort=5, work=Work(steps=1))
    ties = descend(1, lambda ranks: TwoLayers(clients, (0.0, 0.0), ranks), algorithm(local=sgd(0.1)), how, 0.4)
    assert ties.reports[0].measures["layers"]["second"] == {"agreement": 0.4, "below_tau": 0.0}


@pytest.mark.parametrize("piece", [5, 1 << 17])
def test_layers_of_a_real_model_are_those_of_its_votes(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of five elements straddle every layer; what the mask is given is the dense vector of votes."""
    monkeypatch.setattr("fedmpi.aggregate.travel.TILE", piece)
    seen: list[Tensor] = []
    gma = make_mask("gma", 0.4)

    def spied(votes_S: Tensor, clients: int) -> Tensor:
        seen.append(votes_S.clone())
        return gma(votes_S, clients)

    how, task = plan(rounds=1), tasks(1)[0]
    _, (report,) = federate(1, replace(algorithm(), mask=Mask(spied)), how, tau=0.4)
    votes, params = torch.cat(seen).abs().to(torch.float64), task.layout.params
    assert len(votes) == params and report.clients == 5
    layers = report.measures["layers"]
    assert list(layers) == [name for name, _ in norm_model().named_parameters()]
    for span in task.spans:
        mine = votes[span.start : span.start + span.shape.numel()]
        assert layers[span.name]["agreement"] == pytest.approx(float(mine.mean()) / 5, abs=1e-15)
        assert layers[span.name]["below_tau"] == pytest.approx(float((mine < 2).double().mean()), abs=1e-15)
    assert report.measures["below_tau"] == float((votes < 2).sum()) / params
    assert report.agreement == pytest.approx(
        sum(layers[span.name]["agreement"] * span.shape.numel() for span in task.spans) / params, abs=1e-15
    )


@pytest.mark.parametrize("how", ["exact", "float32"])
def test_agreement_is_the_same_on_any_ranks_and_leaves_the_model_alone(how: str) -> None:
    """float32 on five ranks reads the votes off the sums. Bits of its model depend on the ranks; votes do not in the
    first round."""
    algo, rounds = algorithm("gma", "yogi", lr=0.1), 3 if how == "exact" else 1
    plain = plan(sum=how, rounds=rounds)
    _, reports = federate(1, algo, plain, tau=0.4)
    for size in (1, 2, 3, 5):
        states, theirs = federate(size, algo, plain, tau=0.4)
        without, unmeasured = federate(size, algo, plain)
        assert [r.measures for r in theirs] == [r.measures for r in reports]
        assert torch.equal(states[0].model_N, without[0].model_N)
        assert [r.measures for r in unmeasured] == [{}] * rounds
        assert [r.bytes_sent for r in unmeasured] == [r.bytes_sent for r in theirs], "counted behind the round"


@pytest.mark.parametrize(
    ("changes", "tau"),
    [
        ({"mask": "mean"}, 0.4),
        ({"mask": "mean", "tau": 0.0}, 0.4),
        ({"mask": "mean", "tau": 0.7}, 0.7),
        ({"mask": "gma", "tau": 0.6}, 0.6),
        ({"mask": "gma", "tau": 0.0}, 0.4),
    ],
)
def test_tau_is_that_of_the_run_and_0_means_that_of_the_papers(changes: dict[str, Any], tau: float) -> None:
    assert threshold(prepare(Config(evaluate="agreement", **changes)).cfg) == tau


# Clients


def test_the_means_over_clients_by_hand() -> None:
    """Client 0 has three samples of class 0 and one of class 1, client 1 two of class 2, client 2 none, client 3 one of
    class 1, client 4 one of each. Class scores 0.8, 0.4 and 0.5."""
    labels = np.array([0, 0, 0, 1, 2, 2, 1, 0, 1, 2])
    holdings = Holdings(Partition(np.array([0, 4, 6, 6, 7, 10]), np.arange(10)), labels, 3)
    scores = (0.8, 0.4, 0.5)
    ours = [(3 * 0.8 + 0.4) / 4, 0.5, None, 0.4, (0.8 + 0.4 + 0.5) / 3]

    def means(took: set[int]) -> tuple[float | None, float | None]:
        found = holdings.means(scores, took)
        assert list(found) == ["participating", "others"]
        return found["participating"], found["others"]

    assert means({0, 1}) == pytest.approx(((ours[0] + ours[1]) / 2, (ours[3] + ours[4]) / 2))
    assert means({3}) == pytest.approx((0.4, (ours[0] + ours[1] + ours[4]) / 3))
    assert means({0, 1, 2, 3, 4}) == pytest.approx(((ours[0] + ours[1] + ours[3] + ours[4]) / 4, None))
    assert means({0, 1, 3, 4})[1] is None  # who is left has no sample
    assert means({2})[0] is None


def test_classes_without_a_test_sample_are_left_out_of_the_mix() -> None:
    labels = np.array([0, 1, 1, 1, 0])
    holdings = Holdings(Partition(np.array([0, 2, 4, 5]), np.arange(5)), labels, 2)
    assert holdings.means((0.25, math.nan), {0, 1}) == {"participating": 0.25, "others": 0.25}
    assert holdings.means((0.25, math.nan), {1}) == {"participating": None, "others": 0.25}
    assert holdings.means((math.nan, math.nan), {1}) == {"participating": None, "others": None}


@settings(max_examples=50)
@given(st.data())
def test_the_means_are_those_of_the_histogram(data: st.DataObject) -> None:
    """sum_c p_n(c) accuracy_c, over the dense table of who has what, in another order of the samples."""
    clients, kinds = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 5))
    sizes = data.draw(st.lists(st.integers(0, 6), min_size=clients, max_size=clients).filter(any))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    partition = Partition(np.cumsum([0, *sizes]), rng.permutation(sum(sizes)))
    labels, scores = rng.integers(0, kinds, sum(sizes)), rng.random(kinds)
    took = set(data.draw(st.lists(st.integers(0, clients - 1), max_size=clients)))
    table = partition.histogram(labels, kinds)
    found = Holdings(partition, labels, kinds).means(scores.tolist(), took)
    for side, those in (("participating", took), ("others", set(range(clients)) - took)):
        own = [float(table[n] / table[n].sum() @ scores) for n in sorted(those) if table[n].sum()]
        assert found[side] == (pytest.approx(sum(own) / len(own)) if own else None)


def test_each_class_is_scored_by_itself() -> None:
    outputs = torch.tensor([[2.0, 1.0], [0.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    assert each_class(CLASSIFY, outputs, torch.tensor([0, 0, 1, 1])) == {0: (1.0, 2), 1: (1.0, 2)}
    assert each_class(CLASSIFY, outputs, torch.tensor([0, 1, 1, 0])) == {0: (2.0, 2), 1: (2.0, 2)}


def test_a_sequence_is_of_the_class_of_its_last_position() -> None:
    """Two sequences of three labels: the first, of class 1, is right twice, the second, of class 0, three times."""
    y = torch.tensor([[0, 1, 1], [1, 1, 0]])
    outputs = F.one_hot(torch.tensor([[0, 0, 1], [1, 1, 0]]), 2).float()
    assert each_class(NEXT, outputs, y) == {0: (3.0, 3), 1: (2.0, 3)}


def by_hand(out: Path, cfg: Config, scores: list[float], round: int) -> dict[str, float | None]:
    """The two figures of a round, from the written partition and the drawn cohort."""
    table = np.array(json.loads((out / "partition.json").read_text())["histogram"])
    took = set(draw(cfg.seed, round, table.sum(1), cfg.cohort, 1).cids)
    own = [float(row / row.sum() @ np.array(scores)) for row in table]
    sides = [[own[n] for n in range(len(own)) if (n in took) == side] for side in (True, False)]
    return dict(zip(("participating", "others"), (sum(s) / len(s) if s else None for s in sides), strict=True))


def test_participating_and_others_are_scored_by_their_own_mix_of_classes(tmp_path: Path) -> None:
    cfg = settings_with(tmp_path / "run", "clients")
    live(cfg)
    arrays = tiny()
    right = answers(tmp_path / "run", arrays.test_x, arrays).argmax(1) == arrays.test_y
    scores = [float(right[arrays.test_y == c].double().mean()) for c in range(3)]
    last = metrics(tmp_path / "run")[-1]
    assert last["clients_accuracy"] == pytest.approx(by_hand(tmp_path / "run", cfg, scores, 3))
    assert last["test_accuracy"] == pytest.approx(float(right.double().mean()))
    assert len(set(scores)) > 1 and len(set(last["clients_accuracy"].values())) == 2  # else it would tell nothing


def test_where_everybody_takes_part_there_are_no_others(tmp_path: Path) -> None:
    live(settings_with(tmp_path / "run", "clients", cohort=8, rounds=1))
    found = metrics(tmp_path / "run")[0]["clients_accuracy"]
    assert found["others"] is None and 0 <= found["participating"] <= 1


def test_a_client_that_was_left_out_did_not_take_part(tmp_path: Path) -> None:
    cfg = settings_with(tmp_path / "run", "clients", clients=4, rounds=1)
    prepared = prepare(cfg)
    sound = prepared.algorithm.local

    def rule(job: Any) -> Any:
        result = sound(job)
        if job.cid == 2:
            result.delta_P.fill_(math.nan)
        return result

    prepared = replace(prepared, algorithm=replace(prepared.algorithm, local=replace(sound, run=rule)))
    outcome = run.run(prepared, SoloComm(), ALONE, CPU, {})
    task, state = outcome.task, outcome.state
    scores = evaluate(task, state, SoloComm(), block=25, classes=3).classes
    holdings = Holdings(task.partition, tiny().y.numpy(), 3)
    assert outcome.last.dropped == (2,) and took_part(outcome.last, plan_of(prepared), task.partition) == {0, 1, 3}
    assert outcome.last.measures["clients_accuracy"] == holdings.means(scores, {0, 1, 3})
    assert outcome.last.measures["clients_accuracy"]["others"] == holdings.means(scores, {2})["participating"]


def test_a_metric_of_ones_own_is_measured_by_its_name() -> None:
    """Half the accuracy, and lower is better, as far as anybody knows."""
    half = Objective("half", CLASSIFY.loss, "halves", lambda outputs, y: CLASSIFY.total(outputs, y) / 2, rises=False)
    result = trained(replace(tiny(), objective=half), evaluate="clients,gap")
    usual = trained(tiny(), evaluate="clients,gap")
    for own, last in zip(result.reports, usual.reports, strict=True):
        assert own["clients_halves"] == pytest.approx({k: v / 2 for k, v in last["clients_accuracy"].items()})
        assert own["train_halves"] == last["train_accuracy"] / 2


# Train against test


class Contrary(nn.Module):
    """Pixels to classes; behind its training it says the opposite."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1)) * (1 if self.training else -1)


def test_the_gap_is_scored_on_train_samples_as_they_are(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    """The data are augmented in training: the figures are those of the plain images, by plain torch."""
    patch.setitem(data.DATASETS, "tiny", data_row(lambda root: replace(tiny(), augment="crop:4+flip")))
    cfg = settings_with(tmp_path / "run", "gap", rounds=2)
    (outcome,) = live(cfg)
    arrays, samples = tiny(), choose_train(outcome.task.partition, 60)
    outputs, y = answers(tmp_path / "run", arrays.x[samples], arrays), arrays.y[samples]
    last = metrics(tmp_path / "run")[-1]
    assert last["train_accuracy"] == float((outputs.argmax(1) == y).sum()) / 60
    assert last["train_sample_loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), abs=1e-5)


def test_the_gap_is_scored_as_the_test_set_is_and_not_as_in_training() -> None:
    last = trained(tiny(), model=Contrary(), evaluate="gap").reports[-1]
    assert last["train_loss"] < 0.5 and last["train_accuracy"] < 0.1 and last["test_accuracy"] < 0.1
    assert last["train_sample_loss"] > 1.5


def test_the_samples_are_random_ones_that_clients_have() -> None:
    held = settings_with(Path("run"), "gap", meta=Meta(size=30))
    partition, meta = load_data(held)[1:]
    some = choose_train(partition, 60).tolist()
    assert len(set(some)) == 60 and not set(some) & set(meta.tolist()) and set(some) <= set(partition.order.tolist())
    assert some == choose_train(partition, 60).tolist() != partition.order[:60].tolist()
    assert sorted(choose_train(partition, 9999).tolist()) == sorted(partition.order.tolist())
    shared = load_data(replace(held, meta=Meta(size=30, share=True)))[1]
    assert set(choose_train(shared, 9999).tolist()) == set(range(200))


def test_no_more_train_samples_are_scored_than_test_samples(tmp_path: Path) -> None:
    (outcome,) = live(settings_with(tmp_path / "run", "gap", eval=Eval(batch=25, samples=20)))
    arrays, samples = tiny(), choose_train(outcome.task.partition, 20)
    right = answers(tmp_path / "run", arrays.x[samples], arrays).argmax(1) == arrays.y[samples]
    assert metrics(tmp_path / "run")[-1]["train_accuracy"] == float(right.sum()) / 20


def test_train_samples_are_painted_as_their_clients_have_them() -> None:
    """Two styles, red and green ink; the samples that are asked for one by one are those of a batch in training."""
    table = torch.tensor([[[255.0, 0, 0], [0, 0, 0]], [[0.0, 255, 0], [0, 0, 0]]])
    styles = Styles(3, table, tint, lambda y, *_: y % 2, lambda y, _: y * 0)
    grey = tiny()
    arrays = replace(
        grey, styles=styles, style=grey.y % 2, test_style=grey.test_y * 0, mean=grey.mean * 3, std=grey.std * 3
    )
    feed = make_feed(arrays, CPU)
    ((x, y),) = feed.plain([torch.tensor([0, 1, 2])])
    ink = (grey.x[:3].float() / 255).squeeze(1)
    shade = -grey.mean[0] / grey.std[0]
    assert y.tolist() == [0, 1, 2]
    for i, channel in enumerate((0, 1, 0)):
        wanted = torch.full((3, 12, 12), shade)
        wanted[channel] = (ink[i] - grey.mean[0]) / grey.std[0]
        assert torch.allclose(x[i], wanted, atol=1e-5)


@pytest.mark.parametrize("workers", [0, 2])
def test_train_samples_of_a_dataset_are_read_as_its_test_samples_are(workers: int) -> None:
    x, y = torch.rand(20, 4), torch.arange(20) % 3
    feed = make_feed(Datasets(TensorDataset(x, y), TensorDataset(x[:5], y[:5])), CPU, workers=workers)
    found = list(feed.plain([torch.tensor([3, 19]), torch.tensor([0])]))
    assert [pair[1].tolist() for pair in found] == [[0, 1], [0]]
    assert torch.equal(found[0][0], x[[3, 19]]) and torch.equal(found[1][0], x[[0]])


# All together: ranks, the model's bits, the folder


def test_everything_is_the_same_on_any_number_of_ranks_and_leaves_no_trace(tmp_path: Path) -> None:
    names = "clients,agreement,gap"
    cfg = settings_with(tmp_path / "1", names, eval=Eval(batch=7, every=2), rounds=5)
    live(cfg)
    alone = logged(tmp_path / "1")
    for size in (2, 3):
        live(replace(cfg, out=str(tmp_path / str(size))), size)
        assert logged(tmp_path / str(size)) == alone
        assert sha256(tmp_path / str(size)) == sha256(tmp_path / "1")
    for r in alone:
        found = EVERY_ROUND | (SCORED if r["round"] in (2, 4, 5) else set())
        assert (EVERY_ROUND | SCORED) & r.keys() == found
    live(replace(cfg, evaluate="none", out=str(tmp_path / "plain")))
    assert sha256(tmp_path / "plain") == sha256(tmp_path / "1")
    plain = logged(tmp_path / "plain")
    assert plain == [{k: v for k, v in r.items() if k not in EVERY_ROUND | SCORED} for r in alone]
    assert [list(r) for r in metrics(tmp_path / "plain")] == [KEYS] * 5


def measure_in_processes(comm: Comm, out: str, want: list[dict[str, Any]]) -> None:
    """A run in processes, some of which share memory, against what one process found."""
    with sandbox():
        cfg = settings_with(Path(out), "clients,agreement,gap")
        place = Place("test", comm.rank, comm.size, comm.rank, comm.size)
        outcome = run.run(prepare(cfg), comm, place, CPU, {})
    assert [report.measures for report in outcome.history] == want


@pytest.mark.processes
def test_everything_is_the_same_in_processes(tmp_path: Path, gloo: Callable[..., None]) -> None:
    (alone,) = live(settings_with(tmp_path / "1", "clients,agreement,gap"))
    gloo(3, measure_in_processes, str(tmp_path / "3"), [report.measures for report in alone.history])


def test_a_run_resumes_with_other_measurements(tmp_path: Path) -> None:
    cfg = settings_with(tmp_path / "run", "agreement", rounds=4, checkpoint=Checkpoint(every=1))
    with pytest.raises(Stopped):
        live(cfg, stop=2)
    first, second = live(replace(cfg, evaluate="clients,gap"), ranks=2)
    live(replace(cfg, evaluate="none", out=str(tmp_path / "plain")))
    assert sha256(tmp_path / "run") == sha256(tmp_path / "plain")
    keys = [{name for name in r if name in EVERY_ROUND | SCORED} for r in metrics(tmp_path / "run")]
    assert keys == [EVERY_ROUND, EVERY_ROUND, SCORED, SCORED]
    assert [set(report.measures) for report in first.history] == keys, "read back from the log"
    assert [r.measures for r in first.history] == [r.measures for r in second.history]


# What the data or the model do not have


def numbers(count: int) -> tuple[Tensor, Tensor]:
    x = torch.rand(count, 4)
    return x, x.sum(1, keepdim=True)


def trained(some: Any, test: Any = None, model: Any = "logistic", **knobs: Any) -> fedmpi.Result:
    """A quick and quiet call of fedmpi.train."""
    usual = {"rounds": 3, "threads": 1, "quiet": True, "clients": 8, "cohort": 4, "split": "iid"}
    local = {"lr": 0.05, "batch": 10}
    usual = usual if isinstance(some, Arrays) else {k: usual[k] for k in ("rounds", "threads", "quiet")}
    return fedmpi.train(model, some, test, **({"local": local} | usual | knobs))


def test_labels_that_are_no_classes_are_refused_before_training(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match="^--evaluate clients goes by class, and 'your data' has numbers for labels"):
        trained([numbers(10), numbers(12)], numbers(8), nn.Linear(4, 1), evaluate="clients", quiet=False)
    assert "round" not in capsys.readouterr().out
    result = trained([numbers(10), numbers(12)], numbers(8), nn.Linear(4, 1), evaluate="agreement,gap")
    assert {"train_error", "train_sample_loss", "below_tau"} <= result.reports[-1].keys()


class Pairs(nn.Module):
    """Answers in a pair, for an objective that knows what to make of it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(144, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.last(x.flatten(1)), x


def test_outputs_that_cannot_be_taken_apart_by_class_are_refused_before_training() -> None:
    odd = Objective(
        "odd", lambda o, y, how: CLASSIFY.loss(o[0], y, how), "accuracy", lambda o, y: CLASSIFY.total(o[0], y)
    )
    arrays = replace(tiny(), objective=odd)
    with pytest.raises(
        UserError, match="^--evaluate clients scores the samples of a class by themselves, which raised"
    ):
        trained(arrays, model=Pairs(), evaluate="clients")
    assert "train_accuracy" in trained(arrays, model=Pairs(), evaluate="gap").reports[-1]


# fedmpi.train


def test_a_python_call_takes_them_as_any_knob() -> None:
    result = trained(tiny(), evaluate="clients,agreement,gap")
    assert all(EVERY_ROUND | SCORED <= r.keys() for r in result.reports)
    assert list(result.reports[-1]["layers"]) == [name for name, _ in result.model.named_parameters()]
    json.dumps(result.reports, allow_nan=False)
    with pytest.raises(UserError, match=r"^unknown measurement \(--evaluate\) 'layers'; known: agreement, clients"):
        trained(tiny(), evaluate="layers")


# Membership


def test_a_finished_run_is_attacked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --rounds 2 --threads 1 --log_to none"
    assert cli.main(["train", *options.split(), "--evaluate", "membership", "--out", "run"]) == 0
    found = json.loads(Path("run/attack.json").read_text())
    assert found["model_sha256"] == sha256(Path("run")) and 0 <= found["loss"]["accuracy"] <= 1
    last = capsys.readouterr().out.splitlines()[-2]
    assert last == (
        f"membership attack: accuracy {found['logistic']['accuracy']:.4f} by the outputs, "
        f"{found['loss']['accuracy']:.4f} by the loss; guessing has 0.5"
    )
    assert not {name for name in metrics(Path("run"))[-1]} & (EVERY_ROUND | SCORED)
    for name in ("logistic", "loss"):
        recorded = metrics(Path("run"))[-1][f"membership_{name}"]
        assert recorded == {key: found[name][key] for key in ("accuracy", "auc", "advantage", "tpr_at_1_fpr")}
    assert "membership_loss" not in metrics(Path("run"))[0]


def test_a_run_without_a_folder_cannot_be_attacked() -> None:
    with pytest.raises(UserError, match="^--evaluate membership attacks a finished run in its folder"):
        trained(tiny(), evaluate="membership")


def test_data_and_a_model_that_were_handed_over_are_attacked_too(tmp_path: Path) -> None:
    model = Contrary()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    arrays = replace(tiny(), name="made by hand")
    result = trained(arrays, model=model, evaluate="membership", out=str(tmp_path / "run"))
    found = json.loads((tmp_path / "run" / "attack.json").read_text())
    assert found["model_sha256"] == sha256(tmp_path / "run")
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(
        torch.equal(t, result.model.state_dict()[name])
        for name, t in load_file(tmp_path / "run" / "model.safetensors").items()
    )


def test_an_attack_that_fails_is_one_message_on_every_rank_and_the_run_stays_finished(
    tmp_path: Path, patch: pytest.MonkeyPatch
) -> None:
    """One test sample is too few to attack with. Started again by its launcher, the run does nothing but the attack."""
    whole = tiny()
    few = replace(whole, test_x=whole.test_x[:1], test_y=whole.test_y[:1])
    patch.setitem(data.DATASETS, "tiny", data_row(lambda root: few))
    cfg = settings_of(tmp_path / "run", evaluate="membership", threads=1)
    environ = {"SLURM_JOB_ID": "7"}
    messages: list[str] = []

    def work(comm: Comm, again: dict[str, str]) -> None:
        place = Place("test", comm.rank, comm.size, comm.rank, comm.size)
        with pytest.raises(CommonError) as caught:
            run.run(prepare(cfg), comm, place, CPU, environ | again)
        messages.append(str(caught.value))

    run_threads(2, lambda comm: work(comm, {}), timeout=60)
    out = tmp_path / "run"
    assert len(messages) == 2 and len(set(messages)) == 1
    assert messages[0].startswith(f"the run in {out} is finished, but a measurement failed (rank 0: membership attack")
    assert messages[0].endswith(f"; then try 'fedmpi attack {out}')") and "at least 2" in messages[0]
    done = (out / "finished.json").read_text()
    assert json.loads(done)["model_sha256"] == sha256(out) and not (out / "attack.json").exists()
    run_threads(2, lambda comm: work(comm, {"SLURM_RESTART_COUNT": "1"}), timeout=60)
    assert len(set(messages)) == 1 and (out / "finished.json").read_text() == done and len(metrics(out)) == 3


def test_a_fault_in_an_attack_is_logged_with_its_traceback(
    tmp_path: Path, patch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    patch.setitem(sys.modules, "fedmpi.experiments.attack.command", None)  # it cannot be imported
    with pytest.raises(CommonError, match=r"\(measurement 'membership' raised ModuleNotFoundError: "):
        live(settings_of(tmp_path / "run", evaluate="membership", threads=1))
    assert (tmp_path / "run" / "finished.json").exists()
    assert "measurement 'membership' raised ModuleNotFoundError" in caplog.text and caplog.records[-1].exc_info


def test_what_an_attack_has_found_goes_with_the_model_that_it_was_made_on(tmp_path: Path) -> None:
    cfg = settings_of(tmp_path / "run", evaluate="membership", rounds=2, threads=1)
    live(cfg)
    stale = (tmp_path / "run" / "attack.json").read_text()
    live(replace(cfg, rounds=3, evaluate="none", resume="force"))
    assert not (tmp_path / "run" / "attack.json").exists()
    live(replace(cfg, rounds=4, resume="force"))
    assert json.loads((tmp_path / "run" / "attack.json").read_text()) != json.loads(stale)
    (tmp_path / "run" / "finished.json").unlink()
    live(replace(cfg, evaluate="none", resume="never"))
    assert not (tmp_path / "run" / "attack.json").exists()


# From outside


def write_module(name: str, text: str) -> None:
    head = "import torch\nfrom fedmpi.runs.measures import Measure\n\n"
    Path(f"{name}.py").write_text(head + text)


OWN = """
class Own(Measure):
    def prepare(self, run):
        self.big = self.tiles = 0

    def on_tile(self, tile, mask, clients):
        self.big += int((tile.mean.abs() > 1e-5).sum())
        self.tiles += mask.numel()

    def after_round(self, run, report):
        counts = torch.tensor([self.big, self.tiles])
        run.comm.sum(counts)
        self.big = self.tiles = 0
        big, params = counts.tolist()
        nested = {"params": params, "round": torch.tensor(report.round)}
        return {"big": big / params, "own": nested} if report.round > 1 else None

    def at_end(self, run):
        with torch.no_grad():
            size = sum(float(p.double().norm()) for p in run.model.parameters())
        return {"size": size, "clients_seen": run.task.partition.clients, "nothing": None}


def halves(outputs, labels):
    return (outputs.argmax(-1) == labels) / 2


def wrong(outputs, labels):
    return (outputs.argmax(-1) != labels).sum()
"""


def test_measurements_from_outside_are_the_same_on_any_number_of_ranks(tmp_path: Path) -> None:
    write_module("outside", OWN)
    names = "outside:Own,outside:halves,agreement,outside:wrong"
    cfg = settings_with(tmp_path / "1", names, eval=Eval(batch=7, every=2), mask="gma")
    (alone,) = live(cfg)
    first, second = live(replace(cfg, out=str(tmp_path / "2")), 2)
    assert logged(tmp_path / "1") == logged(tmp_path / "2") and sha256(tmp_path / "1") == sha256(tmp_path / "2")
    assert [r.measures for r in alone.history] == [r.measures for r in first.history]
    assert [r.measures for r in first.history] == [r.measures for r in second.history]
    rounds = logged(tmp_path / "1")
    assert "big" not in rounds[0] and 0 < rounds[1]["big"] < 1
    assert rounds[1]["own"] == {"params": alone.task.layout.params, "round": 2}
    assert [("test_halves" in r, "below_tau" in r, "size" in r) for r in rounds] == [
        (False, True, False),
        (True, True, False),
        (True, True, True),
    ]
    for r in rounds[1:]:
        assert r["test_halves"] == pytest.approx(r["test_accuracy"] / 2, abs=1e-6)
        assert r["test_wrong"] == pytest.approx(1 - r["test_accuracy"], abs=1e-6)
    assert rounds[2]["nothing"] is None and rounds[2]["clients_seen"] == 8
    live(replace(cfg, evaluate="none", out=str(tmp_path / "plain")))
    assert sha256(tmp_path / "plain") == sha256(tmp_path / "1")


def test_the_headline_stays_and_every_reader_has_the_numbers(tmp_path: Path) -> None:
    write_module("readers", OWN)
    result = trained(tiny(), evaluate="readers:halves,readers:Own", out=str(tmp_path / "run"), log_to="tensorboard")
    assert result.metric == "test_accuracy" and report_of(result.reports[-1]).metric == "accuracy"
    assert result.history["own/params"][2] == 435 and result.reports[-1] == metrics(tmp_path / "run")[-1]
    finished = json.loads((tmp_path / "run" / "finished.json").read_text())
    assert {"test_accuracy", "best_test_accuracy"} <= finished.keys()
    found = tensorboard(tmp_path / "run")
    assert {"test_halves", "big", "own/params", "size"} <= found.keys()
    assert "  halves 0." in line(report_of(result.reports[-1]), 3)


def test_a_finished_run_that_has_more_rounds_keeps_what_was_measured_at_its_end(tmp_path: Path) -> None:
    write_module("ends", OWN)
    cfg = settings_with(tmp_path / "run", "ends:Own", rounds=2)
    live(cfg)
    live(replace(cfg, rounds=3, resume="force"))
    assert ["size" in r for r in metrics(tmp_path / "run")] == [False, True, True]


class Wide(nn.Module):
    """Seven logits, of which the last ones are never right."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(144, 7)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1))


def test_top5_is_a_row() -> None:
    result = trained(tiny(), model=Wide(), evaluate="top5", rounds=1)
    assert result.reports[-1]["test_accuracy"] <= result.reports[-1]["test_top5"] <= 1
    outputs = torch.tensor([[6.0, 5, 4, 3, 2, 1], [6.0, 5, 4, 3, 2, 1]])
    assert top5(outputs, torch.tensor([4, 5])).tolist() == [True, False]
    with pytest.raises(UserError, match="^measurement 'top5' raised ValueError.*more than five"):
        trained(tiny(), evaluate="top5")


BROKEN = """
def raises(outputs, labels):
    return outputs.no_such_thing

def shape(outputs, labels):
    return outputs

def accuracy(outputs, labels):
    return labels

class Needs(Measure):
    def __init__(self, something):
        pass

class Refuses(Measure):
    def prepare(self, run):
        raise KeyError("no such layer")

class Plain:
    pass

number = 5
"""


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("nowhere:Own", "there is no module 'nowhere'"),
        ("broken:Raises", "module 'broken' has no 'Raises'; did you mean 'raises'"),
        ("broken.py:raises", "is no import path"),
        ("broken:raises", "raised AttributeError (broken.py, line 6)"),
        ("broken:shape", "returned a tensor [2, 3] for labels [2]"),
        ("broken:accuracy", "is recorded as test_accuracy, which is there already"),
        ("broken:Needs", "when it was made; its class must take no argument"),
        ("broken:Refuses", "measurement 'broken:Refuses' raised KeyError"),
        ("broken:Plain", "is the class Plain; it must be a subclass of fedmpi.runs.measures.Measure"),
        ("broken:number", "is int; it must be a subclass"),
    ],
)
def test_a_mistake_in_a_measurement_is_exit_code_2_before_training(
    name: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_module("broken", BROKEN)
    sys.modules.pop("broken", None)
    options = "--data tiny --split iid --model logistic --clients 8 --cohort 4 --threads 1 --log_to none --out run"
    assert cli.main(["train", *options.split(), "--evaluate", name]) == 2
    said = capsys.readouterr()
    assert said.out == "" and why in said.err.splitlines()[-1], said.err
    assert not Path("run").exists()


FAILING = """
class Fails(Measure):
    where = rank = None

    def prepare(self, run):
        self.run, self.round = run, 0

    def fail(self, where):
        if (self.where, self.rank, self.round) == (where, self.run.comm.rank, 2):
            raise ArithmeticError("out of luck")

    def on_tile(self, tile, mask, clients):
        self.round = self.run.state.round + 1 if self.run.current else 1
        self.fail("on_tile")

    def after_round(self, run, report):
        self.fail("after_round")
        run.comm.sum(torch.zeros(3, dtype=torch.int64))
        self.fail("after the sum")
        if self.where == "another sum" and run.comm.rank == self.rank and report.round == 2:
            run.comm.sum(torch.zeros(5, dtype=torch.int64))
        if self.where == "a text" and report.round == 2:
            return {"note": "fine"}
        if self.where == "taken" and report.round == 2:
            return {"test_loss": 1.0}
        return {"own": report.round}


def metric(outputs, labels):
    if Fails.where == "metric" and Fails.calls > 4:
        raise ArithmeticError("out of luck")
    Fails.calls += 1
    return labels
"""

PROBLEMS = {
    "on_tile": "rank 1: measurement 'failing:Fails' raised ArithmeticError (failing.py, line 13): out of luck",
    "after_round": "rank 1: measurement 'failing:Fails' raised ArithmeticError",
    "after the sum": "rank 1: measurement 'failing:Fails' raised ArithmeticError",
    "another sum": "ranks disagree on what a measurement sums next ([0, 5] numbers)",
    "a text": "rank 0: measurement 'failing:Fails' returned str for 'note'; it must be a number or None",
    "taken": "rank 0: measurement 'failing:Fails' returned 'test_loss', which is recorded already",
    "metric": "measurement 'failing:metric' raised ArithmeticError",
}


@pytest.mark.parametrize("where", PROBLEMS)
def test_a_measurement_that_fails_ends_the_run_with_one_message_on_all_ranks_and_loses_nothing(
    where: str, tmp_path: Path
) -> None:
    write_module("failing", FAILING)
    sys.modules.pop("failing", None)
    cfg = settings_with(tmp_path / "run", "failing:Fails,failing:metric", rounds=3, checkpoint=Checkpoint(every=None))
    prepare(cfg)
    fails: Any = sys.modules["failing"].Fails
    fails.where, fails.rank, fails.calls = where, 1, 0
    messages = []

    def work(comm: Comm) -> None:
        with pytest.raises(CommonError) as caught:
            run.run(prepare(cfg), comm, Place("test", comm.rank, comm.size, comm.rank, comm.size), CPU, {})
        messages.append(str(caught.value))

    run_threads(2, work, timeout=60)
    assert len(messages) == 2 and len(set(messages)) == 1
    assert PROBLEMS[where] in messages[0] and messages[0].endswith("the same command resumes after it")
    done = len(metrics(tmp_path / "run"))
    assert messages[0].startswith(f"round {done}: ") and done in (1, 2)
    live(replace(cfg, evaluate="none"), 2)
    live(replace(cfg, evaluate="none", out=str(tmp_path / "plain")))
    assert sha256(tmp_path / "run") == sha256(tmp_path / "plain")
    assert [r["round"] for r in metrics(tmp_path / "run")] == [1, 2, 3]


# The record and the line


def report(**measures: Any) -> Report:
    seconds = {"local": 1.0, "wait": 0.0, "reduce": 0.0, "server": 0.0, "gather": 0.0, "eval": 0.5}
    scores: dict[str, Any] = {"test_metric": 0.7, "test_loss": 0.9}
    return Report(3, 9, (4,), 1.25, 0.375, 0.5, 12_345, seconds, **scores, measures=measures)


LAYERS = {"conv1.weight": {"agreement": 0.31, "below_tau": 0.52}, "conv1.bias": {"agreement": 0.5, "below_tau": 0.25}}
MEASURED = {
    "below_tau": 0.5512,
    "layers": LAYERS,
    "clients_accuracy": {"participating": 0.91, "others": None},
    "train_accuracy": 0.953,
    "train_sample_loss": 0.2,
}


def test_measurements_are_recorded_with_the_others_and_read_back() -> None:
    made = record(report(**MEASURED))
    assert "measures" not in made and list(made) == KEYS + list(MEASURED)
    assert {name: made[name] for name in MEASURED} == MEASURED
    assert report_of(made) == report(**MEASURED) and report_of(json.loads(json.dumps(made))) == report(**MEASURED)
    assert report_of(record(report())) == report() and list(record(report())) == KEYS


def test_what_is_no_number_becomes_null_however_deep() -> None:
    made = record(report(train_accuracy=math.nan, layers={"a": {"agreement": math.inf, "below_tau": 0.5}}))
    assert made["train_accuracy"] is None and made["layers"] == {"a": {"agreement": None, "below_tau": 0.5}}


def test_the_line_is_brief() -> None:
    assert "  below 0.55  train-acc 0.95  part 0.91  dropped 1  " in line(report(**MEASURED), 5)
    both = report(clients_accuracy={"participating": 0.91, "others": 0.77})
    assert "  part 0.91  others 0.77  dropped 1  " in line(both, 5)
    assert "  agree 0.50  dropped 1  " in line(report(), 5)


def tensorboard(out: Path) -> dict[str, float]:
    """The last value of each tag."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    return {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"]}


def test_tensorboard_has_a_tag_for_each_number(tmp_path: Path) -> None:
    with Log(tmp_path, 3, ["tensorboard"], speaks=True, quiet=True) as log:
        log.round(report(**MEASURED))
    found = tensorboard(tmp_path)
    assert found["layers/conv1.weight/below_tau"] == pytest.approx(0.52)
    assert found["clients_accuracy/participating"] == pytest.approx(0.91)
    assert found["seconds/eval"] == 0.5 and "clients_accuracy/others" not in found

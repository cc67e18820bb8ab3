"""Membership attacks: their arithmetic by hand, and real runs that have learnt by heart, or nothing at all."""

from __future__ import annotations

import hashlib
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import rank_environment
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from shell import data_row, metrics, sandbox, settings_of, tiny, train
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import fedmpi
from fedmpi import data
from fedmpi.commands import main
from fedmpi.data import Arrays, Datasets
from fedmpi.data.objective import CLASSIFY, Objective
from fedmpi.errors import FileError, UserError
from fedmpi.experiments.attack import command
from fedmpi.experiments.attack.answers import ask, sample_losses
from fedmpi.experiments.attack.attackers import (
    DECAY,
    auc,
    cheapest,
    contest,
    fit_logistic,
    found_at,
    half,
    judge,
    logistic,
    summary,
)
from fedmpi.experiments.attack.command import AttackSettings, attack_run, members_of, trained_clients
from fedmpi.experiments.attack.rebuild import Rebuilt, config_of, rebuild, untrained
from fedmpi.experiments.runs import read_run
from fedmpi.experiments.stats import wilson
from fedmpi.runs.build import NOTHING, Overrides
from fedmpi.runs.config import Config, Eval, Local, Meta
from fedmpi.seeds import attack_generator

CPU = torch.device("cpu")
SMALL = AttackSettings(repeats=2)


@pytest.fixture(scope="module", autouse=True)
def patch() -> Iterator[None]:
    with sandbox():
        yield


# Data of our own, by import path


def noise(count: int, width: int, seed: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def coins(count: int, sides: int, seed: int) -> Tensor:
    return torch.randint(0, sides, (count,), generator=torch.Generator().manual_seed(seed))


def random_labels() -> Arrays:
    """150 points with labels that nothing explains, in so many dimensions that they can be learnt by heart."""
    x, y = noise(300, 200, 1), coins(300, 3, 2)
    return Arrays("noise", 3, x[:150], y[:150], x[150:], y[150:])


def exchangeable() -> Arrays:
    """Points of one distribution, train and test."""
    x, y = noise(4000, 8, 3), coins(4000, 4, 4)
    return Arrays("noise", 4, x[:2000], y[:2000], x[2000:], y[2000:])


def shifted() -> Arrays:
    """The same, but the test points lie elsewhere."""
    return replace(exchangeable(), test_x=exchangeable().test_x + 1)


def numbers() -> Arrays:
    """Targets that are noise, to be learnt by heart."""
    x, y = noise(240, 150, 5), noise(240, 1, 6)[:, 0]
    return Arrays("noise", 0, x[:120], y[:120], x[120:], y[120:])


def texts() -> Arrays:
    """Sequences of 5 out of 7 tokens, with a label for each position."""
    x = coins(600, 7, 7).view(120, 5)
    return Arrays("noise", 7, x[:60], x[:60].roll(1, 1), x[60:], x[60:].roll(1, 1), tokens=7)


def one_hot() -> Arrays:
    """Eight clients with one sample each, sample c with a 1 at place c."""
    x, y = torch.eye(8), torch.arange(8) % 2
    return Arrays("hot", 2, x, y, x, y, owner=torch.arange(8))


def as_datasets() -> Datasets:
    """The random labels behind Datasets."""
    whole = random_labels()
    return Datasets(TensorDataset(whole.x, whole.y), TensorDataset(whole.test_x, whole.test_y), classes=3)


def gathered(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    """A cross entropy of one's own, that knows no reduction but the two."""
    each = -outputs.log_softmax(-1).gather(-1, labels[:, None])
    return {"mean": each.mean, "sum": each.sum}[reduction]()


def with_own_objective() -> Arrays:
    return replace(random_labels(), objective=replace(CLASSIFY, name="own", loss=gathered))


def broken_label(outputs: Tensor, labels: Tensor, reduction: str) -> Tensor:
    if len(labels) == 1:
        raise ZeroDivisionError("not one at a time")
    return gathered(outputs, labels, reduction)


def with_broken_objective() -> Arrays:
    goal = Objective("broken", broken_label, "accuracy", CLASSIFY.total)
    return replace(random_labels(), objective=goal)


def network(shape: tuple[int, ...], classes: int) -> nn.Module:
    return nn.Sequential(nn.Linear(shape[0], 6), nn.ReLU(), nn.Linear(6, classes))


def tagger(tokens: int, classes: int) -> nn.Module:
    """Answers at every position."""
    return nn.Sequential(nn.Embedding(tokens, 4), nn.Linear(4, classes))


def by_heart(out: Path, **changes: Any) -> Config:
    """A run that learns its samples by heart: many epochs on few of them, everybody in every round."""
    usual = {"data": "test_attack:random_labels", "clients": 3, "cohort": 3, "rounds": 8, "mask": "mean", "threads": 1}
    return settings_of(out, **usual | {"local": Local(batch=25, lr=0.1, epochs=20)} | changes)


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that has learnt its samples by heart; to be left as it is but for attack.json."""
    out = tmp_path_factory.mktemp("learnt") / "run"
    train(by_heart(out))
    return out


@pytest.fixture
def spoilt(learnt: Path, tmp_path: Path) -> Path:
    """A copy of that run to spoil."""
    return copied(learnt, tmp_path / "copy")


def copied(run: Path, to: Path) -> Path:
    to.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "partition.json", "finished.json", "model.safetensors"):
        (to / name).write_bytes((run / name).read_bytes())
    return to


def rebuilt(run: Path) -> Rebuilt:
    read = read_run(run)
    return rebuild(read, config_of(read, None), CPU, NOTHING)


def refused(*arguments: object, capsys: pytest.CaptureFixture[str], code: int = 2) -> str:
    """The message with which the command refuses these arguments, with nothing else said."""
    capsys.readouterr()
    assert main(["attack", *map(str, arguments)]) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    return said.err.removeprefix("fedmpi: ").strip()


# The arithmetic


def test_wilson_by_hand() -> None:
    assert wilson(0.8, 10) == pytest.approx((0.490162, 0.943318), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 1.959964**2 / (10 + 1.959964**2)), abs=1e-6)
    assert wilson(1.0, 4)[1] == 1.0


@given(st.integers(1, 10_000), st.floats(0, 1))
def test_a_wilson_bound_is_where_the_share_is_1_96_deviations_away(trials: int, share: float) -> None:
    low, high = wilson(share, trials)
    assert 0 <= low <= share + 1e-12 and share - 1e-12 <= high <= 1
    for bound in (low, high):
        assert (share - bound) ** 2 == pytest.approx(1.959964**2 * bound * (1 - bound) / trials, rel=1e-4, abs=1e-9)


def test_auc_by_hand_with_ties() -> None:
    assert auc(np.array([3.0, 1.0]), np.array([2.0, 1.0])) == 2.5 / 4  # 3 beats both, 1 ties with 1
    assert auc(np.array([5.0]), np.array([5.0, 5.0])) == 0.5
    assert auc(np.array([1.0, 2.0]), np.array([3.0])) == 0.0


few_ranks = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=12).map(np.array)


@given(few_ranks, few_ranks)
def test_auc_is_the_share_of_pairs(members: np.ndarray, others: np.ndarray) -> None:
    pairs = [(m > o) + (m == o) / 2 for m in members for o in others]
    assert auc(members, others) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(members, others) + auc(others, members) == pytest.approx(1)


def test_members_found_at_one_percent_false_alarms_by_hand() -> None:
    others = np.arange(200.0)  # two may be taken for members: 199 and 198
    assert found_at(np.array([197.0, 197.5, 198.0, 300.0]), others, 0.01) == 3 / 4
    assert found_at(np.array([5.0, 6.0]), np.full(99, 5.0), 0.01) == 1 / 2  # of 99 none may
    assert found_at(np.array([5.0, 6.0]), np.full(100, 5.0), 0.01) == 1 / 2  # and equal ones all or none


@given(few_ranks, few_ranks, st.sampled_from([0.0, 0.1, 0.25, 0.5, 1.0]))
def test_no_cut_finds_more_members_at_as_many_false_alarms(
    members: np.ndarray, others: np.ndarray, alarms: float
) -> None:
    cuts = [*members, *others, np.inf]
    shares = [(members >= cut).mean() for cut in cuts if (others >= cut).mean() <= alarms]
    assert found_at(members, others, alarms) == pytest.approx(max(shares))


def test_the_threshold_by_hand() -> None:
    losses = np.array([[0.4], [0.1], [0.3], [0.2], [0.5]])
    member = np.array([True, True, False, True, False])
    learned = cheapest(losses, member)  # 0.2 and 0.4 are both right four times of five: the lower one
    assert learned.cut == -0.2
    verdict = judge(learned, np.array([[0.2], [0.25], [0.1], [0.9]]), np.array([True, True, False, False]))
    assert verdict == {"accuracy": 0.5, "auc": 0.5, "advantage": 0.0, "tpr_at_1_fpr": 0.0}


def test_a_threshold_that_gains_nothing_takes_nobody_for_a_member() -> None:
    learned = cheapest(np.array([[0.1], [0.1], [0.2], [0.3]]), np.array([True, False, False, True]))
    assert learned.cut == math.inf
    verdict = judge(learned, np.array([[0.1], [0.2]]), np.array([True, False]))
    assert (verdict["accuracy"], verdict["advantage"], verdict["auc"]) == (
        0.5,
        0.0,
        1.0,
    )  # the order still separates them


@given(st.lists(st.tuples(st.integers(0, 6).map(float), st.booleans()), min_size=1, max_size=15))
def test_no_threshold_is_right_more_often(samples: list[tuple[float, bool]]) -> None:
    losses, member = np.array([loss for loss, _ in samples]), np.array([belongs for _, belongs in samples])
    learned = cheapest(losses[:, None], member)
    best = max(((losses <= bound) == member).mean() for bound in [-1.0, *losses])
    assert ((learned.rank(losses[:, None]) >= learned.cut) == member).mean() == pytest.approx(best)


def test_logistic_regression_by_hand() -> None:
    x, member = np.array([[-1.0], [1.0]]), np.array([False, True])
    weight, intercept = fit_logistic(x, member, decay=0.1)
    assert intercept == pytest.approx(0, abs=1e-9)
    assert 0.1 * weight == pytest.approx(1 / (1 + math.exp(weight)), abs=1e-9)  # where both derivatives are even
    weight, intercept = fit_logistic(np.zeros((4, 1)), np.array([True, True, True, False]))
    assert weight == 0 and intercept == pytest.approx(math.log(3), abs=1e-8)


def test_logistic_regression_agrees_with_forty_digits() -> None:
    rng = np.random.default_rng(0)
    x, member = rng.normal(size=(12, 2)), rng.random(12) < 0.5
    signs = [1 if one else -1 for one in member]

    def slopes(a: Any, b: Any, c: Any) -> list[Any]:
        pulls = [s / (1 + mpmath.exp(s * (a * u + b * v + c))) for s, (u, v) in zip(signs, x.tolist(), strict=True)]
        means = [mpmath.fsum(p * q for p, q in zip(pulls, column, strict=True)) / 12 for column in (*x.T, [1] * 12)]
        return [DECAY * a - means[0], DECAY * b - means[1], -means[2]]

    with mpmath.workdps(40):
        exact = [float(value) for value in mpmath.findroot(slopes, (0, 0, 0))]
    assert fit_logistic(x, member) == pytest.approx(exact, abs=1e-6)


def test_logistic_regression_is_finite_on_separable_sides() -> None:
    x = np.array([[-2.0], [-1.5], [1.5], [2.0], [60.0]])
    member = x[:, 0] > 0
    learned = logistic(x, member)
    assert np.isfinite(learned.rank(x)).all() and ((learned.rank(x) >= learned.cut) == member).all()


def test_newton_arrives_where_the_papers_5000_rounds_of_descent_lead() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(400, 5)) @ rng.normal(size=(5, 5))
    member = rng.random(400) < 1 / (1 + np.exp(-x[:, 0]))
    z = np.column_stack([(x - x.mean(0)) / x.std(0), np.ones(400)])
    w, decays = np.zeros(6), np.append(np.full(5, DECAY), 0)
    for _ in range(5000):
        w -= 1.0 * (z.T @ (1 / (1 + np.exp(-z @ w)) - member) / 400 + decays * w)
    assert logistic(x, member).rank(x) == pytest.approx(z @ w, abs=1e-3)


@settings(max_examples=20)
@given(st.integers(0, 1000), st.floats(0.01, 100), st.floats(-100, 100))
def test_the_scale_of_the_answers_does_not_matter(seed: int, scale: float, shift: float) -> None:
    rng = np.random.default_rng(seed)
    x, member = rng.normal(size=(40, 3)), rng.random(40) < 0.5
    there = logistic(x * scale + shift, member).rank(x * scale + shift)
    assert there == pytest.approx(logistic(x, member).rank(x), abs=1e-5)


def test_equal_answers_give_no_information() -> None:
    found = contest(logistic, np.full((20, 2), 0.1), repeats=2, seed=0)
    assert (found["accuracy"], found["auc"]) == (0.5, 0.5)


@given(st.integers(2, 60), st.integers(0, 100))
def test_a_half_is_half_of_the_members_and_half_of_the_others(count: int, seed: int) -> None:
    known = half(count, attack_generator(seed, 1))
    assert known[:count].sum() == known[count:].sum() == count // 2
    assert (known == half(count, attack_generator(seed, 1))).all()


def test_a_summary_by_hand() -> None:
    verdicts = [
        {"accuracy": 0.6, "auc": 0.7, "advantage": 0.2, "tpr_at_1_fpr": 0.0},
        {"accuracy": 0.8, "auc": 0.9, "advantage": 0.6, "tpr_at_1_fpr": 0.1},
    ]
    found = summary(verdicts, 10)
    assert (found["accuracy"], found["auc"], found["advantage"]) == pytest.approx((0.7, 0.8, 0.4))
    assert found["deviation"] == pytest.approx(math.sqrt(0.02)) and found["interval"] == list(wilson(0.7, 10))
    assert summary(verdicts[:1], 10)["deviation"] is None
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("attacker", [logistic, cheapest])
def test_the_interval_of_who_guesses_holds_one_half_as_often_as_it_says(attacker: Any) -> None:
    values = [np.random.default_rng(seed).normal(size=(400, 1)) for seed in range(200)]
    intervals = [contest(attacker, one, repeats=1, seed=seed)["interval"] for seed, one in enumerate(values)]
    held = sum(low <= 0.5 <= high for low, high in intervals)
    assert 180 <= held <= 199  # 95 % of 200 is 190, give or take three


def test_halves_judge_what_was_not_learnt() -> None:
    """An attacker that knows its own half by heart and nothing else is right half of the time."""

    def parrot(values: np.ndarray, member: np.ndarray) -> Any:
        known = {float(value): belongs for value, belongs in zip(values[:, 0], member, strict=True)}
        return replace(cheapest(values, member), rank=lambda new: np.array([known.get(float(v), 0) for v in new[:, 0]]))

    values = np.random.default_rng(2).normal(size=(200, 1))
    assert contest(parrot, values, repeats=3, seed=0)["auc"] == 0.5


# Real runs


def test_a_model_that_has_learnt_by_heart_is_found_out(learnt: Path) -> None:
    found = attack_run(learnt)
    assert found["train"] > 0.98 and found["test"] < 0.5 and found["gap"] > 0.5
    assert found["loss"]["accuracy"] > 0.85 and found["loss"]["interval"][0] > 0.75
    assert found["loss"]["auc"] > 0.9 and found["loss"]["advantage"] > 0.7
    assert (found["samples"], found["judged"], found["baseline"]) == (150, 150, 0.5)
    assert found == json.loads((learnt / "attack.json").read_text())


def test_confidence_alone_gives_members_away_when_logits_are_sorted(learnt: Path) -> None:
    found = attack_run(learnt, settings=AttackSettings(features="sorted"))["logistic"]
    assert found["interval"][0] > 0.5


def test_what_was_not_trained_is_not_found(tmp_path: Path) -> None:
    still = Local(batch=500, lr=1e-9)
    train(by_heart(tmp_path, data="test_attack:exchangeable", local=still, rounds=1, model="test_attack:network"))
    found = attack_run(tmp_path)
    for attacker in ("logistic", "loss"):
        low, high = found[attacker]["interval"]
        assert low < 0.5 < high and high - low < 0.05
        assert abs(found[attacker]["auc"] - 0.5) < 0.03


def test_a_control_separates_set_differences_from_memorisation(tmp_path: Path) -> None:
    still = Local(batch=500, lr=1e-9)
    train(by_heart(tmp_path, data="test_attack:shifted", local=still, rounds=1))
    found = attack_run(tmp_path, settings=AttackSettings(repeats=1, control=True))
    assert found["logistic"]["accuracy"] > 0.7  # though nothing was learnt
    assert found["control"]["logistic"]["accuracy"] == pytest.approx(found["logistic"]["accuracy"], abs=0.01)
    train(by_heart(tmp_path / "learnt"))
    found = attack_run(tmp_path / "learnt", settings=AttackSettings(repeats=2, control=True))
    low, high = found["control"]["loss"]["interval"]
    assert low < 0.5 < high < found["loss"]["interval"][0]


def test_the_control_is_the_model_with_which_the_run_began(tmp_path: Path) -> None:
    still = by_heart(tmp_path, local=Local(batch=25, lr=1e-30), rounds=1, model="test_attack:network")
    train(still)
    found = attack_run(tmp_path, settings=AttackSettings(repeats=1, control=True))
    assert found["control"] == {"logistic": found["logistic"], "loss": found["loss"]}


def test_results_are_those_of_the_samples_as_they_are(tmp_path: Path) -> None:
    train(settings_of(tmp_path, augment="crop:2+flip", rounds=6))
    found, members = attack_run(tmp_path, settings=SMALL), ask(rebuilt(tmp_path), np.arange(200), test=False)
    arrays, weights = tiny(), load_file(tmp_path / "model.safetensors")
    results = []
    for x, y in ((arrays.test_x, arrays.test_y), (arrays.x, arrays.y)):
        images = (x.float() / 255 - arrays.mean[0]) / arrays.std[0]
        logits = images.flatten(1) @ weights["1.weight"].T + weights["1.bias"]
        results += [float((logits.argmax(1) == y).sum()) / len(y), float(F.cross_entropy(logits, y))]
    assert found["test"] == results[0] == metrics(tmp_path)[-1]["test_accuracy"]
    assert found["test_loss"] == pytest.approx(results[1], abs=1e-6)
    assert members.metric == results[2] and members.losses.mean() == pytest.approx(results[3], abs=1e-6)
    assert found["samples"] == 60  # all of the test set, and as many of the 200 members


def test_the_same_attack_leaves_the_same_bytes(learnt: Path, tmp_path: Path) -> None:
    attack_run(learnt, settings=SMALL)
    first = (learnt / "attack.json").read_bytes()
    attack_run(learnt, settings=SMALL)
    assert (learnt / "attack.json").read_bytes() == first
    command_line = [sys.executable, "-m", "fedmpi", "attack", str(learnt), "--repeats", "2", "--json"]
    done = subprocess.run(command_line, cwd=tmp_path, env=rank_environment(), capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    assert (learnt / "attack.json").read_bytes() == first
    assert json.loads(done.stdout) == {"run": str(learnt)} | json.loads(first)
    attack_run(learnt, settings=replace(SMALL, seed=1))
    assert (learnt / "attack.json").read_bytes() != first


def test_the_caller_is_not_disturbed(learnt: Path, spoilt: Path) -> None:
    (spoilt / "model.safetensors").write_bytes(b"no tensors")
    torch.set_num_threads(3)
    before = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
    attack_run(learnt, settings=SMALL)
    with pytest.raises(FileError):
        attack_run(spoilt)
    after = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate(), torch.get_num_threads()
    torch.set_num_threads(1)
    assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


# Who is a member


def test_members_are_all_that_clients_have_or_those_who_took_part(tmp_path: Path) -> None:
    train(settings_of(tmp_path, clients=8, cohort=2, rounds=1))
    run = rebuilt(tmp_path)
    assert members_of(run, "all").tolist() == list(range(200))
    cids = trained_clients(run)
    assert len(cids) == 2
    mine = np.sort(np.concatenate([run.partition.of(cid) for cid in cids]))
    assert members_of(run, "trained").tolist() == mine.tolist() and len(mine) == 50
    assert attack_run(tmp_path, settings=replace(SMALL, members="trained"))["samples"] == 50


def test_the_clients_that_took_part_are_those_whose_weights_have_moved(tmp_path: Path) -> None:
    train(settings_of(tmp_path, cohort=3, rounds=2, mask="mean", split="natural", data="test_attack:one_hot"))
    run = rebuilt(tmp_path)
    start, end = (one.model.state_dict()["1.weight"] for one in (untrained(run), run))
    moved = torch.nonzero((start != end).any(0)).flatten().tolist()  # client c has a 1 at place c, and nothing else
    assert trained_clients(run) == moved and 3 <= len(moved) <= 6


def test_a_client_that_was_left_out_did_not_take_part(tmp_path: Path) -> None:
    train(settings_of(tmp_path, clients=8, cohort=2, rounds=1))
    first, second = trained_clients(rebuilt(tmp_path))
    record = metrics(tmp_path)[0] | {"dropped_clients": [second], "dropped": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert trained_clients(rebuilt(tmp_path)) == [first]


@pytest.mark.parametrize(
    "algorithm, lr, share, counted",
    [("fedavg", 0.0, False, 0), ("fedmeta", 0.01, False, 30), ("fedshare", None, None, 30)],
)
def test_a_meta_set_belongs_to_the_members_where_somebody_has_learnt_from_it(
    tmp_path: Path, algorithm: str, lr: float | None, share: bool | None, counted: int
) -> None:
    train(settings_of(tmp_path, algorithm=algorithm, meta=Meta(size=30, lr=lr, share=share), rounds=1))
    run = rebuilt(tmp_path)
    assert len(run.meta) == 30
    assert (
        np.isin(run.meta, members_of(run, "all")).sum()
        == np.isin(run.meta, members_of(run, "trained")).sum()
        == counted
    )
    assert len(members_of(run, "all")) == 170 + counted


# Kinds of data


def test_targets_that_are_numbers_are_attacked_too(tmp_path: Path) -> None:
    local = Local(batch=10, lr=0.01, epochs=40)
    train(by_heart(tmp_path, data="test_attack:numbers", local=local))
    found = attack_run(tmp_path)
    assert found["metric"] == "error" and found["gap"] == found["test"] - found["train"] > 0.3
    assert found["loss"]["interval"][0] > 0.55
    assert ask(rebuilt(tmp_path), np.arange(5), test=False).values.shape == (5, 1)
    low, high = found["logistic"]["interval"]  # one number says where it is, not how far from the target
    assert low < 0.5 < high


def test_sequences_are_judged_by_their_mean_loss_and_their_last_answer(tmp_path: Path) -> None:
    train(by_heart(tmp_path, data="test_attack:texts", model="test_attack:tagger", rounds=1))
    run = rebuilt(tmp_path)
    answers = ask(run, np.array([3, 59]), test=True)
    arrays = texts()
    with torch.no_grad():
        logits = run.model(arrays.test_x[[3, 59]])
    by_hand = [
        [float(F.cross_entropy(logits[i, t], arrays.test_y[n, t])) for t in range(5)] for i, n in enumerate((3, 59))
    ]
    assert answers.losses == pytest.approx([sum(one) / 5 for one in by_hand], abs=1e-6)
    assert torch.equal(torch.from_numpy(answers.values).float(), logits[:, -1])
    assert attack_run(tmp_path, settings=SMALL)["samples"] == 60


def test_datasets_are_attacked_like_the_arrays_they_hold(learnt: Path, tmp_path: Path) -> None:
    train(by_heart(tmp_path, data="test_attack:as_datasets"))
    assert attack_run(tmp_path, settings=SMALL) == attack_run(learnt, settings=SMALL)


def test_an_objective_of_ones_own_is_asked_for_one_sample_at_a_time(learnt: Path, tmp_path: Path) -> None:
    train(by_heart(tmp_path, data="test_attack:with_own_objective"))
    own, ours = attack_run(tmp_path, settings=SMALL), attack_run(learnt, settings=SMALL)
    assert own["test_loss"] == pytest.approx(ours["test_loss"], abs=1e-4)
    assert own["loss"]["accuracy"] == pytest.approx(ours["loss"]["accuracy"], abs=0.02)


def test_an_exception_of_a_users_objective_is_a_one_line_error(tmp_path: Path, capsys: Any) -> None:
    train(by_heart(tmp_path, data="test_attack:with_broken_objective", rounds=1))
    assert main(["attack", str(tmp_path)]) == 1
    shown = "evaluating the test samples of 'noise' failed: ZeroDivisionError: not one at a time"
    assert capsys.readouterr().err == f"fedmpi: {shown}\n"


def test_losses_too_small_for_a_softmax_keep_their_order() -> None:
    logits = torch.tensor([[40.0, 0.0], [50.0, 0.0], [0.0, 300.0]])
    losses = sample_losses(CLASSIFY, logits, torch.tensor([0, 0, 0]))
    assert losses.tolist() == pytest.approx([math.exp(-40), math.exp(-50), 300], rel=1e-12, abs=0)


@given(st.integers(1, 6), st.integers(0, 1000))
def test_losses_are_the_cross_entropy(classes: int, seed: int) -> None:
    logits = noise(5 * 3 * classes, 1, seed).view(5, 3, classes) * 4
    labels = coins(15, classes, seed).view(5, 3)
    by_torch = F.cross_entropy(logits.double().flatten(0, 1), labels.flatten(), reduction="none").view(5, 3).mean(1)
    assert sample_losses(CLASSIFY, logits, labels).tolist() == pytest.approx(by_torch.tolist(), abs=1e-12)


def test_answers_too_wide_for_the_regression_leave_the_threshold(
    learnt: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "WIDEST", 2)
    assert main(["attack", str(learnt)]) == 0
    assert [text.split()[1] for text in capsys.readouterr().out.splitlines()[1:]] == ["loss"]
    assert json.loads((learnt / "attack.json").read_text())["logistic"] is None


# Runs of Python objects


def test_objects_of_a_python_program_must_be_handed_over_again(tmp_path: Path, capsys: Any) -> None:
    model, arrays = network((200,), 3), random_labels()
    knobs: dict[str, Any] = {"clients": 3, "cohort": 3, "rounds": 2, "split": "iid", "threads": 1, "quiet": True}
    fedmpi.train(model, arrays, out=tmp_path / "both", **knobs)
    fedmpi.train(model, "test_attack:random_labels", out=tmp_path / "model", **knobs)
    what = {"both": "its data ('noise') and its model ('Sequential')", "model": "its model ('Sequential')"}
    for name, handed in what.items():
        said = refused(tmp_path / name, capsys=capsys)
        assert said == (
            f"the run in '{tmp_path / name}' got {handed} as Python objects, so it cannot be rebuilt from its folder; "
            "train with names or import paths, or pass them again: attack_run(folder, given=...)"
        )
        assert not (tmp_path / name / "attack.json").exists()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    both = attack_run(tmp_path / "both", settings=SMALL, given=Overrides(data=arrays, model=model))
    assert both == attack_run(tmp_path / "model", settings=SMALL, given=Overrides(model=model))
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())  # it was copied
    with pytest.raises(UserError, match="whose initial weights are not known; leave --control out"):
        attack_run(tmp_path / "model", settings=AttackSettings(control=True), given=Overrides(model=model))


# What is refused


def test_folders_that_hold_no_finished_run(tmp_path: Path, spoilt: Path, capsys: Any) -> None:
    assert "'nowhere' is no run folder that can be read" in refused("nowhere", capsys=capsys)
    (spoilt / "finished.json").unlink()
    assert refused(spoilt, capsys=capsys) == (
        f"the run in '{spoilt}' is not finished: there is no finished.json; wait for it, or start it again"
    )


def test_no_run_is_attacked_where_one_of_them_is_not_finished(learnt: Path, spoilt: Path, capsys: Any) -> None:
    (spoilt / "finished.json").unlink()
    (learnt / "attack.json").unlink(missing_ok=True)
    refused(learnt, spoilt, capsys=capsys)
    assert not (learnt / "attack.json").exists()


def test_a_model_that_is_gone_or_another(spoilt: Path, capsys: Any) -> None:
    model = spoilt / "model.safetensors"
    save_file({"1.weight": torch.zeros(2)}, model)
    wanted = f"'{model}' is not the file that the run has written: its SHA-256 differs; train it again, or restore"
    assert refused(spoilt, capsys=capsys, code=1).startswith(wanted)
    finished = json.loads((spoilt / "finished.json").read_text())
    sign(spoilt, finished)
    assert "model 'logistic' is not that of the run in" in refused(spoilt, capsys=capsys)
    model.write_bytes(b"no tensors")
    sign(spoilt, finished)
    assert f"'{model}' cannot be read" in refused(spoilt, capsys=capsys, code=1)
    model.unlink()
    assert f"'{model}' cannot be read (No such file or directory)" in refused(spoilt, capsys=capsys, code=1)


def sign(run: Path, finished: dict[str, Any]) -> None:
    """Make a run's record fit its model."""
    sha = hashlib.sha256((run / "model.safetensors").read_bytes()).hexdigest()
    (run / "finished.json").write_text(json.dumps(finished | {"model_sha256": sha}))


def test_a_model_that_has_diverged(spoilt: Path, capsys: Any) -> None:
    weights = load_file(spoilt / "model.safetensors")
    save_file({name: t * math.inf for name, t in weights.items()}, spoilt / "model.safetensors")
    sign(spoilt, json.loads((spoilt / "finished.json").read_text()))
    assert "has outputs or losses that are not finite: training diverged" in refused(spoilt, capsys=capsys)


def test_data_that_have_changed_since(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train(settings_of(tmp_path))
    whole = tiny()
    fewer = replace(whole, x=whole.x[:199], y=whole.y[:199], owner=whole.owner[:199])
    relabelled = replace(whole, y=whole.y.flip(0))
    for other, differs in ((fewer, "samples, sha256, histogram"), (relabelled, "histogram")):
        monkeypatch.setitem(data.DATASETS, "tiny", data_row(lambda root, other=other: other))
        assert refused(tmp_path, capsys=capsys) == (
            f"the data 'tiny' are not those of the run in '{tmp_path}': its partition.json differs in {differs}; "
            "train it again, or restore the original"
        )
    monkeypatch.setitem(data.DATASETS, "tiny", data_row(lambda root: replace(whole, test_x=whole.test_x.flip(0))))
    assert "the data or the model's code have changed" in refused(tmp_path, capsys=capsys)
    monkeypatch.setitem(data.DATASETS, "tiny", data_row(lambda root: whole))
    (tmp_path / "partition.json").unlink()
    assert "partition.json does not describe the partition of the data" in refused(tmp_path, capsys=capsys, code=1)
    assert not (tmp_path / "attack.json").exists()


def test_the_score_is_compared_on_the_samples_that_the_run_was_scored_on(tmp_path: Path) -> None:
    train(by_heart(tmp_path, eval=Eval(samples=40, batch=25)))
    shown = json.loads((tmp_path / "finished.json").read_text())["test_loss"]
    found = attack_run(tmp_path, settings=replace(SMALL, samples=30))
    assert found["samples"] == 30 and abs(found["test_loss"] - shown) > 0.01  # others than the 40


def test_options_and_their_bounds(learnt: Path, capsys: Any) -> None:
    said = "attack was given no run folder; name one or more: fedmpi attack RUN [RUN ...]"
    assert refused(capsys=capsys) == said
    assert refused(learnt, "--members", "train", capsys=capsys) == (
        "unknown --members 'train'; did you mean 'trained'? known: all, trained"
    )
    assert "unknown --features 'loss'; known: logits, sorted" in refused(learnt, "--features", "loss", capsys=capsys)
    assert refused(learnt, "--samples", 1, capsys=capsys) == "--samples is 1; it must be at least 2"
    assert refused(learnt, "--repeats", 0, capsys=capsys) == "--repeats is 0; it must be in [1, 1000]"
    assert "--seed is 'x'; it must be a whole number" in refused(learnt, "--seed", "x", capsys=capsys)
    assert "did you mean '--samples'?" in refused(learnt, "--sample", 3, capsys=capsys)
    assert "unknown device 'gpu'" in refused(learnt, "--device", "gpu", capsys=capsys)
    with pytest.raises(UserError, match="unknown --members"):
        attack_run(learnt, settings=AttackSettings(members="some"))


def test_too_few_samples(tmp_path: Path, capsys: Any) -> None:
    train(settings_of(tmp_path, data="test_attack:lonely", clients=2, cohort=2))
    said = "has 4 members and 1 test samples; an attack needs at least 2 of each: one to fit on and one to score on"
    assert said in refused(tmp_path, capsys=capsys)


def lonely() -> Arrays:
    return Arrays("lonely", 2, noise(4, 3, 0), torch.tensor([0, 1, 0, 1]), noise(1, 3, 1), torch.tensor([0]))


def test_a_configuration_that_is_not_understood(spoilt: Path, capsys: Any) -> None:
    config = yaml.safe_load((spoilt / "config.yaml").read_text())
    (spoilt / "config.yaml").write_text(yaml.safe_dump(config | {"colour": "red"}))
    said = refused(spoilt, capsys=capsys)
    assert said.startswith(f"the configuration of '{spoilt}' cannot be used: unknown option 'colour'")
    (spoilt / "config.yaml").write_text(yaml.safe_dump(config | {"data": "test_attack:nothing"}))
    assert "module 'test_attack' has no 'nothing'" in refused(spoilt, capsys=capsys)


def test_a_result_that_cannot_be_written(spoilt: Path, capsys: Any) -> None:
    (spoilt / "attack.json").mkdir()
    assert f"'{spoilt / 'attack.json'}' cannot be written" in refused(spoilt, capsys=capsys)


# The command


def test_the_table_is_aligned_and_shows_the_results(learnt: Path, spoilt: Path, capsys: Any) -> None:
    assert main(["attack", str(learnt), str(spoilt), "--features", "sorted", "--control", "true"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["run", "attack", "accuracy", "+-"] and len({len(text) for text in (head, *lines)}) == 1
    names = ["sorted", "loss", "sorted, before", "loss, before"]
    assert [(text.split()[0], text[len(str(spoilt)) + 2 :][:14].strip()) for text in lines] == [
        (str(run), name) for run in (learnt, spoilt) for name in names
    ]
    found = json.loads((learnt / "attack.json").read_text())
    cells = lines[1].split()
    low, high = found["loss"]["interval"]
    assert cells[2:4] == [f"{found['loss']['accuracy']:.4f}", f"{found['loss']['deviation']:.4f}"]
    assert cells[4:7] == [f"{low:.4f}", "-", f"{high:.4f}"] and cells[-1] == f"{found['gap']:.4f}"
    assert lines[3].split()[-3:] == ["-", "-", "-"]


def test_every_run_below_a_folder_is_attacked(learnt: Path, tmp_path: Path, capsys: Any) -> None:
    for name in ("b", "a"):
        copied(learnt, tmp_path / name)
    assert main(["attack", str(tmp_path), "--json", "--repeats", "1"]) == 0
    found = [json.loads(text) for text in capsys.readouterr().out.splitlines()]
    assert [one["run"] for one in found] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert found[0]["loss"] == found[1]["loss"] and found[0]["loss"]["deviation"] is None


def test_data_are_found_at_another_root(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "mark").touch()
    train(by_heart(tmp_path / "run", data="test_attack:at_root", data_root=str(tmp_path / "here"), rounds=1))
    (tmp_path / "here").rename(tmp_path / "there")
    with pytest.raises(UserError, match="there are no data in"):
        attack_run(tmp_path / "run", settings=SMALL)
    assert attack_run(tmp_path / "run", str(tmp_path / "there"), SMALL)["samples"] == 150


def at_root(root: Path) -> Arrays:
    if not (root / "mark").exists():
        raise UserError(f"there are no data in {root}")
    return random_labels()


def test_help_names_every_option(capsys: Any) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["attack", "--help"])
    text = capsys.readouterr().out
    for option in ("--members", "--features", "--samples", "--repeats", "--seed", "--control", "--data_root", "--json"):
        assert option in text
    assert "samples of clients that took part" in " ".join(text.split())

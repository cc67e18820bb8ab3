"""Clients that step by AdamW, by other optimizers of torch, over several batches, and with a rate that changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from federation import algorithm, federate, plan
from hypothesis import given
from hypothesis import strategies as st
from quadratic import BENT, Parabola, vector
from test_local import DECAY, LR, PAIRS, RHO, ROUNDS_OF_PAIRS
from torch import Tensor, nn

from fedmpi.algorithms import ALGORITHMS
from fedmpi.errors import UserError
from fedmpi.local import Descent, LocalKnobs, LocalRule, make_local, nova, scaffold, sgd
from fedmpi.local.optimizers import find_optimizer
from fedmpi.runs.build import prepare
from fedmpi.runs.options import from_values

# AdamW


@given(LR, st.floats(0, 0.95), st.floats(0.5, 0.999), DECAY, ROUNDS_OF_PAIRS, PAIRS, st.sampled_from([None, 0.7]))
def test_adamw_is_torchs_own_step_by_step(
    lr: float,
    b1: float,
    b2: float,
    decay: float,
    targets: list[tuple[float, float]],
    start: tuple[float, float],
    clip: float | None,
) -> None:
    x = vector(start).requires_grad_()
    optimizer = torch.optim.AdamW([x], lr, (b1, b2), 1e-6, decay, foreach=False, fused=False)
    points = []
    for target in targets:
        points.append(x.detach().clone())
        optimizer.zero_grad()
        away = x - vector(target)
        (away @ vector(BENT) @ away / 2).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_([x], clip)
        optimizer.step()
    job = Parabola(start, targets, BENT)
    result = make_local("adamw", LocalKnobs(lr=lr, b1=b1, b2=b2, eps=1e-6, weight_decay=decay, clip=clip))(job)
    near: dict[str, Any] = {"rel": 1e-4, "abs": 1e-4} if clip else {"rel": 1e-9, "abs": 1e-9}  # torch: norm + 1e-6
    for call, point in zip(job.calls, points, strict=True):
        assert call.x == pytest.approx(point.tolist(), **near)
    assert result.delta_P.tolist() == pytest.approx((x - job.start_P).tolist(), **near)


def test_one_step_of_adamw_by_hand() -> None:
    # from 2, target 0: the corrected moments are g and g^2, so x = 2 - 0.1 * 0.5 * 2 - 0.1 * 2 / (2 + 0)
    knobs = LocalKnobs(lr=0.1, eps=1e-12, weight_decay=0.5, momentum=0.0)
    job = Parabola(2.0, [0.0])
    assert make_local("adamw", knobs)(job).delta_P.tolist() == pytest.approx([-0.2])


def test_every_round_starts_with_new_moments() -> None:
    rule = make_local("adamw", LocalKnobs(lr=0.1))
    first, again = Parabola((1.0, 3.0), [(0.0, 0.0)] * 4), Parabola((1.0, 3.0), [(0.0, 0.0)] * 4)
    assert torch.equal(rule(first).delta_P, rule(again).delta_P)


# Any optimizer

FLAT = ("Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "SGD", "Rprop", "ASGD")


@pytest.mark.parametrize("name", FLAT)
def test_elementwise_optimizers_take_the_whole_vector(name: str) -> None:
    found = find_optimizer(f"torch.optim:{name}", LocalKnobs())
    assert found is not None and found.flat


@pytest.mark.parametrize("name", ["Adafactor", "Muon"])
def test_others_get_the_parameters_in_their_shapes(name: str) -> None:
    found = find_optimizer(f"torch.optim:{name}", LocalKnobs())
    assert found is not None and not found.flat


def narrow() -> nn.Module:
    """A model of matrices alone."""
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 8, bias=False), nn.Tanh(), nn.Linear(8, 3, bias=False))


@pytest.mark.parametrize("name", ["Adam", "Adafactor", "Muon"])
def test_steps_are_those_of_the_optimizer_on_the_model(name: str) -> None:
    """A client of a federation of one, against torch's loop over the same batches."""
    rule = make_local("sgd", LocalKnobs(lr=0.02, optimizer=f"torch.optim:{name}", momentum=0.0))
    (state,), _ = federate(1, algorithm("mean", local=rule), plan(rounds=1, cohort=1), narrow)
    moved = state.model_N.clone()
    seen: list[tuple[Tensor, Tensor]] = []

    def spy(job: Any) -> Any:
        batches = [job.task.feed.train(batch) for batch in job.batches()]
        model = narrow()
        with torch.enable_grad():
            torch.nn.utils.vector_to_parameters(job.start_P.clone(), model.parameters())
            optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.02, weight_decay=0.0)
            for x, y in batches:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x), y).backward()
                optimizer.step()
        after = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        seen.append((after, job.start_P.clone()))
        return make_local("sgd", LocalKnobs(lr=0.0001, momentum=0.0))(job)

    federate(1, algorithm("mean", local=LocalRule(spy)), plan(rounds=1, cohort=1), narrow)
    [(after, before)] = seen
    assert not torch.allclose(after, before, atol=1e-3)
    assert torch.allclose(moved[: len(after)], after, rtol=1e-4, atol=1e-6)


def closure_only(params: Any, lr: float) -> Any:
    return torch.optim.LBFGS(params, lr=lr)


def nothing(params: Any, lr: float) -> Any:
    return None


def greedy(params: Any, lr: float, temperature: float) -> Any:
    return torch.optim.SGD(params, lr=lr)


def half(params: Any, lr: float) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=lr / 2)


def test_a_function_of_the_users_own_may_make_one() -> None:
    jobs = [Parabola(4.0, [0.0] * 3) for _ in range(2)]
    rules = make_local("sgd", LocalKnobs(lr=0.2, optimizer="test_optimizers:half")), sgd(0.1)
    halved, usual = (rule(job).delta_P.tolist() for rule, job in zip(rules, jobs, strict=True))
    assert halved == pytest.approx(usual)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("adam", "unknown --local.optimizer 'adam'; did you mean 'adamw'?"),
        ("torch.optim:Nope", "optimizer 'torch.optim:Nope': module 'torch.optim' has no 'Nope'"),
        ("test_optimizers:closure_only", "optimizer 'test_optimizers:closure_only' raised .*closure.* was tried; give"),
        ("torch.optim:SparseAdam", "optimizer 'torch.optim:SparseAdam' raised .*dense gradients.* was tried; give"),
        ("test_optimizers:nothing", "optimizer 'test_optimizers:nothing' returned NoneType; it must be a torch.optim"),
        ("test_optimizers:greedy", "optimizer 'test_optimizers:greedy' asks for temperature; there is params, lr,"),
        ("test_optimizers:FLAT", "optimizer 'test_optimizers:FLAT' is tuple; it must be a class or a function"),
    ],
)
def test_what_is_no_optimizer_is_refused_before_training(name: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        find_optimizer(name, LocalKnobs())
    assert "\n" not in str(caught.value)


# Several batches in a step


@given(st.integers(1, 4), LR, RHO, DECAY, ROUNDS_OF_PAIRS, PAIRS)
def test_a_step_uses_the_mean_gradient_of_its_batches(
    size: int, lr: float, rho: float, decay: float, targets: list[tuple[float, float]], start: tuple[float, float]
) -> None:
    """On a parabola that is the gradient of their mean target."""
    groups = [targets[i : i + size] for i in range(0, len(targets), size)]
    means = [vector(group).mean(0).tolist() for group in groups]  # type: ignore[arg-type]
    one, other = Parabola(start, targets, BENT), Parabola(start, means, BENT)
    Descent(lr, rho, decay, clip=0.9, accumulate=size).run(one)
    Descent(lr, rho, decay, clip=0.9).run(other)
    assert one.x_P.tolist() == pytest.approx(other.x_P.tolist(), rel=1e-9, abs=1e-9)
    assert one.counted == targets, "and every batch counts in the loss"


# A rate that changes within the round


def test_a_warm_up_and_a_cosine_within_the_round_by_hand() -> None:
    # warmup:1 takes half of the rate, then half a cosine over two steps: 1, 0.5.  x = 8: 8 - 4 - 4 ... with lr 1
    job = Parabola(8.0, [0.0] * 3)
    stepped = Descent(0.5, schedule="warmup:1+cosine").run(job)
    assert stepped.factors == pytest.approx([0.5, 1.0, 0.5])
    assert [call.x[0] for call in job.calls] == pytest.approx([8.0, 6.0, 3.0]) and job.x_P.tolist() == [2.25]


@given(RHO, st.sampled_from(["cosine", "step:2,0.5", "warmup:2", "warmup:1+cosine:0.1"]), st.integers(1, 9))
def test_normalised_steps_follow_the_rate(rho: float, schedule: str, steps: int) -> None:
    """What FedNova divides by: how far unit gradients go."""
    descent = Descent(0.1, rho, schedule=schedule)
    factors = descent.run(Parabola(1.0, [0.0] * steps)).factors
    x = v = 0.0
    for factor in factors:
        v = rho * v + 1
        x += factor * v
    assert descent.weight(factors) == pytest.approx(x, rel=1e-8)


def test_control_variates_are_mean_gradients_under_a_schedule() -> None:
    """Far away from the lowest point the gradient hardly changes: option II must find it."""
    descent = Descent(1e-6, 0.9, schedule="warmup:3+cosine", accumulate=2)
    kept_P = scaffold(descent)(Parabola(1000.0, [0.0] * 10)).keeps["control"]
    assert kept_P.tolist() == pytest.approx([1000.0], rel=1e-3)
    result = nova(descent)(Parabola(1000.0, [0.0] * 10))
    assert result.delta_P.tolist() == pytest.approx([-1e-3], rel=1e-3)


def test_a_wrong_schedule_within_the_round_speaks_of_steps() -> None:
    with pytest.raises(UserError, match="--local.step_schedule is 'warmup:0.5'; .* whole number of steps, 1 or more"):
        make_local("sgd", LocalKnobs(step_schedule="warmup:0.5"))
    with pytest.raises(UserError, match="write it as step:steps,factor"):
        make_local("sgd", LocalKnobs(step_schedule="step:3"))


# In a federation

REFUSED = {"scaffold": "unless --local.option is I", "fednova": "counts gradients", "uga": "differentiates the steps"}
REFUSED["fedmeta-uga"] = REFUSED["uga"]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_adamw_trains_or_is_refused_under_every_algorithm(name: str) -> None:
    knobs = {"algorithm": name, "local.optimizer": "adamw", "data": "glyphs", "local.lr": 0.002}
    knobs |= {"local.accumulate": 2, "local.step_schedule": "warmup:1+cosine", "mask": "gma"}
    if name in REFUSED:
        with pytest.raises(UserError, match=f"--local.optimizer is adamw, and .*{REFUSED[name]}.*; use sgd, or"):
            prepare(from_values(knobs))
    if name == "scaffold":
        knobs["local.option"] = "I"
    elif name in REFUSED:
        return
    algo = prepare(from_values(knobs)).algorithm
    algo = replace(algo, meta=None)
    (first,), reports = federate(1, algo)
    assert reports[-1].train_loss < reports[0].train_loss or name == "fedgma2021"
    for ranks in (2, 3):
        states, _ = federate(ranks, algo)
        length = min(len(first.model_N), len(states[0].model_N))
        assert all(torch.equal(state.model_N[:length], first.model_N[:length]) for state in states), ranks


def test_momentum_that_nothing_reads_is_refused() -> None:
    for rule in ({"local.rule": "adamw"}, {"local.optimizer": "torch.optim:Adam"}):
        with pytest.raises(UserError, match="--local.momentum is 0.9, but it is of sgd, not of "):
            prepare(from_values({"local.momentum": 0.9, **rule}))

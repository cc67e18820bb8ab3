"""The loop that the rules have in common: clipping, what a rule pulls, the weight of steps, whole gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quadratic import BENT, Parabola, vector
from test_local import DECAY, LR, PAIRS, RHO, ROUNDS_OF_PAIRS
from torch import Tensor

from fedmpi.local import Descent, LocalKnobs, sgd, whole_gradient
from fedmpi.local.descent import clipping

NUMBERS = st.floats(-1e6, 1e6)


# Clipping


@pytest.mark.parametrize(
    "gradient, most, factor",
    [
        ([3.0, 4.0], 1.0, 0.2),
        ([3.0, 4.0], 5.0, 1.0),  # just as long as it may be
        ([3.0, 4.0], 10.0, 1.0),  # never lengthened
        ([3.0, 4.0], 2.5, 0.5),
        ([0.0, 0.0], 1.0, 1.0),
    ],
)
def test_the_clipping_factor_by_hand(gradient: list[float], most: float, factor: float) -> None:
    assert float(clipping(torch.tensor(gradient), most)) == pytest.approx(factor)


@given(st.lists(NUMBERS, min_size=1, max_size=5), st.floats(1e-3, 1e3))
def test_a_clipped_gradient_is_no_longer_than_it_may_be_and_points_the_same_way(
    gradient: list[float], most: float
) -> None:
    g_P = vector(gradient)
    clipped_P, size = g_P * clipping(g_P, most), float(g_P.norm())
    assert float(clipped_P.norm()) == pytest.approx(min(size, most), rel=1e-9)
    assert (clipped_P * size).tolist() == pytest.approx((g_P * min(size, most)).tolist(), rel=1e-9, abs=1e-9)


def test_float32_gradients_stay_float32_however_small_or_large() -> None:
    for size in (0.0, 1e-30, 1.0, 1e15):
        g_P = torch.full((3,), size)
        clipped_P = g_P * clipping(g_P, 0.5)
        assert clipped_P.dtype == torch.float32 and torch.isfinite(clipped_P).all()


def test_clipped_steps_by_hand() -> None:
    # lr 1, clip 1, from (3, 4), target 0: (3, 4) is 5 long, so x loses a fifth of it; (2.4, 3.2) is 4 long, and so on
    job = Parabola((3.0, 4.0), [(0.0, 0.0)] * 4)
    sgd(1.0, clip=1.0)(job)
    assert [math.hypot(*call.x) for call in job.calls] == pytest.approx([5, 4, 3, 2])
    assert job.x_P.tolist() == pytest.approx([0.6, 0.8])


def test_a_gradient_is_clipped_before_the_decay_and_the_momentum() -> None:
    # lr 0.1, rho 0.5, decay 0.5, clip 1, target 0, from 4:  g = 1 + 2 = 3, v = 3, x = 3.7;
    # g = 1 + 1.85 = 2.85, v = 1.5 + 2.85 = 4.35, x = 3.265
    job = Parabola(4.0, [0.0] * 2)
    sgd(0.1, momentum=0.5, weight_decay=0.5, clip=1.0)(job)
    assert job.x_P.tolist() == pytest.approx([3.265])


@given(LR, RHO, DECAY, st.floats(0.05, 5), ROUNDS_OF_PAIRS, PAIRS)
def test_clipped_sgd_is_torchs_own(
    lr: float,
    rho: float,
    decay: float,
    clip: float,
    targets: list[tuple[float, float]],
    start: tuple[float, float],
) -> None:
    x = vector(start).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=lr, momentum=rho, weight_decay=decay)
    for target in targets:
        optimizer.zero_grad()
        away = x - vector(target)
        (away @ vector(BENT) @ away / 2).backward()
        torch.nn.utils.clip_grad_norm_([x], clip)
        optimizer.step()
    job = Parabola(start, targets, BENT)
    sgd(lr, rho, decay, clip)(job)
    assert job.x_P.tolist() == pytest.approx(x.tolist(), rel=1e-4, abs=1e-4)  # torch divides by the norm + 1e-6


def test_a_limit_that_is_never_reached_changes_no_bit() -> None:
    jobs = [Parabola((1.0, -2.0), [(0.5, 0.1)] * 5, BENT) for _ in range(2)]
    sgd(0.1, 0.9, clip=1e9)(jobs[0])
    sgd(0.1, 0.9)(jobs[1])
    assert torch.equal(jobs[0].x_P, jobs[1].x_P)


# The loop


def test_a_pull_changes_the_gradient_of_every_step_before_the_momentum() -> None:
    # lr 0.1, rho 0.5, target 0, from 1, pull +1:  v = 2, x = 0.8;  v = 1 + 1.8 = 2.8, x = 0.52
    seen = []

    def pull(g_P: Tensor, x_P: Tensor) -> None:
        seen.append((float(g_P), float(x_P)))
        g_P.add_(1.0)

    job = Parabola(1.0, [0.0] * 2)
    stepped = Descent(0.1, momentum=0.5).run(job, pull)
    assert job.x_P.tolist() == pytest.approx([0.52]) and seen == [(1.0, 1.0), (0.8, 0.8)]
    assert stepped.steps == 2 and stepped.last_P is not None
    assert stepped.last_P.tolist() == pytest.approx([1.8])  # as it was used, with the pull in it


def test_a_pull_sees_the_gradient_clipped_and_decayed() -> None:
    # clip 1, decay 0.5, from 4:  1 + 2
    seen = []
    Descent(0.1, weight_decay=0.5, clip=1.0).run(Parabola(4.0, [0.0]), lambda g_P, x_P: seen.append(float(g_P)))
    assert seen == [3.0]


def test_no_batch_is_no_step_and_no_gradient() -> None:
    stepped = Descent(0.1).run(Parabola(1.0, []))
    assert stepped.steps == 0 and stepped.last_P is None


def test_a_descent_is_made_of_the_knobs() -> None:
    knobs = LocalKnobs(lr=0.3, momentum=0.4, weight_decay=0.5, clip=0.6)
    assert Descent.of(knobs) == Descent(lr=0.3, momentum=0.4, weight_decay=0.5, clip=0.6)


# The weight of steps


@pytest.mark.parametrize("steps, weight", [(0, 0.0), (1, 1.0), (2, 2.5), (3, 4.25), (4, 6.125)])
def test_the_weight_of_steps_by_hand(steps: int, weight: float) -> None:
    # rho 0.5: the last gradient counts 1, the one before 1.5, then 1.75, 1.875
    assert Descent(0.1, momentum=0.5).weight([1.0] * steps) == pytest.approx(weight)
    assert Descent(0.1).weight([1.0] * steps) == steps


@given(st.integers(0, 300), st.one_of(st.just(0.0), st.just(0.9), st.floats(0, 0.999)))
def test_the_weight_of_steps_is_how_far_gradients_of_one_go(steps: int, rho: float) -> None:
    x = v = 0.0
    for _ in range(steps):
        v = rho * v + 1
        x += v
    assert Descent(0.1, momentum=rho).weight([1.0] * steps) == pytest.approx(x, rel=1e-8, abs=1e-12)


# Whole gradients


def test_a_whole_gradient_is_the_mean_by_shares_and_counts_nowhere() -> None:
    # at 3: 0.75 * (3 - 1) + 0.25 * (3 + 5) = 3.5
    job = Parabola(1.0, [9.0], whole=[(1.0, 0.75), (-5.0, 0.25)])
    whole_P = whole_gradient(job, vector(3.0))
    assert whole_P.tolist() == [3.5] and job.x_P.tolist() == [1.0]
    assert job.counted == [] and [call.x for call in job.calls] == [[3.0]] * 2 and not job.is_aside


def test_a_whole_gradient_outlives_the_next_one() -> None:
    job = Parabola(1.0, [9.0], whole=[(0.0, 1.0)])
    whole_P = whole_gradient(job, job.x_P)
    job.grad(vector(100.0), 0.0)
    assert whole_P.tolist() == [1.0]

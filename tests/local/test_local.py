"""What a client does, on parabolas: numbers worked out by hand."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from quadratic import BENT, Parabola, Quartic, vector

from fedmpi.errors import UserError
from fedmpi.local import (
    RULES,
    Channel,
    Descent,
    Job,
    LocalKnobs,
    LocalResult,
    LocalRule,
    Piece,
    fedgma2021,
    make_local,
    nova,
    plain,
    prox,
    scaffold,
    sgd,
    uga,
)
from fedmpi.local.optimizers import find_optimizer

NUMBERS = st.floats(-3, 3)
LR = st.floats(0.01, 0.5)
RHO = st.one_of(st.just(0.0), st.floats(0, 0.99))
DECAY = st.one_of(st.just(0.0), st.floats(0, 0.5))
PAIRS = st.tuples(NUMBERS, NUMBERS)
ROUNDS_OF_PAIRS = st.lists(PAIRS, min_size=1, max_size=7)


def ended(job: Parabola, **knobs: float) -> float:
    """Where SGD leaves the client."""
    return float(job.start_P + sgd(**knobs)(job).delta_P)


def values(result: LocalResult) -> dict[str, list[float]]:
    """All that a client delivers."""
    sends = {f"send {name}": x_P.tolist() for name, x_P in result.sends.items()}
    keeps = {f"keep {name}": x_P.tolist() for name, x_P in result.keeps.items()}
    return {"delta": result.delta_P.tolist(), "steps": [result.steps]} | sends | keeps


def nearly(expected: dict[str, list[float]]) -> dict[str, object]:
    """The same up to rounding."""
    return {name: pytest.approx(numbers, abs=1e-12) for name, numbers in expected.items()}


def impulses(steps: int, rho: float) -> list[float]:
    """How far each step's gradient moves x in the end: one gradient of 1 among zeros, for every step in turn."""
    moved = []
    for which in range(steps):
        x = v = 0.0
        for step in range(steps):
            v = rho * v + (step == which)
            x += v
        moved.append(x)
    return moved


# SGD


def test_one_step_is_the_learning_rate_times_the_gradient() -> None:
    assert ended(Parabola(1.0, [0.0]), lr=0.25) == pytest.approx(0.75)


def test_three_plain_steps_shrink_by_the_same_factor() -> None:
    assert ended(Parabola(8.0, [0.0] * 3), lr=0.5) == pytest.approx(1.0)


def test_momentum_by_hand() -> None:
    # lr 0.1, rho 0.5, from 1:  v = 1, x = 0.9;  v = 0.5 + 0.9 = 1.4, x = 0.76;  v = 0.7 + 0.76 = 1.46, x = 0.614
    assert ended(Parabola(1.0, [0.0] * 3), lr=0.1, momentum=0.5) == pytest.approx(0.614)


def test_weight_decay_by_hand() -> None:
    # lr 0.1, decay 0.5, target 1, from 2:  g = 1 + 1 = 2, x = 1.8;  g = 0.8 + 0.9 = 1.7, x = 1.63
    assert ended(Parabola(2.0, [1.0] * 2), lr=0.1, weight_decay=0.5) == pytest.approx(1.63)


def test_decay_enters_the_momentum() -> None:
    # lr 0.1, rho 0.5, decay 0.5, target 0, from 1:  v = 1.5, x = 0.85;  v = 0.75 + 1.275 = 2.025, x = 0.6475
    assert ended(Parabola(1.0, [0.0] * 2), lr=0.1, momentum=0.5, weight_decay=0.5) == pytest.approx(0.6475)


def test_batches_are_taken_in_their_order() -> None:
    # lr 0.5:  from 0 to 1 (target 2), to 2.5 (target 4); the other way round 2, then 2
    assert ended(Parabola(0.0, [2.0, 4.0]), lr=0.5) == pytest.approx(2.5)
    assert ended(Parabola(0.0, [4.0, 2.0]), lr=0.5) == pytest.approx(2.0)


def test_momentum_starts_at_zero_every_round() -> None:
    rule = sgd(lr=0.1, momentum=0.9)
    first, again = (float(rule(Parabola(1.0, [0.0] * 4)).delta_P) for _ in range(2))
    assert first == again
    two_rounds = rule(Parabola(1.0 + first, [0.0] * 4)).delta_P
    one_round_of_both = rule(Parabola(1.0, [0.0] * 8)).delta_P
    assert float(one_round_of_both) != pytest.approx(first + float(two_rounds))


def test_the_delta_lies_in_the_memory_for_it_and_the_start_is_untouched() -> None:
    job = Parabola(1.0, [0.0])
    result = sgd(lr=0.25)(job)
    assert result.delta_P.data_ptr() == job.delta_P.data_ptr()
    assert job.delta_P.tolist() == [-0.25] and job.start_P.tolist() == [1.0] and job.x_P.tolist() == [0.75]


def test_no_batch_moves_nothing() -> None:
    assert sgd(lr=0.5, momentum=0.9)(Parabola(3.0, [])).delta_P.tolist() == [0.0]


@given(LR, RHO, DECAY, st.lists(PAIRS, max_size=6), PAIRS)
def test_sgd_is_torchs_own(
    lr: float, momentum: float, decay: float, targets: list[tuple[float, float]], start: tuple[float, float]
) -> None:
    x = vector(start).requires_grad_()
    optimizer = torch.optim.SGD([x], lr=lr, momentum=momentum, weight_decay=decay)
    for target in targets:
        optimizer.zero_grad()
        away = x - vector(target)
        (away @ vector(BENT) @ away / 2).backward()
        optimizer.step()
    job = Parabola(start, targets, BENT)
    sgd(lr, momentum, decay)(job)
    assert job.x_P.tolist() == pytest.approx(x.tolist(), rel=1e-9, abs=1e-9)


# FedProx


def test_prox_with_mu_one_stops_halfway() -> None:
    assert float(prox(Descent(0.1), mu=1.0)(Parabola(0.0, [1.0] * 200)).delta_P) == pytest.approx(0.5)


def test_prox_pulls_towards_where_the_round_began() -> None:
    # mu 1, lr 0.5, target 4, from 2:  g = -2 + 0, x = 3;  g = -1 + 1 = 0: it stays
    assert prox(Descent(0.5), mu=1.0)(Parabola(2.0, [4.0] * 2)).delta_P.tolist() == [1.0]
    # mu 0.5, lr 0.5:  x = 3;  g = -1 + 0.5, x = 3.25
    assert prox(Descent(0.5), mu=0.5)(Parabola(2.0, [4.0] * 2)).delta_P.tolist() == [1.25]


def test_the_pull_of_prox_enters_the_momentum() -> None:
    # mu 1, lr 0.25, rho 0.5, from 0 to 1:  v = -1, x = 0.25;  g = -0.75 + 0.25 = -0.5, v = -1, x = 0.5;
    # g = -0.5 + 0.5 = 0, v = -0.5, x = 0.625
    assert prox(Descent(0.25, momentum=0.5), mu=1.0)(Parabola(0.0, [1.0] * 3)).delta_P.tolist() == [0.625]


def test_the_pull_of_prox_is_not_clipped() -> None:
    # mu 2, lr 1, clip 0.5, target 4, from 0:  g = -0.5, x = 0.5;  g = -0.5 + 1 = 0.5, x = 0
    assert prox(Descent(1.0, clip=0.5), mu=2.0)(Parabola(0.0, [4.0] * 2)).delta_P.tolist() == [0.0]


@given(LR, RHO, DECAY, ROUNDS_OF_PAIRS, PAIRS)
def test_prox_with_mu_zero_is_sgd_bit_for_bit(
    lr: float, rho: float, decay: float, targets: list[tuple[float, float]], start: tuple[float, float]
) -> None:
    pulled = prox(Descent(lr, rho, decay), mu=0.0)(Parabola(start, targets, BENT)).delta_P
    assert torch.equal(pulled, sgd(lr, rho, decay)(Parabola(start, targets, BENT)).delta_P)


@given(LR, RHO, st.floats(0.01, 1), ROUNDS_OF_PAIRS, PAIRS)
def test_prox_is_sgd_on_the_loss_with_its_quadratic(
    lr: float, rho: float, mu: float, targets: list[tuple[float, float]], start: tuple[float, float]
) -> None:
    x, w = vector(start).requires_grad_(), vector(start)
    optimizer = torch.optim.SGD([x], lr=lr, momentum=rho)
    for target in targets:
        optimizer.zero_grad()
        away = x - vector(target)
        (away @ vector(BENT) @ away / 2 + mu / 2 * (x - w).square().sum()).backward()
        optimizer.step()
    mine = prox(Descent(lr, rho), mu)(Parabola(start, targets, BENT)).delta_P
    assert mine.tolist() == pytest.approx((x.detach() - w).tolist(), rel=1e-9, abs=1e-9)


# SCAFFOLD


def test_scaffold_by_hand() -> None:
    # lr 0.1, target 0, from 1, c - c_n = 0.5 - 0.25:  g = 1 + 0.25, x = 0.875;  g = 0.875 + 0.25, x = 0.7625
    # option II: c_n+ = 0.25 - 0.5 + 0.2375 / (2 * 0.1) = 0.9375, the mean of the gradients 1 and 0.875
    result = scaffold(Descent(0.1))(Parabola(1.0, [0.0] * 2, c=0.5, own=0.25))
    assert values(result) == nearly(
        {"delta": [-0.2375], "steps": [1.0], "send control": [0.6875], "keep control": [0.9375]}
    )


def test_scaffold_with_the_whole_gradient_by_hand() -> None:
    # the steps as above; option I: c_n+ = 0.25 * (1 - 2) + 0.75 * (1 + 1) = 1.25 at the start
    job = Parabola(1.0, [0.0] * 2, whole=[(2.0, 0.25), (-1.0, 0.75)], c=0.5, own=0.25)
    result = scaffold(Descent(0.1), option="I")(job)
    assert values(result) == nearly({"delta": [-0.2375], "steps": [1.0], "send control": [1.0], "keep control": [1.25]})


def test_scaffold_with_momentum_by_hand() -> None:
    # lr 0.1, rho 0.5, from 1: x = 1, 0.9, 0.76, then 0.614, and these are the gradients too. They count 1.75, 1.5
    # and 1, together 4.25:  c_n+ = (1.75 + 1.35 + 0.76) / 4.25 = 3.86 / 4.25
    result = scaffold(Descent(0.1, momentum=0.5))(Parabola(1.0, [0.0] * 3))
    assert result.delta_P.tolist() == pytest.approx([-0.386])
    assert result.keeps["control"].tolist() == pytest.approx([3.86 / 4.25])


def test_scaffold_with_the_whole_gradient_at_the_optimum_of_all_stands_still() -> None:
    # the client's own optimum is 2, that of all is 0: with c = 0 and c_n = the gradient -2 at 0, no step moves
    job = Parabola(0.0, [2.0] * 5, c=0.0, own=-2.0)
    result = scaffold(Descent(0.1, momentum=0.9), option="I")(job)
    assert values(result) == {"delta": [0.0], "steps": [1.0], "send control": [0.0], "keep control": [-2.0]}


@given(LR, RHO, DECAY, ROUNDS_OF_PAIRS, PAIRS, PAIRS, PAIRS)
def test_a_control_from_the_steps_is_the_weighted_mean_of_the_clients_own_gradients(
    lr: float,
    rho: float,
    decay: float,
    targets: list[tuple[float, float]],
    start: tuple[float, float],
    c: tuple[float, float],
    own: tuple[float, float],
) -> None:
    job = Parabola(start, targets, BENT, c=c, own=own)
    result = scaffold(Descent(lr, rho, decay))(job)
    used = [job.slope(vector(call.x), call.batch) + decay * vector(call.x) for call in job.calls]
    weights = impulses(len(targets), rho)
    mean_P = sum(a * g_P for a, g_P in zip(weights, used, strict=True)) / sum(weights)
    assert result.keeps["control"].tolist() == pytest.approx(mean_P.tolist(), rel=1e-7, abs=1e-7)
    assert (result.sends["control"] + vector(own)).tolist() == pytest.approx(mean_P.tolist(), rel=1e-7, abs=1e-7)


@given(LR, RHO, ROUNDS_OF_PAIRS, PAIRS, PAIRS)
def test_scaffold_with_equal_controls_moves_as_sgd(
    lr: float, rho: float, targets: list[tuple[float, float]], start: tuple[float, float], c: tuple[float, float]
) -> None:
    corrected = scaffold(Descent(lr, rho))(Parabola(start, targets, BENT, c=c, own=c)).delta_P
    assert torch.equal(corrected, sgd(lr, rho)(Parabola(start, targets, BENT)).delta_P)


def test_a_client_that_does_not_move_keeps_its_control_or_takes_the_whole_gradient() -> None:
    # no step, or steps of a rate 0 (`step:10,0` is a schedule too): the steps say nothing, but the
    # gradient at 1 of the whole loss towards 0 is 1
    for lr, targets in ((0.1, []), (0.0, [0.0] * 2)):
        for option, keep, send in (("II", 0.25, 0.0), ("I", 1.0, 0.75)):
            result = scaffold(Descent(lr), option)(Parabola(1.0, targets, whole=[(0.0, 1.0)], c=0.5, own=0.25))
            expected = {"delta": [0.0], "steps": [1.0], "send control": [send], "keep control": [keep]}
            assert values(result) == expected, (lr, option)


def test_what_a_client_keeps_is_no_view_of_what_it_was_lent() -> None:
    for option, targets in (("I", [0.0]), ("II", [0.0]), ("II", [])):
        job = Parabola(1.0, targets, whole=[(0.0, 1.0)], c=0.5, own=0.25)
        kept_P = scaffold(Descent(0.1), option)(job).keeps["control"]
        lent = (job.memory["control"], job.shared["control"], job.g_P, job.x_P, job.delta_P, job.start_P)
        assert kept_P.data_ptr() not in {x_P.data_ptr() for x_P in lent}


# FedNova


def test_nova_by_hand() -> None:
    # lr 0.1, rho 0.5, from 1: SGD moves by -0.386 in three steps, which weigh 1.75 + 1.5 + 1 = 4.25
    result = nova(Descent(0.1, momentum=0.5))(Parabola(1.0, [0.0] * 3))
    assert result.steps == pytest.approx(4.25) and result.delta_P.tolist() == pytest.approx([-0.386 / 4.25])


def test_nova_without_momentum_counts_steps() -> None:
    # lr 0.5, from 8: 4, 2, 1
    result = nova(Descent(0.5))(Parabola(8.0, [0.0] * 3))
    assert result.steps == 3.0 and result.delta_P.tolist() == pytest.approx([-7 / 3])


@given(LR, RHO, DECAY, ROUNDS_OF_PAIRS, PAIRS)
def test_novas_delta_times_its_steps_is_sgds(
    lr: float, rho: float, decay: float, targets: list[tuple[float, float]], start: tuple[float, float]
) -> None:
    result = nova(Descent(lr, rho, decay))(Parabola(start, targets, BENT))
    plain = sgd(lr, rho, decay)(Parabola(start, targets, BENT)).delta_P
    assert (result.delta_P * result.steps).tolist() == pytest.approx(plain.tolist(), rel=1e-12, abs=1e-12)
    assert result.steps == pytest.approx(sum(impulses(len(targets), rho)), rel=1e-9)


def test_nova_without_a_step_delivers_nothing_and_counts_as_one() -> None:
    assert values(nova(Descent(0.1, 0.9))(Parabola(1.0, []))) == {"delta": [0.0], "steps": [1.0]}


# FedGMA as first published


def test_fedgma2021_sends_where_it_went_and_the_last_gradient() -> None:
    # lr 0.1, from 1:  g = 1, x = 0.9;  g = 0.9 - 2 = -1.1, x = 1.01
    result = fedgma2021(Descent(0.1))(Parabola(1.0, [0.0, 2.0]))
    assert values(result) == nearly({"delta": [1.1], "steps": [1.0], "send shift": [0.01]})


def test_fedgma2021_sends_the_gradient_and_not_the_velocity() -> None:
    # rho 0.5:  x = 0.9;  g = -1.1, v = 0.5 - 1.1 = -0.6, x = 0.96
    result = fedgma2021(Descent(0.1, momentum=0.5))(Parabola(1.0, [0.0, 2.0]))
    assert values(result) == nearly({"delta": [1.1], "steps": [1.0], "send shift": [-0.04]})


def test_the_last_gradient_of_fedgma2021_is_decayed_and_clipped_as_it_was_used() -> None:
    # decay 0.5:  g = 1 + 0.5, x = 0.85;  g = 0.85 - 2 + 0.425 = -0.725, x = 0.9225
    result = fedgma2021(Descent(0.1, weight_decay=0.5))(Parabola(1.0, [0.0, 2.0]))
    assert values(result) == nearly({"delta": [0.725], "steps": [1.0], "send shift": [-0.0775]})
    # clip 0.5:  g = 0.5, x = 0.95;  g = -0.5, x = 1
    result = fedgma2021(Descent(0.1, clip=0.5))(Parabola(1.0, [0.0, 2.0]))
    assert values(result) == nearly({"delta": [0.5], "steps": [1.0], "send shift": [0.0]})


def test_fedgma2021_can_send_the_gradient_at_the_initial_parameters() -> None:
    # the whole loss at 1:  0.75 * (1 - 0) + 0.25 * (1 - 5) = -0.25;  the steps as before, to 1.01
    def job() -> Parabola:
        return Parabola(1.0, [0.0, 2.0], whole=[(0.0, 0.75), (5.0, 0.25)])

    result = fedgma2021(Descent(0.1), gradient="initial")(job())
    assert values(result) == nearly({"delta": [0.25], "steps": [1.0], "send shift": [0.01]})
    # with decay 0.5 it is -0.25 + 0.5, with clip 0.1 it is -0.1
    assert fedgma2021(Descent(0.1, weight_decay=0.5), "initial")(job()).delta_P.tolist() == pytest.approx([-0.25])
    assert fedgma2021(Descent(0.1, clip=0.1), "initial")(job()).delta_P.tolist() == pytest.approx([0.1])


@pytest.mark.parametrize("gradient, delta", [("last", 0.0), ("initial", -1.0)])
def test_fedgma2021_without_a_step_goes_nowhere(gradient: str, delta: float) -> None:
    result = fedgma2021(Descent(0.1), gradient)(Parabola(1.0, [], whole=[(0.0, 1.0)]))
    assert values(result) == {"delta": [delta], "steps": [1.0], "send shift": [0.0]}


@pytest.mark.parametrize("gradient", ["last", "initial"])
@given(LR, RHO, DECAY, ROUNDS_OF_PAIRS, PAIRS)
def test_fedgma2021_goes_where_sgd_goes(
    gradient: str, lr: float, rho: float, decay: float, targets: list[tuple[float, float]], start: tuple[float, float]
) -> None:
    result = fedgma2021(Descent(lr, rho, decay), gradient)(Parabola(start, targets, BENT))
    assert torch.equal(result.sends["shift"], sgd(lr, rho, decay)(Parabola(start, targets, BENT)).delta_P)


# Unbiased gradients


def test_uga_with_one_epoch_is_the_gradient_of_the_whole_loss() -> None:
    job = Parabola(1.0, [7.0, 8.0], whole=[(0.0, 0.75), (5.0, 0.25)])  # 0.75 * 1 + 0.25 * -4 = -0.25
    assert uga(Descent(0.1))(job).delta_P.tolist() == pytest.approx([0.25])
    assert job.counted == [0.0, 5.0]


def test_uga_goes_back_through_its_steps() -> None:
    # two steps of lr 0.1 towards 0, then the whole loss towards 0.31:  w_n = 0.81 w, so the gradient at w = 1 is
    # (0.81 - 0.31) * 0.81 = 0.405
    job = Parabola(1.0, [0.0] * 4, epochs=2, whole=[(0.31, 1.0)])
    assert uga(Descent(0.1))(job).delta_P.tolist() == pytest.approx([-0.405])


def test_uga_goes_back_through_momentum() -> None:
    # lr 0.1, rho 0.5:  x = 0.9 w, v = 0.5 w + 0.9 w, x = 0.76 w, v = 0.7 w + 0.76 w, x = 0.614 w; the whole loss
    # towards 0.114:  0.5 * 0.614
    job = Parabola(1.0, [0.0] * 6, epochs=2, whole=[(0.114, 1.0)])
    assert uga(Descent(0.1, momentum=0.5))(job).delta_P.tolist() == pytest.approx([-0.307])


def test_uga_goes_back_through_decay() -> None:
    # lr 0.1, decay 0.5:  x = (1 - 0.1 * 1.5)^2 w = 0.7225 w
    job = Parabola(1.0, [0.0] * 4, epochs=2, whole=[(0.2225, 1.0)])
    assert uga(Descent(0.1, weight_decay=0.5))(job).delta_P.tolist() == pytest.approx([-0.5 * 0.7225])


def test_uga_goes_back_through_a_clipped_step() -> None:
    # from (3, 4), target 0, clip 1, lr 1:  x = (2.4, 3.2). To turn w by a little turns the clipped gradient w / 5,
    # to lengthen it does not: the derivative of the step is 1 along w and 1 - 1 / 5 across
    def delta(target: tuple[float, float]) -> list[float]:
        job = Parabola((3.0, 4.0), [(0.0, 0.0)] * 2, epochs=2, whole=[(target, 1.0)])
        return uga(Descent(1.0, clip=1.0))(job).delta_P.tolist()

    assert delta((2.16, 2.88)) == pytest.approx([-0.24, -0.32])  # the slope there is along w
    assert delta((2.8, 2.9)) == pytest.approx([0.32, -0.24])  # the slope there is (-0.4, 0.3), across


def test_what_uga_sends_is_not_clipped_with_its_steps() -> None:
    # as before, but the slope at (2.4, 3.2) is (2.4, 3.2), which is 4 long
    job = Parabola((3.0, 4.0), [(0.0, 0.0)] * 2, epochs=2, whole=[((0.0, 0.0), 1.0)])
    assert uga(Descent(1.0, clip=1.0))(job).delta_P.tolist() == pytest.approx([-2.4, -3.2])


def test_an_update_is_shortened_whatever_the_rule_and_only_if_it_is_too_long() -> None:
    # sgd from (3, 4) to 0 with lr 1 moves by 5; uga sends the slope at the end, (2.4, 3.2), which is 4 long
    def sent(name: str, most: float | None) -> list[float]:
        job = Parabola((3.0, 4.0), [(0.0, 0.0)] * 2, epochs=2, whole=[((0.0, 0.0), 1.0)])
        knobs = LocalKnobs(lr=1.0, momentum=0.0, clip=1.0 if name == "uga" else None, clip_update=most)
        return make_local(name, knobs)(job).delta_P.tolist()

    assert sent("sgd", None) == sent("sgd", 5.0) == [-3.0, -4.0]
    assert sent("sgd", 1.0) == pytest.approx([-0.6, -0.8])
    assert sent("uga", 1.0) == pytest.approx([-0.6, -0.8])
    assert sent("uga", 10.0) == pytest.approx([-2.4, -3.2])


def test_a_bound_on_the_update_leaves_the_rest_of_a_rule_as_it_is() -> None:
    plain, held = (make_local("scaffold", LocalKnobs(clip_update=most)) for most in (None, 0.01))
    assert (held.sends, held.keeps, held.normalised) == (plain.sends, plain.keeps, plain.normalised)
    one, other = plain(bent()), held(bent())
    assert torch.equal(one.keeps["control"], other.keeps["control"]) and not torch.equal(one.delta_P, other.delta_P)


def test_uga_leaves_a_step_that_was_not_clipped_as_it_is() -> None:
    # from (3, 4), target 0, clip 6, lr 0.5:  x = w / 2
    job = Parabola((3.0, 4.0), [(0.0, 0.0)] * 2, epochs=2)
    assert uga(Descent(0.5, clip=6.0))(job).delta_P.tolist() == pytest.approx([-0.75, -1.0])


def test_uga_takes_the_curvature_where_each_step_began() -> None:
    # loss x^4 / 4, lr 0.1, from 1:  x = 0.9, then 0.9 - 0.0729 = 0.8271; back with 1 - 0.3 x^2: 0.757 and 0.7
    job = Quartic(1.0, [0.0] * 4, epochs=2, whole=[(0.0, 1.0)])
    assert uga(Descent(0.1))(job).delta_P.tolist() == pytest.approx([-(0.8271**3) * 0.757 * 0.7])


# What all of them have in common


RULE_NAMES = sorted(RULES)
MADE: dict[str, Callable[[Descent, LocalKnobs], LocalRule]] = {
    "sgd": lambda d, k: plain(d),
    "adamw": lambda d, k: plain(replace(d, other=find_optimizer("adamw", k))),
    "prox": lambda d, k: prox(d, k.mu),
    "scaffold": lambda d, k: scaffold(d, k.option),
    "nova": lambda d, k: nova(d),
    "uga": lambda d, k: uga(d),
    "fedgma2021": lambda d, k: fedgma2021(d, k.gradient),
}


def bent(round: int = 1) -> Parabola:
    """A job that every knob makes a difference to."""
    return Parabola(
        (1.0, -2.0),
        [(0.5, 3.0), (1.5, 0.0), (2.0, 1.0), (0.0, -1.0)],
        BENT,
        epochs=2,
        whole=[((1.0, 1.0), 0.25), ((0.0, 2.0), 0.75)],
        round=round,
        c=(0.5, 0.25),
        own=(-0.5, 1.0),
    )


@pytest.mark.parametrize("name", RULE_NAMES)
def test_the_row_reads_every_knob(name: str) -> None:
    first = LocalKnobs(lr=0.05, momentum=0.5, weight_decay=0.1, clip=2.0, mu=0.3, option="II", gradient="last")
    changes = [{"lr": 0.06}, {"weight_decay": 0.0}, {"clip": None}, {"accumulate": 2}, {"step_schedule": "cosine"}]
    changes += [{"b1": 0.5}, {"b2": 0.5}, {"eps": 0.1}] if name == "adamw" else [{"momentum": 0.0}]
    changes += [{"mu": 0.1}] * (name == "prox") + [{"option": "I"}] * (name == "scaffold")
    changes += [{"gradient": "initial"}] * (name == "fedgma2021")
    seen = []
    for change in [{}, *changes]:
        knobs = LocalKnobs(**(vars(first) | change))
        usual = Descent(knobs.lr, knobs.momentum, knobs.weight_decay, knobs.clip)
        descent = replace(usual, accumulate=knobs.accumulate, schedule=knobs.step_schedule)
        delivered = values(make_local(name, knobs)(bent()))
        assert delivered == values(MADE[name](descent, knobs)(bent())), change
        seen.append(str(delivered))
    assert len(set(seen)) == len(seen)


@pytest.mark.parametrize("name", RULE_NAMES)
def test_every_rule_takes_the_learning_rate_of_the_jobs_round(name: str) -> None:
    def falling(t: int) -> float:
        return 0.3 / t

    in_round_3 = values(make_local(name, LocalKnobs(lr=falling))(bent(round=3)))
    assert in_round_3 == values(make_local(name, LocalKnobs(lr=falling(3)))(bent(round=1)))
    assert in_round_3 != values(make_local(name, LocalKnobs(lr=falling))(bent(round=1)))


@pytest.mark.parametrize("name", RULE_NAMES)
def test_every_rule_delivers_a_delta_towards_the_target(name: str) -> None:
    job = Parabola(1.0, [0.0] * 3, epochs=3)
    assert -1 < float(make_local(name, LocalKnobs(lr=0.1, momentum=0.0))(job).delta_P) < 0


@pytest.mark.parametrize("name", RULE_NAMES)
def test_no_rule_writes_to_what_it_may_only_read(name: str) -> None:
    job, fresh = bent(), bent()
    rule = make_local(name, LocalKnobs(lr=0.1, momentum=0.5, weight_decay=0.1, clip=1.0))
    result = rule(job)
    assert torch.equal(job.start_P, fresh.start_P)
    assert torch.equal(job.shared["control"], fresh.shared["control"])
    assert torch.equal(job.memory["control"], fresh.memory["control"])
    assert result.delta_P.data_ptr() in (job.delta_P.data_ptr(), job.x_P.data_ptr())


@pytest.mark.parametrize(
    ("name", "momentum", "private", "in_place"),
    [("sgd", 0.0, 0, True), ("adamw", 0.9, 0, True), ("sgd", 0.9, 0, False), ("sgd", 0.0, 1, False)],
)
def test_a_delta_takes_the_place_of_the_parameters_if_its_own_memory_is_unused(
    name: str, momentum: float, private: int, in_place: bool
) -> None:
    job, other = bent(), bent()
    job.private = other.private = private
    result = make_local(name, LocalKnobs(lr=0.1, momentum=momentum))(job)
    assert (result.delta_P.data_ptr() == job.x_P.data_ptr()) == in_place
    descent = Descent.of(LocalKnobs(lr=0.1, momentum=momentum, optimizer="adamw" if name == "adamw" else "sgd"))
    assert torch.equal(plain(descent)(other).delta_P, result.delta_P), "the same delta"
    assert torch.equal(other.x_P - other.start_P, result.delta_P), "a rule of one's own finds x_P where training led"


def test_one_gradient_at_a_time_is_in_memory() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    class Watched(Parabola):
        def pieces(self, batch: Any) -> list[Piece]:
            assert all(known() is None for known in alive), "the gradient of the step before"
            (piece,) = super().pieces(batch)
            alive.append(weakref.ref(g := piece.g.clone()))
            return [Piece(piece.at, g)]

    make_local("sgd", LocalKnobs(lr=0.1))(Watched(1.0, [0.0] * 4))
    assert len(alive) == 4


@pytest.mark.parametrize("name", RULE_NAMES)
def test_every_rule_delivers_what_it_declares(name: str) -> None:
    rule = make_local(name, LocalKnobs())
    result = rule(bent())
    assert set(result.sends) == {channel.name for channel in rule.sends} and set(result.keeps) == set(rule.keeps)
    assert rule.normalised or result.steps == 1.0


def test_what_the_rules_declare() -> None:
    declared = {name: make_local(name, LocalKnobs()) for name in RULES}
    assert {name: rule.sends for name, rule in declared.items() if rule.sends} == {
        "scaffold": (Channel("control", to="shared"),),
        "fedgma2021": (Channel("shift", to="model"),),
    }
    assert {name: rule.keeps for name, rule in declared.items() if rule.keeps} == {"scaffold": ("control",)}
    assert [name for name, rule in declared.items() if rule.normalised] == ["nova"]


@pytest.mark.parametrize("name", [name for name in RULE_NAMES if name != "uga"])
@pytest.mark.parametrize("knobs", [{}, {"option": "I", "gradient": "initial"}])
def test_only_the_batches_of_the_round_count_in_the_loss(name: str, knobs: dict[str, str]) -> None:
    job = bent()
    make_local(name, LocalKnobs(lr=0.1, **knobs))(job)
    assert job.counted == job.targets
    beside = [call for call in job.calls if not call.counts]
    asks = (name, *knobs.values()) if knobs else (name,)
    if asks in {("scaffold", "I", "initial"), ("fedgma2021", "I", "initial")}:
        assert [call.batch for call in beside] == [target for target, _ in job.whole]
        assert all(call.x == job.start_P.tolist() for call in beside)
    else:
        assert not beside


@pytest.mark.parametrize("trace_bytes, again", [(0, 2), (1 << 20, 0)])
def test_the_steps_and_the_evaluation_of_uga_count_and_its_way_back_does_not(trace_bytes: int, again: int) -> None:
    job = Parabola(1.0, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6], epochs=3, whole=[(7.0, 0.5), (8.0, 0.5)])
    uga(Descent(0.1, 0.9), trace_bytes)(job)
    assert job.counted == [0.1, 0.2, 0.3, 0.4, 7.0, 8.0]  # in place of the last epoch comes the evaluation
    assert [call.batch for call in job.calls if not call.counts] == [0.1, 0.2][:again]  # the first of two segments


# Names, and rules from outside


def test_an_unknown_rule_gets_the_closest_match() -> None:
    with pytest.raises(UserError, match="unknown local rule 'sdg'; did you mean 'sgd'"):
        make_local("sdg", LocalKnobs())


def test_the_error_of_an_unknown_option_lists_all() -> None:
    with pytest.raises(UserError) as caught:
        make_local("scaffold", LocalKnobs(option="III"))
    assert str(caught.value) == "unknown --local.option 'III'; did you mean 'II'? known: I, II"


def test_the_error_of_an_unknown_gradient_lists_all() -> None:
    with pytest.raises(UserError) as caught:
        make_local("fedgma2021", LocalKnobs(gradient="first"))
    assert str(caught.value) == "unknown --local.gradient 'first'; known: initial, last"


def sign_descent(knobs: LocalKnobs) -> Callable[[Job], LocalResult]:
    """A rule from outside: a plain function of a job."""

    def run(job: Job) -> LocalResult:
        for batch in job.batches():
            job.x_P.sub_(job.grad(job.x_P, batch).sign_(), alpha=knobs.rate(job.round))
        return LocalResult(job.x_P - job.start_P)

    return run


def echo(knobs: LocalKnobs) -> LocalRule:
    """A rule from outside that declares a channel."""
    run = sign_descent(knobs)
    return LocalRule(lambda job: LocalResult(run(job).delta_P, sends={"twice": 2 * job.x_P}), sends=(Channel("twice"),))


def test_a_plain_function_of_a_job_is_a_rule() -> None:
    rule = make_local(f"{__name__}:sign_descent", LocalKnobs(lr=0.25))
    assert isinstance(rule, LocalRule) and (rule.sends, rule.keeps, rule.normalised) == ((), (), False)
    assert values(rule(Parabola((1.0, -3.0), [(0.0, 0.0)] * 2))) == {"delta": [-0.5, 0.5], "steps": [1.0]}


def test_a_rule_from_outside_keeps_what_it_declares() -> None:
    rule = make_local(f"{__name__}:echo", LocalKnobs(lr=lambda t: 0.25 * t))
    assert rule.sends == (Channel("twice", to="shared"),)
    assert values(rule(Parabola(1.0, [0.0], round=2))) == {"delta": [-0.5], "steps": [1.0], "send twice": [1.0]}


def three(knobs: LocalKnobs) -> int:
    """What is no rule."""
    return 3


def test_what_cannot_be_called_with_a_job_is_refused() -> None:
    with pytest.raises(UserError, match=f"local rule '{__name__}:three' returned int; it must .*a function of a job"):
        make_local(f"{__name__}:three", LocalKnobs())

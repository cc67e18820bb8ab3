"""What a client does, on parabolas: numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.errors import UserError
from fedmpi.local import RULES, LocalKnobs, make_local, sgd


class Parabola:
    """A job whose loss is curvature / 2 * (x - target)^2; a batch is its target."""

    def __init__(self, start: float, targets: list[float], curvature: float = 1.0) -> None:
        self.start_P = torch.tensor([start], dtype=torch.float64)
        self.x_P, self.delta_P = self.start_P.clone(), torch.full((1,), torch.nan, dtype=torch.float64)
        self.targets, self.curvature = targets, curvature

    def batches(self) -> Iterable[float]:
        return iter(self.targets)

    def grad(self, x_P: Tensor, batch: float) -> Tensor:
        return self.curvature * (x_P - batch)


def ended(job: Parabola, **knobs: float) -> float:
    """Where SGD leaves the client."""
    return float(job.start_P + sgd(**knobs)(job).delta_P)


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


@settings(deadline=None)
@given(
    st.floats(0.01, 1), st.floats(0, 0.99), st.floats(0, 0.5), st.lists(st.floats(-5, 5), max_size=6), st.floats(-5, 5)
)
def test_sgd_is_torchs_own(lr: float, momentum: float, decay: float, targets: list[float], start: float) -> None:
    x = torch.tensor([start], dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([x], lr=lr, momentum=momentum, weight_decay=decay)
    for target in targets:
        optimizer.zero_grad()
        ((x - target) ** 2 / 2).sum().backward()
        optimizer.step()
    mine = ended(Parabola(start, targets), lr=lr, momentum=momentum, weight_decay=decay)
    assert mine == pytest.approx(float(x.detach()), rel=1e-9, abs=1e-9)


def test_the_row_reads_every_knob() -> None:
    made = make_local("sgd", LocalKnobs(lr=0.1, momentum=0.5, weight_decay=0.5))
    assert float(made(Parabola(1.0, [0.0] * 2)).delta_P) == pytest.approx(0.6475 - 1)


def test_every_rule_delivers_a_delta_towards_the_target() -> None:
    for name in RULES:
        delta_P = make_local(name, LocalKnobs(lr=0.1, momentum=0.0))(Parabola(1.0, [0.0] * 3)).delta_P
        assert -1 < float(delta_P) < 0, name


def test_an_unknown_rule_is_told_its_neighbour() -> None:
    with pytest.raises(UserError, match="unknown local rule 'sdg'; did you mean 'sgd'"):
        make_local("sdg", LocalKnobs())

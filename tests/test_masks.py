"""Masks against the paper's definition, and against the mistakes that public code makes."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.errors import UserError
from fedmpi.masks import MASKS, Mask, make_mask, quorum

VOTED = [name for name in MASKS if not make_mask(name, 0.4).second_moment]


def values(name: str, tau: float, votes: list[int], clients: int, dtype: torch.dtype = torch.int8) -> list[float]:
    return make_mask(name, tau)(torch.tensor(votes, dtype=dtype), clients).tolist()


def test_gma_at_ten_clients_and_tau_two_fifths() -> None:
    # A reversed subtraction elsewhere gives 0 for A = 0.2, 1.4 for 0.4 and 2.0 for 1.0.
    votes = [0, 1, 2, 3, 4, 5, 10, -2, -4, -10]
    want = [0.0, 0.1, 0.2, 0.3, 1.0, 1.0, 1.0, 0.2, 1.0, 1.0]
    assert values("gma", 0.4, votes, 10) == pytest.approx(want, abs=1e-7)


def test_a_tie_at_tau_agrees() -> None:
    assert values("gma", 0.4, [4], 10) == [1.0]  # a strict > would give 0.4
    assert values("and", 0.4, [4, 3, -4, -3], 10) == [1.0, 0.0, 1.0, 0.0]
    assert values("and", 1.0, [10, 9], 10) == [1.0, 0.0]


@pytest.mark.parametrize("name", VOTED)
def test_tau_zero_keeps_everything(name: str) -> None:
    assert values(name, 0.0, [0, 1, -5, 127, -127], 127) == [1.0] * 5


def test_mean_keeps_everything_whatever_tau_is() -> None:
    assert values("mean", 1.0, [0, 3, -10], 10) == [1.0] * 3


@pytest.mark.parametrize(
    ("tau", "clients", "least"),
    [
        (0.4, 10, 4),
        (0.1, 30, 3),
        (0.7, 10, 7),
        (0.3, 10, 3),
        (0.45, 10, 5),
        (1.0, 7, 7),
        (0.0, 7, 0),
        (1e-9, 7, 0),
        (2 / 3, 3, 2),
    ],
)
def test_the_quorum_is_the_ceiling_of_the_fraction_that_tau_stands_for(tau: float, clients: int, least: int) -> None:
    assert quorum(tau, clients) == least


@given(st.integers(1, 300), st.integers(0, 100), st.data())
def test_masks_are_the_definition_in_fractions(clients: int, percent: int, data: st.DataObject) -> None:
    votes = data.draw(st.lists(st.integers(-clients, clients), min_size=1, max_size=30))
    dtype = torch.int8 if clients <= 127 else torch.int32
    tau = Fraction(percent, 100)
    for vote, soft, hard in zip(
        votes,
        values("gma", percent / 100, votes, clients, dtype),
        values("and", percent / 100, votes, clients, dtype),
        strict=True,
    ):
        agreement = Fraction(abs(vote), clients)
        assert hard == (1.0 if agreement >= tau else 0.0)
        assert soft == (1.0 if agreement >= tau else torch.tensor(abs(vote)).float().div(clients).item())


@given(st.integers(1, 127), st.floats(0, 1))
def test_gma_lies_between_and_and_one_and_grows_with_agreement(clients: int, tau: float) -> None:
    votes = list(range(clients + 1))
    soft, hard = values("gma", tau, votes, clients), values("and", tau, votes, clients)
    assert all(0 <= h <= s <= 1 for h, s in zip(hard, soft, strict=True))
    assert soft == sorted(soft) and hard == sorted(hard)


def test_what_a_mask_is_given_is_left_as_it_was() -> None:
    votes = torch.tensor([-3, 0, 5], dtype=torch.int8)
    mean, square = torch.tensor([-0.5, 0.0, 0.25]), torch.tensor([0.25, 0.0, 0.125])
    for name in MASKS:
        make_mask(name, 0.4)(votes, 10, mean, square)
    assert votes.tolist() == [-3, 0, 5]
    assert mean.tolist() == [-0.5, 0.0, 0.25] and square.tolist() == [0.25, 0.0, 0.125]


def test_only_sand_asks_for_the_second_moment() -> None:
    assert [name for name in MASKS if name not in VOTED] == ["sand"]


def test_an_unknown_mask_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(UserError, match="unknown mask 'gmaa'; did you mean 'gma'\\? known: and, gma, mean"):
        make_mask("gmaa", 0.4)


def test_a_mask_of_votes_is_not_handed_the_moments() -> None:
    half = Mask(lambda votes_S, clients: torch.full(votes_S.shape, 0.5))
    assert half(torch.tensor([1, 2]), 4, torch.ones(2), torch.ones(2)).tolist() == [0.5, 0.5]


# sand: max(0, tanh(sharpness * (A - tau) / r)), r = (mean square - mean^2) / mean square


def sand(deltas: list[float], tau: float = 0.4, sharpness: float = 1.0, weights: list[int] | None = None) -> float:
    """The mask of one element that the clients moved so."""
    w = weights or [1] * len(deltas)
    votes = sum((d > 0) - (d < 0) for d in deltas)
    mean = sum(d * n for d, n in zip(deltas, w, strict=True)) / sum(w)
    square = sum(d * d * n for d, n in zip(deltas, w, strict=True)) / sum(w)
    return given_moments(votes, len(deltas), mean, square, tau, sharpness)


def given_moments(
    votes: int, clients: int, mean: float, square: float, tau: float = 0.4, sharpness: float = 1.0
) -> float:
    dtype = torch.int8 if clients <= 127 else torch.int32
    mask = make_mask("sand", tau, sharpness)
    return mask(torch.tensor([votes], dtype=dtype), clients, torch.tensor([mean]), torch.tensor([square])).item()


@pytest.mark.parametrize(
    ("deltas", "changes", "want"),
    [
        ([1, 3], {}, math.tanh(3.0)),  # A 1, mean 2, mean square 5: r = 1/5, 0.6 / r = 3
        ([-1, -3], {}, math.tanh(3.0)),
        ([2, 0], {}, math.tanh(0.2)),  # A 1/2, mean 1, mean square 2: r = 1/2, 0.1 / r
        ([4, 0], {"weights": [1, 3]}, math.tanh(0.4 / 3)),  # mean 1, mean square 4: r = 3/4; votes are not weighted
        ([1, 1, -2], {"tau": 0.0}, math.tanh(1 / 3)),  # mean 0: r = 1, whatever the size
        ([1, 1, -2], {"tau": 0.0, "sharpness": 2.0}, math.tanh(2 / 3)),
        ([1, -1], {"tau": 0.0}, 0.0),  # no net vote
        ([1, 1, -1], {}, 0.0),  # A 1/3 is below tau
        ([0, 0, 0], {}, 0.0),  # all abstain
        ([0, 0, 0], {"tau": 0.0}, 0.0),  # and at tau 0 they do not agree either: sand is no mean
        ([0.7, 0.7, 0.7], {}, 1.0),  # no variance
        ([0.1] * 7, {"tau": 0.99}, 1.0),
        ([-0.3], {}, 1.0),  # one client agrees with itself
    ],
)
def test_sand_by_hand(deltas: list[float], changes: dict[str, Any], want: float) -> None:
    assert sand(deltas, **changes) == pytest.approx(want, abs=1e-6)


@given(st.integers(2, 300), st.data())
def test_sand_is_nothing_at_tau_and_everything_just_above_it_where_all_moved_alike(
    clients: int, data: st.DataObject
) -> None:
    """The smallest rounding error in A - tau would be divided by no variance at all, and be 1."""
    votes = data.draw(st.integers(1, clients - 1))
    tau = votes / clients
    assert given_moments(votes, clients, 0.5, 0.25, tau) == 0.0
    assert given_moments(-votes, clients, 0.5, 0.25, tau) == 0.0
    assert given_moments(votes + 1, clients, 0.5, 0.25, tau) == 1.0


SIZES = st.floats(2.0**-8, 2.0**8, width=32)


@given(st.integers(1, 127), st.floats(0, 1, exclude_max=True), st.floats(0.01, 100), st.floats(-1, 1, width=32))
def test_sand_grows_with_agreement_and_lies_between_none_and_all(
    clients: int, tau: float, sharpness: float, mean: float
) -> None:
    votes = list(range(clients + 1))
    masks = [given_moments(v, clients, mean, 1.0, tau, sharpness) for v in votes]
    assert masks == sorted(masks) and 0 <= masks[0] <= masks[-1] <= 1
    assert masks == [given_moments(-v, clients, mean, 1.0, tau, sharpness) for v in votes]


@given(st.floats(0, 0.9), SIZES, st.lists(st.floats(0, 1, width=32), min_size=2, max_size=20))
def test_sand_falls_with_the_variance(tau: float, square: float, shares: list[float]) -> None:
    means = [share * math.sqrt(square) for share in sorted(shares, reverse=True)]  # variance = square - mean^2
    masks = [given_moments(9, 10, mean, square, tau) for mean in means]
    assert masks == sorted(masks, reverse=True)
    assert masks[-1] >= math.tanh(0.9 - tau) - 1e-6  # r is at most 1


@given(st.lists(SIZES | SIZES.map(lambda x: -x) | st.just(0.0), min_size=1, max_size=9), st.integers(-30, 30))
def test_sand_does_not_depend_on_the_unit_of_the_deltas(deltas: list[float], k: int) -> None:
    x = torch.tensor(deltas)
    votes = int(x.sign().sum())
    mean, square = float(x.mean()), float(x.square().mean())
    scaled = given_moments(votes, len(deltas), mean * 2.0**k, square * 4.0**k)
    assert scaled == given_moments(votes, len(deltas), mean, square)


@given(st.floats(-1e6, 1e6, width=32), st.floats(0, 2.0**40, width=32), st.integers(-5, 5))
def test_sand_is_a_number_from_0_to_1_whatever_rounding_did_to_the_moments(
    mean: float, square: float, votes: int
) -> None:
    assert 0 <= given_moments(votes, 5, mean, square) <= 1  # NaN would fail too

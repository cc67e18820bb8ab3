"""Masks against the paper's definition, and against the mistakes that public code makes."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedmpi.errors import UserError
from fedmpi.masks import MASKS, make_mask, quorum


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


@pytest.mark.parametrize("name", MASKS)
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


def test_the_votes_are_left_as_they_were() -> None:
    votes = torch.tensor([-3, 0, 5], dtype=torch.int8)
    for name in MASKS:
        make_mask(name, 0.4)(votes, 10)
    assert votes.tolist() == [-3, 0, 5]


def test_an_unknown_mask_is_refused_with_the_nearest_match() -> None:
    with pytest.raises(UserError, match="unknown mask 'gmaa'; did you mean 'gma'\\? known: and, gma, mean"):
        make_mask("gmaa", 0.4)

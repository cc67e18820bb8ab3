"""Server rules against numbers worked out by hand: w = 1, then d = 0.5, then d = -0.25."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fedmpi.errors import UserError
from fedmpi.server import RULES, ServerKnobs, make_server


def two_steps(
    name: str, m: float = 1.0, mask_moments: bool = False, **knobs: Any
) -> tuple[list[float], dict[str, float]]:
    """w after each of two steps from w = 1, and the moments in the end."""
    rule = make_server(name, ServerKnobs(**knobs), mask_moments)
    w = torch.ones(1)
    moments = {k: torch.full((1,), v) for k, v in rule.moments.items()}
    seen = []
    for t, d in ((1, 0.5), (2, -0.25)):
        rule.step(w, torch.tensor([d]), torch.tensor([m]), moments, t)
        seen.append(w.item())
    return seen, {k: v.item() for k, v in moments.items()}


def test_sgd_adds_the_masked_mean() -> None:
    assert two_steps("sgd")[0] == [1.5, 1.25]
    assert two_steps("sgd", m=0.5, lr=2.0)[0] == [1.5, 1.25]
    assert two_steps("sgd", m=0.0)[0] == [1.0, 1.0]


def test_sgd_with_momentum_keeps_the_unmasked_mean() -> None:
    # z: 0.5, then 0.9 * 0.5 - 0.25 = 0.2
    w, moments = two_steps("sgd", momentum=0.9)
    assert w == pytest.approx([1.5, 1.7]) and moments["z"] == pytest.approx(0.2)
    w, moments = two_steps("sgd", m=0.5, momentum=0.9)
    assert w == pytest.approx([1.25, 1.35]) and moments["z"] == pytest.approx(0.2)


def test_adam_of_reddi() -> None:
    # z: 0.05, 0.02;  v: 0.99e-6 + 0.0025 = 0.00250099, then 0.99 * that + 0.01 * 0.0625 = 0.0031009801
    w, moments = two_steps("adam", lr=0.1)
    assert moments == pytest.approx({"z": 0.02, "v": 0.0031009801})
    first = 1 + 0.1 * 0.05 / (0.05000990 + 0.001)
    assert w == pytest.approx([first, first + 0.1 * 0.02 / (0.05568644 + 0.001)], abs=1e-6)


def test_adam_of_torch_equals_torch() -> None:
    w, _ = two_steps("adam", lr=0.1, variant="torch")
    x = torch.ones(1, requires_grad=True)
    optimizer = torch.optim.Adam([x], lr=0.1)
    for mine, d in zip(w, (0.5, -0.25), strict=True):
        x.grad = torch.tensor([-d])
        optimizer.step()
        assert mine == pytest.approx(x.item(), abs=1e-6)


def test_yogi_of_reddi() -> None:
    # v: 1e-6 < 0.25, so v grows by 0.01 * 0.25 to 0.002501; then 0.002501 < 0.0625, so by 0.01 * 0.0625 to 0.003126
    w, moments = two_steps("yogi", lr=0.1)
    assert moments == pytest.approx({"z": 0.02, "v": 0.003126})
    first = 1 + 0.1 * 0.05 / (math.sqrt(0.002501) + 0.001)
    assert w == pytest.approx([first, first + 0.1 * 0.02 / (math.sqrt(0.003126) + 0.001)], abs=1e-6)


def test_yogi_lets_v_shrink_by_at_most_the_square() -> None:
    rule = make_server("yogi", ServerKnobs())
    v, z, w = torch.ones(1), torch.zeros(1), torch.zeros(1)
    rule.step(w, torch.tensor([0.1]), torch.ones(1), {"v": v, "z": z}, 1)
    assert v.item() == pytest.approx(1 - 0.01 * 0.01)


def test_adagrad_of_reddi() -> None:
    # v: 1e-6 + 0.25, then + 0.0625; no first moment
    w, moments = two_steps("adagrad", lr=0.1)
    assert moments == pytest.approx({"v": 0.312501})
    first = 1 + 0.1 * 0.5 / (math.sqrt(0.250001) + 0.001)
    assert w == pytest.approx([first, first - 0.1 * 0.25 / (math.sqrt(0.312501) + 0.001)], abs=1e-6)


@pytest.mark.parametrize("name", RULES)
def test_the_mask_scales_the_step_and_not_the_moments(name: str) -> None:
    full, moments = two_steps(name, lr=0.1, momentum=0.9)
    half, same = two_steps(name, m=0.5, lr=0.1, momentum=0.9)
    assert same == moments
    assert half[0] - 1 == pytest.approx((full[0] - 1) / 2, rel=1e-5)


@pytest.mark.parametrize("name", RULES)
def test_masked_moments_see_the_masked_mean_and_the_step_is_not_masked_again(name: str) -> None:
    _, moments = two_steps(name, m=0.0, mask_moments=True, lr=0.1, momentum=0.9)
    nothing = make_server(name, ServerKnobs(lr=0.1, momentum=0.9)).moments
    decayed = {"v": nothing.get("v", 0) * (0.99**2 if name == "adam" else 1), "z": 0.0}
    assert moments == pytest.approx({k: decayed[k] for k in nothing})
    w, _ = two_steps("sgd", m=0.5, mask_moments=True)
    assert w == [1.25, 1.125]


@pytest.mark.parametrize("name", RULES)
def test_an_element_moves_the_same_wherever_in_a_slice_it_lies(name: str) -> None:
    """No fused multiply-add in a vector's body and two roundings in its tail: a model must not depend on the ranks."""
    generator = torch.Generator().manual_seed(1)
    w, d, m = (torch.randn(1031, generator=generator) for _ in range(3))
    rule = make_server(name, ServerKnobs(lr=0.0713, momentum=0.9))

    def moved(cuts: list[int]) -> torch.Tensor:
        parts = [w.clone().tensor_split(cuts), d.clone().tensor_split(cuts), m.clone().tensor_split(cuts)]
        for wp, dp, mp in zip(*parts, strict=True):
            moments = {k: torch.full_like(wp, v) for k, v in rule.moments.items()}
            for t in (1, 2, 3):
                rule.step(wp, dp.clone(), mp.clone(), moments, t)
        return torch.cat(parts[0])

    whole = moved([])
    for cuts in ([1], [515], [3, 7, 12, 1000], list(range(1, 1031, 5))):
        assert torch.equal(moved(cuts), whole)


def test_unknown_names_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean 'yogi'"):
        make_server("yog", ServerKnobs())
    with pytest.raises(UserError, match="did you mean 'reddi'"):
        make_server("sgd", ServerKnobs(variant="redi"))


@pytest.mark.parametrize("name", RULES)
def test_a_rate_may_depend_on_the_round(name: str) -> None:
    full, moments = two_steps(name, lr=0.5, momentum=0.9)
    halved, same = two_steps(name, lr=lambda t: 0.5 / t, momentum=0.9)  # 0.5 in round 1, 0.25 in round 2
    assert same == moments, "moments do not see the rate"
    assert halved[0] == full[0]
    assert halved[1] - halved[0] == pytest.approx((full[1] - full[0]) / 2, rel=1e-4)


def test_the_rate_of_a_round_by_hand() -> None:
    assert [ServerKnobs(lr=0.3).rate(t) for t in (1, 7)] == [0.3, 0.3]
    assert ServerKnobs(lr=lambda t: 1.0 / t).rate(4) == 0.25
    assert two_steps("sgd", lr=lambda t: float(t))[0] == [1.5, 1.0]  # 1 + 1 * 0.5, then - 2 * 0.25

"""Counts of whole layers: by hand, the same on any number of ranks, and no mask needs more than its slice."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from federation import algorithm, federate, norm_model, plain_model, plan, tasks
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedmpi.flat import Span
from fedmpi.masks import Layer, LayerVotes, Mask, trained_spans

CPU = torch.device("cpu")


def spans(*sizes: int) -> tuple[Span, ...]:
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    places = enumerate(zip(starts, sizes, strict=True))
    return tuple(Span(f"layer{i}", at, torch.Size([n]), False) for i, (at, n) in places)


def test_counts_by_hand() -> None:
    votes = LayerVotes(spans(3, 2), 2, CPU)
    votes.add([(0, torch.tensor([2, -2], dtype=torch.int8)), (2, torch.tensor([0, 1, -1], dtype=torch.int8))])
    assert votes.counts.tolist() == [[1, 0, 2], [0, 2, 0]]
    (first, a), (second, b) = votes.of_tile(1, 3)
    assert (first.name, first.start, first.size, a) == ("layer0", 0, 3, slice(0, 2))
    assert (second.name, second.start, second.size, b) == ("layer1", 3, 2, slice(2, 3))


def test_quantiles_by_hand() -> None:
    layer = Layer("a", 0, 10, torch.tensor([1, 4, 0, 5]))  # 0, 1 1 1 1, 3 3 3 3 3
    assert [layer.quantile(q) for q in (0.0, 0.1, 0.2, 0.5, 0.51, 1.0)] == [0, 0, 1, 1, 3, 3]
    assert Layer("a", 0, 30, torch.tensor([3, 27])).quantile(0.1) == 0, "0.1 * 30 is 3, not a little more"


@given(
    st.lists(st.integers(-5, 5), min_size=1, max_size=60),
    st.floats(0.01, 1.0),
    st.lists(st.integers(0, 60), max_size=4),
)
def test_a_quantile_is_that_of_the_sorted_votes_however_they_are_cut(
    votes: list[int], share: float, cuts: list[int]
) -> None:
    counts = LayerVotes(spans(len(votes)), 5, CPU)
    at = [0, *sorted(min(c, len(votes)) for c in cuts), len(votes)]
    counts.add((low, torch.tensor(votes[low:high], dtype=torch.int8)) for low, high in zip(at, at[1:], strict=False))
    layer = next(layer for layer, _ in counts.of_tile(0, len(votes)))
    found, sizes = layer.quantile(share), sorted(map(abs, votes))
    assert sum(v <= found for v in sizes) >= share * len(sizes) - 1e-3
    assert found == 0 or sum(v <= found - 1 for v in sizes) < share * len(sizes) + 1e-3


def above_median(votes_S: Tensor, clients: int, layer: Layer) -> Tensor:
    return (votes_S.abs() > layer.quantile(0.5)).float()


def by_moments(votes_S: Tensor, clients: int, mean_S: Tensor, square_S: Tensor, layer: Layer) -> Tensor:
    steady = mean_S.square().div_(square_S.clamp_min(1e-30)).clamp_max_(1.0)
    return steady.mul_((votes_S.abs() >= layer.quantile(0.25)).float())


@pytest.mark.parametrize("mask", [Mask(above_median, layers=True), Mask(by_moments, second_moment=True, layers=True)])
@pytest.mark.parametrize("how", ["exact", "float32"])
def test_a_mask_by_layers_gives_the_same_bits_on_any_number_of_ranks(mask: Mask, how: str) -> None:
    algo = replace(algorithm(server="yogi"), mask=mask)
    length = tasks(1, norm_model)[0].layout.length
    alone: Tensor | None = None
    for size in (1, 2, 3, 5):
        states, reports = federate(size, algo, plan(sum=how))
        assert all(torch.equal(s.model_N, states[0].model_N) for s in states)
        model, kept = states[0].model_N[:length], reports[-1].kept
        alone = model.clone() if alone is None else alone
        if how == "exact":
            assert torch.equal(model, alone), size
        assert 0 < kept < 1 or mask.second_moment


def test_the_median_is_that_of_the_whole_layer() -> None:
    """Half of the elements or fewer of every layer are above its median, and the mask keeps just those."""
    seen: dict[str, list[tuple[Tensor, int]]] = {}

    def keep(votes_S: Tensor, clients: int, layer: Layer) -> Tensor:
        seen.setdefault(layer.name, []).append((votes_S.clone(), layer.quantile(0.5)))
        return above_median(votes_S, clients, layer)

    algo = replace(algorithm(), mask=Mask(keep, layers=True))
    federate(3, algo, plan(rounds=1), plain_model)
    layout = tasks(1, plain_model)[0].layout
    assert set(seen) == {span.name for span in trained_spans(layout)}
    for span in trained_spans(layout):
        votes, medians = zip(*seen[span.name], strict=True)
        sizes = torch.cat(votes).abs()
        assert sizes.numel() == span.shape.numel() and len(set(medians)) == 1
        assert medians[0] == int(sizes.sort().values[(sizes.numel() + 1) // 2 - 1])

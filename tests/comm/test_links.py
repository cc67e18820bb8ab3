"""Which rank carries which slice between the nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedmpi.comm.links import Links


@st.composite
def nodes(draw: st.DrawFn) -> list[list[int]]:
    """Ranks in nodes of any size and order; nodes in the order of their first rank, as `share_node` finds them."""
    numbers = draw(st.lists(st.integers(0, 4), min_size=1, max_size=24))
    found: dict[int, list[int]] = {}
    for rank, number in enumerate(numbers):
        found.setdefault(number, []).append(rank)
    return list(found.values())


@given(nodes())
def test_every_slice_of_another_node_is_carried_by_one_rank_of_a_node(found: list[list[int]]) -> None:
    size = sum(map(len, found))
    for ranks in found:
        carried = [s for rank in ranks for s in Links(rank, found).carried]
        assert sorted(carried) == [s for s in range(size) if s not in ranks]


@given(nodes())
def test_sender_and_receiver_agree_who_carries(found: list[list[int]]) -> None:
    every = [Links(rank, found) for ranks in found for rank in ranks]
    pairs = {(one.rank, s) for one in every for s in one.carried}
    assert pairs == {(partner, one.rank) for one in every for partner in one.partners}


@given(nodes())
def test_the_ranks_of_a_node_carry_the_same_number_of_slices(found: list[list[int]]) -> None:
    for ranks in found:
        counts = [len(Links(rank, found).carried) for rank in ranks]
        assert max(counts) - min(counts) <= 1


def test_ranks_that_share_nothing_are_nodes_of_their_own() -> None:
    links = Links.apart(1, 3)
    assert links.nodes == [[0], [1], [2]]
    assert links.mates == [1]
    assert links.carried == [2, 0]
    assert links.partners == [0, 2]
    assert links.node_of == [0, 1, 2]

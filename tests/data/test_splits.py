"""The laws of partitions, for every row of the table, and what is particular to each."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPO, need
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmpi.data.splits import OWNERS, SPLITS, Partition, SplitSpec, _argsort, _dirichlet, _most_even, split
from fedmpi.errors import UserError

TEN = np.arange(6000) % 10
GOLDEN = {
    "iid": "2d1a494c5ac24885",
    "classes": "c7d78343626494bb",
    "dirichlet": "bb18d55b4e742228",
    "quantity": "5c0b7d18356b72c5",
    "natural": "374313afdf525016",
    "feature": "2d1a494c5ac24885",  # that of iid
    "mixed": "c7d78343626494bb",  # that of classes
}


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """A request for any split, possible or not, over few or many, even or uneven labels."""
    labels = draw(st.lists(st.integers(0, draw(st.integers(0, 12))), min_size=1, max_size=150))
    return {
        "name": draw(st.sampled_from(sorted(SPLITS))),
        "y": np.array(labels),
        "clients": draw(st.integers(1, 40)),
        "seed": draw(st.integers(0, 5)),
        "classes_per_client": draw(st.integers(1, 4)),
        "alpha": draw(st.sampled_from([1e-9, 0.05, 1.0, 100.0])),
        "beta": draw(st.sampled_from([1e-9, 0.5, 5.0])),
        "noise": draw(st.sampled_from([0.0, 0.1, 0.5])),
        "owner": np.arange(len(labels)) % draw(st.integers(1, 20)) * draw(st.integers(1, 3)),
        "owners": draw(st.sampled_from(OWNERS)),
        "skewed": True,
        "min_samples": draw(st.integers(1, 3)),
    }


def made(request: dict[str, Any]) -> Partition | None:
    """The partition, or None where the request is refused."""
    try:
        return split(SplitSpec(**request))
    except UserError:
        return None


@settings(deadline=None, max_examples=400)
@given(requests())
def test_every_split_keeps_the_laws(request_: dict[str, Any]) -> None:
    part = made(request_)
    if part is None:
        return
    assert part.clients == request_["clients"]
    assert part.offsets.dtype == part.order.dtype == np.int64
    assert len(np.unique(part.order)) == len(part.order), "a sample is used twice"
    assert part.order.min() >= 0 and part.order.max() < len(request_["y"])
    assert part.sizes.min() >= request_["min_samples"]
    assert part.sizes.sum() == len(part.order)
    name = request_["name"]
    if name in ("iid", "dirichlet", "quantity", "feature") or (name, request_["owners"]) == ("natural", "merge"):
        assert len(part.order) == len(request_["y"]), "all samples are used"
    again = split(SplitSpec(**request_))
    assert np.array_equal(part.order, again.order) and np.array_equal(part.offsets, again.offsets)


@settings(deadline=None, max_examples=200)
@given(requests())
def test_a_request_is_refused_only_where_it_must_be(request_: dict[str, Any]) -> None:
    y, clients, least, name = (request_[key] for key in ("y", "clients", "min_samples", "name"))
    if name in ("iid", "dirichlet", "quantity", "feature"):
        possible = clients * least <= len(y)
    elif name == "natural":
        if request_["owners"] == "merge":
            request_ |= {"min_samples": (least := 1)}
        possible = int((np.bincount(request_["owner"]) >= least).sum()) >= clients
    else:
        request_ |= {"noise": 0.0, "min_samples": 1}
        counts = np.bincount(y)[np.bincount(y) > 0]
        k = request_["classes_per_client"]
        possible = k <= len(counts) and np.minimum(counts, clients).sum() >= clients * k
    assert (made(request_) is not None) == possible


@pytest.mark.parametrize("owners", OWNERS)
@pytest.mark.parametrize("name", sorted(SPLITS))
def test_another_seed_gives_another_partition(name: str, owners: str) -> None:
    owner = np.arange(6000) // 100
    a, b = (split(SplitSpec(name, TEN, 30, seed, owner=owner, owners=owners, skewed=True)) for seed in (0, 1))
    assert not np.array_equal(np.sort(a.of(0)), np.sort(b.of(0)))


def digest(name: str, owners: str = "choose") -> str:
    """The fingerprint of a partition of ten classes and sixty owners."""
    part = split(SplitSpec(name, TEN, 30, 7, noise=0.1, owner=np.arange(6000) // 100, owners=owners, skewed=True))
    return str(part.manifest(TEN, 10)["sha256"][:16])


def test_partitions_stay_as_they_are() -> None:
    digests = {name: digest(name) for name in SPLITS}
    assert digests == GOLDEN, "a changed digest changes published results: say so in the CHANGELOG"
    assert digest("natural", "merge") == "e7ebc2bff6958393"


@pytest.mark.parametrize("name", sorted(SPLITS))
def test_no_split_makes_a_table_of_clients_and_classes(name: str) -> None:
    samples, clients, classes = 200_000, 50_000, 400  # such a table of int64 would be 160 MB
    y = np.arange(samples) % classes
    owner = np.arange(samples) % clients
    tracemalloc.start()
    part = split(SplitSpec(name, y, clients, 0, owner=owner, skewed=True))
    part.manifest(y, classes)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 80e6


@pytest.mark.parametrize(("name", "same"), [("feature", "iid"), ("mixed", "classes")])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_feature_and_mixed_deal_samples_as_iid_and_classes_do(name: str, same: str, noise: float) -> None:
    knobs = {"classes_per_client": 3, "noise": noise}
    a, b = split(SplitSpec(name, TEN, 20, 5, skewed=True, **knobs)), split(SplitSpec(same, TEN, 20, 5, **knobs))
    assert np.array_equal(a.order, b.order) and np.array_equal(a.offsets, b.offsets)


def test_iid_is_even_and_mixed() -> None:
    part = split(SplitSpec("iid", TEN, 7, 0))
    assert part.sizes.max() - part.sizes.min() == 1  # 6000 = 7 * 857 + 1
    assert part.histogram(TEN, 10).min() > 50  # 86 expected


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 60), st.integers(1, 10), st.integers(0, 9))
def test_classes_gives_each_client_exactly_k_and_each_class_its_turn(clients: int, k: int, seed: int) -> None:
    part = split(SplitSpec("classes", TEN, clients, seed, classes_per_client=k))
    held = part.histogram(TEN, 10) > 0
    assert (held.sum(axis=1) == k).all()
    holders = held.sum(axis=0)
    assert holders.max() - holders.min() <= 1
    if clients * k >= 10:
        assert holders.min() >= 1
        assert len(part.order) == len(TEN)
    if clients * k % 10 == 0:
        assert part.sizes.max() - part.sizes.min() <= k


def test_classes_mixes_the_combinations() -> None:
    held = split(SplitSpec("classes", TEN, 900, 0)).histogram(TEN, 10) > 0
    pairs, counts = np.unique(held, axis=0, return_counts=True)
    assert len(pairs) == 45  # all of them
    assert counts.max() < 45  # 20 each expected, deviation 4.4


def test_classes_spares_a_rare_class() -> None:
    y = np.array([0] * 500 + [1] * 500 + [2] * 3)
    held = split(SplitSpec("classes", y, 30, 0)).histogram(y, 3) > 0
    assert (held.sum(axis=1) == 2).all()
    assert 1 <= held[:, 2].sum() <= 3


def test_ninety_and_ten_on_real_labels() -> None:
    """The thesis's label skew: 90% of two classes, 10% of all eight others (its table 4.3)."""
    folder = Path(os.environ.get("FEDMPI_TEST_DATA", REPO.parent / "shared" / "data")) / "mnist" / "MNIST" / "raw"
    file = folder / "train-labels-idx1-ubyte.gz"
    need(
        "data", file.is_file(), f"no MNIST is in {folder}; set FEDMPI_TEST_DATA to the folder that has mnist/MNIST/raw"
    )
    y = np.frombuffer(gzip.decompress(file.read_bytes()), np.uint8, offset=8)
    part = split(SplitSpec("classes", y, 10, 0, noise=0.1))
    shares = part.histogram(y, 10) / part.sizes[:, None]
    mine = shares > 0.1
    assert (mine.sum(axis=0) == 2).all() and (mine.sum(axis=1) == 2).all(), "two classes a client, two clients a class"
    assert np.abs((shares * mine).sum(axis=1) - 0.9).max() < 0.005
    others = shares[~mine]
    assert others.min() > 0.006 and others.max() < 0.02, "0.0125 of each other class expected"
    assert len(part.order) >= 0.999 * len(y)


def test_noise_is_a_share_from_the_other_classes() -> None:
    y = np.arange(60_000) % 10
    clean, noisy = (split(SplitSpec("classes", y, 100, 3, noise=noise)).histogram(y, 10) for noise in (0.0, 0.1))
    other = 1 - np.sort(noisy, axis=1)[:, -2:].sum(axis=1) / noisy.sum(axis=1)
    assert np.abs(other - 0.1).max() < 0.005
    assert noisy.sum() >= 0.999 * len(y)
    assert ((clean > 0) == (noisy > 200)).all(), "the classes held do not depend on the noise"


def entropy_share(alpha: float) -> float:
    """The mean entropy of a client's labels, as a share of the largest possible."""
    y = np.arange(60_000) % 10
    h = split(SplitSpec("dirichlet", y, 100, 0, alpha=alpha)).histogram(y, 10)
    p = h / h.sum(axis=1, keepdims=True)
    return float(-(p * np.log(np.where(p > 0, p, 1))).sum(axis=1).mean() / np.log(10))


def test_dirichlet_is_skewed_for_small_alpha_and_even_for_large() -> None:
    shares = [entropy_share(alpha) for alpha in (0.05, 0.5, 5.0, 100.0)]
    assert shares == sorted(shares)
    assert shares[0] < 0.35
    assert shares[-1] > 0.99


def test_dirichlet_shares_have_the_right_spread() -> None:
    rng = np.random.default_rng(0)
    for alpha, parts in ((0.1, 20), (1.0, 20), (10.0, 5)):
        shares = np.stack([_dirichlet(alpha, parts, rng) for _ in range(4000)])
        assert np.allclose(shares.sum(axis=1), 1)
        variance = (1 / parts) * (1 - 1 / parts) / (parts * alpha + 1)  # of a symmetric Dirichlet
        assert shares.var() == pytest.approx(variance, rel=0.05)


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_dirichlet_deals_every_class_by_shares_of_its_own(alpha: float) -> None:
    y, clients = np.arange(60_000) % 10, 50
    shares = np.stack(
        [split(SplitSpec("dirichlet", y, clients, seed, alpha=alpha)).histogram(y, 10) / 6000 for seed in range(20)]
    )
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)  # of a client's share of a class
    assert shares.var() == pytest.approx(variance, rel=0.1)
    sizes = shares.mean(axis=2)  # of ten independent classes
    assert sizes.var() == pytest.approx(variance / 10, rel=0.2)


def test_dirichlet_repair_takes_from_the_largest_only() -> None:
    y = np.zeros(1000, dtype=np.int64)
    bare = split(SplitSpec("dirichlet", y, 50, 0, alpha=0.05)).sizes  # min_samples = 1
    full = split(SplitSpec("dirichlet", y, 50, 0, alpha=0.05, min_samples=5)).sizes
    assert full.min() == 5 and full.sum() == 1000
    lowered = full < bare
    assert lowered.any()
    assert bare[lowered].min() >= full[~lowered].max() - 1, "only clients above the common level gave"


def test_quantity_has_uneven_sizes_and_even_labels() -> None:
    y = np.arange(60_000) % 10
    part = split(SplitSpec("quantity", y, 100, 0, beta=0.5))
    assert part.sizes.max() > 5 * np.median(part.sizes)
    assert part.sizes.std() / part.sizes.mean() == pytest.approx(1.4, abs=0.4)  # sqrt(1 / beta) = 1.41
    big = part.histogram(y, 10)[np.argmax(part.sizes)]
    assert big.max() < 1.3 * big.min()


def test_natural_is_one_owner_each() -> None:
    owner = np.random.default_rng(0).integers(0, 40, 6000)
    whole = split(SplitSpec("natural", TEN, 40, 0, owner=owner))
    assert all((owner[whole.of(cid)] == cid).all() for cid in range(40))
    assert len(whole.order) == 6000
    some = split(SplitSpec("natural", TEN, 7, 0, owner=owner))
    owners = [np.unique(owner[some.of(cid)]) for cid in range(7)]
    assert all(len(o) == 1 for o in owners)
    assert (some.sizes == np.bincount(owner)[np.concatenate(owners)]).all()


@settings(max_examples=100)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=200), st.integers(1, 31), st.integers(0, 5))
def test_merge_deals_whole_owners_evenly(owner: list[int], clients: int, seed: int) -> None:
    who = np.array(owner) * 7  # numbers may have gaps
    owners = np.unique(who)
    request_ = {"name": "natural", "y": np.zeros(len(who), int), "clients": clients, "seed": seed, "owner": who}
    part = made(request_ | {"owners": "merge"})
    if clients > len(owners):
        assert part is None
        return
    assert part is not None and sorted(part.order) == list(range(len(who))), "all samples are used"
    held = [np.unique(who[part.of(cid)]) for cid in range(clients)]
    assert sorted(np.concatenate(held)) == owners.tolist(), "no owner is with two clients"
    counts = [len(h) for h in held]
    assert max(counts) - min(counts) <= 1


def test_merge_mixes_the_owners() -> None:
    owner = np.arange(6000) // 10
    part = split(SplitSpec("natural", TEN, 60, 0, owner=owner, owners="merge"))
    held = np.stack([np.unique(owner[part.of(cid)]) for cid in range(60)])
    assert held.shape == (60, 10)
    gaps = np.diff(held, axis=1)
    assert (gaps == 1).mean() < 0.05 and (gaps == 60).mean() < 0.05, "neither neighbours nor every sixtieth"
    assert np.abs(held.mean(axis=1) - 299.5).max() < 5 * 600 / np.sqrt(12 * 10), "spread over all"


def test_merge_takes_small_owners_and_choose_leaves_them() -> None:
    owner = np.array([0, 1, 1, 1, 2, 3, 3, 3])
    y = np.zeros(8, int)
    merged = split(SplitSpec("natural", y, 2, 0, owner=owner, owners="merge", min_samples=2))
    assert len(merged.order) == 8
    chosen = split(SplitSpec("natural", y, 2, 0, owner=owner, min_samples=2))
    assert sorted(owner[chosen.order]) == [1, 1, 1, 3, 3, 3]
    with pytest.raises(UserError, match="2 owners with at least 2 samples"):
        split(SplitSpec("natural", y, 3, 0, owner=owner, min_samples=2))
    with pytest.raises(UserError, match="4 owners with at least 1 samples"):
        split(SplitSpec("natural", y, 5, 0, owner=owner, owners="merge"))
    with pytest.raises(UserError, match="fewer than min_samples = 2"):
        split(SplitSpec("natural", y, 4, 0, owner=owner, owners="merge", min_samples=2))


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        ({"name": "idi"}, "unknown split 'idi'; did you mean 'iid'"),
        ({"clients": 6001}, "only 6000 samples"),
        ({"clients": 3001, "min_samples": 2}, "only 6000 samples"),
        ({"name": "classes", "classes_per_client": 11}, "use 1 to 10"),
        ({"name": "classes", "classes_per_client": 0}, "use 1 to 10"),
        ({"name": "classes", "clients": 6000}, "fewer clients or fewer classes per client"),
        ({"name": "classes", "noise": 0.1, "classes_per_client": 10}, "which are all"),
        ({"name": "classes", "clients": 7, "min_samples": 857}, "fewer than min_samples = 857"),
        ({"name": "natural"}, "knows who wrote"),
        ({"name": "natural", "owner": np.arange(6000) % 4}, "4 owners"),
        ({"name": "feature"}, "split 'feature' needs .*use cmnist2, fedcmnist or fedrotmnist"),
        ({"name": "mixed"}, "split 'mixed' needs .*use cmnist2, fedcmnist or fedrotmnist"),
        ({"name": "mixed", "skewed": True, "classes_per_client": 11}, "split 'mixed' got 11 .*use 1 to 10"),
    ],
)
def test_impossible_requests_are_refused(request_: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        split(SplitSpec(**({"name": "iid", "y": TEN, "clients": 10, "seed": 0} | request_)))


@given(st.lists(st.integers(0, 30), min_size=1, max_size=20), st.data())
def test_most_even_fills_to_a_level(caps: list[int], data: st.DataObject) -> None:
    total = data.draw(st.integers(0, sum(caps)))
    parts = _most_even(np.array(caps), total)
    assert parts.sum() == total
    assert (parts <= caps).all() and (parts >= 0).all()
    below_cap = parts < caps
    if below_cap.any():
        assert parts.max() <= parts[below_cap].min() + 1, "nobody is far above one who could take more"


@given(st.lists(st.integers(0, 10**9) | st.integers(0, 3), max_size=50))
def test_the_quick_order_is_the_stable_one(values: list[int]) -> None:
    given_ = np.array(values, dtype=np.int64)
    assert _argsort(given_).tolist() == np.argsort(given_, kind="stable").tolist()
    assert given_.tolist() == values, "nothing is written to"


def test_a_manifest_of_many_clients_is_a_summary() -> None:
    y = np.random.default_rng(0).integers(0, 7, 40_000)
    few, many = (split(SplitSpec("quantity", y, clients, 0)).manifest(y, 7, seed=0) for clients in (10_000, 10_001))
    assert len(few["histogram"]) == 10_000 and "sizes" not in few
    assert set(many) == set(few) - {"histogram"} | {"sizes", "classes_per_client"}
    part = split(SplitSpec("quantity", y, 10_001, 0))
    dense = part.histogram(y, 7)
    shown = dense.sum(axis=1)
    assert many["sizes"] == {
        "min": shown.min(),
        "quartiles": np.quantile(shown, [0.25, 0.5, 0.75]).tolist(),
        "max": shown.max(),
    }
    assert many["classes_per_client"] == pytest.approx((dense > 0).sum(axis=1).mean())
    assert len(json.dumps(many)) < 500
    by_hand = Partition(np.array([0, 2, 3, 3]), np.array([4, 0, 2]), shared=np.array([1]))
    assert by_hand.summary([1, 0, 1, 0, 0], 2) == {
        "sizes": {"min": 0, "quartiles": [0.5, 1, 1.5], "max": 2},
        "classes_per_client": 1.0,
    }


def test_a_partition_by_hand() -> None:
    part = Partition(np.array([0, 2, 3]), np.array([4, 0, 2]))
    assert (part.clients, part.sizes.tolist(), part.of(0).tolist(), part.of(1).tolist()) == (2, [2, 1], [4, 0], [2])
    assert np.shares_memory(part.of(1), part.order)
    account = part.manifest(torch.tensor([1, 0, 1, 0, 0]), 2, name="by hand", seed=3)
    content = b"".join(v.to_bytes(8, "little") for v in (0, 2, 3, 4, 0, 2))
    assert json.loads(json.dumps(account)) == {
        "name": "by hand",
        "seed": 3,
        "clients": 2,
        "samples": 3,
        "sha256": hashlib.sha256(content).hexdigest(),
        "histogram": [[1, 1], [0, 1]],
    }
    with pytest.raises(UserError, match="clients are 0 to 1"):
        part.of(2)
    with pytest.raises(UserError, match="must rise"):
        Partition(np.array([0, 2]), np.array([1]))


def test_labels_with_gaps_and_tensors_are_welcome() -> None:
    y = torch.tensor([3, 3, 9, 9, 3, 9])
    held = split(SplitSpec("classes", y, 2, 0, classes_per_client=1)).histogram(y, 10) > 0
    assert held.sum() == 2 and held[:, [3, 9]].sum() == 2


def test_shared_samples_are_everybodys_and_counted_but_are_no_part_of_the_split() -> None:
    own = Partition(np.array([0, 2, 3]), np.array([4, 0, 2]))
    part = Partition(own.offsets, own.order, shared=np.array([1, 3]))
    assert (part.clients, part.sizes.tolist()) == (2, [4, 3])
    assert (part.of(0).tolist(), part.of(1).tolist()) == ([4, 0, 1, 3], [2, 1, 3])
    y = np.array([1, 0, 1, 0, 0])
    assert part.histogram(y, 2).tolist() == own.histogram(y, 2).tolist() == [[1, 1], [0, 1]]
    assert part.manifest(y, 2)["sha256"] == own.manifest(y, 2)["sha256"]
    assert own.shared.tolist() == []

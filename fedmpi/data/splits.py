"""Splits: the assignment of train samples to clients.

A partition is a permutation of sample indices and the offsets at which clients begin (compressed rows, not a list of
lists), so that a million clients take megabytes. A split is a row of `SPLITS`: a function from a `SplitSpec` to a
`Partition`. For all of them: every sample is used at most once, every client has at least `min_samples`, and the same
seed gives the same partition; a request that cannot be met is an error.

iid        shuffled, sizes equal up to one.
classes    k classes per client. A class is held by about clients * k / classes clients (fewer where it has too few
           samples) and its samples are dealt equally among them, so for noise = 0 every client has exactly k classes.
           If clients * k < classes, some classes are not used. noise: that share of every client comes from classes it
           does not hold (the thesis's 90/10).
dirichlet  for every class, shares of its samples over the clients ~ Dirichlet(alpha) (Hsu et al. 2019, Li et al.
           2022); all samples are used. A client short of min_samples is then filled up with random samples of the
           largest clients.
quantity   sizes ~ Dirichlet(beta) on top of min_samples for each (Li et al. 2022), labels iid; all samples are used.
natural    by owner (writer, role). owners = choose: one client per owner, in owner order; with fewer clients than
           owners, a random choice of owners. owners = merge: owners are dealt at random to the clients, equally many up
           to one; an owner's samples stay together and all are used.
feature    iid, on data whose images look different per client or per class (feature skew).
mixed      classes, on such data: label skew in addition.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.errors import UserError, unknown
from fedmpi.seeds import data_generator

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LISTED_CLIENTS = 10_000  # maximum number of clients for which a manifest has histograms
OWNERS = ("choose", "merge")


@dataclass(frozen=True)
class Partition:
    """The samples of each client: client c has order[offsets[c] : offsets[c + 1]], and the shared samples."""

    offsets: Ints  # [clients + 1]
    order: Ints  # [used samples]: indices into the train set, client by client
    shared: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # every client has a copy of these

    def __post_init__(self) -> None:
        ends_meet = len(self.offsets) >= 2 and self.offsets[0] == 0 and self.offsets[-1] == len(self.order)
        if not ends_meet or bool((self.offsets[1:] < self.offsets[:-1]).any()):
            given = f"{len(self.offsets)} offsets for {len(self.order)} samples"
            raise UserError(f"a partition got {given}; offsets must rise from 0 to the number of samples")

    @property
    def clients(self) -> int:
        """Return the number of clients."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Ints:
        """Return the number of samples per client, shared ones included (read-only)."""
        sizes = np.diff(self.offsets) + len(self.shared)  # cached: used every round, and 3 ms for a million clients
        sizes.flags.writeable = False
        return sizes

    def of(self, cid: int) -> Ints:
        """Return the samples of client cid, its own first (read-only)."""
        if not 0 <= cid < self.clients:
            raise UserError(f"client {cid} does not exist; clients are 0 to {self.clients - 1}")
        own = self.order[self.offsets[cid] : self.offsets[cid + 1]]
        return np.concatenate([own, self.shared]) if len(self.shared) else own

    def histogram(self, y: npt.ArrayLike, classes: int) -> Ints:
        """Return the number of a client's own samples per class, [clients, classes]."""
        counts = np.bincount(self._cells(y, classes), minlength=self.clients * classes)
        return counts.reshape(self.clients, classes)

    def _cells(self, y: npt.ArrayLike, classes: int) -> Ints:
        """Return client * classes + class of each used sample."""
        client = np.repeat(np.arange(self.clients), np.diff(self.offsets))
        cells: Ints = client * classes + np.asarray(y)[self.order]
        return cells

    def manifest(self, y: npt.ArrayLike, classes: int, **about: Any) -> dict[str, Any]:
        """Return a record for JSON: `about`, counts, a SHA-256, and class counts per client, summarised for many."""
        sha = hashlib.sha256()
        for part in (self.offsets, self.order):
            sha.update(np.ascontiguousarray(part, dtype="<i8").data)
        few = self.clients <= LISTED_CLIENTS
        held = {"histogram": self.histogram(y, classes).tolist()} if few else self.summary(y, classes)
        return {**about, "clients": self.clients, "samples": len(self.order), "sha256": sha.hexdigest(), **held}

    def summary(self, y: npt.ArrayLike, classes: int) -> dict[str, Any]:
        """Return the quartiles of the clients' own samples, and the mean number of classes per client."""
        own = np.diff(self.offsets)
        quartiles = np.quantile(own, (0.25, 0.5, 0.75)).tolist()
        sizes = {"min": int(own.min()), "quartiles": quartiles, "max": int(own.max())}
        return {"sizes": sizes, "classes_per_client": len(np.unique(self._cells(y, classes))) / self.clients}


@dataclass(frozen=True)
class SplitSpec:
    """The arguments of a split, within the bounds of their options."""

    name: str
    y: Ints  # labels, from 0; a split gets them numbered 0 .. classes - 1 without gaps
    clients: int
    seed: int
    classes_per_client: int = 2
    alpha: float = 0.1
    beta: float = 0.5
    noise: float = 0.0
    owner: Ints | None = None
    owners: str = "choose"
    skewed: bool = False  # whether images look different per client or per class
    min_samples: int = 1

    @cached_property
    def rng(self) -> np.random.Generator:
        """Return the one generator of the split."""
        return data_generator(self.seed, "split")

    @cached_property
    def classes(self) -> int:
        """Return the number of classes."""
        return int(self.y.max()) + 1


def iid(spec: SplitSpec) -> Partition:
    """Shuffle the samples, and cut them into sizes equal up to one."""
    least, more = divmod(len(spec.y), spec.clients)
    return Partition(_offsets(least + (np.arange(spec.clients) < more)), spec.rng.permutation(len(spec.y)))


def quantity(spec: SplitSpec) -> Partition:
    """Draw sizes from a Dirichlet on top of the minimum size; labels are iid."""
    spare = len(spec.y) - spec.clients * spec.min_samples
    sizes = spec.min_samples + _deal(spare, _dirichlet(spec.beta, spec.clients, spec.rng))
    return Partition(_offsets(sizes), spec.rng.permutation(len(spec.y)))


def dirichlet(spec: SplitSpec) -> Partition:
    """Deal each class to the clients by its own Dirichlet; fill up the smallest clients from the largest."""
    client = np.empty(len(spec.y), dtype=np.int64)
    for samples in _by_class(spec):
        shares = _dirichlet(spec.alpha, spec.clients, spec.rng)
        client[samples] = np.repeat(np.arange(spec.clients), _deal(len(samples), shares))
    partition = _gather(client, spec.clients, spec.rng)
    sizes = partition.sizes
    lack = np.maximum(spec.min_samples - sizes, 0)
    if not lack.any():
        return partition
    keep = _most_even(sizes, int(sizes.sum() - lack.sum()))
    place = np.arange(len(partition.order)) - np.repeat(partition.offsets[:-1], sizes)  # in the client's random order
    moved = partition.order[place >= np.repeat(keep, sizes)]
    client[spec.rng.permutation(moved)] = np.repeat(np.arange(spec.clients), lack)
    return _gather(client, spec.clients, spec.rng)


def classes(spec: SplitSpec) -> Partition:
    """Give each client k classes; deal a class equally among the clients that hold it, and add noise from others."""
    k, count, got = spec.classes_per_client, np.bincount(spec.y), f"split '{spec.name}' got"
    if not 1 <= k <= spec.classes:
        valid = f"the data have {spec.classes}: use 1 to {spec.classes}"
        raise UserError(f"{got} {k} classes per client (--skew.classes); {valid}")
    if spec.noise > 0 and k == spec.classes:
        raise UserError(f"{got} noise = {spec.noise} and {k} classes per client, which are all; use noise = 0")
    spared = np.floor(spec.noise * count).astype(np.int64)
    most = np.minimum(count - spared, spec.clients)  # maximum number of clients that can hold a class
    if most.sum() < spec.clients * k:
        raise UserError(
            f"split '{spec.name}' cannot give {spec.clients} clients {k} classes each with a sample of every one from "
            f"{len(spec.y)} samples; use fewer clients or fewer classes per client (--skew.classes)"
        )
    order = spec.rng.permutation(spec.classes)  # random, too, which classes are held once more than others
    holders = np.empty(spec.classes, dtype=np.int64)
    holders[order] = _most_even(most[order], spec.clients * k)
    held = _hold(holders, spec)
    client, pool = _deal_classes(held, holders, spared, spec)
    _add_noise(client, held, pool, spec)
    return _gather(client, spec.clients, spec.rng)


def natural(spec: SplitSpec) -> Partition:
    """Make one client per owner, or per owner of a random choice, or deal all owners to the clients."""
    if spec.owner is None:
        needs = "a data set that knows who wrote each sample, such as glyphs"
        raise UserError(f"split 'natural' needs {needs}; use another split")
    merge = spec.owners == "merge"
    least = 1 if merge else spec.min_samples  # a small owner is merged with others
    sizes = np.bincount(spec.owner)
    able = np.flatnonzero(sizes >= least)
    if spec.clients > len(able):
        there = f"{len(able)} owners with at least {least} samples"
        raise UserError(f"split 'natural' got {spec.clients} clients, but the data have {there}; use at most that many")
    number = np.full(len(sizes), -1)
    if merge:
        number[spec.rng.permutation(able)] = np.arange(len(able)) % spec.clients
    else:
        number[np.sort(spec.rng.choice(able, spec.clients, replace=False))] = np.arange(spec.clients)
    return _gather(number[spec.owner], spec.clients, spec.rng)


SPLITS: dict[str, Callable[[SplitSpec], Partition]] = {
    "iid": iid,
    "classes": classes,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "natural": natural,
    "feature": iid,
    "mixed": classes,
}
SKEWED = ("feature", "mixed")  # splits for data with feature skew


def split(spec: SplitSpec) -> Partition:
    """Split samples by the split of that name."""
    if spec.name not in SPLITS:
        raise unknown("split", spec.name, SPLITS)
    clients, least, got = spec.clients, spec.min_samples, f"split '{spec.name}' got"
    y = np.asarray(spec.y).astype(np.int64, copy=False)
    if clients * least > len(y):
        needed = f"each of which needs {least} or more, but there are only {len(y)} samples"
        raise UserError(f"{got} {clients} clients, {needed}; use fewer clients")
    if spec.name in SKEWED and not spec.skewed:
        raise UserError(
            f"split '{spec.name}' needs data whose images look different from client to client or class to class; "
            "use cmnist2, fedcmnist or fedrotmnist, or another split"
        )
    owner = None if spec.owner is None else np.asarray(spec.owner).astype(np.int64, copy=False)
    present = np.bincount(y) > 0
    numbered = y if present.all() else (np.cumsum(present) - 1)[y]
    partition = SPLITS[spec.name](replace(spec, y=numbered, owner=owner))
    if (fewest := int(np.diff(partition.offsets).min())) < least:
        left = f"a client with {fewest} samples, fewer than min_samples = {least}"
        raise UserError(f"split '{spec.name}' would leave {left}; use fewer clients")
    return partition


def _offsets(sizes: Ints) -> Ints:
    """Return where each client begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _most_even(caps: Ints, total: int) -> Ints:
    """Return integers that add up to total <= sum(caps): each is its cap, or a common level (or + 1) if lower."""
    low, high = 0, int(caps.max())
    while low < high:  # find the highest level that does not exceed the total
        level = (low + high + 1) // 2
        low, high = (level, high) if int(np.minimum(caps, level).sum()) <= total else (low, level - 1)
    parts = np.minimum(caps, low)
    above = np.flatnonzero(caps > low)[: total - int(parts.sum())]
    parts[above] += 1
    return parts


def _dirichlet(concentration: float, parts: int, rng: np.random.Generator) -> Floats:
    """Draw from a symmetric Dirichlet, by logarithms of gamma variates, because small concentrations underflow."""
    log = np.log(rng.standard_gamma(concentration + 1, parts))
    log -= rng.standard_exponential(parts) / concentration  # gamma(a) = gamma(a + 1) * uniform^(1 / a)
    log -= log.max()
    shares: Floats = np.exp(log)
    shares /= shares.sum()
    return shares


def _deal(total: int, shares: Floats) -> Ints:
    """Divide the total into integer parts near the shares; cut at the rounded running sums, so that they add up."""
    cuts = np.rint(np.cumsum(shares) * total).astype(np.int64)
    cuts[-1] = total
    return np.diff(np.minimum(cuts, total), prepend=0)


def _by_class(spec: SplitSpec) -> list[Ints]:
    """Return the samples of each class in random order."""
    shuffled = spec.rng.permutation(len(spec.y))
    ordered = shuffled[_argsort(spec.y[shuffled])]
    return np.split(ordered, np.cumsum(np.bincount(spec.y))[:-1])


def _gather(client: Ints, clients: int, rng: np.random.Generator) -> Partition:
    """Return the partition for the client of each sample (-1: not used), a client's samples in random order."""
    order = rng.permutation(len(client))
    who = client[order]
    used = who >= 0
    if not used.all():
        order, who = order[used], who[used]
    offsets = _offsets(np.bincount(who, minlength=clients))
    return Partition(offsets, order[_argsort(who)])


def _argsort(values: Ints) -> Ints:
    """Return the stable argsort of classes or clients; packed into one integer with the index, because numpy's sort is
    several times as fast as its argsort."""
    n = max(1, len(values))
    packed = values * n
    packed += np.arange(len(values))
    packed.sort()
    packed %= n
    return packed


def _hold(holders: Ints, spec: SplitSpec) -> Ints:
    """Return k different classes per client, [clients, k], with class c held by holders[c] clients.

    Dealing each class to consecutive clients, round robin, satisfies this, as no class has more holders than there are
    clients. Random swaps between pairs of clients keep it satisfied and mix the combinations.
    """
    k, n = spec.classes_per_client, spec.clients
    small = np.min_scalar_type(spec.classes)  # a table that fits the cache is several times as fast
    table = np.repeat(np.arange(spec.classes, dtype=small), holders).reshape(k, n)
    cells = table.reshape(-1)
    for _ in range(8 * k + 16 if n > 1 else 0):
        pair = spec.rng.permutation(n)
        a, b = pair[: n // 2], pair[n // 2 : 2 * (n // 2)]
        i, j = spec.rng.integers(k, size=(2, n // 2)) * n
        i, j = i + a, j + b
        mine, theirs = cells[i], cells[j]
        clash = np.zeros(n // 2, dtype=bool)
        for row in table:
            clash |= row[a] == theirs
            clash |= row[b] == mine
        cells[i], cells[j] = np.where(clash, mine, theirs), np.where(clash, theirs, mine)
    mixed: Ints = table[:, spec.rng.permutation(n)].T.astype(np.int64, order="C")
    return mixed


def _deal_classes(held: Ints, holders: Ints, spared: Ints, spec: SplitSpec) -> tuple[Ints, Ints]:
    """Deal classes round robin to their holders; return the client of each sample (-1: none), and the noise samples."""
    places = spec.rng.permutation(held.size)  # so that not always the first clients get one more
    places = places[_argsort(held.ravel()[places])]
    of_class = np.split(places // held.shape[1], np.cumsum(holders)[:-1])
    client, pool = np.full(len(spec.y), -1), []
    for samples, spare, who in zip(_by_class(spec), spared, of_class, strict=True):
        pool.append(samples[:spare])
        if len(who):
            dealt = samples[spare:]
            client[dealt] = np.resize(who, len(dealt))  # round robin
    return client, np.concatenate(pool)


def _add_noise(client: Ints, held: Ints, pool: Ints, spec: SplitSpec) -> None:
    """Deal, in place, samples of the pool to clients that do not hold their class, to each about its share of noise.

    Samples and clients are paired at random and valid pairs are kept, repeatedly; the few that never fit stay unused.
    """
    own = np.bincount(client[client >= 0], minlength=spec.clients)
    ends = np.rint(np.cumsum(own * (spec.noise / (1 - spec.noise)))).astype(np.int64)
    wanted: Ints = np.diff(ends, prepend=0)
    takers = spec.rng.permutation(np.repeat(np.arange(spec.clients), wanted))
    for _ in range(200):
        n = min(len(pool), len(takers))
        if n == 0:
            break
        pool = spec.rng.permutation(pool)
        fits = ~(held[takers[:n]] == spec.y[pool[:n], None]).any(axis=1)
        client[pool[:n][fits]] = takers[:n][fits]
        pool, takers = (np.concatenate([all_[:n][~fits], all_[n:]]) for all_ in (pool, takers))

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
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmpi.errors import UserError, unknown
from fedmpi.seeds import data_generator

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

LISTED_CLIENTS = 10_000  # maximum number of clients for which a manifest has histograms
CELLS = 2**20  # histogram cells in memory at a time
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
            raise UserError(
                f"a partition got {len(self.offsets)} offsets for {len(self.order)} samples; "
                "offsets must rise from 0 to the number of samples"
            )

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
        client = np.repeat(np.arange(self.clients), np.diff(self.offsets))
        cell = client * classes + np.asarray(y)[self.order]
        return np.bincount(cell, minlength=self.clients * classes).reshape(self.clients, classes)

    def manifest(self, y: npt.ArrayLike, classes: int, **about: Any) -> dict[str, Any]:
        """Return a record for JSON: `about` (name, parameters, seed), counts, a SHA-256, and class counts per client (a
        summary if there are many clients)."""
        sha = hashlib.sha256()
        for part in (self.offsets, self.order):
            sha.update(np.ascontiguousarray(part, dtype="<i8").data)
        few = self.clients <= LISTED_CLIENTS
        held = {"histogram": self.histogram(y, classes).tolist()} if few else self.summary(y, classes)
        return {**about, "clients": self.clients, "samples": len(self.order), "sha256": sha.hexdigest(), **held}

    def summary(self, y: npt.ArrayLike, classes: int) -> dict[str, Any]:
        """Return a summary of the histogram: minimum, quartiles and maximum of the clients' own samples, and the mean
        number of classes per client."""
        labels, kinds = np.asarray(y), 0
        block = max(1, CELLS // classes)
        for first in range(0, self.clients, block):
            ends = self.offsets[first : first + block + 1]
            some = Partition(ends - ends[0], self.order[ends[0] : ends[-1]])
            kinds += int((some.histogram(labels, classes) > 0).sum())
        own = np.diff(self.offsets)
        quartiles = np.quantile(own, (0.25, 0.5, 0.75)).tolist()
        sizes = {"min": int(own.min()), "quartiles": quartiles, "max": int(own.max())}
        return {"sizes": sizes, "classes_per_client": kinds / self.clients}


@dataclass(frozen=True)
class SplitSpec:
    """The arguments of a split."""

    name: str
    y: Ints  # labels, numbered 0 .. classes - 1 without gaps
    classes: int
    clients: int
    rng: np.random.Generator
    classes_per_client: int
    alpha: float
    beta: float
    noise: float
    owner: Ints | None
    owners: str
    skewed: bool  # whether images look different per client or per class
    min_samples: int


def iid(spec: SplitSpec) -> Partition:
    """Shuffle the samples, and cut them into sizes equal up to one."""
    return Partition(_offsets(_even(len(spec.y), spec.clients)), spec.rng.permutation(len(spec.y)))


def quantity(spec: SplitSpec) -> Partition:
    """Draw sizes from a Dirichlet on top of the minimum size; labels are iid."""
    if not (spec.beta > 0 and math.isfinite(spec.beta)):
        raise UserError(f"split 'quantity' got beta = {spec.beta}; it must be a positive number, and 0.5 is usual")
    spare = len(spec.y) - spec.clients * spec.min_samples
    sizes = spec.min_samples + _deal(spare, _dirichlet(spec.beta, spec.clients, spec.rng))
    return Partition(_offsets(sizes), spec.rng.permutation(len(spec.y)))


def dirichlet(spec: SplitSpec) -> Partition:
    """Deal each class to the clients by its own Dirichlet; fill up the smallest clients from the largest."""
    if not (spec.alpha > 0 and math.isfinite(spec.alpha)):
        raise UserError(
            f"split 'dirichlet' got alpha = {spec.alpha}; it must be a positive number: 0.1 is skewed, 100 nearly iid"
        )
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
    # a client's samples are in random order, so its last ones are a random choice
    moved = partition.order[_ranges(partition.offsets[:-1] + keep, sizes - keep)]
    client[spec.rng.permutation(moved)] = np.repeat(np.arange(spec.clients), lack)
    return _gather(client, spec.clients, spec.rng)


def classes(spec: SplitSpec) -> Partition:
    """Give each client k classes; deal a class equally among the clients that hold it, and add noise from others."""
    k, count = spec.classes_per_client, np.bincount(spec.y, minlength=spec.classes)
    if not 1 <= k <= spec.classes:
        raise UserError(
            f"split '{spec.name}' got {k} classes per client (--skew.classes); the data have {spec.classes}: use 1 to "
            f"{spec.classes}"
        )
    if not 0 <= spec.noise < 1:
        raise UserError(f"split '{spec.name}' got noise = {spec.noise}; it is a share from 0 up to, not including, 1")
    if spec.noise > 0 and k == spec.classes:
        raise UserError(
            f"split '{spec.name}' got noise = {spec.noise} and {k} classes per client, which are all; use noise = 0"
        )
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
        raise UserError(
            "split 'natural' needs a data set that knows who wrote each sample, such as glyphs; use another split"
        )
    if spec.owners not in OWNERS:
        raise unknown("way with owners (--skew.owners)", spec.owners, OWNERS)
    merge = spec.owners == "merge"
    least = 1 if merge else spec.min_samples  # a small owner is merged with others
    sizes = np.bincount(spec.owner)
    able = np.flatnonzero(sizes >= least)
    if spec.clients > len(able):
        raise UserError(
            f"split 'natural' got {spec.clients} clients, but the data have {len(able)} owners with at least "
            f"{least} samples; use at most that many clients"
        )
    number = np.full(len(sizes), -1)
    if merge:
        number[spec.rng.permutation(able)] = np.arange(len(able)) % spec.clients
    else:
        number[np.sort(spec.rng.choice(able, spec.clients, replace=False))] = np.arange(spec.clients)
    return _gather(number[spec.owner], spec.clients, spec.rng)


def feature(spec: SplitSpec) -> Partition:
    """Split iid, on data with feature skew."""
    _need_looks(spec)
    return iid(spec)


def mixed(spec: SplitSpec) -> Partition:
    """Split by classes, on data with feature skew."""
    _need_looks(spec)
    return classes(spec)


SPLITS: dict[str, Callable[[SplitSpec], Partition]] = {
    "iid": iid,
    "classes": classes,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "natural": natural,
    "feature": feature,
    "mixed": mixed,
}


def split(
    name: str,
    y: npt.ArrayLike,
    clients: int,
    seed: int,
    *,
    classes_per_client: int = 2,
    alpha: float = 0.1,
    beta: float = 0.5,
    noise: float = 0.0,
    owner: npt.ArrayLike | None = None,
    owners: str = "choose",
    skewed: bool = False,
    min_samples: int = 1,
) -> Partition:
    """Split samples with labels y by the split of that name; `skewed` says that the data have feature skew."""
    if name not in SPLITS:
        raise unknown("split", name, SPLITS)
    labels = _labels(y)
    if clients < 1 or min_samples < 1:
        raise UserError(
            f"split '{name}' got {clients} clients and min_samples = {min_samples}; both must be at least 1"
        )
    if seed < 0:
        raise UserError(f"split '{name}' got seed = {seed}; it must not be negative")
    if clients * min_samples > len(labels):
        raise UserError(
            f"split '{name}' got {clients} clients, each of which needs {min_samples} or more, but there are only "
            f"{len(labels)} samples; use fewer clients"
        )
    present = np.bincount(labels) > 0
    spec = SplitSpec(
        name=name,
        y=labels if present.all() else (np.cumsum(present) - 1)[labels],
        classes=int(present.sum()),
        clients=clients,
        rng=data_generator(seed, "split"),
        classes_per_client=classes_per_client,
        alpha=alpha,
        beta=beta,
        noise=noise,
        owner=None if owner is None else np.asarray(owner).astype(np.int64, copy=False),
        owners=owners,
        skewed=skewed,
        min_samples=min_samples,
    )
    if spec.owner is not None and (spec.owner.shape != labels.shape or int(spec.owner.min()) < 0):
        raise UserError(
            f"split '{name}' got owners {list(spec.owner.shape)} for {len(labels)} labels; give one number per sample"
        )
    partition = SPLITS[name](spec)
    if (least := int(np.diff(partition.offsets).min())) < min_samples:
        raise UserError(
            f"split '{name}' would leave a client with {least} samples, fewer than min_samples = {min_samples}; "
            "use fewer clients"
        )
    return partition


def _labels(y: npt.ArrayLike) -> Ints:
    """Return the labels as int64, after checking that they are integers >= 0."""
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0 or int(labels.min()) < 0:
        raise UserError(
            f"labels are {labels.dtype} {list(labels.shape)}; a split needs a list of whole numbers >= 0, at least one"
        )
    return labels.astype(np.int64, copy=False)


def _need_looks(spec: SplitSpec) -> None:
    """Raise a UserError for data without feature skew."""
    if not spec.skewed:
        raise UserError(
            f"split '{spec.name}' needs data whose images look different from client to client or class to class; "
            "use cmnist2, fedcmnist or fedrotmnist, or another split"
        )


def _offsets(sizes: Ints) -> Ints:
    """Return where each client begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _even(total: int, parts: int) -> Ints:
    """Divide the total into integer parts that are equal up to one."""
    return total // parts + (np.arange(parts) < total % parts)


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
    """Return the stable argsort of values >= 0.

    Value and index are packed into one integer, because numpy's sort is several times as fast as its argsort.
    """
    n = len(values)
    if n == 0 or int(values.max()) >= 2**62 // n:
        return np.argsort(values, kind="stable")
    packed = values * n
    packed += np.arange(n)
    packed.sort()
    packed %= n
    return packed


def _ranges(starts: Ints, lengths: Ints) -> Ints:
    """Return the concatenated ranges starts[i] .. starts[i] + lengths[i] - 1."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


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
    wanted = ends - np.concatenate([[0], ends[:-1]])
    takers = spec.rng.permutation(np.repeat(np.arange(spec.clients), wanted))
    for _ in range(200):
        n = min(len(pool), len(takers))
        if n == 0:
            break
        pool = spec.rng.permutation(pool)
        fits = ~(held[takers[:n]] == spec.y[pool[:n], None]).any(axis=1)
        client[pool[:n][fits]] = takers[:n][fits]
        pool, takers = (np.concatenate([all_[:n][~fits], all_[n:]]) for all_ in (pool, takers))

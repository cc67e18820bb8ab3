"""Splits: which client has which train samples.

A partition is a permutation of sample numbers and the offsets at which clients begin (compressed rows, not a list of
lists), so that a million clients cost megabytes. A split is a row of `SPLITS`: a function from an `Ask` to a
`Partition`. For all of them: every sample is used at most once, every client has at least `min_samples`, and the same
seed gives the same partition; where that cannot be, the request is refused.

iid        shuffled, sizes equal up to one.
classes    k classes per client. A class is held by about clients * k / classes clients (fewer where it has too few
           samples) and its samples are dealt equally among them, so for noise = 0 every client has exactly k classes.
           Where clients * k < classes some classes are not used. noise: that share of every client comes from the
           classes it does not hold (the thesis's 90/10).
dirichlet  for every class, shares of its samples over the clients ~ Dirichlet(alpha) (Hsu et al. 2019, Li et al.
           2022); all samples are used. A client short of min_samples is then filled up with random samples of the
           largest clients.
quantity   sizes ~ Dirichlet(beta) on top of min_samples for each (Li et al. 2022), labels iid; all samples are used.
natural    by owner (writer, role). owners = choose: one client per owner, in the order of owners; with fewer clients
           than owners, a random choice of them. owners = merge: owners are dealt at random to the clients, numbers of
           owners equal up to one; an owner's samples stay together and all are used.
feature    iid, on data whose images look different from client to client or class to class (feature skew).
mixed      classes, on such data: label skew on top.
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

TOLD = 10_000  # up to so many clients a manifest has a histogram for each
CELLS = 2**20  # of a histogram in memory at a time
OWNERS = ("choose", "merge")


@dataclass(frozen=True)
class Partition:
    """Who has which samples: client c has order[offsets[c] : offsets[c + 1]], and what is shared by all."""

    offsets: Ints  # [clients + 1]
    order: Ints  # [used samples]: indices into the train set, client by client
    shared: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # of which every client has a copy

    def __post_init__(self) -> None:
        ends_meet = len(self.offsets) >= 2 and self.offsets[0] == 0 and self.offsets[-1] == len(self.order)
        if not ends_meet or bool((self.offsets[1:] < self.offsets[:-1]).any()):
            raise UserError(
                f"a partition got {len(self.offsets)} offsets for {len(self.order)} samples; "
                "offsets must rise from 0 to the number of samples"
            )

    @property
    def clients(self) -> int:
        """How many clients there are."""
        return len(self.offsets) - 1

    @cached_property
    def sizes(self) -> Ints:
        """How many samples each client has, the shared ones counted (to be read only)."""
        sizes = np.diff(self.offsets) + len(self.shared)  # once: every round asks, and a million clients take 3 ms
        sizes.flags.writeable = False
        return sizes

    def of(self, cid: int) -> Ints:
        """The samples of client cid, its own first (to be read only)."""
        if not 0 <= cid < self.clients:
            raise UserError(f"client {cid} does not exist; clients are 0 to {self.clients - 1}")
        own = self.order[self.offsets[cid] : self.offsets[cid + 1]]
        return np.concatenate([own, self.shared]) if len(self.shared) else own

    def histogram(self, y: npt.ArrayLike, classes: int) -> Ints:
        """How many samples of each class each client has of its own, [clients, classes]."""
        client = np.repeat(np.arange(self.clients), np.diff(self.offsets))
        cell = client * classes + np.asarray(y)[self.order]
        return np.bincount(cell, minlength=self.clients * classes).reshape(self.clients, classes)

    def manifest(self, y: npt.ArrayLike, classes: int, **about: Any) -> dict[str, Any]:
        """A JSON-able account: `about` (name, parameters, seed), counts, a SHA-256, class counts for each client (a
        summary where clients are many)."""
        sha = hashlib.sha256()
        for part in (self.offsets, self.order):
            sha.update(np.ascontiguousarray(part, dtype="<i8").data)
        few = self.clients <= TOLD
        held = {"histogram": self.histogram(y, classes).tolist()} if few else self.summary(y, classes)
        return {**about, "clients": self.clients, "samples": len(self.order), "sha256": sha.hexdigest(), **held}

    def summary(self, y: npt.ArrayLike, classes: int) -> dict[str, Any]:
        """What a histogram tells, in few numbers: of the clients' own samples least, quartiles and most, and how many
        classes a client has on average."""
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
class Ask:
    """What a split is asked for."""

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
    skewed: bool  # whether images look different from client to client or class to class
    min_samples: int


def iid(ask: Ask) -> Partition:
    """Shuffled, sizes equal up to one."""
    return Partition(_offsets(_even(len(ask.y), ask.clients)), ask.rng.permutation(len(ask.y)))


def quantity(ask: Ask) -> Partition:
    """Sizes by a Dirichlet on top of the least size, labels iid."""
    if not (ask.beta > 0 and math.isfinite(ask.beta)):
        raise UserError(f"split 'quantity' got beta = {ask.beta}; it must be a positive number, and 0.5 is usual")
    spare = len(ask.y) - ask.clients * ask.min_samples
    sizes = ask.min_samples + _deal(spare, _dirichlet(ask.beta, ask.clients, ask.rng))
    return Partition(_offsets(sizes), ask.rng.permutation(len(ask.y)))


def dirichlet(ask: Ask) -> Partition:
    """Each class dealt to the clients by its own Dirichlet; the smallest clients filled up from the largest."""
    if not (ask.alpha > 0 and math.isfinite(ask.alpha)):
        raise UserError(
            f"split 'dirichlet' got alpha = {ask.alpha}; it must be a positive number: 0.1 is skewed, 100 nearly iid"
        )
    client = np.empty(len(ask.y), dtype=np.int64)
    for samples in _by_class(ask):
        shares = _dirichlet(ask.alpha, ask.clients, ask.rng)
        client[samples] = np.repeat(np.arange(ask.clients), _deal(len(samples), shares))
    partition = _gather(client, ask.clients, ask.rng)
    sizes = partition.sizes
    lack = np.maximum(ask.min_samples - sizes, 0)
    if not lack.any():
        return partition
    keep = _most_even(sizes, int(sizes.sum() - lack.sum()))
    # a client's samples are in random order: the last ones will do
    moved = partition.order[_ranges(partition.offsets[:-1] + keep, sizes - keep)]
    client[ask.rng.permutation(moved)] = np.repeat(np.arange(ask.clients), lack)
    return _gather(client, ask.clients, ask.rng)


def classes(ask: Ask) -> Partition:
    """k classes per client, a class dealt equally among the clients that hold it, and noise from the others."""
    k, count = ask.classes_per_client, np.bincount(ask.y, minlength=ask.classes)
    if not 1 <= k <= ask.classes:
        raise UserError(
            f"split '{ask.name}' got {k} classes a client (--skew.classes); use 1 to {ask.classes}, as the data have"
        )
    if not 0 <= ask.noise < 1:
        raise UserError(f"split '{ask.name}' got noise = {ask.noise}; it is a share from 0 up to, not including, 1")
    if ask.noise > 0 and k == ask.classes:
        raise UserError(
            f"split '{ask.name}' got noise = {ask.noise} and {k} classes per client, which are all; use noise = 0"
        )
    spared = np.floor(ask.noise * count).astype(np.int64)
    most = np.minimum(count - spared, ask.clients)  # a class can be held by so many
    if most.sum() < ask.clients * k:
        raise UserError(
            f"split '{ask.name}' cannot give {ask.clients} clients {k} classes each with a sample of every one from "
            f"{len(ask.y)} samples; use fewer clients or fewer classes a client (--skew.classes)"
        )
    order = ask.rng.permutation(ask.classes)  # which classes are held once more than others is drawn too
    holders = np.empty(ask.classes, dtype=np.int64)
    holders[order] = _most_even(most[order], ask.clients * k)
    held = _hold(holders, ask)
    client, pool = _deal_classes(held, holders, spared, ask)
    _add_noise(client, held, pool, ask)
    return _gather(client, ask.clients, ask.rng)


def natural(ask: Ask) -> Partition:
    """By owner: a client for each, or for each of a random choice, or all owners dealt to the clients."""
    if ask.owner is None:
        raise UserError(
            "split 'natural' needs a data set that knows who wrote each sample, such as glyphs; use another split"
        )
    if ask.owners not in OWNERS:
        raise unknown("way with owners (--skew.owners)", ask.owners, OWNERS)
    merge = ask.owners == "merge"
    least = 1 if merge else ask.min_samples  # merged with others, a small owner will do
    sizes = np.bincount(ask.owner)
    able = np.flatnonzero(sizes >= least)
    if ask.clients > len(able):
        raise UserError(
            f"split 'natural' got {ask.clients} clients, but the data have {len(able)} owners with at least "
            f"{least} samples; use at most that many clients"
        )
    number = np.full(len(sizes), -1)
    if merge:
        number[ask.rng.permutation(able)] = np.arange(len(able)) % ask.clients
    else:
        number[np.sort(ask.rng.choice(able, ask.clients, replace=False))] = np.arange(ask.clients)
    return _gather(number[ask.owner], ask.clients, ask.rng)


def feature(ask: Ask) -> Partition:
    """iid, on data with feature skew."""
    _need_looks(ask)
    return iid(ask)


def mixed(ask: Ask) -> Partition:
    """k classes per client, on data with feature skew."""
    _need_looks(ask)
    return classes(ask)


SPLITS: dict[str, Callable[[Ask], Partition]] = {
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
    """The partition of samples with labels y by the split of that name; `skewed` says that the data have looks."""
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
    ask = Ask(
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
    if ask.owner is not None and (ask.owner.shape != labels.shape or int(ask.owner.min()) < 0):
        raise UserError(
            f"split '{name}' got owners {list(ask.owner.shape)} for {len(labels)} labels; give one number >= 0 a sample"
        )
    partition = SPLITS[name](ask)
    if (least := int(np.diff(partition.offsets).min())) < min_samples:
        raise UserError(
            f"split '{name}' would leave a client with {least} samples, fewer than min_samples = {min_samples}; "
            "use fewer clients"
        )
    return partition


def _labels(y: npt.ArrayLike) -> Ints:
    """The labels as int64, refused unless they are whole numbers >= 0."""
    labels = np.asarray(y)
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or len(labels) == 0 or int(labels.min()) < 0:
        raise UserError(
            f"labels are {labels.dtype} {list(labels.shape)}; a split needs a list of whole numbers >= 0, at least one"
        )
    return labels.astype(np.int64, copy=False)


def _need_looks(ask: Ask) -> None:
    """Refuse data that look the same everywhere."""
    if not ask.skewed:
        raise UserError(
            f"split '{ask.name}' needs data whose images look different from client to client or class to class; "
            "use cmnist2, fedcmnist or fedrotmnist, or another split"
        )


def _offsets(sizes: Ints) -> Ints:
    """Where each client begins, and the end."""
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _even(total: int, parts: int) -> Ints:
    """The total in whole parts that are equal up to one."""
    return total // parts + (np.arange(parts) < total % parts)


def _most_even(caps: Ints, total: int) -> Ints:
    """Whole numbers that add up to total <= sum(caps): each its cap, or one common level (or + 1) if that is lower."""
    low, high = 0, int(caps.max())
    while low < high:  # the highest level that does not need more than the total
        level = (low + high + 1) // 2
        low, high = (level, high) if int(np.minimum(caps, level).sum()) <= total else (low, level - 1)
    parts = np.minimum(caps, low)
    above = np.flatnonzero(caps > low)[: total - int(parts.sum())]
    parts[above] += 1
    return parts


def _dirichlet(concentration: float, parts: int, rng: np.random.Generator) -> Floats:
    """Shares of a symmetric Dirichlet, by logarithms of gamma variates, as small concentrations would underflow."""
    log = np.log(rng.standard_gamma(concentration + 1, parts))
    log -= rng.standard_exponential(parts) / concentration  # gamma(a) = gamma(a + 1) * uniform^(1 / a)
    log -= log.max()
    shares: Floats = np.exp(log)
    shares /= shares.sum()
    return shares


def _deal(total: int, shares: Floats) -> Ints:
    """The total in whole parts near the shares, cut at the rounded running sums, so that they add up."""
    cuts = np.rint(np.cumsum(shares) * total).astype(np.int64)
    cuts[-1] = total
    return np.diff(np.minimum(cuts, total), prepend=0)


def _by_class(ask: Ask) -> list[Ints]:
    """For each class its samples in random order."""
    shuffled = ask.rng.permutation(len(ask.y))
    ordered = shuffled[_argsort(ask.y[shuffled])]
    return np.split(ordered, np.cumsum(np.bincount(ask.y))[:-1])


def _gather(client: Ints, clients: int, rng: np.random.Generator) -> Partition:
    """The partition from the client of each sample (-1: not used), a client's samples in random order."""
    order = rng.permutation(len(client))
    who = client[order]
    used = who >= 0
    if not used.all():
        order, who = order[used], who[used]
    offsets = _offsets(np.bincount(who, minlength=clients))
    return Partition(offsets, order[_argsort(who)])


def _argsort(values: Ints) -> Ints:
    """The order that sorts values >= 0, equal ones left in their order.

    A value and its place are packed into one number, as numpy sorts numbers several times as fast as it finds an order.
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
    """The numbers starts[i] .. starts[i] + lengths[i] - 1, one range after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def _hold(holders: Ints, ask: Ask) -> Ints:
    """The classes each client holds, [clients, k], all different, class c held by holders[c] clients.

    Dealing each class to consecutive clients around the table is such an arrangement, as no class has more holders
    than there are clients; random exchanges between pairs of clients then keep all of this true and mix the
    combinations.
    """
    k, n = ask.classes_per_client, ask.clients
    small = np.min_scalar_type(ask.classes)  # a table in the processor's cache is read several times as fast
    table = np.repeat(np.arange(ask.classes, dtype=small), holders).reshape(k, n)
    cells = table.reshape(-1)
    for _ in range(8 * k + 16 if n > 1 else 0):
        pair = ask.rng.permutation(n)
        a, b = pair[: n // 2], pair[n // 2 : 2 * (n // 2)]
        i, j = ask.rng.integers(k, size=(2, n // 2)) * n
        i, j = i + a, j + b
        mine, theirs = cells[i], cells[j]
        clash = np.zeros(n // 2, dtype=bool)
        for row in table:
            clash |= row[a] == theirs
            clash |= row[b] == mine
        cells[i], cells[j] = np.where(clash, mine, theirs), np.where(clash, theirs, mine)
    mixed: Ints = table[:, ask.rng.permutation(n)].T.astype(np.int64, order="C")
    return mixed


def _deal_classes(held: Ints, holders: Ints, spared: Ints, ask: Ask) -> tuple[Ints, Ints]:
    """The client of each sample (-1: none), each class dealt in turn to its holders, and the samples kept for noise."""
    places = ask.rng.permutation(held.size)  # so that it is not always the first clients who get one more
    places = places[_argsort(held.ravel()[places])]
    of_class = np.split(places // held.shape[1], np.cumsum(holders)[:-1])
    client, pool = np.full(len(ask.y), -1), []
    for samples, spare, who in zip(_by_class(ask), spared, of_class, strict=True):
        pool.append(samples[:spare])
        if len(who):
            dealt = samples[spare:]
            client[dealt] = np.resize(who, len(dealt))  # around and around
    return client, np.concatenate(pool)


def _add_noise(client: Ints, held: Ints, pool: Ints, ask: Ask) -> None:
    """Deal, in place, samples of the pool to clients that do not hold their class, to each near its share of noise.

    Samples and places are paired at random and pairs that fit are kept, again and again; the few that never fit stay
    unused.
    """
    own = np.bincount(client[client >= 0], minlength=ask.clients)
    ends = np.rint(np.cumsum(own * (ask.noise / (1 - ask.noise)))).astype(np.int64)
    wanted = ends - np.concatenate([[0], ends[:-1]])
    takers = ask.rng.permutation(np.repeat(np.arange(ask.clients), wanted))
    for _ in range(200):
        n = min(len(pool), len(takers))
        if n == 0:
            break
        pool = ask.rng.permutation(pool)
        fits = ~(held[takers[:n]] == ask.y[pool[:n], None]).any(axis=1)
        client[pool[:n][fits]] = takers[:n][fits]
        pool, takers = (np.concatenate([all_[:n][~fits], all_[n:]]) for all_ in (pool, takers))

"""The round and the loop. Every rank runs the same code and no rank is special.

    draw      who trains, from (seed, round): no message
    train     my clients from the model; each delta goes into the tally and is forgotten
    sum       how many delivered, with what weight: a few numbers
    reduce    the sums for my slice: deltas and votes
    mask      and the server's step on my slice, piece by piece
    gather    the slices become the whole model on each rank

A client that raises or whose update cannot be averaged is left out, named and renormalised away; a round with fewer
than `min_clients` fails on every rank with the same sentence, before the model is touched.

N: the full padded vector.  S: the slice this rank owns.  P: the trainable parameters.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .algorithms import Algorithm
from .cohort import Cohort, draw
from .comm import Comm
from .errors import CommonError
from .reduce import Part, reduce
from .tally import Tally, Unusable
from .task import Task, Trained, Work

log = logging.getLogger("fedmpi")

PHASES = ("local", "wait", "reduce", "server", "gather")
LOSS_UNIT = (
    2.0**40
)  # losses are summed as whole numbers of this unit, so that metrics are the same on any number of ranks
MOST_LOSS = 2.0**20


@dataclass(frozen=True)
class State:
    """What outlives a round. The tensors are the live ones that the next round moves: copy what you want to keep."""

    round: int
    """rounds done"""
    model_N: Tensor
    """the whole model, the same on every rank"""
    ints: Tensor
    """the model's integer buffers"""
    moments: dict[str, Tensor]
    """the server's moments, of this rank's slice"""


@dataclass(frozen=True)
class Plan:
    """How rounds are run, whatever the algorithm."""

    seed: int
    rounds: int
    cohort: int
    work: Work
    sum: str = "exact"
    min_clients: int = 1


@dataclass(frozen=True)
class Report:
    """What a round was like, the same on every rank; `seconds` are means over the ranks."""

    round: int
    clients: int
    dropped: tuple[int, ...]
    train_loss: float
    kept: float
    agreement: float
    bytes_sent: int
    seconds: dict[str, float]
    test_accuracy: float | None = None
    test_loss: float | None = None


@dataclass(frozen=True)
class Delivery:
    """What the clients of all ranks delivered together."""

    weight: int
    loss: float
    used: tuple[int, ...]
    dropped: tuple[int, ...]


@dataclass(frozen=True)
class Seen:
    """Counts over a rank's slice, on its device: elements with mask 1, and the sum of |votes|. Whole numbers in
    float64."""

    kept: Tensor
    votes: Tensor

    @classmethod
    def nothing(cls, device: torch.device) -> Seen:
        return cls(*(torch.zeros((), dtype=torch.float64, device=device) for _ in range(2)))


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started


def begin(task: Task, algorithm: Algorithm, comm: Comm) -> State:
    """The state before the first round: rank 0's model on every rank. Collective."""
    start_N, ints = task.start()
    comm.broadcast(start_N)
    if ints.numel():
        comm.broadcast(ints)
    length = start_N.numel() // comm.size
    model_N = comm.vector(length, start_N.device)
    own = slice(comm.rank * length, (comm.rank + 1) * length)
    model_N[own] = start_N[own]
    comm.gather(model_N)
    moments = {
        name: torch.full((length,), value, device=task.device) for name, value in algorithm.server.moments.items()
    }
    return State(0, model_N, ints, moments)


def rounds(state: State, plan: Plan, algorithm: Algorithm, task: Task, comm: Comm) -> Iterator[tuple[State, Report]]:
    """Train from `state` to the last round of the plan, yielding after each. Collective."""
    tally = Tally(comm, state.model_N.numel() // comm.size, plan.cohort, plan.sum, task.device)
    while state.round < plan.rounds:
        state, report = run_round(state, plan, algorithm, task, comm, tally)
        yield state, report


def run_round(
    state: State, plan: Plan, algorithm: Algorithm, task: Task, comm: Comm, tally: Tally
) -> tuple[State, Report]:
    """One round, straight through. Collective."""
    number, clock, sent = state.round + 1, Clock(), comm.sent
    cohort = draw(plan.seed, number, task.partition.sizes, plan.cohort, comm.size)
    tally.clear(cohort.total)
    with clock("local"):
        counts, ints = train_clients(state, plan, algorithm, task, comm.rank, cohort, tally)
    with clock("wait"):
        comm.sum(counts)
    delivery = read_counts(counts, cohort)
    if len(delivery.used) < plan.min_clients:
        raise too_few(number, plan, delivery)
    ints = largest(ints, comm)
    one_each = cohort.most_on_a_rank == 1
    seen = move_model(state, algorithm, delivery, tally, comm, task.layout.params, one_each, clock)
    report = sum_up(number, delivery, seen, task.layout.params, comm, comm.sent - sent, clock)
    return replace(state, round=number, ints=ints), report


def train_clients(
    state: State, plan: Plan, algorithm: Algorithm, task: Task, rank: int, cohort: Cohort, tally: Tally
) -> tuple[Tensor, Tensor]:
    """Train this rank's clients into the tally; returns this rank's counts, and its largest integer buffers.

    Counts: the weight delivered, the weighted loss in whole units, and a 1 at the cohort position of each client that
    delivered.
    """
    counts = torch.zeros(2 + len(cohort.cids), dtype=torch.int64)
    ints = state.ints
    for i in cohort.at(rank):
        weight = cohort.weights[i]
        result = train_client(state, plan, algorithm, task, cohort.cids[i], tally)
        if result is None:
            continue
        tally.add(result.delta_N, weight)
        counts[0] += weight
        counts[1] += round(result.loss * weight / cohort.total * LOSS_UNIT)
        counts[2 + i] = 1
        ints = torch.maximum(ints, result.ints)
    return counts, ints


def train_client(state: State, plan: Plan, algorithm: Algorithm, task: Task, cid: int, tally: Tally) -> Trained | None:
    """What one client brings back, or None, with the reason in the log, where that cannot be used.

    What a client's training raises (out of memory, an error in a user's rule or model) must not end the run of all.
    """
    number = state.round + 1
    try:
        job = task.job(state.model_N, state.ints, number, cid, plan.work)
        result = job.finish(algorithm.local(job))
        if not abs(result.loss) < MOST_LOSS:
            raise Unusable(f"its training loss is {result.loss:g}")
        tally.check(result.delta_N)
    except Unusable as why:
        log.warning("round %d: client %d left out: %s", number, cid, why)
        return None
    except Exception:
        log.exception("round %d: client %d left out: its training raised", number, cid)
        return None
    return result


def read_counts(counts: Tensor, cohort: Cohort) -> Delivery:
    """What the summed counts mean."""
    weight, loss, *delivered = counts.tolist()
    used = tuple(cid for cid, d in zip(cohort.cids, delivered, strict=True) if d)
    dropped = tuple(cid for cid, d in zip(cohort.cids, delivered, strict=True) if not d)
    return Delivery(weight, loss / LOSS_UNIT * cohort.total / max(weight, 1), used, dropped)


def too_few(number: int, plan: Plan, delivery: Delivery) -> CommonError:
    return CommonError(
        f"round {number}: {len(delivery.used)} of {plan.cohort} clients delivered a usable update, but min_clients is "
        f"{plan.min_clients}; left out: {', '.join(map(str, delivery.dropped))}. The log of their ranks tells why; "
        "a lower --local.lr often helps"
    )


def largest(ints: Tensor, comm: Comm) -> Tensor:
    """The elementwise maximum over the ranks of a few whole numbers. Collective."""
    if not ints.numel():
        return ints
    rows = torch.zeros(comm.size, ints.numel(), dtype=torch.int64)
    rows[comm.rank] = ints
    comm.sum(rows)
    return rows.amax(0)


def move_model(
    state: State,
    algorithm: Algorithm,
    delivery: Delivery,
    tally: Tally,
    comm: Comm,
    params: int,
    one_each: bool,
    clock: Clock,
) -> Seen:
    """The collective and what it is for: from every rank's tally to the new model on every rank. Collective.

    Returns what was seen of this rank's slice.
    """
    seen = Seen.nothing(state.model_N.device)
    parts = reduce(comm, tally, params, delivery.weight, one_each)
    while True:
        with clock("reduce"):
            part = next(parts, None)
        if part is None:
            break
        with clock("server"):
            apply(part, state, algorithm, params, len(delivery.used), seen)
    with clock("gather"):
        comm.gather(state.model_N)
    return seen


def apply(part: Part, state: State, algorithm: Algorithm, params: int, clients: int, seen: Seen) -> None:
    """Move one piece of the model by the masked mean; count the elements kept and the votes into `seen`."""
    w = state.model_N[part.start : part.stop]
    if part.start >= params:
        w.add_(part.mean)  # buffers: averaged, never masked, never touched by the server's rule
        return
    mask = algorithm.mask(part.votes, clients)
    seen.kept.add_(mask.floor().sum())
    seen.votes.add_(count_votes(part.votes))
    moments = {name: moment[part.own] for name, moment in state.moments.items()}
    algorithm.server.step(w, part.mean, mask, moments, state.round + 1)


def count_votes(votes: Tensor) -> Tensor:
    """The sum of |votes| of a piece; small ones by way of float32, exact here (2**17 * 127 < 2**24) and quicker."""
    return votes.abs_().float().sum() if votes.dtype == torch.int8 else votes.abs_().sum(dtype=torch.int64)


def sum_up(number: int, delivery: Delivery, seen: Seen, params: int, comm: Comm, sent: int, clock: Clock) -> Report:
    """The report of a round, over all ranks. Collective."""
    microseconds = [round(clock.seconds[phase] * 1e6) for phase in PHASES]
    totals = torch.tensor([int(seen.kept), int(seen.votes), sent, *microseconds], dtype=torch.int64)
    comm.sum(totals)
    kept, votes, bytes_sent, *times = totals.tolist()
    return Report(
        round=number,
        clients=len(delivery.used),
        dropped=delivery.dropped,
        train_loss=delivery.loss,
        kept=kept / params,
        agreement=votes / params / len(delivery.used),
        bytes_sent=bytes_sent,
        seconds={phase: t / comm.size / 1e6 for phase, t in zip(PHASES, times, strict=True)},
    )

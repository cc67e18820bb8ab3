"""The round and the loop. Every rank runs the same code and no rank is special.

    draw      who trains, from (seed, round): no message
    train     my clients from the model; each delta goes into the tally and is forgotten
    sum       how many delivered, with what weight: a few numbers
    reduce    the sums for my slice: deltas and votes
    mask      and the server's step on my slice, piece by piece
    gather    the slices become the whole model on each rank
    meta      where the algorithm has a meta step: one more gradient, over all ranks, and one more step

What else a client's rule asks for goes along: further vectors that are summed in the same exchange (channels), vectors
that all clients see (`State.shared`), and what each client keeps for its next time (`State.memory`).

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
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from .agreement import Layers, add_votes
from .algorithms import Algorithm, MetaStep
from .cohort import Cohort, draw
from .comm import Comm, Wait
from .errors import CommonError, RunError, UserError
from .flat import Layout
from .layers import LayerVotes, trained_spans
from .ledger import Ledger
from .local import Channel, LocalRule
from .memory import Memory
from .reduce import Part, parts, reduce
from .tally import Tally, Unusable, even_chunks
from .task import Task, Trained
from .wire import nothing_unsent
from .work import Work

log = logging.getLogger("fedmpi")

PHASES = ("local", "wait", "reduce", "server", "gather", "meta")
UNIT = 2.0**40  # losses and steps are summed as whole numbers of 1 / UNIT, so they are the same on any number of ranks


@dataclass(frozen=True)
class State:
    """What outlives a round. It is whole between rounds; its tensors are the live ones that the next round moves, so
    copy what you want to keep."""

    round: int
    """rounds done"""
    model_N: Tensor
    """the whole model, the same on every rank"""
    ints: Tensor
    """the model's integer buffers"""
    moments: dict[str, Tensor]
    """the server's moments, of this rank's slice"""
    shared: dict[str, Tensor] = field(default_factory=dict)
    """the vectors that channels of the client's rule move, the same on every rank (SCAFFOLD's c)"""
    memory: Memory = field(default_factory=Memory)
    """what the clients whose home this rank is have kept (SCAFFOLD's c_n)"""
    unsent: dict[str, Tensor] = field(default_factory=dict)
    """with `--wire bf16`, what this rank has rounded off and not sent yet: `sums` for every slice, as a part of the
    mean, and `model`, of its own slice"""


@dataclass(frozen=True)
class Plan:
    """How rounds are run, whatever the algorithm."""

    seed: int
    rounds: int
    cohort: int
    work: Work
    sum: str = "exact"
    min_clients: int = 1
    wire: str = "float32"
    tau: float | None = None
    """count agreement layer by layer, and what is below this; None: do not"""


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
    """what the ranks sent each other; 0 on one rank"""
    seconds: dict[str, float]
    client_bytes_up: int | None = None
    """what the clients of the round upload to a server, all of them together, wherever they are hosted (`traffic`);
    None in records of older versions"""
    client_bytes_down: int | None = None
    """what they download, all of them together"""
    test_metric: float | None = None
    """the objective's metric on the test set, where it was scored"""
    test_loss: float | None = None
    metric: str = "accuracy"
    """what test_metric is"""
    measures: dict[str, Any] = field(default_factory=dict)
    """what else was asked for (--evaluate), by its name in metrics.jsonl"""

    @property
    def test_accuracy(self) -> float | None:
        """The test metric where that is the accuracy."""
        return self.test_metric if self.metric == "accuracy" else None


@dataclass(frozen=True)
class Delivery:
    """What the clients of all ranks delivered together."""

    weight: int
    loss: float
    used: tuple[int, ...]
    dropped: tuple[int, ...]
    steps: float = 1.0
    """the weighted mean of the steps that a normalised rule divided by"""


@dataclass(frozen=True)
class Seen:
    """Counts over a rank's slice, on its device: elements with mask 1, and the sum of |votes|, where asked also by
    layer. Whole numbers in float64."""

    kept: Tensor
    votes: Tensor
    layers: Layers | None = None

    @classmethod
    def nothing(cls, device: torch.device, layers: Layers | None = None) -> Seen:
        kept, votes = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))
        return cls(kept, votes, layers)


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


def begin(task: Task, algorithm: Algorithm, comm: Comm, memory: Memory | None = None, wire: str = "float32") -> State:
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
    rule = algorithm.local
    shared = {c.name: comm.vector(length, start_N.device) for c in rule.sends if c.to == "shared"}
    memory = Memory(rule.keeps, task.layout.params) if memory is None else memory
    unsent = nothing_unsent(start_N, length) if wire == "bf16" else {}
    return State(0, model_N, ints, moments, shared, memory, unsent)


def rounds(state: State, plan: Plan, algorithm: Algorithm, task: Task, comm: Comm) -> Iterator[tuple[State, Report]]:
    """Train from `state` to the last round of the plan, yielding after each. Collective."""
    books = (plan.cohort, plan.sum, task.partition.clients, task.device, plan.wire, state.model_N)
    ledger = Ledger(comm, algorithm, task.layout, *books)
    while state.round < plan.rounds:
        try:
            state, report = run_round(state, plan, algorithm, task, comm, ledger)
        except UserError as error:  # of a rule or mask from outside: on this rank, perhaps on no other
            raise RunError(f"round {state.round + 1}: {error}") from error
        yield state, report


def run_round(
    state: State, plan: Plan, algorithm: Algorithm, task: Task, comm: Comm, ledger: Ledger
) -> tuple[State, Report]:
    """One round, straight through. Collective."""
    number, clock, sent = state.round + 1, Clock(), comm.sent
    at_home = bool(algorithm.local.keeps)
    cohort = draw(plan.seed, number, task.partition.sizes, plan.cohort, comm.size, plan.work, at_home)
    ledger.clear(cohort)
    state.memory.discard()
    with clock("local"):
        counts, ints = train_clients(state, plan, algorithm.local, task, comm.rank, cohort, ledger)
    with clock("wait"):
        comm.sum(counts)
    delivery = read_counts(counts, cohort)
    if len(delivery.used) < plan.min_clients:
        raise too_few(number, plan, delivery)
    ints = largest(ints, comm)
    one_each = cohort.most_on_a_rank == 1
    layers = None if plan.tau is None else Layers.of(task.layout, plan.tau, task.device)
    seen = move_model(state, algorithm, delivery, ledger, comm, task.layout, one_each, clock, layers)
    state = replace(state, round=number, ints=ints)
    if algorithm.meta is not None and ledger.meta is not None:
        with clock("meta"):
            take_meta_step(state, algorithm.meta, task, ledger.meta, comm)
    state.memory.commit()
    length = state.model_N.numel() // comm.size
    sound = bool(state.model_N[comm.rank * length : (comm.rank + 1) * length].sum().isfinite())
    report = sum_up(number, delivery, seen, sound, task.layout.params, comm, comm.sent - sent, clock)
    up, down = traffic(algorithm.local, task.layout.length, task.layout.params, ints.numel(), delivery)
    return state, replace(report, client_bytes_up=up, client_bytes_down=down)


@torch.no_grad()  # a job's gradients switch it on; a rule's own arithmetic must not leave a graph in the sums
def train_clients(
    state: State, plan: Plan, rule: LocalRule, task: Task, rank: int, cohort: Cohort, ledger: Ledger
) -> tuple[Tensor, Tensor]:
    """Train this rank's clients into the ledger; returns this rank's counts, and its largest integer buffers.

    Counts: the weight delivered, the weighted loss and the weighted steps in whole units, and a 1 at the cohort
    position of each client that delivered.
    """
    counts = torch.zeros(3 + len(cohort.cids), dtype=torch.int64)
    ints, told = state.ints, set[str]()

    def train(seat: Task, cid: int) -> Trained | None:
        return train_client(state, plan, rule, seat, cid, ledger, told)

    mine = {cohort.cids[i]: i for i in cohort.at(rank)}
    for number, (cid, trained) in enumerate(task.each(list(mine), train), 1):
        if trained is None:
            continue
        i, weight = mine[cid], cohort.weights[mine[cid]]
        ledger.add(trained, weight, last=number == len(mine))
        state.memory.stage(cid, trained.result.keeps)
        share = weight / cohort.total * UNIT
        steps = trained.result.steps if rule.normalised else 1.0
        counts[:3] += torch.tensor([weight, round(trained.loss * share), round(steps * share)])
        counts[3 + i] = 1
        ints = torch.maximum(ints, trained.ints)
    return counts, ints


def train_client(
    state: State, plan: Plan, rule: LocalRule, task: Task, cid: int, ledger: Ledger, told: set[str]
) -> Trained | None:
    """What one client brings back, or None, with the reason in the log, where that cannot be used.

    What a client's training raises (out of memory, an error in a user's rule or model) must not end the run of all; an
    error that was `told` with its traceback is told in a line.
    """
    number, memory = state.round + 1, state.memory.read(cid)
    readable = (state.model_N, *state.shared.values(), *memory.values())
    before = [vector._version for vector in readable]
    trained: Trained | None = None
    try:
        job = task.job(state.model_N, state.ints, number, cid, plan.work, state.shared, memory)
        trained = job.finish(rule(job))
        ledger.check(trained)
    except Unusable as why:
        log.warning("round %d: client %d left out: %s", number, cid, why)
        trained = None
    except (Exception, SystemExit) as error:
        what = repr(error)
        log.error("round %d: client %d left out: its training raised %s", number, cid, what, exc_info=what not in told)
        told.add(what)
        trained = None
    if [vector._version for vector in readable] != before:
        raise RunError(
            f"round {number}, client {cid}: its rule wrote to job.start_P, job.shared or job.memory, which all clients "
            "share; train job.x_P, and copy what you want to change"
        )
    return trained


def read_counts(counts: Tensor, cohort: Cohort) -> Delivery:
    """What the summed counts mean."""
    weight, loss, steps, *delivered = counts.tolist()
    used = tuple(cid for cid, d in zip(cohort.cids, delivered, strict=True) if d)
    dropped = tuple(cid for cid, d in zip(cohort.cids, delivered, strict=True) if not d)
    scale = cohort.total / max(weight, 1) / UNIT
    return Delivery(weight, loss * scale, used, dropped, steps * scale)


def too_few(number: int, plan: Plan, delivery: Delivery) -> CommonError:
    return CommonError(
        f"round {number}: {len(delivery.used)} of {plan.cohort} clients delivered a usable update, but min_clients is "
        f"{plan.min_clients}; left out: {', '.join(map(str, delivery.dropped))}. The log of their ranks tells why; "
        "where it is the size of an update or of the loss, a lower --local.lr often helps; numbers to predict are best "
        "scaled to about 1"
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
    ledger: Ledger,
    comm: Comm,
    layout: Layout,
    one_each: bool,
    clock: Clock,
    layers: Layers | None = None,
) -> Seen:
    """The collective and what it is for: from every rank's tallies to the new model on every rank. Collective.

    Returns what was seen of this rank's slice, where `layers` are given also of each.
    """
    seen, sends, params = Seen.nothing(state.model_N.device, layers), algorithm.local.sends, layout.params
    asked = trained_spans(layout) if algorithm.mask.layers else ()
    votes = LayerVotes(asked, len(delivery.used), state.model_N.device)
    under_way: list[Wait] = []
    final = not any(channel.to == "model" for channel in sends)  # what has been applied may go

    def prepare(bucket: slice) -> None:
        ledger.finish(bucket)
        if ledger.wire is not None:
            ledger.wire.round_sums(state.unsent["sums"], delivery.weight, bucket)

    def count_layers(pieces: Iterator[tuple[int, Tensor]]) -> None:
        votes.add(pieces)
        comm.sum(votes.counts)

    if ledger.wire is not None:
        ledger.wire.remember(state.model_N)
    also, look = list(ledger.channels.values()), count_layers if algorithm.mask.layers else None
    pieces = reduce(comm, ledger.deltas, params, delivery.weight, one_each, also, prepare, look)
    while True:
        with clock("reduce"):
            part = next(pieces, None)
        if part is None:
            break
        with clock("server"):
            apply(part, state, algorithm, params, delivery, seen, votes)
        if part.completes is not None and final:
            with clock("gather"):
                under_way.append(start_gather(state, ledger, comm, part.completes))
    with clock("server"):
        for channel in sends:
            add_channel(channel, state, delivery, ledger.channels[channel.name], comm, params)
    with clock("gather"):
        if not final:
            under_way.append(start_gather(state, ledger, comm, slice(0, ledger.deltas.slice)))
        comm.gather(state.model_N, under_way)
        for vector_N in state.shared.values():
            comm.gather(vector_N)
    if ledger.wire is not None:
        ledger.wire.settled = True
    return seen


def start_gather(state: State, ledger: Ledger, comm: Comm, bucket: slice) -> Wait:
    """Send a bucket of this rank's slice of the model, begin to receive those of the others."""
    if ledger.wire is None:
        return comm.start_gather(state.model_N, bucket)
    return ledger.wire.start_gather(state.model_N, state.unsent["model"], bucket)


def apply(
    part: Part,
    state: State,
    algorithm: Algorithm,
    params: int,
    delivery: Delivery,
    seen: Seen,
    votes: LayerVotes,
) -> None:
    """Move one piece of the model by the masked mean; count the elements kept and the votes into `seen`. `votes` are
    those of whole layers, where the mask asks for them."""
    w = state.model_N[part.start : part.stop]
    if part.start >= params:
        w.add_(part.mean)  # buffers: averaged, never masked, never touched by the server's rule
        return
    assert part.votes is not None, "deltas are voted on"
    clients = len(delivery.used)
    mask = algorithm.mask.over(part.start, part.votes, clients, part.mean, part.square, votes)
    seen.kept.add_(mask.floor().sum())
    sizes = part.votes.abs_()  # nothing asks for their signs any more
    seen.votes.add_(add_votes(sizes))
    if seen.layers is not None:
        seen.layers.add(part.start, sizes, clients)
    mean = part.mean.mul_(delivery.steps) if algorithm.local.normalised else part.mean
    moments = {name: moment[part.own] for name, moment in state.moments.items()}
    algorithm.server.step(w, mean, mask, moments, state.round + 1)


def add_channel(channel: Channel, state: State, delivery: Delivery, tally: Tally, comm: Comm, params: int) -> None:
    """Add this rank's slice of a channel, which has been exchanged, to the vector that it is for."""
    to_model = channel.to == "model"
    target_N = state.model_N if to_model else state.shared[channel.name]
    for part in parts(comm, tally, params, delivery.weight if to_model else tally.total):
        if part.start < params:
            target_N[part.start : part.stop].add_(part.mean)


def take_meta_step(state: State, step: MetaStep, task: Task, tally: Tally, comm: Comm) -> None:
    """w -= lr * gradient of the mean loss on the meta set, in place. Collective.

    The set is cut into blocks that go round the ranks, and their gradients are summed exactly: the same bits on any
    number of ranks.
    """
    tally.clear(len(task.meta))
    bad = torch.zeros(1, dtype=torch.int64)
    for number, block in enumerate(even_chunks(len(task.meta), step.batch)):
        if number % comm.size == comm.rank:
            task.load(state.model_N, state.ints)  # for each block: it must not depend on the ones before it
            gradient_P = task.meta_gradient(block, state.round)
            try:
                tally.check(gradient_P)
            except Unusable:
                bad += 1
                continue
            tally.add(gradient_P, block.stop - block.start)
    comm.sum(bad)
    if bad:
        raise CommonError(
            f"round {state.round}: the gradient on the meta set is not a number or beyond {tally.limit:g}: the model "
            "has diverged; lower --meta.lr, --server.lr or --local.lr"
        )
    comm.exchange(*tally.kinds)
    for part in parts(comm, tally, task.layout.params, tally.total):
        if part.start < task.layout.params:
            state.model_N[part.start : part.stop].sub_(part.mean.mul_(step.lr))
    comm.gather(state.model_N)


def traffic(rule: LocalRule, length: int, params: int, ints: int, delivery: Delivery) -> tuple[int, int]:
    """Return the bytes that the clients of a round upload and download: what a server and devices would exchange.

    Every client drawn downloads the model with its buffers, in float32, and the vectors that all clients see. One that
    delivers uploads its delta, buffers included, and a vector per channel. Votes and squares are functions of a delta,
    so a mask adds nothing; a client's memory never travels; single numbers (samples, loss, steps) are not counted.
    """
    model, vector = 4 * length + 8 * ints, 4 * params
    shared = sum(channel.to == "shared" for channel in rule.sends)
    up = len(delivery.used) * (model + vector * len(rule.sends))
    return up, (len(delivery.used) + len(delivery.dropped)) * (model + vector * shared)


def sum_up(
    number: int, delivery: Delivery, seen: Seen, sound: bool, params: int, comm: Comm, sent: int, clock: Clock
) -> Report:
    """The report of a round, over all ranks; an error on all of them where the model is not `sound` on one.
    Collective."""
    microseconds = [round(clock.seconds[phase] * 1e6) for phase in PHASES]
    sound = sound and bool(seen.kept.isfinite())
    kept_here = int(seen.kept) if sound else 0
    by_layer = seen.layers.numbers() if seen.layers else []
    totals = torch.tensor([not sound, kept_here, int(seen.votes), sent, *microseconds, *by_layer], dtype=torch.int64)
    comm.sum(totals)
    spoilt, kept, votes, bytes_sent, *rest = totals.tolist()
    times, by_layer = rest[: len(PHASES)], rest[len(PHASES) :]
    if spoilt:
        raise CommonError(
            f"round {number}: mask and server's step left the model with NaN or infinity; lower --server.lr"
            " (--meta.lr, where there is a meta step)"
        )
    return Report(
        round=number,
        clients=len(delivery.used),
        dropped=delivery.dropped,
        train_loss=delivery.loss,
        kept=kept / params,
        agreement=votes / params / len(delivery.used),
        bytes_sent=bytes_sent,
        seconds={phase: t / comm.size / 1e6 for phase, t in zip(PHASES, times, strict=True)},
        measures=seen.layers.read(by_layer, len(delivery.used)) if seen.layers else {},
    )

"""One round, top to bottom, and the loop. Every rank runs the same code and no rank is special.

    sample    who trains, from (seed, round): no message
    train     this rank's clients, starting from the model; each update is added to the sums and forgotten
    agree     who delivered, with what weight: a few numbers
    exchange  the sums for this rank's slice: deltas and votes
    step      mask and server's step on this rank's slice, tile by tile
    gather    the slices become the whole model on every rank
    meta      if the algorithm has a meta step: one more gradient, over all ranks, and one more step

A client rule may ask for more: further vectors that are summed in the same exchange (channels), vectors that all
clients read (`State.shared`), and vectors that a client keeps for its next round (`State.memory`).

A client that raises, or whose update cannot be averaged, is logged and left out, and the weights are renormalised. A
round with fewer than `min_clients` fails on every rank with the same message, before the model is touched.

N: the full padded vector.  S: the slice this rank owns.  P: the trainable parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .aggregate.clock import PHASES
from .aggregate.compress import nothing_unsent
from .aggregate.exchange import Tile, exchange
from .aggregate.sums import Sums, Totals
from .algorithms import Algorithm
from .cohort import Work, draw
from .comm import Comm
from .comm.blocks import NodeBlocks
from .errors import CommonError, RunError, UserError
from .flat import Layout
from .local import LocalRule, Update
from .local.memory import Memory
from .meta import take_meta_step


@dataclass(frozen=True)
class State:
    """What outlives a round. It is consistent between rounds. The next round moves its tensors in place, so copy what
    you want to keep. `unsent` are this rank's rounding errors with `--wire bf16`: `sums` of every slice, in units of
    the mean, and `model` of its own slice."""

    round: int  # rounds done
    model_N: Tensor  # the whole model, the same on every rank
    ints: Tensor  # the model's integer buffers
    moments: dict[str, Tensor]  # the server's moments, of this rank's slice
    shared: dict[str, Tensor] = field(default_factory=dict)  # moved by channels, the same on every rank (SCAFFOLD's c)
    memory: Memory = field(default_factory=Memory)  # what the clients of this node have kept (SCAFFOLD's c_n)
    unsent: dict[str, Tensor] = field(default_factory=dict)

    def vectors(self, comm: Comm) -> dict[str, Tensor]:
        """Return this rank's part of every vector by its name in a checkpoint, as views."""
        found = {"model": comm.own(self.model_N)}
        found |= {f"moment.{name}": moment_S for name, moment_S in self.moments.items()}
        found |= {f"shared.{name}": comm.own(vector_N) for name, vector_N in self.shared.items()}
        return found | {f"unsent.{name}": vector for name, vector in self.unsent.items()}


@dataclass(frozen=True)
class Plan:
    """How rounds are run, with any algorithm."""

    seed: int
    rounds: int
    cohort: int
    work: Work
    sum: str = "exact"
    min_clients: int = 1
    wire: str = "float32"


@dataclass(frozen=True)
class Report:
    """The numbers of a round, the same on every rank; `seconds` are means over the ranks. `client_bytes_*` is what the
    clients would send to and receive from a server (`traffic`); None in records of older versions."""

    round: int
    clients: int
    dropped: tuple[int, ...]
    train_loss: float
    kept: float
    agreement: float
    bytes_sent: int  # what the ranks sent each other; 0 on one rank
    seconds: dict[str, float]
    bytes_between_nodes: int | None = None  # of these, what left a node
    client_bytes_up: int | None = None
    client_bytes_down: int | None = None
    test_metric: float | None = None  # the objective's metric on the test set, in rounds that are evaluated
    test_loss: float | None = None
    metric: str = "accuracy"  # what test_metric is
    measures: dict[str, Any] = field(default_factory=dict)  # further ones (--evaluate), by their names in metrics.jsonl

    @property
    def test_accuracy(self) -> float | None:
        """Return the test metric if it is the accuracy."""
        return self.test_metric if self.metric == "accuracy" else None


class Clients(Protocol):
    """This rank's view of the federation: it trains any client, on whatever device."""

    @property
    def sizes(self) -> np.ndarray:
        """Samples per client."""

    @property
    def layout(self) -> Layout:
        """Return where the model's tensors lie in the flat vector."""

    @property
    def sums_device(self) -> torch.device:
        """Where updates are delivered and summed, and the model is moved."""

    @property
    def meta_size(self) -> int:
        """Samples of the meta set."""

    def start(self) -> tuple[Tensor, Tensor]:
        """Return the model before the first round: the padded vector and the integer buffers."""

    def train(self, cids: Sequence[int], state: State, rule: LocalRule, work: Work) -> Iterator[Update]:
        """Train clients in the round after `state` and yield their updates. A client that fails is left out."""

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        """Return the gradient of the mean loss on a block of the meta set."""


class Observer(Protocol):
    """A measurement inside the round."""

    def on_tile(self, tile: Tile, mask: Tensor, clients: int) -> None:
        """Read a tile before the server's step; `tile.votes` are absolute values here."""


class Stats:
    """Counts over this rank's slice: elements with mask 1, and the sum of |votes|; integers in float64."""

    def __init__(self, device: torch.device) -> None:
        self.kept, self.votes = (torch.zeros((), dtype=torch.float64, device=device) for _ in range(2))

    def count(self, tile: Tile, mask: Tensor) -> None:
        """Count a tile; this makes its votes absolute, as nothing reads their signs any more."""
        self.kept.add_(mask.floor().sum())
        sizes = tile.votes.abs_()
        quick = sizes.dtype == torch.int8 and sizes.numel() * 127 < 2**24  # via float32 is faster, and still exact
        self.votes.add_(sizes.float().sum() if quick else sizes.sum(dtype=torch.int64))


def begin(
    clients: Clients, algorithm: Algorithm, comm: Comm, memory: Memory | None = None, wire: str = "float32"
) -> State:
    """Return the state before the first round: rank 0's model on every rank. Collective."""
    start_N, ints = clients.start()
    comm.broadcast(start_N)
    if ints.numel():
        comm.broadcast(ints)
    length, rule, device = start_N.numel() // comm.size, algorithm.local, clients.sums_device
    model_N = comm.vector(length, start_N.device)
    comm.own(model_N).copy_(comm.own(start_N))
    comm.gather(model_N)
    memory = Memory(rule.keeps, clients.layout.params) if memory is None else memory
    return State(
        round=0,
        model_N=model_N,
        ints=ints,
        moments={name: torch.full((length,), value, device=device) for name, value in algorithm.server.moments.items()},
        shared={c.name: comm.vector(length, start_N.device) for c in rule.sends if c.to == "shared"},
        memory=memory.connect(clients.sizes, NodeBlocks(comm)),
        unsent=nothing_unsent(start_N, length) if wire == "bf16" else {},
    )


def make_sums(plan: Plan, algorithm: Algorithm, clients: Clients, comm: Comm, model_N: Tensor) -> Sums:
    """Return the sums of a rank, which every round uses again. Collective."""
    return Sums(
        comm,
        clients.layout,
        algorithm.local,
        cohort=plan.cohort,
        clients=len(clients.sizes),
        kind=plan.sum,
        squares=algorithm.mask.second_moment,
        wire=plan.wire,
        meta=algorithm.meta is not None,
        device=clients.sums_device,
        model_N=model_N,
    )


def rounds(
    state: State, plan: Plan, algorithm: Algorithm, clients: Clients, comm: Comm, observers: Sequence[Observer] = ()
) -> Iterator[tuple[State, Report]]:
    """Train from `state` to the last round of the plan, yielding after each round. Collective."""
    sums = make_sums(plan, algorithm, clients, comm, state.model_N)
    while state.round < plan.rounds:
        try:
            state, report = run_round(state, plan, algorithm, clients, comm, sums, observers)
        except UserError as error:  # of a plug-in rule or mask, perhaps on this rank only
            raise RunError(f"round {state.round + 1}: {error}") from error
        yield state, report


@torch.no_grad()  # a job switches gradients on; a rule's own arithmetic must leave no graph in the sums
def run_round(
    state: State,
    plan: Plan,
    algorithm: Algorithm,
    clients: Clients,
    comm: Comm,
    sums: Sums,
    observers: Sequence[Observer] = (),
) -> tuple[State, Report]:
    """Run one round of any algorithm. Collective."""
    t = state.round + 1
    cohort = draw(plan.seed, t, clients.sizes, plan.cohort, comm.size, plan.work, state.memory.homes)
    state.memory.reserve(cohort.cids)  # before bytes are counted: ranks may meet to make rows
    sums.reset(cohort, t, state.ints)

    # 1. Train this rank's clients. Each update is added to the sums and forgotten.
    for update in clients.train(cohort.on(comm.rank), state, algorithm.local, plan.work):
        if sums.add(update):
            state.memory.stage(update.cid, update.result.keeps)

    # 2. Who delivered? The same integers on every rank, so all of them raise or none does.
    totals = sums.agree()
    totals.require(plan.min_clients, t)

    # 3. This rank's slice of mean and votes, tile by tile: mask, then step. Finished buckets travel meanwhile.
    stats = move_model(state, algorithm, totals, sums, observers)
    state = replace(state, round=t, ints=totals.ints)

    # 4. The slices are one model again. The meta step follows, and what clients keep becomes final.
    if algorithm.meta is not None and sums.meta is not None:
        with sums.clock("meta"):
            take_meta_step(state.model_N, state.ints, t, algorithm.meta, clients, sums.meta, comm)
    state.memory.commit(totals.used)
    return state, summarise(state, stats, totals, sums, comm)


def move_model(
    state: State, algorithm: Algorithm, totals: Totals, sums: Sums, observers: Sequence[Observer] = ()
) -> Stats:
    """Aggregate the sums of all ranks and move the model in place. Return counts of this rank's slice. Collective."""
    stats, t = Stats(state.model_N.device), state.round + 1
    for tile in exchange(sums, totals, state, algorithm.mask.layers):
        mask = algorithm.mask.over(tile.start, tile.votes, totals.clients, tile.mean, tile.square, tile.layers)
        stats.count(tile, mask)
        for observer in observers:
            observer.on_tile(tile, mask, totals.clients)
        mean = tile.mean.mul_(totals.steps) if algorithm.local.normalised else tile.mean
        algorithm.server.step(tile.params, mean, mask, tile.moments, t)
    return stats


def traffic(rule: LocalRule, layout: Layout, totals: Totals) -> tuple[int, int]:
    """Return the bytes that the clients of a round would upload to a server and download from it.

    Every client drawn downloads the model with its buffers, in float32, and the vectors that all clients read. One that
    delivers uploads its delta, buffers included, and a vector per channel. Single numbers are not counted.
    """
    model, vector = 4 * layout.length + 8 * totals.ints.numel(), 4 * layout.params
    shared = sum(channel.to == "shared" for channel in rule.sends)
    up = totals.clients * (model + vector * len(rule.sends))
    return up, (totals.clients + len(totals.dropped)) * (model + vector * shared)


def summarise(state: State, stats: Stats, totals: Totals, sums: Sums, comm: Comm) -> Report:
    """Return the report of a round over all ranks; all of them raise if the model is not finite on one. Collective."""
    sound = bool(comm.own(state.model_N).sum().isfinite()) and bool(stats.kept.isfinite())
    kept = int(stats.kept) if sound else 0
    microseconds = [round(sums.clock.seconds[phase] * 1e6) for phase in PHASES]
    sent, away = comm.sent - sums.sent_before[0], comm.away - sums.sent_before[1]
    counts = torch.tensor([not sound, kept, int(stats.votes), sent, away, *microseconds], dtype=torch.int64)
    comm.sum(counts)
    spoilt, kept, votes, bytes_sent, bytes_away, *times = counts.tolist()
    if spoilt:
        raise CommonError(
            f"round {state.round}: mask and server's step left the model with NaN or infinity; lower --server.lr"
            " (--meta.lr, where there is a meta step)"
        )
    up, down = traffic(sums.rule, sums.layout, totals)
    return Report(
        round=state.round,
        clients=totals.clients,
        dropped=totals.dropped,
        train_loss=totals.loss,
        kept=kept / sums.layout.params,
        agreement=votes / sums.layout.params / totals.clients,
        bytes_sent=bytes_sent,
        bytes_between_nodes=bytes_away,
        seconds={phase: t / comm.size / 1e6 for phase, t in zip(PHASES, times, strict=True)},
        client_bytes_up=up,
        client_bytes_down=down,
    )

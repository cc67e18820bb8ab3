"""`fedmpi plan`: forecast traffic, memory and load balance of a run on any number of ranks, without starting them.

It follows a run as far as one process can: the same checks, data, split and model, the cohorts of the first rounds,
and then the very code that sends and counts bytes, on torch's `meta` device: a transport that knows its rank and size,
hands out tensors without memory, and sends nothing. The memory of the program, of a client's step and of an evaluation
batch is measured by trying them once in this process.

N: a full padded vector.  S: the slice that a rank owns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from ..aggregate.compress import Compressor
from ..aggregate.sums import Accumulator, Sums, Totals
from ..algorithms import Algorithm
from ..clients.task import Task
from ..clients.training import Start, Trainer
from ..cohort import Cohort, Work, draw, load
from ..comm import Comm, Rows, SoloComm, Update, Wait
from ..comm.node import Node
from ..data import Arrays, Data, Partition
from ..errors import UserError, one_line
from ..experiments.tables import Table, lines
from ..local import LocalRule
from ..local import Update as ClientUpdate
from ..meta import take_meta_step
from ..plugins.knobs import knob
from ..rounds import Plan, State, begin, make_sums, move_model
from ..runs.build import RunSpec, load_data, make_task, plan_of, prepare
from ..runs.config import Config
from ..runs.log import set_up
from ..runs.malloc import keep_freed_memory
from ..runs.options import HELP, flag, parse, read_options, several
from ..runs.run import header
from ..runs.text import amount
from ..server import ServerRule

META = torch.device("meta")
DRAWN = 50  # rounds whose cohorts are drawn
STEPS = 2  # steps of the client that is tried
WAITS = 0.1  # share of local training that ranks may wait without a warning
MOST_RANKS = 1 << 16
ABOUT = """Forecast a run on any number of ranks without starting them: bytes sent per round, memory per rank and node,
and how evenly the clients are spread."""
NOTES = "All options of 'fedmpi train' can be given too; see 'fedmpi train --help'. Nothing is written."


@dataclass(frozen=True)
class PlanOptions:
    """Options of `fedmpi plan` besides those of `train`."""

    ranks: list[int] = several("N", type=int)
    """World sizes to forecast."""
    ranks_per_node: int = knob(1, low=1, high=MOST_RANKS)
    """Ranks that share a node."""
    json: bool = flag()
    """Print one JSON object per world size, with sizes in bytes."""


@dataclass(frozen=True)
class Sent:
    """Bytes sent per round, counted as in a run's metrics."""

    total: int
    """by all ranks, including to ranks of the same node"""
    away: int
    """of these, to other nodes"""
    most: int
    """by the rank that sends the most"""


@dataclass(frozen=True)
class Size:
    """Bytes of memory: of a rank (its resident set), and of a node, where shared memory counts once."""

    rank: int
    node: int


@dataclass(frozen=True)
class Balance:
    """How clients are spread over the ranks in the rounds that were drawn."""

    clients: float
    """mean number per rank"""
    most: int
    """largest number on a rank in a round"""
    empty: float
    """mean number of ranks without a client"""
    ratio: float
    """largest load of a rank over the mean: the median of the rounds"""
    worst: float
    """the same: the largest of the rounds"""

    @property
    def waiting(self) -> float:
        """Return the share of local training that ranks wait for the slowest one."""
        return 1 - 1 / self.ratio


@dataclass(frozen=True)
class Forecast:
    """The forecast for one world size."""

    ranks: int
    nodes: int
    ranks_per_node: int
    sent: Sent
    balance: Balance
    memory: Mapping[str, Size]
    warnings: tuple[str, ...] = ()

    @property
    def rank_bytes(self) -> int:
        return sum(size.rank for size in self.memory.values())

    @property
    def node_bytes(self) -> int:
        return sum(size.node for size in self.memory.values())

    def as_json(self) -> str:
        """Return the forecast as one line of JSON."""
        record = dataclasses.asdict(self) | {"rank_bytes": self.rank_bytes, "node_bytes": self.node_bytes}
        record["balance"]["waiting"] = self.balance.waiting
        return json.dumps(record)


# Dry run: traffic, and memory of the state and the sums


class DryNode(Node):
    """A node without shared memory that knows how many ranks would map each tensor."""

    def __init__(self, comm: Comm, nodes: list[list[int]]) -> None:
        super().__init__(comm, nodes, Path())
        self.mapped: dict[int, tuple[Tensor, int]] = {}

    def _share(self, make: dict[str, int], find: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor] | None:
        maps = {name: torch.empty(length, dtype=dtype, device=META) for name, length in (make | find).items()}
        for name, tensor in maps.items():
            self.mapped[id(tensor)] = tensor, len(self.ranks) if name == "vector" else 2
        return maps


class DryComm(Comm):
    """A transport of one rank that sends nothing. `away` counts the bytes that would go to other nodes."""

    name = "plan"

    def __init__(self, rank: int, nodes: list[list[int]], shares: bool) -> None:
        super().__init__(rank, sum(map(len, nodes)))
        self.away = 0
        self.alone = len(nodes) == 1
        self.mates = next(ranks for ranks in nodes if rank in ranks)
        if shares and self.size > 1:
            self.node = DryNode(self, nodes)

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        self.away += sum(x.nbytes for to, x in send.items() if to not in self.mates)
        return lambda: None

    def _sum(self, x: Tensor) -> None:
        self.away += 0 if self.alone else 2 * x.nbytes * (self.size - 1) // self.size

    def _broadcast(self, x: Tensor, root: int) -> None:
        return

    def barrier(self) -> None:
        return

    def abort(self, code: int = 1) -> NoReturn:
        raise SystemExit(code)

    def mappers(self, x: Tensor) -> int:
        """Return how many ranks would map a tensor."""
        return self.node.mapped.get(id(x), (x, 1))[1] if isinstance(self.node, DryNode) else 1


class Blueprint:
    """Clients on the meta device, which has no memory. They never train."""

    def __init__(self, task: Task, ranks: int) -> None:
        self.layout = task.layout
        self.sizes = task.sizes
        self.meta_size = task.meta_size
        self.device = META
        self.length = task.layout.padded(ranks)
        self.ints = task.start()[1]

    def start(self) -> tuple[Tensor, Tensor]:
        return torch.empty(self.length, device=META), self.ints.clone()

    def train(self, cids: Sequence[int], state: State, rule: LocalRule, work: Work) -> Iterator[ClientUpdate]:
        return iter(())

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        return torch.empty(self.layout.params, device=META)


@dataclass(frozen=True)
class Dry:
    """The state and the sums of one rank, without memory."""

    comm: DryComm
    state: State
    sums: Sums

    @classmethod
    def make(cls, comm: DryComm, algorithm: Algorithm, task: Task, plan: Plan) -> Dry:
        clients = Blueprint(task, comm.size)
        state = begin(clients, algorithm, comm, wire=plan.wire)
        return cls(comm, state, make_sums(plan, algorithm, clients, comm, state.model_N))

    def round(self, algorithm: Algorithm, task: Task, cohort: Cohort) -> tuple[int, int]:
        """Return the bytes that this rank sends per round after local training, and how many go to other nodes."""
        comm, sent, away = self.comm, self.comm.sent, self.comm.away
        state, sums = self.state, self.sums
        sums.reset(cohort, 1, state.ints)
        ints = sums.agree().ints
        move_model(state, algorithm, Totals(cohort.total, 0.0, cohort.cids, (), ints), sums)
        if algorithm.meta is not None and sums.meta is not None:
            step = replace(algorithm.meta, batch=task.meta_size)  # one block, on rank 0: no gradient here
            clients = Blueprint(task, comm.size)
            take_meta_step(state.model_N, state.ints, 1, step, clients, sums.meta, comm)
        return comm.sent - sent, comm.away - away


def idle(algorithm: Algorithm) -> Algorithm:
    """Return the algorithm without its arithmetic: a user's own rules may not work on the meta device."""
    mask = replace(algorithm.mask, keep=lambda votes_S, *_: votes_S.float())
    return replace(algorithm, mask=mask, server=ServerRule(algorithm.server.moments, lambda *_: None))


def nodes_of(ranks: int, ranks_per_node: int) -> list[list[int]]:
    """Return the ranks of every node; the last may have fewer."""
    return [list(range(first, min(first + ranks_per_node, ranks))) for first in range(0, ranks, ranks_per_node)]


def dry_run(
    algorithm: Algorithm, task: Task, plan: Plan, nodes: list[list[int]], shares: bool, cohorts: list[Cohort]
) -> tuple[Sent, dict[str, Size]]:
    """Return what the ranks send per round (the mean of the cohorts), and the memory of rank 0.

    Ranks of nodes of the same size send the same, so one of each is tried, but never rank 0, which would have to
    compute the meta gradient.
    """
    algorithm, ranks = idle(algorithm), sum(map(len, nodes))
    counts = Counter(map(len, nodes))
    kinds = Counter(cohort.most_on_a_rank == 1 for cohort in cohorts)
    total = away = most = 0
    for size in counts:
        node = [ranks_here for ranks_here in nodes if len(ranks_here) == size][-1]
        dry = Dry.make(DryComm(node[-1], nodes, shares), algorithm, task, plan)
        for one_each, rounds in kinds.items():
            some = next(cohort for cohort in cohorts if (cohort.most_on_a_rank == 1) == one_each)
            sent, gone = dry.round(algorithm, task, some) if ranks > 1 else (0, 0)
            total += rounds * counts[size] * size * sent
            away += rounds * counts[size] * size * gone
            most = max(most, sent)
    first = Dry.make(DryComm(0, nodes, shares), algorithm, task, plan)
    return Sent(total // len(cohorts), away // len(cohorts), most), held(first, len(nodes[0]))


def held(dry: Dry, ranks_here: int) -> dict[str, Size]:
    """Return the memory of a rank's state and sums by purpose."""
    state, sums = dry.state, dry.sums
    groups: dict[str, Any] = {
        "model": state.model_N,
        "server's moments": state.moments,
        "shared vectors": state.shared,
        "sums": sums.deltas.sums,
        "votes": sums.deltas.votes,
        "squares": sums.deltas.squares,
        "channels": sums.channels,
        "meta gradient": sums.meta,
        "of the wire": (state, sums),  # everything that is in no other group
    }
    seen, sizes = set[int](), dict[str, Size]()
    for name, group in groups.items():
        rank = node = 0
        for tensor in tensors(group):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                rank += tensor.nbytes
                node += tensor.nbytes * ranks_here // dry.comm.mappers(tensor)
        sizes[name] = Size(rank, node)
    return {name: size for name, size in sizes.items() if size.rank}


def tensors(thing: Any) -> Iterator[Tensor]:
    """Yield every tensor of a state or of a rank's sums."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, State | Sums | Accumulator | Rows | Compressor | Update):
        yield from tensors(vars(thing))
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from tensors(one)


# Measured memory


def status(field: str) -> int:
    """Return a size of this process in bytes from /proc; 0 if there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


@torch.no_grad()
def try_step(spec: RunSpec, task: Task, plan: Plan) -> int:
    """Return the peak memory of a few client steps and one evaluation batch beyond what was in use before."""
    algorithm, cfg = spec.algorithm, spec.cfg
    state = begin(task, algorithm, SoloComm())
    task.delta_N.zero_()  # fresh memory takes no pages until it is written
    task.grad_P.zero_()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work = replace(plan.work, steps=STEPS)

    def train(place: Trainer, cid: int) -> ClientUpdate:
        job = place.job(Start(state.model_N, state.ints, 1, cid, work, state.shared, state.memory.read(cid)))
        return job.finish(algorithm.local(job))

    sizes = task.partition.sizes
    together = min(cfg.step.together, cfg.cohort)
    for _ in task.each(np.argsort(sizes)[-together:].tolist(), train):
        pass
    task.load(state.model_N, state.ints)
    for _ in task.score([slice(0, min(cfg.eval.batch, len(task.tests)))]):
        pass
    return max(status("VmHWM") - before, 0)


def data_sizes(data: Data, partition: Partition, ranks_here: int) -> dict[str, Size]:
    """Return the memory of the data, which is shared if mapped from a prepared file, and of the split."""
    sizes = {}
    if isinstance(data, Arrays):
        known = [t for t in vars(data).values() if isinstance(t, Tensor)]
        size = sum(t.nbytes for t in known)
        styles = sum(t.nbytes for t in (data.style, data.test_style) if t is not None)
        shared = size - styles if data.sha256 else 0
        sizes["data"] = Size(size, shared + (size - shared) * ranks_here)
    split = partition.offsets.nbytes + partition.sizes.nbytes + partition.order.nbytes
    return sizes | {"split": Size(split, split * ranks_here)}


def memory_sizes(cfg: Config, algorithm: Algorithm, params: int, most: int, nodes: list[list[int]]) -> dict[str, Size]:
    """Return the memory of the client states at the end of the run, up to --memory.limit; the rest is in files."""
    if not algorithm.local.keeps:
        return {}
    clients = min(cfg.clients, cfg.rounds * cfg.cohort)
    rows = math.ceil(clients / sum(map(len, nodes))) + most  # a round writes its own next to the old ones
    held_bytes = min(4 * params * len(algorithm.local.keeps) * rows, int(cfg.memory.limit * 2**30))
    return {"clients' memories": Size(held_bytes, held_bytes * len(nodes[0]))}


# Forecast


def balance_of(cohorts: list[Cohort], loads: list[list[int]], ranks: int) -> Balance:
    """Return how evenly the cohorts are spread over the ranks."""
    ratios: list[float] = []
    for cohort, each in zip(cohorts, loads, strict=True):
        busy = np.bincount(cohort.ranks, weights=each, minlength=ranks)
        ratios.append(float(busy.max() / busy.mean()))
    return Balance(
        clients=len(cohorts[0].cids) / ranks,
        most=max(cohort.most_on_a_rank for cohort in cohorts),
        empty=fmean(ranks - len(set(cohort.ranks)) for cohort in cohorts),
        ratio=median(ratios),
        worst=max(ratios),
    )


def warnings_of(cohort: int, balance: Balance, ranks: int) -> Iterator[str]:
    """Yield the warnings about a world size."""
    if ranks > cohort:
        yield (
            f"{balance.empty:.0f} of {ranks} ranks have no client in a round of {cohort}: use at most {cohort} ranks, "
            "or a larger --cohort"
        )
    elif balance.waiting > WAITS:
        yield f"ranks wait for {balance.waiting:.0%} of local training: use fewer ranks, or a larger --cohort"


def forecast(
    spec: RunSpec, task: Task, data: Data, options: PlanOptions, own: tuple[int, int], step: int
) -> Iterator[Forecast]:
    """Yield the forecast for each world size. `own`: the program's anonymous memory, and its pages of files; `step`:
    the memory of a client's step."""
    cfg, algorithm, layout = spec.cfg, spec.algorithm, task.layout
    plan = plan_of(spec)
    at_home = bool(algorithm.local.keeps)
    sizes = task.partition.sizes
    numbers = range(1, min(cfg.rounds, DRAWN) + 1)
    loads: list[list[int]] = []
    for ranks in options.ranks:
        nodes = nodes_of(ranks, options.ranks_per_node)
        local = len(nodes[0])
        cohorts = [draw(cfg.seed, n, sizes, cfg.cohort, ranks, plan.work, at_home) for n in numbers]
        loads = loads or [
            [load(plan.work, cfg.seed, n, cid, weight) for cid, weight in zip(one.cids, one.weights, strict=True)]
            for n, one in zip(numbers, cohorts, strict=True)
        ]
        balance = balance_of(cohorts, loads, ranks)
        shares = not on_gpu(cfg)
        sent, held_bytes = dry_run(algorithm, task, plan, nodes, shares, cohorts)
        vectors = 4 * (2 * layout.padded(ranks) + layout.params)
        saved = 0
        if cfg.checkpoint.keep:
            shared = sum(channel.to == "shared" for channel in algorithm.local.sends)
            saved = 4 * layout.padded(ranks) // ranks * (1 + len(algorithm.server.moments) + shared)
        memory = {
            "program": Size(sum(own), own[0] * local + own[1]),
            "a client's step": Size(step, step * local),
            **data_sizes(data, task.partition, local),
            "work vectors": Size(vectors, vectors * local),
            **held_bytes,
            **memory_sizes(cfg, algorithm, layout.params, balance.most, nodes),
            "checkpoint": Size(saved, saved * local),
        }
        yield Forecast(
            ranks=ranks,
            nodes=len(nodes),
            ranks_per_node=options.ranks_per_node,
            sent=sent,
            balance=balance,
            memory=memory,
            warnings=tuple(warnings_of(cfg.cohort, balance, ranks)),
        )


def on_gpu(cfg: Config) -> bool:
    """Return whether ranks would train on GPUs, where they share no memory."""
    return cfg.device.startswith("cuda") or (cfg.device == "auto" and torch.cuda.is_available())


# The command


def main(arguments: list[str]) -> int:
    """`fedmpi plan`: print a forecast for each world size; return the exit code."""
    set_up(rank=0, size=1)
    options, rest = read(arguments)
    spec = prepare(parse(rest))
    cfg = spec.cfg
    own = status("RssAnon"), status("RssFile")
    data, partition, meta = load_data(cfg)
    keep_freed_memory()
    torch.set_num_threads(cfg.threads or 1)
    spec, task = make_task(spec, data, partition, meta, 1, torch.device("cpu"))
    notes = []
    step = 0
    try:
        step = try_step(spec, task, plan_of(spec))
    except (Exception, SystemExit) as error:
        notes.append(f"a client's step could not be tried ({type(error).__name__}: {one_line(error)})")
    if not own[0]:
        notes.append("this system has no /proc/self/status: the memory of the program and of a step is not counted")
    if not isinstance(data, Arrays):
        notes.append("the memory of your Dataset and its --workers is not counted")
    if on_gpu(cfg):
        notes.append("memory was measured on the CPU; on a GPU vectors, data and activations are in its memory")
    found = list(forecast(spec, task, data, options, own, step))
    if options.json:
        print("\n".join(one.as_json() for one in found))
        return 0
    print(re.sub(r"; 1 rank [^,]*, \d+ threads? each", "", header(spec, task, SoloComm())) + "\n")
    print("\n".join([*table(found), "", *memory_table(found)]))
    notes = [f"{one.ranks} ranks: {text}" for one in found for text in one.warnings] + notes
    if notes:
        print("\n" + "\n".join(notes))
    return 0


def read(arguments: list[str]) -> tuple[PlanOptions, list[str]]:
    """Return the options of `plan`, and the rest for `train`."""
    known = {f"--{f.name}" for f in dataclasses.fields(PlanOptions)} | HELP
    own: list[str] = []
    rest: list[str] = []
    target = rest
    for word in arguments:
        option, equals, value = word.partition("=")
        if option.startswith("-"):
            option = option.replace("-", "_").replace("__", "--", 1) if option.startswith("--") else option
            target = own if option in known else rest
        if target is rest:
            rest.append(word)
        elif equals:
            own += [option, *value.split(",")]
        else:
            own.append(option)
    options = read_options(PlanOptions, own, "plan", ABOUT, usage="--ranks N [N ...] [options]", notes=NOTES)
    if not options.ranks:
        raise UserError("plan needs world sizes, such as --ranks 2 4 64")
    if not all(1 <= ranks <= MOST_RANKS for ranks in options.ranks):
        raise UserError(f"--ranks is {options.ranks}; each must be in [1, {MOST_RANKS}]")
    return options, rest


def table(found: list[Forecast]) -> list[str]:
    """Return the table of balance, traffic and memory, one line per world size."""
    head = ("ranks", "nodes", "clients/rank", "idle ranks", "largest/mean (worst)", "waiting", "sent/round")
    columns = (*head, "of it away", "most by a rank", "memory/rank", "memory/node")
    rows = []
    for one in found:
        spread, sent = one.balance, one.sent
        row = (
            str(one.ranks),
            str(one.nodes),
            f"{spread.clients:.3g} (most {spread.most})",
            f"{spread.empty:.4g}",
            f"{spread.ratio:.2f} ({spread.worst:.2f})",
            f"{spread.waiting:.0%}",
        )
        rows.append((*row, *map(amount, (sent.total, sent.away, sent.most, one.rank_bytes, one.node_bytes))))
    return lines(Table("", columns, rows))


def memory_table(found: list[Forecast]) -> list[str]:
    """Return the table of a rank's memory by purpose, one column per world size."""
    names = list(dict.fromkeys(name for one in found for name in one.memory))
    rows = [[name, *(amount(one.memory[name].rank) if name in one.memory else "-" for one in found)] for name in names]
    return lines(Table("", ("memory per rank", *(f"{one.ranks} ranks" for one in found)), rows))

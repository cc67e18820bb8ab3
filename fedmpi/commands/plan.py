"""The command `fedmpi plan`: what a run would send, hold and wait for on so many ranks, without starting them.

It goes the way of a run as far as one process can: the same checks, data, split and model, the draw of the first
rounds, and then the very code that moves and counts bytes, on torch's `meta` device: a transport that knows its rank
and its size, hands out tensors without memory, and sends nothing. What a program, a client's step and a scored block
take cannot be reckoned, so it is tried once, here, and read from the kernel's account of this process.

N: a full padded vector.  S: the slice that a rank owns.
"""

from __future__ import annotations

import dataclasses
import json
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
from ..local import LocalRule
from ..local.update import Update as ClientUpdate
from ..meta import take_meta_step
from ..rounds import Plan, State, begin, make_sums, move_model
from ..runs.build import Prepared, load_data, make_task, plan_of, prepare
from ..runs.config import Config
from ..runs.log import set_up
from ..runs.malloc import keep_freed_memory
from ..runs.options import parse
from ..runs.run import header
from ..runs.text import align, amount
from ..server import ServerRule

META = torch.device("meta")
DRAWN = 50  # rounds whose cohorts are looked at
MET = 5000  # rounds that are drawn to know which clients will have kept something; beyond it, all
STEPS = 2  # of the client that is tried
WAITS = 0.1  # the share of local training that ranks may wait, before it is told
MOST_RANKS = 1 << 16
SMALL = 1024  # elements of a slice, below which a message costs its latency and little else
ABOUT = """usage: fedmpi plan --ranks N [N ...] [--ranks_per_node N] [--json] [options of train]

What a run would be like on so many ranks, without starting them: the bytes that are sent in a round, the memory of a
rank and of a node, how many clients a rank has and how evenly they are spread, and what speaks against it.

  --ranks N [N ...]     world sizes to look at
  --ranks_per_node N    ranks that share a node (default: 1)
  --json                one JSON object for each world size, in bytes

Everything else is as for 'fedmpi train', whose --help lists it; nothing is written.
"""


@dataclass(frozen=True)
class Asked:
    """What `plan` is asked for, beside the run."""

    ranks: list[int]
    ranks_per_node: int = 1
    json: bool = False


@dataclass(frozen=True)
class Sent:
    """Bytes that are sent in a round, counted as in a run's metrics."""

    total: int
    """by all ranks, to others on the node too"""
    away: int
    """of these, to other nodes"""
    most: int
    """by the rank that sends most"""


@dataclass(frozen=True)
class Size:
    """Bytes of memory: of a rank (what its processes maps: its Rss), and of a node, where shared memory counts once."""

    rank: int
    node: int


@dataclass(frozen=True)
class Balance:
    """How clients are spread over the ranks, over the rounds that were drawn."""

    clients: float
    """a rank has on average"""
    most: int
    """that one rank has in a round"""
    empty: float
    """ranks without a client, on average"""
    ratio: float
    """the largest load of a rank over the mean: the median of the rounds"""
    worst: float
    """and the largest"""
    best: float
    """the median of what a placement that can cut no client in two could reach at best"""

    @property
    def waiting(self) -> float:
        """The share of local training that ranks wait for the last one."""
        return 1 - 1 / self.ratio


@dataclass(frozen=True)
class Forecast:
    """What is to be expected of one world size."""

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
        """One line."""
        record = dataclasses.asdict(self) | {"rank_bytes": self.rank_bytes, "node_bytes": self.node_bytes}
        record["balance"]["waiting"] = self.balance.waiting
        return json.dumps(record)


# ------------------------------------------------------------------------------------------------ a world of nobody


class DryNode(Node):
    """A node whose shared memory is none; it knows how many ranks would map each tensor."""

    def __init__(self, comm: Comm, nodes: list[list[int]]) -> None:
        super().__init__(comm, nodes, Path())
        self.mapped: dict[int, tuple[Tensor, int]] = {}

    def _share(self, make: dict[str, int], find: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor] | None:
        maps = {name: torch.empty(length, dtype=dtype, device=META) for name, length in (make | find).items()}
        for name, tensor in maps.items():
            self.mapped[id(tensor)] = tensor, len(self.ranks) if name == "vector" else 2
        return maps


class DryComm(Comm):
    """One rank's end of a line that nobody is on. `away` counts what would go to other nodes."""

    name = "plan"

    def __init__(self, rank: int, nodes: list[list[int]], shares: bool) -> None:
        super().__init__(rank, sum(map(len, nodes)))
        self.away, self.alone = 0, len(nodes) == 1
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
        """How many ranks would map a tensor."""
        return self.node.mapped.get(id(x), (x, 1))[1] if isinstance(self.node, DryNode) else 1


class Blueprint:
    """Clients on the meta device, which has no memory: they never train."""

    def __init__(self, task: Task, ranks: int) -> None:
        self.layout, self.sizes, self.meta_size, self.device = task.layout, task.sizes, task.meta_size, META
        self.length, self.ints = task.layout.padded(ranks), task.start()[1]

    def start(self) -> tuple[Tensor, Tensor]:
        return torch.empty(self.length, device=META), self.ints.clone()

    def train(self, cids: Sequence[int], state: State, rule: LocalRule, work: Work) -> Iterator[ClientUpdate]:
        return iter(())

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        return torch.empty(self.layout.params, device=META)


@dataclass(frozen=True)
class Dry:
    """A rank as it would be: its books and its state, without memory."""

    comm: DryComm
    state: State
    sums: Sums

    @classmethod
    def make(cls, comm: DryComm, algorithm: Algorithm, task: Task, plan: Plan) -> Dry:
        clients = Blueprint(task, comm.size)
        state = begin(clients, algorithm, comm, wire=plan.wire)
        return cls(comm, state, make_sums(plan, algorithm, clients, comm, state.model_N))

    def round(self, algorithm: Algorithm, task: Task, cohort: Cohort) -> tuple[int, int]:
        """The bytes that this rank sends in a round, and those of them that go to other nodes: all that `run_round`
        says to others once its clients have trained."""
        comm, sent, away = self.comm, self.comm.sent, self.comm.away
        state, sums = self.state, self.sums
        sums.reset(cohort, 1, state.ints)
        ints = sums.agree().ints
        move_model(state, algorithm, Totals(cohort.total, 0.0, cohort.cids, (), ints), sums)
        if algorithm.meta is not None and sums.meta is not None:
            step = replace(algorithm.meta, batch=task.meta_size)  # one block, which rank 0 has: no gradient here
            clients, params = Blueprint(task, comm.size), task.layout.params
            take_meta_step(state.model_N, state.ints, 1, step, clients, sums.meta, comm, params)
        return comm.sent - sent, comm.away - away


def idle(algorithm: Algorithm) -> Algorithm:
    """The same algorithm without its arithmetic, which a user's own may not be able to do without numbers."""
    mask = replace(algorithm.mask, keep=lambda votes_S, *_: votes_S.float())
    return replace(algorithm, mask=mask, server=ServerRule(algorithm.server.moments, lambda *_: None))


def nodes_of(ranks: int, ranks_per_node: int) -> list[list[int]]:
    """The ranks of every node; the last may have fewer."""
    return [list(range(first, min(first + ranks_per_node, ranks))) for first in range(0, ranks, ranks_per_node)]


def dry_run(
    algorithm: Algorithm, task: Task, plan: Plan, nodes: list[list[int]], shares: bool, cohorts: list[Cohort]
) -> tuple[Sent, dict[str, Size]]:
    """What the ranks send in a round (the mean of the cohorts), and the memory of rank 0, which receives for its node.

    Ranks of nodes of the same size send the same; one of each is looked at, and never rank 0, which would have to take
    the meta gradient.
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
    """The memory of a rank's state and books, by what it is for."""
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
        "of the wire": (state, sums),  # what is not in another group
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
    """Every tensor of a state or of a rank's books."""
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, State | Sums | Accumulator | Rows | Compressor | Update):
        yield from tensors(vars(thing))
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from tensors(one)


# ---------------------------------------------------------------------------------------------- memory by measuring


def status(field: str) -> int:
    """Bytes of this process by the kernel's account; 0 where there is none."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith(f"{field}:")), 0)


def program() -> tuple[int, int]:
    """What the program takes of this process: memory of its own, and pages of files, which the ranks of a node
    share."""
    return status("RssAnon"), status("RssFile")


def forget_peak() -> None:
    """Let the kernel's account of the peak begin anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


@torch.no_grad()
def try_step(prepared: Prepared, task: Task, plan: Plan) -> int:
    """The peak of memory beyond what there was while clients take a few steps and a block of the test set is scored:
    what the rule holds, what the model needs for its layers, and what libraries load when they are first used."""
    algorithm, cfg = prepared.algorithm, prepared.cfg
    state = begin(task, algorithm, SoloComm())
    task.delta_N.zero_()  # fresh memory is none before it is written
    task.grad_P.zero_()
    forget_peak()
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
    """The memory of the data: mapped from the prepared file, or each rank's own; and of the split."""
    sizes = {}
    if isinstance(data, Arrays):
        known = [t for t in vars(data).values() if isinstance(t, Tensor)]
        size = sum(t.nbytes for t in known)
        styles = sum(t.nbytes for t in (data.style, data.test_style) if t is not None)
        shared = size - styles if data.sha256 else 0
        sizes["data"] = Size(size, shared + (size - shared) * ranks_here)
    split = partition.offsets.nbytes + partition.sizes.nbytes + partition.order.nbytes
    return sizes | {"split": Size(split, split * ranks_here)}


def memory_sizes(
    cfg: Config, algorithm: Algorithm, params: int, met: np.ndarray, most: int, nodes: list[list[int]]
) -> dict[str, Size]:
    """The memory of what clients keep, at the end of the run, up to the limit; the rest is in files."""
    row = 4 * params * len(algorithm.local.keeps)
    if not row:
        return {}
    ranks = sum(map(len, nodes))
    rows = np.bincount(met % ranks, minlength=ranks) + most  # those of a round are written beside the old ones
    limit = int(cfg.memory.limit * 2**30)
    held_bytes = np.minimum(rows * row, limit)
    here = [int(held_bytes[ranks_here].sum()) for ranks_here in nodes]
    return {"clients' memories": Size(int(held_bytes.max()), max(here))}


# ------------------------------------------------------------------------------------------------------- forecasting


def balance_of(cohorts: list[Cohort], loads: list[list[int]], ranks: int) -> Balance:
    """How evenly the cohorts are spread."""
    ratios, best, empty, most = [], [], [], 0
    for cohort, each in zip(cohorts, loads, strict=True):
        busy = np.bincount(cohort.ranks, weights=each, minlength=ranks)
        ratios.append(float(busy.max() / busy.mean()))
        best.append(max(1.0, max(each) / float(busy.mean())))
        empty.append(ranks - len(set(cohort.ranks)))
        most = max(most, cohort.most_on_a_rank)
    return Balance(len(cohorts[0].cids) / ranks, most, fmean(empty), median(ratios), max(ratios), median(best))


def warnings_of(cfg: Config, at_home: bool, balance: Balance, ranks: int, length: int) -> Iterator[str]:
    """What speaks against a world size, in words."""
    if ranks > cfg.cohort:
        yield (
            f"{balance.empty:.0f} of {ranks} ranks have no client in a round of {cfg.cohort}: use at most {cfg.cohort} "
            "ranks, or a larger --cohort"
        )
    elif balance.waiting > WAITS:
        share = f"ranks wait for {balance.waiting:.0%} of local training"
        if balance.best > 1 / (1 - WAITS):
            yield f"{share}, as the largest client of a round has more to do than a rank's part: use fewer ranks"
        elif at_home:
            yield f"{share}, as clients with a memory train where it is: use fewer ranks, or a larger --cohort"
        else:
            yield f"{share}: use fewer ranks, or a larger --cohort"
    if ranks > 1 and length // ranks < SMALL:
        yield f"a rank owns only {length // ranks} numbers of the model: messages cost their latency, not their bytes"


def forecast(
    prepared: Prepared, task: Task, data: Data, asked: Asked, own: tuple[int, int], step: int
) -> Iterator[Forecast]:
    """What is to be expected of each world size."""
    cfg, algorithm, layout = prepared.cfg, prepared.algorithm, task.layout
    plan, at_home = plan_of(prepared), bool(algorithm.local.keeps)
    sizes, numbers = task.partition.sizes, range(1, min(cfg.rounds, DRAWN) + 1)
    met = clients_met(cfg, sizes) if at_home else np.zeros(0, dtype=np.int64)
    loads: list[list[int]] = []
    for ranks in asked.ranks:
        nodes = nodes_of(ranks, asked.ranks_per_node)
        here = len(nodes[0])
        cohorts = [draw(cfg.seed, n, sizes, cfg.cohort, ranks, plan.work, at_home) for n in numbers]
        loads = loads or [
            [load(plan.work, cfg.seed, n, cid, weight) for cid, weight in zip(one.cids, one.weights, strict=True)]
            for n, one in zip(numbers, cohorts, strict=True)
        ]
        balance = balance_of(cohorts, loads, ranks)
        shares = not on_gpu(cfg)
        sent, books = dry_run(algorithm, task, plan, nodes, shares, cohorts)
        vectors = 4 * (2 * layout.padded(ranks) + layout.params)
        saved = 4 * layout.padded(ranks) // ranks * bool(cfg.checkpoint.keep)
        saved *= 1 + len(algorithm.server.moments) + sum(channel.to == "shared" for channel in algorithm.local.sends)
        memory = {
            "program": Size(sum(own), own[0] * here + own[1]),
            "a client's step": Size(step, step * here),
            **data_sizes(data, task.partition, here),
            "work vectors": Size(vectors, vectors * here),
            **books,
            **memory_sizes(cfg, algorithm, layout.params, met, balance.most, nodes),
            "checkpoint": Size(saved, saved * here),
        }
        told = tuple(warnings_of(cfg, at_home, balance, ranks, layout.length))
        yield Forecast(ranks, len(nodes), asked.ranks_per_node, sent, balance, memory, told)


def clients_met(cfg: Config, sizes: np.ndarray) -> np.ndarray:
    """The clients that take part in any round of the run; all of them where the rounds are very many."""
    if cfg.rounds > MET:
        return np.arange(cfg.clients)
    met = set[int]()
    for number in range(1, cfg.rounds + 1):
        met.update(draw(cfg.seed, number, sizes, cfg.cohort, 1, at_home=True).cids)
    return np.array(sorted(met))


def on_gpu(cfg: Config) -> bool:
    """Whether ranks would train on GPUs, where they share no memory."""
    return cfg.device.startswith("cuda") or (cfg.device == "auto" and torch.cuda.is_available())


# ------------------------------------------------------------------------------------------------------- the command


def main(arguments: list[str]) -> int:
    """`fedmpi plan`: print a forecast for each world size."""
    if not arguments or {"-h", "--help"} & set(arguments):
        print(ABOUT, end="")
        return 0 if arguments else 2
    set_up(rank=0, size=1)
    asked, rest = divided(arguments)
    prepared = prepare(parse(rest))
    cfg = prepared.cfg
    own = program()
    data, partition, meta = load_data(cfg)
    keep_freed_memory()
    torch.set_num_threads(cfg.threads or 1)
    prepared, task = make_task(prepared, data, partition, meta, 1, torch.device("cpu"))
    notes = []
    step = 0
    try:
        step = try_step(prepared, task, plan_of(prepared))
    except (Exception, SystemExit) as error:
        notes.append(f"a client's step could not be tried ({type(error).__name__}: {one_line(error)})")
    if not own[0]:
        notes.append("this system tells nothing of a process's memory: program and step are not counted")
    if not isinstance(data, Arrays):
        notes.append("what your Dataset and its --workers hold is not counted")
    if on_gpu(cfg):
        notes.append("memory was tried on the CPU; on a GPU vectors, data and a step's layers are in its memory")
    found = list(forecast(prepared, task, data, asked, own, step))
    if asked.json:
        print("\n".join(one.as_json() for one in found))
        return 0
    print(re.sub(r"; 1 rank [^,]*, \d+ threads? each", "", header(prepared, task, SoloComm())) + "\n")
    print(table(found) + "\n\n" + memory_table(found))
    words = [f"{one.ranks} ranks: {sentence}" for one in found for sentence in one.warnings] + notes
    print("".join(f"\n{sentence}" for sentence in words), end="\n" if words else "")
    return 0


def divided(arguments: list[str]) -> tuple[Asked, list[str]]:
    """The options of `plan`, and those of `train`."""
    ranks, per_node, as_json, rest = list[str](), "1", False, list[str]()
    words = list(arguments)
    while words:
        name, equals, value = words.pop(0).partition("=")
        option = name.replace("-", "_").replace("__", "--", 1)
        if option == "--ranks":
            ranks += value.split(",") if equals else []
            while not equals and words and not words[0].startswith("--"):
                ranks.append(words.pop(0))
        elif option == "--ranks_per_node":
            per_node = value if equals else words.pop(0) if words else ""
        elif option == "--json":
            as_json = True
        else:
            rest.append(name + equals + value)
    if not ranks:
        raise UserError("plan needs to know how many ranks; give world sizes, such as --ranks 2 4 64")
    asked = Asked([whole("--ranks", word) for word in ranks], whole("--ranks_per_node", per_node), as_json)
    return asked, rest


def whole(option: str, word: str) -> int:
    """A number of ranks."""
    if not word.isdecimal() or not 1 <= int(word) <= MOST_RANKS:
        raise UserError(f"{option} is '{word}'; it must be a whole number from 1 to {MOST_RANKS}")
    return int(word)


def table(found: list[Forecast]) -> str:
    """Bytes, memory and balance, a line for each world size."""
    head = ("ranks", "nodes", "clients a rank", "idle ranks", "largest/mean (worst)", "waiting", "sent a round")
    lines: list[tuple[str, ...]] = [(*head, "of it away", "a rank, most", "memory a rank", "a node")]
    for one in found:
        spread, sent = one.balance, one.sent
        lines.append(
            (
                str(one.ranks),
                str(one.nodes),
                f"{spread.clients:.3g} (most {spread.most})",
                f"{spread.empty:.4g}",
                f"{spread.ratio:.2f} ({spread.worst:.2f})",
                f"{spread.waiting:.0%}",
                *(amount(value) for value in (sent.total, sent.away, sent.most, one.rank_bytes, one.node_bytes)),
            )
        )
    return "\n".join(align(lines, "lr"))


def memory_table(found: list[Forecast]) -> str:
    """What the memory of a rank is for."""
    names = list(dict.fromkeys(name for one in found for name in one.memory))
    lines: list[tuple[str, ...]] = [("memory of a rank, of", *(str(one.ranks) for one in found))]
    for name in names:
        lines.append((name, *(amount(one.memory[name].rank) if name in one.memory else "-" for one in found)))
    return "\n".join(align(lines, "lr"))

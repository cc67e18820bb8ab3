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
from ..aggregate.travel import Parcels, Scattered
from ..algorithms import Algorithm
from ..clients.task import Task
from ..clients.training import Start, Trainer
from ..cohort import Cohort, Work, draw, find_homes, load
from ..comm import Comm, Rows, SoloComm, Update, Wait
from ..comm.links import Links
from ..comm.node import Node
from ..data import Arrays, Data
from ..errors import UserError
from ..local import LocalRule
from ..local import Update as ClientUpdate
from ..meta import take_meta_step
from ..plugins.knobs import knob
from ..rounds import Plan, State, begin, make_sums, move_model
from ..runs.build import RunSpec, load_data, make_memory, make_task, plan_of, prepare
from ..runs.log import set_up
from ..runs.malloc import keep_freed_memory
from ..runs.options import HELP, flag, parse, read_options, several
from ..runs.run import header
from ..runs.text import align, amount
from ..server import ServerRule

META = torch.device("meta")
DRAWN = 50  # rounds whose cohorts are drawn
STEPS = 2  # steps of the client that is tried
MOST_RANKS = 1 << 16
ABOUT = """Forecast a run on any number of ranks without starting them: bytes sent per round, memory per rank and node,
and how evenly the clients are spread."""
Size = dict[str, int]  # bytes of memory: of a "rank" (its resident set), of a "node" (shared memory counts once)
NOTES = """All options of 'fedmpi train' can be given too; see 'fedmpi train --help'. Nothing is written. Memory is
measured on the CPU; that of your own Dataset and its --workers is not counted."""


@dataclass(frozen=True)
class PlanOptions:
    """Options of `fedmpi plan` besides those of `train`."""

    ranks: list[int] = several("N", type=int)
    """World sizes to forecast."""
    ranks_per_node: int = knob(1, low=1, high=MOST_RANKS)
    """Ranks that share a node."""
    gbit: list[float] = several("RATE", type=float)
    """Also print how long a node's link takes per round, at these rates in Gbit/s."""
    json: bool = flag()
    """Print one JSON object per world size, with sizes in bytes."""


# Dry run: traffic, and memory of the state and the sums


class DryNode(Node):
    """A node without shared memory that knows how many ranks would map each tensor."""

    def __init__(self, comm: Comm) -> None:
        super().__init__(comm, comm.links, Path())
        self.mapped: dict[int, tuple[Tensor, int]] = {}

    def _share(self, make: dict[str, int], find: dict[str, int], dtype: torch.dtype) -> dict[str, Tensor] | None:
        maps = {name: torch.empty(length, dtype=dtype, device=META) for name, length in (make | find).items()}
        for name, tensor in maps.items():
            self.mapped[id(tensor)] = tensor, len(self.ranks) if name == "vector" else 2
        return maps

    def private(self, elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(elements, dtype=dtype, device=META)


class DryComm(Comm):
    """A transport of one rank that sends nothing."""

    name = "plan"

    def __init__(self, rank: int, nodes: list[list[int]], shares: bool) -> None:
        super().__init__(rank, sum(map(len, nodes)))
        self.links, self.shares = Links(rank, nodes), shares
        if shares and self.size > 1:
            self.node = DryNode(self)

    def reduces(self, device: torch.device) -> bool:
        return not self.shares

    def _start(self, send: Mapping[int, Tensor], recv: Mapping[int, Tensor]) -> Wait:
        return lambda: None

    def _start_reduce(self, block: Tensor, sum: Tensor) -> Wait:
        return lambda: None

    def _start_gather(self, x_N: Tensor, own: Tensor) -> Wait:
        return lambda: None

    def _sum(self, x: Tensor) -> None:
        return

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
        self.layout, self.sizes, self.meta_size, self.sums_device = task.layout, task.sizes, task.meta_size, META
        self.length = task.layout.padded(ranks)
        self.ints = task.start()[1]

    def start(self) -> tuple[Tensor, Tensor]:
        return torch.empty(self.length, device=META), self.ints.clone()

    def train(self, cids: Sequence[int], state: State, rule: LocalRule, work: Work) -> Iterator[ClientUpdate]:
        return iter(())

    def meta_gradient(self, model_N: Tensor, ints: Tensor, block: slice, round: int) -> Tensor:
        return torch.empty(self.layout.params, device=META)


class DryRank:
    """The state and the sums of one rank, without memory."""

    def __init__(self, comm: DryComm, algorithm: Algorithm, task: Task, plan: Plan) -> None:
        mask = replace(algorithm.mask, keep=lambda votes_S, *_: votes_S.float())
        server = ServerRule(algorithm.server.moments, lambda *_: None)
        self.algorithm = replace(algorithm, mask=mask, server=server)  # own rules may not work on the meta device
        self.comm, self.clients = comm, Blueprint(task, comm.size)
        self.state = begin(self.clients, self.algorithm, comm, wire=plan.wire)
        self.sums = make_sums(plan, self.algorithm, self.clients, comm, self.state.model_N)

    def round(self, cohort: Cohort) -> tuple[int, int]:
        """Return the bytes that this rank sends per round after local training, and how many go to other nodes."""
        comm, state, sums, meta = self.comm, self.state, self.sums, self.algorithm.meta
        sent, away = comm.sent, comm.away
        sums.reset(cohort, 1, state.ints)
        ints = sums.agree().ints
        move_model(state, self.algorithm, Totals(cohort.total, 0.0, cohort.cids, (), ints), sums)
        if meta is not None and sums.meta is not None:
            step = replace(meta, batch=self.clients.meta_size)  # one block, on rank 0: no gradient here
            take_meta_step(state.model_N, state.ints, 1, step, self.clients, sums.meta, comm)
        return comm.sent - sent, comm.away - away

    def memory(self) -> dict[str, Size]:
        """Return the memory of the state and the sums by purpose."""
        state, sums = self.state, self.sums
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
                    node += tensor.nbytes * len(self.comm.links.mates) // self.comm.mappers(tensor)
            if rank:
                sizes[name] = {"rank": rank, "node": node}
        return sizes


def tensors(thing: Any) -> Iterator[Tensor]:
    """Yield every tensor of a state or of a rank's sums; of views the tensor that has the memory."""
    if isinstance(thing, Tensor):
        yield thing if thing._base is None else thing._base
    elif isinstance(thing, State | Sums | Accumulator | Rows | Compressor | Update | Parcels | Scattered):
        yield from tensors(vars(thing))
    elif isinstance(thing, dict):
        yield from tensors(list(thing.values()))
    elif isinstance(thing, list | tuple):
        for one in thing:
            yield from tensors(one)


def nodes_of(ranks: int, ranks_per_node: int) -> list[list[int]]:
    """Return the ranks of every node; the last may have fewer."""
    return [list(range(first, min(first + ranks_per_node, ranks))) for first in range(0, ranks, ranks_per_node)]


def bytes_sent(
    algorithm: Algorithm, task: Task, plan: Plan, nodes: list[list[int]], shares: bool, cohorts: list[Cohort]
) -> dict[str, int]:
    """Return the bytes sent per round (the mean of the cohorts), as a run counts them: the total of all ranks, what of
    it goes away to other nodes, the most by one rank, and the most that leaves one node.

    Ranks that carry equally many slices on nodes of the same size send the same, but for odd bytes at the end of the
    parameters; so do rounds in which the same number of clients share a node. One of each is tried.
    """
    if len(nodes) == len(nodes[0]) == 1:
        return {"total": 0, "away": 0, "most": 0, "node": 0}
    total = away = most = node = 0
    links = Links(0, nodes) if shares else Links.apart(0, sum(map(len, nodes)))
    for size, count in Counter(map(len, nodes)).items():
        ranks = next(ranks for ranks in nodes if len(ranks) == size)
        more = (links.size - size) % size  # so many ranks carry one slice more than the others
        tried = {place: DryRank(DryComm(ranks[place], nodes, shares), algorithm, task, plan) for place in {0, size - 1}}
        known: dict[int, dict[int, tuple[int, int]]] = {}
        for cohort in cohorts:
            together = cohort.most_on_a_node(links.node_of)
            if together not in known:
                known[together] = {place: rank.round(cohort) for place, rank in tried.items()}
            sent = known[together]
            here = [sent[0 if place < more else size - 1] for place in range(size)]
            total += count * sum(one for one, _ in here)
            away += count * sum(one for _, one in here)
            most = max(most, *(one for one, _ in here))
            node = max(node, sum(one for _, one in here))
    return {"total": total // len(cohorts), "away": away // len(cohorts), "most": most, "node": node}


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
    """Return the peak memory of a few client steps and one evaluation batch beyond what was in use before: also pages
    of the delta and of the gradient that nothing wrote to before."""
    algorithm, cfg = spec.algorithm, spec.cfg
    state = begin(task, algorithm, SoloComm())
    if algorithm.meta is not None:
        task.grad_T.zero_()  # a meta step writes to it
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    work = replace(plan.work, steps=STEPS)

    def train(place: Trainer, cid: int) -> ClientUpdate:
        job = place.job(Start(state.model_N, state.ints, 1, cid, work, state.shared, state.memory.read(cid)))
        return job.deliver(algorithm.local(job))()

    together = min(cfg.step.together, cfg.cohort)
    for _ in task.each(np.argsort(task.partition.sizes)[-together:].tolist(), train):
        pass
    task.load(state.model_N, state.ints)
    for _ in task.score([slice(0, min(cfg.eval.batch, len(task.tests)))]):
        pass
    return max(status("VmHWM") - before, 0)


# Forecast


def spread(cohorts: list[Cohort], plan: Plan, ranks: int) -> dict[str, float]:
    """Return how evenly the cohorts are spread over the ranks: the mean number of clients of a rank, the largest one,
    the mean number of ranks without a client, and the largest load of a rank over the mean (median and worst)."""
    ratios = []
    for t, cohort in enumerate(cohorts, start=1):
        loads = [load(plan.work, plan.seed, t, cid, w) for cid, w in zip(cohort.cids, cohort.weights, strict=True)]
        busy = np.bincount(cohort.ranks, weights=loads, minlength=ranks)
        ratios.append(float(busy.max() / busy.mean()))
    return {
        "clients": len(cohorts[0].cids) / ranks,
        "most": max(cohort.most_on_a_rank for cohort in cohorts),
        "empty": fmean(ranks - len(set(cohort.ranks)) for cohort in cohorts),
        "ratio": median(ratios),
        "worst": max(ratios),
        "waiting": 1 - 1 / median(ratios),  # share of local training that ranks wait for the slowest one
    }


def data_size(data: Data, local: int) -> Size:
    """Return the memory of the data, which is shared if mapped from a prepared file."""
    if not isinstance(data, Arrays):
        return {"rank": 0, "node": 0}
    size = data.nbytes
    styles = sum(x.nbytes for x in (data.style, data.test_style) if x is not None)
    shared = size - styles if data.sha256 else 0
    return {"rank": size, "node": shared + (size - shared) * local}


def forecast(
    spec: RunSpec, task: Task, data: Data, ranks: int, ranks_per_node: int, own: tuple[int, int], step: int
) -> dict[str, Any]:
    """Return the forecast for one world size, as --json prints it. `own`: the program's anonymous memory, and its pages
    of files; `step`: the memory of a client's step, with its gradient and its delta."""
    nodes = nodes_of(ranks, ranks_per_node)
    cfg, algorithm, layout, plan = spec.cfg, spec.algorithm, task.layout, plan_of(spec)
    local, keeps = len(nodes[0]), algorithm.local.keeps
    shares = cfg.sums != "device"
    sizes = task.partition.sizes
    rounds = range(1, min(cfg.rounds, DRAWN) + 1)
    homes = find_homes(sizes, plan.work, nodes if shares else nodes_of(ranks, 1)) if keeps else None
    cohorts = [draw(cfg.seed, t, sizes, cfg.cohort, ranks, plan.work, homes) for t in rounds]
    balance = spread(cohorts, plan, ranks)

    def each(count: int) -> Size:
        return {"rank": count, "node": count * local}

    once = sum(part.stop - part.start for _, part in task.still.places()) if shares else 0
    still = {"rank": task.still.bytes, "node": once + (task.still.bytes - once) * local}
    tried = DryRank(DryComm(0, nodes, shares), algorithm, task, plan)
    tried.round(cohorts[0])  # makes the memory for what travels
    padded, vectors = layout.padded(ranks), len(algorithm.server.moments) + 1
    vectors += sum(channel.to == "shared" for channel in algorithm.local.sends)
    memory = {
        "program": {"rank": sum(own), "node": own[0] * local + own[1]},
        "a client's step": each(step),
        "data": data_size(data, local),
        "split": each(sum(x.nbytes for x in (task.partition.offsets, sizes, task.partition.order))),
        **({"frozen part": still} if task.still else {}),
        "work vector": each(4 * (padded + layout.private.length)),
        **tried.memory(),
        "checkpoint": each(4 * padded // ranks * vectors if cfg.checkpoint.keep else 0),
    }
    if homes is not None:  # at the end of the run, up to --memory.limit: the rest is in files
        mates = len(homes.nodes[0])  # in the end each of them has trained about every client of the node
        rows = math.ceil(min(cfg.clients, cfg.rounds * cfg.cohort) * mates / ranks)
        rows += min(int(balance["most"]) * mates, cfg.cohort)  # a round writes its own next to the old ones
        size = min(4 * sum(make_memory(spec, task).sizes) * rows, int(cfg.memory.limit * 2**30) * mates)
        memory["clients' memories"] = {"rank": size, "node": size * local // mates}
    return {
        "ranks": ranks,
        "nodes": len(nodes),
        "ranks_per_node": ranks_per_node,
        "sent": bytes_sent(algorithm, task, plan, nodes, shares, cohorts),
        "balance": balance,
        "memory": memory,
        "rank_bytes": sum(size["rank"] for size in memory.values()),
        "node_bytes": sum(size["node"] for size in memory.values()),
    }


# The command


def main(arguments: list[str]) -> int:
    """`fedmpi plan`: print a forecast for each world size; return the exit code."""
    set_up(rank=0, size=1)
    options, rest = read(arguments)
    spec = prepare(parse(rest))
    own = status("RssAnon"), status("RssFile")
    data, partition, meta = load_data(spec.cfg)
    keep_freed_memory()
    torch.set_num_threads(spec.cfg.threads or 1)
    spec, task = make_task(spec, data, partition, meta, 1, torch.device("cpu"))
    step = try_step(spec, task, plan_of(spec))
    found = [forecast(spec, task, data, ranks, options.ranks_per_node, own, step) for ranks in options.ranks]
    if options.json:
        print("\n".join(map(json.dumps, found)))
        return 0
    print(re.sub(r"; 1 rank [^,]*, \d+ threads? each", "", header(spec, task, SoloComm())) + "\n")
    print("\n".join([*table(found), "", *memory_table(found), *link_table(found, options.gbit)]))
    return 0


def read(arguments: list[str]) -> tuple[PlanOptions, list[str]]:
    """Return the options of `plan`, and the rest for `train`."""
    known = {f"--{f.name}" for f in dataclasses.fields(PlanOptions)} | HELP
    own: list[str] = []
    rest: list[str] = []
    target = rest
    for word in arguments:
        word = word.replace("--ranks-per-node", "--ranks_per_node")
        if word.startswith("-"):
            target = own if word.partition("=")[0] in known else rest
        target.append(word)
    options = read_options(PlanOptions, own, "plan", ABOUT, usage="--ranks N [N ...] [options]", notes=NOTES)
    if not options.ranks:
        raise UserError("plan needs world sizes, such as --ranks 2 4 64")
    if not all(1 <= ranks <= MOST_RANKS for ranks in options.ranks):
        raise UserError(f"--ranks is {options.ranks}; each must be in [1, {MOST_RANKS}]")
    if not all(0 < rate < math.inf for rate in options.gbit):
        raise UserError(f"--gbit is {options.gbit}; rates are in Gbit/s and above 0, such as 25 100 200")
    return options, rest


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return the table of balance, traffic and memory, one line per world size."""
    head = ("ranks", "nodes", "clients/rank", "idle ranks", "largest/mean (worst)", "waiting", "sent/round")
    rows = [[*head, "of it away", "most by a rank", "most by a node", "memory/rank", "memory/node"]]
    for one in found:
        balance = one["balance"]
        row = [str(one["ranks"]), str(one["nodes"]), f"{balance['clients']:.3g} (most {balance['most']})"]
        row += [f"{balance['empty']:.4g}", f"{balance['ratio']:.2f} ({balance['worst']:.2f})"]
        row.append(f"{balance['waiting']:.0%}")
        rows.append(row + [amount(count) for count in (*one["sent"].values(), one["rank_bytes"], one["node_bytes"])])
    return align(rows, "lr", rule=True)


def memory_table(found: list[dict[str, Any]]) -> list[str]:
    """Return the table of a rank's memory by purpose, one column per world size."""
    rows = [["memory per rank", *(f"{one['ranks']} ranks" for one in found)]]
    for name in dict.fromkeys(name for one in found for name in one["memory"]):
        rows.append([name, *(amount(one["memory"][name]["rank"]) if name in one["memory"] else "-" for one in found)])
    return align(rows, "lr", rule=True)


def link_table(found: list[dict[str, Any]], rates: list[float]) -> list[str]:
    """Return the table of the seconds that the link of a node is busy per round, one column per rate."""
    if not rates:
        return []
    rows = [["ranks", "nodes", "out of a node", *(f"at {rate:g} Gbit/s" for rate in rates)]]
    for one in found:
        out = one["sent"]["node"]
        times = [f"{8e-9 * out / rate:.3g} s" for rate in rates]
        rows.append([str(one["ranks"]), str(one["nodes"]), amount(out), *times])
    return ["", *align(rows, "lr", rule=True)]

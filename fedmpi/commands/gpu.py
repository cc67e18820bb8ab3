"""`fedmpi doctor --gpu`: a thorough check of the ranks' accelerators, in a few minutes.

    device    what each rank has: card, driver, libraries, and how it is shared
    fold      clients' deltas are added up on the device as on a CPU, to the bit
    client    a client that is trained twice, and on every rank, gives the same bits, and nearly those of a CPU
    alone     two rounds of a small run, by each rank for itself
    rounds    the same two rounds on all ranks together give the same model
    memory    a client that does not fit is reported as out of memory, and leaves nothing allocated
    times     the time of a fold, and of copies
    exchange  the time of a round's communication
    steps     the time and the peak memory of a training step, in every precision and as a graph

A section measures on every rank, then rank 0 judges the records of all ranks. The records are written to a file; what
was found ends up in a block to paste into an issue, without names of hosts and users, and without paths.
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import __version__
from ..aggregate.exchange import reduce
from ..aggregate.sums import SUMS, Accumulator
from ..clients.task import Task
from ..clients.training import Start
from ..comm import Comm, SoloComm, tell_all
from ..comm.env import Place
from ..data import Arrays
from ..data.sets.glyphs import glyphs
from ..device import (
    CPU,
    allocated_bytes,
    details,
    forget_peak,
    has_tf32,
    pins,
    properties,
    records_graphs,
    set_up,
    sums_device,
    synchronise,
)
from ..errors import CommonError, RunError, one_line
from ..local import Job, LocalResult, LocalRule
from ..rounds import State, begin
from ..runs.build import Overrides, RunSpec, load_data, make_task, prepare
from ..runs.folder import write
from ..runs.options import parse
from ..runs.run import run, trained_tensors
from ..runs.text import amount, plural
from .doctor import ABSENT, FAIL, OK, WARN, DoctorOptions, Finding, end_after, of_others, rendered

SMALL = "--split iid --clients 8 --cohort 4 --rounds 2 --local.steps 3 --local.batch 32 --eval.samples 200"
SMALL += " --log_to none --quiet true --checkpoint.keep 0"
ELEMENTS = 11_000_000  # of a ResNet-18
FOLDED = 100_003
WEIGHTS = (17, 300, 1, 54, 128)  # samples of the clients whose deltas are folded
TRAINED = ("lenet", "cnn", "gru")
RANDOM = ("cnn",)  # with dropout, whose draws on a device are not those of a CPU
TIMED = ("lenet", "resnet18-gn")
TOLERANCE = 1e-3  # of a client's training between a device and a CPU, as a part of what it changes
LAST_BITS = 1e-6
BUDGET = 0.5  # seconds that one measurement of time takes
REPEATS = 3  # of exchanges, which all ranks must do equally often
PATIENCE = 600.0  # seconds that a section may take
REPORT = "please report it with the block below"
DRILL = "fedmpi train --ranks 2 --rounds 200 --checkpoint.every 1 --out runs/drill, and 'kill -9' of one of its Python "
DRILL += "processes: it should restart by itself, and end with the model of an undisturbed run"
RULE = "-" * 80

Records = Mapping[str, list[Any]]  # section -> what it measured on each rank


@dataclass(frozen=True)
class Bench:
    """What a section measures on: this rank, its device and the other ranks."""

    comm: Comm
    place: Place
    device: torch.device
    options: DoctorOptions

    @property
    def sums_on(self) -> torch.device:
        """Where the sums of a run are."""
        return sums_device(self.device, self.options.sums)

    def spec(self, model: str, *options: str) -> RunSpec:
        """Return a small run that leaves nothing behind."""
        given = Overrides(sequences() if model == "gru" else glyphs(train=2000, test=200, writers=20))
        words = [*SMALL.split(), "--model", model, "--sums", self.options.sums, *options]
        return replace(prepare(parse(words), given), out=None)


def check(comm: Comm, place: Place, device: torch.device, options: DoctorOptions) -> Iterator[Finding]:
    """Run all sections; yield on rank 0 what they found, on every rank what failed there. Collective."""
    bench, records = Bench(comm, place, device, options), dict[str, list[Any]]()
    try:
        for name, (measure, judge) in SECTIONS.items():
            end_after(options.timeout + PATIENCE)
            record = None
            try:
                record = measure(bench)
            except Exception as error:
                if name in COLLECTIVE and isinstance(error, RunError) and not isinstance(error, CommonError):
                    raise  # the ranks are not connected any more
                yield Finding(FAIL, f"gpu {name}", f"raised {type(error).__name__}: {one_line(error)}", REPORT)
            records[name] = [json.loads(text) for text in tell_all(comm, json.dumps(record))]
            if comm.rank == 0 and None not in records[name]:
                yield from judge(records)
        if comm.rank == 0:
            yield Finding(ABSENT, "gpu drill", "a rank that dies: not tried here, where it would end the check", DRILL)
    finally:
        if comm.rank == 0:
            about: dict[str, Any] = {"fedmpi": __version__, "torch": torch.__version__}
            about |= {"python": platform.python_version(), "ranks": comm.size, "transport": comm.name}
            about["sums"] = bench.sums_on.type
            path = Path(options.gpu_out).expanduser()
            write(path, json.dumps({**about, **records}, indent=1) + "\n", mode=0o600)


# What a rank has


def measure_device(bench: Bench) -> dict[str, Any]:
    """Return what this rank's accelerator is."""
    return {"device": str(bench.device), **details(bench.device)}


def judge_device(records: Records) -> Iterator[Finding]:
    """Yield a line per rank, and one if the devices differ."""
    for rank, one in enumerate(records["device"]):
        memory, free = (amount(n) if isinstance(n, int) else n for n in (one["memory"], one["free"]))
        text = f"rank {rank}: {one['device']}, {one['name']}, capability {one['capability']}, UUID {one['uuid'][:12]}, "
        text += f"{memory} of memory, {free} free; "
        names = ("driver", "cuda", "hip", "cudnn", "nccl", "tf32", "mps", "mig", "compute_mode", "peers", "visible")
        yield Finding(OK, "gpu device", text + ", ".join(f"{name} {one[name]}" for name in names))
    for name in ("name", "driver", "cuda", "cudnn"):
        if len(found := {str(one[name]) for one in records["device"]}) > 1:
            fix = "equal bits need equal devices and libraries; choose nodes of one kind"
            yield Finding(WARN, "gpu device", f"ranks differ in {name}: {', '.join(sorted(found))}", fix)


# Sums


def measure_fold(bench: Bench) -> dict[str, Any]:
    """Return by how much sums on the device differ from those on a CPU, relative to them; 0.0 is not at all."""
    return {kind: difference(fold(kind, bench.device), fold(kind, CPU)) for kind in SUMS}


def fold(kind: str, device: torch.device) -> dict[str, Tensor]:
    """Return sums of a few random deltas, of any magnitude, and what follows from them."""
    draw = torch.Generator().manual_seed(0)
    sums = Accumulator(SoloComm(), FOLDED, len(WEIGHTS) + 1, kind, device, squares=FOLDED)
    sums.reset(total=sum(WEIGHTS) + 1)  # a client with one sample did not deliver
    signs = torch.randint(-1, 2, (FOLDED,), generator=draw)  # of a whole column, so that no sum is nearly zero
    for weight in WEIGHTS:
        magnitudes = 10.0 ** torch.randint(-12, 1, (FOLDED,), generator=draw)
        sums.add((torch.rand(FOLDED, generator=draw) * magnitudes * signs).to(device), weight)
    folded = {name: getattr(sums, name).mine[0].to(CPU) for name in ("sums", "votes", "squares")}
    buckets = reduce(SoloComm(), [(sums, sum(WEIGHTS))], FOLDED, most=len(WEIGHTS))
    folded["mean"] = torch.cat([tile.mean for _, (tiles,) in buckets for tile in tiles]).to(CPU)
    return folded


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative difference of an element."""
    pairs = [(found[name].double(), expected[name].double()) for name in expected]
    return max(float(((x - y).abs() / y.abs().clamp(min=1e-30)).max()) for x, y in pairs)


def judge_fold(records: Records) -> Iterator[Finding]:
    """Yield whether sums are those of a CPU."""
    for kind in SUMS:
        worst = max(one[kind] for one in records["fold"])
        text = f"{kind} sums of {FOLDED:,} elements on the device are those of a CPU"
        if worst == 0:
            yield Finding(OK, "gpu fold", f"{text}, to the bit")
        elif kind == "float32" and worst < LAST_BITS:
            fix = "use --sum exact (the default), or --sums host, if bits must not depend on the device"
            yield Finding(WARN, "gpu fold", f"{text} but for the last bits (by {worst:.1g})", fix)
        else:
            fix = "use --sums host, and please report it with the block below"
            yield Finding(FAIL, "gpu fold", f"{kind} sums on the device are wrong, by up to {worst:.1g}", fix)


# One client


@dataclass(frozen=True)
class Client:
    """A client of a small run, on a device."""

    spec: RunSpec
    task: Task
    state: State

    @classmethod
    def of(cls, spec: RunSpec, device: torch.device) -> Client:
        """Make a client, with the model that every rank begins with."""
        spec, task = make_task(spec, *load_data(spec.cfg, spec.given), 1, device)
        return cls(spec, task, begin(task, spec.algorithm, SoloComm()))

    @torch.no_grad()
    def train(self, rule: LocalRule | None = None) -> Tensor:
        """Return what the client's training changes."""
        updates = list(self.task.train([0], self.state, rule or self.spec.algorithm.local, self.spec.work))
        if not updates:
            raise RunError("the client's training failed; the log above says why")
        return updates[0].delta_N[: self.task.layout.length].to(CPU, copy=True)


def measure_client(bench: Bench) -> dict[str, Any]:
    """Return for each model the bits of a client's training, whether they repeat, and their distance to a CPU's."""
    found = {}
    for model in TRAINED:
        client = Client.of(bench.spec(model), bench.device)
        first, second = client.train(), client.train()
        found[model] = {"sha256": sha256([first]), "repeats": torch.equal(first, second)}
        if model not in RANDOM:
            cpus = Client.of(bench.spec(model), CPU).train()
            found[model]["distance"] = float((first - cpus).norm() / cpus.norm())
    return found


def judge_client(records: Records) -> Iterator[Finding]:
    """Yield whether training is repeatable, the same on every rank, and close to that of a CPU."""
    found = records["client"]
    unsteady = [model for model in TRAINED if not all(one[model]["repeats"] for one in found)]
    differ = [model for model in TRAINED if len({one[model]["sha256"] for one in found}) > 1]
    if unsteady:
        fix = "use another model, and please report it with the block below"
        yield Finding(FAIL, "gpu client", f"training a client twice gives other bits: {', '.join(unsteady)}", fix)
    elif differ:
        yield differing(records, f"training a client on another rank gives other bits: {', '.join(differ)}", "client")
    else:
        everywhere = f" and on {plural(len(found), 'rank')}" if len(found) > 1 else ""
        yield Finding(OK, "gpu client", f"a client trained twice{everywhere} has the same bits: {', '.join(TRAINED)}")
    far = {model: max(one[model]["distance"] for one in found) for model in TRAINED if model not in RANDOM}
    text = "from a client trained on a CPU: " + ", ".join(f"{model} {far[model]:.1e}" for model in far)
    if max(far.values()) <= TOLERANCE:
        yield Finding(OK, "gpu client", f"distance {text} (tolerance {TOLERANCE:g})")
    else:
        fix = "a kernel is wrong, or float32 is not float32: see TF32 above, and report it with the block below"
        yield Finding(FAIL, "gpu client", f"too far (more than {TOLERANCE:g}) {text}", fix)


# Whole rounds


def measure_alone(bench: Bench) -> dict[str, Any]:
    """Return the model of two rounds on this rank alone."""
    return run_small(bench, SoloComm())


def measure_rounds(bench: Bench) -> dict[str, Any]:
    """Return the model of two rounds on all ranks. Collective."""
    return run_small(bench, bench.comm)


def run_small(bench: Bench, comm: Comm) -> dict[str, Any]:
    """Run two rounds; return the SHA-256 of the model, and the seconds of the last one by phase. Collective."""
    outcome = run(bench.spec("lenet"), comm, bench.place, bench.device, os.environ)
    tensors = trained_tensors(outcome.task, outcome.state)
    return {"sha256": sha256(tensors.values()), "seconds": outcome.last.seconds}


def judge_alone(records: Records) -> Iterator[Finding]:
    """Yield nothing: the next section compares."""
    yield from ()


def judge_rounds(records: Records) -> Iterator[Finding]:
    """Yield whether the number of ranks makes a difference, and the phases of a round."""
    shas = {one["sha256"] for name in ("alone", "rounds") for one in records[name] if one is not None}
    ranks = len(records["rounds"])
    where = f"on one rank and on {ranks}" if ranks > 1 else "run twice"
    if len(shas) == 1:
        yield Finding(OK, "gpu rounds", f"two rounds {where} give the same model: {[*shas][0][:12]}")
    else:
        yield differing(records, f"two rounds {where} give different models", "rounds")
    phases = ", ".join(f"{phase} {in_ms(seconds)}" for phase, seconds in records["rounds"][0]["seconds"].items())
    yield Finding(OK, "gpu rounds", f"the second round by phases, mean of the ranks: {phases}")


def differing(records: Records, text: str, section: str) -> Finding:
    """Return the finding for bits that depend on the rank: a failure if all devices are of one kind."""
    if len({one and one["name"] for one in records["device"]}) > 1:
        return Finding(WARN, f"gpu {section}", text, "equal bits need devices of one kind")
    return Finding(FAIL, f"gpu {section}", text, REPORT)


# Times


def measure_steps(bench: Bench) -> dict[str, Any]:
    """Return for each model and way to compute a step its seconds and the peak of memory, or why it failed."""
    ways = {"float32": "--step.precision float32", "bf16": "--step.precision bf16"}
    ways |= {"tf32": "--step.precision tf32"} if has_tf32(bench.device) else {}
    ways |= {"graphs": "--step.graphs true"} if records_graphs(bench.device) else {}
    found: dict[str, Any] = {}
    for way, options in ways.items():
        for model in TIMED:
            try:
                found[f"{model} {way}"] = time_step(bench, bench.spec(model, *options.split()))
            except Exception as error:
                found[f"{model} {way}"] = {"failed": f"{type(error).__name__}: {one_line(error)}"}
    set_up(bench.device, deterministic=True)
    return found


def time_step(bench: Bench, spec: RunSpec) -> dict[str, float]:
    """Return the seconds of a step on a batch of 32, without the client's update, and the peak of memory."""
    set_up(bench.device, deterministic=True, precision=spec.cfg.step.precision)
    forget_peak(bench.device)
    client = Client.of(spec, bench.device)
    model_N, _, ints = client.task.fetch(client.state)
    batch = next(iter(client.task.job(Start(model_N, ints, 1, 0, spec.work)).batches()))
    seconds = timed(lambda: client.task.gradient(batch), bench.device)
    return {"seconds": seconds, "peak": allocated_bytes(bench.device, peak=True)}


def measure_times(bench: Bench) -> dict[str, Any]:
    """Return the seconds of a fold, and of copies to the device and from it."""
    device = bench.device
    found = {f"fold on {on.type}": time_fold(on) for on in (CPU, device)}
    host, there = torch.ones(ELEMENTS), torch.ones(ELEMENTS, device=device)
    for kind, x in {"pageable": host, **({"pinned": host.pin_memory()} if pins(device) else {})}.items():
        for name, to, source in (("up", there, x), ("down", x, there)):
            found[f"{name} {kind}"] = timed(partial(copy, to, source, device), device)
    return found


def copy(to: Tensor, source: Tensor, device: torch.device) -> None:
    """Copy a tensor to a device or from it, and wait."""
    to.copy_(source, non_blocking=True)
    synchronise(device)


def measure_exchange(bench: Bench) -> dict[str, Any]:
    """Return the seconds of an exchange where the sums of a run are. Collective."""
    return {"seconds": time_exchange(bench.comm, bench.sums_on)}


def time_fold(device: torch.device) -> float:
    """Return the seconds that adding one delta to the sums takes."""
    sums = Accumulator(SoloComm(), ELEMENTS, 10, "exact", device)
    sums.reset(total=2**40)
    delta = torch.full((ELEMENTS,), 0.01, device=device)
    return timed(lambda: sums.add(delta, 1), device)


def time_exchange(comm: Comm, device: torch.device) -> float:
    """Return the seconds of a round's communication: sums and votes to their owners, added up, and the model back.
    Collective."""
    length = -(-ELEMENTS // comm.size)
    sums, model_N = Accumulator(comm, length, 10, "exact", device), comm.vector(length, device)

    def once() -> None:
        for _, (tiles,) in reduce(comm, [(sums, 1)], length * comm.size, most=10):
            for _ in tiles:
                pass
        comm.gather(model_N)
        comm.barrier()

    once()
    synchronise(device)
    began = time.perf_counter()
    for _ in range(REPEATS):
        once()
    synchronise(device)
    return (time.perf_counter() - began) / REPEATS


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds that a call takes, with the device synchronised, after a call that warms up."""
    call()
    synchronise(device)
    began, calls = time.perf_counter(), 0
    while not calls or time.perf_counter() - began < BUDGET:
        call()
        calls += 1
    synchronise(device)
    return (time.perf_counter() - began) / calls


def judge_steps(records: Records) -> Iterator[Finding]:
    """Yield the times of steps, of the slowest rank."""
    for model in TIMED:
        told = []
        for name in (name for name in records["steps"][0] if name.startswith(f"{model} ")):
            found, way = [one[name] for one in records["steps"]], name.removeprefix(f"{model} ")
            if failed := [one["failed"] for one in found if "failed" in one]:
                level = FAIL if way == "float32" else WARN
                fix = "leave --step.graphs out" if way == "graphs" else f"use another --step.precision than {way}"
                yield Finding(level, "gpu steps", f"a step of {model}, {way}: {failed[0]}", f"{fix}; {REPORT}")
            else:
                seconds, peak = (max(one[what] for one in found) for what in ("seconds", "peak"))
                told.append(f"{way} {in_ms(seconds)} (peak {amount(peak)})")
        yield Finding(OK, "gpu steps", f"a step of {model} on 32 samples: {', '.join(told)}")


def judge_times(records: Records) -> Iterator[Finding]:
    """Yield the times of a fold and the speed of copies, of the slowest rank."""
    worst = {name: max(one[name] for one in records["times"]) for name in records["times"][0]}
    folds = ", ".join(f"{name} {in_ms(seconds)}" for name, seconds in worst.items() if name.startswith("fold"))
    speeds = {name: 4 * ELEMENTS / seconds / 1e9 for name, seconds in worst.items() if not name.startswith("fold")}
    copies = ", ".join(f"{name} {speed:.3g} GB/s" for name, speed in speeds.items())
    yield Finding(OK, "gpu times", f"{ELEMENTS:,} elements: {folds}; copies {copies}")


def judge_exchange(records: Records) -> Iterator[Finding]:
    """Yield the time of an exchange, of the slowest rank."""
    seconds = max(one["seconds"] for one in records["exchange"])
    ranks = plural(len(records["exchange"]), "rank")
    yield Finding(OK, "gpu exchange", f"{ELEMENTS:,} elements on {ranks}: sums, votes and model in {in_ms(seconds)}")


# Out of memory


def measure_memory(bench: Bench) -> dict[str, Any]:
    """Return what is said of a client that needs more memory than there is, and how many bytes stay allocated."""
    there_is = getattr(properties(bench.device), "total_memory", None)
    if there_is is None:
        return {}
    client, said = Client.of(bench.spec("lenet"), bench.device), ""

    def greedy(job: Job) -> LocalResult:
        return LocalResult(torch.empty(there_is + 2**30, dtype=torch.uint8, device=job.x_P.device))

    client.train()
    before = allocated_bytes(bench.device)
    try:
        client.train(LocalRule(greedy))
    except RunError as error:
        said = str(error)
    gc.collect()
    left = allocated_bytes(bench.device) - before
    client.train()  # as usual
    return {"said": said, "left": left}


def judge_memory(records: Records) -> Iterator[Finding]:
    """Yield whether out of memory is told as such, and does no harm."""
    for rank, one in enumerate(records["memory"]):
        if not one:
            text = f"rank {rank}: out of memory not tried, as the size of the memory is unknown"
            yield Finding(ABSENT, "gpu memory", text, "watch the log of the first run for out of memory")
        elif "out of memory" not in one["said"] or one["left"] > 0:
            text = (
                f"rank {rank}: of a client that does not fit is said '{one['said']}', and {amount(one['left'])} stay "
            )
            yield Finding(FAIL, "gpu memory", f"{text}allocated", REPORT)
        else:
            text = f"rank {rank}: a client that does not fit is reported as such, and leaves nothing allocated"
            yield Finding(OK, "gpu memory", text)


SECTIONS: dict[str, tuple[Callable[[Bench], dict[str, Any]], Callable[[Records], Iterator[Finding]]]] = {
    "device": (measure_device, judge_device),
    "fold": (measure_fold, judge_fold),
    "client": (measure_client, judge_client),
    "alone": (measure_alone, judge_alone),
    "rounds": (measure_rounds, judge_rounds),
    "memory": (measure_memory, judge_memory),
    "times": (measure_times, judge_times),
    "exchange": (measure_exchange, judge_exchange),
    "steps": (measure_steps, judge_steps),
}
"""section -> what it measures on every rank, and how rank 0 judges all records so far; the riskiest comes last"""
COLLECTIVE = ("rounds", "exchange")  # sections that measure on all ranks together


# Helpers


def sequences() -> Arrays:
    """Return sequences of tokens; the label is whether the first one is odd."""
    x = torch.randint(0, 12, (600, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    y = x[:, 0].long() % 2
    return Arrays("sequences", 2, x[:500], y[:500], x[500:], y[500:], tokens=12)


def sha256(tensors: Any) -> str:
    """Return the SHA-256 of the bits of tensors on the host."""
    sha = hashlib.sha256()
    for x in tensors:
        sha.update(x.contiguous().numpy())
    return sha.hexdigest()


def in_ms(seconds: float) -> str:
    """Return a time in milliseconds."""
    return f"{1000 * seconds:.3g} ms"


def block(everyone: list[list[Finding]], ranks: int) -> str:
    """Return what was found about accelerators, to paste into an issue: no names of hosts and users, no paths."""
    about = f"fedmpi {__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
    lines = [f"{about}{platform.system()} {platform.machine()}, {plural(ranks, 'rank')}"]
    found: list[tuple[Finding, list[int]]] = [(finding, []) for finding in everyone[0]] + list(
        of_others(everyone).items()
    )
    for finding, some in found:
        if finding.check in ("ranks", "devices") or finding.check.startswith("gpu "):
            lines.append(anonymous(rendered(replace(finding, fix=""), False, some)))
    return "\n".join([RULE, *lines, RULE])


def anonymous(text: str) -> str:
    """Return a text without absolute paths, without addresses, and without the names of this host and user."""
    text = re.sub(r"\[(?=[^\]]*[:.])[0-9a-fA-F:.]+\](:\d+)?|\b\d{1,3}(\.\d{1,3}){3}\b", "ADDRESS", text)
    text = re.sub(r"(?<![\w.])[~/][^\s,;:'\")]*/[^\s,;:'\")]*", "PATH", text)
    for name, mask in ((os.uname().nodename, "HOST"), (Path.home().name, "USER")):
        text = re.sub(rf"\b{re.escape(name)}\b", mask, text) if name else text
    return text

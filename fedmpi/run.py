"""One run, from a configuration to a folder with a trained model.

Everything a user can get wrong is found before the first round, and every rank raises the same sentence. A run that
finds a checkpoint of its own in its folder (folder.py) goes on from there; one that is asked to stop saves first.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import signal
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor, nn

from . import __version__, folder
from .algorithms import ALGORITHMS, Algorithm, Row, build, find_row, resolve
from .aliases import real_value
from .augment import make_augment
from .checkpoint import Facts, Found, Progress, Saver, find, restore
from .comm import Comm, agreed, common_trouble
from .config import Config, check, knobs
from .data import (
    DATASETS,
    SPLITS,
    Arrays,
    Data,
    Ints,
    Partition,
    check_weights,
    dress,
    find_data,
    hold_out,
    load,
    split,
)
from .data.splits import OWNERS
from .env import Place, available_cores, choose_device, describe, threads_per_rank
from .errors import CommonError, FileError, RunError, UserError, unknown
from .feed import make_feed
from .folder import CONFIG, FINISHED, MODEL, write
from .heap import keep_freed
from .local import RULES
from .log import Log, folded, record, report_of, sink_names
from .masks import MASKS, MaskKnobs
from .measure import Asked, ask, attack, check_folder, measure_names, scored
from .memory import Memory
from .metrics import Record, history, with_last
from .models import MODELS, ModelRow, find_model, make_model
from .objective import check_outputs, try_objective
from .paths import Path as StepPath
from .paths import check_step, faster_layout, try_path
from .paths import describe as describe_step
from .plugins import one_line
from .rounds import Plan, Report, State, begin, rounds
from .schema import Finished, read, read_yaml
from .seeds import torch_seed
from .server import VARIED
from .stop import Stop, Stopped, in_words
from .tally import SUMS, WIRES, check_wire
from .task import Task
from .together import Together
from .trial import try_algorithm, try_rule
from .work import Work, make_share

warnings = logging.getLogger("fedmpi")

USUAL = {"images": "lenet", "sequences": "gru", "numbers": "logistic"}
LABELLED = ("classes", "dirichlet", "mixed")  # the splits that deal by label
RESUME = ("auto", "never", "force")
LAYOUTS = ("auto", "contiguous", "channels_last", "try")
PRECISIONS = ("float32", "bf16")
COMPILED = ("none", "default", "reduce-overhead", "max-autotune")


@dataclasses.dataclass(frozen=True)
class Given:
    """What a caller in Python hands over itself, instead of its name."""

    data: Data | None = None
    model: nn.Module | None = None
    algorithm: Row | Algorithm | None = None

    @property
    def row(self) -> Row | None:
        """The row to fill knobs in from, where an algorithm was handed over; of an `Algorithm` none is read."""
        return OWN if isinstance(self.algorithm, Algorithm) else self.algorithm


OWN = Row("sgd", "sgd", mask="mean", tau=0.0)
NOTHING = Given()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A configuration that has been checked and whose names have been looked up."""

    cfg: Config
    algorithm: Algorithm
    model: ModelRow | None
    """None: handed over, or that which fits the data"""
    work: Work
    sinks: list[str]
    out: Path | None
    """None: nothing is written"""
    given: Given = NOTHING
    measures: tuple[str, ...] = ()
    """what else is measured (--evaluate)"""


def prepare(cfg: Config, given: Given = NOTHING) -> Prepared:
    """Check everything that needs neither data nor other ranks; a `UserError` names the first mistake."""
    check(cfg)
    cfg = by_real_names(cfg, given)
    check_threshold(cfg, given.row)
    cfg = resolve(cfg, given.row)
    try:
        check(cfg)  # once more, for what a row of the user's own has filled in
    except UserError as error:
        raise UserError(f"algorithm '{cfg.algorithm}': {error}") from None
    words: tuple[tuple[str, str, Iterable[str]], ...] = (
        ("split", cfg.split, SPLITS),
        ("sum", cfg.sum, SUMS),
        ("--wire", cfg.wire, WIRES),
        ("--step.layout", cfg.step.layout, LAYOUTS),
        ("--step.precision", cfg.step.precision, PRECISIONS),
        ("--step.compile", cfg.step.compile, COMPILED),
        ("--resume", cfg.resume, RESUME),
        ("way with owners (--skew.owners)", cfg.skew.owners, OWNERS),  # also where the split does not read it
    )
    for kind, name, table in words:
        if name not in table:
            raise unknown(kind, name, table)
    check_wire(cfg.sum, cfg.wire)
    check_step(cfg.step)
    if given.data is None and ":" not in cfg.data:
        row = find_data(cfg.data)
        cfg = replace(
            cfg, model=cfg.model or row.model, skew=replace(cfg.skew, classes=cfg.skew.classes or row.classes)
        )
    if cfg.augment is not None:
        make_augment(cfg.augment)
    if cfg.meta.weights is not None:
        check_weights(cfg.meta.weights)
    assert cfg.local.epochs is not None, "resolved above"
    work = Work(cfg.local.epochs, cfg.local.steps, cfg.local.batch, make_share(cfg.local.work))
    if cfg.out == "":
        raise UserError("--out is ''; name a folder, or leave it out")
    out = Path(default_folder(cfg, given.row) if cfg.out is None else cfg.out).expanduser()
    if isinstance(given.algorithm, Algorithm):
        algorithm = given.algorithm
        try_algorithm(algorithm)
    else:
        algorithm = build(cfg)
    model = None if cfg.model is None or given.model is not None else find_model(cfg.model)
    measures = tuple(measure_names(cfg.evaluate))
    return Prepared(cfg, algorithm, model, work, sink_names(cfg.log_to), out, given, measures)


def by_real_names(cfg: Config, given: Given) -> Config:
    """The configuration with the rows of our tables by their own names: FedAvg is fedavg, Fashion-MNIST fmnist."""
    tables: dict[str, Iterable[str]] = {"algorithm": ALGORITHMS, "mask": MASKS, "split": SPLITS, "model": MODELS}
    tables |= {} if given.data is not None else {"data": DATASETS}
    words: dict[str, Any] = {name: getattr(cfg, name) for name in tables}
    real: dict[str, Any] = {n: word and real_value(n, word, tables[n]) for n, word in words.items()}
    return replace(cfg, **real)


def check_threshold(cfg: Config, row: Row | None) -> None:
    """Refuse a threshold that nothing reads: no mask was named, and the algorithm averages plainly."""
    row = row or find_row(cfg.algorithm)
    if cfg.tau and cfg.mask is None and row.mask == "mean" and "agreement" not in measure_names(cfg.evaluate):
        raise UserError(
            f"--tau is {cfg.tau:g}, but {cfg.algorithm} averages plainly unless a mask is named; add --mask gma (or "
            "and, sand), or leave --tau out"
        )


def settle(cfg: Config, place: Place) -> torch.device:
    """Set this process up for a run: its threads and, on a GPU, repeatable kernels; returns its device."""
    torch.set_num_threads(threads_per_rank(place, cfg.threads, available_cores()))
    device = torch.device(choose_device(place, cfg.device, torch.cuda.device_count()))
    if cfg.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    return device


def default_folder(cfg: Config, row: Row | None = None) -> str:
    """runs/ and what the run is: algorithm, the rules that are not its own, mask, data, seed."""
    row = row or find_row(cfg.algorithm)
    others = [rule for rule, own in ((cfg.local.rule, row.local), (cfg.server.rule, row.server)) if rule != own]
    name = "-".join(map(str, [cfg.algorithm, *others, cfg.mask, cfg.data, cfg.seed]))
    return "runs/" + re.sub(r"[^\w.-]+", "-", name)


def run(
    prepared: Prepared,
    comm: Comm,
    place: Place,
    device: torch.device,
    environ: Mapping[str, str],
    signals: Iterable[signal.Signals] = (),
    began: float | None = None,
) -> Outcome:
    """Train, from the newest checkpoint where there is one, and leave a finished run folder; returns how it ended.
    Collective. Where one of the signals or the time budget, which counts from `began`, stops it, every rank raises
    `Stopped`."""
    cfg, out = prepared.cfg, prepared.out
    alike = replace(cfg, quiet=False, verbose=False)  # what a rank prints is its own affair
    same_everywhere("configuration", comm, json.dumps(dataclasses.asdict(alike), sort_keys=True).encode())
    check_threads(comm)
    check_folder(prepared.measures, out)
    with agreed(comm):
        if comm.rank == 0 and out is not None:
            folder.check(out)
            check_finished(out, cfg, environ)
    with agreed(comm):
        data, partition, meta = load_data(cfg, prepared.given.data)
    keep_freed(environ)
    if cfg.step.layout == "try":
        prepared = try_layouts(prepared, data, partition, meta, comm, device)
    with agreed(comm):
        prepared, task = make_task(prepared, data, partition, meta, comm.size, device)
        check_memory_folder(prepared)
        asked = ask(prepared.measures, data, task)
    cfg = prepared.cfg
    rule = "of your own" if isinstance(prepared.given.algorithm, Algorithm) else str(cfg.local.rule)
    if rule not in RULES:
        with agreed(comm):  # once every rank has its model: ranks that are threads share torch's generator
            try_rule(rule, prepared.algorithm.local, task, prepared.work)
    facts = facts_of(prepared, task, data, meta, device)
    compare_ranks(facts, comm)
    taken = ""
    with ExitStack() as stack:
        with agreed(comm):
            if comm.rank == 0 and out is not None:
                folder.make(out)
                try:
                    stack.enter_context(folder.held(out, place, environ, cfg.timeout))
                except RunError as error:
                    taken = str(error)
                else:
                    check_finished(out, cfg, environ)  # once more: it may have finished while this one waited
        if taken := common_trouble(comm, taken):
            raise CommonError(taken)
        found = find_start(out, cfg, facts, environ, comm)
        with agreed(comm):
            records = read_history(out, found)
        threads = torch.get_num_threads()  # in the configuration too: a run is repeated by its config.yaml
        facts = replace(facts, config={**facts.config, "threads": threads})
        settled = replace(cfg, threads=threads)
        with agreed(comm):
            if comm.rank == 0 and out is not None:
                environment = describe(place, environ, threads, str(device))
                done = found.round if found else 0

                def begin_folder() -> None:
                    if found is None:
                        folder.start_over(out)
                    describe_run(out, settled, data, partition, meta, environment)
                    folder.add_start(out, place, comm.name, done, environ)

                if trouble := folder.attempt(begin_folder):
                    raise FileError(folder.lost(out, trouble, done))
        note = f"\ndata: {data.note}" if data.note else ""
        note += f"\ngoing on after round {found.round} of the run in {out}" if found else ""
        with agreed(comm):
            done, told = found.round if found else 0, plain_knobs(settled)
            log = Log(
                out,
                cfg.rounds,
                prepared.sinks,
                speaks=comm.rank == 0,
                quiet=cfg.quiet,
                done=done,
                config=told,
                records=records,
                verbose=cfg.verbose,
                several=comm.size > 1,
                hidden=("kept",) if cfg.mask == "mean" and prepared.given.row is not OWN else (),  # all of it, always
            )
        stop = Stop(signals, cfg.max_minutes, began, speaks=comm.rank == 0)
        with log, stop, Saver(out, cfg.checkpoint, facts, comm, found) as saver:
            log.say(folded(header(prepared, task, comm) + note))
            outcome = train(prepared, task, comm, saver, stop, log, environ, found, asked, records)
        if out is not None and "membership" in prepared.measures:
            log.say(attack(out, prepared.given, comm))
    comm.barrier()
    return outcome


def train(
    prepared: Prepared,
    task: Task,
    comm: Comm,
    saver: Saver,
    stop: Stop,
    log: Log,
    environ: Mapping[str, str],
    found: Found | None,
    asked: Asked,
    records: Sequence[Record],
) -> Outcome:
    """The rounds that are left, each logged and, when it is time, saved; then the results. Collective."""
    cfg, out, first = prepared.cfg, prepared.out, comm.rank == 0
    plan = plan_of(prepared)
    state = begin(task, prepared.algorithm, comm, make_memory(prepared, task), cfg.wire)
    reports = [report_of(one) for one in records]
    progress = Progress()
    if found is not None:
        state, progress = restore(found, state, task.layout.length, comm), found.progress
    training = rounds(state, plan, prepared.algorithm, task, comm)
    for state, report in training:
        report = replace(report, metric=task.goal.metric)
        if report.round % cfg.eval.every == 0 or report.round == cfg.rounds:
            report = scored(report, plan, task, state, comm, cfg.eval.batch, asked)
        saver.trouble = folder.attempt(partial(log.round, report))
        reports.append(report)
        progress = moved_on(progress, report, task.goal.rises)
        stop.round_done()
        flags = saver.round_done(state, progress, stop.flags, last=report.round == cfg.rounds)
        if any(flags) and report.round < cfg.rounds:
            if first and out is not None:
                saver.trouble = folder.attempt(partial(folder.add_stop, out, report.round, in_words(flags), environ))
            saver.agree()
            raise Stopped(report.round, in_words(flags))
    if first and out is not None and not (out / FINISHED).exists():
        saver.trouble = folder.attempt(partial(finish, out, task, state, progress))
    saver.agree()
    return Outcome(task, state, reports, cfg)


def plan_of(prepared: Prepared) -> Plan:
    """How the rounds of a run are run."""
    cfg = prepared.cfg
    tau = cfg.tau or MaskKnobs.tau  # 0 says nothing of agreement: then that of the papers
    by_layer = tau if "agreement" in prepared.measures else None
    return Plan(cfg.seed, cfg.rounds, cfg.cohort, prepared.work, cfg.sum, cfg.min_clients, cfg.wire, by_layer)


def check_finished(out: Path, cfg: Config, environ: Mapping[str, str]) -> None:
    """Refuse a finished run, but for one that is to have more rounds, or whose launcher has started it once more."""
    finished = read(out / FINISHED, Finished)
    if finished is None:
        return
    again = folder.begun_before(out, environ)
    if not (cfg.resume == "force" or again) or not (out / folder.CHECKPOINTS).is_dir():
        raise UserError(
            f"--out {out} already holds a finished run; choose another folder or remove it, or go on from it with more "
            "--rounds and --resume force"
        )
    if finished["rounds"] >= cfg.rounds and not again:
        done = finished["rounds"]
        raise UserError(f"--out {out} holds a finished run of {done} rounds; give more --rounds to go on from it")


def find_start(out: Path | None, cfg: Config, facts: Facts, environ: Mapping[str, str], comm: Comm) -> Found | None:
    """The checkpoint to go on from, with its number of threads, unless one was given; None: begin. Collective."""
    if out is None:
        return None
    words = torch.zeros(3, dtype=torch.int64)  # the round it has stopped after, whether to start over, whether finished
    with agreed(comm):
        if comm.rank == 0:
            before = folder.stopped_before(out, environ)
            words[0] = before["round"] if before else 0
            words[1] = cfg.resume == "never" and not folder.begun_before(out, environ)  # it was said to the first life
            words[2] = (out / FINISHED).exists()
    comm.broadcast(words)
    stopped, over, finished = words.tolist()
    if stopped:
        raise Stopped(stopped, "already, in this launch")
    if over:
        return None
    found = find(out, facts, comm, cfg.resume == "force")
    if found is None:
        if finished:
            raise UserError(f"--out {out} holds a finished run without a sound checkpoint to go on from")
        return None
    if found.round > cfg.rounds:
        raise UserError(f"{out} has a checkpoint of round {found.round}, and --rounds is {cfg.rounds}; give more")
    if cfg.threads is None:
        torch.set_num_threads(found.about["config"]["threads"])
    with agreed(comm):
        if comm.rank == 0 and found.round < cfg.rounds:
            for name in (FINISHED, folder.ATTACK):
                folder.remove(out / name)
    return found


def read_history(out: Path | None, found: Found | None) -> list[Record]:
    """The rounds before this life, as far as metrics.jsonl has them; the last one is in the checkpoint, too."""
    if out is None or found is None:
        return []
    return with_last(history(out, found.round), dict(found.about["last"]))


def moved_on(progress: Progress, report: Report, rises: bool) -> Progress:
    """The progress after one more round."""
    values = [value for value in (progress.best, finite(report.test_metric)) if value is not None]
    return Progress((max if rises else min)(values) if values else None, record(report))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended, on every rank."""

    task: Task
    state: State
    history: list[Report]
    cfg: Config
    """with everything filled in"""

    @property
    def last(self) -> Report:
        """The last round's report."""
        return self.history[-1]


def plain_knobs(cfg: Config) -> dict[str, Any]:
    """Every knob by its dotted name, without the groups."""
    return {name: value for name, value in knobs(cfg).items() if not dataclasses.is_dataclass(value)}


def facts_of(prepared: Prepared, task: Task, data: Data, meta: Ints, device: torch.device) -> Facts:
    """What must be the same on every rank, and in every life of a run."""
    cfg, rule, moments = prepared.cfg, prepared.algorithm.local, sorted(prepared.algorithm.server.moments)
    config = plain_knobs(cfg) | {"device": device.type}
    partition, labels = task.partition, data.class_labels(needed=False)
    pieces: list[bytes | np.ndarray] = [repr((data.shape, data.samples, data.tests)).encode()]
    pieces += [partition.offsets, partition.order, partition.shared, meta]
    pieces += [] if labels is None else [labels]
    if isinstance(data, Arrays):
        pieces += [data.sha256.encode()] if data.sha256 else [t.contiguous().numpy() for t in (data.x, data.test_x)]
        pieces.append(data.test_y.contiguous().numpy())
    prints = {
        "model": sha256(repr(task.layout).encode()),
        "algorithm": sha256(repr((rule.sends, rule.keeps, rule.normalised, moments)).encode()),
        "data set or split of it": sha256(*pieces),
    }
    return Facts(config, prints)


def compare_ranks(facts: Facts, comm: Comm) -> None:
    """Refuse ranks whose model, rules, data or split differ. Collective."""
    for what, sha in facts.prints.items():
        same_everywhere(what, comm, sha.encode())


def sha256(*pieces: bytes | np.ndarray) -> str:
    """The SHA-256 of bytes and arrays, one behind the other."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece if isinstance(piece, bytes) else np.ascontiguousarray(piece).data)
    return sha.hexdigest()


def same_everywhere(what: str, comm: Comm, content: bytes) -> None:
    """Refuse ranks that differ in something that must be the same on all. Collective."""
    rows = torch.zeros(comm.size, dtype=torch.int64)
    rows[comm.rank] = int(sha256(content)[:14], 16)
    comm.sum(rows)
    odd = [rank for rank in range(comm.size) if rows[rank] != rows[0]]
    if odd:
        raise UserError(f"ranks {odd} have another {what} than rank 0; give all ranks the same")


def check_threads(comm: Comm) -> None:
    """Warn where the ranks' numbers of threads differ: the bits then depend on who trains whom. Collective."""
    rows = torch.zeros(comm.size, dtype=torch.int64)
    rows[comm.rank] = torch.get_num_threads()
    comm.sum(rows)
    if comm.rank == 0 and len(set(rows.tolist())) > 1:
        warnings.warning("ranks have %s threads; equal bits need equal ones: give --threads", rows.tolist())


def load_data(cfg: Config, given: Data | None = None) -> tuple[Data, Partition, Ints]:
    """The data set, who has which part of it, and the meta set: what no client has, or what every client has too."""
    data = load(cfg.data, cfg.data_root) if given is None else given
    needed = cfg.split in LABELLED or bool(cfg.meta.size and cfg.meta.weights)
    y = data.class_labels(needed)
    if y is None:
        if needed:
            what = f"split '{cfg.split}' goes" if cfg.split in LABELLED else "--meta.weights go"
            raise UserError(
                f"{what} by class, and '{data.name}' has numbers for labels; use another split, such as iid or "
                "natural, and no weights"
            )
        y = np.zeros(data.samples, dtype=np.int64)
    meta, rest = np.zeros(0, dtype=np.int64), None
    if cfg.meta.size:
        meta = hold_out(y, data.kinds if needed else 1, cfg.meta.size, cfg.meta.seed, cfg.meta.weights)
        rest = np.setdiff1d(np.arange(len(y)), meta, assume_unique=True)

    def left(values: Ints) -> Ints:
        return values if rest is None else values[rest]

    strata = data.split_labels(needed)
    partition = split(
        cfg.split,
        left(y if strata is None else strata),
        cfg.clients,
        cfg.seed,
        classes_per_client=cfg.skew.classes or 2,
        alpha=cfg.skew.alpha,
        beta=cfg.skew.beta,
        noise=cfg.skew.noise,
        owner=None if data.owners is None else left(data.owners),
        owners=cfg.skew.owners,
        skewed=data.looks is not None,
    )
    shared = meta if cfg.meta.share else meta[:0]
    order = partition.order if rest is None else rest[partition.order]
    partition = Partition(partition.offsets, order, shared)
    if isinstance(data, Arrays):
        data = dress(data, partition, cfg.seed)
        data = data if cfg.augment is None else replace(data, augment=cfg.augment)
    if cfg.augment not in (None, "none") and data.kind != "images":
        raise UserError(f"--augment is '{cfg.augment}', but '{data.name}' has {data.kind}, not images; use none")
    return data, partition, meta


def check_memory_folder(prepared: Prepared) -> None:
    """Refuse a folder for clients' memories that this rank cannot write to."""
    folder = prepared.cfg.memory.folder
    if folder is None:
        return
    try:
        with tempfile.TemporaryFile(dir=Path(folder).expanduser()):
            pass
    except OSError as error:
        raise UserError(
            f"--memory.folder {folder} cannot be written ({error.strerror}); make it, or name another"
        ) from None


def make_memory(prepared: Prepared, task: Task) -> Memory:
    """Where this rank keeps what its clients keep."""
    cfg, names = prepared.cfg.memory, prepared.algorithm.local.keeps
    folder = Path(cfg.folder).expanduser() if cfg.folder else prepared.out or Path(tempfile.gettempdir())
    if not folder.is_dir():  # a node may not see the run folder
        folder = Path(tempfile.gettempdir())
        if names:
            warnings.warning("the run folder is not seen here: clients' memories beyond the limit go to %s", folder)
    return Memory(names, task.layout.params, int(cfg.limit * 2**30), folder)


def make_task(
    prepared: Prepared,
    data: Data,
    partition: Partition,
    meta: Ints,
    ranks: int,
    device: torch.device,
) -> tuple[Prepared, Task]:
    """The model for these data on this rank's device, with weights drawn from the seed unless it was given; and what
    was prepared, with its name where that was left to the data."""
    cfg, given = prepared.cfg, prepared.given.model
    name = cfg.model or USUAL[data.kind]
    offers, samples = data.offers, few_samples(data)  # before the seed is set: reading data may draw
    torch.manual_seed(torch_seed(cfg.seed, "model"))
    if given is not None:
        name, row, model = type(given).__name__, ModelRow(lambda: given), given
    else:
        row = prepared.model or find_model(name)
        model = make_model(name, row, offers, data.name)
    layouts = ("contiguous", "channels_last")
    layout = layouts[row.channels_last] if cfg.step.layout == "auto" else cfg.step.layout
    cfg = replace(cfg, model=name, step=replace(cfg.step, layout=layout))
    try_model(model, name, data, samples, device)
    at_once = min(cfg.step.together, cfg.cohort)
    make = partial(Together, clients=at_once) if at_once > 1 else Task
    task = make(
        model,
        data,
        partition,
        cfg.seed,
        device,
        ranks,
        layout == "channels_last",
        meta,
        workers=cfg.workers,
        tests=cfg.eval.samples,
        path=StepPath(cfg.step.precision, cfg.step.compile),
    )
    try_path(task, name, samples, min(cfg.local.batch, int(partition.sizes.max())))
    if isinstance(task, Together):
        task.check(name, samples)
    return replace(prepared, cfg=cfg), task


def try_layouts(
    prepared: Prepared, data: Data, partition: Partition, meta: Ints, comm: Comm, device: torch.device
) -> Prepared:
    """What was prepared, with the layout that the run in its folder has begun with, else with the faster one, as rank
    0 sees it. Collective."""
    step, choice = prepared.cfg.step, torch.zeros(1, dtype=torch.int64)

    def with_layout(name: str) -> Prepared:
        return replace(prepared, cfg=replace(prepared.cfg, step=replace(step, layout=name)))

    def make(name: str) -> Task:
        trial = with_layout(name)
        given = replace(trial.given, model=copy.deepcopy(trial.given.model))  # a task takes its model over
        return make_task(replace(trial, given=given), data, partition, meta, 1, device)[1]

    with agreed(comm):
        if comm.rank == 0:
            name = layout_before(prepared) or faster_layout(make, prepared.work)
            choice[0] = name == "channels_last"
    comm.broadcast(choice)
    return with_layout("channels_last" if choice else "contiguous")


def layout_before(prepared: Prepared) -> str | None:
    """The layout in the configuration of the run in the folder, where there is one to go on from."""
    out = prepared.out
    if out is None or prepared.cfg.resume == "never" or not (out / folder.CHECKPOINTS).is_dir():
        return None
    try:
        layout = read_yaml(out / CONFIG)["step"]["layout"]
    except (FileError, KeyError, TypeError):
        return None  # of a version that had no choice, or not to be read
    return layout if layout in ("contiguous", "channels_last") else None


def few_samples(data: Data) -> tuple[Tensor, Tensor]:
    """Two test samples and their labels, or one where there is but one."""
    feed = make_feed(data, torch.device("cpu"))
    try:
        return next(feed.test([torch.arange(min(2, feed.tests))]))
    except RunError as error:
        raise UserError(str(error)) from error


@torch.no_grad()
def try_model(model: nn.Module, name: str, data: Data, samples: tuple[Tensor, Tensor], device: torch.device) -> None:
    """Refuse a model that does not take these data or does not answer in the shape of their labels, and an objective
    that cannot judge the answer, before anything has started; also makes the parameters of lazy layers."""
    x, y = (t.to(device) for t in samples)
    model.to(device).eval()
    try:
        outputs = model(x)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"model '{name}' raised {type(error).__name__} for samples {list(x.shape)} of '{data.name}': "
            f"{one_line(error)}; use a model that takes them"
        ) from error
    check_outputs(outputs, y, data.kinds if data.goal.whole else 0, data.goal, name)
    try_objective(data.goal, outputs, y)


def describe_run(
    out: Path, cfg: Config, data: Data, partition: Partition, meta: Ints, environment: dict[str, Any]
) -> None:
    """Write what is needed to repeat the run."""
    write(out / CONFIG, yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
    write(out / "environment.json", json.dumps(environment, indent=2) + "\n")
    about: dict[str, Any] = {"data": cfg.data, "split": cfg.split, "seed": cfg.seed}
    about["skew"] = dataclasses.asdict(cfg.skew)
    about["objective"] = {"name": data.goal.name, "metric": data.goal.metric, "rises": data.goal.rises}
    if data.note:
        about["note"] = data.note
    labels = data.class_labels(needed=False)
    y, kinds = (np.zeros(data.samples, dtype=np.int64), 1) if labels is None else (labels, data.kinds)
    if len(meta):
        counts = np.bincount(y[meta], minlength=kinds)
        sha = hashlib.sha256(meta.astype("<i8").tobytes()).hexdigest()
        about["meta"] = {"seed": cfg.meta.seed, "sha256": sha, "histogram": counts.tolist(), "shared": cfg.meta.share}
    write(out / "partition.json", json.dumps(partition.manifest(y, kinds, **about)) + "\n")


def finish(out: Path, task: Task, state: State, progress: Progress) -> None:
    """Write the model under its own names, then the file that says the run is done."""
    aside = out / f".{MODEL}"
    folder.remove(aside)
    save_file(trained_tensors(task, state), aside, metadata={"format": "pt"})
    folder.sync(aside)
    os.replace(aside, out / MODEL)
    last, metric = progress.last or {}, task.goal.metric
    done = {
        "rounds": state.round,
        f"test_{metric}": last.get(f"test_{metric}"),
        "test_loss": last.get("test_loss"),
        f"best_test_{metric}": progress.best,
        "model_sha256": hashlib.sha256((out / MODEL).read_bytes()).hexdigest(),
        "fedmpi": __version__,
    }
    write(out / FINISHED, json.dumps(done, indent=2) + "\n")


def trained_tensors(task: Task, state: State) -> dict[str, Tensor]:
    """The model's state dict, each tensor in memory of its own."""
    task.load(state.model_N, state.ints)
    return {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in task.model.state_dict().items()
    }


def finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def scheduled(schedule: str) -> str:
    return "" if schedule == "constant" else f" ({schedule})"


def header(prepared: Prepared, task: Task, comm: Comm) -> str:
    """What is about to run, in three lines."""
    cfg = prepared.cfg
    held = f"; {cfg.meta.size} samples held out" if cfg.meta.size else ""
    uses = [f"meta step lr {cfg.meta.lr:g}"] * bool(cfg.meta.lr) + ["a copy for every client"] * bool(cfg.meta.share)
    held += f" ({', '.join(uses) or 'not used'})" if cfg.meta.size else ""
    threads = torch.get_num_threads()
    ranks = f"{comm.size} rank{'s' * (comm.size > 1)} ({comm.name}), {threads} thread{'s' * (threads > 1)} each"
    made = isinstance(prepared.given.algorithm, Algorithm)
    step = replace(cfg.step, together=min(cfg.step.together, cfg.cohort))
    return (
        f"{'an algorithm of your own' if made else rules(cfg)}\n"
        f"{cfg.model}, {task.layout.params:,} parameters; "
        f"step: {describe_step(step, by_hand=task.by_hand is not None and step.together == 1)}\n"
        f"{cfg.data} split {cfg.split} over {cfg.clients} clients, {cfg.cohort} per round{held}; {ranks}, sum {cfg.sum}"
    )


def rules(cfg: Config) -> str:
    """The algorithm in words: what a client does, the mask, what the server does."""
    variant = f", variant {cfg.server.variant}" if cfg.server.rule in VARIED else ""
    tau = "" if cfg.mask == "mean" else f" (tau {cfg.tau:g})"
    client = f"client {cfg.local.rule} lr {cfg.local.lr:g}{scheduled(cfg.local.schedule)}"
    client += "" if cfg.local.work == "full" else f", work {cfg.local.work}"
    server = f"server {cfg.server.rule} lr {cfg.server.lr:g}{scheduled(cfg.server.schedule)}{variant}"
    server += f", momentum {cfg.server.momentum:g}" if cfg.server.momentum and not variant else ""
    return f"{cfg.algorithm} with mask {cfg.mask}{tau}: {client}, {server}"

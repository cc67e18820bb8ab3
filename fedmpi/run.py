"""One run, from a configuration to a folder with a trained model.

A run folder: config.yaml, environment.json, partition.json, metrics.jsonl, tensorboard/, model.safetensors, and
finished.json when it is done. Everything a user can get wrong is found before the first round, and every rank raises
the same sentence.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file

from . import __version__
from .algorithms import Algorithm, build, find_row, resolve
from .comm import Comm, agreed
from .config import Config, check
from .data import DATASETS, SPLITS, Arrays, Ints, Partition, check_weights, hold_out, load, split
from .env import Place, describe
from .errors import UserError, unknown
from .evaluate import evaluate
from .log import Log, sink_names
from .memory import Memory
from .models import ModelRow, find_model
from .seeds import torch_seed
from .server import VARIED
from .tally import SUMS
from .task import Task
from .train import Plan, Report, State, begin, rounds
from .work import Work, make_share

warnings = logging.getLogger("fedmpi")

CONFIG, FINISHED, MODEL = "config.yaml", "finished.json", "model.safetensors"


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A configuration that has been checked and whose names have been looked up."""

    cfg: Config
    algorithm: Algorithm
    model: ModelRow
    work: Work
    sinks: list[str]
    out: Path


def prepare(cfg: Config) -> Prepared:
    """Check everything that needs neither data nor other ranks; a `UserError` names the first mistake."""
    check(cfg)
    cfg = resolve(cfg)
    try:
        check(cfg)  # once more, for what a row of the user's own has filled in
    except UserError as error:
        raise UserError(f"algorithm '{cfg.algorithm}': {error}") from None
    for kind, name, table in (("data set", cfg.data, DATASETS), ("split", cfg.split, SPLITS), ("sum", cfg.sum, SUMS)):
        if name not in table:
            raise unknown(kind, name, table)
    if cfg.meta.weights is not None:
        check_weights(cfg.meta.weights)
    assert cfg.local.epochs is not None, "resolved above"
    work = Work(cfg.local.epochs, cfg.local.steps, cfg.local.batch, make_share(cfg.local.work))
    if cfg.out == "":
        raise UserError("--out is ''; name a folder, or leave it out")
    out = Path(default_folder(cfg) if cfg.out is None else cfg.out)
    return Prepared(cfg, build(cfg), find_model(cfg.model), work, sink_names(cfg.log), out)


def default_folder(cfg: Config) -> str:
    """runs/ and what the run is: algorithm, the rules that are not its own, mask, data, seed."""
    row = find_row(cfg.algorithm)
    others = [rule for rule, own in ((cfg.local.rule, row.local), (cfg.server.rule, row.server)) if rule != own]
    name = "-".join(map(str, [cfg.algorithm, *others, cfg.mask, cfg.data, cfg.seed]))
    return "runs/" + re.sub(r"[^\w.-]+", "-", name)


def run(prepared: Prepared, comm: Comm, place: Place, device: torch.device, environ: Mapping[str, str]) -> Report:
    """Train, and leave a finished run folder; returns the last round's report. Collective."""
    cfg = prepared.cfg
    same_everywhere("configuration", json.dumps(dataclasses.asdict(cfg), sort_keys=True).encode(), comm)
    check_threads(comm)
    with agreed(comm):
        if comm.rank == 0:
            check_folder(prepared.out)
    with agreed(comm):
        arrays, partition, meta = load_data(cfg)
        task = make_task(prepared, arrays, partition, meta, comm.size, device)
        check_memory_folder(prepared)
    drawn = partition.order.tobytes() + meta.tobytes()
    same_everywhere("data set or split of it", drawn + arrays.y.numpy().tobytes(), comm)
    with agreed(comm):
        if comm.rank == 0:
            make_folder(prepared.out)
            threads = torch.get_num_threads()  # in the configuration too: a run is repeated by its config.yaml
            environment = describe(place, environ, threads, str(device))
            describe_run(prepared.out, replace(cfg, threads=threads), arrays, partition, meta, environment)
    memory = make_memory(prepared, task)
    plan = Plan(cfg.seed, cfg.rounds, cfg.cohort, prepared.work, cfg.sum, cfg.min_clients)
    with Log(prepared.out, cfg.rounds, prepared.sinks, speaks=comm.rank == 0) as log:
        log.say(header(cfg, task, comm))
        start, report, best = begin(task, prepared.algorithm, comm, memory), None, 0.0
        for state, report in rounds(start, plan, prepared.algorithm, task, comm):
            if report.round % cfg.eval.every == 0 or report.round == cfg.rounds:
                report = scored(report, task, state, comm, cfg.eval.batch)
                best = max(best, report.test_accuracy or 0.0)
            log.round(report)
    assert report is not None, "a run has at least one round"
    if comm.rank == 0:
        finish(prepared.out, task, state, report, best)
    comm.barrier()
    return report


def scored(report: Report, task: Task, state: State, comm: Comm, block: int) -> Report:
    """The report with the test set's score in it. Collective."""
    started = perf_counter()
    score = evaluate(task, state, comm, block)
    seconds = report.seconds | {"eval": perf_counter() - started}
    return replace(report, test_accuracy=score.accuracy, test_loss=score.loss, seconds=seconds)


def same_everywhere(what: str, fingerprint: bytes, comm: Comm) -> None:
    """Refuse ranks that differ in something that must be the same on all. Collective."""
    rows = torch.zeros(comm.size, dtype=torch.int64)
    rows[comm.rank] = int.from_bytes(hashlib.sha256(fingerprint).digest()[:7], "big")
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


def check_folder(out: Path) -> None:
    """Refuse a run folder that holds a finished run or somebody's other files; an unfinished run is started over."""
    try:
        if (out / FINISHED).exists():
            raise UserError(f"--out {out} already holds a finished run; choose another folder or remove it")
        if out.exists() and not (out / CONFIG).exists() and any(out.iterdir()):
            raise UserError(f"--out {out} holds files that are no run of fedmpi; choose another folder")
    except OSError as error:
        raise UserError(f"--out {out} cannot be read ({error.strerror}); choose another folder") from None


def make_folder(out: Path) -> None:
    """Make the run folder, private to the user."""
    try:
        out.mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.rmtree(out / "tensorboard", ignore_errors=True)  # of an unfinished run that is started over
        probe = out / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UserError(f"--out {out} cannot be written ({error.strerror}); choose a folder that can") from None


def load_data(cfg: Config) -> tuple[Arrays, Partition, Ints]:
    """The data set, who has which part of it, and the meta set: what no client has, or what every client has too."""
    arrays = load(cfg.data, cfg.data_root)
    y = arrays.y.numpy()
    meta = np.zeros(0, dtype=np.int64)
    if cfg.meta.size:
        meta = hold_out(y, arrays.classes, cfg.meta.size, cfg.meta.seed, cfg.meta.weights)
    rest = np.setdiff1d(np.arange(len(y)), meta, assume_unique=True)
    partition = split(
        cfg.split,
        y[rest],
        cfg.clients,
        cfg.seed,
        classes_per_client=cfg.skew.classes,
        alpha=cfg.skew.alpha,
        beta=cfg.skew.beta,
        noise=cfg.skew.noise,
        owner=None if arrays.owner is None else arrays.owner.numpy()[rest],
    )
    shared = meta if cfg.meta.share else meta[:0]
    return arrays, Partition(partition.offsets, rest[partition.order], shared), meta


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
    folder = Path(cfg.folder).expanduser() if cfg.folder else prepared.out
    if not folder.is_dir():  # a node may not see the run folder
        folder = Path(tempfile.gettempdir())
        if names:
            warnings.warning("the run folder is not seen here: clients' memories beyond the limit go to %s", folder)
    return Memory(names, task.layout.params, int(cfg.limit * 2**30), folder)


def make_task(
    prepared: Prepared, arrays: Arrays, partition: Partition, meta: Ints, ranks: int, device: torch.device
) -> Task:
    """The model for these data, with weights drawn from the seed, on this rank's device."""
    cfg = prepared.cfg
    torch.manual_seed(torch_seed(cfg.seed, "model"))
    channels, height, width = arrays.x.shape[1:]
    model = prepared.model.make(channels, height, width, arrays.classes)
    return Task(model, arrays, partition, cfg.seed, device, ranks, prepared.model.channels_last, meta)


def describe_run(
    out: Path, cfg: Config, arrays: Arrays, partition: Partition, meta: Ints, environment: dict[str, Any]
) -> None:
    """Write what is needed to repeat the run."""
    write(out / CONFIG, yaml.safe_dump(dataclasses.asdict(cfg), sort_keys=False))
    write(out / "environment.json", json.dumps(environment, indent=2) + "\n")
    about = {"data": cfg.data, "split": cfg.split, "seed": cfg.seed, "skew": dataclasses.asdict(cfg.skew)}
    if len(meta):
        counts = np.bincount(arrays.y.numpy()[meta], minlength=arrays.classes)
        sha = hashlib.sha256(meta.astype("<i8").tobytes()).hexdigest()
        about["meta"] = {"seed": cfg.meta.seed, "sha256": sha, "histogram": counts.tolist(), "shared": cfg.meta.share}
    manifest = partition.manifest(arrays.y.numpy(), arrays.classes, **about)
    write(out / "partition.json", json.dumps(manifest) + "\n")


def finish(out: Path, task: Task, state: State, report: Report, best: float) -> None:
    """Write the model under its own names, then the file that says the run is done."""
    task.load(state.model_N, state.ints)
    tensors = {
        name: t.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, t in task.model.state_dict().items()
    }
    aside = out / f".{MODEL}"
    save_file(tensors, aside, metadata={"format": "pt"})
    os.replace(aside, out / MODEL)
    done = {
        "rounds": report.round,
        "test_accuracy": report.test_accuracy,
        "test_loss": report.test_loss if math.isfinite(report.test_loss or 0.0) else None,
        "best_test_accuracy": best,
        "model_sha256": hashlib.sha256((out / MODEL).read_bytes()).hexdigest(),
        "fedmpi": __version__,
    }
    write(out / FINISHED, json.dumps(done, indent=2) + "\n")


def write(path: Path, text: str) -> None:
    """Write a file aside and rename it, so that nobody reads half of it."""
    aside = path.with_name(f".{path.name}")
    aside.write_text(text, encoding="utf-8")
    os.replace(aside, path)


def scheduled(schedule: str) -> str:
    return "" if schedule == "constant" else f" ({schedule})"


def header(cfg: Config, task: Task, comm: Comm) -> str:
    """What is about to run, in two lines."""
    variant = f", variant {cfg.server.variant}" if cfg.server.rule in VARIED else ""
    tau = "" if cfg.mask == "mean" else f" (tau {cfg.tau:g})"
    held = f"; {cfg.meta.size} samples held out" if cfg.meta.size else ""
    uses = [f"meta step lr {cfg.meta.lr:g}"] * bool(cfg.meta.lr) + ["a copy for every client"] * bool(cfg.meta.share)
    held += f" ({', '.join(uses) or 'not used'})" if cfg.meta.size else ""
    threads = torch.get_num_threads()
    ranks = f"{comm.size} rank{'s' * (comm.size > 1)} ({comm.name}), {threads} thread{'s' * (threads > 1)} each"
    client = f"client {cfg.local.rule} lr {cfg.local.lr:g}{scheduled(cfg.local.schedule)}"
    client += "" if cfg.local.work == "full" else f", work {cfg.local.work}"
    server = f"server {cfg.server.rule} lr {cfg.server.lr:g}{scheduled(cfg.server.schedule)}{variant}"
    server += f", momentum {cfg.server.momentum:g}" if cfg.server.momentum and not variant else ""
    return (
        f"{cfg.algorithm} with mask {cfg.mask}{tau}: {client}, {server}; "
        f"{cfg.model}, {task.layout.params:,} parameters\n"
        f"{cfg.data} split {cfg.split} over {cfg.clients} clients, {cfg.cohort} a round{held}; {ranks}, sum {cfg.sum}"
    )

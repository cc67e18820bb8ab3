"""Run a checked configuration, up to a run folder with a trained model.

User errors are found before the first round, and every rank raises the same message. A run that finds its own
checkpoint in its folder resumes from it; a run that is asked to stop saves first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import random
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import yaml
from torch import Tensor

from .. import __version__
from ..algorithms import Algorithm
from ..clients.task import Task
from ..comm import Comm, agreed, common_trouble, from_first, tell_all
from ..comm.env import Place, available_cores, describe, threads_per_rank
from ..data import Arrays, Data, Ints, Partition
from ..data.trees import leaves
from ..device import count, device_of, kind_of, own_draws, set_up
from ..device import describe as describe_device
from ..errors import CommonError, FileError, RunError, UserError
from ..knobs import OPTIMIZERS
from ..local import RULES
from ..plugins import hub
from ..plugins.knobs import plain_knobs
from ..rounds import Report, State, begin, rounds
from ..server import VARIED
from . import export, folder
from .build import (
    OWN,
    RunSpec,
    check_memory_folder,
    load_data,
    make_memory,
    make_task,
    plan_of,
    tokenizer_name,
)
from .checkpoint.format import Fingerprint, FoundCheckpoint, Progress, digest
from .checkpoint.load import find, restore
from .checkpoint.save import Saver
from .config import Config, Step
from .folder import CONFIG, FINISHED, MODEL, write
from .log import Log, folded, record, report_of, sink_names
from .malloc import keep_freed_memory, release_freed_memory
from .measures import Measures, Ranks
from .measures import Run as Measured
from .metrics import Record, finite, history, with_last
from .schema import Finished, read
from .stop import Stop, Stopped, in_words
from .text import plural
from .trial import try_rule

warnings = logging.getLogger("fedmpi")

FROZEN = "frozen part of the model"  # its SHA-256 among those that a resumed run must have, if there is one


def settle(cfg: Config, place: Place) -> torch.device:
    """Set up this process for a run: its threads and its accelerator, if it has one; return its device."""
    torch.set_num_threads(threads_per_rank(place, cfg.threads, available_cores()))
    device = device_of(place.local_rank, cfg.device)
    set_up(device, cfg.deterministic, cfg.step.precision)
    return device


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore the random state (torch, numpy and Python), torch's threads and its choice of kernels afterwards."""
    threads, deterministic = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    plain, numpys = random.getstate(), np.random.get_state()
    with own_draws():
        try:
            yield
        finally:
            torch.set_num_threads(threads)
            torch.set_deterministic_debug_mode(deterministic)
            random.setstate(plain)
            np.random.set_state(numpys)


def run(
    spec: RunSpec,
    comm: Comm,
    place: Place,
    device: torch.device,
    environ: Mapping[str, str],
    signals: Iterable[signal.Signals] = (),
    began: float | None = None,
) -> Outcome:
    """Train, from the newest checkpoint if there is one, and write a finished run folder; return the outcome.
    Collective. If one of the signals or the time budget, which counts from `began`, stops the run, every rank raises
    `Stopped`."""
    out, first = spec.out, comm.rank == 0

    # 1. What a user may have got wrong, before anything is written.
    check_alike(spec.cfg, comm, device)
    with agreed(comm):
        if first and out is not None:
            folder.check(out)
            check_finished(out, spec.cfg, environ)
    with agreed(comm):
        data, partition, meta = load_data(spec.cfg, spec.given)
    keep_freed_memory(environ)
    with agreed(comm):
        spec, task = make_task(spec, data, partition, meta, comm.size, device)
        check_memory_folder(spec)
    cfg = spec.cfg
    measures = Measures(Measured(cfg, task, data, plan_of(spec), Ranks(comm), spec.given, out))
    try_own_rule(spec, task, comm)
    with agreed(comm):
        fingerprint = fingerprint_of(spec, task, data, meta, device)
    compare_ranks(fingerprint, comm)
    share_still(task, comm)

    with owned(out, cfg, place, environ, comm), closing(task.feed):
        # 2. Where to start from.
        found = find_start(out, cfg, fingerprint, environ, comm)
        done = found.round if found else 0
        with agreed(comm):
            records = read_history(out, found)
        threads = torch.get_num_threads()  # recorded, because a run is repeated by its config.yaml
        fingerprint = replace(fingerprint, config={**fingerprint.config, "threads": threads})
        recorded = replace(cfg, threads=threads)

        # 3. The run folder and the log.
        def begin_folder(out: Path) -> None:
            if found is None:
                folder.start_over(out)
            about = describe(place, environ, threads, str(device), accelerator=describe_device(device))
            describe_run(out, recorded, data, partition, meta, about)
            folder.add_start(out, place, comm.name, done, environ)

        with agreed(comm):
            if first and out is not None and (trouble := folder.attempt(partial(begin_folder, out))):
                raise FileError(folder.write_failed(out, trouble, done))
        with agreed(comm):
            log = Log(
                out,
                cfg.rounds,
                sink_names(cfg.log_to),
                speaks=first,
                quiet=cfg.quiet,
                done=done,
                config=plain_knobs(recorded),
                records=records,
                verbose=cfg.verbose,
                several=comm.size > 1,
                hidden=("kept",) if cfg.mask == "mean" and spec.given.row is not OWN else (),  # always 1
            )

        # 4. The rounds, and what is measured after the last one.
        with log:
            stop = Stop(signals, cfg.max_minutes, began, speaks=first)
            with stop, Saver(out, cfg.checkpoint, fingerprint, comm, found) as saver:
                note = f"\ndata: {data.note}" if data.note else ""
                note += f"\nresuming after round {done} of the run in {out}" if found else ""
                note += device_note(place, device)
                log.say(folded(header(spec, task, comm) + note))
                outcome = train(spec, task, comm, saver, stop, log, environ, found, measures, records)
            problem = measure_end(outcome, measures, log)
        if problem:
            what = f"the run in {out}" if out else "training"
            raise CommonError(f"{what} is finished, but a measurement failed ({problem})")
    comm.barrier()
    return outcome


def check_alike(cfg: Config, comm: Comm, device: torch.device) -> None:
    """Refuse ranks with different options; warn if their numbers of threads or their accelerators differ, as the bits
    then depend on which rank trains a client. Collective."""
    alike = replace(cfg, quiet=False, verbose=False)  # ranks may print differently
    same_everywhere("configuration", comm, json.dumps(dataclasses.asdict(alike), sort_keys=True).encode())
    threads = tell_all(comm, str(torch.get_num_threads()))
    if comm.rank == 0 and len(set(threads)) > 1:
        warnings.warning("ranks have %s threads; equal bits need equal numbers: give --threads", ", ".join(threads))
    kinds = tell_all(comm, kind_of(device))
    if comm.rank == 0 and len(set(kinds)) > 1:
        each = ", ".join(f"rank {rank}: {kind}" for rank, kind in enumerate(kinds))
        warnings.warning("ranks train on different devices (%s); equal bits need devices of one kind", each)


def try_own_rule(spec: RunSpec, task: Task, comm: Comm) -> None:
    """Try a client rule or an optimizer that is not built in. Collective: ranks as threads share torch's generator, so
    that all have made their models before."""
    local = spec.cfg.local
    rule = "of your own" if isinstance(spec.given.algorithm, Algorithm) else str(local.rule)
    own = rule not in RULES
    if own or local.optimizer not in OPTIMIZERS:
        rule = rule if own else f"{rule} with {local.optimizer}"
        with agreed(comm):
            try_rule(rule, spec.algorithm.local, task, spec.work)


@contextmanager
def owned(out: Path | None, cfg: Config, place: Place, environ: Mapping[str, str], comm: Comm) -> Iterator[None]:
    """Make the run folder and hold its lock, on rank 0; all ranks raise if another run holds it. Collective."""
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
                    check_finished(out, cfg, environ)  # again: it may have finished while this one waited
        if taken := common_trouble(comm, taken):
            raise CommonError(taken)
        yield


def train(
    spec: RunSpec,
    task: Task,
    comm: Comm,
    saver: Saver,
    stop: Stop,
    log: Log,
    environ: Mapping[str, str],
    found: FoundCheckpoint | None,
    measures: Measures,
    records: Sequence[Record],
) -> Outcome:
    """Run the remaining rounds, log each, save checkpoints when due, and write the results. Collective."""
    cfg, out, first = spec.cfg, spec.out, comm.rank == 0
    state = begin(task, spec.algorithm, comm, make_memory(spec, task), cfg.wire)
    reports = [report_of(one) for one in records]
    progress = Progress()
    if found is not None:
        state = restore(found, state, task.layout.length, comm)
        progress = Progress(found.about["best"], found.about["last"])
    training = rounds(state, plan_of(spec), spec.algorithm, task, comm, [measures])
    for state, report in training:
        last = report.round == cfg.rounds
        scored = last or report.round % cfg.eval.every == 0
        report, problem = measures.after_round(state, replace(report, metric=task.goal.metric), scored)
        saver.trouble = folder.attempt(partial(log.round, report))
        reports.append(report)
        progress = moved_on(progress, report, task.goal.rises)
        stop.round_done()
        flags = saver.round_done(state, progress, stop.flags, last=last or bool(problem))
        if problem:
            saved = "; the round is saved: the same command resumes after it" if saver.out else ""
            raise CommonError(f"round {report.round}: {problem}; fix it or leave it out of --evaluate{saved}")
        if (why := in_words(flags)) and not last:
            if first and out is not None:
                saver.trouble = folder.attempt(partial(folder.add_stop, out, report.round, why, environ))
            saver.agree()
            raise Stopped(report.round, why)
    check_still(task, saver.fingerprint, comm)
    if first and (more := generated(spec, task, state)):
        log.say(more)
    if first and out is not None and not (out / FINISHED).exists():
        saver.trouble = folder.attempt(partial(finish, out, spec, task, state, progress, more))
    saver.agree()
    return Outcome(task, state, reports, cfg)


def generated(spec: RunSpec, task: Task, state: State) -> str:
    """Return the text that --generate asks for, continued by the trained model; '' if there is none."""
    name = tokenizer_name(spec.cfg, spec.given)
    if spec.cfg.generate is None or name is None:
        return ""
    task.load(state.model_N, state.ints)
    return export.generate(task.model, hub.load_tokenizer(name), spec.cfg.generate, task.device)


def check_still(task: Task, fingerprint: Fingerprint, comm: Comm) -> None:
    """Raise if the still part of the model is no longer what it was: version counters miss some writes. Collective."""
    same = not task.still or task.still.sha256() == fingerprint.prints[FROZEN]
    trouble = "" if same else "training changed the frozen part of the model, past autograd (.data); it must not"
    if trouble := common_trouble(comm, trouble):
        raise CommonError(trouble)


def measure_end(outcome: Outcome, measures: Measures, log: Log) -> str:
    """Add the measurements of the finished run to its last round; return the error message, '' if none. Collective."""
    last = outcome.last
    measures.run.print = log.say
    report, problem = measures.at_end(outcome.state, last)
    outcome.history[-1] = report
    more = {name: value for name, value in report.measures.items() if last.measures.get(name) != value}
    trouble = folder.attempt(partial(log.end, report, more)) if more else ""
    return problem or common_trouble(measures.run.comm.comm, trouble)


def check_finished(out: Path, cfg: Config, environ: Mapping[str, str]) -> None:
    """Refuse a finished run, unless more rounds are requested or its launcher has restarted it."""
    finished = read(out / FINISHED, Finished)
    if finished is None:
        return
    again = folder.begun_before(out, environ)
    if not (cfg.resume == "force" or again) or not (out / folder.CHECKPOINTS).is_dir():
        raise UserError(
            f"--out {out} already holds a finished run; choose another folder or remove it, or resume it with more "
            "--rounds and --resume force"
        )
    if finished["rounds"] >= cfg.rounds and not again:
        done = finished["rounds"]
        raise UserError(f"--out {out} holds a finished run of {done} rounds; give more --rounds to resume it")


def find_start(
    out: Path | None, cfg: Config, fingerprint: Fingerprint, environ: Mapping[str, str], comm: Comm
) -> FoundCheckpoint | None:
    """Return the checkpoint to resume from, None if there is none, and set its number of threads unless one was given.
    Collective."""
    if out is None:
        return None
    before, over, finished = None, False, False
    with agreed(comm):
        if comm.rank == 0:
            before = folder.stopped_before(out, environ)
            over = cfg.resume == "never" and not folder.begun_before(out, environ)  # only at the first attempt
            finished = (out / FINISHED).exists()
    before, over, finished = from_first(comm, (before, over, finished))
    if before is not None:
        raise Stopped(before["round"], "already, in this launch")
    if over:
        return None
    found = find(out, fingerprint, comm, cfg.resume == "force")
    if found is None:
        if finished:
            raise UserError(f"--out {out} holds a finished run without a sound checkpoint to resume from")
        return None
    if found.round > cfg.rounds:
        raise UserError(f"{out} has a checkpoint of round {found.round}, and --rounds is {cfg.rounds}; give more")
    if cfg.threads is None:
        torch.set_num_threads(found.about["config"]["threads"])
    with agreed(comm):
        if comm.rank == 0 and found.round < cfg.rounds:
            for name in (FINISHED, folder.ATTACK, folder.MERGED, folder.GENERATED):
                folder.remove(out / name)
    return found


def read_history(out: Path | None, found: FoundCheckpoint | None) -> list[Record]:
    """Return the rounds before this start that metrics.jsonl has; the last one is in the checkpoint, too."""
    if out is None or found is None:
        return []
    return with_last(history(out, found.round), dict(found.about["last"]))


def moved_on(progress: Progress, report: Report, rises: bool) -> Progress:
    """Return the progress after one more round."""
    values = [value for value in (progress.best, finite(report.test_metric)) if value is not None]
    return Progress((max if rises else min)(values) if values else None, record(report))


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a run, the same on every rank; the configuration has all defaults filled in."""

    task: Task
    state: State
    history: list[Report]
    cfg: Config

    @property
    def last(self) -> Report:
        """Return the last round's report."""
        return self.history[-1]


def fingerprint_of(spec: RunSpec, task: Task, data: Data, meta: Ints, device: torch.device) -> Fingerprint:
    """Return the fingerprint of a run, which must be the same on every rank and at every start."""
    cfg, rule, moments = spec.cfg, spec.algorithm.local, sorted(spec.algorithm.server.moments)
    config = plain_knobs(cfg) | {"device": device.type}
    partition, labels = task.partition, data.class_labels(needed=False)
    pieces: list[bytes | np.ndarray] = [repr((data.shape, data.samples, data.tests)).encode()]
    pieces += [partition.offsets, partition.order, partition.shared, meta]
    pieces += [] if labels is None else [labels]
    if isinstance(data, Arrays):
        content = leaves((data.x, data.test_x))
        pieces += [data.sha256.encode()] if data.sha256 else [t.contiguous().numpy() for t in content]
        pieces.append(data.test_y.contiguous().numpy())
    prints = {
        "model": sha256(repr(task.layout).encode()),
        "algorithm": sha256(repr((rule.sends, rule.keeps, rule.normalised, moments)).encode()),
        "data set or split of it": sha256(*pieces),
    }
    prints |= {FROZEN: task.still.sha256()} if task.still else {}
    prints |= {"private part of the model": sha256(task.first_private.cpu().numpy())} if len(task.private) else {}
    return Fingerprint(config, prints)


def share_still(task: Task, comm: Comm) -> None:
    """Keep one copy of the still part of the model per node, if the ranks train on the CPU. Collective: it is the same
    on all of them."""
    if comm.node is None or not task.still.shareable:
        return
    memory = comm.node.bytes(task.still.shareable)
    leads = comm.node.leads
    if memory is not None and leads:
        task.still.move_to(memory, fill=True, freed=release_freed_memory)
    comm.barrier()
    if memory is not None and not leads:
        task.still.move_to(memory, fill=False, freed=release_freed_memory)


def compare_ranks(fingerprint: Fingerprint, comm: Comm) -> None:
    """Refuse ranks whose model, rules, data or split differ. Collective."""
    for what, sha in fingerprint.prints.items():
        same_everywhere(what, comm, sha.encode())


def sha256(*pieces: bytes | np.ndarray) -> str:
    """Return the SHA-256 of bytes and arrays, one after the other."""
    sha = hashlib.sha256()
    for piece in pieces:
        sha.update(piece if isinstance(piece, bytes) else np.ascontiguousarray(piece).data)
    return sha.hexdigest()


def same_everywhere(what: str, comm: Comm, content: bytes) -> None:
    """Raise a `UserError` if the content differs between ranks. Collective."""
    first, *others = tell_all(comm, sha256(content))
    if odd := [rank for rank, sha in enumerate(others, 1) if sha != first]:
        raise UserError(f"ranks {odd} have another {what} than rank 0; give all ranks the same")


def describe_run(
    out: Path, cfg: Config, data: Data, partition: Partition, meta: Ints, environment: dict[str, Any]
) -> None:
    """Write the configuration, the environment and the partition, to repeat the run."""
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
        sha = sha256(meta.astype("<i8").tobytes())
        about["meta"] = {"seed": cfg.meta.seed, "sha256": sha, "histogram": counts.tolist(), "shared": cfg.meta.share}
    write(out / "partition.json", json.dumps(partition.manifest(y, kinds, **about)) + "\n")


def finish(out: Path, spec: RunSpec, task: Task, state: State, progress: Progress, text: str) -> None:
    """Write the model, its adapter and the generated text, if there are any, then the file that marks the run as
    finished."""
    tensors = trained_views(task, state)
    folder.write_by(out / MODEL, lambda path: safetensors.torch.save_file(tensors, path, metadata={"format": "pt"}))
    export.write_adapter(out, task.model)
    if spec.cfg.export == "merged":
        name = tokenizer_name(spec.cfg, spec.given)
        export.write_merged(out, task.model, None if name is None else hub.load_tokenizer(name))
    if text:
        export.write_generated(out, text)
    last, metric = progress.last or {}, task.goal.metric
    done = {
        "rounds": state.round,
        f"test_{metric}": last.get(f"test_{metric}"),
        "test_loss": last.get("test_loss"),
        f"best_test_{metric}": progress.best,
        "model_sha256": digest(out / MODEL),
        "fedmpi": __version__,
    }
    write(out / FINISHED, json.dumps(done, indent=2) + "\n")


def trained_tensors(task: Task, state: State) -> dict[str, Tensor]:
    """Return copies of what `trained_views` returns."""
    memory = task.x_N.untyped_storage().data_ptr()
    return {
        name: t.clone() if t.untyped_storage().data_ptr() == memory else t
        for name, t in trained_views(task, state).items()
    }


def trained_views(task: Task, state: State) -> dict[str, Tensor]:
    """Return the model's state dict without what is still or private; no two tensors share memory. On the host they are
    views of the task's vector: valid until it is trained again."""
    task.load(state.model_N, state.ints)
    still = {id(t) for t in task.still.tensors.values()}
    private = {span.name for span in task.layout.private.spans}
    memory, found, taken = task.x_N.untyped_storage().data_ptr(), dict[str, Tensor](), set[int]()
    for name, kept in task.model.state_dict(keep_vars=True).items():
        if id(kept) in still or name in private:
            continue
        t = kept.detach().cpu()
        view = t.is_contiguous() and t.untyped_storage().data_ptr() == memory and t.data_ptr() not in taken
        found[name] = t if view else t.clone(memory_format=torch.contiguous_format)
        taken.add(t.data_ptr())
    return found


def scheduled(schedule: str) -> str:
    """Return a schedule in parentheses; '' if it is constant."""
    return "" if schedule == "constant" else f" ({schedule})"


def header(spec: RunSpec, task: Task, comm: Comm) -> str:
    """Return a description of the run in three lines."""
    cfg = spec.cfg
    held = ""
    if cfg.meta.size:
        uses = [f"meta step lr {cfg.meta.lr:g}"] if cfg.meta.lr else []
        uses += ["a copy for every client"] if cfg.meta.share else []
        held = f"; {cfg.meta.size} samples held out ({', '.join(uses) or 'not used'})"
    ranks = f"{plural(comm.size, 'rank')} ({comm.name}), {plural(torch.get_num_threads(), 'thread')} each"
    if task.device.type != "cpu":
        ranks += f", on {kind_of(task.device)}, sums on the {'host' if task.sums_device.type == 'cpu' else 'device'}"
    made = isinstance(spec.given.algorithm, Algorithm)
    frozen = f" trained, {task.still.elements:,} elements frozen" if task.still else ""
    frozen += f", {len(task.private):,} private per client" if len(task.private) else ""
    step = replace(cfg.step, together=min(cfg.step.together, cfg.cohort))
    return (
        f"{'an algorithm of your own' if made else rules(cfg)}\n"
        f"{cfg.model}, {task.layout.params:,} parameters{frozen}; "
        f"step: {describe_step(step, by_hand=task.by_hand is not None and step.together == 1)}\n"
        f"{cfg.data} split {cfg.split} over {cfg.clients} clients, {cfg.cohort} per round{held}; {ranks}, sum {cfg.sum}"
    )


def device_note(place: Place, device: torch.device) -> str:
    """Return a line on accelerators that are idle or shared, to be added to the header; '' if there is none."""
    devices = 0 if device.type == "cpu" else count()
    if place.size == 1 and devices > 1:
        return f"\n{plural(devices - 1, f'more {device.type} device')} idle: --ranks auto starts a rank for each"
    if devices and place.local_size > devices:
        mps = "; NVIDIA's MPS lets their kernels overlap (nvidia-cuda-mps-control -d)" if device.type == "cuda" else ""
        return f"\n{place.local_size} ranks share {plural(devices, f'{device.type} device')} of this node{mps}"
    return ""


def rules(cfg: Config) -> str:
    """Return a description of the algorithm: client rule, mask and server rule."""
    variant = f", variant {cfg.server.variant}" if cfg.server.rule in VARIED else ""
    tau = "" if cfg.mask == "mean" else f" (tau {cfg.tau:g})"
    client = f"client {cfg.local.rule} lr {cfg.local.lr:g}{scheduled(cfg.local.schedule)}"
    client += "" if cfg.local.work == "full" else f", work {cfg.local.work}"
    server = f"server {cfg.server.rule} lr {cfg.server.lr:g}{scheduled(cfg.server.schedule)}{variant}"
    server += f", momentum {cfg.server.momentum:g}" if cfg.server.momentum and not variant else ""
    return f"{cfg.algorithm} with mask {cfg.mask}{tau}: {client}, {server}"


def describe_step(step: Step, by_hand: bool = False) -> str:
    """Return a description of the execution mode."""
    words = [step.layout, step.precision]
    words += ["gradient by hand"] if by_hand else []
    words += [f"compiled ({step.compile})"] if step.compile != "none" else []
    words += [f"{step.together} clients at once"] if step.together > 1 else []
    return ", ".join(words)

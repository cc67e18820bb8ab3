"""What a sweep is to do: its points as checked configurations, and its folder.

runs/NAME/sweep.json       what runs belong to it, with their labels
runs/NAME/RUN/             a run folder for each point
runs/NAME/configs, logs    what each run is started with, and what it says (those of a job array are in slurm/)
runs/NAME/chosen.json      the best labels, where the file asks for a choice
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import FileError, UserError
from ...plugins.knobs import knobs
from ...runs import folder
from ...runs.config import Config
from ...runs.folder import CONFIG, FINISHED, read_json
from ...runs.options import from_values
from ..runs import IDLE, SWEEP, read_config, word
from .grid import Point, Sweep, points
from .pick import GIVEN_UP
from .reference import LATER, make_reference, read_reference, write_reference

CONFIGS, LOGS = "configs", "logs"


@dataclass(frozen=True)
class Todo:
    """A sweep as it is to be run."""

    sweep: Sweep
    home: Path
    points: list[Point]
    configs: dict[str, Config]
    """of the points, checked"""
    recipe: Sweep
    """the sweep as its file has it, whatever the command line changes"""
    threads: int | None = None
    """threads per rank of the runs whose labels do not say; None: all of them say"""

    def run(self, point: Point) -> Path:
        """The run folder of a point."""
        return self.home / point.name

    @property
    def names(self) -> list[str]:
        return [point.name for point in self.points]

    @property
    def left(self) -> list[Point]:
        """The points that are neither finished nor given up."""
        return [point for point in self.points if not at_its_end(self.run(point))]


def at_its_end(run: Path) -> bool:
    """Whether a run is not to be run any more."""
    return (run / FINISHED).exists() or (run / GIVEN_UP).exists()


def note_given_up(run: Path, why: str) -> None:
    """Write down that a run was given up, so that it is not run again."""
    folder.make(run)
    keep(run / GIVEN_UP, json.dumps({"why": why, "time": time.time()}) + "\n")


def keep(path: Path, text: str) -> None:
    """Write a file of a sweep, which another sweep in the same folder may be writing as well."""
    try:
        folder.write(path, text, aside=f"-{socket.gethostname()}-{os.getpid()}")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); make room, or choose another --out") from None


def make_todo(sweep: Sweep, chosen: list[Point], home: Path, local: bool, recipe: Sweep) -> Todo:
    """What there is to do for these points of a sweep, whose file says `recipe`; a `UserError` for whatever is wrong
    with one of them."""
    check_home(home, sweep)
    parsed: dict[str, Config] = {}
    threads = common_threads(home, chosen)
    configs = {point.name: checked(point, home / point.name, local, parsed, threads or 1) for point in chosen}
    todo = Todo(sweep, home, chosen, configs, recipe, threads)
    for point in chosen:
        same_as_before(todo.run(point), todo.configs[point.name])
    return todo


def common_threads(home: Path, chosen: list[Point]) -> int | None:
    """Return the threads per rank of all runs whose labels do not say: what the file or --set says, else what the sweep
    had before, else 1. The same wherever the runs are, as bits depend on it. None if threads are an axis."""
    said = {point.knobs.get("threads") for point in chosen}
    before = read_json(home / SWEEP).get("threads")
    if said == {None}:
        return before if isinstance(before, int) else 1
    if len(said) > 1:
        return 1 if None in said else None
    (threads,) = said
    if isinstance(before, int) and threads != before:
        raise UserError(
            f"--out {home} holds a sweep with {before} threads per rank, and threads is {threads} now: the bits would "
            f"differ; choose another --out, or --set threads={before}"
        )
    return threads if isinstance(threads, int) else None  # what is no number is refused with its run's name


def checked(point: Point, run: Path, local: bool, parsed: dict[str, Config], threads: int) -> Config:
    """The configuration of a point, with every name looked up, and with the `threads` of the sweep where it says none:
    bits depend neither on the machine nor on how many runs share it. A run that an older version began has those that
    it had. Knobs that were `parsed` are not parsed once more for another seed: that takes 50 ms."""
    from ...runs.build import prepare

    key = json.dumps(point.labels)
    try:
        if key not in parsed:
            parsed[key] = from_values(point.values)
        cfg = prepare(replace(parsed[key], seed=point.seed, out=str(run))).cfg
        if local and cfg.comm == "mpi":
            raise UserError("--comm is mpi, but a sweep on this machine starts no MPI ranks; leave it out")
    except UserError as error:
        raise UserError(f"run '{point.name}': {error}") from None
    root = None if cfg.data_root is None else str(Path(cfg.data_root).expanduser().absolute())
    return replace(cfg, data_root=root, threads=cfg.threads or begun_with(run) or threads)


def begun_with(run: Path) -> int | None:
    """Return the threads per rank that a run has begun with; None if it has not."""
    try:
        threads = read_config(run).get("threads")
    except FileError:
        return None
    return threads if isinstance(threads, int) else None


def check_home(home: Path, sweep: Sweep) -> None:
    """Refuse a folder that holds something else, or another sweep."""
    try:
        files = [one.name for one in home.iterdir()] if home.exists() else []
    except OSError as error:
        raise UserError(f"--out {home} cannot be read ({error.strerror}); choose another folder") from None
    folder.check_writable(home)
    if SWEEP not in files and any(not name.startswith(f".{SWEEP}") for name in files):
        raise UserError(f"--out {home} holds files that are no sweep; choose another folder")
    before = read_json(home / SWEEP).get("axes") or {}
    if before and list(before) != list(sweep.axes):
        raise UserError(
            f"--out {home} holds a sweep over {', '.join(before)}, and '{sweep.name}' is one over "
            f"{', '.join(sweep.axes) or 'seeds'}; choose another folder"
        )


def same_as_before(run: Path, cfg: Config) -> None:
    """Refuse a run that is there already with other knobs: the file may have changed since."""
    try:
        if not os.path.lexists(run / CONFIG):
            return
        before = read_config(run)
    except FileError as error:
        raise UserError(f"{run} holds no run that can be read ({error}); remove it") from None
    now = {k: v for k, v in knobs(cfg).items() if not dataclasses.is_dataclass(v) and not k.startswith(IDLE)}
    later = [name for name in LATER if now.get(name) is None]
    odd = [name for name, value in now.items() if name in before and name not in later and before[name] != value]
    if odd:
        was = ", ".join(f"{name} was {word(before[name])} and is {word(now[name])}" for name in odd)
        raise UserError(f"{run} holds a run with other knobs: {was}; choose another --out, or remove it")


def so_far(todo: Todo) -> list[Point]:
    """The points of a sweep with all seeds that it has had, of earlier commands as well."""
    runs = read_json(todo.home / SWEEP).get("runs", {})
    seeds = {int(one["seed"]) for name, one in runs.items() if str(one.get("seed", "")).isdecimal()}
    return points(replace(todo.sweep, seeds=(*todo.sweep.seeds, *sorted(seeds - set(todo.sweep.seeds)))))


def describe(todo: Todo) -> None:
    """Make the sweep's folder, and write down what belongs to it; runs of an earlier command stay in."""
    sweep = todo.sweep
    before = read_json(todo.home / SWEEP)
    runs: dict[str, Any] = before.get("runs", {})
    runs |= {point.name: point.labels | {"seed": str(point.seed)} for point in points(sweep)}
    about: dict[str, Any] = {"name": sweep.name, "about": sweep.about}
    about["axes"] = {axis: list(labels) for axis, labels in sweep.axes.items()}
    about["runs"] = runs
    about |= {"threads": todo.threads} if todo.threads is not None else {}
    about |= {"choose": dataclasses.asdict(sweep.choose)} if sweep.choose is not None else {}
    about |= {"reach": list(sweep.reach)} if sweep.reach else {}
    if sweep.published:
        known = todo.configs if sweep.where == todo.recipe.where else None  # --set is one more `where`
        now = make_reference(todo.recipe, todo.points, known)
        about |= {"published": list(sweep.published)}
        about["recipe"] = write_reference(now, read_reference(before.get("recipe")))
    folder.make(todo.home)
    keep(todo.home / SWEEP, json.dumps(about, indent=2) + "\n")

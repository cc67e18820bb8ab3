"""The plan of a sweep: its points as checked configurations, and its folder.

runs/NAME/sweep.json       the runs of the sweep with their labels
runs/NAME/RUN/             one run folder per point
runs/NAME/configs, logs    configuration and log of each run (those of a job array are in slurm/)
runs/NAME/chosen.json      the best labels, if the file has `choose`
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
from ...runs import folder
from ...runs.config import Config
from ...runs.folder import CONFIG, FINISHED, read_json
from ...runs.options import from_values
from ...runs.text import plural
from ..runs import SWEEP, read_config, word
from .grid import Point, Sweep, points
from .pick import GIVEN_UP
from .reference import comparable, make_reference, read_reference, write_reference

CONFIGS, LOGS = "configs", "logs"


@dataclass(frozen=True)
class SweepPlan:
    """A sweep with its checked configurations, ready to run."""

    sweep: Sweep
    home: Path
    points: list[Point]
    configs: dict[str, Config]  # by the name of the point, checked
    recipe: Sweep  # as in its file, without the changes of the command line
    threads: int | None = None  # per rank of the runs whose labels do not set them; None: all labels do

    @property
    def runs(self) -> list[Path]:
        return [self.home / point.name for point in self.points]

    @property
    def left(self) -> list[Point]:
        """Return the points that are neither finished nor given up."""
        return [point for point in self.points if not is_over(self.home / point.name)]

    @property
    def threads_text(self) -> str:
        return f", {plural(self.threads, 'thread')} per rank" if self.threads else ""


def is_over(run: Path) -> bool:
    """Return whether a run is finished or given up."""
    return (run / FINISHED).exists() or (run / GIVEN_UP).exists()


def mark_given_up(run: Path, why: str) -> None:
    """Record in a run folder that the run was given up, so that it is not run again."""
    folder.make(run)
    write_file(run / GIVEN_UP, json.dumps({"why": why, "time": time.time()}) + "\n")


def write_file(path: Path, text: str) -> None:
    """Write a file of a sweep, which another sweep in the same folder may write at the same time."""
    try:
        folder.write(path, text, aside=f"-{socket.gethostname()}-{os.getpid()}")
    except OSError as error:
        why = error.strerror
        raise UserError(f"{path} cannot be written ({why}); free some space, or choose another --out") from None


def make_plan(sweep: Sweep, chosen: list[Point], home: Path, local: bool, recipe: Sweep) -> SweepPlan:
    """Check these points of a sweep and return its plan; raise a `UserError` if a run cannot be made. `recipe` is the
    sweep as in its file."""
    check_home(home, sweep)
    parsed: dict[str, Config] = {}
    threads = common_threads(home, chosen)
    configs = {point.name: checked(point, home / point.name, local, parsed, threads or 1) for point in chosen}
    return SweepPlan(sweep, home, points=chosen, configs=configs, recipe=recipe, threads=threads)


def common_threads(home: Path, chosen: list[Point]) -> int | None:
    """Return the threads per rank of all runs whose labels do not set them: from the file or --set, else as before in
    this folder, else 1. None if threads are an axis. Results depend on it to the last bit, the machine must not."""
    given = {point.knobs.get("threads") for point in chosen}
    before = read_json(home / SWEEP).get("threads")
    if given == {None}:
        return before if isinstance(before, int) else 1
    if len(given) > 1:
        return 1 if None in given else None
    (threads,) = given
    if isinstance(before, int) and threads != before:
        raise UserError(
            f"--out {home} holds a sweep with {before} threads per rank, and threads is {threads} now: the results "
            f"would differ in their last bits; choose another --out, or --set threads={before}"
        )
    return threads if isinstance(threads, int) else None  # anything else is refused with the name of the run


def checked(point: Point, run: Path, local: bool, parsed: dict[str, Config], threads: int) -> Config:
    """Return the configuration of a point with all names looked up, and with the `threads` of the sweep if it sets
    none, so that results depend neither on the machine nor on how many runs share it. A run of an older version keeps
    its threads. Refuse a run that exists with other settings: the file may have changed since. `parsed` caches
    configurations by labels: parsing takes 50 ms."""
    from ...runs.build import prepare

    key = json.dumps(point.labels)
    try:
        if key not in parsed:
            parsed[key] = from_values(point.knobs)
        cfg = prepare(replace(parsed[key], seed=point.seed, out=str(run))).cfg
        if local and cfg.comm == "mpi":
            raise UserError("--comm is mpi, but a sweep on this machine starts no MPI ranks; leave it out")
    except UserError as error:
        raise UserError(f"run '{point.name}': {error}") from None
    root = None if cfg.data_root is None else str(Path(cfg.data_root).expanduser().absolute())
    try:
        before = read_config(run) if os.path.lexists(run / CONFIG) else {}
    except FileError as error:
        raise UserError(f"{run} holds no readable run ({error}); remove it") from None
    used = before.get("threads")
    cfg = replace(cfg, data_root=root, threads=cfg.threads or (used if isinstance(used, int) else threads))
    now = comparable(cfg) | {"seed": cfg.seed}
    changed = [name for name, value in now.items() if name in before and before[name] != value]
    if changed:
        was = ", ".join(f"{name} was {word(before[name])} and is {word(now[name])}" for name in changed)
        raise UserError(f"{run} holds a run with other settings: {was}; choose another --out, or remove it")
    return cfg


def check_home(home: Path, sweep: Sweep) -> None:
    """Refuse a folder that contains something else or another sweep."""
    try:
        files = [one.name for one in home.iterdir()] if home.exists() else []
    except OSError as error:
        raise UserError(f"--out {home} cannot be read ({error.strerror}); choose another folder") from None
    folder.check_writable(home)
    if SWEEP not in files and any(not name.startswith(f".{SWEEP}") for name in files):
        raise UserError(f"--out {home} holds files but no sweep; choose another folder")
    before = read_json(home / SWEEP).get("axes") or {}
    if before and list(before) != list(sweep.axes):
        raise UserError(
            f"--out {home} holds a sweep over {', '.join(before)}, but '{sweep.name}' is over "
            f"{', '.join(sweep.axes) or 'seeds'}; choose another folder"
        )


def all_points(plan: SweepPlan) -> list[Point]:
    """Return the points of a sweep with all its seeds, including those of earlier commands."""
    runs = read_json(plan.home / SWEEP).get("runs", {})
    seeds = {int(one["seed"]) for name, one in runs.items() if str(one.get("seed", "")).isdecimal()}
    return points(replace(plan.sweep, seeds=(*plan.sweep.seeds, *sorted(seeds - set(plan.sweep.seeds)))))


def describe(plan: SweepPlan) -> None:
    """Make the sweep's folder and write sweep.json; runs of earlier commands stay in it."""
    sweep = plan.sweep
    before = read_json(plan.home / SWEEP)
    runs: dict[str, Any] = before.get("runs", {})
    runs |= {point.name: point.labels | {"seed": str(point.seed)} for point in points(sweep)}
    about: dict[str, Any] = {
        "name": sweep.name,
        "about": sweep.about,
        "axes": {axis: list(labels) for axis, labels in sweep.axes.items()},
        "runs": runs,
        "threads": plan.threads,
        "choose": sweep.choose and dataclasses.asdict(sweep.choose),
        "reach": list(sweep.reach) or None,
    }
    about = {name: value for name, value in about.items() if value is not None}
    if sweep.published:
        known = plan.configs if sweep.where == plan.recipe.where else None  # --set adds a `where`
        now = make_reference(plan.recipe, plan.points, known)
        about["published"] = list(sweep.published)
        about["recipe"] = write_reference(now, read_reference(before.get("recipe")))
    folder.make(plan.home)
    write_file(plan.home / SWEEP, json.dumps(about, indent=2) + "\n")

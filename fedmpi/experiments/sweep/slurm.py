"""A sweep on Slurm: the unfinished runs as one job array, and `--watch`, which follows it."""

from __future__ import annotations

import time
from dataclasses import replace

from ...cluster.cancel import end
from ...cluster.status import SILENT, job_of
from ...cluster.submit import SubmitOptions, submit_runs
from ...errors import RunError, UserError
from .local import caught_signals
from .overview import AT_REST, Row, Screen, rows_of, summary
from .pick import Pruner
from .plan import SweepPlan, mark_given_up

LOOK = 5.0  # seconds between two looks at the queue
BUSY = ("running", "queued", "requeued")


def submit(plan: SweepPlan, options: SubmitOptions, at_once: int | None, screen: Screen) -> None:
    """Submit the runs that are neither done nor queued."""
    queued = [row.name for row in rows_of(plan.runs) if row.state in BUSY]
    left = plan.left
    wanted = [(plan.configs[p.name], plan.home / p.name) for p in left if p.name not in queued]
    jobs = submit_runs(with_cores(options, plan, screen), wanted, plan.home, at_once)
    done, busy = len(plan.points) - len(left), len(left) - len(wanted)
    screen.say(f"{plan.sweep.name}: {len(plan.points)} runs in {plan.home}, {done} done, {busy} already queued")
    if jobs:
        number, element, _ = jobs[0].id.partition("_")
        kind = "job array" if element else "job"
        screen.say(f"{len(jobs)} submitted as {kind} {number}; see 'fedmpi sweep ... --status', or add --watch")


def with_cores(options: SubmitOptions, plan: SweepPlan, screen: Screen) -> SubmitOptions:
    """Return the options with one core per thread of a rank, unless they ask for more."""
    threads = max(cfg.threads or 1 for cfg in plan.configs.values())
    cores = options.cpus_per_rank
    if cores is not None and cores < threads:
        raise UserError(
            f"--cpus_per_rank is {cores}, but a rank of this sweep has {threads} threads; leave it out, or give at "
            f"least {threads}"
        )
    if cores is not None and cores > threads:
        screen.say(f"a rank has {cores} cores and uses {threads}: the sweep sets the threads (--set threads=N)")
    return replace(options, cpus_per_rank=cores or threads)


def watch(plan: SweepPlan, at_once: int, screen: Screen) -> bool:
    """Show the status until nothing runs any more, and give up runs that fall behind; return whether a signal ended
    it before that."""
    pruner = Pruner(plan.sweep, plan.points, plan.home)
    states: dict[str, str] = {}
    with caught_signals() as caught:
        while not caught:
            rows = rows_of(plan.runs)
            for row in rows:
                if states.get(row.name) != row.state and not screen.live:
                    screen.say(f"{row.name} {row.state}{f' ({row.why})' if row.why else ''}")
                states[row.name] = row.state
            screen.draw(rows, at_once)
            give_up_jobs(plan, pruner, rows, screen)
            if all(row.state in AT_REST and row.why != SILENT for row in rows):
                screen.say(summary(rows, at_once))
                break
            for _ in range(int(LOOK / 0.2)):
                if caught:
                    break
                time.sleep(0.2)
    return bool(caught)


def give_up_jobs(plan: SweepPlan, pruner: Pruner, rows: list[Row], screen: Screen) -> None:
    """End the jobs of runs that fall behind."""
    for point, row in zip(plan.points, rows, strict=True):
        run = plan.home / point.name
        why = pruner.why(point, row.round if row.state == "running" else 0) if row.state in BUSY else ""
        job = job_of(run) if why else None
        if job is not None:
            mark_given_up(run, why)
            try:
                end(job)
                screen.say(f"{point.name} given up: {why}")
            except RunError as error:
                screen.say(f"{point.name} cannot be given up ({why}): {error}")

"""A sweep on Slurm: what is not done as one job array, and somebody who watches it if wanted."""

from __future__ import annotations

import time
from dataclasses import replace

from ...cluster.arrays import submit_runs
from ...cluster.status import SILENT, job_of
from ...cluster.submit import Submission, end
from ...errors import RunError, UserError
from .crew import told_to_end
from .orders import Todo, note_given_up
from .overview import AT_REST, Row, Screen, rows_of, summary
from .pick import due, out_of_it, without_hope

LOOK = 5.0  # seconds between two looks at the queue
BUSY = ("running", "queued", "requeued")


def submit(todo: Todo, asked: Submission, at_once: int | None, screen: Screen) -> None:
    """Hand the runs that are neither done nor in the queue to Slurm."""
    states = {row.name: row.state for row in rows_of(todo.names, todo.home)}
    wanted = [point for point in todo.left if states[point.name] not in BUSY]
    busy = len(todo.left) - len(wanted)
    asked = with_cores(asked, todo, screen)
    jobs = submit_runs(asked, [(todo.configs[p.name], todo.run(p)) for p in wanted], todo.home, at_once)
    done = len(todo.points) - len(todo.left)
    screen.say(f"{todo.sweep.name}: {len(todo.points)} runs in {todo.home}, {done} done, {busy} in the queue already")
    if jobs:
        array, element, _ = jobs[0].id.partition("_")
        what = f"job {'array ' * bool(element)}{array}"
        screen.say(f"{len(jobs)} submitted as {what}; see 'fedmpi sweep ... --status', or add --watch")


def with_cores(asked: Submission, todo: Todo, screen: Screen) -> Submission:
    """Return the submission with a core for each thread of a rank, unless it asks for more."""
    threads = max(cfg.threads or 1 for cfg in todo.configs.values())
    cores = asked.cpus_per_rank
    if cores is not None and cores < threads:
        raise UserError(
            f"--cpus_per_rank is {cores}, but a rank of this sweep has {threads} threads; leave it out, or give at "
            f"least {threads}"
        )
    if cores is not None and cores > threads:
        screen.say(f"a rank has {cores} cores and uses {threads}: threads belong to the sweep (--set threads=N)")
    return replace(asked, cpus_per_rank=cores or threads)


def watch(todo: Todo, at_once: int, screen: Screen) -> bool:
    """Show how it stands until nothing runs any more, and give up what has no hope; whether it was told to leave."""
    compared: dict[str, int] = {}
    states: dict[str, str] = {}
    with told_to_end() as told:
        while not told:
            rows = rows_of(todo.names, todo.home)
            for row in rows:
                if states.get(row.name) != row.state and not screen.live:
                    screen.say(f"{row.name} {row.state}{f' ({row.why})' if row.why else ''}")
                states[row.name] = row.state
            screen.draw(rows, at_once)
            give_up_hopeless(todo, rows, compared, screen)
            if all(row.state in AT_REST and row.why != SILENT for row in rows):
                screen.say(summary(rows, at_once))
                break
            for _ in range(int(LOOK / 0.2)):
                if told:
                    break
                time.sleep(0.2)
    return bool(told)


def give_up_hopeless(todo: Todo, rows: list[Row], compared: dict[str, int], screen: Screen) -> None:
    """End the jobs of runs that are behind the others."""
    stop = todo.sweep.stop
    for point, row in zip(todo.points, rows, strict=True):
        why = out_of_it(point, todo.points, todo.home, todo.sweep) if row.state in BUSY else ""
        at = due(row.round, stop) if stop is not None and row.state == "running" else 0
        if at > compared.get(point.name, 0):
            compared[point.name] = at
            why = why or without_hope(point, todo.points, todo.home, todo.sweep)
        run, job = todo.run(point), job_of(todo.run(point))
        if job is not None and why:
            note_given_up(run, why)
            try:
                end(job)
            except RunError as error:
                screen.say(f"{point.name} has no hope ({why}), but {error}")
                continue
            screen.say(f"{point.name} given up: {why}")

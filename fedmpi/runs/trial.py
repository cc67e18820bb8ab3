"""Try user-defined rules before a run starts, so that a mistake gives an error message and not a first round in which
every client fails.

Masks and server rules are functions of arrays and are tried on a few numbers (`masks.try_out`, `server.try_out`). A
client rule takes a job, so it is tried on a real one: the first batches of one client, with the result discarded. Jobs
draw random numbers from (seed, round, client) only, so the run has the same bits with and without the trial.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ..aggregate.sums import Unusable, check_declared
from ..clients.task import Task
from ..clients.training import Start, Trainer
from ..cohort import Work
from ..errors import UserError, raised
from ..local import PRIVATE, LocalResult, LocalRule
from ..local.memory import Memory

STEPS = 2


@torch.no_grad()
def try_rule(name: str, rule: LocalRule, task: Task, work: Work) -> None:
    """Refuse a client rule that raises, returns the wrong type or shape, or writes to memory that all clients share.

    It runs for `STEPS` steps. A rule may need more batches, so one that fails is tried again with all steps of the run.
    """
    start = task.start()
    try:
        trouble = try_once(rule, task, replace(work, steps=STEPS)) and try_once(rule, task, work)
    finally:
        task.load(*start)
    if trouble:
        raise UserError(f"local rule '{name}' {trouble}: see docs/own-algorithm.md")


def try_once(rule: LocalRule, task: Task, work: Work) -> str:
    """Return what is wrong with a rule on a job of the first client; '' if nothing is."""
    start_N, ints = task.start()
    start_N = start_N.to(task.device)
    memory = Memory(rule.keeps, task.layout.params, first={PRIVATE: task.first_private}).read(0)
    shared = {c.name: torch.zeros_like(start_N) for c in rule.sends if c.to == "shared"}
    start = Start(start_N, ints, 1, 0, work, shared, memory)
    before = start.versions

    def train(place: Trainer, cid: int) -> str:
        try:
            job = place.job(start)
            result: object = rule(job)
            if not isinstance(result, LocalResult):
                return f"returned {type(result).__name__} for a client; it must return a LocalResult"
            check_declared(job.deliver(result)().result, rule, task.layout)
        except Unusable as error:
            return f"does not deliver what it declares: {error}"
        except (Exception, SystemExit) as error:
            return f"raised {raised(error)} when it was tried on a client's first batches"
        return ""

    [(_, trouble)] = task.each([0], train)
    if start.versions != before:
        return (
            "wrote to job.start_P, job.shared or job.memory, which all clients share; train job.x_P, and copy what "
            "you want to change"
        )
    return trouble

"""A user's own rules are tried out before a run begins, so that a mistake in them is an error message and not a first
round in which every client fails.

Masks and server rules are functions of a few numbers and are tried on those (`masks.try_out`, `server.try_out`). A
client rule works on a job, so it is tried on a real one: the first batches of one client, with what comes of them
thrown away. Jobs draw from (seed, round, client) alone, so the run that follows has the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .. import masks, server
from ..aggregate.sums import Unusable, check_declared
from ..algorithms import Algorithm
from ..clients.task import Task
from ..clients.training import Start, Trainer
from ..cohort import Work
from ..errors import UserError, raised
from ..local import LocalResult, LocalRule
from ..local.memory import Memory

STEPS = 2


def try_algorithm(algorithm: Algorithm) -> None:
    """Refuse an algorithm that was handed over as an object with a mask or a server rule that does not work."""
    masks.try_out("of your own", algorithm.mask)
    server.try_out("of your own", algorithm.server)


@torch.no_grad()
def try_rule(name: str, rule: LocalRule, task: Task, work: Work) -> None:
    """Refuse a client rule that raises, returns something else than it should or writes to what all clients share.

    It has `STEPS` steps. A rule may need more batches than that, so what fails is tried again with all of the run's.
    """
    start = task.start()
    try:
        if trouble := try_once(rule, task, replace(work, steps=STEPS)):
            trouble = try_once(rule, task, work)
    finally:
        task.load(*start)
    if trouble:
        raise UserError(f"local rule '{name}' {trouble}: see docs/own-algorithm.md")


def try_once(rule: LocalRule, task: Task, work: Work) -> str:
    """Return what is wrong with a rule on the first client's job; '' if nothing is."""
    start_N, ints = task.start()
    memory = Memory(rule.keeps, task.layout.params).read(0)
    shared = {c.name: torch.zeros_like(start_N) for c in rule.sends if c.to == "shared"}
    start = Start(start_N, ints, 1, 0, work, shared, memory)
    before = start.versions

    def train(place: Trainer, cid: int) -> str:
        try:
            job = place.job(start)
            result: object = rule(job)
            if not isinstance(result, LocalResult):
                return f"returned {type(result).__name__} for a client; it must return a LocalResult"
            job.finish(result)
            check_declared(result, rule, task.layout.params)
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

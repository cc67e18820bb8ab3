"""What a client does: rules that turn a `Job` into a `LocalResult`.

A rule knows no model, no device, no launcher and no configuration object: it sees vectors, batches and a gradient, so
it can be tested on a parabola. To add one, write a file here, declare its knobs in `knobs.py` and give it a row in
`RULES`, or name it from outside as `package.module:name`: a function of `LocalKnobs`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..knobs import LocalKnobs
from ..plugins import find, refuse
from .descent import Descent, clipping, whole_gradient
from .fedgma2021 import fedgma2021
from .job import PRIVATE, Channel, Job, LocalResult, LocalRule, Piece, Update
from .nova import nova
from .prox import prox
from .scaffold import scaffold
from .sgd import plain, sgd
from .uga import uga

__all__ = ["RULES", "Channel", "Descent", "Job", "LocalKnobs", "LocalResult", "LocalRule", "Update", "make_local"]
__all__ += ["PRIVATE", "Piece", "fedgma2021", "nova", "plain", "prox", "scaffold", "sgd", "uga", "whole_gradient"]

RULES: Mapping[str, Callable[[LocalKnobs], LocalRule]] = {
    "sgd": lambda k: plain(Descent.of(k), in_place=True),
    "adamw": lambda k: plain(Descent.of(replace(k, optimizer="adamw")), in_place=True),
    "prox": lambda k: prox(Descent.of(k), k.mu),
    "scaffold": lambda k: scaffold(Descent.of(k), k.option),
    "nova": lambda k: nova(Descent.of(k)),
    "uga": lambda k: uga(Descent.of(k)),
    "fedgma2021": lambda k: fedgma2021(Descent.of(k), k.gradient),
}


def make_local(name: str, knobs: LocalKnobs) -> LocalRule:
    """Return the local rule of that name, or of that import path, which may be a bare function of a job."""
    rule = find("local rule", name, RULES, knobs)
    if not callable(rule):
        raise refuse("local rule", name, rule, "a LocalRule, or a function of a job")
    rule = rule if isinstance(rule, LocalRule) else LocalRule(rule)
    return rule if knobs.clip_update is None else bounded(rule, knobs.clip_update)


def bounded(rule: LocalRule, most: float) -> LocalRule:
    """Return the same rule with deltas clipped to the norm `most`."""

    def run(job: Job) -> LocalResult:
        result = rule(job)
        return replace(result, delta_P=result.delta_P * clipping(result.delta_P[job.private :], most))

    return replace(rule, run=run)

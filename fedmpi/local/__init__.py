"""What a client does: rules that turn a `Job` into a `LocalResult`.

A rule knows no model, no device, no launcher and no configuration object: it sees vectors, batches and a gradient, so
it can be tested on a parabola. To add one, write a file here and give it a row in `RULES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..errors import unknown
from .job import Job, LocalKnobs, LocalResult, LocalRule
from .sgd import sgd

__all__ = ["RULES", "Job", "LocalKnobs", "LocalResult", "LocalRule", "make_local", "sgd"]

RULES: Mapping[str, Callable[[LocalKnobs], LocalRule]] = {
    "sgd": lambda k: sgd(k.lr, k.momentum, k.weight_decay),
}


def make_local(name: str, knobs: LocalKnobs) -> LocalRule:
    """The local rule of that name."""
    if name not in RULES:
        raise unknown("local rule", name, RULES)
    return RULES[name](knobs)

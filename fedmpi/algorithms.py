"""The table: every algorithm is a choice of what a client does x which mask x what the server does, and at times a meta
step or shared samples on top.

A name from a paper is that paper: every row averages plainly unless `--mask` says otherwise. FedGMA-2021 alone comes
with a mask of its own, which `--mask` replaces like any other default.

The rates that a row falls back on: those of FedAvg, FedProx and SCAFFOLD are the best of Tenison's thesis (appendix A).
For the adaptive rules it gives 0.05 for the server and 0.001 for the client; 0.02 and 0.01 do better here
(Fashion-MNIST, 100 clients with 2 classes each, FedYogi with GMA, best in 150 rounds: 84.4% against 80.4%). The others
were chosen here, on glyphs: the paper of UGA and FedMeta names no rates, that of FedGMA-2021 0.001 for the client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import TypeVar

from .errors import UserError, unknown
from .local import LocalRule
from .masks import Mask
from .plugins import import_path
from .server import ServerRule

T = TypeVar("T")


@dataclass(frozen=True)
class MetaStep:
    """One more step after the server's: w -= lr * gradient of the loss on the meta set, in blocks of `batch`."""

    lr: float
    batch: int = 64


@dataclass(frozen=True)
class Algorithm:
    """The three choices, made; and the meta step, where there is one."""

    local: LocalRule
    mask: Mask
    server: ServerRule
    meta: MetaStep | None = None


@dataclass(frozen=True)
class Row:
    """A named combination and the values of its knobs that the user leaves out."""

    local: str
    server: str
    local_lr: float = 0.01
    server_lr: float = 1.0
    local_momentum: float = 0.9
    clip: float = 0.0
    clip_update: float = 0.0
    epochs: int = 1
    server_momentum: float = 0.0
    mask: str = "mean"
    tau: float = 0.4
    meta_size: int = 0
    meta_lr: float = 0.0
    share: bool = False


ADAPTIVE = Row("sgd", "adam", local_lr=0.01, server_lr=0.02)
UNBIASED = Row("uga", "sgd", server_lr=0.1, local_momentum=0.0, epochs=2)

ALGORITHMS = {
    "fedavg": Row("sgd", "sgd"),
    "fedavgm": Row("sgd", "sgd", server_momentum=0.9),
    "fedprox": Row("prox", "sgd"),
    "scaffold": Row("scaffold", "sgd"),
    "fednova": Row("nova", "sgd"),
    "fedadam": ADAPTIVE,
    "fedyogi": replace(ADAPTIVE, server="yogi"),
    "fedadagrad": replace(ADAPTIVE, server="adagrad"),
    "uga": UNBIASED,
    "fedmeta": Row("sgd", "sgd", meta_size=600, meta_lr=0.05),
    "fedmeta-uga": replace(UNBIASED, meta_size=600, meta_lr=0.05),
    "fedshare": Row("sgd", "sgd", meta_size=600, share=True),
    "fedgma2021": Row("fedgma2021", "sgd", server_lr=0.01, mask="and", tau=0.8),
}


def find_row(name: str) -> Row:
    """The row of that name, or the `Row` at that import path."""
    if ":" not in name:
        if name not in ALGORITHMS:
            raise unknown("algorithm", name, ALGORITHMS, own=True)
        return ALGORITHMS[name]
    return check_row(name, import_path("algorithm", name))


def check_row(name: str, row: object) -> Row:
    """The row, refused unless it is one and its values are of the right kinds."""
    if not isinstance(row, Row):
        raise UserError(f"algorithm '{name}' is {type(row).__name__}; it must be a fedmpi.algorithms.Row")
    for field in fields(Row):
        value, example = getattr(row, field.name), "" if field.default is MISSING else field.default
        wanted = (int, float) if isinstance(example, float) else type(example)
        if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(example, bool):
            raise UserError(f"algorithm '{name}' has {field.name} = {value!r}; it must be like {example!r}")
    return row


def combine(row: Row, local: str, server: str) -> Row:
    """The row with other rules: what belongs to a rule comes from the first row that has it, so that a free combination
    starts from sensible rates. (UGA sends gradients, the others distances: the server's rate depends on both.)"""
    if (local, server) == (row.local, row.server):
        return row
    of_local = first(lambda r: r.local == local) or row
    of_server = first(lambda r: (r.local, r.server) == (local, server)) or first(lambda r: r.server == server) or row
    if local != row.local:
        row = replace(
            row,
            local_lr=of_local.local_lr,
            local_momentum=of_local.local_momentum,
            clip=of_local.clip,
            clip_update=of_local.clip_update,
            epochs=of_local.epochs,
        )
    momentum = row.server_momentum if server == row.server else of_server.server_momentum
    return replace(row, local=local, server=server, server_lr=of_server.server_lr, server_momentum=momentum)


def first(fits: Callable[[Row], bool]) -> Row | None:
    """The first row of the table that fits."""
    return next((row for row in ALGORITHMS.values() if fits(row)), None)

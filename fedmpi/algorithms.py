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

from .config import Config, Local, Meta, Server
from .errors import UserError, unknown
from .local import LocalKnobs, LocalRule, make_local
from .local.fedgma2021 import GRADIENTS
from .local.scaffold import OPTIONS
from .masks import Mask, make_mask
from .plugins import import_path
from .rates import make_rate
from .server import VARIANTS, ServerKnobs, ServerRule, make_server

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


def resolve(cfg: Config, row: Row | None = None) -> Config:
    """The configuration with every knob that was left to the algorithm filled in from a row, else from its own."""
    row = check_row(cfg.algorithm, row) if row is not None else find_row(cfg.algorithm)

    def given(value: T | None, otherwise: T) -> T:
        return otherwise if value is None else value

    row = combine(row, given(cfg.local.rule, row.local), given(cfg.server.rule, row.server))
    local = replace(
        cfg.local,
        rule=row.local,
        lr=given(cfg.local.lr, row.local_lr),
        momentum=given(cfg.local.momentum, row.local_momentum),
        clip=given(cfg.local.clip, row.clip),
        clip_update=given(cfg.local.clip_update, row.clip_update),
        epochs=given(cfg.local.epochs, row.epochs),
    )
    if cfg.server.variant not in VARIANTS:
        raise unknown("server variant", cfg.server.variant, VARIANTS)
    variant = VARIANTS[cfg.server.variant]
    server = replace(
        cfg.server,
        b2=given(cfg.server.b2, variant.b2),
        eps=given(cfg.server.eps, variant.eps),
        rule=row.server,
        lr=given(cfg.server.lr, row.server_lr),
        momentum=given(cfg.server.momentum, row.server_momentum),
    )
    meta = replace(
        cfg.meta,
        size=given(cfg.meta.size, row.meta_size),
        lr=given(cfg.meta.lr, row.meta_lr),
        share=given(cfg.meta.share, row.share),
    )
    return replace(
        cfg, mask=given(cfg.mask, row.mask), tau=given(cfg.tau, row.tau), local=local, server=server, meta=meta
    )


def build(cfg: Config) -> Algorithm:
    """The algorithm of a resolved configuration; an unknown name is a `UserError` with the nearest match."""
    assert cfg.mask is not None and cfg.tau is not None, "resolve the configuration first"
    return Algorithm(
        build_local(cfg.local, cfg.rounds),
        make_mask(cfg.mask, cfg.tau, cfg.sharpness),
        build_server(cfg.server, cfg.rounds),
        build_meta(cfg.meta),
    )


def build_local(local: Local, rounds: int) -> LocalRule:
    assert local.rule is not None and local.lr is not None and local.momentum is not None, "resolve it first"
    for option, word, known in (
        ("--local.option", local.option, OPTIONS),
        ("--local.gradient", local.gradient, GRADIENTS),
    ):
        if word not in known:  # also where the rule does not read it
            raise unknown(option, word, known)
    rate = make_rate("--local.schedule", local.schedule, local.lr, rounds)
    knobs = LocalKnobs(
        rate,
        local.momentum,
        local.weight_decay,
        local.clip or None,
        local.clip_update or None,
        local.mu,
        local.option,
        local.gradient,
    )
    return make_local(local.rule, knobs)


def build_server(server: Server, rounds: int) -> ServerRule:
    assert server.rule is not None and server.lr is not None and server.momentum is not None, "resolve it first"
    rate = make_rate("--server.schedule", server.schedule, server.lr, rounds)
    knobs = ServerKnobs(rate, server.momentum, server.b1, server.b2, server.eps, server.variant)
    return make_server(server.rule, knobs, server.mask_moments)


def build_meta(meta: Meta) -> MetaStep | None:
    """The meta step, or None where its learning rate is zero."""
    assert meta.size is not None and meta.lr is not None and meta.share is not None, "resolve it first"
    if (meta.lr or meta.share) and not meta.size:
        why = f"--meta.lr is {meta.lr:g}" if meta.lr else "--meta.share is true"
        raise UserError(f"{why} but --meta.size is 0; give the number of samples to hold out")
    if meta.weights is not None and not meta.size:
        raise UserError("--meta.weights are given but --meta.size is 0; give the number of samples to hold out")
    return MetaStep(meta.lr, meta.batch) if meta.lr else None

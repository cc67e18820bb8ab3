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

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .errors import UserError, unknown
from .local import LocalRule
from .masks import Mask
from .plugins import import_path
from .server import ServerRule


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


@dataclass(frozen=True, init=False)
class Row:
    """A named combination of rules, with defaults for options that the user leaves out and whose own default is null:
    named as on the command line, `Row("prox", "sgd", {"local.lr": 0.1})`, or by keyword, `Row(..., local_lr=0.1)`."""

    local: str
    server: str
    defaults: Mapping[str, Any]

    def __init__(self, local: str, server: str, defaults: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        if strange := [word for word in keywords if word not in KEYWORDS]:
            raise unknown("keyword of a Row", strange[0], KEYWORDS)
        named = {KEYWORDS[word]: value for word, value in keywords.items()}
        for name, value in {"local": local, "server": server, "defaults": {**(defaults or {}), **named}}.items():
            object.__setattr__(self, name, value)


KEYWORDS = {"local_lr": "local.lr", "local_momentum": "local.momentum", "epochs": "local.epochs"}
KEYWORDS |= {"clip": "local.clip", "clip_update": "local.clip_update", "mask": "mask", "tau": "tau"}
KEYWORDS |= {"server_lr": "server.lr", "server_momentum": "server.momentum"}
KEYWORDS |= {"meta_size": "meta.size", "meta_lr": "meta.lr", "share": "meta.share"}
"""keyword of a Row -> option"""

ADAPTIVE = Row("sgd", "adam", {"server.lr": 0.02})
UNBIASED = Row("uga", "sgd", {"server.lr": 0.1, "local.momentum": 0.0, "local.epochs": 2})
META = {"meta.size": 600, "meta.lr": 0.05}

ALGORITHMS = {
    "fedavg": Row("sgd", "sgd"),
    "fedavgm": Row("sgd", "sgd", {"server.momentum": 0.9}),
    "fedprox": Row("prox", "sgd"),
    "scaffold": Row("scaffold", "sgd"),
    "fednova": Row("nova", "sgd"),
    "fedadam": ADAPTIVE,
    "fedyogi": replace(ADAPTIVE, server="yogi"),
    "fedadagrad": replace(ADAPTIVE, server="adagrad"),
    "uga": UNBIASED,
    "fedmeta": Row("sgd", "sgd", META),
    "fedmeta-uga": replace(UNBIASED, defaults={**UNBIASED.defaults, **META}),
    "fedshare": Row("sgd", "sgd", {"meta.size": 600, "meta.share": True}),
    "fedgma2021": Row("fedgma2021", "sgd", {"server.lr": 0.01, "mask": "and", "tau": 0.8}),
}


def find_row(name: str) -> Row:
    """Return the row of that name, or the `Row` at that import path."""
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    if ":" not in name:
        raise unknown("algorithm", name, ALGORITHMS, own=True)
    row = import_path("algorithm", name)
    if not isinstance(row, Row):
        raise UserError(f"algorithm '{name}' is {type(row).__name__}; it must be a fedmpi.algorithms.Row")
    return row


def combine(row: Row, local: str, server: str) -> Row:
    """Return the row with other rules: what belongs to a rule comes from the first row that has it, so that a free
    combination starts from sensible rates. (UGA sends gradients, the others distances: the server's rate depends on
    both.)"""
    if (local, server) == (row.local, row.server):
        return row
    rows = list(ALGORITHMS.values())
    same_server = sorted((r for r in rows if r.server == server), key=lambda r: r.local != local)  # stable
    of_local, of_server = next((r for r in rows if r.local == local), row), next(iter(same_server), row)

    def source(option: str) -> Row:
        if option.startswith("local."):
            return row if local == row.local else of_local
        if option.startswith("server."):
            return row if server == row.server and option != "server.lr" else of_server
        return row

    options = {*row.defaults, *of_local.defaults, *of_server.defaults}
    return Row(local, server, {name: source(name).defaults[name] for name in options if name in source(name).defaults})

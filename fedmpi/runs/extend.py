"""Extend `Config` with the options that plug-ins declare.

Options of a client rule are set by --local.NAME, of a server rule by --server.NAME, of a mask by --mask_options.NAME.
Masks have a separate group, because `mask` itself is a string, and because a name at the top level could collide with
an option of a later version. If no plug-in declares options, the configuration is a plain `Config`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..knobs import LocalKnobs, MaskKnobs, ServerKnobs
from ..plugins import find_outside
from ..plugins.knobs import extended, knobs, plain_knobs, with_values
from .config import Config, Local, Server

if TYPE_CHECKING:
    from ..algorithms import Row

T = TypeVar("T")


@dataclass(frozen=True)
class MaskGroup:
    """The options of a plug-in mask, besides tau and sharpness."""


NO_OPTIONS = MaskGroup()
GROUPS: dict[str, tuple[type, type]] = {
    "local": (Local, LocalKnobs),
    "mask_options": (MaskGroup, MaskKnobs),
    "server": (Server, ServerKnobs),
}
"""group of options -> its class, and the built-in knobs that a plug-in's class extends"""
KINDS = {"local.rule": "local rule", "mask": "mask", "server.rule": "server rule"}
"""option that names a plug-in -> kind of plug-in; in the order of GROUPS"""


def declared(option: str, name: str | None, base: type[T]) -> type[T]:
    """Return the class of knobs that the rule of this name takes: `base` unless it is a plug-in."""
    return find_outside(KINDS[option], name, base)[1] if name and ":" in name else base


def config_for(names: Mapping[str, Any], row: Row | None = None) -> type[Config]:
    """Return the configuration class for the rules named by these options or, by default, the algorithm's row."""
    if row is None and ":" in str(names.get("algorithm")):
        from ..algorithms import find_row

        row = find_row(str(names["algorithm"]))
    of_row = {} if row is None else {"local.rule": row.local, "server.rule": row.server, **row.defaults}
    classes: list[type] = []
    for option, (_, base) in zip(KINDS, GROUPS.values(), strict=True):
        name = names.get(option) or of_row.get(option)
        classes.append(declared(option, name if isinstance(name, str) else None, base))
    return with_groups(*classes)


@functools.cache
def with_groups(*classes: type) -> type[Config]:
    """Return `Config` with the knobs of these classes in their groups; the same class for the same arguments."""
    more = []
    for (name, (group, base)), wanted in zip(GROUPS.items(), classes, strict=True):
        if wanted is not base:
            kind = extended(group, wanted, base)
            more.append((name, kind, field(default_factory=kind)))
    space = {"__module__": Config.__module__, "__doc__": Config.__doc__}
    return make_dataclass("Config", more, bases=(Config,), frozen=True, namespace=space) if more else Config


def config_class(names: Mapping[str, Any], row: Row | None = None) -> type[Config]:
    """Return the configuration class for these options: `Config`, unless one of them can only be a plug-in's option.
    So plug-ins without options are not imported to read a configuration."""
    known = knobs(Config())
    unknown = [name for name in names if name.partition(".")[0] in GROUPS and name not in known]
    return config_for(names, row) if unknown else Config


def extend(cfg: Config, row: Row) -> Config:
    """Return the configuration with the options of its plug-ins, at their defaults unless given."""
    names = {"local.rule": cfg.local.rule, "mask": cfg.mask, "server.rule": cfg.server.rule}
    kind = config_for(names, row)
    if type(cfg) is kind:
        return cfg
    usual = kind()
    known = knobs(usual)
    found: Config = with_values(usual, {name: one for name, one in plain_knobs(cfg).items() if name in known})
    return found

"""Write fedmpi/runs/typed.py, the knobs of `fedmpi.train` for type checkers and editors, from the fields of `Config`:

python -m tests.typed
"""

from __future__ import annotations

import dataclasses
import textwrap
from pathlib import Path
from typing import Any

from fedmpi.runs.aliases import ALIASES
from fedmpi.runs.config import Config, Local, MaskOptions, Server

FILE = Path(__file__).parents[1] / "fedmpi" / "runs" / "typed.py"
HEAD = '''"""The knobs of `fedmpi.train` for type checkers and editors. From config.py, by python -m tests.typed"""
# ruff: noqa: UP013  (tables of names and types, several on a line)

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypedDict

from .config import {}

if TYPE_CHECKING:  # what config.py makes of the knobs that rules declare
'''
MADE = (Local, MaskOptions, Server)
OWN = ("algorithm", "data", "model", "out")  # arguments of fedmpi.train itself


def source() -> str:
    """The text of the module: a TypedDict for each group, and one for all knobs with the common short names."""
    groups = {f.name: getattr(Config(), f.name) for f in dataclasses.fields(Config)}
    groups = {name: part for name, part in groups.items() if dataclasses.is_dataclass(part)}
    text = HEAD.format(", ".join(sorted(type(part).__name__ for part in groups.values() if type(part) not in MADE)))
    text += "".join(written_out(kind) for kind in MADE)
    text += "else:\n    from .config import Local, Server\n"
    for part in groups.values():
        text += declared(f"{type(part).__name__}Dict", {f.name: f.type for f in dataclasses.fields(part)})
    knobs: dict[str, Any] = {f.name: f.type for f in dataclasses.fields(Config) if f.name not in OWN}
    knobs |= {name: f"{type(part).__name__} | {type(part).__name__}Dict" for name, part in groups.items()}
    for real, some in ALIASES.items():
        group, _, name = real.rpartition(".")
        if group:
            knobs[some[0]] = {f.name: f.type for f in dataclasses.fields(groups[group])}[name]
    return text + declared("Knobs", knobs)


def written_out(kind: type) -> str:
    """Return the definition of a dataclass, indented."""
    lines = "".join(f"        {f.name}: {f.type} = {f.default!r}\n" for f in dataclasses.fields(kind))
    return f"\n    @dataclass(frozen=True)\n    class {kind.__name__}:\n{lines}\n".replace("'", '"')


def declared(name: str, fields: dict[str, Any]) -> str:
    """Return a TypedDict without required keys, as many per line as fit."""
    items = " ".join(f'"{field}": {kind},'.replace(" ", "~") for field, kind in fields.items())
    body = textwrap.indent(textwrap.fill(items, 116, break_on_hyphens=False).replace("~", " "), "    ")
    return f'\n{name} = TypedDict("{name}", {{\n{body}\n}}, total=False)\n'


if __name__ == "__main__":
    FILE.write_text(source(), encoding="utf-8")

"""Help texts: the options of a dataclass with the docstrings of its fields, in groups, as wide as the terminal.

A field's text stands in its docstring, next to its default. This module holds only which options of `train` belong
together and which of them the short help shows.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..plugins.knobs import help_texts
from .config import Config, Launch

USAGE = "fedmpi train [--config FILE] [options]"
ABOUT = "Train a model by federated learning. Run the same command again to resume a run that was stopped."
NOTES = """Options can also be given in a YAML file (--config). Names from other tools work too, such as --lr for
--local.lr and --batch-size for --local.batch; see docs/guide.md."""
MORE = "Show every option with 'fedmpi train --help-all'. "

GROUPS: dict[str, tuple[str, ...]] = {
    "what to train": ("algorithm", "mask", "tau", "sharpness", "mask_options.", "model", "lora", "rounds", "seed"),
    "clients": ("clients", "cohort", "min_clients", "local."),
    "server": ("server.", "meta."),
    "data": ("data", "split", "skew.", "text.", "augment", "data_root", "data_on", "workers"),
    "run": (
        *("config", "print_config", "out", "resume", "max_minutes", "checkpoint."),
        *("eval.", "evaluate", "export", "generate", "log_to", "verbose", "quiet"),
    ),
    "cluster": ("ranks", "ranks_per_gpu", "max_restarts", "comm", "device", "sums", "threads", "timeout"),
    "advanced": ("sum", "wire", "deterministic", "step.", "memory."),
}
"""title -> options of `train` in this order; 'local.' stands for all options that begin with it"""

SHORT = tuple(
    "algorithm mask tau model rounds seed clients cohort local.lr local.epochs local.batch local.momentum server.lr "
    "data split skew.alpha config out eval.every log_to ranks device".split()
)
"""the options that `fedmpi train --help` shows"""


@dataclass(frozen=True)
class Option:
    """An option or an argument of a command, as its help shows it."""

    name: str
    text: str
    default: Any = None
    metavar: str | None = None
    """None: a flag that takes no value"""
    short: str | None = None
    positional: bool = False

    @property
    def full_text(self) -> str:
        """Return the text with the default, if there is one to show, and with % escaped for argparse."""
        default = str(self.default).lower() if isinstance(self.default, bool) else self.default
        shown = self.metavar is not None and default not in (None, "", [])
        return (f"{self.text} Default: {default}." if shown else self.text).replace("%", "%%")


class Formatter(argparse.HelpFormatter):
    """argparse's format, as wide as the terminal, without breaking names at their hyphens."""

    def __init__(self, prog: str) -> None:
        width = min(shutil.get_terminal_size().columns, 110) - 2
        super().__init__(prog, max_help_position=28, width=width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(text, width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return textwrap.fill(" ".join(text.split()), width, break_on_hyphens=False, break_long_words=False)


EXTRA = (
    Option("config", "YAML file with options, or the name of a bundled recipe. May be repeated.", metavar="FILE"),
    Option("print_config", "Print the configuration as YAML and exit.", metavar=None),
)
"""options of `train` that are no fields of its dataclasses"""


def train_help(kind: type[Config], everything: bool) -> str:
    """Return the help of `train`: the common options and those of plug-ins, or all of them."""
    known = train_options(kind)
    shown = set(known) if everything else {*SHORT, *(known.keys() - train_options().keys())}
    sections = {title: [known[name] for name in group_names(title, known) if name in shown] for title in GROUPS}
    notes = NOTES if everything else MORE + NOTES
    return render(USAGE, ABOUT, {title: some for title, some in sections.items() if some}, notes)


def train_options(kind: type[Config] = Config) -> dict[str, Option]:
    """Return every option of `train` by its name; `kind` may have those of plug-ins."""
    found = [*EXTRA, *options_of(kind), *options_of(Launch)]
    return {option.name: option for option in found}


def group_names(title: str, known: Mapping[str, Option]) -> list[str]:
    """Return the names of a group's options in order; a prefix that ends in a dot stands for all that begin with it."""
    names: list[str] = []
    for entry in GROUPS[title]:
        names += [name for name in known if name.startswith(entry)] if entry.endswith(".") else [entry]
    return names


def options_of(kind: Any, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a dataclass and of the dataclasses inside it."""
    explained = texts(kind)
    for f in dataclasses.fields(kind):
        default = f.default
        if f.default_factory is not dataclasses.MISSING:
            default = f.default_factory()
        if dataclasses.is_dataclass(default):
            yield from options_of(type(default), f"{prefix}{f.name}.")
            continue
        metavar = f.metadata.get("metavar", "true|false" if isinstance(default, bool) else f.name.upper())
        yield Option(
            f"{prefix}{f.name}",
            explained.get(f.name, ""),
            default,
            metavar=metavar,
            short=f.metadata.get("short"),
            positional=bool(f.metadata.get("positional")),
        )


def texts(kind: Any) -> dict[str, str]:
    """Return the strings under the fields of a dataclass, of its bases, and of the rules whose knobs it joins."""
    sources = [one for base in inspect.getmro(kind) for one in (base, *getattr(base, "documented", ()))]
    classes = [one for source in sources for one in inspect.getmro(source)]
    return {name: text for one in reversed(classes) for name, text in help_texts(one).items()}


def render(usage: str, about: str, sections: Mapping[str, Sequence[Option]], notes: str = "") -> str:
    """Return a help page: usage, what the command does, sections of options, notes."""
    parser = argparse.ArgumentParser(
        usage=usage, description=about, epilog=notes, add_help=False, formatter_class=Formatter
    )
    for title, options in sections.items():
        group = parser.add_argument_group(title)
        for option in options:
            names = [option.name] if option.positional else [*filter(None, [option.short]), f"--{option.name}"]
            takes: Any = {"action": "store_true"} if option.metavar is None else {"metavar": option.metavar}
            group.add_argument(*names, help=option.full_text, **takes)
    return parser.format_help()

"""From a command line to a dataclass: the `Config` of a run, or the options of another command.

YAML files and bundled recipes come first, then options, both read by jsonargparse. Every mistake becomes an error
message of one line: an unknown name with the closest match, a value of the wrong type, a file that cannot be read.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import re
import reprlib
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, field
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jsonargparse
import numpy as np
import yaml

from ..errors import UserError, nearest, one_line, squeezed
from ..plugins.knobs import check_bounds, knobs
from .aliases import advice, real_keywords, real_options
from .config import Config, Launch, flat, renamed
from .extend import config_class, config_for
from .schema import load_yaml

if TYPE_CHECKING:
    from ..algorithms import Row

T = TypeVar("T")

HELP = {"-h", "--help"}
HELP_ALL = {"--help-all", "--help_all"}
SWEEP = {"grid", "variants", "seeds"}  # keys of a sweep file that a run's configuration does not have


# Options of any command


def positional(metavar: str, many: bool = False) -> Any:
    """Return a dataclass field for a positional argument, or for any number of them; '' or [] if there is none."""
    about = {"positional": True, "metavar": metavar, "nargs": "*" if many else "?"}
    return field(default_factory=list, metadata=about) if many else field(default="", metadata=about)


def flag(short: str = "") -> Any:
    """Return a dataclass field for an option without a value: False, or True if it is given."""
    return field(default=False, metadata={"metavar": None, "action": "store_true", "short": short})


def several(metavar: str, type: Callable[[str], Any] = str) -> Any:
    """Return a dataclass field for an option that takes one or more values and may be repeated."""
    return field(default_factory=list, metadata={"metavar": metavar, "nargs": "+", "action": "extend", "type": type})


def read_options(
    kind: type[T],
    arguments: Sequence[str],
    command: str,
    about: str,
    usage: str = "[options]",
    notes: str = "",
) -> T:
    """Return the options of a command as a dataclass, checked; on --help print the help and exit.

    kind: fields are options, with `knob`, `flag` and `several`, or arguments (`positional`); their docstrings are the
    help texts. command: 'logs', 'data list'. usage: what follows the command's name.
    """
    if HELP & set(arguments):
        from .help import Option, options_of, render

        found = [*options_of(kind), Option("help", "Show this help and exit.", short="-h")]
        sections = {
            "arguments": [option for option in found if option.positional],
            "options": [option for option in found if not option.positional],
        }
        text = render(f"fedmpi {command} {usage}", about, {k: v for k, v in sections.items() if v}, notes)
        print(text, end="", flush=True)
        raise SystemExit(0)
    parser = make_parser(f"fedmpi {command}", kind)
    options = filled(parser, kind, lambda: parser.parse_args(list(arguments)))
    check_bounds(options)
    return options


# Options of `train`


def parse(arguments: list[str]) -> Config:
    """Return the configuration of a command line: YAML files first, then the options in their order."""
    words = real_options(arguments)
    files = [read_config(word.removeprefix("--config=")) for word in words if word.startswith("--config=")]
    words = [word for word in words if not word.startswith("--config=")]  # an option overrides a file anywhere
    given = {name[2:]: value for name, _, value in (word.partition("=") for word in words) if name.startswith("--")}
    known = {name: value for _, tree in files for name, value in flat(tree).items()} | given
    helps = bool((HELP | HELP_ALL) & set(arguments))
    plugged = helps or any(name.startswith("print") for name in given)
    kind = config_for(known) if plugged else config_class(known)
    if helps:
        from .help import train_help

        print(train_help(kind, everything=bool(HELP_ALL & set(arguments))), end="", flush=True)
        raise SystemExit(0)
    for path, tree in files:
        check_keys(f"--config {path}", tree, knobs(kind()))
    if files:
        check_renaming(*files[-1], given)
    words = real_options(words, kind)  # once more, for the flags of plug-ins
    for name, value in given.items():
        refuse_comment(name, value)
    parser = make_parser("fedmpi train", kind)
    return filled(parser, kind, lambda: parser.parse_args([*(as_argument(*file) for file in files), *words]))


def split_launch(arguments: list[str]) -> tuple[Launch, list[str]]:
    """Take the options of the launcher out of a command line; return them and the rest."""
    names = [f"--{f.name}" for f in dataclasses.fields(Launch)]
    own: list[str] = []
    rest: list[str] = []
    words = iter(arguments)
    for word in words:
        (own if word.partition("=")[0] in names else rest).append(word)
        if word in names:
            own += itertools.islice(words, 1)
    if not own:
        return Launch(), rest
    joined: list[str] = []
    words = iter(own)
    for word in words:
        name, _, value = (word if "=" in word else f"{word}={next(words, '')}").partition("=")
        if not value or value.startswith("--"):
            raise UserError(f"{name} needs a value")
        joined.append(f"{name}={value}")
    numbers = [word for word in joined if word != "--ranks=auto"]
    launch = read_options(Launch, numbers, "train", "")
    if len(numbers) < len(joined) or launch.ranks_per_gpu is not None:
        return with_ranks_for_gpus(launch), rest
    if launch.max_restarts is not None and launch.ranks == 1:
        raise UserError(
            f"--max_restarts is {launch.max_restarts} but --ranks is 1; give --ranks 2 or more, or leave it out"
        )
    return launch, rest


def with_ranks_for_gpus(launch: Launch) -> Launch:
    """Return the options of the launcher with a number of ranks for this machine's accelerators."""
    from ..device import count

    if launch.ranks > 1:
        raise UserError(f"--ranks is {launch.ranks} and --ranks_per_gpu is {launch.ranks_per_gpu}; give one of them")
    devices = count()
    if not devices:
        raise UserError("--ranks is auto, which is a rank for each GPU, but none is visible; give a number of ranks")
    ranks = devices * (launch.ranks_per_gpu or 1)
    return dataclasses.replace(launch, ranks=ranks, max_restarts=launch.max_restarts if ranks > 1 else None)


def from_values(values: dict[str, Any], row: Row | None = None) -> Config:
    """Return the configuration with these values, groups as dicts or dataclasses; checked like a command line. `row` is
    the algorithm's if it has no name."""
    tree = as_tree(values)
    kind: Any = config_class(flat(tree), row)
    check_keys("fedmpi.train", tree, knobs(kind()))
    parser = parser_of_values("fedmpi.train", kind)
    cfg: Config = filled(parser, kind, lambda: parser.parse_object(tree))
    return cfg


def as_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the real names of their options, groups as dicts of what differs from the defaults."""
    return real_keywords({name: plain(value) for name, value in values.items()})


def plain(value: Any) -> Any:
    """Return a value as YAML could have it: a group as a dict of what differs from its defaults, numpy's numbers as
    Python's."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        usual = vars(type(value)())
        value = {name: one for name, one in vars(value).items() if one != usual[name]}
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def make_parser(name: str, kind: type) -> jsonargparse.ArgumentParser:
    """Return a parser for the fields of a dataclass. Help texts are not its task: see `help.py`."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=False)
    parser = jsonargparse.ArgumentParser(prog=name, exit_on_error=False, allow_abbrev=False)
    if issubclass(kind, Config):
        parser.add_argument("--config", action="config")
    by_hand = [f for f in dataclasses.fields(kind) if "metavar" in f.metadata or f.metadata.get("short")]
    parser.add_class_arguments(kind, as_group=False, skip={f.name for f in by_hand})
    for f in by_hand:  # a positional argument, a flag, or an option with several values or a short name
        how: dict[str, Any] = {name: f.metadata[name] for name in ("nargs", "action", "type") if name in f.metadata}
        how["default"] = f.default_factory() if f.default_factory is not MISSING else f.default
        if not how.keys() & {"nargs", "action"}:
            how["type"] = int if str(f.type).startswith("int") else str
        names = [f.name] if f.metadata.get("positional") else [*filter(None, [f.metadata.get("short")]), f"--{f.name}"]
        parser.add_argument(*names, **how)
    return parser


parser_of_values = functools.cache(make_parser)  # making one takes longer than using it, and a sweep has many runs


def filled(parser: jsonargparse.ArgumentParser, kind: type[T], read: Callable[[], jsonargparse.Namespace]) -> T:
    """Return the dataclass with what the parser reads; raise a `UserError` of one line where it complains."""
    try:
        values = parser.instantiate(read())
    except argparse.ArgumentError as error:
        known = [option for action in parser._actions for option in action.option_strings]
        raise UserError(error_message(str(error), known, parser.prog)) from None
    except (OverflowError, RecursionError):
        raise UserError("a value is too large to be read; give a smaller one") from None
    return kind(**{f.name: getattr(values, f.name) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


# Files and recipes


def recipes() -> dict[str, Path]:
    """Return the bundled recipes by name."""
    folder = Path(str(resources.files("fedmpi") / "experiments" / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def single_runs() -> dict[str, Path]:
    """Return the bundled recipes that are a single run, not a sweep."""
    return {name: path for name, path in recipes().items() if not is_sweep(read_yaml(path, str(path)))}


def is_sweep(tree: Any) -> bool:
    """Return whether a YAML file is a sweep rather than the configuration of a run."""
    return isinstance(tree, dict) and not SWEEP.isdisjoint(tree)


def as_argument(file: Path, tree: Any) -> str:
    """Return a configuration file for the parser: its path, or its text if it uses old names of options."""
    same = yaml.safe_load(file.read_text(encoding="utf-8")) == tree
    return f"--config={file if same else yaml.safe_dump(tree, sort_keys=False)}"


def check_renaming(file: Path, tree: dict[str, Any], given: Mapping[str, str]) -> None:
    """Refuse another --algorithm for a file that names its rules, as the config.yaml of a run does: the run would have
    the new name and the old rules."""
    asked, known = given.get("algorithm"), flat(tree)
    rules = [f"{name} {known[name]}" for name in ("local.rule", "server.rule") if known.get(name) and name not in given]
    if asked and rules and squeezed(tree.get("algorithm", asked)) != squeezed(asked):
        raise UserError(
            f"--algorithm {asked} with --config {file}, which sets {' and '.join(rules)} for "
            f"algorithm {tree['algorithm']}; leave --algorithm out, or use a file without these rules"
        )


def read_config(name: str) -> tuple[Path, Any]:
    """Return the file of that name, or else the bundled recipe, and its content by today's names of the options."""
    path = Path(name)
    if name in recipes() and not path.is_file():
        path = recipes()[name]
    elif not os.path.exists(path):  # Path.exists raises for a name that is too long
        near = nearest(name, recipes())
        hint = f"did you mean '{near}'? " if near else ""
        raise UserError(f"--config '{name}' is neither a file nor a recipe; {hint}recipes: {', '.join(single_runs())}")
    tree = read_yaml(path, f"--config {path}")
    if is_sweep(tree):
        raise UserError(f"--config {name} is a sweep; run it with 'fedmpi sweep {shlex.quote(name)}'")
    return path, renamed(tree)


def read_yaml(path: Path, where: str) -> Any:
    """Return the content of a YAML file; raise a `UserError` if it cannot be read, or has aliases or duplicate keys."""
    try:
        if not path.is_file():
            raise ValueError("not a regular file")
        return load_yaml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = one_line(error)
        raise UserError(f"{where} cannot be read as YAML ({why}); correct it or give another file") from None


def refuse_comment(name: str, value: str) -> None:
    """Refuse a value that the parser would take for a comment, and so for null."""
    if value.lstrip().startswith("#"):
        raise UserError(f"--{name} is '{value}'; a value cannot begin with #")


def check_keys(where: str, tree: Any, known: dict[str, Any], prefix: str = "") -> None:
    """Refuse a part of a YAML file that is not a mapping, or that has an unknown key."""
    if not isinstance(tree, dict):
        part = f"'{prefix[:-1]}' in {where}" if prefix else where
        holds = "nothing" if tree is None else reprlib.repr(tree)
        raise UserError(f"{part} holds {holds}; it must hold options, one per line: 'name: value'")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise UserError(unknown_option(name, known, where=f" in {where}"))
        if "." in str(key) and str(key).partition(".")[0] in tree:
            raise UserError(f"'{key}' in {where} is given next to its group '{key.partition('.')[0]}'; move it there")
        if dataclasses.is_dataclass(known[name]):
            check_keys(where, value, known, f"{name}.")
        elif isinstance(value, str):
            refuse_comment(name, value)


def unknown_option(given: str, known: Iterable[str], where: str = "", command: str = "fedmpi train") -> str:
    """Return the error message for an unknown option, with the closest match."""
    known, train, dashes = list(known), command == "fedmpi train", "" if where else "--"
    near = next((k for k in known if k.startswith(given)), None) or nearest(given, known)
    hint = (
        (advice(given, dashes) if train else None)
        or (f"did you mean '{near}'?" if near else None)
        or (advice(given, dashes, roughly=True) if train else None)
        or f"'{command} {'--help-all' if train else '--help'}' lists all options"
    )
    return f"unknown option '{given}'{where}; {hint}"


def error_message(text: str, known: list[str], command: str) -> str:
    """Return a parser's error in one line: what was given, what is valid."""
    names = {"float": "a number", "int": "a whole number", "bool": "true or false", "str": "a word"}
    names |= {"NoneType": "null", "list": "a list of numbers"}
    key = re.search(r'key "([^"]+)"', text)
    value = re.search(r"(?:Got|Given) value: (.*)", text)
    if key and value:
        expected = dict.fromkeys(re.findall(r"Expected (?:a )?<class '(\w+)'>", text))
        return f"--{key[1]} is '{value[1]}'; it must be {' or '.join(names.get(kind, kind) for kind in expected)}"
    if wrong := re.fullmatch(r"argument (?:-\w/)?(\S+): invalid (\w+) value: (.*)", text):
        return f"{wrong[1]} is {wrong[3]}; it must be {names.get(wrong[2], wrong[2])}"
    if empty := re.fullmatch(r"argument (?:-\w/)?(\S+): expected (?:one|at least one) argument", text):
        return f"{empty[1]} needs a value"
    if stray := re.search(r"unrecognized arguments: (\S+)", text):
        return unknown_option(stray[1].partition("=")[0], known, command=command)
    return one_line(text)

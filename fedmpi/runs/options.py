"""From a command line to a `Config`: YAML files and bundled recipes first, then options, by jsonargparse.

Whatever a user can get wrong here comes out as one sentence: an unknown name with the nearest match, a value of the
wrong kind, a file that is not there or cannot be read.
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jsonargparse
import numpy as np
import yaml

from ..errors import UserError, nearest, squeezed
from ..plugins.knobs import check_bounds, document, knobs
from .aliases import advice, chosen, real_keywords, real_options
from .config import Config, Launch, renamed
from .extend import config_class, config_for, flat, given_options

if TYPE_CHECKING:
    from ..algorithms import Row

T = TypeVar("T")

MOST_BYTES = 1_000_000  # of a configuration, which has a few thousand
LONG = re.compile(r"[-+]?(?:[\d_:]{100,}|0x[\da-f_]{100,}|0b[01_]{100,})", re.IGNORECASE)  # float32 ends at 39 digits
DEEPEST = 8  # of groups in groups, of which a configuration has two
SWEEP = {"grid", "variants", "seeds"}  # what a sweep file has, and a run's configuration has not
ABOUT = """Train a model by federated learning. null means: chosen by the algorithm or by the machine. Common names of
other tools are understood, such as --lr for --local.lr and --batch-size for --local.batch: docs/guide.md lists them."""


def parse(arguments: list[str]) -> Config:
    """The configuration of a command line: YAML files first, then the options in their order."""
    arguments = real_options(arguments)
    helps, prints = (any(word.startswith(start) for word in arguments) for start in (("-h", "--h"), "--print"))
    kind = kind_of(arguments, plugged=helps or prints)
    arguments = real_options(arguments, kind)  # once more, for the switches of plug-ins
    parser = make_parser("fedmpi train", ABOUT, kind, helps or prints)
    if helps:  # not in what is printed: the number of ranks is no part of a configuration
        parser.add_class_arguments(Launch, as_group=False)
    check_renaming(arguments, kind)
    for before, word in zip(["", *arguments], arguments, strict=False):
        name, equals, value = word.partition("=") if word.startswith("--") else (before, "=", word)
        if equals:
            refuse_comment(name.removeprefix("--"), value)
            check_option(name, value)
    return filled(parser, kind, lambda: parser.parse_args(files_first(arguments, kind)))


def kind_of(arguments: list[str], plugged: bool = False) -> type[Config]:
    """Return the class of the configuration: `Config`, with the options of plug-ins that a command line and its files
    set, or with those of all that they name if `plugged`."""
    names: dict[str, Any] = {}
    for _, file in words_of(arguments):
        if file is not None:
            path = locate(file)
            names |= flat(renamed(read_yaml(path, f"--config {path}")))
    names |= given_options(arguments)
    return config_for(names) if plugged else config_class(names)


def split_launch(arguments: list[str]) -> tuple[Launch, list[str]]:
    """Take the options of the launcher out of a command line; return them and the rest."""
    names, own, rest = [f"--{field.name}" for field in dataclasses.fields(Launch)], [], []
    words = iter(arguments)
    for word in words:
        if word in names:
            own += [word, *itertools.islice(words, 1)]
        elif word.partition("=")[0] in names:
            own.append(word)
        else:
            rest.append(word)
    if not own:
        return Launch(), rest
    parser = make_parser("fedmpi train", ABOUT, Launch, helps=False)
    asked = filled(parser, Launch, lambda: parser.parse_args(own))
    check_bounds(asked, prefix="")
    if asked.max_restarts is not None and asked.ranks == 1:
        raise UserError(
            f"--max_restarts is {asked.max_restarts} but --ranks is 1; give --ranks 2 or more, or leave it out"
        )
    return asked, rest


def from_values(values: dict[str, Any], row: Row | None = None) -> Config:
    """The configuration with these values, groups as dicts or as dataclasses; checked like a command line. `row` is the
    algorithm's where it has no name."""
    tree = as_tree(values)
    kind: Any = config_class(flat(tree), row)
    check_keys("fedmpi.train", tree, knobs(kind()))
    parser = parser_of_values(kind)
    cfg: Config = filled(parser, kind, lambda: parser.parse_object(tree))
    return cfg


def as_tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values by the real names of their options, groups as dicts of what differs from the defaults."""
    return real_keywords({name: plain(chosen(value)) for name, value in values.items()})


@functools.cache
def parser_of_values(kind: type[Config]) -> jsonargparse.ArgumentParser:
    """A parser for values, made once: making it takes longer than using it, and a sweep has hundreds of runs."""
    return make_parser("fedmpi.train", ABOUT, kind, helps=False)


def plain(value: Any) -> Any:
    """A value as YAML could have it: dataclasses as dicts, numpy's numbers as Python's."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(dataclasses.asdict(value))
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    return value.item() if isinstance(value, np.generic) else value


def make_parser(name: str, about: str, kind: type, helps: bool = True) -> jsonargparse.ArgumentParser:
    """A parser for the fields of a dataclass; their texts, which are read from the source, where it `helps`."""
    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=helps)
    parser = jsonargparse.ArgumentParser(prog=name, description=about, exit_on_error=False, allow_abbrev=False)
    if helps:
        document(kind)
    if issubclass(kind, Config):
        parser.add_argument("--config", action="config", help="YAML file, or the name of a bundled recipe")
    parser.add_class_arguments(kind, as_group=False)
    return parser


def filled(parser: jsonargparse.ArgumentParser, kind: type[T], read: Callable[[], jsonargparse.Namespace]) -> T:
    """The dataclass with what the parser reads; its complaint in one sentence."""
    try:
        values = parser.instantiate(read())
    except argparse.ArgumentError as error:
        known = [option for action in parser._actions for option in action.option_strings]
        raise UserError(sentence(str(error), known, parser.prog)) from None
    except OverflowError:
        raise UserError("a number is too large for a computer's; give a smaller one") from None
    return kind(**{f.name: getattr(values, f.name) for f in dataclasses.fields(kind)})  # type: ignore[arg-type]


def recipes() -> dict[str, Path]:
    """The bundled recipes by name."""
    folder = Path(str(resources.files("fedmpi") / "experiments" / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def single_runs() -> dict[str, Path]:
    """Those of the bundled recipes that are one run, and not a sweep."""
    return {name: path for name, path in recipes().items() if not is_sweep(read_yaml(path, str(path)))}


def is_sweep(tree: Any) -> bool:
    """Whether a YAML file is a sweep rather than the configuration of a run."""
    return isinstance(tree, dict) and not SWEEP.isdisjoint(tree)


def words_of(arguments: list[str]) -> Iterator[tuple[str, str | None]]:
    """Yield the words of a command line, each --config with its file, others with None."""
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        given = None
        if option == "--config":
            given = name if equals else next(words, None)
        yield word, given


def files_first(arguments: list[str], kind: type[Config] = Config) -> list[str]:
    """The arguments with every --config in front, by its path: an option overrides a file wherever it stands."""
    words = list(words_of(arguments))
    files = [f"--config={as_argument(find_file(name, kind))}" for _, name in words if name is not None]
    return files + [word for word, name in words if name is None]


def as_argument(file: Path) -> str:
    """A configuration file for the parser: its path, or its text where it has knobs by earlier names."""
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    return str(file) if renamed(tree) == tree else yaml.safe_dump(renamed(tree), sort_keys=False)


def check_renaming(arguments: list[str], kind: type[Config]) -> None:
    """Refuse another --algorithm for a file that fixes the rules of its own, as the config.yaml of a run does: the run
    would have the new name and the old rules."""
    options = dict(zip(arguments, arguments[1:], strict=False))
    options |= {name: value for word in arguments for name, equals, value in [word.partition("=")] if equals}
    if not {"--algorithm", "--config"} <= options.keys():
        return
    file = find_file(options["--config"], kind)
    tree = yaml.safe_load(file.read_text(encoding="utf-8"))
    fixed = [
        f"{group}.rule {rule}"
        for group in ("local", "server")
        if (rule := (tree.get(group) or {}).get("rule")) and f"--{group}.rule" not in options
    ]
    if fixed and squeezed(tree.get("algorithm", options["--algorithm"])) != squeezed(options["--algorithm"]):
        raise UserError(
            f"--algorithm {options['--algorithm']} with --config {file}, which fixes {' and '.join(fixed)} for its own "
            f"algorithm {tree['algorithm']}; leave --algorithm out, or start from a file without the rules"
        )


def find_file(name: str, kind: type[Config] | None = None) -> Path:
    """The file of that name, or else the bundled recipe; checked."""
    path = locate(name)
    check_file(path, name, kind)
    return path


def locate(name: str) -> Path:
    """The file of that name, or else the bundled recipe."""
    path = Path(name)
    if name in recipes() and not path.is_file():
        path = recipes()[name]
    elif not os.path.exists(path):  # Path.exists raises for a name that is too long
        near = nearest(name, recipes())
        hint = f"did you mean '{near}'? " if near else ""
        raise UserError(f"--config '{name}' is neither a file nor a recipe; {hint}recipes: {', '.join(single_runs())}")
    return path


def check_file(path: Path, name: str, kind: type[Config] | None = None) -> None:
    """Refuse a YAML file that cannot be read, is a sweep, or names what is no knob; values are left to the parser."""
    tree = read_yaml(path, f"--config {path}")
    if is_sweep(tree):
        raise UserError(f"--config {name} is a sweep; run it with 'fedmpi sweep {shlex.quote(name)}'")
    tree = renamed(tree)
    check_keys(f"--config {path}", tree, knobs((kind or config_class(flat(tree)))()))


def read_yaml(path: Path, where: str) -> Any:
    """What a YAML file holds; a `UserError` for one that cannot be read, or that stands for more than it says."""
    try:
        if not path.is_file() and not path.is_dir():
            raise ValueError("it is no file but a device or a pipe")  # which may never end
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        text = path.read_text(encoding="utf-8")
        refuse_bomb(text)
        refuse_twice(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"{where} cannot be read as YAML ({why}); correct it or give another file") from None


def refuse_comment(name: str, value: str) -> None:
    """Refuse a value that the parser would take for a comment, and so for null."""
    if value.lstrip().startswith("#"):
        raise UserError(f"--{name} is '{value}'; a value cannot begin with #")


class Bomb(yaml.YAMLError):
    """A small text that stands for something large."""


def check_option(option: str, text: str) -> None:
    """Refuse a value on the command line, which may be YAML, that the parser would not come to an end with."""
    try:
        refuse_bomb(text)
    except Bomb as error:
        raise UserError(f"{option} cannot be read ({error}); give a plain value") from None
    except (ValueError, yaml.YAMLError):
        return  # a word, or what the parser tells better


def refuse_bomb(text: str) -> None:
    """Refuse aliases, and groups in groups in groups: a few lines of them may be more than a memory holds. Also numbers
    that no knob could take, of which Python and the parser make errors of their own."""
    depth, anchors = 0, set()
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent) and event.anchor in anchors:
            raise Bomb(f"it has an alias, *{event.anchor}")
        if depth > DEEPEST:
            raise Bomb(f"it has more than {DEEPEST} brackets or groups in each other")
        if isinstance(event, yaml.ScalarEvent) and LONG.fullmatch(event.value):
            raise Bomb(f"it has a number of {len(event.value)} digits")
        anchors.add(getattr(event, "anchor", None))


def refuse_twice(node: yaml.Node | None) -> None:
    """Refuse a key that stands twice in one group: the first would be lost without a word."""
    if isinstance(node, yaml.SequenceNode):
        for one in node.value:
            refuse_twice(one)
    if not isinstance(node, yaml.MappingNode):
        return
    keys = [key.value for key, _ in node.value]
    twice = next((key for key in keys if keys.count(key) > 1), None)
    if twice is not None:
        raise yaml.YAMLError(f"'{twice}' stands there twice")
    for _, value in node.value:
        refuse_twice(value)


def check_keys(where: str, tree: Any, known: dict[str, Any], prefix: str = "") -> None:
    """Refuse a part of a YAML file that is no mapping, or one of its keys that is not known."""
    if not isinstance(tree, dict):
        part = f"'{prefix[:-1]}' in {where}" if prefix else where
        holds = "nothing" if tree is None else reprlib.repr(tree)
        raise UserError(f"{part} holds {holds}; it must hold options with their values, one a line: 'name: value'")
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name not in known:
            raise UserError(unknown_option(name, known, where=f" in {where}"))
        if "." in str(key) and str(key).partition(".")[0] in tree:
            raise UserError(f"'{key}' in {where} stands beside its group '{key.partition('.')[0]}'; write it in there")
        if dataclasses.is_dataclass(known[name]):
            check_keys(where, value, known, f"{name}.")
        elif isinstance(value, str):
            refuse_comment(name, value)


def unknown_option(given: str, known: Iterable[str], where: str = "", command: str = "fedmpi train") -> str:
    """The sentence for an option that there is not: what it may be short for, or the nearest one."""
    known = list(known)
    near = next((k for k in known if k.startswith(given)), None) or nearest(given, known)
    hints = [f"did you mean '{near}'?" if near else None, f"'{command} --help' lists what there is"]
    if command == "fedmpi train":
        dashes = "" if where else "--"
        hints = [advice(given, dashes), hints[0], advice(given, dashes, roughly=True), hints[1]]
    return f"unknown option '{given}'{where}; {next(hint for hint in hints if hint)}"


def sentence(text: str, known: list[str], command: str = "fedmpi train") -> str:
    """A parser's complaint in one sentence: what was given, what is valid."""
    key = re.search(r'key "([^"]+)"', text)
    value = re.search(r"(?:Got|Given) value: (.*)", text)
    if key and value:
        kinds = dict(
            float="a number",
            int="a whole number",
            bool="true or false",
            str="a word",
            NoneType="null",
            list="a list of numbers",
        )
        expected = dict.fromkeys(re.findall(r"Expected (?:a )?<class '(\w+)'>", text))
        valid = " or ".join(kinds.get(kind, kind) for kind in expected)
        return f"--{key[1]} is '{value[1]}'; it must be {valid}"
    stray = re.search(r"unrecognized arguments: (\S+)", text)
    if stray:
        return unknown_option(stray[1].partition("=")[0], known, command=command)
    return " ".join(text.split())

"""The command `fedmpi`. Exit codes: 0 done, 2 the caller's mistake, 130 interrupted, anything else a fault."""

from __future__ import annotations

import dataclasses
import difflib
import os
import re
import reprlib
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import __version__
from .errors import RunError, UserError, unknown

if TYPE_CHECKING:
    from .config import Config
    from .env import Place
    from .run import Prepared

ABOUT = "Federated learning on torch.distributed, MPI and Slurm, with gradient masked averaging as one collective."
USAGE = f"""fedmpi {__version__}: {ABOUT}

commands:
  train     train a model; 'fedmpi train --help' lists every knob
  compare   a table of finished runs: 'fedmpi compare RUN [RUN ...]'

several ranks:
  torchrun --standalone --nproc-per-node=2 -m fedmpi train ...
  mpiexec -n 2 python -m mpi4py -m fedmpi train --comm mpi ...
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if command in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        if command == "--version":
            print(__version__)
            return 0
        if command not in COMMANDS:
            raise unknown("command", command, COMMANDS)
        return COMMANDS[command](rest)
    except UserError as error:
        complain(str(error))
        return 2
    except RunError as error:
        complain(str(error))
        return 1


def complain(sentence: str) -> None:
    print(f"fedmpi: {sentence}", file=sys.stderr, flush=True)


def train(arguments: list[str]) -> int:
    """`fedmpi train`: on every rank of whatever launched it."""
    from .env import find_place

    place = find_place(os.environ)
    try:
        from .run import prepare

        prepared = prepare(parse(arguments))
    except UserError as error:  # the same on every rank: said once
        if place.rank == 0:
            complain(str(error))
        else:
            time.sleep(1)  # a launcher ends all ranks when the first one leaves: let rank 0 speak
        return 2
    return on_this_rank(prepared, place)


def on_this_rank(prepared: Prepared, place: Place) -> int:
    """Connect, run and leave in good order; a fault on one rank ends all of them."""
    import torch

    from .comm import connect
    from .env import available_cores, choose_device, threads_per_rank
    from .log import set_up
    from .run import run

    cfg = prepared.cfg
    set_up(place.rank, place.size)
    torch.set_num_threads(threads_per_rank(place, cfg.threads, available_cores()))
    device = torch.device(choose_device(place, cfg.device, torch.cuda.device_count()))
    if cfg.deterministic and device.type == "cuda":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
    comm = connect(cfg.comm, place, device, cfg.timeout, os.environ)
    who = f"rank {comm.rank}: " if comm.size > 1 else ""
    try:
        run(prepared, comm, place, device, os.environ)
    except UserError as error:  # raised on every rank alike
        if comm.rank == 0:
            complain(str(error))
        comm.barrier()
        comm.close()
        return 2
    except RunError as error:
        complain(who + str(error))
        comm.abort(1)
    except KeyboardInterrupt:
        complain(who + "interrupted")
        comm.abort(130)
    except Exception:
        complain(who + traceback.format_exc())
        comm.abort(1)
    if comm.rank == 0:
        print(f"done: {prepared.out}", flush=True)
    comm.close()
    return 0


def parse(arguments: list[str]) -> Config:
    """The configuration of a command line: YAML files first, then the options in their order."""
    import argparse

    import jsonargparse

    from .config import Config

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="fedmpi train", description=train_help(), exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument("--config", action="config", help="YAML file, or the name of a bundled recipe")
    parser.add_class_arguments(Config, as_group=False)
    try:
        values = parser.instantiate(parser.parse_args(files_first(without_aliases(arguments))))
    except argparse.ArgumentError as error:
        known = [option for action in parser._actions for option in action.option_strings]
        raise UserError(sentence(str(error), known)) from None
    return Config(**{f.name: getattr(values, f.name) for f in dataclasses.fields(Config)})


def train_help() -> str:
    return "Train a model by federated learning. null means: chosen by the algorithm or by the machine."


def without_aliases(arguments: list[str]) -> list[str]:
    """The arguments with --log_to as --log, which torchrun would take for a short form of its own --log-dir."""
    return [re.sub("^--log_to(?==|$)", "--log", word) for word in arguments]


def recipes() -> dict[str, Path]:
    """The bundled recipes by name."""
    folder = Path(str(resources.files("fedmpi") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def files_first(arguments: list[str]) -> list[str]:
    """The arguments with every --config in front, by its path: an option overrides a file wherever it stands."""
    files, options = [], []
    words = iter(arguments)
    for word in words:
        option, equals, name = word.partition("=")
        given = None
        if option == "--config":
            given = name if equals else next(words, None)
        if given is None:
            options.append(word)
        else:
            files.append(f"--config={find_file(given)}")
    return files + options


def find_file(name: str) -> Path:
    """The file of that name, or else the bundled recipe; checked."""
    path = Path(name)
    if name in recipes() and not path.is_file():
        path = recipes()[name]
    elif not path.exists():
        near = difflib.get_close_matches(name, recipes(), n=1)
        hint = f"did you mean '{near[0]}'? " if near else ""
        raise UserError(f"--config '{name}' is neither a file nor a recipe; {hint}recipes: {', '.join(recipes())}")
    check_file(path)
    return path


def check_file(path: Path) -> None:
    """Refuse a YAML file that cannot be read or that names what is no knob; values are left to the parser."""
    import yaml

    from .config import Config

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        why = " ".join(str(error).split())
        raise UserError(f"--config {path} cannot be read as YAML ({why}); correct it or give another file") from None
    check_keys(f"--config {path}", tree, knobs(Config()))


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
        if dataclasses.is_dataclass(known[name]):
            check_keys(where, value, known, f"{name}.")


def knobs(part: Any, prefix: str = "") -> dict[str, Any]:
    """Every knob of a dataclass of the configuration by its dotted name, and the groups among them."""
    out: dict[str, Any] = {}
    for field in dataclasses.fields(part):
        name, value = f"{prefix}{field.name}", getattr(part, field.name)
        out |= {name: value} | (knobs(value, f"{name}.") if dataclasses.is_dataclass(value) else {})
    return out


def unknown_option(given: str, known: Iterable[str], where: str = "") -> str:
    """The sentence for an option that there is not: what it may be short for, or the nearest one."""
    near = [k for k in known if k.startswith(given)] or difflib.get_close_matches(given, known, n=1)
    hint = f"did you mean '{near[0]}'?" if near else "'fedmpi train --help' lists what there is"
    return f"unknown option '{given}'{where}; {hint}"


def sentence(text: str, known: list[str]) -> str:
    """A parser's complaint in one sentence: what was given, what is valid."""
    key = re.search(r'key "([^"]+)"', text)
    value = re.search(r"(?:Got|Given) value: (.*)", text)
    if key and value:
        kinds = dict(float="a number", int="a whole number", bool="true or false", str="a word", NoneType="null")
        valid = " or ".join(kinds.get(k, k) for k in dict.fromkeys(re.findall(r"Expected a <class '(\w+)'>", text)))
        return f"--{key[1]} is '{value[1]}'; it must be {valid}"
    stray = re.search(r"unrecognized arguments: (\S+)", text)
    if stray:
        return unknown_option(stray[1].partition("=")[0], known)
    return " ".join(text.split())


def compare(arguments: list[str]) -> int:
    """`fedmpi compare RUN [RUN ...]`: a table of runs."""
    from .compare import table

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: fedmpi compare RUN [RUN ...]\n\nA table of run folders: what they ran and how well they did.")
        return 0 if arguments else 2
    print(table([Path(folder) for folder in arguments]))
    return 0


COMMANDS = {"train": train, "compare": compare}

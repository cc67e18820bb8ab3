"""The command `fedmpi`. Exit codes: 0 done, 2 the caller's mistake, 130 interrupted, anything else a fault."""

from __future__ import annotations

import difflib
import os
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

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
    import dataclasses

    import jsonargparse

    from .config import Config

    jsonargparse.set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = jsonargparse.ArgumentParser(
        prog="fedmpi train", description=train_help(), exit_on_error=False, allow_abbrev=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or the name of a bundled recipe"
    )
    parser.add_class_arguments(Config, as_group=False)
    try:
        values = parser.instantiate(parser.parse_args(with_recipes(arguments)))
    except argparse.ArgumentError as error:
        known = [option for action in parser._actions for option in action.option_strings]
        raise UserError(sentence(str(error), known)) from None
    return Config(**{f.name: getattr(values, f.name) for f in dataclasses.fields(Config)})


def train_help() -> str:
    return "Train a model by federated learning. null means: chosen by the algorithm or by the machine."


def recipes() -> dict[str, Path]:
    """The bundled recipes by name."""
    folder = Path(str(resources.files("fedmpi") / "recipes"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def with_recipes(arguments: list[str]) -> list[str]:
    """The arguments with the name of a bundled recipe after --config replaced by its path."""
    out = list(arguments)
    for i, word in enumerate(out):
        option, equals, name = word.partition("=")
        if option != "--config":
            continue
        if not equals:
            name = out[i + 1] if i + 1 < len(out) else ""
        if not name or Path(name).exists():
            continue
        if name not in recipes():
            near = difflib.get_close_matches(name, recipes(), n=1)
            hint = f"did you mean '{near[0]}'? " if near else ""
            raise UserError(f"--config '{name}' is neither a file nor a recipe; {hint}recipes: {', '.join(recipes())}")
        path = str(recipes()[name])
        out[i : i + 1 + (not equals)] = [f"--config={path}"] if equals else [option, path]
    return out


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
        near = difflib.get_close_matches(stray[1].partition("=")[0], known, n=1)
        hint = f"did you mean '{near[0]}'?" if near else "'fedmpi train --help' lists what there is"
        return f"unknown option '{stray[1]}'; {hint}"
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

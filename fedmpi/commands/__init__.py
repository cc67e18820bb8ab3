"""The command `fedmpi`. Exit codes: 0 done, 2 the caller's mistake, 75 stopped in good order and wants to be started
again, 130 interrupted, anything else a fault."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import UserError, exit_code, unknown

ABOUT = "Federated learning on torch.distributed, MPI and Slurm, with gradient masked averaging as one collective."
USAGE = f"""fedmpi {__version__}: {ABOUT}

commands:
  train     train a model; 'fedmpi train --help' lists every knob
  compare   a table of runs: 'fedmpi compare RUN [RUN ...]'
  sweep     many runs from one file: 'fedmpi sweep FILE'; goes on where it was left
  report    a page, pictures and tables of runs: 'fedmpi report RUN [RUN ...] --out DIR'
  recipes   the bundled experiments, one line each
  attack    membership inference against finished runs: 'fedmpi attack RUN [RUN ...]'
  data      data sets: 'fedmpi data list', 'prepare' and 'show'; 'fedmpi data --help' tells more
  plan      what a run would send, hold and wait for: 'fedmpi plan --ranks 2 4 64 ...'
  submit    hand a run to Slurm: 'fedmpi submit --nodes 2 --time 60 -- train ...'
  status    how runs and sweeps are doing: 'fedmpi status [RUN ...]'; without RUN all of runs/
  logs      what a run has printed: 'fedmpi logs RUN', and -f to follow it
  cancel    end submitted runs and sweeps: 'fedmpi cancel RUN [RUN ...]'
  doctor    what this machine has, what is wrong with it and what helps
  requeue   at the end of a batch script: have Slurm start the job again where that is wanted
  help      what a command takes: 'fedmpi help train' is 'fedmpi train --help'

several ranks (more in docs/guide.md, Slurm in docs/clusters.md):
  fedmpi train --ranks 2 ...
  mpiexec -n 2 python -m mpi4py -m fedmpi train --comm mpi ...

A run that was killed or stopped goes on when the same command is given again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    return exit_code(lambda: dispatch(command, rest))


def dispatch(command: str, arguments: list[str]) -> int:
    """Import the module of a command and run it."""
    if command in ("-h", "--help"):
        print(USAGE, end="")
        return 0
    if command == "--version":
        print(__version__)
        return 0
    if command == "help":
        return main([*arguments, "--help"])
    if command not in COMMANDS:
        if command.startswith("-"):
            raise UserError(f"'{command}' comes before a command; write 'fedmpi train {command} ...'")
        near = "train" if command in ("run", "fit", "start", "simulate") else None
        raise unknown("command", command, COMMANDS, near=near)
    module, _, function = COMMANDS[command].partition(":")
    code: int = getattr(import_module(f"fedmpi.{module}"), function or "main")(arguments)
    return code


COMMANDS = {
    "train": "commands.train",
    "compare": "commands.compare",
    "sweep": "experiments.sweep.command",
    "report": "experiments.report.command",
    "recipes": "experiments.sweep.recipes",
    "attack": "experiments.attack.command",
    "data": "commands.data",
    "plan": "commands.plan",
    "submit": "cluster.submit:submit",
    "status": "commands.status:status",
    "logs": "commands.logs",
    "cancel": "commands.status:cancel",
    "requeue": "cluster.requeue:requeue",
    "doctor": "commands.doctor",
}
"""command -> module[:function], imported when the command is called"""

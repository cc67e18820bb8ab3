"""The command `fedmpi`. Exit codes: 0 done, 2 wrong usage, 75 stopped cleanly and should be restarted, 130 interrupted,
anything else an error."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from .. import __version__
from ..errors import UserError, exit_code, unknown

ABOUT = "Federated learning on torch.distributed, MPI and Slurm, with gradient masked averaging as one collective."
USAGE = f"""usage: fedmpi COMMAND [options]

fedmpi {__version__}: {ABOUT}

train and look at runs:
  train       Train a model.
  status      Show the status of runs.
  logs        Print a run's log.
  compare     Print a table of runs.
  report      Write a report about runs: one page with figures and tables.
  attack      Measure membership inference against finished runs.

many runs:
  sweep       Run every point of a sweep file.
  recipes     List the bundled experiments.

clusters:
  plan        Forecast traffic, memory and load balance on any number of ranks.
  submit      Submit a run to Slurm.
  cancel      Cancel submitted runs and sweeps.
  requeue     Requeue the job of a batch script if it should be restarted.

this machine:
  data        List, prepare and show data sets.
  doctor      Check this machine and the connection between ranks.
  completion  Print a script that completes commands in bash or zsh.
  help        Show the help of a command: 'fedmpi help train'.

examples:
  fedmpi train --data mnist --mask gma --rounds 20
  fedmpi train --ranks 2 --config glyphs-noniid-100
  mpiexec -n 2 python -m mpi4py -m fedmpi train --comm mpi
  fedmpi submit --nodes 2 --time 60 -- train --data mnist

Run the same command again to resume a run that was stopped.
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
            raise UserError(f"option '{command}' is given before a command; write 'fedmpi train {command} ...'")
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
    "completion": "commands.completion",
}
"""command -> module[:function], imported when the command is called"""

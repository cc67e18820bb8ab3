"""The command `fedmpi`. Exit codes: 0 done, 2 the caller's mistake, 75 stopped in good order and wants to be started
again, 130 interrupted, anything else a fault."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .errors import AGAIN, AgreedError, CommonError, RunError, UserError, complain, of_path, silence, unknown

if TYPE_CHECKING:
    import torch

    from .comm import Comm
    from .env import Place
    from .run import Prepared

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
    """Run one command; returns the exit code."""
    command, *rest = list(sys.argv[1:] if argv is None else argv) or ["--help"]
    try:
        if command in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        if command == "--version":
            print(__version__)
            return 0
        if command == "help":
            return main([*rest, "--help"])
        if command not in COMMANDS:
            if command.startswith("-"):
                raise UserError(f"'{command}' comes before a command; write 'fedmpi train {command} ...'")
            near = "train" if command in ("run", "fit", "start", "simulate") else None
            raise unknown("command", command, COMMANDS, near=near)
        return COMMANDS[command](rest)
    except UserError as error:
        complain(str(error))
        return 2
    except RunError as error:
        complain(str(error))
        return 1
    except KeyboardInterrupt:
        complain("interrupted")
        return 130
    except BrokenPipeError:  # nobody reads any more, as behind '| head'
        silence(sys.stdout)
        return 0
    except OSError as error:  # of a path that was given, such as a name that is too long
        if error.filename is None:  # of something else, which a traceback tells
            raise
        refused = of_path(error)
        complain(str(refused))
        return 2 if isinstance(refused, UserError) else 1


def train(arguments: list[str]) -> int:
    """`fedmpi train`: on every rank of whatever launched it; with --ranks, launch them."""
    from .env import find_place
    from .stop import follow_launcher

    began = time.monotonic()  # torch is not imported yet
    place = find_place(os.environ)
    follow_launcher(place, os.environ)
    with no_collection():
        from .comm import agree_early, connect
        from .log import set_up
        from .options import parse, split_launch
        from .run import prepare, settle

    asked_ranks, arguments = split_launch(arguments)
    if asked_ranks.ranks > 1:
        from .launcher import launch

        return launch(asked_ranks, arguments)
    set_up(place.rank, place.size)
    try:
        asked = "--comm=mpi" in arguments or ("--comm", "mpi") in zip(arguments, arguments[1:], strict=False)
        prepared = agree_early(place, asked or place.launcher == "mpi", lambda: prepare(parse(arguments)))
        cfg = prepared.cfg
        device = settle(cfg, place)
        comm = connect(cfg.comm, place, device, cfg.timeout, os.environ)
    except AgreedError as error:
        if place.rank == 0:
            complain(str(error))
        return 2
    except UserError as error:
        # Nearly always the same on every rank, and then rank 0's word is enough: launchers end all ranks when the first
        # one leaves, so the others wait for that. Who is still there has found something that rank 0 has not.
        if place.rank:
            keep_code(2)
            time.sleep(5)
        complain(f"rank {place.rank}: {error}" if place.rank else str(error))
        return 2
    return on_this_rank(prepared, comm, place, device, began)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection while modules are imported, which makes much and throws little away: a tenth less time. Nor
    is what they made looked at later, in a round: that takes 80 ms each time."""
    collecting, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:  # else there is more than modules
            gc.freeze()
        if collecting:
            gc.enable()


def keep_code(code: int) -> None:
    """Leave with this code from now on, also when a launcher ends this rank because another one has left already: 143
    would look like a fault, which is worth another try."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # no handler runs any more while Python ends


def on_this_rank(prepared: Prepared, comm: Comm, place: Place, device: torch.device, began: float) -> int:
    """Run and leave in good order; a fault on one rank ends all of them."""
    from .comm import share_node
    from .run import run
    from .stop import ALL, Stopped

    who = f"rank {comm.rank}: " if comm.size > 1 else ""
    try:
        if device.type == "cpu":
            share_node(comm)
        run(prepared, comm, place, device, os.environ, signals=ALL, began=began)
    except Stopped as stop:  # by every rank alike
        keep_code(AGAIN)
        if comm.rank == 0:
            where = "from there" if prepared.cfg.checkpoint.keep else "from the beginning: --checkpoint.keep is 0"
            complain(f"stopped after round {stop.round} ({stop.why}); the same command goes on {where}")
        comm.close()
        return AGAIN
    except (UserError, CommonError) as error:  # raised on every rank alike
        code = 2 if isinstance(error, UserError) else 1
        keep_code(code)
        if comm.rank == 0:
            complain(str(error))
        comm.barrier()
        comm.close()
        return code
    except RunError as error:
        complain(who + str(error))
        comm.abort(1)
    except KeyboardInterrupt:
        complain(who + "interrupted")
        comm.abort(130)
    except (Exception, SystemExit):  # whoever calls sys.exit in here has not finished the run
        complain(who + traceback.format_exc())
        comm.abort(1)
    if comm.rank == 0 and not prepared.cfg.quiet:
        print(f"done: {prepared.out}", flush=True)
    comm.close()
    return 0


def compare(arguments: list[str]) -> int:
    """`fedmpi compare RUN [RUN ...]`: a table of runs."""
    from .compare import table

    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: fedmpi compare RUN [RUN ...]\n\nA table of run folders: what they ran and how well they did.")
        return 0 if arguments else 2
    print(table([Path(folder) for folder in arguments]))
    return 0


def elsewhere(module: str, function: str = "main") -> Callable[[list[str]], int]:
    """A command that lives in a module of its own, imported when it is called."""

    def command(arguments: list[str]) -> int:
        run_command: Callable[[list[str]], int] = getattr(import_module(f".{module}", __package__), function)
        return run_command(arguments)

    return command


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "train": train,
    "compare": compare,
    "sweep": elsewhere("experiments.sweep.command"),
    "report": elsewhere("experiments.report.command"),
    "recipes": elsewhere("experiments.sweep.recipes"),
    "attack": elsewhere("experiments.attack.command"),
    "data": elsewhere("datacmd"),
    "plan": elsewhere("plan"),
    "submit": elsewhere("cluster", "submit"),
    "status": elsewhere("experiments.status", "status"),
    "logs": elsewhere("experiments.logs"),
    "cancel": elsewhere("experiments.status", "cancel"),
    "requeue": elsewhere("cluster", "requeue"),
    "doctor": elsewhere("doctor"),
}

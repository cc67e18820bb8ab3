"""This process as a rank of a run: who launched it, how it starts and how it exits."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..comm.env import Place, find_place
from ..errors import AGAIN, AgreedError, CommonError, RunError, UserError, complain
from .stop import follow_launcher

if TYPE_CHECKING:
    import torch

    from ..comm import Comm
    from .build import RunSpec


def begin() -> tuple[Place, float]:
    """Find out who launched this process as a rank, exit when the launcher dies, and import what training needs; return
    the place and the start of the time budget."""
    began = time.monotonic()  # torch is not imported yet
    place = find_place(os.environ)
    follow_launcher(place, os.environ)
    with no_collection():
        from . import run  # noqa: F401
    return place, began


def train(arguments: list[str], place: Place, began: float) -> int:
    """Train with the options of `fedmpi train`, together with the other ranks; return the exit code."""
    from ..comm import agree_early, connect
    from ..device import sums_device
    from .build import prepare
    from .log import set_up
    from .options import parse
    from .run import settle

    set_up(place.rank, place.size)
    try:
        asked = "--comm=mpi" in arguments or ("--comm", "mpi") in zip(arguments, arguments[1:], strict=False)
        spec = agree_early(place, asked or place.launcher == "mpi", lambda: prepare(parse(arguments)))
        device = settle(spec.cfg, place)
        sums_on = sums_device(device, spec.cfg.sums)
        comm = connect(spec.cfg.comm, place, sums_on, spec.cfg.timeout, os.environ)
    except AgreedError as error:
        if place.rank == 0:
            complain(str(error))
        return 2
    except UserError as error:
        # Nearly always the same on every rank, and then rank 0's message is enough: launchers end all ranks when
        # the first one exits, so the others wait for that. A rank that is still alive has found something else.
        if place.rank:
            keep_code(2)
            time.sleep(5)
        complain(f"rank {place.rank}: {error}" if place.rank else str(error))
        return 2
    return on_this_rank(spec, comm, place, device, began)


@contextmanager
def no_collection() -> Iterator[None]:
    """Switch garbage collection off while modules are imported: a tenth less time. Freeze their objects afterwards, or
    every collection in a round would scan them, for 80 ms."""
    collecting, first = gc.isenabled(), "torch" not in sys.modules
    gc.disable()
    try:
        yield
    finally:
        if first:  # else more than modules would be frozen
            gc.freeze()
        if collecting:
            gc.enable()


def keep_code(code: int) -> None:
    """Exit with this code from now on, also if a launcher ends this rank because another one has exited: 143 would look
    like a fault that a restart may fix."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda *_: os._exit(code))
        atexit.register(signal.signal, signal.SIGTERM, signal.SIG_IGN)  # no handler runs while Python shuts down


def on_this_rank(spec: RunSpec, comm: Comm, place: Place, device: torch.device, began: float) -> int:
    """Run and exit in good order; a fault on one rank ends all of them. Return the exit code."""
    from ..comm import share_node
    from ..device import sums_device
    from .run import run
    from .stop import ALL, Stopped

    who = f"rank {comm.rank}: " if comm.size > 1 else ""
    try:
        if sums_device(device, spec.cfg.sums).type == "cpu":
            share_node(comm)
        run(spec, comm, place, device, os.environ, signals=ALL, began=began)
    except Stopped as stop:  # on every rank alike
        keep_code(AGAIN)
        if comm.rank == 0:
            where = "from there" if spec.cfg.checkpoint.keep else "from the beginning: --checkpoint.keep is 0"
            complain(f"stopped after round {stop.round} ({stop.why}); the same command resumes {where}")
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
    except (Exception, SystemExit):  # a sys.exit in here has not finished the run
        complain(who + traceback.format_exc())
        comm.abort(1)
    if comm.rank == 0 and not spec.cfg.quiet:
        print(f"done: {spec.out}", flush=True)
    comm.close()
    return 0

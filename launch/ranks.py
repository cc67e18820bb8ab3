"""torchrun on this node, with ranks that are forked from it: they begin with what it has imported.

    python launch/ranks.py RANKS MAX_RESTARTS SHUTDOWN_TIMEOUT [arguments of 'fedmpi train']

Importing torch takes most of a start. torchrun imports it, then every rank does, and all of them again at every
restart; here it is done once. Everything else, restarts included, is torch's own agent. Where torch is built for GPUs,
which a process may not use after a fork of one that has asked for them, this is torchrun itself.
"""

from __future__ import annotations

import gc
import importlib
import logging
import signal
import sys
import uuid
from pathlib import Path

import rank

SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
NEEDED = ("fedmpi.cli", "fedmpi.comm.torch", "fedmpi.options", "fedmpi.run")


def as_rank(arguments: list[str]) -> None:
    """Train as one of the ranks; leaves with its code unless that is 0."""
    for name in SIGNALS:  # a child of a fork has the agent's handlers, one of an exec would not
        signal.signal(getattr(signal, name), signal.default_int_handler if name == "SIGINT" else signal.SIG_DFL)
    gc.enable()
    sys.argv[1:] = arguments
    if code := rank.main():
        sys.exit(code)


class Briefly(logging.Filter):
    """Leaves tracebacks of the agent's own out of its log, and all of it where a rank has told the user why it left."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.exc_info = None
        return rank.final_code() is None


def main() -> int:
    """Start the ranks and stay with them; 1 where they failed, whatever their codes."""
    ranks, restarts, timeout, *arguments = sys.argv[1:]
    gc.disable()  # imports make much and throw little away
    import torch
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if torch.backends.cuda.is_built():
        options = ["--standalone", f"--nproc-per-node={ranks}", f"--max-restarts={restarts}"]
        gc.enable()
        script = str(Path(rank.__file__).resolve())
        run.main([*options, f"--shutdown-timeout={timeout}", script, "--", *arguments])
        return 0
    for module in NEEDED:
        importlib.import_module(module)
    gc.freeze()  # or the first collection in a rank would write to, and so copy, the memory that it shares
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=int(ranks),
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=int(restarts),
        shutdown_timeout=int(timeout),
        signals_to_handle=",".join(SIGNALS),
        start_method="fork",
    )
    for name in ("torch.multiprocessing.spawn", "torch.distributed.elastic.multiprocessing.api"):
        logging.getLogger(name).addFilter(Briefly())
    try:
        elastic_launch(config, as_rank)(arguments)
    except ChildFailedError as failed:
        if rank.final_code() is None:
            print(failed, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`fedmpi.train`: federated training from Python, in a notebook or a script, in one process or under a launcher.

It runs the same code as the command line, and takes every option as a keyword. In a script started by torchrun or
mpiexec, every rank makes the same call and gets the same result.
"""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .algorithms import Algorithm, MetaStep, Row
from .clients.still import twin
from .comm import Comm, agree_early, agreed, connect, share_node
from .comm.env import Place, find_place
from .data import Arrays, Data, Datasets, as_data
from .data.own import is_part
from .device import sums_device
from .errors import CommonError, UserError
from .local import LocalRule
from .masks import Mask
from .runs.aliases import real_name
from .runs.build import Overrides, RunSpec, prepare
from .runs.config import Config
from .runs.log import record
from .runs.options import as_tree, from_values
from .runs.result import Result
from .runs.run import Outcome, run, settle, trained_tensors, undisturbed
from .runs.stop import Stopped, follow_launcher
from .runs.typed import Knobs
from .server import ServerRule

if TYPE_CHECKING:
    from typing_extensions import Unpack


ASKED = (signal.SIGTERM, signal.SIGUSR2)  # a Ctrl-C is left to the caller
WORK = ("epochs", "steps", "batch", "work")  # options of `local` that are not the rule's
_connected: list[tuple[Comm, str]] = []  # at most one, with its type of device, for the lifetime of this process


def train(
    model: nn.Module | str | None,
    data: Any,
    test: Any = None,
    *,
    algorithm: str | Row | Algorithm = "fedavg",
    out: str | Path | None = None,
    **knobs: Unpack[Knobs],
) -> Result:
    """Train a model by federated learning.

    model      a module, a name (as --model), or None for the default of the data
    data       the clients' data sets: a list or dict with one per client, each a torch Dataset of (sample, label) pairs
               or a pair (samples, labels) of arrays. Or data to be split by `split` and `clients`: one such Dataset or
               pair, an `Arrays`, a `Datasets`, or a name (as --data)
    test       test data: a Dataset or a pair; `Arrays`, `Datasets` and named data have their own
    algorithm  a name (as --algorithm), a `Row`, or an `Algorithm` made of rules
    out        run folder, as --out; None: nothing is written
    knobs      any option of `fedmpi train`: rounds=20, cohort=5, mask="gma", local={"lr": 0.05, "epochs": 2}, ...;
               aliases from other tools work as on the command line: lr=0.05, epochs=2, batch_size=32.
               quiet=True prints nothing

    With a run folder, training resumes from the newest checkpoint, and SIGTERM, SIGUSR2 or `max_minutes` stop it in
    good order: it saves, and raises `Stopped`, a SystemExit with code 75.

    A mistake raises the same `fedmpi.errors.UserError` on every rank.
    """
    place = find_place(os.environ)
    follow_launcher(place, os.environ)

    def ready() -> RunSpec:
        given, chosen = choose(model, data, test, algorithm, out, knobs)
        cfg = from_values({"log_to": "none", **chosen, "out": None if out is None else str(out)}, given.row)
        if isinstance(algorithm, Algorithm) and algorithm.meta is not None and not cfg.meta.size:
            raise UserError("the algorithm has a meta step, but meta has no size; give meta={'size': SAMPLES}")
        spec = prepare(cfg, given)
        return replace(spec, out=None if out is None else spec.out)

    with undisturbed():
        if _connected:
            with agreed(_connected[0][0]):  # a mistake on one rank raises on all
                spec = ready()
        else:
            spec = agree_early(place, place.launcher == "mpi" or knobs.get("comm") == "mpi", ready)
        device = settle(spec.cfg, place)
        comm = link(spec.cfg, place, sums_device(device, spec.cfg.sums))
        with together(comm):
            outcome = run(spec, comm, place, device, os.environ, [] if out is None else ASKED)
    reports = [record(report) for report in outcome.history]
    return Result(exported(outcome), reports, outcome.cfg, spec.out, comm.rank, outcome.task.goal.rises)


def signature() -> inspect.Signature:
    """Return the signature of `train` with all options as keywords, for `help` and for completion in notebooks."""
    own = inspect.signature(train)
    fixed = [p for p in own.parameters.values() if p.kind is not p.VAR_KEYWORD]
    names = [name for name in Knobs.__annotations__ if name not in own.parameters]
    usual = vars(Config())
    more = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=usual.get(name)) for name in names]
    return own.replace(parameters=[*fixed, *more])


train.__signature__ = signature()  # type: ignore[attr-defined]


def choose(
    model: Any, data: Any, test: Any, algorithm: Any, out: Any, knobs: Mapping[str, Any]
) -> tuple[Overrides, dict[str, Any]]:
    """Return the objects that were passed, and the options that follow from them."""
    if not isinstance(out, str | Path | None):
        raise UserError(f"out is {type(out).__name__}; it must be the name of a folder, or None")
    chosen = as_tree(knobs)
    module = twin(model) if isinstance(model, nn.Module) else None
    made = algorithm if isinstance(algorithm, Row | Algorithm) else None
    for name in knobs:
        if (reserved := real_name(name)) in ("data", "model", "out", "algorithm"):
            raise UserError(f"{name} is not an option here; fedmpi.train takes it as its argument {reserved}")
    if not isinstance(model, nn.Module | str | None):
        raise UserError(f"model is {type(model).__name__}; it must be a torch.nn.Module, a name, or None")
    if not isinstance(algorithm, str | Row | Algorithm):
        raise UserError(f"algorithm is {type(algorithm).__name__}; it must be a name, a Row or an Algorithm")
    if isinstance(algorithm, Algorithm):
        check_algorithm(algorithm, chosen)
    chosen |= {"model": model if module is None else None, "algorithm": algorithm if made is None else "own"}
    if isinstance(data, str) or isinstance(data, Arrays | Datasets):
        if test is not None:
            raise UserError("test is given, but the data have their own; leave it out")
        chosen["data"] = data if isinstance(data, str) else data.name
        found: Data | None = None if isinstance(data, str) else data
    else:
        found = of_clients(data, test, chosen)
    return Overrides(found, module, made), chosen


def check_algorithm(algorithm: Algorithm, knobs: Mapping[str, Any]) -> None:
    """Refuse an algorithm that is not made of rules, and options that it does not read."""
    kinds = {"local": LocalRule, "mask": Mask, "server": ServerRule, "meta": MetaStep | None}
    for name, kind in kinds.items():
        if not isinstance(value := getattr(algorithm, name), kind):
            raise UserError(
                f"the algorithm's {name} is {type(value).__name__}; see docs/own-algorithm.md for what it is"
            )
    usual = asdict(Config())
    asked = {name for name in ("mask", "tau", "sharpness", "server") if knobs.get(name, usual[name]) != usual[name]}
    local = knobs.get("local") or {}
    asked |= {f"local.{k}" for k, v in local.items() if k not in WORK and v != usual["local"].get(k)}
    if asked:
        raise UserError(
            f"{', '.join(sorted(asked))} is given with an Algorithm, which has its own rules; leave it out, or "
            "give the algorithm by name"
        )


def of_clients(data: Any, test: Any, chosen: dict[str, Any]) -> Data:
    """Return the data of all clients as one object: either one data set per client, with the matching split added to
    `chosen`, or one data set to be split."""
    one = is_part(data)
    if not one and not isinstance(data, Mapping | Sequence):
        raise UserError(
            f"data is {type(data).__name__}; it must be a list or dict of the clients' data sets, one Dataset or pair "
            "(samples, labels) to split, an Arrays, a Datasets, or a name"
        )
    if not one and not len(data):
        raise UserError("data is empty; give one data set per client")
    if test is None:
        raise UserError("test is missing; give the test data: a Dataset, or a pair of arrays")
    if one and "clients" not in chosen:
        raise UserError(
            'data is one data set; give clients=, and split= such as "iid", "classes" or "dirichlet", to split it, or '
            "give a list with one data set per client"
        )
    if not one and chosen.keys() & {"split", "clients"}:
        raise UserError(
            f"split or clients is given with {len(data)} data sets, one per client, which are the split; leave it "
            "out, or give one data set to be split"
        )
    parts = list(data.values()) if isinstance(data, Mapping) and not one else data
    chosen |= {"data": "your data"} if one else {"data": "your data", "split": "natural", "clients": len(parts)}
    if "cohort" not in chosen:
        clients = chosen["clients"] if one else len(parts)
        chosen |= {"cohort": min(10, clients)} if isinstance(clients, int) else {}
    return as_data(parts, test)


def link(cfg: Config, place: Place, device: torch.device) -> Comm:
    """Return this rank's connection to the others, for sums on a device: opened at the first call, closed with the
    process."""
    if not _connected:
        comm = connect(cfg.comm, place, device, cfg.timeout, os.environ)
        if device.type == "cpu":
            share_node(comm)
        _connected.append((comm, device.type))
        atexit.register(comm.close)
    [(comm, kind)] = _connected
    if kind != device.type and place.size > 1:
        raise UserError(
            f"the ranks of this process are connected for sums on {kind}, and now they are on {device.type}; use one "
            "value of device and sums per script"
        )
    return comm


@contextmanager
def together(comm: Comm) -> Iterator[None]:
    """Abort all ranks if this rank alone fails: the others would wait for it."""
    try:
        yield
    except (UserError, CommonError, Stopped):  # raised on every rank
        raise
    except BaseException:
        if comm.size == 1:
            raise
        sys.stderr.write(f"fedmpi: rank {comm.rank}: {traceback.format_exc()}")
        comm.abort(1)


def exported(outcome: Outcome) -> nn.Module:
    """Return a copy of the trained model on the CPU, in evaluation mode."""
    tensors = trained_tensors(outcome.task, outcome.state)
    model = twin(outcome.task.model).cpu()
    for name, tensor in (dict(model.named_parameters()) | dict(model.named_buffers())).items():
        tensor.data = tensors[name] if name in tensors else tensor.detach().clone()
        tensor.grad = None
    return model.eval()

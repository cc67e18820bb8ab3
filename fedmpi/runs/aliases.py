"""Aliases: names of options and values in other tools, and what they are called here.

One table serves the command line and the keywords of `fedmpi.train`; docs/guide.md shows it. Configuration files have
only the real names, so that config.yaml does not depend on how the command was written.

The lookup ignores case, `-` and `_`. Options of a group are also found as `GROUP_NAME` (`--local_lr`, `--eval-every`),
and those of the client as `client_NAME`.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from ..errors import UserError, nearest, squeezed
from ..plugins.knobs import knobs
from .config import RENAMED, Config, flat

ALIASES: dict[str, tuple[str, ...]] = {
    "local.lr": ("lr", "learning_rate", "eta_l"),
    "local.epochs": ("epochs", "local_ep", "num_epochs"),
    "local.steps": ("num_steps",),
    "local.batch": ("batch_size", "batch", "bs", "local_bs", "local_batch_size", "client_batch_size"),
    "local.mu": ("mu", "prox_mu", "proximal_mu"),
    "local.weight_decay": ("weight_decay", "wd"),
    "local.clip": ("clip_grad", "grad_clip", "max_grad_norm"),
    "local.optimizer": ("client_optimizer",),
    "local.b1": ("adam_beta1",),
    "local.b2": ("adam_beta2",),
    "local.eps": ("adam_epsilon",),
    "local.accumulate": ("gradient_accumulation_steps", "grad_accum", "accumulation_steps"),
    "server.lr": ("server_lr", "global_lr", "server_learning_rate", "eta_g"),
    "server.rule": ("server_optimizer",),
    "server.b1": ("beta1",),
    "server.b2": ("beta2",),
    "server.eps": ("eps",),
    "skew.alpha": ("alpha", "dirichlet_alpha", "dir_alpha", "partition_alpha"),
    "skew.classes": ("classes_per_client", "num_classes_per_client", "shards_per_client"),
    "algorithm": ("alg", "algo", "strategy", "method"),
    "data": ("dataset", "data_name"),
    "data_root": ("data_dir", "data_path", "data_folder"),
    "split": ("partition", "partitioner", "partition_method"),
    "model": ("arch", "net", "network", "model_name"),
    "clients": ("num_clients", "n_clients", "total_clients", "num_users", "n_parties", "client_num_in_total"),
    "cohort": ("clients_per_round", "num_clients_per_round", "client_num_per_round", "sampled_clients", "cohort_size"),
    "min_clients": ("min_fit_clients",),
    "rounds": ("num_rounds", "n_rounds", "comm_round", "comm_rounds", "communication_rounds", "global_rounds"),
    "tau": ("threshold", "gma_tau", "mask_tau"),
    "seed": ("random_seed",),
    "out": ("output", "output_dir", "out_dir", "save_dir", "run_dir"),
    "workers": ("num_workers",),
    "threads": ("num_threads",),
    "eval.every": ("test_every", "eval_interval", "eval_freq", "frequency_of_the_test"),
    "eval.batch": ("test_batch_size",),
    "checkpoint.every": ("save_every", "checkpoint_interval"),
    "log_to": ("logger", "report_to"),
}
"""real name -> accepted aliases"""

HINTS: dict[str, str] = {
    "momentum": "--local.momentum is the clients', --server.momentum the server's",
    "optimizer": "--local.optimizer is the clients', --server.rule the server's",
    "optim": "--local.optimizer is the clients', --server.rule the server's",
    "scheduler": "--local.schedule and --server.schedule change a learning rate over the rounds",
    "lr_scheduler": "--local.schedule and --server.schedule change a learning rate over the rounds",
    "beta": "--skew.alpha is the concentration of split dirichlet, --skew.beta that of split quantity, --server.b1 and "
    "--server.b2 are the decays of the server's moments",
    "eta": "--local.lr is the clients' learning rate, --server.lr the server's",
    **dict.fromkeys(
        ("fraction", "frac", "fraction_fit", "participation", "sample_ratio"),
        "--cohort is the number of clients per round, not a fraction of them",
    ),
    "iid": "write --split iid",
    "noniid": "write --split classes or --split dirichlet --skew.alpha 0.1",
    "backend": "--comm is the transport (torch or mpi); torch takes gloo on a CPU and NCCL on a GPU",
    "gpu": "write --device cuda or --device cuda:N",
    "gpus": "write --ranks auto for a rank on each GPU, or --ranks_per_gpu N",
    "cuda": "write --device cuda or --device cuda:N",
    "wandb": "write --log_to wandb",
    "mlflow": "write --log_to mlflow",
    "tensorboard": "write --log_to tensorboard",
    "log_dir": "--out is the run folder, --log_to names the tools that follow a run",
}
"""ambiguous or unsupported names -> what to write instead"""

SYNONYMS: dict[str, dict[str, str]] = {
    "data": {"fashionmnist": "fmnist"},
    "mask": {"none": "mean", "avg": "mean", "average": "mean"},
    "split": {"dir": "dirichlet", "lda": "dirichlet", "shards": "classes", "pathological": "classes"},
}
"""option -> values of other tools -> values here; case, - and _ are ignored anyway"""

UNCLEAR: dict[str, dict[str, str]] = {
    "split": dict.fromkeys(
        ("noniid", "label", "labels", "labelskew", "hetero"),
        "write classes (a few classes per client: --skew.classes) or dirichlet (--skew.alpha)",
    ),
    "algorithm": {
        "fedgma": "gradient masked averaging is a mask: write --mask gma, with any algorithm",
        "gma": "gradient masked averaging is a mask: write --mask gma, with any algorithm",
        "fedopt": "write fedadam, fedyogi or fedadagrad",
    },
}
"""option -> ambiguous values -> what to write instead"""


@functools.cache
def names() -> dict[str, str]:
    """Return accepted name -> real name for all options; accepted names are squeezed."""
    found: dict[str, str] = {}
    for real in knobs(Config()):
        group, dot, name = real.partition(".")
        found |= {f"{group}_{name}": real} if dot else {}
        found |= {f"client_{name}": real} if group == "local" and dot else {}
    found |= RENAMED | {alias: real for real, aliases in ALIASES.items() for alias in aliases}
    found |= {real: real for real in (*knobs(Config()), "config", "print_config")}
    return {squeezed(name): real for name, real in found.items()}


def real_name(given: str) -> str | None:
    """Return the real name of an option; None if the name is unknown or ambiguous."""
    return names().get(squeezed(given))


def advice(given: str, dashes: str, roughly: bool = False) -> str | None:
    """Return what to write instead of a name that is no option, if other tools have it, or (`roughly`) one that is
    similar; None if there is nothing. `dashes`: the prefix of options."""
    name = squeezed(given)
    own = name.rpartition(".")[2]
    hints = {squeezed(known): hint for known, hint in HINTS.items()}
    real = names().get(name) or names().get(own)
    if roughly:
        real = names().get(nearest(name, names()) or "")
    return hints.get(name) or hints.get(own) or (f"did you mean '{dashes}{real}'?" if real else None)


def real_options(arguments: Iterable[str], kind: type[Config] = Config) -> list[str]:
    """Return a command line with the real names of its options, each joined with its value: --tau=0.4, --quiet=true."""
    switches = {name for name, value in knobs(kind()).items() if isinstance(value, bool)}
    words = deque(arguments)
    found = []
    while words:
        option, equals, value = words.popleft().partition("=")
        if option.startswith("--"):
            option = real_name(option) or option[2:]
            if not equals and words and not words[0].startswith("--"):
                equals, value = "=", words.popleft()
            elif not equals and option in switches:
                equals, value = "=", "true"
            option = f"--{option}"
        found.append(f"{option}{equals}{value}")
    return found


def real_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keywords under the real names of options, grouped in dicts; refuse an option that is given twice."""
    found: dict[str, Any] = {}
    given: dict[str, str] = {}
    for name, value in values.items():
        for real, one in flat({real_name(name) or name: value}).items():
            if real in given:
                raise UserError(f"{given[real]} and {name} are the same option, {real}; give one of them")
            given[real] = name
            group, _, own = real.partition(".")
            if not own:
                found[real] = one
            elif isinstance(found.setdefault(group, {}), dict):
                found[group][own] = one
    return found


def real_value(option: str, given: str, known: Iterable[str]) -> str:
    """Return the name in a table that a value stands for, ignoring case; the value itself if there is none."""
    table = {squeezed(name): name for name in known}
    key = squeezed(given)
    if given in table.values() or ":" in given:
        return given
    if key in UNCLEAR.get(option, {}):
        raise UserError(f"--{option} '{given}' is ambiguous; {UNCLEAR[option][key]}")
    return table.get(key) or SYNONYMS.get(option, {}).get(key, given)

"""`fedmpi attack`: membership inference against finished runs (Tenison et al., TMLR 2023, appendix F; thesis 4.7).

Can samples that the model was trained on (members) be distinguished from test samples by the model's outputs alone? Two
attackers try: a logistic regression on the outputs, as in the papers, and a threshold on the loss, which is stronger
but needs the label (attackers.py). The papers show the split of the samples only in a figure, after Tople et al.
(2020). Our reading: equally many members and others, drawn at random; the attacker is fitted on a random half of both
and scored on the other half. Guessing has an accuracy of 0.5.

If train and test samples differ by themselves (other writers, other colours), an attacker finds that difference, too.
--control measures it by also attacking the untrained model, which has seen no member.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ... import __version__
from ...cohort import draw
from ...comm.env import Place, available_cores
from ...data import Ints
from ...errors import UserError, reason
from ...plugins.knobs import check_bounds, knob
from ...runs.build import NOTHING, Overrides
from ...runs.folder import ATTACK, write
from ...runs.log import set_up
from ...runs.options import flag, positional, read_options
from ...runs.run import settle, undisturbed
from ...runs.text import align
from ...seeds import attack_generator
from ..runs import find_runs, read_run
from .answers import Answers, ask, check_score
from .attackers import Floats, cheapest, contest, logistic
from .rebuild import Rebuilt, config_of, finished, rebuild, untrained

ABOUT = "Attack finished runs by membership inference: how well do a model's outputs reveal what it was trained on?"
FEATURES: dict[str, Callable[[Floats], Floats]] = {
    "logits": lambda answers: answers,
    "sorted": lambda answers: -np.sort(-answers, axis=1),
}
WIDEST = 4096  # outputs per sample; with more, the Hessian of Newton's method does not fit into memory
COLUMNS = ("run", "attack", "accuracy", "+-", "95% interval", "auc", "advantage", "tpr@1%", "train", "test", "gap")
WIDTHS = (8, 6, 15, 6, 9, 6, 6, 6, 7)  # of the columns of numbers
SIDES = "llr"
BEFORE = ", before"  # marks results of the untrained model


@dataclass(frozen=True)
class AttackSettings:
    """The settings of an attack."""

    members: str = knob("all", choices=("all", "trained"))
    """all (every sample of a client) or trained (samples of clients that took part in a round)."""
    features: str = knob("logits", choices=FEATURES)
    """Input of the logistic regression: logits (as the papers do) or sorted (logits by size)."""
    samples: int = knob(10_000, low=2)
    """Maximum number of members, and of others; both sides get equally many."""
    repeats: int = knob(5, low=1, high=1000)
    """Number of random splits into a half to fit the attack on and a half to score it on."""
    seed: int = knob(0, low=0)
    """Seed of the samples and the splits."""
    control: bool = False
    """Also attack the untrained model: what is found there is not memory, but how test samples differ from members."""
    device: str = "auto"
    """auto, cpu, cuda or cuda:N."""


@dataclass(frozen=True)
class AttackOptions(AttackSettings):
    """The command line of `attack`."""

    runs: list[str] = positional("RUN", many=True)
    """Folder of a finished run, or of a sweep."""
    data_root: str | None = None
    """Folder of the data sets. Default: that of the run."""
    json: bool = flag()
    """Print one JSON object per run."""


USUAL = AttackSettings()


def main(arguments: list[str]) -> int:
    """Run `fedmpi attack RUN [RUN ...]`: attack each of the runs; return the exit code."""
    asked = read_options(AttackOptions, arguments, "attack", ABOUT, usage="RUN [RUN ...] [options]")
    if not asked.runs:
        raise UserError("attack was given no run folder; name one or more: fedmpi attack RUN [RUN ...]")
    set_up(rank=0, size=1)
    folders = [finished(run).folder for run in find_runs([Path(name) for name in asked.runs])]
    longest = max(len(str(folder)) for folder in [COLUMNS[0], *folders])
    widths = (longest, len("logits" + BEFORE * asked.control), *WIDTHS)
    for number, folder in enumerate(folders):
        found = attack_run(folder, asked.data_root, asked)
        if asked.json:
            print(json.dumps({"run": str(folder)} | found), flush=True)
        else:
            head = "" if number else align([COLUMNS], SIDES, widths)[0] + "\n"
            print(head + rows(folder, found, widths), flush=True)
    return 0


def attack_run(
    folder: Path, data_root: str | None = None, settings: AttackSettings = USUAL, given: Overrides = NOTHING
) -> dict[str, Any]:
    """Attack the finished run in a folder; return the results, and write them there as attack.json. The caller's
    random state and threads are restored. `given`: the data and the model, if the run got them as Python objects."""
    check_bounds(settings)
    with undisturbed():
        run = finished(read_run(folder))
        cfg = config_of(run, data_root)
        cores = available_cores()
        threads = min(cfg.threads or cores, cores)  # those of the run, for the same bits
        here = replace(cfg, device=settings.device, threads=threads)
        rebuilt = rebuild(run, cfg, settle(here, Place("alone", 0, 1, 0, 1)), given)
        found = attack(rebuilt, settings)
    try:
        write(folder / ATTACK, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"'{folder / ATTACK}' cannot be written ({reason(error)}); make the folder writable") from None
    return found


def attack(rebuilt: Rebuilt, settings: AttackSettings) -> dict[str, Any]:
    """Return the scores of the attackers, and the model's metric and loss on members and on others."""
    before = untrained(rebuilt) if settings.control else None
    inside, outside = choose(members_of(rebuilt, settings.members), rebuilt, settings)
    others = ask(rebuilt, outside, test=True)
    check_score(rebuilt, outside, others)
    members = ask(rebuilt, inside, test=False)
    control = None
    if before is not None:
        control = duel(ask(before, inside, test=False), ask(before, outside, test=True), settings)
    better = 1 if rebuilt.data.goal.rises else -1
    names = [f.name for f in dataclasses.fields(AttackSettings)]
    return {
        **{name: getattr(settings, name) for name in names if name not in ("device", "control")},
        "samples": len(inside),
        "judged": 2 * (len(inside) - len(inside) // 2),
        "metric": rebuilt.data.goal.metric,
        "train": members.metric,
        "test": others.metric,
        "gap": better * (members.metric - others.metric),
        "train_loss": float(members.losses.mean()),
        "test_loss": float(others.losses.mean()),
        "baseline": 0.5,
        **duel(members, others, settings),
        "control": control,
        "model_sha256": rebuilt.run.finished["model_sha256"],
        "fedmpi": __version__,
    }


def duel(members: Answers, others: Answers, settings: AttackSettings) -> dict[str, Any]:
    """Return the scores of both attackers; None for the logistic regression if the outputs are too wide for it."""
    values = np.concatenate([members.values, others.values])
    losses = np.concatenate([members.losses, others.losses])
    narrow = values.shape[1] <= WIDEST
    draws = settings.repeats, settings.seed
    return {
        "logistic": contest(logistic, FEATURES[settings.features](values), *draws) if narrow else None,
        "loss": contest(cheapest, losses[:, None], *draws),
    }


# Which samples


def members_of(rebuilt: Rebuilt, which: str) -> Ints:
    """Return the indices of the train samples that count as members: those of the clients, and a meta set that was
    shared with them or that the server was trained on."""
    partition, order = rebuilt.partition, rebuilt.partition.order
    if which == "trained":
        client = np.repeat(np.arange(partition.clients), np.diff(partition.offsets))
        order = order[np.isin(client, trained_clients(rebuilt))]
    meta = rebuilt.meta if rebuilt.cfg.meta.lr else partition.shared
    return np.unique(np.concatenate([order, meta]))


def trained_clients(rebuilt: Rebuilt) -> list[int]:
    """Return the clients that took part in at least one round and were not dropped from it."""
    cfg, run = rebuilt.cfg, rebuilt.run
    dropped = {record["round"]: record.get("dropped_clients") or [] for record in run.records}
    cohorts = {
        number: draw(cfg.seed, number, rebuilt.partition.sizes, cfg.cohort, ranks=1).cids
        for number in range(1, int(run.finished.get("rounds", cfg.rounds)) + 1)
    }
    return sorted({cid for number, cids in cohorts.items() for cid in cids if cid not in dropped.get(number, ())})


def choose(members: Ints, rebuilt: Rebuilt, settings: AttackSettings) -> tuple[Ints, Ints]:
    """Return the indices, ascending, of equally many members and test samples, drawn at random."""
    tests = rebuilt.data.tests
    count = min(len(members), tests, settings.samples)
    if count < 2:
        raise UserError(
            f"the run in '{rebuilt.run.folder}' has {len(members)} members and {tests} test samples; an attack needs "
            "at least 2 of each: one to fit on and one to score on"
        )
    rng = attack_generator(settings.seed, 0)
    return np.sort(rng.choice(members, count, replace=False)), np.sort(rng.choice(tests, count, replace=False))


# The table


def rows(folder: Path, found: dict[str, Any], widths: Sequence[int]) -> str:
    """Return the rows of a run in the table, one per attacker."""
    results = [f"{found[key]:.4f}" for key in ("train", "test", "gap")]
    lines = []
    for part, suffix, more in ((found, "", results), (found["control"] or {}, BEFORE, ["-"] * len(results))):
        for name, verdict in ((found["features"], part.get("logistic")), ("loss", part.get("loss"))):
            if verdict is not None:
                low, high = verdict["interval"]
                deviation = "-" if verdict["deviation"] is None else f"{verdict['deviation']:.4f}"
                scores = [f"{verdict['accuracy']:.4f}", deviation, f"{low:.4f} - {high:.4f}"]
                scores += [f"{verdict[key]:.4f}" for key in ("auc", "advantage", "tpr_at_1_fpr")]
                lines.append((str(folder), name + suffix, *scores, *more))
    return "\n".join(align(lines, SIDES, widths))

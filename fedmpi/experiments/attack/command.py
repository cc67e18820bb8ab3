"""`fedmpi attack`: membership inference against finished runs (Tenison et al., TMLR 2023, appendix F; thesis 4.7).

Can who sees only what the trained model answers tell samples that it was trained on (members) from test samples? Two
attackers try: a logistic regression on the answers, as in the papers, and a threshold on the loss, which is stronger
and knows the label (attackers.py). The papers show the split of the samples in a figure, after Tople et al. (2020), and
do not put it into words. It is read so here: as many members as others, at random; a random half of either for the
attacker to learn from, and the other halves to judge it by. So who guesses is right half of the time.

Where train and test samples differ by themselves (other writers, other colours), an attacker finds that difference as
well. So --control attacks the model as it was before the first round, too, which knows no member.
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
from ...errors import UserError, reason, unknown
from ...plugins.knobs import check_bounds, knob
from ...runs.build import NOTHING, Given
from ...runs.folder import ATTACK, write
from ...runs.log import set_up
from ...runs.options import flag, positional, read_options
from ...runs.run import settle, undisturbed
from ...runs.text import align
from ...seeds import attack_generator
from ..runs import find_runs, read_run
from .answers import Answers, ask, scored_loss
from .attackers import Floats, cheapest, contest, logistic
from .rebuild import Rebuilt, check_score, config_of, finished, rebuild, untrained

ABOUT = "Attack finished runs by membership inference: how well do a model's outputs reveal what it was trained on?"
MEMBERS = ("all", "trained")
FEATURES: dict[str, Callable[[Floats], Floats]] = {
    "logits": lambda answers: answers,
    "sorted": lambda answers: -np.sort(-answers, axis=1),
}
WIDEST = 4096  # numbers in an answer; of more, Newton's method would fill the memory
COLUMNS = ("run", "attack", "accuracy", "+-", "95% interval", "auc", "advantage", "tpr@1%", "train", "test", "gap")
WIDTHS = (8, 6, 15, 6, 9, 6, 6, 6, 7)  # of the numbers
SIDES = "llr"
BEFORE = ", before"  # the first round


@dataclass(frozen=True)
class How:
    """How an attack is made."""

    members: str = "all"
    """all (every sample of a client) or trained (samples of clients that took part in a round)."""
    features: str = "logits"
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
class AttackOptions(How):
    """The command line of `attack`."""

    runs: list[str] = positional("RUN", many=True)
    """Folder of a finished run, or of a sweep."""
    data_root: str | None = None
    """Folder of the data sets. Default: that of the run."""
    json: bool = flag()
    """Print one JSON object per run."""


USUAL = How()


def main(arguments: list[str]) -> int:
    """`fedmpi attack RUN [RUN ...]`: attack each of the runs; return the exit code."""
    asked = read_options(AttackOptions, arguments, "attack", ABOUT, usage="RUN [RUN ...] [options]")
    if not asked.runs:
        raise UserError("attack was given no run folder; name one or more: fedmpi attack RUN [RUN ...]")
    how = How(**{f.name: getattr(asked, f.name) for f in dataclasses.fields(How)})
    check(how)
    set_up(rank=0, size=1)
    folders = [finished(run).folder for run in find_runs([Path(name) for name in asked.runs])]
    longest = max(len(str(folder)) for folder in [COLUMNS[0], *folders])
    widths = (longest, len("logits" + BEFORE * how.control), *WIDTHS)
    for number, folder in enumerate(folders):
        found = attack_run(folder, asked.data_root, how)
        if asked.json:
            print(json.dumps({"run": str(folder)} | found), flush=True)
        else:
            head = "" if number else align([COLUMNS], SIDES, widths)[0] + "\n"
            print(head + rows(folder, found, widths), flush=True)
    return 0


def check(how: How) -> None:
    """Refuse options out of their bounds, or words that mean nothing here."""
    check_bounds(how, prefix="")
    for kind, name, known in (("--members", how.members, MEMBERS), ("--features", how.features, FEATURES)):
        if name not in known:
            raise unknown(kind, name, known)


def attack_run(folder: Path, data_root: str | None = None, how: How = USUAL, given: Given = NOTHING) -> dict[str, Any]:
    """Attack the finished run in a folder; return what was found, and write it there as attack.json. The caller's
    random numbers and threads are left as they are. `given`: the data and the model, where the run had them as objects
    of a Python program."""
    check(how)
    with undisturbed():
        run = finished(read_run(folder))
        cfg = config_of(run, data_root)
        cores = available_cores()
        here = replace(cfg, device=how.device, threads=min(cfg.threads or cores, cores))  # those of the run: same bits
        rebuilt = rebuild(run, cfg, settle(here, Place("alone", 0, 1, 0, 1)), given)
        found = attack(rebuilt, how)
    try:
        write(folder / ATTACK, json.dumps(found, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"'{folder / ATTACK}' cannot be written ({reason(error)}); make the folder writable") from None
    return found


def attack(rebuilt: Rebuilt, how: How) -> dict[str, Any]:
    """Return the results of the attackers, and of the model on members and on others."""
    before = untrained(rebuilt) if how.control else None
    inside, outside = choose(members_of(rebuilt, how.members), rebuilt, how)
    others = ask(rebuilt, outside, test=True)
    check_score(rebuilt, scored_loss(rebuilt, outside, others))
    members = ask(rebuilt, inside, test=False)
    control = None
    if before is not None:
        control = duel(ask(before, inside, test=False), ask(before, outside, test=True), how)
    better = 1 if rebuilt.data.goal.rises else -1
    return {
        **{f.name: getattr(how, f.name) for f in dataclasses.fields(How) if f.name not in ("device", "control")},
        "samples": len(inside),
        "judged": 2 * (len(inside) - len(inside) // 2),
        "metric": rebuilt.data.goal.metric,
        "train": members.metric,
        "test": others.metric,
        "gap": better * (members.metric - others.metric),
        "train_loss": float(members.losses.mean()),
        "test_loss": float(others.losses.mean()),
        "baseline": 0.5,
        **duel(members, others, how),
        "control": control,
        "model_sha256": rebuilt.run.finished["model_sha256"],
        "fedmpi": __version__,
    }


def duel(members: Answers, others: Answers, how: How) -> dict[str, Any]:
    """Return how well either attacker does; the logistic regression is None where answers are too wide for it."""
    values, losses = (
        np.concatenate(pair) for pair in ((members.values, others.values), (members.losses, others.losses))
    )
    narrow = values.shape[1] <= WIDEST
    return {
        "logistic": contest(logistic, FEATURES[how.features](values), how.repeats, how.seed) if narrow else None,
        "loss": contest(cheapest, losses[:, None], how.repeats, how.seed),
    }


# Whom to ask


def members_of(rebuilt: Rebuilt, which: str) -> Ints:
    """Return the numbers of the train samples that count as members: those of the clients, and a meta set that was
    shared with them or that the server has learnt from."""
    partition, order = rebuilt.partition, rebuilt.partition.order
    if which == "trained":
        client = np.repeat(np.arange(partition.clients), np.diff(partition.offsets))
        order = order[np.isin(client, trained_clients(rebuilt))]
    meta = rebuilt.meta if rebuilt.cfg.meta.lr else partition.shared
    return np.unique(np.concatenate([order, meta]))


def trained_clients(rebuilt: Rebuilt) -> list[int]:
    """Return the clients that took part in at least one round, and were not left out of it."""
    cfg, run = rebuilt.cfg, rebuilt.run
    dropped = {record["round"]: record.get("dropped_clients") or [] for record in run.records}
    cohorts = {
        number: draw(cfg.seed, number, rebuilt.partition.sizes, cfg.cohort, ranks=1).cids
        for number in range(1, int(run.finished.get("rounds", cfg.rounds)) + 1)
    }
    return sorted({cid for number, cids in cohorts.items() for cid in cids if cid not in dropped.get(number, ())})


def choose(members: Ints, rebuilt: Rebuilt, how: How) -> tuple[Ints, Ints]:
    """Return as many members as test samples, drawn at random: their numbers, ascending."""
    tests = rebuilt.data.tests
    count = min(len(members), tests, how.samples)
    if count < 2:
        raise UserError(
            f"the run in '{rebuilt.run.folder}' has {len(members)} members and {tests} test samples; an attack needs "
            "at least 2 of either, one to learn from and one to be judged by"
        )
    rng = attack_generator(how.seed, 0)
    return np.sort(rng.choice(members, count, replace=False)), np.sort(rng.choice(tests, count, replace=False))


# The table


def rows(folder: Path, found: dict[str, Any], widths: Sequence[int]) -> str:
    """Return a run as lines of the table, one per attacker."""
    results = [f"{found[key]:.4f}" for key in ("train", "test", "gap")]
    lines = []
    for part, behind, more in ((found, "", results), (found["control"] or {}, BEFORE, ["-"] * len(results))):
        for name, verdict in ((found["features"], part.get("logistic")), ("loss", part.get("loss"))):
            if verdict is not None:
                lines.append((str(folder), name + behind, *cells(verdict), *more))
    return "\n".join(align(lines, SIDES, widths))


def cells(verdict: dict[str, Any]) -> list[str]:
    """Return the cells of an attacker."""
    low, high = verdict["interval"]
    deviation = "-" if verdict["deviation"] is None else f"{verdict['deviation']:.4f}"
    others = [f"{verdict[key]:.4f}" for key in ("auc", "advantage", "tpr_at_1_fpr")]
    return [f"{verdict['accuracy']:.4f}", deviation, f"{low:.4f} - {high:.4f}", *others]

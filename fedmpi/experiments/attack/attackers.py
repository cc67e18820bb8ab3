"""Membership attackers: what is learnt from samples whose membership is known, and how well that tells others apart.

An attacker learns from its half of the samples and returns a `Learned`: a rank for every sample, higher where it looks
more like a member, and the cut from which on it is taken for one.

logistic   a binary logistic regression on what a model answers (Tenison et al., TMLR 2023, appendix F). The papers
           descend for 5000 rounds; the loss is convex, so here Newton's method goes to where that leads, with a little
           weight decay that keeps the solution finite where members and others can be told apart without fault.
cheapest   a threshold on the loss of a sample (Yeom et al., CSF 2018), here that which is right most often on the
           attacker's own half.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import RunError
from ...seeds import attack_generator
from ..stats import wilson

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

DECAY = 1e-4  # the customary 1 / samples, for ten thousand
SMALLEST = 1e-9  # slope that counts as none
ROUNDING = 1e-15  # of a height
MOST_STEPS = 200  # of Newton's method, which takes about ten
FALSE_ALARMS = 0.01


@dataclass(frozen=True)
class Learned:
    """What an attacker has learnt."""

    rank: Callable[[Floats], Floats]
    """values [n, width] -> a rank each, [n]"""
    cut: float
    """samples of this rank or a higher one are taken for members"""


Attacker = Callable[[Floats, Bools], Learned]
"""(values [n, width], whether each is a member's) -> what it has learnt"""


@dataclass(frozen=True)
class Verdict:
    """How well an attacker does on samples that it did not learn from."""

    accuracy: float
    auc: float
    """the chance that a member ranks above another sample, a tie counted half"""
    advantage: float
    """members found less false alarms, each as a share: 0 for who guesses"""
    tpr_at_1_fpr: float
    """the share of members found at the cut that gives at most 1 % false alarms"""


def logistic(values: Floats, member: Bools) -> Learned:
    """A logistic regression on the values, each of them scaled to mean 0 and deviation 1 on the attacker's half."""
    mean, scale = values.mean(axis=0), values.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    weights = fit_logistic((values - mean) / scale, member)
    return Learned(lambda new: (new - mean) / scale @ weights[:-1] + weights[-1], cut=0.0)


def fit_logistic(x: Floats, member: Bools, decay: float = DECAY) -> Floats:
    """The weights, the intercept last, at which the mean of log(1 + exp(-+score)) plus decay / 2 |weights|^2 is least;
    the intercept does not decay. By Newton's method, a step halved while it leads up."""
    a = np.column_stack([x, np.ones(len(x))])
    decays = np.append(np.full(x.shape[1], decay), 0.0)
    side = np.where(member, 1.0, -1.0)

    def height(w: Floats) -> float:
        return float(np.logaddexp(0, -side * (a @ w)).mean() + 0.5 * (decays * w * w).sum())

    w = np.zeros(a.shape[1])
    for _ in range(MOST_STEPS):
        wrong = np.exp(-np.logaddexp(0, side * (a @ w)))  # how much of each sample is on the wrong side
        slope = decays * w - a.T @ (side * wrong) / len(a)
        if np.abs(slope).max() < SMALLEST:
            return w
        bend = a.T @ (a * (wrong * (1 - wrong))[:, None]) / len(a) + np.diag(decays)
        step, part, here = np.linalg.solve(bend, slope), 1.0, height(w)
        while height(w - part * step) > here + ROUNDING and part > SMALLEST:
            part /= 2
        w = w - part * step
    raise RunError(f"the logistic regression has not come to its minimum after {MOST_STEPS} steps of Newton's method")


def cheapest(values: Floats, member: Bools) -> Learned:
    """Members are those of the lowest loss, `values` [n, 1]: the threshold, a loss of the attacker's half, is right
    there most often, and is the lowest of several such."""
    order = np.argsort(values[:, 0], kind="stable")
    losses, gain = values[order, 0], np.cumsum(np.where(member[order], 1, -1))
    last = np.append(losses[1:] != losses[:-1], True)  # of equal ones: they fall on the same side
    best = int(np.argmax(np.where(last, gain, -len(gain))))
    return Learned(lambda new: -new[:, 0], cut=-losses[best] if gain[best] > 0 else np.inf)


def contest(attacker: Attacker, values: Floats, repeats: int, seed: int) -> dict[str, Any]:
    """How well an attacker does on values of which the first half are members'. It learns from a random half of the
    members and of the others and is judged by the rest, several times."""
    count = len(values) // 2
    member = np.arange(2 * count) < count
    verdicts = []
    for repeat in range(repeats):
        known = half(count, attack_generator(seed, 1 + repeat))
        verdicts.append(judge(attacker(values[known], member[known]), values[~known], member[~known]))
    return summary(verdicts, 2 * (count - count // 2))


def half(count: int, rng: np.random.Generator) -> Bools:
    """A random half of `count` members and of as many others behind them."""
    known = np.zeros((2, count), dtype=np.bool_)
    for side in known:
        side[rng.permutation(count)[: count // 2]] = True
    return known.ravel()


def summary(verdicts: Sequence[Verdict], trials: int) -> dict[str, Any]:
    """The means over the repeats; the deviation of the accuracy, which tells of the halves alone; and the interval,
    which tells of the samples, as if one repeat had come to that mean: more of them do not add samples."""
    columns = {f.name: [getattr(one, f.name) for one in verdicts] for f in dataclasses.fields(Verdict)}
    means = {name: fmean(column) for name, column in columns.items()}
    return {
        **means,
        "deviation": stdev(columns["accuracy"]) if len(verdicts) > 1 else None,
        "interval": list(wilson(means["accuracy"], trials)),
        "each": [dataclasses.asdict(one) for one in verdicts],
    }


def judge(learned: Learned, values: Floats, member: Bools) -> Verdict:
    """How well what was learnt does on these samples."""
    rank = learned.rank(values)
    said = rank >= learned.cut
    found, alarms = float(said[member].mean()), float(said[~member].mean())
    return Verdict(
        accuracy=float((said == member).mean()),
        auc=auc(rank[member], rank[~member]),
        advantage=found - alarms,
        tpr_at_1_fpr=found_at(rank[member], rank[~member], FALSE_ALARMS),
    )


def auc(members: Floats, others: Floats) -> float:
    """The share of pairs in which the member ranks above the other, ties counted half: the area under the ROC."""
    others = np.sort(others)
    below, not_above = (np.searchsorted(others, members, side=side) for side in ("left", "right"))
    return float((below + not_above).sum() / (2 * len(members) * len(others)))


def found_at(members: Floats, others: Floats, alarms: float) -> float:
    """The largest share of members that a cut finds which takes at most that share of the others for members."""
    allowed = int(alarms * len(others) + 1e-9)  # others that may rank at the cut or above
    highest = np.sort(others)[::-1]
    return float((members > highest[allowed]).mean()) if allowed < len(others) else 1.0

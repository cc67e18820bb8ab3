"""Membership attackers: fitted on samples whose membership is known, scored on the others.

An attacker is fitted on its half of the samples and returns a `Learned`: a score per sample (`rank`), higher for likely
members, and a threshold (`cut`) at or above which a sample is classified as a member.

logistic   Binary logistic regression on the model's outputs (Tenison et al., TMLR 2023, appendix F). The papers run
           5000 rounds of gradient descent; the loss is convex, so Newton's method finds the same minimum. A small
           weight decay keeps the solution finite where members and others are linearly separable.
cheapest   Threshold on the loss of a sample (Yeom et al., CSF 2018): the one with the highest accuracy on the
           attacker's half.
"""

from __future__ import annotations

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

DECAY = 1e-4  # the usual 1 / samples, for ten thousand samples
SMALLEST = 1e-9  # a gradient below this counts as zero
ROUNDING = 1e-15  # tolerance when two losses are compared
MOST_STEPS = 200  # of Newton's method, which usually needs about ten
FALSE_ALARMS = 0.01


@dataclass(frozen=True)
class Learned:
    """A fitted attacker."""

    rank: Callable[[Floats], Floats]
    """values [n, width] -> scores [n]"""
    cut: float
    """threshold: samples with this score or a higher one are classified as members"""


Attacker = Callable[[Floats, Bools], Learned]
"""(values [n, width], membership [n]) -> fitted attacker"""


def logistic(values: Floats, member: Bools) -> Learned:
    """Fit a logistic regression on the values, standardised to mean 0 and deviation 1 on the attacker's half."""
    mean, scale = values.mean(axis=0), values.std(axis=0)
    scale = np.where(scale > 0, scale, 1.0)
    weights = fit_logistic((values - mean) / scale, member)
    return Learned(lambda new: (new - mean) / scale @ weights[:-1] + weights[-1], cut=0.0)


def fit_logistic(x: Floats, member: Bools, decay: float = DECAY) -> Floats:
    """Return the weights, intercept last, that minimise the mean of log(1 + exp(-+score)) plus decay / 2 |weights|^2.
    The intercept does not decay. Newton's method; a step is halved while it increases the loss."""
    a = np.column_stack([x, np.ones(len(x))])
    decays = np.append(np.full(x.shape[1], decay), 0.0)
    side = np.where(member, 1.0, -1.0)

    def height(w: Floats) -> float:
        return float(np.logaddexp(0, -side * (a @ w)).mean() + 0.5 * (decays * w * w).sum())

    w = np.zeros(a.shape[1])
    for _ in range(MOST_STEPS):
        wrong = np.exp(-np.logaddexp(0, side * (a @ w)))  # probability of the wrong class, per sample
        slope = decays * w - a.T @ (side * wrong) / len(a)
        if np.abs(slope).max() < SMALLEST:
            return w
        bend = a.T @ (a * (wrong * (1 - wrong))[:, None]) / len(a) + np.diag(decays)
        step, part, here = np.linalg.solve(bend, slope), 1.0, height(w)
        while height(w - part * step) > here + ROUNDING and part > SMALLEST:
            part /= 2
        w = w - part * step
    raise RunError(f"the logistic regression did not converge in {MOST_STEPS} steps of Newton's method")


def cheapest(values: Floats, member: Bools) -> Learned:
    """Fit a threshold on the losses, `values` [n, 1]: samples at or below it are members. It is the loss in the
    attacker's half with the highest accuracy there, the lowest of several such."""
    order = np.argsort(values[:, 0], kind="stable")
    losses, gain = values[order, 0], np.cumsum(np.where(member[order], 1, -1))
    last = np.append(losses[1:] != losses[:-1], True)  # of equal losses, which fall on the same side
    best = int(np.argmax(np.where(last, gain, -len(gain))))
    return Learned(lambda new: -new[:, 0], cut=-losses[best] if gain[best] > 0 else np.inf)


def contest(attacker: Attacker, values: Floats, repeats: int, seed: int) -> dict[str, Any]:
    """Return the scores of an attacker on values whose first half are the members'. It is fitted on a random half of
    the members and of the others and scored on the rest, `repeats` times."""
    count = len(values) // 2
    member = np.arange(2 * count) < count
    verdicts = []
    for repeat in range(repeats):
        known = half(count, attack_generator(seed, 1 + repeat))
        verdicts.append(judge(attacker(values[known], member[known]), values[~known], member[~known]))
    return summary(verdicts, 2 * (count - count // 2))


def half(count: int, rng: np.random.Generator) -> Bools:
    """Return a random half of `count` members and of as many others, which follow them, as a boolean mask."""
    known = np.zeros((2, count), dtype=np.bool_)
    for side in known:
        side[rng.permutation(count)[: count // 2]] = True
    return known.ravel()


def summary(verdicts: Sequence[dict[str, float]], trials: int) -> dict[str, Any]:
    """Return the means over the repeats, the deviation of the accuracy over the random halves, and the confidence
    interval over the samples. The interval is that of one repeat with this mean: repeats do not add samples."""
    means = {name: fmean(one[name] for one in verdicts) for name in verdicts[0]}
    return {
        **means,
        "deviation": stdev(one["accuracy"] for one in verdicts) if len(verdicts) > 1 else None,
        "interval": list(wilson(means["accuracy"], trials)),
        "each": list(verdicts),
    }


def judge(learned: Learned, values: Floats, member: Bools) -> dict[str, float]:
    """Return the scores of a fitted attacker on samples that it was not fitted on. The advantage is the true positive
    rate minus the false positive rate: 0 for guessing."""
    rank = learned.rank(values)
    said = rank >= learned.cut
    found, alarms = float(said[member].mean()), float(said[~member].mean())
    return {
        "accuracy": float((said == member).mean()),
        "auc": auc(rank[member], rank[~member]),
        "advantage": found - alarms,
        "tpr_at_1_fpr": found_at(rank[member], rank[~member], FALSE_ALARMS),
    }


def auc(members: Floats, others: Floats) -> float:
    """Return the area under the ROC curve: the share of pairs in which the member ranks higher; ties count half."""
    others = np.sort(others)
    below, not_above = (np.searchsorted(others, members, side=side) for side in ("left", "right"))
    return float((below + not_above).sum() / (2 * len(members) * len(others)))


def found_at(members: Floats, others: Floats, alarms: float) -> float:
    """Return the highest true positive rate of any threshold with a false positive rate of at most `alarms`."""
    allowed = int(alarms * len(others) + 1e-9)  # others that may rank at or above the threshold
    highest = np.sort(others)[::-1]
    return float((members > highest[allowed]).mean()) if allowed < len(others) else 1.0

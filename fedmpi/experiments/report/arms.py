"""AVG beside GMA: pairs of groups that differ in the mask, their difference, and what chance may have done to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..measures import Measure, measure
from ..runs import Group, essence, pairing, words
from ..stats import ALPHA, LEAST, Comparison, compare, holm, significant
from ..tables import Cell, Difference, Missing, Number, Probability, Table
from .results import cell, form, remarks, title, values

MASK = ("mask", "tau", "sharpness")
RATES = ("local.lr", "server.lr", "meta.lr")  # which a paper may choose for each mask


@dataclass(frozen=True)
class Pair:
    """Plain averaging and a mask, all else equal, but perhaps the learning rates."""

    plain: Group
    masked: Group
    crowded: bool = False
    """whether another pair is the same in what both are and in the mask"""

    @property
    def label(self) -> str:
        """What both are, their algorithm last; where that is said of another pair too, what the masked one is."""
        key = self.masked.key
        if not self.crowded:
            key = {k: v for k, v in key.items() if self.plain.key.get(k) == v}
        config = self.masked.config
        return ", ".join([*words(key, config, taus=True), key.get("algorithm", config["algorithm"])])

    @property
    def mask(self) -> str:
        return pairing(self.masked.key, self.masked.config, taus=True, algorithm=False)

    @property
    def name(self) -> str:
        """The masked one of the two, which is compared with the mean."""
        return f"{self.label} + {self.mask}"

    @property
    def done(self) -> bool:
        """Whether both have a run that is."""
        return all(any(run.done for run in group.runs) for group in (self.plain, self.masked))

    @property
    def same_rates(self) -> bool:
        return rates(self.plain) == rates(self.masked)


def rates(group: Group) -> list[Any]:
    return [group.config.get(name) for name in RATES]


def pairs(groups: Sequence[Group]) -> list[Pair]:
    """Each masked group with the plain one that differs in the mask alone, or else in the learning rates too, where
    there is exactly one."""

    def setting(group: Group) -> dict[str, Any]:
        return {k: v for k, v in essence(group.first).items() if k not in MASK + RATES}

    plain = [(group, setting(group)) for group in groups if group.first.mask == "mean"]
    found = []
    for group in groups:
        if group.first.mask == "mean":
            continue
        here = setting(group)
        alike = [other for other, there in plain if there == here]
        nearest = [other for other in alike if rates(other) == rates(group)] or alike
        found += [Pair(nearest[0], group)] if len(nearest) == 1 else []
    names = [(pair.label, pair.mask) for pair in found]
    return [replace(pair, crowded=names.count(name) > 1) for pair, name in zip(found, names, strict=True)]


@dataclass(frozen=True)
class Line:
    """A pair that was compared."""

    pair: Pair
    test: Comparison | None
    """None: in an arm nothing is done yet, or has a value"""
    corrected: float | None
    """its p beside those of the other lines"""
    gain: float
    """how much better the mask is; less than 0: how much worse"""
    plain: dict[int, float]
    """seed -> value of the plain arm, of the seeds that were compared: in a paired test those that both arms have"""
    masked: dict[int, float]
    alone: int
    """seeds with a value in one arm only, which a paired test leaves out"""

    @property
    def sure(self) -> bool:
        """Whether the difference is significant, all lines considered."""
        return self.test is not None and significant(replace(self.test, p=self.corrected))


def compare_pairs(found: Sequence[Pair], what: Measure) -> list[Line]:
    """The pairs by a measure, with p values that allow for their number."""
    tests = [compare(values(pair.plain, what), values(pair.masked, what)) if pair.done else None for pair in found]
    corrected = holm([None if test is None else test.p for test in tests])
    return [make_line(*each, what) for each in zip(found, tests, corrected, strict=True)]


def make_line(pair: Pair, test: Comparison | None, corrected: float | None, what: Measure) -> Line:
    """A pair with its test, and the values that went into it."""
    plain, masked = (
        {seed: value for seed, value in values(group, what).items() if value is not None}
        for group in (pair.plain, pair.masked)
    )
    alone = plain.keys() ^ masked.keys() if test is not None and test.paired else set()
    plain, masked = ({seed: value for seed, value in arm.items() if seed not in alone} for arm in (plain, masked))
    gain = 0.0 if test is None else test.difference * (1 if what.rises(pair.plain.first) else -1)
    return Line(pair, test, corrected, gain, plain, masked, len(alone))


def mask_table(groups: Sequence[Group], name: str = "best") -> Table:
    """AVG beside GMA: both arms of each pair, their difference with its interval, and what chance may have done."""
    what, found = measure(name), pairs(groups)
    lines = compare_pairs(found, what)
    arms = [group for pair in found for group in (pair.plain, pair.masked)]
    columns = ["setting", "mask", "AVG", "masked", "difference", "n", "p", "p (flips)", "p (Holm)"]
    notes = [*remarks(arms, [what]), *test_remarks(lines)] if lines else []
    head = f"Plain averaging (AVG) beside a mask: {title(what, arms) if arms else what.name}"
    return Table(head, columns, [row(line, what) for line in lines], notes, align="llrrrrrrr")


def row(line: Line, what: Measure) -> list[Cell]:
    """One pair; the better mean in bold."""
    pair, test = line.pair, line.test
    plain = cell(pair.plain, what, better=line.gain < 0, some=line.plain)
    masked = cell(pair.masked, what, better=line.gain > 0, some=line.masked)
    if test is None:
        return [pair.label, pair.mask, plain, masked, *[Missing()] * 5]
    ps = [Missing() if p is None else Probability(p) for p in (test.p, test.flips, line.corrected)]
    gap = Difference(test.difference, test.low, test.high, **form(pair.masked, what))
    return [pair.label, pair.mask, plain, masked, gap, Number(test.count, digits=0), *ps]


def test_remarks(lines: Sequence[Line]) -> list[str]:
    """What the tests were, what they allow to say, and what they do not."""
    tests = [line.test for line in lines if line.test is not None]
    sure = [line.gain for line in lines if line.sure]
    notes = [
        "Difference: masked - AVG, with its 95% interval. n: pairs of runs with one seed. p: two-sided t test of these "
        "pairs; p (flips): exact sign-flip test; p (Holm): p corrected for the number of rows.",
        f"The mask has the better mean in {sum(line.gain > 0 for line in lines)} of {len(lines)} rows, the worse in "
        f"{sum(line.gain < 0 for line in lines)}; significantly better in {sum(gain > 0 for gain in sure)}, "
        f"significantly worse in {sum(gain < 0 for gain in sure)} (p (Holm) and p (flips) at most {ALPHA:g}).",
    ]
    few = sorted({(test.count, test.least) for test in tests if test.count >= LEAST and test.least > ALPHA})
    notes += [
        f"n = {count} is too few to conclude: an exact test of so few cannot go below p = {least:g}, and a smaller p "
        "of the t test leans on differences that are normal."
        for count, least in few
    ]
    if any(test.count < LEAST for test in tests):
        notes.append(f"There is no test for n below {LEAST}.")
    if any(not test.paired for test in tests):
        notes.append("Where seeds are not common, p is that of Welch's test, and n the runs of the smaller arm.")
    if any(line.alone for line in lines):
        notes.append(
            "Where an arm has a value for a seed and the other has none, the seed is left out: both means and their "
            "difference are over the common ones."
        )
    if any(not line.pair.same_rates for line in lines):
        notes.append("In some rows the learning rates of the arms differ, as each has its own.")
    return notes

"""Plain (AVG) against masked averaging: pairs of groups that differ in the mask, and tests of the difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...measures import Measure, measure
from ...runs import Group, essence, pairing, words
from ...stats import ALPHA, LEAST, Comparison, compare, holm, significant, verdict
from ...tables import Cell, Difference, Missing, Probability, Table
from ..figures import rows
from ..figures.rows import Mark, Row
from ..figures.style import INK, Picture, Style, numbered_style
from ..page import Fold, Named, Part
from .material import Material, by_suffix, capitalised, mark, unit
from .results import cell, column_title, form, remarks, values, whole

MASK = ("mask", "tau", "sharpness")
RATES = ("local.lr", "server.lr", "meta.lr")  # a paper may choose them per mask
MOST_UNFOLDED = 6  # conclusions
DIFFERENCE = Style(INK, marker="D")


@dataclass(frozen=True)
class Pair:
    """A plain and a masked group, all else equal except perhaps the learning rates, and their comparison."""

    plain: Group
    masked: Group
    ambiguous: bool = False
    """whether another pair has the same common settings and the same mask"""
    scores: tuple[dict[int, float], ...] = ({}, {})
    """seed -> value of both groups, for the compared seeds: in a paired test the common ones"""
    unpaired: bool = False
    """whether a paired test leaves out seeds with a value in one group only"""
    gain: float = 0.0
    """improvement by the mask; negative if it is worse"""
    test: Comparison | None = None
    """None if a group has no finished run or no value"""
    corrected: float | None = None
    """p, corrected for the number of pairs"""

    @property
    def label(self) -> str:
        """Return what both groups share, their algorithm last; if ambiguous, what the masked group is."""
        key = self.masked.key
        if not self.ambiguous:
            key = {k: v for k, v in key.items() if self.plain.key.get(k) == v}
        config = self.masked.config
        return ", ".join([*words(key, config, taus=True), key.get("algorithm", config["algorithm"])])

    @property
    def mask(self) -> str:
        return pairing(self.masked.key, self.masked.config, taus=True, algorithm=False)


def rates(group: Group) -> list[Any]:
    return [group.config.get(name) for name in RATES]


def find_pairs(groups: Sequence[Group]) -> list[Pair]:
    """Return each masked group with the one plain group that differs in the mask alone, or else in the rates too."""

    def setting(group: Group) -> dict[str, Any]:
        return {k: v for k, v in essence(group.first).items() if k not in MASK + RATES}

    plain = [(group, setting(group)) for group in groups if group.first.mask == "mean"]
    found = []
    for group in groups:
        if group.first.mask == "mean":
            continue
        own = setting(group)
        alike = [other for other, its in plain if its == own]
        nearest = [other for other in alike if rates(other) == rates(group)] or alike
        if len(nearest) == 1:
            found.append(Pair(nearest[0], group))
    names = [(pair.label, pair.mask) for pair in found]
    return [replace(pair, ambiguous=names.count(name) > 1) for pair, name in zip(found, names, strict=True)]


def compare_pairs(groups: Sequence[Group], what: Measure) -> list[Pair]:
    """Return the pairs of groups, compared by a measure, with p values corrected for their number."""
    found = []
    for pair in find_pairs(groups):
        both = (pair.plain, pair.masked)
        sides = [{seed: v for seed, v in values(group, what).items() if v is not None} for group in both]
        done = all(any(run.done for run in group.runs) for group in both)
        test = compare(*sides) if done else None
        unpaired = sides[0].keys() ^ sides[1].keys() if test is not None and test.paired else set()
        scores = tuple({seed: v for seed, v in side.items() if seed not in unpaired} for side in sides)
        gain = 0.0 if test is None else test.difference * (1 if what.rises(pair.plain.first) else -1)
        found.append(replace(pair, scores=scores, unpaired=bool(unpaired), gain=gain, test=test))
    corrected = holm([None if one.test is None else one.test.p for one in found])
    return [replace(one, corrected=p) for one, p in zip(found, corrected, strict=True)]


# The table


def mask_table(groups: Sequence[Group], name: str = "best") -> Table:
    """Return the table of all pairs: both means, their difference with its interval, and the p values."""
    what = measure(name)
    compared = compare_pairs(groups, what)
    members = [group for one in compared for group in (one.plain, one.masked)]
    columns = ["setting", "mask", "AVG", "masked", "difference", "n", "p", "p (flips)", "p (Holm)"]
    notes = [*remarks(members, [what]), *test_remarks(compared)] if compared else []
    title = f"Plain averaging (AVG) and masked averaging: {column_title(what, members) if members else what.name}"
    return Table(title, columns, [row(one, what) for one in compared], notes, align="llrrrrrrr")


def row(one: Pair, what: Measure) -> list[Cell]:
    """Return the row of a pair, the better mean in bold."""
    plain = cell(one.plain, what, better=one.gain < 0, some=one.scores[0])
    masked = cell(one.masked, what, better=one.gain > 0, some=one.scores[1])
    test = one.test
    if test is None:
        return [one.label, one.mask, plain, masked, *[Missing()] * 5]
    ps = [Missing() if p is None else Probability(p) for p in (test.p, test.flips, one.corrected)]
    gap = Difference(test.difference, low=test.low, high=test.high, **form(one.masked, what))
    return [one.label, one.mask, plain, masked, gap, whole(test.count), *ps]


def test_remarks(compared: Sequence[Pair]) -> list[str]:
    """Return notes on the tests and on their limits."""
    tests = [one.test for one in compared if one.test is not None]
    sure = [one.gain for one in compared if one.test and significant(replace(one.test, p=one.corrected))]
    notes = [
        "Difference: masked - AVG, with its 95% interval. n: pairs of runs with the same seed. p: two-sided t test of "
        "the pairs; p (flips): exact sign-flip test; p (Holm): p corrected for the number of rows.",
        f"The mask has the better mean in {sum(one.gain > 0 for one in compared)} of {len(compared)} rows, the worse "
        f"in {sum(one.gain < 0 for one in compared)}; significantly better in {sum(gain > 0 for gain in sure)}, "
        f"significantly worse in {sum(gain < 0 for gain in sure)} (p (Holm) and p (flips) at most {ALPHA:g}).",
    ]
    few = sorted({(test.count, test.least) for test in tests if test.count >= LEAST and test.least > ALPHA})
    notes += [
        f"n = {count} is too few to conclude: an exact test cannot go below p = {least:g}, and a smaller p of the t "
        "test relies on normal differences."
        for count, least in few
    ]
    if any(test.count < LEAST for test in tests):
        notes.append(f"There is no test for n below {LEAST}.")
    if any(not test.paired for test in tests):
        notes.append("Without common seeds, p is that of Welch's test, and n the runs of the smaller group.")
    if any(one.unpaired for one in compared):
        notes.append("Seeds with a value on one side only are left out: means and difference are over common seeds.")
    if any(rates(one.plain) != rates(one.masked) for one in compared):
        notes.append("In some rows the learning rates differ, as each side has its own.")
    return notes


# The section


def masks(material: Material) -> list[Part]:
    """Return the pairs by the best value of each metric and by that of the last rounds: tables, conclusions, figure."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        groups = [one.group for one in placed]
        found = compare_pairs(groups, measure("best"))
        tested = [(one, one.test) for one in found if one.test is not None]
        if tested:
            what = f"best test {groups[0].metric}"
            texts = [conclusion(one, test, what, len(tested)) for one, test in tested]
            few = len(tested) <= MOST_UNFOLDED
            parts += [
                Named(f"masks-best{suffix}", mask_table(groups, "best")),
                texts if few else Fold(f"Conclusions for the {len(tested)} rows", [texts]),
                picture(tested, what, suffix),
                Named(f"masks-last10{suffix}", mask_table(groups, "last10")),
            ]
    return parts


def conclusion(one: Pair, test: Comparison, what: str, rows: int) -> str:
    """Return the difference of a pair's means and whether it may be chance, as a sentence."""
    percent = unit(one.plain.metric)[1] == 100
    size = f"{100 * abs(one.gain):.2f} points" if percent else f"{abs(one.gain):.4g}"
    way = f"{size} {'better' if one.gain > 0 else 'worse'} with the mask on average" if one.gain else "the same"
    text = verdict(replace(test, p=one.corrected))
    corrected = f", corrected for {rows} rows" if rows > 1 and f"at {ALPHA:g}" in text else ""
    return f"{one.label} + {one.mask} against mean: the {what} is {way}; {text}{corrected}."


def picture(tested: Sequence[tuple[Pair, Comparison]], what: str, suffix: str) -> Picture:
    """Return both sides of each pair with their seeds, and the differences."""
    label, factor = unit(tested[0][0].plain.metric)
    drawn = []
    for one, test in tested:
        marks = [
            mark("plain averaging", numbered_style(0, filled=False), list(one.scores[0].values()), factor),
            mark("with the mask", numbered_style(1), list(one.scores[1].values()), factor),
        ]
        low, high = (None if end is None else factor * end for end in (test.low, test.high))
        name = f"{one.label} + {one.mask}"
        drawn.append((Row(name, marks), Mark("", DIFFERENCE, factor * test.difference, low, high)))
    differences = "; ".join(f"{row.label}: {gap.value:+.3g}" for row, gap in drawn[:12])
    return Picture(
        f"masks{suffix}",
        f"Dot plot of the {what} with plain averaging and with a mask, and their differences. {differences}.",
        f"{capitalised(what)}: means, with a tick per compared seed. Difference: masked - plain, with its 95% interval "
        "by the t test for at least three seeds.",
        lambda: rows.draw_pairs(drawn, f"test {label}"),
    )

"""Results by group, and plain against masked averaging."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...measures import measure
from ...runs import Group
from ...stats import ALPHA, Comparison, verdict
from ..figures import rows
from ..figures.rows import Row
from ..figures.style import Picture, numbered_style
from ..page import Absent, Fold, Items, Named, Part, Section
from ..pairs import Compared, compare_pairs, find_pairs, mask_table
from ..results import runs_table, summary_table
from .material import Material, by_suffix, mark, unit

MOST_UNFOLDED = 6  # sentences


def summary(material: Material) -> Section:
    """Return the results of every group."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        groups = [one.group for one in placed]
        if any(run.series(run.score) for group in groups for run in group.runs):
            every = runs_table(groups)
            parts.append(Named(f"summary{suffix}", summary_table(groups)))
            parts.append(Fold(f"All {len(every.rows)} runs", [Named(f"runs{suffix}", every)]))
    return Section("results", "Results", parts or [Absent("No run has scored a round yet.")])


def masks(material: Material) -> Section:
    """Return the pairs that differ in the mask: tables, conclusions and a figure."""
    parts: list[Part] = []
    for suffix, placed in by_suffix(material.placed).items():
        parts += pair_parts([one.group for one in placed], suffix)
    nothing = Absent("No two groups of scored runs differ in the mask alone.")
    return Section("masks", "Plain and masked averaging", parts or [nothing])


def pair_parts(groups: Sequence[Group], suffix: str) -> list[Part]:
    """Return the pairs among groups that share a metric, by its best value and by that of the last rounds."""
    found = compare_pairs(find_pairs(groups), measure("best"))
    tested = [(one, one.test) for one in found if one.test is not None]
    if not tested:
        return []
    what = f"best test {groups[0].metric}"
    texts = Items([conclusion(one, test, what, len(tested)) for one, test in tested])
    return [
        Named(f"masks-best{suffix}", mask_table(groups, "best")),
        texts if len(tested) <= MOST_UNFOLDED else Fold(f"Conclusions for the {len(tested)} rows", [texts]),
        picture(tested, what, suffix),
        Named(f"masks-last10{suffix}", mask_table(groups, "last10")),
    ]


def conclusion(one: Compared, test: Comparison, what: str, rows: int) -> str:
    """Return the difference of a pair's means and whether it may be chance, as a sentence."""
    percent = unit(one.pair.plain.metric)[1] == 100
    size = f"{100 * abs(one.gain):.2f} points" if percent else f"{abs(one.gain):.4g}"
    way = f"{size} {'better' if one.gain > 0 else 'worse'} with the mask on average" if one.gain else "the same"
    text = verdict(replace(test, p=one.corrected))
    corrected = f", corrected for {rows} rows" if rows > 1 and f"at {ALPHA:g}" in text else ""
    return f"{one.pair.name} against mean: the {what} is {way}; {text}{corrected}."


def picture(tested: Sequence[tuple[Compared, Comparison]], what: str, suffix: str) -> Picture:
    """Return both sides of each pair with their seeds, and the differences."""
    label, factor = unit(tested[0][0].pair.plain.metric)
    drawn = []
    for one, test in tested:
        marks = [
            mark("plain averaging", numbered_style(0, filled=False), list(one.plain.values()), factor),
            mark("with the mask", numbered_style(1), list(one.masked.values()), factor),
        ]
        low, high = (None if end is None else factor * end for end in (test.low, test.high))
        drawn.append(rows.Pair(Row(one.pair.name, marks), factor * test.difference, low, high))
    differences = "; ".join(f"{one.row.label}: {one.difference:+.3g}" for one in drawn[:12])
    return Picture(
        f"masks{suffix}",
        f"Dot plot of the {what} with plain averaging and with a mask, and their differences. {differences}.",
        f"{what[:1].upper()}{what[1:]}: means, with a tick per compared seed. Difference: masked - plain, with its 95% "
        "interval by the t test for at least three seeds.",
        lambda: rows.draw_pairs(drawn, f"test {label}"),
    )

"""How well the runs did, and plain averaging beside a mask."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...measures import measure
from ...runs import Group
from ...stats import ALPHA, Comparison, verdict
from ..arms import Line, compare_pairs, mask_table, pairs
from ..figures import rows
from ..figures.rows import Row
from ..figures.style import COLOURS, Look, Picture
from ..page import Absent, Fold, Items, Named, Part, Section
from ..results import runs_table, summary_table
from .material import Material, apart, has_scores, mark, unit

PLAIN = Look(COLOURS[0], "solid", "o", filled=False)
MASKED = Look(COLOURS[1], "solid", "s", filled=True)
MOST_SAID = 6  # sentences that are not folded away


def summary(material: Material) -> Section:
    """How well every group did."""
    parts: list[Part] = []
    for ending, groups in apart(material):
        if has_scores(groups):
            every = runs_table(groups)
            parts.append(Named(f"summary{ending}", summary_table(groups)))
            parts.append(Fold(f"every run by itself ({len(every.rows)})", [Named(f"runs{ending}", every)]))
    nothing = Absent("No run has scored a round yet, so there is no result.")
    return Section("results", "Results", parts or [nothing])


def masks(material: Material) -> Section:
    """AVG beside GMA: what the pairs allow to say, a picture of them, and the tables."""
    parts: list[Part] = []
    for ending, groups in apart(material):
        parts += pair_parts(groups, ending)
    if not parts:
        parts.append(Absent("No two groups of scored runs differ in the mask alone, so there is nothing to compare."))
    return Section("masks", "Plain averaging beside masked averaging", parts)


def pair_parts(groups: Sequence[Group], ending: str) -> list[Part]:
    """The pairs among groups that share a metric, by their best test metric and by that of the last rounds."""
    lines = [line for line in compare_pairs(pairs(groups), measure("best")) if line.test is not None]
    if not lines:
        return []
    said = f"best test {groups[0].metric}"
    words = Items([sentence(line, line.test, said, len(lines)) for line in lines if line.test is not None])
    return [
        Named(f"masks-best{ending}", mask_table(groups, "best")),
        words if len(lines) <= MOST_SAID else Fold(f"What each of the {len(lines)} rows allows to say", [words]),
        picture(lines, said, ending),
        Named(f"masks-last10{ending}", mask_table(groups, "last10")),
    ]


def sentence(line: Line, test: Comparison, said: str, rows: int) -> str:
    """Which way the means of a pair differ, and whether that may be chance."""
    pair, factor = line.pair, unit(line.pair.plain.metric)[1]
    size = f"{100 * abs(line.gain):.2f} points" if factor == 100 else f"{abs(line.gain):.4g}"
    way = f"{size} {'better' if line.gain > 0 else 'worse'} with the mask in the mean" if line.gain else "the same"
    words = verdict(replace(test, p=line.corrected))
    corrected = f", corrected for {rows} rows" if rows > 1 and f"at {ALPHA:g}" in words else ""
    return f"{pair.name} against mean: the {said} is {way}; {words}{corrected}."


def picture(lines: Sequence[Line], said: str, ending: str) -> Picture:
    """Both arms of each pair with their seeds, and the differences."""
    label, factor = unit(lines[0].pair.plain.metric)
    drawn = []
    for line in lines:
        pair, test = line.pair, line.test
        assert test is not None, "only pairs that were compared are drawn"
        marks = [
            mark("plain averaging", PLAIN, list(line.plain.values()), factor),
            mark("with the mask", MASKED, list(line.masked.values()), factor),
        ]
        low, high = (None if end is None else factor * end for end in (test.low, test.high))
        drawn.append(rows.Pair(Row(pair.name, marks), factor * test.difference, low, high))
    differences = "; ".join(f"{one.row.label}: {one.difference:+.3g}" for one in drawn[:12])
    return Picture(
        f"masks{ending}",
        f"Dot plot of the {said} with plain averaging and with a mask, and their differences. {differences}.",
        f"{said[:1].upper()}{said[1:]}: means, and a stroke for each seed that was compared. The difference is masked "
        "less plain, with its 95% interval by the t test where there are at least three seeds.",
        lambda width: rows.draw_pairs(drawn, f"test {label}", width),
    )

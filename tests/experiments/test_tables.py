"""Tables of typed cells in every form, and the tables of a report with numbers by hand."""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from made_runs import made, records, seeds, write_run, write_sweep

from fedmpi.errors import UserError
from fedmpi.experiments.report.sections.clients import agreement_table
from fedmpi.experiments.report.sections.costs import bytes_table, cost_table
from fedmpi.experiments.report.sections.costs import seconds as seconds_of
from fedmpi.experiments.report.sections.masks import find_pairs, mask_table
from fedmpi.experiments.report.sections.published import published_table
from fedmpi.experiments.report.sections.results import reach_table, runs_table, summary_table
from fedmpi.experiments.report.sections.setup import config_tables
from fedmpi.experiments.runs import Run, find_runs, group, read_sweep_record
from fedmpi.experiments.tables import (
    FORMS,
    Cell,
    Difference,
    Interval,
    Missing,
    Number,
    Probability,
    Table,
    one_line,
    show,
    to_csv,
    to_latex,
    to_markdown,
)

OLD = Path(__file__).parents[1] / "old_runs"
NASTY = 'a_b & 50% {x} $y$ #1 ~^\\ <i> | "q" [z] *w* `c` --- \n end'

FLOATS = st.floats(-1e9, 1e9)
TEXTS = st.text(max_size=12)
NUMBERS = st.builds(
    Number, FLOATS, st.none() | st.floats(0, 1e6), st.integers(0, 6), st.booleans(), st.booleans(), TEXTS
)
ENDS = st.none() | FLOATS
GAPS = st.builds(Difference, FLOATS, digits=st.integers(0, 6), percent=st.booleans(), low=ENDS, high=ENDS)
CELLS: st.SearchStrategy[Cell] = (
    TEXTS
    | NUMBERS
    | GAPS
    | st.builds(Interval, FLOATS, FLOATS, st.integers(0, 6), st.booleans())
    | st.builds(Probability, st.floats(0, 1))
    | st.builds(Missing, TEXTS)
)


@st.composite
def tables(draw: Any) -> Table:
    """Any table."""
    width = draw(st.integers(1, 4))
    rows = draw(st.lists(st.lists(CELLS, min_size=width, max_size=width), max_size=4))
    columns = draw(st.lists(TEXTS, min_size=width, max_size=width))
    return Table(draw(TEXTS), columns, rows, draw(st.lists(TEXTS, max_size=2)))


def cells(table: Table, label: str) -> dict[str, str]:
    """A row by its first cell, as column -> text."""
    row = next(row for row in table.rows if show(row[0]) == label)
    return dict(zip(table.columns, map(show, row), strict=True))


def read_csv(table: Table) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(to_csv(table))))


# Cells


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        ("fedavg", "fedavg"),
        (Number(0.98604, 0.00116, 2, percent=True), "98.60 ± 0.12"),
        (Number(3, digits=0), "3"),
        (Number(0.25, digits=2, note="2 of 3"), "0.25 (2 of 3)"),
        (Number(-0.0001, 0.0, 2), "0.00 ± 0.00"),
        (Difference(0.0069, low=0.001, high=0.0128, digits=2, percent=True), "+0.69 (+0.10 to +1.28)"),
        (Difference(-0.5, digits=1), "-0.5"),
        (Difference(-0.0001, low=-0.2, high=0.2, digits=1), "+0.0 (-0.2 to +0.2)"),
        (Probability(0.0421), "0.042"),
        (Probability(0.00099), "< 0.001"),
        (Missing(), "-"),
        (Missing("never"), "never"),
    ],
)
def test_a_cell_is_shown_rounded(cell: Cell, text: str) -> None:
    assert show(cell) == text


# Forms

SMALL = Table(
    "Best of_all",
    ["runs", "AVG", "GMA", "difference", "p"],
    [
        [
            "fed_avg",
            Number(0.9, 0.01, 2, percent=True),
            Number(0.95, 0.02, 2, percent=True, better=True),
            Difference(0.05, low=0.01, high=0.09, digits=2, percent=True),
            Probability(0.04),
        ],
        ["fedprox", Number(0.5, None, 2, percent=True), Missing("never"), Missing(), Missing()],
    ],
    ["In percent, 50% & more."],
)


def test_markdown_by_hand() -> None:
    assert to_markdown(SMALL) == (
        "### Best of\\_all\n"
        "\n"
        "| runs | AVG | GMA | difference | p |\n"
        "| :--- | ---: | ---: | ---: | ---: |\n"
        "| fed\\_avg | 90.00 ± 1.00 | **95.00 ± 2.00** | +5.00 (+1.00 to +9.00) | 0.040 |\n"
        "| fedprox | 50.00 | never | - | - |\n"
        "\n"
        "In percent, 50% \\& more.\n"
    )


def test_latex_by_hand() -> None:
    assert to_latex(SMALL).splitlines() == [
        r"\begin{table}",
        r"  \centering",
        r"  \caption{Best of\_all}\smallskip",
        r"  \begin{tabular}{lrrrr}",
        r"    \toprule",
        r"    runs & AVG & GMA & difference & p \\",
        r"    \midrule",
        r"    fed\_avg & 90.00 $\pm$ 1.00 & \textbf{95.00 $\pm$ 2.00} & +5.00 (+1.00 to +9.00) & 0.040 \\",
        r"    fedprox & 50.00 & never & - & - \\",
        r"    \bottomrule",
        r"  \end{tabular}",
        r"  \par\smallskip{\footnotesize In percent, 50\% \& more.}",
        r"\end{table}",
    ]


def test_csv_has_raw_numbers_in_columns_of_their_own() -> None:
    assert to_csv(SMALL) == (
        "runs,AVG,AVG sd,GMA,GMA sd,GMA note,difference,difference low,difference high,p\n"
        "fed_avg,0.9,0.01,0.95,0.02,,0.05,0.01,0.09,0.04\n"
        "fedprox,0.5,,,,never,,,,\n"
    )


def test_an_interval_has_its_ends_in_columns_of_their_own() -> None:
    table = Table("t", ["a", "b"], [["x", Interval(0.49, 0.5125, 2, percent=True)], ["y", Missing()]])
    assert show(table.rows[0][1]) == "49.00 to 51.25"
    assert to_csv(table) == "a,b low,b high\nx,0.49,0.5125\ny,,\n"


def test_a_minus_is_one_in_latex_and_dashes_stay_hyphens() -> None:
    gap = Difference(-0.5, low=-0.7, high=-0.3, digits=1)
    text = to_latex(Table("-1 to -2", ["a"], [[gap], ["1e-05 a--b iid-10 -x"]]))
    assert r"\caption{$-$1 to $-$2}" in text and "$-$0.5 ($-$0.7 to $-$0.3)" in text
    assert r"1e-05 a-{}-b iid-10 -x \\" in text


@given(tables())
def test_csv_reads_back_to_the_same_numbers(table: Table) -> None:
    table = replace(table, columns=[f"c{i}" for i in range(len(table.columns))])
    rows = read_csv(table)
    assert len(rows) == len(table.rows)
    for row, cells in zip(rows, table.rows, strict=True):
        for i, cell in enumerate(cells):
            for suffix, name in ((" sd", "sd"), (" low", "low"), (" high", "high"), ("", "value")):
                number, text = getattr(cell, name, None), row.get(f"c{i}{suffix}", "")
                if number is not None:
                    assert float(text) == number
                else:
                    assert text == (one_line(cell) if isinstance(cell, str) and not suffix else "")


@given(tables())
@example(Table("", ["[a]"], [["[1mm]"], ["*"]]))
def test_latex_is_balanced_and_has_nothing_special_left(table: Table) -> None:
    text = to_latex(table)
    bare = re.sub(r"\\[\\{}$&#_%]", "", text)
    depth = 0
    for c in bare:
        depth += (c == "{") - (c == "}")
        assert depth >= 0
    assert depth == 0 and bare.count("$") % 2 == 0
    assert not set(re.sub(r"\$(\\pm|-)\$", "", bare)) & set('$#_%~^<>|"±')
    body = bare[bare.index(r"\toprule") : bare.index(r"\bottomrule")]
    assert body.count("&") == (len(table.columns) - 1) * (len(table.rows) + 1)
    assert not re.search(r"^\s*[\[*]", text, re.MULTILINE), "nothing behind a row is taken for its option"
    known = "begin end centering caption toprule midrule bottomrule par smallskip footnotesize textbf pm char textless"
    known += " textgreater textbar textbackslash textasciitilde textasciicircum dag ddag S P"
    assert set(re.findall(r"\\([a-zA-Z]+)", text.replace("\\\\", ""))) <= set(known.split())


@given(tables())
def test_markdown_has_a_line_for_each_row(table: Table) -> None:
    lines = to_markdown(table).split("\n")
    grid = [line for line in lines if line.startswith("| ")]
    assert len(grid) == len(table.rows) + 2
    for line in grid:
        assert len(re.findall(r"(?<!\\)(?:\\\\)*\|", line)) == len(table.columns) + 1


def test_whatever_is_text_stays_text_in_every_form() -> None:
    table = Table(NASTY, [NASTY, "b"], [[NASTY, Number(1.0)]], [NASTY])
    line = NASTY.replace("\n", " ")
    assert read_csv(table) == [{line: line, "b": "1.0"}] and set(FORMS) == {"md", "tex", "csv"}
    assert r"a\_b \& 50\% \{x\} \$y\$ \#1 \textasciitilde{}\textasciicircum{}\textbackslash{}" in to_latex(table)
    assert r"\<i\> \| " in to_markdown(table) and "\n end" not in to_markdown(table)


# How well runs did


def test_the_summary_has_means_and_deviations_by_hand() -> None:
    runs = [
        made([0.1, 0.5, 0.7], seed=0, mask="gma"),
        made([0.2, 0.9, 0.8], seed=1, mask="gma"),
        made([0.3, 0.3, 0.3], mask="mean"),
    ]
    table = summary_table(group(runs), ["best", "last10", "test_loss", "train_loss20", "rounds:0.6", "rounds:0.85"])
    gma = cells(table, "fedavg + gma")
    assert gma["seeds"] == "2" and gma["rounds"] == "3"
    assert gma["best accuracy"] == "80.00 ± 14.14", "0.7 and 0.9"
    assert gma["accuracy, last 10 rounds"] == "53.33 ± 14.14", "1.3 / 3 and 1.9 / 3"
    assert gma["final test loss"] == "0.2500 ± 0.0707"
    assert gma["training loss, last 20 rounds"] == "0.6111 ± 0.0000"
    assert gma["rounds to 60%"] == "2.5 ± 0.7" and gma["rounds to 85%"] == "2 (1 of 2)"
    mean = cells(table, "fedavg + mean")
    assert mean["best accuracy"] == "30.00" and mean["rounds to 60%"] == "never"
    assert "Accuracies in percent." in table.notes
    raw = read_csv(table)[0]
    assert float(raw["best accuracy"]) == 0.8 and float(raw["best accuracy sd"]) == pytest.approx(0.1 * 2**0.5)


def test_runs_that_are_not_done_have_no_part_in_a_mean() -> None:
    runs = [
        made([0.5, 0.6], seed=0, rounds=12),
        made([0.9], seed=1, done=False, rounds=12),
        made([0.1], mask="mean", done=False, rounds=12),
    ]
    table = summary_table(group(runs), ["best", "rounds:0.99"])
    assert cells(table, "fedavg + gma")["best accuracy"] == "60.00 (1 of 2)"
    assert cells(table, "fedavg + gma")["rounds"] == "1 (of 12)"
    assert cells(table, "fedavg + mean")["best accuracy"] == "10.00", "where there is nothing else, it is shown"
    assert cells(table, "fedavg + mean")["rounds to 99%"] == "not yet"
    assert "Not done: 2 runs, left out of the means unless no run of the group is done." in table.notes


def test_a_metric_that_falls_is_no_accuracy() -> None:
    table = summary_table(group([made([0.5, 0.25], metric="error", rises=False)]), ["best", "rounds:0.3"])
    row = cells(table, "fedavg + gma")
    assert row["best error"] == "0.2500" and row["rounds to 0.3"] == "2"
    assert "Less error is better." in table.notes and "Accuracies in percent." not in table.notes


def test_a_seed_that_was_run_twice_is_reported() -> None:
    table = summary_table(group([made([0.5], name="a"), made([0.5], name="b")]))
    assert "Left out as repeats of a seed: 1 run." in table.notes


def test_the_table_of_rounds_by_hand() -> None:
    runs = [made([0.1, 0.5, 0.7], seed=0), made([0.6, 0.6, 0.6], seed=1)]
    table = reach_table(group(runs), [0.5, 0.7, 0.9])
    assert cells(table, "fedavg + gma") == {
        "runs": "fedavg + gma",
        "seeds": "2",
        "rounds to 50%": "1.5 ± 0.7",
        "rounds to 70%": "3 (1 of 2)",
        "rounds to 90%": "never",
    }


def test_a_run_under_way_has_not_missed_a_value() -> None:
    late = made([0.1], seed=2, done=False, rounds=3)
    table = reach_table(group([made([0.1, 0.5, 0.7], seed=0), made([0.6] * 3, seed=1), late]), [0.5, 0.7])
    printed = cells(table, "fedavg + gma")
    assert (printed["rounds to 50%"], printed["rounds to 70%"]) == ("1.5 ± 0.7 (1 not done)", "3 (1 of 2, 1 not done)")
    alone = reach_table(group([replace(late, config=late.config | {"seed": seed}) for seed in (0, 1)]), [0.1, 0.7])
    assert [show(cell) for cell in alone.rows[0][2:]] == ["1.0 ± 0.0 (2 not done)", "not yet"]


# Plain and masked averaging


def both_sides(plain: list[float], masked: list[float], **knobs: Any) -> list[Run]:
    return [*seeds(plain, mask="mean", **knobs), *seeds(masked, mask="gma", **knobs)]


def test_avg_next_to_gma_by_hand() -> None:
    runs = both_sides([0.80, 0.82, 0.84], [0.81, 0.84, 0.87])
    runs += both_sides([0.9, 0.9, 0.9], [0.8, 0.9, 0.85], algorithm="fedprox")
    table = mask_table(group(runs))
    first, second = (dict(zip(table.columns, map(show, row), strict=True)) for row in table.rows)
    assert first == {
        "setting": "fedavg",
        "mask": "gma 0.4",
        "AVG": "82.00 ± 2.00",
        "masked": "84.00 ± 3.00",
        "difference": "+2.00 (-0.48 to +4.48)",  # 2 -+ 4.3027 / sqrt(3)
        "n": "3",
        "p": "0.074",
        "p (flips)": "0.250",
        "p (Holm)": "0.148",
    }
    assert second["setting"] == "fedprox" and second["difference"].startswith("-5.00 (")
    better = [[cell.better for cell in row[2:4] if isinstance(cell, Number)] for row in table.rows]
    assert better == [[False, True], [True, False]]
    assert r"\textbf{84.00 $\pm$ 3.00}" in to_latex(table) and r"\textbf{90.00 $\pm$ 0.00}" in to_latex(table)
    notes = " ".join(table.notes)
    assert "better mean in 1 of 2 rows, the worse in 1; significantly better in 0, significantly worse in 0" in notes
    assert "n = 3 is too few to conclude: an exact test cannot go below p = 0.25" in notes
    assert float(read_csv(table)[0]["difference"]) == pytest.approx(0.02)


def test_enough_seeds_may_be_significant_either_way() -> None:
    steps = [0.010, 0.012, 0.014, 0.011, 0.013, 0.012, 0.015]
    up = both_sides([0.8] * 7, [0.8 + step for step in steps])
    down = both_sides([0.8] * 7, [0.8 - step for step in steps], algorithm="fedprox")
    notes = " ".join(mask_table(group(up + down)).notes)
    assert "significantly better in 1, significantly worse in 1" in notes and "too few" not in notes


def test_fewer_rounds_and_a_smaller_error_are_better() -> None:
    table = mask_table(group([made([0.2, 0.9], mask="mean"), made([0.9, 0.9], mask="gma")]), "rounds:0.8")
    assert [show(cell) for cell in table.rows[0][2:5]] == ["2", "1", "-1.0"]
    assert isinstance(table.rows[0][3], Number) and table.rows[0][3].better
    falling = [made([value], metric="error", rises=False, mask=mask) for value, mask in ((0.3, "mean"), (0.2, "gma"))]
    table = mask_table(group(falling))
    assert [show(cell) for cell in table.rows[0][2:5]] == ["0.3000", "0.2000", "-0.1000"]
    assert isinstance(table.rows[0][3], Number) and table.rows[0][3].better


def test_pairs_differ_in_the_mask_alone_or_in_the_rates_too() -> None:
    def labels(*runs: Run) -> list[tuple[str, str, str]]:
        return [(pair.plain.label, pair.masked.label, pair.mask) for pair in find_pairs(group(list(runs)))]

    mean, gma = made([0.5], mask="mean"), made([0.5], mask="gma")
    assert labels(mean, gma) == [("fedavg + mean", "fedavg + gma", "gma 0.4")]
    assert labels(mean, made([0.5], mask="gma", clients=7)) == [], "another federation"
    assert labels(mean) == labels(gma) == labels() == []
    ablation = [made([0.5], mask="gma", tau=tau) for tau in (0.2, 0.8)] + [made([0.5], mask="and")]
    assert [mask for _, _, mask in labels(mean, *ablation)] == ["gma 0.2", "gma 0.8", "and 0.4"]
    slow, fast = (made([0.5], mask="mean", local__lr=lr) for lr in (0.01, 0.1))
    assert labels(slow, made([0.5], mask="gma", local__lr=0.1)) != [], "each arm may have rates of its own"
    same = find_pairs(group([slow, fast, made([0.5], mask="gma", local__lr=0.1)]))
    assert [(pair.plain.config["local.lr"], pair.masked.config["local.lr"]) for pair in same] == [(0.1, 0.1)]
    assert labels(slow, fast, made([0.5], mask="gma", local__lr=0.5)) == [], "which of the two is not to be guessed"


def test_no_two_pairs_have_the_same_row() -> None:
    def rows(*runs: Run) -> list[tuple[str, str]]:
        return [(str(row[0]), str(row[1])) for row in mask_table(group(list(runs))).rows]

    mean, other = made([0.5], mask="mean", local__lr=0.01), made([0.5], mask="gma", tau=0.8, local__lr=0.1)
    fast, slow = (made([0.5], mask="gma", local__lr=lr) for lr in (0.5, 0.1))
    printed = rows(mean, fast, slow, other)
    assert printed[:2] == [("local.lr 0.5, fedavg", "gma 0.4"), ("local.lr 0.1, fedavg", "gma 0.4")]
    assert printed[2] == ("fedavg", "gma 0.8"), "a mask of its own says enough"
    sharp = [made([0.5], mask="sand", sharpness=sharpness) for sharpness in (1.0, 9.0)]
    assert len(set(rows(made([0.5], mask="mean"), *sharp))) == 2


def test_pairs_with_other_seeds_or_other_rates_are_reported() -> None:
    uneven = mask_table(group(both_sides([0.5, 0.6, 0.7, 0.9], [0.6, 0.8, 0.9])))
    assert show(uneven.rows[0][4]).startswith("+16.67") and "over common seeds" in " ".join(uneven.notes)
    others = [made([value], mask="gma", seed=seed) for seed, value in ((7, 0.6), (8, 0.7), (9, 0.9))]
    apart = mask_table(group([*seeds([0.5, 0.6, 0.65], mask="mean"), *others]))
    assert "Welch's test" in " ".join(apart.notes) and show(apart.rows[0][7]) == "-"
    rates = mask_table(group([made([0.5], mask="mean", local__lr=0.1), made([0.6], mask="gma", local__lr=0.2)]))
    assert "the learning rates differ" in " ".join(rates.notes)
    assert "There is no test for n below 3." in rates.notes


def test_the_means_are_those_of_the_seeds_that_are_compared() -> None:
    runs = both_sides([0.95, 0.93, 0.6], [0.90, 0.88], rounds=11)
    table = mask_table(group([*runs, made([0.99], mask="gma", seed=2, done=False)]))
    assert [show(cell) for cell in table.rows[0][2:6]] == [
        "94.00 ± 1.41 (2 of 3)",
        "89.00 ± 1.41 (2 of 3)",
        "-5.00",
        "2",
    ]
    plain_cell, masked_cell = table.rows[0][2:4]
    assert isinstance(plain_cell, Number) and isinstance(masked_cell, Number)
    assert plain_cell.better and plain_cell.value > masked_cell.value, "what is in bold is the larger mean"
    assert "means and difference are over common seeds" in " ".join(table.notes)


def test_seeds_that_neither_arm_has_finished_are_not_called_uneven() -> None:
    runs = both_sides([0.5, 0.6], [0.6, 0.7], rounds=11)
    halfway = made([0.9], mask="gma", seed=2, done=False)
    assert "common seeds" not in " ".join(mask_table(group([*runs, halfway])).notes)
    assert "common seeds" in " ".join(mask_table(group([*runs, replace(halfway, finished={"rounds": 1})])).notes)


def test_arms_that_are_not_done_are_shown_and_not_tested() -> None:
    plain = [made([0.5], mask="mean", seed=seed, done=False) for seed in range(3)]
    masked = [made([0.6], mask="gma", seed=seed, rounds=11) for seed in range(3)]
    table = mask_table(group(plain + masked))
    assert [show(cell) for cell in table.rows[0][2:]] == ["50.00 ± 0.00", "60.00 ± 0.00", "-", "-", "-", "-", "-"]


def test_without_a_pair_the_table_is_empty_in_every_form() -> None:
    table = mask_table(group([made([0.5])]))
    assert table.rows == [] and all(form(table) for form in FORMS.values())


@given(st.permutations(range(8)))
def test_the_order_of_the_seeds_changes_no_table(order: list[int]) -> None:
    runs = both_sides([0.80, 0.82, 0.84, 0.81], [0.81, 0.84, 0.87, 0.8])
    ordered, shuffled = group(runs), group([runs[i] for i in order])
    shuffled.sort(key=lambda one: one.label, reverse=True)
    for build in (summary_table, mask_table, cost_table):
        assert to_csv(build(shuffled)) == to_csv(build(ordered))


# Published and measured


SWEEP: dict[str, Any] = {"axes": {"algorithm": [], "mask": [], "clients": []}, "runs": {}}


def a_paper(rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"source": "A paper, table 2", "measure": "best", "columns": "mask", "rows": rows} | more


def swept(scores: dict[tuple[str, str], list[float]]) -> list[Run]:
    return [
        made(
            [score],
            labels={"algorithm": algorithm, "mask": mask, "clients": "10"},
            seed=seed,
            mask=mask,
            algorithm=algorithm,
        )
        for (algorithm, mask), finals in scores.items()
        for seed, score in enumerate(finals)
    ]


def test_published_next_to_measured_by_hand() -> None:
    runs = swept({("fedavg", "mean"): [0.85, 0.87], ("fedavg", "gma"): [0.88], ("fedprox", "mean"): [0.7]})
    rows = [
        {"clients": 10, "algorithm": "fedavg", "mean": 85.58, "gma": 86.27},
        {"clients": 10, "algorithm": "fedprox", "mean": "diverged", "gma": 85.78},
    ]
    table = published_table(group(runs), a_paper(rows), SWEEP)
    assert table is not None and table.sides == "llrrrrrr"
    assert [list(map(show, row)) for row in table.rows] == [
        ["10", "fedavg", "85.58", "86.00 ± 1.41", "+0.42", "86.27", "88.00", "+1.73"],
        ["10", "fedprox", "diverged", "70.00", "-", "85.78", "-", "-"],
    ]
    assert table.columns[:5] == ["clients", "algorithm", "mean published", "mean measured", "mean difference"]
    assert "Published: A paper, table 2." in table.notes
    raw, second = read_csv(table)
    assert raw["mean published"] == "0.8558" and float(raw["mean difference"]) == pytest.approx(0.0042)
    assert (raw["gma published"], second["gma published"]) == ("0.8627", "0.8578"), "one unit, measured or not"


def test_published_rounds_are_no_percents() -> None:
    runs = swept({("fedavg", "mean"): [0.85, 0.87]})
    table = published_table(group(runs), a_paper([{"algorithm": "fedavg", "mean": 68}], measure="rounds:0.8"), SWEEP)
    assert table is not None and list(map(show, table.rows[0])) == ["fedavg", "68.0", "1.0 ± 0.0", "-67.0"]


def test_what_is_not_chosen_yet_is_not_compared() -> None:
    runs = [
        made([0.5], labels={"mask": "mean", "local.lr": lr}, mask="mean", local__lr=float(lr)) for lr in ("0.1", "1.0")
    ]
    sweep: dict[str, Any] = {"axes": {"mask": [], "local.lr": []}, "runs": {}}
    table = published_table(group(runs), {"columns": "mask", "rows": [{"mean": 50}]}, sweep)
    assert table is not None and list(map(show, table.rows[0])) == ["50.00", "several", "-"]
    table = published_table(group(runs), {"columns": "mask", "rows": [{"local.lr": 1.0, "mean": 50}]}, sweep)
    assert table is not None and list(map(show, table.rows[0])) == ["1.0", "50.00", "50.00", "+0.00"]


def test_a_figure_without_numbers_has_no_table() -> None:
    groups = group(swept({("fedavg", "mean"): [0.5]}))
    assert published_table(groups, {}, SWEEP) is None
    assert published_table(groups, a_paper([]), SWEEP) is None
    assert published_table(groups, a_paper([{"mean": 1}], measure="curve"), SWEEP) is None
    with pytest.raises(UserError, match="unknown measure 'worst'"):
        published_table(groups, a_paper([{"mean": 1}], measure="worst"), SWEEP)


def test_a_sweep_on_disk_comes_to_its_published_table(tmp_path: Path) -> None:
    names = {f"{mask}-{seed}": {"mask": mask, "seed": str(seed)} for mask in ("mean", "gma") for seed in (0, 1)}
    published = {"source": "x", "columns": "mask", "rows": [{"mean": 50.0, "gma": 60.0}]}
    sweep = write_sweep(tmp_path / "sweep", names, published=published)
    for name, labels in names.items():
        score = 0.5 + 0.1 * (labels["mask"] == "gma") + 0.01 * int(labels["seed"])
        write_run(sweep / name, records([score]), mask=labels["mask"], seed=int(labels["seed"]))
    record = read_sweep_record(sweep)
    assert record["published"] == [published], "one table, as the first version wrote it"
    table = published_table(group(find_runs([sweep])), *record["published"], record)
    assert table is not None
    assert list(map(show, table.rows[0])) == ["50.00", "50.50 ± 0.71", "+0.50", "60.00", "60.50 ± 0.71", "+0.50"]


# Costs, agreement, configuration


def test_costs_by_hand() -> None:
    runs = [made([0.5, 0.6], seed=seed) for seed in (0, 1)]
    for run, local in zip(runs, (1.0, 3.0), strict=True):
        for record in run.records:
            record |= {"seconds": {"eval": 0.5, "local": local}, "bytes_sent": 1_500_000, "agreement": 0.25}
            record |= {"clients": 4, "client_bytes_up": int(2e6 * local), "client_bytes_down": 1_000_000}
    table = cost_table(group(runs))
    assert cells(table, "fedavg + gma") == {
        "runs": "fedavg + gma",
        "seeds": "2",
        "local s": "4.0 ± 2.8",
        "eval s": "1.0 ± 0.0",
        "all s": "5.0 ± 2.8",
        "s per round": "2.500 ± 1.414",
        "MB sent": "3.0 ± 0.0",
    }
    assert cells(bytes_table(group(runs)), "fedavg + gma") == {
        "runs": "fedavg + gma",
        "seeds": "2",
        "client up": "1.0000 ± 0.7071",
        "client down": "0.2500 ± 0.0000",
        "all up": "8.00 ± 5.66",
        "all down": "2.00 ± 0.00",
        "ranks sent": "3.00 ± 0.00",
    }
    del runs[0].records[0]["client_bytes_up"]  # of a version that did not count it: the total is not known
    assert cells(bytes_table(group(runs)), "fedavg + gma")["all up"] == "12.00"
    agreement = cells(agreement_table(group(runs)), "fedavg + gma")
    assert (agreement["agreement"], agreement["below tau"]) == ("0.250 ± 0.000", "-")


def test_costs_and_agreement_leave_out_what_is_not_done() -> None:
    runs = [made([0.5] * 4, seed=0), made([0.5] * 4, seed=1), made([0.5], seed=2, done=False, rounds=4)]
    for run, local in zip(runs, (1.0, 3.0, 99.0), strict=True):
        for record in run.records:
            record |= {"seconds": {"local": local}, "bytes_sent": 1_000_000, "agreement": local / 100}
    groups = group(runs)
    printed = cells(cost_table(groups), "fedavg + gma")
    assert (printed["seeds"], printed["local s"], printed["s per round"]) == ("2 (of 3)", "8.0 ± 5.7", "2.000 ± 1.414")
    assert printed["MB sent"] == "4.0 ± 0.0"
    older = cells(bytes_table(groups), "fedavg + gma")
    assert {older[name] for name in older if " up" in name or " down" in name} == {"-"}
    assert cells(agreement_table(groups), "fedavg + gma")["agreement"] == "0.020 ± 0.014"
    assert seconds_of(groups[0]) == {"local": 2.0}, "in the picture too"
    for table in (cost_table(groups), agreement_table(groups)):
        assert "Not done: 1 run, left out of the means unless no run of the group is done." in table.notes


def test_the_configuration_has_what_differs_and_what_is_shared() -> None:
    runs = [made([0.5], seed=0, local__lr=0.1, out="a"), made([0.5], seed=1, local__lr=0.2, out="b")]
    differing, common = config_tables(group(runs))
    assert list(differing.columns) == ["runs", "local.lr"]
    names = [f"local.lr {rate}, fedavg + gma" for rate in (0.1, 0.2)]
    assert [list(map(show, row)) for row in differing.rows] == [[names[0], "0.1"], [names[1], "0.2"]]
    shared = {show(row[0]): tuple(map(show, row[1:])) for row in common.rows}
    assert shared["local.batch"] == ("32", "32") and shared["tau"] == ("0.4", "null")
    assert not {"seed", "out", "local.lr"} & shared.keys()
    assert [table.rows for table in config_tables([])] == [[], []]


def test_runs_of_every_version_come_to_every_table() -> None:
    groups = group(find_runs([OLD]))
    built = [summary_table(groups), mask_table(groups), reach_table(groups, [0.2]), cost_table(groups)]
    for table in [*built, agreement_table(groups), *config_tables(groups)]:
        assert table.rows and all(form(table) for form in FORMS.values())
    (row,) = mask_table(groups).rows
    assert [show(cell) for cell in row[:2]] == ["fedavg", "gma 0.4"]
    best = max(groups[0].runs[0].series("test_accuracy").values())
    assert isinstance(row[3], Number) and (row[3].value, row[3].note) == (best, "1 of 6"), "AVG has one seed"


def test_every_run_by_itself() -> None:
    runs = [made([0.2, 0.1 * seed + 0.3], mask=mask, seed=seed) for mask in ("mean", "gma") for seed in (1, 0)]
    table = runs_table(group(runs))
    raw = list(csv.DictReader(io.StringIO(to_csv(table))))
    assert [(row["mask"], row["seed"]) for row in raw] == [("mean", "0"), ("mean", "1"), ("gma", "0"), ("gma", "1")]
    assert [float(row["best accuracy"]) for row in raw] == pytest.approx([0.3, 0.4, 0.3, 0.4])
    assert [row["rounds"] for row in raw] == ["2"] * 4

"""The report: what it makes of real runs, of runs by hand whose numbers are known, and of what is missing or broken."""

from __future__ import annotations

import base64
import json
import re
import shutil
import stat
import warnings
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_runs import made
from matplotlib.text import Text
from PIL import Image
from reported import LAYERS, a_round, measured, write_run, write_sweep
from shell import sandbox, settings_of, train

from fedmpi.commands import main
from fedmpi.errors import FileError, UserError
from fedmpi.experiments.report import command, output
from fedmpi.experiments.report.command import SECTIONS, ReportOptions, chosen_cells, contents, gather, targets
from fedmpi.experiments.report.figures import rows, style
from fedmpi.experiments.report.figures.style import MOST_STYLES, Picture, Style, assign_styles, render
from fedmpi.experiments.report.layout import MOST_LINES, Placed, place
from fedmpi.experiments.report.page import Absent, Code, Fold, Named, Part, Section, make_page
from fedmpi.experiments.report.sections import costs
from fedmpi.experiments.report.sections import learning as curves
from fedmpi.experiments.report.sections.clients import layer_map
from fedmpi.experiments.report.sections.material import Material, Plot, line, smoothed, summed
from fedmpi.experiments.report.sections.results import automatic
from fedmpi.experiments.runs import Run, find_runs, group, read_sweep_record
from fedmpi.experiments.tables import show
from fedmpi.runs.config import Skew

OLD = Path(__file__).parents[1] / "old_runs"
MASKS: dict[str, dict[str, Any]] = {"mean": {"mask": "mean"}, "gma": {"mask": "gma"}}


class Reader(HTMLParser):
    """What stands in a page: tags with their attributes, ids, headings, and all text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


def read(out: Path) -> Reader:
    """The page of a report."""
    return Reader((out / "index.html").read_text(encoding="utf-8"))


def rising(labels_of: dict[str, str], seed: int) -> list[dict[str, Any]]:
    """Ten rounds with everything measured; the mask adds 0.05, a seed 0.01."""
    plus = 0.05 * (labels_of.get("mask") == "gma") + 0.01 * seed
    return [measured(n, 0.3 + 0.04 * n + plus, seed) for n in range(1, 11)]


def material_of(*paths: Path, **more: Any) -> Material:
    """What sections are made from."""
    runs = find_runs(list(paths))
    sweep = read_sweep_record(paths[0]) if (paths[0] / "sweep.json").exists() else {}
    return Material(runs, place(group(runs)), sweep, **more)


def section_of(name: str, material: Material) -> Section:
    """Return one section of the page."""
    title, make, missing = next(row for row in SECTIONS if row[1].__name__ == name)
    return Section(name, title, make(material) or [Absent(missing)])


def pictures(section: Section) -> dict[str, Picture]:
    return {part.name: part for part in section.parts if isinstance(part, Picture)}


def tables(section: Section) -> dict[str, Named]:
    return {part.name: part for part in section.parts if isinstance(part, Named)}


def absent(section: Section) -> str:
    return " ".join(part for part in section.parts if isinstance(part, Absent))


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """A sweep by hand: two masks, three seeds."""
    return write_sweep(tmp_path / "two", {"mask": MASKS}, 3, rising)


@pytest.fixture
def few(tmp_path: Path) -> Path:
    """The least that has a pair: two masks, one seed, nothing else measured."""
    return write_sweep(tmp_path / "few", {"mask": MASKS}, 1, lambda labels_of, seed: [a_round(1, 0.5), a_round(2, 0.6)])


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """Real runs of two masks and three seeds with everything measured, and their report."""
    home = tmp_path_factory.mktemp("runs") / "real"
    names = {}
    with sandbox():
        for mask in ("mean", "gma"):
            for seed in range(3):
                out = home / f"{mask}-{seed}"
                asked = "clients,agreement,gap,membership"
                train(settings_of(out, mask=mask, tau=0.4, seed=seed, split="classes", rounds=4, evaluate=asked))
                names[out.name] = {"mask": mask, "seed": str(seed)}
        rows = [{"mean": 90.0, "gma": 91.5}]
        said = {"source": "nobody", "measure": "best", "columns": "mask", "rows": rows}
        record = {"name": "real", "about": "tiny", "axes": {"mask": ["mean", "gma"]}, "runs": names}
        (home / "sweep.json").write_text(json.dumps(record | {"reach": [0.5], "published": said}))
        assert main(["report", str(home), "--out", str(home.parent / "report")]) == 0
        yield home, home.parent / "report"


# The whole report


def test_real_runs_fill_every_section(real: tuple[Path, Path]) -> None:
    reader = read(real[1])
    ids = {attributes["id"] for attributes in reader.all("section")}
    expected = (
        "results learning masks published reach agreement clients gap membership further labels costs configuration"
    )
    assert ids == {*expected.split(), "source"}
    assert "6 runs in 2 groups, 6 done" in reader.text and "real" in reader.text


def test_every_picture_and_table_is_a_file_too(real: tuple[Path, Path]) -> None:
    out, reader = real[1], read(real[1])
    names = [str(attributes["id"]) for attributes in reader.all("figure") if "id" in attributes]
    stems = sorted(name.removeprefix("figure-") for name in names)
    assert stems == sorted({path.stem for path in (out / "figures").iterdir()}) and len(stems) >= 12
    for stem in stems:
        picture = np.asarray(Image.open(out / "figures" / f"{stem}.png").convert("L"))
        assert picture.std() > 5, f"{stem} is blank"
        root = xml.fromstring((out / "figures" / f"{stem}.svg").read_text())
        assert root.tag.endswith("svg") and len(list(root.iter())) > 20
    shown = {str(a["id"]).removeprefix("table-") for a in reader.all("figcaption") if "id" in a}
    written = {path.name for path in (out / "tables").iterdir()}
    assert written == {f"{name}.{kind}" for name in shown for kind in ("csv", "md", "tex")}


def test_the_page_is_self_contained(real: tuple[Path, Path]) -> None:
    text = (real[1] / "index.html").read_text()
    outer = re.sub(r"data:image/svg\+xml;base64,[\w+/=]+", "data:", text)
    assert not re.search(r"https?:|//\w|<script|<link|@import|url\(|javascript:| on\w+=", outer)
    for encoded in re.findall(r"data:image/svg\+xml;base64,([\w+/=]+)", text):
        svg = base64.b64decode(encoded).decode()
        addresses = re.findall(r'(?:href|src)="([^#"][^"]{0,20})', svg)
        assert all(address.startswith("data:image/png") for address in addresses)
        assert "<script" not in svg and not re.search(r"url\((?!#)", svg)


def test_the_page_is_sound_and_can_be_read_aloud(real: tuple[Path, Path]) -> None:
    reader = read(real[1])
    assert reader.open == [] and reader.all("html") == [{"lang": "en"}]
    ids = [attributes["id"] for _, attributes in reader.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [str(attributes["href"])[1:] for attributes in reader.all("a")]
    assert links and set(links) <= set(ids)
    levels = [int(name[1]) for name, _ in reader.tags if re.fullmatch("h[1-6]", name)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(levels, levels[1:], strict=False))
    assert all(len(str(attributes["alt"])) > 30 for attributes in reader.all("img"))
    named = [str(a["aria-labelledby"]) for _, a in reader.tags if "aria-labelledby" in a]
    assert set(named) <= set(ids)


def test_equal_runs_give_equal_bytes(real: tuple[Path, Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    with pytest.MonkeyPatch.context() as patch, matplotlib.rc_context({"font.size": 31, "axes.grid": True}):
        patch.chdir(tmp_path)
        assert main(["report", str(real[0]), "--out", "again"]) == 0
        assert matplotlib.rcParams["font.size"] == 31, "the user's settings are left alone"
    first = {path.relative_to(real[1]): path.read_bytes() for path in real[1].rglob("*.*") if path.name != "index.html"}
    assert first == {p.relative_to(again): p.read_bytes() for p in again.rglob("*.*") if p.name != "index.html"}
    one, other = ((out / "index.html").read_text() for out in (real[1], again))
    assert one.replace(str(real[1]), "again") == other  # the command names the folder


def test_the_command_can_be_repeated_from_the_page(real: tuple[Path, Path]) -> None:
    assert f"fedmpi report {real[0]} --out {real[1]}" in read(real[1]).text


def test_the_folder_is_private(real: tuple[Path, Path]) -> None:
    for folder in (real[1], real[1] / "figures", real[1] / "tables"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_pictures_can_be_pdf_or_left_out(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert main(["report", str(few), "--out", str(out), "--formats", "pdf"]) == 0
    kept = sorted((out / "figures").iterdir())
    assert {path.suffix for path in kept} == {".pdf"} and kept[0].read_bytes().startswith(b"%PDF")
    assert main(["report", str(few), "--out", str(out), "--formats", "none"]) == 0
    assert list((out / "figures").iterdir()) == [] and "figure-accuracy-rounds" in (out / "index.html").read_text()


# Whose folder it is


def test_a_report_replaces_an_earlier_one(few: Path, tmp_path: Path) -> None:
    out, alone = tmp_path / "report", next(few.glob("gma*"))
    assert main(["report", str(few), "--out", str(out), "--formats", "svg"]) == 0
    assert (out / "figures" / "masks.svg").exists()
    assert main(["report", str(alone), "--out", str(out), "--formats", "svg", "--title", "alone"]) == 0
    assert not (out / "figures" / "masks.svg").exists() and "<h1>alone</h1>" in (out / "index.html").read_text()
    listed = set(json.loads((out / "report.json").read_text())["files"])
    assert {p.relative_to(out).as_posix() for p in out.rglob("*.*")} == listed | {"report.json"}


@pytest.mark.parametrize("name", ["notes.txt", "figures/mine.png", "index.html", "tables"])
def test_a_folder_with_other_files_is_refused(
    name: str, few: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "report"
    (out / name).parent.mkdir(parents=True)
    (out / name).write_text("mine")
    assert main(["report", str(few), "--out", str(out)]) == 2
    assert f"holds '{name}', which is no part of a report" in capsys.readouterr().err
    assert [path for path in out.rglob("*") if path.is_file()] == [out / name]


def test_a_file_among_those_of_a_report_is_left_alone(few: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert main(["report", str(few), "--out", str(out), "--formats", "none"]) == 0
    (out / "figures" / "mine.png").write_text("mine")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    assert main(["report", str(few), "--out", str(out)]) == 2
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_links_are_not_followed(few: Path, tmp_path: Path) -> None:
    out, elsewhere = tmp_path / "report", tmp_path / "elsewhere"
    elsewhere.mkdir()
    out.mkdir()
    (out / "figures").symlink_to(elsewhere)
    assert main(["report", str(few), "--out", str(out)]) == 2
    assert list(elsewhere.iterdir()) == []


def test_a_report_that_was_cut_short_is_written_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, put = tmp_path / "report", output.write
    output.write_report(out, {"index.html": b"old", "figures/gone.png": b"old"})

    def dies(path: Path, content: bytes) -> None:
        if path.name == "index.html":
            output.aside_of(path).write_bytes(content[:1])
            raise KeyboardInterrupt
        put(path, content)

    monkeypatch.setattr(output, "write", dies)
    with pytest.raises(KeyboardInterrupt):
        output.write_report(out, {"index.html": b"new", "tables/new.csv": b"new"})
    monkeypatch.setattr(output, "write", put)
    assert (out / "index.html").read_bytes() == b"old"
    output.check_output(out)
    output.write_report(out, {"index.html": b"newest"})
    assert {path.name for path in out.rglob("*") if path.is_file()} == {"index.html", "report.json"}


# What is asked for


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "report was given no run"),
        (["nowhere"], "'nowhere' is no run folder"),
        (["RUNS", "--formats", "gif"], "unknown format (--formats) 'gif'; known: none, pdf, png, svg"),
        (["RUNS", "--formats", "pn"], "did you mean 'png'?"),
        (["RUNS", "--reach", "0"], "--reach is 0; it must be in [0.0001, 1000000)"),
        (["RUNS", "--reach", "80"], "--reach is 80; an accuracy is at most 1: write 0.8 for 80%"),
        (["RUNS", "--reach", "nan"], "--reach is nan; it must be in [0.0001, 1000000)"),
        (["RUNS", "--smooth", "0"], "--smooth is 0; it must be in [1, 100000]"),
        (["RUNS", "--smoth", "2"], "unknown option '--smoth'; did you mean '--smooth'?"),
        (["RUNS", "--out", "RUNS"], "holds '"),
    ],
)
def test_mistakes_are_one_error_message(
    words: list[str],
    message: str,
    two: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main(["report", *(str(two) if word == "RUNS" else word for word in words)]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and "Traceback" not in said
    assert sorted(tmp_path.rglob("*")) == before


def test_percents_in_the_record_of_a_sweep_are_refused_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_sweep(tmp_path / "two", {"mask": MASKS}, 1, rising, reach=[0.5, 70])
    assert main(["report", str(home), "--out", str(tmp_path / "report"), "--formats", "none"]) == 2
    assert capsys.readouterr().err == (
        "fedmpi: reach in sweep.json is 70; an accuracy is at most 1: write 0.7 for 70%\n"
    )


def test_values_above_one_are_for_metrics_that_go_there(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "own", [a_round(1, 90.0, "mae"), a_round(2, 70.0, "mae")], rises=False)
    write_run(tmp_path / "runs" / "usual", [a_round(1, 0.5), a_round(2, 0.6)], mask="mean")
    runs = find_runs([tmp_path / "runs"])
    assert targets(ReportOptions(reach=[80.0]), {}, runs) == [80.0]
    section = section_of("reach", material_of(tmp_path / "runs", reach=[80.0, 0.6]))
    columns = {name: list(part.table.columns[2:]) for name, part in tables(section).items()}
    assert columns == {"reach-mae": ["rounds to 80", "rounds to 0.6"], "reach-accuracy": ["rounds to 60%"]}


def test_an_out_that_is_a_file_or_cannot_be_made_is_refused(
    two: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(two), "--out", str(tmp_path / "file")]) == 2
    assert "cannot be read (Not a directory); choose another folder" in capsys.readouterr().err
    assert main(["report", str(two), "--out", str(tmp_path / "file" / "report")]) == 2
    assert "choose" in capsys.readouterr().err


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["report", "--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and all(f"--{name}" in said for name in ("out", "title", "reach", "smooth", "formats"))


# Whatever runs there are


def report_of(tmp_path: Path, *folders: Path, options: tuple[str, ...] = ()) -> Reader:
    """The page about some folders."""
    out = tmp_path / "page"
    assert main(["report", *map(str, folders), "--out", str(out), "--formats", "none", *options]) == 0
    return read(out)


def test_one_run_is_enough(tmp_path: Path) -> None:
    reader = report_of(tmp_path, write_run(tmp_path / "run", [a_round(n, 0.1 * n) for n in (1, 2, 3)]))
    assert "1 run in 1 group, 1 done" in reader.text and "one seed each" in reader.text
    assert "differ in the mask alone" in reader.text and "There is one run." in reader.text
    assert "train with --evaluate agreement" in reader.text and "train with --evaluate clients" in reader.text


def test_a_run_without_rounds_is_reported(tmp_path: Path) -> None:
    reader = report_of(tmp_path, write_run(tmp_path / "run", [], done=False, rounds=5))
    assert "No run has scored a round yet" in reader.text and "No run has finished a round yet" in reader.text
    assert "Not done: 1 of 1 run (" in reader.text
    assert len(reader.all("img")) == 1  # who has which labels is known from the start


def test_a_run_under_way_has_no_part_in_the_mean_of_others(tmp_path: Path) -> None:
    full = [a_round(n, 0.5) for n in range(1, 6)]
    write_run(tmp_path / "runs" / "a", full, seed=0)
    write_run(tmp_path / "runs" / "b", [a_round(1, 0.1)], done=False, seed=1, rounds=5)
    material = material_of(tmp_path / "runs")
    picture = pictures(section_of("learning", material))["accuracy-rounds"]
    assert "ends at 50" in picture.alt and "one seed each" in picture.caption
    assert "Not done: 1 of 2 runs (" in report_of(tmp_path, tmp_path / "runs").text


def test_a_run_alone_and_unfinished_is_shown_as_far_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [a_round(1, 0.1), a_round(2, 0.2)], done=False, rounds=9)
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"round": 3, "clie')
    assert "ends at 20" in pictures(section_of("learning", material_of(folder)))["accuracy-rounds"].alt
    assert "1 run in 1 group, 0 done" in report_of(tmp_path, folder).text


def test_runs_with_nothing_but_config_and_metrics_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [a_round(1, 0.5)])
    for name in ("partition.json", "environment.json", "finished.json", "starts.jsonl"):
        (folder / name).unlink()
    assert "No run has a partition.json" in report_of(tmp_path, folder).text


def test_different_metrics_share_no_scale(tmp_path: Path) -> None:
    write_run(tmp_path / "runs" / "a", [a_round(n, 0.2 * n) for n in (1, 2, 3)])
    error = [a_round(n, 4.0 - n, "mae") for n in (1, 2, 3)]
    write_run(tmp_path / "runs" / "b", error, rises=False, algorithm="fedprox")
    material = material_of(tmp_path / "runs")
    drawn = pictures(section_of("learning", material))
    assert {"accuracy-rounds", "mae-rounds", "test-loss-accuracy", "test-loss-mae"} <= drawn.keys()
    assert "ends at 60" in drawn["accuracy-rounds"].alt and "ends at 1." in drawn["mae-rounds"].alt
    assert tables(section_of("results", material)).keys() == {"summary-accuracy", "summary-mae"}
    assert "Less mae is better." in report_of(tmp_path, tmp_path / "runs").text


def test_values_that_are_not_finite_are_left_out(tmp_path: Path) -> None:
    rounds = [a_round(1, 0.3), a_round(2, 0.2, train_loss=float("nan"), test_loss=float("inf")), a_round(3, None)]
    material = material_of(write_run(tmp_path / "run", rounds))
    drawn = pictures(section_of("learning", material))
    assert "ends at 20" in drawn["accuracy-rounds"].alt and "ends at 1." in drawn["test-loss"].alt


def test_a_loss_that_explodes_is_drawn_on_a_logarithmic_scale(tmp_path: Path) -> None:
    rounds = [a_round(n, 0.1, test_loss=10.0**n) for n in range(1, 9)]
    picture = pictures(section_of("learning", material_of(write_run(tmp_path / "run", rounds))))["test-loss"]
    assert picture.draw().axes[0].get_yscale() == "log"


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    evil = '<img src=x onerror=alert(1)>"&$x_1^{$'
    labels_of = {evil: {"mask": "mean"}, "_hidden": {"mask": "gma"}, "名前": {"algorithm": "fedprox"}}
    home = write_sweep(tmp_path / "runs", {"arm": {"a": {}}}, 1, rising)
    shutil.rmtree(home)
    runs = {}
    for number, (label, knobs) in enumerate(labels_of.items()):
        write_run(home / f"r{number}", [a_round(1, 0.5), a_round(2, 0.6)], **knobs)
        runs[f"r{number}"] = {"arm": label, "seed": "0"}
    record = {"name": evil, "about": evil, "axes": {"arm": list(labels_of)}, "runs": runs}
    (home / "sweep.json").write_text(json.dumps(record))
    reader = report_of(tmp_path, home, options=("--title", "</title><b>" + evil))
    assert "b" not in {name for name, _ in reader.tags}
    assert all(attributes["src"] and str(attributes["src"]).startswith("data:") for attributes in reader.all("img"))
    assert evil in reader.text and "_hidden" in reader.text and "名前" in reader.text
    drawn = pictures(section_of("learning", material_of(home)))["accuracy-rounds"]
    shown = drawn.draw().legends[0].get_texts()
    assert [text.get_text().strip() for text in shown][1] == "_hidden, fedavg + gma" and len(shown) == 3


def test_a_broken_sweep_record_is_reported(tmp_path: Path, two: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (two / "sweep.json").write_text('{"runs": 3}')
    assert main(["report", str(two), "--out", str(tmp_path / "report")]) == 2
    assert "is no record of a sweep" in capsys.readouterr().err


# Curves


def test_smoothing_by_hand() -> None:
    assert smoothed({1: 1.0, 3: 2.0, 5: 6.0}, 2) == {1: 1.0, 3: 1.5, 5: 4.0}
    assert summed({1: 1.0, 2: 2.0, 4: 3.0}) == {1: 1.0, 2: 3.0, 4: 6.0}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.integers(1, 40))
def test_a_running_mean_stays_between_the_extremes(values: list[float], over: int) -> None:
    curve = dict(enumerate(values))
    found = smoothed(curve, over)
    assert found.keys() == curve.keys() and found[0] == values[0]
    assert all(min(values) - 1e-6 <= value <= max(values) + 1e-6 for value in found.values())
    assert smoothed(curve, 1) == curve


NONE = Plot("name", "about", "down")


def test_a_line_is_the_mean_of_the_seeds_with_one_deviation_around_it(two: Path) -> None:
    one = place(group(find_runs([two])))[0]
    found = line(NONE, one, [{1: 1.0, 2: 2.0}, {1: 3.0, 2: 2.0, 3: 9.0}], [{1: 10.0, 2: 20.0}, {1: 20.0, 2: 40.0}])
    assert found is not None and found.x == [15.0, 30.0] and found.y == [2.0, 2.0]
    assert found.low == pytest.approx([2 - 2**0.5, 2.0]) and found.high == pytest.approx([2 + 2**0.5, 2.0])
    assert line(NONE, one, [{}, {}]) is None
    alone = line(NONE, one, [{4: 1.0}, {}])
    assert alone is not None and alone.low is None and alone.x == [4]


def test_bytes_and_seconds_are_what_has_come_together(tmp_path: Path) -> None:
    run = find_runs([write_run(tmp_path / "run", [a_round(n, 0.5) for n in (1, 2, 3)])])[0]
    assert curves.megabytes(run) == {1: 0.001, 2: 0.002, 3: 0.003}
    assert curves.megabytes_uploaded(run) == {}
    assert curves.training_seconds(run) == pytest.approx({1: 2.0, 2: 4.0, 3: 6.0})  # evaluation is not training


def test_runs_that_sent_nothing_have_no_picture_against_bytes(tmp_path: Path) -> None:
    material = material_of(write_run(tmp_path / "run", [a_round(1, 0.5, bytes_sent=0)]))
    section = section_of("learning", material)
    assert "accuracy-bytes" not in pictures(section) and "one rank" in absent(section)
    assert "accuracy-uploaded" not in pictures(section), "of an older version"


def test_what_clients_upload_has_a_picture_on_any_number_of_ranks(tmp_path: Path) -> None:
    rounds = [a_round(n, 0.1 * n, bytes_sent=0, client_bytes_up=2_000_000, client_bytes_down=0) for n in (1, 2, 3)]
    picture = pictures(section_of("learning", material_of(write_run(tmp_path / "run", rounds))))["accuracy-uploaded"]
    (axes,) = picture.draw().axes
    assert axes.get_xlabel() == "MB uploaded by clients" and "uploaded" in picture.caption
    assert list(axes.lines[0].get_xdata()) == [2.0, 4.0, 6.0]


# Panels and styles


def by_panel(placed: list[Placed]) -> dict[str, list[Placed]]:
    """Return the lines of each panel."""
    titles = dict.fromkeys(one.panel for one in placed)
    return {title: [one for one in placed if one.panel == title] for title in titles}


def grid_of(tmp_path: Path, settings: int, algorithms: int) -> Path:
    """A sweep by hand of so many settings and algorithms with two masks."""
    axes = {
        "setting": {f"set{i}": {"cohort": i + 1} for i in range(settings)},
        "algorithm": {name: {"algorithm": name} for name in ("fedavg", "fedprox", "fedadam", "fedyogi")[:algorithms]},
        "mask": MASKS,
    }
    return write_sweep(tmp_path / "grid", axes, 1, rising)


def test_few_lines_share_a_panel(tmp_path: Path) -> None:
    panels = by_panel(place(group(find_runs([grid_of(tmp_path, 1, 3)]))))
    assert list(panels) == [""] and len(panels[""]) == 6
    assert {one.label for one in panels[""]} >= {"fedavg + mean", "fedadam + gma"}


def test_more_are_small_multiples_by_the_other_axes(tmp_path: Path) -> None:
    placed = place(group(find_runs([grid_of(tmp_path, 2, 3)])))
    panels = by_panel(placed)
    assert list(panels) == ["set0", "set1"] and [len(inside) for inside in panels.values()] == [6, 6]
    for label in {one.label for one in placed}:
        assert len({one.style for one in placed if one.label == label}) == 1, "one style in all panels"


def test_and_by_algorithm_where_there_are_too_many_of_them(tmp_path: Path) -> None:
    panels = by_panel(place(group(find_runs([grid_of(tmp_path, 2, 4)]))))
    assert len(panels) == 8 and {one.label for inside in panels.values() for one in inside} == {"mean", "gma"}
    assert max(map(len, panels.values())) <= MOST_LINES


def test_an_axis_with_a_name_of_its_own_is_known_by_its_masks(tmp_path: Path) -> None:
    axes = {"place": {f"p{i}": {"cohort": i + 1} for i in range(4)}, "arm": {"AVG": MASKS["mean"], "GMA": MASKS["gma"]}}
    panels = by_panel(place(group(find_runs([write_sweep(tmp_path / "own", axes, 1, rising)]))))
    assert list(panels) == ["p0", "p1", "p2", "p3"]
    assert {one.label for inside in panels.values() for one in inside} == {"AVG, fedavg + mean", "GMA, fedavg + gma"}


def grey(style: Style) -> tuple[str, str, bool]:
    """What is left of a style without its colour."""
    return str(style.dash), style.marker, style.filled


@given(st.integers(1, MOST_STYLES), st.integers(1, MOST_STYLES))
def test_no_two_lines_look_alike_even_in_grey(kinds: int, masks: int) -> None:
    series = [(f"kind{k}", f"mask{m}") for k in range(kinds) for m in range(masks)][:MOST_STYLES]
    assert len({grey(one) for one in assign_styles(series).values()}) == len(series)


def test_kind_and_mask_follow_from_the_style() -> None:
    found = assign_styles([(f"kind{k}", f"mask{m}") for k in range(8) for m in range(4)])
    assert all(one.colour == style.COLOURS[int(kind[-1])] for (kind, _), one in found.items())
    assert all(one.dash == style.DASHES[int(mask[-1])] for (_, mask), one in found.items())


def no_two_alike(placed: list[Placed]) -> bool:
    """Whether in every panel all lines have labels, and looks without their colours, of their own."""
    panels = by_panel(placed).values()
    return all(
        len({one.label for one in inside}) == len({grey(one.style) for one in inside}) == len(inside)
        for inside in panels
    )


def test_labels_of_one_mask_have_styles_of_their_own() -> None:
    loose = [made([0.5], mask="mean", data="mnist"), *(made([0.5], tau=tau, data="fmnist") for tau in (0.2, 0.4))]
    assert no_two_alike(place(group(loose)))
    arms = {"fedavg": "mean", "fedgma-0.01": "and", "fedgma-0.1": "and", "fedgma-1": "and"}
    for splits in (["iid"], ["iid", "noniid"], [f"split{i}" for i in range(9)]):
        runs = [made([0.5], labels={"split": s, "arm": arm}, mask=arms[arm]) for s in splits for arm in arms]
        assert no_two_alike(place(group(runs)))


knob_sets = st.fixed_dictionaries(
    {
        "mask": st.sampled_from(["mean", "gma", "and", "mine:mask"]),
        "tau": st.sampled_from([0.2, 0.4, 0.8]),
        "algorithm": st.sampled_from(["fedavg", "fedprox", "fedadam"]),
        "cohort": st.integers(1, 9),
    }
)


@given(st.lists(knob_sets, min_size=1, max_size=MOST_STYLES, unique_by=str), st.sampled_from(["", "arm", "grid"]))
def test_no_two_lines_of_a_panel_look_alike(every: list[dict[str, Any]], sweep: str) -> None:
    def labels(number: int) -> dict[str, str]:
        knobs = {knob: str(value) for knob, value in every[number].items()}
        return {"": {}, "arm": {"arm": f"a{number}"}, "grid": knobs}[sweep]

    runs = [made([0.5], labels=labels(number), **knobs) for number, knobs in enumerate(every)]
    assert no_two_alike(place(group(runs)))


# Plain and masked averaging


def pairs_of(tmp_path: Path, gains: list[float]) -> Material:
    """Plain and masked runs whose best accuracies differ by these."""
    for seed, gain in enumerate(gains):
        write_run(tmp_path / "pairs" / f"mean{seed}", [a_round(1, 0.5 + 0.01 * seed)], seed=seed, mask="mean")
        write_run(tmp_path / "pairs" / f"gma{seed}", [a_round(1, 0.5 + 0.01 * seed + gain)], seed=seed, mask="gma")
    return material_of(tmp_path / "pairs")


def verdicts(material: Material) -> list[str]:
    return [text for part in section_of("masks", material).parts if isinstance(part, list) for text in part]


def test_three_seeds_never_prove_anything(tmp_path: Path) -> None:
    (said,) = verdicts(pairs_of(tmp_path, [0.1, 0.1001, 0.0999]))
    assert "10.00 points better with the mask on average" in said
    assert "too few to conclude" in said and "significant" not in said


def test_six_seeds_may(tmp_path: Path) -> None:
    (said,) = verdicts(pairs_of(tmp_path, [-0.1, -0.11, -0.09, -0.1, -0.12, -0.1]))
    assert "10.33 points worse with the mask" in said and said.endswith("6 pairs: significant at 0.05.")


def test_one_seed_has_no_test(tmp_path: Path) -> None:
    (said,) = verdicts(pairs_of(tmp_path, [0.02]))
    assert "2.00 points better" in said and "too few for a test" in said


def test_a_draw_is_reported_as_a_draw(tmp_path: Path) -> None:
    (said,) = verdicts(pairs_of(tmp_path, [0.0, 0.0, 0.0]))
    assert "the best test accuracy is the same;" in said


def test_the_correction_for_many_rows_is_named(tmp_path: Path) -> None:
    gains = [0.1, 0.11, 0.09, 0.1, 0.12, 0.1]
    for algorithm in ("fedavg", "fedprox"):
        for seed, gain in enumerate(gains):
            for mask, plus in (("mean", 0.0), ("gma", gain)):
                folder = tmp_path / "pairs" / f"{algorithm}{mask}{seed}"
                write_run(folder, [a_round(1, 0.5 + plus)], seed=seed, mask=mask, algorithm=algorithm)
    said = verdicts(material_of(tmp_path / "pairs"))
    assert len(said) == 2 and all("corrected for 2 rows" in text for text in said)


def test_a_falling_metric_is_better_when_it_is_less(tmp_path: Path) -> None:
    for seed in range(3):
        for mask, value in (("mean", 2.0), ("gma", 1.5)):
            folder = tmp_path / "pairs" / f"{mask}{seed}"
            write_run(folder, [a_round(1, value + 0.1 * seed, "mae")], rises=False, seed=seed, mask=mask)
    (said,) = verdicts(material_of(tmp_path / "pairs"))
    assert "the best test mae is 0.5 better with the mask" in said


def test_the_picture_of_pairs_has_their_numbers(tmp_path: Path) -> None:
    picture = pictures(section_of("masks", pairs_of(tmp_path, [0.1, 0.2, 0.3])))["masks"]
    assert "fedavg + gma 0.4: +20" in picture.alt
    left, right = picture.draw().axes
    low, high = right.get_xlim()
    assert low == pytest.approx(-high), "zero in the middle"
    marks = [found.get_xdata()[0] for found in left.lines if found.get_marker() in ("o", "s")]
    assert marks == pytest.approx([51.0, 71.0])


def test_the_picture_of_pairs_shows_the_seeds_that_are_compared(tmp_path: Path) -> None:
    pairs_of(tmp_path, [0.1, 0.2, 0.3])
    shutil.rmtree(tmp_path / "pairs" / "gma2")
    left, _ = pictures(section_of("masks", material_of(tmp_path / "pairs")))["masks"].draw().axes
    marks = [found.get_xdata()[0] for found in left.lines if found.get_marker() in ("o", "s")]
    assert marks == pytest.approx([50.5, 65.5])


# Published, reached


def test_published_numbers_are_shown_next_to_the_measured(tmp_path: Path) -> None:
    said = {"source": "a paper", "measure": "best", "columns": "mask", "rows": [{"mean": 70.0, "gma": 80.5}]}
    home = write_sweep(tmp_path / "two", {"mask": MASKS}, 3, rising, published=said)
    section = section_of("published", material_of(home))
    row = tables(section)["published"].table.rows[0]
    assert [show(cell) for cell in row] == ["70.00", "71.00 ± 1.00", "+1.00", "80.50", "76.00 ± 1.00", "-4.50"]
    marks = [found for found in pictures(section)["published"].draw().axes[0].lines if found.get_marker() != "None"]
    assert sorted(float(found.get_xdata()[0]) for found in marks) == pytest.approx([70, 71, 76, 80.5])


def test_a_paper_may_have_several_tables(tmp_path: Path) -> None:
    first = {"source": "table 1", "measure": "best", "columns": "mask", "rows": [{"mean": 70.0}]}
    reached = first | {"measure": "rounds:0.6", "rows": [{"mean": 9, "gma": 8}]}
    home = write_sweep(tmp_path / "two", {"mask": MASKS}, 3, rising, published=[first, {"measure": "curve"}, reached])
    section = section_of("published", material_of(home))
    assert list(tables(section)) == list(pictures(section)) == ["published", "published-3"]
    assert "rounds to 60%" in tables(section)["published-3"].table.title
    assert "The publication has no numbers" in absent(section)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        (None, "no sweep that names published numbers"),
        ({"source": "figure 2", "measure": "curve"}, "figure 2 has no numbers"),
        ({"measure": "wrong", "columns": "mask", "rows": [{"mean": 1}]}, "cannot be read (unknown measure 'wrong'"),
    ],
)
def test_what_is_not_published_is_said(said: Any, message: str, tmp_path: Path) -> None:
    home = write_sweep(tmp_path / "two", {"mask": MASKS}, 1, rising, **({"published": said} if said else {}))
    assert message in absent(section_of("published", material_of(home)))


def test_rounds_to_reach_by_hand(two: Path) -> None:
    section = section_of("reach", material_of(two, reach=[0.5, 0.99]))
    rows = [[show(cell) for cell in row] for row in tables(section)["reach"].table.rows]
    assert rows == [["fedavg + mean", "3", "5.0 ± 0.0", "never"], ["fedavg + gma", "3", "4.0 ± 0.0", "never"]]
    texts = [text.get_text() for text in pictures(section)["reach"].draw().axes[0].texts]
    assert "99%: never" in texts


def texts_inside(picture: Picture) -> list[str]:
    """The words inside the axes of a picture, of which none leaves it; a warning of the layout is an error."""
    with style.settings(), warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = picture.draw()
        figure.draw_without_rendering()
        texts = figure.axes[0].texts
        boxes = [text.get_window_extent() for text in texts]
        assert all(-2 < box.x0 < box.x1 < figure.bbox.x1 + 2 for box in boxes)
        assert figure.axes[0].get_window_extent().width > 0.8 * figure.bbox.width
    return [text.get_text() for text in texts]


def test_many_values_that_were_missed_leave_room_for_the_names(tmp_path: Path) -> None:
    def rounds(labels_of: dict[str, str], seed: int) -> list[dict[str, Any]]:
        return [a_round(n, 0.6 + 0.03 * n + 0.1 * seed) for n in range(1, 6)]  # to 0.75, 0.85 and 0.95

    home = write_sweep(tmp_path / "s", {"mask": MASKS}, 3, rounds)
    many = section_of("reach", material_of(home, reach=[0.7, 0.75, 0.8, 0.85, 0.9, 0.95]))
    said = texts_inside(pictures(many)["reach"])
    assert said[::2] == ["fedavg + mean", "fedavg + gma"] and said[1::2] == ["4 of 6 values not reached by all"] * 2
    two_values = section_of("reach", material_of(home, reach=[0.8, 0.99]))
    assert "80%: 1 of 3 did not; 99%: never" in texts_inside(pictures(two_values)["reach"])


def test_a_long_note_is_cut_before_the_name_is_gone() -> None:
    picture = Picture("p", "", "", lambda: rows.draw([rows.Row("a-name", [], "a long note " * 30)], "x"))
    assert "a-name" in texts_inside(picture)


@given(st.text(min_size=1), st.integers(-200, 200))
def test_a_short_name_has_a_beginning_and_an_end(name: str, most: int) -> None:
    found = style.shortened(name, most)
    assert len(found) <= max(most, style.SHORTEST) and (found[0], found[-1]) == (name[0], name[-1])
    assert found == name or len(name) > most


def test_a_group_that_is_not_done_has_not_missed_a_value(tmp_path: Path) -> None:
    for seed, scores in enumerate(([0.5], [0.8])):
        write_run(tmp_path / "runs" / f"s{seed}", [a_round(1, scores[0])], done=False, seed=seed, rounds=9)
    for value, said in ((0.7, "70%: 1 of 2 did not yet"), (0.9, "90%: not yet")):
        section = section_of("reach", material_of(tmp_path / "runs", reach=[value, 0.1]))
        assert said in [text.get_text() for text in pictures(section)["reach"].draw().axes[0].texts]


def runs_with(bests: list[float], rises: bool) -> list[Run]:
    return [
        Run(Path(str(i)), {"seed": i, "rounds": 1}, [a_round(1, best, "score")], "score", rises, {}, {})
        for i, best in enumerate(bests)
    ]


def test_values_to_reach_are_chosen_from_the_runs() -> None:
    assert automatic(runs_with([0.62, 0.78, 0.93], rises=True)) == [0.6, 0.75]
    assert automatic(runs_with([0.3], rises=True)) == [0.3]  # though 0.3 / 0.05 is a little less than 6
    assert automatic(runs_with([1.0, 1.0, 0.25], rises=True)) == [0.25, 1.0]
    assert automatic(runs_with([3.2, 7.6, 12.0], rises=False)) == [15.0, 10.0]
    assert automatic([]) == [] and automatic(runs_with([0.0, -1.0], rises=True)) == []


@given(st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20), st.booleans())
def test_every_value_is_reached_by_somebody_and_the_first_by_all(bests: list[float], rises: bool) -> None:
    chosen = automatic(runs_with(bests, rises))
    assert chosen == sorted(chosen, reverse=not rises) and len(set(chosen)) == len(chosen) <= 3

    def reached(value: float) -> int:
        return sum(best >= value * (1 - 1e-6) if rises else best <= value * (1 + 1e-6) for best in bests)

    assert all(reached(value) for value in chosen)
    if min(bests) > max(bests) / 2:  # otherwise the round number below may be nothing
        assert reached(chosen[0]) == len(bests)


# What --evaluate adds


def test_layers_are_the_mean_over_seeds_and_gaps_stay_open(tmp_path: Path) -> None:
    def rounds(labels_of: dict[str, str], seed: int) -> list[dict[str, Any]]:
        return [measured(1, 0.5, seed), a_round(2, 0.5), measured(3, 0.5, seed)]

    found = layer_map(group(find_runs([write_sweep(tmp_path / "s", {"mask": MASKS}, 3, rounds)]))[0])
    assert found is not None and found.names == list(LAYERS) and list(found.rounds) == [1, 2, 3]
    assert found.values[:, 0] == pytest.approx([0.11, 0.21, 0.31]) and np.isnan(found.values[:, 1]).all()


def test_the_share_below_tau_is_drawn_against_alpha(tmp_path: Path) -> None:
    skews = {f"{alpha:g}": {"split": "dirichlet", "skew": Skew(alpha=alpha)} for alpha in (0.1, 1.0, 10.0)}

    def rounds(labels_of: dict[str, str], seed: int) -> list[dict[str, Any]]:
        return [a_round(1, 0.5, below_tau=0.9 - 0.1 * float(labels_of["skew.alpha"]) ** 0.5 + 0.01 * seed)]

    home = write_sweep(tmp_path / "s", {"skew.alpha": skews, "mask": MASKS}, 3, rounds)
    axes = pictures(section_of("agreement", material_of(home)))["share-alpha"].draw().axes[0]
    assert axes.get_xscale() == "log" and [text.get_text() for text in axes.get_xticklabels()] == ["0.1", "1", "10"]
    for drawn in axes.lines:
        expected = [91 - 10 * alpha**0.5 for alpha in (0.1, 1.0, 10.0)]
        assert list(drawn.get_xdata()) == [0.1, 1.0, 10.0] and list(drawn.get_ydata()) == pytest.approx(expected)


def test_without_two_alphas_the_share_is_shown_by_group(two: Path) -> None:
    section = section_of("agreement", material_of(two))
    assert "share" in pictures(section) and "share-alpha" not in pictures(section)


def test_participating_clients_next_to_the_others(two: Path) -> None:
    section = section_of("clients", material_of(two))
    first = tables(section)["clients"].table.rows[0]
    assert [show(cell) for cell in first] == ["fedavg + mean", "58.00 ± 1.00", "48.00 ± 1.00", "10.00 ± 0.00"]
    assert len(pictures(section)["clients"].draw().axes) == 2


def test_participating_clients_by_a_metric_of_ones_own(tmp_path: Path) -> None:
    sides = {"participating": 0.25, "others": 0.5}
    folder = write_run(tmp_path / "runs" / "own", [a_round(1, 0.4, "mae", clients_mae=sides)], rises=False)
    section = section_of("clients", material_of(folder))
    table = tables(section)["clients"].table
    assert [show(cell) for cell in table.rows[0]] == ["fedavg + gma", "0.2500", "0.5000", "-0.2500"]
    assert "In percent." not in table.notes and "Line chart of mae against" in pictures(section)["clients"].alt
    write_run(tmp_path / "runs" / "usual", [measured(1, 0.5)], mask="mean")
    assert list(tables(section_of("clients", material_of(tmp_path / "runs")))) == ["clients-mae", "clients-accuracy"]
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(a_round(2, 0.4, "mae", clients_mae={"participating": "x"})) + "\n")
    assert len(find_runs([folder])[0].records) == 1, "no number where one is looked for: no round"


def test_the_side_columns_are_of_the_last_rounds(tmp_path: Path) -> None:
    rounds = [measured(n, n / 100) if n % 5 == 0 else a_round(n, None) for n in range(1, 51)]
    table = tables(section_of("gap", material_of(write_run(tmp_path / "run", rounds))))["gap-accuracy"].table
    assert [show(cell) for cell in table.rows[0]] == ["fedavg + gma", "57.50", "47.50", "10.00"], "rounds 45 and 50"
    assert "Means over the scored ones of the last 10 rounds" in table.notes[0]


def test_everybody_takes_part(tmp_path: Path) -> None:
    rounds = [a_round(n, 0.5, clients_accuracy={"participating": 0.6, "others": None}) for n in (1, 2)]
    section = section_of("clients", material_of(write_run(tmp_path / "run", rounds)))
    assert [show(c) for c in tables(section)["clients"].table.rows[0]] == ["fedavg + gma", "60.00", "-", "-"]
    assert "others" not in pictures(section)["clients"].alt


def test_the_gap_between_training_and_test_data(two: Path) -> None:
    row = tables(section_of("gap", material_of(two)))["gap-accuracy"].table.rows[1]
    assert [show(cell) for cell in row] == ["fedavg + gma", "68.00 ± 1.00", "58.00 ± 1.00", "10.00 ± 0.00"]


def test_any_further_number_has_a_curve(tmp_path: Path) -> None:
    evil = "</figure><script>alert(1)</script>"
    more = {evil: 1.0, "own": {"a": 1, "b": None}, "words": "x", "flag": True}
    rounds = [a_round(n, 0.5, drift=0.1 * n, **more) for n in (1, 2)]
    section = section_of("further", material_of(write_run(tmp_path / "run", rounds)))
    drawn = pictures(section)
    assert list(drawn) == ["further-1-drift", "further-2-figure-script-alert-1-script", "further-3-own-a"]
    assert list(drawn["further-1-drift"].draw().axes[0].lines[0].get_ydata()) == pytest.approx([0.1, 0.2])
    reader = report_of(tmp_path, tmp_path / "run")
    assert reader.open == [] and not reader.all("script") and evil in reader.text
    assert "No run measured anything else" in absent(section_of("further", material_of(OLD)))


def test_very_many_further_numbers_are_cut(tmp_path: Path) -> None:
    rounds = [a_round(1, 0.5, own={f"n{i}": i for i in range(99)})]
    section = section_of("further", material_of(write_run(tmp_path / "run", rounds)))
    assert len(pictures(section)) == curves.MOST_NUMBERS and "The first 24 of 99 numbers" in absent(section)


def test_attacks_are_shown_where_they_were_made(two: Path) -> None:
    assert "fedmpi attack" in absent(section_of("membership", material_of(two)))
    for number, folder in enumerate(sorted(two.glob("gma*"))):
        found = {"accuracy": 0.55 + 0.01 * number, "auc": 0.6, "advantage": 0.1}
        control = {"logistic": {"accuracy": 0.51, "auc": 0.5, "advantage": 0.02}, "loss": None}
        (folder / "attack.json").write_text(
            json.dumps({"judged": 10_000 - number, "logistic": found, "loss": None, "control": control})
        )
    table = tables(section_of("membership", material_of(two)))["membership"].table
    after, before = "logistic regression on the answers", "logistic regression, model before training"
    assert [[show(cell) for cell in row[1:]] for row in table.rows] == [
        [after, "56.00 ± 1.00", "55.02 to 56.97", "0.6000 ± 0.0000", "0.1000 ± 0.0000"],
        [before, "51.00 ± 0.00", "50.02 to 51.98", "0.5000 ± 0.0000", "0.0200 ± 0.0000"],
    ]
    assert table.columns[2:4] == ["accuracy", "95% interval"]
    assert "so their errors are not independent" in " ".join(table.notes)


def test_an_attack_without_its_sample_count_has_no_interval(two: Path) -> None:
    for judged in (None, 0, 100):
        for folder in two.glob("gma*"):
            found = {"judged": judged, "loss": {"accuracy": 7.0 if judged == 100 else 0.5}}
            (folder / "attack.json").write_text(json.dumps(found))
        table = tables(section_of("membership", material_of(two)))["membership"].table
        assert show(table.rows[0][3]) == "-" and "Wilson" not in " ".join(table.notes)


@pytest.mark.parametrize(
    "text", ["", "[]", '{"logistic": 3}', '{"logistic": {"accuracy": "x"}}', '{"judged": "many", "loss": {}}']
)
def test_an_attack_that_cannot_be_read_is_a_fault(text: str, two: Path) -> None:
    (next(two.glob("gma*")) / "attack.json").write_text(text)
    with pytest.raises(FileError, match="attack.json (has|is) .*; restore it from a copy, or move it away"):
        section_of("membership", material_of(two))


def test_an_attack_that_found_no_number_counts_for_none(two: Path) -> None:
    (next(two.glob("gma*")) / "attack.json").write_text('{"loss": {"accuracy": NaN}}')
    assert "No run was attacked" in absent(section_of("membership", material_of(two)))


# Labels, costs, configuration


def test_labels_are_drawn_once_for_each_split(two: Path, tmp_path: Path) -> None:
    section = section_of("labels", material_of(two))
    (picture,) = pictures(section).values()
    assert "A client has 20 to 45 samples and 1.5 of 2 classes on average." in picture.caption
    axes = picture.draw().axes[0]
    assert sum(bar.get_width() for bar in axes.patches) == 115


def test_a_partition_of_many_clients_is_summarised_in_text(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [a_round(1, 0.5)])
    printed = json.loads((folder / "partition.json").read_text())
    del printed["histogram"]
    printed |= {
        "clients": 20_000,
        "sizes": {"min": 1, "quartiles": [2, 3.5, 1e3], "max": 5000},
        "classes_per_client": 1.75,
    }
    (folder / "partition.json").write_text(json.dumps(printed))
    (said,) = section_of("labels", material_of(folder)).parts
    assert isinstance(said, str) and "20,000 clients with 1 to 5,000 samples each (quartiles 2, 4, 1,000)" in said
    (folder / "partition.json").write_text(json.dumps(printed | {"sizes": "many"}))
    assert "has no samples per client" in absent(section_of("labels", material_of(folder)))


@pytest.mark.parametrize("histogram", [[[1, 2], [3]], "none", [], [[]], [[0, 0]], [[-1, 2]], [[1e400]]])
def test_an_invalid_histogram_is_reported(histogram: Any, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [a_round(1, 0.5)], histogram=histogram)
    assert "has no samples per client" in absent(section_of("labels", material_of(folder)))


def test_many_clients_and_no_classes_can_be_drawn(tmp_path: Path) -> None:
    for name, shape in (("many", (300, 10)), ("plain", (60, 1)), ("few", (3, 1))):
        counts = np.arange(1, np.prod(shape) + 1).reshape(shape)
        folder = write_run(tmp_path / name, [a_round(1, 0.5)], histogram=counts.tolist())
        (picture,) = pictures(section_of("labels", material_of(folder))).values()
        assert Image.open(BytesIO(render(picture, ["png"])["png"])).width > 300


def test_the_time_of_a_round_by_phase(two: Path) -> None:
    material = material_of(two)
    assert costs.seconds(material.groups[0]) == pytest.approx(
        {"local": 1.5, "wait": 0.1, "reduce": 0.2, "server": 0.1, "gather": 0.1, "meta": 0.0, "eval": 1.0}
    )
    axes = pictures(section_of("costs", material))["time"].draw().axes[0]
    assert sum(bar.get_width() for bar in axes.patches) == pytest.approx(2 * 3.0)


def test_differences_are_marked_and_the_rest_is_folded(tmp_path: Path) -> None:
    for number, (mask, cohort) in enumerate([("mean", 4), ("gma", 4), ("gma", 2)]):
        write_run(tmp_path / "runs" / f"r{number}", [a_round(1, 0.5)], mask=mask, cohort=cohort, timeout=77.0)
    section = section_of("configuration", material_of(tmp_path / "runs"))
    named = tables(section)["configuration"]
    marked = {(named.table.columns[column], show(named.table.rows[row][column])) for row, column in named.marked}
    assert marked == {("mask", "mean"), ("cohort", "2")}
    (fold,) = [part for part in section.parts if isinstance(part, Fold)]
    shared = fold.parts[0]
    assert isinstance(shared, Named)
    changed = {show(shared.table.rows[row][0]) for row, _ in shared.marked}
    assert {"timeout", "tau", "model"} <= changed and "seed" not in changed


def test_a_sweep_that_chooses_shows_the_chosen(tmp_path: Path) -> None:
    rates = {f"c{n}": {"cohort": n} for n in (2, 3, 4)}
    home = write_sweep(
        tmp_path / "search", {"cohort": rates, "mask": MASKS}, 2, lambda labels_of, seed: [a_round(1, 0.5)]
    )
    tried = [{"labels": {"cohort": label}, "value": 0.1 * i, "runs": []} for i, label in enumerate(rates)]
    cells = [
        {"cell": {"mask": mask}, "best": {"cohort": best}, "tried": tried}
        for mask, best in (("mean", "c2"), ("gma", "c3"))
    ]
    (home / "chosen.json").write_text(json.dumps({"by": "train_loss", "cells": cells}))
    reader = report_of(tmp_path, home)
    assert "4 runs in 2 groups" in reader.text and "Choice of the sweep" in reader.text
    assert "Report of 4 runs of the sweep search" in reader.text


@pytest.mark.parametrize(
    "cells",
    [
        3,
        [3],
        [{"cell": {}, "best": None, "tried": []}],
        [{"cell": {}, "best": {}, "tried": [3]}],
        [{"cell": {}, "best": {}, "tried": [{"labels": {}, "value": "low"}]}],
    ],
)
def test_a_choice_that_cannot_be_read_or_was_not_made_is_none(cells: Any, tmp_path: Path) -> None:
    (tmp_path / "chosen.json").write_text(json.dumps({"cells": cells}))
    assert chosen_cells(tmp_path) == []


# Pages and pictures


def test_parts_become_html() -> None:
    parts: list[Part] = ["a < b", Absent("none"), ["x", "y"], Code("ls & cd"), Fold("more", ["inside"])]
    reader = Reader(make_page("t", [Section("one", "First", parts)], {}, about="l", facts=[("name", "<v>")]))
    assert reader.text.endswith("First a < b none x y ls & cd more inside") and "<v>" in reader.text
    assert reader.open == [] and reader.all("section") == [{"id": "one", "aria-labelledby": "one-title"}]


def test_sections_with_nothing_to_show_are_gathered() -> None:
    empty, full = Section("a", "A", [Absent("no a.")]), Section("b", "B", ["b", Absent("no c.")])
    assert gather([full]) == [full]
    (first, last) = gather([empty, full])
    assert first is full and last.parts == [["A: no a."]]


def contrast(one: str, other: str) -> float:
    """The ratio of two colours' luminance by the rule of WCAG 2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_lines_and_letters_stand_out() -> None:
    assert all(contrast(colour, style.PAPER) > 4.5 for colour in (style.INK, style.FAINT))
    assert all(contrast(colour, style.PAPER) > 3 for colour in style.COLOURS)


def test_everything_is_made_before_anything_is_written(
    two: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(material: Material) -> list[Part]:
        raise UserError("no")

    monkeypatch.setattr(command, "SECTIONS", (*SECTIONS, ("Fails", fails, "")))
    assert main(["report", str(two), "--out", str(tmp_path / "report")]) == 2
    assert not (tmp_path / "report").exists()


def test_a_hundred_runs_stay_readable(tmp_path: Path) -> None:
    axes = {
        "setting": {f"s{i}": {"cohort": i % 4 + 1, "rounds": 10 + i} for i in range(13)},
        "algorithm": {"fedavg": {}, "fedprox": {"algorithm": "fedprox"}},
        "mask": MASKS,
    }
    home = write_sweep(tmp_path / "many", axes, 2, rising)
    material = material_of(home)
    drawn = pictures(section_of("learning", material))
    assert {"accuracy-rounds", "accuracy-rounds-2"} <= drawn.keys()
    assert sum(axes.get_visible() for axes in drawn["accuracy-rounds"].draw().axes) == 7  # of 13, and 6 in the next
    assert "clients-2" not in pictures(section_of("clients", material)), "a row for each group, not a panel"
    assert "first 12 of 52 groups" in absent(section_of("agreement", material))


def test_no_word_is_outside_of_its_picture(tmp_path: Path) -> None:
    long = {f"{mask}-{'a-rather-long-label-' * 4}{mask}": MASKS[mask] for mask in MASKS}
    material = material_of(write_sweep(tmp_path / "long", {"arm": long}, 2, rising), reach=[0.5, 0.99])
    drawn = [part for section in contents(material) for part in section.parts if isinstance(part, Picture)]
    for picture in drawn:
        with style.settings():
            figure = picture.draw()
            figure.draw_without_rendering()
            ticks = {text for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for text in axis.findobj(Text)}
            ticks -= {axis.label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)}
            for text in set(figure.findobj(Text)) - ticks:
                assert isinstance(text, Text)
                box, edge = text.get_window_extent(), figure.bbox
                inside = min(box.x0, box.y0) > -2 and box.x1 < edge.x1 + 2 and box.y1 < edge.y1 + 2
                assert inside or not text.get_text().strip(), f"'{text.get_text()}' in {picture.name}"


def test_contents_name_every_section_once(two: Path) -> None:
    keys = [section.key for section in contents(material_of(two))]
    assert len(keys) == len(set(keys)) == 13


def test_panels_of_very_different_length_have_scales_of_their_own(tmp_path: Path) -> None:
    def rounds(labels_of: dict[str, str], seed: int) -> list[dict[str, Any]]:
        return [a_round(n, 0.5) for n in range(1, 4 if labels_of["setting"] == "s0" else 31)]

    settings = {f"s{i}": {"cohort": i + 1} for i in range(4)}
    home = write_sweep(tmp_path / "uneven", {"setting": settings, "mask": MASKS}, 1, rounds)
    picture = pictures(section_of("learning", material_of(home)))["accuracy-rounds"]
    first, last = (picture.draw().axes[i].get_xlim() for i in (0, 3))
    assert first[1] < 5 < 25 < last[1] and picture.caption.endswith("Panels have scales of their own.")

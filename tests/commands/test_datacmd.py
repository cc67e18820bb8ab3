"""The command `fedmpi data`: what is listed, what is prepared, what a picture shows, and the benchmark of memory."""

from __future__ import annotations

import json
import os
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import REPO, need, rank_environment
from matplotlib.figure import Figure
from realdata import shared_data
from shell import sandbox, tiny

from fedmpi import data
from fedmpi.commands import data as datacmd
from fedmpi.commands import main
from fedmpi.commands.data import LISTED
from fedmpi.data import Arrays, DataRow, Partition
from fedmpi.data.sets import shakespeare
from fedmpi.data.store import Source, Tensors, load, prepared_files
from fedmpi.data.styles import Styles
from fedmpi.experiments.report.figures.split import BARS, DPI, Row, View, draw
from fedmpi.runs.build import load_data, prepare
from fedmpi.runs.config import Config, Skew
from fedmpi.runs.options import parse
from fedmpi.runs.text import amount

Ints = np.ndarray[Any, np.dtype[np.int64]]
CONTENT = bytes(range(6))


@pytest.fixture(autouse=True)
def patch(tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """Folders of their own to work in and to cache in, no network, and everything global put back afterwards."""
    with sandbox() as patch:
        (tmp_path / "here").mkdir()
        patch.chdir(tmp_path / "here")
        patch.setenv("FEDMPI_CACHE", str(tmp_path / "cache"))
        patch.setenv("FEDMPI_OFFLINE", "1")
        patch.delenv("FEDMPI_DATA", raising=False)
        yield patch


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty data root."""
    folder = tmp_path / "root"
    folder.mkdir()
    return folder


def read_mini(files: list[Path]) -> Tensors:
    """Six grey images, as many as the file has bytes, and two to test on."""
    x = torch.tensor(list(files[0].read_bytes()), dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 4, 4)
    return {"x": x, "y": torch.arange(len(x)) % 2, "test_x": x[:2], "test_y": torch.arange(2)}


def no_download(base: Path) -> None:
    raise AssertionError("nothing may be downloaded")


def mini_source(root: Path | None = None) -> Source:
    return Source(
        "mini",
        version=3,
        read=read_mini,
        find=lambda base: [base / "mini.bin"] if (base / "mini.bin").is_file() else [],
        wanted="put mini.bin into {root}",
        fetch=no_download,
    )


def mini(root: Path | None) -> Arrays:
    return load(mini_source(), root).arrays("mini", 2)


def made_source(root: Path | None = None) -> Source:
    return replace(mini_source(), name="made", find=lambda base: [], generated=True, read=lambda files: made_tensors())


def made_tensors() -> Tensors:
    arrays = tiny()
    assert arrays.owner is not None
    return {"owner": arrays.owner} | {name: getattr(arrays, name) for name in ("x", "y", "test_x", "test_y")}


def gone_source(root: Path | None = None) -> Source:
    return replace(mini_source(), name="gone", find=lambda base: [], fetch=None, wanted="dig {root}/gone up")


@pytest.fixture
def rows(patch: pytest.MonkeyPatch) -> None:
    """A table of five small data sets, two of them from one source."""
    patch.setattr(data, "DATASETS", small := {})
    for module in (datacmd, data):
        patch.setattr(module, "DATASETS", small)
    small["mini"] = DataRow(mini, mini_source, "bytes")
    small["painted"] = DataRow(lambda root: replace(mini(root), name="painted"), mini_source, "the same in colour")
    small["made"] = DataRow(lambda root: load(made_source(), root).arrays("made", 3), made_source, "made up")
    small["gone"] = DataRow(lambda root: load(gone_source(), root).arrays("gone", 2), gone_source, "lost")


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """What `fedmpi data` prints on standard output when it leaves with that exit code."""
    capsys.readouterr()
    assert main(["data", *arguments]) == code
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one-line error with which `fedmpi data` leaves by exit code 2."""
    capsys.readouterr()
    assert main(["data", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith("fedmpi: ") and printed.err.count("\n") == 1
    return printed.err.removeprefix("fedmpi: ").rstrip("\n")


def everything(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


# The command


def test_help_is_an_error_only_without_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, code in (([], 2), (["-h"], 0), (["--help"], 0)):
        out = said(capsys, *arguments, code=code)
        assert all(f"\n  {command}" in out for command in datacmd.COMMANDS)


@pytest.mark.parametrize(("command", "option"), [("list", "--verify"), ("prepare", "NAME"), ("show", "--skew.alpha")])
def test_each_command_lists_its_options(command: str, option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["data", command, "--help"])
    assert left.value.code == 0
    out = capsys.readouterr().out
    assert option in out and "--data_root" in out


def test_every_option_of_show_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["data", "show", "--help"])
    printed = {text.split()[0]: text for text in re.split(r"^  --", capsys.readouterr().out, flags=re.MULTILINE)[1:]}
    for name in ("data_root", "split", "clients", "seed", "samples", "out", "skew.classes", "skew.owners"):
        assert re.search(r"[a-z$].{8,} Default: ", " ".join(printed[name].split())), name


def test_an_option_that_train_has_too_has_its_default_and_bounds() -> None:
    fields = {f.name: f for f in Config.__dataclass_fields__.values()}
    for name in ("data_root", "split", "clients", "seed", "skew"):
        mine = datacmd.ShowOptions.__dataclass_fields__[name]
        assert (mine.default, mine.metadata) == (fields[name].default, fields[name].metadata), name


def test_wrong_words_get_the_closest_match(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "lits") == "unknown data command 'lits'; did you mean 'list'? known: list, prepare, show"
    assert refused(capsys, "list", "--verfy") == "unknown option '--verfy'; did you mean '--verify'?"
    assert "'fedmpi data list --help'" in refused(capsys, "list", "mnist")
    assert refused(capsys, "show", "tiny", "--slit", "iid") == "unknown option '--slit'; did you mean '--split'?"
    assert refused(capsys, "prepare", "glpyhs").startswith("unknown data set 'glpyhs'; did you mean 'glyphs'? known: ")
    assert "your own" not in refused(capsys, "prepare", "glpyhs")
    assert refused(capsys, "show", "glpyhs").startswith("unknown data set 'glpyhs'; did you mean 'glyphs'? known: ")
    assert "did you mean 'dirichlet'?" in refused(capsys, "show", "tiny", "--split", "dirichlt")


@pytest.mark.parametrize("command", [["list"], ["prepare", "glyphs"], ["show", "tiny"]])
def test_a_data_root_that_is_nowhere_is_refused(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    if command[0] == "show":
        command = ["show", "glyphs"]
    printed = refused(capsys, *command, "--data_root", "no/where")
    assert printed == "--data_root no/where: there is no such folder; give one that is there, or make it"


# What is here


def listed(out: str) -> dict[str, str]:
    """The states of a listing by name."""
    table = out.split("\n\n")[1].splitlines()
    at = table[0].index("state")
    return {line.split()[0]: line[at:] for line in table[2:]}


def test_every_data_set_is_listed_and_an_empty_root_stays_empty(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = everything(tmp_path)
    out = said(capsys, "list", "--data_root", str(root))
    states = listed(out)
    assert set(states) == set(data.DATASETS)
    assert states["glyphs"] == "generated at first use" and states["mnist"] == "missing"
    assert re.search(rf"^mnist.*: .*put .* into {root}/MNIST/raw$", out, re.MULTILINE)
    assert everything(tmp_path) == before


def test_the_root_in_use_is_printed(
    tmp_path: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said(capsys, "list").startswith(f"data root: {tmp_path}/cache/data (does not exist yet)\n")
    patch.setenv("FEDMPI_DATA", str(tmp_path))
    assert said(capsys, "list").startswith(f"data root: {tmp_path}\n")
    assert said(capsys, "list", "--data_root", str(tmp_path / "here")).startswith(f"data root: {tmp_path}/here\n")
    assert not (tmp_path / "cache").exists()


@pytest.mark.usefixtures("rows")
def test_a_data_set_goes_from_missing_to_prepared(
    root: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["list", "--data_root", str(root)]
    want = {"mini": "missing", "painted": "missing", "made": "generated at first use", "gone": "missing"}
    out = said(capsys, *ask)
    assert listed(out) == want
    assert out.split("\n\n")[2] == f"mini, painted: put mini.bin into {root}\ngone: dig {root}/gone up\n"
    patch.delenv("FEDMPI_OFFLINE")
    out = said(capsys, *ask)
    assert listed(out) == want | {"mini": "can be downloaded", "painted": "can be downloaded"}
    assert f"mini, painted: put mini.bin into {root}\n" in out
    (root / "mini.bin").write_bytes(CONTENT)
    out = said(capsys, *ask)
    want |= {"mini": "source here", "painted": "source here"}
    assert listed(out) == want and "mini.bin" not in out
    assert not (root / "prepared").exists()
    mini(root)
    size = prepared_files(mini_source(), root)[0].stat().st_size
    want |= {"mini": f"prepared ({amount(size)})", "painted": f"prepared ({amount(size)})"}
    assert listed(said(capsys, *ask)) == want
    (root / "mini.bin").unlink()
    assert listed(said(capsys, *ask)) == want  # it needs its source no more


@pytest.mark.usefixtures("rows")
def test_what_was_prepared_in_the_cache_for_a_root_that_cannot_be_written_is_found(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "mini.bin").write_bytes(CONTENT)
    root.chmod(0o555)
    assert "cache/prepared/" in said(capsys, "prepare", "mini", "--data_root", str(root))
    assert listed(said(capsys, "list", "--data_root", str(root)))["mini"].startswith("prepared (")
    root.chmod(0o755)
    assert not (root / "prepared").exists()


def spoil(path: Path) -> None:
    """Change the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.usefixtures("rows")
@pytest.mark.parametrize("damage", [spoil, shorten])
@pytest.mark.parametrize("source_left", [True, False])
def test_damage_is_found_only_by_verifying(
    root: Path, damage: Callable[[Path], None], source_left: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "mini.bin").write_bytes(CONTENT)
    mini(root)
    load(made_source(), root)
    if not source_left:
        (root / "mini.bin").unlink()
    ask = ["list", "--data_root", str(root)]
    assert listed(said(capsys, *ask, "--verify"))["mini"].startswith("prepared, verified (")
    path = prepared_files(mini_source(), root)[0]
    damage(path)
    assert listed(said(capsys, *ask))["mini"].startswith("prepared (")
    before = {file: file.stat().st_mtime_ns for file in everything(root)}
    out = said(capsys, *ask, "--verify", code=1)
    states = listed(out)
    assert (states["mini"], states["painted"]) == ("damaged", "damaged")
    assert states["made"].startswith("prepared, verified (")
    assert len(re.findall(rf"^mini, painted: {path} is damaged \(.+\); ", out, re.MULTILINE)) == 1
    assert ("its next use prepares it again" in out) == source_left
    assert ("put mini.bin into" in out) != source_left
    assert {file: file.stat().st_mtime_ns for file in everything(root)} == before


@pytest.mark.usefixtures("rows")
def test_each_prepared_file_is_verified_once_and_none_without_being_asked(
    root: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "mini.bin").write_bytes(CONTENT)
    mini(root)
    read: list[Path] = []
    real = datacmd.read_verified
    patch.setattr(datacmd, "read_verified", lambda path: read.append(path) or real(path))
    said(capsys, "list", "--data_root", str(root))
    assert read == []
    said(capsys, "list", "--data_root", str(root), "--verify")
    assert read == prepared_files(mini_source(), root)[:1]


@pytest.mark.usefixtures("rows")
def test_a_root_that_may_not_be_read_is_refused(
    root: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(base: Path) -> list[Path]:
        raise PermissionError(13, "Permission denied", str(base / "mini.bin"))

    patch.setitem(datacmd.DATASETS, "mini", DataRow(mini, lambda _: replace(mini_source(), find=forbidden), ""))
    printed = refused(capsys, "list", "--data_root", str(root))
    assert printed.startswith(f"{root} cannot be searched for 'mini' (Permission denied)")


# Preparing


@pytest.mark.usefixtures("rows")
def test_preparing_prints_the_data_set_and_its_path(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "mini.bin").write_bytes(CONTENT)
    path = prepared_files(mini_source(), root)[0]
    first, second = (said(capsys, "prepare", "mini", "made", "--data_root", str(root)).splitlines() for _ in range(2))
    assert first[0] == "mini: 6 train and 2 test samples, 1 x 4 x 4, 2 classes, no owners"
    assert re.fullmatch(rf"  prepared in \d+\.\d s: {path}, \d+ B", first[1])
    assert re.fullmatch(r"  SHA-256 of its content: [0-9a-f]{64}", first[2])
    assert first[3] == "made: 200 train and 60 test samples, 1 x 12 x 12, 3 classes, 20 owners"
    assert re.fullmatch(rf"  prepared already, verified in \d+\.\d s: {path}, \d+ B", second[1])
    assert second[::3] == first[::3] and second[2] == first[2]
    (root / "mini.bin").write_bytes(bytes(range(1, 7)))
    third = said(capsys, "prepare", "mini", "--data_root", str(root)).splitlines()
    assert third[1].startswith("  prepared in ") and third[2] != first[2]
    spoil(path)
    assert said(capsys, "prepare", "mini", "--data_root", str(root)).splitlines()[1].startswith("  prepared in ")


@pytest.mark.usefixtures("rows")
def test_where_nothing_can_be_written_it_is_said(
    root: Path, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (root / "mini.bin").write_bytes(CONTENT)
    patch.setattr(data.store, "can_write", lambda folder: False)
    out = said(capsys, "prepare", "mini", "--data_root", str(root))
    assert "not kept: " in out and not (root / "prepared").exists()


@pytest.mark.usefixtures("rows")
def test_what_cannot_be_prepared_is_refused_before_anything_is(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (root / "mini.bin").write_bytes(CONTENT)
    here = ["--data_root", str(root)]
    assert refused(capsys, "prepare", *here).startswith("data prepare needs the name of a data set: mini, ")
    assert "did you mean 'made'?" in refused(capsys, "prepare", "mini", "maed", *here)
    assert "'mine:data' is your own" in refused(capsys, "prepare", "mini", "mine:data", *here)
    assert not (root / "prepared").exists()
    assert f"dig {root}/gone up" in refused(capsys, "prepare", "gone", *here)
    (root / "mini.bin").unlink()
    assert "FEDMPI_OFFLINE forbids a download" in refused(capsys, "prepare", "mini", *here)


def test_a_file_that_cannot_be_read_is_named(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = root / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for name in data.vision.FILES:
        (raw / f"{name}.gz").write_bytes(b"no gzip")
    printed = refused(capsys, "prepare", "mnist", "--data_root", str(root))
    assert f"{raw / data.vision.FILES[0]}.gz is damaged or cut short" in printed


# The split that is shown


@pytest.fixture
def drawn(patch: pytest.MonkeyPatch) -> list[View]:
    """What is shown instead of drawn: pictures take a second."""
    views: list[View] = []

    def keep(view: View) -> Figure:
        views.append(view)
        return Figure(figsize=(1, 1))

    patch.setattr(datacmd, "draw", keep)
    return views


def view_of(drawn: list[View], capsys: pytest.CaptureFixture[str], *arguments: str) -> View:
    said(capsys, "show", *arguments)
    return drawn.pop()


@pytest.mark.parametrize(
    "options",
    [
        ["--split", "iid", "--clients", "7"],
        ["--split", "classes", "--clients", "9", "--skew.classes", "2", "--seed", "5"],
        ["--split", "classes", "--clients", "6"],
        ["--split", "dirichlet", "--clients", "50", "--skew.alpha", "0.3"],
        ["--split", "quantity", "--clients", "12", "--skew.beta", "2"],
        ["--split", "natural", "--clients", "8"],
    ],
)
def test_the_split_is_that_of_train(options: list[str], drawn: list[View], capsys: pytest.CaptureFixture[str]) -> None:
    view = view_of(drawn, capsys, "tiny", *options)
    cfg = prepare(parse(["--data", "tiny", "--cohort", "1", *options])).cfg
    arrays, partition, _ = load_data(cfg)
    assert view.clients == cfg.clients and view.labelled
    assert view.counts.tolist() == partition.histogram(arrays.y.numpy(), 3).tolist()
    assert view.title.startswith(f"tiny, split {cfg.split}") and view.title.endswith(f", seed {cfg.seed}")


def test_the_papers_number_of_classes_is_used(
    patch: pytest.MonkeyPatch, drawn: list[View], capsys: pytest.CaptureFixture[str]
) -> None:
    patch.setitem(data.DATASETS, "tiny", replace(data.DATASETS["tiny"], classes=3))
    view = view_of(drawn, capsys, "tiny", "--clients", "5")
    assert (view.counts > 0).sum(axis=1).tolist() == [3] * 5 and "(3 per client)" in view.title


@pytest.mark.parametrize(
    ("split", "skew", "words"),
    [
        ("iid", Skew(), "iid"),
        ("classes", Skew(classes=4, noise=0.1), "classes (4 per client, 10% from others)"),
        ("mixed", Skew(), "mixed (2 per client)"),
        ("dirichlet", Skew(alpha=0.5), "dirichlet (alpha 0.5)"),
        ("quantity", Skew(beta=0.25), "quantity (beta 0.25)"),
        ("natural", Skew(), "natural"),
        ("natural", Skew(owners="merge"), "natural (owners merged)"),
    ],
)
def test_a_split_is_labelled_by_its_own_numbers(split: str, skew: Skew, words: str) -> None:
    assert datacmd.described(Config(split=split, skew=skew)) == words


def test_rows_are_samples_of_the_first_clients_and_then_of_the_test_set(
    drawn: list[View], capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--split", "natural", "--clients", "20"]
    view = view_of(drawn, capsys, "tiny", *options, "--samples", "4")
    arrays, partition, _ = load_data(prepare(parse(["--data", "tiny", "--cohort", "1", *options])).cfg)
    assert [row.label for row in view.rows] == [*(f"client {c}" for c in range(8)), "test set"]
    for cid, row in enumerate(view.rows):
        pool, labels = (arrays.test_x, arrays.test_y) if cid == 8 else (arrays.x, arrays.y)
        mine = torch.arange(60) if cid == 8 else torch.from_numpy(partition.of(cid))
        found = [int(next(i for i in mine if torch.equal(pool[i], image))) for image in row.content]
        assert len(set(found)) == 4
        assert labels[found].tolist() == sorted(labels[found].tolist())
    assert [len(row.content) for row in view_of(drawn, capsys, "tiny", *options).rows] == [8] * 9
    assert len(view_of(drawn, capsys, "tiny", "--split", "iid", "--clients", "3").rows) == 4


def test_a_client_with_few_samples_shows_them_all(drawn: list[View], capsys: pytest.CaptureFixture[str]) -> None:
    view = view_of(drawn, capsys, "tiny", "--split", "iid", "--clients", "40", "--samples", "12")
    assert [len(row.content) for row in view.rows] == [5] * 8 + [12]


def test_images_are_shown_as_the_model_sees_them(
    patch: pytest.MonkeyPatch, drawn: list[View], capsys: pytest.CaptureFixture[str]
) -> None:
    """Style 0 turns ink red and style 1 green; clients have one each, and the test set has style 2, blue."""

    def paint(grey: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        return grey * rows[:, :, None, None]

    styles = Styles(3, torch.eye(3), paint, lambda y, client, n, *_: client % 2, lambda y, _: np.full(len(y), 2))
    coloured = replace(tiny(), styles=styles, mean=(0.5,) * 3, std=(0.5,) * 3)
    patch.setitem(data.DATASETS, "tiny", replace(data.DATASETS["tiny"], load=lambda root: coloured))
    view = view_of(drawn, capsys, "tiny", "--split", "iid", "--clients", "4")
    for row, channel in zip(view.rows, (0, 1, 0, 1, 2), strict=True):
        assert isinstance(row.content, torch.Tensor) and row.content.dtype == torch.uint8
        bright = row.content.float().mean(dim=(0, 2, 3))
        assert bright[channel] > 40 and bright.sum() == bright[channel], row.label


def test_a_short_summary_is_printed(capsys: pytest.CaptureFixture[str], drawn: list[View]) -> None:
    lines = said(capsys, "show", "tiny", "--clients", "7", "--skew.classes", "2", "--out", "p.png").splitlines()
    view = drawn[0]
    sizes = view.counts.sum(axis=1)
    used = f"7 clients have {sizes.sum()} of 200 train samples; 60 test samples, 3 classes"
    assert lines[0] == f"tiny, split classes (2 per client): {used}"
    spread = f"min {sizes.min()}, median {np.median(sizes):.0f}, max {sizes.max()}"
    assert lines[1] == f"samples per client: {spread}; classes per client: mean 2.0"
    assert lines[2:] == ["wrote p.png"]


def test_beyond_400_clients_the_first_are_shown() -> None:
    partition = Partition(np.arange(1001), np.arange(1000)[::-1])
    counts = datacmd.counted(partition, np.arange(1000) % 7, 7)
    assert counts.argmax(axis=1).tolist() == [(999 - cid) % 7 for cid in range(LISTED)]
    assert counts.shape == (LISTED, 7) and counts.sum() == LISTED
    assert datacmd.counted(partition, None, 1).tolist() == [[1]] * LISTED


# Kinds of data


def text_data(root: Path | None = None) -> Arrays:
    """Windows of a text, whose letters tell where they begin."""
    x = torch.from_numpy(np.stack([shakespeare.encode(chr(97 + i % 26) * 40 + "\n" + "z" * 39) for i in range(60)]))
    y = torch.arange(60) + 10
    y[::6] = 1  # a space
    return Arrays("shakespeare", 80, x, y, x[:5], y[:5], tokens=80, owner=torch.arange(60) % 6)


def test_texts_are_shown_as_lines_with_the_letter_that_follows(
    patch: pytest.MonkeyPatch, drawn: list[View], capsys: pytest.CaptureFixture[str]
) -> None:
    patch.setitem(data.DATASETS, "shakespeare", replace(data.DATASETS["tiny"], load=text_data, model="gru"))
    view = view_of(drawn, capsys, "shakespeare", "--split", "natural", "--clients", "6")
    assert [(row.label, len(row.content)) for row in view.rows] == [(f"client {c}", 3) for c in range(6)] + [
        ("test set", 3)
    ]
    arrays = text_data()
    for cid, row in enumerate(view.rows[:-1]):
        mine = range(cid, 60, 6)
        known = {f"{chr(97 + i % 26) * 40}↵{'z' * 39} → {shakespeare.ALPHABET[arrays.y[i]]}" for i in mine if cid}
        known |= {f"{chr(97 + i % 26) * 40}↵{'z' * 39} → ␣" for i in mine if not cid}
        assert set(row.content) <= known and len(set(row.content)) == 3
    assert view.counts.shape == (6, 80)


class Plain(torch.utils.data.Dataset[Any]):
    """A map-style Dataset with random noise in its images."""

    def __init__(self, count: int, shape: tuple[int, ...] = (3, 4, 6), broken: int = -1) -> None:
        self.count, self.shape, self.broken = count, shape, broken

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        if i == self.broken:
            raise OSError("the disk is gone")
        return torch.full(self.shape, i % 5 * 40, dtype=torch.uint8) + torch.randint(9, (1,)).to(torch.uint8), i % 5


OWN = """
import torch
from fedmpi.data import Datasets
from test_datacmd import Plain

def pictures(): return Plain(50), Plain(10)
def layers(): return Plain(50, (2, 4, 6)), Plain(10, (2, 4, 6))
def broken(): return Datasets(Plain(50, broken=49), Plain(10), labels=[i % 5 for i in range(50)])
def numbers(): return (torch.randn(50, 4), torch.arange(50) % 5), (torch.randn(10, 4), torch.arange(10) % 5)
def measures(): return (torch.randn(50, 4), torch.randn(50)), (torch.randn(10, 4), torch.randn(10))
def tokens(): return (torch.arange(50).view(-1, 1) % 7, torch.arange(50) % 5), (torch.tensor([[1]]), torch.tensor([2]))
"""


@pytest.fixture
def own(tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
    """A module with data of one's own, in the folder where the command is started."""
    (tmp_path / "here" / "own_data_to_show.py").write_text(OWN)


@pytest.mark.usefixtures("own")
def test_own_data_are_shown_as_images_where_they_are_that(
    drawn: list[View], capsys: pytest.CaptureFixture[str]
) -> None:
    ask = ["--split", "iid", "--clients", "5"]
    view, again = (view_of(drawn, capsys, "own_data_to_show:pictures", *ask) for _ in range(2))
    assert [row.content.shape for row in view.rows if isinstance(row.content, torch.Tensor)] == [(8, 3, 4, 6)] * 6
    for mine, same in zip(view.rows, again.rows, strict=True):  # what a transform draws is drawn alike
        assert isinstance(mine.content, torch.Tensor) and isinstance(same.content, torch.Tensor)
        assert torch.equal(mine.content, same.content)
    for name in ("layers", "numbers", "tokens"):
        view = view_of(drawn, capsys, f"own_data_to_show:{name}", *ask)
        assert view.rows == [] and view.labelled and view.counts.shape == (5, 5) and view.counts.sum() == 50
    view = view_of(drawn, capsys, "own_data_to_show:measures", *ask)
    assert view.rows == [] and not view.labelled and view.counts.tolist() == [[10]] * 5
    assert (Path.cwd() / "own_data_to_show-measures-iid.png").exists()


@pytest.mark.usefixtures("own")
def test_own_data_that_cannot_be_read_are_refused(drawn: list[View], capsys: pytest.CaptureFixture[str]) -> None:
    printed = refused(capsys, "show", "own_data_to_show:broken", "--split", "iid", "--clients", "1", "--samples", "24")
    assert re.search(r"reading its train items .*49.* raised OSError: the disk is gone; ", printed)
    printed = refused(capsys, "show", "own_data_to_show:nothing")
    assert "has no 'nothing'" in printed
    assert "goes by class" in refused(capsys, "show", "own_data_to_show:measures", "--clients", "2")


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--clients", "0"], "--clients is 0; it must be at least 1"),
        (["--clients", "many"], "--clients is 'many'; it must be a whole number"),
        (["--seed", "-1"], "--seed is -1; it must be at least 0"),
        (["--samples", "0"], "--samples is 0; it must be in [1, 24]"),
        (["--samples", "25"], "--samples is 25; it must be in [1, 24]"),
        (["--skew.alpha", "0"], "--skew.alpha is 0.0; it must be above 0"),
        (["--skew.noise", "1"], "--skew.noise is 1.0; it must be in [0, 1)"),
        (["--out", "picture.jpg"], "--out is 'picture.jpg'; it must end in .png"),
        (["--out", "no/where.png"], "--out no/where.png: there is no folder no; create it, or give another"),
        (["--out", "folder.png"], "--out folder.png is a folder; give a file in it, such as folder.png/split.png"),
    ],
)
def test_errors_come_before_data_are_loaded(
    options: list[str], message: str, patch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(root: Path | None) -> Arrays:
        raise AssertionError("loaded")

    patch.setitem(data.DATASETS, "tiny", replace(data.DATASETS["tiny"], load=load))
    Path("folder.png").mkdir()
    assert refused(capsys, "show", "tiny", *options) == message


def test_exactly_one_data_set_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(capsys, "show").startswith("data show needs one data set, not 0: ")
    assert refused(capsys, "show", "tiny", "glyphs").startswith("data show needs one data set, not 2: ")


def test_a_split_that_cannot_be_is_refused_in_its_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert "21" in refused(capsys, "show", "tiny", "--split", "natural", "--clients", "21")
    assert not list(Path.cwd().iterdir())


def test_a_picture_that_cannot_be_written_is_refused(
    patch: pytest.MonkeyPatch, drawn: list[View], capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    patch.setattr(Figure, "savefig", full)
    printed = refused(capsys, "show", "tiny", "--clients", "4")
    assert printed == "--out tiny-classes.png cannot be written (No space left on device); name another file"


# The picture


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height of a PNG."""
    head = picture.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">2I", head[16:])
    return width, height


def pixels(figure: Figure) -> Ints:
    """A picture as it is drawn, [height, width, 4]."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).astype(np.int64)


def inside(figure: Figure) -> list[str]:
    """The texts of a picture but for those of ticks, all of which must lie inside of it."""
    pixels(figure)
    texts = [figure._suptitle] if figure._suptitle else []  # type: ignore[attr-defined]
    for axes in (axes for part in figure.subfigs for axes in part.axes):
        legend = axes.get_legend()
        texts += [axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]  # type: ignore[attr-defined]
        texts += legend.get_texts() if legend else []
    shown = [text for text in texts if text.get_text()]
    for text in shown:
        box = text.get_window_extent()
        fits = -1 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 and -1 <= box.y0 and box.y1 <= figure.bbox.y1 + 1
        assert fits, f"{text} at {box} in {figure.bbox}"
    return [text.get_text() for text in shown]


def some_view(clients: int, classes: int, rows: list[Row] | None = None, labelled: bool = True) -> View:
    counts = np.random.default_rng(0).integers(0, 30, (min(clients, LISTED), classes)) + np.eye(1, classes, dtype=int)
    return View("some data, split any, seed 0", counts, clients, labelled, rows or [])


def test_show_writes_a_picture_that_changes_with_the_split(capsys: pytest.CaptureFixture[str]) -> None:
    said(capsys, "show", "tiny", "--clients", "6")
    said(capsys, "show", "tiny", "--clients", "6", "--out", "again.png")
    said(capsys, "show", "tiny", "--clients", "6", "--seed", "1", "--out", "seed.png")
    said(capsys, "show", "tiny", "--clients", "6", "--split", "iid")
    first, again, other, iid = (Path(f"{n}.png") for n in ("tiny-classes", "again", "seed", "tiny-iid"))
    assert first.read_bytes() == again.read_bytes()
    assert len({path.read_bytes() for path in (first, other, iid)}) == 3
    assert size_of(first) == (round((5.7 + 8 * 0.6 + 0.9) * DPI), round((7 * 0.6 + 1.5) * DPI))


def test_train_and_test_pictures_differ_where_their_styles_do() -> None:
    grey = torch.full((2, 1, 4, 4), 200, dtype=torch.uint8)
    red = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    red[:, 0] = 255
    figure = draw(some_view(2, 3, [Row("client 0", red), Row("client 1", red), Row("test set", grey)]))
    drawn = pixels(figure)[:, :, :3].reshape(-1, 3)
    assert (drawn == (255, 0, 0)).all(axis=1).sum() == pytest.approx(2 * (drawn == 200).all(axis=1).sum(), rel=0.1)


def test_images_stand_in_the_row_of_their_client_and_the_test_set_below() -> None:
    shades = [torch.full((3, 1, 6, 6), value, dtype=torch.uint8) for value in (10, 20, 30)]
    labels = ["client 0", "client 1", "test set"]
    figure = draw(some_view(2, 3, [Row(*each) for each in zip(labels, shades, strict=True)]))
    sheet = figure.subfigs[1].axes[0]
    canvas = sheet.get_images()[0].get_array()
    ticks = dict(zip((t.get_text() for t in sheet.get_yticklabels()), sheet.get_yticks(), strict=True))
    for label, value in zip(labels, (10, 20, 30), strict=True):
        line = canvas[int(ticks[label]), :, 0]
        assert sorted(set(line.tolist())) == [value, 255] and (line == value).sum() == 18
    assert ticks["test set"] - ticks["client 1"] > ticks["client 1"] - ticks["client 0"]


def test_a_bar_has_the_lengths_of_its_client_and_the_numbers_of_its_classes() -> None:
    view = View("t", np.array([[30, 0, 10], [5, 5, 5]]), 2, True, [])
    figure = draw(view)
    axes = figure.subfigs[0].axes[0]
    widths = [[bar.get_width() for bar in kind] for kind in axes.containers]
    assert np.array(widths).T.tolist() == view.counts.tolist()
    lefts = [[bar.get_x() for bar in kind] for kind in axes.containers]
    assert np.array(lefts).T.tolist() == [[0, 30, 30], [0, 5, 10]]
    inner = [(t.get_text(), t.get_position()) for t in axes.texts]
    assert ("2", (35.0, 0)) in inner and ("1", (7.5, 1)) in inner and ("1", (30.0, 0)) not in inner
    assert [text for text, _ in inner].count("40") == 1
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # client 0 on top


@pytest.mark.parametrize(
    ("clients", "classes", "bars"), [(BARS, 20, True), (BARS + 1, 10, False), (5, 21, False), (1000, 200, False)]
)
def test_many_clients_or_classes_are_a_heat_map_with_their_sizes(clients: int, classes: int, bars: bool) -> None:
    view = some_view(clients, classes)
    figure = draw(view)
    axes = figure.subfigs[0].axes
    assert bool(axes[0].get_images()) != bars
    if not bars:
        shown = axes[0].get_images()[0].get_array()
        assert shown.filled(0).tolist() == view.counts.tolist()
        sizes = [bar.get_width() for bar in axes[1].patches]
        assert sizes == view.counts.sum(axis=1).tolist()
    head = axes[0].get_title(loc="left")
    assert f"{clients:,} clients, {classes} classes" in head and ("the first 400 of" in head) == (clients > LISTED)


@pytest.mark.parametrize("clients", [3, 60])
def test_sizes_alone_are_shown_where_there_are_no_classes(clients: int) -> None:
    view = some_view(clients, 1, labelled=False)
    axes = draw(view).subfigs[0].axes
    assert len(axes) == 1 and axes[0].get_title(loc="left") == f"{clients} clients"
    assert [bar.get_width() for bar in axes[0].patches] == view.counts[:, 0].tolist()


@pytest.mark.parametrize(
    ("clients", "classes", "rows"),
    [
        (1, 2, []),
        (40, 20, [Row("client 0", torch.zeros(8, 1, 28, 28, dtype=torch.uint8))] * 9),
        (400, 10, [Row("client 0", torch.zeros(24, 3, 64, 64, dtype=torch.uint8))] * 9),
        (1000, 200, [Row("test set", ["M" * 80 + " → M"] * 6)] * 9),
    ],
)
def test_everything_fits_into_the_picture(clients: int, classes: int, rows: list[Row]) -> None:
    view = some_view(clients, classes, rows)._replace(title=f"{'a.very.long.name' * 4}, split any, seed 0")
    texts = inside(draw(view))
    assert "client" in texts and any(text.startswith("samples") for text in texts)


def test_text_is_drawn_as_it_is() -> None:
    rows = [Row("client 0", ["what $\\frac$ it? → x"]), Row("test set", ["x → y"])]
    figure = draw(some_view(2, 3, rows))
    assert "what $\\frac$ it? → x" in inside(figure)


def test_one_count_everywhere_can_be_drawn() -> None:
    for count in (1, 7, 5000):
        inside(draw(View("t", np.full((50, 3), count), 50, True, [])))


# Real data


def test_real_digits_are_shown_from_a_folder_that_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shared_data() / "mnist"
    need("data", (folder / "MNIST" / "raw").is_dir(), f"no MNIST/raw is in {folder}")
    before = everything(folder)
    root = tmp_path / "root"
    root.mkdir()
    (root / "MNIST").symlink_to(folder / "MNIST")
    out = said(capsys, "show", "mnist", "--data_root", str(root), "--split", "dirichlet", "--clients", "300")
    assert "300 clients have 60,000 of 60,000 train samples; 10,000 test samples, 10 classes\n" in out
    assert size_of(Path("mnist-dirichlet.png")) == (1710, 1035)
    assert everything(folder) == before


# The benchmark of memory


@pytest.mark.processes
@pytest.mark.timeout(400)
def test_ranks_that_map_the_data_hold_them_once_and_copies_hold_them_each(tmp_path: Path) -> None:
    need("proc", os.path.exists("/proc/self/smaps_rollup"), "there is no /proc/self/smaps_rollup to read")
    command = [sys.executable, str(REPO / "benchmarks" / "memory.py"), "--data", "glyphs", "--ranks", "2", "--json"]
    place = {"FEDMPI_CACHE": str(tmp_path / "cache"), "FEDMPI_OFFLINE": "1"}
    done = subprocess.run(command, env=rank_environment() | place, capture_output=True, text=True, timeout=380)
    assert done.returncode == 0, done.stderr
    *ways, ratio = map(json.loads, done.stdout.splitlines())
    imported, mapped, copied = ways
    assert [row["way"] for row in ways] == ["import", "map", "copy"]
    size = mapped["file_bytes"]
    assert size > 50e6
    assert all(rss > 0.95 * size for rss in mapped["file_rss_bytes"])
    assert sum(mapped["file_pss_bytes"]) <= 1.2 * size
    assert sum(imported["file_rss_bytes"]) == sum(copied["file_rss_bytes"]) == 0
    assert copied["node_bytes"] - imported["node_bytes"] > 1.8 * size
    assert mapped["node_bytes"] - imported["node_bytes"] < 1.4 * size
    assert ratio["copy_to_map_data_alone"] > 1.4 and ratio["copy_to_map"] > 1


def test_the_benchmark_of_memory_says_what_is_missing(root: Path) -> None:
    command = [sys.executable, str(REPO / "benchmarks" / "memory.py"), "--data_root", str(root)]
    done = subprocess.run(
        command, env=rank_environment() | {"FEDMPI_OFFLINE": "1"}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"fedmpi: data set 'cifar10' is not under {root}") and done.stderr.count("\n") == 1

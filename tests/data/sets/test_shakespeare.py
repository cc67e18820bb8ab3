"""Shakespeare: LEAF's json or plays as text become windows of 80 characters, by role."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import os
import re
import string
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from conftest import REPO, need
from hypothesis import given
from test_leaf import document, put

from fedmpi.data import leaf
from fedmpi.data.arrays import Arrays
from fedmpi.data.objective import NEXT
from fedmpi.data.sets import shakespeare as module
from fedmpi.data.sets.shakespeare import ALPHABET, decode, encode, parse, shakespeare, shakespeare_source
from fedmpi.errors import UserError

DATA = Path(os.environ.get("FEDMPI_TEST_DATA", REPO.parent / "shared" / "data"))


@pytest.fixture(scope="module")
def shared() -> Path:
    """The folder with the real plays."""
    folder = DATA / "shakespeare"
    need("data", (folder / "roles.json.xz").is_file(), f"there are no plays in {folder}")
    return folder


def texts(x: torch.Tensor, y: torch.Tensor, sizes: list[int]) -> list[str]:
    """The texts of which these windows are all, given how many windows each has."""
    found = []
    for samples, labels in zip(x.split(sizes), y.split(sizes), strict=True):
        text = decode(samples[0]) + decode(labels)
        slid = np.lib.stride_tricks.sliding_window_view(encode(text)[:-1], 80)
        assert np.array_equal(samples.numpy(), slid), "each window begins a character later"
        found.append(text)
    return found


def spaced(text: str) -> str:
    """The text with a space for each character that is not in the alphabet."""
    return "".join(letter if letter in ALPHABET else " " for letter in text)


# --- the alphabet


def test_the_alphabet_is_leafs() -> None:
    assert len(ALPHABET) == len(set(ALPHABET)) == 80
    assert set(ALPHABET) == set(string.ascii_letters + string.digits + "\n !\"&'(),-.:;>?[]}")
    assert "".join(sorted(ALPHABET)) == ALPHABET
    assert encode("\n aZ}").tolist() == [0, 1, 53, 50, 79]
    assert encode("A$é\U0001f600\ud800").tolist() == [25, 1, 1, 1, 1]
    assert encode("").dtype == np.uint8


@given(st.text(ALPHABET))
def test_decoding_undoes_encoding(text: str) -> None:
    assert decode(encode(text)) == text
    assert decode(torch.from_numpy(encode(text))) == text


@given(st.text())
def test_what_is_not_in_the_alphabet_becomes_a_space(text: str) -> None:
    assert decode(encode(text)) == spaced(text)
    assert module.foreign(text) == sum(letter not in ALPHABET for letter in text)


# --- speakers and their lines


def test_a_play_is_divided_by_speaker() -> None:
    play = """THE TRAGEDY

HAMLET:
To be, or not to be: that is the question:
Not I:

Enter a ghost, and speaks thus:
this is nobody's

Second  Citizen:
Mark me.
HAMLET:
I will.
Second Citizen:
  Speak; I am bound to hear.
SCENE II:
still the citizen

  OPHELIA:  """
    assert parse(play) == {
        "HAMLET": "To be, or not to be: that is the question:\nNot I:\nI will.",
        "Enter a ghost, and speaks thus": "this is nobody's",
        "Second Citizen": "Mark me.\n  Speak; I am bound to hear.\nSCENE II:\nstill the citizen",
        "OPHELIA": "",
    }


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_ends_of_lines_may_be_those_of_other_systems(end: str) -> None:
    assert parse(end.join(["A:", "one", "two", " ", "three", "B:", "four"])) == {"A": "one\ntwo", "B": "four"}


@pytest.mark.parametrize(
    "text", ["", "\n\n", "Just prose.\nMore: of it.\n", ":\n", "a: b:\n", "ACT I:\n\nSCENE II:\nx"]
)
def test_a_text_without_speakers_has_none(text: str) -> None:
    assert parse(text) == {}


NAMES = ["HAMLET", "FIRST LORD", "1ST WITCH", "Boy", "Second Citizen", "Ghost of King Henry VI"]
LINE = st.text("abc XYZ.:;'$é", min_size=1, max_size=60).map(lambda line: f"x{line}")
SPEECH = st.tuples(st.sampled_from(NAMES), st.lists(LINE, min_size=0, max_size=6), st.integers(0, 2))


@given(st.lists(SPEECH, min_size=1, max_size=12), st.sampled_from(["\n", "\r\n"]))
def test_the_lines_of_a_speaker_are_all_that_was_said(speeches: list[tuple[str, list[str], int]], end: str) -> None:
    page: list[str] = []
    said: dict[str, list[str]] = {}
    for name, lines, blanks in speeches:
        named_before = name in said or name.isupper()
        page += [""] * (blanks if named_before else blanks + 1) + [f"{name}:", *lines]
        said.setdefault(name, []).extend(lines)
    assert parse(end.join(page)) == {name: "\n".join(lines) for name, lines in said.items()}


LONG = st.text(string.ascii_letters + " ,.$", min_size=70, max_size=120).map(lambda line: f"x{line}")


@given(st.lists(st.dictionaries(st.sampled_from(NAMES), LONG, min_size=1), min_size=1, max_size=3))
def test_windows_are_all_of_each_role_and_of_no_two(plays: list[dict[str, str]]) -> None:
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "shakespeare"
        folder.mkdir()
        for i, roles in enumerate(plays):
            speeches = [f"{name}:\n{text}\n" for name, text in roles.items()]
            (folder / f"{i}.txt").write_text("\n".join(speeches), encoding="utf-8")
        long = {f"{i}.txt/{n}": text for i, roles in enumerate(plays) for n, text in roles.items() if len(text) > 80}
        files = shakespeare_source().find(Path(root))
        if len(long) < 2:
            with pytest.raises(UserError, match=rf"too few clients with samples \({len(long)}\)"):
                module.read(files)
            return
        t = module.read(files)
    tests = leaf.draw(sorted(long))
    train = [spaced(text) for name, text in sorted(long.items()) if name not in tests]
    assert texts(t["x"], t["y"], t["owner"].bincount().tolist()) == train
    held = [spaced(text) for name, text in sorted(long.items()) if name in tests]
    assert texts(t["test_x"], t["test_y"], [len(text) - 80 for text in held]) == held


def test_a_role_of_81_characters_is_one_sample_and_80_are_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "shakespeare").mkdir()
    play = "\n\n".join(f"{name}:\n{letter * n}" for name, letter, n in (("A", "a", 81), ("B", "b", 80), ("C", "c", 81)))
    (tmp_path / "shakespeare" / "play.txt").write_text(play)
    with caplog.at_level(logging.INFO, "fedmpi"):
        d = shakespeare(tmp_path)
    assert "alphabet" not in caplog.text
    assert (tuple(d.x.shape), tuple(d.test_x.shape)) == ((1, 80), (1, 80))
    assert sorted([decode(d.y), decode(d.test_y)]) == ["a", "c"]


# --- files


def test_a_role_belongs_to_its_file_packed_or_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "shakespeare").mkdir()
    speech = "x" * 90
    for name, pack in (
        ("a.txt", bytes),
        ("b.txt.gz", gzip.compress),
        ("b.txt.xz", lzma.compress),
        ("c.txt.xz", lzma.compress),
    ):
        content = f"\ufeffHAMLET:\n{speech}{name[0]}ü$\n".encode()
        (tmp_path / "shakespeare" / name).write_bytes(pack(content))
    with caplog.at_level(logging.INFO, "fedmpi"):
        d = shakespeare(tmp_path)
    assert [list(module.roles_of(path)) for path in shakespeare_source().find(tmp_path)] == [["HAMLET"]] * 3
    assert d.owner is not None
    assert d.owner.bincount().tolist() == [13, 13]
    ends = [decode(d.y[9:13]), decode(d.y[22:26]), decode(d.test_y[9:13])]
    assert sorted(ends) == ["xa  ", "xb  ", "xc  "]
    assert "shakespeare: replaced 6 characters outside LEAF's alphabet by spaces" in caplog.messages
    assert any("1 of 3 clients" in message for message in caplog.messages)
    caplog.clear()
    assert torch.equal(shakespeare(tmp_path).x, d.x)
    assert not caplog.records, "logged once, when it was prepared"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("b.txt", b"Just prose.\n", "has no line with a speaker; write 'SPEAKER:' on a line"),
        ("b.txt", b"", "has no line with a speaker"),
        ("b.txt", b"HAMLET:\ncaf\xe9 au lait\n", "is not text in UTF-8"),
        ("b.txt.xz", b"HAMLET:\n", "is damaged or cut short"),
        ("b.txt.xz", lzma.compress(b"HAMLET:\n" * 99)[:-9], "is damaged or cut short"),
        ("b.txt.gz", gzip.compress(b"HAMLET:\n" * 99, mtime=0)[:-9], "is damaged or cut short"),
    ],
)
def test_unsound_texts_are_refused_by_name(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "a.txt").write_text(f"A:\n{'a' * 99}\n\nB:\n{'b' * 99}\n")
    path = tmp_path / "shakespeare" / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        shakespeare(tmp_path)
    assert str(path) in str(caught.value)


def test_leafs_files_come_before_texts(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "a.txt").write_text(f"A:\n{'a' * 99}\n\nB:\n{'b' * 99}\n")
    assert len(shakespeare(tmp_path).y) == 19
    put(tmp_path / "shakespeare/data/train/a.json", document({"r": [("y" * 79 + "z", "!")]}))
    put(tmp_path / "shakespeare/data/test/a.json.gz", document({"q": [("}" * 80, "\n"), ("$" * 80, "$")]}))
    d = shakespeare(tmp_path)
    assert [decode(row) for row in (*d.x, d.y)] == ["y" * 79 + "z", "!"]
    assert [decode(row) for row in (*d.test_x, d.test_y)] == ["}" * 80, " " * 80, "\n "]


def test_leafs_foreign_characters_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "shakespeare/train/a.json", document({"r": [("$" * 2 + "a" * 78, "é")]}))
    put(tmp_path / "shakespeare/test/a.json", document({"q": [("\ud83d" + "b" * 79, "c")]}))
    with caplog.at_level(logging.INFO, "fedmpi"):
        shakespeare(tmp_path)
    assert caplog.messages == ["shakespeare: replaced 4 characters outside LEAF's alphabet by spaces"]


@pytest.mark.parametrize(
    ("sample", "label", "words"),
    [
        ("a" * 79, "b", "'aaa.*, not a string of 80 characters"),
        ("a" * 81, "b", "'aaa.*, not a string of 80 characters"),
        (["a"] * 80, "b", ".*, not a string of 80 characters"),
        ("a" * 80, "", "'', not a string of 1 characters"),
        ("a" * 80, "bc", "'bc', not a string of 1 characters"),
        ("a" * 80, 7, "7, not a string of 1 characters"),
    ],
)
def test_unsound_samples_are_refused_by_file_and_user(tmp_path: Path, sample: Any, label: Any, words: str) -> None:
    path = put(tmp_path / "shakespeare/train/a.json", document({"r": [("a" * 80, "b")], "bad": [(sample, label)]}))
    put(tmp_path / "shakespeare/test/a.json", document({"q": [("a" * 80, "b")]}))
    with pytest.raises(UserError, match=f"user 'bad' has {words}") as caught:
        shakespeare(tmp_path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < len(str(path)) + 300


def test_where_it_belongs_is_said_where_it_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="data set 'shakespeare' is not under .*no place to download") as caught:
        shakespeare(tmp_path)
    for words in ("TalwalkarLab/leaf", f"{tmp_path}/shakespeare/train", f".txt files into {tmp_path}/shakespeare"):
        assert words in str(caught.value)


# --- the real plays


@pytest.fixture(scope="module")
def by_leaf(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Arrays:
    """60 roles in LEAF's layout."""
    root = tmp_path_factory.mktemp("leaf")
    (root / "shakespeare").symlink_to(shared / "leaf")
    return shakespeare(root)


def test_leafs_layout_is_read_whole_and_split_by_role(by_leaf: Arrays) -> None:
    assert (tuple(by_leaf.x.shape), tuple(by_leaf.test_x.shape)) == ((54 * 2340, 80), (6 * 2340, 80))
    assert len(by_leaf.y) + len(by_leaf.test_y) == 116_160 + 24_240
    assert by_leaf.owner is not None
    assert by_leaf.owner.bincount().tolist() == [1936 + 404] * 54
    assert (by_leaf.classes, by_leaf.tokens, by_leaf.kind, by_leaf.goal) == (80, 80, "sequences", NEXT)
    assert (by_leaf.x.dtype, by_leaf.y.dtype) == (torch.uint8, torch.int64)
    assert by_leaf.offers == {"shape": (80,), "tokens": 80, "length": 80, "classes": 80}


def test_leafs_windows_are_the_words_of_their_role(by_leaf: Arrays, shared: Path) -> None:
    said: dict[str, list[str]] = {}
    for part in ("train", "test"):
        (path,) = (shared / "leaf" / part).glob("*.json.xz")
        for name, entry in json.loads(lzma.decompress(path.read_bytes()))["user_data"].items():
            said.setdefault(name, []).extend(x + y for x, y in zip(entry["x"], entry["y"], strict=True))
    tests = set(leaf.draw(sorted(said)))
    for x, y, names in (
        (by_leaf.x, by_leaf.y, sorted(said.keys() - tests)),
        (by_leaf.test_x, by_leaf.test_y, sorted(tests)),
    ):
        wanted = encode("".join(sample for name in names for sample in said[name])).reshape(-1, 81)
        assert np.array_equal(np.column_stack([x.numpy(), y.numpy()]), wanted)


def test_a_space_is_the_most_frequent_letter(by_leaf: Arrays) -> None:
    for y in (by_leaf.y, by_leaf.test_y):
        share = y.bincount(minlength=80) / len(y)
        assert ALPHABET[int(share.argmax())] == " "
        assert 0.18 < float(share.max()) < 0.20
        assert ALPHABET[int(share.argsort()[-2])] == "e"


def test_all_plays_come_back_from_their_windows(shared: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    content = json.loads(lzma.decompress((shared / "roles.json.xz").read_bytes()))
    roles = {user: entry["raw"] for user, entry in content["user_data"].items()}
    plays: dict[str, list[str]] = {}
    for user, text in roles.items():
        play, role = user.split("__")
        plays.setdefault(play, []).append(f"{role}:\n{text}\n")
    assert (len(plays), len(roles), sum(map(len, roles.values()))) == (37, 1338, 4_321_784)
    (tmp_path / "shakespeare").mkdir()
    for play, speeches in plays.items():
        (tmp_path / "shakespeare" / f"{play}.txt").write_text("\n".join(speeches))
    files = shakespeare_source().find(tmp_path)
    read = {f"{path.stem}__{role}": text for path in files for role, text in module.roles_of(path).items()}
    assert read == roles
    with caplog.at_level(logging.INFO, "fedmpi"):
        t = module.read(files)
    assert "replaced 1 characters" in caplog.messages[-1]
    long = {user.replace("__", ".txt/"): spaced(text) for user, text in roles.items() if len(text) > 80}
    tests = set(leaf.draw(sorted(long)))
    assert (len(long), len(tests)) == (1154, 115)
    assert len(t["y"]) + len(t["test_y"]) == sum(len(text) - 80 for text in long.values()) == 4_222_206
    train = [text for name, text in sorted(long.items()) if name not in tests]
    assert texts(t["x"], t["y"], t["owner"].bincount().tolist()) == train
    held = [text for name, text in sorted(long.items()) if name in tests]
    assert texts(t["test_x"], t["test_y"], [len(text) - 80 for text in held]) == held
    assert 0.16 < float((t["y"] == ALPHABET.index(" ")).float().mean()) < 0.165


def test_tinyshakespeare_is_divided_by_speaker(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    path = tmp_path / "shakespeare" / "tinyshakespeare.txt.xz"
    path.symlink_to(shared / path.name)
    whole = lzma.decompress(path.read_bytes()).decode()
    roles = module.roles_of(path)
    speeches = [speech.split("\n", 1) for speech in re.split("\n\n+", whole.strip())]
    wanted: dict[str, list[str]] = {}
    for name, said in ([*speech, ""][:2] for speech in speeches):
        wanted.setdefault(" ".join(name.removesuffix(":").split()), []).append(said)
    assert len(speeches) == 7222 and len(roles) == 308
    assert roles == {name: "\n".join(filter(None, said)) for name, said in wanted.items()}
    d = shakespeare(tmp_path)
    long = Counter({name: len(text) - 80 for name, text in roles.items() if len(text) > 80})
    assert len(d.y) + len(d.test_y) == long.total()
    assert d.owner is not None
    assert (int(d.owner.max()) + 1, len(long)) == (231, 256)

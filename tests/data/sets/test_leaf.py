"""LEAF's json: found, read, split by client, and refused by name where it is not sound."""

from __future__ import annotations

import gzip
import json
import logging
import lzma
import tempfile
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from fedmpi.data import leaf
from fedmpi.errors import UserError

Users = dict[str, list[tuple[list[int], int]]]
"""samples and labels by user"""

PACK = {"": lambda content: content, ".gz": gzip.compress, ".xz": lzma.compress}


def document(users: dict[str, list[tuple[Any, Any]]]) -> dict[str, Any]:
    """What LEAF writes for these users."""
    return {
        "users": list(users),
        "num_samples": [len(samples) for samples in users.values()],
        "user_data": {user: {"x": [x for x, _ in s], "y": [y for _, y in s]} for user, s in users.items()},
    }


def put(path: Path, content: Any) -> Path:
    """Write a json file, packed as its name says."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(PACK[path.suffix if path.suffix in PACK else ""](json.dumps(content).encode()))
    return path


def pairs(x: list[Any], y: list[Any]) -> leaf.Samples:
    """Samples of two bytes."""
    if any(len(sample) != 2 for sample in x):
        raise ValueError("a sample that is no pair")
    return np.array(x, dtype=np.uint8), np.array(y, dtype=np.int64)


def read(base: Path) -> dict[str, torch.Tensor]:
    return leaf.read(leaf.find(base, "toy"), pairs)


def rows(x: torch.Tensor, y: torch.Tensor) -> list[tuple[list[int], int]]:
    """Samples and labels as they were given."""
    return list(zip(x.tolist(), y.tolist(), strict=True))


def user(number: int, samples: int) -> list[tuple[list[int], int]]:
    """Samples that tell whose they are."""
    return [([number, i], number) for i in range(samples)]


# --- which files


def test_files_are_those_of_train_and_then_test_by_name(tmp_path: Path) -> None:
    for name in ("train/b.json", "train/a.json.xz", "train/c.json.gz", "test/a.json", "train/._b.json", "all/d.json"):
        put(tmp_path / "toy" / name, {})
    (tmp_path / "toy" / "train" / "readme.txt").touch()
    (tmp_path / "toy" / "train" / "folder.json").mkdir()
    found = [str(f.relative_to(tmp_path / "toy")) for f in leaf.find(tmp_path, "toy")]
    assert found == ["train/a.json.xz", "train/b.json", "train/c.json.gz", "test/a.json"]
    assert leaf.find(tmp_path, "other") == []


def test_leafs_own_folder_is_found_after_the_short_one(tmp_path: Path) -> None:
    inner = put(tmp_path / "toy" / "data" / "train" / "a.json", {})
    assert leaf.find(tmp_path, "toy") == [inner]
    outer = put(tmp_path / "toy" / "test" / "a.json", {})
    assert leaf.find(tmp_path, "toy") == [outer]


def test_a_file_that_is_there_twice_is_read_once(tmp_path: Path) -> None:
    for name in ("a.json.xz", "a.json", "a.json.gz", "b.json.xz", "b.json.gz"):
        put(tmp_path / "toy" / "train" / name, {})
    assert [f.name for f in leaf.find(tmp_path, "toy")] == ["a.json", "b.json.gz"]


# --- who trains and who tests


def test_a_split_by_user_is_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "toy/train/2.json", document({"ann": user(1, 3)}))
    put(tmp_path / "toy/train/1.json.gz", document({"eve": user(2, 1), "bob": user(3, 2), "nobody": []}))
    put(tmp_path / "toy/test/1.json.xz", document({"zoe": user(5, 2), "cid": user(4, 1)}))
    with caplog.at_level(logging.INFO, "fedmpi"):
        t = read(tmp_path)
    assert rows(t["x"], t["y"]) == user(1, 3) + user(3, 2) + user(2, 1)
    assert t["owner"].tolist() == [0, 0, 0, 1, 1, 2], "in the order of names, nobody left out"
    assert rows(t["test_x"], t["test_y"]) == user(4, 1) + user(5, 2)
    assert [t[k].dtype for k in ("x", "y", "owner")] == [torch.uint8, torch.int64, torch.int64]
    assert not caplog.records


def test_a_user_may_be_spread_over_files(tmp_path: Path) -> None:
    put(tmp_path / "toy/train/1.json", document({"a": user(1, 3)[:1], "b": user(2, 1)}))
    put(tmp_path / "toy/train/2.json", document({"a": user(1, 3)[1:]}))
    put(tmp_path / "toy/test/1.json", document({"c": user(3, 1)}))
    t = read(tmp_path)
    assert rows(t["x"], t["y"]) == user(1, 3) + user(2, 1)
    assert t["owner"].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(("users", "tests"), [(2, 1), (19, 1), (20, 2), (25, 2)])
def test_a_split_by_sample_becomes_one_by_user(
    tmp_path: Path, users: int, tests: int, caplog: pytest.LogCaptureFixture
) -> None:
    whole = {f"u{i:02}": user(i, 4) for i in range(users)}
    put(tmp_path / "toy/train/a.json", document({name: samples[:3] for name, samples in whole.items()}))
    put(tmp_path / "toy/test/a.json", document({name: samples[3:] for name, samples in whole.items()}))
    with caplog.at_level(logging.INFO, "fedmpi"):
        t = read(tmp_path)
    (said,) = caplog.messages
    assert f"{tmp_path / 'toy'}: {tests} of {users} clients" in said
    trained, tested = t["y"].unique().tolist(), t["test_y"].unique().tolist()
    assert len(tested) == tests
    assert sorted(trained + tested) == list(range(users)), "each on one side"
    assert rows(t["x"], t["y"]) == [row for i in trained for row in user(i, 4)], "whole, in order"
    assert rows(t["test_x"], t["test_y"]) == [row for i in tested for row in user(i, 4)]
    assert t["owner"].tolist() == [k for k in range(len(trained)) for _ in range(4)]


def test_one_common_user_is_enough_to_pool(tmp_path: Path) -> None:
    put(tmp_path / "toy/train/a.json", document({"a": user(0, 2), "b": user(1, 1)}))
    put(tmp_path / "toy/test/a.json", document({"b": user(1, 2)[1:], "c": user(2, 1)}))
    t = read(tmp_path)
    sides = [set(t[k].tolist()) for k in ("y", "test_y")]
    assert not sides[0] & sides[1]
    assert sorted([*t["y"].tolist(), *t["test_y"].tolist()]) == [0, 0, 1, 1, 2]


def test_an_empty_user_is_not_common(tmp_path: Path) -> None:
    put(tmp_path / "toy/train/a.json", document({"a": user(0, 2), "b": []}))
    put(tmp_path / "toy/test/a.json", document({"b": user(1, 1), "a": []}))
    t = read(tmp_path)
    assert (t["y"].tolist(), t["test_y"].tolist()) == ([0, 0], [1])


def test_the_draw_is_the_same_for_ever() -> None:
    names = [f"u{i:02}" for i in range(50)]
    assert leaf.draw(names) == ["u13", "u08", "u36", "u21", "u24"]  # results of runs depend on it
    assert leaf.draw(names[:9]) == ["u08"]


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=3)
SAMPLES = st.lists(st.tuples(st.lists(st.integers(0, 255), min_size=2, max_size=2), st.integers(-9, 9)), max_size=4)
FILE = st.tuples(st.sampled_from(["train", "test"]), st.sampled_from(list(PACK)), st.dictionaries(TEXT, SAMPLES))


@given(st.lists(FILE, min_size=1, max_size=6))
def test_every_sample_comes_back_once_with_its_user(files: list[tuple[str, str, Users]]) -> None:
    given: dict[str, Users] = {"train": defaultdict(list), "test": defaultdict(list)}
    with tempfile.TemporaryDirectory() as base:
        for i, (part, packing, users) in enumerate(files):
            put(Path(base) / "toy" / part / f"{i}.json{packing}", document(users))
            for name, samples in users.items():
                if samples:
                    given[part][name] += samples
        everybody = {**given["train"], **given["test"]}
        if not given["train"] or not given["test"] or len(everybody) < 2:
            with pytest.raises(UserError, match="has no json file with a user|too few clients"):
                read(Path(base))
            return
        t = read(Path(base))
    train, test = given["train"], given["test"]
    if both := train.keys() & test.keys():
        pool = {name: given["train"].get(name, []) + given["test"].get(name, []) for name in everybody}
        drawn = leaf.draw(sorted(pool))
        train, test = ({n: s for n, s in pool.items() if (n in drawn) == side} for side in (False, True))
    assert rows(t["x"], t["y"]) == [row for name in sorted(train) for row in train[name]], both
    assert rows(t["test_x"], t["test_y"]) == [row for name in sorted(test) for row in test[name]]
    assert t["owner"].tolist() == [k for k, name in enumerate(sorted(train)) for _ in train[name]]


# --- memory


def test_one_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Noted(dict[str, Any]):
        pass

    alive: list[weakref.ref[Noted]] = []

    def loads(content: bytes) -> Noted:
        assert not [ref for ref in alive if ref() is not None], "the last file is still there"
        found = json.loads(content)
        found["user_data"] = Noted(found["user_data"])
        for name, entry in found["user_data"].items():
            found["user_data"][name] = Noted(entry)
            alive.append(weakref.ref(found["user_data"][name]))
        for noted in (found["user_data"], made := Noted(found)):
            alive.append(weakref.ref(noted))
        return made

    monkeypatch.setattr(leaf, "json", type("json", (), {"loads": staticmethod(loads)}))
    for i in range(3):
        put(tmp_path / f"toy/train/{i}.json", document({f"{i}a": user(i, 2), f"{i}b": user(i, 1)}))
    put(tmp_path / "toy/test/a.json", document({"t": user(9, 1)}))
    assert len(read(tmp_path)["y"]) == 9
    assert len(alive) == 4 * 2 + 3 * 2 + 1


def test_joining_lets_go_of_what_it_has_copied() -> None:
    clients: leaf.Clients = {name: [(np.zeros((2, 1), np.uint8), np.zeros(2, np.int64))] for name in "ab"}
    x, y, owner = leaf.join(clients)
    assert (x.shape, y.shape, owner.tolist(), clients) == ((4, 1), (4,), [0, 0, 1, 1], {})


# --- unsound files


def changed(**change: Any) -> dict[str, Any]:
    """A sound document but for the change; a key set to None is left out."""
    content = document({"ann": user(1, 2), "bob": user(2, 1)}) | change
    return {key: value for key, value in content.items() if value is not None}


ANN, BOB = {"x": [[1, 0], [1, 1]], "y": [1, 1]}, {"x": [[2, 0]], "y": [2]}


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([1], "no list 'users'"),
        (changed(users=None), "no list 'users'"),
        (changed(users="ann"), "no list 'users'"),
        (changed(num_samples=None), "no list 'num_samples'"),
        (changed(user_data=None), "no object 'user_data'"),
        (changed(user_data=[]), "no object 'user_data'"),
        (changed(users=["ann", 3]), "users are not all names"),
        (changed(num_samples=[2]), "2 users and 1 num_samples"),
        (changed(num_samples=[2, 2]), "user 'bob' has 1 x, 1 y and num_samples 2"),
        (changed(user_data={"ann": ANN}), "user 'bob' is in users, but has no user_data"),
        (changed(users=["ann", "ann"], num_samples=[2, 2], user_data={"ann": ANN}), "'ann' is in users, but has no"),
        (changed(users=["ann"], num_samples=[2]), "user_data has 'bob', who is not in users"),
        (changed(user_data={"ann": ANN, "bob": {"x": [[2, 0]]}}), "user 'bob' has no lists 'x' and 'y'"),
        (changed(user_data={"ann": ANN, "bob": [[2, 0]]}), "user 'bob' has no lists"),
        (changed(user_data={"ann": ANN, "bob": BOB | {"x": []}}), "user 'bob' has 0 x, 1 y and num_samples 1"),
        (changed(user_data={"ann": ANN, "bob": BOB | {"x": [[1, 2, 3]]}}), "user 'bob' has a sample that is no pair"),
    ],
)
def test_unsound_content_is_refused_by_name(tmp_path: Path, content: Any, words: str) -> None:
    put(tmp_path / "toy/train/fine.json", changed())
    path = put(tmp_path / "toy/test/broken.json", content)
    with pytest.raises(UserError, match=words) as caught:
        read(tmp_path)
    assert str(caught.value).startswith(f"{path} is not a valid LEAF file: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize("keep", [0, 1, 40, -1])
def test_a_file_that_is_cut_short_is_refused_by_name(tmp_path: Path, packing: str, keep: int) -> None:
    path = put(tmp_path / f"toy/train/broken.json{packing}", changed())
    path.write_bytes(path.read_bytes()[:keep])
    put(tmp_path / "toy/test/fine.json", changed())
    with pytest.raises(UserError, match="cut short") as caught:
        read(tmp_path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("packing", list(PACK))
@pytest.mark.parametrize(
    "content", [b"users: [a]", b"\xff\xfe\xfd\xfc\xfb", b"[" * 100_000], ids=["text", "bytes", "deep"]
)
def test_a_file_that_is_not_json_is_refused_by_name(tmp_path: Path, packing: str, content: bytes) -> None:
    path = put(tmp_path / f"toy/train/broken.json{packing}", {})
    path.write_bytes(PACK[packing](content))
    with pytest.raises(UserError, match="it is not JSON") as caught:
        read(tmp_path)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_packed_as_it_says_is_refused_by_name(tmp_path: Path) -> None:
    path = put(tmp_path / "toy/train/broken.json.xz", {})
    path.write_bytes(b"{}")
    with pytest.raises(UserError, match="broken.json.xz is damaged or cut short"):
        read(tmp_path)


def test_what_leaf_leaves_of_dropped_users_is_no_harm(tmp_path: Path) -> None:
    left = changed()
    left["user_data"]["dropped"] = {"x": [], "y": []}
    put(tmp_path / "toy/train/a.json", left)
    put(tmp_path / "toy/test/a.json", document({"cid": user(3, 1)}))
    assert read(tmp_path)["owner"].tolist() == [0, 0, 1]


@pytest.mark.parametrize("part", ["train", "test"])
def test_half_of_the_data_is_refused_by_the_folder_that_is_missing(tmp_path: Path, part: str) -> None:
    put(tmp_path / "toy" / part / "a.json", changed())
    other = tmp_path / "toy" / ("test" if part == "train" else "train")
    with pytest.raises(UserError, match=f"{other} has no json file with a user who has samples"):
        read(tmp_path)
    put(other / "a.json", document({"nobody": []}))
    with pytest.raises(UserError, match=f"{other} has no json file"):
        read(tmp_path)


def test_one_user_cannot_be_split(tmp_path: Path) -> None:
    for part in ("train", "test"):
        put(tmp_path / f"toy/{part}/a.json", document({"ann": user(1, 2)}))
    with pytest.raises(UserError, match=f"{tmp_path / 'toy'} has too few clients with samples .1.; it needs two"):
        read(tmp_path)

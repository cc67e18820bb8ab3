"""Data sets of Hugging Face: files, folders, columns, splits and tokens, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hub_box import END, LETTERS, POSITIONS, TOKENS, save_tokenizer, spoken, write_rows

from fedmpi.data import Arrays, TextOptions, load
from fedmpi.data.hf import every_tenth
from fedmpi.data.objective import CAUSAL, CLASSIFY, REGRESS
from fedmpi.errors import UserError
from fedmpi.plugins import hub

CODE = {letter: index for index, letter in enumerate([END, *LETTERS])}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what `datasets` prepares away from the user's cache."""
    import datasets
    from huggingface_hub import constants

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "prepared")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    """A tokenizer without a padding token."""
    save_tokenizer(tmp_path / "tokenizer")
    return f"hf:{tmp_path / 'tokenizer'}"


def loaded(name: str, **options: Any) -> Arrays:
    data = load(name, texts=TextOptions(**options))
    assert isinstance(data, Arrays)
    return data


def text_of(ids: torch.Tensor) -> str:
    return "".join(["/", *LETTERS][i] for i in ids.tolist())


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        loaded(name, **options)
    return str(caught.value)


# Texts


def test_texts_without_labels_ask_for_the_next_token(tmp_path: Path, tokenizer: str) -> None:
    data = loaded(
        write_rows(tmp_path / "play.jsonl", spoken()), tokenizer=tokenizer, pad="eos", owner="role", label="none"
    )
    rows = spoken()
    assert data.goal is CAUSAL and data.tokens == TOKENS and (data.samples, data.tests) == (54, 6)
    assert [
        text_of(ids[mask == 1]) for ids, mask in zip(data.x["input_ids"], data.x["attention_mask"], strict=True)
    ] == [row["text"] for i, row in enumerate(rows) if i // 3 % 10 != 9]
    assert torch.equal(data.y == -100, data.x["attention_mask"] == 0)
    assert torch.equal(data.y[data.y != -100].int(), data.x["input_ids"][data.y != -100])
    assert data.owners is not None and np.bincount(data.owners).tolist() == [18, 18, 18]
    assert data.owners[:3].tolist() == [0, 1, 2] and "every tenth row of each client" in data.note


def test_texts_with_labels_are_classified(tmp_path: Path, tokenizer: str) -> None:
    name = write_rows(tmp_path / "play.jsonl", spoken())
    data = loaded(name, tokenizer=tokenizer, pad="eos", label="role", length=6)
    assert data.goal is CLASSIFY and data.kinds == 3 and data.y[:4].tolist() == [0, 1, 2, 0], "by their sorted names"
    assert data.x["input_ids"].shape[1] == 6 and "attention_mask" not in data.x, "all texts are cut to one length"
    numbered = loaded(name, tokenizer=tokenizer, pad="eos", label="long")
    assert numbered.kinds == 2 and numbered.y[:3].tolist() == [1, 1, 0]
    assert "every tenth row of the data" in numbered.note and numbered.tests == 6


def test_a_label_column_is_found_by_its_name_and_numbers_are_regression(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"sentence": f"line {chr(97 + i)}", "label": i / 4} for i in range(20)]
    data = loaded(write_rows(tmp_path / "rows.jsonl", rows), tokenizer=tokenizer)
    assert (
        data.goal is REGRESS and data.y[:3].tolist() == [0.0, 0.25, 0.5] and text_of(data.x["input_ids"][1]) == "line b"
    )


def test_packed_texts_fill_blocks_of_one_client_each(tmp_path: Path, tokenizer: str) -> None:
    rows = spoken(30)
    data = loaded(write_rows(tmp_path / "play.jsonl", rows), tokenizer=tokenizer, pack=True, length=16, owner="role")
    assert data.owners is not None and list(data.x) == ["input_ids"] and torch.equal(data.x["input_ids"].long(), data.y)
    mine = "".join(text_of(ids) for ids in data.x["input_ids"][data.owners == 1])
    whole = "".join(row["text"] + "/" for i, row in enumerate(rows) if row["role"] == "bob" and i // 3 % 10 != 9)
    assert whole.startswith(mine) and len(mine) == len(whole) // 16 * 16, "what is left over is dropped"


def test_a_sample_is_no_longer_than_the_tokenizer_says(tmp_path: Path, tokenizer: str) -> None:
    rows = [{"text": "abcdefghij" * 5} for _ in range(10)]
    assert loaded(write_rows(tmp_path / "rows.jsonl", rows), tokenizer=tokenizer).x["input_ids"].shape[1] == POSITIONS


def test_empty_texts_are_left_out(tmp_path: Path, tokenizer: str) -> None:
    (tmp_path / "play.txt").write_text("\n".join(["abcd", "", "efgh", "x"] * 10))
    data = loaded(f"hf:{tmp_path / 'play.txt'}", tokenizer=tokenizer)
    assert data.samples + data.tests == 20 and {len(ids) for ids in data.x["input_ids"]} == {4}


# Files and splits


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "folder", "disk", "one on disk", "cache", "prepared"])
def test_all_kinds_of_files_have_the_same_texts(kind: str, tmp_path: Path, tokenizer: str) -> None:
    import datasets

    rows = spoken(4)
    made = {name: datasets.Dataset.from_list(part) for name, part in (("train", rows[:-3]), ("validation", rows[-3:]))}
    place = tmp_path / "data"
    with hub.offline():
        if kind == "disk":
            datasets.DatasetDict(made).save_to_disk(place)
        elif kind == "one on disk":
            datasets.Dataset.from_list(rows * 4).save_to_disk(place)
        elif kind == "prepared":  # as `datasets` keeps what it has made of a downloaded data set
            datasets.load_dataset("json", data_files=write_rows(tmp_path / "rows.jsonl", rows * 4)[3:])
            (made_of,) = (path for path in (tmp_path / "prepared" / "json").glob("*/0.0.0/*") if path.is_dir())
            place = tmp_path / "prepared" / "me___plays" / "default" / "0.0.0" / "abc"
            place.parent.mkdir(parents=True)
            made_of.rename(place)
            (place / "json-train.arrow").rename(place / "plays-train.arrow")
            about = json.loads((place / "dataset_info.json").read_text())
            about |= {"builder_name": "plays", "dataset_name": "plays"}
            (place / "dataset_info.json").write_text(json.dumps(about))
        elif kind in ("folder", "cache"):
            if kind == "cache":
                kept = tmp_path / "cache" / "datasets--me--plays"
                place = kept / "snapshots" / "abc"
                (kept / "refs").mkdir(parents=True)
                (kept / "refs" / "main").write_text("abc")
            for name, part in made.items():
                write_rows(place / f"{name}.jsonl", list(part))
        else:
            place = tmp_path / f"rows.{kind}"
            whole = datasets.Dataset.from_list(rows * 4)
            {"jsonl": whole.to_json, "csv": whole.to_csv, "parquet": whole.to_parquet}[kind](place)
    data = loaded(
        "hf:me/plays" if kind in ("cache", "prepared") else f"hf:{place}",
        tokenizer=tokenizer,
        pad="eos",
        label="none",
        column="text",
    )
    first = data.x["input_ids"][0][data.x["attention_mask"][0] == 1]
    assert text_of(first) == rows[0]["text"]
    split = kind in ("disk", "folder", "cache")
    assert (data.samples, data.tests) == ((9, 3) if split else (44, 4)) and (data.note == "") == split


def test_every_tenth_row_of_each_owner_is_held_out() -> None:
    owner = np.array([0] * 10 + [1] * 9 + [0] * 10 + [2] * 21)
    held = every_tenth(owner)
    assert np.flatnonzero(held).tolist() == [9, 28, 38, 48]


def test_tokens_are_used_as_they_are(tmp_path: Path, tokenizer: str) -> None:
    rows: list[dict[str, Any]] = [{"input_ids": [1, 2, 3, 4][: 2 + i % 3], "who": i % 2} for i in range(20)]
    data = loaded(write_rows(tmp_path / "a.jsonl", rows), owner="who")
    assert data.goal is CAUSAL and data.tokens == 5 and data.y[0].tolist() == [1, 2, -100, -100]
    prompts = [{**row, "labels": [-100, *row["input_ids"][1:]]} for row in rows]
    data = loaded(write_rows(tmp_path / "b.jsonl", prompts))
    assert (
        data.goal is CAUSAL
        and data.y[2].tolist() == [-100, 2, 3, 4]
        and data.x["attention_mask"][1].tolist() == [1, 1, 1, 0]
    )
    named = [{**row, "label": i % 3} for i, row in enumerate(rows)]
    data = loaded(write_rows(tmp_path / "c.jsonl", named))
    assert data.goal is CLASSIFY and data.kinds == 3
    assert "no padding token" in refusal(write_rows(tmp_path / "d.jsonl", named), tokenizer=tokenizer)


# What is refused


def test_wrong_data_are_refused_with_what_is_there(tmp_path: Path, tokenizer: str) -> None:
    name = write_rows(tmp_path / "play.jsonl", spoken())
    options = {"tokenizer": tokenizer}
    assert refusal(name, **options, owner="speaker").startswith(
        f"--skew.owner is 'speaker', and '{name}' has no such column; it has text, role"
    )
    assert "--text.label is 'kind'" in refusal(name, **options, label="kind")
    assert "--text.column is 'body'" in refusal(name, **options, column="body")
    assert "--text.test is 'dev', and" in refusal(name, **options, test="dev")
    assert "1 in row 0 of 'long'; it needs a text in every row" in refusal(name, **options, column="long")
    assert "has no padding token, and a batch of texts of different lengths needs one; give" in refusal(name, **options)
    assert "there is no tokenizer for them" in refusal(name)
    assert "the texts are labelled by 'role'" in refusal(name, **options, label="role", pack=True)
    few = write_rows(tmp_path / "few.jsonl", spoken(2))
    assert "no test split; it needs 10 rows, or a split" in refusal(few, **options)
    assert "no test split; it needs an owner with 10 rows" in refusal(few, **options, owner="role")
    assert "for a block" in refusal(write_rows(tmp_path / "b.jsonl", [{"text": "ab"}] * 10), **options, pack=True)
    two = write_rows(tmp_path / "two.jsonl", [{"a": "x", "b": "y"}] * 10)
    assert "texts in a, b; it needs one column of texts, named by --text.column" in refusal(two, **options)
    mixed = write_rows(tmp_path / "mixed.jsonl", [{"text": "ab", "label": "x" if i else None} for i in range(10)])
    assert "labels of NoneType and str in 'label'" in refusal(mixed, **options)
    gap = write_rows(tmp_path / "gap.jsonl", [{"text": "ab", "who": "x" if i else None} for i in range(10)])
    assert "values of NoneType and str in --skew.owner who" in refusal(gap, **options, owner="who")


def test_data_that_are_not_there_are_refused_at_once(tmp_path: Path, tokenizer: str) -> None:
    assert f"there is no folder '{tmp_path}/none'" in refusal(f"hf:{tmp_path}/none", tokenizer=tokenizer)
    said = refusal("hf:imdb", tokenizer=tokenizer)
    assert "is neither a folder here nor in the cache" in said and "hf download --repo-type dataset imdb" in said
    (tmp_path / "empty").mkdir()
    assert "cannot be loaded: EmptyDatasetError" in refusal(f"hf:{tmp_path}/empty", tokenizer=tokenizer)
    (tmp_path / "a.pdf").touch()
    assert "is no file of .json" in refusal(f"hf:{tmp_path}/a.pdf", tokenizer=tokenizer)

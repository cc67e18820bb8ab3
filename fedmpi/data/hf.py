"""Texts of Hugging Face data sets (`--data hf:NAME_OR_FOLDER`), as tokens in memory.

A data set is a folder that `save_to_disk` wrote, a file or a folder of json, csv, parquet or text files, or a name in
the user's cache. A column of texts is tokenised with the model's tokenizer: with a column of labels for classification,
without one for the next token, where labels repeat the tokens and padding is ignored. Columns that hold tokens already
(`input_ids`, with `labels` or not) are used as they are.

The test set is the split `test`, else `validation`, `valid`, `dev` or `eval`. If there is none, every tenth row of each
client is held out, or of the whole data if no column names the clients.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedmpi.data.arrays import Arrays, Ints
from fedmpi.data.objective import CAUSAL, usual
from fedmpi.data.trees import IGNORE, label_of
from fedmpi.errors import UserError
from fedmpi.plugins import hub

log = logging.getLogger("fedmpi")

TESTS = ("test", "validation", "valid", "dev", "eval")  # names of a test split, the first that is there
KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text"}
IDS, MASK = "input_ids", "attention_mask"
INPUTS = (IDS, MASK, "token_type_ids")  # columns of tokens that go to the model
LENGTH = 128  # tokens of a sample, unless --text.length says otherwise
TENTH = 10
NONE = "none"  # --text.label: predict the next token, although there are labels


@dataclass(frozen=True)
class TextOptions:
    """The options --text.* and --skew.owner."""

    tokenizer: str | None = None  # or the model whose tokenizer is used
    column: str | None = None
    label: str | None = None
    test: str | None = None
    length: int | None = None
    pack: bool = False
    pad: str | None = None
    owner: str | None = None


@dataclass(frozen=True)
class Rows:
    """Train or test rows: the numbers of each by name, their labels (None: the next token), and who owns them."""

    columns: Mapping[str, list[Any]]
    labels: list[Any] | None
    owner: Ints

    def __len__(self) -> int:
        return len(self.columns[IDS])

    def only(self, keep: npt.NDArray[Any]) -> Rows:
        """Return some of the rows, by a mask."""
        chosen = np.flatnonzero(keep).tolist()
        columns = {name: [column[i] for i in chosen] for name, column in self.columns.items()}
        labels = None if self.labels is None else [self.labels[i] for i in chosen]
        return Rows(columns, labels, self.owner[keep])


class TextSource:
    """The data set of that name, read as the options say."""

    def __init__(self, name: str, options: TextOptions) -> None:
        self.name, self.options = name, options
        self.train, self.test = read_splits(name, options.test)
        self.columns: list[str] = list(self.train.column_names)
        self.tokenised = IDS in self.columns
        label = label_of(dict.fromkeys(self.columns)) if options.label is None else options.label
        self.label = None if label == NONE else label
        named = {"--skew.owner": options.owner, "--text.label": self.label, "--text.column": options.column}
        for option, column in named.items():
            self.check_column(option, column)
        if self.test is not None and (lacks := [c for c in self.used() if c not in self.test.column_names]):
            raise self.refuse(f"no column '{lacks[0]}' in its test split", "the same columns in both")
        if options.pack and (self.label is not None or self.tokenised):
            what = "have tokens already" if self.tokenised else f"are labelled by '{self.label}'"
            raise UserError(f"--text.pack is true, and the texts {what}; leave it out, or add --text.label none")
        self.tokenizer = None if options.tokenizer is None else hub.load_tokenizer(options.tokenizer)
        if self.tokenizer is None and not self.tokenised:
            raise UserError(
                f"data set '{name}' has texts, and there is no tokenizer for them; give --text.tokenizer hf:FOLDER, or "
                "--model hf:FOLDER with its own"
            )

    def refuse(self, given: str, valid: str) -> UserError:
        """Return the error for invalid data."""
        return UserError(f"data set '{self.name}' has {given}; it needs {valid}")

    def check_column(self, option: str, column: str | None) -> None:
        """Refuse a column that is not there."""
        if column is not None and column not in self.columns:
            there = ", ".join(self.columns)
            raise UserError(f"{option} is '{column}', and '{self.name}' has no such column; it has {there}")

    def used(self) -> list[str]:
        """Return the columns that are read of train and test rows."""
        inputs = [c for c in INPUTS if c in self.columns] if self.tokenised else [self.text_column()]
        return inputs + ([] if self.label is None else [self.label])

    def text_column(self) -> str:
        """Return the column of the texts."""
        if self.options.column is not None:
            return self.options.column
        texts = [name for name, kind in self.train.features.items() if getattr(kind, "dtype", "") in STRINGS]
        texts = [name for name in texts if name not in (self.options.owner, self.label)]
        if "text" in texts or len(texts) == 1:
            return "text" if "text" in texts else texts[0]
        found = f"texts in {', '.join(texts)}" if texts else f"no texts in {', '.join(self.columns)}"
        raise self.refuse(found, "one column of texts, named by --text.column")

    @property
    def length(self) -> int:
        """Return the largest number of tokens of a sample."""
        most = getattr(self.tokenizer, "model_max_length", LENGTH)
        return self.options.length or min(LENGTH, int(most))

    def rows(self, table: Any) -> Rows:
        """Return the rows of a split, as tokens."""
        labels = None if self.label is None else list(table[self.label])
        owner = np.zeros(len(table), dtype=np.int64)
        if self.options.owner is not None and table is self.train:
            owner = self.numbered(list(table[self.options.owner]), f"--skew.owner {self.options.owner}")
        if self.tokenised:
            return Rows({c: list(table[c]) for c in INPUTS if c in self.columns}, labels, owner)
        column = self.text_column()
        texts = list(table[column])
        if odd := [i for i, text in enumerate(texts) if not isinstance(text, str)]:
            raise self.refuse(f"{texts[odd[0]]!r:.40} in row {odd[0]} of '{column}'", "a text in every row")
        whole = {"add_special_tokens": False} if self.options.pack else {"truncation": True, "max_length": self.length}
        assert self.tokenizer is not None, "checked above"
        tokens = self.tokenizer(texts, **whole, verbose=False)[IDS]
        found = Rows({IDS: tokens}, labels, owner)
        if self.options.pack:
            return found
        least = 1 if labels is not None else 2  # of one token there is no next
        keep = np.asarray([len(one) >= least for one in tokens], dtype=bool)
        if not keep.all():
            log.info("'%s': left out %d texts of fewer than %d tokens", self.name, int((~keep).sum()), least)
        return found.only(keep)

    def numbered(self, values: list[Any], option: str) -> Ints:
        """Return the index of each value among the sorted ones."""
        try:
            names = {value: index for index, value in enumerate(sorted(set(values)))}
        except TypeError:
            kinds = sorted({type(value).__name__ for value in values})
            raise self.refuse(f"values of {' and '.join(kinds)} in {option}", "numbers or texts") from None
        return np.asarray([names[value] for value in values], dtype=np.int64)

    def packed(self, rows: Rows) -> Rows:
        """Return the texts of each owner one after another, in blocks of one length; what is left over is dropped."""
        assert self.tokenizer is not None, "checked above"
        end = [] if self.tokenizer.eos_token_id is None else [self.tokenizer.eos_token_id]
        blocks: list[Any] = []
        owner: list[int] = []
        for number in np.unique(rows.owner).tolist():
            mine = [rows.columns[IDS][i] for i in np.flatnonzero(rows.owner == number).tolist()]
            joined = np.asarray([token for text in mine for token in [*text, *end]], dtype=np.int64)
            count = len(joined) // self.length
            blocks += list(joined[: count * self.length].reshape(count, self.length))
            owner += [number] * count
        return Rows({IDS: blocks}, None, np.asarray(owner, dtype=np.int64))

    def arrays(self) -> Arrays:
        """Return the data set in memory."""
        train, note = self.rows(self.train), ""
        if self.test is not None:
            test = self.rows(self.test)
        else:
            held = every_tenth(train.owner)
            if not held.any():
                least = f"an owner with {TENTH} rows, or" if self.options.owner else f"{TENTH} rows, or"
                raise self.refuse("no test split", f"{least} a split or file named {' or '.join(TESTS[:2])}")
            train, test = train.only(~held), train.only(held)
            whose = "each client" if self.options.owner else "the data"
            note = f"no test split: every tenth row of {whose} is held out"
        if self.options.pack:
            train, test = self.packed(train), self.packed(test)
        if not len(train) or not len(test):
            part = "test" if len(train) else "train"
            least = f"{self.length} tokens in all, for a block" if self.options.pack else "two tokens or more"
            raise self.refuse(f"no {part} sample", f"texts of {least}")
        (x, y), (test_x, test_y) = self.tensors(train, test)
        owner = None
        if self.options.owner is not None:
            owner = torch.from_numpy(np.unique(train.owner, return_inverse=True)[1].astype(np.int64))
        goal = CAUSAL if train.labels is None else usual(first(x), y[0])
        most = max(int(t.max()) for t in (x[IDS], test_x[IDS])) + 1
        tokens = most if self.tokenizer is None else max(most, len(self.tokenizer))
        classes = 0
        if goal is CAUSAL:
            classes = tokens
        elif not y.is_floating_point():
            known = getattr(self.train.features[self.label], "num_classes", 0)
            classes = max(int(y.max()) + 1, int(test_y.max()) + 1, known or 0)
        return Arrays(self.name, classes, x, y, test_x, test_y, owner=owner, tokens=tokens, objective=goal, note=note)

    def tensors(self, *parts: Rows) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Return inputs and labels of each part, padded to the longest sample of all."""
        lengths = {len(row) for part in parts for row in part.columns[IDS]}
        longest, fill = max(lengths), {name: 0 for name in INPUTS}
        if len(lengths) > 1 and self.tokenizer is not None and self.options.tokenizer is not None:
            why = "a batch of texts of different lengths"
            fill[IDS] = hub.padding(self.tokenizer, self.options.tokenizer, self.options.pad, why)
        made = []
        for part, labels in zip(parts, self.numbers([part.labels for part in parts], longest), strict=True):
            x = {name: filled(column, longest, fill[name]).int() for name, column in part.columns.items()}
            if len(lengths) > 1 and MASK not in x:
                x[MASK] = filled([[1] * len(row) for row in part.columns[IDS]], longest, 0).to(torch.int8)
            made.append((x, filled(part.columns[IDS], longest, IGNORE) if labels is None else labels))
        return made

    def numbers(self, parts: list[Any], longest: int) -> list[Tensor | None]:
        """Return the labels of train and test rows: classes by their sorted names, numbers as they are, or one per
        token."""
        if self.label is None:
            return [None for _ in parts]
        values = [value for part in parts for value in part]
        if isinstance(values[0], Sequence) and not isinstance(values[0], str):
            if not self.tokenised:
                raise self.refuse(f"lists in '{self.label}'", "one label per text: tokenise the texts, or rename it")
            return [filled(part, longest, IGNORE) for part in parts]
        kinds = {type(value) for value in values}
        if kinds == {str}:
            made = torch.from_numpy(self.numbered(values, f"--text.label {self.label}"))
        elif kinds <= {int, bool}:
            made = torch.as_tensor(values, dtype=torch.int64)
        elif kinds <= {int, float}:
            made = torch.as_tensor(values, dtype=torch.float32)
        else:
            names = " and ".join(sorted(kind.__name__ for kind in kinds))
            raise self.refuse(f"labels of {names} in '{self.label}'", "texts, whole numbers or numbers in every row")
        return list(torch.split(made, [len(part) for part in parts]))


STRINGS = ("string", "large_string")  # types of columns


def load_hub(name: str, options: TextOptions) -> Arrays:
    """Load the data set of that name."""
    return TextSource(name, options).arrays()


def read_splits(name: str, wanted: str | None) -> tuple[Any, Any]:
    """Return the train split, and the test split that is wanted or there; None if there is none."""
    datasets, what = hub.package("datasets"), f"data set '{name}'"
    place = Path(name.removeprefix(hub.HUB)).expanduser()

    def read() -> Any:
        if place.suffix in KINDS and not place.exists():
            raise UserError(f"{what}: there is no file '{place}'; give one, or a folder of such files")
        if place.is_file():
            if place.suffix not in KINDS:
                raise UserError(f"{what} is no file of {', '.join(KINDS)}; convert it, or give a folder of such files")
            return datasets.load_dataset(KINDS[place.suffix], data_files=str(place))
        if (place / "state.json").exists() or (place / "dataset_dict.json").exists():
            return datasets.load_from_disk(str(place))
        return datasets.load_dataset(hub.find_data(name))

    found = hub.read(what, read)
    splits = dict(found) if isinstance(found, Mapping) else {"train": found}
    if wanted is not None and wanted not in splits:
        raise UserError(f"--text.test is '{wanted}', and {what} has no such split; it has {', '.join(splits)}")
    if "train" not in splits and len(splits) > 1:
        raise UserError(f"{what} has the splits {', '.join(splits)}; one must be named train")
    train = splits.pop("train" if "train" in splits else next(iter(splits)))
    test = next((splits[test] for test in ((wanted,) if wanted else TESTS) if test in splits), None)
    if not len(train) or (test is not None and not len(test)):
        raise UserError(f"{what} has an empty {'test' if len(train) else 'train'} split; it needs rows")
    return train, test


def every_tenth(owner: Ints) -> npt.NDArray[np.bool_]:
    """Return which rows are held out: of each owner every tenth, in their order."""
    order = np.argsort(owner, kind="stable")
    begins = np.r_[True, np.diff(owner[order]) != 0]
    at = np.arange(len(order))
    held = np.zeros(len(owner), dtype=bool)
    held[order] = (at - np.maximum.accumulate(np.where(begins, at, 0))) % TENTH == TENTH - 1
    return held


def filled(rows: Sequence[Sequence[int]], length: int, fill: int) -> Tensor:
    """Return rows of whole numbers as a tensor, filled up to that length."""
    table = np.full((len(rows), length), fill, dtype=np.int64)
    for row, numbers in zip(table, rows, strict=True):
        row[: len(numbers)] = numbers
    return torch.from_numpy(table)


def first(x: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the first sample."""
    return {name: t[0] for name, t in x.items()}

"""Shakespeare: the next character of a role's lines after 80 others, a natural federation of one client a role.

LEAF's own is read where its json files lie in `shakespeare/train` and `shakespeare/test` under a root, or in
`shakespeare/data/...` as in LEAF's repository. Else plays as plain text, `shakespeare/*.txt` (.gz, .xz):

    HAMLET:
    To be, or not to be: that is the question:
    Whether 'tis nobler in the mind to suffer

A speech lasts until a blank line or the next speaker. Verses may end in a colon, too, so a line with a colon is a
speaker's if it is in capitals, or if it follows a blank line here or elsewhere in the file. Lines that are nobody's
(titles, stage directions after a blank line) are left out. A role is a speaker of a file; its lines in order are one
text, and every 81 characters in a row of that text are a sample.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from string import ascii_lowercase, ascii_uppercase, digits
from typing import Any

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from fedmpi.data import leaf
from fedmpi.data.arrays import Arrays
from fedmpi.data.objective import NEXT
from fedmpi.data.store import Source, Tensors, load
from fedmpi.errors import UserError

log = logging.getLogger("fedmpi")

LENGTH = 80  # characters that a model sees
ALPHABET = "\n !\"&'(),-." + digits + ":;>?" + ascii_uppercase + "[]" + ascii_lowercase + "}"  # LEAF's, in its order
SPACE = ALPHABET.index(" ")
BEYOND = 128  # stands for all codes from here on, none of which is in the alphabet
FOREIGN = 255

LETTERS = np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)
TABLE = np.full(BEYOND + 1, FOREIGN, dtype=np.uint8)
TABLE[LETTERS] = np.arange(len(ALPHABET))

SPEAKER = re.compile(r"\s*(?!ACT\b|SCENE\b)([^\s:][^:]*):\s*")


def shakespeare(root: Path | None = None) -> Arrays:
    """The plays as windows of 80 characters and the one that follows, by role."""
    stored = load(shakespeare_source(root), root)
    return stored.arrays("shakespeare", len(ALPHABET), tokens=len(ALPHABET), objective=NEXT)


def shakespeare_source(root: Path | None = None) -> Source:
    """Where Shakespeare comes from."""
    return Source(
        "shakespeare",
        version=1,
        read=read,
        find=lambda base: leaf.find(base, "shakespeare") or leaf.pick(base / "shakespeare", ".txt"),
        wanted="put the json files that LEAF makes (repository TalwalkarLab/leaf, data/shakespeare: ./preprocess.sh -s "
        "niid --sf 1.0 -t user) into {root}/shakespeare/train and {root}/shakespeare/test; or plays as plain text, in "
        "which SPEAKER: stands on a line of its own before each speech, as .txt files into {root}/shakespeare",
    )


def encode(text: str) -> leaf.Bytes:
    """The number of each character in the alphabet; that of a space for one that is not in it."""
    numbers = lookup(text)
    return np.where(numbers == FOREIGN, np.uint8(SPACE), numbers)


def decode(tokens: npt.ArrayLike) -> str:
    """The text that numbers in the alphabet stand for."""
    return LETTERS[np.asarray(tokens, dtype=np.int64)].tobytes().decode("ascii")


def lookup(text: str) -> leaf.Bytes:
    """The number of each character in the alphabet, FOREIGN for one that is not in it."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")  # json may have half a pair
    return np.asarray(TABLE[np.minimum(codes, BEYOND)])


def foreign(text: str) -> int:
    """How many characters are not in the alphabet."""
    return int((lookup(text) == FOREIGN).sum())


def read(files: list[Path]) -> Tensors:
    """The tensors of either source's files."""
    tensors, strange = read_leaf(files) if ".json" in files[0].name else read_plays(files)
    if strange:
        log.info("shakespeare: characters outside LEAF's alphabet, taken for spaces: %d", strange)
    return tensors


def read_leaf(files: list[Path]) -> tuple[Tensors, int]:
    """The tensors of LEAF's files, and how many characters of the samples are foreign."""
    strange = 0

    def convert(x: list[Any], y: list[Any]) -> leaf.Piece:
        nonlocal strange
        for strings, length in ((x, LENGTH), (y, 1)):
            for given in strings:
                if not isinstance(given, str) or len(given) != length:
                    raise ValueError(f"{given!r:.100} where a string of {length} characters belongs")
        before, after = "".join(x), "".join(y)
        strange += foreign(before) + foreign(after)
        return encode(before).reshape(-1, LENGTH), encode(after).astype(np.int64)

    return leaf.read(files, convert), strange


def read_plays(files: list[Path]) -> tuple[Tensors, int]:
    """The tensors of plays as text, and how many characters of their roles are foreign."""
    clients: leaf.Clients = {}
    strange = 0
    for path in files:
        for speaker, text in roles_of(path).items():
            if len(text) > LENGTH:
                clients[f"{path.name}/{speaker}"] = [windows(text)]
                strange += foreign(text)
    return leaf.by_client(clients, files[0].parent), strange


def windows(text: str) -> leaf.Piece:
    """Every 80 characters in a row, and the one after each; as views, which take no memory until they are copied."""
    tokens = encode(text)
    return sliding_window_view(tokens[:-1], LENGTH), tokens[LENGTH:].astype(np.int64)


def roles_of(path: Path) -> dict[str, str]:
    """The text of each role of a file."""
    try:
        text = leaf.content_of(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason}, byte {error.start}); convert it") from error
    roles = parse(text)
    if not roles:
        raise UserError(
            f"{path} has no line with a speaker; write 'SPEAKER:' on a line of its own before each speech, or take the "
            "file away"
        )
    return roles


def parse(text: str) -> dict[str, str]:
    """The text of each speaker of a play: the lines of all speeches in order."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    names = [name_in(line) for line in lines]
    speakers = {name for name, before in zip(names, ["", *lines[:-1]], strict=True) if not before.strip()}
    speaker = ""
    spoken: dict[str, list[str]] = {}
    for line, name in zip(lines, names, strict=True):
        if name and (name in speakers or name.isupper()):
            speaker = name
            spoken.setdefault(name, [])
        elif not line.strip():
            speaker = ""
        elif speaker:
            spoken[speaker].append(line)
    return {name: "\n".join(said) for name, said in spoken.items()}


def name_in(line: str) -> str:
    """The name on a line that could be a speaker's, with single spaces; nothing where it could not."""
    found = SPEAKER.fullmatch(line)
    return " ".join(found[1].split()) if found else ""

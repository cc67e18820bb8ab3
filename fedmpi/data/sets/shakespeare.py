"""Shakespeare: the next character after 80 characters of a role's lines, a natural federation with one client per role.

LEAF's version is read if its json files are in `shakespeare/train` and `shakespeare/test` under a data root, or in
`shakespeare/data/...` as in LEAF's repository. Otherwise plays as plain text, `shakespeare/*.txt` (.gz, .xz):

    HAMLET:
    To be, or not to be: that is the question:
    Whether 'tis nobler in the mind to suffer

A speech ends at a blank line or the next speaker. Verses may end in a colon too, so a line with a colon names a speaker
if it is in capitals, or if it follows a blank line here or elsewhere in the file. Lines without a speaker (titles,
stage directions after a blank line) are left out. A role is a speaker of a file; its lines in order are one text, and
every 81 consecutive characters of that text are a sample.
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
from fedmpi.data.files import unpacked
from fedmpi.data.objective import NEXT
from fedmpi.data.store import Source, Tensors, load
from fedmpi.errors import UserError

log = logging.getLogger("fedmpi")

LENGTH = 80  # input characters of a sample
ALPHABET = "\n !\"&'(),-." + digits + ":;>?" + ascii_uppercase + "[]" + ascii_lowercase + "}"  # LEAF's, in its order
BEYOND = 128  # stands for all codes from 128, none of which is in the alphabet
FOREIGN = 255

LETTERS = np.frombuffer(ALPHABET.encode("ascii"), dtype=np.uint8)
TABLE = np.full(BEYOND + 1, FOREIGN, dtype=np.uint8)
TABLE[LETTERS] = np.arange(len(ALPHABET))

SPEAKER = re.compile(r"\s*(?!ACT\b|SCENE\b)([^\s:][^:]*):\s*")


def shakespeare(root: Path | None = None) -> Arrays:
    """Load the plays as windows of 80 characters and the following one, by role."""
    letters = len(ALPHABET)
    return load(shakespeare_source(root), root).arrays("shakespeare", letters, tokens=letters, objective=NEXT)


def shakespeare_source(root: Path | None = None) -> Source:
    """Return the source of Shakespeare."""
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
    """Return the index of each character in the alphabet; that of a space for foreign characters."""
    numbers = lookup(text)
    return np.where(numbers == FOREIGN, np.uint8(ALPHABET.index(" ")), numbers)


def decode(tokens: npt.ArrayLike) -> str:
    """Return the text of indices into the alphabet."""
    return LETTERS[np.asarray(tokens, dtype=np.int64)].tobytes().decode("ascii")


def lookup(text: str) -> leaf.Bytes:
    """Return the index of each character in the alphabet, FOREIGN for one that is not in it."""
    codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")  # json may have lone surrogates
    return np.asarray(TABLE[np.minimum(codes, BEYOND)])


def foreign(text: str) -> int:
    """Return the number of characters that are not in the alphabet."""
    return int((lookup(text) == FOREIGN).sum())


def read(files: list[Path]) -> Tensors:
    """Return the tensors of either source."""
    tensors, strange = read_leaf(files) if ".json" in files[0].name else read_plays(files)
    if strange:
        log.info("shakespeare: replaced %d characters outside LEAF's alphabet by spaces", strange)
    return tensors


def read_leaf(files: list[Path]) -> tuple[Tensors, int]:
    """Return the tensors of LEAF's files, and the number of foreign characters."""
    strange = 0

    def convert(x: list[Any], y: list[Any]) -> leaf.Samples:
        nonlocal strange
        for strings, length in ((x, LENGTH), (y, 1)):
            for given in strings:
                if not isinstance(given, str) or len(given) != length:
                    raise ValueError(f"{given!r:.100}, not a string of {length} characters")
        before, after = "".join(x), "".join(y)
        strange += foreign(before) + foreign(after)
        return encode(before).reshape(-1, LENGTH), encode(after).astype(np.int64)

    return leaf.read(files, convert), strange


def read_plays(files: list[Path]) -> tuple[Tensors, int]:
    """Return the tensors of plays as text, and the number of foreign characters."""
    clients: leaf.Clients = {}
    strange = 0
    for path in files:
        for speaker, text in roles_of(path).items():
            if len(text) > LENGTH:
                clients[f"{path.name}/{speaker}"] = [windows(text)]
                strange += foreign(text)
    return leaf.by_client(clients, files[0].parent), strange


def windows(text: str) -> leaf.Samples:
    """Return all windows of 80 characters, and the character after each; as views, which take no memory."""
    tokens = encode(text)
    return sliding_window_view(tokens[:-1], LENGTH), tokens[LENGTH:].astype(np.int64)


def roles_of(path: Path) -> dict[str, str]:
    """Return the text of each role in a file."""
    try:
        text = unpacked(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not text in UTF-8 ({error.reason}, byte {error.start}); convert it") from error
    roles = parse(text)
    if not roles:
        fix = "write 'SPEAKER:' on a line of its own before each speech, or remove the file"
        raise UserError(f"{path} has no line with a speaker; {fix}")
    return roles


def parse(text: str) -> dict[str, str]:
    """Return the text of each speaker of a play: the lines of all speeches in order."""
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = [SPEAKER.fullmatch(line) for line in lines]  # what may be a speaker's name
    names = [" ".join(match[1].split()) if match else "" for match in found]
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

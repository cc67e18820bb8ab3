"""What several benchmarks share: numbers of a command line, medians and quartiles, columns."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence


def positive(word: str) -> int:
    """A whole number of at least 1."""
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"'{word}' must be a whole number of at least 1")
    return int(word)


def above_zero(word: str) -> float:
    """A number above 0."""
    try:
        value = float(word)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"'{word}' must be a number above 0")
    return value


def device(word: str) -> str:
    """A device of this machine, as 'fedmpi train' has it; 'cpu' where 'auto' finds no other."""
    from fedmpi.device import device_of
    from fedmpi.errors import UserError

    try:
        return "cpu" if device_of(0, word).type == "cpu" else word
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def median(values: Sequence[float], digits: int = 3) -> float:
    """Rounded."""
    return round(statistics.median(values), digits)


def quartiles(values: Sequence[float], digits: int = 3) -> list[float]:
    """The first and the third, each a value that was measured, rounded."""
    return [round(sorted(values)[len(values) * k // 4], digits) for k in (1, 3)]


def columns(lines: Sequence[Sequence[str]]) -> str:
    """Lines of cells, flush right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in lines)

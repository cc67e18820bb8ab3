"""Tables, counts, bytes and durations as text, for people to read."""

from __future__ import annotations

from collections.abc import Sequence


def align(rows: Sequence[Sequence[str]], sides: str = "l", widths: Sequence[int] = (), rule: bool = False) -> list[str]:
    """Return rows of cells as aligned lines.

    `sides` has an "l" or "r" per column; the last letter counts for all further columns. `widths` are least widths, for
    lines that are printed one by one. `rule` draws a line below the first row.
    """
    least = [*widths, *[0] * len(rows[0])]
    needed = [max(floor, *map(len, column)) for floor, column in zip(least, zip(*rows, strict=True), strict=False)]
    sides = sides.ljust(len(needed), sides[-1])
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if side == "l" else cell.rjust(width)
            for cell, width, side in zip(row, needed, sides, strict=True)
        ]
        lines.append("  ".join(cells).rstrip())
    if rule:
        lines.insert(1, "-" * max(map(len, lines)))
    return lines


def plural(count: int, what: str) -> str:
    """Return a number of things: 1 rank, 2 ranks."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def amount(count: float) -> str:
    """Return a number of bytes in three digits and a unit: 802 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def duration(minutes: float) -> str:
    """Return a time in seconds, minutes or hours: 42 s, 7 min, 2.5 h."""
    if minutes < 1:
        return f"{60 * minutes:.0f} s"
    return f"{minutes:.0f} min" if minutes < 120 else f"{minutes / 60:.1f} h"

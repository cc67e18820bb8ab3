"""Numbers as people read them."""

from __future__ import annotations


def amount(count: float) -> str:
    """Return a number of bytes in three digits and a unit: 802 kB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"

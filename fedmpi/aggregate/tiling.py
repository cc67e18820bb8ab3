"""How a vector is cut: a slice per rank, buckets of it that travel at once, tiles of those that fit the cache."""

from __future__ import annotations

from collections.abc import Iterator

TILE = 1 << 16


def tiles(start: int, stop: int, size: int = TILE) -> Iterator[slice]:
    """Yield consecutive slices of at most `size` elements that cover start..stop."""
    for low in range(start, stop, size):
        yield slice(low, min(low + size, stop))


def even_slices(length: int, most: int) -> Iterator[slice]:
    """Yield the fewest consecutive slices of at most `most` elements that cover 0..length, equal up to one element."""
    count = -(-length // most)
    for k in range(count):
        yield slice(length * k // count, length * (k + 1) // count)

"""How sums travel between nodes: added up on the node first, sent once, in as few bytes as hold them.

A rank carries its share of other nodes' slices (comm/links.py): tile by tile it adds up what the ranks of its node have
for such a slice, in the order of the ranks, writes the sum into a parcel and sends that to the owner of the slice. The
owner adds up one sum per node, in the order of the nodes. A parcel is its tiles one after the other; if their sizes
differ, it begins with the sizes, as int32. The memory of a bucket's parcels is used again by a later bucket.

    Plain     numbers as they are in memory; a node of one rank sends its row without a copy
    Integers  int64 of exact sums, without loss: each tile in as few bytes per number as hold all of its numbers, 4, 5,
              6 or 8: their low 32 bits, then the rest
    Votes     whole numbers up to a bound that all ranks know, in 2, 4, 8, 16 or 32 bits
    Rounded   bf16 with error feedback (compress.py)

Where the transport adds up rows itself (NCCL's reduce-scatter, for sums on accelerators), `Scattered` takes the place
of `Parcels`. Whole numbers have the same sum either way.

S: the slice of one rank.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..comm import Comm, Rows, Wait
from ..flat import tile_size, tiles

T = TypeVar("T")
TILE = 1 << 17
WIDTHS = {4: torch.int32, 5: torch.int8, 6: torch.int16, 8: torch.int64}  # bytes: type of what exceeds 32 bits
USUAL = 5  # bytes per number that a forecast assumes
LOW = 0 if sys.byteorder == "little" else 1  # where the low half of an int64 is


class Format(Protocol):
    """How the numbers of a tile are written as bytes."""

    even: bool  # whether tiles of the same length have the same size

    def room(self, length: int) -> int:
        """Return the most bytes that a tile of that length takes."""

    def as_it_is(self, x: Tensor) -> bool:
        """Return whether numbers are sent as they are in memory."""

    def pack(self, x: Tensor, out: Tensor, where: slice) -> int:
        """Write numbers x, elements `where` of the full vector, into bytes `out`; return how many bytes they take."""

    def unpack(self, raw: Tensor, length: int) -> Tensor:
        """Return the numbers; perhaps as a view of the bytes."""


class Plain:
    """Numbers as they are in memory."""

    even = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def room(self, length: int) -> int:
        return length * self.dtype.itemsize

    def as_it_is(self, x: Tensor) -> bool:
        return True

    def pack(self, x: Tensor, out: Tensor, where: slice) -> int:
        size = self.room(len(x))
        out[:size].view(self.dtype).copy_(x)
        return size

    def unpack(self, raw: Tensor, length: int) -> Tensor:
        return raw.view(self.dtype)


class Integers:
    """int64 in 4, 5, 6 or 8 bytes per number, the same for a tile."""

    even = False

    def room(self, length: int) -> int:
        return 8 * length

    def as_it_is(self, x: Tensor) -> bool:
        return False

    def pack(self, x: Tensor, out: Tensor, where: slice) -> int:
        size, width = len(x), bytes_for(x)
        if width == 8:
            out[: 8 * size].view(torch.int64).copy_(x)
            return 8 * size
        out[: 4 * size].view(torch.int32).copy_(x)  # keeps the low bits
        if width > 4:
            high = x.view(torch.int32).view(-1, 2)[:, 1 - LOW]
            out[4 * size : width * size].view(WIDTHS[width]).copy_(high)
        return width * size

    def unpack(self, raw: Tensor, length: int) -> Tensor:
        width = raw.numel() // length
        if width == 8:
            return raw.view(torch.int64)
        low = raw[: 4 * length].view(torch.int32)
        if width == 4:
            return low.to(torch.int64)
        x = torch.empty(length, dtype=torch.int64, device=raw.device)
        halves = x.view(torch.int32).view(-1, 2)
        halves[:, LOW] = low
        halves[:, 1 - LOW] = raw[4 * length :].view(WIDTHS[width])
        return x


def bytes_for(x: Tensor) -> int:
    """Return how many bytes hold every number of an int64 tensor."""
    if x.is_meta:
        return USUAL
    low, high = (int(v) for v in x.aminmax())
    return next(width for width in WIDTHS if -(1 << 8 * width - 1) <= low and high < 1 << 8 * width - 1)


class Votes:
    """Whole numbers from -most to most, in as few bits as hold them; `dtype` is their type in memory."""

    even = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.bound(1)

    def bound(self, most: int) -> None:
        """Set the largest absolute value until the next call."""
        self.bits = next(bits for bits in (2, 4, 8, 16, 32) if most < 1 << bits - 1)
        self.part = {16: torch.int16, 32: torch.int32}.get(self.bits, torch.int8)

    def room(self, length: int) -> int:
        return length * self.bits // 8 if self.bits >= 8 else self._parts(length)[0]

    def as_it_is(self, x: Tensor) -> bool:
        return self.part == x.dtype and self.bits >= 8

    def _parts(self, length: int) -> list[int]:
        """Return the lengths of the parts of a tile, one per number in a byte: the first are the longest."""
        count = 8 // self.bits
        size = -(-length // count)
        return [max(min(size, length - k * size), 0) for k in range(count)]

    def pack(self, x: Tensor, out: Tensor, where: slice) -> int:
        size = self.room(len(x))
        raw = out[:size].view(self.part)
        if self.bits >= 8:
            raw.copy_(x)
            return size
        low_bits = (1 << self.bits) - 1
        first, *more = torch.split(x.to(torch.int8), self._parts(len(x)))
        torch.bitwise_and(first, low_bits, out=raw)
        for k, part in enumerate(more, start=1):
            raw[: len(part)] |= (part & low_bits) << self.bits * k
        return size

    def unpack(self, raw: Tensor, length: int) -> Tensor:
        raw = raw.view(self.part)
        if self.bits >= 8:
            return raw.to(self.dtype)
        x = torch.empty(length, dtype=torch.int8, device=raw.device)
        for k, part in enumerate(torch.split(x, self._parts(length))):
            torch.bitwise_left_shift(raw[: len(part)], 8 - self.bits * (k + 1), out=part)
            part.bitwise_right_shift_(8 - self.bits)  # of signed numbers: the sign comes back
        return x.to(self.dtype)


class Lane(Protocol):
    """What takes the rows of a node to the owners of the slices."""

    def start(self, bucket: slice, slot: int, params: int) -> Load:
        """Start to send a bucket of every slice that this rank carries, and to receive one of its own. Buckets in the
        same slot use the same memory: the one before must have been read."""


class Load(Protocol):
    """A bucket of this rank's own slice: what its node has, and what comes from each other node."""

    def finish(self) -> None:
        """Wait until everything has arrived."""

    def by_node(self, number: int) -> list[Tensor]:
        """Return what each node has for a tile, in the order of the nodes. Not to be written to."""

    def total(self, number: int) -> Tensor:
        """Return the sum of all nodes for a tile; the caller may overwrite it."""


class Parcels:
    """Sends the sums of a node to the owners of the slices, in a format."""

    def __init__(self, comm: Comm, rows: Rows, format: Format) -> None:
        self.comm, self.rows, self.format = comm, rows, format
        self.slice, self.device = rows.mine[0].numel(), rows.mine[0].device
        self.boxes: dict[tuple[str, int, int], Tensor] = {}

    def start(self, bucket: slice, slot: int, params: int) -> Load:
        rank, links = self.comm.rank, self.rows.links
        own = list(cut(rank * self.slice, bucket, params, self.device))
        came = {r: self._box("from", r, slot, own) for r in links.partners}
        send = {s: self._pack(s, list(cut(s * self.slice, bucket, params, self.device)), slot) for s in links.carried}
        return Delivery(self, own, came, self.comm.start(send, came))

    def header(self, parts: list[slice]) -> int:
        """Return the bytes in front of the first tile of a parcel."""
        return 0 if self.format.even else self.aligned(4 * len(parts))

    def aligned(self, size: int) -> int:
        """Return a size rounded up so that numbers of 8 bytes can follow, if sizes vary."""
        return size if self.format.even else -(-size // 8) * 8

    def _box(self, way: str, rank: int, slot: int, parts: list[slice]) -> Tensor:
        """Return memory for a parcel; what it does not fill takes no pages."""
        size = self.header(parts) + sum(self.aligned(self._room(tile.stop - tile.start)) for tile in parts)
        box = self.boxes.get((way, rank, slot))
        if box is None or len(box) < size:
            box = self.boxes[way, rank, slot] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return box[:size]

    def _room(self, length: int) -> int:
        """Return the bytes to allocate for a tile; in a forecast, those that it will fill."""
        forecast = self.device.type == "meta" and not self.format.even
        return USUAL * length if forecast else self.format.room(length)

    def _pack(self, s: int, parts: list[slice], slot: int) -> Tensor:
        """Return a parcel with the tiles of slice s."""
        rows, format = self.rows.near[s], self.format
        if len(rows) == 1 and format.as_it_is(rows[0]):
            return rows[0][parts[0].start : parts[-1].stop].view(torch.uint8)
        out, at = self._box("to", s, slot, parts), self.header(parts)
        sizes, first = [], s * self.slice
        for tile in parts:
            x = add_up([row[tile] for row in rows])
            sizes.append(format.pack(x, out[at:], slice(first + tile.start, first + tile.stop)))
            at += self.aligned(sizes[-1])
        if not format.even:
            out[: 4 * len(sizes)].view(torch.int32).copy_(torch.tensor(sizes, dtype=torch.int32))
        return out[:at]

    def opened(self, box: Tensor, parts: list[slice]) -> list[Tensor]:
        """Return the bytes of each tile of a parcel."""
        sizes = [self._room(tile.stop - tile.start) for tile in parts]
        if not self.format.even and not box.is_meta:
            sizes = box[: 4 * len(parts)].view(torch.int32).tolist()
        found, at = [], self.header(parts)
        for size in sizes:
            found.append(box[at : at + size])
            at += self.aligned(size)
        return found


class Delivery:
    """The parcels of a bucket, under way."""

    def __init__(self, parcels: Parcels, parts: list[slice], boxes: dict[int, Tensor], wait: Wait) -> None:
        self.parcels, self.parts, self.boxes, self.wait = parcels, parts, boxes, wait
        self.came: list[list[Tensor]] = []

    def finish(self) -> None:
        self.wait()
        self.came = [self.parcels.opened(box, self.parts) for box in self.boxes.values()]

    def by_node(self, number: int) -> list[Tensor]:
        tile, came, links = self.parts[number], iter(self.came), self.parcels.rows.links
        near = self.parcels.rows.near[self.parcels.comm.rank]
        return [
            add_up([row[tile] for row in near])
            if ranks is links.mates
            else self.parcels.format.unpack(next(came)[number], tile.stop - tile.start)
            for ranks in links.nodes
        ]

    def total(self, number: int) -> Tensor:
        nodes = self.by_node(number)
        alone = len(nodes) == len(self.parcels.rows.links.mates) == 1
        return nodes[0].clone() if alone else add_up(nodes)


class Scattered:
    """Lets the transport add up the rows, on accelerators. The order of float32 sums is the transport's own."""

    def __init__(self, comm: Comm, block: Tensor) -> None:
        self.comm, self.block, self.sum = comm, block, torch.zeros_like(block[0])

    def start(self, bucket: slice, slot: int, params: int) -> Load:
        parts = list(cut(self.comm.rank * len(self.sum), bucket, params, self.sum.device))
        return Reduction(self.sum, parts, self.comm.start_reduce(self.block, self.sum))


class Reduction:
    """A reduce-scatter of whole rows, under way."""

    def __init__(self, sum: Tensor, parts: list[slice], wait: Wait) -> None:
        self.sum, self.parts, self.finish = sum, parts, wait

    def by_node(self, number: int) -> list[Tensor]:
        return [self.total(number)]

    def total(self, number: int) -> Tensor:
        return self.sum[self.parts[number]]


def make_lane(comm: Comm, rows: Rows, format: Format) -> Lane:
    """Return what takes rows to the owners of the slices."""
    rounds_off = not isinstance(format, Plain | Integers | Votes)
    if rows.block is not None and comm.reduces(rows.block.device) and not rounds_off:
        return Scattered(comm, rows.block)
    return Parcels(comm, rows, format)


def cut(first: int, bucket: slice, params: int, device: torch.device) -> Iterator[slice]:
    """Yield the tiles of a bucket of the slice that begins at element `first`; none straddles the end of the
    parameters."""
    end, size = min(max(params - first, bucket.start), bucket.stop), tile_size(device, TILE)
    yield from tiles(bucket.start, end, size)
    yield from tiles(end, bucket.stop, size)


def add_up(rows: list[Tensor]) -> Tensor:
    """Return the sum of rows, added in their order; a row alone is returned itself."""
    if len(rows) == 1:
        return rows[0]
    total = rows[0] + rows[1]
    for row in rows[2:]:
        total.add_(row)
    return total


def ahead(things: Iterator[T], count: int) -> Iterator[T]:
    """Yield each thing when `count` - 1 further ones have been made."""
    made = deque(islice(things, count))
    while made:
        yield made.popleft()
        made.extend(islice(things, 1))

"""What a rank accumulates over its clients: weighted sums of their deltas, of the squares if the mask reads them and of
each further vector (channel) that the rule sends, and a sum of the signs (votes). An update is added and forgotten.

N: the full padded vector.  Weights are whole numbers (a client's samples); `total` is the planned weight of the cohort.

exact    int64 fixed point. A client contributes round(delta * weight / total * 2**44). Integers add up the same in any
         order, so the sum is the same bits on any number of ranks, in any placement, over any transport. Resolution:
         2**-44 (6e-14) of the mean, or 2**-53 of a delta if that is more. Range: |delta| < 2**17 (131072). The
         weights of a cohort add up to at most `total`, so the sum stays below 2**61: it never wraps.
float32  the sum of weight * delta in float32: half the bytes, and rounding that depends on the order. Weights are
         whole numbers >= 1, so the product of a tiny delta never vanishes and its sign can be read off the product.
         Range: |delta| * total < 1.7e38.

A delta outside the range makes its client unusable. Votes are counted from the delta itself, never from its rounded
product, in int8 up to 127 clients in the cohort and int32 beyond (NCCL has no int16). Squares are summed like the
deltas, with a finer unit, 2**-53, because they are small; a parameter's delta must then stay below 2**4.
"""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cohort import Cohort
from ..comm import Comm, Rows
from ..device import CPU
from ..errors import CommonError, UserError, unknown
from ..flat import Layout, tile_size, tiles
from ..local import PRIVATE, LocalResult, LocalRule, Update
from .clock import Clock
from .compress import Compressor, Rounded
from .travel import Format, Integers, Plain, Votes, make_lane

log = logging.getLogger("fedmpi")

FRACTION_BITS, RANGE_BITS = 44, 17
SQUARE_FRACTION_BITS, SQUARE_RANGE_BITS = 53, 4
SUMS = ("exact", "float32")
WIRES = ("float32", "bf16")
UNIT = 2.0**40  # losses and steps are summed in units of 1 / UNIT: the same bits on any number of ranks
MOST = 2.0**20  # bound of a loss and of steps


class Unusable(Exception):
    """A client's result cannot be averaged; the message says why."""


def check_wire(kind: str, wire: str) -> None:
    """Refuse a wire format that the kind of sum does not allow."""
    if wire not in WIRES:
        raise unknown("--wire", wire, WIRES)
    if wire == "bf16" and kind != "float32":
        raise UserError(
            f"--wire bf16 rounds what travels, but --sum is {kind}, whose sums are whole numbers; add --sum float32, "
            "or leave --wire at float32"
        )


class Accumulator:
    """This rank's sums of one vector per client over a round, a row per slice, and the lanes on which they travel. Made
    once, reset every round. A vector is added to all rows at once if they are one tensor: the number of kernels does
    not grow with that of ranks. `squares` is the number of leading elements whose squares are summed; `wire` is what
    sums travel as. Collective to make."""

    def __init__(
        self,
        comm: Comm,
        slice_length: int,
        cohort: int,
        kind: str,
        device: torch.device | None = None,
        votes: bool = True,
        squares: int = 0,
        wire: str = "float32",
    ) -> None:
        if kind not in SUMS:
            raise unknown("sum", kind, SUMS)
        check_wire(kind, wire)
        self.exact, self.slice, self.squared = kind == "exact", slice_length, squares
        self.device = device or CPU
        number = torch.int64 if self.exact else torch.float32
        self.sums = comm.rows(slice_length, number, device)
        self.votes = comm.rows(slice_length, torch.int8 if cohort <= 127 else torch.int32, device) if votes else None
        self.squares = comm.rows(slice_length, number, device) if squares else None
        self.rounded = Rounded() if wire == "bf16" else None
        self.ballots = Votes(torch.int8 if cohort <= 127 else torch.int32)
        whole: Format = Integers() if self.exact else Plain(number)
        formats: dict[str, Format] = {"sums": self.rounded or whole, "votes": self.ballots, "squares": whole}
        self.lanes = {name: make_lane(comm, rows, formats[name]) for name, rows in self.rows.items()}
        self.links = self.sums.links
        self.travels = len(self.links.nodes) > 1  # whether anything is sent rather than shared
        # What a vector is added to, part by part: sums, votes and squares.
        self.by_row = list(zip(*(rows.mine for rows in self.rows.values()), strict=True))
        blocks = [rows.block.view(-1) for rows in self.rows.values() if rows.block is not None]
        self.memory = [tuple(blocks)] if len(blocks) == len(self.rows) else self.by_row
        self.reset(total=1)

    @property
    def rows(self) -> dict[str, Rows]:
        """Return the rows in use."""
        named = {"sums": self.sums, "votes": self.votes, "squares": self.squares}
        return {name: rows for name, rows in named.items() if rows is not None}

    def reset(self, total: int) -> None:
        """Clear all rows, for a cohort whose weights add up to `total`."""
        if total < 1:
            raise UserError(f"a cohort's weight is {total}; it must be at least 1: give every client a sample")
        for vectors in self.memory:
            for vector in vectors:
                vector.zero_()
        self.total, self.weight, self.clients = total, 0, 0
        self.deferred: tuple[Tensor, int] | None = None

    @property
    def limit(self) -> float:
        """Return the bound that an element of a delta must stay below."""
        return float(2**RANGE_BITS) if self.exact else torch.finfo(torch.float32).max / 2 / self.total

    def check(self, x: Tensor) -> None:
        """Raise `Unusable` for a vector that cannot be averaged."""
        check_range(x, self.limit, "")
        if self.squares is not None:
            most = float(2**SQUARE_RANGE_BITS) if self.exact else math.sqrt(self.limit)
            check_range(x[: self.squared], most, " of a mask that reads the variance")

    def add(self, x: Tensor, weight: int, defer: bool = False) -> None:
        """Add one client's vector, which has passed `check`; missing elements at its end count as zero. With `defer` it
        is counted but left for `fold`: x must stay unchanged until then."""
        if weight < 1 or self.weight + weight > self.total:
            raise ValueError(f"weight {weight} on top of {self.weight} does not fit a cohort of {self.total}")
        self.weight += weight
        self.clients += 1
        if defer:
            self.deferred = x, weight
        else:
            self._add(self.memory, x, weight)

    def fold(self, bucket: slice) -> None:
        """Add a bucket of the deferred vector to every row."""
        if self.deferred is not None:
            self._add(self.by_row, *self.deferred, bucket)

    def _add(self, memory: list[tuple[Tensor, ...]], x: Tensor, weight: int, bucket: slice | None = None) -> None:
        for number, part in enumerate(torch.split(x, memory[0][0].numel())):
            start, stop = (bucket.start, min(bucket.stop, part.numel())) if bucket else (0, part.numel())
            for tile in tiles(start, stop, tile_size(self.device)):
                self._add_tile([vector[tile] for vector in memory[number]], part[tile], weight)

    def _add_tile(self, rows: list[Tensor], x: Tensor, weight: int) -> None:
        self._add_product(rows[0], x, weight, FRACTION_BITS)
        if self.votes is not None:
            rows[1].add_(torch.sign(x).to(rows[1].dtype))
        if self.squares is not None:
            square = x.square().clamp_(max=float(4**SQUARE_RANGE_BITS)) if self.exact else x.square()
            self._add_product(rows[-1], square, weight, SQUARE_FRACTION_BITS)

    def _add_product(self, sums: Tensor, x: Tensor, weight: int, fraction_bits: int) -> None:
        if self.exact:
            sums.add_(x.double().mul_(weight / self.total * 2.0**fraction_bits).round_().to(torch.int64))
        else:
            sums.add_(x, alpha=float(weight))


def check_range(x: Tensor, limit: float, why: str) -> None:
    """Raise `Unusable` unless every element is a number below the limit."""
    if x.is_meta:
        return  # a forecast has no numbers
    low, high = (float(v) for v in x.aminmax())
    if math.isnan(low) or math.isinf(low) or math.isinf(high):
        raise Unusable("its update holds NaN or infinity")
    if not -limit < low <= high < limit:
        raise Unusable(f"its update reaches {max(-low, high):.3g}, beyond the range of {limit:.3g}{why}")


def check_declared(result: LocalResult, rule: LocalRule, layout: Layout) -> None:
    """Raise `Unusable` if the names or lengths of the vectors are not those that the client rule declares."""
    for what, given, declared in (
        ("sends", result.sends, [channel.name for channel in rule.sends]),
        ("keeps", result.keeps, rule.keeps),
    ):
        if set(given) != set(declared):
            raise Unusable(f"it {what} {sorted(given)}, but its rule declares {sorted(declared)}")
        for name, vector_P in given.items():
            wanted = layout.private.length if name == PRIVATE else layout.params
            if vector_P.shape != (wanted,):
                raise Unusable(f"it {what} a '{name}' of shape {tuple(vector_P.shape)}, not ({wanted},)")


@dataclass(frozen=True)
class Totals:
    """What the clients of all ranks delivered: the same numbers on every rank."""

    weight: int
    loss: float
    used: tuple[int, ...]  # the clients whose updates count
    dropped: tuple[int, ...]  # those that were left out
    ints: Tensor  # the elementwise maximum of the clients' integer buffers
    steps: float = 1.0  # the weighted mean of the steps that a normalised rule divided by

    @property
    def clients(self) -> int:
        """Return the number of clients whose updates count."""
        return len(self.used)

    def require(self, least: int, round: int) -> None:
        """Raise an error, on every rank, if fewer than `least` clients delivered a usable update."""
        if self.clients >= least:
            return
        raise CommonError(
            f"round {round}: {self.clients} of {self.clients + len(self.dropped)} clients delivered a usable update, "
            f"but min_clients is {least}; left out: {', '.join(map(str, self.dropped))}. The logs of their ranks say "
            "why. If an update or a loss is too large, try a lower --local.lr; scale numeric targets to about 1"
        )


class Sums:
    """Everything this rank accumulates over a round: deltas, channels, the meta gradient, counts. `clients` is the size
    of the federation, `cohort` that of a round. `wire` bf16 needs the model, which travels alike. Collective to make.
    """

    def __init__(
        self,
        comm: Comm,
        layout: Layout,
        rule: LocalRule,
        *,
        cohort: int,
        clients: int,
        kind: str = "exact",
        squares: bool = False,
        wire: str = "float32",
        meta: bool = False,
        device: torch.device | None = None,
        model_N: Tensor | None = None,
    ) -> None:
        length, self.device = layout.padded(comm.size) // comm.size, device or CPU
        self.comm, self.rule, self.layout, self.clients = comm, rule, layout, clients
        squared = layout.params if squares else 0
        self.deltas = Accumulator(comm, length, cohort, kind, device, squares=squared, wire=wire)
        self.channels = {c.name: Accumulator(comm, length, cohort, "exact", device, votes=False) for c in rule.sends}
        self.meta = Accumulator(comm, length, 1, "exact", device, votes=False) if meta else None
        self.compressor: Compressor | None = None
        if self.deltas.rounded is not None and model_N is not None:
            self.compressor = Compressor(comm, self.deltas.sums, self.deltas.rounded, model_N)

    def reset(self, cohort: Cohort, round: int, ints: Tensor) -> None:
        """Start a round: clear the sums and the counts, start the clock."""
        self.cohort, self.round, self.ints = cohort, round, ints
        self.sent_before = self.comm.sent, self.comm.away
        # The weight delivered, the weighted loss and steps in whole units, and a 1 per client that delivered.
        self.counts = torch.zeros(3 + len(cohort.cids), dtype=torch.int64)
        self.deltas.reset(cohort.total)
        for channel in self.rule.sends:
            self.channels[channel.name].reset(cohort.total if channel.to == "model" else self.clients)
        self.clock = Clock("local", self.device)

    def add(self, update: Update) -> bool:
        """Add a client's update; one that cannot be averaged is left out, with a warning. Return whether it counts. If
        rows travel from a CPU, the rank's last update is left for `fold`: one bucket travels while the next is folded.
        (On a device, cutting it takes more kernels.)"""
        try:
            self.check(update)
        except Unusable as why:
            log.warning("round %d: client %d left out: %s", self.round, update.cid, why)
            return False
        position = bisect_left(self.cohort.cids, update.cid)
        weight, defer = self.cohort.weights[position], update.last and self.deltas.travels and self.device.type == "cpu"
        self.deltas.add(update.delta_N, weight, defer)
        for channel in self.rule.sends:
            share = weight if channel.to == "model" else 1
            self.channels[channel.name].add(update.result.sends[channel.name], share, defer)
        share_of_all = weight / self.deltas.total * UNIT
        steps = update.result.steps if self.rule.normalised else 1.0
        self.counts[:3] += torch.tensor([weight, round(update.loss * share_of_all), round(steps * share_of_all)])
        self.counts[3 + position] = 1
        self.ints = torch.maximum(self.ints, update.ints)
        return True

    def check(self, update: Update) -> None:
        """Raise `Unusable` for an update that cannot be averaged."""
        result, steps = update.result, update.result.steps
        if not abs(update.loss) < MOST:
            raise Unusable(f"its training loss is {update.loss:g}")
        if self.rule.normalised and not (isinstance(steps, int | float) and 0 < steps < MOST):
            raise Unusable(f"its steps are {steps}, which must be a number between 0 and {MOST:.0f}")
        check_declared(result, self.rule, self.layout)
        for what, given in (("sends", result.sends), ("keeps", result.keeps)):
            for name, vector_P in given.items():
                if not bool(vector_P.isfinite().all()):
                    raise Unusable(f"it {what} a '{name}' that holds NaN or infinity")
        self.deltas.check(update.delta_N)
        for name, accumulator in self.channels.items():
            accumulator.check(result.sends[name])

    def agree(self) -> Totals:
        """Sum the counts over the ranks: who delivered, with what weight and loss. Collective."""
        with self.clock("wait"):
            self.comm.sum(self.counts)
        weight, loss, steps, *delivered = self.counts.tolist()
        marked = list(zip(self.cohort.cids, delivered, strict=True))
        used, dropped = (tuple(cid for cid, mark in marked if bool(mark) == wanted) for wanted in (True, False))
        scale = self.cohort.total / max(weight, 1) / UNIT
        return Totals(weight, loss * scale, used, dropped, largest(self.ints, self.comm), steps * scale)

    def fold(self, bucket: slice) -> None:
        """Add a bucket of the last client's vectors to the rows."""
        for accumulator in (self.deltas, *self.channels.values()):
            accumulator.fold(bucket)


def largest(ints: Tensor, comm: Comm) -> Tensor:
    """Return the elementwise maximum of a few integers over the ranks. Collective."""
    if not ints.numel():
        return ints
    rows = torch.zeros(comm.size, ints.numel(), dtype=torch.int64)
    rows[comm.rank] = ints
    comm.sum(rows)
    return rows.amax(0)

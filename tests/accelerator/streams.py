"""Streams and events: kernels run at once, in program order; what is checked is that they were ordered.

Every operation has a number on its stream. A clock maps streams to the newest operation that is known to be done; each
stream has one (what its next operation comes after), and so has the host. Waiting merges clocks. The memory remembers
the last operation of each stream on each range of addresses, and two operations of different streams on the same
range, of which one writes, must be ordered by the clocks.

A copy to pinned memory lands when the host's clock passes it. Until then the pinned memory has the bytes 0x7F. A copy
from pinned memory takes effect at once, but the pinned memory must be unchanged when the host's clock passes the copy.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .counting import counts

POISON = 0x7F
Clock = dict[int, int]

lock = threading.RLock()
host: Clock = {}
_keys = itertools.count()
_thread = threading.local()


class Fault(AssertionError):
    """A mistake that on a real device shows up as wrong numbers, now and then."""


def merge(clock: Clock, other: Clock) -> None:
    """Advance a clock by what another one knows."""
    for key, number in other.items():
        if number > clock.get(key, 0):
            clock[key] = number


class Stream:
    """A queue of operations of one device, like torch.cuda.Stream."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device_index = device_number(device)
        self.device = torch.device("pretend", self.device_index)
        self.priority = priority
        self.stream_id = next(_keys)
        self.clock: Clock = {}
        self._polled = 0
        _streams.append(self)

    def __repr__(self) -> str:
        return f"<pretend stream {self.stream_id} of {self.device}>"

    def issue(self) -> int:
        """Number the next operation."""
        number = self.clock.get(self.stream_id, 0) + 1
        self.clock[self.stream_id] = number
        return number

    def after(self, key: int, number: int) -> bool:
        """Return whether the next operation comes after one of another stream."""
        return key == self.stream_id or self.clock.get(key, 0) >= number or host.get(key, 0) >= number

    def wait_event(self, event: Event) -> None:
        """Make what follows on this stream wait for an event."""
        with lock:
            merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        """Make what follows on this stream wait for everything issued on another stream so far."""
        with lock:
            merge(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        """Record an event, a new one by default."""
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        """Make the host wait for everything issued on this stream."""
        counts.wait("synchronize a stream")
        reach(self.clock)

    def query(self) -> bool:
        """Return whether everything is done; the first answer after new work is no."""
        if passed(self.clock):
            return True
        number = self.clock[self.stream_id]
        if self._polled != number:
            self._polled = number
            return False
        reach(self.clock)
        return True

    def __enter__(self) -> Stream:
        stack = _thread.__dict__.setdefault("entered", [])
        stack.append(current_stream(self.device_index))
        set_stream(self)
        return self

    def __exit__(self, *_: object) -> None:
        set_stream(_thread.entered.pop())


class Event:
    """A mark in a stream, like torch.cuda.Event."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_: Any):
        self.clock: Clock = {}
        self._polled = False

    def record(self, stream: Stream | None = None) -> None:
        """Mark what has been issued on a stream so far."""
        stream = current_stream() if stream is None else stream
        with lock:
            self.clock = dict(stream.clock)
            self._polled = False

    def wait(self, stream: Stream | None = None) -> None:
        """Make what follows on a stream wait for this event."""
        (current_stream() if stream is None else stream).wait_event(self)

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        counts.wait("synchronize an event")
        reach(self.clock)

    def query(self) -> bool:
        """Return whether what was recorded is done; the first answer is no unless the host has waited for it."""
        if passed(self.clock):
            return True
        if not self._polled:
            self._polled = True
            return False
        reach(self.clock)
        return True

    def elapsed_time(self, end: Event) -> float:
        """Return zero: this device has no clock."""
        return 0.0


_streams: list[Stream] = []
_defaults: dict[int, Stream] = {}
_of_backward: dict[int, Stream] = {}


def current_device() -> int:
    """Return the index of this thread's current device."""
    return getattr(_thread, "device", 0)


def set_device_number(index: int) -> None:
    """Change this thread's current device."""
    _thread.device = index


def device_number(device: Any) -> int:
    """Return the index of a device given as an index, a name, a device or None, which is the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def default_stream(device: Any = None) -> Stream:
    """Return the stream on which everything runs unless another one is made current."""
    index = device_number(device)
    with lock:
        if index not in _defaults:
            _defaults[index] = Stream(index)
        return _defaults[index]


def current_stream(device: Any = None) -> Stream:
    """Return this thread's current stream of a device. Autograd's own threads take that of the caller of backward."""
    index = device_number(device)
    mine = _thread.__dict__.get("streams")
    if mine is None and threading.get_ident() not in threading._active:  # type: ignore[attr-defined]
        mine = _of_backward
    return (mine or {}).get(index) or default_stream(index)


def set_stream(stream: Stream | None) -> None:
    """Make a stream this thread's current one."""
    if stream is not None:
        _thread.__dict__.setdefault("streams", {})[stream.device_index] = stream


@contextlib.contextmanager
def stream(new: Stream | None) -> Iterator[None]:
    """Run the block on a stream; with None, change nothing."""
    if new is None:
        yield
        return
    with new:
        yield


def remember_for_backward() -> None:
    """Let autograd's threads use this thread's current streams."""
    _of_backward.clear()
    _of_backward.update(_thread.__dict__.get("streams") or {})


# The host


@dataclass
class Landing:
    """A copy between the device and pinned memory that the host has not waited for."""

    key: int
    number: int
    pinned: torch.Tensor
    value: torch.Tensor
    to_host: bool


_landings: list[Landing] = []


def passed(clock: Clock) -> bool:
    """Return whether the host knows that all of this is done."""
    with lock:
        return all(host.get(key, 0) >= number for key, number in clock.items())


def reach(clock: Clock) -> None:
    """Advance the host's clock, and finish the copies that it passes."""
    with lock:
        merge(host, clock)
        finished = [landing for landing in _landings if host.get(landing.key, 0) >= landing.number]
        _landings[:] = [landing for landing in _landings if host.get(landing.key, 0) < landing.number]
        wrong = ""
        for landing in finished:
            wrong = land(landing) or wrong
    if wrong:
        raise Fault(wrong)


def land(landing: Landing) -> str:
    """Finish a copy; return what went wrong, or nothing."""
    if not landing.to_host:
        return "" if same_bytes(landing.pinned, landing.value) else "pinned memory was overwritten while it was copied"
    untouched = is_poison(landing.pinned)
    landing.pinned.copy_(landing.value)
    return "" if untouched else "pinned memory was written while a copy to it was under way"


def copy_to_pinned(pinned: torch.Tensor, value: torch.Tensor, on: Stream, number: int) -> None:
    """Begin a copy to pinned memory: poison now, the value when the host has waited."""
    with lock:
        poison(pinned)
        _landings.append(Landing(on.stream_id, number, pinned, value, to_host=True))


def copy_from_pinned(pinned: torch.Tensor, on: Stream, number: int) -> torch.Tensor:
    """Begin a copy from pinned memory; return what is copied. A copy to it on a stream waited for has arrived there."""
    with lock:
        value = pinned.clone()
        arriving = [one for one in _landings if one.to_host and overlap(extent(one.pinned), extent(pinned))]
        if arriving and all(on.after(one.key, one.number) for one in arriving):
            for one in arriving:
                one.pinned.copy_(one.value)
            value = pinned.clone()
            for one in arriving:
                poison(one.pinned)
        _landings.append(Landing(on.stream_id, number, pinned, value, to_host=False))
        return value


def poison_like(x: torch.Tensor) -> torch.Tensor:
    """Return a CPU tensor of the same shape in which every byte is 0x7F."""
    return torch.full((x.numel() * x.element_size(),), POISON, dtype=torch.uint8).view(x.dtype).view(x.shape)


def poison(x: torch.Tensor) -> None:
    """Write poison into a CPU tensor, by bytes where that can be: copying truth values would make them 1."""
    if x.is_contiguous():
        x.view(-1).view(torch.uint8).fill_(POISON)
    else:
        x.copy_(poison_like(x))


def is_poison(x: torch.Tensor) -> bool:
    """Return whether a CPU tensor is as `poison` left it."""
    if x.dtype == torch.bool and not x.is_contiguous():
        return bool(x.all())
    return same_bytes(x, poison_like(x))


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two CPU tensors have the same bits."""
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def synchronize_device(device: Any = None) -> None:
    """Make the host wait for everything on a device."""
    counts.wait("synchronize the device")
    index = device_number(device)
    with lock:
        clocks = [one.clock for one in _streams if one.device_index == index]
        for clock in clocks[1:]:
            merge(host, clock)
    if clocks:
        reach(clocks[0])


# The order of accesses

Range = tuple[int, int]
Accesses = dict[int, dict[Range, int]]
KEPT = 1024


def extent(t: torch.Tensor) -> Range:
    """Return the first address of a tensor and the one behind its last byte."""
    start = t.data_ptr()
    if t.is_contiguous():
        return start, start + t.nbytes
    last = sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True)) if t.numel() else -1
    return start, start + (last + 1) * t.element_size()


def overlap(a: Range, b: Range) -> bool:
    """Return whether two ranges share a byte."""
    return a[0] < b[1] and b[0] < a[1]


def unordered(accesses: Accesses, where: Range, on: Stream) -> int | None:
    """Return a stream that accessed the range in no order with `on`, or None."""
    for key, ranges in accesses.items():
        if key == on.stream_id:
            continue
        for other, number in ranges.items():
            if overlap(where, other) and not on.after(key, number):
                return key
    return None


def remember(accesses: Accesses, where: Range, on: Stream, number: int) -> None:
    """Note an access."""
    ranges = accesses.setdefault(on.stream_id, {})
    ranges[where] = number
    if len(ranges) > KEPT:
        done = host.get(on.stream_id, 0)
        accesses[on.stream_id] = {place: n for place, n in ranges.items() if n > done}

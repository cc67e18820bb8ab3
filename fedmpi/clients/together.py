"""Several clients of a rank trained at once, as one stacked model: for small models, which leave a GPU idle.

A client's rule is a function that asks for gradients as it goes. So each client at work has a thread, and one thread
runs at a time: one that asks for a gradient hands over to the next, and when all have asked, batches of the same shape
are stacked and one forward and backward gives every client its own (`torch.vmap`, which makes grouped convolutions and
batched products of a model's layers). A batch whose shape nobody shares, such as the short last one of an epoch, goes
alone, in the ordinary way; so does a stack that raises, and then each client meets its own error. Rules do not notice.

The arithmetic is that of one client after another, but other kernels round otherwise, so the last bits of a client
depend on its company. (Measured on a CPU with lenet and logistic: on whether a batch was stacked, and not on with how
many or whom. But that is no promise, and who goes alone depends on who shares the rank.)

K: the clients at once.  k: those of them in one stack.  N: the full padded vector.  P: the trainable parameters.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..errors import UserError, one_line
from ..flat import Span
from .feed import Batch, Pair
from .task import Task
from .training import Trainer

log = logging.getLogger("fedmpi")

T = TypeVar("T")


class Ended(BaseException):
    """Raised in a strand that nobody waits for any more. Not an Exception: no rule is to catch it."""


class Strand(Generic[T]):
    """A function in a thread that runs only while its owner waits for it: a coroutine of code that knows of none."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work, self.result, self.error = work, list[T](), list[BaseException]()
        self.mine, self.theirs = threading.Semaphore(0), threading.Semaphore(0)
        self.done = self.ended = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        """What the thread does."""
        try:
            self.wait()
            self.result.append(self.work())
        except Ended:
            pass
        except BaseException as error:
            self.error.append(error)
        finally:
            self.done = True
            self.theirs.release()

    def wait(self) -> None:
        """Within: until it may go on."""
        self.mine.acquire()
        if self.ended:
            raise Ended

    def pause(self) -> None:
        """Within: let the owner go on, until it lets this go on."""
        self.theirs.release()
        self.wait()

    def go_on(self) -> None:
        """Let it run until it pauses or is done; raises what it raised."""
        self.mine.release()
        self.theirs.acquire()
        if self.error:
            raise self.error[0]

    def end(self) -> None:
        """Let it end, wherever it is."""
        self.ended = True
        self.mine.release()
        self.thread.join()


class Together(Task):
    """A task that trains up to `clients` of its clients at once."""

    def __init__(self, *given: Any, clients: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self.x_KN, self.delta_KN = (torch.zeros(clients, len(self.x_N)).to(self.x_N) for _ in range(2))
        self.grad_KP = torch.zeros(clients, self.layout.params).to(self.grad_P)
        self.seats = [Seat(self, row) for row in range(clients)]
        self.told: set[str] = set()

    def each(self, cids: Sequence[int], train: Callable[[Trainer, int], T]) -> Iterator[tuple[int, T]]:
        """Every client with what `train(task, cid)` returns, as they finish. A seat is kept until the next is asked
        for, and then goes to the next client."""
        waiting, busy = list(cids), self.seats[: len(cids)]
        for seat in busy:
            seat.sit_down(waiting.pop(0), train)
        try:
            while busy:
                for seat in list(busy):
                    seat.strand.go_on()
                    while seat.strand.done:
                        yield seat.cid, seat.strand.result[0]
                        if not waiting:
                            busy.remove(seat)
                            break
                        seat.sit_down(waiting.pop(0), train)
                        seat.strand.go_on()
                self.answer(busy)
        finally:
            for seat in busy:
                seat.strand.end()

    def answer(self, seats: Sequence[Seat]) -> None:
        """Give every client its gradient where batches can be stacked, and None where it has to go alone."""
        alike: defaultdict[Any, list[Seat]] = defaultdict(list)
        for seat in seats:
            seat.got = None
            alike[tuple((t.shape, t.dtype) for t in seat.pair)].append(seat)
        for some in alike.values():
            if len(some) == 1:
                continue
            try:
                losses = self.stacked([seat.row for seat in some], [seat.pair for seat in some])
            except Exception as error:  # perhaps of one client alone, perhaps the memory for all of them
                what = f"{type(error).__name__}: {one_line(error)}"
                if what not in self.told:
                    log.warning("%d clients go on one by one where a step of all at once raises %s", len(some), what)
                self.told.add(what)
                continue
            for seat, loss in zip(some, losses, strict=True):
                seat.got = loss

    def stacked(self, rows: list[int], pairs: Sequence[Pair]) -> Tensor:
        """Put the gradients of several clients' mean losses into their rows, and move their buffers; returns the
        losses."""
        whole, params, spans = len(rows) == len(self.seats), self.layout.params, self.layout.spans
        index = torch.tensor(rows, device=self.device)
        x_kN = self.x_KN if whole else self.x_KN[index]
        grad_kP = self.grad_KP if whole else torch.empty_like(self.grad_KP[: len(rows)])
        tensors = {span.name: each_row(span, x_kN).clone(memory_format=torch.contiguous_format) for span in spans}
        trained = [tensors[span.name].requires_grad_() for span in spans if span.start < params]
        counters = [dict(self.seats[row].model.named_buffers()) for row in rows]
        ints = {name: torch.stack([buffers[name] for buffers in counters]) for name in self.layout.ints}
        x, y = (torch.stack(alike) for alike in zip(*pairs, strict=True))
        forward = self.path.forward(partial(torch.func.functional_call, self.model), self.device)

        def loss(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self.goal.loss(forward(tensors, (x,)), y, "mean")

        self.model.train()
        with torch.enable_grad():
            losses = torch.vmap(loss)(tensors | ints, x, y)
            grads = torch.autograd.grad(losses.sum(), trained, allow_unused=True, materialize_grads=True)
        for span, grad in zip(spans, grads, strict=False):  # what is trained comes first
            each_row(span, grad_kP).copy_(grad)
        for span in spans[len(trained) :]:  # buffers, moved by the forward pass
            each_row(span, x_kN).copy_(tensors[span.name])
        if not whole:
            self.grad_KP[index] = grad_kP
            self.x_KN[index, params:] = x_kN[:, params:]
        for name, stack in ints.items():
            for buffers, value in zip(counters, stack, strict=True):
                buffers[name].copy_(value)
        return losses.detach()

    def check(self, name: str, samples: Pair) -> None:
        """Refuse a model that cannot be stacked, before anything has started."""
        x, y = (torch.cat([t, t]).to(self.device) for t in samples)  # twice: BatchNorm takes no single one
        start = self.start()
        for seat in self.seats[:2]:
            seat.load(*start)
        try:
            self.stacked([seat.row for seat in self.seats[:2]], [(x, y)] * len(self.seats[:2]))
        except Exception as error:
            why = "it draws (dropout) in training" if "random operation" in str(error) else one_line(error).rstrip(".")
            raise UserError(
                f"model '{name}' cannot be trained with several clients at once: {why}; leave --step.together out"
            ) from error


class Seat(Task):
    """One client's place: a model of its own over its row of each matrix."""

    cid: int
    strand: Strand[Any]
    pair: Pair
    """the batch that it asks the gradient of"""
    got: Tensor | None
    """its loss, where it was in a stack: then the gradient is there too"""

    def __init__(self, whole: Together, row: int) -> None:
        self.__dict__.update(whole.__dict__)  # data, layout and the rest are those of all
        self.row, self.model = row, copy.deepcopy(whole.model)
        self.x_N, self.delta_N, self.grad_P = whole.x_KN[row], whole.delta_KN[row], whole.grad_KP[row]
        self.attach()
        self.forward = self.path.forward(self.model, self.device)

    def sit_down(self, cid: int, train: Callable[[Trainer, int], Any]) -> None:
        """Have a client here that is to be trained."""

        def work() -> Any:
            if self.device.type == "cuda":
                torch.cuda.set_device(self.device)  # it belongs to the thread, as does the grad mode
            with torch.no_grad():
                return train(self, cid)

        self.cid, self.strand = cid, Strand(work)

    def gradient(self, batch: Batch) -> Tensor:
        """As `Task.gradient`, when all clients at work have asked for theirs."""
        self.pair = self.feed.train(batch)
        self.strand.pause()
        return super().gradient(batch) if self.got is None else self.got


def each_row(span: Span, x_kN: Tensor) -> Tensor:
    """A tensor of the model as a view of each row, [k, ...]."""
    flat = x_kN[:, span.start : span.start + span.shape.numel()]
    if not span.channels_last:
        return flat.view(len(flat), *span.shape)
    out, inn, height, width = span.shape
    return flat.view(len(flat), out, height, width, inn).permute(0, 1, 4, 2, 3)

"""Train several clients of a rank at once as one stacked model: for small models, which leave a GPU idle.

A client's rule is a function that requests gradients as it runs. So each active client has a thread, and one thread
runs at a time: a thread that requests a gradient hands over to the next. When all have requested one, batches of the
same shape are stacked, and one forward and backward pass computes every client's gradient (`torch.vmap` turns layers
into grouped convolutions and batched matrix products). A batch of a unique shape, such as the short last one of an
epoch, is computed alone in the ordinary way. So are the clients of a stack that raises, and then each gets its own
error. Rules do not notice.

The arithmetic is that of one client after another, but other kernels round differently, so the last bits of a client
depend on the others. (Measured on a CPU with lenet and logistic: they depend on whether a batch was stacked, not on
the number or identity of the others. That is no guarantee, and who is computed alone depends on who shares the rank.)

K: the clients at once.  k: those of them in one stack.  N: the full padded vector.  P: the trainable parameters.
"""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ..device import make_current, upload
from ..errors import UserError, one_line
from ..flat import Span
from .feed import Batch, Pair
from .still import twin
from .task import Task
from .training import Trainer

log = logging.getLogger("fedmpi")

T = TypeVar("T")


class Ended(BaseException):
    """Raised in a strand that is no longer needed. Not an Exception, so that rules do not catch it."""


class Strand(Generic[T]):
    """A function in a thread that runs only while its owner waits for it: a coroutine made of ordinary code."""

    def __init__(self, work: Callable[[], T]) -> None:
        self.work, self.result, self.error = work, list[T](), list[BaseException]()
        self.mine, self.theirs = threading.Semaphore(0), threading.Semaphore(0)
        self.done = self.ended = False
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        """Run the function (in the thread)."""
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
        """Wait for the owner to resume this strand (in the thread)."""
        self.mine.acquire()
        if self.ended:
            raise Ended

    def pause(self) -> None:
        """Return control to the owner until it resumes this strand (in the thread)."""
        self.theirs.release()
        self.wait()

    def resume(self) -> None:
        """Run the strand until it pauses or is done; raise its error if it failed."""
        self.mine.release()
        self.theirs.acquire()
        if self.error:
            raise self.error[0]

    def end(self) -> None:
        """End the strand, wherever it is."""
        self.ended = True
        self.mine.release()
        self.thread.join()


class Together(Task):
    """A task that trains up to `clients` of its clients at once."""

    def __init__(self, *given: Any, clients: int, **named: Any) -> None:
        super().__init__(*given, **named)
        self.x_KN, self.delta_KN = (torch.zeros(clients, len(self.x_N)).to(self.x_N) for _ in range(2))
        if self.layout.private.length:
            raise UserError("--local.private and --step.together are both given; a stacked model has no private part")
        self.grad_KP = torch.zeros(clients, self.layout.params).to(self.grad_T)
        self.seats = [Seat(self, row) for row in range(clients)]
        self.logged: set[str] = set()

    def each(self, cids: Sequence[int], train: Callable[[Trainer, int], T]) -> Iterator[tuple[int, T]]:
        """Yield each client with the result of `train(task, cid)`, in the order in which they finish. When the next
        result is requested, the finished client's seat is given to the next client."""
        waiting, busy = list(cids), self.seats[: len(cids)]
        for seat in busy:
            seat.assign(waiting.pop(0), train)
        try:
            while busy:
                for seat in list(busy):
                    seat.strand.resume()
                    while seat.strand.done:
                        yield seat.cid, seat.strand.result[0]
                        if not waiting:
                            busy.remove(seat)
                            break
                        seat.assign(waiting.pop(0), train)
                        seat.strand.resume()
                self.compute(busy)
        finally:
            for seat in busy:
                seat.strand.end()

    def compute(self, seats: Sequence[Seat]) -> None:
        """Compute the requested gradients that can be stacked; the loss of a seat that cannot be is None."""
        alike: defaultdict[Any, list[Seat]] = defaultdict(list)
        for seat in seats:
            seat.stacked_loss = None
            alike[tuple((t.shape, t.dtype) for t in seat.pair)].append(seat)
        for some in alike.values():
            if len(some) == 1:
                continue
            try:
                losses = self.stacked([seat.row for seat in some], [seat.pair for seat in some])
            except Exception as error:  # perhaps of one client alone, perhaps out of memory for all of them
                what = f"{type(error).__name__}: {one_line(error)}"
                if what not in self.logged:
                    log.warning("a stacked step of %d clients raised %s; training them one by one", len(some), what)
                self.logged.add(what)
                continue
            for seat, loss in zip(some, losses, strict=True):
                seat.stacked_loss = loss

    def stacked(self, rows: list[int], pairs: Sequence[Pair]) -> Tensor:
        """Write the gradients of several clients' mean losses to their rows and update their buffers; return the
        losses."""
        whole, params, spans = len(rows) == len(self.seats), self.layout.params, self.layout.spans
        index = None if whole else upload(torch.tensor(rows), self.device)
        x_kN = self.x_KN if index is None else self.x_KN[index]
        grad_kP = self.grad_KP if whole else torch.empty_like(self.grad_KP[: len(rows)])
        tensors = {span.name: each_row(span, x_kN).clone(memory_format=torch.contiguous_format) for span in spans}
        trained = [tensors[span.name].requires_grad_() for span in spans if span.start < params]
        counters = [dict(self.seats[row].model.named_buffers()) for row in rows]
        ints = {name: torch.stack([buffers[name] for buffers in counters]) for name in self.layout.ints}
        x, y = (torch.stack(alike) for alike in zip(*pairs, strict=True))
        forward = self.mode.forward(partial(torch.func.functional_call, self.model), self.device)

        def loss(tensors: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return self.goal.loss(*self.goal.align(forward(tensors, (x,)), y), "mean")

        self.model.train()
        with torch.enable_grad():
            losses = torch.vmap(loss)(tensors | ints, x, y)
            grads = torch.autograd.grad(losses.sum(), trained, allow_unused=True, materialize_grads=True)
        for span, grad in zip(spans, grads, strict=False):  # trainable parameters come first
            each_row(span, grad_kP).copy_(grad)
        for span in spans[len(trained) :]:  # buffers, updated by the forward pass
            each_row(span, x_kN).copy_(tensors[span.name])
        if index is not None:
            self.grad_KP[index] = grad_kP
            self.x_KN[index, params:] = x_kN[:, params:]
        for name, stack in ints.items():
            for buffers, value in zip(counters, stack, strict=True):
                buffers[name].copy_(value)
        return losses.detach()

    def check(self, name: str, samples: Pair) -> None:
        """Raise a UserError if the model cannot be stacked."""
        if not all(isinstance(t, Tensor) for t in samples):
            raise UserError("--step.together stacks batches of one tensor, and these have several; leave it out")
        x, y = (torch.cat([t, t]).to(self.device) for t in samples)  # twice: BatchNorm needs two samples
        start = self.start()
        for seat in self.seats[:2]:
            seat.load(*start)
        try:
            self.stacked([seat.row for seat in self.seats[:2]], [(x, y)] * len(self.seats[:2]))
        except Exception as error:
            random = "random operation" in str(error)
            why = "it draws random numbers (dropout) in training" if random else one_line(error).rstrip(".")
            raise UserError(
                f"model '{name}' cannot be trained with several clients at once: {why}; leave --step.together out"
            ) from error


class Seat(Task):
    """One client's slot: a copy of the model over its row of each matrix."""

    cid: int
    strand: Strand[Any]
    pair: Pair  # the batch whose gradient is requested
    stacked_loss: Tensor | None  # the loss, if the gradient was computed in a stack

    def __init__(self, whole: Together, row: int) -> None:
        self.__dict__.update(whole.__dict__)  # data, layout and the rest are shared
        self.row, self.model = row, twin(whole.model)
        self.x_N, self.delta_N, self.grad_T = whole.x_KN[row], whole.delta_KN[row], whole.grad_KP[row]
        self.x_T, self.delta_T = self.x_N[: self.layout.params], self.delta_N[: self.layout.params]
        self.attach()
        self.large = set()  # gradients come from the stack, through `gradient`
        self.forward = self.mode.forward(self.model, self.device)

    def assign(self, cid: int, train: Callable[[Trainer, int], Any]) -> None:
        """Assign a client to this seat and prepare its training."""

        def work() -> Any:
            make_current(self.device)  # per thread, like the grad mode
            with torch.no_grad():
                return train(self, cid)

        self.cid, self.strand = cid, Strand(work)

    def gradient(self, batch: Batch) -> Tensor:
        """Wait until all active clients have requested a gradient; then write this one and return the loss."""
        self.pair = self.feed.train(batch)
        self.strand.pause()
        return super().gradient(batch) if self.stacked_loss is None else self.stacked_loss


def each_row(span: Span, x_kN: Tensor) -> Tensor:
    """Return a view of one model tensor in every row, [k, ...]."""
    flat = x_kN[:, span.start : span.start + span.shape.numel()]
    if not span.channels_last:
        return flat.view(len(flat), *span.shape)
    out, inn, height, width = span.shape
    return flat.view(len(flat), out, height, width, inn).permute(0, 1, 4, 2, 3)

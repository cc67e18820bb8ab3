"""The stand-ins themselves: each rule with a case that must pass and one that must be caught.

A device can be registered once a process and must not reach other tests. So this file is also a program: it runs the
functions named `check_...` (in one process) or `ranks_...` (in two, joined by the stand-in for NCCL) and prints what
each of them raised. The tests start it once and read their line.
"""

from __future__ import annotations

import copy
import gc
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

REPO = Path(__file__).parents[2]
MODULE = "tests.accelerator.test_pretend"

pytestmark = [pytest.mark.accelerator, pytest.mark.xdist_group("accelerator")]

if __name__ == "__main__":
    if sys.argv[1] == "ranks":
        os.environ["PRETEND_UUIDS"] = sys.argv[2]  # a device for each rank; without it they share one
    import torch.distributed.nn.functional  # noqa: F401  before there is a process group, see fedmpi.comm.torch

    from tests.accelerator import nccl, streams
    from tests.accelerator.kernels import default_generators
    from tests.accelerator.memory import alias, memory
    from tests.accelerator.pretend import Event, Fault, Stream, allow_allocations, counted, counts, fail_allocation

    device = torch.get_device_module("pretend")


# Results


def both(work: Callable[[str], list[Tensor]]) -> None:
    """Check that some work has the same bits on the device as on the CPU."""
    expected, found = work("cpu"), work("pretend")
    assert all(t.device.type == "pretend" for t in found)
    assert [t.cpu().tolist() for t in found] == [t.tolist() for t in expected]


def network() -> nn.Module:
    """Return a small network with a layer of each kind."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.BatchNorm2d(4), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5),
    )  # fmt: skip


def train(place: str, lower: bool = False) -> list[Tensor]:
    """Take two steps with momentum."""
    model = network().to(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.randn(6, 1, 8, 8).to(place), torch.tensor([0, 1, 2, 3, 4, 0]).to(place)
    torch.manual_seed(1)
    for _ in range(2):
        optimizer.zero_grad()
        with torch.autocast(place, torch.bfloat16, enabled=lower):
            loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    return [loss.detach(), *(t.detach() for t in model.state_dict().values())]


def check_training_has_the_bits_of_the_cpu() -> None:
    both(train)


def check_autocast_has_the_bits_of_the_cpu() -> None:
    both(lambda place: train(place, lower=True))


def recurrent(kind: type[nn.RNNBase], place: str, twice: bool = False) -> list[Tensor]:
    """Return the output and the gradients of a recurrent layer; with `twice`, second derivatives as well."""
    torch.manual_seed(0)
    layer = kind(3, 5, 2, batch_first=True, dropout=0.2, bidirectional=True).to(place)
    x = torch.randn(2, 7, 3).to(place).requires_grad_()
    torch.manual_seed(1)
    out = layer(x)[0].pow(2).sum()
    found = torch.autograd.grad(out, [x, *layer.parameters()], create_graph=twice)
    if twice:
        found += torch.autograd.grad(sum(g.pow(2).sum() for g in found), x)
    return [out.detach(), *(t.detach() for t in found)]


def check_recurrent_layers_have_the_bits_of_the_cpu() -> None:
    for kind in (nn.GRU, nn.LSTM, nn.RNN):
        both(lambda place, kind=kind: recurrent(kind, place))
    with torch.backends.cudnn.flags(enabled=False):
        both(lambda place: recurrent(nn.GRU, place))


def check_a_recurrent_layer_of_cudnn_has_no_second_derivative() -> None:
    with pytest.raises(RuntimeError, match="Double backwards is not supported for CuDNN RNNs due to limitations"):
        recurrent(nn.GRU, "pretend", twice=True)
    with torch.backends.cudnn.flags(enabled=False):
        both(lambda place: recurrent(nn.GRU, place, twice=True))


def check_a_recurrent_layer_needs_its_state_on_its_device() -> None:
    with pytest.raises(RuntimeError, match="not at the same device"):
        nn.GRU(3, 5).to("pretend")(torch.ones(2, 1, 3, device="pretend"), torch.zeros(1, 1, 5))


def check_views_share_memory_and_data_can_be_replaced() -> None:
    flat = torch.zeros(12, device="pretend")
    layer = nn.Linear(3, 3).to("pretend")
    view = flat[:9].view(3, 3)
    view.copy_(layer.weight.detach())
    layer.weight.data = view
    layer(torch.ones(1, 3, device="pretend")).sum().backward()
    flat[:9] -= layer.weight.grad.reshape(-1)
    assert torch.equal(layer.weight.detach().cpu().reshape(-1), flat[:9].cpu())
    assert flat.view(3, 4).t()[1, 2].item() == flat[9].item()
    strided = torch.arange(6.0, device="pretend").view(2, 3).t()
    assert strided.contiguous().tolist() == [[0, 3], [1, 4], [2, 5]] and strided.unfold(0, 2, 1).shape == (2, 2, 2)


def check_vmap_and_functional_gradients() -> None:
    both(lambda place: [torch.func.vmap(torch.func.grad(lambda w: (w**3).sum()))(torch.ones(4, 3).to(place))])
    layers = [nn.Linear(3, 2).to("pretend") for _ in range(3)]
    params, _ = torch.func.stack_module_state(layers)
    x = torch.ones(3, 1, 3, device="pretend")
    out = torch.func.vmap(lambda p, x: torch.func.functional_call(layers[0], p, (x,)))(params, x)
    assert torch.equal(out[1].cpu(), layers[1](x[1]).cpu())


def check_random_numbers_come_from_the_device() -> None:
    def draw(place: str) -> list[Tensor]:
        torch.manual_seed(3)
        x = torch.ones(50).to(place)
        return [nn.functional.dropout(x, 0.1), torch.rand(5, device=place), torch.randperm(9, device=place)]

    both(draw)
    torch.default_generator.manual_seed(1)
    first = torch.rand(5, device="pretend").tolist()
    torch.default_generator.manual_seed(1)
    assert torch.rand(5, device="pretend").tolist() != first, "the CPU's seed moved the device's generator"


def check_deepcopy_keeps_what_is_shared() -> None:
    flat = torch.arange(6.0, device="pretend")
    a, b, gap = copy.deepcopy((flat[:4], flat[2:], flat))
    a[3] = 9
    assert b[1].item() == gap[3].item() == 9 and flat[3].item() == 3
    assert copy.deepcopy(nn.Linear(2, 2).to("pretend")).weight.device.type == "pretend"


def check_tensors_are_saved_and_loaded() -> None:
    saved = {"x": torch.arange(3.0, device="pretend")}
    path = Path(os.environ["PRETEND_TEST_FOLDER"]) / "saved.pt"
    torch.save(saved, path)
    assert torch.load(path, map_location="cpu")["x"].device.type == "cpu"
    loaded = torch.load(path)["x"]
    assert loaded.device.type == "pretend" and loaded.tolist() == [0, 1, 2]


def check_results_may_outgrow_what_they_are_given() -> None:
    out = torch.empty(0, device="pretend")
    torch.add(torch.ones(3, device="pretend"), 1, out=out)
    assert out.tolist() == [2, 2, 2]
    assert out.resize_(5)[:3].tolist() == [2, 2, 2]


def check_threads_have_a_device_of_their_own() -> None:
    found = []

    def work() -> None:
        device.set_device(1)
        found.append((torch.ones(2, device="pretend").device.index, device.current_device()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [(1, 1)] and device.current_device() == 0


# The module


def check_the_module_describes_its_devices() -> None:
    assert device.is_available() and device.is_initialized() and device.device_count() == 2
    first, second = device.get_device_properties(0), device.get_device_properties("pretend:1")
    assert first.uuid != second.uuid and first.name == device.get_device_name() and first.total_memory > 2**30
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    with device.device(1):
        assert device.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.ones(1, device="pretend").device.index == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal 7"):
        device.set_device(7)


def check_training_runs_on_the_second_device() -> None:
    x = torch.ones(3, device="pretend:1", requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad.device.index == 1 and x.to("pretend:0").device.index == 0


def check_a_seed_is_for_the_current_device_only() -> None:
    def draw() -> list[list[float]]:
        return [torch.rand(2, device=f"pretend:{index}").tolist() for index in range(2)]

    device.manual_seed_all(5)
    first = draw()
    device.manual_seed(5)
    second = draw()
    assert first[0] == second[0] and first[1] != second[1]
    state = device.get_rng_state(1)
    third = draw()
    device.set_rng_state(state, 1)
    assert draw()[1] == third[1]
    with torch.random.fork_rng(devices=[0, 1], device_type="pretend"):
        inside = draw()
    assert draw() == inside


# What CUDA refuses


def check_operands_must_be_on_one_device() -> None:
    x = torch.ones(3, device="pretend")
    assert (x + torch.tensor(2.0)).tolist() == [3, 3, 3]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(3, device="pretend:1")
    with pytest.raises(TypeError, match="convert pretend:0 device type tensor to numpy"):
        x.numpy()


def check_indices_of_the_cpu_make_the_host_wait() -> None:
    x, some = torch.arange(4.0, device="pretend"), torch.tensor([1, 2], device="pretend")
    with counted():
        x[some]
        x[1:3] = 0
        assert not counts.waits
        x[torch.tensor([1, 2])]
        x[x > 1]
        assert counts.waits == {"index by indices of the CPU": 1, "index by a mask": 1}


def check_generators_of_the_cpu_are_refused() -> None:
    torch.rand(2, device="pretend", generator=default_generators[0])
    with pytest.raises(RuntimeError, match="Expected a 'pretend' device type for generator but found 'cpu'"):
        torch.rand(2, device="pretend", generator=torch.Generator())


@contextmanager
def deterministic() -> Iterator[None]:
    """Ask for deterministic algorithms in the block."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def check_kernels_that_are_not_deterministic() -> None:
    x = torch.randn(2, 2, 6, 6, device="pretend", requires_grad=True)
    probs = torch.randn(5, 1, 3, device="pretend", requires_grad=True)
    calls: dict[str, Callable[[], Tensor]] = {
        "adaptive_avg_pool2d_backward_cuda": lambda: nn.functional.adaptive_avg_pool2d(x, 4),
        "adaptive_max_pool2d_backward_cuda": lambda: nn.functional.adaptive_max_pool2d(x, 4),
        "adaptive_avg_pool3d_backward_cuda": lambda: nn.functional.adaptive_avg_pool3d(x, 2),
        "avg_pool3d_backward_cuda": lambda: nn.functional.avg_pool3d(x, 2),
        "upsample_bicubic2d_backward_out_cuda": lambda: nn.functional.interpolate(x, scale_factor=2, mode="bicubic"),
        "reflection_pad2d_backward_cuda": lambda: nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"),
        "ctc_loss_backward_gpu": lambda: nn.functional.ctc_loss(
            probs.log_softmax(-1), torch.tensor([[1, 2]], device="pretend"), torch.tensor([5]), torch.tensor([2])
        ),
    }
    for name, call in calls.items():
        call().sum().backward()
        with deterministic():
            out = call().sum()
            with pytest.raises(RuntimeError, match=f"{name} does not have a deterministic implementation, but you set"):
                out.backward()
    with deterministic():
        nn.functional.max_pool2d(x, 2).sum().backward()
        with pytest.raises(RuntimeError, match="cumsum_cuda_kernel does not have"):
            x.cumsum(0)


def check_cublas_must_be_configured() -> None:
    x = torch.ones(2, 2, device="pretend")
    x @ x
    with deterministic():
        with pytest.raises(RuntimeError, match="CUBLAS_WORKSPACE_CONFIG=:4096:8"):
            x @ x
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
        try:
            x @ x
        finally:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


# Memory


def check_memory_is_counted_until_its_storage_goes() -> None:
    gc.collect()
    before = device.memory_allocated()
    device.reset_peak_memory_stats()
    x = torch.zeros(1000, device="pretend")
    view = x[10:].add_(1)
    del x
    assert device.memory_allocated() - before == 4000
    del view
    assert device.memory_allocated() == before and device.max_memory_allocated() - before == 4000
    free, total = device.mem_get_info()
    assert total - free == before
    counts.clear()
    device.empty_cache()
    assert counts.cache_emptied == 1


def check_memory_runs_out_on_demand() -> None:
    x = torch.ones(100, device="pretend")
    fail_allocation(after=1, times=2)
    y = x + 1
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError, match="pretend out of memory. Tried to allocate 400 bytes"):
            x + y
    assert (x + y).sum().item() == 300
    fail_allocation(larger_than=1000, times=9)
    x + 1
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 3.91 KiB. Device 0 has a total capacity of"):
        torch.empty(1000, device="pretend")
    allow_allocations()
    torch.empty(1000, device="pretend")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(2**40, device="pretend")


def check_pinned_memory_is_known_by_its_address() -> None:
    x = torch.arange(8.0).pin_memory()
    assert x.tolist() == list(range(8)) and x.is_pinned() and x[3:].is_pinned() and x.view(2, 4).t().is_pinned()
    assert x.pin_memory() is x and torch.from_numpy(x.numpy()).is_pinned()
    assert torch.empty(3, pin_memory=True).is_pinned() and torch.zeros(3, dtype=torch.int8, pin_memory=True).is_pinned()
    assert not torch.empty(3).is_pinned() and not torch.ones(3, device="pretend").is_pinned()
    assert torch.ones(3, device="pretend").to("cpu", non_blocking=True).is_pinned()
    device.synchronize()
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        torch.ones(3, device="pretend").pin_memory()


# Counters


def check_kernels_are_counted() -> None:
    tensors = [torch.ones(3, device="pretend") for _ in range(9)]
    with counted():
        torch._foreach_add_(tensors, 1)
        nn.functional.dropout(tensors[0], 0.5)
        tensors[0].view(3, 1)[1:]
        kernels = ("aten._foreach_add_.Scalar", "aten.native_dropout.default", "aten.mul.Tensor")
        assert counts.kernels == dict.fromkeys(kernels, 1)


def check_waits_are_counted_and_located() -> None:
    x, pinned = torch.ones(3, device="pretend"), torch.zeros(3).pin_memory()
    free: list[Callable[[], object]] = [
        lambda: (x * 2).sum(),
        lambda: pinned.copy_(x, non_blocking=True),
        lambda: x.copy_(pinned, non_blocking=True),
        lambda: Event().record(),
    ]
    waits: dict[str, Callable[[], object]] = {
        "_local_scalar_dense": lambda: bool(x.sum() > 0),
        "nonzero": lambda: x.nonzero(),
        "copy to the host": lambda: x.cpu(),
        "copy to the device": lambda: torch.tensor([1.0], device="pretend"),
        "non_blocking copy to memory that is not pinned": lambda: torch.zeros(3).copy_(x, non_blocking=True),
        "non_blocking copy from memory that is not pinned": lambda: torch.zeros(3).to("pretend", non_blocking=True),
        "synchronize the device": lambda: device.synchronize(),
        "synchronize a stream": lambda: device.current_stream().synchronize(),
        "synchronize an event": lambda: Event().synchronize(),
    }
    for call in free:
        with counted():
            call()
            assert not counts.waits
        device.synchronize()
    counts.watched = ("__main__",)
    try:
        for name, call in waits.items():
            with counted():
                call()
                assert counts.waits == {name: 1}, (name, counts.waits)
                ((place, number),) = counts.where.items()
                assert number == 1 and place == f"{name}: {__file__}:{call.__code__.co_firstlineno}", place
    finally:
        counts.watched = ("fedmpi",)
    with counted():
        torch.zeros(5).to("pretend").cpu()
        assert (counts.bytes_to_device, counts.bytes_to_host) == (20, 20)


# Streams


def filled(value: float, count: int = 8) -> Tensor:
    """Return a device tensor that is ready."""
    x = torch.full((count,), float(value), device="pretend")
    device.synchronize()
    return x


def check_a_copy_to_the_host_lands_when_the_host_waits() -> None:
    x = filled(1)
    for wait in ("event", "query", "stream", "device"):
        pinned, event = torch.zeros(8).pin_memory(), Event()
        pinned.copy_(x, non_blocking=True)
        event.record()
        assert pinned.view(torch.uint8).eq(0x7F).all()
        if wait == "event":
            event.synchronize()
        elif wait == "query":
            assert not event.query() and pinned[0] != 1 and event.query()
        elif wait == "stream":
            device.current_stream().synchronize()
        else:
            device.synchronize()
        assert pinned.eq(1).all(), wait


def check_an_event_covers_only_what_came_before_it() -> None:
    x, pinned, event = filled(1), torch.zeros(8).pin_memory(), Event()
    event.record()
    pinned.copy_(x, non_blocking=True)
    event.synchronize()
    assert pinned[0] != 1
    device.synchronize()
    assert pinned[0] == 1


def check_the_target_of_a_copy_must_not_be_written() -> None:
    pinned = torch.zeros(8).pin_memory()
    pinned.copy_(filled(1), non_blocking=True)
    pinned[0] = 5
    with pytest.raises(Fault, match="pinned memory was written while a copy to it was under way"):
        device.synchronize()


def check_the_source_of_a_copy_from_the_host_must_not_change() -> None:
    x, pinned = filled(0), torch.ones(8).pin_memory()
    x.copy_(pinned, non_blocking=True)
    device.synchronize()
    pinned.fill_(2)
    x.copy_(pinned, non_blocking=True)
    pinned[3] = 7
    with pytest.raises(Fault, match="pinned memory was overwritten while it was copied"):
        device.synchronize()


def check_pinned_memory_may_be_handed_on_by_the_stream() -> None:
    x, y, pinned = filled(1), filled(2), torch.zeros(8).pin_memory()
    pinned.copy_(x, non_blocking=True)
    y.copy_(pinned, non_blocking=True)
    device.synchronize()
    assert y.eq(1).all().item() and pinned.eq(1).all()


def check_a_copy_on_a_side_stream_waits_for_its_source() -> None:
    side, pinned = Stream(), torch.zeros(8).pin_memory()
    for how in ("stream", "event", "host", "not"):
        x = filled(0)
        x += 1
        if how == "stream":
            side.wait_stream(device.current_stream())
        elif how == "event":
            side.wait_event(device.current_stream().record_event())
        elif how == "host":
            device.synchronize()
        with device.stream(side):
            pinned.copy_(x, non_blocking=True)
        side.synchronize()
        assert bool(pinned.eq(1).all()) == (how != "not"), how
        device.synchronize()


def check_a_kernel_waits_for_a_copy_on_a_side_stream() -> None:
    side, pinned = Stream(), torch.ones(8).pin_memory()
    for waits in (True, False):
        x = filled(0)
        with device.stream(side):
            x.copy_(pinned, non_blocking=True)
            done = side.record_event()
        if waits:
            done.wait()
            assert (x + 1).sum().item() == 16
        else:
            with pytest.raises(Fault, match="without waiting for it"):
                x + 1
        device.synchronize()


def check_the_source_of_a_copy_on_a_side_stream_must_stay() -> None:
    side, pinned = Stream(), torch.zeros(4).pin_memory()
    for how in ("event", "host", "elsewhere", "not"):
        x = filled(1)
        with device.stream(side):
            pinned.copy_(x[:4], non_blocking=True)
        if how == "event":
            device.current_stream().wait_event(side.record_event())
        elif how == "host":
            side.synchronize()
        if how == "not":
            with pytest.raises(Fault, match="memory was overwritten while it was copied"):
                x.zero_()
        elif how == "elsewhere":
            x[4:].zero_()
        else:
            x.zero_()
        device.synchronize()
        assert pinned.eq(1).all()


def check_new_memory_belongs_to_the_stream_that_allocated_it() -> None:
    side, pinned = Stream(), torch.ones(8).pin_memory()
    torch.ones(1, device="pretend")
    x = torch.empty(8, device="pretend")
    with device.stream(side):
        with pytest.raises(Fault, match="without waiting for it"):
            x.copy_(pinned, non_blocking=True)
        side.wait_stream(device.default_stream())
        x.copy_(pinned, non_blocking=True)
        torch.empty(8, device="pretend").copy_(pinned, non_blocking=True)


def check_memory_in_use_elsewhere_is_not_freed() -> None:
    side = Stream()
    for how in ("record", "wait", "not"):
        x, pinned = filled(1), torch.zeros(8).pin_memory()
        with device.stream(side):
            pinned.copy_(x, non_blocking=True)
        if how == "record":
            x.record_stream(side)
        del x
        if how == "wait":
            device.current_stream().wait_stream(side)
        if how == "not":
            with pytest.raises(Fault, match="freed and allocated again while another stream used them"):
                torch.empty(8, device="pretend")
        else:
            torch.empty(8, device="pretend")
        device.synchronize()


def check_backward_runs_on_the_stream_of_its_caller() -> None:
    side = Stream()
    w = filled(2).requires_grad_()
    with device.stream(side):
        (w * w).sum().backward()
        pinned = w.grad.to("cpu", non_blocking=True)
    with pytest.raises(Fault, match="without waiting for it"):
        w.grad + 1
    side.synchronize()
    assert pinned.eq(4).all() and (w.grad + 1).sum().item() == 40


def check_streams_and_events_have_the_api_of_cuda() -> None:
    stream, event = Stream(priority=-1), Event(enable_timing=True)
    with stream:
        assert device.current_stream() is stream and device.default_stream() is not stream
        filled(1)
        event.record()
    assert event.query() and event.elapsed_time(stream.record_event()) == 0.0
    assert device.current_stream() is device.default_stream() is torch.accelerator.current_stream()
    with device.stream(None):
        torch.accelerator.synchronize()
    assert stream.query()


# NCCL, on two ranks


def ranks_collectives(rank: int) -> None:
    x = torch.full((4,), rank + 1, device="pretend")
    dist.all_reduce(x)
    assert x.tolist() == [3] * 4
    dist.broadcast(x if rank else x.mul_(2), 0)
    assert x.tolist() == [6] * 4
    whole = torch.empty(6, dtype=torch.int64, device="pretend")
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(whole, torch.arange(3, device="pretend") + 10 * rank)
    assert whole.tolist() == [0, 1, 2, 10, 11, 12]
    part = torch.empty(3, dtype=torch.int64, device="pretend")
    getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)(part, whole)
    assert part.tolist() == [2 * v for v in whole.tolist()[3 * rank : 3 * rank + 3]]
    mean = torch.full((2,), float(rank), device="pretend")
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    assert mean.tolist() == [0.5, 0.5]


def ranks_cpu_tensors_go_to_gloo(rank: int) -> None:
    assert dist.get_default_backend_for_device("pretend") == "strict"
    x = torch.ones(3)
    dist.all_reduce(x)
    found: list[Any] = [None, None]
    dist.all_gather_object(found, rank)
    dist.barrier()
    assert x.tolist() == [2, 2, 2] and found == [0, 1]


def swap(rank: int, sent: Tensor, received: Tensor) -> list[Any]:
    """Exchange tensors with the other rank."""
    ops = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, sent, 1 - rank)]
    return dist.batch_isend_irecv(ops)


def ranks_messages_in_a_batch(rank: int) -> None:
    for dtype in sorted(nccl.TYPES, key=str):
        sent = torch.full((5,), rank, device="pretend").to(dtype)
        received = torch.empty(5, dtype=dtype, device="pretend")
        with counted():
            for work in swap(rank, sent, received):
                work.wait()
            assert not counts.waits and counts.kernels["nccl batch"] == 1
        assert received.tolist() == [1 - rank] * 5, dtype
    one = torch.full((1,), rank, device="pretend")
    (dist.irecv(one, 0) if rank else dist.isend(one, 1)).wait()
    assert one.item() == 0


def ranks_nothing_has_arrived_before_wait(rank: int) -> None:
    sent, received = torch.ones(5, device="pretend"), torch.zeros(5, device="pretend")
    works = swap(rank, sent, received)
    with pytest.raises(Fault, match="without waiting for it"):
        received + 1
    assert received.cpu().view(torch.uint8).eq(0x7F).all()
    for work in works:
        work.wait()
    assert received.sum().item() == 5


def ranks_what_is_sent_must_stay(rank: int) -> None:
    sent, received = torch.ones(5, device="pretend"), torch.zeros(5, device="pretend")
    works = swap(rank, sent, received)
    with pytest.raises(Fault, match="memory was overwritten"):
        sent.zero_()
    works[0].wait()
    sent.zero_()
    works = swap(rank, sent, received)
    alias(sent).fill_(3)  # not by a kernel of the device: seen by the bytes
    with pytest.raises(Fault, match="what is being sent was changed before wait"):
        works[0].wait()


def ranks_what_waits_are_streams(rank: int) -> None:
    side, x = Stream(), filled(1)
    with device.stream(side):
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        x.mul_(2)
    with pytest.raises(Fault, match="without waiting for it"):
        x + 1
    device.current_stream().wait_stream(side)
    assert x.eq(4).all().item()


def ranks_types_strides_and_places_are_checked(rank: int) -> None:
    with pytest.raises(TypeError, match="not supported for NCCL process group"):
        dist.all_reduce(torch.zeros(2, dtype=torch.int16, device="pretend"))
    with pytest.raises(ValueError, match="Tensors must be contiguous"):
        dist.all_reduce(torch.zeros(4, 4, device="pretend").t())
    config = dist.distributed_c10d._world.pg_backend_config
    (group,) = config
    config[group], before = "pretend:strict", config[group]
    try:
        with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
            dist.all_reduce(torch.zeros(2))
    finally:
        config[group] = before


# The program


def clean() -> None:
    """Leave nothing of one function to the next."""
    allow_allocations()
    device.set_device(0)
    memory.freed_in_use.clear()
    streams._landings.clear()
    for one in streams._streams:
        streams.merge(streams.host, one.clock)
    counts.clear()


def run_functions(prefix: str, *args: int) -> dict[str, str]:
    """Run all functions of a kind; return what each of them raised."""
    raised = {}
    for name, function in list(globals().items()):
        if name.startswith(prefix):
            try:
                function(*args)
                raised[name] = ""
            except BaseException:  # of which pytest.fail is one
                raised[name] = traceback.format_exc()
            clean()
    return raised


def as_rank(rank: int, store: str) -> dict[str, str]:
    """Join the other rank, and run what needs both."""
    group = dist.FileStore(store, 2)
    limit = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,pretend:strict", store=group, rank=rank, world_size=2, timeout=limit)
    try:
        if os.environ.get("PRETEND_UUIDS") == str(rank):
            return run_functions("ranks_", rank)
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(1, device="pretend"))
        return {"message": str(error.value)}
    finally:
        dist.destroy_process_group()


def outputs(*programs: list[str], **environment: str) -> list[str]:
    """Return what Python programs print that run at the same time with the repository on their path."""
    ours = {k: v for k, v in os.environ.items() if not k.startswith(("PRETEND_", "CUBLAS_"))}
    ours |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | environment
    pipe = subprocess.PIPE
    with ExitStack() as stack:
        started = []
        for argv in programs:
            process = subprocess.Popen([sys.executable, *argv], env=ours, stdout=pipe, stderr=pipe, text=True)
            started.append(stack.enter_context(process))
            stack.callback(process.kill)
        printed = [process.communicate(timeout=200) for process in started]
    for process, (_, err) in zip(started, printed, strict=True):
        assert process.returncode == 0, err[-3000:]
    return [out for out, _ in printed]


@pytest.fixture(scope="module", autouse=True)
def device_present() -> None:
    from tests.accelerator.launch import need_device  # which a program cannot import

    need_device()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the functions for one process raised."""
    from tests.accelerator.launch import once

    def check(folder: Path) -> str:
        (out,) = outputs(["-m", MODULE, "check"], PRETEND_DEVICES="2", PRETEND_TEST_FOLDER=str(folder))
        return out

    return json.loads(once(tmp_path_factory, "alone", check))


def two_ranks(folder: Path, kind: str) -> list[dict[str, str]]:
    """Return what each of two ranks printed."""
    programs = [["-m", MODULE, kind, str(rank), str(folder / "store")] for rank in range(2)]
    return [json.loads(out) for out in outputs(*programs)]


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What the functions for two ranks raised on each."""
    from tests.accelerator.launch import once

    return json.loads(once(tmp_path_factory, "together", lambda folder: json.dumps(two_ranks(folder, "ranks"))))


CHECKS = [name for name in list(globals()) if name.startswith("check_")]
RANKS = [name for name in list(globals()) if name.startswith("ranks_")]


@pytest.mark.parametrize("name", CHECKS)
def test_device(name: str, alone: dict[str, str]) -> None:
    assert not alone[name], alone[name]


@pytest.mark.parametrize("name", RANKS)
def test_nccl(name: str, together: list[dict[str, str]]) -> None:
    for raised in together:
        assert not raised[name], raised[name]


def test_two_ranks_on_one_device_are_refused(tmp_path: Path) -> None:
    for found in two_ranks(tmp_path, "twins"):
        first, *middle, last = found["message"].splitlines()
        assert first.startswith("NCCL error in: ") and "invalid usage" in first and middle[-1] == "Last error:"
        assert last == "Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 1000"


def test_the_environment_sets_uuids_and_memory() -> None:
    text = (
        "import torch; from tests.accelerator import pretend; m = torch.get_device_module('pretend'); r = []\n"
        "torch.empty(25, device='pretend')\n"
        "try: torch.empty(26, device='pretend')\n"
        "except torch.OutOfMemoryError as error: r = [str(error)]\n"
        "import json; print(json.dumps([m.get_device_properties(i).uuid for i in range(2)] + r))"
    )
    limits = {"PRETEND_OOM": "100", "PRETEND_MEMORY": "1048576"}
    (out,) = outputs(["-c", text], PRETEND_DEVICES="2", PRETEND_UUIDS="a,b", **limits)
    *uuids, message = json.loads(out)
    assert uuids == ["a", "b"] and "104 bytes. Device 0 has a total capacity of 1.00 MiB" in message


def test_fedmpi_runs_with_the_device_present() -> None:
    text = "import tests.accelerator.run, torch; print(torch.accelerator.current_accelerator())"
    ran, imported = outputs(["-m", "tests.accelerator.run", "help", "train"], ["-c", text])
    assert "--device" in ran and imported == "pretend\n"


if __name__ == "__main__":
    found = run_functions("check_") if sys.argv[1] == "check" else as_rank(int(sys.argv[2]), sys.argv[3])
    print(json.dumps(found))

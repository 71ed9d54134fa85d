"""That a paced device under DDP is honest: no bucket leaves early, and exchanging gradients is no computing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from potluck.device import base, paced
from potluck.device.paced import PacedDevice
from potluck.lab.ddp_worker import Timed

S = 0.5  # seconds a sample
LAYERS = 6


class Clock:
    """Stands for the time module: computing takes no time, sleeping what was asked."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class Counting(PacedDevice):
    """Remembers what end() returned and when."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(S)
        self.clock = clock
        self.ended: list[tuple[float, float]] = []

    def end(self) -> float:
        seconds = super().end()
        self.ended.append((self.clock.now_s, seconds))
        return seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(base, "time", clock)
    monkeypatch.setattr(paced, "time", clock)
    return clock


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def model_of_layers() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))  # 16 KB each


@pytest.mark.usefixtures("group")
def test_no_bucket_leaves_before_it_could_have_been_computed_and_exchange_is_no_computing(clock: Clock) -> None:
    device, model = Counting(clock), model_of_layers()
    device.attach(model)
    timed = Timed(device, list(model.parameters()))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.03)  # some buckets of one or two layers
    number = {id(p): i for i, p in enumerate(model.parameters())}
    sent: list[tuple[float, set[int]]] = []

    def exchange(state, bucket):  # type: ignore[no-untyped-def]  # DDP cannot read annotations of the future
        sent.append((clock.now_s, {number[id(p)] for p in bucket.parameters()}))
        if bucket.is_last():
            clock.now_s += 10.0  # the network takes its time
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, exchange)
    for turn in range(3):
        sent.clear()
        began_s = clock.now_s
        timed.begin(3)
        ddp(torch.randn(3, 64)).sum().backward()
        timed.after_backward()
        assert turn == 0 or len(sent) > 2  # DDP makes its buckets when it has seen the order of the gradients
        assert set.union(*(layers for _, layers in sent)) == set(range(LAYERS))
        for at_s, layers in sent:
            # The backward goes from the last layer to the first: a bucket needs all from its first layer on.
            needed = 3 * S * (1 / 3 + 2 / 3 * (LAYERS - min(layers)) / LAYERS)
            assert at_s - began_s >= needed - 1e-9
        ended_at_s, computed_s = device.ended[-1]
        assert computed_s == pytest.approx(3 * S)
        assert ended_at_s - began_s == pytest.approx(3 * S)
        assert clock.now_s - began_s == pytest.approx(3 * S + 10.0)
    assert len(device.ended) == 3


@pytest.mark.usefixtures("group")
def test_every_micro_batch_ends_once(clock: Clock) -> None:
    device, model = Counting(clock), model_of_layers()
    device.attach(model)
    timed = Timed(device, list(model.parameters()))
    ddp = DistributedDataParallel(model)
    start_s = clock.now_s
    with ddp.no_sync():
        for _ in range(2):
            timed.begin(2)
            ddp(torch.randn(2, 64)).sum().backward()
            timed.after_backward()
    timed.begin(1)
    ddp(torch.randn(1, 64)).sum().backward()
    timed.after_backward()
    assert [seconds for _, seconds in device.ended] == pytest.approx([2 * S, 2 * S, S])
    assert clock.now_s - start_s == pytest.approx(5 * S)


def test_a_model_with_a_part_that_has_no_gradient_ends_with_its_backward(clock: Clock) -> None:
    device, model = Counting(clock), model_of_layers()
    device.attach(model)
    timed = Timed(device, list(model.parameters()))
    timed.begin(2)
    model[2:](torch.randn(2, 64)).sum().backward()
    assert not device.ended
    timed.after_backward()
    assert [seconds for _, seconds in device.ended] == pytest.approx([2 * S])

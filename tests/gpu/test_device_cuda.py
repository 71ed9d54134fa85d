"""Marks and streams of a CUDA device, and micro-batches queued ahead of it."""

from __future__ import annotations

import threading
import time

import torch

from potluck.device import pick
from potluck.train.flight import Flight

TICKS_A_MS = 1.7e6


def occupy(milliseconds: float) -> None:
    torch.cuda._sleep(int(milliseconds * TICKS_A_MS))


def test_work_beside_does_not_wait_for_the_training_stream() -> None:
    device = pick("cuda")
    there = torch.arange(1000.0, device=device.torch_device)
    torch.cuda.synchronize()
    warm, occupied = threading.Event(), threading.Event()
    found: list[float] = []

    def beside() -> None:
        with device.beside():
            # Loading a kernel, and new memory on either side, do wait for all streams: once each.
            device.to_host(there * 2).sum()
            warm.set()
            assert occupied.wait(30.0)
            found.append(float(device.to_host(there * 2).sum()))

    thread = threading.Thread(target=beside)
    thread.start()
    assert warm.wait(30.0)
    torch.cuda.synchronize()
    occupy(300)
    training = device.mark()
    occupied.set()
    thread.join()
    assert not training.passed(), "it waited for the training stream"
    assert found == [999_000.0]
    torch.cuda.synchronize()


def test_work_beside_comes_after_the_mark_it_names() -> None:
    device = pick("cuda")
    there = torch.zeros(1 << 20, device=device.torch_device)
    torch.cuda.synchronize()
    for value in range(1, 6):
        occupy(20)
        there.fill_(value)
        written = device.mark()
        with device.beside():
            device.after(written)
            assert device.to_host(there).eq(value).all()


def test_bytes_from_host_may_change_once_given_away() -> None:
    device = pick("cuda")
    source = torch.full((1 << 20,), 7, dtype=torch.uint8)
    occupy(50)
    one, joined = device.from_host(source), device.joined([source[:100], source[100:]])
    source.zero_()
    assert one.eq(7).all()
    assert joined.eq(7).all()


def test_micro_batches_are_queued_ahead_and_their_times_add_up() -> None:
    device = pick("cuda")
    landed: list[tuple[int, float]] = []
    flight = Flight(device, lambda samples, seconds: landed.append((samples, seconds)))
    occupy(1)
    torch.cuda.synchronize()
    started = time.monotonic()
    for number in range(8):
        began = time.monotonic()
        occupy(30)
        flight.launched(number + 1, began)
        assert len(landed) >= number - device.ahead
    assert len(landed) == 8 - device.ahead, "as many are in flight as the device allows"
    flight.finish()
    passed = time.monotonic() - started
    assert [samples for samples, _ in landed] == list(range(1, 9))
    assert abs(sum(seconds for _, seconds in landed) - passed) < 0.02


def test_a_paced_gpu_keeps_its_pace() -> None:
    device = pick("paced:0.02@cuda")
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).to(device.torch_device)
    device.attach(model)
    batch = torch.randn(4, 64, device=device.torch_device)
    model(batch).sum().backward()
    started = time.monotonic()
    for _ in range(5):
        device.begin(4)
        model(batch).sum().backward()
        device.end()
    assert 0.39 <= time.monotonic() - started < 0.5

"""Micro-batches in flight: in order, no more than the device allows, and their times add up to what passed."""

from __future__ import annotations

import time

import pytest
import torch

from potluck.codec import add_decoded, get
from potluck.device import pick
from potluck.device.cpu import CpuDevice
from potluck.errors import ConfigError
from potluck.train.flight import Flight
from support.coder_pair import Pair, flat
from support.queueing import Queueing


def test_a_device_that_works_at_once_has_nothing_in_flight() -> None:
    landed: list[int] = []
    flight = Flight(CpuDevice(), lambda samples, seconds: landed.append(samples))
    for number in range(3):
        flight.launched(number + 1, time.monotonic())
        assert landed == list(range(1, number + 2))
        assert not flight.busy


def test_a_device_that_queues_is_no_further_ahead_than_it_allows() -> None:
    landed: list[tuple[int, float]] = []
    device = Queueing(0.01)
    device.ahead = 2
    flight = Flight(device, lambda samples, seconds: landed.append((samples, seconds)))
    started = time.monotonic()
    for number in range(6):
        flight.launched(number + 1, time.monotonic())
        assert len(landed) == max(0, number - 1)
    flight.finish()
    passed = time.monotonic() - started
    assert [samples for samples, _ in landed] == list(range(1, 7))
    assert sum(seconds for _, seconds in landed) <= passed


def test_an_update_lands_behind_its_micro_batches_and_nobody_waits_for_it() -> None:
    landed: list[str] = []
    device = Queueing(0.2)
    device.ahead = 2
    flight = Flight(device, lambda samples, seconds: landed.append(f"{samples} samples"))
    flight.launched(4, time.monotonic())
    flight.follows(time.monotonic(), lambda now, seconds: landed.append("update"))
    assert flight.busy
    assert not landed
    assert 0.3 < flight.behind_s(0.1) <= 0.4, "four samples of a tenth of a second"
    flight.launched(5, time.monotonic())
    assert landed == ["4 samples"], "no more are out than the device allows"
    time.sleep(0.45)
    assert not flight.busy
    assert landed == ["4 samples", "update", "5 samples"]
    assert flight.behind_s(0.1) == 0.0


@pytest.mark.parametrize("name", ["none", "fp16", "int8", "int4"])
def test_sums_of_pieces_are_sums_of_what_each_decodes_to(name: str) -> None:
    codec, counts = get(name), [256, 256, 77]
    total, expected = torch.full((sum(counts),), float("nan")), torch.zeros(sum(counts))
    for turn in range(3):
        payloads = [codec.encode(torch.randn(count)) for count in counts]
        add_decoded(codec, torch.cat(payloads), counts, total, first=turn == 0, room=torch.empty)
        expected = expected + torch.cat([codec.decode(p, n) for p, n in zip(payloads, counts)])
    assert torch.equal(total, expected)


def test_a_replica_in_host_memory_is_the_guests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.hub.layout.SMALLEST_PIECE", 256)
    with Pair("int4", replica_on_host=True).running() as pair:
        for _ in range(3):
            pair.sync()
            pair.update()
        pair.sync()
        assert (pair.check_same_bits() - flat(pair.tensors)).abs().amax() <= 1e-2


def test_a_paced_device_is_told_where_it_can_compute() -> None:
    with pytest.raises(ConfigError, match="cpu or cuda"):
        pick("paced:0.1@tpu")
    assert pick("paced:0.1@cpu").label.endswith("on cpu")

"""What every device promises, run on all that this machine has, the fake one among them."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from potluck.device import Device, pick
from support import fake_device

NAMES = ["cpu", "paced:0.0005"]
NAMES += ["fake"] * fake_device.available()
NAMES += ["cuda"] * torch.cuda.is_available() + ["mps"] * torch.backends.mps.is_available()


@pytest.fixture(params=NAMES)
def device(request: pytest.FixtureRequest) -> Device:
    if request.param == "fake":
        fake_device.install()
    return pick(request.param, threads=1)


def test_says_what_it_is(device: Device) -> None:
    assert device.kind in ("cpu", "paced", "fake", "cuda", "mps")
    assert device.label
    assert device.reason == "asked for by name"


def test_tensors_survive_the_way_there_and_back(device: Device) -> None:
    for dtype in (torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool):
        original = (torch.randn(7, 5) * 3).abs().to(dtype)
        there = device.from_host(original)
        assert there.device.type == device.torch_device.type
        back = device.to_host(there)
        assert back.device.type == "cpu"
        assert back.is_contiguous()
        assert back.dtype == dtype
        assert torch.equal(back, original)


def test_a_strided_view_arrives_contiguous_and_right(device: Device) -> None:
    original = torch.arange(60.0).view(6, 10)
    there = device.from_host(original)
    for view, expected in [
        (there.t(), original.t()),
        (there[1:4, ::3], original[1:4, ::3]),
        (there.view(-1)[7:23], original.view(-1)[7:23]),
    ]:
        host = device.to_host(view)
        assert host.is_contiguous()
        assert torch.equal(host, expected)


def test_a_strided_host_tensor_goes_there_right(device: Device) -> None:
    strided = torch.arange(60.0).view(6, 10)[:, ::2].t()
    assert torch.equal(device.to_host(device.from_host(strided)), strided)


def test_a_parameter_can_be_staged(device: Device) -> None:
    parameter = nn.Parameter(torch.randn(3, 3, device=device.torch_device))
    host = device.to_host(parameter)
    assert not host.requires_grad
    assert host.numpy().shape == (3, 3)


def test_empty_tensors_can_be_staged(device: Device) -> None:
    assert device.to_host(device.from_host(torch.empty(0, 3))).shape == (0, 3)


def test_staging_sees_work_queued_before_it(device: Device) -> None:
    there = device.from_host(torch.ones(256, 256))
    for _ in range(20):
        there = there @ there / 256
    assert torch.allclose(device.to_host(there), torch.ones(256, 256))


def test_memory_is_plausible(device: Device) -> None:
    memory = device.memory()
    assert 2**26 < memory.total_bytes < 2**44
    assert 0 < memory.free_bytes <= memory.total_bytes


def test_random_states_come_back(device: Device) -> None:
    state = device.rng_state()
    assert all(entry.dtype == torch.uint8 and entry.device.type == "cpu" for entry in state.values())

    def draw() -> torch.Tensor:
        there = torch.rand(5, device=device.torch_device)
        return torch.cat([torch.rand(5), device.to_host(there)])

    first = draw()
    assert not torch.equal(draw(), first)
    device.set_rng_state(state)
    assert torch.equal(draw(), first)


def test_equal_seeds_draw_equal_numbers(device: Device) -> None:
    before = device.rng_state()
    drawn = []
    for number in (5, 6, 5):
        device.seed(dict.fromkeys(device.rng_state(), number))
        drawn.append(torch.cat([torch.rand(5), device.to_host(torch.rand(5, device=device.torch_device))]))
    device.set_rng_state(before)
    assert torch.equal(drawn[0], drawn[2])
    assert not torch.equal(drawn[0], drawn[1])


def test_random_states_of_another_kind_of_device_are_left_out(device: Device) -> None:
    device.set_rng_state({**device.rng_state(), "elsewhere": torch.zeros(3, dtype=torch.uint8)})


def test_times_computing_and_not_waiting(device: Device) -> None:
    began_s = time.perf_counter()
    device.begin(2)
    time.sleep(0.06)
    device.waited(0.05)
    computed_s = device.end()
    assert 0.009 < computed_s < time.perf_counter() - began_s - 0.05 + 0.001


def test_more_waiting_than_time_is_no_negative_computing(device: Device) -> None:
    device.begin(1)
    device.waited(0.001)
    assert device.end() >= 0.0


def test_a_micro_batch_that_failed_can_be_begun_anew(device: Device) -> None:
    device.begin(4)
    time.sleep(0.03)
    device.begin(1)
    assert device.end() < 0.03


def test_a_model_trains_there_with_the_losses_of_the_cpu(device: Device) -> None:
    def losses(where: torch.device, attached: Device | None) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).to(where)
        if attached:
            attached.attach(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        inputs, targets = torch.randn(16, 6).to(where), torch.randn(16, 1).to(where)
        found = []
        for _ in range(5):
            if attached:
                attached.begin(16)
            loss = nn.functional.mse_loss(model(inputs), targets)
            loss.backward()
            if attached:
                assert attached.end() > 0
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses(device.torch_device, device) == pytest.approx(losses(torch.device("cpu"), None), rel=1e-4)

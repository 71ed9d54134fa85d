"""That a paced device is honest: exactly, on a clock that only sleeps move, and roughly on the real one."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from potluck.device import base, paced
from potluck.device.paced import PacedDevice

S = 0.005  # seconds a sample


class Clock:
    """Stands for the time module: computing takes no time, sleeping what was asked and the overshoot."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.overshoot_s = 0.0
        self.slept_s: list[float] = []

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept_s.append(seconds)
        self.now_s += seconds + self.overshoot_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(base, "time", clock)
    monkeypatch.setattr(paced, "time", clock)
    return clock


class Work(nn.Module):
    """A layer without parameters whose real work takes some time."""

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__()
        self.work = work

    def forward(self, x: Tensor) -> Tensor:
        self.work()
        return x


def layers() -> nn.Sequential:
    """Three layers of 1, 2 and 3 parts of 6; each part is 16 elements."""
    sizes = [(4, 4), (4, 8), (8, 6)]
    return nn.Sequential(*(nn.Linear(*size, bias=False) for size in sizes))


def train(device: PacedDevice, model: nn.Module, samples: int = 4) -> tuple[float, float]:
    """One micro-batch: (seconds the forward took, seconds of computing)."""
    began = base.time.perf_counter()
    device.begin(samples)
    loss = model(torch.randn(samples, 4)).sum()
    forward_s = base.time.perf_counter() - began
    loss.backward()
    return forward_s, device.end()


def gradient_times(model: nn.Module, clock: Clock) -> dict[Tensor, float]:
    """Filled in as gradients arrive, by hooks registered now, as those that send gradients away are."""
    times: dict[Tensor, float] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda p: times.update({p: clock.now_s}))
    return times


def test_a_micro_batch_takes_its_time_a_third_of_it_forward(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    device.attach(model)
    forward_s, computed_s = train(device, model, samples=6)
    assert computed_s == pytest.approx(6 * S)
    assert forward_s == pytest.approx(6 * S / 3)


def test_the_time_is_linear_in_the_samples(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    device.attach(model)
    for samples in (1, 2, 3, 10):
        forward_s, computed_s = train(device, model, samples=samples)
        assert computed_s == pytest.approx(samples * S)
        assert forward_s == pytest.approx(samples * S / 3)


def test_the_pace_changes_with_the_steps(clock: Clock) -> None:
    device, model = paced.make(f"{S},3={4 * S},5={2 * S}"), layers()
    device.attach(model)
    paces = []
    for step in (1, 2, 3, 4, 5, 6, 90):
        device.at_step(step)
        forward_s, computed_s = train(device, model, samples=2)
        assert forward_s == pytest.approx(computed_s / 3)
        paces.append(computed_s / 2 / S)
    assert paces == pytest.approx([1, 1, 4, 4, 2, 2, 2])
    device.at_step(1)  # a run that resumes from before
    assert train(device, model, samples=2)[1] == pytest.approx(2 * S)


def test_the_pace_of_a_micro_batch_is_that_of_its_beginning(clock: Clock) -> None:
    device, model = paced.make(f"{S},2={4 * S}"), layers()
    device.attach(model)
    device.at_step(1)
    device.begin(2)
    loss = model(torch.randn(2, 4)).sum()
    device.at_step(2)
    loss.backward()
    assert device.end() == pytest.approx(2 * S)


def test_without_changes_steps_mean_nothing(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    device.attach(model)
    for step in (1, 5, 1000):
        device.at_step(step)
        assert train(device, model)[1] == pytest.approx(4 * S)


def test_layers_take_shares_by_their_elements(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    device.attach(model)
    done: list[float] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: done.append(clock.now_s))
    gradients = gradient_times(model, clock)
    start_s = clock.now_s
    train(device, model, samples=1)
    assert [t - start_s for t in done] == pytest.approx([S / 3 * part / 6 for part in (1, 3, 6)])
    arrived = [gradients[p] - start_s for p in reversed(list(model.parameters()))]
    assert arrived == pytest.approx([S / 3 + 2 * S / 3 * part / 6 for part in (3, 5, 6)])


def test_hooks_registered_after_attach_run_after_the_pause(clock: Clock) -> None:
    device, model = PacedDevice(S), nn.Sequential(nn.Linear(4, 4, bias=False))
    device.attach(model)
    times = gradient_times(model, clock)
    start_s = clock.now_s
    train(device, model, samples=3)
    assert times[model[0].weight] - start_s == pytest.approx(3 * S)


def test_waiting_for_the_network_is_not_computing(clock: Clock) -> None:
    device = PacedDevice(S)

    def wait() -> None:
        clock.now_s += 1.0
        device.waited(1.0)

    model = layers()
    model.insert(1, Work(wait))
    device.attach(model)
    start_s = clock.now_s
    forward_s, computed_s = train(device, model)
    assert computed_s == pytest.approx(4 * S)
    assert forward_s == pytest.approx(1.0 + 4 * S / 3)
    assert clock.now_s - start_s == pytest.approx(1.0 + 4 * S)


def test_real_work_counts_and_slow_work_is_made_up_for(clock: Clock) -> None:
    def work() -> None:
        clock.now_s += 4 * S / 4  # more than the first layer's share, less than the forward's

    device, model = PacedDevice(S), layers()
    model.insert(0, Work(work))
    device.attach(model)
    forward_s, computed_s = train(device, model)
    assert forward_s == pytest.approx(4 * S / 3)
    assert computed_s == pytest.approx(4 * S)


def test_work_slower_than_the_pace_is_not_hidden(clock: Clock) -> None:
    def work() -> None:
        clock.now_s += 10 * S

    device, model = PacedDevice(S), layers()
    model.insert(0, Work(work))
    device.attach(model)
    for _ in range(2):  # and nothing of it is made up for by the next micro-batch
        assert train(device, model, samples=4)[1] == pytest.approx(10 * S)


def test_long_sleeps_do_not_add_up(clock: Clock) -> None:
    clock.overshoot_s = 0.0004
    device, model = PacedDevice(S), layers()
    device.attach(model)
    start_s = clock.now_s
    for _ in range(20):
        train(device, model, samples=1)
    assert clock.now_s - start_s == pytest.approx(20 * S, abs=0.0005)


def test_a_module_called_twice_shares_the_forward(clock: Clock) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)
            self.never = nn.Linear(100, 100)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(self.inner(x))

    device, model = PacedDevice(S), Twice()
    device.attach(model)
    called: list[float] = []
    model.inner.register_forward_hook(lambda *_: called.append(clock.now_s))
    assert train(device, model)[1] == pytest.approx(4 * S)  # it does not know the calls yet
    called.clear()
    start_s = clock.now_s
    forward_s, computed_s = train(device, model)
    assert forward_s == pytest.approx(4 * S / 3)
    assert [t - start_s for t in called] == pytest.approx([4 * S / 6, 4 * S / 3])
    assert computed_s == pytest.approx(4 * S)


class Tied(nn.Module):
    """An embedding of 10 × 4 shared with the head, and 24 elements between them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.middle = nn.Linear(4, 4)
        self.last = nn.Linear(4, 1, bias=False)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x.abs().long()[:, 0].clamp(max=9))
        x = self.middle(x)
        return self.head(x * self.last(x))


def test_a_tied_head_does_its_work_in_the_head(clock: Clock) -> None:
    device, model = PacedDevice(S), Tied()
    device.attach(model)
    assert sum(device._forward_work.values()) == device._backward_total == 20 + 4 + 40
    times = gradient_times(model, clock)
    looked_up: list[float] = []
    model.embedding.register_forward_hook(lambda *_: looked_up.append(clock.now_s))
    start_s = clock.now_s
    forward_s, computed_s = train(device, model, samples=1)
    assert looked_up == [start_s]
    assert forward_s == pytest.approx(S / 3)
    # The head's gradient is complete only when the embedding's part has come, but its work was done first.
    assert times[model.last.weight] - start_s == pytest.approx(S / 3 + 2 * S / 3 * 44 / 64)
    assert times[model.embedding.weight] - start_s == pytest.approx(S)
    assert computed_s == pytest.approx(S)


def test_frozen_layers_take_their_time_before_the_gradients_that_follow(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    device.attach(model)
    times = gradient_times(model, clock)
    start_s = clock.now_s
    _, computed_s = train(device, model, samples=1)
    assert times[model[1].weight] - start_s == pytest.approx(S / 3 + 2 * S / 3 * 5 / 6)
    assert computed_s == pytest.approx(S)


def test_activations_computed_again_are_the_backwards(clock: Clock) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.head = layers(), nn.Linear(6, 2)

        def forward(self, x: Tensor) -> Tensor:
            x.requires_grad_()
            return self.head(torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False))

    device, model = PacedDevice(S), Checkpointed()
    device.attach(model)
    for _ in range(3):
        forward_s, computed_s = train(device, model)
        assert forward_s == pytest.approx(4 * S / 3)
        assert computed_s == pytest.approx(4 * S)


def test_nothing_sleeps_outside_of_a_micro_batch(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    device.attach(model)
    model(torch.randn(2, 4)).sum().backward()
    assert not clock.slept_s
    train(device, model)
    slept = len(clock.slept_s)
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert len(clock.slept_s) == slept


def test_a_model_that_is_only_an_embedding_takes_its_time(clock: Clock) -> None:
    device, model = PacedDevice(S), nn.Embedding(10, 4)
    device.attach(model)
    device.begin(3)
    model(torch.tensor([1, 2, 3])).sum().backward()
    assert device.end() == pytest.approx(3 * S)


def test_attaching_again_replaces_the_hooks(clock: Clock) -> None:
    device, model = PacedDevice(S), layers()
    device.attach(model)
    device.attach(model)
    forward_s, computed_s = train(device, model)
    assert (forward_s, computed_s) == (pytest.approx(4 * S / 3), pytest.approx(4 * S))
    assert all(len(p._post_accumulate_grad_hooks) == 1 for p in model.parameters())


def test_the_mathematics_is_untouched(clock: Clock) -> None:
    torch.manual_seed(0)
    plain, held = layers(), layers()
    held.load_state_dict(plain.state_dict())
    device = PacedDevice(S)
    device.attach(held)
    batch = torch.randn(4, 4)
    device.begin(4)
    held(batch).sum().backward()
    device.end()
    plain(batch).sum().backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(plain.parameters(), held.parameters()))


@pytest.mark.alone
def test_on_the_real_clock_the_pace_holds_within_five_percent() -> None:
    torch.set_num_threads(1)
    batch = torch.randn(4, 32)

    def measure() -> tuple[float, float]:
        """(seconds of 10 micro-batches of 4 samples, the forwards' part), with nothing to make up for."""
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(8)))
        device = PacedDevice(S)
        device.attach(model)
        forward_s, start_s = 0.0, time.perf_counter()
        for _ in range(10):
            began_s = time.perf_counter()
            device.begin(4)
            loss = model(batch).sum()
            forward_s += time.perf_counter() - began_s
            loss.backward()
            device.end()
        total_s = time.perf_counter() - start_s
        return total_s, forward_s / total_s

    for _ in range(10):  # other work on the machine can only make a run longer
        total_s, forward_part = measure()
        assert total_s >= 0.99 * 40 * S
        if total_s <= 1.05 * 40 * S and abs(forward_part - 1 / 3) < 0.04:
            return
    pytest.fail(f"in none of 10 runs the pace held: the last took {total_s:.3f} s, {forward_part:.0%} forward")

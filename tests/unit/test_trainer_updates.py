"""Steps whose samples and updates are a trainer's: what the loop leaves to it, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.errors import LoopError, NonFiniteError
from potluck.spec.config import RunConfig
from potluck.spec.events import RunEvent, StepEnded, StepNotApplied
from potluck.train.pushed import PushedLoader, Samples
from potluck.train.run import Run, start

STEPS, BATCH = 6, 8
NUMBERS = torch.Generator().manual_seed(5)
POINTS = torch.randn(STEPS * BATCH, 5, generator=NUMBERS)
TARGETS = torch.randn(STEPS * BATCH, 1, generator=NUMBERS)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 1))


def samples(step: int) -> list[tuple[Tensor, Tensor]]:
    return [(POINTS[at], TARGETS[at]) for at in range(step * BATCH, (step + 1) * BATCH)]


def collate(given: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    return torch.stack([x for x, _ in given]), torch.stack([y for _, y in given])


def loss_of(net: nn.Module, batch: Any) -> Tensor:
    return ((net(batch[0]) - batch[1]) ** 2).mean()


class Training:
    """The little that a trainer does."""

    def __init__(self, **config: Any) -> None:
        self.events: list[RunEvent] = []
        self.net = model()
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.pushed = PushedLoader(collate, global_batch=BATCH, first_step=3, steps=3 + STEPS)
        self.run: Run = start(self.events.append, RunConfig(device="cpu", threads=1, **config))
        self.steps = self.run.steps(self.net, self.optimizer, self.pushed)

    def collect(self, given: list[Any], spoil: float = 1.0) -> float | None:
        self.pushed.push(given)
        step = next(self.steps)
        for batch in step:
            step.backward(loss_of(self.net, batch) * spoil)
        return step.loss

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.5)
        self.optimizer.step()
        self.net.zero_grad()


def plain() -> tuple[dict[str, Tensor], list[float]]:
    net, losses = model(), []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    for number in range(STEPS):
        loss = loss_of(net, collate(samples(number)))
        loss.backward()
        losses.append(loss.item())
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return net.state_dict(), losses


def test_weights_and_losses_are_those_of_a_plain_loop() -> None:
    training = Training(micro_batch=3)
    losses = []
    for number in range(STEPS):
        losses.append(training.collect(samples(number)))
        training.update()
    training.run.close()
    expected, expected_losses = plain()
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for name, tensor in training.net.state_dict().items():
        torch.testing.assert_close(tensor, expected[name], atol=1e-6, rtol=0)
    ended = [event for event in training.events if isinstance(event, StepEnded)]
    assert [event.step for event in ended] == list(range(4, 4 + STEPS)), "steps are numbered as the trainer's"


def test_the_loss_is_known_before_the_update() -> None:
    training = Training()
    loss = training.collect(samples(0))
    assert loss == pytest.approx(loss_of(model(), collate(samples(0))).item(), rel=1e-5)
    assert not [event for event in training.events if isinstance(event, StepEnded)]
    training.update()
    assert [event for event in training.events if isinstance(event, StepEnded)]
    training.run.close()


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted() -> None:
    training = Training(max_bad_steps=2)
    training.collect(samples(0))
    training.update()
    before = {name: tensor.clone() for name, tensor in training.net.state_dict().items()}
    training.collect(samples(1), spoil=float("nan"))
    assert all(parameter.grad is None for parameter in training.net.parameters())
    training.update()
    for name, tensor in training.net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert [event.in_a_row for event in training.events if isinstance(event, StepNotApplied)] == [1]
    training.collect(samples(2), spoil=float("inf"))
    with pytest.raises(NonFiniteError, match="trainer's own checkpoints"):
        training.update()
    training.run.close()


def test_an_update_before_the_gradients_are_complete_is_refused() -> None:
    training = Training()
    with pytest.raises(LoopError, match="before the gradients of the step were complete"):
        training.optimizer.step()
    training.collect(samples(0))
    training.update()
    with pytest.raises(LoopError, match="before the gradients of the step were complete"):
        training.optimizer.step()
    training.run.close()
    training.optimizer.step()  # the training is over: the optimizer is the script's again


def test_a_step_without_an_update_is_refused() -> None:
    training = Training()
    training.collect(samples(0))
    with pytest.raises(LoopError, match="did not step its optimizer after step 4"):
        training.collect(samples(1))
    training.run.close()


def test_an_optimizer_that_fails_leaves_the_run_able_to_end() -> None:
    training = Training()
    training.collect(samples(0))
    training.optimizer.param_groups[0]["betas"] = None
    with pytest.raises(TypeError):
        training.update()
    training.run.close(TypeError())


def test_samples_with_and_without_tensors_come_back_as_they_were() -> None:
    words = [{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]
    assert Samples(words).unpacked() == words
    loader = torch.utils.data.DataLoader(Points(), batch_size=2, collate_fn=Samples, num_workers=1)
    (first, *_) = loader
    (x, y), _ = first.unpacked()
    assert torch.equal(x, POINTS[0])
    assert y == 0


class Points(torch.utils.data.Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return POINTS[index], index

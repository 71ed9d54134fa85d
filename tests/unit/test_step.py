"""One step as the user's loop sees it: gradients weighted by samples, and mistakes in the loop named."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.errors import LoopError
from potluck.train.step import SavedBytes, Step, StepRules


class Loop:
    """A trainer in small: hands out these batches, and counts what comes back."""

    def __init__(self, *sizes: int, loss_is: str = "mean") -> None:
        self.sizes = sizes
        self.samples: list[int] = []
        self.completed = False
        rules = StepRules(batches=self.batches, after_backward=self.samples.append, loss_is=loss_is)
        self.step = Step(7, rules)

    def batches(self, step: Step) -> Iterator[Any]:
        for size in self.sizes:
            step.hand_out(size)
            yield torch.arange(float(size)) + 1
            step.check_done()
        self.completed = True


def test_what_is_set_aside_is_added_again(weight: nn.Parameter) -> None:
    other = nn.Parameter(torch.tensor(3.0))  # has no gradient before, or none inside
    for uses in ((True, False), (False, True)):
        weight.grad = other.grad = None
        rules = StepRules(
            batches=lambda step: iter(()), after_backward=lambda n: None, loss_is="mean", trained=(weight, other)
        )
        step = Step(7, rules)
        for number, use in enumerate(uses):
            step.hand_out(2)
            with step.set_aside() if number else contextlib.nullcontext():
                step.hand_out(2)
                loss = weight * 5 + (other * 7 if use else 0)
                step.backward(loss, items=4)
                if number:
                    assert weight.grad == 20
                    assert step.mean_loss(2) == loss.item()
                    assert step.items() == 4
                step.check_done()
        step.hand_out(2)
        step.backward(weight * 1.0, items=1)
        assert (weight.grad, other.grad) == (41, 28)
        assert step.items() == 9
        assert step.loss_sum() == 4 * 10 + 4 * (10 + 21) + 2
        step.check_done()


def run(step: Step, *losses: tuple[Any, ...]) -> None:
    """A user's loop that calls backward with these losses for each batch in turn."""
    for number, _ in enumerate(step):
        for loss in losses[number]:
            step.backward(loss)


@pytest.fixture
def weight() -> nn.Parameter:
    return nn.Parameter(torch.tensor(2.0))


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("loss_is", ["mean", "sum"])
def test_unequal_micro_batches_sum_to_the_same_gradient(
    sizes: tuple[int, ...], loss_is: str, weight: nn.Parameter
) -> None:
    """Whatever the cut: the gradient is the sum over all samples, to be divided once at the end."""
    loop = Loop(*sizes, loss_is=loss_is)
    values = []
    for batch in loop.step:
        losses = (weight * batch) ** 2
        loop.step.backward(losses.mean() if loss_is == "mean" else losses.sum())
        values += batch.tolist()
    assert loop.samples == list(sizes)
    assert loop.completed
    assert loop.step.finished
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(sum(2 * 2.0 * v * v for v in values))
    assert loop.step.loss_sum() == pytest.approx(sum((2.0 * v) ** 2 for v in values))
    assert loop.step.index == 7


@pytest.mark.parametrize("cut", [(6,), (1, 5), (2, 2, 2), (4, 1, 1)])
@pytest.mark.parametrize("loss_is", ["mean", "sum"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_items_weigh_in_place_of_samples(
    cut: tuple[int, ...], loss_is: str, weight: nn.Parameter, *, as_tensor: bool
) -> None:
    """A loss over as many items as the batch's values say; a mean over none is NaN, and weighs nothing."""
    loop = Loop(*cut, loss_is=loss_is)
    per_value = torch.tensor([0.0, 3.0, 0.0, 0.0, 5.0, 1.0])
    done, expected = 0, 0.0
    for batch in loop.step:
        counts = per_value[done : done + len(batch)]
        done += len(batch)
        summed = (counts * (weight * batch) ** 2).sum()
        expected += float((counts * 2 * 2.0 * batch**2).sum())
        items = counts.sum() if as_tensor else float(counts.sum())
        loop.step.backward(summed / counts.sum() if loss_is == "mean" else summed, items=items)
    assert weight.grad is not None
    assert weight.grad.item() == pytest.approx(expected)
    assert loop.step.items() == 9.0
    assert loop.step.counts_items
    assert loop.step.mean_loss(samples=1000) == pytest.approx(loop.step.loss_sum() / 9)
    assert loop.samples == list(cut), "what was computed is still counted in samples"


def test_a_count_on_a_device_that_queues_is_not_read(weight: nn.Parameter) -> None:
    """A tensor elsewhere than on the CPU stays there: the meta device would refuse to be read."""
    loop = Loop(1)
    weight = nn.Parameter(torch.ones((), device="meta"))
    for _ in loop.step:
        loop.step.backward(weight * 2.0, items=torch.ones((), dtype=torch.int64, device="meta"))
    assert isinstance(loop.step.items_so_far(), Tensor)
    assert weight.grad is not None


@pytest.mark.parametrize("first", [3, None])
def test_items_for_some_batches_only_are_named(first: int | None, weight: nn.Parameter) -> None:
    loop = Loop(2, 2)
    batches = iter(loop.step)
    next(batches)
    loop.step.backward(weight * 1.0, items=first)
    next(batches)
    with pytest.raises(LoopError, match="with items=… for some batches of a step, and without for others"):
        loop.step.backward(weight * 1.0, items=None if first else 3)


@pytest.mark.parametrize("wrong", [-1, float("nan"), float("inf"), "many", torch.ones(3)])
def test_what_is_no_number_of_items_is_named(wrong: Any, weight: nn.Parameter) -> None:
    loop = Loop(2)
    next(iter(loop.step))
    with pytest.raises(LoopError, match="as items: it takes a number of 0 or more"):
        loop.step.backward(weight * 1.0, items=wrong)


def test_the_loss_can_be_of_low_precision_and_one_dimension(weight: nn.Parameter) -> None:
    loop = Loop(3)
    for _ in loop.step:
        loop.step.backward((weight * torch.ones(1)).bfloat16())
    assert loop.step.loss_sum() == 6.0
    loop.step.reset_loss()
    assert loop.step.loss_sum() == 0.0


@pytest.mark.parametrize(
    ("dtype", "means"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, False)]
)
def test_a_loss_of_low_precision_does_not_round_the_divisor(
    dtype: torch.dtype, means: bool, weight: nn.Parameter
) -> None:
    """Seven samples one by one: 1/7 in bf16 is wrong by 0.2 %, and so would be the whole gradient."""
    loop = Loop(*[1] * 7)
    step = Step(7, StepRules(batches=loop.batches, after_backward=loop.samples.append, loss_is="mean"), whole=7)
    for _ in step:
        step.backward((weight * 1.0).to(dtype))
    assert step.has_means == means
    assert weight.grad is not None
    assert float(weight.grad) == pytest.approx(1.0 if means else 7.0, rel=1e-6)


def test_a_batch_without_backward_is_named(weight: nn.Parameter) -> None:
    loop = Loop(2, 2)
    with pytest.raises(LoopError, match=r"step\.backward") as caught:
        run(loop.step, (weight * 1.0,), ())
    assert caught.value.step == 8, "counted from 1, as in the view"
    assert "not loss.backward()" in caught.value.hint
    assert not loop.step.finished


def test_backward_twice_for_one_batch_is_named(weight: nn.Parameter) -> None:
    loop = Loop(2)
    with pytest.raises(LoopError, match="twice for one batch") as caught:
        run(loop.step, (weight * 1.0, weight * 1.0))
    assert "add the losses" in caught.value.hint
    assert loop.samples == [2]


def test_backward_without_a_batch_is_named(weight: nn.Parameter) -> None:
    with pytest.raises(LoopError, match="without a batch"):
        Loop(2).step.backward(weight * 1.0)
    loop = Loop(1)
    run(loop.step, (weight * 1.0,))
    with pytest.raises(LoopError, match="without a batch"):
        loop.step.backward(weight * 1.0)


def test_a_second_loop_over_a_step_is_named(weight: nn.Parameter) -> None:
    loop = Loop(1)
    run(loop.step, (weight * 1.0,))
    with pytest.raises(LoopError, match="iterated over twice"):
        next(iter(loop.step))


@pytest.mark.parametrize("wrong", ["per sample", "number", "detached"])
def test_what_is_no_loss_is_named(wrong: str, weight: nn.Parameter) -> None:
    losses: dict[str, Any] = {
        "per sample": weight * torch.ones(3),
        "number": 1.5,
        "detached": (weight * 1.0).detach(),
    }
    loop = Loop(3)
    with pytest.raises(LoopError, match="needs the loss") as caught:
        run(loop.step, (losses[wrong],))
    assert 'loss_is="sum"' in caught.value.hint
    assert loop.samples == []


def test_a_step_that_is_left_early_is_not_finished(weight: nn.Parameter) -> None:
    loop = Loop(1, 1)
    for _ in loop.step:
        loop.step.backward(weight * 1.0)
        break
    assert not loop.step.finished
    assert not loop.completed


class TestSavedBytes:
    """What autograd keeps is what a larger micro-batch would need more of."""

    def measure(self, model: nn.Module, x: Tensor) -> int:
        saved = SavedBytes()
        saved.start()
        loss = model(x).sum()
        count = saved.stop()
        loss.backward()
        return count

    def test_twice_the_samples_keep_twice_as_much(self) -> None:
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Tanh())
        one, two, four = (self.measure(model, torch.randn(n, 8)) for n in (8, 16, 32))
        assert four - two == 2 * (two - one) > 0

    def test_the_same_memory_is_counted_once(self) -> None:
        x = torch.randn(100, requires_grad=True)
        saved = SavedBytes()
        saved.start()
        y = x * x + x.view(10, 10).view(-1) * x
        assert saved.stop() == 400
        y.sum().backward()

    def test_gradients_are_what_they_are_without_it(self) -> None:
        model = nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Softmax(-1))
        x = torch.randn(4, 8)
        model(x).square().sum().backward()
        plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        saved = SavedBytes()
        saved.start()
        loss = model(x).square().sum()
        saved.stop()
        loss.backward()
        assert all(torch.equal(a, p.grad) for a, p in zip(plain, model.parameters()) if p.grad is not None)

    def test_nothing_is_counted_after_the_end(self) -> None:
        saved = SavedBytes()
        saved.start()
        saved.stop()
        x = torch.randn(10, requires_grad=True)
        (x * x).sum().backward()
        assert saved.stop() == 0

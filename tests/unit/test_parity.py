"""A guest that computes what the host computes passes; one that does not is refused, and the reason is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck.hub import parity
from potluck.hub.actions import Verdict
from potluck.hub.model_tensors import ModelTensors
from potluck.hub.parity import Reference, Sketch, judge, sketch


class Problem:
    """A small model and a batch; `gradients` says what a machine would compute."""

    def __init__(self, dropout: float = 0.0, scale: float = 1.0, width: int = 16) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, width), nn.Tanh(), nn.Dropout(dropout), nn.Linear(width, 5))
        self.x, self.y = torch.randn(32, 12), torch.randint(0, 5, (32,))
        self.scale = scale
        self.tensors = ModelTensors(self.model)
        self.sizes = [p.numel() for p in self.tensors.trained]

    def gradients(self, seed: int = 0, dtype: torch.dtype | None = None) -> tuple[list[Tensor], float]:
        torch.manual_seed(seed)
        self.model.zero_grad()
        with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
            loss = nn.functional.cross_entropy(self.model(self.x), self.y)
        (loss * self.scale).backward()
        return [p.grad.clone() for p in self.tensors.trained if p.grad is not None], loss.item()

    def sketch(self, gradients: list[Tensor], loss: float) -> Sketch:
        return sketch(gradients, self.sizes, loss)

    def judge(self, guest: Sketch, first: Sketch, second: Sketch | None = None, **more: Any) -> Verdict:
        """With a `second`, the host has computed the batch twice."""
        received = memoryview(guest.values).cast("B")
        host = Reference(first=first, second=second, **more)
        return judge(host, received, guest.loss, random={}, names=self.tensors.layout.tensors)

    def compare(self, host: Sketch, guest: Sketch) -> tuple[float, str | None]:
        found = self.judge(guest, host)
        return found.cosine, found.why_not

    def drawn(self, seed: int) -> Sketch:
        return self.sketch(*self.gradients(seed))


def verdict(change: Callable[[list[Tensor]], None], *, loss: float = 0.0) -> tuple[float, str | None]:
    problem = Problem()
    host, host_loss = problem.gradients()
    guest, guest_loss = problem.gradients()
    change(guest)
    return problem.compare(problem.sketch(host, host_loss), problem.sketch(guest, guest_loss + loss))


def test_the_same_gradient_passes() -> None:
    assert verdict(lambda g: None) == (pytest.approx(1.0), None)


def test_a_device_that_rounds_otherwise_passes() -> None:
    problem = Problem()
    host, guest = problem.gradients(), problem.gradients(dtype=torch.bfloat16)
    cosine, why_not = problem.compare(problem.sketch(*host), problem.sketch(*guest))
    assert 0.99 < cosine < 1.0
    assert why_not is None


def test_a_guest_that_computes_what_the_host_does_with_the_rounded_weights_passes() -> None:
    """Near a discontinuity little rounding of the weights is another gradient. The guest is not to blame for it."""
    problem = Problem()
    own = problem.sketch(*problem.gradients())
    rounded, loss = problem.gradients()
    for gradient in rounded:
        gradient.add_(torch.randn_like(gradient) * gradient.std() * 3)
    as_guests = problem.sketch(rounded, loss)
    first = problem.judge(as_guests, own)
    assert (first.why_not is not None, first.again) == (True, True)
    not_yet = problem.judge(as_guests, own, uncoded=True)
    assert (not_yet.void, not_yet.why_not) == (
        "the host had not coded its weights in time for a second comparison",
        None,
    )
    found = problem.judge(as_guests, own, as_guests)
    assert (found.why_not, found.rounded) == (None, True)
    assert found.cosine == pytest.approx(1.0)
    assert found.spread is not None
    assert found.spread < 0.6
    wrong = problem.sketch([-gradient for gradient in rounded], loss)
    assert problem.judge(wrong, own, as_guests).why_not is not None
    by_other_numbers = problem.judge(as_guests, own, as_guests, reseeded=frozenset({"cpu"}))
    assert by_other_numbers.cosine < 0.95  # then the second says nothing of the weights alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float) -> None:
    assert verdict(lambda g: g[1][0:1].fill_(bad)) == (0.0, "it is not finite (NaN or infinity)")
    assert verdict(lambda g: None, loss=bad) == (0.0, "it is not finite (NaN or infinity)")


@pytest.mark.parametrize("factor", [0.5, 2.0, 32.0, 1 / 32])
def test_a_gradient_of_another_size_is_refused(factor: float) -> None:
    """Such as a mean where the host has a sum."""
    cosine, why_not = verdict(lambda g: [t.mul_(factor) for t in g] and None)
    assert cosine == pytest.approx(1.0)
    assert why_not is not None
    assert f"is {max(factor, 1 / factor):.1f} times off in size" in why_not


def test_one_tensor_of_another_size_is_named() -> None:
    _, why_not = verdict(lambda g: g[0].mul_(1.27))  # not a tie: 1.25 is 1.2 or 1.3 by the processor's last bit
    assert why_not == "the gradient of 0.weight is 1.3 times off in size"


def test_another_gradient_is_refused() -> None:
    cosine, why_not = verdict(lambda g: [t.copy_(torch.randn_like(t) * t.std()) for t in g] and None)
    assert abs(cosine) < 0.3
    assert why_not == f"the cosine of the two is {cosine:.4f}"


def test_the_opposite_gradient_is_refused() -> None:
    cosine, why_not = verdict(lambda g: [t.neg_() for t in g] and None)
    assert cosine == pytest.approx(-1.0)
    assert why_not is not None


def test_another_loss_is_refused() -> None:
    _, why_not = verdict(lambda g: None, loss=0.5)
    assert why_not is not None
    assert "the loss is" in why_not
    assert verdict(lambda g: None, loss=0.01)[1] is None


def test_a_zero_gradient_is_refused_unless_the_host_has_it_too() -> None:
    assert verdict(lambda g: [t.zero_() for t in g] and None) == (0.0, "one of the two gradients is zero")
    problem = Problem(scale=0.0)
    host = problem.gradients()
    assert problem.compare(problem.sketch(*host), problem.sketch(*host)) == (1.0, None)


def test_a_small_gradient_is_compared_as_well_as_a_large_one() -> None:
    """Squares of 1e-24 are nothing in float32."""
    problem = Problem(scale=1e-24)
    host = problem.gradients()
    rounded = [t * (1 + 1e-4) for t in host[0]]
    cosine, why_not = problem.compare(problem.sketch(*host), problem.sketch(rounded, host[1]))
    assert cosine == pytest.approx(1.0)
    assert why_not is None
    other = [torch.randn_like(t) * 1e-24 for t in host[0]]
    assert problem.compare(problem.sketch(*host), problem.sketch(other, host[1]))[1] is not None


def test_where_the_host_has_no_finite_gradient_nothing_is_compared() -> None:
    problem = Problem()
    host, loss = problem.gradients()
    host[0][0, 0] = float("nan")
    guest = problem.sketch(*problem.gradients())
    assert problem.judge(guest, problem.sketch(host, loss)).void == "the host's own gradient was not finite"
    assert problem.judge(guest, guest, problem.sketch(host, loss)).void
    received = memoryview(guest.values).cast("B")
    assert judge(None, received, guest.loss, random={}, names=problem.tensors.layout.tensors).void
    assert not problem.judge(guest, guest).void


# -- random numbers that cannot be matched


def test_random_numbers_that_differ_are_no_verdict_before_the_host_knows_its_spread() -> None:
    problem = Problem(dropout=0.2)
    found = problem.judge(problem.drawn(2), problem.drawn(1), random={"cpu": "a", "python": "b"})
    assert found.why_not is not None
    assert found.again
    assert found.spread is None
    assert found.unmatched == {"cpu", "python"}


@pytest.mark.parametrize("dropout", [0.02, 0.1, 0.3, 0.5])
def test_a_guest_as_far_from_the_host_as_the_host_from_itself_passes(dropout: float) -> None:
    problem = Problem(dropout, width=128)
    found = []
    for seed in range(1, 61, 3):
        host, again, guest = (problem.drawn(seed + i) for i in range(3))
        found.append(problem.judge(guest, host, again).why_not)
    assert found.count(None) >= 19, found  # what is drawn depends on the processor


def test_without_the_weights_that_guests_hold_a_spread_may_let_a_guest_in_and_refuses_none() -> None:
    problem = Problem(dropout=0.3, width=128)
    unknown = {"uncoded": True, "reseeded": frozenset({"cpu"})}
    found = [problem.judge(problem.drawn(s + 2), problem.drawn(s), problem.drawn(s + 1), **unknown) for s in (1, 4)]
    assert [(each.why_not, each.void) for each in found] == [(None, ""), (None, "")]
    gradients, loss = problem.gradients(3)
    other = problem.sketch([-gradient for gradient in gradients], loss)
    for second in (problem.drawn(2), problem.drawn(1)):
        verdict = problem.judge(other, problem.drawn(1), second, **unknown)
        assert verdict.why_not is None
        assert "had not coded its weights in time" in verdict.void


WRONG: dict[str, Callable[[Tensor], Tensor]] = {
    "opposite": lambda t: -t,
    "noise": lambda t: torch.randn_like(t) * t.std(),
    "twice": lambda t: 2 * t,
    "half": lambda t: t / 2,
    "zero": torch.zeros_like,
}


@pytest.mark.parametrize("dropout", [0.02, 0.1, 0.3, 0.5])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_gradient_is_refused_by_the_spread(wrong: str, dropout: float) -> None:
    problem = Problem(dropout, width=128)
    passed = 0
    for seed in range(1, 61, 3):
        host, again = problem.drawn(seed), problem.drawn(seed + 1)
        gradients, loss = problem.gradients(seed + 2)
        found = problem.judge(problem.sketch([WRONG[wrong](t) for t in gradients], loss), host, again)
        passed += found.why_not is None
        assert found.again == (found.why_not is not None), "random numbers may have been the reason"
        assert found.why_not is None or "; the host's own two have a cosine of" in found.why_not
    assert passed <= 1


def test_where_the_host_computes_the_same_twice_random_numbers_are_no_excuse() -> None:
    problem = Problem()
    host = problem.drawn(1)
    gradients, loss = problem.gradients()
    found = problem.judge(problem.sketch([2 * t for t in gradients], loss), host, problem.drawn(1))
    assert found.why_not is not None
    assert "what the host computes twice is the same" in found.why_not
    assert not found.again
    assert found.spread == pytest.approx(1.0)


def test_a_spread_that_was_found_with_other_generators_tells_nothing_of_these() -> None:
    problem = Problem(dropout=0.2)
    parts = (problem.drawn(1), problem.drawn(2))
    found = problem.judge(problem.drawn(3), *parts, random={"cuda": "a"}, reseeded=frozenset({"cpu"}))
    assert (found.spread, found.again, found.unmatched) == (None, True, {"cuda"})


@pytest.mark.parametrize("received", [b"", b"abc", b"\0" * 8, b"\0" * 4 * 1000])
def test_a_sketch_of_another_length_is_refused(received: bytes) -> None:
    problem = Problem()
    host = problem.sketch(*problem.gradients())
    found = judge(Reference(first=host), received, host.loss, random={}, names=problem.tensors.layout.tensors)
    assert found.cosine == 0.0
    assert found.why_not == f"its sketch has {len(received)} bytes, the host's {host.values.nbytes}"
    assert not found.again


def test_a_large_gradient_is_sketched_in_few_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "SKETCH_VALUES", 100)
    big = [torch.randn(30, 20), torch.randn(7), None, torch.randn(50)]
    sizes = [600, 7, 11, 50]
    made = sketch(big, sizes, 1.0)
    stride = sum(sizes) // 100
    assert made.values.dtype == np.float32
    assert made.values.size == 4 + sum(-(-size // stride) for size in sizes)
    assert made.values[:4] == pytest.approx([float(t.norm()) if t is not None else 0.0 for t in big])
    dense = sketch([t if t is not None else torch.zeros(11) for t in big], sizes, 1.0)
    assert np.array_equal(dense.values, made.values)


def test_a_parameter_without_a_gradient_on_one_side_only_shows() -> None:
    problem = Problem()
    host, loss = problem.gradients()
    made = sketch([None, *host[1:]], problem.sizes, loss)
    assert problem.compare(problem.sketch(host, loss), made)[1] is not None

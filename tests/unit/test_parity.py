"""A guest that computes what the host computes passes; one that does not is refused, and the reason is named."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from potluck.hub import parity
from potluck.hub.parity import Sketch, compare, sketch
from potluck.hub.tensors import ModelTensors


class Problem:
    """A small model and a batch; `gradients` says what a machine would compute."""

    def __init__(self, dropout: float = 0.0, scale: float = 1.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 5))
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

    def compare(self, host: Sketch, guest: Sketch, *, loose: bool = False) -> tuple[float, str | None]:
        received = memoryview(guest.values).cast("B")
        return compare(host, received, guest.loss, names=self.tensors.layout.tensors, loose=loose)


def verdict(
    change: Callable[[list[Tensor]], None], *, loose: bool = False, loss: float = 0.0
) -> tuple[float, str | None]:
    problem = Problem()
    host, host_loss = problem.gradients()
    guest, guest_loss = problem.gradients()
    change(guest)
    return problem.compare(problem.sketch(host, host_loss), problem.sketch(guest, guest_loss + loss), loose=loose)


def test_the_same_gradient_passes() -> None:
    assert verdict(lambda g: None) == (pytest.approx(1.0), None)


def test_a_device_that_rounds_otherwise_passes() -> None:
    problem = Problem()
    host, guest = problem.gradients(), problem.gradients(dtype=torch.bfloat16)
    cosine, why_not = problem.compare(problem.sketch(*host), problem.sketch(*guest))
    assert 0.99 < cosine < 1.0
    assert why_not is None


@pytest.mark.parametrize("loose", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_is_refused(bad: float, loose: bool) -> None:
    assert verdict(lambda g: g[1][0:1].fill_(bad), loose=loose) == (0.0, "it is not finite (NaN or infinity)")
    assert verdict(lambda g: None, loss=bad, loose=loose) == (0.0, "it is not finite (NaN or infinity)")


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


@pytest.mark.parametrize("loose", [False, True])
def test_another_gradient_is_refused(loose: bool) -> None:
    cosine, why_not = verdict(lambda g: [t.copy_(torch.randn_like(t) * t.std()) for t in g] and None, loose=loose)
    assert abs(cosine) < 0.3
    assert why_not == f"the cosine of the two is {cosine:.4f}"


@pytest.mark.parametrize("loose", [False, True])
def test_the_opposite_gradient_is_refused(loose: bool) -> None:
    cosine, why_not = verdict(lambda g: [t.neg_() for t in g] and None, loose=loose)
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


def test_a_host_that_has_nan_itself_trusts_nobody() -> None:
    problem = Problem()
    host, loss = problem.gradients()
    host[0][0, 0] = float("nan")
    guest = problem.gradients()
    assert problem.compare(problem.sketch(host, loss), problem.sketch(*guest))[1] is not None


def test_dropout_needs_the_loose_limits_and_passes_them() -> None:
    problem = Problem(dropout=0.2)
    host, guest = problem.gradients(seed=1), problem.gradients(seed=2)
    strict = problem.compare(problem.sketch(*host), problem.sketch(*guest))
    assert strict[1] is not None
    cosine, why_not = problem.compare(problem.sketch(*host), problem.sketch(*guest), loose=True)
    assert cosine > parity.MIN_COSINE_LOOSE
    assert why_not is None


@pytest.mark.parametrize("received", [b"", b"abc", b"\0" * 8, b"\0" * 4 * 1000])
def test_a_sketch_of_another_length_is_refused(received: bytes) -> None:
    problem = Problem()
    host = problem.sketch(*problem.gradients())
    cosine, why_not = compare(host, received, host.loss, names=problem.tensors.layout.tensors, loose=False)
    assert cosine == 0.0
    assert why_not == f"its sketch has {len(received)} bytes, the host's {host.values.nbytes}"


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

"""Error feedback makes the running sum exact to one quantum, and a replica follows its target bit by bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.codec import NAMES, Codec, encode_change, encode_with_feedback, get

every_codec = pytest.mark.parametrize("codec", [get(name) for name in NAMES], ids=NAMES)
blocks = pytest.mark.parametrize("codec", [get("int8"), get("int4")], ids=["int8", "int4"])
EPSILON = 2.0**-23


def inputs(count: int, steps: int, seed: int, scale: float) -> Tensor:
    """[steps, count] float32 with a mean, as gradients have one."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(steps, count, generator=generator) + torch.randn(count, generator=generator)) * scale


@every_codec
@settings(max_examples=15, deadline=None)
@given(
    count=st.sampled_from([1, 127, 128, 129, 700]),
    steps=st.integers(1, 12),
    seed=st.integers(0, 10**6),
    exponent=st.integers(-9, 3),
)
def test_all_payloads_together_hold_all_values_but_the_last_residual(
    codec: Codec, count: int, steps: int, seed: int, exponent: int
) -> None:
    residual = torch.zeros(count)
    received = torch.zeros(count, dtype=torch.float64)
    sent = inputs(count, steps, seed, 10.0**exponent)
    largest = torch.zeros(count, dtype=torch.float64)
    for values in sent:
        largest = torch.maximum(largest, values.abs().double() + residual.abs().double())
        payload = encode_with_feedback(codec, values.clone(), residual)
        received += codec.decode(payload, count)
    difference = received - (sent.double().sum(0) - residual.double())
    assert bool((difference.abs() <= steps * EPSILON * 2 * largest).all()), difference.abs().amax()


@blocks
def test_the_residual_is_at_most_half_a_quantum(codec: Codec) -> None:
    residual = torch.zeros(1280)
    levels = {"int8": 127, "int4": 7}[codec.name]
    for values in inputs(1280, 20, 1, 1e-3):
        total = values + residual
        encode_with_feedback(codec, values.clone(), residual)
        quantum = total.view(-1, 128).abs().amax(1, keepdim=True) / levels * (1 + 2.0**-7)
        assert bool((residual.view(-1, 128).abs() <= quantum * 0.5001).all())


@every_codec
def test_a_replica_follows_its_target_and_every_guest_has_its_bits(codec: Codec) -> None:
    """Both the one that the host keeps and one that only ever saw payloads."""
    generator = torch.Generator().manual_seed(3)
    target = torch.randn(3000, generator=generator)
    replica = target.clone()
    guest = target.clone()
    moved = 0.0
    for _ in range(30):
        change = torch.randn(3000, generator=generator) * 1e-3
        moved = max(moved, change.abs().amax().item())
        target += change
        payload = encode_change(codec, target, replica)
        guest.add_(codec.decode(payload, 3000))
        assert torch.equal(guest, replica)
    bound = {"none": 1e-6, "fp16": 2e-6, "bf16": 2e-5, "int8": 3e-5, "int4": 5e-4, "thin": 2e-3, "topk": 30 * moved}
    assert (target - replica).abs().amax() <= bound[codec.name]


@every_codec
def test_a_target_at_rest_is_reached(codec: Codec) -> None:
    """What one payload loses the next ones hold: the distance shrinks until nothing is left to say."""
    target = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    replica = torch.zeros(1000)
    for _ in range(400):
        encode_change(codec, target, replica)
    assert torch.allclose(replica, target, rtol=1e-6, atol=1e-7)


@every_codec
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_leaves_residual_and_replica_alone(codec: Codec, bad: float) -> None:
    residual = torch.randn(1000, generator=torch.Generator().manual_seed(7))
    before = residual.clone()
    values = torch.ones(1000)
    values[999] = bad
    assert not codec.finite(encode_with_feedback(codec, values.clone(), residual), 1000)
    assert torch.equal(residual, before)
    assert not codec.finite(encode_change(codec, values, residual), 1000)
    assert torch.equal(residual, before)


@every_codec
def test_change_leaves_its_target_alone(codec: Codec) -> None:
    target = torch.randn(300, generator=torch.Generator().manual_seed(9)).requires_grad_()
    before = target.detach().clone()
    encode_change(codec, target, torch.zeros(300))
    assert torch.equal(target, before)


def test_what_is_changed_in_place_must_be_contiguous() -> None:
    with pytest.raises(ValueError, match="residual"):
        encode_with_feedback(get("int4"), torch.ones(8), torch.zeros(16)[::2])
    with pytest.raises(ValueError, match="replica"):
        encode_change(get("int4"), torch.ones(8), torch.zeros(16)[::2])


def test_int4_with_feedback_loses_nothing_that_int4_alone_loses() -> None:
    """Small values beside a large one: rounded away every time, unless what was lost is kept."""
    codec, count = get("int4"), 128
    values = torch.full((count,), 0.01)
    values[0] = 1.0
    residual, with_feedback, without = torch.zeros(count), torch.zeros(count), torch.zeros(count)
    for _ in range(100):
        with_feedback += codec.decode(encode_with_feedback(codec, values.clone(), residual), count)
        without += codec.decode(codec.encode(values), count)
    assert without[1:].tolist() == [0.0] * (count - 1)
    assert (with_feedback[1:] - 1.0).abs().amax() <= 0.1

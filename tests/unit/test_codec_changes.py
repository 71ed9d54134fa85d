"""Exact changes for guests that compute in bf16: to the bit, bounded, and never longer than thin."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from potluck.codec import changes, coder, get
from potluck.codec import to_wire as coded
from potluck.errors import WireError

SIZES = (0, 1, 7, 8, 9, 129, 70_001)


def weights(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 0.05


def sent(target: Tensor, replica: Tensor) -> bytes:
    return changes.to_wire(changes.differences(target, replica))


@pytest.mark.parametrize("count", SIZES)
def test_a_guest_holds_the_hosts_weights_in_bf16_to_the_bit(count: int) -> None:
    target = weights(count)
    replica = weights(count)  # not in bf16 yet: of another codec, or sent whole
    guest = replica.clone()
    for step in range(4):
        target = target + 1e-5 * weights(count, step + 1)
        changes.apply(changes.from_wire(sent(target, replica), count), guest)
        changes.follow(target, replica)
        assert torch.equal(guest.view(torch.int32), replica.view(torch.int32))
        assert torch.equal(guest.view(torch.int32), target.to(torch.bfloat16).float().view(torch.int32))


def test_every_bf16_value_can_become_every_other() -> None:
    """All bits, both zeros, subnormal numbers and infinities among them; but NaN, which is sent in other ways."""
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    values = (bits << 16).view(torch.float32)
    values = values[~values.isnan()]
    for seed in range(3):
        old = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed))]
        new = values[torch.randperm(len(values), generator=torch.Generator().manual_seed(seed + 10))]
        changes.apply(changes.differences(new, old), old)
        assert torch.equal(old.view(torch.int32), new.view(torch.int32))


def test_rounding_is_torchs() -> None:
    values = torch.randint(-(1 << 31), (1 << 31) - 1, (50_000,), generator=torch.Generator().manual_seed(1))
    floats = values.to(torch.int32).view(torch.float32)
    floats = floats[floats.isfinite()]
    rounded = torch.empty_like(floats)
    changes.follow(floats, rounded)
    assert torch.equal(rounded.view(torch.int32), floats.to(torch.bfloat16).float().view(torch.int32))


def test_small_changes_take_a_fraction_of_thins_bytes_and_large_ones_are_not_sent_so() -> None:
    old = weights(100_000)
    changes.follow(old.clone(), old)
    thin = get("thin:1.25")
    few, many = (old + lr * torch.sign(weights(100_000, 3)) for lr in (1e-5, 1e-3))
    message = sent(few, old)
    found = changes.differences(few, old)
    assert changes.worth_sending(found)
    assert changes.worth_sending(found, message)
    assert 2 * len(message) < len(coded(thin, thin.encode(few - old)))
    found = changes.differences(many, old)
    assert not changes.worth_sending(found)
    assert not changes.worth_sending(found, changes.to_wire(found))


def stream(*parts: bytes) -> bytes:
    return b"".join(coder.coded(*(np.frombuffer(part, dtype=np.uint8) for part in parts)))


def unsized(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(content)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (b"", "no bf16-changes message"),
        (b"\xff" * 20, "no bf16-changes message"),
        (stream(b"\x01"), "ends before"),
        (stream(b"\x01\x00", b"\x05", b"\x00"), "more than"),
        (stream(b"\x00\x00") + b"\x00", "no bf16-changes message"),
        (stream(b"\x00\xff", b"\x01" * 4), "more than"),  # of 12 values, 16 bits
        (stream(b"\x01\x00", b"\x80", b"\x01"), "ends before"),  # half of a wide difference
        (stream(b"\x00" * 8_000), "message of 8000 bytes"),  # expands beyond what 12 values can take
        (unsized(b"\x00\x00"), "message of -1 bytes"),
        (b"\x00" * 300, "bytes for 12 values"),
    ],
)
def test_what_is_no_message_of_so_many_values_is_refused(message: bytes, words: str) -> None:
    with pytest.raises(WireError, match=words):
        changes.from_wire(message, 12)


def test_changed_bytes_raise_one_error_or_give_as_many_values() -> None:
    chance = random.Random(5)
    good = bytearray(sent(weights(3000) + 1e-5, weights(3000)))
    decoded = 0
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            bad[chance.randrange(len(bad))] = chance.randrange(256)
        del bad[chance.randint(len(bad) // 2, 2 * len(bad)) :]
        try:
            found = changes.from_wire(bytes(bad), 3000)
        except WireError:
            continue
        decoded += 1
        assert found.shape == (3000,)
        assert found.dtype == torch.int16
    assert decoded

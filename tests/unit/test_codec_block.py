"""int8 and int4: the bound on their error, their layout byte by byte, and the ends of float32's range."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.balance.codecs import BLOCK
from potluck.codec import get
from potluck.codec.block import BlockCodec, Int4Codec, Int8Codec

CODECS = (Int8Codec(), Int4Codec())
SMALLEST = 2.0**-126

both = pytest.mark.parametrize("codec", CODECS, ids=["int8", "int4"])


def reference_decode(name: str, payload: Tensor, count: int) -> np.ndarray:
    """The layout as block.py's docstring gives it, one value at a time and in float64."""
    raw = payload.numpy().tobytes()
    blocks = -(-count // BLOCK)
    bf16 = np.frombuffer(raw[: 2 * blocks], dtype="<u2").astype("<u4") << 16
    scales = bf16.view("<f4").astype(np.float64)
    codes = np.frombuffer(raw[2 * blocks :], dtype=np.int8).astype(int)
    values = np.empty(count)
    for index in range(count):
        block, inside = divmod(index, BLOCK)
        if name == "int8":
            code = codes[index]
        else:
            pair = codes[block * 64 + inside % 64]
            low = ((pair + 8) & 15) - 8
            high = (((pair - low) // 16 + 8) & 15) - 8
            code = low if inside < 64 else high
        values[index] = code * scales[block]
    return values


def scale_of_each_value(payload: Tensor, count: int) -> Tensor:
    blocks = -(-count // BLOCK)
    scales = payload[: 2 * blocks].clone().view(torch.bfloat16).double()
    return scales.repeat_interleave(BLOCK)[:count]


def check_bound(codec: BlockCodec, values: Tensor) -> None:
    """Every error is at most half a scale, and no scale is larger than bf16 makes it."""
    count = values.numel()
    payload = codec.encode(values)
    assert codec.finite(payload, count)
    scales = scale_of_each_value(payload, count)
    error = (values.double() - codec.decode(payload, count).double()).abs()
    assert bool((error <= scales * (0.5 + 2e-5)).all())
    for start in range(0, count, BLOCK):
        peak = values[start : start + BLOCK].abs().amax().item()
        scale = scales[start].item()
        assert peak / codec.levels * (1 - 1e-6) <= scale
        assert scale <= max(peak / codec.levels * (1 + 2.0**-7 + 1e-6), SMALLEST)


@both
@settings(max_examples=50, deadline=None)
@given(
    count=st.integers(1, 700),
    seed=st.integers(0, 10**6),
    exponents=st.lists(st.integers(-44, 36), min_size=1, max_size=6),
)
def test_error_is_at_most_half_a_scale(codec: BlockCodec, count: int, seed: int, exponents: list[int]) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    magnitudes = torch.tensor([10.0**e for e in exponents], dtype=torch.float64)
    check_bound(codec, (values * magnitudes[torch.arange(count) // BLOCK % len(exponents)]).float())


@both
@settings(max_examples=50, deadline=None)
@given(values=st.lists(st.floats(-(2.0**127), 2.0**127, width=32), min_size=1))
def test_error_is_at_most_half_a_scale_whatever_the_values(codec: BlockCodec, values: list[float]) -> None:
    check_bound(codec, torch.tensor(values, dtype=torch.float32))


@both
@pytest.mark.parametrize("count", [1, 127, 128, 129, 100_003])
def test_error_is_at_most_half_a_scale_at_any_size(codec: BlockCodec, count: int) -> None:
    check_bound(codec, torch.randn(count, generator=torch.Generator().manual_seed(count)) * 1e-9)


@both
@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 400), seed=st.integers(0, 10**6))
def test_any_payload_decodes_to_code_times_scale_exactly(codec: BlockCodec, count: int, seed: int) -> None:
    """Codes that no encoder makes (-128, -8) among them."""
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randint(0, 256, (codec.nbytes(count),), dtype=torch.uint8, generator=generator)
    scales = payload[: 2 * -(-count // BLOCK)].view(torch.int16)
    scales.copy_(torch.randint(0x0080, codec.limit, scales.shape, generator=generator).to(torch.int16))
    assert codec.finite(payload, count)
    decoded = codec.decode(payload, count).double()
    assert decoded.tolist() == reference_decode(codec.name, payload, count).tolist()


@both
def test_the_largest_scale_times_the_most_hostile_code_is_finite(codec: BlockCodec) -> None:
    payload = torch.full((codec.nbytes(BLOCK),), 0x80 if codec.name == "int8" else 0x78, dtype=torch.uint8)
    for scale, usable in ((codec.limit - 1, True), (codec.limit, False), (-1, False), (0x7F80, False)):
        payload[:2].view(torch.int16).fill_(scale)
        assert codec.finite(payload, BLOCK) == usable
        if usable:
            assert bool(codec.decode(payload, BLOCK).isfinite().all())
    negative = -0x8000 + codec.limit
    payload[:2].view(torch.int16).fill_(negative)
    assert not codec.finite(payload, BLOCK), "a sign does not make a scale smaller"


def test_int8_layout() -> None:
    payload = get("int8").encode(torch.tensor([127.0, -127.0, 1.0, 0.0]))
    assert payload.numpy().tobytes().hex() == "803f" + "7f810100"  # bf16 1.0, little-endian; then the codes


def test_int4_layout() -> None:
    values = torch.zeros(130)
    values[0], values[1], values[64], values[66], values[127] = 7.0, -7.0, 3.0, -2.0, 1.0
    values[128], values[129] = -14.0, 2.0
    raw = get("int4").encode(values).numpy().tobytes()
    assert raw[:4].hex() == "803f" + "0040"  # 1.0 and 2.0
    block = raw[4:68]
    assert block[:3].hex() == bytes([7 + 3 * 16, 256 - 7, 256 - 32]).hex()
    assert block[3:63] == bytes(60)
    assert block[63] == 16
    assert raw[68:].hex() == bytes([256 - 7, 1]).hex()


def test_bytes_per_value() -> None:
    assert get("int4").nbytes(65_536) / 65_536 <= 0.52
    assert get("int8").nbytes(65_536) / 65_536 <= 1.02
    assert [get("int4").nbytes(n) for n in (0, 1, 64, 65, 128, 129)] == [0, 3, 66, 66, 66, 69]
    assert [get("int8").nbytes(n) for n in (0, 1, 128, 129)] == [0, 3, 130, 133]


@both
def test_zeros_stay_zeros_and_do_not_disturb_their_neighbours(codec: BlockCodec) -> None:
    values = torch.zeros(3 * BLOCK)
    values[BLOCK : 2 * BLOCK] = torch.linspace(-1e-9, 1e-9, BLOCK)
    decoded = codec.decode(codec.encode(values), values.numel())
    assert decoded[:BLOCK].tolist() == [0.0] * BLOCK
    assert decoded[2 * BLOCK :].tolist() == [0.0] * BLOCK
    assert (decoded - values).abs().amax() <= 1e-9 / codec.levels / 2 * 1.01


@both
@pytest.mark.parametrize("peak", [1e-45, 1e-40, 1.2e-38, 1e-30, 1e-9, 1.0, 1e30, 2.9e38])
def test_the_whole_range_of_float32(codec: BlockCodec, peak: float) -> None:
    check_bound(codec, torch.linspace(-1.0, 1.0, 300).double().mul(peak).float())


@both
def test_what_might_decode_to_infinity_counts_as_not_finite(codec: BlockCodec) -> None:
    values = torch.tensor([torch.finfo(torch.float32).max, 1.0])
    assert not codec.finite(codec.encode(values), 2)

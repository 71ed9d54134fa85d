"""Packing in pieces that stay in the cache: bit for bit what the codecs do, and what their formula says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from potluck.codec import encode_with_feedback, get
from potluck.codec.cached import PIECE, decode_sum, encode_into, packed_bytes
from potluck.errors import WireError

CODECS = ("none", "fp16", "bf16", "int8", "int4", "topk:0.1")
COUNTS = (1, 128, 1000, PIECE, PIECE + 128, 3 * PIECE)


@pytest.fixture(params=[1, 3], ids=["one core", "three cores"])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def pieces(codec: str, count: int) -> list[slice]:
    step = PIECE if codec in ("int8", "int4") and count % PIECE == 0 else count
    return [slice(at, at + step) for at in range(0, count, step)]


def packed(codec: str, values: Tensor, residual: Tensor | None) -> Tensor:
    out = torch.empty(packed_bytes(get(codec), values.numel()), dtype=torch.uint8)
    encode_into(get(codec), values, residual, out)
    return out


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_are_those_of_the_codec_with_feedback(codec: str, count: int, cores: int) -> None:
    torch.manual_seed(count)
    residual, wanted_residual = torch.zeros(count), torch.zeros(count)
    for _ in range(3):
        values = torch.randn(count) * torch.rand(count).exp2()
        before = values.clone()
        found = packed(codec, values, residual)
        wanted = [
            encode_with_feedback(get(codec), values[at].clone(), wanted_residual[at]) for at in pieces(codec, count)
        ]
        assert same_bits(found, torch.cat(wanted))
        assert torch.equal(residual, wanted_residual)
        assert same_bits(values, before), "the values were changed"


def test_int8_is_what_its_formula_says(cores: int) -> None:
    torch.manual_seed(1)
    values, residual = torch.randn(2 * PIECE), torch.randn(2 * PIECE) * 1e-3
    total = values + residual
    found = packed("int8", values, residual).view(2, -1)
    blocks = total.view(-1, 128)
    bits = (blocks.abs().amax(1) * (1.0 / 127)).view(torch.int32)
    scales = (bits.clamp(min=0x0080_0000) + 0xFFFF).bitwise_and(-0x1_0000).view(torch.float32)
    codes = torch.round(blocks * scales.reciprocal().unsqueeze(1))
    per_piece = PIECE // 128
    assert torch.equal(found[:, : 2 * per_piece].contiguous().view(torch.bfloat16).float().view(-1), scales)
    assert torch.equal(found[:, 2 * per_piece :].contiguous().view(torch.int8).float().view(-1, 128), codes)
    assert torch.equal(residual, (blocks - codes * scales.unsqueeze(1)).view(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", CODECS)
def test_the_sum_of_two_is_that_of_what_both_decode_to(
    codec: str, count: int, dtype: torch.dtype, cores: int
) -> None:
    torch.manual_seed(count)
    one, two = (packed(codec, torch.randn(count).to(dtype), None) for _ in range(2))
    out = torch.empty(count, dtype=dtype)
    decode_sum(get(codec), one, two, out, divide_by=2)
    parts, at = [], 0
    for piece in pieces(codec, count):
        size, values = get(codec).nbytes(piece.stop - piece.start), piece.stop - piece.start
        both = [get(codec).decode(payload[at : at + size], values) for payload in (one, two)]
        parts.append((both[0] + both[1]) / 2)
        at += size
    assert same_bits(out, torch.cat(parts).to(dtype))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_piece_that_is_not_finite_leaves_its_residual_alone(codec: str, bad: float) -> None:
    torch.manual_seed(2)
    values, residual = torch.randn(2 * PIECE), torch.full((2 * PIECE,), 1e-3)
    values[PIECE + 77] = bad
    payload = packed(codec, values, residual)
    assert torch.equal(residual[PIECE:], torch.full((PIECE,), 1e-3))
    assert not torch.equal(residual[:PIECE], torch.full((PIECE,), 1e-3))
    out = torch.empty(2 * PIECE)
    decode_sum(get(codec), payload, payload, out)
    assert out[:PIECE].isfinite().all()
    assert not out[PIECE + 77].isfinite()


@pytest.mark.parametrize("count", [1000, PIECE])
def test_a_payload_of_another_size_is_refused(count: int) -> None:
    good = packed("int8", torch.randn(count), None)
    for first, second in ((good[:-1], good), (good, good[:-1])):
        with pytest.raises(WireError):
            decode_sum(get("int8"), first, second, torch.empty(count))


def test_what_lies_at_an_odd_address_is_read_all_the_same() -> None:
    good = packed("int8", torch.randn(PIECE), None)
    odd = torch.empty(good.numel() + 1, dtype=torch.uint8)[1:]
    odd.copy_(good)
    found, wanted = torch.empty(PIECE), torch.empty(PIECE)
    decode_sum(get("int8"), odd, good, found)
    decode_sum(get("int8"), good, good, wanted)
    assert torch.equal(found, wanted)

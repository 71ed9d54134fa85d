"""Packing in pieces that stay in the cache: bit for bit what the codecs do, and what their formula says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from potluck.codec import encode_with_feedback, get
from potluck.codec.block import BlockCodec
from potluck.codec.cached import PIECE, Packing, in_blocks
from potluck.errors import WireError

CODECS = ("int8", "int4")
COUNTS = (PIECE, 3 * PIECE)


@pytest.fixture(params=[1, 3], ids=["one core", "three cores"])
def cores(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def pieces(count: int) -> list[slice]:
    return [slice(at, at + PIECE) for at in range(0, count, PIECE)]


def block_codec(name: str) -> BlockCodec:
    codec = get(name)
    assert in_blocks(codec)
    return codec


def packing(codec: str, values: Tensor, residual: Tensor | None) -> tuple[Packing, Tensor]:
    """Packed, two pieces first and then the others, and the payloads."""
    chosen, count = block_codec(codec), values.numel() // PIECE
    payload = torch.empty(count * chosen.nbytes(PIECE), dtype=torch.uint8)
    made = Packing(chosen, values, residual, payload)
    for first, last in ((0, min(2, count)), (min(2, count), count)):
        made.encode(first, last)
    return made, payload


def packed(codec: str, values: Tensor, residual: Tensor | None) -> Tensor:
    return packing(codec, values, residual)[1]


def whole(codec: str, payload: Tensor) -> Tensor:
    """What payloads decode to."""
    return torch.cat([get(codec).decode(part, PIECE) for part in payload.split(get(codec).nbytes(PIECE))])


def test_only_codecs_of_blocks_are_packed_so() -> None:
    assert [in_blocks(get(name)) for name in ("int8", "int4", "fp16", "topk:0.1", "none")] == [
        True,
        True,
        *[False] * 3,
    ]


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("codec", CODECS)
def test_the_bits_are_those_of_the_codec_with_feedback(codec: str, count: int, cores: int) -> None:
    torch.manual_seed(count)
    residual, wanted_residual = torch.zeros(count), torch.zeros(count)
    for _ in range(3):
        values = torch.randn(count) * torch.rand(count).exp2()
        before = values.clone()
        found = packed(codec, values, residual)
        wanted = [encode_with_feedback(get(codec), values[at].clone(), wanted_residual[at]) for at in pieces(count)]
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
    tensors = [torch.randn(count).to(dtype) for _ in range(2)]
    (one, first), (two, second) = (packing(codec, tensor, None) for tensor in tensors)
    wanted = ((whole(codec, first) + whole(codec, second)) / 2).to(dtype)
    for made, theirs in ((one, second), (two, first)):
        split = get(codec).nbytes(PIECE)
        made.add(0, 1, theirs[:split], divide_by=2)
        if count > PIECE:
            made.add(1, count // PIECE, theirs[split:], divide_by=2)
    assert same_bits(tensors[0], wanted)
    assert same_bits(tensors[1], wanted)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_a_piece_that_is_not_finite_leaves_its_residual_but_for_a_rounding(codec: str, bad: float) -> None:
    torch.manual_seed(2)
    values, residual = torch.randn(2 * PIECE), torch.full((2 * PIECE,), 1e-3)
    values[PIECE + 77] = bad
    made, payload = packing(codec, values, residual)
    as_it_was = torch.full((PIECE,), 1e-3)
    as_it_was[77] = 0.0
    torch.testing.assert_close(residual[PIECE:], as_it_was, rtol=0, atol=5e-7)  # roundings of values up to 4
    assert not torch.allclose(residual[:PIECE], torch.full((PIECE,), 1e-3), rtol=0, atol=5e-7)
    made.add(0, 2, payload)
    assert values[:PIECE].isfinite().all()
    assert not values[PIECE + 77].isfinite()


def test_a_payload_of_another_size_is_refused() -> None:
    made, good = packing("int8", torch.randn(2 * PIECE), None)
    for theirs, last in ((good[:-1], 2), (good, 1)):
        with pytest.raises(WireError):
            made.add(0, last, theirs)


def test_what_lies_at_an_odd_address_is_read_all_the_same() -> None:
    found, wanted = torch.randn(PIECE).expand(2, -1).clone()
    (one, good), (two, _) = (packing("int8", values, None) for values in (found, wanted))
    odd = torch.empty(good.numel() + 1, dtype=torch.uint8)[1:]
    odd.copy_(good)
    one.add(0, 1, odd)
    two.add(0, 1, good)
    assert torch.equal(found, wanted)

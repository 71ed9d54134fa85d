"""topk: what it keeps, its layout, and payloads whose indices lie."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.codec import get
from potluck.codec.topk import TopkCodec
from potluck.errors import WireError


def payload_of(indices: list[int], values: list[float]) -> Tensor:
    return torch.cat(
        (
            torch.tensor(indices, dtype=torch.int32).view(torch.uint8),
            torch.tensor(values, dtype=torch.bfloat16).view(torch.uint8),
        )
    )


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(width=32, allow_nan=False, min_value=-(2.0**127), max_value=2.0**127), min_size=1),
    ratio=st.floats(0.01, 1.0),
)
def test_keeps_the_largest_and_drops_nothing_larger(values: list[float], ratio: float) -> None:
    codec = TopkCodec(ratio)
    given_values = torch.tensor(values, dtype=torch.float32)
    indices = codec.encode(given_values)[: 4 * codec.kept(len(values))].view(torch.int32).long()
    dropped = torch.ones(len(values), dtype=torch.bool)
    dropped[indices] = False
    assert len(set(indices.tolist())) == codec.kept(len(values))
    if bool(dropped.any()):
        assert given_values[dropped].abs().amax() <= given_values[indices].abs().amin()
    decoded = codec.decode(codec.encode(given_values), len(values))
    assert torch.equal(decoded[indices], given_values[indices].bfloat16().float())
    assert not bool(decoded[dropped].any())


def test_layout() -> None:
    payload = TopkCodec(0.5).encode(torch.tensor([0.5, -2.0, 0.25, 1.0]))
    assert payload.numpy().tobytes().hex() == "01000000" + "03000000" + "00c0" + "803f"


@pytest.mark.parametrize(
    "indices",
    [[-1, 2], [0, 4], [2, 1], [3, 3], [0, 2**31 - 1], [-(2**31), 0]],
    ids=["negative", "past the end", "falling", "twice", "far past the end", "far below"],
)
def test_indices_that_lie_are_refused(indices: list[int]) -> None:
    codec = TopkCodec(0.5)
    payload = payload_of(indices, [1.0, 2.0])
    out = torch.full((4,), 9.0)
    assert not codec.finite(payload, 4)
    with pytest.raises(WireError, match="indices"):
        codec.decode(payload, 4, out=out)
    assert out.tolist() == [9.0] * 4


def test_honest_indices_are_taken() -> None:
    codec = TopkCodec(0.5)
    assert codec.finite(payload_of([0, 3], [1.0, -2.0]), 4)
    assert codec.decode(payload_of([0, 3], [1.0, -2.0]), 4).tolist() == [1.0, 0.0, 0.0, -2.0]


def test_bytes_per_value() -> None:
    assert get("topk").nbytes(1_000_000) == 60_000
    assert get("topk").nbytes(1) == 6
    assert get("topk").nbytes(0) == 0
    assert get("topk:1").nbytes(10) == 60

"""Pieces cover the flat vector of trained parameters exactly; fingerprints say in words where two models differ."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.balance.codecs import BLOCK
from potluck.errors import WireError
from potluck.hub.layout import (
    LARGEST_PIECE,
    SMALLEST_PIECE,
    Layout,
    first_difference,
    make_layout,
    piece_size,
)
from potluck.spec.model_description import TensorSpec
from potluck.wire.frames import packed_model, read_model


def spec(name: str, *shape: int, dtype: str = "float32", role: str = "trained") -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype=dtype, role=role)


def sent(fingerprint: Any) -> tuple[TensorSpec, ...]:
    """What a host reads of a fingerprint that somebody has sent."""
    return read_model(json.dumps({"fingerprint": fingerprint, "hashes": {}}).encode()).fingerprint


def check(layout: Layout) -> None:
    """Every value of every tensor is in exactly one piece, at the place where the flat vector has it."""
    starts = []
    total = 0
    for tensor in layout.tensors:
        starts.append(total)
        total += tensor.count
    assert layout.count == total
    offset = 0
    for number, piece in enumerate(layout.pieces):
        assert (piece.index, piece.offset) == (number, offset)
        assert piece.count == sum(s.stop - s.start for s in piece.spans) > 0
        at = offset
        for span in piece.spans:
            assert 0 <= span.start < span.stop <= layout.tensors[span.tensor].count
            assert starts[span.tensor] + span.start == at
            at += span.stop - span.start
        tensors = [s.tensor for s in piece.spans]
        assert len(set(tensors)) == len(tensors), "one span for each tensor of a piece"
        offset += piece.count
    assert offset == total
    holding: list[list[int]] = [[] for _ in layout.tensors]
    for piece in layout.pieces:
        for span in piece.spans:
            holding[span.tensor].append(piece.index)
    assert layout.pieces_of == tuple(tuple(h) for h in holding)


@settings(max_examples=150, deadline=None)
@given(
    shapes=st.lists(st.lists(st.integers(0, 6), max_size=3), max_size=8), size=st.sampled_from([1, 2, 7, 64, None])
)
def test_pieces_cover_all_trained_values_once(shapes: list[list[int]], size: int | None) -> None:
    layout = make_layout([spec(f"t{i}", *shape) for i, shape in enumerate(shapes)], size)
    check(layout)
    if size is not None:
        assert all(p.count == size for p in layout.pieces[:-1])


@pytest.mark.parametrize("total", [1, 1000, SMALLEST_PIECE, 3_300_000, 124_000_000, 8_000_000_000])
def test_pieces_are_blocks_neither_too_small_nor_too_large(total: int) -> None:
    size = piece_size(total)
    assert size % BLOCK == 0
    assert SMALLEST_PIECE <= size <= LARGEST_PIECE


def test_a_large_model_has_about_as_many_pieces_as_wanted() -> None:
    layout = make_layout([spec(f"layer{i}", 1000, 330) for i in range(10)])
    check(layout)
    assert 48 <= len(layout.pieces) <= 64


def test_a_scalar_counts_one() -> None:
    assert spec("temperature").count == 1
    check(make_layout([spec("temperature"), spec("empty", 0, 3), spec("w", 2, 3)]))


def test_a_fingerprint_round_trips_through_json() -> None:
    model = (spec("a.weight", 3, 4), spec("b", dtype="int64", role="buffer"), spec("c", 2, role="frozen"))
    raw = packed_model(model, {"b": "0"})
    assert json.loads(raw) == {
        "fingerprint": [
            ["a.weight", [3, 4], "float32", "trained"],
            ["b", [], "int64", "buffer"],
            ["c", [2], "float32", "frozen"],
        ],
        "hashes": {"b": "0"},
    }
    assert read_model(raw).fingerprint == model


@pytest.mark.parametrize(
    "data",
    [
        *(None, 7, "abc", [1], [["a"]], [["a", 3, "float32", "trained"]], [["a", ["x"], "f", "t"]], [[None] * 4]),
        *([["a", [3], "f", "t", "more"]], [["a", [-1], "f", "t"]]),
    ],
)
def test_what_is_no_fingerprint_is_a_wire_error(data: Any) -> None:
    with pytest.raises(WireError):
        sent(data)


@given(
    data=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
        max_leaves=12,
    )
)
@settings(max_examples=150, deadline=None)
def test_a_strangers_fingerprint_is_read_or_refused(data: Any) -> None:
    try:
        specs = sent(data)
    except WireError:
        return
    assert all(isinstance(s.name, str) and all(type(n) is int for n in s.shape) for s in specs)


def test_the_first_difference_is_named_with_both_values() -> None:
    ours = [spec("a", 2), spec("b", 3), spec("c", 4)]
    assert first_difference(ours, list(ours)) is None
    for theirs in (spec("b", 5), spec("x", 3), spec("b", 3, dtype="bfloat16"), spec("b", 3, role="frozen")):
        text = first_difference(ours, [ours[0], theirs, spec("c", 9)])
        assert text == f"tensor 1: the host has b [3] float32 (trained), the guest has {theirs}"
    assert first_difference(ours, ours[:2]) == (
        "the host has 3 tensors, the guest 2: only the host has c [4] float32 (trained)"
    )
    assert "only the guest has c [4]" in str(first_difference(ours[:2], ours))

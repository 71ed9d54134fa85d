"""Trees: batches come back bit for bit, nothing is allocated on a stranger's word, errors name the place."""

from __future__ import annotations

import collections
import contextlib
import enum
import json
import math
from collections import UserDict
from types import MappingProxyType
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.errors import LoopError, WireError
from potluck.spec.messages import SamplesMessage
from potluck.wire import tree as module
from potluck.wire.frames import FROM_HOST, MAX_FRAME_BYTES, MAX_FRAMES, pack
from potluck.wire.tree import pack_tree, split_frames, unpack_tree

DTYPES = sorted(module._DTYPES.values(), key=str)


def travel(tree: Any, **limits: int) -> Any:
    """Through the frames of a real message, as between two machines."""
    spec, frames = pack_tree(tree, **limits)
    packed = pack(SamplesMessage(lease=1, batch=0, tree=spec), frames)
    message, arrived = FROM_HOST.read([bytes(frame) for frame in packed])
    assert isinstance(message, SamplesMessage)
    return unpack_tree(message.tree, arrived, **limits)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        bits = [t.contiguous().reshape(-1).view(torch.uint8) for t in (a, b)]
        return a.dtype == b.dtype and a.shape == b.shape and bool(torch.equal(*bits))
    if isinstance(a, dict):
        return type(b) is dict and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or (a != a and b != b))


def random_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    count = math.prod(shape)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape).bool()
    return torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = random_bits(dtype, shape)
    assert same(travel({"x": tensor})["x"], tensor)


def test_the_dtypes_of_today_are_there() -> None:
    for dtype in (torch.bfloat16, torch.bool, torch.complex64, torch.float16, torch.int64, torch.float8_e5m2):
        assert dtype in DTYPES


@given(
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**200), 2**200)
        | st.floats()
        | st.text(st.characters(codec="utf-8"), max_size=10)
        | st.builds(lambda n: torch.arange(n, dtype=torch.int16), st.integers(0, 6)),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.lists(inner, max_size=4).map(tuple)
            | st.dictionaries(
                st.text(st.characters(codec="utf-8"), max_size=3) | st.integers() | st.none(),
                inner,
                max_size=4,
            )
        ),
        max_leaves=15,
    )
)
@example({"t": "x", "l": ["l", "t", "d", "@", "f", "nan"], "n": float("nan"), "i": -math.inf})
@settings(deadline=None)
def test_nested_batches_come_back(tree: Any) -> None:
    assert same(travel(tree), tree)


def test_named_tuples_travel_as_tuples_and_subclasses_as_their_values() -> None:
    pair = collections.namedtuple("pair", "a b")

    class Colour(str, enum.Enum):  # noqa: UP042  its str() is not its value
        RED = "red"

    got = travel([pair(torch.ones(2), 3), collections.OrderedDict(z=1, a=Colour.RED)])
    assert type(got[0]) is tuple
    assert type(got[1]) is dict
    assert got[1] == {"z": 1, "a": "red"}
    assert type(got[1]["a"]) is str


def test_mappings_travel_as_dicts() -> None:
    spec, frames = pack_tree(UserDict(ids=torch.arange(3), rest=MappingProxyType({"n": 1})))
    back = unpack_tree(spec, frames)
    assert type(back) is dict
    assert back["ids"].tolist() == [0, 1, 2]
    assert back["rest"] == {"n": 1}


def test_views_conjugates_and_gradients_are_sent_as_what_they_show() -> None:
    base = torch.arange(12.0).reshape(3, 4).requires_grad_()
    conjugate = torch.tensor([1 + 2j, 3 - 1j]).conj()
    got = travel([base.t()[1:], base[:, 1:2].expand(3, 5), conjugate, conjugate.imag])
    assert torch.equal(got[0], base.detach().t()[1:])
    assert torch.equal(got[1], base.detach()[:, 1:2].expand(3, 5))
    assert torch.equal(got[2], torch.tensor([1 - 2j, 3 + 1j]))
    assert torch.equal(got[3], torch.tensor([-2.0, 1.0]))
    assert not got[0].requires_grad


def test_received_tensors_own_writable_memory() -> None:
    spec, frames = pack_tree({"x": torch.zeros(4)})
    raw = [bytes(frame) for frame in frames]
    got = unpack_tree(spec, raw)["x"]
    got += 1
    assert raw == [bytes(16)]


def test_a_large_tensor_is_split_without_a_copy_and_joined_again() -> None:
    tensor = torch.randint(0, 256, (2 * MAX_FRAME_BYTES + 12345,), dtype=torch.uint8)
    spec, frames = pack_tree([torch.arange(3), tensor])
    assert [frame.nbytes for frame in frames] == [24, MAX_FRAME_BYTES, MAX_FRAME_BYTES, 12345]
    tensor[MAX_FRAME_BYTES] ^= 255
    assert frames[2][0] == int(tensor[MAX_FRAME_BYTES])
    assert same(unpack_tree(spec, frames)[1], tensor)


def test_many_tensors_share_frames() -> None:
    tree = [torch.full((7,), i, dtype=torch.int32) for i in range(3000)]
    _, frames = pack_tree(tree)
    assert len(frames) <= MAX_FRAMES // 2
    assert same(travel(tree), tree)


def test_long_texts_leave_the_header() -> None:
    tree = {"text": ["wörd " * 5000, "x" * 100_000], "y": torch.arange(5)}
    spec, _ = pack_tree(tree)
    assert len(json.dumps(spec)) < 100
    assert same(travel(tree), tree)


def test_more_than_the_limit_is_refused_on_both_sides() -> None:
    tree = torch.zeros(1000)
    with pytest.raises(LoopError, match="too large to send") as caught:
        pack_tree(tree, max_bytes=3999)
    assert "micro-batch" in caught.value.hint
    spec, frames = pack_tree(tree)
    with pytest.raises(WireError, match="at most 3999"):
        unpack_tree(spec, frames, max_bytes=3999)


class Picture:
    """Stands for what people forget to turn into a tensor."""


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"image": [Picture()]}, r"batch\['image'\]\[0\] is a .*Picture"),
        ((1, {"a": {2: b"x"}}), r"batch\[1\]\['a'\]\[2\] is a bytes"),
        ([torch.zeros(2, device="meta")], r"batch\[0\] is a tensor .*meta"),
        ([torch.eye(2).to_sparse()], r"batch\[0\] is a tensor .*sparse"),
        ({(1, 2): 3}, r"batch has a key of type tuple"),
        ([3 + 2j], r"batch\[0\] is a complex"),
        ({1, 2}, r"batch is a set"),
        (["\ud800"], r"batch\[0\] is a string with broken"),
        ([1 << 5000], r"batch\[0\] is an integer of 5001 bits"),
    ],
)
def test_what_cannot_travel_is_named_with_its_place(tree: Any, place: str) -> None:
    with pytest.raises(LoopError, match=place):
        pack_tree(tree)


def test_nesting_is_limited_so_that_every_packed_tree_can_be_unpacked() -> None:
    tree: Any = torch.ones(1)
    for _ in range(module._MAX_TREE_DEPTH):
        tree = {"k": tree}
    assert same(travel(tree), tree)
    with pytest.raises(LoopError, match="nested too deeply"):
        pack_tree({"k": tree})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["x", "d", "l", "t", "f", "@", "float32", "int8", "bool", "nan", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text(max_size=2), inner, max_size=2)
        | st.tuples(st.sampled_from("xdltf@"), inner).map(list)
        | st.tuples(st.just("x"), st.sampled_from(["float32", "bool", "complex32"]), inner).map(list)
    ),
    max_leaves=12,
)


@given(spec=JSON, frames=st.lists(st.binary(max_size=24), max_size=3))
@settings(max_examples=150, deadline=None)
def test_random_specs_only_ever_raise_wire_errors(spec: Any, frames: list[bytes]) -> None:
    with contextlib.suppress(WireError):
        unpack_tree(spec, frames)


@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_mutated_specs_and_frames_only_ever_raise_wire_errors(data: st.DataObject) -> None:
    tree = {
        "a": torch.arange(6, dtype=torch.int16).reshape(2, 3),
        "b": [True, (1.5, "s")],
        "c": torch.ones(2) > 0,
    }
    spec, views = pack_tree(tree)
    text = bytearray(json.dumps(spec).encode())
    for _ in range(data.draw(st.integers(0, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(st.sampled_from(b'0123456789[]",xdltf@-e.'))
    frames = [bytes(view) for view in views]
    if data.draw(st.booleans()):
        at = data.draw(st.integers(0, len(frames) - 1))
        frames[at] = frames[at][: data.draw(st.integers(0, 12))] + data.draw(st.binary(max_size=3))
    try:
        changed = json.loads(text)
    except ValueError:
        return
    with contextlib.suppress(WireError):
        unpack_tree(changed, frames)


@pytest.mark.parametrize(
    "spec",
    [
        ["x", "float32", [10**15]],
        ["x", "float32", [2**62, 2**62]],
        ["x", "float32", [0, 2**62]],
        ["x", "float32", [0] + [2**31] * 10],
        ["x", "float32", [-1]],
        ["x", "float32", [True]],
        ["x", "float32", [1.0]],
        ["x", "float32", [1] * 65],
        ["x", "float32", 1],
        ["x", "float32", [3]],
        ["x", "float99", [2]],
        ["x", "qint8", [8]],
        ["x", ["float32"], [2]],
        ["x", "float32"],
        ["@", 10**15],
        ["@", -1],
        ["@", 8],
        ["l", ["@", 4]],
        ["d", [["a"], 1]],
        ["d", [{}, 1]],
        ["f", "1"],
        ["f", []],
        {},
        [],
    ],
)
def test_specs_that_promise_too_much_are_refused_without_allocating(spec: Any) -> None:
    with pytest.raises(WireError):
        unpack_tree(spec, [bytes(8)])


def test_bytes_that_belong_to_nothing_are_refused() -> None:
    with pytest.raises(WireError, match="belong to nothing"):
        unpack_tree(["x", "int8", [4]], [bytes(5)])


def test_a_bool_tensor_of_odd_bytes_is_made_sound() -> None:
    got = unpack_tree(["x", "bool", [3]], [b"\x00\x02\xff"])
    assert got.tolist() == [False, True, True]
    assert got.view(torch.uint8).tolist() == [0, 1, 1]


def test_split_frames_covers_everything_once() -> None:
    memory = memoryview(bytes(range(100)))
    assert b"".join(split_frames(memory, 33)) == bytes(memory)
    assert [piece.nbytes for piece in split_frames(memory, 33)] == [33, 33, 33, 1]
    assert split_frames(memoryview(b"")) == []

"""Frames: what is packed comes back, and whatever the bytes, a reader raises nothing but WireError."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from potluck.errors import WireError
from potluck.spec.messages import Frames, Message
from potluck.wire import frames as wire
from potluck.wire.frames import Reader, Received, VersionError, pack

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=20)
)
TREES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text("abü", max_size=3), inner, max_size=4),
)
FIELDS = st.dictionaries(st.text("abc_", min_size=1, max_size=8), TREES, max_size=5)


class Anything(Message, frozen=True, kw_only=True):
    """A message that holds whatever JSON does."""

    kind = "a"
    frames = Frames(most=wire.MAX_FRAMES)
    x: Any = None


READER = Reader([Anything])


def read(frames: Any) -> Received[Anything]:
    return READER.read(frames)


def header(text: str | bytes, version: int = wire.PROTOCOL) -> bytes:
    return b"PLK" + bytes([version]) + (text if isinstance(text, bytes) else text.encode())


@given(fields=FIELDS, raw=st.lists(st.binary(max_size=40), max_size=5))
@settings(deadline=None)
def test_what_is_packed_comes_back(fields: dict[str, Any], raw: list[bytes]) -> None:
    message, frames = read(pack(Anything(x=fields), raw))
    assert message.x == fields
    assert [bytes(frame) for frame in frames] == raw


def test_raw_frames_are_passed_on_without_a_copy() -> None:
    memory = bytearray(100)
    view = memoryview(memory)
    packed = pack(Anything(), (view,))
    memory[3] = 7
    assert read(packed).frames[0][3] == 7


@given(st.lists(st.binary(max_size=80), max_size=4))
@settings(deadline=None)
def test_random_bytes_only_ever_raise_wire_errors(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        read(frames)


@given(st.binary(max_size=60))
@example(b'["a",{"x":' + b"[" * 5000 + b"]" * 5000 + b"}]")
@example(b'["a",{"x":' + b"9" * 5000 + b"}]")
@example(b'["a",{"x":1e999}]')
@example(b'["a",{"x":"\\ud800"}]')
@example(b"\xef\xbb\xbf[]")
@example('["a",{}]'.encode("utf-16"))
@settings(deadline=None)
def test_random_json_only_ever_raises_wire_errors(body: bytes) -> None:
    try:
        message, _ = read([header(body)])
    except WireError:
        return
    assert isinstance(message, Anything)


@given(data=st.data(), fields=FIELDS)
@settings(deadline=None)
def test_mutated_messages_only_ever_raise_wire_errors(data: st.DataObject, fields: dict[str, Any]) -> None:
    packed = [bytearray(frame) for frame in pack(Anything(x=fields), (b"abc",))]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(packed[0]) - 1))
        packed[0][at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del packed[0][data.draw(st.integers(0, len(packed[0]))) :]
    try:
        message, _ = read([bytes(frame) for frame in packed])
    except WireError:
        return
    json.dumps(message.x, allow_nan=False, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{}",
        "[]",
        '["a"]',
        '["a",{},1]',
        '["a",[]]',
        "[1,{}]",
        '["",{}]',
        '["A B",{}]',
        '["' + "a" * 33 + '",{}]',
        '["a",{"x":NaN}]',
        '["a",{"x":-Infinity}]',
        '["a",{"x":1e400}]',
        '["a",{}] ]',
        '["a",{"x":"\\udc00"}]',
        '["a",{"x":' + "[" * 70 + "]" * 70 + "}]",
        '["a",{"x":' + "[" * 10000 + "]" * 10000 + "}]",
        '["a",{"x":' + "1" * 5000 + "}]",
    ],
)
def test_headers_that_are_refused(body: str) -> None:
    with pytest.raises(WireError):
        read([header(body)])


def test_a_header_as_large_as_allowed_is_taken_and_one_byte_more_is_not() -> None:
    room = wire.MAX_HEADER_BYTES - len(header('["a",{"x":""}]'))
    assert len(read([header('["a",{"x":"' + "y" * room + '"}]')]).message.x) == room
    with pytest.raises(WireError, match="at most"):
        read([header('["a",{"x":"' + "y" * (room + 1) + '"}]')])
    with pytest.raises(WireError, match="at most"):
        pack(Anything(x="y" * (room + 1)))


@pytest.mark.parametrize("theirs", [0, wire.PROTOCOL - 1, wire.PROTOCOL + 1, 255])
def test_another_version_is_told_apart_even_when_its_header_means_nothing_here(theirs: int) -> None:
    with pytest.raises(VersionError) as caught:
        read([header(b"\x80 no json", version=theirs)])
    assert (caught.value.code, caught.value.theirs) == ("bad-message", theirs)


def test_too_many_and_too_large_frames_are_refused_both_ways() -> None:
    large = bytes(wire.MAX_FRAME_BYTES + 1)
    for frames in ((b"",) * (wire.MAX_FRAMES + 1), (large,)):
        with pytest.raises(WireError):
            pack(Anything(), frames)
        with pytest.raises(WireError):
            read([header('["a",{}]'), *frames])
    assert len(read([header('["a",{}]'), *(b"",) * wire.MAX_FRAMES]).frames) == wire.MAX_FRAMES


def test_frames_that_are_no_bytes_are_wire_errors() -> None:
    for frame in (None, 3, memoryview(bytes(16))[::2]):
        with pytest.raises(WireError):
            read([header('["a",{}]'), frame])  # type: ignore[list-item]
        with pytest.raises(WireError):
            read([frame])  # type: ignore[list-item]

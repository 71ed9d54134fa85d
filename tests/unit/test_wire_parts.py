"""Cut messages: what is cut comes back, no part is longer than a host takes, and parts that lie are no message."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import WireError
from potluck.spec.messages import GradMessage
from potluck.wire.frames import (
    FROM_GUEST,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_PARTS,
    PART_BYTES,
    cut,
    joined,
    pack,
)
from support.plain import Plain, packed, unpacked

DATA = os.urandom(3 * PART_BYTES)


def views(parts: list[bytes | memoryview]) -> list[memoryview]:
    return [memoryview(bytes(part)) for part in parts]


@given(
    st.lists(st.sampled_from([0, 1, 100, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 2 * PART_BYTES]), max_size=5)
)
@settings(deadline=None, max_examples=50)
def test_what_is_cut_comes_back(sizes: list[int]) -> None:
    frames = [DATA[size % 7 : size % 7 + size] for size in sizes]
    message = packed(Plain(kind="welcome", fields={}, frames=tuple(frames)))
    parts = cut(message)
    assert all(len(part) <= PART_BYTES for part in parts)
    assert [bytes(frame) for frame in unpacked(joined(views(parts))).frames] == frames


def test_a_message_of_short_frames_travels_as_it_is() -> None:
    message = packed(Plain(kind="alive", fields={}, frames=(b"x" * PART_BYTES,)))
    assert cut(message) == message


def test_nothing_is_copied_to_be_cut_and_short_frames_not_to_be_joined() -> None:
    memory = bytearray(PART_BYTES + 10)
    parts = cut([b"PLKx", memoryview(memory), b"tail"])
    memory[PART_BYTES] = 7
    assert parts[3][0] == 7
    received = views(parts)
    frames = joined(received)
    assert frames[0] is received[1]
    assert frames[2] is received[4]
    assert not frames[1].readonly, "the decoder copies what it cannot write to"


def test_more_than_a_host_takes_is_not_sent() -> None:
    with pytest.raises(WireError, match="at most"):
        cut([b"PLK", bytes(MAX_FRAME_BYTES + 1)])
    most = [bytes(MAX_FRAME_BYTES)] * (MAX_PARTS * PART_BYTES // MAX_FRAME_BYTES)
    with pytest.raises(WireError, match="go to a host"):
        cut([b"PLK", *most])


@pytest.mark.parametrize(
    "change",
    [
        lambda parts: parts[:-1],
        lambda parts: [*parts, b""],
        lambda parts: [*parts, b"more"],
        lambda parts: [parts[0], *parts[2:]],
        lambda parts: [parts[0] + b"\0", *parts[1:]],
        lambda parts: [parts[0] + bytes(4) * MAX_FRAMES, *parts[1:]],
        lambda parts: [parts[0] + b"\xff\xff\xff\xff", *parts[1:]],
        lambda parts: [b"CUT", *parts[1:]],
        lambda parts: [parts[0], *parts[1:], *[b""] * MAX_PARTS],
        lambda parts: [b"CUT" + b"\xff\xff\xff\x7f"],
    ],
)
def test_parts_that_lie_are_no_message(change: object) -> None:
    parts = [bytes(part) for part in cut(pack(GradMessage(lease=1, piece=0), (DATA[: PART_BYTES + 9],)))]
    assert len(parts) == 4
    lying = views(change(parts))  # type: ignore[operator]
    assert joined(lying) == lying
    with pytest.raises(WireError):
        FROM_GUEST.read(joined(lying))


def test_nothing_at_all_is_no_message() -> None:
    assert joined([]) == []
    assert joined([memoryview(b"CUT")]) == []
    with pytest.raises(WireError):
        FROM_GUEST.read([])

"""Messages as frames: owns the layout of a message's bytes and the limits that hold for them.

    frame 0      b"PLK", one byte of protocol version, then compact UTF-8 JSON: [kind, fields]
    frame 1..n   raw bytes, at most MAX_FRAMES of them

Messages to a host that have long frames are split into parts: first b"CUT" and the length of each frame
(little-endian, 4 bytes), then all frames, each as parts of at most PART_BYTES.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from potluck.errors import WireError

PROTOCOL = 2

MAX_HEADER_BYTES = 64 * 1024
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FRAMES = 64
"""Raw frames in one message; the header is not one of them."""

PART_BYTES = 256 * 1024
"""The largest part that a host accepts. libzmq allocates for strangers what it would allocate for guests, so this
times the unauthenticated connections is what strangers can make a host allocate."""
MAX_PARTS = 256
"""The most parts of one message to a host."""

MAX_DEPTH = 64
"""The deepest nesting of a header. No honest message is deeper, and walking a deeper one is a risk."""

MAGIC = b"PLK"
_CUT = b"CUT"
_PREFIX = MAGIC + bytes([PROTOCOL])
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII)


class VersionError(WireError):
    """A message of another protocol version; `theirs` is that version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the other machine speaks protocol {theirs}, this one speaks {PROTOCOL}",
            hint="install the same version of potluck on both machines",
        )
        self.theirs = theirs


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message: its kind, its fields, and its raw frames."""

    kind: str
    fields: dict[str, Any]
    frames: tuple[bytes | memoryview, ...] = ()


def pack(message: Message) -> list[bytes | memoryview]:
    """The frames of a message. The raw frames are passed on, not copied."""
    if not isinstance(message.kind, str) or not _KIND.fullmatch(message.kind):
        raise WireError(f"{message.kind!r} is not the name of a kind of message")
    if not isinstance(message.fields, dict):
        raise WireError(f"the fields of {message.kind!r} are a {type(message.fields).__name__}, not a dict")
    header = _PREFIX + dump_json([message.kind, message.fields])
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"the header of {message.kind!r} has {len(header)} bytes, at most {MAX_HEADER_BYTES} may travel"
        )
    return [header, *(_checked(frame, number) for number, frame in enumerate(_counted(message.frames), 1))]


def unpack(frames: Sequence[bytes | memoryview]) -> Message:
    """The message in these frames, or WireError (VersionError for another protocol) whatever they hold."""
    if not frames:
        raise WireError("a message without frames")
    raw = _counted(frames[1:])
    head = _view(frames[0])
    if head.nbytes < len(_PREFIX):
        raise WireError(f"a header of {head.nbytes} bytes is too short")
    if bytes(head[: len(MAGIC)]) != MAGIC:
        raise WireError("the header does not begin as a potluck message does")
    if head[len(MAGIC)] != PROTOCOL:
        raise VersionError(head[len(MAGIC)])
    if head.nbytes > MAX_HEADER_BYTES:
        raise WireError(f"a header of {head.nbytes} bytes, at most {MAX_HEADER_BYTES} are read")
    value = load_json(bytes(head[len(_PREFIX) :]))
    if not isinstance(value, list) or len(value) != 2:
        raise WireError("the header is not a pair of kind and fields")
    kind, fields = value
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise WireError("the kind of the message is not a short word")
    if not isinstance(fields, dict):
        raise WireError(f"the fields of {kind!r} are not an object")
    return Message(
        kind=kind, fields=fields, frames=tuple(_checked(frame, number) for number, frame in enumerate(raw, 1))
    )


def cut(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The parts in which these frames are sent to a host; nothing is copied."""
    views = [_checked(frame, number) for number, frame in enumerate(map(_view, frames))]
    if all(len(view) <= PART_BYTES for view in views):
        return list(frames)
    parts: list[bytes | memoryview] = [_CUT + struct.pack(f"<{len(views)}I", *map(len, views))]
    for view in views:
        parts += [view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)]
    if len(parts) > MAX_PARTS:
        raise WireError(f"a message of {sum(map(len, views))} bytes, at most {MAX_PARTS * PART_BYTES} go to a host")
    return parts


def joined(parts: list[memoryview]) -> list[memoryview]:
    """The frames that these parts make up. Invalid parts are returned unchanged; they are not a message."""
    if not parts or parts[0][: len(_CUT)] != _CUT or len(parts) > MAX_PARTS:
        return parts
    table = parts[0][len(_CUT) :]
    if table.nbytes % 4 or table.nbytes > 4 * (MAX_FRAMES + 1):
        return parts
    frames: list[memoryview] = []
    at = 1
    for size in struct.unpack(f"<{table.nbytes // 4}I", table):
        count = -(-size // PART_BYTES)
        chosen = parts[at : at + count]
        if size > MAX_FRAME_BYTES or sum(part.nbytes for part in chosen) != size:
            return parts
        frames.append(chosen[0] if count == 1 else _one(chosen, size))
        at += count
    return frames if at == len(parts) else parts


def _one(parts: Sequence[memoryview], size: int) -> memoryview:
    # numpy's copies let Python's other threads run meanwhile, and one of those keeps a GPU busy.
    whole = np.empty(size, dtype=np.uint8)
    at = 0
    for part in parts:
        whole[at : at + part.nbytes] = np.frombuffer(part, dtype=np.uint8)
        at += part.nbytes
    return whole.data


def dump_json(value: Any) -> bytes:
    """Compact UTF-8 JSON; WireError for what JSON cannot represent (NaN and infinities included)."""
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        return text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise WireError(f"this cannot be written as JSON: {error}") from None


def load_json(raw: bytes) -> Any:
    """Parse untrusted JSON: WireError for anything invalid, and for what could cause harm later.

    That is: NaN and infinities (also 1e999), nesting deeper than MAX_DEPTH, and lone surrogates, which
    would fail only when somebody prints or stores them.
    """
    try:
        value = json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
        if b"\\u" in raw:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:
        # The text of the error can quote the stranger's bytes: keep its kind only.
        raise WireError(f"the header is not readable JSON ({type(error).__name__})") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _too_deep(value):
        raise WireError(f"the header is nested deeper than {MAX_DEPTH}")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(text)
    return value


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return False
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
        level = below
    return True


def _counted(frames: Sequence[bytes | memoryview]) -> Sequence[bytes | memoryview]:
    if len(frames) > MAX_FRAMES:
        raise WireError(f"a message with {len(frames)} frames, at most {MAX_FRAMES} are taken")
    return frames


def _checked(frame: bytes | memoryview, number: int) -> bytes | memoryview:
    size = _view(frame).nbytes
    if size > MAX_FRAME_BYTES:
        raise WireError(f"frame {number} has {size} bytes, at most {MAX_FRAME_BYTES} are taken")
    return frame


def _view(frame: bytes | memoryview) -> memoryview:
    try:
        view = memoryview(frame)
        if view.ndim == 1 and view.format == "B" and view.contiguous:
            return view
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError):
        raise WireError(f"a frame is a {type(frame).__name__}, not contiguous bytes") from None

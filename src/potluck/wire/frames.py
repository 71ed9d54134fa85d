"""Messages as frames: owns the layout of a message's bytes and their limits.

    frame 0      b"PLK", one byte of protocol version, then compact UTF-8 JSON: [kind, fields]
    frame 1..n   raw bytes, at most MAX_FRAMES of them

Messages to a host that have long frames are split into parts: first b"CUT" and the length of each frame
(little-endian, 4 bytes), then all frames, each as parts of at most PART_BYTES.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar, get_args

import msgspec
import numpy as np

from potluck import checked
from potluck.bounds import Long
from potluck.errors import WireError
from potluck.spec.messages import FromGuest, FromHost, Message
from potluck.spec.model_description import ModelDescription, TensorSpec
from potluck.units import printable

PROTOCOL = 3

MAX_HEADER_BYTES = 64 * 1024
MAX_FRAME_BYTES = 16 * 1024 * 1024
MAX_FRAMES = 64
"""Raw frames in one message; the header is not one of them."""

PART_BYTES = 256 * 1024
"""The largest part that a host accepts. libzmq allocates the same for strangers as for guests, so strangers can
make a host allocate this times the number of unauthenticated connections."""
MAX_PARTS = 256
"""The most parts of one message to a host."""

MAX_DEPTH = 64
"""The deepest nesting of a header. No honest message is deeper, and parsing a deeper one is a risk."""

MAGIC = b"PLK"
_CUT = b"CUT"
_PREFIX = MAGIC + bytes([PROTOCOL])
_KIND = re.compile(r"[a-z][a-z0-9_.-]{0,31}", re.ASCII)
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_WRONG = re.compile(r"(.{1,200}) - at `\$(?:\[1\])?\.(\w+).{0,60}`", re.DOTALL)
_ENCODER = msgspec.json.Encoder()
_MODEL = checked.decoder(ModelDescription)
_PAIR = checked.decoder(tuple[Long, msgspec.Raw])

M = TypeVar("M", bound=Message)


class VersionError(WireError):
    """A message of another protocol version; `theirs` is that version."""

    def __init__(self, theirs: int) -> None:
        super().__init__(
            f"the other machine uses protocol {theirs}, this one uses {PROTOCOL}",
            hint="install the same version of potluck on both machines",
        )
        self.theirs = theirs


class UnknownKindError(WireError):
    """A message of a kind that this version does not know, or that must not be sent to this side."""

    def __init__(self, kind: str) -> None:
        super().__init__(f"an unknown message {kind!r}")
        self.kind = kind


class MalformedError(WireError):
    """A message of a known kind whose fields or frames are wrong; `why` says which."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(f"a malformed {kind!r} message: {why}")
        self.kind = kind
        self.why = why


class Received(NamedTuple, Generic[M]):
    """A message as it arrived, and its raw frames."""

    message: M
    frames: tuple[bytes | memoryview, ...]


def pack(message: Message, frames: Sequence[bytes | memoryview] = ()) -> list[bytes | memoryview]:
    """The frames of a message. The raw frames are passed on, not copied."""
    try:
        header = _PREFIX + _ENCODER.encode((message.kind, message))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"a {message.kind!r} that cannot be written as JSON: {error}") from None
    if b"null" in header:
        _check_null(message, header)
    if len(header) > MAX_HEADER_BYTES:
        raise WireError(
            f"the header of {message.kind!r} has {len(header)} bytes, at most {MAX_HEADER_BYTES} can be sent"
        )
    if frames:
        _check(frames)
    return [header, *frames]


class Reader(Generic[M]):
    """Decodes and checks messages of some kinds. The results of `read` need no further check."""

    def __init__(self, kinds: Iterable[type[M]]) -> None:
        self._decoders = {kind.kind: checked.decoder(kind) for kind in kinds}

    def read(self, frames: Sequence[bytes | memoryview]) -> Received[M]:
        """The message in these frames. Raises WireError whatever they hold: VersionError for another protocol,
        UnknownKindError and MalformedError for a message that is not right, otherwise for bytes that are no
        message."""
        if not frames:
            raise WireError("a message without frames")
        text, raw = _text_in(frames[0]), tuple(frames[1:])
        if raw:
            _check(raw)
        try:
            kind, fields = _PAIR.decode(text)
        except (ValueError, RecursionError) as error:
            # The text of the error can quote the stranger's bytes: keep its kind only.
            raise WireError(f"the header is not a pair of kind and fields ({type(error).__name__})") from None
        if text.count(b"[") + text.count(b"{") > MAX_DEPTH:
            load_json(text)  # raises if it is too deep
        decoder = self._decoders.get(kind)
        if decoder is None:
            raise UnknownKindError(kind) if _KIND.fullmatch(kind) else WireError("its kind is not a short word")
        try:
            message = decoder.decode(fields)
        except (ValueError, RecursionError) as error:
            raise MalformedError(kind, _why(error)) from None
        if why_not := message.unfit(raw):
            raise MalformedError(kind, why_not)
        return Received(message, raw)


FROM_GUEST: Reader[FromGuest] = Reader(get_args(FromGuest))
"""The messages that a host reads."""
FROM_HOST: Reader[FromHost] = Reader(get_args(FromHost))
"""The messages that a guest reads."""


def _check_null(message: Message, header: bytes) -> None:
    """Refuse to send a number that is not finite: msgspec writes null for it."""
    try:
        checked.decoder(tuple[str, type(message)]).decode(header[len(_PREFIX) :])  # type: ignore[misc]
    except msgspec.ValidationError as error:
        raise WireError(f"a {message.kind!r} that cannot be sent: {_why(error)}") from None


def packed_model(fingerprint: tuple[TensorSpec, ...], hashes: dict[str, str]) -> bytes:
    """The frame of a `ready`."""
    return msgspec.json.encode(ModelDescription(fingerprint=fingerprint, hashes=hashes))


def read_model(raw: bytes | memoryview) -> ModelDescription:
    """What `packed_model` packed."""
    try:
        return _MODEL.decode(raw)
    except (ValueError, RecursionError) as error:
        raise MalformedError("ready", f"of its model, {_why(error)}") from None


def _text_in(frame: bytes | memoryview) -> bytes:
    """The JSON in a header."""
    head = _view(frame)
    start = bytes(head[: len(_PREFIX)])
    if start != _PREFIX:
        if len(start) < len(_PREFIX):
            raise WireError(f"a header of {len(start)} bytes is too short")
        if not start.startswith(MAGIC):
            raise WireError("the header does not begin as a potluck message does")
        raise VersionError(start[len(MAGIC)])
    if head.nbytes > MAX_HEADER_BYTES:
        raise WireError(f"a header of {head.nbytes} bytes, at most {MAX_HEADER_BYTES} are read")
    return bytes(head[len(_PREFIX) :])


def _why(error: Exception) -> str:
    """A description of what is wrong with a message's fields."""
    if not isinstance(error, msgspec.ValidationError):
        return f"not readable JSON ({type(error).__name__})"
    text = str(error)
    if found := _MISSING.fullmatch(text):
        return f"it has no {found[1]!r}"
    if found := _WRONG.fullmatch(text):
        return f"its {found[2]!r} is wrong: {found[1][:1].lower()}{found[1][1:]}"
    return printable(text, 200)


def cut(frames: Sequence[bytes | memoryview]) -> list[bytes | memoryview]:
    """The parts in which these frames are sent to a host, without a copy."""
    _check_sizes(frames, first=0)
    views = list(map(_view, frames))
    if all(len(view) <= PART_BYTES for view in views):
        return list(frames)
    parts: list[bytes | memoryview] = [_CUT + struct.pack(f"<{len(views)}I", *map(len, views))]
    for view in views:
        parts += [view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)]
    if len(parts) > MAX_PARTS:
        raise WireError(f"a message of {sum(map(len, views))} bytes, at most {MAX_PARTS * PART_BYTES} go to a host")
    return parts


def joined(parts: list[memoryview]) -> list[memoryview]:
    """The frames made of these parts. Invalid parts are returned unchanged; they are not a message."""
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
    would fail only when they are printed or stored.
    """
    try:
        value = msgspec.json.decode(raw)
    except (ValueError, RecursionError) as error:
        # The text of the error can quote the stranger's bytes: keep its kind only.
        raise WireError(f"the header is not readable JSON ({type(error).__name__})") from None
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH and _too_deep(value):
        raise WireError(f"the header is nested deeper than {MAX_DEPTH}")
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


def _check(frames: Sequence[bytes | memoryview]) -> None:
    if len(frames) > MAX_FRAMES:
        raise WireError(f"a message with {len(frames)} frames, at most {MAX_FRAMES} are taken")
    _check_sizes(frames, first=1)


def _check_sizes(frames: Sequence[bytes | memoryview], *, first: int) -> None:
    for number, frame in enumerate(frames, first):
        size = _view(frame).nbytes
        if size > MAX_FRAME_BYTES:
            raise WireError(f"frame {number} has {size} bytes, at most {MAX_FRAME_BYTES} are taken")


def _view(frame: bytes | memoryview) -> memoryview:
    try:
        view = memoryview(frame)
        if view.ndim == 1 and view.format == "B" and view.contiguous:
            return view
        return view.cast("B") if view.nbytes else memoryview(b"")
    except (TypeError, ValueError):
        raise WireError(f"a frame is a {type(frame).__name__}, not contiguous bytes") from None

"""Messages as anybody could write them: any kind, any fields, any frames. Unlike the product's, unchecked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from potluck.spec.messages import Message
from potluck.wire.frames import MAGIC, PROTOCOL, load_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """A message without a type."""

    kind: str
    fields: dict[str, Any]
    frames: tuple[bytes | memoryview, ...] = ()


def plain(message: Message, *frames: bytes | memoryview) -> Plain:
    """A message of the product, to be changed at will. All fields are there, also those at their defaults."""
    fields = {name: msgspec.to_builtins(getattr(message, name)) for name in message.__struct_fields__}
    return Plain(kind=message.kind, fields=fields, frames=frames)


def header(kind: Any, fields: Any) -> bytes:
    """Also of what JSON does not have: NaN, infinities, half a surrogate pair."""
    return MAGIC + bytes([PROTOCOL]) + json.dumps([kind, fields], separators=(",", ":")).encode()


def packed(message: Plain) -> list[bytes | memoryview]:
    """Its frames, of any length."""
    return [header(message.kind, message.fields), *message.frames]


def unpacked(frames: Sequence[bytes | memoryview]) -> Plain:
    kind, fields = load_json(bytes(frames[0])[len(MAGIC) + 1 :])
    return Plain(kind=kind, fields=fields, frames=tuple(frames[1:]))

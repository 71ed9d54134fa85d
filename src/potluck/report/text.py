"""Text that a stream can show: control characters out, ASCII where UTF-8 cannot be written.

It does not know what the text says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TextIO

from potluck.units import printable

_ASCII = str.maketrans({"×": "x", "–": "-", "µ": "u", "·": "-", "…": "...", "≈": "~", "→": "->", "—": "-"})
_MAX_TEXT = 300


def clean(value: object, limit: int = _MAX_TEXT) -> str:
    """One printable line. Names and reasons come from other machines, and must not steer this terminal."""
    return "" if value is None else printable(value, limit)


def writes_utf8(stream: object) -> bool:
    """Whether block and braille characters reach this stream's reader."""
    encoding = getattr(stream, "encoding", None) or ""
    return encoding.lower().replace("-", "").replace("_", "") in {"utf8", "utf8sig"}


def fitted(text: str, stream: object) -> str:
    """The text as this stream can encode it."""
    if writes_utf8(stream):
        return text
    text = text.translate(_ASCII)
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "replace").decode(encoding, "replace")


def number(event: Mapping[str, Any], key: str) -> float | None:
    """The event's number, or None where it is missing or no number: an old log must not stop a report."""
    value = event.get(key)
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def integer(event: Mapping[str, Any], key: str) -> int:
    value = number(event, key)
    return int(value) if value is not None and value == value and abs(value) < 2**63 else 0


class Output:
    """Lines to a stream, at once; silent once the reader is gone: a closed pipe must not end a run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._open = True

    def line(self, text: str) -> None:
        if not self._open:
            return
        try:
            self._stream.write(fitted(text, self._stream) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._open = False

"""Text that a stream can show: without control characters, and in ASCII if UTF-8 cannot be written."""

from __future__ import annotations

import shutil
from typing import TextIO

from potluck.units import printable

_ASCII = str.maketrans({"×": "x", "–": "-", "µ": "u", "·": "-", "…": "...", "≈": "~", "→": "->", "—": "-"})
_MAX_TEXT = 300


def clean(value: object, limit: int = _MAX_TEXT) -> str:
    """One printable line. Names and reasons come from other machines, and must not control this terminal."""
    return "" if value is None else printable(value, limit)


def writes_utf8(stream: object) -> bool:
    """Whether this stream can show block and braille characters."""
    encoding = getattr(stream, "encoding", None) or ""
    return encoding.lower().replace("-", "").replace("_", "") in {"utf8", "utf8sig"}


def columns_of(stream: TextIO) -> int | None:
    """Columns of the terminal, at least 40; None if the stream is none."""
    return max(shutil.get_terminal_size((80, 24)).columns, 40) if stream.isatty() else None


def fitted(text: str, stream: object) -> str:
    """The text as this stream can encode it."""
    if writes_utf8(stream):
        return text
    text = text.translate(_ASCII)
    encoding = getattr(stream, "encoding", None) or "ascii"
    return text.encode(encoding, "replace").decode(encoding, "replace")


class Output:
    """Writes lines and flushes each. Silent once the reader is gone: a closed pipe must not end a run."""

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

"""Reads a log file as text, bounded whatever its size and encoding, and refuses a file that is not a log."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import IO

from potluck.doctor.log_text import Part, decoded, is_text
from potluck.errors import UserError

HEAD_BYTES, TAIL_BYTES = 2 << 20, 6 << 20
"""Most bytes of a log; of a longer one only the beginning and the end are read."""
MOST_BYTES = 1 << 30
_PIECE = 1 << 20
_HINT = "give the log of a failed run, for example: torchrun train.py 2>&1 | tee run.log"


def read_parts(path: Path) -> tuple[list[Part], int]:
    """The log in one part or two, and how many bytes between them were left out; - is standard input."""
    if str(path) == "-":
        return _parts(sys.stdin.buffer, "standard input")
    try:
        if stat.S_ISDIR(os.stat(path).st_mode):
            raise UserError(f"{path} is a folder, not a log", hint=f"name a file in it: ls {path}")
        with open(path, "rb") as file:
            return _parts(file, str(path))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}", hint=_HINT) from None


def _parts(file: IO[bytes], name: str) -> tuple[list[Part], int]:
    head, tail, left_out, lines = b"", bytearray(), 0, 0
    total = 0
    while total < MOST_BYTES and (piece := file.read(_PIECE)):
        total += len(piece)
        room = HEAD_BYTES - len(head)
        head += piece[:room]
        tail += piece[room:] if room > 0 else piece
        if (over := len(tail) - TAIL_BYTES) > 0:
            left_out += over
            lines += tail.count(b"\n", 0, over)
            del tail[:over]
    wide = head[:2] in (b"\xff\xfe", b"\xfe\xff")
    if not left_out:
        text = decoded(head + bytes(tail))
        _check(text, name)
        return [Part(1, text)], 0
    mark = head[:2] if wide else b""
    _check(first := decoded(head), name)
    begin = 1 + head.count(b"\n") + lines
    return [Part(1, first), Part(begin, decoded(mark + bytes(tail)))], left_out


def _check(text: str, name: str) -> None:
    if not text.strip():
        raise UserError(f"{name} is empty", hint=_HINT + " (errors go to stderr: 2>&1 captures them)")
    if not is_text(text):
        raise UserError(f"{name} is not a text file", hint=_HINT)

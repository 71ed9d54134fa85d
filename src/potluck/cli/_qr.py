"""Draws the line for guests as a QR code."""

from __future__ import annotations

import io

from potluck.report.text import writes_utf8
from potluck.wire.code import need_libraries


def check_qr() -> None:
    """Raises an error before the run begins if the library is missing."""
    need_libraries("--qr", "segno")


def qr_code(text: str, stream: object) -> str:
    """The text as a QR code: in half blocks, or in the terminal's colours if the stream has no UTF-8."""
    import segno

    drawn = io.StringIO()
    segno.make(text, micro=False, error="l").terminal(drawn, compact=writes_utf8(stream), border=2)
    return drawn.getvalue()

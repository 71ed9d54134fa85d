"""Runs a guest: waits for the token, joins, and joins again if the token is replaced.

Needs no command line. It gets the token as text, as a file or on standard input, and functions that show its
progress.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from potluck.errors import RefusedError, TokenError
from potluck.units import seconds_text
from potluck.wire.token import Token, decode

ANSWERS_S = 30.0
"""The minimum time for a host to answer."""
LOOK_S = 0.2
SETTLES_S = 10.0
"""By then a host that refuses a token has written its own to the file."""
_MOST_TOKEN_BYTES = 4096

Outcome = TypeVar("Outcome")


def token_on_stdin() -> str:
    """Read the first line and no byte after it."""
    line = b""
    while len(line) < _MOST_TOKEN_BYTES and not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    if not line.strip():
        raise TokenError("standard input has no token", hint="its first line must be the token")
    return line.decode(errors="replace")


def import_until_stdin() -> None:
    """Import what a guest needs if standard input has no token yet: torch takes seconds. POSIX only."""
    if not select.select([0], [], [], 0)[0]:
        import torch._dynamo  # noqa: F401  every optimizer imports torch's compiler

        import potluck.fleet.received  # noqa: F401


def token_in(path: Path, wait_s: float, tell: Callable[[str], None]) -> str:
    """The token in a file, which the host may write later. The host renames it into place, so it appears
    complete."""
    deadline = time.monotonic() + wait_s
    told = False
    while True:
        try:
            if text := path.read_text(encoding="utf-8").strip():
                return text
            found: Exception | str = "it is empty"
        except FileNotFoundError as error:
            found = error
        except (OSError, UnicodeDecodeError) as error:
            found, deadline = error, 0.0
        if time.monotonic() >= deadline:
            raise TokenError(
                f"cannot read a token from {path}: {found}",
                hint="the host writes it with --token-file, and into its run folder as `token`"
                + ("" if wait_s else "; to wait for the file, add --wait 10m"),
            )
        if not told:
            tell(f"waiting for {path} ({seconds_text(wait_s)} at most)")
            told = True
        time.sleep(min(LOOK_S, wait_s))


def join_as_replaced(
    text: str,
    take_part: Callable[[Token, float | None, Callable[[], None]], Outcome],
    *,
    file: Path | None,
    wait_s: float | None,
    began: float,
    tell: Callable[[str], None],
) -> Outcome:
    """Join with this token, or with another one that replaces it in `file` before the host has answered.

    A run that was killed leaves its file behind, and the next one replaces it. `take_part` gets the token, the time
    for the host to answer (None: the default), and a function to call before another attempt. `wait_s`, from
    `began` (monotonic) on, is for the file and the host together.
    """
    while True:
        left_s = wait_s
        if wait_s is not None:
            left_s = max(wait_s - (time.monotonic() - began), min(wait_s, ANSWERS_S))
        try:
            return take_part(decode(text), left_s, lambda seen=text: _look_again(file, seen))  # type: ignore[misc]
        except RefusedError as error:
            new = _replaced_within(file, text, SETTLES_S)
            if not new:
                raise
            tell(error.what)
            text = new
        except _NewToken as new_token:
            text = new_token.text
        tell(f"{file} has a new token: joining that run")


class _NewToken(Exception):
    """The token file was replaced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


def _look_again(path: Path | None, text: str) -> None:
    """Raises _NewToken if the file holds another token than this."""
    if new := _replaced_within(path, text, 0.0):
        raise _NewToken(new)


def _replaced_within(path: Path | None, text: str, seconds: float) -> str:
    """The token that replaced this one in the file; empty if none did within this many seconds."""
    deadline = time.monotonic() + seconds
    while path is not None:
        with suppress(OSError, UnicodeDecodeError):
            if (found := path.read_text(encoding="utf-8").strip()) and found != text:
                return found
        if time.monotonic() >= deadline:
            break
        time.sleep(LOOK_S)
    return ""

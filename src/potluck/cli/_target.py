"""Parses how a user names another machine: a token, a file that holds one, or an address."""

from __future__ import annotations

import ipaddress
import re
import sys
from pathlib import Path

from potluck.errors import ConfigError, UserError

_TOKEN = re.compile(r"potluck\d{1,3}-")
_MOST_BYTES = 64 * 1024


def token_text(target: str | None, file: Path | None) -> str | None:
    """The text that holds a token, if any was given."""
    if file is None:
        return target if target and _TOKEN.search(target) else None
    if target:
        raise ConfigError("--token-file cannot be combined with an argument", hint="give one of them")
    if str(file) == "-":
        return sys.stdin.readline(_MOST_BYTES)
    try:
        with open(file, encoding="utf-8") as opened:
            return opened.read(_MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"cannot read a token from {file}: {error}", hint="the host's run folder has it in the file `token`"
        ) from None


def address_of(target: str, verb: str) -> tuple[str, int | None]:
    """An address or a name, and the port, if one was given."""
    host, colon, port = target.rpartition(":")
    if not colon:
        host, port = target, ""
    named = re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}", host) is not None and not _misspelt(host)
    if not named or (colon and not port.isdigit()):
        raise ConfigError(
            f"{target[:60]!r} is neither an address nor a token",
            hint=f"for example 192.168.1.20, tower.local:7171, or the line that `potluck {verb} --listen` printed",
        )
    if colon and not 0 < int(port) < 65536:
        raise ConfigError(f"{port} is not a port", hint="ports are 1 to 65535")
    return host, int(port) if colon else None


def _misspelt(host: str) -> bool:
    """Whether it looks like an IPv4 address but is not one. Looking it up as a name would fail."""
    if re.fullmatch(r"\d{1,20}(?:\.\d{1,20}){3}", host) is None:
        return False
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return True
    return False

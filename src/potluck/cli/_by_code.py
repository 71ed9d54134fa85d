"""Asks the user of `potluck join` without a token for a code of a run in this network, or for the token."""

from __future__ import annotations

import click

from potluck.errors import MissingModuleError, TokenError
from potluck.wire.by_code import BLOCKED, exchange
from potluck.wire.code import need_libraries, parse_code
from potluck.wire.discovery import LOOK_S, look
from potluck.wire.frames import PROTOCOL

ASKED = 3
"""How often a person may give another code."""


def asked() -> str:
    """A token from a person: typed, or exchanged for a code."""
    try:
        need_libraries("joining by a code")
    except MissingModuleError as error:
        click.echo(f"to find runs in this network and join by a code: {error.hint}", err=True)
        return _token()
    click.echo(f"looking for runs in this network ({LOOK_S:.0f} s at most)", err=True)
    runs = look()
    if not runs:
        click.echo(f"no run was seen within {LOOK_S:.0f} s: {BLOCKED}", err=True)
        return _token()
    for run in runs:
        other = "" if run.protocol == PROTOCOL else " (another version of Potluck)"
        click.echo(f"  run {run.number} at {run.addresses[0]}{other}", err=True)
    for left in reversed(range(ASKED)):
        answer = click.prompt("code (or Enter, to give the token)", default="", show_default=False, err=True)
        try:
            code = parse_code(answer)
            if code is None:
                return answer.strip() or _token()
            return exchange(runs, code)
        except TokenError as error:
            if not left:
                raise
            click.echo(f"{error}: {error.hint}", err=True)
    raise AssertionError


def _token() -> str:
    answer: str = click.prompt("token", hide_input=True, err=True)
    return answer

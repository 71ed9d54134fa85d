"""How `potluck join` finds a run without a token: it looks in the local network and asks for the code."""

from __future__ import annotations

import click

from potluck.errors import MissingModuleError, NetworkError, TokenError
from potluck.wire.code import WrongCode, need_libraries, parse_code, redeem, run_of
from potluck.wire.discovery import LOOK_S, AnnouncedRun, look
from potluck.wire.frames import PROTOCOL

ASKED = 3
"""How often a person may give another code."""
_BLOCKED = (
    "many networks block multicast (UDP port 5353): guest Wi-Fi, VPNs, other subnets, firewalls. "
    "The token always works: potluck join TOKEN"
)


def token_by_code(code: str) -> str:
    """The token of the run in this network that this code is for."""
    need_libraries("joining by a code")
    number = run_of(code)
    click.echo(f"looking for run {number} in this network ({LOOK_S:.0f} s at most)", err=True)
    runs = look(number)
    if not runs:
        raise NetworkError(f"run {number} was not seen in this network within {LOOK_S:.0f} s", hint=_BLOCKED)
    return _exchange(runs, code)


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
        click.echo(f"no run was seen within {LOOK_S:.0f} s: {_BLOCKED}", err=True)
        return _token()
    for run in runs:
        other = "" if run.protocol == PROTOCOL else " (of another version of Potluck)"
        click.echo(f"  run {run.number} at {run.addresses[0]}{other}", err=True)
    for left in reversed(range(ASKED)):
        answer = click.prompt("code (or Enter, to give the token)", default="", show_default=False, err=True)
        try:
            code = parse_code(answer)
            if code is None:
                return answer.strip() or _token()
            return _exchange([run for run in runs if run.number == run_of(code)], code)
        except TokenError as error:
            if not left:
                raise
            click.echo(f"{error}: {error.hint}", err=True)
    raise AssertionError


def _token() -> str:
    answer: str = click.prompt("token", hide_input=True, err=True)
    return answer


def _exchange(runs: list[AnnouncedRun], code: str) -> str:
    if not runs:
        raise TokenError(f"no run {run_of(code)} was seen", hint="the code begins with the number of its run")
    if len(runs) > 1:
        where = ", ".join(run.addresses[0] for run in runs)
        raise TokenError(f"several machines announce run {run_of(code)}: {where}", hint="join with the token")
    (run,) = runs
    if run.protocol != PROTOCOL:
        raise TokenError(
            f"run {run.number} is of protocol {run.protocol}, this machine speaks {PROTOCOL}",
            hint="install the same version of potluck on both machines",
        )
    for address in run.addresses:
        try:
            return redeem(address, run.port, code)
        except WrongCode:
            raise TokenError(
                f"{address} does not know this code",
                hint="look at the host's terminal: the code may be a new one. If it is the same, another machine "
                "poses as the host: join with the token",
            ) from None
        except NetworkError:
            if address == run.addresses[-1]:
                raise
    raise AssertionError

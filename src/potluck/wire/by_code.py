"""Gets the token of a run in this network for the code that its host shows: finds the run and exchanges the
code."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from potluck.errors import NetworkError, TokenError
from potluck.wire.code import WrongCode, need_libraries, redeem, run_of
from potluck.wire.discovery import LOOK_S, AnnouncedRun, look
from potluck.wire.frames import PROTOCOL

BLOCKED = (
    "many networks block multicast (UDP port 5353): guest Wi-Fi, VPNs, other subnets, firewalls. "
    "The token always works: potluck join TOKEN"
)


def token_by_code(code: str, tell: Callable[[str], None]) -> str:
    """The token of the run in this network that this code is for."""
    need_libraries("joining by a code")
    number = run_of(code)
    tell(f"looking for run {number} in this network ({LOOK_S:.0f} s at most)")
    runs = look(number)
    if not runs:
        raise NetworkError(f"run {number} was not seen in this network within {LOOK_S:.0f} s", hint=BLOCKED)
    return exchange(runs, code)


def exchange(runs: Sequence[AnnouncedRun], code: str) -> str:
    """The token of the one among these runs that the code is for."""
    runs = [run for run in runs if run.number == run_of(code)]
    if not runs:
        raise TokenError(f"no run {run_of(code)} was seen", hint="the code begins with the number of its run")
    if len(runs) > 1:
        where = ", ".join(run.addresses[0] for run in runs)
        raise TokenError(f"several machines announce run {run_of(code)}: {where}", hint="join with the token")
    (run,) = runs
    if run.protocol != PROTOCOL:
        raise TokenError(
            f"run {run.number} uses protocol {run.protocol}, this machine uses {PROTOCOL}",
            hint="install the same version of potluck on both machines",
        )
    for address in run.addresses:
        try:
            return redeem(address, run.port, code)
        except WrongCode:
            raise TokenError(
                f"{address} does not know this code",
                hint="look at the host's terminal: the code may be a new one. If it is the same, another machine "
                "impersonates the host: join with the token",
            ) from None
        except NetworkError:
            if address == run.addresses[-1]:
                raise
    raise AssertionError

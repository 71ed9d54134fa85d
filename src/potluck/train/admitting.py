"""The port of a run: its keys, its token, guests that wait for the training, and strangers that are refused."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from potluck.errors import LoopError
from potluck.hub.waiting import WaitingRoom
from potluck.spec.events import RunNote, StrangerRefused
from potluck.train.context import Admission
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder
from potluck.train.run_specs import RunSpec
from potluck.wire.keys import load_keys, new_keys, save_keys
from potluck.wire.token import LOOPBACK, Token, cables_first, checked_bind, encode, local_addresses
from potluck.wire.transport import HostSocket


def admit_guests(stack: ExitStack, spec: RunSpec, folder: RunFolder, log: EventLog) -> Admission:
    """Bind the port and make the token. A resumed run has the same keys and port, so the same token."""
    config, only_here = spec.config, spec.guests > 0
    port = config.port or spec.port
    if folder.keys.exists():
        keys = load_keys(folder.keys)
        port = port or folder.read_manifest().port or 0
    else:
        keys = spec.keys or new_keys()
        save_keys(folder.keys, keys)
    bind = LOOPBACK if only_here else checked_bind(config.bind) or next(iter(local_addresses()), LOOPBACK)
    listening = HostSocket(bind=bind, port=port, keys=keys, on_denied=_denied(log))
    stack.callback(listening.close)
    if listening.warning is not None and not only_here:
        log.emit(RunNote(text=listening.warning))
    every = bind in ("0.0.0.0", "::")
    addresses = cables_first(local_addresses(ipv6=bind == "::")) if every else (bind,)
    token = encode(
        Token(
            addresses=addresses or (LOOPBACK,),
            port=listening.port,
            host_public=keys.public,
            guest_secret=keys.guest_secret,
        )
    )
    folder.write_token(token)
    waiting = WaitingRoom(listening, what=spec.what, emit=log.emit)
    return Admission(
        socket=listening, waiting=waiting, keys=keys, token=token, source=spec.source, files=spec.files
    )


def _denied(log: EventLog) -> Callable[[str], None]:
    """Log strangers up to a limit: after the first few only every hundredth."""
    count = 0

    def on_denied(address: str) -> None:
        nonlocal count
        count += 1
        if count <= 5 or count % 100 == 0:
            reason = "no valid token" + (f" ({count} so far)" if count > 5 else "")
            log.emit(StrangerRefused(address=address, reason=reason))

    return on_denied


def send_away(waiting: WaitingRoom, what: str, error: BaseException | None, *, began: bool) -> None:
    """Tell waiting guests that the training will not begin, and why. `began`: the script had reached its loop."""
    if isinstance(error, KeyboardInterrupt):
        reason = "it was stopped there"
    elif error is None or isinstance(error, SystemExit) or (isinstance(error, LoopError) and not began):
        reason = f"{what} ended without reaching run.steps()"
    else:
        reason = f"{what} failed before its first step"
    waiting.close(reason)

"""How this process was started: alone, as host (or another of its ranks), or as guest.

Owns the one piece of process-wide state that a user's script does not see: set by whoever starts the process, read
by `start()`. It starts nothing.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.device import Device
from potluck.hub.link import GuestLink
from potluck.hub.waiting import WaitingRoom
from potluck.spec.config import RunConfig
from potluck.spec.messages import WelcomeMessage
from potluck.train.events import EventLog
from potluck.train.folder import RunFolder
from potluck.train.ranks import Ranks
from potluck.wire.frames import Received
from potluck.wire.keys import HostKeys
from potluck.wire.transport import HostSocket

ALONE, HOST, GUEST, RANK = "alone", "host", "guest", "rank"


@dataclass(slots=True, kw_only=True)
class Launch:
    """Everything a run needs that its script does not say."""

    role: str
    config: RunConfig
    device: Device
    name: str
    log: EventLog
    what: str = "script"
    """The recipe's or the script's name."""
    folder: RunFolder | None = None
    resume: bool = False
    source: dict[str, Any] = field(default_factory=dict)
    """For the welcome: the recipe and its config, or the names of the files that come as frames."""
    files: tuple[bytes, ...] = ()
    socket: HostSocket | None = None
    waiting: WaitingRoom | None = None
    """Answers on the socket until the training begins."""
    keys: HostKeys | None = None
    link: GuestLink | None = None
    welcome: Received[WelcomeMessage] | None = None
    ranks: Ranks | None = None
    """The host's processes under torchrun, of which this is one; None where it is the only one."""
    began: bool = False
    """Whether the script has reached its training loop."""
    failure: str = ""
    """On a guest: why its script failed, for the person at the host; set before the training is ended."""
    stop_requested: Callable[[], bool] = lambda: False
    """Whether the person asked for an end (Ctrl-C): looked at between micro-batches."""
    again: Callable[[Path], str] = lambda folder: f"--resume {shlex.quote(str(folder))}"
    """The command that goes on with the run in this folder."""
    end_training: Callable[[str], None] = lambda reason: None
    """Ends the training that is under way, with its reason; harmless when it has ended. For whoever opened this:
    a loop left by an exception is not closed before the exception itself is forgotten, which may be too late."""


_current: Launch | None = None


def set_launch(launch: Launch | None) -> None:
    global _current
    _current = launch


def current() -> Launch | None:
    return _current


class Interrupted(KeyboardInterrupt):
    """The person stopped the run; everything has been saved and told."""


class GuestDone(BaseException):
    """The run this guest took part in is over: the rest of the script is the host's affair."""

"""What a training loop needs that its script does not say, and what changes while it trains.

One `RunContext` belongs to one run in one process. Whoever opens the run makes it; the loops are given it.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck.device import Device
from potluck.hub.link import GuestLink
from potluck.hub.members import Member
from potluck.hub.waiting import WaitingRoom
from potluck.spec.config import RunConfig
from potluck.spec.messages import Source, WelcomeMessage
from potluck.train.ending import Ending, Interrupted
from potluck.train.events import EventLog
from potluck.train.folder import RunFolder
from potluck.train.host_ranks import Ranks
from potluck.wire.frames import Received
from potluck.wire.keys import HostKeys
from potluck.wire.transport import HostSocket

ALONE, HOST, GUEST, RANK = "alone", "host", "guest", "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How guests get in, and what they are given to run."""

    socket: HostSocket
    waiting: WaitingRoom
    """Answers on the socket until the training begins."""
    keys: HostKeys
    token: str = field(repr=False)
    source: Source | None = None
    """None only before a notebook's training has begun."""
    files: tuple[bytes, ...] = ()


@dataclass(slots=True, kw_only=True)
class RunContext:
    """One run, as its loop sees it."""

    role: str
    config: RunConfig
    device: Device
    name: str
    """This machine's name in the run."""
    log: EventLog
    what: str = "script"
    """The recipe's or the script's name."""
    folder: RunFolder | None = None
    resume: bool = False
    ranks: Ranks | None = None
    """The host's processes under torchrun, of which this is one; None where it is the only one."""
    admission: Admission | None = None
    """On a host."""
    link: GuestLink | None = None
    """On a guest, with the `welcome` that came over it."""
    welcome: Received[WelcomeMessage] | None = None
    again: Callable[[Path], str] = lambda folder: f"--resume {shlex.quote(str(folder))}"
    """How to resume the run in this folder, in words."""

    page_url: str | None = None
    """Address of the page in the browser, if one is served."""
    members: Callable[[], Sequence[Member]] = tuple
    """On a host: its guests."""
    steps_done: Callable[[], int] = lambda: 0
    """How many steps of the training are finished."""
    began: bool = False
    """Whether the script has reached its training loop."""
    interruption: type[KeyboardInterrupt] = Interrupted
    """What a training that is asked to stop raises in the script."""
    failure: str = ""
    """On a guest: why its script failed, for the person at the host; set before the training is ended."""
    _stop: threading.Event = field(default_factory=threading.Event)
    _ending: Ending | None = None
    waiting_thread: int | None = None
    """The thread of a loop that waits for samples: see `Waiting`."""

    def request_stop(self) -> None:
        """The person asked for an end (Ctrl-C). The loop looks between micro-batches. From any thread."""
        self._stop.set()

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    @property
    def waits_here(self) -> bool:
        """Whether this thread's loop waits for samples."""
        return self.waiting_thread == threading.get_ident()

    def training_began(self, ending: Ending) -> None:
        """A loop tells how it is ended."""
        self._ending = ending

    @property
    def training(self) -> bool:
        """Whether a training has begun and has not ended."""
        return self.began and (self._ending is None or not self._ending.done)

    def finish_training(self) -> None:
        """End a training whose loop was left: with the reason it would have had a moment later."""
        if self._ending is not None:
            self._ending.finish()

    def after_training(self, call: Callable[[], None]) -> None:
        """Call this once the training has ended, whichever thread ends it."""
        if self._ending is None:
            call()
        else:
            self._ending.then(call)

    def end_training(self, reason: str) -> None:
        """End the training that is under way, with its reason; harmless when it has ended.

        For the code that opened the run: a loop left by an exception is not closed before the exception itself is
        forgotten, which may be too late.
        """
        if self._ending is not None:
            self._ending.now(reason)


class Waiting:
    """Inside, the loop waits for samples, and a stop need not wait for them: `stop` is called at once.

    A signal raises Interrupted here, where this is the main thread. Without `stop`, nothing changes. It is entered
    several times in each step: no generator, which would cost more than what it does.
    """

    def __init__(self, context: RunContext, stop: Callable[[], None] | None) -> None:
        self._context, self._stop = context, stop

    def __enter__(self) -> None:
        if self._stop is None:
            return
        try:
            self._context.waiting_thread = threading.get_ident()
            if self._context.stop_requested():
                raise Interrupted
        except Interrupted as error:  # also of a signal that comes here
            self.__exit__(Interrupted, error, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._stop is None:
            return
        self._context.waiting_thread = None
        if isinstance(error, Interrupted):
            self._stop()

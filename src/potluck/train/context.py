"""What is known of a run when it opens, and the state of its training loop.

One `RunContext` belongs to one run in one process. The code that opens the run makes it and passes it to the loops.
"""

from __future__ import annotations

import shlex
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from potluck import codec as codecs
from potluck.device import Device
from potluck.hub.link import GuestLink
from potluck.hub.members import Member
from potluck.hub.waiting import WaitingRoom
from potluck.spec.config import RunConfig
from potluck.spec.messages import Source, WelcomeMessage
from potluck.train.ending import Ending, Interrupted
from potluck.train.event_log import EventLog
from potluck.train.folder import RunFolder
from potluck.train.host_ranks import Ranks
from potluck.wire.frames import Received
from potluck.wire.keys import HostKeys
from potluck.wire.transport import HostSocket

ALONE, HOST, GUEST, RANK = "alone", "host", "guest", "rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """How guests join, and what they run."""

    socket: HostSocket
    waiting: WaitingRoom
    """Answers guests on the socket until the training begins."""
    keys: HostKeys
    token: str = field(repr=False)
    source: Source | None = None
    """None only before a notebook's training has begun."""
    files: tuple[bytes, ...] = ()


@dataclass(slots=True)
class LoopState:
    """What the training loop reports to the code that opened the run, and the stop that is requested of it."""

    began: bool = False
    """Whether the script has reached its training loop."""
    failure: str = ""
    """On a guest: why its script failed, for the person at the host."""
    steps_done: Callable[[], int] = lambda: 0
    """Number of finished steps."""
    members: Callable[[], Sequence[Member]] = tuple
    """On a host: its guests."""
    waiting_thread: int | None = None
    """The thread of a loop that waits for samples: see `Waiting`."""
    accepted: bool = False
    """Whether the training began: nothing was wrong with what `run.steps` was given, nor with the resumed run."""
    on_accepted: Callable[[], None] = lambda: None
    _stop: threading.Event = field(default_factory=threading.Event)
    _ending: Ending | None = None

    def request_stop(self) -> None:
        """Request a stop (Ctrl-C). The loop checks for it between micro-batches. Callable from any thread."""
        self._stop.set()

    def stop_requested(self) -> bool:
        return self._stop.is_set()

    @property
    def waits_here(self) -> bool:
        """Whether this thread's loop waits for samples."""
        return self.waiting_thread == threading.get_ident()

    def ends_by(self, ending: Ending) -> None:
        """A loop registers how it is ended, once it is ready to train."""
        self._ending, self.accepted = ending, True
        self.on_accepted()

    @property
    def training(self) -> bool:
        """Whether a training has begun and has not ended."""
        return self.began and (self._ending is None or not self._ending.done)

    @property
    def entered(self) -> bool:
        """Whether the training loop has been entered and not left."""
        return self._ending is not None and self._ending.pending

    def finish(self) -> None:
        """End a training whose loop was left, with the reason that it would get a moment later."""
        if self._ending is not None:
            self._ending.finish()

    def then(self, call: Callable[[], None]) -> None:
        """Call this once the training has ended, in whatever thread."""
        if self._ending is None:
            call()
        else:
            self._ending.then(call)

    def end(self, reason: str, *, failed: bool = False) -> None:
        """End the current training, with a reason. Does nothing if it has already ended.

        For the code that opened the run: a loop left by an exception is not closed before the exception itself is
        forgotten, which may be too late. `failed`: the reason is a guest's failure.
        """
        if failed:
            self.failure = reason
        if self._ending is not None:
            self._ending.now(reason)


def resume_option(folder: Path) -> str:
    return f"--resume {shlex.quote(str(folder))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """One run, from the view of its loop."""

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
    """The host's processes under torchrun, including this one; None if it is the only one."""
    admission: Admission | None = None
    """How guests join, on a host."""
    link: GuestLink | None = None
    """The link to the host, on a guest, with the host's `welcome`."""
    welcome: Received[WelcomeMessage] | None = None
    again: Callable[[Path], str] = resume_option
    """The command that resumes the run in this folder."""
    page_url: str | None = None
    """Address of the page in the browser, if one is served."""
    interruption: type[KeyboardInterrupt] = Interrupted
    """The exception that a stopped training raises in the script."""
    loop: LoopState = field(default_factory=LoopState)

    @property
    def down_codec(self) -> str:
        """The codec of the weights' changes: that of the gradients, unless another suits changes better."""
        return self.config.codec_down or codecs.down_of(codecs.names.first_of(self.config.codec))


class Waiting:
    """Inside, the loop waits for samples. A stop need not wait for them: `stop` is called immediately.

    A signal raises Interrupted here, where this is the main thread. Without `stop`, nothing changes. It is entered
    several times in each step, so it is not a generator, which would cost more than its work.
    """

    def __init__(self, loop: LoopState, stop: Callable[[], None] | None) -> None:
        self._loop, self._stop = loop, stop

    def __enter__(self) -> None:
        if self._stop is None:
            return
        try:
            self._loop.waiting_thread = threading.get_ident()
            if self._loop.stop_requested():
                raise Interrupted
        except Interrupted as error:  # also of a signal that comes here
            self.__exit__(Interrupted, error, None)
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if self._stop is None:
            return
        self._loop.waiting_thread = None
        if isinstance(error, Interrupted):
            self._stop()

"""A guest's connection to its host: the I/O thread, heartbeats and reconnecting.

Owns the socket and decides when to renew it. Messages go to a callback.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from potluck.errors import HostGoneError, NetworkError, PotluckError, RefusedError, WireError
from potluck.failpoints import hit
from potluck.hub.recorder import Recorder
from potluck.hub.standstill import Standstill
from potluck.spec.messages import (
    DATA,
    AliveMessage,
    ByeMessage,
    FromGuest,
    FromHost,
    HelloMessage,
    LeaveMessage,
    RefuseMessage,
    UnknownMessage,
    WaitMessage,
    WelcomeMessage,
)
from potluck.wire.frames import FROM_HOST, PROTOCOL, MalformedError, Received, VersionError, pack
from potluck.wire.reach import NobodyListensError
from potluck.wire.token import Token
from potluck.wire.transport import ClosedAtOnceError, GuestSocket

ATTEMPT_S = 6.0
"""For one attempt to connect: the host ends a handshake that takes longer than 5 s."""
FIRST_BACKOFF_S = 0.5
LONGEST_BACKOFF_S = 10.0
CLOSURES_BELIEVED = 3
"""After this many closed handshakes in a row it is another host. Fewer can happen when strangers fill the host's
queue."""
LAST_WORDS_S = 0.5
"""Time to wait for the host's last message on one connection after the other has ended."""

RawFrames = Sequence[bytes | memoryview]
Handler = Callable[[FromHost, RawFrames], None]
_SAME_VERSION = "install the same version of potluck on both machines; do not join a host that you do not know"
_SAME = "both need the same model (without --script the host's own is run) and the same potluck"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """How often a guest sends heartbeats, and how long it waits for the host's."""

    heartbeat_s: float = 1.0
    notice_s: float = 5.0
    """A host that is silent for this long is reported to the person at this machine."""
    silence_s: float = 10.0
    """A host that is silent for this long is considered gone: unfinished work is void."""


class GuestLink:
    """A connection to the host. It reconnects by itself until the host has been gone for `give_up_s`."""

    def __init__(
        self,
        token: Token,
        hello: HelloMessage,
        *,
        give_up_s: float = 600.0,
        recorder: Recorder | None = None,
        times: LinkTimes = LinkTimes(),  # noqa: B008
    ) -> None:
        self._token = token
        self._times = times
        self.recorder = recorder or Recorder("guest", None)
        self._hello = hello
        self._give_up_s = give_up_s
        self._socket: GuestSocket | None = None
        self._handler: Handler | None = None
        self._waiting: deque[Received[FromHost]] = deque()
        """Messages that arrived before a handler was set."""
        self._control: deque[list[Any]] = deque()
        self._data: deque[list[Any]] = deque()
        self._lock = threading.Lock()
        self._welcomed = threading.Event()
        self._welcome: Received[WelcomeMessage] | None = None
        self._stop = False
        self._last_heard = 0.0
        self._missing_since: float | None = None
        """When the host was last heard, once its silence was reported."""
        self._lost_at: float | None = None
        self._put_out = False
        self._closures = 0
        self._told = 0.0
        self._preparing = False
        """The host has said that its training has not begun."""
        self._patience_s = 0.0
        self._answer_by = 0.0
        self.failure: PotluckError | None = None
        self.waiting: Callable[[NetworkError], None] = lambda error: None
        """Called when the host did not answer and the guest tries again."""
        self.preparing: Callable[[str], None] = lambda reason: None
        """Called when the host says that its training has not begun yet, with what it waits for."""
        self.lost: Callable[[], None] = lambda: None
        """Called when the host is lost, before the link tries again."""
        self.back: Callable[[], None] = lambda: None
        """Called when the host is found again and has sent a new welcome."""
        self.missing: Callable[[float], None] = lambda seconds: None
        """Called about once a second while the host is silent, with the seconds of silence."""
        self.found: Callable[[], None] = lambda: None
        """Called when it is heard again after that."""
        self.ended: Callable[[], None] = lambda: None
        """Called when the link has ended for good; `failure` says why."""
        self._thread = threading.Thread(target=self._run, name="potluck-link", daemon=True)

    # -- any thread -------------------------------------------------------------------------------------

    def connect(self, timeout_s: float = 15.0, closed_s: float | None = None) -> Received[WelcomeMessage]:
        """Connect, send hello, and return the host's welcome. Errors are for the person at this machine.

        A host that is still preparing its run does not answer yet, so the guest repeats its hello until the time is
        over. If the machine's port is closed, it tries for `closed_s` only.
        """
        began = time.monotonic()
        deadline = began + timeout_s
        closed_by = deadline if closed_s is None else min(deadline, began + closed_s)
        while True:
            try:
                self._open(max(0.5, min(ATTEMPT_S, deadline - time.monotonic())))
                break
            except NetworkError as error:
                until = closed_by if isinstance(error, NobodyListensError) else deadline
                if self._is_final(error) or time.monotonic() + FIRST_BACKOFF_S > until:
                    raise
                self.waiting(error)
                time.sleep(FIRST_BACKOFF_S)
        self._patience_s = timeout_s
        self._answer_by = time.monotonic() + timeout_s
        self._thread.start()
        while not self._welcomed.wait(0.2) and time.monotonic() < self._answer_by:
            pass
        if not self._welcomed.is_set() and self.failure is None:
            self.failure = HostGoneError(
                f"the host at {self.address} accepted the connection but did not answer within {timeout_s:.0f} s",
                hint="is the run still active there?",
            )
        if self.failure is not None:
            self.close()
            raise self.failure
        assert self._welcome is not None
        return self._welcome

    @property
    def address(self) -> str:
        return self._socket.address if self._socket is not None else "?"

    def handle(self, handler: Handler) -> None:
        """From now on messages go to `handler`, in the link's thread, beginning with those that have already
        arrived."""
        with self._lock:
            while self._waiting:
                handler(*self._waiting.popleft())
            self._handler = handler

    def send(self, message: FromGuest, *frames: bytes | memoryview) -> None:
        """Queue a message for the host, on the connection that its kind uses."""
        hit("guest.sending", message.kind)
        self.recorder.message("out", "host", message, sum(map(len, frames)))
        queue = self._data if message.channel == DATA else self._control
        queue.append(pack(message, frames))
        self._wake()

    def close(self, reason: str = "", *, failed: bool = False) -> None:
        """Say goodbye, if there is a reason to; `failed`: the reason is a fault, which the host should see."""
        if reason and self._socket is not None:
            self.send(LeaveMessage(reason=reason, failed=failed))
        self._stop = True
        self._wake()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        if self._socket is not None:
            self._socket.close(linger_s=0.5 if reason else 0.0)
            self._socket = None

    def _wake(self) -> None:
        socket = self._socket
        if socket is not None:
            socket.wake()

    # -- the link's thread ------------------------------------------------------------------------------

    def _open(self, timeout_s: float) -> None:
        socket = GuestSocket(self._token, connect_timeout_s=timeout_s)
        try:
            socket.handshake(timeout_s)
        except BaseException:
            socket.close(linger_s=0.0)
            raise
        self._closures = 0
        self._control.clear()
        self._data.clear()
        hit("guest.sending", "hello")
        self.recorder.message("out", "host", self._hello, 0)
        socket.send_control(pack(self._hello))
        # A host that has not yet noticed that this guest was gone will know it by this name.
        self._hello = replace(self._hello, before=socket.guest_id.hex())
        self._last_heard = time.monotonic()
        self._socket = socket

    def _is_final(self, error: NetworkError) -> bool:
        """Whether trying again is useless."""
        self._closures = self._closures + 1 if isinstance(error, ClosedAtOnceError) else 0
        return self._closures >= CLOSURES_BELIEVED if self._closures else isinstance(error, RefusedError)

    def _run(self) -> None:
        try:
            while not self._stop:
                try:
                    self._serve()
                except HostGoneError as error:
                    self._preparing = False
                    self._fault(error)
                    self.lost()
                    self._reconnect()
        except PotluckError as error:
            self.failure = error
        except Exception as error:
            self.failure = PotluckError(f"the link to the host failed: {error!r}")
        # A loss has been recorded when it came; a guest that never got in knows all from the refusal.
        if self.failure is not None and (self._put_out or not isinstance(self.failure, NetworkError)):
            self._fault(self.failure)
        self._welcomed.set()
        self.ended()

    def _fault(self, error: PotluckError) -> None:
        self.recorder.fault(error.what)
        self.recorder.write()

    def _tell_missing(self, now: float) -> None:
        if self._missing_since is None:
            self._missing_since = self._last_heard
        if now - self._told >= 1.0:
            self._told = now
            self.missing(now - self._missing_since)

    @property
    def reached(self) -> bool:
        """Whether the host was reachable at the last attempt."""
        return self._lost_at is None and self._missing_since is None and self.failure is None

    def _heard(self) -> None:
        self._lost_at = None
        if self._missing_since is not None:
            self._missing_since = None
            self.found()

    def _serve(self) -> None:
        """Move messages until the host is gone or the link is closed."""
        assert self._socket is not None
        beat = 0.0
        ended: float | None = None
        standstill = Standstill(time.monotonic())
        while not self._stop:
            now = time.monotonic()
            if now - beat >= self._times.heartbeat_s:
                beat = now
                self.recorder.message("out", "host", AliveMessage(), 0)
                self._control.append(pack(AliveMessage()))
            self._flush()
            # A full queue is looked at again soon; otherwise wake() ends the wait.
            received = self._socket.receive(0.005 if self._data else 0.2)
            for _, frames in received:
                self._last_heard = time.monotonic()
                self._dispatch(frames)
            judged = time.monotonic()
            # What this machine slept through is not the host's silence.
            self._last_heard = min(judged, self._last_heard + standstill.seconds(judged))
            silent_s = judged - self._last_heard
            if silent_s > self._times.silence_s:
                raise HostGoneError(f"the host at {self.address} sent nothing for {silent_s:.1f} s")
            if silent_s > self._times.notice_s:
                self._tell_missing(time.monotonic())
            if not self._socket.connected:
                ended = now if ended is None else ended
                if now - ended > LAST_WORDS_S:
                    raise HostGoneError(f"the host at {self.address} closed the connection")
        self._flush()

    def _flush(self) -> None:
        assert self._socket is not None
        while self._control and self._socket.send_control(self._control[0]):
            self._control.popleft()
        while self._data and self._socket.send_data(self._data[0]):
            self._data.popleft()

    def _dispatch(self, frames: RawFrames) -> None:
        try:
            received = FROM_HOST.read(frames)
        except VersionError as error:
            raise RefusedError(
                f"the host uses protocol {error.theirs}, this machine uses {PROTOCOL}",
                hint="install the same version of potluck on both machines",
            ) from error
        except MalformedError as error:
            raise WireError(
                f"the host sent a {error.kind!r} that cannot be read: {error.why}", hint=_SAME_VERSION
            ) from None
        except WireError:
            return  # also kinds that only a newer version knows: it can do without them
        message = received.message
        self._note_received(message, received.frames)
        if isinstance(message, WaitMessage) or self._preparing:
            self._answer_by = time.monotonic() + self._patience_s
        if isinstance(message, AliveMessage):
            return
        if isinstance(message, WaitMessage):
            if not self._preparing:
                self.preparing(message.reason)
            self._preparing = True
            return
        hit("guest.received", message.kind)
        match message:
            case UnknownMessage():
                raise HostGoneError("the host no longer knows this guest")
            case RefuseMessage():
                self._put_out = message.joined
                raise RefusedError(
                    f"the host refused this machine: {message.reason}",
                    # One that took part had the same model.
                    hint=message.hint or ("" if self._put_out else _SAME),
                )
            case WelcomeMessage():
                first = self._welcome is None
                self._welcome, self._preparing = Received(message, received.frames), False
                self._welcomed.set()
                if not first:
                    self.back()
                hit("guest.handled", message.kind)
                return
            case ByeMessage():
                self._stop = True  # nobody is there to come back to
                if self._welcome is None:
                    self.failure = HostGoneError(
                        f"the run ended before its training began: {message.reason}",
                        hint="nothing is wrong on this machine; the host's terminal shows why",
                    )
                    return
        with self._lock:
            handler = self._handler
            if handler is None:
                self._waiting.append(received)
                return
        handler(message, received.frames)
        hit("guest.handled", message.kind)

    def _note_received(self, message: FromHost, frames: RawFrames) -> None:
        self.recorder.message("in", "host", message, sum(map(len, frames)))
        if not isinstance(message, UnknownMessage | RefuseMessage):
            self._heard()

    def _reconnect(self) -> None:
        # Counted from the loss, not from this attempt: a host that lets guests in and says no word is gone too.
        tried = self._lost_at is not None
        self._lost_at = time.monotonic() if self._lost_at is None else self._lost_at
        deadline = self._lost_at + self._give_up_s
        backoff = FIRST_BACKOFF_S
        if self._socket is not None:
            self._socket.close(linger_s=0.0)
            self._socket = None
        while not self._stop:
            if tried and time.monotonic() > deadline:
                raise HostGoneError(
                    f"the host has been unreachable for {self._give_up_s:.0f} s",
                    hint="start it again with --resume and join again with the same token",
                )
            tried = True
            try:
                self._open(timeout_s=5.0)
                return
            except NetworkError as error:
                if self._is_final(error):
                    raise
                self.recorder.note("no_answer", "host", {}, {"reason": error.what})
            wake_at = min(time.monotonic() + backoff, max(deadline, time.monotonic() + 0.1))
            while not self._stop and time.monotonic() < wake_at:
                self._tell_missing(time.monotonic())
                time.sleep(0.1)
            backoff = min(LONGEST_BACKOFF_S, 2 * backoff)

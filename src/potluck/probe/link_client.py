"""The connecting probe: measures the link to the listening probe, path by path.

`spec/probe_messages.py` has the messages.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import get_args

import msgspec
from msgspec import structs

from potluck import checked
from potluck.doctor.facts.interfaces import route_to
from potluck.doctor.facts.system import System
from potluck.errors import NetworkError, PotluckError, WireError
from potluck.probe import bare, iperf
from potluck.probe.measuring import Say
from potluck.probe.stream import FULL_S, MOST_PIECE, SENDING_S, Meter, Shares, Window, round_trips
from potluck.probe.tcp_attempts import number_of, tried_all
from potluck.spec.facts import CONNECTED
from potluck.spec.messages import RefuseMessage, UnknownMessage
from potluck.spec.probe_messages import (
    MOST_NUMBER,
    FromListener,
    ProbeBare,
    ProbeBareResult,
    ProbeBusy,
    ProbeBye,
    ProbeEcho,
    ProbeEnd,
    ProbeFlow,
    ProbeHello,
    ProbeHelloBack,
    ProbeIperf,
    ProbeNo,
    ProbePiece,
    ProbePort,
    ProbeResult,
    ProbeTook,
    ToProbe,
)
from potluck.spec.probed import DeviceSpeed, ProbedPath, Rate, Way
from potluck.units import printable
from potluck.wire.admission import HANDSHAKE_S
from potluck.wire.frames import Reader, Received, pack
from potluck.wire.token import Token
from potluck.wire.transport import GuestSocket

ANSWER_S, CONNECT_S, LEAST_S = 5.0, 10.0, 0.05
DRAIN_S = 2.0
PING_S = 0.005
"""Time between two round trips on an idle link."""
LOADED_PING_S = 0.05
IDLE_TIMES = 4
"""Number of round trips, spread over the whole measurement so that the jitter covers all of it."""
MOST_PATHS = 4
MOST_SPEED_BYTES = 64 * 1024
MOST_TEXT = 200
FROM_LISTENER: Reader[FromListener] = Reader(get_args(FromListener))

Asked = ProbeHello | ProbeEcho | ProbeFlow | ProbeEnd | ProbeBare | ProbeIperf | ProbeBye
Directions = tuple[tuple[str, bool, bool], ...]
DIRECTIONS: Directions = (("to {}", True, False), ("from {}", False, True), ("both at once", True, True))


def measure(
    token: Token, name: str, seconds: float, progress: Say, *, iperf3: bool = True
) -> tuple[DeviceSpeed, tuple[ProbedPath, ...]]:
    """The other machine, and every path to it that a connection can take, the one that a run would use first."""
    progress("looking for the other machine")
    system = System()
    reaches = tried_all(system, name, [(address, token.port, True) for address in token.addresses])
    numbers = list(dict.fromkeys(reach.address for reach in reaches if reach.outcome == CONNECTED))
    if not numbers:
        tried = ", ".join(f"{reach.address} ({reach.outcome})" for reach in reaches)
        raise NetworkError(
            f"the other machine does not answer at port {token.port}: {tried}",
            hint="is `potluck probe --listen` still running there? `potluck doctor TOKEN` says which side blocks",
        )
    client = LinkClient(token, name, progress)
    try:
        there = client.hello(first=True)
        others = [number for number in numbers if number != client.number][: MOST_PATHS - 1]
        shares = Shares(seconds, 1 + len(others))
        paths = [client.path(system, shares, used=True, iperf3=iperf3)]
    finally:
        client.close()
    for number in others:
        paths.append(_other_path(replace(token, addresses=(number,)), name, progress, system, shares))
    return there, tuple(paths)


def _other_path(token: Token, name: str, progress: Say, system: System, shares: Shares) -> ProbedPath:
    """A path that a run would not use. A problem there is a note, not a failure."""
    try:
        client = LinkClient(token, name, progress)
    except PotluckError as error:
        return ProbedPath(address=token.addresses[0], notes=(error.what,))
    try:
        client.hello()
        return client.path(system, shares, used=False, iperf3=False)
    except PotluckError as error:
        return ProbedPath(address=token.addresses[0], notes=(error.what,))
    finally:
        client.close()


class LinkClient:
    """One connection to the other probe."""

    def __init__(self, token: Token, name: str, progress: Say, *, end: float = math.inf) -> None:
        """`end`: by the monotonic clock; anything unfinished then fails."""
        self._name, self._progress, self._end = name, progress, end
        self._there = "the other machine"
        self._socket = GuestSocket(token, connect_timeout_s=self._within(CONNECT_S))
        self.number = number_of(self._socket.address) or self._socket.address
        self._ids = 0
        self._awaited = 0
        self._heard: Received[FromListener] | None = None
        """The awaited answers. Nothing else is stored, so nobody can fill this machine's memory."""
        self._block = memoryview(os.urandom(MOST_PIECE))
        self._flow = self._acked = 0
        self._window: Window | None = None
        self._meter: Meter | None = None
        self._ping: tuple[int, float] | None = None
        self._loaded: list[float] = []
        self._iperf3 = False
        self._bare = True
        try:
            self._socket.handshake(self._within(HANDSHAKE_S))
        except BaseException:
            self._socket.close(linger_s=0.0)
            raise

    def close(self) -> None:
        with contextlib.suppress(PotluckError):
            self._say(ProbeBye())
        self._socket.close(linger_s=0.2)

    def hello(self, *, first: bool = False) -> DeviceSpeed:
        answer, frames = self._ask(ProbeHello(name=self._name[:60], first=first))
        self._iperf3 = isinstance(answer, ProbeHelloBack) and answer.iperf3
        speed = speed_in(frames)
        self._there = speed.name
        return speed

    def in_a_moment(self, system: System, seconds: float, *, used: bool) -> ProbedPath:
        """Only the rate of each direction, `seconds` each."""
        route = route_to(system, self.number)
        self._progress(f"{self.number}: how fast")
        out, _ = self._streamed(True, False, seconds)
        _, back = self._streamed(False, True, seconds)
        return ProbedPath(
            address=self.number,
            source=route.source if route is not None else "",
            interface=(route.interface or "") if route is not None else "",
            used=used,
            out=Way(ours=out),
            back=Way(ours=back),
        )

    def path(self, system: System, shares: Shares, *, used: bool, iperf3: bool) -> ProbedPath:
        """Everything about this path."""
        route = route_to(system, self.number)
        idle: list[float] = []
        ways: list[tuple[Way, Way]] = []
        notes: list[str] = []
        idle_s = shares.of("idle", used=used) / IDLE_TIMES
        for words, out, back in DIRECTIONS:
            where = f"{self.number}: {words.format(self._there)}"
            idle += self._pings(idle_s, f"{self.number}: round trips")
            self._progress(f"{where}, encrypted")
            ours = self._streamed(out, back, shares.of("ours", used=used))
            self._progress(f"{where}, bare TCP")
            plain = self._bared(out, back, shares.of("bare", used=used), notes)
            other: tuple[Rate | None, Rate | None] = (None, None)
            if iperf3 and self._iperf3 and iperf.installed() and not (out and back):
                self._progress(f"{where}, iperf3")
                other = self._iperfed(out, shares.of("bare", used=used), notes)
            way_out, way_back = (Way(ours=o, bare=b, iperf3=i) for o, b, i in zip(ours, plain, other))
            ways.append((way_out, way_back))
        idle += self._pings(idle_s, f"{self.number}: round trips")
        return ProbedPath(
            address=self.number,
            source=route.source if route is not None else "",
            interface=(route.interface or "") if route is not None else "",
            used=used,
            idle=round_trips(idle),
            loaded=round_trips(self._loaded),
            out=ways[0][0],
            back=ways[1][1],
            both_out=ways[2][0],
            both_back=ways[2][1],
            notes=tuple(dict.fromkeys(notes)),
        )

    # -- each measurement -------------------------------------------------------------------------------

    def _pings(self, seconds: float, words: str) -> list[float]:
        self._progress(words)
        found: list[float] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end or not found:
            began = time.perf_counter()
            self._ask(ProbeEcho())
            found.append(time.perf_counter() - began)
            time.sleep(PING_S)
        return found

    def _streamed(self, out: bool, back: bool, seconds: float) -> tuple[Rate | None, Rate | None]:
        """Measure Potluck's transport: the rates that arrived there and here."""
        self._flow += 1
        self._acked = 0
        self._meter = Meter(seconds) if back else None
        self._ask(ProbeFlow(flow=self._flow, take=out, send=back, seconds=seconds))
        began = time.monotonic()
        self._window = Window(began) if out else None
        end, next_ping = began + seconds, began + LOADED_PING_S
        while not self._flowed((now := time.monotonic()), end):
            wait_s = self._send_pieces(now, end)
            if self._ping is None and next_ping <= now < end:
                next_ping = now + LOADED_PING_S
                self._ping = (self._say(ProbeEcho()), time.perf_counter())
            self._pump(wait_s)
        self._ping = None
        answer, _ = self._ask(ProbeEnd(flow=self._flow))
        sent = answer.sent if isinstance(answer, ProbeResult) else 0
        deadline = time.monotonic() + self._within(DRAIN_S)
        # What is still on its way would be in the way of what is measured next.
        while back and self._meter is not None and self._meter.total < sent:
            if time.monotonic() > deadline:
                break
            self._pump(0.1)
        arrived_here = self._meter.rate() if self._meter is not None else None
        self._window = self._meter = None
        return _rate_in(answer) if out else None, arrived_here

    def _flowed(self, now: float, end: float) -> bool:
        if now < end:
            return False
        left = self._window is not None and self._window.acked < self._window.sent
        waits = self._meter is not None and not self._meter.over(now)
        return not (left or waits) or now > min(end + DRAIN_S, self._end)

    def _send_pieces(self, now: float, end: float) -> float:
        """Send as much as may be in flight. Returns how long to wait for answers."""
        if self._window is None or now >= end:
            return SENDING_S
        while size := self._window.piece(now):
            if not self._socket.send_data(pack(ProbePiece(flow=self._flow), (self._block[:size],))):
                return FULL_S
            self._window.sent += size
        return SENDING_S

    def _bared(self, out: bool, back: bool, seconds: float, notes: list[str]) -> tuple[Rate | None, Rate | None]:
        if not self._bare:
            return None, None
        self._bare = False  # what failed once is not waited for again
        offer, _ = self._ask(ProbeBare(take=out, send=back, seconds=seconds, address=self.number))
        secret = _secret_in(offer)
        if not isinstance(offer, ProbePort) or secret is None:
            why = offer.why if isinstance(offer, ProbeNo) else offer.kind
            notes.append(f"no bare TCP: {self._there} did not open a port ({printable(why, MOST_TEXT)})")
            return None, None
        port = offer.port
        try:
            here = bare.measure(self.number, port, secret, sends=out, takes=back, seconds=seconds)
        except OSError as error:
            words = "no answer" if isinstance(error, TimeoutError) else error.strerror or str(error)
            notes.append(f"no bare TCP: port {port} of {self._there} is closed to this machine ({words})")
            return None, None
        self._bare = True
        result, _ = self._answer(offer.id, seconds + bare.ACCEPT_S + ANSWER_S)
        return _rate_in(result) if out else None, here

    def _iperfed(self, out: bool, seconds: float, notes: list[str]) -> tuple[Rate | None, Rate | None]:
        asked = ProbeIperf(seconds=max(1, math.ceil(seconds)) + iperf.START_S, address=self.number)
        offer, _ = self._ask(asked)
        rate = None
        if isinstance(offer, ProbePort):
            rate = iperf.measure(self.number, offer.port, reverse=not out, seconds=seconds)
        if rate is None:
            notes.append("iperf3 is on both machines, but did not work between them")
        return (rate, None) if out else (None, rate)

    def _within(self, seconds: float) -> float:
        """`seconds`, or what is left until the end."""
        return max(LEAST_S, min(seconds, self._end - time.monotonic()))

    # -- messages ---------------------------------------------------------------------------------------

    def _say(self, asked: Asked) -> int:
        self._ids += 1
        self._send(structs.replace(asked, id=self._ids))
        return self._ids

    def _send(self, message: ToProbe) -> None:
        if not self._socket.send_control(pack(message)):
            raise self._gone()

    def _ask(self, asked: Asked) -> Received[FromListener]:
        return self._answer(self._say(asked), ANSWER_S)

    def _answer(self, number: int, timeout_s: float) -> Received[FromListener]:
        """The answer to a question; if two have the same number, the next one."""
        timeout_s = self._within(timeout_s)
        deadline = time.monotonic() + timeout_s
        self._awaited, self._heard = number, None
        while self._heard is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise NetworkError(
                    f"{self._there} did not answer within {timeout_s:.1f} s",
                    hint="is `potluck probe --listen` running there, and this token its own?",
                )
            self._pump(left)
        answer, self._awaited, self._heard = self._heard, 0, None
        if isinstance(answer.message, ProbeBusy):
            raise NetworkError(f"{self._there} is measuring with another machine", hint="try again in a moment")
        return answer

    def _pump(self, timeout_s: float) -> None:
        """Process the arrived messages. Waits up to `timeout_s`."""
        for _, frames in self._socket.receive(timeout_s):
            with contextlib.suppress(WireError):
                self._take(FROM_LISTENER.read(frames))
        if not self._socket.connected:
            raise self._gone()
        if self._meter is not None and self._meter.total > self._acked:
            self._acked = self._meter.total
            self._send(ProbeTook(flow=self._flow, bytes=self._acked))

    def _take(self, received: Received[FromListener]) -> None:
        message = received.message
        match message:
            case UnknownMessage():
                raise NetworkError(
                    "a running host answers there, which trains and measures nothing else",
                    hint="on that machine run `potluck probe --listen`, and use the token that it prints",
                )
            case RefuseMessage():
                return
            case ProbePiece():
                if self._meter is not None and message.flow == self._flow:
                    self._meter.add(sum(map(len, received.frames)), time.monotonic())
            case ProbeTook():
                if self._window is not None and message.flow == self._flow:
                    self._window.arrived(message.bytes)
            case _ if self._ping is not None and message.id == self._ping[0]:
                self._loaded.append(time.perf_counter() - self._ping[1])
                self._ping = None
            case _ if self._awaited and self._heard is None and message.id == self._awaited:
                self._heard = received

    def _gone(self) -> NetworkError:
        return NetworkError(
            f"the connection to {self._there} ended",
            hint="did somebody stop `potluck probe --listen`? `potluck doctor TOKEN` checks the connection to it",
        )


# -- what the other machine says, checked -----------------------------------------------------------------------


def _rate_in(message: FromListener) -> Rate | None:
    if not isinstance(message, ProbeResult | ProbeBareResult) or not message.bytes_per_s:
        return None
    return Rate(bytes_per_s=message.bytes_per_s, variation=message.variation or None)


def _number(value: object) -> float | None:
    wrong = isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < MOST_NUMBER
    return None if wrong else float(value)  # type: ignore[arg-type]


def _secret_in(message: FromListener) -> bytes | None:
    try:
        secret = bytes.fromhex(message.secret) if isinstance(message, ProbePort) else b""
    except ValueError:
        return None
    return secret if len(secret) == bare.SECRET_BYTES else None


def speed_in(frames: Sequence[bytes | memoryview]) -> DeviceSpeed:
    """The other machine's report about itself, without impossible values."""
    unknown = DeviceSpeed(name="the other machine")
    if len(frames) != 1 or len(frames[0]) > MOST_SPEED_BYTES:
        return unknown
    try:
        speed = checked.decode(frames[0], DeviceSpeed)
    except (msgspec.MsgspecError, RecursionError):
        return unknown
    changes: dict[str, object] = {}
    for name in DeviceSpeed.__struct_fields__:
        value = getattr(speed, name)
        if isinstance(value, str):
            changes[name] = value[:MOST_TEXT]
        elif isinstance(value, int | float) and _number(value) is None:
            changes[name] = None
        elif isinstance(value, Mapping):
            items = list(value.items())[:8]
            changes[name] = {k[:8]: rate for k, rate in items if _number(rate) is not None}
    speed = structs.replace(speed, **changes)
    return speed if speed.name else structs.replace(speed, name=unknown.name)

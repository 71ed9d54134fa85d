"""The listening probe: answers another probe that has its token, and measures with it, one client at a time.

The client decides what is measured next; all its sizes and times are bounded. `spec/probe_messages.py` has the
messages. A doctor or a guest with this token is told that it cannot be served here.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import get_args

import msgspec

from potluck.errors import WireError
from potluck.probe import bare, iperf
from potluck.probe.stream import FULL_S, MOST_PIECE, SENDING_S, Meter, Window
from potluck.spec.messages import HelloMessage, RefuseMessage, UnknownMessage
from potluck.spec.probe_messages import (
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
    ProbeReady,
    ProbeResult,
    ProbeTook,
    ToListener,
)
from potluck.spec.probed import DeviceSpeed, Rate
from potluck.units import printable
from potluck.wire.frames import Reader, pack
from potluck.wire.token import local_addresses
from potluck.wire.transport import HostSocket

GRACE_S = 5.0
"""A client that is silent for this long after its request makes room for the next."""
ANY = "0.0.0.0"
TO_LISTENER: Reader[ToListener] = Reader(get_args(ToListener))


@dataclass(slots=True, kw_only=True)
class _PathFlow:
    """One measurement with Potluck's transport, from this side's view."""

    guest: bytes
    number: int
    end: float
    window: Window | None
    meter: Meter | None
    acked: int = 0


def no_host(verb: str) -> RefuseMessage:
    """The answer to a guest whose token is for something else: a refusal like a host's."""
    return RefuseMessage(
        reason=f"this token is of `potluck {verb} --listen`, and no run is there",
        hint="take the line that `potluck host` prints on the machine that holds the run",
    )


class LinkServer:
    """Serves the probes that connect. All methods belong to one thread."""

    def __init__(
        self, socket: HostSocket, bind: str, speed: DeviceSpeed, *, iperf3: bool = True, bare_tcp: bool = True
    ) -> None:
        self._socket, self._bind, self._speed, self._bare_tcp = socket, bind, speed, bare_tcp
        self._iperf3 = iperf3 and iperf.installed()
        self._flow: _PathFlow | None = None
        self._guest, self._until = b"", 0.0
        self._offer: tuple[bytes, int, bare.Offer, Future[Rate | None]] | None = None
        self._iperf: iperf.Server | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bare")
        self._block = memoryview(os.urandom(MOST_PIECE))
        self.on_hello: Callable[[str, str], None] = lambda name, address: None
        """Called with a client's name and address when it says hello."""

    def serve(self, timeout_s: float) -> None:
        """Answer the arrived messages and send what is due. Waits up to `timeout_s`."""
        for peer, frames in self._socket.receive(self.send_due(timeout_s)):
            with contextlib.suppress(WireError):
                self.answer(peer, *TO_LISTENER.read(frames), self._socket.address_of(frames))
        self.settle()

    def settle(self) -> None:
        """Messages to send after the arrived ones were answered."""
        self._acknowledge()
        if self._offer is not None and self._offer[3].done():
            peer, number, _, future = self._offer
            self._offer = None
            rate = _result(future)
            bytes_per_s, variation = (None, None) if rate is None else (rate.bytes_per_s, rate.variation)
            self._send(peer, ProbeBareResult(id=number, bytes_per_s=bytes_per_s, variation=variation))
        if self._iperf is not None and self._iperf.over:
            self._iperf.close()
            self._iperf = None

    def close(self) -> None:
        if self._offer is not None:
            self._offer[2].close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._iperf is not None:
            self._iperf.close()
        self._socket.close()

    # -- what clients say ------------------------------------------------------------------------------

    def answer(self, peer: bytes, message: ToListener, frames: Sequence[bytes | memoryview], address: str) -> None:
        guest, flow = peer[:-1], self._flow
        match message:
            case ProbePiece():
                if flow is not None and flow.meter is not None and _is_of(flow, guest, message):
                    flow.meter.add(sum(map(len, frames)), time.monotonic())
            case ProbeTook():
                if flow is not None and flow.window is not None and _is_of(flow, guest, message):
                    flow.window.arrived(message.bytes)
            case HelloMessage():
                self._send(peer, no_host("probe"))
            case ProbeEcho():
                self._send(peer, ProbeEcho(id=message.id))
            case ProbeHello():
                speed = msgspec.json.encode(self._speed)
                self._send(peer, ProbeHelloBack(id=message.id, iperf3=self._iperf3), speed)
                if message.first:
                    self.on_hello(printable(message.name, 60), address)
            case ProbeBye():
                self._until = 0.0 if guest == self._guest else self._until
                self._flow = None if guest == self._guest else flow
            case ProbeFlow() | ProbeEnd() | ProbeBare() | ProbeIperf():
                self._measure(peer, message, address)
            case _:  # a doctor's
                self._send(peer, UnknownMessage(probe=True))

    def _measure(self, peer: bytes, message: ProbeFlow | ProbeEnd | ProbeBare | ProbeIperf, address: str) -> None:
        """Resources that only one client can use at a time."""
        now, guest = time.monotonic(), peer[:-1]
        taken = guest != self._guest and now < self._until
        # One whose connection is gone cannot be written to: the next need not wait for its time to pass.
        if taken and self._send(self._guest + b"c", ProbeEcho()):
            self._send(peer, ProbeBusy(id=message.id))
            return
        self._guest, self._until = guest, now + message.seconds + GRACE_S
        match message:
            case ProbeFlow():
                self._begin_flow(peer, message)
            case ProbeEnd():
                self._end_flow(peer, message)
            case ProbeBare():
                self._offer_bare(peer, message, address)
            case ProbeIperf():
                self._start_iperf(peer, message)

    def _send(self, peer: bytes, message: FromListener, *frames: bytes) -> bool:
        return self._socket.send(peer, pack(message, frames))

    # -- our own way ------------------------------------------------------------------------------------

    def _begin_flow(self, peer: bytes, asked: ProbeFlow) -> None:
        if not asked.seconds:
            return
        now = time.monotonic()
        self._flow = _PathFlow(
            guest=peer[:-1],
            number=asked.flow,
            end=now + asked.seconds,
            window=Window(now) if asked.send else None,
            meter=Meter(asked.seconds) if asked.take else None,
        )
        self._send(peer, ProbeReady(id=asked.id))

    def send_due(self, timeout_s: float) -> float:
        """Send as much as may be in flight. Returns how long to wait for answers."""
        flow = self._flow
        now = time.monotonic()
        if flow is None or flow.window is None or now >= flow.end:
            return timeout_s
        while size := flow.window.piece(now):
            piece = pack(ProbePiece(flow=flow.number), (self._block[:size],))
            if not self._socket.send(flow.guest + b"d", piece):
                return min(timeout_s, FULL_S)
            flow.window.sent += size
        return min(timeout_s, SENDING_S)

    def _acknowledge(self) -> None:
        flow = self._flow
        if flow is not None and flow.meter is not None and flow.meter.total > flow.acked:
            flow.acked = flow.meter.total
            self._send(flow.guest + b"c", ProbeTook(flow=flow.number, bytes=flow.acked))

    def _end_flow(self, peer: bytes, asked: ProbeEnd) -> None:
        flow, self._flow = self._flow, None
        if flow is None or not _is_of(flow, peer[:-1], asked):
            self._send(peer, ProbeNo(id=asked.id, why="there is no such flow"))
            return
        sent = flow.window.sent if flow.window is not None else 0
        rate = flow.meter.rate() if flow.meter is not None else None
        bytes_per_s, variation = (None, None) if rate is None else (rate.bytes_per_s, rate.variation)
        self._send(peer, ProbeResult(id=asked.id, sent=sent, bytes_per_s=bytes_per_s, variation=variation))

    # -- other ways -------------------------------------------------------------------------------------

    def _where(self, asked: str) -> str:
        """The addresses to listen on: only those that the user chose."""
        if self._bind != ANY:
            return self._bind
        return asked if asked in local_addresses() else ANY

    def _offer_bare(self, peer: bytes, asked: ProbeBare, address: str) -> None:
        try:
            if not self._bare_tcp:
                raise OSError("plain TCP is off here")
            if self._offer is not None:
                raise OSError("the last measurement has not ended")
            offer = bare.Offer(
                self._where(asked.address),
                address,
                takes=asked.take,
                sends=asked.send,
                seconds=asked.seconds,
            )
        except OSError as error:
            self._send(peer, ProbeNo(id=asked.id, why=str(error.strerror or error)[:100]))
            return
        future = self._pool.submit(offer.serve)
        future.add_done_callback(lambda _: self._socket.wake())
        self._offer = (peer, asked.id, offer, future)
        self._send(peer, ProbePort(id=asked.id, port=offer.port, secret=offer.secret.hex()))

    def _start_iperf(self, peer: bytes, asked: ProbeIperf) -> None:
        if self._iperf is not None:
            self._iperf.close()
            self._iperf = None
        try:
            if not self._iperf3:
                raise OSError("there is no iperf3")
            self._iperf = iperf.Server(self._where(asked.address), asked.seconds + GRACE_S)
        except OSError as error:
            self._send(peer, ProbeNo(id=asked.id, why=str(error.strerror or error)[:100]))
            return
        self._send(peer, ProbePort(id=asked.id, port=self._iperf.port))


def _is_of(flow: _PathFlow, guest: bytes, message: ProbePiece | ProbeTook | ProbeEnd) -> bool:
    return flow.guest == guest and message.flow == flow.number


def _result(future: Future[Rate | None]) -> Rate | None:
    """A failure of a client's bare connection does not end this listener."""
    try:
        return future.result()
    except (OSError, ValueError):
        return None

"""The probe that listens: answers another that came with its token, and measures with it, one visitor at a time.

Owns its part of the messages below, over the encrypted transport. It must not know what the results mean. The
visitor decides what is measured next; every size and time it names is bounded here.

    probe.hello   who I am                                -> probe.hello, and this machine's speed as JSON
    probe.echo    a small message                         -> probe.echo
    probe.flow    take, send or both for some seconds     -> probe.ready; then probe.piece, answered by probe.took
    probe.end     the flow is over                        -> probe.result: what arrived, and what was sent
    probe.bare    the same over plain TCP                 -> probe.door: a port and its one-time secret
                                                          -> probe.bare, when it is over: what arrived
    probe.iperf   an iperf3 for one test                  -> probe.door: its port
    probe.bye     the next one may come

Whoever asks while another measures hears probe.busy, whoever asks for what cannot be done probe.no. A doctor and a
guest that took this token for a doctor's or a host's hear that it is none.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from potluck.errors import WireError
from potluck.probe import bare, iperf
from potluck.probe.stream import MOST_PIECE, Meter, Window
from potluck.spec.probed import DeviceSpeed, Rate
from potluck.wire.frames import Message, pack, unpack
from potluck.wire.token import local_addresses
from potluck.wire.transport import HostSocket

MOST_FLOW_S = 60.0
GRACE_S = 5.0
"""A visitor that says nothing for so long after what it asked for makes room for the next."""
_SENDING_S, _FULL_S = 0.05, 0.002
ANY = "0.0.0.0"
GUEST_HELLO = "hello"
"""The first word of a machine that means to join a run."""


@dataclass(slots=True, kw_only=True)
class _Flow:
    """One measurement in our own way, as this side sees it."""

    guest: bytes
    number: int
    end: float
    window: Window | None
    meter: Meter | None
    acked: int = 0


def no_host(verb: str) -> dict[str, Any]:
    """What a guest is told, in the host's words, that came with the token of something else."""
    return {
        "reason": f"this token is of `potluck {verb} --listen`, and no run is there",
        "hint": "take the line that `potluck host` prints on the machine that holds the run",
    }


class LinkServer:
    """Serves the probes that come. All methods belong to one thread."""

    def __init__(
        self, door: HostSocket, bind: str, speed: DeviceSpeed, *, iperf3: bool = True, bare_tcp: bool = True
    ) -> None:
        self._door, self._bind, self._speed, self._bare_tcp = door, bind, speed, bare_tcp
        self._iperf3 = iperf3 and iperf.installed()
        self._flow: _Flow | None = None
        self._guest, self._until = b"", 0.0
        self._offer: tuple[bytes, int, bare.Offer, Future[Rate | None]] | None = None
        self._iperf: iperf.Server | None = None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="bare")
        self._block = memoryview(os.urandom(MOST_PIECE))
        self.visited: Callable[[str, str], None] = lambda name, address: None
        """Called with a visitor's name and address when it says hello."""

    def serve(self, timeout_s: float) -> None:
        """Answer what has come and send what is due; waits up to `timeout_s`."""
        for peer, frames in self._door.receive(self.send_due(timeout_s)):
            with contextlib.suppress(WireError):
                self.answer(peer, unpack(frames), self._door.address_of(frames))
        self.settle()

    def settle(self) -> None:
        """What is to be said after messages were answered."""
        self._acknowledge()
        if self._offer is not None and self._offer[3].done():
            peer, number, _, future = self._offer
            self._offer = None
            self._send(peer, "probe.bare", {"id": number, **_plain(_result(future))})
        if self._iperf is not None and self._iperf.over:
            self._iperf.close()
            self._iperf = None

    def close(self) -> None:
        if self._offer is not None:
            self._offer[2].close()
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._iperf is not None:
            self._iperf.close()
        self._door.close()

    # -- what visitors say ------------------------------------------------------------------------------

    def answer(self, peer: bytes, message: Message, address: str) -> None:
        guest, flow = peer[:-1], self._flow
        if message.kind == "probe.piece":
            if flow is not None and flow.meter is not None and self._is_of(flow, guest, message):
                flow.meter.add(sum(len(frame) for frame in message.frames), time.monotonic())
            return
        if message.kind == "probe.took":
            total = message.fields.get("bytes")
            window = flow.window if flow is not None and self._is_of(flow, guest, message) else None
            if window is not None and isinstance(total, int):
                window.arrived(total)
            return
        if message.kind == GUEST_HELLO:
            self._send(peer, "refuse", no_host("probe"))
            return
        number = message.fields.get("id")
        if not isinstance(number, int):
            return
        if message.kind.startswith("doctor."):
            self._send(peer, "unknown", {"id": number, "probe": True})
        elif message.kind == "probe.echo":
            self._send(peer, "probe.echo", {"id": number})
        elif message.kind == "probe.hello":
            speed = msgspec.json.encode(self._speed)
            self._send(peer, "probe.hello", {"id": number, "iperf3": self._iperf3}, speed)
            if message.fields.get("first"):
                self.visited(str(message.fields.get("name", "?"))[:60], address)
        elif message.kind == "probe.bye":
            self._until = 0.0 if guest == self._guest else self._until
            self._flow = None if guest == self._guest else flow
        else:
            self._measure(peer, number, message, address)

    @staticmethod
    def _is_of(flow: _Flow, guest: bytes, message: Message) -> bool:
        return flow.guest == guest and message.fields.get("flow") == flow.number

    def _measure(self, peer: bytes, number: int, message: Message, address: str) -> None:
        """What only one visitor can have at a time."""
        now, guest = time.monotonic(), peer[:-1]
        taken = guest != self._guest and now < self._until
        # One whose connection is gone cannot be written to: the next need not wait for its time to pass.
        if taken and self._send(self._guest + b"c", "probe.echo", {"id": 0}):
            self._send(peer, "probe.busy", {"id": number})
            return
        seconds = message.fields.get("seconds", 0.0)
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= MOST_FLOW_S:
            return
        self._guest, self._until = guest, now + seconds + GRACE_S
        if message.kind == "probe.flow":
            self._begin_flow(peer, number, message, float(seconds))
        elif message.kind == "probe.end":
            self._end_flow(peer, number, message)
        elif message.kind == "probe.bare":
            self._offer_bare(peer, number, message, address)
        elif message.kind == "probe.iperf":
            self._start_iperf(peer, number, message, float(seconds))

    def _send(self, peer: bytes, kind: str, fields: Mapping[str, Any], *frames: bytes) -> bool:
        return self._door.send(peer, pack(Message(kind=kind, fields=dict(fields), frames=frames)))

    # -- our own way ------------------------------------------------------------------------------------

    def _begin_flow(self, peer: bytes, number: int, message: Message, seconds: float) -> None:
        flow = message.fields.get("flow")
        if not isinstance(flow, int) or not seconds:
            return
        now = time.monotonic()
        self._flow = _Flow(
            guest=peer[:-1],
            number=flow,
            end=now + seconds,
            window=Window(now) if message.fields.get("send") is True else None,
            meter=Meter(seconds) if message.fields.get("take") is True else None,
        )
        self._send(peer, "probe.ready", {"id": number})

    def send_due(self, timeout_s: float) -> float:
        """Send what may be on its way; how long to wait for what comes back."""
        flow = self._flow
        now = time.monotonic()
        if flow is None or flow.window is None or now >= flow.end:
            return timeout_s
        while size := flow.window.piece(now):
            piece = pack(Message(kind="probe.piece", fields={"flow": flow.number}, frames=(self._block[:size],)))
            if not self._door.send(flow.guest + b"d", piece):
                return min(timeout_s, _FULL_S)
            flow.window.sent += size
        return min(timeout_s, _SENDING_S)

    def _acknowledge(self) -> None:
        flow = self._flow
        if flow is not None and flow.meter is not None and flow.meter.total > flow.acked:
            flow.acked = flow.meter.total
            self._send(flow.guest + b"c", "probe.took", {"flow": flow.number, "bytes": flow.acked})

    def _end_flow(self, peer: bytes, number: int, message: Message) -> None:
        flow, self._flow = self._flow, None
        if flow is None or not self._is_of(flow, peer[:-1], message):
            self._send(peer, "probe.no", {"id": number, "why": "there is no such flow"})
            return
        sent = flow.window.sent if flow.window is not None else 0
        rate = flow.meter.rate() if flow.meter is not None else None
        self._send(peer, "probe.result", {"id": number, "sent": sent, **_plain(rate)})

    # -- other ways -------------------------------------------------------------------------------------

    def _where(self, asked: object) -> str:
        """Where this machine listens: never elsewhere than where it was told to."""
        if self._bind != ANY:
            return self._bind
        return str(asked) if asked in local_addresses() else ANY

    def _offer_bare(self, peer: bytes, number: int, message: Message, address: str) -> None:
        fields = message.fields
        try:
            if not self._bare_tcp:
                raise OSError("not here")
            if self._offer is not None:
                raise OSError("the last one is not over")
            offer = bare.Offer(
                self._where(fields.get("address")),
                address,
                takes=fields.get("take") is True,
                sends=fields.get("send") is True,
                seconds=float(fields.get("seconds", 0.0)),
            )
        except OSError as error:
            self._send(peer, "probe.no", {"id": number, "why": str(error.strerror or error)[:100]})
            return
        future = self._pool.submit(offer.serve)
        future.add_done_callback(lambda _: self._door.wake())
        self._offer = (peer, number, offer, future)
        self._send(peer, "probe.door", {"id": number, "port": offer.port, "secret": offer.secret.hex()})

    def _start_iperf(self, peer: bytes, number: int, message: Message, seconds: float) -> None:
        if self._iperf is not None:
            self._iperf.close()
            self._iperf = None
        try:
            if not self._iperf3:
                raise OSError("there is no iperf3")
            self._iperf = iperf.Server(self._where(message.fields.get("address")), seconds + GRACE_S)
        except OSError as error:
            self._send(peer, "probe.no", {"id": number, "why": str(error.strerror or error)[:100]})
            return
        self._send(peer, "probe.door", {"id": number, "port": self._iperf.port})


def _result(future: Future[Rate | None]) -> Rate | None:
    """Whatever went wrong on a visitor's bare connection must not end this listener."""
    try:
        return future.result()
    except (OSError, ValueError):
        return None


def _plain(rate: Rate | None) -> dict[str, float | None]:
    return {} if rate is None else {"bytes_per_s": rate.bytes_per_s, "variation": rate.variation}

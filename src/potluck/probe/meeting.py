"""Two doctors: one listens, one connects with its token. They exchange facts and test both directions.

`spec/probe_messages.py` has the messages. A running host answers a doctor with `unknown`, which still shows that it
is reachable and how.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
from msgspec import structs

from potluck import checked
from potluck.doctor.facts.collecting import Wanted, collect
from potluck.doctor.facts.interfaces import family_of, route_to
from potluck.doctor.facts.system import System
from potluck.errors import PotluckError, WireError
from potluck.probe import address_rates
from potluck.probe.link_client import FROM_LISTENER
from potluck.probe.link_server import TO_LISTENER, LinkServer, no_host
from potluck.probe.measuring import Say
from potluck.probe.tcp_attempts import COMMON_PORTS, TRY_S, number_of, tried, tried_all
from potluck.spec.facts import (
    CONNECTED,
    Between,
    Case,
    Facts,
    Reach,
    Transfer,
)
from potluck.spec.messages import HelloMessage, UnknownMessage
from potluck.spec.probe_messages import (
    DoctorAsk,
    DoctorBack,
    DoctorBackOutcome,
    DoctorBulk,
    DoctorFacts,
    DoctorGot,
    DoctorHello,
    FromListener,
    Question,
    ToDoctor,
)
from potluck.spec.probed import DeviceSpeed, ProbedPath
from potluck.units import printable
from potluck.wire.admission import HANDSHAKE_S
from potluck.wire.frames import Received, pack
from potluck.wire.token import Token
from potluck.wire.transport import GuestSocket, HostSocket

LIMIT_S = 20.0
"""Time limit of one `potluck doctor`, as the docs promise."""
_LAST_S = 2.0
"""The part of LIMIT_S reserved for starting, the end of a failed handshake and printing."""
ANSWER_S = 3.0
SESSION_S = 10.0
"""Time limit for all questions together."""
LEAST_S = 0.05
BACK_S = 2.0
SMALL, LARGE = 400, 24 * 1024
"""Sizes of test messages in bytes: one packet on any network, and several full packets, also with jumbo frames,
that a slow link can send in time."""


def about(facts: Facts) -> DoctorHello:
    """A size that fits into one small packet."""
    return DoctorHello(
        name=facts.name[:60],
        platform=facts.platform[:80],
        potluck=facts.potluck[:80],
        torch=(facts.torch.version or "")[:80],
        python=facts.python[:80],
        protocol=str(facts.protocol),
    )


# -- the side that comes ---------------------------------------------------------------------------------------


def look(
    wanted: Wanted,
    progress: Say,
    *,
    token: Token | None = None,
    address: tuple[str, int | None] | None = None,
    back_port: int = 0,
) -> Case:
    """The facts of this machine and of its connection to another one, by token or address, within LIMIT_S."""
    system, end = System(), time.monotonic() + LIMIT_S - _LAST_S
    here = collect(wanted, system, progress)
    if token is not None:
        left_s = max(0.0, end - time.monotonic())
        between, there = meet(here, token, system, progress, back_port=back_port, limit_s=left_s)
        return Case(here=here, there=there, between=between)
    return Case(here=here, between=try_address(here, *address, system, progress) if address is not None else None)


def try_address(facts: Facts, address: str, port: int | None, system: System, progress: Say) -> Between:
    """An address without a token: whether anything there answers, from this side alone."""
    progress(f"trying {address}")
    targets = [(address, port, True)] if port is not None else []
    targets += [(address, other, False) for other in COMMON_PORTS if other != port]
    return Between(target=address, reaches=tried_all(system, facts.name, targets))


def meet(
    facts: Facts, token: Token, system: System, progress: Say, back_port: int = 0, limit_s: float = math.inf
) -> tuple[Between, Facts | None]:
    """All tests with a token, against a doctor on the other side or a running host.

    It ends within `limit_s`, or a moment later. Anything unanswered by then counts as not answered.
    """
    end = time.monotonic() + limit_s
    progress(f"trying {', '.join(token.addresses)}")
    targets = [(a, token.port, True) for a in token.addresses]
    reaches = tried_all(system, facts.name, targets, timeout_s=_within(end, TRY_S))
    if not any(r.outcome == CONNECTED for r in reaches):
        # Whether the machine is there at all decides who blocks.
        first = token.addresses[0]
        others = [(first, other, False) for other in COMMON_PORTS if other != token.port]
        reaches += tried_all(system, facts.name, others, timeout_s=_within(end, TRY_S / 2))
        return Between(target="a token", reaches=reaches), None
    client = _DoctorClient(facts, progress, end)
    try:
        there = client.run(token, back_port)
        if there is not None:
            client.measure(token, [r.address for r in reaches if r.outcome == CONNECTED])
    finally:
        client.close()
    return client.between(reaches), there


class _DoctorClient:
    """One connection to a doctor or a host."""

    def __init__(self, facts: Facts, progress: Say, end: float) -> None:
        self._facts, self._progress = facts, progress
        self._socket: GuestSocket | None = None
        self._number = 0
        self._end = end
        self._handshake, self._partner = "", ""
        self._versions: dict[str, str] = {}
        self._transfers: list[Transfer] = []
        self._back: tuple[Reach, ...] = ()
        self._paths: tuple[ProbedPath, ...] = ()
        self._measures = False

    def run(self, token: Token, back_port: int) -> Facts | None:
        self._progress("the encrypted handshake")
        try:
            self._socket = GuestSocket(token, connect_timeout_s=_within(self._end, TRY_S))
            self._socket.handshake(_within(self._end, HANDSHAKE_S))
        except PotluckError as error:
            self._handshake = error.what
            return None
        self._handshake = "ok"
        self._end = min(self._end, time.monotonic() + SESSION_S)
        began = time.monotonic()
        received = self._ask(about(self._facts))
        answer = received.message if received is not None else None
        self._transfers.append(_transfer("out", SMALL, answer is not None, began))
        if answer is None:
            self._partner = "silent"
            return None
        if isinstance(answer, UnknownMessage) and answer.probe:
            self._partner = "probe"
            return None
        self._partner = "host" if isinstance(answer, UnknownMessage) else "doctor"
        self._measures = isinstance(answer, DoctorHello) and answer.measures
        said = structs.asdict(answer).items()
        self._versions = {name: printable(value, 80) for name, value in said if isinstance(value, str) and value}
        if self._partner == "doctor":
            self._try_back(back_port)
        self._bulk_out()
        if self._partner == "host":
            return None
        # Last of the small ones' connection: where large messages are lost, nothing comes after one.
        self._bulk_in()
        # Facts are larger than a packet: where such are lost, there is no use in waiting for them.
        return self._exchange_facts() if all(t.arrived for t in self._transfers) else None

    def measure(self, token: Token, addresses: list[str]) -> None:
        """The speed of each address, if the other side can measure it."""
        if self._measures and self._socket is not None:
            used = number_of(self._socket.address) or self._socket.address
            self._paths = address_rates.compared(
                token, self._facts.name, addresses, used, self._progress, end=self._end
            )

    def between(self, reaches: tuple[Reach, ...]) -> Between:
        return Between(
            target="a token",
            reaches=reaches,
            back=self._back,
            handshake=self._handshake,
            partner=self._partner,
            partner_versions=self._versions,
            transfers=tuple(self._transfers),
            paths=self._paths,
        )

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close(linger_s=0.0)

    def _bulk_out(self) -> None:
        self._progress("large messages to the other machine")
        began = time.monotonic()
        answer = self._ask(DoctorBulk(), bytes(LARGE), data=True)
        self._transfers.append(_transfer("out", LARGE, answer is not None, began))

    def _bulk_in(self) -> None:
        self._progress("large messages from the other machine")
        began = time.monotonic()
        # Asked for on the small connection, should the other one be stuck.
        answer = self._ask(DoctorAsk(bytes=LARGE))
        whole = answer is not None and sum(len(f) for f in answer.frames) == LARGE
        self._transfers.append(_transfer("in", LARGE, whole, began))

    def _try_back(self, port: int) -> None:
        self._progress("a connection back to this machine")
        assert self._socket is not None
        address = number_of(self._socket.address) or self._socket.address
        route = route_to(System(), address)
        with socket.socket(family_of(address), socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listening.bind((route.source if route is not None else "", port))
                listening.listen(4)  # the system completes connections by itself; nothing is read from them
            except OSError:
                return
            answer = self._ask(DoctorBack(port=listening.getsockname()[1]), timeout_s=BACK_S + ANSWER_S)
        if answer is not None and isinstance(answer.message, DoctorBackOutcome):
            self._back = (answer.message.reach,)

    def _exchange_facts(self) -> Facts | None:
        self._progress("exchanging facts")
        answer = self._ask(DoctorFacts(), msgspec.json.encode(self._facts))
        return _facts_in(answer.frames) if answer is not None else None

    def _ask(
        self, asked: ToDoctor, *frames: bytes, data: bool = False, timeout_s: float = ANSWER_S
    ) -> Received[FromListener] | None:
        """Send and wait for the answer to just that, or for a host's `unknown`."""
        assert self._socket is not None
        self._number += 1
        message = pack(structs.replace(asked, id=self._number), frames)
        sent = self._socket.send_data(message) if data else self._socket.send_control(message)
        deadline = min(time.monotonic() + timeout_s, self._end)
        while sent and self._socket.connected and (left := deadline - time.monotonic()) > 0:
            for _, received in self._socket.receive(left):
                with contextlib.suppress(WireError):
                    answer = FROM_LISTENER.read(received)
                    if isinstance(answer.message, UnknownMessage):
                        return answer
                    if isinstance(answer.message, Question) and answer.message.id == self._number:
                        return answer
        return None


def _within(end: float, seconds: float) -> float:
    """`seconds`, or what is left until the end."""
    return max(LEAST_S, min(seconds, end - time.monotonic()))


def _transfer(direction: str, size: int, arrived: bool, began: float) -> Transfer:
    return Transfer(direction=direction, size_bytes=size, arrived=arrived, seconds=time.monotonic() - began)


def _is_number(address: str) -> bool:
    try:
        ipaddress.ip_address(address)
    except ValueError:
        return False
    return True


def _facts_in(frames: Sequence[bytes | memoryview]) -> Facts | None:
    try:
        return checked.decode(frames[0], Facts)
    except (msgspec.DecodeError, RecursionError, IndexError):
        return None


# -- the side that listens -------------------------------------------------------------------------------------


class Listener:
    """Answers doctors that have the token. All methods belong to one thread."""

    def __init__(self, host_socket: HostSocket, facts: Facts) -> None:
        self._socket, self._facts = host_socket, facts
        self._tries: list[tuple[bytes, int, Future[Reach]]] = []
        self._pool = ThreadPoolExecutor(max_workers=2, thread_name_prefix="back")
        self._link = LinkServer(host_socket, "", DeviceSpeed(name=facts.name), iperf3=False, bare_tcp=False)
        self.on_hello: Callable[[str, str], None] = lambda name, address: None
        """Called with a client's name and address when it says hello."""
        self.learned: Callable[[Facts], None] = lambda facts: None
        """Called with a client's facts."""

    def serve(self, timeout_s: float) -> None:
        """Answer the arrived messages. Waits up to `timeout_s`."""
        for peer, frames in self._socket.receive(self._link.send_due(timeout_s)):
            with contextlib.suppress(WireError):
                (message, payload), address = TO_LISTENER.read(frames), self._socket.address_of(frames)
                if isinstance(message, HelloMessage):
                    self._send(peer, no_host("doctor"))
                elif isinstance(message, ToDoctor):
                    self._answer(peer, message, payload, address)
                else:
                    self._link.answer(peer, message, payload, address)
        self._link.settle()
        for entry in [entry for entry in self._tries if entry[2].done()]:
            self._tries.remove(entry)
            peer, number, future = entry
            self._send(peer, DoctorBackOutcome(id=number, reach=future.result()))

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._link.close()

    def _answer(self, peer: bytes, message: ToDoctor, frames: Sequence[bytes | memoryview], address: str) -> None:
        match message:
            case DoctorHello():
                self._send(peer, structs.replace(about(self._facts), id=message.id, measures=True))
                self.on_hello(printable(message.name, 60), address)
            case DoctorBulk():
                self._send(peer, DoctorGot(id=message.id))
            case DoctorAsk():
                self._send(peer, DoctorBulk(id=message.id), bytes(message.bytes))
            case DoctorBack():
                # Only to the client's own address: nobody can have this machine connect elsewhere.
                if _is_number(address) and len(self._tries) < 8:
                    future = self._pool.submit(tried, self._facts.name, address, message.port, timeout_s=BACK_S)
                    future.add_done_callback(lambda _: self._socket.wake())
                    self._tries.append((peer, message.id, future))
            case DoctorFacts():
                facts = msgspec.json.encode(self._facts)
                self._send(peer, DoctorFacts(id=message.id), facts)
                if (theirs := _facts_in(frames)) is not None:
                    self.learned(theirs)

    def _send(self, peer: bytes, message: FromListener, *frames: bytes) -> None:
        self._socket.send(peer, pack(message, frames))

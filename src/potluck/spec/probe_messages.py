"""The messages between a listening `potluck probe` or `potluck doctor` and the one that connects to it.

PURE. They are sent and checked like those of a run (`messages.py`). A question has an `id`; its answer has the same
one.

    probe.hello   who I am                                -> probe.hello, and this machine's speed as JSON
    probe.echo    a small message                         -> probe.echo
    probe.flow    take, send or both for some seconds     -> probe.ready; then probe.piece, answered by probe.took
    probe.end     the flow is over                        -> probe.result: what arrived, and what was sent
    probe.bare    the same over plain TCP                 -> probe.port: a port and its one-time secret
                                                          -> probe.bare, when it is over: what arrived
    probe.iperf   an iperf3 for one test                  -> probe.port: its port
    probe.bye     the next one may come

    doctor.hello  who I am, which versions                -> doctor.hello
    doctor.bulk   a frame of bytes                        -> doctor.got
    doctor.ask    how many bytes to send back             -> doctor.bulk
    doctor.back   please try to connect to me             -> doctor.back, the outcome
    doctor.facts  my facts                                -> doctor.facts, theirs

A peer that asks while another measures gets probe.busy; a request that cannot be met gets probe.no.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from potluck.bounds import Natural, Short, Whole
from potluck.spec.facts import Reach
from potluck.spec.messages import Frames, HelloMessage, Message, RefuseMessage, UnknownMessage

MOST_FLOW_S = 60.0
MOST_ASKED = 1 << 20
MOST_NUMBER = 1e18
_ONE = Frames(least=1, most=1)

Flowing = Annotated[float, Meta(ge=0.0, le=MOST_FLOW_S)]
PortNumber = Annotated[int, Meta(ge=1, le=65535)]
Measure = Annotated[float, Meta(ge=0.0, lt=MOST_NUMBER)]


class Question(Message, frozen=True, kw_only=True):
    """Base of questions and answers."""

    id: Whole = 0
    """Number of the question, chosen by the side that asks."""


# -- the probe ----------------------------------------------------------------------------------------------


class ProbeHello(Question, frozen=True, kw_only=True):
    kind = "probe.hello"
    name: Short = "?"
    first: bool = False
    """Whether this is the first of its paths."""


class ProbeHelloBack(Question, frozen=True, kw_only=True):
    kind = "probe.hello"
    frames = _ONE
    iperf3: bool = False
    """Whether there is an iperf3."""


class ProbeEcho(Question, frozen=True, kw_only=True):
    kind = "probe.echo"


class ProbeFlow(Question, frozen=True, kw_only=True):
    kind = "probe.flow"
    flow: Whole
    take: bool = False
    send: bool = False
    seconds: Flowing


class ProbeReady(Question, frozen=True, kw_only=True):
    kind = "probe.ready"


class ProbePiece(Message, frozen=True, kw_only=True):
    kind = "probe.piece"
    frames = _ONE
    flow: Whole


class ProbeTook(Message, frozen=True, kw_only=True):
    kind = "probe.took"
    flow: Whole
    bytes: Natural
    """The part of the flow that has arrived so far."""


class ProbeEnd(Question, frozen=True, kw_only=True):
    kind = "probe.end"
    flow: Whole
    seconds: Flowing = 0.0


class ProbeResult(Question, frozen=True, kw_only=True):
    kind = "probe.result"
    sent: Natural = 0
    bytes_per_s: Measure | None = None
    variation: Measure | None = None


class ProbeBare(Question, frozen=True, kw_only=True):
    kind = "probe.bare"
    take: bool = False
    send: bool = False
    seconds: Flowing
    address: Short = ""
    """The address at which the client reaches this machine."""


class ProbeBareResult(Question, frozen=True, kw_only=True):
    kind = "probe.bare"
    bytes_per_s: Measure | None = None
    variation: Measure | None = None


class ProbeIperf(Question, frozen=True, kw_only=True):
    kind = "probe.iperf"
    seconds: Flowing
    address: Short = ""


class ProbePort(Question, frozen=True, kw_only=True):
    kind = "probe.port"
    port: PortNumber
    secret: Short = ""
    """Hexadecimal."""


class ProbeBusy(Question, frozen=True, kw_only=True):
    kind = "probe.busy"


class ProbeNo(Question, frozen=True, kw_only=True):
    kind = "probe.no"
    why: Short = ""


class ProbeBye(Question, frozen=True, kw_only=True):
    kind = "probe.bye"


# -- the doctor ---------------------------------------------------------------------------------------------


class DoctorHello(Question, frozen=True, kw_only=True):
    """Sent by both sides."""

    kind = "doctor.hello"
    name: Short = "?"
    platform: Short = ""
    potluck: Short = ""
    torch: Short = ""
    python: Short = ""
    protocol: Short = ""
    measures: bool = False
    """Whether the links can be measured with it."""


class DoctorBulk(Question, frozen=True, kw_only=True):
    kind = "doctor.bulk"
    frames = _ONE


class DoctorGot(Question, frozen=True, kw_only=True):
    kind = "doctor.got"


class DoctorAsk(Question, frozen=True, kw_only=True):
    kind = "doctor.ask"
    bytes: Annotated[int, Meta(ge=1, le=MOST_ASKED)]


class DoctorBack(Question, frozen=True, kw_only=True):
    kind = "doctor.back"
    port: PortNumber


class DoctorBackOutcome(Question, frozen=True, kw_only=True):
    kind = "doctor.back"
    reach: Reach


class DoctorFacts(Question, frozen=True, kw_only=True):
    kind = "doctor.facts"
    frames = Frames(most=1)


ToProbe = ProbeHello | ProbeEcho | ProbeFlow | ProbePiece | ProbeTook | ProbeEnd | ProbeBare | ProbeIperf | ProbeBye
ToDoctor = DoctorHello | DoctorBulk | DoctorAsk | DoctorBack | DoctorFacts
ToListener = ToProbe | ToDoctor | HelloMessage

FromProbe = (
    ProbeHelloBack
    | ProbeEcho
    | ProbeReady
    | ProbePiece
    | ProbeTook
    | ProbeResult
    | ProbeBareResult
    | ProbePort
    | ProbeBusy
    | ProbeNo
)
FromDoctor = DoctorHello | DoctorGot | DoctorBulk | DoctorBackOutcome | DoctorFacts
FromListener = FromProbe | FromDoctor | RefuseMessage | UnknownMessage

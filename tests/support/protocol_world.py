"""What surrounds the host's protocol in tests: a clock, the coder, and guests as a test wants them.

It owns the bookkeeping that says whether a step was full. Like the real shell, it changes the protocol's state only
by `handle`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, get_args

from msgspec import to_builtins

from potluck.balance.ledger import EpochSteps, Ledger
from potluck.errors import WireError
from potluck.hub import actions as act
from potluck.hub import inputs
from potluck.hub.actions import CommonBatch, StepResult
from potluck.hub.feed import NOTHING, FixedTensor, PieceState
from potluck.hub.guest_work import Kept
from potluck.hub.inputs import Packed
from potluck.hub.members import COMPUTING, Member
from potluck.hub.protocol import HostProtocol
from potluck.hub.terms import HostTerms
from potluck.spec.events import RunEvent, kind_of
from potluck.spec.messages import AheadMessage, FromGuest, LeaseMessage, RefuseMessage
from potluck.spec.model_description import TensorSpec
from potluck.train.data import epoch_order
from potluck.wire.frames import (
    FROM_GUEST,
    FROM_HOST,
    PROTOCOL,
    MalformedError,
    UnknownKindError,
    dump_json,
    pack,
)
from support.plain import Plain, packed
from support.replay import record

PIECES, GRADIENT_BYTES, HOST_S = 2, 10, 0.1
SEED = 1
"""For the order of the samples."""
MODEL = (TensorSpec(name="w", shape=(4, 2), dtype="float32", role="trained"),)
VERSIONS = {"potluck": "1", "torch": "2", "python": "3", "protocol": str(PROTOCOL)}
KINDS = [*(kind.kind for kind in get_args(FromGuest)), "nonsense"]
"""Whatever a guest can say, and something that it cannot."""
SIZES: dict[str, Any] = {"micro_batch": 2, "largest_micro_batch": 2}
DONE: dict[str, Any] = {"compute_s": 0.1, "loss_sum": 1.0, "finite": True, "receive_s": 0.0, **SIZES}
"""What a contribution ends with, beside its lease and its count."""
AHEAD_BYTES = 4 << 20
"""What guests keep of samples that come ahead of their lease."""
DIGESTS = bytes(8 * PIECES)
"""The host's hashes of its replica, whatever the version."""
BATCH = Packed(tree=["x", "uint8", [6]], frames=(b"sample",))
"""A common batch, whatever its positions."""
FIXED = (FixedTensor(name="b", digest="0", values=2, value_bytes=4),)
"""The host's buffer, which every guest of `ABOUT` holds already."""
ABOUT = {"fingerprint": to_builtins(MODEL), "hashes": {"b": "0"}}


def new_protocol(batch: int, samples: int, **terms: Any) -> HostProtocol:
    ledger = Ledger(new_source(batch, samples))
    return HostProtocol(
        HostTerms(
            name="host",
            versions=VERSIONS,
            fingerprint=MODEL,
            piece_bytes=(GRADIENT_BYTES,) * PIECES,
            window_bytes=100,
            **terms,
        ),
        ledger,
    )


def new_source(batch: int, samples: int) -> EpochSteps:
    return EpochSteps(samples=samples, global_batch=batch, order=epoch_order(samples, SEED))


def _new_kept() -> Kept:
    return Kept(AHEAD_BYTES, lambda tree, parts: sum(map(len, parts)))


def _check_travels(action: act.Send) -> None:
    """What the host says itself can be packed, and a guest can read it."""
    try:
        read = FROM_HOST.read(pack(action.message, action.frames))
        assert read == (action.message, action.frames)
    except WireError as error:
        raise AssertionError(f"the host would send what cannot travel: {error}") from error


class World:
    """What surrounds the protocol: a clock, the coder, the loader, and guests as honest as a test wants them."""

    def __init__(
        self,
        batch: int = 6,
        samples: int = 7,
        tape: list[str] | None = None,
        sample_bytes: int = 0,
        **terms: Any,
    ) -> None:
        """`tape`: what the protocol is told is recorded there, see `support.replay`."""
        self.sample_bytes = sample_bytes
        self.protocol = new_protocol(batch, samples, **terms)
        if tape is not None:
            record(self.protocol, tape.append)
        self.ledger, self.members = self.protocol.ledger, self.protocol.members
        self.batch, self.now = batch, 10.0
        self.source = new_source(batch, samples)
        self.sent: dict[str, list[act.Send]] = defaultdict(list)
        self.events: list[RunEvent] = []
        self.decoding: list[act.Decode] = []
        self.comparing: list[act.CompareSketch] = []
        self.asked: list[act.ReadPart] = []
        self.hashing: list[int] = []
        self.reading: list[act.SendAhead] = []
        self.of_lease: dict[int, dict[int, tuple[int, ...]]] = defaultdict(dict)
        """The positions of each micro-batch of a lease."""
        self.read: list[tuple[int, int]] = []
        """Lease and number of the micro-batches that were read for their lease."""
        self.of_ahead: dict[int, tuple[int, ...]] = {}
        self.kept: dict[str, Kept] = defaultdict(_new_kept)
        self.is_open = False
        self.in_hand: tuple[tuple[int, ...], CommonBatch | None] | None = None
        self.by_host: list[int] = []
        self.summed: list[int] = []
        self.counted: list[int] = []
        for index in range(PIECES):
            self.handle(inputs.PieceCoded(index=index, piece=PieceState(NOTHING, 0, 10, 80)))

    # -- actions

    def handle(self, happened: inputs.Input) -> list[act.Action]:
        """What the protocol asks for is noted; the loader answers at once, the others when a test says so."""
        actions = self.protocol.handle(happened, self.now)
        for action in actions:
            match action:
                case act.Send():
                    _check_travels(action)
                    self.sent[action.guest].append(action)
                    self._keep(action)
                case act.SendSamples():
                    assert self.of_lease[action.lease][action.batch] == action.positions
                    self.read.append((action.lease, action.batch))
                    frame = bytes(self.sample_bytes * len(action.positions))
                    self.handle(
                        inputs.SamplesPacked(
                            guest=action.guest, lease=action.lease, batch=action.batch, tree=None, frames=(frame,)
                        )
                    )
                case act.SendAhead():
                    self.of_ahead[action.batch] = action.positions
                    self.reading.append(action)
                case act.HashFixed():
                    self.handle(inputs.FixedHashed(guest=action.guest, tensors=FIXED))
                case act.Decode():
                    self.decoding.append(action)
                case act.CompareSketch():
                    self.comparing.append(action)
                case act.HashReplica():
                    self.hashing.append(action.version)
                case act.Emit():
                    self.events.append(action.event)
                case act.ReadPart():
                    self.asked.append(action)
                case act.Forget():
                    assert action.guest not in self.members
                    self.asked = [a for a in self.asked if a.guest != action.guest]
                    assert all(d.guest != action.guest for d in self.decoding)
        return actions

    def _keep(self, action: act.Send) -> None:
        """What a guest does with samples that come ahead, and with the lease that names them."""
        message = action.message
        if isinstance(message, AheadMessage):
            self.kept[action.guest].add(message, action.frames[0])
        elif isinstance(message, LeaseMessage):
            self.kept[action.guest].leased(message.step, message.ahead)
            positions = iter(self.ledger.leases[message.lease].positions)
            for number, size in enumerate(message.sizes):
                self.of_lease[message.lease][number] = tuple(itertools.islice(positions, size))
            for number, ahead in enumerate(message.ahead):
                assert not ahead or self.of_ahead[ahead] == self.of_lease[message.lease][number]

    def check_kept(self, guest: str) -> None:
        """The guest has all that its lease names."""
        lease = [s.message for s in self.sent[guest] if isinstance(s.message, LeaseMessage)][-1]
        for size, ahead in zip(lease.sizes, lease.ahead):
            assert not ahead or self.kept[guest].take(ahead)[0] == size * self.sample_bytes

    def ask(self, happened: inputs.Input) -> Any:
        """The protocol's reply to the training thread."""
        (reply,) = [a for a in self.handle(happened) if isinstance(a, act.Reply)]
        return reply.value

    def tick(self) -> list[act.Action]:
        return self.handle(inputs.Tick())

    @property
    def state(self) -> list[PieceState]:
        """Where the replica's pieces stand."""
        return self.protocol.feeding.pieces

    # -- the coder

    def code(self) -> None:
        """The replica reaches the weights' version, and everybody is sent what they may have."""
        for index, old in enumerate(self.state):
            if old.version != self.ledger.step:
                piece = PieceState(old.version, self.ledger.step, 10, 80, b"change")
                self.handle(inputs.PieceCoded(index=index, piece=piece))

    def hash(self) -> None:
        """The coder has hashed the versions it was asked for."""
        while self.hashing:
            self.handle(inputs.ReplicaHashed(version=self.hashing.pop(0), digests=DIGESTS))

    def decode(self, why_not: str | None = None, wrong_norm: float | None = None) -> None:
        done = self.decoding.pop(0)
        if why_not is None:
            batches = self.of_lease[done.lease]
            self.summed += [p for number in sorted(batches) for p in batches[number]][: done.count]
        self.handle(
            inputs.ContributionDecoded(
                guest=done.guest,
                lease=done.lease,
                loss_sum=done.loss_sum,
                items=done.items,
                why_not=why_not,
                wrong_norm=wrong_norm,
            )
        )

    # -- guests

    def say(self, guest: str, kind: str, *frames: bytes, **fields: Any) -> list[act.Action]:
        """A guest sends this, whether it makes sense or not."""
        return self.arrives(guest, packed(Plain(kind=kind, fields=fields, frames=frames)))

    def arrives(self, guest: str, raw: Sequence[bytes | memoryview]) -> list[act.Action]:
        event: inputs.Input
        try:
            message, frames = FROM_GUEST.read(raw)
            event = inputs.MessageArrived(guest=guest, message=message, frames=frames, address="1.2.3.4")
        except (UnknownKindError, MalformedError) as error:
            event = inputs.UnreadableArrived(guest=guest, kind=error.kind, why=str(error), address="1.2.3.4")
        except WireError as error:
            event = inputs.UnreadableArrived(guest=guest, why=str(error), address="1.2.3.4")
        return self.handle(event)

    def goes_wrong(self, guest: str) -> None:
        """What a guest sends is no message."""
        self.handle(inputs.UnreadableArrived(guest=guest, why="…"))

    def hello(self, guest: str) -> None:
        self.say(guest, "hello", name=guest, device="cpu", potluck="1", torch="2")

    def ready(self, guest: str) -> None:
        self.kept[guest] = _new_kept()
        self.say(guest, "ready", dump_json(ABOUT), ahead_bytes=AHEAD_BYTES, **SIZES)

    def read_ahead(self, *, fails: bool = False) -> None:
        """The loader has read what was asked for the next step; `fails`: it could not be packed."""
        asked = self.reading.pop(0)
        content = memoryview(bytes(self.sample_bytes * len(asked.positions)))
        parts = tuple(content[at : at + asked.part_bytes] for at in range(0, len(content), asked.part_bytes))
        packed = inputs.AheadPacked(guest=asked.guest, batch=asked.batch, parts=() if fails else parts)
        self.handle(packed)

    def take_ahead(self, guest: str) -> None:
        """Everything that may be sent ahead of the next lease arrives."""
        for _ in range(1000):
            member = self.members.get(guest)
            if member is not None and member.ahead.in_flight_bytes:
                self.say(guest, "taken", bytes=member.ahead.in_flight_bytes, ahead=True)
            elif self.reading:
                self.read_ahead()
            else:
                return
        raise AssertionError("it never ends")

    def take_all(self, guest: str) -> None:
        """Everything that is under way to a guest arrives there."""
        for _ in range(20):
            for asked in [a for a in self.asked if a.guest == guest]:
                self.asked.remove(asked)
                version = self.state[asked.item.index].version
                self.handle(
                    inputs.PartRead(
                        guest=guest, item=asked.item, version=version, payload=bytes(8), part=asked.part
                    )
                )
            member = self.members.get(guest)
            if member is None or not member.feed.in_flight_bytes:
                return
            self.say(guest, "taken", bytes=member.feed.in_flight_bytes)
        raise AssertionError("it never ends")

    def sketch(self, guest: str, seconds_a_sample: float = HOST_S, **more: Any) -> None:
        check = self.members[guest].check
        about = {**more, "count": 2, "loss": 1.0, "compute_s": 2 * seconds_a_sample, **SIZES}
        self.say(guest, "sketch", b"\0\0\0\0", check=check, **about)

    def compare(self, why_not: str | None = None, **more: Any) -> None:
        verdict = act.Verdict(cosine=1.0, why_not=why_not, **more)
        done = self.comparing.pop(0)
        self.handle(inputs.SketchCompared(guest=done.guest, check=done.check, verdict=verdict))

    def answer_hash(self, guest: str, digests: bytes = DIGESTS) -> list[act.Action]:
        return self.say(guest, "hashed", digests, version=self.members[guest].hash_awaited)

    def deliver(self, guest: str, *, wrong: int = 0, pieces: int = PIECES, **about: Any) -> list[act.Action]:
        lease = self.members[guest].lease
        assert lease is not None
        for index in range(pieces):
            self.say(guest, "grad", bytes(GRADIENT_BYTES), lease=lease.id, piece=index)
        fields = {**DONE, "compute_s": lease.count * HOST_S, **about}
        return self.say(guest, "done", lease=lease.id, count=lease.count + wrong, **fields)

    # -- the training thread

    def begin(self) -> None:
        self.is_open, self.by_host, self.summed = True, [], []
        self.handle(inputs.StepBegun())
        for guest, member in self.members.items():
            if member.lease is not None and member.lease.step == self.ledger.step:
                self.check_kept(guest)
        self.code()

    def take(self) -> float | None:
        """Take what is to be computed next; None, or until when there is nothing to do."""
        take = self.ask(inputs.BatchWanted(count=2, computing=False))
        assert isinstance(take, act.Take)
        if take.positions:
            self.in_hand = (take.positions, take.common)
        return take.wait_until

    def compute(self) -> None:
        assert self.in_hand is not None
        positions, common = self.in_hand
        self.now += HOST_S * len(positions)
        if common is not None:
            self.common_computed(BATCH)
        self.handle(inputs.HostLaunched(positions=positions, sizes=(len(positions),)))
        self.handle(inputs.HostComputed(samples=len(positions), seconds=HOST_S * len(positions)))
        self.by_host += positions
        self.in_hand = None

    def common_computed(self, batch: Packed, reference: object = "reference") -> None:
        """The host has its gradient of the common batch that it has in hand."""
        assert self.in_hand is not None
        self.handle(inputs.CommonComputed(positions=self.in_hand[0], batch=batch, reference=reference))

    def end(self) -> StepResult:
        result = self.ask(inputs.StepFilled())
        assert isinstance(result, StepResult)
        step = self.ledger.step - 1
        assert sorted(self.by_host + self.summed) == list(range(step * self.batch, (step + 1) * self.batch))
        assert sum(result.samples.values()) == self.batch
        assert result.samples.get("host", 0) == len(self.by_host)
        self.counted += self.by_host + self.summed
        self.is_open = False
        return result

    def finish(self) -> StepResult:
        """The step ends whatever the guests do, and waiting has its bound; only the coder must go on."""
        waited = 0.0
        for _ in range(10 * self.batch):
            if self.in_hand is not None:
                self.compute()
                continue
            until = self.take()
            if self.in_hand is None and self.ledger.full:
                assert waited <= self.batch * HOST_S + 0.01
                return self.end()
            if self.in_hand is None:
                assert until is not None
                if self.decoding:
                    self.decode()
                    continue
                self.handle(inputs.HostWaited(seconds=max(0.0, until - self.now)))
                waited += max(0.0, until - self.now)
                self.now = max(self.now, until)
        raise AssertionError("the training thread is stuck")

    def whole_step(self) -> StepResult:
        """A step in which everybody does their part."""
        self.begin()
        for guest in list(self.members):
            self.take_all(guest)
        while self.take() is None and self.in_hand is not None:
            self.compute()
        for guest, member in list(self.members.items()):
            if member.check is not None:
                self.take_all(guest)
                self.sketch(guest)
            self.take_ahead(guest)
            if member.lease is not None:
                self.deliver(guest)
        while self.comparing:
            self.compare()
        while self.decoding:
            self.decode()
        return self.finish()

    def join(self, guest: str) -> Member:
        self.hello(guest)
        self.ready(guest)
        self.take_all(guest)
        return self.members[guest]


def joined(*guests: str, batch: int = 6, samples: int = 100, **terms: Any) -> World:
    """Everybody is checked and the host knows its speed."""
    world = World(batch=batch, samples=samples, **terms)
    for guest in guests:
        world.join(guest)
    world.code()
    for guest in guests:
        world.take_all(guest)
    world.whole_step()
    assert all(m.state == COMPUTING for m in world.members.values())
    return world


def refusals(world: World, guest: str) -> list[str]:
    return [s.message.reason for s in world.sent[guest] if isinstance(s.message, RefuseMessage)]


def of_kind(world: World, kind: str) -> list[Any]:
    return [e for e in world.events if kind_of(e) == kind]

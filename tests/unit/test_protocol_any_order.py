"""The host's protocol under any order of messages, ticks and silence: steps are full and nothing is stuck."""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from potluck.codec.names import downs_of
from potluck.hub import actions as act
from potluck.hub import inputs
from potluck.hub.members import JOINING, SYNCING, Member
from potluck.spec.messages import UnknownMessage
from potluck.wire.frames import MAX_HEADER_BYTES, dump_json
from support.plain import header
from support.protocol_world import (
    ABOUT,
    DIGESTS,
    DONE,
    GRADIENT_BYTES,
    KINDS,
    PIECES,
    VERSIONS,
    World,
    joined,
    refusals,
)

NEVER = 10**6
"""The number of a lease that is never given."""

# -- anything at all


NAMES = ["lease", "keep", "eta_s", "piece", "count", "compute_s", "loss_sum", "finite", "micro_batch"]
NAMES += ["version", "largest_micro_batch", "receive_s", "computed", "check", "loss", "bytes", "name", "reason"]
values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 12),
    st.sampled_from([10**400, -(10**400), 1e308, -1e308, 0.0, "x", "7", [], [1], {}, {"a": 1}]),
    st.just(60_000).map(lambda size: "x" * size),
)
fields_of_any_kind = st.dictionaries(st.sampled_from(NAMES), values, max_size=len(NAMES))
LONG_NAME = [["y" * 70_000, [1], "float32", "trained"]]
any_frame = st.one_of(
    st.sampled_from([b"", b"x", b"{}", b"[]", b"null", b"\xff", dump_json(ABOUT)]),
    st.sampled_from([None, 7, "ab", [1], {}]).map(lambda bad: dump_json({**ABOUT, "hashes": bad})),
    st.sampled_from([None, 7, "ab", [1], [], {}]).map(lambda bad: dump_json({**ABOUT, "fingerprint": bad})),
    st.just(None).map(lambda _: dump_json({**ABOUT, "fingerprint": LONG_NAME})),
)
any_frames = st.lists(any_frame, max_size=2)
guests = st.sampled_from("abcd")


class ProtocolMachine(RuleBasedStateMachine):
    """Guests that help, guests that lie, guests that die, in any order."""

    @initialize(
        batch=st.integers(1, 12),
        samples=st.integers(1, 12),
        well=st.integers(0, 3),
        sample_bytes=st.sampled_from([0, 130_000, 600_000]),
    )
    def start(self, batch: int, samples: int, well: int, sample_bytes: int) -> None:
        auto: dict[str, Any] = {"auto": downs_of(None), "coded_bytes": 20} if batch % 2 else {}
        self.world = World(batch, samples, check_replica_every=1, sample_bytes=sample_bytes, **auto)
        for guest in "abc"[:well]:
            self.joins_well(guest)

    def member(self, guest: str) -> Member | None:
        return self.world.members.get(guest)

    @rule(guest=guests)
    def joins(self, guest: str) -> None:
        self.world.hello(guest)
        if self.world.members[guest].state == JOINING:
            self.world.ready(guest)

    @precondition(lambda self: not self.world.is_open)
    @rule(guest=guests)
    def joins_well(self, guest: str) -> None:
        """And is checked, if the host has a step for it."""
        self.joins(guest)
        self.world.code()
        self.world.take_all(guest)
        self.world.whole_step()

    @rule(guest=guests)
    def takes_all(self, guest: str) -> None:
        if self.member(guest) is not None:
            self.world.take_all(guest)

    @precondition(lambda self: self.world.reading)
    @rule(fails=st.sampled_from([False, False, False, True]))
    def reads_ahead(self, fails: bool) -> None:
        self.world.read_ahead(fails=fails)

    @rule(guest=guests)
    def takes_ahead(self, guest: str) -> None:
        self.world.take_ahead(guest)

    @rule(guest=guests, nbytes=st.sampled_from([0, 1, 10**9]))
    def lies_about_ahead(self, guest: str, nbytes: int) -> None:
        self.world.say(guest, "taken", bytes=nbytes, ahead=True)

    @rule()
    def codes(self) -> None:
        self.world.code()

    @rule(guest=guests, seconds=st.sampled_from([1e-9, 0.05, 0.1, 0.3, 1e9]))
    def sketches(self, guest: str, seconds: float) -> None:
        if (member := self.member(guest)) is not None and member.check is not None:
            self.world.sketch(guest, seconds)

    @precondition(lambda self: self.world.comparing)
    @rule(
        why_not=st.sampled_from([None, None, None, "it differs"]),
        more=st.sampled_from([{}, {}, {"again": True}, {"rounded": True, "spread": 0.3}, {"void": "no items"}]),
    )
    def compares(self, why_not: str | None, more: dict[str, Any]) -> None:
        self.world.compare(None if "rounded" in more else why_not, **more)

    @rule(guest=guests, digests=st.sampled_from([DIGESTS, DIGESTS, b"", b"x" * len(DIGESTS), b"x"]))
    def hashes(self, guest: str, digests: bytes) -> None:
        if (member := self.member(guest)) is not None and member.hash_awaited is not None:
            self.world.answer_hash(guest, digests)

    @rule()
    def host_hashes(self) -> None:
        self.world.hash()

    # -- the training thread

    @precondition(lambda self: not self.world.is_open)
    @rule(takers=st.sets(guests))
    def begins(self, takers: set[str]) -> None:
        self.world.begin()
        for guest in sorted(takers & self.world.members.keys()):
            self.world.take_all(guest)

    @precondition(lambda self: self.world.is_open)
    @rule()
    def goes_on(self) -> None:
        world = self.world
        if world.in_hand is not None:
            world.compute()
        elif world.ledger.full:
            world.end()
        elif (until := world.take()) is not None:
            world.now = max(world.now, until)

    @precondition(lambda self: self.world.is_open)
    @rule()
    def finishes(self) -> None:
        self.world.finish()

    # -- contributions

    def lease_of(self, guest: str, wrong_lease: bool) -> int:
        member = self.member(guest)
        return member.lease.id if member is not None and member.lease is not None and not wrong_lease else 1

    @rule(guest=guests, keep=st.integers(-1, 8), eta_s=st.sampled_from([0.0, 0.1, 50.0]), wrong=st.booleans())
    def closing(self, guest: str, keep: int, eta_s: float, wrong: bool) -> None:
        self.world.say(guest, "closing", lease=self.lease_of(guest, wrong), keep=keep, eta_s=eta_s)

    @rule(
        guest=guests,
        wrong=st.sampled_from([0, 0, 0, 1, -1]),
        finite=st.sampled_from([True, True, True, False]),
        pieces=st.sampled_from([PIECES, PIECES, PIECES, 1, 0]),
    )
    def delivers(self, guest: str, wrong: int, finite: bool, pieces: int) -> None:
        if (member := self.member(guest)) is not None and member.lease is not None:
            self.world.deliver(guest, wrong=wrong, finite=finite, pieces=pieces)

    @rule(guest=guests, wrong=st.booleans())
    def stops(self, guest: str, wrong: bool) -> None:
        self.world.say(guest, "stopped", lease=self.lease_of(guest, wrong), computed=1, compute_s=0.1)

    @precondition(lambda self: self.world.decoding)
    @rule(why_not=st.sampled_from([None, None, "piece 1 has 3 bytes"]))
    def is_decoded(self, why_not: str | None) -> None:
        self.world.decode(why_not)

    # -- going

    @rule(guest=guests, how=st.sampled_from(["leaves", "asleep", "bytes", "version"]))
    def goes(self, guest: str, how: str) -> None:
        world, member = self.world, self.member(guest)
        if member is None:
            return
        if how == "leaves":
            world.say(guest, "leave", reason="tired")
        elif how == "bytes":
            world.goes_wrong(guest)
        elif how == "version":
            world.handle(inputs.OtherProtocolArrived(guest=guest, theirs=9, address="1.2.3.4"))
        else:
            for _ in range(3):
                self.time_passes(2.0, {guest})
        asleep_early = how == "asleep" and member.state == JOINING
        assert asleep_early or guest not in world.members or any(d.guest == guest for d in world.decoding)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 3.0]), silent=st.sets(guests, max_size=1))
    def time_passes(self, seconds: float, silent: set[str]) -> None:
        world = self.world
        world.now += seconds
        for guest in sorted(world.members.keys() - silent):
            world.say(guest, "alive")
        world.tick()

    @rule(guest=st.sampled_from("ad"), kind=st.sampled_from(KINDS), fields=fields_of_any_kind, frames=any_frames)
    def says_anything(self, guest: str, kind: str, fields: dict[str, Any], frames: list[bytes]) -> None:
        known = guest in self.world.members
        actions = self.world.say(guest, kind, *frames, **fields)
        if not known and kind != "hello" and len(header(kind, fields)) <= MAX_HEADER_BYTES:
            assert actions == [act.Send(guest=guest, message=UnknownMessage(**VERSIONS))]

    # -- what must always hold

    @invariant()
    def leases_and_members_agree(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        held = {m.lease.id for m in world.members.values() if m.lease is not None}
        assert set(world.ledger.leases) <= held
        decoding = {(d.guest, d.lease) for d in world.decoding}
        assert len(decoding) == len(world.decoding)
        arrived = {(m.id, m.lease.id) for m in world.members.values() if m.lease and m.lease.arrived}
        assert arrived == decoding
        assert {lease for _, lease in decoding} <= set(world.ledger.leases)
        assert all((m.id, m.lease.id) in decoding for m in world.members.values() if m.leaving and m.lease)
        assert all(m.lease is not None for m in world.members.values() if m.leaving)
        assert len({m.name for m in world.members.values()} | {"host"}) == len(world.members) + 1

    def teardown(self) -> None:
        """Then all guests fall silent: the host goes on alone, and nobody is left."""
        if not hasattr(self, "world"):
            return
        world = self.world
        if world.is_open:
            world.finish()
        while world.decoding:
            world.decode()
        world.now += 100.0
        world.tick()
        assert world.members == {}
        for _ in range(2):
            world.begin()
            assert world.finish().samples == {"host": world.batch}
        assert world.counted == sorted(world.counted, key=lambda p: p // world.batch)
        assert sorted(world.counted) == list(range(world.ledger.step * world.batch))
        samples = world.source.samples
        for epoch in range(len(world.counted) // samples):
            of_epoch = [p for p in world.counted if p // samples == epoch]
            assert sorted(world.source.samples_of(of_epoch)) == list(range(samples))


TestProtocol = ProtocolMachine.TestCase
TestProtocol.settings = settings(max_examples=80, stateful_step_count=50, deadline=None)


# -- the middle of a step, densely

MOMENTS = ["host", "host", "deliver", "deliver", "decoded", "not decoded", "closing", "again", "wrong", "stop"]
MOMENTS += ["leave", "bytes", "sleep", "time", "grad", "other lease", "malformed", "ahead", "ahead", "read ahead"]
moment = st.tuples(st.sampled_from(MOMENTS), st.sampled_from("abc"), st.integers(0, 5))


def happen(world: World, what: str, guest: str, number: int) -> None:
    member = world.members.get(guest)
    lease = member.lease if member is not None else None
    if what == "host" and world.in_hand is not None:
        world.compute()
    elif what == "host":
        if (until := world.take()) is not None:
            world.now = max(world.now, until)
    elif what == "ahead":
        world.take_ahead(guest)
    elif what == "read ahead":
        if world.reading:
            world.read_ahead(fails=number == 5)
    elif what in ("decoded", "not decoded"):
        if world.decoding:
            world.decode("its gradient is not finite" if what == "not decoded" else None)
    elif what == "time":
        world.now += number / 4
        for other in world.members:
            world.say(other, "alive")
        world.tick()
    elif what == "sleep":
        for _ in range(4):
            world.now += 1.5
            for other in list(world.members):
                if other != guest:
                    world.say(other, "alive")
            world.tick()
    elif what == "bytes" and member is not None:
        world.goes_wrong(guest)
    elif what == "leave":
        world.say(guest, "leave")
    elif lease is not None:
        about_lease(world, what, guest, number)


def about_lease(world: World, what: str, guest: str, number: int) -> None:
    lease = world.members[guest].lease
    assert lease is not None
    if what == "deliver":
        world.deliver(guest)
    elif what == "again":
        world.deliver(guest)
        if world.members[guest].lease is lease:
            world.deliver(guest)
    elif what == "wrong":
        world.deliver(guest, wrong=number - 2, finite=number != 2, pieces=min(number, PIECES))
    elif what == "closing":
        world.say(guest, "closing", lease=lease.id, keep=number, eta_s=number / 4)
    elif what == "stop":
        world.say(guest, "stopped", lease=lease.id, computed=number, compute_s=number / 10)
    elif what == "grad":
        world.say(guest, "grad", bytes(GRADIENT_BYTES), lease=lease.id, piece=number % PIECES)
    elif what == "other lease":
        world.say(guest, "done", lease=lease.id - 1 if number else NEVER, count=lease.count, **DONE)
    elif what == "malformed":
        world.say(guest, "grad", b"x", lease=lease.id, piece=PIECES + number)


@settings(max_examples=250, deadline=None)
@given(steps=st.lists(st.lists(moment, max_size=25), min_size=1, max_size=4))
def test_every_step_is_full_whatever_happens_in_it(steps: list[list[tuple[str, str, int]]]) -> None:
    world = joined("a", "b", "c", batch=12, sample_bytes=200_000)
    for moments in steps:
        for guest in sorted({"a", "b", "c"} - world.members.keys()):
            world.join(guest)
        world.code()
        for guest in world.members:
            world.take_all(guest)
        if any(m.state == SYNCING for m in world.members.values()):
            world.whole_step()
        world.begin()
        for guest in list(world.members):
            world.take_all(guest)
        for what, guest, number in moments:
            happen(world, what, guest, number)
        world.finish()
        assert world.ledger.leases == {}
        assert not world.decoding
        assert all(not m.leaving for m in world.members.values()), "a guest that was put out is still there"
    assert sorted(world.counted) == list(range(world.ledger.step * 12))


@settings(max_examples=150, deadline=None)
@given(
    guest=st.sampled_from("ab"),
    kind=st.sampled_from(KINDS),
    fields=fields_of_any_kind,
    frames=any_frames,
    decoding=st.booleans(),
)
@example(guest="a", kind="closing", fields={"lease": 1, "keep": 1, "eta_s": 10**400}, frames=[], decoding=False)
@example(
    guest="a", kind="closing", fields={"lease": 1, "keep": 1, "eta_s": "x" * 60_000}, frames=[], decoding=False
)
@example(
    guest="b",
    kind="ready",
    fields={"micro_batch": 1, "largest_micro_batch": 1},
    frames=[dump_json({**ABOUT, "fingerprint": LONG_NAME})],
    decoding=False,
)
def test_no_message_hurts_the_run(
    guest: str, kind: str, fields: dict[str, Any], frames: list[bytes], decoding: bool
) -> None:
    """The refusal fits into a header, whatever it quotes; World packs every message that is sent."""
    world = joined("a")
    world.hello("b")
    world.begin()
    if decoding:
        world.deliver("a")
    world.say(guest, kind, *frames, **fields)
    if refusals(world, guest) and not (decoding and guest == "a"):
        assert guest not in world.members
    world.finish()
    assert world.whole_step().samples["host"] >= 1

"""The divergence guard: a guest whose weights or gradients are no longer the host's is seen, and what follows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from potluck.errors import LoopError
from potluck.hub import layout as layouts
from potluck.hub.feed import NOTHING, PENDING, Feed, Item, PieceState
from potluck.hub.guard import MOST_IN_A_ROW, PARITY_EVERY
from potluck.hub.hashes import DIGEST_BYTES, PieceHashes, differing
from potluck.hub.inputs import BuffersChanged
from potluck.hub.members import COMPUTING, SYNCING
from potluck.report.sentences import describe
from potluck.spec.messages import DATA, HashMessage
from support.coder_pair import Pair, flat
from support.fleet import Fleet
from support.protocol_world import DIGESTS, World, joined, of_kind, refusals

OTHERS = b"x" * len(DIGESTS)
JOB = Path(__file__).parents[1] / "support" / "faulty_job.py"

# -- who is asked, and what an answer means


def asked(world: World, guest: str) -> list[int]:
    return [s.message.version for s in world.sent[guest] if s.message.kind == "hash"]


def guarded(every: int = 1, guests: str = "a") -> World:
    """A step is open, and the guests hold its version and a lease."""
    world = joined(*guests, batch=12, check_replica_every=every)
    world.begin()
    for guest in guests:
        world.take_all(guest)
    return world


def test_a_guest_is_asked_once_it_has_all_of_a_version_on_the_weights_own_connection() -> None:
    world = joined("a", batch=12, check_replica_every=1)
    world.begin()
    assert world.hashing[-1:] == [1]
    world.take_all("a")
    (send,) = [s for s in world.sent["a"] if s.message.kind == "hash"]
    assert (send.message.channel, send.message) == (DATA, HashMessage(version=1))
    world.say("a", "taken", bytes=0)
    assert asked(world, "a") == [1], "once"


def test_only_every_so_many_steps() -> None:
    world = joined("a", batch=12, check_replica_every=3)
    for _ in range(7):
        world.whole_step()
        world.hash()
        if world.members["a"].hash_awaited is not None:
            world.answer_hash("a")
    assert asked(world, "a") == [3, 6]
    assert [e.step for e in of_kind(world, "replica_checked")] == [4, 7]


def test_never_if_so_wished() -> None:
    world = joined("a", batch=12, check_replica_every=0)
    for _ in range(3):
        world.whole_step()
    assert asked(world, "a") == []
    assert world.hashing == []


@pytest.mark.parametrize("host_first", [True, False])
def test_equal_hashes_change_nothing(host_first: bool) -> None:
    world = guarded()
    for part in (world.hash, lambda: world.answer_hash("a"))[:: 1 if host_first else -1]:
        part()
    (event,) = of_kind(world, "replica_checked")
    assert (event.machine, event.step) == ("a", 2)
    lease = world.members["a"].lease
    assert lease is not None
    assert not lease.revoked
    world.deliver("a")
    world.decode()
    assert world.finish().samples["a"] > 0


@pytest.mark.parametrize("host_first", [True, False])
@pytest.mark.parametrize("theirs", [OTHERS, b""])
def test_a_difference_takes_the_lease_back_and_sends_everything_anew(host_first: bool, theirs: bytes) -> None:
    world = guarded()
    member = world.members["a"]
    lease = member.lease
    assert lease is not None
    for part in (world.hash, lambda: world.answer_hash("a", theirs))[:: 1 if host_first else -1]:
        part()
    (event,) = of_kind(world, "replica_mismatch")
    assert (event.machine, event.step, event.samples) == ("a", 2, lease.count)
    message = describe(event)
    assert message is not None
    assert message.text == (
        "a (1.2.3.4) held weights that are not the host's (2 of 2 pieces differ) during step 2; "
        f"its {lease.count} samples were taken back; the weights are sent to it again"
    )
    assert member.state == SYNCING
    kinds = [s.message.kind for s in world.sent["a"]]
    assert kinds.index("resync") > kinds.index("hash")
    assert [asked.item.kind for asked in world.asked if asked.guest == "a"][-1:] == ["whole"]
    # What it computed all the same does not count.
    world.deliver("a")
    assert not world.decoding
    assert world.finish().samples == {"host": 12}
    # It comes back through the parity check, without a second arrival in the log.
    world.take_all("a")
    world.whole_step()
    assert world.members["a"].state == COMPUTING
    assert len(of_kind(world, "guest_joined")) == 1
    assert world.whole_step().samples["a"] > 0


def test_a_contribution_that_is_being_added_already_is_not_lost_twice() -> None:
    world = guarded()
    world.hash()
    world.deliver("a")
    world.answer_hash("a", OTHERS)
    (event,) = of_kind(world, "replica_mismatch")
    assert event.samples == 0
    world.decode()
    assert sum(world.finish().samples.values()) == 12


def test_hashes_that_nobody_asked_for_put_a_guest_out() -> None:
    world = guarded()
    world.say("a", "hashed", DIGESTS, version=77)
    assert "nobody asked for" in refusals(world, "a")[0]
    world = guarded()
    world.answer_hash("a", b"short")
    assert "nobody asked for" in refusals(world, "a")[0]


def test_a_guest_that_differs_again_and_again_is_asked_less_often() -> None:
    world = joined("a", batch=12, check_replica_every=1)
    answers = 0
    for _ in range(60):
        world.whole_step()
        world.hash()
        if world.members["a"].hash_awaited is not None:
            answers += 1
            world.answer_hash("a", *([OTHERS] if answers % 3 else []))
        world.take_all("a")
    assert 3 <= len(of_kind(world, "replica_mismatch")) <= 6


def test_a_guest_that_differs_every_time_is_put_out_and_told_what_may_be_wrong() -> None:
    """As one whose script clamps its weights: it would count for longer and longer between two questions."""
    world = joined("a", "b", batch=12, check_replica_every=1)
    for _ in range(12):
        world.whole_step()
        world.hash()
        for guest in [guest for guest in "ab" if guest in world.members]:
            if world.members[guest].hash_awaited is not None:
                world.answer_hash(guest, *([OTHERS] if guest == "a" else []))
            if guest in world.members:
                world.take_all(guest)
    assert set(world.members) == {"b"}
    (lost,) = of_kind(world, "guest_lost")
    assert "(2 of 2 pieces differ), 3 times in a row" in lost.reason
    (refuse,) = [s.message for s in world.sent["a"] if s.message.kind == "refuse"]
    assert "if run.is_host" in refuse.hint
    assert len(of_kind(world, "replica_mismatch")) == MOST_IN_A_ROW - 1


@pytest.mark.parametrize(("equal", "step"), [(0, 3), (1, 21)], ids=["first", "later"])
def test_gradients_are_compared_again_now_and_then_and_one_that_drifted_is_put_out(equal: int, step: int) -> None:
    """After the first equal hash, when the codec has rounded what a newcomer holds, and after every 20."""
    world = joined("a", "b", batch=36, check_replica_every=1)
    for member in world.members.values():
        member.hashes_equal = equal
    for _ in range(PARITY_EVERY + 2 - equal):
        world.whole_step()
        world.hash()
        for guest in "ab":
            if world.members[guest].hash_awaited is not None:
                world.answer_hash(guest)
        if world.members["a"].state == SYNCING:
            break
    assert world.members["a"].state == SYNCING
    rate = world.members["a"].rate.value
    world.begin()
    world.take()
    world.compute()
    for guest in "ab":
        world.take_all(guest)
        world.sketch(guest, seconds_a_sample=5.0)
    assert world.members["a"].rate.value == rate, "a batch of two samples tells less than the leases did"
    world.compare("the cosine of the two is 0.5000")
    world.compare(None)
    world.finish()
    assert world.members.keys() == {"b"}
    (event,) = of_kind(world, "guest_lost")
    message = describe(event)
    assert message is not None
    assert message.text.startswith(
        f"a (1.2.3.4) was removed during step {step}: it computed a gradient that differs from the host's on the "
        "same batch: the cosine of the two is 0.5000"
    )
    assert len(of_kind(world, "guest_joined")) == 2


@pytest.mark.parametrize("batch", [36, 4])
def test_where_the_model_changes_its_buffers_gradients_are_compared_now_and_after_every_hash(batch: int) -> None:
    """Less often where a check takes a guest longer than a step."""
    world = joined("a", batch=batch, check_replica_every=1)
    member = world.members["a"]
    member.hashes_equal = 1
    world.whole_step()
    world.hash()
    world.answer_hash("a")
    assert member.state == COMPUTING
    world.handle(BuffersChanged(module="Codebook", names=("q.embed",)))
    assert (member.state == SYNCING) == (batch == 36)
    member.state = COMPUTING
    for hashes in range(3, 9):
        world.take_all("a")
        world.whole_step()
        world.hash()
        world.answer_hash("a")
        assert (member.state == SYNCING) == (batch == 36 or hashes == 8)
        member.state = COMPUTING


def test_a_guest_that_would_fall_behind_is_compared_less_often() -> None:
    world = joined("a", batch=4, check_replica_every=1)
    for _ in range(3 * PARITY_EVERY):
        world.whole_step()
        world.hash()
        if world.members["a"].hash_awaited is not None:
            world.answer_hash("a")
        assert world.members["a"].state != SYNCING
    assert world.members["a"].hashes_equal > 2 * PARITY_EVERY


def test_what_is_being_read_for_a_guest_is_not_read_twice() -> None:
    feed = Feed(pieces=3, window_bytes=1000)
    feed.have, feed.open = [5, 5, 5], True
    feed.asked(Item("whole", 1, 80))
    feed.forget()
    assert feed.have == [NOTHING, PENDING, NOTHING]
    assert feed.next([PieceState(4, 5, 10, 80)] * 3) == Item("whole", 0, 80)


# -- the hashes themselves


def test_hashes_in_any_order_and_how_many_differ() -> None:
    ours, theirs = PieceHashes(3, 4), PieceHashes(3, 4)
    for index in (2, 0, 3, 1):
        assert ours.lacks(index)
        ours.take(index, bytes([index]))
    while (index := theirs.next()) is not None:
        theirs.take(index, bytes([index if index != 2 else 9]))
    assert ours.complete
    assert len(ours.digests()) == 4 * DIGEST_BYTES
    assert differing(ours.digests(), theirs.digests()) == 1
    assert differing(ours.digests(), b"") == 4
    assert PieceHashes(3, 2).next([2, 3]) == 1, "only pieces that are at the version"


@pytest.fixture(params=[torch.float32, torch.bfloat16, torch.float16])
def pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pair]:
    monkeypatch.setattr(layouts, "SMALLEST_PIECE", 256)
    with Pair("int4", dtype=request.param).running() as found:
        yield found


def ask(pair: Pair, version: int) -> None:
    pair.link.hear("hash", version=version)


def both(pair: Pair, version: int) -> tuple[bytes, bytes]:
    """The host's and the guest's hashes of a version, once they are there."""
    pair.until(lambda: version in pair.hashed and version in pair.link.hashed)
    return pair.hashed[version], pair.link.hashed[version]


def test_both_sides_hash_the_same_bits_version_after_version(pair: Pair) -> None:
    pair.sync()
    for version in range(1, 6):
        pair.update()
        pair.coder.hash_version(version)
        pair.sync()
        ask(pair, version)
        ours, theirs = both(pair, version)
        assert ours == theirs
        assert len(ours) == DIGEST_BYTES * pair.pieces
    assert len(set(pair.hashed.values())) == 5
    pair.check_same_bits()


def test_a_version_is_hashed_as_it_was_even_with_the_next_on_its_heels(pair: Pair) -> None:
    """Neither the host's replica nor the guest's weights wait for a hash: a piece is hashed before it changes."""
    pair.sync()
    for version in range(1, 21, 2):
        pair.update()
        pair.coder.hash_version(version)
        pair.coder.code_change()
        pair.until(pair.coded)
        pair.until(lambda: pair.feed.current(pair.state))
        ask(pair, version)
        pair.update()
        pair.coder.code_change()
        ours, theirs = both(pair, version)
        assert ours == theirs
    assert len(set(pair.hashed.values())) == 10


def test_one_wrong_bit_is_seen_and_after_a_resync_the_guest_is_right_again(pair: Pair) -> None:
    pair.sync()
    pair.theirs.trained[0].data.view(-1)[7].mul_(-1)  # unseen by torch, as a fault of memory is
    pair.update()
    pair.coder.hash_version(1)
    pair.sync()
    ask(pair, 1)
    assert differing(*both(pair, 1)) == 1
    pair.link.hear("resync", version=1)
    pair.feed.forget()
    pair.until(pair.fed)
    pair.check_same_bits()
    pair.update()
    pair.sync()
    pair.check_same_bits()


def test_weights_do_not_change_under_work_that_a_resync_ends(pair: Pair) -> None:
    pair.sync()
    pair.link.hear("lease", lease=7, step=0, sizes=[1], quota=1)
    work = pair.guest.next_work()
    pair.guest.enter(work)
    pair.link.hear("resync", version=0)
    pair.feed.forget()
    before = pair.replica()
    pair.until(lambda: work.over)
    with torch.no_grad():
        pair.theirs.trained[0].view(-1)[7].mul_(-1)  # as long as it computes, nobody mends this
    pair.pump()
    assert not torch.equal(pair.replica(), flat(pair.theirs))
    pair.guest.let_go(work)
    pair.guest.leave()
    pair.until(pair.fed)
    assert torch.equal(before, flat(pair.theirs))


def move(weight: torch.Tensor, memory: bytearray) -> None:
    """Into this memory, as an RNN does when it lays its weights out anew."""
    there = torch.frombuffer(memory, dtype=weight.dtype).view(weight.shape)
    with torch.no_grad():
        weight.set_(there.copy_(weight))  # type: ignore[call-overload]


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_script_that_changes_a_weight_on_a_guest_is_told(pair: Pair, moved: int) -> None:
    """The host's next change would be added to other values. An RNN that lays its weights out anew changes none;
    the second time it may get the memory that it had at first."""
    weight = pair.theirs.trained[0]
    first, second = bytearray(weight.nbytes), bytearray(weight.nbytes)
    move(weight, first)
    pair.sync()
    for memory in (second, first)[:moved]:
        move(weight, memory)
    if not moved:
        with torch.no_grad():
            weight.clamp_(-0.01, 0.01)
    pair.update()
    if moved:
        pair.sync()
        pair.check_same_bits()
        return
    pair.coder.code_change("")
    pair.until(lambda: pair.guest._failure is not None)
    with pytest.raises(LoopError, match=r"embedding\.weight was changed on this guest") as caught:
        pair.guest.next_work()
    assert "if run.is_host" in caught.value.hint


def test_a_guest_that_does_not_hold_the_version_says_so(pair: Pair) -> None:
    pair.sync()
    ask(pair, 99)
    pair.until(lambda: 99 in pair.link.hashed)
    assert pair.link.hashed[99] == b""


def test_a_hash_that_can_no_longer_be_taken_is_given_up(pair: Pair) -> None:
    pair.sync()
    pair.coder.hash_version(1)
    pair.update()
    pair.update()
    pair.sync()  # version 1 was never coded
    pair.until(lambda: pair.coder._hashing is None)
    assert pair.hashed == {}


# -- in a run


def test_a_run_in_which_guests_go_wrong(tmp_path: Path) -> None:
    """One's weights are spoilt: it is mended and goes on helping. The other's gradients drift: it is put out."""
    until, config = tmp_path / "enough", tmp_path / "run.toml"
    config.write_text("[run]\ncheck_replica_every = 1\n")
    device = ["--device", "paced:0.004", "--micro-batch", "2"]
    with Fleet(tmp_path) as fleet:
        host = fleet.host(JOB, "--wait-for", "2", "--config", str(config), *device, arguments=["--until", until])
        ann = fleet.guest("ann", *device, env={"SPOIL": "weights@8"})
        bob = fleet.guest(
            "bob", *device, "--runs", str(tmp_path / "records"), env={"SPOIL": f"gradients@{PARITY_EVERY // 2}"}
        )
        event = fleet.wait_for_event(host, "replica_mismatch", "ann")
        fleet.wait_for(
            host,
            lambda: [e for e in fleet.events("replica_checked", "ann") if e["step"] > event["step"] + 2],
            "equal hashes after the mismatch",
        )
        lost = fleet.wait_for_event(host, "guest_lost", "bob")
        until.touch()
        host.succeeds(deadline_s=20)
        ann.succeeds(deadline_s=20)
        bob.exits_with(3, deadline_s=20)
        assert len(fleet.events("replica_mismatch")) == 1
        assert "ann (127.0.0.1) held weights that are not the host's (1 of " in host.stdout()
        assert [s for s in fleet.steps_with("ann") if s > event["step"]]
        assert lost["put_out"]
        assert "bob (127.0.0.1) was removed during step" in host.stdout()
        assert "computed a gradient that differs" in bob.stderr()
        assert [p.name for p in (tmp_path / "records").iterdir()] == ["flight-bob-1.jsonl"]
        fleet.assert_every_step_is_full(global_batch=24)
        text = "".join(p.read_text() for p in fleet.folder.glob("flight-host-*.jsonl"))
        assert "replica_mismatch" in text
        assert (fleet.folder / "token").read_text().strip() not in text

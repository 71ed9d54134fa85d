"""Host and guest hold the same bits of every piece, and of a contribution everything or nothing is in the sum."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from potluck.codec import Codecs, changes, from_wire, get, to_wire
from potluck.codec.names import BF16_CHANGES, DOWN_THIN
from potluck.hub import host_coder
from potluck.hub import layout as layouts
from potluck.hub.actions import Decode, ReadPiece
from potluck.hub.feed import NOTHING, Item, TensorPart
from potluck.hub.guest import Work
from potluck.hub.host_coder import Failed
from potluck.train.update import total_norm
from support.coder_pair import DEADLINE_S, Pair, flat
from support.fake_device import FakeDevice

every_codec = pytest.mark.parametrize("codec", ["none", "int8", "int4", "thin"])


@pytest.fixture(autouse=True)
def _small_pieces_on_one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of these tests have a few thousand values, and should have more than one piece all the same."""
    monkeypatch.setattr(layouts, "SMALLEST_PIECE", 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BOUND = {"none": 1e-6, "int8": 1e-3, "int4": 1e-2, "thin": 5e-2}
"""How far the replica of weights of size one may be from them, after changes of up to 0.05."""


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_guest_holds_the_replicas_bits_after_many_updates(codec: str, dtype: torch.dtype) -> None:
    with Pair(codec, dtype).running() as pair:
        pair.sync()
        assert torch.equal(pair.check_same_bits(), flat(pair.tensors)), "a newcomer gets the weights themselves"
        wholes = pair.wholes
        for _ in range(12):
            pair.update()
            pair.sync()
            replica = pair.check_same_bits()
        assert pair.wholes == wholes
        assert pair.changes == 12 * pair.pieces
        room = 2.0**-7 if dtype != torch.float32 else 0.0  # what the parameters' own type can hold
        assert (replica - flat(pair.tensors)).abs().amax() <= BOUND[codec] + room


@every_codec
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_weights_can_be_those_of_the_guests_for_a_while(
    codec: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Pair(codec, dtype).running() as pair:
        pair.sync()
        for _ in range(3):
            pair.update()
            pair.sync()
        own, replica = flat(pair.tensors).clone(), pair.check_same_bits().clone()
        with pair.coder.replica_in_place() as held:
            assert held
            assert torch.equal(flat(pair.tensors), replica)
        assert torch.equal(flat(pair.tensors), own)
        with pytest.raises(ZeroDivisionError), pair.coder.replica_in_place():
            raise ZeroDivisionError
        assert torch.equal(flat(pair.tensors), own)
        pair.update()  # the replica is of the version before
        own = flat(pair.tensors).clone()
        monkeypatch.setattr(host_coder, "CODED_S", 0.01)
        with pair.coder.replica_in_place() as held:
            assert not held
            assert torch.equal(flat(pair.tensors), own)
        monkeypatch.setattr(host_coder, "CODED_S", 30.0)
        threading.Timer(0.1, pair.coder.code_change).start()  # a busy machine codes it a little later
        with pair.coder.replica_in_place() as held:
            assert held


@every_codec
def test_what_rounding_lost_is_sent_later(codec: str) -> None:
    with Pair(codec).running() as pair:
        pair.sync()
        pair.update(0.1)
        for _ in range(12):
            pair.update(0.0)
            pair.sync()
        assert (pair.check_same_bits() - flat(pair.tensors)).abs().amax() <= 1e-6


@every_codec
def test_versions_that_were_never_coded_are_skipped(codec: str) -> None:
    """Nobody was there to send them to; the next change leads from the last coded version to the newest."""
    with Pair(codec).running() as pair:
        pair.sync()
        for skipped in (1, 3, 2):
            wholes = pair.wholes
            for _ in range(skipped):
                pair.update()
            pair.sync()
            pair.check_same_bits()
            assert pair.wholes == wholes
        assert pair.coder.version == 6


@every_codec
def test_an_update_may_come_at_any_moment_of_coding(codec: str) -> None:
    """Pieces that were not coded by then never will be of that version; some were, and the guest has them."""
    with Pair(codec).running() as pair:
        pair.sync()
        for number in range(40):
            pair.coder.code_change()
            if number % 3:
                pair.turn()
            if number % 4 == 0:
                time.sleep(0.0003 * (number % 5))
            pair.update()
        pair.sync()
        pair.check_same_bits()


def test_an_update_waits_for_the_piece_that_is_being_read_and_for_no_more() -> None:
    with Pair("int4").running() as pair:
        pair.sync()
        pair.update()
        with pair.coder.updating():
            pair.coder.code_change()  # as for a guest that joins at this very moment
            time.sleep(0.05)
            assert all(version == 0 for version in pair.coder.versions), "weights were read while they changed"
        pair.until(lambda: all(version == 2 for version in pair.coder.versions))
        pair.until(pair.fed)
        pair.check_same_bits()


@every_codec
def test_a_guest_that_sat_out_gets_wholes_and_then_changes_again(codec: str) -> None:
    with Pair(codec).running() as pair:
        pair.sync()
        pair.feed.open = False
        for _ in range(3):
            pair.update()
            pair.coder.code_change()
            pair.until(pair.coded)
        assert not torch.equal(pair.replica(), flat(pair.theirs))
        pair.feed.open = True
        wholes = pair.wholes
        pair.sync()
        assert pair.wholes == wholes + pair.pieces
        pair.update()
        pair.sync()
        assert pair.wholes == wholes + pair.pieces
        pair.check_same_bits()


class Gate:
    """A codec that stops in the middle of coding a piece until it is let go."""

    def __init__(self, codec: Any) -> None:
        self.codec, self.reached, self.go = codec, threading.Event(), threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.codec, name)

    def encode_reporting(self, values: Tensor, report: Any) -> Tensor:
        self.reached.set()
        assert self.go.wait(DEADLINE_S)
        return self.codec.encode_reporting(values, report)  # type: ignore[no-any-return]


def test_a_piece_is_coded_once_for_a_version() -> None:
    """A guest that joins has everything coded that is not yet: also the piece that is being coded right now.

    Coded twice, the replica would move on without a guest hearing of it.
    """
    pair = Pair("int4")
    gate = Gate(get("int4"))
    pair.coder._down = Codecs(gate)  # type: ignore[arg-type]
    with pair.running():
        pair.sync()
        pair.update()
        pair.coder.code_change()
        assert gate.reached.wait(DEADLINE_S)
        pair.coder.code_change()
        gate.go.set()
        pair.sync()
        pair.check_same_bits()
        assert pair.changes == pair.pieces


def test_a_change_that_everybody_has_is_let_go_and_its_version_stays() -> None:
    with Pair("int4").running() as pair:
        pair.sync()
        pair.update()
        pair.sync()
        assert all((piece.version, piece.base, piece.change) == (1, NOTHING, None) for piece in pair.state)
        assert pair.feed.current(pair.state)
        pair.update()
        pair.sync()
        pair.check_same_bits()


def test_fixed_tensors_arrive_in_parts() -> None:
    with Pair("int4").running() as pair:
        for name, tensor in pair.tensors.fixed.items():
            for start in range(0, tensor.numel(), 50):
                stop = min(tensor.numel(), start + 50)
                pair.feed.tensors.append(TensorPart(name, start, stop, (stop - start) * tensor.element_size()))
        pair.sync()
        for name, tensor in pair.tensors.fixed.items():
            assert torch.equal(pair.theirs.fixed[name], tensor), name


def test_a_guest_that_is_gone_is_answered_no_more() -> None:
    pair = Pair("int4")  # not running: what is asked stays asked
    for guest in "aba":
        pair.coder.ask(guest, Item("whole", 0, 4), None)
    pair.coder.forget("a")
    assert [request[0] for request in pair.coder._requests] == ["b"]


# -- contributions


def gradients(pair: Pair, seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator) for p in pair.theirs.trained]


def contribute(pair: Pair, lease: int, values: list[Tensor | None], codec: str = "") -> dict[int, Any]:
    """The guest's own way from gradients to coded pieces."""
    work = Work(id=lease, check=False, step=pair.coder.version, sizes=(1,), received=0.0, codec=codec)
    pair.link.sent.clear()
    pair.guest.enter(work)
    for parameter, value in zip(pair.theirs.trained, values):
        parameter.grad = None if value is None else value.to(parameter.dtype)
    pair.guest.code(work, [2, 0])  # two pieces are final early
    pair.guest.finish(work, count=1, loss_sum=1.5, compute_s=0.1)
    pair.guest.leave()
    *grads, done = pair.link.sent
    assert done.message.kind == "done"
    assert done.message.finite == all(bool(v.isfinite().all()) for v in values if v is not None)
    assert {g.message.piece for g in grads} == set(range(pair.pieces))
    return {g.message.piece: bytes(g.frames[0]) for g in grads}


def decode(pair: Pair, lease: int, pieces: dict[int, Any], codec: str = "") -> str | None:
    pair.coder.decode(Decode(guest="guest", lease=lease, pieces=pieces, loss_sum=1.5, count=4, codec=codec))
    pair.until(lambda: bool(pair.decoded))
    done = pair.decoded.pop()
    assert (done.guest, done.lease, done.loss_sum) == ("guest", lease, 1.5)
    return done.why_not


def read_ahead(pair: Pair, lease: int, pieces: dict[int, Any]) -> None:
    for index, payload in pieces.items():
        pair.coder.read(ReadPiece(guest="guest", lease=lease, index=index, payload=payload))


def summed(pair: Pair) -> Tensor:
    pair.coder.collect()
    return torch.cat([p.grad.reshape(-1).float().cpu() for p in pair.tensors.trained if p.grad is not None])


TOLERANCE = {"none": 1e-6, "int8": 0.03, "int4": 0.5, "thin": 1.0}


@every_codec
@pytest.mark.parametrize("host_too", [True, False])
def test_contributions_are_added_to_the_hosts_gradients(codec: str, host_too: bool) -> None:
    with Pair(codec).running() as pair:
        for step in range(3):
            host = [torch.full(p.shape, 10.0 + step) for p in pair.tensors.trained]
            for parameter, value in zip(pair.tensors.trained, host):
                parameter.grad = value.clone() if host_too else None
            given = [gradients(pair, seed) for seed in range(2)]
            for lease, values in enumerate(given):
                assert decode(pair, lease, contribute(pair, lease, values)) is None  # type: ignore[arg-type]
            expected = torch.cat([(a + b).reshape(-1) for a, b in zip(*given)])
            if host_too:
                expected = expected + 10.0 + step
            assert (summed(pair) - expected).abs().amax() <= 2 * TOLERANCE[codec]


def test_a_host_with_cores_to_spare_reads_pieces_side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()

    def noting(*given: Any) -> Tensor:
        threads.add(threading.current_thread().name)
        return from_wire(*given)

    monkeypatch.setattr(host_coder, "usable_cores", lambda: 16)
    monkeypatch.setattr(host_coder, "from_wire", noting)
    with Pair("thin").running() as pair:
        given = gradients(pair, 1)
        pieces = contribute(pair, 1, given)  # type: ignore[arg-type]
        read_ahead(pair, 7, {0: b"of a lease that was taken back"})
        read_ahead(pair, 1, pieces)
        assert decode(pair, 1, pieces) is None
        expected = torch.cat([g.reshape(-1) for g in given])
        assert (summed(pair) - expected).abs().amax() <= TOLERANCE["thin"]
        read_ahead(pair, 2, {**pieces, 0: b""})
        assert decode(pair, 2, {**pieces, 0: b""}) is not None, "of a faulty contribution nothing counts"
    assert threads
    assert threads <= {f"potluck-coder_{n}" for n in range(4)}


@pytest.mark.parametrize("left", [True, False], ids=["the guest left", "its lease was taken back"])
def test_pieces_that_will_not_count_are_not_kept(monkeypatch: pytest.MonkeyPatch, left: bool) -> None:
    """Those that wait for a thread are not decoded any more. What is decoded is let go: up to 256 MiB a guest."""
    begun, go = threading.Semaphore(0), threading.Event()

    def held(*given: Any) -> Tensor:
        begun.release()
        assert go.wait(DEADLINE_S)
        return from_wire(*given)

    monkeypatch.setattr(host_coder, "usable_cores", lambda: 8)  # two threads
    monkeypatch.setattr(host_coder, "from_wire", held)
    with Pair("thin").running() as pair:
        pieces = contribute(pair, 1, gradients(pair, 1))  # type: ignore[arg-type]
        assert len(pieces) > 2
        read_ahead(pair, 1, pieces)
        for _ in range(2):
            assert begun.acquire(timeout=DEADLINE_S)
        arriving = pair.coder._arriving["guest"]
        if left:
            pair.coder.forget("guest")
        else:
            pair.coder.collect()
        assert not pair.coder._arriving
        assert sum(ready.cancelled() for _, ready in arriving.pieces.values()) == len(pieces) - 2
        go.set()
        assert decode(pair, 2, contribute(pair, 2, gradients(pair, 2))) is None  # type: ignore[arg-type]


def test_a_piece_that_was_replaced_after_it_was_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_coder, "usable_cores", lambda: 16)
    with Pair("thin").running() as pair:
        old, new = (contribute(pair, 1, gradients(pair, seed)) for seed in (1, 2))  # type: ignore[arg-type]
        read_ahead(pair, 1, old)
        assert decode(pair, 1, new) is None
        expected = torch.cat([g.reshape(-1) for g in gradients(pair, 2)])
        assert (summed(pair) - expected).abs().amax() <= 2 * TOLERANCE["thin"]


def test_messages_that_are_made_side_by_side_are_sent_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where later ones are done first, and an update or a newcomer comes in between."""
    threads: set[str] = set()

    def uneven(*given: Any) -> Any:
        threads.add(threading.current_thread().name)
        time.sleep(0.002 * (len(threads) % 3))
        return to_wire(*given)

    monkeypatch.setattr(host_coder, "usable_cores", lambda: 16)
    monkeypatch.setattr(host_coder, "to_wire", uneven)
    with Pair("thin").running() as pair:
        pair.sync()
        wholes = pair.wholes
        for _ in range(4):
            pair.update()
            pair.sync()
            pair.check_same_bits()
        assert pair.wholes == wholes
        assert pair.changes == 4 * pair.pieces
        for number in range(20):
            pair.coder.code_change()
            time.sleep(0.0007 * (number % 5))
            pair.update()
        pair.sync()
        pair.check_same_bits()
    assert len(threads) > 1
    assert threads <= {f"potluck-coder_{n}" for n in range(4)}


def test_the_codec_of_changes_can_change_with_each_version() -> None:
    """The replica is what both hold, whatever codec brought them there."""
    with Pair("int4").running() as pair:
        pair.sync()
        wholes = pair.wholes
        for codec in ("", "thin:1.25", "int4", "thin:1.25", "none"):
            pair.update()
            pair.coder.code_change(codec)
            pair.until(pair.coded)
            pair.until(pair.fed)
            replica = pair.check_same_bits()
        assert pair.wholes == wholes
        assert (replica - flat(pair.tensors)).abs().amax() < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("on_host", [False, True])
def test_exact_changes_leave_the_guest_with_the_hosts_weights_in_bf16(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, on_host: bool
) -> None:
    """To the bit, as if all were sent; also after changes in another codec, and across fp16."""
    monkeypatch.setattr(changes, "THIN_BITS", 99.0)  # these pieces are so small that no message pays
    monkeypatch.setattr(changes, "MOST_CHANGED", 2.0)
    device = FakeDevice() if on_host else None
    with Pair("thin:1.25", dtype, device, replica_on_host=on_host).running() as pair:
        pair.sync()
        wholes = pair.wholes
        for number, size in enumerate((1e-2, 1e-4, 1e-3, 1.0, 1e-5, 1e-4)):
            pair.update(size)
            codec = "thin:1.25" if number == 2 else BF16_CHANGES
            pair.sync(codec)
            replica = pair.check_same_bits()
            assert {piece.codec for piece in pair.state} <= {codec, ""}
            if codec == BF16_CHANGES:
                expected = [p.detach().cpu().to(torch.bfloat16).to(p.dtype).float() for p in pair.tensors.trained]
                bits = torch.cat([e.reshape(-1) for e in expected]).view(torch.int32)
                assert torch.equal(replica.view(torch.int32), bits)
        assert pair.wholes == wholes


def test_a_piece_whose_exact_change_is_longer_than_thins_is_sent_in_thin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SMALLEST_PIECE", 600)
    sent: list[str] = []
    with Pair("thin:1.25", torch.bfloat16).running() as pair:
        pair.sync()
        plain_pump = pair.feeding.pump
        pair.feeding.pump = lambda member: _noting(plain_pump(member), sent)  # type: ignore[method-assign]
        with pair.coder.updating(), torch.no_grad():
            for parameter in pair.tensors.trained[:2]:  # all values of the first pieces, nothing of the last
                parameter.add_(torch.randn(parameter.shape).to(parameter))
        pair.sync(BF16_CHANGES)
        pair.check_same_bits()
        assert set(sent) == {DOWN_THIN, BF16_CHANGES}
        sent.clear()
        pair.update(0.0)
        pair.sync(BF16_CHANGES)
        assert set(sent) == {DOWN_THIN, BF16_CHANGES}, "it is tried again with every step"


def _noting(actions: list[Any], sent: list[str]) -> list[Any]:
    sent += [action.message.codec for action in actions if getattr(action, "message", None)]
    return actions


def test_weights_that_are_not_finite_are_sent_whole_not_as_exact_changes() -> None:
    with Pair("thin:1.25").running() as pair:
        pair.sync()
        wholes = pair.wholes
        with pair.coder.updating(), torch.no_grad():
            pair.tensors.trained[0].view(-1)[0] = torch.nan
        pair.sync(BF16_CHANGES)
        assert pair.wholes > wholes


def test_weights_that_bf16_could_round_to_infinity_are_not_sent_as_exact_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    followed: list[float] = []
    monkeypatch.setattr(changes, "THIN_BITS", 99.0)  # these pieces are so small that no message pays
    monkeypatch.setattr(changes, "follow", lambda target, replica: followed.append(float(target.abs().amax())))
    with Pair("thin:1.25").running() as pair:
        pair.sync()
        with pair.coder.updating(), torch.no_grad():
            pair.tensors.trained[0].view(-1)[0] = 3.4e38
        pair.coder.code_change(BF16_CHANGES)
        pair.until(pair.coded)
    assert 0 < len(followed) < pair.pieces
    assert max(followed) < 10


def test_the_residual_outlives_a_change_of_the_codec() -> None:
    """What int4 and thin lost of the first contributions is in the last, which is exact: the sum is right."""
    with Pair("int4").running() as pair:
        values = gradients(pair, 1)
        for lease, codec in enumerate(("", "thin", "int4", "thin", "none")):
            pieces = contribute(pair, lease, list(values), codec)
            assert decode(pair, lease, pieces, codec) is None
            if codec == "thin":
                why_not = decode(pair, lease, pieces, "")
                assert "bytes" in str(why_not), "it was decoded as what it is not"
        expected = 5 * torch.cat([value.reshape(-1) for value in values])
        assert torch.allclose(summed(pair), expected, atol=1e-4)


def test_a_step_without_contributions_leaves_the_gradients_alone() -> None:
    with Pair("int4").running() as pair:
        decode(pair, 1, contribute(pair, 1, gradients(pair, 1)))  # type: ignore[arg-type]
        pair.coder.collect()
        for parameter in pair.tensors.trained:
            parameter.grad = torch.ones_like(parameter)
        assert summed(pair).eq(1).all(), "the sum of the last step was added again"


def test_bf16_gradients_are_summed_in_float32() -> None:
    with Pair("none", torch.bfloat16).running() as pair:
        for lease in range(3):
            values: list[Tensor | None] = [torch.full(p.shape, 1.0 + 2.0**-7) for p in pair.theirs.trained]
            decode(pair, lease, contribute(pair, lease, values))
        assert summed(pair)[0].item() == pytest.approx(3.0 + 3 * 2.0**-7, rel=2.0**-8)
        assert pair.tensors.trained[0].grad is not None
        assert pair.tensors.trained[0].grad.dtype == torch.bfloat16


@pytest.mark.parametrize("host_too", [True, False])
def test_a_parameter_that_the_guest_did_not_reach_stays_as_the_host_has_it(host_too: bool) -> None:
    """Where the host has no gradient for it either, the optimizer must not see one."""
    with Pair("none").running() as pair:
        values: list[Tensor | None] = list(gradients(pair, 1))
        values[1] = None
        assert decode(pair, 1, contribute(pair, 1, values)) is None
        for parameter in pair.tensors.trained:
            parameter.grad = torch.ones_like(parameter) if host_too else None
        pair.coder.collect()
        for parameter, value in zip(pair.tensors.trained, values):
            expected = None if value is None else value
            if host_too:
                expected = torch.ones_like(parameter) + (0.0 if value is None else value)
            assert (parameter.grad is None) == (expected is None)
            assert parameter.grad is None or torch.allclose(parameter.grad, expected)  # type: ignore[arg-type]


def test_a_layer_that_the_host_has_frozen_gets_no_gradient_of_a_guest() -> None:
    """It would be trained by the guests alone."""
    with Pair("none").running() as pair:
        values = gradients(pair, 1)
        assert decode(pair, 1, contribute(pair, 1, values)) is None  # type: ignore[arg-type]
        frozen, *others = pair.tensors.trained
        frozen.requires_grad_(False)
        pair.coder.collect()
        assert frozen.grad is None
        for parameter, value in zip(others, values[1:]):
            assert parameter.grad is not None
            assert torch.allclose(parameter.grad, value)


@every_codec
@pytest.mark.parametrize("fault", ["nan", "inf", "short", "long", "empty"])
@pytest.mark.parametrize("before", [True, False])
def test_of_a_faulty_contribution_nothing_is_in_the_sum(codec: str, fault: str, before: bool) -> None:
    """Also where only its last piece is faulty, and whether others were added before it or come after."""
    with Pair(codec).running() as pair:
        good = contribute(pair, 1, gradients(pair, 1))  # type: ignore[arg-type]
        bad = dict(good)
        last = pair.pieces - 1
        if fault in ("nan", "inf"):
            count = pair.tensors.layout.pieces[last].count
            values = torch.ones(count)
            values[-1] = float(fault)
            bad[last] = bytes(to_wire(get(codec), get(codec).encode(values)))
        else:
            bad[last] = {"short": good[last][:-1], "long": good[last] + b"x", "empty": b""}[fault]
        leases = [(1, good), (2, bad)] if before else [(2, bad), (1, good)]
        for lease, pieces in leases:
            why_not = decode(pair, lease, pieces)
            assert (why_not is None) == (lease == 1)
            if why_not is not None:
                assert ("not finite" in why_not) == (fault in ("nan", "inf"))
                assert ("bytes" in why_not) == (fault not in ("nan", "inf"))
        alone = torch.cat([get(codec).decode(from_wire(get(codec), good[p.index], p.count), p.count)
                           for p in pair.tensors.layout.pieces])  # fmt: skip
        assert torch.equal(summed(pair), alone)


@every_codec
def test_a_contribution_far_larger_than_the_hosts_own_does_not_count(codec: str) -> None:
    """And two that are finite each, but not together, are no numbers any more: see what is made of the sum."""
    with Pair(codec).running() as pair:
        good = contribute(pair, 1, gradients(pair, 1))  # type: ignore[arg-type]
        norm = float(torch.cat([g.reshape(-1) for g in gradients(pair, 1)]).norm())
        values: list[Tensor | None] = [torch.full(p.shape, 2e38) for p in pair.tensors.trained]
        huge = contribute(pair, 2, values)
        for lease in (2, 3):
            assert decode(pair, lease, huge) is None, "nothing is known yet of the host's own"
        assert not bool(total_norm([summed(pair)]).isfinite())
        for parameter in pair.tensors.trained:
            parameter.grad = None
        pair.coder.most_a_sample = 1000 * norm / 4
        assert decode(pair, 4, good) is None
        why_not = decode(pair, 5, huge)
        assert why_not is not None
        assert "its gradient is too large: a norm of up to" in why_not
        assert bool(summed(pair).isfinite().all())
        assert float(summed(pair).norm()) < 100 * norm


@every_codec
def test_hostile_bytes_of_the_right_length_are_finite_or_refused(codec: str) -> None:
    with Pair(codec).running() as pair:
        generator = torch.Generator().manual_seed(3)
        for lease in range(20):
            pieces = {
                p.index: bytes(
                    torch.randint(0, 256, (get(codec).nbytes(p.count),), generator=generator).byte().numpy()
                )
                for p in pair.tensors.layout.pieces
            }
            decode(pair, lease, pieces)
        for parameter in pair.tensors.trained:
            parameter.grad = torch.zeros_like(parameter)
        assert summed(pair).isfinite().all()


def test_a_contribution_goes_before_coding_and_coding_before_newcomers() -> None:
    pair = Pair("int4")
    pair.coder.code_change()
    pair.coder.ask("probe", Item("whole", 0, 4), None)
    pieces = {p.index: bytes(get("int4").nbytes(p.count)) for p in pair.tensors.layout.pieces}
    pair.coder.decode(Decode(guest="guest", lease=1, pieces=pieces, loss_sum=0.0, count=4))
    pair.coder.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(pair.coder.results) < pair.pieces + 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        pair.coder.close()
    kinds = [type(result).__name__ for result in pair.coder.results]
    assert kinds == ["ContributionDecoded", *["PieceCoded"] * pair.pieces, "PartRead"]


def test_the_hosts_device_need_not_be_the_guests() -> None:
    """Everything that leaves or enters is staged through host memory."""
    pair = Pair("int4", device=FakeDevice())
    with pair.running():
        pair.sync()
        for _ in range(3):
            pair.update()
            pair.sync()
            pair.check_same_bits()
        values = gradients(pair, 1)
        assert decode(pair, 1, contribute(pair, 1, values)) is None  # type: ignore[arg-type]
        expected = torch.cat([v.reshape(-1) for v in values])
        assert (summed(pair) - expected).abs().amax() <= TOLERANCE["int4"]
        assert pair.tensors.trained[0].grad is not None
        assert pair.tensors.trained[0].grad.device.type == "fake"


def test_a_fault_of_the_coder_is_said_and_not_swallowed() -> None:
    """A thread that dies without a word would leave the host waiting for a contribution for good."""
    with Pair("int4").running() as pair:
        pair.coder.decode(Decode(guest="guest", lease=1, pieces={}, loss_sum=0.0, count=4))
        deadline = time.monotonic() + DEADLINE_S
        while not pair.coder.results:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (failed,) = pair.coder.results
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, KeyError)

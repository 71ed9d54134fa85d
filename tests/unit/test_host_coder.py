"""Host and guest hold the same bits of every piece, and of a contribution everything or nothing is in the sum."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.codec import get
from potluck.device import Device, pick
from potluck.hub.feed import NOTHING, Feed, Item, TensorPart
from potluck.hub.guest import GuestHub, Work
from potluck.hub.host_coder import Answer, Coded, Decoded, Failed, HostCoder
from potluck.hub.tensors import ModelTensors
from potluck.spec import layout as layouts
from potluck.wire.frames import Message
from support.fake_device import FakeDevice

DEADLINE_S = 20.0
every_codec = pytest.mark.parametrize("codec", ["none", "int8", "int4"])


@pytest.fixture(autouse=True)
def _small_pieces_on_one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Models of these tests have a few thousand values, and should have more than one piece all the same."""
    monkeypatch.setattr(layouts, "SMALLEST_PIECE", 256)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Net(nn.Module):
    """Weights of several types, one of them tied, one frozen, and a buffer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embedding = nn.Linear(24, 40, dtype=dtype)
        self.middle = nn.Linear(40, 40)
        self.frozen = nn.Linear(40, 8)
        self.head = nn.Linear(24, 40, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.rand(5))


class FakeLink:
    """The guest's connection, without one: what it says is kept, what it should hear is given to `hear`."""

    def __init__(self) -> None:
        self.failure = None
        self.lost: Callable[[], None]
        self.back: Callable[[Message], None]
        self.ended: Callable[[], None]
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.sent: list[Message] = []

    def handle(self, handler: Callable[[str, Message], None]) -> None:
        self.hear = handler

    def control(self, kind: str, *frames: bytes, **fields: Any) -> None:
        self.said.append((kind, fields))

    def data(self, message: Message) -> None:
        self.sent.append(message)

    def close(self, reason: str = "") -> None:
        pass


class Pair:
    """A host's coder and a guest's hub, with the rules of the feed between them and no socket."""

    def __init__(self, codec: str, dtype: torch.dtype = torch.float32, device: Device | None = None) -> None:
        torch.manual_seed(1)
        self.device = device or pick("cpu")
        self.model = Net(dtype)
        theirs = copy.deepcopy(self.model)
        with torch.no_grad():
            for tensor in (*theirs.parameters(), *theirs.buffers()):
                tensor.copy_(torch.rand_like(tensor))
        self.model.to(self.device.torch_device)
        self.tensors, self.theirs = ModelTensors(self.model), ModelTensors(theirs)
        self.pieces = len(self.tensors.layout.pieces)
        assert self.pieces > 4
        self.said = threading.Event()
        self.coder = HostCoder(
            self.tensors, down=get(codec), up=get(codec), device=self.device, notify=self.said.set
        )
        self.feed = Feed(pieces=self.pieces, window_bytes=2000)
        self.feed.open = True
        self.link = FakeLink()
        self.guest = GuestHub(self.link, self.theirs, down=get(codec), up=get(codec), device=pick("cpu"))  # type: ignore[arg-type]
        self.decoded: list[Decoded] = []
        self.probed: dict[int, Tensor] = {}
        self.changes = self.wholes = 0

    @contextmanager
    def running(self) -> Iterator[Pair]:
        self.coder.start()
        self.guest.open(lambda: 1)
        try:
            yield self
        finally:
            self.guest.close()
            self.coder.close()

    # -- the I/O thread's part

    def pump(self) -> None:
        state = list(self.coder.state)
        while (item := self.feed.next(state)) is not None:
            if item.kind == "change":
                self.changes += 1
                piece = state[item.index]
                fields = {"piece": item.index, "base": piece.base, "version": piece.version}
                frames = (bytes(piece.change),)  # type: ignore[call-overload]
                self.link.hear("data", Message(kind="change", fields=fields, frames=frames))
                self.feed.change_sent(item, piece.version)
            else:
                part = self.feed.tensors[0] if item.kind == "tensor" else None
                self.feed.asked(item)
                self.coder.ask("guest", item, part)

    def turn(self) -> None:
        while self.coder.results:
            result = self.coder.results.popleft()
            if isinstance(result, Decoded):
                self.decoded.append(result)
            elif isinstance(result, Answer) and result.guest == "probe":
                self.probed[result.item.index] = torch.frombuffer(bytearray(result.payload), dtype=torch.float32)
            elif isinstance(result, Answer):
                self.answer(result)
            else:
                assert isinstance(result, Coded), result
        while self.link.said:
            kind, fields = self.link.said.pop(0)
            if kind == "taken":
                self.feed.taken(fields["bytes"])
        self.pump()

    def answer(self, answer: Answer) -> None:
        frames = (bytes(answer.payload),)
        if answer.part is not None:
            fields: dict[str, Any] = {"name": answer.part.name, "start": answer.part.start}
            self.link.hear("data", Message(kind="tensor", fields=fields, frames=frames))
        else:
            self.wholes += 1
            fields = {"piece": answer.item.index, "version": answer.version}
            self.link.hear("data", Message(kind="whole", fields=fields, frames=frames))
        self.feed.answered(answer.item, answer.version)

    def until(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.turn()
            if done():
                return
            assert time.monotonic() < deadline, "nothing happens any more"
            time.sleep(0.0005)

    # -- what tests do

    def update(self, size: float = 1e-2) -> None:
        with self.coder.updating(), torch.no_grad():
            for parameter in self.tensors.trained:
                parameter.add_((torch.randn(parameter.shape) * size).to(parameter))

    def sync(self) -> None:
        """Code the weights as they are and wait until the guest has taken everything."""
        self.coder.code_change()
        self.until(lambda: all(s.version == self.coder.version for s in self.coder.state))
        self.until(lambda: self.feed.current(self.coder.state) and not self.feed.in_flight_bytes)

    def replica(self) -> Tensor:
        self.probed.clear()
        for piece in self.tensors.layout.pieces:
            self.coder.ask("probe", Item("whole", piece.index, 0), None)
        self.until(lambda: len(self.probed) == self.pieces)
        return torch.cat([self.probed[i] for i in range(self.pieces)])

    def check_same_bits(self) -> Tensor:
        replica = self.replica()
        assert torch.equal(replica, flat(self.theirs)), "the guest's weights are not the replica"
        return replica


def flat(tensors: ModelTensors) -> Tensor:
    return torch.cat([p.detach().cpu().reshape(-1).float() for p in tensors.trained])


BOUND = {"none": 1e-6, "int8": 1e-3, "int4": 1e-2}
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
            assert all(s.version == 0 for s in pair.coder.state), "weights were read while they changed"
        pair.sync()
        assert [s.version for s in pair.coder.state] == [2] * pair.pieces
        pair.check_same_bits()


@every_codec
def test_a_guest_that_sat_out_gets_wholes_and_then_changes_again(codec: str) -> None:
    with Pair(codec).running() as pair:
        pair.sync()
        pair.feed.open = False
        for _ in range(3):
            pair.update()
            pair.coder.code_change()
            pair.until(lambda: all(s.version == pair.coder.version for s in pair.coder.state))
        assert not torch.equal(pair.replica(), flat(pair.theirs))
        pair.feed.open = True
        wholes = pair.wholes
        pair.sync()
        assert pair.wholes == wholes + pair.pieces
        pair.update()
        pair.sync()
        assert pair.wholes == wholes + pair.pieces
        pair.check_same_bits()


def test_a_change_that_everybody_has_is_let_go_and_its_version_stays() -> None:
    with Pair("int4").running() as pair:
        pair.sync()
        pair.update()
        pair.sync()
        for index, state in enumerate(pair.coder.state):
            assert state.change is not None
            pair.coder.release(index, state.version - 1)  # of an older version: nothing
            assert pair.coder.state[index] == state
            pair.coder.release(index, state.version)
            assert (pair.coder.state[index].change, pair.coder.state[index].base) == (None, NOTHING)
        assert pair.feed.current(pair.coder.state)
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


def contribute(pair: Pair, lease: int, values: list[Tensor | None]) -> dict[int, Any]:
    """The guest's own way from gradients to coded pieces."""
    work = Work(id=lease, check=False, step=0, sizes=(1,), received=0.0)
    pair.link.sent.clear()
    pair.guest.enter(work)
    for parameter, value in zip(pair.theirs.trained, values):
        parameter.grad = None if value is None else value.to(parameter.dtype)
    pair.guest.code(work, [2, 0])  # two pieces are final early
    pair.guest.finish(work, count=1, loss_sum=1.5, compute_s=0.1)
    pair.guest.leave()
    *grads, done = pair.link.sent
    assert done.kind == "done"
    assert done.fields["finite"] == all(bool(v.isfinite().all()) for v in values if v is not None)
    assert {g.fields["piece"] for g in grads} == set(range(pair.pieces))
    return {g.fields["piece"]: bytes(g.frames[0]) for g in grads}


def decode(pair: Pair, lease: int, pieces: dict[int, Any]) -> str | None:
    pair.coder.decode("guest", lease, pieces, 1.5)
    pair.until(lambda: bool(pair.decoded))
    done = pair.decoded.pop()
    assert (done.guest, done.lease, done.loss_sum) == ("guest", lease, 1.5)
    return done.why_not


def summed(pair: Pair) -> Tensor:
    pair.coder.collect()
    return torch.cat([p.grad.reshape(-1).float().cpu() for p in pair.tensors.trained if p.grad is not None])


TOLERANCE = {"none": 1e-6, "int8": 0.03, "int4": 0.5}


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


def test_a_parameter_that_the_guest_did_not_reach_counts_as_zero() -> None:
    with Pair("none").running() as pair:
        values: list[Tensor | None] = list(gradients(pair, 1))
        values[1] = None
        assert decode(pair, 1, contribute(pair, 1, values)) is None
        expected = [torch.zeros_like(p) if v is None else v for p, v in zip(pair.theirs.trained, values)]
        assert torch.allclose(summed(pair), torch.cat([e.reshape(-1) for e in expected]))


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
            bad[last] = bytes(get(codec).encode(values).numpy().data)
        else:
            bad[last] = {"short": good[last][:-1], "long": good[last] + b"x", "empty": b""}[fault]
        leases = [(1, good), (2, bad)] if before else [(2, bad), (1, good)]
        for lease, pieces in leases:
            why_not = decode(pair, lease, pieces)
            assert (why_not is None) == (lease == 1)
            if why_not is not None:
                assert ("not finite" in why_not) == (fault in ("nan", "inf"))
                assert ("bytes" in why_not) == (fault not in ("nan", "inf"))
        alone = torch.cat([get(codec).decode(torch.frombuffer(bytearray(good[p.index]), dtype=torch.uint8), p.count)
                           for p in pair.tensors.layout.pieces])  # fmt: skip
        assert torch.equal(summed(pair), alone)


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
    pair.coder.decode("guest", 1, pieces, 0.0)
    pair.coder.start()
    try:
        deadline = time.monotonic() + DEADLINE_S
        while len(pair.coder.results) < pair.pieces + 2:
            assert time.monotonic() < deadline
            time.sleep(0.001)
    finally:
        pair.coder.close()
    kinds = [type(result).__name__ for result in pair.coder.results]
    assert kinds == ["Decoded", *["Coded"] * pair.pieces, "Answer"]


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
        pair.coder.decode("guest", 1, {}, 0.0)
        deadline = time.monotonic() + DEADLINE_S
        while not pair.coder.results:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        (failed,) = pair.coder.results
        assert isinstance(failed, Failed)
        assert isinstance(failed.error, KeyError)

"""The guest's two threads: weights never change under a computation, gradients are never freed under the coder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from potluck.codec import Codec, get
from potluck.device import pick
from potluck.hub import layout as layouts
from potluck.hub.guest import GuestHub
from potluck.hub.guest_work import Arrivals, Work
from potluck.hub.model_tensors import ModelTensors
from potluck.spec.messages import FromGuest, FromHost
from potluck.wire.frames import FROM_HOST
from potluck.wire.tree import pack_tree
from support.plain import Plain, packed, plain

DEADLINE_S = 10.0
A_WHILE_S = 0.2
"""Long enough for a thread to do what it should not."""


class FakeLink:
    """Keeps what the guest says; the test speaks as the host."""

    def __init__(self) -> None:
        self.said: list[tuple[str, dict[str, Any]]] = []
        self.failure: BaseException | None = None
        self.handler: Callable[[FromHost, Sequence[bytes | memoryview]], None] = lambda message, frames: None

    def handle(self, handler: Callable[[FromHost, Sequence[bytes | memoryview]], None]) -> None:
        self.handler = handler

    def hear(self, kind: str, *frames: bytes | memoryview, **fields: Any) -> None:
        self.handler(*FROM_HOST.read(packed(Plain(kind=kind, fields=fields, frames=frames))))

    def send(self, message: FromGuest, *frames: bytes | memoryview) -> None:
        self.said.append((message.kind, plain(message).fields))

    def close(self, reason: str = "", *, failed: bool = False) -> None:
        self.said.append(("closed", {"reason": reason}))


class Held:
    """A codec whose work stands still, once it has begun, until the test lets it go on."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()

    def hold(self) -> None:
        self.begun.clear()
        self.go_on.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def _wait(self) -> None:
        self.begun.set()
        assert self.go_on.wait(DEADLINE_S)

    def decode(self, *args: Any, **kwargs: Any) -> Tensor:
        self._wait()
        return self._codec.decode(*args, **kwargs)

    def finite(self, *args: Any) -> bool:
        self._wait()  # asked of every piece of the gradient that has been coded
        return self._codec.finite(*args)


class Guest:
    """A hub over a small model of several pieces, spoken to as the host would."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.tensors = ModelTensors(self.model)
        self.link = FakeLink()
        self.codec = Held(get("none"))
        codec: Any = self.codec
        self.hub = GuestHub(self.link, self.tensors, down=codec, up=codec, device=pick("cpu", threads=1))  # type: ignore[arg-type]
        self.hub.open(lambda: (1, 4))
        self.pieces = self.tensors.layout.pieces
        assert len(self.pieces) > 2

    def weights(self) -> Tensor:
        return torch.cat([p.detach().flatten() for p in self.tensors.trained]).clone()

    def brings(self, kind: str, index: int, version: int, value: float = 1.0) -> None:
        """The host sends a piece, whole or its change from the version before."""
        payload = torch.full((self.pieces[index].count,), value).numpy().tobytes()
        fields = {"piece": index, "version": version, "base": version - 1}
        self.link.hear(kind, payload, **fields)

    def brings_all(self, kind: str, version: int) -> None:
        for piece in self.pieces:
            self.brings(kind, piece.index, version)

    def asks(self, kind: str, step: int) -> Work:
        """The host asks for work; it is begun."""
        fields = {"lease": 7, "check": 7, "step": step, "sizes": [1, 2], "quota": 1, "within_s": 0.5}
        self.link.hear(kind, **fields)
        work = self.hub.next_work()
        self.hub.enter(work)
        return work

    def revokes(self) -> None:
        self.link.hear("revoke", lease=7)

    def ends(self, work: Work) -> None:
        self.hub.let_go(work)
        self.hub.leave()

    def eventually(self, found: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not found():
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guest]:
    monkeypatch.setattr(layouts, "SMALLEST_PIECE", 256)
    guest = Guest()
    guest.brings_all("whole", 0)
    guest.eventually(lambda: bool((guest.weights() == 1.0).all()))
    yield guest
    guest.codec.go_on.set()
    guest.hub.close()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_weights_stand_still_under_work_that_is_over(guest: Guest) -> None:
    work = guest.asks("lease", step=1)
    guest.brings("change", 0, 1)
    guest.hub.wait_for_pieces(work, [0])
    guest.revokes()
    loss = guest.model(torch.ones(2, 16)).sum()
    before = guest.weights()
    guest.brings("change", 1, 1)
    guest.hub.wait_for_pieces(work, [1])  # does not wait for it: nobody needs the result
    time.sleep(A_WHILE_S)
    assert torch.equal(guest.weights(), before)
    loss.backward()  # torch raises here if a weight has changed since the forward
    guest.ends(work)
    guest.eventually(lambda: not torch.equal(guest.weights(), before))


def test_a_gate_opens_only_after_the_change_under_way(guest: Guest) -> None:
    work = guest.asks("lease", step=1)
    guest.codec.hold()
    guest.brings("change", 0, 1)
    assert guest.codec.begun.wait(DEADLINE_S)
    guest.revokes()
    passes = in_thread(lambda: guest.hub.wait_for_pieces(work, [1]))
    passes.join(A_WHILE_S)
    assert passes.is_alive(), "a forward would begin while a weight is being changed"
    guest.codec.go_on.set()
    passes.join(DEADLINE_S)
    assert not passes.is_alive()


def test_work_begins_only_after_the_change_under_way(guest: Guest) -> None:
    guest.codec.hold()
    guest.brings("change", 0, 1)
    assert guest.codec.begun.wait(DEADLINE_S)
    begins = in_thread(lambda: guest.asks("lease", step=0))
    begins.join(A_WHILE_S)
    assert begins.is_alive()
    guest.codec.go_on.set()
    begins.join(DEADLINE_S)
    assert not begins.is_alive()


def test_gradients_stay_until_the_coder_has_let_go_of_them(guest: Guest) -> None:
    work = guest.asks("lease", step=0)
    guest.model(torch.ones(2, 16)).sum().backward()
    guest.codec.hold()
    guest.hub.code(work, range(len(guest.pieces)))
    assert guest.codec.begun.wait(DEADLINE_S)
    guest.revokes()
    lets_go = in_thread(lambda: guest.hub.let_go(work))
    lets_go.join(A_WHILE_S)
    assert lets_go.is_alive(), "the gradient would be freed while the coder reads it"
    guest.codec.go_on.set()
    lets_go.join(DEADLINE_S)
    assert not lets_go.is_alive()
    sent = [fields["piece"] for kind, fields in guest.link.said if kind == "grad"]
    assert sent == [0], "the others were not begun any more"


def test_a_check_whose_weights_have_gone_on_is_given_back(guest: Guest) -> None:
    guest.brings("change", 0, 1)
    guest.eventually(lambda: bool((guest.weights()[:100] == 2.0).all()))
    work = guest.asks("check", step=0)
    assert work.over
    guest.hub.stopped(work, 0, 0.0)
    # By its number as a check, so that the host does not take it for a lease.
    assert ("stopped", {"lease": -7, "computed": 0, "compute_s": 0.0}) in guest.link.said


def test_a_check_is_over_when_its_weights_will_not_come_any_more(guest: Guest) -> None:
    work = guest.asks("check", step=1)
    guest.brings("change", 0, 1)
    guest.brings("whole", 1, 2)
    guest.hub.wait_for_all(work)
    assert work.over


def test_a_check_with_all_its_weights_takes_its_time(guest: Guest) -> None:
    work = guest.asks("check", step=1)
    guest.brings_all("change", 1)
    guest.hub.wait_for_all(work)
    guest.brings("change", 0, 2)
    time.sleep(A_WHILE_S)
    assert not work.over
    assert bool((guest.weights() == 2.0).all())
    guest.ends(work)
    guest.eventually(lambda: bool((guest.weights()[:100] == 3.0).all()))


# -- what it tells the host about itself


def delivers(guest: Guest, work: Work) -> dict[str, Any]:
    """A contribution leaves; what it ends with."""
    guest.hub.wait_for_all(work)
    guest.model(torch.ones(2, 16)).sum().backward()
    guest.hub.finish(work, count=1, loss_sum=1.0, compute_s=0.1)
    guest.ends(work)
    (fields,) = [fields for kind, fields in guest.link.said if kind == "done"]
    return fields


def test_it_says_how_many_samples_it_computes_at_once_and_could_at_most(guest: Guest) -> None:
    (ready,) = [fields for kind, fields in guest.link.said if kind == "ready"]
    assert ready == {"micro_batch": 1, "largest_micro_batch": 4, "ahead_bytes": guest.hub._kept.most_bytes}
    guest.hub._micro_batch = lambda: (2, 8)  # it has found out more since
    done = delivers(guest, guest.asks("lease", step=0))
    assert (done["micro_batch"], done["largest_micro_batch"]) == (2, 8)


def test_it_says_how_long_the_weights_took_to_arrive(guest: Guest) -> None:
    work = guest.asks("lease", step=1)
    started = time.monotonic()
    for piece in guest.pieces:
        guest.brings("change", piece.index, 1)
        time.sleep(0.02)
    took_s = time.monotonic() - started
    done = delivers(guest, work)
    gaps = len(guest.pieces) - 1
    assert 0.02 * len(guest.pieces) <= done["receive_s"] <= took_s * len(guest.pieces) / gaps


def test_it_says_nothing_of_weights_that_came_otherwise(guest: Guest) -> None:
    """Whole, because it had missed some: larger, and no measure of a change."""
    work = guest.asks("lease", step=1)
    guest.brings("whole", 0, 1)
    for piece in guest.pieces[1:]:
        guest.brings("change", piece.index, 1)
    assert delivers(guest, work)["receive_s"] == 0.0


def test_a_lease_says_how_many_of_its_samples_the_host_reckons_with(guest: Guest) -> None:
    work = guest.asks("lease", step=0)
    assert (work.sizes, work.quota, work.within_s) == ((1, 2), 1, 0.5)


def test_the_clock_starts_with_the_first_piece_and_counts_it_in() -> None:
    arrivals = Arrivals()
    assert arrivals.seconds(1, 4) == 0.0
    for number in range(4):
        assert arrivals.seconds(1, 4) == 0.0  # not all are here
        arrivals.note(1, 10.0 + 0.5 * number, 100)
    assert arrivals.seconds(1, 4) == pytest.approx(2.0)  # three gaps between four pieces
    assert arrivals.seconds(0, 4) == arrivals.seconds(2, 4) == 0.0
    arrivals.note(2, 20.0, 100)  # the next version: the clock starts anew
    assert arrivals.seconds(1, 4) == 0.0
    for number in range(1, 4):
        arrivals.note(2, 20.0 + number, 100)
    assert arrivals.seconds(2, 4) == pytest.approx(4.0)


def test_pieces_count_by_their_bytes() -> None:
    """Of 85,000 parameters the first of two pieces is three quarters: its way is not seen, but counts."""
    arrivals = Arrivals()
    arrivals.note(1, 10.0, 750)
    arrivals.note(1, 10.5, 250)
    assert arrivals.seconds(1, 2) == pytest.approx(2.0)


def test_one_piece_alone_has_no_duration() -> None:
    arrivals = Arrivals()
    arrivals.note(1, 10.0, 100)
    assert arrivals.seconds(1, 1) == 0.0


def test_more_pieces_than_there_are_say_nothing() -> None:
    """After a reconnection some come again."""
    arrivals = Arrivals()
    for number in range(3):
        arrivals.note(1, float(number), 100)
    assert arrivals.seconds(1, 2) == 0.0


def test_no_more_is_asked_for_at_once_than_can_be_sent(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.hub.guest.EASY_BATCH_BYTES", 3 * 4000)
    work = guest.asks("check", step=0)
    spec, frames = pack_tree(torch.zeros(1, 1000))
    guest.link.hear("samples", *frames, lease=work.key, batch=0, tree=spec)
    guest.hub.send_sketch(work, values=memoryview(b""), loss=1.0, compute_s=0.1, random={})
    said = dict(guest.link.said)["sketch"]
    assert (said["micro_batch"], said["largest_micro_batch"]) == (1, 3)  # it could compute 4
    guest.hub.leave()


def test_what_did_not_count_is_not_what_it_brought(guest: Guest) -> None:
    """Too late: the host had gone on. Or it was delivered, and the host dropped it."""
    work = guest.asks("lease", step=0)
    delivers(guest, work)
    assert guest.hub.dropped_samples == 0
    guest.link.hear("dropped", lease=0)  # a whole step that was not applied: nobody's samples
    guest.link.hear("dropped", lease=8)
    assert guest.hub.dropped_samples == 0
    guest.link.hear("dropped", lease=7)
    guest.link.hear("dropped", lease=7)
    assert guest.hub.dropped_samples == 1
    late = guest.asks("lease", step=0)
    guest.revokes()
    assert not guest.hub.finish(late, count=1, loss_sum=1.0, compute_s=0.1)


@pytest.mark.parametrize("kind", ["lease", "check"])
def test_a_guest_knows_the_epoch_of_its_step(guest: Guest, kind: str) -> None:
    guest.link.hear(kind, lease=7, check=7, step=0, sizes=[1], epoch=3)
    assert guest.hub.next_work().epoch == 3


def sends_ahead(guest: Guest, number: int, step: int, values: Tensor) -> None:
    """The host sends a micro-batch ahead of its lease, in two parts."""
    spec, (frame,) = pack_tree(values)
    half = len(frame) // 2
    guest.link.hear("ahead", frame[:half], batch=number, step=step, bytes=len(frame), tree=spec)
    guest.link.hear("ahead", frame[half:], batch=number, step=step, bytes=len(frame))


def test_a_lease_is_computed_from_what_came_ahead_and_what_comes_with_it(guest: Guest) -> None:
    sends_ahead(guest, 4, 1, torch.arange(3.0))
    sends_ahead(guest, 5, 1, torch.arange(2.0))
    taken = [fields for kind, fields in guest.link.said if kind == "taken" and fields["ahead"]]
    assert sum(fields["bytes"] for fields in taken) == 5 * 4
    guest.link.hear("lease", lease=7, step=1, sizes=[1, 3], quota=4, ahead=[0, 4])
    work = guest.hub.next_work()
    guest.hub.enter(work)
    spec, frames = pack_tree(torch.ones(1))
    guest.link.hear("samples", *frames, lease=7, batch=0, tree=spec)
    found = [guest.hub.batch(work, number) for number in range(2)]
    assert [each.tolist() for each in found if each is not None] == [[1.0], [0.0, 1.0, 2.0]]
    assert guest.hub._kept.nbytes == 0, "the other one was not needed"
    guest.ends(work)


def test_what_came_ahead_is_dropped_with_the_host(guest: Guest) -> None:
    sends_ahead(guest, 4, 1, torch.arange(3.0))
    assert guest.hub._kept.nbytes == 12
    guest.hub._lost()
    assert guest.hub._kept.nbytes == 0

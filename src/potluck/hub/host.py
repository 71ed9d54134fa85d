"""The host's hub: the I/O thread, the coder and the loader beside training, and what the training thread calls.

Owns the threads and the lock between them. What is decided is `protocol`; what is computed is the caller's.
The training thread never touches a socket and never waits here except where `take` says so.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from potluck.balance.leases import next_size
from potluck.errors import GuestsMissingError, LoopError, WireError
from potluck.failpoints import hit
from potluck.hub import actions as act
from potluck.hub.checks import CommonBatch, Packed
from potluck.hub.feed import TensorPart
from potluck.hub.host_coder import Answer, Coded, Decoded, Failed, Hashed, HostCoder
from potluck.hub.members import CHECKING, JOINING, Member
from potluck.hub.parity import Reference, judge
from potluck.hub.protocol import HostProtocol
from potluck.hub.recorder import Recorder
from potluck.hub.standstill import Standstill
from potluck.hub.stepping import StepResult
from potluck.hub.tensors import ModelTensors
from potluck.spec.events import FlightRecorded, RunEvent
from potluck.spec.messages import (
    DATA,
    ByeMessage,
    ChangeMessage,
    FromHost,
    SamplesMessage,
    TensorMessage,
    WelcomeMessage,
    WholeMessage,
)
from potluck.wire.frames import FROM_GUEST, VersionError, pack
from potluck.wire.transport import HostSocket
from potluck.wire.tree import pack_tree

PART_BYTES = 4 << 20
"""Frozen tensors travel in parts of this size."""
LOOK_AGAIN_S = 0.003
"""How soon the training thread sees that its device has nothing left to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubParts:
    """What the hub is built from."""

    socket: HostSocket
    protocol: HostProtocol
    coder: HostCoder
    tensors: ModelTensors
    welcome: Callable[[str], tuple[WelcomeMessage, tuple[bytes, ...]]]
    """The welcome for a guest that will be called so, and the script's files."""
    fetch: Callable[[Sequence[int]], Any]
    """The collated batch of these positions; None if their step is over."""
    emit: Callable[[RunEvent], None]
    early: Sequence[tuple[bytes, Sequence[Any]]] = ()
    """Messages that came before there was a hub."""
    recorder: Recorder = field(default_factory=lambda: Recorder("host", None))


class HostHub:
    """The host's table, open from `start` to `close`."""

    def __init__(self, parts: HubParts) -> None:
        self._socket, self._protocol, self._coder = parts.socket, parts.protocol, parts.coder
        self._parts = parts
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._outbox: deque[tuple[bytes, list[Any]]] = deque()
        self._references: dict[int, Reference] = {}
        self._guest_loss = 0.0
        self._bytes_up = self._bytes_down = 0
        self._hashes: dict[str, str] | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="potluck-loader")
        self._stop = False
        self._step_open = True
        """Whether the weights are those of a version: in a step, and before the first one."""
        self._failure: BaseException | None = None
        self._standstill = Standstill(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="potluck-io", daemon=True)

    # -- the training thread ----------------------------------------------------------------------------

    def start(self) -> None:
        self._standstill = Standstill(time.monotonic())
        self._coder.start()
        self._thread.start()

    def wait_for_guests(self, count: int, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until `count` guests hold the replica (False: stopped); the error names who came and how far."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                self._raise_failure()
                if stop():
                    return False
                if len(self._protocol.synced(self._coder.state)) >= count:
                    return True
                if time.monotonic() > deadline:
                    break
                self._changed.wait(0.2)
            ready = len(self._protocol.synced(self._coder.state))
            who = ", ".join(f"{m.name} is {m.state}" for m in self._protocol.members.values())
        raise GuestsMissingError(
            f"{ready} of {count} guests were ready after {timeout_s:.0f} s ({who or 'nobody came'})",
            hint="type the join command on the other machines, or start with --wait-for 0",
        )

    def begin_step(self, head_start_s: float = 0.0) -> None:
        """The weights are at the step's version, or will be when the device has done what it was given.

        Deals the step and sends the change to those who take part; for `head_start_s` see `Stepping.begin`.
        """
        with self._changed:
            self._raise_failure()
            self._step_open = True
            self._guest_loss = 0.0
            hit("host.before-step")
            now, pieces = time.monotonic(), self._coder.state
            keeps = self._protocol.terms.least.lease
            self._do(self._protocol.begin_step(now, pieces, host_keeps=keeps, head_start_s=head_start_s))
            if any(m.feed.open for m in self._protocol.members.values()):
                self._coder.code_change()
            hit("host.dealt")

    def take(self, count: int, busy: Callable[[], bool]) -> tuple[tuple[int, ...], CommonBatch | None]:
        """Positions for the host's next micro-batch (none: the step is full); how, if it is a common batch.

        `busy` says whether the host's own device is still computing: while it is, nobody is waited for, let alone
        given up, and when the last contribution comes the step goes on behind what the device still has, unless
        somebody needs the weights of this step.
        """
        ledger = self._protocol.ledger
        while True:
            with self._lock:
                stay = self._has_reason_to_stay()
            computing = stay and busy()  # without the lock, which it takes itself
            with self._changed:
                self._raise_failure()
                now = time.monotonic()
                self._excuse_guests(self._standstill.ongoing(now), now)
                if computing and self._has_reason_to_stay():
                    self._changed.wait(LOOK_AGAIN_S)
                    continue
                common = self._protocol.checks.due
                size = next_size(ledger.in_pool, count, self._protocol.terms.least.micro_batch) or count
                take, actions = self._protocol.stepping.take(common.samples if common else size, now)
                self._do(actions)
                if take.full:
                    return (), None
                if take.positions:
                    return take.positions, common
                assert take.wait_until is not None
                patience_s = max(0.001, take.wait_until - now)
                self._changed.wait(patience_s)
                # No longer than was meant to: what came on top, this machine slept.
                self._protocol.stepping.waited(min(patience_s, time.monotonic() - now))

    def _has_reason_to_stay(self) -> bool:
        """Whether there is reason not to end the step while the device computes: leases, or guests not yet let in.

        The device has the weights of this step only since it began with it: where the step is one micro-batch, that
        is all the time in which they can be coded, sent, and used by who is checked.
        """
        if self._protocol.ledger.in_pool:
            return False
        members = self._protocol.members.values()
        coded = all(piece.version == self._coder.version for piece in self._coder.state)
        waiting = any(m.state == CHECKING or (m.feed.open and not coded) for m in members)
        return waiting or not self._protocol.ledger.full

    def launched(self, positions: tuple[int, ...], sizes: Sequence[int]) -> None:
        """The host's device was given these; its ranks so many each."""
        with self._lock:
            self._protocol.stepping.host_launched(positions, sizes)

    def computed(self, samples: int, seconds: float) -> None:
        with self._lock:
            self._protocol.stepping.host_computed(samples, seconds)

    def pack_common(self, batch: Any) -> Packed:
        """A copy of the common batch as all who are checked on it will get it."""
        try:
            tree, frames = pack_tree(batch)
        except LoopError as error:
            return Packed(why_not=str(error))
        return Packed(tree=tree, frames=tuple(bytes(frame) for frame in frames))

    def check_computed(self, positions: tuple[int, ...], reference: Reference, batch: Packed) -> None:
        """The host's gradient of the common batch: guests are measured against it."""
        with self._lock:
            check, actions = self._protocol.checks.computed(positions, batch)
            self._references = {**dict(list(self._references.items())[-3:]), check: reference}
            self._do(actions)

    def end_step(self) -> tuple[StepResult, float]:
        """Close a full step and add the contributions to the gradients; also the guests' summed loss."""
        with self._lock:
            hit("host.before-end-step")
            result = self._protocol.stepping.end()
            self._step_open = False
            loss = self._guest_loss
        self._coder.collect()
        return result, loss

    def judged(self, step: int, norm: float, samples: int, *, applied: bool) -> None:
        """What the host's own gradient of a step came to: guests are judged by it, and bounded.

        `applied`: whether the whole gradient of the step was.
        """
        with self._changed:
            self._do(self._protocol.host_gradient(step, norm, samples))
            self._do([] if applied else self._protocol.not_applied())
            self._coder.most_a_sample = self._protocol.norms.most_a_sample

    def updating(self) -> AbstractContextManager[None]:
        """Around the optimizer's step: the weights change inside."""
        return self._coder.updating()

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        with self._lock:
            return self._protocol.ledger.samples_of(positions)

    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent since this was last asked."""
        with self._lock:
            counted = self._bytes_up, self._bytes_down
            self._bytes_up = self._bytes_down = 0
            return counted

    def host_sample_s(self) -> float | None:
        with self._lock:
            return self._protocol.stepping.host_sample_s

    def members(self) -> list[Member]:
        with self._lock:
            return list(self._protocol.members.values())

    def close(self, reason: str) -> None:
        """Tell the guests that the run is over, and end the threads."""
        hit("host.before-bye")
        if reason == "failed" and self._thread.is_alive() and self.members():  # else there are no messages to show
            self._parts.recorder.fault("the host's training failed")
        with self._lock:
            for guest in self._protocol.members:
                self._send(guest, ByeMessage(reason=reason))
            self._stop = True
        self._socket.wake()
        if self._thread.is_alive():
            self._thread.join(5.0)
        self._loader.shutdown(wait=False, cancel_futures=True)
        self._coder.close()
        self._socket.close()
        self._record(now=True)
        hit("host.closed")

    def _raise_failure(self) -> None:
        """What went wrong beside training (a data set that failed, a fault of ours) is raised in training."""
        if self._failure is not None:
            raise self._failure

    # -- the I/O thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._turn(self._parts.early)
            while not self._stop:
                self._turn(self._socket.receive(0.1))
            self._flush()
        except BaseException as error:
            self._parts.recorder.fault(f"the host's I/O failed: {type(error).__name__}")
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _excuse_guests(self, still_s: float, now: float) -> None:
        if still_s:
            self._do(self._protocol.stood_still(still_s, now))

    def _record(self, *, now: bool = False) -> None:
        """After a fault: what led to it, into the run's folder. Without the lock, it is a file."""
        recorder = self._parts.recorder
        if (path := recorder.write(now=now)) is not None:
            # Faults may come in numbers: where the records lie is told once.
            first = recorder.files == 1
            self._parts.emit(FlightRecorded(machine=recorder.name, path=str(path), first=first))

    def _turn(self, received: Sequence[tuple[bytes, Sequence[Any]]]) -> None:
        for peer, frames in received:
            self._receive(peer, frames)
        with self._changed:
            now = time.monotonic()
            self._excuse_guests(self._standstill.seconds(now), now)
            self._do(self._protocol.tick(now))
            while self._coder.results:
                self._coder_says(self._coder.results.popleft())
        self._flush()
        self._record()

    def _receive(self, peer: bytes, frames: Sequence[Any]) -> None:
        guest = peer[:-1].hex()
        address = self._socket.address_of(frames)
        with self._changed:
            try:
                message, payload = FROM_GUEST.read(frames)
            except VersionError as error:
                self._do(self._protocol.wrong_version(guest, error.theirs, address))
                return
            except WireError as error:
                self._do(self._protocol.unreadable(guest, error, address))
                return
            nbytes = sum(map(len, payload))
            self._bytes_up += nbytes
            self._parts.recorder.message("in", self._name_of(guest), message, nbytes)
            hit("host.received", message.kind)
            now = time.monotonic()
            # Before it: how long a contribution took is measured, too.
            self._excuse_guests(self._standstill.ongoing(now), now)
            self._do(self._protocol.message(guest, message, payload, now, address))
            hit("host.handled", message.kind)

    def _flush(self) -> None:
        while self._outbox:
            peer, frames = self._outbox.popleft()
            if not self._socket.send(peer, frames):
                with self._changed:
                    self._do(self._protocol.unreachable(peer[:-1].hex()))
        for peer, waiting_bytes in self._socket.overfull():
            with self._changed:
                self._do(self._protocol.reads_too_little(peer[:-1].hex(), waiting_bytes))

    def _name_of(self, guest: str) -> str:
        member = self._protocol.members.get(guest)
        return member.name if member is not None else guest

    def _coder_says(self, result: Answer | Decoded | Coded | Hashed | Failed) -> None:
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Coded):
            for member in list(self._protocol.members.values()):
                self._pump(member)
            self._changed.notify_all()
        elif isinstance(result, Decoded):
            hit("host.before-count")
            if result.why_not is None:
                self._guest_loss += result.loss_sum
            why_not, wrong = result.why_not, result.wrong_norm
            self._do(self._protocol.decoded(result.guest, result.lease, why_not, time.monotonic(), wrong))
            hit("host.counted")
        elif isinstance(result, Hashed):
            self._do(self._protocol.guard.hashed(result.version, result.digests, time.monotonic()))
        elif (answered := self._protocol.members.get(result.guest)) is not None:
            self._send_answer(answered, result)

    def _send_answer(self, member: Member, answer: Answer) -> None:
        if answer.part is not None:
            tensor = TensorMessage(name=answer.part.name, start=answer.part.start)
            self._send(member.id, tensor, (answer.payload,))
        else:
            whole = WholeMessage(piece=answer.item.index, version=answer.version)
            self._send(member.id, whole, (answer.payload,))
        member.feed.answered(answer.item, answer.version)
        self._pump(member)

    def _pump(self, member: Member) -> None:
        """Send this guest what it lacks, as far as its credit goes."""
        state = list(self._coder.state)
        while (item := member.feed.next(state)) is not None:
            if item.kind == "change":
                piece = state[item.index]
                change = ChangeMessage(piece=item.index, base=piece.base, version=piece.version)
                self._send(member.id, change, (piece.change,))
                member.feed.change_sent(item, piece.version)
                self._release(item.index, piece.version)
            else:
                part = member.feed.tensors[0] if item.kind == "tensor" else None
                member.feed.asked(item)
                self._coder.ask(member.id, item, part)
        self._do(self._protocol.guard.ask(member))

    def _release(self, index: int, version: int) -> None:
        """Let go of a coded change that every guest it is meant for has been sent."""
        fed = [m.feed for m in self._protocol.members.values() if m.feed.open]
        if all(feed.have[index] == version for feed in fed):
            self._coder.release(index, version)

    # -- actions ----------------------------------------------------------------------------------------

    def _do(self, actions: Sequence[act.Action]) -> None:
        for action in actions:
            match action:
                case act.Send():
                    self._send(action.guest, action.message, action.frames)
                case act.Emit():
                    self._parts.recorder.event(action.event)
                    self._parts.emit(action.event)
                case act.HashReplica():
                    self._coder.hash_version(action.version)
                case act.Wake():
                    self._changed.notify_all()
                case act.Pump():
                    self._pump(self._protocol.members[action.guest])
                case act.Decode():
                    self._coder.decode(action.guest, action.lease, action.pieces, action.loss_sum, action.count)
                case act.SendSamples():
                    self._count_unread(action, 1)
                    self._loader.submit(self._guarded, self._load, action)
                case act.SendWelcome():
                    self._send(action.guest, *self._parts.welcome(action.name))
                case act.SendReplica():
                    self._loader.submit(self._guarded, self._introduce, action)
                case act.CompareSketch():
                    self._loader.submit(self._guarded, self._compare, action)
                case act.Forget():
                    self._coder.forget(action.guest)

    def _send(self, guest: str, message: FromHost, frames: Sequence[Any] = ()) -> None:
        hit("host.sending", message.kind)
        peer = bytes.fromhex(guest) + (b"d" if message.channel == DATA else b"c")
        nbytes = sum(map(len, frames))
        self._bytes_down += nbytes
        self._parts.recorder.message("out", self._name_of(guest), message, nbytes)
        self._outbox.append((peer, pack(message, frames)))
        self._socket.wake()

    # -- the loader thread ------------------------------------------------------------------------------

    def _guarded(self, job: Callable[[Any], None], action: Any) -> None:
        """Whatever goes wrong in the loader (a data set that fails) is raised in the training thread."""
        try:
            job(action)
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _load(self, action: act.SendSamples) -> None:
        with self._lock:
            member = self._protocol.members.get(action.guest)
            if member is None or not member.holds(action.lease):
                return  # nobody waits for these any more
        batch = self._parts.fetch(action.positions)
        if batch is None:
            return
        try:
            spec, frames = pack_tree(batch)
        except LoopError as error:
            # The guest cannot help with such batches; the training itself is fine.
            with self._changed:
                member = self._protocol.members.get(action.guest)
                if member is not None:
                    reason = f"the samples cannot be sent: {error}"
                    self._do(self._protocol.put_out(member, reason, refused=True))
            return
        message = SamplesMessage(lease=action.lease, batch=action.batch, tree=spec)
        with self._lock:
            member = self._protocol.members.get(action.guest)
            if member is not None:
                self._count_unread(action, -1)
                member.feed.extra(sum(len(f) for f in frames))
                self._send(member.id, message, frames)

    def _count_unread(self, action: act.SendSamples, more: int) -> None:
        member = self._protocol.members.get(action.guest)
        if member is not None and member.lease is not None and member.lease.id == action.lease:
            member.lease.unread += more

    def _introduce(self, action: act.SendReplica) -> None:
        """Queue the fixed tensors that the newcomer lacks, then the replica."""
        hit("host.before-introduce")
        tensors = self._parts.tensors
        if self._hashes is None:
            self._hashes = tensors.hashes()
        self._hashes.update(tensors.buffer_hashes())  # unlike frozen parameters, they change
        parts = []
        for name, digest in self._hashes.items():
            if action.hashes.get(name) == digest:
                continue
            fixed = tensors.fixed[name]
            per_part = max(1, PART_BYTES // fixed.element_size())
            for start in range(0, fixed.numel(), per_part):
                stop = min(fixed.numel(), start + per_part)
                parts.append(TensorPart(name, start, stop, (stop - start) * fixed.element_size()))
        with self._changed:
            member = self._protocol.members.get(action.guest)
            if member is not None and member.state != JOINING:
                member.feed.tensors.extend(parts)
                member.feed.open = True
                # Between two steps the user's code may have other weights in the model (an evaluation): then
                # the next step will code them.
                if self._step_open:
                    self._coder.code_change()
                self._pump(member)
        hit("host.introduced")

    def _compare(self, action: act.CompareSketch) -> None:
        hit("host.before-compare")
        with self._lock:
            reference = self._references.get(action.check)
        if reference is None:
            with self._changed:
                reason = "its gradient came steps after the host's"
                self._protocol.checks.void(action.guest, action.check, reason)
            return
        if not reference.finite:
            with self._changed:
                reason = "the host's own gradient was not finite"
                self._protocol.checks.void(action.guest, action.check, reason)
            return
        verdict = judge(
            reference,
            action.sketch,
            action.loss,
            random=action.random,
            names=self._parts.tensors.layout.tensors,
        )
        with self._changed:
            self._do(self._protocol.checks.compared(action.guest, verdict))
        hit("host.compared")

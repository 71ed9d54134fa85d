"""The host's hub: the I/O thread, the coder and the loader beside training, and what the training thread calls.

Owns the threads and the lock between them, and decides nothing: it reports `inputs` to the protocol and performs
the `actions` that come back. The training thread never touches a socket and waits here only in `take`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from potluck.errors import GuestsMissingError, LoopError, WireError
from potluck.failpoints import hit
from potluck.hub import actions as act
from potluck.hub import inputs
from potluck.hub.feed import FixedTensor
from potluck.hub.host_coder import Failed, HostCoder
from potluck.hub.members import Member
from potluck.hub.model_tensors import ModelTensors
from potluck.hub.parity import Reference, judge
from potluck.hub.protocol import HostProtocol
from potluck.hub.recorder import Recorder
from potluck.hub.standstill import Standstill
from potluck.hub.thread import HubThread
from potluck.spec.events import FlightRecorded, RunEvent
from potluck.spec.messages import DATA, FromHost, WelcomeMessage
from potluck.wire.frames import FROM_GUEST, MalformedError, UnknownKindError, VersionError, pack
from potluck.wire.transport import HostSocket
from potluck.wire.tree import pack_tree, split_frames

TICK = inputs.Tick()


@dataclass(frozen=True, slots=True, kw_only=True)
class HubParts:
    """What the hub is built from."""

    socket: HostSocket
    protocol: HostProtocol
    coder: HostCoder
    tensors: ModelTensors
    welcome: Callable[[str], tuple[WelcomeMessage, tuple[bytes, ...]]]
    """The welcome for a guest of this name, and the script's files."""
    fetch: Callable[[Sequence[int]], Any]
    """The collated batch of these positions; None if their step is over."""
    fetch_ahead: Callable[[Sequence[int]], Any]
    """The collated batch of positions of the next step; None if it is not available yet."""
    emit: Callable[[RunEvent], None]
    early: Sequence[tuple[bytes, Sequence[Any]]] = ()
    """Messages that arrived before there was a hub."""
    recorder: Recorder = field(default_factory=lambda: Recorder("host", None))


class HostHub:
    """The host's side of the hub, open from `start` to `close`."""

    def __init__(self, parts: HubParts) -> None:
        self._socket, self._protocol, self._coder = parts.socket, parts.protocol, parts.coder
        self._parts = parts
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._outbox: deque[tuple[bytes, list[Any]]] = deque()
        self._bytes_up = self._bytes_down = 0
        self._hashes: dict[str, str] | None = None
        self._loader = HubThread("potluck-loader")
        # A thread of its own: the next step may have to be waited for, and this one's samples must not.
        self._ahead = HubThread("potluck-ahead")
        self._stop = False
        self._failure: BaseException | None = None
        self._standstill = Standstill(time.monotonic())
        self._thread = threading.Thread(target=self._run, name="potluck-io", daemon=True)

    # -- the training thread ----------------------------------------------------------------------------

    def start(self) -> None:
        self._standstill = Standstill(time.monotonic())
        self._coder.start()
        self._thread.start()

    def wait_for_guests(self, count: int, timeout_s: float, stop: Callable[[], bool]) -> bool:
        """Wait until `count` guests hold the replica. Returns False if stopped. The error names the guests and
        their states."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            while True:
                self._raise_failure()
                if stop():
                    return False
                if len(self._protocol.synced()) >= count:
                    return True
                if time.monotonic() > deadline:
                    break
                self._changed.wait(0.2)
            ready = len(self._protocol.synced())
            who = ", ".join(f"{m.name} is {m.state}" for m in self._protocol.members.values())
        raise GuestsMissingError(
            f"{ready} of {count} guests were ready after {timeout_s:.0f} s ({who or 'none are connected'})",
            hint="type the join command on the other machines, or start with --wait-for 0",
        )

    def begin_step(self, head_start_s: float = 0.0) -> None:
        """Give out the step's leases and send the weights' change to the guests that take part.

        The weights are at the step's version, or will be when the device has finished its queue. For `head_start_s`
        see `Stepping.begin`.
        """
        with self._lock:
            self._raise_failure()
            hit("host.before-step")
            self._hear_coder()  # the leases depend on who holds the newest replica
            self._handle(inputs.StepBegun(head_start_s=head_start_s), time.monotonic())
            hit("host.dealt")

    def take(
        self, count: int, busy: Callable[[], bool], made: Callable[[], int]
    ) -> tuple[tuple[int, ...], act.CommonBatch | None]:
        """Positions for the host's next micro-batch (none: the step is full); how, if it is a common batch.

        `made` says how many samples at the front of the pool are a micro-batch already, if any are.

        `busy` says whether the host's own device is still computing: while it is, no guest is waited for or given
        up. When the last contribution arrives, the update is queued after the device's remaining work, unless a
        guest needs the weights of this step.
        """
        computing: bool | None = None
        while True:
            with self._lock:
                self._raise_failure()
                now = time.monotonic()
                if still_s := self._standstill.ongoing(now):
                    self._handle(inputs.StoodStill(seconds=still_s), now)
                wanted = inputs.BatchWanted(count=count, made=made(), computing=computing)
                take = self._handle(wanted, now)
                assert isinstance(take, act.Take)
                if take.full or take.positions:
                    return take.positions, take.common
                if take.wait_until is not None:
                    patience_s = max(0.001, take.wait_until - now)
                    self._changed.wait(patience_s)
                    if take.idle:
                        # At most the time that was meant: beyond that, this machine slept.
                        waited_s = min(patience_s, time.monotonic() - now)
                        self._handle(inputs.HostWaited(seconds=waited_s), time.monotonic())
            # Without the lock: `busy` reports what was computed, and that takes the lock.
            computing = busy() if take.ask_device else None

    def launched(self, positions: tuple[int, ...], sizes: Sequence[int]) -> None:
        """The host's device was given these samples; `sizes` are its ranks' parts."""
        self._report(inputs.HostLaunched(positions=positions, sizes=tuple(sizes)))

    def computed(self, samples: int, seconds: float) -> None:
        self._report(inputs.HostComputed(samples=samples, seconds=seconds))

    def pack_common(self, batch: Any) -> inputs.Packed:
        """A copy of the common batch, for the guests to be checked."""
        try:
            tree, frames = pack_tree(batch)
        except LoopError as error:
            return inputs.Packed(why_not=str(error))
        return inputs.Packed(tree=tree, frames=tuple(bytes(frame) for frame in frames))

    def check_computed(self, positions: tuple[int, ...], reference: Reference, batch: inputs.Packed) -> None:
        """The host's gradient of the common batch: guests' are compared with it."""
        self._report(inputs.CommonComputed(positions=positions, batch=batch, reference=reference))

    def buffers_changed(self, module: str, names: tuple[str, ...]) -> None:
        """Computing changes these buffers; `module` is the type of the first one's."""
        self._report(inputs.BuffersChanged(module=module, names=names))

    def end_step(self) -> act.StepResult:
        """Close a full step and add the contributions to the gradients."""
        with self._lock:
            hit("host.before-end-step")
            result = self._handle(inputs.StepFilled(), time.monotonic())
        self._coder.collect()
        assert isinstance(result, act.StepResult)
        return result

    def judged(self, step: int, norm: float, samples: int, *, applied: bool) -> None:
        """The norm of the host's own gradient of a step, against which guests' gradients are checked.

        `applied`: whether the step's whole gradient was applied.
        """
        self._report(inputs.GradientKnown(step=step, norm=norm, samples=samples, applied=applied))

    def timed(self, step: int, samples: int, seconds: float, here: Sequence[str]) -> None:
        """How long a step took; `here`: guests on this machine, by their ids."""
        self._report(inputs.StepTimed(step=step, samples=samples, seconds=seconds, here=tuple(here)))

    def updating(self) -> AbstractContextManager[None]:
        """Put this around the optimizer's step, which changes the weights."""
        return self._coder.updating()

    def replica_in_place(self) -> AbstractContextManager[bool]:
        """Inside, the weights have the values that guests hold; False if these are not known yet."""
        return self._coder.replica_in_place()

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        with self._lock:
            return self._protocol.samples_of(positions)

    def traffic(self) -> tuple[int, int]:
        """Bytes received and sent since the last call."""
        with self._lock:
            counted = self._bytes_up, self._bytes_down
            self._bytes_up = self._bytes_down = 0
            return counted

    def host_sample_s(self) -> float | None:
        with self._lock:
            return self._protocol.host_sample_s

    def judges(self) -> bool:
        """Whether the norm of the host's own gradient of this step is needed, to check guests' gradients."""
        with self._lock:
            return self._protocol.judges

    def members(self) -> list[Member]:
        with self._lock:
            return list(self._protocol.members.values())

    def close(self, reason: str) -> None:
        """Tell the guests that the run is over, and end the threads."""
        hit("host.before-bye")
        if reason == "failed" and self._thread.is_alive() and self.members():  # else there are no messages to show
            self._parts.recorder.fault("the host's training failed")
        with self._lock:
            self._handle(inputs.HostClosing(reason=reason), time.monotonic())
            self._stop = True
        self._socket.wake()
        if self._thread.is_alive():
            self._thread.join(5.0)
        for threads in (self._loader, self._ahead):
            threads.close()
        self._coder.close()
        self._socket.close()
        self._record(now=True)
        hit("host.closed")

    def _raise_failure(self) -> None:
        """Raise errors of other threads in the training thread (for example, of a data set that failed)."""
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
            with self._lock:
                self._failure = error
                self._changed.notify_all()

    def _record(self, *, now: bool = False) -> None:
        """After a fault, write the flight record into the run's folder. Call it without the lock: it writes a
        file."""
        recorder = self._parts.recorder
        if (path := recorder.write(now=now)) is not None:
            # There may be many faults: tell only once where the records are.
            first = recorder.files == 1
            self._parts.emit(FlightRecorded(machine=recorder.name, path=str(path), first=first))

    def _turn(self, received: Sequence[tuple[bytes, Sequence[Any]]]) -> None:
        for peer, frames in received:
            self._receive(peer, frames)
        with self._lock:
            now = time.monotonic()
            if still_s := self._standstill.seconds(now):
                self._handle(inputs.StoodStill(seconds=still_s), now)
            self._handle(TICK, now)
            self._hear_coder()
        self._flush()
        self._record()

    def _receive(self, peer: bytes, frames: Sequence[Any]) -> None:
        guest = peer[:-1].hex()
        address = self._socket.address_of(frames)
        try:
            message, payload = FROM_GUEST.read(frames)
        except VersionError as error:
            self._report(inputs.OtherProtocolArrived(guest=guest, theirs=error.theirs, address=address))
            return
        except (UnknownKindError, MalformedError) as error:
            why = str(error)
            self._report(inputs.UnreadableArrived(guest=guest, kind=error.kind, why=why, address=address))
            return
        except WireError as error:
            self._report(inputs.UnreadableArrived(guest=guest, why=str(error), address=address))
            return
        nbytes = sum(map(len, payload))
        with self._lock:
            self._bytes_up += nbytes
            self._parts.recorder.message("in", self._name_of(guest), message, nbytes)
            hit("host.received", message.kind)
            now = time.monotonic()
            # First: the message may end the time of a contribution.
            if still_s := self._standstill.ongoing(now):
                self._handle(inputs.StoodStill(seconds=still_s), now)
            arrived = inputs.MessageArrived(guest=guest, message=message, frames=payload, address=address)
            self._handle(arrived, now)
            hit("host.handled", message.kind)

    def _flush(self) -> None:
        while self._outbox:
            peer, frames = self._outbox.popleft()
            if not self._socket.send(peer, frames):
                self._report(inputs.PeerUnreachable(guest=peer[:-1].hex()))
        for peer, waiting_bytes in self._socket.overfull():
            self._report(inputs.PeerNotReading(guest=peer[:-1].hex(), waiting_bytes=waiting_bytes))

    def _name_of(self, guest: str) -> str:
        member = self._protocol.members.get(guest)
        return member.name if member is not None else guest

    def _hear_coder(self) -> None:
        """Report the coder's results to the protocol, with the lock held: in their order, from any thread."""
        while self._coder.results:
            result = self._coder.results.popleft()
            if isinstance(result, Failed):
                raise result.error
            if not isinstance(result, inputs.ContributionDecoded):
                self._handle(result, time.monotonic())
                continue
            hit("host.before-count")
            self._handle(result, time.monotonic())
            hit("host.counted")

    # -- actions ----------------------------------------------------------------------------------------

    def _report(self, happened: inputs.Input) -> None:
        with self._lock:
            self._handle(happened, time.monotonic())

    def _handle(self, happened: inputs.Input, now: float) -> act.Take | act.StepResult | None:
        """Pass this input to the protocol, with the lock held, and perform its actions. Returns its reply, if
        any."""
        reply = None
        for action in self._protocol.handle(happened, now):
            if isinstance(action, act.Reply):
                reply = action.value
            else:
                self._perform(action)
        return reply

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Send():
                self._send(action.guest, action.message, action.frames)
            case act.Wake():
                self._changed.notify_all()
            case act.ReadPart():
                self._coder.ask(action.guest, action.item, action.part)
            case act.Emit():
                self._parts.recorder.event(action.event)
                self._parts.emit(action.event)
            case act.ReadPiece():
                self._coder.read(action)
            case act.Decode():
                self._coder.decode(action)
            case act.CodeChange():
                self._coder.code_change(action.codec)
            case act.HashReplica():
                self._coder.hash_version(action.version)
            case act.LimitNorm():
                self._coder.most_a_sample = action.most_a_sample
            case act.Forget():
                self._coder.forget(action.guest)
            case act.SendSamples():
                self._loader.submit(self._guarded, self._load, action)
            case act.SendAhead():
                self._ahead.submit(self._guarded, self._load_ahead, action)
            case act.HashFixed():
                self._loader.submit(self._guarded, self._hash_fixed, action)
            case act.CompareSketch():
                self._loader.submit(self._guarded, self._compare, action)
            case act.SendWelcome():
                self._send(action.guest, *self._parts.welcome(action.name))

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
        """Run this in the loader thread. An exception (for example, of the data set) is raised in the training
        thread."""
        try:
            job(action)
        except BaseException as error:
            with self._lock:
                self._failure = error
                self._changed.notify_all()

    def _load(self, action: act.SendSamples) -> None:
        with self._lock:
            held = self._protocol.holds(action.guest, action.lease)
        batch = self._parts.fetch(action.positions) if held else None
        if batch is None:
            return  # the lease or its step is over
        try:
            tree, frames = pack_tree(batch)
        except LoopError as error:
            self._report(inputs.SamplesNotPacked(guest=action.guest, why=str(error)))
            return
        self._report(
            inputs.SamplesPacked(
                guest=action.guest, lease=action.lease, batch=action.batch, tree=tree, frames=tuple(frames)
            )
        )

    def _load_ahead(self, action: act.SendAhead) -> None:
        batch = self._parts.fetch_ahead(action.positions)
        tree: Any = None
        frames: list[memoryview] = []
        if batch is not None:
            with contextlib.suppress(LoopError):  # its lease says why it cannot be sent
                tree, frames = pack_tree(batch)
        parts = tuple(part for frame in frames for part in split_frames(frame, action.part_bytes))
        self._report(inputs.AheadPacked(guest=action.guest, batch=action.batch, tree=tree, parts=parts))

    def _hash_fixed(self, action: act.HashFixed) -> None:
        hit("host.before-introduce")
        tensors = self._parts.tensors
        if self._hashes is None:
            self._hashes = tensors.hashes()
        self._hashes.update(tensors.buffer_hashes())  # unlike frozen parameters, they change
        fixed = tuple(
            FixedTensor(
                name=name,
                digest=digest,
                values=tensors.fixed[name].numel(),
                value_bytes=tensors.fixed[name].element_size(),
            )
            for name, digest in self._hashes.items()
        )
        self._report(inputs.FixedHashed(guest=action.guest, tensors=fixed))
        hit("host.introduced")

    def _compare(self, action: act.CompareSketch) -> None:
        hit("host.before-compare")
        verdict = judge(
            action.reference,
            action.sketch,
            action.loss,
            items=action.items,
            random=action.random,
            names=self._parts.tensors.layout.tensors,
        )
        self._report(inputs.SketchCompared(guest=action.guest, check=action.check, verdict=verdict))
        hit("host.compared")

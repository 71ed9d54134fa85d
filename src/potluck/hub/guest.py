"""A guest's hub: what the guest's training thread waits for, and the worker that applies and codes pieces.

Owns the guest's versions of the pieces and its residual. The training thread asks for work, computes it, and
reports the result.

Weights are applied only where that is safe: while the training thread computes at version v, changes that
lead to v may be applied (its gates wait for them), later ones are held until it has finished.
"""

from __future__ import annotations

import itertools
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from potluck.codec import Codecs
from potluck.device import Device, Mark
from potluck.errors import PotluckError, WireError
from potluck.failpoints import hit
from potluck.hub.ahead import MOST_BYTES
from potluck.hub.feed import NOTHING
from potluck.hub.guest_pieces import GuestPieces
from potluck.hub.guest_work import Arrivals, Kept, Work
from potluck.hub.hashes import PieceHashes
from potluck.hub.link import GuestLink, RawFrames
from potluck.hub.model_tensors import ModelTensors
from potluck.limits import usable_memory
from potluck.spec.messages import (
    MOST_ITEMS,
    MOST_LOSS,
    AheadMessage,
    ByeMessage,
    ChangeMessage,
    CheckMessage,
    ClosingMessage,
    DoneMessage,
    DroppedMessage,
    FromHost,
    GradMessage,
    HashedMessage,
    HashMessage,
    LeaseMessage,
    NoteMessage,
    ReadyMessage,
    ResyncMessage,
    RevokeMessage,
    SamplesMessage,
    SketchMessage,
    StoppedMessage,
    TakenMessage,
    TensorMessage,
    WholeMessage,
)
from potluck.wire.frames import Received, packed_model
from potluck.wire.tree import unpack_tree

MAX_BATCH_BYTES = 1 << 30
AHEAD_PART = 16
"""Share of this machine's memory for samples that come ahead of their lease."""
EASY_BATCH_BYTES = 1 << 28
"""The most bytes of samples requested in one batch, whatever the memory: half of what can be sent."""

REMEMBERED = 16
"""Number of recent contributions that the host may still reject."""

Update = ChangeMessage | WholeMessage | TensorMessage | HashMessage | ResyncMessage
"""Messages that the worker applies, in order of arrival."""


class RunOver(Exception):
    """The host says that the run has ended."""


class GuestHub:
    """Between `open` and `close`: a replica that follows the host's, and one piece of work at a time."""

    def __init__(self, link: GuestLink, tensors: ModelTensors, *, down: str, up: str, device: Device) -> None:
        """`down`, `up`: the default codecs of changes and of leases."""
        self._link, self._tensors, self._device = link, tensors, device
        self._pieces = GuestPieces(tensors, down=Codecs(down), up=Codecs(up), device=device)
        self._layout = tensors.layout
        self._changed = threading.Condition(threading.RLock())
        self._have = [NOTHING] * len(self._layout.pieces)
        self._handed: Work | None = None
        """Work that `next_work` has returned and the training thread has not begun."""
        self._active: Work | None = None
        """Work that the training thread computes now."""
        self._works: deque[Work] = deque()
        self._early: dict[int, dict[int, Any]] = {}
        """Samples that arrived before their lease (they use the other connection)."""
        self._kept = Kept(
            min(MOST_BYTES, usable_memory()[0] // AHEAD_PART),
            lambda tree, frames: unpack_tree(tree, frames, max_bytes=MAX_BATCH_BYTES),
        )
        self._incoming: deque[Received[Update]] = deque()
        self._busy = False
        """The worker is reading gradients or changing weights at this moment."""
        self._to_code: deque[tuple[Work, int, Mark]] = deque()
        self._final: set[int] = set()
        """Pieces of the active work's gradient that were queued for coding."""
        self._coded: set[int] = set()
        self._clear_residual = False
        self._finite = True
        self._hashes: dict[str, str] = {}
        self._hashing: PieceHashes | None = None
        """The replica's hash that the host has asked for."""
        self._over: str | None = None
        self._stop = False
        self._failure: BaseException | None = None
        self._arrivals = Arrivals()
        self._micro_batch: Callable[[], tuple[int, int]] = lambda: (1, 1)
        self._sample_bytes = 0.0
        self._delivered: dict[int, int] = {}
        """The samples of the last contributions, by lease."""
        self.dropped_samples = 0
        """Samples that were delivered and did not count."""
        self.note: Callable[[str], None] = lambda text: None
        """Called with the host's messages for the person at this machine."""
        self._worker = threading.Thread(target=self._run, name="potluck-coder", daemon=True)

    # -- the training thread ----------------------------------------------------------------------------

    def open(self, micro_batch: Callable[[], tuple[int, int]]) -> None:
        """Tell the host that the model is built, and start to follow it.

        `micro_batch` says how many samples this machine computes at once, and how many it could at most.
        """
        self._micro_batch = micro_batch
        self._hashes = self._tensors.hashes()  # once: what is frozen does not change, and may be large
        self._pieces.rehearse()
        self._worker.start()
        self._link.lost = self._lost
        self._link.back = self._say_ready
        self._link.ended = self._wake
        self._link.handle(self._message)
        self._say_ready()

    def _say_ready(self) -> None:
        # Names and hashes of a large model are too many for a header: they go in a frame of their own.
        hashes = {**self._hashes, **self._tensors.buffer_hashes()}
        usual, most = self._micro_batch()
        ready = ReadyMessage(micro_batch=usual, largest_micro_batch=most, ahead_bytes=self._kept.most_bytes)
        self._link.send(ready, packed_model(self._tensors.fingerprint, hashes))

    def next_work(self) -> Work:
        """Wait for the next lease or check. Raises RunOver, or the link's failure."""
        with self._changed:
            while True:
                self._wait(lambda: bool(self._works) or self._done_waiting())
                self._raise_end()
                work = self._works.popleft()
                if not work.over:
                    self._handed = work
                    return work
                self._tell_stopped(work, 0, 0.0)

    def enter(self, work: Work) -> None:
        """The training thread begins to compute at the work's version."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy)
            if any(have > work.step for have in self._have):
                work.over = True  # the weights have gone on before this could begin
            self._active, self._handed = work, None
            self._coded, self._final = set(), set()
            self._finite = True
            self._changed.notify_all()

    def let_go(self, work: Work) -> None:
        """From here on the worker does not read the work's gradients: they may be freed.

        torch crashes if one thread clears `.grad` while another holds it in Python.
        """
        with self._changed:
            self._to_code = deque(job for job in self._to_code if job[0] is not work)
            self._changed.wait_for(lambda: not self._busy)

    def leave(self) -> None:
        """The training thread has finished its work: later weights may be applied."""
        with self._changed:
            self._active = None
            self._changed.notify_all()

    def batch(self, work: Work, number: int) -> Any | None:
        """The samples of one micro-batch, or None when the work is over."""
        ahead = work.ahead[number] if number < len(work.ahead) else 0
        with self._changed:
            self._wait(lambda: number in work.batches or self._kept.has(ahead) or work.over or self._done_waiting())
            self._raise_end()
            if work.over:
                return None
            if number in work.batches:
                return work.batches.pop(number)
            batch, nbytes = self._kept.take(ahead)
            self._sample_bytes = max(self._sample_bytes, nbytes / work.sizes[number])
            return batch

    def wait_for_pieces(self, work: Work, pieces: Iterable[int]) -> float:
        """Wait until these pieces are at the work's version (or the work is over). Returns the seconds waited."""
        have, version = self._have, work.step
        if all(have[i] == version for i in pieces):
            return 0.0
        started = time.monotonic()
        with self._changed:
            # Work that is over is computed to its end, for nothing, on weights that nobody changes meanwhile.
            self._wait(
                lambda: (
                    all(have[i] == version for i in pieces)
                    or (work.over and not self._busy)
                    or self._done_waiting()
                )
            )
        return time.monotonic() - started

    def wait_for_all(self, work: Work) -> float:
        return self.wait_for_pieces(work, range(len(self._have)))

    def closing(self, work: Work, keep: int, eta_s: float) -> None:
        self._link.send(ClosingMessage(lease=work.id, keep=keep, eta_s=eta_s))

    def code(self, work: Work, pieces: Iterable[int]) -> None:
        """These pieces of the gradient are final: code and send them."""
        with self._changed:
            fresh = [index for index in pieces if index not in self._final]
            self._final.update(fresh)
            computed = self._device.mark()  # where work is queued, they are not there yet
            self._to_code.extend((work, index, computed) for index in fresh)
            self._changed.notify_all()

    def finish(
        self, work: Work, *, count: int, loss_sum: float, compute_s: float, items: float | None = None
    ) -> bool:
        """The gradient is complete: code the remaining pieces and tell the host. Returns False if it is too
        late."""
        with self._changed:
            self.code(work, range(len(self._have)))
            self._changed.wait_for(lambda: len(self._coded) == len(self._have) or work.over or self._done_waiting())
            self._raise_end()
            if work.over:
                self._tell_stopped(work, count, compute_s)
                return False
            finite = self._finite and abs(loss_sum) <= MOST_LOSS and 0.0 <= (items or 0.0) <= MOST_ITEMS
        usual, most = self._at_once()
        done = DoneMessage(
            lease=work.id,
            count=count,
            loss_sum=loss_sum if finite else 0.0,
            items=items if finite else None,
            compute_s=compute_s,
            finite=finite,
            receive_s=self._arrivals.seconds(work.step, len(self._have)),
            micro_batch=usual,
            largest_micro_batch=most,
        )
        hit("guest.before-finish")
        with self._changed:
            for old in list(self._delivered)[:-REMEMBERED]:
                del self._delivered[old]
            self._delivered[work.id] = count
        self._link.send(done)
        hit("guest.finished")
        return True

    def send_sketch(
        self,
        work: Work,
        *,
        values: memoryview,
        loss: float,
        compute_s: float,
        random: Mapping[str, str],
        items: float | None = None,
        bf16: bool = False,
    ) -> None:
        """Send the gradient of a common batch, and digests of the random generators after it."""
        usual, most = self._at_once()
        sketch = SketchMessage(
            check=work.id,
            count=sum(work.sizes),
            loss=loss if math.isfinite(loss) else None,
            items=items if items is not None and 0.0 <= items <= MOST_ITEMS else None,
            compute_s=compute_s,
            bf16=bf16,
            random=dict(random),
            micro_batch=usual,
            largest_micro_batch=most,
        )
        self._link.send(sketch, values)

    def _at_once(self) -> tuple[int, int]:
        """How many samples this machine computes at once and could at most, as far as they can be sent."""
        usual, most = self._micro_batch()
        room = max(2, int(EASY_BATCH_BYTES / self._sample_bytes)) if self._sample_bytes else most
        return min(usual, room), min(most, room)

    def stopped(self, work: Work, computed: int, compute_s: float) -> None:
        """Discard work that is over."""
        with self._changed:
            self._tell_stopped(work, computed, compute_s)

    def close(self, reason: str = "", *, failed: bool = False) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify_all()
        if self._worker.is_alive():
            self._worker.join(5.0)
        self._link.close(reason, failed=failed)

    def _tell_stopped(self, work: Work, computed: int, compute_s: float) -> None:
        self._to_code.clear()
        if work is self._active and self._final:
            self._clear_residual = True  # parts of it have left, and will not count
        self._link.send(StoppedMessage(lease=work.key, computed=computed, compute_s=compute_s))

    def _wait(self, condition: Callable[[], bool]) -> None:
        """Wait, in intervals of half a second, because Ctrl-C does not end a wait for a lock on every system."""
        while not self._changed.wait_for(condition, timeout=0.5):
            pass

    def _done_waiting(self) -> bool:
        ended = self._over is not None or self._failure is not None or self._link.failure is not None
        return ended or self._stop

    def _raise_end(self) -> None:
        if isinstance(self._failure, PotluckError):
            raise self._failure
        if self._failure is not None:
            raise PotluckError(f"this guest's worker failed: {self._failure!r}") from self._failure
        if self._over is not None:
            raise RunOver(self._over)
        if self._link.failure is not None:
            raise self._link.failure
        if self._stop:
            raise RunOver("this guest was closed")

    # -- the link's thread ------------------------------------------------------------------------------

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _lost(self) -> None:
        """The host is gone: unfinished work is void, and the held weights may be wrong."""
        with self._changed:
            for work in self._open_works():
                work.over = True
            self._incoming.clear()
            self._early.clear()
            self._kept.clear()
            self._clear_residual = True
            self._hashing = None
            self._have = [NOTHING] * len(self._have)
            self._changed.notify_all()

    def _open_works(self) -> list[Work]:
        return [*self._works, *(w for w in (self._handed, self._active) if w is not None)]

    def _message(self, message: FromHost, frames: RawFrames) -> None:
        with self._changed:
            match message:
                case ChangeMessage() | WholeMessage() | TensorMessage() | HashMessage() | ResyncMessage():
                    if isinstance(message, ChangeMessage | WholeMessage) and message.piece >= len(self._have):
                        raise WireError(f"the host sent piece {message.piece} of {len(self._have)}")
                    if isinstance(message, ChangeMessage):
                        self._arrivals.note(message.version, time.monotonic(), sum(map(len, frames)))
                    self._incoming.append(Received(message, tuple(frames)))
                case SamplesMessage():
                    self._samples(message, frames)
                case AheadMessage():
                    self._kept.add(message, frames[0])
                    self._link.send(TakenMessage(bytes=len(frames[0]), ahead=True))
                case LeaseMessage():
                    self._kept.leased(message.step, message.ahead)
                    self._new_work(
                        Work(
                            id=message.lease,
                            check=False,
                            step=message.step,
                            sizes=message.sizes,
                            epoch=message.epoch,
                            received=time.monotonic(),
                            quota=message.quota,
                            within_s=message.within_s,
                            host_sample_s=message.host_sample_s,
                            transfer_s=message.transfer_s,
                            tail_s=message.tail_s,
                            codec=message.codec,
                            ahead=message.ahead,
                        ),
                        frames,
                    )
                case CheckMessage(check=number, step=step, sizes=sizes, seed=seed, epoch=epoch):
                    now = time.monotonic()
                    work = Work(id=number, check=True, step=step, sizes=sizes, received=now, seed=seed, epoch=epoch)
                    self._new_work(work, frames)
                case RevokeMessage():
                    self._revoke(message.lease)
                case DroppedMessage():
                    self._clear_residual = True
                    self.dropped_samples += self._delivered.pop(message.lease, 0)
                case NoteMessage():
                    self.note(message.text)
                case ByeMessage():
                    self._over = message.reason
            self._changed.notify_all()

    def _new_work(self, work: Work, frames: RawFrames) -> None:
        if frames:
            samples = iter(struct.unpack(f"<{sum(work.sizes)}q", frames[0]))
            work.samples = [list(itertools.islice(samples, size)) for size in work.sizes]
        work.batches.update(self._early.pop(work.key, {}))
        self._early.clear()
        self._works.append(work)

    def _samples(self, message: SamplesMessage, frames: RawFrames) -> None:
        lease, number = message.lease, message.batch
        batch = unpack_tree(message.tree, frames, max_bytes=MAX_BATCH_BYTES)
        self._taken(frames)
        for work in self._open_works():
            if work.key == lease:
                work.batches[number] = batch
                if number < len(work.sizes):
                    self._sample_bytes = max(self._sample_bytes, sum(map(len, frames)) / work.sizes[number])
                return
        self._early.setdefault(lease, {})[number] = batch

    def _revoke(self, lease: int) -> None:
        for work in self._open_works():
            if not work.check and work.id == lease:
                work.over = True

    def _taken(self, frames: RawFrames) -> None:
        """Return credit to the host."""
        self._link.send(TakenMessage(bytes=sum(map(len, frames))))

    # -- the worker -------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self._device.beside():
                while self._turn():
                    pass
        except BaseException as error:
            with self._changed:
                self._failure, self._busy = error, False
                self._changed.notify_all()

    def _turn(self) -> bool:
        """Do one piece of work. Coding gradients comes first, because the host may be waiting for them; the hash
        comes last."""
        with self._changed:
            self._changed.wait_for(lambda: self._stop or self._to_code or self._can_apply() or self._hashing)
            if self._stop:
                return False
            job = self._to_code.popleft() if self._to_code else None
            received = self._incoming.popleft() if job is None and self._can_apply() else None
            clear, self._clear_residual = self._clear_residual, False
            self._busy = True
        with torch.no_grad():
            if clear:
                self._pieces.clear_residual()
            if received is not None:
                self._apply(*received)
            elif job is None:
                self._hash()
            elif not job[0].over:
                self._code(*job)
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        return True

    def _can_apply(self) -> bool:
        if not self._incoming:
            return False
        message, active = self._incoming[0].message, self._active
        if active is None or isinstance(message, HashMessage):
            return True
        if isinstance(message, ResyncMessage):
            active.over = True  # it is computed on weights that are not the host's
            self._changed.notify_all()
            return False
        # Work that is over passes its gates: what came for it must not change weights between its forward and
        # its backward.
        if isinstance(message, TensorMessage) or active.over:
            return False
        version = message.version
        # A check that has all its weights may take its time; one that lacks some will not get them any more.
        complete = active.check and all(have == active.step for have in self._have)
        if version > active.step and not complete:
            active.over = True  # the host has gone on: this work can no longer count
            self._changed.notify_all()
        return version <= active.step

    def _apply(self, message: Update, frames: RawFrames) -> None:
        if isinstance(message, HashMessage | ResyncMessage):
            self._compare_weights(message)
            return
        hit("guest.before-apply")
        if isinstance(message, TensorMessage):
            self._pieces.write_fixed(message, frames[0])
            self._device.mark().wait()
        else:
            index, version = message.piece, message.version
            self._hash(index)
            if isinstance(message, WholeMessage):
                self._pieces.write_whole(index, frames[0])
            elif self._have[index] == message.base:
                self._pieces.change(index, message.codec, frames[0])
            else:
                return  # of before a reconnection: the host will send this piece whole
            self._device.mark().wait()  # what the training thread computes from here on must see it
            with self._changed:
                self._have[index] = version
                self._changed.notify_all()
        hit("guest.applied")
        self._taken(frames)

    def _compare_weights(self, message: HashMessage | ResyncMessage) -> None:
        """The host asks for the replica's hash, or says that it was wrong and that all pieces come again."""
        version = message.version
        with self._changed:
            if isinstance(message, ResyncMessage):
                self._have = [NOTHING] * len(self._have)
                self._changed.notify_all()
            elif all(have == version for have in self._have):
                self._hashing = PieceHashes(version, len(self._have))
            else:
                # The host is wrong about what is held here.
                self._link.send(HashedMessage(version=version), b"")

    def _hash(self, index: int | None = None) -> None:
        """Add a piece to the current hash: any piece, or this one before it changes."""
        hashing = self._hashing
        if hashing is None:
            return
        index = hashing.next() if index is None else index
        if index is None or not hashing.lacks(index):
            return
        hashing.take(index, self._pieces.raw(index))
        with self._changed:
            if hashing.complete and self._hashing is hashing:  # the host has not been lost meanwhile
                self._hashing = None
                self._link.send(HashedMessage(version=hashing.version), hashing.digests())

    def _code(self, work: Work, index: int, computed: Mark) -> None:
        hit("guest.before-code")
        frame, finite = self._pieces.code(index, work.codec, computed)
        if not finite:
            self._finite = False
        self._link.send(GradMessage(lease=work.id, piece=index), frame)
        hit("guest.coded")
        with self._changed:
            self._coded.add(index)
            self._changed.notify_all()

"""The host's coder thread: codes the weights' change, keeps the replica, decodes and sums contributions.

Owns the replica and the sum; the training thread owns the weights. The I/O thread queues requests and finds the
answers in `results`, as inputs of the protocol.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.codec import (
    Codec,
    Codecs,
    add_decoded,
    changes,
    encode_change,
    from_wire,
    is_entropy_coded,
    rehearse,
    to_wire,
)
from potluck.codec.names import BF16_CHANGES, DOWN_THIN
from potluck.device import Device, Mark
from potluck.errors import WireError
from potluck.failpoints import hit
from potluck.hub.actions import Decode, ReadPiece
from potluck.hub.feed import NOTHING, Item, PieceState, TensorPart
from potluck.hub.hashes import PieceHashes
from potluck.hub.inputs import ContributionDecoded, Input, PartRead, PieceCoded, ReplicaHashed
from potluck.hub.layout import Piece
from potluck.hub.model_tensors import ModelTensors, raw_bytes, read_piece, round_to_types, write_piece
from potluck.limits import usable_cores

CODED_S = 1.0
"""The longest that the training thread waits for the weights' change to be coded: a second comparison needs it."""
NO_EXACT_STEPS = 16
MOST_EXACT = 6e4
"""Weights up to this value never become infinite when rounded to bf16 or fp16."""
MOST_READERS, CORES_A_READER = 4, 4
MOST_STAGED_BYTES = 256 << 20
"""A contribution up to this size is kept, until it is complete, in the memory that the device reads fastest."""
NOT_FINITE = "its gradient is not finite"
MOST_UNSENT = 8
"""The most pieces whose messages may be in progress; a piece has at most 12 MiB."""

Message = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Failed:
    """The coder thread ended with an error."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class _Unsent:
    """A piece that is coded, but whose message may not be complete."""

    index: int
    base: int
    version: int
    whole_bytes: int
    change: Message | Future[Message] | None
    codec: str


@dataclass(frozen=True, slots=True)
class _Ready:
    """A piece of a contribution, ready to be added."""

    payload: Tensor
    most_norm: float


@dataclass(frozen=True, slots=True)
class _Arriving:
    """The pieces of a contribution that are being prepared, each with its message."""

    lease: int
    pieces: dict[int, tuple[object, Future[_Ready]]]

    def cancel(self) -> None:
        """The contribution will not count: cancel what has not begun, and free what is done."""
        for _, ready in self.pieces.values():
            ready.cancel()


class HostCoder:
    """One thread with four queues, in this order: contributions, the change, the replica's hash, parts to read."""

    def __init__(
        self,
        tensors: ModelTensors,
        *,
        down: str,
        up: str,
        device: Device,
        notify: Callable[[], None],
        replica_on_host: bool = False,
    ) -> None:
        """
        Args:
            down: the default codec of changes.
            up: the default codec of contributions.
            replica_on_host: keep the replica in host memory, to save the device's.
        """
        self._tensors = tensors
        self._layout = tensors.layout
        self._down, self._up, self._device = Codecs(down), Codecs(up), device
        self._change_codec = ""
        self._no_exact_before: dict[int, int] = {}
        """Pieces whose exact change was longer than thin's, each with the version at which it is tried again."""
        self._notify = notify
        self.results: deque[Input | Failed] = deque()
        self.most_a_sample = math.inf
        """The norm of a contribution, divided by its samples, up to which it counts."""
        self.version = 0
        """The version of the weights: the number of updates made."""
        self.versions = [NOTHING] * len(self._layout.pieces)
        """The version of each piece of the replica."""
        self._replica: Tensor | None = None
        self._sum: Tensor | None = None
        self._sum_used = False
        self._replica_on_host = replica_on_host
        self._rooms: dict[str, Tensor] = {}
        # A device that queues work does not order the two threads' work; these marks do.
        self._weights_there = self._sum_there = self._sum_read = Mark()
        self._changed = threading.Condition()
        self._contributions: deque[Decode] = deque()
        self._arriving: dict[str, _Arriving] = {}
        """Pieces of each guest's contribution; filled by the I/O thread."""
        self._requests: deque[tuple[str, Item, TensorPart | None]] = deque()
        self._to_code: deque[int] = deque()
        self._hashing: PieceHashes | None = None
        self._weights = threading.Lock()
        self._update_wanted = False
        self._stop = False
        # A contribution of 124 M parameters takes 0.1 s of a core, and each guest delivers one every step.
        readers = min(MOST_READERS, usable_cores() // CORES_A_READER)
        self._readers = ThreadPoolExecutor(readers, "potluck-coder") if readers > 1 else None
        self._unsent: deque[_Unsent] = deque()
        self._thread = threading.Thread(target=self._run, name="potluck-coder", daemon=True)

    # -- the training thread ----------------------------------------------------------------------------

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Put this around a change of the weights. Pieces of the old version that are not coded yet are skipped."""
        self._update_wanted = True
        with self._weights:
            self._update_wanted = False
            with self._changed:
                self._to_code.clear()
            yield
            self.version += 1

    @contextmanager
    def replica_in_place(self) -> Iterator[bool]:
        """Inside, the weights have the values that guests hold, rounded by the codec. Afterwards they are
        restored.

        False: they are still the host's own, because their change was not coded within CODED_S.
        """
        trained = self._tensors.trained
        until = time.monotonic() + CODED_S
        while not self._coded and time.monotonic() < until:
            time.sleep(0.001)
        with self._weights:
            if not self._coded:
                yield False
                return
            with torch.no_grad():
                own = [parameter.detach().clone() for parameter in trained]
                for piece in self._layout.pieces:
                    write_piece(piece, trained, self._replica_of(piece))
            try:
                yield True
            finally:
                with torch.no_grad():
                    for parameter, values in zip(trained, own):
                        parameter.copy_(values)

    @property
    def _coded(self) -> bool:
        return all(version == self.version for version in self.versions)

    def code_change(self, codec: str = "") -> None:
        """Bring the replica to the weights' version, piece by piece, during training; from now on with this
        codec."""
        with self._changed:
            self._change_codec = codec
            self._weights_there = self._device.mark()
            version = self.version
            self._to_code = deque(i for i, coded in enumerate(self.versions) if coded != version)
            self._changed.notify()

    def hash_version(self, version: int) -> None:
        """Hash the replica once it is at this version. An older request that is not done is dropped."""
        with self._changed:
            self._hashing = PieceHashes(version, len(self.versions))
            self._changed.notify()

    def collect(self) -> None:
        """Add the contributions' sum to the gradients. Called when no contribution is being decoded."""
        late, self._arriving = self._arriving, {}  # of leases that were taken back; the next are not out yet
        for arriving in late.values():
            arriving.cancel()
        if not self._sum_used:
            return
        assert self._sum is not None
        self._device.after(self._sum_there)
        offset = 0
        gradients, parts = [], []
        for parameter in self._tensors.trained:
            part = self._sum[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
            if parameter.grad is not None:
                gradients.append(parameter.grad)
                parts.append(part)
            elif parameter.requires_grad and bool(part.any()):
                # A parameter that nobody used keeps no gradient, as on one machine; nor does one that the script
                # has frozen here.
                parameter.grad = part.to(parameter.dtype, copy=True)
        if gradients:
            torch._foreach_add_(gradients, parts)
        self._sum_read = self._device.mark()
        self._sum_used = False

    # -- the I/O thread ---------------------------------------------------------------------------------

    def ask(self, guest: str, item: Item, part: TensorPart | None) -> None:
        with self._changed:
            self._requests.append((guest, item, part))
            self._changed.notify()

    def read(self, piece: ReadPiece) -> None:
        """Prepare a piece on another thread. Without spare cores, `decode` does it."""
        if self._readers is None:
            return
        arriving = self._arriving.get(piece.guest)
        if arriving is None or arriving.lease != piece.lease:
            arriving = self._arriving[piece.guest] = _Arriving(piece.lease, {})
        if piece.index not in arriving.pieces:
            ready = self._readers.submit(self._ready, piece.codec, piece.index, piece.payload)
            arriving.pieces[piece.index] = piece.payload, ready

    def decode(self, contribution: Decode) -> None:
        with self._changed:
            self._contributions.append(contribution)
            self._changed.notify()

    def forget(self, guest: str) -> None:
        with self._changed:
            self._requests = deque(r for r in self._requests if r[0] != guest)
        if (arriving := self._arriving.pop(guest, None)) is not None:
            arriving.cancel()

    # -- the thread -------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        with self._changed:
            self._stop = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join()
        if self._readers is not None:
            self._readers.shutdown(cancel_futures=True)

    def _run(self) -> None:
        try:
            with self._device.beside():
                for codec in (*self._down.likely, *self._up.likely):
                    rehearse(codec, (piece.count for piece in self._layout.pieces), self._device.torch_device)
                while self._turn():
                    self._notify()
        except BaseException as error:
            self.results.append(Failed(error))
            self._notify()

    def _turn(self) -> bool:
        """Do one piece of work. Returns False when the thread should end."""
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stop
                    or self._contributions
                    or self._to_code
                    or self._unsent
                    or self._requests
                    or self._to_hash() is not None
                )
            )
            if self._stop:
                return False
            contribution = self._contributions.popleft() if self._contributions else None
            piece = self._to_code.popleft() if self._to_code and contribution is None else None
            free = contribution is None and piece is None and not self._unsent
            hashed = self._to_hash() if free else None
            request = self._requests.popleft() if free and hashed is None and self._requests else None
        with torch.no_grad():
            if contribution is not None:
                self._add(contribution)
            elif piece is not None:
                self._code(piece)
            elif self._unsent:
                self._hand_over(0)  # before anything that tells of these versions
            elif hashed is not None:
                self._hash(hashed)
            elif request is not None:
                self._answer(*request)
        return True

    def _to_hash(self) -> int | None:
        return None if self._hashing is None else self._hashing.next(self.versions)

    def _hash(self, index: int) -> None:
        hashing, piece = self._hashing, self._layout.pieces[index]
        if hashing is None or hashing.version != self.versions[index]:
            return  # another version has been asked for meanwhile
        values = self._replica_of(piece)
        hashing.take(index, raw_bytes(self._device.to_host(values)))
        if hashing.complete:
            self._hand_over(0)
            self.results.append(ReplicaHashed(version=hashing.version, digests=hashing.digests()))
            self._hashed(hashing)

    def _hashed(self, hashing: PieceHashes) -> None:
        with self._changed:
            if self._hashing is hashing:
                self._hashing = None

    def _before_change(self, index: int, old: int) -> None:
        """A piece is about to change its version: if the old version's hash is requested, compute it now."""
        hashing = self._hashing
        if hashing is None or not hashing.lacks(index):
            return
        if old == hashing.version:
            self._hash(index)
        elif hashing.version < self.version:
            self._hashed(hashing)  # the weights went on before this piece was there

    def _code(self, index: int) -> None:
        piece = self._layout.pieces[index]
        if self._update_wanted:
            return
        self._before_change(index, self.versions[index])
        with self._weights:
            version, old = self.version, self.versions[index]
            if old == version:
                return  # asked for twice: a second change of the same version would reach nobody
            hit("host.before-change")
            self._device.after(self._weights_there)
            name = self._change_codec
            target = read_piece(piece, self._tensors.trained, self._room("target", piece.count))
            kept = self._replica_of(piece)
            change: Message | Future[Message] | None = None
            base = old
            if old == NOTHING:
                kept.copy_(target)
                self._device.mark().wait()
            else:
                replica = self._brought(kept)
                if name == BF16_CHANGES:
                    change = self._exact_change(index, target, replica)
                    name = name if change is not None else DOWN_THIN
                payload = None
                if change is None:
                    down = self._down.called(name)
                    payload = encode_change(down, target, replica)
                round_to_types(piece, self._tensors.trained, replica)
                if replica is not kept:
                    kept.copy_(replica, non_blocking=True)
                if payload is None:
                    self._device.mark().wait()
                elif down.finite(sent := self._device.to_host(payload), piece.count):  # waits for all of the above
                    change = self._message(down, sent)
                else:
                    kept.copy_(target)
                    base = NOTHING  # sent whole, or the guests would never be right again
        with self._changed:
            self.versions[index] = version
        hit("host.change-coded")
        self._unsent.append(_Unsent(index, base, version, 4 * piece.count, change, name))
        self._hand_over(MOST_UNSENT)

    def _message(self, down: Codec, payload: Tensor) -> Message | Future[Message]:
        """The message of a change; with spare cores it is entropy coded while the next pieces are processed."""
        if self._readers is None or not is_entropy_coded(down):
            return to_wire(down, payload)
        return self._readers.submit(to_wire, down, payload)

    def _hand_over(self, most: int) -> None:
        """Report coded pieces in order: those that are done, then wait until at most `most` are left."""
        while self._unsent:
            first = self._unsent[0]
            change = first.change
            if isinstance(change, Future):
                if len(self._unsent) <= most and not change.done():
                    return
                change = change.result()
            self._unsent.popleft()
            sizes = 0 if change is None else len(change), first.whole_bytes
            state = PieceState(first.base, first.version, *sizes, change, first.codec)
            self.results.append(PieceCoded(index=first.index, piece=state))

    def _exact_change(self, index: int, target: Tensor, replica: Tensor) -> bytes | None:
        """The message of the changes in bf16, which are also applied to the replica; None if thin is shorter."""
        if self.version < self._no_exact_before.get(index, 0):
            return None
        found = changes.differences(target, replica)
        message = None
        if changes.worth_sending(found) and float(target.abs().amax()) <= MOST_EXACT:  # not where one is NaN
            message = changes.to_wire(self._device.to_host(found))
        if message is None or not changes.worth_sending(found, message):
            self._no_exact_before[index] = self.version + NO_EXACT_STEPS
            return None
        changes.follow(target, replica)
        return message

    def _answer(self, guest: str, item: Item, part: TensorPart | None) -> None:
        if part is not None:
            values = self._tensors.fixed[part.name].detach().reshape(-1)[part.start : part.stop]
            payload = raw_bytes(self._device.to_host(values).clone())
            self.results.append(PartRead(guest=guest, item=item, version=0, payload=payload, part=part))
            return
        piece = self._layout.pieces[item.index]
        values = self._replica_of(piece)
        payload = raw_bytes(self._device.to_host(values).clone())
        version = self.versions[item.index]
        self.results.append(PartRead(guest=guest, item=item, version=version, payload=payload))

    def _add(self, given: Decode) -> None:
        """Add all of a contribution or nothing: check every piece first."""
        why_not = wrong = None
        hit("host.before-decode")
        try:
            pieces = self._all_ready(given)
            norm = math.hypot(*(piece.most_norm for piece in pieces))
            if math.isinf(norm) or norm > given.count * self.most_a_sample:
                wrong = norm
                raise WireError(NOT_FINITE if math.isinf(wrong) else self._too_large(wrong, given.count))
            if self._sum is None:
                self._sum = torch.empty(self._layout.count, device=self._device.torch_device)
            self._sum_up(self._up.called(given.codec), [piece.payload for piece in pieces], self._sum)
            self._sum_used = True
        except WireError as error:
            why_not = str(error)
        hit("host.decoded")
        self.results.append(
            ContributionDecoded(
                guest=given.guest,
                lease=given.lease,
                loss_sum=given.loss_sum,
                items=given.items,
                why_not=why_not,
                wrong_norm=wrong,
            )
        )

    def _all_ready(self, given: Decode) -> list[_Ready]:
        arriving = self._arriving.pop(given.guest, None)
        early = {} if arriving is None or arriving.lease != given.lease else arriving.pieces

        def ready(index: int) -> _Ready:
            message, future = early.get(index, (None, None))
            if future is not None and message is given.pieces[index]:
                return future.result()
            return self._ready(given.codec, index, given.pieces[index])

        return [ready(piece.index) for piece in self._layout.pieces]

    def _ready(self, codec: str, index: int, message: Message) -> _Ready:
        """Called by the readers and by the coder's thread."""
        up, count = self._up.called(codec), self._layout.pieces[index].count
        payload = from_wire(up, message, count)
        if self._readers is not None and up.nbytes(self._layout.count) <= MOST_STAGED_BYTES:
            payload = self._device.staged(payload)
        return _Ready(payload, up.most_norm(payload, count))

    def _too_large(self, norm: float, count: int) -> str:
        return (
            f"its gradient is too large: a norm of up to {norm / max(count, 1):.3g} a sample, where the host's own "
            f"lets {self.most_a_sample:.3g} count (guest_bound)"
        )

    def _sum_up(self, up: Codec, payloads: list[Tensor], total: Tensor) -> None:
        """Add as many pieces at a time as the device prefers, with one copy and one pass."""
        self._device.after(self._sum_read)
        pieces, most = self._layout.pieces, self._device.parts_at_once
        for start in range(0, len(pieces), most):
            some = pieces[start : start + most]
            counts = [p.count for p in some]
            payload = self._device.joined(payloads[start : start + most])
            part = total[some[0].offset : some[-1].offset + some[-1].count]
            add_decoded(
                up,
                payload,
                counts,
                part,
                first=not self._sum_used,
                room=lambda count: self._room("decoded", count),
            )
        self._sum_there = self._device.mark()

    def _replica_of(self, piece: Piece) -> Tensor:
        """The replica's values of a piece, in the memory that keeps them."""
        if self._replica is None:
            count = self._layout.count
            self._replica = (
                self._device.host_buffer(count)
                if self._replica_on_host
                else torch.empty(count, device=self._device.torch_device)
            )
        return self._replica[piece.offset : piece.offset + piece.count]

    def _brought(self, kept: Tensor) -> Tensor:
        """The replica's values on the device; a copy where the replica is in host memory."""
        if kept.device.type == self._device.torch_device.type:
            return kept
        return self._room("replica", kept.numel()).copy_(kept, non_blocking=True)

    def _room(self, name: str, count: int) -> Tensor:
        """Memory for one piece, reused."""
        room = self._rooms.get(name)
        if room is None or room.numel() < count:
            room = self._rooms[name] = torch.empty(count, device=self._device.torch_device)
        return room[:count]

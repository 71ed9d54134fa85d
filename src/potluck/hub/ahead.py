"""Samples sent ahead: those that a guest will probably compute in the next step, sent while its link is idle.

PURE. Owns the list of micro-batches that were sent ahead of their lease, and limits the bytes in flight.

A micro-batch that was sent ahead is not leased: its positions stay in the pool. The next lease names the
micro-batches that it needs and contains the other samples. The guest drops what was not named. Weights and the
samples of leases go first: nothing is sent ahead before a guest has been sent all of both, and only a few parts of
about 10 ms each are in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from potluck.balance.leases import Speed, split_evenly
from potluck.balance.ledger import Ledger
from potluck.hub.actions import Action, Send, SendAhead, SendSamples
from potluck.hub.inputs import AheadPacked
from potluck.spec.messages import MOST_AHEAD, AheadMessage

if TYPE_CHECKING:
    from potluck.hub.feeding import Feeding
    from potluck.hub.members import Member

MOST_BYTES = 256 << 20
"""The most that a guest keeps of samples sent ahead, whatever its memory. A step gets half: two may overlap."""
LEAST_BYTES = 256 << 10
"""A lease of fewer bytes is not sent ahead: it takes no time, and can be cut again for each step."""
SMALLEST_PART_BYTES, LARGEST_PART_BYTES = 16 << 10, 128 << 10
PART_S = 0.01
"""A part takes a link about this long, within these bounds."""
PARTS_UNDER_WAY = 2
CLOSE = 50
"""A lease may differ from its quota by one sample in this many, so that it can use exactly what was sent ahead."""


@dataclass(slots=True, kw_only=True)
class AheadBatch:
    """One micro-batch that is sent ahead, or is to be."""

    number: int
    step: int
    positions: tuple[int, ...]
    tree: Any = None
    parts: deque[Any] = field(default_factory=deque)
    """The parts that are still to be sent."""
    nbytes: int = 0
    sent_bytes: int = 0

    @property
    def begun(self) -> bool:
        return self.sent_bytes > 0


@dataclass(slots=True, kw_only=True)
class Ahead:
    """What was sent ahead to one guest."""

    most_bytes: int = 0
    """The most bytes that the guest stores; 0: it accepts nothing ahead."""
    sample_bytes: float = 0.0
    """Bytes per sample of its last micro-batch."""
    wanted: deque[int] = field(default_factory=deque)
    """The sizes of the micro-batches to come, for the step after `of_step`."""
    of_step: int = -1
    batches: list[AheadBatch] = field(default_factory=list)
    in_flight_bytes: int = 0
    reading: bool = False
    """The host is still reading the samples of the last micro-batch."""
    after_weights: list[SendSamples] = field(default_factory=list)
    """Micro-batches of its lease after the first one, to be sent after its weights."""

    def is_heavy(self, samples: int) -> bool:
        """Whether this many samples take a noticeable time on a link."""
        return samples * self.sample_bytes >= LEAST_BYTES

    def took(self, nbytes: int) -> None:
        """The guest has received these bytes. A guest that lies gets its whole part of a step immediately, and no
        more."""
        self.in_flight_bytes = max(0, self.in_flight_bytes - nbytes)

    def measured(self, nbytes: int, samples: int) -> None:
        self.sample_bytes = nbytes / max(1, samples)

    def plan(self, step: int, sizes: Sequence[int]) -> None:
        """A lease of the step was cut into these micro-batches; the next lease will be cut in the same way."""
        self.of_step, self.wanted = step, deque(sizes[:MOST_AHEAD] if self.most_bytes else ())

    def part(self, batch: AheadBatch) -> AheadMessage:
        """The message of the batch's next part."""
        tree = None if batch.begun else batch.tree
        return AheadMessage(batch=batch.number, step=batch.step, bytes=batch.nbytes, tree=tree)

    def send(self, guest: str, batch: AheadBatch) -> Send:
        message, part = self.part(batch), batch.parts.popleft()
        batch.sent_bytes += len(part)
        self.in_flight_bytes += len(part)
        return Send(guest=guest, message=message, frames=(part,))


@dataclass(slots=True)
class AheadCount:
    """How many of the samples sent ahead were used and not used since the end of the last step."""

    used_samples: int = 0
    unneeded_samples: int = 0
    unneeded_bytes: int = 0

    def unneeded(self, batches: Sequence[AheadBatch]) -> None:
        for batch in batches:
            if batch.begun:
                self.unneeded_samples += len(batch.positions)
                self.unneeded_bytes += batch.sent_bytes


class SendingAhead:
    """Sends guests the samples of their probable next lease, and says which of them a new lease can use."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        members: Mapping[str, Member],
        feeding: Feeding,
        change_bytes: int = 0,
        steps: int | None = None,
    ) -> None:
        """`change_bytes`: size of the weights' change. `steps`: number of steps in the whole run."""
        self._ledger, self._members, self._feeding = ledger, members, feeding
        self._change_bytes, self._steps = change_bytes, steps
        self._numbers = 0
        self._reserved: tuple[int, int] = (-1, 0)
        """The step after the open one, and the first of its positions that is reserved for a guest."""
        self.count = AheadCount()

    # -- sending ----------------------------------------------------------------------------------------

    def pump(self, member: Member) -> list[Action]:
        """Send this guest as much as it may have now."""
        ahead = member.ahead
        if not self._may_send(member):
            return []
        if ahead.after_weights:
            waiting, ahead.after_weights = ahead.after_weights, []
            return [*waiting]
        if member.lease is not None and member.lease.unread:
            return []
        actions: list[Action] = []
        while ahead.in_flight_bytes <= (PARTS_UNDER_WAY - 1) * self._part_bytes(member):
            batch = next((b for b in ahead.batches if b.parts), None)
            if batch is None:
                return [*actions, *self._read_next(member)]
            actions.append(ahead.send(member.id, batch))
        return actions

    def _may_send(self, member: Member) -> bool:
        if not self._ledger.is_open or member.ahead.of_step != self._ledger.step or member.leaving is not None:
            return False
        pieces = self._feeding.pieces
        return self._feeding.coded(self._ledger.step) and member.feed.current(pieces)

    def _part_bytes(self, member: Member) -> int:
        transfer_s = member.transfer.value or 0.0
        usual = int(PART_S * self._change_bytes / transfer_s) if transfer_s > 0 else LARGEST_PART_BYTES
        return max(SMALLEST_PART_BYTES, min(usual, LARGEST_PART_BYTES))

    def _read_next(self, member: Member) -> list[Action]:
        ahead = member.ahead
        following = None if ahead.reading or not ahead.wanted else self._ledger.after()
        if following is None or (self._steps is not None and self._ledger.step + 1 >= self._steps):
            return []
        step = self._ledger.step + 1
        low = self._reserved[1] if self._reserved[0] == step else following.first + following.count
        sent = sum(len(b.positions) for b in ahead.batches)
        lease = sent + sum(ahead.wanted)
        size = ahead.wanted.popleft()
        if (
            not ahead.is_heavy(lease)
            or (sent + size) * ahead.sample_bytes > ahead.most_bytes / 2
            or low - size <= following.first
            # A step with fewer samples has less for each guest.
            or (sent + size) * self._ledger.global_batch > lease * following.count
        ):
            ahead.wanted.clear()
            return []
        self._reserved = (step, low - size)
        self._numbers += 1
        batch = AheadBatch(number=self._numbers, step=step, positions=tuple(range(low - size, low)))
        ahead.batches.append(batch)
        ahead.reading = True
        part_bytes = self._part_bytes(member)
        return [SendAhead(guest=member.id, batch=batch.number, positions=batch.positions, part_bytes=part_bytes)]

    def packed(self, event: AheadPacked, now: float) -> list[Action]:
        """The samples of a micro-batch were read."""
        member, parts = self._members.get(event.guest), event.parts
        if member is None:
            return []
        ahead = member.ahead
        batch = next((b for b in ahead.batches if b.number == event.batch), None)
        if batch is None:
            return []  # its step has begun since
        ahead.reading = False
        batch.tree, batch.nbytes = event.tree, sum(len(part) for part in parts)
        if parts:
            ahead.measured(batch.nbytes, len(batch.positions))
        if not parts or sum(b.nbytes for b in ahead.batches if b.step == batch.step) > ahead.most_bytes / 2:
            ahead.batches.remove(batch)
            ahead.wanted.clear()
            return []
        batch.parts.extend(parts)
        return self.pump(member)

    # -- leases -----------------------------------------------------------------------------------------

    def cut(self, member: Member, quota: int, spare: int, speed: Speed) -> list[tuple[int, AheadBatch | None]]:
        """A lease of about `quota` samples that uses what the guest was sent; empty: cut the lease as usual.

        `spare`: how many more samples the lease may have.
        """
        most = max(member.micro_batch, member.largest_micro_batch)
        has = [
            b
            for b in member.ahead.batches
            if b.step == self._ledger.step
            and b.begun
            and len(b.positions) <= most
            and self._ledger.are_free(b.positions)
        ]
        return list(_composed(has, quota, spare, speed))

    def spared(self, besides: Member) -> set[int]:
        """Positions that other guests have been sent."""
        others = (m for m in self._members.values() if m is not besides)
        return {p for m in others for b in m.ahead.batches if b.step == self._ledger.step for p in b.positions}

    def lent(self, member: Member, used: Sequence[AheadBatch]) -> list[Action]:
        """The guest's lease names these: their remaining parts are sent now, and the others are not needed."""
        ahead = member.ahead
        self.count.used_samples += sum(len(b.positions) for b in used)
        ahead.after_weights = []
        rest: list[Action] = [ahead.send(member.id, b) for b in used for _ in range(len(b.parts))]
        ahead.batches = [b for b in ahead.batches if b not in used]
        return rest

    def begun(self) -> None:
        """All leases of the step are given out: what was sent ahead for it and not named will not be used."""
        for member in self._members.values():
            self.forget(member, self._ledger.step)

    def forget(self, member: Member, step: int | None = None) -> None:
        """What the guest was sent ahead for a step (or for any step) will not be used."""
        ahead = member.ahead
        gone = [b for b in ahead.batches if step is None or b.step <= step]
        self.count.unneeded(gone)
        ahead.batches = [b for b in ahead.batches if b not in gone]
        if gone:
            ahead.reading = False


def _composed(
    has: list[AheadBatch], quota: int, spare: int, speed: Speed
) -> Iterator[tuple[int, AheadBatch | None]]:
    sizes = [len(b.positions) for b in has]
    near = quota // CLOSE
    most = quota + min(near, spare)
    if speed.least.lease > 1:  # with batch statistics a lease has as few micro-batches as possible
        if quota - near <= sum(sizes) <= most:
            yield from zip(sizes, has)
        return
    while sizes and sum(sizes) > most:
        at = max(0, len(sizes) - 2)  # the last one hides the gradient's way, the first one that of the weights
        del sizes[at], has[at]
    left = quota - sum(sizes)
    if not has:
        return
    usual = max(1, min(speed.usual, speed.most))
    fresh: list[tuple[int, None]] = [(n, None) for n in split_evenly(left, usual)] if left > near else []
    known = list(zip(sizes, has))
    if len(known) == 1 and left >= max(speed.last, 1):
        yield from (*known, *fresh)
    else:
        yield from (*known[:-1], *fresh, known[-1])

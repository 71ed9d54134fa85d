"""The parity check: who computes which common batch, and what the outcome means for a guest.

PURE: gradients are compared and random numbers drawn elsewhere.

The host computes a common batch as part of its step. It sends the same tensors, with a seed for the random numbers
of the loop's body, to all guests that are checked. If the gradients differ, the host computes the next common batch
twice, the second time at the weights that guests hold, which the codec has rounded: the distance between its own
two gradients is the limit for a guest's. If only the rounding makes the difference and the codec is `auto`, the
weights' changes are coded in a finer codec from then on, and the guest is checked again before it counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from potluck.balance.leases import Least
from potluck.balance.ledger import Ledger
from potluck.errors import WireError
from potluck.hub.actions import Action, CommonBatch, CompareSketch, Emit, Send, Verdict
from potluck.hub.feed import PieceState
from potluck.hub.inputs import BuffersChanged, Packed
from potluck.hub.members import CHECKING, COMPUTING, SYNCING, Member
from potluck.hub.stepping import pack_samples
from potluck.spec.events import GuestJoined, RunNote
from potluck.spec.messages import CheckMessage, NoteMessage, SamplesMessage, SketchMessage

CHECK_SAMPLES = 4
"""The most samples in a common batch, unless the model needs more at once."""
REFERENCES_KEPT = 4
"""A guest's gradient is not compared if this many newer checks have begun."""
HALF = ("fp16", "bf16")
"""The codecs beside which only none rounds less."""
MID_STEP_S = 3.0
"""With less left of a step, a guest is checked in the next one: its answer must come before the weights change."""
ATTEMPTS = 3
"""Comparisons with the host's spread before a refusal: if a gradient is mostly noise, one comparison says
little."""
SENDABLE = (
    "on the host, let collate_fn return tensors, arrays, numbers and text, in lists, tuples and dicts; or give "
    'run.steps(data="local"), with which guests read their own copy'
)
HINT = (
    "this device may compute wrongly (update torch, or try --device cpu), or its random numbers differ from the "
    "host's: draw them from random, numpy.random or torch, not from your own generators"
)
ALONE = f"if it computes with them, train it without guests; if not, {HINT}"

NAMED_BUFFERS = 3


@dataclass(slots=True)
class _Check:
    """A common batch: its guests, and its positions once the host has computed it."""

    id: int
    step: int
    guests: list[str]
    twice: frozenset[str] | None
    positions: tuple[int, ...] = ()

    @property
    def seed(self) -> int:
        return self.step + 1


@dataclass(slots=True, kw_only=True)
class Checks:
    """The common batches of one run: at a step's beginning, and in long steps whenever a guest has come."""

    ledger: Ledger
    members: dict[str, Member]
    local_data: bool
    least: Least
    put_out: Callable[..., list[Action]]
    round_less: Callable[[], str | None]
    """Have the weights' changes coded in a finer codec from now on; its name, or None where the codec was given."""
    doubt: Callable[[], None]
    """Have the gradients of all guests compared again, now and often."""
    codec_down: str = ""
    """What the weights' changes are coded in otherwise."""
    _finer: str = ""
    """The codec that was chosen because the first one rounds too much."""
    _rough_step: int = -1
    """The step in which that was found; its weights, and those of the checks so far, are still the first one's."""
    _rough_checks: int = 0
    _now: _Check | None = None
    _references: dict[int, Any] = field(default_factory=dict)
    """The host's own results of the last checks, by the check's number."""
    _count: int = 0
    _told_unpacked: bool = False
    _buffers: str = ""
    """The buffers that computing changes, as a text."""

    def begin_step(self, pieces: Sequence[PieceState]) -> None:
        """Plan a common batch for the guests that hold the weights and whose gradients do not count."""
        self._now = None
        self._plan(pieces, self.members.values())

    def look_again(self, pieces: Sequence[PieceState], left_s: float | None) -> None:
        """The same in the middle of a step that takes the host another `left_s`, for guests that have joined
        since."""
        if left_s is not None and left_s >= MID_STEP_S and self.due is None:
            self._plan(pieces, [m for m in self.members.values() if m.lease is None])

    def _plan(self, pieces: Sequence[PieceState], members: Iterable[Member]) -> None:
        new = [
            m
            for m in members
            if m.state == SYNCING and m.feed.current(pieces) and self.ledger.step >= m.rests_until_step
        ]
        if not new or self.ledger.step == self._rough_step:
            return
        self._count += 1
        doubted = [m.unmatched for m in new if m.unmatched is not None]
        twice = frozenset().union(*doubted) if doubted else None
        self._now = _Check(id=self._count, step=self.ledger.step, guests=[m.id for m in new], twice=twice)

    @property
    def due(self) -> CommonBatch | None:
        """The common batch that must be the host's next micro-batch, if a check is due."""
        check = self._now
        if check is None or check.positions:
            return None
        sizes = [self.members[g].micro_batch for g in check.guests if g in self.members]
        if not sizes:
            return None
        # It is part of the step: where few samples train badly, it has at least as many as a lease.
        samples = min([max(CHECK_SAMPLES, self.least.lease), *sizes])
        return CommonBatch(samples=samples, seed=check.seed, twice=check.twice)

    def computed(self, positions: tuple[int, ...], batch: Packed, reference: Any) -> list[Action]:
        """The host has its gradient of the common batch: send the batch to the guests to be checked."""
        check = self._now
        assert check is not None
        check.positions = positions
        recent = list(self._references.items())[1 - REFERENCES_KEPT :]
        self._references = {**dict(recent), check.id: reference}
        actions: list[Action] = []
        frames: tuple[bytes, ...] = ()
        by_index = self.local_data and (batch.same_again or bool(batch.why_not))
        if by_index:
            frames = (pack_samples(self.ledger.samples_of(positions)),)
        if by_index and batch.why_not:
            actions += self._tell_unpacked(batch.why_not)
        for guest in check.guests:
            member = self.members.get(guest)
            if member is None or member.state != SYNCING:
                continue
            if batch.why_not and not by_index:
                # It cannot help with such batches; the training itself is fine.
                reason = f"the samples cannot be sent: {batch.why_not}"
                actions += self.put_out(member, reason, refused=True, hint=SENDABLE)
                continue
            member.state, member.check = CHECKING, check.id
            sizes, epoch = (len(positions),), self.ledger.epoch
            asked = CheckMessage(check=check.id, step=check.step, sizes=sizes, seed=check.seed, epoch=epoch)
            actions.append(Send(guest=guest, message=asked, frames=frames))
            if not by_index:
                member.feed.extra(sum(len(frame) for frame in batch.frames))
                samples = SamplesMessage(lease=-check.id, batch=0, tree=batch.tree)
                actions.append(Send(guest=guest, message=samples, frames=batch.frames))
        return actions

    def _tell_unpacked(self, why_not: str) -> list[Action]:
        if self._told_unpacked:
            return []
        self._told_unpacked = True
        text = (
            f"the parity check's batch cannot be sent ({why_not}): guests read its samples themselves, and random "
            "numbers in the data set can make their gradients differ"
        )
        return [Emit(event=RunNote(text=text))]

    def answered(self, member: Member, answer: SketchMessage, sketch: Any) -> list[Action]:
        """A guest's gradient of the common batch has arrived."""
        if member.check is None or answer.check != member.check:
            raise WireError("a gradient sketch that nobody asked for")
        check, member.check = member.check, None
        loss = math.nan if answer.loss is None else answer.loss
        member.counts_items = answer.items is not None
        return [
            CompareSketch(
                guest=member.id,
                check=check,
                reference=self._references.get(check),
                sketch=sketch,
                loss=loss,
                items=answer.items,
                random=answer.random,
            )
        ]

    def void(self, guest: str, check: int, reason: str = "a step is over before its weights are there") -> None:
        """No comparison was possible: check again, at growing intervals."""
        member = self.members.get(guest)
        if member is not None and member.state == CHECKING and member.check in (check, None):
            member.state, member.check = SYNCING, None
            member.reason = reason
            member.rests_until_step = self.ledger.step + min(2**member.rests, member.longest_rest)
            member.rests += 1

    def compared(self, guest: str, check: int, verdict: Verdict) -> list[Action]:
        """The outcome of a parity check."""
        if verdict.void:
            self.void(guest, check, verdict.void)
            return []
        member = self.members.get(guest)
        if member is None:
            return []
        member.check, member.cosine = None, verdict.cosine
        if verdict.why_not is None:
            return self._again_with_finer(member, check, verdict) or self._passed(member, verdict)
        if verdict.again and member.doubts < ATTEMPTS:
            member.doubts += 1
            member.unmatched = verdict.unmatched
            member.state, member.reason = SYNCING, "its gradient differs: it is compared with the host's spread"
            return []
        if member.joined:
            reason = f"computed a gradient that differs from the host's on the same batch: {verdict.why_not}"
        else:
            reason = f"its gradient differs from the host's on the same batch: {verdict.why_not}"
        hint = HINT
        if self._buffers:
            reason = f"{reason} (the model changes its buffers {self._buffers} as it computes)"
            hint = f"the model changes its buffers {self._buffers}, and a guest has copies of its own: {ALONE}"
        return self.put_out(member, reason, refused=not member.joined, hint=hint)

    def buffers_changed(self, event: BuffersChanged, now: float) -> list[Action]:
        """Computing changes these buffers: remember them as a cause of gradients that differ, and tell it once."""
        self.doubt()
        if self._buffers:
            return []
        names = event.names
        more = f" and {len(names) - NAMED_BUFFERS} more" if len(names) > NAMED_BUFFERS else ""
        self._buffers = ", ".join(names[:NAMED_BUFFERS]) + more
        text = (
            f"the forward of {event.module} changes its buffers ({self._buffers}), and guests compute with copies "
            "of their own: if the forward also computes with them, guests' gradients drift away from the host's. "
            "Train such a model without guests"
        )
        return [Emit(event=RunNote(text=text))]

    def _again_with_finer(self, member: Member, check: int, verdict: Verdict) -> list[Action]:
        """With codec auto: have the weights rounded less, and check the guest again once it holds these."""
        if not verdict.rounded:
            return []
        if not self._finer and (finer := self.round_less()) is not None:
            self._finer = finer
            self._rough_step, self._rough_checks = self.ledger.step, self._count
        if not self._finer or check > self._rough_checks:
            return []
        member.state, member.reason = SYNCING, f"its weights are sent in {self._finer}"
        member.doubts, member.unmatched = 0, None
        return self._tell(member, self._rounded(member, verdict, f"weights are sent in {self._finer} from now on"))

    def _passed(self, member: Member, verdict: Verdict) -> list[Action]:
        member.state, member.reason, member.rests, member.doubts = COMPUTING, "", 0, 0
        # One that is known to draw other random numbers is compared by the spread at once the next time.
        member.unmatched = verdict.unmatched if verdict.spread is not None else None
        actions: list[Action] = []
        if verdict.spread is not None and not member.by_spread:
            actions += self._tell_spread(member, verdict)
        member.by_spread = verdict.spread is not None
        if not member.joined:
            member.joined = True
            event = GuestJoined(
                machine=member.name,
                address=member.address,
                device=member.device,
                parity=round(verdict.cosine, 6),
                rate=member.rate.value,
                spread=None if verdict.spread is None else round(verdict.spread, 6),
            )
            actions.append(Emit(event=event))
        return actions

    def _tell_spread(self, member: Member, verdict: Verdict) -> list[Action]:
        if verdict.rounded:
            fine = self._finer or self.codec_down in HALF
            fix = "--codec none does not round" if fine else "--codec fp16 rounds less"
            text = self._rounded(member, verdict, fix)
        else:
            text = (
                f"the loop draws random numbers that differ between the host and {member.name}: its gradient "
                f"(cosine {verdict.cosine:.2f}) is judged by how far apart the host's own two of one batch are "
                f"({verdict.spread:.2f}), so only gross errors are seen"
            )
        return self._tell(member, text)

    def _rounded(self, member: Member, verdict: Verdict, fix: str) -> str:
        return (
            f"{member.name} holds weights that the codec has rounded, and they give this model another gradient "
            f"than the host's own weights (cosine {verdict.spread:.2f}): {fix}"
        )

    def _tell(self, member: Member, text: str) -> list[Action]:
        return [
            Emit(event=RunNote(machine=member.name, text=text)),
            Send(guest=member.id, message=NoteMessage(text=text)),
        ]

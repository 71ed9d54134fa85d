"""Chooses the codecs of a run with `auto`: one for each guest by its link, and one for the weights' changes. PURE.

The residual of a guest and the replica do not depend on the codec, so that both can change from one step to the
next. The change of the weights is coded once for all guests: in thin as soon as one of them needs it. If all of
them compute in bf16, each piece is sent as its changes in bf16 (`codec/changes.py`) where that is shorter. Once a
parity check shows that the rounded weights give the model another gradient, the change is coded in fp16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from potluck.balance.codecs import CODING_S_PER_PARAMETER, INT4, THIN, THIN_PART, choose, codec_bytes
from potluck.balance.leases import Speed
from potluck.balance.quota import Estimate
from potluck.codec.names import BF16_CHANGES
from potluck.hub.actions import Action, Emit
from potluck.hub.members import COMPUTING, LATE, SITTING_OUT, Member
from potluck.spec.events import GuestCodec
from potluck.spec.model_description import TensorSpec

USUAL_TAIL_S = 0.15
"""What the end of a contribution takes on a good link: coding, sending and decoding its last piece, 0.06 s in the
lab (`plan/hub.py`). This is two and a half times that, so that a briefly busy machine does not count as a slow
link."""

INT4_BYTES = codec_bytes(INT4)
"""Bytes per parameter, including its share of a scale."""
FINE = "fp16"
FINE_PART = codec_bytes(FINE) / codec_bytes(INT4)
"""Time of the weights' change in fp16 ÷ its time in int4: 3.9."""
PART_CHANGES = 0.2
"""The size of an exact change must differ by this factor before the measurements of the links are scaled."""

STAYS_STEPS, MOST_DOUBLINGS = 16, 8
"""A guest whose codec was changed keeps it for 32 steps, then for twice as long each time. After 8 measurements the
old ones no longer matter: two are doubted, and 6 with a weight of 0.4 leave 5 % of the old value."""


class CodecChoice:
    """Chooses codecs at the beginning of a step. If the run's codec is fixed, it chooses nothing and no message
    names a codec."""

    def __init__(
        self,
        members: Mapping[str, Member],
        model: Sequence[TensorSpec],
        down: tuple[str, str] | None,
        change_bytes: Callable[[], int] = lambda: 0,
    ) -> None:
        """
        Args:
            down: the codecs of the weights' changes with int4 and with thin; None: nothing is chosen.
            change_bytes: the length of the last change.
        """
        self._members, self._down = members, down
        self._parameters = sum(t.count for t in model if t.role == "trained")
        self._coding_s = CODING_S_PER_PARAMETER * self._parameters
        self._change_bytes = change_bytes
        self._thin_down = self._exact = self._fine = False
        self._part = 1.0

    @property
    def first(self) -> str:
        """The codec of a guest for which none was chosen yet."""
        return "" if self._down is None else INT4

    @property
    def change(self) -> str:
        """The codec of the weights' changes."""
        if self._fine:
            return FINE
        if self._exact:
            return BF16_CHANGES
        return "" if self._down is None else self._down[self._thin_down]

    @property
    def part(self) -> float:
        """Time of the weights' change on a link now ÷ its time in int4."""
        return self._part

    def round_less(self) -> str | None:
        """From the next step on, code the weights' changes in this codec; None where theirs was given."""
        if self._down is None or self._down[0] == self._down[1]:
            return None
        self._fine = True
        return FINE

    def begin_step(self, batch: int, host_sample_s: float, step: int) -> list[Action]:
        """Choose for all newcomers, and again for one of the others: each choice solves the step's quotas twice."""
        if self._down is None:
            return []
        members = [m for m in self._members.values() if m.state in (COMPUTING, LATE, SITTING_OUT)]
        known = [m for m in members if m.codec_known and m.codec_stays_until <= step]
        actions: list[Action] = []
        for member in (*(m for m in members if not m.codec_known), *known[step % max(1, len(known)) :][:1]):
            speed = member.speed
            if speed is None:
                continue
            late_s = _late_s(member, speed, _part_of(member) * speed.transfer_s / self.part)
            if member.codec == THIN:
                late_s /= THIN_PART
                speed = replace(speed, overhead_s=speed.overhead_s + (1 - THIN_PART) * late_s)
            speeds = {**self._speeds(), member.id: replace(speed, transfer_s=speed.transfer_s / self.part)}
            found = choose(
                batch,
                1 / host_sample_s,
                speeds,
                member.id,
                coding_s=self._coding_s,
                late_s=late_s,
                now=member.codec,
            )
            if found.codec != member.codec or not member.codec_known:
                if found.codec != member.codec:
                    member.codec_turns += 1
                    # With thin all of the way up may be hidden: how long it is cannot be seen from there. And a
                    # guest that is held up by something else looks like one on a slow link for some steps.
                    member.codec_stays_until = step + STAYS_STEPS * 2 ** min(member.codec_turns, MOST_DOUBLINGS)
                    _scale(member.tail, THIN_PART if found.codec == THIN else 1 / THIN_PART)
                member.codec, member.codec_known = found.codec, True
                event = GuestCodec(machine=member.name, step=step + 1, codec=found.codec, reason=found.reason)
                actions.append(Emit(event=event))
        self._choose_change()
        return actions

    def _choose_change(self) -> None:
        open_ = self._down is not None and self._down[0] != self._down[1]
        thin = open_ and not self._fine and any(m.codec == THIN for m in self._members.values())
        exact = thin and all(m.bf16 for m in self._members.values() if m.feed.open)
        part = FINE_PART if self._fine else THIN_PART if thin else 1.0
        if exact:
            # How much changes in bf16 depends on the learning rate: what was coded last tells.
            coded = self._change_bytes() / max(INT4_BYTES * self._parameters, 1.0)
            part = min(part, coded) if self._exact and coded > 0 else part
            if self._exact and abs(part - self._part) <= PART_CHANGES * self._part:
                part = self._part
        self._thin_down, self._exact = thin, exact
        if part != self._part:
            for member in self._members.values():
                _scale(member.transfer, part / self._part)
            self._part = part

    def _speeds(self) -> dict[str, Speed]:
        """The speeds of all guests that may help, each with its own codec."""
        found = {}
        for member in self._members.values():
            speed = member.speed
            if speed is not None and member.state in (COMPUTING, LATE):
                found[member.id] = replace(speed, transfer_s=_part_of(member) * speed.transfer_s / self.part)
        return found


def _part_of(member: Member) -> float:
    """Time of this guest's gradient on a link ÷ its time in int4."""
    return THIN_PART if member.codec == THIN else 1.0


def _scale(estimate: Estimate, times: float) -> None:
    """It was measured with the other codec; the next measurements correct it."""
    if estimate.value is not None:
        estimate.value *= times
        estimate.spread *= times


def _late_s(member: Member, speed: Speed, up_s: float) -> float:
    """How much longer the gradient took, after the last backward, than on a link as fast up as down: `up_s`.

    Many links are slower up than down. Only the download is measured separately. The host's decoding time does not
    count as the link's: with a large model it would make every link seem slow, and thin is not decoded faster.
    """
    expected_s = max(0.0, up_s - 2 * speed.last * speed.sample_s / 3)
    coming_s = (member.tail.value or 0.0) - (member.decoding.value or 0.0)
    return max(0.0, coming_s - expected_s - USUAL_TAIL_S)

"""Decides which parts of the replica guests are sent; owns each piece's version. PURE."""

from __future__ import annotations

import math
from collections.abc import Mapping

from potluck.hub.actions import Action, ReadPart, Send
from potluck.hub.feed import NOTHING, PieceState
from potluck.hub.inputs import PartRead
from potluck.hub.members import Member
from potluck.spec.messages import ChangeMessage, TensorMessage, WholeMessage

FOLLOW_S = 0.25
"""How often the change is coded for guests without a lease in the step: they join, catch up, or are checked."""


class Feeding:
    """Sends every guest what its `Feed` says is next."""

    def __init__(self, *, pieces: int, members: Mapping[str, Member]) -> None:
        self.pieces = [PieceState(NOTHING, NOTHING, 0, 0)] * pieces
        self._members = members
        self.coding = False
        """Whether the change to this step's weights is coded."""
        self._coded_at = -math.inf

    def begin_step(self, now: float, step_s: float | None, *, needed: bool) -> bool:
        """Whether to code the change to the weights of this step, which takes the host about `step_s`.

        `needed`: a guest computes on them. For guests that only follow, short steps are not coded one by one: a
        model of 1.5 ms a step would be slowed down by a guest that cannot help it.
        """
        short = step_s is not None and step_s < FOLLOW_S
        followed = any(m.feed.open for m in self._members.values())
        self.coding = followed and (needed or not short or now - self._coded_at >= FOLLOW_S)
        if self.coding:
            self._coded_at = now
        return self.coding

    @property
    def change_bytes(self) -> int:
        """Size of the last change, all pieces together."""
        return sum(piece.change_bytes for piece in self.pieces)

    def coded(self, version: int) -> bool:
        """Whether all pieces are at the weights' version."""
        return all(piece.version == version for piece in self.pieces)

    def pump(self, member: Member) -> list[Action]:
        """Send this guest what it lacks, within its credit."""
        actions: list[Action] = []
        while (item := member.feed.next(self.pieces)) is not None:
            if item.kind != "change":
                part = member.feed.tensors[0] if item.kind == "tensor" else None
                member.feed.asked(item)
                actions.append(ReadPart(guest=member.id, item=item, part=part))
                continue
            piece = self.pieces[item.index]
            change = ChangeMessage(piece=item.index, base=piece.base, version=piece.version, codec=piece.codec)
            actions.append(Send(guest=member.id, message=change, frames=(piece.change,)))
            member.feed.change_sent(item, piece.version)
            self._release(item.index, piece.version)
        return actions

    def read(self, member: Member, read: PartRead) -> list[Action]:
        """A whole piece or part was read for this guest: send it."""
        message: TensorMessage | WholeMessage
        if read.part is not None:
            message = TensorMessage(name=read.part.name, start=read.part.start)
        else:
            message = WholeMessage(piece=read.item.index, version=read.version)
        member.feed.answered(read.item, read.version)
        return [Send(guest=member.id, message=message, frames=(read.payload,))]

    def _release(self, index: int, version: int) -> None:
        """Drop a coded change once it was sent to every guest that needs it, to free its memory."""
        fed = [m.feed for m in self._members.values() if m.feed.open]
        if all(feed.have[index] == version for feed in fed):
            piece = self.pieces[index]
            self.pieces[index] = PieceState(NOTHING, version, piece.change_bytes, piece.whole_bytes)

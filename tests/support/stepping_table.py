"""One host at a table with guests: the stepping of a run, with a clock that tests turn.

It owns no rule of the step. It knows no socket, no tensor and no message.
"""

from __future__ import annotations

from typing import Any

from potluck.balance.leases import Least
from potluck.balance.ledger import EpochSteps, Ledger
from potluck.balance.quota import Estimate
from potluck.hub.actions import Action, Emit, Send, Take
from potluck.hub.ahead import SendingAhead
from potluck.hub.feed import Feed, PieceState
from potluck.hub.feeding import Feeding
from potluck.hub.members import COMPUTING, Member
from potluck.hub.stepping import Stepping
from potluck.spec.events import kind_of
from potluck.train.data import epoch_order

HOST_S = 0.1
"""Seconds that a sample takes the host of these tests."""
STATE = [PieceState(0, 1, 10, 80)]


class Table:
    """A host with a clock that tests turn, and guests as they want them."""

    def __init__(
        self,
        *guests: str,
        batch: int = 20,
        rate: float = 10.0,
        local_data: bool = False,
        least: Least | None = None,
    ) -> None:
        self.least = least or Least()
        self.ledger = Ledger(EpochSteps(samples=1000, global_batch=batch, order=epoch_order(1000, 0)))
        self.members: dict[str, Member] = {}
        feeding = Feeding(pieces=1, members=self.members)
        self.stepping = Stepping(
            ledger=self.ledger,
            members=self.members,
            host_name="host",
            local_data=local_data,
            ahead=SendingAhead(ledger=self.ledger, members=self.members, feeding=feeding),
            least=least,
        )
        self.now = 100.0
        for guest in guests:
            self.join(guest, rate)
        self.begin()
        self.compute_all()  # the first step shows how fast the host is
        self.stepping.end()

    def join(self, name: str, rate: float = 10.0, overhead: float = 0.0) -> Member:
        feed = Feed(pieces=1, window_bytes=100)
        feed.have, feed.open = [1], True
        member = Member(
            id=name,
            name=name,
            address="",
            device="",
            about={},
            last_heard=self.now,
            joined_at=0.0,
            feed=feed,
            least=self.least,
        )
        member.state = COMPUTING
        member.rate.add(rate)
        member.overhead.add(overhead)
        self.members[name] = member
        return member

    def begin(self) -> list[Action]:
        actions = self.stepping.begin(self.now, STATE, self.least.lease)
        for member in self.members.values():
            if member.lease is not None:
                member.lease.unread = 0  # its samples are read and sent at once
        return actions

    def take(self, count: int = 1) -> Take:
        return self.stepping.take(count, self.now)[0]

    def compute(self, take: Take) -> None:
        self.now += HOST_S * len(take.positions)
        self.stepping.host_launched(take.positions)
        self.stepping.host_computed(len(take.positions), HOST_S * len(take.positions))

    def compute_all(self) -> Take:
        """The host's own share, until there is nothing in the pool; guests keep saying that they are alive."""
        while True:
            for member in self.members.values():
                member.last_heard = self.now
            take, self.actions = self.stepping.take(4, self.now)
            if not take.positions:
                return take
            self.compute(take)

    def deliver(
        self, name: str, count: int | None = None, sample_s: float = HOST_S, decode_s: float = 0.0
    ) -> list[Action]:
        """All of a contribution arrives and is decoded."""
        member = self.members[name]
        assert member.lease is not None
        lease = member.lease
        self.stepping.piece(member, lease=lease.id, index=0, payload=b"")
        count = lease.count if count is None else count
        self.stepping.learn(member, count=count, compute_s=count * sample_s, now=self.now)
        why_not = self.stepping.complete(member, lease=lease.id, count=count, pieces=1)
        if why_not is not None:
            return self.stepping.drop(member, reason=why_not, now=self.now)
        self.now += decode_s
        return self.stepping.counted(member, now=self.now)

    def step(self, *late: str) -> dict[str, int]:
        """A whole step in which everybody delivers in time but those named."""
        self.begin()
        self.compute_all()
        for name, member in self.members.items():
            if member.lease is not None and not member.lease.revoked and name not in late:
                self.deliver(name)
        while not (take := self.compute_all()).full:
            assert take.wait_until is not None
            self.now = max(self.now + 0.001, take.wait_until)
        result = self.stepping.end()
        for name in late:
            if self.members[name].lease is not None:
                self.actions = self.deliver(name)
        return result.samples


def freeze(*estimates: Estimate) -> None:
    """They keep what they say, whatever is measured."""
    for estimate in estimates:
        estimate.weight, estimate.doubts = 0.0, False


def events(actions: list[Action], kind: str) -> list[Any]:
    return [a.event for a in actions if isinstance(a, Emit) and kind_of(a.event) == kind]


def sends(actions: list[Action], kind: str) -> list[Any]:
    """The actions that send a message of this kind."""
    return [a for a in actions if isinstance(a, Send) and a.message.kind == kind]

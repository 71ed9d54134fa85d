"""The ranks of one group, from the view of one of them: owns their numbers and names, and how the group fails."""

from __future__ import annotations

from potluck.dist.config import Resolved
from potluck.dist.connections import Endpoint
from potluck.dist.queues import MessageQueues, RankState
from potluck.dist.streams import Stream
from potluck.errors import CollectiveError

_ASK_S = 1.0
_NOT_REACHED = (
    "is there a firewall? With POTLUCK_DIST_PORT_BASE=29600 rank r listens at 29600 + r, so that you can allow "
    "these ports; "
    "POTLUCK_DIST_INTERFACE chooses another network; potluck doctor ADDRESS tries the connection"
)


def unusable(reason: str) -> CollectiveError:
    """The error of every call on a group that failed for this reason."""
    return CollectiveError(reason, hint="the group cannot be used any more: destroy it and make a new one")


def gone_hint(reason: str) -> str:
    """The hint for a rank that is gone for this reason."""
    never = reason.startswith("could not be reached")
    return _NOT_REACHED if never else "look at that rank's own output: it ended first"


class Peers:
    """The ranks of one group."""

    def __init__(
        self, queues: MessageQueues, group: int, rank: int, endpoints: list[Endpoint], settings: Resolved
    ) -> None:
        self.queues, self.group, self.rank, self.world = queues, group, rank, len(endpoints)
        self.endpoints, self.settings = endpoints, settings
        self._ranks = {endpoint.name: rank for rank, endpoint in enumerate(endpoints)}
        self.numbers = list(range(self.world))
        """The ranks' numbers for people: in a part of a group, those of the whole group."""
        self._everybody = endpoints
        self._parts: list[Peers] = []
        self.stream: Stream | None = None
        self.streamed_bytes = 0
        """Bytes in each direction, by this stream."""
        self.may_stream = self.world == 2 and not settings.checksum
        """A stream has no checksums. False also after an attempt to open one failed."""

    def close(self) -> None:
        for part in (*self._parts, self):
            if part.stream is not None:
                part.stream.close()
                part.stream = None

    def between(self, ranks: list[int]) -> Peers:
        """Some of the ranks, this one among them. They count from 0; a failure fails the whole group."""
        chosen = [self.endpoints[rank] for rank in ranks]
        part = Peers(self.queues, self.group, ranks.index(self.rank), chosen, self.settings)
        part.numbers, part._everybody = list(ranks), self.endpoints
        self._parts.append(part)
        return part

    @property
    def others(self) -> list[Endpoint]:
        return [endpoint for rank, endpoint in enumerate(self.endpoints) if rank != self.rank]

    def rank_of(self, name: str) -> int:
        return self._ranks[name]

    def who(self, rank: int) -> str:
        """A rank as people should read it."""
        return f"rank {self.numbers[rank]} ({self.endpoints[rank].host})"

    def who_sent(self, name: str) -> str:
        """The same, for an endpoint of the whole group."""
        for rank, endpoint in enumerate(self._everybody):
            if endpoint.name == name:
                return f"rank {rank} ({endpoint.host})"
        return name

    def check(self) -> None:
        """Raise if the group has failed."""
        text = self.queues.aborted(self.group)
        if text is not None:
            raise unusable(text)

    def fail(self, text: str) -> None:
        """End the group here and on every other rank, with the same text."""
        own = self.queues.endpoint.name
        self.queues.abort(self.group, text, [other for other in self._everybody if other.name != own])

    def ask(self) -> dict[int, RankState]:
        """What each other rank does now, by rank; ranks that do not answer are left out."""
        told = self.queues.ask(self.group, self.others, _ASK_S)
        return {self._ranks[name]: answer for name, answer in told.items()}

"""How the ranks of a group find each other through torch's store: owns the cards that they lay down there.

It must not know collectives, nor open a socket of its own.

A card says where a rank takes parcels, which public key it has, on which machine it runs, and which protocol it
speaks. The store itself is neither encrypted nor guarded: whoever can write to it can join. See docs/security.md.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from potluck._version import __version__
from potluck.dist.config import disagreement
from potluck.dist.links import Endpoint
from potluck.dist.mesh import PROTOCOL
from potluck.dist.pages import wait_for
from potluck.errors import CollectiveError, WireError


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """What a rank says of itself."""

    endpoint: Endpoint
    machine: str
    """Equal for ranks that can share memory."""
    shared: Mapping[str, Any]
    """The settings that all ranks must have alike."""
    version: str = __version__
    protocol: int = PROTOCOL

    def to_json(self) -> str:
        return json.dumps(
            {
                "endpoint": self.endpoint.to_json(),
                "machine": self.machine,
                "shared": dict(self.shared),
                "version": self.version,
                "protocol": self.protocol,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes) -> Card:
        try:
            values = json.loads(text)
            protocol = values["protocol"]
            if protocol != PROTOCOL:
                raise CollectiveError(
                    f"a rank runs potluck {values.get('version')} (protocol {protocol}), this one {__version__} "
                    f"(protocol {PROTOCOL})",
                    hint="install the same version of potluck on all machines",
                )
            return cls(
                endpoint=Endpoint.from_json(values["endpoint"]),
                machine=values["machine"],
                shared=dict(values["shared"]),
                version=values["version"],
                protocol=protocol,
            )
        except (ValueError, KeyError, TypeError):
            raise WireError(
                "the store holds something that is not a rank's card",
                hint="do all ranks run the same version of potluck?",
            ) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """What came of it: the group's own number, and every rank's card."""

    group: int
    cards: list[Card]

    def machines(self) -> list[list[int]]:
        """The ranks of each machine, in the order of their first ones."""
        by_machine: dict[str, list[int]] = {}
        for rank, card in enumerate(self.cards):
            by_machine.setdefault(card.machine, []).append(rank)
        return list(by_machine.values())

    def neighbours(self, rank: int) -> list[int]:
        """The ranks on the same machine, itself among them."""
        return [other for other, card in enumerate(self.cards) if card.machine == self.cards[rank].machine]


def meet(store: Any, rank: int, world: int, mine: Card, timeout_s: float) -> Meeting:
    """Lay down this rank's card and read the others'.

    Raises:
        GuestsMissingError: it names the ranks that did not come.
        CollectiveError: ranks of another version, or with other settings.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        store.set("potluck/group", str(secrets.randbits(63)))
    store.set(f"potluck/card/{rank}", mine.to_json())
    keys = [f"potluck/card/{other}" for other in range(world)]
    wait_for(store, keys, deadline)
    cards = [Card.from_json(store.get(key)) for key in keys]
    error = disagreement({other: card.shared for other, card in enumerate(cards)})
    if error is not None:
        raise error
    return Meeting(group=int(store.get("potluck/group")), cards=cards)


def all_ready(store: Any, rank: int, world: int, timeout_s: float) -> None:
    """Wait until every rank has come this far; nobody may send before that, as doors are still closed."""
    store.set(f"potluck/ready/{rank}", "1")
    wait_for(store, [f"potluck/ready/{other}" for other in range(world)], time.monotonic() + timeout_s)

"""How the ranks of a group find each other through torch's store: owns the cards that they lay down there.

It must not know collectives, nor open a socket of its own.

A card says where a rank takes parcels, which public key it has, on which machine it runs, which protocol it speaks
and which torch it has. The store itself is neither encrypted nor guarded: whoever can write to it can join. See
docs/security.md.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from potluck._version import __version__
from potluck.dist.config import disagreement, ranks_text
from potluck.dist.links import Endpoint, is_short_text
from potluck.dist.mesh import PROTOCOL
from potluck.dist.pages import wait_for
from potluck.errors import CollectiveError, WireError

log = logging.getLogger("potluck.dist")


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
    torch: str = torch.__version__

    def to_json(self) -> str:
        return json.dumps(
            {
                "endpoint": self.endpoint.to_json(),
                "machine": self.machine,
                "shared": dict(self.shared),
                "version": self.version,
                "protocol": self.protocol,
                "torch": self.torch,
            }
        )

    @classmethod
    def from_json(cls, text: str | bytes, rank: int) -> Card:
        """The card that the store holds for a rank."""
        try:
            values = json.loads(text)
            protocol, version = values["protocol"], values["version"]
            if not isinstance(protocol, int) or not is_short_text(version):
                raise ValueError
            if protocol != PROTOCOL:
                raise CollectiveError(
                    f"rank {rank} runs potluck {version} (protocol {protocol}), this one {__version__} "
                    f"(protocol {PROTOCOL})",
                    hint="install the same version of potluck on all machines",
                )
            shared = dict(values["shared"])
            plain = all(isinstance(value, int | float | None) or is_short_text(value) for value in shared.values())
            if not plain or not is_short_text(values["machine"]) or not is_short_text(values["torch"]):
                raise ValueError
            return cls(
                endpoint=Endpoint.from_json(values["endpoint"]),
                machine=values["machine"],
                shared=shared,
                version=version,
                protocol=protocol,
                torch=values["torch"],
            )
        except (ValueError, KeyError, TypeError, RecursionError, WireError):
            raise WireError(
                f"the store holds something that is not the card of rank {rank}",
                hint="do all ranks run the same version of potluck? Has somebody else written to the store?",
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
        CollectiveError: ranks of another version, with other settings, or without a key where all have one.
    """
    deadline = time.monotonic() + timeout_s
    if rank == 0:
        store.set("potluck/group", str(secrets.randbits(63)))
    store.set(f"potluck/card/{rank}", mine.to_json())
    keys = [f"potluck/card/{other}" for other in range(world)]
    wait_for(store, keys, deadline)
    cards = [Card.from_json(store.get(key), other) for other, key in enumerate(keys)]
    error = disagreement({other: card.shared for other, card in enumerate(cards)})
    if error is None and mine.endpoint.key:
        error = _without_key(cards)
    if error is not None:
        raise error
    _compare_torch(rank, cards)
    number = store.get("potluck/group")
    if not number.isdigit() or len(number) > 19:
        raise WireError("the store holds no number for the group", hint="has somebody else written to the store?")
    return Meeting(group=int(number), cards=cards)


def _without_key(cards: list[Card]) -> CollectiveError | None:
    """Whoever can write to the store could else turn encryption off, though all ranks ask for it."""
    ranks = [rank for rank, card in enumerate(cards) if not card.endpoint.has_key]
    if not ranks:
        return None
    return CollectiveError(
        f"{ranks_text(ranks)} came without a key, and encryption is on",
        hint="nothing is sent in the clear: has somebody else written to the store? To go without encryption, set "
        "POTLUCK_DIST_ENCRYPTION=0 on all ranks",
    )


def _compare_torch(rank: int, cards: list[Card]) -> None:
    """Warn of versions that differ in more than the last number. None is refused: dtypes and shapes are compared at
    each collective, and nothing that only one version of torch can read is sent."""
    sides: dict[str, list[int]] = {}
    for other, card in enumerate(cards):
        sides.setdefault(".".join(card.torch.partition("+")[0].split(".")[:2]), []).append(other)
    if len(sides) > 1:
        text = "; ".join(f"{version} on {ranks_text(who)}" for version, who in sides.items())
        level = logging.WARNING if rank == 0 else logging.INFO
        log.log(level, "the ranks have different versions of torch, and may compute differently: %s", text)


def all_ready(store: Any, rank: int, world: int, timeout_s: float) -> None:
    """Wait until every rank has come this far; nobody may send before that, as doors are still closed."""
    store.set(f"potluck/ready/{rank}", "1")
    wait_for(store, [f"potluck/ready/{other}" for other in range(world)], time.monotonic() + timeout_s)

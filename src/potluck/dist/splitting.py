"""Groups made from a part of another: owns how their ranks meet, and telling torch of them.

It must not know collectives.

torch.distributed.split_group() asks for an accelerator and for a device bound to the default group before it
asks the backend; torch binds the one of init_process_group(device_id=...) to a group that it drops when the
backend is written in Python. So it has to be bound by hand, and without an accelerator the group's own
split_group() is the way.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch.distributed.distributed_c10d

from potluck.errors import CollectiveError

c10d: Any = torch.distributed.distributed_c10d
"""Much of it is not meant for others, who have no other way."""


@dataclass(slots=True)
class Origin:
    """What a group was made from."""

    store: Any
    config: Any
    splits: itertools.count[int] = field(default_factory=itertools.count)
    """All ranks of a group ask for its splits together, so that they count them alike."""


@dataclass(frozen=True, slots=True)
class SplitRequest:
    """A part of a group."""

    ranks: list[int]
    timeout: timedelta
    config: Any
    name: str
    """As torch will call it; "": it does not know yet."""
    about: str


def split(parent: Any, origin: Origin, global_ranks: list[int], wanted: SplitRequest) -> Any:
    """The new group, on the ranks that are in it; None on the others."""
    from potluck.dist.group import create

    ranks = sorted(wanted.ranks)
    if not ranks or len(set(ranks)) < len(ranks) or ranks[0] < 0 or ranks[-1] >= parent.size():
        raise CollectiveError(
            f"{wanted.ranks} is no part of a group of {parent.size()} ranks",
            hint="name each rank of the new group once, by its number in the group that is split",
        )
    number = next(origin.splits)
    if parent.rank() not in ranks:
        return None
    name = wanted.name or f"{parent.group_name or 'group'}:split:{number}:{'-'.join(map(str, ranks))}"
    options = SimpleNamespace(
        store=c10d.PrefixStore(f"split/{number}/{'-'.join(map(str, ranks))}/", origin.store),
        group_rank=ranks.index(parent.rank()),
        group_size=len(ranks),
        timeout=wanted.timeout,
        global_ranks_in_group=[global_ranks[rank] for rank in ranks],
    )
    group = create(options, origin.config if wanted.config is None else wanted.config)
    group._set_group_name(name)
    group._set_group_desc(wanted.about)
    if not wanted.name:
        _introduce(group, name, options)
    return group


def _introduce(group: Any, name: str, options: Any) -> None:
    """As torch does with the groups that it makes itself: collectives with a root look their ranks up there."""
    world = c10d._world
    world.pg_map[group] = ("potluck", options.store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(options.global_ranks_in_group)}
    world.pg_backend_config[group] = "cpu:potluck,cuda:potluck,mps:potluck"
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    c10d._register_process_group(name, group)

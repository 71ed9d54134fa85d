"""Groups made from a part of another: owns how their ranks meet, and registering them with torch.

torch.distributed.split_group() needs an accelerator, and a device bound to the default group, before it asks the
backend. torch binds the device of init_process_group(device_id=...) to a group that it drops if the backend is
written in Python. So bind it by hand; without an accelerator, use the group's own split_group().
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
"""torch's module with the record of its groups. Much of it is private, but there is no public interface."""


@dataclass(slots=True)
class Origin:
    """The store and the settings with which a group was made."""

    store: Any
    config: Any
    splits: itertools.count[int] = field(default_factory=itertools.count)
    """All ranks of a group call split_group together, so their counts agree."""


def split(
    parent: Any, ranks: list[int], timeout: timedelta, config: Any, name: str | None, description: str | None
) -> Any:
    """The new group on its ranks; None on the others.

    Args:
        name: the name torch will give it; None: torch does not know of it yet.
    """
    from potluck.dist.group import create

    members = sorted(ranks)
    if not members or len(set(members)) < len(members) or members[0] < 0 or members[-1] >= parent.size():
        raise CollectiveError(
            f"{ranks} is not a part of a group of {parent.size()} ranks",
            hint="name each rank of the new group once, by its number in the group that is split",
        )
    number = next(parent.origin.splits)
    if parent.rank() not in members:
        return None
    suffix = "-".join(map(str, members))
    options = SimpleNamespace(
        store=c10d.PrefixStore(f"split/{number}/{suffix}/", parent.origin.store),
        group_rank=members.index(parent.rank()),
        group_size=len(members),
        timeout=timeout,
        global_ranks_in_group=[parent.global_ranks[rank] for rank in members],
    )
    group = create(options, parent.origin.config if config is None else config)
    group._set_group_name(name or f"{parent.group_name or 'group'}:split:{number}:{suffix}")
    group._set_group_desc(description or "")
    if not name:
        _register(group, options)
    return group


def _register(group: Any, options: Any) -> None:
    """Register the group as torch does with its own groups, because collectives with a root look their ranks up
    there."""
    world, name = c10d._world, group.group_name
    world.pg_map[group] = ("potluck", options.store)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(options.global_ranks_in_group)}
    world.pg_backend_config[group] = "cpu:potluck,cuda:potluck,mps:potluck"
    tag = f"ptd:{name}"
    world.tags_to_pg.setdefault(tag, []).append(group)
    world.pg_to_tag[group] = tag
    c10d._register_process_group(name, group)

"""The namespaces of groups in one store: all ranks meet in the newest; a rank is one process."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from potluck.dist import rendezvous
from potluck.dist.rendezvous import new_namespace
from potluck.errors import CollectiveError, GuestsMissingError

WORLD = 3
SOON_S = 20.0


def meet(store: Any, order: list[int], within: int | None = None) -> None:
    """The ranks come in this order, and leave words for each other."""
    with ThreadPoolExecutor(WORLD) as pool:
        comings = {rank: pool.submit(new_namespace, store, rank, WORLD, within, SOON_S) for rank in order}
        found = {rank: coming.result(SOON_S) for rank, coming in comings.items()}
    for rank, namespace in found.items():
        assert not namespace.check([f"word {rank}"])
        namespace.set(f"word {rank}", "")
    for namespace in found.values():
        assert namespace.check([f"word {rank}" for rank in range(WORLD)])


@pytest.mark.parametrize("within", [None, 7])
def test_groups_after_groups_each_have_their_own_namespace(within: int | None) -> None:
    store = HashStore()
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2], [1, 2, 0]):
        meet(store, order, within)


def test_a_namespace_in_which_not_all_came_is_left() -> None:
    """As after a restart, when the first try had got no further than some ranks."""
    store = HashStore()
    with ThreadPoolExecutor(2) as pool:
        tries = [pool.submit(new_namespace, store, rank, WORLD, None, 0.2) for rank in (0, 1)]
        for coming in tries:
            with pytest.raises(GuestsMissingError, match="did not join"):
                coming.result(SOON_S)
    meet(store, [2, 1, 0])


def test_ranks_that_come_again_wait_for_rank_0_to_begin_anew() -> None:
    store = HashStore()
    meet(store, [0, 1, 2])
    with pytest.raises(GuestsMissingError, match="rank 0 of 3 did not join"):
        new_namespace(store, 1, WORLD, None, 0.05)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_rank_that_two_living_processes_have_is_refused(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    store = HashStore()
    own = rendezvous._signature
    parent = f"0 {os.getppid()} {own().split(' ', 2)[2]}"
    monkeypatch.setattr(rendezvous, "_signature", lambda: parent)
    meet(store, [0, 1, 2])
    monkeypatch.setattr(rendezvous, "_signature", own)
    with pytest.raises(CollectiveError, match=f"rank {rank} exists twice: process {os.getppid()}") as caught:
        new_namespace(store, rank, WORLD, None, 0.05)
    assert "RANK of its own" in caught.value.hint

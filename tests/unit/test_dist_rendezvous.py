"""Where the ranks of a group lay down their cards: each group has a place of its own, and each rank one process."""

from __future__ import annotations

import pytest
from torch.distributed import HashStore

from potluck.dist import rendezvous
from potluck.errors import CollectiveError


def test_each_group_of_a_store_has_its_own_page() -> None:
    store = HashStore()
    for rank in range(2):
        for within in (None, 7, 8):
            for turn in range(2):
                page = rendezvous.new_page(store, rank, within)
                page.set(f"card {rank}", f"{within} {turn}")
                assert page.get(f"card {rank}") == f"{within} {turn}".encode()
    assert store.get("card 0") == b"None 0"  # the first: where every version looks


def test_a_rank_that_two_processes_have_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    rendezvous.new_page(store, 0, None)
    monkeypatch.setattr(rendezvous, "_PROGRAM", "another")
    with pytest.raises(CollectiveError, match="rank 0 is there twice") as caught:
        rendezvous.new_page(store, 0, None)
    assert "RANK of its own" in caught.value.hint
    rendezvous.new_page(store, 1, None)

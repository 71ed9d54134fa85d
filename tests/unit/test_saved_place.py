"""What a checkpoint says of its run: written and read through one type, and refused if it is not of it."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from potluck import checked
from potluck.train.host_ranks import RankReady
from potluck.train.optimizer_state import capture_rng
from potluck.train.saved_place import DataPlace, SavedPlace

PLACE = SavedPlace(
    samples=100,
    global_batch=8,
    seed=2**63,
    micro_batch=4,
    data=DataPlace(epoch=1, done=3, position=124, digest="ab", generators=capture_rng({}), drawn=2),
)


def read(text: bytes) -> SavedPlace:
    return checked.decode(text, SavedPlace)


@pytest.mark.parametrize(
    "place",
    [
        PLACE,
        SavedPlace(samples=None, global_batch=None, seed=-1),
        SavedPlace(samples=sys.maxsize, global_batch=8, seed=0),
    ],
)
def test_it_survives_json(place: SavedPlace) -> None:
    assert read(msgspec.json.encode(place)) == place


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": "many"},
        {"samples": 10**30},
        {"global_batch": -1},
        {"micro_batch": 0},
        {"data": {"epoch": "three"}},
        {"data": {"done": -1}},
        {"data": {"shuffled": True}},
        {"data": {"generators": {"python": []}}},
    ],
    ids=str,
)
def test_what_potluck_does_not_write_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError, match=rf"`\$\.{next(iter(wrong))}"):
        read(msgspec.json.encode({**msgspec.to_builtins(PLACE), **wrong}))


def test_the_hosts_ranks_may_read_endless_data_too() -> None:
    """A script gives it the largest length that there is."""
    ready = RankReady(model="", samples=sys.maxsize, free_bytes=None)
    assert checked.decode(msgspec.json.encode(ready), RankReady) == ready

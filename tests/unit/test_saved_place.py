"""What a checkpoint says of its run: written and read through one type, and refused if it is not of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from potluck.errors import CheckpointError
from potluck.train.optimizer_state import capture_rng
from potluck.train.saved_place import DataPlace, SavedPlace, saved_place

PLACE = SavedPlace(
    samples=100,
    global_batch=8,
    seed=2**63,
    micro_batch=4,
    data=DataPlace(epoch=1, done=3, position=124, digest="ab", generators=capture_rng({}), drawn=2),
)


def read(extra: dict[str, Any]) -> SavedPlace:
    return saved_place(json.loads(json.dumps(extra)), where="here", step=7)


@pytest.mark.parametrize("place", [PLACE, SavedPlace(samples=None, global_batch=None, seed=-1)])
def test_it_survives_json(place: SavedPlace) -> None:
    assert read(place.as_json()) == place


@pytest.mark.parametrize(
    "wrong",
    [
        {"samples": "many"},
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
    with pytest.raises(CheckpointError) as refused:
        read({**PLACE.as_json(), **wrong})
    assert refused.value.step == 7
    assert next(iter(wrong)) in refused.value.what

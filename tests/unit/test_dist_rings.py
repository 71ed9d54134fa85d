"""The notes in a ring: what a member writes is what the others read, for as many members as there may be."""

from __future__ import annotations

from typing import Any

import torch

from potluck.dist.local_collectives import NOTE_LIMIT
from potluck.dist.local_memory import MAX_MEMBERS
from potluck.dist.rings import Ring, Shape


def test_the_longest_note_with_the_counts_of_the_most_members_fits() -> None:
    shape = Shape(writers=1, readers=1, depth=2, slot_bytes=0)
    words: Any = None
    ring = Ring(shape, words, 0, memoryview(bytearray(shape.note_bytes)), torch.empty(0, dtype=torch.uint8))
    note = b"x" * NOTE_LIMIT + b"\0" + bytes(range(8)) * MAX_MEMBERS
    ring.write_note(0, 1, note)
    assert ring.note(0, 1) == note

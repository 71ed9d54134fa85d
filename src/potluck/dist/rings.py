"""Rings of slots in shared memory, in which processes of one machine exchange bytes: owns the order of access.

In every round each process may fill its own slot and announce it (post), waits for the slots of others (arrived),
and reports when it no longer needs that round (done). A slot is filled again only after all readers have reported
done. All processes make the same rounds in the same order, so a round's number identifies it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.dist.shm import Words

NOTE_BYTES = 1024
"""Holds a description and, for an all-to-all, a count for each of 64 members."""
_LENGTH = struct.Struct("<I")


@dataclass(slots=True)
class Wait:
    """The limits of a wait."""

    deadline: float
    check: Callable[[Callable[[], list[int]]], None]
    """Raises if the wait is useless. Its argument is a function that lists the missing members."""
    late: Callable[[Iterable[int]], Exception]
    """The error if these members did not arrive in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The size of a ring."""

    writers: int
    readers: int
    depth: int
    slot_bytes: int

    @property
    def words(self) -> int:
        return self.writers + self.readers

    @property
    def note_bytes(self) -> int:
        return self.writers * self.depth * NOTE_BYTES

    @property
    def data_bytes(self) -> int:
        return self.writers * self.depth * self.slot_bytes


class Ring:
    """The slots of `writers`, read by `readers`. This process is a writer, a reader or both.

    One word for each writer counts its posts, and one for each reader its finished rounds.
    """

    def __init__(self, shape: Shape, words: Words, first_word: int, notes: memoryview, data: Tensor) -> None:
        self.shape = shape
        self.round = 0
        """The next round that this process posts."""
        self.read_round = 0
        """The next round that this process will finish reading."""
        self._words = words
        self._posts = first_word
        self._dones = first_word + shape.writers
        self._notes = notes
        self._data = data.view(shape.writers, shape.depth, shape.slot_bytes)  # [writers, depth, bytes]
        self._views: dict[torch.dtype, list[list[Tensor]]] = {}

    def slot(self, writer: int, number: int, dtype: torch.dtype) -> Tensor:
        """The slot of `writer` in round `number`, as a flat tensor of `dtype`."""
        views = self._views.get(dtype)
        if views is None:
            views = [[slot.view(dtype) for slot in slots] for slots in self._data]
            self._views[dtype] = views
        return views[writer][number % self.shape.depth]

    def free(self, readers: Iterable[int], wait: Wait) -> int:
        """Wait until the next round's slot may be filled. Returns the round's number."""
        number = self.round
        self._wait(self._dones, readers, number - self.shape.depth + 1, wait)
        return number

    def is_free(self, readers: Iterable[int]) -> bool:
        """Whether the next round's slot may be filled."""
        words, target = self._words, self.round - self.shape.depth + 1
        return all(words.reached(self._dones + reader, target) for reader in readers)

    def post(self, writer: int) -> None:
        """Announce that this process has filled its slot."""
        self.round += 1
        self._words.write(self._posts + writer, self.round)

    def arrived(self, writers: Iterable[int], number: int, wait: Wait) -> None:
        """Wait until the slots of `writers` are filled in round `number`."""
        self._wait(self._posts, writers, number + 1, wait)

    def has(self, writers: Iterable[int], number: int) -> bool:
        """Whether the slots of `writers` are filled in round `number`."""
        words = self._words
        return all(words.reached(self._posts + writer, number + 1) for writer in writers)

    def done(self, reader: int) -> None:
        """Report that this process has finished reading its oldest unfinished round."""
        self.read_round += 1
        self._words.write(self._dones + reader, self.read_round)

    def write_note(self, writer: int, number: int, note: bytes) -> None:
        at = self._note_at(writer, number)
        note = note[: NOTE_BYTES - _LENGTH.size]
        _LENGTH.pack_into(self._notes, at, len(note))
        self._notes[at + _LENGTH.size : at + _LENGTH.size + len(note)] = note

    def note_is(self, writer: int, number: int, note: bytes) -> bool:
        """Whether a writer has left exactly this note."""
        at = self._note_at(writer, number) + _LENGTH.size
        return bytes(self._notes[at - _LENGTH.size : at + len(note)]) == _LENGTH.pack(len(note)) + note

    def note(self, writer: int, number: int) -> bytes:
        at = self._note_at(writer, number)
        (length,) = _LENGTH.unpack_from(self._notes, at)
        return bytes(self._notes[at + _LENGTH.size : at + _LENGTH.size + min(length, NOTE_BYTES - _LENGTH.size)])

    def _note_at(self, writer: int, number: int) -> int:
        return (writer * self.shape.depth + number % self.shape.depth) * NOTE_BYTES

    def _wait(self, base: int, members: Iterable[int], target: int, wait: Wait) -> None:
        words = self._words

        def missing() -> list[int]:
            return [other for other in members if not words.reached(base + other, target)]

        for member in members:
            if words.reached(base + member, target):
                continue
            if not words.wait(base + member, target, wait.deadline, lambda: wait.check(missing)):
                raise wait.late(missing())

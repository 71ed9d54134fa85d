"""One step's samples on their way from a worker process, and any part of them as a batch.

Owns how a worker packs a step and how this process takes parts of it. Where torch's default_collate makes the
batches, the worker collates the whole step and a part is a slice of it, without a copy. Any other collate function
needs the samples of its batch, so the worker sends them one by one, all their tensors in one piece of shared
memory. A tensor in shared memory of its own costs a file descriptor and some 700 µs of this process, so small ones
(labels, lengths) travel as bytes in the message.
"""

from __future__ import annotations

import copy
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from potluck.errors import DataError

Collate = Callable[[list[Any]], Any]

COLLATED, SAMPLES, FAILED, UNREAD = "collated", "samples", "failed", "unread"
"""What a packed step holds."""

ALIGN_BYTES = 16
SMALL_BYTES = 1 << 14
"""A collated tensor of at most so many bytes travels in the message instead of in shared memory."""
_ROWS, _TEXTS = "rows", "texts"


@dataclass(frozen=True, slots=True)
class _Place:
    """A tensor or an array that lies in the step's shared memory."""

    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    numpy: bool


@dataclass(frozen=True, slots=True)
class _Small:
    """A small tensor, as bytes."""

    content: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Forms:
    """Samples with a `_Place` for every tensor and array. In a plain list, pinning would make lists of tuples."""

    samples: list[Any]


@dataclass(frozen=True, slots=True)
class Unread:
    """In place of samples: why they cannot be read. torch would make other words of what a worker raises."""

    what: str
    hint: str
    trace: str


class PackStep:
    """Runs in a worker as its DataLoader's collate function: the samples of a step, packed.

    The user's own collate function is not sent to the worker: a lambda could not be. `pinned`: the loader copies
    tensors into pinned memory, and only tensors; so none is sent in another form.
    """

    def __init__(self, collate: Collate, *, pinned: bool = False) -> None:
        self._collates, self._pinned = collate is default_collate, pinned

    def __call__(self, samples: list[Any]) -> list[Any]:
        if self._collates and (form := _form(samples[0])) is not None:
            try:
                batch = default_collate(samples)
                return [
                    COLLATED,
                    len(samples),
                    form,
                    batch if self._pinned else _mapped(batch, _small, named=False),
                ]
            except Exception as error:
                at = culprit(samples, default_collate)
                return [FAILED, len(samples), at, in_words(error), traceback.format_exc()]
        return packed_samples(samples)


def packed_samples(samples: list[Any]) -> list[Any]:
    """The samples of a step or of a part of it, one by one."""
    if samples and isinstance(unread := samples[0], Unread):
        return [UNREAD, 0, unread.what, unread.hint, unread.trace]
    return [SAMPLES, len(samples), *_packed(samples)]


def unpacked_samples(packed: Sequence[Any]) -> list[Any]:
    if packed[0] == UNREAD:
        what, hint, trace = packed[2:]
        raise DataError(what, hint=hint) from RuntimeError(f"in a worker process:\n{trace}")
    return _unpacked(*packed[2:])


class HeldStep:
    """One step's samples in this process."""

    def __init__(self, packed: Sequence[Any], collate: Collate, keys: Sequence[Any] | None) -> None:
        kind, self.count, *rest = packed
        self._collate, self._keys = collate, keys
        self._form: Any = None
        self._content: Any
        if kind == FAILED:
            at, told, trace = rest
            raise cannot_collate(at, keys, told) from RuntimeError(f"in a worker process:\n{trace}")
        if kind == COLLATED:
            self._form, self._content = rest[0], _mapped(rest[1], _whole, named=False)
        else:
            self._content = unpacked_samples(packed)

    @classmethod
    def of(cls, samples: list[Any], collate: Collate) -> HeldStep:
        """Of samples that are here already."""
        held = cls([SAMPLES, len(samples), _Forms([]), torch.empty(0, dtype=torch.uint8)], collate, None)
        held._content = samples
        return held

    @property
    def sliced(self) -> bool:
        """Whether a part is a slice, which runs no code of the user's."""
        return self._form is not None

    def part(self, rows: Sequence[int]) -> Any:
        """The batch of these samples, by their places in the step."""
        if self._form is not None:
            first, count = rows[0], len(rows)
            in_a_row = list(rows) == list(range(first, first + count))
            return _sliced(self._form, self._content, slice(first, first + count) if in_a_row else list(rows))
        keys = None if self._keys is None else [self._keys[row] for row in rows]
        return collated([self._content[row] for row in rows], self._collate, keys, kept=True)


def collated(samples: list[Any], collate: Collate, keys: Sequence[Any] | None, *, kept: bool = False) -> Any:
    """The batch of these samples; a failure names the sample.

    `kept`: they may be collated again, so the collate function, which may change them, gets copies.
    """
    try:
        return collate(_mapped(samples, _copied) if kept else samples)
    except Exception as error:
        raise cannot_collate(culprit(samples, collate), keys, in_words(error)) from error


def in_words(error: Exception) -> str:
    """The type of an error and its first line. torch puts a worker's behind its traceback."""
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        heads = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        return next((line for line in lines[heads[-1] + 1 :] if line[:1].strip()), lines[0]) if heads else lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def culprit(samples: list[Any], collate: Collate) -> tuple[int, ...]:
    """The place of the sample that cannot be collated; of two that cannot be collated together; of none."""
    for at, sample in enumerate(samples):
        if not _collates([sample], collate):
            return (at,)
    for at, sample in enumerate(samples):
        if not _collates([samples[0], sample], collate):
            return (0, at)
    return ()


def cannot_collate(at: Sequence[int], keys: Sequence[Any] | None, told: str) -> DataError:
    names = [f"number {place} of its batch" if keys is None else f"{keys[place]!r}" for place in at]
    which = {0: "a batch", 1: "sample {}", 2: "samples {} and {} together"}[len(names)].format(*names)
    return DataError(
        f"the collate function fails on {which}: {told}",
        hint="correct the sample or leave it out of the data set; or give a collate function that takes it",
    )


def _collates(samples: list[Any], collate: Collate) -> bool:
    try:
        collate(_mapped(samples, _copied))
    except Exception:
        return False
    return True


# -- a step that default_collate made into one batch ----------------------------------------------------


def _form(sample: Any) -> Any:
    """Where default_collate stacks this sample's values and where it lists its texts; None: cannot be sliced."""
    if isinstance(sample, Tensor):
        return _ROWS if type(sample) is Tensor and sample.layout is torch.strided and not sample.is_nested else None
    if isinstance(sample, str | bytes):
        return _TEXTS
    if isinstance(sample, np.ndarray | np.generic | bool | int | float):
        return _ROWS
    if isinstance(sample, Mapping):
        return _complete({key: _form(value) for key, value in sample.items()})
    if type(sample) in (list, tuple) or (isinstance(sample, tuple) and hasattr(sample, "_fields")):
        return _complete([_form(value) for value in sample])
    return None


def _small(leaf: Any) -> Any:
    """What a worker sends for a leaf of the batch; `_whole` reverses it."""
    if get_worker_info() is None or (value := _plain(leaf)) is None or not 0 < value.nbytes <= SMALL_BYTES:
        return leaf
    return _Small(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), value.dtype, tuple(value.shape))


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, _Small):
        return leaf
    return torch.frombuffer(bytearray(leaf.content), dtype=leaf.dtype).view(leaf.shape)


def _complete(forms: Any) -> Any:
    return None if None in (forms.values() if isinstance(forms, dict) else forms) else forms


def _sliced(form: Any, batch: Any, rows: slice | list[int]) -> Any:
    if form == _ROWS:
        return batch[rows]
    if form == _TEXTS:
        return batch[rows] if isinstance(rows, slice) else type(batch)([batch[row] for row in rows])
    if isinstance(form, dict):
        parts = {key: _sliced(each, batch[key], rows) for key, each in form.items()}
        if type(batch) is dict:
            return parts
        if isinstance(batch, MutableMapping):
            same = copy.copy(batch)
            same.update(parts)
            return same
        return type(batch)(parts)
    values = [_sliced(each, part, rows) for each, part in zip(form, batch, strict=True)]
    return type(batch)(*values) if isinstance(batch, tuple) and hasattr(batch, "_fields") else values


# -- a step of single samples ---------------------------------------------------------------------------


def _packed(samples: list[Any]) -> tuple[_Forms, Tensor]:
    """The samples, and the bytes of all their tensors and arrays."""
    values: list[Tensor] = []
    filled = 0

    def place(leaf: Any) -> Any:
        nonlocal filled
        value = _plain(leaf)
        if value is None:
            return leaf
        values.append(value)
        at, filled = filled, filled + -(-value.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return _Place(at, value.nbytes, value.dtype, tuple(value.shape), isinstance(leaf, np.ndarray))

    forms = _Forms([_mapped(sample, place) for sample in samples])
    content = _shared(filled)
    at = 0
    for value in values:
        content[at : at + value.nbytes] = value.contiguous().reshape(-1).view(torch.uint8)
        at += -(-value.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return forms, content


def _unpacked(forms: _Forms, content: Tensor) -> list[Any]:
    def value(leaf: Any) -> Any:
        if not isinstance(leaf, _Place):
            return leaf
        tensor = content[leaf.offset : leaf.offset + leaf.nbytes].view(leaf.dtype).view(leaf.shape)
        return tensor.numpy() if leaf.numpy else tensor

    return [_mapped(form, value) for form in forms.samples]


def _plain(leaf: Any) -> Tensor | None:
    """The leaf as a tensor whose bytes can be copied; None for anything else, which travels as it is."""
    if isinstance(leaf, np.ndarray):
        try:
            return torch.from_numpy(np.ascontiguousarray(leaf).reshape(leaf.shape))
        except (TypeError, ValueError):  # ValueError: of another byte order
            return None
    if type(leaf) is not Tensor or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
        return None
    return None if leaf.requires_grad or leaf.is_nested or leaf.is_conj() or leaf.is_neg() else leaf


def _shared(nbytes: int) -> Tensor:
    """Bytes that other processes can read without a copy, if this is a worker process."""
    if get_worker_info() is None or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def _copied(leaf: Any) -> Any:
    """Its own bytes alone: a deep copy of a tensor would copy all the memory that it shares with other samples."""
    if isinstance(leaf, Tensor):
        return leaf.clone()
    try:
        return copy.deepcopy(leaf)
    except Exception:  # what cannot be copied is given as it is
        return leaf


def _mapped(tree: Any, function: Callable[[Any], Any], *, named: bool = True) -> Any:
    """The same containers with other leaves. Only plain ones are entered: what else there is may have a reason.

    `named`: named tuples too, though one may check its fields when it is made.
    """
    if type(tree) is dict:
        return {key: _mapped(value, function, named=named) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_mapped(value, function, named=named) for value in tree)
    if named and isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_mapped(value, function) for value in tree))
    return function(tree)

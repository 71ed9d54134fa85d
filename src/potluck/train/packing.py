"""Packs one step's samples in a worker process and makes batches of any part of them.

Owns how a worker packs a step and how this process takes parts of it. Where torch's default_collate makes the
batches, the worker collates the whole step and a part is a slice of it, without a copy. Any other collate function
needs the samples of its batch: the worker collates the micro-batches that the host is expected to compute. Where
guests may be lent any other part, it sends the samples too.
"""

from __future__ import annotations

import copy
import itertools
import traceback
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from potluck.balance.leases import next_size
from potluck.errors import DataError
from potluck.train.worker_memory import SMALL_BYTES, pack, plain, unpack

Collate = Callable[[list[Any]], Any]

COLLATED, PARTS, SAMPLES, HERE = "collated", "parts", "samples", "here"
"""What a packed step holds."""
FAILED, UNREAD, UNSENT = "failed", "unread", "unsent"
"""Why it holds nothing."""

NO_SHARED_MEMORY = "unable to allocate shared memory"
"""What torch says where /dev/shm is full, in whatever a worker does with a tensor."""
_ROWS, _TEXTS = "rows", "texts"


@dataclass(frozen=True, slots=True)
class _Small:
    """A small tensor, as bytes."""

    content: bytes
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Here:
    """Samples that stay in this process. In a list, pinning would make lists of tuples."""

    samples: list[Any]


@dataclass(frozen=True, slots=True)
class Unread:
    """Sent instead of samples: why they cannot be read. torch would reword an exception of the worker."""

    what: str
    hint: str
    trace: str


class PackStep:
    """Runs in a worker as its DataLoader's collate function: the samples of a step, packed.

    `pinned`: the loader copies tensors into pinned memory, and only tensors; so none is sent in another form.
    `can_send`: whether the collate function can be sent to the workers; a lambda may not be.
    """

    def __init__(self, collate: Collate, *, pinned: bool = False, can_send: bool = False) -> None:
        self._collates, self._pinned = collate is default_collate, pinned
        self._own = collate if can_send else None
        self._sends: bool | None = None
        """In a worker: whether samples can be pickled; None: not known yet."""
        self._said: Tensor | None = None
        if self._own is not None:
            self._said = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64).share_memory_()

    @property
    def cuts(self) -> bool:
        """Whether workers collate micro-batches."""
        return self._own is not None and not self._collates

    def cut(self, size: int, *, least: int, share: float, anyhow: bool) -> None:
        """What workers do from now on with steps that they have not read: see `StepLoader.cut`."""
        if self._said is not None:
            self._said.copy_(torch.tensor([size, least, share, anyhow], dtype=torch.float64))

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
                if NO_SHARED_MEMORY in str(error):
                    raise  # no sample's fault
                at = culprit(samples, default_collate)
                return [FAILED, len(samples), at, in_words(error), traceback.format_exc()]
        if get_worker_info() is None:  # they stay in this process
            return [HERE, len(samples), _Here(samples)]
        if self._said is None or isinstance(samples[0], Unread):
            return packed_samples(samples)
        size, least, share, anyhow = self._said.tolist()
        sizes = _sizes(round(share * len(samples)), int(size), int(least))
        if self._sends is None:
            self._sends = _packs(samples[0])
        rest: Sequence[Any] = ()
        if anyhow or (self._sends and not sizes):
            # Before the user's function changes them.
            kind, _, *rest = packed = packed_samples(samples, apart=True)
            if kind != SAMPLES and anyhow:
                return packed
            self._sends = kind == SAMPLES
        if not anyhow and not self._sends:
            sizes = (len(samples),)  # as in a plain loop
        return self._cut(samples, sizes, rest if anyhow else ()) if sizes else [SAMPLES, len(samples), *rest]

    def _cut(self, samples: list[Any], sizes: Sequence[int], rest: Sequence[Any]) -> list[Any]:
        """Collated micro-batches from the step's first sample on, and the samples of the whole step, if any."""
        assert self._own is not None
        batches, first = [], 0
        for size in sizes:
            part = samples[first : first + size]
            try:
                batches.append(self._own(_mapped(part, _same)))
            except Exception as error:
                if NO_SHARED_MEMORY in str(error):
                    raise
                told, trace = in_words(error), traceback.format_exc()
                at = tuple(first + place for place in culprit(part, self._own))
                return [FAILED, len(samples), at, told, trace]
            first += size
        try:
            made = pack(batches, batches=True, whole=self._pinned)
        except Exception as error:
            return _unsent(error, len(samples), ())
        return [PARTS, len(samples), sizes, *made, *rest]


def _sizes(samples: int, size: int, least: int) -> tuple[int, ...]:
    """So many samples as micro-batches of this size, cut as the host does; none where there is no size."""
    sizes: list[int] = []
    while size and samples:
        sizes.append(next_size(samples, size, least))
        samples -= sizes[-1]
    return tuple(sizes)


def packed_samples(samples: list[Any], *, apart: bool = False) -> list[Any]:
    """The samples of a step or of a part of it. `apart`: they may be changed afterwards."""
    if samples and isinstance(unread := samples[0], Unread):
        return [UNREAD, 0, unread.what, unread.hint, unread.trace]
    try:
        return [SAMPLES, len(samples), *pack([samples], apart=apart)]
    except Exception as error:
        at = next(((at,) for at, sample in enumerate(samples) if not _packs(sample)), ())
        return _unsent(error, len(samples), at)


def _packs(sample: Any) -> bool:
    try:
        pack([sample])
    except Exception:
        return False
    return True


def _unsent(error: Exception, samples: int, at: tuple[int, ...]) -> list[Any]:
    """The message where something cannot be pickled. torch would lose the step, and wait for it without end."""
    if NO_SHARED_MEMORY in str(error):
        raise error
    return [UNSENT, samples, at, in_words(error), traceback.format_exc()]


def unpacked_samples(packed: Sequence[Any], keys: Sequence[Any] | None = None) -> list[Any]:
    check_packed(packed, keys)
    samples: list[Any] = packed[2].samples if packed[0] == HERE else unpack(*packed[2:])
    return samples


def check_packed(packed: Sequence[Any], keys: Sequence[Any] | None) -> None:
    """Raises the error of a step that holds nothing. It names the sample."""
    kind, _, *why = packed
    if kind == UNREAD:
        error = DataError(why[0], hint=why[1])
    elif kind == FAILED:
        error = cannot_collate(why[0], keys, why[1])
    elif kind == UNSENT:
        error = DataError(
            f"a worker process cannot send {_named(why[0], keys)}: {why[1]}",
            hint="pickle must be able to take it: give tensors, arrays, numbers, texts, or containers of them; or "
            "set num_workers=0",
        )
    else:
        return
    raise error from RuntimeError(f"in a worker process:\n{why[2]}")


class HeldStep:
    """One step's samples in this process."""

    def __init__(
        self, packed: Sequence[Any], collate: Collate, keys: Sequence[Any] | None, *, again: bool = True
    ) -> None:
        """`again`: a sample may be collated several times, as where a lease on it is taken back."""
        check_packed(packed, keys)
        kind, self.count, *rest = packed
        self._again = again
        self._collate, self._keys = collate, keys
        self._form: Any = None
        self._made: dict[int, tuple[int, int]] = {}
        """Collated micro-batches by their first samples: how many samples, and the number among `_batches`."""
        self._batches: Sequence[Any] = ()
        self._packed: Sequence[Any] = ()
        """The samples, if there are also micro-batches: only a part that is none of these needs them."""
        self._content: Any = None
        if kind == COLLATED:
            self._form, self._content = rest[0], _mapped(rest[1], _whole, named=False)
        elif kind == PARTS:
            sizes, *rest = rest
            self._batches, self._packed = rest[:2], rest[2:]
            firsts = itertools.accumulate(sizes, initial=0)
            self._made = dict(zip(firsts, zip(sizes, itertools.count())))
        else:
            self._content = unpacked_samples(packed)

    @classmethod
    def of(cls, samples: list[Any], collate: Collate) -> HeldStep:
        """Make one from samples in this process."""
        return cls([HERE, len(samples), _Here(samples)], collate, None)

    def made_at(self, row: int) -> int:
        """How many samples the worker has collated together from this one on; 0: none."""
        return self._made.get(row, (0, None))[0]

    def is_made(self, rows: Sequence[int]) -> bool:
        """Whether taking this part runs none of the user's code: it is a slice, or a worker has collated it."""
        return self._form is not None or (self.made_at(rows[0]) == len(rows) and _in_a_row(rows))

    def part(self, rows: Sequence[int]) -> Any:
        """The batch of these samples, by their places in the step."""
        if self._form is not None:
            first, count = rows[0], len(rows)
            wanted = slice(first, first + count) if _in_a_row(rows) else list(rows)
            return _sliced(self._form, self._content, wanted)
        if self.is_made(rows):
            sent, content = self._batches
            return unpack(sent, content, self._made[rows[0]][1], copies=True)
        keys = None if self._keys is None else [self._keys[row] for row in rows]
        if self._content is None:
            self._content = unpack(*self._packed)
        # The collate function may change what it is given.
        own = _copied if self._again else _same
        return collated([self._content[row] for row in rows], self._collate, keys, own)


def _in_a_row(rows: Sequence[int]) -> bool:
    return list(rows) == list(range(rows[0], rows[0] + len(rows)))


def collated(
    samples: list[Any], collate: Collate, keys: Sequence[Any] | None, own: Callable[[Any], Any] | None = None
) -> Any:
    """The batch of these samples. An error names the sample.

    `own`: the collate function gets containers of its own, with the result of this for each of their values.
    """
    try:
        return collate(_mapped(samples, own) if own else samples)
    except Exception as error:
        raise cannot_collate(culprit(samples, collate), keys, in_words(error)) from error


def in_words(error: Exception) -> str:
    """The type of an error and its first line. torch puts a worker's error after its traceback."""
    lines = str(error).strip().splitlines()
    if lines and lines[0].startswith("Caught ") and "DataLoader worker" in lines[0]:
        heads = [number for number, line in enumerate(lines) if "Traceback (most recent call last)" in line]
        return next((line for line in lines[heads[-1] + 1 :] if line[:1].strip()), lines[0]) if heads else lines[0]
    return ": ".join([type(error).__name__, *lines[:1]])


def culprit(samples: list[Any], collate: Collate) -> tuple[int, ...]:
    """The positions of the sample that cannot be collated, of two that cannot be collated together, or of none."""
    for at, sample in enumerate(samples):
        if not _collates([sample], collate):
            return (at,)
    for at, sample in enumerate(samples):
        if not _collates([samples[0], sample], collate):
            return (0, at)
    return ()


def cannot_collate(at: Sequence[int], keys: Sequence[Any] | None, told: str) -> DataError:
    return DataError(
        f"the collate function fails on {_named(at, keys)}: {told}",
        hint="correct the sample or leave it out of the data set; or give a collate function that takes it",
    )


def _named(at: Sequence[int], keys: Sequence[Any] | None) -> str:
    names = [f"number {place} of its batch" if keys is None else f"{keys[place]!r}" for place in at]
    return {0: "a batch", 1: "sample {}", 2: "samples {} and {} together"}[len(names)].format(*names)


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
        return _ROWS if sample.layout is torch.strided and not sample.is_nested else None
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
    """What a worker sends for a leaf of the batch. `_whole` is the inverse."""
    if get_worker_info() is None or (value := plain(leaf)) is None or not 0 < value.nbytes <= SMALL_BYTES:
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


# -- containers -------------------------------------------------------------------------------------------


def _same(leaf: Any) -> Any:
    return leaf


def _copied(leaf: Any) -> Any:
    """A copy of its own bytes only: a deep copy of a tensor would copy all memory that it shares with other
    samples."""
    if isinstance(leaf, Tensor):
        same = leaf.clone()
        same.__dict__.update(leaf.__dict__)
        return same
    try:
        return copy.deepcopy(leaf)
    except Exception:  # what cannot be copied is given as it is
        return leaf


_VALUES = frozenset((int, float, bool, str, bytes, type(None)))
"""They never change. A text as a list of its tokens has thousands in a step: one by one, a copy takes 5 ms."""


def _mapped(tree: Any, function: Callable[[Any], Any], *, named: bool = True) -> Any:
    """The same containers with other leaves. Only plain containers are entered; a special class may have a reason.

    `named`: named tuples too. Their own `__new__`, which may take other arguments, is not called.
    """
    if type(tree) is dict:
        return {key: _mapped(value, function, named=named) for key, value in tree.items()}
    if type(tree) in (list, tuple):
        if _VALUES.issuperset(map(type, tree)):
            return type(tree)(tree)
        return type(tree)(_mapped(value, function, named=named) for value in tree)
    if named and isinstance(tree, tuple) and hasattr(tree, "_make"):
        return type(tree)._make(_mapped(value, function) for value in tree)
    return function(tree)

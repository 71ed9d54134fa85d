"""The steps of the user's DataLoader: its order, its epochs, its worker processes, and resuming in it.

Makes each step one batch of that loader. torch's own code draws the batches, in an inner loader that differs from
the user's only in what its workers do with the samples. So the order is that of a plain loop by construction.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import operator
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from msgspec import structs
from msgspec.structs import replace
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from potluck.balance.ledger import StepSamples
from potluck.errors import ConfigError, DataError, PotluckError
from potluck.train import optimizer_state
from potluck.train.data import Loader, length, opened
from potluck.train.optimizer_state import RngState, Stateful
from potluck.train.packing import Collate, HeldStep, PackStep, in_words
from potluck.train.saved_place import DataPlace
from potluck.train.step_loader import DataSetLoader, StepLoader
from potluck.train.workers import (
    Echo,
    Recorded,
    WorkerLoader,
    drawn,
    is_sendable,
    is_stream,
    rebuilt,
    shut,
    unwatched,
    worker_errors,
)

FORESEEN = (SequentialSampler, RandomSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)
"""Samplers that draw all random numbers of an epoch at its beginning, or from a generator of their own. Any other
sampler is called for its next batch only when a plain loop would call it."""


class _Place(DataPlace, frozen=True, kw_only=True):
    """The next step's samples and the data that a checkpoint saves with them."""

    stream: Any = None
    """The stream's own state, if it has one."""

    def saved(self) -> DataPlace:
        return DataPlace(**{name: getattr(self, name) for name in DataPlace.__struct_fields__})


class TorchLoader(StepLoader):
    """Steps that are the batches of a DataLoader, in its own order; read ahead by its worker processes, if any."""

    def __init__(
        self,
        loader: DataLoader[Any],
        *,
        epochs: int | None = None,
        by_index: bool = False,
        note: Callable[[str], None] = lambda text: None,
    ) -> None:
        """`by_index`: only a step's indices are read ahead, because other processes read the samples."""
        self._stream = check_loader(loader, by_index=by_index)
        self._user, self._collate = loader, loader.collate_fn
        self._numbered = by_index
        """Whether other processes are sent the indices."""
        self._whole = loader.num_workers > 0 and not by_index and not self._stream
        """Worker processes read whole steps."""
        by_workers = by_index and loader.num_workers > 0
        super().__init__(
            None
            if self._stream
            else WorkerLoader(loader)
            if by_workers
            else Loader(loader.dataset, loader.collate_fn, sized=False)
        )
        sampler = loader.batch_sampler
        self.workers = loader.num_workers
        self._restarts = loader.num_workers > 0 and not by_index and not loader.persistent_workers
        self._began = False
        self.samples = None if self._stream else length_if_any(loader.dataset)
        self.global_batch = batch_of(loader)
        self._epochs, self._note = epochs, note
        self._recorded = Recorded(sampler, remembers=self._whole)
        pinned = loader.pin_memory and torch.accelerator.is_available()
        can_send = loader.num_workers > 0 and not by_index and is_sendable(loader)
        self._pack = pack = PackStep(self._collate, pinned=pinned, can_send=can_send)
        self._anyhow = True
        if pack.cuts:
            self.cut_ahead = loader.num_workers * (loader.prefetch_factor or 1) + 1
        if self._stream:
            sizes = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
            self._loader = rebuilt(loader, pack, **sizes)
        elif self._whole:
            self._loader = rebuilt(loader, pack, batch_sampler=self._recorded)
        else:
            self._loader = DataLoader(
                Echo(),  # type: ignore[arg-type]
                batch_sampler=self._recorded,
                collate_fn=list,
                generator=loader.generator,
            )
        self._coming: Iterator[Any] | None = None
        self._ahead: list[Any] = []
        self._given: Any = None
        """The present step's indices as the sampler gave them."""
        self._foresees = not self._stream and not by_index and _foreseen(sampler)
        """Whether the next step may be read ahead."""
        self._draws_late = not self._stream and not self._whole and not _foreseen(sampler)
        """Whether the sampler may draw a batch's random numbers between those of the loop's body."""
        self._taking = threading.RLock()
        """Taken before the other lock, to take something from `_coming`."""
        self._aside: Any = None
        """The next step's samples, or the reason why there are none, if they were already taken."""
        self._next_held: HeldStep | None = None
        self._hash = hashlib.blake2b(digest_size=16)
        self._before = self._place = _Place()
        self._number = -1
        self._states: Stateful | None = _stateful(self._loader) if self._stream else None
        """The object that knows the position in the stream."""
        self.saved_stream: Any = None

    # -- steps ------------------------------------------------------------------------------------------

    def next_step(self) -> StepSamples | None:
        with self._taking, self._lock:
            self._now, self._held, self.restarted = None, None, False
            while True:
                if self._coming is None:
                    if self._epochs is not None and self._place.epoch >= self._epochs:
                        return None
                    self._begin_epoch()
                self._before = self._place
                try:
                    given = self._next()
                except StopIteration:
                    self._end_epoch()
                    continue
                return self._take(given)

    def _take(self, given: Any) -> StepSamples:
        before, keys, after, ended = self._before, None, None, False
        if self._stream:
            given, after, ended = given
            self._held = HeldStep(given, self._collate, None, again=self._anyhow)
            count = self._held.count
        else:
            self._given = given
            keys, count = _numbers(given) if self._numbered else given, len(given)
            self._hash.update(repr(given).encode())
        self._number += 1
        self._place = replace(
            before,
            done=before.done + 1,
            position=before.position + count,
            digest=self._hash.hexdigest(),
            ended=ended,
            stream=after,
        )
        if self._foresees and not self._whole and not self._ahead:
            assert self._coming is not None
            with contextlib.suppress(StopIteration):
                self._ahead.append(next(self._coming))
        self._now = StepSamples(first=before.position, count=count, keys=keys, epoch=before.epoch)
        return self._now

    def cut(self, size: int, *, least: int = 1, share: float = 1.0, anyhow: bool = True) -> None:
        self._anyhow = anyhow
        self._pack.cut(size, least=least, share=share, anyhow=anyhow)

    def ready(self) -> None:
        if not self._whole:
            return
        with self._taking, self._lock:
            if self._now is None or self._held is not None:
                return
            packed, held = self._take_packed(), self._next_held
            self._aside = self._next_held = None
            if isinstance(packed, Exception):
                raise packed
            self._held = held or HeldStep(packed, self._collate, self._now.keys, again=self._anyhow)

    def _take_packed(self) -> Any:
        """The samples of the next step that workers have read, or the failure."""
        if self._aside is None:
            assert self._coming is not None
            try:
                with worker_errors():
                    self._aside = next(self._coming, None)
            except Exception as error:
                self._aside = error
            if self._aside is None:
                self._aside = DataError("the loader's workers ended before the step's samples were read")
        return self._aside

    # -- the step after this one ------------------------------------------------------------------------

    def peek(self) -> StepSamples | None:
        now = self._now
        known = (self._recorded.given if self._whole else self._ahead) if self._foresees else ()
        if now is None or not known:
            return None
        keys = known[0]
        return StepSamples(first=now.first + now.count, count=len(keys), keys=keys, epoch=now.epoch)

    def fetch_ahead(self, positions: Sequence[int]) -> Any | None:
        if not self._whole:
            return super().fetch_ahead(positions)
        with contextlib.suppress(Exception), self._taking:
            following = self.peek()
            if following is None or not following.holds(positions[0]):
                return None
            if self._next_held is None:
                self._next_held = HeldStep(self._take_packed(), self._collate, following.keys, again=self._anyhow)
            with self._lock:
                return self._next_held.part([position - following.first for position in positions])
        return None

    def check_indices(self) -> None:
        if self._stream:
            raise no_indices()
        self._numbered = True

    def _steps_in_epochs(self) -> int | None:
        try:
            return None if self._epochs is None else self._epochs * len(self._user)
        except (TypeError, NotImplementedError, AttributeError):
            return None

    def ends_epoch(self) -> bool:
        """If that is not known yet, this reads the next batch."""
        if self._whole and self._held is not None:
            return not self._recorded.given
        with self._taking, self._lock:
            if self._whole:
                self.ready()
                return not self._recorded.given
            if self._coming is not None and not self._ahead:
                try:
                    self._ahead.append(self._next())
                except StopIteration:
                    return True
            return not self._ahead

    def _next(self) -> Any:
        """The next batch of this epoch: its indices, or the samples of a stream."""
        if self._ahead:
            return self._ahead.pop(0)
        if self._whole and self._recorded.given:
            return self._recorded.given.popleft()
        return self._next_new()

    def _next_new(self) -> Any:
        """The same, not of those that were read ahead."""
        assert self._coming is not None
        if not self._stream and not self._whole:
            return next(self._coming)
        try:
            with worker_errors():
                given = next(self._coming)
        except Exception as error:
            if not self._stream or isinstance(error, StopIteration | PotluckError):
                raise
            place = self._before
            raise DataError(
                f"the stream fails after sample {place.position}, in batch {place.done + 1} of epoch "
                f"{place.epoch + 1}: {in_words(error)}",
                hint="correct its data, or leave out what it cannot read; --debug shows where it failed",
            ) from error
        if not self._stream:
            return given
        if self._states is None:
            return given, None, False
        state = copy.deepcopy(self._states.state_dict())
        # A loader with a state says in it that the data set has ended; a data set may be at its start again.
        if hasattr(self._loader, "state_dict"):
            return given, state, _workers_ended(state)
        return given, state, bool(getattr(getattr(self._coming, "_dataset_fetcher", None), "ended", False))

    # -- epochs -----------------------------------------------------------------------------------------

    def _begin_epoch(self) -> None:
        epoch = self._place.epoch
        fresh = not self._loader.persistent_workers or self._loader._iterator is None
        self.restarted, self._began = self._restarts and self._began, True
        self._place = replace(self._place, generators=self._generator_states(), fresh=fresh)
        self._hash = hashlib.blake2b(digest_size=16)
        for each in self._told_epochs():
            each.set_epoch(epoch)
        try:
            with worker_errors():
                coming = unwatched(iter(self._loader))
                self._coming = coming if self._stream or self._whole else drawn(coming)
        except TypeError as error:
            raise DataError(
                f"the loader's sampler cannot be iterated over: {error}", hint="give a sampler with __iter__"
            ) from error

    def _end_epoch(self) -> None:
        place = self._place
        if not place.done and place.ended:
            # Its state was put back, and was that of its end: it begins now.
            assert place.generators is not None
            self._restore_generators(place.generators)
            self._coming, self._place = None, replace(place, ended=False, stream=None)
            return
        if not place.done:
            if place.epoch:
                raise DataError(
                    f"the loader gave no batch in epoch {place.epoch + 1}",
                    hint="its sampler or its data set can be read only once: give one that starts again each time, "
                    "or end the loop with epochs=1",
                )
            few = "drop_last leaves out a batch that is not full" if self._user.drop_last else "is it empty?"
            raise DataError(
                f"the loader gives no batch at all: {few}", hint="give it at least one batch of samples"
            )
        if not self._loader.persistent_workers:
            shut(self._coming)
        self._coming = None
        self._place = self._after_epoch(replace(place, ended=False, stream=None))

    @staticmethod
    def _after_epoch(place: _Place) -> _Place:
        return replace(place, epoch=place.epoch + 1, done=0, digest="", generators=None)

    def _told_epochs(self) -> list[Any]:
        """The objects that are told the epoch's number: the samplers, and the data set of a stream."""
        batches = self._user.batch_sampler
        asked = [self._user.sampler, batches, getattr(batches, "sampler", None)]
        asked += [self._user.dataset] if self._stream else []
        unique = {id(each): each for each in asked if callable(getattr(each, "set_epoch", None))}
        return list(unique.values())

    # -- resuming ---------------------------------------------------------------------------------------

    def state(self, step: int) -> DataPlace:
        place = self._before if self._now is not None and step == self._number else self._place
        drawn = self._ahead if place is self._place else [self._given, *self._ahead]
        place = replace(place, drawn=len(drawn), drawn_digest=_digest(drawn) if self._draws_late else "")
        if place.ended and place.done:
            place = self._after_epoch(place)
        self.saved_stream = place.stream
        return place.saved()

    def objects(self) -> dict[str, Stateful]:
        """What a checkpoint saves besides the state."""
        return {"loader": StreamState(self)} if self._states is not None else {}

    def resume(self, step: int, saved: DataPlace | None) -> None:
        """Go to the checkpoint's position: the sampler returns the epoch's batches again, but none is read.

        This process's random generators do not change.
        """
        if saved is None:
            raise ConfigError(
                "the run was started with a data set, now it has a DataLoader",
                hint="a resumed run resumes at exactly the next sample: give it what it had, or start a new run",
            )
        self._number = step - 1
        self._place = _Place(**structs.asdict(saved), stream=self.saved_stream)
        if self._place.generators is None:
            if self._states is not None and self.saved_stream is not None:
                self._states.load_state_dict(self.saved_stream)
            return
        done, own = self._place.done, optimizer_state.capture_rng({})
        if not self._place.fresh and self._whole:
            # The workers' seed was drawn in an earlier epoch, not in this one.
            self._recorded.silent = True
            unwatched(iter(self._loader))
            self._recorded.silent = False
        self._restore_generators(self._place.generators)
        if self._stream:
            self._resume_stream(done)
        else:
            self._recorded.skip = self._skip
            self._begin_epoch()
            if not self._whole:
                self._read_ahead(self._place.drawn)
            drawn = self._place.drawn_digest
            if drawn and self._draws_late and drawn != _digest(self._ahead):
                # Something else drew random numbers between these batches and those before them.
                raise self._other_samples(self._place.done + 1)
        optimizer_state.restore_rng(own)

    def _read_ahead(self, count: int) -> None:
        """The sampler, or the stream, draws the same random numbers as before, and no more."""
        self._recorded.leave_out()
        for _ in range(count):
            with contextlib.suppress(StopIteration), worker_errors():
                self._ahead.append(self._next_new())

    def _skip(self, batches: Iterator[Any]) -> None:
        done = sum(1 for batch in itertools.islice(batches, self._place.done) if self._count(batch))
        if done < self._place.done or (done and self._hash.hexdigest() != self._place.digest):
            raise self._other_samples(self._place.done)

    def _other_samples(self, batch: int) -> DataError:
        return DataError(
            f"the loader's sampler gives other samples than before: batch {batch} of epoch "
            f"{self._place.epoch + 1} cannot be found again",
            hint="a resumed run resumes at exactly the next sample: give the same data, sampler and seed; a "
            "sampler that draws random numbers needs a generator= of its own, or must draw them when its "
            "iteration begins",
        )

    def _count(self, batch: Any) -> bool:
        self._hash.update(repr(list(batch)).encode())
        return True

    def _resume_stream(self, done: int) -> None:
        if self._states is not None and self.saved_stream is not None:
            self._states.load_state_dict(self.saved_stream)
            self._begin_epoch()
            return
        self._begin_epoch()
        if done:
            self._note(
                f"the stream has no state_dict(): the {done} batches before this one are read again and skipped; "
                "they are the same only if the stream gives the same samples each time"
            )
        assert self._coming is not None
        for _ in range(done):
            if next(self._coming, None) is None:
                raise DataError(
                    f"the stream ended before batch {done}, at which the run was saved",
                    hint="a resumed run needs the data that it had: give it the same stream, or start a new run",
                )
        if not self._user.num_workers:  # reading may draw random numbers here
            self._read_ahead(self._place.drawn)

    def _generators(self) -> list[torch.Generator]:
        """The generators of the loader and its samplers."""
        batches = self._user.batch_sampler
        holders = [self._user, self._user.sampler, batches, getattr(batches, "sampler", None)]
        found = [value for each in holders for value in getattr(each, "__dict__", {}).values()]
        own = {id(g): g for g in found if isinstance(g, torch.Generator) and g is not torch.default_generator}
        return list(own.values())

    def _generator_states(self) -> RngState:
        own = {str(number): generator.get_state() for number, generator in enumerate(self._generators())}
        return optimizer_state.capture_rng(own)

    def _restore_generators(self, saved: RngState) -> None:
        optimizer_state.restore_rng(saved)
        states = optimizer_state.device_rng(saved)
        for generator, state in zip(self._generators(), states.values(), strict=False):
            generator.set_state(state)

    def close(self) -> None:
        super().close()
        shut(self._coming if self._coming is not None else self._loader._iterator)
        self._coming = None


class StreamState:
    """The stream's own state, which a checkpoint saves and restores."""

    def __init__(self, loader: TorchLoader) -> None:
        self._loader = loader

    def state_dict(self) -> dict[str, Any]:
        return {"stream": self._loader.saved_stream}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        self._loader.saved_stream = state_dict["stream"]


def open_steps(
    given: Any,
    *,
    global_batch: int | None,
    collate: Collate | None = None,
    seed: int = 0,
    epochs: int | None = None,
    by_index: bool = False,
    note: Callable[[str], None] = lambda text: None,
) -> DataSetLoader | TorchLoader:
    """The steps of what a script gave: a DataLoader, a data set, or a function that returns one of them.

    `by_index`: other processes than this one read samples, by their indices.
    """
    data = opened(given)
    if isinstance(data, DataLoader):
        if collate is not None:
            raise ConfigError(
                "collate was given together with a DataLoader", hint="give the loader collate_fn=… instead"
            )
        if global_batch is not None and batch_of(data) != global_batch:
            own = batch_of(data)
            decides = (
                f"batch_size is {own}" if own is not None else "batch sampler decides how many samples a step has"
            )
            raise ConfigError(
                f"global_batch is {global_batch}, and the loader's {decides}",
                hint="leave global_batch out: a batch of the loader is a step",
            )
    elif global_batch is None:
        raise ConfigError(
            "run.steps() does not know how many samples a step has",
            hint="give a DataLoader, whose batch_size it is; or global_batch=… with a data set",
        )
    elif isinstance(data, IterableDataset):
        data = DataLoader(data, batch_size=global_batch, collate_fn=collate)
    else:
        return DataSetLoader(data, collate, global_batch=global_batch, seed=seed, epochs=epochs)
    return TorchLoader(data, epochs=epochs, by_index=by_index, note=note)


def reader_of(given: Any, collate: Collate | None, global_batch: int | None) -> tuple[Loader, int | None]:
    """The reader of samples by index on a guest or another rank, and the global batch if known."""
    data = opened(given)
    if not isinstance(data, DataLoader):
        return Loader(data, collate), global_batch
    check_loader(data, by_index=True)
    reader = WorkerLoader(data) if data.num_workers else Loader(data.dataset, data.collate_fn, sized=False)
    return reader, batch_of(data)


def batch_of(given: Any) -> int | None:
    """The batch size, if it is a DataLoader with a known one."""
    if not isinstance(given, DataLoader):
        return None
    return given.batch_size or getattr(given.batch_sampler, "batch_size", None)


def check_loader(loader: DataLoader[Any], *, by_index: bool = False) -> bool:
    """Refuse a loader whose batches cannot be steps. Returns whether it reads a stream."""
    if type(loader).__iter__ is not DataLoader.__iter__ and not hasattr(loader, "state_dict"):
        raise DataError(
            f"the loader is of type {type(loader).__name__}, which builds its batches itself",
            hint="give a plain torch DataLoader: Potluck moves batches to run.device and distributes them itself",
        )
    if loader.batch_size is None and (loader.batch_sampler is None or is_stream(loader)):
        raise DataError(
            "the loader has batch_size=None, so the number of samples in a step is unknown",
            hint="give it batch_size=<samples in a step>, and a data set of single samples",
        )
    if is_stream(loader):
        if by_index:
            raise no_indices()
        return True
    if not hasattr(loader.dataset, "__getitem__") or isinstance(loader.sampler, SequentialSampler | RandomSampler):
        length(loader.dataset)
    return False


def _foreseen(batches: Any) -> bool:
    """Whether the sampler may be called for its next batch at any time."""
    return type(batches) is BatchSampler and type(batches.sampler) in FORESEEN


def _digest(batches: Sequence[Any]) -> str:
    return hashlib.blake2b(repr(batches).encode(), digest_size=16).hexdigest() if batches else ""


def _numbers(keys: Sequence[Any]) -> list[int]:
    try:
        return [operator.index(key) for key in keys]
    except TypeError:
        raise DataError(
            f"the loader's sampler gives {keys[0]!r}: other processes can only be told numbers of samples",
            hint='give it integers as indices; or leave data="local" out: guests are then sent samples',
        ) from None


def no_indices() -> DataError:
    return DataError(
        "a stream has no indices by which other processes could read its samples",
        hint='leave data="local" out; on a host of several ranks give a map-style data set',
    )


def _stateful(loader: DataLoader[Any]) -> Stateful | None:
    """The object that knows where in a stream the next batch begins: the loader, or a data set that is read in this
    process."""
    asked = [loader, *([] if loader.num_workers else [loader.dataset])]
    return next((each for each in asked if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")), None)


def _workers_ended(state: Mapping[str, Any]) -> bool:
    """Whether all worker processes of a StatefulDataLoader have reached their ends, so that it begins the next
    epoch when restored.

    One without worker processes then returns nothing, which ends the epoch.
    """
    workers = state.get("_snapshot", {}).get("_worker_snapshots", {}).values()
    return bool(workers) and all(each.get("fetcher_state", {}).get("fetcher_ended") for each in workers)


def length_if_any(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except (TypeError, NotImplementedError, AttributeError):
        return None

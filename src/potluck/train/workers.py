"""Builds DataLoaders with the user's settings and decides what their worker processes read.

Owns how one loader is copied from another, and how worker processes read samples by index.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import signal
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.queues import Queue
from multiprocessing.reduction import ForkingPickler
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torch.utils.data._utils import signal_handling

from potluck.errors import DataError, PotluckError
from potluck.train.data import Loader, NamesSamples
from potluck.train.packing import (
    NO_SHARED_MEMORY,
    UNREAD,
    Collate,
    collated,
    in_words,
    packed_samples,
    unpacked_samples,
)

SETTINGS = ("pin_memory", "worker_init_fn", "generator")
WORKER_SETTINGS = ("timeout", "multiprocessing_context", "prefetch_factor", "persistent_workers")

NO_MEMORY = (
    "the loader's workers have no shared memory left, in which they send samples",
    "df -h /dev/shm shows it; start a container with --shm-size=8g or --ipc=host, or give the loader fewer workers "
    "or a smaller prefetch_factor",
)


class WorkerStart:
    """Runs in a worker before it reads: the main process decides when a worker ends, not the terminal's Ctrl-C."""

    def __init__(self, user: Callable[[int], None] | None) -> None:
        self._user = user

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Queue._on_queue_feeder_error = _tell_unsent  # type: ignore[attr-defined]
        info = get_worker_info()
        if info is not None and isinstance(info.dataset, NamesSamples):
            object.__setattr__(info, "dataset", info.dataset.dataset)  # the user's functions see their own
        if self._user is not None:
            self._user(worker)


_drop = Queue._on_queue_feeder_error  # type: ignore[attr-defined]


def _tell_unsent(queue: Any, error: Exception, sent: Any) -> None:
    """Send the reason instead of what a worker could not send. Python drops it, and the training would wait
    forever."""
    number, data = sent if isinstance(sent, tuple) and len(sent) == 2 else (None, None)
    packed, *rest = data if isinstance(data, tuple) and data else (data,)  # with torchdata: and the worker's state
    if not isinstance(packed, list) or packed[:1] == [UNREAD]:
        _drop(error, sent)
        return
    unread = [UNREAD, 0, *_unsent(error), "".join(traceback.format_exception(error))]
    queue.put((number, (unread, *rest) if isinstance(data, tuple) else unread))


def _unsent(error: Exception) -> tuple[str, str]:
    if NO_SHARED_MEMORY in str(error):
        return NO_MEMORY
    what = f"a worker process of the loader cannot send what it has read: {in_words(error)}"
    if getattr(error, "errno", None) == errno.EMFILE or "Too many open files" in str(error):
        return what, "allow more open files (ulimit -n 65536), or give the loader fewer workers"
    return what, (
        "samples, and what collate_fn returns, are pickled to reach this process: leave out generators, lambdas, "
        "locks and open files; or set num_workers=0"
    )


def rebuilt(loader: DataLoader[Any], collate: Collate, **changed: Any) -> DataLoader[Any]:
    """A copy of a loader with another collate function and the settings in `changed`."""
    workers = changed.get("num_workers", loader.num_workers)
    settings: dict[str, Any] = {name: getattr(loader, name) for name in SETTINGS}
    settings["dataset"] = loader.dataset
    if workers:
        settings |= {name: getattr(loader, name) for name in WORKER_SETTINGS}
        if not is_stream(loader):
            settings["dataset"] = NamesSamples(loader.dataset)
        settings["worker_init_fn"] = WorkerStart(loader.worker_init_fn)
    settings |= {"num_workers": workers, "collate_fn": collate, **changed}
    if hasattr(loader, "state_dict"):  # torchdata's StatefulDataLoader, or one of its kind
        if hasattr(loader, "snapshot_every_n_steps"):
            settings["snapshot_every_n_steps"] = loader.snapshot_every_n_steps
        return type(loader)(**settings)
    return DataLoader(**settings)


def is_sendable(loader: DataLoader[Any]) -> bool:
    """Whether the loader's worker processes can be given its collate function. A forked one has it already."""
    if (loader.multiprocessing_context or multiprocessing).get_start_method() == "fork":
        return True
    try:
        ForkingPickler.dumps(loader.collate_fn)
    except Exception:
        return False
    return True


def is_stream(loader: DataLoader[Any]) -> bool:
    return isinstance(loader.dataset, IterableDataset)


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    """Turn torch's error about a worker that could not start, died or did not answer into a data error."""
    try:
        yield
    except PotluckError:
        raise
    except RuntimeError as error:
        text = str(error)
        if "DataLoader worker" in text and ("exited unexpectedly" in text or "killed by signal" in text):
            raise DataError(
                f"a worker process of the loader died: {text.splitlines()[0]}",
                hint="it may have run out of memory, or crashed in the data set's code; try num_workers=0 to see "
                "its error, or a smaller prefetch_factor",
            ) from error
        if NO_SHARED_MEMORY in text:
            what, hint = NO_MEMORY
            raise DataError(what, hint=hint) from error
        if text.startswith("DataLoader timed out"):
            raise DataError(
                f"the loader's workers gave no batch in time: {text.splitlines()[0]}",
                hint="give the loader a longer timeout=, or see what its data set waits for",
            ) from error
        raise
    except Exception as error:
        if isinstance(error, OSError | EOFError) and _is_of_sending(error):
            raise DataError(
                "a worker process of the loader died before its samples were received",
                hint="it may have run out of memory, or crashed in the data set's code; try num_workers=0 to see "
                "its error, or a smaller prefetch_factor",
            ) from error
        # Which error it is depends on the version of Python: of pickle, an AttributeError or a TypeError.
        told = in_words(error)
        if "pickl" in told.lower() or "local object" in told:
            raise DataError(
                f"the loader's worker processes cannot be given its data set: {told}",
                hint="what they get needs a name: make a lambda, or a function inside a function (a transform, a "
                "worker_init_fn), a named function at module level; or set num_workers=0",
            ) from error
        raise


def _is_of_sending(error: BaseException) -> bool:
    """Whether a file descriptor could not be received from another process. A stream may raise the same kinds."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == "multiprocessing.resource_sharer" for frame in frames)


class Recorded:
    """A batch sampler that remembers what it has returned, because workers are ahead of the steps."""

    def __init__(self, sampler: Any, *, remembers: bool = True) -> None:
        """`remembers`: whether to keep what it returned in `given`."""
        self._sampler, self._remembers = sampler, remembers
        self.skip: Callable[[Iterator[Any]], None] | None = None
        """Called once with the next epoch's batches, before any of them is read."""
        self.given: deque[list[Any]] = deque()
        self.silent = False
        """Whether it returns nothing and does not call the sampler."""
        self._batches: Iterator[Any] = iter(())

    def __iter__(self) -> Iterator[list[Any]]:
        # At once, as torch does: a sampler may draw its random numbers here.
        self.given.clear()
        self._batches = iter(()) if self.silent else _of_sampler(iter(self._sampler))
        return self._recording(self._batches)

    def leave_out(self) -> None:
        """Skip now, not when the first batch is asked for."""
        skip, self.skip = self.skip, None
        if skip is not None:
            skip(self._batches)

    def _recording(self, batches: Iterator[Any]) -> Iterator[list[Any]]:
        if not self.silent:
            self.leave_out()
        for batch in batches:
            keys = list(batch)
            if not keys:
                raise DataError(
                    "the loader's batch sampler gave a batch of no samples",
                    hint="a step needs at least one: leave empty batches out",
                )
            if self._remembers:
                self.given.append(keys)
            yield keys


def _of_sampler(batches: Iterator[Any]) -> Iterator[Any]:
    """The same batches. If the sampler fails, the error says after which batch."""
    number = 0
    try:
        for batch in batches:
            number += 1
            yield batch
    except PotluckError:
        raise
    except Exception as error:
        raise DataError(
            f"the loader's sampler fails after batch {number} of its epoch: {in_words(error)}",
            hint="correct the sampler; --debug shows where it failed",
        ) from error


class Echo:
    """A data set whose samples are their own indices, so that a loader over it returns the order of another
    loader."""

    def __getitem__(self, key: Any) -> Any:
        return key


def drawn(iterator: Any) -> Iterator[Any]:
    """The result of an iterator over `Echo`, directly from its sampler.

    torch has drawn the epoch's random numbers when it made the iterator. Its own path to a batch would cost 0.1 ms
    more per step.
    """
    sampler: Iterator[Any] = getattr(iterator, "_sampler_iter", iterator)
    return sampler


class WorkerLoader(Loader):
    """Reads samples by their indices, with the worker processes of a loader."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader.dataset, loader.collate_fn, sized=False)
        self._parts = _GivenBatches()
        self._workers = loader.num_workers
        self._loader = rebuilt(loader, packed_samples, batch_sampler=self._parts, persistent_workers=True)
        self._coming: Iterator[Any] | None = None
        self._expected: deque[tuple[list[Any], int]] = deque()
        """Batches that are being read, with the number of parts of each."""

    def expect(self, batches: Sequence[Sequence[Any]]) -> None:
        with self._lock:
            self._start(batches)

    def _start(self, batches: Sequence[Sequence[Any]]) -> None:
        """Read each batch in as many parts as there are workers, so that the first batch is complete soonest."""
        self._expected.clear()
        self._parts.keys = []
        for batch in batches:
            size = -(-len(batch) // self._workers)
            parts = [list(batch[at : at + size]) for at in range(0, len(batch), size)]
            self._parts.keys += parts
            self._expected.append((list(batch), len(parts)))
        with worker_errors():
            self._coming = unwatched(iter(self._loader))

    def fetch(self, keys: Sequence[Any]) -> Any:
        with self._lock:
            if not self._expected or self._expected[0][0] != list(keys):
                self._start([keys])
            assert self._coming is not None
            _, parts = self._expected.popleft()
            samples: list[Any] = []
            with worker_errors():
                for _ in range(parts):
                    samples += unpacked_samples(next(self._coming))
            return collated(samples, self._collate, keys)

    def close(self) -> None:
        shut(self._coming)
        self._coming = None


class _GivenBatches:
    """A batch sampler of given batches."""

    keys: list[list[Any]]

    def __init__(self) -> None:
        self.keys = []

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(list(self.keys))


def unwatched(iterator: Any) -> Any:
    """The same iterator, which detects dead workers only when it waits for them.

    torch raises their end in a signal handler, in the middle of the main thread's computing.
    """
    if getattr(iterator, "_worker_pids_set", False):
        signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
        iterator._worker_pids_set = False
    return iterator


def shut(iterator: Any) -> None:
    """End an iterator's worker processes, and wait until they have ended."""
    if hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()

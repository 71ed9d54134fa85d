"""The samples of each step, in the order in which the host gives them out: the common part, and the steps of a data
set.

Owns the order of steps, the position in the data, and the samples of the current step.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from potluck.balance.ledger import EpochSteps, StepSamples
from potluck.errors import ConfigError
from potluck.train.data import Loader, epoch_order
from potluck.train.optimizer_state import Stateful
from potluck.train.packing import Collate, HeldStep
from potluck.train.saved_place import DataPlace

TRIED_AHEAD, LONGEST_AHEAD_S = 3, 0.02
"""Reading ahead stops if each of the last few micro-batches blocked other reads for this long."""


class StepLoader(ABC):
    """Gives the ledger its steps, and gives batches to the host and the leases."""

    samples: int | None
    """Samples in the data set, if known."""
    global_batch: int | None
    """Samples in a step; the last one of an epoch may have fewer, and a batch sampler decides for itself."""
    workers: int | None = None
    """Worker processes of the user's DataLoader; None without one."""
    restarted = False
    """Whether worker processes were started again for this step, which begins an epoch."""
    waits = True
    """Whether `next_step` and `ready` wait for the user's code."""
    cut_ahead = 0
    """Steps that worker processes may have cut into micro-batches ahead of this one; 0: they cut none."""

    def __init__(self, reader: Loader | None) -> None:
        self._reader = reader
        self._lock = threading.RLock()
        self._now: StepSamples | None = None
        self._held: HeldStep | None = None
        self._following: StepSamples | None = None
        self._ahead_s: list[float] = []

    @abstractmethod
    def next_step(self) -> StepSamples | None:
        """The samples of the next step; frees those of the last one."""

    def ready(self) -> None:  # noqa: B027 - only worker processes are waited for
        """Wait until worker processes have read the step's samples."""

    def cut(  # noqa: B027 - only worker processes cut
        self, size: int, *, least: int = 1, share: float = 1.0, anyhow: bool = True
    ) -> None:
        """Worker processes are to collate what the host will compute of the steps that they read from now on.

        Matters only where the user has a collate function of their own. `size`: of the host's micro-batches; 0: not
        known yet, the samples are sent as they are. `share`: of the step is the host's. `anyhow`: any other part of
        the step may be wanted too, and more than once, so its samples are sent beside the micro-batches.
        """

    def made_at(self, position: int | None) -> int:
        """How many samples from this one on are a micro-batch that a worker process has collated; 0: none."""
        now, held = self._now, self._held
        return 0 if None in (now, held, position) else held.made_at(position - now.first)  # type: ignore

    def fetch(self, positions: Sequence[int]) -> Any | None:
        """The batch of these positions of the step, on the CPU; None if the step is over."""
        now, held = self._now, self._held
        if now is None or not now.holds(positions[0]):
            return None  # at once: the lock may be held until worker processes have read the next step
        if held is not None and self._now is now:
            # Without the lock: another thread may hold it while it collates what a guest is lent.
            rows = [position - now.first for position in positions]
            if held.is_made(rows):
                return held.part(rows)
        with self._lock:
            now, held = self._now, self._held
            if now is None or not self._in_step(positions[0]):
                return None
            first = now.first
            if held is None:
                keys = now.keys
                assert keys is not None and self._reader is not None
                return self._reader.fetch([keys[position - first] for position in positions])
            return held.part([position - first for position in positions])

    def peek(self) -> StepSamples | None:
        """The step after this one, if its samples are known and can be read now. Never waits."""
        return self._following

    def fetch_ahead(self, positions: Sequence[int]) -> Any | None:
        """The batch of these positions of the step after this one; None if it is not the next, or cannot be read.

        Failures are not raised here: the step that needs the samples will raise them. A slow data set is not read
        ahead, because reading this step's samples would wait for those of the next.
        """
        if len(self._ahead_s) == TRIED_AHEAD and min(self._ahead_s) > LONGEST_AHEAD_S:
            return None
        with contextlib.suppress(Exception), self._lock:
            following = self.peek()
            if following is None or not following.holds(positions[0]):
                return None
            assert following.keys is not None and self._reader is not None
            began = time.monotonic()
            batch = self._reader.fetch([following.keys[position - following.first] for position in positions])
            self._ahead_s = [*self._ahead_s, time.monotonic() - began][-TRIED_AHEAD:]
            return batch
        return None

    def _in_step(self, position: int) -> bool:
        now = self._now
        return now is not None and now.holds(position)

    def fetch_again(self, positions: Sequence[int]) -> Any:
        """The same batch, read again from the data set."""
        with self._lock:
            assert self._now is not None and self._now.keys is not None and self._reader is not None
            return self._reader.fetch([self._now.keys[position - self._now.first] for position in positions])

    @contextlib.contextmanager
    def nobody_reads(self) -> Iterator[None]:
        """Inside, other threads wait before they read, because reading may draw random numbers."""
        with self._lock:
            yield

    def check_indices(self) -> None:  # noqa: B027 - only a stream has none
        """Refuse samples that other machines cannot read by their indices."""

    def total_steps(self, steps: int | None) -> int | None:
        """The total number of steps, if known; at most `steps`. More than any number can count are endless."""
        per_epoch = self._steps_in_epochs()
        known = [number for number in (steps, per_epoch) if number is not None and number <= sys.maxsize]
        return min(known, default=None)

    def _steps_in_epochs(self) -> int | None:
        return None

    @abstractmethod
    def ends_epoch(self) -> bool:
        """Whether this step is the last one of its epoch."""

    def state(self, step: int) -> DataPlace | None:
        """What a checkpoint saves to resume at this step, which is the last one given or the one after it."""
        return None

    def objects(self) -> dict[str, Stateful]:
        """What a checkpoint saves besides the state."""
        return {}

    @abstractmethod
    def resume(self, step: int, saved: DataPlace | None) -> None:
        """Go to this step, whose state is `saved`."""

    def close(self) -> None:
        """End the worker processes."""
        if self._reader is not None:
            self._reader.close()


class DataSetLoader(StepLoader):
    """Steps of equal size from a data set, in an order that depends only on the seed; read in this process."""

    samples: int
    global_batch: int
    waits = False

    def __init__(
        self, dataset: Any, collate: Collate | None, *, global_batch: int, seed: int, epochs: int | None = None
    ) -> None:
        reader = Loader(dataset, collate)
        super().__init__(reader)
        self.samples, self.global_batch = reader.samples, global_batch
        self._epochs = epochs
        self._seed = seed
        self._steps = self._from(0)

    def _from(self, step: int) -> EpochSteps:
        order = epoch_order(self.samples, self._seed)
        return EpochSteps(samples=self.samples, global_batch=self.global_batch, order=order, step=step)

    def resume(self, step: int, saved: DataPlace | None) -> None:
        if saved is not None:
            raise ConfigError(
                "the run was started with a DataLoader, now it has a data set",
                hint="a resumed run resumes at exactly the next sample: give it what it had, or start a new run",
            )
        self._steps = self._from(step)

    def next_step(self) -> StepSamples | None:
        with self._lock:
            self._now = self._within(self._steps.next_step())
            self._following = self._within(self._steps.peek())
            return self._now

    def _within(self, step: StepSamples) -> StepSamples | None:
        return None if self._epochs is not None and step.epoch >= self._epochs else step

    def _steps_in_epochs(self) -> int | None:
        return None if self._epochs is None else -(-self._epochs * self.samples // self.global_batch)

    def ends_epoch(self) -> bool:
        return self._now is not None and self._steps.ends_epoch(self._now)

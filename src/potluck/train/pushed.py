"""Steps whose samples come from a trainer: its own loader reads them, one step at a time.

Owns the samples of the current step. The trainer owns their order, epochs and resuming.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import get_worker_info

from potluck.balance.ledger import StepSamples
from potluck.train.packing import Collate, HeldStep, packed_samples, unpacked_samples
from potluck.train.saved_place import DataPlace
from potluck.train.step_loader import StepLoader


class Samples:
    """Samples that pass through a trainer's loader, which neither collates them nor moves them to a device."""

    __slots__ = ("_packed", "_plain")

    def __init__(self, samples: list[Any]) -> None:
        # From a worker process each tensor of its own would cost a file descriptor.
        pack = get_worker_info() is not None and _has_tensors(samples[0])
        self._packed = packed_samples(samples) if pack else None
        self._plain = None if pack else samples

    def unpacked(self) -> list[Any]:
        return self._plain if self._plain is not None else unpacked_samples(self._packed or ())


class PushedLoader(StepLoader):
    """Returns the samples that were pushed last as the next step."""

    samples = None
    waits = False

    def __init__(
        self, collate: Collate, *, global_batch: int, first_step: int = 0, steps: int | None = None
    ) -> None:
        """`first_step`: number of steps that the trainer has already done. `steps`: total number of steps."""
        super().__init__(None)
        self.global_batch, self.first_step = global_batch, first_step
        self._collate, self._total = collate, steps
        self._pushed: list[Any] | None = None
        self._position = 0

    def push(self, samples: list[Any]) -> None:
        """The samples of the next step."""
        self._pushed = samples

    def next_step(self) -> StepSamples | None:
        with self._lock:
            self._now = self._held = None
            samples, self._pushed = self._pushed, None
            if not samples:
                return None
            self._held = HeldStep.of(samples, self._collate)
            self._now = StepSamples(first=self._position, count=len(samples), keys=None, epoch=0)
            self._position += len(samples)
            return self._now

    def ends_epoch(self) -> bool:
        return False

    def _steps_in_epochs(self) -> int | None:
        return self._total

    def resume(self, step: int, saved: DataPlace | None) -> None:
        raise AssertionError("the trainer resumes by itself")


def _has_tensors(sample: Any) -> bool:
    values = sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, tuple) else (sample,)
    return any(isinstance(value, Tensor | np.ndarray) for value in values)

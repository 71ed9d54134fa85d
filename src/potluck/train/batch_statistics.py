"""Layers that normalise over the batch (BatchNorm): finds a model's, their smallest micro-batch, and reports them.

Owns the rule and the event. `balance/leases.py` divides the samples by this rule.

The number of micro-batches in a step matters, not their sizes: K of them in a step of B samples train like
micro-batches of B ÷ K. See docs/log.md for the measurement.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from potluck.balance.leases import Least
from potluck.spec.events import StatisticsMeasured

LEAST_LEASE = 8
"""Every lease adds a micro-batch. With four of 8 samples beside 32 on the host a CNN's validation loss was 0.339,
with eight of 4 it was 0.390, and 0.310 with all 64 at once (bench/batchnorm.py)."""
LEASE_PART = 4
"""For a small batch a lease may be this part of it: 4 samples of 16."""
NAMED_LAYERS = 3


@dataclass(frozen=True, slots=True)
class BatchStatistics:
    """The layers of one model that normalise over the batch."""

    layers: tuple[tuple[str, nn.Module], ...]

    @property
    def active(self) -> bool:
        """Whether any of them uses the batch's statistics now; the user's code may have frozen them since."""
        return any(_uses_batch(layer) for _, layer in self.layers)


def batch_statistics(model: nn.Module) -> BatchStatistics | None:
    """The model's layers with batch statistics, or None where it has none.

    A model that is wholly in evaluation mode before the loop is expected to be trained in it.
    """
    found = [
        (name or type(layer).__name__, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and (_uses_batch(layer) or not model.training)
    ]
    return BatchStatistics(tuple(found)) if found else None


def _uses_batch(layer: nn.Module) -> bool:
    without_running = getattr(layer, "running_mean", None) is None and getattr(layer, "running_var", None) is None
    return layer.training or without_running


def _running(layer: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in layer.named_buffers() if not is_lazy(buffer)}


def least_samples(statistics: BatchStatistics | None, global_batch: int) -> Least:
    """The smallest micro-batch and the smallest lease of a run."""
    if statistics is None:
        return Least()
    return Least(micro_batch=2, lease=max(2, min(LEAST_LEASE, global_batch // LEASE_PART)))


class StatisticsNotice:
    """Reports over how many samples a run normalises: once at the start, with the first guest's part, and when it
    has halved.

    A layer whose running statistics are as they were has not been called: the model only holds it.
    """

    def __init__(self, statistics: BatchStatistics | None, global_batch: int) -> None:
        self._statistics, self._global_batch = statistics, global_batch
        self._told: float | None = None
        self._told_shared = False
        self._steps = 0
        layers = statistics.layers if statistics is not None else ()
        self._before = [{name: buffer.clone() for name, buffer in _running(layer).items()} for _, layer in layers]

    def after_step(self, step: int, sizes: Mapping[str, Sequence[int]]) -> StatisticsMeasured | None:
        """`sizes`: the micro-batches of each machine in the last step. Returns the event, if there is something
        new."""
        self._steps += 1
        count = sum(len(s) for s in sizes.values())
        # In the first step the host tries what a sample takes of its memory.
        if self._statistics is None or self._steps < 2 or not count or not self._statistics.active:
            return None
        effective = self._global_batch / count
        shared = sum(1 for s in sizes.values() if s) > 1
        news = self._told is None or effective < self._told / 2 or (shared and not self._told_shared)
        if not news:
            return None
        self._told, self._told_shared = effective, self._told_shared or shared
        layers = self._called(self._statistics)
        if not layers:
            return None
        return StatisticsMeasured(
            step=step,
            kind=type(layers[0][1]).__name__,
            layers=len(layers),
            names=tuple(name for name, _ in layers[:NAMED_LAYERS]),
            global_batch=self._global_batch,
            micro_batch={machine: max(s) for machine, s in sizes.items() if s},
            effective_batch=round(effective, 2),
        )

    def _called(self, statistics: BatchStatistics) -> list[tuple[str, nn.Module]]:
        """Compares tensors of the device, so it is called only where there is something to report."""
        return [
            (name, layer)
            for (name, layer), before in zip(statistics.layers, self._before)
            if not before
            or any(not torch.equal(before[key], now) for key, now in _running(layer).items() if key in before)
        ]

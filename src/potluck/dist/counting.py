"""The backend's metrics: counts collectives, their sizes and durations, and the phases of their time.

Everything is bounded: latencies are those of the last collectives of each kind, and kinds are few.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import ParamSpec, TypedDict, TypeVar

from potluck.units import bits_text, bytes_text, count_text, seconds_text

PHASES = ("queue", "staging", "network", "reduction")
"""Waiting for its turn and for the device; copies between device and host memory; sending, receiving and waiting
for others; arithmetic and codecs."""

OTHER = "other"
_KEPT_LATENCIES = 1024
_MOST_KINDS = 64

log = logging.getLogger("potluck.dist")


class Figures(TypedDict):
    """The metrics of one kind of collective, or of all."""

    ops: int
    errors: int
    bytes: int
    sent_bytes: int
    avg_s: float | None
    p50_s: float | None
    p99_s: float | None
    peak_bytes_per_s: float | None
    queue_s: float
    staging_s: float
    network_s: float
    reduction_s: float


class MetricsSnapshot(TypedDict):
    since_s: float
    total: Figures
    by_op: dict[str, Figures]


@dataclass(slots=True)
class _CollectiveKind:
    count: int = 0
    errors: int = 0
    nbytes: int = 0
    sent_bytes: int = 0
    seconds: float = 0.0
    peak_bytes_per_s: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_LATENCIES))

    def figures(self) -> Figures:
        ordered = sorted(self.latencies)
        return {
            "ops": self.count,
            "errors": self.errors,
            "bytes": self.nbytes,
            "sent_bytes": self.sent_bytes,
            "avg_s": self.seconds / self.count if self.count else None,
            "p50_s": _quantile(ordered, 0.50),
            "p99_s": _quantile(ordered, 0.99),
            "peak_bytes_per_s": self.peak_bytes_per_s or None,
            "queue_s": self.phases["queue"],
            "staging_s": self.phases["staging"],
            "network_s": self.phases["network"],
            "reduction_s": self.phases["reduction"],
        }


class _Spent(threading.local):
    """The time used so far by the collective of this thread; a thread runs one at a time."""

    staging: float = 0.0
    reduction: float = 0.0
    sent: int = 0


SPENT = _Spent()

P = ParamSpec("P")
R = TypeVar("R")


def spends(phase: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator for functions whose time counts as this phase. One must not call another."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def timed(*args: P.args, **kwargs: P.kwargs) -> R:
            began = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                setattr(SPENT, phase, getattr(SPENT, phase) + time.perf_counter() - began)

        return timed

    return decorate


class Operation:
    """One running collective, a context whose end counts it. A thread runs one at a time.

    Functions with `spends` record their time; the rest counts as network. An exception counts as an error, and its
    duration not as a latency.
    """

    def __init__(self, owner: Metrics, name: str, nbytes: int) -> None:
        self._owner, self.name, self.nbytes = owner, name, nbytes
        self._queued_s, self._began = 0.0, owner.clock()

    def queued(self, seconds: float) -> None:
        """The collective waited this long for its turn and its device, and begins now."""
        self._queued_s, self._began = seconds, self._owner.clock()

    def __enter__(self) -> Operation:
        SPENT.staging = SPENT.reduction = 0.0
        SPENT.sent = 0
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        worked_s = max(0.0, self._owner.clock() - self._began)
        network_s = max(0.0, worked_s - SPENT.staging - SPENT.reduction)
        phases = (self._queued_s, SPENT.staging, network_s, SPENT.reduction)
        self._owner._count(self, self._queued_s + worked_s, phases, failed=kind is not None)


class Metrics:
    """The metrics of one process, filled from any number of threads."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._kinds: dict[str, _CollectiveKind] = {}
        self._since = clock()

    def op(self, name: str, nbytes: int) -> Operation:
        """`with metrics.op("all_reduce", 4096): ...`."""
        return Operation(self, name, nbytes)

    def snapshot(self) -> MetricsSnapshot:
        """All metrics, ready for JSON: `total`, and `by_op` with the same for each kind of collective."""
        with self._lock:
            total = _CollectiveKind()
            kept: list[float] = []
            for kind in self._kinds.values():
                total.count += kind.count
                total.errors += kind.errors
                total.nbytes += kind.nbytes
                total.sent_bytes += kind.sent_bytes
                total.seconds += kind.seconds
                total.peak_bytes_per_s = max(total.peak_bytes_per_s, kind.peak_bytes_per_s)
                kept.extend(kind.latencies)
                for phase in PHASES:
                    total.phases[phase] += kind.phases[phase]
            total.latencies = deque(kept)
            return {
                "since_s": self.clock() - self._since,
                "total": total.figures(),
                "by_op": {name: kind.figures() for name, kind in sorted(self._kinds.items())},
            }

    def reset(self) -> None:
        """Start from zero. Running collectives count when they end."""
        with self._lock:
            self._kinds.clear()
            self._since = self.clock()

    def _count(self, done: Operation, seconds: float, phases: Iterable[float], *, failed: bool) -> None:
        with self._lock:
            kind = self._kind(done.name)
            kind.sent_bytes += SPENT.sent
            for phase, spent in zip(PHASES, phases, strict=True):
                kind.phases[phase] += spent
            if failed:
                kind.errors += 1
                return
            kind.count += 1
            kind.nbytes += done.nbytes
            kind.seconds += seconds
            kind.latencies.append(seconds)
            if seconds > 0:
                kind.peak_bytes_per_s = max(kind.peak_bytes_per_s, done.nbytes / seconds)

    def _kind(self, name: str) -> _CollectiveKind:
        kind = self._kinds.get(name)
        if kind is None:
            kind = self._kinds.setdefault(name if len(self._kinds) < _MOST_KINDS else OTHER, _CollectiveKind())
        return kind


METRICS = Metrics()
"""The metrics of this process, over all groups."""


def metrics() -> MetricsSnapshot:
    """The backend's metrics in this process, over all groups.

    Example:
        >>> potluck.dist.metrics()["total"]["p99_s"]
        0.0031
    """
    return METRICS.snapshot()


def reset_metrics() -> None:
    """Start from zero."""
    METRICS.reset()


def log_metrics(level: int = logging.INFO) -> None:
    """Write the metrics as a table to the logger `potluck.dist`, or to stderr if logging is not set up."""
    words = table(METRICS.snapshot())
    if log.hasHandlers():
        # Whatever `log_level` is: the caller asked for it.
        log.handle(log.makeRecord(log.name, level, __file__, 0, "%s", (words,), None))
    else:
        print(words, file=sys.stderr, flush=True)


def table(snapshot: MetricsSnapshot) -> str:
    """A snapshot as a table for people."""
    head = ("collective", "ops", "errors", "data", "sent", "avg", "p50", "p99", "peak", *PHASES)
    rows = [head]
    for name, figures in [*snapshot["by_op"].items(), ("total", snapshot["total"])]:
        rows.append(
            (
                name,
                count_text(figures["ops"]),
                count_text(figures["errors"]),
                bytes_text(figures["bytes"]),
                bytes_text(figures["sent_bytes"]),
                seconds_text(figures["avg_s"]),
                seconds_text(figures["p50_s"]),
                seconds_text(figures["p99_s"]),
                bits_text(figures["peak_bytes_per_s"]),
                seconds_text(figures["queue_s"]),
                seconds_text(figures["staging_s"]),
                seconds_text(figures["network_s"]),
                seconds_text(figures["reduction_s"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(w) if at == 0 else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths)))
        for row in rows
    ]
    return "\n".join([f"collectives of the last {seconds_text(snapshot['since_s'])}:", *lines])


def _quantile(ordered: list[float], share: float) -> float | None:
    """The smallest value that at least `share` of the values do not exceed."""
    if not ordered:
        return None
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]

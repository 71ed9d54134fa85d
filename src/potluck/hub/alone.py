"""The hub of a run without guests: the same calls, directly on the ledger. It starts no thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from potluck.balance.leases import Least, next_size
from potluck.balance.ledger import Ledger
from potluck.balance.quota import Estimate
from potluck.hub.actions import StepResult
from potluck.hub.members import Member


class AloneHub:
    """Does for the training loop what `HostHub` does, without guests."""

    def __init__(self, ledger: Ledger, name: str, least: Least | None = None) -> None:
        self._ledger, self._name = ledger, name
        self._least = (least or Least()).micro_batch
        self._sizes: list[int] = []
        self._sample_s = Estimate()

    def begin_step(self, head_start_s: float = 0.0) -> None:
        self._ledger.open_step()

    def take(self, count: int, busy: Callable[[], bool], made: Callable[[], int]) -> tuple[tuple[int, ...], None]:
        return self._ledger.take(made() or next_size(self._ledger.in_pool, count, self._least)), None

    def launched(self, positions: tuple[int, ...], sizes: Sequence[int]) -> None:
        self._ledger.host_counts(positions, self._name)
        self._sizes += sizes

    def computed(self, samples: int, seconds: float) -> None:
        self._sample_s.add(seconds / samples)

    def buffers_changed(self, module: str, names: tuple[str, ...]) -> None:
        pass

    def end_step(self) -> StepResult:
        samples = self._ledger.close_step()
        result = StepResult(
            samples=samples,
            wait_s=0.0,
            dropped_samples=0,
            taken_back_samples=0,
            predicted_s=None,
            micro_batches={self._name: tuple(self._sizes)},
        )
        self._sizes.clear()
        return result

    def judged(self, step: int, norm: float, samples: int, *, applied: bool) -> None:
        pass

    def timed(self, step: int, samples: int, seconds: float, here: Sequence[str]) -> None:
        pass

    def updating(self) -> AbstractContextManager[None]:
        return nullcontext()

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        return self._ledger.samples_of(positions)

    def traffic(self) -> tuple[int, int]:
        return 0, 0

    def host_sample_s(self) -> float | None:
        return self._sample_s.value

    def judges(self) -> bool:
        return False

    def members(self) -> list[Member]:
        return []

    def close(self, reason: str) -> None:
        pass

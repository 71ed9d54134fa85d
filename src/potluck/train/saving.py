"""Decides when checkpoints are written and what they contain, and logs the result of each."""

from __future__ import annotations

from pathlib import Path

from potluck.errors import RunFolderError
from potluck.spec.events import CheckpointFailed, CheckpointSaved
from potluck.train.checkpoint import CheckpointWriter, Snapshot, finite_state
from potluck.train.parts import Parts
from potluck.train.saved_place import DataPlace, SavedPlace


class Saving:
    """The checkpoints of one training, written while it runs."""

    def __init__(self, parts: Parts, folder: Path) -> None:
        self._p, self._log = parts, parts.context.log
        self.saved_step = parts.restored.step if parts.restored is not None else None
        """Number of updates in the newest checkpoint."""
        self.place: DataPlace | None = None
        """Position in the data at which the next step begins, while it is awaited."""
        self._finite_at_first = frozenset(finite_state(parts.model))
        self._last = False
        # The log goes to the disk first: after a power cut it tells of every step up to the checkpoint.
        self.writer = CheckpointWriter(
            folder, on_saved=self._saved, on_failed=self._not_saved, before=self._log.sync
        )

    def begin(self) -> bool:
        """Begin to save; False while the last checkpoint is still being written."""
        return self.writer.start(self._snapshot(last=False))

    def finish(self) -> None:
        """Save, and return when it is on the disk. Raises an error if it cannot be saved, because there is no next
        attempt."""
        self.writer.settle()
        if self.saved_step != self._p.ledger.step:
            self.writer.start(self._snapshot(last=True))
            self.writer.wait()

    def _snapshot(self, *, last: bool) -> Snapshot:
        self._last = last
        p = self._p
        step = p.ledger.step
        return Snapshot(
            step=step,
            model=p.model,
            optimizer=p.optimizer,
            objects=p.objects,
            finite=self._finite_at_first,
            device_rng=p.context.device.rng_state(),
            state=p.state,
            place=SavedPlace(
                samples=p.loader.samples,
                global_batch=p.loader.global_batch,
                seed=p.options.seed,
                micro_batch=p.micro.settled,
                data=p.loader.state(step) if self.place is None else self.place,
            ),
        )

    def _not_saved(self, step: int, error: RunFolderError) -> None:
        """Report that the disk is full, or gone. The run continues and tries again after the next interval."""
        self._log.emit(CheckpointFailed(step=step, reason=error.what, again=not self._last))

    def _saved(self, step: int, path: Path, seconds: float) -> None:
        self.saved_step = step
        self._log.emit(CheckpointSaved(step=step, path=str(path), seconds=round(seconds, 3)))

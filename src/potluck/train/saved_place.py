"""What a checkpoint says of its run beside the tensors: where it was in its data, and what must not change."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from potluck import checked
from potluck.checked import Natural, Positive
from potluck.errors import CheckpointError
from potluck.train.optimizer_state import RngState


class DataPlace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a DataLoader the next step begins."""

    epoch: Natural = 0
    done: Natural = 0
    """Batches of the epoch before it."""
    position: Natural = 0
    """Samples of the run before it."""
    digest: str = ""
    """Of the indices of the epoch's batches before it."""
    generators: RngState | None = None
    """The random generators when the epoch began; None if it has not."""
    fresh: bool = True
    """Whether the epoch began with new workers, whose seed was drawn from the loader's generator."""
    drawn: Natural = 0
    """Batches after it that the sampler had given already, without worker processes."""
    ended: bool = False
    """Whether the stream's epoch ended with the batch before it, and its state is one of after the end."""


class SavedPlace(Struct, frozen=True, kw_only=True):
    """`extra` in a checkpoint's manifest."""

    samples: Natural | None
    """Length of the data set; None if it has none."""
    global_batch: Natural | None
    seed: int
    micro_batch: Positive | None = None
    """The host's, once found."""
    data: DataPlace | None = None
    """None with a data set: the step's number says all."""

    def as_json(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def saved_place(extra: Any, *, where: object, step: int) -> SavedPlace:
    """What the manifest at `where` holds; CheckpointError if Potluck has not written it."""
    try:
        return checked.as_kind(extra, SavedPlace)
    except msgspec.ValidationError as error:
        raise CheckpointError(
            f"{where} was not written by potluck: {error}",
            hint="bring the folder back from a copy, or start a new run",
            step=step,
        ) from error

"""A checkpoint's data about its run besides tensors: the position in the data, and what must not change."""

from __future__ import annotations

from msgspec import Struct

from potluck.bounds import Length, Natural, Positive, Text
from potluck.train.optimizer_state import RngState


class DataPlace(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where in a DataLoader the next step begins."""

    epoch: Natural = 0
    done: Natural = 0
    """Number of batches of the epoch before it."""
    position: Natural = 0
    """Number of samples of the run before it."""
    digest: Text = ""
    """Hash of the indices of the epoch's batches before it."""
    generators: RngState | None = None
    """States of the random generators when the epoch began; None if it has not begun."""
    fresh: bool = True
    """Whether the epoch began with new workers, whose seed was drawn from the loader's generator."""
    drawn: Natural = 0
    """Batches after it that the sampler, or a stream without worker processes, had already returned."""
    drawn_digest: Text = ""
    """Hash of the indices of these, from a sampler that may draw random numbers for each batch."""
    ended: bool = False
    """Whether the stream's epoch ended with the batch before it, so that its state is the one after the end."""


class SavedPlace(Struct, frozen=True, kw_only=True):
    """`place` in a checkpoint's manifest."""

    samples: Length | None
    """Length of the data set; None if it has none."""
    global_batch: Natural | None
    seed: int
    """Of any size, as `run.steps` takes it."""
    micro_batch: Positive | None = None
    """The host's micro-batch size, once found."""
    data: DataPlace | None = None
    """None with a data set, for which the step's number is enough."""

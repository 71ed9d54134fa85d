"""The description of a guest's model, which the host compares with its own: the frame of `ready`. PURE."""

from __future__ import annotations

import math

from msgspec import Struct

from potluck.bounds import Long, Many, Named, Short
from potluck.spec.messages import Shape


class TensorSpec(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One parameter or buffer of the model; it must be the same on both sides."""

    name: Long
    shape: Shape
    dtype: Short
    role: Short
    """"trained", "frozen" or "buffer"."""

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {self.dtype} ({self.role})"


class ModelDescription(Struct, frozen=True, kw_only=True):
    """All tensors of a model."""

    fingerprint: Many[TensorSpec]
    hashes: Named[Short]
    """Hash of each frozen parameter and buffer."""

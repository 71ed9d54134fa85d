"""The codec "topk": the largest values and their indices.

The payload of `count` values, of which k = ceil(ratio * count) are kept, is

    indices   k int32, strictly increasing
    values    k bf16, in the order of the indices

and every other value is zero. It loses most of its input, so it is useful only with error feedback.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.balance.codecs import DEFAULT_TOPK_RATIO
from potluck.codec.interface import Report
from potluck.codec.tensors import (
    MAGNITUDE,
    all_finite,
    checked_payload,
    checked_values,
    destination,
    fits,
    norm,
    numbers,
    spans,
)
from potluck.errors import WireError


@dataclass(frozen=True)
class TopkCodec:
    """The largest `ratio` of the values: 6 bytes for each one kept, 0.06 per value at one in a hundred."""

    ratio: float = DEFAULT_TOPK_RATIO

    @property
    def name(self) -> str:
        return "topk" if self.ratio == DEFAULT_TOPK_RATIO else f"topk:{self.ratio!r}"

    def kept(self, count: int) -> int:
        """How many of `count` values are sent."""
        return min(count, math.ceil(self.ratio * count))

    def nbytes(self, count: int) -> int:
        return 6 * self.kept(count)

    def encode(self, values: Tensor) -> Tensor:
        values = checked_values(values)
        if values.numel() > torch.iinfo(torch.int32).max:
            raise ValueError(f"topk takes at most 2^31 - 1 values, not {values.numel()}")
        bits = values.view(torch.int32)
        magnitudes = torch.empty_like(bits)
        for start, stop in spans(values.numel(), values.device):
            torch.bitwise_and(bits[start:stop], MAGNITUDE, out=magnitudes[start:stop])
        indices = magnitudes.topk(self.kept(values.numel()), sorted=False).indices.sort().values
        payload = torch.empty(self.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
        sent_indices, sent_values = self._split(payload, values.numel())
        sent_indices.copy_(indices)
        # Not values[indices]: that calls on other cores at any size.
        sent_values.copy_(values.index_select(0, indices))
        return payload

    def encode_reporting(self, values: Tensor, report: Report) -> Tensor:
        payload = self.encode(values)
        if self.finite(payload, values.numel()):
            decoded = self.decode(payload, values.numel())
            for start, stop in spans(decoded.numel(), decoded.device):
                report(start, decoded[start:stop])
        return payload

    def decode(self, payload: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        payload = checked_payload(payload, count, self.nbytes(count), self.name)
        indices, kept = self._split(payload, count)
        if not _valid(indices, count):
            raise WireError(
                f"a {self.name} payload of {count} values has indices out of order or out of range",
                hint="the sender is broken or hostile: leave it out of the run",
            )
        out = destination(out, count, payload.device)
        for start, stop in spans(count, out.device):
            out[start:stop].zero_()
        return out.index_copy_(0, indices.to(torch.int64), kept.to(torch.float32))

    def finite(self, payload: Tensor, count: int) -> bool:
        if not fits(payload, count, self.nbytes(count)):
            return False
        indices, kept = self._split(payload.contiguous(), count)
        return _valid(indices, count) and all_finite(kept)

    def most_norm(self, payload: Tensor, count: int) -> float:
        indices, kept = self._split(payload.contiguous(), count)
        return norm(kept) if _valid(indices, count) else math.inf

    def _split(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """A payload's [k] int32 indices and [k] bf16 values."""
        end = 4 * self.kept(count)
        return numbers(payload[:end], torch.int32), numbers(payload[end:], torch.bfloat16)


def _valid(indices: Tensor, count: int) -> bool:
    """True if each of the [k] int32 indices is in range and none comes twice."""
    if indices.numel() == 0:
        return True
    increasing = (indices[1:] > indices[:-1]).all()
    return bool(torch.stack((indices[0] >= 0, indices[-1] < count, increasing)).all())

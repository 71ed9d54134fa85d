"""The codecs "fp16" and "bf16": each value rounded to a 16-bit float."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from potluck.codec.interface import Report
from potluck.codec.tensors import (
    all_finite,
    checked_payload,
    checked_values,
    copy,
    destination,
    fits,
    norm,
    numbers,
    scratch,
    spans,
)

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class HalfCodec:
    """Payload: `count` 16-bit floats, 2 bytes per value.

    fp16 keeps 11 bits and ends at 65,504; a larger value counts as not finite. bf16 keeps 8 bits and the range of
    float32.
    """

    name: str
    """"fp16" or "bf16"."""

    def nbytes(self, count: int) -> int:
        return 2 * count

    def encode(self, values: Tensor) -> Tensor:
        values = checked_values(values)
        return copy(values, torch.empty_like(values, dtype=_DTYPES[self.name])).view(torch.uint8)

    def encode_reporting(self, values: Tensor, report: Report) -> Tensor:
        payload = self.encode(values)
        halves = payload.view(_DTYPES[self.name])
        if all_finite(halves):
            room = scratch(halves.numel(), halves.device)
            for start, stop in spans(halves.numel(), halves.device):
                report(start, room[: stop - start].copy_(halves[start:stop]))
        return payload

    def decode(self, payload: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        payload = checked_payload(payload, count, self.nbytes(count), self.name)
        return copy(numbers(payload, _DTYPES[self.name]), destination(out, count, payload.device))

    def finite(self, payload: Tensor, count: int) -> bool:
        if not fits(payload, count, self.nbytes(count)):
            return False
        return all_finite(numbers(payload.contiguous(), _DTYPES[self.name]))

    def most_norm(self, payload: Tensor, count: int) -> float:
        return norm(numbers(payload.contiguous(), _DTYPES[self.name]))

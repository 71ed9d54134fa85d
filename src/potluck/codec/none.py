"""The codec "none": float32 unchanged."""

from __future__ import annotations

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
    spans,
)


class NoneCodec:
    """Payload: `count` float32, 4 bytes per value, exact to the bit."""

    name = "none"

    def nbytes(self, count: int) -> int:
        return 4 * count

    def encode(self, values: Tensor) -> Tensor:
        # A copy, as with every codec: the caller may change the values while the payload is being sent.
        values = checked_values(values)
        return copy(values, torch.empty_like(values)).view(torch.uint8)

    def encode_reporting(self, values: Tensor, report: Report) -> Tensor:
        payload = self.encode(values)
        same = payload.view(torch.float32)
        if all_finite(same):
            for start, stop in spans(same.numel(), same.device):
                report(start, same[start:stop])
        return payload

    def decode(self, payload: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        payload = checked_payload(payload, count, self.nbytes(count), self.name)
        return copy(numbers(payload, torch.float32), destination(out, count, payload.device))

    def finite(self, payload: Tensor, count: int) -> bool:
        if not fits(payload, count, self.nbytes(count)):
            return False
        return all_finite(numbers(payload.contiguous(), torch.float32))

    def most_norm(self, payload: Tensor, count: int) -> float:
        return norm(numbers(payload.contiguous(), torch.float32))

"""Runs the block codecs as fused kernels on a GPU, if Triton works there and its results pass a test.

Each function gives the same bits as its counterpart in plain torch, except for the scales of thin, which are sums
in another order and may differ in the last bit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

TRIAL_VALUES = 128 * 40 + 77

_trials: dict[torch.device, bool] = {}
_trying = threading.Lock()


class Blocks(Protocol):
    """The parts of a block codec that these functions need."""

    step: float
    block_bytes: ClassVar[int]

    def nbytes(self, count: int) -> int: ...


def usable(device: torch.device) -> bool:
    """Whether the kernels can be used on this device. The first call for a GPU tests them."""
    if device.type != "cuda":
        return False
    known = _trials.get(device)
    if known is None:
        with _trying:
            known = _trials.get(device)
            if known is None:
                _trials[device] = False  # the trial compares with plain torch, which asks again
                known = _trials[device] = _passes_trial(device)
    return known


def encode(codec: Blocks, values: Tensor) -> Tensor:
    payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    _encode(codec, values, values, payload, "AS_IT_IS")
    return payload


def decode(codec: Blocks, payload: Tensor, out: Tensor) -> None:
    """Decode into `out`."""
    _decode(codec, payload, out, "WRITE")


def add_pieces(codec: Blocks, payload: Tensor, counts: Sequence[int], total: Tensor, *, first: bool) -> bool:
    """Add decoded consecutive payloads; with `first`, overwrite. Returns False if they are not evenly spaced."""
    each, equal = counts[0], len(counts) if counts[-1] == counts[0] else len(counts) - 1
    nbytes = codec.nbytes(each)
    if nbytes % 2 or payload.data_ptr() % 2 or any(count != each for count in counts[:equal]):
        return False
    verb = "WRITE" if first else "ADD"
    _decode(codec, payload[: equal * nbytes], total[: equal * each], verb, pieces=equal)
    if equal < len(counts):
        _decode(codec, payload[equal * nbytes :], total[equal * each :], verb)
    return True


def encode_change(codec: Blocks, target: Tensor, replica: Tensor) -> Tensor:
    """Encode target - replica, and add the decoded payload to the replica if it is finite."""
    payload = torch.empty(codec.nbytes(replica.numel()), dtype=torch.uint8, device=replica.device)
    worst = _encode(codec, target, replica, payload, "DIFFERENCE")
    _decode(codec, payload, replica, "ADD_IF_FINITE", worst=worst)
    return payload


def encode_with_feedback(codec: Blocks, values: Tensor, residual: Tensor) -> Tensor:
    """Encode values + residual, and store the rounding error in the residual if the payload is finite."""
    payload = torch.empty(codec.nbytes(values.numel()), dtype=torch.uint8, device=values.device)
    worst = _encode(codec, values, residual, payload, "SUM")
    _decode(codec, payload, residual, "SUBTRACT_IF_FINITE", other=values, worst=worst)
    return payload


def _encode(codec: Blocks, a: Tensor, b: Tensor, payload: Tensor, what: str) -> Tensor:
    from potluck.codec import kernels

    count = a.numel()
    worst = torch.zeros(1, dtype=torch.int32, device=a.device)
    if count:
        grid = (_programs(count), 1)
        packed = codec.block_bytes == 64
        options: dict[str, Any] = {
            "WHAT": getattr(kernels, what),
            "PACKED": packed,
            "THIN": codec.step > 0,
            "enable_fp_fusion": False,
        }
        kernels.encode_kernel[grid](a, b, payload, worst, count, codec.step, **options)
    return worst


def _decode(
    codec: Blocks,
    payload: Tensor,
    out: Tensor,
    what: str,
    *,
    other: Tensor | None = None,
    worst: Tensor | None = None,
    pieces: int = 1,
) -> None:
    from potluck.codec import kernels

    count = out.numel() // pieces
    if count:
        packed = codec.block_bytes == 64
        unused = out if other is None else other
        finite = payload if worst is None else worst
        grid = (_programs(count), pieces)
        kernels.decode_kernel[grid](payload, out, unused, finite, count, DO=getattr(kernels, what), PACKED=packed)


def _programs(count: int) -> int:
    from potluck.codec import kernels

    return -(-count // (128 * int(kernels.ROWS.value)))


def _passes_trial(device: torch.device) -> bool:
    """Test the kernels: Triton needs a compiler and a GPU that it supports, and the results must equal plain
    torch's."""
    from potluck.codec.block import Int4Codec, Int8Codec
    from potluck.codec.thin import ThinCodec

    numbers = torch.Generator().manual_seed(1)
    values = torch.randn(TRIAL_VALUES, generator=numbers) * 1e-3
    try:
        for codec in (Int4Codec(), Int8Codec(), ThinCodec()):
            payload = encode(codec, values.to(device))
            decoded = torch.empty(TRIAL_VALUES, device=device)
            decode(codec, payload, decoded)
            found = payload.cpu()
            if codec.step:
                plain = codec.decode(codec.encode(values), TRIAL_VALUES)
                if float((codec.decode(found, TRIAL_VALUES) - plain).abs().mean()) > 1e-2 * float(values.std()):
                    return False
            elif not torch.equal(found, codec.encode(values)):
                return False
            if not torch.equal(decoded.cpu(), codec.decode(found, TRIAL_VALUES)):
                return False
    except Exception:  # whatever it is that this machine lacks, plain torch does not need it
        return False
    return True

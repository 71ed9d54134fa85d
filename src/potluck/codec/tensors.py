"""Shared functions of the codecs: checks, views of bytes as numbers, and work in parts that fit into the cache."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from potluck.errors import WireError

ALONE_VALUES = 131_072
"""Values handled at a time by a thread that computes on one core (torch.set_num_threads(1) in that thread).

512 KiB of float32 stay in a core's own cache from one pass to the next. Smaller parts would cost more than they
save: each operation releases the interpreter's lock, and a busy training thread returns it late.
"""

SHARED_VALUES = 32_768
"""The same in any other thread: the most that PyTorch computes without splitting an operation over cores.

A codec runs beside a training thread and must not take its cores. PyTorch splits sums and maxima at exactly 32,768
values already, so they get half as many.
"""

MAGNITUDE = 0x7FFF_FFFF
"""Selects a float32 without its sign. As integers, such bits have the order of the numbers, with NaN above all.
Unlike a maximum of floats, their maximum cannot lose a NaN on any device."""


def spans(count: int, device: torch.device, *, reducing: bool = False) -> Iterator[tuple[int, int]]:
    """Cut 0..count into ranges to be processed one after the other; each starts at a multiple of 16,384.

    Args:
        reducing: whether the values are summed or compared, and not each handled by itself.
    """
    stride = _most_values(count, device)
    if reducing and stride == SHARED_VALUES:
        stride //= 2
    for start in range(0, count, stride):
        yield start, min(start + stride, count)


def scratch(count: int, device: torch.device) -> Tensor:
    """[n] float32, long enough for any one of `spans(count, device)`."""
    return torch.empty(min(count, _most_values(count, device)), dtype=torch.float32, device=device)


def _most_values(count: int, device: torch.device) -> int:
    if device.type != "cpu":
        return max(count, 1)  # all at once: memory is fast there, and each operation costs a launch
    return ALONE_VALUES if torch.get_num_threads() == 1 else SHARED_VALUES


def copy(source: Tensor, target: Tensor) -> Tensor:
    """[count] -> [count], converted to the target's dtype; returns the target."""
    for start, stop in spans(source.numel(), source.device):
        target[start:stop].copy_(source[start:stop])
    return target


def checked_values(values: Tensor) -> Tensor:
    """The values, contiguous and outside of autograd; a tensor of another kind is a programmer's mistake."""
    if values.dtype != torch.float32 or values.dim() != 1:
        raise ValueError(f"a codec takes a 1-D float32 tensor, not {values.dim()}-D {values.dtype}")
    return values.detach().contiguous()


def fits(payload: Tensor, count: int, expected_bytes: int) -> bool:
    """True if the payload can be one of `count` values."""
    shaped = payload.dim() == 1 and payload.dtype == torch.uint8
    return shaped and count >= 0 and payload.numel() == expected_bytes


def checked_payload(payload: Tensor, count: int, expected_bytes: int, codec: str) -> Tensor:
    """The payload, contiguous, or WireError if it cannot be one of `count` values."""
    if not fits(payload, count, expected_bytes):
        raise WireError(
            f"a {codec} payload of {count} values has {expected_bytes} bytes in one dimension,"
            f" not {list(payload.shape)} {payload.dtype}",
            hint="both machines must run the same potluck with the same codec",
        )
    return payload.contiguous()


def destination(out: Tensor | None, count: int, device: torch.device) -> Tensor:
    """`out` if it can be decoded into, or a new [count] float32 tensor."""
    if out is None:
        return torch.empty(count, dtype=torch.float32, device=device)
    right = out.dtype == torch.float32 and out.shape == (count,) and out.is_contiguous()
    if not right or out.device != device:
        raise ValueError(
            f"out must be a contiguous [{count}] float32 tensor on {device}, not"
            f" {list(out.shape)} {out.dtype} on {out.device}"
        )
    return out.detach()


def numbers(payload: Tensor, dtype: torch.dtype) -> Tensor:
    """[n * itemsize] uint8 viewed as [n] numbers of `dtype`; copied only if the address is not aligned."""
    if payload.data_ptr() % dtype.itemsize or payload.storage_offset() % dtype.itemsize:
        payload = payload.clone()
    return payload.view(dtype)


def all_finite(values: Tensor) -> bool:
    """True if there is no NaN and no infinity among the floating-point `values`, of any dtype."""
    # NaN and infinity cannot leave a sum again, so that one pass settles the usual case. A sum may be
    # infinite where no term is; only then every value is looked at.
    for start, stop in spans(values.numel(), values.device, reducing=True):
        part = values[start:stop]
        if not math.isfinite(part.sum(dtype=torch.float32).item()) and not bool(part.isfinite().all()):
            return False
    return True


EASY_NORM = 1e15
"""Below this no square overflows float32, so one pass gives both the norm and whether all values are finite."""


def norm(values: Tensor) -> float:
    """The Euclidean norm of floating-point `values`, of any dtype; infinite where one of them is not finite."""
    squares = 0.0
    for start, stop in spans(values.numel(), values.device, reducing=True):
        part = values[start:stop]
        length = float(torch.linalg.vector_norm(part, dtype=torch.float32))
        if not length < EASY_NORM:  # NaN is not, either
            if not bool(part.isfinite().all()):
                return math.inf
            length = float(torch.linalg.vector_norm(part.double()))
        squares += length**2
    return math.sqrt(squares)

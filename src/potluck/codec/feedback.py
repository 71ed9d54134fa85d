"""Error feedback (what a codec loses now is sent later), a replica that follows its target, sums of payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from potluck.codec import fused
from potluck.codec.block import BlockCodec
from potluck.codec.interface import Codec
from potluck.codec.tensors import spans


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor) -> Tensor:
    """Encode `values + residual` and leave in `residual` what the payload lost of it.

    So all payloads together decode to the sum of all values, less the last residual. A payload that is not
    finite (see `codec.finite`) counts for nothing at the receiver, and leaves the residual as it was.

    Args:
        values: [count] float32, contiguous. Scratch: overwritten.
        residual: [count] float32, contiguous, on the same device. Zeros at first; changed in place.
    """
    total, kept = _in_place(values, "values"), _in_place(residual, "residual")
    if isinstance(codec, BlockCodec) and fused.usable(total.device):
        return fused.encode_with_feedback(codec, total, kept)
    for start, stop in spans(total.numel(), total.device):
        total[start:stop].add_(kept[start:stop])

    def keep(start: int, decoded: Tensor) -> None:
        stop = start + decoded.numel()
        torch.sub(total[start:stop], decoded, out=kept[start:stop])

    return codec.encode_reporting(total, keep)


def encode_change(codec: Codec, target: Tensor, replica: Tensor) -> Tensor:
    """Encode `target - replica` and add what the payload holds of it to `replica`.

    Whoever has the same replica and adds the decoded payload to it has the same bits again, on any device:
    the decoded values are the same everywhere, and the sum of two float32 has one correct rounding. What a
    payload loses is part of the next difference. A payload that is not finite (see `codec.finite`) leaves
    the replica as it was.

    Args:
        target: [count] float32; not changed.
        replica: [count] float32, contiguous, on the same device; changed in place.
    """
    wanted, followed = target.detach(), _in_place(replica, "replica")
    if isinstance(codec, BlockCodec) and fused.usable(followed.device) and wanted.is_contiguous():
        return fused.encode_change(codec, wanted, followed)
    change = torch.empty_like(followed)
    for start, stop in spans(change.numel(), change.device):
        torch.sub(wanted[start:stop], followed[start:stop], out=change[start:stop])

    def follow(start: int, decoded: Tensor) -> None:
        followed[start : start + decoded.numel()].add_(decoded)

    return codec.encode_reporting(change, follow)


def add_decoded(
    codec: Codec,
    payload: Tensor,
    counts: Sequence[int],
    total: Tensor,
    *,
    first: bool,
    room: Callable[[int], Tensor],
) -> None:
    """Add what the payloads of pieces decode to; with `first`, write it over whatever `total` holds.

    Args:
        payload: the pieces' payloads one after the other, [bytes] uint8.
        counts: how many values each piece has.
        total: [sum of counts] float32, contiguous, on the payload's device; changed in place.
        room: gives memory for so many float32 there, where that is needed.
    """
    summed = _in_place(total, "total")
    fusable = isinstance(codec, BlockCodec) and fused.usable(summed.device)
    if fusable and fused.add_pieces(codec, payload, counts, summed, first=first):  # type: ignore[arg-type]
        return
    at = read = 0
    for count in counts:
        part, nbytes = summed[at : at + count], codec.nbytes(count)
        if first:
            codec.decode(payload[read : read + nbytes], count, out=part)
        else:
            decoded = codec.decode(payload[read : read + nbytes], count, out=room(count))
            for start, stop in spans(count, summed.device):
                part[start:stop].add_(decoded[start:stop])
        at, read = at + count, read + nbytes


def rehearse(codec: Codec, counts: Iterable[int], device: torch.device) -> None:
    """Compile now what would be compiled at its first use, for pieces of this many values."""
    if not (isinstance(codec, BlockCodec) and fused.usable(device)):
        return
    for count in set(counts):
        values, others = torch.zeros(count, device=device), torch.zeros(count, device=device)
        payload = encode_change(codec, values, others)
        encode_with_feedback(codec, values, others)
        codec.decode(payload, count, out=values)
        for first in (True, False):
            add_decoded(codec, payload, [count], values, first=first, room=torch.empty)


def _in_place(tensor: Tensor, name: str) -> Tensor:
    """The tensor outside of autograd, if it can be changed in place."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-D and contiguous, because it is changed in place")
    return tensor.detach()

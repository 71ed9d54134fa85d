"""Error feedback (rounding errors are sent later), a replica that follows its target, and sums of payloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from potluck.codec import fused
from potluck.codec.block import BlockCodec
from potluck.codec.interface import Codec
from potluck.codec.tensors import spans


def encode_with_feedback(codec: Codec, values: Tensor, residual: Tensor) -> Tensor:
    """Encode `values + residual` and store the rounding error in `residual`.

    So all payloads together decode to the sum of all values, less the last residual. The receiver ignores a payload
    that is not finite (see `codec.finite`), and the residual does not change.

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
    """Encode `target - replica` and add the decoded payload to `replica`.

    Another copy of the replica that adds the decoded payload has the same bits afterwards, on any device: the
    decoded values are the same everywhere, and the sum of two float32 has one correct rounding. The rounding error
    is part of the next difference. A payload that is not finite (see `codec.finite`) does not change the replica.

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
    """Add the decoded payloads of pieces to `total`; with `first`, overwrite it.

    Args:
        payload: the pieces' payloads one after the other, [bytes] uint8.
        counts: how many values each piece has.
        total: [sum of counts] float32, contiguous, on the payload's device; changed in place.
        room: returns memory for this many float32 on that device, if needed.
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
    """Compile kernels for pieces of this many values now, instead of at their first use."""
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

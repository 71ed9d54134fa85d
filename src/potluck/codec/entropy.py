"""From a codec's payload in host memory to the bytes that are sent, and back: entropy coding for thin.

The message of a thin payload begins with one byte that says how the rest is coded:

    0   the payload as it is
    1   the scales' upper bytes, their lower bytes and the codes, as `coder.py` codes them

Other codecs' payloads are sent unchanged. A message is at most one byte longer than its payload. Received data is
not trusted: nothing is decoded beyond the payload's length, which is known.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from potluck.codec import coder
from potluck.codec.interface import Codec
from potluck.codec.thin import ThinCodec
from potluck.errors import WireError

PLAIN, CODED = 0, 1

Buffer = bytes | memoryview


def is_entropy_coded(codec: Codec) -> bool:
    return isinstance(codec, ThinCodec)


def least_and_most_bytes(codec: Codec, count: int) -> tuple[int, int]:
    """The lengths that the message of a piece of `count` values can have."""
    nbytes = codec.nbytes(count)
    return (1, nbytes + 1) if isinstance(codec, ThinCodec) else (nbytes, nbytes)


def to_wire(codec: Codec, payload: Tensor) -> Buffer:
    """The message of a payload, [nbytes] uint8 in host memory; shares its memory if it is unchanged."""
    flat = payload.detach().contiguous().numpy()
    whole = memoryview(flat)  # type: ignore[arg-type]
    if not isinstance(codec, ThinCodec):
        return whole
    scales = _scale_bytes(codec, flat.size)
    upper, lower = (np.ascontiguousarray(flat[at:scales:2]) for at in (1, 0))
    parts = [bytes((CODED,)), *coder.coded(upper, lower, flat[scales:])]
    if sum(map(len, parts)) > flat.size:
        return b"".join((bytes((PLAIN,)), whole))
    return b"".join(parts)


def from_wire(codec: Codec, message: Buffer, count: int) -> Tensor:
    """The payload of `count` values in a message, [nbytes(count)] uint8.

    Raises WireError if it is not a message of this codec for this many values.
    """
    nbytes = codec.nbytes(count)
    least, most = least_and_most_bytes(codec, count)
    if not least <= len(message) <= most:
        raise WireError(f"{len(message)} bytes for {count} values in {codec.name}, not {least} to {most}")
    if not isinstance(codec, ThinCodec):
        return _tensor(message)
    kind, rest = message[0], memoryview(message)[1:]
    if kind == PLAIN and len(rest) == nbytes:
        return _tensor(rest)
    if kind != CODED:
        raise WireError(f"a {codec.name} message of kind {kind} and {len(rest)} bytes for a payload of {nbytes}")
    flat = coder.decoded(rest, nbytes, codec.name)
    if len(flat) != nbytes:
        raise WireError(f"a {codec.name} message of {len(flat)} bytes for a payload of {nbytes}")
    scales = _scale_bytes(codec, nbytes)
    payload = np.empty(nbytes, dtype=np.uint8)
    payload[1:scales:2], payload[0:scales:2] = flat[: scales // 2], flat[scales // 2 : scales]
    payload[scales:] = flat[scales:]
    return torch.from_numpy(payload)


def _scale_bytes(codec: ThinCodec, nbytes: int) -> int:
    """How many bytes of a payload of this length are scales."""
    whole = codec.block_bytes + 2
    return 2 * -(-nbytes // whole)


def _tensor(buffer: Buffer) -> Tensor:
    """A tensor over received bytes; copied only if they are read-only."""
    flat = np.frombuffer(buffer, dtype=np.uint8)
    return torch.from_numpy(flat if flat.flags.writeable else flat.copy())

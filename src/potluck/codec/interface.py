"""The interface of a codec and its contract, which tests/unit/test_codec_conformance.py checks for every codec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

Report = Callable[[int, Tensor], None]
"""Called as `report(start, decoded)`: values `start .. start + len(decoded)` will be decoded as `decoded`.

`decoded` must not be changed, and is valid until the call returns: then its memory may be reused.
"""


class Codec(Protocol):
    """Packs a piece: a 1-D float32 tensor of `count` values <-> a 1-D uint8 payload on the same device.

    A codec has no state: one object may be used from any number of threads at once. A payload is never trusted:
    whatever its bytes, decoding either returns `count` values or raises WireError. All numbers in a payload are
    little-endian.
    """

    @property
    def name(self) -> str:
        """The codec's name, in its shortest form."""
        ...

    def nbytes(self, count: int) -> int:
        """The exact length of the payload of `count` values, whatever the values."""
        ...

    def encode(self, values: Tensor) -> Tensor:
        """[count] float32 -> [nbytes(count)] uint8 on the same device. Never raises for NaN or infinity:
        `finite` is False for the payload then."""
        ...

    def encode_reporting(self, values: Tensor, report: Report) -> Tensor:
        """Like `encode`, and also report the decoded values, in ranges that cover all values in order.

        The reported bits are those that `decode` gives on any device. Reports nothing at all if the payload
        is not finite.
        """
        ...

    def decode(self, payload: Tensor, count: int, out: Tensor | None = None) -> Tensor:
        """[nbytes(count)] uint8 -> [count] float32 on the same device, the same bits on every device.

        Args:
            out: a contiguous [count] float32 tensor on the payload's device to write into and return.

        Raises:
            WireError: the payload has the wrong length, or its content points outside of the values.
        """
        ...

    def finite(self, payload: Tensor, count: int) -> bool:
        """True if the payload has the right length, can be decoded, and decodes to finite values only.

        So `decode` does not raise where this is True. Cheap if possible: a codec with scales checks only the
        scales. Waits for the device.
        """
        ...

    def most_norm(self, payload: Tensor, count: int) -> float:
        """A close upper bound of the Euclidean norm of a payload's decoded values: a codec with scales uses only
        the scales. Infinite where `finite` is False. Waits for the device."""
        ...

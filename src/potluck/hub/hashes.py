"""The hash of a replica, computed piece by piece and in any order, so that training need not pause.

Owns the list of pieces that are still to be hashed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

DIGEST_BYTES = 8
"""Bytes of one piece's digest. It protects against faults, not against forgery."""


class PieceHashes:
    """The digests of all pieces at one version."""

    def __init__(self, version: int, pieces: int) -> None:
        self.version = version
        self._digests: list[bytes | None] = [None] * pieces
        self._left = pieces

    def lacks(self, index: int) -> bool:
        return self._digests[index] is None

    def take(self, index: int, values: memoryview | bytes) -> None:
        """Hash the bytes (float32) of a piece at this version."""
        if self._digests[index] is None:
            self._left -= 1
        self._digests[index] = hashlib.blake2b(values, digest_size=DIGEST_BYTES).digest()

    @property
    def complete(self) -> bool:
        return self._left == 0

    def digests(self) -> bytes:
        """The digests of all pieces, concatenated."""
        assert self.complete
        return b"".join(d for d in self._digests if d is not None)

    def next(self, versions: Sequence[int] | None = None) -> int | None:
        """The next piece to hash, which must have this version; `versions` has each piece's version."""
        for index, digest in enumerate(self._digests):
            if digest is None and (versions is None or versions[index] == self.version):
                return index
        return None


def differing(ours: bytes, theirs: bytes) -> int:
    """The number of pieces in which two replicas differ."""
    if len(ours) != len(theirs):
        return max(len(ours), len(theirs)) // DIGEST_BYTES
    parts = range(0, len(ours), DIGEST_BYTES)
    return sum(ours[i : i + DIGEST_BYTES] != theirs[i : i + DIGEST_BYTES] for i in parts)

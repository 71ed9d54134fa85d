"""The hash of a replica, taken piece by piece and in any order, so that nobody has to stand still for it.

Owns which pieces are still to be hashed. It knows no tensor and no protocol: it is given bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

DIGEST_BYTES = 8
"""Of one piece: it guards against faults, not against forgers."""


class PieceHashes:
    """The digests of all pieces at one version."""

    def __init__(self, version: int, pieces: int) -> None:
        self.version = version
        self._digests: list[bytes | None] = [None] * pieces
        self._left = pieces

    def lacks(self, index: int) -> bool:
        return self._digests[index] is None

    def take(self, index: int, values: memoryview | bytes) -> None:
        """The bytes (float32) of a piece at this version."""
        if self._digests[index] is None:
            self._left -= 1
        self._digests[index] = hashlib.blake2b(values, digest_size=DIGEST_BYTES).digest()

    @property
    def complete(self) -> bool:
        return self._left == 0

    def digests(self) -> bytes:
        """All of them, one after the other."""
        assert self.complete
        return b"".join(d for d in self._digests if d is not None)

    def next(self, versions: Sequence[int] | None = None) -> int | None:
        """A piece to hash next: one that has this version; `versions` has the version of each."""
        for index, digest in enumerate(self._digests):
            if digest is None and (versions is None or versions[index] == self.version):
                return index
        return None


def differing(ours: bytes, theirs: bytes) -> int:
    """In how many pieces two replicas differ."""
    if len(ours) != len(theirs):
        return max(len(ours), len(theirs)) // DIGEST_BYTES
    parts = range(0, len(ours), DIGEST_BYTES)
    return sum(ours[i : i + DIGEST_BYTES] != theirs[i : i + DIGEST_BYTES] for i in parts)

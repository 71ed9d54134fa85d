"""The entropy coder of thin and of exact changes: Huffman codes, from zstandard with almost no search for matches.

zlib's Huffman codes take as many bits and seven times as long (docs/log.md). Received data is not trusted: nothing
is decoded beyond a known length, no window larger than the sender's is allocated, and blocks are counted before
they are decoded, because each may have its own tables: a message of small blocks took 160 times as long as an
honest one.
"""

from __future__ import annotations

import threading

import numpy as np

from potluck.errors import MissingModuleError, WireError

try:
    import zstandard
except ModuleNotFoundError:  # a checkout that was updated: it is a dependency since protocol 3
    raise MissingModuleError(
        "Potluck needs zstandard, which is not installed here", hint="pip install 'zstandard>=0.23'"
    ) from None

WINDOW_LOG = 17
LEAST_BLOCK, MOST_SMALL_BLOCKS = 1024, 16
"""A message may have one block per this many decoded bytes, plus this many more. `coded` makes blocks of 128
KiB."""
_HUFFMAN = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    min_match=7,
    hash_log=6,
    chain_log=6,
    search_log=1,
    window_log=WINDOW_LOG,
    target_length=0,
)


class _Coders(threading.local):
    """Each thread has its own coder, because two threads must not use one at the same time."""

    def __init__(self) -> None:
        self.encoder = zstandard.ZstdCompressor(compression_params=_HUFFMAN)
        self.decoder = zstandard.ZstdDecompressor(max_window_size=1 << WINDOW_LOG)


_coders = _Coders()


def coded(*parts: np.ndarray) -> list[bytes]:
    """The coded bytes of contiguous arrays, each with its own Huffman codes, to be concatenated."""
    stream = _coders.encoder.compressobj(size=sum(part.nbytes for part in parts))
    found = []
    for part in parts[:-1]:
        found += [stream.compress(part.data), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return [*found, stream.compress(parts[-1].data), stream.flush()]


def decoded(message: bytes | memoryview, most: int, codec: str) -> np.ndarray:
    """The decoded bytes, [at most `most`] uint8.

    Raises WireError if the code is invalid, or more than `most` bytes.
    """
    try:
        says = zstandard.frame_content_size(message)  # that much memory will be taken
        if bytes(message[:4]) != zstandard.FRAME_HEADER:  # a frame to be skipped says 0, and takes what it likes
            raise WireError(f"a {codec} message that begins with something else")
        if not 0 <= says <= most:
            raise WireError(f"a {codec} message of {says} bytes where the largest allowed is {most}")
        _count_blocks(message, MOST_SMALL_BLOCKS + says // LEAST_BLOCK, codec)
        found = _coders.decoder.decompress(message, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise WireError(f"{len(message)} bytes that are no {codec} message: {error}") from None
    return np.frombuffer(found, dtype=np.uint8)


def _count_blocks(message: bytes | memoryview, most: int, codec: str) -> None:
    """Raises WireError if a frame has more than `most` blocks; the decoder checks everything else."""
    at = zstandard.frame_header_size(message)
    for _ in range(most):
        header = int.from_bytes(message[at : at + 3], "little")
        last, kind, size = header & 1, header >> 1 & 3, header >> 3
        at += 3 + (1 if kind == 1 else size)  # kind 1: one byte, repeated
        if last or at >= len(message):
            return
    raise WireError(f"a {codec} message of more than {most} blocks")

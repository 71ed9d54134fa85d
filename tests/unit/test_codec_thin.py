"""thin: how few bits it sends, its scales, and that no message can hurt who decodes it."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch
import zstandard
from torch import Tensor

from potluck.codec import coder, from_wire, get, least_and_most_bytes, to_wire
from potluck.errors import WireError
from support.fuzz import Fuzz

COUNTS = (0, 1, 63, 64, 65, 127, 128, 129, 4097, 100_003)


def normal(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["none", "int4", "thin", "thin:1.25", "topk"])
@pytest.mark.parametrize("count", COUNTS)
def test_a_message_gives_the_payload_back(name: str, count: int) -> None:
    codec = get(name)
    payload = codec.encode(normal(count) * 1e-3)
    message = bytes(to_wire(codec, payload))
    least, most = least_and_most_bytes(codec, count)
    assert least <= len(message) <= most
    for received in (message, memoryview(bytearray(message))):
        assert torch.equal(from_wire(codec, received, count), payload)


def test_bytes_that_no_coder_makes_smaller_are_sent_as_they_are() -> None:
    codec, count = get("thin"), 10_000
    payload = torch.randint(0, 256, (codec.nbytes(count),), dtype=torch.uint8)
    message = to_wire(codec, payload)
    assert len(message) == codec.nbytes(count) + 1
    assert torch.equal(from_wire(codec, message, count), payload)


@pytest.mark.parametrize(("name", "most_bits"), [("thin", 2.22), ("thin:1.25", 1.94), ("thin:1.5", 1.70)])
@pytest.mark.parametrize("count", [65_536, 1 << 20])
def test_half_of_int4s_bits(name: str, most_bits: float, count: int) -> None:
    """All that is sent, for values of a normal distribution; those of others need fewer."""
    codec = get(name)
    assert 8 * len(to_wire(codec, codec.encode(normal(count)))) / count < most_bits


def test_no_code_is_clipped() -> None:
    """One value of a block is 11.3 root mean squares, and the codes end at 7: its scale is int4's."""
    for name, size in itertools.product(("thin", "thin:1.25"), (1e-30, 1e-18, 1.0, 1e18, 1e30)):
        codec, values = get(name), torch.zeros(256)
        values[5], values[128:] = 8.0 * size, normal(128) * size
        error = (codec.decode(codec.encode(values), 256) - values).abs()
        assert error[:128].amax() <= 0.6 * 8.0 * size / 7
        assert error[128:].amax() <= 0.6 * 1.25 * size * 1.2


@pytest.mark.parametrize("count", [1, 300, 70_000])
def test_a_stream_that_goes_on_is_not_decoded_beyond_its_payload(count: int) -> None:
    """A message of a thousandth of what it would expand to."""
    codec = get("thin")
    one_more, many = (np.zeros(n, dtype=np.uint8) for n in (codec.nbytes(count) + 1, 200 * codec.nbytes(count)))
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(many.data)
    bombs = [b"".join(coder.coded(one_more)), b"".join(coder.coded(many)), unsized]
    said = bytearray(zstandard.ZstdCompressor().compress(many.data))
    said[5:7] = coder.coded(np.zeros(codec.nbytes(count), dtype=np.uint8))[0][5:7]  # what it says is not true
    bombs += [bytes(said), b"\x50\x2a\x4d\x18\xf0\xff\xff\xff" + bytes(8)]  # and a frame to be skipped, of 4 GiB
    for bomb in bombs:
        with pytest.raises(WireError):
            from_wire(codec, b"\x01" + bomb, count)


def in_small_blocks(content: bytes, nbytes: int) -> bytes:
    """One frame, each block of `nbytes` with Huffman codes of its own."""
    stream = zstandard.ZstdCompressor(level=3).compressobj(size=len(content))
    parts = []
    for start in range(0, len(content), nbytes):
        parts += [stream.compress(content[start : start + nbytes]), stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)]
    return b"".join([*parts, stream.flush()])


def test_a_message_of_many_small_blocks_is_refused_before_it_is_decoded() -> None:
    """It took 38 ms where an honest one takes 0.2: a guest could have kept its host from ending a step."""
    codec, count = get("thin"), 1 << 20
    content = bytes(codec.encode(normal(count)).numpy())
    for nbytes in (80, 300, 900):
        with pytest.raises(WireError, match="blocks"):
            from_wire(codec, b"\x01" + in_small_blocks(content, nbytes), count)
    empty = bytes(3)  # a raw block of no bytes, and not the last one
    honest = b"".join(coder.coded(np.frombuffer(content, dtype=np.uint8)))
    header = zstandard.frame_header_size(honest)
    with pytest.raises(WireError, match="blocks"):
        from_wire(codec, b"\x01" + honest[:header] + 60_000 * empty + honest[header:], count)


@pytest.mark.parametrize("nbytes", [2048, 1 << 15, 1 << 17])
def test_other_zstandards_may_cut_their_blocks_elsewhere(nbytes: int) -> None:
    codec, count = get("thin"), 1 << 20
    scales = 2 * -(-count // 128)
    payload = codec.encode(normal(count))
    flat = payload.numpy()
    content = flat[1:scales:2].tobytes() + flat[:scales:2].tobytes() + flat[scales:].tobytes()
    assert torch.equal(from_wire(codec, b"\x01" + in_small_blocks(content, nbytes), count), payload)


@pytest.mark.parametrize("log", [18, 27, 31])
def test_no_room_is_made_for_a_large_window(log: int) -> None:
    """A frame may say that it needs 2 GiB of what was decoded before."""
    codec, count = get("thin"), 1 << 20
    content = bytes(codec.encode(normal(count)).numpy())
    honest = b"".join(coder.coded(np.frombuffer(content, dtype=np.uint8)))
    assert honest[4] == 0x80, "four bytes of length, and a window"
    windowed = honest[:5] + bytes(((log - 10) << 3,)) + honest[6:]
    assert zstandard.get_frame_parameters(windowed).window_size == 1 << log
    with contextlib.suppress(WireError):
        assert coder.decoded(windowed, len(content), "thin").tobytes() == content
    assert coder._coders.decoder.memory_size() < 1 << 19
    unsized = honest[:4] + b"\x00" + windowed[5:6] + honest[10:]
    for named in (unsized, honest[:4] + b"\x81" + honest[5:6] + b"\x07" + honest[6:]):  # by the dictionary 7
        with pytest.raises(WireError):
            coder.decoded(named, len(content), "thin")
    assert coder._coders.decoder.memory_size() < 1 << 19


def test_what_is_no_message_is_refused() -> None:
    codec, count = get("thin"), 1000
    message = bytes(to_wire(codec, codec.encode(normal(count))))
    for wrong in (b"", b"\x00", b"\x01", b"\x02" + message[1:], message[:-1], message + b"\x00", message[:9]):
        with pytest.raises(WireError, match="thin"):
            from_wire(codec, wrong, count)
    for other in (count - 64, count + 64):
        with pytest.raises(WireError):
            from_wire(codec, message, other)


def test_without_zstandard_one_line_says_what_to_type() -> None:
    """As in a checkout that was updated to protocol 3, and not installed again."""
    program = "import sys; sys.modules['zstandard'] = None; import potluck.codec.coder"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    said = done.stderr.splitlines()[-2:]
    assert "MissingModuleError: Potluck needs zstandard, which is not installed here" in said[0]
    assert said[1] == "hint: pip install 'zstandard>=0.23'"


def test_any_message_decodes_to_finite_values_or_raises() -> None:
    """A small part of what bench/stress/s2_fuzz.py does."""
    fuzz = Fuzz(5, "streams")
    for _ in range(2000):
        fuzz.once()
    assert min(fuzz.counts["streams: taken"], fuzz.counts["streams: refused"]) > 200
    assert fuzz.slowest_s < 1.0

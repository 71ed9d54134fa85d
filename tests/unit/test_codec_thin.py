"""thin: how few bits it sends, its scales, and that no message can hurt who decodes it."""

from __future__ import annotations

import itertools

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


def test_what_is_no_message_is_refused() -> None:
    codec, count = get("thin"), 1000
    message = bytes(to_wire(codec, codec.encode(normal(count))))
    for wrong in (b"", b"\x00", b"\x01", b"\x02" + message[1:], message[:-1], message + b"\x00", message[:9]):
        with pytest.raises(WireError, match="thin"):
            from_wire(codec, wrong, count)
    for other in (count - 64, count + 64):
        with pytest.raises(WireError):
            from_wire(codec, message, other)


def test_any_message_decodes_to_finite_values_or_raises() -> None:
    """A small part of what bench/stress/s2_fuzz.py does."""
    fuzz = Fuzz(5, "streams")
    for _ in range(2000):
        fuzz.once()
    assert min(fuzz.counts["streams: taken"], fuzz.counts["streams: refused"]) > 200
    assert fuzz.slowest_s < 1.0

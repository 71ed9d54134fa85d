"""What every codec must do, whichever it is. It knows the interface and no codec's layout."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from potluck.codec import NAMES, Codec, encode_change, encode_with_feedback, get, tensors
from potluck.errors import WireError

ALL = (*NAMES, "topk:0.3", "thin:1.25")
SIZES = (0, 1, 127, 128, 129, 100_003)
NOT_FINITE = (0x7F80_0000, 0xFF80_0000, 0x7FC0_0000, 0xFFC0_0000, 0x7FFF_FFFF, 0xFFFF_FFFF, 0x7F80_0001)
"""float32 bits: both infinities, and NaN quiet, signalling, of either sign and with every bit set."""

every_codec = pytest.mark.parametrize("codec", [get(name) for name in ALL], ids=ALL)
few = settings(max_examples=30, deadline=None)


def some_values(count: int, seed: int = 0) -> Tensor:
    """[count] float32 of many magnitudes, as gradients of different layers are."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=generator)
    exponents = torch.randint(-9, 2, (count // 1000 + 1,), generator=generator)
    return values * 10.0 ** exponents.repeat_interleave(1000)[:count]


def some_bytes(count: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def with_bits(values: Tensor, index: int, bits: int) -> Tensor:
    """The values with one of them replaced by the float32 of these bits."""
    replaced = values.clone()
    replaced.view(torch.int32)[index] = bits - (1 << 32) * (bits >> 31)
    return replaced


@every_codec
@pytest.mark.parametrize("count", SIZES)
def test_payload_has_the_promised_length_and_decodes_to_as_many_values(codec: Codec, count: int) -> None:
    values = some_values(count)
    before = values.clone()
    payload = codec.encode(values)
    assert payload.dtype == torch.uint8
    assert payload.shape == (codec.nbytes(count),)
    assert torch.equal(values, before)
    assert codec.finite(payload, count)
    kept = payload.clone()
    decoded = codec.decode(payload, count)
    assert decoded.dtype == torch.float32
    assert decoded.shape == (count,)
    assert torch.equal(payload, kept)


@every_codec
def test_payload_is_a_copy(codec: Codec) -> None:
    values = some_values(1000)
    payload = codec.encode(values)
    before = payload.clone()
    values.fill_(7.0)
    assert torch.equal(payload, before)


@every_codec
@pytest.mark.parametrize("count", SIZES)
def test_decodes_into_out_what_it_decodes_without(codec: Codec, count: int) -> None:
    payload = codec.encode(some_values(count))
    around = torch.full((count + 2,), float("nan"))
    out = around[1 : count + 1]
    returned = codec.decode(payload, count, out=out)
    assert returned.data_ptr() == out.data_ptr()
    assert torch.equal(out, codec.decode(payload, count))
    assert around[[0, -1]].isnan().all(), "nothing beside `out` is written"


@every_codec
def test_out_of_another_kind_is_refused(codec: Codec) -> None:
    payload = codec.encode(some_values(200))
    for out in (torch.empty(199), torch.empty(200, dtype=torch.float64), torch.empty(400)[::2]):
        with pytest.raises(ValueError, match="out must be"):
            codec.decode(payload, 200, out=out)


@every_codec
def test_values_of_another_kind_are_refused(codec: Codec) -> None:
    for values in (torch.zeros(8, dtype=torch.float64), torch.zeros(2, 4)):
        with pytest.raises(ValueError, match="1-D float32"):
            codec.encode(values)


@every_codec
def test_values_may_be_strided_or_require_gradients(codec: Codec) -> None:
    values = some_values(400)[::2]
    expected = codec.encode(values.contiguous())
    assert torch.equal(codec.encode(values), expected)
    assert torch.equal(codec.encode(values.clone().requires_grad_()), expected)


@every_codec
@few
@given(count=st.sampled_from(SIZES[1:-1]), seed=st.integers(0, 1000), exponent=st.integers(-30, 3))
def test_a_round_trip_changes_little(codec: Codec, count: int, seed: int, exponent: int) -> None:
    """No value moves by more than the largest one, and the largest hardly moves at all."""
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    if codec.name == "fp16":
        values = values.clamp(-6e4, 6e4)
    error = (values - codec.decode(codec.encode(values), count)).abs()
    peak = values.abs().amax()
    assert error.amax() <= peak
    tiny = 6e-8 if codec.name == "fp16" else 0.0
    part = 2 if codec.name.startswith("thin") else 14  # thin's steps are as large as a usual value
    assert error[values.abs().argmax()] <= peak / part * 1.01 + tiny


@every_codec
@pytest.mark.parametrize("count", SIZES[1:])
def test_a_value_that_is_not_finite_is_never_hidden(codec: Codec, count: int) -> None:
    values = some_values(count)
    for bits in NOT_FINITE:
        for index in {0, count // 2, count - 1}:
            payload = codec.encode(with_bits(values, index, bits))
            assert not codec.finite(payload, count), f"{bits:#x} at {index}"


@pytest.mark.parametrize("name", ["none", "bf16", "topk:1"])
def test_finite_values_with_an_infinite_sum_are_finite(name: str) -> None:
    codec, values = get(name), torch.full((1000,), 3e38)
    assert codec.finite(codec.encode(values), 1000)


@every_codec
@few
@given(count=st.integers(1, 300), seed=st.integers(0, 10**6))
def test_any_bytes_decode_or_raise_and_finite_means_finite(codec: Codec, count: int, seed: int) -> None:
    payload = some_bytes(codec.nbytes(count), seed)
    finite = codec.finite(payload, count)
    try:
        decoded = codec.decode(payload, count)
    except WireError:
        assert not finite
    else:
        assert decoded.shape == (count,)
        assert not finite or bool(decoded.isfinite().all())


@every_codec
@pytest.mark.parametrize("count", [0, 1, 129, 1000])
def test_a_payload_of_the_wrong_length_or_kind_is_refused(codec: Codec, count: int) -> None:
    payload = codec.encode(some_values(count))
    wrong = [
        (torch.cat((payload, payload.new_zeros(1))), count),
        (payload.view(1, -1), count),
        (payload.to(torch.int8), count),
        (payload, -1),
        (payload, count + 1000),
    ]
    if count:
        wrong.append((payload[:-1], count))
    for bad, claimed in wrong:
        assert not codec.finite(bad, claimed)
        with pytest.raises(WireError, match=codec.name) as caught:
            codec.decode(bad, claimed)
        assert caught.value.hint


@every_codec
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_a_payload_may_lie_at_any_address_and_be_read_only(codec: Codec, offset: int) -> None:
    count = 1000
    payload = codec.encode(some_values(count))
    expected = codec.decode(payload, count)
    framed = bytes(offset) + payload.numpy().tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the buffer is read-only is the point here
        received = torch.frombuffer(framed, dtype=torch.uint8, offset=offset)
    for moved in (received, torch.cat((payload.new_zeros(offset), payload))[offset:]):
        assert codec.finite(moved, count)
        assert torch.equal(codec.decode(moved, count), expected)


@every_codec
@pytest.mark.parametrize("count", SIZES)
def test_reports_are_what_decode_gives(codec: Codec, count: int) -> None:
    values = some_values(count)
    parts: list[Tensor] = []

    def collect(start: int, decoded: Tensor) -> None:
        assert start == sum(part.numel() for part in parts)
        parts.append(decoded.clone())

    payload = codec.encode_reporting(values, collect)
    assert torch.equal(payload, codec.encode(values))
    reported = torch.cat((torch.empty(0), *parts))
    # As bits, where 0.0 and -0.0 differ: added to a weight of -0.0 they would part host and guest.
    assert torch.equal(reported.view(torch.int32), codec.decode(payload, count).view(torch.int32))


@every_codec
def test_reports_nothing_if_not_finite(codec: Codec) -> None:
    values = with_bits(some_values(1000), 500, NOT_FINITE[0])

    def never(start: int, decoded: Tensor) -> None:
        raise AssertionError(f"reported {decoded.numel()} values at {start}")

    assert not codec.finite(codec.encode_reporting(values, never), 1000)


@every_codec
@pytest.mark.parametrize("most", [256, 16_384, 10**9])
def test_the_bits_do_not_depend_on_how_the_work_is_cut(
    codec: Codec, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = some_values(100_003)
    payload = codec.encode(values)
    decoded = codec.decode(payload, values.numel())
    monkeypatch.setattr(tensors, "_most_values", lambda count, device: most)
    assert torch.equal(codec.encode(values), payload)
    assert torch.equal(codec.decode(payload, values.numel()), decoded)


@every_codec
def test_one_codec_serves_many_threads(codec: Codec) -> None:
    inputs = [some_values(40_000, seed) for seed in range(4)]
    expected = [codec.decode(codec.encode(values), values.numel()) for values in inputs]
    same: list[bool] = []

    def work(index: int) -> None:
        for _ in range(5):
            decoded = codec.decode(codec.encode(inputs[index]), inputs[index].numel())
            same.append(torch.equal(decoded, expected[index]))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same == [True] * 20


@pytest.mark.slow
def test_no_codec_takes_more_than_the_calling_thread() -> None:
    """With PyTorch allowed four cores, its pool of threads must not even come to life."""
    program = """
import psutil, torch
from potluck.codec import NAMES, encode_change, encode_with_feedback, get
torch.set_num_threads(4)
count = 1_100_000
values, residual, replica = torch.empty(3, count).unbind()
for tensor, value in ((values, 1.0), (residual, 0.0), (replica, 0.0)):
    for part in tensor.split(10_000):
        part.fill_(value)
before = psutil.Process().num_threads()
for name in NAMES:
    codec = get(name)
    payload = codec.encode(values)
    codec.decode(payload, count)
    assert codec.finite(payload, count)
    encode_with_feedback(codec, values, residual)
    encode_change(codec, values, replica)
    assert psutil.Process().num_threads() == before, name
before_pool = psutil.Process().num_threads()
torch.ones(1_000_000).mul_(2)
assert psutil.Process().num_threads() > before_pool, "this test can no longer see PyTorch's threads"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr


@every_codec
def test_feedback_and_change_work_on_nothing(codec: Codec) -> None:
    assert encode_with_feedback(codec, torch.empty(0), torch.empty(0)).numel() == 0
    assert encode_change(codec, torch.empty(0), torch.empty(0)).numel() == 0


@every_codec
@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("scale", [1.0, 1e-12, 1e4])
def test_the_norm_that_is_told_without_decoding_is_never_too_small(codec: Codec, count: int, scale: float) -> None:
    payload = codec.encode(some_values(count) * scale)
    if not codec.finite(payload, count):
        pytest.skip("more than fp16 can hold")
    norm = float(torch.linalg.vector_norm(codec.decode(payload, count).double()))
    most = codec.most_norm(payload, count)
    assert most >= norm * (1 - 1e-5) - 1e-19  # squares that vanish in float32
    # As if every value of a block were its largest, and one code further; a block that is zero has a tiny scale.
    assert most <= 12 * 8 / 7 * norm * (1 + 1e-5) + 1e-19


@pytest.mark.parametrize("name", ["none", "bf16", "int8", "int4", "thin", "topk"])
def test_values_whose_squares_are_no_float32_have_a_norm(name: str) -> None:
    codec = get(name)
    most = codec.most_norm(codec.encode(torch.full((1000,), 2e38)), 1000)
    assert 2e38 < most < 1e41


@every_codec
@few
@given(count=st.integers(1, 300), seed=st.integers(0, 1 << 30))
def test_a_hostile_payload_cannot_hide_its_norm(codec: Codec, count: int, seed: int) -> None:
    payload = some_bytes(codec.nbytes(count), seed)
    if codec.finite(payload, count):
        norm = float(torch.linalg.vector_norm(codec.decode(payload, count).double()))
        assert codec.most_norm(payload, count) >= norm * (1 - 1e-5) - 1e-19
    else:
        assert codec.most_norm(payload, count) == math.inf

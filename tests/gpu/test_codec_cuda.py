"""The codecs on a GPU give the CPU's bits, fused and in plain torch alike."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from potluck.codec import NAMES, Codec, add_decoded, encode_change, encode_with_feedback, fused, get

SIZES = (1, 63, 64, 65, 127, 128, 129, 4096, 100_003, 1 << 20)
CUDA = torch.device("cuda", 0)
block_codecs = pytest.mark.parametrize("name", ["int8", "int4"])


@pytest.fixture(params=["fused", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "fused":
        assert fused.usable(CUDA), "Triton does not work on this machine, or not as plain torch does"
    else:
        monkeypatch.setattr(fused, "usable", lambda device: False)
    return request.param


def some_values(count: int, seed: int = 0) -> Tensor:
    """Of many magnitudes, with zeros and values that round to the middle among them."""
    numbers = torch.Generator().manual_seed(seed)
    values = torch.randn(count, generator=numbers)
    exponents = torch.randint(-9, 2, (count // 1000 + 1,), generator=numbers)
    values = values * 10.0 ** exponents.repeat_interleave(1000)[:count]
    values[::17] = 0.0
    values[3::19] = 0.5
    return values


def room(count: int) -> Tensor:
    return torch.empty(count, device=CUDA)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("count", SIZES)
def test_both_ways_give_the_cpus_bits(name: str, count: int, way: str) -> None:
    codec, values = get(name), some_values(count)
    payload = codec.encode(values)
    # Of equal values, each device keeps others; and the sums in thin's scales have no order.
    if codec.name not in ("topk", "thin"):
        assert torch.equal(codec.encode(values.to(CUDA)).cpu(), payload)
    expected = codec.decode(payload, count)
    assert torch.equal(codec.decode(payload.to(CUDA), count).cpu(), expected)
    around = torch.full((count + 2,), float("nan"), device=CUDA)
    codec.decode(payload.to(CUDA), count, out=around[1:-1])
    assert torch.equal(around[1:-1].cpu(), expected)
    assert around[[0, -1]].isnan().all(), "nothing beside `out` is written"


@block_codecs
@pytest.mark.parametrize("count", SIZES)
def test_replica_and_residual_follow_as_on_the_cpu(name: str, count: int, way: str) -> None:
    codec = get(name)
    replicas = [some_values(count, 1), some_values(count, 1).to(CUDA)]
    residuals = [torch.zeros(count), torch.zeros(count, device=CUDA)]
    for step in range(3):
        target = some_values(count, 10 + step)
        change = encode_change(codec, target, replicas[0])
        assert torch.equal(encode_change(codec, target.to(CUDA), replicas[1]).cpu(), change)
        gradient = encode_with_feedback(codec, target.clone(), residuals[0])
        assert torch.equal(encode_with_feedback(codec, target.to(CUDA), residuals[1]).cpu(), gradient)
        assert torch.equal(replicas[1].cpu(), replicas[0])
        assert torch.equal(residuals[1].cpu(), residuals[0])


@pytest.mark.parametrize("name", ["int8", "int4", "thin"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38])
@pytest.mark.parametrize("at", [0, 200, 299])
def test_what_is_not_finite_leaves_replica_and_residual_alone(name: str, bad: float, at: int, way: str) -> None:
    codec, values = get(name), some_values(300)
    values[at] = bad
    for coded in (encode_change, encode_with_feedback):
        kept = some_values(300, 2).to(CUDA)
        before = kept.clone()
        if coded is encode_with_feedback:
            kept[at] = before[at] = 0.0
        payload = coded(codec, values.to(CUDA), kept)
        finite = codec.finite(payload, 300)
        assert finite == codec.finite(payload.cpu(), 300)
        assert finite == (bad == 3e38 and codec.finite(codec.encode(values), 300))
        assert torch.equal(kept, before) != finite


@block_codecs
def test_any_bytes_decode_to_the_cpus_bits(name: str, way: str) -> None:
    codec = get(name)
    for seed, count in enumerate((1, 65, 128, 300, 70_001)):
        numbers = torch.Generator().manual_seed(seed)
        payload = torch.randint(0, 256, (codec.nbytes(count),), dtype=torch.uint8, generator=numbers)
        payload[1 : 2 * -(-count // 128) : 2] &= 0xBF  # scales that decode to numbers
        assert torch.equal(codec.decode(payload.to(CUDA), count).cpu(), codec.decode(payload, count))


@pytest.mark.parametrize("name", ["thin", "thin:1.25"])
@pytest.mark.parametrize("count", SIZES)
def test_thin_follows_as_on_the_cpu_but_for_the_last_bit_of_a_scale(name: str, count: int, way: str) -> None:
    codec = get(name)
    replica, residual = torch.zeros(count, device=CUDA), torch.zeros(count, device=CUDA)
    target = some_values(count, 1)
    scales = codec.encode(target)[: 2 * -(-count // 128)].view(torch.int16).int()
    change = encode_change(codec, target.to(CUDA), replica).cpu()
    assert (change[: 2 * -(-count // 128)].view(torch.int16).int() - scales).abs().max() <= 1
    assert torch.equal(replica.cpu(), codec.decode(change, count))
    gradient = encode_with_feedback(codec, target.to(CUDA), residual).cpu()
    assert torch.equal(residual.cpu(), target - codec.decode(gradient, count))


def pieces_of(codec: Codec, counts: list[int], seed: int) -> tuple[Tensor, Tensor]:
    """The payloads one after the other, and what they decode to."""
    payloads = [codec.encode(some_values(count, seed + i)) for i, count in enumerate(counts)]
    return torch.cat(payloads), torch.cat([codec.decode(p, n) for p, n in zip(payloads, counts)])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("counts", [[256], [256, 256, 256], [256, 256, 77], [128, 384, 51], [1 << 16] * 5 + [9]])
def test_sums_of_pieces_are_the_cpus(name: str, counts: list[int], way: str) -> None:
    codec = get(name)
    total = torch.full((sum(counts),), float("nan"), device=CUDA)
    expected = torch.zeros(sum(counts))
    for seed in range(3):
        payload, decoded = pieces_of(codec, counts, 100 * seed)
        add_decoded(codec, payload.to(CUDA), counts, total, first=seed == 0, room=room)
        expected = decoded if seed == 0 else expected + decoded
    assert torch.equal(total.cpu(), expected)

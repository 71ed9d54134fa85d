"""Compressed all-reduce, all ranks in one process: same bits everywhere, and what feedback gives back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from potluck.codec import get
from potluck.codec.cached import PIECE
from potluck.dist.compression import Compressor, Exchange, Residuals, identity_of
from potluck.dist.schedules import split
from potluck.errors import WireError

CODECS = ("none", "fp16", "bf16", "int8", "int4", "topk:0.1")


def all_reduce(
    compressors: list[Compressor], tensors: list[Tensor], name: str = "t", average: bool = True
) -> list[Exchange]:
    """What the hooks do, without a link; in place."""
    world = len(tensors)
    exchanges = [
        c.begin(name, t, rank, world, average=average) for rank, (c, t) in enumerate(zip(compressors, tensors))
    ]
    return exchange_all(exchanges)


def exchange_all(exchanges: list[Exchange]) -> list[Exchange]:
    world = len(exchanges)
    sent = {(r, part): exchanges[r].outgoing(part) for r in range(world) for part in range(world) if part != r}
    for rank, exchange in enumerate(exchanges):
        for source in range(world):
            exchange.add(source, sent.get((source, rank)))
            if source != rank:
                assert sent[source, rank].numel() == exchanges[source].payload_bytes(rank)
    results = [exchange.result() for exchange in exchanges]
    for exchange in exchanges:
        for part, payload in enumerate(results):
            exchange.place(part, payload)
    return exchanges


def ranks_of(world: int, codec: str, **options: bool) -> list[Compressor]:
    return [Compressor(codec, **options) for _ in range(world)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("codec", CODECS)
def test_all_ranks_get_the_same_bits_near_the_average(codec: str, world: int, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    tensors = [torch.randn(1000).to(dtype) for _ in range(world)]
    want = torch.stack([t.float() for t in tensors]).mean(0)
    all_reduce(ranks_of(world, codec), tensors)
    assert all(torch.equal(t, tensors[0]) for t in tensors)
    error = (tensors[0].float() - want).norm() / want.norm()
    assert error < {"none": 0.01, "fp16": 0.01, "bf16": 0.02, "int8": 0.03, "int4": 0.3}.get(codec, 1.0)
    if codec == "none" and dtype == torch.float32:
        torch.testing.assert_close(tensors[0], want)


@pytest.mark.parametrize("codec", ["int8", "int4", "bf16"])
@pytest.mark.parametrize("count", [0, 1, 129, 3000, 3100])
def test_piece_by_piece_gives_the_same_bits_and_keeps_the_same_residuals(codec: str, count: int) -> None:
    torch.manual_seed(4)
    whole, pieces = ranks_of(3, codec), ranks_of(3, codec)
    for _ in range(3):
        tensors = [torch.randn(count) for _ in range(3)]
        copies = [tensor.clone() for tensor in tensors]
        all_reduce(whole, tensors)
        by_rank = [
            c.begin_pieces("t", t, rank, 3, average=True, piece=256)
            for rank, (c, t) in enumerate(zip(pieces, copies))
        ]
        assert {len(exchanges) for exchanges in by_rank} == {max(1, -(-by_longest(count) // 256))}
        for exchanges in zip(*by_rank):
            exchange_all(list(exchanges))
        for found, wanted in zip(copies, tensors):
            assert torch.equal(found, wanted)


def by_longest(count: int) -> int:
    """Elements of the longest of three parts, which begin at whole blocks."""
    return max(stop - start for start, stop in split(count, 3, 128))


@pytest.mark.parametrize("count", [0, 1, 100, 128, 129, 5000])
def test_any_size(count: int) -> None:
    tensors = [torch.full((count,), float(rank)) for rank in range(4)]
    all_reduce(ranks_of(4, "int8"), tensors, average=False)
    for t in tensors:
        torch.testing.assert_close(t, torch.full((count,), 6.0), rtol=0.02, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("codec", ["int4", "topk:0.05"])
def test_what_a_step_loses_comes_later(codec: str, dtype: torch.dtype) -> None:
    """The same gradient again and again: with feedback the results average out to it, without it they do not."""
    torch.manual_seed(2)
    gradients = [torch.randn(2000).to(dtype) for _ in range(3)]
    want = torch.stack([g.float() for g in gradients]).mean(0)

    def off_after(steps: int, feedback: bool) -> float:
        compressors = ranks_of(3, codec, feedback=feedback)
        total = torch.zeros(2000)
        for _ in range(steps):
            tensors = [g.clone() for g in gradients]
            all_reduce(compressors, tensors)
            total += tensors[0].float()
        return float((total / steps - want).norm() / want.norm())

    few, many, without = off_after(5, True), off_after(80, True), off_after(80, False)
    assert many < 0.3 * few
    assert many < 0.25 * without
    assert without > 0.05


def test_the_bytes_are_those_of_the_codec() -> None:
    """2(N-1)/N of the packed tensor for each rank."""
    world, count = 4, 4 * 128 * 10
    exchange = Compressor("int4").begin("t", torch.randn(count), 1, world)
    sent = sum(exchange.payload_bytes(part) for part in range(world) if part != 1)
    sent += (world - 1) * exchange.payload_bytes(1)
    assert sent * world == 2 * (world - 1) * get("int4").nbytes(count)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("codec", ["fp16", "int8", "int4", "topk:0.1"])
def test_what_is_not_finite_shows_and_leaves_no_trace(codec: str, bad: float) -> None:
    compressors = ranks_of(2, codec)
    for poisoned in (True, False):
        torch.manual_seed(3)
        tensors = [torch.randn(600) for _ in range(2)]
        if poisoned:
            tensors[1][77] = bad
        all_reduce(compressors, tensors)
        assert bool(tensors[0].isfinite().all()) is not poisoned
        assert torch.equal(tensors[0].isfinite(), tensors[1].isfinite())


def test_residuals_belong_to_their_tensor_and_are_bounded() -> None:
    kept = Residuals(most=3)
    cpu = torch.device("cpu")
    first = kept.get("a", 4, cpu)
    first.fill_(7)
    assert kept.get("a", 4, cpu) is first
    assert kept.get("b", 4, cpu).sum() == 0
    assert kept.get("a", 5, cpu).sum() == 0, "another size is another tensor"
    for name in "cde":
        kept.get(name, 1, cpu)
    assert len(kept._kept) == 3


def test_identity_is_the_name_or_the_place() -> None:
    a, b = torch.zeros(5), torch.zeros(5)
    assert identity_of(a) == identity_of(a)
    assert identity_of(a) != identity_of(b)
    assert identity_of(a) != identity_of(a[:3])
    assert identity_of(a, "bucket 1") == identity_of(b, "bucket 1")


def test_what_suits() -> None:
    assert Compressor.suits("AVG", torch.bfloat16)
    assert not Compressor.suits("MAX", torch.float32)
    assert not Compressor.suits("SUM", torch.float64)
    assert not Compressor.suits("SUM", torch.int32)


def test_a_payload_of_another_size_is_refused() -> None:
    exchange = Compressor("int8").begin("t", torch.randn(400), 1, 2)
    with pytest.raises(WireError):
        exchange.add(0, torch.zeros(3, dtype=torch.uint8))


def test_the_order_of_ranks_is_kept() -> None:
    exchange = Compressor("int8").begin("t", torch.randn(400), 1, 2)
    with pytest.raises(AssertionError, match="who came first"):
        exchange.add(1)


# -- between two ranks


def pair_all_reduce(compressors: list[Compressor], tensors: list[Tensor], average: bool = False) -> list[int]:
    """What two ranks do, without a link, in place; the bytes of each message."""
    one, two = (c.begin_pair("t", t, average=average) for c, t in zip(compressors, tensors))
    sent = [(one.outgoing(number).clone(), two.outgoing(number).clone()) for number in range(len(one))]
    for number, (mine, theirs) in enumerate(sent):
        assert mine.numel() == theirs.numel() == one.message_bytes(number)
        one.place(number, theirs)
        two.place(number, mine)
    assert sum(mine.numel() for mine, _ in sent) == one.payload_bytes
    return [mine.numel() for mine, _ in sent]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("count", [0, 1, 1000, PIECE, 20 * PIECE + 300])
@pytest.mark.parametrize("codec", CODECS)
def test_two_ranks_get_the_same_bits_near_the_sum(codec: str, count: int, dtype: torch.dtype) -> None:
    torch.manual_seed(5)
    tensors = [torch.randn(count).to(dtype) for _ in range(2)]
    want = tensors[0].float() + tensors[1].float()
    pair_all_reduce(ranks_of(2, codec), tensors)
    assert torch.equal(*tensors)
    error = float((tensors[0].float() - want).norm() / want.norm().clamp(min=1e-9))
    assert error < {"none": 0.01, "fp16": 0.01, "bf16": 0.02, "int8": 0.03, "int4": 0.3}.get(codec, 1.0)


def test_what_a_pair_loses_comes_later() -> None:
    torch.manual_seed(6)
    gradients = [torch.randn(PIECE + 500) for _ in range(2)]
    want = (gradients[0] + gradients[1]) / 2

    def off_after(steps: int, feedback: bool) -> float:
        compressors, total = ranks_of(2, "int4", feedback=feedback), torch.zeros(PIECE + 500)
        for _ in range(steps):
            tensors = [g.clone() for g in gradients]
            pair_all_reduce(compressors, tensors, average=True)
            total += tensors[0]
        return float((total / steps - want).norm() / want.norm())

    assert off_after(40, True) < 0.3 * off_after(2, True)
    assert off_after(40, True) < 0.25 * off_after(40, False)


@pytest.mark.parametrize("count", [1, PIECE, 2 * PIECE + 5, 64 * PIECE, 140 * PIECE + 5])
def test_messages_of_a_pair_are_small_at_both_ends_and_few_between(count: int) -> None:
    """The first is soon on its way, the last soon added; and each costs the time of Python."""
    sizes = pair_all_reduce(ranks_of(2, "int8"), [torch.randn(count) for _ in range(2)])
    piece = get("int8").nbytes(PIECE)
    assert max(sizes[0], sizes[-1]) <= piece
    assert max(sizes) <= 8 * piece
    assert len(sizes) <= 9 + count / (8 * PIECE)


def test_a_message_of_a_pair_of_another_size_is_refused() -> None:
    pair = Compressor("int8").begin_pair("t", torch.randn(3 * PIECE))
    message = pair.outgoing(0)
    with pytest.raises(WireError):
        pair.place(0, message[:-2])

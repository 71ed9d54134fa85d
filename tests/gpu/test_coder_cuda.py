"""The host's coder beside a busy training stream: replicas stay equal, sums whole, nothing is read too early."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from potluck.codec import get
from potluck.device import pick
from potluck.hub import layout as layouts
from potluck.hub.actions import Decode
from potluck.hub.hashes import DIGEST_BYTES
from support.coder_pair import Pair, flat

where = pytest.mark.parametrize("on_host", [True, False], ids=["replica-on-host", "replica-on-device"])


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layouts, "SMALLEST_PIECE", 256)


@pytest.fixture
def busy() -> Iterator[None]:
    """Work on the training stream that takes far longer than coding does."""
    torch.cuda.current_stream().synchronize()
    yield
    torch.cuda.synchronize()


def occupy(milliseconds: int = 20) -> None:
    torch.cuda._sleep(int(milliseconds * 1.7e6))


@where
@pytest.mark.parametrize("codec", ["none", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_guest_holds_the_replicas_bits(codec: str, dtype: torch.dtype, on_host: bool, busy: None) -> None:
    with Pair(codec, dtype, pick("cuda"), replica_on_host=on_host).running() as pair:
        pair.sync()
        assert torch.equal(pair.check_same_bits(), flat(pair.tensors))
        for _ in range(6):
            occupy()  # the update is queued behind this: whoever reads the weights at once reads the old ones
            pair.update()
            pair.sync()
            replica = pair.check_same_bits()
        room = 2.0**-7 if dtype != torch.float32 else 0.0
        assert (replica - flat(pair.tensors)).abs().amax() <= 1e-2 + room


@where
def test_an_update_may_come_at_any_moment_of_coding(on_host: bool, busy: None) -> None:
    with Pair("int4", device=pick("cuda"), replica_on_host=on_host).running() as pair:
        pair.sync()
        for number in range(30):
            pair.coder.code_change()
            if number % 3:
                pair.turn()
            occupy(1)
            pair.update()
        pair.sync()
        pair.check_same_bits()


@where
def test_the_hash_is_the_guests(on_host: bool) -> None:
    with Pair("int4", device=pick("cuda"), replica_on_host=on_host).running() as pair:
        pair.sync()
        pair.update()
        pair.coder.hash_version(1)
        pair.sync()
        pair.until(lambda: 1 in pair.hashed)
        assert len(pair.hashed[1]) == DIGEST_BYTES * pair.pieces


def test_contributions_are_summed_beside_training_and_added_once(busy: None) -> None:
    codec = get("int4")
    with Pair("int4", device=pick("cuda")).running() as pair:
        pair.sync()
        layout = pair.tensors.layout
        for step in range(4):
            expected = torch.zeros(layout.count)
            occupy()
            for parameter in pair.tensors.trained:
                parameter.grad = torch.full_like(parameter, 1.0 + step)
            for guest in range(3):
                numbers = torch.Generator().manual_seed(10 * step + guest)
                values = torch.randn(layout.count, generator=numbers)
                payloads = [codec.encode(values[p.offset : p.offset + p.count]) for p in layout.pieces]
                pieces = {i: bytes(p.numpy().data) for i, p in enumerate(payloads)}
                pair.coder.decode(Decode(guest="guest", lease=1, pieces=pieces, loss_sum=1.0, count=4))
                decoded = [codec.decode(p, piece.count) for p, piece in zip(payloads, layout.pieces)]
                expected = torch.cat(decoded) if guest == 0 else expected + torch.cat(decoded)
            pair.until(lambda: len(pair.decoded) == 3)
            pair.decoded.clear()
            pair.coder.collect()
            assert torch.equal(gradients(pair), expected + (1.0 + step))


def gradients(pair: Pair) -> Tensor:
    return torch.cat([p.grad.reshape(-1).float().cpu() for p in pair.tensors.trained if p.grad is not None])

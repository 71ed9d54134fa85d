"""The torch.distributed backend with CUDA: a CUDA rank and a CPU rank in one group, and two ranks on one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support import dist_devices
from support.ranks import Ranks

DEADLINE_S = 90.0
SMALL_PIECES = {"chunk_bytes": 4096, "small_bytes": 256}
"""So that tensors of a few kilobytes go the ways of large ones."""

pytestmark = pytest.mark.timeout(100)
transports = pytest.mark.parametrize("transport", ["shm", "tcp"])
placements = pytest.mark.parametrize(
    "devices",
    [("cuda:0", "cpu"), ("cpu", "cuda:0"), ("cuda:0", "cuda:0")],
    ids=lambda devices: " and ".join(devices),
)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, fork=False) as pool:
        yield pool


@pytest.mark.parametrize("which", ["reductions", "movements"])
@transports
@placements
def test_every_collective(ranks: Ranks, devices: tuple[str, str], transport: str, which: str) -> None:
    options = {"transport": transport, **SMALL_PIECES}
    failed = ranks.call("support.dist_cases:run_all", 2, which, devices, options, deadline_s=DEADLINE_S)
    assert failed == [[], []]


@transports
@placements
def test_ddp_trains_a_gpt_as_one_process_does(ranks: Ranks, devices: tuple[str, str], transport: str) -> None:
    found = ranks.call("support.dist_devices:ddp", 2, devices, {"transport": transport}, deadline_s=DEADLINE_S)
    (losses, weights, reductions), (other_losses, other_weights, _) = found
    assert losses == other_losses
    assert losses == pytest.approx(dist_devices.alone(2), rel=1e-3)
    assert losses[-1] < 0.9 * losses[0]
    assert reductions > 2 * dist_devices.STEPS, "several buckets a step"
    # The gradients have the same bits on both ranks; what the optimizer makes of them may round otherwise.
    exact = devices[0] == devices[1]
    assert other_weights == (weights if exact else pytest.approx(weights, rel=1e-4, abs=1e-5))


@transports
@placements
def test_what_the_gpu_has_yet_to_compute_is_waited_for(
    ranks: Ranks, devices: tuple[str, str], transport: str
) -> None:
    found: list[Any] = ranks.call(
        "support.dist_devices:queued", 2, devices, {"transport": transport}, deadline_s=DEADLINE_S
    )
    assert found == [[6.0] * 4] * 2

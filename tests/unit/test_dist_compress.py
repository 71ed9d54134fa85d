"""What `compress` refuses before it touches the model, and what it says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from potluck.dist.hooks import compress
from potluck.errors import ConfigError


@pytest.fixture
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DistributedDataParallel]:
    store = tmp_path_factory.mktemp("store") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield DistributedDataParallel(nn.Linear(300, 4))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    "how", ["none", "int3", "topk:7", "", "int4:2", "powersgd:0", "powersgd:many", "powersgd:"]
)
def test_what_compresses_nothing_is_refused(model: DistributedDataParallel, how: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compress(model, how)
    assert caught.value.hint


def test_powersgd_needs_steps_before(model: DistributedDataParallel) -> None:
    with pytest.raises(ConfigError, match="start_step=1"):
        compress(model, "powersgd", start_step=1)


def test_a_plain_module_is_refused() -> None:
    with pytest.raises(ConfigError, match="not a Linear"):
        compress(nn.Linear(2, 2), "int8")  # type: ignore[arg-type]


def test_alone_the_gradients_stay_as_good_as_the_codec(model: DistributedDataParallel) -> None:
    state = compress(model, "int8")
    assert state is not None
    inputs = torch.randn(8, 300, generator=torch.Generator().manual_seed(1))
    model(inputs).square().sum().backward()
    weight = model.module.weight
    (want,) = torch.autograd.grad(model.module(inputs).square().sum(), [weight])
    assert weight.grad is not None
    assert (weight.grad - want).norm() < 0.02 * want.norm()
    assert state.sent_bytes == 0
    state.close()


def test_an_error_in_the_thread_comes_out_of_backward(
    model: DistributedDataParallel, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = compress(model, "int8")
    assert state is not None

    def broken(*_: object, **__: object) -> None:
        raise ValueError("the codec broke")

    monkeypatch.setattr(state.compressor, "begin", broken)
    with pytest.raises(RuntimeError, match="the codec broke"):
        model(torch.ones(2, 300)).sum().backward()
    state.close()

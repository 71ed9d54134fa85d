"""The update on a GPU: a gradient that is not finite changes nothing, and nobody waits to learn of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from potluck.train.beginning import Buffers
from potluck.train.options import Options
from potluck.train.update import Update, prepare_gradients


def computed(model: nn.Module, value: float) -> torch.Tensor:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    options = Options(global_batch=4, clip_norm=1.0)
    return prepare_gradients(1, list(model.parameters()), options, model, 4).isfinite()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_a_fused_update_is_left_out_without_waiting(kind: Any) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).cuda()
    optimizer = kind(
        model.parameters(), lr=0.1, fused=True, **({"momentum": 0.9} if kind is torch.optim.SGD else {})
    )
    update = Update(optimizer, queues=True)
    update.make(computed(model, 1.0), Buffers(model))
    before = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    buffers = Buffers(model)
    model[1].running_mean.fill_(float("nan"))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update.make(computed(model, float("inf")), buffers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[0][name]), name
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            assert torch.equal(value, before[1][index][key]) if isinstance(value, torch.Tensor) else True, key
    update.make(computed(model, 1.0), Buffers(model))
    assert not torch.equal(model[0].weight, before[0]["0.weight"])


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD])
def test_an_optimizer_whose_form_was_left_to_torch_is_fused(kind: Any) -> None:
    model, same = nn.Linear(8, 8).cuda(), nn.Linear(8, 8).cuda()
    same.load_state_dict(model.state_dict())
    optimizer, plain = kind(model.parameters(), lr=0.1), kind(same.parameters(), lr=0.1)
    update = Update(optimizer, queues=True)
    for number in range(3):
        finite = computed(model, 1.0)
        assert update._can_be_told() is (kind is torch.optim.SGD or number > 0)  # not before their first update
        computed(same, 1.0)
        update.make(finite, Buffers(model))
        plain.step()
    assert all(group["fused"] for group in optimizer.param_groups)
    torch.testing.assert_close(model.weight, same.weight)
    # A run that goes on: what the plain one has kept is taken over.
    Update(plain, queues=True).make(computed(same, 1.0), Buffers(same))
    update.make(computed(model, 1.0), Buffers(model))
    torch.testing.assert_close(model.weight, same.weight)


@pytest.mark.parametrize("said", [{"foreach": True}, {"foreach": False}, {"fused": False}])
def test_a_form_that_the_user_chose_stays(said: dict[str, bool]) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(8, 8).cuda().parameters(), lr=0.1, **said)
    Update(optimizer, queues=True)
    assert {k: optimizer.param_groups[0][k] for k in said} == said
    assert not optimizer.param_groups[0]["fused"]


def test_any_other_update_is_left_out_too() -> None:
    model = nn.Linear(8, 8).cuda()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1, momentum=0.9)
    update = Update(optimizer, queues=True)
    update.make(computed(model, 1.0), Buffers(model))
    before = model.weight.detach().clone()
    update.make(computed(model, float("nan")), Buffers(model))
    assert torch.equal(model.weight, before)

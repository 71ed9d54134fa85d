"""The modes that recipes compute in."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from potluck.train.recipes.modes import evaluating


def test_evaluation_leaves_every_part_in_its_own_mode() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout())
    model[1].eval()  # frozen by whoever fine-tunes
    with evaluating(model):
        assert not any(part.training for part in model.modules())
        assert not model(torch.rand(3, 2)).requires_grad
    assert [part.training for part in model] == [True, False, True]
    assert model.training


def test_an_error_in_between_changes_nothing() -> None:
    model = nn.Sequential(nn.Dropout())
    with pytest.raises(ValueError), evaluating(model):
        raise ValueError
    assert all(part.training for part in model.modules())
    assert torch.is_grad_enabled()

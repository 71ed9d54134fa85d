"""What a step that does not count has changed in the model is put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.train.beginning import BufferPlaces, Buffers


class Lazy(nn.Module):
    """Registers its buffer in the first forward, as some normalisations do."""

    def forward(self, x: Tensor) -> Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", torch.zeros(1))
        self.mean = 0.5 * self.mean + x.mean()
        return x


def test_a_buffer_that_came_after_the_loop_began_is_put_back() -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), Lazy())
    places = BufferPlaces(model)
    model(torch.ones(4, 3))
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert "1.mean" in kept
    before = Buffers(places)
    for buffer in model.buffers():
        buffer.fill_(torch.nan if buffer.is_floating_point() else 7)
    before.put_back()
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, kept[name]), name

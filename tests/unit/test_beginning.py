"""What a step that does not count has changed in the model is put back."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from potluck.train.beginning import BufferPlaces, Buffers
from potluck.train.changed_buffers import ChangedBuffers


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


class Codebook(nn.Module):
    """Changes one buffer in place and replaces the other, as VQ-VAEs do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("embed", torch.ones(2))
        self.register_buffer("size", torch.ones(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.embed.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        self.size = 0.9 * self.size
        self.seen += 1
        return x + self.embed.sum()


def changed(model: nn.Module, x: Tensor) -> tuple[str, tuple[str, ...]] | None:
    told: list[tuple[str, tuple[str, ...]]] = []
    changes = ChangedBuffers(model, lambda *found: told.append(found))
    changes.before(1)
    model(x).sum().backward()
    changes.after()
    return told[0] if told else None


def test_buffers_that_a_forward_changes_are_found_but_not_those_of_norms_nor_counters() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Codebook())
    assert changed(model, torch.ones(4, 3)) == ("Codebook", ("2.embed", "2.size"))
    assert changed(Codebook(), torch.ones(4, 3, requires_grad=True)) == ("Codebook", ("embed", "size"))
    compiled = torch.compile(nn.Sequential(nn.Linear(3, 3), Codebook()), backend="aot_eager")
    assert changed(compiled, torch.ones(4, 3)) == ("Codebook", ("_orig_mod.1.embed", "_orig_mod.1.size"))


class Table(nn.Module):
    """Replaces its table by a larger one for a longer batch, as rotary embeddings do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(0))
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        self.table = torch.ones(max(len(x), len(self.table)))
        return x * self.weight


def test_spectral_norm_and_tables_that_grow_are_left_out() -> None:
    spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 3))
    vector = spectral.parametrizations.weight[0]._u
    before = vector._version
    assert changed(nn.Sequential(spectral, Lazy()), torch.ones(4, 3)) is None
    assert changed(nn.utils.spectral_norm(nn.Linear(3, 3)), torch.ones(4, 3)) is None
    assert vector._version > before
    with torch.inference_mode():
        made = torch.ones(3)
    model = Table()
    model.register_buffer("made", made)
    assert changed(model, torch.ones(4, 3)) is None


def test_it_looks_seldom() -> None:
    looked, step, model = [], 0, Codebook()
    changes = ChangedBuffers(model, lambda *found: looked.append(step))
    for step in range(1, 41):
        for _ in range(3):
            changes.before(step - 1)
            model(torch.ones(1))
            changes.after()
    assert looked == [2, 4, 8, 16, 32]

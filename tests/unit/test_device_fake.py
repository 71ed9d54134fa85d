"""That the fake device is a device: apart from the CPU like an accelerator, and with the CPU's results."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from potluck.device import pick
from potluck.spec.config import RunConfig
from potluck.spec.events import StepNotApplied
from potluck.train.context import ALONE, RunContext
from potluck.train.event_log import EventLog
from potluck.train.run import Run
from potluck.train.step import Step, StepRules
from support import fake_device

fake_device.install()
FAKE = torch.device("fake", 0)


def test_pick_knows_it() -> None:
    device = pick("fake", threads=1)
    assert (device.kind, device.torch_device) == ("fake", FAKE)


def test_numpy_refuses_its_tensors() -> None:
    there = torch.ones(3, device=FAKE)
    for read in (Tensor.numpy, np.asarray, np.from_dlpack):
        with pytest.raises((TypeError, RuntimeError, BufferError)):
            read(there)


@pytest.mark.parametrize(
    "mix",
    [
        lambda here, there: here + there,
        lambda here, there: there + here,
        lambda here, there: here.add_(there),
        lambda here, there: there.mul_(here),
        lambda here, there: torch.cat([here, there]),
        lambda here, there: there @ here,
        lambda here, there: F.linear(there, here[None]),
        lambda here, there: torch.add(here, here, out=there),
        lambda here, there: torch._foreach_add_([here], [there]),
        lambda here, there: here[there.long()],
        lambda here, there: torch.where(there > 0, here, here),
    ],
)
def test_mixing_with_the_cpu_raises(mix: Callable[[Tensor, Tensor], object]) -> None:
    with pytest.raises(RuntimeError):
        mix(torch.ones(3), torch.ones(3, device=FAKE))


def test_copies_cross() -> None:
    here = torch.randn(4, 6)
    there = here.to(FAKE)
    assert there.device == FAKE
    assert torch.equal(there.cpu(), here)
    assert torch.equal(torch.empty(6, 4).copy_(there.t()), here.t())
    there.view(-1)[3:9].copy_(torch.arange(6.0))
    assert torch.equal(there.cpu().view(-1)[3:9], torch.arange(6.0))


def test_views_share_memory_and_copies_do_not() -> None:
    base = torch.zeros(12, device=FAKE)
    view, other = base.view(3, 4)[1], base.clone()
    view.add_(1)
    assert base.tolist() == [0.0] * 4 + [1.0] * 4 + [0.0] * 4
    assert other.sum().item() == 0
    del base
    assert view.tolist() == [1.0] * 4  # the view keeps the memory


def test_factories() -> None:
    assert torch.zeros(2, 3, device=FAKE).cpu().equal(torch.zeros(2, 3))
    assert torch.empty(5, dtype=torch.uint8, device=FAKE).device == FAKE
    assert torch.arange(5, device=FAKE).tolist() == [0, 1, 2, 3, 4]
    assert torch.tensor([1.5, 2.5], device=FAKE).tolist() == [1.5, 2.5]
    assert torch.full_like(torch.empty(2, device=FAKE), 7).tolist() == [7.0, 7.0]


def packed(values: Tensor) -> Tensor:
    """What a codec does: scale by blocks, round, two values a byte, scales and bytes in one buffer."""
    blocks = values.view(-1, 32)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp_(min=1e-30) / 7
    rounded = torch.div(blocks, scales).round_().clamp_(-7, 7).to(torch.int8).view(-1).view(torch.uint8)
    nibbles = (rounded[0::2] & 15) | torch.bitwise_left_shift(rounded[1::2], 4)
    back = torch.stack([nibbles & 15, nibbles >> 4], dim=1).view(-1).view(torch.int8)
    back = (back << 4) >> 4
    decoded = (back.view(-1, 32) * scales).view(-1)
    top = values.abs().topk(5).indices.to(torch.int32)
    parts = [scales.view(-1).half(), nibbles, decoded, decoded.bfloat16(), top]
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def test_codec_operations_give_the_cpus_bytes() -> None:
    values = torch.randn(4096)
    assert torch.equal(packed(values.to(FAKE)).cpu(), packed(values))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class TinyGPT(nn.Module):
    def __init__(self, vocabulary: int = 32, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def gpt_losses(where: torch.device, steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = TinyGPT().to(where)
    assert model.head.weight is model.tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.randint(0, 32, (4, 16)).to(where)
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_gpt_trains_with_the_losses_of_the_cpu() -> None:
    losses = gpt_losses(FAKE)
    assert losses == pytest.approx(gpt_losses(torch.device("cpu")), rel=1e-5)
    assert losses[-1] < losses[0] * 0.7


def test_a_cnn_has_the_gradients_of_the_cpu() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)
    )
    other = copy.deepcopy(model).to(FAKE)
    images = torch.randn(3, 1, 8, 8)
    model(images).square().mean().backward()
    other(images.to(FAKE)).square().mean().backward()
    for mine, theirs in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(theirs.grad.cpu(), mine.grad)


def test_gradient_hooks_run_beside_the_main_thread() -> None:
    parameter = nn.Parameter(torch.ones(3, device=FAKE))
    seen: list[tuple[torch.device, bool]] = []
    parameter.register_post_accumulate_grad_hook(
        lambda p: seen.append((p.grad.device, threading.current_thread() is threading.main_thread()))
    )
    (parameter * 2).sum().backward()
    assert seen == [(FAKE, False)]


def test_changes_can_be_added_to_views_of_parameters() -> None:
    parameter = nn.Parameter(torch.zeros(4, 3, device=FAKE))
    with torch.no_grad():
        parameter.view(-1)[2:7].add_(torch.ones(5, device=FAKE), alpha=0.5)
    assert parameter.detach().cpu().view(-1).tolist() == [0.0] * 2 + [0.5] * 5 + [0.0] * 5


def test_models_can_be_copied_and_their_states_loaded() -> None:
    model = TinyGPT().to(FAKE)
    other = copy.deepcopy(model)
    assert other.head.weight is other.tokens.weight
    with torch.no_grad():
        model.norm.weight.add_(1)
    assert other.norm.weight.sum().item() == 16
    other.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    assert other.norm.weight.sum().item() == 32


def test_counts_that_lie_on_the_device_weigh_and_divide_there() -> None:
    """`items=` as a tensor: of two steps the first has 28 items, the second none and is not applied."""
    seen: list[Any] = []
    device = pick("fake", threads=1)
    log = EventLog(None, seen.append)
    config = RunConfig(checkpoint_every=0, micro_batch=3)
    run = Run(RunContext(role=ALONE, config=config, device=device, name="here", log=log))
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    model.to(FAKE)
    points = [torch.tensor([float(i)]) for i in range(8)]
    losses = []
    for step in run.steps(model, torch.optim.SGD(model.parameters(), lr=0.01), points, global_batch=8, steps=2):
        for x in step:
            items = x.sum() * (step.index == 0)
            loss = (x * model(x).square()).sum() / x.sum()
            step.backward(loss, items=items)
            assert isinstance(step.items_so_far(), Tensor)
        losses.append(step.loss)
    assert losses[0] == pytest.approx(sum(i**3 for i in range(8)) / 28)
    assert math.isnan(losses[1] or 0.0)
    assert model.weight.item() == pytest.approx(1 - 0.01 * sum(2 * i**3 for i in range(8)) / 28)
    (event,) = [e for e in seen if isinstance(e, StepNotApplied)]
    assert "items=0 for every batch" in event.reason


def test_a_mean_over_nothing_leaves_no_trace_there() -> None:
    """Without labels cross_entropy is NaN. Its count is not read, and still its gradient is none."""
    weights = nn.Parameter(torch.ones(4, 3).to(FAKE))

    def one_batch(step: Step) -> Iterator[int]:
        step.hand_out(4)
        yield 0

    rules = StepRules(batches=one_batch, after_backward=lambda samples: None, loss_is="mean", trained=[weights])
    step = Step(0, rules)
    for _ in step:
        labels = torch.full((4,), -100).to(FAKE)
        step.backward(F.cross_entropy(weights, labels), items=(labels != -100).sum())
    assert weights.grad is not None
    assert weights.grad.to("cpu").tolist() == torch.zeros(4, 3).tolist()
    assert (step.loss_sum(), step.items()) == (0.0, 0.0)

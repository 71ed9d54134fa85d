"""Fine-tuning with adapters (LoRA): the base model stays frozen, so only kilobytes are sent in a step.

    python examples/lora.py [STEPS]            alone
    potluck host examples/lora.py -- [STEPS]   then `potluck join TOKEN` elsewhere; `potluck report` shows the bytes

The base has three million parameters. Frozen parameters are sent to a guest at most once. They are not sent if the
guest builds the same values itself (here from a seed, usually from its own copy of a pretrained model); hashes
confirm it. Each step sends only the gradients and the changes of the adapters, some twenty thousand parameters.

Nothing is downloaded, so the task is artificial: compute what the base would compute if a change of low rank were
added to its weights. Adapters can learn exactly that.
"""

import sys
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import potluck

INPUTS, WIDTH, LAYERS, RANK = 32, 1024, 3, 2
BASE_SEED = 1


class Adapted(nn.Module):
    """A frozen linear layer plus a trained change of low rank, which starts at zero."""

    def __init__(self, frozen: nn.Linear) -> None:
        super().__init__()
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.frozen(x) + self.up(self.down(x))
        return changed


def build_base() -> nn.Sequential:
    """A stand-in for a pretrained model."""
    torch.manual_seed(BASE_SEED)
    sizes = [INPUTS, *[WIDTH] * (LAYERS + 1)]
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, INPUTS))


def adapt(base: nn.Sequential) -> nn.Sequential:
    """Add an adapter to each of the base's large layers and freeze everything else."""
    base.requires_grad_(False)
    for index, layer in enumerate(base):
        if isinstance(layer, nn.Linear) and layer.in_features == layer.out_features == WIDTH:
            base[index] = Adapted(layer)
    return base


def make_task(samples: int = 2048) -> TensorDataset:
    """Inputs, and the base's outputs for them after a change of rank 1 in each large layer."""
    base = build_base()
    random = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples, INPUTS, generator=random)
    with torch.no_grad():
        for layer in base:
            if isinstance(layer, nn.Linear) and layer.in_features == layer.out_features:
                change = torch.randn(WIDTH, 1, generator=random) @ torch.randn(1, WIDTH, generator=random)
                layer.weight += 1.5 * change / WIDTH
        return TensorDataset(inputs, base(inputs))


run = potluck.start()
model = adapt(build_base()).to(run.device)
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.AdamW(trained, lr=3e-3, weight_decay=0.0)
steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
first = last = 0.0

for step in run.steps(model, optimizer, make_task, global_batch=32, steps=steps):
    for inputs, targets in step:
        step.backward(F.mse_loss(model(inputs), targets))
    if step.index == 0:
        first = step.loss or 0.0
    last = step.loss or 0.0

count, whole = (sum(p.numel() for p in parameters) for parameters in (trained, model.parameters()))
print(f"loss {first:.2e} at first, {last:.2e} at last; trained {count:,} of {whole:,} parameters")
print(f"a gradient: {count / 2 / 1e3:.0f} kB with int4; all parameters in fp32 would be {4 * whole / 1e6:.1f} MB")

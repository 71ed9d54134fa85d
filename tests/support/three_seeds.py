"""Three small GPTs with three seeds, trained side by side as one model: three runs of a codec for the price of one.

Their parameters share nothing and each is clipped by itself, so each learns as it would alone. It must not know
how it was started; the host writes each one's loss on held-out text.
"""

from __future__ import annotations

import argparse
import inspect
import json
import typing
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import potluck
from potluck.train.recipes.gpt import GPT

SEQUENCE, BATCH = 32, 16


class Windows:
    """Pieces of the sources of a module, as bytes."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.text) - 1) // SEQUENCE

    def __getitem__(self, index: int) -> Tensor:
        return self.text[index * SEQUENCE : (index + 1) * SEQUENCE + 1].long()


def build() -> nn.ModuleList:
    models = []
    for seed in range(3):
        torch.manual_seed(seed)
        models.append(GPT(depth=1, width=64, heads=1, sequence=SEQUENCE))
    return nn.ModuleList(models)


def losses(models: nn.ModuleList, batch: Tensor) -> list[Tensor]:
    return [F.cross_entropy(m(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()) for m in models]


def clip_each(models: nn.Module) -> None:
    for model in models.children():
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    run = potluck.start()
    text = inspect.getsource(argparse).encode() + inspect.getsource(typing).encode()
    held_out = len(text) // 10
    models = build().to(run.device)
    optimizer = torch.optim.AdamW(models.parameters(), lr=5e-3, betas=(0.9, 0.95))
    steps = run.steps(
        models,
        optimizer,
        lambda: Windows(text[held_out:]),
        global_batch=BATCH,
        steps=options.steps,
        before_update=clip_each,
    )
    for step in steps:
        for batch in step:
            step.backward(torch.stack(losses(models, batch)).sum())
    rest = Windows(text[:held_out])
    with torch.no_grad():
        found = losses(models, torch.stack([rest[i] for i in range(len(rest))]))
    options.out.write_text(json.dumps([loss.item() for loss in found]))


if __name__ == "__main__":
    main()

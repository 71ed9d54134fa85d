"""Is a GPU host alone as fast as the user's own loop? Plain torch and Potluck take turns in one process.

    python bench/gpu/alone.py [--only gpt,images] [--rounds 6] [--steps 2]

`gpt`: GPT-2 124M (bf16, compiled), a million tokens a step in micro-batches of 64 sequences, from memory. `images`:
a small CNN on uint8 images of 3 × 224 × 224 with a DataLoader of 8 workers and pinned memory. A GPU at its limit of
power is slower when it is warm: so the two loops alternate, each round gives one ratio (plain seconds ÷ Potluck's),
and the median of the rounds is what the docs may quote. Above 1 Potluck was faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator

import torch
from _runs import SEQUENCE, say
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import potluck
from potluck.train.recipes.gpt import GptConfig, GptRecipe

WARM_UP = 3
GPT_BATCH, GPT_MICRO_BATCH = 1024, 64
IMAGE_BATCH, IMAGES, CLASSES = 256, 50_000, 100


def gpt_loops() -> tuple[Iterator[None], Iterator[None]]:
    recipe, device = GptRecipe(), torch.device("cuda")
    config = GptConfig(depth=12, sequence=SEQUENCE, batch_tokens=SEQUENCE * GPT_BATCH)
    data = recipe.dataset(config)

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = recipe.model(config).to(device)
        recipe.compile(model, config, device, guest=False)
        return model, recipe.optimizer(model, config)

    def plain() -> Iterator[None]:
        model, optimizer = build()
        step = 0
        while True:
            optimizer.zero_grad()
            total = torch.zeros((), device=device)
            for first in range(0, GPT_BATCH, GPT_MICRO_BATCH):
                numbers = [(step * GPT_BATCH + first + i) % len(data) for i in range(GPT_MICRO_BATCH)]
                batch = torch.stack(data.__getitems__(numbers)).pin_memory().to(device, non_blocking=True)
                loss = recipe.loss(model, batch, config)
                (loss * (GPT_MICRO_BATCH / GPT_BATCH)).backward()
                total += loss.detach()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            float(total)
            step += 1
            yield

    def ours() -> Iterator[None]:
        run = potluck.start()
        model, optimizer = build()
        steps = run.steps(
            model, optimizer, data, global_batch=GPT_BATCH, micro_batch=GPT_MICRO_BATCH, clip_norm=1.0
        )
        for step in steps:
            for batch in step:
                step.backward(recipe.loss(model, batch, config))
            yield

    return plain(), ours()


class Images(Dataset[tuple[Tensor, int]]):
    """Images with a little work for each, as decoding and augmentation have."""

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = torch.full((3, 224, 224), index % 256, dtype=torch.uint8)
        return image.flip(-1) if index % 2 else image, index % CLASSES


def image_loops() -> tuple[Iterator[None], Iterator[None]]:
    device = torch.device("cuda")

    def build() -> tuple[nn.Module, torch.optim.Optimizer]:
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, CLASSES)).to(device)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def loader() -> DataLoader[tuple[Tensor, int]]:
        return DataLoader(
            Images(), IMAGE_BATCH, shuffle=True, num_workers=8, pin_memory=True, persistent_workers=True
        )

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return F.cross_entropy(model(x.float().div_(255.0)), y)

    def plain() -> Iterator[None]:
        model, optimizer = build()
        data = loader()
        while True:
            for x, y in data:
                loss = loss_of(model, x.to(device, non_blocking=True), y.to(device, non_blocking=True))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                float(loss.detach())
                yield

    def ours() -> Iterator[None]:
        run = potluck.start()
        model, optimizer = build()
        for step in run.steps(model, optimizer, loader(), micro_batch=IMAGE_BATCH):
            for x, y in step:
                step.backward(loss_of(model, x, y))
            yield

    return plain(), ours()


def ratio(plain: Iterator[None], ours: Iterator[None], rounds: int, steps: int) -> float:
    """The median of the rounds: plain seconds ÷ Potluck's."""
    for loop in (plain, ours):
        for _ in range(WARM_UP):
            next(loop)
    found = []
    for _ in range(rounds):
        seconds = []
        for loop in (plain, ours):
            next(loop)
            torch.cuda.synchronize()
            began = time.monotonic()
            for _ in range(steps):
                next(loop)
            torch.cuda.synchronize()
            seconds.append(time.monotonic() - began)
        found.append(seconds[0] / seconds[1])
        say(f"  plain {seconds[0] / steps:.4f} s a step, Potluck {seconds[1] / steps:.4f}: {found[-1]:.4f}")
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="A GPU host alone against the user's own loop.")
    parser.add_argument("--only", default="gpt,images")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=2, help="of GPT-2 in a round; of images, 30 times as many")
    options = parser.parse_args()
    for name in options.only.split(","):
        say(name)
        loops = {"gpt": gpt_loops, "images": image_loops}[name]()
        steps = options.steps * (30 if name == "images" else 1)
        print(f"{name}: {ratio(*loops, options.rounds, steps):.4f} of the plain loop's speed", flush=True)


if __name__ == "__main__":
    main()

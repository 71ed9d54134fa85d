"""What it costs a GPU host to look at every gradient before its update: a step of the loop with and without.

    python bench/gpu/finite.py [--micro-batch 16] [--micro-batches 4] [--rounds 8] [--steps 10] [--no-clip]

GPT-2 124M (bf16, compiled) in a plain loop that is ahead of the GPU by one micro-batch, as a host is. The four
ways to make the update take turns, so that a GPU that grows warm slows all of them: AdamW in one pass
(`fused=True`, as the recipe has it) and as torch makes it by default (foreach), each without a look and with the
host's own `Update`. The fused one is told on the device; the other waits until its norm has been read. First it
is shown that the fused one's update makes no call that waits for the GPU. The last two lines are the ratios that
the docs may quote.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _runs import SEQUENCE, say

from potluck.device.cuda import CudaDevice
from potluck.train.beginning import Buffers
from potluck.train.flight import Flight
from potluck.train.options import Options
from potluck.train.recipes.gpt import GptConfig, GptRecipe
from potluck.train.update import Update, prepare_gradients

WAYS = ("fused, plain", "fused, checked", "foreach, plain", "foreach, checked")


class Loop:
    """One model, and two optimizers over it that take turns."""

    def __init__(self, micro_batch: int, micro_batches: int, clip_norm: float | None) -> None:
        self.device = CudaDevice(0)
        self.recipe = GptRecipe()
        self.size, self.micro_batches = micro_batch, micro_batches
        batch = micro_batch * micro_batches
        self.config = GptConfig(depth=12, sequence=SEQUENCE, batch_tokens=SEQUENCE * batch)
        self.model = self.recipe.model(self.config).to(self.device.torch_device)
        self.recipe.compile(self.model, self.config, self.device.torch_device, guest=False)
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.options = Options(global_batch=batch, clip_norm=clip_norm)
        self.optimizers = {
            "fused": torch.optim.AdamW(self.trained, lr=1e-5, fused=True),
            "foreach": torch.optim.AdamW(self.trained, lr=1e-5, foreach=True),
        }
        self.updates = {name: Update(made, queues=True) for name, made in self.optimizers.items()}
        data = self.recipe.dataset(self.config)
        samples = data.__getitems__([i % len(data) for i in range(micro_batch)])
        self.batch = torch.stack(samples).pin_memory()
        self.flight = Flight(self.device, lambda count, seconds: None)

    def step(self, way: str) -> None:
        kind, _, how = way.partition(", ")
        buffers = Buffers(self.model)
        for parameter in self.trained:
            parameter.grad = None
        total = torch.zeros((), device=self.device.torch_device)
        for _ in range(self.micro_batches):
            began = time.monotonic()
            batch = self.batch.to(self.device.torch_device, non_blocking=True)
            loss = self.recipe.loss(self.model, batch, self.config)
            (loss * self.size).backward()
            total += loss.detach() * self.size
            self.flight.launched(self.size, began)
        computed = time.monotonic()
        (self.plain if how == "plain" else self.checked)(kind, buffers)
        self.device.to_host_later(total)
        self.flight.follows(computed, lambda now, seconds: None)

    def plain(self, kind: str, buffers: Buffers) -> None:
        """As the loop was before it looked."""
        gradients = [p.grad for p in self.trained if p.grad is not None]
        torch._foreach_mul_(gradients, 1.0 / self.options.global_batch)
        if self.options.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.trained, self.options.clip_norm)
        self.optimizers[kind].step()

    def checked(self, kind: str, buffers: Buffers) -> None:
        norm = prepare_gradients(0, self.trained, self.options, self.model, self.options.usual_batch)
        finite = norm.isfinite()
        self.updates[kind].make(finite, buffers)
        self.device.to_host_later(torch.stack([norm.float(), finite.float()]))


def timed(loop: Loop, way: str, steps: int) -> float:
    """Milliseconds a step, over so many of them."""
    loop.step(way)
    loop.flight.finish()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loop.step(way)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps * 1000


def waits_for_nothing(loop: Loop) -> None:
    """torch raises where a call would wait for the GPU."""

    def guarded(update: Callable[[str, Buffers], None]) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            update("fused", Buffers(loop.model))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    for value in (1.0, float("nan")):
        for parameter in loop.trained:
            parameter.grad = torch.full_like(parameter, value)
        before = loop.trained[0].detach().clone()
        torch.cuda.synchronize()
        guarded(loop.checked)
        changed = not torch.equal(before, loop.trained[0])
        assert changed == (value == 1.0), "an update that is not finite was made, or one that is was not"
    say("the fused update, checked: no call waits for the GPU; one that is not finite changes nothing")


def main() -> None:
    parser = argparse.ArgumentParser(description="What it costs to look at every gradient.")
    parser.add_argument("--micro-batch", type=int, default=16)
    parser.add_argument("--micro-batches", type=int, default=4, help="a step; the fewer, the more an update counts")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=10, help="of each way in a round")
    parser.add_argument("--no-clip", action="store_true", help="then the norm is computed for this alone")
    options = parser.parse_args()
    loop = Loop(options.micro_batch, options.micro_batches, None if options.no_clip else 1.0)
    for way in WAYS:
        timed(loop, way, 2)
    waits_for_nothing(loop)
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(options.rounds):
        for way in WAYS if number % 2 else reversed(WAYS):
            found[way].append(timed(loop, way, options.steps))
    say(f"| way | ms a step, median of {options.rounds} | least | most |\n|---|---|---|---|")
    for way, times in found.items():
        say(f"| {way} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |")
    for kind in ("fused", "foreach"):
        ratios = [c / p for c, p in zip(found[f"{kind}, checked"], found[f"{kind}, plain"])]
        say(f"{kind}: checked ÷ plain {statistics.median(ratios):.4f} ({min(ratios):.4f} to {max(ratios):.4f})")


if __name__ == "__main__":
    main()

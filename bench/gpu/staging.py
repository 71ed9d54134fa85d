"""Is coding and staging hidden? Steps of GPT-2 124M with and without one change and one contribution beside each.

    python bench/gpu/staging.py [--steps 8] [--replica host]

No network: the coder's thread does what it does in a run, and its answers are thrown away. Prints both step times
and the GPU memory that the coder keeps, in bytes a parameter.
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import Tensor

from potluck.codec import get
from potluck.device import pick
from potluck.hub.host_coder import Failed, HostCoder
from potluck.hub.inputs import ContributionDecoded, PieceCoded
from potluck.hub.model_tensors import ModelTensors, raw_bytes
from potluck.train.flight import Flight
from potluck.train.recipes.gpt import GptConfig, GptRecipe

MICRO_BATCH, STEP_SAMPLES = 32, 512


class Training:
    """A training loop with Potluck's coder beside it and nothing else of Potluck."""

    def __init__(self, *, replica_on_host: bool) -> None:
        self.device = pick("cuda")
        self._config = GptConfig(depth=12, sequence=1024, batch_tokens=STEP_SAMPLES * 1024)
        self._recipe = GptRecipe()
        self.model = self._recipe.model(self._config).to(self.device.torch_device)
        self._recipe.compile(self.model, self._config, self.device.torch_device, guest=False)
        self._optimizer = self._recipe.optimizer(self.model, self._config)
        self.tensors = ModelTensors(self.model)
        self._batch = torch.randint(0, 256, (MICRO_BATCH, 1025), dtype=torch.uint8)
        self.coder = HostCoder(
            self.tensors,
            down="int4",
            up="int4",
            device=self.device,
            notify=lambda: None,
            replica_on_host=replica_on_host,
        )
        self._flight = Flight(self.device, lambda samples, seconds: None)

    def step(self, contribution: dict[int, memoryview] | None) -> float:
        """Seconds of one step; with a contribution, a change is coded and it is decoded meanwhile."""
        began = time.monotonic()
        for parameter in self.tensors.trained:
            parameter.grad = None
        for number in range(STEP_SAMPLES // MICRO_BATCH):
            if number == 0 and contribution is not None:
                self.coder.code_change()
                self.coder.decode("guest", 1, contribution, 1.0, 4)
            batch = self.device.from_host(self._batch)
            loss: Tensor = self._recipe.loss(self.model, batch, self._config)
            (loss * MICRO_BATCH).backward()
            self._flight.launched(MICRO_BATCH, time.monotonic())
        self._flight.finish()
        if contribution is not None:
            self._answers()
            self.coder.collect()
        torch._foreach_mul_([p.grad for p in self.tensors.trained if p.grad is not None], 1 / STEP_SAMPLES)
        with self.coder.updating():
            self._optimizer.step()
        float(loss.detach())
        return time.monotonic() - began

    def _answers(self) -> None:
        """All pieces must have been coded and the contribution decoded by now; what is late shows in the time."""
        wanted = {PieceCoded: len(self.tensors.layout.pieces), ContributionDecoded: 1}
        while any(wanted.values()):
            if not self.coder.results:
                time.sleep(0.0005)
                continue
            result = self.coder.results.popleft()
            if isinstance(result, Failed):
                raise result.error
            wanted[type(result)] -= 1  # type: ignore[index]


def measure(steps: int, replica: str) -> list[str]:
    training = Training(replica_on_host=replica == "host")
    training.coder.start()
    layout, codec = training.tensors.layout, get("int4")
    pieces = {p.index: raw_bytes(codec.encode(torch.randn(p.count) * 1e-9)) for p in layout.pieces}
    for _ in range(3):
        training.step(None)
    torch.cuda.reset_peak_memory_stats()
    plain = [training.step(None) for _ in range(steps // 2)]
    alone = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    for _ in range(2):
        training.step(pieces)
    torch.cuda.reset_peak_memory_stats()
    beside = [training.step(pieces) for _ in range(steps)]
    with_coder = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    plain += [training.step(None) for _ in range(steps - steps // 2)]
    training.coder.close()
    tokens = STEP_SAMPLES * 1024
    a, b = min(plain), min(beside)
    mean_a, mean_b = sum(plain) / len(plain), sum(beside) / len(beside)
    return [
        f"replica on the {replica}: step alone {mean_a:.4f} s (fastest {a:.4f}; {tokens / mean_a:,.0f} tokens/s),"
        f" with a change and a contribution beside it {mean_b:.4f} s (fastest {b:.4f}):"
        f" {mean_b / mean_a - 1:+.2%} (bar 1 %)",
        f"extra GPU memory: peak {(with_coder[0] - alone[0]) / layout.count:.2f}, kept"
        f" {(with_coder[1] - alone[1]) / layout.count:.2f} bytes a parameter (bar 8)",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Is staging hidden?")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--replica", choices=("host", "device"), default="host")
    options = parser.parse_args()
    print("\n".join(measure(options.steps, options.replica)))


if __name__ == "__main__":
    main()

"""What a device is to the rest of Potluck: stage tensors through host memory, and time micro-batches.

It must not know any vendor: each has a file of its own beside this one, and nothing outside this folder
asks which.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from potluck.device.trace import Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """What the device could hold in all, and what it could still take now."""

    total_bytes: int
    free_bytes: int


class Mark:
    """A point in the work that a device was given. This one has been passed: some devices work at once."""

    def wait(self) -> None:
        """Until the device has passed it; other threads go on meanwhile."""

    def passed(self) -> bool:
        """Whether the device has passed it; nobody waits."""
        return True

    def seconds_since(self, earlier: Mark) -> float | None:
        """By the device's own clock, when both have been passed; None where it has none."""
        return None


class Device(ABC):
    """What computes on this machine. Used by one training thread; to_host and from_host by any thread."""

    kind: str
    """What a person types, less what follows the colon: cpu, cuda, mps, paced."""

    ahead: int = 0
    """Micro-batches that may be queued behind the one that computes; 0: each is done before the next is given."""

    parts_at_once: int = 1
    """How many tensors `joined` should be given: where each copy costs a fixed time, more than one."""

    peak_flops: float | None = None
    """What its matrix units could do at most in bf16, where that is known."""

    def __init__(self, torch_device: torch.device, label: str) -> None:
        self.torch_device = torch_device
        self.label = label
        """For people, such as NVIDIA GeForce RTX 4070 12 GB."""
        self.reason = "asked for by name"
        """Why this one was chosen."""
        self.trace: Trace | None = None
        """Where the intervals of computing are written, if anybody wants them."""
        self._began_s: float | None = None
        self._waited_s = 0.0

    def synchronize(self) -> None:  # noqa: B027 - nothing to wait for where work is done when the call returns
        """Wait until all work given to the device is done."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A contiguous CPU tensor with the values of now, safe to read when this returns.

        On the CPU it may be the same tensor: whoever keeps it past the next change of the original copies it.
        """

    @abstractmethod
    def from_host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor brought to this device (on the CPU: itself)."""

    def to_host_later(self, tensor: Tensor) -> Tensor:
        """A CPU tensor that holds these values once a mark that is made next has been passed."""
        return self.to_host(tensor)

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """CPU tensors of bytes brought to this device as one, back to back (on the CPU: a single one is itself)."""
        return self.from_host(parts[0] if len(parts) == 1 else torch.cat(list(parts)))

    def host_buffer(self, count: int) -> Tensor:
        """[count] float32 in host memory, of the kind that this device reads and writes fastest."""
        return torch.empty(count)

    def mark(self) -> Mark:
        """The point up to which this thread has given the device work."""
        return Mark()

    def after(self, mark: Mark) -> None:  # noqa: B027 - nothing is ever unfinished where work is done at once
        """What this thread gives the device from now on starts after `mark`. Nobody waits for that here."""

    def beside(self) -> AbstractContextManager[None]:
        """What this thread gives the device inside runs beside the training's work, in no order with it.

        What must come after a point in the training's work says so with `after`.
        """
        return nullcontext()

    @abstractmethod
    def memory(self) -> Memory: ...

    def attach(self, model: nn.Module) -> None:  # noqa: B027 - only the paced device needs to see the model
        """Called once with the model to be trained, before anyone else hooks its parameters."""

    def at_step(self, step: int) -> None:  # noqa: B027 - only the paced device changes with the steps
        """The work that follows belongs to this step, counted from 1."""

    def begin(self, samples: int) -> None:
        """A micro-batch of so many samples starts: call before the forward. One not ended is forgotten."""
        self.synchronize()  # what was queued before is not this micro-batch's work
        self._waited_s = 0.0
        self._began_s = time.perf_counter()
        if self.trace is not None:
            self.trace.begin(samples)

    def waited(self, seconds: float) -> None:
        """The last so many seconds were spent waiting for the network: they are not computing.

        Called right after the waiting, between begin() and end(). A device that works on while its thread waits
        is credited with too little; what end() returns is then a lower bound.
        """
        self._waited_s += seconds
        if self.trace is not None:
            self.trace.waited(seconds)

    def end(self) -> float:
        """The micro-batch's backward is over: wait for the device; returns the seconds of computing."""
        assert self._began_s is not None, "end() without begin()"
        self.synchronize()
        computed_s = time.perf_counter() - self._began_s - self._waited_s
        self._began_s = None
        if self.trace is not None:
            self.trace.end()
        return max(0.0, computed_s)

    def rng_state(self) -> dict[str, Tensor]:
        """The states of the random generators that training on this device draws from: CPU uint8 tensors."""
        return {"cpu": torch.get_rng_state()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        """Put back what rng_state() gave. Entries of other kinds are left out: a run may resume elsewhere."""
        if "cpu" in state:
            torch.set_rng_state(state["cpu"].cpu())

    def seed(self, numbers: Mapping[str, int]) -> None:
        """Seed the generators that rng_state() names, each with its number; no other device's."""
        torch.default_generator.manual_seed(numbers["cpu"])

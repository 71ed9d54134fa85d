"""The interface of a device: staging tensors through host memory, and timing micro-batches."""

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
    """The device's total memory, and its free memory now."""

    total_bytes: int
    free_bytes: int


class Mark:
    """A point in the work queued on a device. This base class is always passed, for devices without a queue."""

    def wait(self) -> None:
        """Wait until the device has passed it; other threads keep running."""

    def passed(self) -> bool:
        """Whether the device has passed it. Does not wait."""
        return True

    def seconds_since(self, earlier: Mark) -> float | None:
        """Seconds between two passed marks by the device's own clock; None if it has none."""
        return None


class Device(ABC):
    """A device. Used by one training thread; to_host and from_host may be called from any thread."""

    kind: str
    """The name that users type, without the part after the colon: cpu, cuda, mps, paced."""

    ahead: int = 0
    """Micro-batches that may be queued behind the running one; 0: each ends before the next is queued."""

    parts_at_once: int = 1
    """How many tensors to pass to `joined`; more than one if each copy has a fixed cost."""

    peak_flops: float | None = None
    """Peak bf16 FLOP/s of its matrix units, if known."""

    def __init__(self, torch_device: torch.device, label: str) -> None:
        self.torch_device = torch_device
        self.label = label
        """A name for display, such as NVIDIA GeForce RTX 4070 12 GB."""
        self.reason = "asked for by name"
        """Why this device was chosen."""
        self.trace: Trace | None = None
        """The trace to which intervals of computing are written, if any."""
        self._began_s: float | None = None
        self._waited_s = 0.0

    def synchronize(self) -> None:  # noqa: B027 - nothing to wait for where work is done when the call returns
        """Wait until all work queued on the device is done."""

    @abstractmethod
    def to_host(self, tensor: Tensor) -> Tensor:
        """A contiguous CPU tensor with the current values, safe to read when this returns.

        On the CPU it may be the same tensor: copy it to keep it past the next change of the original.
        """

    @abstractmethod
    def from_host(self, tensor: Tensor) -> Tensor:
        """A CPU tensor copied to this device (on the CPU: itself)."""

    def to_host_later(self, tensor: Tensor) -> Tensor:
        """A CPU tensor that holds these values once the next mark has been passed."""
        return self.to_host(tensor)

    def staged(self, tensor: Tensor) -> Tensor:
        """A CPU tensor in the kind of host memory that `joined` reads fastest; the same tensor if any memory will
        do."""
        return tensor

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        """CPU tensors of bytes, concatenated and copied to this device (on the CPU: a single one is itself)."""
        return self.from_host(parts[0] if len(parts) == 1 else torch.cat(list(parts)))

    def host_buffer(self, count: int) -> Tensor:
        """[count] float32 in host memory, of the kind that this device reads and writes fastest."""
        return torch.empty(count)

    def mark(self) -> Mark:
        """A mark after all work that this thread has queued so far."""
        return Mark()

    def after(self, mark: Mark) -> None:  # noqa: B027 - nothing is ever unfinished where work is done at once
        """Work that this thread queues from now on starts after `mark`. Does not wait."""

    def beside(self) -> AbstractContextManager[None]:
        """Work queued inside runs concurrently with the training's work, in no order with it.

        Use `after` for work that must follow a point in the training's work.
        """
        return nullcontext()

    @abstractmethod
    def memory(self) -> Memory: ...

    def attach(self, model: nn.Module) -> None:  # noqa: B027 - only the paced device needs to see the model
        """Called once with the model to be trained, before any other code hooks its parameters."""

    def at_step(self, step: int) -> None:  # noqa: B027 - only the paced device changes with the steps
        """The work that follows belongs to this step, counted from 1."""

    def begin(self, samples: int) -> None:
        """A micro-batch of this many samples starts. Call before the forward; an unfinished one is discarded."""
        self.synchronize()  # what was queued before is not this micro-batch's work
        self._waited_s = 0.0
        self._began_s = time.perf_counter()
        if self.trace is not None:
            self.trace.begin(samples)

    def waited(self, seconds: float) -> None:
        """The last seconds were spent waiting for the network and do not count as computing.

        Called right after the waiting, between begin() and end(). If a device computes while its thread waits, too
        little time is counted, and end() returns a lower bound.
        """
        self._waited_s += seconds
        if self.trace is not None:
            self.trace.waited(seconds)

    def end(self) -> float:
        """The micro-batch's backward is over: wait for the device and return the seconds of computing."""
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
        """Restore what rng_state() returned. Ignores entries of other devices: a run may resume elsewhere."""
        if "cpu" in state:
            torch.set_rng_state(state["cpu"].cpu())

    def seed(self, numbers: Mapping[str, int]) -> None:
        """Seed the generators that rng_state() names, each with its number; no other device's."""
        torch.default_generator.manual_seed(numbers["cpu"])

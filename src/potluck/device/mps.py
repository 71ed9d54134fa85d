"""The GPU of an Apple computer (Metal Performance Shaders) as a device.

Each workaround names its issue, so that it can be removed when the issue is fixed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from potluck.device.base import Device, Memory
from potluck.errors import ConfigError
from potluck.limits import cpu_name, usable_memory


class MpsDevice(Device):
    """Computes on the one GPU of this Mac, which shares its memory with the CPU."""

    kind = "mps"

    def __init__(self) -> None:
        super().__init__(torch.device("mps"), cpu_name())

    def synchronize(self) -> None:
        torch.mps.synchronize()

    def to_host(self, tensor: Tensor) -> Tensor:
        # Contiguous on the GPU first: copies of strided views from MPS were silently wrong (pytorch#189961).
        return tensor.detach().contiguous().to("cpu")

    def from_host(self, tensor: Tensor) -> Tensor:
        if tensor.dtype == torch.float64:
            raise ConfigError(
                "a float64 tensor cannot go to MPS, which has no double precision",
                hint="convert the data and the model to float32, or use --device cpu",
            )
        return tensor.contiguous().to(self.torch_device)

    def memory(self) -> Memory:
        total = torch.mps.recommended_max_memory()
        # What torch holds but does not use is free as well. The memory is everyone's on this machine.
        free = min(total - torch.mps.current_allocated_memory(), usable_memory()[1])
        return Memory(total_bytes=total, free_bytes=max(0, free))

    def rng_state(self) -> dict[str, Tensor]:
        return {**super().rng_state(), "mps": torch.mps.get_rng_state()}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        super().set_rng_state(state)
        if "mps" in state:
            torch.mps.set_rng_state(state["mps"].cpu())

    def seed(self, numbers: Mapping[str, int]) -> None:
        super().seed(numbers)
        torch.mps.manual_seed(numbers["mps"])


def why_not() -> str | None:
    """Why MPS cannot be used here; None if it can."""
    if not torch.backends.mps.is_built():
        return "this torch is built without it"
    if not torch.backends.mps.is_available():
        return "it needs an Apple GPU and a newer macOS"
    return None


def make(argument: str) -> MpsDevice:
    """The device that "mps" names; a Mac has one."""
    reason = why_not()
    if reason is not None:
        raise ConfigError(
            f"the device mps was asked for, but MPS is not available: {reason}",
            hint="use --device auto or --device cpu",
        )
    if argument not in ("", "0"):
        raise ConfigError(f"there is no device mps:{argument} on this machine", hint="use --device mps")
    return MpsDevice()

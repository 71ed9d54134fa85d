"""One CUDA GPU (or an AMD one: ROCm builds of torch call it CUDA too) as a device.

It must not know other vendors, and it does nothing with CUDA before a device is made.
"""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.device.base import Device, Memory
from potluck.errors import ConfigError

PINNED_LIMIT_BYTES = 64 << 20
"""Copies up to this size go into pinned memory, at 54 GB/s on an H200 where ordinary memory takes 1.5 to 12.
torch keeps what it once pinned, which larger copies are too rare to deserve."""


class CudaDevice(Device):
    """Computes on the GPU of that index, which becomes the current one of this process."""

    kind = "cuda"

    def __init__(self, index: int = 0) -> None:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # for users' code that says only "cuda"
        properties = torch.cuda.get_device_properties(device)
        super().__init__(device, f"{properties.name} {round(properties.total_memory / 2**30)} GB")

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def to_host(self, tensor: Tensor) -> Tensor:
        # The copy comes after the work queued on this thread's current stream: the default one, unless the
        # thread changed it.
        source = tensor.detach().contiguous()
        if source.nbytes > PINNED_LIMIT_BYTES:
            return source.to("cpu")
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source, non_blocking=True)
        torch.cuda.current_stream(self.torch_device).synchronize()
        return host

    def from_host(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.torch_device)

    def memory(self) -> Memory:
        free, total = torch.cuda.mem_get_info(self.torch_device)
        # What torch holds but does not use is free as well: the next allocation takes it from there.
        held = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return Memory(total_bytes=total, free_bytes=free + held)

    def rng_state(self) -> dict[str, Tensor]:
        return {**super().rng_state(), "cuda": torch.cuda.get_rng_state(self.torch_device)}

    def set_rng_state(self, state: dict[str, Tensor]) -> None:
        super().set_rng_state(state)
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"].cpu(), self.torch_device)


def why_not() -> str | None:
    """Why CUDA cannot be used here, in words; None when it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without it"
    if torch.cuda.is_available():
        return None
    try:
        torch.empty(1, device="cuda")  # for what it says
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return "no GPU was found"


def make(argument: str) -> CudaDevice:
    """The device that "cuda:<argument>" names."""
    reason = why_not()
    if reason is not None:
        raise ConfigError(
            f"the device cuda was asked for, but CUDA is not available: {reason}",
            hint="use --device auto or --device cpu, or install a torch built for CUDA and the GPU's driver",
        )
    count = torch.cuda.device_count()
    if argument and not (argument.isdecimal() and int(argument) < count):
        named = ", ".join(f"cuda:{index}" for index in range(count))
        raise ConfigError(f"there is no device cuda:{argument} on this machine", hint=f"use one of: {named}")
    return CudaDevice(int(argument or 0))

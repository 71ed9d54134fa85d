"""The CPU as a device. Its memory is host memory, so staging costs nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from potluck.device.base import Device, Memory
from potluck.limits import cpu_name, usable_memory


class CpuDevice(Device):
    """Computes on the CPU with torch's current number of threads."""

    kind = "cpu"

    def __init__(self) -> None:
        threads = torch.get_num_threads()
        label = f"{cpu_name()}, {threads} thread{'' if threads == 1 else 's'}"
        super().__init__(torch.device("cpu"), label)

    def to_host(self, tensor: Tensor) -> Tensor:
        return tensor.detach().contiguous()

    def from_host(self, tensor: Tensor) -> Tensor:
        return tensor

    def memory(self) -> Memory:
        total, free = usable_memory()
        return Memory(total_bytes=total, free_bytes=free)

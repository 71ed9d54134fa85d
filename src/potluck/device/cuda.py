"""A CUDA GPU as a device, or an AMD one, which ROCm builds of torch also call CUDA.

CUDA is not initialized before a device is made.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from potluck.device.base import Device, Mark, Memory
from potluck.errors import ConfigError

PINNED_LIMIT_BYTES = 64 << 20
"""Copies up to this size go through pinned memory, at 54 GB/s on an H200 where ordinary memory takes 1.5 to 12.
torch never releases pinned memory, and larger copies are too rare for that."""

PEAK_FLOPS = {
    "H200": 989e12,
    "H100 80GB HBM3": 989e12,
    "A100.*": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "GeForce RTX 4090": 165e12,
    "GeForce RTX 4080": 97e12,
    "GeForce RTX 4070": 58e12,
    "GeForce RTX 4060": 30e12,
    "GeForce RTX 3090": 71e12,
    "GeForce RTX 3080": 59e12,
}
"""Dense bf16 with sums in float32, from the maker's data sheets, by the part after NVIDIA in the device's name. A
name that is not listed (a Ti, a laptop's card) has a different rate."""


class CudaMark(Mark):
    """An event on the stream that was the thread's current one."""

    def __init__(self, device: torch.device) -> None:
        # Blocking: a thread that waits gives its core away, and others need it.
        self.event = torch.cuda.Event(blocking=True, enable_timing=True)
        self.event.record(torch.cuda.current_stream(device))

    def wait(self) -> None:
        self.event.synchronize()

    def passed(self) -> bool:
        return bool(self.event.query())

    def seconds_since(self, earlier: Mark) -> float | None:
        return earlier.event.elapsed_time(self.event) / 1000 if isinstance(earlier, CudaMark) else None


class CudaDevice(Device):
    """Computes on the GPU of that index, which becomes the current one of this process."""

    kind = "cuda"
    ahead = 1  # with more, the driver's queue of launches fills up, and a full one may block Python's other threads
    parts_at_once = 16

    def __init__(self, index: int = 0) -> None:
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)  # for users' code that says only "cuda"
        properties = torch.cuda.get_device_properties(device)
        super().__init__(device, f"{properties.name} {round(properties.total_memory / 2**30)} GB")
        self.peak_flops = _peak(properties.name)
        self._side = threading.local()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def to_host(self, tensor: Tensor) -> Tensor:
        # The copy comes after the work queued on this thread's current stream: the default one, unless the
        # thread changed it.
        source = tensor.detach().contiguous()
        if source.device.type == "cpu" or source.nbytes > PINNED_LIMIT_BYTES:
            return source.to("cpu")
        host = self.to_host_later(source)
        self.mark().wait()
        return host

    def to_host_later(self, tensor: Tensor) -> Tensor:
        # On this device first: a mark tells nothing of another one's work.
        source = tensor.detach().to(self.torch_device)
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        return host.copy_(source, non_blocking=True)

    def from_host(self, tensor: Tensor) -> Tensor:
        if tensor.is_pinned():  # by a loader with pin_memory=True
            return tensor.to(self.torch_device, non_blocking=True)
        if tensor.nbytes > PINNED_LIMIT_BYTES:
            return tensor.to(self.torch_device)
        # Through pinned memory nobody waits: torch reuses it only when the copy has been made.
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor.detach())
        return pinned.to(self.torch_device, non_blocking=True)

    def staged(self, tensor: Tensor) -> Tensor:
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        pinned.numpy()[...] = tensor.numpy()  # by this thread alone: torch would call on other cores
        return pinned

    def joined(self, parts: Sequence[Tensor]) -> Tensor:
        total = torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype, device=self.torch_device)
        at = 0
        for part in parts:
            pinned = part if part.is_pinned() else self.staged(part)
            total[at : at + part.numel()].copy_(pinned, non_blocking=True)
            at += part.numel()
        return total

    def host_buffer(self, count: int) -> Tensor:
        return torch.empty(count, pin_memory=True)

    def mark(self) -> CudaMark:
        return CudaMark(self.torch_device)

    def after(self, mark: Mark) -> None:
        if isinstance(mark, CudaMark):
            torch.cuda.current_stream(self.torch_device).wait_event(mark.event)

    @contextmanager
    def beside(self) -> Iterator[None]:
        stream = getattr(self._side, "stream", None)
        if stream is None:
            # Little work that others wait for: it goes before the training's next blocks, not after all of them.
            stream = self._side.stream = torch.cuda.Stream(self.torch_device, priority=-1)
        with torch.cuda.stream(stream):
            yield

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

    def seed(self, numbers: Mapping[str, int]) -> None:
        super().seed(numbers)
        with torch.cuda.device(self.torch_device):
            torch.cuda.manual_seed(numbers["cuda"])


def _peak(name: str) -> float | None:
    name = name.removeprefix("NVIDIA ")
    return next((rate for pattern, rate in PEAK_FLOPS.items() if re.fullmatch(pattern, name)), None)


def why_not() -> str | None:
    """Why CUDA cannot be used here; None if it can."""
    if torch.version.cuda is None and torch.version.hip is None:
        return "this torch is built without it"
    if torch.cuda.is_available():
        return None
    try:
        torch.empty(1, device="cuda")  # for what it says
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().splitlines()[0].rstrip(".")
    return "no GPU was found"


def seems_present() -> bool:
    """Whether this machine has the driver of an NVIDIA or AMD GPU, even if torch cannot use it."""
    return any(map(os.path.exists, ("/proc/driver/nvidia/version", "/dev/kfd"))) or bool(shutil.which("nvidia-smi"))


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

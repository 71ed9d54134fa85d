"""Copies tensors of any device to host memory and back: owns the order between the device's queue and a copying
thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_streams = threading.local()


def moment(device: torch.device) -> Callable[[], None] | None:
    """Mark this point in the device's queue. The returned function, called from any thread, waits until the device
    reaches it.

    Call it in the thread that queued the work. Returns None for a device without a queue.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize
    if device.type == "mps":
        torch.mps.synchronize()
    return None


def to_host(tensor: Tensor) -> Tensor:
    """The values in a contiguous CPU tensor, safe to read now; the tensor itself if it already is one."""
    source = tensor.detach()
    if source.device.type == "cpu":
        return source if is_plain(source) else source.resolve_conj().resolve_neg().contiguous()
    if source.device.type != "cuda":
        # Contiguous on the device first: copies of strided views from MPS were silently wrong (pytorch#189961).
        return source.resolve_conj().contiguous().to("cpu")
    stream = _stream(source.device)
    with torch.cuda.stream(stream):
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        host.copy_(source, non_blocking=True)
        stream.synchronize()
    return host


def from_host(host: Tensor, tensor: Tensor) -> None:
    """Write the values of a CPU tensor into a tensor on any device, with any strides. They are written when this
    returns."""
    target = tensor.detach()
    values = host.view(target.shape)
    if target.device.type == "cuda":
        stream = _stream(target.device)
        with torch.cuda.stream(stream):
            target.copy_(values, non_blocking=True)
            stream.synchronize()
        return
    if target.device.type != "cpu" and not target.is_contiguous():
        values = values.to(target.device)
    target.copy_(values)
    if target.device.type == "mps":
        torch.mps.synchronize()


def _stream(device: torch.device) -> Any:
    """A stream of this thread, so that copies do not wait for computations on the default stream."""
    known: dict[torch.device, Any] = _streams.__dict__.setdefault("by_device", {})
    if device not in known:
        known[device] = torch.cuda.Stream(device)
    return known[device]


def room_for(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor to be filled and then passed to from_host(); the tensor itself if it is one."""
    target = tensor.detach()
    if is_plain(target):
        return target
    return torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type == "cuda")


def is_plain(tensor: Tensor) -> bool:
    """Whether its memory can be read directly: no gaps, and no pending conjugate or sign."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

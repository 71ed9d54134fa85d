"""Tensors of any device, through host memory and back: owns the order between the device's own queue and a thread
that copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_streams = threading.local()


def moment(device: torch.device) -> Callable[[], None] | None:
    """Now, in the device's own queue: calling what is returned, from any thread, waits until the device is there.

    Called by the thread that queued the work. None where work is done when the call that asks for it returns.
    """
    if device.type == "cuda":
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        return event.synchronize
    if device.type == "mps":
        torch.mps.synchronize()
    return None


def to_host(tensor: Tensor) -> Tensor:
    """The values in a contiguous CPU tensor, safe to read now: the tensor itself where it is one already."""
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
    """Write the values of a CPU tensor into one of any device, of any strides; they are there on return."""
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
    """A stream of this thread's own, so that copies do not queue behind the computing of the default one."""
    known: dict[torch.device, Any] = _streams.__dict__.setdefault("by_device", {})
    if device not in known:
        known[device] = torch.cuda.Stream(device)
    return known[device]


def room_for(tensor: Tensor) -> Tensor:
    """A contiguous CPU tensor to be filled and then given to from_host(): the tensor itself where it is one."""
    target = tensor.detach()
    if is_plain(target):
        return target
    return torch.empty(target.shape, dtype=target.dtype, pin_memory=target.device.type == "cuda")


def is_plain(tensor: Tensor) -> bool:
    """Whether host memory holds it as it reads: no gaps, no conjugate or sign still to be applied."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()

"""A caller's tensors as collectives want them: flat, contiguous, in host memory; owns bringing results back.

It must not know collectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from potluck.device import staging
from potluck.dist.counting import spends


class HostTensor:
    """One tensor of any device and strides; `flat` is what collectives read and write."""

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        self._tensor = tensor
        own = tensor.detach()
        self._same = staging.is_plain(own)
        self.flat = own.view(-1) if self._same else _staged(own, read)

    def bring_back(self) -> None:
        if not self._same:
            _unstage(self.flat, self._tensor)


@spends("staging")
def _staged(tensor: Tensor, read: bool) -> Tensor:
    return (staging.to_host(tensor) if read else staging.room_for(tensor)).reshape(-1)


@spends("staging")
def _unstage(flat: Tensor, tensor: Tensor) -> None:
    staging.from_host(flat, tensor)


def read(tensors: Iterable[Tensor]) -> list[HostTensor]:
    """With their values, for what is sent (and perhaps replaced)."""
    return [HostTensor(tensor, read=True) for tensor in tensors]


def rooms(tensors: Iterable[Tensor]) -> list[HostTensor]:
    """Without values, for what is received."""
    return [HostTensor(tensor, read=False) for tensor in tensors]


def flats(tensors: Sequence[HostTensor]) -> list[Tensor]:
    return [tensor.flat for tensor in tensors]


def bring_back(tensors: Iterable[HostTensor]) -> None:
    for tensor in tensors:
        tensor.bring_back()

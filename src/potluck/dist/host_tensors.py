"""A caller's tensors as collectives need them, flat, contiguous and in host memory: owns copying results back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from potluck.device import staging
from potluck.dist.counting import spends


class HostTensor:
    """A tensor of any device and strides; collectives read and write `flat`."""

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        self._tensor = tensor
        own = tensor.detach()
        self._same = staging.is_plain(own)
        self.flat = own.view(-1) if self._same else _staged(own, read)

    def copy_back(self) -> None:
        if not self._same:
            _unstage(self.flat, self._tensor)


@spends("staging")
def _staged(tensor: Tensor, read: bool) -> Tensor:
    return (staging.to_host(tensor) if read else staging.room_for(tensor)).reshape(-1)


@spends("staging")
def _unstage(flat: Tensor, tensor: Tensor) -> None:
    staging.from_host(flat, tensor)


def read(tensors: Iterable[Tensor]) -> list[HostTensor]:
    """With their values, for tensors that are sent."""
    return [HostTensor(tensor, read=True) for tensor in tensors]


def buffers(tensors: Iterable[Tensor]) -> list[HostTensor]:
    """Without values, for tensors that are received."""
    return [HostTensor(tensor, read=False) for tensor in tensors]


def flats(tensors: Sequence[HostTensor]) -> list[Tensor]:
    return [tensor.flat for tensor in tensors]


def copy_back(tensors: Iterable[HostTensor]) -> None:
    for tensor in tensors:
        tensor.copy_back()

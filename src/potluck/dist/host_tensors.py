"""Makes a caller's tensors flat, contiguous and in host memory, and copies results back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from potluck.device import staging
from potluck.dist.counting import spends

to_host = spends("staging")(staging.to_host)
from_host = spends("staging")(staging.from_host)
room_for = spends("staging")(staging.room_for)


class HostTensor:
    """A tensor on any device with any strides; collectives read and write `flat`."""

    def __init__(self, tensor: Tensor, *, read: bool) -> None:
        self._tensor = tensor
        own = tensor.detach()
        self._same = staging.is_plain(own)
        self.flat = own.view(-1) if self._same else (to_host(own) if read else room_for(own)).reshape(-1)

    def copy_back(self) -> None:
        if not self._same:
            from_host(self.flat, self._tensor)


@contextmanager
def staged(outputs: Iterable[Tensor], inputs: Iterable[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Flat tensors to write and to read. Written tensors are copied back at the end."""
    buffers = [HostTensor(tensor, read=False) for tensor in outputs]
    yield [buffer.flat for buffer in buffers], [HostTensor(tensor, read=True).flat for tensor in inputs]
    for buffer in buffers:
        buffer.copy_back()

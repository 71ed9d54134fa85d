"""Sends objects from a worker process: pickled, but with the values of their tensors in one piece of shared memory.

A tensor in shared memory of its own costs a file descriptor and some 700 µs of the receiving process. A step of 512
samples with three tensors each would need more descriptors than a process usually may have.

The pickle goes through the pipe from a worker to the process that started it, as torch's own does. It never comes
from a file or another machine.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import get_worker_info

ALIGN_BYTES = 16
SMALL_BYTES = 1 << 14
"""A collated tensor of at most this many bytes is sent in the message instead of in shared memory."""
KINDS: Any = (Tensor, np.ndarray)
LARGE_BYTES = 1 << 20
"""A tensor of a batch that is already in shared memory is not copied if it has more bytes than this."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Objects without the values of their tensors. In a list of a batch, pinning would copy the tensors."""

    pickled: tuple[bytes, ...]
    alone: list[Tensor]
    """Tensors that torch sends itself."""


def pack(
    trees: Sequence[Any], *, apart: bool = False, batches: bool = False, whole: bool = False
) -> tuple[Sent, Tensor]:
    """The objects, and the bytes of their tensors and arrays. Raises if they cannot be pickled.

    `apart`: the objects may be changed afterwards. `batches`: they are batches, whose tensors keep their memory
    format. `whole`: of these, too, none is sent in shared memory of its own.
    """
    values: list[Tensor] = []
    alone: list[Tensor] = []
    filled = 0

    def place(leaf: Any) -> Any:
        nonlocal filled
        if not isinstance(leaf, KINDS):
            return NotImplemented
        kept = _is_kept(leaf)
        value = plain(leaf.as_subclass(Tensor) if kept else leaf)
        if value is None and isinstance(leaf, np.ndarray):
            return NotImplemented
        if value is None or (batches and _travels_alone(leaf, whole)):
            if leaf.requires_grad and not leaf.is_leaf:  # torch would find this too late, in another thread
                raise TypeError("a tensor that is computed from others with requires_grad; detach() it")
            alone.append(leaf.clone() if apart and not leaf.requires_grad else leaf)
            return _alone, (len(alone) - 1,)
        values.append(value)
        at, filled = filled, filled + -(-value.nbytes // ALIGN_BYTES) * ALIGN_BYTES
        more = (type(leaf), leaf.__dict__) if kept else (np.ndarray,) if isinstance(leaf, np.ndarray) else ()
        return _placed, (at, value.nbytes, value.dtype, tuple(value.shape), *more)

    pickled = tuple(_pickled(tree, place) for tree in trees)
    content, at = _shared(filled), 0
    for value in values:
        content[at : at + value.nbytes] = value.contiguous().reshape(-1).view(torch.uint8)
        at += -(-value.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    return Sent(pickled, alone), content


def unpack(sent: Sent, content: Tensor, number: int = 0, *, copies: bool = False) -> Any:
    """The object of this number again.

    `copies`: small tensors are copies, so that keeping the labels does not keep the images.
    """
    _now.sent, _now.content, _now.copies = sent, content, copies
    try:
        return ForkingPickler.loads(sent.pickled[number])
    finally:
        del _now.sent, _now.content


def plain(leaf: Any) -> Tensor | None:
    """The leaf as a tensor whose bytes can be copied; None for anything else, which is sent unchanged."""
    if type(leaf) in (np.ndarray, np.memmap):  # a masked array is more than its values
        try:
            return torch.from_numpy(np.ascontiguousarray(leaf).reshape(leaf.shape))
        except (TypeError, ValueError):  # ValueError: of another byte order
            return None
    if type(leaf) is not Tensor or leaf.device.type != "cpu" or leaf.layout is not torch.strided:
        return None
    return None if leaf.requires_grad or leaf.is_nested or leaf.is_conj() or leaf.is_neg() else leaf


class _Pickler(ForkingPickler):
    """Asks for another form of each tensor and array; numbers and texts in a list are not asked about."""

    def __init__(self, file: io.BytesIO, place: Callable[[Any], Any]) -> None:
        super().__init__(file, -1)
        self._place = place

    def reducer_override(self, leaf: Any) -> Any:
        return self._place(leaf)


def _pickled(tree: Any, place: Callable[[Any], Any]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, place).dump(tree)
    return file.getvalue()


_now = threading.local()
"""What this thread unpacks."""


def _placed(
    at: int, nbytes: int, dtype: torch.dtype, shape: tuple[int, ...], kind: Any = None, state: Any = None
) -> Any:
    tensor: Tensor = _now.content[at : at + nbytes].view(dtype).view(shape)
    tensor = tensor.clone() if _now.copies and nbytes <= SMALL_BYTES else tensor
    if kind is np.ndarray:
        return tensor.numpy()
    if kind is not None:
        tensor = tensor.as_subclass(kind)
        tensor.__dict__.update(state)
    return tensor


def _alone(number: int) -> Tensor:
    tensor: Tensor = _now.sent.alone[number]
    return tensor


def _is_kept(leaf: Any) -> bool:
    """Whether it is a tensor with attributes, or of a class of its own, such as an image of torchvision.

    torch would send all its values in the message.
    """
    kind = type(leaf)
    return (
        issubclass(kind, Tensor)
        and (kind is not Tensor or bool(leaf.__dict__))
        and all(getattr(kind, name) is getattr(Tensor, name) for name in ("__reduce_ex__", "__torch_dispatch__"))
    )


def _travels_alone(leaf: Any, whole: bool) -> bool:
    """Whether a tensor of a batch is better left to torch: default_collate, for one, makes it in shared memory."""
    if not isinstance(leaf, Tensor):
        return False
    return not leaf.is_contiguous() or (not whole and leaf.nbytes > LARGE_BYTES and leaf.is_shared())


def _shared(nbytes: int) -> Tensor:
    """Bytes that other processes can read without a copy, if this is a worker process."""
    if get_worker_info() is None or not nbytes:
        return torch.empty(nbytes, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(nbytes)
    return torch.empty(0, dtype=torch.uint8).set_(storage)

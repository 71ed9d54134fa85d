"""The model's tensors as the hub sees them: fingerprint, hashes, and pieces of the flat vector.

Owns how pieces are read from and written to parameters.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from potluck.errors import LoopError
from potluck.hub.layout import Layout, Piece, make_layout
from potluck.spec.model_description import TensorSpec


class ModelTensors:
    """The trained parameters in order, the frozen ones and the buffers by name."""

    def __init__(self, model: nn.Module) -> None:
        self.trained: list[nn.Parameter] = []
        self.fixed: dict[str, Tensor] = {}
        """Frozen parameters and buffers, which are sent once."""
        specs: list[TensorSpec] = []
        for name, module in model.named_modules():
            if getattr(module, "sparse", False) is True:
                raise LoopError(
                    f"{name or 'the model'} makes sparse gradients, which cannot be sent",
                    hint="build it with sparse=False",
                )
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                if not parameter.is_floating_point():
                    raise LoopError(f"parameter {name} is trained but is {parameter.dtype}, not a float type")
                self.trained.append(parameter)
            else:
                self.fixed[name] = parameter
            specs.append(_spec(name, parameter, "trained" if parameter.requires_grad else "frozen"))
        for name, buffer in model.named_buffers():
            self.fixed[name] = buffer
            specs.append(_spec(name, buffer, "buffer"))
        if not self.trained:
            raise LoopError("no parameter of the model requires a gradient", hint="unfreeze what should be trained")
        self.fingerprint = tuple(specs)
        self.layout: Layout = make_layout([s for s in specs if s.role == "trained"])

    def buffer_hashes(self) -> dict[str, str]:
        return {s.name: tensor_hash(self.fixed[s.name]) for s in self.fingerprint if s.role == "buffer"}

    def hashes(self) -> dict[str, str]:
        """Hashes of the fixed tensors, so that a guest that already has the same values is not sent them."""
        return {name: tensor_hash(tensor) for name, tensor in self.fixed.items()}


def _spec(name: str, tensor: Tensor, role: str) -> TensorSpec:
    return TensorSpec(
        name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."), role=role
    )


def tensor_hash(tensor: Tensor) -> str:
    return hashlib.blake2b(raw_bytes(tensor.detach().cpu()), digest_size=16).hexdigest()


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor, in its own (little-endian) order, without a copy where it is contiguous."""
    flat = (
        tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if tensor.numel()
        else torch.empty(0, dtype=torch.uint8)
    )
    return memoryview(flat.numpy())  # type: ignore[arg-type]


def from_bytes(buffer: memoryview | bytes, dtype: torch.dtype = torch.uint8) -> Tensor:
    """A 1-D CPU tensor over received bytes (copied only where the buffer is read-only)."""
    array = np.frombuffer(buffer, dtype=np.uint8)
    if not array.flags.writeable:
        array = array.copy()
    return torch.from_numpy(array).view(dtype)


def read_piece(piece: Piece, tensors: Sequence[Tensor] | Mapping[int, Tensor | None], out: Tensor) -> Tensor:
    """Copy a piece's values into `out` (float32, on the tensors' device); a missing tensor reads as zeros."""
    at = 0
    for span in piece.spans:
        size = span.stop - span.start
        source = tensors[span.tensor]
        target = out[at : at + size]
        if source is None:
            target.zero_()
        else:
            target.copy_(source.detach().reshape(-1)[span.start : span.stop])
        at += size
    return out[:at]


@contextmanager
def _flat(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor in one dimension, to be changed in place, whatever its memory layout (channels_last)."""
    inside = tensor.detach()
    if inside.is_contiguous():
        yield inside.view(-1)
        return
    flat = inside.reshape(-1)
    yield flat
    inside.copy_(flat.view(inside.shape))


def add_to_piece(piece: Piece, parameters: Sequence[Tensor], change: Tensor) -> None:
    """Add float32 values to a piece of the parameters, rounding to each parameter's own type."""
    at = 0
    for span in piece.spans:
        size = span.stop - span.start
        with _flat(parameters[span.tensor]) as flat:
            target = flat[span.start : span.stop]
            if target.dtype == torch.float32:
                target.add_(change[at : at + size])
            else:
                target.copy_(target.float().add_(change[at : at + size]))
        at += size


def write_piece(piece: Piece, parameters: Sequence[Tensor], values: Tensor) -> None:
    """Set a piece of the parameters to float32 values."""
    at = 0
    for span in piece.spans:
        size = span.stop - span.start
        with _flat(parameters[span.tensor]) as flat:
            flat[span.start : span.stop].copy_(values[at : at + size])
        at += size


def round_to_types(piece: Piece, parameters: Sequence[Tensor], values: Tensor) -> None:
    """Round float32 values to what the parameters' own types can hold, in place."""
    at = 0
    for span in piece.spans:
        size = span.stop - span.start
        dtype = parameters[span.tensor].dtype
        if dtype != torch.float32:
            part = values[at : at + size]
            part.copy_(part.to(dtype))
        at += size


def write_part(tensors: Mapping[str, Tensor], name: str, start: int, data: Tensor) -> None:
    """Set values start… of a fixed tensor."""
    with _flat(tensors[name]) as target:
        values = data.view(target.dtype) if data.dtype != target.dtype else data
        target[start : start + values.numel()].copy_(values)

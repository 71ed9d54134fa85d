"""The arithmetic of a guest's pieces: changes of the weights are decoded and added, gradients coded with feedback.

Used by one thread, the guest's worker; `guest.py` decides what it does and when. Owns the residual.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from potluck.codec import Codecs, changes, encode_with_feedback, from_wire, rehearse, to_wire
from potluck.codec.names import BF16_CHANGES
from potluck.device import Device, Mark
from potluck.errors import LoopError
from potluck.hub.layout import Piece
from potluck.hub.model_tensors import (
    ModelTensors,
    add_to_piece,
    from_bytes,
    raw_bytes,
    read_piece,
    write_part,
    write_piece,
)
from potluck.spec.messages import TensorMessage
from potluck.wire.transport import Frame


class GuestPieces:
    """A model's pieces on a guest, and what its codecs have lost so far."""

    def __init__(self, tensors: ModelTensors, *, down: Codecs, up: Codecs, device: Device) -> None:
        """`down`, `up`: the codecs of changes and of gradients."""
        self._tensors, self._pieces, self._count = tensors, tensors.layout.pieces, tensors.layout.count
        self.down, self.up, self._device = down, up, device
        self._names = [spec.name for spec in tensors.fingerprint if spec.role == "trained"]
        self._residual: Tensor | None = None
        self._scratch: Tensor | None = None
        self._written: dict[int, tuple[StorageWeakRef, int]] = {}
        """Each weight's storage, and how often it had been written to, after the last write here. An address would
        not identify the storage: memory that is freed is used again."""

    def rehearse(self) -> None:
        """Use each codec once, or the first lease would seem to take a slow link."""
        for codec in (*self.down.likely, *self.up.likely):
            rehearse(codec, (piece.count for piece in self._pieces), self._device.torch_device)

    def write_fixed(self, message: TensorMessage, frame: Frame) -> None:
        """A part of a tensor that is not trained."""
        payload = self._device.from_host(from_bytes(frame))
        write_part(self._tensors.fixed, message.name, message.start, payload)

    def write_whole(self, index: int, frame: Frame) -> None:
        payload = self._device.from_host(from_bytes(frame))
        write_piece(self._pieces[index], self._tensors.trained, payload.view(torch.float32))
        self._wrote(self._pieces[index])

    def change(self, index: int, codec: str, frame: Frame) -> None:
        """Add a change to a piece. Refused if the script has changed it too: its values would not be the host's."""
        piece, trained = self._pieces[index], self._tensors.trained
        for span in piece.spans:
            weight = trained[span.tensor]
            storage, times = self._written.get(span.tensor, (None, 0))
            # Flattening an RNN's weights for cuDNN writes to them too, and moves them.
            same = storage is not None and storage.cdata == weight.untyped_storage()._cdata
            if same and weight._version != times:
                raise _changed_here(self._names[span.tensor])
        if codec == BF16_CHANGES:
            values = self._values(index)
            changes.apply(self._device.from_host(changes.from_wire(frame, piece.count)), values)
            write_piece(piece, trained, values)
        else:
            down = self.down.called(codec)
            payload = self._device.from_host(from_wire(down, frame, piece.count))
            add_to_piece(piece, trained, down.decode(payload, piece.count, out=self._buffer(piece.count)))
        self._wrote(piece)

    def _wrote(self, piece: Piece) -> None:
        for span in piece.spans:
            weight = self._tensors.trained[span.tensor]
            self._written[span.tensor] = StorageWeakRef(weight.untyped_storage()), weight._version

    def raw(self, index: int) -> memoryview:
        """The bytes of a piece's weights."""
        return raw_bytes(self._device.to_host(self._values(index)))

    def code(self, index: int, codec: str, computed: Mark) -> tuple[Frame, bool]:
        """A piece of the gradient as it is sent, and whether it is finite. What its codec loses stays here."""
        self._device.after(computed)
        piece = self._pieces[index]
        if self._residual is None:
            self._residual = torch.zeros(self._count, device=self._device.torch_device)
        # Only these: the backward may be writing the other parameters' gradients at this very moment.
        gradients = {s.tensor: self._tensors.trained[s.tensor].grad for s in piece.spans}
        values = read_piece(piece, gradients, self._buffer(piece.count))
        residual = self._residual[piece.offset : piece.offset + piece.count]
        up = self.up.called(codec)
        payload = self._device.to_host(encode_with_feedback(up, values, residual))
        return to_wire(up, payload), up.finite(payload, piece.count)

    def clear_residual(self) -> None:
        if self._residual is not None:
            self._residual.zero_()

    def _values(self, index: int) -> Tensor:
        piece = self._pieces[index]
        return read_piece(piece, self._tensors.trained, self._buffer(piece.count))

    def _buffer(self, count: int) -> Tensor:
        if self._scratch is None or self._scratch.numel() < count:
            self._scratch = torch.empty(count, device=self._device.torch_device)
        return self._scratch[:count]


def _changed_here(name: str) -> LoopError:
    return LoopError(
        f"{name} was changed on this guest by its script or by a layer's forward: it is no longer the host's",
        hint="the host sends guests its weights, and every change of them: clamp, reset, load or swap weights only "
        "`if run.is_host`, after the inner loop; a layer that changes its own weights (an Embedding with max_norm) "
        "trains without guests",
    )

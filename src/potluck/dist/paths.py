"""The ways a collective can go: over the mail between machines, or through the shared memory of one.

It must not know torch's process groups or devices: tensors are flat, contiguous and in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from potluck.dist import algorithms, reduction
from potluck.dist.compression import Compressor
from potluck.dist.lane import Call, Lane, Trip
from potluck.dist.local import LocalGroup
from potluck.dist.reduction import Op


class CollectivePath(Protocol):
    """What a group can do with flat tensors; lists have one entry for each rank. `identity` tells that a tensor is
    the one of the last step: what compression lost then is added now."""

    def barrier(self, call: Call) -> None: ...
    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None: ...
    def reduce(self, call: Call, flat: Tensor, op: Op, root: int) -> None: ...
    def broadcast(self, call: Call, flat: Tensor, root: int) -> None: ...
    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> None: ...
    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None: ...
    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> None: ...
    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None: ...
    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None: ...


class MeshPath:
    """Everything over the mail."""

    def __init__(self, lane: Lane, compressor: Compressor | None = None) -> None:
        self.lane, self.compressor = lane, compressor

    def _trip(self, call: Call) -> Trip:
        return Trip(self.lane, call)

    def _streaming(self, call: Call, nbytes: int) -> Trip:
        trip = Trip(self.lane, call)
        trip.stream(nbytes)
        return trip

    def barrier(self, call: Call) -> None:
        algorithms.barrier(self._trip(call))

    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None:
        name, packed = reduction.name_of(op), self.compressor
        # Small ones, which are often metrics, stay exact.
        large = flat.nbytes > self.lane.terms.small_bytes and self.lane.world > 1
        if packed is not None and large and packed.suits(name, flat.dtype):
            average = name == "AVG"
            if self.lane.world == 2:
                pair = packed.begin_pair(identity, flat, average=average)
                algorithms.compressed_pair(self._streaming(call, pair.payload_bytes), pair)
                return
            exchanges = packed.begin_pieces(identity, flat, self.lane.rank, self.lane.world, average=average)
            algorithms.compressed_all_reduce(self._trip(call), exchanges)
        else:
            algorithms.all_reduce(self._streaming(call, flat.nbytes), flat, op)

    def reduce(self, call: Call, flat: Tensor, op: Op, root: int) -> None:
        algorithms.reduce(self._trip(call), flat, op, root)

    def broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        algorithms.broadcast(self._trip(call), flat, root)

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> None:
        algorithms.all_gather(self._trip(call), outputs, mine)

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None:
        algorithms.gather(self._trip(call), outputs, mine, root)

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        algorithms.scatter(self._trip(call), output, inputs, root)

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None:
        algorithms.reduce_scatter(self._trip(call), output, inputs, op)

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        algorithms.all_to_all(self._trip(call), outputs, inputs)


class LocalPath:
    """Everything through the shared memory of one machine."""

    def __init__(self, local: LocalGroup) -> None:
        self._local = local

    def barrier(self, call: Call) -> None:
        self._local.barrier(timeout_s=call.left_s, note=call.about)

    def all_reduce(self, call: Call, flat: Tensor, op: Op, identity: object = None) -> None:
        self._local.all_reduce(flat, op, timeout_s=call.left_s, note=call.about)

    def reduce(self, call: Call, flat: Tensor, op: Op, root: int) -> None:
        self._local.reduce(flat, root, op, timeout_s=call.left_s, note=call.about)

    def broadcast(self, call: Call, flat: Tensor, root: int) -> None:
        self._local.broadcast(flat, root, timeout_s=call.left_s, note=call.about)

    def all_gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor) -> None:
        whole = _room(outputs)
        self._local.all_gather(whole, mine, timeout_s=call.left_s, note=call.about)
        _deal(whole, outputs)

    def gather(self, call: Call, outputs: Sequence[Tensor], mine: Tensor, root: int) -> None:
        whole = _room(outputs) if outputs else None
        self._local.gather(whole, mine, root, timeout_s=call.left_s, note=call.about)
        if whole is not None:
            _deal(whole, outputs)

    def scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], root: int) -> None:
        whole = _joined(inputs) if inputs else None
        self._local.scatter(output, whole, root, timeout_s=call.left_s, note=call.about)

    def reduce_scatter(self, call: Call, output: Tensor, inputs: Sequence[Tensor], op: Op) -> None:
        self._local.reduce_scatter(output, _joined(inputs), op, timeout_s=call.left_s, note=call.about)

    def all_to_all(self, call: Call, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        whole = _room(outputs)
        counts, wanted = [part.numel() for part in inputs], [part.numel() for part in outputs]
        self._local.all_to_all(whole, _joined(inputs), wanted, counts, timeout_s=call.left_s, note=call.about)
        _deal(whole, outputs)


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """The parts as one flat tensor where they lie one behind the other, without copying."""
    first = parts[0]
    storage, end = first.untyped_storage().data_ptr(), first.storage_offset()
    for part in parts:
        if part.untyped_storage().data_ptr() != storage or part.storage_offset() != end:
            return None
        end += part.numel()
    return first.as_strided((end - first.storage_offset(),), (1,))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    whole = _whole(parts)
    return torch.cat(list(parts)) if whole is None else whole


def _room(parts: Sequence[Tensor]) -> Tensor:
    """Where the parts can be received together; _deal() then brings each to its place."""
    whole = _whole(parts)
    return torch.empty(sum(part.numel() for part in parts), dtype=parts[0].dtype) if whole is None else whole


def _deal(whole: Tensor, parts: Sequence[Tensor]) -> None:
    if _whole(parts) is not None:
        return
    for part, values in zip(parts, whole.split([part.numel() for part in parts]), strict=True):
        part.copy_(values)

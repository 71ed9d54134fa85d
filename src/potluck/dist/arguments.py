"""The arguments of a collective: owns their checks, before anything is sent, and the errors."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor

from potluck.dist import reduction
from potluck.dist.host_tensors import HostTensor
from potluck.dist.record import Header
from potluck.errors import CollectiveError, CollectiveTimeoutError, PotluckError

_MOST_SIZES = 32


def header_of(
    name: str, tensors: Sequence[Tensor], *, op: Any = None, root: int | None = None, sized: bool = True
) -> Header:
    """The header of a collective, with what must agree between ranks: the shape of one tensor, or the number of
    elements of each of several."""
    reduced = "" if op is None else reduction.name_of(op)
    if sized and len(tensors) == 1:
        return _header_of_one(name, tensors[0].shape, tensors[0].dtype, reduced, root)
    return Header(
        op=name,
        dtype=_dtype_text(tensors[0].dtype) if tensors else "",
        shape=tuple(tensor.numel() for tensor in tensors[:_MOST_SIZES]) if sized and tensors else None,
        # Where sizes may differ, this must not: ranks compare it.
        nbytes=sum(tensor.numel() * tensor.element_size() for tensor in tensors) if sized else 0,
        reduction=reduced,
        root=root,
    )


@functools.lru_cache(maxsize=1024)
def _header_of_one(name: str, shape: torch.Size, dtype: torch.dtype, reduced: str, root: int | None) -> Header:
    """Cached: training repeats the same collectives."""
    nbytes = shape.numel() * dtype.itemsize
    return Header(
        op=name, dtype=_dtype_text(dtype), shape=tuple(shape), nbytes=nbytes, reduction=reduced, root=root
    )


def _dtype_text(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_list(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def as_lists(tensors: Any) -> list[list[Tensor]]:
    """A list of lists, from a list of lists or one list."""
    return [list(tensors)] if tensors and isinstance(tensors[0], Tensor) else [list(part) for part in tensors]


def options(kind: Any, given: Any, timeout: timedelta | None = None) -> Any:
    """torch's options. Direct callers of the group may pass a bare operation, a root, or nothing."""
    if isinstance(given, kind) or hasattr(given, "asyncOp"):
        return given
    options = kind()
    if isinstance(given, int) and not isinstance(given, bool) and hasattr(options, "rootRank"):
        options.rootRank = given
    elif given is not None:
        options.reduceOp = given
    if timeout is not None:
        options.timeout = timeout
    return options


def check_rank(name: str, rank: int | None, world: int) -> None:
    if rank is not None and not 0 <= rank < world:
        raise CollectiveError(
            f"{name}: there is no rank {rank} in this group", hint=f"its ranks are 0 to {world - 1}"
        )


def dense(name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided:
        raise CollectiveError(f"{name} takes no sparse tensors", hint="use to_dense(), or all_reduce with SUM")


def one_each(name: str, parts: Sequence[Tensor], world: int) -> None:
    if len(parts) != world:
        raise CollectiveError(f"{name} needs one tensor for each of {world} ranks, got {len(parts)}")


def alike(name: str, tensors: Sequence[Tensor]) -> None:
    first = tensors[0]
    for tensor in tensors[1:]:
        if tensor.dtype != first.dtype or tensor.numel() != first.numel():
            raise CollectiveError(
                f"{name}: its tensors must have one size and type, not {first.dtype} {tuple(first.shape)} and "
                f"{tensor.dtype} {tuple(tensor.shape)}"
            )


def cut(name: str, whole: Tensor, part: Tensor, world: int) -> list[Tensor]:
    if whole.numel() != part.numel() * world or whole.dtype != part.dtype:
        raise CollectiveError(
            f"{name}: one tensor must be {world} times the other, not {whole.dtype} {tuple(whole.shape)} and "
            f"{part.dtype} {tuple(part.shape)}"
        )
    if not part.numel():
        return [whole.detach().reshape(-1)] * world
    if whole.is_contiguous():
        return list(whole.detach().view(-1).split(part.numel()))
    if whole.shape[0] % world == 0:
        return list(whole.detach().tensor_split(world))
    raise CollectiveError(
        f"{name}: a tensor of shape {tuple(whole.shape)} is not contiguous, so {world} ranks cannot divide it",
        hint="call contiguous() first",
    )


def split_counts(name: str, tensor: Tensor, splits: list[int] | None, world: int) -> list[int]:
    """Elements for each rank, from rows for each rank."""
    rows = tensor.shape[0] if tensor.dim() else 0
    width = tensor.numel() // rows if rows else 1
    if not splits:
        if rows % world:
            raise CollectiveError(f"{name}: {rows} rows cannot be split evenly between {world} ranks")
        splits = [rows // world] * world
    if len(splits) != world or sum(splits) != rows:
        raise CollectiveError(f"{name}: the splits {splits} do not add up to {rows} rows for {world} ranks")
    return [count * width for count in splits]


def bundles(hosts: Sequence[HostTensor]) -> Iterable[tuple[Tensor, list[HostTensor]]]:
    """One flat tensor for all of a dtype, so that many small ones cost one exchange."""
    if len(hosts) == 1:
        yield hosts[0].flat, []
        return
    by_type: dict[torch.dtype, list[HostTensor]] = {}
    for host in hosts:
        by_type.setdefault(host.flat.dtype, []).append(host)
    for same in by_type.values():
        yield torch.cat([host.flat for host in same]), same


def unbundle(flat: Tensor, hosts: Sequence[HostTensor]) -> None:
    if hosts:
        for host, values in zip(hosts, flat.split([host.flat.numel() for host in hosts]), strict=True):
            host.flat.copy_(values)


def with_context(call: str, header: Header, error: BaseException) -> BaseException:
    """The error with the name of its collective, unless its text names it."""
    if not isinstance(error, PotluckError) or call.partition(" ")[2] in error.what:
        return error
    late = " reached its timeout and failed" if isinstance(error, CollectiveTimeoutError) else ""
    return type(error)(f"{call} ({header.details()}){late}: {error.what}", hint=error.hint)

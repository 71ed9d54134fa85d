"""The arithmetic of reductions, on flat tensors in host memory: which operation takes which dtype, and how.

A reduction has four steps, one function each:

    check       refuse what makes no sense, before anything is sent
    premul      multiply this rank's own values by its factor (PREMUL_SUM only)
    accumulate  add the values of another rank into a tensor of the working dtype
    finish      what remains when all values are in (AVG divides)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from potluck.dist.counting import spends
from potluck.errors import CollectiveError

Op = Any
"""A `ReduceOp` or one of its members: torch passes either, and PREMUL_SUM only as an object."""

_HALVES = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_COMPLEX = frozenset({torch.complex32, torch.complex64, torch.complex128})
_WHOLE = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})

_DTYPES: dict[str, frozenset[torch.dtype]] = {
    "SUM": _FLOATS | _COMPLEX | _WHOLE,
    "AVG": _FLOATS | _COMPLEX | _WHOLE - {torch.bool},
    "PREMUL_SUM": _FLOATS | _COMPLEX,
    "PRODUCT": _FLOATS | _WHOLE,
    "MIN": _FLOATS | _WHOLE,
    "MAX": _FLOATS | _WHOLE,
    "BAND": _WHOLE,
    "BOR": _WHOLE,
    "BXOR": _WHOLE,
}
_ROUNDING = frozenset({"SUM", "AVG", "PREMUL_SUM", "PRODUCT"})


def name_of(op: Op) -> str:
    """SUM, AVG, ...: the name of an operation, of either of torch's two types."""
    if type(op) is str:  # from plain()
        return op
    name = getattr(getattr(op, "op", op), "name", None)
    if name not in _DTYPES:
        raise CollectiveError(f"{op!r} is not a reduction", hint="use one of torch.distributed.ReduceOp")
    return str(name)


def plain(op: Op) -> Op:
    """The operation's name, if that is enough, because torch's objects are slow to read."""
    name = name_of(op)
    return op if name == "PREMUL_SUM" else name


def supports(op: Op, dtype: torch.dtype) -> bool:
    """True if values of this dtype can be reduced by `op`."""
    return dtype in _DTYPES[name_of(op)]


def check(op: Op, dtype: torch.dtype) -> None:
    """Raise CollectiveError for a combination that `supports` refuses; it says what to do instead."""
    if not supports(op, dtype):
        name = name_of(op)
        raise CollectiveError(f"{name} cannot reduce {dtype}", hint=_instead(name, dtype))


def working_dtype(op: Op, dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results: float32 for 16-bit floats where rounding errors would add up."""
    check(op, dtype)
    return _HALVES.get(dtype, dtype) if name_of(op) in _ROUNDING else dtype


@spends("reduction")
def premul(op: Op, values: Tensor) -> None:
    """For PREMUL_SUM, multiply this rank's values, of the working dtype, by its factor, in place.

    The factor is a number or a tensor of one element; each rank may have its own.
    """
    if name_of(op) != "PREMUL_SUM":
        return
    factor = getattr(op, "factor", None)
    if factor is None and not hasattr(torch.distributed.ReduceOp, "factor"):
        raise CollectiveError(
            f"torch {torch.__version__} does not pass the factor of PREMUL_SUM to a backend in Python",
            hint="multiply the tensor first and use SUM, or install torch 2.13 or newer",
        )
    if factor is None:
        raise CollectiveError(
            "PREMUL_SUM has no factor",
            hint="torch.distributed._make_nccl_premul_sum(factor) makes an operation that has one",
        )
    values.mul_(factor.item() if isinstance(factor, Tensor) else factor)


@spends("reduction")
def accumulate(op: Op, into: Tensor, other: Tensor) -> None:
    """Reduce `other` into `into`, in place.

    Args:
        into: [n] of the working dtype.
        other: [n] of the working dtype, or of the dtype that the ranks reduce, which is then widened.
    """
    name = name_of(op)
    if name in ("SUM", "AVG", "PREMUL_SUM"):
        into.add_(other)  # for bools: or
    elif name == "PRODUCT":
        into.mul_(other)  # for bools: and
    elif name == "MIN":
        torch.minimum(into, other, out=into)  # a NaN on any rank is a NaN for all
    elif name == "MAX":
        torch.maximum(into, other, out=into)
    elif name == "BAND":
        into.bitwise_and_(other)
    elif name == "BOR":
        into.bitwise_or_(other)
    else:
        into.bitwise_xor_(other)


@spends("reduction")
def finish(op: Op, values: Tensor, world: int) -> None:
    """The last step on values of the working dtype that hold every rank's part, in place: AVG divides.

    Whole numbers are rounded towards zero, as by NCCL; their sum wraps around if it is too large for the type.
    """
    if name_of(op) != "AVG" or world == 1:
        return
    if values.dtype not in _WHOLE:
        values.div_(world)
    elif world <= torch.iinfo(values.dtype).max:
        values.div_(world, rounding_mode="trunc")
    else:  # torch would make the divisor a number of the same type
        values.copy_(values.long().div_(world, rounding_mode="trunc"))


def _instead(name: str, dtype: torch.dtype) -> str:
    if dtype not in _DTYPES["SUM"]:
        return "torch itself cannot add values of this type: convert the tensor first, for example to float32"
    if name in ("BAND", "BOR", "BXOR"):
        return "bitwise reductions are for whole numbers and bools: convert the tensor, or take another operation"
    if dtype in _COMPLEX:
        return "complex numbers can be reduced by SUM, AVG and PREMUL_SUM; reduce abs() or view_as_real(tensor)"
    if name == "AVG":
        return "bools have no average: use SUM, which is their or, or convert the tensor to float32"
    return "the result would not be a whole number: multiply before and use SUM, or convert the tensor to float32"

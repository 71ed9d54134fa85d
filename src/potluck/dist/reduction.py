"""Owns the arithmetic of reductions: which operation takes which dtype, and how two tensors become one.

It must not know of ranks, links or schedules: it is given flat tensors in host memory.

A reduction goes through four moments, and each is one function here:

    check      refuse what makes no sense, before anything is sent
    premul     this rank's own values, multiplied by its factor (PREMUL_SUM alone)
    accumulate the values of another rank, into a tensor of the working dtype
    finish     what is left when all values are in (AVG divides)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from potluck.dist.counting import spends
from potluck.errors import CollectiveError

Op = Any
"""A `ReduceOp`, or one of its members: torch hands over either, and PREMUL_SUM only as an object."""

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
    """SUM, AVG, ...: the operation's name, whichever of torch's two types it comes as."""
    if type(op) is str:  # it went through plain()
        return op
    name = getattr(getattr(op, "op", op), "name", None)
    if name not in _DTYPES:
        raise CollectiveError(f"{op!r} is no reduction", hint="use one of torch.distributed.ReduceOp")
    return str(name)


def plain(op: Op) -> Op:
    """The same operation as its name, where that says all: torch's objects are slow to look at."""
    name = name_of(op)
    return op if name == "PREMUL_SUM" else name


def supports(op: Op, dtype: torch.dtype) -> bool:
    """True if values of this dtype can be reduced by `op`."""
    return dtype in _DTYPES[name_of(op)]


def check(op: Op, dtype: torch.dtype) -> None:
    """Refuse what `supports` does not.

    Raises:
        CollectiveError: it names the operation and the dtype, and says what to do instead.
    """
    if not supports(op, dtype):
        name = name_of(op)
        raise CollectiveError(f"{name} cannot reduce {dtype}", hint=_instead(name, dtype))


def working_dtype(op: Op, dtype: torch.dtype) -> torch.dtype:
    """What partial results are kept and sent in: float32 for 16-bit floats wherever rounding would add up."""
    check(op, dtype)
    return _HALVES.get(dtype, dtype) if name_of(op) in _ROUNDING else dtype


@spends("reduction")
def premul(op: Op, values: Tensor) -> None:
    """Multiply this rank's values, of the working dtype, by its factor, in place; nothing but for PREMUL_SUM.

    The factor is a number or a tensor of one element; each rank may have its own.
    """
    if name_of(op) != "PREMUL_SUM":
        return
    factor = getattr(op, "factor", None)
    if factor is None and not hasattr(torch.distributed.ReduceOp, "factor"):
        raise CollectiveError(
            f"torch {torch.__version__} does not tell a backend in Python the factor of PREMUL_SUM",
            hint="multiply the tensor before and use SUM, or install torch 2.13 or newer",
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
        other: [n] of the working dtype, or of the dtype that the ranks reduce: then it is widened on the way.
    """
    name = name_of(op)
    if name in ("SUM", "AVG", "PREMUL_SUM"):
        into.add_(other)  # of bools: or
    elif name == "PRODUCT":
        into.mul_(other)  # of bools: and
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
    """The last touch on values of the working dtype that hold every rank's part, in place: AVG divides.

    Whole numbers towards zero, as NCCL does: their sum wraps around where it is too large for the type.
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

"""The arithmetic of reductions against plain torch, and what is refused."""

from __future__ import annotations

from functools import reduce

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from potluck.dist import reduction
from potluck.errors import CollectiveError

ReduceOp = dist.ReduceOp
NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex32, torch.complex64, torch.complex128)
WORLD = 5

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def allowed(name: str, dtype: torch.dtype) -> bool:
    """Written out a second time, as the issue and torch's backends have it."""
    if name.startswith("B"):
        return dtype in WHOLE
    if dtype in COMPLEX:
        return name in ("SUM", "AVG")
    return name != "AVG" or dtype != torch.bool


def inputs(dtype: torch.dtype, count: int = 97) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    if dtype.is_complex:
        return [torch.randn(count, dtype=torch.complex64, generator=generator).to(dtype) for _ in range(WORLD)]
    if dtype.is_floating_point:
        return [torch.randn(count, generator=generator).to(dtype) for _ in range(WORLD)]
    top = 2 if dtype == torch.bool else 4
    return [torch.randint(0, top, (count,), generator=generator).to(dtype) for _ in range(WORLD)]


def reference(name: str, parts: list[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    if dtype == torch.bool:
        stacked = torch.stack(parts)
        if name in ("SUM", "MAX", "BOR"):
            return stacked.any(0)
        return stacked.all(0) if name != "BXOR" else stacked.sum(0) % 2 == 1
    wide = parts
    if dtype.is_complex:
        wide = [part.to(torch.complex128) for part in parts]
    elif dtype.is_floating_point:
        wide = [part.double() for part in parts]
    stacked = torch.stack(wide)
    whole = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}
    if name in whole:
        return reduce(whole[name], wide)
    if name == "AVG" and dtype in WHOLE:
        return stacked.sum(0).div(len(parts), rounding_mode="trunc").to(dtype)
    simple = {"SUM": stacked.sum, "AVG": stacked.mean, "PRODUCT": stacked.prod, "MIN": stacked.amin}
    return simple.get(name, stacked.amax)(0).to(dtype)


def exact(values: Tensor) -> Tensor:
    return torch.view_as_real(values) if values.is_complex() else values


def reduced(op: reduction.Op, parts: list[Tensor]) -> Tensor:
    dtype = parts[0].dtype
    into = parts[0].to(reduction.working_dtype(op, dtype), copy=True)
    reduction.premul(op, into)
    for other in parts[1:]:
        reduction.accumulate(op, into, other)
    reduction.finish(op, into, len(parts))
    return into.to(dtype)


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_operation_on_every_dtype_is_right_or_refused(name: str, dtype: torch.dtype) -> None:
    op = getattr(ReduceOp, name)
    assert reduction.supports(op, dtype) == allowed(name, dtype)
    if not allowed(name, dtype):
        with pytest.raises(CollectiveError, match=f"{name} cannot reduce {dtype}") as caught:
            reduction.check(op, dtype)
        assert caught.value.hint
        with pytest.raises(CollectiveError):
            reduction.working_dtype(op, dtype)
        return
    reduction.check(op, dtype)
    parts = inputs(dtype)
    before = [part.clone() for part in parts]
    got = reduced(op, parts)
    assert got.dtype == dtype
    want = reference(name, parts)
    torch.testing.assert_close(exact(got), exact(want))
    assert all(torch.equal(exact(a), exact(b)) for a, b in zip(parts, before))


@pytest.mark.parametrize("dtype", WHOLE[1:], ids=str)
@pytest.mark.parametrize("world", [2, 3, 200])
def test_the_average_of_whole_numbers_is_their_sum_divided_towards_zero(dtype: torch.dtype, world: int) -> None:
    """As NCCL has it. 200 is more than int8 can hold."""
    limits = torch.iinfo(dtype)
    totals = [0, 1, 5, 6, 7, 100, limits.max, limits.min, *([-1, -5, -6, -7, -100] if limits.min else [])]
    values = torch.tensor(totals, dtype=dtype)
    reduction.finish(ReduceOp.AVG, values, world)
    assert values.tolist() == [abs(total) // world * (-1 if total < 0 else 1) for total in totals]


def test_a_sum_of_whole_numbers_wraps_around_before_it_is_divided() -> None:
    parts = [torch.tensor([100, -100], dtype=torch.int8)] * 2
    assert reduced(ReduceOp.AVG, parts).tolist() == [-28, 28]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_halves_are_added_up_in_float32(dtype: torch.dtype) -> None:
    """4096 ones: added in 16 bits the sum would stand still at 256 (bf16) or 2048 (fp16)."""
    into = torch.ones(3, dtype=reduction.working_dtype(ReduceOp.SUM, dtype))
    for _ in range(4095):
        reduction.accumulate(ReduceOp.SUM, into, torch.ones(3, dtype=dtype))
    assert into.to(dtype).tolist() == [4096.0] * 3
    assert reduction.working_dtype(ReduceOp.MAX, dtype) == dtype  # nothing to lose there


@pytest.mark.parametrize("dtype", [*WHOLE, *FLOATS, *COMPLEX], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_empty_tensors(name: str, dtype: torch.dtype) -> None:
    if allowed(name, dtype):
        assert reduced(getattr(ReduceOp, name), inputs(dtype, 0)).shape == (0,)


@pytest.mark.parametrize("dtype", [*FLOATS, torch.complex64], ids=str)
def test_every_rank_has_its_own_factor(dtype: torch.dtype) -> None:
    parts = inputs(dtype)
    factors = [0.5, 2.0, torch.tensor(3.0), torch.tensor([-1.0]), 0.25]
    working = []
    for part, factor in zip(parts, factors):
        op = dist._make_nccl_premul_sum(factor)  # type: ignore[attr-defined]
        assert reduction.name_of(op) == "PREMUL_SUM"
        assert reduction.supports(op, dtype)
        values = part.to(reduction.working_dtype(op, dtype), copy=True)
        reduction.premul(op, values)
        working.append(values)
    for other in working[1:]:
        reduction.accumulate(op, working[0], other)
    reduction.finish(op, working[0], WORLD)
    want = sum(float(factor) * part.to(working[0].dtype) for part, factor in zip(parts, factors))
    assert isinstance(want, Tensor)
    torch.testing.assert_close(working[0], want)


def test_a_factor_must_be_there_and_counts_for_nothing_else() -> None:
    with pytest.raises(CollectiveError, match="no factor"):
        reduction.premul(ReduceOp.PREMUL_SUM, torch.ones(3))
    values = torch.ones(3)
    reduction.premul(ReduceOp.SUM, values)
    assert values.tolist() == [1.0] * 3


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_factors_are_for_floating_point_numbers(dtype: torch.dtype) -> None:
    with pytest.raises(CollectiveError, match=f"PREMUL_SUM cannot reduce {dtype}"):
        reduction.check(ReduceOp.PREMUL_SUM, dtype)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.quint8], ids=str)
def test_what_torch_cannot_add_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(CollectiveError, match=str(dtype)) as caught:
        reduction.check(ReduceOp.SUM, dtype)
    assert "convert" in caught.value.hint


def test_an_operation_comes_as_a_member_or_as_an_object() -> None:
    for name in NAMES:
        member = getattr(ReduceOp, name)
        assert reduction.name_of(member) == reduction.name_of(ReduceOp(member)) == name
        assert reduction.name_of(name) == name
    with pytest.raises(CollectiveError, match="not a reduction"):
        reduction.name_of(object())  # type: ignore[arg-type]


def test_a_refusal_is_a_runtime_error_as_with_other_backends() -> None:
    with pytest.raises(RuntimeError):
        reduction.check(ReduceOp.BAND, torch.float32)


@pytest.mark.parametrize("name", ["MIN", "MAX", "SUM", "PRODUCT"])
def test_a_nan_on_one_rank_is_a_nan_for_all(name: str) -> None:
    parts = [torch.tensor([1.0]), torch.tensor([float("nan")]), torch.tensor([2.0])]
    assert reduced(getattr(ReduceOp, name), parts).isnan().all()

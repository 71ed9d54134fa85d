"""The cases of the conformance suite: each calls a collective and compares with a value computed alone.

It knows torch.distributed's interface, and of Potluck only the name of its backend: gloo can be put in its place.
"""

from __future__ import annotations

import functools
import itertools
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

OPS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
WHOLE = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COMPLEX = (torch.complex64, torch.complex128)
TYPES = (*WHOLE, *FLOATS, *COMPLEX)
LAYOUTS = ("plain", "transposed", "strided", "empty", "scalar", "large")
FEW = (torch.float32, torch.bfloat16, torch.int64, torch.bool)

Case = tuple[str, Callable[[int, int], None]]


def allowed(op: str, dtype: torch.dtype) -> bool:
    if op == "AVG":
        return dtype != torch.bool
    if op in ("BAND", "BOR", "BXOR"):
        return dtype in WHOLE
    return op == "SUM" or dtype not in COMPLEX


@functools.cache
def values(rank: int, dtype: torch.dtype, layout: str = "plain") -> Tensor:
    """Of one rank: small whole numbers, so that every order of adding gives the same bits. Not to be written to."""
    shape = {"empty": (0, 3), "scalar": (), "large": (37, 61)}.get(layout, (4, 6))
    count = 1
    for size in shape:
        count *= size
    numbers = (torch.arange(count) * 7 + rank * 5) % 3 + 1
    tensor = (numbers > 1 if dtype == torch.bool else numbers.to(dtype)).reshape(shape)
    if dtype in COMPLEX:
        tensor = tensor * (1 + 1j) if count else tensor
    return tensor


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values, otherwise in memory."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2, dtype=tensor.dtype, device=tensor.device)
        wide[..., ::2] = tensor
        return wide[..., ::2]
    return tensor.clone()


@functools.cache
def wanted_of(op: str, ranks: tuple[int, ...], dtype: torch.dtype, layout: str = "plain") -> Tensor:
    """The reduction of what these ranks have. Not to be written to."""
    return reduced(op, [values(rank, dtype, layout) for rank in ranks])


def reduced(op: str, parts: list[Tensor]) -> Tensor:
    """Computed in one process, without the backend's own arithmetic."""
    dtype = parts[0].dtype
    stack = torch.stack(parts)
    if op in ("BAND", "BOR", "BXOR"):
        step = {"BAND": torch.bitwise_and, "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor}[op]
        return functools.reduce(step, parts)
    if dtype == torch.bool:
        return stack.any(0) if op in ("SUM", "MAX") else stack.all(0)
    if op == "MIN":
        return stack.amin(0)
    if op == "MAX":
        return stack.amax(0)
    wide = stack.to(torch.complex128 if dtype in COMPLEX else torch.float64 if dtype in FLOATS else torch.int64)
    total = wide.prod(0) if op == "PRODUCT" else wide.sum(0)
    if op == "AVG":
        total = total / len(parts) if dtype not in WHOLE else total.div(len(parts), rounding_mode="trunc")
    return total.to(dtype)


def same(found: Tensor, wanted: Tensor) -> None:
    found = found.cpu()
    if found.dtype == wanted.dtype and torch.equal(found, wanted):
        return  # most are, and the other way to look takes longer than a collective
    torch.testing.assert_close(found, wanted, rtol=1e-2 if wanted.dtype in FLOATS[:2] else 1e-6, atol=1e-6)


def finish(work: Any, asynchronous: bool) -> None:
    assert (work is not None) == asynchronous
    if work is not None:
        assert work.wait(timedelta(seconds=30))
        assert work.is_completed()


_calls = itertools.count()


def roots(world: int) -> list[int]:
    """Every rank in its turn, from case to case: all ranks go through the same cases."""
    return [next(_calls) % world]


def on(device: str, tensor: Tensor) -> Tensor:
    """A copy there."""
    return tensor.clone() if device == "cpu" else tensor.to(device)


def reductions(device: str, types: Sequence[torch.dtype]) -> Iterator[Case]:
    for op, dtype in itertools.product(OPS, types):
        if allowed(op, dtype):
            yield (
                f"all_reduce {op} {dtype}",
                functools.partial(all_reduce, op=op, dtype=dtype, layout="plain", later=False, device=device),
            )
    for layout, later, dtype in itertools.product(LAYOUTS, (False, True), FEW):
        settings = {"op": "SUM", "dtype": dtype, "layout": layout, "later": later, "device": device}
        yield f"all_reduce SUM {dtype} {layout} async={later}", functools.partial(all_reduce, **settings)
    for layout, later, op in itertools.product(LAYOUTS, (False, True), ("SUM", "MAX", "AVG")):
        dtype = torch.float16 if later else torch.float32
        settings = {"op": op, "dtype": dtype, "layout": layout, "later": later, "device": device}
        yield f"reduce {op} {dtype} {layout} async={later}", functools.partial(reduce, **settings)
        yield f"reduce_scatter {op} {dtype} {layout} async={later}", functools.partial(reduce_scatter, **settings)
    yield "uneven reduce_scatter", functools.partial(uneven_reduce_scatter, device=device)
    for dtype in WHOLE[:-1]:  # bools have no average
        for function in (whole_averages_of_all, whole_averages_in_parts):
            yield f"{function.__name__} {dtype}", functools.partial(function, dtype=dtype, device=device)


def all_reduce(
    rank: int, world: int, *, op: str, dtype: torch.dtype, layout: str, later: bool, device: str
) -> None:
    tensor = laid_out(on(device, values(rank, dtype, layout)), layout)
    finish(dist.all_reduce(tensor, getattr(dist.ReduceOp, op), async_op=later), later)
    same(tensor, wanted_of(op, tuple(range(world)), dtype, layout))


def reduce(rank: int, world: int, *, op: str, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    wanted = wanted_of(op, tuple(range(world)), dtype, layout)
    for root in roots(world):
        tensor = laid_out(on(device, values(rank, dtype, layout)), layout)
        finish(dist.reduce(tensor, root, getattr(dist.ReduceOp, op), async_op=later), later)
        if rank == root:
            same(tensor, wanted)
    tensor = on(device, values(rank, dtype, layout))
    dist.group.WORLD.reduce(tensor, 0, getattr(dist.ReduceOp, op)).wait()  # type: ignore[union-attr]
    if rank == 0:
        same(tensor, wanted)


def reduce_scatter(
    rank: int, world: int, *, op: str, dtype: torch.dtype, layout: str, later: bool, device: str
) -> None:
    kind = getattr(dist.ReduceOp, op)

    # What rank s has for rank t are the values of a rank s + 3 t.
    wanted = wanted_of(op, tuple(source + 3 * rank for source in range(world)), dtype, layout)
    inputs = [laid_out(on(device, values(rank + 3 * to, dtype, layout)), layout) for to in range(world)]
    output = laid_out(on(device, torch.zeros_like(wanted)), layout)
    finish(dist.reduce_scatter(output, inputs, kind, async_op=later), later)
    same(output, wanted)
    rows = laid_out(torch.stack([tensor.contiguous().view(-1) for tensor in inputs]), layout)
    flat = on(device, torch.zeros(1, wanted.numel(), dtype=dtype))
    finish(dist.reduce_scatter_tensor(flat, rows, kind, async_op=later), later)
    same(flat, wanted.reshape(1, -1))


def uneven_reduce_scatter(rank: int, world: int, *, device: str) -> None:
    """Rank t gets t rows, so that the first gets nothing."""
    for op, later in (("SUM", False), ("MAX", True)):
        inputs = [on(device, torch.full((to, 3), float(rank + to))).t() for to in range(world)]
        output = on(device, torch.zeros(3, rank))
        finish(dist.reduce_scatter(output, inputs, getattr(dist.ReduceOp, op), async_op=later), later)
        same(output, reduced(op, [torch.full((3, rank), float(source + rank)) for source in range(world)]))
        assert all(bool((part == rank + to).all()) for to, part in enumerate(inputs))


def whole_numbers(rank: int, dtype: torch.dtype, count: int) -> Tensor:
    """[count] from -60 to 60, or from 0: as many remainders as there are, and sums that overflow int8."""
    numbers = (torch.arange(count) * 31 + rank * 17) % 121
    return (numbers if dtype == torch.uint8 else numbers - 60).to(dtype)


def average(parts: list[Tensor]) -> Tensor:
    """Python's own arithmetic: a sum that wraps around as the type does, then C's division, towards zero."""
    limits = torch.iinfo(parts[0].dtype)
    means = []
    for numbers in zip(*(part.tolist() for part in parts), strict=True):
        total = (sum(numbers) - limits.min) % (limits.max - limits.min + 1) + limits.min
        means.append(abs(total) // len(parts) * (-1 if total < 0 else 1))
    return torch.tensor(means, dtype=parts[0].dtype)


def whole_averages_of_all(rank: int, world: int, *, dtype: torch.dtype, device: str) -> None:
    """A few numbers and some thousands, which go different ways."""
    for count in (3, 5000):
        wanted = average([whole_numbers(other, dtype, count) for other in range(world)])
        tensor = on(device, whole_numbers(rank, dtype, count))
        dist.all_reduce(tensor, dist.ReduceOp.AVG)
        same(tensor, wanted)
        tensor = on(device, whole_numbers(rank, dtype, count))
        (root,) = roots(world)
        dist.reduce(tensor, root, dist.ReduceOp.AVG)
        same(tensor, wanted if rank == root else whole_numbers(rank, dtype, count))


def whole_averages_in_parts(rank: int, world: int, *, dtype: torch.dtype, device: str) -> None:
    """Equal parts, and parts of t rows for rank t."""
    for sizes in ([700] * world, [3 * to for to in range(world)]):
        inputs = [on(device, whole_numbers(rank + 3 * to, dtype, size)) for to, size in enumerate(sizes)]
        output = on(device, torch.zeros(sizes[rank], dtype=dtype))
        dist.reduce_scatter(output, inputs, dist.ReduceOp.AVG)
        same(output, average([whole_numbers(source + 3 * rank, dtype, sizes[rank]) for source in range(world)]))


def movements(device: str, types: Sequence[torch.dtype]) -> Iterator[Case]:
    for function in (
        broadcast,
        all_gather,
        all_gather_into,
        gather,
        scatter,
        all_to_all,
        all_to_all_single,
        message,
    ):
        for layout, later, dtype in itertools.product(LAYOUTS, (False, True), (torch.float32, torch.bfloat16)):
            settings = {"dtype": dtype, "layout": layout, "later": later, "device": device}
            yield f"{function.__name__} {dtype} {layout} async={later}", functools.partial(function, **settings)
        for dtype in types:
            settings = {"dtype": dtype, "layout": "plain", "later": False, "device": device}
            yield f"{function.__name__} {dtype}", functools.partial(function, **settings)
    yield "barrier", functools.partial(barrier, later=False)
    yield "barrier async", functools.partial(barrier, later=True)
    yield "coalesced", functools.partial(coalesced, device=device)
    if hasattr(dist.ReduceOp, "factor"):  # not before torch 2.13
        yield "premultiplied", functools.partial(premultiplied, device=device)
    yield "objects", objects
    yield "any source", functools.partial(any_source, device=device)
    yield "many at once", functools.partial(many_at_once, device=device)
    yield "in inference mode", functools.partial(in_inference_mode, device=device)
    yield "futures", functools.partial(futures, device=device)
    yield "futures of several", futures_of_several
    yield "chained", chained
    yield "sub-groups", functools.partial(sub_groups, device=device)
    yield "split", functools.partial(split, device=device)
    yield "sparse", sparse


def broadcast(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    for root in roots(world):
        tensor = laid_out(on(device, values(rank, dtype, layout)), layout)
        finish(dist.broadcast(tensor, root, async_op=later), later)
        same(tensor, values(root, dtype, layout))


def all_gather(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    mine = laid_out(on(device, values(rank, dtype, layout)), layout)
    outputs = [laid_out(torch.zeros_like(mine), layout) for _ in range(world)]
    finish(dist.all_gather(outputs, mine, async_op=later), later)
    for other in range(world):
        same(outputs[other], values(other, dtype, layout))


def all_gather_into(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    mine = laid_out(on(device, values(rank, dtype, layout)), layout)
    output = laid_out(on(device, torch.zeros(world, mine.numel(), dtype=dtype)), layout)
    finish(
        dist.all_gather_into_tensor(output, mine.reshape(1, -1) if layout == "plain" else mine, async_op=later),
        later,
    )
    same(output, torch.stack([values(other, dtype, layout).reshape(-1) for other in range(world)]))


def gather(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    for root in roots(world):
        mine = laid_out(on(device, values(rank, dtype, layout)), layout)
        outputs = [laid_out(torch.zeros_like(mine), layout) for _ in range(world)] if rank == root else None
        finish(dist.gather(mine, outputs, root, async_op=later), later)
        for other, output in enumerate(outputs or []):
            same(output, values(other, dtype, layout))


def scatter(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    for root in roots(world):
        inputs = [laid_out(on(device, values(other, dtype, layout)), layout) for other in range(world)]
        output = laid_out(torch.zeros_like(inputs[0]), layout)
        finish(dist.scatter(output, inputs if rank == root else None, root, async_op=later), later)
        same(output, values(rank, dtype, layout))


def all_to_all(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    inputs = [laid_out(on(device, values(rank + 2 * to, dtype, layout)), layout) for to in range(world)]
    outputs = [laid_out(torch.zeros_like(inputs[0]), layout) for _ in range(world)]
    finish(dist.all_to_all(outputs, inputs, async_op=later), later)
    for source in range(world):
        same(outputs[source], values(source + 2 * rank, dtype, layout))


def all_to_all_single(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    """Unequal parts: rank s sends s + t rows to rank t."""
    width = 0 if layout == "empty" else 3
    rows = [rank + to for to in range(world)]
    wanted = [source + rank for source in range(world)]
    whole = on(device, torch.full((sum(rows), width), 1, dtype=torch.int64).mul(rank + 1).to(dtype))
    output = on(device, torch.zeros(sum(wanted), width, dtype=dtype))
    finish(dist.all_to_all_single(output, whole, wanted, rows, async_op=later), later)
    expected = [torch.full((source + rank, width), source + 1).to(dtype) for source in range(world)]
    same(output, torch.cat(expected))


def message(rank: int, world: int, *, dtype: torch.dtype, layout: str, later: bool, device: str) -> None:
    """Around in a circle; each sends before it receives, or posts both."""
    if world == 1:
        return
    following, previous = (rank + 1) % world, (rank - 1) % world
    mine = laid_out(on(device, values(rank, dtype, layout)), layout)
    got = laid_out(torch.zeros_like(mine), layout)
    if later:
        receiving = dist.irecv(got, previous, tag=3)
        sending = dist.isend(mine, following, tag=3)
        assert receiving is not None
        assert sending is not None
        sending.wait()
        receiving.wait()
    else:
        dist.send(mine, following)
        assert dist.recv(got, previous) == previous
    same(got, values(previous, dtype, layout))


def barrier(rank: int, world: int, *, later: bool) -> None:
    finish(dist.barrier(async_op=later), later)


def coalesced(rank: int, world: int, *, device: str) -> None:
    layouts = ("plain", "empty", "large")
    for dtype in FEW:
        tensors = [on(device, values(rank, dtype, layout)) for layout in layouts]
        dist.all_reduce_coalesced(tensors)
        for layout, found in zip(layouts, tensors, strict=True):
            same(found, wanted_of("SUM", tuple(range(world)), dtype, layout))


def premultiplied(rank: int, world: int, *, device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        tensor = on(device, values(rank, dtype, "large"))
        dist.all_reduce(tensor, dist._make_nccl_premul_sum(0.5))
        total = reduced("SUM", [values(other, dtype, "large").double() for other in range(world)])
        same(tensor, (total * 0.5).to(dtype))


def objects(rank: int, world: int) -> None:
    found: list[Any] = [None] * world
    dist.all_gather_object(found, {"rank": rank, "text": "x" * rank * 100})
    assert [item["rank"] for item in found] == list(range(world))
    one = [{"root": 7} if rank == world - 1 else None]
    dist.broadcast_object_list(one, world - 1)
    assert one == [{"root": 7}]


def any_source(rank: int, world: int, *, device: str) -> None:
    if rank == 0:
        seen = set()
        for _ in range(world - 1):
            got = on(device, torch.zeros(3, dtype=torch.int64))
            source = dist.recv(got)
            same(got, torch.full((3,), source))
            seen.add(source)
        assert seen == set(range(1, world))
    else:
        dist.send(on(device, torch.full((3,), rank)), 0)


def many_at_once(rank: int, world: int, *, device: str) -> None:
    """All posted before any is waited for, and waited for from the last to the first."""
    tensors = [on(device, values(rank + shift, torch.float32, "large")) for shift in range(8)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        assert work is not None
        work.wait()
    for shift, tensor in enumerate(tensors):
        same(tensor, wanted_of("SUM", tuple(range(shift, shift + world)), torch.float32, "large"))


def in_inference_mode(rank: int, world: int, *, device: str) -> None:
    """Whose tensors may be changed in this mode only, by whichever thread."""
    with torch.inference_mode():
        tensor = on(device, values(rank, torch.float32))
        work = dist.all_reduce(tensor, async_op=True)
        assert work is not None
        work.wait()
        same(tensor, wanted_of("SUM", tuple(range(world)), torch.float32))


def futures(rank: int, world: int, *, device: str) -> None:
    tensor = on(device, values(rank, torch.float32))
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None
    doubled = work.get_future().then(lambda future: future.value()[0] * 2)
    wanted = wanted_of("SUM", tuple(range(world)), torch.float32)
    same(doubled.wait(), wanted * 2)


def futures_of_several(rank: int, world: int) -> None:
    outputs = [torch.zeros(2) for _ in range(world)]
    work: Any = dist.all_gather(outputs, torch.full((2,), float(rank)), async_op=True)
    same(torch.stack(work.get_future().wait()), torch.arange(float(world)).repeat(2, 1).t())
    work = dist.gather(outputs[rank], outputs if rank == 0 else None, async_op=True)
    assert len(work.get_future().wait()) == (world if rank == 0 else 0)


def chained(rank: int, world: int) -> None:
    """What follows a collective waits for further ones, as PowerSGD's hook does."""

    def follow(future: Any) -> Tensor:
        (total,) = future.value()
        dist.all_reduce(total)
        work: Any = dist.all_reduce(total, async_op=True)
        (total,) = work.get_future().wait()
        return total  # type: ignore[no-any-return]

    first: Any = dist.all_reduce(torch.ones(3), async_op=True)
    same(first.get_future().then(follow).wait(), torch.full((3,), float(world**3)))


def sub_groups(rank: int, world: int, *, device: str) -> None:
    halves = [list(range(world // 2)), list(range(world // 2, world))]
    groups = [dist.new_group(members) if members else None for members in halves]
    for members, group in zip(halves, groups, strict=True):
        if rank in members:
            for _ in range(3):
                tensor = on(device, values(rank, torch.float32))
                dist.all_reduce(tensor, group=group)
                same(tensor, wanted_of("SUM", tuple(members), torch.float32))
    dist.barrier()
    for members, group in zip(halves, groups, strict=True):
        if rank in members:
            dist.destroy_process_group(group)


def split(rank: int, world: int, *, device: str) -> None:
    """The group's own method, with ranks left out; and torch's function, where it lets itself be asked."""
    members = list(range(0, world, 2))
    whole: Any = dist.group.WORLD
    group = whole.split_group(members)
    assert (group is None) == (rank not in members)
    if group is not None:
        tensor = on(device, values(rank, torch.float32))
        dist.all_reduce(tensor, group=group)
        same(tensor, wanted_of("SUM", tuple(members), torch.float32))
        dist.broadcast(tensor.fill_(rank), members[-1], group=group)
        same(tensor, torch.full(tensor.shape, float(members[-1])))
        dist.destroy_process_group(group)
    newest = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    if newest and device != "cpu" and torch.accelerator.is_available():
        whole.bound_device_id = torch.device(device if ":" in device else f"{device}:0")
        try:
            group = dist.split_group(split_ranks=[[rank] for rank in range(world)])
        finally:
            whole.bound_device_id = None
        assert group is not None
        assert dist.get_world_size(group) == 1
        dist.all_reduce(on(device, values(rank, torch.float32)), group=group)
        dist.destroy_process_group(group)


def sparse(rank: int, world: int) -> None:
    def part(source: int) -> Tensor:
        indices = torch.tensor([[0, source % 3]])
        return torch.sparse_coo_tensor(indices, torch.tensor([1.0, 2.0]), (4,), check_invariants=True)

    tensor = part(rank)
    dist.all_reduce(tensor)
    same(tensor.to_dense(), sum((part(other).to_dense() for other in range(world)), torch.zeros(4)))


def compressed(rank: int, world: int) -> list[float]:
    """Sums of large tensors through int8: the error of one, and that of the mean over many steps."""
    from potluck.dist import Config

    options = Config(transport="tcp", compression="int8", small_bytes=1024)
    dist.init_process_group("potluck", pg_options=options, timeout=timedelta(seconds=30))
    try:
        torch.manual_seed(rank)
        mine = torch.randn(5000)
        parts = [torch.empty(5000) for _ in range(world)]
        dist.all_gather(parts, mine)
        wanted = torch.stack(parts).sum(0)
        tensor, total, steps = torch.empty(5000), torch.zeros(5000), 20
        for _ in range(steps):
            tensor.copy_(mine)
            dist.all_reduce(tensor)
            total += tensor
        small = torch.full((8,), 0.1)
        dist.all_reduce(small)
        assert torch.equal(small, torch.full((8,), 0.1) * world), "small tensors stay exact"
        whole_averages_of_all(rank, world, dtype=torch.int64, device="cpu")  # whole numbers too
        scale = float(wanted.abs().mean())
        return [float((found - wanted).abs().mean()) / scale for found in (tensor, total / steps)]
    finally:
        dist.destroy_process_group()


def measured(rank: int, world: int, transport: str) -> dict[str, Any]:
    """The figures of ten large all-reduces, half of them of tensors that have to be copied first."""
    from potluck.dist import Config, metrics, reset_metrics

    dist.init_process_group("potluck", pg_options=Config(transport=transport), timeout=timedelta(seconds=30))
    try:
        dist.barrier()
        reset_metrics()
        for _ in range(5):
            dist.all_reduce(torch.ones(50_000))
            dist.all_reduce(torch.ones(200, 250).t())
        if rank == 0:
            dist.send(torch.ones(30), 1)
        else:
            dist.recv(torch.ones(30), 0)
        figures = metrics()["by_op"]
        assert sorted(figures) == sorted(["all_reduce", "recv" if rank else "send"]), list(figures)
        assert figures["recv" if rank else "send"]["bytes"] == 120
        return figures["all_reduce"]
    finally:
        dist.destroy_process_group()


def run_all(
    rank: int, world: int, which: str, devices: Sequence[str] = (), options: dict[str, Any] | None = None
) -> list[str]:
    """One rank's part of every case of a kind; what failed, as texts (the rest is then given up).

    Args:
        devices: of each rank; none: the CPU.
        options: of Config; "machines": on how many the ranks seem to be; "share": (k, n), every n-th case from k.
    """
    import potluck
    from potluck.dist import Config, shm

    assert potluck.__version__
    device = devices[rank] if devices else "cpu"
    if device == "fake":
        from support import fake_device

        fake_device.install()
    options = dict(options or {})
    machines = options.pop("machines", None)
    first, step = options.pop("share", (0, 1))
    own = shm.neighbourhood
    if machines is not None:
        # As if the ranks of this box were dealt to so many machines.
        shm.neighbourhood = lambda: f"machine {rank % machines}"
    config = Config(**options) if options else None
    dist.init_process_group("potluck", pg_options=config, timeout=timedelta(seconds=30))
    global _calls
    _calls = itertools.count()
    failed = []
    try:
        if machines is not None:
            assert "shared memory within" in repr(dist.group.WORLD), repr(dist.group.WORLD)
        # The device of the tests has no complex numbers.
        types = (*WHOLE, *FLOATS) if "fake" in devices else TYPES
        cases = {"reductions": reductions, "movements": movements}[which](device, types)
        for name, case in itertools.islice(cases, first, None, step):
            try:
                case(rank, world)
            except Exception:
                failed.append(f"{name}: {traceback.format_exc(limit=-4)}")
                # Out of step with the others from here on.
                dist.group.WORLD.abort()  # type: ignore[union-attr]
                break
    finally:
        shm.neighbourhood = own
        dist.destroy_process_group()
    return failed

"""`potluck bench` and its verb `collectives`: starts ranks unless torchrun did, measures and prints a table."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from potluck.cli._app import LazyGroup, Verb
from potluck.cli._files import check_writable, write_json
from potluck.cli._options import Number, given
from potluck.errors import INTERRUPTED, UserError
from potluck.fleet.ranks import is_rank, rank_leased, run_ranks
from potluck.probe.groups import check_backends, check_device, check_settings, groups_of, rank_device
from potluck.spec.collective_rows import check_results

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from potluck.device.base import Device

VERBS: dict[str, Verb] = {
    "collectives": Verb(
        "potluck.cli.bench:collectives", "Time a collective over many sizes and check every result."
    ),
    "ddp": Verb("potluck.cli.bench_ddp:ddp", "Train a small GPT under DDP with 1, 2 and 4 processes."),
}
MOST_PROCESSES = 64
MAX_BYTES = 4 << 30
_SIZE = re.compile(r"(\d+)\s*([kmg]?)(i?b)?", re.IGNORECASE)
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


class BackendFlags(TypedDict):
    """Options of both verbs."""

    backend: str
    against: str | None
    device: str
    parent: int | None
    json_file: str | None


class CollectiveFlags(BackendFlags):
    sizes: str
    processes: int
    op: str
    dtype: str
    repeats: int | None
    threads: int
    tolerance: float


device_option = click.option(
    "--device",
    default="cpu",
    show_default=True,
    help="Where the tensors are: cpu, cuda (a GPU for each rank), cuda:0.",
)


@click.group(cls=LazyGroup, verbs=VERBS)
def bench() -> None:
    """Measure Potluck's torch.distributed backend against other backends.

    \b
    Examples:
      potluck bench collectives --against gloo          both backends in turn, on this machine
      torchrun --nproc-per-node 4 -m potluck bench collectives
      potluck bench ddp                                 tokens/s of a small GPT
      potluck bench collectives --device cuda --backend nccl    between the GPUs of this machine
    """


@click.command()
@click.option("--backend", default="potluck", show_default=True, help="torch.distributed backend to measure.")
@click.option("--against", metavar="BACKEND", help="Second backend, measured in turn with the first, such as gloo.")
@click.option(
    "--sizes", default="4K:256M", show_default=True, help="FROM:TO, each 4 times the one before, or a list A,B,C."
)
@click.option(
    "--processes",
    type=click.IntRange(2, MOST_PROCESSES),
    default=2,
    show_default=True,
    help="Number of ranks to start.",
)
@click.option(
    "--op",
    type=click.Choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast", "reduce"]),
    default="all_reduce",
    show_default=True,
    help="Collective to measure.",
)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "float16", "bfloat16"]),
    default="float32",
    show_default=True,
    help="Type of the tensors.",
)
@device_option
@click.option(
    "--repeats", type=click.IntRange(1), help="Repetitions of each size (default: 5 to 200, fewer for large sizes)."
)
@click.option("--threads", type=click.IntRange(1), default=1, show_default=True, help="CPU threads of each rank.")
@click.option(
    "--tolerance",
    type=Number(0, 1),
    default=0.0,
    help="Largest error allowed, relative to the largest element (default 0).",
)
@click.option(
    "--json",
    "json_file",
    metavar="FILE",
    help="Write the rows to FILE as JSON (-: standard output, instead of the table).",
)
@click.option("--parent", type=int, hidden=True)
def collectives(**flags: Unpack[CollectiveFlags]) -> None:
    """Time a collective over many sizes, in the columns of nccl-tests, and check every element of every result.

    Starts its own ranks on this machine, or runs as one of the ranks under torchrun. algbw is the tensor's bytes
    per second. busbw is the least that each rank must have sent per second; compare it with the link's rate. bound
    is the time of a perfect ring over the slowest link between the ranks, which is measured first: memory within a
    machine, a plain TCP connection between machines. A compressed all-reduce is not exact and needs --tolerance.

    \b
    Examples:
      potluck bench collectives --against gloo
      potluck bench collectives --processes 4 --sizes 4K,1M,64M
      potluck bench collectives --op all_gather --json rows.json
      torchrun --nnodes 2 --nproc-per-node 1 --rdzv-endpoint desk:29500 -m potluck bench collectives
    """
    wanted, json_file = parse_sizes(flags["sizes"]), flags["json_file"]
    check_backends(flags["backend"], flags["against"], flags["device"])
    names = list(dict.fromkeys(name for name in (flags["backend"], flags["against"]) if name))
    if not is_rank():
        check_settings(names, flags["processes"])
        check_device(flags["device"], flags["processes"], names)
    check_writable(json_file)
    if not is_rank():
        passed = given(flags, ("backend", "against", "device", "sizes", "op", "dtype", "repeats", "tolerance"))
        own = [word for name, value in passed.items() for word in (f"--{name}", str(value))]
        own += ["--json", json_file] if json_file else []
        start_ranks(["collectives", *own], flags["processes"], flags["threads"])
        return
    device = rank_device(flags["device"])
    with joined(names, flags["parent"], device) as (groups, store):
        _measure(groups, store, wanted, flags, device)


def _measure(
    groups: dict[str, ProcessGroup], store: Store, sizes: list[int], flags: CollectiveFlags, device: Device
) -> None:
    import torch
    import torch.distributed as dist

    from potluck.probe import slowest_link
    from potluck.probe.collectives import measure
    from potluck.report import collective_table as table
    from potluck.report.text import fitted

    op, json_file = flags["op"], flags["json_file"]
    first, speaks = dist.get_rank() == 0, dist.get_rank() == 0 and json_file != "-"

    def say(line: str) -> None:
        if speaks:
            click.echo(fitted(line, sys.stdout))

    found = slowest_link.slowest(store)
    rates = [found.bytes_per_s_of(name) for name in groups]
    rate = None if None in rates else found.bytes_per_s
    known = f"{found.kind}, {rate / 1e9:.2f} GB/s measured" if rate else "not measured"
    on = "" if device.kind == "cpu" else f" on {device.label}"
    say(f"# {op}, {dist.get_world_size()} ranks{on}; link: {known}")
    for line in table.header():
        say(line)
    rows = []
    for row in measure(
        groups,
        op,
        sizes,
        dtype=getattr(torch, flags["dtype"]),
        repeats=flags["repeats"],
        tolerance=flags["tolerance"],
        link_bytes_per_s=rate,
        device=device,
    ):
        rows.append(row)
        say(table.line(row))
    names = list(groups)
    for line in table.comparison(rows, names[0], names[1]) if len(names) > 1 else []:
        say(line)
    if first and json_file:
        write_json(json_file, rows)
    check_results(rows)


def start_ranks(arguments: list[str], processes: int, threads: int) -> None:
    """Run this command as several ranks."""
    own = [sys.executable, "-m", "potluck", "bench", *arguments, "--parent", str(os.getpid())]
    run_ranks(own, processes, threads=threads)


@contextmanager
def joined(
    names: Sequence[str], parent: int | None, device: Device
) -> Iterator[tuple[dict[str, ProcessGroup], Store]]:
    """One of the ranks: its groups by backend, and their store."""
    try:
        with rank_leased(parent), groups_of(names, device) as found:
            yield found
    except KeyboardInterrupt:
        if parent is None:
            raise
        raise click.exceptions.Exit(INTERRUPTED) from None  # whoever started this rank says so, once


def parse_sizes(text: str) -> list[int]:
    """'4K:256M' (each four times the one before) or '4K,1M,64M', in bytes."""
    first, colon, last = text.partition(":")
    if colon:
        size, stop = _bytes(first, text), _bytes(last, text)
        if stop < size:
            raise UserError(f"--sizes {text}: the second is less than the first", hint="for example 4K:256M")
        found = []
        while size <= stop:
            found.append(size)
            size *= 4
        return found if found[-1] == stop else [*found, stop]
    return [_bytes(part, text) for part in text.split(",")]


def _bytes(text: str, whole: str) -> int:
    match = _SIZE.fullmatch(text.strip())
    size = int(match[1]) * _UNITS[match[2].lower()] if match else 0
    if not 4 <= size <= MAX_BYTES:
        raise UserError(
            f"--sizes {whole}: {text!r} is not a size from 4 bytes to 4G", hint="for example 4K:256M, or 4K,1M,64M"
        )
    return size

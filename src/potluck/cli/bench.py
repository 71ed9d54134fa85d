"""`potluck bench` and its verb `collectives`: starts ranks unless torchrun did, measures and prints a table."""

from __future__ import annotations

import difflib
import os
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click

from potluck import checked
from potluck.cli._app import INTERRUPTED, LazyGroup, Verb
from potluck.cli._options import given
from potluck.errors import RankGoneError, ScriptError, UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

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
GLOO_TIMEOUT_S = 12.0
"""Gloo waits for connections five times as long as its timeout: a minute with this one, 150 with its default."""
_GLOO_HINT = (
    "gloo looks up this machine's own name for its address: export GLOO_SOCKET_IFNAME=eth0 (the interface between "
    "the machines; `potluck doctor` lists them)"
)
_OF_TORCH_ITSELF = ("undefined", "fake")
"""Names in torch's list of backends that cannot be measured."""


class BackendFlags(TypedDict):
    """What both verbs have."""

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
    type=click.FloatRange(0, 1),
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
    from potluck.spec.collectives import parse_sizes

    wanted, json_file = parse_sizes(flags["sizes"]), flags["json_file"]
    check_backends(flags["backend"], flags["against"], flags["device"])
    check_settings(flags, flags["processes"])
    writable(json_file)
    names = list(dict.fromkeys(name for name in (flags["backend"], flags["against"]) if name))
    if not is_rank():
        check_device(flags["device"], flags["processes"], names)
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

    from potluck.errors import PotluckError
    from potluck.probe import slowest_link
    from potluck.probe.collectives import measure
    from potluck.report.text import fitted
    from potluck.spec import collectives as table

    op, json_file = flags["op"], flags["json_file"]
    first, speaks = dist.get_rank() == 0, dist.get_rank() == 0 and json_file != "-"

    def say(line: str) -> None:
        if speaks:
            click.echo(fitted(line, sys.stdout))

    found = slowest_link.slowest(store, dist.get_rank(), dist.get_world_size())
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
    wrong = sum(row.wrong for row in rows)
    if wrong:
        raise PotluckError(f"{wrong} elements of the results are wrong", hint="please report it, with the table")


# -- backends -------------------------------------------------------------------------------------------


def check_backends(backend: str, against: str | None, device: str) -> None:
    """Refuse an unknown --backend or --against once, before any rank is started."""
    named = {"backend": backend, "against": against or "potluck"}
    kind = device.partition(":")[0].strip().lower()
    if set(named.values()) <= {"potluck"}:
        return  # what is always there needs no torch to be imported in this process
    import torch.distributed as dist

    known = dist.Backend.backend_list
    here = [name for name in known if name not in _OF_TORCH_ITSELF and not _unfit(name, kind)]
    here.sort(key=lambda name: name != "potluck")
    for flag, name in named.items():
        lower = name.lower()
        what = _unfit(lower, kind) if lower in known else f"torch.distributed knows no backend {name!r}"
        if what:
            near = difflib.get_close_matches(lower, here, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            hint = f"{meant}the backends here are {', '.join(here)}"
            if kind == "cpu" and lower in known and not _unfit(lower, "cuda"):
                hint += "; or add --device cuda"
            raise UserError(f"--{flag} {name}: {what}", hint=hint)


def check_settings(flags: BackendFlags, processes: int) -> None:
    """Refuse POTLUCK_DIST_* settings that do not fit this machine once, before any rank is started.

    Under torchrun each rank checks its own, since ranks may be on different machines.
    """
    if is_rank() or "potluck" not in (flags["backend"].lower(), (flags["against"] or "").lower()):
        return
    from potluck.dist.config import resolve
    from potluck.dist.facts import gather

    resolve(None, os.environ, gather(processes - 1, processes, "127.0.0.1"))


def _unfit(name: str, kind: str) -> str:
    """Why a backend known to torch cannot be measured here with tensors on such a device; empty if it can."""
    import torch.distributed as dist

    if not dist.is_backend_available(name):
        return "the installed torch was built without it"
    if kind not in dist.Backend.backend_capability.get(name, [kind]):
        return f"it does not take {kind.upper()} tensors, which are what is measured"
    return "" if name != "undefined" else "it is not a backend"


# -- devices --------------------------------------------------------------------------------------------


def check_device(name: str, processes: int, backends: list[str]) -> None:
    """Refuse a --device that this machine does not have for so many ranks once, before any rank is started."""
    kind = name.partition(":")[0].strip().lower()
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name}: there is no such device to measure", hint="cpu, cuda or cuda:0")
    if kind == "cpu":
        return  # needs no torch in this process
    from potluck.device.pick import pick_for_rank

    _, own = pick_for_rank(name, processes - 1, processes, threads=1)
    if processes > 1 and not own and "nccl" in map(str.lower, backends):
        raise UserError(f"NCCL needs a GPU for each rank, not --device {name} for all", hint="--device cuda")


def rank_device(name: str) -> Device:
    """The device of this process, which is one of the ranks of its machine."""
    from potluck.device.pick import pick_for_rank

    local = [
        int(os.environ.get(key, fallback)) for key, fallback in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    ]
    return pick_for_rank(name, *local, threads=int(os.environ.get("OMP_NUM_THREADS", "1")))[0]


# -- ranks ----------------------------------------------------------------------------------------------


OWN_END_S = 1.0
"""A rank that finds another one gone waits this long: as a rule the process that started both ends it now, and
reports the cause."""


def is_rank() -> bool:
    """Whether this process was started as one of several ranks, by torchrun or by us."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_ranks(arguments: list[str], processes: int, threads: int) -> None:
    """Run this command as several ranks; Ctrl-C ends all of them."""
    from potluck.fleet.life import leased, reader_is_gone
    from potluck.fleet.ranks import run_ranks

    own = [sys.executable, "-m", "potluck", "bench", *arguments, "--parent", str(os.getpid())]
    with leased():
        try:
            run_ranks(own, processes, threads=threads)
        except ScriptError:
            if reader_is_gone():
                raise BrokenPipeError from None  # it is what the first rank has stumbled over
            raise


@contextmanager
def joined(
    names: list[str], parent: int | None, device: Device | None = None
) -> Iterator[tuple[dict[str, ProcessGroup], Store]]:
    """The process groups by backend, the first of them the default group, and their store."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    from potluck.fleet.life import GRACE_S, leased, reader_is_gone

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    try:
        # The parent ends all ranks at once when nobody reads. One that ended before would be a failure to others.
        with leased(parent, reader=parent is None):
            groups: dict[str, ProcessGroup] = {}
            for name in names:
                groups[name] = _joined_by(name, device, first=not groups)
            try:
                yield groups, _get_default_store()
            except BrokenPipeError:
                if parent is not None and reader_is_gone():
                    time.sleep(GRACE_S)
                raise
            except RankGoneError:
                if parent is not None:
                    time.sleep(OWN_END_S)
                raise
            # Not where something failed: to leave in order would be to wait for those who do not come.
            dist.barrier()
            dist.destroy_process_group()
    except KeyboardInterrupt:
        if parent is None:
            raise
        raise click.exceptions.Exit(INTERRUPTED) from None  # whoever started this rank says so, once


def _joined_by(name: str, device: Device | None, *, first: bool) -> Any:
    """The group of all ranks on this backend. NCCL must know the GPU of this rank."""
    import torch.distributed as dist

    from potluck.errors import PotluckError

    try:
        if first:
            bound = device.torch_device if device is not None and name.lower() == "nccl" else None
            dist.init_process_group(name, device_id=bound)
            return dist.group.WORLD
        return _bounded_gloo() if name == "gloo" else dist.new_group(backend=name)
    except PotluckError:
        raise
    except RuntimeError as error:
        words = " ".join(str(error).split())[:300]
        raise UserError(
            f"the ranks cannot form a {name} group: {words}",
            hint=_GLOO_HINT + ("" if first else ", or leave --against out")
            if name.lower() == "gloo"
            else "`potluck doctor ADDRESS` shows what blocks the connection",
        ) from error
    except (ValueError, AssertionError) as error:
        words = " ".join(str(error).split())[:300]
        raise UserError(f"cannot make a {name} group: {words}", hint="for example --backend gloo") from error


def _bounded_gloo() -> Any:
    """A gloo group that soon gives up connecting, but has the default timeout for its collectives."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

    dist.barrier()  # the time is for connecting, not for a rank that comes late
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GLOO_TIMEOUT_S))
    _set_pg_timeout(default_pg_timeout, group)
    return group


# -- files ----------------------------------------------------------------------------------------------


def writable(json_file: str | None) -> None:
    """Check that results can be written, before minutes of measuring."""
    if json_file in (None, "-"):
        return
    try:
        with open(str(json_file), "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write {json_file}: {error.strerror or error}", hint="give --json a file that can be written"
        ) from error


def write_json(json_file: str, table: object) -> None:
    text = checked.to_json(table)
    if json_file == "-":
        click.echo(text)
    else:
        Path(json_file).write_text(text + "\n", encoding="utf-8")

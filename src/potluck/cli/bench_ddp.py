"""`potluck bench ddp`: trains a small GPT under DDP with several numbers of processes and prints a table."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from potluck import checked
from potluck.cli._options import given
from potluck.cli.bench import (
    BackendFlags,
    check_backends,
    check_settings,
    is_rank,
    joined,
    start_ranks,
    writable,
    write_json,
)

if TYPE_CHECKING:
    from potluck.probe.ddp import Trained


class DdpFlags(BackendFlags):
    processes: str
    lab_mbit: float | None
    depth: int
    sequence: int
    batch: int
    steps: int


@click.command()
@click.option("--backend", default="potluck", show_default=True, help="torch.distributed backend to train with.")
@click.option("--against", metavar="BACKEND", help="Second backend to train with, such as gloo.")
@click.option(
    "--processes", default="1,2,4", show_default=True, help="List of process counts to measure on this machine."
)
@click.option(
    "--lab",
    "lab_mbit",
    type=float,
    metavar="MBIT",
    help="Also measure two emulated machines with this link (Linux only).",
)
@click.option(
    "--depth", type=click.IntRange(1, 48), default=4, show_default=True, help="Number of blocks of the GPT."
)
@click.option("--sequence", type=click.IntRange(8, 4096), default=128, show_default=True, help="Bytes per sample.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Samples per process and step.")
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Steps to measure.")
@click.option("--json", "json_file", metavar="FILE", help="Write the rows to FILE as JSON (-: standard output).")
@click.option("--parent", type=int, hidden=True)
def ddp(**flags: Unpack[DdpFlags]) -> None:
    """Train a small GPT under DistributedDataParallel and show what exchanging the gradients costs.

    Each process computes its own samples, so twice the processes do twice the work. all-reduce is the time to
    reduce the gradients' bytes while nothing else runs. computed is 2(N-1)/N times those bytes, divided by the
    measured rate of the link. exposed is the part that a step really waits for. Under torchrun, this process is one
    of the ranks.

    \b
    Examples:
      potluck bench ddp                             1, 2 and 4 processes
      potluck bench ddp --against gloo --processes 2
      potluck bench ddp --lab 1000                  also two emulated machines with 1 Gbit/s between them
    """
    job, json_file = given(flags, ("depth", "sequence", "batch", "steps")), flags["json_file"]
    check_backends(flags)
    writable(json_file)
    names = [name for name in (flags["backend"], flags["against"]) if name]
    if is_rank():
        _train(names, job, flags["parent"], json_file)
        return
    counts = _counts(flags["processes"])
    check_settings(flags, max(counts))
    rows: list[Trained] = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        for count in counts:
            _add(rows, _on_this_machine(names, count, job, Path(folder)), json_file)
        if flags["lab_mbit"] is not None:
            _add(rows, _in_the_lab(names, flags["lab_mbit"], job, Path(folder)), json_file)
    if json_file:
        write_json(json_file, rows)


def _add(rows: list[Trained], more: list[Trained], json_file: str | None) -> None:
    for row in more:
        rows.append(row)
        _say(row, len(rows) == 1, json_file)


def _train(names: list[str], job: dict[str, int], parent: int | None, json_file: str | None) -> None:
    """Train as one of the ranks, on one backend after the other."""
    import torch.distributed as dist

    from potluck.probe import link
    from potluck.probe.ddp import DdpJob, train

    with joined(names, parent) as (groups, store):
        rate, kind = link.slowest(store, dist.get_rank(), dist.get_world_size())
        found = [train(DdpJob(**job), name, rate, kind, group) for name, group in groups.items()]
        if dist.get_rank() == 0:
            if json_file:
                write_json(json_file, found)
            else:
                _add([], found, None)


def _on_this_machine(names: list[str], count: int, job: dict[str, int], folder: Path) -> list[Trained]:
    if count == 1:
        import torch

        from potluck.probe.ddp import DdpJob, train

        torch.set_num_threads(1)
        return [train(DdpJob(**job), names[0], None, "")]
    out = folder / f"{count}.json"
    start_ranks(_arguments(names, job, out), count, 1)
    return _read(out)


def _in_the_lab(names: list[str], mbit: float, job: dict[str, int], folder: Path) -> list[Trained]:
    from potluck.lab.ranks import potluck_command, run_on_pair

    out = folder / "lab.json"
    run_on_pair([potluck_command("bench", *_arguments(names, job, out))] * 2, mbit, folder)
    return _read(out)


def _read(out: Path) -> list[Trained]:
    from potluck.probe.ddp import Trained

    return checked.decode(out.read_bytes(), list[Trained])


def _arguments(names: list[str], job: dict[str, int], out: Path) -> list[str]:
    backends = [word for flag, name in zip(("--backend", "--against"), names) for word in (flag, name)]
    flags = [word for name, value in job.items() for word in (f"--{name}", str(value))]
    return ["ddp", *backends, *flags, "--json", str(out)]


def _counts(text: str) -> list[int]:
    from potluck.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise UserError(f"--processes {text!r} is not a list of numbers from 1 to 64", hint="for example 1,2,4")
    return [int(part) for part in parts]


def _say(row: Trained, first: bool, json_file: str | None) -> None:
    from potluck.report.text import fitted
    from potluck.units import seconds_text

    if json_file == "-" or os.environ.get("RANK", "0") != "0":
        return
    columns = "{:>9} {:>8} {:>7} {:>10} {:>9} {:>11} {:>10} {:>9} {:>9}"
    if first:
        click.echo(
            columns.format(
                "processes", "backend", "link", "tokens/s", "step", "all-reduce", "computed", "exposed", "loss"
            )
        )
    times = [seconds_text(s) for s in (row.step_s, row.all_reduce_s, row.computed_s, row.exposed_s)]
    cells = [row.world, row.backend, row.where or "none", f"{row.tokens_per_s:.0f}", *times]
    click.echo(fitted(columns.format(*cells, f"{row.loss:.5f}"), sys.stdout))

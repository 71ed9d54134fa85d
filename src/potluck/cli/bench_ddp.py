"""`potluck bench ddp`: a small GPT under stock DDP, in several settings. Parses, starts the ranks and renders."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from potluck.cli.bench import check_backends, check_settings, is_rank, joined, start_ranks, writable, write_json


@click.command()
@click.option("--backend", default="potluck", show_default=True, help="The backend to train on.")
@click.option("--against", metavar="BACKEND", help="Train on this one, too: gloo.")
@click.option("--processes", default="1,2,4", show_default=True, help="How many processes on this machine, a list.")
@click.option("--lab", "lab_mbit", type=float, metavar="MBIT", help="Also two lab machines with this link (Linux).")
@click.option("--depth", type=click.IntRange(1, 48), default=4, show_default=True, help="The size of the GPT.")
@click.option("--sequence", type=click.IntRange(8, 4096), default=128, show_default=True, help="Bytes in a sample.")
@click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Samples a process a step.")
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Measured steps.")
@click.option("--json", "json_file", metavar="FILE", help="Write the rows here; - for stdout.")
@click.option("--parent", type=int, hidden=True)
def ddp(**flags: Any) -> None:
    """Train a small GPT under stock DistributedDataParallel and show what the exchange of gradients costs.

    Each process computes its own samples, so twice the processes are twice the work. all-reduce is the time to
    reduce as many bytes as there are gradients, alone; computed is 2(N-1)/N times those bytes over the measured
    rate of the link; exposed is what of it a step really waits for. Under torchrun it is one of the ranks.

    \b
    Examples:
      potluck bench ddp                             1, 2 and 4 processes
      potluck bench ddp --against gloo --processes 2
      potluck bench ddp --lab 1000                  and two emulated machines, 1 Gbit/s between them
    """
    job, json_file = {name: flags[name] for name in ("depth", "sequence", "batch", "steps")}, flags["json_file"]
    check_backends(flags)
    writable(json_file)
    names = [name for name in (flags["backend"], flags["against"]) if name]
    if is_rank():
        _train(names, job, flags["parent"], json_file)
        return
    counts = _counts(flags["processes"])
    check_settings(flags, max(counts))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        for count in counts:
            _add(rows, _on_this_machine(names, count, job, Path(folder)), json_file)
        if flags["lab_mbit"] is not None:
            _add(rows, _in_the_lab(names, flags["lab_mbit"], job, Path(folder)), json_file)
    if json_file:
        write_json(json_file, rows)


def _add(rows: list[dict[str, Any]], more: list[dict[str, Any]], json_file: str | None) -> None:
    for row in more:
        rows.append(row)
        _say(row, len(rows) == 1, json_file)


def _train(names: list[str], job: dict[str, int], parent: int | None, json_file: str | None) -> None:
    """As one of the ranks: on one backend after the other."""
    import torch.distributed as dist

    from potluck.probe import link
    from potluck.probe.ddp import DdpJob, train

    with joined(names, parent) as (groups, store):
        rate, kind = link.slowest(store, dist.get_rank(), dist.get_world_size())
        found = [train(DdpJob(**job), name, rate, kind, group).to_dict() for name, group in groups.items()]
        if dist.get_rank() == 0:
            if json_file:
                write_json(json_file, found)
            else:
                _add([], found, None)


def _on_this_machine(names: list[str], count: int, job: dict[str, int], folder: Path) -> list[dict[str, Any]]:
    if count == 1:
        import torch

        from potluck.probe.ddp import DdpJob, train

        torch.set_num_threads(1)
        return [train(DdpJob(**job), names[0], None, "").to_dict()]
    out = folder / f"{count}.json"
    start_ranks(_arguments(names, job, out), count, 1)
    return list(json.loads(out.read_text()))


def _in_the_lab(names: list[str], mbit: float, job: dict[str, int], folder: Path) -> list[dict[str, Any]]:
    from potluck.lab.ranks import potluck_command, run_on_pair

    out = folder / "lab.json"
    run_on_pair([potluck_command("bench", *_arguments(names, job, out))] * 2, mbit, folder)
    return list(json.loads(out.read_text()))


def _arguments(names: list[str], job: dict[str, int], out: Path) -> list[str]:
    backends = [word for flag, name in zip(("--backend", "--against"), names) for word in (flag, name)]
    flags = [word for name, value in job.items() for word in (f"--{name}", str(value))]
    return ["ddp", *backends, *flags, "--json", str(out)]


def _counts(text: str) -> list[int]:
    from potluck.errors import UserError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise UserError(f"--processes {text}: not a list of numbers from 1 to 64", hint="for example 1,2,4")
    return [int(part) for part in parts]


def _say(row: dict[str, Any], first: bool, json_file: str | None) -> None:
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
    times = [seconds_text(row[name]) for name in ("step_s", "all_reduce_s", "computed_s", "exposed_s")]
    cells = [row["world"], row["backend"], row["where"] or "none", f"{row['tokens_per_s']:.0f}", *times]
    click.echo(fitted(columns.format(*cells, f"{row['loss']:.5f}"), sys.stdout))

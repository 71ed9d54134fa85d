"""`potluck bench ddp`: trains a small GPT under DDP with several numbers of processes and prints a table."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from potluck import checked
from potluck.cli._files import check_writable, write_json
from potluck.cli._options import Number, given
from potluck.cli.bench import BackendFlags, device_option, joined, start_ranks
from potluck.errors import ConfigError, UserError
from potluck.fleet.ranks import is_rank
from potluck.probe.groups import check_backends, check_device, check_settings, is_first, rank_device
from potluck.spec.rig import LEAST_MBIT, MOST_MBIT

if TYPE_CHECKING:
    from potluck.spec.ddp_rows import DdpRow

_COUNTS = (1, 2, 4)
_JOB = ("depth", "sequence", "batch", "global_batch", "steps")


class DdpFlags(BackendFlags):
    processes: str | None
    lab_mbit: float | None
    depth: int
    sequence: int
    batch: int | None
    global_batch: int | None
    steps: int
    merge: bool
    files: tuple[Path, ...]
    plot: Path | None


@click.command()
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(path_type=Path, dir_okay=False))
@click.option("--backend", default="potluck", show_default=True, help="torch.distributed backend to train with.")
@click.option("--against", metavar="BACKEND", help="Second backend to train with, such as gloo.")
@click.option(
    "--processes",
    help="List of process counts to measure on this machine (default: 1,2,4; on GPUs up to their number).",
)
@click.option(
    "--lab",
    "lab_mbit",
    type=Number(LEAST_MBIT, MOST_MBIT),
    metavar="MBIT",
    help="Also measure two emulated machines with this link (Linux only).",
)
@device_option
@click.option(
    "--depth", type=click.IntRange(1, 48), default=4, show_default=True, help="Number of blocks of the GPT."
)
@click.option("--sequence", type=click.IntRange(8, 4096), default=128, show_default=True, help="Bytes per sample.")
@click.option("--batch", type=click.IntRange(1), help="Samples per process and step (default: 4).")
@click.option(
    "--global-batch",
    type=click.IntRange(1),
    help="Samples per step over all processes, the same for any number of them, instead of --batch.",
)
@click.option("--steps", type=click.IntRange(1), default=8, show_default=True, help="Steps to measure.")
@click.option("--json", "json_file", metavar="FILE", help="Write the rows to FILE as JSON (-: standard output).")
@click.option("--merge", is_flag=True, help="Measure nothing: print the rows of FILEs as one Markdown table.")
@click.option(
    "--plot",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Also draw the rows to FILE (.png or .svg).",
)
@click.option("--parent", type=int, hidden=True)
def ddp(**flags: Unpack[DdpFlags]) -> None:
    """Train a small GPT under DistributedDataParallel and show what exchanging the gradients costs.

    Each process computes its own samples, so twice the processes do twice the work. With --global-batch all
    together compute the same samples for any number of processes, so the losses must agree. all-reduce is the time
    to reduce the gradients' bytes while nothing else runs. computed is 2(N-1)/N times those bytes, divided by the
    measured rate of the link. exposed is the part for which a step waits. Under torchrun, this process is one of
    the ranks.

    \b
    Examples:
      potluck bench ddp                             1, 2 and 4 processes
      potluck bench ddp --against gloo --processes 2
      potluck bench ddp --lab 1000                  also two emulated machines with 1 Gbit/s between them
      potluck bench ddp --global-batch 16 --json cpu.json
      potluck bench ddp --device cuda --global-batch 16 --json gpu.json        on another machine
      potluck bench ddp --merge cpu.json gpu.json --plot table.png             one table of both
    """
    from potluck.spec.ddp_rows import share

    json_file = flags["json_file"]
    _check_flags(flags)
    if flags["merge"]:
        _merge(flags["files"], json_file, flags["plot"])
        return
    job = given(flags, _JOB)
    check_backends(flags["backend"], flags["against"], flags["device"])
    check_writable(json_file)
    names = [name for name in (flags["backend"], flags["against"]) if name]
    if is_rank():
        _train(names, job, flags)
        return
    counts = _counts(flags["processes"], flags["device"])
    for count in [*counts, *([2] if flags["lab_mbit"] is not None else [])]:
        share(flags["global_batch"] or count, count)
    check_settings(names, max(counts))
    check_device(flags["device"], max(counts), names)
    rows: list[DdpRow] = []
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as folder:
        for count in counts:
            _add(rows, _on_this_machine(names, count, job, flags["device"], Path(folder)), json_file)
        if flags["lab_mbit"] is not None:
            _add(rows, _in_the_lab(names, flags["lab_mbit"], job, Path(folder)), json_file)
    if json_file:
        write_json(json_file, rows)
    if flags["plot"] is not None:
        from potluck.report import ddp_table

        ddp_table.draw(flags["plot"], rows)


def _check_flags(flags: DdpFlags) -> None:
    if flags["merge"] and not flags["files"]:
        raise ConfigError("--merge needs files", hint="potluck bench ddp --merge cpu.json gpu.json")
    if flags["files"] and not flags["merge"]:
        raise ConfigError(
            f"{flags['files'][0]}: files are only read with --merge",
            hint="potluck bench ddp --merge cpu.json gpu.json",
        )
    if flags["batch"] is not None and flags["global_batch"] is not None:
        raise ConfigError("--batch and --global-batch exclude each other", hint="give one of them")
    if flags["lab_mbit"] is not None and flags["device"] != "cpu":
        raise ConfigError("--lab measures on the CPU", hint="leave --device out, or run without --lab")
    if flags["plot"] is not None:
        from potluck.report import plot_style

        plot_style.check_file(flags["plot"])


def _merge(files: tuple[Path, ...], json_file: str | None, plot: Path | None) -> None:
    from potluck.report import ddp_table
    from potluck.spec.ddp_rows import AGAIN, from_json, merged

    texts = [checked.read_text(file, missing=AGAIN, example=AGAIN) for file in files]
    rows = merged([(str(file), from_json(text, str(file))) for file, text in zip(files, texts)])
    if json_file:
        check_writable(json_file)
        write_json(json_file, rows)
    if plot is not None:
        ddp_table.draw(plot, rows)
    if json_file != "-":
        for line in ddp_table.markdown(rows):
            click.echo(line)


def _add(rows: list[DdpRow], more: list[DdpRow], json_file: str | None) -> None:
    for row in more:
        rows.append(row)
        _say(row, len(rows) == 1, json_file)


def _train(names: list[str], job: dict[str, int], flags: DdpFlags) -> None:
    """Train as one of the ranks, on one backend after the other."""
    from potluck.probe import slowest_link
    from potluck.probe.ddp import DdpJob, train

    device, json_file = rank_device(flags["device"]), flags["json_file"]
    with joined(names, flags["parent"], device) as (groups, store):
        between = slowest_link.slowest(store)
        found = [train(DdpJob(**job), name, device, between, group) for name, group in groups.items()]
        if is_first():
            if json_file:
                write_json(json_file, found)
            else:
                _add([], found, None)


def _on_this_machine(names: list[str], count: int, job: dict[str, int], device: str, folder: Path) -> list[DdpRow]:
    if count == 1:
        from potluck.device.pick import pick
        from potluck.probe.ddp import DdpJob, train

        return [train(DdpJob(**job), names[0], pick(device, threads=1))]
    out = folder / f"{count}.json"
    start_ranks(_arguments(names, job, device, out), count, 1)
    return _read(out)


def _in_the_lab(names: list[str], mbit: float, job: dict[str, int], folder: Path) -> list[DdpRow]:
    from potluck.lab.ranks import potluck_command, run_on_pair

    out = folder / "lab.json"
    run_on_pair([potluck_command("bench", *_arguments(names, job, "cpu", out))] * 2, mbit, folder)
    return _read(out)


def _read(out: Path) -> list[DdpRow]:
    from potluck.spec.ddp_rows import from_json

    return list(from_json(out.read_text(encoding="utf-8"), "the ranks' result"))


def _arguments(names: list[str], job: dict[str, int], device: str, out: Path) -> list[str]:
    backends = [word for flag, name in zip(("--backend", "--against"), names) for word in (flag, name)]
    flags = [word for name, value in job.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    return ["ddp", *backends, *flags, "--device", device, "--json", str(out)]


def _counts(text: str | None, device: str) -> list[int]:
    if text is None:
        if device == "cpu":
            return list(_COUNTS)
        from potluck.device.pick import gpus

        return [count for count in _COUNTS if count <= max(1, gpus() if device == "cuda" else 1)]
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and 1 <= int(part) <= 64 for part in parts):
        raise UserError(f"--processes {text!r} is not a list of numbers from 1 to 64", hint="for example 1,2,4")
    return [int(part) for part in parts]


def _say(row: DdpRow, first: bool, json_file: str | None) -> None:
    from potluck.report.text import fitted
    from potluck.units import seconds_text

    if json_file == "-" or not is_first():
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

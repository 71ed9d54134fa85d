"""`potluck lab bench`: runs strategies on a rig and prints the comparison."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from potluck import checked
from potluck.cli._app import Settings
from potluck.cli._files import check_writable, write_text
from potluck.env import runs_folder
from potluck.spec.fleet import POTLUCK

if TYPE_CHECKING:
    from potluck.lab.comparison import BenchOutcome
    from potluck.lab.stage import Progress, Report


@click.command()
@click.argument("rig")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    metavar="S",
    help="solo, ddp, ddp-balanced, potluck, hivemind, torchft, ray-ps-sync or ray-ps-async "
    "(default: the first four). May be repeated.",
)
@click.option(
    "--steps", type=click.IntRange(2), help="Steps that each strategy trains (default: those of the rig)."
)
@click.option("--json", "json_file", metavar="FILE", help="Write the results to FILE as JSON (-: standard output).")
@click.option(
    "--out",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder for results, plots and logs (default: runs/lab/RIG-TIME).",
)
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Write the timelines as a page.")
@click.option("--row", is_flag=True, help="Also print a Markdown row to share (docs/results.md).")
@click.option(
    "--loopback", is_flag=True, help="Use 127.0.0.1 and a shaping proxy instead of namespaces: no root, any system."
)
@click.option("--no-plots", is_flag=True, help="Do not draw plots.")
@click.option(
    "--faults",
    metavar="FILE",
    help="Inject faults: sleepy-laptop, bad-wifi, power-cut or a TOML file. Only potluck is affected.",
)
@click.pass_obj
def bench(
    settings: Settings,
    /,
    rig: str,
    strategies: tuple[str, ...],
    steps: int | None,
    json_file: str | None,
    out: Path | None,
    html: Path | None,
    row: bool,
    loopback: bool,
    no_plots: bool,
    faults: str | None,
) -> None:
    """Run each strategy on the same RIG (a built-in name or a TOML file) and compare them.

    \b
    Examples:
      potluck lab bench home-pair                       all four strategies, about 9 minutes
      potluck lab bench home-pair --strategy potluck    only potluck (and the host alone), 3 minutes
      potluck lab bench my-rig.toml --steps 8 --json results.json
      potluck lab bench home-pair --loopback            without namespaces (macOS; no DDP)
      potluck lab bench home-pair --faults sleepy-laptop
      potluck lab bench home-pair --html home-pair.html --row
    """
    from potluck.lab import rigs
    from potluck.lab.comparison import bench as run
    from potluck.lab.comparison import check_strategies, loopback_strategies, new_folder, put_up, without_faults
    from potluck.lab.faults import load_for

    fleet = rigs.load(rig)
    if steps is not None:
        fleet = fleet.with_steps(steps)
    plan = load_for(faults, fleet) if faults is not None else None
    if plan is not None and (others := without_faults(strategies := strategies or (POTLUCK,))):
        click.echo(f"faults affect only potluck; these run without faults: {', '.join(others)}", err=True)
    if loopback and not strategies:
        click.echo("with --loopback only solo and potluck run: DDP's machines connect past the proxy", err=True)
    names = loopback_strategies(strategies) if loopback else check_strategies(strategies)
    runs = runs_folder(None, settings.environment)
    folder = out or runs / "lab" / f"{fleet.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    check_writable(json_file, html)
    new_folder(folder)
    try:
        with put_up(fleet, loopback=loopback, detours=plan is not None) as box, progress() as report:
            measured = run(fleet, names, box, folder.resolve(), report, plan)
    except KeyboardInterrupt:
        click.echo(f"logs of what has run: {folder}", err=True)
        raise
    table = checked.to_json(measured.results)
    (folder / "results.json").write_text(table + "\n")
    pictures = [] if no_plots else write_plots(folder, measured)
    _show(measured, table, json_file, html)
    if row:
        from potluck.report.rows import lab_row

        click.echo(lab_row(measured.results), err=json_file == "-")
    where = sys.stderr if json_file == "-" else sys.stdout
    click.echo(f"figures, logs{' and plots' if pictures else ''}: {folder}", file=where)
    if measured.failed:
        sys.exit(1)


def _show(measured: BenchOutcome, table: str, json_file: str | None, html: Path | None) -> None:
    from potluck.report.lab_table import show_results

    if json_file == "-":
        click.echo(table)
    else:
        if json_file is not None:
            write_text(Path(json_file), table + "\n")
        show_results(measured.results, sys.stdout)
    if html is not None:
        from potluck.web.document import document
        from potluck.web.lab_page import lab_page

        write_text(html, document(lab_page(measured.results, measured.outcomes)))
        click.echo(f"wrote {html}", err=True)


def write_plots(folder: Path, measured: BenchOutcome) -> list[Path]:
    from potluck.errors import UserError
    from potluck.report import lab_plots

    try:
        return lab_plots.write(folder, measured.results, measured.outcomes)
    except UserError as error:
        click.echo(f"no plots: {error} (hint: {error.hint})", err=True)
        return []


@contextmanager
def progress() -> Iterator[Report]:
    """Progress bars on a terminal; elsewhere a line when a strategy begins and when it ends."""
    if not sys.stderr.isatty():
        yield _lines
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description:20}"),
        BarColumn(bar_width=24),
        TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[step_s]}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def report(now: Any) -> None:
            if now.strategy not in tasks:
                tasks[now.strategy] = bars.add_task(now.strategy, total=now.steps, step_s="")
            took = f"{now.step_s:.2f} s" if now.step_s is not None else ""
            bars.update(tasks[now.strategy], completed=now.step, step_s=took)

        yield report


def _lines(now: Progress) -> None:
    if now.step in (1, now.steps) and now.step_s is not None:
        click.echo(f"{now.strategy}: step {now.step} of {now.steps}, {now.step_s:.2f} s", err=True)

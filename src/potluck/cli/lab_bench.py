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

if TYPE_CHECKING:
    from potluck.lab.bench import BenchOutcome
    from potluck.lab.stage import Progress, Report
    from potluck.spec.faults import FaultPlan
    from potluck.spec.rig import Rig


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
def bench(
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
    from potluck.lab.bench import bench as run
    from potluck.lab.bench import check_strategies

    fleet = rigs.load(rig)
    if steps is not None:
        fleet = fleet.with_steps(steps)
    plan = faults_for(fleet, faults, strategies) if faults is not None else None
    if plan is not None and not strategies:
        strategies = ("potluck",)
    names = on_loopback(strategies) if loopback else check_strategies(strategies)
    folder = out or Path("runs") / "lab" / f"{fleet.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    prepare(folder, json_file, html)
    try:
        with make_box(fleet, loopback=loopback, detours=plan is not None) as box, progress() as report:
            measured = run(fleet, names, box, folder.resolve(), report, plan)
    except KeyboardInterrupt:
        click.echo(f"logs of what has run: {folder}", err=True)
        raise
    table = checked.to_json(measured.results)
    (folder / "results.json").write_text(table + "\n")
    pictures = [] if no_plots else write_plots(folder, measured)
    if json_file == "-":
        click.echo(table)
    else:
        if json_file is not None:
            Path(json_file).write_text(table + "\n")
        show(measured)
    if html is not None:
        from potluck.cli.report import write_page
        from potluck.web.document import document
        from potluck.web.lab_page import lab_page

        write_page(html, document(lab_page(measured.results, measured.outcomes)))
    if row:
        from potluck.report.rows import lab_row

        click.echo(lab_row(measured.results), err=json_file == "-")
    where = sys.stderr if json_file == "-" else sys.stdout
    click.echo(f"figures, logs{' and plots' if pictures else ''}: {folder}", file=where)
    if measured.failed:
        sys.exit(1)


def on_loopback(strategies: tuple[str, ...]) -> list[str]:
    """The strategies that can run behind a proxy. In the others, machines connect to each other, past it."""
    from potluck.errors import UserError
    from potluck.lab.bench import check_strategies
    from potluck.spec.fleet import POTLUCK, SOLO

    able = [SOLO, POTLUCK]
    if unable := [name for name in strategies if name in check_strategies(strategies) and name not in able]:
        raise UserError(
            f"{', '.join(unable)} cannot run with --loopback: its machines connect to each other, past the proxy",
            hint="leave --loopback out (Linux with network namespaces), or choose --strategy potluck",
        )
    if not strategies:
        click.echo("with --loopback only solo and potluck run: DDP's machines connect past the proxy", err=True)
    return check_strategies(strategies or able)


def faults_for(fleet: Rig, name_or_path: str, strategies: tuple[str, ...]) -> FaultPlan:
    """The fault plan, checked against the rig. A message says which strategies run without faults."""
    from potluck.errors import ConfigError, UserError
    from potluck.lab import faults
    from potluck.lab.bench import check_strategies
    from potluck.spec.fleet import POTLUCK, SOLO

    plan = faults.load(name_or_path)
    try:
        plan = plan.on(fleet)
    except ConfigError as error:
        raise ConfigError(f"{name_or_path}: {error.what}", hint=error.hint) from error
    chosen = check_strategies(strategies) if strategies else [POTLUCK]
    if POTLUCK not in chosen:
        raise UserError(
            "--faults affects only potluck, which is not among the strategies", hint="add --strategy potluck"
        )
    if others := [name for name in chosen if name not in (POTLUCK, SOLO)]:
        click.echo(f"faults affect only potluck; these run without faults: {', '.join(others)}", err=True)
    return plan


def prepare(folder: Path, json_file: str | None, html: Path | None = None) -> None:
    """Check that results can be written, before ten minutes of measuring."""
    from potluck.errors import UserError

    try:
        for file in (json_file, html):
            if file not in (None, "-"):
                with open(str(file), "a", encoding="utf-8"):
                    pass
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty", hint="give --out a new folder, so that logs do not mix")
    except OSError as error:
        what = f"cannot write {error.filename or folder}: {error.strerror or error}"
        raise UserError(what, hint="give --out and --json paths that you can write to") from error


def make_box(fleet: Any, *, loopback: bool, detours: bool = False) -> Any:
    if loopback:
        from potluck.lab.loopback import LoopbackBox

        return LoopbackBox(fleet)
    from potluck.lab.namespaces import NamespaceBox

    return NamespaceBox(fleet, detours=detours)


def show(measured: BenchOutcome) -> None:
    from potluck.report.lab_table import show_results

    show_results(measured.results, sys.stdout)


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
    """Bars on a terminal; elsewhere a line when a strategy begins and when it ends."""
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

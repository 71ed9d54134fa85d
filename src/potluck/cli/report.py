"""`potluck report RUN`: prints the summary and the loss curve of a run. Reads the run folder only."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import click
from msgspec import structs

from potluck import checked
from potluck.cli._app import Settings
from potluck.cli._files import write_text, written
from potluck.env import runs_folder
from potluck.errors import UserError
from potluck.report.curve import loss_curve_png, loss_curve_text
from potluck.report.planned import planned_step_s
from potluck.report.rows import run_row
from potluck.report.summary import losses, read_events, summarize
from potluck.report.summary_text import summary_text
from potluck.report.text import columns_of, fitted, writes_utf8
from potluck.train.folder import find_run, open_folder

HERE = Path("ID.html")
"""`--html` without a file: named after the run."""


@click.command()
@click.argument("run", required=False)
@click.option("--png", type=click.Path(dir_okay=False, path_type=Path), help="Draw the loss curve to FILE as PNG.")
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    is_flag=False,
    flag_value=HERE,
    help="Write the run as one HTML file that opens in any browser, without a server (default: ID.html, here).",
)
@click.option(
    "--plan",
    "plan_file",
    type=click.Path(path_type=Path),
    help="Compare with the plan saved by `potluck plan --save` (default: plan.json in the run folder, if any).",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
@click.option("--row", is_flag=True, help="Print only a Markdown row to share (docs/results.md).")
@click.pass_obj
def report(
    settings: Settings,
    run: str | None,
    png: Path | None,
    html: Path | None,
    plan_file: Path | None,
    as_json: bool,
    row: bool,
) -> None:
    """Summarize a run: steps, speed, samples computed by each machine, and the loss curve.

    RUN is a run folder or a run's id (default: the newest run).

    \b
    Examples:
      potluck report                        the newest run
      potluck report runs/ID --png curve.png
      potluck report runs/ID --html         the page of `potluck host --web`, as the file ID.html
      potluck report ID --plan plan.json    compare with `potluck plan --save plan.json`
    """
    folder = find_run(run, runs_folder(None, settings.environment))
    events = read_events(folder)
    summary = summarize(events)
    planned_s = planned_step_s(plan_file, folder, alone=len(summary.machines) < 2)
    summary = structs.replace(summary, planned_s=planned_s)
    steps, values = losses(events)
    if row:
        manifest = open_folder(folder).read_manifest()
        click.echo(run_row(summary, events, manifest.versions))
    elif as_json:
        click.echo(checked.to_json(summary, indent=2))
    elif html is None:
        click.echo(fitted(summary_text(summary, columns_of(sys.stdout)), sys.stdout))
        width = min(shutil.get_terminal_size((80, 24)).columns, 100)
        curve = loss_curve_text(steps, values, width - 1, 16, ascii_only=not writes_utf8(sys.stdout))
        if curve:
            click.echo(f"\n{curve}")
    if png is not None:
        _write_png(png, steps, values, summary.run_id)
    if html is not None:
        from potluck.web.document import document, state_of

        file = Path(f"{folder.resolve().name}.html") if html == HERE else html
        write_text(file, document(state_of(events, planned_s).page()))
        click.echo(f"wrote {file}", err=True)


def _write_png(path: Path, steps: list[int], values: list[float], title: str) -> None:
    if not steps:
        raise UserError("this run has no loss to draw", hint="it ended before its first step")
    with written(path):
        drawn = loss_curve_png(path, steps, values, title=title)
    if not drawn:
        raise UserError("a PNG needs matplotlib, which is not installed", hint="pip install -e '.[plots]'")
    click.echo(f"wrote {path}", err=True)

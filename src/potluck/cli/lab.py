"""`potluck lab` and its verbs `list` and `show`."""

from __future__ import annotations

import sys

import click
from msgspec.structs import asdict

from potluck import checked
from potluck.cli._app import LazyGroup, Verb

VERBS: dict[str, Verb] = {
    "list": Verb("potluck.cli.lab:list_", "List the built-in rigs."),
    "show": Verb("potluck.cli.lab:show", "Draw a rig and show what it can gain."),
    "bench": Verb("potluck.cli.lab_bench:bench", "Run strategies on a rig and compare them."),
    "shell": Verb("potluck.cli.lab_machines:shell", "Open a shell on a machine of a rig."),
    "exec": Verb("potluck.cli.lab_machines:exec_", "Run a command on a machine of a rig."),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def lab() -> None:
    """Emulate machines and the links between them on one Linux machine, and compare training strategies.

    A rig describes the machines. RIG is the name of a built-in rig or the path of a TOML file.

    \b
    Examples:
      potluck lab list                                 list the built-in rigs
      potluck lab show home-pair                       draw one of them
      potluck lab bench home-pair                      run solo, ddp, ddp-balanced and potluck on it
      potluck lab show home-pair --toml > mine.toml    start your own rig file
      potluck lab bench mine.toml --strategy potluck
      potluck lab exec home-pair laptop -- ip addr     run a command on an emulated machine
    """


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print the list as JSON.")
def list_(as_json: bool) -> None:
    """List the built-in rigs with their machines, ideal speed-up and a description.

    grad/step is the time to send fp32 gradients over the slowest guest's link, divided by the step time of the
    host alone. The higher it is, the more the network costs.

    \b
    Examples:
      potluck lab list
      potluck lab list --json
    """
    from potluck.lab import rigs
    from potluck.plan import about
    from potluck.report import lab_picture, screen

    found = [(rig, about.facts(rig)) for rig in map(rigs.load, rigs.NAMES)]
    if as_json:
        table = [{"name": rig.name, "about": rig.about, **asdict(facts)} for rig, facts in found]
        click.echo(checked.to_json(table))
        return
    width = screen.columns() if sys.stdout.isatty() else None
    screen.show(lab_picture.list_lines(found, width), sys.stdout)


@click.command()
@click.argument("rig")
@click.option("--toml", "as_toml", is_flag=True, help="Print the rig as a TOML file, to start your own from.")
@click.option("--json", "as_json", is_flag=True, help="Print the rig and its figures as JSON.")
def show(rig: str, as_toml: bool, as_json: bool) -> None:
    """Draw RIG: its machines, speeds and links, and the speed-up to expect. Runs nothing.

    \b
    Examples:
      potluck lab show three-friends
      potluck lab show mine.toml
      potluck lab show home-pair --toml > mine.toml
    """
    from potluck.lab import rigs
    from potluck.plan import about
    from potluck.report import lab_picture, screen

    if as_toml and as_json:
        raise click.UsageError("--toml cannot be combined with --json")
    found = rigs.load(rig)
    if as_toml:
        # As it was written, not as it was understood: the comments say why the numbers are what they are.
        click.echo(screen.shown(rigs.text(rig), sys.stdout), nl=False)
        return
    facts = about.facts(found)
    if as_json:
        click.echo(checked.to_json({"rig": found, **asdict(facts)}))
        return
    screen.show(lab_picture.rig_lines(found, facts, screen.columns()), sys.stdout)

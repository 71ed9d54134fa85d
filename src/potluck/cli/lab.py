"""`potluck lab`: its verbs, of which `list` and `show` are here. Parses and renders; runs nothing on a rig."""

from __future__ import annotations

import json
import sys

import click

from potluck.cli._app import LazyGroup, Verb

VERBS: dict[str, Verb] = {
    "list": Verb("potluck.cli.lab:list_", "The rigs that come with Potluck."),
    "show": Verb("potluck.cli.lab:show", "A picture of a rig, and what to expect of it."),
    "bench": Verb("potluck.cli.lab_bench:bench", "Run strategies on a rig, side by side."),
    "shell": Verb("potluck.cli.lab_machines:shell", "A shell on one of a rig's machines."),
    "exec": Verb("potluck.cli.lab_machines:exec_", "Run a command on one of a rig's machines."),
}


@click.group(cls=LazyGroup, verbs=VERBS)
def lab() -> None:
    """A whole fleet on one Linux box: emulated machines and links, strategies side by side.

    RIG is the name of a built-in rig or the path of a TOML file.

    \b
    Examples:
      potluck lab list                                 what there is
      potluck lab show home-pair                       a picture of it
      potluck lab bench home-pair                      solo, ddp, ddp-balanced and potluck on it
      potluck lab show home-pair --toml > mine.toml    a start for your own rig
      potluck lab bench mine.toml --strategy potluck
      potluck lab exec home-pair laptop -- ip addr     use an emulated machine by hand
    """


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="The same as JSON, for programs.")
def list_(as_json: bool) -> None:
    """The rigs that come with Potluck: machines, ideal speed-up, and what each is about.

    grad/step is the time that fp32 gradients take over the slowest guest's link, divided by the time of a step of
    the host alone: the higher, the more a fleet loses to its network.

    \b
    Examples:
      potluck lab list
      potluck lab list --json
    """
    from potluck.lab import rigs
    from potluck.report import lab_picture, screen
    from potluck.spec import about

    found = [(rig, about.facts(rig)) for rig in map(rigs.load, rigs.NAMES)]
    if as_json:
        table = [{"name": rig.name, "about": rig.about, **facts.to_dict()} for rig, facts in found]
        click.echo(json.dumps(table, indent=2))
        return
    screen.show(lab_picture.list_lines(found, screen.columns()), sys.stdout)


@click.command()
@click.argument("rig")
@click.option("--toml", "as_toml", is_flag=True, help="The rig as a TOML file: a start for your own.")
@click.option("--json", "as_json", is_flag=True, help="The rig and its facts as JSON, for programs.")
def show(rig: str, as_toml: bool, as_json: bool) -> None:
    """A picture of RIG: machines, speeds, links, and what to expect before anything runs.

    \b
    Examples:
      potluck lab show three-friends
      potluck lab show mine.toml
      potluck lab show home-pair --toml > mine.toml
    """
    from potluck.lab import rigs
    from potluck.report import lab_picture, screen
    from potluck.spec import about
    from potluck.spec.rig import to_table

    if as_toml and as_json:
        raise click.UsageError("--toml or --json, not both")
    found = rigs.load(rig)
    if as_toml:
        # As it was written, not as it was understood: the comments say why the numbers are what they are.
        click.echo(screen.shown(rigs.text(rig), sys.stdout), nl=False)
        return
    facts = about.facts(found)
    if as_json:
        click.echo(json.dumps({"rig": to_table(found), **facts.to_dict()}, indent=2))
        return
    screen.show(lab_picture.rig_lines(found, facts, screen.columns()), sys.stdout)

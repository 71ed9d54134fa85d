"""`potluck lab shell` and `potluck lab exec`: run a shell or a command on an emulated machine.

Commands that run at the same time share one rig.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from potluck.lab.namespaces import NamespaceBox
    from potluck.spec.rig import Machine, Rig


@click.command()
@click.argument("rig")
@click.argument("machine")
@click.pass_context
def shell(ctx: click.Context, rig: str, machine: str) -> None:
    """Open a shell on MACHINE, an emulated machine of RIG, with its link and its speed.

    The rig is up as long as a shell or command uses it, and all of them share it: open a second shell on another
    machine, and the two can reach each other. Processes started in the rig end with it.

    \b
    Examples:
      potluck lab shell home-pair desk        then type: potluck host
      potluck lab shell home-pair laptop      then type: potluck join TOKEN
    """
    from potluck.lab import rigs
    from potluck.lab.namespaces import NamespaceBox
    from potluck.lab.shell import run_shell

    found = rigs.load(rig)
    which = found.machine(machine)
    with NamespaceBox(found, shared=True) as box:
        for line in welcome(found, which, box):
            click.echo(line, err=True)
        status = run_shell(box, which)
    ctx.exit(status)


@click.command("exec", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("rig")
@click.argument("machine")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def exec_(ctx: click.Context, rig: str, machine: str, command: tuple[str, ...]) -> None:
    """Run COMMAND on MACHINE, an emulated machine of RIG, and exit with its status.

    Commands that run at the same time share the rig and can reach each other.

    \b
    Examples:
      potluck lab exec home-pair laptop -- ip addr
      potluck lab exec home-pair desk -- potluck host --depth 2 --steps 20
      potluck lab exec home-pair desk -- iperf3 --server
    """
    from potluck.lab import rigs
    from potluck.lab.namespaces import NamespaceBox
    from potluck.lab.shell import environment

    # click takes everything after MACHINE as it is, so also the -- that says where COMMAND begins.
    words = command[1:] if command[0] == "--" else command
    if not words:
        raise click.UsageError("there is no command after --", ctx)
    found = rigs.load(rig)
    which = found.machine(machine)
    with NamespaceBox(found, shared=True) as box:
        status = box.run(machine, words, env=environment(which))
    ctx.exit(status)


def welcome(rig: Rig, machine: Machine, box: NamespaceBox) -> list[str]:
    """The lines shown when a shell opens: this machine and the others."""
    from potluck.lab.shell import paced_device

    address = box.address(machine.name)
    lines = [
        f"this is {machine.name}, {_article(machine.role)} of the rig {rig.name}, at {address}; leave it with exit"
    ]
    if (device := paced_device(machine)) is not None:
        lines.append(
            f"  speed: {machine.seconds_per_sample:g} s a sample (--device {device}, set as POTLUCK_DEVICE)"
        )
    else:
        lines.append("  speed: this computer's own")
    lines.append(f"  link: {_link(machine)}")
    if machine.cpu_limit is not None:
        lines.append(f"  CPU: at most {machine.cpu_limit:g} cores")
    for other in rig.machines:
        if other.name != machine.name:
            lines.append(f"  {other.name} ({other.role}) is at {box.address(other.name)}; its link: {_link(other)}")
    lines.append(
        "  try: " + ("potluck host" if machine.role == "host" else "potluck join TOKEN, with the host's token")
    )
    return lines


def _article(role: str) -> str:
    return "the host" if role == "host" else "a guest"


def _link(machine: Machine) -> str:
    speed = "unshaped" if machine.link_mbit is None else f"{machine.link_mbit:g} Mbit/s in each direction"
    if machine.link_up_mbit is not None:
        speed = f"{machine.link_up_mbit:g} Mbit/s up, {machine.link_mbit:g} down"
    return f"{speed}, {machine.latency_ms:g} ms one way" if machine.latency_ms else speed

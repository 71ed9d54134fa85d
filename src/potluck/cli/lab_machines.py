"""`potluck lab shell` and `potluck lab exec`: run a shell or a command on an emulated machine.

Commands that run at the same time share one rig.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from potluck.lab.namespaces import NamespaceBox
    from potluck.spec.rig import Machine, Rig

_MOST_NAME = 64


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

    found = rigs.load(rig)
    which = found.machine(machine)
    with NamespaceBox(found, shared=True) as box:
        for line in welcome(found, which, box):
            click.echo(line, err=True)
        status = _run_shell(box, which)
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

    # click takes everything after MACHINE as it is, so also the -- that says where COMMAND begins.
    words = command[1:] if command[0] == "--" else command
    if not words:
        raise click.UsageError("there is no command after --", ctx)
    found = rigs.load(rig)
    which = found.machine(machine)
    with NamespaceBox(found, shared=True) as box:
        status = box.run(machine, words, env=environment(which))
    ctx.exit(status)


def environment(machine: Machine) -> dict[str, str]:
    """Our environment, plus the variables that give Potluck this machine's name, speed and threads."""
    variables = {**os.environ, "POTLUCK_NAME": machine.name[:_MOST_NAME]}
    # One core each, as in a bench: emulated machines that took all of them would not keep their pace.
    variables |= {"POTLUCK_THREADS": "1", "OMP_NUM_THREADS": "1"}
    here = os.path.dirname(sys.executable)
    variables["PATH"] = os.pathsep.join([here, variables.get("PATH", os.defpath)])
    if (device := _device(machine)) is not None:
        variables["POTLUCK_DEVICE"] = device
    return variables


def welcome(rig: Rig, machine: Machine, box: NamespaceBox) -> list[str]:
    """The lines shown when a shell opens: this machine and the others."""
    address = box.address(machine.name)
    lines = [
        f"this is {machine.name}, {_article(machine.role)} of the rig {rig.name}, at {address}; leave it with exit"
    ]
    if (device := _device(machine)) is not None:
        lines.append(
            f"  speed: {machine.seconds_per_sample:g} s a sample (--device {device}, set as POTLUCK_DEVICE)"
        )
    else:
        lines.append("  speed: this box's own")
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


def _device(machine: Machine) -> str | None:
    return None if machine.seconds_per_sample is None else f"paced:{machine.seconds_per_sample:.12g}"


def _run_shell(box: NamespaceBox, machine: Machine) -> int:
    program = os.environ.get("SHELL") or "/bin/sh"
    variables = environment(machine)
    if os.path.basename(program) != "bash":
        # Shells that read no file of ours take the prompt from here, unless the user's own file sets one.
        return box.run(machine.name, [program], env={**variables, "PS1": f"({machine.name}) $ "})
    file = _bash_start(machine.name)
    try:
        return box.run(machine.name, [program, "--rcfile", f"/dev/fd/{file}"], env=variables, files=[file])
    finally:
        os.close(file)


def _bash_start(name: str) -> int:
    """An in-memory startup file for bash: the user's ~/.bashrc, then a prompt with the machine's name."""
    file = os.memfd_create("potluck-lab-shell")
    words = f"[ -r ~/.bashrc ] && . ~/.bashrc\nPS1='({name}) '\"$PS1\"\nexec {file}<&-\n"
    os.write(file, words.encode())
    return file

"""The environment and the prompt of a shell or command on an emulated machine."""

from __future__ import annotations

import os
import sys

from potluck.lab.namespaces import NamespaceBox
from potluck.spec.rig import Machine

_MOST_NAME = 64


def environment(machine: Machine) -> dict[str, str]:
    """Our environment, plus the variables that give Potluck this machine's name, speed and threads."""
    variables = {**os.environ, "POTLUCK_NAME": machine.name[:_MOST_NAME]}
    # One core each, as in a bench: emulated machines that took all of them would not keep their pace.
    variables |= {"POTLUCK_THREADS": "1", "OMP_NUM_THREADS": "1"}
    here = os.path.dirname(sys.executable)
    variables["PATH"] = os.pathsep.join([here, variables.get("PATH", os.defpath)])
    if (device := paced_device(machine)) is not None:
        variables["POTLUCK_DEVICE"] = device
    return variables


def paced_device(machine: Machine) -> str | None:
    """The device that has this machine's speed; None: this computer's own."""
    return None if machine.seconds_per_sample is None else f"paced:{machine.seconds_per_sample:.12g}"


def run_shell(box: NamespaceBox, machine: Machine) -> int:
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

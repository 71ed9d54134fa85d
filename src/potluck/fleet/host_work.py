"""The command for the host's machine in a launched run, and the script's requirements on every machine."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from potluck.fleet.bootstrap import FleetNeeds, name_of
from potluck.fleet.launching import HostWork
from potluck.fleet.script import check_send, imports_of, is_script, read_script
from potluck.fleet.ssh import SshFleet


def needs_of(what: str | None, send: Sequence[Path], extra: Sequence[str]) -> FleetNeeds:
    """The script's imports that are not sent with it, and the packages in `extra`."""
    for word in extra:
        name_of(word)
    imports: dict[str, str] = {}
    if what is not None:
        check_send(what, send)
    if what is not None and is_script(what):
        found = imports_of(read_script(Path(what), send), Path(what).resolve().parent)
        imports = {module: where for module, where in found.items() if not where.startswith("./")}
    return FleetNeeds(extra=tuple(extra), imports=imports)


def host_work(
    fleet: SshFleet,
    host: str,
    what: str,
    arguments: Sequence[str],
    *,
    runs: Path,
    again: str,
    options: Sequence[str],
    send: Sequence[Path],
) -> HostWork:
    """The command of the host. On another machine the script is copied to a separate folder.

    `again` is the command that resumes the run. Without it the host does not wait and logs events, for a check,
    which reads its first steps. `options` are the given options of `potluck host`.
    """
    words = ["-m", "potluck", "host", *(["--view", "plain", "--launched", again] if again else ["--view", "json"])]
    words += options
    machine = fleet.machine(host)
    files: dict[str, bytes] = {}
    if not machine.ssh:
        cwd, there = os.getcwd(), str(runs.absolute())
        words += ["--runs", there, *(word for file in send for word in ("--send", str(file)))]
    else:
        words += [] if "--name" in options else ["--name", host]
        cwd = machine.folder or f"~/potluck/{Path.cwd().name}"
        there = f"{cwd}/runs" if again else str(runs)
        words += [] if again else ["--runs", there]
        if is_script(what):
            script = read_script(Path(what), send)
            files = {str(PurePosixPath(cwd) / name): text for name, text in zip(script.names, script.contents)}
            what = f"./{script.names[0]}"
            words += [word for name in script.names[1:] for word in ("--send", name)]
    tail = [what, "--", *arguments] if is_script(what) and arguments else [what, *arguments]
    return HostWork(machine=host, words=[*words, *tail], cwd=cwd, runs=there, files=files)

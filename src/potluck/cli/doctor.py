"""`potluck doctor`: collects facts about this machine, a pair of machines or a log, and prints the diagnosis."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import click
from msgspec.structs import replace

from potluck import checked
from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.cli._files import write_json
from potluck.env import runs_folder
from potluck.errors import ConfigError, UserError

if TYPE_CHECKING:
    from potluck.doctor.facts.collecting import Wanted
    from potluck.doctor.log_text import Part
    from potluck.spec.facts import Case, Facts
    from potluck.spec.finding import Diagnosis, LogReading

    LogParts = tuple[list[Part], int]
    """The parts of a log, and the number of bytes left out of it."""

UNKNOWN_FAILURE = 2
"""Exit status for a log with an unknown failure; the same as for a file that is not a log."""
_OF_A_RUN = ("manifest.json", "events.jsonl", "checkpoints")
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9}


class DoctorFlags(options.ListenFlags):
    log: Path | None
    runs: Path | None
    run: Path | None
    cluster: Path | None
    parameters: str | None
    save: Path | None
    facts: Path | None
    as_json: bool


@click.command()
@click.argument("target", metavar="[ADDRESS|TOKEN]", required=False)
@options.listen_options(
    listen="Wait for the other machine: print a token and answer machines that connect with it.",
    port="Port that you plan to use (default: a free one).",
)
@click.option(
    "--error",
    "log",
    type=click.Path(path_type=Path, allow_dash=True),
    metavar="FILE",
    help="Find what failed in this log of a run (-: standard input).",
)
@click.option("--runs", type=click.Path(path_type=Path), help="Folder for run folders (default: runs).")
@click.option("--run", type=click.Path(path_type=Path), help="Also check the checkpoints of this run folder.")
@click.option(
    "--cluster", type=click.Path(path_type=Path), help="Also try ssh to the machines of this fleet.toml."
)
@click.option("--parameters", metavar="N", help="Also check whether a model of N parameters fits (124M, 1.5B).")
@click.option(
    "--save", type=click.Path(path_type=Path, dir_okay=False), help="Write the collected facts to FILE as JSON."
)
@click.option(
    "--facts", type=click.Path(path_type=Path), help="Diagnose facts saved with --save instead of this machine."
)
@click.option("--json", "as_json", is_flag=True, help="Print the diagnosis as JSON.")
@click.pass_obj
def doctor(settings: Settings, /, target: str | None, **flags: Unpack[DoctorFlags]) -> int:
    """Find problems on this machine or between two machines, and say how to fix them.

    Without an argument, check this machine. With the TOKEN of `potluck doctor --listen` or of a running host, also
    check the connection to that machine in both directions and the speed of each of its addresses. With an
    ADDRESS, check only the connection to it. With --error, read the log or the pasted error message of a run
    (torchrun, gloo, NCCL, accelerate, DeepSpeed, Potluck) and say what failed first.

    A blocker stops Potluck. A warning costs speed or safety. A note matters to other tools, not to Potluck. The
    exit status is 1 if there is a blocker, else 0. With --error the exit status depends only on the log: 0 if it
    shows no failure, 1 for a known failure, 2 for an unknown failure or a file that is not a log.

    \b
    Examples:
      potluck doctor
      potluck doctor --listen               on one machine; prints the command for the other
      potluck doctor potluck3-…             on the other
      potluck doctor 192.168.1.20:7171
      potluck doctor --error run.log        what failed in that run
      torchrun train.py 2>&1 | tee run.log; potluck doctor --error run.log
      potluck doctor --parameters 124M --cluster fleet.toml --save facts.json
    """
    _check_flags(target, flags)
    # Read before anything slow, so that a typing error is reported at once.
    log = _log_parts(flags["log"]) if flags["log"] is not None else None
    if flags["facts"] is not None:
        from potluck.spec.facts import case_of

        hint = "make one with: potluck doctor --save FILE"
        return _finish(case_of(checked.read_json(flags["facts"], what="a facts file", hint=hint)), flags, log)
    wanted = _wanted(settings, flags)
    with _progress() as say:
        case = _look(target, flags, wanted, say)
    if flags["listen"]:
        return _listen(case.here, flags)
    return _finish(case, flags, log)


def _check_flags(target: str | None, flags: DoctorFlags) -> None:
    if target is not None:
        _check_target(target, flags)
    alone = {"--facts": flags["facts"], "--listen": flags["listen"] or None}
    for name, value in alone.items():
        if value is not None and (target or flags["token_file"]):
            raise ConfigError(f"{name} takes no address and no token", hint="potluck doctor --help shows examples")
    if flags["listen"] and flags["facts"]:
        raise ConfigError(
            "--listen cannot be combined with --facts", hint="--facts reads a file instead of this machine"
        )
    unused = options.given(flags, ("port", "run", "runs", "cluster", "parameters")) if flags["facts"] else {}
    for name in unused:
        raise ConfigError(
            f"--{name} cannot be combined with --facts", hint="--facts reads a file instead of this machine"
        )
    if flags["listen"] and flags["log"]:
        raise ConfigError("--listen cannot be combined with --error", hint="read the log first, then listen")
    options.check_listening("doctor", flags, "bind", "for")


def _check_target(target: str, flags: DoctorFlags) -> None:
    """Refuse an empty target or one that names a file."""
    if not target.strip():
        raise ConfigError(
            "the address is empty", hint="is a variable not set? potluck doctor --help shows examples"
        )
    try:
        is_file = Path(target).is_file()
    except (OSError, ValueError):  # a token is longer than a file's name may be
        return
    if not is_file:
        return
    name = shlex.quote(target)
    if flags["log"] is not None:
        raise ConfigError(
            f"--error takes one log, and {target} is another file",
            hint=f"one by one: potluck doctor --error {name}; or: cat FILES | potluck doctor --error -",
        )
    raise ConfigError(
        f"{target} is a file, not an address",
        hint=f"a failed run's log: potluck doctor --error {name}; recorded facts: --facts; a token: --token-file",
    )


def _wanted(settings: Settings, flags: DoctorFlags) -> Wanted:
    from potluck.doctor.facts.collecting import Wanted

    run = flags["run"]
    if run is not None and not run.is_dir():
        raise UserError(f"there is no run folder {run}", hint="see your run folders with: ls runs")
    if run is not None and not any((run / name).exists() for name in _OF_A_RUN):
        inside = sorted(path.parent for path in run.glob("*/manifest.json"))
        raise UserError(
            f"{run} is not a run folder: it has none of {', '.join(_OF_A_RUN)}",
            hint=f"it holds runs: potluck doctor --run {shlex.quote(str(inside[-1]))}"
            if inside
            else "see your run folders with: ls runs",
        )
    return Wanted(
        runs=runs_folder(flags["runs"], settings.environment),
        port=flags["port"],
        run=run,
        cluster=flags["cluster"],
        parameters=_count(flags["parameters"]),
    )


def _count(text: str | None) -> int | None:
    if text is None:
        return None
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([kmgbKMGB]?)", text.strip())
    count = int(float(match[1]) * _UNITS[match[2].lower()]) if match else 0
    if not 0 < count < 10**15:
        raise ConfigError(f"--parameters {text!r} is not a number of parameters", hint="for example 124M or 1.5B")
    return count


def _look(target: str | None, flags: DoctorFlags, wanted: Wanted, say: Callable[[str], None]) -> Case:
    from potluck.cli._target import address_of, token_text
    from potluck.probe.meeting import look
    from potluck.wire.token import decode

    text = token_text(target, flags["token_file"])
    # Before anything slow, so that a typing error is reported at once.
    token = decode(text) if text is not None else None
    address = address_of(target, "doctor") if target and token is None else None
    return look(wanted, say, token=token, address=address, back_port=flags["port"] or 0)


def _log_parts(path: Path) -> LogParts:
    """The log of a failed run; - is standard input."""
    from potluck.doctor.log_file import read_parts

    if str(path) == "-" and sys.stdin.isatty():
        click.echo("paste the message, then press Ctrl-D (Windows: Ctrl-Z, Enter)", err=True)
    return read_parts(path)


def _reading(case: Case, flags: DoctorFlags, log: LogParts | None) -> LogReading | None:
    """The findings of the log, if one was given."""
    from potluck.doctor.log import read_log

    if log is None:
        return None
    parts, left_out = log
    name = "stdin" if str(flags["log"]) == "-" else str(flags["log"])
    return read_log(parts, name, left_out, cores=case.here.cpu.physical)


def _finish(case: Case, flags: DoctorFlags, log: LogParts | None = None) -> int:
    from potluck.doctor import examine

    diagnosis = replace(examine(case), log=_reading(case, flags, log))
    if flags["save"] is not None:
        write_json(flags["save"], case)
        click.echo(f"wrote {flags['save']}", err=True)
    _show(case, diagnosis, flags["as_json"])
    return _status(diagnosis)


def _show(case: Case, diagnosis: Diagnosis, as_json: bool) -> None:
    if as_json:
        click.echo(checked.to_json(diagnosis))
    else:
        from potluck.cli._doctor_view import lines_of
        from potluck.report.screen import columns, show

        show(lines_of(case, diagnosis, columns(), sys.stdout), sys.stdout)
    sys.stdout.flush()


def _status(diagnosis: Diagnosis) -> int:
    """The exit status. With a log it depends on the log alone, so that it is the same on every machine."""
    log = diagnosis.log
    if log is None:
        return 0 if diagnosis.healthy else 1
    if not log.failed:
        return 0
    return 1 if log.explained else UNKNOWN_FAILURE


def _listen(here: Facts, flags: DoctorFlags) -> int:
    """Answer the other machine until time or Ctrl-C ends it."""
    from potluck.cli._listening import reports_peer, serve
    from potluck.probe.listening import Listening
    from potluck.probe.meeting import Listener
    from potluck.spec.facts import Case

    with Listening(flags["bind"], flags["port"]) as listening:
        listener = Listener(listening.socket, here)
        try:
            _finish(Case(here=here), flags)
            listener.on_hello = reports_peer("connected to check the link")
            serve(listening, "doctor", listener.serve, flags["for_s"], token_on_stderr=flags["as_json"])
        finally:
            listener.close()
    return 0


@contextlib.contextmanager
def _progress() -> Any:
    """A status line that is rewritten on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda words: None
        return
    try:
        yield lambda words: click.echo(f"\r\x1b[K{words[:78]} …", nl=False, err=True)
    finally:
        click.echo("\r\x1b[K", nl=False, err=True)

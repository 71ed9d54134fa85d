"""`potluck up`: starts a run on all machines over ssh, and ends when the run ends."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, TypedDict, Unpack

import click

from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.env import runs_folder
from potluck.errors import UserError

if TYPE_CHECKING:
    from potluck.fleet.bootstrap import FleetNeeds
    from potluck.fleet.launching import HostWork
    from potluck.fleet.ssh import SshFleet
    from potluck.report.merged_log import MergedLog
    from potluck.spec.finding import Finding
    from potluck.spec.fleet_file import FleetFile

_FOR_HOST = (*options.RUN_FLAGS, *options.HOST_FLAGS, "resume")
"""Options that are passed on to the host."""
_FOR_CHECK = ("device", "threads", "micro_batch", "bind")
_BEFORE, _AFTER = "potluck.up.before", "potluck.up.after"


class UpFlags(TypedDict):
    """The options besides _FOR_HOST, which only become arguments of the host's command."""

    host: str | None
    engine: str | None
    check: bool
    only: tuple[str, ...]
    extra: str | None
    keep_trying: bool
    send: tuple[Path, ...]
    runs: Path | None
    name: str | None


class _WithRest(click.Command):
    """Everything after the first -- belongs to the script and is not parsed here."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_BEFORE], ctx.meta[_AFTER] = tuple(args[:end]), tuple(args[end + 1 :])
        return super().parse_args(ctx, args[:end])


@click.command(cls=_WithRest, options_metavar="[OPTIONS]")
@click.argument("machines", nargs=-1, metavar="MACHINES... -- SCRIPT [ARGUMENTS]")
@click.option(
    "--host",
    "host",
    metavar="NAME",
    help="The machine that hosts (default: this one). For Ray nodes also LABEL=VALUE.",
)
@click.option("--fleet", "engine", type=click.Choice(["ray"]), help="Same as ray://auto among the machines.")
@click.option(
    "--check", is_flag=True, help="Check and measure all machines and predict the speed-up; start nothing."
)
@click.option("--only", multiple=True, metavar="NAME", help="Show only this machine's lines. May be repeated.")
@click.option("--with", "extra", metavar="A,B", help="Packages that the script needs on every machine.")
@click.option(
    "--python", metavar="PATH", help="Interpreter on all machines (default: the first that is new enough)."
)
@click.option("--cache", metavar="DIR", help="Folder on all machines for Potluck (default: ~/.cache/potluck).")
@click.option("--keep-trying", is_flag=True, help="Keep trying machines that cannot be reached or that fail.")
@click.option(
    "--send", multiple=True, type=click.Path(path_type=Path), metavar="FILE", help="As for `potluck host`."
)
@options.shared(*options.RUN_FLAGS, "runs", "resume", *options.HOST_FLAGS)
@click.pass_context
def up(ctx: click.Context, /, machines: tuple[str, ...], **flags: Unpack[UpFlags]) -> int:
    """Start a run here and a guest on each machine over ssh; show their output, and end everything with the run.

    MACHINES are names as for `ssh`, or files: fleet.toml, a host file of mlx.launch, DeepSpeed, MPI or accelerate;
    and ray://auto, or ray://HOST:PORT: the nodes of the Ray cluster that this machine is part of (extra `ray`).
    Each machine must allow a login without a password and have Python 3.11 or newer; everything else is installed
    there, without root, in ~/.cache/potluck. Other options are those of the host. The host sends the script to the
    guests.

    \b
    Examples:
      potluck up desk mac.local old@laptop -- my_train.py --steps 1000
      potluck up fleet.toml --check
      potluck up fleet.toml --host desk --with transformers,peft -- my_train.py
      potluck up desk mac.local --resume runs/ID -- my_train.py
      potluck up ray://auto mac.local -- my_train.py
      potluck up --fleet ray --host kind=h100 -- my_train.py
    """
    from potluck.fleet.hostfiles import check_together, read_fleet
    from potluck.fleet.launching import RAY
    from potluck.fleet.local import HERE

    machines += ("ray://auto",) if flags["engine"] and not any(word.startswith(RAY) for word in machines) else ()
    if not machines:
        raise click.MissingParameter(param_hint="MACHINES", param_type="argument")
    if os.name != "posix":
        raise UserError("potluck up runs on Linux and macOS", hint="on Windows, run it in WSL2")
    settings: Settings = ctx.obj
    after: tuple[str, ...] = ctx.meta[_AFTER]
    clusters = [word.removeprefix(RAY) or "auto" for word in machines if word.startswith(RAY)]
    fleet = _changed(read_fleet([word for word in machines if not word.startswith(RAY)]), flags)
    host = flags["host"] or fleet.host
    there = bool(clusters and host and host not in [m.name for m in fleet.machine])
    check_together(fleet, clusters, host, only=flags["only"], check=flags["check"])
    if flags["check"]:
        from potluck.cli._up_check import check

        def work_on(fleet: SshFleet, runs: Path) -> HostWork:
            return _work(fleet, host or HERE, runs, after, "", flags)

        bind = [word for name, value in options.given(flags, ("bind",)).items() for word in (f"--{name}", value)]
        return check(fleet, host, _wanted(after, flags), bind, work_on if after else None)
    if not after:
        raise UserError(
            "no script was given", hint="after --, for example: potluck up desk mac.local -- my_train.py"
        )
    again = _resumed_by(ctx.meta[_BEFORE], after)
    if there:
        return _launch_there(clusters[0], host, after, again, flags)
    return _launch(settings, fleet, host, after, again, flags, next(iter(clusters), ""))


def _launch_there(address: str, host: str, after: tuple[str, ...], again: str, flags: UpFlags) -> int:
    """With the host on a node of a Ray cluster: an actor there starts all of it."""
    from potluck.fleet.life import interrupted_by_signals, reader_watched
    from potluck.fleet.ray import RayCluster, node_labels

    cluster = RayCluster(host={"label_selector": node_labels(address, host)}, address=address)
    name = [] if "=" in host else ["--name", host]
    words = [*name, "--launched", again, *_passed_on(flags, _FOR_HOST)]
    runs = flags["runs"] or Path("~/potluck", Path.cwd().name, "runs")
    run = cluster.start(after[0], after[1:], options=words, runs=runs, send=flags["send"])
    with interrupted_by_signals(run.interrupt), reader_watched(run.interrupt):
        ended = run.follow(sys.stdout.buffer)
    if ended.why:
        click.echo(f"\nthe run failed: {ended.why}", err=True)
    if ended.folder:
        click.echo(f"run folder, on the node that hosted: {ended.folder}", err=True)
    return ended.status or 0


def _resumed_by(before: Sequence[str], after: Sequence[str]) -> str:
    """The command that resumes this run, with {run} for its folder."""
    from potluck.fleet.script import is_script

    words, kept = list(before), []
    while words:
        word = words.pop(0)
        if word == "--resume":
            words = words[1:]
        elif not word.startswith("--resume="):
            kept.append(word)
    script = after if is_script(after[0]) else after[:1]  # the settings of a recipe are the run's own
    return f"{shlex.join(['potluck', 'up', *kept])} --resume {{run}} -- {shlex.join(script)}"


def _changed(fleet: FleetFile, flags: UpFlags) -> FleetFile:
    """The fleet, with the flags applied to all machines."""
    from msgspec.structs import replace

    given = options.given(flags, ("python", "cache"))
    return replace(fleet, machine=tuple(replace(machine, **given) for machine in fleet.machine)) if given else fleet


def _launch(
    settings: Settings, fleet: FleetFile, host: str, after: tuple[str, ...], again: str, flags: UpFlags, ray: str
) -> int:
    """`ray`: address of a Ray cluster whose nodes take part, too; empty for none."""
    from potluck.fleet.cluster import ClusterFleet, followed
    from potluck.fleet.launching import Launcher, LaunchFleet
    from potluck.fleet.life import interrupted_by_signals, reader_watched
    from potluck.fleet.local import HERE
    from potluck.fleet.ssh import SshFleet
    from potluck.report.merged_log import MergedLog
    from potluck.spec.fleet_file import NamedMachine

    runs = runs_folder(flags["runs"], settings.environment)
    machines = [*fleet.machine, *([] if host else [NamedMachine(name=HERE)])]
    names = [machine.name for machine in machines]
    logs = runs / f".up-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    engine = None
    if ray:
        from potluck.fleet.ray import RayFleet

        engine = RayFleet(ray, without_here=not host)
    reached = SshFleet(machines, _wanted(after, flags), logs=logs)
    work = _work(reached, host or HERE, runs, after, again, flags)
    log = MergedLog(logs, names, sys.stdout, flags["only"])
    observer = _Observer(log, runs)
    guests = [name for name in names if name != (host or HERE)]
    whole: LaunchFleet = reached if engine is None else ClusterFleet(engine, reached, engine.gpus)
    launcher = Launcher(whole, guests, work, observer, keep_trying=flags["keep_trying"] or engine is not None)
    try:
        # Without a reader (`| head`) the run ends as with Ctrl-C.
        stop, comers = launcher.interrupt, nullcontext() if engine is None else followed(engine, launcher, log.add)
        with interrupted_by_signals(stop), reader_watched(stop), comers:
            status = launcher.run()
    finally:
        kept = log.close()
    if status and launcher.first_error is not None:
        name, words = launcher.first_error
        click.echo(f"\nthe first error was on {name}: {words}", err=True)
    click.echo(f"logs: {kept}", err=True)
    if launcher.cut_off and launcher.run_folder:
        click.echo(f"resume with: {again.replace('{run}', shlex.quote(launcher.run_folder))}", err=True)
    return status


def _wanted(after: Sequence[str], flags: UpFlags) -> FleetNeeds:
    from potluck.fleet.host_work import needs_of

    extra = tuple(word.strip() for word in (flags["extra"] or "").split(",") if word.strip())
    return needs_of(after[0] if after else None, flags["send"], extra)


def _work(fleet: SshFleet, host: str, runs: Path, after: tuple[str, ...], again: str, flags: UpFlags) -> HostWork:
    """`again` is empty for `--check`, which asks for no guests."""
    from potluck.fleet.host_work import host_work

    options = _passed_on(flags, _FOR_HOST if again else _FOR_CHECK)
    what, *arguments = after
    return host_work(fleet, host, what, arguments, runs=runs, again=again, options=options, send=flags["send"])


def _passed_on(flags: UpFlags, names: Sequence[str]) -> list[str]:
    """The flags of these names that were given, as words of `potluck host`."""
    words = []
    for name, value in options.given(flags, names).items():
        for each in value if isinstance(value, tuple) else (value,):
            option = "web-address" if name == "web" else name.replace("_", "-")
            words += [f"--{option}", str(each)]
    return words


class _Observer:
    """Shows the launcher's messages, and stores the logs with the run."""

    def __init__(self, log: MergedLog, runs: Path) -> None:
        self._log, self._runs = log, runs

    def problems(self, findings: Sequence[Finding]) -> None:
        show_findings(findings)

    def tell(self, machine: str, words: str) -> None:
        self._log.show(machine, words)

    def run_known(self, run: str) -> None:
        self._log.keep_in(self._runs / PurePosixPath(run).name / "logs")


def show_findings(findings: Sequence[Finding]) -> None:
    """The findings of all machines, the worst first, on stderr."""
    from potluck.cli._doctor_view import finding_lines
    from potluck.report.screen import columns, show
    from potluck.report.text import writes_utf8
    from potluck.spec.finding import ordered

    for finding in ordered(list(findings)).findings:
        show(finding_lines(finding, columns(), writes_utf8(sys.stderr)), sys.stderr)
    sys.stderr.flush()

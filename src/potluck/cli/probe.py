"""`potluck probe`: measures this device and a link, prints the figures and saves them."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import click

from potluck import checked
from potluck.cli import _options as options
from potluck.cli._app import Settings
from potluck.cli._files import check_writable, write_json
from potluck.errors import ConfigError
from potluck.probe.groups import is_first, ranks_here
from potluck.spec.collective_rows import check_results

if TYPE_CHECKING:
    from potluck.probe.measuring import Measuring, Say
    from potluck.spec.probed import Probed

_RECIPE_FLAGS = ("depth", "sequence", "data")
_RUN_FLAGS = ("device", "threads", "name", "micro_batch")


class ProbeFlags(options.ListenFlags):
    """The flags besides _RECIPE_FLAGS and _RUN_FLAGS, which only go into a config."""

    seconds: float
    recipe: str
    more: tuple[str, ...]
    config_file: Path | None
    no_device: bool
    no_iperf3: bool
    save: Path | None
    as_json: bool
    backend: str


@click.command()
@click.argument("target", metavar="[ADDRESS|TOKEN]", required=False)
@options.listen_options(
    listen="Wait for the other machine: measure this device, print a token and answer.",
    port="With --listen: port to listen on (default: a free one).",
)
@click.option(
    "--seconds", type=options.Number(1.0, 120.0), default=10.0, show_default=True, help="Total time to measure."
)
@click.option("--recipe", default="gpt", show_default=True, help="Recipe to train for the measurement: gpt or cnn.")
@options.shared("depth", "sequence", "data", "set", "config", "device", "threads", "micro_batch", "name")
@click.option("--no-device", is_flag=True, help="Measure only the link, not the device.")
@click.option("--no-iperf3", is_flag=True, help="Do not run iperf3, even if both machines have it.")
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the figures to FILE, for `potluck plan --facts FILE`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option(
    "--backend",
    default="potluck",
    show_default=True,
    help="Under torchrun: torch.distributed backend to measure; nccl takes the GPUs.",
)
@click.pass_obj
def probe(settings: Settings, /, target: str | None, **flags: Unpack[ProbeFlags]) -> None:
    """Measure this device and the link to another machine in ten seconds.

    Without an argument, measure this device: samples/s of a recipe, matrix products by number format, memory and
    copies. With the TOKEN of `potluck probe --listen`, also measure the link to that machine, encrypted as in a
    run: round trips, jitter, and the rate in each direction and in both at once, next to a plain TCP connection.
    Each address of that machine that answers is measured. With an ADDRESS, measure only the round trip: the rest
    needs potluck on the other machine. Under torchrun, measure collectives between the ranks, with tensors on the
    CPU, or on the device that --device names.

    \b
    Examples:
      potluck probe
      potluck probe --depth 12 --sequence 1024 --seconds 30     as large as GPT-2
      potluck probe --listen                on one machine; prints the command for the other
      potluck probe potluck3-… --save facts.json
      potluck plan --facts facts.json       then plan with the figures
      potluck probe 192.168.1.20            round trip to a machine without potluck
      torchrun --nproc-per-node 2 -m potluck probe              collectives between these two
    """
    _check_flags(target, flags)
    in_group = ranks_here() > 1
    if in_group and (flags["listen"] or target or flags["token_file"]):
        raise ConfigError(
            "under torchrun, --listen, a token and an address are not used: the ranks measure each other",
            hint="torchrun --nproc-per-node 2 -m potluck probe, or potluck probe without torchrun",
        )
    work = _measuring(settings, target, flags)
    if in_group:
        _in_group(work, flags)
        return
    if flags["listen"]:
        _listen(work, flags)
        return
    from potluck.fleet.life import leased

    with leased(), _progress(flags["seconds"]) as say:
        probed = work.measure(say)
    _finish(probed, flags)


def _check_flags(target: str | None, flags: ProbeFlags) -> None:
    if flags["listen"] and (target or flags["token_file"]):
        raise ConfigError("--listen takes no address and no token", hint="potluck probe --help shows examples")
    options.check_listening("probe", flags, "bind", "port", "for")
    if flags["no_device"] and not (flags["listen"] or target or flags["token_file"] or ranks_here() > 1):
        raise ConfigError(
            "--no-device without a link leaves nothing to measure", hint="give a token, or leave --no-device out"
        )
    if flags["listen"] and flags["save"]:
        raise ConfigError(
            "--save cannot be combined with --listen", hint="use --save on the machine that connects with the token"
        )
    check_writable(flags["save"])


def _measuring(settings: Settings, target: str | None, flags: ProbeFlags) -> Measuring:
    """What to measure. Its settings are checked before anything slow starts."""
    from potluck.checked import build
    from potluck.cli._target import address_of, token_text
    from potluck.env import machine_name
    from potluck.probe.measuring import Measuring
    from potluck.spec.config import RunConfig
    from potluck.wire.token import decode

    text = token_text(target, flags["token_file"])
    token = decode(text) if text is not None else None
    address = address_of(target, "probe") if target and token is None else None
    in_run, in_recipe = options.read_config_file(flags["config_file"], flags["recipe"])
    run = build(RunConfig, {**in_run, **options.given(flags, _RUN_FLAGS)})
    table = {**in_recipe, **options.given(flags, _RECIPE_FLAGS), **options.pairs(flags["more"])}
    return Measuring(
        name=machine_name(run.name, settings.environment),
        seconds=flags["seconds"],
        with_device=not flags["no_device"],
        iperf3=not flags["no_iperf3"],
        token=token,
        address=address,
        recipe=flags["recipe"],
        settings=table,
        device=run.device,
        usual_device=settings.environment.device,
        threads=run.threads or settings.environment.threads,
        micro_batch=run.micro_batch,
    )


def _in_group(work: Measuring, flags: ProbeFlags) -> None:
    """Measure as one of the ranks that torchrun started; rank 0 shows the figures."""
    from potluck.fleet.ranks import rank_leased

    with rank_leased(None), _progress(flags["seconds"]) if is_first() else contextlib.nullcontext(_quiet) as say:
        probed = work.measure_in_group(flags["backend"], say)
    if is_first():
        _finish(probed, flags)
        check_results(probed.collectives)


def _quiet(words: str) -> None:
    """Progress of ranks other than rank 0 is not shown."""


def _listen(work: Measuring, flags: ProbeFlags) -> None:
    """Answer the other machine until time or Ctrl-C ends it."""
    from potluck.cli._listening import reports_peer, serve
    from potluck.probe.link_server import LinkServer
    from potluck.probe.listening import Listening
    from potluck.probe.measuring import DEVICE_PART
    from potluck.report.probe_table import device_lines
    from potluck.report.screen import columns, show

    with Listening(flags["bind"], flags["port"]) as listening:
        seconds = work.part_s(DEVICE_PART)
        with _progress(seconds) as say:
            speed = work.measure_device(seconds, say)
        server = LinkServer(listening.socket, listening.bind, speed, iperf3=not flags["no_iperf3"])
        try:
            if flags["as_json"]:
                click.echo(checked.to_json(speed))
            elif speed.device:
                show(device_lines(speed, columns()), sys.stdout)
            server.on_hello = reports_peer("connected to measure the link")
            serve(listening, "probe", server.serve, flags["for_s"], token_on_stderr=flags["as_json"])
        finally:
            server.close()


# -- what is shown and kept -------------------------------------------------------------------------------------


def _finish(probed: Probed, flags: ProbeFlags) -> None:
    if flags["save"] is not None:
        write_json(flags["save"], probed)
    if flags["as_json"]:
        click.echo(checked.to_json(probed))
        return
    from potluck.report.line import Line
    from potluck.report.probe_table import probe_lines
    from potluck.report.screen import columns, show

    show(probe_lines(probed, columns()), sys.stdout)
    show([Line(), Line("next  ", "dim").add(_next(probed, flags["save"]), "bold")], sys.stdout)


def _next(probed: Probed, saved: Path | None) -> str:
    """The command to suggest next."""
    if probed.collectives:
        return "potluck bench collectives --against gloo   (every size, beside gloo)"
    if probed.link is not None and probed.there is None:
        return "potluck probe --listen on that machine, to measure the rates"
    if not probed.here.device or (probed.there is not None and not probed.there.device):
        return "run both sides without --no-device, for potluck plan"
    model = f" --model {probed.here.model}" if probed.here.model else ""
    sequence = f" --sequence {probed.here.sequence}" if model and probed.here.sequence else ""
    file = shlex.quote(str(saved)) if saved is not None else "facts.json"
    command = f"potluck plan --facts {file}{model}{sequence}"
    return command if saved is not None else f"run it again with --save facts.json, then {command}"


class _Elapsed:
    """Time spent measuring so far, without preparation."""

    _READYING = ("starting", "preparing", "looking")

    def __init__(self) -> None:
        self._words, self._done_s, self._since = "starting", 0.0, time.monotonic()

    def at(self, words: str) -> None:
        self._done_s, self._since, self._words = self.done_s, time.monotonic(), words

    @property
    def done_s(self) -> float:
        counts = not self._words.startswith(self._READYING)
        return self._done_s + (time.monotonic() - self._since if counts else 0.0)


@contextlib.contextmanager
def _progress(seconds: float) -> Iterator[Say]:
    """A progress bar by elapsed time on a terminal; nothing in a pipe."""
    if not sys.stderr.isatty():
        yield lambda words: None
        return
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, Task, TextColumn
    from rich.progress_bar import ProgressBar

    clock = _Elapsed()

    class _ElapsedBar(ProgressColumn):
        def render(self, task: Task) -> ProgressBar:
            return ProgressBar(total=max(seconds, 0.1), completed=min(clock.done_s, 0.99 * seconds), width=24)

    def say(words: str) -> None:
        clock.at(words)
        bar.update(task, description=words[:48])

    words = TextColumn("{task.description}", markup=False)
    with Progress(_ElapsedBar(), words, console=Console(stderr=True), transient=True, refresh_per_second=5) as bar:
        task = bar.add_task("starting", total=None)
        yield say

"""Options shared by several verbs, and how defaults, a TOML file and flags become one config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict, TypeVar, get_args

import click
import msgspec

from potluck import checked
from potluck.errors import ConfigError
from potluck.spec.config import WEB_HERE, LoggerName, RunConfig

if TYPE_CHECKING:
    from potluck.report.view import Mode

Command = TypeVar("Command", bound=Callable[..., Any])

RECIPE_FLAGS = ("depth", "sequence", "batch_tokens", "steps", "lr", "data", "seed")
RUN_FLAGS = ("device", "threads", "name", "micro_batch", "codec", "checkpoint_every", "max_bad_steps", "log", "web")
HOST_FLAGS = ("bind", "port", "wait_for", "wait_s")
_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


class Number(click.FloatRange):
    """click takes NaN for a number in any range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if number != number:
            self.fail(f"{value!r} is not a number", param, ctx)
        return number


def duration(context: click.Context, option: click.Parameter, value: str | None) -> float | None:
    """A time in seconds from 90, 90s, 10m or 1.5h; an option's callback."""
    if value is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([a-z]*)\s*", value, re.ASCII)
    if match is None or match[2] not in _UNITS_S:
        raise click.BadParameter(f"{value!r} is not a duration: write 90, 90s, 10m or 2h", context, option)
    return float(match[1]) * _UNITS_S[match[2]]


class ListenFlags(TypedDict):
    """The options that `listen_options` adds to a verb."""

    listen: bool
    bind: str | None
    port: int | None
    for_s: float
    token_file: Path | None


class TrainFlags(TypedDict):
    """The flags of a run that the command line itself reads; the others only go into a config."""

    more: tuple[str, ...]
    config_file: Path | None
    runs: Path | None
    resume: Path | None
    view: Mode
    launched: NotRequired[str]
    token_file: NotRequired[Path | None]
    lan: NotRequired[bool]
    qr: NotRequired[bool]


def view_option(command: Command) -> Command:
    as_json = click.option("--json", "view", flag_value="json", help="Same as --view json.")
    view = click.option(
        "--view",
        type=click.Choice(["auto", "live", "plain", "json", "quiet"]),
        default="auto",
        help="auto: live on a terminal, plain lines in a pipe. json: one event per line.",
    )
    return view(as_json(command))


_WEB = click.option(
    "--web",
    "web_here",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, option, wanted: context.meta.update(web=wanted),
    help="Show the run in a browser: prints the address of a page that only this machine can open.",
)
_WEB_ADDRESS = click.option(
    "--web-address",
    "web",
    metavar="ADDRESS[:PORT]",
    callback=lambda context, option, place: place or (WEB_HERE if context.meta.get("web") else None),
    help="The same at this address: other machines can open the page with the address that is printed.",
)

_SHARED: dict[str, Callable[[Any], Any]] = {
    "depth": click.option("--depth", type=int, help="gpt: number of blocks; sets the size of the model."),
    "sequence": click.option("--sequence", type=int, help="gpt: bytes per sample."),
    "batch_tokens": click.option("--batch-tokens", type=int, help="gpt: bytes per step, over all machines."),
    "steps": click.option("--steps", type=int, help="Total number of optimizer steps."),
    "lr": click.option("--lr", type=float, help="Peak learning rate."),
    "data": click.option("--data", metavar="PATH", help="Your own data: text (gpt) or MNIST IDX files (cnn)."),
    "seed": click.option("--seed", type=int, help="Random seed for the weights and the sample order."),
    "set": click.option(
        "--set", "more", multiple=True, metavar="KEY=VALUE", help="Set any other recipe setting. May be repeated."
    ),
    "config": click.option(
        "--config",
        "config_file",
        type=click.Path(path_type=Path),
        help="TOML file with settings in [run] and [gpt] or [cnn].",
    ),
    "device": click.option(
        "--device",
        help="cpu, cuda, cuda:1, mps or paced:SECONDS_PER_SAMPLE (default: CUDA, else MPS, else CPU).",
    ),
    "threads": click.option(
        "--threads", type=click.IntRange(1), help="Number of CPU threads (default: physical cores)."
    ),
    "name": click.option("--name", help="Name of this machine in logs and tables (default: its host name)."),
    "micro_batch": click.option(
        "--micro-batch", type=click.IntRange(1), help="Samples computed at once (default: found by measuring)."
    ),
    "codec": click.option(
        "--codec", help="Compression: auto (default), none, fp16, bf16, int8, int4, thin or topk:RATIO."
    ),
    "checkpoint_every": click.option(
        "--checkpoint-every",
        type=click.IntRange(0),
        help="Save a checkpoint every N steps (default 50; 0: only at the end).",
    ),
    "max_bad_steps": click.option(
        "--max-bad-steps",
        type=click.IntRange(0),
        help="Stop after N steps in a row with a NaN or infinite gradient (default 5; 0: never).",
    ),
    "log": click.option(
        "--log",
        multiple=True,
        type=click.Choice(get_args(LoggerName)),
        callback=lambda context, option, names: names or None,
        help="Also write loss, speed and the machines' shares to this logger. May be repeated.",
    ),
    "web": lambda command: _WEB(_WEB_ADDRESS(command)),
    "runs": click.option("--runs", type=click.Path(path_type=Path), help="Folder for run folders (default: runs)."),
    "resume": click.option(
        "--resume",
        type=click.Path(path_type=Path),
        metavar="RUN",
        help="Resume a run at exactly the next sample.",
    ),
    "view": view_option,
    "bind": click.option(
        "--bind",
        metavar="ADDRESS",
        help="Address to listen on (default: the default route's; 0.0.0.0: all of IPv4; '::': IPv6 too).",
    ),
    "port": click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on (default: a free one)."),
    "wait_for": click.option("--wait-for", type=click.IntRange(0), help="Wait for N guests before the first step."),
    "wait_s": click.option("--wait-s", type=float, help="Seconds to wait for these guests (default 120)."),
}


def shared(*names: str) -> Callable[[Command], Command]:
    """Options that several verbs have, in the order in which help shows them."""
    return _all_of([_SHARED[name] for name in names])


def _all_of(options: Sequence[Callable[[Any], Any]]) -> Callable[[Command], Command]:
    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


recipe_options = shared(*RECIPE_FLAGS, "set", "config")
run_options = shared(*RUN_FLAGS, "runs", "resume", "view")
host_options = shared(*HOST_FLAGS)


def given(flags: Mapping[str, object], names: Sequence[str]) -> dict[str, Any]:
    """The flags in `names` that were given."""
    return {name: flags[name] for name in names if flags.get(name) is not None}


def pairs(more: Sequence[str]) -> dict[str, str]:
    """A table from KEY=VALUE words."""
    table = {}
    for word in more:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, not {word!r}", hint="for example --set warmup=50")
        table[key] = value
    return table


def read_config_file(path: Path | None, recipe: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables [run] and [recipe] of a TOML file (a script has only [run]), each value checked."""
    if path is None:
        return {}, {}
    from potluck.train import recipes

    kinds: dict[str, Any] = {"run": RunConfig, **({recipe: recipes.get(recipe).Config} if recipe else {})}
    example = "lines such as seed = 1 below " + " and ".join(f"[{name}]" for name in kinds)
    text = checked.read_text(path, missing="--config takes the path of a TOML file", example=example)
    tables = {name: {} for name in kinds} | checked.toml_table(text, str(path), example=example)
    file = msgspec.defstruct("ConfigFile", list(kinds.items()), forbid_unknown_fields=True)
    try:
        checked.convert(tables, file, where=str(path), toml=text, strict=False)
    except ConfigError as error:
        # An error of a whole table: its settings do not fit each other, which flags may still change.
        if len(error.path) != 1 or error.path[0] not in kinds or not isinstance(tables[error.path[0]], dict):
            raise
    return tables["run"], tables.get(recipe or "", {})


def run_settings(table: Mapping[str, object], flags: Mapping[str, object]) -> dict[str, object]:
    """The given settings of the run: those of a file, changed by the flags."""
    return {**table, **given(flags, (*RUN_FLAGS, *HOST_FLAGS))}


def listen_options(*, listen: str, port: str) -> Callable[[Command], Command]:
    """--listen, --bind, --port, --for and --token-file; the verb gives the help of --listen and --port."""
    options = (
        click.option("--listen", is_flag=True, help=listen),
        click.option(
            "--bind", metavar="ADDRESS", help="With --listen: address to listen on (default: as `potluck host`)."
        ),
        click.option("--port", type=click.IntRange(1, 65535), help=port),
        click.option(
            "--for",
            "for_s",
            type=Number(1.0, 86_400.0),
            default=900.0,
            show_default=True,
            metavar="SECONDS",
            help="With --listen: how long to listen.",
        ),
        click.option("--token-file", type=click.Path(path_type=Path), help="Read the token from a file."),
    )
    return _all_of(options)


def check_listening(verb: str, flags: ListenFlags, *names: str) -> None:
    """Refuse options that have no effect without --listen."""
    context = click.get_current_context()
    for name in names if not flags["listen"] else ():
        source = context.get_parameter_source("for_s" if name == "for" else name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name} needs --listen", hint=f"potluck {verb} --listen --{name} …")

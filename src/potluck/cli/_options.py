"""Options shared by several verbs, and how defaults, a TOML file and flags become one config."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec

from potluck import checked
from potluck.errors import ConfigError
from potluck.spec.config import RunConfig

Command = TypeVar("Command", bound=Callable[..., Any])

RECIPE_FLAGS = ("depth", "sequence", "batch_tokens", "steps", "lr", "data", "seed")
RUN_FLAGS = ("device", "threads", "name", "micro_batch", "codec", "checkpoint_every", "max_bad_steps")
HOST_FLAGS = ("bind", "port", "wait_for", "wait_s")


def recipe_options(command: Command) -> Command:
    """Options of a recipe: model, data, steps."""
    for option in reversed(
        [
            click.option("--depth", type=int, help="gpt: number of blocks; sets the size of the model."),
            click.option("--sequence", type=int, help="gpt: bytes per sample."),
            click.option("--batch-tokens", type=int, help="gpt: bytes per step, over all machines."),
            click.option("--steps", type=int, help="Total number of optimizer steps."),
            click.option("--lr", type=float, help="Peak learning rate."),
            click.option(
                "--data", metavar="PATH", help="Train on your own data: text (gpt) or MNIST IDX files (cnn)."
            ),
            click.option("--seed", type=int, help="Random seed for the weights and the sample order."),
            click.option(
                "--set",
                "more",
                multiple=True,
                metavar="KEY=VALUE",
                help="Set any other recipe setting. May be repeated.",
            ),
            click.option(
                "--config",
                "config_file",
                type=click.Path(path_type=Path),
                help="TOML file with settings in [run] and [gpt] or [cnn].",
            ),
        ]
    ):
        command = option(command)
    return command


def run_options(command: Command) -> Command:
    """Options of a run: device, codec, checkpoints, view."""
    for option in reversed(
        [
            click.option(
                "--device",
                help="cpu, cuda, cuda:1, mps or paced:SECONDS_PER_SAMPLE (default: CUDA, else MPS, else CPU).",
            ),
            click.option(
                "--threads", type=click.IntRange(1), help="Number of CPU threads (default: physical cores)."
            ),
            click.option("--name", help="Name of this machine in logs and tables (default: its host name)."),
            click.option(
                "--micro-batch",
                type=click.IntRange(1),
                help="Samples computed at once (default: found by measuring).",
            ),
            click.option("--codec", help="Compression: none, fp16, bf16, int8, int4 (default) or topk:RATIO."),
            click.option(
                "--checkpoint-every",
                type=click.IntRange(0),
                help="Save a checkpoint every N steps (default 50; 0: only at the end).",
            ),
            click.option(
                "--max-bad-steps",
                type=click.IntRange(0),
                help="Stop after N steps in a row with a NaN or infinite gradient (default 5; 0: never).",
            ),
            click.option("--runs", type=click.Path(path_type=Path), help="Folder for run folders (default: runs)."),
            click.option(
                "--resume",
                type=click.Path(path_type=Path),
                metavar="RUN",
                help="Resume a run at exactly the next sample.",
            ),
            view_option,
        ]
    ):
        command = option(command)
    return command


def view_option(command: Command) -> Command:
    as_json = click.option("--json", "view", flag_value="json", help="Same as --view json.")
    view = click.option(
        "--view",
        type=click.Choice(["auto", "live", "plain", "json", "quiet"]),
        default="auto",
        help="auto: live on a terminal, plain lines in a pipe. json: one event per line.",
    )
    return view(as_json(command))


def host_options(command: Command) -> Command:
    """Options of a host: where to listen, how many guests to wait for."""
    for option in reversed(
        [
            click.option(
                "--bind",
                metavar="ADDRESS",
                help="Address to listen on (default: the default route's; 0.0.0.0: all of IPv4; '::': IPv6 too).",
            ),
            click.option("--port", type=click.IntRange(0, 65535), help="Port to listen on (default: a free one)."),
            click.option("--wait-for", type=click.IntRange(0), help="Wait for N guests before the first step."),
            click.option("--wait-s", type=float, help="Seconds to wait for these guests (default 120)."),
        ]
    ):
        command = option(command)
    return command


def given(flags: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
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


def run_config(table: dict[str, Any], flags: dict[str, Any]) -> RunConfig:
    from potluck import codec

    config = checked.build(RunConfig, {**table, **given(flags, (*RUN_FLAGS, *HOST_FLAGS))})
    codec.get(config.codec)
    if config.codec_down is not None:
        codec.get(config.codec_down)
    return config


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
            type=click.FloatRange(1.0, 86_400.0),
            default=900.0,
            show_default=True,
            metavar="SECONDS",
            help="With --listen: how long to listen.",
        ),
        click.option("--token-file", type=click.Path(path_type=Path), help="Read the token from a file."),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def check_listening(verb: str, flags: Mapping[str, Any], *names: str) -> None:
    """Refuse options that have no effect without --listen."""
    context = click.get_current_context()
    for name in names if not flags["listen"] else ():
        source = context.get_parameter_source("for_s" if name == "for" else name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name} needs --listen", hint=f"potluck {verb} --listen --{name} …")

"""The options that several verbs share, and how flags, a TOML file and defaults become one config.

Owns the words on the command line; it starts nothing.
"""

from __future__ import annotations

import ipaddress
import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from potluck.errors import ConfigError
from potluck.spec.config import RunConfig

Command = TypeVar("Command", bound=Callable[..., Any])

RECIPE_FLAGS = ("depth", "sequence", "batch_tokens", "steps", "lr", "data", "seed")
RUN_FLAGS = ("device", "threads", "name", "micro_batch", "codec", "checkpoint_every", "max_bad_steps")
HOST_FLAGS = ("bind", "port", "wait_for", "wait_s")
LOOPBACK = "127.0.0.1"


def recipe_options(command: Command) -> Command:
    """What is trained."""
    for option in reversed(
        [
            click.option("--depth", type=int, help="gpt: the size of the model, in one number."),
            click.option("--sequence", type=int, help="gpt: bytes in a sample."),
            click.option("--batch-tokens", type=int, help="gpt: bytes in a step, over all machines."),
            click.option("--steps", type=int, help="Updates to train in all."),
            click.option("--lr", type=float, help="Peak learning rate."),
            click.option("--data", metavar="PATH", help="Your own text (gpt) or IDX files (cnn)."),
            click.option("--seed", type=int, help="Of the weights and of the samples' order."),
            click.option(
                "--set", "more", multiple=True, metavar="KEY=VALUE", help="Any other setting of the recipe."
            ),
            click.option(
                "--config",
                "config_file",
                type=click.Path(path_type=Path),
                help="A TOML file: [run] and [gpt] or [cnn].",
            ),
        ]
    ):
        command = option(command)
    return command


def run_options(command: Command) -> Command:
    """How it is carried out."""
    for option in reversed(
        [
            click.option(
                "--device",
                help="cpu, cuda, cuda:1, mps, paced:SECONDS (a sample); default: the best there is.",
            ),
            click.option("--threads", type=click.IntRange(1), help="CPU threads; default: the physical cores."),
            click.option("--name", help="What this machine is called; default: its host name."),
            click.option(
                "--micro-batch",
                type=click.IntRange(1),
                help="Samples computed at once; default: found by trying.",
            ),
            click.option("--codec", help="none, fp16, bf16, int8, int4 (default), topk:RATIO."),
            click.option(
                "--checkpoint-every",
                type=click.IntRange(0),
                help="Steps between checkpoints (default 50; 0: only at the end).",
            ),
            click.option(
                "--max-bad-steps",
                type=click.IntRange(0),
                help="Stop after so many steps in a row whose gradient is NaN or infinite (default 5; 0: never).",
            ),
            click.option("--runs", type=click.Path(path_type=Path), help="Where run folders go (default: runs)."),
            click.option(
                "--resume",
                type=click.Path(path_type=Path),
                metavar="RUN",
                help="Go on with a run, at the very sample.",
            ),
            view_option,
        ]
    ):
        command = option(command)
    return command


def view_option(command: Command) -> Command:
    as_json = click.option("--json", "view", flag_value="json", help="The same as --view json.")
    view = click.option(
        "--view",
        type=click.Choice(["auto", "live", "plain", "json", "quiet"]),
        default="auto",
        help="auto: live on a terminal, plain lines in a pipe. json: events, one a line.",
    )
    return view(as_json(command))


def host_options(command: Command) -> Command:
    """Where guests come in."""
    for option in reversed(
        [
            click.option(
                "--bind",
                metavar="ADDRESS",
                help="Listen here only (default: the address of the default route; 0.0.0.0: all; :: IPv6 too).",
            ),
            click.option(
                "--port", type=click.IntRange(0, 65535), help="Listen on this port (default: a free one)."
            ),
            click.option("--wait-for", type=click.IntRange(0), help="Guests to wait for before the first step."),
            click.option("--wait-s", type=float, help="How long to wait for them (default 120)."),
        ]
    ):
        command = option(command)
    return command


def given(flags: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Those of the flags that were given."""
    return {name: flags[name] for name in names if flags.get(name) is not None}


def pairs(more: Sequence[str]) -> dict[str, str]:
    """KEY=VALUE words as a table."""
    table = {}
    for word in more:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"--set takes KEY=VALUE, not {word!r}", hint="for example --set warmup=50")
        table[key] = value
    return table


def read_config_file(path: Path | None, recipe: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tables [run] and [recipe] of a TOML file (a script has only [run])."""
    if path is None:
        return {}, {}
    means = f"[run] and [{recipe}]" if recipe else "[run]"
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror or error}", hint="--config takes the path of a TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a TOML file: {error}", hint=f"lines such as seed = 1 below {means}"
        ) from error
    for name, table in tables.items():
        if name not in ("run", recipe) or not isinstance(table, dict):
            raise ConfigError(f"{path} has {name!r}, which means nothing here", hint=f"tables: {means}")
    return tables.get("run", {}), tables.get(recipe or "", {})


def run_config(table: dict[str, Any], flags: dict[str, Any]) -> RunConfig:
    from potluck import codec
    from potluck.spec.config import build

    config = build(RunConfig, {**table, **given(flags, (*RUN_FLAGS, *HOST_FLAGS))})
    codec.get(config.codec)
    if config.codec_down is not None:
        codec.get(config.codec_down)
    return config


def checked_bind(bind: str | None, *, ipv6: bool = True) -> str | None:
    """The address to listen on, as a number; None where none was given. `ipv6`: whether it may be one of those."""
    if bind is None:
        return None
    try:
        address = ipaddress.ip_address(LOOPBACK if bind == "localhost" else bind.strip("[]"))
    except ValueError:
        address = None
    if address is not None and (ipv6 or address.version == 4):
        return str(address)
    from potluck.wire.token import local_addresses

    raise ConfigError(
        f"--bind takes an {'' if ipv6 else 'IPv4 '}address of this machine, not {bind!r}",
        hint=f"this machine has: {', '.join((*local_addresses(ipv6=ipv6), LOOPBACK))}; 0.0.0.0 listens on all"
        + (", :: on those of IPv6 too" if ipv6 else "; only `potluck host` listens on IPv6"),
    )


def listen_options(*, listen: str, port: str) -> Callable[[Command], Command]:
    """--listen, --bind, --port, --for and --token-file; what two of them mean is the verb's affair."""
    options = (
        click.option("--listen", is_flag=True, help=listen),
        click.option(
            "--bind", metavar="ADDRESS", help="With --listen: listen here only (default: as `potluck host`)."
        ),
        click.option("--port", type=click.IntRange(1, 65535), help=port),
        click.option(
            "--for",
            "for_s",
            type=click.FloatRange(1.0, 86_400.0),
            default=900.0,
            show_default=True,
            metavar="SECONDS",
            help="With --listen: how long.",
        ),
        click.option("--token-file", type=click.Path(path_type=Path), help="Read the token from a file."),
    )

    def add(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return add


def check_listening(verb: str, flags: Mapping[str, Any], *names: str) -> None:
    """Refuse those of the options above that do nothing where nobody listens."""
    context = click.get_current_context()
    for name in names if not flags["listen"] else ():
        source = context.get_parameter_source("for_s" if name == "for" else name)
        if source is click.core.ParameterSource.COMMANDLINE:
            raise ConfigError(f"--{name} belongs to --listen", hint=f"potluck {verb} --listen --{name} …")

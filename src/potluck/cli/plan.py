"""`potluck plan`: predicts step times and speed-up for a fleet. Runs and measures nothing."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click
from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.cli._files import write_json
from potluck.cli._options import Number
from potluck.errors import ConfigError

if TYPE_CHECKING:
    from potluck.plan.fleet_inputs import Given
    from potluck.spec.fleet import Job

_DEFAULT_MODEL, _DEFAULT_PRECISION = "gpt2-124m", "bf16"
_MAKE_FACTS = "make one with: potluck probe --save FILE, or potluck doctor --save FILE"


class PlanFlags(TypedDict):
    machines: tuple[str, ...]
    facts: tuple[Path, ...]
    model: str | None
    batch_tokens: int | None
    batch: int | None
    sequence: int | None
    bytes_: float | None
    codec: str | None
    precision: str | None
    strategies: tuple[str, ...]
    save: Path | None
    prices: tuple[str, ...]
    electricity: str | None
    catalogue: bool
    as_json: bool


@click.command()
@click.argument("rig", required=False)
@click.option(
    "--machine",
    "machines",
    multiple=True,
    metavar="NAME=DEVICE[,link=LINK]",
    help='A machine, such as "mac=M2,link=1GbE" or "node=8xMI300X,intra=xGMI,link=400G RoCE". DEVICE may be a '
    "speed: 0.6s/sample, 20TFLOPS. May be repeated.",
)
@click.option(
    "--facts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Machines saved by `potluck probe --save` or `potluck doctor --save`. May be repeated.",
)
@click.option(
    "--model", help="gpt2-124m (default), -350m, -760m, -1.5b, gpt:DEPTH, cnn, or a parameter count: 350M, 7e9."
)
@click.option("--batch-tokens", type=click.IntRange(1), help="Tokens per step, over all machines (default 524288).")
@click.option("--batch", type=click.IntRange(1), help="Samples per step, instead of --batch-tokens.")
@click.option("--sequence", type=click.IntRange(1), help="Tokens per sample (default: the model's).")
@click.option(
    "--bytes",
    "bytes_",
    type=Number(0.01, 16),
    help="Bytes per parameter of an uncompressed gradient (default 4).",
)
@click.option("--codec", help="Compression: auto (default), none, fp16, bf16, int8, int4, thin or topk:RATIO.")
@click.option(
    "--precision",
    type=click.Choice(["bf16", "fp32"]),
    help="Precision of the matrix products, where the device supports it (default bf16).",
)
@click.option(
    "--strategy", "strategies", multiple=True, metavar="S", help="Predict only this strategy. May be repeated."
)
@click.option(
    "--sweep",
    metavar="NAME=A:B",
    help="Vary link_mbit, guests, batch_tokens or parameters from A to B, in logarithmic steps.",
)
@click.option(
    "--plot", type=click.Path(path_type=Path, dir_okay=False), help="Draw the sweep to FILE (.png or .svg)."
)
@click.option(
    "--guests",
    type=click.IntRange(1, 65_536),
    metavar="N",
    help="Predict for more guests of the same kind, up to N.",
)
@click.option(
    "--save",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the plan to FILE as JSON, for `potluck report RUN --plan FILE`.",
)
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="[DEVICE=]AMOUNT/h",
    help="Hourly rent of all these machines (2.10/h), or of another device (H100=2.10/h). Adds the cost of a "
    "billion tokens. May be repeated.",
)
@click.option(
    "--electricity",
    metavar="AMOUNT/kWh",
    help="Price of your electricity (0.30/kWh). Adds the cost of a billion tokens.",
)
@click.option("--catalogue", is_flag=True, help="List the devices, links and models known by name.")
@click.option("--json", "as_json", is_flag=True, help="Print the plan as JSON.")
def plan(
    rig: str | None, sweep: str | None, plot: Path | None, guests: int | None, **flags: Unpack[PlanFlags]
) -> None:
    """Predict step time, speed-up, waiting and memory of each training strategy on a fleet, and give a verdict.

    The fleet is a RIG (a built-in name or a TOML file), or machines given with --machine, --facts or both. Nothing
    is run. Speeds of named devices are data-sheet values times an assumed utilisation; `potluck probe` measures
    real ones.

    \b
    Examples:
      potluck plan home-pair
      potluck plan --machine "desk=RTX 4070" --machine "mac=M2,link=1GbE" --model gpt2-124m
      potluck plan my-rig.toml --strategy potluck --strategy ddp
      potluck plan desk-and-mac --sweep link_mbit=10:10000 --plot pays.png
      potluck plan --machine a=H100,link=10GbE --machine b=H100,link=10GbE --guests 1024
      potluck plan --machine "a=8xMI300X,intra=xGMI" --machine "b=8xMI300X,intra=xGMI,link=400G RoCE"
      potluck plan --machine "desk=RTX 4070" --electricity 0.30/kWh --price H100=2.10/h
      potluck plan --facts facts.json --json
      potluck plan --facts desk.json --machine "mac=M2,link=1GbE"     before the Mac is measured
    """
    if flags["catalogue"]:
        _catalogue(flags["as_json"])
        return
    from potluck.report import screen

    if plot is not None:
        _check_plot(plot, sweep)
    given, job = _given(rig, flags)
    if sweep is not None and guests is not None:
        raise ConfigError("--sweep cannot be combined with --guests", hint="use one of them")
    if guests is not None and flags["strategies"]:
        raise ConfigError(
            "--strategy cannot be combined with --guests", hint="--guests compares one hub, a tree and DDP's ring"
        )
    if (sweep is not None or guests is not None) and (flags["prices"] or flags["electricity"]):
        raise ConfigError("--price and --electricity need one plan", hint="leave out --sweep and --guests")
    if sweep is not None:
        table, lines = _sweep(given, job, sweep, flags["strategies"], plot)
    elif guests is not None:
        table, lines = _scale(given, job, guests)
    else:
        table, lines = _plan(given, job, flags)
    if flags["save"] is not None:
        write_json(flags["save"], table)
    if flags["as_json"]:
        click.echo(checked.to_json(table))
    else:
        screen.show(lines, sys.stdout)
    if plot is not None:
        click.echo(f"wrote {plot}", err=True)


def _plan(given: Given, job: Job, flags: PlanFlags) -> tuple[Struct, list[Any]]:
    from potluck.plan import advice, cost, models
    from potluck.report import screen
    from potluck.report.plan_table import plan_lines

    prices = [cost.parse_price(word) for word in flags["prices"]]
    per_kwh = cost.parse_electricity(flags["electricity"]) if flags["electricity"] else None
    found = advice.plan(job, given.fleet, flags["strategies"], given.assumptions)
    if prices or per_kwh is not None:
        of_rig = not flags["machines"] and not flags["facts"]
        model = None if of_rig else models.find(flags["model"] or _DEFAULT_MODEL, flags["sequence"])
        precision = flags["precision"] or _DEFAULT_PRECISION
        paid = cost.costs(job, given.fleet, found.rows, prices, per_kwh, model=model, precision=precision)
        found = replace(found, costs=paid)
        if per_kwh is not None:
            found = replace(found, assumptions=(*found.assumptions, *cost.power_notes(given.fleet)))
    return found, plan_lines(found, screen.columns(), whole=not sys.stdout.isatty())


def _sweep(
    given: Given, job: Job, word: str, strategies: tuple[str, ...], plot: Path | None
) -> tuple[Struct, list[Any]]:
    from potluck.plan import variation as sweeps
    from potluck.plan.predict import check_strategies
    from potluck.report import plan_plot, screen
    from potluck.report.plan_table import sweep_lines

    names = check_strategies(strategies) if strategies else ()
    found = sweeps.sweep(job, given.fleet, sweeps.parse(word), names)
    if plot is not None:
        machines = given.fleet.machines
        fleet = ", ".join(m.device or m.name for m in machines[:3]) + (", …" if len(machines) > 3 else "")
        plan_plot.write(plot, found, f"{job.name} on {fleet}")
    return found, sweep_lines(found, screen.columns())


def _scale(given: Given, job: Job, guests: int) -> tuple[Struct, list[Any]]:
    from potluck.plan.scale import scale
    from potluck.report import screen
    from potluck.report.plan_table import scale_lines

    found = scale(job, given.fleet, guests)
    return found, scale_lines(found, given.fleet, screen.columns())


def _check_plot(plot: Path, sweep: str | None) -> None:
    from potluck.report import plot_style

    if sweep is None:
        raise ConfigError("--plot needs --sweep", hint="for example --sweep link_mbit=10:10000")
    plot_style.check_file(plot)


# -- what is planned for --------------------------------------------------------------------------------


def _given(rig: str | None, flags: PlanFlags) -> tuple[Given, Job]:
    """The fleet and the job: from a rig, or from machines, facts or both."""
    ways = [
        name for name, way in (("RIG", rig), ("--machine", flags["machines"]), ("--facts", flags["facts"])) if way
    ]
    if len(ways) != 1 and ways != ["--machine", "--facts"]:
        what = f"both {' and '.join(ways)}" if ways else "nothing to plan for"
        raise ConfigError(what, hint='give a RIG, or --machine "desk=RTX 4070", or --facts FILE; see --help')
    if flags["codec"] is not None:
        from potluck.codec import names as codecs

        codecs.check(flags["codec"])
    return _of_rig(rig, flags) if rig is not None else _of_machines(flags)


def _of_rig(name: str, flags: PlanFlags) -> tuple[Given, Job]:
    from potluck.lab import rigs
    from potluck.plan.fleet_inputs import Given
    from potluck.plan.rigs import fleet_of, job_of

    of_rig = {"model": flags["model"], "sequence": flags["sequence"], "precision": flags["precision"]}
    for flag, value in of_rig.items():
        if value is not None:
            raise ConfigError(
                f"--{flag} cannot be combined with a RIG", hint="a rig has its own model and speeds: edit its file"
            )
    rig = rigs.load(name)
    job = job_of(rig)
    if flags["batch"] is not None and flags["batch_tokens"] is not None:
        raise ConfigError("both --batch and --batch-tokens", hint="give one of them")
    batch = flags["batch"] or (flags["batch_tokens"] or 0) // job.tokens_per_sample or job.batch
    job = replace(job, batch=batch, codec=flags["codec"] or job.codec, bytes_per_parameter=flags["bytes_"] or 4.0)
    moving = () if rig.steady else ("the fleet changes while it runs; this is its first step",)
    return Given(fleet=fleet_of(rig), assumptions=moving), job


def _of_machines(flags: PlanFlags) -> tuple[Given, Job]:
    from potluck.plan import fleet_inputs, models

    model = models.find(flags["model"] or _DEFAULT_MODEL, flags["sequence"])
    batch = models.batch_of(model, flags["batch_tokens"], flags["batch"])
    job = model.job(batch, flags["codec"] or "auto", flags["bytes_"] or 4.0)
    words, precision = flags["machines"], flags["precision"] or _DEFAULT_PRECISION
    files = flags["facts"]
    tables = [(str(file), checked.read_json(file, what="a facts file", hint=_MAKE_FACTS)) for file in files]
    if not tables:
        return fleet_inputs.from_words(words, model, precision), job
    if not words:
        return fleet_inputs.from_facts(tables, model, precision), job
    return fleet_inputs.from_both(tables, words, model, precision), job


def _catalogue(as_json: bool) -> None:
    from potluck.plan import devices, links, models
    from potluck.report import screen

    if as_json:
        table = {
            "devices": tuple(devices.catalogue().values()),
            "pages": devices.pages(),
            "links": tuple(links.LINKS.values()),
            "models": models.NAMES,
        }
        click.echo(checked.to_json(table))
        return
    from potluck.report.plan_table import catalogue_lines

    screen.show(catalogue_lines(), sys.stdout)

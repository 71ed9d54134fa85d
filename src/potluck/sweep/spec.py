"""The data of a sweep: parameters, trials, and the state of each trial."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated

from msgspec import Meta, Struct

from potluck.bounds import LONGEST, Finite, Many, Named, Natural, Text, Whole
from potluck.errors import ConfigError
from potluck.fleet.script import Script

MACHINE = "potluck"
"""Resource of a Ray node that stands for the whole machine."""

Value = bool | int | float | str

_NAME = re.compile(r"[A-Za-z][\w-]*")
_OPTION = re.compile(r"[\"']--([A-Za-z][\w-]*)(?:/--([A-Za-z][\w-]*))?[\"']")
_SWITCH = re.compile(r"[\"']--([A-Za-z][\w-]*)[\"'][^()]*\bBooleanOptionalAction\b")
_FLAG = re.compile(
    r"[\"']--([A-Za-z][\w-]*)[\"'][^()]*\b(?:action\s*=\s*[\"']store_(?:true|false)[\"']|is_flag\s*=\s*True)"
)
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*|(?=\.\d))(?:\.\d*)?(?:[eE][+-]?\d+)?")
_PARSER = re.compile(r"\b(?:ArgumentParser|option)\(")
_MORE_OPTIONS = re.compile(
    r"\b(?:HfArgumentParser|TrlParser|parse_known_args|sys\.argv|typer|tyro|fire|hydra|simple_parsing|jsonargparse)\b"
    r"|\bparents=|\badd_argument\(\s*[^\"'\s]"
    r"|\b\w+\(\s*(?:arg_?)?parser\b"
)
"""Signs of options that are not in a script's text: a parser made of dataclasses, or filled elsewhere."""

MOST_STARTS = 10
"""A trial that was lost this many times has failed."""


class Trial(Struct, frozen=True, kw_only=True):
    """One training with its own parameters."""

    id: Text
    parameters: Named[Value]
    """The values of the words, for the JSON option, sorting and plotting."""
    given: Named[Text] = {}
    """The words as the user wrote them, which the script gets; a missing one is made from the value."""

    @classmethod
    def of(cls, id: str, parameters: Mapping[str, Value]) -> Trial:
        """A trial from a user's words; values that are not text are kept."""
        given = {name: value for name, value in parameters.items() if isinstance(value, str)}
        return cls(id=id, parameters=dict(parameters) | {n: value_of(w) for n, w in given.items()}, given=given)


class CheckpointOrigin(Struct, frozen=True, kw_only=True):
    """The origin of a checkpoint in the storage, stored next to it as `trial.json`."""

    sweep: Text
    arguments: Many[Text]
    """The script's arguments, the parameters among them."""


class SweepWork(Struct, frozen=True, kw_only=True):
    """The common settings of all trials of a sweep, sent to every machine."""

    names: Many[Text]
    """Files of the script; the first is the script itself."""
    contents: Many[bytes]
    arguments: Many[Text] = ()
    """Arguments that all trials get."""
    json_option: Text | None = None
    """Give the parameters as one JSON object, as the value of this option; None: each as its own option."""
    checkpoint_every: Natural = 50
    storage: Text
    """Folder for checkpoints that all machines reach."""
    public: bytes
    """The driver's public key, with which a trial encrypts its token."""

    @property
    def id(self) -> str:
        """Identifier of the sweep, unique because every driver makes its own key."""
        return hashlib.sha256(self.public).hexdigest()[:32]

    def origin(self, trial: Trial) -> CheckpointOrigin:
        return CheckpointOrigin(sweep=self.id, arguments=tuple(self.words(trial)))

    def words(self, trial: Trial) -> list[str]:
        """The script's arguments in this trial."""
        if self.json_option is not None:
            return [*self.arguments, f"--{self.json_option}", json.dumps(trial.parameters)]
        off = _switches(self.contents) if any(isinstance(v, bool) for v in trial.parameters.values()) else {}
        words = list(self.arguments)
        for name, value in trial.parameters.items():
            if name in off and isinstance(value, bool):
                words += [f"--{name}"] if value else [f"--{off[name]}"] if off[name] else []
            else:  # one word: argparse takes a value such as -1e-5 for an option
                words.append(f"--{name}={trial.given.get(name, text(value))}")
        return words


class TrialNews(Struct, frozen=True, kw_only=True):
    """A trial's report from its machine."""

    step: Natural = 0
    steps: Natural | None = None
    metrics: Named[Finite | None] = {}
    """The last value of each: `loss`, and what the script gave to `run.log`. None if that is not finite."""
    remaining_s: Finite | None = None
    """Seconds until its end, at its present speed; None before the first step."""
    checkpoint: Natural | None = None
    """Step of the last checkpoint in the storage."""
    resumed_from: Natural | None = None
    guests: Many[Text] = ()
    """Names of the machines that have computed for it."""
    token: Annotated[bytes, Meta(max_length=LONGEST)] = b""
    """The token, encrypted for the driver."""
    status: Whole | None = None
    why: Text = ""


class TrialResult(Struct, frozen=True, kw_only=True):
    """How a trial ended. Each is reported once."""

    trial: Text
    parameters: Named[Value]
    given: Named[Text] = {}
    """As in `Trial`."""
    metrics: Named[Finite | None]
    """As in `TrialNews`."""
    steps: Natural
    seconds: Finite
    """From the trial's first start to its end."""
    machines: Many[Text]
    """Machines that hosted it, in this order; more than one if a machine was lost."""
    guests: Many[Text] = ()
    """Machines that helped."""
    checkpoint: Text = ""
    """Folder in the storage with its last checkpoint; `potluck host SCRIPT --resume` takes a copy of it."""
    files: Text = ""
    """Folder in the storage with the files that its script wrote to its working folder; empty if there are none."""
    error: Text = ""
    """Why it failed; empty if it did not."""


def parse_parameters(words: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Names and values, each as it was written, from `lr=1e-4,3e-4` words. Raises ConfigError."""
    found: dict[str, tuple[str, ...]] = {}
    for word in words:
        name, equals, values = word.partition("=")
        if not equals or not values or not _NAME.fullmatch(name):
            raise ConfigError(f"--param {word!r} is not NAME=VALUE,VALUE", hint="for example: --param lr=1e-4,3e-4")
        if name in found:
            raise ConfigError(f"--param {name} is given twice", hint=f"write all values at once: {name}=A,B,C")
        found[name] = tuple(values.split(","))
    if not found:
        raise ConfigError("no parameter to try", hint="for example: --param lr=1e-4,3e-4")
    return found


def value_of(word: str) -> Value:
    """The word as a number or truth value, else unchanged: `007` and `1_000` may be names."""
    if word in ("true", "false"):
        return word == "true"
    if not _NUMBER.fullmatch(word):
        return word
    for kind in (int, float):
        try:
            number = kind(word)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    return word


def text(value: Value) -> str:
    """A value as a script's argument."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def trials_of(parameters: Mapping[str, Sequence[Value]], count: int | None, seed: int = 0) -> list[Trial]:
    """Every combination; with `count` fewer of them chosen at random, or all of them as often as needed."""
    every = [dict(zip(parameters, values)) for values in itertools.product(*parameters.values())]
    if count is None:
        count = len(every)
    if count < 1:
        raise ConfigError(f"{count} trials are too few", hint="use --trials 1 or more")
    if count < len(every):
        chosen = sorted(random.Random(seed).sample(range(len(every)), count))
        every = [every[number] for number in chosen]
    width = len(str(count))
    return [Trial.of(f"trial-{number + 1:0{width}}", every[number % len(every)]) for number in range(count)]


def _switches(contents: Sequence[bytes]) -> dict[str, str]:
    """Options without a value in a script's text, each with the one that turns it off, if any: --amp/--no-amp."""
    source = _source(contents)
    made = dict.fromkeys(_FLAG.findall(source), "")
    made |= {name: f"no-{name}" for name in _SWITCH.findall(source)}
    return made | {name: off for name, off in _OPTION.findall(source) if off}


def _source(contents: Sequence[bytes]) -> str:
    return "\n".join(content.decode(errors="replace") for content in contents)


def check_options(script: Script, names: Sequence[str], warn: Callable[[str], None]) -> None:
    """Refuse a parameter that a script with options does not have, before anything starts.

    Only warn if the script may have options that are not in its text.
    """
    source = _source(script.contents)
    known = {name for names in _OPTION.findall(source) for name in names if name}
    for name in names if known else ():
        if name not in known and name.replace("_", "-") not in known:
            if _MORE_OPTIONS.search(source) or not _PARSER.search(source):
                warn(f"warning: {script.names[0]} does not spell an option --{name}; its first trial will show it")
                continue
            near = get_close_matches(name, known, 1)
            has = ", ".join(f"--{option}" for option in sorted(known)[:12])
            raise ConfigError(
                f"{script.names[0]} has no option --{name}",
                hint=f"did you mean --{near[0]}?" if near else f"it has {has}",
            )


def best_of(results: Sequence[TrialResult], metric: str, mode: str) -> TrialResult | None:
    """The best trial by its last value; None if all failed or ended with a value that is not finite.

    ConfigError where no trial has this metric.
    """
    ended = [result for result in results if not result.error]
    having = [result for result in ended if metric in result.metrics]
    if ended and not having:
        seen = sorted({name for result in ended for name in result.metrics})
        raise ConfigError(
            f"no trial reported {metric!r}",
            hint=f"they reported: {', '.join(seen)}. run.log({metric}=...) in the script reports it",
        )
    finite = [result for result in having if result.metrics[metric] is not None]
    return min(finite, key=lambda result: rank(result, metric, mode), default=None)


def ranked(results: Sequence[TrialResult], metric: str, mode: str) -> list[TrialResult]:
    return sorted(results, key=lambda result: rank(result, metric, mode))


def rank(result: TrialResult, metric: str, mode: str) -> tuple[bool, bool, bool, float, str]:
    """Sorts trials: the best first, then those whose metric is not finite or was not reported, then the failed."""
    value = result.metrics.get(metric)
    sign = 1.0 if mode == "min" else -1.0
    return bool(result.error), metric not in result.metrics, value is None, sign * (value or 0.0), result.trial

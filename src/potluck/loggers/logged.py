"""The data for loggers: a run's parameters by name, and the figures of a step by name."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from potluck.spec.events import Logged, RunStarted, StepEnded
from potluck.spec.manifest import Manifest

_SIZES = ("steps", "global_batch", "parameters", "trained_parameters", "tokens_per_sample")


ParamValue = str | int | float
"""What every logger takes as the value of a parameter."""


def params_of(manifest: Manifest, started: RunStarted) -> dict[str, ParamValue]:
    """Settings, versions and size of the model; unset ones are left out."""
    tables: dict[str, Mapping[str, object]] = {
        "": {"what": manifest.what, **{name: getattr(started, name) for name in ("machine", "device", *_SIZES)}},
        "run/": msgspec.to_builtins(manifest.config),
        "recipe/": manifest.recipe.config if manifest.recipe is not None else {},
        "versions/": manifest.versions,
    }
    return {
        f"{room}{name}": value if isinstance(value, str | int | float) else str(value)
        for room, table in tables.items()
        for name, value in table.items()
        if value not in (None, ())
    }


def scalars_of(event: StepEnded | Logged) -> dict[str, float]:
    """A step's figures, or the script's own values; a value that is unknown or not finite is left out."""
    values = event.values if isinstance(event, Logged) else _of_step(event)
    return {name: value for name, value in values.items() if value is not None}


def _of_step(event: StepEnded) -> dict[str, float | None]:
    """A machine's share is that of the step's samples, its rate is in samples per second."""
    whole = sum(event.samples.values())
    values: dict[str, float | None] = {
        "train/loss": event.loss,
        "speed/samples_per_s": event.samples_per_s,
        "speed/tokens_per_s": event.tokens_per_s,
        "speed/speedup": event.speedup,
        "speed/step_s": event.step_s,
    }
    for machine in event.machines:
        values[f"share/{machine.name}"] = machine.samples / whole if whole else None
        values[f"rate/{machine.name}"] = machine.rate
    return values

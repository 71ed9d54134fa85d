"""Predictions while one quantity varies in logarithmic steps: from which value on is it worth it?

PURE.

    link_mbit      every machine's link, in Mbit/s of payload
    guests         how many, the fleet's own taken in turn
    batch_tokens   tokens (samples, where a sample is one) in a step
    parameters     the model's size; a sample's computing grows with it
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from potluck.checked import nearest
from potluck.errors import ConfigError
from potluck.plan.hub import ideal_speedup
from potluck.plan.predict import predict
from potluck.plan.scale import MOST_PLANNED, many
from potluck.spec.fleet import DDP, DDP_BALANCED, POTLUCK, Fleet, Job

VARIABLES = ("link_mbit", "guests", "batch_tokens", "parameters")
STRATEGIES = (DDP, DDP_BALANCED, POTLUCK)
POINTS = 25
MOST_POINTS = 400
MOST_SWEPT_GUESTS = 256
"""The most guests of a sweep, whose shares are whole samples; `--guests` goes further."""
PAYS = 1.02
CROWDED = 0.99
"""Share of the best speed-up; below it, with more guests, there are too many guests."""
_SUFFIXES = {"k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
HALVINGS = 20
_LIMITS = {
    "link_mbit": (1e-2, 1e7),
    "guests": (1, MOST_SWEPT_GUESTS),
    "batch_tokens": (1, 1e10),
    "parameters": (1e3, 1e13),
}
_EXAMPLES = {
    "link_mbit": "10:10000",
    "guests": "1:64",
    "batch_tokens": "64k:4M",
    "parameters": "1M:10B",
}


class SweepRange(Struct, frozen=True, kw_only=True):
    """What is swept, from where to where."""

    variable: str
    first: float
    last: float
    points: int = POINTS

    def values(self) -> list[float]:
        """Logarithmic steps; whole numbers for a quantity that is counted."""
        steps = max(1, self.points - 1)
        ratio = self.last / self.first
        values = [self.first * ratio ** (i / steps) for i in range(self.points)]
        return values if self.variable == "link_mbit" else [*dict.fromkeys(float(round(v)) for v in values)]


class Point(Struct, frozen=True, kw_only=True):
    value: float
    ideal: float
    speedup: dict[str, float]
    step_s: dict[str, float]


class Sweep(Struct, frozen=True, kw_only=True):
    span: SweepRange
    points: tuple[Point, ...]
    pays_from: float | None
    """The value from which potluck is worth it (1.02×); None: not in this range."""
    crowded_from: float | None = None
    """For guests: the number beyond which potluck becomes slower; None: not in this range."""


def parse(word: str) -> SweepRange:
    """link_mbit=10:10000, parameters=1M:10B, or with the number of points link_mbit=10:10000:40."""
    variable, equals, rest = word.partition("=")
    variable = variable.strip().replace("-", "_")
    if variable not in VARIABLES:
        raise ConfigError(f"{variable!r} cannot be swept", hint=nearest(variable, list(VARIABLES)))
    example = f"for example {variable}={_EXAMPLES[variable]}"
    try:
        numbers = [_number(part) for part in rest.split(":")]
    except ValueError:
        numbers = []
    if not equals or len(numbers) not in (2, 3) or not all(math.isfinite(n) for n in numbers):
        raise ConfigError(f"a sweep is NAME=FIRST:LAST, not {word!r}", hint=example)
    least, most = _LIMITS[variable]
    first, last = numbers[:2]
    if not least <= first < last <= most:
        raise ConfigError(
            f"{variable} cannot go from {first:g} to {last:g}",
            hint=f"give the smaller first, within {least:g} to {most:g}",
        )
    points = int(numbers[2]) if len(numbers) == 3 else POINTS
    if not 2 <= points <= MOST_POINTS:
        raise ConfigError(f"a sweep cannot have {points} points", hint=f"choose 2 to {MOST_POINTS}")
    return SweepRange(variable=variable, first=first, last=last, points=points)


def _number(word: str) -> float:
    word = word.strip().lower()
    times = _SUFFIXES.get(word[-1:], 1.0)
    return float(word[:-1] if times > 1 else word) * times


def sweep(job: Job, fleet: Fleet, span: SweepRange, strategies: Sequence[str] = ()) -> Sweep:
    """The strategies at each value."""
    names = [name for name in strategies or STRATEGIES if name != "solo"] or list(STRATEGIES)
    points = tuple(_point(job, fleet, span.variable, value, names) for value in span.values())
    pays_from = _pays_from(job, fleet, span, points)
    if pays_from is not None and all(point.value != pays_from for point in points):
        between = _point(job, fleet, span.variable, pays_from, names)
        points = tuple(sorted((*points, between), key=lambda point: point.value))
    return Sweep(span=span, points=points, pays_from=pays_from, crowded_from=_crowded_from(span, points))


def changed(job: Job, fleet: Fleet, variable: str, value: float) -> tuple[Job, Fleet]:
    """The job and the fleet with one quantity changed."""
    if variable == "link_mbit":
        linked = (replace(m, link_bytes_per_s=value * 1e6 / 8, link=f"{value:g} Mbit/s") for m in fleet.machines)
        return job, Fleet(machines=tuple(linked))
    if variable == "guests":
        return job, many(fleet, min(round(value), MOST_PLANNED))
    if variable == "batch_tokens":
        return job.with_batch(max(1, round(value / job.tokens_per_sample))), fleet
    times = value / job.parameters
    heavier = (
        replace(m, samples_per_s=m.samples_per_s / times, update_s=m.update_s * times) for m in fleet.machines
    )
    return replace(job, parameters=max(1, round(value))), Fleet(machines=tuple(heavier))


def _point(job: Job, fleet: Fleet, variable: str, value: float, strategies: Sequence[str]) -> Point:
    job, fleet = changed(job, fleet, variable, value)
    able = [name for name in strategies if name == POTLUCK or job.batch >= len(fleet.machines)]
    rows = {name: predict(job, fleet, name) for name in able}
    return Point(
        value=value,
        ideal=ideal_speedup(job, fleet),
        speedup={name: row.speedup for name, row in rows.items()},
        step_s={name: row.step_s for name, row in rows.items()},
    )


def _crowded_from(span: SweepRange, points: Sequence[Point]) -> float | None:
    """The number of guests with the best speed-up, if more guests have less, because the hub refuses nobody."""
    swept = [point for point in points if POTLUCK in point.speedup]
    if span.variable != "guests" or not swept:
        return None
    best = max(swept, key=lambda point: point.speedup[POTLUCK])
    return best.value if swept[-1].speedup[POTLUCK] < CROWDED * best.speedup[POTLUCK] else None


def _pays_from(job: Job, fleet: Fleet, span: SweepRange, points: Sequence[Point]) -> float | None:
    """The first value that is worth it, by bisection between it and the value before."""

    known = {point.value: point.speedup.get(POTLUCK) for point in points}

    def pays(value: float) -> bool:
        speedup = known.get(value) or _point(job, fleet, span.variable, value, [POTLUCK]).speedup[POTLUCK]
        return speedup >= PAYS

    values = span.values()
    start = next((i for i, value in enumerate(values) if pays(value)), None)
    if not start:
        return None if start is None else values[0]
    low, high = values[start - 1], values[start]
    for _ in range(HALVINGS):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high if span.variable == "link_mbit" else float(math.ceil(high))

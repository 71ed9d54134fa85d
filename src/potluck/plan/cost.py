"""What a plan costs: own electricity against rented machines, per hour and per billion tokens. PURE.

    per billion = (price of an hour) / (3600 · tokens/s) · 10⁹

Own electricity is the watts of the machines that compute × the price of a kWh. Only power is counted: not what the
machines cost, nor their cooling. Amounts have no currency: all are in the one that the prices were given in.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from msgspec import Struct

from potluck.errors import ConfigError
from potluck.plan import fleet_inputs
from potluck.plan.device_names import find_or_none
from potluck.plan.models import Model
from potluck.plan.predict import check_strategies, fastest, predict
from potluck.spec.fleet import DDP_ACCUMULATE, SOLO, Cost, Fleet, Job, Prediction

_AMOUNT = r"\s*[$€£]?\s*(?P<amount>[0-9]+(?:\.[0-9]+)?)\s*[$€£]?\s*/\s*"
"""Requires a digit before the point, because a shell turns "$2.10" into .10."""
_PRICE = re.compile(rf"^(?:(?P<device>[^=]{{1,60}})=)?{_AMOUNT}h(?:r|our)?$", re.IGNORECASE)
_ELECTRICITY = re.compile(rf"^{_AMOUNT}kwh$", re.IGNORECASE)


class Price(Struct, frozen=True, kw_only=True):
    """The rent of an hour: of this fleet, or of another device."""

    device: str = ""
    """Empty: the whole fleet that is planned for."""
    per_hour: float


def parse_price(word: str) -> Price:
    """2.10/h, or H100=2.10/h."""
    found = _PRICE.match(word.strip())
    if found is None or not 0 < float(found["amount"]) < 1e9:
        raise ConfigError(f"a price is AMOUNT/h, not {word!r}", hint="for example 2.10/h, or H100=2.10/h")
    return Price(device=(found["device"] or "").strip(), per_hour=float(found["amount"]))


def parse_electricity(word: str) -> float:
    """0.30/kWh."""
    found = _ELECTRICITY.match(word)
    if found is None or not 0 < float(found["amount"]) < 1e6:
        raise ConfigError(f"a price of electricity is AMOUNT/kWh, not {word!r}", hint="for example 0.30/kWh")
    return float(found["amount"])


def costs(
    job: Job,
    fleet: Fleet,
    rows: Sequence[Prediction],
    prices: Sequence[Price],
    per_kwh: float | None,
    *,
    model: Model | None = None,
    precision: str = "bf16",
) -> tuple[Cost, ...]:
    """The fastest strategy and the host alone on own electricity, then the rented machines.

    A rented device needs the model, because its speed comes from the catalogue.
    """
    best = _fastest(rows)
    found = []
    if per_kwh is not None:
        alone = next((row for row in rows if row.strategy == SOLO), best)
        for row in (alone, best) if best.strategy != SOLO else (best,):
            watts = _watts(fleet, row)
            found.append(_cost(job, row, "own electricity", watts / 1000 * per_kwh, watts))
    for price in prices:
        if not price.device:
            found.append(_cost(job, best, "these machines rented", price.per_hour))
            continue
        if model is None:
            raise ConfigError(
                f"a rig does not say how many FLOPs a sample takes, so the cost on {price.device} is unknown",
                hint="name the machines: --machine",
            )
        rented = fleet_inputs.from_words([f"rented={price.device}"], model, precision).fleet
        row = _fastest([predict(job, rented, name) for name in check_strategies(())])
        found.append(_cost(job, row, f"{price.device} rented", price.per_hour))
    return tuple(found)


def _fastest(rows: Sequence[Prediction]) -> Prediction:
    """The fastest that fits, of those that are the same training."""
    same = [row for row in rows if row.strategy != DDP_ACCUMULATE]
    return fastest([row for row in same if row.fits] or same)


def _watts(fleet: Fleet, row: Prediction) -> float:
    """The power of the machines that compute."""
    working = [m for m in fleet.machines if row.shares[m.name]]
    unknown = [m.name for m in working if m.watts is None]
    if unknown:
        raise ConfigError(
            f"it is not known how much power {', '.join(unknown[:3])} takes",
            hint='give it: --machine "NAME=DEVICE,watts=300"',
        )
    return math.fsum(m.watts or 0.0 for m in working)


def _cost(job: Job, row: Prediction, what: str, per_hour: float, watts: float | None = None) -> Cost:
    rate = job.batch * job.tokens_per_sample / row.step_s
    return Cost(
        what=what,
        strategy=row.strategy,
        units_per_s=rate,
        watts=watts,
        per_hour=per_hour,
        per_billion=per_hour / (3600 * rate) * 1e9,
    )


def power_notes(fleet: Fleet) -> tuple[str, ...]:
    """Where the watts of the catalogue come from."""
    found = ((m, find_or_none(m.device)) for m in fleet.machines)
    notes = tuple(dict.fromkeys(sheet.about_watts() for m, sheet in found if sheet and m.watts == sheet.watts))
    return (*notes, "a measurement at the plug is more accurate: watts=…") if notes else ()

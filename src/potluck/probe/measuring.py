"""Decides what `potluck probe` measures of one machine and its link, in which order, and for how long."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from msgspec.structs import replace

from potluck.spec.probed import DeviceSpeed, Probed
from potluck.wire.token import Token

if TYPE_CHECKING:
    from potluck.probe.speed import Training

Say = Callable[[str], None]
DEVICE_PART = 1 / 3
"""The share of the time for the device if a link is measured too."""
LINK_S = 1.0
"""Time for the link between ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What to measure."""

    name: str
    """Name of this machine."""
    seconds: float
    with_device: bool
    iperf3: bool
    """Whether to run it if both machines have it."""
    token: Token | None
    address: tuple[str, int | None] | None
    """Address of a machine without Potluck, whose port may be unknown."""
    recipe: str
    settings: Mapping[str, object]
    """Settings of the recipe, checked when it is built."""
    device: str | None
    usual_device: str | None
    """Number of threads of this machine, if none is given."""
    threads: int | None
    micro_batch: int | None

    @property
    def device_s(self) -> float:
        """The device's part of the time."""
        linked = self.token is not None or self.address is not None
        return self.part_s(DEVICE_PART if linked else 1.0)

    def part_s(self, part: float) -> float:
        """The device's share of the time, if the device is measured."""
        return self.seconds * part if self.with_device else 0.0

    def measure(self, say: Say) -> Probed:
        device_s = self.device_s
        link_s = self.seconds - device_s
        here = self.measure_device(device_s, say)
        if self.token is not None:
            from potluck.probe import link_client

            there, paths = link_client.measure(self.token, self.name, link_s, say, iperf3=self.iperf3)
            if there.name == here.name:
                there = replace(there, name=f"{there.name}-2")
            return Probed(here=here, there=there, paths=paths)
        if self.address is not None:
            from potluck.probe import round_trip

            path = round_trip.measure(self.name, *self.address, link_s, say)
            return Probed(here=here, paths=(path,))
        return Probed(here=here)

    def measure_in_group(self, backend: str, say: Say) -> Probed:
        """As one of several ranks: rank 0 measures its device, then all of them measure collectives."""
        from potluck.probe.groups import check_backends, groups_of, is_first, rank_device

        on = "cuda" if backend.lower() == "nccl" and self.device is None else self.device or "cpu"
        check_backends(backend, None, on)
        device, device_s = rank_device(on), self.part_s(DEVICE_PART)
        here = self.measure_device(device_s if is_first() else 0.0, say)
        say("starting the group")
        with groups_of([backend], device) as (_, store):
            from potluck.probe import slowest_link
            from potluck.probe.collectives import short

            say("the rate of the link between the ranks")
            found = slowest_link.slowest(store, seconds=LINK_S)
            say("collectives")
            rate, left_s = found.bytes_per_s_of(backend), max(1.0, self.seconds - device_s - LINK_S)
            rows = short(seconds=left_s, link_bytes_per_s=rate, device=device)
        return Probed(here=here, collectives=tuple(rows), link_kind=found.kind)

    def measure_device(self, seconds: float, say: Say) -> DeviceSpeed:
        if not seconds:
            return DeviceSpeed(name=self.name)
        say("starting torch")
        training = self._training()
        from potluck.device import pick
        from potluck.probe import speed

        return speed.measure(
            pick(self.device or self.usual_device, threads=self.threads), training, self.name, seconds, say
        )

    def _training(self) -> Training:
        from potluck.checked import build
        from potluck.train import recipes

        recipe, table = recipes.get(self.recipe), dict(self.settings)
        from potluck.probe.speed import Training  # imports torch, so it comes after the checks

        if "sequence" in table and "batch_tokens" not in table:
            # No step is made: a batch need only hold a sample.
            with contextlib.suppress(ValueError):
                table["batch_tokens"] = max(int(str(table["sequence"])), 4096)
        return Training(recipe=recipe, config=build(recipe.Config, table), micro_batch=self.micro_batch)

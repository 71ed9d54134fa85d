"""What `potluck probe` measures of one machine and its link, in which order, and for how long each."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What to measure."""

    name: str
    """Of this machine."""
    seconds: float
    with_device: bool
    iperf3: bool
    """Whether to run it if both machines have it."""
    token: Token | None
    address: tuple[str, int | None] | None
    """Of a machine without Potluck: its port may be unknown."""
    recipe: str
    settings: Mapping[str, object]
    """Of the recipe; they are checked when it is built."""
    device: str | None
    usual_device: str | None
    """Of this machine, where none is named."""
    threads: int | None
    micro_batch: int | None

    @property
    def device_s(self) -> float:
        """The device's part of the time."""
        linked = self.token is not None or self.address is not None
        return self.part_s(DEVICE_PART if linked else 1.0)

    def part_s(self, part: float) -> float:
        """This part of the time, where the device is measured at all."""
        return self.seconds * part if self.with_device else 0.0

    def measure(self, say: Say) -> Probed:
        device_s = self.device_s
        link_s = self.seconds - device_s
        here = self.measure_device(device_s, say)
        if self.token is not None:
            from potluck.probe import link_visit

            there, paths = link_visit.measure(self.token, self.name, link_s, say, iperf3=self.iperf3)
            if there.name == here.name:
                there = replace(there, name=f"{there.name}-2")
            return Probed(here=here, there=there, paths=paths)
        if self.address is not None:
            from potluck.probe import round_trip

            path = round_trip.measure(self.name, *self.address, link_s, say)
            return Probed(here=here, paths=(path,))
        return Probed(here=here)

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

"""Known devices, and how fast each should train: a published peak × an assumed utilisation.

Nothing here was measured; `potluck probe` measures. The figures and where each was read are in devices.toml, which
is read when the first device is looked up. Peaks are dense (no sparsity): bf16 of the matrix units with fp32 sums,
fp32 of the plain units. A device without bf16 units trains at its fp32 rate. A model may reach half or twice of the
assumed utilisation.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from msgspec import Struct, field

from potluck import checked
from potluck.bounds import Amount, Many, Natural, Short

ESTIMATE = "estimate"
"""In place of a page: a figure that was found on none."""
NO_NEURAL_ENGINE = (
    "PyTorch cannot train on the Apple Neural Engine: only Core ML reaches it, and only to run models"
)
FILE = "devices.toml"
Cluster = tuple[Amount, Amount, Amount]
"""Units, FLOP a cycle of each, GHz."""


class DeviceSheet(Struct, frozen=True, kw_only=True):
    """One device, as its maker or a page about it describes it."""

    name: str
    maker: str
    bf16_tflops: float | None
    fp32_tflops: float
    bf16_how: str
    """The page with the figure, or the formula that it is derived by."""
    fp32_how: str
    memory_gb: float
    bandwidth_gb_per_s: float
    utilisation: float
    watts: float
    watts_of: str
    """What the watts include: the card alone, or the computer at the wall."""
    peaks_from: str
    memory_from: str
    """A key of pages(), or ESTIMATE; of the peaks, the memory and its bandwidth, and the watts."""
    watts_from: str
    fabric: str = ""
    """The link to other devices of the same machine, if the maker has one of its own."""
    note: str = ""
    gpu_cores: int = 0
    """Cores of an Apple GPU: the chip is also sold with fewer."""

    def flops_per_s(self, precision: str = "bf16") -> float:
        """Effective FLOP/s while training: peak × utilisation."""
        return self._used(precision)[1] * 1e12 * self.utilisation

    def about(self, precision: str = "bf16") -> str:
        """A description of the figure and its source."""
        used, peak, how = self._used(precision)
        part = f"× {self.utilisation:g} assumed, not measured"
        return f"{self.name}: {tflops_text(peak)} TFLOP/s {used} ({how}) {part}"

    def about_watts(self) -> str:
        return f"{self.name}: {self.watts:g} W ({self.watts_from}, {self.watts_of})"

    def _used(self, precision: str) -> tuple[str, float, str]:
        if precision == "bf16" and self.bf16_tflops is not None:
            return "bf16", self.bf16_tflops, self.bf16_how
        return "fp32", self.fp32_tflops, self.fp32_how


class CatalogueEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A device of the file, with what its family has in common. The keys are explained there."""

    name: Short
    maker: Short
    memory: Amount
    bandwidth: Amount
    watts: Amount
    watts_of: Short
    utilisation: Amount
    read_from: Short = field(name="from")
    also: Many[Short] = ()
    """Other names."""
    cores: Natural = 0
    ghz: Amount = 0.0
    clusters: Many[Cluster] = ()
    fp32_cycle: Amount = 0.0
    bf16_cycle: Amount = 0.0
    fp32: Amount = 0.0
    bf16: Amount = 0.0
    fabric: Short = ""
    note: Short = ""
    peaks_from: Short = ""
    memory_from: Short = ""
    watts_from: Short = ""

    def sheet(self) -> DeviceSheet:
        peaks_from = self.peaks_from or self.read_from
        plain = self.clusters or ((self.cores, self.fp32_cycle, self.ghz),)
        matrix = ((self.cores, self.bf16_cycle, self.ghz),)
        fp32, fp32_how = (self.fp32, peaks_from) if self.fp32 else peak(plain, peaks_from)
        bf16, bf16_how = (self.bf16, peaks_from) if self.bf16 else peak(matrix, peaks_from)
        return DeviceSheet(
            name=self.name,
            maker=self.maker,
            bf16_tflops=bf16 or None,
            fp32_tflops=fp32,
            bf16_how=bf16_how if bf16 else "",
            fp32_how=fp32_how,
            memory_gb=self.memory,
            bandwidth_gb_per_s=self.bandwidth,
            utilisation=self.utilisation,
            watts=self.watts,
            watts_of=self.watts_of,
            peaks_from=peaks_from,
            memory_from=self.memory_from or self.read_from,
            watts_from=self.watts_from or self.read_from,
            fabric=self.fabric,
            note=self.note,
            gpu_cores=self.cores if self.maker == "Apple" else 0,
        )


@cache
def entries() -> tuple[CatalogueEntry, ...]:
    """The devices of the file, in its order."""
    found = []
    for family in _file()["family"]:
        common = {key: value for key, value in family.items() if key != "devices"}
        found += [checked.convert({**common, **row}, CatalogueEntry, where=FILE) for row in family["devices"]]
    return tuple(found)


@cache
def catalogue() -> dict[str, DeviceSheet]:
    """The known devices by name."""
    return {row.name: row.sheet() for row in entries()}


@cache
def pages() -> dict[str, str]:
    """The address of each page that a figure was read on."""
    found: dict[str, str] = _file()["pages"]
    return found


@cache
def _file() -> dict[str, Any]:
    return tomllib.loads(resources.files("potluck.plan").joinpath(FILE).read_text(encoding="utf-8"))


def peak(clusters: tuple[Cluster, ...], page: str) -> tuple[float, str]:
    """TFLOP/s, and the formula."""
    how = ESTIMATE if page == ESTIMATE else "derived"
    terms = " + ".join(f"{units:,g} × {cycle:g} × {ghz:g}" for units, cycle, ghz in clusters)
    return sum(units * cycle * ghz for units, cycle, ghz in clusters) / 1000, f"{how}: {terms} GHz"


def tflops_text(value: float) -> str:
    """0.77, 58.3, 2,517."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"

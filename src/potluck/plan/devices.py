"""Known devices by name, and how fast each should train: a peak from its data sheet × an assumed utilisation.

PURE data. Nothing here was measured, and nothing may be shown as if it were: `potluck probe` measures.

Peaks are dense (no sparsity), in TFLOP/s: `bf16` of the matrix units with fp32 sums, `fp32` of the plain units.
Where a maker publishes no figure it is `derived`: units × lanes × 2 × clock. A device without bf16 units trains at
its fp32 rate. The utilisation is what common training loops reach of the peak on GPT-like models; it is one number
for a kind of device, and your model may reach half or twice of it.
"""

from __future__ import annotations

import re

from msgspec import Struct

from potluck.checked import did_you_mean
from potluck.errors import ConfigError

SHEET = "the maker's data sheet"
DERIVED = "derived: units × lanes × 2 × clock"
DATA_CENTRE, CONSUMER, APPLE, CPU = 0.40, 0.50, 0.50, 0.50
"""Assumed utilisation by kind of device."""


class DeviceSheet(Struct, frozen=True, kw_only=True):
    """One device, as its maker describes it."""

    name: str
    bf16_tflops: float | None
    fp32_tflops: float
    memory_gb: float
    """Memory of the usual model; for a CPU or an Apple chip, the assumed memory of the machine."""
    bandwidth_gb_per_s: float
    utilisation: float
    source: str = SHEET

    def flops_per_s(self, precision: str = "bf16") -> float:
        """Effective FLOP/s while training: peak × utilisation."""
        peak = self.bf16_tflops if precision == "bf16" and self.bf16_tflops is not None else self.fp32_tflops
        return peak * 1e12 * self.utilisation

    def about(self, precision: str = "bf16") -> str:
        """A description of the figure and its source."""
        used = "bf16" if precision == "bf16" and self.bf16_tflops is not None else "fp32"
        peak = self.bf16_tflops if used == "bf16" else self.fp32_tflops
        return f"{self.name}: {peak:g} TFLOP/s {used} ({self.source}) × {self.utilisation:g} assumed, not measured"


def _rows(
    utilisation: float, source: str, *rows: tuple[str, float | None, float, float, float]
) -> list[DeviceSheet]:
    return [
        DeviceSheet(
            name=name,
            bf16_tflops=bf16,
            fp32_tflops=fp32,
            memory_gb=memory,
            bandwidth_gb_per_s=bandwidth,
            utilisation=utilisation,
            source=source,
        )
        for name, bf16, fp32, memory, bandwidth in rows
    ]


# name, bf16, fp32 (TFLOP/s), memory (GB), bandwidth (GB/s)
_ALL = [
    *_rows(
        CONSUMER,
        SHEET,
        ("GTX 1080 Ti", None, 11.3, 11, 484),
        ("RTX 2080 Ti", None, 13.4, 11, 616),
        ("RTX 3060", 25.5, 12.7, 12, 360),
        ("RTX 3070", 40.6, 20.3, 8, 448),
        ("RTX 3080", 59.5, 29.8, 10, 760),
        ("RTX 3090", 71.0, 35.6, 24, 936),
        ("RTX 4060", 30.2, 15.1, 8, 272),
        ("RTX 4070", 58.3, 29.1, 12, 504),
        ("RTX 4080", 97.5, 48.7, 16, 717),
        ("RTX 4090", 165.2, 82.6, 24, 1008),
        ("RTX 5070", 61.7, 30.9, 12, 672),
        ("RTX 5080", 112.6, 56.3, 16, 960),
        ("RTX 5090", 209.5, 104.8, 32, 1792),
    ),
    *_rows(
        DATA_CENTRE,
        SHEET,
        ("T4", None, 8.1, 16, 320),
        ("A100", 312, 19.5, 80, 2039),
        ("L40S", 362, 91.6, 48, 864),
        ("H100", 989, 67, 80, 3350),
        ("H200", 989, 67, 141, 4800),
        ("MI300X", 1307, 163.4, 192, 5300),
    ),
    *_rows(
        APPLE,
        SHEET,
        ("M1", None, 2.6, 16, 68),
        ("M1 Pro", None, 5.2, 16, 200),
        ("M1 Max", None, 10.4, 32, 400),
        ("M1 Ultra", None, 21, 64, 800),
        ("M2", None, 3.6, 16, 100),
        ("M2 Pro", None, 6.8, 16, 200),
        ("M2 Max", None, 13.6, 32, 400),
        ("M2 Ultra", None, 27.2, 64, 800),
    ),
    *_rows(
        APPLE,
        DERIVED,
        ("M3", None, 3.6, 16, 100),
        ("M3 Pro", None, 6.4, 18, 150),
        ("M3 Max", None, 14.3, 36, 400),
        ("M3 Ultra", None, 28.6, 96, 819),
        ("M4", None, 4.0, 16, 120),
        ("M4 Pro", None, 8.1, 24, 273),
        ("M4 Max", None, 16.2, 36, 546),
    ),
    *_rows(
        CPU,
        DERIVED,
        ("i9-13900K", None, 2.5, 32, 89.6),
        ("i7-12700", None, 1.5, 32, 76.8),
        ("i5-12450H", None, 0.77, 16, 76.8),
        ("Ryzen 9 7950X", None, 2.6, 32, 83),
        ("Raspberry Pi 5", None, 0.154, 8, 17),
    ),
]
DEVICES: dict[str, DeviceSheet] = {sheet.name: sheet for sheet in _ALL}


def find(name: str) -> DeviceSheet:
    """The device of this name, ignoring spaces and case, with or without its maker ("Apple M2")."""
    wanted = _plain(name)
    by_plain = {_plain(known): known for known in DEVICES}
    if wanted in by_plain:
        return DEVICES[by_plain[wanted]]
    advice = did_you_mean(wanted, by_plain, by_plain)
    raise ConfigError(
        f"there is no device {name!r} in the catalogue",
        hint=f"{advice}devices: {', '.join(DEVICES)}; or a speed: 20TFLOPS, 0.6s/sample",
    )


_MAKERS = r"nvidia|geforce|amd|instinct|intel|core|apple|\(r\)|\(tm\)|cpu|gpu|\b(laptop|sxm5?|pcie|hbm3)\b|\d+-core"


def _plain(name: str) -> str:
    """A name without makers, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", re.sub(_MAKERS, " ", name.lower().split("@")[0]))

"""Known devices by name, and how fast each should train: a published peak × an assumed utilisation.

PURE data. Nothing here was measured, and nothing may be shown as if it were: `potluck probe` measures.

Peaks are dense (no sparsity), in TFLOP/s: `bf16` of the matrix units with fp32 sums, `fp32` of the plain units.
The bf16 rate of a GeForce card is twice its fp32 rate. Where a maker publishes no figure it is derived: units ×
lanes × 2 × clock. What was read nowhere (plan/sources.py has the pages) is an estimate, and says so. A device
without bf16 units trains at its fp32 rate. The utilisation is what common training loops reach of the peak on
GPT-like models; it is one number for a kind of device, and your model may reach half or twice of it.

Watts are the most that the maker states: of the card alone, of the processor alone, or (Apple) of a desktop with
the chip, at the wall.
"""

from __future__ import annotations

import re

from msgspec import Struct

from potluck.checked import did_you_mean
from potluck.errors import ConfigError
from potluck.plan.sources import PEAKS, WATTS, site

PUBLISHED = "published"
DERIVED = "derived: units × lanes × 2 × clock"
ESTIMATE = "estimate"
CARD_W, CHIP_W, WALL_W = "the card alone", "the processor alone", "at the wall"
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
    source: str
    """The site where peak, memory and bandwidth were read; or that they are derived, or an estimate."""
    page: str = ""
    watts: float
    watts_of: str
    """What the watts are of: the card alone, or the computer at the wall."""
    watts_page: str = ""
    fabric: str = ""
    """The link to other devices of the same machine, if the maker has one of its own."""

    def flops_per_s(self, precision: str = "bf16") -> float:
        """Effective FLOP/s while training: peak × utilisation."""
        peak = self.bf16_tflops if precision == "bf16" and self.bf16_tflops is not None else self.fp32_tflops
        return peak * 1e12 * self.utilisation

    def about(self, precision: str = "bf16") -> str:
        """A description of the figure and its source."""
        used = "bf16" if precision == "bf16" and self.bf16_tflops is not None else "fp32"
        peak = self.bf16_tflops if used == "bf16" else self.fp32_tflops
        return f"{self.name}: {peak:g} TFLOP/s {used} ({self.source}) × {self.utilisation:g} assumed, not measured"

    def about_watts(self) -> str:
        return f"{self.name}: {self.watts:g} W ({self.watts_source})"

    @property
    def watts_source(self) -> str:
        return f"{site(self.watts_page) or ESTIMATE}, {self.watts_of}"


def _rows(
    utilisation: float,
    source: str,
    watts_of: str,
    *rows: tuple[str, float | None, float, float, float, float],
    fabric: str = "",
) -> list[DeviceSheet]:
    return [
        DeviceSheet(
            name=name,
            bf16_tflops=bf16,
            fp32_tflops=fp32,
            memory_gb=memory,
            bandwidth_gb_per_s=bandwidth,
            utilisation=utilisation,
            source=site(PEAKS.get(name, "")) or (ESTIMATE if source == PUBLISHED else source),
            page=PEAKS.get(name, ""),
            watts=watts,
            watts_of=watts_of,
            watts_page=WATTS.get(name, ""),
            fabric=fabric,
        )
        for name, bf16, fp32, memory, bandwidth, watts in rows
    ]


# name, bf16, fp32 (TFLOP/s), memory (GB), bandwidth (GB/s), watts
_ALL = [
    *_rows(
        CONSUMER,
        PUBLISHED,
        CARD_W,
        ("GTX 1080 Ti", None, 11.3, 11, 484, 250),
        ("RTX 2080 Ti", None, 13.4, 11, 616, 250),
        ("RTX 3060", 25.5, 12.7, 12, 360, 170),
        ("RTX 3060 Ti", 32.4, 16.2, 8, 448, 200),
        ("RTX 3070", 40.6, 20.3, 8, 448, 220),
        ("RTX 3080", 59.5, 29.8, 10, 760, 320),
        ("RTX 3080 Ti", 68.2, 34.1, 12, 912, 350),
        ("RTX 4060", 30.2, 15.1, 8, 272, 115),
        ("RTX 4060 Ti", 44.1, 22.1, 8, 288, 160),
        ("RTX 4070", 58.3, 29.1, 12, 504, 200),
        ("RTX 4070 Super", 71.0, 35.5, 12, 504, 220),
        ("RTX 4070 Ti", 80.2, 40.1, 12, 504, 285),
        ("RTX 4070 Ti Super", 88.2, 44.1, 16, 672, 285),
        ("RTX 4080", 97.5, 48.7, 16, 717, 320),
        ("RTX 4080 Super", 104.4, 52.2, 16, 736, 320),
        ("RTX 4090", 165.2, 82.6, 24, 1008, 450),
        ("RTX 5070", 61.7, 30.9, 12, 672, 250),
        ("RTX 5070 Ti", 87.9, 43.9, 16, 896, 300),
        ("RTX 5080", 112.6, 56.3, 16, 960, 360),
        ("RTX 5090", 209.5, 104.8, 32, 1792, 575),
    ),
    *_rows(CONSUMER, PUBLISHED, CARD_W, ("RTX 3090", 71.0, 35.6, 24, 936, 350), fabric="NVLink bridge"),
    *_rows(
        DATA_CENTRE,
        PUBLISHED,
        CARD_W,
        ("T4", None, 8.1, 16, 320, 70),
        ("L4", 121, 30.3, 24, 300, 72),
        ("A10", 125, 31.2, 24, 600, 150),
        ("L40S", 362, 91.6, 48, 864, 350),
    ),
    *_rows(DATA_CENTRE, PUBLISHED, CARD_W, ("V100", None, 15.7, 32, 900, 300), fabric="NVLink 2"),
    *_rows(DATA_CENTRE, PUBLISHED, CARD_W, ("A100", 312, 19.5, 80, 2039, 400), fabric="NVLink 3"),
    *_rows(
        DATA_CENTRE,
        PUBLISHED,
        CARD_W,
        ("H100", 989, 67, 80, 3350, 700),
        ("H200", 989, 67, 141, 4800, 700),
        fabric="NVLink 4",
    ),
    *_rows(DATA_CENTRE, PUBLISHED, CARD_W, ("B200", 2250, 80, 180, 8000, 1000), fabric="NVLink 5"),
    *_rows(
        DATA_CENTRE,
        PUBLISHED,
        CARD_W,
        ("MI300X", 1307, 163.4, 192, 5300, 750),
        ("MI325X", 1307, 163.4, 256, 6000, 1000),
        fabric="xGMI",
    ),
    *_rows(
        APPLE,
        PUBLISHED,
        WALL_W,
        ("M1", None, 2.6, 16, 68, 39),
        ("M1 Max", None, 10.4, 32, 400, 115),
        ("M1 Ultra", None, 21, 64, 800, 215),
        ("M2", None, 3.6, 16, 100, 50),
        ("M2 Pro", None, 6.8, 16, 200, 100),
        ("M2 Max", None, 13.6, 32, 400, 145),
        ("M2 Ultra", None, 27.2, 64, 800, 295),
    ),
    *_rows(APPLE, PUBLISHED, WALL_W, ("M1 Pro", None, 5.2, 16, 200, 70)),
    *_rows(
        APPLE,
        DERIVED,
        WALL_W,
        ("M3", None, 3.6, 16, 100, 50),
        ("M3 Pro", None, 6.4, 18, 150, 80),
        ("M3 Max", None, 14.3, 36, 400, 120),
        ("M3 Ultra", None, 28.6, 96, 819, 270),
        ("M4 Pro", None, 8.1, 24, 273, 140),
        ("M4 Max", None, 16.2, 36, 546, 145),
    ),
    *_rows(APPLE, DERIVED, WALL_W, ("M4", None, 4.0, 16, 120, 65)),
    *_rows(
        CPU,
        DERIVED,
        CHIP_W,
        ("i9-13900K", None, 2.5, 32, 89.6, 253),
        ("i9-14900K", None, 2.6, 32, 89.6, 253),
        ("i7-13700K", None, 1.9, 32, 89.6, 253),
        ("i7-12700", None, 1.5, 32, 76.8, 180),
        ("i5-13600K", None, 1.5, 32, 89.6, 181),
        ("i5-12450H", None, 0.77, 16, 76.8, 95),
        ("Ryzen 9 7950X", None, 2.6, 32, 83, 170),
    ),
    *_rows(CPU, DERIVED, WALL_W, ("Raspberry Pi 5", None, 0.154, 8, 17, 12)),
]
DEVICES: dict[str, DeviceSheet] = {sheet.name: sheet for sheet in _ALL}


def find(name: str) -> DeviceSheet:
    """The device of this name, ignoring spaces and case, with or without its maker or Mac ("MacBook Air M2")."""
    wanted = _plain(name)
    by_plain = {_plain(known): known for known in DEVICES}
    if wanted in by_plain:
        return DEVICES[by_plain[wanted]]
    if _NEURAL_ENGINE.search(name.lower()):
        raise ConfigError(
            "PyTorch cannot train on the Apple Neural Engine: only Core ML reaches it, and only to run models",
            hint="name the chip: its GPU trains (M2, M4 Max)",
        )
    if _CORE_F.match(wanted) and wanted[:-1] in by_plain:  # the same processor without graphics
        return DEVICES[by_plain[wanted[:-1]]]
    advice = did_you_mean(wanted, by_plain, by_plain)
    raise ConfigError(
        f"there is no device {name!r} in the catalogue",
        hint=f"{advice}devices: {', '.join(DEVICES)}; or a speed: 20TFLOPS, 0.6s/sample",
    )


def caution(name: str) -> str:
    """Why a device is slower than its sheet says in what was named; empty if nothing is known."""
    if re.search(r"\bair\b", name.lower()):
        return f"{name}: a MacBook Air has no fan, so expect less than this after some minutes"
    if re.search(r"\b(laptop|mobile|max-q)\b", name.lower()):
        return f"{name}: counted as the desktop's card; a laptop's has fewer units and less power"
    return ""


def counted(name: str) -> tuple[int, str]:
    """8xMI300X: (8, MI300X)."""
    found = _COUNTED.match(name)
    return (int(found[1]), found[2]) if found else (1, name)


_COUNTED = re.compile(r"^\s*([1-9][0-9]{0,2})\s*[x×*]\s*(\S.*)$", re.IGNORECASE)
_NEURAL_ENGINE = re.compile(r"neural[ _-]?engine|\bane\b")
_CORE_F = re.compile(r"^i[3579]\d{4,5}k?f$")
_MACS = r"mac ?book ?(?:pro|air)?|mac ?(?:mini|studio|pro)|imac|\b(?:air|mini|studio)\b"
_MAKERS = (
    r"nvidia|geforce|amd|radeon|instinct|intel|core|apple|\(r\)|\(tm\)|cpu|gpu|\d+-core|\b\d+ ?gb\b|\d+th gen"
    r"|\b(laptop|mobile|max-q|sxm\d?|pcie|hbm3e?|oam)\b"
)


def _plain(name: str) -> str:
    """A name without makers, Macs, spaces and punctuation."""
    name = re.sub(_MAKERS, " ", name.lower().split("@")[0])
    return re.sub(r"[^a-z0-9]", "", re.sub(_MACS, " ", name))

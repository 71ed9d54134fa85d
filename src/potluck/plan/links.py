"""Known links by name: their line rate, and what part of it training gets as payload.

PURE data. Line rates are for one direction, from the standard or the maker. The part is assumed: headers on wires,
half or less of the advertised rate in the air (one direction at a time, other stations, distance). `potluck probe
ADDRESS` measures yours. Links inside a node (NVLink, xGMI, PCIe) are the rate of one device to all the others.
"""

from __future__ import annotations

import math
import re

from msgspec import Struct
from msgspec.structs import replace

from potluck.checked import did_you_mean
from potluck.errors import ConfigError

ETHERNET_PART = 0.94
LEAST_MBIT, MOST_MBIT = 1e-3, 1e7


class LinkSheet(Struct, frozen=True, kw_only=True):
    """One kind of link."""

    name: str
    line_mbit: float
    part: float
    """The share of the line rate that is payload."""
    latency_s: float
    source: str = ""
    """Where the line rate comes from."""

    @property
    def bytes_per_s(self) -> float:
        return self.line_mbit * 1e6 / 8 * self.part

    def about(self) -> str:
        rate = f"{self.line_mbit:g} Mbit/s" if self.line_mbit < 1e5 else f"{self.line_mbit / 1000:,.0f} Gbit/s"
        return f"{self.name}: {rate} × {self.part:g} assumed, not measured"


WIFI, ETHERNET = "IEEE 802.11, the usual rate with two antennas", "IEEE 802.3"
INTEL, PCI = "Intel's Thunderbolt specification", "PCI-SIG, 16 lanes"
NVIDIA, AMD = "NVIDIA's data sheet, half of the two-way rate", "AMD's data sheet, 7 links"
# source, name, line rate of one direction (Mbit/s), payload part, latency (s)
_ROWS: tuple[tuple[str, str, float, float, float], ...] = (
    (WIFI, "Wi-Fi 4", 150, 0.5, 4e-3),
    (WIFI, "Wi-Fi 5", 866, 0.5, 3e-3),
    (WIFI, "Wi-Fi 6", 1200, 0.55, 2e-3),
    (WIFI, "Wi-Fi 7", 2880, 0.55, 2e-3),
    (ETHERNET, "100MbE", 100, ETHERNET_PART, 2e-4),
    (ETHERNET, "1GbE", 1_000, ETHERNET_PART, 1e-4),
    (ETHERNET, "2.5GbE", 2_500, ETHERNET_PART, 1e-4),
    (ETHERNET, "5GbE", 5_000, ETHERNET_PART, 1e-4),
    (ETHERNET, "10GbE", 10_000, ETHERNET_PART, 5e-5),
    (INTEL, "Thunderbolt 4", 40_000, 0.4, 5e-5),
    (ETHERNET, "25GbE", 25_000, ETHERNET_PART, 3e-5),
    (INTEL, "Thunderbolt 5", 80_000, 0.4, 5e-5),
    (ETHERNET, "100GbE", 100_000, 0.9, 1e-5),
    (ETHERNET, "400G RoCE", 400_000, 0.85, 5e-6),
    (PCI, "PCIe 3", 126_000, 0.75, 1e-5),
    (PCI, "PCIe 4", 252_000, 0.75, 1e-5),
    (PCI, "PCIe 5", 504_000, 0.75, 1e-5),
    (NVIDIA, "NVLink 2", 1_200_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 3", 2_400_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 4", 3_600_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 5", 7_200_000, 0.8, 3e-6),
    (NVIDIA, "NVLink bridge", 450_000, 0.8, 3e-6),
    (AMD, "xGMI", 3_584_000, 0.7, 3e-6),
)
LINKS: dict[str, LinkSheet] = {
    name: LinkSheet(name=name, line_mbit=mbit, part=part, latency_s=latency_s, source=source)
    for source, name, mbit, part, latency_s in _ROWS
}
_OTHER_NAMES = {"gigabit": "1GbE", "ethernet": "1GbE", "tb4": "Thunderbolt 4", "usb4": "Thunderbolt 4"}
_OTHER_NAMES |= {"infinityfabric": "xGMI", "pcie": "PCIe 4", "pcie4x16": "PCIe 4", "pcie5x16": "PCIe 5"}
_OTHER_NAMES |= {"tb5": "Thunderbolt 5", "400g": "400G RoCE", "400gbe": "400G RoCE", "wifi": "Wi-Fi 5"}
_RATE = re.compile(r"^([0-9.+-]+)([kmg]?)bit(?:/s|ps)?$")
_SEVERAL = re.compile(r"^\s*([1-9][0-9]?)\s*[x×*]\s*(\S.*)$")
_SHORT = re.compile(r"^([0-9.]+)([kKmMgG]?)(B(?:/s|ps)?|[bB](?:/s|ps|PS)?)$")
"""An ambiguous rate such as 5Mbps: the error asks whether bits or bytes are meant."""


def find(name: str) -> LinkSheet:
    """The link of this name, ignoring spaces and case; or a payload rate ("300Mbit"); or several ("8x400GbE")."""
    if (several := _SEVERAL.match(name)) is not None:
        one, count = find(several[2]), int(several[1])
        return replace(one, name=f"{count}x {one.name}", line_mbit=count * one.line_mbit)
    close = re.sub(r"\s", "", name)
    if (rate := _RATE.match(close.lower())) is not None:
        return _of_rate(name, rate)
    if (short := _SHORT.match(close)) is not None:
        raise ConfigError(f"there is no link {name!r}", hint=f"did you mean {_in_bits(short)}?")
    wanted = re.sub(r"[_-]", "", close.lower())
    known = {re.sub(r"[\s_-]", "", link.lower()): link for link in LINKS} | _OTHER_NAMES
    if wanted in known:
        return LINKS[known[wanted]]
    advice = did_you_mean(wanted, known, known)
    raise ConfigError(
        f"there is no link {name!r} in the catalogue",
        hint=f"{advice}links: {', '.join(LINKS)}; or a rate: 300Mbit",
    )


def _of_rate(name: str, rate: re.Match[str]) -> LinkSheet:
    try:
        mbit = float(rate[1]) * {"k": 1e-3, "": 1e-6, "m": 1.0, "g": 1e3}[rate[2]]
    except ValueError:
        mbit = math.nan
    if not LEAST_MBIT <= mbit <= MOST_MBIT:
        raise ConfigError(
            f"{name!r} is not a link or a rate", hint="rates are 1kbit to 10000Gbit, for example 300Mbit"
        )
    return of_mbit(mbit)


def _in_bits(short: re.Match[str]) -> str:
    """5Mbps -> 5Mbit, 5MB/s -> 40Mbit."""
    unit = {"k": "k", "m": "M", "g": "G", "": ""}[short[2].lower()] + "bit"
    try:
        return f"{8 * float(short[1]):g}{unit}" if short[3] in ("B", "B/s", "Bps") else f"{short[1]}{unit}"
    except ValueError:
        return "300Mbit"


def of_mbit(mbit: float) -> LinkSheet:
    """A link whose payload rate is known."""
    return LinkSheet(name=f"{mbit:g} Mbit/s", line_mbit=mbit, part=1.0, latency_s=1e-4)


def faster(bytes_per_s: float) -> LinkSheet | None:
    """The next faster link to buy: the slowest wired one at least twice as fast."""
    ladder = [LINKS[name] for name in ("1GbE", "2.5GbE", "10GbE", "25GbE", "100GbE", "400G RoCE")]
    return next((link for link in ladder if link.bytes_per_s > 1.9 * bytes_per_s), None)

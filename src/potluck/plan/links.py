"""Known links by name: their line rate, and the part of it that is payload.

PURE data. Line rates are for one direction, from the standard or the maker. The part is assumed: on cables headers
are subtracted; Wi-Fi gets half or less of the advertised rate (one direction at a time, other stations, distance).
`potluck probe ADDRESS` measures yours. Links inside a node (NVLink, xGMI, PCIe) are the rate of one device to all
the others.
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
    joins: int = 0
    """How many devices it can join; 0: all."""

    @property
    def bytes_per_s(self) -> float:
        return self.line_mbit * 1e6 / 8 * self.part

    def about(self) -> str:
        rate = f"{self.line_mbit:g} Mbit/s" if self.line_mbit < 1e5 else f"{self.line_mbit / 1000:,.0f} Gbit/s"
        return f"{self.name}: {rate} × {self.part:g} assumed, not measured"


TWENTY, EIGHTY, WIDE = (f"IEEE 802.11, two antennas, {mhz} MHz" for mhz in (20, 80, 160))
ETHERNET, INTEL, PCI = "IEEE 802.3", "Intel's Thunderbolt specification", "PCI-SIG, 16 lanes"
IBTA = "the InfiniBand roadmap, 4 lanes"
NVIDIA, GA102 = "NVIDIA's data sheet, half of the two-way rate", "NVIDIA's paper on the GA102, 4 links"
TURING, GUESS = "TechPowerUp, half of the two-way rate", "estimate: a third of an A100's"
AMD, MI200 = "AMD's data sheet, 7 links", "AMD's ROCm pages, one link"
# source, name, line rate of one direction (Mbit/s), payload part, latency (s)
_ROWS: tuple[tuple[str, str, float, float, float], ...] = (
    (TWENTY, "Wi-Fi 4", 144, 0.5, 4e-3),
    (EIGHTY, "Wi-Fi 5", 866, 0.5, 3e-3),
    (EIGHTY, "Wi-Fi 6", 1201, 0.55, 2e-3),
    (WIDE, "Wi-Fi 6E", 2402, 0.55, 2e-3),
    (WIDE, "Wi-Fi 7", 2882, 0.55, 2e-3),
    (ETHERNET, "100MbE", 100, ETHERNET_PART, 2e-4),
    (ETHERNET, "1GbE", 1_000, ETHERNET_PART, 1e-4),
    (ETHERNET, "2.5GbE", 2_500, ETHERNET_PART, 1e-4),
    (ETHERNET, "5GbE", 5_000, ETHERNET_PART, 1e-4),
    (ETHERNET, "10GbE", 10_000, ETHERNET_PART, 5e-5),
    (INTEL, "Thunderbolt 3", 40_000, 0.4, 5e-5),
    (INTEL, "Thunderbolt 4", 40_000, 0.4, 5e-5),
    (ETHERNET, "25GbE", 25_000, ETHERNET_PART, 3e-5),
    (ETHERNET, "40GbE", 40_000, ETHERNET_PART, 3e-5),
    (INTEL, "Thunderbolt 5", 80_000, 0.4, 5e-5),
    *((ETHERNET, f"{gbit}GbE", gbit * 1_000, 0.9, 1e-5) for gbit in (100, 200, 400, 800)),
    *((ETHERNET, f"{gbit}G RoCE", gbit * 1_000, 0.85, 5e-6) for gbit in (100, 200, 400, 800)),
    (IBTA, "InfiniBand EDR", 100_000, 0.9, 3e-6),
    (IBTA, "InfiniBand HDR", 200_000, 0.9, 3e-6),
    (IBTA, "InfiniBand NDR", 400_000, 0.9, 3e-6),
    (IBTA, "InfiniBand XDR", 800_000, 0.9, 3e-6),
    (PCI, "PCIe 3", 126_000, 0.75, 1e-5),
    (PCI, "PCIe 4", 252_000, 0.75, 1e-5),
    (PCI, "PCIe 5", 504_000, 0.75, 1e-5),
    (NVIDIA, "NVLink 1", 640_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 2", 1_200_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 3", 2_400_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 4", 3_600_000, 0.8, 3e-6),
    (NVIDIA, "NVLink 5", 7_200_000, 0.8, 3e-6),
    (TURING, "NVLink bridge 2080", 200_000, 0.8, 3e-6),
    (TURING, "NVLink bridge 2080 Ti", 400_000, 0.8, 3e-6),
    (GA102, "NVLink bridge", 450_000, 0.8, 3e-6),
    (GUESS, "NVLink bridge A30", 800_000, 0.8, 3e-6),
    (NVIDIA, "NVLink bridge A100", 2_400_000, 0.8, 3e-6),
    (NVIDIA, "NVLink bridge H200", 3_600_000, 0.8, 3e-6),
    (MI200, "xGMI MI250X", 400_000, 0.7, 3e-6),
    (AMD, "xGMI", 3_584_000, 0.7, 3e-6),
    (AMD, "xGMI MI355X", 4_300_800, 0.7, 3e-6),
)
_JOINS = {"NVLink bridge H200": 4}
"""Devices that a bridge joins; the others join two."""
LINKS: dict[str, LinkSheet] = {
    name: LinkSheet(
        name=name,
        line_mbit=mbit,
        part=part,
        latency_s=latency_s,
        source=source,
        joins=_JOINS.get(name, 2) if "bridge" in name else 0,
    )
    for source, name, mbit, part, latency_s in _ROWS
}
_OTHER_NAMES = {"gigabit": "1GbE", "gigabitethernet": "1GbE", "ethernet": "1GbE", "wifi": "Wi-Fi 5"}
_OTHER_NAMES |= {
    "thunderbolt": "Thunderbolt 4",
    "usb4": "Thunderbolt 4",
    "infinityfabric": "xGMI",
    "pcie": "PCIe 4",
}
_OTHER_NAMES |= {f"tb{i}": f"Thunderbolt {i}" for i in (3, 4, 5)} | {f"pcie{i}x16": f"PCIe {i}" for i in (3, 4, 5)}
_OTHER_NAMES |= {
    before + kind: f"InfiniBand {kind.upper()}" for before in ("", "ib") for kind in ("edr", "hdr", "ndr", "xdr")
}
_ETHERNET = re.compile(r"^([0-9.]+)g(?:be|ige|igabit(?:ethernet)?|base\w*)?$")
_RATE = re.compile(r"^([0-9.+-]+)([kmg]?)(?:bit(?:/s|ps)?|b(?:/s|ps)?)$")
_SEVERAL = re.compile(r"^\s*([1-9][0-9]?)\s*[x×*]\s*(\S.*)$")
_BYTES = re.compile(r"^([0-9.]+)([kKmMgG]?)B(/s|ps|PS)?$")
_KINDS = ("InfiniBand", "RoCE")


def find(name: str) -> LinkSheet:
    """The link of this name, ignoring spaces and case; or a payload rate ("300Mbit", "25GB/s"); or several
    ("8x400GbE").
    """
    if (several := _SEVERAL.match(name)) is not None:
        one, count = find(several[2]), int(several[1])
        return replace(one, name=f"{count}x {one.name}", line_mbit=count * one.line_mbit)
    close = re.sub(r"\s", "", name)
    if (short := _BYTES.match(close)) is not None:
        return _of_bytes(name, short)
    if (rate := _RATE.match(close.lower())) is not None:
        return _of_rate(name, rate[1], rate[2])
    wanted = re.sub(r"[_-]|(?<=pcie[345])\.0|(?<=roce)v2", "", close.lower())
    wanted = re.sub(r"^roce([0-9]+g)(?:be?)?$", r"\1roce", _ETHERNET.sub(r"\1gbe", wanted))
    known = {re.sub(r"[\s_-]", "", link.lower()): link for link in LINKS} | _OTHER_NAMES
    if wanted in known:
        return LINKS[known[wanted]]
    asked = "infiniband" if wanted == "ib" else wanted
    kinds = [link for link in LINKS if asked in (kind.lower() for kind in _KINDS) and asked in link.lower()]
    advice = f"did you mean one of {', '.join(kinds)}? " if kinds else did_you_mean(wanted, known, known)
    raise ConfigError(
        f"there is no link {name!r} in the catalogue",
        hint=f"{advice}all: potluck plan --catalogue; or a rate: 300Mbit",
    )


def _of_rate(name: str, number: str, prefix: str) -> LinkSheet:
    try:
        mbit = float(number) * {"k": 1e-3, "": 1e-6, "m": 1.0, "g": 1e3}[prefix]
    except ValueError:
        mbit = math.nan
    if not LEAST_MBIT <= mbit <= MOST_MBIT:
        raise ConfigError(
            f"{name!r} is not a link or a rate", hint="rates are 1kbit to 10000Gbit, for example 300Mbit"
        )
    return of_mbit(mbit)


def _of_bytes(name: str, short: re.Match[str]) -> LinkSheet:
    """25GB/s is in bytes; shops write MB/s and MBPS for bits, too."""
    unit = {"k": "k", "m": "M", "g": "G", "": ""}[short[2].lower()] + "bit"
    try:
        bits = 8 * float(short[1])
    except ValueError:
        bits = math.nan
    if short[2] == "G" and short[3] in ("/s", "ps"):
        return _of_rate(name, f"{bits}", "g")
    meant = f"{short[1]}{unit}" if short[3] == "PS" else f"{bits:g}{unit}"
    raise ConfigError(f"there is no link {name!r}", hint=f"did you mean {meant if bits == bits else '300Mbit'}?")


def of_mbit(mbit: float) -> LinkSheet:
    """A link whose payload rate is known."""
    name = f"{mbit:g} Mbit/s" if mbit < 1e5 else f"{mbit / 1000:g} Gbit/s"
    return LinkSheet(name=name, line_mbit=mbit, part=1.0, latency_s=1e-4)


def faster(bytes_per_s: float) -> LinkSheet | None:
    """The next faster link to buy: the slowest wired one at least twice as fast."""
    ladder = [LINKS[name] for name in ("1GbE", "2.5GbE", "10GbE", "25GbE", "100GbE", "400G RoCE")]
    return next((link for link in ladder if link.bytes_per_s > 1.9 * bytes_per_s), None)

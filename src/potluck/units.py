"""Quantities as short text for people: bytes, seconds, rates, counts.

Every function shows None (not measured) and not-a-number as a dash. The texts are short, for table columns.
"""

from __future__ import annotations

import math

UNKNOWN = "–"

_BYTE_UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
_COUNT_UNITS = ("", "k", "M", "G", "T", "P")
_BIT_UNITS = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")


def bytes_text(count: float | None) -> str:
    """1234567 -> '1.2 MB' (decimal units, as network and disk makers count)."""
    return _scaled(count, _BYTE_UNITS)


def count_text(count: float | None) -> str:
    """10_900_000 -> '10.9 M'."""
    return _scaled(count, _COUNT_UNITS)


def rate_text(per_s: float | None, of: str = "") -> str:
    """12345 -> '12.3 k/s'; with `of`: '12.3 k tokens/s'."""
    if not _known(per_s):
        return UNKNOWN
    assert per_s is not None
    number = _three_digits(per_s) if abs(per_s) < 99.95 else _scaled(per_s, _COUNT_UNITS)
    return f"{number} {of}/s" if of else f"{number}{'' if ' ' in number else ' '}/s"


def bits_text(bytes_per_s: float | None) -> str:
    """7_500_000 -> '60 Mbit/s': links are sold in bits, so text shows bits."""
    return _scaled(None if bytes_per_s is None else bytes_per_s * 8, _BIT_UNITS)


def seconds_text(seconds: float | None) -> str:
    """0.34 -> '340 ms', 2.5 -> '2.50 s', 123 -> '2 min 03 s', 11_100 -> '3 h 05 min'."""
    if not _known(seconds):
        return UNKNOWN
    assert seconds is not None
    sign, s = ("-", -seconds) if seconds < 0 else ("", seconds)
    # Each limit is where rounding would carry into the next unit ('1000 ms', '60.0 s').
    if s < 0.0009995:
        return f"{sign}{s * 1e6:.0f} µs" if s else "0 s"
    if s < 0.9995:
        return f"{sign}{s * 1e3:.0f} ms" if s >= 0.00995 else f"{sign}{s * 1e3:.1f} ms"
    if s < 9.995:
        return f"{sign}{s:.2f} s"
    if s < 59.95:
        return f"{sign}{s:.1f} s"
    if round(s) < 3600:
        return sign + _two_units(round(s), 60, "min", "s")
    if round(s / 60) < 24 * 60:
        return sign + _two_units(round(s / 60), 60, "h", "min")
    return sign + _two_units(round(s / 3600), 24, "d", "h")


def percent_text(fraction: float | None) -> str:
    """0.253 -> '25 %'."""
    return f"{fraction * 100:.0f} %" if fraction is not None and math.isfinite(fraction) else UNKNOWN


def factor_text(factor: float | None) -> str:
    """1.163 -> '1.16×'."""
    if not _known(factor):
        return UNKNOWN
    assert factor is not None
    return f"{_three_digits(factor)}×"


def _two_units(count: int, per_big: int, big: str, small: str) -> str:
    return f"{count // per_big} {big} {count % per_big:02d} {small}"


def _known(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _three_digits(value: float) -> str:
    size = abs(value)
    if size < 9.995:
        return f"{value:.2f}"
    if size < 99.95:
        return f"{value:.1f}"
    return f"{value:.0f}"


def _scaled(value: float | None, units: tuple[str, ...]) -> str:
    if not _known(value):
        return UNKNOWN
    assert value is not None
    scaled, index = float(value), 0
    # 999.95 would be rounded to '1000.0', four digits of the wrong unit.
    while abs(scaled) >= (999.95 if index else 999.5) and index < len(units) - 1:
        scaled /= 1000
        index += 1
    whole = index == 0 or abs(scaled) >= 99.95 or scaled == int(scaled)
    return f"{scaled:.0f} {units[index]}".rstrip() if whole else f"{scaled:.1f} {units[index]}"


def printable(value: object, limit: int) -> str:
    """Another machine's text as one line without control characters, cut to a maximum length."""
    text = str(value)[: limit + 1]
    if not text.isprintable():
        text = "".join(c if c.isprintable() else " " for c in text)
    text = text.strip()
    return text if len(text) <= limit else text[: limit - 1] + "…"

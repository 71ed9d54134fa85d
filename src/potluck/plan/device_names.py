"""Finds a device of the catalogue by its name as people and systems write it: "NVIDIA GeForce RTX 4070 Laptop GPU",
"4070ti", "A100-PCIE-40GB", "MacBook Air 13 M3".
"""

from __future__ import annotations

import re
from functools import cache

from msgspec import Struct
from msgspec.structs import replace

from potluck.checked import did_you_mean
from potluck.errors import ConfigError
from potluck.plan.devices import ESTIMATE, NO_NEURAL_ENGINE, DeviceSheet, catalogue, entries, peak

AVX2_CYCLE = 32
"""FLOP a cycle of a core with two units of 256 bits. Assumed of a processor that is not in the catalogue."""
_LIKE_SERVER, _LIKE_DESKTOP = "EPYC 7763", "Ryzen 7 5800X"
"""Whose memory, bandwidth and watts such a processor gets."""
_MOST_SHOWN = 6


def find(name: str) -> DeviceSheet:
    """The device of this name. Memory in the name ("A100 40GB", "M3 Max 64GB") is that device's.

    A processor that is not in the catalogue is estimated from its cores and clock, if the name has them.
    """
    if _NPU.search(name.lower()):
        raise _no_npu(name)
    asked = _parsed(name)
    sheet = _known(asked)
    if sheet is not None:
        return replace(sheet, memory_gb=asked.memory) if asked.memory else sheet
    processor = _of_cores(name)
    if processor is None:
        raise _unknown(name, asked)
    return processor


def find_or_none(name: str) -> DeviceSheet | None:
    try:
        return find(name)
    except ConfigError:
        return None


def caution(name: str) -> str:
    """Why the named device is not as fast as its figure says; empty if nothing is known."""
    sheet, asked = find(name), _parsed(name)
    texts = [sheet.note] if sheet.note else []
    if sheet.maker == "Apple" and re.search(r"(?:\b|\d)air\b", name.lower()):
        texts.append("a MacBook Air has no fan, so expect less than this after some minutes")
    if asked.laptop and not _parsed(sheet.name).laptop:
        texts.append("counted as the desktop's card; a laptop's has fewer units, less power and often less memory")
    if 0 < asked.cores < sheet.gpu_cores:
        texts.append(f"counted as the chip with all {sheet.gpu_cores} GPU cores")
    return f"{name}: {'; '.join(texts)}" if texts else ""


def counted(name: str) -> tuple[int, str]:
    """8xMI300X, 8 MI300X, MI300X x8: (8, MI300X)."""
    found = _COUNT_FIRST.match(name)
    if found:
        return int(found[1] or found[2]), found[3]
    found = _COUNT_LAST.match(name)
    return (int(found[2] or found[4]), found[1] or found[3]) if found else (1, name)


_COUNT_FIRST = re.compile(
    r"^\s*(?:([1-9]\d{0,2})\s*[x×*]\s*|([1-9]\d?)\s+(?!g(?:i?b)?\b|cores?\b)(?=[a-z]))(\S.*)$", re.IGNORECASE
)
_COUNT_LAST = re.compile(
    r"^\s*(\S.*?)\s+[x×*]\s*([1-9]\d{0,2})\s*$|^\s*(.*\d[a-z]?)[x×*]([1-9]\d{0,2})\s*$", re.IGNORECASE
)

# -- what a name says -----------------------------------------------------------------------------------


class _NameParts(Struct, frozen=True, kw_only=True):
    """What the name of a device says."""

    words: frozenset[str]
    """Without the maker and the computer."""
    series: str
    """What people leave out before the number: rtx, ryzen7."""
    number: str
    """The rest: 4070tisuper, m3max, 13900k."""
    pcie: bool
    laptop: bool
    memory: float
    """GB; 0 if the name does not say it."""
    cores: int
    """Cores of an Apple GPU; 0 if the name does not say it."""


@cache
def _parsed(name: str) -> _NameParts:
    text = re.split(r"@| w/ | with ", re.sub(r"[®™]|\((?:r|tm)\)", " ", name.lower()))[0]
    memory = _MEMORY.search(text)
    cores = re.search(r"(\d{1,3})[- ]core gpu", text) or re.search(r"(\d{1,3})[- ]core\b(?! cpu)", text)
    plain = re.sub(_DROPPED, " ", _MEMORY.sub(" ", text))
    if re.search(_COMPUTERS, plain):
        plain = re.sub(_SIZES, " ", re.sub(_COMPUTERS, " ", plain))
    model = re.sub(r"[^a-z0-9]", "", plain)
    for spelling, usual in _SPELLINGS:
        model = re.sub(spelling, usual, model)
    series = _SERIES.match(model)
    return _NameParts(
        words=frozenset(re.findall(r"[a-z]+|\d+", plain)),
        series=series[0] if series else "",
        number=model[series.end() :] if series else model,
        pcie=re.search(r"\bpcie\b", text) is not None,
        laptop=re.search(_LAPTOP, text) is not None,
        memory=float(memory[1]) if memory else 0.0,
        cores=int(cores[1]) if cores else 0,
    )


_MEMORY = re.compile(r"(?<!gh200 )\b(\d{1,4}) ?g(?:i?b)?\b")  # the 480GB of a GH200 are its processor's
_LAPTOP = r"\b(?:laptop|mobile|notebook|max-?q)\b"
_DROPPED = (
    rf"{_LAPTOP}|\bpcie\b|nvidia|geforce|tesla|quadro|amd|radeon|instinct|intel|apple|blackwell|graphics|processor"
    r"|generation|desktop|developer kit|(?:workstation|server|founders) edition|model b|\brev [\d.]+|\d+th gen"
    r"|\b\d+[- ]cores?\b|\b[\d.]+ ?ghz\b|\b(?:core|cpu|gpu|sxm\d?|hbm\d?e?|oam|vf|nvl\d+|480gb)\b|\b\d\d-inch\b"
)
_COMPUTERS = r"mac ?book ?(?:pro|air)?|mac ?(?:mini|studio|pro)|imac|(?:\b|(?<=\d))(?:air|mini|studio)\b"
_SIZES = r"\b(?:1[3-6]|2[147])(?:[\"”″]|[- ]?inch)?(?![\w.])|\b20[12]\d\b"
_SPELLINGS = (
    (r"^r(?=[3579]\d{4})", "ryzen"),
    (r"^(?:rpi|raspi|pi)(?=\d)", "raspberrypi"),
    (r"^gtx", "rtx"),
    (r"^((?:rtx)?\d{4}(?:ti)?)s$", r"\1super"),
    (r"^((?:i[3579])?\d{4,5})f$", r"\1"),
    (r"^((?:i[3579])?\d{4,5}k)[fs]$", r"\1"),
)
_SERIES = re.compile(r"rtx|rx|arc|i[3579](?=\d{4})|ryzen[3579](?=\d{4})|ryzen(?=\d{4})|ultra[3579](?=\d{3})|jetson")
_SXM = re.compile(r"NVLink \d")

# -- which device that is -------------------------------------------------------------------------------


@cache
def _names() -> tuple[tuple[_NameParts, DeviceSheet], ...]:
    """Every name of the catalogue."""
    sheets = catalogue()
    return tuple((_parsed(name), sheets[row.name]) for row in entries() for name in (row.name, *row.also))


def _known(asked: _NameParts) -> DeviceSheet | None:
    """The device as it is written; else the desktop's card for a laptop's, or the usual one for one on PCIe."""
    alike = [
        (said, sheet)
        for said, sheet in _names()
        if said.number == asked.number and said.series.startswith(asked.series)
    ]
    kinds = [(asked.pcie, asked.laptop)]
    kinds += [(asked.pcie, False)] if asked.laptop else []
    kinds += [(False, asked.laptop)] if asked.pcie else []
    for kind in kinds:
        found = [(said, sheet) for said, sheet in alike if (said.pcie, said.laptop) == kind]
        if asked.pcie and not kind[0]:
            found = [(said, sheet) for said, sheet in found if not _SXM.match(sheet.fabric)]
        if found:
            return max(found, key=lambda one: _nearness(asked, *one))[1]
    return None


def _nearness(asked: _NameParts, said: _NameParts, sheet: DeviceSheet) -> tuple[bool, bool, bool]:
    """The same GPU cores, then the same memory, then the one whose name says neither."""
    return (
        asked.cores > 0 and asked.cores == sheet.gpu_cores,
        asked.memory > 0 and asked.memory == said.memory,
        not said.memory and not said.cores,
    )


def _of_cores(name: str) -> DeviceSheet | None:
    """Xeon Gold 6248 (20 cores, 2.5 GHz)."""
    text = name.lower()
    cores, ghz = re.search(r"\b(\d{1,3})[- ]cores?\b", text), re.search(r"\b(\d{1,2}(?:\.\d+)?) ?ghz\b", text)
    if not cores or not ghz or "gpu" in text or not int(cores[1]) or not float(ghz[1]):
        return None
    like = catalogue()[_LIKE_SERVER if _SERVER.search(text) else _LIKE_DESKTOP]
    fp32, how = peak(((int(cores[1]), AVX2_CYCLE, float(ghz[1])),), ESTIMATE)
    return replace(
        like,
        name=name.strip(),
        fp32_tflops=fp32,
        fp32_how=how,
        peaks_from=ESTIMATE,
        memory_from=ESTIMATE,
        watts_from=ESTIMATE,
    )


_SERVER = re.compile(r"epyc|xeon|threadripper")
_PROCESSOR = re.compile(r"epyc|xeon|threadripper|ryzen|\bcore\b|\bcpu\b|processor|pentium|celeron|\bi[3579]\b")

# -- names that are not there ---------------------------------------------------------------------------


def _unknown(name: str, asked: _NameParts) -> ConfigError:
    if not asked.words:
        return ConfigError(f"{name!r} names no chip", hint="for example M2, M4 Max, or RTX 4070")
    advice = _advice(name, asked)
    if _PROCESSOR.search(name.lower()):
        advice += 'a processor may have its cores and clock: "EPYC 7543 (32 cores, 2.8 GHz)"; '
    return ConfigError(
        f"there is no device {name!r} in the catalogue",
        hint=f"{advice}all: potluck plan --catalogue; or a speed: 20TFLOPS, 0.6s/sample",
    )


def _advice(name: str, asked: _NameParts) -> str:
    """The devices of the family that the name says, or the most similar one of it."""
    makers = [maker for maker, words in _MAKERS.items() if re.search(words, name.lower())]
    names = [(said, sheet.name) for said, sheet in _names() if not makers or sheet.maker in makers]
    family = list(dict.fromkeys(shown for said, shown in names if asked.words <= said.words))
    if len(family) > 1:
        return f"did you mean one of {', '.join(family[:_MOST_SHOWN])}? "
    wanted = asked.series + asked.number
    # Of one number, the first in the catalogue: the desktop's card, not the laptop's.
    near: dict[str, str] = {}
    for said, shown in names:
        for part in (said.number, said.series + said.number):
            if _letters(part) == _letters(wanted):
                near.setdefault(part, shown)
    return did_you_mean(wanted, near, near)


def _letters(word: str) -> str:
    """What a word begins with: the rtx of rtx4070, the m of m2."""
    return re.match("[a-z]*", word)[0]  # type: ignore[index]


_MAKERS = {
    "NVIDIA": r"nvidia|geforce|tesla|quadro|\b[rg]tx\b",
    "AMD": r"\bamd\b|radeon|instinct|ryzen|\brx\b|epyc|threadripper",
    "Intel": r"intel|\bcore\b|\barc\b|xeon",
    "Apple": r"apple|mac",
}


def _no_npu(name: str) -> ConfigError:
    if re.search(
        r"amd|ryzen|intel|\bcore\b(?! ?ml)|qualcomm|snapdragon|hexagon|huawei|ascend|rockchip", name.lower()
    ):
        return ConfigError(
            "Potluck trains on processors and GPUs, not on an NPU", hint="name the processor, or the GPU beside it"
        )
    return ConfigError(NO_NEURAL_ENGINE, hint="name the chip: its GPU trains (M2, M4 Max)")


_NPU = re.compile(r"neural[ _-]?engine|\bane\b|core[ _-]?ml|\bnpu\b")

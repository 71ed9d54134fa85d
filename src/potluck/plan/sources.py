"""Where the figures of the catalogue of devices were read: pages by device, for peaks and for watts. PURE data.

Peak, memory and bandwidth are one entry. A device without an entry has figures from memory, which are shown as
estimates. Most pages quote the maker.
"""

from __future__ import annotations

from urllib.parse import urlsplit

_ADA = "https://www.club386.com/complete-geforce-rtx-4070-specifications-reveal-a-frugal-599-gpu/"
_ADA_SUPER = "https://www.topcpu.net/vi/gpu-c/geforce-rtx-4070-ti-super-vs-geforce-rtx-2060-tu104"
_AMPERE = "https://fudzilla.net/news/graphics/51457-nvidia-rtx-30-series-specifications-are-now-official"
_BLACKWELL = (
    "https://www.tweaktown.com/news/102469/"
    "nvidia-geforce-rtx-50-series-specs-pricing-and-performance-plan-that-upgrade-today/index.html"
)
_T4 = "https://sysrqmts.com/gpus/compare/nvidia-a100-sxm4-40-gb-vs-nvidia-tesla-t4"
_L4 = "https://fpsbench.com/compare/gpu/nvidia-l4-vs-nvidia-tesla-m40"
_L40S = "https://grokipedia.com/page/NVIDIA_L4_vs_L40S"
_NVIDIA = "https://glennklockwood.com/garden/processors/"
_H200 = "https://itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html"
_PEAKS = "https://github.com/karpathy/nanochat/blob/92d63d4/nanochat/common.py"
_MI300X = "https://raw.githubusercontent.com/mlcommons/inference_results_v4.1/main/closed/AMD/systems/8xMI300X_2xEPYC-9374F.json"
_M1 = "https://hmc-tech.com/gpu/apple-30-core-m2-max-vs-apple-8-core-m1"
_M2 = "https://hmc-tech.com/gpu/apple-10-core-m2-vs-apple-48-core-m1-ultra"
_M3 = "https://hmc-tech.com/gpu/apple-10-core-m3-fl-vs-apple-8-core-m4-fl"
_STUDIO = "https://support.apple.com/102027"
_MINI_M1 = "https://daringfireball.net/2021/01/mac_mini_power_consumption"
_MINI_M2 = (
    "https://www.macgadget.de/News/2023/01/27/Mac-mini-mit-M2-und-M2-Pro-Apple-informiert-ueber-Stromverbrauch-und"
)
_MINI_M4 = "https://www.servethehome.com/the-apple-mac-mini-m4-sets-the-mini-computer-standard/3/"
_INTEL = "https://hardwaretheory.it/intel-raptor-lake-di-13a-generazione-specifiche-e-uscita/"
_RYZEN = "https://www.theregister.com/2022/09/27/intel_13thgen_cpu_innovation/"

PEAKS: dict[str, str] = {
    **dict.fromkeys(("RTX 4070", "RTX 4070 Ti", "RTX 4080", "RTX 4090"), _ADA),
    "RTX 4070 Ti Super": _ADA_SUPER,
    **dict.fromkeys(("RTX 3080", "RTX 3090"), _AMPERE),
    **dict.fromkeys(("RTX 5070", "RTX 5070 Ti", "RTX 5080", "RTX 5090"), _BLACKWELL),
    "T4": _T4,
    "A100": f"{_NVIDIA}A100",
    "H100": f"{_NVIDIA}h100",
    "H200": _H200,
    "B200": f"{_NVIDIA}B200",
    **dict.fromkeys(("L4", "L40S", "MI300X", "MI325X"), _PEAKS),
    "M1": _M1,
    "M2": _M2,
    "M3": _M3,
}
WATTS: dict[str, str] = {
    **{name: page for name, page in PEAKS.items() if page not in (_PEAKS, _BLACKWELL, _M1, _M2, _M3)},
    "L4": _L4,
    "L40S": _L40S,
    "MI300X": _MI300X,
    **dict.fromkeys(("M1 Max", "M1 Ultra", "M2 Max", "M2 Ultra"), _STUDIO),
    "M1": _MINI_M1,
    **dict.fromkeys(("M2", "M2 Pro"), _MINI_M2),
    "M4": _MINI_M4,
    **dict.fromkeys(("i9-13900K", "i7-13700K", "i5-13600K"), _INTEL),
    "Ryzen 9 7950X": _RYZEN,
}


def site(page: str) -> str:
    """The site of a page, for a line that has no room for its address."""
    return (urlsplit(page).hostname or "").removeprefix("www.")

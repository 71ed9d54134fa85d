"""The tables of fleets: every built-in rig, every strategy, each measured on an emulated fleet on this box.

    .venv/bin/python bench/rigs.py [--rigs home-pair,twins] [--out bench/results] [--steps N] [--write]

Linux, with user namespaces or root. About 45 minutes for all. Writes each rig's figures, logs and plots under
--out, prints one table with the bars that potluck must reach, and ends with status 1 where one is missed. --write
puts it into docs/performance.md and a short one into README.md; --only-table uses the figures of an earlier run.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from potluck.lab import rigs

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- bench/rigs.py: begin -->", "<!-- bench/rigs.py: end -->"
BARS: dict[str, tuple[str, float]] = {
    "home-pair": ("efficiency", 0.97),
    "desk-and-mac": ("speedup", 1.105),
    "i9-i5": ("efficiency", 0.96),
    "twins": ("efficiency", 0.95),
    "three-friends": ("efficiency", 0.93),
    "wifi": ("speedup", 1.30),
    "thin-twins": ("speedup", 1.40),
    "internet": ("speedup", 1.15),
    "moody": ("efficiency", 0.90),
    "hopeless": ("speedup", 0.99),
    "photos": ("efficiency", 0.90),
    "thumbnails": ("efficiency", 0.93),
}
LARGE, SMALL, LEAST_RATIO = "photos", "thumbnails", 0.95
"""The same fleet with large and with small samples, and the least ratio of the two efficiencies."""
WORDS = {"efficiency": "efficiency", "speedup": "speed-up"}
STRATEGIES = ("ddp", "ddp-balanced", "potluck")
TOO_LONG = {("hopeless", "ddp")}
"""Half of the samples on a guest 50 times slower: two and a half minutes a step tell nobody anything."""
OWN_DATA = {LARGE, SMALL}
"""Rigs about the way of the samples: DDP's ranks read their own copy."""


LOOPBACK = {"internet"}
"""On the loopback proxy: not every kernel can delay. DDP is not measured there."""


def bench(rig: str, folder: Path, steps: int | None) -> None:
    if (folder / "results.json").exists():
        shutil.rmtree(folder)  # of an earlier run
    own = rig not in OWN_DATA and rig not in LOOPBACK
    chosen = [s for s in STRATEGIES if (rig, s) not in TOO_LONG and (own or s == "potluck")]
    command = [sys.executable, "-m", "potluck", "lab", "bench", rig, "--out", str(folder)]
    command += [word for strategy in chosen for word in ("--strategy", strategy)]
    command += ["--loopback"] if rig in LOOPBACK else []
    command += ["--steps", str(steps)] if steps else []
    subprocess.run(command, check=True)


def row_of(results: dict[str, Any], strategy: str) -> dict[str, Any]:
    return next((row for row in results["rows"] if row["strategy"] == strategy), {})


def passed(rig: str, results: dict[str, Any]) -> bool:
    name, bar = BARS[rig]
    value = row_of(results, "potluck").get(name)
    # To the digits that the bar is given in: 0.9696 is not 0.97.
    return value is not None and value >= bar


def ratio_of_samples(found: dict[str, dict[str, Any]]) -> float | None:
    """The efficiency with large samples ÷ the one with small samples."""
    large, small = (row_of(found.get(rig, {"rows": []}), "potluck").get("efficiency") for rig in (LARGE, SMALL))
    return large / small if large and small else None


def number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def table(found: dict[str, dict[str, Any]]) -> str:
    """The table in Markdown, one line a rig."""
    lines = [
        "| rig | host alone | DDP | DDP, balanced by hand | **potluck** | ideal | efficiency | recovery | bar |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for rig, results in found.items():
        row = row_of(results, "potluck")
        name, bar = BARS[rig]
        cells = [
            rig,
            f"{number(row_of(results, 'solo').get('step_s'), 2)} s",
            *(f"{number(row_of(results, s).get('speedup'), 2) or '—'}" for s in ("ddp", "ddp-balanced")),
            f"**{number(row.get('speedup'), 3)}**",
            number(results["ideal_speedup"], 3),
            f"**{number(row.get('efficiency'), 3)}**",
            number(row.get("recovery"), 2),
            f"{WORDS[name]} ≥ {bar:g}{'' if passed(rig, results) else ' (missed)'}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


ONLY_IN_DOCS = ("thin-twins", "photos", "thumbnails")
"""Rigs that show one part of Potluck. The README has those that people own."""


def short_table(found: dict[str, dict[str, Any]]) -> str:
    """For the README: what each rig is, and the speed-ups."""
    lines = ["| fleet | DDP | DDP, balanced by hand | **Potluck** | ideal |", "|---|---|---|---|---|"]
    for rig, results in found.items():
        if rig in ONLY_IN_DOCS:
            continue
        ddp = [number(row_of(results, s).get("speedup"), 2) or "—" for s in ("ddp", "ddp-balanced")]
        own = f"**{number(row_of(results, 'potluck').get('speedup'), 2)}**"
        cells = [f"*{rig}*: {rigs.load(rig).about}", *ddp, own, number(results["ideal_speedup"], 2)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write(found: dict[str, dict[str, Any]]) -> None:
    for path, text in ((ROOT / "README.md", short_table(found)), (ROOT / "docs" / "performance.md", table(found))):
        old = path.read_text(encoding="utf-8")
        if BEGIN in old and END in old:
            before, rest = old.split(BEGIN, 1)
            path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
            print(f"written into {path.relative_to(ROOT)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rigs", default=",".join(rigs.NAMES))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only-table", action="store_true")
    options = parser.parse_args()
    names = options.rigs.split(",")
    for name in names:
        if name not in BARS:
            parser.error(f"no rig {name!r}; there are {', '.join(BARS)}")
    if not options.only_table:
        for name in names:
            print(f"\n== {name}", flush=True)
            bench(name, options.out / name, options.steps)
    found = {}
    for name in rigs.NAMES:
        file = options.out / name / "results.json"
        if file.exists():
            found[name] = json.loads(file.read_text())
    text = table(found)
    print(f"\nSpeed-ups are against the host alone on the same rig.\n\n{text}")
    ratio = ratio_of_samples(found)
    if ratio is not None:
        print(f"\n{LARGE} ÷ {SMALL}: {ratio:.3f} (bar ≥ {LEAST_RATIO})")
    if options.write:
        write(found)
    missed = [name for name in names if name not in found or not passed(name, found[name])]
    if ratio is not None and ratio < LEAST_RATIO and OWN_DATA & set(names):
        missed.append(f"{LARGE} ÷ {SMALL}")
    if missed:
        print(f"missed: {', '.join(missed)}", file=sys.stderr)
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()

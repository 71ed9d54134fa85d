"""What `potluck plan` predicts against what the lab measures: every built-in rig and four that no figure was
fitted to.

    .venv/bin/python bench/plan_accuracy.py [--rigs home-pair,twins] [--steps 12] [--out bench/plan] [--write]
    .venv/bin/python bench/plan_accuracy.py --from bench/results      from figures that are there

Linux, with user namespaces or root. About 50 minutes for all (12 rigs × 3 strategies); nothing else may run
meanwhile. The predictions come from the rig's description alone, never from a measurement. Prints every pair, the
median and the largest error of a step's time, and ends with status 1 where the median is above 8 % or one is
above 20 %. --write puts the table into docs/performance.md."""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from potluck.errors import PotluckError
from potluck.lab import rigs
from potluck.plan.rigs import step_times
from potluck.spec.rig import Machine, Rig, Workload, parse

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.rigs import to_toml  # noqa: E402

BEGIN, END = "<!-- bench/plan_accuracy.py: begin -->", "<!-- bench/plan_accuracy.py: end -->"
STRATEGIES = ("ddp", "ddp-balanced", "potluck")
MEDIAN_BAR, MOST_BAR = 0.08, 0.20
LEAST_PAIRS = 12
BUSY = 0.05
TOO_LONG = {
    ("hopeless", "ddp"),
    ("hopeless", "ddp-balanced"),
    ("three-friends", "ddp"),
    ("internet", "ddp"),
    ("internet", "ddp-balanced"),
}
"""Minutes a step, which tell nobody anything; and internet is on the loopback proxy, where DDP does not run."""


def fresh(name: str, workload: Workload, *machines: Machine) -> Rig:
    host = Machine(name="desk", role="host", seconds_per_sample=machines[0].seconds_per_sample, link_mbit=None)
    return Rig(name=name, workload=workload, machines=(host, *machines[1:]))


def guest(name: str, seconds: float, mbit: float | None = None) -> Machine:
    return Machine(name=name, seconds_per_sample=seconds, link_mbit=mbit)


def sized(batch: int, codec: str = "int4", depth: int = 4) -> Workload:
    return Workload(depth=depth, sequence=32, global_batch=batch, steps=12, codec=codec)


HOST = guest("host", 0.08)
FRESH = {
    rig.name: rig
    for rig in (
        fresh("fp32-pair", sized(60, "none"), HOST, guest("laptop", 0.16, 120)),
        fresh("int8-thin", sized(72, "int8"), HOST, guest("laptop", 0.24, 18)),
        fresh("two-links", sized(66), HOST, guest("near", 0.2, 200), guest("far", 0.12, 12)),
        fresh("small-model", sized(80, depth=3), HOST, guest("laptop", 0.1, 25)),
    )
}
"""Made up after the model, with other codecs, links, sizes and speeds than the built-in ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """One strategy on one rig."""

    rig: str
    strategy: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def measure(name: str, folder: Path, steps: int | None) -> None:
    if (folder / "results.json").exists():
        shutil.rmtree(folder)  # of an earlier run
    chosen = [s for s in STRATEGIES if (name, s) not in TOO_LONG]
    with tempfile.TemporaryDirectory() as spare:
        what = name
        if name in FRESH:
            file = Path(spare) / f"{name}.toml"
            file.write_text(to_toml(FRESH[name]), encoding="utf-8")
            what = str(file)
        command = [sys.executable, "-m", "potluck", "lab", "bench", what, "--out", str(folder), "--no-plots"]
        command += [word for strategy in chosen for word in ("--strategy", strategy)]
        command += ["--loopback"] if name == "internet" else []
        command += ["--steps", str(steps)] if steps else []
        subprocess.run(command, check=False)  # a strategy that failed has no row to compare


def pairs_of(results: dict[str, Any]) -> list[Pair]:
    """The pairs of one rig's figures; the host alone is no prediction worth the name and left out."""
    rig = parse(results["rig"])
    found = []
    for row in results["rows"]:
        name, measured_s = row["strategy"], row["step_s"]
        if name not in STRATEGIES or not measured_s:
            continue
        try:
            predicted_s = step_times(rig, [name], results["warm_up_steps"])[name]
        except PotluckError as error:
            print(f"{rig.name}, {name}: no prediction: {error}", file=sys.stderr)
            continue
        found.append(Pair(rig=rig.name, strategy=name, predicted_s=predicted_s, measured_s=measured_s))
    return found


def read(folder: Path) -> list[Pair]:
    files = sorted(folder.glob("*/results.json")) or sorted(folder.glob("results.json"))
    if not files:
        sys.exit(f"no results.json in {folder} or one folder below")
    found = []
    for file in files:
        results = json.loads(file.read_text(encoding="utf-8"))
        found += pairs_of(results)
        warn_of_a_busy_box(results)
    return found


def warn_of_a_busy_box(results: dict[str, Any]) -> None:
    """A host alone that cannot keep its pace was disturbed; then the other figures say little about the model."""
    rig = parse(results["rig"])
    alone_s = next((row["step_s"] for row in results["rows"] if row["strategy"] == "solo"), None)
    if alone_s and (off := alone_s / step_times(rig, ["solo"])["solo"] - 1) > BUSY:
        print(f"{rig.name}: the host alone took {off:.0%} longer than its pace: was the box busy?", file=sys.stderr)


def table(pairs: list[Pair]) -> str:
    lines = ["| rig | strategy | predicted | measured | error |", "|---|---|---:|---:|---:|"]
    for pair in pairs:
        cells = (
            pair.rig,
            pair.strategy,
            f"{pair.predicted_s:.2f} s",
            f"{pair.measured_s:.2f} s",
            f"{pair.error:+.1%}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    sizes = [abs(pair.error) for pair in pairs]
    worst = max(pairs, key=lambda pair: abs(pair.error))
    words = f"{len(pairs)} pairs: the median error is {median(sizes):.1%}, the largest {max(sizes):.1%}"
    return "\n".join([*lines, "", f"{words} ({worst.strategy} on {worst.rig})."])


def write(text: str) -> None:
    path = ROOT / "docs" / "performance.md"
    old = path.read_text(encoding="utf-8")
    if BEGIN not in old or END not in old:
        sys.exit(f"{path} has no place for the table")
    before, rest = old.split(BEGIN, 1)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")
    print(f"written into {path.relative_to(ROOT)}")


def main() -> None:
    known = [*rigs.NAMES, *FRESH]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rigs", default=",".join(known))
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "plan")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--from", dest="source", type=Path, metavar="DIR")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.source is None:
        names = options.rigs.split(",")
        for name in names:
            if name not in known:
                parser.error(f"no rig {name!r}; there are {', '.join(known)}")
        for name in names:
            print(f"\n== {name}", flush=True)
            measure(name, options.out / name, options.steps)
    pairs = read(options.source or options.out)
    if not pairs:
        sys.exit("nothing was measured")
    text = table(pairs)
    print(f"\n{text}")
    if options.write:
        write(text)
    sizes = [abs(pair.error) for pair in pairs]
    if len(pairs) < LEAST_PAIRS:
        print(f"only {len(pairs)} pairs: {LEAST_PAIRS} are needed for the bars", file=sys.stderr)
    sys.exit(len(pairs) < LEAST_PAIRS or median(sizes) > MEDIAN_BAR or max(sizes) > MOST_BAR)


if __name__ == "__main__":
    main()

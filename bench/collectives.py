"""What the docs claim of the torch.distributed backend's speed, measured beside gloo; 1 when a bar is missed.

    python bench/collectives.py [--quick] [--skip-lab] [--skip-local] [--only PART] [--json FILE]

Same machine, 2 and 4 processes: all-reduce of 64 MiB at 2.5 times gloo's bus bandwidth or more, of 1 MiB at 2
times, 4 KiB no later than gloo's. Two lab machines (needs root or user namespaces), 1 Gbit/s: 0.97 of what a bare
TCP connection carries (iperf3, where it is installed) from 16 MiB on, and with int8 3.5 times gloo's rate, both
encrypted; on an unshaped link, which is as fast as memory, 1.2 times gloo's if unencrypted, as gloo is; what it is
encrypted is shown. Owns the bars; the measurement is `potluck bench collectives`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from potluck.lab.namespaces import NamespaceBox
from potluck.lab.ranks import pair, potluck_command, run_on_pair

KB, MB = 1 << 10, 1 << 20
LIMIT_S = 900.0
WAYS: dict[str, dict[str, str]] = {"encrypted": {}, "in the clear as gloo is": {"POTLUCK_DIST_ENCRYPTION": "0"}}


@dataclass(frozen=True)
class Bar:
    """One promise: what was measured, and what it must be at the least; None: it is only shown."""

    what: str
    measured: float
    least: float | None

    @property
    def kept(self) -> bool:
        return self.least is None or self.measured >= self.least

    def __str__(self) -> str:
        if self.least is None:
            return f"shown  {self.what}: {self.measured:.2f}"
        return f"{'kept  ' if self.kept else 'MISSED'} {self.what}: {self.measured:.2f} (bar {self.least:g})"


def on_this_machine(processes: int, sizes: str, repeats: int | None, folder: Path) -> list[dict[str, Any]]:
    out = folder / f"local-{processes}.json"
    command = potluck_command("bench", "collectives", "--against", "gloo", "--processes", str(processes))
    command += ["--sizes", sizes, "--json", str(out)] + (["--repeats", str(repeats)] if repeats else [])
    subprocess.run(command, check=True, timeout=LIMIT_S)
    return list(json.loads(out.read_text()))


def in_the_lab(mbit: float | None, sizes: str, repeats: int, folder: Path, **env: str) -> list[dict[str, Any]]:
    """Two machines; `env` is for both ranks. Whoever sets a compression does not expect exact sums."""
    tolerance = "0.05" if "POTLUCK_DIST_COMPRESSION" in env else "0"
    out = folder / f"lab-{mbit}-{'-'.join(env.values())}.json"
    command = potluck_command("bench", "collectives", "--against", "gloo", "--sizes", sizes)
    command += ["--repeats", str(repeats), "--json", str(out), "--tolerance", tolerance]
    before = {name: os.environ.get(name) for name in env}
    os.environ.update(env)
    try:
        logs = run_on_pair([command, command], mbit, folder, limit_s=LIMIT_S)
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    print(logs[0].read_text(), end="", flush=True)
    logs[0].unlink()
    return list(json.loads(out.read_text()))


def iperf_bytes_per_s(mbit: float | None, folder: Path) -> float | None:
    """What iperf3 shows between the two lab machines; None where it is not installed."""
    if shutil.which("iperf3") is None:
        return None
    with NamespaceBox(pair(mbit)) as box:
        env, logs = dict(os.environ), (folder / "iperf-server.log", folder / "iperf.json")
        server = box.start("two", ["iperf3", "--server", "--one-off"], env=env, log=logs[0])
        time.sleep(0.5)
        client = box.start("one", ["iperf3", "--client", box.address("two"), "--json"], env=env, log=logs[1])
        client.wait(60)
        server.wait(60)
    return float(json.loads(logs[1].read_text())["end"]["sum_received"]["bits_per_second"]) / 8


def rows_of(rows: list[dict[str, Any]], backend: str) -> dict[int, dict[str, Any]]:
    return {row["size_bytes"]: row for row in rows if row["backend"] == backend}


def faster(rows: list[dict[str, Any]], size: int) -> float:
    """How many times as fast as gloo."""
    return float(rows_of(rows, "gloo")[size]["time_s"] / rows_of(rows, "potluck")[size]["time_s"])


def local_bars(args: argparse.Namespace, folder: Path) -> list[Bar]:
    bars = []
    for processes in (2, 4):
        rows = on_this_machine(processes, "4K,1M,64M", 5 if args.quick else None, folder)
        for size, least in ((4 * KB, 1.0), (MB, 2.0), (64 * MB, 2.5)):
            what = f"{processes} processes, {size // KB} KiB: times as fast as gloo"
            bars.append(Bar(what, faster(rows, size), least))
    return bars


def lab_bars(args: argparse.Namespace, folder: Path) -> list[Bar]:
    sizes = (16 * MB,) if args.quick else (16 * MB, 64 * MB)
    parts = {"lossless": lossless_bars, "int8": int8_bars, "unshaped": unshaped_bars}
    chosen = [part for name, part in parts.items() if args.only in (None, name)]
    return [bar for part in chosen for bar in part(sizes, folder, args.quick)]


def _text(sizes: tuple[int, ...]) -> str:
    return ",".join(f"{size // MB}M" for size in sizes)


def lossless_bars(sizes: tuple[int, ...], folder: Path, quick: bool) -> list[Bar]:
    rows = in_the_lab(1000, _text(sizes), 3 if quick else 7, folder)
    link = iperf_bytes_per_s(1000, folder)
    name = "iperf3" if link else "a bare TCP connection"
    bars = []
    for size in sizes:
        row = rows_of(rows, "potluck")[size]
        share = float(row["busbw"]) / (link or float(row["link_bytes_per_s"]))
        bars.append(Bar(f"1 Gbit/s, {size // MB} MiB: share of {name}", share, 0.97))
    return bars


def int8_bars(sizes: tuple[int, ...], folder: Path, quick: bool) -> list[Bar]:
    repeats, bars = 3 if quick else 15, []
    for how, env in WAYS.items():
        rows = in_the_lab(1000, _text(sizes), repeats, folder, POTLUCK_DIST_COMPRESSION="int8", **env)
        what = f"1 Gbit/s, int8, {how}"
        bars += [Bar(f"{what}, {s // MB} MiB: times as fast as gloo", faster(rows, s), 3.5) for s in sizes]
    return bars


def unshaped_bars(sizes: tuple[int, ...], folder: Path, quick: bool) -> list[Bar]:
    repeats, bars = 3 if quick else 15, []
    for how, env in WAYS.items():
        rows = in_the_lab(None, _text(sizes), repeats, folder, **env)
        what, least = f"unshaped link, {how}", 1.2 if env else None
        bars += [Bar(f"{what}, {s // MB} MiB: times as fast as gloo", faster(rows, s), least) for s in sizes]
    return bars


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and sizes")
    parser.add_argument("--skip-lab", action="store_true", help="this machine only")
    parser.add_argument("--skip-local", action="store_true", help="the lab only")
    parser.add_argument("--only", choices=["lossless", "int8", "unshaped"], help="this part of the lab only")
    parser.add_argument("--json", type=Path, help="write what was measured here")
    args = parser.parse_args()
    print(
        f"# load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; a busy one measures its load"
    )
    with tempfile.TemporaryDirectory(prefix="potluck-bench-") as name:
        bars = [] if args.skip_local or args.only else local_bars(args, Path(name))
        bars += [] if args.skip_lab else lab_bars(args, Path(name))
    for bar in bars:
        print(bar)
    if args.json:
        args.json.write_text(json.dumps([asdict(bar) | {"kept": bar.kept} for bar in bars], indent=1) + "\n")
    return 0 if all(bar.kept for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())

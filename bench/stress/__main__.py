"""`make stress`: the whole campaign, row after row, within a bound; one table, printed as it goes.

    .venv/bin/python bench/stress [--minutes 30] [--scale 0.05] [--only R1,S2] [--json FILE]

By default a twentieth of every row's count and 30 minutes at most. `--scale 1 --minutes 600` is all of it; it can
be done in pieces, and table.py adds them up. The status is 1 when anything was bad. It must not know what a row
does: each is a script of its own, and can be run alone.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _rows import MINUTES, NAMES, ROWS, Row

HERE = Path(__file__).resolve().parent
GRACE_S = 240.0
"""A script stops by itself when its minutes are over, but ends what it has begun."""
HEADER = ("row", "what", "times", "wanted", "bad", "note")
WIDTHS = (4, 50, 9, 9, 4)
SHORT_SOAK_GROWTH = 0.10
"""A soak of some minutes sees caches that are still being filled; the full one allows less."""
SOAK_MINUTES = 30


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    rows = [row for row in ROWS if row.name in options.only]
    print(_line(HEADER), flush=True)
    results: list[dict[str, Any]] = []
    try:
        for number, row in enumerate(rows):
            left = (deadline - time.monotonic()) / 60
            needs = [_needed(other, options.scale) for other in rows[number:]]
            results.append(carry_out(row, options.scale, options.seed, left, left * needs[0] / sum(needs)))
            print(_line(cells(row, results[-1])), flush=True)
            _write(options.json, results)
    except KeyboardInterrupt:
        print("stopped: rows that are not above were not run", file=sys.stderr)
        return 130
    bad = [result["row"] for result in results if result["bad"]]
    left_out = [result["row"] for result in results if not result["times"] and not result["bad"]]
    if left_out:
        print(f"not run, for lack of time: {', '.join(left_out)}; more with --minutes", flush=True)
    print(f"bad: {', '.join(bad)}" if bad else "nothing bad", flush=True)
    return 1 if bad else 0


def carry_out(
    row: Row, scale: float, seed: int | None, left_minutes: float, share_minutes: float
) -> dict[str, Any]:
    """Run a row's script for its share of the time; what it found."""
    minutes = max(share_minutes, row.least_minutes)
    if left_minutes < row.least_minutes:
        return _nothing(row, scale, "not run: the time was up")
    command = [sys.executable, str(HERE / row.script), *words(row, scale, minutes), "--json"]
    command += ["--seed", str(seed)] if seed is not None else []
    began = time.monotonic()
    status, out, err = _run(command, 60 * minutes + GRACE_S)
    try:
        found: dict[str, Any] = json.loads(out.splitlines()[-1])
        if not isinstance(found, dict) or not {"bad", "times", "seconds"} <= found.keys():
            raise ValueError("no figures")
    except (ValueError, IndexError):
        tail = " | ".join(err.strip().splitlines()[-2:])
        reason = "it did not end" if status is None else f"it ended with {status}"
        result = _nothing(row, scale, f"{reason}: {tail}"[:300])
        return {**result, "bad": 1, "seconds": round(time.monotonic() - began, 1)}
    result = {**found, "wanted": _wanted(row, scale), "scale": scale}
    if row.unit == MINUTES:
        result["times"] = round(_minutes_of(found), 2)
    if status and not found["bad"]:
        result["note"] = "the time was up before the first" if not found["times"] else f"it ended with {status}"
        result["bad"] = 1 if found["times"] else 0
    return result


def words(row: Row, scale: float, minutes: float) -> list[str]:
    """The script's options for a part of the campaign."""
    options: list[str] = []
    if row.name == "R3":
        options += ["--each", str(_wanted(row, scale))]
    elif row.unit != MINUTES:
        options += ["--times", str(_wanted(row, scale))]
    if row.unit == MINUTES:
        minutes = min(minutes, max(row.least_minutes, row.wanted * scale))
    if row.name == "R11" and minutes < SOAK_MINUTES:
        options += ["--growth", str(SHORT_SOAK_GROWTH), "--look", "1"]
    for name, full, least in row.scaled:
        options += [name, str(int(max(least, full * min(1.0, scale))))]
    return [*options, "--minutes", f"{minutes:.2f}"]


def cells(row: Row, result: dict[str, Any]) -> tuple[str, ...]:
    unit = f" {row.unit}" if row.unit == MINUTES else ""
    note = str(result.get("note") or "")
    if not note and result.get("troubles"):
        note = str(result["troubles"][0]).splitlines()[0]
    if not note and result.get("seconds"):
        note = f"{result['seconds']:.0f} s"
    wanted = f"{result['wanted']:g}{unit}" + (" each" if row.name == "R3" else "")
    return (row.name, row.what, f"{result['times']:g}{unit}", wanted, str(result["bad"]), note[:120])


def _wanted(row: Row, scale: float) -> int | float:
    if row.unit == MINUTES:
        return round(max(row.least_minutes, row.wanted * scale), 2)
    return max(1, round(row.wanted * scale))


def _needed(row: Row, scale: float) -> float:
    return max(row.least_minutes, row.minutes * scale)


def _minutes_of(found: dict[str, Any]) -> float:
    return min(float(found["minutes"]), float(found["seconds"]) / 60) if found["times"] else 0.0


def _nothing(row: Row, scale: float, note: str) -> dict[str, Any]:
    today = time.strftime("%Y-%m-%d", time.gmtime())
    return {
        "row": row.name,
        "what": row.what,
        "times": 0,
        "wanted": _wanted(row, scale),
        "bad": 0,
        "date": today,
        "note": note,
    }


def _run(command: list[str], limit_s: float) -> tuple[int | None, str, str]:
    """The status (None: it had to be killed) and what was said. Nothing of it outlives this."""
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        return None, out, err
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, out, err


def _line(texts: Sequence[str]) -> str:
    padded = [text[:width].ljust(width) for text, width in zip(texts, WIDTHS)]
    return "  ".join([*padded, *texts[len(WIDTHS) :]]).rstrip()


def _write(file: Path | None, results: list[dict[str, Any]]) -> None:
    if file is not None:
        file.write_text(json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8")


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make stress ARGS=..." if os.environ.get("MAKELEVEL") else "python bench/stress",
        description="The campaign of docs/reliability.md. Bounded: by default a twentieth of every row's count, "
        "and 30 minutes in all at most.",
        epilog='examples: make stress   make stress ARGS="--only R1,S2 --scale 1 --minutes 60 --json r1s2.json"',
    )
    parser.add_argument("--minutes", type=float, default=30.0, help="a bound for the whole (default: 30)")
    parser.add_argument("--scale", type=float, default=0.05, help="part of every row's count (default: 0.05)")
    parser.add_argument("--only", type=_names, default=list(NAMES), metavar="ROWS", help="for example R1,S2")
    parser.add_argument("--seed", type=int, help="of what is random (default: the time)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here; table.py reads them")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.scale <= 0:
        parser.error("--minutes and --scale must be above 0")
    return options


def _names(text: str) -> list[str]:
    names = [name.strip().upper() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in NAMES]
    if unknown or not names:
        raise argparse.ArgumentTypeError(
            f"there is no row {', '.join(unknown) or text!r}; rows: {', '.join(NAMES)}"
        )
    return names


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

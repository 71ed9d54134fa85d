"""The table of docs/reliability.md from the campaign's figures: pieces are added up, nothing is extrapolated.

    .venv/bin/python bench/stress/table.py RESULTS.json... [--write docs/reliability.md]

RESULTS are files of `make stress ARGS="--json FILE"`, or of a row's script with --json: one object a line. Give all
pieces each time: a row without one is pending. The same piece given twice counts once. It must not know how a row
is carried out.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from _rows import MINUTES, NAMES, ROWS, Row

BEGIN, END = "<!-- campaign: begin (bench/stress/table.py writes this) -->", "<!-- campaign: end -->"
PENDING = "pending"
HEADER = ("row", "what", "must", "wanted", "counted", "bad", "date", "short version in `make test`")


def read(path: Path) -> list[dict[str, Any]]:
    """The pieces in a file, each with a date: its own, else the day on which the file was written."""
    text = path.read_text(encoding="utf-8")
    try:
        whole = json.loads(text)
        found = whole["results"] if isinstance(whole, dict) and "results" in whole else [whole]
    except ValueError:
        found = [json.loads(line) for line in text.splitlines() if line.lstrip().startswith("{")]
    day = time.strftime("%Y-%m-%d", time.gmtime(path.stat().st_mtime))
    pieces = []
    for piece in found:
        if not isinstance(piece, dict) or piece.get("row") not in NAMES:
            raise ValueError(f"{path} holds {str(piece)[:80]!r}, no figures of a row")
        pieces.append({"date": day, **piece})
    return pieces


def distinct(pieces: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each piece once, however many files hold it."""
    return list({json.dumps({**p, "date": ""}, sort_keys=True): p for p in pieces}.values())


def table(pieces: Sequence[dict[str, Any]]) -> str:
    """The table in markdown."""
    lines = ["| " + " | ".join(HEADER) + " |", "|" + "|".join("---" for _ in HEADER) + "|"]
    for row in ROWS:
        own = [piece for piece in pieces if piece["row"] == row.name and (piece["times"] or piece["bad"])]
        lines.append("| " + " | ".join(_cells(row, own)) + " |")
    return "\n".join(lines)


def _cells(row: Row, pieces: Sequence[dict[str, Any]]) -> list[str]:
    wanted = {MINUTES: f"{row.wanted} min", "of each": f"all × {row.wanted}"}.get(row.unit, f"{row.wanted:,}")
    short = "<br>".join(f"`{name}`" for name in row.short)
    counted = bad = dates = PENDING
    if pieces:
        counted, bad = _counted(row, pieces), str(sum(piece["bad"] for piece in pieces))
        days = sorted({piece["date"] for piece in pieces})
        dates = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return [row.name, row.what, row.must, wanted, counted, bad, dates, short]


def _counted(row: Row, pieces: Sequence[dict[str, Any]]) -> str:
    several = f" in {len(pieces)} pieces" if len(pieces) > 1 else ""
    if row.unit == MINUTES:
        minutes = [_minutes(piece) for piece in pieces]
        longest = f", the longest {max(minutes):.0f}" if len(pieces) > 1 else ""
        return f"{sum(minutes):.0f} min{several}{longest}"
    if row.name == "R3":
        # Pieces of the same names count those once; the others' names are others.
        killed_at = {piece.get("only", ""): int(piece.get("names_killed_at", 0)) for piece in pieces}
        names = killed_at[""] if "" in killed_at else sum(killed_at.values())
        return f"{sum(piece['times'] for piece in pieces):,} kills at {names} failpoints{several}"
    return f"{sum(piece['times'] for piece in pieces):,}{several}"


def _minutes(piece: dict[str, Any]) -> float:
    """How long it was at it: no longer than it was asked for, as a script also starts and compares."""
    took = float(piece["seconds"]) / 60
    if piece["row"] == "S3" and "minutes" not in piece:
        raise ValueError("a piece of S3 does not say for how many minutes it held its connections")
    return min(took, float(piece.get("minutes", took)))


def written(document: str, new: str) -> str:
    """The document with the table between its marks."""
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"it has no line {BEGIN!r} followed by {END!r}")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Add up the campaign's pieces into the table of the docs.")
    parser.add_argument("results", nargs="*", type=Path, metavar="RESULTS.json")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the table between the marks in this file")
    options = parser.parse_args(arguments)
    try:
        new = table(distinct(piece for path in options.results for piece in read(path)))
        if options.write is None:
            print(new)
        else:
            document = written(options.write.read_text(encoding="utf-8"), new)
            options.write.write_text(document, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

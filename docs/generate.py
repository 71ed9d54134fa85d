"""Writes the parts of the docs that are made from the source: the list of files in architecture.md.

python docs/generate.py          write them
python docs/generate.py --check  say what is out of date, and end with status 1 if anything is
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "potluck"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- docs/generate.py: begin -->\n", "<!-- docs/generate.py: end -->"


def first_sentence(path: Path) -> str:
    """What the module's docstring says it owns."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text)[0].rstrip(".")


def file_list() -> Iterator[str]:
    """A heading for each room, a row for each of its files."""
    rooms = sorted({path.parent for path in SOURCE.rglob("*.py")})
    for room in rooms:
        name = "" if room == SOURCE else f"{room.relative_to(SOURCE).as_posix()}/"
        about = first_sentence(room / "__init__.py") if name else ""
        yield f"\n### `potluck/{name}`\n"
        if about:
            yield f"{about}.\n"
        yield "| file | what it owns |\n|---|---|"
        for path in sorted(room.glob("*.py")):
            if path.name not in ("__init__.py", "_version.py"):
                yield f"| `{path.name}` | {first_sentence(path).replace('|', '/')} |"


def page() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + "\n".join(file_list()).strip("\n") + "\n" + END + rest.partition(END)[2]


def main() -> None:
    wanted = page()
    if wanted == PAGE.read_text(encoding="utf-8"):
        return
    if "--check" in sys.argv:
        sys.exit(f"{PAGE.relative_to(ROOT)} is out of date: python docs/generate.py")
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()

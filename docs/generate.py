"""Writes the parts of the docs that are made from the source: the list of files in architecture.md, the tables of
events in reference/run-folder.md.

python docs/generate.py          write them
python docs/generate.py --check  say what is out of date, and end with status 1 if anything is
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "potluck"
DOCS = ROOT / "docs"
BEGIN, END = "<!-- docs/generate.py: begin -->\n", "<!-- docs/generate.py: end -->"
JSON_TYPES = {
    "Any": "any",
    "Natural": "integer",
    "None": "null",
    "Positive": "integer",
    "bool": "boolean",
    "dict": "object",
    "float": "number",
    "int": "integer",
    "str": "string",
}
"""What JSON calls the types of fields; other names stand as they are."""


# -- the list of files ----------------------------------------------------------------------------------


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


# -- tables of tagged classes ---------------------------------------------------------------------------


def class_tables(path: Path) -> Iterator[str]:
    """A heading for each `# -- part --` comment of a file and for each public class, its docstring and a table of
    its fields. A class with a tag is called by its tag."""
    text = path.read_text(encoding="utf-8")
    parts = {n: m[1] for n, line in enumerate(text.splitlines(), 1) if (m := re.match(r"# -- (.+?) -+$", line))}
    last = 0
    for node in ast.parse(text).body:
        if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
            continue
        for line in [line for line in parts if last < line < node.lineno]:
            yield f"\n### {parts[line].capitalize()}\n"
        last = node.lineno
        yield f"\n#### `{tag_of(node) or node.name}`\n"
        yield " ".join((ast.get_docstring(node) or "").split())
        rows = [f"| `{name}` | {kind} | {about} |" for name, kind, about in fields_of(node)]
        if rows:
            yield "\n| field | type | |\n|---|---|---|"
            yield from rows


def tag_of(node: ast.ClassDef) -> str | None:
    values = [keyword.value for keyword in node.keywords if keyword.arg == "tag"]
    return str(values[0].value) if values and isinstance(values[0], ast.Constant) else None


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, str, str]]:
    """Name, type in JSON and docstring of each field."""
    for field, below in itertools.pairwise([*node.body, ast.Pass()]):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            known = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            about = " ".join(str(below.value.value).split()) if known else ""  # type: ignore[attr-defined]
            yield field.target.id, json_type(field.annotation), about.replace("|", "\\|")


def json_type(annotation: ast.expr) -> str:
    match annotation:
        case ast.BinOp(left=left, right=right):
            names = [json_type(left), json_type(right)]
            return " or ".join(name for name in names if name)
        case ast.Subscript(value=ast.Name(id="tuple" | "list"), slice=ast.Tuple(elts=[of, *_]) | of):
            return f"list of {json_type(of)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return " or ".join(f"`{ast.literal_eval(value)}`" for value in values)
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, of])):
            return f"object of {json_type(of)}"
        case ast.Attribute(attr="UnsetType"):
            return ""
        case ast.Constant(value=None):
            return "null"
        case ast.Name(id=name):
            return JSON_TYPES.get(name, f"`{name}`")
    return f"`{ast.unparse(annotation)}`"


# -- pages ----------------------------------------------------------------------------------------------


def page(path: Path, lines: Iterator[str]) -> str:
    """The page as it should be."""
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    made = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
    return before + BEGIN + made + "\n" + END + rest.partition(END)[2]


def main() -> None:
    pages = {
        DOCS / "architecture.md": file_list(),
        DOCS / "reference" / "run-folder.md": class_tables(SOURCE / "spec" / "events.py"),
    }
    old = []
    for path, lines in pages.items():
        wanted = page(path, lines)
        if wanted != path.read_text(encoding="utf-8"):
            old.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(wanted, encoding="utf-8")
    if old and "--check" in sys.argv:
        sys.exit(f"{', '.join(old)} out of date: python docs/generate.py")


if __name__ == "__main__":
    main()

"""Writes the parts of the docs that are made from the source: the list of files in architecture.md, the tables of
events in reference/run-folder.md, of messages in reference/protocol.md and of examples in guides/trainers.md.

python docs/generate.py          write them
python docs/generate.py --check  say what is out of date, and end with status 1 if anything is
"""

from __future__ import annotations

import ast
import difflib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "potluck"
DOCS = ROOT / "docs"
BEGIN, END = "<!-- docs/generate.py: {} -->\n", "<!-- docs/generate.py: end -->"
MESSAGES = re.compile(rf"(<!-- docs/generate.py: messages ([\w ]+) -->\n).*?({re.escape(END)})", re.DOTALL)
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
    its fields. A class with a tag is called by its tag, and has the fields of its private bases but the first."""
    text = path.read_text(encoding="utf-8")
    parts = {n: m[1] for n, line in enumerate(text.splitlines(), 1) if (m := re.match(r"# -- (.+?) -+$", line))}
    last, classes = 0, [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    inherited: dict[str, list[tuple[str, str, str]]] = {}
    for node in classes:
        fields = [*inherited.get(ast.unparse(node.bases[0]) if node.bases else "", []), *fields_of(node)]
        if node.name.startswith("_"):
            is_first = any(keyword.arg == "tag_field" for keyword in node.keywords)
            inherited[node.name] = [] if is_first else fields
            continue
        for line in [line for line in parts if last < line < node.lineno]:
            yield f"\n### {parts[line].capitalize()}\n"
        last = node.lineno
        yield f"\n#### `{tag_of(node) or node.name}`\n"
        yield " ".join((ast.get_docstring(node) or "").split())
        rows = [f"| `{name}` | {kind} | {about} |" for name, kind, about in fields]
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


# -- tables of messages ---------------------------------------------------------------------------------


def message_tables(path: Path, kinds: list[str]) -> Iterator[str]:
    """A table of messages, and one of their fields with their bounds, which only the classes themselves know."""
    sys.path.insert(0, str(SOURCE.parent))
    import msgspec

    from potluck.spec.messages import FromGuest, FromHost

    classes = {kind.kind: kind for kind in (*get_args(FromGuest), *get_args(FromHost))}
    nodes = {
        node.name: node
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    yield "| kind | from | | frames | when |\n|---|---|---|---|---|"
    for kind in kinds:
        made = classes[kind]
        when = " ".join((made.__doc__ or "").split())
        yield f"| `{kind}` | {made.sender} | {made.channel[0].upper()} | {frames_text(made.frames)} | {when} |"
    yield "\n| kind | field | type | bounds | |\n|---|---|---|---|---|"
    for kind in kinds:
        about = {name: text for name, _, text in fields_of(nodes[classes[kind].__name__])}
        for field in msgspec.inspect.type_info(classes[kind]).fields:  # type: ignore[attr-defined]
            name, bounds = type_text(field.type)
            optional = "" if field.required else ", optional"
            yield f"| `{kind}` | `{field.name}` | {name}{optional} | {bounds} | {about[field.name]} |"


def frames_text(frames: Any) -> str:
    if not frames.most:
        return ""
    count = "one" if frames.most == 1 else f"up to {frames.most}"
    return f"{count}{'' if frames.least or frames.most > 1 else ' or none'}: {frames.holds}"


def type_text(found: Any) -> tuple[str, str]:
    """What JSON calls a type, and its bounds."""
    match type(found).__name__:
        case "Metadata":
            return type_text(found.type)[0], f"cut to {found.extra['cut']} characters"
        case "IntType" | "FloatType":
            name = "integer" if type(found).__name__ == "IntType" else "number"
            return name, "" if found.ge is None else f"{number_text(found.ge)} to {number_text(found.le)}"
        case "StrType":
            return "string", f"at most {found.max_length} characters" if found.max_length else ""
        case "BoolType":
            return "boolean", ""
        case "UnionType":
            inner = [type_text(one) for one in found.types]
            return " or ".join(name for name, _ in inner), " ".join(filter(None, (bounds for _, bounds in inner)))
        case "VarTupleType":
            name, bounds = type_text(found.item_type)
            return f"list of {name}", f"{found.min_length or 0} to {found.max_length}, each {bounds}"
        case "DictType":
            name, bounds = type_text(found.value_type)
            return f"object of {name}", f"at most {found.max_length} keys" if found.max_length else ""
        case "NoneType":
            return "null", ""
        case "StructType":
            return "object", ""
    return "any", ""


def number_text(number: float) -> str:
    size = abs(number)
    if size >= 1 << 62:
        text = "2^62"
    else:
        text = f"10^{len(str(int(size))) - 1}" if size >= 1e6 else f"{size:g}"
    return f"-{text}" if number < 0 else text


# -- the examples ---------------------------------------------------------------------------------------

EXAMPLES = {
    "my_train.py": ("plain.py", "a loop of one's own"),
    "cnn.py": ("plain_cnn.py", "a ResNet: augmentation, BatchNorm, OneCycle, validation, the best weights kept"),
    "finetune.py": ("plain_finetune.py", "the Hugging Face Trainer with LoRA"),
    "with_lightning.py": ("plain_lightning.py", "Lightning's Trainer, with a data module and a checkpoint"),
    "notebook.ipynb": ("plain_notebook.ipynb", "a notebook that hosts"),
}
"""Each example with the plain version of it, and what it shows."""


def lines_of(name: str) -> list[str]:
    """An example's lines without blank ones and without its docstring, which says another thing in each version."""
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    if name.endswith(".ipynb"):
        cells = [cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        return [line for source in cells for line in "".join(source).splitlines() if line.strip()]
    begin = ast.parse(text).body[0].end_lineno
    return [line for line in text.splitlines()[begin:] if line.strip()]


def changed_lines(name: str) -> list[str]:
    """The lines of an example that its plain version has not."""
    plain, _ = EXAMPLES[name]
    return [line[2:] for line in difflib.ndiff(lines_of(plain), lines_of(name)) if line.startswith("+ ")]


def example_table() -> Iterator[str]:
    yield "| example | plain version | what it trains | lines | of them new or changed |\n|---|---|---|---|---|"
    for name, (plain, about) in EXAMPLES.items():
        links = " | ".join(f"[{file}](../../examples/{file})" for file in (name, plain))
        yield f"| {links} | {about} | {len(lines_of(name))} | {len(changed_lines(name))} |"


# -- pages ----------------------------------------------------------------------------------------------


def page(path: Path, parts: dict[str, Iterable[str]]) -> str:
    """The page as it should be, with each of these parts between its marks."""
    text = path.read_text(encoding="utf-8")
    for name, lines in parts.items():
        begin = BEGIN.format(name)
        before, mark, rest = text.partition(begin)
        if not mark:
            sys.exit(f"{path.relative_to(ROOT)} has no line {begin.strip()}")
        made = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n")
        text = before + begin + made + "\n" + END + rest.partition(END)[2]
    return text


def protocol_page(path: Path) -> str:
    """The page of the protocol as it should be: each of its sections names the kinds in it."""
    messages = SOURCE / "spec" / "messages.py"
    text = path.read_text(encoding="utf-8")
    named = [kind for found in MESSAGES.finditer(text) for kind in found[2].split()]
    written = re.findall(r'^    kind = "(\w+)"', messages.read_text(encoding="utf-8"), re.M)
    if sorted(named) != sorted(written):
        sys.exit(
            f"{path.relative_to(ROOT)}: {sorted(set(named) ^ set(written))} must be named in one section, once"
        )
    return MESSAGES.sub(
        lambda found: found[1] + "\n".join(message_tables(messages, found[2].split())) + "\n" + found[3], text
    )


def main() -> None:
    reference = DOCS / "reference"
    architecture, folder = DOCS / "architecture.md", reference / "run-folder.md"
    trainers = DOCS / "guides" / "trainers.md"
    pages = {
        architecture: page(architecture, {"files": file_list()}),
        folder: page(
            folder,
            {
                "manifest": class_tables(SOURCE / "spec" / "manifest.py"),
                "events": class_tables(SOURCE / "spec" / "events.py"),
            },
        ),
        reference / "protocol.md": protocol_page(reference / "protocol.md"),
        trainers: page(trainers, {"examples": example_table()}),
    }
    old = []
    for path, wanted in pages.items():
        if wanted != path.read_text(encoding="utf-8"):
            old.append(str(path.relative_to(ROOT)))
            if "--check" not in sys.argv:
                path.write_text(wanted, encoding="utf-8")
    if old and "--check" in sys.argv:
        sys.exit(f"{', '.join(old)} out of date: python docs/generate.py")


if __name__ == "__main__":
    main()

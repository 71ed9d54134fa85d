"""Writes the parts of the docs that are made from the source: the list of files in architecture.md, the options in
reference/options.md, the signatures in reference/python.md, the tables of events in reference/run-folder.md, of
messages in reference/protocol.md, of series and fields in reference/metrics.md, and of examples in
guides/trainers.md.

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

import click

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "potluck"
DOCS = ROOT / "docs"
BEGIN, END = "<!-- docs/generate.py: {} -->\n", "<!-- docs/generate.py: end -->"
MESSAGES = re.compile(rf"(<!-- docs/generate.py: messages ([\w ]+) -->\n).*?({re.escape(END)})", re.DOTALL)
JSON_TYPES = {
    "Amount": "number",
    "Any": "any",
    "Direction": "`in`, `out` or `event`",
    "Finite": "number",
    "Natural": "integer",
    "Length": "integer",
    "None": "null",
    "Positive": "integer",
    "Settings": "object of settings",
    "Text": "string",
    "Whole": "integer",
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
    sentence = re.split(r"(?<=[.?!])\s+(?=[A-Z`])", text)[0].rstrip(".")
    return re.sub(r"(?<![`\w])__\w+__(?![`\w])", r"`\g<0>`", sentence)  # no bold word


def file_list() -> Iterator[str]:
    """A heading for each room, a row for each of its files."""
    rooms = sorted({path.parent for path in SOURCE.rglob("*.py")})
    for room in rooms:
        name = "" if room == SOURCE else f"{room.relative_to(SOURCE).as_posix()}/"
        about = first_sentence(room / "__init__.py") if name else ""
        yield f"\n### `potluck/{name}`\n"
        if about:
            yield f"{about}.\n"
        files = [path for path in sorted(room.glob("*.py")) if path.name not in ("__init__.py", "_version.py")]
        if files:
            yield "| file | what it owns |\n|---|---|"
        yield from (f"| `{path.name}` | {first_sentence(path).replace('|', '/')} |" for path in files)


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


def series_tables() -> Iterator[str]:
    """A table of the page's Prometheus series, for the run and for each machine."""
    from potluck.web.metrics import MACHINE_SERIES, RUN_SERIES

    for prefix, series in (("potluck_", RUN_SERIES), ("potluck_machine_", MACHINE_SERIES)):
        yield "\n| series | type | the same in `status.json` | |\n|---|---|---|---|"
        for name, kind, field, about in series:
            yield f"| `{prefix}{name}` | {kind} | `{field}` | {about} |"


def status_tables(path: Path) -> Iterator[str]:
    """Tables of the fields of `/status.json`; one that has a series means what that means."""
    from potluck.web.metrics import MACHINE_SERIES, RUN_SERIES

    nodes = ast.parse(path.read_text(encoding="utf-8")).body
    classes = {node.name: node for node in nodes if isinstance(node, ast.ClassDef)}
    for name, series in (("Status", RUN_SERIES), ("MachineStatus", MACHINE_SERIES)):
        node, meaning = classes[name], {field: about for _, _, field, about in series}
        yield f"\n{' '.join((ast.get_docstring(node) or '').split())}"
        yield "\n| field | type | |\n|---|---|---|"
        for field, kind, about in fields_of(node):
            assert about or field in meaning, f"{name}.{field} is not explained"
            yield f"| `{field}` | {kind} | {about or meaning[field]} |"


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
        case ast.Subscript(value=ast.Name(id="tuple" | "list" | "Many"), slice=ast.Tuple(elts=[of, *_]) | of):
            return f"list of {json_type(of)}"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return " or ".join(f"`{ast.literal_eval(value)}`" for value in values)
        case ast.Subscript(value=ast.Name(id="dict"), slice=ast.Tuple(elts=[_, of])):
            return f"object of {json_type(of)}"
        case ast.Subscript(value=ast.Name(id="Named"), slice=of):
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
            if found.le == sys.float_info.max:
                return name, "finite" if found.ge else "at least 0"
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


# -- options of the commands ----------------------------------------------------------------------------


def commands(command: click.Command, words: tuple[str, ...]) -> Iterator[tuple[str, click.Command]]:
    """Every command that does something, with its name."""
    if not isinstance(command, click.Group):
        yield " ".join(words), command
        return
    context = click.Context(command)
    for name in command.list_commands(context):
        below = command.get_command(context, name)
        assert below is not None
        yield from commands(below, (*words, name))


def option_tables() -> Iterator[str]:
    """A section for each command: what it does, how it is called, and its options, as `--help` has them."""
    from potluck.cli._app import app as app

    for name, command in commands(app, ("potluck",)):
        about = (command.help or "").split("\n\n")[0]
        usage = " ".join(command.collect_usage_pieces(click.Context(command)))
        yield f"\n## {name}\n\n{' '.join(about.split())}\n\n```\n{name} {usage}\n```"
        rows = [row for option in command.params if (row := option_row(option))]
        if rows:
            yield "\n| option | |\n|---|---|"
            yield from rows


def option_row(option: click.Parameter) -> str:
    if not isinstance(option, click.Option) or option.hidden:
        return ""
    context = click.Context(click.Command("x"))
    names, about = option.get_help_record(context) or ("", "")
    parts = " ".join(about.replace("<", "\\<").replace("*", "\\*").split()).split("`")
    parts[::2] = [re.sub(r"--[a-z][\w-]*", r"`\g<0>`", part) for part in parts[::2]]
    cells = [f"`{names.strip()}`", "`".join(parts)]
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


# -- signatures -----------------------------------------------------------------------------------------


PUBLIC = {
    ("train/run.py", "Run", "`run`, a `potluck.Run`"): (
        *(
            "role",
            "is_host",
            "is_resumed",
            "device",
            "token",
            "join_line",
            "page_url",
            "stop_requested",
            "log",
            "close",
        ),
    ),
    ("hosting.py", "HostedRun", "`run` with `host=True`"): ("close",),
    ("train/step.py", "Step", "`step`, a `potluck.Step`"): ("number", "backward", "loss", "ends_epoch"),
}
"""What scripts use of each class; the rest is for the package."""


def signatures() -> Iterator[str]:
    """What `potluck` has for scripts: its functions, and the public names of its classes."""
    start = named(SOURCE / "hosting.py", "start")
    steps = named(named(SOURCE / "train" / "run.py", "Run"), "steps")
    yield f"\n```python\n{signature(start, 'potluck.start')}\n\n{signature(steps, 'run.steps')}\n```"
    for (file, name, title), members in PUBLIC.items():
        yield f"\n### {title}\n\n| | |\n|---|---|"
        found, called = named(SOURCE / file, name), title[1:].partition("`")[0]
        for member in (named(found, each) for each in members):
            text = " ".join((ast.get_docstring(member) or "").split("\n\n")[0].split())
            is_value = any(ast.unparse(mark).endswith("property") for mark in member.decorator_list)
            returns = ast.unparse(member.returns) if member.returns else "Any"
            arguments = f": {returns}" if is_value else f"({', '.join(arguments_of(member))})"
            shown = f"`{called}.{member.name}{arguments}`"
            yield f"| {shown.replace('|', chr(92) + '|')} | {text.replace('|', chr(92) + '|')} |"


def named(where: Path | ast.AST, name: str) -> Any:
    """The function or class of this name in a file or class; of a property, how it is read."""
    tree = ast.parse(where.read_text(encoding="utf-8")) if isinstance(where, Path) else where
    return next(node for node in ast.iter_child_nodes(tree) if getattr(node, "name", "") == name)


def signature(node: ast.FunctionDef, called: str) -> str:
    """Every argument on a line of its own."""
    words = arguments_of(node)
    returns = ast.unparse(node.returns) if node.returns else "Any"
    return f"{called}(\n" + "".join(f"    {word},\n" for word in words) + f") -> {returns}"


def arguments_of(node: ast.FunctionDef) -> list[str]:
    """The arguments but `self`, with types and defaults; `unknown` collects mistakes and is left out."""
    given = node.args
    plain = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(plain) - len(given.defaults)) + list(given.defaults)
    words = [argument_text(a, d) for a, d in zip(plain, defaults) if a.arg != "self"]
    if given.kwonlyargs:
        words.append(f"*{given.vararg.arg}" if given.vararg else "*")
        words += [argument_text(a, d) for a, d in zip(given.kwonlyargs, given.kw_defaults)]
    if given.kwarg and given.kwarg.arg != "unknown":
        words.append(f"**{given.kwarg.arg}")
    return words


def argument_text(argument: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default is not None else "")


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
    trainers, metrics = DOCS / "guides" / "trainers.md", reference / "metrics.md"
    sys.path.insert(0, str(SOURCE.parent))
    pages = {
        architecture: page(architecture, {"files": file_list()}),
        folder: page(
            folder,
            {
                "manifest": class_tables(SOURCE / "spec" / "manifest.py"),
                "events": class_tables(SOURCE / "spec" / "events.py"),
                "flight": class_tables(SOURCE / "spec" / "flight_record.py"),
            },
        ),
        reference / "options.md": page(reference / "options.md", {"options": option_tables()}),
        reference / "python.md": page(reference / "python.md", {"signatures": signatures()}),
        reference / "protocol.md": protocol_page(reference / "protocol.md"),
        trainers: page(trainers, {"examples": example_table()}),
        metrics: page(
            metrics,
            {"series": series_tables(), "status": status_tables(SOURCE / "web" / "metrics.py")},
        ),
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

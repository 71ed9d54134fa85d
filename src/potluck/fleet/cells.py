"""Turns the cells of a notebook into a script for guests: the cells that were run up to the training loop, in that
order.

A guest runs each cell again. A cell that fails there is skipped; only the cell with the loop must run.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import functools
import linecache
import operator
import sys
from collections.abc import Collection, Sequence
from typing import Any

from potluck.fleet.script import Script

NAME = "notebook.py"
NOT_SENT = "# potluck: host only"
"""A cell that begins with this line is not sent to guests."""
_WRAPPING = ("time", "timeit", "capture", "prun")
"""Cell magics whose cell is Python code."""
_FUTURE = functools.reduce(
    operator.or_, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)
"""Flags set by `from __future__ import …`, which IPython applies to all later cells."""

Cell = tuple[int, str]
"""Its number in the notebook (In [3]), and its source."""


def shell() -> Any | None:
    """IPython's shell, if this process is one, in a notebook or a terminal; else None."""
    if "IPython" not in sys.modules:
        return None
    import IPython

    return IPython.get_ipython()


def cells_of(inputs: Sequence[str], without: Collection[int] = ()) -> list[Cell]:
    """The parts of the run cells that guests need, without magics and shell commands.

    `inputs` are the sources as typed, by number, the one with the loop last. `without` are the numbers of cells
    with earlier loops.
    """
    found = []
    for number, source in enumerate(inputs):
        if number not in without and not source.lstrip().startswith(NOT_SENT):
            python = plain_python(source)
            if python.strip():
                found.append((number, python))
    return found


def plain_python(source: str) -> str:
    """The cell without IPython's syntax; "" if nothing else is in it or it is not Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        text = TransformerManager().transform_cell(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""  # it did not run in the notebook either
    lines = text.split("\n")  # as Python counts them
    for node in reversed(tree.body):
        if (body := _wrapped(node)) is not None:
            return plain_python(body)
        for asking in reversed(_asking_ipython(node)):
            _pass_instead(lines, asking, remove=asking is node)
    return "\n".join(lines)


def _asking_ipython(node: ast.stmt) -> list[ast.stmt]:
    """The innermost statements in which IPython is called, in the order of the text."""
    found: list[ast.stmt] = []
    parts = list(ast.iter_child_nodes(node))
    while parts:
        part = parts.pop(0)
        if isinstance(part, ast.stmt):
            found += _asking_ipython(part)
        elif isinstance(part, ast.Name) and part.id == "get_ipython":
            return [node]
        else:
            parts[:0] = ast.iter_child_nodes(part)
    return found


def _pass_instead(lines: list[str], node: ast.stmt, *, remove: bool) -> None:
    """Put `pass` in the statement's place; with `remove`, nothing where it has its lines to itself."""
    decorators = getattr(node, "decorator_list", [])
    first, last = min(part.lineno for part in (node, *decorators)) - 1, (node.end_lineno or node.lineno) - 1
    before = lines[first].encode()[: node.col_offset].decode()  # Python counts bytes
    after = lines[last].encode()[node.end_col_offset :].decode()
    alone = remove and not before.strip() and not after.strip()
    lines[first : last + 1] = [] if alone else [f"{before}pass{after}"]


def _wrapped(node: ast.stmt) -> str | None:
    """The Python below %%time and the like."""
    match node:
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(attr="run_cell_magic"),
                args=[ast.Constant(value=str(magic)), _, ast.Constant(value=str(body))],
            )
        ) if magic in _WRAPPING:
            return body
    return None


def as_script(cells: Sequence[Cell]) -> Script:
    """One file for guests, for people to read, too."""
    parts = [f"    ({number}, {_quoted(source)}),\n" for number, source in cells]
    text = (
        "# The cells of a notebook, up to its training loop. Sent to guests by potluck.start(host=True).\n"
        "from potluck.fleet.cells import replay\n\n"
        f"replay(globals(), [\n{''.join(parts)}])\n"
    )
    return Script(names=(NAME,), contents=(text.encode(),))


def as_python(cells: Sequence[Cell]) -> bytes:
    """The same cells as plain Python, to find their imports."""
    return "\n".join(source for _, source in cells).encode()


def _quoted(source: str) -> str:
    escaped = source.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""\\\n{escaped}"""' if not escaped.endswith('"') else repr(source)


def replay(namespace: dict[str, Any], cells: Sequence[Cell]) -> None:
    """On a guest: run the cells in this namespace.

    Raises: RuntimeError: the loop lacks a name, and an earlier cell failed here; names that cell and its error.
    """
    if not hasattr(builtins, "display"):
        namespace.setdefault("display", lambda *shown, **more: None)  # IPython has one everywhere
    failed: list[tuple[int, Exception]] = []
    flags = 0
    for number, source in cells:
        file = f"In [{number}]"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        code = compile(source, file, "exec", flags, dont_inherit=True)
        flags |= code.co_flags & _FUTURE
        try:
            exec(code, namespace)
        except Exception as error:
            if number != cells[-1][0]:
                failed.append((number, error))
                print(f"cell {file} failed here: {_words(error)}", file=sys.stderr)
            elif failed and isinstance(error, NameError):
                first, cause = failed[0]
                raise RuntimeError(
                    f"cell In [{first}] failed on this machine: {_words(cause)} (put what only the host needs "
                    f"below `if run.is_host:`, or begin the cell with {NOT_SENT!r})"
                ) from cause
            else:
                raise


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"

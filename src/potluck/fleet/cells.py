"""The cells of a notebook as a script for guests: what was run up to the training loop, in the order it was run.

On a guest each cell is run again. A cell that fails there is passed over, as it was in the notebook if it failed
there too; only the cell with the loop must run.
"""

from __future__ import annotations

import ast
import builtins
import linecache
import sys
from collections.abc import Collection, Sequence
from typing import Any

from potluck.fleet.script import Script

NAME = "notebook.py"
NOT_SENT = "# potluck: host only"
"""A cell that begins with this line is not sent to guests."""
_WRAPPING = ("time", "timeit", "capture", "prun")
"""Cell magics whose cell is Python all the same."""

Cell = tuple[int, str]
"""Its number in the notebook (In [3]), and its source."""


def shell() -> Any | None:
    """IPython's shell where this process is one, in a notebook or a terminal; None elsewhere."""
    if "IPython" not in sys.modules:
        return None
    import IPython

    return IPython.get_ipython()


def cells_of(inputs: Sequence[str], without: Collection[int] = ()) -> list[Cell]:
    """What guests need of the cells that were run, without magics and shell commands.

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
    """The cell without what only IPython understands; "" where nothing else is in it, or it is no Python."""
    from IPython.core.inputtransformer2 import TransformerManager

    try:
        text = TransformerManager().transform_cell(source)
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return ""  # it did not run in the notebook either
    lines = text.splitlines(keepends=True)
    for node in reversed(tree.body):
        if (body := _wrapped(node)) is not None:
            return plain_python(body)
        if any(isinstance(part, ast.Name) and part.id == "get_ipython" for part in ast.walk(node)):
            lines[node.lineno - 1 : node.end_lineno] = []
    return "".join(lines)


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
    """The same cells as plain Python, from which can be seen what they import."""
    return "\n".join(source for _, source in cells).encode()


def _quoted(source: str) -> str:
    escaped = source.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""\\\n{escaped}"""' if not escaped.endswith('"') else repr(source)


def replay(namespace: dict[str, Any], cells: Sequence[Cell]) -> None:
    """On a guest: run the cells in this namespace.

    Raises:
        RuntimeError: the loop lacks a name, and an earlier cell had failed here: that cell and its error.
    """
    if not hasattr(builtins, "display"):
        namespace.setdefault("display", lambda *shown, **more: None)  # IPython has one everywhere
    failed: list[tuple[int, Exception]] = []
    for number, source in cells:
        file = f"In [{number}]"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        code = compile(source, file, "exec")
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

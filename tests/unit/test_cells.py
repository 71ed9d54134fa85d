"""The cells of a notebook as a script: what of them is sent to guests, and how guests run it."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.fleet import cells
from potluck.fleet.script import Script, imports_of
from potluck.train.ending import GuestDone

pytest.importorskip("IPython", reason="magics are IPython's")

NOTEBOOK = [
    "",
    "%matplotlib inline\nimport torch\n!pip install something\nfiles = !ls",
    "%%bash\nrm -rf /",
    "%%time\nx = 1\n%who",
    "x = (",
    "# potluck: host only\nplot(x)",
    "for step in run.steps(): pass",
    'text = """a\\n"b" \'c\' \\\\"""\ny = x + 1',
    "result = x, y, text",
]


def test_magics_shell_commands_and_what_is_no_python_are_left_out() -> None:
    assert cells.cells_of(NOTEBOOK, {6}) == [
        (1, "import torch\n"),
        (3, "x = 1\n"),
        (7, NOTEBOOK[7] + "\n"),
        (8, NOTEBOOK[8] + "\n"),
    ]


def run(script: Any) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(script.contents[0].decode(), namespace)
    return namespace


def test_guests_run_the_same_text() -> None:
    script = cells.as_script([(n, s) for n, s in cells.cells_of(NOTEBOOK, {6}) if n != 1])
    assert run(script)["result"] == (1, 2, "a\n\"b\" 'c' \\")
    assert run(cells.as_script([(1, "quote = 'ends with\"'"), (2, 'z = quote + "\\n" + """x"""')]))["z"]


@pytest.mark.parametrize(
    ("typed", "sent"),
    [
        ("for i in x:\n    y = i\n    if y:\n        !ls\n", "for i in x:\n    y = i\n    if y:\n        pass\n"),
        ("def f():\n    files = !ls é\n    %who\n    return 1\n", "def f():\n    pass\n    pass\n    return 1\n"),
        ("if a:\n    b()\nelif get_ipython():\n    c()\nd = 1\n", "if a:\n    b()\npass\nd = 1\n"),
        ("class A:\n    @get_ipython().on\n    def f(self):\n        !ls\n", "class A:\n    pass\n"),
        ("try:\n    x = 1\nexcept E:\n    !ls\n", "try:\n    x = 1\nexcept E:\n    pass\n"),
        ("é = 'é'; get_ipython().magic('é'); z = 1\n", "é = 'é'; pass; z = 1\n"),
    ],
)
def test_a_magic_inside_a_statement_takes_nothing_else_with_it(typed: str, sent: str) -> None:
    assert cells.plain_python(typed) == sent


def test_guests_compile_a_cell_as_the_notebook_did() -> None:
    seen = "class A:\n    x: int\n{} = A.__annotations__['x']\n"
    future = "from __future__ import annotations\n"
    found = run(cells.as_script([(1, seen.format("a")), (2, future), (3, seen.format("b"))]))
    assert (found["a"], found["b"]) == (int, "int"), "from the cell with the import on, and not before it"


def test_what_the_cells_import_is_seen(tmp_path: Any) -> None:
    (tmp_path / "layers.py").touch()
    found = cells.cells_of(["", "import layers\n!ls", "from zmq import green"])
    assert imports_of(Script(names=(cells.NAME,), contents=(cells.as_python(found),)), tmp_path) == {
        "layers": "./layers.py",
        "zmq": "pyzmq",
    }


def test_a_cell_that_fails_is_passed_over_unless_the_loop_needs_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = [(1, "x = 1\nmissing.py\n"), (2, "display(x)\n"), (3, "y = x + 1\n")]
    assert run(cells.as_script(found))["y"] == 2
    assert "cell In [1] failed here: NameError: name 'missing' is not defined" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match=r"cell In \[4\] failed on this machine: FileNotFoundError: .*nowhere"):
        run(cells.as_script([(4, "data = open('/nowhere')"), (5, "print(data)")]))
    with pytest.raises(ZeroDivisionError):
        run(cells.as_script([(4, "open('/nowhere')"), (5, "1 / 0")]))


def test_the_end_of_a_run_is_not_passed_over() -> None:
    source = "from potluck.train.ending import GuestDone\nraise GuestDone('finished')"
    with pytest.raises(GuestDone):
        run(cells.as_script([(1, source), (2, "never = 1")]))

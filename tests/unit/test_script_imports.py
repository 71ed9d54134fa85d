"""What a guest must have installed to run the host's script: found in its text, and said before it runs."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

import pytest

from potluck.errors import MissingModuleError, ScriptError, UserError
from potluck.fleet import received
from potluck.fleet.script import (
    Script,
    guest_hint,
    imports_of,
    missing_here,
    not_sent,
    read_script,
    run_file,
    run_received,
)
from potluck.fleet.script_errors import running

SCRIPT = """
from __future__ import annotations
import os, sys
import torch.nn as nn
import numpy
import zmq.green
from yaml_of_nobody import load
from layers import Block
from model import build
from .near import thing
import potluck
try:
    import maybe
except ImportError:
    maybe = None
if potluck.start().is_host:
    import only_there
def later():
    import in_a_function
"""


def test_only_what_always_runs_is_looked_for(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(SCRIPT)
    (tmp_path / "model.py").write_text("import of_the_model\n")
    (tmp_path / "layers").mkdir()
    (tmp_path / "layers" / "__init__.py").write_text("")
    script = read_script(tmp_path / "job.py", [tmp_path / "model.py"])
    imports = imports_of(script, tmp_path)
    assert imports == {
        "torch": "torch",
        "numpy": "numpy",
        "zmq": "pyzmq",
        "layers": "./layers/__init__.py",
        "yaml_of_nobody": "",
        "of_the_model": "",
    }
    assert list(missing_here(imports)) == ["yaml_of_nobody", "layers", "of_the_model"]
    assert not_sent(imports) == ["layers/__init__.py"]


def test_what_is_called_like_its_package_is_found_without_a_list_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(importlib.metadata, "packages_distributions")
    (tmp_path / "job.py").write_text("import msgspec, torch, model")
    (tmp_path / "model.py").write_text("")
    found = imports_of(read_script(tmp_path / "job.py"), tmp_path)
    assert found == {"msgspec": "msgspec", "torch": "torch", "model": "./model.py"}


def test_a_script_that_python_cannot_read_is_not_this_ones_affair(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("import (")
    assert imports_of(read_script(tmp_path / "job.py"), tmp_path) == {}


def test_the_hint_is_one_command_with_the_packages_names_and_never_installs_a_file_of_ones_own() -> None:
    hint = guest_hint({"sklearn": "scikit-learn", "tiktoken": "", "model": "./model.py"})
    assert "pip install scikit-learn tiktoken   (on this machine)" in hint
    assert '"if run.is_host:"' in hint
    assert "--send model.py" in hint


def test_all_that_is_missing_is_named_at_once() -> None:
    wanted = {"torch": "torch", "no_such_a": "a-package", "no_such_b": "", "x; rm -rf /": ""}
    with pytest.raises(MissingModuleError, match=r"lacks what job\.py imports: no_such_a, no_such_b\n") as caught:
        received._check_modules("job.py", wanted)
    assert caught.value.hint.startswith("pip install a-package no_such_b ")
    for nothing in ({}, {"torch": "torch"}):
        received._check_modules("job.py", nothing)


@pytest.mark.parametrize(
    ("file", "error", "hint"),
    [
        ("net", "net is a folder, and only files can be sent", "name each of its files"),
        ("no.json", "cannot read .*no.json: No such file", "give the path of a file"),
    ],
)
def test_what_is_no_file_cannot_be_sent(tmp_path: Path, file: str, error: str, hint: str) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "job.py").write_text("")
    with pytest.raises(UserError, match=error) as caught:
        read_script(tmp_path / "job.py", [tmp_path / file])
    assert caught.value.hint == hint


def test_the_traceback_of_a_script_that_was_received_shows_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    script = Script(names=("job.py",), contents=(b"def f():\n    raise ValueError('a bug')  # here\nf()\n",))
    with pytest.raises(ScriptError), running("job.py", guest=True):
        run_received(script)
    assert "raise ValueError('a bug')  # here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wanted", "file"),
    [
        ("configurator.py", "configurator.py"),
        ("./configurator.py", "configurator.py"),
        ("conf/a.py", "conf/a.py"),
        ("/nowhere/a.py", "conf/a.py"),
    ],
)
def test_a_file_that_was_sent_and_is_looked_for_elsewhere_is_named(wanted: str, file: str) -> None:
    text = f"open({wanted!r})".encode()
    names = ("job.py", "configurator.py", "conf/a.py")
    with pytest.raises(ScriptError) as caught, running("job.py", hint=lambda: "--send", guest=True, sent=names):
        run_received(Script(names=names, contents=(text, b"", b"")))
    where = "it is next to the script: open it with Path(__file__).parent"
    assert caught.value.hint == f"{file} was sent; {where} / {file!r}"


@pytest.mark.parametrize(
    ("opened", "file"),
    [
        ("'conf.json'", "conf.json"),
        ("'./conf/a.json'", "conf/a.json"),
        ("Path(__file__).parent / 'conf.json'", "conf.json"),
        ("'/nowhere/a.json'", None),
        ("'../a.json'", None),
        ("'x; rm y'", None),
    ],
)
def test_a_file_that_was_not_sent_and_may_be_next_to_the_script_is_named(opened: str, file: str | None) -> None:
    text = f"from pathlib import Path\nopen({opened})".encode()
    with (
        pytest.raises(ScriptError) as caught,
        running("job.py", hint=lambda: "the usual", guest=True, sent=("job.py",)),
    ):
        run_received(Script(names=("job.py",), contents=(text,)))
    if file is None:
        assert caught.value.hint == "the usual"
    else:
        assert caught.value.hint is not None
        assert (
            f"potluck host SCRIPT --send {file}, and open it with Path(__file__).parent / {file!r}; for a data"
            in (caught.value.hint)
        )


def test_on_the_host_a_file_that_is_not_found_has_the_usual_hint(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text("open('conf.json')")
    with pytest.raises(ScriptError) as caught, running("job.py", hint=lambda: "the usual"):
        run_file(tmp_path / "job.py", ())
    assert caught.value.hint == "the usual"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (b"for x in rows: pass", False),
        (b"net.loss(*rows)", False),
        (b"print(f'{step.loss:.3f}')", True),
        (b"def add(x): return x + 1\nadd(step.loss)", True),
    ],
)
def test_that_a_guest_has_no_loss_is_said_where_a_loss_was_read(text: bytes, told: bool) -> None:
    made = b"class step: loss = None\nclass net: loss = print\nrows = None\n"
    script = Script(names=("job.py",), contents=(made + text,))
    with pytest.raises(ScriptError) as caught, running("job.py", guest=True):
        run_received(script)
    assert ("step.loss is None on a guest" in caught.value.hint) == told


@pytest.mark.parametrize("guest", [False, True])
def test_one_that_turns_up_missing_later_has_that_hint_and_none_about_data(
    guest: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ScriptError) as caught, running("job.py", hint=lambda: "data set", guest=guest):
        import no_such_module.part  # type: ignore[import-not-found] # noqa: F401
    assert caught.value.hint.startswith("pip install no_such_module")
    assert ("run.is_host" in caught.value.hint) == guest
    assert "data set" not in caught.value.hint
    assert "ModuleNotFoundError" in capsys.readouterr().err


def test_the_traceback_of_a_script_has_no_frames_of_potluck(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "mine.py"
    script.write_text("def f():\n    raise KeyError('x')\nf()\n")
    with pytest.raises(ScriptError, match=r"mine\.py failed with KeyError"), running("mine.py"):
        run_file(script, ())
    files = [line for line in capsys.readouterr().err.splitlines() if line.startswith("  File")]
    assert [Path(line.split('"')[1]).name for line in files] == [Path(__file__).name, "mine.py", "mine.py"]


def test_what_a_spawned_process_sends_back_is_of_the_scripts_classes(tmp_path: Path) -> None:
    """As a loader's workers on macOS and Windows. They call the script __mp_main__."""
    script = tmp_path / "script.py"
    script.write_text(
        "import multiprocessing, pickle\n"
        "class Sample: pass\n"
        "assert pickle.loads(b'c__mp_main__\\nSample\\n.') is Sample\n"
    )
    before = sys.modules.get("__mp_main__")
    run_file(script, [])
    assert sys.modules.get("__mp_main__") is before

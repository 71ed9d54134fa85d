"""The backend is known to torch after `import potluck`, in either order; neither import fails or changes what it
should not."""

from __future__ import annotations

import shutil
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from typing import Any

import pytest

from potluck.dist import registration
from support.processes import _environment

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, cwd: Path | None = None, **variables: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=55,
        env=_environment(variables),
        cwd=cwd,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("order", "autoload"),
    [
        ("import potluck, torch.distributed as d", "1"),
        ("import potluck, torch.distributed as d", "0"),
        ("import torch.distributed as d, potluck", "0"),
    ],
)
def test_the_backend_is_registered_in_either_order_and_its_names_are_there(order: str, autoload: str) -> None:
    code = f"{order}; print('POTLUCK' in d.Backend._plugins, d.Backend.backend_capability['potluck']); "
    code += "import potluck.dist as p; print([name for name in p.__all__ if getattr(p, name) is None])"
    assert run(code, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload) == "True ['cpu', 'cuda', 'mps']\n[]"


STATE = """
import atexit, builtins, locale, logging, os, signal, sys, threading, warnings
def state():
    return {
        "finders": [repr(f) for f in sys.meta_path], "hooks": len(sys.path_hooks), "path": list(sys.path),
        "environ": dict(os.environ), "folder": os.getcwd(), "at exit": atexit._ncallbacks(),
        "signals": [signal.getsignal(n) for n in sorted(signal.valid_signals())],
        "excepthooks": [sys.excepthook, threading.excepthook, sys.unraisablehook, sys.displayhook],
        "warnings": list(warnings.filters), "logging": [logging.root.level, logging.root.handlers],
        "threads": threading.active_count(), "locale": locale.setlocale(locale.LC_ALL), "tracing": sys.gettrace(),
        "builtins": sorted(vars(builtins)), "limits": [sys.getrecursionlimit(), sys.getswitchinterval()],
    }
before = state()
import potluck, potluck.dist
after = state()
print([name for name in before if before[name] != after[name]])
"""


def test_importing_potluck_changes_nothing_in_the_interpreter() -> None:
    assert run(STATE) == "[]"


# -- torch's own import

LIKE_TORCH = """
import site, sys, warnings
warnings.simplefilter("always")
from importlib.metadata import entry_points
site.addsitedir({folder!r})
for each in entry_points(group="torch.backends"):
    each.load()()
    print(each.value)
"""
"""What torch does with the entry point of an install in a folder (torch._import_device_backends)."""


def editable_install(checkout: Path, folder: Path) -> None:
    """As pip install -e does it, from a part of the source that is enough for its metadata."""
    pytest.importorskip("setuptools")
    (checkout / "src" / "potluck").mkdir(parents=True)
    for name in ("pyproject.toml", "build_backend.py", "README.md", "LICENSE", "src/_potluck_torch.py"):
        shutil.copy(ROOT / name, checkout / name)
    for name in ("__init__.py", "_version.py"):
        shutil.copy(ROOT / "src" / "potluck" / name, checkout / "src" / "potluck" / name)
    code = "import sys; sys.path.insert(0, '.'); import build_backend; build_backend.build_editable('wheels')"
    (checkout / "wheels").mkdir()
    run(code, checkout)
    (wheel,) = (checkout / "wheels").iterdir()
    with zipfile.ZipFile(wheel) as file:
        file.extractall(folder)


@pytest.mark.slow
def test_torch_can_be_imported_when_an_editable_checkout_has_moved(tmp_path: Path) -> None:
    checkout, folder = tmp_path / "checkout", tmp_path / "site"
    editable_install(checkout, folder)
    assert (folder / "_potluck_torch.py").exists()
    assert "_potluck_torch.py,sha256=" in next(folder.glob("*.dist-info/RECORD")).read_text(encoding="utf-8")
    shutil.move(checkout, tmp_path / "elsewhere")
    said = subprocess.run(
        [sys.executable, "-S", "-c", LIKE_TORCH.format(folder=str(folder))],
        capture_output=True,
        text=True,
        timeout=30,
        env={name: value for name, value in _environment({}).items() if name != "PYTHONPATH"},
        check=False,
    )
    assert said.returncode == 0, said.stderr
    assert said.stdout.strip() == "_potluck_torch:watch"
    assert "torch has no backend 'potluck': ModuleNotFoundError: No module named 'potluck'" in said.stderr
    assert "pip install -e ." in said.stderr


def test_a_torch_that_does_not_take_the_backend_is_imported_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    class Strange:
        """As of a torch that keeps its backends elsewhere."""

    module: Any = types.ModuleType(registration._C10D)
    module.Backend = Strange
    monkeypatch.setitem(sys.modules, registration._C10D, module)
    with pytest.warns(RuntimeWarning, match="did not take the backend 'potluck': AttributeError"):
        registration.watch()
    with pytest.warns(RuntimeWarning, match="did not take"):
        registration.register_if_there()


def test_importing_potluck_imports_neither_torch_nor_the_backend() -> None:
    code = (
        "import sys, potluck, potluck.dist; "
        "print([name for name in ('torch', 'numpy', 'zmq', 'potluck.dist.group') if name in sys.modules])"
    )
    assert run(code) == "[]"

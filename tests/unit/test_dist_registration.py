"""The backend is known to torch after `import potluck`, in either order, and importing potluck imports no torch."""

from __future__ import annotations

import subprocess
import sys

import pytest

from support.processes import _environment


def run(code: str) -> str:
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=55, env=_environment({}), check=False
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


@pytest.mark.parametrize(
    "order", ["import potluck, torch.distributed as d", "import torch.distributed as d, potluck"]
)
def test_the_backend_is_registered_in_either_order(order: str) -> None:
    code = f"{order}; print('POTLUCK' in d.Backend._plugins, d.Backend.backend_capability['potluck'])"
    assert run(code) == "True ['cpu', 'cuda', 'mps']"


def test_importing_potluck_imports_neither_torch_nor_the_backend() -> None:
    code = (
        "import sys, potluck, potluck.dist; "
        "print([name for name in ('torch', 'numpy', 'zmq', 'potluck.dist.group') if name in sys.modules])"
    )
    assert run(code) == "[]"


def test_the_public_names_are_there() -> None:
    code = "import potluck.dist as d; print(all(getattr(d, name) is not None for name in d.__all__), d.__all__)"
    assert run(code).startswith("True")

"""How torch learns of the backend "potluck": owns the moment of registration.

It must not import torch: it waits until somebody else has.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

NAME = "potluck"
DEVICES = ("cpu", "cuda", "mps")
_C10D = "torch.distributed.distributed_c10d"


def register() -> None:
    """Tell torch, now; a second call does nothing. What the backend needs is imported when a group is made."""
    c10d = sys.modules.get(_C10D)
    backend = getattr(c10d, "Backend", None)
    if backend is None or NAME.upper() in backend._plugins:
        return
    backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, backend_options: Any) -> Any:
    from potluck.dist.group import create

    return create(options, backend_options)


def register_if_there() -> None:
    """What `import potluck` does: it changes nothing in an interpreter that has no torch.distributed yet.

    torch calls `watch` at its own import (src/_potluck_torch.py), unless the user has forbidden it to: then it is
    called here.
    """
    if _C10D in sys.modules:
        _register_or_warn()
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        watch()


def _register_or_warn() -> None:
    """Whatever a torch of the future says to it: importing must not fail."""
    try:
        register()
    except Exception as error:
        import warnings

        text = f"torch did not take the backend 'potluck': {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def watch() -> None:
    """Register when torch.distributed is imported, be it already there or not."""
    if _C10D in sys.modules:
        _register_or_warn()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module, as the others would, and registers once it has run; then it is gone.

    Not derived from importlib.abc, whose import costs more than all of potluck's.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _C10D:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)  # type: ignore[assignment]
        return spec


class _Loader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # as if nobody had been here
        module.__loader__ = self._loader
        _register_or_warn()

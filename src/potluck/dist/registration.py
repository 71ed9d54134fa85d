"""Registers the backend "potluck" with torch, without importing torch: owns when that happens."""

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
    """Register now; a second call does nothing. The backend itself is imported when a group is made."""
    c10d = sys.modules.get(_C10D)
    backend = getattr(c10d, "Backend", None)
    if backend is None or NAME.upper() in backend._plugins:
        return
    backend.register_backend(NAME, _create, extended_api=True, devices=list(DEVICES))


def _create(options: Any, backend_options: Any) -> Any:
    from potluck.dist.group import create

    return create(options, backend_options)


def register_if_there() -> None:
    """Called by `import potluck`. Does nothing in an interpreter without torch.distributed.

    torch calls `watch` at its own import (src/_potluck_torch.py). If the user has turned that off, it is called
    here.
    """
    if _C10D in sys.modules:
        _register_or_warn()
    elif os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
        watch()


def _register_or_warn() -> None:
    """The import must not fail, whatever a future torch raises."""
    try:
        register()
    except Exception as error:
        import warnings

        text = f"torch did not take the backend 'potluck': {type(error).__name__}: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)


def watch() -> None:
    """Register when torch.distributed is imported, or at once if it is."""
    if _C10D in sys.modules:
        _register_or_warn()
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder:
    """Finds one module like the other finders, registers after it has run, and then removes itself.

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
            spec.loader = _WatchingLoader(spec.loader)  # type: ignore[assignment]
        return spec


class _WatchingLoader:
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader  # as without this finder
        module.__loader__ = self._loader
        _register_or_warn()

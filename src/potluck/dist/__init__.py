"""The torch.distributed backend: its public names. torch is imported when one of them is first used.

import potluck
torch.distributed.init_process_group("potluck")
"""

from __future__ import annotations

from typing import Any

_LAZY = {
    "Config": "potluck.dist.config",
    "compress": "potluck.dist.hooks",
    "log_metrics": "potluck.dist.counting",
    "metrics": "potluck.dist.counting",
    "reset_metrics": "potluck.dist.counting",
}

__all__ = sorted(_LAZY)


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'potluck.dist' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)

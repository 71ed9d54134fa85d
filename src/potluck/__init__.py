"""Potluck: train one PyTorch model on every machine you own. Every machine brings what it has.

The public names are loaded when they are first used: `import potluck` imports no torch.

    run = potluck.start()
    for step in run.steps(model, optimizer, dataset, global_batch=512):
        for batch in step:
            step.backward(loss_of(model, batch))
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from potluck._version import __version__
from potluck.dist import registration
from potluck.errors import PotluckError

if TYPE_CHECKING:
    from potluck.hosting import start
    from potluck.train.run import Run
    from potluck.train.step import Step

__all__ = ["PotluckError", "Run", "Step", "__version__", "start"]

_LAZY = {"Run": "potluck.train.run", "Step": "potluck.train.step", "start": "potluck.hosting"}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'potluck' has no attribute {name!r}")
    import importlib
    import random

    numbers = random.getstate()
    try:
        return getattr(importlib.import_module(_LAZY[name]), name)
    finally:
        random.setstate(numbers)  # rich draws one when it is imported, and the script may have seeded before


registration.register_if_there()  # init_process_group("potluck") works once torch and potluck have been imported


def __dir__() -> list[str]:
    return __all__

"""Excludes classes from torch.compile: owns the mark on their methods.

While a compiled function runs, Dynamo traces every Python function that is called, also from torch's C++. DDP's
reducer, within torch.compile(DistributedDataParallel(...)), calls a group's collectives.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


def untraced(marked: Class) -> Class:
    """A class decorator: torch.compile does not trace the methods and the functions that they call.

    It marks the code objects: torch._dynamo.disable() would cost every script an import and every call a detour.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for member in vars(marked).values():
            if isinstance(member, FunctionType):
                frames.set_code_exec_strategy(member.__code__, leave)
    return marked

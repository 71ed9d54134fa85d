"""What torch.compile must leave alone: owns the marks that say so.

It must not know what the marked classes do.

While a compiled function runs, Dynamo looks at every Python function that begins, also at those which torch's C++
calls: DDP's reducer, within torch.compile(DistributedDataParallel(...)), calls a group's collectives.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any, TypeVar

import torch

Class = TypeVar("Class", bound=type)


def untraced(marked: Class) -> Class:
    """A class decorator: its methods, and what they call, run as they are.

    A mark on the code, as torch._dynamo.disable() would cost every script that import, and every call a detour.
    """
    frames: Any = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    if hasattr(frames, "set_code_exec_strategy"):
        leave = frames._FrameExecStrategy(frames._FrameAction.SKIP, frames._FrameAction.SKIP)
        for member in vars(marked).values():
            if isinstance(member, FunctionType):
                frames.set_code_exec_strategy(member.__code__, leave)
    return marked

"""The reference strategies of the extras `peers` and `ray`: whether each can run here, and how a worker is started.

Imports no peer system and no torch: the workers do.
"""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path

from potluck.errors import ConfigError

HIVEMIND = "hivemind"
TORCHFT = "torchft"
RAY_SYNC, RAY_ASYNC = "ray-ps-sync", "ray-ps-async"
NAMES = (HIVEMIND, TORCHFT, RAY_SYNC, RAY_ASYNC)
_MODULES = {HIVEMIND: ("hivemind", "peers"), TORCHFT: ("torchft", "peers")}
_MODULES |= dict.fromkeys((RAY_SYNC, RAY_ASYNC), ("ray", "ray"))
"""The module that each needs, and the extra that installs it."""

_NOTES = {
    HIVEMIND: "averages in fp16; each machine computes until all together have the global batch, so that the "
    "samples are not exactly those of the others",
    TORCHFT: "shares by the true speeds, exactly weighted; averages in fp32 over gloo, without computing at the "
    "same time",
    RAY_SYNC: "the parameter server of Ray's documentation: equal batches in fp32, all gradients awaited",
    RAY_ASYNC: "as ray-ps-sync, but each gradient is applied when it comes, on weights that have changed since: "
    "not the mathematics of one machine",
}


def available() -> dict[str, str | None]:
    """For each strategy: None if it can run here, else the reason."""
    return {name: _why_not(name) for name in NAMES}


def command(strategy: str, spec: Path, rank: int) -> list[str]:
    """The arguments of the Python interpreter that start a strategy's worker on one machine."""
    if strategy not in NAMES:
        raise ConfigError(f"there is no peer strategy {strategy!r}", hint=f"there are: {', '.join(NAMES)}")
    reason = _why_not(strategy)
    if reason is not None:
        raise ConfigError(f"{strategy} cannot run here: {reason}", hint=f"leave it out, or: {install(strategy)}")
    module = "ray_ps" if strategy in (RAY_SYNC, RAY_ASYNC) else strategy
    return ["-m", f"potluck.lab.{module}_worker", "--spec", str(spec), "--rank", str(rank)]


def install(strategy: str) -> str:
    return f"pip install -e '.[{_MODULES[strategy][1]}]'"


def note(strategy: str) -> str:
    """A remark for readers of the strategy's row."""
    return _NOTES[strategy]


def _why_not(name: str) -> str | None:
    if sys.platform != "linux":
        return "it runs in network namespaces, which need Linux"
    module = _MODULES[name][0]
    if importlib.util.find_spec(module) is not None:
        return None
    if name == TORCHFT and platform.machine() != "x86_64":
        return f"torchft is published for x86-64 only, this is {platform.machine()}"
    return f"{module} is not installed"

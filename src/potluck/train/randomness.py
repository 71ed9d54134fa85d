"""The random generators that a loop's body uses: saves, seeds and compares their states.

Owns Python's and numpy's global generators and, through the device, torch's. It cannot control a generator that the
script makes itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import random
from typing import Any

import numpy as np

from potluck.device import Device

PYTHON, NUMPY = "python", "numpy"
OTHER_SEED = 0x5EED0000
"""A seed is combined with this by exclusive or, for generators that must draw other numbers."""


class RandomState:
    """The generators' states when this was made; `restore` restores them."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._of_device = device.rng_state()
        self._python: Any = random.getstate()
        self._numpy: Any = np.random.get_state()

    def restore(self) -> None:
        self._device.set_rng_state(self._of_device)
        random.setstate(self._python)
        np.random.set_state(self._numpy)


def seed(device: Device, number: int, otherwise: frozenset[str] = frozenset()) -> None:
    """Seed all generators from one number; those named in `otherwise` from another."""

    def of(name: str) -> int:
        return (number ^ OTHER_SEED if name in otherwise else number) % 2**32

    random.seed(of(PYTHON))
    with contextlib.suppress(TypeError):  # the script gave numpy a bit generator that takes no seed
        np.random.seed(of(NUMPY))
    device.seed({name: of(name) for name in device.rng_state()})


def digests(device: Device) -> dict[str, str]:
    """A short hash of each generator's state: equal on two machines that drew the same numbers since one seed."""
    states = {name: state.cpu().numpy().tobytes() for name, state in device.rng_state().items()}
    states[PYTHON] = repr(random.getstate()).encode()
    states[NUMPY] = _flat(np.random.get_state(legacy=False))
    return {name: hashlib.blake2b(state, digest_size=8).hexdigest() for name, state in states.items()}


def _flat(state: Any) -> bytes:
    if isinstance(state, dict):
        return b"|".join(_flat(state[key]) for key in sorted(state))
    return state.tobytes() if isinstance(state, np.ndarray) else repr(state).encode()

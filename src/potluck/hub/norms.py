"""Judges guests' gradients by the host's own: how large they may be, and whether host or guest was wrong.

PURE: norms in, judgements out.

A contribution that is too large or not finite does not count, and the host computes its samples itself. Only then
is the cause known: if the host gets the same result, the samples cause it, not the guest.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

RECENT_STEPS = 64
"""A guest's gradient is compared with the largest of the host's own over this many steps, because a single one may
be tiny."""
SAME = 0.01
"""If the host's norm of the same samples is at least this part of the contribution's, the results count as equal:
the norm of a guest's contribution is known only as a rough upper bound."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    guest: str
    step: int
    norm: float


class Norms:
    """Remembers the host's norms, and bad contributions whose cause is not yet known."""

    def __init__(self, bound: float) -> None:
        """`bound`: the largest norm per sample of a guest, as a multiple of the host's; 0: no limit."""
        self._bound = bound
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._suspects: list[_Suspect] = []
        self.most_a_sample = math.inf
        """The norm of a contribution, divided by its samples, up to which it counts."""

    @property
    def suspects(self) -> bool:
        """Whether a contribution waits to be judged."""
        return bool(self._suspects)

    def suspect(self, guest: str, *, step: int, norm: float) -> None:
        """A contribution to this step was dropped because of its norm; infinity: it was not finite."""
        self._suspects.append(_Suspect(guest, step, norm))

    def host_gradient(self, step: int, norm: float, samples: int) -> list[tuple[str, bool]]:
        """Add the host's own norm of a step that ended. Returns the guests judged by it, and which of them were
        wrong."""
        if math.isfinite(norm) and norm > 0 and samples > 0:
            self._recent.append(norm / samples)
            if self._bound:
                self.most_a_sample = self._bound * max(self._recent)
        due = [suspect for suspect in self._suspects if suspect.step <= step]
        self._suspects = [suspect for suspect in self._suspects if suspect.step > step]
        # Of a step whose own norm was not told nothing is known.
        return [(s.guest, math.isfinite(norm) and norm < SAME * s.norm) for s in due if s.step == step]

"""Whether a guest's gradient can be right, by the host's own: how large it may be, and who was wrong.

PURE: norms come in, judgements go out. It knows no member and no tensor.

A contribution that is too large or not finite does not count, and the host computes its samples itself. Only then
it is known whose fault it was: where the host finds the same, the samples are so.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

RECENT_STEPS = 64
"""A guest's gradient is measured by the largest of the host's own over so many steps: a step's own may be tiny."""
SAME = 0.01
"""A host that finds this part of a contribution's norm in the same samples has found the same: the norm of what a
guest sends is known only roughly, and from above."""


@dataclass(frozen=True, slots=True)
class _Suspect:
    guest: str
    step: int
    norm: float


class Norms:
    """Remembers the host's norms, and contributions of which it is not yet known whose fault they are."""

    def __init__(self, bound: float) -> None:
        """`bound`: how many times the host's own norm a sample a guest's may be; 0: as large as it is."""
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
        """A contribution to this step was dropped for its norm; infinite: it was not finite."""
        self._suspects.append(_Suspect(guest, step, norm))

    def host_gradient(self, step: int, norm: float, samples: int) -> list[tuple[str, bool]]:
        """The host's own part of a step that ended; which guests are judged by it, and who was wrong."""
        if math.isfinite(norm) and norm > 0 and samples > 0:
            self._recent.append(norm / samples)
            if self._bound:
                self.most_a_sample = self._bound * max(self._recent)
        due = [suspect for suspect in self._suspects if suspect.step <= step]
        self._suspects = [suspect for suspect in self._suspects if suspect.step > step]
        # Of a step whose own norm was not told nothing is known.
        return [(s.guest, math.isfinite(norm) and norm < SAME * s.norm) for s in due if s.step == step]

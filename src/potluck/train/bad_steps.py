"""Counts steps that were not applied because the gradient was not finite, names the cause, and ends the run after
too many.

Owns the count and the messages. Norms and losses come in as numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from potluck.hub.reasons import ONE_SAMPLE, ONE_SAMPLE_HINT
from potluck.spec.events import StepNotApplied


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFacts:
    """The facts about a step's gradient after its update."""

    step: int
    """From 1."""
    norm: float
    """Norm of the whole gradient, before clipping."""
    own_norm: float | None
    """Norm of the host's own part; None if there was no other part."""
    own_loss: float
    machines: Sequence[str]
    """The machines that contributed."""
    bad_ranks: Sequence[int] = ()
    """The host's ranks whose part was not finite; rank 0's includes the guests' contributions."""
    count: float = 1.0
    """Number of samples or items that the gradient is the mean of."""
    sizes: Sequence[int] = ()
    """The host's micro-batches."""


def how_to_go_on(saved: int | None, resume: str | None, *, by_trainer: bool) -> str:
    """The error after too many of them. `saved`: the step of the last checkpoint; `resume`: the command that
    resumes."""
    if by_trainer:
        return "resume from one of the trainer's own checkpoints, with a smaller learning rate"
    if resume is None:
        return "a script started with plain python keeps no checkpoints, one started by potluck host does"
    if saved is None:
        return "nothing was saved yet: start it again, with a smaller learning rate or with clip_norm"
    return f"resume from the last good checkpoint, of step {saved}: {resume}"


class BadSteps:
    """Counts them in one run of the host."""

    def __init__(self, host: str, *, most: int) -> None:
        """`most` in a row end the run; 0: no number does."""
        self._host, self._most = host, most
        self.in_a_row = 0
        self.all = 0
        self._last = ""
        self.hint = ""
        """What may have caused the last one, and what to do; empty: not known."""

    def good(self) -> None:
        self.in_a_row = 0

    def bad(self, facts: StepFacts) -> StepNotApplied:
        """Count a step that was not applied. Returns its event."""
        self.in_a_row += 1
        self.all += 1
        machine, reason = self._cause(facts)
        self.hint = ONE_SAMPLE_HINT if reason.endswith(ONE_SAMPLE) else ""
        self._last = reason if machine is None else f"{machine}'s {reason}"
        return StepNotApplied(
            step=facts.step, machine=machine, reason=reason, in_a_row=self.in_a_row, so_far=self.all
        )

    @property
    def enough(self) -> str | None:
        """Why the run should end, or None."""
        if not self._most or self.in_a_row < self._most:
            return None
        steps = "1 step was" if self.in_a_row == 1 else f"{self.in_a_row} steps in a row were"
        return f"{steps} not applied, the last because {self._last}"

    def _cause(self, facts: StepFacts) -> tuple[str | None, str]:
        """The machine that caused it (None if no single one did), and the cause."""
        if not facts.count:
            return None, "there was nothing to take the mean of: items=0 for every batch of the step"
        own = facts.norm if facts.own_norm is None else facts.own_norm
        single = f"; {ONE_SAMPLE}" if 1 in facts.sizes and len(facts.sizes) + len(facts.machines) > 2 else ""
        others = [rank for rank in facts.bad_ranks if rank or not math.isfinite(own)]
        if facts.bad_ranks and others:
            ranks = " and ".join(f"rank {rank}" for rank in others)
            return self._host, f"own gradient is not finite, on {ranks}{single}"
        if not math.isfinite(own):
            loss = "" if math.isfinite(facts.own_loss) else f", its loss is {facts.own_loss}"
            return self._host, f"own gradient is not finite: its norm is {own}{loss}{single}"
        if len(facts.machines) > 1:
            who = ", ".join(facts.machines)
            return None, f"the sum of the gradients of {who} is too large for a number"
        return self._host, f"gradient is not finite as before_update leaves it: its norm is {facts.norm}"

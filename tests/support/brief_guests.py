"""Two guests that come and go while a trainer hosts in this process; for the tests of the trainers' integrations.

    with brief_guests(tmp_path, JOB) as guests:
        train(run=guests.run, after_each_step=guests.after_step)     # until after_step returns True
    guests.assert_came_and_went()

Nothing here counts on a number of steps: on a busy machine a guest may sit out for many. The training goes on until
both have helped, and the plain training that it is compared with ends after as many steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import potluck
from potluck.train.run import Run
from support.fleet import TORCH_STARTS_S, Event, Fleet

MOST_STEPS = 200
"""The plain trainings end here too, so their schedules are the same."""
TOGETHER = 2
"""Steps to which both guests contribute."""
INTERRUPTED = 130


class BriefGuests:
    """ann and bob join while the training runs; ann leaves first, then bob, and the host goes on alone."""

    def __init__(self, fleet: Fleet, run: Run) -> None:
        self.run = run
        self.steps: list[Event] = []
        """Those of the run, once it is over."""
        self.left: dict[str, int] = {}
        """The steps after which they left."""
        self._fleet = fleet
        self._guests = {
            name: fleet.guest(name, "--device", "paced:0.03", "--micro-batch", size)
            for name, size in (("ann", "3"), ("bob", "2"))
        }

    def after_step(self, step: int) -> bool:
        """Whether they have come and gone, and the host has trained alone since."""
        if step == 3:
            for guest in self._guests.values():
                guest.wait_until(lambda guest=guest: "ready" in guest.stdout(), 2 * TORCH_STARTS_S, "its script")
        steps_with = self._fleet.steps_with
        if "ann" not in self.left:
            if len(set(steps_with("ann")) & set(steps_with("bob"))) >= TOGETHER:
                self._leaves("ann", step)
        elif "bob" not in self.left:
            if max(steps_with("bob")) > self.left["ann"]:
                self._leaves("bob", step)
        else:
            return step >= self.left["bob"] + 2
        return False

    def _leaves(self, name: str, step: int) -> None:
        self.left[name] = step
        self._guests[name].interrupt()
        self._guests[name].wait(20)

    def ended(self) -> None:
        """Look at the run folder while it is there."""
        self.steps = self._fleet.steps()
        for guest in self._guests.values():
            assert guest.returncode == INTERRUPTED, guest.tails()
        assert not list(self._fleet.folder.glob("checkpoints/*")), "the trainer saves, Potluck does not"

    def assert_came_and_went(self, sizes: list[int]) -> None:
        """`sizes`: the samples of the steps of an epoch."""
        whole = (sizes * len(self.steps))[: len(self.steps)]
        assert [sum(e["samples"].values()) for e in self.steps] == whole
        for name, left in self.left.items():
            helped = [e["step"] for e in self.steps if e["samples"].get(name)]
            assert 3 < min(helped) <= max(helped) <= left < len(self.steps)


@contextmanager
def brief_guests(folder: Path, job: Path) -> Iterator[BriefGuests]:
    """`job` is the script that the guests run."""
    with Fleet(folder) as fleet:
        run = potluck.start(
            host=True,
            bind="127.0.0.1",
            codec="none",
            runs=fleet.runs,
            script=job,
            view="quiet",
            device="paced:0.03",
            threads=1,
            micro_batch=2,
        )
        guests = BriefGuests(fleet, run)
        yield guests
        guests.ended()

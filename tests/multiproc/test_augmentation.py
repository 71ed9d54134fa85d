"""Random augmentation: guests that compute what the host computes are let in, those that do not are refused."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from support import augmented_job
from support.fleet import Fleet
from support.processes import TestProcess

JOB = Path(augmented_job.__file__)
BATCH = augmented_job.BATCH
DEVICE = ["--device", "paced:0.01", "--micro-batch", "4"]
REFUSED = 3

EVERY_KIND = ["random", "numpy", "torch"]
"""One run with all of them: it fails where any of them is not the same on host and guest."""
CASES: dict[str, list[str]] = {
    "sent": ["--read", *EVERY_KIND, "--body", *EVERY_KIND, "--dropout", "0.5"],
    "local": ["--read", *EVERY_KIND, "--body", "torch", "--data", "local", "--workers", "2"],
    "own": ["--body", "own"],
}
MATCHED = ["sent", "local"]
WRONG = {"sent": ("twice", "noise"), "own": ("opposite", "noise")}
"""Guests whose gradients are wrong, in the runs of some cases."""


class Case:
    """One run with a good guest, and perhaps some that are not."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.until = folder / "enough"
        self.fleet = Fleet(folder)

    def start(self) -> None:
        words = [*CASES[self.name], "--until", str(self.until)]
        self.host = self.fleet.host(JOB, *DEVICE, arguments=words)
        self.ann = self.fleet.guest("ann", *DEVICE)
        self.wrong: dict[str, TestProcess] = {
            how: self.fleet.guest(how, *DEVICE, env={"SPOIL": how}) for how in WRONG.get(self.name, ())
        }

    def finish(self) -> None:
        """Until everybody was let in or refused, and who was let in has helped."""
        fleet = self.fleet
        fleet.wait_for(
            self.host,
            lambda: fleet.events("guest_joined", "ann") or fleet.events("guest_refused", "ann"),
            "verdict about ann",
        )
        if fleet.events("guest_joined", "ann"):
            fleet.wait_for(self.host, lambda: fleet.steps_with("ann"), "a contribution of ann")
        for how, guest in self.wrong.items():
            fleet.wait_for(
                self.host,
                lambda how=how: fleet.events("guest_joined", how) or fleet.events("guest_refused", how),
                f"verdict about {how}",
            )
            if fleet.events("guest_refused", how):
                guest.wait(deadline_s=20)
        self.until.touch()
        self.host.succeeds(deadline_s=20)
        self.ann.wait(deadline_s=20)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All runs at the same time, once; the tests look at what came of them."""
    found = {name: Case(name, tmp_path_factory.mktemp(name)) for name in CASES}
    with ExitStack() as stack:
        for case in found.values():
            stack.enter_context(case.fleet)
            case.start()
        for case in found.values():
            case.finish()
    return found


pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


@pytest.mark.parametrize("name", MATCHED)
def test_host_and_guest_compute_the_same_though_the_loop_draws_random_numbers(
    cases: dict[str, Case], name: str
) -> None:
    fleet = cases[name].fleet
    assert not fleet.events("guest_refused", "ann")
    (joined,) = fleet.events("guest_joined", "ann")
    assert joined["parity"] > 0.999
    assert "spread" not in joined
    assert fleet.steps_with("ann")
    fleet.assert_every_step_is_full(global_batch=BATCH)


def test_random_numbers_of_the_scripts_own_are_judged_by_the_hosts_spread_and_everybody_is_told(
    cases: dict[str, Case],
) -> None:
    case = cases["own"]
    (joined,) = case.fleet.events("guest_joined", "ann")
    assert joined["spread"] < 0.98
    (note,) = [e["text"] for e in case.fleet.events("note", "ann")]
    assert "random numbers that differ between the host and ann" in note
    assert note in case.ann.stdout()
    assert f"the host's own {joined['spread']:.5f}" in case.host.stdout()
    case.fleet.assert_every_step_is_full(global_batch=BATCH)


@pytest.mark.parametrize(("name", "how"), [(name, how) for name in WRONG for how in WRONG[name]])
def test_a_guest_that_is_really_wrong_is_refused_all_the_same(cases: dict[str, Case], name: str, how: str) -> None:
    case = cases[name]
    assert not case.fleet.events("guest_joined", how)
    (refused,) = case.fleet.events("guest_refused", how)
    assert "its gradient differs from the host's on the same batch" in refused["reason"]
    assert case.wrong[how].returncode == REFUSED
    error = case.wrong[how].stderr()
    assert "hint: " in error
    assert "random numbers" in error
    assert ("what the host computes twice is the same" in error) == (name != "own")

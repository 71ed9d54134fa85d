"""The lab's figures, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from typing import Any, ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from potluck.checked import to_json
from potluck.lab.figures import ideal_speedup, mean_step_s, results, row
from potluck.spec.outcome import Outcome, StepDone
from potluck.spec.results import Results, Row
from potluck.spec.rig import Machine, Rig, SpeedChange, Workload, parse

DESK = Machine(name="desk", role="host", seconds_per_sample=0.1)
LAPTOP = Machine(name="laptop", seconds_per_sample=0.4, link_mbit=40)
PAIR = Rig(name="pair", workload=Workload(global_batch=50, steps=4), machines=(DESK, LAPTOP))
ALONE = {"desk": 10.0, "laptop": 2.5}
HOST_STEP_S = 5.0


def done(step: int, ended_at: float, samples: dict[str, int], present: tuple[str, ...] | None = None) -> StepDone:
    here = tuple(samples) if present is None else present
    return StepDone(step=step, ended_at=ended_at, step_s=1.0, loss=5.0 - step, samples=samples, present=here)


def outcome(*ended_at: float, **more: Any) -> Outcome:
    steps = [done(n, at, {"desk": 40, "laptop": 10}) for n, at in enumerate(ended_at, 1)]
    return Outcome(strategy="potluck", started_at=100.0, steps=steps, **more)


def test_a_box_without_time_for_the_rig_is_told() -> None:
    """The host alone is paced at 5 s a step. What delays it delays each row by another amount."""

    def notes(host_step_s: float, rig: Rig = PAIR) -> dict[str, str]:
        return results(rig, [outcome(110.0, 114.0, 118.5, 122.5)], ALONE, host_step_s, 1).notes

    assert notes(5.1) == notes(6.2) == {}
    assert list(notes(24.0)) == ["solo"]
    assert notes(24.0)["solo"].startswith("its steps took 4.8 times what the rig says: this box is too slow")
    real = replace(PAIR, machines=(replace(DESK, seconds_per_sample=None), LAPTOP))
    assert notes(24.0, real) == {}


class TestSteady:
    # Warm-up ends at 110; three steps of 4 s and 4.5 s and 4 s follow.
    FLEET = outcome(110.0, 114.0, 118.5, 122.5)

    def test_a_row(self) -> None:
        got = row(PAIR, self.FLEET, ALONE, HOST_STEP_S, 1)
        step_s = 12.5 / 3
        assert got.strategy == "potluck"
        assert got.step_s == pytest.approx(step_s)
        assert got.samples_per_s == pytest.approx(150 / 12.5)
        assert got.speedup == pytest.approx(5.0 / step_s)  # 1.2
        assert got.efficiency == pytest.approx(12 / 12.5)
        assert got.recovery == pytest.approx(0.2 / 0.25)
        assert got.loss == 1.0
        assert got.samples_per_step == (50, 50)
        assert got.bytes_per_step is None

    def test_without_warm_up_time_begins_with_training(self) -> None:
        assert mean_step_s(self.FLEET, 0) == pytest.approx(22.5 / 4)

    def test_the_host_alone(self) -> None:
        steps = [done(n, 100 + 5.0 * n, {"desk": 50}) for n in range(1, 5)]
        alone = row(PAIR, Outcome(strategy="solo", started_at=100.0, steps=steps), ALONE, HOST_STEP_S, 1)
        assert alone.speedup == pytest.approx(1.0)
        assert alone.efficiency == pytest.approx(0.8)
        assert alone.recovery == pytest.approx(0.0)

    def test_samples_are_counted_in_the_warm_up_too(self) -> None:
        steps = [done(1, 110.0, {"desk": 49}), *self.FLEET.steps[1:3], done(4, 122.5, {"desk": 40, "laptop": 11})]
        got = row(PAIR, replace(self.FLEET, steps=steps), ALONE, HOST_STEP_S, 1)
        assert got.samples_per_step == (49, 51)
        assert got.samples_per_s == pytest.approx(151 / 12.5)

    def test_the_ideal_is_from_what_was_measured(self) -> None:
        assert ideal_speedup(PAIR, ALONE) == pytest.approx(1.25)
        assert ideal_speedup(PAIR, {"desk": 10.0, "laptop": 2.0}) == pytest.approx(1.2)

    def test_and_else_from_the_rig(self) -> None:
        assert ideal_speedup(PAIR) == pytest.approx(1.25)
        assert ideal_speedup(PAIR, {"desk": 9.0}) == pytest.approx(1.25)
        nobody_knows = replace(PAIR, machines=(DESK, Machine(name="laptop")))
        assert ideal_speedup(nobody_knows) is None
        assert ideal_speedup(nobody_knows, ALONE) == pytest.approx(1.25)


class TestBytes:
    def test_between_the_readings_in_a_straight_line(self) -> None:
        # 2 MB/s from 100 to 110 and 1 MB/s then: at 105 there were 10 MB, at 118.5 28.5 MB.
        readings = [(100.0, 0), (110.0, 20_000_000), (120.0, 30_000_000), (130.0, 30_000_000)]
        fleet = outcome(105.0, 114.0, 118.5, host_bytes=readings)
        assert row(PAIR, fleet, ALONE, HOST_STEP_S, 1).bytes_per_step == pytest.approx(18.5e6 / 2)

    def test_outside_the_readings_nothing_is_made_up(self) -> None:
        fleet = outcome(105.0, 114.0, 125.0, host_bytes=[(110.0, 5), (120.0, 25)])
        assert row(PAIR, fleet, ALONE, HOST_STEP_S, 1).bytes_per_step == pytest.approx(20 / 2)

    def test_one_reading(self) -> None:
        assert row(PAIR, outcome(105.0, 114.0, host_bytes=[(110.0, 5)]), ALONE, 5.0, 1).bytes_per_step == 0


class TestNotSteady:
    """A guest of half the host's speed, a quarter from step 4 on; another of a quarter, gone in step 3."""

    MOODY = Machine(
        name="moody",
        seconds_per_sample=0.2,
        speed_changes=(SpeedChange(at_step=4, seconds_per_sample=0.4),),
    )
    GOING = Machine(name="going", seconds_per_sample=0.4, leave_at_step=3, return_at_step=4)
    RIG = Rig(name="r", workload=Workload(global_batch=60, steps=4), machines=(DESK, MOODY, GOING))
    SPEEDS: ClassVar = {"desk": 10.0, "moody": 5.0, "going": 2.5}

    def fleet(self, present: list[tuple[str, ...]]) -> Outcome:
        ended = [104.0, 108.0, 113.0, 118.0]
        steps = [done(n, at, {"desk": 60}, here) for n, (at, here) in enumerate(zip(ended, present), 1)]
        return Outcome(strategy="potluck", started_at=100.0, steps=steps)

    def test_efficiency_is_against_the_speeds_of_the_moment(self) -> None:
        everyone = ("desk", "moody", "going")
        fleet = self.fleet([everyone, everyone, ("desk", "moody"), everyone])
        # Steps 2 to 4: 4 s at 10 + 5 + 2.5, 5 s at 10 + 5, 5 s at 10 + 2.5 + 2.5.
        possible = 4 * 17.5 + 5 * 15 + 5 * 15
        assert row(self.RIG, fleet, self.SPEEDS, 6.0, 1).efficiency == pytest.approx(180 / possible)

    def test_a_guest_that_is_late_to_return_does_not_count_yet(self) -> None:
        everyone = ("desk", "moody", "going")
        fleet = self.fleet([everyone, everyone, ("desk", "moody"), ("desk", "moody")])
        possible = 4 * 17.5 + 5 * 15 + 5 * 12.5
        assert row(self.RIG, fleet, self.SPEEDS, 6.0, 1).efficiency == pytest.approx(180 / possible)

    def test_machines_that_a_strategy_does_without_count_while_the_rig_has_them(self) -> None:
        alone = self.fleet([("desk",)] * 4)
        possible = 4 * 17.5 + 5 * 15 + 5 * 15
        assert row(self.RIG, alone, self.SPEEDS, 6.0, 1).efficiency == pytest.approx(180 / possible)

    def test_the_ideal_averages_times_over_the_measured_steps(self) -> None:
        # A step of the host alone takes 1; those of all: 1/1.75, 1/1.5, 1/1.5.
        expected = 3 / (1 / 1.75 + 1 / 1.5 + 1 / 1.5)
        assert ideal_speedup(self.RIG, self.SPEEDS, 1) == pytest.approx(expected)
        assert ideal_speedup(self.RIG, None, 1) == pytest.approx(expected)

    def test_a_perfect_fleet_has_efficiency_and_recovery_1(self) -> None:
        everyone = ("desk", "moody", "going")
        steps, at = [], 100.0
        for n, (speed, here) in enumerate(
            [(17.5, everyone), (17.5, everyone), (15, ("desk", "moody")), (15, everyone)], 1
        ):
            at += 60 / speed
            steps.append(done(n, at, {"desk": 60}, here))
        got = row(self.RIG, Outcome(strategy="x", started_at=100.0, steps=steps), self.SPEEDS, 6.0, 1)
        assert got.efficiency == pytest.approx(1)
        assert got.recovery == pytest.approx(1)
        assert got.speedup == pytest.approx(ideal_speedup(self.RIG, self.SPEEDS, 1))


class TestMissing:
    def test_no_step_at_all(self) -> None:
        got = row(PAIR, Outcome(strategy="ddp", started_at=0.0, steps=[]), ALONE, HOST_STEP_S, 4)
        assert got == Row(
            strategy="ddp",
            step_s=None,
            samples_per_s=None,
            speedup=None,
            efficiency=None,
            recovery=None,
            bytes_per_step=None,
            loss=None,
            samples_per_step=None,
        )

    def test_only_warm_up(self) -> None:
        got = row(PAIR, outcome(105.0), ALONE, HOST_STEP_S, 4)
        assert got.step_s is None
        assert got.speedup is None
        assert got.samples_per_step == (50, 50)

    def test_cut_short_it_has_a_shorter_warm_up_and_no_final_loss(self) -> None:
        """Three of the rig's steps: one to warm up, two to measure; the loss of another step is no comparison."""
        got = row(PAIR, outcome(105.0, 115.0, 125.0), ALONE, HOST_STEP_S, 4)
        assert got.step_s == pytest.approx(10.0)
        assert got.loss is None

    @pytest.mark.parametrize("alone", [{}, {"desk": 10.0}, {"desk": 10.0, "laptop": math.nan}, {"desk": 0.0}])
    def test_a_machine_that_was_not_measured(self, alone: dict[str, float]) -> None:
        got = row(PAIR, TestSteady.FLEET, alone, HOST_STEP_S, 1)
        assert got.efficiency is None
        assert got.recovery == pytest.approx(0.8)  # the rig's own speeds say what could be gained
        assert got.speedup == pytest.approx(1.2)

    def test_no_guests_no_recovery(self) -> None:
        alone = replace(PAIR, machines=(DESK,))
        got = row(alone, TestSteady.FLEET, {"desk": 10.0}, HOST_STEP_S, 1)
        assert got.recovery is None

    def test_a_loss_that_is_no_number(self) -> None:
        last = replace(TestSteady.FLEET.steps[-1], loss=math.nan)
        fleet = replace(TestSteady.FLEET, steps=[*TestSteady.FLEET.steps[:-1], last])
        assert row(PAIR, fleet, ALONE, HOST_STEP_S, 1).loss is None


class TestJson:
    KEYS = (
        *("strategy", "step_s", "samples_per_s", "speedup", "efficiency"),
        *("recovery", "bytes_per_step", "loss", "samples_per_step", "predicted_s"),
    )

    def measured(self) -> Results:
        failed = Outcome(strategy="ddp", started_at=0.0, steps=[], note="failed: no")
        fleet = [TestSteady.FLEET, failed]
        return results(PAIR, fleet, ALONE, HOST_STEP_S, 1, "network namespaces")

    def test_the_shape_is_the_issues(self) -> None:
        table = json.loads(to_json(self.measured()))
        assert list(table)[:3] == ["rig", "rows", "ideal_speedup"]
        assert [tuple(r) for r in table["rows"]] == [self.KEYS, self.KEYS]
        assert table["rows"][0]["samples_per_step"] == [50, 50]
        assert table["rows"][1]["step_s"] is None
        assert table["ideal_speedup"] == pytest.approx(1.25)
        assert parse(table["rig"]) == PAIR
        assert table["warm_up_steps"] == 1
        assert table["rig"]["workload"]["steps"] == 4
        assert table["alone"] == ALONE
        assert table["box"] == "network namespaces"
        assert table["notes"] == {"ddp": "failed: no"}
        assert table["gradient_ratio"].keys() == {"laptop"}

    def test_rows_come_back(self) -> None:
        for one in self.measured().rows:
            assert msgspec.json.decode(to_json(one), type=Row) == one

    def test_what_is_not_finite_is_null(self) -> None:
        odd = replace(self.measured(), alone={"desk": math.inf, "laptop": 1.0})
        assert json.loads(to_json(odd))["alone"] == {"desk": None, "laptop": 1.0}

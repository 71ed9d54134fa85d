"""Verdicts and levers, sweeps and scales: what is said, and that it is what the model says when it is run again."""

from __future__ import annotations

import math

import msgspec
import pytest
from msgspec.structs import replace

from potluck.checked import to_json
from potluck.errors import ConfigError
from potluck.plan import advice, fleet_inputs, models, scale, variation
from potluck.plan.hub import potluck
from potluck.plan.rank_strategies import fastest_alone_s
from potluck.report import plan_table
from potluck.spec.config import MOST_GUESTS
from potluck.spec.fleet import Fleet, FleetMachine, Job, Plan

HOST = FleetMachine(name="desk", samples_per_s=10.0)
LAPTOP = FleetMachine(name="laptop", samples_per_s=2.5, link_bytes_per_s=5e6)
PAIR = Fleet(machines=(HOST, LAPTOP))
JOB = Job(name="job", parameters=5_000_000, batch=100, tokens_per_sample=128)


def catalogue(words: list[str], model: str = "gpt2-124m", tokens: int | None = None) -> tuple[Job, Fleet]:
    found = models.find(model)
    return found.job(models.batch_of(found, tokens, None)), fleet_inputs.from_words(words, found).fleet


def test_bring_the_laptop() -> None:
    found = advice.plan(JOB, PAIR)
    row = found.row("potluck")
    assert row.speedup > 1.2
    assert found.verdict.startswith(f"bring laptop: {row.speedup:.2f}×.")
    assert "With DDP, even balanced by hand, it would be slower than alone" in found.verdict
    best = max((found.row(name) for name in ("ddp-overlap", "ddp-bf16", "ddp-int8")), key=lambda row: row.speedup)
    assert f"the best of its variants, {best.strategy}: {best.speedup:.2f}×." in found.verdict


def test_do_not_bother_and_what_would_help() -> None:
    thin = PAIR.changed("laptop", link_bytes_per_s=0.2e6)
    found = advice.plan(JOB, thin)
    best = found.levers[0]
    assert found.verdict.startswith(f"do not bother: 1.00×; {best.what} makes it {best.speedup:.2f}×")
    assert "To hide the link a step needs about" in found.verdict


def test_a_lever_is_the_model_run_again() -> None:
    thin = PAIR.changed("laptop", link_bytes_per_s=0.2e6)
    lever = next(lv for lv in advice.levers(JOB, thin, potluck(JOB, thin)) if lv.what == "1GbE for laptop")
    faster = thin.changed("laptop", link_bytes_per_s=117.5e6, latency_s=5e-5)
    assert lever.speedup == pytest.approx(fastest_alone_s(JOB, thin) / potluck(JOB, faster).step_s)
    assert lever.gain == pytest.approx(lever.speedup / potluck(JOB, thin).speedup)


def test_levers_come_in_the_order_of_their_worth_and_none_is_worthless() -> None:
    job, fleet = replace(JOB, codec="none"), PAIR.changed("laptop", link_bytes_per_s=1e6)
    found = advice.levers(job, fleet, potluck(job, fleet))
    gains = [round(lever.gain, 3) for lever in found]
    assert gains == sorted(gains, reverse=True)
    assert min(gains) >= 1.005
    assert any(lever.what == "codec int4" for lever in found)


def test_another_host_is_a_lever() -> None:
    swapped = PAIR.changed("laptop", link_bytes_per_s=0.3e6).hosted_by("laptop")
    found = advice.levers(JOB, swapped, potluck(JOB, swapped))
    assert any(lever.what == "make desk the host" for lever in found)


def test_leaving_a_machine_out_is_a_lever_where_it_crowds_the_link() -> None:
    job, pair = catalogue(["desk=RTX 4070", "mac=M2,link=1GbE"])
    fleet = scale.many(pair, 40)
    now = potluck(job, fleet)
    fewer = next(lever for lever in advice.levers(job, fleet, now) if lever.what == "only the 32 fastest guests")
    assert fewer.speedup > 1.1 * now.speedup


def test_a_cluster_is_told_to_use_ddp() -> None:
    words = [f"n{i}=H100,link=400G RoCE" for i in range(8)]
    found = advice.plan(*catalogue(words, "gpt2-760m"))
    assert found.verdict.startswith("use ddp: ")  # equal machines: the plainest of those that are equally fast
    assert found.row("ddp").speedup > 7


def test_a_lever_is_no_help_where_potluck_stays_slower_than_what_is_recommended() -> None:
    found = advice.plan(*catalogue([f"{name}=8xMI300X,intra=xGMI,link=400G RoCE" for name in "ab"]))
    assert found.verdict.startswith("use ddp: ")
    now = potluck(found.job, found.fleet)
    assert any(lever.what.startswith("codec topk") for lever in advice.levers(found.job, found.fleet, now))
    assert found.levers == ()


def test_one_machine() -> None:
    alone = Fleet(machines=(HOST,))
    found = advice.plan(JOB, alone)
    assert found.verdict.startswith("one machine has nothing to share with. Add a second: --machine ")
    assert {row.strategy: round(row.speedup, 6) for row in found.rows}["potluck"] == 1.0


def test_a_plan_round_trips_through_json() -> None:
    found = advice.plan(JOB, PAIR, ("ddp", "potluck"), ("an assumption",))
    assert [row.strategy for row in found.rows] == ["solo", "ddp", "potluck"]
    assert msgspec.json.decode(to_json(found), type=Plan) == found


def test_the_batch_that_the_design_names() -> None:
    """A 4070-class host at 1 GbE with int4: 30,000 to 45,000 tokens a step."""
    job, fleet = catalogue(["desk=RTX 4070", "mac=M2,link=1GbE"])
    assert 30_000 <= advice.least_batch(job, fleet, fleet.guests[0]) * 1024 <= 45_000


class TestSweep:
    def test_it_starts_to_pay_where_the_model_says(self) -> None:
        found = variation.sweep(JOB, PAIR, variation.parse("link_mbit=0.1:1000"))
        assert found.pays_from is not None
        below, above = (
            potluck(*variation.changed(JOB, PAIR, "link_mbit", found.pays_from * factor)).speedup
            for factor in (0.999, 1)
        )
        assert below < variation.PAYS <= above
        assert found.pays_from in [point.value for point in found.points]
        values = [point.value for point in found.points]
        assert values == sorted(values)
        assert (values[0], values[-1]) == (0.1, pytest.approx(1000))

    def test_nowhere(self) -> None:
        slow = PAIR.changed("laptop", samples_per_s=0.01)
        assert variation.sweep(JOB, slow, variation.parse("link_mbit=1:1000:4")).pays_from is None

    @pytest.mark.parametrize(
        ("word", "last"), [("guests=1:8", 8), ("batch_tokens=256:100000", 100_000), ("parameters=10k:100M", 1e8)]
    )
    def test_other_things(self, word: str, last: float) -> None:
        found = variation.sweep(JOB, PAIR, variation.parse(word))
        assert found.points[-1].value == last
        assert all(1 - 1e-9 <= p.speedup["potluck"] <= p.ideal + 1e-9 for p in found.points)

    def test_too_many_guests_are_said_and_a_smaller_number_is_as_good_as_the_scale_has_it(self) -> None:
        job, fleet = catalogue(["desk=RTX 4070", "mac=M2 Max,link=1GbE"])
        found = variation.sweep(job, fleet, variation.parse("guests=1:24:24"))
        assert found.crowded_from is not None
        best = max(point.speedup["potluck"] for point in found.points)
        at_best = scale.scale(job, fleet, 24).rows[-1]
        assert best == pytest.approx(at_best.flat, rel=0.03)
        assert found.crowded_from == pytest.approx(at_best.helping, abs=3)
        text = " ".join(line.plain for line in plan_table.sweep_lines(found, 80))
        assert "they overload its link" in text
        assert "1 guest " in text + " "
        assert variation.sweep(job, fleet, variation.parse("guests=1:4")).crowded_from is None

    def test_a_larger_model_takes_longer_to_compute_and_to_send(self) -> None:
        job, fleet = variation.changed(JOB, PAIR, "parameters", 10 * JOB.parameters)
        assert job.gradient_bytes == 10 * JOB.gradient_bytes
        assert fleet.host.samples_per_s == pytest.approx(HOST.samples_per_s / 10)

    @pytest.mark.parametrize(
        "word",
        [
            "link_mbit",
            "link_mbit=5",
            "link_mbit=9:5",
            "link_mbit=0:5",
            "lnk=1:2",
            "guests=1:1e9",
            "guests=1:4:1",
            "guests=1:M",
            "parameters=1M:10X",
            "a",
        ],
    )
    def test_wrong_sweeps(self, word: str) -> None:
        with pytest.raises(ConfigError) as wrong:
            variation.parse(word)
        assert wrong.value.hint


class TestScale:
    def test_the_hub_is_full_where_one_more_guest_does_not_help(self) -> None:
        job, fleet = catalogue(["desk=RTX 4070", "mac=M2,link=1GbE"])
        found = scale.scale(job, fleet, 1024)
        assert [row.guests for row in found.rows] == [2**i for i in range(11)]
        full = found.full_at
        assert full is not None
        before, here, after = (scale.flat_s(job, fleet, n, 1024) for n in (full - 1, full, full + 1))
        assert here < before
        assert here <= after
        assert found.rows[-1].helping <= full
        assert found.rows[-1].tree > found.rows[-1].flat
        assert "a tree of hubs" in found.words

    def test_no_more_guests_help_than_a_run_admits(self) -> None:
        job, fleet = catalogue(["desk=RTX 4070,link=10GbE", "pi=0.05TFLOPS,link=1GbE"])
        huge = job.with_batch(64 * job.batch)
        found = scale.scale(huge, fleet, 1024)
        assert found.full_at == MOST_GUESTS
        assert max(row.helping for row in found.rows) == MOST_GUESTS
        assert f"a run admits {MOST_GUESTS}" in found.words
        shares = potluck(huge, scale.many(fleet, 2 * MOST_GUESTS)).shares
        assert sum(share > 0 for share in shares.values()) == 1 + MOST_GUESTS

    def test_few_guests_are_as_the_whole_model_has_them(self) -> None:
        job, fleet = catalogue(["desk=RTX 4070", "mac=M2,link=1GbE"])
        for row in scale.scale(job, fleet, 8).rows:
            whole = potluck(job, scale.many(fleet, row.guests)).speedup
            assert row.flat == pytest.approx(whole, rel=0.02)
            assert row.flat <= row.ideal

    def test_a_mixed_fleet_takes_its_guests_in_turn(self) -> None:
        job, fleet = catalogue(["desk=RTX 4070,link=10GbE", "mac=M2,link=1GbE", "pc=RTX 3060,link=1GbE"])
        guests = [g.device for g in scale.many(fleet, 5).guests]
        assert sorted(guests) == ["M2", "M2", "RTX 3060", "RTX 3060", "M2"] or len(set(guests)) == 2
        assert scale.scale(job, fleet, 64).rows[-1].flat > 1

    def test_nobody_helps_over_a_thread(self) -> None:
        thin = PAIR.changed("laptop", link_bytes_per_s=100.0)
        found = scale.scale(JOB, thin, 16)
        assert found.full_at == 0
        assert {round(row.flat, 9) for row in found.rows} == {1.0}

    def test_levels(self) -> None:
        assert [scale.levels_of(n, 2) for n in (1, 2, 3, 6, 7, 14)] == [1, 1, 2, 2, 3, 3]
        assert scale.levels_of(1024, 32) == 2

    @pytest.mark.parametrize("most", [0, 10**6])
    def test_wrong_numbers(self, most: int) -> None:
        with pytest.raises(ConfigError):
            scale.scale(JOB, PAIR, most)

    def test_it_is_quick_and_finite_at_1024(self) -> None:
        found = scale.scale(JOB, PAIR, 1024)
        assert all(math.isfinite(row.tree) and row.tree >= row.flat for row in found.rows)

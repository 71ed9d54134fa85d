"""The cost models of the strategies: against values worked out by hand, and what must hold for every fleet."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from potluck.errors import ConfigError
from potluck.plan import hub
from potluck.plan import rank_strategies as models
from potluck.plan.predict import check_strategies, predict
from potluck.spec.fleet import STRATEGIES, Fleet, FleetMachine, Job

HOST = FleetMachine(name="desk", samples_per_s=4.0, update_s=0.5)
GUEST = FleetMachine(name="laptop", samples_per_s=1.0, update_s=0.25, link_bytes_per_s=1e6)
PAIR = Fleet(machines=(HOST, GUEST))
JOB = Job(name="job", parameters=1_000_000, batch=40)


def test_alone() -> None:
    row = models.solo(JOB, PAIR)
    assert row.step_s == 10.5
    assert row.speedup == 1.0
    assert row.shares == {"desk": 40, "laptop": 0}
    assert row.efficiency == pytest.approx((1 / 10.5) / (1 / 10.5 + 1 / 40.25))
    assert row.memory_bytes == {"desk": 16e6, "laptop": 0.0}


def test_stock_ddp_waits_for_the_slower_machine_then_for_the_wire() -> None:
    row = models.ddp(JOB, PAIR)
    wire_s = 4e6 / (1e6 * models.RING_PART)
    assert row.compute_s == 20.0
    assert row.exchange_s == pytest.approx(wire_s)
    assert row.exposed_s == pytest.approx(wire_s)  # 4 MB are one bucket of stock DDP
    assert row.step_s == pytest.approx(20 + wire_s + 0.5)
    assert row.waits == "desk waits 15.0 s for laptop, all wait 4.30 s for the wire"


def test_balanced_ddp_and_what_overlaps() -> None:
    row = models.ddp(JOB, PAIR, "ddp-balanced")
    assert row.shares == {"desk": 32, "laptop": 8}
    wire_s = 4e6 / (1e6 * models.RING_PART)
    # Four pieces. The last backward of desk is 4 samples × 2/3 ÷ 4, the laptop's four times as long: desk's counts.
    assert row.step_s == pytest.approx(8 - (2 / 3) * 0.75 + wire_s + 0.5)


@pytest.mark.parametrize(("strategy", "size"), [("ddp-bf16", 2e6), ("ddp-int8", 1.015625e6)])
def test_fewer_bytes(strategy: str, size: float) -> None:
    assert models.ddp(JOB, PAIR, strategy).exchange_s == pytest.approx(size / (1e6 * models.RING_PART))


def test_accumulating_spreads_the_wire_over_more_samples_and_says_that_it_is_another_training() -> None:
    row = models.ddp(JOB, PAIR, "ddp-accumulate")
    assert row.exchange_s == pytest.approx(models.ddp(JOB, PAIR, "ddp-balanced").exchange_s / 4)
    assert "another training" in row.note


def test_zero_moves_as_much_as_ddp_and_fsdp_more_for_every_round() -> None:
    zero, fsdp = models.zero(JOB, PAIR), models.fsdp(JOB, PAIR)
    wire_s = 4e6 / (1e6 * models.RING_PART)
    assert zero.exchange_s == pytest.approx(wire_s)
    assert fsdp.exchange_s == pytest.approx(5 * 1.5 * wire_s)  # 20 samples in micro-batches of 4
    assert fsdp.memory_bytes["laptop"] < zero.memory_bytes["laptop"] < models.ddp(JOB, PAIR).memory_bytes["laptop"]


def test_potluck_is_the_closed_form_where_the_ways_are_hidden() -> None:
    fast = PAIR.changed("laptop", link_bytes_per_s=None)
    row = hub.potluck(JOB.with_batch(4000), fast)
    overhead_s = hub.HANDLING_S
    expected_s = (4000 + 1.0 * overhead_s) / (4.0 + 1.0)
    assert row.step_s == pytest.approx(expected_s + HOST.update_s, rel=1e-3)
    assert row.speedup == pytest.approx((1000 + 0.5) / (expected_s + 0.5), rel=1e-3)


def test_a_way_is_the_slower_of_the_own_link_and_a_part_of_the_hosts() -> None:
    coded = 1e6 * (0.5 + 2 / 128)
    assert hub.way_s(JOB, HOST, GUEST, 1) == pytest.approx(coded / 1e6)
    narrow = replace(HOST, link_bytes_per_s=1.2e6, latency_s=0.01)
    assert hub.way_s(JOB, narrow, GUEST, 3) == pytest.approx(coded / 0.4e6 + 0.01)
    unlimited = replace(GUEST, link_bytes_per_s=None)
    assert hub.way_s(JOB, HOST, unlimited, 2) == pytest.approx(coded / (hub.HUB_BYTES_PER_S / 2))


def test_a_guest_that_cannot_deliver_sits_out_and_costs_nothing() -> None:
    row = hub.potluck(JOB, PAIR.changed("laptop", link_bytes_per_s=1e4))
    assert row.shares == {"desk": 40, "laptop": 0}
    assert row.step_s == models.solo(JOB, PAIR).step_s
    assert "laptop sits out" in row.waits


def test_where_all_cannot_help_at_once_some_can() -> None:
    host = replace(HOST, link_bytes_per_s=0.4e6)
    guests = tuple(replace(GUEST, name=f"g{i}", link_bytes_per_s=None) for i in range(8))
    row = hub.potluck(JOB, Fleet(machines=(host, *guests)))
    helping = [name for name, share in row.shares.items() if share and name != "desk"]
    assert 0 < len(helping) < 8
    assert row.speedup > 1.05


def test_fsdp_computes_more_samples_at_once_where_the_plan_chose_how_many() -> None:
    """By hand: FSDP leaves 24 - 0.7 · (16/2 + 8/12) = 17.9 GB. Half of that has room for 5 samples of 1.6 GB."""
    card = FleetMachine(name="a", samples_per_s=4.0, memory_bytes=24e9, micro_batch=1, by_memory=True)
    big = Job(name="big", parameters=700_000_000, batch=40, activation_bytes_per_sample=1.6e9)
    chosen = models.fsdp(big, Fleet(machines=(card, replace(card, name="b", link_bytes_per_s=1e9))))
    given = (replace(card, by_memory=False), replace(card, name="b", link_bytes_per_s=1e9, by_memory=False))
    assert chosen.memory_bytes["a"] == pytest.approx(0.7e9 * (8 + 8 / 12) + 5 * 1.6e9)
    assert models.fsdp(big, Fleet(machines=given)).exchange_s == pytest.approx(5 * chosen.exchange_s)


def test_memory_decides_whether_it_fits() -> None:
    tight = PAIR.changed("laptop", memory_bytes=13e6)
    assert hub.potluck(JOB, tight).fits  # 12.26 bytes a parameter
    ddp = models.ddp(JOB, tight)
    assert not ddp.fits
    assert "does not fit into the memory of laptop" in ddp.note


def test_the_strategies_names() -> None:
    assert check_strategies(()) == STRATEGIES
    assert check_strategies(("potluck", "ddp")) == ("solo", "ddp", "potluck")
    with pytest.raises(ConfigError, match="no strategy 'dpp'") as wrong:
        check_strategies(("dpp",))
    assert "did you mean ddp?" in wrong.value.hint


def test_more_machines_than_samples() -> None:
    for strategy in ("ddp", "ddp-balanced", "fsdp"):
        with pytest.raises(ConfigError, match="cannot be shared by 2 machines"):
            predict(JOB.with_batch(1), PAIR, strategy)


def machine(name: str) -> st.SearchStrategy[FleetMachine]:
    return st.builds(
        FleetMachine,
        name=st.just(name),
        samples_per_s=st.floats(0.05, 500),
        link_bytes_per_s=st.one_of(st.none(), st.floats(1e4, 1e10)),
        latency_s=st.floats(0, 0.1),
        micro_batch=st.integers(1, 16),
    )


fleets = st.tuples(machine("a"), machine("b"), machine("c")).map(lambda machines: Fleet(machines=machines))
jobs = st.builds(
    Job,
    name=st.just("job"),
    parameters=st.integers(1000, 10**9),
    batch=st.integers(5, 300),
    codec=st.sampled_from(["none", "int8", "int4", "topk:0.01"]),
)


@given(job=jobs, fleet=fleets)
@settings(max_examples=25, deadline=None)
def test_what_holds_for_every_fleet(job: Job, fleet: Fleet) -> None:
    for strategy in STRATEGIES:
        row = predict(job, fleet, strategy)
        assert 0 < row.step_s < math.inf
        if strategy != "ddp-accumulate":
            assert sum(row.shares.values()) == job.batch
        assert row.efficiency <= 1 + 1e-9
        assert all(0 <= idle <= row.step_s for idle in row.idle_s.values())
        assert set(row.memory_bytes) == {m.name for m in fleet.machines}


@given(job=jobs, fleet=fleets)
@settings(max_examples=25, deadline=None)
def test_potluck_does_no_harm_and_beats_nobodys_ideal(job: Job, fleet: Fleet) -> None:
    row, alone = hub.potluck(job, fleet), models.solo(job, fleet)
    assert row.step_s <= alone.step_s * (1 + 1e-9)
    assert row.speedup <= hub.ideal_speedup(job, fleet) * (1 + 1e-9) + 1e-9


@given(job=jobs, fleet=fleets, times=st.floats(1.5, 100))
@settings(max_examples=15, deadline=None)
def test_a_faster_link_never_lengthens_a_pair_or_a_ring(job: Job, fleet: Fleet, times: float) -> None:
    fleet = Fleet(machines=fleet.machines[:2])
    quicker = tuple(replace(m, link_bytes_per_s=m.bytes_per_s * times) for m in fleet.machines)
    for strategy in STRATEGIES:
        before, after = (predict(job, f, strategy).step_s for f in (fleet, Fleet(machines=quicker)))
        assert after <= before * (1 + 1e-6), strategy

"""What is said about a rig before anything runs, against the real models and codecs, and numbers made by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck import codec
from potluck.balance.codecs import codec_bytes
from potluck.balance.shares import whole_shares
from potluck.checked import build
from potluck.lab.workload import recipe_settings
from potluck.plan import about
from potluck.spec.rig import Machine, Rig, SpeedChange, Workload
from potluck.train import recipes

DESK = Machine(name="desk", role="host", seconds_per_sample=0.1)


def rig(*machines: Machine, steps: int = 4, batch: int = 50) -> Rig:
    return Rig(name="r", workload=Workload(depth=4, global_batch=batch, steps=steps), machines=machines)


@pytest.mark.parametrize(
    "workload",
    [
        Workload(),
        Workload(depth=1),
        Workload(depth=3, sequence=32),
        Workload(depth=4),
        Workload(recipe="cnn"),
    ],
    ids=str,
)
def test_parameters_are_those_of_the_model(workload: Workload) -> None:
    recipe = recipes.get(workload.recipe)
    model = recipe.model(build(recipe.Config, recipe_settings(workload)))
    assert about.parameters(workload) == sum(p.numel() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "int8", "int4", "topk", "topk:0.05"])
def test_a_codecs_bytes_are_those_of_the_codec(name: str) -> None:
    count = 1_280_000
    assert codec_bytes(name) * count == pytest.approx(codec.get(name).nbytes(count), rel=0.001)


def test_gradients_over_a_link() -> None:
    laptop = Machine(name="laptop", seconds_per_sample=0.4, link_mbit=40)
    pair = rig(DESK, laptop)
    # 3,323,392 parameters of 4 bytes at 5 MB/s, and a step of 50 × 0.1 s.
    assert about.gradient_ratio(pair, "laptop") == pytest.approx(3_323_392 * 4 / 5e6 / 5.0)
    assert about.gradient_ratio(pair, laptop) == about.gradient_ratio(pair, "laptop")
    assert about.gradient_ratio(pair, DESK) is None


def test_the_slower_of_two_links_counts() -> None:
    laptop = Machine(name="laptop", seconds_per_sample=0.4, link_mbit=40)
    for host_mbit, expected in ((None, 40), (1000, 40), (10, 10)):
        host = Machine(name="desk", role="host", seconds_per_sample=0.1, link_mbit=host_mbit)
        assert about.link_mbit(rig(host, laptop), laptop) == expected
    assert about.link_mbit(rig(DESK, Machine(name="x")), Machine(name="x")) is None


def test_what_is_not_known_is_none() -> None:
    host = Machine(name="desk", role="host", link_mbit=3)
    facts = about.facts(rig(host, Machine(name="x", seconds_per_sample=1)))
    assert facts.host_step_s is None
    assert facts.ideal_speedup is None
    assert facts.whole_sample_speedup is None
    assert facts.shares is None
    assert [m.gradient_ratio for m in facts.machines] == [None, None]
    assert [m.link_mbit for m in facts.machines] == [3, 3]
    assert facts.parameters == 3_323_392


def test_whole_samples() -> None:
    pair = rig(DESK, Machine(name="laptop", seconds_per_sample=0.4), batch=48)
    facts = about.facts(pair)
    # 38.4 + 9.6 samples would take 3.84 s, 39 + 9 take 3.9 s.
    assert facts.shares == {"desk": 39, "laptop": 9}
    assert facts.ideal_speedup == pytest.approx(1.25)
    assert facts.whole_sample_speedup == pytest.approx(4.8 / 3.9)
    assert facts.rounding_cost == pytest.approx(1 - 3.84 / 3.9)


def test_a_fleet_that_changes() -> None:
    moody = Machine(
        name="moody",
        seconds_per_sample=0.1,
        leave_at_step=4,
        speed_changes=(SpeedChange(at_step=3, seconds_per_sample=0.2),),
    )
    changing = rig(DESK, moody, batch=60)
    # Relative speeds 2, 2, 1.5, 1: the times are 1/2, 1/2, 2/3, 1 of the host's.
    assert about.ideal_speedup(changing) == pytest.approx(4 / (0.5 + 0.5 + 2 / 3 + 1))
    assert about.ideal_speedup(changing, range(1, 3)) == pytest.approx(2)
    assert about.whole_sample_speedup(changing) == pytest.approx(about.ideal_speedup(changing))
    assert about.host_step_s(changing) == pytest.approx(6.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 14), st.lists(st.floats(0.05, 5.0), min_size=1, max_size=3))
def test_no_other_shares_are_done_earlier(batch: int, seconds: list[float]) -> None:
    shares = whole_shares(batch, seconds)
    assert sum(shares) == batch
    assert min(shares) >= 0
    took = max(n * s for n, s in zip(shares, seconds))
    others = itertools.product(range(batch + 1), repeat=len(seconds))
    best = min(max(n * s for n, s in zip(other, seconds)) for other in others if sum(other) == batch)
    assert took == pytest.approx(best)


def test_a_huge_batch_takes_no_time() -> None:
    assert sum(whole_shares(10**12, [0.1, 0.3, 0.7])) == 10**12

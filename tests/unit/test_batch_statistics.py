"""Models that normalise over the batch: which they are, how few samples they get, and what is told of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from potluck.balance.leases import Least, Speed, lease_sizes, next_size, quotas, split_evenly, takeable
from potluck.balance.ledger import EpochSteps, Ledger
from potluck.errors import LoopError
from potluck.hub.alone import AloneHub
from potluck.report.sentences import describe
from potluck.spec.config import MEMORY_PART, MOST_MICRO_BATCH
from potluck.spec.events import StatisticsMeasured
from potluck.train.batch_statistics import StatisticsNotice, batch_statistics, least_samples
from potluck.train.data import epoch_order
from potluck.train.host_ranks import shares
from potluck.train.microbatch import FIRST_OF_MANY, MicroBatch
from potluck.train.rank_loop import refuse_synchronized
from potluck.wire.frames import dump_json
from support.protocol_world import ABOUT, World
from support.stepping_table import Table, events, sends

PAIRS = Least(micro_batch=2, lease=8)

# -- which models


@pytest.mark.parametrize(
    "layer", [nn.BatchNorm1d(4), nn.BatchNorm2d(4), nn.SyncBatchNorm(4), nn.LazyBatchNorm2d(), nn.BatchNorm3d(4)]
)
def test_every_kind_of_batch_norm_is_found(layer: nn.Module) -> None:
    found = batch_statistics(nn.Sequential(nn.Linear(4, 4), nn.Sequential(layer)))
    assert found is not None
    assert [name for name, _ in found.layers] == ["1.0"]


@pytest.mark.parametrize("layer", [nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.InstanceNorm2d(4), nn.ReLU()])
def test_layers_that_see_one_sample_at_a_time_are_none(layer: nn.Module) -> None:
    assert batch_statistics(nn.Sequential(layer)) is None
    assert least_samples(None, 64) == Least()


def test_frozen_layers_use_no_batch() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[0].eval()
    assert batch_statistics(model) is None
    model[0] = nn.BatchNorm1d(4, track_running_stats=False).eval()  # it has no other statistics
    assert batch_statistics(model) is not None


def test_a_model_that_is_not_yet_in_training_mode_will_be() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4)).eval()
    found = batch_statistics(model)
    assert found is not None
    assert not found.active
    model.train()
    assert found.active


@pytest.mark.parametrize(("batch", "lease"), [(64, 8), (32, 8), (16, 4), (4, 2), (1, 2)])
def test_a_lease_has_eight_samples_or_a_quarter_of_a_small_batch(batch: int, lease: int) -> None:
    found = batch_statistics(nn.BatchNorm1d(4))
    assert least_samples(found, batch) == Least(micro_batch=2, lease=lease)


# -- the size


def test_the_whole_batch_is_computed_at_once_after_the_first_micro_batch() -> None:
    micro = MicroBatch(limit=64, free_bytes=10**9, statistics=True)
    assert micro.size() == FIRST_OF_MANY
    micro.record(8, 1.0, 8_000)
    assert (micro.size(), micro.searching) == (64, False)


def test_only_what_fits_is_computed_at_once() -> None:
    micro = MicroBatch(limit=64, free_bytes=40_000, statistics=True)
    micro.record(8, 1.0, 8_000)
    assert micro.size() == micro.most() == MEMORY_PART * 40 == 20


def test_beyond_the_most_the_faster_size_is_searched() -> None:
    micro = MicroBatch(limit=4 * MOST_MICRO_BATCH, free_bytes=10**12, statistics=True)
    micro.record(8, 1.0, 8_000)
    assert (micro.size(), micro.searching) == (MOST_MICRO_BATCH, True)
    while micro.searching:
        micro.record(micro.size(), 0.01 * micro.size(), 0)  # a larger one brings nothing
    assert micro.size() >= MOST_MICRO_BATCH


@pytest.mark.parametrize(("asked", "size"), [(1, 2), (2, 2), (5, 5)])
def test_a_size_that_was_asked_for_is_kept_but_for_a_single_sample(asked: int, size: int) -> None:
    micro = MicroBatch(fixed=asked, statistics=True)
    assert micro.size() == micro.most() == size


# -- never one sample


@given(left=st.integers(2, 500), most=st.integers(1, 80))
def test_no_part_of_a_step_is_a_single_sample(left: int, most: int) -> None:
    while left:
        size = next_size(left, most, 2)
        assert 2 <= size <= max(most, 2) + 1
        left -= size
        assert left != 1


@given(left=st.integers(2, 100), wanted=st.integers(1, 20))
def test_a_common_batch_neither_is_nor_leaves_a_single_sample(left: int, wanted: int) -> None:
    size = takeable(left, wanted, 2)
    assert 2 <= size <= max(wanted, 2) + 1
    assert left - size != 1


@given(count=st.integers(2, 300), largest=st.integers(1, 40))
def test_no_split_has_a_single_sample(count: int, largest: int) -> None:
    parts = split_evenly(count, largest, 2)
    assert sum(parts) == count
    assert 2 <= min(parts) <= max(parts) <= max(largest, 2) + 1


speeds = st.builds(
    Speed,
    rate_samples_per_s=st.floats(0.1, 1000),
    overhead_s=st.floats(0, 1),
    transfer_s=st.floats(0, 2),
    usual=st.integers(1, 16),
    most=st.integers(1, 64),
    least=st.just(PAIRS),
)


@settings(deadline=None)
@given(count=st.integers(8, 200), speed=speeds)
def test_no_lease_is_cut_to_a_single_sample(count: int, speed: Speed) -> None:
    sizes = lease_sizes(count, speed)
    assert sum(sizes) == count
    assert min(sizes) >= 2


@settings(deadline=None)
@given(batch=st.integers(16, 300), host=st.floats(0.1, 1000), guests=st.lists(speeds, max_size=4))
def test_every_share_is_a_whole_lease_or_none(batch: int, host: float, guests: list[Speed]) -> None:
    shared = quotas(batch, host, {str(n): speed for n, speed in enumerate(guests)}, host_keeps=8)
    assert shared.host + sum(shared.guests.values()) == batch
    assert shared.host >= 8
    assert all(count >= 8 for count in shared.guests.values())


@given(count=st.integers(2, 100), world=st.integers(1, 9))
def test_no_rank_has_a_single_sample(count: int, world: int) -> None:
    parts = shares(range(count), world, 2)
    assert len(parts) == world
    assert [p for part in parts for p in part] == list(range(count))
    assert all(len(part) != 1 for part in parts)
    assert len(parts[0]) == max(map(len, parts))


@pytest.mark.parametrize("batch", [2, 3, 5, 9, 33])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_alone_no_micro_batch_is_a_single_sample(batch: int, size: int) -> None:
    hub = AloneHub(Ledger(EpochSteps(samples=100, global_batch=batch, order=epoch_order(100, 0))), "host", PAIRS)
    hub.begin_step()
    while positions := hub.take(size, lambda: False, lambda: 0)[0]:
        assert len(positions) > 1
        hub.launched(positions, [len(positions)])
    result = hub.end_step()
    assert sum(result.micro_batches["host"]) == batch


def test_a_guest_gets_eight_samples_or_sits_out() -> None:
    table = Table("fast", "slow", batch=40, rate=10.0, least=PAIRS)
    table.members["slow"].rate.value = 1.0  # four samples in the four seconds of a step
    actions = table.begin()
    assert [a.guest for a in sends(actions, "lease")] == ["fast"]
    (sits_out,) = events(actions, "guest_sits_out")
    assert sits_out.machine == "slow"
    assert "cannot deliver 8 samples" in sits_out.reason
    assert "batch statistics" in sits_out.reason


def test_what_comes_back_is_never_a_single_sample() -> None:
    """A guest that says it keeps all but one of its samples is not believed: it cuts between its micro-batches."""
    table = Table("g", batch=40, least=PAIRS)
    member = table.members["g"]
    member.micro_batch = member.largest_micro_batch = 8
    (lease,) = sends(table.begin(), "lease")
    sizes = lease.message.sizes
    before = table.ledger.in_pool
    table.stepping.closing(member, lease=lease.message.lease, keep=sum(sizes) - 1, eta_s=0.1, now=table.now)
    assert table.ledger.in_pool == before
    table.stepping.closing(member, lease=lease.message.lease, keep=sum(sizes[:-1]), eta_s=0.1, now=table.now)
    assert table.ledger.in_pool == before + sizes[-1] > before + 1


def test_what_is_taken_back_late_is_dealt_without_a_single_sample() -> None:
    table = Table("g", batch=41, least=PAIRS)
    table.begin()
    member = table.members["g"]
    assert member.lease is not None
    taken = []
    while (take := table.take(4)).positions or not take.full:
        if take.positions:
            taken.append(len(take.positions))
            table.compute(take)
        else:
            table.now += 1.0  # the guest does not come
    assert sum(taken) == 41
    assert min(taken) > 1


def test_the_sizes_that_were_counted_are_told() -> None:
    table = Table("g", batch=40)
    member = table.members["g"]
    member.micro_batch = member.largest_micro_batch = 8
    (lease,) = sends(table.begin(), "lease")
    kept = lease.message.sizes[:2]
    table.stepping.closing(member, lease=lease.message.lease, keep=sum(kept), eta_s=0.1, now=table.now)
    table.deliver("g")
    table.compute_all()
    sizes = table.stepping.end().micro_batches
    assert sizes["g"] == tuple(kept)
    assert sum(itertools.chain(*sizes.values())) == 40


# -- what is told


def told(model: nn.Module, steps: Iterator[dict[str, tuple[int, ...]]]) -> list[StatisticsMeasured]:
    notice = StatisticsNotice(batch_statistics(model), 64)
    model(torch.ones(2, 4))
    news = [notice.after_step(number, sizes) for number, sizes in enumerate(steps, 1)]
    return [event for event in news if event is not None]


def test_it_is_told_once_with_the_numbers() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    (event,) = told(model, iter([{"host": (8, 56)}, *[{"host": (16, 16, 16), "ann": (16,)}] * 9]))
    assert event.step == 2
    assert event.micro_batch == {"host": 16, "ann": 16}
    assert event.effective_batch == 16
    message = describe(event)
    assert message is not None
    assert message.level == "warn"
    for words in ("BatchNorm1d (2 layers: 0, 1)", "16 on host", "16 on ann", "64", "GroupNorm", "micro_batch="):
        assert words in message.text


def test_it_is_told_again_with_the_first_guest_and_where_there_are_half_as_many() -> None:
    alone, with_ann = {"host": (64,), "ann": ()}, {"host": (40,), "ann": (24,)}
    steps = [alone, alone, with_ann, alone, with_ann, {"host": (16,) * 3, "ann": (8, 8)}]
    events = told(nn.BatchNorm1d(4), iter(steps))
    assert [(e.step, e.effective_batch) for e in events] == [(2, 64), (3, 32), (6, 12.8)]
    levels = [message.level for e in events if (message := describe(e)) is not None]
    assert levels == ["info", "info", "warn"]


def test_nothing_is_told_of_other_models_or_frozen_layers() -> None:
    frozen = nn.Sequential(nn.BatchNorm1d(4)).eval()
    for model in (nn.Linear(4, 4), frozen):
        assert told(model, iter([{"host": (2,) * 32}] * 3)) == []


class PartlyUsed(nn.Module):
    def __init__(self, *, called: bool) -> None:
        super().__init__()
        self.used, self.unused, self.called = nn.BatchNorm1d(4), nn.BatchNorm1d(4), called

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x) if self.called else x


@pytest.mark.parametrize("called", [True, False])
def test_nothing_is_told_of_layers_that_are_not_called(called: bool) -> None:
    model = PartlyUsed(called=called)
    nn.init.ones_(model.unused.running_mean)  # of a checkpoint, for example
    events = told(model, iter([{"host": (2,) * 32}] * 3))
    assert [event.names for event in events] == [("used",)] * called


def test_layers_without_running_statistics_may_have_been_called() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False), nn.LazyBatchNorm1d())
    (event,) = told(model, iter([{"host": (2,) * 32}] * 3))
    assert event.names == ("0", "1")


# -- guests, and ranks


def test_the_common_batch_has_a_lease_of_samples_and_tells_the_guests_size() -> None:
    world = World(batch=32, samples=100, least=PAIRS)
    world.hello("g")
    world.say("g", "ready", dump_json(ABOUT), micro_batch=8, largest_micro_batch=8)
    world.take_all("g")
    world.code()
    world.take_all("g")
    world.begin()
    common = world.protocol.checks.due
    assert common is not None
    assert common.samples == 8
    world.take()
    world.compute()
    sizes = {"micro_batch": 32, "largest_micro_batch": 50}
    world.say("g", "sketch", b"\0\0\0\0", check=1, count=8, compute_s=0.1, loss=1.0, **sizes)
    member = world.protocol.members["g"]
    assert (member.micro_batch, member.largest_micro_batch) == (32, 50)


def test_a_host_of_several_ranks_refuses_layers_that_wait_for_all_of_them() -> None:
    with pytest.raises(LoopError, match="SyncBatchNorm"):
        refuse_synchronized(nn.Sequential(nn.SyncBatchNorm(4)))
    refuse_synchronized(nn.Sequential(nn.BatchNorm2d(4)))

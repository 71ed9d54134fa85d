"""The figures of a run: what is shown of the guests only once there is something to show."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec import structs
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import potluck
from potluck.hub.actions import StepResult
from potluck.hub.feed import Feed
from potluck.hub.members import SITTING_OUT, Member
from potluck.report.data_wait import data_share, data_text
from potluck.report.summary import summarize
from potluck.spec.events import RunNote, StepEnded, kind_of
from potluck.train.context import HOST
from potluck.train.gain import AloneRate
from potluck.train.run import start
from potluck.train.telemetry import DataTimes, Telemetry


def table(events: list[Any]) -> tuple[Telemetry, Member, StepResult]:
    """The figures of a host with one guest, a tenth of a second a sample."""
    guest = Member(
        id="g",
        name="laptop",
        address="",
        device="cpu",
        about={},
        last_heard=0.0,
        joined_at=0.0,
        feed=Feed(pieces=1, window_bytes=1),
    )
    device = SimpleNamespace(peak_flops=None, label="cpu")
    log = SimpleNamespace(emit=events.append, takes_steps=True)
    context: Any = SimpleNamespace(role=HOST, name="tower", device=device, log=log, folder=None)
    options: Any = SimpleNamespace(usual_batch=8, tokens_per_sample=None)
    hub: Any = SimpleNamespace(
        members=lambda: [guest], host_sample_s=lambda: 0.1, traffic=lambda: (0, 0), timed=lambda *_: None
    )
    result = StepResult(
        samples={"tower": 5, "laptop": 3}, predicted_s=None, wait_s=0.0, dropped_samples=0, taken_back_samples=0
    )
    return Telemetry(context, options, hub, total_steps=9), guest, result


def test_no_speed_up_is_claimed_before_a_guest_has_contributed() -> None:
    events: list[Any] = []
    telemetry, guest, result = table(events)
    telemetry.step_ended(1, 1.0, result, 0.0, time.monotonic(), applied=True, outside=(0.0, 0.0))
    guest.samples = 3
    telemetry.step_ended(2, 1.0, result, 0.0, time.monotonic(), applied=True, outside=(0.0, 0.0))
    before, after = (event.speedup for event in events)
    assert before is None
    assert after is not None


def test_what_the_script_does_between_steps_is_no_steps_time() -> None:
    events: list[Any] = []
    telemetry, guest, result = table(events)
    guest.samples = 3
    start = time.monotonic()
    telemetry.step_ended(1, 1.0, result, 0.0, start + 0.5, applied=True, outside=(start, start))
    validated = start + 14.5
    telemetry.step_ended(2, 1.0, result, 0.0, validated + 0.4, applied=True, outside=(start + 0.5, validated))
    assert events[1].step_s == pytest.approx(0.4, abs=0.001)
    assert events[1].between_s == pytest.approx(14.0, abs=0.001)
    assert events[1].speedup > 1  # 0.8 s alone, 0.45 s on average
    assert events[1].eta_s == pytest.approx(7 * (0.45 + 7.0), abs=0.1)


@pytest.mark.parametrize(("address", "claimed"), [("127.0.0.1", 0.5), ("192.0.2.7", 1.5)])
def test_a_guest_on_the_hosts_own_machine_is_compared_with_the_speed_before_it(
    address: str, claimed: float
) -> None:
    """Its processes slow the host down: 0.05 s a sample before it came, 0.1 s beside it."""
    events: list[Any] = []
    telemetry, guest, result = table(events)
    members: list[Member] = []
    telemetry._hub.members = lambda: members  # type: ignore[method-assign]
    now = time.monotonic()
    for step in range(1, 9):
        now += 0.4
        telemetry.step_ended(step, 1.0, result, 0.0, now, applied=True, outside=(0.0, 0.0))
    members.append(guest)
    guest.samples, guest.address = 3, address
    for step in range(9, 19):
        now += 0.8
        telemetry.step_ended(step, 1.0, result, 0.0, now, applied=True, outside=(0.0, 0.0))
    last = [event for event in events if isinstance(event, StepEnded)][-1]
    assert last.speedup == pytest.approx(claimed, rel=0.15)
    notes = [event.text for event in events if isinstance(event, RunNote)]
    shared = "laptop runs on this same machine: the two share its processor"
    assert notes == ([shared] if address == "127.0.0.1" else [])


def test_the_hub_is_told_what_a_step_took_and_who_shares_this_machine() -> None:
    """So it sees whether the run is slower with a guest; what the script does between steps does not count."""
    told: list[Any] = []
    telemetry, guest, result = table([])
    telemetry._hub.timed = lambda *step: told.append(step)  # type: ignore[method-assign]
    guest.samples, guest.address = 3, "127.0.0.1"
    start = time.monotonic()
    telemetry.step_ended(1, 1.0, result, 0.0, start + 0.5, applied=True, outside=(start, start))
    telemetry.step_ended(2, 1.0, result, 0.0, start + 9.9, applied=True, outside=(start + 0.5, start + 9.5))
    (_, second) = told
    assert second == (1, 8, pytest.approx(0.4, abs=0.001), ["g"])


def test_a_paced_guest_is_an_emulated_machine_and_does_not_share_this_one() -> None:
    """Else each fleet behind the lab's proxy made a trial without guests: 5 of 24 steps."""
    told: list[Any] = []
    events: list[Any] = []
    telemetry, guest, result = table(events)
    telemetry._hub.timed = lambda *step: told.append(step)  # type: ignore[method-assign]
    guest.samples, guest.address, guest.device = 3, "127.0.0.1", "paced 0.1 s/sample on cpu"
    start = time.monotonic()
    telemetry.step_ended(1, 1.0, result, 0.0, start + 0.5, applied=True, outside=(start, start))
    telemetry.step_ended(2, 1.0, result, 0.0, start + 1.0, applied=True, outside=(start, start))
    assert [list(here) for *_, here in told] == [[], []]
    assert not [event for event in events if isinstance(event, RunNote)]


def test_the_runs_speed_and_speed_up_are_those_of_the_report() -> None:
    events: list[Any] = []
    telemetry, guest, result = table(events)
    guest.samples = 3
    start = time.monotonic()
    for step, ended in enumerate((0.5, 0.9, 2.9), 1):
        telemetry.step_ended(step, 1.0, result, 0.0, start + ended, applied=True, outside=(start, start))
    telemetry.ended(3, 1.0, "finished")
    summary = summarize(events)
    assert events[-1].speedup == pytest.approx(summary.speedup, rel=1e-3)
    assert events[-1].samples_per_s == pytest.approx(summary.samples_per_s, rel=1e-3)
    assert events[-1].speedup != pytest.approx(events[-2].speedup, rel=1e-3), "the last steps are not the run"


def test_alone_is_what_the_best_size_gives() -> None:
    """While sizes are tried, and in what guests leave over, the host's small micro-batches are no measure."""
    events: list[Any] = []
    telemetry, guest, result = table(events)
    guest.samples = 3
    start = time.monotonic()
    for size, sample_s in ((2, 0.2), (2, 0.2), (4, 0.1), (8, 0.05), (8, 0.05), (1, 0.3)):
        telemetry.computed(size, size * sample_s)
    telemetry.step_ended(1, 1.0, result, 0.0, start + 0.4, applied=True, outside=(start, start))
    assert events[0].speedup == pytest.approx(1.0, rel=0.01)  # 8 samples of 0.05 s in 0.4 s
    assert events[0].machines[0].rate == pytest.approx(20.0)


def test_a_few_samples_that_went_fast_are_not_the_speed_alone() -> None:
    alone = AloneRate()
    for _ in range(10):
        alone.add(16, 1.6)
    alone.add(2, 0.02)
    assert alone.sample_s == pytest.approx(0.1)
    alone.add(8, 0.78)  # hardly faster, and smaller: noise
    assert alone.sample_s == pytest.approx(0.1)


def test_the_speed_alone_is_that_of_the_last_steps() -> None:
    alone = AloneRate()
    assert alone.sample_s is None
    for sample_s in [0.1] * 20 + [0.4] * 9:
        alone.step_ended()
        alone.add(16, 16 * sample_s)
    assert alone.sample_s == pytest.approx(0.4)


class Slow(IterableDataset[Any]):
    """Ten milliseconds a sample."""

    def __iter__(self) -> Iterator[Any]:
        for _ in range(24):
            time.sleep(0.01)
            yield torch.ones(2)


def test_what_a_stream_takes_to_read_is_the_steps_time_also_where_the_script_asks_for_the_epochs_end() -> None:
    """To know it the next batch is read, after the step: that is not what the script does between steps."""
    events: list[Any] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ended = []
    for step in start(events.append).steps(model, optimizer, DataLoader(Slow(), batch_size=4), epochs=1):
        for batch in step:
            step.backward(model(batch).mean())
        ended.append(step.ends_epoch)
    assert ended == [False] * 5 + [True]
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert sum(step.step_s for step in steps) >= 0.23
    assert events[-1].samples_per_s <= 24 / 0.23


def test_a_guests_link_is_told_once_its_time_is_more_than_that_of_a_buffer() -> None:
    events: list[Any] = []
    telemetry, guest, result = table(events)
    telemetry._change_bytes = 1e6
    for way_s in (0.001, 0.5):
        guest.transfer.value = way_s
        telemetry.step_ended(1, 1.0, result, 0.0, time.monotonic(), applied=True, outside=(0.0, 0.0))
    assert [event.machines[1].link_bytes_per_s for event in events] == [None, 2e6]


def test_what_a_step_takes_besides_computing_it_would_also_take_alone() -> None:
    """Steps of 1.5 ms, of which 0.5 ms are Python's: with a guest that does nothing 1.00, not 0.67."""
    events: list[Any] = []
    telemetry, guest, result = table(events)
    hub: Any = telemetry._hub
    hub.members = list
    at = time.monotonic()
    telemetry._last_end = at
    for step in range(1, 41):
        if step == 21:
            hub.members, guest.samples = lambda: [guest], 3
        telemetry.computed(8, 0.001)
        at += 0.0015
        telemetry.step_ended(step, 1.0, result, 0.0, at, applied=True, outside=(0.0, 0.0))
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert {step.speedup for step in steps[:20]} == {None}
    assert steps[-1].speedup == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize("shows_steps", [True, False])
def test_figures_of_steps_are_made_only_for_who_shows_them(shows_steps: bool) -> None:
    """A plain script prints its own progress: making them for nobody was a part of what Potluck costs alone."""
    events: list[Any] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(events.append, shows_steps=shows_steps)
    for step in run.steps(model, optimizer, DataLoader(list(torch.zeros(8, 2)), batch_size=4), epochs=1):
        for batch in step:
            step.backward(model(batch).mean())
    kinds = [kind_of(event) for event in events]
    assert kinds.count("step") == (2 if shows_steps else 0)
    assert kinds[0] == "run_start"
    assert kinds[-1] == "run_end"
    assert events[-1].samples_per_s > 0


def test_a_plain_scripts_run_takes_no_figures_of_steps() -> None:
    assert not potluck.start()._context.log.takes_steps


def test_alone_counts_what_a_step_takes_besides_also_where_guests_were_there_from_the_start() -> None:
    """The host computes 5 of 8 samples in 0.625 ms and spends 0.5 ms besides: alone it would take 1.5 ms."""
    events: list[Any] = []
    telemetry, guest, result = table(events)
    guest.samples = 3
    at = telemetry._last_end = time.monotonic()
    for step in range(1, 21):
        telemetry.computed(5, 0.000625)
        at += 0.001125
        telemetry.step_ended(step, 1.0, result, 0.0, at, applied=True, outside=(0.0, 0.0))
    assert events[-1].speedup == pytest.approx(1.5 / 1.125, rel=0.02)


def test_while_guests_sit_out_the_run_is_as_fast_as_alone() -> None:
    """Whatever the host's micro-batches say of its speed: 0.05 s a sample in steps of 0.3 s."""
    events: list[Any] = []
    telemetry, guest, result = table(events)
    guest.samples, guest.state = 3, SITTING_OUT
    at = telemetry._last_end = time.monotonic()
    for step in range(1, 11):
        telemetry.computed(8, 0.4)
        at += 0.3
        alone = structs.replace(result, samples={"tower": 8})
        telemetry.step_ended(step, 1.0, alone, 0.0, at, applied=True, outside=(0.0, 0.0))
    assert {event.speedup for event in events} == {1.0}


@pytest.mark.parametrize(("workers", "claimed"), [(2, 1.0), (0, (0.08 + 0.1) / 0.15)])
def test_time_that_the_host_waits_for_data_is_told_and_predicted(workers: int, claimed: float) -> None:
    """Half of its 80 ms computed by a guest, 100 ms waited. Workers read on while the host computes."""
    events: list[Any] = []
    telemetry, guest, result = table(events)
    telemetry._workers, guest.samples = workers, 4
    made = structs.replace(result, samples={"tower": 4, "laptop": 4}, predicted_s=0.05)
    at = telemetry._last_end = time.monotonic()
    for step in range(1, 9):
        telemetry.computed(4, 0.04)
        at += 0.15
        data = DataTimes(before_s=0.1, restarted=step == 5)
        telemetry.step_ended(step, 1.0, made, 0.01, at, applied=True, outside=(0.0, 0.0), data=data)
    assert events[-1].data_s == pytest.approx(0.1)
    assert [event.restart_s > 0 for event in events] == [step == 5 for step in range(1, 9)]
    assert events[-1].predicted_s == pytest.approx(0.15)
    assert events[-1].speedup == pytest.approx(claimed, rel=0.07)


def test_a_wait_behind_which_the_device_computes_is_no_wait() -> None:
    events: list[Any] = []
    telemetry, _, result = table(events)
    at = telemetry._last_end = time.monotonic()
    telemetry.computed(5, 0.095)
    telemetry.step_ended(1, 1.0, result, 0.0, at + 0.1, applied=True, outside=(0.0, 0.0), data=DataTimes(0.09))
    assert events[0].data_s == pytest.approx(0.005, abs=1e-4)


class SlowSamples:
    """A data set of which every sample takes 5 ms."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.005)
        return torch.zeros(2)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_that_waits_for_its_loader_says_so(workers: int) -> None:
    events: list[Any] = []
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = start(events.append, shows_steps=True)
    loader = DataLoader(SlowSamples(), batch_size=4, num_workers=workers)  # type: ignore[arg-type]
    for step in run.steps(model, optimizer, loader, epochs=2):
        for batch in step:
            step.backward(model(batch).mean())
    steps = [event for event in events if isinstance(event, StepEnded)]
    assert [step.restart_s > 0 for step in steps] == [bool(workers) and at == 4 for at in range(8)]
    assert events[0].workers == workers
    assert sum(step.data_s if workers else step.read_s for step in steps) > 0.02
    summary = summarize(events)
    assert data_share(summary) > 0.5
    assert ("num_workers=4" if not workers else "DataLoader") in (data_text(summary) or "")

"""A run's summary, from its log."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from rich.cells import cell_len

from potluck import checked
from potluck.errors import RunFolderError
from potluck.report.summary import losses, read_events, summarize
from potluck.report.summary_text import summary_text
from potluck.spec.events import GuestCodec
from potluck.train.gain import Gain
from support import sample_events as sample


def test_a_whole_run() -> None:
    summary = summarize(sample.whole_run())
    assert summary.run_id == "1115-gpt"
    assert (summary.steps, summary.planned_steps, summary.ended) == (4, 4, "finished")
    assert (summary.first_loss, summary.last_loss) == (4.0, 1.0)
    assert summary.samples == 4 * 32
    assert summary.samples_per_s == pytest.approx(32.0)
    assert summary.tokens_per_s == pytest.approx(32.0 * 256)
    assert summary.speedup == 1.25
    assert (summary.bytes_up, summary.bytes_down) == (4000, 8000)
    assert summary.wait_s == pytest.approx(0.04)
    tower, laptop = summary.machines
    assert (tower.name, tower.role, tower.samples, tower.share, tower.steps) == ("tower", "host", 96, 0.75, 4)
    assert (laptop.name, laptop.role, laptop.samples, laptop.share, laptop.rate) == (
        "laptop",
        "guest",
        32,
        0.25,
        8.0,
    )


def test_the_last_codec_of_each_guest_and_why() -> None:
    chosen = [
        GuestCodec(machine="laptop", step=step, codec=codec, reason=f"because of {step}")
        for step, codec in ((1, "int4"), (3, "thin"))
    ]
    summary = summarize([*sample.whole_run(), *chosen])
    assert summary.codecs == {"laptop": "thin, because of 3"}
    assert "codec       laptop: thin, because of 3" in summary_text(summary)
    assert "codec" not in summary_text(summarize(sample.whole_run()))
    narrow = summary_text(summary, 40).split("\n\n")[0].splitlines()
    assert all(len(line) <= 40 for line in narrow if " " in line[12:])
    assert " ".join(" ".join(narrow).split()) == " ".join(summary_text(summary).split("\n\n")[0].split())


def test_efficiency_and_recovery_follow_their_definitions() -> None:
    # 32 samples in 1 s where host and guest could do 24 + 16; speed-up 1.25 where 1 + 16/24 was possible.
    machines = [sample.host(24), sample.machine("laptop", 8, rate=16.0)]
    summary = summarize([sample.run_start(), *(sample.step(n, machines=machines) for n in range(1, 5))])
    assert summary.efficiency == pytest.approx(0.8)
    assert summary.recovery == pytest.approx(0.25 / (16 / 24))


def test_recovery_of_about_nothing_is_said_in_words() -> None:
    """A guest with a thousandth of the host's speed, and noise in the speed-up: the ratio was -8.19."""
    machines = [sample.host(32), sample.machine("pi", 0, rate=0.024, state="sitting out")]
    summary = summarize([sample.step(n, machines=machines, speedup=0.992) for n in range(1, 5)])
    assert summary.recovery is None
    assert summary.could_add == pytest.approx(0.001)
    assert "the guests could add almost nothing: 0.1% of the host's speed" in summary_text(summary)


def test_a_negative_recovery_is_nothing() -> None:
    machines = [sample.host(32), sample.machine("laptop", 0, rate=12.0, state="sitting out")]
    summary = summarize([sample.step(n, machines=machines, speedup=0.97) for n in range(1, 5)])
    assert summary.recovery is not None
    assert "recovery    none of what the guests could add" in summary_text(summary)


def test_the_reports_seconds_are_the_views_and_its_figures_agree() -> None:
    steps = [sample.step(n, t_s=2.0 + n, step_s=0.04 if n < 10 else 0.64) for n in range(1, 11)]
    summary = summarize([sample.run_start(t_s=2.0), *steps, sample.run_end(t_s=13.0, seconds=10.5)])
    assert summary.run_s == pytest.approx(10.5)
    assert summary.seconds == pytest.approx(1.0)
    assert "finished; 10.5 s, 1.00 s of it in steps, 100 ms a step (median 40 ms)" in summary_text(summary)


def test_the_seconds_of_a_run_that_was_killed_and_resumed() -> None:
    first = [sample.run_start(t_s=1.0), sample.step(1, t_s=4.0)]
    again = [
        sample.run_start(t_s=2.0, resumed_from=1),
        sample.step(2, t_s=3.0),
        sample.run_end(t_s=9.0, seconds=6.0),
    ]
    assert summarize([*first, *again]).run_s == pytest.approx(3.0 + 6.0)


def test_a_guest_that_sits_out_lowers_the_efficiency() -> None:
    idle = sample.machine("pi", 0, rate=8.0, state="sitting out")
    summary = summarize([sample.step(1, machines=[sample.host(24), sample.machine("laptop", 8), idle])])
    assert summary.efficiency == pytest.approx(32 / 40)


def test_efficiency_is_not_guessed_where_a_rate_is_missing() -> None:
    machines = [sample.host(24), sample.machine("laptop", 8, rate=None)]
    assert summarize([sample.step(1, machines=machines)]).efficiency is None


def test_what_went_wrong_is_counted_by_machine() -> None:
    summary = summarize([*sample.whole_run(), *sample.news()])
    laptop = summary.machines[1]
    assert laptop.taken_back_samples == 8 + 8
    assert laptop.dropped_samples == 1
    assert laptop.times_lost == 1
    assert summary.strangers_refused == 1
    text = summary_text(summary)
    assert "lost once, 16 taken back, 1 dropped" in text
    assert "1 stranger" in text


def test_the_last_loss_is_the_last_steps_also_where_that_was_none() -> None:
    events = [sample.run_start(), sample.step(1), *(sample.step(n, loss=None, applied=False) for n in (2, 3))]
    summary = summarize(events)
    assert (summary.first_loss, summary.last_loss, summary.not_applied) == (4.0, None, 2)
    assert "loss        4.0000 at first, – at last\n" in summary_text(summary)
    assert "not applied 2 of the steps: their gradient was not finite" in summary_text(summary)
    assert losses(events) == ([1], [4.0])


def test_steps_repeated_after_a_resume_count_once() -> None:
    first = [
        sample.run_start(),
        *(sample.step(n, loss=9.0) for n in (1, 2, 3)),
        sample.run_end(reason="interrupted"),
    ]
    again = [sample.run_start(resumed_from=1), *(sample.step(n, loss=1.0) for n in (2, 3, 4))]
    summary = summarize([*first, *again])
    assert summary.samples == 4 * 32
    assert losses([*first, *again]) == ([1, 2, 3, 4], [9.0, 1.0, 1.0, 1.0])
    assert summary.ended == "still going or killed"


def test_a_log_cut_in_the_middle_of_a_line_is_read(tmp_path: Path) -> None:
    run = sample.write(tmp_path / "run", [sample.run_start(), sample.step(1)], tail='{"event": "step", "st')
    events = read_events(run)
    assert events == [sample.run_start(), sample.step(1)]
    assert summarize(events).steps == 1


def test_a_run_that_never_made_a_step() -> None:
    for events in ([], [sample.run_start()], [sample.run_start(), sample.run_end(reason="failed", step=0)]):
        summary = summarize(events)
        assert summary.steps == 0
        assert summary.samples_per_s is None
        assert summary_text(summary)


def test_alone_says_nothing_about_guests() -> None:
    alone = {"machines": [sample.host(32)], "speedup": None, "bytes_up": 0, "bytes_down": 0}
    text = summary_text(summarize([sample.run_start(), sample.step(1, **alone), sample.run_end()]))
    assert "wire" not in text
    assert "gain" not in text
    assert "guest" not in text


def test_the_summary_goes_through_json() -> None:
    summary = summarize(sample.whole_run())
    again = json.loads(checked.to_json(summary))
    assert again["machines"][1]["name"] == "laptop"
    assert again["efficiency"] == summary.efficiency


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder") as caught:
        read_events(tmp_path)
    assert caught.value.hint
    with pytest.raises(RunFolderError):
        read_events(tmp_path / "missing")


def test_the_micro_batch_of_each_machine_is_told() -> None:
    machines = [sample.host(24, micro_batch=12, micro_batches=2), sample.machine("laptop", 8, micro_batch=8)]
    steps = [sample.step(n, machines=machines) for n in (1, 2, 3)]
    summary = summarize([sample.run_start(), *steps, sample.run_end()])
    assert [m.micro_batch for m in summary.machines] == [12, 8]
    assert summary.effective_batch is None  # the model normalises over no batch
    header, tower, laptop = summary_text(summary).splitlines()[-3:]
    column = header.index("at once") + len("at once")
    assert (tower[:column].split()[-1], laptop[:column].split()[-1]) == ("12", "8")


def test_how_many_samples_share_their_statistics_is_kept() -> None:
    machines = [sample.host(24, micro_batch=12, micro_batches=2), sample.machine("laptop", 8, micro_batches=2)]
    told = sample.statistics(layers=5)
    summary = summarize([sample.run_start(), sample.step(1, machines=machines), told, sample.run_end()])
    assert (summary.batch_layers, summary.effective_batch) == (5, 8.0)
    assert "5 layers, over 8 samples on average" in summary_text(summary)


def test_the_last_line_and_the_report_have_one_speed_up(tmp_path: Path) -> None:
    """Both are the steps' mean, weighted by their seconds: what the run took alone ÷ what it took."""
    steps = [
        sample.step(1, speedup=None, step_s=9.0),
        sample.step(2, speedup=1.0, step_s=3.0),
        sample.step(3, speedup=2.0),
    ]
    assert summarize([sample.run_start(), *steps]).speedup == pytest.approx(5.0 / 4.0)
    gain = Gain()
    for step in steps:
        gain.add(step.speedup, step.step_s)
    assert gain.value == pytest.approx(5.0 / 4.0)
    assert Gain().value is None


def test_what_is_sent_to_guests_is_called_what_it_is() -> None:
    """The bytes out have the samples in them."""
    assert "4 kB of gradients in, 8 kB of weights and samples out (3 kB a step)" in summary_text(
        summarize(sample.whole_run())
    )


def test_columns_stand_under_their_headers_whatever_a_machine_is_called() -> None:
    machines = [sample.host(), sample.machine("東京のノート", 8)]
    text = summary_text(summarize([sample.run_start(), sample.step(1, machines=machines), sample.run_end()]))
    header, *rows = text.splitlines()[-3:]
    assert [cell_len(row[: row.index(m.role)]) for row, m in zip(rows, machines)] == [header.index("role")] * 2


def test_no_traffic_is_not_told() -> None:
    steps = [sample.step(n, bytes_up=0, bytes_down=0) for n in (1, 2)]
    assert "wire" not in summary_text(summarize([sample.run_start(), *steps]))


def test_steps_that_a_resumed_run_undid_do_not_count() -> None:
    # Resumed after step 1 and killed after step 2: steps 3 and 4 of the first process are undone.
    events = [
        sample.run_start(),
        *(sample.step(n) for n in range(1, 5)),
        sample.run_start(resumed_from=1),
        sample.step(2),
    ]
    assert summarize(events).steps == 2


def test_samples_sent_ahead_and_those_not_needed_are_counted() -> None:
    steps = [sample.step(n, ahead=8, unneeded=3 * (n == 2), unneeded_bytes=450_000 * (n == 2)) for n in (1, 2)]
    summary = summarize(steps)
    assert (summary.ahead_samples, summary.unneeded_samples, summary.unneeded_bytes) == (16, 3, 450_000)
    assert "16 samples before their lease; 3 (450 kB) were not needed" in summary_text(summary)
    assert "sent ahead" not in summary_text(summarize([sample.step(1)]))


@pytest.mark.parametrize(
    ("workers", "waits", "told"),
    [
        (2, {"data_s": 0.6}, "60 % of the time; give the DataLoader more than num_workers=2, for example 4"),
        (0, {"read_s": 0.6}, "60 % of the time; give the DataLoader num_workers=4"),
        (None, {"read_s": 0.6}, "60 % of the time; give run.steps() a DataLoader with num_workers=4"),
        (2, {"data_s": 0.6, "restart_s": 0.6}, "the 2 worker processes start again in each epoch"),
        (2, {"data_s": 0.1}, None),
    ],
)
def test_a_run_that_waits_for_its_data_says_so_and_what_helps(
    workers: int | None, waits: dict[str, float], told: str | None
) -> None:
    start = msgspec.structs.replace(sample.run_start(), workers=workers)
    summary = summarize([start, *(sample.step(n, **waits) for n in range(1, 5))])
    text = summary_text(summary)
    assert (told or "waiting for data") in text if told else "waiting for data" not in text
    assert summary.data_s == pytest.approx(4 * waits.get("data_s", 0.0))


def test_the_wait_for_data_is_no_fault_of_the_sharing() -> None:
    """Efficiency compares with what the machines reach with the data there is."""
    machines = [sample.host(24), sample.machine("laptop", 8, rate=16.0)]
    steps = [sample.step(n, machines=machines, step_s=2.0, data_s=1.0) for n in range(1, 5)]
    assert summarize([sample.run_start(), *steps]).efficiency == pytest.approx(0.8)

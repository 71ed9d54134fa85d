"""The pure parts of `potluck probe`: windows, rates, round trips, shares of time, what a plan gets, the table."""

from __future__ import annotations

import json
import socket
import threading
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from potluck.checked import convert, to_json
from potluck.device import pick
from potluck.errors import PotluckError
from potluck.plan import fleet_inputs, models
from potluck.probe import bare, iperf
from potluck.probe.link_client import speed_in
from potluck.probe.speed import Training, busy_note, largest, measure, spread
from potluck.probe.stream import FIRST_WINDOW, MOST_WINDOW, Meter, Shares, Window, round_trips
from potluck.report.probe_table import probe_lines, summary
from potluck.spec.probed import DeviceSpeed, Probed, ProbedPath, Rate, RoundTrips, Way
from potluck.train import recipes
from support import fake_device

MB = 1e6


def streamed(rate: float, seconds: float, round_trip_s: float = 0.001) -> tuple[Window, Meter, int]:
    """A sender with a window over a link of that rate, as fast as it can; the most that was ever on its way."""
    window, meter = Window(0.0), Meter(seconds)
    acks: list[tuple[float, int]] = []
    free_at = now = 0.0
    most = 0
    while now < seconds:
        while size := window.piece(now):
            window.sent += size
            free_at = max(free_at, now) + size / rate
            acks.append((free_at, window.sent))
        most = max(most, window.sent - window.acked)
        now, total = acks.pop(0)
        meter.add(total - meter.total, now)
        now += round_trip_s
        window.arrived(total)
    return window, meter, most


@pytest.mark.parametrize("rate", [0.1 * MB, 0.6 * MB, 7.5 * MB, 117 * MB, 550 * MB])
def test_a_window_fills_a_link_and_queues_less_than_a_second_of_it(rate: float) -> None:
    _, meter, most = streamed(rate, 1.5)
    found = meter.rate()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(rate, rel=0.06)
    assert most <= min(FIRST_WINDOW + 0.5 * rate, MOST_WINDOW)


def test_a_far_link_is_filled_too() -> None:
    _, meter, _ = streamed(10 * MB, 3.0, round_trip_s=0.1)
    found = meter.rate()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(10 * MB, rel=0.1)


def test_nobody_can_acknowledge_what_was_not_sent() -> None:
    window = Window(0.0)
    window.sent = 1000
    window.arrived(10**12)
    assert window.acked == 1000
    window.arrived(-5)
    assert window.acked == 1000


def test_the_beginning_of_a_stream_does_not_count() -> None:
    """TCP's slow start: a quarter of the speed in the first quarter of the time."""
    meter = Meter(2.0)
    for tick in range(400):
        meter.add(2500 if tick < 100 else 10_000, tick * 0.005)
    found = meter.rate()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(2 * MB, rel=0.02)
    assert found.variation == pytest.approx(0.0, abs=0.05)


def test_a_stream_that_stops_is_slow_and_uneven() -> None:
    meter = Meter(2.0)
    for tick in range(200):
        meter.add(10_000, tick * 0.005)
    found = meter.rate()
    assert found is not None
    assert found.bytes_per_s < 0.8 * MB  # half of it came in the counted time, then nothing
    assert meter.over(2.4)
    assert not meter.over(1.9)


def test_a_reader_that_is_held_up_at_the_end_still_finds_the_rate() -> None:
    meter = Meter(1.0)
    for tick in range(160):
        meter.add(10_000, tick * 0.005)
    meter.add(60 * 10_000, 220 * 0.005)  # what the system kept meanwhile, read at 1.1 s
    assert meter.over(1.1)
    found = meter.rate()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(2 * MB, rel=0.03)


def test_what_comes_after_the_time_does_not_count_and_nothing_grows_without_bound() -> None:
    meter = Meter(0.5)
    for tick in range(100_000):
        meter.add(1000, tick * 0.0001)
    found = meter.rate()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(10 * MB, rel=0.03)
    assert len(meter._marks) <= 103


def test_too_little_is_no_rate() -> None:
    meter = Meter(1.0)
    assert meter.rate() is None
    meter.add(1000, 0.0)
    meter.add(1000, 0.001)
    assert meter.rate() is None


def test_round_trips_have_a_middle_a_tail_and_a_jitter() -> None:
    found = round_trips([0.001] * 98 + [0.101, 0.001])
    assert found is not None
    assert (found.count, found.p50_s) == (100, 0.001)
    assert found.p99_s == 0.001
    assert found.jitter_s == pytest.approx(2 * 0.1 / 99)
    worse = round_trips([0.001] * 97 + [0.101] * 3)
    assert worse is not None
    assert worse.p99_s == 0.101
    assert round_trips([]) is None


@pytest.mark.parametrize("paths", [1, 2, 4])
def test_the_shares_of_time_make_up_the_whole(paths: int) -> None:
    shares = Shares(30.0, paths)

    def path_s(*, used: bool) -> float:
        directions = shares.of("ours", used=used) + shares.of("bare", used=used)
        return shares.of("idle", used=used) + Shares.DIRECTIONS * directions

    assert path_s(used=True) + (paths - 1) * path_s(used=False) == pytest.approx(30.0)
    assert Shares(1.0, 4).of("bare", used=False) == Shares.LEAST_S


def test_a_busy_machine_is_said_and_so_is_the_spread_of_the_runs() -> None:
    said = "this machine is busy (load {} on 2 cores): measure again when it is quiet"
    assert busy_note(8.04, 2) == said.format("8.0")
    assert busy_note(23.2, 2) == said.format("23")
    assert "on 1 core)" in busy_note(1.1, 1)
    assert busy_note(2.0, 2) == busy_note(0.0, 1) == ""
    assert spread([1.0, 1.0, 1.0]) == 0
    assert spread([1.0, 2.0, 3.0]) == pytest.approx((2 / 3) ** 0.5 / 2)
    assert spread([1.0, 2.0]) is None


def test_the_largest_micro_batch_is_an_estimate_from_half_of_the_free_memory() -> None:
    assert largest(4, 1000, 10.0) == 50
    assert largest(64, 1000, 10.0) == 64  # that one was seen to fit
    assert largest(4, None, 10.0) is None
    assert largest(4, 1000, 0.0) is None


@pytest.mark.parametrize("name", ["cpu", "fake"])
def test_a_device_is_measured_and_copies_only_where_there_are_any(name: str) -> None:
    fake_device.install()
    recipe = recipes.get("gpt")
    training = Training(recipe=recipe, config=recipe.Config(depth=1, sequence=16))
    said: list[str] = []
    found = measure(pick(name, threads=1), training, "tower", 0.3, said.append)
    assert said[0] == "preparing gpt"
    assert (found.model, found.sequence, found.name) == ("gpt:1", 16, "tower")
    assert found.samples_per_s
    assert found.flops_per_s == pytest.approx(found.samples_per_s * models.find("gpt:1", 16).flops_per_sample)
    assert found.parameters == models.find("gpt:1").parameters - (128 - 16) * 64
    assert found.micro_batch
    assert found.largest_micro_batch
    assert found.saved_bytes_per_sample
    assert found.matmul_flops_per_s.keys() <= {"fp32", "bf16", "fp16"}
    assert found.matmul_flops_per_s["fp32"] > 0
    assert found.memory_bytes_per_s
    copies = (found.to_device_bytes_per_s, found.from_device_bytes_per_s)
    assert all(copies) if name == "fake" else copies == (None, None)


# -- one bare connection ----------------------------------------------------------------------------------------


def test_the_bare_port_opens_to_its_secret_only_and_once() -> None:
    offer = bare.Offer("127.0.0.1", "127.0.0.1", takes=True, sends=True, seconds=0.3)
    found: list[Rate | None] = []
    thread = threading.Thread(target=lambda: found.append(offer.serve()))
    thread.start()
    with socket.create_connection(("127.0.0.1", offer.port), timeout=5) as stranger:
        stranger.sendall(bytes(bare.SECRET_BYTES))
        assert stranger.recv(1) == b""  # closed, nothing said
    here = bare.measure("127.0.0.1", offer.port, offer.secret, sends=True, takes=True, seconds=0.3)
    thread.join(10)
    assert here is not None
    assert found[0] is not None
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", offer.port), timeout=5)


def test_the_bare_port_is_closed_to_other_addresses() -> None:
    offer = bare.Offer("127.0.0.1", "192.0.2.7", takes=True, sends=False, seconds=0.3)
    thread = threading.Thread(target=offer.serve)
    thread.start()
    with pytest.raises(OSError):
        bare.measure("127.0.0.1", offer.port, offer.secret, sends=True, takes=False, seconds=0.1)
    offer.close()
    thread.join(10)
    assert not thread.is_alive()


# -- what other programs and machines say -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [b"", b"{", b"[]", b'{"end": {}}', b'{"end": {"sum_received": {"bits_per_second": -1}}}', b'{"error": "x"}'],
)
def test_an_iperf3_that_failed_is_no_rate(said: bytes) -> None:
    assert iperf.rate_in(said) is None


def test_iperf3s_rate_is_what_was_received() -> None:
    said = {"end": {"sum_sent": {"bits_per_second": 9e8}, "sum_received": {"bits_per_second": 8e8}}}
    assert iperf.rate_in(json.dumps(said).encode()) == Rate(bytes_per_s=1e8)


SPEED = DeviceSpeed(
    name="tower",
    device="NVIDIA GeForce RTX 4070 12 GB",
    reason="CUDA is available",
    training="gpt depth 12, sequence 1024, bf16",
    model="gpt:12",
    sequence=1024,
    parameters=124_000_000,
    samples_per_s=31.0,
    flops_per_s=2.7e13,
    micro_batch=16,
    largest_micro_batch=40,
    saved_bytes_per_sample=1.3e8,
    memory_bytes=12 << 30,
    memory_free_bytes=11 << 30,
    matmul_flops_per_s={"fp32": 2.1e13, "bf16": 5.2e13, "fp16": 5.2e13},
    memory_bytes_per_s=4.4e11,
    to_device_bytes_per_s=1.2e10,
    from_device_bytes_per_s=1.1e10,
    samples_variation=0.31,
    note="this machine is busy",
)


def heard(table: Any) -> DeviceSpeed:
    frame = table if isinstance(table, bytes) else json.dumps(table).encode()
    return speed_in([frame])


def test_the_other_machines_speed_is_taken_as_it_is() -> None:
    assert heard(asdict(SPEED)) == SPEED


@pytest.mark.parametrize(
    "said",
    [b"", b"{", b"[1]", b'{"name": 3}', b'{"device": "x"}', b"[" * 60_000, b'{"name": "' + b"x" * 70_000 + b'"}'],
)
def test_nonsense_from_the_other_machine_is_no_speed(said: bytes) -> None:
    assert heard(said) == DeviceSpeed(name="the other machine")


def test_numbers_that_cannot_be_are_left_out() -> None:
    wild = {**asdict(SPEED), "samples_per_s": -1.0, "flops_per_s": 1e300, "matmul_flops_per_s": {"bf16": -1.0}}
    taken = heard({**wild, "device": "x" * 1000})
    assert (taken.samples_per_s, taken.flops_per_s, taken.matmul_flops_per_s) == (None, None, {})
    assert len(taken.device) == 200


# -- what comes of it -------------------------------------------------------------------------------------------


def way(ours: float, bare_: float) -> Way:
    return Way(ours=Rate(bytes_per_s=ours, variation=0.02), bare=Rate(bytes_per_s=bare_, variation=0.01))


TIMES = RoundTrips(count=100, p50_s=0.0004, p99_s=0.002, jitter_s=0.0001)
LINK = ProbedPath(
    address="192.168.1.20",
    source="192.168.1.5",
    interface="eth0",
    used=True,
    idle=TIMES,
    loaded=replace(TIMES, p50_s=0.02),
    out=way(115 * MB, 117 * MB),
    back=way(60 * MB, 117 * MB),
    both_out=way(110 * MB, 117 * MB),
    both_back=way(50 * MB, 110 * MB),
)
LAPTOP = replace(SPEED, name="laptop", device="M2", flops_per_s=3e12, samples_per_s=3.4, reason="")
PAIR = Probed(here=LAPTOP, there=SPEED, paths=(LINK,))


def test_a_probe_survives_its_file() -> None:
    table = json.loads(to_json(PAIR))
    assert convert(table, Probed) == PAIR


@pytest.mark.parametrize("pair", [PAIR, Probed(here=SPEED, there=LAPTOP, paths=(LINK,))])
def test_a_plan_reads_the_machines_and_the_slower_direction(pair: Probed) -> None:
    model = models.find("gpt:12", 1024)
    given = fleet_inputs.from_facts([("facts.json", json.loads(to_json(pair)))], model)
    host, guest = given.fleet.machines
    assert (host.name, guest.name) == ("tower", "laptop")
    assert host.link_bytes_per_s is None  # it may have other guests, on better links
    assert guest.link_bytes_per_s == 60 * MB
    assert guest.latency_s == 0.0002
    assert guest.samples_per_s == pytest.approx(3.4)
    assert given.assumptions == ()


def test_a_plan_reads_a_machine_alone() -> None:
    given = fleet_inputs.from_facts([("x", json.loads(to_json(Probed(here=SPEED))))], models.find("gpt2-124m"))
    assert [machine.name for machine in given.fleet.machines] == ["tower"]


def test_a_plan_says_what_a_link_alone_lacks() -> None:
    bare_pair = Probed(here=DeviceSpeed(name="a"), there=DeviceSpeed(name="b"), paths=(LINK,))
    with pytest.raises(PotluckError, match="how fast a is"):
        fleet_inputs.from_facts([("x", json.loads(to_json(bare_pair)))], models.find("gpt2-124m"))


def test_the_table_fits_eighty_columns_and_says_everything() -> None:
    lines = [line.plain for line in probe_lines(PAIR, 80)]
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert lines[0].startswith("laptop and tower: 480 Mbit/s encrypted, 51 % of bare TCP, 0.40 ms apart")
    for words in (
        "31.0 samples/s ± 31 % of gpt",
        "note          this machine is busy",
        "estimated",
        "fp16 52 TFLOP/s",
        "p99 2.00 ms",
        "920 Mbit/s ±  2 %",
        "98 %",
    ):
        assert words in text
    assert "iperf3" not in text


def test_iperf3_gets_its_column_and_a_note_its_line() -> None:
    path = replace(LINK, out=replace(LINK.out, iperf3=Rate(bytes_per_s=118 * MB)), notes=("no bare TCP: closed",))
    lines = [line.plain for line in probe_lines(replace(PAIR, paths=(path,)), 80)]
    assert max(map(len, lines)) <= 80
    assert any("944 Mbit/s" in line for line in lines)
    assert any("no bare TCP" in line for line in lines)


def test_names_of_other_machines_do_not_steer_the_terminal() -> None:
    evil = replace(SPEED, name="\x1b[2Jx", device="\x1b]0;x\x07")
    text = "\n".join(line.plain for line in probe_lines(replace(PAIR, there=evil), 80))
    assert "\x1b" not in text
    assert "\x1b" not in summary(replace(PAIR, there=evil))

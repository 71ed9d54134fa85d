"""The catalogue, and fleets from words and from facts."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.checked import convert
from potluck.errors import ConfigError, UserError
from potluck.plan import devices, inputs, links, models, sources
from potluck.spec.measured import Measured

GPT2 = models.find("gpt2-124m")


@pytest.mark.parametrize(
    "name",
    [
        *("RTX 3060", "RTX 3090", "RTX 4070", "RTX 4090", "RTX 5090", "M1", "M2", "M3", "M4", "M4 Max", "M2 Ultra"),
        *("H100", "H200", "MI300X", "i9-13900K", "i5-12450H", "Raspberry Pi 5"),
        *("rtx4070", "NVIDIA GeForce RTX 4070", "Apple M2 Max", "NVIDIA H100 80GB HBM3"[:11]),
        "13th Gen Intel(R) Core(TM) i9-13900K"[9:],
    ],
)
def test_devices_by_name(name: str) -> None:
    sheet = devices.find(name)
    assert 0 < sheet.flops_per_s("fp32") <= sheet.fp32_tflops * 1e12
    assert "not measured" in sheet.about()


def test_the_effective_speed_is_peak_times_utilisation_and_says_so() -> None:
    card = devices.find("RTX 4070")
    assert card.flops_per_s() == pytest.approx(58.3e12 * 0.5)
    assert card.about() == "RTX 4070: 58.3 TFLOP/s bf16 (club386.com) × 0.5 assumed, not measured"
    chip = devices.find("M4 Max")
    assert chip.flops_per_s("bf16") == chip.flops_per_s("fp32")  # it has no faster format
    assert "derived" in chip.about()


def test_each_figure_has_a_page_or_is_called_what_it_is() -> None:
    assert {*sources.PEAKS, *sources.WATTS} <= set(devices.DEVICES)
    for sheet in devices.DEVICES.values():
        read = sources.site(sheet.page)
        assert sheet.source == read if read else sheet.source in (devices.ESTIMATE, devices.DERIVED), sheet.name
        assert sheet.watts_source.split(", ")[0] == (sources.site(sheet.watts_page) or devices.ESTIMATE)
    assert devices.find("GTX 1080 Ti").source == devices.ESTIMATE
    assert devices.find("M2 Ultra").watts_source == "support.apple.com, at the wall"


@pytest.mark.parametrize(
    ("name", "near"), [("RTX 4071", "RTX 4070"), ("M4 Mux", "M4 Max"), ("i9-13900", "i9-13900K"), ("H10", "H100")]
)
def test_a_wrong_device_gets_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match="no device") as wrong:
        devices.find(name)
    assert f"did you mean {near}?" in wrong.value.hint


@pytest.mark.parametrize(
    "name",
    ["1GbE", "2.5 GbE", "10gbe", "Wi-Fi 5", "wifi 6", "Thunderbolt 4", "thunderbolt5", "400G RoCE", "TB4", "wifi"],
)
def test_links_by_name(name: str) -> None:
    assert links.find(name).bytes_per_s > 1e6


def test_links_by_rate_and_wrong_ones() -> None:
    assert links.find("300Mbit").bytes_per_s == pytest.approx(37.5e6)
    assert links.find("2.5 Gbit/s").bytes_per_s == pytest.approx(312.5e6)
    for word in ("0Mbit", "1..2Mbit", "99999999Gbit", "-5Mbit", "- 5 Mbit/s"):
        with pytest.raises(ConfigError):
            links.find(word)
    with pytest.raises(ConfigError) as wrong:
        links.find("wfi 6")
    assert "did you mean Wi-Fi 6?" in wrong.value.hint


@pytest.mark.parametrize(
    ("word", "near"), [("5 Mbps", "5Mbit"), ("1Gb/s", "1Gbit"), ("5MB/s", "40Mbit"), ("300 MBPS", "300Mbit")]
)
def test_a_rate_as_the_shops_write_it_is_asked_about(word: str, near: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        links.find(word)
    assert wrong.value.hint == f"did you mean {near}?"


def test_the_next_faster_link() -> None:
    assert [links.faster(links.LINKS[name].bytes_per_s) for name in ("Wi-Fi 5", "1GbE", "2.5GbE")] == [
        links.LINKS["1GbE"],
        links.LINKS["2.5GbE"],
        links.LINKS["10GbE"],
    ]
    assert links.faster(1e12) is None


@pytest.mark.parametrize(
    ("name", "millions"), [("gpt2-124m", 124.4), ("GPT-2 350M", 354.8), ("gpt2-760m", 774.0), ("gpt2-1.5b", 1557.6)]
)
def test_gpt2_is_counted_not_remembered(name: str, millions: float) -> None:
    plain = name.lower().replace("gpt-2 ", "gpt2-")
    assert models.find(plain).parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_other_models() -> None:
    assert models.find("gpt:4", 128).parameters == 3_323_392
    assert models.find("350M").parameters == 350_000_000
    assert models.find("7e9").flops_per_sample == 6 * 7e9 * 1024
    assert models.find("cnn").tokens_per_sample == 1
    for word in ("gtp2", "gpt:x", "0", "1e99", "-3"):
        with pytest.raises(ConfigError):
            models.find(word)


def test_the_batch() -> None:
    assert models.batch_of(GPT2, None, None) == 512
    assert models.batch_of(GPT2, 65_536, None) == 64
    assert models.batch_of(GPT2, None, 7) == 7
    for tokens, samples in ((5, None), (2048, 2), (None, 10**9)):
        with pytest.raises(ConfigError):
            models.batch_of(GPT2, tokens, samples)


def test_a_fleet_from_words() -> None:
    given = inputs.from_words(["mac=M2,link=1GbE", "desk=RTX 4070"], GPT2)
    assert [m.name for m in given.fleet.machines] == ["desk", "mac"]  # the fastest is the host
    mac = given.fleet.machine("mac")
    assert mac.link_bytes_per_s == pytest.approx(117.5e6)
    assert mac.samples_per_s == pytest.approx(1.8e12 / GPT2.flops_per_sample)
    assert any("M2" in text and "not measured" in text for text in given.assumptions)


def test_words_about_a_machine() -> None:
    words = "nas=0.5 s/sample,link=10Mbit,latency_ms=8,micro_batch=2,host"
    given = inputs.from_words([words, "box=20TFLOPS"], GPT2)
    nas, box = given.fleet.machines
    assert nas.name == "nas"
    assert (nas.samples_per_s, nas.latency_s, nas.micro_batch, nas.largest_micro_batch) == (2.0, 0.008, 2, 2)
    assert box.samples_per_s == pytest.approx(20e12 / GPT2.flops_per_sample)
    assert box.link_bytes_per_s is None  # the host's counts
    small = inputs.from_words(["a=103GFLOPS"], GPT2).fleet.host
    assert small.samples_per_s == pytest.approx(0.103e12 / GPT2.flops_per_sample)


def test_no_link_at_all_is_assumed_to_be_1_gbe_and_said() -> None:
    given = inputs.from_words(["a=M2", "b=M1"], GPT2)
    assert given.fleet.machine("b").link == "1GbE"
    assert any(text.startswith("b: no link given") for text in given.assumptions)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["M2"],
        ["=M2"],
        ["a="],
        ["a=M2", "a=M1"],
        ["a=M2,host", "b=M1,host"],
        ["a=M2,lnk=1GbE"],
        ["a=M2,latency_ms=-1"],
        ["a=M2,micro_batch=many"],
        ["a=0s/sample"],
        ["a=1e99TFLOPS"],
    ],
)
def test_wrong_words(words: list[str]) -> None:
    with pytest.raises(ConfigError) as wrong:
        inputs.from_words(words, GPT2)
    assert wrong.value.hint


class TestFacts:
    def test_what_was_measured(self) -> None:
        measured = [
            Measured(name="desk", samples_per_s=30.0, model="gpt2-124m", host=True),
            Measured(name="mac", flops_per_s=2e12, link_bytes_per_s=40e6, latency_s=0.002, micro_batch=3),
        ]
        given = inputs.from_facts([("facts.json", {"format": 1, "measured": measured})], GPT2)
        desk, mac = given.fleet.machines
        assert desk.samples_per_s == pytest.approx(30.0)
        assert (mac.link_bytes_per_s, mac.latency_s, mac.micro_batch) == (40e6, 0.002, 3)
        assert given.assumptions == ()
        other = inputs.from_facts([("facts.json", {"measured": measured})], models.find("gpt2-350m"))
        ratio = GPT2.flops_per_sample / models.find("gpt2-350m").flops_per_sample
        assert other.fleet.host.samples_per_s == pytest.approx(30.0 * ratio)

    def test_two_machines_of_one_name_are_two(self) -> None:
        tables = [{"measured": [{"name": "vm", "device": "cpu", "flops_per_s": n * 1e12}]} for n in (2, 1, 3)]
        given = inputs.from_facts([(f"f{n}.json", table) for n, table in enumerate(tables)], GPT2)
        assert sorted(m.name for m in given.fleet.machines) == ["vm", "vm-2", "vm-3"]
        assert any("f1.json: a second machine is called vm, so here it is vm-2" in t for t in given.assumptions)
        twice = inputs.from_facts([("f.json", tables[0]), ("f.json", tables[0])], GPT2)
        assert [m.name for m in twice.fleet.machines] == ["vm"]

    def test_a_host_that_was_measured_with_each_of_its_guests_is_one(self) -> None:
        def visit(guest: str, flops: float) -> dict[str, Any]:
            desk = {"name": "desk", "device": "RTX 4070", "memory_bytes": 12e9, "flops_per_s": flops}
            return {"measured": [desk, {"name": guest, "flops_per_s": 1e12, "link_bytes_per_s": 1e8}]}

        given = inputs.from_facts([("a", visit("mac", 2e13)), ("b", visit("nas", 1.9e13))], GPT2)
        assert [m.name for m in given.fleet.machines] == ["desk", "mac", "nas"]
        assert given.fleet.host.samples_per_s == pytest.approx(2e13 / GPT2.flops_per_sample)

    def test_a_machine_in_words_beside_facts(self) -> None:
        facts = [("f.json", {"measured": [{"name": "desk", "flops_per_s": 1e11}]})]
        given = inputs.from_both(facts, ["mac=M2,link=1GbE"], GPT2)
        assert [m.name for m in given.fleet.machines] == ["desk", "mac"]  # measured, so the host, though slower
        assert any("mac by the catalogue beside what was measured" in text for text in given.assumptions)
        said = inputs.from_both(facts, ["mac=2GFLOPS,host"], GPT2)
        assert said.fleet.host.name == "mac"
        assert not any("catalogue" in text for text in said.assumptions)
        with pytest.raises(ConfigError):
            inputs.from_both(facts, ["desk=M2"], GPT2)

    def test_what_was_found_by_name(self) -> None:
        here = {
            "name": "desk",
            "gpus": [{"vendor": "nvidia", "name": "NVIDIA GeForce RTX 4070"}],
            "cpu": {"name": "whatever"},
            "default_address": "192.168.1.5",
            "interfaces": [{"name": "eth0", "addresses": ["192.168.1.5/24"], "speed_mbit": 2500}],
        }
        there = {"name": "mac", "gpus": [], "cpu": {"name": "Apple M2"}}
        given = inputs.from_facts([("facts.json", {"here": here, "there": there})], GPT2)
        assert given.fleet.host.device == "RTX 4070"
        assert given.fleet.host.link_bytes_per_s == pytest.approx(2500e6 / 8 * 0.94)
        assert given.fleet.guests[0].device == "M2"
        assert all("not measured" in text for text in given.assumptions)

    @pytest.mark.parametrize(
        "table",
        [
            3,
            {},
            {"measured": 3},
            {"measured": [{"flops_per_s": 1}]},
            {"measured": [{"name": "a"}]},
            {"measured": [{"name": "a", "flops_per_s": -1}]},
            {"measured": [{"name": "a", "flops_per_s": "fast"}]},
            {"measured": [{"name": "a", "flops_per_s": 0}]},
            {"here": {"name": "a", "cpu": {"name": "Z80"}}},
        ],
    )
    def test_wrong_facts(self, table: Any) -> None:
        with pytest.raises(UserError) as wrong:
            inputs.from_facts([("facts.json", table)], GPT2)
        assert "facts.json" in str(wrong.value)
        assert wrong.value.hint

    def test_keys_of_a_newer_version_are_left_out(self) -> None:
        one = convert({"name": "a", "flops_per_s": 1.0, "mood": "good"}, Measured)
        assert one == Measured(name="a", flops_per_s=1.0)

"""Links and models by name, and fleets from words and from facts."""

from __future__ import annotations

from typing import Any

import pytest

from potluck.checked import convert
from potluck.errors import ConfigError, UserError
from potluck.plan import fleet_inputs, links, models
from potluck.spec.measured import Measured

GPT2 = models.find("gpt2-124m")


@pytest.mark.parametrize(
    "name",
    [
        *("1GbE", "2.5 GbE", "10gbe", "Wi-Fi 5", "wifi 6", "Thunderbolt 4", "thunderbolt5", "400G RoCE", "TB4"),
        *("wifi", "InfiniBand NDR", "IB HDR", "edr", "PCIe 4.0 x16", "pcie 3.0", "infinity-fabric"),
    ],
)
def test_links_by_name(name: str) -> None:
    assert links.find(name).bytes_per_s > 1e6


LINK_SPELLINGS = {
    "1GbE": ("gigabit ethernet", "1G", "1 GigE"),
    "2.5GbE": ("2.5G",),
    "10GbE": ("10G", "10 gigabit ethernet", "10GBASE-T"),
    "40GbE": ("40 GbE",),
    "200GbE": ("200GbE", "200G"),
    "400GbE": ("400GbE", "400G"),
    "800GbE": ("800GbE",),
    "200G RoCE": ("RoCE 200G", "RoCEv2 200GbE"),
    "Thunderbolt 3": ("TB3", "thunderbolt-3"),
    "Thunderbolt 4": ("Thunderbolt", "USB4"),
    "Wi-Fi 6E": ("WiFi 6E",),
    "InfiniBand XDR": ("XDR", "IB XDR"),
}


@pytest.mark.parametrize(
    ("link", "name"), [(link, name) for link in LINK_SPELLINGS for name in LINK_SPELLINGS[link]]
)
def test_a_link_is_found_as_people_write_it(link: str, name: str) -> None:
    assert links.find(name).name == link


@pytest.mark.parametrize(
    ("word", "near"),
    [
        ("InfiniBand", "one of InfiniBand EDR, InfiniBand HDR, InfiniBand NDR, InfiniBand XDR?"),
        ("RoCE", "one of 100G RoCE, 200G RoCE, 400G RoCE, 800G RoCE?"),
    ],
)
def test_a_kind_of_link_is_asked_about(word: str, near: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        links.find(word)
    assert f"did you mean {near}" in wrong.value.hint


def test_wifi_is_counted_with_two_antennas() -> None:
    """IEEE 802.11: the rate of one, 72.2, 433, 600.5, 1201 and 1441 Mbit/s, twice."""
    rates = {"Wi-Fi 4": 72.2, "Wi-Fi 5": 433.3, "Wi-Fi 6": 600.5, "Wi-Fi 6E": 1201, "Wi-Fi 7": 1441.2}
    for name, one in rates.items():
        assert links.LINKS[name].line_mbit == pytest.approx(2 * one, rel=0.005)
        assert "two antennas" in links.LINKS[name].source


def test_links_by_rate_and_wrong_ones() -> None:
    assert links.find("300Mbit").bytes_per_s == pytest.approx(37.5e6)
    assert links.find("2.5 Gbit/s").bytes_per_s == pytest.approx(312.5e6)
    assert (links.find("2500Mbit").name, links.find("400Gbit").name) == ("2500 Mbit/s", "400 Gbit/s")
    assert [links.find(word).line_mbit for word in ("5 Mbps", "1Gb/s", "1 Gbps", "25GB/s")] == [5, 1e3, 1e3, 2e5]
    for word in ("0Mbit", "1..2Mbit", "99999999Gbit", "-5Mbit", "- 5 Mbit/s"):
        with pytest.raises(ConfigError):
            links.find(word)
    with pytest.raises(ConfigError) as wrong:
        links.find("wfi 6")
    assert "did you mean Wi-Fi 6?" in wrong.value.hint


@pytest.mark.parametrize(
    ("word", "near"), [("5MB/s", "40Mbit"), ("300 MBPS", "300Mbit"), ("1.5 MB", "12Mbit"), ("1..5MB", "300Mbit")]
)
def test_a_rate_that_may_be_bits_or_bytes_is_asked_about(word: str, near: str) -> None:
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
    given = fleet_inputs.from_words(["mac=M2,link=1GbE", "desk=RTX 4070"], GPT2)
    assert [m.name for m in given.fleet.machines] == ["desk", "mac"]  # the fastest is the host
    mac = given.fleet.machine("mac")
    assert mac.link_bytes_per_s == pytest.approx(117.5e6)
    assert mac.samples_per_s == pytest.approx(10 * 256 * 1.398e9 * 0.5 / GPT2.flops_per_sample)
    assert any("M2" in text and "not measured" in text for text in given.assumptions)


def test_words_about_a_machine() -> None:
    words = "nas=0.5 s/sample,link=10Mbit,latency_ms=8,micro_batch=2,host"
    given = fleet_inputs.from_words([words, "box=20TFLOPS"], GPT2)
    nas, box = given.fleet.machines
    assert nas.name == "nas"
    assert (nas.samples_per_s, nas.latency_s, nas.micro_batch, nas.largest_micro_batch) == (2.0, 0.008, 2, 2)
    assert box.samples_per_s == pytest.approx(20e12 / GPT2.flops_per_sample)
    assert box.link_bytes_per_s is None  # the host's counts
    small = fleet_inputs.from_words(["a=103GFLOPS"], GPT2).fleet.host
    assert small.samples_per_s == pytest.approx(0.103e12 / GPT2.flops_per_sample)


def test_no_link_at_all_is_assumed_to_be_1_gbe_and_said() -> None:
    given = fleet_inputs.from_words(["a=M2", "b=M1"], GPT2)
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
        fleet_inputs.from_words(words, GPT2)
    assert wrong.value.hint


class TestFacts:
    def test_what_was_measured(self) -> None:
        measured = [
            Measured(name="desk", samples_per_s=30.0, model="gpt2-124m", host=True),
            Measured(name="mac", flops_per_s=2e12, link_bytes_per_s=40e6, latency_s=0.002, micro_batch=3),
        ]
        given = fleet_inputs.from_facts([("facts.json", {"format": 1, "measured": measured})], GPT2)
        desk, mac = given.fleet.machines
        assert desk.samples_per_s == pytest.approx(30.0)
        assert (mac.link_bytes_per_s, mac.latency_s, mac.micro_batch) == (40e6, 0.002, 3)
        assert given.assumptions == ()
        other = fleet_inputs.from_facts([("facts.json", {"measured": measured})], models.find("gpt2-350m"))
        ratio = GPT2.flops_per_sample / models.find("gpt2-350m").flops_per_sample
        assert other.fleet.host.samples_per_s == pytest.approx(30.0 * ratio)

    def test_two_machines_of_one_name_are_two(self) -> None:
        tables = [{"measured": [{"name": "vm", "device": "cpu", "flops_per_s": n * 1e12}]} for n in (2, 1, 3)]
        given = fleet_inputs.from_facts([(f"f{n}.json", table) for n, table in enumerate(tables)], GPT2)
        assert sorted(m.name for m in given.fleet.machines) == ["vm", "vm-2", "vm-3"]
        assert any("f1.json: a second machine is called vm, so here it is vm-2" in t for t in given.assumptions)
        twice = fleet_inputs.from_facts([("f.json", tables[0]), ("f.json", tables[0])], GPT2)
        assert [m.name for m in twice.fleet.machines] == ["vm"]

    def test_a_host_that_was_measured_with_each_of_its_guests_is_one(self) -> None:
        def pair(guest: str, flops: float) -> dict[str, Any]:
            desk = {"name": "desk", "device": "RTX 4070", "memory_bytes": 12e9, "flops_per_s": flops}
            return {"measured": [desk, {"name": guest, "flops_per_s": 1e12, "link_bytes_per_s": 1e8}]}

        given = fleet_inputs.from_facts([("a", pair("mac", 2e13)), ("b", pair("nas", 1.9e13))], GPT2)
        assert [m.name for m in given.fleet.machines] == ["desk", "mac", "nas"]
        assert given.fleet.host.samples_per_s == pytest.approx(2e13 / GPT2.flops_per_sample)

    def test_a_machine_in_words_beside_facts(self) -> None:
        facts = [("f.json", {"measured": [{"name": "desk", "flops_per_s": 1e11}]})]
        given = fleet_inputs.from_both(facts, ["mac=M2,link=1GbE"], GPT2)
        assert [m.name for m in given.fleet.machines] == ["desk", "mac"]  # measured, so the host, though slower
        assert any("mac from the catalogue and others measured" in text for text in given.assumptions)
        said = fleet_inputs.from_both(facts, ["mac=2GFLOPS,host"], GPT2)
        assert said.fleet.host.name == "mac"
        assert not any("catalogue" in text for text in said.assumptions)
        with pytest.raises(ConfigError):
            fleet_inputs.from_both(facts, ["desk=M2"], GPT2)

    def test_what_was_found_by_name(self) -> None:
        here = {
            "name": "desk",
            "gpus": [{"vendor": "nvidia", "name": "NVIDIA GeForce RTX 4070"}],
            "cpu": {"name": "whatever"},
            "default_address": "192.168.1.5",
            "interfaces": [{"name": "eth0", "addresses": ["192.168.1.5/24"], "speed_mbit": 2500}],
        }
        there = {"name": "mac", "gpus": [], "cpu": {"name": "Apple M2"}}
        given = fleet_inputs.from_facts([("facts.json", {"here": here, "there": there})], GPT2)
        assert given.fleet.host.device == "RTX 4070"
        assert given.fleet.host.link_bytes_per_s == pytest.approx(2500e6 / 8 * 0.94)
        assert given.fleet.guests[0].device == "M2"
        assert all("not measured" in text for text in given.assumptions)

    def test_a_processor_that_is_not_in_the_catalogue_is_estimated_from_its_cores_and_clock(self) -> None:
        cpu = {"name": "Intel(R) Xeon(R) Gold 6248 CPU @ 2.50GHz", "physical": 20}
        given = fleet_inputs.from_facts([("facts.json", {"here": {"name": "desk", "cpu": cpu}})], GPT2)
        assert "1.6 TFLOP/s fp32 (estimate: 20 × 32 × 2.5 GHz)" in given.assumptions[0]

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
            fleet_inputs.from_facts([("facts.json", table)], GPT2)
        assert "facts.json" in str(wrong.value)
        assert wrong.value.hint

    def test_keys_of_a_newer_version_are_left_out(self) -> None:
        one = convert({"name": "a", "flops_per_s": 1.0, "mood": "good"}, Measured)
        assert one == Measured(name="a", flops_per_s=1.0)

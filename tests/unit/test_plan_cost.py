"""What a plan costs, and machines with several devices."""

from __future__ import annotations

import json

import pytest

from potluck.cli import _app
from potluck.errors import ConfigError
from potluck.plan import advice, cost, fleet_inputs, links, models, scale
from potluck.plan.rank_strategies import RING_PART, ring_s
from potluck.spec.fleet import Fleet, FleetMachine

GPT2 = models.find("gpt2-124m")
JOB = GPT2.job(512)


def fleet_of(*words: str) -> Fleet:
    return fleet_inputs.from_words(words, GPT2).fleet


class TestNodes:
    def test_every_device_is_a_rank_and_shares_the_link(self) -> None:
        fleet = fleet_of("a=8xMI300X,intra=xGMI", "b = 8 x MI300X,intra=xGMI,link=400G RoCE")
        assert len(fleet.machines) == 16
        assert [len(node) for node in fleet.nodes] == [8, 8]
        assert fleet.host.intra == "xGMI"
        assert fleet.host.samples_per_s == fleet_of("x=MI300X").host.samples_per_s

    def test_the_ring_is_one_inside_and_one_between(self) -> None:
        fleet = fleet_of("a=8xH100,intra=NVLink", "b=8xH100,intra=NVLink,link=100GbE")
        inside, between = links.find("NVLink 4"), links.find("100GbE")
        size = 1e9
        expected_s = 2 * 7 * (inside.latency_s + size / 8 / inside.bytes_per_s)
        expected_s += 2 * (between.latency_s / 2 + size / 2 / (RING_PART * between.bytes_per_s))
        assert ring_s(fleet, size) == pytest.approx(expected_s)
        # and less than one ring of sixteen over the link
        plain = fleet_of(*(f"m{i}=H100,link=100GbE" for i in range(16)))
        assert ring_s(fleet, size) < 0.7 * ring_s(plain, size)

    def test_one_node_needs_no_link(self) -> None:
        given = fleet_inputs.from_words(["a=4xH100"], GPT2)
        assert not any("no link given" in text for text in given.assumptions)
        assert any("no intra= given, so NVLink 4" in text for text in given.assumptions)
        assert any("PCIe 4" in text for text in fleet_inputs.from_words(["a=4xRTX 4090"], GPT2).assumptions)

    @pytest.mark.parametrize(
        ("device", "fabric"),
        [
            ("RTX 3090", "NVLink bridge"),
            ("RTX A6000", "NVLink bridge"),
            ("RTX 2080", "NVLink bridge 2080"),
            ("RTX 2080 Ti", "NVLink bridge 2080 Ti"),
            ("H100 PCIe", "NVLink bridge A100"),
        ],
    )
    def test_a_bridge_is_assumed_only_if_it_is_given_and_joins_two(self, device: str, fabric: str) -> None:
        assert fleet_of(f"a=2x{device},intra=NVLink").host.intra == fabric
        assert fleet_of(f"a=2x{device}").host.intra == "PCIe 4"
        four = fleet_inputs.from_words([f"a=4x{device},intra=NVLink"], GPT2)
        assert four.fleet.host.intra == "PCIe 4"
        assert any(f"{fabric} joins 2 devices, not 4, so PCIe 4" in text for text in four.assumptions)

    @pytest.mark.parametrize(
        ("device", "word", "fabric", "gbit"),
        [
            ("MI250X", "xGMI", "xGMI MI250X", 400),
            ("MI250X", "Infinity Fabric", "xGMI MI250X", 400),
            ("MI300X", "xGMI", "xGMI", 3584),
            ("MI355X", "xGMI", "xGMI MI355X", 4300.8),
            ("A100 PCIe", "NVLink bridge", "NVLink bridge A100", 2400),
            ("RTX 2080", "NVLink bridge", "NVLink bridge 2080", 200),
        ],
    )
    def test_a_family_of_links_is_the_devices_own(self, device: str, word: str, fabric: str, gbit: float) -> None:
        host = fleet_of(f"a=2x{device},intra={word}").host
        assert host.intra == fabric
        sheet = links.find(fabric)
        assert sheet.line_mbit == gbit * 1000
        assert host.intra_bytes_per_s == sheet.bytes_per_s

    def test_a_rate_of_both_directions_is_halved(self) -> None:
        given = fleet_inputs.from_words(["a=8xH100,intra=900GB/s"], GPT2)
        assert given.fleet.host.intra == "NVLink 4"
        assert any("900GB/s counts both directions, so NVLink 4" in text for text in given.assumptions)
        assert fleet_of("a=8xH100,intra=450GB/s").host.intra_bytes_per_s == 450e9

    def test_potluck_on_devices_of_one_node_is_limited_by_the_transport_not_the_link(self) -> None:
        near, far = fleet_of("a=2xRTX 4090"), fleet_of("a=RTX 4090", "b=RTX 4090,link=1GbE")
        assert advice.plan(JOB, near).row("potluck").exchange_s < advice.plan(JOB, far).row("potluck").exchange_s

    def test_several_links(self) -> None:
        assert links.find("8x400G RoCE").bytes_per_s == 8 * links.find("400G RoCE").bytes_per_s
        assert links.find("2 × 25GbE").name == "2x 25GbE"

    @pytest.mark.parametrize("word", ["a=8xRTX 4090,intra=NVLink", "a=H100,intra=NVLink", "a=8xH100,intra=NVLnk 4"])
    def test_what_there_is_not(self, word: str) -> None:
        with pytest.raises(ConfigError) as caught:
            fleet_of(word)
        assert caught.value.hint

    def test_a_node_is_told_of_its_own_link(self) -> None:
        with pytest.raises(ConfigError, match="no NVLink for MI300X") as caught:
            fleet_of("a=8xMI300X,intra=NVLink")
        assert "intra=xGMI" in caught.value.hint
        assert fleet_of("a=8xH100,intra=NVSwitch").host.intra == "NVLink 4"

    def test_nodes_are_not_multiplied(self) -> None:
        with pytest.raises(ConfigError, match="several devices"):
            scale.scale(JOB, fleet_of("a=2xH100", "b=2xH100,link=10GbE"), 8)


class TestCosts:
    def test_worked_by_hand(self) -> None:
        # 1000 tokens/s: a billion takes 277.8 h. 500 W at 0.30: 0.15 an hour, 41.67; rented at 2.10: 583.33.
        machine = FleetMachine(name="a", samples_per_s=1000 / JOB.tokens_per_sample, watts=500)
        fleet = Fleet(machines=(machine,))
        rows = advice.plan(JOB, fleet).rows
        own, rented = cost.costs(JOB, fleet, rows, [cost.parse_price("2.10/h")], cost.parse_electricity("0.30/kWh"))
        assert own.per_hour == pytest.approx(0.15)
        assert own.per_billion == pytest.approx(41.67, rel=1e-3)
        assert rented.per_billion == pytest.approx(583.3, rel=1e-3)
        assert rented.watts is None

    def test_a_machine_that_sits_out_takes_no_power(self) -> None:
        fleet = fleet_of("a=H100,watts=1000", "b=M2,link=Wi-Fi 4,watts=77")
        rows = advice.plan(JOB, fleet).rows
        assert [one.watts for one in cost.costs(JOB, fleet, rows, [], 0.3)] == [1000]

    def test_a_device_to_rent_is_predicted_by_itself(self) -> None:
        fleet = fleet_of("a=RTX 4070")
        rows = advice.plan(JOB, fleet).rows
        prices = [cost.parse_price("H100=2.10/h"), cost.parse_price("8xH100=16.8/h")]
        one, eight = cost.costs(JOB, fleet, rows, prices, None, model=GPT2)
        assert one.units_per_s == pytest.approx(GPT2.tokens_per_sample * 512 / rows[0].step_s * 13.6, rel=0.02)
        assert eight.units_per_s > 6 * one.units_per_s
        assert eight.strategy == "ddp"  # fsdp is 0.9 % faster there

    def test_power_that_nobody_knows_is_asked_for(self) -> None:
        fleet = fleet_of("a=20TFLOPS")
        with pytest.raises(ConfigError, match="not known how much power a takes"):
            cost.costs(JOB, fleet, advice.plan(JOB, fleet).rows, [], 0.3)

    @pytest.mark.parametrize("word", ["", "2.10", "two/h", "0/h", "2.10/kWh", "-1/h", "H100=", "1.2.3/h", ".10/h"])
    def test_what_is_no_price(self, word: str) -> None:
        with pytest.raises(ConfigError) as caught:
            cost.parse_price(word)
        assert "2.10/h" in str(caught.value.hint)

    @pytest.mark.parametrize("word", ["2.10/h", "$2.10/h", "2.10€/h", "2.1 / hr", "H100=2.1/h", "H100 = $2.10/h"])
    def test_a_price_as_people_write_it(self, word: str) -> None:
        assert cost.parse_price(word).per_hour == 2.1
        assert cost.parse_electricity("0.30 €/kWh") == 0.3

    def test_the_command(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        words = ["plan", "--machine", "desk=RTX 4070", "--electricity", "0.30/kWh", "--price", "H100=2.10/h"]
        assert _app.run(words) == 0
        out = capsys.readouterr().out
        assert "\nown electricity  solo" in out
        assert "\nH100 rented " in out
        assert "RTX 4070: 200 W (Wikipedia, the card alone)" in out
        assert max(map(len, out.splitlines())) <= 80
        assert _app.run([*words, "--json"]) == 0
        assert [row["what"] for row in json.loads(capsys.readouterr().out)["costs"]] == [
            "own electricity",
            "H100 rented",
        ]
        for more in (["--price", "x"], ["--electricity", "1"], ["--guests", "4"]):
            assert _app.run([*words, *more]) == 2
        assert _app.run(["plan", "home-pair", "--price", "H100=2/h"]) == 2
        assert "hint:" in capsys.readouterr().err

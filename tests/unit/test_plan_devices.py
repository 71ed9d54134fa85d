"""The catalogue of devices: where its figures come from, and names as people and systems write them."""

from __future__ import annotations

import re

import pytest

from potluck.errors import ConfigError
from potluck.plan import device_names, devices, fleet_inputs, links, models

CATALOGUE = devices.catalogue()
GPT2 = models.find("gpt2-124m")


class TestFigures:
    @pytest.mark.parametrize("name", CATALOGUE)
    def test_each_says_where_it_is_from(self, name: str) -> None:
        sheet = CATALOGUE[name]
        known = {*devices.pages(), devices.ESTIMATE}
        assert {sheet.peaks_from, sheet.memory_from, sheet.watts_from} <= known
        assert min(sheet.fp32_tflops, sheet.memory_gb, sheet.bandwidth_gb_per_s, sheet.watts) > 0
        assert not sheet.fabric or links.find(sheet.fabric)
        assert sheet.maker in ("NVIDIA", "AMD", "Intel", "Apple", "Raspberry Pi")

    @pytest.mark.parametrize("precision", ["bf16", "fp32"])
    @pytest.mark.parametrize("name", CATALOGUE)
    def test_a_formula_gives_the_printed_figure(self, name: str, precision: str) -> None:
        """Worked from the printed text."""
        sheet = CATALOGUE[name]
        found = re.fullmatch(rf"{re.escape(name)}: ([\d.,]+) TFLOP/s \w+ \((.*)\) × .*", sheet.about(precision))
        assert found is not None
        how, formula = found[2].partition(": ")[::2]
        if not formula:
            assert how == sheet.peaks_from
            return
        assert how == ("estimate" if sheet.peaks_from == devices.ESTIMATE else "derived")
        terms = [term.split(" × ") for term in formula.removesuffix(" GHz").replace(",", "").split(" + ")]
        total = sum(float(units) * float(cycle) * float(ghz) for units, cycle, ghz in terms) / 1000
        assert float(found[1].replace(",", "")) == pytest.approx(total, rel=0.005)

    def test_every_page_is_read_and_has_an_address(self) -> None:
        used = {page for one in CATALOGUE.values() for page in (one.peaks_from, one.memory_from, one.watts_from)}
        used |= {entry.read_from for entry in devices.entries()}
        assert used - {devices.ESTIMATE} == set(devices.pages())
        assert all(page.startswith(("https://", "http://")) for page in devices.pages().values())
        assert len(set(devices.pages().values())) == len(devices.pages())

    def test_the_effective_speed_is_peak_times_utilisation_and_says_so(self) -> None:
        card = CATALOGUE["RTX 4070"]
        assert card.flops_per_s() == pytest.approx(58.3e12 * 0.5, rel=1e-3)
        words = "58.3 TFLOP/s bf16 (derived: 5,888 × 4 × 2.475 GHz) × 0.5 assumed, not measured"
        assert card.about() == f"RTX 4070: {words}"
        chip = CATALOGUE["M4 Max"]
        assert chip.flops_per_s("bf16") == chip.flops_per_s("fp32")  # it has no faster format
        assert CATALOGUE["B200"].about().startswith("B200: 2,250 TFLOP/s bf16 (NVIDIA's data sheet, quoted) × 0.4")

    def test_the_fp32_rate_is_not_the_tensor_cores(self) -> None:
        for name in ("Jetson AGX Orin", "Jetson Orin Nano Super", "DGX Spark"):
            sheet = CATALOGUE[name]
            assert sheet.bf16_tflops is not None
            assert sheet.bf16_tflops > 3 * sheet.fp32_tflops

    @pytest.mark.parametrize("name", ["M1 Pro", "M3 Pro", "M3 Max", "M3"])
    def test_watts_of_a_mac_that_was_never_a_mini_are_an_estimate(self, name: str) -> None:
        assert CATALOGUE[name].watts_from == devices.ESTIMATE
        assert CATALOGUE[name].watts_of == "a laptop, at the wall"

    @pytest.mark.parametrize(
        ("name", "cores", "memory", "bandwidth"),
        [
            ("M3 Max", 40, 48, 400),
            ("M3 Max 36GB", 30, 36, 300),
            ("M4 Max", 40, 48, 546),
            ("M4 Max 36GB", 32, 36, 410),
        ],
    )
    def test_a_chip_is_one_that_is_sold(self, name: str, cores: int, memory: float, bandwidth: float) -> None:
        sheet = device_names.find(name)
        assert (sheet.gpu_cores, sheet.memory_gb, sheet.bandwidth_gb_per_s) == (cores, memory, bandwidth)

    @pytest.mark.parametrize(
        ("name", "memory", "bandwidth", "watts"),
        [
            ("A100", 80, 2039, 400),
            ("A100 40GB", 40, 1555, 400),
            ("A100-PCIE-40GB", 40, 1555, 250),
            ("NVIDIA A100 80GB PCIe", 80, 1935, 300),
            ("B200", 180, 7700, 1000),
            ("GB200", 186, 8000, 1200),
        ],
    )
    def test_kinds_of_one_chip(self, name: str, memory: float, bandwidth: float, watts: float) -> None:
        sheet = device_names.find(name)
        assert (sheet.memory_gb, sheet.bandwidth_gb_per_s, sheet.watts) == (memory, bandwidth, watts)

    @pytest.mark.parametrize(
        ("name", "memory"),
        [("RTX 3060", 6), ("RTX 4070", 8), ("RTX 4080", 12), ("RTX 4090", 16), ("RTX 5090", 24), ("RTX 3080", 8)],
    )
    def test_a_laptop_has_its_own_memory_and_units(self, name: str, memory: float) -> None:
        desktop, laptop = device_names.find(name), device_names.find(f"NVIDIA GeForce {name} Laptop GPU")
        assert laptop.memory_gb == memory < desktop.memory_gb
        assert laptop.watts < desktop.watts


SPELLINGS = {
    "GTX 1070": ("GTX 1070", "1070"),
    "GTX 1080 Ti": ("1080ti", "GTX 1080Ti"),
    "GTX 1660 Super": ("GeForce GTX 1660 SUPER", "1660S"),
    "RTX 2060 12GB": ("RTX 2060 12GB",),
    "RTX 3060": ("RTX 3060", "rtx3060", "3060", "GeForce RTX 3060 12GB", "NVIDIA GeForce RTX 3060"),
    "RTX 3060 Laptop": ("rtx 3060 mobile", "RTX 3060 Max-Q", "NVIDIA GeForce RTX 3060 Laptop GPU"),
    "RTX 3070 Ti": ("3070 ti", "RTX 3070Ti"),
    "RTX 3080 12GB": ("RTX 3080 12 GB",),
    "RTX 3090": ("RTX3090", "nvidia rtx-3090", "NVIDIA GeForce RTX 3090"),
    "RTX 4070": ("NVIDIA GeForce RTX 4070", "desktop rtx 4070", "geforce 4070"),
    "RTX 4070 Ti": ("RTX 4070 Ti", "4070ti", "rtx4070ti", "RTX 4070TI", "rtx-4070-ti"),
    "RTX 4070 Super": ("RTX 4070 Super", "4070S", "RTX 4070S"),
    "RTX 4070 Ti Super": (
        "GeForce RTX 4070 Ti SUPER",
        "4070 ti super",
        "4070TiSuper",
        "rtx4070 ti super",
        "4070 TiS",
    ),
    "RTX 4090": ("4090 24G", "4090 24GB"),
    "RTX 4090 D": ("RTX 4090D", "RTX 4090 D"),
    "RTX 5060 Ti": ("RTX 5060 Ti 16GB",),
    "RTX 5090": ("5090", "NVIDIA GeForce RTX 5090"),
    "RTX A6000": ("NVIDIA RTX A6000", "A6000"),
    "RTX A4000": ("NVIDIA RTX A4000",),
    "RTX 6000 Ada": ("NVIDIA RTX 6000 Ada Generation",),
    "RTX PRO 6000": (
        "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
    ),
    "RTX PRO 6000 Max-Q": ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
    "T4": ("T4", "Tesla T4", "NVIDIA T4"),
    "L4": ("NVIDIA L4",),
    "V100": ("Tesla V100-SXM2-16GB",),
    "V100 PCIe": ("Tesla V100-PCIE-32GB",),
    "A10G": ("NVIDIA A10G",),
    "A100": ("A100 80GB", "NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
    "A100 40GB": ("A100 40 GB", "NVIDIA A100-SXM4-40GB"),
    "A100 PCIe": ("A100 PCIe", "NVIDIA A100 80GB PCIe"),
    "A100 PCIe 40GB": ("A100-PCIE-40GB",),
    "H100": ("H100 SXM", "NVIDIA H100 80GB HBM3", "H100 SXM5"),
    "H100 PCIe": ("H100 PCIe", "NVIDIA H100 PCIe", "h100-pcie"),
    "H100 NVL": ("NVIDIA H100 NVL",),
    "H200": ("NVIDIA H200", "h200 141GB"),
    "GH200": ("NVIDIA GH200 480GB",),
    "GB200": ("NVIDIA GB200", "GB200 NVL72"),
    "B300": ("NVIDIA B300 SXM6 AC",),
    "Jetson AGX Orin": ("Jetson AGX Orin", "NVIDIA Jetson AGX Orin 64GB", "AGX Orin"),
    "Jetson Orin NX": ("Orin NX 16GB",),
    "Jetson Orin Nano Super": ("Orin Nano Super",),
    "Jetson AGX Thor": ("Jetson Thor", "NVIDIA Thor"),
    "DGX Spark": ("DGX Spark", "NVIDIA GB10"),
    "RX 7900 XTX": ("AMD Radeon RX 7900 XTX", "7900 XTX"),
    "RX 9070 XT": ("AMD Radeon RX 9070 XT",),
    "Ryzen AI Max+ 395": ("AMD RYZEN AI MAX+ 395 w/ Radeon 8060S", "Radeon 8060S Graphics"),
    "MI250X": ("AMD Instinct MI250X",),
    "MI300X": ("AMD Instinct MI300X OAM", "mi300x", "AMD Instinct MI300X VF"),
    "Arc A770": ("Intel(R) Arc(TM) A770 Graphics", "A770"),
    "i5-12400": ("i5-12400F", "12th Gen Intel(R) Core(TM) i5-12400"),
    "i7-12700": ("i7-12700F", "12th Gen Intel(R) Core(TM) i7-12700 CPU @ 2.10GHz"),
    "i7-1165G7": ("11th Gen Intel(R) Core(TM) i7-1165G7 @ 2.80GHz",),
    "i9-13900K": (
        *("i9-13900KF", "i9 13900kf", "13900K", "i9-13900KS", "13th Gen Intel(R) Core(TM) i9-13900K"),
        *("13th Gen Intel(R) Core(TM) i9-13900KF", "Core i9 13900K"),
    ),
    "Core Ultra 7 155H": ("Intel(R) Core(TM) Ultra 7 155H", "Ultra 7 155H"),
    "Ryzen 5 5600": ("Ryzen 5600", "AMD Ryzen 5 5600 6-Core Processor"),
    "Ryzen 5 5600X": ("Ryzen 5600X", "5600X"),
    "Ryzen 7 5800X": ("Ryzen 7 5800X", "AMD Ryzen 7 5800X 8-Core Processor", "R7 5800X", "5800X"),
    "EPYC 7763": ("AMD EPYC 7763 64-Core Processor", "EPYC 7763 (64 cores, 2.45 GHz)"),
    "M1": ("Apple M1", "MacBook Air (M1)"),
    "M1 Pro": ('MacBook Pro 16" M1 Pro', "apple m1 pro"),
    "M2": ("M2 Air", "MacBook Air M2", "m2", "M2Air", "MacBook Air (M2, 2022)", "M2 MacBook Air"),
    "M2 Pro": ("MacBook Pro M2 Pro", "Apple M2 Pro (12-core CPU, 19-core GPU)"),
    "M2 Ultra": ("Mac Studio M2 Ultra", "Mac Studio (M2 Ultra)", "Mac Pro M2 Ultra"),
    "M3": ("MacBook Air (13-inch, M3, 2024)", 'MacBook Air 13" M3', "MacBook Air 13 M3", "iMac 24 M3"),
    "M3 Max": (
        "M3 Max",
        "MacBook Pro M3 Max 128GB",
        "Apple M3 Max 40-core GPU",
        "MacBook Pro 14 M3 Max",
    ),
    "M3 Max 30-core": ("M3 Max (14-core CPU, 30-core GPU)", "M3 Max 96GB"),
    "M4": ("Mac mini M4", "MacMini M4", "iMac M4", "M4 Mac mini"),
    "M4 Pro": ("Mac mini M4 Pro", "M4Pro"),
    "M5": ("MacBook Pro 14 M5",),
    "Raspberry Pi 4": ("Raspberry Pi 4 Model B Rev 1.4", "rpi4"),
    "Raspberry Pi 5": ("Raspberry Pi 5", "raspberrypi5", "Raspberry Pi 5 8GB", "rpi5", "Pi 5"),
}


class TestNames:
    @pytest.mark.parametrize("name", CATALOGUE)
    def test_each_name_is_its_own_device(self, name: str) -> None:
        assert device_names.find(name) == CATALOGUE[name]

    @pytest.mark.parametrize("entry", devices.entries(), ids=lambda entry: entry.name)
    def test_other_names(self, entry: devices.CatalogueEntry) -> None:
        assert [device_names.find(name).name for name in entry.also] == [entry.name] * len(entry.also)

    @pytest.mark.parametrize(("device", "name"), [(d, name) for d in SPELLINGS for name in SPELLINGS[d]])
    def test_a_device_is_found_as_people_write_it(self, device: str, name: str) -> None:
        assert device_names.find(name).name == device

    def test_memory_in_a_name_is_that_of_the_device(self) -> None:
        assert device_names.find("MacBook Pro M3 Max 128GB").memory_gb == 128
        assert device_names.find("Tesla V100-SXM2-16GB").memory_gb == 16
        assert device_names.find("4090 48G").memory_gb == 48
        assert device_names.find("M3 Max 96GB").memory_gb == 96
        assert device_names.find("NVIDIA GH200 480GB").memory_gb == 96  # 480 GB are its processor's

    def test_what_is_slower_than_its_figure_is_told(self) -> None:
        assert "all 16 GPU cores" in device_names.caution("M1 Pro 14-core GPU")
        assert "all 19 GPU cores" in device_names.caution("Apple M2 Pro (10-core CPU, 16-core GPU)")
        for name in (
            "M3 Max 40-core GPU",
            "M3 Max 30-core GPU",
            "AMD Ryzen 7 5800X 8-Core Processor",
            "M4 10-core",
        ):
            assert device_names.caution(name) == ""
        assert "less memory" in device_names.caution("RTX 2070 Max-Q")  # of which there is no laptop's row
        assert "many laptops set less" in device_names.caution("RTX 4070 Laptop GPU")
        for name in ("T4", "V100", "RTX 2080 Ti"):
            assert "fp16 autocast" in device_names.caution(name)
        words = ["a=M2 Air", "b=RTX 4070 Laptop", "c=RTX 4070", "d=MacBook Air (M3, 2024),link=1GbE"]
        given = fleet_inputs.from_words(words, GPT2)
        assert sum("no fan" in text for text in given.assumptions) == 2
        assert sum("many laptops" in text for text in given.assumptions) == 1

    @pytest.mark.parametrize(
        ("written", "count", "device"),
        [
            ("8xH100", 8, "H100"),
            ("8 x MI300X", 8, "MI300X"),
            ("8 H100", 8, "H100"),
            ("2 RTX 4090", 2, "RTX 4090"),
            ("H100x8", 8, "H100"),
            ("H100 x8", 8, "H100"),
            ("RTX 4070 Ti x 2", 2, "RTX 4070 Ti"),
            ("MI300X x8", 8, "MI300X"),
            ("5800X3D", 1, "5800X3D"),
            ("Jetson TX2", 1, "Jetson TX2"),
            ("24 GB RTX 3090", 1, "24 GB RTX 3090"),
            ("980 Ti", 1, "980 Ti"),
            ("128xH100", 128, "H100"),
            ("13th Gen Intel(R) Core(TM) i9-13900K", 1, "13th Gen Intel(R) Core(TM) i9-13900K"),
            ("EPYC 7763 (64 cores, 2.45 GHz)", 1, "EPYC 7763 (64 cores, 2.45 GHz)"),
        ],
    )
    def test_several(self, written: str, count: int, device: str) -> None:
        assert device_names.counted(written) == (count, device)

    def test_a_processor_by_its_cores_and_clock(self) -> None:
        sheet = device_names.find("Xeon Gold 6248 (20 cores, 2.5 GHz)")
        assert sheet.fp32_tflops == pytest.approx(1.6)
        assert "(estimate: 20 × 32 × 2.5 GHz)" in sheet.about()
        assert sheet.memory_from == sheet.watts_from == devices.ESTIMATE
        with pytest.raises(ConfigError) as wrong:
            device_names.find("Xeon Gold 6248")
        assert 'its cores and clock: "EPYC 7543 (32 cores, 2.8 GHz)"' in wrong.value.hint


class TestUnknownNames:
    @pytest.mark.parametrize(
        ("name", "near"),
        [
            ("Jetson Orin", "one of Jetson AGX Orin, Jetson Orin NX, Jetson Orin Nano"),
            ("Ryzen 7 5800X4D", "Ryzen 7 5800X"),
            ("M6 Max", "M5 Max"),
            ("Ryzen 5", "one of Ryzen 5 3600, Ryzen 5 5600, Ryzen 5 5600X"),
            ("RX 7900", "one of RX 7900 GRE, RX 7900 XT, RX 7900 XTX"),
            ("RTX", "one of RTX 2060, RTX 2060 12GB"),
            ("RTX 6000", "one of RTX A6000, RTX 6000 Ada, RTX PRO 6000"),
            ("A1000", "A100"),
            ("Raspberry Pi 3", "Raspberry Pi"),
            ("RTX 4071", "RTX 4070"),
            ("M4 Mux", "M4 Max"),
            ("i9-13900", "one of i9-13900H, i9-13900K"),
            ("i9-13901KF", "i9-13900K"),
            ("H10", "H100"),
        ],
    )
    def test_the_nearest_is_suggested(self, name: str, near: str) -> None:
        with pytest.raises(ConfigError, match="no device") as wrong:
            device_names.find(name)
        assert f"did you mean {near}" in wrong.value.hint

    @pytest.mark.parametrize(
        ("name", "near"), [("RTX 4071", "RTX 4070"), ("RTX 5090D", "RTX 5090"), ("H10", "H100")]
    )
    def test_the_usual_one_of_a_number_is_suggested_not_a_laptops(self, name: str, near: str) -> None:
        with pytest.raises(ConfigError, match=f"no device {name!r}") as wrong:
            device_names.find(name)
        assert f"did you mean {near}?" in wrong.value.hint

    @pytest.mark.parametrize("name", ["Steam Deck", "Tesla M40", "Radeon Pro 580", "Snapdragon X Elite"])
    def test_nothing_of_another_maker_is_suggested(self, name: str) -> None:
        with pytest.raises(ConfigError) as wrong:
            device_names.find(name)
        assert wrong.value.hint.startswith("all: potluck plan --catalogue")

    @pytest.mark.parametrize("name", ["MacBook Pro", "Mac mini", ""])
    def test_a_computer_is_no_chip(self, name: str) -> None:
        with pytest.raises(ConfigError, match="names no chip"):
            device_names.find(name)

    def test_the_hint_is_not_the_catalogue(self) -> None:
        for name in ("RX 7950 XTX", "RTX", "Foo"):
            with pytest.raises(ConfigError) as wrong:
                device_names.find(name)
            assert len(wrong.value.hint) < 250

    @pytest.mark.parametrize(
        "name", ["ANE", "M2 ANE", "Apple Neural Engine", "M4 neural-engine", "CoreML", "M4 NPU", "npu"]
    )
    def test_the_neural_engine_is_refused_with_the_reason(self, name: str) -> None:
        with pytest.raises(ConfigError, match="Core ML") as wrong:
            device_names.find(name)
        assert "its GPU trains" in wrong.value.hint

    @pytest.mark.parametrize("name", ["Ryzen AI NPU", "Intel NPU", "Core Ultra 7 155H NPU"])
    def test_another_npu_is_not_apples(self, name: str) -> None:
        with pytest.raises(ConfigError, match="not on an NPU"):
            device_names.find(name)

"""Which device is picked and what is said about it; how many cores and how much memory count as usable."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from potluck import checked, limits
from potluck.device import Device, pick
from potluck.device.cpu import CpuDevice
from potluck.device.pick import FACTORIES
from potluck.errors import ConfigError
from potluck.spec.outcome import TracedInterval

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
no_mps = pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has MPS")


@pytest.fixture(autouse=True)
def _restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@no_cuda
@no_mps
@pytest.mark.parametrize("name", [None, "auto"])
def test_auto_falls_back_to_the_cpu_and_says_why(name: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.device.cuda.seems_present", lambda: True)
    device = pick(name)
    assert device.kind == "cpu"
    assert device.reason.startswith("CUDA is not available: ")


@no_cuda
@no_mps
def test_where_there_is_no_gpu_nothing_is_said_about_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("potluck.device.cuda.seems_present", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_built", lambda: False)
    assert pick().reason == "no GPU found"


@pytest.mark.parametrize("name", ["ane", "npu", "coreml", "Neural-Engine"])
def test_the_neural_engine_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match="PyTorch cannot train on the Apple Neural Engine") as wrong:
        pick(name)
    assert "--device mps" in wrong.value.hint


def test_auto_takes_cuda_before_mps_before_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from potluck.device import cuda, mps

    class Stand(CpuDevice):
        pass

    monkeypatch.setattr(mps, "why_not", lambda: None)
    monkeypatch.setattr(mps, "MpsDevice", type("MpsDevice", (Stand,), {"kind": "mps"}))
    monkeypatch.setattr(cuda, "why_not", lambda: "no GPU was found")
    assert pick().kind == "mps"
    assert pick().reason == "MPS is available"
    monkeypatch.setattr(cuda, "why_not", lambda: None)
    monkeypatch.setattr(cuda, "CudaDevice", type("CudaDevice", (Stand,), {"kind": "cuda"}))
    assert pick().kind == "cuda"
    assert pick().reason == "CUDA is available"


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None, reason="this torch is built with CUDA"
)
def test_asking_for_cuda_without_it_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="CUDA is not available: this torch is built without it") as caught:
        pick("cuda:1")
    assert "--device cpu" in caught.value.hint


@no_mps
def test_asking_for_mps_without_it_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match="MPS is not available: ") as caught:
        pick("mps")
    assert caught.value.hint


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("name", ["cuda:99", "cuda:x", "cuda:-1"])
def test_a_gpu_that_is_not_there_is_a_clear_error(name: str) -> None:
    with pytest.raises(ConfigError, match="there is no device cuda:") as caught:
        pick(name)
    assert "cuda:0" in caught.value.hint


@pytest.mark.parametrize("name", ["gpu", "", "tpu:0", "cpu:3"])
def test_unknown_devices_are_clear_errors(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        pick(name)
    assert "cpu" in caught.value.hint


@pytest.mark.parametrize("name", ["paced", "paced:", "paced:fast", "paced:0", "paced:-1", "paced:inf"])
def test_a_paced_device_needs_its_pace(name: str) -> None:
    with pytest.raises(ConfigError, match="seconds a sample") as caught:
        pick(name)
    assert "paced:0.15" in caught.value.hint


def test_a_paced_device_says_its_pace() -> None:
    device = pick("paced:0.15")
    assert (device.kind, device.torch_device.type) == ("paced", "cpu")
    assert device.label == "paced 0.15 s/sample on cpu"


@pytest.mark.parametrize(
    "changes",
    [
        *("9", "0.3", "", "9=", "9=0", "9=fast", "=0.3", "x=0.3", "0=0.3", "1=0.3", "-2=0.3", "2.5=0.3"),
        *("9=0.3,9=0.4", "9=0.3,5=0.4", "9=0.3,", "9=0.3=0.4"),
    ],
)
def test_changes_of_pace_need_later_and_later_steps_and_their_pace(changes: str) -> None:
    with pytest.raises(ConfigError, match="paced device") as caught:
        pick(f"paced:0.6,{changes}")
    assert "--device paced:0." in caught.value.hint


def test_a_paced_device_that_changes_says_so() -> None:
    assert pick("paced:0.6,9=0.3,17=0.6").label == "paced 0.6 s/sample on cpu, changing"
    assert pick(" Paced:0.6, 9 = 0.3 ").label == "paced 0.6 s/sample on cpu, changing"


def test_no_trace_is_written_unless_asked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert pick("cpu").trace is None
    monkeypatch.setenv("POTLUCK_TRACE", str(tmp_path / "trace"))
    device = pick("cpu")
    monkeypatch.delenv("POTLUCK_TRACE")
    assert device.trace is not None
    device.begin(3)
    device.end()
    device.trace.close()
    assert checked.decode((tmp_path / "trace").read_bytes(), TracedInterval).samples == 3


def test_names_are_read_leniently() -> None:
    assert pick(" CPU ").kind == "cpu"


def test_threads_are_set_and_shown() -> None:
    device = pick("cpu", threads=1)
    assert torch.get_num_threads() == 1
    assert device.label.endswith(", 1 thread")


def test_threads_default_to_what_torch_has_and_never_to_more_than_the_cores() -> None:
    torch.set_num_threads(1)  # by the user's script, or by OMP_NUM_THREADS=1
    pick("cpu")
    assert torch.get_num_threads() == 1
    torch.set_num_threads(limits.usable_cores() + 1)  # of a machine of which this process has a part
    pick("cpu")
    assert torch.get_num_threads() == limits.usable_cores()


@pytest.mark.parametrize("threads", [0, -2, 10**11])
def test_a_number_of_threads_that_no_machine_has_is_a_clear_error(threads: int) -> None:
    with pytest.raises(ConfigError, match="cannot compute"):
        pick("cpu", threads=threads)


def test_a_kind_gets_what_follows_the_colon(monkeypatch: pytest.MonkeyPatch) -> None:
    got: list[str] = []

    def make(argument: str) -> Device:
        got.append(argument)
        return CpuDevice()

    monkeypatch.setitem(FACTORIES, "other", make)
    pick("other:7")
    pick("other")
    assert got == ["7", ""]


# -- limits --------------------------------------------------------------------------------------------------


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty tree of cgroups, of which this process is in /a/b (version 2)."""
    root = tmp_path / "cgroup"
    (root / "a" / "b").mkdir(parents=True)
    own = tmp_path / "own"
    own.write_text("0::/a/b\n")
    monkeypatch.setattr(limits, "_CGROUPS", root)
    monkeypatch.setattr(limits, "_OWN_CGROUPS", own)
    monkeypatch.setattr(limits, "_allowed_physical_cores", lambda: 8)
    return root


def test_without_limits_all_allowed_cores_count(cgroups: Path) -> None:
    (cgroups / "a" / "b" / "cpu.max").write_text("max 100000\n")
    assert limits.usable_cores() == 8


def test_the_tightest_quota_above_counts_rounded_up(cgroups: Path) -> None:
    (cgroups / "a" / "b" / "cpu.max").write_text("400000 100000\n")
    (cgroups / "a" / "cpu.max").write_text("250000 100000\n")
    assert limits.usable_cores() == 3


def test_a_fraction_of_a_core_is_one_core(cgroups: Path) -> None:
    (cgroups / "cpu.max").write_text("20000 100000\n")
    assert limits.usable_cores() == 1


def test_quotas_of_cgroups_version_1_count(cgroups: Path, tmp_path: Path) -> None:
    (tmp_path / "own").write_text("4:cpu,cpuacct:/box\n3:memory:/box\n1:name=systemd:/box\n")
    group = cgroups / "cpu,cpuacct" / "box"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text("150000")
    (group / "cpu.cfs_period_us").write_text("100000")
    assert limits.usable_cores() == 2
    (group / "cpu.cfs_quota_us").write_text("-1")
    assert limits.usable_cores() == 8


def test_memory_is_the_containers_where_that_is_less(cgroups: Path) -> None:
    (cgroups / "a" / "memory.max").write_text(str(64 << 20))
    (cgroups / "a" / "memory.current").write_text(str(50 << 20))
    (cgroups / "a" / "memory.stat").write_text(f"anon 5\ninactive_file {10 << 20}\n")
    assert limits.usable_memory() == (64 << 20, 24 << 20)


def test_memory_is_the_machines_without_a_limit(cgroups: Path) -> None:
    (cgroups / "a" / "memory.max").write_text("max\n")
    assert limits.usable_memory()[0] == psutil.virtual_memory().total


def test_two_threads_of_a_core_are_one_core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_CPUS", tmp_path)
    monkeypatch.setattr(limits.sys, "platform", "linux")
    monkeypatch.setattr(limits.os, "sched_getaffinity", lambda pid: {0, 1, 4}, raising=False)
    monkeypatch.setattr(limits.psutil, "cpu_count", lambda logical=True: 4)
    for cpu, siblings in {0: "0,4", 1: "1,5", 4: "0,4"}.items():
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings)
    assert limits._allowed_physical_cores() == 2


def test_the_processor_has_a_name() -> None:
    assert limits.cpu_name()
    assert "(R)" not in limits.cpu_name()
    assert limits._cpuinfo_name("processor : 0\nmodel name\t: AMD EPYC 7B13\n") == "AMD EPYC 7B13"

"""A rig's network as commands: the star, the rates in both directions, the latency; and why it cannot be had."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from potluck.lab import permission
from potluck.lab.topology import HOLDER, Wiring, needs_netem, shaping, wiring
from potluck.spec.rig import Rig, parse


def rig(*machines: dict[str, Any]) -> Rig:
    return parse({"name": "test", "machine": [{"name": "desk", "role": "host"}, *machines]})


def test_every_machine_has_its_own_address_and_one_cable_to_the_switch() -> None:
    found = wiring(rig(*({"name": f"m{n}"} for n in range(63))))
    assert len({port.address for port in found.ports}) == 64
    assert found.ports[0].machine == "desk"
    assert found.ports[0].address == "10.77.0.1"
    ends = [port.switch_ip[0] for port in found.ports]
    assert all(line.endswith(f"peer name eth0 netns {HOLDER}") for line in ends)
    assert len({line.split()[3] for line in ends}) == 64
    assert all(len(line.split()[3]) <= 15 for line in ends), "the kernel takes no longer names"
    for port in found.ports:
        name = port.switch_ip[0].split()[3]
        assert port.switch_ip[1:] == (f"link set dev {name} master switch", f"link set dev {name} up")
        assert f"address add {port.address}/24 dev eth0" in port.machine_ip
        assert "link set dev lo up" in port.machine_ip


def test_a_link_is_shaped_at_both_of_its_ends_and_only_where_the_rig_says_so() -> None:
    desk, laptop = wiring(rig({"name": "laptop", "link_mbit": 40})).ports
    assert desk.switch_tc == desk.machine_tc == ()
    assert laptop.machine_tc == ("qdisc replace dev eth0 root tbf rate 40000000bit burst 20000 latency 100ms",)
    assert laptop.switch_tc == ("qdisc replace dev port2 root tbf rate 40000000bit burst 20000 latency 100ms",)


@pytest.mark.parametrize(
    ("mbit", "words"),
    [
        (0.5, "rate 500000bit burst 16000 "),
        (5, "rate 5000000bit burst 16000 "),
        (1000, "rate 1000000000bit burst 500000 "),
        (40.25, "rate 40250000bit burst 20125 "),
    ],
)
def test_bursts_grow_with_the_rate_and_never_below_some_packets(mbit: float, words: str) -> None:
    assert words in shaping("eth0", mbit, 0.0)[0]


def test_latency_comes_before_the_rate() -> None:
    first, second = shaping("eth0", 40, 2.5)
    assert first.startswith("qdisc replace dev eth0 root handle 1: netem delay 2500us limit ")
    assert second.startswith("qdisc replace dev eth0 parent 1:1 handle 10: tbf rate 40000000bit ")
    (only,) = shaping("eth0", None, 10)
    assert "netem delay 10000us" in only
    assert not needs_netem(rig({"name": "a", "link_mbit": 5}))
    assert needs_netem(rig({"name": "a", "latency_ms": 5}))


def test_a_wiring_survives_json() -> None:
    made = wiring(rig({"name": "laptop", "link_mbit": 40, "latency_ms": 3}))
    assert msgspec.json.decode(msgspec.json.encode(made), type=Wiring) == made


@pytest.mark.parametrize(
    ("switch", "value", "words"),
    [
        ("user/max_user_namespaces", "0", "user.max_user_namespaces is 0"),
        ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns is 1"),
    ],
)
def test_what_forbids_namespaces_is_named(switch: str, value: str, words: str) -> None:
    assert words in permission.explain(
        "Operation not permitted", root=False, read={switch: value}.get, container=None
    )
    # To root they do not apply, so something else it must be.
    assert "Operation not permitted" in permission.explain(
        "unshare: Operation not permitted", root=True, read={switch: value}.get, container=None
    )


def test_switches_that_allow_are_not_blamed() -> None:
    allowing = {
        "user/max_user_namespaces": "96343",
        "kernel/unprivileged_userns_clone": "1",
        "kernel/apparmor_restrict_unprivileged_userns": "0",
    }
    words = permission.explain("unshare failed", root=False, read=allowing.get, container="Docker")
    assert "unshare failed" in words
    assert "Docker container" in words
    assert "is 0" not in words


def test_a_box_that_is_not_linux_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission.sys, "platform", "darwin")
    assert permission.why_not() == "network namespaces need Linux"


def test_missing_tools_are_named_with_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permission.sys, "platform", "linux")
    monkeypatch.setattr(permission.shutil, "which", lambda tool, path: None if tool == "tc" else f"/sbin/{tool}")
    assert permission.why_not() == "the command tc is missing (Debian: apt install iproute2)"

"""The backend's settings: where they come from, what is refused, and which address is chosen why."""

from __future__ import annotations

import copy
import re
import socket
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from potluck import env
from potluck.dist import own_addresses as looking
from potluck.dist.config import (
    PREFIX,
    SHARED,
    Config,
    ConfigContext,
    LocalAddress,
    Resolved,
    disagreement,
    ranks_text,
    resolve,
)
from potluck.errors import ConfigError

LOOPBACK = LocalAddress(name="lo", address="127.0.0.1", loopback=True)
WIFI = LocalAddress(name="wlan0", address="192.168.1.7")
WIRE = LocalAddress(name="eth0", address="10.0.0.7")
FACTS = ConfigContext(
    rank=3,
    world=8,
    interfaces=(LOOPBACK, WIFI, WIRE),
    master_address="10.0.0.1",
    master_port=29500,
    source_address="10.0.0.7",
)


def settled(config: Config | None = None, environ: dict[str, str] | None = None, **changed: Any) -> Resolved:
    given = {item.name: getattr(FACTS, item.name) for item in fields(FACTS)}
    return resolve(config, environ or {}, ConfigContext(**{**given, **changed}))


def test_nothing_said_is_all_defaults() -> None:
    got = settled()
    assert (got.transport, got.compression, got.encryption, got.checksum) == ("auto", "none", True, False)
    assert (got.chunk_bytes, got.small_bytes, got.port, got.timeout_s) == (512 * 1024, 32 * 1024, 0, None)
    assert (got.heartbeat_s, got.heartbeat_timeout_s, got.log_level) == (1.0, 5.0, "warning")
    assert set(got.said_by.values()) == {"default"}


VALUES: dict[str, tuple[str, Any]] = {
    "transport": ("TCP", "tcp"),
    "address": ("192.168.1.7", "192.168.1.7"),
    "interface": ("wlan0", "wlan0"),
    "port_base": ("30000", 30_003),
    "chunk_bytes": ("1MiB", 1024**2),
    "small_bytes": ("65536", 65_536),
    "algorithm": ("Ring", "ring"),
    "compression": ("topk:0.05", "topk:0.05"),
    "checksum": ("on", True),
    "encryption": ("0", False),
    "copy_threads": ("3", 3),
    "timeout_s": ("90", 90.0),
    "connect_timeout_s": ("2.5", 2.5),
    "heartbeat_s": ("0.5", 0.5),
    "heartbeat_timeout_s": ("7", 7.0),
    "log_level": ("INFO", "info"),
}


@pytest.mark.parametrize("name", list(VALUES))
def test_every_setting_has_its_variable(name: str) -> None:
    text, value = VALUES[name]
    got = settled(environ={PREFIX + name.upper(): text})
    assert getattr(got, "port" if name == "port_base" else name) == value
    assert got.said_by[name] == PREFIX + name.upper()


def test_settings_and_variables_are_the_same_set() -> None:
    names = [item.name for item in fields(Config)]
    assert {PREFIX + name.upper() for name in names} == set(env.DIST_VARIABLES)
    assert names == list(VALUES)
    assert set(SHARED) < set(names)


def test_every_setting_is_documented_with_its_default() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "reference" / "dist.md").read_text(encoding="utf-8")
    defaults = settled()
    for name in VALUES:
        row = re.search(rf"^\| `{name}` \| `{PREFIX}{name.upper()}` \| ([^|]+) \|", page, re.M)
        assert row, f"dist.md has no row for {name}"
        if row[1] not in ("chosen", "the group's"):
            got = settled(environ={PREFIX + name.upper(): row[1]})
            attribute = "port" if name == "port_base" else name
            assert getattr(got, attribute) == getattr(defaults, attribute)


def test_the_object_wins_over_the_variable() -> None:
    environ = {"POTLUCK_DIST_COMPRESSION": "int8", "POTLUCK_DIST_CHECKSUM": "1", "POTLUCK_DIST_CHUNK_BYTES": " "}
    got = settled(Config(compression="int4", checksum=False), environ)
    assert (got.compression, got.checksum, got.chunk_bytes) == ("int4", False, 512 * 1024)
    assert got.said_by["compression"] == "Config"
    assert settled(None, environ).compression == "int8"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("transport", "pigeon"),
        ("address", "no such"),
        ("port_base", -1),
        ("port_base", 70_000),
        ("port_base", True),
        ("copy_threads", -1),
        ("copy_threads", 65),
        ("copy_threads", "few"),
        ("chunk_bytes", 100),
        ("chunk_bytes", 1.5),
        ("chunk_bytes", "many"),
        ("chunk_bytes", "1GiB"),
        ("chunk_bytes", "9" * 5000),
        ("small_bytes", -5),
        ("algorithm", "tree"),
        ("algorithm", 3),
        ("compression", "int3"),
        ("compression", "topk:2"),
        ("compression", "int4:7"),
        ("checksum", "perhaps"),
        ("encryption", 1.0),
        ("timeout_s", 0),
        ("timeout_s", float("nan")),
        ("timeout_s", "soon"),
        ("heartbeat_s", 0.0),
        ("log_level", "loud"),
    ],
)
def test_a_wrong_value_is_refused_by_name_with_a_hint(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name) as caught:
        Config(**{name: value})
    assert caught.value.hint
    variable = PREFIX + name.upper()
    if isinstance(value, str):
        with pytest.raises(ConfigError, match=variable) as caught:
            settled(environ={variable: value})
        assert caught.value.hint


def test_an_unknown_variable_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="POTLUCK_DIST_COMPRESION") as caught:
        settled(environ={"POTLUCK_DIST_COMPRESION": "int8"})
    assert "POTLUCK_DIST_COMPRESSION" in caught.value.hint


@pytest.mark.parametrize(
    ("name", "hint"), [("compresion", "did you mean compression? settings: transport, "), ("xyzzy", "settings: ")]
)
def test_an_unknown_setting_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"no setting '{name}'") as caught:
        Config(**{"checksum": True, name: "int8"})
    assert caught.value.hint.startswith(hint)


def test_a_config_can_be_copied_and_changed() -> None:
    config = Config(compression="int8", checksum=True)
    assert replace(copy.deepcopy(config), compression="int4") == Config(compression="int4", checksum=True)


def test_silence_shorter_than_two_heartbeats_is_refused() -> None:
    with pytest.raises(ConfigError, match="heartbeat_timeout_s=5 is less than two heartbeats of 3 s") as caught:
        settled(Config(heartbeat_s=3.0))
    assert "POTLUCK_DIST_HEARTBEAT_TIMEOUT_S=6 " in caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("address", "10.1.1.1"), ("interface", "eth7"), ("port_base", "80"), ("heartbeat_timeout_s", "1.5")],
)
def test_what_does_not_fit_this_machine_names_who_said_so(name: str, value: str) -> None:
    variable = PREFIX + name.upper()
    with pytest.raises(ConfigError, match=f"^{variable}='?{value}'? ") as caught:
        settled(environ={variable: value})
    assert caught.value.hint
    with pytest.raises(ConfigError, match=rf"^Config\({name}='?{value}'?\) "):
        settled(Config(**{name: value}))


# -- the address


def test_the_interface_that_routes_to_the_master_is_taken() -> None:
    got = settled()
    assert (got.address, got.interface) == ("10.0.0.7", "eth0")
    assert got.reason == "it routes to MASTER_ADDR 10.0.0.1"


def test_a_master_on_this_machine_is_reached_by_loopback() -> None:
    got = settled(master_address="localhost", source_address="127.0.0.1")
    assert (got.address, got.reason) == ("127.0.0.1", "MASTER_ADDR localhost is this machine")


def test_address_and_interface_can_be_asked_for() -> None:
    got = settled(Config(interface="wlan0"))
    assert (got.address, got.reason) == ("192.168.1.7", "the interface was asked for")
    got = settled(Config(address="127.0.0.1", interface="wlan0"))
    assert (got.interface, got.reason) == ("lo", "it was asked for")


def test_an_interface_gives_its_ipv4_address_first() -> None:
    many = (
        LocalAddress(name="en0", address="fe80::1"),
        LocalAddress(name="en0", address="2001:db8::1"),
        LocalAddress(name="en0", address="192.168.1.9"),
    )
    assert settled(Config(interface="en0"), interfaces=many).address == "192.168.1.9"
    assert settled(Config(interface="en0"), interfaces=many[:2]).address == "2001:db8::1"


def test_without_a_route_the_first_that_is_up() -> None:
    down = LocalAddress(name="eth1", address="10.9.9.9", up=False)
    got = settled(interfaces=(down, *FACTS.interfaces), source_address=None)
    assert got.interface == "wlan0"
    assert "no route to MASTER_ADDR 10.0.0.1" in got.reason
    got = settled(interfaces=(LOOPBACK,), source_address=None, master_address=None)
    assert (got.interface, got.reason) == ("lo", "no MASTER_ADDR, and no other interface is up")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Config(address="10.1.1.1"), "10.1.1.1 is not an address"),
        (Config(address="0.0.0.0"), "0.0.0.0 is not an address"),
        (Config(interface="eth7"), "no interface 'eth7'"),
        (Config(interface="eth1"), "'eth1' is down"),
    ],
)
def test_an_address_that_is_not_there_is_refused_with_those_that_are(config: Config, message: str) -> None:
    down = LocalAddress(name="eth1", address="10.9.9.9", up=False)
    with pytest.raises(ConfigError, match=message) as caught:
        settled(config, interfaces=(down, *FACTS.interfaces))
    assert "192.168.1.7 (wlan0)" in caught.value.hint
    assert "10.9.9.9" not in caught.value.hint


def test_no_address_at_all() -> None:
    with pytest.raises(ConfigError, match="no address"):
        settled(interfaces=(), source_address=None)


# -- the port


def test_ports_never_meet_the_master_port_nor_each_other() -> None:
    config = Config(port_base=29498)
    ports = [settled(config, rank=rank).port for rank in range(8)]
    assert ports == [29498, 29499, 29501, 29502, 29503, 29504, 29505, 29506]
    streams = [settled(config, rank=rank).stream_port for rank in range(8)]
    assert len({29500, *ports, *streams}) == 17
    assert max(streams) == 29498 + 16
    assert settled(Config(port_base=29500), rank=0).port == 29501
    assert settled(Config(), rank=0).stream_port == 0


@pytest.mark.parametrize("base", [1, 80, 65_535])
def test_a_base_without_room_is_refused(base: int) -> None:
    with pytest.raises(ConfigError, match=f"port_base={base}"):
        settled(Config(port_base=base))


# -- text and agreement


def test_the_log_has_every_setting_with_who_said_so() -> None:
    got = settled(Config(compression="int8", timeout_s=90.0), {"POTLUCK_DIST_CHECKSUM": "1"})
    title, *lines = got.describe().splitlines()
    assert "rank 3" in title
    assert [line.split()[0] for line in lines] == [item.name for item in fields(Config)]
    said = {line.split()[0]: " ".join(line.split()[1:]) for line in lines}
    assert said["compression"] == "int8 (Config)"
    assert said["timeout_s"] == "90 s (Config)"
    assert said["checksum"] == "on (POTLUCK_DIST_CHECKSUM)"
    assert said["address"] == "10.0.0.7: it routes to MASTER_ADDR 10.0.0.1 (default)"
    assert said["interface"] == "eth0 (default)"
    assert said["port_base"] == "any free port (default)"
    assert said["chunk_bytes"] == "512 KiB (default)"
    assert said["log_level"] == "warning (default)"
    assert "29503 and 29511  (Config)" in settled(Config(port_base=29500), master_port=None).describe()


def test_ranks_with_different_settings_are_told_both_sides() -> None:
    same = settled().shared()
    assert disagreement({0: same, 1: dict(same), 2: dict(same)}) is None
    error = disagreement({0: same, 1: {**same, "compression": "int8"}, 2: same})
    assert error is not None
    assert "none on ranks 0, 2; int8 on rank 1" in str(error)
    assert "POTLUCK_DIST_COMPRESSION" in error.hint


def test_ranks_in_words() -> None:
    assert ranks_text([4]) == "rank 4"
    assert ranks_text([5, 0, 2, 1, 7]) == "ranks 0-2, 5, 7"


# -- this machine


def test_this_machine_has_a_way_to_itself() -> None:
    found = looking.gather(0, 2, "localhost", 29500)
    assert any(i.loopback and i.up for i in found.interfaces)
    assert found.source_address in ("127.0.0.1", "::1")
    assert resolve(None, {}, found).reason == "MASTER_ADDR localhost is this machine"


def test_a_name_that_nobody_knows_has_no_source_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object, **__: object) -> list[Any]:
        raise socket.gaierror("unknown")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    assert looking.source_address("nowhere.invalid") is None

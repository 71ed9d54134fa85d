"""Which machines a fleet has: names, fleet.toml, and the host files of other launchers as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

from potluck.errors import ConfigError
from potluck.fleet.hostfiles import read_fleet
from potluck.spec.fleet_file import NamedMachine


def of(*words: str) -> list[tuple[str, str, int]]:
    return [(m.name, m.ssh, m.slots) for m in read_fleet(words).machine]


def test_names_are_those_of_ssh() -> None:
    assert of("desk", "mac.local", "old@laptop", "me@192.168.1.7", "ssh://me@attic:2222") == [
        ("desk", "desk", 1),
        ("mac", "mac.local", 1),
        ("laptop", "old@laptop", 1),
        ("192.168.1.7", "me@192.168.1.7", 1),
        ("attic", "ssh://me@attic:2222", 1),
    ]


def test_the_same_name_twice_is_told_apart() -> None:
    assert [name for name, _, _ in of("mac.local", "mac.home", "old@mac")] == ["mac", "mac-2", "mac-3"]


def test_a_toml_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text(
        'host = "desk"\n[[machine]]\nssh = "desk.local"\nname = "desk"\n'
        '[[machine]]\nssh = "old@laptop"\npython = "/opt/py/bin/python"\ndevice = "cpu"\nthreads = 2\n'
    )
    fleet = read_fleet([str(file), "attic"])
    assert fleet.host == "desk"
    assert fleet.machine == (
        NamedMachine(ssh="desk.local", name="desk"),
        NamedMachine(ssh="old@laptop", name="laptop", python="/opt/py/bin/python", device="cpu", threads=2),
        NamedMachine(ssh="attic", name="attic"),
    )


@pytest.mark.parametrize(
    "text",
    [
        '[{"ssh": "host1", "ips": ["10.0.0.1"], "rdma": [null]}, {"ssh": "host2", "ips": ["10.0.0.2"]}]',
        '{"backend": "ring", "envs": [], "hosts": [{"ssh": "host1", "ips": []}, {"ssh": "host2", "ips": []}]}',
    ],
)
def test_the_json_of_mlx_launch(tmp_path: Path, text: str) -> None:
    (tmp_path / "hosts.json").write_text(text)
    assert of(str(tmp_path / "hosts.json")) == [("host1", "host1", 1), ("host2", "host2", 1)]


def test_a_host_file_of_deepspeed_and_mpi(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text(
        "# two kinds\nworker-1 slots=4\n\nworker-2 slots=2 max_slots=2  # old\nnode3:8\nnode4\n"
    )
    assert of(str(tmp_path / "hostfile")) == [
        ("worker-1", "worker-1", 4),
        ("worker-2", "worker-2", 2),
        ("node3", "node3", 8),
        ("node4", "node4", 1),
    ]


def test_the_yaml_of_accelerate(tmp_path: Path) -> None:
    (tmp_path / "hostfile").write_text("worker-1 slots=1\nworker-2 slots=1\n")
    file = tmp_path / "default_config.yaml"
    file.write_text("compute_environment: LOCAL_MACHINE\ndeepspeed_config:\n  deepspeed_hostfile: hostfile\n")
    assert [name for name, _, _ in of(str(file))] == ["worker-1", "worker-2"]
    file.write_text("distributed_type: MULTI_GPU\nmain_process_ip: '192.168.1.5'\nnum_machines: 2\n")
    fleet = read_fleet([str(file)])
    assert (fleet.host, fleet.machine[0].ssh) == ("192.168.1.5", "192.168.1.5")
    file.write_text("distributed_type: NO\nmain_process_ip: null\n")
    with pytest.raises(ConfigError, match="names no machine"):
        read_fleet([str(file)])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("f.toml", '[[machine]]\nssh = "-oProxyCommand=sh"\n', "not the name of a machine"),
        ("f.toml", '[[machine]]\nssh = "a"\npyton = "x"\n', "pyton"),
        ("f.toml", '[[machine]]\nssh = "a"\nname = "x"\n[[machine]]\nssh = "b"\nname = "x"\n', "two machines"),
        ("f.toml", 'host = "c"\n[[machine]]\nssh = "a"\n', "no machine 'c'"),
        ("f.toml", "", "names no machine"),
        ("f.json", '[{"ips": []}]', "mlx.launch"),
        ("hosts/f", "a b c\n", "line 1"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, name: str, text: str, words: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        read_fleet([str(file)])


def test_a_name_that_ssh_would_take_for_an_option_is_refused() -> None:
    with pytest.raises(ConfigError, match="not the name of a machine"):
        read_fleet(["-oProxyCommand=x"])

"""Facts from what systems say: recorded outputs of Linux, macOS and Windows commands in place of the real ones."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from potluck.doctor.facts import firewalls, installed, interfaces, leftovers, resolving, ssh_login
from potluck.doctor.facts.system import Said, System
from potluck.errors import ConfigError
from potluck.spec.facts import CONTAINER, ETHERNET, LOOPBACK, OTHER, THUNDERBOLT, VPN, WIFI, Gpu, Torch


class Recorded(System):
    """Answers from a table: commands by their first words, files by their paths."""

    def __init__(
        self,
        platform: str = "linux",
        said: Mapping[str, str | Said] | None = None,
        files: Mapping[str, str] | None = None,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(platform=platform, environ=dict(environ or {}))
        self._said, self._files = dict(said or {}), dict(files or {})

    def read(self, path: str) -> str | None:
        return self._files.get(path)

    def exists(self, path: str) -> bool:
        return any(known == path or known.startswith(f"{path}/") for known in self._files)

    def run(self, *command: str, timeout_s: float = 3.0) -> Said | None:
        line = " ".join(command)
        for words, answer in self._said.items():
            if line.startswith(words):
                return answer if isinstance(answer, Said) else Said(status=0, out=answer)
        return None


UFW = """Status: active
Logging: on (low)
Default: deny (incoming), allow (outgoing), disabled (routed)
New profiles: skip

To                         Action      From
--                         ------      ----
22/tcp                     ALLOW IN    Anywhere
6000:6010/tcp              ALLOW IN    Anywhere
7171/tcp                   DENY IN     Anywhere
22/tcp (v6)                ALLOW IN    Anywhere (v6)
"""
NFT = """table inet filter {
	chain input {
		type filter hook input priority filter; policy drop;
		iif "lo" accept
		ct state established,related accept
		tcp dport { 22, 8000-8010 } accept
		tcp dport 9000 accept
	}

	chain output {
		type filter hook output priority filter; policy drop;
	}
}
table ip nat {
	chain prerouting {
		type nat hook prerouting priority dstnat; policy accept;
	}
}
"""
NFT_REJECTS = """table inet firewall {
	chain inbound {
		type filter hook input priority filter; policy accept;
		tcp dport 22 accept
		counter packets 3 bytes 180 reject
	}
}
"""
NFT_ONE_PORT = """table ip filter {
	chain INPUT {
		type filter hook input priority filter; policy accept;
		tcp dport 7171 drop
	}
}
"""
IPTABLES = """-P INPUT DROP
-A INPUT -i lo -j ACCEPT
-A INPUT -p tcp -m tcp --dport 22 -j ACCEPT
-A INPUT -p tcp -m multiport --dports 80,6000:6010 -j ACCEPT
"""
NETSH = """
Private Profile Settings:
----------------------------------------------------------------------
State                                 ON
Firewall Policy                       BlockInbound,AllowOutbound
"""


def test_ufw() -> None:
    (wall,) = firewalls.firewalls(Recorded(said={"ufw status": UFW, "nft list": NFT}))
    assert (wall.tool, wall.blocks) == ("ufw", True)
    assert wall.allowed == ("22", "6000-6010")
    assert wall.denied == ("7171",)


def test_ufw_without_root_is_known_from_its_files() -> None:
    no = Said(status=1, out="", err="ERROR: You need to be root to run this script")
    files = {"/etc/ufw/ufw.conf": "ENABLED=yes\n", "/etc/default/ufw": 'DEFAULT_INPUT_POLICY="DROP"\n'}
    (wall,) = firewalls.firewalls(Recorded(said={"ufw": no}, files=files))
    assert wall.blocks
    assert firewalls.firewalls(Recorded(said={"ufw": no}, files={"/etc/ufw/ufw.conf": "ENABLED=no\n"})) == ()


@pytest.mark.parametrize(
    ("ruleset", "blocks", "allowed", "denied", "chain"),
    [
        (NFT, True, ("22", "8000-8010", "9000"), (), "inet filter input"),
        (NFT_REJECTS, True, ("22",), (), "inet firewall inbound"),
        (NFT_ONE_PORT, False, (), ("7171",), "ip filter INPUT"),
    ],
)
def test_nftables(
    ruleset: str, blocks: bool, allowed: tuple[str, ...], denied: tuple[str, ...], chain: str
) -> None:
    wall = firewalls.nftables(Recorded(said={"nft list ruleset": ruleset}))
    assert wall is not None
    assert (wall.blocks, wall.allowed, wall.denied) == (blocks, allowed, denied)
    assert wall.how.endswith(f"chain {chain}")


def test_nftables_keeps_ways_out_and_ways_in_apart() -> None:
    wall = firewalls.nftables(Recorded(said={"nft list ruleset": NFT}))
    assert wall is not None
    assert (wall.out_blocks, wall.out_allowed) == (True, ())
    only_out = NFT_ONE_PORT.replace("hook input", "hook output")
    wall = firewalls.nftables(Recorded(said={"nft list ruleset": only_out}))
    assert wall is not None
    assert (wall.blocks, wall.denied, wall.out_denied) == (False, (), ("7171",))


def test_no_rules_or_no_rights_is_no_firewall() -> None:
    assert firewalls.firewalls(Recorded(said={"nft": "", "iptables": ""})) == ()
    denied = Said(status=4, out="", err="Operation not permitted (you must be root)")
    assert firewalls.firewalls(Recorded(said={"nft": denied, "iptables": denied})) == ()
    assert firewalls.firewalls(Recorded()) == ()


def test_iptables() -> None:
    wall = firewalls.iptables(Recorded(said={"iptables -S INPUT": IPTABLES}))
    assert wall is not None
    assert (wall.blocks, wall.allowed) == (True, ("22", "80", "6000-6010"))
    opened = firewalls.iptables(Recorded(said={"iptables -S INPUT": "-P INPUT ACCEPT\n"}))
    assert opened is not None
    assert opened.blocks is False
    last = "-P INPUT ACCEPT\n-A INPUT -j REJECT --reject-with icmp-port-unreachable\n"
    closed = firewalls.iptables(Recorded(said={"iptables -S INPUT": last}))
    assert closed is not None
    assert closed.blocks


def test_firewalld_macos_and_windows() -> None:
    said = {"firewall-cmd --state": "running\n", "firewall-cmd --list-ports": "7171/tcp 53/udp\n"}
    (wall,) = firewalls.firewalls(Recorded(said=said))
    assert (wall.tool, wall.blocks, wall.allowed) == ("firewalld", True, ("7171",))
    on = {"socketfilterfw": "Firewall is enabled. (State = 1)\n"}
    off = {"socketfilterfw": "Firewall is disabled. (State = 0)\n"}
    assert firewalls.firewalls(Recorded("darwin", on))[0].blocks is True
    assert firewalls.firewalls(Recorded("darwin", off))[0].blocks is False
    assert firewalls.firewalls(Recorded("win32", {"netsh": NETSH}))[0].blocks is True


PORTS = """
Hardware Port: Ethernet Adapter (en4)
Device: en4
Ethernet Address: 11:22:33:44:55:66

Hardware Port: Thunderbolt Bridge
Device: bridge0
Ethernet Address: 36:22:33:44:55:66

Hardware Port: Wi-Fi
Device: en0
Ethernet Address: 11:22:33:44:55:67
"""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("lo0", LOOPBACK),
        ("en0", WIFI),
        ("en4", ETHERNET),
        ("bridge0", THUNDERBOLT),
        ("bridge100", CONTAINER),
        ("utun3", VPN),
        ("awdl0", OTHER),
    ],
)
def test_kinds_of_interface_on_a_mac(name: str, kind: str) -> None:
    system = Recorded("darwin", {"networksetup": PORTS})
    assert interfaces.kind_of(system, name, (), interfaces.hardware_ports(system)) == kind


@pytest.mark.parametrize(
    ("name", "addresses", "kind"),
    [
        ("lo", ("127.0.0.1/8",), LOOPBACK),
        ("eth0", ("192.168.1.5/24",), ETHERNET),
        ("wlp2s0", (), WIFI),
        ("docker0", (), CONTAINER),
        ("tun0", (), VPN),
        ("work", (), VPN),
        ("enx1", ("100.101.2.3/32",), VPN),
        ("thunderbolt0", (), THUNDERBOLT),
        ("can0", (), OTHER),
    ],
)
def test_kinds_of_interface_on_linux(name: str, addresses: tuple[str, ...], kind: str) -> None:
    types = {"eth0": "1", "wlp2s0": "1", "work": "65534", "enx1": "1", "thunderbolt0": "1", "can0": "280"}
    files = {f"/sys/class/net/{n}/type": f"{t}\n" for n, t in types.items()}
    files["/sys/class/net/wlp2s0/wireless/status"] = ""
    assert interfaces.kind_of(Recorded(files=files), name, addresses, {}) == kind


def test_kinds_of_interface_on_windows() -> None:
    system = Recorded("win32")
    assert interfaces.kind_of(system, "Wi-Fi", (), {}) == WIFI
    assert interfaces.kind_of(system, "Ethernet 2", (), {}) == ETHERNET
    assert interfaces.kind_of(system, "vEthernet (WSL)", (), {}) == CONTAINER
    assert interfaces.kind_of(system, "Loopback Pseudo-Interface 1", (), {}) == LOOPBACK


def test_neighbours() -> None:
    arp = (
        "IP address       HW type     Flags       HW address            Mask     Device\n"
        "192.168.1.6      0x1         0x2         11:22:33:44:55:66     *        eth0\n"
        "192.168.1.7      0x1         0x0         00:00:00:00:00:00     *        eth0\n"
    )
    linux = Recorded(files={"/proc/net/arp": arp})
    assert interfaces.neighbour(linux, "192.168.1.6") == "reachable"
    assert interfaces.neighbour(linux, "192.168.1.7") == "failed"
    assert interfaces.neighbour(linux, "8.8.8.8") is None
    known = Recorded("darwin", {"arp": "? (192.168.1.6) at 11:22:33:44:55:66 on en0 ifscope [ethernet]\n"})
    missing = Recorded("darwin", {"arp": "? (192.168.1.6) at (incomplete) on en0 ifscope [ethernet]\n"})
    nobody = Recorded("darwin", {"arp": Said(status=1, out="192.168.1.6 (192.168.1.6) -- no entry\n")})
    assert [interfaces.neighbour(s, "192.168.1.6") for s in (known, missing, nobody)] == [
        "reachable",
        "failed",
        None,
    ]


def test_sleep_settings() -> None:
    pmset = "System-wide power settings:\nCurrently in use:\n standby              1\n sleep                10\n"
    held = pmset.replace("sleep                10", "sleep                10 (sleep prevented by caffeinate)")
    assert installed.sleeps_after(Recorded("darwin", {"pmset": pmset}))[0] == 600
    assert installed.sleeps_after(Recorded("darwin", {"pmset": held}))[0] == 0
    index = "    Current AC Power Setting Index: 0x00000708\n    Current DC Power Setting Index: 0x00000384\n"
    assert installed.sleeps_after(Recorded("win32", {"powercfg": index}))[0] == 1800
    desktop = {"DBUS_SESSION_BUS_ADDRESS": "unix:path=/run/user/1000/bus"}
    schema = "gsettings get org.gnome.settings-daemon.plugins.power sleep-inactive-ac"
    gnome = {f"{schema}-type": "'suspend'\n", f"{schema}-timeout": "1200\n"}
    assert installed.sleeps_after(Recorded(said=gnome, environ=desktop))[0] == 1200
    never = gnome | {f"{schema}-type": "'nothing'\n"}
    assert installed.sleeps_after(Recorded(said=never, environ=desktop))[0] == 0
    assert installed.sleeps_after(Recorded(said=gnome))[0] is None


def test_gpus_and_the_builds_of_torch() -> None:
    (card,) = installed.gpus(Recorded(said={"nvidia-smi": "NVIDIA GeForce RTX 4070, 560.35.03\n"}))
    assert card == Gpu(vendor="nvidia", name="NVIDIA GeForce RTX 4070", driver="560.35.03", how="nvidia-smi")
    version = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n"
    (card,) = installed.gpus(Recorded(files={"/proc/driver/nvidia/version": version}))
    assert card.driver == "535.183.01"
    assert installed.gpus(Recorded(files={"/dev/kfd": ""})) == ()  # every AMD processor has it
    assert installed.gpus(Recorded(files={"/dev/kfd": "", "/opt/rocm/x": ""}))[0].vendor == "amd"
    text = "__version__ = '2.10.0+cu128'\ndebug = False\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
    assert [installed.version_field(text, name) for name in ("__version__", "cuda", "hip")] == [
        "2.10.0+cu128",
        "12.8",
        None,
    ]
    assert installed.answered("[true, false, false]\n") == (True, False, False)
    assert installed.answered("a warning\n") == (None, None, None)


def test_torch_is_asked_only_where_a_gpu_may_be_usable() -> None:
    asked = Recorded("darwin", {sys.executable: "[false, true, true]"})
    facts = installed.torch_facts(asked, ())
    assert (facts.mps_built, facts.mps_available) == (True, True)
    plain = installed.torch_facts(Recorded(), ())
    assert plain.version is not None
    assert plain.mps_built is None


def test_without_torch_there_are_facts_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert installed.torch_facts(Recorded(), ()) == Torch(error="it is not installed")


def test_rosetta_and_wsl() -> None:
    assert installed.is_translated(Recorded("darwin", {"sysctl -n sysctl.proc_translated": "1\n"}))
    assert not installed.is_translated(Recorded("darwin", {"sysctl -n sysctl.proc_translated": "0\n"}))
    kernel = "/proc/sys/kernel/osrelease"
    assert installed.is_wsl(Recorded(files={kernel: "5.15.90.1-microsoft-standard-WSL2\n"}))
    assert not installed.is_wsl(Recorded(files={kernel: "6.1.0-18-amd64\n"}))


def test_the_hosts_file() -> None:
    text = "127.0.0.1 localhost # mine\n\n# 1.2.3.4 x\n127.0.1.1\ttower.lan tower\nfe80::1%lo0 localhost\nbroken\n"
    lines = resolving.hosts_lines(text)
    assert [(line.address, line.names) for line in lines] == [
        ("127.0.0.1", ("localhost",)),
        ("127.0.1.1", ("tower.lan", "tower")),
        ("fe80::1", ("localhost",)),
    ]


@pytest.mark.parametrize(
    ("command", "verb"),
    [
        (["/usr/bin/python3", "-m", "potluck", "join", "potluck3-x"], "join"),
        (["/home/me/.venv/bin/python", "/home/me/.venv/bin/potluck", "host", "train.py"], "host"),
        (["python", "-m", "potluck.sweep.warm", "host"], "host"),
        (["vim", "potluck"], None),
        (["python", "train.py", "host"], None),
        (["python", "-m", "potluck", "doctor"], None),
    ],
)
def test_which_processes_are_trainings(command: list[str], verb: str | None) -> None:
    assert leftovers.potluck_verb(command) == verb


def test_an_orphan_does_not_show_its_token() -> None:
    orphan = leftovers.orphan_of(7, 1, ["python", "-m", "potluck", "join", "potluck3-secret"], 0.0)
    assert orphan is not None
    assert "secret" not in orphan.command
    assert not orphan.surely
    assert leftovers.orphan_of(7, 4242, ["python", "-m", "potluck", "join", "x"], 0.0) is None
    assert leftovers.orphan_of(7, 1, ["/usr/bin/torchrun", "--nnodes", "2"], 0.0) is not None


MISSPELT = '[[machine]]\nssh = "box"\npyton = "/opt/py"\n'


def test_the_cluster_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.toml"
    file.write_text('[[machine]]\nssh = "you@mac"\n[[machine]]\nssh = "box"\npython = "/opt/py"\n[[machine]]\n')
    assert ssh_login.read_cluster(file) == [("you@mac", "python3"), ("box", "/opt/py")]
    refused = Said(status=255, out="", err="you@mac: Permission denied (publickey).\r\n")
    found = ssh_login.ssh_hosts(Recorded(said={"ssh": refused}), [("you@mac", "python3")])
    assert (found[0].status, found[0].said) == (255, "you@mac: Permission denied (publickey).")
    fine = ssh_login.ssh_hosts(Recorded(said={"ssh": "Python 3.12.1\n"}), [("you@mac", "python3")])
    assert fine[0].python == "Python 3.12.1"
    for text in (
        "",
        "x",
        "machine = 3",
        '[[machine]]\nssh = "-oProxyCommand=x"',
        "[[machine]]\nssh = 3",
        f"machine = {'9' * 5000}",
        MISSPELT,
    ):
        file.write_text(text)
        with pytest.raises(ConfigError):
            ssh_login.read_cluster(file)
    with pytest.raises(ConfigError):
        ssh_login.read_cluster(tmp_path / "none.toml")


def test_commands_are_bounded_and_their_absence_is_no_error() -> None:
    system = System()
    assert system.run("there-is-no-such-command") is None
    assert system.run(sys.executable, "-c", "import time; time.sleep(30)", timeout_s=0.2) is None
    said = system.run(sys.executable, "-c", "print('x'); raise SystemExit(3)", timeout_s=30)
    assert said is not None
    assert (said.status, said.out) == (3, "x\n")
    assert system.read("/there/is/no/file") is None

"""`potluck probe` as a person uses it, without root: alone, with a listener, with slips and with strangers."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from zmq.utils import garbage

from potluck.errors import NetworkError
from potluck.plan import fleet_inputs, models
from potluck.probe.link_client import LinkClient, measure
from potluck.spec.messages import UnknownMessage
from potluck.spec.probe_messages import ProbeBye, ProbeEcho, ProbeEnd, ProbeFlow, ProbeNo
from potluck.spec.probed import DeviceSpeed, Rate
from potluck.wire.frames import pack
from potluck.wire.keys import new_keys
from potluck.wire.token import Token, encode
from potluck.wire.transport import HostSocket
from support.plain import Plain, packed
from support.probing import serving
from support.processes import Processes

pytestmark = pytest.mark.timeout(150)
LIMIT_S = 80.0
SMALL = ("--depth", "1", "--sequence", "16", "--threads", "1", "--device", "cpu", "--micro-batch", "2")
SPEED = DeviceSpeed(name="tower", device="a device", samples_per_s=10.0, flops_per_s=1e9)


@pytest.fixture(autouse=True, scope="module")
def _one_collector() -> None:
    """pyzmq's own thread for large frames lives as long as the process: it is there before anybody looks."""
    if not garbage.gc.is_alive():
        garbage.gc.start()


def quiet(words: str) -> None:
    pass


@contextlib.contextmanager
def listening() -> Iterator[Token]:
    with serving(SPEED) as (token, _):
        yield token


# -- two processes ----------------------------------------------------------------------------------------------


def test_two_processes_measure_each_other_and_a_plan_reads_the_file(tmp_path: Path) -> None:
    with Processes(tmp_path) as processes:
        other = processes.potluck(
            *("probe", "--listen", "--bind", "127.0.0.1", "--seconds", "1", "--name", "tower", *SMALL),
            name="listener",
        )
        token = other.wait_for_text(r"potluck probe (potluck\d+-\S+)\n", deadline_s=LIMIT_S)[1]
        done = processes.potluck(
            *("probe", token, "--seconds", "2", "--name", "laptop", *SMALL, "--json", "--save", "facts.json")
        )
        done.succeeds(LIMIT_S)
        other.wait_for_text("laptop .127.0.0.1. connected to measure the link", deadline_s=LIMIT_S)
        other.interrupt()
        other.succeeds(deadline_s=LIMIT_S)
    assert done.stderr() == ""
    table = json.loads(done.stdout())
    assert table == json.loads((tmp_path / "facts.json").read_text())
    assert [machine["name"] for machine in table["measured"]] == ["laptop", "tower"]
    assert token not in done.stdout()
    for side in ("here", "there"):
        assert table[side]["samples_per_s"] > 0
        assert table[side]["matmul_flops_per_s"]["fp32"] > 0
        assert table[side]["largest_micro_batch"] > 2
    (path,) = table["paths"]
    assert (path["address"], path["used"], path["notes"]) == ("127.0.0.1", True, [])
    for way in ("out", "back", "both_out", "both_back"):
        assert path[way]["ours"]["bytes_per_s"] > 0
        assert path[way]["bare"]["bytes_per_s"] > 0
    assert 0 < path["idle"]["p50_s"] <= path["idle"]["p99_s"]
    given = fleet_inputs.from_facts([("facts.json", table)], models.find("gpt:1", 16))
    assert [machine.link for machine in given.fleet.machines] == ["", "measured"]
    assert sorted(path.name for path in tmp_path.iterdir() if "facts" in path.name) == ["facts.json"]


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ctrl_c_leaves_nothing_half_written(tmp_path: Path) -> None:
    with Processes(tmp_path, fork=False) as processes:  # so that torch is not there from its first moment
        process = processes.potluck(
            *("probe", "--seconds", "100", "--save", str(tmp_path / "facts.json"), *SMALL), name="probe"
        )
        deadline = time.monotonic() + LIMIT_S
        while b"torch" not in Path(f"/proc/{process.pid}/maps").read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.interrupt()
        process.exits_with(130, deadline_s=LIMIT_S)
        assert process.stderr().split() == ["interrupted"]
    assert [path.name for path in tmp_path.iterdir() if "facts" in path.name] == []


# -- two sides, in this process ---------------------------------------------------------------------------------


def test_only_one_is_measured_with_at_a_time() -> None:
    with listening() as token:
        first, second = LinkClient(token, "one", quiet), LinkClient(token, "two", quiet)
        try:
            first.hello()
            second.hello()  # a word is always answered
            assert first._streamed(True, False, 0.3)[0] is not None
            with pytest.raises(NetworkError, match="tower is measuring with another machine"):
                second._streamed(True, False, 0.3)
            first._say(ProbeBye())
            first._ask(ProbeEcho())
            assert second._streamed(False, True, 0.3)[1] is not None
        finally:
            first.close()
            second.close()


def test_one_that_died_makes_room_for_the_next() -> None:
    with listening() as token:
        first, second = LinkClient(token, "one", quiet), LinkClient(token, "two", quiet)
        try:
            first._ask(ProbeFlow(flow=1, take=True, seconds=60.0))
            first._socket.close(linger_s=0.0)  # no goodbye
            deadline = time.monotonic() + 10.0  # far less than what it had asked for
            while True:
                with contextlib.suppress(NetworkError):  # it is still thought to be there
                    if second._streamed(True, False, 0.3)[0] is not None:
                        break
                assert time.monotonic() < deadline
        finally:
            second.close()


def test_a_listener_that_goes_away_is_named() -> None:
    with listening() as token:
        client = LinkClient(token, "one", quiet)
    try:
        with pytest.raises(NetworkError, match=r"ended|did not answer"):
            client.hello()
    finally:
        client.close()
    with pytest.raises(NetworkError, match="does not answer at port"):
        measure(token, "one", 1.0, quiet)


def test_a_running_host_is_told_from_a_listener() -> None:
    keys = new_keys()
    host = HostSocket(bind="127.0.0.1", port=0, keys=keys)
    token = Token(addresses=("127.0.0.1",), port=host.port, host_public=keys.public, guest_secret=keys.guest_secret)
    stop = threading.Event()

    def answer() -> None:
        while not stop.is_set():
            for peer, _ in host.receive(0.05):
                host.send(peer, pack(UnknownMessage(protocol="2")))
        host.close()

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with pytest.raises(NetworkError, match="a running host answers there"):
            measure(token, "one", 1.0, quiet)
    finally:
        stop.set()
        thread.join(10)


def test_what_a_client_asks_for_is_bounded() -> None:
    with serving(SPEED) as (token, server):
        client = LinkClient(token, "one", quiet)
        try:
            for seconds in (1e9, -1.0, "x", None, True):
                asked = {"id": 1, "flow": 1, "take": True, "send": True, "seconds": seconds}
                for kind in ("probe.flow", "probe.bare"):
                    assert client._socket.send_control(packed(Plain(kind=kind, fields=asked)))
            client._ask(ProbeEcho())  # the server has now seen all of them
            assert server._flow is None
            assert server._offer is None
            assert isinstance(client._ask(ProbeEnd(flow=99)).message, ProbeNo)
        finally:
            client.close()


IPERF3 = """
import json, socket, sys
asked = dict(zip(sys.argv[1:], [*sys.argv[2:], ""]))
if "--server" in asked:
    with socket.create_server((asked["--bind"], int(asked["--port"]))) as server:
        server.accept()[0].close()
else:
    try:
        socket.create_connection((asked["--client"], int(asked["--port"])), 5).close()
    except OSError as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(1)
    bits = 1e9 if "--reverse" in sys.argv else 2e9
    print(json.dumps({"end": {"sum_received": {"bits_per_second": bits}}}))
"""


@pytest.mark.skipif(os.name != "posix", reason="a script of sh")
def test_iperf3_is_asked_where_both_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes its place here: the same arguments, the same JSON."""
    code, program = tmp_path / "iperf3.py", tmp_path / "iperf3"
    code.write_text(IPERF3)
    # A path with a space cannot stand in the first line of a script.
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(code)])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    notes: list[str] = []
    with listening() as token:
        client = LinkClient(token, "one", quiet)
        try:
            client.hello()
            out = client._iperfed(True, 0.3, notes)
            back = client._iperfed(False, 0.3, notes)
        finally:
            client.close()
    assert notes == []
    assert (out, back) == ((Rate(bytes_per_s=2.5e8), None), (None, Rate(bytes_per_s=1.25e8)))


# -- slips of the hand ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (("--listen", "somewhere"), 2, "--listen takes no address"),
        (("--bind", "127.0.0.1"), 2, "--bind needs --listen"),
        (("--for", "5"), 2, "--for needs --listen"),
        (("--no-device",), 2, "nothing to measure"),
        (("potluck3-AAAA",), 2, "this token is damaged"),
        (("not an address",), 2, "neither an address nor a token"),
        (("--save", "no/such/folder/facts.json"), 2, "there is no folder"),
        (("--recipe", "gtp"), 2, "there is no recipe 'gtp'"),
        (("--depth", "0"), 2, "depth is 0"),
        (("--depth", "900"), 2, "this model needs"),
        (("--micro-batch", "100000000", "--sequence", "16"), 2, "a micro-batch of 100000000 samples"),
        (("127.0.0.1:1", "--no-device", "--seconds", "1"), 0, ""),
    ],
)
def test_slips_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], status: int, words: str
) -> None:
    from potluck.cli._app import run

    with contextlib.chdir(tmp_path):
        assert run(["probe", *arguments]) == status
    out, err = capsys.readouterr()
    assert words in err
    assert "Traceback" not in err
    assert ("hint: " in err) == (status == 2)
    assert list(tmp_path.iterdir()) == []
    if not status:
        assert "nothing of ours listens there" in " ".join(out.split())


def test_a_token_of_another_port_is_refused() -> None:
    with listening() as token, listening() as other, pytest.raises(NetworkError) as caught:
        measure(replace(token, guest_secret=other.guest_secret), "one", 1.0, quiet)
    assert caught.value.hint
    assert encode(token) not in str(caught.value)

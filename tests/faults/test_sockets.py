"""What a run opens and reads, in small: it listens where it was told to and nowhere else, and unpickles nothing."""

from __future__ import annotations

import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.fleet import JOB, Fleet
from support.pickle_watch import seen, suspicions, watched
from support.processes import SOURCE
from support.sockets import Listening, still_listening

PACED = ("--device", "paced:0.002")


@dataclass
class Watched:
    """One run, stopped and resumed, of a host with a guest, and what was seen of it."""

    folder: Path
    port: int
    host: Listening
    guest: Listening
    again: Listening


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    folder = tmp_path_factory.mktemp("watched")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in watched(folder).items():
            patch.setenv(name, value)
        with Fleet(folder / "fleet", fork=False) as fleet:  # each is watched from its first moment
            words = ["--steps", 16, "--width", 32]
            host = fleet.host(JOB, "--wait-for", "1", "--checkpoint-every", "5", *PACED, arguments=words)
            with Listening(host.pid) as of_host:
                guest = fleet.guest("ann", *PACED)
                with Listening(guest.pid) as of_guest:
                    fleet.wait_for_step(host, 7)
                    host.kill()
                    # It waits: on a busy machine it would be through before the guest has found it again.
                    options = ("--resume", str(fleet.folder), "--wait-for", "1", *PACED)
                    again = fleet.host(JOB, *options, arguments=words)
                    with Listening(again.pid) as of_again:
                        again.succeeds(deadline_s=40)
                    guest.succeeds(deadline_s=40)
            return Watched(folder, fleet.port, of_host, of_guest, of_again)


def test_a_host_listens_on_the_chosen_address_only_and_a_guest_on_none(run: Watched) -> None:
    assert run.host.looks > 3
    assert run.guest.looks > 3
    assert run.host.all == {("127.0.0.1", run.port)}
    assert run.again.all == {("127.0.0.1", run.port)}
    assert run.guest.all == set()


def test_nobody_listens_after_the_end(run: Watched) -> None:
    assert still_listening(run.host.all | run.again.all) == []


def test_nothing_is_unpickled_by_host_guest_or_resumed_host(run: Watched) -> None:
    processes, loads = seen(run.folder)
    assert processes >= 3
    assert loads == []


def test_nothing_in_the_source_could_unpickle() -> None:
    assert list(suspicions(SOURCE / "potluck")) == []


def test_a_script_on_its_own_listens_nowhere(tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        # Paced: it is not over before anybody has looked.
        script = fleet.python(str(JOB), "--steps", "5", env={"POTLUCK_DEVICE": "paced:0.01"})
        with Listening(script.pid) as sockets:
            script.succeeds(deadline_s=40)
        assert sockets.looks > 3
        assert sockets.all == set()


# -- the eyes themselves


def test_what_listens_is_seen(tmp_path: Path) -> None:
    words = "import socket, time; s = socket.create_server(('127.0.0.1', 0)); u = socket.socket(type=2); "
    words += "u.bind(('127.0.0.1', 0)); print(s.getsockname()[1], u.getsockname()[1], flush=True); time.sleep(60)"
    with Fleet(tmp_path) as fleet:
        process = fleet.python("-c", words)
        tcp, udp = map(int, process.wait_for_text(r"(\d+) (\d+)\n", 30).groups())
        with Listening(process.pid) as sockets:
            process.wait_until(lambda: sockets.looks > 3, 30, "look")
        assert sockets.all == {("127.0.0.1", tcp), ("127.0.0.1", udp)}
        assert still_listening([("127.0.0.1", tcp)]) == [("127.0.0.1", tcp)]
    with socket.create_server(("127.0.0.1", 0)) as closed:
        where = closed.getsockname()
    assert still_listening([where]) == []


def test_what_is_unpickled_is_seen(tmp_path: Path) -> None:
    words = "import pickle, _pickle, marshal, collections as c; pickle.loads(pickle.dumps(1)); "
    words += "_pickle.loads(pickle.dumps(c.OrderedDict())); marshal.loads(marshal.dumps(1))"
    subprocess.run([sys.executable, "-c", words], env=watched(tmp_path), check=True, timeout=30)
    processes, loads = seen(tmp_path)
    assert processes == 1
    kinds = [line.split()[1] for line in loads]
    assert kinds == ["pickle.loads", "_pickle.loads", "pickle.find_class", "marshal.loads"]


def test_what_could_unpickle_is_seen(tmp_path: Path) -> None:
    lines = ["import pickle", "from marshal import loads", "torch.load('x', weights_only=True)", "eval('1')"]
    (tmp_path / "bad.py").write_text("\n".join(lines))
    assert len(list(suspicions(tmp_path))) == 5

"""A run on a Ray cluster in the lab's network namespaces, for tests and bench/ray_cluster.py.

    with lab_cluster(folder, {"name": DESK, "role": "host"}, {"name": MAC, "role": "guest"}) as cluster:
        cluster.start_job()
        cluster.wait(lambda: cluster.joined(MAC))

The first machine hosts. It and the second have a node of Ray; others get one by `cluster.nodes.add`.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil

from potluck.lab.namespaces import NamespaceBox
from potluck.lab.permission import why_not
from support import ray_nodes
from support.ray_nodes import RayNodes
from support.rigs import rig

WHY_NOT = why_not() or ray_nodes.why_not()
MARK = uuid.uuid4().hex[:6]
DESK, MAC, LAPTOP = f"desk-{MARK}", f"mac-{MARK}", f"laptop-{MARK}"
JOB = Path(ray_nodes.__file__).with_name("job.py")

# With paced devices every machine has a share, whatever else the processor does: 0.2 s a step with two guests.
DRIVER = """
import sys, time
import potluck.ray
address, script, runs, *arguments = sys.argv[1:]
fleet = potluck.ray.Fleet(address=address, guests={"device": "paced:0.002"})
with fleet.start(script, arguments, runs=runs, options=["--threads", "1", "--device", "paced:0.002"]) as run:
    kinds = [type(event).__name__ for event in run.events()]
result = run.result()
print("events", len(kinds), "checkpoint", result.checkpoint, "steps", result.summary.step, flush=True)
"""

GCS = """
import sys
import ray
from ray._private import state
from ray._private.worker import global_worker
ray.init(address=sys.argv[1], log_to_driver=False)
kv = global_worker.gcs_client
with open(sys.argv[2], "wb") as out:  # what the dashboard and the state API read
    known = state.state
    out.write(repr((known.actor_table(None), ray.nodes(), known.job_table(), known.workers())).encode())
    for space in (None, b"fun", b"job", b"session", b"dashboard"):
        for key in kv.internal_kv_keys(b"", space):
            out.write(key + (kv.internal_kv_get(key, space) or b""))
"""


class LabCluster:
    """Machines with nodes of Ray, and drivers on the first."""

    def __init__(self, box: NamespaceBox, nodes: RayNodes, folder: Path) -> None:
        self.box, self.nodes, self.folder = box, nodes, folder
        self.driver: Popen[bytes] | None = None
        self._started: list[psutil.Process] = []
        self.jobs, self.runs = 0, folder / "runs-0"
        """Every job has a folder for its runs: events are those of the latest."""
        self.log = self.job_log = folder / "driver.log"

    def python(self, text: str, *arguments: str) -> Popen[bytes]:
        environment = {**self.nodes.environment, "HOME": str(self.folder), "RAY_ADDRESS": self.nodes.address}
        self.log = self.folder / f"driver-{uuid.uuid4().hex[:6]}.log"
        return self.box.start(DESK, [sys.executable, "-c", text, *arguments], env=environment, log=self.log)

    def start_job(self) -> None:
        """A run by `potluck.ray.Fleet`, until the file `stop` is there."""
        self._next_job()
        words = ["--until", str(self.folder / "stop"), "--batch", "300", "--width", "64"]
        self.driver = self.python(DRIVER, self.nodes.address, str(JOB), str(self.runs), *words)
        self.job_log = self.log

    def start_up(self, *words: str) -> None:
        """A run by `potluck up`."""
        self._next_job()
        text = "import sys, potluck.cli; sys.exit(potluck.cli.main(sys.argv[1:]))"
        self.driver = self.python(text, "up", "--runs", str(self.runs), *words)
        self.job_log = self.log

    def _next_job(self) -> None:
        (self.folder / "stop").unlink(missing_ok=True)
        self.jobs += 1
        self.runs = self.folder / f"runs-{self.jobs}"

    @property
    def run(self) -> Path | None:
        return next(self.runs.glob("2*"), None)

    def events(self, kind: str) -> list[dict[str, Any]]:
        if self.run is None or not (self.run / "events.jsonl").exists():
            return []
        lines = (self.run / "events.jsonl").read_bytes().split(b"\n")[:-1]
        return [event for event in map(json.loads, lines) if event["event"] == kind]

    def wait(self, reached: Callable[[], object], seconds: float = 300.0) -> float:
        began = time.monotonic()
        while not reached():
            late = time.monotonic() - began > seconds
            ended = self.driver is not None and self.driver.poll() is not None
            assert not late, self.told()
            assert not ended, self.told()
            time.sleep(0.1)
        return time.monotonic() - began

    def joined(self, machine: str) -> bool:
        return any(event["machine"] == machine for event in self.events("guest_joined"))

    def told(self) -> str:
        logs = list(self.runs.rglob("*.log"))
        said = [f"{path.name}: {path.read_text()[-1500:]}" for path in (self.job_log, *logs)]
        return "\n".join([*said, "processes:", *self.ours()])

    def kill_driver(self) -> None:
        """With -9. What it had started is then among `ours`, as long as it lives."""
        assert self.driver is not None
        self._started = psutil.Process(self.driver.pid).children(recursive=True)
        assert any("host" in process.cmdline() for process in self._started), self.told()
        assert any("join" in words for words in self.ours()), self.told()
        self.driver.kill()
        self.driver.wait()
        self.driver = None

    def ours(self) -> list[str]:
        """Processes of the job: its driver, the host, the host's agent, and all guests."""
        found, started = [], {process.pid for process in self._started if process.is_running()}
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            mine = process.pid in started or any(word.startswith(str(self.runs)) for word in words)
            is_guest = "potluck" in words and "join" in words and MARK in " ".join(words)
            if (mine or is_guest) and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.info['status']} {' '.join(words)[:300]}")
        return found


@contextlib.contextmanager
def lab_cluster(folder: Path, *machines: dict[str, Any], dashboard: bool = False) -> Iterator[LabCluster]:
    with NamespaceBox(rig(*machines)) as box, RayNodes(box, dashboard=dashboard) as nodes:
        nodes.add(DESK, cpus=2, labels={"kind": "desk"})
        nodes.add(MAC, cpus=1, labels={"kind": "mac"}, resources={"apple": 1})
        made = LabCluster(box, nodes, folder)
        try:
            yield made
        finally:
            if made.driver is not None and made.driver.poll() is None:
                made.driver.kill()
                made.driver.wait()


PATHS = ("/api/v0/actors?detail=true", "/api/v0/tasks?detail=true", "/nodes?view=summary", "/logical/actors")
"""Of the dashboard's API."""
ASK = "import sys, urllib.request as u\nfor url in sys.argv[1:]: print(u.urlopen(url, timeout=60).read().decode())"


def assert_no_secret(cluster: LabCluster) -> None:
    """The token of a run that goes on is in no file of Ray's, no object store, no process's arguments or variables,
    and not in what the GCS and the dashboard's API tell. The cluster needs a dashboard."""
    assert cluster.run is not None
    token = (cluster.run / "token").read_text().strip()
    secret = token[-40:].encode()
    assert len(token) > 100
    files = [path for path in cluster.nodes.folder.rglob("*") if path.is_file()]
    assert any("raylet" in path.name for path in files)
    for path in (*files, *Path("/proc").glob("[0-9]*/cmdline"), *Path("/proc").glob("[0-9]*/environ")):
        with contextlib.suppress(OSError):  # it has ended
            assert secret not in path.read_bytes(), path
    stores = [path for name in cluster.nodes.processes for path in object_stores(cluster.nodes.raylet(name).pid)]
    assert len(stores) >= len(cluster.nodes.processes)
    for path in stores:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            assert memory.find(secret) < 0, path
    dump = cluster.folder / "gcs"
    asked = cluster.python(GCS, cluster.nodes.address, str(dump))
    assert asked.wait(200) == 0, cluster.log.read_text()
    url = f"http://{cluster.nodes.address.partition(':')[0]}:{cluster.nodes.dashboard_port}"
    asked = cluster.python(ASK, *(url + path for path in PATHS))
    assert asked.wait(200) == 0, cluster.log.read_text()
    for told in (dump.read_bytes(), cluster.log.read_bytes()):
        assert b"NodeActor" in told
        assert secret not in told


def object_stores(raylet: int) -> list[Path]:
    """The shared memory of a raylet's object store: files without a name, by their descriptors."""
    open_files = Path(f"/proc/{raylet}/fd").iterdir()
    return [path for path in open_files if "plasma" in os.readlink(path) and "(deleted)" in os.readlink(path)]

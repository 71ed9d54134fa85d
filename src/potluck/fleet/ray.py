"""The fleet of a Ray cluster: one actor on each node holds its resources and keeps the guests there.

Ray places the actors and carries no tensor. The driver polls each guest every second; kept.py says what happens
otherwise. Tokens are encrypted for the actor's process, so that Ray's state and logs show none.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib.util
import os
import re
import shutil
import tempfile
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from msgspec import Struct

from potluck import checked
from potluck.bounds import Finite, Named, Text
from potluck.errors import ConfigError, MachineError, MissingModuleError
from potluck.fleet import kept, sealed
from potluck.fleet.cluster import ClusterRun, FleetRun
from potluck.fleet.interface import GuestSettings
from potluck.fleet.polled import ANSWER_S, PolledGuest, PolledGuests
from potluck.fleet.script import read_script

EVERY_NODE = "every node"
PLACED_S = DOUBTED_S = 30.0
"""Time to place an actor, and for Ray to find out whether the node of a lost actor is gone, which takes about 10
s."""
_INSTALL = "on every node, the version that is here: pip install -e '.[ray]'; or runtime_env={'pip': [...]}"
_OPTIONS = ("num_cpus", "num_gpus", "resources", "memory", "label_selector", "runtime_env")


def need_ray() -> Any:
    """The module `ray`, imported now. Raises MissingModuleError if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise MissingModuleError("Ray is not installed", hint="pip install -e '.[ray]'")
    sealed.need_library("ray")
    import ray

    return ray


def connect(address: str = "auto") -> Any:
    """The module `ray`, connected to a cluster by the program or here. Raises MachineError if that fails."""
    ray = need_ray()
    if ray.is_initialized():
        return ray
    try:
        ray.init(address=address, log_to_driver=False, logging_level="warning")
    except Exception as error:  # ConnectionError, RuntimeError, ValueError: each for several reasons
        raise MachineError(
            f"no Ray cluster at {address}: {str(error).splitlines()[0]}",
            hint="run this on a node of the cluster; `ray start --head` begins one, `ray status` shows it",
        ) from None
    return ray


class RayNode(
    Struct,
    frozen=True,
    kw_only=True,
    rename={
        "id": "NodeID",
        "alive": "Alive",
        "name": "NodeName",
        "host": "NodeManagerHostname",
        "address": "NodeManagerAddress",
        "labels": "Labels",
        "resources": "Resources",
    },
):
    """A node as `ray.nodes()` describes it."""

    id: Text
    alive: bool
    name: Text | None = None
    """Its address unless it was told a name."""
    host: Text = ""
    address: Text = ""
    labels: Named[Text] = {}
    resources: Named[Finite] = {}


def nodes_of(ray: Any) -> list[RayNode]:
    """The nodes of the cluster that the module is connected to, dead ones too."""
    return [checked.as_kind(node, RayNode) for node in ray.nodes()]


class NodeActor:
    """The actor on a node, which calls functions of kept.py there."""

    async def call(self, name: str, *arguments: Any) -> Any:
        answer = getattr(kept, name)(*arguments)
        return await answer if asyncio.iscoroutine(answer) else answer


class RayFleet:
    """The nodes of a Ray cluster. Safe to use from any thread."""

    def __init__(
        self, address: str = "auto", guests: str | Mapping[str, Any] = EVERY_NODE, *, without_here: bool = False
    ) -> None:
        """`guests`: options of the actors, and `device`. An actor takes all CPUs and GPUs of its node unless told.
        `without_here`: not the node of this process."""
        if isinstance(guests, str) and guests != EVERY_NODE:
            raise ConfigError(f"guests={guests!r} is not known", hint=f"{EVERY_NODE!r}, or options of the actors")
        self._options = checked_options({} if isinstance(guests, str) else guests, "device")
        self._selector: Mapping[str, str] = self._options.pop("label_selector", {})
        self._device: str | None = self._options.pop("device", None)
        self._ray = connect(address)
        self._id = uuid.uuid4().hex
        self._here = self._ray.get_runtime_context().get_node_id() if without_here else ""
        # By the node's id: its actor, and when one was lost.
        self._actors, self._lost_s = dict[str, Any](), dict[str, float]()
        self._guests, self._lock = PolledGuests(), threading.Lock()

    def machines(self) -> Sequence[str]:
        return tuple(self.nodes())

    def instances(self) -> dict[str, str]:
        return {name: node.id for name, node in self.nodes().items()}

    def nodes(self) -> dict[str, RayNode]:
        """The nodes that may have guests, by name."""
        alive = [
            node
            for node in nodes_of(self._ray)
            if node.alive and node.id != self._here and selected(node.labels, self._selector)
        ]
        lost = {node for node, lost_s in self._lost_s.items() if time.monotonic() - lost_s < DOUBTED_S}
        hosts = [host for host, _ in {(node.host, node.address) for node in alive}]
        found: dict[str, RayNode] = {}
        for node in sorted(alive, key=lambda node: (node.id in lost, node.id)):
            own = node.name or node.address
            name = node.host if own == node.address and hosts.count(node.host) == 1 else own
            if name in found and node.id in lost:
                continue  # restarted: for Ray the old node is alive for a while, beside the new one
            found[name if name not in found else f"{name}-{node.id[:6]}"] = node
        return found

    def gpus(self, machine: str) -> int:
        """Number of GPUs for the guests of a node."""
        node = self.nodes().get(machine)
        return int(self._held(node)["num_gpus"]) if node is not None else 0

    def _held(self, node: RayNode) -> dict[str, Any]:
        """Options of the actor on a node, as Ray takes them."""
        total = node.resources
        return {"num_cpus": total.get("CPU", 0), "num_gpus": total.get("GPU", 0), **self._options}

    def ask(self, machine: str, what: str, *arguments: Any, timeout_s: float = ANSWER_S) -> Any:
        """Call a function of kept.py on a node; MachineError if it cannot be called, or takes too long."""
        node = self.nodes().get(machine)
        if node is None:
            raise MachineError(f"the Ray cluster has no node {machine!r}", hint="has it left?")
        actor, new = self._actor(node)
        exceptions = self._ray.exceptions
        try:
            answer = actor.call.remote(what, self._id, *arguments)
            deadline = time.monotonic() + (PLACED_S if new else timeout_s)
            while not self._ray.wait([answer], timeout=0.5)[0] and time.monotonic() < deadline:
                if self.instances().get(machine) != node.id:
                    self._forget(node.id)
                    raise MachineError(f"{machine} was restarted, or has left")
            return self._ray.get(answer, timeout=0)
        except exceptions.GetTimeoutError:
            self._forget(node.id)
            if new:
                held = {name: value for name, value in self._held(node).items() if value}
                raise MachineError(
                    f"{machine}: its resources are not free: {held} not granted after {PLACED_S:.0f} s",
                    hint="end what holds them (`ray status`), or take less: guests={'num_cpus': 1}",
                ) from None
            raise MachineError(f"{machine} does not answer for {timeout_s:.0f} s", hint="is it alive?") from None
        except exceptions.RayTaskError as error:
            raise MachineError(f"{machine}: {error.cause}", hint=_INSTALL) from None
        except exceptions.RayError as error:
            self._forget(node.id)
            missing = re.search(r"No module named '([\w.]+)'", str(error))
            words = f"has no {missing[1]}" if missing else (str(error).strip().splitlines() or ["is lost"])[0]
            raise MachineError(f"{machine}: {words}", hint=_INSTALL if missing else "is it alive?") from None

    def _actor(self, node: RayNode) -> tuple[Any, bool]:
        """The actor on a node, and whether it is new."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        with self._lock:
            if (known := self._actors.get(node.id)) is not None:
                return known, False
            made = self._ray.remote(NodeActor).options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False), **self._held(node)
            )
            self._actors[node.id] = actor = made.remote()
            return actor, True

    def _forget(self, node: str) -> None:
        """`node`: its id."""
        with self._lock:
            actor = self._actors.pop(node, None)
            self._lost_s[node] = time.monotonic()
        if actor is not None:
            with contextlib.suppress(Exception):  # it is gone already
                self._ray.kill(actor)

    def start(self, machine: str, token: str, settings: GuestSettings, log: Path) -> PolledGuest:
        held = self._held(node) if (node := self.nodes().get(machine)) is not None else {}
        device = settings.device or self._device or (None if held.get("num_gpus") else "cpu")
        threads = settings.threads or int(held.get("num_cpus", 0)) or None
        settings = replace(settings, device=device, threads=threads)
        ask: Any = lambda what, *more: self.ask(machine, what.__name__, *more)  # noqa: E731
        return self._guests.start(ask, machine, token, settings, log, _INSTALL)

    def close(self) -> None:
        self._guests.end()
        for node in list(self._actors):
            self._forget(node)


def checked_options(options: Mapping[str, Any], *more: str) -> dict[str, Any]:
    """Options of an actor; ConfigError for one that is neither passed on to Ray nor among `more`."""
    for name in options:
        if name not in (*_OPTIONS, *more):
            raise ConfigError(f"{name!r} is no option of a node", hint=f"there are: {', '.join(_OPTIONS)}")
    return dict(options)


def selected(labels: Mapping[str, str], selector: Mapping[str, str]) -> bool:
    """Whether a node matches a selector, with Ray's rules: value, !value, in(a,b), !in(a,b)."""
    for name, wanted in selector.items():
        negated, rest = wanted.startswith("!"), wanted.removeprefix("!")
        values = rest[3:-1].split(",") if rest.startswith("in(") and rest.endswith(")") else [rest]
        if (labels.get(name) in [value.strip() for value in values]) == negated:
            return False
    return True


class HostActor:
    """A run whose host is the node of this actor."""

    def __init__(self, names: Sequence[str], contents: Sequence[bytes], given: Mapping[str, Any]) -> None:
        """The contents of the script and its files, or the name of a recipe and no content; `given` as for
        `started_here`."""
        folder = Path(tempfile.mkdtemp(prefix="potluck-host-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        for name, content in zip(names, contents):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        script, *send = [str(folder / name) for name in names] if contents else names
        self._run = started_here(script, send=send, **given)

    def call(self, name: str, *arguments: Any) -> Any:
        return getattr(self._run, name)(*arguments)


def started_here(
    script: str,
    arguments: Sequence[str],
    *,
    address: str,
    guests: str | Mapping[str, Any],
    options: Sequence[str],
    runs: str,
    send: Sequence[str],
) -> ClusterRun:
    """A run whose host is this machine, with a guest on each other node."""
    fleet = RayFleet(address, guests, without_here=True)
    sent = [word for file in send for word in ("--send", file)]
    return ClusterRun(fleet, script, arguments, options=[*options, *sent], runs=Path(runs), gpus=fleet.gpus)


def node_labels(address: str, name: str) -> dict[str, str]:
    """The label selector for one node of the cluster: LABEL=VALUE, or a node's name."""
    label, is_label, value = name.partition("=")
    if is_label:
        return {label: value}
    nodes = RayFleet(address).nodes()
    if name not in nodes:
        raise ConfigError(f"the Ray cluster has no node {name!r}", hint=f"its nodes are: {', '.join(nodes)}")
    return {"ray.io/node-id": nodes[name].id}


class RayCluster:
    """A Ray cluster on which runs are started; see `potluck.ray`."""

    def __init__(
        self,
        *,
        host: Mapping[str, Any] | None = None,
        guests: str | Mapping[str, Any] = EVERY_NODE,
        address: str = "auto",
    ) -> None:
        """`host`: options of the actor that hosts, such as label_selector and num_gpus; None: this machine hosts.
        `guests` as for `RayFleet`. Connects to Ray, unless the program has."""
        self._host = None if host is None else checked_options(host)
        self._guests, self._address = guests, address
        self._ray = connect(address)

    def start(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        options: Sequence[str] = (),
        runs: str | os.PathLike[str] = "runs",
        send: Sequence[str | os.PathLike[str]] = (),
    ) -> FleetRun:
        """Start a script as `potluck host` does. `options` and `send` are the host's; `runs` is a folder there."""
        given: dict[str, Any] = {"address": self._address, "guests": self._guests}
        given |= {"options": list(options), "runs": str(runs)}
        if self._host is None:
            here = started_here(str(script), arguments, send=[str(file) for file in send], **given)
            return FleetRun(lambda what, *more: getattr(here, what)(*more))
        names, contents = [str(script)], list[bytes]()
        if str(script).endswith(".py"):
            text = read_script(Path(script), [Path(file) for file in send])
            names, contents = list(text.names), list(text.contents)
        made = self._ray.remote(HostActor).options(max_concurrency=4, **self._host)
        actor = made.remote(names, contents, {**given, "arguments": list(arguments)})

        def ask(what: str, *more: Any, timeout_s: float | None = None) -> Any:
            try:
                return self._ray.get(actor.call.remote(what, *more), timeout=timeout_s)
            except self._ray.exceptions.GetTimeoutError:
                raise MachineError(
                    f"no node can host after {PLACED_S:.0f} s: none that is free has {self._host}",
                    hint="`ray list nodes --detail` shows their labels, `ray status` what is free",
                ) from None
            except self._ray.exceptions.RayTaskError as error:
                raise MachineError(f"the node that hosts: {error.cause}", hint=_INSTALL) from None
            except self._ray.exceptions.RayError as error:
                why = (str(error).strip().splitlines() or [""])[0]
                raise MachineError(f"the node that hosts is lost: {why}", hint=f"resume from {runs}") from None

        ask("state", timeout_s=PLACED_S)
        return FleetRun(ask)

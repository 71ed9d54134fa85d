"""What needs no Ray: which nodes are chosen, how they are called, and what is said where Ray is missing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from potluck.errors import ConfigError, MissingModuleError
from potluck.fleet import ray as fleet
from potluck.fleet.ray import RayFleet, selected


def test_ray_is_imported_only_when_it_is_asked_for() -> None:
    code = "import sys, potluck.ray; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_missing_extra_is_one_line_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingModuleError) as caught:
        RayFleet()
    assert caught.value.hint == "pip install -e '.[ray]'"
    assert "\n" not in str(caught.value.what)


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [("mac", True), ("desk", False), ("!mac", False), ("!desk", True), ("in(desk,mac)", True), ("!in(mac)", False)],
)
def test_a_selector_is_read_as_ray_reads_it(wanted: str, chosen: bool) -> None:
    assert selected({"kind": "mac", "other": "x"}, {"kind": wanted}) is chosen


def test_a_label_that_a_node_lacks() -> None:
    assert not selected({}, {"kind": "mac"})
    assert selected({}, {"kind": "!mac"})
    assert selected({}, {})


@pytest.mark.parametrize("guests", ["some nodes", {"num_cpu": 1}, {"name": "x"}])
def test_what_is_not_understood_is_refused_before_anything_starts(guests: Any) -> None:
    with pytest.raises(ConfigError):
        RayFleet("nowhere", guests)


def node(number: str, name: str, host: str, address: str, **more: Any) -> dict[str, Any]:
    known = {"NodeID": number, "NodeName": name, "NodeManagerHostname": host, "NodeManagerAddress": address}
    return {**known, "Alive": True, "Labels": {}, "Resources": {"CPU": 2.0}, **more}


def made(monkeypatch: pytest.MonkeyPatch, nodes: list[dict[str, Any]], guests: Any = fleet.EVERY_NODE) -> RayFleet:
    context = SimpleNamespace(get_node_id=lambda: "1")
    engine = SimpleNamespace(nodes=lambda: nodes, get_runtime_context=lambda: context, exceptions=SimpleNamespace())
    monkeypatch.setattr(fleet, "connect", lambda address: engine)
    return RayFleet("anywhere", guests, without_here=True)


def test_nodes_are_called_by_their_names_or_their_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        node("1", "10.0.0.1", "tower", "10.0.0.1"),  # this one
        node("2", "10.0.0.2", "desk", "10.0.0.2"),
        node("3", "mac", "box", "10.0.0.3"),
        node("4", "10.0.0.4", "box", "10.0.0.4"),
        node("5", "mac", "other", "10.0.0.5"),
        node("6", "gone", "gone", "10.0.0.6", Alive=False),
    ]
    assert made(monkeypatch, nodes).machines() == ("desk", "mac", "10.0.0.4", "mac-5")


def test_a_restarted_node_takes_the_place_of_the_one_that_ray_still_holds_for_alive(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old, new = node("3", "mac", "box", "10.0.0.3"), node("4", "mac", "box", "10.0.0.3")
    engine = made(monkeypatch, [old, new])
    assert list(engine.nodes()) == ["mac", "mac-4"]  # two nodes of one name, as far as anybody knows
    engine._forget("3")
    assert engine.instances() == {"mac": "4"}
    alone = made(monkeypatch, [old])
    alone._forget("3")
    assert alone.instances() == {"mac": "3"}  # only its actor was lost
    unnamed = [node(n, "10.0.0.3", "box", "10.0.0.3") for n in ("3", "4")]
    engine = made(monkeypatch, unnamed)
    engine._forget("3")
    assert engine.instances() == {"box": "4"}


def test_a_guest_holds_all_of_its_node_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [node("2", "desk", "desk", "10.0.0.2", Resources={"CPU": 8.0, "GPU": 2.0})]
    whole = made(monkeypatch, nodes)
    assert whole._held(whole.nodes()["desk"]) == {"num_cpus": 8.0, "num_gpus": 2.0}
    assert whole.gpus("desk") == 2
    part = made(monkeypatch, nodes, {"num_cpus": 1, "num_gpus": 0, "device": "cpu", "label_selector": {}})
    assert part._held(part.nodes()["desk"]) == {"num_cpus": 1, "num_gpus": 0}
    assert part.gpus("desk") == 0


def test_a_node_that_comes_is_added_and_one_that_goes_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    from potluck.fleet import cluster

    monkeypatch.setattr(cluster, "LOOK_S", 0.01)
    nodes = [node("2", "desk", "desk", "10.0.0.2")]
    told: list[tuple[str, str]] = []
    changed = threading.Condition()

    def tell(what: str, name: str) -> None:
        with changed:
            told.append((what, name))
            changed.notify_all()

    launcher: Any = SimpleNamespace(add=lambda name: tell("add", name), drop=lambda name: tell("drop", name))
    with cluster.followed(made(monkeypatch, nodes), launcher, lambda name: None), changed:
        assert changed.wait_for(lambda: ("add", "desk") in told, 10)
        nodes.append(node("3", "mac", "mac", "10.0.0.3"))
        assert changed.wait_for(lambda: ("add", "mac") in told, 10)
        nodes[0] = node("4", "desk", "desk", "10.0.0.2")
        assert changed.wait_for(lambda: told.count(("add", "desk")) == 2, 10)  # restarted: no pause after failures
        del nodes[0]
        assert changed.wait_for(lambda: ("drop", "desk") in told, 10)
    assert told == [("add", "desk"), ("add", "mac"), ("add", "desk"), ("drop", "desk")]

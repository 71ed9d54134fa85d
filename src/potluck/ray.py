"""Runs on a Ray cluster: `potluck.ray.Fleet`. Needs the extra `ray`; docs/guides/ray.md is the guide.

`trainable` makes a trainable of Ray Tune's from a script; docs/guides/sweeps.md is the guide.

    fleet = potluck.ray.Fleet(guests="every node")
    with fleet.start("my_train.py", ["--steps", "1000"]) as run:
        for event in run.events(): ...
    print(run.result().checkpoint)
"""

from __future__ import annotations

from potluck.fleet.cluster import FleetResult, FleetRun
from potluck.fleet.ray import RayCluster as Fleet
from potluck.sweep.ray_trials import idle_machines_help, trainable

__all__ = ["Fleet", "FleetResult", "FleetRun", "idle_machines_help", "trainable"]

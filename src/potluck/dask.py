"""Runs on a Dask cluster: `potluck.dask.Fleet`. Needs the extra `dask`; docs/guides/dask.md is the guide.

fleet = potluck.dask.Fleet(distributed.Client("tcp://desk:8786"))
with fleet.start("my_train.py", ["--steps", "1000"]) as run:
    for event in run.events(): ...
print(run.result().checkpoint)
"""

from __future__ import annotations

from potluck.fleet.cluster import FleetResult, FleetRun
from potluck.fleet.dask import DaskCluster as Fleet

__all__ = ["Fleet", "FleetResult", "FleetRun"]

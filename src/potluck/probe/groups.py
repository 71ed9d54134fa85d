"""Prepares ranks for a measurement: a suitable backend, a device for each rank, and one group for each backend.

Checks are made once, before any rank is started. Under torchrun each rank makes its own, since ranks may be on
different machines.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from potluck.errors import PotluckError, UserError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.distributed_c10d import Store

    from potluck.device.base import Device

GLOO_TIMEOUT_S = 12.0
"""Timeout for gloo, which waits five times as long for connections: a minute with this one, 150 with its
default."""
_GLOO_HINT = (
    "gloo looks up this machine's own name for its address: export GLOO_SOCKET_IFNAME=eth0 (the interface between "
    "the machines; `potluck doctor` lists them)"
)
_OF_TORCH_ITSELF = ("undefined", "fake")
"""Names in torch's list of backends that cannot be measured."""


def check_backends(backend: str, against: str | None, device: str) -> None:
    """Refuse an unknown --backend or --against."""
    named = {"backend": backend, "against": against or "potluck"}
    kind = device.partition(":")[0].strip().lower()
    if set(named.values()) <= {"potluck"}:
        return  # what is always there needs no torch to be imported in this process
    import torch.distributed as dist

    known = dist.Backend.backend_list
    here = [name for name in known if name not in _OF_TORCH_ITSELF and not _unfit(name, kind)]
    here.sort(key=lambda name: name != "potluck")
    for flag, name in named.items():
        lower = name.lower()
        what = _unfit(lower, kind) if lower in known else f"torch.distributed knows no backend {name!r}"
        if what:
            near = difflib.get_close_matches(lower, here, n=1)
            meant = f"did you mean {near[0]}? " if near else ""
            hint = f"{meant}the backends here are {', '.join(here)}"
            if kind == "cpu" and lower in known and not _unfit(lower, "cuda"):
                hint += "; or add --device cuda"
            raise UserError(f"--{flag} {name}: {what}", hint=hint)


def _unfit(name: str, kind: str) -> str:
    """Why a backend known to torch cannot be measured here with tensors on such a device; empty if it can."""
    import torch.distributed as dist

    if not dist.is_backend_available(name):
        return "the installed torch was built without it"
    if kind not in dist.Backend.backend_capability.get(name, [kind]):
        return f"it does not take {kind.upper()} tensors, which are what is measured"
    return "" if name != "undefined" else "it is not a backend"


def check_settings(backends: Sequence[str], processes: int) -> None:
    """Refuse POTLUCK_DIST_* settings that do not fit this machine."""
    if "potluck" not in map(str.lower, backends):
        return
    from potluck.dist.config import resolve
    from potluck.dist.own_addresses import gather

    resolve(None, os.environ, gather(processes - 1, processes, "127.0.0.1"))


def check_device(name: str, processes: int, backends: list[str]) -> None:
    """Refuse a --device that this machine does not have for that many ranks."""
    kind = name.partition(":")[0].strip().lower()
    if kind not in ("cpu", "cuda", "mps"):
        raise UserError(f"--device {name}: there is no such device to measure", hint="cpu, cuda or cuda:0")
    if kind == "cpu":
        return  # needs no torch in this process
    from potluck.device.pick import pick_for_rank

    _, own = pick_for_rank(name, processes - 1, processes, threads=1)
    if processes > 1 and not own and "nccl" in map(str.lower, backends):
        raise UserError(f"NCCL needs a GPU for each rank, not --device {name} for all", hint="--device cuda")


def ranks_here() -> int:
    """The number of ranks that torchrun or a cluster manager started, this process among them; 1 without one."""
    given = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")]
    return int(given[1]) if all(given) and given[1].isdigit() else 1


def is_first() -> bool:
    """Whether this process is rank 0, or has no rank."""
    return os.environ.get("RANK", "0") == "0"


def rank_device(name: str) -> Device:
    """The device of this process, which is one of the ranks of its machine."""
    from potluck.device.pick import pick_for_rank

    local = [
        int(os.environ.get(key, fallback)) for key, fallback in (("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"))
    ]
    return pick_for_rank(name, *local, threads=int(os.environ.get("OMP_NUM_THREADS", "1")))[0]


@contextmanager
def groups_of(
    names: Sequence[str], device: Device | None = None
) -> Iterator[tuple[dict[str, ProcessGroup], Store]]:
    """Inside, the process groups by backend, the first of them the default group, and their store."""
    import torch
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _get_default_store

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    groups: dict[str, ProcessGroup] = {}
    for name in names:
        groups[name] = _joined_by(name, device, first=not groups)
    yield groups, _get_default_store()
    # Not where something failed: to leave in order would be to wait for those who do not come.
    dist.barrier()
    dist.destroy_process_group()


def _joined_by(name: str, device: Device | None, *, first: bool) -> Any:
    """The group of all ranks on this backend. NCCL must know the GPU of this rank."""
    import torch.distributed as dist

    try:
        if first:
            bound = device.torch_device if device is not None and name.lower() == "nccl" else None
            dist.init_process_group(name, device_id=bound)
            return dist.group.WORLD
        return _bounded_gloo() if name == "gloo" else dist.new_group(backend=name)
    except PotluckError:
        raise
    except RuntimeError as error:
        words = " ".join(str(error).split())[:300]
        raise UserError(
            f"the ranks cannot form a {name} group: {words}",
            hint=_GLOO_HINT + ("" if first else ", or leave --against out")
            if name.lower() == "gloo"
            else "`potluck doctor ADDRESS` shows what blocks the connection",
        ) from error
    except (ValueError, AssertionError) as error:
        words = " ".join(str(error).split())[:300]
        raise UserError(f"cannot make a {name} group: {words}", hint="for example --backend gloo") from error


def _bounded_gloo() -> Any:
    """A gloo group with a short timeout for connecting, but the default timeout for its collectives."""
    import torch.distributed as dist
    from torch.distributed.distributed_c10d import _set_pg_timeout, default_pg_timeout

    dist.barrier()  # the time is for connecting, not for a rank that comes late
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=GLOO_TIMEOUT_S))
    _set_pg_timeout(default_pg_timeout, group)
    return group

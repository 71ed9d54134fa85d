"""What torch asks a group about itself: owns its names, its timeout and its settings as torch wants to see them.

It must not know collectives.
"""

# mypy: disable-error-code="override,assignment"
# torch declares some of these as read only, and some not at all.

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from potluck.dist import splitting
from potluck.dist.formation import Formation


class DescribedGroup(dist.ProcessGroup):
    """A group that has no backends beside itself, with which torch would keep most of this."""

    def __init__(
        self, formation: Formation, timeout: timedelta, global_ranks: list[int], origin: splitting.Origin
    ) -> None:
        super().__init__(formation.rank, formation.world)  # type: ignore[call-arg]
        self._formation = formation
        self._origin = origin
        self._timeout = timeout
        self._global_ranks = global_ranks or list(range(formation.world))
        self._group_name = self._group_desc = ""

    def getBackendName(self) -> str:
        return "potluck"

    name = _get_backend_name = getBackendName

    def rank(self) -> int:
        return self._formation.rank

    def size(self) -> int:
        return self._formation.world

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank {self.rank()} of {self.size()}, {self._formation.describe()})"

    def _set_group_name(self, name: str) -> None:
        self._group_name = name

    def _set_group_desc(self, text: str) -> None:
        self._group_desc = text

    @property
    def group_name(self) -> str:
        return self._group_name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda", "mps")]

    def _get_backend(self, device: torch.device) -> Any:
        return self

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def options(self) -> Any:
        return self._origin.config

    def get_group_store(self) -> Any:
        return self._origin.store

    def perform_nocolor_split(self, device: Any) -> None:
        """What torch asks of ranks that a new group is not for."""

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers begin at the rendezvous."""

    def _get_sequence_number_for_group(self) -> int:
        return self._formation.sequence

"""The settings that the host's protocol begins with. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field

from potluck.balance.leases import Least
from potluck.spec.config import MOST_GUESTS
from potluck.spec.model_description import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTerms:
    """The settings of the host's protocol."""

    name: str
    versions: dict[str, str]
    fingerprint: tuple[TensorSpec, ...]
    piece_bytes: tuple[int, ...]
    """The length of each piece's gradient in the run's codec, the longest where it varies."""
    coded_bytes: int | None = None
    """Expected length of all pieces together, where lengths vary; None: they do not."""
    window_bytes: int = 4 << 20
    heartbeat_s: float = 1.0
    silence_s: float = 5.0
    joining_silence_s: float = 60.0
    """The same while a guest builds its model, which can keep a machine busy for long."""
    joining_s: float = 1800.0
    """The longest time to join: imports, downloads and the model together."""
    checking_s: float = 300.0
    """The longest time to answer a check, which is the gradient of a few samples."""
    max_guests: int = MOST_GUESTS
    local_data: bool = False
    codec: str = ""
    """The gradients' codec, for error messages."""
    codec_down: str = ""
    """The weights' codec, for error messages."""
    auto: tuple[str, str] | None = None  # choose each guest's codec: see CodecChoice
    guest_bound: float = 0.0
    """A contribution counts if its norm a sample is at most this many times the host's own. 0: no limit."""
    check_replica_every: int = 50
    """Steps between two comparisons of the replica's hash with the guests'. 0: never."""
    least: Least = field(default_factory=Least)
    """The smallest micro-batch and the smallest lease that the model can train on."""
    steps: int | None = None
    """Steps of the whole run, if they are known: nothing is sent ahead in the last one."""

    @property
    def pieces(self) -> int:
        return len(self.piece_bytes)

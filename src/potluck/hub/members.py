"""What the host knows about one guest: its name, its state, its speed. PURE."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, field

from potluck.balance.leases import Least, Speed
from potluck.balance.quota import Estimate
from potluck.hub.ahead import Ahead
from potluck.hub.feed import Feed
from potluck.spec.events import GuestLeft, GuestLost, GuestRefused, RunEvent

JOINING = "joining"
SYNCING = "syncing"
CHECKING = "checking"
COMPUTING = "computing"
SITTING_OUT = "sitting out"
LATE = "late"

LATE_BEFORE_BENCH = 2
"""After this many leases in a row that did not count (most often too late) a guest sits out for a while."""
TRIAL_SAMPLES = 2
"""A guest whose link seems too slow, judged only by its first weights, gets one lease of this size as a test."""
LONGEST_BENCH_STEPS, LONGEST_REST_S = 64, 30.0
"""The longest time that a guest sits out: the longer of the two counts, because 64 steps may take only
milliseconds."""
QUOTA_RETRY_STEPS = 4
LARGEST_MICRO_BATCH = 1 << 20
"""The largest micro-batch that a guest may claim."""
RATE_MARGIN = 0.1
GAIN_WINDOW = 6
"""Number of leases over which a guest must have saved more time than the host waited for it."""


@dataclass(slots=True, kw_only=True)
class OpenLease:
    """A lease that the guest has not answered yet."""

    id: int
    step: int
    count: int
    """Number of samples. It falls when the guest says how many it keeps."""
    sizes: tuple[int, ...] = ()
    """The sizes of its micro-batches, as handed out."""
    started: float
    revoked: bool = False
    arrived: bool = False
    """The whole contribution has arrived and is being decoded. The lease can no longer be taken back."""
    arrived_at: float = 0.0
    codec: str = ""
    """How its gradient is coded; empty: the run's initial codec."""
    tail_s: float = 0.0
    """The seconds from its last backward until its contribution is in the sum, as the guest was told."""
    closing_at: float | None = None
    """When the guest expects to have delivered, by the host's clock."""
    pieces: dict[int, object] = field(default_factory=dict)
    """The coded pieces of the contribution, kept until it is complete."""
    waited_s: float = 0.0
    """How long the host was idle, waiting for this lease."""
    unread: int = 0
    """Micro-batches that the host is still reading from the data set, so the guest cannot have them yet."""

    def has_single(self, count: int) -> bool:
        """Whether one of the micro-batches of its first `count` samples has one sample."""
        return any(size == 1 and end <= count for size, end in zip(self.sizes, itertools.accumulate(self.sizes)))


@dataclass(slots=True, kw_only=True)
class Member:
    """One guest."""

    id: str
    name: str
    address: str
    device: str
    about: dict[str, str]
    last_heard: float
    joined_at: float
    feed: Feed
    ahead: Ahead = field(default_factory=Ahead)
    state: str = JOINING
    reason: str = ""
    micro_batch: int = 1
    largest_micro_batch: int = 1
    least: Least = field(default_factory=Least)
    lease: OpenLease | None = None
    check: int | None = None
    checking_since: float | None = None
    cosine: float | None = None
    doubts: int = 0
    """Parity checks in a row in which its gradient differed from the host's."""
    unmatched: frozenset[str] | None = None
    """Random generators that drew different numbers on the guest. If not None, it is compared with the host's
    spread."""
    by_spread: bool = False
    """It was accepted by the host's spread, and this was reported."""
    counts_items: bool = False
    """Whether it counted items in its last parity check: then it does in every contribution."""
    # A wrong speed is corrected within the step (leases are large and cut short), so the newest counts most.
    rate: Estimate = field(default_factory=lambda: Estimate(weight=0.7, jumps=True))
    overhead: Estimate = field(default_factory=lambda: Estimate(doubts=True))
    transfer: Estimate = field(default_factory=lambda: Estimate(doubts=True))
    """Seconds that the weights' change takes to arrive. The gradient has the same size and takes about as long."""
    tail: Estimate = field(default_factory=lambda: Estimate(doubts=True))
    """Seconds from the end of its last backward until its contribution is in the sum."""
    decoding: Estimate = field(default_factory=lambda: Estimate(doubts=True))
    """The part of these seconds on the host: the contribution waits for others and is decoded."""
    codec: str = ""
    """The codec of its next lease's gradient; empty: the run's codec."""
    bf16: bool = False
    """It computes in bf16, as its last check reported."""
    codec_known: bool = False
    """Whether the codec was chosen by its link and reported."""
    codec_stays_until: int = 0
    """The codec is not chosen again before this step."""
    codec_turns: int = 0
    """How often the codec was changed."""
    misses: list[str] = field(default_factory=list)
    """Why its last leases in a row did not count, as clauses. Empty once one counts."""
    told: str = ""
    """The kind of reason that it was last given for sitting out. Empty once a contribution counts."""
    leased: bool = False
    """It has had a lease, so its link was measured."""
    wrong_in_a_row: int = 0
    """Wrong contributions in a row: the host computed their samples with a different result."""
    single: bool = False
    """A micro-batch of its last contribution that was not finite had one sample."""
    slowed: int = 0
    """How often in a row it sat out because the run was slower with it."""
    rests: int = 0
    longest_rest: int = LONGEST_BENCH_STEPS
    """The largest number of steps that it sits out."""
    rests_until_step: int = 0
    gains_s: deque[float] = field(default_factory=lambda: deque(maxlen=GAIN_WINDOW))
    sending_since: float | None = None
    """Since when parts of the replica sent to it are unconfirmed. None: all are confirmed."""
    sync_s: float = 0.0
    """Seconds that its first weights took to arrive, without the script's work between two steps."""
    sync_bytes: int = 0
    samples: int = 0
    """Samples it has contributed to the run."""
    busy_s: float = 0.0
    """Seconds of computing in its last contribution."""
    receive_s: float = 0.0
    """Seconds in which the weights' change arrived there for its last contribution."""
    answered_s: float = 0.0
    """Seconds from the lease to the arrival of its last contribution."""
    joined: bool = False
    """It has passed the parity check once."""
    fixed_digests: dict[str, str] | None = None
    """Digests of its frozen parameters and buffers, until they are compared with the host's."""
    hash_asked: int | None = None
    """The newest version at which it was asked for its replica's hash, or skipped."""
    hash_awaited: int | None = None
    """The version of the hash that it has not yet answered."""
    hashes_equal: int = 0
    """Hashes in a row that were equal to the host's."""
    mismatches: int = 0
    mismatches_in_a_row: int = 0
    put_out: bool = False
    """The host ended its part in the run."""
    failed: bool = False
    """It left because its script failed."""
    leaving: tuple[str, str] | None = None
    """The event and the reason of its removal, which waits until its last contribution is decoded."""

    @property
    def speed(self) -> Speed | None:
        """The speed that the quota assumes: the mean, and the overhead with its spread as a margin."""
        if self.rate.value is None:
            return None
        # Half its spread off the rate: a lease a little too small costs little, one too large a wait.
        # But not for long after a change of speed: the newest measurement is then all that is known.
        rate = self.rate.value - min(0.5 * self.rate.spread, RATE_MARGIN * self.rate.value)
        return Speed(
            rate_samples_per_s=rate,
            overhead_s=max(0.0, self.overhead.cautious),
            transfer_s=max(0.0, self.transfer.value or 0.0),
            usual=self.micro_batch,
            most=max(self.micro_batch, self.largest_micro_batch),
            least=self.least,
        )

    @property
    def unsteadiness(self) -> float:
        """The relative change of its rate from lease to lease."""
        return self.rate.spread / self.rate.value if self.rate.value else 0.0

    def computes(self, usual: int, largest: int) -> None:
        """How many samples the guest computes at once, and the most that it could."""
        self.micro_batch = max(1, min(usual, LARGEST_MICRO_BATCH))
        self.largest_micro_batch = max(self.micro_batch, min(largest, LARGEST_MICRO_BATCH))

    def holds(self, lease: int) -> bool:
        return self.lease is not None and self.lease.id == lease and not self.lease.revoked

    def overdue(self, now: float, joining_s: float, checking_s: float) -> str | None:
        """What the guest has not done in time, although it sends heartbeats."""
        if self.state == JOINING and now - self.joined_at > joining_s:
            return f"did not build its model within {joining_s:.0f} s"
        if self.state != CHECKING:
            self.checking_since = None
            return None
        self.checking_since = now if self.checking_since is None else self.checking_since
        if now - self.checking_since > checking_s:
            return f"did not answer the check of its gradient within {checking_s:.0f} s"
        return None

    def rest(self, step: int, reason: str, *, steps: int | None = None) -> None:
        """Sit out for a number of steps that doubles each time in a row."""
        length = steps if steps is not None else 2 ** (self.rests + 1)
        self.rests_until_step = step + min(length, self.longest_rest)
        self.rests += 1
        self.state, self.reason = SITTING_OUT, reason
        self.feed.open = False
        self.gains_s.clear()

    def delivered(self, *, count: int, compute_s: float, since_start_s: float) -> None:
        """A contribution arrived, in time or not: update the estimates with its times."""
        if compute_s > 0 and count > 0:
            self.rate.add(count / compute_s)
            speed = self.speed
            unhidden_s = speed.unhidden_s(count) if speed is not None else 0.0
            self.overhead.add(max(0.0, since_start_s - compute_s - unhidden_s))
            self.busy_s, self.answered_s = compute_s, since_start_s


_GONE: dict[str, type[GuestLeft] | type[GuestLost] | type[GuestRefused]] = {
    "guest_left": GuestLeft,
    "guest_lost": GuestLost,
    "guest_refused": GuestRefused,
}


def gone(member: Member, kind: str, reason: str, step: int, samples_taken_back: int) -> RunEvent:
    """The event that tells of a guest's end."""
    return _GONE[kind](
        machine=member.name,
        address=member.address,
        reason=reason,
        step=step,
        samples_taken_back=samples_taken_back,
        put_out=member.put_out,
        failed=member.failed,
    )

"""Checks that the guests still hold the replica: every few steps it compares hashes, sometimes gradients too.

PURE: it decides which guests are asked and what a difference means.

A guest is asked when it has been sent all of a version and nothing of a later one, on the connection that carries
the weights. So both sides hash the same version, and neither has to pause for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from potluck.errors import WireError
from potluck.hub.actions import Action, Emit, HashReplica, Send
from potluck.hub.hashes import DIGEST_BYTES, differing
from potluck.hub.members import COMPUTING, LATE, SITTING_OUT, SYNCING, Member
from potluck.hub.stepping import Stepping
from potluck.spec.events import ReplicaChecked, ReplicaMismatch
from potluck.spec.messages import HashMessage, ResyncMessage

TRUSTED = (COMPUTING, LATE, SITTING_OUT)
"""States of guests whose gradients count. All others are sent everything, or checked, in any case."""
VERSIONS_KEPT = 4
PARITY_EVERY = 20
"""After the first equal hash, and after this many in a row, a guest's gradient is compared again."""
PARITY_SELDOM = 8 * PARITY_EVERY
"""The same where a check takes a guest longer than a step: it falls behind and is sent everything again."""
PARITY_SAMPLES = 8
"""The most samples in such a comparison."""
LONGEST_PAUSE = 6
"""A guest that differed again and again is asked up to 2^6 times less often."""
MOST_IN_A_ROW = 3
"""A guest whose weights differed this often in a row is removed: most of its gradients were of other weights."""
HINT = (
    "does its script change weights itself, such as p.data.clamp_()? Only the host may: do it `if run.is_host`, "
    "after the inner loop. If not, this machine may compute wrongly"
)


@dataclass(slots=True)
class _Version:
    """The hashes of one version that is compared."""

    number: int
    ours: bytes | None = None
    theirs: dict[str, bytes] = field(default_factory=dict)
    """Answers of guests that wait for the host's own hash."""


class ReplicaGuard:
    """Compares hashes; see `HostTerms.check_replica_every`."""

    def __init__(
        self,
        *,
        every: int,
        members: Mapping[str, Member],
        stepping: Stepping,
        pump: Callable[[Member], list[Action]],
        put_out: Callable[..., list[Action]],
    ) -> None:
        """`pump` sends a guest what it lacks. `put_out` ends a guest's part in the run."""
        self._every = every
        self._pump, self._put_out = pump, put_out
        self._members = members
        self._stepping = stepping
        self._versions: list[_Version] = []
        self._doubts = False

    def begin_step(self, step: int) -> list[Action]:
        """The weights are at version `step`: have it hashed if it is one of those that are compared."""
        if not self._every or step % self._every or not any(m.state in TRUSTED for m in self._members.values()):
            return []
        self._versions = [*self._versions[1 - VERSIONS_KEPT :], _Version(step)]
        return [HashReplica(version=step)]

    def doubt(self) -> None:
        """Gradients may drift apart although weights are equal: compare them now, and after every equal hash."""
        self._doubts = True
        for member in self._members.values():
            if member.state == COMPUTING and self._parity_every(member) == 1:
                member.state, member.reason = SYNCING, "its gradient is checked again"

    def ask(self, member: Member) -> list[Action]:
        """After each message to a guest: ask it, once it has been sent all of the newest compared version."""
        if not self._versions or member.hash_awaited is not None or member.state not in TRUSTED:
            return []
        version = self._versions[-1].number
        if version == member.hash_asked or any(have != version for have in member.feed.have):
            return []
        member.hash_asked = version
        if (version // self._every) % 2 ** min(member.mismatches, LONGEST_PAUSE):
            return []
        member.hash_awaited = version
        return [Send(guest=member.id, message=HashMessage(version=version))]

    def answered(self, member: Member, version: int, digests: bytes) -> list[Action]:
        """A guest's hashes, one for each piece (none: it does not hold that version)."""
        if version != member.hash_awaited or len(digests) not in (0, DIGEST_BYTES * len(member.feed.have)):
            raise WireError(f"hashes of version {version} that nobody asked for")
        member.hash_awaited = None
        found = next((v for v in self._versions if v.number == version), None)
        if found is None or member.state not in TRUSTED:
            return []
        if found.ours is None:
            found.theirs[member.id] = digests
            return []
        return self._compare(member, version, differing(found.ours, digests))

    def hashed(self, version: int, digests: bytes) -> list[Action]:
        """The host's own hashes."""
        actions: list[Action] = []
        for found in self._versions:
            if found.number != version:
                continue
            found.ours = digests
            for guest, theirs in found.theirs.items():
                member = self._members.get(guest)
                if member is not None and member.state in TRUSTED:
                    actions += self._compare(member, version, differing(digests, theirs))
            found.theirs.clear()
        return actions

    def _compare(self, member: Member, version: int, different: int) -> list[Action]:
        if different:
            return self._mismatch(member, version, different)
        member.hashes_equal += 1
        member.mismatches_in_a_row = 0
        if self._parity_due(member) and member.state == COMPUTING:
            # The next step's common batch checks it like a newcomer. It keeps its lease of this step.
            member.state, member.reason = SYNCING, "its gradient is checked again"
        return [Emit(event=ReplicaChecked(machine=member.name, address=member.address, step=version + 1))]

    def _parity_due(self, member: Member) -> bool:
        """After the first equal hash, too: a newcomer is checked with weights that no codec has rounded yet."""
        every = self._parity_every(member)
        return member.hashes_equal % every == 0 or (member.hashes_equal == 1 and every == PARITY_EVERY)

    def _parity_every(self, member: Member) -> int:
        step_s, rate = self._stepping.predicted_s, member.rate.value
        fits = step_s is not None and rate is not None and rate * step_s > PARITY_SAMPLES
        every = PARITY_EVERY if fits else PARITY_SELDOM
        return every // PARITY_EVERY if self._doubts else every

    def _mismatch(self, member: Member, version: int, different: int) -> list[Action]:
        """Stop counting the guest's contributions: send it everything again, then check its gradient."""
        member.mismatches += 1
        member.mismatches_in_a_row += 1
        member.hashes_equal = 0
        reason = f"held weights that are not the host's ({different} of {len(member.feed.have)} pieces differ)"
        if member.mismatches_in_a_row == MOST_IN_A_ROW:
            return self._put_out(member, f"{reason}, {MOST_IN_A_ROW} times in a row", hint=HINT)
        back, actions = self._stepping.void(member)
        member.feed.forget()
        member.feed.open = True
        member.state, member.reason = SYNCING, "its weights differed"
        return [
            *actions,
            Send(guest=member.id, message=ResyncMessage(version=version)),
            Emit(
                event=ReplicaMismatch(
                    machine=member.name,
                    address=member.address,
                    step=version + 1,
                    samples=back,
                    pieces=different,
                    reason=reason,
                )
            ),
            *self._pump(member),
        ]

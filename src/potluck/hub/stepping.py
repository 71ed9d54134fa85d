"""One step at a time: who gets how many samples, what the host computes itself, and when it stops waiting.

PURE: times are arguments, actions are results.

The host never waits longer for a lease than it would take to compute it. When its own samples are done and a lease
is still out, it waits at most as long as those samples would take it, then takes them back.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace

from potluck.balance.leases import Least, Quotas, Speed, lease_sizes, quotas, split_evenly, takeable
from potluck.balance.ledger import Ledger
from potluck.balance.quota import Estimate, extra_samples
from potluck.hub.actions import Action, CommonBatch, Emit, Send, SendSamples, StepResult, Take, Wake
from potluck.hub.ahead import AheadCount, SendingAhead
from potluck.hub.codec_choice import CodecChoice
from potluck.hub.feed import PieceState
from potluck.hub.members import (
    COMPUTING,
    GAIN_WINDOW,
    LATE,
    LATE_BEFORE_BENCH,
    LONGEST_BENCH_STEPS,
    LONGEST_REST_S,
    QUOTA_RETRY_STEPS,
    SITTING_OUT,
    TRIAL_SAMPLES,
    Member,
    OpenLease,
)
from potluck.hub.reasons import in_a_row, kind_of, why_late, why_not, why_slower
from potluck.hub.slowdown import Slowdown
from potluck.spec.events import ContributionDropped, GuestSitsOut, LeaseTakenBack
from potluck.spec.messages import DroppedMessage, LeaseMessage, NoteMessage, RevokeMessage

FIRST_TAIL_S = 0.05
"""A guess of the time to deliver the end of a gradient, until the first contribution is measured."""
MOST_MICRO_BATCHES = 512
"""The most micro-batches of a lease: all are sent at once, and one header lists them."""
MOST_EXTRA_BYTES = 256 << 10
"""The most bytes of samples beyond a quota, because they are sent in the step that needs the link for its
weights."""
SILENT_S = 2.5
"""At the end of a step, a guest that was silent for this long is not waited for."""


@dataclass(frozen=True, slots=True)
class Lot:
    """What a step gives one guest."""

    quota: int
    spare: int
    """Samples of the host's own share that may be lent beyond the quota."""
    lent: int
    """Samples of the host's own share that are lent already."""
    step_s: float
    host_sample_s: float


class Stepping:
    """Gives out the leases of each step."""

    def __init__(
        self,
        *,
        ledger: Ledger,
        members: dict[str, Member],
        host_name: str,
        local_data: bool,
        ahead: SendingAhead,
        least: Least | None = None,
        codecs: CodecChoice | None = None,
    ) -> None:
        self._codecs = codecs
        self.least = least or Least()
        self.ahead = ahead
        self.ledger = ledger
        self.members = members
        self.host_name = host_name
        self.local_data = local_data
        self.slowdown = Slowdown(members)
        self.started = 0.0
        self._host_sample_s = Estimate()
        self._host_now = (0, 0.0)
        self._head_start_s = 0.0
        self._out_since: float | None = None
        self._wait_s = 0.0
        self._dropped = 0
        self._taken_back = 0
        self._sizes: dict[str, tuple[int, ...]] = {}
        self._predicted: float | None = None
        self._guests_loss_sum = self._guests_items = 0.0

    # -- begin and end ----------------------------------------------------------------------------------

    def begin(
        self, now: float, pieces: Sequence[PieceState], host_keeps: int, head_start_s: float = 0.0
    ) -> list[Action]:
        """Open the step and give out its leases.

        `head_start_s`: extra time of the guests, because the host's device still has work of the last step;
        negative if they should finish before the host.
        """
        self.ledger.open_step()
        self.started, self._out_since = now, None
        self._wait_s, self._dropped, self._taken_back = 0.0, 0, 0
        self._sizes = {}
        self._predicted = None
        self._guests_loss_sum = self._guests_items = 0.0
        self._head_start_s = head_start_s
        seconds = self.host_sample_s
        if not seconds:
            self.ahead.begun()
            return []
        actions: list[Action] = []
        for member in self.members.values():
            member.longest_rest = max(LONGEST_BENCH_STEPS, int(LONGEST_REST_S / (self.alone_s or LONGEST_REST_S)))
        if self._codecs is not None:
            actions += self._codecs.begin_step(self.ledger.global_batch, seconds, self.ledger.step)
        actions += self._without_who_slows()
        able = self._shares(self._candidates(), host_keeps)
        trial = [m for m in self._candidates() if m.id not in able.guests and _deserves_trial(m, able.step_s)]
        for member in self._candidates():
            if member.id not in able.guests and member not in trial:
                actions += self._cannot_help(member, able.step_s)
                continue
            if member.state == SITTING_OUT:
                member.state, member.reason = LATE, "catching up"
            member.feed.open = True
        # What a guest was sent of the last version must have arrived: it cannot start on the new one otherwise.
        ready = [
            m
            for m in (*(self.members[guest] for guest in able.guests), *trial)
            if m.lease is None and m.feed.current(pieces) and not m.feed.in_flight_bytes
        ]
        shares = self._shares([m for m in ready if m.id in able.guests], host_keeps)
        lent = 0
        # There is little to lend: guests whose speed changes most come first.
        for guest in sorted(shares.guests, key=lambda g: self.members[g].unsteadiness, reverse=True):
            lot = Lot(shares.guests[guest], shares.host - host_keeps - lent, lent, shares.step_s, seconds)
            extra, leasing = self._lease(self.members[guest], lot, now)
            lent += extra
            actions += leasing
        for member in (m for m in ready if m.id not in able.guests):
            least = member.speed.least.lease if member.speed is not None else 1
            quota = min(max(TRIAL_SAMPLES, least), member.micro_batch, self.ledger.in_pool - host_keeps)
            if quota >= least:
                actions += self._lease(member, Lot(quota, 0, lent, shares.step_s, seconds), now)[1]
        self.ahead.begun()
        self.slowdown.begun(self.ledger.step)
        self._predicted = shares.step_s
        return actions

    def lend_newcomer(
        self, member: Member, now: float, pieces: Sequence[PieceState], host_keeps: int
    ) -> list[Action]:
        """Give a lease in the middle of the step to a guest that has just passed its check, out of the samples in
        the pool.

        Otherwise it would wait for the next step, which on a slow host may be a minute away. Not in a run's first
        step, in which the host's speed is unknown, because it may compile the model.
        """
        seconds, speed = self._host_sample_s.value, member.speed
        if not seconds or speed is None or member.lease is not None or self.slowdown.trying:
            return []
        if not member.feed.current(pieces) or member.feed.in_flight_bytes or self.ledger.in_pool <= host_keeps:
            return []
        shares = quotas(self.ledger.in_pool, 1 / seconds, {member.id: self._counted_on(speed)}, host_keeps)
        if not (quota := shares.guests.get(member.id, 0)):
            return []
        return self._lease(member, Lot(quota, 0, 0, shares.step_s, seconds), now)[1]

    def _shares(self, members: Sequence[Member], host_keeps: int) -> Quotas:
        speeds = {m.id: self._counted_on(m.speed) for m in members if m.speed is not None}
        return quotas(self.ledger.global_batch, 1 / (self.host_sample_s or 1.0), speeds, host_keeps)

    def _counted_on(self, speed: Speed) -> Speed:
        """The guest's speed, with the head start taken off its overhead."""
        return replace(speed, overhead_s=max(0.0, speed.overhead_s - self._head_start_s))

    @property
    def host_sample_s(self) -> float | None:
        """Seconds that the host takes for a sample: over the last steps, or so far in the first step."""
        count, seconds = self._host_now
        return self._host_sample_s.value or (seconds / count if count else None)

    @property
    def alone_s(self) -> float | None:
        """Seconds that the host alone would take for the open step, if that is known."""
        seconds = self.host_sample_s
        return self.ledger.global_batch * seconds if seconds else None

    @property
    def predicted_s(self) -> float | None:
        """How long this step should take. None where no guest takes part."""
        return self._predicted

    def end(self) -> StepResult:
        samples = self.ledger.close_step()
        count, seconds = self._host_now
        if count:
            self._host_sample_s.add(seconds / count)
        self._host_now = (0, 0.0)
        ahead, self.ahead.count = self.ahead.count, AheadCount()
        return StepResult(
            samples=samples,
            wait_s=self._wait_s,
            dropped_samples=self._dropped,
            taken_back_samples=self._taken_back,
            predicted_s=self._predicted,
            micro_batches=self._sizes,
            guests_loss_sum=self._guests_loss_sum,
            guests_items=self._guests_items,
            ahead_samples=ahead.used_samples,
            unneeded_samples=ahead.unneeded_samples,
            unneeded_bytes=ahead.unneeded_bytes,
        )

    def _candidates(self) -> list[Member]:
        """Guests whose gradients count and who are not resting."""
        if self.slowdown.trying:
            return []
        found = []
        for member in self.members.values():
            if member.state not in (COMPUTING, LATE, SITTING_OUT) or member.speed is None:
                continue
            if member.state == SITTING_OUT and self.ledger.step < member.rests_until_step:
                continue
            found.append(member)
        return found

    def _cannot_help(self, member: Member, step_s: float) -> list[Action]:
        """The quota is under one sample: let the guest sit out, and try again later."""
        assert member.speed is not None
        reason = why_not(self._counted_on(member.speed), step_s, guessed=not member.samples)
        # A guest that has helped before is asked again soon, then less and less often.
        steps = None if member.samples else QUOTA_RETRY_STEPS * 2**member.rests
        member.rest(self.ledger.step, reason, steps=steps)
        # Estimates grow old while it rests: improve them each time, or a short slowness would never end.
        if member.samples and member.rate.value is not None:
            member.rate.value *= 1.2
        for estimate in (member.overhead, member.transfer):
            if estimate.value is not None:
                estimate.value *= 0.7
                estimate.spread *= 0.7
        member.rate.spread *= 0.7
        return [] if kind_of(reason) == member.told else self._sits_out(member, reason)

    def _without_who_slows(self) -> list[Action]:
        """Let a guest that makes the whole run slower sit out."""
        if (found := self.slowdown.found()) is None:
            return []
        member, reason = found.member, why_slower(found.with_per_s, found.alone_per_s)
        member.rest(self.ledger.step, reason)
        member.rests_until_step = self.ledger.step + found.steps
        return self._sits_out(member, reason, f"; tries again at step {member.rests_until_step + 1}")

    def _sits_out(self, member: Member, reason: str, until: str = "") -> list[Action]:
        """Report it, and tell the guest unless it was told the same before."""
        kind = kind_of(reason)
        note = NoteMessage(text=f"this machine sits out for a while: {reason}{until}")
        news: list[Action] = [] if kind == member.told else [Send(guest=member.id, message=note)]
        member.told = kind
        event = GuestSitsOut(machine=member.name, step=self.ledger.step + 1, reason=reason + until)
        return [Emit(event=event), *news]

    def _lease(self, member: Member, lot: Lot, now: float) -> tuple[int, list[Action]]:
        """Give out a lease. Also returns how many samples it has beyond the quota."""
        speed = member.speed
        assert speed is not None
        quota = min(lot.quota, member.micro_batch * MOST_MICRO_BATCHES)
        anew = lease_sizes(quota, speed)
        cut = self.ahead.cut(member, quota, lot.spare, speed) or [(size, None) for size in anew]
        quota = sum(size for size, _ in cut)
        extra = self._beyond(member, lot, speed, quota)
        # A micro-batch ends where the quota ends: guests usually stop there.
        cut = [*cut, *((size, None) for size in split_evenly(extra, member.micro_batch))]
        more = max(0, quota - lot.quota)
        wanted = [p for size, sent in cut for p in (sent.positions if sent else (None,) * size)]
        used = [sent for _, sent in cut if sent is not None]
        lease = self.ledger.lease(
            member.name, quota + extra, wanted=wanted if used else (), spare=self.ahead.spared(member)
        )
        tail_s = FIRST_TAIL_S if member.tail.value is None else member.tail.value
        member.leased = True
        sizes = tuple(size for size, _ in cut)
        member.lease = OpenLease(
            id=lease.id,
            step=lease.step,
            count=quota + extra,
            sizes=sizes,
            started=now,
            codec=member.codec,
            tail_s=tail_s,
            unread=0 if self.local_data else len(sizes) - len(used),
        )
        member.state, member.reason = COMPUTING, ""
        message = LeaseMessage(
            lease=lease.id,
            step=lease.step,
            sizes=sizes,
            quota=quota,
            within_s=max(0.0, lot.step_s + self._head_start_s),
            host_sample_s=lot.host_sample_s,
            transfer_s=speed.transfer_s,
            tail_s=tail_s,
            codec=member.codec,
            epoch=self.ledger.epoch,
            ahead=tuple(sent.number if sent else 0 for _, sent in cut) if used else (),
        )
        if self.local_data:
            indices = pack_samples(self.ledger.samples_of(lease.positions))
            return more + extra, [Send(guest=member.id, message=message, frames=(indices,))]
        actions: list[Action] = [Send(guest=member.id, message=message)]
        actions += self.ahead.lent(member, used)
        ends = itertools.accumulate(sizes)
        fresh = [
            SendSamples(guest=member.id, lease=lease.id, batch=number, positions=lease.positions[end - size : end])
            for (number, (size, sent)), end in zip(enumerate(cut), ends)
            if sent is None
        ]
        first = fresh
        if member.ahead.is_heavy(quota):
            first = [each for each in fresh if each.batch == 0]
            member.ahead.after_weights = [each for each in fresh if each.batch]
        member.ahead.plan(lease.step, anew)
        return more + extra, [*actions, *first]

    def _beyond(self, member: Member, lot: Lot, speed: Speed, quota: int) -> int:
        """How many samples to lend beyond this quota."""
        spare = min(lot.spare - max(0, quota - lot.quota), member.micro_batch * MOST_MICRO_BATCHES - quota)
        if member.ahead.sample_bytes:
            spare = min(spare, int(MOST_EXTRA_BYTES / member.ahead.sample_bytes))
        return extra_samples(quota, speed, lot.host_sample_s, lent=lot.lent, spare=spare)

    # -- the host's own work ----------------------------------------------------------------------------

    def take(self, count: int, now: float, common: CommonBatch | None = None) -> tuple[Take, list[Action]]:
        """What the training thread should do next. `common`: what it takes now is a common batch."""
        actions: list[Action] = []
        if not self.ledger.in_pool:
            if self.ledger.full:
                return Take(full=True), actions
            if self._out_since is None and self.ledger.leases:
                self._out_since = now
            actions += self._take_back_overdue(now)
        positions = self.ledger.take(takeable(self.ledger.in_pool, count, self.least.micro_batch))
        if positions:
            return Take(positions=positions, common=common), actions
        if self.ledger.full:
            return Take(full=True), actions
        return Take(wait_until=self._next_deadline(now)), actions

    def host_launched(self, positions: Sequence[int], sizes: Sequence[int] | None = None) -> None:
        """The host's device has these samples, so no guest will compute them. `sizes`: each rank's part."""
        self.ledger.host_counts(positions, self.host_name)
        self._computed(self.host_name, sizes or (len(positions),))

    def host_computed(self, samples: int, seconds: float) -> None:
        count, so_far = self._host_now
        self._host_now = (count + samples, so_far + seconds)

    def _computed(self, machine: str, sizes: Sequence[int]) -> None:
        self._sizes[machine] = (*self._sizes.get(machine, ()), *sizes)

    def waited(self, seconds: float) -> None:
        """The training thread was idle this long, waiting for leases."""
        self._wait_s += seconds
        for member in self._holding():
            assert member.lease is not None
            member.lease.waited_s += seconds

    def stood_still(self, seconds: float, now: float) -> None:
        """This host itself stood still for these seconds, so they do not count against the guests."""
        if self._out_since is not None:
            self._out_since = min(now, self._out_since + seconds)
        for member in self.members.values():
            lease = member.lease
            if lease is None:
                continue
            lease.started = min(now, lease.started + seconds)
            if lease.closing_at is not None and lease.closing_at < now:
                lease.closing_at = min(now, lease.closing_at + seconds)

    def _holding(self) -> list[Member]:
        return [m for m in self.members.values() if m.lease is not None and m.lease.id in self.ledger.leases]

    def _deadline(self, member: Member, now: float) -> float:
        """The time until which the host waits for this lease: as long as computing it would take."""
        lease = member.lease
        assert lease is not None and self._out_since is not None
        if lease.arrived:
            return now + 60.0
        if now - member.last_heard > SILENT_S:
            return now
        patience = len(self.ledger.leases[lease.id].positions) * (self.host_sample_s or 0.0)
        deadline = self._out_since + patience
        if lease.closing_at is not None and lease.closing_at > deadline:
            return now
        return deadline

    def _next_deadline(self, now: float) -> float:
        return min((self._deadline(m, now) for m in self._holding()), default=now + 0.05)

    def _take_back_overdue(self, now: float) -> list[Action]:
        if self._out_since is None:
            return []
        actions: list[Action] = []
        for member in self._holding():
            if now >= self._deadline(member, now):
                actions += self._take_back(member, now)
                break  # one at a time: while its samples are computed here, the others may still come
        return actions

    def _take_back(self, member: Member, now: float) -> list[Action]:
        lease = member.lease
        assert lease is not None
        count = self.ledger.take_back(lease.id)
        lease.revoked = True
        lease.pieces.clear()
        self._taken_back += count
        silent = now - member.last_heard
        reason, miss = why_late(member, lease, silent_s=silent if silent > SILENT_S else 0.0, now=now)
        actions: list[Action] = [
            Send(guest=member.id, message=RevokeMessage(lease=lease.id)),
            Emit(
                event=LeaseTakenBack(
                    machine=member.name,
                    address=member.address,
                    step=lease.step + 1,
                    samples=count,
                    reason=reason,
                    silent=silent > SILENT_S,
                )
            ),
        ]
        member.misses.append(miss)
        member.gains_s.append(-lease.waited_s)
        member.state, member.reason = LATE, reason
        return actions + self._judge(member)

    def _judge(self, member: Member) -> list[Action]:
        """Let a guest sit out that was late too often, or for which the host waited longer than it saved."""
        if member.state == SITTING_OUT:
            return []  # it was judged when its lease was taken back; its late answer is no second offence
        if len(member.misses) >= LATE_BEFORE_BENCH:
            reason = in_a_row(member.misses)
        elif len(member.gains_s) == GAIN_WINDOW and sum(member.gains_s) < 0:
            reason = "waiting for it took more time than it saved"
        else:
            return []
        member.rest(self.ledger.step, reason)
        return self._sits_out(member, reason, f"; tries again at step {member.rests_until_step + 1}")

    # -- what guests say about their lease --------------------------------------------------------------

    def closing(self, member: Member, *, lease: int, keep: int, eta_s: float, now: float) -> list[Action]:
        """The guest starts its last micro-batch: it will deliver `keep` samples in about `eta_s`."""
        own = member.lease
        if own is None or own.id != lease or own.revoked or own.arrived:
            return []
        if self.least.micro_batch > 1 and keep not in itertools.accumulate(own.sizes):
            return []  # cut elsewhere, a single sample could come back: what it delivers then does not count
        own.closing_at = now + eta_s
        back = self.ledger.trim(lease, keep)
        own.count -= back
        return [Wake()] if back else []

    def piece(self, member: Member, *, lease: int, index: int, payload: object) -> bool:
        """Keep a piece of a contribution. Returns whether the contribution may count."""
        own = member.lease
        if own is None or own.id != lease or own.revoked or own.arrived:
            return False
        own.pieces[index] = payload
        return True

    def complete(self, member: Member, *, lease: int, count: int, pieces: int) -> str | None:
        """Why the contribution that just ended cannot be used, or None if it can."""
        own = member.lease
        if own is None or own.id != lease:
            return "it answers no lease"
        if own.revoked or lease not in self.ledger.leases:
            return "it came after its samples had been taken back"
        if count != own.count:
            return f"it has {count} samples where {own.count} were leased"
        if len(own.pieces) != pieces:
            return f"only {len(own.pieces)} of {pieces} pieces arrived"
        own.arrived = True
        return None

    def learn(self, member: Member, *, count: int, compute_s: float, now: float) -> None:
        own = member.lease
        if own is not None:
            own.arrived_at = now
            in_sum_at = now + (member.decoding.value or 0.0)
            if own.closing_at is not None and not own.revoked:
                # The error of the guest's prediction is the error of the tail. No two clocks are compared.
                member.tail.add(max(0.0, own.tail_s + in_sum_at - own.closing_at))
            member.delivered(count=count, compute_s=compute_s, since_start_s=in_sum_at - own.started)

    def drop(self, member: Member, *, reason: str, now: float, late: bool = True) -> list[Action]:
        """Reject a contribution: its samples go back to the pool, if they are not there yet.

        `late`: treat it like one that came too late.
        """
        own = member.lease
        if own is None:
            return []
        back = self.ledger.take_back(own.id)
        self._dropped += own.count
        member.lease = None
        if late and not own.revoked:
            member.misses.append(reason)
        event = ContributionDropped(machine=member.name, step=own.step + 1, samples=own.count, reason=reason)
        actions: list[Action] = [
            Send(guest=member.id, message=DroppedMessage(lease=own.id)),
            Emit(event=event),
        ]
        return actions + ([Wake()] if back else []) + self._judge(member)

    def void(self, member: Member) -> tuple[int, list[Action]]:
        """Reject what this guest computes: return its samples to the pool and tell it. Returns how many samples."""
        own = member.lease
        if own is None or own.revoked or own.arrived:
            return 0, []
        back = self.ledger.take_back(own.id)
        own.revoked = True
        own.pieces.clear()
        self._taken_back += back
        return back, [Send(guest=member.id, message=RevokeMessage(lease=own.id)), Wake()]

    def counted(self, member: Member, *, now: float, loss_sum: float = 0.0, items: float = 0.0) -> list[Action]:
        """The decoded contribution is in the sum: count its samples."""
        own = member.lease
        assert own is not None
        member.decoding.add(now - own.arrived_at)
        if not self.ledger.deliver(own.id, own.count):
            raise AssertionError(f"lease {own.id} was decoded but is not open")
        member.lease = None
        self._guests_loss_sum += loss_sum
        self._guests_items += items
        ends = itertools.accumulate(own.sizes)
        self._computed(member.name, [size for size, end in zip(own.sizes, ends) if end <= own.count])
        member.samples += own.count
        member.misses.clear()
        member.told = ""
        member.rests = member.wrong_in_a_row = 0
        gain = own.count * (self.host_sample_s or 0.0) - own.waited_s
        member.gains_s.append(gain)
        return [Wake(), *self._judge(member)]

    def stopped(self, member: Member, *, lease: int, computed: int, compute_s: float, now: float) -> None:
        """The guest has stopped working on a revoked lease: it may get another one."""
        own = member.lease
        if own is not None and own.id == lease and not own.arrived:
            self.learn(member, count=computed, compute_s=compute_s, now=now)
            self.ledger.take_back(lease)
            member.lease = None

    def gone(self, member: Member) -> int:
        """The guest left: its samples go back to the pool. Returns how many."""
        if member.lease is None:
            return 0
        back = self.ledger.take_back(member.lease.id)
        self._taken_back += back
        member.lease = None
        return back


def _deserves_trial(member: Member, step_s: float) -> bool:
    """Whether a guest seems too slow only by an estimate from its first weights."""
    speed = member.speed
    least = speed.least.lease if speed is not None else 1
    return speed is not None and not member.leased and speed.sample_s * least < step_s < speed.lease_s(least)


def pack_samples(samples: Sequence[int]) -> bytes:
    """The data set's indices, in a frame because they may not fit into a header."""
    return struct.pack(f"<{len(samples)}q", *samples)

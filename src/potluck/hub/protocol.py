"""The host's side of the protocol, sans-I/O: one input in, actions out, so that every race is a unit test. PURE.

Owns the list of guests and their states. `HostProtocol.handle` is the only way in: its caller reports what
happened, with the time, and performs the actions. All other public methods only read. Leases are in `stepping`,
parity checks in `checks`, the replica's hash in `guard`, sending the replica in `feeding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, assert_never

from potluck.balance.leases import next_made, next_size
from potluck.balance.ledger import Ledger
from potluck.errors import WireError
from potluck.hub import inputs
from potluck.hub.actions import (
    Action,
    CodeChange,
    Decode,
    Emit,
    Forget,
    HashFixed,
    LimitNorm,
    ReadPiece,
    Reply,
    Send,
    SendWelcome,
    Take,
    Wake,
)
from potluck.hub.ahead import MOST_BYTES, SendingAhead
from potluck.hub.checks import MID_STEP_S, SENDABLE, Checks
from potluck.hub.codec_choice import CodecChoice
from potluck.hub.feed import Feed, lacking
from potluck.hub.feeding import Feeding
from potluck.hub.guard import ReplicaGuard
from potluck.hub.layout import first_difference
from potluck.hub.members import CHECKING, COMPUTING, JOINING, SITTING_OUT, SYNCING, Member, gone
from potluck.hub.newcomers import Newcomers
from potluck.hub.norms import Norms
from potluck.hub.reasons import ONE_SAMPLE_HINT, not_finite
from potluck.hub.stepping import Stepping
from potluck.hub.terms import HostTerms
from potluck.spec.events import GuestHello, GuestRefused, RunNote
from potluck.spec.messages import (
    AliveMessage,
    ByeMessage,
    ClosingMessage,
    DoneMessage,
    DroppedMessage,
    GradMessage,
    HashedMessage,
    HelloMessage,
    LeaveMessage,
    ReadyMessage,
    RefuseMessage,
    SamplesMessage,
    SketchMessage,
    StoppedMessage,
    TakenMessage,
    UnknownMessage,
)
from potluck.wire.frames import packed_model, read_model

ABOUT_BYTES = 1 << 20
"""The description of a guest's model may have this many bytes, plus four times the size of the host's own
description."""
LONGEST_REASON = 500
"""Reasons quote what a guest sent. A longer one is cut, so that it always fits into a header."""

WRONG_BEFORE_OUT = 3
"""After this many wrong contributions in a row a guest is removed."""
WRONG_HINT = "this device may compute wrongly: update torch, or try --device cpu"
LOOK_AGAIN_S = 0.003
"""How soon the training thread reports again whether its device still computes."""


class HostProtocol:
    """Decides everything about the guests of one run."""

    def __init__(self, terms: HostTerms, ledger: Ledger) -> None:
        self.terms = terms
        self.ledger = ledger
        self.members: dict[str, Member] = {}
        self.feeding = Feeding(pieces=terms.pieces, members=self.members)
        self.codecs = CodecChoice(self.members, terms.fingerprint, terms.auto, lambda: self.feeding.change_bytes)
        self._change_bytes, steps = terms.coded_bytes or sum(terms.piece_bytes), terms.steps
        self.ahead = SendingAhead(
            ledger=ledger, members=self.members, feeding=self.feeding, change_bytes=self._change_bytes, steps=steps
        )
        self.stepping = Stepping(
            ledger=ledger,
            members=self.members,
            host_name=terms.name,
            local_data=terms.local_data,
            ahead=self.ahead,
            least=terms.least,
            codecs=self.codecs,
        )
        self.guard = ReplicaGuard(
            every=terms.check_replica_every,
            members=self.members,
            stepping=self.stepping,
            pump=self._pump,
            put_out=self._put_out,
        )
        self.checks = Checks(
            ledger=ledger,
            members=self.members,
            local_data=terms.local_data,
            least=terms.least,
            put_out=self._put_out,
            round_less=self.codecs.round_less,
            codec_down=terms.codec_down,
            doubt=self.guard.doubt,
        )
        self.norms = Norms(terms.guest_bound)
        self._most_about_bytes = ABOUT_BYTES + 4 * len(packed_model(terms.fingerprint, {}))
        self._now = self._last_alive = 0.0
        self._newcomers = Newcomers()
        self._weights_stay = True
        """Whether the model has the weights of a version: in a step, and before the first one."""
        self._handlers = self._table()

    def handle(self, event: inputs.Input, now: float) -> list[Action]:
        """Process an input and return the actions. `now` is the host's monotonic clock."""
        self._now = self._newcomers.now = now
        return self._handlers[type(event)](event, now)

    def _table(self) -> dict[type[inputs.Input], Callable[[Any, float], list[Action]]]:
        """The handler of each input. It is a dict because matching 24 classes one by one takes ten times as
        long."""
        return {
            inputs.MessageArrived: self._message,
            inputs.UnreadableArrived: self._unreadable,
            inputs.OtherProtocolArrived: self._other_protocol,
            inputs.PeerUnreachable: self._unreachable,
            inputs.PeerNotReading: self._not_reading,
            inputs.Tick: self._tick,
            inputs.StoodStill: self._stood_still,
            inputs.PieceCoded: self._piece_coded,
            inputs.PartRead: self._part_read,
            inputs.ContributionDecoded: self._decoded,
            inputs.ReplicaHashed: self._replica_hashed,
            inputs.FixedHashed: self._fixed_hashed,
            inputs.SamplesPacked: self._samples_packed,
            inputs.SamplesNotPacked: self._samples_not_packed,
            inputs.AheadPacked: self.ahead.packed,
            inputs.SketchCompared: self._sketch_compared,
            inputs.StepBegun: self._step_begun,
            inputs.BatchWanted: self._batch_wanted,
            inputs.HostWaited: self._host_waited,
            inputs.HostLaunched: self._host_launched,
            inputs.HostComputed: self._host_computed,
            inputs.CommonComputed: self._common_computed,
            inputs.BuffersChanged: self.checks.buffers_changed,
            inputs.StepFilled: self._step_filled,
            inputs.GradientKnown: self._gradient_known,
            inputs.StepTimed: self._step_timed,
            inputs.HostClosing: self._host_closing,
        }

    # -- what may be read -------------------------------------------------------------------------------

    def synced(self) -> list[Member]:
        """Guests that hold the replica (whether checked already or not)."""
        return [m for m in self.members.values() if m.state != JOINING and m.feed.current(self.feeding.pieces)]

    @property
    def host_sample_s(self) -> float | None:
        """Seconds that the host takes for a sample."""
        return self.stepping.host_sample_s

    def samples_of(self, positions: Sequence[int]) -> list[int]:
        """The data set's indices of these positions."""
        return self.ledger.samples_of(positions)

    @property
    def judges(self) -> bool:
        """Whether the norm of the host's own gradient of this step is needed, to check guests' gradients."""
        takes_part = any(m.state not in (JOINING, SITTING_OUT) for m in self.members.values())
        return takes_part or self.norms.suspects

    def holds(self, guest: str, lease: int) -> bool:
        """Whether the guest still holds the lease."""
        member = self.members.get(guest)
        return member is not None and member.holds(lease)

    # -- messages ---------------------------------------------------------------------------------------

    def _message(self, event: inputs.MessageArrived, now: float) -> list[Action]:
        """One message of an authenticated guest. A message that is not valid here removes the guest."""
        guest, message, frames = event.guest, event.message, event.frames
        if isinstance(message, HelloMessage):
            return self._hello(guest, message, now, event.address)
        member = self.members.get(guest)
        if member is None:
            return self._unknown(guest)
        if member.leaving is not None:
            return []
        member.last_heard = now
        try:
            match message:
                case GradMessage():
                    return self._grad(member, message, frames[0])
                case TakenMessage():
                    return self._taken(member, message, now)
                case AliveMessage():
                    return []
                case DoneMessage():
                    return self._done(member, message, now)
                case ClosingMessage():
                    return self.stepping.closing(
                        member, lease=message.lease, keep=message.keep, eta_s=message.eta_s, now=now
                    )
                case StoppedMessage():
                    return self._stopped(member, message, now)
                case ReadyMessage():
                    return self._ready(member, message, frames[0], now)
                case SketchMessage():
                    return self._sketch(member, message, frames[0])
                case HashedMessage():
                    return self.guard.answered(member, message.version, bytes(frames[0]))
                case LeaveMessage():
                    member.failed = message.failed
                    return self._remove(member, "guest_left", message.reason or "left")
                case _:
                    assert_never(message)
        except WireError as error:
            return self._put_out(member, f"sent {error}")

    def _unreadable(self, event: inputs.UnreadableArrived, now: float) -> list[Action]:
        member = self.members.get(event.guest)
        if member is not None:
            what = event.why if event.kind else f"bytes that are no message: {event.why}"
            return [] if member.leaving is not None else self._put_out(member, f"sent {what}")
        if event.kind == HelloMessage.kind:
            return self._refuse(event.guest, "a guest", event.address, f"sent {event.why}")
        return self._unknown(event.guest) if event.kind else []

    def _unknown(self, guest: str) -> list[Action]:
        # `potluck doctor` asks this way for the versions; it is no guest.
        ours = self.terms.versions
        versions = UnknownMessage(
            protocol=ours["protocol"], potluck=ours["potluck"], torch=ours["torch"], python=ours["python"]
        )
        return [Send(guest=guest, message=versions)]

    def _hello(self, guest: str, hello: HelloMessage, now: float, address: str) -> list[Action]:
        if guest in self.members:
            return []
        # It may notice a broken connection before the host does. Only the guest itself knows that connection's id.
        before = self.members.get(hello.before)
        gone = [] if before is None else self._remove(before, "guest_lost", "came back on a new connection")
        if len(self.members) >= self.terms.max_guests:
            reason = f"all {self.terms.max_guests} places are taken"
            return gone + self._refuse(guest, hello.name or "?", address, reason)
        about = {part: getattr(hello, part) for part in ("potluck", "torch", "python", "platform")}
        member = Member(
            id=guest,
            name=self._free_name(hello.name or "guest", besides=before),
            address=address,
            device=hello.device,
            about=about,
            last_heard=now,
            joined_at=now,
            feed=Feed(pieces=self.terms.pieces, window_bytes=self.terms.window_bytes),
            least=self.terms.least,
            codec=self.codecs.first,
        )
        self.members[guest] = member
        actions: list[Action] = [
            *gone,
            SendWelcome(guest=guest, name=member.name),
            *self._newcomers.told(GuestHello(machine=member.name, address=address, device=member.device)),
        ]
        for part in ("potluck", "torch"):
            if about[part] != self.terms.versions.get(part):
                text = (
                    f"{member.name} runs {part} {about[part]}, this host {self.terms.versions.get(part)}: its "
                    "gradients are checked before they count"
                )
                actions += self._newcomers.told(RunNote(machine=member.name, text=text))
        return actions

    def _other_protocol(self, event: inputs.OtherProtocolArrived, now: float) -> list[Action]:
        reason = f"it uses protocol {event.theirs}, this host uses {self.terms.versions['protocol']}"
        member = self.members.get(event.guest)
        if member is not None:
            return self._put_out(member, reason, refused=True)
        return self._refuse(event.guest, "a guest", event.address, reason)

    def _ready(self, member: Member, ready: ReadyMessage, about: Any, now: float) -> list[Action]:
        """The guest has built its model: compare fingerprints, then send it the weights."""
        if member.state != JOINING:
            raise WireError("a second 'ready'")
        if len(about) > self._most_about_bytes:  # it is read while the training may have to wait
            raise WireError(f"{len(about)} bytes about its model, at most {self._most_about_bytes} are read")
        model = read_model(about)
        difference = first_difference(self.terms.fingerprint, model.fingerprint)
        if difference is not None:
            return self._put_out(member, f"a different model: {difference}", refused=True)
        member.computes(ready.micro_batch, ready.largest_micro_batch)
        member.ahead.most_bytes = 0 if self.terms.local_data else min(ready.ahead_bytes, MOST_BYTES)
        member.fixed_digests = model.hashes
        member.state = SYNCING
        return [HashFixed(guest=member.id), Wake()]

    def _taken(self, member: Member, taken: TakenMessage, now: float) -> list[Action]:
        if taken.ahead:
            member.ahead.took(taken.bytes)
            return self.ahead.pump(member)
        member.feed.taken(taken.bytes)
        since, member.sending_since = member.sending_since, now if member.feed.in_flight_bytes else None
        if member.state == SYNCING:
            if since is not None:
                member.sync_bytes += taken.bytes
                member.sync_s += now - since
            return [*self._pump(member), Wake()]
        return self._pump(member)

    # -- contributions ----------------------------------------------------------------------------------

    def _grad(self, member: Member, grad: GradMessage, payload: Any) -> list[Action]:
        index = grad.piece
        if index >= self.terms.pieces:
            raise WireError(f"a gradient for piece {index}, which does not exist")
        most, size = self.terms.piece_bytes[index], len(payload)
        if size > most or (size < most and self.terms.coded_bytes is None):
            raise WireError(f"{size} bytes for piece {index}, not {most}")
        if not self.stepping.piece(member, lease=grad.lease, index=index, payload=payload):
            return []
        assert member.lease is not None
        codec = member.lease.codec
        return [ReadPiece(guest=member.id, lease=grad.lease, index=index, payload=payload, codec=codec)]

    def _done(self, member: Member, done: DoneMessage, now: float) -> list[Action]:
        lease, count = done.lease, done.count
        member.computes(done.micro_batch, done.largest_micro_batch)
        if member.lease is None or member.lease.id != lease:
            return []  # it answers no lease that is open
        if member.lease.arrived:
            raise WireError(f"lease {lease} twice")
        if done.receive_s > 0 and not member.samples:
            member.transfer.value = done.receive_s  # what the first weights told was a guess
        elif done.receive_s > 0:
            member.transfer.add(done.receive_s)
        member.receive_s = done.receive_s
        self.stepping.learn(member, count=count, compute_s=done.compute_s, now=now)
        actions: list[Action] = []
        if member.lease.closing_at is None:
            # Its 'closing' travels on the other connection, and this may overtake it.
            actions += self.stepping.closing(member, lease=lease, keep=count, eta_s=0.0, now=now)
        why_not = self.stepping.complete(member, lease=lease, count=count, pieces=self.terms.pieces)
        if why_not is not None:
            return actions + self.stepping.drop(member, reason=why_not, now=now)
        if not done.finite:
            member.single = member.lease.has_single(count)
            return actions + self._wrong(member, not_finite(single=member.single), math.inf, now)
        if (done.items is not None) != member.counts_items:
            how = "without items, unlike" if member.counts_items else "with items, unlike"
            return actions + self.stepping.drop(member, reason=f"it came {how} in its parity check", now=now)
        decode = Decode(
            guest=member.id,
            lease=lease,
            pieces=member.lease.pieces,
            loss_sum=done.loss_sum,
            count=count,
            items=done.items or 0.0,
            codec=member.lease.codec,
        )
        return [*actions, decode]

    def _wrong(self, member: Member, reason: str, norm: float, now: float) -> list[Action]:
        """Drop a contribution that cannot be right. The guest is not at fault if the host gets the same result."""
        assert member.lease is not None
        self.norms.suspect(member.id, step=member.lease.step, norm=norm)
        return self.stepping.drop(member, reason=reason, now=now, late=False)

    def _gradient_known(self, event: inputs.GradientKnown, now: float) -> list[Action]:
        """Use the host's own gradient as the limit for guests' gradients, and judge dropped contributions by it."""
        actions: list[Action] = []
        for guest, guilty in self.norms.host_gradient(event.step, event.norm, event.samples):
            member = self.members.get(guest)
            if member is None:
                continue
            member.wrong_in_a_row = member.wrong_in_a_row + 1 if guilty else 0
            if member.wrong_in_a_row >= WRONG_BEFORE_OUT:
                packed = f" (in codec {member.codec or self.terms.codec})" if self.terms.codec else ""
                actions += self._put_out(
                    member,
                    f"sent gradients that are not finite or far too large {member.wrong_in_a_row} times in a row"
                    f"{packed}, of samples whose gradient here is neither",
                    hint=f"{ONE_SAMPLE_HINT}. If it does not: {WRONG_HINT}" if member.single else WRONG_HINT,
                )
        if not event.applied:
            # What packing this gradient has lost must not be added to the next one.
            helped = [member for member in self.members.values() if member.samples]
            actions += [Send(guest=m.id, message=DroppedMessage(lease=0)) for m in helped]
        return [*actions, LimitNorm(most_a_sample=self.norms.most_a_sample)]

    def _decoded(self, event: inputs.ContributionDecoded, now: float) -> list[Action]:
        member = self.members.get(event.guest)
        if member is None or member.lease is None or member.lease.id != event.lease:
            raise AssertionError("a contribution was decoded whose guest is gone")  # see _remove
        if event.why_not is not None and event.wrong_norm is not None:
            actions = self._wrong(member, event.why_not, event.wrong_norm, now)
        elif event.why_not is not None:
            actions = self.stepping.drop(member, reason=event.why_not, now=now)
        else:
            actions = self.stepping.counted(member, now=now, loss_sum=event.loss_sum, items=event.items)
        if member.leaving is not None:
            actions += self._remove(member, *member.leaving)
        return actions

    def _stopped(self, member: Member, stopped: StoppedMessage, now: float) -> list[Action]:
        if stopped.lease < 0:  # a check: its weights had gone on before the guest could begin
            self.checks.void(member.id, -stopped.lease)
            return [Wake()]
        lease, computed, compute_s = stopped.lease, stopped.computed, stopped.compute_s
        self.stepping.stopped(member, lease=lease, computed=computed, compute_s=compute_s, now=now)
        return [Wake()]

    # -- the training thread ------------------------------------------------------------------------------

    def _step_begun(self, event: inputs.StepBegun, now: float) -> list[Action]:
        """Open the step: leases for guests whose gradients count, a common batch for guests to be checked."""
        self._weights_stay = True
        pieces, keeps = self.feeding.pieces, self.terms.least.lease
        self.checks.begin_step(pieces)
        actions = self.stepping.begin(now, pieces, keeps, event.head_start_s)
        actions += self.guard.begin_step(self.ledger.step)
        needed = self.checks.due is not None or any(m.lease is not None for m in self.members.values())
        if self.feeding.begin_step(now, self.stepping.alone_s, needed=needed):
            actions.append(CodeChange(codec=self.codecs.change))
        return actions

    def _batch_wanted(self, event: inputs.BatchWanted, now: float) -> list[Action]:
        if event.computing is not False and self._stays():
            if event.computing is None:
                return [Reply(value=Take(ask_device=True))]
            return [Reply(value=Take(wait_until=now + LOOK_AGAIN_S, idle=False))]
        seconds = self.stepping.host_sample_s
        left_s = self.ledger.in_pool * seconds if seconds else None
        self.checks.look_again(self.feeding.pieces, left_s)
        common = self.checks.due
        if common is not None and common.twice is not None and (left_s or 0.0) >= 2 * MID_STEP_S:
            # The second comparison needs the weights that guests hold: until they are coded, its own samples.
            common = common if self.feeding.coded(self.ledger.step) else None
        least, left = self.terms.least.micro_batch, self.ledger.in_pool
        count = common.samples if common else next_made(left, event.made) or next_size(left, event.count, least)
        count = count or event.count
        take, actions = self.stepping.take(count, now, common)
        actions.append(Reply(value=take))
        return actions

    def _stays(self) -> bool:
        """Whether the step must not end while the device computes: leases are out, or guests wait to be admitted.

        The model has the weights of this step only until the step ends. If the step is one micro-batch, they can be
        coded, sent and used by guests under check only during that time.
        """
        if self.ledger.in_pool:
            return False
        members = self.members.values()
        coded = not self.feeding.coding or self.feeding.coded(self.ledger.step)
        waiting = any(m.state == CHECKING or (m.feed.open and not coded) for m in members)
        return waiting or not self.ledger.full

    def _host_waited(self, event: inputs.HostWaited, now: float) -> list[Action]:
        self.stepping.waited(event.seconds)
        return []

    def _host_launched(self, event: inputs.HostLaunched, now: float) -> list[Action]:
        self.stepping.host_launched(event.positions, event.sizes)
        return []

    def _host_computed(self, event: inputs.HostComputed, now: float) -> list[Action]:
        self.stepping.host_computed(event.samples, event.seconds)
        return []

    def _common_computed(self, event: inputs.CommonComputed, now: float) -> list[Action]:
        return self.checks.computed(event.positions, event.batch, event.reference)

    def _sketch_compared(self, event: inputs.SketchCompared, now: float) -> list[Action]:
        actions = self.checks.compared(event.guest, event.check, event.verdict)
        member = self.members.get(event.guest)
        if member is not None and member.state == COMPUTING and self._weights_stay:
            keeps = self.terms.least.lease
            actions += self.stepping.lend_newcomer(member, now, self.feeding.pieces, keeps)
        return actions

    def _replica_hashed(self, event: inputs.ReplicaHashed, now: float) -> list[Action]:
        return self.guard.hashed(event.version, event.digests)

    def _step_filled(self, event: inputs.StepFilled, now: float) -> list[Action]:
        self._weights_stay = False
        return [Reply(value=self.stepping.end())]

    def _step_timed(self, event: inputs.StepTimed, now: float) -> list[Action]:
        self.stepping.slowdown.timed(
            event.step, event.samples, event.seconds, host_sample_s=self.host_sample_s, here=event.here
        )
        return []

    def _host_closing(self, event: inputs.HostClosing, now: float) -> list[Action]:
        return [Send(guest=guest, message=ByeMessage(reason=event.reason)) for guest in self.members]

    # -- what guests are sent -----------------------------------------------------------------------------

    def _pump(self, member: Member) -> list[Action]:
        actions = self.feeding.pump(member)
        if member.sending_since is None and member.feed.in_flight_bytes:
            member.sending_since = self._now
        return [*actions, *self.guard.ask(member), *self.ahead.pump(member)]

    def _piece_coded(self, event: inputs.PieceCoded, now: float) -> list[Action]:
        self.feeding.pieces[event.index] = event.piece
        actions = [action for member in self.members.values() for action in self._pump(member)]
        return [*actions, Wake()]

    def _part_read(self, event: inputs.PartRead, now: float) -> list[Action]:
        member = self.members.get(event.guest)
        return [] if member is None else [*self.feeding.read(member, event), *self._pump(member)]

    def _fixed_hashed(self, event: inputs.FixedHashed, now: float) -> list[Action]:
        """Queue the fixed tensors that the newcomer lacks, then the replica."""
        member = self.members.get(event.guest)
        if member is None or member.fixed_digests is None:
            return []  # it is gone, or came back and is not ready yet
        member.feed.tensors.extend(lacking(event.tensors, member.fixed_digests))
        member.feed.open, member.fixed_digests = True, None
        # Between two steps the user's code may have other weights in the model (an evaluation): then the next step
        # codes them.
        code: list[Action] = [CodeChange(codec=self.codecs.change)] if self._weights_stay else []
        return [*code, *self._pump(member)]

    def _samples_packed(self, event: inputs.SamplesPacked, now: float) -> list[Action]:
        member = self.members.get(event.guest)
        if member is None:
            return []
        nbytes = sum(len(frame) for frame in event.frames)
        if member.lease is not None and member.lease.id == event.lease:
            member.lease.unread -= 1
            member.ahead.measured(nbytes, member.lease.sizes[event.batch])
        member.feed.extra(nbytes)
        samples = SamplesMessage(lease=event.lease, batch=event.batch, tree=event.tree)
        return [Send(guest=member.id, message=samples, frames=event.frames), *self.ahead.pump(member)]

    def _samples_not_packed(self, event: inputs.SamplesNotPacked, now: float) -> list[Action]:
        """The guest cannot help with such batches. The training continues."""
        member = self.members.get(event.guest)
        if member is None:
            return []
        return self._put_out(member, f"the samples cannot be sent: {event.why}", refused=True, hint=SENDABLE)

    # -- checks ---------------------------------------------------------------------------------------------

    def _sketch(self, member: Member, answer: SketchMessage, sketch: Any) -> list[Action]:
        actions = self.checks.answered(member, answer, sketch)
        member.computes(answer.micro_batch, answer.largest_micro_batch)
        member.bf16 = answer.bf16
        # First guesses, until leases and changes measure it. A guest that is checked again has been measured.
        if answer.count > 0 and answer.compute_s > 0 and not member.joined:
            member.rate.add(answer.count / answer.compute_s)
        if member.sync_bytes and not member.joined:
            member.transfer.add(self.codecs.part * self._change_bytes * member.sync_s / member.sync_bytes)
        return actions

    # -- time -------------------------------------------------------------------------------------------

    def _tick(self, event: inputs.Tick, now: float) -> list[Action]:
        """Send heartbeats. Remove guests that were silent for too long, and take their leases back."""
        actions: list[Action] = []
        if now - self._last_alive >= self.terms.heartbeat_s:
            self._last_alive = now
            actions += [Send(guest=g, message=AliveMessage()) for g in self.members]
        for member in list(self.members.values()):
            limit = self.terms.joining_silence_s if member.state == JOINING else self.terms.silence_s
            if now - member.last_heard > limit and not self._decoding(member):
                actions += self._remove(member, "guest_lost", f"sent nothing for {now - member.last_heard:.1f} s")
            elif (overdue := member.overdue(now, self.terms.joining_s, self.terms.checking_s)) is not None:
                actions += self._put_out(member, overdue, refused=not member.joined)
        return actions

    def _not_reading(self, event: inputs.PeerNotReading, now: float) -> list[Action]:
        member = self.members.get(event.guest)
        if member is None:
            return []
        waiting_mb = event.waiting_bytes / 1e6
        return self._put_out(member, f"did not read what it was sent: {waiting_mb:.0f} MB waited for it")

    def _unreachable(self, event: inputs.PeerUnreachable, now: float) -> list[Action]:
        member = self.members.get(event.guest)
        return [] if member is None else self._remove(member, "guest_lost", "lost its connection")

    def _stood_still(self, event: inputs.StoodStill, now: float) -> list[Action]:
        """This host heard nobody for a while: do not blame guests for it."""
        seconds = event.seconds
        for member in self.members.values():
            member.last_heard = min(now, member.last_heard + seconds)
            member.joined_at += seconds
            if member.checking_since is not None:
                member.checking_since += seconds
        self.stepping.stood_still(seconds, now)
        text = f"this machine stood still for {seconds:.1f} s (asleep, or overloaded); no guest is blamed for that"
        return [Emit(event=RunNote(machine=self.terms.name, text=text))] if self.members else []

    # -- leaving ----------------------------------------------------------------------------------------

    def _put_out(self, member: Member, reason: str, *, refused: bool = False, hint: str = "") -> list[Action]:
        """End a guest's part in the run, and tell it why."""
        kind, reason = "guest_refused" if refused else "guest_lost", reason[:LONGEST_REASON]
        member.put_out = True
        refuse = RefuseMessage(reason=reason, hint=hint, joined=member.joined)
        return [Send(guest=member.id, message=refuse), *self._remove(member, kind, reason)]

    def _refuse(self, guest: str, name: str, address: str, reason: str) -> list[Action]:
        return [
            Send(guest=guest, message=RefuseMessage(reason=reason)),
            *self._newcomers.told(GuestRefused(machine=name, address=address, reason=reason)),
        ]

    def _remove(self, member: Member, kind: str, reason: str) -> list[Action]:
        if self._decoding(member):
            # Its contribution is being added to the sum. Wait for the end of that, or its samples would be lost.
            member.leaving = member.leaving or (kind, reason)
            return []
        lease = member.lease
        back = self.stepping.gone(member)
        self.ahead.forget(member)
        del self.members[member.id]
        event = gone(member, kind, reason, 1 + (lease.step if lease and back else self.ledger.step), back)
        return [
            *([Emit(event=event)] if member.joined else self._newcomers.told(event)),
            Forget(guest=member.id),
            Wake(),
        ]

    def _decoding(self, member: Member) -> bool:
        return member.lease is not None and member.lease.arrived

    def _free_name(self, wanted: str, besides: Member | None) -> str:
        taken = {m.name for m in self.members.values() if m is not besides} | {self.terms.name}
        name, number = wanted, 2
        while name in taken:
            name, number = f"{wanted}-{number}", number + 1
        return name

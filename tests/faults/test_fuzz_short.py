"""Fuzzing, in small: whatever a holder of the token sends, only WireError comes out; and a fault would be found."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from potluck.errors import WireError
from potluck.hub.members import Member
from potluck.hub.stepping import Stepping
from potluck.spec.messages import FromGuest, FromHost
from potluck.wire import tree
from potluck.wire.frames import Reader, Received
from support.fuzz import SHARES, Fuzz
from support.plain import unpacked

resource = pytest.importorskip("resource", reason="measures memory as POSIX does")
DECODED = 15_000
MOST_GROWTH_MB = 100


@pytest.mark.parametrize("seed", [1, 2])
def test_only_wire_errors_come_out_of_mutated_messages(seed: int) -> None:
    fuzz = Fuzz(seed)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(DECODED):
        fuzz.once()
    growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert growth // (1024 if sys.platform == "linux" else 1 << 20) < MOST_GROWTH_MB
    assert fuzz.slowest_s < 2.0
    assert sum(fuzz.counts.values()) == DECODED
    assert fuzz.steps > 20
    for name, *_ in SHARES:
        decoded = fuzz.counts[f"{name}: taken"] + fuzz.counts[f"{name}: refused"]
        assert decoded > DECODED // 100, f"hardly any {name}"
    for name in ("frames", "trees", "protocol", "payloads"):
        assert fuzz.counts[f"{name}: taken"] > 50, f"no mutated {name} comes through: the mutations are too coarse"


def unchecked(self: Reader[Any], raw: Sequence[bytes]) -> Received[Any]:
    """A message's fields as they come."""
    kinds = {kind.kind: kind for kind in (*get_args(FromGuest), *get_args(FromHost))}
    try:
        found = unpacked(raw)
        return Received(kinds[found.kind](**found.fields), found.frames)
    except (LookupError, TypeError, ValueError) as error:
        raise WireError("unreadable") from error


def trusting(self: Stepping, member: Member, **about: Any) -> None:
    assert member.lease is not None
    member.lease.arrived = True


FAULTS: dict[str, list[tuple[Any, str, Any]]] = {
    "sizes of any kind in a tree": [(tree, "_is_count", lambda value: True)],
    "tensors of any size": [(tree, "_MAX_ELEMENTS", 10**400)],
    "fields that are read without their checks": [(Reader, "read", unchecked)],
    "contributions that nobody checks": [(Stepping, "complete", trusting)],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    for patch in FAULTS[fault]:
        monkeypatch.setattr(*patch)
    fuzz = Fuzz(3)

    def many_times() -> None:
        for _ in range(4 * DECODED):
            fuzz.once()

    with pytest.raises(Exception) as caught:  # which one is the fault's affair
        many_times()
    assert not isinstance(caught.value, WireError)

"""Recorded inputs of the host's protocol: owns how an input and its actions become a line of JSON, and back.

    {"now": 12.5, "input": {"input": "PeerUnreachable", "guest": "a1…"}, "actions": [{"action": "Emit", …}, …]}

The first line holds the terms and the ledger that the protocol began with. Long payloads are recorded as their
length: the protocol never looks into them. Run as a program, it is `potluck` with a recorder:

    HUB_TAPE=record.jsonl python tests/support/replay.py host job.py
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, get_args

import msgspec

from potluck.balance.ledger import EpochSteps, Ledger
from potluck.hub import inputs
from potluck.hub.actions import Action
from potluck.hub.protocol import HostProtocol
from potluck.hub.terms import HostTerms
from potluck.spec.messages import FromGuest
from potluck.train.data import epoch_order

LONGEST_BYTES = 4096
"""Longer payloads are weights, gradients and samples."""
INPUTS: dict[str, type[inputs.Input]] = {kind.__name__: kind for kind in get_args(inputs.Input)}
MESSAGES = {kind.kind: kind for kind in get_args(FromGuest)}
BYTES = (bytes, bytearray, memoryview)


def _plain(value: Any) -> Any:
    """As JSON can hold it. What only the shell understands (a check's reference) becomes its type's name."""
    return msgspec.to_builtins(value, builtin_types=BYTES, enc_hook=lambda opaque: type(opaque).__name__)


def _bytes_to_json(value: bytes | bytearray | memoryview) -> dict[str, Any]:
    raw = bytes(value)
    return {"zeros": len(raw)} if len(raw) > LONGEST_BYTES else {"hex": raw.hex()}


def _bytes_from_json(found: dict[str, Any]) -> Any:
    if found.keys() == {"zeros"}:
        return bytes(found["zeros"])
    return bytes.fromhex(found["hex"]) if found.keys() == {"hex"} else found


def to_line(event: inputs.Input, now: float, actions: Iterable[Action]) -> str:
    plain = _plain(event)
    if isinstance(event, inputs.MessageArrived):
        plain["kind"] = event.message.kind
    record = {"now": now, "input": plain, "actions": [actions_to_json(action) for action in actions]}
    return json.dumps(record, default=_bytes_to_json)


def actions_to_json(action: Action) -> dict[str, Any]:
    plain = {"action": type(action).__name__, **_plain(action)}
    message = getattr(action, "message", None)
    if isinstance(message, msgspec.Struct):
        # With its defaults: msgspec leaves them out only where a text is the very object that the class has.
        plain |= {"kind": message.kind, "message": _plain(msgspec.structs.asdict(message))}  # type: ignore[attr-defined]
    return plain


def from_line(line: str) -> tuple[inputs.Input, float, Any]:
    """An input, its time, and the actions that it led to when it was recorded."""
    record = json.loads(line, object_hook=_bytes_from_json)
    plain = record["input"]
    kind = INPUTS[plain["input"]]
    if kind is inputs.MessageArrived:
        message = msgspec.convert(plain["message"], MESSAGES[plain["kind"]])
        frames, address = tuple(plain["frames"]), plain["address"]
        return (
            inputs.MessageArrived(guest=plain["guest"], message=message, frames=frames, address=address),
            record["now"],
            record["actions"],
        )
    return msgspec.convert(plain, kind), record["now"], record["actions"]


def _same_as_recorded(actions: Iterable[Action]) -> Any:
    text = json.dumps([actions_to_json(action) for action in actions], default=_bytes_to_json)
    return json.loads(text, object_hook=_bytes_from_json)


def record(protocol: HostProtocol, write: Callable[[str], None]) -> None:
    """From now on, write down what this protocol is told and what it asks for."""
    ledger, handle = protocol.ledger, protocol.handle
    source: Any = ledger.source  # the steps of a data set, with or without the loader around them
    begun = {"samples": source.samples, "global_batch": source.global_batch, "step": ledger.step}
    write(json.dumps({"terms": _plain(protocol.terms), "ledger": begun}))

    def recorded(event: inputs.Input, now: float) -> list[Action]:
        actions = handle(event, now)
        write(to_line(event, now, actions))
        return actions

    protocol.handle = recorded  # type: ignore[method-assign]


def replay(
    lines: Iterable[str], *, seed: int, between: Callable[[HostProtocol], None] = lambda p: None
) -> HostProtocol:
    """Tell a new protocol the same: it must ask for the same. `between` is called before every input."""
    first, *rest = lines
    begun = json.loads(first)
    source = EpochSteps(order=epoch_order(begun["ledger"]["samples"], seed), **begun["ledger"])
    ledger = Ledger(source, step=begun["ledger"]["step"])
    protocol = HostProtocol(msgspec.convert(begun["terms"], HostTerms), ledger)
    for number, line in enumerate(rest, 2):
        event, now, expected = from_line(line)
        between(protocol)
        found = _same_as_recorded(protocol.handle(event, now))
        assert found == expected, f"line {number}: {event!r:.300}\n  recorded {expected}\n  replayed {found}"
    return protocol


def _main() -> None:
    from potluck.cli import main

    file = Path(os.environ["HUB_TAPE"]).open("w", encoding="utf-8")  # noqa: SIM115
    begin = HostProtocol.__init__

    def recording(self: HostProtocol, *args: Any, **keywords: Any) -> None:
        begin(self, *args, **keywords)
        record(self, lambda line: print(line, file=file, flush=True))

    HostProtocol.__init__ = recording  # type: ignore[method-assign]
    main()


if __name__ == "__main__":
    _main()

"""Makes the hub of a host for its run: its terms, its coder, the welcome for guests, and the wait for them."""

from __future__ import annotations

from functools import partial

from potluck import codec as codecs
from potluck.balance.codecs import codec_bytes
from potluck.hub.host import HostHub, HubParts
from potluck.hub.host_coder import HostCoder
from potluck.hub.protocol import HostProtocol
from potluck.hub.recorder import Recorder
from potluck.hub.terms import HostTerms
from potluck.sinks import guarded
from potluck.spec.messages import WelcomeMessage
from potluck.train.context import RunContext
from potluck.train.parts import Parts
from potluck.train.telemetry import versions
from potluck.wire.frames import PROTOCOL


def open_hub(context: RunContext, parts: Parts) -> HostHub:
    """The started hub. If the run waits for guests, this returns when they are ready."""
    tensors, admission = parts.tensors, context.admission
    assert admission is not None
    up, pieces = codecs.get(codecs.names.first_of(context.config.codec)), tensors.layout.pieces
    auto = codecs.names.is_auto(context.config.codec)
    longest = codecs.get("thin") if auto else up
    varies = codecs.least_and_most_bytes(longest, 128)[0] < longest.nbytes(128)
    coder = HostCoder(
        tensors,
        down=context.down_codec,
        up=up.name,
        device=context.device,
        notify=admission.socket.wake,
        replica_on_host=_replica_on_host(context),
    )
    coder.version = parts.ledger.step
    terms = HostTerms(
        name=context.name,
        versions={**versions(), "protocol": str(PROTOCOL)},
        fingerprint=tensors.fingerprint,
        piece_bytes=tuple(codecs.least_and_most_bytes(longest, p.count)[1] for p in pieces),
        coded_bytes=round(codec_bytes(up.name) * tensors.layout.count) if varies else None,
        local_data=parts.options.data == "local",
        codec=context.config.codec,
        codec_down=context.down_codec,
        auto=codecs.names.downs_of(context.config.codec_down) if auto else None,
        guest_bound=context.config.guest_bound,
        check_replica_every=context.config.check_replica_every,
        least=parts.least,
        steps=parts.loader.total_steps(parts.options.steps),
    )
    folder = context.folder.path if context.folder is not None else None
    hub = HostHub(
        HubParts(
            socket=admission.socket,
            protocol=HostProtocol(terms, parts.ledger),
            coder=coder,
            tensors=tensors,
            welcome=partial(_welcome, context),
            fetch=parts.loader.fetch,
            fetch_ahead=parts.loader.fetch_ahead,
            emit=context.log.emit,
            early=admission.waiting.hand_over(),
            recorder=guarded(Recorder(context.name, folder, started=context.log.started), "the flight recorder"),
        )
    )
    hub.start()
    context.loop.members = hub.members
    if context.config.wait_for:
        try:
            config, stop = context.config, context.loop.stop_requested
            if not hub.wait_for_guests(config.wait_for, config.wait_s, stop):
                raise context.interruption
        except BaseException as error:
            hub.close("interrupted" if isinstance(error, KeyboardInterrupt) else "failed")
            raise
    return hub


def _welcome(context: RunContext, name: str) -> tuple[WelcomeMessage, tuple[bytes, ...]]:
    """The welcome for a guest of this name, and the files of the host's script."""
    admission = context.admission
    assert admission is not None and admission.source is not None
    welcome = WelcomeMessage(
        name=name,
        host=context.name,
        run=context.folder.id if context.folder else "",
        codec=codecs.names.first_of(context.config.codec),
        codec_down=context.down_codec,
        versions=versions(),
        source=admission.source,
    )
    return welcome, admission.files


def _replica_on_host(context: RunContext) -> bool:
    """Whether the replica is kept in host memory. Default: yes, if the device has its own memory."""
    if context.config.replica == "auto":
        return context.device.torch_device.type == "cuda"
    return context.config.replica == "host"

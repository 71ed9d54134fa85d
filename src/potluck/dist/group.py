"""The process group that torch calls: translates c10d's interface to collectives on flat tensors."""

# mypy: disable-error-code="override,assignment,attr-defined"
# torch declares these methods as overloads and calls them in one way each, and some attributes as read only. Its
# options it exports to Python alone.

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from potluck.device import staging
from potluck.dist import arguments, composed, profiled, reduction, splitting
from potluck.dist.arguments import header_of
from potluck.dist.compression import identity_of
from potluck.dist.counting import METRICS
from potluck.dist.formation import Formation, form
from potluck.dist.host_tensors import HostTensor, staged
from potluck.dist.record import Call, Header
from potluck.dist.untraced import untraced
from potluck.dist.work import PotluckWork
from potluck.errors import CollectiveError


def create(options: Any, backend_options: Any) -> PotluckGroup:
    """torch calls this for init_process_group("potluck") and for new_group()."""
    default = c10d._world.default_pg
    formation = form(
        options.store,
        options.group_rank,
        options.group_size,
        timeout_s=options.timeout.total_seconds(),
        config=backend_options,
        within=default._formation.number if isinstance(default, PotluckGroup) else None,
    )
    own_s = formation.settings.timeout_s
    timeout = options.timeout if own_s is None else timedelta(seconds=own_s)
    origin = splitting.Origin(options.store, backend_options)
    return PotluckGroup(formation, timeout, list(options.global_ranks_in_group), origin)


@untraced
class PotluckGroup(dist.ProcessGroup):
    """A group of ranks on any devices and machines. Collectives of one group run in the order of the calls."""

    def __init__(
        self, formation: Formation, timeout: timedelta, global_ranks: list[int], origin: splitting.Origin
    ) -> None:
        super().__init__(formation.rank, formation.world)  # type: ignore[call-arg]
        self._formation = formation
        self._collectives = formation.collectives
        self.origin = origin
        self._timeout = timeout
        self.global_ranks = global_ranks or list(range(formation.world))
        self._group_name = self._group_desc = ""

    # -- what torch asks about a group ----------------------------------------------------------------------

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

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

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    @property
    def options(self) -> Any:
        return self.origin.config

    def get_group_store(self) -> Any:
        return self.origin.store

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    _set_default_timeout = set_timeout

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers begin at the rendezvous."""

    def _get_sequence_number_for_group(self) -> int:
        return self._formation.sequence

    # -- parts and end --------------------------------------------------------------------------------------

    def perform_nocolor_split(self, device: Any) -> None:
        """torch calls this on ranks outside a new group."""

    def split_group(
        self,
        new_ranks: list[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> PotluckGroup | None:
        """A group of some of this group's ranks. Every rank of this group must call it together.

        Args:
            new_ranks: rank numbers in this group; other ranks get None.
            opts: a potluck.dist.Config; None: this group's.
            device_types: ignored: every group takes all.
        """
        group: PotluckGroup | None = splitting.split(
            self, new_ranks, timeout or self._timeout, opts, group_name, group_desc
        )
        return group

    splitGroup = split_group

    def abort(self) -> None:
        """End all running collectives, here and on the other ranks. Waiting callers get an error."""
        self._formation.abort(f"rank {self.rank()} aborted the group")

    def shutdown(self) -> None:
        self._formation.close()

    # -- running a collective -------------------------------------------------------------------------------

    def _run(
        self,
        header: Header,
        tensors: Iterable[Tensor],
        opts: Any,
        body: Callable[[Call], None],
        result: Any = None,
    ) -> PotluckWork:
        """Number a collective and queue it.

        `header`: what must be the same on all ranks. `tensors`: all tensors read or written, to wait for their
        devices. `body`: the collective itself, which the engine runs.
        """
        formation = self._formation
        formation.peers.check()
        arguments.check_rank(header.op, header.root, self.size())
        tensors = list(tensors)
        # The caller's device may still be computing what is to be sent.
        moments = [staging.moment(device) for device in {t.device for t in tensors if not t.is_cpu}]
        timeout_s = self._timeout_s(opts)
        seq = formation.next_sequence()
        ranges = profiled.begin(header.op, tensors)
        work = PotluckWork(f"{header.op} #{seq}", tensors if result is None else result, ranges)
        formation.record.add(seq, header)
        asked = time.perf_counter()

        def job() -> None:
            began = time.monotonic()
            formation.record.start(seq)
            try:
                with METRICS.op(header.op, header.nbytes) as measured:
                    for moment in moments:
                        if moment is not None:
                            moment()
                    measured.queued(time.perf_counter() - asked)
                    if ranges is not None:
                        ranges.turn()
                    now = time.monotonic()
                    try:
                        body(Call(header, seq, now, now + timeout_s))
                    finally:
                        if ranges is not None:
                            ranges.leave()
            except BaseException as raised:
                error = arguments.with_context(work.name, header, raised)
                formation.record.end(seq, time.monotonic() - began, failed=True)
                formation.failed(work.name, error)
                if error is raised:
                    raise
                raise error from None
            formation.record.end(seq, time.monotonic() - began)

        formation.engine.submit(job, work, at_once=not getattr(opts, "asyncOp", True))
        return work

    def _timeout_s(self, opts: Any) -> float:
        given = getattr(opts, "timeout", None)
        timeout = given if given is not None and given > timedelta(0) else self._timeout
        return float(timeout.total_seconds())

    # -- reductions -----------------------------------------------------------------------------------------

    def allreduce(self, tensors: Any, opts: Any = None, timeout: timedelta | None = None) -> PotluckWork:
        tensors = arguments.as_list(tensors)
        opts = arguments.options(c10d.AllreduceOptions, opts, timeout)
        if len(tensors) == 1 and tensors[0].is_sparse:
            return self._allreduce_sparse(tensors[0], opts)
        return self._allreduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> PotluckWork:
        return self._allreduce(
            "all_reduce_coalesced", tensors, arguments.options(c10d.AllreduceCoalescedOptions, opts)
        )

    def _allreduce(self, name: str, tensors: list[Tensor], opts: Any) -> PotluckWork:
        op = reduction.plain(opts.reduceOp)
        for tensor in tensors:
            arguments.dense(name, tensor)
            reduction.check(op, tensor.dtype)

        # Of the caller's tensor, which is the same in the next step; its copy in host memory is not.
        identity: object = None
        if self._formation.settings.compression != "none":
            identity = identity_of(tensors[0], None if len(tensors) == 1 else f"{name} {len(tensors)}")

        def body(call: Call) -> None:
            hosts = [HostTensor(tensor, read=True) for tensor in tensors]
            for flat, scattered in arguments.bundles(hosts):
                self._collectives.all_reduce(call, flat, op, identity)
                arguments.unbundle(flat, scattered)
            for host in hosts:
                host.copy_back()

        return self._run(header_of(name, tensors, op=op), tensors, opts, body)

    def _allreduce_sparse(self, tensor: Tensor, opts: Any) -> PotluckWork:
        if reduction.name_of(opts.reduceOp) != "SUM":
            raise CollectiveError(
                "sparse tensors can only be added up (SUM)", hint="use to_dense() for other operations"
            )

        def body(call: Call) -> None:
            composed.sparse_all_reduce(self._collectives, call, self.size(), tensor)

        return self._run(header_of("all_reduce_sparse", [tensor], op=opts.reduceOp), [tensor], opts, body)

    def reduce(
        self,
        tensors: Any,
        opts: Any = None,
        op: Any = None,
        timeout: timedelta | None = None,
        root: int | None = None,
    ) -> PotluckWork:
        tensors = arguments.as_list(tensors)
        opts = arguments.options(c10d.ReduceOptions, opts, timeout)
        (tensor,), op = tensors, reduction.plain(opts.reduceOp if op is None else op)
        root = opts.rootRank if root is None else root
        arguments.dense("reduce", tensor)
        reduction.check(op, tensor.dtype)

        def body(call: Call) -> None:
            host = HostTensor(tensor, read=True)
            self._collectives.reduce(call, host.flat, op, root)
            if self.rank() == root:
                host.copy_back()

        return self._run(header_of("reduce", tensors, op=op, root=root), tensors, opts, body)

    def reduce_scatter(self, output: Any, inputs: Any, opts: Any = None) -> PotluckWork:
        opts = arguments.options(c10d.ReduceScatterOptions, opts)
        outputs, inputs = arguments.as_list(output), arguments.as_lists(inputs)
        if len({part.numel() for part in inputs[0]}) > 1:
            return self._reduce_scatter_uneven(outputs[0], inputs[0], opts)
        return self._reduce_scatter("reduce_scatter", outputs, inputs, opts)

    def _reduce_scatter_uneven(self, output: Tensor, parts: list[Tensor], opts: Any) -> PotluckWork:
        name, op = "reduce_scatter", reduction.plain(opts.reduceOp)
        arguments.one_each(name, parts, self.size())
        arguments.alike(name, [output, parts[self.rank()]])
        reduction.check(op, output.dtype)

        def body(call: Call) -> None:
            with staged([output], parts) as ((flat,), flats):
                composed.uneven_reduce_scatter(self._collectives, call, self.rank(), flat, flats, op)

        return self._run(header_of(name, parts, op=op), [output, *parts], opts, body, [output])

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PotluckWork:
        opts = arguments.options(c10d.ReduceScatterOptions, opts)
        parts = arguments.cut("reduce_scatter_tensor", input, output, self.size())
        return self._reduce_scatter("reduce_scatter_tensor", [output], [parts], opts)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PotluckWork:
        name = "reduce_scatter_tensor_coalesced"
        parts = [
            arguments.cut(name, whole, output, self.size()) for output, whole in zip(outputs, inputs, strict=True)
        ]
        return self._reduce_scatter(name, outputs, parts, arguments.options(c10d.ReduceScatterOptions, opts))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _reduce_scatter(
        self, name: str, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any
    ) -> PotluckWork:
        op = reduction.plain(opts.reduceOp)
        for output, parts in zip(outputs, inputs, strict=True):
            arguments.one_each(name, parts, self.size())
            arguments.alike(name, [output, *parts])
            reduction.check(op, output.dtype)

        def body(call: Call) -> None:
            for output, parts in zip(outputs, inputs, strict=True):
                with staged([output], parts) as ((flat,), flats):
                    self._collectives.reduce_scatter(call, flat, flats, op)

        used = [*outputs, *(part for parts in inputs for part in parts)]
        return self._run(header_of(name, outputs, op=op), used, opts, body, outputs)

    # -- gathering ------------------------------------------------------------------------------------------

    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> PotluckWork:
        opts = arguments.options(c10d.AllgatherOptions, opts, timeout)
        return self._allgather("all_gather", arguments.as_lists(outputs), arguments.as_list(inputs), opts)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> PotluckWork:
        opts = arguments.options(c10d.AllgatherOptions, opts)
        parts = arguments.cut("all_gather_into_tensor", output, input, self.size())
        return self._allgather("all_gather_into_tensor", [parts], [input], opts, [output])

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> PotluckWork:
        name = "all_gather_into_tensor_coalesced"
        parts = [
            arguments.cut(name, output, mine, self.size()) for output, mine in zip(outputs, inputs, strict=True)
        ]
        return self._allgather(name, parts, inputs, arguments.options(c10d.AllgatherOptions, opts), outputs)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def allgather_coalesced(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> PotluckWork:
        # One list for each rank here, not for each tensor.
        by_tensor = [[ranks[place] for ranks in outputs] for place in range(len(inputs))]
        opts = arguments.options(c10d.AllgatherOptions, opts)
        result = [part for parts in outputs for part in parts]
        return self._allgather("all_gather_coalesced", by_tensor, inputs, opts, result)

    def _allgather(
        self, name: str, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any, result: Any = None
    ) -> PotluckWork:
        for mine, parts in zip(inputs, outputs, strict=True):
            arguments.one_each(name, parts, self.size())
            arguments.alike(name, [mine, *parts])

        def body(call: Call) -> None:
            for mine, parts in zip(inputs, outputs, strict=True):
                with staged(parts, [mine]) as (flats, (flat,)):
                    self._collectives.all_gather(call, flats, flat)

        parts = [part for parts in outputs for part in parts]
        return self._run(
            header_of(name, inputs), [*inputs, *parts], opts, body, parts if result is None else result
        )

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> PotluckWork:
        opts = arguments.options(c10d.GatherOptions, opts)
        (mine,), root = arguments.as_list(inputs), opts.rootRank
        parts = list(outputs[0]) if outputs and self.rank() == root else []
        if self.rank() == root:
            arguments.one_each("gather", parts, self.size())
            arguments.alike("gather", [mine, *parts])

        def body(call: Call) -> None:
            with staged(parts, [mine]) as (flats, (flat,)):
                self._collectives.gather(call, flats, flat, root)

        return self._run(header_of("gather", [mine], root=root), [mine, *parts], opts, body, parts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> PotluckWork:
        opts = arguments.options(c10d.ScatterOptions, opts)
        (output,), root = arguments.as_list(outputs), opts.rootRank
        parts = list(inputs[0]) if inputs and self.rank() == root else []
        if self.rank() == root:
            arguments.one_each("scatter", parts, self.size())
            arguments.alike("scatter", [output, *parts])

        def body(call: Call) -> None:
            with staged([output], parts) as ((flat,), flats):
                self._collectives.scatter(call, flat, flats, root)

        return self._run(header_of("scatter", [output], root=root), [output, *parts], opts, body, [output])

    # -- from one to all, and from all to all ---------------------------------------------------------------

    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, root: int | None = None
    ) -> PotluckWork:
        tensors = arguments.as_list(tensors)
        opts = arguments.options(c10d.BroadcastOptions, opts, timeout)
        root = opts.rootRank if root is None else root
        for tensor in tensors:
            arguments.dense("broadcast", tensor)

        def body(call: Call) -> None:
            for tensor in tensors:
                host = HostTensor(tensor, read=self.rank() == root)
                self._collectives.broadcast(call, host.flat, root)
                if self.rank() != root:
                    host.copy_back()

        return self._run(header_of("broadcast", tensors, root=root), tensors, opts, body)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> PotluckWork:
        arguments.one_each("all_to_all", outputs, self.size())
        arguments.one_each("all_to_all", inputs, self.size())
        opts = arguments.options(c10d.AllToAllOptions, opts)

        def body(call: Call) -> None:
            with staged(outputs, inputs) as (received, sent):
                self._collectives.all_to_all(call, received, sent)

        return self._run(header_of("all_to_all", inputs, sized=False), [*outputs, *inputs], opts, body, outputs)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: list[int] | None,
        input_splits: list[int] | None,
        opts: Any = None,
    ) -> PotluckWork:
        counts = arguments.split_counts("all_to_all_single", input, input_splits, self.size())
        wanted = arguments.split_counts("all_to_all_single", output, output_splits, self.size())
        opts = arguments.options(c10d.AllToAllOptions, opts)

        def body(call: Call) -> None:
            with staged([output], [input]) as ((received,), (sent,)):
                self._collectives.all_to_all(call, received.split(wanted), sent.split(counts))

        return self._run(
            header_of("all_to_all_single", [input], sized=False), [output, input], opts, body, [output]
        )

    alltoall_base = all_to_all_single

    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> PotluckWork:
        opts = arguments.options(c10d.BarrierOptions, opts, timeout)
        return self._run(header_of("barrier", []), [], opts, self._collectives.barrier)

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """A barrier that, on rank 0, names the first missing rank, or all of them."""
        opts = arguments.options(c10d.BarrierOptions, None, timeout)
        opts.asyncOp = False

        def body(call: Call) -> None:
            self._formation.network.monitored_barrier(call, wait_all_ranks)

        self._run(header_of("monitored_barrier", []), [], opts, body).wait()

    # -- messages -------------------------------------------------------------------------------------------

    def send(self, tensors: Any, to: int, tag: int = 0) -> PotluckWork:
        (tensor,) = arguments.as_list(tensors)
        arguments.dense("send", tensor)
        work = PotluckWork(f"send to rank {to}", [tensor], profiled.begin("send", [tensor], parts=()))
        moment = staging.moment(tensor.device)
        if moment is not None:
            moment()
        self._formation.point_to_point.send(tensor, to, tag)
        work.complete()
        return work

    def recv(self, tensors: Any, source: int, tag: int = 0) -> PotluckWork:
        return self._receive(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> PotluckWork:
        return self._receive(tensors, None, tag)

    def _receive(self, tensors: Any, source: int | None, tag: int) -> PotluckWork:
        (tensor,) = arguments.as_list(tensors)
        arguments.dense("recv", tensor)
        self._formation.peers.check()
        name = "recv from " + ("any rank" if source is None else f"rank {source}")
        work = PotluckWork(name, [tensor], profiled.begin("recv", [tensor], parts=()))
        self._formation.point_to_point.post(work, tensor, source, tag, self._timeout.total_seconds())
        return work

"""How long collectives take: closed forms of the α–β model, in seconds.

PURE.

S bytes on N ranks, each of whose links carries `bytes_per_s` (1/β) in each direction at once, with a latency of α
seconds. In a ring every rank sends to the next and receives from the one before, all at the same time, so the
slowest link sets the pace:

    reduce-scatter   (N−1)·(α + S/(N·bw))
    all-gather       (N−1)·(α + S/(N·bw))
    all-reduce     2·(N−1)·(α + S/(N·bw)) = 2(N−1)/N · S/bw + 2(N−1)·α

    two-level all-reduce over M nodes of g devices: reduce-scatter inside + all-reduce between + all-gather inside
                   (g−1)·(α' + S/(g·bw')) + 2·(M−1)·(α + S/(M·bw)) + (g−1)·(α' + S/(g·bw'))

bw' and α' are those inside a node, bw is the rate of a node's own link, over which its g devices exchange a g-th of
S each. Nothing of the three parts overlaps here; a library that overlaps them is faster.

One rank, or nothing to send, takes no time. A link without a limit has `bytes_per_s = inf`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from potluck.errors import ConfigError


def reduce_scatter_s(size_bytes: float, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """(N−1)·(α + S/(N·bw)): each rank ends up with the sum of one N-th."""
    _check(size_bytes, ranks, bytes_per_s, latency_s)
    if ranks == 1 or not size_bytes:
        return 0.0
    return (ranks - 1) * (latency_s + size_bytes / ranks / bytes_per_s)


def all_gather_s(size_bytes: float, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """(N−1)·(α + S/(N·bw)), where S is the size of the result: the same time as reduce-scatter."""
    return reduce_scatter_s(size_bytes, ranks, bytes_per_s, latency_s)


def ring_all_reduce_s(size_bytes: float, ranks: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """2(N−1)/N · S/bw + 2(N−1)·α: a reduce-scatter, then an all-gather."""
    scatter_s = reduce_scatter_s(size_bytes, ranks, bytes_per_s, latency_s)
    return scatter_s + all_gather_s(size_bytes, ranks, bytes_per_s, latency_s)


def two_level_all_reduce_s(
    size_bytes: float,
    nodes: Sequence[tuple[int, float, float]],
    bytes_per_s: float,
    latency_s: float = 0.0,
) -> float:
    """A ring inside each node and one between the nodes; `nodes`: devices, bytes/s and latency inside of each.

    The slowest node sets the time of the parts inside. With one device a node it is the plain ring; with one node
    nothing goes between.
    """
    inside_s = max((reduce_scatter_s(size_bytes, *node) for node in nodes), default=0.0)
    between_s = ring_all_reduce_s(size_bytes, max(1, len(nodes)), bytes_per_s, latency_s)
    return 2 * inside_s + between_s


def shared_nic_bytes_per_s(own: float, shared: float, users: int) -> float:
    """min(own, shared/k): the rate of each of k peers that use one machine's link at the same time."""
    if users < 1:
        raise ConfigError(f"a link is shared by {users} machines", hint="it must be at least 1")
    return min(own, shared / users)


def slowest_link(bytes_per_s: Iterable[float]) -> float:
    """The rate of a ring over these links."""
    return min(bytes_per_s, default=math.inf)


def overlapped_end_s(
    ends_s: Sequence[float], backwards_s: Sequence[float], exchange_s: float, pieces: int
) -> float:
    """The time at which all ranks have exchanged the gradients, if sending overlaps the backward.

    Rank i's last backward ends at e_i and takes b_i; it makes k pieces of the gradient, one after the other, and a
    piece is exchanged (C/k seconds) when all ranks have it:

        max( max e_i + C/k ,  max (e_i − b_i·(1 − 1/k)) + C )

    the last piece after the last end, or all pieces beginning when the first is ready, whichever is later. With one
    piece nothing overlaps: max e_i + C.
    """
    if pieces < 1:
        raise ConfigError(f"gradients in {pieces} pieces", hint="it must be at least 1")
    last_s = max(ends_s, default=0.0)
    first_s = max((e - b * (1 - 1 / pieces) for e, b in zip(ends_s, backwards_s, strict=True)), default=0.0)
    return max(last_s + exchange_s / pieces, first_s + exchange_s)


def _check(size_bytes: float, ranks: int, bytes_per_s: float, latency_s: float) -> None:
    if ranks < 1:
        raise ConfigError(f"a collective of {ranks} ranks", hint="it must be at least 1")
    if not (size_bytes >= 0 and latency_s >= 0 and math.isfinite(size_bytes) and math.isfinite(latency_s)):
        raise ConfigError(
            f"a collective of {size_bytes:g} bytes and a latency of {latency_s:g} s", hint="both must be 0 or more"
        )
    if not bytes_per_s > 0:
        raise ConfigError(f"a link of {bytes_per_s:g} bytes/s", hint="it must be above 0")

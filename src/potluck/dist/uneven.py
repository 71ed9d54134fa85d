"""A reduce-scatter whose parts differ in size: owns how it is made of reductions to one rank.

It must not know how bytes travel.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from potluck.dist.lane import Call
from potluck.dist.paths import CollectivePath
from potluck.dist.reduction import Op


def reduce_scatter(
    path: CollectivePath, call: Call, rank: int, output: Tensor, inputs: Sequence[Tensor], op: Op
) -> None:
    """Each part to its owner, one after the other: as many bytes as with equal ones, in more steps."""
    for owner, part in enumerate(inputs):
        values = part.clone()
        path.reduce(call, values, op, owner)
        if owner == rank:
            output.copy_(values)

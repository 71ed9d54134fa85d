"""Result rows of `potluck bench ddp`, their file, and which rows may be in one table. PURE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from potluck import checked
from potluck.bounds import Above0, Natural, Positive, Text
from potluck.errors import UserError

AtLeast0 = Annotated[float, Meta(ge=0, lt=1e300)]
AGAIN = "write the file with `potluck bench ddp --global-batch 16 --json FILE`"


class DdpRow(Struct, frozen=True, kw_only=True):
    """One number of processes on one backend; the same on every rank."""

    backend: Text
    """none for one process."""
    world: Positive
    machines: Positive
    """Number of machines that the ranks are on."""
    kind: Literal["cpu", "cuda", "mps"]
    gpus: Natural
    """GPUs that computed, on all machines; ranks may share one if requested."""
    device: Text
    """A description of the first rank's device."""
    where: Text
    """The connection between the ranks: memory or tcp; empty for one process."""
    depth: Positive
    sequence: Positive
    steps: Positive
    global_batch: Positive
    """Samples of a step, over all processes."""
    tokens_per_s: Above0
    step_s: Above0
    gradient_bytes: Positive
    all_reduce_s: AtLeast0 | None
    """Time to reduce as many bytes as there are gradients while nothing else runs."""
    computed_s: AtLeast0 | None
    """2(N-1)/N times the gradients' bytes, over the link's measured rate; None where that rate is not known."""
    exposed_s: AtLeast0 | None
    """Time of a step minus that of a step without any exchange: the part that is not hidden behind backward."""
    loss: AtLeast0
    """Loss of the last step, averaged over the ranks."""

    @property
    def label(self) -> str:
        """A description of the row: 1 process, 4 processes, 2 machines, single GPU."""
        ranks = f"{self.world} processes"
        if self.machines > 1:
            each = "" if self.world == self.machines else f", {ranks}"
            return f"{self.machines} machines{' with GPUs' if self.kind == 'cuda' else ''}{each}"
        if self.gpus == 0:
            return "1 process" if self.world == 1 else ranks
        gpus = "single GPU" if self.gpus == 1 else f"{self.gpus} GPUs"
        return gpus if self.gpus == self.world else f"{gpus}, {ranks}"

    @property
    def task(self) -> str:
        """What was trained. Rows of one table have the same."""
        return trained([self])


def trained(rows: Sequence[DdpRow]) -> str:
    """What all rows trained. With --batch a step has as many samples in each process, so more in all of them."""
    row = rows[0]
    own = len({each.global_batch for each in rows}) > 1
    samples = f"{row.global_batch // row.world} samples a process and" if own else f"{row.global_batch} samples a"
    return f"depth {row.depth}, sequence {row.sequence}, {samples} step, {row.steps} steps"


def share(global_batch: int, world: int) -> int:
    """Samples of each of `world` processes in a step."""
    if global_batch % world:
        raise UserError(
            f"--global-batch {global_batch} cannot be divided among {world} processes",
            hint=f"for example --global-batch {-(-global_batch // world) * world}",
        )
    return global_batch // world


def from_json(text: str, where: str) -> tuple[DdpRow, ...]:
    """The rows of a file. `where` names it in errors."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not a JSON file: {error}", hint=AGAIN) from None
    if not isinstance(value, list) or not value:
        raise UserError(f"{where} has no rows: it must be a list of at least one", hint=AGAIN)
    rows = []
    for number, item in enumerate(value, 1):
        rows.append(checked.convert(item, DdpRow, where=f"{where}: row {number}", error=UserError, hint=AGAIN))
    return tuple(rows)


def merged(files: Sequence[tuple[str, Sequence[DdpRow]]]) -> list[DdpRow]:
    """The rows of several files as one table: processes, machines, then GPUs.

    Raises:
        UserError: a file whose rows trained something else than the first; its tokens/s could not be compared.
    """
    first: tuple[str, DdpRow] | None = None
    rows: list[DdpRow] = []
    for name, found in files:
        for row in found:
            first = first or (name, row)
            if row.task != first[1].task:
                other = f"{first[0]}: {first[1].label} trained {first[1].task}"
                raise UserError(
                    f"{name}: {row.label} trained {row.task}; {other}",
                    hint="measure all with the same --global-batch, --depth, --sequence and --steps",
                )
            rows.append(row)
    return sorted(rows, key=lambda row: (row.kind != "cpu", row.machines, row.world))

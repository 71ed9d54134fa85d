"""Numbers, text and collections with bounds: the kinds of fields that a file or another machine may fill.

Tighter bounds are set at the fields. These are for what has none: large enough for every honest value, small
enough that nothing can grow without end.
"""

from __future__ import annotations

import sys
from typing import Annotated, TypeVar

from msgspec import Meta

T = TypeVar("T")

LARGEST = 1 << 62
LONGEST = 1 << 20
"""Characters of a text, entries of a list or a map."""

Whole = Annotated[int, Meta(ge=-LARGEST, le=LARGEST)]
Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
Length = Annotated[int, Meta(ge=0, le=sys.maxsize)]
"""What `len()` may return. Scripts give endless data, and endless runs, a length of sys.maxsize."""
Seed = Annotated[int, Meta(ge=0)]
"""Of any size, as generators take it; msgspec knows no bound above 2^63."""
Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Amount = Annotated[float, Meta(ge=0.0, le=sys.float_info.max)]
Above0 = Annotated[float, Meta(gt=0, lt=1e300)]

Short = Annotated[str, Meta(max_length=200)]
Long = Annotated[str, Meta(max_length=4096)]
"""A path, or a few sentences."""
Text = Annotated[str, Meta(max_length=LONGEST)]

Many = Annotated[tuple[T, ...], Meta(max_length=LONGEST)]
Named = Annotated[dict[Text, T], Meta(max_length=LONGEST)]
"""A table by names."""

Scalar = bool | int | Finite | Long | None
"""What one setting may be; a whole number of any size, since a seed is one."""
Settings = Annotated[dict[Short, Scalar], Meta(max_length=256)]
"""The settings of a recipe, by name. The recipe's own Config checks which there are, and the value of each."""

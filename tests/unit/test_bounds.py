"""What another machine or a file may say has bounds, field by field: every type that something is decoded to."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from msgspec import Meta, inspect

import potluck
from potluck.bounds import LARGEST, LONGEST, Many, Named, Natural, Scalar, Settings, Text
from potluck.dist.rendezvous import RankInfo
from potluck.spec.manifest import Manifest
from potluck.spec.messages import FromGuest, FromHost, Source
from potluck.spec.probe_messages import FromListener, ToListener
from potluck.train import recipes
from potluck.train.checkpoint import CheckpointManifest
from potluck.train.host_ranks import RankReady

SOURCE = Path(potluck.__file__).parent
DECODES = {"decode": 1, "decoder": 0, "as_kind": 1, "convert": 1, "from_toml": 1, "build": 0}
"""Functions of `checked`, and which of their arguments is the type."""
BY_HAND: tuple[Any, ...] = (
    *(kind for union in (FromGuest, FromHost, ToListener, FromListener) for kind in get_args(union)),
    *(recipes.get(name).Config for name in recipes.NAMES),
    CheckpointManifest,
    RankInfo,
    RankReady,
    Manifest,
)
"""Types that are decoded where the code does not name them."""
VARIABLES = {"cls", "config.recipe", "kind", "kind.Config", "recipe.Config", "rule.type", "file"}
VARIABLES |= {"RunConfig", "self._recipe.Config", "self.recipe.Config", "tuple[str, type(message)]"}
"""Arguments that are no names of their modules: what they may be stands in BY_HAND, or is found elsewhere."""
WITHOUT = {
    "SamplesMessage.tree": "JSON of any form, in a header of 64 KiB at most: unpack_tree checks it",
    "AheadMessage.tree": "the same",
    "tuple[1]": "the fields of a message, which the decoder of its kind reads",
    "WeightsEntry.other": "what flatten() made of a state_dict: unflatten() checks it",
    "OptimizerEntry.state": "the same",
    "CheckpointManifest.objects": "the same",
    "StateEntry.values": "the same",
    "StateEntry.objects": "the same",
    "RngState.numpy": "numpy's own; numpy checks it",
    "SavedPlace.seed": "the user's, of any size",
    "Workload.seed": "the same",
    "WorkerSpec.seed": "the same",
    "Source.config": "one of them may be the seed; the recipe's own Config bounds the others",
    "RecipeEntry.config": "the same",
    "Environment.runs": "a path: the system bounds a variable",
    "Environment.trace": "the same",
    "WorkerSpec.out": "a path that the lab wrote",
    "WorkerSpec.weights": "the same",
}
"""Fields that have no bound, and why."""


def decoded() -> Iterator[tuple[str, Any]]:
    """Every type that a call names, with the module."""
    for path in sorted(SOURCE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        own = {
            name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "potluck.checked"
            for name in node.names
        }
        for call in ast.walk(tree):
            match call:
                case ast.Call(func=ast.Attribute(value=ast.Name(id="checked"), attr=name)) if name in DECODES:
                    pass
                case ast.Call(func=ast.Name(id=name)) if name in DECODES and name in own:
                    pass
                case _:
                    continue
            text = ast.unparse(call.args[DECODES[name]])
            module = ".".join(("potluck", *path.relative_to(SOURCE).with_suffix("").parts))
            if text not in VARIABLES and module != "potluck.checked":
                yield module, eval(text, vars(importlib.import_module(module)))


def unbounded(*kinds: Any) -> dict[str, str]:
    """Places without a bound, and what they lack. A kind is a type, or msgspec's description of one."""
    found: dict[str, str] = {}
    seen: set[type] = set()

    def look(info: Any, where: str, cut: bool = False) -> None:
        match info:
            case inspect.Metadata():
                look(info.type, where, cut="cut" in (info.extra or {}))
            case inspect.IntType() | inspect.FloatType():
                least = info.ge is not None or info.gt is not None
                most = info.le is not None or info.lt is not None
                if not (least and most):
                    found[where] = "a number without a least or a most"
            case inspect.StrType() | inspect.BytesType():
                if info.max_length is None and getattr(info, "pattern", None) is None and not cut:
                    found[where] = "a text of any length"
            case inspect.UnionType():
                for each in info.types:
                    look(each, where, cut)
                within = {type(each) for each in info.types}
                if inspect.TupleType in within and within & {inspect.IntType, inspect.FloatType, inspect.StrType}:
                    found[where] = "a union with a fixed tuple: msgspec 0.22 reads its size from another bound"
            case inspect.ListType() | inspect.VarTupleType() | inspect.SetType() | inspect.FrozenSetType():
                if info.max_length is None:
                    found[where] = "a list of any length"
                look(info.item_type, f"{where}[]")
            case inspect.TupleType():
                for number, each in enumerate(info.item_types):
                    look(each, f"{where}[{number}]")
            case inspect.DictType():
                if info.max_length is None:
                    found[where] = "a table of any length"
                look(info.key_type, f"{where}{{key}}")
                look(info.value_type, where)
            case inspect.StructType() | inspect.TypedDictType() | inspect.DataclassType():
                if info.cls not in seen:
                    seen.add(info.cls)
                    for field in info.fields:
                        look(field.type, f"{info.cls.__name__}.{field.name}")
            case inspect.AnyType() | inspect.RawType() | inspect.CustomType():
                found[where] = "anything"

    for kind in kinds:
        look(kind if isinstance(kind, inspect.Type) else inspect.type_info(kind), "tuple")
    return found


def test_whatever_is_decoded_has_bounds() -> None:
    kinds = [kind for _, kind in decoded()]
    assert len(kinds) > 40
    found = unbounded(*kinds, *BY_HAND)
    wrong = [f"{where}: {what}" for where, what in found.items() if where not in WITHOUT]
    assert not wrong, "\n".join(wrong)
    assert not WITHOUT.keys() - found.keys()


@pytest.mark.parametrize(
    "kind",
    [int, float, str, bytes, tuple[Natural, ...], dict[Text, Natural], Many[int], Named[float], Natural | str],
    ids=str,
)
def test_the_walk_finds_what_has_none(kind: Any) -> None:
    made = msgspec.defstruct("Made", [("field", kind)])
    assert "Made.field" in {where.rstrip("[]") for where in unbounded(made)}


def test_the_walk_finds_the_union_that_msgspec_misreads() -> None:
    """A decoder of one reads memory that is not its own, and may crash: none is made here."""
    pair, text = inspect.TupleType((inspect.BoolType(),)), inspect.StrType(max_length=3)
    assert "msgspec" in unbounded(inspect.UnionType((text, pair)))["tuple"]
    assert not unbounded(inspect.UnionType((pair, inspect.NoneType())))


@pytest.mark.parametrize(
    ("kind", "largest", "wrong"),
    [
        (Natural, LARGEST, LARGEST + 1),
        (Natural, 0, -1),
        (Text, "x" * LONGEST, "x" * (LONGEST + 1)),
        (Many[Natural], [1] * LONGEST, [1] * (LONGEST + 1)),
        (Settings, {str(n): n for n in range(256)}, {str(n): n for n in range(257)}),
    ],
    ids=["most", "least", "text", "list", "table"],
)
def test_what_is_within_the_bounds_is_taken_and_nothing_else(kind: Any, largest: Any, wrong: Any) -> None:
    msgspec.convert(largest, kind)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, kind)


@pytest.mark.parametrize("value", [True, 3, 2**64, -0.5, "text", None])
def test_a_setting_is_one_scalar(value: Any) -> None:
    source = Source(recipe="gpt", config={"name": value})
    assert msgspec.json.decode(msgspec.json.encode(source), type=Source) == source


@pytest.mark.parametrize("value", [[1], {"a": 1}, "x" * 5000], ids=["list", "table", "long"])
def test_anything_else_is_no_setting(value: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({"recipe": "gpt", "config": {"name": value}}), type=Source)


def test_the_settings_of_every_recipe_are_scalars() -> None:
    for name in recipes.NAMES:
        settings = msgspec.to_builtins(recipes.get(name).Config())
        assert msgspec.convert(settings, dict[str, Scalar]) == settings


def test_a_bound_of_its_own_may_be_closer() -> None:
    assert Meta(ge=0, le=LARGEST) in get_args(Natural)

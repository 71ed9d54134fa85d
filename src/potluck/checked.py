"""Turns TOML, JSON, flags and environment variables into typed data, and explains what is wrong with them.

The types hold the rules: `msgspec` structs, whose fields have bounds (`Annotated[int, Meta(ge=1)]`). An error names
the file, the line, the table and the key, and says which values the key takes, with their unit.
"""

from __future__ import annotations

import json
import os
import re
import threading
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, overload

import msgspec

from potluck.bounds import LARGEST, LONGEST
from potluck.errors import ConfigError, PotluckError, UserError

T = TypeVar("T")
Key = str | int

MOST_JSON_BYTES = 64 << 20
_MOST_SHOWN = 60
_AT = re.compile(r" - at (?:`key` in )?`\$([^`]*)`\Z")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|(\[\.\.\.\])")
_QUOTED = re.compile(r"Object (contains unknown|missing required) field `([^`]*)`")
_HEADER = re.compile(r"\s*(\[\[?)\s*([\w.\s-]+?)\s*\]")
_ASSIGNED = re.compile(r"\s*([\w-]+)\s*=")
_UNITS = {
    "_bytes_per_s": "bytes per second",
    "_mbit": "Mbit/s",
    "_bytes": "bytes",
    "_ms": "milliseconds",
    "_s": "seconds",
}


_decoders: dict[Any, msgspec.json.Decoder[Any]] = {}
_making = threading.RLock()


def _new_lock() -> None:
    """Replaces the lock in a forked child, which would otherwise wait forever if another thread held it."""
    global _making
    _making = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)

# -- in -------------------------------------------------------------------------------------------------


@overload
def decoder(kind: type[T]) -> msgspec.json.Decoder[T]: ...


@overload
def decoder(kind: Any) -> msgspec.json.Decoder[Any]: ...


def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, made by one thread, because msgspec 0.22 crashes if two use a class for the first
    time."""
    found = _decoders.get(kind)
    if found is None:
        with _making:
            found = _decoders.setdefault(kind, msgspec.json.Decoder(kind))
    return found


def decode(text: bytes | bytearray | memoryview | str, kind: type[T]) -> T:
    """The data in a JSON text. Raises msgspec's own errors."""
    return decoder(kind).decode(text)


def as_kind(value: Any, kind: type[T], *, strict: bool = True) -> T:
    """`value` as `kind`. Raises msgspec's own errors."""
    decoder(kind)
    return msgspec.convert(value, kind, strict=strict, dec_hook=_decoded)


def build(kind: type[T], values: Mapping[str, Any]) -> T:
    """A config from keys and values. Values may be text, as flags are, and keys may have dashes."""
    return convert(_underscored(values), kind, strict=False)


def from_toml(text: str, kind: type[T], where: str, *, example: str) -> T:
    """The data in a TOML text. `where` names the file; `example` is the hint if it is not TOML."""
    return convert(toml_table(text, where, example=example), kind, where=where, toml=text, strict=False)


def toml_table(text: str, where: str, *, example: str) -> dict[str, Any]:
    """The parsed TOML text, with underscores for dashes in keys."""
    try:
        table: dict[str, Any] = _underscored(tomllib.loads(text))
    except ValueError as error:  # tomllib's own, or a number of thousands of digits
        raise ConfigError(f"{where} is not a TOML file: {error}", hint=example) from error
    except RecursionError:
        raise ConfigError(f"{where} is nested too deeply", hint=example) from None
    return table


def read_text(path: Path, *, missing: str, example: str) -> str:
    """A user's file. `missing` is the hint if it cannot be read, `example` the hint if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror or error}", hint=missing) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a text file: {error}", hint=example) from error


def read_json(path: Path, *, what: str, hint: str) -> Any:
    """The content of a user's file that Potluck wrote, not yet checked. `what`: such as "a plan file"."""
    try:
        if path.stat().st_size > MOST_JSON_BYTES:
            raise UserError(f"{path} is too large to be {what}", hint=hint)
        return json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}", hint=hint) from error
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not {what}: it is not JSON", hint=hint) from None


def convert(
    value: Any,
    kind: type[T],
    *,
    where: str = "",
    toml: str | None = None,
    error: type[UserError] = ConfigError,
    hint: str = "",
    strict: bool = True,
) -> T:
    """`value` as `kind`, or an error that names the invalid place and says what it takes.

    `strict=False` takes numbers that are written as text. `toml` is the text that `value` was read from, for the
    line. `hint` follows each hint, for example how to make the file again.
    """
    try:
        found = as_kind(value, kind, strict=strict)
    except msgspec.ValidationError as invalid:
        wrong = _explained(invalid, value, kind)
    except RecursionError:
        wrong = _Wrong((), "it is nested too deeply", "")
    else:
        not_a_number = next(_nan(msgspec.to_builtins(found, enc_hook=str), ()), None)
        if not_a_number is None:
            return found
        wrong = _wrong_value(_Found(value, kind, not_a_number))
    file = where
    if toml is not None and (line := _line(toml, wrong.path)) is not None:
        file = f"{where}:{line}"
    what = f"{file}: {wrong.what}" if file else wrong.what
    failure = error(what, hint="; ".join(filter(None, (wrong.hint, hint))))
    failure.path = wrong.path
    raise failure from None


def _decoded(kind: type, value: Any) -> Any:
    """Decode a value of a type that msgspec does not know, such as a path."""
    if kind is Path and isinstance(value, str):
        return Path(value).expanduser()
    raise TypeError(f"{value!r} is not a {kind.__name__}")


# -- out ------------------------------------------------------------------------------------------------


def to_json(value: object, *, indent: int | None = 1) -> str:
    """JSON in ASCII, which every stream can write, with null for numbers that are not finite."""
    return json.dumps(json.loads(msgspec.json.encode(value, enc_hook=str)), indent=indent)


# -- nearest names --------------------------------------------------------------------------------------


def did_you_mean(word: str, known: Iterable[str], shown: Mapping[str, str] | None = None) -> str:
    """The beginning of a hint: "did you mean …? " with the most similar known word, or nothing.

    `shown` maps a word to its spelling in the hint.
    """
    import difflib  # slow to import, and needed only for mistakes

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {(shown or {}).get(close[0], close[0])}? " if close else ""


def nearest(word: str, words: Iterable[str]) -> str:
    """A hint that names the most similar valid word, and all of them."""
    known = sorted(words)
    return did_you_mean(word, known) + "valid: " + ", ".join(known)


# -- what is wrong, in words ----------------------------------------------------------------------------


class _Wrong(NamedTuple):
    path: tuple[Key, ...]
    what: str
    hint: str


class _Found:
    """The item at a path: its value, its type, the name of its key, and a description of the tables around it."""

    def __init__(self, value: Any, kind: type, path: tuple[Key, ...]) -> None:
        self.value, self.path, self.name = value, path, ""
        self.info: Any = msgspec.inspect.type_info(kind)
        self._places: list[str] = []
        for key in path:
            self._enter(key)

    def _enter(self, key: Key) -> None:
        info = _without_none(self.info)
        if isinstance(key, int):
            self.value = self.value[key]
            self.info = info.item_types[key] if hasattr(info, "item_types") else info.item_type
            named = self.value.get("name") if isinstance(self.value, Mapping) else None
            self._places[-1] += f" {named!r}" if isinstance(named, str) and named else f" number {key + 1}"
            return
        self.value = self.value.get(key) if isinstance(self.value, Mapping) else None
        self.info = next((f.type for f in getattr(info, "fields", ()) if f.encode_name == key), None)
        self.name = key
        self._places.append(key)

    @property
    def before(self) -> str:
        """The tables around the key."""
        return "".join(f"{place}: " for place in self._places[:-1])

    @property
    def within(self) -> str:
        """The tables around an item of this table."""
        return "".join(f"{place}: " for place in self._places)

    @property
    def label(self) -> str:
        return self._places[-1] if self._places else "it"


def _explained(invalid: msgspec.ValidationError, value: Any, kind: type) -> _Wrong:
    text = str(invalid)
    at = _AT.search(text)
    path: list[Key] = []
    for key, index, unknown in _STEP.findall(at[1] if at else ""):
        if unknown:
            break  # a value of a mapping: msgspec does not say which
        path.append(key or int(index))
    found = _Found(value, kind, tuple(path))
    if isinstance(invalid.__cause__, PotluckError):
        return _Wrong(found.path, found.within + invalid.__cause__.what, invalid.__cause__.hint)
    quoted = _QUOTED.match(text)
    if quoted is None:
        return _wrong_value(found)
    key, fields = quoted[2], {field.encode_name: field for field in _without_none(found.info).fields}
    if quoted[1] == "contains unknown":
        return _Wrong((*path, key), f"{found.within}there is no key {key!r}", nearest(key, fields))
    return _Wrong(found.path, f"{found.within}{key} is missing", _takes(key, fields[key].type, found.path))


def _wrong_value(found: _Found) -> _Wrong:
    shown = repr(found.value)
    shown = shown if len(shown) <= _MOST_SHOWN else shown[: _MOST_SHOWN - 1] + "…"
    hint, info = _takes(found.name, found.info, found.path), _without_none(found.info)
    if isinstance(found.value, int) and getattr(info, "le", None) == LARGEST < found.value:
        hint += ", at most 2^62"
    if isinstance(found.value, str) and isinstance(info, msgspec.inspect.LiteralType):
        hint = did_you_mean(found.value, map(str, info.values)) + hint
    return _Wrong(found.path, f"{found.before}{found.label} is {shown}", hint)


def _takes(name: str, info: Any, path: tuple[Key, ...]) -> str:
    """A description of the values that the key takes, from its type."""
    info = _without_none(info)
    tables = ".".join(str(key) for key in path if isinstance(key, str))
    match info:
        case msgspec.inspect.LiteralType():
            return f"{name} is one of {', '.join(map(str, info.values))}"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            kind = "a whole number" if isinstance(info, msgspec.inspect.IntType) else "a number"
            unit = next((f" ({unit})" for suffix, unit in _UNITS.items() if f"_{name}".endswith(suffix)), "")
            return f"{name} must be {kind}{_bounds(info)}{unit}"
        case msgspec.inspect.BoolType():
            return f"{name} must be true or false"
        case msgspec.inspect.StrType():
            length = f" of at most {info.max_length} characters" if (info.max_length or LONGEST) < LONGEST else ""
            return f"{name} must be text{length}"
        case msgspec.inspect.VarTupleType(item_type=msgspec.inspect.StructType()):
            return f"{name} is a list of tables: in TOML [[{tables}]] (two brackets) for each one"
        case msgspec.inspect.StructType() if path and isinstance(path[-1], str):
            return f"{name} is a table: in TOML [{tables}], and its keys below it"
        case msgspec.inspect.StructType():
            return f"each of {name} is a table" if name else "it must be a table"
        case msgspec.inspect.VarTupleType() | msgspec.inspect.TupleType() | msgspec.inspect.ListType():
            return f"{name} must be a list"
        case msgspec.inspect.DictType():
            return f"{name} must be a table"
    return ""


def _bounds(info: Any) -> str:
    most = None if info.le is None or info.le >= LARGEST else info.le
    if info.ge is not None and most is not None:
        return f" from {info.ge:g} to {most:g}"
    if info.ge is not None and info.ge <= -LARGEST:
        return ""
    if info.ge is not None:
        return f", {info.ge:g} or more"
    if info.gt is not None:
        return f" above {info.gt:g}" + (f" and below {info.lt:g}" if info.lt is not None else "")
    return ""


def _without_none(info: Any) -> Any:
    if isinstance(info, msgspec.inspect.UnionType):
        return next(kind for kind in info.types if not isinstance(kind, msgspec.inspect.NoneType))
    return info


def _nan(value: Any, path: tuple[Key, ...]) -> Iterator[tuple[Key, ...]]:
    """The paths of NaN values, which pass comparisons with bounds."""
    if isinstance(value, float) and value != value:
        yield path
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _nan(item, (*path, key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _nan(item, (*path, index))


def _underscored(value: Any) -> Any:
    """The same tables with underscores for dashes in keys."""
    if isinstance(value, Mapping):
        return {key.replace("-", "_"): _underscored(item) for key, item in value.items()}
    return [_underscored(item) for item in value] if isinstance(value, list) else value


def _line(text: str, path: tuple[Key, ...]) -> int | None:
    """The line of a TOML text for a path: that of the key, else of the table around it."""
    best, length = None, 0
    table: tuple[Key, ...] = ()
    counts: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        here = table
        if header := _HEADER.match(line):
            names = tuple(name.strip().replace("-", "_") for name in header[2].split("."))
            if header[1] == "[[":
                counts[names] = counts.get(names, -1) + 1
                counts = {key: count for key, count in counts.items() if key[: len(names)] != names or key == names}
            table = ()
            for depth in range(1, len(names) + 1):
                table += (names[depth - 1],)
                table += (counts[names[:depth]],) if names[:depth] in counts else ()
            here = table
        elif assigned := _ASSIGNED.match(line):
            here = (*table, assigned[1].replace("-", "_"))
        if len(here) > length and path[: len(here)] == here:
            best, length = number, len(here)
    return best

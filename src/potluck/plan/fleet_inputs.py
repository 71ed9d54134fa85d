"""A fleet from words ("desk=RTX 4070,link=1GbE") or from saved facts, measured or found. PURE."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from potluck import checked
from potluck.bounds import Many, Text
from potluck.checked import nearest
from potluck.errors import ConfigError, UserError
from potluck.plan import device_names, links, models
from potluck.plan.memory import USUAL_MICRO_BATCH, fitting
from potluck.plan.models import Model
from potluck.spec.config import MOST_MICRO_BATCH
from potluck.spec.facts import Cpu, Gpu, Interface
from potluck.spec.fleet import Fleet, FleetMachine
from potluck.spec.measured import Measured

DEFAULT_LINK = "1GbE"
UPDATE_BYTES = 40
"""Bytes per parameter of an update: AdamW reads and writes 28, encoding the change some 12 more."""
STATE_BYTES = 25
PCIE = "PCIe 4"
"""Assumed between the devices of one machine whose maker has no link of its own."""
_KEYS = ["link", "latency_ms", "micro_batch", "host", "intra", "watts"]
_AGAIN = "make it with: potluck probe --save FILE, or potluck doctor --save FILE"
_EXAMPLE = 'for example --machine "desk=RTX 4070" --machine "mac=M2,link=1GbE"'
_BYTES = re.compile(r"B(?:/s|ps)?$")
_SPEED = re.compile(r"^([0-9.]+(?:e-?[0-9]+)?)\s*(s/sample|[mgtp]flop/?s)$", re.IGNORECASE)
_SCALES = {"m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}


class Given(Struct, frozen=True, kw_only=True):
    """A fleet and the assumptions behind it."""

    fleet: Fleet
    assumptions: tuple[str, ...]


class SeenMachine(Struct, frozen=True, kw_only=True):
    """The doctor's facts about a machine that a plan needs."""

    name: Text
    cpu: Cpu = Cpu()
    gpus: Many[Gpu] = ()
    interfaces: Many[Interface] = ()
    default_address: Text | None = None

    @property
    def mbit(self) -> float | None:
        """The speed of the interface that carries the default address."""
        for interface in self.interfaces:
            if any(address.split("/")[0] == self.default_address for address in interface.addresses):
                return interface.speed_mbit or None
        return None


class FactsFile(Struct, frozen=True, kw_only=True):
    """The part of a file of `potluck probe --save` or `potluck doctor --save` that a plan reads."""

    measured: Many[Measured] = ()
    here: SeenMachine | None = None
    there: SeenMachine | None = None


class _Named(Struct, frozen=True, kw_only=True):
    machine: FleetMachine
    host: bool
    assumed: tuple[str, ...] = ()


def from_words(words: Sequence[str], model: Model, precision: str = "bf16") -> Given:
    """The fleet of several NAME=[COUNTx]DEVICE[,KEY=VALUE]…; the keys are `_KEYS`."""
    return _fleet([named for word in words for named in _from_word(word, model, precision)])


def _from_word(word: str, model: Model, precision: str) -> list[_Named]:
    """A machine, or every device of one that has several."""
    name, equals, rest = word.partition("=")
    name = name.strip()
    parts = [part.strip() for part in re.split(r",(?![^(]*\))", rest)]  # not in "MacBook Air (M2, 2022)"
    if not equals or not name or not parts[0]:
        raise ConfigError(f"a machine is NAME=DEVICE, not {word!r}", hint=_EXAMPLE)
    values: dict[str, str] = {}
    for part in parts[1:]:
        key, _, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if key not in _KEYS:
            raise ConfigError(f"machine {name!r}: there is no {key!r}", hint=nearest(key, _KEYS))
        values[key] = value.strip()
    count, device = device_names.counted(parts[0])
    machine, assumed = _machine(name, device, model, precision)
    if "link" in values:
        sheet = links.find(values["link"])
        machine = replace(
            machine, link_bytes_per_s=sheet.bytes_per_s, latency_s=sheet.latency_s / 2, link=sheet.name
        )
        assumed += (sheet.about(),) if sheet.part < 1 else ()
    if "latency_ms" in values:
        machine = replace(machine, latency_s=_number(name, "latency_ms", values, 0, 60_000) / 1000)
    if "micro_batch" in values:
        size = int(_number(name, "micro_batch", values, 1, 1e6))
        machine = replace(machine, micro_batch=size, largest_micro_batch=size, by_memory=False)
    if "watts" in values:
        machine = replace(machine, watts=_number(name, "watts", values, 0.1, 1e6) / count)
    if "intra" in values and count == 1:
        raise ConfigError(
            f"machine {name!r} has intra= but only one device", hint=f'write several as "{name}=8x{device}"'
        )
    if count == 1:
        return [_Named(machine=machine, host="host" in values, assumed=assumed)]
    sheet, said = _intra(machine, values.get("intra", ""), count)
    node = replace(
        machine,
        node=name,
        node_devices=count,
        intra=sheet.name,
        intra_bytes_per_s=sheet.bytes_per_s,
        intra_latency_s=sheet.latency_s,
    )
    assumed += (f"{name}: {said}{sheet.about()}" if said else sheet.about(),) if sheet.part < 1 else ()
    first = _Named(machine=replace(node, name=f"{name}/1"), host="host" in values, assumed=assumed)
    others = (_Named(machine=replace(node, name=f"{name}/{i}"), host=False) for i in range(2, count + 1))
    return [first, *others]


def _intra(machine: FleetMachine, word: str, count: int) -> tuple[links.LinkSheet, str]:
    """The link between the devices of a node, and why it is this one: as given ("NVLink", "xGMI": the device's
    version), or the maker's own.
    """
    known = device_names.find_or_none(machine.device)
    own = links.find(known.fabric if known is not None and known.fabric else PCIE)
    family = re.sub(r"[\s_-]", "", word.lower())
    is_nvlink = family in ("nvlink", "nvswitch") or (family == "nvlinkbridge" and own.joins > 0)
    is_own = is_nvlink or (family in ("xgmi", "infinityfabric") and own.name.startswith("xGMI"))
    if is_nvlink and not own.name.startswith("NVLink"):
        what = machine.device or machine.name
        raise ConfigError(
            f"the catalogue has no NVLink for {what}", hint=f"intra={own.name}, or a rate: intra=200Gbit"
        )
    if is_nvlink and own.joins and count > own.joins:
        return links.find(PCIE), f"{own.name} joins {own.joins} devices, not {count}, so "
    if not word and own.joins:  # a bridge is bought separately
        return links.find(PCIE), "no intra= given (NVLink, if there is a bridge), so "
    if not word or is_own:
        return own, "" if word else "no intra= given, so "
    given = links.find(word)
    if _BYTES.search(word) and math.isclose(given.line_mbit, 2 * own.line_mbit, rel_tol=0.02):
        return own, f"{word} counts both directions, so "
    return given, ""


def _number(name: str, key: str, values: Mapping[str, str], least: float, most: float) -> float:
    try:
        value = float(values[key])
    except ValueError:
        value = math.nan
    if not least <= value <= most:
        raise ConfigError(
            f"machine {name!r}: {key} cannot be {values[key]!r}", hint=f"choose {least:g} to {most:g}"
        )
    return value


def _machine(name: str, device: str, model: Model, precision: str) -> tuple[FleetMachine, tuple[str, ...]]:
    """A machine with a device of the catalogue or a given speed, and its assumptions."""
    speed = _SPEED.match(device)
    if speed is None:
        sheet = device_names.find(device)
        machine = of_flops(name, sheet.flops_per_s(precision), model, memory_bytes=sheet.memory_gb * 1e9)
        update_s = UPDATE_BYTES * model.parameters / (sheet.bandwidth_gb_per_s * 1e9)
        said = tuple(filter(None, (sheet.about(precision), device_names.caution(device))))
        return replace(machine, update_s=update_s, device=sheet.name, watts=sheet.watts), said
    try:
        value = float(speed[1])
    except ValueError:
        value = 0.0
    if not 1e-9 <= value <= 1e9:
        raise ConfigError(f"machine {name!r}: its speed is {device!r}", hint="for example 20TFLOPS or 0.6s/sample")
    unit = speed[2].lower()
    flops = value * _SCALES[unit[0]] if "flop" in unit else model.flops_per_sample / value
    return replace(of_flops(name, flops, model), device=device), ()


def of_flops(name: str, flops_per_s: float, model: Model, memory_bytes: float | None = None) -> FleetMachine:
    """A machine with this effective FLOP/s; its micro-batch is what fits into its memory."""
    most = MOST_MICRO_BATCH
    if memory_bytes is not None and model.activation_bytes_per_sample:
        state_bytes = STATE_BYTES * model.parameters
        most = fitting(memory_bytes, state_bytes, model.activation_bytes_per_sample, MOST_MICRO_BATCH)
    return FleetMachine(
        name=name,
        samples_per_s=flops_per_s / model.flops_per_sample,
        micro_batch=min(USUAL_MICRO_BATCH, most),
        largest_micro_batch=most,
        by_memory=memory_bytes is not None,
        memory_bytes=memory_bytes,
    )


# -- facts ----------------------------------------------------------------------------------------------


def from_facts(tables: Sequence[tuple[str, Any]], model: Model, precision: str = "bf16") -> Given:
    """The fleet in facts files (name, content): measured speeds, else those of the catalogue."""
    return _fleet(_found(tables, model, precision))


def from_both(
    tables: Sequence[tuple[str, Any]], words: Sequence[str], model: Model, precision: str = "bf16"
) -> Given:
    """A fleet of measured machines and of machines given by name. The host is a measured one.

    Both kinds of speed are effective FLOP/s while training; the assumed ones are listed as assumptions.
    """
    found = _found(tables, model, precision)
    named = [one for word in words for one in _from_word(word, model, precision)]
    if not any(one.host for one in (*found, *named)):
        host = max(found, key=lambda one: one.machine.samples_per_s)
        found = [replace(one, host=one is host) for one in found]
    names = " and ".join(one.machine.name for one in named if one.assumed)
    beside = f"{names} from the catalogue and others measured: do not rely on small differences" if names else ""
    given = _fleet([*found, *named])
    return replace(given, assumptions=(*given.assumptions, *filter(None, [beside])))


def _found(tables: Sequence[tuple[str, Any]], model: Model, precision: str) -> list[_Named]:
    """The machines of all files, each once, with different names."""
    found: list[_Named] = []
    paired: dict[str, bool] = {}
    for where, table in tables:
        facts = checked.convert(table, FactsFile, where=where, error=UserError, hint=_AGAIN)
        measured = {m.name: m for m in facts.measured}
        ours = [_from_measured(m, model, where) for m in measured.values()]
        seen = [side for side in (facts.here, facts.there) if side is not None and side.name not in measured]
        ours += [_from_found(side, model, precision, where) for side in seen]
        if not ours:
            raise UserError(f"{where} names no machine", hint=_AGAIN)
        pair = len(ours) > 1
        for named in ours:
            name = named.machine.name
            twin = next((one for one in found if one.machine.name == name), None)
            if twin is not None and _is_same(twin, named, pair or paired[name]):
                continue  # the first word about a machine counts
            if twin is not None:
                named = _renamed(named, {one.machine.name for one in found}, where)
            paired[named.machine.name] = pair
            found.append(named)
    return found


def _is_same(one: _Named, other: _Named, pair: bool) -> bool:
    """Whether two entries with one name are the same machine: a host that was measured with each of its guests is,
    two lone machines are not.

    No file has an id of the machine. In files about two machines, the same device and memory must suffice. Two
    files about one machine each are about two machines, unless they are the same file.
    """
    a, b = one.machine, other.machine
    return (a.device, a.memory_bytes) == (b.device, b.memory_bytes) if pair else a == b


def _renamed(named: _Named, taken: set[str], where: str) -> _Named:
    name = named.machine.name
    new = next(text for n in itertools.count(2) if (text := f"{name}-{n}") not in taken)
    words = f"{where}: a second machine is called {name}, so here it is {new} (`potluck probe --name` names it)"
    return replace(named, machine=replace(named.machine, name=new), assumed=(*named.assumed, words))


def _from_measured(measured: Measured, model: Model, where: str) -> _Named:
    flops = measured.flops_per_s
    if measured.samples_per_s is not None and measured.model:
        trained = models.find(measured.model, measured.sequence)
        flops = measured.samples_per_s * trained.flops_per_sample
    if flops is None:
        raise UserError(f"{where} does not say how fast {measured.name} is", hint="measure it with: potluck probe")
    machine = of_flops(measured.name, flops, model, measured.memory_bytes)
    size = measured.micro_batch
    return _Named(
        machine=replace(
            machine,
            link_bytes_per_s=measured.link_bytes_per_s,
            latency_s=measured.latency_s or 0.0,
            micro_batch=machine.micro_batch if size is None else size,
            largest_micro_batch=max(machine.largest_micro_batch, size or 1),
            by_memory=machine.by_memory and size is None,
            device=measured.device,
            watts=_watts_of(measured.device),
            link="measured" if measured.link_bytes_per_s is not None else "",
        ),
        host=measured.host,
    )


def _watts_of(device: str) -> float | None:
    sheet = device_names.find_or_none(device)
    return None if sheet is None else sheet.watts


def _from_found(side: SeenMachine, model: Model, precision: str, where: str) -> _Named:
    """A machine for which only the device's name and the interfaces' speeds are known."""
    cpu = side.cpu.name
    if "ghz" in cpu.lower():
        cpu += f" ({side.cpu.physical} cores)"
    words = [word for word in (*(gpu.name for gpu in side.gpus), cpu) if word]
    for word in words:
        try:
            machine, assumed = _machine(side.name, word, model, precision)
        except ConfigError:
            continue
        if side.mbit:
            sheet = replace(links.of_mbit(side.mbit), part=links.ETHERNET_PART)
            machine = replace(machine, link_bytes_per_s=sheet.bytes_per_s, link=sheet.name)
        return _Named(machine=machine, host=False, assumed=assumed)
    raise UserError(
        f"{where}: no device of {side.name} is in the catalogue ({', '.join(words) or 'none named'})",
        hint="measure it with: potluck probe; or name it: --machine",
    )


def _fleet(found: Sequence[_Named]) -> Given:
    """The host first: the one that says so, else the fastest. Guests without any link between get 1 GbE."""
    if not found:
        raise ConfigError("there is no machine to plan for", hint=_EXAMPLE)
    hosts = [named for named in found if named.host]
    if len(hosts) > 1:
        raise ConfigError(f"{len(hosts)} machines are marked as host", hint="mark one, or none for the fastest")
    host = hosts[0] if hosts else max(found, key=lambda named: named.machine.samples_per_s)
    assumed = [text for named in found for text in named.assumed]
    machines = [host.machine]
    sheet = links.find(DEFAULT_LINK)
    for named in found:
        if named is host:
            continue
        guest = named.machine
        if guest.is_beside(host.machine):
            machines.append(guest)
            continue
        if guest.link_bytes_per_s is None and host.machine.link_bytes_per_s is None:
            guest = replace(
                guest, link_bytes_per_s=sheet.bytes_per_s, latency_s=sheet.latency_s / 2, link=sheet.name
            )
            assumed.append(f"{guest.node or guest.name}: no link given, so {sheet.about()}")
        machines.append(guest)
    return Given(fleet=Fleet(machines=tuple(machines)), assumptions=tuple(dict.fromkeys(assumed)))

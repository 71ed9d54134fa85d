"""The results of a probe as lines for a terminal or a pipe. Text from other machines is cleaned first. PURE."""

from __future__ import annotations

from collections.abc import Iterator

from rich.text import Text

from potluck.report.collective_table import table
from potluck.report.line import LABEL, Line
from potluck.report.screen import paragraph
from potluck.report.table import table_lines
from potluck.report.text import clean
from potluck.spec.probed import DeviceSpeed, Probed, ProbedPath, Rate, RoundTrips, Way
from potluck.units import UNKNOWN, bits_text, bytes_text, count_text, percent_text, rate_text, seconds_text

_INDENT = 16
_GOOD, _FAIR = 0.9, 0.6
_EXPLAINED = "busbw: what each rank must have sent at the least. bound: the time of a perfect ring over that link"


def probe_lines(probed: Probed, width: int) -> Iterator[Line]:
    """All lines, the one-sentence summary first."""
    yield from paragraph(summary(probed), width, "bold")
    for side in (probed.here, probed.there):
        if side is not None and side.device:
            yield Line()
            yield from device_lines(side, width)
    for path in probed.paths:
        yield Line()
        yield from _path(path, probed, width)
    if probed.collectives:
        yield Line()
        yield from _collectives(probed, width)


def summary(probed: Probed) -> str:
    """The result in one sentence."""
    here, link = clean(probed.here.name, 40), probed.link
    if probed.collectives:
        best = max(probed.collectives, key=lambda row: row.busbw)
        trained = f"; {here}: {_training(probed.here)}" if probed.here.samples_per_s else ""
        return (
            f"{best.world} ranks: {best.op} of {bytes_text(best.size_bytes)} at {bytes_text(best.busbw)}/s{trained}"
        )
    if link is None:
        return f"{here}: {_training(probed.here)}" if probed.here.samples_per_s else here
    there = clean(probed.there.name, 40) if probed.there is not None else clean(link.address, 60)
    apart = f"{_ms(link.idle.p50_s)} apart" if link.idle is not None else ""
    slower = min((link.out, link.back), key=lambda way: way.ours.bytes_per_s if way.ours else 0.0)
    if slower.ours is None:
        return f"{here} and {there}: {apart}" if apart else f"{here} and {there}"
    ratio = _ratio(slower)
    of_bare = f", {percent_text(ratio)} of bare TCP" if ratio is not None else ""
    return f"{here} and {there}: {bits_text(slower.ours.bytes_per_s)} encrypted{of_bare}, {apart}"


def device_lines(speed: DeviceSpeed, width: int) -> Iterator[Line]:
    yield Line(clean(speed.name, 60), "bold")
    yield from _row("device", speed.device, width)
    if speed.reason:
        yield from paragraph(clean(speed.reason), width, LABEL, indent=_INDENT)
    if speed.samples_per_s:
        flops = f" ({count_text(speed.flops_per_s)}FLOP/s)" if speed.flops_per_s else ""
        yield from _row("training", _training(speed, spread=True) + flops, width)
    if speed.micro_batch:
        yield from _row("micro-batch", _micro_batch(speed), width)
    if speed.matmul_flops_per_s:
        rates = speed.matmul_flops_per_s.items()
        words = ", ".join(f"{clean(name, 8)} {count_text(rate)}FLOP/s" for name, rate in rates)
        yield from _row("products", words, width)
    memory = f"{bytes_text(speed.memory_free_bytes)} of {bytes_text(speed.memory_bytes)} free"
    if speed.memory_bytes_per_s:
        memory += f", {bytes_text(speed.memory_bytes_per_s)}/s read and written"
    yield from _row("memory", memory, width)
    if speed.to_device_bytes_per_s or speed.from_device_bytes_per_s:
        there, back = (bytes_text(rate) for rate in (speed.to_device_bytes_per_s, speed.from_device_bytes_per_s))
        yield from _row("copies", f"to the device {there}/s, from it {back}/s", width)
    if speed.note:
        yield from _note(speed.note, width)


def _row(label: str, text: str, width: int) -> list[Line]:
    return paragraph(clean(text), width, label=f"  {label}", label_style=LABEL, indent=_INDENT)


def _note(text: str, width: int) -> list[Line]:
    return paragraph(clean(text), width, "yellow", label="  note", label_style="yellow", indent=_INDENT)


def _training(speed: DeviceSpeed, *, spread: bool = False) -> str:
    varied = f" ± {percent_text(speed.samples_variation)}" if spread and speed.samples_variation is not None else ""
    return f"{rate_text(speed.samples_per_s, 'samples')}{varied} of {clean(speed.training, 60)}"


def _micro_batch(speed: DeviceSpeed) -> str:
    text = f"{speed.micro_batch} was used"
    if speed.largest_micro_batch is None or speed.saved_bytes_per_sample is None:
        return text
    kept = bytes_text(speed.saved_bytes_per_sample)
    estimated = f"(estimated: {kept} a sample in half of the free memory)"
    return f"{text}; about {speed.largest_micro_batch:,} would fit {estimated}"


# -- several ranks ----------------------------------------------------------------------------------------------


def _collectives(probed: Probed, width: int) -> Iterator[Line]:
    row = probed.collectives[0]
    yield Line(f"{row.op} of {row.dtype}, {row.world} ranks, backend {clean(row.backend, 40)}", "bold")
    if row.link_bytes_per_s:
        what = {"memory": "memory of one machine", "tcp": "a bare TCP connection"}.get(probed.link_kind, "")
        yield from _row("link", f"{bytes_text(row.link_bytes_per_s)}/s: {what}, measured just now", width)
    yield Line()
    for number, text in enumerate(table(probed.collectives, width - 2)):
        yield Line("  ").add(text, LABEL if number < 2 else "")
    yield from paragraph(_EXPLAINED, width, LABEL, indent=2)


# -- the link ---------------------------------------------------------------------------------------------------


def _path(path: ProbedPath, probed: Probed, width: int) -> Iterator[Line]:
    there = clean(probed.there.name, 40) if probed.there is not None else clean(path.address, 60)
    source = " ".join(filter(None, (clean(path.interface, 16), clean(path.source, 40)))) or "here"
    title = Line(f"link to {there}", "bold").add(f"   {source} → {clean(path.address, 60)}")
    yield title.add("" if path.used else "   (not what a run would use)", LABEL)
    if path.idle is not None:
        yield from _row("round trip", _round_trips(path.idle), width)
    if path.loaded is not None:
        yield from _row("under load", _round_trips(path.loaded), width)
    ways = [(f"to {there}", path.out), (f"from {there}", path.back)]
    if path.both_out.ours is not None or path.both_back.ours is not None:
        ways += [("both at once: to", path.both_out), ("              from", path.both_back)]
    if any(way != Way() for _, way in ways):
        yield Line()
        yield from _rates(ways)
    for note in path.notes:
        yield from _note(note, width)


def _round_trips(times: RoundTrips) -> str:
    return f"{_ms(times.p50_s)}, p99 {_ms(times.p99_s)}, jitter {_ms(times.jitter_s)}"


def _rates(ways: list[tuple[str, Way]]) -> Iterator[Line]:
    iperf = any(way.iperf3 is not None for _, way in ways)
    header = ("", "potluck, encrypted", "bare TCP", *(("iperf3",) if iperf else ()), "of bare")
    rows: list[tuple[str | Text, ...]] = []
    for label, way in ways:
        ratio = _ratio(way)
        style = "" if ratio is None else "green" if ratio >= _GOOD else "yellow" if ratio >= _FAIR else "red"
        rates = [_rate(way.bare, spread=False), *([_rate(way.iperf3, spread=False)] if iperf else [])]
        rows.append((label, Text(_rate(way.ours), "bold"), *rates, Text(percent_text(ratio), style)))
    for line in table_lines(header, rows, right=range(1, 5), rule=False):
        yield Line("  ").join(line)


def _rate(rate: Rate | None, *, spread: bool = True) -> str:
    if rate is None:
        return UNKNOWN
    text = bits_text(rate.bytes_per_s)
    return text if not spread or rate.variation is None else f"{text} ±{percent_text(rate.variation):>5}"


def _ratio(way: Way) -> float | None:
    if way.ours is None or way.bare is None or not way.bare.bytes_per_s:
        return None
    return way.ours.bytes_per_s / way.bare.bytes_per_s


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if 0.0001 <= seconds < 0.00995 else seconds_text(seconds)

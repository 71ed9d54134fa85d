"""The doctor's check of a machine's addresses: the slower one is named with both speeds, and alike ones are not."""

from __future__ import annotations

import json

import pytest
from msgspec.structs import replace

from potluck.checked import to_json
from potluck.doctor import examine
from potluck.spec.facts import ETHERNET, Case, Interface, case_of
from potluck.spec.finding import NOTE, WARNING
from potluck.spec.probed import ProbedPath, Rate, Way
from support.healthy import linux, pair

MBIT = 1e6 / 8


def path(address: str, mbit: float | None, back: float | None = None, *, used: bool = False) -> ProbedPath:
    out, home = (Way(ours=Rate(bytes_per_s=m * MBIT) if m is not None else None) for m in (mbit, back or mbit))
    interface, source = ("eth0", "192.168.1.5") if address.startswith("192") else ("eth1", "10.0.0.5")
    return ProbedPath(address=address, interface=interface, source=source, used=used, out=out, back=home)


def measured(*paths: ProbedPath) -> Case:
    return pair(paths=paths)


def test_a_slower_address_in_use_is_named_with_both_speeds() -> None:
    case = measured(path("192.168.1.6", 90, used=True), path("10.0.0.6", 930, 940))
    (finding,) = examine(case).findings
    assert (finding.code, finding.severity, finding.pains) == ("slower-address", WARNING, (12,))
    for words in ("192.168.1.6", "which is used", "90 Mbit/s", "10.0.0.6", "930 Mbit/s"):
        assert words in finding.what
    assert finding.fix.splitlines() == [
        "potluck host --bind 10.0.0.6   (on laptop, if it is the host)",
        "potluck host --bind 10.0.0.5   (here, if this machine is the host)",
    ]
    assert "eth0 192.168.1.5 → 192.168.1.6" in finding.how
    assert case_of(json.loads(to_json(case))) == case


def test_the_slower_direction_counts() -> None:
    case = measured(path("192.168.1.6", 900, 90, used=True), path("10.0.0.6", 900))
    assert [f.code for f in examine(case).findings] == ["slower-address"]


def test_a_slower_address_that_happens_not_to_be_used_is_a_note() -> None:
    (finding,) = examine(measured(path("192.168.1.6", 900, used=True), path("10.0.0.6", 90))).findings
    assert (finding.severity, "may be used another time" in finding.what) == (NOTE, True)
    assert finding.fix.startswith("potluck host --bind 192.168.1.6 ")


@pytest.mark.parametrize(
    "paths",
    [
        (),
        (path("192.168.1.6", 90, used=True),),
        (path("192.168.1.6", 500, used=True), path("10.0.0.6", 930)),
        (path("192.168.1.6", 930, used=True), path("10.0.0.6", 500)),
        (path("192.168.1.6", 90, used=True), path("10.0.0.6", None)),
        (path("192.168.1.6", None, used=True), path("10.0.0.6", 930)),
    ],
)
def test_no_finding_where_addresses_are_alike_or_not_known(paths: tuple[ProbedPath, ...]) -> None:
    diagnosis = examine(measured(*paths))
    assert diagnosis.findings == ()
    told = [fine.what for fine in diagnosis.fine if "→" in fine.what]
    assert len(told) == len(paths)


def test_an_address_that_was_not_measured_is_told_with_the_command() -> None:
    more = Interface(name="eth1", kind=ETHERNET, addresses=("10.0.0.6/24",))
    there = linux("laptop", 6, interfaces=(*linux("laptop", 6).interfaces, more))
    here = linux(interfaces=(*linux().interfaces, replace(more, addresses=("10.0.0.5/24",))))
    used = path("192.168.1.6", 90, used=True)
    told = {f.what: f.details for f in examine(pair(here, there, paths=(used,))).fine}
    assert "--bind 0.0.0.0" in told["not measured: 10.0.0.6"]
    assert not any("not measured" in f.what for f in examine(pair(linux(), there, paths=(used,))).fine)

"""Keys and tokens: secrets stay out of sight, damage is found, files are private."""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import stat
import string
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from potluck.errors import ConfigError, RunFolderError, TokenError
from potluck.wire.frames import PROTOCOL
from potluck.wire.keys import HostKeys, load_keys, new_keys, public_of, save_keys
from potluck.wire.token import MAX_ADDRESSES, Token, cables_first, decode, encode, local_addresses

KEYS = new_keys()
PREFIX = f"potluck{PROTOCOL}-"
TOKEN = Token(
    protocol=PROTOCOL,
    addresses=("192.168.1.5", "100.101.102.103", "studio.local"),
    port=47321,
    host_public=KEYS.public,
    guest_secret=KEYS.guest_secret,
)


def shown(value: object) -> str:
    return f"{value!r} {value!s} {value} {[value]!r}" + logging.Formatter().format(
        logging.LogRecord("n", 20, "p", 1, "%s %r", (value, value), None)
    )


@pytest.mark.parametrize("secret", [KEYS.secret, KEYS.guest_secret], ids=["host", "guest"])
@pytest.mark.parametrize("value", [KEYS, TOKEN], ids=["keys", "token"])
def test_nothing_that_is_printed_shows_a_secret(value: object, secret: bytes) -> None:
    text = shown(value)
    for spelling in (repr(secret), repr(secret)[4:20], secret.hex(), repr(secret[:8])[2:-1]):
        assert spelling not in text
    assert "secret" not in text


def test_errors_about_tokens_do_not_quote_them() -> None:
    text = encode(TOKEN)
    with pytest.raises(TokenError) as caught:
        decode(text[:-1])
    error = caught.value
    assert error.__cause__ is None
    assert error.__suppress_context__
    assert text[20:30] not in str(error) + error.hint


def test_keys_survive_their_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    save_keys(path, KEYS)
    assert load_keys(path) == KEYS
    again = new_keys()
    save_keys(path, again)
    assert load_keys(path) == again
    assert os.listdir(tmp_path) == ["keys.json"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX")
def test_the_file_of_keys_is_private_whatever_the_umask_and_whatever_was_there(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("old")
    path.chmod(0o644)
    before = os.umask(0)
    try:
        save_keys(path, KEYS)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o644)
    load_keys(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff\xfe", b'{"public": 3}', b"[" * 100_000, b"null"])
def test_a_file_that_holds_no_keys_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(content)
    with pytest.raises(RunFolderError, match="does not hold"):
        load_keys(path)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_damaged_file_of_keys_is_noticed(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("keys") / "keys.json"
    save_keys(path, KEYS)
    text = path.read_text()
    at = data.draw(st.sampled_from([i for i, c in enumerate(text) if c in "0123456789abcdef" and text[i - 8 : i]]))
    changed = data.draw(st.sampled_from([c for c in "0123456789abcdef" if c != text[at]]))
    path.write_text(text[:at] + changed + text[at + 1 :])
    try:
        got = load_keys(path)
    except RunFolderError:
        return
    # Curve25519 ignores five bits of a secret: such a change makes another spelling of the same key.
    assert (got.public, got.guest_public) == (KEYS.public, KEYS.guest_public)


def test_files_that_cannot_be_read_or_written_say_why(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="No such file"):
        load_keys(tmp_path / "none.json")
    with pytest.raises(RunFolderError, match="cannot be written") as caught:
        save_keys(tmp_path / "nowhere" / "keys.json", KEYS)
    assert caught.value.hint
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunFolderError):
        save_keys(tmp_path / "folder", KEYS)
    assert sorted(os.listdir(tmp_path)) == ["folder"]


def test_new_keys_are_new_and_belong_together() -> None:
    other = new_keys()
    assert len({KEYS.public, KEYS.guest_public, other.public, other.guest_public}) == 4
    assert public_of(other.secret) == other.public
    assert public_of(other.guest_secret) == other.guest_public
    assert all(len(getattr(other, field.name)) == 32 for field in dataclasses.fields(HostKeys))


ADDRESSES = st.one_of(
    st.ip_addresses(v=4).map(str), st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?(\.local)?", fullmatch=True)
)


@given(
    addresses=st.lists(ADDRESSES, min_size=1, max_size=MAX_ADDRESSES),
    port=st.integers(1, 65535),
    public=st.binary(min_size=32, max_size=32),
    secret=st.binary(min_size=32, max_size=32),
)
@settings(deadline=None)
def test_tokens_come_back(addresses: list[str], port: int, public: bytes, secret: bytes) -> None:
    token = Token(addresses=tuple(addresses), port=port, host_public=public, guest_secret=secret)
    text = encode(token)
    assert decode(text) == token
    assert set(text) <= set(string.ascii_letters + string.digits + "-_")


def test_a_token_is_short() -> None:
    assert len(encode(dataclasses.replace(TOKEN, addresses=("192.168.1.5",)))) <= 111


def test_every_single_wrong_character_is_found() -> None:
    text = encode(TOKEN)
    for at, right in enumerate(text):
        for wrong in string.ascii_letters + string.digits + "-_ .=\u00e9":
            if wrong != right:
                with pytest.raises(TokenError):
                    decode(text[:at] + wrong + text[at + 1 :])
        with pytest.raises(TokenError):
            decode(text[:at] + text[at + 1 :])
        with pytest.raises(TokenError):
            decode(text[: at + 1] + "A" + text[at + 1 :])
    for at in range(len(text) - 1):
        if text[at] != text[at + 1]:
            with pytest.raises(TokenError):
                decode(text[:at] + text[at + 1] + text[at] + text[at + 2 :])


@given(st.text(max_size=200) | st.text(PREFIX + "_AZaz", max_size=60).map(lambda tail: PREFIX + tail))
@settings(deadline=None)
def test_other_texts_are_token_errors_with_a_hint(text: str) -> None:
    with pytest.raises(TokenError) as caught:
        decode(text)
    assert caught.value.hint


def test_the_three_kinds_of_bad_token_are_told_apart() -> None:
    text = encode(TOKEN)
    with pytest.raises(TokenError, match="not a potluck token"):
        decode("hello")
    with pytest.raises(TokenError, match="damaged"):
        decode(text[:40])
    with pytest.raises(TokenError, match=f"protocol {PROTOCOL - 1}, this machine uses {PROTOCOL}"):
        decode(encode(dataclasses.replace(TOKEN, protocol=PROTOCOL - 1)))


def test_what_people_copy_along_is_forgiven() -> None:
    text = encode(TOKEN)
    wrapped = "\n  ".join(text[at : at + 40] for at in range(0, len(text), 40))
    for copied in (
        f" {text}\n",
        f"potluck join {text}",
        f"  $ potluck join {text} \r\n",
        f"`{text}`",
        wrapped,
    ):
        assert decode(copied) == TOKEN


@pytest.mark.parametrize(
    "change",
    [
        {"addresses": ()},
        {"addresses": ("a",) * (MAX_ADDRESSES + 1)},
        {"addresses": ("a b",)},
        {"addresses": ("x" * 65,)},
        {"port": 0},
        {"port": 65536},
        {"host_public": b"short"},
    ],
)
def test_tokens_that_cannot_be_are_not_made(change: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        encode(dataclasses.replace(TOKEN, **change))  # type: ignore[arg-type]


class FakeNetwork:
    """psutil's view of a machine with these interfaces, and the address of its default route."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, route: str | None, **interfaces: tuple[str, bool]) -> None:
        named = {name.replace("_", "-"): value for name, value in interfaces.items()}
        entry = lambda address: [SimpleNamespace(family=socket.AF_INET, address=address)]  # noqa: E731
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: {n: entry(a) for n, (a, _) in named.items()})
        monkeypatch.setattr(
            psutil, "net_if_stats", lambda: {n: SimpleNamespace(isup=u) for n, (_, u) in named.items()}
        )
        monkeypatch.setattr("potluck.wire.token.source_address", lambda: route)


def test_addresses_worth_giving_come_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNetwork(
        monkeypatch,
        "192.168.1.5",
        lo=("127.0.0.1", True),
        tailscale0=("100.101.1.2", True),
        en5=("169.254.3.4", True),
        eth1=("10.0.0.7", True),
        wlan0=("192.168.1.5", True),
        eth9=("10.9.9.9", False),
        docker0=("172.17.0.1", True),
        br_12ab=("172.18.0.1", True),
    )
    assert local_addresses() == ("192.168.1.5", "10.0.0.7", "100.101.1.2", "169.254.3.4")


def test_a_thunderbolt_cable_comes_first_if_somebody_gave_it_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    wlan = {"wlan0": ("192.168.1.5", True)}
    FakeNetwork(monkeypatch, "192.168.1.5", **wlan, thunderbolt0=("10.0.0.1", True))
    assert local_addresses() == ("192.168.1.5", "10.0.0.1")
    assert cables_first(local_addresses()) == ("10.0.0.1", "192.168.1.5")
    FakeNetwork(monkeypatch, "192.168.1.5", **wlan, thunderbolt0=("169.254.7.7", True))
    assert cables_first(local_addresses()) == ("192.168.1.5", "169.254.7.7")
    FakeNetwork(monkeypatch, "192.168.1.5", **wlan, bridge0=("10.0.0.1", True))
    for platform, first in (("darwin", "10.0.0.1"), ("linux", "192.168.1.5")):
        monkeypatch.setattr("sys.platform", platform)
        assert cables_first(local_addresses())[0] == first


def test_bridges_only_where_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNetwork(monkeypatch, None, lo=("127.0.0.1", True), docker0=("172.17.0.1", True))
    assert local_addresses() == ("172.17.0.1",)
    FakeNetwork(monkeypatch, None, lo=("127.0.0.1", True))
    assert local_addresses() == ("127.0.0.1",)


def test_the_addresses_of_this_machine_are_sound() -> None:
    found = local_addresses()
    assert 1 <= len(found) <= MAX_ADDRESSES
    for address in found:
        socket.inet_aton(address)
    encode(dataclasses.replace(TOKEN, addresses=found))


@pytest.mark.parametrize("address", ["::1", "fd00::2", "2001:db8:1234:5678:9abc:def0:1234:5678", "fe80::1%eth0"])
def test_an_ipv6_address_travels_in_a_token(address: str) -> None:
    token = Token(addresses=("192.0.2.1", address), port=7171, host_public=b"h" * 32, guest_secret=b"g" * 32)
    assert decode(encode(token)) == token


def test_addresses_of_ipv6_come_behind_the_others_and_none_is_of_one_link_only() -> None:
    usual, all_of_them = local_addresses(), local_addresses(ipv6=True)
    assert not any(":" in address for address in usual)
    assert [a for a in all_of_them if ":" not in a] == list(usual)[: len([a for a in all_of_them if ":" not in a])]
    assert not any(address.startswith(("fe80", "::1")) for address in all_of_them)
    assert len(all_of_them) <= MAX_ADDRESSES

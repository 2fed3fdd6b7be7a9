"""Headers of channels: they travel with the opening in every protocol, and `Limits.headers` bounds them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

import muxkit
from muxkit.core import decode_headers, encode_headers, with_name, without_name

if TYPE_CHECKING:
    from trio.testing import MockClock

ALL = pytest.mark.parametrize("protocol", ["bpmux", "relink", "aqueduct", "e3x", "yamux"])
HEADERS = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "user": "tea ☕", "name": "n"}

Seen = tuple[str, bytes, dict[str, str]]


async def report(channel: muxkit.Channel) -> None:
    """Answer with the parts of the opening."""
    await channel.send(repr((channel.name, channel.opening, dict(channel.headers))).encode())


async def seen(session: muxkit.Session, *, name: str = "", payload: bytes = b"", headers: dict[str, str]) -> bytes:
    async with session.open(name, payload=payload, headers=headers) as channel:
        assert channel.headers == headers
        assert channel.opening == payload
        await channel.send(b"?")  # Relink announces a channel without name, payload and headers with its first message
        return await channel.receive()


@ALL
@pytest.mark.parametrize("name", ["", "prices"])
@pytest.mark.parametrize("payload", [b"", b"tea", b"\xc0h", b"\xc0n", b"\xc0h\0\1x", bytes(5000)], ids=repr)
async def test_headers_name_and_payload_arrive_as_they_were(protocol: str, name: str, payload: bytes) -> None:
    async with muxkit.open_server(report, f"{protocol}+mem://headers") as server:
        async with muxkit.connect(server.url) as session:
            for headers in (HEADERS, {}):
                answer = await seen(session, name=name, payload=payload, headers=headers)
                assert answer == repr((name, payload, headers)).encode()


@ALL
async def test_a_channel_with_too_large_headers_is_refused_and_its_neighbours_are_served(
    protocol: str, autojump_clock: MockClock
) -> None:
    limits = muxkit.Limits(headers=100)
    async with muxkit.open_server(report, f"{protocol}+mem://large", limits=limits) as server:
        async with muxkit.connect(server.url) as session:
            channel = await session.open("prices", headers={"key": "x" * 200})
            with pytest.raises((muxkit.ChannelCancelled, muxkit.ChannelStopped)) as caught, trio.fail_after(60):
                await channel.receive()
            assert caught.value.code == 431
            assert "expected at most 100 bytes" in caught.value.reason
            assert await seen(session, headers={"key": "x" * 50}) == repr(("", b"", {"key": "x" * 50})).encode()


@ALL
async def test_a_side_refuses_to_send_headers_above_its_own_limit(protocol: str) -> None:
    async with muxkit.open_server(report, f"{protocol}+mem://own") as server:
        async with muxkit.connect(server.url, limits=muxkit.Limits(headers=100)) as session:
            with pytest.raises(muxkit.LocalProtocolError, match="headers too large: expected at most 100 bytes"):
                session.open(headers={"key": "x" * 200})


@ALL
async def test_a_header_that_is_not_text_is_refused(protocol: str) -> None:
    async with muxkit.open_server(report, f"{protocol}+mem://text") as server:
        async with muxkit.connect(server.url) as session:
            with pytest.raises(TypeError, match="invalid header 'id': expected a text"):
                session.open(headers={"id": 7})  # type: ignore[dict-item]


async def test_an_unreliable_channel_carries_headers_as_well() -> None:
    from muxkit.protocols import e3x

    async with e3x.open_server(report, "e3x+mem://unreliable") as server, e3x.connect(server.url) as session:
        async with session.open("n", reliable=False, headers=HEADERS) as channel:
            assert await channel.receive() == repr(("n", b"", HEADERS)).encode()


def test_an_older_peer_finds_the_name_and_sees_the_headers_as_payload() -> None:
    opening = with_name("chat", b"tea", b"\x81\xa1k\xa1v")
    name, end, payload = opening.removeprefix(b"\xc0n").partition(b"\0")  # as it was read before there were headers
    assert (name, end, payload) == (b"chat", b"\0", b"\xc0h\0\x05\x81\xa1k\xa1vtea")


@pytest.mark.parametrize("opening", [b"\xc0h", b"\xc0h\0", b"\xc0h\0\5abc", b"\xc0nchat", b"tea"], ids=repr)
def test_a_payload_that_only_looks_like_headers_stays_a_payload(opening: bytes) -> None:
    assert without_name(opening) == ("", opening, b"")


@given(st.text(max_size=60).filter(lambda name: "\0" not in name and name.isprintable()), st.binary(), st.binary())
def test_whatever_is_put_together_is_taken_apart_again(name: str, payload: bytes, headers: bytes) -> None:
    assert without_name(with_name(name, payload, headers)) == (name, payload, headers)


@given(st.binary())
def test_any_block_of_bytes_is_read_as_some_headers(block: bytes) -> None:
    assert all(isinstance(each, str) for pair in decode_headers(block).items() for each in pair)


@given(st.dictionaries(st.text(), st.text()))
def test_headers_are_read_as_they_were_written(headers: dict[str, str]) -> None:
    assert decode_headers(encode_headers(headers, 100_000)) == headers


def test_a_limit_that_the_length_of_headers_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match=r"headers=65536"):
        muxkit.Limits(headers=65_536)

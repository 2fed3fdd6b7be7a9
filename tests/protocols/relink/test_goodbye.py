"""Why a link ends, which the document has no place for: a message of muxkit's own on a channel of its own."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

import muxkit
from muxkit.core import Reason
from muxkit.protocols import relink
from muxkit.runtime.mux_session import connection_of
from tests.protocols.relink._session_world import world

REASON = "\x1b[2J\r\nroot# " + "x" * 1_000_000


async def refuse(link: muxkit.Session) -> None:
    raise muxkit.Refused("not today", code=7)


async def test_a_client_that_is_refused_before_it_has_a_channel_reads_why_and_stops_dialling() -> None:
    async with muxkit.open_server(refuse, "relink+tcp://127.0.0.1:0/jobs") as server:
        async with relink.connect(server.url) as link:
            incoming = aiter(link.incoming())
            with trio.fail_after(20), pytest.raises(muxkit.LinkLost) as caught:
                await anext(incoming)  # which the goodbye is not
            assert (caught.value.by, caught.value.peer_reason, caught.value.code) == ("peer", "not today", 7)
            assert not isinstance(caught.value, relink.LinkChanged)
            assert link.connections == 1
            with pytest.raises(muxkit.LinkLost, match="not today"):
                await link.open()


async def test_every_channel_of_a_link_that_breaks_a_limit_reads_which(autojump_clock: MockClock) -> None:
    async def keep(session: muxkit.Session) -> None:
        async for _ in session.incoming():
            pass

    async def use(url: str) -> None:
        async with muxkit.connect(url) as session:
            idle, busy = await session.open("idle"), await session.open("busy")
            await busy.send(bytes(200_001))
            for channel in (idle, busy):
                with trio.fail_after(20), pytest.raises(muxkit.LinkLost) as caught:
                    await channel.receive()
                assert caught.value.code == 400
                assert "a message of 200001 bytes" in str(caught.value.peer_reason)
                assert "raise Limits(message=…)" in str(caught.value)

    async with muxkit.open_server(keep, "relink+mem://goodbye", limits=muxkit.Limits(message=200_000)) as server:
        with pytest.raises(muxkit.LinkLost, match="a message of 200001 bytes"):  # what was sent last was not heard
            await use(server.url)


async def test_what_a_peer_says_is_shown_escaped_and_bounded(autojump_clock: MockClock) -> None:
    async with world() as made, made.link() as one:
        other = await made.other()
        connection_of(other).link.sender(65535).send_parts((b"muxkit.goodbye", REASON.encode()), overdraw=True)
        connection_of(other).request_write()
        incoming = aiter(one.incoming())
        with pytest.raises(muxkit.LinkLost) as caught:
            await anext(incoming)
        told = caught.value.peer_reason
        assert told is not None
        assert told.startswith("\\x1b[2J\\r\\nroot# xxx")
        assert len(told) <= 512
        assert str(caught.value).isprintable()


async def test_a_message_of_the_application_that_looks_like_a_goodbye_is_given_to_its_receiver(
    autojump_clock: MockClock,
) -> None:
    async with world() as made, made.link() as one:
        other = await made.other()
        receiver = one.receiver(65535)
        await other.sender(65535).send(b"muxkit.goodbye", b"not today")
        message = await receiver.receive()
        assert message.parts == (b"muxkit.goodbye", b"not today")


async def test_a_link_with_channels_of_the_applications_own_says_nothing_of_ours(autojump_clock: MockClock) -> None:
    async with world() as made, made.link() as one:
        other = await made.other()
        await other.sender(1).send(b"x")
        receiver = one.receiver(65535)
        connection_of(other)._say_goodbye(Reason("not today"))
        connection_of(other).end_because("the link was left by an error", by="local")
        with pytest.raises(muxkit.LinkLost) as caught:
            await receiver.receive()
        assert caught.value.peer_reason is None


async def test_a_link_that_finds_no_listener_says_so_in_the_log(
    autojump_clock: MockClock, caplog: pytest.LogCaptureFixture
) -> None:
    """F8: relink dialled for ever, and nothing was logged."""
    async with muxkit.connect("relink+mem://nowhere"):
        await trio.sleep(100)
    lines = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert lines[0].startswith("relink: mem nowhere: ")
    assert 2 <= len(lines) <= 10  # at most one for each doubling, not one for each attempt

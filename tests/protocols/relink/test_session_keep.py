"""How much may connectors make a listener keep, how long may they take to say who they are, and who may come back?"""

from __future__ import annotations

import ssl
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
import trustme

from muxkit import Limits, LinkLost
from muxkit.protocols import relink
from muxkit.protocols.relink import Endpoint, Keep, Link, LinkChanged
from muxkit_adapters import memory
from tests.protocols.relink._session_world import QUIET, SOON, at_rest, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from trio.testing import MockClock

    from muxkit.protocols.relink import Listener
    from tests.protocols.relink._session_world import World


@asynccontextmanager
async def absent(made: World, count: int) -> AsyncIterator[list[Link]]:
    """So many links whose connectors have gone away without a word; the listener's side of them."""
    first = len(made.links)
    for _ in range(count):
        with trio.CancelScope() as scope:
            async with made.link() as one:
                await one.connected()
                scope.cancel()
                await trio.lowlevel.checkpoint()
    await at_rest()
    yield made.links[first:]


# --- bounds


@pytest.mark.requirement("R-01", "R-39")
async def test_absent_links_are_bounded_in_number(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(links=3)) as made, absent(made, 5) as links:
        assert made.listener.absent == 3
        for gone in links[:2]:
            with pytest.raises(LinkLost, match="more sessions were absent"):
                await gone.receiver(1).receive()
        assert [link.core.error for link in links[2:]] == [None] * 3


@pytest.mark.requirement("R-01")
async def test_absent_links_are_bounded_in_age(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(age=100)) as made, absent(made, 1) as [link]:
        began = trio.current_time()
        with pytest.raises(LinkLost, match="absent for longer"):
            await link.receiver(1).receive()
        assert trio.current_time() - began == pytest.approx(100, abs=1)
        assert made.listener.links == 0


@pytest.mark.requirement("R-01", "R-03")
async def test_absent_links_are_bounded_in_bytes_also_while_they_are_absent(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(bytes=200_000)) as made, absent(made, 2) as [light, heavy]:
        sent = 0

        async def push() -> None:
            nonlocal sent
            sender = heavy.sender(1)
            while True:
                await sender.send(bytes(10_000))
                sent += 1

        with pytest.raises(LinkLost, match="held more bytes"):
            await push()
        assert 10 <= sent <= 20
        assert light.core.error is not None  # it had been absent for longer, and went first
        assert made.listener.absent_bytes == 0


async def test_a_link_that_came_back_does_not_count(autojump_clock: MockClock) -> None:
    async with world(keep=Keep(links=1, age=10)) as made, made.link() as one:
        await made.other()
        for _ in range(3):
            await made.cut()
            await trio.sleep(1)
            assert one.is_connected
            assert made.listener.absent == 0
        await trio.sleep(100)
        assert one.connections == 4
        made.let_go()


# --- handshakes


@pytest.mark.clause("relink-H04")
@pytest.mark.requirement("R-13", "R-29")
async def test_a_handshake_that_dribbles_is_dropped_in_time(autojump_clock: MockClock) -> None:
    async def dribble(stream: trio.abc.Stream) -> None:
        for byte in relink.encode_version(0) + relink.encode_request(QUIET):
            await stream.send_all(bytes((byte,)))
            await trio.sleep(1)

    async with world() as made, made.dial() as stream:
        began = trio.current_time()
        with pytest.raises(trio.BrokenResourceError):
            await dribble(stream)
        assert trio.current_time() - began == pytest.approx(10, abs=1.1)
        assert made.listener.links == 0


@pytest.mark.requirement("R-13")
async def test_a_handshake_that_never_ends_is_dropped_at_a_kibibyte(autojump_clock: MockClock) -> None:
    sent = 9

    async def push(stream: trio.abc.Stream) -> None:
        nonlocal sent
        while True:
            await stream.send_all(b"x" * 100)
            sent += 100
            await at_rest()

    async with world() as made, made.dial() as stream:
        await stream.send_all(relink.encode_version(0) + bytes((255,)))
        with trio.fail_after(5), pytest.raises(trio.BrokenResourceError):
            await push(stream)
        assert sent < 1500


@pytest.mark.requirement("R-13")
async def test_silent_connections_keep_nobody_out(autojump_clock: MockClock) -> None:
    async with world(limits=Limits(half_open=3)) as made:
        async with made.dial(), made.dial(), made.dial(), made.dial() as last:
            await at_rest()
            async with made.link() as one:
                with trio.fail_after(1):
                    await one.connected()
                await last.send_all(relink.encode_version(0))
                assert await last.receive_some() == relink.encode_version(0)
            made.let_go()


@pytest.mark.requirement("R-21")
@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n" * 3, bytes(8) + b"\x02\xff\xfe" + bytes(40), b""])
async def test_garbage_instead_of_a_handshake_is_hung_up_on(garbage: bytes, autojump_clock: MockClock) -> None:
    async with world() as made, made.dial() as stream:
        await stream.send_all(garbage)
        with trio.fail_after(20):
            while await stream.receive_some():
                pass
        assert made.listener.links == 0


@pytest.mark.requirement("R-21", "R-36")
async def test_a_packet_that_breaks_the_rules_ends_the_link_on_both_sides(autojump_clock: MockClock) -> None:
    async with world() as made, made.link() as one:
        other = await made.other()
        receiver = other.receiver(1)
        assert one.core.pump is not None
        await one.core.pump._stream.send_all(bytes.fromhex("A0 00 00 00 00 00 00 00"))
        with pytest.raises(LinkLost, match="relink-G06") as caught:
            await receiver.receive()
        assert caught.value.by == "peer"
        with pytest.raises(LinkChanged):
            await one.receiver(1).receive()


@pytest.mark.requirement("R-50")
@pytest.mark.parametrize("reads", [0, 8, 16])
async def test_a_listener_that_says_nothing_in_the_handshake_is_dialled_again(
    reads: int, autojump_clock: MockClock
) -> None:
    async with world() as made:
        silent = True

        @asynccontextmanager
        async def dial() -> AsyncIterator[trio.abc.Stream]:
            nonlocal silent
            if not silent:
                async with made.dial() as stream:
                    yield stream
                return
            silent = False
            here, there = memory.pair()
            await there.send_all(relink.encode_version(0)[:reads])
            async with here:
                yield here

        async with relink.link(dial, config=QUIET, backoff=SOON) as one:
            with trio.fail_after(12):
                await one.connected()
            made.let_go()


# --- identities


@asynccontextmanager
async def over_tls(listener: Listener, authority: trustme.CA) -> AsyncIterator[int]:
    """A real TLS server that asks its clients for certificates; gives the port."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    async with trio.open_nursery() as nursery:
        serve = partial(trio.serve_ssl_over_tcp, listener.handle, 0, context, host="127.0.0.1")
        listeners: list[trio.SSLListener[trio.SocketStream]] = await nursery.start(serve)
        yield listeners[0].transport_listener.socket.getsockname()[1]  # type: ignore[attr-defined]
        nursery.cancel_scope.cancel()


class Dialler:
    """A client with a certificate of its own, or none."""

    def __init__(self, port: int, authority: trustme.CA, name: str | None) -> None:
        self._port = port
        self._context = ssl.create_default_context()
        authority.configure_trust(self._context)
        if name is not None:
            authority.issue_cert(name).configure_cert(self._context)
        self.streams: list[trio.SSLStream[trio.SocketStream]] = []

    @asynccontextmanager
    async def dial(self) -> AsyncIterator[trio.abc.Stream]:
        stream = await trio.open_ssl_over_tcp_stream("localhost", self._port, ssl_context=self._context)
        self.streams.append(stream)
        try:
            yield stream
        finally:
            await trio.aclose_forcefully(stream)


@pytest.mark.requirement("R-64")
async def test_only_the_owner_of_its_certificate_can_take_a_link_over() -> None:
    authority = trustme.CA()
    over = trio.Event()

    async def hold(link: Link) -> None:
        await over.wait()

    async with (
        relink.listener({"": Endpoint(hold, QUIET)}) as listener,
        over_tls(listener, authority) as port,
    ):
        owner = Dialler(port, authority, "owner@example.org")
        async with relink.link(owner.dial, config=QUIET, backoff=SOON) as one:
            await one.connected()
            stolen = one.core.engine
            for name in ("thief@example.org", None):
                thief = Dialler(port, authority, name)
                async with relink.link(thief.dial, config=QUIET, backoff=SOON, linger=0.1) as other:
                    # It has learnt the link's id.
                    other.core.engine._link.epoch = stolen.epoch
                    other.core.engine._link.link_id = stolen.link_id
                    await other.connected()
                    assert other.id != one.id
            assert one.connections == 1
            await trio.aclose_forcefully(owner.streams[0])
            while one.connections < 2:
                await one.core.moved.park()
            await one.connected()
            assert one.id == stolen.link_id
            over.set()

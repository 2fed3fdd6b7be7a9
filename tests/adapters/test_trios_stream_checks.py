"""TLS and WebSocket streams, and channels as streams, pass Trio's own checks for streams."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

import muxkit
from muxkit_adapters import tls, websocket

from ._links import Certificates, paired, port_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

QUICK = 0.2  # s for the goodbye of a peer that says none
CLOGGED = 0.05  # s in which the kernel moves what it has taken
GOOD = Certificates()
SMALL = muxkit.Limits(channel_bytes=2000, channel_first=1000, channel_floor=100, outbox=2000)  # soon full


async def clog_channels(ends: tuple[Any, Any], patience: float) -> tuple[Any, Any]:
    """Fill both directions until there is no room for a byte for so long; cancelling `send_all` does no harm here."""
    for end in ends:
        for size in (500, 1):
            with trio.move_on_after(patience) as scope:
                while True:
                    await end.send_all(bytes(size))
                    scope.deadline = trio.current_time() + patience
    return ends


async def clog_links(ends: tuple[Any, Any]) -> tuple[Any, Any]:
    """Fill both directions until the kernel takes nothing; a cancelled `send_all` would make these streams unusable.

    The kernel reports a socket as not writable while it still takes a few bytes, so the last ones go one by one, and it
    goes on moving bytes to the receiving side for a moment, so there is a second look.
    """
    took = True
    while took:
        took = False
        for end in ends:
            for size in (64 * 1024, 1):
                while end.send_nowait([bytes(size)]):
                    took = True
        await trio.sleep(CLOGGED)
    return ends


def tls_pair() -> AbstractAsyncContextManager[tuple[tls.TLSStream, tls.TLSStream]]:
    def connect(address: str) -> AbstractAsyncContextManager[tls.TLSStream]:
        return tls.connect("127.0.0.1", port_of(address), ssl_context=GOOD.client(), close_timeout=QUICK)

    return paired(tls.serve, connect, ssl_context=GOOD.server(), close_timeout=QUICK)


def websocket_pair() -> AbstractAsyncContextManager[tuple[trio.abc.Stream, trio.abc.Stream]]:
    def connect(address: str) -> AbstractAsyncContextManager[trio.abc.Stream]:
        return websocket.connect(f"ws://{address}/", close_timeout=QUICK)

    return paired(websocket.serve, connect, close_timeout=QUICK)


@pytest.mark.requirement("R-41")
@pytest.mark.parametrize("pair", [tls_pair, websocket_pair])
async def test_a_stream_of_a_transport_passes_trios_checks(
    pair: Callable[[], AbstractAsyncContextManager[tuple[trio.abc.Stream, trio.abc.Stream]]],
) -> None:
    async def make() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        return await stack.enter_async_context(pair())

    async def make_clogged() -> tuple[trio.abc.Stream, trio.abc.Stream]:
        ends: tuple[trio.abc.Stream, trio.abc.Stream] = await clog_links(await make())
        return ends

    async with AsyncExitStack() as stack:
        await trio.testing.check_two_way_stream(make, make_clogged)


@pytest.mark.requirement("R-41")
@pytest.mark.parametrize("protocol", ["bpmux", "relink", "e3x", "aqueduct", "yamux"])
async def test_a_channel_as_a_stream_passes_trios_checks(protocol: str, autojump_clock: trio.testing.MockClock) -> None:
    await check_channels(f"{protocol}+mem://checks", patience=5.0)


@pytest.mark.requirement("R-41")
async def test_a_channel_over_quic_as_a_stream_passes_trios_checks() -> None:
    with (
        GOOD.authority.cert_pem.tempfile() as authority,
        GOOD.certificate.private_key_and_cert_chain_pem.tempfile() as certificate,
    ):
        await check_channels(
            "aqueduct+quic://127.0.0.1:0", muxkit.TLS(cert=certificate), muxkit.TLS(ca=authority), patience=0.2
        )


async def check_channels(
    url: str, shown: muxkit.TLS | None = None, trusted: muxkit.TLS | None = None, *, patience: float
) -> None:
    """Run Trio's checks on pairs of streams that are the two ends of channels of one session."""
    passed = False
    arriving, arrived = trio.open_memory_channel[muxkit.Channel](0)

    async def keep(channel: muxkit.Channel) -> None:
        await arriving.send(channel)
        await trio.sleep_forever()

    with suppress(
        muxkit.LinkLost
    ):  # some protocols report, when a session is left, that clogged channels were not sent
        async with (
            muxkit.open_server(keep, url, limits=SMALL, tls=shown) as server,
            muxkit.connect(server.url, limits=SMALL, tls=trusted) as session,
        ):

            async def make() -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
                ours = await session.open("stream")
                theirs = await arrived.receive()
                return ours.as_stream(), theirs.as_stream()

            async def make_clogged() -> tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]:
                ends: tuple[trio.abc.HalfCloseableStream, trio.abc.HalfCloseableStream]
                ends = await clog_channels(await make(), patience)
                return ends

            await trio.testing.check_half_closeable_stream(make, make_clogged)
            passed = True
    assert passed

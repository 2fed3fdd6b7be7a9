"""The end of a connection: left in order or by an error, lost, or with a peer that does not close it."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import LinkLost, RemoteProtocolError
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Mode
from muxkit.runtime.mux_session import connection_of
from muxkit_adapters import memory
from tests.protocols.aqueduct._helpers import statistics_of
from tests.protocols.aqueduct._session_pairs import (
    REAL,
    at_rest,
    carried_receiver,
    carried_sender,
    connected,
    cut,
    leftovers,
    payloads,
    rough,
    send_on,
    take,
)

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from trio.testing import MockClock


async def test_what_was_sent_before_leaving_arrives_and_is_read_after_it(autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with aqueduct.connection(there, role="server") as server:
        async with aqueduct.connection(here) as client:
            for mode in Mode:
                await client.entrypoint.send(bytes(20_000), mode=mode)
        assert [len(payload) for payload in await payloads(server.entrypoint)] == [20_000] * 3


@pytest.mark.parametrize("link", REAL)
async def test_leaving_over_a_real_link_loses_nothing(link: str) -> None:
    async with REAL[link]() as (here, there), aqueduct.connection(there, role="server") as server:
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                async with aqueduct.connection(here) as client:
                    for _ in range(100):
                        await client.entrypoint.send(bytes(10_000))

            nursery.start_soon(send)
            assert len(await payloads(server.entrypoint)) == 100


async def test_leaving_finishes_senders_and_closes_receivers(autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with aqueduct.connection(there, role="server") as server:
        async with aqueduct.connection(here) as client:
            _receiver, for_sender = client.channel()
            sender, for_receiver = client.channel("sender")
            await client.entrypoint.send(b"", attachments=[for_sender, for_receiver])
            await sender.send(b"last")
        message = await server.entrypoint.receive()
        assert await payloads(message.receiver(1)) == [b"last"]
        with pytest.raises(trio.BrokenResourceError):
            await message.sender(0).send(b"nobody is there")


async def test_both_may_leave_at_once_with_channels_open(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        back, _forth = await carried_sender(pair)
        out, _into = await carried_receiver(pair)
        await back.send(b"x")
        await out.send(b"y")
    assert connection_of(pair.client).pump.is_lost
    assert connection_of(pair.client).live_channels == connection_of(pair.server).live_channels == 0


@pytest.mark.requirement("R-36")
async def test_an_error_in_the_block_hangs_up_at_once_and_comes_out_bare(autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with aqueduct.connection(there, role="server") as server:
        with pytest.raises(KeyError):
            await _fail_in(here)
        assert (await server.entrypoint.receive()).payload == b"x"
        with pytest.raises(trio.BrokenResourceError):
            await server.entrypoint.receive()


async def _fail_in(link: trio.abc.Stream) -> None:
    async with aqueduct.connection(link) as client:
        await client.entrypoint.send(b"x")
        await at_rest()
        raise KeyError


@pytest.mark.requirement("R-39")
async def test_after_a_loss_every_waiter_wakes_and_says_why(autojump_clock: MockClock) -> None:
    woken: dict[str, BaseException] = {}

    async def wait(name: str, call: Callable[[], Awaitable[object]]) -> None:
        try:
            await call()
        except trio.BrokenResourceError as error:
            woken[name] = error

    async with rough() as pair:
        back, forth = await carried_sender(pair)
        out, _into = await carried_receiver(pair)
        receiver, _ticket = pair.client.channel()
        sender, _other = pair.client.channel("sender")
        await back.send(b"before the loss")
        await at_rest()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait, "send", lambda: send_on(out))
            nursery.start_soon(wait, "receive", pair.server.entrypoint.receive)
            nursery.start_soon(wait, "receive before the hand-over", receiver.receive)
            await at_rest()
            receipt = await out.send_tracked(b"x", mode=Mode.UNRELIABLE)
            nursery.start_soon(wait, "arrived", receipt.arrived)
            cut(pair)
        await wait("send before the hand-over", lambda: sender.send(b""))
        await wait("finish", out.finish)
        await wait("channel", _async(pair.client.channel))
        await wait("ping", pair.client.ping)
        assert (await forth.receive()).payload == b"before the loss"
        await wait("receive behind what came", forth.receive)
        assert len(woken) == 9
        for error in woken.values():
            assert isinstance(error, LinkLost)
            assert "the test cut it" in str(error)


def _async(call: Callable[[], object]) -> Callable[[], Awaitable[object]]:
    async def called() -> object:
        return call()

    return called


def rough_server(link: trio.abc.Stream) -> _Rough:
    return _Rough(link)


class _Rough:
    """Run a server whose loss is expected."""

    def __init__(self, link: trio.abc.Stream) -> None:
        self._manager = aqueduct.connection(link, role="server", linger=0.1)

    async def __aenter__(self) -> aqueduct.Server:
        return await self._manager.__aenter__()

    async def __aexit__(self, *details: object) -> None:
        with suppress(LinkLost):
            await self._manager.__aexit__(None, None, None)


@pytest.mark.requirement("R-38")
async def test_leaving_ends_within_its_time_whatever_the_peer_does_not_do(autojump_clock: MockClock) -> None:
    here, _there = memory.pair()
    began = trio.current_time()
    with pytest.raises(LinkLost, match=r"didn't close the session within 3\.0 s"):
        async with aqueduct.connection(here, linger=3.0) as client:
            await client.entrypoint.send(b"x")
    assert trio.current_time() == began + 3
    async with aqueduct.connection(memory.pair()[0], linger=3.0):
        pass  # nothing was sent, so nothing can be lost
    assert trio.current_time() == began + 6


@pytest.mark.requirement("R-13")
async def test_a_peer_that_never_greets_is_given_up(autojump_clock: MockClock) -> None:
    here, _there = memory.pair()
    async with rough_server(here) as server:
        began = trio.current_time()
        with pytest.raises(LinkLost, match="no connection headers after 10") as caught:
            await server.peer_headers()
        assert trio.current_time() == began + 10
        assert isinstance(caught.value.__cause__, RemoteProtocolError)


async def test_a_peer_that_hangs_up_in_order_leaves_what_it_sent(autojump_clock: MockClock) -> None:
    here, there = memory.pair()
    async with rough_server(there) as server:
        async with aqueduct.connection(here) as client:
            await client.entrypoint.send(b"x")
        await at_rest()
        assert [message.payload for message in await take(server.entrypoint, 1)] == [b"x"]
        with pytest.raises(aqueduct.Finished):
            await server.entrypoint.receive()


@pytest.mark.requirement("R-43")
async def test_nothing_is_left_of_a_connection_and_its_channels(autojump_clock: MockClock) -> None:
    async def live() -> list[weakref.ref[object]]:
        async with connected() as pair:
            back, forth = await carried_sender(pair)
            await back.send(b"x")
            await forth.receive()
            unused = pair.client.channel()
            return [
                weakref.ref(each)
                for each in (connection_of(pair.client), connection_of(pair.server), back, forth, unused[0])
            ]

    references = await live()
    await at_rest(1)
    gc.collect()
    assert [reference() for reference in references] == [None] * 5


@pytest.mark.requirement("R-43")
async def test_channels_leave_nothing_behind_in_a_connection_that_goes_on(autojump_clock: MockClock) -> None:
    async with connected() as pair:
        for _ in range(300):
            back, forth = await carried_sender(pair)
            await back.send(b"x", mode=Mode.UNORDERED)
            await back.finish()
            assert await payloads(forth) == [b"x"]
        await trio.sleep(2)
        assert leftovers(pair) == []
        for side in (pair.client, pair.server):
            assert len(connection_of(side).unsent) == 0
            assert statistics_of(connection_of(side).engine).streams_out <= 3

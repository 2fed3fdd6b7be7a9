"""Every call can be cancelled at each of its checkpoints: no message is split or lost, and the connection goes on."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import Limits
from muxkit.core import Receiving, Sending
from muxkit.protocols import aqueduct
from muxkit.protocols.aqueduct import Config, Mode
from muxkit.runtime import background
from muxkit.runtime.mux_session import connection_of
from muxkit.testing import cancel_sweep
from tests.protocols.aqueduct._session_pairs import (
    TINY,
    at_rest,
    canary,
    carried_receiver,
    carried_sender,
    connected,
    payloads,
    rough,
)

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable

    from trio.testing import MockClock

    from tests.protocols.aqueduct._session_pairs import Pair

    Operation = Callable[[], Awaitable[object]]
    Story = Callable[[Pair], AsyncGenerator[Operation, None]]

LATER = 1.0  # s of virtual time, after which no task runs
FULL = bytes(600)  # two of these fill the window of a TINY channel

STORIES: dict[str, tuple[Story, Limits | None, Config | None, bool]] = {}


def story(
    *, limits: Limits | None = None, config: Config | None = None, is_common: bool = False
) -> Callable[[Story], Story]:
    """Register a story: it yields the call to cancel, then checks the effect. A canary checks the connection then."""

    def add(told: Story) -> Story:
        STORIES[told.__name__] = told, limits, config, is_common
        return told

    return add


class Watched:
    """A call, and whether it came back."""

    def __init__(self, call: Operation) -> None:
        self._call = call
        self.results: list[object] = []

    async def __call__(self) -> None:
        self.results.append(await self._call())

    @property
    def done(self) -> bool:
        return bool(self.results)


@story()
async def a_send_at_once_with_a_ticket(pair: Pair) -> AsyncGenerator[Operation, None]:
    kept, ticket = pair.client.channel()
    watched = Watched(partial(pair.client.entrypoint.send, b"x", attachments=[ticket]))
    yield watched
    assert ticket.spent == watched.done
    if not watched.done:
        await pair.client.entrypoint.send(b"x", attachments=[ticket])
    message = await pair.server.entrypoint.receive()
    assert message.payload == b"x"
    message.sender().close()
    assert await payloads(kept) == []


@story(limits=TINY)
async def a_send_that_has_to_wait(pair: Pair) -> AsyncGenerator[Operation, None]:
    sender, receiver = await carried_receiver(pair)
    kept, ticket = pair.client.channel()
    while sender.half.has_room(600):
        await sender.send(FULL)
    sent = sender.half.machine.messages_sent
    watched = Watched(partial(sender.send, FULL, attachments=[ticket]))

    async def read_later() -> None:
        await trio.sleep(LATER)
        got.extend([message async for message in receiver])

    got: list[aqueduct.Message] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read_later)
        yield watched
        assert ticket.spent == watched.done
        await sender.finish()
    assert len(got) == sent + watched.done
    for message in got:
        message.close()
    kept.close()


@story(config=Config(in_flight=1))
async def a_tracked_send_behind_another(pair: Pair) -> AsyncGenerator[Operation, None]:
    sender, receiver = await carried_receiver(pair)
    await sender.send(b"first")
    watched = Watched(partial(sender.send_tracked, b"second", mode=Mode.UNORDERED))
    yield watched
    await sender.send(b"third")
    await sender.finish()
    assert sorted(await payloads(receiver)) == sorted([b"first", *([b"second"] if watched.done else []), b"third"])


@story()
async def an_unreliable_send(pair: Pair) -> AsyncGenerator[Operation, None]:
    sender, receiver = await carried_receiver(pair)
    watched = Watched(partial(sender.send, b"x", mode=Mode.UNRELIABLE))
    yield watched
    await sender.finish()
    assert await payloads(receiver) == ([b"x"] if watched.done else [])


@story()
async def waiting_for_a_receipt(pair: Pair) -> AsyncGenerator[Operation, None]:
    receipt = await pair.client.entrypoint.send_tracked(b"x")
    yield receipt.arrived
    assert await receipt.arrived() is True
    assert not connection_of(pair.client).receipts
    await pair.server.entrypoint.receive()


@story()
async def sending_many(pair: Pair) -> AsyncGenerator[Operation, None]:
    sender, receiver = await carried_receiver(pair)
    messages = [b"%d" % number for number in range(3000)]
    yield partial(sender.send_many, messages)
    sender.close()
    got: list[bytes] = []
    with suppress(trio.EndOfChannel):
        while True:
            got += [message.payload for message in await receiver.receive_many()]
    assert got == messages[: len(got)]
    assert len(got) == sender.half.machine.messages_sent


@story()
async def receiving(pair: Pair) -> AsyncGenerator[Operation, None]:
    back, forth = await carried_sender(pair)
    watched = Watched(forth.receive)

    async def send_later() -> None:
        await trio.sleep(LATER)
        await back.send(b"x")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(send_later)
        yield watched
        if not watched.done:
            assert (await forth.receive()).payload == b"x"
    await back.finish()
    assert await payloads(forth) == []


@story()
async def receiving_many_that_are_there(pair: Pair) -> AsyncGenerator[Operation, None]:
    back, forth = await carried_sender(pair)
    await back.send_many([b"%d" % number for number in range(10)])
    await at_rest()
    watched = Watched(forth.receive_many)
    yield watched
    await back.finish()
    assert len(await payloads(forth)) == (0 if watched.done else 10)


@story()
async def finishing(pair: Pair) -> AsyncGenerator[Operation, None]:
    back, forth = await carried_sender(pair)
    await back.send(b"last")
    yield back.finish
    if back.state is Sending.OPEN:  # cancelled before it began
        back.close()
    await back.finish()
    assert await payloads(forth) == [b"last"]


@story()
async def closing_both_kinds(pair: Pair) -> AsyncGenerator[Operation, None]:
    back, forth = await carried_sender(pair)
    out, into = await carried_receiver(pair)

    async def close() -> None:
        await back.aclose()
        await into.aclose()

    yield close
    await back.aclose()
    await into.aclose()
    assert await payloads(forth) == []
    with pytest.raises(aqueduct.NoReceiver):
        await out.finish()
    assert into.state is Receiving.CLOSED


@story()
async def the_block_of_a_message(pair: Pair) -> AsyncGenerator[Operation, None]:
    kept, ticket = pair.client.channel()
    await pair.client.entrypoint.send(b"", attachments=[ticket])
    message = await pair.server.entrypoint.receive()

    async def look() -> None:
        async with message:
            await trio.sleep(LATER)

    yield look
    with pytest.raises((aqueduct.Finished, aqueduct.Cancelled)):
        await kept.receive()


@story()
async def waiting_for_headers(pair: Pair) -> AsyncGenerator[Operation, None]:
    yield pair.client.peer_headers
    assert await pair.client.peer_headers() == ()


@story(is_common=True)
async def opening(pair: Pair) -> AsyncGenerator[Operation, None]:
    async def open_one() -> None:
        async with pair.client.open() as channel:
            await channel.send(b"x")

    async with background() as nursery:

        async def close_each() -> None:
            async for channel in pair.server.incoming():
                await channel.aclose()

        nursery.start_soon(close_each)
        yield open_one
        await trio.sleep(LATER)
        assert connection_of(pair.client).live_channels == connection_of(pair.server).live_channels == 0


@story(is_common=True, limits=Limits(channels=8))
async def opening_that_has_to_wait(pair: Pair) -> AsyncGenerator[Operation, None]:
    async def open_one() -> None:
        async with pair.client.open():
            pass

    async with background() as nursery:

        async def close_each() -> None:
            async for channel in pair.server.incoming():
                await channel.aclose()

        async def close_later(channel: aqueduct.Channel) -> None:
            await trio.sleep(LATER)
            await channel.aclose()

        nursery.start_soon(close_each)
        async with pair.client.open() as one, pair.client.open() as other:
            for channel in (one, other):
                nursery.start_soon(close_later, channel)
            yield open_one
            await open_one()
        await trio.sleep(2 * LATER)
        assert connection_of(pair.client).live_channels == connection_of(pair.server).live_channels == 0


@story(is_common=True)
async def taking_what_the_peer_opens(pair: Pair) -> AsyncGenerator[Operation, None]:
    incoming = pair.server.incoming()
    watched = Watched(lambda: anext(incoming))

    async def open_later() -> None:
        await trio.sleep(LATER)
        async with pair.client.open() as channel:
            await channel.send(b"x")

    async with trio.open_nursery() as nursery:
        nursery.start_soon(open_later)
        yield watched
        channel = watched.results[0] if watched.done else await anext(incoming)
        assert isinstance(channel, aqueduct.Channel)
        assert await channel.receive() == b"x"
        await channel.aclose()


@story(is_common=True)
async def shutting_down(pair: Pair) -> AsyncGenerator[Operation, None]:
    async with pair.client.open() as here:
        await here.send(b"x")
        there = await anext(pair.server.incoming())
        yield partial(pair.server.shutdown, grace=LATER)
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):  # it may have been cut
            assert await there.receive() == b"x"


@pytest.mark.requirement("R-31", "R-32", "R-33", "R-34")
@pytest.mark.parametrize("name", STORIES)
async def test_a_call_may_be_cancelled_at_every_step(name: str, autojump_clock: MockClock) -> None:
    told, limits, config, is_common = STORIES[name]
    runs = 0

    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        nonlocal runs
        runs += 1
        async with (
            rough(limits=limits, config=config) if is_common else connected(limits=limits, config=config) as pair
        ):
            steps = asynccontextmanager(told)(pair)
            async with steps as operation:
                yield operation
            if not is_common:
                await canary(pair)

    steps = await cancel_sweep(scenario)
    assert runs == steps + 2


async def test_leaving_may_be_cancelled_at_every_step(autojump_clock: MockClock) -> None:
    @asynccontextmanager
    async def scenario() -> AsyncIterator[Operation]:
        async with background() as nursery:

            async def live() -> None:
                async with rough() as pair:
                    await pair.client.entrypoint.send(b"x")
                    await pair.server.entrypoint.receive()

            nursery.start_soon(trio.sleep_forever)
            yield live

    assert await cancel_sweep(scenario) > 3

"""The fixed conversations that are recorded, several for each protocol.

Most of them do one thing at a time, and pause until it has settled before the next. Their bytes depend on the protocol
and not on the order in which tasks happen to run: `test_recorded.py` runs them with that order shuffled as well.

The `BUSY` ones let tasks and channels compete: bulk, used-up credit, several senders. There the bytes also depend on
the order of tasks, for example on whether two grants of credit are joined into one. A change that leaves the protocol
as it is may move such bytes. Then read the difference, and write the recording again if it is only that.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from functools import partial
from typing import Any, Final, Literal

import attrs
import trio

import muxkit
from muxkit import Channel, ChannelCancelled, ChannelStopped, LinkLost, Session
from muxkit.protocols import aqueduct, bpmux, e3x, relink, restream, yamux
from muxkit.runtime import background
from muxkit.testing import Cut, SimStream, sim_transport
from tests.recorded.wire import Conversation, Wire

SIZES: Final = (0, 1, 2, 63, 64, 127, 128, 200, 255, 256, 1000, 1023)
LARGE: Final = (4096, 16_383, 16_384, 65_535, 65_536, 100_000)
Pair = tuple[Channel, Channel]
Config = bpmux.Config | relink.Config | e3x.Config | yamux.Config

LIMITS: Final = muxkit.Limits(backlog=4, channel_bytes=192 * 1024)  # so that windows grow, but not far
GIVEN_UP: Final = (trio.BrokenResourceError, trio.EndOfChannel, trio.ClosedResourceError)
PAUSE: Final = 0.50321  # virtual s after which everything has settled; longer than any delay before an acknowledgement
BLOCKED: Final = 1.0193  # virtual s after which a task that still waits is blocked
SERVER_KEEPALIVE: Final = 23.7193  # s
CONFIGS: Final[Mapping[str, Config]] = {
    "bpmux": bpmux.Config(),
    "relink": relink.Config(),
    "e3x": e3x.Config(),
    "yamux": yamux.Config(),
}
LINE_UP: Final = 30  # messages in one call
IDLE: Final = 100.0371  # virtual s, which keepalive intervals fit in


def text(size: int, seed: int = 0) -> bytes:
    """Return `size` bytes that compress well and differ by place."""
    line = b"muxkit %d " % seed
    return b"".join(line + b"%d\n" % number for number in range(size // len(line) + 1))[:size]


@asynccontextmanager
async def joined(protocol: str, config: Config | None = None) -> AsyncIterator[tuple[Session, Session]]:
    """Connect a client and a server with the same configuration; they leave in this order."""
    give, take = trio.open_memory_channel[Session](1)
    left = trio.Event()

    async def handle(session: Session) -> None:
        await give.send(session)
        await left.wait()

    url = f"{protocol}+sim://server"
    mine: dict[str, Any] = {}
    theirs: dict[str, Any] = {}
    if protocol in CONFIGS:
        mine["config"] = config or CONFIGS[protocol]
        # The pings of both sides would cross if their intervals were equal.
        theirs["config"] = attrs.evolve(config or CONFIGS[protocol], keepalive=SERVER_KEEPALIVE)
    async with muxkit.open_server(handle, url, limits=LIMITS, **theirs) as server:
        try:
            with suppress(LinkLost):
                async with muxkit.connect(server.url, limits=LIMITS, **mine) as here:
                    there = await take.receive()
                    await trio.sleep(PAUSE)
                    yield here, there
        finally:
            with trio.CancelScope(shield=True):
                await trio.sleep(PAUSE)
            left.set()


@asynccontextmanager
async def on_one_stream(protocol: str) -> AsyncIterator[tuple[Session, Session]]:
    """Run e3x, or a Relink link that ends with its connection, on a byte stream."""

    def run(stream: trio.abc.Stream, role: Literal["connector", "listener"]) -> AbstractAsyncContextManager[Session]:
        keepalive = SERVER_KEEPALIVE if role == "listener" else 20.0
        if protocol == "e3x":
            return e3x.session(stream, role=role, config=e3x.Config(keepalive=keepalive), limits=LIMITS)
        return relink.session(stream, role=role, config=relink.Config(keepalive=keepalive), limits=LIMITS)

    give, take = trio.open_memory_channel[Session](1)
    left = trio.Event()

    async def handle(stream: trio.abc.Stream) -> None:
        with suppress(LinkLost):
            async with run(stream, "listener") as there:
                await give.send(there)
                await left.wait()

    async with background() as nursery:
        await nursery.start(sim_transport.serve, handle, "server")
        async with sim_transport.connect("server") as stream:
            assert isinstance(stream, SimStream)
            async with run(stream, "connector") as here:
                yield here, await take.receive()
        await trio.sleep(PAUSE)
        left.set()


async def opened(one: Session, other: Session, name: str = "", payload: bytes = b"") -> Pair:
    """Open a channel on one side and take it on the other; its first message is `first`."""
    arriving = other.incoming()  # before the opening, because a server's opening in Aqueduct waits for it
    channel = await one.open(name, payload=payload)
    await trio.sleep(PAUSE)
    await channel.send(b"first")
    await trio.sleep(PAUSE)
    taken = await anext(arriving)
    assert (taken.name, taken.opening, await taken.receive()) == (name, payload, b"first")
    await trio.sleep(PAUSE)
    return channel, taken


async def sent(one: Channel, other: Channel, messages: list[bytes]) -> None:
    """Send each message, then receive it.

    The pauses differ, because e3x measures the time until a message is consumed and derives its timers from it. With
    equal pauses a timer would be due at the moment of the next message.
    """
    async with trio.open_nursery() as nursery:
        for number, message in enumerate(messages):
            nursery.start_soon(one.send, message)
            await trio.sleep(PAUSE)
            assert await other.receive() == message
            await trio.sleep(PAUSE + 0.00713 * number)


async def poured(one: Channel, other: Channel, messages: list[bytes]) -> None:
    """Send messages while the other side receives them."""
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            for message in messages:
                await one.send(message)

        nursery.start_soon(send)
        for message in messages:
            assert await other.receive() == message


async def both_closed(pair: Pair) -> None:
    """Finish both directions, one after the other, and read both ends."""
    for one, other in (pair, pair[::-1]):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(one.finish)
            await trio.sleep(PAUSE)
            await ended(other)
        await trio.sleep(PAUSE)
    for channel in pair:
        await channel.aclose()
        await trio.sleep(PAUSE)


async def ended(channel: Channel) -> None:
    """Receive until the channel ends in any way."""
    with suppress(*GIVEN_UP):
        while True:
            await channel.receive()


async def blocked(call: Callable[[], Awaitable[object]]) -> bool:
    """Let a call wait for a while, and cancel it; return whether it still waited."""
    with trio.move_on_after(BLOCKED) as scope:
        await call()
    return scope.cancelled_caught


# ---------------------------------------------------------------------------- every protocol


async def common(wire: Wire, *, protocol: str) -> None:
    """Everything that `muxkit.Session` and `muxkit.Channel` offer, from both sides, then a shutdown by the server."""
    async with joined(protocol) as (here, there):
        for name, one, other in (("client", here, there), ("server", there, here)):
            await messages(wire, name, one, other)
            await endings(wire, name, one, other)
            await refusals(wire, name, one, other)
        await wire.step("idle")
        await trio.sleep(IDLE)
        await wire.step("a channel that lives on during the shutdown")
        pair = await opened(here, there, "late")
        await wire.step("the server shuts down")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(there.shutdown, grace=60.0))
            await wire.step("an opening during the shutdown")
            with suppress(*GIVEN_UP, muxkit.MuxError):
                async with here.open("too late") as channel:
                    await channel.send(b"too late")
                    await blocked(channel.receive)
            await wire.step("the last messages and the end of the channel")
            await sent(*pair, [b"last"])
            await both_closed(pair)
        await wire.step("leave")


async def messages(wire: Wire, name: str, one: Session, other: Session) -> None:
    """Messages of all sizes, one at a time, several in one call, and as a stream."""
    await wire.step(f"{name} opens without a name")
    pair = await opened(one, other)
    await wire.step(f"{name} opens with a name and a payload")
    named = await opened(one, other, "orders/€", b"a payload")
    await wire.step(f"{name} sends messages")
    await sent(*pair, [text(size, number) for number, size in enumerate(SIZES)])
    await wire.step(f"{name} gets the answers")
    await sent(pair[1], pair[0], [text(size, number) for number, size in enumerate(SIZES)])
    await wire.step(f"{name} sends several messages in one call")
    await named[0].send_many([text(number, number) for number in range(LINE_UP)])
    await trio.sleep(PAUSE)
    await wire.step(f"{name} has its messages read in one call")
    assert len(await named[1].receive_many()) == LINE_UP
    await wire.step(f"{name} sends large messages")
    await sent(*named, [text(size, number) for number, size in enumerate(LARGE)])
    await wire.step(f"{name} pings")
    with suppress(muxkit.Unsupported):
        await one.ping()
    await wire.step(f"{name} sends a stream of bytes")
    await named[0].as_stream().send_all(text(5000))
    await trio.sleep(PAUSE)
    stream, got = named[1].as_stream(), 0
    while got < 5000:
        got += len(await stream.receive_some(10_000))
    await wire.step(f"{name} closes both channels")
    await both_closed(pair)
    await both_closed(named)


async def endings(wire: Wire, name: str, one: Session, other: Session) -> None:
    """Every way in which a channel ends."""
    await wire.step(f"{name} half-closes")
    pair = await opened(one, other)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair[0].finish)
        await trio.sleep(PAUSE)
        await ended(pair[1])
    await wire.step(f"{name} gets an answer after its half-close")
    await sent(pair[1], pair[0], [b"answer"])
    await wire.step(f"{name} sees the other half closed")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pair[1].aclose)
        await trio.sleep(PAUSE)
        await ended(pair[0])
    await pair[0].aclose()

    for number, who in enumerate(("the side that opened it", "the other side")):
        await wire.step(f"{name} opens a channel that {who} aborts")
        pair = await opened(one, other)
        for channel in pair:
            await channel.send(b"unread")
            await trio.sleep(PAUSE)
        await wire.step(f"{who} aborts the channel of the {name}")
        pair[number].abort("enough", code=7)
        await wire.step(f"the channel of the {name} is closed after the abort by {who}")
        with suppress(ChannelCancelled, ChannelStopped, *GIVEN_UP):
            await ended(pair[1 - number])
            await pair[1 - number].send(b"in vain")
        for channel in pair:
            await trio.sleep(PAUSE)
            await channel.aclose()

    await wire.step(f"{name} leaves a channel by an error")
    with suppress(ZeroDivisionError):
        async with one.open("error") as channel:
            await channel.send(b"before the error")
            await trio.sleep(PAUSE)
            taken = await anext(aiter(other.incoming()))
            await taken.receive()
            await trio.sleep(PAUSE)
            raise ZeroDivisionError
    await trio.sleep(PAUSE)
    await ended(taken)
    await taken.aclose()

    await wire.step(f"{name} opens a channel whose messages nobody reads")
    pair = await opened(one, other)
    await pair[0].send_many([b"unread"] * 10)
    await wire.step(f"the reader of the channel of the {name} closes it")
    await pair[1].aclose()
    await wire.step(f"{name} closes its end as well")
    with suppress(*GIVEN_UP):
        await pair[0].aclose()


async def refusals(wire: Wire, name: str, one: Session, other: Session) -> None:
    """More channels than may wait for the application."""
    await wire.step(f"{name} opens more channels than may wait")
    channels = []
    for number in range(LIMITS.backlog + 2):
        channel = await one.open(f"{number}")
        await trio.sleep(PAUSE)
        with suppress(*GIVEN_UP):
            await channel.send(b"waits")
        await trio.sleep(PAUSE)
        channels.append(channel)
    await wire.step(f"the channels of the {name} that waited are taken and closed")
    with trio.move_on_after(BLOCKED * 10):
        async for taken in other.incoming():
            await taken.aclose()
            await trio.sleep(PAUSE)
    await wire.step(f"{name} closes its ends")
    for channel in channels:
        with trio.move_on_after(BLOCKED), suppress(*GIVEN_UP):
            await channel.aclose()
        await trio.sleep(PAUSE)


async def leaving(wire: Wire, *, protocol: str) -> None:
    """Leave with a local channel, with one of the peer, and after a shutdown that runs out of time."""
    for whose in ("its own channel", "a channel of the peer"):
        await wire.step(f"connect, to leave with {whose}")
        async with joined(protocol) as (here, there):
            one, other = (here, there) if whose == "its own channel" else (there, here)
            pair = await opened(one, other)
            channel = pair[1] if other is there else pair[0]
            await wire.step(f"leave with {whose}")
            async with background() as nursery:
                nursery.start_soon(ended, channel)
                await trio.sleep(PAUSE)
    await wire.step("connect, to shut down")
    async with joined(protocol) as (here, there):
        pair = await opened(here, there)
        await wire.step("the client shuts down, and a channel doesn't end in time")
        await here.shutdown(grace=3.0)
        await trio.sleep(PAUSE)
        await ended(pair[1])
        await pair[1].aclose()
        await wire.step("leave after the shutdown")


async def left_by_error(wire: Wire, *, protocol: str) -> None:
    """Leave by an error, which the peer is told."""
    with suppress(ZeroDivisionError):
        async with joined(protocol) as (here, there):
            await opened(here, there)
            await wire.step("leave by an error")
            raise ZeroDivisionError


async def busy(wire: Wire, *, protocol: str) -> None:
    """Bulk in both directions, credit that is used up, and channels that compete."""
    async with joined(protocol) as (here, there):
        for name, one, other in (("client", here, there), ("server", there, here)):
            await wire.step(f"{name} opens a channel for bulk")
            pair = await opened(one, other, "bulk")
            await wire.step(f"{name} sends many small messages in one call")
            await pair[0].send_many([text(number % 50, number) for number in range(300)])
            for _ in range(300):
                await pair[1].receive()
            await wire.step(f"{name} sends bulk")
            await poured(*pair, [text(10_000, number) for number in range(20)])
            await wire.step(f"{name} receives bulk")
            await poured(pair[1], pair[0], [text(3000, number) for number in range(40)])
            await wire.step(f"{name} sends until its credit is used up")
            count = 0
            while not await blocked(partial(pair[0].send, text(2000, count))):
                count += 1
                assert count < 5000, "nothing stops this sender"
            await wire.step(f"{name} may send on as its messages are read")
            for number in range(count):
                assert await pair[1].receive() == text(2000, number)
            await wire.step(f"{name} sends after the credit has come back")
            await sent(*pair, [b"goes on"])
            await wire.step(f"{name} closes the channel for bulk")
            await both_closed(pair)
        await wire.step("channels together")
        pairs = [await opened(here, there, f"{number}") for number in range(3)]
        pairs.append(await opened(there, here, "back"))
        async with trio.open_nursery() as nursery:
            for number, pair in enumerate(pairs):
                nursery.start_soon(poured, *pair, [text(size, number) for size in (20_000, 100, 70_000, 5)])
        await wire.step("close")
        for pair in pairs:
            await both_closed(pair)
        await wire.step("leave")


async def short(wire: Wire, *, protocol: str) -> None:
    """Channels from both sides on a byte stream that the application connects itself."""
    async with on_one_stream(protocol) as (here, there):
        for name, one, other in (("client", here, there), ("server", there, here)):
            await wire.step(f"{name} opens a channel")
            pair = await opened(one, other, "orders", b"a payload")
            await wire.step(f"{name} sends messages")
            await sent(*pair, [text(size, number) for number, size in enumerate((*SIZES, *LARGE))])
            await wire.step(f"{name} aborts")
            pair[0].abort("enough", code=7)
            await trio.sleep(PAUSE)
            await ended(pair[1])
            await pair[1].aclose()
        await wire.step("idle")
        await trio.sleep(IDLE)
        await wire.step("leave")


# ---------------------------------------------------------------------------- bpmux


async def bpmux_kinds(wire: Wire) -> None:
    """The kinds of channels that only bpmux has: sinks, sources, requests and top-level messages."""
    async with joined("bpmux") as (one, other):
        assert isinstance(one, bpmux.Session)
        assert isinstance(other, bpmux.Session)
        for name, here, there in (("client", one, other), ("server", other, one)):
            await wire.step(f"{name} sends top-level messages")
            for size in SIZES:
                await here.send(text(size))
                assert await there.receive() == text(size)
            await wire.step(f"{name} opens a sink")
            sink = await here.open_sink(b"sink")
            source, payload = await anext(aiter(there.sources()))
            assert payload == b"sink"
            await sink.send(b"through the sink")
            assert await source.receive() == b"through the sink"
            await wire.step(f"{name} pings about the sink")
            await sink.ping()
            await source.ping()
            await wire.step(f"{name} ends the sink with a payload")
            async with trio.open_nursery() as nursery:
                nursery.start_soon(sink.finish, b"the end")
                with suppress(*GIVEN_UP):
                    await source.receive()
            await source.aclose()
            await wire.step(f"{name} opens a source with credit of its own")
            source = await here.open_source(b"source", credit=10)
            sink, _ = await anext(aiter(there.sinks()))
            await sink.send(b"0123456789")
            assert await blocked(partial(sink.send, b"more"))
            await wire.step(f"{name} grants credit by hand")
            source.give_credit(1000)
            await trio.sleep(BLOCKED)
            await sink.send(b"more")
            assert [await source.receive(), await source.receive()] == [b"0123456789", b"more"]
            await wire.step(f"{name} gives up the source")
            source.abort()
            await trio.sleep(BLOCKED)
            with suppress(*GIVEN_UP):
                await sink.send(b"in vain")
            sink.abort()
            await requests(wire, name, here, there)
        await wire.step("leave")


async def requests(wire: Wire, name: str, here: bpmux.Session, there: bpmux.Session) -> None:
    async with background() as nursery:
        asked = aiter(there.requests())
        await wire.step(f"{name} requests")
        nursery.start_soon(here.request, b"question")
        request = await anext(asked)
        await request.respond(request.payload + b", answer")
        await wire.step(f"the request of the {name} is declined")
        nursery.start_soon(_declined, here)
        await (await anext(asked)).decline(b"no")
        await wire.step(f"{name} cancels a request")
        asking = await here.open_request(b"question", credit=100)
        request = await anext(asked)
        await trio.sleep(BLOCKED)
        asking.abort()
        await request.cancelled()
        request.abort("nobody waits")
        await wire.step(f"{name} requests more than its credit allows")
        asking = await here.open_request(b"question", credit=3)
        request = await anext(asked)
        await blocked(partial(request.respond, b"too long"))
        request.abort("too long")
        await trio.sleep(BLOCKED)


async def _declined(session: bpmux.Session) -> None:
    with suppress(ChannelStopped):
        await session.request(b"question")


async def bpmux_initial_credit(wire: Wire) -> None:
    """No credit that both sides announce ahead, and the mode of the letter of the document."""
    async with joined("bpmux", config=bpmux.Config(initial_credit=0)) as (here, there):
        await both_closed(await opened(here, there))
        await wire.step("leave")
    await wire.step("by the letter")
    async with joined("bpmux", config=bpmux.Config(letter=True)) as (here, there):
        await both_closed(await opened(here, there))
        await wire.step("leave by the letter")


# ---------------------------------------------------------------------------- Relink


async def relink_cuts(wire: Wire) -> None:
    """A link whose connections are cut at rest and with messages under way, and which resumes each time."""
    async with joined("relink") as (here, there):
        pair = await opened(here, there, "lasting")
        for how in (Cut.RESET, Cut.END, Cut.STALL):
            await wire.step(f"cut ({how.value}) at rest")
            wire.cut(how=how)
            await trio.sleep(IDLE)
            await wire.step(f"messages after the cut ({how.value})")
            await sent(*pair, [b"after the cut", text(5000)])
            await sent(pair[1], pair[0], [b"answer"])
            for name, one, other in (("client", *pair), ("server", *pair[::-1])):
                await wire.step(f"cut ({how.value}) with messages of the {name} under way")
                await one.send_many([text(100, number) for number in range(LINE_UP)])
                await trio.sleep(0.005)
                wire.cut(how=how)
                await trio.sleep(IDLE)
                await wire.step(f"the messages of the {name} are read after the cut ({how.value})")
                assert len(await other.receive_many()) == LINE_UP
        await wire.step("close")
        await both_closed(pair)
        await wire.step("cut before the shutdown")
        wire.cut()
        await wire.step("leave")


async def relink_native(wire: Wire) -> None:
    """Senders and receivers with parts, multicast and acknowledgements; then transactions."""
    async with joined("relink") as (one, other):
        assert isinstance(one, relink.Link)
        assert isinstance(other, relink.Link)
        for name, here, there in (("client", one, other), ("server", other, one)):
            await wire.step(f"{name} sends parts")
            senders = [here.sender(number) for number in (0, 1, 7)]
            receivers = [there.receiver(number) for number in (0, 1, 7)]
            receipt = await senders[0].send(b"one", b"", b"three")
            message = await receivers[0].receive()
            assert message.parts == (b"one", b"", b"three")
            await receipt.received()
            await wire.step(f"the message of the {name} is consumed")
            message.consume()
            await receipt.consumed()
            await wire.step(f"{name} multicasts")
            await here.multicast(senders, b"to all", b"in parts")
            for receiver in receivers:
                (await receiver.receive()).consume()
            await wire.step(f"{name} closes its senders")
            for sender in senders:
                await sender.finish()
            for receiver in receivers:
                receiver.close()
        await wire.step("leave")
    await wire.step("with transactions")
    config = relink.Config(connector_transactions=True, listener_transactions=True)
    async with joined("relink", config=config) as (one, other):
        assert isinstance(one, relink.Link)
        assert isinstance(other, relink.Link)
        for name, here, there in (("client", one, other), ("server", other, one)):
            await wire.step(f"{name} commits")
            sender, receiver = here.sender(3), there.receiver(3)
            for number in range(4):
                await sender.send(b"%d" % number)
            receipt = sender.commit()
            message = [await receiver.receive() for _ in range(4)][-1]
            await wire.step(f"the messages of the {name} are committed")
            message.committed()
            await receipt.committed()
            await wire.step(f"{name} rolls back")
            await sender.send(b"not meant")
            await trio.sleep(BLOCKED)
            sender.rollback()
            await wire.step(f"{name} commits a message that can't be processed")
            await sender.send(b"bad")
            receipt = sender.commit()
            message = await receiver.receive()
            message.uncommitted()
            with suppress(relink.NotCommitted):
                await receipt.committed()
            await wire.step(f"a cut during a transaction of the {name}")
            await sender.send(b"undecided")
            await trio.sleep(BLOCKED)
            wire.cut()
            await trio.sleep(10 * PAUSE)
            sender.commit()
            await trio.sleep(PAUSE)
            (await receiver.receive()).committed()
            await wire.step(f"{name} closes its sender")
            await sender.finish()
            receiver.close()
        await wire.step("leave")


# ---------------------------------------------------------------------------- Aqueduct


async def aqueduct_native(wire: Wire) -> None:
    """The entrypoint, attached channels in both directions, message modes, headers, and cancelled halves."""
    async with joined("aqueduct") as (client, server):
        assert isinstance(client, aqueduct.Client)
        assert isinstance(server, aqueduct.Server)
        await wire.step("a message on the entrypoint, with two channels")
        back, to_send = client.channel("receiver", headers=((b"way", b"back"),))
        there, to_receive = client.channel("sender", oneshot=True)
        await client.entrypoint.send(b"hello", headers=((b"key", b"value"),), attachments=(to_send, to_receive))
        message = await server.entrypoint.receive()
        sender, receiver = message.sender(0), message.receiver(1)
        await wire.step("messages in every mode")
        for mode in aqueduct.Mode:
            for size in (0, 1, 1000):
                await sender.send(text(size), mode=mode)
                await trio.sleep(BLOCKED)
                assert (await back.receive()).payload == text(size)
        await wire.step("a tracked message")
        receipt = await sender.send_tracked(b"tracked")
        assert (await back.receive()).payload == b"tracked"
        await receipt.arrived()
        await wire.step("the only message of a oneshot channel")
        await there.send(b"only")
        assert (await receiver.receive()).payload == b"only"
        await wire.step("a channel inside a channel")
        inner, ticket = server.channel("receiver")
        await sender.send(b"inner", attachments=(ticket,))
        inner_sender = (await back.receive()).sender()
        await inner_sender.send(b"from inside")
        assert (await inner.receive()).payload == b"from inside"
        await wire.step("a receiver closes")
        await inner.aclose()
        await trio.sleep(BLOCKED)
        with suppress(*GIVEN_UP):
            await inner_sender.send(b"in vain")
        inner_sender.cancel()
        await wire.step("a sender gives up with a reason")
        sender.cancel("enough", code=7)
        with suppress(*GIVEN_UP):
            await back.receive()
        await wire.step("the entrypoint is finished")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.entrypoint.finish)
            with suppress(*GIVEN_UP):
                await server.entrypoint.receive()
        await wire.step("leave")


# ---------------------------------------------------------------------------- e3x


async def e3x_losses(wire: Wire) -> None:
    """Reliable and unreliable channels, receipts, and packets that are lost and sent again."""
    async with joined("e3x") as (here, there):
        assert isinstance(here, e3x.Session)
        await wire.step("an unreliable channel")
        loose = await here.open("loose", reliable=False)
        await loose.send(b"maybe")
        taken = await anext(aiter(there.incoming()))
        assert await taken.receive() == b"maybe"
        await loose.aclose()
        await taken.aclose()
        await wire.step("a receipt")
        channel = await here.open("sure")
        receipt = await channel.post(b"posted")
        taken = await anext(aiter(there.incoming()))
        assert isinstance(taken, e3x.Channel)
        assert await taken.receive() == b"posted"
        taken.done()
        await receipt.delivered()
        for name, lost in (("to the server", ("client", "server")), ("to the client", ("server", "client"))):
            await wire.step(f"packets {name} are lost")
            await channel.send(b"before")
            assert await taken.receive() == b"before"
            await trio.sleep(PAUSE)
            wire.partition(*lost, one_way=True)
            await channel.send_many([b"lost %d" % number for number in range(5)])
            await trio.sleep(0.2)
            wire.heal()
            await channel.send(b"after")
            await trio.sleep(10 * PAUSE)
            for number in range(5):
                assert await taken.receive() == b"lost %d" % number
            assert await taken.receive() == b"after"
        await wire.step("close")
        await both_closed((channel, taken))
        await wire.step("leave")


# ---------------------------------------------------------------------------- restream


async def restream_streams(wire: Wire) -> None:
    """Numbers, another application's messages, a stateless stream, cuts that resume, a status, errors, a shutdown."""
    async with restream.open_store("memory:") as store, background() as nursery:
        url = "restream+sim://server"
        served = await nursery.start(partial(restream.serve, url, store, random32=lambda: 12345, pace=100.0))
        await wire.step("numbers, cut twice")
        async with restream.numbers(url, count=200, uuid=uuid(1)) as numbers:
            got = []
            async for number in numbers:
                got.append(number)
                if len(got) in (50, 120):
                    wire.cut()
            assert len(got) == 200
            await trio.sleep(PAUSE)
        await wire.step("numbers that a client leaves and another one resumes")
        async with restream.numbers(url, count=30, uuid=uuid(2)) as numbers:
            for _ in range(10):
                await numbers.receive()
            await trio.sleep(PAUSE)
            saved = numbers.snapshot()
        await trio.sleep(BLOCKED)
        async with restream.numbers(url, resume=saved) as numbers:
            assert len([number async for number in numbers]) == 20
        await wire.step("the status of both")
        for number in (1, 2, 3):
            with suppress(restream.StreamRefused):
                await restream.status(url, uuid(number))
        await wire.step("parameters that are refused")
        with suppress(restream.StreamRefused):
            async with restream.stream(url, {"count": -1}, uuid=uuid(4)) as stream:
                await stream.receive()
        await wire.step("a session that doesn't exist")
        with suppress(restream.StreamRefused):
            async with restream.stream(url, uuid=uuid(5)) as stream:
                await stream.receive()
        await wire.step("a shutdown while a client reads")
        async with restream.numbers(url, count=1000, uuid=uuid(6), on_failed=lambda *_: None) as numbers:
            await numbers.receive()
            await served.shutdown(grace=1.0)
            await trio.sleep(BLOCKED)
        nursery.cancel_scope.cancel()


async def restream_stateless(wire: Wire) -> None:
    """Integers of a stateless application, with a cut, and messages that an application feeds."""
    async with restream.open_store("memory:") as store, background() as nursery:
        url = "restream+sim://server"
        serve = partial(restream.serve, url, store, stateless=restream.Doubling(), random32=lambda: 5, pace=10.0)
        await nursery.start(serve)
        await wire.step("integers, cut once")
        async with restream.integers(url) as integers:
            for number in range(40):
                await integers.receive()
                if number == 20:
                    wire.cut()
        nursery.cancel_scope.cancel()


def uuid(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


# ---------------------------------------------------------------------------- all

SESSIONS: Final = ("bpmux", "relink", "aqueduct", "e3x", "yamux")
STEADY: Final[Mapping[str, Conversation]] = {
    **{protocol: partial(common, protocol=protocol) for protocol in SESSIONS},
    **{f"{protocol}-leaving": partial(leaving, protocol=protocol) for protocol in SESSIONS},
    **{f"{protocol}-error": partial(left_by_error, protocol=protocol) for protocol in SESSIONS},
    "relink-stream": partial(short, protocol="relink"),
    "bpmux-kinds": bpmux_kinds,
    "bpmux-initial-credit": bpmux_initial_credit,
    "relink-cuts": relink_cuts,
    "relink-native": relink_native,
    "aqueduct-native": aqueduct_native,
    "e3x-losses": e3x_losses,
    "restream": restream_streams,
    "restream-stateless": restream_stateless,
}
BUSY: Final[Mapping[str, Conversation]] = {
    **{f"{protocol}-busy": partial(busy, protocol=protocol) for protocol in SESSIONS},
    "e3x-stream": partial(short, protocol="e3x"),  # whether two acks are joined depends on the order of tasks
}
CONVERSATIONS: Final[Mapping[str, Conversation]] = {**STEADY, **BUSY}

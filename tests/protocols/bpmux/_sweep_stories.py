"""Stories for the cancel sweep: calls on a channel that are cancelled, and what must hold afterwards."""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from muxkit import ChannelCancelled, ChannelStopped, Limits
from muxkit.core import Sending
from muxkit.runtime.mux_session import connection_of
from tests.protocols.bpmux._pairs import TINY, Pair, at_rest, next_duplex, next_request, next_source
from tests.protocols.bpmux._sessions import LATER, Watched, answer_later, reading_later

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from muxkit.protocols.bpmux import IncomingRequest, Source

    Operation = Callable[[], Awaitable[object]]
    Steps = AsyncGenerator[Operation, None]
    Story = Callable[[Pair], Steps]
    LonelyStory = Callable[[], Steps]

FULL = bytes(3 * TINY.channel_bytes)  # a message that fills the window of its channel

STORIES: dict[str, tuple[Story, tuple[str, ...], Limits | None]] = {}
ALONE: dict[str, tuple[LonelyStory, tuple[str, ...]]] = {}


def sweeps(*names: str, limits: Limits | None = None) -> Callable[[Story], Story]:
    """Register a story: it yields the call to cancel, then checks its effects. It covers the coroutines `names`."""

    def add(story: Story) -> Story:
        STORIES[story.__name__] = story, names, limits
        return story

    return add


def sweeps_alone(*names: str) -> Callable[[LonelyStory], LonelyStory]:
    """Register a story that makes its own sessions."""

    def add(story: LonelyStory) -> LonelyStory:
        ALONE[story.__name__] = story, names
        return story

    return add


# --- sending: cancelled means not sent


@sweeps("Sink.send")
async def a_send_at_once(pair: Pair) -> Steps:
    async with pair.one.open_sink() as sink:
        source = await next_source(pair.other)
        await sink.send(b"first")
        send = Watched(partial(sink.send, b"second"))
        yield send
        await sink.send(b"third")
        await sink.aclose()
        assert [message async for message in source] == [b"first", *([b"second"] if send.done else []), b"third"]


@sweeps("Sink.send", limits=TINY)
async def a_send_that_waits(pair: Pair) -> Steps:
    async for step in _waits(pair, b"second"):
        yield step


@sweeps("Sink.send", limits=TINY)
async def a_send_in_parts_that_waits(pair: Pair) -> Steps:
    async for step in _waits(pair, b"second" + FULL):
        yield step


@sweeps("Sink.send", limits=TINY)
async def an_empty_send_that_waits(pair: Pair) -> Steps:
    async for step in _waits(pair, b""):
        yield step


@sweeps("Sink.send_many", limits=TINY)
async def a_send_of_many(pair: Pair) -> Steps:
    messages = [b"%d" % number * 100 for number in range(30)]
    async with pair.one.open_sink() as sink, reading_later(pair.other) as got:
        send = Watched(partial(sink.send_many, messages))
        yield send
        await sink.finish()
    assert got == messages[: len(got)]
    assert not send.done or got == messages


@sweeps("Session.send", "Session.receive")
async def top_level_messages(pair: Pair) -> Steps:
    sent: list[bytes] = []
    got: list[bytes] = []

    async def exchange() -> None:
        for message in (b"a", b"b"):
            await pair.one.send(message)
            sent.append(message)
            got.append(await pair.other.receive())

    yield exchange
    await pair.one.send(b"end")
    while not got or got[-1] != b"end":
        got.append(await pair.other.receive())
    assert got == [*sent, b"end"]


@sweeps("Sink.wait_for_room", limits=TINY)
async def waiting_for_room(pair: Pair) -> Steps:
    async with pair.one.open_sink() as sink, reading_later(pair.other) as got:
        await sink.send(FULL)
        yield sink.wait_for_room
        await sink.send(b"next")
        await sink.finish()
    assert got == [FULL, b"next"]


@sweeps("Sink.finish")
async def a_finish(pair: Pair) -> Steps:
    async with pair.one.open_sink() as sink, reading_later(pair.other) as got:
        await sink.send(b"before")
        finish = Watched(sink.finish)
        yield finish
        assert not finish.done or sink.state is Sending.CLOSED
        await sink.finish()
    assert got == [b"before"]


@sweeps("Sink.finish", limits=TINY)
async def a_finish_that_waits_for_room(pair: Pair) -> Steps:
    async with pair.one.open_sink() as sink, trio.open_nursery() as nursery:
        source = await next_source(pair.other)
        got: list[bytes] = []

        async def read_later() -> None:
            await trio.sleep(LATER)
            got.append(await source.receive())

        nursery.start_soon(read_later)
        await sink.send(FULL)
        yield partial(sink.finish, bytes(500))
        is_open = sink.state is Sending.OPEN
        if is_open:  # cancelled while it waited: nothing was ended
            await sink.send(b"next")
            assert await source.receive() == b"next"
        await sink.aclose()
        with pytest.raises(trio.EndOfChannel if is_open else ChannelCancelled):
            await source.receive()
        assert got == [FULL]


@sweeps("Sink.aclose", "Sink.wait_over")
async def a_close(pair: Pair) -> Steps:
    async with pair.one.open_sink() as sink, reading_later(pair.other) as got:
        await sink.send(b"before")

        async def close() -> None:
            await sink.aclose()
            await sink.wait_over()

        yield close
        assert sink.state is not Sending.OPEN
        await sink.wait_over()
    assert got == [b"before"]


# --- receiving: nothing is lost


@sweeps("Source.receive")
async def a_receive(pair: Pair) -> Steps:
    async for step in _receives(pair, lambda source: source.receive()):
        yield step


@sweeps("Source.receive_many")
async def a_receive_of_many(pair: Pair) -> Steps:
    async for step in _receives(pair, lambda source: source.receive_many(2)):
        yield step


@sweeps("Source.aclose")
async def a_source_that_closes(pair: Pair) -> Steps:
    async with pair.one.open_sink() as sink:
        source = await next_source(pair.other)
        await sink.send(b"unread")
        yield source.aclose
        await at_rest()
        with pytest.raises(ChannelStopped):
            await sink.send(b"more")


# --- duplexes and byte streams


@sweeps(*(f"Duplex.{name}" for name in ("send", "send_many", "receive", "receive_many", "finish", "aclose")))
async def a_conversation(pair: Pair) -> Steps:
    async with pair.one.open() as here:
        there = await next_duplex(pair.other)
        sent: list[bytes] = []
        heard: list[bytes] = []
        came_back: list[bytes] = []

        async def echo() -> None:
            async for message in there:
                heard.append(message)
                await there.send(message)
            await there.aclose()

        async def talk() -> None:
            await here.send(b"1")
            sent.append(b"1")
            came_back.append(await here.receive())
            await here.send_many([b"2", b"3"])
            sent.extend([b"2", b"3"])
            came_back.extend(await here.receive_many(1))
            await here.finish()
            came_back.append(await here.receive())
            await here.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo)
            yield talk
            here.sink.close()
            with suppress(trio.ClosedResourceError):  # it may be over on this side already
                came_back.extend([message async for message in here])
        assert heard == [b"1", b"2", b"3"][: len(heard)]
        assert heard[: len(sent)] == sent
        assert came_back == heard


@sweeps("ByteStream.send_all", "ByteStream.wait_send_all_might_not_block", limits=TINY)
async def sending_bytes(pair: Pair) -> Steps:
    data = bytes(range(250)) * 1000
    async with pair.one.open() as here, trio.open_nursery() as nursery:
        stream, got = here.as_stream(), bytearray()
        other = (await next_duplex(pair.other)).as_stream()

        async def read() -> None:
            await trio.sleep(LATER)
            while piece := await other.receive_some():
                got.extend(piece)
            await other.aclose()

        async def send() -> None:
            await stream.wait_send_all_might_not_block()
            await stream.send_all(data)

        nursery.start_soon(read)
        sending = Watched(send)
        yield sending
        await stream.send_all(b"end")
        await stream.send_eof()
    assert got.endswith(b"end")
    assert bytes(got[:-3]) == data[: len(got) - 3]
    assert not sending.done or len(got) == len(data) + 3


@sweeps("ByteStream.receive_some")
async def receiving_bytes(pair: Pair) -> Steps:
    async with pair.one.open() as here, trio.open_nursery() as nursery:
        stream = here.as_stream()
        other = await next_duplex(pair.other)

        async def send() -> None:
            await trio.sleep(LATER)
            await other.send_many([b"abc", b"def"])
            await other.aclose()

        nursery.start_soon(send)
        receive: Watched[bytes] = Watched(partial(stream.receive_some, 2))
        yield receive
        got = b"".join(receive.results)
        while piece := await stream.receive_some():
            got += piece
        assert got == b"abcdef"


@sweeps("ByteStream.send_eof", "ByteStream.aclose")
async def ending_bytes(pair: Pair) -> Steps:
    async with pair.one.open() as here:
        stream = here.as_stream()
        other = (await next_duplex(pair.other)).as_stream()
        await stream.send_all(b"before")

        async def end() -> None:
            await stream.send_eof()
            await stream.aclose()

        yield end
        await stream.aclose()
        assert await other.receive_some() == b"before"
        assert await other.receive_some() == b""
        await other.aclose()


# --- requests


@sweeps("Session.request")
async def a_question(pair: Pair) -> Steps:
    async for step in _asks(pair, b"a"):
        yield step


@sweeps("Session.request", limits=TINY)
async def a_question_and_an_answer_in_parts(pair: Pair) -> Steps:
    async for step in _asks(pair, FULL):
        yield step


@sweeps("Request.response", "Request.aclose", "Session.open_request")
async def waiting_for_an_answer(pair: Pair) -> Steps:
    async with pair.one.open_request(b"a") as request, trio.open_nursery() as nursery:
        nursery.start_soon(answer_later, await next_request(pair.other))
        yield request.response
        assert await request.response() == b"aa"  # a task that stops waiting does not cancel the request
        await request.aclose()


@sweeps("IncomingRequest.respond")
async def an_answer(pair: Pair) -> Steps:
    async with pair.one.open_request(credit=0) as request, trio.open_nursery() as nursery:
        asked = await next_request(pair.other)

        async def grant() -> None:
            await trio.sleep(LATER)
            request._entity.give_credit(10)
            connection_of(pair.one).request_write()

        nursery.start_soon(grant)
        first = Watched(partial(asked.respond, b"first"))
        yield first
        if not first.done:
            await asked.respond(b"second")
        assert await request.response() == (b"first" if first.done else b"second")


@sweeps("IncomingRequest.decline")
async def a_refusal(pair: Pair) -> Steps:
    async with pair.one.open_request() as request:
        asked = await next_request(pair.other)
        yield asked.decline
        await asked.decline()
        with pytest.raises(ChannelStopped):
            await request.response()


@sweeps("IncomingRequest.cancelled", "IncomingRequest.__aenter__", "IncomingRequest.__aexit__")
async def work_that_is_not_needed_any_more(pair: Pair) -> Steps:
    async with pair.one.open_request() as request, trio.open_nursery() as nursery:
        asked = await next_request(pair.other)

        async def withdraw() -> None:
            await trio.sleep(LATER)
            request.abort()

        async def work() -> None:
            async with asked:
                await asked.cancelled()

        nursery.start_soon(withdraw)
        yield work
        await asked.cancelled()


async def _waits(pair: Pair, second: bytes) -> Steps:
    async with pair.one.open_sink() as sink, reading_later(pair.other) as got:
        await sink.send(FULL)
        send = Watched(partial(sink.send, second))
        yield send
        await sink.send(b"third")
        await sink.finish()
    assert got == [FULL, *([second] if send.done else []), b"third"]


async def _asks(pair: Pair, question: bytes) -> Steps:
    async with trio.open_nursery() as nursery:
        heard: list[IncomingRequest] = []

        async def answer() -> None:
            async for asked in pair.other.requests():
                heard.append(asked)
                nursery.start_soon(answer_later, asked)

        nursery.start_soon(answer)
        asking = Watched(partial(pair.one.request, question))
        yield asking
        assert asking.results in ([], [2 * question])
        for asked in heard:
            await asked.cancelled()  # the peer knows that no response is needed
        assert await pair.one.request(b"b") == b"bb"
        nursery.cancel_scope.cancel()


async def _receives(pair: Pair, call: Callable[[Source], Awaitable[bytes | list[bytes]]]) -> Steps:
    messages = [b"one", b"two", b"three"]
    async with pair.one.open_sink() as sink, trio.open_nursery() as nursery:
        source = await next_source(pair.other)

        async def send() -> None:
            await trio.sleep(LATER)
            await sink.send_many(messages)
            await sink.aclose()

        nursery.start_soon(send)
        receive = Watched(lambda: call(source))
        yield receive
        got: list[bytes] = []
        for result in receive.results:
            got.extend(result if isinstance(result, list) else [result])
        assert [*got, *[message async for message in source]] == messages

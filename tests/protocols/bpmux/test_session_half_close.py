"""A peer that ends its direction of the byte stream, and still reads, receives what this side owes it.

The document asks for an ordered, reliable, bidirectional channel and says nothing about the end of one direction. So a
client may send a request, shut down its side of the socket, and read the response. The peers here are bare sockets.
"""

from __future__ import annotations

import random
import ssl
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

import muxkit
from muxkit import ChannelCancelled, ChannelStopped, LinkLost
from muxkit.core import Cursor
from muxkit.protocols import bpmux
from muxkit.protocols.bpmux import Chunk, Config, Partial, Type, parse_chunk
from muxkit_adapters import memory
from tests.adapters._links import PATIENCE, Certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from trio.testing import MockClock

    Handler = Callable[[bpmux.Session], Awaitable[None]]

REQUEST_5 = bytes.fromhex("18 05 00 64")  # Out-Request 5: no payload, and 100 bytes of credit for the response
STREAM_7 = bytes.fromhex("98 07 00 64")  # Out-Stream 7: this side sends on it, with 100 bytes of credit
DUPLEX_9 = bytes.fromhex("d8 09 00 64")  # Duplex 9, with 100 bytes of credit
FINISH_9 = bytes.fromhex("42 09 00")  # Out-Sink 9 ends: the peer sends no more on it
UNFINISHED = bytes.fromhex("52 09")  # the first two bytes of a chunk


async def answer_after_the_end(session: bpmux.Session) -> None:
    """Collect everything that the peer opens until its direction ends, and serve it only then."""
    requests: list[bpmux.IncomingRequest] = []
    sinks: list[bpmux.Sink] = []
    channels: list[bpmux.Duplex] = []
    async with trio.open_nursery() as nursery:

        async def collect_requests() -> None:
            with suppress(LinkLost):
                async for request in session.requests():
                    requests.append(request)  # noqa: PERF401 - a comprehension would lose them all with the error

        async def collect_sinks() -> None:
            with suppress(LinkLost):
                async for sink, _ in session.sinks():
                    sinks.append(sink)

        async def collect_channels() -> None:
            with suppress(LinkLost):
                async for channel in session.incoming():
                    channels.append(channel)  # noqa: PERF401 - as above

        for collect in (collect_requests, collect_sinks, collect_channels):
            nursery.start_soon(collect)
    for request in requests:
        await request.respond(b"answer")
    for sink in sinks:
        await sink.send(b"news")
        await sink.aclose()
    for channel in channels:
        assert [message async for message in channel] == []
        for part in (b"one", b"two"):
            await channel.send(part)
            await trio.lowlevel.checkpoint()
        await channel.aclose()


async def sleep_long(_: bpmux.Session) -> None:
    await trio.sleep(1000)


async def rest_of(stream: trio.abc.ReceiveStream) -> list[Chunk]:
    """Read until the end of the stream, and return its chunks."""
    data = b""
    while part := await stream.receive_some(65536):
        data += part
    cursor, chunks = Cursor(data), []
    while cursor.remaining:
        chunk = parse_chunk(cursor)
        if not isinstance(chunk, Partial):
            chunks.append(chunk)
    return chunks


def of(chunks: list[Chunk], type: Type, id: int) -> list[Chunk]:
    """Return the chunks about one entity that carry a payload or an end."""
    about = [chunk for chunk in chunks if (chunk.type, chunk.id) == (type, id)]
    return [chunk for chunk in about if chunk.payload is not None or chunk.end is not None]


@asynccontextmanager
async def half_closed(transport: str, handler: Handler, sent: bytes, folder: Path) -> AsyncIterator[trio.abc.Stream]:
    """A peer of a server with this handler that has sent these bytes, and ended its direction."""
    if transport == "mem":
        here, there = memory.pair()

        async def serve() -> None:
            with suppress(LinkLost):
                async with bpmux.session(there) as session:
                    await handler(session)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            await here.send_all(sent)
            await here.send_eof()
            yield here
        return
    address = {"unix": f"unix://{folder}/socket", "tcp": "tcp://127.0.0.1:0", "tls": "tls://127.0.0.1:0"}[transport]
    certificates = Certificates()
    options = {"ssl_context": certificates.server()} if transport == "tls" else {}
    async with muxkit.open_server(handler, f"bpmux+{address}", **options) as server:  # type: ignore[arg-type]
        if transport == "unix":
            socket: trio.SocketStream = await trio.open_unix_socket(f"{folder}/socket")
        else:
            socket = await trio.open_tcp_stream("127.0.0.1", int(server.url.rpartition(":")[2]))
        async with socket:
            if transport == "tls":
                client = CloseNotify(socket, certificates.client())
                await client.send_and_end(sent)
                yield client
            else:
                await socket.send_all(sent)
                await socket.send_eof()
                yield socket


class CloseNotify(trio.abc.Stream):
    """A TLS client that can end its own direction by close_notify, and read on."""

    def __init__(self, socket: trio.SocketStream, context: ssl.SSLContext) -> None:
        self._socket = socket
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    async def _call(self, step: Callable[[], object]) -> object:
        while True:
            try:
                return step()
            except ssl.SSLWantReadError:
                await self._flush()
                came = await self._socket.receive_some()
                assert came, "the server ended without close_notify"
                self._incoming.write(came)
            finally:
                await self._flush()

    async def _flush(self) -> None:
        if self._outgoing.pending:
            await self._socket.send_all(self._outgoing.read())

    async def send_and_end(self, data: bytes) -> None:
        await self._call(self._tls.do_handshake)
        assert self._tls.version() == "TLSv1.3"
        await self._call(lambda: self._tls.write(data))
        with suppress(ssl.SSLWantReadError):  # it would wait for the answer
            self._tls.unwrap()
        await self._flush()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        try:
            received = await self._call(lambda: self._tls.read(65536))
        except ssl.SSLZeroReturnError:  # the server's close_notify
            return b""
        assert isinstance(received, bytes)
        return received

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        raise NotImplementedError

    async def wait_send_all_might_not_block(self) -> None:
        raise NotImplementedError

    async def aclose(self) -> None:
        await self._socket.aclose()


TRANSPORTS = ("tcp", "unix", "tls", "mem")


@pytest.mark.requirement("R-47")
@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_request_is_answered_after_the_peer_has_ended_its_direction(transport: str, tmp_path: Path) -> None:
    async with half_closed(transport, answer_after_the_end, REQUEST_5, tmp_path) as peer:
        with trio.fail_after(PATIENCE):
            chunks = await rest_of(peer)
    assert [chunk.payload for chunk in of(chunks, Type.IN_REQUEST, 5)] == [b"answer"]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_stream_that_the_peer_opened_goes_on_to_its_end(transport: str, tmp_path: Path) -> None:
    async with half_closed(transport, answer_after_the_end, STREAM_7, tmp_path) as peer:
        with trio.fail_after(PATIENCE):
            chunks = await rest_of(peer)
    assert [(chunk.payload, chunk.end) for chunk in of(chunks, Type.IN_SINK, 7)] == [(b"news", None), (None, b"")]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_duplex_that_the_peer_has_finished_goes_on_to_its_end(transport: str, tmp_path: Path) -> None:
    async with half_closed(transport, answer_after_the_end, DUPLEX_9 + FINISH_9, tmp_path) as peer:
        with trio.fail_after(PATIENCE):
            chunks = await rest_of(peer)
    sent = [(chunk.payload, chunk.end) for chunk in of(chunks, Type.IN_SINK, 9)]
    assert sent == [(b"one", None), (b"two", None), (None, b"")]


async def test_everything_that_is_owed_is_sent_before_the_connection_ends(tmp_path: Path) -> None:
    sent = REQUEST_5 + STREAM_7 + DUPLEX_9 + FINISH_9
    async with half_closed("tcp", answer_after_the_end, sent, tmp_path) as peer:
        with trio.fail_after(PATIENCE):
            chunks = await rest_of(peer)
    assert len(of(chunks, Type.IN_REQUEST, 5)) == 1
    assert len(of(chunks, Type.IN_SINK, 7)) == 2
    assert len(of(chunks, Type.IN_SINK, 9)) == 3


async def test_each_request_answers_a_peer_that_sends_no_more(tmp_path: Path) -> None:
    ended = trio.Event()

    async def answer(request: muxkit.IncomingRequest) -> None:
        await ended.wait()
        await request.respond(b"late")

    async def handle(session: bpmux.Session) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(muxkit.each_request(answer), session)
            with suppress(LinkLost):
                async for _ in session:
                    pass
            ended.set()

    async with half_closed("tcp", handle, REQUEST_5, tmp_path) as peer:
        with trio.fail_after(PATIENCE):
            chunks = await rest_of(peer)
    assert [chunk.payload for chunk in of(chunks, Type.IN_REQUEST, 5)] == [b"late"]


@asynccontextmanager
async def served(
    sent: bytes, handler: Handler, *, config: Config | None = None
) -> AsyncIterator[tuple[memory.MemoryStream, list[BaseException]]]:
    """A peer in memory that has sent these bytes and ended its direction, and what the session ended with."""
    here, there = memory.pair(capacity=2000)
    errors: list[BaseException] = []

    async def serve() -> None:
        try:
            async with bpmux.session(there, config=config) as session:
                await handler(session)
        except LinkLost as error:
            errors.append(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await here.send_all(sent)
        await here.send_eof()
        yield here, errors


@pytest.mark.parametrize("sent", [b"", DUPLEX_9, REQUEST_5 + bytes.fromhex("02 05 00"), REQUEST_5 + UNFINISHED])
async def test_the_connection_ends_with_the_peers_direction_when_nothing_is_owed(
    sent: bytes, autojump_clock: MockClock
) -> None:
    """Nothing is owed on a duplex that was cut off, to a request that was cancelled, and behind half a chunk."""
    async with served(sent, sleep_long) as (peer, _):
        started = trio.current_time()
        await rest_of(peer)
        assert trio.current_time() < started + 5


async def test_what_waits_for_the_peer_fails_when_its_direction_ends(autojump_clock: MockClock) -> None:
    """A response, a message and a pong cannot come any more, though a response is still owed to the peer."""
    failed: list[str] = []

    async def handle(session: bpmux.Session) -> None:
        (request,) = [await anext(session.requests())]

        async def expect_loss(name: str, call: Callable[[], Awaitable[object]]) -> None:
            with pytest.raises(LinkLost) as caught:
                await call()
            assert caught.value.by == "peer"
            failed.append(name)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(expect_loss, "request", lambda: session.request(b""))
            nursery.start_soon(expect_loss, "receive", session.receive)
            nursery.start_soon(expect_loss, "ping", session.ping)
        await expect_loss("open", lambda: session.open().__aenter__())
        await expect_loss("late ping", session.ping)
        await expect_loss("send", lambda: session.send(b""))
        await request.respond(b"answer")

    async with served(REQUEST_5, handle) as (peer, _):
        chunks = await rest_of(peer)
    assert sorted(failed) == ["late ping", "open", "ping", "receive", "request", "send"]
    assert len(of(chunks, Type.IN_REQUEST, 5)) == 1


async def test_an_answer_beyond_the_credit_ends_the_connection_since_no_credit_can_come(
    autojump_clock: MockClock,
) -> None:
    async def handle(session: bpmux.Session) -> None:
        request = await anext(session.requests())
        with pytest.raises(LinkLost):
            await session.receive()
        await request.respond(bytes(101))

    async with served(REQUEST_5, handle) as (peer, errors):
        started = trio.current_time()
        await rest_of(peer)
        assert trio.current_time() < started + 5
    (error,) = errors
    assert isinstance(error, LinkLost)
    assert error.unsent == 1


async def test_a_sender_without_credit_fails_since_no_credit_can_come(autojump_clock: MockClock) -> None:
    failed = trio.Event()

    async def handle(session: bpmux.Session) -> None:
        sink, _ = await anext(session.sinks())
        await sink.send(bytes(100))
        with pytest.raises(LinkLost):
            await sink.send(b"x")
        failed.set()

    async with served(STREAM_7, handle) as (peer, _):
        await rest_of(peer)
    assert failed.is_set()


async def test_finish_does_not_wait_for_a_confirmation_that_cannot_come(autojump_clock: MockClock) -> None:
    """While another stream was owed something, the session went on, and `finish` waited for ever."""

    async def handle(session: bpmux.Session) -> None:
        opened: list[bpmux.Sink] = []
        with suppress(LinkLost):
            async for sink, _ in session.sinks():
                opened.append(sink)
        for sink in opened:
            await sink.send(b"news")
            with pytest.raises(LinkLost):
                await sink.finish()

    async with served(STREAM_7 + bytes.fromhex("98 0b 00 64"), handle) as (peer, _):
        with trio.fail_after(3600):
            chunks = await rest_of(peer)
    for id in (7, 11):
        assert [(chunk.payload, chunk.end) for chunk in of(chunks, Type.IN_SINK, id)] == [(b"news", None), (None, b"")]


async def test_the_cost_of_an_answer_does_not_grow_with_those_that_were_given(
    autojump_clock: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 4,000 requests each answer looked at all those before it, 5,365,749 in all: a second of CPU for 16 KB."""
    looked_at = 0
    owes = bpmux.Engine.expects_answer

    def counted(engine: bpmux.Engine, entity: bpmux.Entity) -> bool:
        nonlocal looked_at
        looked_at += 1
        return owes(engine, entity)

    monkeypatch.setattr(bpmux.Engine, "expects_answer", counted)
    ids = [id.to_bytes() for id in range(1, 2 * 63 + 1, 2)]
    sent = b"".join(b"\x18" + id + b"\x00\x64" for id in ids)
    count = len(ids)

    async def handle(session: bpmux.Session) -> None:
        waiting: list[bpmux.IncomingRequest] = []
        with suppress(LinkLost):
            async for request in session.requests():
                waiting.append(request)  # noqa: PERF401 - as above
        assert len(waiting) == count
        for request in waiting:
            await request.respond(b"answer")
            await trio.testing.wait_all_tasks_blocked()

    async with served(sent, handle) as (peer, _):
        await rest_of(peer)
    assert looked_at <= 10 * count


@pytest.mark.parametrize(("keepalive", "most"), [(10, 31), (None, 61)])
async def test_a_peer_that_is_gone_is_noticed_while_it_is_owed_an_answer(
    keepalive: float | None, most: float, autojump_clock: MockClock
) -> None:
    """A process that was killed looks the same as one that reads on, until something is sent to it.

    That holds without keepalive, too: the session reads no more, so nothing else would ever notice it.
    """

    async def handle(session: bpmux.Session) -> None:
        request = await anext(session.requests())
        await request.cancelled()
        await session.ping()  # raises why the connection is lost

    with trio.fail_after(3600):
        async with served(REQUEST_5, handle, config=Config(keepalive=keepalive, keepalive_timeout=10)) as (
            peer,
            errors,
        ):
            await trio.testing.wait_all_tasks_blocked()
            await peer.aclose()
            started = trio.current_time()
    assert trio.current_time() - started < most
    (error,) = errors
    assert isinstance(error, LinkLost)
    assert error.by == "peer"


async def test_a_peer_that_takes_nothing_is_given_up_while_it_is_owed_bytes(autojump_clock: MockClock) -> None:
    credit = bytes.fromhex("98 07 00 f9 ff ff")  # Out-Stream 7 with 65,535 bytes of credit, more than the link holds

    async def handle(session: bpmux.Session) -> None:
        sink, _ = await anext(session.sinks())
        with suppress(LinkLost):
            await sink.send(bytes(60_000))
            await sink.finish()

    async with served(credit, handle, config=Config(keepalive=10, keepalive_timeout=10)) as (_, errors):
        started = trio.current_time()
    assert trio.current_time() - started < 60
    assert len(errors) == 1


async def test_a_peer_that_takes_nothing_keeps_its_time_without_keepalive(autojump_clock: MockClock) -> None:
    credit = bytes.fromhex("98 07 00 f9 ff ff")  # as above
    hours = 3600.0

    async def handle(session: bpmux.Session) -> None:
        sink, _ = await anext(session.sinks())
        await sink.send(bytes(60_000))
        await sink.aclose()
        await trio.sleep(2 * hours)  # leaving would give the peer only `linger` seconds

    async with served(credit, handle, config=Config(keepalive=None)) as (peer, _):
        await trio.sleep(hours)
        chunks = await rest_of(peer)
    assert sum(len(chunk.payload or b"") for chunk in of(chunks, Type.IN_SINK, 7)) == 60_000


@pytest.mark.requirement("R-47")
async def test_what_is_being_written_when_the_peers_direction_ends_still_arrives(autojump_clock: MockClock) -> None:
    """The engine owes nothing any more then: its last message and the end of the stream have left it."""
    here, there = memory.pair(capacity=2000)
    credit = bytes.fromhex("98 07 00 f9 ff ff")  # as above

    async def serve() -> None:
        async with bpmux.session(there, config=Config(keepalive=None)) as session:
            sink, _ = await anext(session.sinks())
            await sink.send(bytes(60_000))
            await sink.aclose()
            await trio.sleep_forever()  # leaving would write everything in any case

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        await here.send_all(credit)
        await trio.testing.wait_all_tasks_blocked()
        await here.send_eof()
        await trio.testing.wait_all_tasks_blocked()
        chunks = await rest_of(here)
        nursery.cancel_scope.cancel()
    sent = of(chunks, Type.IN_SINK, 7)
    assert sum(len(chunk.payload or b"") for chunk in sent) == 60_000
    assert sent[-1].end is not None


async def test_a_client_that_is_cancelled_asks_for_no_answer(autojump_clock: MockClock) -> None:
    """Its end would otherwise look like that of a peer that reads on."""
    here, there = memory.pair()
    cancelled_after: list[float] = []
    started = trio.current_time()

    async def handle(request: muxkit.IncomingRequest) -> None:
        try:
            await trio.sleep(1000)
        finally:
            cancelled_after.append(trio.current_time() - started)

    async with trio.open_nursery() as nursery:

        async def serve() -> None:
            with suppress(LinkLost):
                async with bpmux.session(there) as session:
                    await muxkit.each_request(handle)(session)

        nursery.start_soon(serve)
        with trio.move_on_after(3):
            async with bpmux.session(here) as session:
                await session.request(b"")
    assert cancelled_after == [3]


CONVERSATION = [REQUEST_5, STREAM_7, DUPLEX_9, FINISH_9, bytes.fromhex("a8 00 f9 ff ff"), bytes.fromhex("62 00 00")]


def damaged(dice: random.Random) -> bytes:
    """Return parts of a conversation in any order, often with a flipped bit, a cut, or bytes that were repeated."""
    data = bytearray(b"".join(dice.sample(CONVERSATION, dice.randint(1, len(CONVERSATION)))))
    for _ in range(dice.choice((0, 1, 1, 2))):
        at = dice.randrange(len(data) or 1)
        match dice.randrange(3):
            case 0:
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                del data[at:]
                data += b"\0"
            case _:
                data[at:at] = data[at : at + dice.randint(1, 8)]
    return bytes(data)


@pytest.mark.seeds(40, soak=20_000)
async def test_a_damaged_conversation_that_ends_in_one_direction_ends_the_session_in_time(
    seed: int, autojump_clock: MockClock
) -> None:
    """Whatever the peer says before its direction ends, the session neither raises anything else nor stays."""

    async def answer_what_can_be_answered(session: bpmux.Session) -> None:
        with suppress(ChannelCancelled, ChannelStopped):
            await answer_after_the_end(session)

    dice = random.Random(seed)
    reads = dice.random() < 0.7
    config = Config(keepalive=10, keepalive_timeout=10)
    async with served(damaged(dice), answer_what_can_be_answered, config=config) as (peer, errors):
        started = trio.current_time()
        if reads:
            with suppress(trio.BrokenResourceError):
                while await peer.receive_some(65536):
                    pass
        else:
            await peer.aclose()
    assert trio.current_time() - started < 60
    assert len(errors) <= 1

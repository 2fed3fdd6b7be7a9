"""Peers that break a rule in mid-conversation: local code gets a loss, and the log a line without a traceback.

An honest conversation is recorded, changed at random, and replayed at a side that is sending at that moment. So the
rules are broken at every point of the conversation: between channels that open, wait, end and are given up.
"""

from __future__ import annotations

import logging
import random
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs
import pytest
import trio
import trio.testing

import muxkit
from muxkit import Limits
from muxkit._handlers import each_channel, is_loss
from muxkit._server import _Connections
from muxkit.cli.transfer.files import Folder, serve_folder
from muxkit.forward import handler as forwarding
from muxkit.protocols import aqueduct, bpmux, e3x, relink, restream
from muxkit.runtime import background, leaves_of, may_log
from muxkit.runtime._log_pace import LINES_AT_ONCE
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path
    from types import ModuleType
    from typing import Literal

    from trio.testing import MockClock

    from muxkit.runtime import Channel, Session

    Role = Literal["client", "server"]
    Handle = Callable[[trio.abc.Stream], Awaitable[object]]

pytestmark = pytest.mark.requirement("R-19")

CONVERSATIONS = 12  # per seed
TRANSACTIONS = relink.Config(connector_transactions=True, listener_transactions=True)


class Heard:
    """The errors that handlers and the bodies of sessions got, and the records that were logged."""

    def __init__(self) -> None:
        self.surprises: list[BaseException] = []
        self.records: list[logging.LogRecord] = []

    def error(self, error: BaseException, *, of_channel: bool = True) -> None:
        """Note an error that local code got, unless it is a loss, or follows from what that code did before."""
        expected = (trio.ClosedResourceError, relink.NotCommitted)
        self.surprises += [
            leaf
            for leaf in leaves_of(error)
            if not is_loss(leaf, of_channel=of_channel) and not isinstance(leaf, (*expected, trio.Cancelled))
        ]


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[Heard]:
    with caplog.at_level(logging.INFO, "muxkit"):
        made = Heard()
        yield made


# --- what both sides do with a session


async def talk(session: Session, heard: Heard, dice: random.Random) -> None:
    """Open channels, send on them while something comes, and end them in different ways; note the errors."""

    async def use(channel: Channel) -> None:
        async with background() as nursery:
            nursery.start_soon(pour, channel, heard)
            for _ in range(dice.randrange(4)):
                await channel.receive()
        match dice.randrange(3):
            case 0:
                await channel.finish()
            case 1:
                channel.abort("enough")
            case _:
                await channel.aclose()

    async def one() -> None:
        try:
            async with session.open("name") as channel:
                await use(channel)
        except Exception as error:
            heard.error(error)

    async with background() as nursery:
        nursery.start_soon(answer_all, session, heard)
        async with trio.open_nursery() as opening:
            for _ in range(3):
                opening.start_soon(one)
        await trio.sleep(1)  # for the channels of the peer


async def answer_all(session: Session, heard: Heard) -> None:
    try:
        await each_channel(partial(echo, heard=heard))(session)
    except Exception as error:
        heard.error(error)


async def pour(channel: Channel, heard: Heard) -> None:
    try:
        for size in range(0, 600, 40):
            await channel.send(bytes(size))
    except Exception as error:
        heard.error(error)


async def echo(channel: Channel, heard: Heard) -> None:
    try:
        async with background() as nursery:
            nursery.start_soon(pour, channel, heard)
            async for message in channel:
                await channel.send(message)
        await channel.finish()
    except Exception as error:
        heard.error(error)
        raise


async def talk_natively(link: relink.Link, heard: Heard, dice: random.Random) -> None:
    """Send and receive in transactions, with multicasts."""

    async def send(number: int) -> None:
        try:
            async with link.sender(number) as sender:
                for turn in range(6):
                    await sender.send(b"some", b"parts", bytes(dice.randrange(900)))
                    if turn % 2:
                        await sender.commit().committed()
        except Exception as error:
            heard.error(error)

    async def receive() -> None:
        try:
            async for receiver in link.receivers():
                nursery.start_soon(process, receiver)
        except Exception as error:
            heard.error(error)

    async def process(receiver: relink.Receiver) -> None:
        try:
            async for message in receiver:
                message.committed() if dice.random() < 0.8 else message.uncommitted()
        except Exception as error:
            heard.error(error)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        async with trio.open_nursery() as sending:
            for number in range(3):
                sending.start_soon(send, number)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()


async def ask(session: bpmux.Session, heard: Heard, dice: random.Random) -> None:
    """Answer the peer's requests and make some."""

    async def answer(request: muxkit.IncomingRequest) -> None:
        try:
            await request.respond(request.payload)
        except Exception as error:
            heard.error(error)
            raise

    async def answer_requests() -> None:
        try:
            await muxkit.each_request(answer)(session)
        except Exception as error:
            heard.error(error)

    async def request() -> None:
        try:
            with trio.move_on_after(1):
                await session.request(bytes(dice.randrange(3000)))
        except Exception as error:
            heard.error(error)

    async with background() as nursery:
        nursery.start_soon(answer_requests)
        async with trio.open_nursery() as asking:
            for _ in range(4):
                asking.start_soon(request)
        await trio.sleep(1)


# --- the conversations


@attrs.frozen
class Conversation:
    """How a session is made on a stream, what is done with it, and which bytes at the begin are left as they are."""

    session: Callable[[Any, Role], AbstractAsyncContextManager[Any]]
    talk: Callable[..., Awaitable[None]] = talk
    spared: int = 0

    async def run(self, stream: trio.abc.Stream, role: Role, heard: Heard, dice: random.Random) -> None:
        async def body(session: Any) -> None:  # noqa: ANN401 - of any protocol
            try:
                await self.talk(session, heard, dice)
            except Exception as error:
                heard.error(error)
                raise

        if role == "server":
            await _Connections(self.session, body).handle(stream)
            return
        try:
            async with self.session(stream, role) as session:
                await body(session)
        except Exception as error:
            heard.error(error, of_channel=False)


def of(protocol: ModuleType, **options: Any) -> Callable[[Any, Role], AbstractAsyncContextManager[Any]]:
    settings: dict[str, Any] = {"address": "", "limits": Limits(), "observer": None, "linger": 1.0, **options}
    return lambda stream, role: protocol.protocol.session(stream, role=role, **settings)


CONVERSATIONS_OF = {
    "bpmux": Conversation(of(bpmux)),
    "bpmux-requests": Conversation(of(bpmux), ask),
    "relink": Conversation(of(relink), spared=32),
    "relink-transactions": Conversation(of(relink, config=TRANSACTIONS), talk_natively, spared=32),
    "aqueduct": Conversation(of(aqueduct), spared=10),
    "e3x": Conversation(of(e3x)),
}


class Recorded(trio.abc.HalfCloseableStream):
    """A stream that keeps the bytes that were sent on it."""

    def __init__(self, inner: memory.MemoryStream) -> None:
        self._inner = inner
        self.sent = bytearray()

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        self.sent += data
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        return bytes(await self._inner.receive_some(max_bytes))

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def aclose(self) -> None:
        await self._inner.aclose()


def mutated(data: bytes | bytearray, dice: random.Random, spared: int) -> bytes:
    """Return the bytes with one to three changes behind the first ones, which are spared."""
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 2, 3))):
        at = dice.randrange(min(spared, len(changed) - 1), len(changed))
        match dice.randrange(4):
            case 0:
                changed[at] ^= 1 << dice.randrange(8)
            case 1:
                del changed[at : at + dice.randrange(1, 20)]
            case 2:
                changed[at:at] = dice.randbytes(dice.randrange(1, 20))
            case _:
                other = dice.randrange(len(changed))
                changed[at:at] = changed[other : other + dice.randrange(1, 64)]
        if len(changed) <= spared:
            break
    return bytes(changed)


async def replay(data: bytes, serve: Handle, dice: random.Random) -> None:
    """Feed these bytes to a side in pieces, and let it hang up, or hang up, at the end."""
    ours, theirs = memory.pair()
    with trio.fail_after(120):
        async with background() as nursery:
            over = trio.Event()

            async def run() -> None:
                await serve(theirs)
                over.set()

            async def drain() -> None:
                try:
                    while await ours.receive_some():
                        pass
                except (trio.BrokenResourceError, trio.ClosedResourceError):
                    pass

            nursery.start_soon(run)
            nursery.start_soon(drain)
            position = 0
            try:
                while position < len(data):
                    size = dice.randrange(1, 300)
                    await ours.send_all(data[position : position + size])
                    position += size
                    if dice.random() < 0.3:
                        await trio.sleep(dice.choice((0, 0.001)))
                await trio.sleep(dice.choice((0, 1)))
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass
            await ours.aclose()
            await over.wait()


def check(heard: Heard, records: list[logging.LogRecord], conversations: int) -> None:
    """Check that only losses came out, and that the log has a line per conversation at most and no traceback."""
    assert heard.surprises == []
    assert not [record.getMessage() for record in records if record.exc_info or "\n" in record.getMessage()]
    written = [record.getMessage() for record in records if not record.getMessage().endswith("log each of them")]
    assert len(written) <= conversations, written


@pytest.mark.seeds(2, soak=100)
@pytest.mark.parametrize("role", ["client", "server"])
@pytest.mark.parametrize("name", [*CONVERSATIONS_OF])
async def test_a_broken_conversation_is_a_loss_and_one_line_in_the_log(
    name: str, role: Role, seed: int, heard: Heard, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    dice = random.Random(f"{name} {role} {seed}")
    conversation = CONVERSATIONS_OF[name]
    one, other = memory.pair()
    recorded = Recorded(one)
    peer: Role = "server" if role == "client" else "client"
    with trio.fail_after(100):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(conversation.run, recorded, peer, heard, random.Random(seed))
            nursery.start_soon(conversation.run, other, role, heard, random.Random(seed))
    caplog.clear()
    for _ in range(CONVERSATIONS):
        data = mutated(recorded.sent, dice, conversation.spared)
        await replay(data, lambda stream: conversation.run(stream, role, heard, random.Random(seed)), dice)
    check(heard, caplog.records, CONVERSATIONS)


# --- servers with a protocol of their own inside


@asynccontextmanager
async def recording(serve: Handle) -> AsyncIterator[Recorded]:
    one, other = memory.pair()
    async with background() as nursery:
        nursery.start_soon(serve, other)
        yield Recorded(one)


@pytest.mark.seeds(2, soak=100)
async def test_broken_requests_for_forwards_and_files_cost_a_line_each(
    seed: int, tmp_path: Path, heard: Heard, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    (tmp_path / "file").write_bytes(bytes(30_000))
    files = serve_folder(Folder(tmp_path), upload=True, overwrite=True)
    handlers: dict[str, Callable[[Channel], Awaitable[None]]] = {"muxkit.forward": forwarding(["127.0.0.1:1"])}
    dice = random.Random(seed)

    async def handle(channel: Channel) -> None:
        try:
            await handlers.get(channel.name, files)(channel)
        except Exception as error:
            heard.error(error)
            raise

    async def serve(stream: trio.abc.Stream) -> None:
        await _Connections(of(bpmux), each_channel(handle)).handle(stream)

    async with recording(serve) as stream, of(bpmux)(stream, "client") as session:
        for name, messages in (
            ("muxkit.forward", [b"{}"]),
            ("files", [b'{"op":"list"}', b'{"op":"get"}']),
            ("files", [b'{"op":"get","path":"ZmlsZQ=="}', b'{"have":0}', b'{"position":0}']),
        ):
            async with session.open(name, payload=b'{"type":"connect","target":"127.0.0.1:1"}') as channel:
                try:
                    for message in messages:
                        await channel.send(message)
                    with trio.move_on_after(1):
                        await channel.receive_many()
                except (trio.BrokenResourceError, trio.EndOfChannel):
                    pass
    caplog.clear()
    for _ in range(CONVERSATIONS):
        await replay(mutated(stream.sent, dice, 0), serve, dice)
    check(heard, caplog.records, 3 * CONVERSATIONS)  # each conversation has three channels that may be refused


@pytest.mark.seeds(2, soak=100)
async def test_broken_requests_to_a_restream_server_cost_a_line_each(
    seed: int, heard: Heard, caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    dice = random.Random(seed)
    lines = [b'{"uuid":"4a6e6c3e-98a4-4b9f-8d8c-5d7b8a0f7a11","params":{"count":50}}\n', b'{"ack":3}\n', b'{"ack":7}\n']
    async with restream.open_store("memory:") as store:
        service = restream.Service(store)
        for _ in range(CONVERSATIONS):
            await replay(mutated(b"".join(lines), dice, 0), service.handle, dice)
    check(heard, caplog.records, CONVERSATIONS)


# --- a rush of them


async def test_lines_that_peers_cause_are_paced_and_counted(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    caplog.set_level(logging.WARNING, "muxkit")
    for _ in range(3):
        assert sum(may_log("peers that broke a rule") for _ in range(1000)) >= 1
        await trio.sleep(1)
    assert [record.getMessage() for record in caplog.records] == [
        f"peers that broke a rule: {1000 - LINES_AT_ONCE} more were too many to log each of them",
        "peers that broke a rule: 999 more were too many to log each of them",
    ]
    assert may_log("something else")


async def test_a_handler_that_a_peer_makes_fail_again_and_again_is_traced_once_per_minute(
    caplog: pytest.LogCaptureFixture, autojump_clock: MockClock
) -> None:
    async def fail(channel: Channel) -> None:
        raise KeyError(channel.name)

    async def open_one(session: Session) -> None:
        async with session.open("x") as channel:
            with pytest.raises(muxkit.ChannelCancelled):
                await channel.receive()

    one, other = memory.pair()
    async with background() as nursery:
        nursery.start_soon(_Connections(of(bpmux), each_channel(fail)).handle, other)
        async with of(bpmux)(one, "client") as session:
            for _ in range(LINES_AT_ONCE + 20):
                await open_one(session)
            told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
            assert len(told) == 1 + LINES_AT_ONCE
            assert [bool("\n" in line) for line in told] == [True] + [False] * LINES_AT_ONCE
            await trio.sleep(61)
            await open_one(session)
    last = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR][-1]
    assert "\n" in last

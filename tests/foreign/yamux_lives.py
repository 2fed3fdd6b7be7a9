"""Random conversations over yamux with a program of another implementation, which serves the verbs of `yamux_go`."""

from __future__ import annotations

import hashlib
import subprocess
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Literal

import trio

import muxkit
from muxkit.protocols import yamux
from muxkit.runtime import leaves_of
from tests.foreign.wire import note

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from muxkit.protocols.yamux import Session, YamuxStream

Role = Literal["client", "server"]

AT_ONCE = 12  # lives at the same time
LARGEST = 1024 * 1024
FOLLOWING = 5.0  # seconds that a peer has to end after its connection broke
UNREAD = 200_000  # bytes that fit into the first window, as a peer that has left reads nothing more


def pattern(size: int, seed: int) -> bytes:
    """Return what the peers send for `source` and `open`."""
    return bytes((index * 7 + (index >> 8) + seed) & 0xFF for index in range(size))


def some_size(dice: Random) -> int:
    """Return a size from 1 byte to 1 MiB, small ones as often as large ones."""
    return min(LARGEST, int(2 ** dice.uniform(0, 20.01)))


async def read_all(stream: YamuxStream) -> bytes:
    pieces = [piece async for piece in stream]
    return b"".join(pieces)


async def send_in_pieces(stream: YamuxStream, data: bytes, dice: Random) -> None:
    while data:
        size = some_size(dice)
        await stream.send_all(data[:size])
        data = data[size:]
    await stream.send_eof()


async def echo(session: Session, dice: Random) -> None:
    data = dice.randbytes(some_size(dice))
    async with session.open_stream() as stream:
        await stream.send_all(b"echo\n")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_in_pieces, stream, data, dice)
            assert await read_all(stream) == data


async def digest(session: Session, dice: Random) -> None:
    data = dice.randbytes(some_size(dice))
    async with session.open_stream() as stream:
        await stream.send_all(b"digest %d\n" % dice.randrange(20))
        await send_in_pieces(stream, data, dice)
        answer = await read_all(stream)
        assert answer == b"%d %s\n" % (len(data), hashlib.sha256(data).hexdigest().encode()), f"{len(data)}: {answer!r}"


async def source(session: Session, dice: Random) -> None:
    size, seed = some_size(dice) // 8 + 1, dice.randrange(256)
    async with session.open_stream() as stream:
        await stream.send_all(b"source %d %d\n" % (size, seed))
        assert await read_all(stream) == pattern(size, seed)


async def reset(session: Session, dice: Random) -> None:
    """Break a conversation off in its middle."""
    stream = await session.open_stream()
    await stream.send_all(dice.choice([b"echo\n", b"source %d 1\n" % LARGEST, b"ec"]))
    if dice.random() < 0.7:
        await stream.send_all(dice.randbytes(some_size(dice) // 8 + 1))
    if dice.random() < 0.5:
        with trio.move_on_after(dice.random() / 50):
            await stream.receive_some()
    stream.abort()


async def leave(session: Session, dice: Random) -> None:
    """The peer closes the stream while more data comes."""
    size = dice.randrange(UNREAD)
    async with session.open_stream() as stream:
        await stream.send_all(b"leave %d\n" % dice.randrange(size + 1))
        await stream.send_all(dice.randbytes(size))
        assert await read_all(stream) == b""


async def called_back(session: Session, dice: Random) -> None:
    """The peer opens streams to this side, which echoes them."""
    async with session.open_stream() as stream:
        await stream.send_all(b"open %d %d\n" % (dice.randrange(1, 6), some_size(dice) // 4 + 1))
        assert await read_all(stream) == b"ok\n"


async def ping(session: Session, dice: Random) -> None:
    assert await session.ping() > 0
    async with session.open_stream() as stream:
        await stream.send_all(b"ping\n")
        assert await read_all(stream) == b"ok\n"


LIVES = {each.__name__: each for each in (echo, digest, source, reset, leave, called_back, ping)}


async def echo_back(session: Session) -> None:
    """Serve the streams that the peer opens."""

    async def serve(stream: YamuxStream) -> None:
        async with stream:
            async for piece in stream:
                await stream.send_all(piece)

    async with trio.open_nursery() as nursery:
        async for stream in session.streams():
            nursery.start_soon(serve, stream)


async def line_of(process: trio.Process) -> str:
    """Return the next line that the peer prints, or "" if it has ended."""
    assert process.stdout is not None  # as it is a pipe
    line = b""
    while not line.endswith(b"\n"):
        byte = await process.stdout.receive_some(1)
        if not byte:
            break
        line += byte
    return line.decode().strip()


class CutAfter(trio.abc.HalfCloseableStream):
    """A stream whose connection breaks after a number of sent bytes."""

    def __init__(self, stream: trio.SocketStream, left: int) -> None:
        self._stream = stream
        self._left = left

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        part = data[: self._left]
        await self._stream.send_all(part)
        self._left -= len(part)
        if not self._left:
            await self._stream.aclose()
            raise trio.BrokenResourceError("the test has cut the connection")

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._stream.send_eof()

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        return await self._stream.receive_some(max_bytes)

    async def aclose(self) -> None:
        await self._stream.aclose()


@asynccontextmanager
async def meet(command: Sequence[str], role: Role, cut_after: int | None = None) -> AsyncIterator[Session]:
    """Start the peer as a process, and run a session with it in which this side has the role.

    With `cut_after` the connection breaks after that many bytes, and the block hears of it.
    """
    start = partial(trio.run_process, capture_stdout=False, stdout=subprocess.PIPE, check=cut_after is None)
    async with trio.open_nursery() as nursery:
        if role == "client":
            process = await nursery.start(start, [*command, "server", "127.0.0.1:0"])
            stream = await trio.open_tcp_stream("127.0.0.1", int(await line_of(process)))
        else:
            (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
            address = f"127.0.0.1:{listener.socket.getsockname()[1]}"
            process = await nursery.start(start, [*command, "client", address])
            stream = await listener.accept()
            await listener.aclose()
        link = stream if cut_after is None else CutAfter(stream, cut_after)
        try:
            async with yamux.session(link, role=role) as session:
                yield session
        except Exception as error:
            lost = (muxkit.LinkLost, trio.BrokenResourceError)
            if cut_after is None or not all(isinstance(each, lost) for each in leaves_of(error)):
                raise
        if cut_after is None:
            assert (await line_of(process)).startswith("over"), "the peer didn't notice the end of the session"
            return
        with trio.move_on_after(FOLLOWING) as scope:
            await process.wait()
        if scope.cancelled_caught:  # py-libp2p sometimes doesn't notice that its connection broke
            process.kill()


async def cut_short(
    command: Sequence[str], peer: str, role: Role, count: int, without: frozenset[str] = frozenset()
) -> None:
    """Meet the peer again and again, each time over a connection that breaks in the middle of some lives."""
    dice = Random(count)
    for _ in range(count):
        async with meet(command, role, cut_after=int(2 ** dice.uniform(1, 18))) as session:
            await live(session, 1000, dice.getrandbits(32), without)
        note(f"yamux, {peer}", role, (), cuts=1)


def note_lives(peer: str, role: Role, count: int) -> None:
    """Note conversations for the table of the referee."""
    for _ in range(count):
        note(f"yamux, {peer}", role, ())


async def live(session: Session, count: int, seed: int, without: frozenset[str] = frozenset()) -> Counter[str]:
    """Run many random lives, several at the same time; return how many of each kind there were."""
    dice = Random(seed)
    done: Counter[str] = Counter()
    kinds = [kind for kind in LIVES if kind not in without]
    orders = iter([(dice.choice(kinds), dice.getrandbits(32)) for _ in range(count)])

    async def some() -> None:
        for kind, number in orders:
            await LIVES[kind](session, Random(number))
            done[kind] += 1

    async with trio.open_nursery() as nursery:
        nursery.start_soon(echo_back, session)
        async with trio.open_nursery() as lives:
            for _ in range(AT_ONCE):
                lives.start_soon(some)
        nursery.cancel_scope.cancel()
    return done

"""A server process that reports on itself, and raw connections of a hostile peer to it.

    hostile.py '{"urls": ["bpmux+tcp://127.0.0.1:0"], "limits": {"channels": 100}, "linger": 0.5}'

The server writes one JSON object a line: its URLs, how each session ended, and an answer to each command. How it
treats a channel is chosen by the opening payload (see `Host.channel`), a session by its top-level messages.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import socket
import ssl
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, cast

import trio

import muxkit
from muxkit.core import Cursor, NeedMore
from muxkit.protocols.bpmux import Chunk, Partial, Type, encode_chunk, parse_chunk
from muxkit.runtime.mux_session import connection_of
from tests._tasks import living_tasks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
    from types import TracebackType

    from muxkit.protocols.bpmux import IncomingRequest, Session, Sink, Source

CANARY = b"zq7-the-payload-nobody-may-log-7qz"
PATIENCE = 300.0  # s; reached only when something hangs, however slow or busy the machine is
KIB, MIB = 1024, 1024 * 1024
PONG = b"\xa0\x00"  # about the top level


# --- the server process


def say(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


class Host:
    """One session on the server."""

    def __init__(self, session: Session, linger: float, most: int) -> None:
        self.session = session
        self.most = most
        self.linger = linger
        self.handlers = 0

    async def run(self) -> None:
        session = self.session
        asked, taking = "goodbye", trio.CancelScope()

        async def take() -> None:
            with taking:
                async with trio.open_nursery() as takers:
                    for each in (self.duplexes, self.sources, self.sinks, self.requests):
                        takers.start_soon(each)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take)
            with suppress(muxkit.LinkLost, trio.EndOfChannel):
                asked = await self.top(taking)
                taking.cancel()
        try:
            if asked == "shutdown":
                await session.shutdown(grace=self.linger)
            if connection_of(session).pump.is_lost:
                raise connection_of(session).pump.loss()
        except muxkit.LinkLost as error:
            self.report(error)
        else:
            say(leaving=port_of(session.info.peer), asked=asked)

    def report(self, error: muxkit.LinkLost) -> None:
        cause = error.__cause__
        fields: dict[str, object] = {"reason": error.reason, "by": error.by, "unsent": error.unsent}
        if isinstance(cause, muxkit.RemoteProtocolError):
            fields |= {"rule": cause.rule, "limit": cause.limit, "offset": cause.offset}
        fields["cause"] = None if cause is None else type(cause).__name__
        fields["text"] = f"{error} / {cause}"
        say(over=port_of(self.session.info.peer), handlers=self.handlers, **fields)

    async def top(self, scope: trio.CancelScope) -> str:
        while True:
            order = await self.session.receive()
            if order == b"stall":  # take nothing that is opened from now on
                scope.cancel()
            elif order in (b"leave", b"shutdown"):
                scope.cancel()
                return order.decode()

    async def duplexes(self) -> None:
        await muxkit.each_channel(self.channel, max_concurrent=self.most)(self.session)

    async def channel(self, channel: muxkit.Channel) -> None:
        self.handlers += 1
        HANDLERS.append(1)
        try:
            # Only bpmux's own channel has an opening payload; the server serves nothing else.
            how = getattr(channel, "opening", b"")[:5]
            if how == b"stall":
                await connection_of(self.session).pump.hung_up.wait()
                return
            if how == b"fail!":
                raise ValueError("the handler does not like this channel")
            async for message in channel:
                if how == b"tell!":
                    say(got=message.hex())
                else:
                    await channel.send(message)
        finally:
            self.handlers -= 1
            HANDLERS.pop()

    async def sources(self) -> None:
        async with trio.open_nursery() as nursery:
            with suppress(muxkit.LinkLost):
                async for source, opening in self.session.sources():
                    nursery.start_soon(self.source, source, opening)

    async def source(self, source: Source, opening: bytes) -> None:
        async with source:
            if opening == b"stall":
                await connection_of(self.session).pump.hung_up.wait()
                return
            with suppress(muxkit.LinkLost, muxkit.ChannelCancelled):
                async for _ in source:
                    pass

    async def sinks(self) -> None:
        async with trio.open_nursery() as nursery:
            with suppress(muxkit.LinkLost):
                async for sink, opening in self.session.sinks():
                    nursery.start_soon(self.sink, sink, opening)

    async def sink(self, sink: Sink, opening: bytes) -> None:
        with suppress(trio.BrokenResourceError):
            while opening == b"push":
                await sink.send(bytes(64 * KIB))
            await sink.wait_over()

    async def requests(self) -> None:
        async with trio.open_nursery() as nursery:
            with suppress(muxkit.LinkLost):
                async for request in self.session.requests():
                    nursery.start_soon(self.request, request)

    async def request(self, request: IncomingRequest) -> None:
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError):
            async with request:
                await request.respond(request.payload)


HANDLERS: list[int] = []


async def main(urls: list[str], limits: dict[str, Any], linger: float, certificate: str | None) -> None:
    options: dict[str, Any] = {"limits": muxkit.Limits(**limits), "linger": linger}
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    if certificate is not None:
        context.load_cert_chain(certificate)

    async def watch_leaving(session: Session, began: float, age: float) -> None:
        await connection_of(session).pump.hung_up.wait()
        say(
            left=port_of(session.info.peer),
            seconds=trio.current_time() - began,
            lived=lived.seconds() - age,
            reason=connection_of(session).pump.loss().reason,
        )

    async def handle(common: muxkit.Session) -> None:
        session = cast("Session", common)  # the URLs of these tests name bpmux
        await Host(session, linger, options["limits"].channels).run()
        nursery.start_soon(watch_leaving, session, trio.current_time(), lived.seconds())

    lived = Lifetime()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lived.run)
        servers = []
        for url in urls:
            more = {"ssl_context": context} if "+tls:" in url or "+wss:" in url else {}
            servers.append(await nursery.start(lambda task_status, url=url, more=more: muxkit.serve(
                handle, url, task_status=task_status, **options, **more)))  # fmt: skip
        say(urls=[server.url for server in servers])
        async with trio.lowlevel.FdStream(os.dup(0)) as commands:
            async for _ in commands:
                gc.collect()
                say(
                    looked=True,
                    tasks=living_tasks(),
                    descriptors=len(os.listdir("/proc/self/fd")),
                    sessions=sum(len(server.sessions()) for server in servers),
                    handlers=len(HANDLERS),
                )
        nursery.cancel_scope.cancel()


class Lifetime:
    """How long this process was there to do anything: time in which it was stopped, or others had the processor,
    counts as one tick at most, but what it computed counts in full."""

    TICK = 0.01  # s

    def __init__(self) -> None:
        self._seconds = 0.0
        self._mark()

    def _mark(self) -> None:
        self._seen, self._busy = trio.current_time(), time.process_time()

    def seconds(self) -> float:
        passed, computed = trio.current_time() - self._seen, time.process_time() - self._busy
        self._seconds += min(passed, self.TICK + computed)
        self._mark()
        return self._seconds

    async def run(self) -> None:
        while True:
            await trio.sleep(self.TICK)
            self.seconds()


def port_of(text: str) -> int:
    """Of a URL, or of what a session says about its peer: `tcp 127.0.0.1:7000`."""
    place = text.rpartition("://")[2].split()[-1]
    return int(place.partition("/")[0].rpartition(":")[2])


# --- for the tests: the process, seen from outside


class Server:
    """A server process; everything that it says is kept."""

    def __init__(
        self, log: Path, *, urls: tuple[str, ...] = ("bpmux+tcp://127.0.0.1:0",), certificate: str | None = None,
        linger: float = 0.5, limits: Mapping[str, float] | None = None,
    ) -> None:  # fmt: skip
        limits = limits or {}
        arguments = {"urls": urls, "limits": limits, "linger": linger, "certificate": certificate}
        self.limits = muxkit.Limits(**limits)  # type: ignore[arg-type]  # numbers, as declared
        self.linger = linger
        self.log = log
        self.handlers_fail = False  # then there may be tracebacks in the log
        with log.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, __file__, json.dumps(arguments)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            )  # fmt: skip
        self._said: queue.Queue[dict[str, Any]] = queue.Queue()
        self._kept: list[dict[str, Any]] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self.urls: list[str] = self.hear("urls")["urls"]
        self.url = self.urls[0]
        self.port = port_of(self.url)
        self.at_rest = self.look()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put({"ended": True})

    def hear(self, key: str, value: object = None) -> dict[str, Any]:
        """The first thing it said, or says, with this key (and value)."""
        while True:
            for said in self._kept:
                if key in said and value in (None, said[key]):
                    self._kept.remove(said)
                    return said
            said = self._said.get(timeout=PATIENCE)
            assert "ended" not in said, f"the server process ended: {self.log.read_text()[-2000:]}"
            self._kept.append(said)

    def take(self, key: str) -> list[dict[str, Any]]:
        """What it has said with this key, as far as it was heard."""
        found = [said for said in self._kept if key in said]
        self._kept = [said for said in self._kept if key not in said]
        return found

    def forget(self, port: int) -> None:
        """A new peer has this port: what was said of an earlier one that had it is no answer about this one."""
        while not self._said.empty():
            self._kept.append(self._said.get_nowait())
        self._kept = [said for said in self._kept if port not in (said.get("over"), said.get("left"))]

    async def over(self, peer: Raw) -> dict[str, Any]:
        """How the session with this peer was lost."""
        return await trio.to_thread.run_sync(self.hear, "over", peer.port)

    async def left(self, peer: Raw) -> dict[str, Any]:
        return await trio.to_thread.run_sync(self.hear, "left", peer.port)

    def look(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(b"?")
        self.process.stdin.flush()
        return self.hear("looked")

    async def rests(self) -> None:
        """Wait until nothing is left of what came; raises AssertionError if something stays."""
        found: dict[str, Any] = {}
        with trio.move_on_after(PATIENCE / 2):
            while found != self.at_rest:
                found = self.look()
                await trio.sleep(0.01)
        assert found == self.at_rest, f"{found} left of {self.at_rest}"

    def memory(self) -> int:
        """Resident bytes now."""
        pages = Path(f"/proc/{self.process.pid}/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")

    @contextmanager
    def growth(self) -> Iterator[Growth]:
        """How much more memory it had, at most, during the block."""
        self.look()
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5", encoding="ascii")
        growth, before = Growth(), self.memory()
        yield growth
        status = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii")
        peak = next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM"))
        growth.bytes = int(peak) * KIB - before

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.process.wait()
            self._listener.join(PATIENCE)
            self.process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.close()
        log = self.log.read_bytes()
        assert CANARY not in log, [line[:400] for line in log.split(b"\n") if CANARY in line]
        if kind is None:
            assert self.process.returncode == 0
            failures = [line for line in log.decode().splitlines() if line.startswith(("ERROR", "Traceback"))]
            assert self.handlers_fail or not failures, "\n".join(failures)


class Growth:
    bytes = 0


ANSWER_SECONDS = 0.2


class Raw:
    """A connection that says whatever it likes."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self.stream = stream
        self.port: int = stream.socket.getsockname()[1]
        self.got = bytearray()
        self._parsed = 0

    async def send(self, *parts: bytes) -> bool:
        """Whether it went out; False once the server has hung up."""
        try:
            await self.stream.send_all(b"".join(parts))
        except trio.BrokenResourceError:
            return False
        return True

    async def flood(self, data: bytes, times: int) -> bool:
        """The same again and again, until the server hangs up."""
        at_once = max(1, 128 * KIB // len(data))
        for sent in range(0, times, at_once):
            if not await self.send(data * min(at_once, times - sent)):
                return False
        return True

    async def read(self) -> bytes:
        try:
            data = bytes(await self.stream.receive_some(64 * KIB))
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            data = b""
        self.got += data
        return data

    async def read_all(self) -> bytes:
        """Until the server hangs up."""
        with trio.fail_after(PATIENCE):
            while await self.read():
                pass
        return bytes(self.got)

    async def chunk(self) -> Chunk | None:
        """The next chunk from the server; None at the end."""
        while True:
            cursor = Cursor(bytes(self.got), self._parsed)
            with suppress(NeedMore):
                chunk = parse_chunk(cursor)
                self._parsed = cursor.position
                if isinstance(chunk, Partial):
                    continue
                return chunk
            if not await self.read():
                return None

    def chunks(self) -> list[Chunk]:
        """All chunks that have come, as far as they are whole."""
        cursor, found = Cursor(bytes(self.got)), list[Chunk]()
        with suppress(NeedMore):
            while True:
                one = parse_chunk(cursor)
                if isinstance(one, Chunk):
                    found.append(one)
        return found

    async def chunks_until(self, type: Type, id: int) -> AsyncIterator[Chunk]:
        """Chunks from the server, until one that is about this; it is the last."""
        with trio.fail_after(PATIENCE):
            while (chunk := await self.chunk()) is not None:
                yield chunk
                if (chunk.type, chunk.id) == (type, id):
                    return
        raise AssertionError(f"the server hung up before it said anything about {type.label} {id}")

    async def round_trip(self) -> bool:
        """Ping, and read until the answer; False when the server hangs up."""
        before = self.got.count(PONG)
        if not await self.send(encode_chunk(Chunk(Type.IN_SINK, 0, ping=True))):
            return False
        while self.got.count(PONG) == before:
            if not await self.read():
                return False
        return True

    async def leave(self) -> None:
        """End this direction, read for a moment what the server still owes, and close.

        A legal request may be answered for as long as its handler works, so waiting for the server's end could take
        that long.
        """
        with suppress(trio.BrokenResourceError):
            await self.half_close()
        with trio.move_on_after(ANSWER_SECONDS):
            await self.read_all()
        await self.stream.aclose()

    async def half_close(self) -> None:
        await self.stream.send_eof()

    def reset(self) -> None:
        """Hang up with a RST."""
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.stream.socket.close()


@asynccontextmanager
async def attacker(server: Server, port: int | None = None) -> AsyncGenerator[Raw, None]:
    async with await trio.open_tcp_stream("127.0.0.1", port or server.port) as stream:
        peer = Raw(stream)
        server.forget(peer.port)
        yield peer


class Friend:
    """An honest client, busy on three channels of its own connection."""

    def __init__(self, session: muxkit.Session) -> None:
        self.session = session
        self.rounds = [0, 0, 0]
        self.pings: list[float] = []
        self._turn = trio.lowlevel.ParkingLot()

    async def work(self, number: int) -> None:
        async with self.session.open() as channel:
            while True:
                message = f"{number} {self.rounds[number]} ".encode() * (1 + 100 * number)
                await channel.send(message)
                assert await channel.receive() == message
                self.rounds[number] += 1
                self._turn.unpark_all()

    async def is_well(self) -> None:
        """Everything that it sends from now on comes back, on each channel, and pings are answered."""
        wanted = [rounds + 10 for rounds in self.rounds]
        with trio.fail_after(PATIENCE):
            assert await self.session.ping() >= 0
            while any(rounds < enough for rounds, enough in zip(self.rounds, wanted, strict=True)):
                await self._turn.park()


@asynccontextmanager
async def friend_of(server: Server, url: str | None = None, **options: Any) -> AsyncGenerator[Friend, None]:
    """An honest client of the same server: well at the beginning, and at the end."""
    async with muxkit.connect(url or server.url, **options) as session:
        friend = Friend(session)
        async with trio.open_nursery() as nursery:
            for number in range(3):
                nursery.start_soon(friend.work, number)
            await friend.is_well()
            yield friend
            await friend.is_well()
            nursery.cancel_scope.cancel()


def chunk(type: Type, id: int, payload: bytes | None = None, **more: Any) -> bytes:
    return encode_chunk(Chunk(type, id, payload, **more))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    logging.getLogger("muxkit").setLevel(logging.DEBUG)
    trio.run(main, *(json.loads(sys.argv[1])[name] for name in ("urls", "limits", "linger", "certificate")))

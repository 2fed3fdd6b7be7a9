"""A rule that the peer broke comes out as one typed error to the owner of the session, whatever else came with it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols import aqueduct, bpmux, relink
from muxkit.runtime import LinkLost, background
from muxkit.runtime._errors import looks_like
from muxkit.runtime.pumps.stream import StreamPump
from muxkit_adapters import memory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from contextlib import AbstractAsyncContextManager
    from typing import Literal

    from trio.testing import MockClock

    from muxkit.runtime import Session

    Role = Literal["client", "server"]
    MakeSession = Callable[[trio.abc.Stream, Role], AbstractAsyncContextManager[Session]]

LINGER = 5.0  # s


class SpoiledStream(trio.abc.HalfCloseableStream):
    """A link whose peer breaks a rule at a moment that a test chooses, and ends the stream in the same read."""

    def __init__(self, inner: memory.MemoryStream, violation: bytes, role: Role) -> None:
        self.role = role
        self._inner = inner
        self._violation = violation
        self._told = trio.Event()
        self._is_over = False
        self.keeps_back = False
        """What comes is kept until the peer has ended the stream; then all of it and the violation are one read."""

    def spoil(self) -> None:
        """The violation comes now, and nothing behind it."""
        self._told.set()

    async def receive_some(self, max_bytes: int | None = None) -> bytes:
        if self._is_over:
            await trio.lowlevel.checkpoint()
            return b""
        kept = bytearray()
        while True:
            data = await self._next(max_bytes)
            if self.keeps_back and data:
                kept += data
                continue
            if data and not self._told.is_set():
                return data
            self._is_over = True
            return bytes(kept) + data + self._violation

    async def _next(self, max_bytes: int | None) -> bytes:
        """What comes first: bytes, the end of the stream, or the moment that the test has chosen."""
        data = b""
        async with background() as nursery:

            async def wait() -> None:
                await self._told.wait()
                scope.cancel()

            nursery.start_soon(wait)
            with trio.CancelScope() as scope:
                data = bytes(await self._inner.receive_some(max_bytes))
        return data

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._inner.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._inner.wait_send_all_might_not_block()

    async def send_eof(self) -> None:
        await self._inner.send_eof()

    async def aclose(self) -> None:
        await self._inner.aclose()


def of_bpmux(stream: trio.abc.Stream, role: Role) -> AbstractAsyncContextManager[Session]:
    return bpmux.session(stream, linger=LINGER)


def of_relink(stream: trio.abc.Stream, role: Role) -> AbstractAsyncContextManager[Session]:
    return relink.session(stream, role="connector" if role == "client" else "listener", linger=LINGER)


def of_aqueduct(stream: trio.abc.Stream, role: Role) -> AbstractAsyncContextManager[Session]:
    return aqueduct.protocol.session(stream, role=role, address="", limits=Limits(), observer=None, linger=LINGER)


PROTOCOLS: dict[str, tuple[MakeSession, bytes]] = {
    "bpmux": (of_bpmux, bytes.fromhex("e005 e005")),  # a Partial for a Partial
    "relink": (of_relink, b"\xff" * 8),  # no such packet
    "aqueduct": (of_aqueduct, b"\xff" * 8),  # no such frame of the carrier
}

every_side = [
    pytest.param(*of, role, id=f"{name}-{role}") for name, of in PROTOCOLS.items() for role in ("client", "server")
]


async def while_incoming_waits(session: Session, stream: SpoiledStream) -> None:
    async with background() as nursery:

        async def spoil() -> None:
            await trio.testing.wait_all_tasks_blocked()
            stream.spoil()

        nursery.start_soon(spoil)
        async for _ in session.incoming():
            pass


async def while_nobody_waits(session: Session, stream: SpoiledStream) -> None:
    await trio.testing.wait_all_tasks_blocked()
    stream.spoil()
    await trio.testing.wait_all_tasks_blocked()


async def after_the_application_caught_it(session: Session, stream: SpoiledStream) -> None:
    with pytest.raises(LinkLost):
        await while_incoming_waits(session, stream)


async def while_it_drains(session: Session, stream: SpoiledStream) -> None:
    """The client's channel is alive on both sides; on Aqueduct the client has to open the first."""
    async with AsyncExitStack() as stack:
        if stream.role == "client":
            channel = await stack.enter_async_context(session.open())
            await channel.send(b"never answered")
        else:
            async for _ in session.incoming():
                break
        async with trio.open_nursery() as nursery:
            nursery.start_soon(lambda: session.shutdown(grace=60.0))
            await trio.testing.wait_all_tasks_blocked()
            stream.spoil()


async def behind_the_orderly_end(session: Session, stream: SpoiledStream) -> None:
    """The peer leaves in good order, and the violation is in the read that brings its end."""
    async for _ in session.incoming():
        raise AssertionError("nothing is opened by a peer that leaves")


MOMENTS: list[Callable[[Session, SpoiledStream], Awaitable[None]]] = [
    while_incoming_waits,
    while_nobody_waits,
    after_the_application_caught_it,
    while_it_drains,
]


async def run_session(
    make: MakeSession,
    violation: bytes,
    role: Role,
    what: Callable[[Session, SpoiledStream], Awaitable[None]],
    *,
    peer_leaves: bool,
) -> None:
    here, there = memory.pair()
    stream = SpoiledStream(here, violation, role)
    ready = trio.Event()

    async def peer() -> None:
        try:
            async with make(there, "server" if role == "client" else "client") as session:
                if peer_leaves:
                    await ready.wait()
                elif role == "client":
                    await trio.sleep_forever()
                else:
                    async with session.open() as channel:
                        await channel.send(b"never answered")
                        await trio.sleep_forever()
        except LinkLost:
            pass  # it hears no end of ours

    async with background() as nursery:
        nursery.start_soon(peer)
        async with make(stream, role) as session:
            await trio.testing.wait_all_tasks_blocked()
            if peer_leaves:
                stream.keeps_back = True
                ready.set()
            await what(session, stream)


def names_the_rule(error: LinkLost) -> bool:
    cause = error.__cause__
    if not isinstance(cause, RemoteProtocolError) or cause.offset is None:
        return False
    return error.by == "peer" and str(cause) in str(error)


@pytest.mark.requirement("R-39")
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize(("make", "violation", "role"), every_side)
async def test_a_violation_that_comes_with_the_end_of_the_stream_is_told_when_the_session_is_left(
    make: MakeSession,
    violation: bytes,
    role: Role,
    moment: Callable[[Session, SpoiledStream], Awaitable[None]],
    autojump_clock: MockClock,
) -> None:
    with pytest.raises(LinkLost) as caught:
        await run_session(make, violation, role, moment, peer_leaves=False)
    assert names_the_rule(caught.value)


@pytest.mark.requirement("R-71")
@pytest.mark.requirement("R-39")
@pytest.mark.parametrize(("make", "violation", "role"), every_side)
async def test_a_violation_behind_the_orderly_end_in_the_same_read_is_told_when_the_session_is_left(
    make: MakeSession, violation: bytes, role: Role, autojump_clock: MockClock
) -> None:
    """Was: bpmux, Relink, Aqueduct: a rule that the peer broke behind its orderly end, with the end of the stream or
    while the session took leave was logged, and the session was left without an error.
    """
    with pytest.raises(LinkLost) as caught:
        await run_session(make, violation, role, behind_the_orderly_end, peer_leaves=True)
    assert names_the_rule(caught.value)


@pytest.mark.requirement("R-39")
@pytest.mark.parametrize(("make", "violation", "role"), every_side)
async def test_a_violation_while_the_session_takes_leave_is_told(
    make: MakeSession, violation: bytes, role: Role, autojump_clock: MockClock
) -> None:
    async with background() as nursery:

        async def leave_at_once(session: Session, stream: SpoiledStream) -> None:
            stream.keeps_back = True  # the peer's answers to our leave do not come before the violation
            nursery.start_soon(spoil, stream)

        async def spoil(stream: SpoiledStream) -> None:
            await trio.sleep(LINGER / 2)
            stream.spoil()

        with pytest.raises(LinkLost) as caught:
            await run_session(make, violation, role, leave_at_once, peer_leaves=False)
    assert names_the_rule(caught.value)


@pytest.mark.requirement("R-71")
@pytest.mark.parametrize(("protocol", "make"), [("bpmux", of_bpmux), ("Aqueduct", of_aqueduct)])
async def test_a_peer_of_another_protocol_that_speaks_first_reads_what_is_spoken_here(
    protocol: str, make: MakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Was: When the reader ran before the writer, the peer read nothing that names our protocol."""
    write = StreamPump._write

    async def write_late(self: StreamPump[Any]) -> None:
        await trio.testing.wait_all_tasks_blocked()
        await write(self)

    monkeypatch.setattr(StreamPump, "_write", write_late)
    here, there = memory.pair()
    await there.send_all(b"GET / HTTP/1.1\r\n\r\n")

    async def serve() -> None:
        async with make(here, "server") as session:
            async for _ in session.incoming():
                pass

    with pytest.raises(LinkLost, match="look like an HTTP request"):
        await serve()
    assert looks_like(await there.receive_some()) == protocol

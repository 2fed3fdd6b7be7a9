"""How does a program use bpmux? A session on a byte stream, with everything that the protocol offers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal, TypeVar

import trio

from muxkit._limits import Limits
from muxkit.core import Receiving, Sending
from muxkit.protocols.bpmux._config import Config
from muxkit.protocols.bpmux._entities import Kind
from muxkit.protocols.bpmux._session_channels import Duplex, Opening, Sink, Source
from muxkit.protocols.bpmux._session_connection import Connection
from muxkit.protocols.bpmux._session_requests import IncomingRequest, Request
from muxkit.runtime import (
    Backlog,
    ChannelStopped,
    SessionInfo,
    SessionStats,
    SlotQueue,
    background,
    protect_package,
    protected_manager,
)
from muxkit.runtime import Session as CommonSession

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.bpmux._events import Opened

MadeT = TypeVar("MadeT")

LINGER = 5.0  # s, for taking leave


@protected_manager
async def session(
    stream: trio.abc.Stream,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER,
) -> AsyncGenerator[Session, None]:
    """A bpmux session on a connected byte stream, which it owns from now on.

    Leaving the block normally finishes all channels, waits until the peer has heard it and hangs up, all within
    `linger` seconds; if it cannot be known that the peer got everything, that raises `LinkLost`. Leaving by an
    error or a cancellation hangs up at once.
    """
    mux = Session(stream, config or Config(), limits or Limits(), observer)
    async with background() as nursery:
        nursery.start_soon(mux.connection.pump.run)
        try:
            yield mux
        except BaseException:
            mux.connection.pump.lose("the session was left by an error", by="local")
            raise
        await mux.connection.leave(linger)


class Session(CommonSession):
    """One bpmux connection at work; made by `session`."""

    def __init__(self, stream: trio.abc.Stream, config: Config, limits: Limits, observer: Observer | None) -> None:
        self._duplexes: Backlog[Duplex] = Backlog(lambda duplex: self._took(duplex.opening))
        self._sources: Backlog[tuple[Source, bytes]] = Backlog(lambda item: self._took(item[1]))
        self._sinks: Backlog[tuple[Sink, bytes]] = Backlog(lambda item: self._took(item[1]))
        self._requests: Backlog[IncomingRequest] = Backlog(lambda request: self._took(request.payload))
        self._backlogs = (self._duplexes, self._sources, self._sinks, self._requests)
        self._draining = False
        self._openers = SlotQueue(self._places)
        self.connection = Connection(
            stream,
            config=config,
            limits=limits,
            observer=observer,
            on_opened=self._opened,
            on_goodbye=self._goodbye,
            on_gone=self._openers.wake_waiters,
        )
        self._engine = self.connection.engine
        self._limits = self._engine.limits
        self.messages = Source(self.connection, self._engine.top_stream)
        """The peer's top-level messages."""
        self.top = Sink(self.connection, self._engine.top_sink)
        """Where top-level messages go; `send` is a short form."""

    # --- the top level

    async def send(self, message: bytes) -> None:
        """Send a top-level message, as `Sink.send` does."""
        await self.top.send(message)

    async def receive(self) -> bytes:
        """The peer's next top-level message, as `Source.receive` gives it."""
        return await self.messages.receive()

    async def request(self, payload: bytes) -> bytes:
        """Ask, and wait for the answer; cancelled, the peer is told that it is not needed any more."""
        async with self.open_request(payload) as request:
            return await request.response()

    # --- opening: waits only for room under the limits, and for top-level credit if there is a payload

    def open(self) -> AbstractAsyncContextManager[Duplex]:
        return self.open_duplex()

    def open_duplex(self, payload: bytes = b"", *, credit: int | None = None) -> AbstractAsyncContextManager[Duplex]:
        """A channel in both directions. The peer hears of it at once; `credit` grants by hand."""

        def make() -> Duplex:
            sink, stream = self._engine.open_duplex(payload, credit=credit)
            return Duplex(Sink(self.connection, sink), Source(self.connection, stream))

        return Opening(lambda: self._make(make, payload))

    def open_sink(self, payload: bytes = b"") -> AbstractAsyncContextManager[Sink]:
        """A channel to the peer."""
        return Opening(lambda: self._make(lambda: Sink(self.connection, self._engine.open_sink(payload)), payload))

    def open_source(self, payload: bytes = b"", *, credit: int | None = None) -> AbstractAsyncContextManager[Source]:
        """A channel from the peer, which may send as soon as it knows; `credit` grants by hand."""

        def make() -> Source:
            return Source(self.connection, self._engine.open_stream(payload, credit=credit))

        return Opening(lambda: self._make(make, payload))

    def open_request(self, payload: bytes = b"", *, credit: int | None = None) -> AbstractAsyncContextManager[Request]:
        """A question; `credit` is how long the answer may be, in bytes, if not up to the usual window."""

        def make() -> Request:
            return Request(self.connection, self._engine.open_request(payload, credit=credit))

        return Opening(lambda: self._make(make, payload))

    async def _make(self, make: Callable[[], MadeT], payload: bytes) -> MadeT:
        try:
            await self._may_open(payload)
            try:
                return make()
            finally:
                self.connection.ring()
                if payload:
                    self.top.end_turn()
        finally:
            self._openers.wake_waiters()

    async def _may_open(self, payload: bytes) -> None:
        """Wait for room under the limits; the caller must open before his next checkpoint."""
        await trio.lowlevel.checkpoint_if_cancelled()
        # Payloads are paid from the top level's credit, so they stand in line with the messages there.
        waits_for_credit = bool(payload) and not self._engine.config.letter
        while True:
            await self._openers.wait_for_slot()
            await self._check_open()
            if not waits_for_credit or self.top.may_go(len(payload)):
                return
            self._openers.wake_waiters()  # those behind us may need no credit
            try:
                await self.top.wait_turn(len(payload))
            except ChannelStopped:
                continue
            if self._engine.places > 0:
                return
            self.top.end_turn()

    async def _check_open(self) -> None:
        error = self._closed()
        if error is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            raise error

    def _places(self) -> int:
        """How many may open now; those who wait in vain come out as well, and hear why."""
        return self._engine.places if self._closed() is None else sys.maxsize

    def _closed(self) -> Exception | None:
        """Why nothing can be opened any more, or None."""
        if self.connection.pump.is_lost:
            return self.connection.pump.loss()
        top = self._engine.top_sink
        if self.top.state is not Sending.OPEN and not top.end_in:
            return trio.ClosedResourceError("no channel can be opened any more: this side is closing the session")
        if top.gone or top.ending:
            return ChannelStopped("no channel can be opened any more: the peer is closing the session")
        return None

    # --- what the peer opens

    def incoming(self) -> AsyncIterator[Duplex]:
        return self._duplexes

    def sources(self) -> AsyncIterator[tuple[Source, bytes]]:
        """The sinks that the peer opens, as sources for us, each with its opening payload."""
        return self._sources

    def sinks(self) -> AsyncIterator[tuple[Sink, bytes]]:
        """The streams that the peer opens, as sinks for us, each with its opening payload."""
        return self._sinks

    def requests(self) -> AsyncIterator[IncomingRequest]:
        """The questions of the peer."""
        return self._requests

    def _opened(self, event: Opened) -> None:
        if self._draining and not self._engine.top_stream.gone:
            # It cannot have heard of it yet, so this is not counted against it.
            self._engine.consumed_opening(len(event.payload))
            self._decline(event)
            return
        waiting = sum(len(backlog) for backlog in self._backlogs)
        # What the application has not read stays in memory when its channel has ended; so that counts as well.
        if self._draining or waiting >= self._limits.backlog or self._engine.unread >= self._limits.channels:
            self._engine.consumed_opening(len(event.payload))
            self._engine.refuse(event.entity)
            return
        entity, connection = event.entity, self.connection
        if event.source is not None:
            duplex = Duplex(Sink(connection, entity), Source(connection, event.source), event.payload)
            self._duplexes.put(duplex)
        elif entity.kind is Kind.STREAM_IN:
            self._sources.put((Source(connection, entity), event.payload))
        elif entity.kind is Kind.SINK_IN:
            self._sinks.put((Sink(connection, entity), event.payload))
        else:
            self._requests.put(IncomingRequest(connection, entity, event.payload))

    def _decline(self, event: Opened) -> None:
        for half in (event.entity, event.source):
            if half is not None and not self._engine.over and not half.gone and not half.ending:
                self._engine.end(half)

    def _took(self, opening: bytes) -> None:
        self._engine.consumed_opening(len(opening))
        self.connection.ring()

    def _goodbye(self, error: Callable[[], Exception] | None) -> None:
        """Nothing more is opened: one of us said so or the peer hung up in order, or the link is lost."""
        orderly = error is None or self._engine.hung_up_cleanly
        self._draining = True
        for backlog in self._backlogs:
            backlog.ended(None if orderly else error)
        self._openers.wake_waiters()

    # --- the connection

    async def ping(self) -> float:
        half = self.messages if self.messages.state is Receiving.OPEN else self.top
        return await half.ping()

    async def shutdown(self, *, grace: float) -> None:
        """Take no new channels, let the live ones end for up to `grace` seconds, then give them up.

        The peer is told at once that it should open nothing more; what it opens before it has heard that is
        refused, so that it knows. `incoming` ends after what had come before.
        """
        await trio.lowlevel.checkpoint()
        if not self.connection.pump.is_lost:
            self._goodbye(None)
            self.messages.close()
        with trio.move_on_after(grace):
            while self._engine.channels and not self.connection.pump.is_lost:
                await self.connection.gone.park()
        if not self.connection.pump.is_lost:
            self.connection.abort_all()

    @property
    def limits(self) -> Limits:
        return self._limits

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(protocol="bpmux", peer=self.connection.pump.peer)

    def stats(self) -> SessionStats:
        connection = self.connection
        return SessionStats(
            bytes_received=self._engine.bytes_received,
            bytes_sent=connection.pump.bytes_sent,
            messages_received=connection.messages_received,
            messages_sent=self._engine.messages_sent,
            channels=self._engine.channels,
            queued=self._engine.outbox + connection.pump.unsent,
            round_trip=connection.round_trip,
        )

    def __repr__(self) -> str:
        state = "lost" if self.connection.pump.is_lost else f"{self._engine.channels} channels"
        return f"<bpmux.Session {self.connection.pump.peer or 'on a stream'}: {state}>"


class _Protocol:
    """What `muxkit.connect` and `muxkit.serve` find under the name `bpmux`."""

    options = frozenset({"config"})

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        config: Config | None = None,
    ) -> AbstractAsyncContextManager[Session]:
        return session(stream, config=config, limits=limits, observer=observer, linger=linger)


protocol = _Protocol()


protect_package("muxkit.protocols.bpmux")

"""What does an application hold? Sinks to send on, sources to receive from, and duplexes that are both."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Receiving, Sending
from muxkit.protocols.bpmux._entities import OURS
from muxkit.runtime import ByteStream, Channel, Mailbox, ReceiveHalf, SendHalf

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
    from types import TracebackType

    from muxkit.protocols.bpmux._entities import Entity
    from muxkit.protocols.bpmux._session_connection import Connection
    from muxkit.runtime import Reading


class Sink(SendHalf):
    """Where messages to the peer go."""

    __slots__ = ("_connection", "entity")

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection.room, connection.ring)
        self._connection = connection
        self.entity = entity
        entity.half = self

    async def ping(self) -> float:
        """One round trip about this channel, in seconds."""
        if self.state is not Sending.OPEN:
            await trio.lowlevel.checkpoint_if_cancelled()
            await self._refuse()
        return await self._connection.ping(self.entity)

    def blame(self) -> None:
        """For a channel that the peer opened: its handler failed, and a peer may make only so many of them fail."""
        self._connection.engine.blame(self.entity)
        self._connection.pump.dispatch_events()

    def give_credit(self, amount: int) -> None:
        """Let the peer explain itself when it stops us: what it may put into its end payload, in bytes.

        Harmless once either side is done with the channel.
        """
        if self.state is Sending.OPEN:
            self._connection.engine.give_credit(self.entity, amount)
            self._request_write()

    @property
    def has_spoken(self) -> bool:
        """Did we say anything on it that the peer should hear?"""
        outgoing, entity = self.entity.outgoing, self.entity
        return (outgoing is not None and outgoing.spoken) or (
            not entity.is_top and (outgoing is not None or entity.kind in OURS)
        )

    def admits(self, size: int) -> bool:
        return self._connection.engine.admits(self.entity, size)

    def watch(self, size: int) -> None:
        self._connection.engine.watch(self.entity, size)

    def _push(self, message: bytes) -> None:
        self._connection.engine.send(self.entity, message)

    def _try_push(self, message: bytes) -> bool:
        return self._connection.engine.try_send(self.entity, message)

    def _try_push_all(self, messages: list[bytes]) -> bool:
        return self._connection.engine.try_send_all(self.entity, messages)

    def check_size(self, size: int) -> None:
        allowed = self._connection.engine.limits.message
        if size > allowed:
            raise LocalProtocolError(f"a message of {size} bytes against Limits(message={allowed})")

    def _close(self, payload: bytes) -> None:
        super()._close(payload)
        if self.entity.is_top:
            self._connection.on_gone()  # nobody can open anything any more, and who waits has to hear it

    def may_go(self, size: int) -> bool:
        """Would `wait_turn` return at once?"""
        return self.may_send(size)

    def _finish(self, payload: bytes) -> None:
        self._connection.engine.end(self.entity, payload)

    def _abort(self) -> None:
        self._connection.engine.abort(self.entity)
        self._connection.pump.dispatch_events()

    def __repr__(self) -> str:
        return f"<bpmux.Sink {self.entity.label} {self.state.value}>"


class Source(ReceiveHalf[bytes]):
    """Where messages of the peer come from."""

    __slots__ = ("_connection", "entity")

    _new_storage = Mailbox

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection.ring)
        self._connection = connection
        self.entity = entity
        entity.half = self

    async def ping(self) -> float:
        """One round trip about this channel, in seconds."""
        if self.state is not Receiving.OPEN:
            await trio.lowlevel.checkpoint()
            raise self._error()
        return await self._connection.ping(self.entity)

    def give_credit(self, amount: int) -> None:
        """Let the peer send so many bytes more, beside what is granted automatically.

        Harmless once either side is done with the channel.
        """
        if self.state is Receiving.OPEN:
            self._connection.engine.give_credit(self.entity, amount)
            self._request_write()

    def abort(self) -> None:
        """The same as `close`: to a reader, giving up and wanting no more are one thing."""
        self.close()

    def _taken(self, messages: Sequence[bytes], size: int) -> bool:
        return self._connection.engine.consumed(self.entity, size)

    def _stop(self) -> None:
        self._connection.engine.end(self.entity)

    def _reading(self) -> Reading:
        return self._connection.pump.reading

    def __repr__(self) -> str:
        return f"<bpmux.Source {self.entity.label} {self.state.value}, {self.unread} unread>"


class Duplex(Channel):
    """A sink and a source with one id: the common two-way channel."""

    __slots__ = ("opening", "sink", "source")

    def __init__(self, sink: Sink, source: Source, opening: bytes = b"") -> None:
        self.sink = sink
        self.source = source
        self.opening = opening

    # These give the half's own coroutine instead of waiting for it in one of theirs: they are called for each message.

    def send(self, message: bytes) -> Coroutine[object, object, None]:
        return self.sink.send(message)

    def send_many(self, messages: Iterable[bytes]) -> Coroutine[object, object, None]:
        return self.sink.send_many(messages)

    def receive(self) -> Coroutine[object, object, bytes]:
        return self.source.receive()

    def receive_many(self, limit: int | None = None) -> Coroutine[object, object, list[bytes]]:
        return self.source.receive_many(limit)

    async def finish(self, payload: bytes = b"") -> None:
        await self.sink.finish(payload)

    async def aclose(self) -> None:
        self.sink.close()  # first: a peer counts the other order as breaking off
        await self.source.aclose()

    def abort(self) -> None:
        self.sink.abort()
        self.source.close()
        self.sink.blame()

    async def ping(self) -> float:
        """One round trip about this channel, in seconds."""
        return await (self.sink if self.sink.state is Sending.OPEN else self.source).ping()

    def as_stream(self) -> ByteStream:
        """The same channel as a `trio.abc.HalfCloseableStream`; use one face or the other."""
        return ByteStream(self.sink, self.source)

    def __repr__(self) -> str:
        return f"<bpmux.Duplex {self.sink!r} {self.source!r}>"


class Openable(Protocol):
    """What an `Opening` can close."""

    async def aclose(self) -> None: ...
    def abort(self) -> None: ...


OpenedT = TypeVar("OpenedT", bound=Openable)


class Opening(Generic[OpenedT]):
    """Opens when the block is entered; closes when it is left normally, aborts when by an error.

    It is kept as long as its channel, so it does without `AbstractAsyncContextManager` and the `__dict__` of that.
    """

    __slots__ = ("_open", "_opened")

    def __init__(self, open: Callable[[], Awaitable[OpenedT]]) -> None:
        self._open: Callable[[], Awaitable[OpenedT]] | None = open
        self._opened: OpenedT | None = None

    async def __aenter__(self) -> OpenedT:
        if self._open is None:
            raise RuntimeError("this block was entered before; open another channel")
        open, self._open = self._open, None  # and with it let go of what it was made from
        self._opened = await open()
        return self._opened

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._opened is None:
            return
        if kind is None:
            await self._opened.aclose()
        else:
            self._opened.abort()

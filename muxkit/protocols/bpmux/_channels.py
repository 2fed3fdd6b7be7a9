"""What applications hold of a bpmux session: duplexes, sinks, sources, and the requests of both sides."""

from __future__ import annotations

from typing import Any

import trio

from muxkit._errors import LocalProtocolError
from muxkit.core import Receiving, Sending
from muxkit.protocols.bpmux.entities import Entity
from muxkit.protocols.bpmux.receive import Receiver
from muxkit.protocols.bpmux.send import Sender
from muxkit.runtime import ChannelStopped, ErrorMaker, Session
from muxkit.runtime import IncomingRequest as CommonRequest
from muxkit.runtime import channel as common
from muxkit.runtime.connection import MuxConnection
from muxkit.runtime.halves.send import SendHalf


class Sink(common.Sink):
    """A channel to send on."""

    __slots__ = ()

    @property
    def _entity(self) -> Entity:
        return _entity_of(self.half.sender)

    def give_credit(self, amount: int) -> None:
        """Let the peer send an end payload of so many bytes when it stops this half.

        Harmless once either side has ended the channel.
        """
        self._connection.budget.thread.check()
        if self.half.state is Sending.OPEN:
            self._entity.give_credit(amount)
            self._connection.request_write()


class Source(common.Source):
    """A channel to receive from."""

    __slots__ = ()

    @property
    def _entity(self) -> Entity:
        return _entity_of(self.half.receiver)

    def give_credit(self, amount: int) -> None:
        """Grant the peer so many bytes beside the automatic grants.

        Harmless once either side has ended the channel.
        """
        self._connection.budget.thread.check()
        if self.half.state is Receiving.OPEN:
            self._entity.give_credit(amount)
            self._connection.request_write()


class Duplex(common.MuxChannel):
    """A two-way channel: a sink and a source with one id."""

    __slots__ = ()

    @property
    def sink(self) -> Sink:
        """Its sending half, as a channel to send on."""
        return Sink(self._connection, self.sending)

    @property
    def source(self) -> Source:
        """Its receiving half, as a channel to receive from."""
        return Source(self._connection, self.receiving)


class Request:
    """A request of this side, which the peer answers with one response."""

    __slots__ = ("_connection", "_entity", "_error", "_over", "_response")

    def __init__(self, connection: MuxConnection[Any, Any], entity: Receiver) -> None:
        self._connection = connection
        self._over = trio.Event()
        self._response: bytes | None = None
        self._error: ErrorMaker | None = None
        self._entity: Receiver = entity
        entity.owner = self

    async def response(self) -> bytes:
        """Wait for the response; every call returns the same one.

        Raises `ChannelStopped` when the peer declined, `LinkLost` when the connection is gone,
        `trio.ClosedResourceError` after `abort`.
        """
        self._connection.budget.thread.check()
        await self._over.wait()
        if self._response is None:
            raise (self._error() if self._error is not None else trio.ClosedResourceError("the request was cancelled"))
        return self._response

    def abort(self) -> None:
        """Tell the peer that no response is needed; harmless after the response has arrived."""
        self._connection.budget.thread.check()
        if not self._over.is_set():
            self._over.set()
            if not self._connection.pump.is_lost:
                self._entity.end()
                self._connection.request_write()

    async def aclose(self) -> None:
        """`abort`, with a checkpoint."""
        self.abort()
        await trio.lowlevel.checkpoint()

    async def ping(self) -> float:
        """Wait for one round trip about this request; return its seconds."""
        return await self._connection.ping_about(self._entity)

    # --- for the connection

    def responded(self, payload: bytes) -> None:
        """The response has arrived."""
        self._response = payload
        self._over.set()
        self._entity.consumed((), len(payload))

    def declined(self, payload: bytes) -> None:
        """The peer gives no response."""
        self.failed(lambda: ChannelStopped("the peer declined to answer this request", payload=payload))

    def failed(self, error: ErrorMaker) -> None:
        """No response will arrive."""
        if not self._over.is_set():
            self._error = error
            self._over.set()


class AnswerHalf(SendHalf):
    """The sending half of a request of the peer: one message, which is also its end."""

    __slots__ = ("on_cancelled",)

    def __init__(self, connection: MuxConnection[Any, Any], entity: Sender) -> None:
        super().__init__(connection, entity)
        self.on_cancelled = trio.Event()

    def confirmed(self) -> None:
        self.on_cancelled.set()
        super().confirmed()

    def stopped(self, error: ErrorMaker) -> None:
        self.on_cancelled.set()
        super().stopped(error)

    def lost(self, error: ErrorMaker) -> None:
        self.on_cancelled.set()
        super().lost(error)


class IncomingRequest(CommonRequest):
    """A request of the peer; leaving an `async with` block around it declines it if it has no response."""

    __slots__ = ("_answer", "_connection", "_entity", "_payload")

    def __init__(self, connection: MuxConnection[Any, Any], entity: Sender, payload: bytes) -> None:
        self._connection = connection
        self._answer = AnswerHalf(connection, entity)
        self._entity: Sender = entity
        self._payload = payload

    @property
    def session(self) -> Session:
        return self._connection.session

    @property
    def payload(self) -> bytes:
        return self._payload

    async def respond(self, payload: bytes) -> None:
        if self._entity.is_answered:
            await trio.lowlevel.checkpoint()
            raise LocalProtocolError(f"{self._entity.label}: it was answered before")
        await self._answer.send(payload)
        self._answer.close()

    async def decline(self, payload: bytes = b"") -> None:
        await self._answer.finish(payload)

    async def cancelled(self) -> None:
        self._connection.budget.thread.check()
        await self._answer.on_cancelled.wait()

    async def ping(self) -> float:
        """Wait for one round trip about this request; return its seconds."""
        return await common.ping_half(self._connection, self._answer)

    def abort(self, reason: str = "", *, code: int = 0) -> None:
        if not self._entity.is_answered:
            self._answer.abort(reason, code=code)
        self._answer.close()

    async def __aenter__(self) -> IncomingRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.close()


def _entity_of(half: object) -> Entity:
    """Return the engine's half as what it is; sessions of bpmux have no others."""
    assert isinstance(half, Entity)
    return half

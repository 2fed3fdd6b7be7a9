"""The channels and requests of a bpmux session, as the application uses them.

Most methods come from `muxkit.runtime.channel`, which all protocols share. This module adds what only bpmux has:

- requests, which are a message with a response, and cost less than a channel.
- `give_credit`. In bpmux, a receiver grants *credit*, the number of bytes that the peer may send to it. The session
  grants credit automatically when the application receives messages. An application that sets `Config(grants=False)`
  grants it by calling `give_credit`.

Each class here passes its calls to an `Entity`, which is the engine's object for a channel or a request.
"""

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
    """A channel on which this side sends."""

    __slots__ = ()

    @property
    def _entity(self) -> Entity:
        return _entity_of(self.half.sender)

    def give_credit(self, amount: int) -> None:
        """Let the peer say in up to `amount` bytes why it stops receiving, if it ever does.

        The peer needs credit for that text as for any other message. Without credit, it can only stop without a reason.
        This method does nothing if either side has ended the channel.
        """
        self._connection.budget.thread.check()
        if self.half.state is Sending.OPEN:
            self._entity.give_credit(amount)
            self._connection.request_write()


class Source(common.Source):
    """A channel on which the peer sends."""

    __slots__ = ()

    @property
    def _entity(self) -> Entity:
        return _entity_of(self.half.receiver)

    def give_credit(self, amount: int) -> None:
        """Let the peer send `amount` more bytes, in addition to the credit that the session grants automatically.

        This method does nothing if either side has ended the channel.
        """
        self._connection.budget.thread.check()
        if self.half.state is Receiving.OPEN:
            self._entity.give_credit(amount)
            self._connection.request_write()


class Duplex(common.MuxChannel):
    """A two-way channel. It consists of a sink and a source."""

    __slots__ = ()

    @property
    def sink(self) -> Sink:
        """The sending direction of this channel."""
        return Sink(self._connection, self.sending)

    @property
    def source(self) -> Source:
        """The receiving direction of this channel."""
        return Source(self._connection, self.receiving)


class Request:
    """A request that this side has sent, and that the peer answers with one response."""

    __slots__ = ("_connection", "_entity", "_error", "_over", "_response")

    def __init__(self, connection: MuxConnection[Any, Any], entity: Receiver) -> None:
        self._connection = connection
        self._over = trio.Event()
        self._response: bytes | None = None
        self._error: ErrorMaker | None = None
        self._entity: Receiver = entity
        entity.owner = self

    async def response(self) -> bytes:
        """Wait for the response and return it. Every call returns the same response.

        If this call is cancelled, the request continues, and a later call can still return the response.

        Raises:
            ChannelStopped: If the peer declined to answer.
            LinkLost: If the connection was lost.
            trio.ClosedResourceError: If this side has called `abort`.
        """
        self._connection.budget.thread.check()
        await self._over.wait()
        if self._response is None:
            raise (self._error() if self._error is not None else trio.ClosedResourceError("the request was aborted"))
        return self._response

    def abort(self) -> None:
        """Cancel the request. Does nothing if the response has arrived."""
        self._connection.budget.thread.check()
        if not self._over.is_set():
            self._over.set()
            if not self._connection.pump.is_lost:
                self._entity.end()
                self._connection.request_write()

    async def aclose(self) -> None:
        """Cancel the request like `abort`, and execute a checkpoint."""
        self.abort()
        await trio.lowlevel.checkpoint()

    async def ping(self) -> float:
        """Send a ping about this request, wait for the answer, and return the round-trip time in seconds."""
        return await self._connection.ping_about(self._entity)

    # --- called by the connection

    def responded(self, payload: bytes) -> None:
        """Store the response, which has arrived."""
        self._response = payload
        self._over.set()
        self._entity.consumed((), len(payload))

    def declined(self, payload: bytes) -> None:
        """Let `response` raise `ChannelStopped`, because the peer has declined to answer."""
        self.failed(lambda: ChannelStopped("the peer declined to answer this request", payload=payload))

    def failed(self, error: ErrorMaker) -> None:
        """Let `response` raise an error, because no response can arrive any more."""
        if not self._over.is_set():
            self._error = error
            self._over.set()


class AnswerHalf(SendHalf):
    """The half on which the response to a request of the peer is sent. It notices if the peer cancels the request."""

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
    """A request that the peer has sent.

    It can be used as an `async with` block. A request that has no response at the end of the block is declined.
    """

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
            raise LocalProtocolError(f"{self._entity.label}: this request already has a response")
        await self._answer.send(payload)
        self._answer.close()

    async def decline(self, payload: bytes = b"") -> None:
        await self._answer.finish(payload)

    async def cancelled(self) -> None:
        self._connection.budget.thread.check()
        await self._answer.on_cancelled.wait()

    async def ping(self) -> float:
        """Send a ping about this request, wait for the answer, and return the round-trip time in seconds."""
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
    """Return an engine's half with its real type. In bpmux, every half is an `Entity`."""
    assert isinstance(half, Entity)
    return half

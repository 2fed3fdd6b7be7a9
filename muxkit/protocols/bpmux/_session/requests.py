"""How is a question asked and answered? One payload each way, and either side may give up before."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from muxkit._errors import LocalProtocolError
from muxkit.protocols.bpmux._session.channels import Sink

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.bpmux._session.connection import Connection
    from muxkit.protocols.bpmux.engine import Entity


class Request:
    """A question of ours."""

    __slots__ = ("_connection", "_error", "_over", "_response", "entity")

    def __init__(self, connection: Connection, entity: Entity) -> None:
        self._connection = connection
        self._over = trio.Event()
        self._response: bytes | None = None
        self._error: Callable[[], Exception] | None = None
        self.entity = entity
        entity.half = self

    async def response(self) -> bytes:
        """The answer, as often as it is asked for.

        Raises `ChannelStopped` when the peer declined, `LinkLost` when the connection is gone,
        `trio.ClosedResourceError` after `abort`.
        """
        await self._over.wait()
        if self._response is None:
            raise (self._error() if self._error is not None else trio.ClosedResourceError("the request was cancelled"))
        return self._response

    def abort(self) -> None:
        """Tell the peer that no answer is needed any more; harmless after one has come."""
        if not self._over.is_set():
            self._over.set()
            if not self._connection.pump.is_lost:
                self._connection.engine.end(self.entity)
                self._connection.ring()

    async def aclose(self) -> None:
        """`abort`, with a checkpoint."""
        self.abort()
        await trio.lowlevel.checkpoint()

    async def ping(self) -> float:
        """One round trip about this request, in seconds."""
        return await self._connection.ping(self.entity)

    def responded(self, payload: bytes) -> None:
        """For the connection: the answer came."""
        self._response = payload
        self._over.set()
        self._connection.engine.consumed(self.entity, len(payload))

    def failed(self, error: Callable[[], Exception]) -> None:
        """For the connection: there will be no answer."""
        if not self._over.is_set():
            self._error = error
            self._over.set()


class _Answer(Sink):
    """The sending half of a peer's request: one message, which is also its end."""

    __slots__ = ("answered", "on_cancelled")

    def __init__(self, connection: Connection, entity: Entity) -> None:
        super().__init__(connection, entity)
        self.answered = False
        self.on_cancelled = trio.Event()

    def confirmed(self) -> None:
        self.on_cancelled.set()
        super().confirmed()

    def stopped(self, error: Callable[[], Exception]) -> None:
        self.on_cancelled.set()
        super().stopped(error)

    def lost(self, error: Callable[[], Exception]) -> None:
        self.on_cancelled.set()
        super().lost(error)

    def _push(self, message: bytes) -> None:
        super()._push(message)
        self.answered = True

    def _finish(self, payload: bytes) -> None:
        if not self.answered:
            super()._finish(payload)


class IncomingRequest:
    """A question of the peer; a block around it declines if it is left without an answer."""

    __slots__ = ("_answer", "entity", "payload")

    def __init__(self, connection: Connection, entity: Entity, payload: bytes) -> None:
        self._answer = _Answer(connection, entity)
        self.entity = entity
        self.payload = payload

    async def respond(self, payload: bytes) -> None:
        """Answer; returns when the connection has it. Cancelled means not answered.

        Raises `ChannelStopped` when the peer needs no answer any more, `LocalProtocolError` the second time.
        """
        if self._answer.answered:
            await trio.lowlevel.checkpoint()
            raise LocalProtocolError(f"{self.entity.label}: it was answered before")
        await self._answer.send(payload)
        self._answer.close()

    async def decline(self, payload: bytes = b"") -> None:
        """End it without an answer, and wait until the peer has heard it."""
        await self._answer.finish(payload)

    async def cancelled(self) -> None:
        """Wait until the peer needs no answer any more: it said so, has one, or is gone."""
        await self._answer.on_cancelled.wait()

    async def ping(self) -> float:
        """One round trip about this request, in seconds."""
        return await self._answer.ping()

    def abort(self) -> None:
        """Decline without waiting, if there was no answer."""
        self._answer.close()

    async def __aenter__(self) -> IncomingRequest:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._answer.close()

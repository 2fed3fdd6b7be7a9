"""What happens on one connection of a client? The request, lines as fast as they are taken, acknowledgements, the end.

Unlike `StreamPump` it stops reading while enough waits for the application, so the server is held back in its turn.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, Literal, Protocol

import trio

from muxkit.protocols.restream.engine.snapshot import Standing
from muxkit.runtime import Described, LinkLost, background

if TYPE_CHECKING:
    from muxkit._observer import Observer
    from muxkit.protocols.restream.client.policy import ClientPolicy
    from muxkit.protocols.restream.engine.client import ClientEngine

READ: Final = 64 * 1024  # bytes to ask for at once
BROKEN: Final = (trio.BrokenResourceError, trio.ClosedResourceError)


class Taker(Protocol):
    """Who takes what comes."""

    def hear(self) -> None:
        """The engine may have events."""

    @property
    def has_room(self) -> bool:
        """May there be more?"""

    async def room(self) -> None:
        """Wait until there may be more."""


class Connection:
    """One connection, until it is lost or the stream is over."""

    def __init__(
        self,
        stream: trio.abc.Stream,
        engine: ClientEngine,
        taker: Taker,
        policy: ClientPolicy,
        observer: Observer | None,
    ) -> None:
        self._stream = stream
        self._engine = engine
        self._taker = taker
        self._policy = policy
        self._observer = observer
        self._began = trio.current_time()
        self._paused = 0.0  # s without reading: meanwhile no line can be late
        self._reading = trio.CancelScope()
        self._is_leaving = False
        self._is_writing = False
        self._cannot_write = False
        self._rung = trio.lowlevel.ParkingLot()
        self._wrote = trio.lowlevel.ParkingLot()
        self._loss: LinkLost | None = None

    async def run(self) -> None:
        """Until there is nothing more to be had here. The caller closes the stream."""
        engine = self._engine
        engine.connection_made(self._now())
        try:
            # Nothing comes before the request is out; an acknowledgement that cannot be written later is no loss.
            if await self._write_out():
                async with background() as nursery:
                    nursery.start_soon(self._write)
                    await self._read()
                    if engine.standing is Standing.FINISHED or self._is_leaving:
                        await self._settle()
        finally:
            engine.connection_lost(self._now())
            self._taker.hear()
        if self._loss is not None and self._observer is not None and not engine.over:
            self._observer.error(self._loss)

    def ring(self) -> None:
        """The engine may have something to write."""
        self._rung.unpark_all()

    def leave(self) -> None:
        """Read no more; write what is owed, then end."""
        self._is_leaving = True
        self._reading.cancel()
        self._wrote.unpark_all()

    # --- reading

    async def _read(self) -> None:
        engine, taker = self._engine, self._taker
        try:
            with self._reading:
                while not engine.over:
                    if not taker.has_room:
                        await self._pause()
                    if engine.unparsed:
                        engine.receive_bytes(b"", self._now())
                    elif not await self._receive():
                        return
                    taker.hear()
        except BROKEN as error:
            self._lose("the connection broke", by="network", cause=error)

    async def _pause(self) -> None:
        began = trio.current_time()
        await self._taker.room()
        self._paused += trio.current_time() - began

    async def _receive(self) -> bool:
        """Read once, or find out that it takes too long; is there to be more?"""
        engine = self._engine
        late = engine.next_deadline()
        late = math.inf if late is None else late + self._paused
        silence = self._policy.silence
        given_up = math.inf if silence is None else trio.current_time() + silence
        with trio.CancelScope(deadline=min(late, given_up)):
            data = await self._stream.receive_some(READ)
            if data:
                engine.receive_bytes(bytes(data), self._now())
                return True
            engine.receive_eof(self._now())
            self._lose("the server hung up", by="peer")
            return False
        if late <= given_up:
            engine.handle_deadline(self._now())
            if engine.over or engine.standing is Standing.JOINED:
                return True
            silence = engine.limits.stall
        self._lose(f"nothing came for {silence:g} s", by="network")
        return False

    def _now(self) -> float:
        """The engine's clock, which stands still while we do not read."""
        return trio.current_time() - self._paused

    # --- writing

    async def _write(self) -> None:
        while await self._write_out():
            await self._rung.park()

    async def _write_out(self) -> bool:
        """All that the engine has to say; False if it cannot be written."""
        engine, observer = self._engine, self._observer
        self._is_writing = True
        try:
            while buffers := engine.buffers_to_send():
                if observer is not None:
                    for buffer in buffers:
                        observer.transport("out", buffer)
                await self._stream.send_all(b"".join(buffers))
        except BROKEN as error:
            self._cannot_write = True
            self._lose("the connection broke while writing", by="network", cause=error)
            return False
        finally:
            self._is_writing = False
            self._wrote.unpark_all()
        return True

    async def _settle(self) -> None:
        """The end of a stream is acknowledged as well, once the application has it; but not for ever."""
        with trio.move_on_after(self._policy.linger):
            while not self._cannot_write and (self._is_writing or self._engine.has_output() or self._awaits_ack):
                await self._wrote.park()

    @property
    def _awaits_ack(self) -> bool:
        return not self._is_leaving and self._engine.acknowledged < self._engine.last_id

    # --- the end

    def _lose(self, reason: str, *, by: Literal["peer", "network"], cause: BaseException | None = None) -> None:
        peer = self._stream.peer if isinstance(self._stream, Described) else ""
        self._loss = LinkLost(reason, by=by, peer=peer, after=trio.current_time() - self._began)
        self._loss.__cause__ = cause

"""The accept loop of stream listeners, with limits on connections and unfinished handshakes."""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Generic, TypeVar

import trio

from muxkit import Limits
from muxkit.runtime import bare_nursery, close_at_once

log = logging.getLogger("muxkit.adapters")

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
BACK_OFF = 0.05  # s, doubled up to BACK_OFF_MOST while accept keeps failing
BACK_OFF_MOST = 1.0

WireT = TypeVar("WireT", bound=trio.abc.Stream)
LinkT = TypeVar("LinkT", bound=trio.abc.Stream)

Handshake = Callable[[WireT], AbstractAsyncContextManager[LinkT]]
"""Makes a context manager that does the handshake when entered and closes the link when left."""


async def serve_connections(
    listeners: Sequence[trio.abc.Listener[WireT]],
    handler: Callable[[WireT], Awaitable[None]],
    *,
    limits: Limits | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run `handler` for each connection, until cancelled, and close its stream afterwards."""
    await serve_handshakes(listeners, nullcontext, handler, limits=limits, started=started)


async def serve_handshakes(
    listeners: Sequence[trio.abc.Listener[WireT]],
    handshake: Handshake[WireT, LinkT],
    handler: Callable[[LinkT], Awaitable[None]],
    *,
    limits: Limits | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run `handshake`, then `handler`, in a task for each connection, the first within `limits.handshake` seconds."""
    server = _Server(handshake, handler, limits or Limits())
    try:
        async with bare_nursery() as nursery:
            for listener in listeners:
                nursery.start_soon(server.accept_from, listener, nursery)
            started()
    finally:
        for listener in listeners:
            await close_at_once(listener)
    if server.failure is not None:
        raise server.failure


def log_failure(kind: str, error: Exception) -> None:
    """Log what a handler raised; its message may hold what a peer sent, so it is logged for debugging only."""
    if isinstance(error, (ConnectionError, trio.BrokenResourceError, trio.ClosedResourceError)):
        log.info("a %s ended with %s", kind, type(error).__name__)
    else:
        log.error("a %s's handler failed with %s", kind, type(error).__name__)
        log.debug("the handler's failure", exc_info=error)


class _Server(Generic[WireT, LinkT]):
    def __init__(
        self, handshake: Handshake[WireT, LinkT], handler: Callable[[LinkT], Awaitable[None]], limits: Limits
    ) -> None:
        self._handshake = handshake
        self._handler = handler
        self._limits = limits
        self._established: set[trio.CancelScope] = set()
        self._half_open: dict[trio.CancelScope, None] = {}  # oldest first
        self._room = trio.lowlevel.ParkingLot()
        self.failure: OSError | None = None
        """The error that ended accepting; raised without a group, once the connections have ended."""

    async def accept_from(self, listener: trio.abc.Listener[WireT], nursery: trio.Nursery) -> None:
        pause = BACK_OFF
        while True:
            await self._wait_for_room()
            try:
                wire = await listener.accept()
            except OSError as error:
                if error.errno not in OUT_OF_DESCRIPTORS:
                    self.failure = error
                    nursery.cancel_scope.cancel()
                    return
                log.warning("accept: %s; trying again in %g s", os.strerror(error.errno), pause)
                await trio.sleep(pause)
                pause = min(2 * pause, BACK_OFF_MOST)
                continue
            pause = BACK_OFF
            try:
                # Another listener may have taken the last place while this one was in accept().
                await self._wait_for_room()
            except trio.Cancelled:
                await close_at_once(wire)
                raise
            scope = trio.CancelScope()
            if self._handshake is nullcontext:  # nothing to wait for
                self._established.add(scope)
            else:
                scope.deadline = trio.current_time() + self._limits.handshake
                self._half_open[scope] = None
                self._drop_oldest()
            nursery.start_soon(self._connection, wire, scope)

    async def _wait_for_room(self) -> None:
        while len(self._established) >= self._limits.connections:
            await self._room.park()

    def _drop_oldest(self) -> None:
        """Drop the oldest unfinished handshakes above the limits, so that silent peers cannot block new connections."""
        while (
            len(self._half_open) > self._limits.half_open
            or len(self._established) + len(self._half_open) > self._limits.connections
        ):
            oldest = next(iter(self._half_open))
            del self._half_open[oldest]
            oldest.cancel()
            log.info("a connection was dropped in its handshake: Limits(half_open=%d)", self._limits.half_open)

    async def _connection(self, wire: WireT, scope: trio.CancelScope) -> None:
        try:
            # One scope for the whole connection, since a nursery opened in the handshake must end inside the scope.
            with scope:
                async with self._handshake(wire) as link:
                    if scope not in self._established:
                        await trio.lowlevel.checkpoint_if_cancelled()  # dropped at the last moment
                        del self._half_open[scope]
                        scope.deadline = math.inf
                        self._established.add(scope)
                    await self._handler(link)
            if scope.cancelled_caught and scope in self._half_open:
                log.info("a connection was dropped: no handshake in Limits(handshake=%g)", self._limits.handshake)
        except Exception as error:
            log_failure("connection", error)
        finally:
            self._half_open.pop(scope, None)
            self._established.discard(scope)
            self._room.unpark_all()
            await close_at_once(wire)

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
from muxkit.runtime import bare_nursery, close_at_once, may_log, turned_away

log = logging.getLogger("muxkit.adapters")

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
BACK_OFF = 0.05  # s, doubled up to BACK_OFF_MOST while accept keeps failing
BACK_OFF_MOST = 1.0

KeyT = TypeVar("KeyT")
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
        if may_log("connections that broke"):
            log.info("a %s ended with %s", kind, type(error).__name__)
    else:
        if may_log("handlers of connections that failed"):
            log.error("a %s's handler failed with %s", kind, type(error).__name__)
        log.debug("the handler's failure", exc_info=error)


class Admission(Generic[KeyT]):
    """The connections of a listener within its limits: those in their handshake and those established."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._half_open: dict[KeyT, trio.CancelScope] = {}  # oldest first
        self._established: set[KeyT] = set()

    @property
    def is_full(self) -> bool:
        """True if no further connection can be established."""
        return len(self._established) >= self._limits.connections

    def is_half_open(self, connection: KeyT) -> bool:
        return connection in self._half_open

    def begin(self, connection: KeyT) -> trio.CancelScope:
        """Return the scope of a handshake, which ends when its time is over.

        The oldest unfinished handshakes above the limits are cancelled, so that silent peers cannot block new
        connections.
        """
        limits, half_open = self._limits, self._half_open
        scope = half_open[connection] = trio.CancelScope(deadline=trio.current_time() + limits.handshake)
        while len(half_open) > limits.half_open or len(half_open) + len(self._established) > limits.connections:
            half_open.pop(next(iter(half_open))).cancel()
            if may_log("connections that were dropped in their handshake"):
                log.info("a connection was dropped in its handshake: Limits(half_open=%d)", limits.half_open)
            turned_away("half_open")
        return scope

    def establish(self, connection: KeyT) -> None:
        self._half_open.pop(connection, None)
        self._established.add(connection)

    def remove(self, connection: KeyT) -> None:
        self._half_open.pop(connection, None)
        self._established.discard(connection)


class _Server(Generic[WireT, LinkT]):
    def __init__(
        self, handshake: Handshake[WireT, LinkT], handler: Callable[[LinkT], Awaitable[None]], limits: Limits
    ) -> None:
        self._handshake = handshake
        self._handler = handler
        self._limits = limits
        self._admission: Admission[WireT] = Admission(limits)
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
            if self._handshake is nullcontext:  # nothing to wait for
                scope = trio.CancelScope()
                self._admission.establish(wire)
            else:
                scope = self._admission.begin(wire)
            nursery.start_soon(self._connection, wire, scope)

    async def _wait_for_room(self) -> None:
        if self._admission.is_full:
            turned_away("connections")
        while self._admission.is_full:
            await self._room.park()

    async def _connection(self, wire: WireT, scope: trio.CancelScope) -> None:
        try:
            # One scope for the whole connection, since a nursery opened in the handshake must end inside the scope.
            with scope:
                async with self._handshake(wire) as link:
                    if self._handshake is not nullcontext:
                        await trio.lowlevel.checkpoint_if_cancelled()  # dropped at the last moment
                        scope.deadline = math.inf
                        self._admission.establish(wire)
                    await self._handler(link)
            if scope.cancelled_caught and self._admission.is_half_open(wire):
                if may_log("connections without a handshake"):
                    log.info("a connection was dropped: no handshake in Limits(handshake=%g)", self._limits.handshake)
                turned_away("handshake")
        except Exception as error:
            log_failure("connection", error)
        finally:
            self._admission.remove(wire)
            self._room.unpark_all()
            await close_at_once(wire)

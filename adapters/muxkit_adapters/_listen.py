"""The accept loop of stream listeners.

It accepts connections, does their handshakes within a time limit, and runs a handler for each in its own task.
`muxkit.runtime.Admission` decides which connections get a place, and which have to leave for newer ones.
"""

from __future__ import annotations

import errno
import logging
import math
import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from typing import Generic, TypeVar

import trio

from muxkit import Limits, Refused
from muxkit.runtime import Admission, Place, Refusing, WaitableLink, bare_nursery, close_at_once, may_log, turned_away

log = logging.getLogger("muxkit.adapters")

OUT_OF_DESCRIPTORS = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
BACK_OFF = 0.05  # s; doubled up to BACK_OFF_MOST while accept keeps failing
BACK_OFF_MOST = 1.0
PATIENCE = 0.5  # share of `Limits.handshake` that a newcomer waits for a place; later its client may have given up
REFUSALS = 64  # connections that are refused simultaneously when the server is full; others wait in the backlog
REFUSAL_SECONDS = 5.0  # for the handshake of such a connection, and for sending the refusal
FULL = 503  # the code of the refusal

WireT = TypeVar("WireT", bound=trio.abc.Stream)
LinkT = TypeVar("LinkT")

Handshake = Callable[[WireT], AbstractAsyncContextManager[LinkT]]
"""Makes a context manager that does the handshake when it is entered, and closes the link when it is left."""


async def serve_connections(
    listeners: Sequence[trio.abc.Listener[WireT]],
    handler: Callable[[WireT], Awaitable[None]],
    *,
    limits: Limits | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Run `handler` for each connection until cancelled, and close its stream afterwards. There is no handshake."""
    await serve_handshakes(listeners, nullcontext, handler, limits=limits, started=started)


async def serve_handshakes(
    listeners: Sequence[trio.abc.Listener[WireT]],
    handshake: Handshake[WireT, LinkT],
    handler: Callable[[LinkT], Awaitable[None]],
    *,
    limits: Limits | None = None,
    started: Callable[[], None] = lambda: None,
) -> None:
    """Do `handshake` and run `handler` for each accepted connection, each in its own task, until cancelled.

    If `handler` implements `Refusing`, it also gets the connections for which there is no place, in order to tell the
    peer. Without `Refusing`, such connections wait in the kernel's backlog.

    Args:
        listeners: where to accept connections. They are closed at the end.
        handshake: does the handshake, within `limits.handshake` seconds.
        handler: gets each link. Its exceptions are logged.
        limits: how many connections and handshakes are allowed.
        started: called once all listeners accept.

    Raises:
        OSError: if accepting fails for another reason than a lack of descriptors or memory.
    """
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
    """Log an exception of a handler. Its text may quote data of the peer, so only the DEBUG log has it."""
    if isinstance(error, (ConnectionError, trio.BrokenResourceError, trio.ClosedResourceError)):
        if may_log("connections that broke"):
            # log: The handler of a connection ended with the connection. This is usual.
            log.info("a %s ended with %s", kind, type(error).__name__)
    else:
        if may_log("handlers of connections that failed"):
            # log: The handler of a connection raised an error. The DEBUG line after it has the traceback.
            log.error("a %s's handler failed with %s", kind, type(error).__name__)
        log.debug("the handler's failure", exc_info=error)


def report_slow_handshake(limits: Limits) -> None:
    """Log and count a connection that was dropped because its handshake took too long."""
    if may_log("connections that were dropped in their handshakes"):
        # log: A client didn't finish its handshake in time.
        log.info("a connection was dropped: no handshake in Limits(handshake=%g)", limits.handshake)
    turned_away("handshake")


class _Server(Generic[WireT, LinkT]):
    def __init__(
        self, handshake: Handshake[WireT, LinkT], handler: Callable[[LinkT], Awaitable[None]], limits: Limits
    ) -> None:
        self._handshake = handshake
        self._handler = handler
        self._limits = limits
        self._admission = Admission(limits)
        self._refusals = trio.CapacityLimiter(REFUSALS)
        # Only a handler that can send a refusal gets the connections for which there is no place.
        given: object = handler
        self._refusing = given if isinstance(given, Refusing) else None
        self._patience = math.inf if self._refusing is None else PATIENCE * limits.handshake
        self.failure: OSError | None = None
        """The error that ended accepting. It is raised, without a group, after the connections have ended."""

    async def accept_from(self, listener: trio.abc.Listener[WireT], nursery: trio.Nursery) -> None:
        pause = BACK_OFF
        while True:
            await self._admission.wait_for_place(patience=self._patience)
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
                if await self._admission.wait_for_place(patience=self._patience):
                    place = self._admission.admit(getattr(wire, "source", ""))
                    if place is not None:
                        nursery.start_soon(self._connection, wire, place)
                        continue
                else:
                    turned_away("connections")
                    await self._refusals.acquire_on_behalf_of(wire)
                    nursery.start_soon(self._refuse, wire)
                    continue
            except trio.Cancelled:
                await close_at_once(wire)
                raise
            await close_at_once(wire)

    async def _connection(self, wire: WireT, place: Place) -> None:
        try:
            # The scope of the place surrounds everything, because a nursery of the handshake has to end inside it.
            with place.held():
                try:
                    if self._handshake is nullcontext:  # there is no handshake
                        place.establish()
                    else:
                        if isinstance(wire, WaitableLink):
                            await wire.wait_readable()  # the client sends first
                        await self._admission.start(place)
                    async with self._handshake(wire) as link:
                        await trio.lowlevel.checkpoint_if_cancelled()  # the place may have been taken away just now
                        place.establish()
                        await self._handler(link)
                finally:
                    if place.timed_out:
                        report_slow_handshake(self._limits)
        except Exception as error:
            log_failure("connection", error)
        finally:
            await close_at_once(wire)

    async def _refuse(self, wire: WireT) -> None:
        """Do the handshake, then send a refusal because the server is full."""
        assert self._refusing is not None
        limits = self._limits
        told = Refused(f"the server is full: Limits(connections={limits.connections})", code=FULL)
        try:
            with trio.move_on_after(min(REFUSAL_SECONDS, limits.handshake)):
                async with self._handshake(wire) as link:
                    await self._refusing.refuse(link, told)
        except Exception as error:
            log_failure("connection", error)
        finally:
            self._refusals.release_on_behalf_of(wire)
            await close_at_once(wire)

"""A restream server: the service over a store, and its listeners."""

from __future__ import annotations

import errno
import logging
import os
import random
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import trio

from muxkit._limits import Limits
from muxkit.protocols.restream.applications import Numbers, Permutation
from muxkit.protocols.restream.engine import ServerConfig
from muxkit.protocols.restream.plugin import PROTOCOL, transport_of
from muxkit.protocols.restream.server.backend import backend_of
from muxkit.protocols.restream.server.connection import ClientConnection, ServerContext, shown
from muxkit.runtime import background, close_at_once, protect_package
from muxkit.storage import StoreError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit._observer import Observer
    from muxkit.protocols.restream.applications import StatelessApplication
    from muxkit.protocols.restream.server.backend import AnyApplication, AnyStore, Sessions

    Listeners = Sequence[trio.abc.Listener[trio.abc.Stream]]
    Handler = Callable[[trio.abc.Stream], Awaitable[None]]
    Started = Callable[[list[str]], None]

LINGER: Final = 5.0  # s that a client has to hang up after the last line
SWEEP_INTERVAL: Final = 5.0  # s between two deletions of expired sessions
OUT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
ACCEPT_PAUSE: Final = 0.1  # s after an accept without a free descriptor

_log = logging.getLogger("muxkit")


class Service:
    """A restream server without a listener: call `handle` for each connection, and keep `sweep` running.

    `store` is one of `open_store`, or any object with the specification's five methods (`Sessions`). The other
    arguments are those of `serve`.
    """

    def __init__(
        self,
        store: AnyStore | Sessions[Any, Any],
        *,
        application: AnyApplication | None = None,
        stateless: StatelessApplication | None = None,
        config: ServerConfig | None = None,
        limits: Limits | None = None,
        observer: Observer | None = None,
        takeover: bool = True,
        expiry: float | None = None,
        pace: float | None = None,
        linger: float = LINGER,
        random32: Callable[[], int] | None = None,
    ) -> None:
        if expiry is not None and not expiry >= 0:
            raise ValueError(f"expiry={expiry}: must be a number of seconds, or None for the store's own")
        if pace is not None and not pace > 0:
            raise ValueError(f"pace={pace}: must be a number of messages a second above 0, or None")
        chosen = application or Numbers()
        draw = random32 or (lambda: random.getrandbits(32))
        self._context = ServerContext(
            backend=backend_of(store, chosen, takeover=takeover, expiry=expiry, random32=draw),
            stateless=stateless or Permutation(),
            config=config or ServerConfig(),
            limits=limits or Limits(),
            observer=observer,
            pace=pace,
            linger=linger,
            random32=draw,
        )
        self._connections: set[ClientConnection] = set()
        self._numbers = count(1)
        self._ended = trio.lowlevel.ParkingLot()
        self._is_draining = False

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    @property
    def limits(self) -> Limits:
        return self._context.limits

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end; closes the stream."""
        if self._is_draining:
            # If it were closed now, its client would reconnect at once; after the end of the server it waits first.
            await trio.sleep_forever()
        connection = ClientConnection(stream, self._context, next(self._numbers))
        self._connections.add(connection)
        self._context.silent[connection] = None
        self._drop_oldest_silent()
        try:
            await connection.run()
        finally:
            self._connections.discard(connection)
            self._context.silent.pop(connection, None)
            self._ended.unpark_all()

    async def sweep(self) -> None:
        """Delete expired sessions every few seconds, until cancelled."""
        while True:
            await trio.sleep(SWEEP_INTERVAL)
            try:
                await self._release_again()
                await self._context.backend.expire()
            except StoreError as error:
                self._context.warn("sweeping", error)

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new requests, write what is queued for up to `grace` seconds, then close the rest.

        Streams end between two messages; their clients continue at the next server.
        """
        self._is_draining = True
        for connection in [*self._connections]:
            connection.drain(grace)
        with trio.move_on_after(grace):
            while self._connections:
                await self._ended.park()
        for connection in [*self._connections]:
            connection.drop("the server ended")

    def _drop_oldest_silent(self) -> None:
        """Close the oldest connection without a request for a new one, so silent clients cannot keep others out."""
        most, silent = self._context.limits.half_open, self._context.silent
        while len(silent) > most:
            oldest = next(iter(silent))
            del silent[oldest]
            oldest.drop(f"more than Limits(half_open={most}) connections had not said what they want")
            _log.info("%s was dropped before its first line: Limits(half_open=%d)", oldest.client, most)

    async def _release_again(self) -> None:
        """Release the sessions for which the store failed before."""
        for uuid, claim in [*self._context.unreleased.items()]:
            if uuid not in self._context.owners:
                await self._context.backend.release(claim)
            self._context.unreleased.pop(uuid, None)


class Served:
    """A running server."""

    def __init__(self, service: Service, urls: list[str], scope: trio.CancelScope) -> None:
        self._service = service
        self._scope = scope
        self.urls = tuple(urls)

    @property
    def url(self) -> str:
        """The first URL that a client can connect to."""
        return self.urls[0]

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._service.connections

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new requests, write what is queued for up to `grace` seconds, then stop."""
        await self._service.shutdown(grace=grace)
        self._scope.cancel()


async def serve(
    listen: str | Listeners,
    store: AnyStore | Sessions[Any, Any],
    *,
    application: AnyApplication | None = None,
    stateless: StatelessApplication | None = None,
    config: ServerConfig | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    takeover: bool = True,
    expiry: float | None = None,
    pace: float | None = None,
    linger: float = LINGER,
    random32: Callable[[], int] | None = None,
    task_status: trio.TaskStatus[Served] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Serve both modes until cancelled; `served = await nursery.start(restream.serve, url, store)`.

    `listen` is a URL, `restream+tcp://127.0.0.1:7000`, or bound listeners (`trio.SocketListener`). `application` makes
    the messages of sessions (by default the specification's numbers), `stateless` the values of the other streams.
    `expiry`: seconds that a session outlives its connection, the store's own number if None. `pace`: the most messages
    a second on each connection. Without `takeover` a second connection of a session gets an error, not the first one.
    `linger`: seconds that a client has to hang up after the last line. `random32` draws the seeds of sessions. Other
    keyword arguments are options of the transport.

    A failure of the store or the application ends its connection with an error line; the others continue.
    """
    service = Service(
        store,
        application=application,
        stateless=stateless,
        config=config,
        limits=limits,
        observer=observer,
        takeover=takeover,
        expiry=expiry,
        pace=pace,
        linger=linger,
        random32=random32,
    )

    def started(urls: list[str]) -> None:
        task_status.started(Served(service, urls, scope))

    with trio.CancelScope() as scope:
        async with background() as nursery:
            nursery.start_soon(service.sweep)
            if isinstance(listen, str):
                await _listen_at(listen, service.handle, limits=service.limits, started=started, options=options)
            elif options:
                raise TypeError(f"listeners take no options of a transport: {', '.join(options)}")
            else:
                await _listen_on(listen, service.handle, limits=service.limits, started=started)


# ---------------------------------------------------------------------------- listeners


async def _listen_at(url: str, handler: Handler, *, limits: Limits, started: Started, options: dict[str, Any]) -> None:
    """Run `handler` for each connection to `url`, until cancelled."""
    transport, address = transport_of(url)
    scheme = url.partition("://")[0]
    status = _Started(lambda addresses: started([f"{scheme}://{each}" for each in addresses]))
    await transport.serve(handler, address, limits=limits, task_status=status, **options)


async def _listen_on(listeners: Listeners, handler: Handler, *, limits: Limits, started: Started) -> None:
    """Run `handler` for each connection to bound listeners, which are closed at the end."""
    slots = trio.Semaphore(limits.connections)
    try:
        async with background() as nursery:
            for listener in listeners:
                nursery.start_soon(_accept, listener, handler, slots, nursery)
            started([_url(listener) for listener in listeners])
            await trio.sleep_forever()
    finally:
        for listener in listeners:
            await close_at_once(listener)


async def _accept(
    listener: trio.abc.Listener[trio.abc.Stream], handler: Handler, slots: trio.Semaphore, nursery: trio.Nursery
) -> None:
    while True:
        await slots.acquire()  # more wait in the kernel's backlog
        try:
            stream = await listener.accept()
        except OSError as error:
            slots.release()
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
            _log.warning("accept: %s; trying again in %g s", os.strerror(error.errno), ACCEPT_PAUSE)
            await trio.sleep(ACCEPT_PAUSE)
        else:
            nursery.start_soon(_handle, stream, handler, slots)


async def _handle(stream: trio.abc.Stream, handler: Handler, slots: trio.Semaphore) -> None:
    try:
        await handler(stream)
    except Exception as error:
        # Its text may quote what a peer sent, so it is for debugging only.
        _log.error("a connection's handler failed with %s", type(error).__name__)
        _log.debug("in full", exc_info=error)
    finally:
        slots.release()
        await close_at_once(stream)


def _url(listener: trio.abc.Listener[trio.abc.Stream]) -> str:
    if not isinstance(listener, trio.SocketListener):
        return shown(repr(listener))
    name = listener.socket.getsockname()
    if listener.socket.family not in (trio.socket.AF_INET, trio.socket.AF_INET6):
        return f"{PROTOCOL}+unix://{os.fsdecode(name)}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{PROTOCOL}+tcp://{host}:{name[1]}"


class _Started(trio.TaskStatus[list[str]]):
    def __init__(self, started: Started) -> None:
        self._started = started

    def started(self, value: list[str] | None = None) -> None:
        self._started(value or [])


protect_package("muxkit.protocols.restream")

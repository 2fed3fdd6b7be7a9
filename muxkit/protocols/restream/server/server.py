"""How does a program serve restream? One service for both modes, over any byte stream, with the sessions in a store."""

from __future__ import annotations

import logging
import random
from itertools import count
from typing import TYPE_CHECKING, Any, Final

import attrs
import trio

from muxkit._limits import Limits
from muxkit.protocols.restream.applications import Numbers, Permutation
from muxkit.protocols.restream.engine.config import ServerConfig
from muxkit.protocols.restream.server.backend import books_of
from muxkit.protocols.restream.server.connection import Conversation
from muxkit.protocols.restream.server.context import Terms
from muxkit.protocols.restream.server.listen import listen_at, listen_on
from muxkit.protocols.restream.server.log import shown, where
from muxkit.protocols.restream.store.errors import StoreError
from muxkit.runtime import background, protect_package, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from muxkit._observer import Observer
    from muxkit.protocols.restream.applications import StatelessApplication
    from muxkit.protocols.restream.server.backend import AnyApplication, AnyStore, Claim, Sessions
    from muxkit.protocols.restream.server.listen import Listeners

LINGER: Final = 5.0  # s, for taking leave
SWEEP: Final = 5.0  # s between two looks for sessions whose time is over
QUIET: Final = 1.0  # s; of troubles that come faster only the first is told in the log

_log = logging.getLogger("muxkit")


class Service:
    """A restream server without its listener: give each connection to `handle`, and keep `sweep` running.

    `store` is one of `open_store`, or any object with the document's five methods (`Sessions`). The other arguments
    are those of `serve`.
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
        self._terms = Terms(
            books=books_of(store, chosen, takeover=takeover, expiry=expiry, random32=draw),
            stateless=stateless or Permutation(),
            config=config or ServerConfig(),
            limits=limits or Limits(),
            observer=observer,
            pace=pace,
            linger=linger,
            random32=draw,
        )
        self._conversations: set[Conversation] = set()
        self._asking: dict[Conversation, None] = {}  # that have not said what they want, oldest first
        self._streams: dict[str, Conversation] = {}  # by session, the newest of each
        self._undone: dict[str, Claim] = {}  # sessions whose store could not be told that their client is gone
        self._queues: dict[str, _Queue] = {}  # by session, of connections that want it
        self._numbers = count(1)
        self._ended = trio.lowlevel.ParkingLot()
        self._is_draining = False
        self._told_at = -QUIET

    @property
    def connections(self) -> int:
        """How many there are now."""
        return len(self._conversations)

    @property
    def limits(self) -> Limits:
        return self._terms.limits

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end; closes the stream."""
        if self._is_draining:
            # Its client would be back at once if it were closed; at our end it finds nobody and waits.
            await trio.sleep_forever()
        conversation = Conversation(stream, self._terms, self, next(self._numbers))
        self._conversations.add(conversation)
        self._asking[conversation] = None
        self._drop_the_oldest()
        try:
            await conversation.run()
        finally:
            self._conversations.discard(conversation)
            self._asking.pop(conversation, None)
            self._ended.unpark_all()

    async def sweep(self) -> None:
        """Have the store delete expired sessions, every few seconds until cancelled."""
        while True:
            await trio.sleep(SWEEP)
            try:
                await self._do_what_was_left_undone()
                await self._terms.books.expire()
            except StoreError as error:
                self.trouble("sweeping", error)

    async def shutdown(self, *, grace: float) -> None:
        """Take no new requests, finish what is being sent for up to `grace` seconds, then cut the rest.

        Streams end between two messages; their clients go on with the next server.
        """
        self._is_draining = True
        for conversation in [*self._conversations]:
            conversation.drain(grace)
        with trio.move_on_after(grace):
            while self._conversations:
                await self._ended.park()
        for conversation in [*self._conversations]:
            conversation.drop("the server ended")

    # --- what a connection tells

    def asked(self, conversation: Conversation) -> None:
        self._asking.pop(conversation, None)

    @protected_manager
    async def claiming(self, conversation: Conversation, uuid: str) -> AsyncGenerator[bool, None]:
        queue = self._queues.setdefault(uuid, _Queue())
        queue.length += 1
        try:
            async with queue.lock:
                holder = self._streams.get(uuid)
                yield holder is not None and holder.number > conversation.number
        finally:
            queue.length -= 1
            if not queue.length:
                del self._queues[uuid]

    def took(self, conversation: Conversation) -> None:
        claim = conversation.claim
        assert claim is not None
        older = self._streams.get(claim.uuid)
        if older is not None:
            older.supersede(claim.uuid)
        self._streams[claim.uuid] = conversation
        self._undone.pop(claim.uuid, None)

    def left(self, conversation: Conversation, *, undone: bool) -> None:
        claim = conversation.claim
        assert claim is not None
        if self._streams.get(claim.uuid) is conversation:
            del self._streams[claim.uuid]
            if undone:
                self._undone[claim.uuid] = claim

    def trouble(self, who: str, error: Exception) -> None:
        now = trio.current_time()
        if now - self._told_at >= QUIET:
            self._told_at = now
            # Only what a store says of itself: the text of any other error may quote a payload.
            told = shown(f"{type(error).__name__}: {error}") if isinstance(error, StoreError) else where(error)
            _log.warning("%s: %s", who, told)
        _log.debug("in full", exc_info=error)

    # --- inside

    def _drop_the_oldest(self) -> None:
        """Who says nothing gives way to who comes: silent connections keep nobody out."""
        most = self._terms.limits.half_open
        while len(self._asking) > most:
            oldest = next(iter(self._asking))
            del self._asking[oldest]
            oldest.drop(f"more than Limits(half_open={most}) connections had not said what they want")
            _log.info("%s was dropped before its first line: Limits(half_open=%d)", oldest.who, most)

    async def _do_what_was_left_undone(self) -> None:
        for uuid, claim in [*self._undone.items()]:
            if uuid not in self._streams:
                await self._terms.books.release(claim)
            self._undone.pop(uuid, None)


@attrs.define(eq=False)
class _Queue:
    lock: trio.Lock = attrs.field(factory=trio.Lock)
    length: int = 0


class Served:
    """A running server."""

    def __init__(self, service: Service, urls: list[str], scope: trio.CancelScope) -> None:
        self._service = service
        self._scope = scope
        self.urls = tuple(urls)

    @property
    def url(self) -> str:
        """What a client connects to; the first, if there are several addresses."""
        return self.urls[0]

    @property
    def connections(self) -> int:
        """How many there are now."""
        return self._service.connections

    async def shutdown(self, *, grace: float) -> None:
        """Take no new requests, finish what is being sent for up to `grace` seconds, then stop."""
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

    `listen` is a URL, `restream+tcp://127.0.0.1:7000`, or listeners that are bound already (`trio.SocketListener`).
    `application` is what sessions stream, the document's numbers if nothing is said, and `stateless` what the other
    streams are. `expiry`: seconds that a session outlives its connection, the store's own number if None. `pace`: at
    most so many messages a second on each connection. Without `takeover` a second connection of a session gets the
    error instead of the first. `linger` seconds are a client's to hang up after the last line. `random32` draws the
    seeds of sessions. Other keyword arguments are options of the transport.

    What fails in the store or the application ends its own connection with an error line; the others go on.
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
                await listen_at(listen, service.handle, limits=service.limits, started=started, options=options)
            elif options:
                raise TypeError(f"listeners take no options of a transport: {', '.join(options)}")
            else:
                await listen_on(listen, service.handle, limits=service.limits, started=started)


protect_package("muxkit.protocols.restream")

"""A restream server: the service over a store, its connections, and its listeners."""

from __future__ import annotations

import errno
import logging
import math
import os
import random
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, Final, TypeVar, Unpack

import trio

from muxkit._errors import Refused, RemoteProtocolError
from muxkit._info import SessionInfo
from muxkit._limits import Limits
from muxkit._observer import (
    Facts,
    Observer,
    facts_of,
    for_connection,
    frames_of,
    measured,
    tell_limit,
    telling_of_listener,
)
from muxkit._options import ListenOptions
from muxkit.protocols.restream.applications import Numbers, Permutation, StatelessApplication
from muxkit.protocols.restream.engine import (
    Acknowledged,
    Failed,
    HungUp,
    ListingRequested,
    Phase,
    Registered,
    Resumed,
    ServerConfig,
    ServerEngine,
    ServerEvent,
    Silent,
    StatelessRequested,
    StatusRequested,
)
from muxkit.protocols.restream.plugin import PROTOCOL, transport_of
from muxkit.protocols.restream.server.sessions import (
    AnyApplication,
    AnyStore,
    NotAcknowledged,
    PlainSessions,
    ServerSession,
    ServerSessions,
    Sessions,
    SessionsFailed,
    StoredSessions,
    has_owners,
)
from muxkit.protocols.restream.store import (
    IdsExhausted,
    MessageGone,
    NotJson,
    OutOfOrderAck,
    SessionBusy,
    SessionExists,
    SessionFinished,
    StoreError,
    StoreFailed,
    Superseded,
    UnknownMessage,
    UnknownSession,
)
from muxkit.protocols.restream.store import Status as SessionStatus
from muxkit.protocols.restream.store.rules import TooManySessions
from muxkit.protocols.restream.wire import (
    INLINE_DIGITS,
    ErrorCode,
    RequestRefused,
    Status,
    format_integer,
    parse_integer,
)
from muxkit.runtime import (
    Admission,
    Place,
    PumpOwner,
    SessionStats,
    StreamPump,
    background,
    close_at_once,
    current_place,
    describe,
    home_thread,
    loggable_text,
    may_log,
    protect_package,
)
from muxkit.trace import traced

Listeners = Sequence[trio.abc.Listener[trio.abc.Stream]]
Handler = Callable[[trio.abc.Stream], Awaitable[None]]


ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

BATCH: Final = 128  # values that are made at once, so that no turn of Trio's loop is long
READ_BATCH: Final = 1024  # messages that are read at once: about 1 ms if their stored JSON is passed on
FIRST_BATCH: Final = 8  # the same before the size of a message is known
HIGH_WATER: Final = 64 * 1024  # bytes in the outbox at which no message is made; `Limits.outbox` if that is less
PACED_SPAN: Final = 0.05  # s; with a pace, as many messages at once as this time allows
BLOCKED_TIMEOUT: Final = 5.0  # s without room after which a newer connection on another server is looked for
CLAIM_TIMEOUT: Final = 10.0  # s that a store may take to give a session to a connection
RELEASE_TIMEOUT: Final = 5.0  # s that a store may take to note that the connection is over
LINGER: Final = 5.0  # s that a client has to hang up after the last line
SWEEP_INTERVAL: Final = 5.0  # s between two deletions of expired sessions
OUT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
ACCEPT_PAUSE: Final = 0.1  # s after an accept without a free descriptor
LOG_INTERVAL: Final = 1.0  # s; of failures that come faster only the first is a warning
STORE_TIMEOUT: Final = 30.0  # s that a request waits for a store in trouble; then its client may find another server
FIRST_PAUSE: Final = 0.1  # s before a store in trouble is tried again; the pause doubles with each failure
MAX_PAUSE: Final = 2.0  # s
TROUBLE_ENDS: Final = 5 * MAX_PAUSE  # s without a failure after which the next one begins another trouble

_BITS_PER_DIGIT: Final = 3.33
_UUID: Final = re.compile(r"([0-9a-fA-F]{8})(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

_log = logging.getLogger("muxkit")


# ---------------------------------------------------------------------------- the service


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
        application = application or Numbers()
        random32 = random32 or (lambda: random.getrandbits(32))
        self.limits: Limits = limits or Limits()
        self._sessions: ServerSessions = (
            StoredSessions(store, application, takeover=takeover, expiry=expiry, random32=random32)
            if has_owners(store)
            else PlainSessions(store, application, takeover=takeover, random32=random32)
        )
        self._stateless = stateless or Permutation()
        self._config = config or ServerConfig()
        self._observer = observer
        self._pace = pace
        self._linger = linger
        self._random32 = random32
        self._own_places = Admission(self.limits)
        self._owners: dict[str, ClientConnection] = {}  # the newest connection of each session
        self._claims: dict[str, trio.Lock] = {}  # held by the connection that claims a session; others wait, in order
        self._unreleased: dict[str, ServerSession] = {}  # those that could not be released when a connection was closed
        self._warned_at = -math.inf
        self._trouble = Trouble()
        self._connections: set[ClientConnection] = set()
        self._numbers = count(1)
        self._ended = trio.lowlevel.ParkingLot()
        self.is_draining: bool = False

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return len(self._connections)

    async def handle(self, stream: trio.abc.Stream) -> None:
        """Serve one connection to its end; closes the stream."""
        if self.is_draining:
            # If it were closed now, its client would reconnect at once; after the end of the server it waits first.
            await trio.sleep_forever()
        if (place := current_place()) is not None:
            place.await_word()
            await self._serve(stream, place)
            return
        # The stream comes from a server without places, so the service has some of its own.
        try:
            await self._own_places.wait_for_place()
        except BaseException:
            await close_at_once(stream)
            raise
        if (place := self._own_places.admit()) is not None:
            place.scope.deadline = math.inf  # the engine has a deadline for the first line
            with place.held():
                await self._serve(stream, place)

    async def _serve(self, stream: trio.abc.Stream, place: Place) -> None:
        connection = ClientConnection(stream, self, next(self._numbers))
        self._connections.add(connection)
        try:
            with place.occupy(connection):
                await connection.run()
        finally:
            self._connections.discard(connection)
            self._ended.unpark_all()

    async def sweep(self) -> None:
        """Delete expired sessions every few seconds, until cancelled."""
        while True:
            await trio.sleep(SWEEP_INTERVAL)
            try:
                await self._release_again()
                await self._sessions.expire()
            except StoreError as error:
                if error.passes:
                    self._trouble.failed(error)
                else:
                    self._warn("sweeping", error)

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new requests, write what is queued for up to `grace` seconds, then close the rest.

        Streams end between two messages; their clients continue at the next server.
        """
        self.is_draining = True
        for connection in [*self._connections]:
            connection.drain(grace)
        with trio.move_on_after(grace):
            while self._connections:
                await self._ended.park()
        for connection in [*self._connections]:
            connection.drop("the server ended")

    async def _release_again(self) -> None:
        """Release the sessions for which the store failed before."""
        for uuid, session in [*self._unreleased.items()]:
            if uuid not in self._owners:
                await session.release()
            self._unreleased.pop(uuid, None)

    async def when_possible(
        self,
        act: Callable[[], Awaitable[ResultT]],
        *,
        within: float = STORE_TIMEOUT,
        is_in_vain: Callable[[], bool] = lambda: False,
    ) -> ResultT:
        """Call the store, and call it again while it has trouble that passes, such as a full disk.

        An error line ends a stream for good, because the specification forbids a client to resume after one. So a
        client must not get one for a state that a server can wait out. Its connection stays open meanwhile.

        Args:
            act: The call. It may have taken effect although it failed, so it has to be one that may be repeated.
            within: The seconds after which the error is raised.
            is_in_vain: Returns True when nobody needs the result any more.
        """
        gives_up_at = trio.current_time() + within
        pause = FIRST_PAUSE
        while True:
            try:
                return await act()
            except StoreError as error:
                if not error.passes or isinstance(error, TooManySessions):
                    raise  # of a session that does not begin nothing is lost, so its client is told at once
                self._trouble.failed(error)
                if trio.current_time() + pause > gives_up_at or is_in_vain():
                    raise
            await trio.sleep(pause)
            pause = min(2 * pause, MAX_PAUSE)

    def _warn(self, about: str, error: Exception) -> None:
        """Log a failure that is not the client's fault."""
        now = trio.current_time()
        if now - self._warned_at >= LOG_INTERVAL:
            self._warned_at = now
            # Only a store's own text: that of any other error may quote a message.
            text = shown(f"{type(error).__name__}: {error}") if isinstance(error, StoreError) else traceback_of(error)
            # log "WHAT: ERROR": The store or the application of a restream server failed for good, and its client got
            # an error. At most one line per second.
            _log.warning("%s: %s", about, text)
        _log.debug("in full", exc_info=error)


class Trouble:
    """Logs the trouble of a store that passes: a WARNING for the first failure and for each doubling of its time.

    All calls share one, because a full disk fails each of them. The trouble is over when no call has failed for a
    while. Until then some calls may succeed: reading does on a full disk.
    """

    def __init__(self) -> None:
        self._began = self._next = 0.0
        self._last = -math.inf

    def failed(self, error: StoreError) -> None:
        now = trio.current_time()
        if now - self._last > TROUBLE_ENDS:
            self._began = self._next = now
        self._last = now
        is_due = now >= self._next
        if is_due:
            self._next = now + max(now - self._began, LOG_INTERVAL)
        text = shown(f"{type(error).__name__}: {error}")
        if is_due:
            # log "the session store has failed for N s, and requests wait for it: ERROR": The store of a restream
            # server has trouble that may pass, such as a full disk or a database that restarts. The server tries again,
            # and its clients wait. The line comes for the first failure and for each doubling of the time.
            _log.warning(
                "the session store has failed for %.0f s, and requests wait for it: %s", now - self._began, text
            )
        else:
            # log "the session store failed again: ERROR": The same trouble goes on.
            _log.debug("the session store failed again: %s", text)


class Served:
    """A running server."""

    def __init__(self, service: Service, urls: list[str], scope: trio.CancelScope, closed: trio.Event) -> None:
        self._thread = home_thread()
        self._service = service
        self._scope = scope
        self._closed = closed
        self.urls: tuple[str, ...] = tuple(urls)

    @property
    def url(self) -> str:
        """The first URL that a client can connect to."""
        return self.urls[0]

    @property
    def connections(self) -> int:
        """The number of open connections."""
        return self._service.connections

    @property
    def is_draining(self) -> bool:
        """True from the begin of `shutdown`."""
        return self._service.is_draining

    async def shutdown(self, *, grace: float) -> None:
        """Accept no new requests, write queued messages for up to `grace` seconds, then close the listeners.

        The addresses are free when this returns.
        """
        self._thread.check()
        await self._service.shutdown(grace=grace)
        self._scope.cancel()
        await self._closed.wait()


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
    **options: Unpack[ListenOptions],
) -> None:
    """Serve both modes until cancelled; `served = await nursery.start(restream.serve, url, store)`.

    `listen` is a URL, `restream+tcp://127.0.0.1:7000`, or bound listeners (`trio.SocketListener`). `application` makes
    the messages of sessions (by default the specification's numbers), `stateless` the values of the other streams.
    `expiry`: seconds that a session outlives its connection, the store's own number if None. `pace`: the most messages
    a second on each connection. Without `takeover` a second connection of a session gets an error, not the first one.
    `linger`: seconds that a client has to hang up after the last line. `random32` draws the seeds of sessions. The
    other options are those of `ListenOptions`, for the transport.

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

    closed = trio.Event()
    with trio.CancelScope() as scope, ExitStack() as at_end:
        at_end.callback(closed.set)
        async with background() as nursery:
            nursery.start_soon(service.sweep)
            if isinstance(listen, str):
                transport, address = transport_of(listen, "server", options)
                accepting = partial(transport.serve, service.handle, address, limits=service.limits, **options)
                scheme = listen.partition("://")[0]
                with telling_of_listener(observer, "restream", scheme.partition("+")[2]):
                    urls = [f"{scheme}://{each}" for each in await nursery.start(accepting)]
            elif options:
                raise TypeError(f"listeners take no options of a transport: {', '.join(options)}")
            else:
                urls = [_url(listener) for listener in listen]
                nursery.start_soon(_listen_on, listen, service.handle, service.limits)
            task_status.started(Served(service, urls, scope, closed))
            await trio.sleep_forever()


# ---------------------------------------------------------------------------- one connection


class ClientConnection(PumpOwner[ServerEvent]):
    """One connection, from its first line to its end."""

    def __init__(self, stream: trio.abc.Stream, service: Service, number: int) -> None:
        self.number = number
        """Higher for connections that came later."""
        self._service = service
        observer = traced(for_connection(service._observer, "server restream"), "server restream")
        self.info: SessionInfo = describe(stream, "restream")
        self.facts: Facts | None = facts_of(observer)
        self.observer: Observer | None = frames_of(observer)
        self._engine = ServerEngine(service._config, limits=service.limits, observer=self.observer)
        self._pump: StreamPump[ServerEvent] = StreamPump(stream, self._engine, self)
        self._session: ServerSession | None = None
        self._request: ServerEvent | None = None
        self._nursery: trio.Nursery | None = None
        self._serving = trio.CancelScope()
        self._closing = trio.CancelScope()
        self._changed = trio.lowlevel.ParkingLot()
        self._high_water = min(HIGH_WATER, service.limits.outbox)
        self._line_size = 0  # bytes of a line in the last batch, on average
        self._send_at = -math.inf  # when the next message may be queued
        self._to_store = self._stored = 0  # the last acknowledged id, and the last one that the store has
        self._is_storing = False

    async def run(self) -> None:
        """Serve the connection; every failure goes to the client or to the log."""
        with measured(self.facts, self):
            await self._run()

    def stats(self) -> SessionStats:
        """What the connection has sent, received and holds."""
        engine = self._engine
        return SessionStats(
            bytes_received=engine.bytes_received,
            bytes_sent=self._pump.bytes_sent,
            messages_received=0,
            messages_sent=engine.messages_sent,
            channels=0 if self._pump.is_lost else 1,
            queued=engine.outbox + self._pump.unsent,
            round_trip=None,
        )

    async def _run(self) -> None:
        async with background() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._pump.run)
            try:
                with self._serving:
                    await self._serve()
                with self._closing:
                    await self._pump.flushed()
                    self._close_within(self._service._linger)
                    await self._pump.hang_up()  # then acknowledgements are still handled until the client hangs up
                self._pump.lose("the client did not hang up in time", by="peer")
            finally:
                self._pump.lose("the service ended", by="local")
                await self._release()

    # --- from outside

    @property
    def client(self) -> str:
        """The name of the client for a log."""
        return shown(self._pump.peer) or "a client"

    def supersede(self, uuid: str) -> None:
        """End the connection because a newer one owns the session."""
        self._fail(f"session {uuid} was taken over by a newer connection", ErrorCode.BUSY)

    def activity(self) -> int | None:
        """Return 0 until there is a request, as `muxkit.runtime.Occupant`; a stream that was asked for is a channel."""
        return 0 if self._request is None else None

    def send_away(self, refused: Refused) -> None:
        """End the connection with an error line, since it has to give way to another."""
        self._fail(refused.reason, ErrorCode.BUSY)

    def drop(self, reason: str) -> None:
        """Close the connection at once."""
        self._pump.lose(reason, by="local")

    def drain(self, grace: float) -> None:
        """Write what is queued, then close, all within `grace` seconds."""
        self._engine.finish()
        self._close_within(grace)
        self._pump.request_write()
        self._serving.cancel()

    # --- from the engine and the pump

    def handle_events(self, events: Sequence[ServerEvent]) -> None:
        for event in events:
            match event:
                case Acknowledged(id=id):
                    self._to_store = id
                    self._start_storing()
                case Failed(error):
                    if may_log("peers that broke a rule"):
                        _log.info("%s broke a rule: %s", self.client, shown(str(error)))
                    tell_limit(self.facts, error)
                    self._end()
                case Silent(seconds):
                    if may_log("clients that sent nothing"):
                        # log: A client of restream was silent in mid-line and is hung up on.
                        _log.info("%s: nothing came for %g s while a line was unfinished", self.client, seconds)
                    self._end()
                case HungUp():
                    pass  # the pump loses the connection next
                case _:
                    self._request = event
                    self.handle_written()

    def handle_written(self) -> None:
        self._changed.unpark_all()

    def queued_bytes(self) -> int:
        return self._engine.outbox

    def handle_lost(self) -> None:
        self._engine.connection_lost(trio.current_time())
        self._serving.cancel()

    # --- the request

    async def _serve(self) -> None:
        while self._request is None:
            await self._changed.park()
        sessions = self._service._sessions
        try:
            match self._request:
                case StatelessRequested(state):
                    await self._stream_values(state)
                case Registered(uuid, params):
                    await self._stream_session(uuid, lambda: sessions.register(uuid, params), 0)
                case Resumed(uuid, state, reader, incarnation, until) if reader is not None:
                    await self._stream_to_reader(uuid, state, reader, incarnation, until)
                case Resumed(uuid=uuid, state=state):
                    await self._stream_session(uuid, lambda: sessions.resume(uuid, state), state)
                case StatusRequested(uuid, reader, None):
                    await self._send_status(uuid, reader)
                case StatusRequested(uuid, reader, also, done) if also is not None:
                    await self._send_statuses([uuid, *also], reader, done)
                case ListingRequested(since, reader):
                    await self._send_listing(since, reader)
        except Exception as error:
            self._fail_with(error)

    async def _send_status(self, uuid: str, reader: str) -> None:
        sessions = self._service._sessions
        status = await self._service.when_possible(lambda: sessions.status(uuid, reader))
        if status is None:
            self._fail("this server knows no status of its sessions")
        elif self._engine.phase is Phase.STATUS:
            self._engine.send_status(told_status(status, reader))
            self._pump.request_write()

    async def _send_statuses(self, uuids: list[str], reader: str, done: Mapping[str, int]) -> None:
        sessions = self._service._sessions
        found = await self._service.when_possible(lambda: sessions.statuses(uuids, reader, done))
        if found is None:
            self._fail("this server knows no status of its sessions")
        elif self._engine.phase is Phase.STATUS:
            self._engine.send_statuses(
                {uuid: told_status(found[uuid], reader) if uuid in found else None for uuid in uuids}
            )
            self._pump.request_write()

    async def _send_listing(self, since: str, reader: str) -> None:
        sessions = self._service._sessions
        found = None
        if self._service._config.listing:
            told = partial(told_status, reader=reader)
            found = await self._service.when_possible(lambda: sessions.listing(since, told))
        if found is None:
            self._fail("this server lists no sessions; its operator has to enable that with listing=True")
        elif self._engine.phase is Phase.STATUS:
            self._engine.send_listing(found)
            self._pump.request_write()

    # --- the stream of a session

    async def _stream_to_reader(
        self, uuid: str, state: int, reader: str, incarnation: str | None, until: int | None
    ) -> None:
        sessions = self._service._sessions

        async def look() -> ServerSession:
            return await sessions.look(uuid, state, reader, incarnation)

        self._session = session = await self._service.when_possible(look)
        await self._stream_messages(session, state, until)

    async def _stream_session(self, uuid: str, claim: Callable[[], Awaitable[ServerSession]], after: int) -> None:
        session = await self._claim(uuid, claim)
        if session is not None:
            await self._stream_messages(session, after)

    async def _stream_messages(self, session: ServerSession, after: int, until: int | None = None) -> None:
        engine, pump = self._engine, self._pump
        if engine.closing or engine.over:
            return
        is_accepted = engine.accept(acknowledged=session.acknowledged, head=session.head)
        self._stored = session.acknowledged
        pump.dispatch_events()  # earlier acknowledgements, or a violation
        pump.request_write()  # for the error line of a violation
        sent = 0
        while is_accepted:
            session.sent = after
            if until is not None and after >= until:
                return  # the client hangs up when it has them
            most = await self._wait_for_room(sent)
            if until is not None:
                most = min(most, until - after)
            following = partial(session.next_messages, after, most, self._high_water)
            try:
                batch = await self._service.when_possible(following)
            except Superseded:
                await self._reclaim(session)
                sent = 0
                continue
            if engine.phase is not Phase.MESSAGES:
                return
            before, sent = engine.outbox, len(batch.messages) + len(batch.stored)
            for message in batch.messages:
                after = message.id
                engine.send_message(after, message.data, message.time)
            if batch.stored:
                after = batch.stored[-1].id
                engine.send_stored(batch.stored)
            if sent:
                self._line_size = (engine.outbox - before) // sent + 1
            if batch.ends:
                engine.finish()
            pump.request_write()
            if batch.ends:
                return

    async def _claim(self, uuid: str, claim: Callable[[], Awaitable[ServerSession]]) -> ServerSession | None:
        """Become the owner of a session; None if the connection is ending."""
        # A client that was cut off after its request may have reconnected, perhaps to another server, and must not lose
        # its session to this dead connection. After one turn of the loop the pump has seen its end.
        await trio.lowlevel.checkpoint()
        service = self._service
        lock = service._claims.setdefault(uuid, trio.Lock())
        try:
            async with lock:
                owner = service._owners.get(uuid)
                if owner is not None and owner.number > self.number:  # it came later and was faster
                    self.supersede(uuid)
                if self._engine.closing or self._engine.over:
                    return None
                await service.when_possible(lambda: self._claim_once(claim))
                owner = service._owners.get(uuid)
                if owner is not None:
                    owner.supersede(uuid)
                service._owners[uuid] = self
                service._unreleased.pop(uuid, None)
                return self._session
        finally:
            if not lock.locked():
                service._claims.pop(uuid, None)

    async def _claim_once(self, claim: Callable[[], Awaitable[ServerSession]]) -> None:
        # Shielded: a claim that a cancellation left in the store would keep the session from expiring.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLAIM_TIMEOUT):
            self._session = await claim()
        if self._session is None:
            raise StoreFailed(f"the store did not give a session within {CLAIM_TIMEOUT:g} s")

    async def _reclaim(self, session: ServerSession) -> None:
        """Take the session back, and store what could not be stored meanwhile: a client sends an ack only once."""
        await self._service.when_possible(session.reclaim)
        self._start_storing()

    # --- a stateless stream

    async def _stream_values(self, state: str | None) -> None:
        service, engine, sent = self._service, self._engine, 0
        stateless, digits = service._stateless, service._config.digits
        if state is None:
            value = stateless.first(service._random32())
        else:
            value = stateless.next(await _convert(len(state), parse_integer, state))
        while True:
            most, sent = await self._wait_for_room(sent), 0
            while sent < min(most, BATCH) and engine.outbox < self._high_water:
                estimate = int(value.bit_length() / _BITS_PER_DIGIT)
                text = await _convert(estimate, format_integer, value) if estimate <= 2 * digits else None
                if text is None or len(text.lstrip("-")) > digits:
                    self._fail(f"the next value has more than {digits} digits; this server sends none so long")
                    return
                if engine.phase is not Phase.VALUES:
                    return
                engine.send_value(text)
                value = stateless.next(value)
                sent += 1
            self._pump.request_write()
            await trio.lowlevel.checkpoint()

    # --- how much is queued

    async def _wait_for_room(self, sent: int) -> int:
        """Wait until something may be queued; return how many messages. `sent` were queued since the last call."""
        pace = self._service._pace
        if pace is not None:
            # From now, not from the last time: after a pause there is no burst.
            self._send_at = max(self._send_at, trio.current_time()) + sent / pace
        if self._engine.outbox >= self._high_water:
            await self._wait_until_written()
        if self._line_size == 0:
            most = FIRST_BATCH
        else:
            most = min(READ_BATCH, max(1, (self._high_water - self._engine.outbox) // self._line_size))
        if pace is None:
            return most
        await trio.sleep_until(self._send_at)
        return min(most, max(1, int(pace * PACED_SPAN)))

    async def _wait_until_written(self) -> None:
        with trio.move_on_after(BLOCKED_TIMEOUT):
            while self._engine.outbox >= self._high_water:
                await self._changed.park()
        if self._engine.outbox < self._high_water:
            return
        # A client that reads nothing may be gone, and connected to another server.
        watch = trio.CancelScope()
        if self._session is not None and self._nursery is not None:
            self._nursery.start_soon(self._watch_owner, self._session, watch)
        try:
            while self._engine.outbox >= self._high_water:
                await self._changed.park()
        finally:
            watch.cancel()

    async def _watch_owner(self, session: ServerSession, scope: trio.CancelScope) -> None:
        with scope:
            try:
                try:
                    await self._service.when_possible(session.wait_superseded, within=math.inf)
                except Superseded:
                    await self._reclaim(session)
            except Exception as error:
                self._fail_with(error)

    # --- acknowledgements

    def _start_storing(self) -> None:
        if not self._is_storing and self._nursery is not None:
            self._is_storing = True
            self._nursery.start_soon(self._store_acks)

    async def _store_acks(self) -> None:
        """Store acknowledgements until none is left; of those that come during one write only the highest."""
        try:
            while self._session is not None and self._stored < self._to_store:
                id, epoch = self._to_store, self._session.epoch
                ack = partial(self._session.ack, id)
                try:
                    await self._service.when_possible(ack, within=math.inf, is_in_vain=lambda: self._pump.is_lost)
                    self._stored = id
                except Superseded:
                    if self._session.epoch == epoch:
                        return  # the stream notices it too, and starts this again if it reclaims the session
        except Exception as error:
            self._fail_with(error)
        finally:
            self._is_storing = False
            self.handle_written()

    # --- the end

    def _fail_with(self, error: Exception) -> None:
        """Send the client the error, or what it may know of it, and log the rest."""
        match error:
            case RemoteProtocolError():
                if may_log("peers that broke a rule"):
                    # log: A client of restream sent what the rules forbid; it reads why.
                    _log.info("%s broke a rule: %s", self.client, shown(str(error)))
                if isinstance(error, RequestRefused):
                    self._fail(error.message, error.code, error.acknowledged)
                else:
                    self._fail(error.message)
            case StoreError(passes=True) if not isinstance(error, TooManySessions):
                # Without an error line the client connects again, perhaps to another server, and resumes.
                if may_log("clients that the session store kept waiting"):
                    # log "CLIENT: hanging up, since the session store is still in trouble": A restream client has
                    # waited for the store for 30 s. It connects again and resumes, perhaps at another server.
                    _log.info("%s: hanging up, since the session store is still in trouble", self.client)
                self._engine.finish()
                self._pump.request_write()
                self._end()
            case StoreError() if not isinstance(error, NotJson):
                # A text that may go to the client as it is, is about this session only.
                if error.for_client != str(error) and not isinstance(error, Superseded):
                    self._service._warn(self.client, error)
                gone = error.acknowledged if isinstance(error, MessageGone) else None
                self._fail(error.for_client, code_of(error), gone)
            case _:
                self._service._warn(self.client, error)
                self._fail("the server failed", ErrorCode.FAILED)

    def _fail(self, text: str, code: ErrorCode | None = None, acknowledged: int | None = None) -> None:
        self._engine.fail(text, code, acknowledged)
        self._pump.request_write()
        self._end()

    def _end(self) -> None:
        """Stop serving; the client has `linger` seconds to read the last line and hang up."""
        self._close_within(self._service._linger)
        self._serving.cancel()

    def _close_within(self, seconds: float) -> None:
        self._closing.deadline = min(self._closing.deadline, trio.current_time() + seconds)

    async def _release(self) -> None:
        session, service = self._session, self._service
        if session is None:
            return
        released = False
        with trio.move_on_after(RELEASE_TIMEOUT, shield=True):
            while self._is_storing:
                await self._changed.park()
            try:
                await session.release()
                released = True
            except Exception as error:
                service._warn(self.client, error)
        if service._owners.get(session.uuid) is self:
            del service._owners[session.uuid]
            if not released:
                service._unreleased[session.uuid] = session


async def _convert(digits: int, act: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT:
    """Convert an integer, a long one in a thread so that no other task waits."""
    if digits <= INLINE_DIGITS:
        return act(argument)
    return await trio.to_thread.run_sync(act, argument, abandon_on_cancel=True)


def told_status(status: SessionStatus, reader: str) -> Status:
    """Return what a client is told of the progress of a session."""
    return Status(
        status.head,
        status.acknowledged,
        status.final,
        status.epoch,
        status.incarnation,
        status.written,
        status.readers.get(reader) if reader else None,
    )


def code_of(error: StoreError) -> ErrorCode | None:
    """Return the code of an error line for an error of the store; None for one of a session object's own."""
    match error:
        case UnknownSession():
            return ErrorCode.UNKNOWN
        case SessionBusy() | Superseded():
            return ErrorCode.BUSY
        case MessageGone():
            return ErrorCode.GONE
        case UnknownMessage():
            return ErrorCode.BEYOND
        case SessionsFailed() | SessionFinished() | SessionExists() | OutOfOrderAck() | IdsExhausted():
            return None
        case NotAcknowledged() | TooManySessions():
            return ErrorCode.UNAVAILABLE
        case _:
            return ErrorCode.FAILED


# ---------------------------------------------------------------------------- logs


def shown(text: str) -> str:
    """Return a text as one line for a log; a session's uuid, which gives access to it, is shortened."""
    masked = _UUID.sub(r"\1-…", text)
    return masked if masked.isprintable() else masked.encode("unicode_escape").decode("ascii")


def traceback_of(error: BaseException) -> str:
    """Return an error's type and traceback without its text, which may quote a message."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__} ({loggable_text(error)})\n{frames}"


# ---------------------------------------------------------------------------- listeners


async def _listen_on(listeners: Listeners, handler: Handler, limits: Limits) -> None:
    """Run `handler` for each connection to bound listeners, which are closed at the end."""
    places = Admission(limits)
    try:
        async with background() as nursery:
            for listener in listeners:
                nursery.start_soon(_accept, listener, handler, places, nursery)
            await trio.sleep_forever()
    finally:
        for listener in listeners:
            await close_at_once(listener)


async def _accept(
    listener: trio.abc.Listener[trio.abc.Stream], handler: Handler, places: Admission, nursery: trio.Nursery
) -> None:
    while True:
        await places.wait_for_place()  # more wait in the kernel's backlog
        try:
            stream = await listener.accept()
        except OSError as error:
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
            # log: The process has no descriptor left, for example: raise `ulimit -n` or lower `Limits(connections=…)`.
            _log.warning("accept: %s; trying again in %g s", os.strerror(error.errno), ACCEPT_PAUSE)
            await trio.sleep(ACCEPT_PAUSE)
            continue
        if (place := places.admit()) is not None:
            place.establish()  # there is no handshake
            nursery.start_soon(_handle, stream, handler, place)


async def _handle(stream: trio.abc.Stream, handler: Handler, place: Place) -> None:
    try:
        with place.held():
            await handler(stream)
    except Exception as error:
        # Its text may quote what a peer sent, so it is for debugging only.
        if may_log("handlers of connections that failed"):
            # log: A server of restream on listeners of its own: the handler of a connection raised.
            _log.error("a connection's handler failed with %s", type(error).__name__)
        _log.debug("in full", exc_info=error)
    finally:
        await close_at_once(stream)


def _url(listener: trio.abc.Listener[trio.abc.Stream]) -> str:
    if not isinstance(listener, trio.SocketListener):
        return shown(repr(listener))
    name = listener.socket.getsockname()
    if listener.socket.family not in (trio.socket.AF_INET, trio.socket.AF_INET6):
        return f"{PROTOCOL}+unix://{os.fsdecode(name)}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{PROTOCOL}+tcp://{host}:{name[1]}"


protect_package("muxkit.protocols.restream")

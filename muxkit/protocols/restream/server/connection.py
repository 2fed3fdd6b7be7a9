"""One connection of a server: its request, the stream that answers it, acknowledgements, and its end."""

from __future__ import annotations

import logging
import math
import re
import traceback
from typing import TYPE_CHECKING, Final, TypeVar

import attrs
import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.engine import (
    Acknowledged,
    Failed,
    HungUp,
    Phase,
    Registered,
    Resumed,
    ServerEngine,
    ServerEvent,
    Silent,
    StatelessRequested,
    StatusRequested,
)
from muxkit.protocols.restream.store import NotJson, StoreError, StoreFailed, Superseded
from muxkit.protocols.restream.wire import INLINE_DIGITS, Status, format_integer, parse_integer
from muxkit.runtime import StreamPump, background, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.protocols.restream.applications import StatelessApplication
    from muxkit.protocols.restream.engine import ServerConfig
    from muxkit.protocols.restream.server.backend import Claim, SessionBackend

ArgumentT = TypeVar("ArgumentT")
ResultT = TypeVar("ResultT")

BATCH: Final = 128  # messages that are made or read at once, so that no turn of Trio's loop is long
FIRST_BATCH: Final = 8  # the same before the size of a message is known
HIGH_WATER: Final = 64 * 1024  # bytes in the outbox at which no message is made; `Limits.outbox` if that is less
PACED_SPAN: Final = 0.05  # s; with a pace, as many messages at once as this time allows
BLOCKED_TIMEOUT: Final = 5.0  # s without room after which a newer connection on another server is looked for
CLAIM_TIMEOUT: Final = 10.0  # s that a store may take to give a session to a connection
RELEASE_TIMEOUT: Final = 5.0  # s that a store may take to note that the connection is over
LOG_INTERVAL: Final = 1.0  # s; of failures that come faster only the first is a warning

_BITS_PER_DIGIT: Final = 3.33
_UUID: Final = re.compile(r"([0-9a-fA-F]{8})(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

_log = logging.getLogger("muxkit")


# ---------------------------------------------------------------------------- logs


def shown(text: str) -> str:
    """Return a text as one line for a log; a session's uuid, which gives access to it, is shortened."""
    masked = _UUID.sub(r"\1-…", text)
    return masked if masked.isprintable() else masked.encode("unicode_escape").decode("ascii")


def traceback_of(error: BaseException) -> str:
    """Return an error's type and traceback without its text, which may quote a message."""
    frames = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    return f"{type(error).__name__} (its text is left out, it may hold payload)\n{frames}"


# ---------------------------------------------------------------------------- all connections


@attrs.define(eq=False)
class _Queue:
    """The connections that claim one session."""

    lock: trio.Lock = attrs.field(factory=trio.Lock)
    length: int = 0


@attrs.define(eq=False)
class ServerContext:
    """What all connections of a service share: its options, and which connection owns which session."""

    backend: SessionBackend
    stateless: StatelessApplication
    config: ServerConfig
    limits: Limits
    observer: Observer | None
    pace: float | None
    linger: float
    random32: Callable[[], int]
    silent: dict[ClientConnection, None] = attrs.field(factory=dict)
    """The connections without a request, oldest first."""
    unreleased: dict[str, Claim] = attrs.field(factory=dict)
    """The claims of closed connections that could not be released in the store."""
    owners: dict[str, ClientConnection] = attrs.field(factory=dict)
    """The newest connection of each session."""
    _queues: dict[str, _Queue] = attrs.field(factory=dict)
    _warned_at: float = -math.inf

    @protected_manager
    async def claiming(self, connection: ClientConnection, uuid: str) -> AsyncGenerator[bool, None]:
        """Wait for the turn to claim a session; gives True if a connection that came later owns it already."""
        queue = self._queues.setdefault(uuid, _Queue())
        queue.length += 1
        try:
            async with queue.lock:
                owner = self.owners.get(uuid)
                yield owner is not None and owner.number > connection.number
        finally:
            queue.length -= 1
            if not queue.length:
                del self._queues[uuid]

    def set_owner(self, connection: ClientConnection, uuid: str) -> None:
        """Note that a connection owns a session; its last owner on this server is superseded."""
        older = self.owners.get(uuid)
        if older is not None:
            older.supersede(uuid)
        self.owners[uuid] = connection
        self.unreleased.pop(uuid, None)

    def remove_owner(self, connection: ClientConnection, claim: Claim, *, released: bool) -> None:
        """Note that a connection needs its session no more."""
        if self.owners.get(claim.uuid) is connection:
            del self.owners[claim.uuid]
            if not released:
                self.unreleased[claim.uuid] = claim

    def warn(self, about: str, error: Exception) -> None:
        """Log a failure that is not the client's fault."""
        now = trio.current_time()
        if now - self._warned_at >= LOG_INTERVAL:
            self._warned_at = now
            # Only a store's own text: that of any other error may quote a message.
            text = shown(f"{type(error).__name__}: {error}") if isinstance(error, StoreError) else traceback_of(error)
            _log.warning("%s: %s", about, text)
        _log.debug("in full", exc_info=error)


# ---------------------------------------------------------------------------- one connection


class ClientConnection:
    """One connection, from its first line to its end."""

    def __init__(self, stream: trio.abc.Stream, context: ServerContext, number: int) -> None:
        self.number = number
        """Higher for connections that came later."""
        self._context = context
        self._engine = ServerEngine(context.config, limits=context.limits, observer=context.observer)
        self._pump: StreamPump[ServerEvent] = StreamPump(
            stream,
            self._engine,
            on_events=self._on_events,
            on_written=self._wake,
            on_lost=self._on_lost,
            queued=lambda: self._engine.outbox,
            observer=context.observer,
        )
        self._claim: Claim | None = None
        self._request: ServerEvent | None = None
        self._nursery: trio.Nursery | None = None
        self._serving = trio.CancelScope()
        self._closing = trio.CancelScope()
        self._changed = trio.lowlevel.ParkingLot()
        self._high_water = min(HIGH_WATER, context.limits.outbox)
        self._line_size = 0  # bytes of a line in the last batch, on average
        self._send_at = -math.inf  # when the next message may be queued
        self._to_store = self._stored = 0  # the last acknowledged id, and the last one that the store has
        self._is_storing = False

    async def run(self) -> None:
        """Serve the connection; every failure goes to the client or to the log."""
        async with background() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._pump.run)
            try:
                with self._serving:
                    await self._serve()
                with self._closing:
                    await self._pump.flushed()
                    self._close_within(self._context.linger)
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
        self._fail(f"session {uuid} was taken over by a newer connection")

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

    def _on_events(self, events: Sequence[ServerEvent]) -> None:
        for event in events:
            match event:
                case Acknowledged(id=id):
                    self._to_store = id
                    if not self._is_storing and self._nursery is not None:
                        self._is_storing = True
                        self._nursery.start_soon(self._store_acks)
                case Failed(error):
                    _log.info("%s broke a rule: %s", self.client, shown(str(error)))
                    self._close_within(self._context.linger)
                    self._serving.cancel()
                case Silent(seconds):
                    _log.info("%s: nothing came for %g s while a line was unfinished", self.client, seconds)
                    self._close_within(self._context.linger)
                    self._serving.cancel()
                case HungUp():
                    pass  # the pump loses the connection next
                case _:
                    self._request = event
                    self._context.silent.pop(self, None)
                    self._wake()

    def _wake(self) -> None:
        self._changed.unpark_all()

    def _on_lost(self) -> None:
        self._engine.connection_lost(trio.current_time())
        self._serving.cancel()

    # --- the request

    async def _serve(self) -> None:
        while self._request is None:
            await self._changed.park()
        backend = self._context.backend
        try:
            match self._request:
                case StatelessRequested(state):
                    await self._stream_values(state)
                case Registered(uuid, params):
                    await self._stream_session(uuid, lambda: backend.register(uuid, params), 0)
                case Resumed(uuid, state):
                    await self._stream_session(uuid, lambda: backend.resume(uuid, state), state)
                case StatusRequested(uuid):
                    await self._send_status(uuid)
        except Exception as error:
            self._fail_with(error)

    async def _send_status(self, uuid: str) -> None:
        status = await self._context.backend.status(uuid)
        if status is None:
            self._fail("this server knows no status of its sessions")
        elif self._engine.phase is Phase.STATUS:
            self._engine.send_status(Status(status.head, status.acknowledged, status.final, status.epoch))
            self._pump.request_write()

    # --- the stream of a session

    async def _stream_session(self, uuid: str, ask: Callable[[], Awaitable[Claim]], after: int) -> None:
        claim = await self._claim_session(uuid, ask)
        engine, pump = self._engine, self._pump
        if claim is None or engine.closing or engine.over:
            return
        is_accepted = engine.accept(acknowledged=claim.acknowledged, head=claim.head)
        self._stored = claim.acknowledged
        pump.dispatch_events()  # earlier acknowledgements, or a violation
        pump.request_write()  # for the error line of a violation
        while is_accepted:
            claim.sent = after
            most = await self._wait_for_room()
            try:
                batch = await self._context.backend.next_messages(claim, after, most, self._high_water)
            except Superseded:
                await self._reclaim(claim)
                continue
            if engine.phase is not Phase.MESSAGES:
                return
            before = engine.outbox
            for message in batch.messages:
                after = message.id
                engine.send_message(after, message.data, message.time)
            if batch.messages:
                self._line_size = (engine.outbox - before) // len(batch.messages) + 1
                self._note_sent(len(batch.messages))
            if batch.ends:
                engine.finish()
            pump.request_write()
            if batch.ends:
                return

    async def _claim_session(self, uuid: str, ask: Callable[[], Awaitable[Claim]]) -> Claim | None:
        """Become the owner of a session; None if the connection is ending."""
        # A client that was cut off after its request may have reconnected, perhaps to another server, and must not lose
        # its session to this dead connection. After one turn of the loop the pump has seen its end.
        await trio.lowlevel.checkpoint()
        async with self._context.claiming(self, uuid) as is_superseded:
            if is_superseded:
                self.supersede(uuid)
            if self._engine.closing or self._engine.over:
                return None
            # Shielded: a claim that a cancellation left in the store would keep the session from expiring.
            with trio.CancelScope(shield=True, deadline=trio.current_time() + CLAIM_TIMEOUT):
                self._claim = await ask()
            if self._claim is None:
                raise StoreFailed(f"the store did not give a session within {CLAIM_TIMEOUT:g} s")
            self._context.set_owner(self, self._claim.uuid)
            return self._claim

    async def _reclaim(self, claim: Claim) -> None:
        """Take the session back, and store what could not be stored meanwhile: a client sends an ack only once."""
        await self._context.backend.reclaim(claim)
        if not self._is_storing and self._nursery is not None:
            self._is_storing = True
            self._nursery.start_soon(self._store_acks)

    # --- a stateless stream

    async def _stream_values(self, state: str | None) -> None:
        context, engine = self._context, self._engine
        stateless, digits = context.stateless, context.config.digits
        if state is None:
            value = stateless.first(context.random32())
        else:
            value = stateless.next(await _convert(len(state), parse_integer, state))
        while True:
            most, sent = await self._wait_for_room(), 0
            while sent < most and engine.outbox < self._high_water:
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
            self._note_sent(sent)
            self._pump.request_write()
            await trio.lowlevel.checkpoint()

    # --- how much is queued

    async def _wait_for_room(self) -> int:
        """Wait until something may be queued; return how many messages."""
        if self._engine.outbox >= self._high_water:
            await self._wait_until_written()
        if self._line_size == 0:
            most = FIRST_BATCH
        else:
            most = min(BATCH, max(1, (self._high_water - self._engine.outbox) // self._line_size))
        pace = self._context.pace
        if pace is None:
            return most
        await trio.sleep_until(self._send_at)
        return min(most, max(1, int(pace * PACED_SPAN)))

    def _note_sent(self, count: int) -> None:
        if self._context.pace is not None:
            # From now, not from the last time: after a pause there is no burst.
            self._send_at = max(self._send_at, trio.current_time()) + count / self._context.pace

    async def _wait_until_written(self) -> None:
        with trio.move_on_after(BLOCKED_TIMEOUT):
            while self._engine.outbox >= self._high_water:
                await self._changed.park()
        if self._engine.outbox < self._high_water:
            return
        # A client that reads nothing may be gone, and connected to another server.
        watch = trio.CancelScope()
        if self._claim is not None and self._nursery is not None:
            self._nursery.start_soon(self._watch_owner, self._claim, watch)
        try:
            while self._engine.outbox >= self._high_water:
                await self._changed.park()
        finally:
            watch.cancel()

    async def _watch_owner(self, claim: Claim, scope: trio.CancelScope) -> None:
        with scope:
            try:
                try:
                    await self._context.backend.wait_superseded(claim)
                except Superseded:
                    await self._reclaim(claim)
            except Exception as error:
                self._fail_with(error)

    # --- acknowledgements

    async def _store_acks(self) -> None:
        """Store acknowledgements until none is left; of those that come during one write only the highest."""
        try:
            while self._claim is not None and self._stored < self._to_store:
                id, epoch = self._to_store, self._claim.epoch
                try:
                    await self._context.backend.ack(self._claim, id)
                    self._stored = id
                except Superseded:
                    if self._claim.epoch == epoch:
                        return  # the stream notices it too, and starts this again if it reclaims the session
        except Exception as error:
            self._fail_with(error)
        finally:
            self._is_storing = False
            self._wake()

    # --- the end

    def _fail_with(self, error: Exception) -> None:
        """Send the client the error, or what it may know of it, and log the rest."""
        match error:
            case RemoteProtocolError():
                _log.info("%s broke a rule: %s", self.client, shown(str(error)))
                self._fail(error.message)
            case StoreError() if not isinstance(error, NotJson):
                # A text that may go to the client as it is, is about this session only.
                if error.for_client != str(error) and not isinstance(error, Superseded):
                    self._context.warn(self.client, error)
                self._fail(error.for_client)
            case _:
                self._context.warn(self.client, error)
                self._fail("the server failed")

    def _fail(self, text: str) -> None:
        self._engine.fail(text)
        self._close_within(self._context.linger)
        self._pump.request_write()
        self._serving.cancel()

    def _close_within(self, seconds: float) -> None:
        self._closing.deadline = min(self._closing.deadline, trio.current_time() + seconds)

    async def _release(self) -> None:
        claim = self._claim
        if claim is None:
            return
        released = False
        with trio.move_on_after(RELEASE_TIMEOUT, shield=True):
            while self._is_storing:
                await self._changed.park()
            try:
                await self._context.backend.release(claim)
                released = True
            except Exception as error:
                self._context.warn(self.client, error)
        self._context.remove_owner(self, claim, released=released)


async def _convert(digits: int, act: Callable[[ArgumentT], ResultT], argument: ArgumentT) -> ResultT:
    """Convert an integer, a long one in a thread so that no other task waits."""
    if digits <= INLINE_DIGITS:
        return act(argument)
    return await trio.to_thread.run_sync(act, argument, abandon_on_cancel=True)

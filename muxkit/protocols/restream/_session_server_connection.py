"""What happens on one connection of a server? The request, the stream that answers it, acknowledgements, the end."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Final, TypeVar

import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream._events import (
    Acknowledged,
    Failed,
    HungUp,
    Registered,
    Resumed,
    ServerEvent,
    Silent,
    StatelessRequested,
    StatusRequested,
)
from muxkit.protocols.restream._integers import INLINE_DIGITS, format_integer, parse_integer
from muxkit.protocols.restream._messages import Status
from muxkit.protocols.restream._server_engine import Phase, ServerEngine
from muxkit.protocols.restream._session_server_log import shown
from muxkit.protocols.restream._stores._errors import NotJson, StoreError, StoreFailed, Superseded
from muxkit.runtime import StreamPump, background

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit.protocols.restream._session_server_sessions import AnyMessage, Claim
    from muxkit.protocols.restream._session_server_terms import Host, Terms

GivenT = TypeVar("GivenT")
ResultT = TypeVar("ResultT")

BATCH: Final = 128  # messages that are made or read at once, so that no turn of Trio's loop is long
FIRST_BATCH: Final = 8  # as long as nobody knows how large they are
MARK: Final = 64 * 1024  # bytes in the outbox at which nothing more is made; `Limits.outbox` if that is less
PACED_SPAN: Final = 0.05  # s; with a pace so many messages at once as come in this time
BLOCKED: Final = 5.0  # s without room after which we listen for a newer connection on another server
CLAIM: Final = 10.0  # s that a store may take to give a session to a connection
RELEASE: Final = 5.0  # s that it may take to hear that the connection is over

_BITS_PER_DIGIT: Final = 3.33

_log = logging.getLogger("muxkit")


class Conversation:
    """One connection, until it is over."""

    def __init__(self, stream: trio.abc.Stream, terms: Terms, host: Host, number: int) -> None:
        self.number = number
        """Higher for connections that came later."""
        self.claim: Claim | None = None
        self._terms = terms
        self._host = host
        self._engine = ServerEngine(terms.config, limits=terms.limits, observer=terms.observer)
        self._pump: StreamPump[ServerEvent] = StreamPump(
            stream,
            self._engine,
            on_events=self._heard,
            on_written=self._wake,
            on_lost=self._lost,
            queued=lambda: self._engine.outbox,
            observer=terms.observer,
        )
        self._request: ServerEvent | None = None
        self._nursery: trio.Nursery | None = None
        self._work = trio.CancelScope()
        self._leaving = trio.CancelScope()
        self._changed = trio.lowlevel.ParkingLot()
        self._mark = min(MARK, terms.limits.outbox)
        self._size = 0  # bytes of a line, in the last batch
        self._due = -math.inf  # when the next message may go out
        self._to_ack = self._acked = 0
        self._is_acking = False

    async def run(self) -> None:
        """Serve it; whatever goes wrong on the way is told to the client or to the log."""
        async with background() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._pump.run)
            try:
                with self._work:
                    await self._serve()
                await self._leave()
            finally:
                self._pump.lose("the service ended", by="local")
                await self._release()

    # --- from outside

    @property
    def who(self) -> str:
        """The client, for a log."""
        return shown(self._pump.peer) or "a client"

    def supersede(self, uuid: str) -> None:
        """A newer connection has the session."""
        self._fail(f"session {uuid} was taken over by a newer connection")

    def drop(self, reason: str) -> None:
        """Cut it off."""
        self._pump.lose(reason, by="local")

    def drain(self, grace: float) -> None:
        """Finish what is queued, then close, all within `grace` seconds."""
        self._engine.finish()
        self._hurry(grace)
        self._pump.request_write()
        self._work.cancel()

    # --- what the engine and the pump tell

    def _heard(self, events: Sequence[ServerEvent]) -> None:
        for event in events:
            match event:
                case Acknowledged(id=id):
                    self._to_ack = id
                    self._start_to_acknowledge()
                case Failed(error):
                    _log.info("%s broke a rule: %s", self.who, shown(str(error)))
                    self._hurry(self._terms.linger)
                    self._work.cancel()
                case Silent(seconds):
                    _log.info("%s: nothing came for %g s while a line was unfinished", self.who, seconds)
                    self._hurry(self._terms.linger)
                    self._work.cancel()
                case HungUp():
                    pass  # the pump loses the connection next
                case _:
                    self._request = event
                    self._host.asked(self)
                    self._wake()

    def _wake(self) -> None:
        self._changed.unpark_all()

    def _lost(self) -> None:
        self._engine.connection_lost(trio.current_time())
        self._work.cancel()

    # --- the request

    async def _serve(self) -> None:
        while self._request is None:
            await self._changed.park()
        books = self._terms.books
        try:
            match self._request:
                case StatelessRequested(state):
                    await self._stream_values(state)
                case Registered(uuid, params):
                    await self._stream_session(uuid, lambda: books.register(uuid, params), 0)
                case Resumed(uuid, state):
                    await self._stream_session(uuid, lambda: books.resume(uuid, state), state)
                case StatusRequested(uuid):
                    await self._tell_status(uuid)
        except Exception as error:
            self._explain(error)

    async def _tell_status(self, uuid: str) -> None:
        status = await self._terms.books.status(uuid)
        if status is None:
            self._fail("this server knows no status of its sessions")
        elif self._engine.phase is Phase.STATUS:
            self._engine.send_status(Status(status.head, status.acknowledged, status.final, status.epoch))
            self._pump.request_write()

    # --- the stream of a session

    async def _stream_session(self, uuid: str, ask: Callable[[], Awaitable[Claim]], at: int) -> None:
        # Whoever was cut off behind his request is back already, perhaps at another server: he must not lose his
        # session to what he left. The reader has seen his end after a turn of the loop.
        await trio.lowlevel.checkpoint()
        async with self._host.claiming(self, uuid) as is_superseded:
            if is_superseded:
                self.supersede(uuid)
            if self._is_ending():
                return
            claim = await self._take_claim(ask)
            self._host.took(self)
        if self._is_ending():
            return
        is_accepted = self._engine.accept(acknowledged=claim.acknowledged, head=claim.head)
        self._acked = claim.acknowledged
        self._pump.dispatch_events()  # acknowledgements that came before, or a violation
        self._pump.request_write()  # whose error line nothing else would announce
        while is_accepted:
            claim.sent = at
            most = await self._room()
            try:
                batch = await self._terms.books.following(claim, at, most, self._mark)
            except Superseded:
                await self._reclaim(claim)
                continue
            if self._engine.phase is not Phase.MESSAGES:
                return
            at = self._send(batch.messages, at)
            if batch.ends:
                self._engine.finish()
            self._pump.request_write()
            if batch.ends:
                return

    async def _reclaim(self, claim: Claim) -> None:
        """Have the session again, and do what could not be done meanwhile: a client says an ack only once."""
        await self._terms.books.reclaim(claim)
        self._start_to_acknowledge()

    def _is_ending(self) -> bool:
        return self._engine.closing or self._engine.over

    async def _take_claim(self, ask: Callable[[], Awaitable[Claim]]) -> Claim:
        # Shielded: nobody would know of a claim that a cancellation left behind, and the session would never expire.
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLAIM):
            self.claim = await ask()
            return self.claim
        raise StoreFailed(f"the store did not give a session within {CLAIM:g} s")

    def _send(self, messages: Sequence[AnyMessage], at: int) -> int:
        """Queue them; gives the last id."""
        engine, before = self._engine, self._engine.outbox
        for message in messages:
            at = message.id
            engine.send_message(at, message.data, message.time)
        if messages:
            self._size = (engine.outbox - before) // len(messages) + 1
            self._spent(len(messages))
        return at

    # --- a stateless stream

    async def _stream_values(self, state: str | None) -> None:
        stateless, engine = self._terms.stateless, self._engine
        if state is None:
            value = stateless.first(self._terms.random32())
        else:
            value = stateless.next(await _aside(len(state), parse_integer, state))
        while True:
            most, sent = await self._room(), 0
            while sent < most and engine.outbox < self._mark:
                digits = int(value.bit_length() / _BITS_PER_DIGIT)
                if digits > 2 * self._terms.config.digits:
                    return self._refuse_to_go_on()
                text = await _aside(digits, format_integer, value)
                if len(text.lstrip("-")) > self._terms.config.digits:
                    return self._refuse_to_go_on()
                if engine.phase is not Phase.VALUES:
                    return
                engine.send_value(text)
                value = stateless.next(value)
                sent += 1
            self._spent(sent)
            self._pump.request_write()
            await trio.lowlevel.checkpoint()

    def _refuse_to_go_on(self) -> None:
        self._fail(f"the next value has more than {self._terms.config.digits} digits; this server sends none so long")

    # --- how much may go out

    async def _room(self) -> int:
        """Wait until something may be queued; how many messages."""
        if self._engine.outbox >= self._mark:
            await self._wait_for_room()
        most = FIRST_BATCH if self._size == 0 else max(1, (self._mark - self._engine.outbox) // self._size)
        pace = self._terms.pace
        if pace is None:
            return min(most, BATCH)
        await trio.sleep_until(self._due)
        return min(most, BATCH, max(1, int(pace * PACED_SPAN)))

    def _spent(self, count: int) -> None:
        if self._terms.pace is not None:
            # After a pause nothing is made up for: what was not sent then is not sent in a burst.
            self._due = max(self._due, trio.current_time()) + count / self._terms.pace

    async def _wait_for_room(self) -> None:
        with trio.move_on_after(BLOCKED):
            while self._engine.outbox >= self._mark:
                await self._changed.park()
        if self._engine.outbox < self._mark:
            return
        # Whoever does not read may be gone, and his client with another server by now.
        watch = trio.CancelScope()
        if self.claim is not None and self._nursery is not None:
            self._nursery.start_soon(self._watch_owner, self.claim, watch)
        try:
            while self._engine.outbox >= self._mark:
                await self._changed.park()
        finally:
            watch.cancel()

    async def _watch_owner(self, claim: Claim, scope: trio.CancelScope) -> None:
        with scope:
            try:
                try:
                    await self._terms.books.superseded(claim)
                except Superseded:
                    await self._reclaim(claim)
            except Exception as error:
                self._explain(error)

    # --- acknowledgements

    def _start_to_acknowledge(self) -> None:
        if self._acked < self._to_ack and not self._is_acking and self._nursery is not None:
            self._is_acking = True
            self._nursery.start_soon(self._acknowledge)

    async def _acknowledge(self) -> None:
        """The highest only: what comes meanwhile is merged."""
        try:
            while self.claim is not None and self._acked < self._to_ack:
                id, epoch = self._to_ack, self.claim.epoch
                try:
                    await self._terms.books.ack(self.claim, id)
                    self._acked = id
                except Superseded:
                    if self.claim.epoch == epoch:
                        return  # the stream will find out, and begins here again if it can have the session back
        except Exception as error:
            self._explain(error)
        finally:
            self._is_acking = False
            self._wake()

    # --- the end

    def _explain(self, error: Exception) -> None:
        """Tell the client why this is the end, and the log what the client must not hear."""
        match error:
            case RemoteProtocolError():
                _log.info("%s broke a rule: %s", self.who, shown(str(error)))
                self._fail(error.message)
            case StoreError() if not isinstance(error, NotJson):
                # What may be told to the client as it is, is about this session only.
                if error.for_client != str(error) and not isinstance(error, Superseded):
                    self._host.trouble(self.who, error)
                self._fail(error.for_client)
            case _:
                self._host.trouble(self.who, error)
                self._fail("the server failed")

    def _fail(self, text: str) -> None:
        self._engine.fail(text)
        self._hurry(self._terms.linger)
        self._pump.request_write()
        self._work.cancel()

    def _hurry(self, seconds: float) -> None:
        self._leaving.deadline = min(self._leaving.deadline, trio.current_time() + seconds)

    async def _leave(self) -> None:
        """Everything out, then our end, then wait for the client's: what he still acknowledges is taken."""
        with self._leaving:
            await self._pump.flushed()
            self._hurry(self._terms.linger)
            await self._pump.hang_up()
        self._pump.lose("the client did not hang up in time", by="peer")

    async def _release(self) -> None:
        if self.claim is None:
            return
        done = False
        with trio.move_on_after(RELEASE, shield=True):
            while self._is_acking:
                await self._changed.park()
            try:
                await self._terms.books.release(self.claim)
                done = True
            except Exception as error:
                self._host.trouble(self.who, error)
        self._host.left(self, undone=not done)


async def _aside(digits: int, act: Callable[[GivenT], ResultT], given: GivenT) -> ResultT:
    """Long integers are converted in a thread: nobody else waits for them."""
    if digits <= INLINE_DIGITS:
        return act(given)
    return await trio.to_thread.run_sync(act, given, abandon_on_cancel=True)

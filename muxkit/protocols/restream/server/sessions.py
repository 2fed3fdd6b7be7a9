"""The sessions of a server as its connections use them: in a session store, or behind the specification's methods.

A connection has a `StoredSession` of `StoredSessions` or a `PlainSession` of `PlainSessions`; their methods are alike.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol, TypeGuard, TypeVar

import attrs
import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.applications import Application, Fed
from muxkit.protocols.restream.server.listing import SessionIndex
from muxkit.protocols.restream.store import (
    LAST_ID,
    Message,
    MessageGone,
    SessionBusy,
    SessionExists,
    SessionFinished,
    SessionStore,
    Status,
    StoreError,
    StoreFull,
    Superseded,
    UnknownMessage,
    UnknownSession,
)
from muxkit.protocols.restream.wire import JsonObject, Listing, StoredMessage, beyond, gone
from muxkit.protocols.restream.wire import Status as WireStatus

AnyStore = SessionStore[Any, Any]
AnyApplication = Application[Any, Any]
AnyMessage = Message[Any]


ACK_TIMEOUT: Final = 30.0  # s that a client may take to acknowledge something when its session is full
ABSENCE: Final = 30.0  # s that a session without owners is known after its client has left, "within 30 seconds"
MAX_ABSENT: Final = 10_000  # sessions of which that is known
RECLAIM_DELAY: Final = 0.25  # s between a takeover by another server and the attempt to take the session back
MAX_MADE_IN_THREAD: Final = 1024  # messages that are being made at once by a store with threads of its own
MAX_MADE_IN_LOOP: Final = 16  # the same for a store in Trio's thread, where all other tasks wait
MAX_MADE_AT_ONCE: Final = 128  # messages that are made for one batch, so that no turn of Trio's loop is long
ADVANCED_AT_ONCE: Final = 128  # sessions whose reader advances together
TOUCH_INTERVAL: Final = 10.0  # s between two notes that a session without an owner is in use
MADE_PER_YIELD: Final = 4  # messages that a store's thread makes before it lets Trio's thread run

StateT = TypeVar("StateT")
DataT = TypeVar("DataT")


class Sessions(Protocol[StateT, DataT]):
    """The specification's session API: the least that a server needs. A client is sent the text of an error.

    A server keeps neither owners nor expiry for such an object: two servers must not share one, and `disconnect` is
    where the absence of a client begins. The server itself remembers what a client has acknowledged for 30 s of
    absence; an object whose sessions live longer has to refuse older positions itself.
    """

    async def register(self, uuid: str, state: StateT) -> object:
        """Store the first state of a new session."""

    async def disconnect(self, uuid: str) -> object:
        """Note that the client is gone."""

    async def put(self, uuid: str, transform: Callable[[StateT], tuple[DataT, StateT]]) -> Message[DataT]:
        """Make the next message from the state, and store both at once."""

    async def after(self, uuid: str, id: int) -> Message[DataT] | None:
        """Return the stored message after `id`, or None if there is none yet."""

    async def ack(self, uuid: str, id: int) -> object:
        """Note that the client has all messages up to `id`."""


@attrs.frozen
class Batch:
    """The next messages of a session, of which some are values and all others, in `stored`, are JSON of the store."""

    messages: Sequence[AnyMessage] = ()
    stored: Sequence[StoredMessage] = ()
    ends: bool = False
    """True if nothing follows them."""


class SessionsFailed(StoreError):
    """A method of a `Sessions` object raised; the client is sent the text, as the specification requires."""


class NotAcknowledged(StoreError):
    """The session has as many messages as it may keep, and its client acknowledges none of them."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} is full, and its client has acknowledged nothing for {ACK_TIMEOUT:g} s")

    @property
    def for_client(self) -> str:
        return (
            "the server has no room for more messages of this session at the moment: nothing was acknowledged for "
            f"{ACK_TIMEOUT:g} s"
        )


# ---------------------------------------------------------------------------- making messages


class MakeQuota:
    """Limits how many messages are being made at once; first come, first served."""

    def __init__(self, most: int = MAX_MADE_IN_THREAD) -> None:
        self.most = most
        self._lent = 0
        self._first = trio.Lock()  # held by the task that waits for quota; the others wait for it, in order
        self._returned = trio.lowlevel.ParkingLot()

    async def borrow(self, most: int) -> int:
        """Wait until messages may be made; returns how many, up to `most`. `give_back` them afterwards."""
        async with self._first:
            count = min(most, self.most)
            while self._lent and self._lent + count > self.most:
                await self._returned.park()
                count = min(most, self.most)
            self._lent += count
        return count

    def give_back(self, count: int) -> None:
        self._lent -= count
        self._returned.unpark_all()


class StreamIsOver(Exception):
    """The application makes no more messages of this session."""


class Maker:
    """The application as a transformer of puts for one session, which may be called in any thread and repeated."""

    def __init__(self, application: AnyApplication, quota: MakeQuota) -> None:
        self._application = application
        self._quota = quota
        self._made = 0
        self.ends: bool = False
        """True if the last message that was made is the final one."""

    def make(self, state: object) -> tuple[object, object]:
        application = self._application
        if application.is_over(state):
            raise StreamIsOver
        if trio.lowlevel.in_trio_task():
            self._quota.most = MAX_MADE_IN_LOOP
        else:
            self._made += 1
            if self._made % MADE_PER_YIELD == 0:
                time.sleep(0)  # or each write to a socket may cost Trio's thread a whole switch interval, 5 ms
        data, following = application.step(state)
        self.ends = application.is_over(following) or application.is_final(data)
        return data, following

    def is_final(self, data: object) -> bool:
        return self.ends


# ---------------------------------------------------------------------------- over a session store


class StoredSessions:
    """The sessions of a server in a session store."""

    def __init__(
        self,
        store: AnyStore,
        application: AnyApplication,
        *,
        takeover: bool,
        expiry: float | None,
        random32: Callable[[], int],
    ) -> None:
        self.store = store
        self.application = application
        self.quota: MakeQuota = MakeQuota()
        self._random32 = random32
        self._takeover = takeover
        self._expiry = expiry
        self._index: SessionIndex | None = None

    async def register(self, uuid: str, params: JsonObject) -> StoredSession:
        """Make a new session, or attach to one whose client repeats its first request."""
        state = self.application.initial(params, self._random32())
        try:
            return StoredSession(self, await self.store.register(uuid, state, params=params, keep=self._expiry))
        except SessionExists as error:
            status = error.status
        if status.params != params:
            raise RemoteProtocolError("this session exists already, with other params", rule="restream-S29")
        if status.acknowledged:
            raise _is_acknowledged(status.acknowledged)
        return StoredSession(self, await self.store.attach(uuid, takeover=self._takeover))

    async def resume(self, uuid: str, state: int) -> StoredSession:
        """Attach to an existing session, whose client has all messages up to `state`."""
        # A request that cannot be met must not take the session from another connection.
        status = await self.store.status(uuid)
        if state < status.acknowledged:
            raise gone(state, status.acknowledged)
        if state > status.head:
            raise beyond(state, status.head)
        return StoredSession(self, await self.store.attach(uuid, takeover=self._takeover))

    async def look(self, uuid: str, state: int, reader: str, incarnation: str | None) -> StoredSession:
        """Read an existing session beside its owner; a named reader is enrolled."""
        status = await self.store.status(uuid)
        if incarnation is not None and incarnation != status.incarnation:
            raise UnknownSession(uuid)
        if state < status.acknowledged:
            raise gone(state, status.acknowledged)
        if state > status.head:
            raise beyond(state, status.head)
        if reader and reader not in status.readers:
            status = await self.store.advance(uuid, reader)
        return LookingSession(self, status, reader)

    async def status(self, uuid: str, reader: str) -> Status | None:
        """Return the progress of a session; None if the object tells none. A named reader is enrolled."""
        status = await self.store.status(uuid)
        if reader and reader not in status.readers:
            status = await self.store.advance(uuid, reader)
        return status

    async def statuses(self, uuids: Sequence[str], reader: str, done: Mapping[str, int]) -> dict[str, Status] | None:
        """Return the progress of several sessions, after noting what a named reader is done with."""
        statuses = await self.store.statuses(uuids)
        if not reader:
            return statuses

        async def advance(uuid: str, id: int) -> None:
            with suppress(UnknownSession, UnknownMessage, StoreFull):
                statuses[uuid] = await self.store.advance(uuid, reader, id)

        news = [
            (uuid, id)
            for uuid, status in statuses.items()
            if (id := done.get(uuid, 0)) > status.readers.get(reader, -1)
        ]
        # Together, so that a store writes many of them at once.
        for first in range(0, len(news), ADVANCED_AT_ONCE):
            async with trio.open_nursery() as nursery:
                for uuid, id in news[first : first + ADVANCED_AT_ONCE]:
                    nursery.start_soon(advance, uuid, id)
        return statuses

    async def listing(self, since: str, told: Callable[[Status], WireStatus]) -> Listing | None:
        """Return the sessions that have changed since an earlier listing. `told` returns what a client may know."""
        if self._index is None:
            self._index = SessionIndex(self.store)
        return await self._index.since(since, told)

    async def expire(self) -> None:
        """Delete expired sessions."""
        await self.store.expire()


class StoredSession:
    """A session of a store as one connection owns it; what was last read of it is here."""

    def __init__(self, sessions: StoredSessions, status: Status) -> None:
        self._store = sessions.store
        self._application = sessions.application
        self._quota = sessions.quota
        self._maker = Maker(sessions.application, sessions.quota)
        # Such data needs no look, so it is passed on as it is stored.
        self._passes_stored = isinstance(sessions.application, Fed) and not sessions.application.has_final_data
        self.uuid: str = status.uuid
        self.epoch: int | None = status.epoch
        """Higher for a newer owner; None if this is no owner."""
        self.head: int = status.head
        self.acknowledged: int = status.acknowledged
        self._final = status.final
        self.sent = 0
        """The last message that this connection has sent."""

    async def next_messages(self, after: int, most: int, most_bytes: int) -> Batch:
        """Return stored, new or appended messages after the id `after`; waits until there is one."""
        store, maker = self._store, self._maker
        while True:
            if after < self.head:
                return await self._stored(after, most, most_bytes)
            if self._final:
                return Batch(ends=True)
            if not self._application.generates:
                await self._wait(after)
                continue
            acknowledged = self.acknowledged
            count = await self._quota.borrow(min(most, MAX_MADE_AT_ONCE))
            try:
                made = await store.put_many(self.uuid, maker.make, count, epoch=self.epoch, is_final=maker.is_final)
            except StreamIsOver:
                return Batch(ends=True)
            except SessionFinished:
                self._update(await store.status(self.uuid))
                continue
            except StoreFull as error:
                if error.passes and count > 1:
                    most = 1  # what is left of a full disk or limit may do for a smaller batch
                    continue
                if error.passes and await self._was_acknowledged(acknowledged):
                    continue
                raise
            finally:
                self._quota.give_back(count)
            self.head, self._final = made[-1].id, maker.ends
            if made[0].id == after + 1:
                return Batch(made, ends=maker.ends)
            # Messages before these were appended by another task: they are stored, so they are read.

    async def _wait(self, after: int) -> None:
        """Sleep until there is a message after `after`, or there will be none."""
        self._update(await self._store.wait(self.uuid, after, epoch=self.epoch))

    async def _stored(self, after: int, most: int, most_bytes: int) -> Batch:
        store = self._store
        try:
            if self._passes_stored:
                stored = await store.replay_stored(self.uuid, after, most, most_bytes=most_bytes)
                return Batch(stored=stored, ends=self._final and stored[-1].id == self.head)
            messages = await store.replay(self.uuid, after, min(most, MAX_MADE_AT_ONCE), most_bytes=most_bytes)
            return _batch(self._application, messages, ends=self._final and messages[-1].id == self.head)
        except MessageGone:
            # They were acknowledged, and not on this connection: another one is the owner.
            epoch = (await self._store.status(self.uuid)).epoch
            if self.epoch is None or epoch == self.epoch:
                raise
            raise Superseded(self.uuid, held=self.epoch, current=epoch) from None

    async def _was_acknowledged(self, before: int) -> bool:
        """Wait for an acknowledgement if the session is full for want of one; False if the whole store is full."""
        with trio.move_on_after(ACK_TIMEOUT):
            return (await self._store.wait_room(self.uuid)).acknowledged > before
        raise NotAcknowledged(self.uuid)

    async def ack(self, id: int) -> None:
        """Store an acknowledgement."""
        await self._store.ack(self.uuid, id, epoch=self.epoch)
        self.acknowledged = id

    async def release(self) -> None:
        """Note that the client is gone."""
        with suppress(UnknownSession, Superseded):
            await self._store.disconnect(self.uuid, epoch=self.epoch)

    async def wait_superseded(self) -> None:
        """Raise `Superseded` when a newer connection, on any server, is the owner."""
        # It also wakes for each appended message, and sleeps again.
        await self._store.wait(self.uuid, LAST_ID, epoch=self.epoch)

    async def reclaim(self) -> None:
        """Take the session back from another server if its owner there is gone, else raise `Superseded`."""
        # An abandoned request may reach another server late, after the request that replaced it. That server notices
        # soon that its client is gone.
        await trio.sleep(RECLAIM_DELAY)
        assert self.epoch is not None  # only an owner is superseded
        status = await self._store.status(self.uuid)
        superseded = Superseded(self.uuid, held=self.epoch, current=status.epoch)
        if status.attached or status.acknowledged > self.sent:  # the client has more than this connection sent
            raise superseded
        try:
            status = await self._store.attach(self.uuid, takeover=False)
        except SessionBusy:
            raise superseded from None
        self.epoch = status.epoch
        self._update(status)

    def _update(self, status: Status) -> None:
        self.head, self._final = status.head, status.final


class LookingSession(StoredSession):
    """A session that a connection reads without being its owner, for a named reader or only to look."""

    def __init__(self, sessions: StoredSessions, status: Status, reader: str) -> None:
        super().__init__(sessions, status)
        self.epoch: int | None = None
        self._reader = reader

    async def _wait(self, after: int) -> None:
        with trio.move_on_after(TOUCH_INTERVAL):
            await super()._wait(after)
            return
        await self._store.touch(self.uuid)

    async def ack(self, id: int) -> None:
        if self._reader:
            await self._store.advance(self.uuid, self._reader, id)
        self.acknowledged = id

    async def release(self) -> None:
        with suppress(UnknownSession):
            await self._store.touch(self.uuid)


# ---------------------------------------------------------------------------- over the five methods


class PlainSessions:
    """The sessions of a server in an object with the specification's five methods, which knows no owners."""

    def __init__(
        self, methods: Sessions[Any, Any], application: AnyApplication, *, takeover: bool, random32: Callable[[], int]
    ) -> None:
        self.methods = methods
        self.application = application
        self.quota: MakeQuota = MakeQuota()
        self.held: dict[str, PlainSession] = {}
        """The newest connection's session of each uuid."""
        self.absent: dict[str, tuple[float, PlainSession]] = {}
        """The same after the client left, with the time, oldest first."""
        self._random32 = random32
        self._takeover = takeover

    async def register(self, uuid: str, params: JsonObject) -> PlainSession:
        state = self.application.initial(params, self._random32())
        _, acknowledged = self._known(uuid)
        if acknowledged:
            raise _is_acknowledged(acknowledged)
        try:
            await self.methods.register(uuid, state)
        except Exception as error:
            raise _failed(error) from error
        return self._hold(uuid, 0, 0)

    async def resume(self, uuid: str, state: int) -> PlainSession:
        await trio.lowlevel.checkpoint()
        if not self._takeover and uuid in self.held:
            raise SessionBusy(uuid)
        head, acknowledged = self._known(uuid)
        if state < acknowledged:
            raise gone(state, acknowledged)
        return self._hold(uuid, max(state, head), acknowledged)  # `after` raises if there is no such session

    async def look(self, uuid: str, state: int, reader: str, incarnation: str | None) -> PlainSession:
        """Such an object knows no readers: this takes the session over."""
        return await self.resume(uuid, state)

    async def status(self, uuid: str, reader: str) -> Status | None:
        return None

    async def statuses(self, uuids: Sequence[str], reader: str, done: Mapping[str, int]) -> dict[str, Status] | None:
        return None

    async def listing(self, since: str, told: Callable[[Status], WireStatus]) -> Listing | None:
        return None

    async def expire(self) -> None:
        self._forget()

    def _forget(self) -> None:
        while self.absent:
            uuid = next(iter(self.absent))
            since, _ = self.absent[uuid]
            if trio.current_time() - since < ABSENCE and len(self.absent) <= MAX_ABSENT:
                return
            del self.absent[uuid]

    def _hold(self, uuid: str, head: int, acknowledged: int) -> PlainSession:
        self.absent.pop(uuid, None)
        session = self.held[uuid] = PlainSession(self, uuid, head, acknowledged)
        return session

    def _known(self, uuid: str) -> tuple[int, int]:
        """Return the last message of a session and the last acknowledged one, as far as they are remembered."""
        self._forget()
        session = self.held.get(uuid)
        if session is None and uuid in self.absent:
            _, session = self.absent[uuid]
        return (0, 0) if session is None else (session.head, session.acknowledged)


class PlainSession:
    """A session behind the five methods as one connection uses it: it cannot be known whether there is a newer one."""

    epoch = 0

    def __init__(self, sessions: PlainSessions, uuid: str, head: int, acknowledged: int) -> None:
        self._sessions = sessions
        self._maker = Maker(sessions.application, sessions.quota)
        self.uuid = uuid
        self.head: int = head
        self.acknowledged = acknowledged
        self.sent = 0

    async def next_messages(self, after: int, most: int, most_bytes: int) -> Batch:
        sessions, ends = self._sessions, False
        try:
            message = await sessions.methods.after(self.uuid, after)
            if message is None:
                count = await sessions.quota.borrow(1)
                try:
                    message = await sessions.methods.put(self.uuid, self._maker.make)
                finally:
                    sessions.quota.give_back(count)
                ends = self._maker.ends
        except StreamIsOver:
            return Batch(ends=True)
        except Exception as error:
            raise _failed(error) from error
        self.head = max(self.head, message.id)
        return _batch(sessions.application, [message], ends=ends)

    async def ack(self, id: int) -> None:
        try:
            await self._sessions.methods.ack(self.uuid, id)
        except Exception as error:
            raise _failed(error) from error
        newest = self._sessions.held.get(self.uuid, self)
        newest.acknowledged = max(newest.acknowledged, id)

    async def release(self) -> None:
        sessions = self._sessions
        if sessions.held.get(self.uuid) is not self:
            return  # a newer connection has the session: its client is present
        try:
            await sessions.methods.disconnect(self.uuid)
        except Exception as error:
            raise _failed(error) from error
        del sessions.held[self.uuid]
        sessions.absent[self.uuid] = trio.current_time(), self

    async def wait_superseded(self) -> None:
        return

    async def reclaim(self) -> None:
        raise AssertionError("such sessions have no owners that could be superseded")


# ---------------------------------------------------------------------------- both

ServerSessions = StoredSessions | PlainSessions
ServerSession = StoredSession | PlainSession


def has_owners(store: AnyStore | Sessions[Any, Any]) -> TypeGuard[AnyStore]:
    """Return True for a session store, False for an object with the specification's five methods only."""
    return hasattr(store, "attach")


def _batch(application: AnyApplication, messages: list[AnyMessage], *, ends: bool) -> Batch:
    for index, message in enumerate(messages, 1):
        if application.is_final(message.data):
            return Batch(messages[:index], ends=True)
    return Batch(messages, ends=ends)


def _is_acknowledged(acknowledged: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"this session exists already, and its messages up to {acknowledged} were acknowledged; resume it with state",
        rule="restream-S29",
    )


def _failed(error: Exception) -> StoreError:
    return error if isinstance(error, StoreError) else SessionsFailed(str(error) or "the session failed")

"""The sessions of a server as its connections use them: in a session store, or behind the specification's methods."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeGuard, TypeVar

import attrs
import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.store import (
    LAST_ID,
    Message,
    MessageGone,
    SessionBusy,
    SessionExists,
    SessionFinished,
    SessionStore,
    StoreError,
    StoreFull,
    Superseded,
    UnknownSession,
)
from muxkit.runtime import protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable

    from muxkit.protocols.restream.applications import Application
    from muxkit.protocols.restream.store import Status
    from muxkit.protocols.restream.wire import JsonObject

    # State and data are tied only where the caller knows both: an untyped store gives `object`.
    AnyStore = SessionStore[Any, Any]
    AnyApplication = Application[Any, Any]
    AnyMessage = Message[Any]

ACK_TIMEOUT: Final = 30.0  # s that a client may take to acknowledge something when its session is full
ABSENCE: Final = 30.0  # s that a session without owners is known after its client has left, "within 30 seconds"
MAX_ABSENT: Final = 10_000  # sessions of which that is known
RECLAIM_DELAY: Final = 0.25  # s between a takeover by another server and the attempt to take the session back
MAX_MADE_IN_THREAD: Final = 1024  # messages that are being made at once by a store with threads of its own
MAX_MADE_IN_LOOP: Final = 16  # the same for a store in Trio's thread, where all other tasks wait
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


class SessionsFailed(StoreError):
    """A method of a `Sessions` object raised; the client is sent the text, as the specification requires."""


@attrs.define(eq=False)
class Claim:
    """A connection's ownership of its session. `epoch` is higher for a newer owner; the rest is what was last read."""

    uuid: str
    epoch: int
    head: int
    acknowledged: int = 0
    final: bool = False
    sent: int = 0


@attrs.frozen
class Batch:
    """The next messages of a session; `ends`: nothing follows them."""

    messages: list[AnyMessage]
    ends: bool


class SessionBackend(Protocol):
    """The sessions of a server, as its connections use them."""

    async def register(self, uuid: str, params: JsonObject) -> Claim:
        """Make a new session, or attach to one whose client repeats its first request."""

    async def resume(self, uuid: str, state: int) -> Claim:
        """Attach to an existing session, whose client has all messages up to `state`."""

    async def next_messages(self, claim: Claim, after: int, most: int, most_bytes: int) -> Batch:
        """Return stored, new or appended messages after the id `after`; waits until there is one."""

    async def ack(self, claim: Claim, id: int) -> None:
        """Store an acknowledgement."""

    async def release(self, claim: Claim) -> None:
        """Note that the client is gone."""

    async def wait_superseded(self, claim: Claim) -> None:
        """Raise `Superseded` when a newer connection, on any server, is the owner; return if that cannot be known."""

    async def reclaim(self, claim: Claim) -> None:
        """Take the session back from another server if its owner there is gone, else raise `Superseded`."""

    async def status(self, uuid: str) -> Status | None:
        """Return the progress of a session; None if it is not known."""

    async def expire(self) -> None:
        """Delete expired sessions."""


def backend_of(
    store: AnyStore | Sessions[Any, Any],
    application: AnyApplication,
    *,
    takeover: bool,
    expiry: float | None,
    random32: Callable[[], int],
) -> SessionBackend:
    """Return the backend over a session store, or over an object with the specification's five methods."""
    if _has_owners(store):
        return StoreBackend(store, application, takeover, expiry, random32)
    return PlainBackend(store, application, takeover, random32)


def _has_owners(store: AnyStore | Sessions[Any, Any]) -> TypeGuard[AnyStore]:
    return hasattr(store, "attach")


# ---------------------------------------------------------------------------- making messages


class MakeQuota:
    """Limits how many messages are being made at once; first come, first served."""

    def __init__(self, most: int = MAX_MADE_IN_THREAD) -> None:
        self.most = most
        self._lent = 0
        self._first = trio.Lock()  # held by the task that waits for quota; the others wait for it, in order
        self._returned = trio.lowlevel.ParkingLot()

    @protected_manager
    async def borrow(self, most: int) -> AsyncGenerator[int, None]:
        """Wait until messages may be made; gives how many, up to `most`."""
        async with self._first:
            count = min(most, self.most)
            while self._lent and self._lent + count > self.most:
                await self._returned.park()
                count = min(most, self.most)
            self._lent += count
        try:
            yield count
        finally:
            self._lent -= count
            self._returned.unpark_all()


class StreamIsOver(Exception):
    """The application makes no more messages of this session."""


class Maker:
    """The application as a transformer of one put, which may be called in any thread and repeated."""

    def __init__(self, application: AnyApplication, quota: MakeQuota) -> None:
        self._application = application
        self._quota = quota
        self._made = 0
        self.ends = False
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


class StoreBackend:
    """Sessions in a session store."""

    def __init__(
        self,
        store: AnyStore,
        application: AnyApplication,
        takeover: bool,
        expiry: float | None,
        random32: Callable[[], int],
    ) -> None:
        self._store = store
        self._application = application
        self._random32 = random32
        self._quota = MakeQuota()
        self._takeover = takeover
        self._expiry = expiry

    async def register(self, uuid: str, params: JsonObject) -> Claim:
        state = self._application.initial(params, self._random32())
        try:
            return _claim_of(await self._store.register(uuid, state, params=params, keep=self._expiry))
        except SessionExists as error:
            status = error.status
        if status.params != params:
            raise RemoteProtocolError("this session exists already, with other params", rule="restream-S29")
        if status.acknowledged:
            raise _is_acknowledged(status.acknowledged)
        return _claim_of(await self._store.attach(uuid, takeover=self._takeover))

    async def resume(self, uuid: str, state: int) -> Claim:
        # A request that cannot be met must not take the session from another connection.
        status = await self._store.status(uuid)
        if state < status.acknowledged:
            raise _is_gone(state, status.acknowledged)
        if state > status.head:
            raise RemoteProtocolError(f"state {state} is beyond the last message, {status.head}", rule="restream-S27")
        return _claim_of(await self._store.attach(uuid, takeover=self._takeover))

    async def next_messages(self, claim: Claim, after: int, most: int, most_bytes: int) -> Batch:
        store = self._store
        while True:
            if after < claim.head:
                stored = await self._stored(claim, after, most, most_bytes)
                return _batch(self._application, stored, ends=claim.final and stored[-1].id == claim.head)
            if claim.final:
                return Batch([], True)
            if not self._application.generates:
                _update(claim, await store.wait(claim.uuid, after, epoch=claim.epoch))
                continue
            maker, acknowledged = Maker(self._application, self._quota), claim.acknowledged
            try:
                async with self._quota.borrow(most) as count:
                    made = await store.put_many(
                        claim.uuid, maker.make, count, epoch=claim.epoch, is_final=maker.is_final
                    )
            except StreamIsOver:
                return Batch([], True)
            except SessionFinished:
                _update(claim, await store.status(claim.uuid))
                continue
            except StoreFull:
                if await self._was_acknowledged(claim, acknowledged):
                    continue
                raise
            claim.head, claim.final = made[-1].id, maker.ends
            if made[0].id == after + 1:
                return _batch(self._application, made, ends=maker.ends)
            # Messages before these were appended by another task: they are stored, so they are read.

    async def _stored(self, claim: Claim, after: int, most: int, most_bytes: int) -> list[AnyMessage]:
        try:
            return await self._store.replay(claim.uuid, after, most, most_bytes=most_bytes)
        except MessageGone:
            # They were acknowledged, and not on this connection: another one is the owner.
            epoch = (await self._store.status(claim.uuid)).epoch
            if epoch == claim.epoch:
                raise
            raise Superseded(claim.uuid, held=claim.epoch, current=epoch) from None

    async def _was_acknowledged(self, claim: Claim, before: int) -> bool:
        """Wait for an acknowledgement if the store is full for want of one; False if none comes in time."""
        with trio.move_on_after(ACK_TIMEOUT):
            return (await self._store.wait_room(claim.uuid)).acknowledged > before
        return False

    async def ack(self, claim: Claim, id: int) -> None:
        await self._store.ack(claim.uuid, id, epoch=claim.epoch)
        claim.acknowledged = id

    async def release(self, claim: Claim) -> None:
        with suppress(UnknownSession, Superseded):
            await self._store.disconnect(claim.uuid, epoch=claim.epoch)

    async def wait_superseded(self, claim: Claim) -> None:
        # It also wakes for each appended message, and sleeps again.
        await self._store.wait(claim.uuid, LAST_ID, epoch=claim.epoch)

    async def reclaim(self, claim: Claim) -> None:
        # An abandoned request may reach another server late, after the request that replaced it. That server notices
        # soon that its client is gone.
        await trio.sleep(RECLAIM_DELAY)
        status = await self._store.status(claim.uuid)
        superseded = Superseded(claim.uuid, held=claim.epoch, current=status.epoch)
        if status.attached or status.acknowledged > claim.sent:  # the client has more than this connection sent
            raise superseded
        try:
            status = await self._store.attach(claim.uuid, takeover=False)
        except SessionBusy:
            raise superseded from None
        claim.epoch = status.epoch
        _update(claim, status)

    async def status(self, uuid: str) -> Status | None:
        return await self._store.status(uuid)

    async def expire(self) -> None:
        await self._store.expire()


# ---------------------------------------------------------------------------- over the five methods


class PlainBackend:
    """Sessions in an object with the specification's five methods."""

    def __init__(
        self, sessions: Sessions[Any, Any], application: AnyApplication, takeover: bool, random32: Callable[[], int]
    ) -> None:
        self._sessions = sessions
        self._application = application
        self._random32 = random32
        self._quota = MakeQuota()
        self._takeover = takeover
        self._epochs = count(1)
        self._held: dict[str, Claim] = {}  # the newest claim of each session
        self._absent: dict[str, tuple[float, Claim]] = {}  # after the client left, with the time, oldest first

    async def register(self, uuid: str, params: JsonObject) -> Claim:
        state = self._application.initial(params, self._random32())
        _, acknowledged = self._known(uuid)
        if acknowledged:
            raise _is_acknowledged(acknowledged)
        try:
            await self._sessions.register(uuid, state)
        except Exception as error:
            raise _failed(error) from error
        return self._hold(uuid, 0, 0)

    async def resume(self, uuid: str, state: int) -> Claim:
        await trio.lowlevel.checkpoint()
        if not self._takeover and uuid in self._held:
            raise SessionBusy(uuid)
        head, acknowledged = self._known(uuid)
        if state < acknowledged:
            raise _is_gone(state, acknowledged)
        return self._hold(uuid, max(state, head), acknowledged)  # `after` raises if there is no such session

    def _hold(self, uuid: str, head: int, acknowledged: int) -> Claim:
        self._absent.pop(uuid, None)
        claim = self._held[uuid] = Claim(uuid, next(self._epochs), head, acknowledged)
        return claim

    def _known(self, uuid: str) -> tuple[int, int]:
        """Return the last message of a session and the last acknowledged one, as far as they are remembered."""
        self._forget()
        claim = self._held.get(uuid)
        if claim is None and uuid in self._absent:
            _, claim = self._absent[uuid]
        return (0, 0) if claim is None else (claim.head, claim.acknowledged)

    def _forget(self) -> None:
        while self._absent:
            uuid = next(iter(self._absent))
            since, _ = self._absent[uuid]
            if trio.current_time() - since < ABSENCE and len(self._absent) <= MAX_ABSENT:
                return
            del self._absent[uuid]

    async def next_messages(self, claim: Claim, after: int, most: int, most_bytes: int) -> Batch:
        maker = Maker(self._application, self._quota)
        try:
            message = await self._sessions.after(claim.uuid, after)
            if message is None:
                async with self._quota.borrow(1):
                    message = await self._sessions.put(claim.uuid, maker.make)
        except StreamIsOver:
            return Batch([], True)
        except Exception as error:
            raise _failed(error) from error
        claim.head = max(claim.head, message.id)
        return _batch(self._application, [message], ends=maker.ends)

    async def ack(self, claim: Claim, id: int) -> None:
        try:
            await self._sessions.ack(claim.uuid, id)
        except Exception as error:
            raise _failed(error) from error
        newest = self._held.get(claim.uuid, claim)
        newest.acknowledged = max(newest.acknowledged, id)

    async def release(self, claim: Claim) -> None:
        if self._held.get(claim.uuid) is not claim:
            return  # a newer connection has the session: its client is present
        try:
            await self._sessions.disconnect(claim.uuid)
            del self._held[claim.uuid]
            self._absent[claim.uuid] = trio.current_time(), claim
        except Exception as error:
            raise _failed(error) from error

    async def wait_superseded(self, claim: Claim) -> None:
        return

    async def reclaim(self, claim: Claim) -> None:
        raise AssertionError("such sessions have no owners that could be superseded")

    async def status(self, uuid: str) -> Status | None:
        return None

    async def expire(self) -> None:
        self._forget()


# ---------------------------------------------------------------------------- helpers


def _batch(application: AnyApplication, messages: list[AnyMessage], *, ends: bool) -> Batch:
    for index, message in enumerate(messages, 1):
        if application.is_final(message.data):
            return Batch(messages[:index], True)
    return Batch(messages, ends)


def _claim_of(status: Status) -> Claim:
    return Claim(status.uuid, status.epoch, status.head, status.acknowledged, status.final)


def _update(claim: Claim, status: Status) -> None:
    claim.head, claim.final = status.head, status.final


def _is_acknowledged(acknowledged: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"this session exists already, and its messages up to {acknowledged} were acknowledged; resume it with state",
        rule="restream-S29",
    )


def _is_gone(state: int, acknowledged: int) -> RemoteProtocolError:
    return RemoteProtocolError(
        f"state {state} is before message {acknowledged}, which was acknowledged", rule="restream-S26"
    )


def _failed(error: Exception) -> StoreError:
    return error if isinstance(error, StoreError) else SessionsFailed(str(error) or "the session failed")

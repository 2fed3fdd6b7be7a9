"""What does a connection ask of the sessions? The same of a store and of an object with the document's five methods."""

from __future__ import annotations

from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard, TypeVar

import attrs
import trio

from muxkit._errors import RemoteProtocolError
from muxkit.protocols.restream.server.quota import Turns
from muxkit.protocols.restream.server.steps import Steps, StreamIsOver
from muxkit.protocols.restream.store.errors import (
    MessageGone,
    SessionBusy,
    SessionExists,
    SessionFinished,
    StoreError,
    StoreFull,
    Superseded,
    UnknownSession,
)
from muxkit.protocols.restream.store.protocol import LAST_ID, Message, SessionStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from muxkit.protocols.restream.applications import Application
    from muxkit.protocols.restream.store.protocol import Status
    from muxkit.protocols.restream.wire.json import JsonObject

    # State and data are tied only where the caller knows both: an untyped store gives `object`.
    AnyStore = SessionStore[Any, Any]
    AnyApplication = Application[Any, Any]
    AnyMessage = Message[Any]

PATIENCE = 30.0  # s that a client may take to acknowledge something when its session is full
REMEMBERED = 30.0  # s that a session without owners is known after its client has left, "within 30 seconds"
MOST_REMEMBERED = 10_000  # of such sessions
SECOND_LOOK = 0.25  # s after another server has taken a session over

StateT = TypeVar("StateT")
DataT = TypeVar("DataT")


class Sessions(Protocol[StateT, DataT]):
    """The document's session API: what a server needs at least. Each method may raise, which its client is told.

    A server keeps no owners and no time for such an object: two servers must not share one, and `disconnect` is where
    it learns that a session's time of absence begins. What a client has acknowledged the server itself remembers for
    30 s of absence; a session that lives longer has to refuse by itself what lies before that.
    """

    async def register(self, uuid: str, state: StateT) -> object:
        """Store the first state of a new session."""

    async def disconnect(self, uuid: str) -> object:
        """The client is gone."""

    async def put(self, uuid: str, transform: Callable[[StateT], tuple[DataT, StateT]]) -> Message[DataT]:
        """Make the next message from the state, and store both at once."""

    async def after(self, uuid: str, id: int) -> Message[DataT] | None:
        """The stored message behind `id`, or None if there is none yet."""

    async def ack(self, uuid: str, id: int) -> object:
        """The client has everything up to `id`."""


class SessionsFailed(StoreError):
    """A method of somebody's `Sessions` raised; the client is told what, as the document wants it."""


@attrs.define(eq=False)
class Claim:
    """A connection's hold on its session. `epoch` is higher for a newer connection; the rest is as far as we know."""

    uuid: str
    epoch: int
    head: int
    acknowledged: int = 0
    final: bool = False
    sent: int = 0


@attrs.frozen
class Batch:
    """The next messages of a session; `ends`: nothing follows the last of them."""

    messages: list[AnyMessage]
    ends: bool


class Books(Protocol):
    """Where sessions are kept, as connections see it."""

    async def register(self, uuid: str, params: JsonObject) -> Claim:
        """A new session, or one that a client begins again because it has not heard of it yet."""

    async def resume(self, uuid: str, state: int) -> Claim:
        """A session that is there. `state` is where its client wants to go on."""

    async def following(self, claim: Claim, at: int, most: int, most_bytes: int) -> Batch:
        """The messages after `at`: stored ones, or new ones, or those that somebody appends; waits until there are."""

    async def ack(self, claim: Claim, id: int) -> None: ...

    async def release(self, claim: Claim) -> None:
        """The client is gone."""

    async def superseded(self, claim: Claim) -> None:
        """Raises `Superseded` when a newer connection, on any server, has taken over; returns if nobody can know."""

    async def reclaim(self, claim: Claim) -> None:
        """Another server has taken the session over. Have it again if nobody is there, else raise `Superseded`."""

    async def status(self, uuid: str) -> Status | None: ...

    async def expire(self) -> None: ...


def books_of(
    store: AnyStore | Sessions[Any, Any],
    application: AnyApplication,
    *,
    takeover: bool,
    expiry: float | None,
    random32: Callable[[], int],
) -> Books:
    """The books over whatever the caller has."""
    if _has_owners(store):
        return _Stored(store, application, takeover, expiry, random32)
    return _Plain(store, application, takeover, random32)


def _has_owners(store: AnyStore | Sessions[Any, Any]) -> TypeGuard[AnyStore]:
    return hasattr(store, "attach")


class _Generating:
    """What both kinds do with an application."""

    def __init__(self, application: AnyApplication, random32: Callable[[], int]) -> None:
        self._application = application
        self._random32 = random32
        self._turns = Turns()

    def _initial(self, params: JsonObject) -> object:
        return self._application.initial(params, self._random32())

    def _batch(self, messages: list[AnyMessage], *, ends: bool) -> Batch:
        for index, message in enumerate(messages, 1):
            if self._application.is_final(message.data):
                return Batch(messages[:index], True)
        return Batch(messages, ends)


class _Stored(_Generating):
    """Sessions in one of our stores."""

    def __init__(
        self,
        store: AnyStore,
        application: AnyApplication,
        takeover: bool,
        expiry: float | None,
        random32: Callable[[], int],
    ) -> None:
        super().__init__(application, random32)
        self._store = store
        self._takeover = takeover
        self._expiry = expiry

    async def register(self, uuid: str, params: JsonObject) -> Claim:
        state = self._initial(params)
        try:
            return _claim(await self._store.register(uuid, state, params=params, keep=self._expiry))
        except SessionExists as error:
            _judge_repetition(error.status, params)
        return await self._attach(uuid)

    async def resume(self, uuid: str, state: int) -> Claim:
        # Who asks for what cannot be had must not take the session from somebody else.
        status = await self._store.status(uuid)
        if status.acknowledged <= state <= status.head:
            return await self._attach(uuid)
        if state < status.acknowledged:
            raise _is_gone(state, status.acknowledged)
        raise RemoteProtocolError(f"state {state} is beyond the last message, {status.head}", rule="restream-S27")

    async def _attach(self, uuid: str) -> Claim:
        return _claim(await self._store.attach(uuid, takeover=self._takeover))

    async def following(self, claim: Claim, at: int, most: int, most_bytes: int) -> Batch:
        store = self._store
        while True:
            if at < claim.head:
                stored = await self._stored(claim, at, most, most_bytes)
                return self._batch(stored, ends=claim.final and stored[-1].id == claim.head)
            if claim.final:
                return Batch([], True)
            if not self._application.generates:
                _note(claim, await store.wait(claim.uuid, at, epoch=claim.epoch))
                continue
            steps, acknowledged = Steps(self._application, self._turns), claim.acknowledged
            try:
                async with self._turns.turn(most) as count:
                    made = await store.put_many(
                        claim.uuid, steps.step, count, epoch=claim.epoch, is_final=steps.is_final
                    )
            except StreamIsOver:
                return Batch([], True)
            except SessionFinished:
                _note(claim, await store.status(claim.uuid))
                continue
            except StoreFull:
                if await self._was_acknowledged(claim, acknowledged):
                    continue
                raise
            claim.head, claim.final = made[-1].id, steps.ends
            if made[0].id == at + 1:
                return Batch(made, steps.ends)
            # Somebody else has appended what comes before: it is stored, so it is read.

    async def _stored(self, claim: Claim, at: int, most: int, most_bytes: int) -> list[AnyMessage]:
        try:
            return await self._store.replay(claim.uuid, at, most, most_bytes=most_bytes)
        except MessageGone:
            # Acknowledged, but not by our client if that has not come so far: then the session is somebody else's.
            epoch = (await self._store.status(claim.uuid)).epoch
            if epoch == claim.epoch:
                raise
            raise Superseded(claim.uuid, held=claim.epoch, current=epoch) from None

    async def _was_acknowledged(self, claim: Claim, before: int) -> bool:
        """There is no room. If that is for want of acknowledgements, wait for one; but not for ever."""
        with trio.move_on_after(PATIENCE):
            return (await self._store.wait_room(claim.uuid)).acknowledged > before
        return False

    async def ack(self, claim: Claim, id: int) -> None:
        await self._store.ack(claim.uuid, id, epoch=claim.epoch)
        claim.acknowledged = id

    async def release(self, claim: Claim) -> None:
        with suppress(UnknownSession, Superseded):
            await self._store.disconnect(claim.uuid, epoch=claim.epoch)

    async def superseded(self, claim: Claim) -> None:
        # Also wakes when somebody appends; it goes to sleep again.
        await self._store.wait(claim.uuid, LAST_ID, epoch=claim.epoch)

    async def reclaim(self, claim: Claim) -> None:
        # A request that its client had abandoned may be late at another server, and overtake the one behind it. That
        # server notices soon that nobody is there.
        await trio.sleep(SECOND_LOOK)
        status = await self._store.status(claim.uuid)
        superseded = Superseded(claim.uuid, held=claim.epoch, current=status.epoch)
        if status.attached or status.acknowledged > claim.sent:  # the client has been further than we were
            raise superseded
        try:
            status = await self._store.attach(claim.uuid, takeover=False)
        except SessionBusy:
            raise superseded from None
        claim.epoch = status.epoch
        _note(claim, status)

    async def status(self, uuid: str) -> Status | None:
        return await self._store.status(uuid)

    async def expire(self) -> None:
        await self._store.expire()


class _Plain(_Generating):
    """Sessions behind the document's five methods and nothing else."""

    def __init__(
        self, sessions: Sessions[Any, Any], application: AnyApplication, takeover: bool, random32: Callable[[], int]
    ) -> None:
        super().__init__(application, random32)
        self._sessions = sessions
        self._takeover = takeover
        self._epochs = count(1)
        self._held: dict[str, Claim] = {}  # the newest of each session
        self._left: dict[str, tuple[float, Claim]] = {}  # those whose client left, with the time, oldest first

    async def register(self, uuid: str, params: JsonObject) -> Claim:
        state = self._initial(params)
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
        return self._hold(uuid, max(state, head), acknowledged)  # `after` will say if there is no such session

    def _hold(self, uuid: str, head: int, acknowledged: int) -> Claim:
        self._left.pop(uuid, None)
        claim = self._held[uuid] = Claim(uuid, next(self._epochs), head, acknowledged)
        return claim

    def _known(self, uuid: str) -> tuple[int, int]:
        """The last message of a session and the last that was acknowledged, as far as this server remembers."""
        self._forget()
        claim = self._held.get(uuid)
        if claim is None and uuid in self._left:
            _, claim = self._left[uuid]
        return (0, 0) if claim is None else (claim.head, claim.acknowledged)

    def _forget(self) -> None:
        while self._left:
            uuid = next(iter(self._left))
            since, _ = self._left[uuid]
            if trio.current_time() - since < REMEMBERED and len(self._left) <= MOST_REMEMBERED:
                return
            del self._left[uuid]

    async def following(self, claim: Claim, at: int, most: int, most_bytes: int) -> Batch:
        steps = Steps(self._application, self._turns)
        try:
            message = await self._sessions.after(claim.uuid, at)
            if message is None:
                async with self._turns.turn(1):
                    message = await self._sessions.put(claim.uuid, steps.step)
        except StreamIsOver:
            return Batch([], True)
        except Exception as error:
            raise _failed(error) from error
        claim.head = max(claim.head, message.id)
        return self._batch([message], ends=steps.ends)

    async def ack(self, claim: Claim, id: int) -> None:
        try:
            await self._sessions.ack(claim.uuid, id)
        except Exception as error:
            raise _failed(error) from error
        newest = self._held.get(claim.uuid, claim)
        newest.acknowledged = max(newest.acknowledged, id)

    async def release(self, claim: Claim) -> None:
        if self._held.get(claim.uuid) is not claim:
            return  # a newer connection has the session: its client is there
        try:
            await self._sessions.disconnect(claim.uuid)
            del self._held[claim.uuid]
            self._left[claim.uuid] = trio.current_time(), claim
        except Exception as error:
            raise _failed(error) from error

    async def superseded(self, claim: Claim) -> None:
        return

    async def reclaim(self, claim: Claim) -> None:
        raise AssertionError("such sessions have no owners that could be superseded")

    async def status(self, uuid: str) -> Status | None:
        return None

    async def expire(self) -> None:
        self._forget()


def _claim(status: Status) -> Claim:
    return Claim(status.uuid, status.epoch, status.head, status.acknowledged, status.final)


def _note(claim: Claim, status: Status) -> None:
    claim.head, claim.final = status.head, status.final


def _judge_repetition(status: Status, params: JsonObject) -> None:
    """A session with this uuid is there. Is it the one that the client asks for, and nothing has come to it yet?"""
    if status.params != params:
        raise RemoteProtocolError("this session exists already, with other params", rule="restream-S29")
    if status.acknowledged:
        raise _is_acknowledged(status.acknowledged)


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

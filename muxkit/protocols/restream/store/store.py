"""A session store over any backend: the specification's five methods, owners, batches and fed sessions.

Every method is a checkpoint. When one returns, its effect is durable (as durable as the store is). A call that is
cancelled may have taken effect or not, but never half of it: ask `status`, or go on with `replay`.

**Owners.** `attach` increments the session's epoch and returns it. A later call with an older `epoch` raises
`Superseded` and changes nothing, also when the new owner is on another server. Without `epoch` there is no check.

**Transformers** are called in another thread while the store works, perhaps several times: they must be pure and short.
"""

from __future__ import annotations

import math
import re
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar
from uuid import UUID

from muxkit.protocols.restream.store.rules import (
    LAST_ID,
    MOST,
    Data,
    IdsExhausted,
    IsFinal,
    Rows,
    Rules,
    SessionExists,
    SessionFinished,
    State,
    Status,
    Superseded,
    Transform,
    UnknownSession,
    Wanted,
)
from muxkit.protocols.restream.wire import Message, StoredMessage
from muxkit.storage import StoreFull, Waiters, Watch

T = TypeVar("T")

SWEPT_AT_ONCE = 100  # sessions that one unit of work deletes, so that other work is not delayed
EXPIRED_AT_ONCE = 10_000  # messages of expired sessions that one unit of work deletes
FULL_DISK_DIVISOR = 8  # by which a unit of work gets smaller when a full disk has no room for its journal
LONGEST_UUID = 255
_is_storable = re.compile(rf"[ -~]{{1,{LONGEST_UUID}}}").fullmatch  # printable ASCII characters


class Backend(Protocol):
    """What holds the rows and runs units of work on them."""

    async def work(self, uuid: str, act: Callable[[Rows], T], *, grows: bool = False) -> T:
        """Run a unit of work that may write; return when it is durable. `uuid` is its session, "" for all.

        `grows` marks work that adds rows. All other work has to succeed on a full disk, because it makes room.
        """

    async def look(self, uuid: str, act: Callable[[Rows], T], wants: Wanted | None = None) -> T:
        """Run a unit of work that only reads. `wants` are the messages that it will read."""


class SessionStore(Generic[State, Data]):
    """A store of sessions, over any backend. Several tasks may use one at once."""

    def __init__(
        self, backend: Backend, rules: Rules[State, Data], waiters: Waiters, *, is_shared: bool = False
    ) -> None:
        self.is_shared: bool = is_shared
        """True if other processes may change the store without notifying this one of every change."""
        self._backend = backend
        self._rules = rules
        self._waiters = waiters
        self._codec = rules.codec
        self._limits = rules.limits

    # ------------------------------------------------------------------------ the specification's own

    async def register(
        self,
        uuid: str | UUID,
        state: State,
        *,
        params: object = None,
        attached: bool = True,
        keep: float | None = None,
        head: int = 0,
    ) -> Status:
        """Make a session. Raises `SessionExists`, with the status of the session that has the uuid.

        `attached`: the caller is its owner, of epoch 1. Otherwise (a fed session whose client will connect later) its
        absence begins now. `keep` is how many seconds of absence it survives: `math.inf` for no limit, the store's own
        number if None. Ids begin above `head`.
        """
        if not 0 <= head <= LAST_ID:
            raise ValueError(f"head {head} is not between 0 and {LAST_ID}")
        if keep is not None and not keep >= 0:
            raise ValueError(f"keep {keep} is not a number of seconds")
        uuid = str(uuid)
        if not _is_storable(uuid):
            raise ValueError(f"a uuid is 1 to {LONGEST_UUID} printable ASCII characters")
        stored, asked = self._encode(state), self._encode(params)
        register = partial(self._rules.register, uuid=uuid, state=stored, params=asked)
        try:
            return await self._backend.work(
                uuid, partial(register, attached=attached, keep=keep, head=head), grows=True
            )
        except StoreFull as full:
            # A program that is started again on a full disk has to learn that its session is there.
            try:
                status = await self.status(uuid)
            except UnknownSession:
                raise full from None
            raise SessionExists(status) from None

    async def remove(self, uuid: str | UUID) -> None:
        """Delete a session with all its messages, whether they were acknowledged or not.

        Raises `UnknownSession` if there is none. A client that is reading it gets that error from its server.
        """
        uuid = _check(uuid)
        await self._backend.work(uuid, partial(self._rules.remove, uuid=uuid))

    async def disconnect(self, uuid: str | UUID, *, epoch: int | None = None) -> None:
        """Begin the absence of the client. Harmless from an owner that was superseded."""
        uuid = _check(uuid)
        await self._backend.work(uuid, partial(self._rules.disconnect, uuid=uuid, epoch=epoch))

    async def put(
        self,
        uuid: str | UUID,
        transform: Transform[State, Data],
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
    ) -> Message[Data]:
        """Make the next message from the state, and store both at once.

        Raises `SessionFinished` after a final message, `IdsExhausted`, `StoreFull`, and any error of the transformer;
        nothing has changed then.
        """
        return (await self.put_many(uuid, transform, 1, epoch=epoch, is_final=is_final))[0]

    async def after(self, uuid: str | UUID, id: int) -> Message[Data] | None:
        """Return the stored message after `id` (0: the first), or None if there is none yet.

        Raises `MessageGone` below what was acknowledged and `UnknownMessage` above the last message.
        """
        found = await self.replay(uuid, id, 1)
        return found[0] if found else None

    async def ack(self, uuid: str | UUID, id: int, *, epoch: int | None = None) -> None:
        """Delete the messages up to `id`, which the client has.

        Raises `OutOfOrderAck` below an earlier one and `UnknownMessage` for 0 and above the last message.
        """
        name = _check(uuid)

        async def ack(upto: int) -> None:
            await self._backend.work(name, partial(self._rules.ack, uuid=name, id=upto, epoch=epoch))

        try:
            await ack(id)
        except StoreFull:
            await _in_steps(ack, (await self.status(name)).acknowledged, id)

    # ------------------------------------------------------------------------ named readers

    async def advance(self, uuid: str | UUID, reader: str, id: int = 0) -> Status:
        """Note that a named reader is done with the messages up to `id`; with 0, only enrol it.

        While a session has named readers, a message is deleted when all of them are done with it, and plain
        acknowledgements delete nothing. A position never goes back. Raises `UnknownMessage` above the last message.
        """
        name = _check(uuid)

        async def advance(upto: int) -> Status:
            return await self._backend.work(name, partial(self._rules.advance, uuid=name, reader=reader, id=upto))

        try:
            return await advance(id)
        except StoreFull as error:
            position = (await self.status(name)).readers.get(reader)
            if not error.passes or position is None:
                raise
            await _in_steps(advance, position, id)
            return await self.status(name)

    async def remove_reader(self, uuid: str | UUID, reader: str) -> Status:
        """Forget a named reader: nothing is kept for it any more. Harmless if there is none of that name."""
        uuid = _check(uuid)
        return await self._backend.work(uuid, partial(self._rules.remove_reader, uuid=uuid, reader=reader))

    async def touch(self, uuid: str | UUID) -> None:
        """Begin the absence of the client anew, because the session is in use without an owner."""
        uuid = _check(uuid)
        await self._backend.work(uuid, partial(self._rules.touch, uuid=uuid))

    # ------------------------------------------------------------------------ owners and batches

    async def attach(self, uuid: str | UUID, *, takeover: bool = True) -> Status:
        """Become the owner, with the epoch in the answer; an attached session does not expire.

        The last owner is superseded, and its tasks in `wait` wake. With `takeover=False` an attached session raises
        `SessionBusy` instead.
        """
        uuid = _check(uuid)
        return await self._backend.work(uuid, partial(self._rules.attach, uuid=uuid, takeover=takeover))

    async def put_many(
        self,
        uuid: str | UUID,
        transform: Transform[State, Data],
        most: int = MOST,
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
        timed: bool = False,
    ) -> list[Message[Data]]:
        """Make from one to `most` messages as one unit; fewer if one is final or the session has no more room.

        With `timed`, they get the present time, as appended messages do.
        """
        _check_most(most)
        uuid = _check(uuid)
        return await self._backend.work(
            uuid,
            partial(
                self._rules.put, uuid=uuid, transform=transform, most=most, epoch=epoch, is_final=is_final, timed=timed
            ),
            grows=True,
        )

    async def replay(
        self, uuid: str | UUID, after: int, most: int = MOST, *, most_bytes: int = 1 << 20
    ) -> list[Message[Data]]:
        """Return the stored messages after `after`, in order; empty if there are none yet. Raises like `after`.

        It returns at least one if there is one, then as many as fit into `most` and `most_bytes` of JSON.
        """
        decode = self._codec.data
        found = await self.replay_stored(uuid, after, most, most_bytes=most_bytes)
        return [Message(row.id, decode(row.data), row.time) for row in found]

    async def replay_stored(
        self, uuid: str | UUID, after: int, most: int = MOST, *, most_bytes: int = 1 << 20
    ) -> list[StoredMessage]:
        """Return messages as `replay` does, with their data as the JSON that is stored.

        A server passes messages on without looking into them. Decoding and encoding them again would take several
        times as long as reading them.
        """
        _check_most(most)
        uuid = _check(uuid)
        wanted = Wanted(uuid, after, most, most_bytes)
        return await self._backend.look(uuid, lambda rows: self._rules.replay(rows, wanted), wanted)

    # ------------------------------------------------------------------------ fed sessions

    async def append(self, uuid: str | UUID, data: Data, *, time: float | None = None) -> Message[Data]:
        """Store a message that the caller made, and wake the tasks that wait for it, in any process.

        The data is JSON, or a `Record` of bytes. `time` is in seconds since 1970. By default, it is the present time of
        the store's clock.
        """
        return (await self.append_many(uuid, (data,), time=time))[0]

    async def append_many(
        self, uuid: str | UUID, data: Sequence[Data], *, time: float | None = None
    ) -> list[Message[Data]]:
        """Store all of these messages as one unit, or none."""
        encode, most_bytes = self._codec.encode_data, self._limits.message_bytes
        stored = [encode(each, most_bytes) for each in data]
        if time is not None:
            time = float(time) + 0.0  # no negative zero
            if not math.isfinite(time):
                raise ValueError(f"{time} is no time")
        if not stored:
            await self.status(uuid)
            return []
        uuid = _check(uuid)
        append = partial(self._rules.append, uuid=uuid, data=stored, time=time)
        first, at = await self._backend.work(uuid, append, grows=True)
        return [Message(id, each, at) for id, each in enumerate(data, first)]

    async def finish(self, uuid: str | UUID) -> Status:
        """Add no more messages: later puts and appends raise `SessionFinished`. Harmless when repeated."""
        uuid = _check(uuid)
        return await self._backend.work(uuid, partial(self._rules.finish, uuid=uuid))

    async def wait(self, uuid: str | UUID, after: int, *, epoch: int | None = None) -> Status:
        """Sleep until there is a message after `after`, or the session is finished.

        Raises `Superseded` as soon as a newer owner than `epoch` attaches, `UnknownSession` when it expires.
        """
        uuid = _check(uuid)
        while True:
            with self._waiters.watching(uuid) as changed:
                status = await self.status(uuid)
                if epoch is not None and epoch != status.epoch:
                    raise Superseded(uuid, held=epoch, current=status.epoch)
                if status.head > after or status.final:
                    return status
                await changed.wait()

    async def wait_room(self, uuid: str | UUID, count: int = 1) -> Status:
        """Sleep until `count` more messages may be added; acknowledgements make room."""
        if count > self._limits.messages:
            raise StoreFull(
                f"{count:,} messages never fit into StoreLimits(messages={self._limits.messages})", passes=False
            )
        uuid = _check(uuid)
        while True:
            with self._waiters.watching(uuid) as changed:
                status = await self.status(uuid)
                if status.final:
                    raise SessionFinished(uuid, status.head)
                if status.head + count > LAST_ID:
                    raise IdsExhausted(uuid)
                if status.waiting + count <= self._limits.messages:
                    return status
                await changed.wait()

    # ------------------------------------------------------------------------ status and expiry

    async def status(self, uuid: str | UUID) -> Status:
        """Return the progress of the session."""
        uuid = _check(uuid)
        return await self._backend.look(uuid, partial(self._rules.status, uuid=uuid))

    async def statuses(self, uuids: Sequence[str]) -> dict[str, Status]:
        """Return the progress of several sessions at once, without those that are not known."""
        found: dict[str, Status] = {}
        storable = [uuid for uuid in uuids if _is_storable(uuid)]
        for first in range(0, len(storable), MOST):
            some = storable[first : first + MOST]
            found |= await self._backend.look("", partial(self._rules.statuses, uuids=some))
        return found

    async def sessions(self, after: str = "", most: int = MOST) -> list[Status]:
        """Return one page of the sessions that have not expired, ordered by uuid, after the uuid `after`."""
        _check_most(most)
        return await self._backend.look("", lambda rows: self._rules.page(rows, after, most))

    def watch(self) -> Watch:
        """Return a set of the sessions that change from now on, for a caller that keeps a copy of their progress."""
        return self._waiters.watch()

    async def expire(self, now: float | None = None) -> int:
        """Delete the expired sessions and return how many there were; call it every few seconds.

        An expired session is refused even before it is deleted. `now` is the store's own clock if None.
        """
        moment = self._rules.now() if now is None else now
        total, messages, has_more = 0, EXPIRED_AT_ONCE, True
        while has_more:
            expire = partial(self._rules.expire, now=moment, most=SWEPT_AT_ONCE, messages=messages)
            try:
                swept, has_more = await self._backend.work("", expire)
            except StoreFull:
                if messages == 1:
                    raise
                messages = max(1, messages // FULL_DISK_DIVISOR)
            else:
                total += swept
        while await self._backend.work("", lambda rows: rows.shrink()):
            pass
        return total

    def _encode(self, value: object) -> bytes:
        return self._codec.encode(value, self._limits.message_bytes)


async def _in_steps(act: Callable[[int], Awaitable[object]], done: int, id: int) -> None:
    """Acknowledge messages in several units of work, because a full disk has no room for the journal of one."""
    step = max(1, (id - done) // FULL_DISK_DIVISOR)
    while done < id:
        upto = min(id, done + step)
        try:
            await act(upto)
        except StoreFull:
            if step == 1:
                raise
            step = max(1, step // FULL_DISK_DIVISOR)
        else:
            done = upto


def _check(uuid: str | UUID) -> str:
    """Return a uuid as text; refuse one that cannot have been registered, since a database may fail on it."""
    text = str(uuid)
    if not _is_storable(text):
        raise UnknownSession(ascii(text[:LONGEST_UUID])[1:-1])
    return text


def _check_most(most: int) -> None:
    if most < 1:
        raise ValueError(f"most is {most}, and must be at least 1")

"""A session store over any backend: each call is one unit of work on the rows, and waiting tasks sleep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from muxkit.protocols.restream.store.errors import IdsExhausted, SessionFinished, Superseded, UnknownSession
from muxkit.protocols.restream.store.protocol import (
    LAST_ID,
    MOST,
    Data,
    IsFinal,
    Message,
    State,
    Status,
    Transform,
)
from muxkit.protocols.restream.store.rows import Wanted
from muxkit.storage import StoreFull

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from muxkit.protocols.restream.store.rows import Rows
    from muxkit.protocols.restream.store.rules import Rules
    from muxkit.storage import Waiters

T = TypeVar("T")

SWEPT_AT_ONCE = 100  # sessions that one unit of work deletes, so that other work is not delayed
LONGEST_UUID = 255


class Backend(Protocol):
    """What holds the rows and runs units of work on them."""

    async def work(self, uuid: str, act: Callable[[Rows], T]) -> T:
        """Run a unit of work that may write; return when it is durable. `uuid` is its session, "" for all."""

    async def look(self, uuid: str, act: Callable[[Rows], T], wants: Wanted | None = None) -> T:
        """Run a unit of work that only reads. `wants` are the messages that it will read."""


class Store(Generic[State, Data]):
    """A `SessionStore` over any backend."""

    def __init__(self, backend: Backend, rules: Rules[State, Data], waiters: Waiters) -> None:
        self._backend = backend
        self._rules = rules
        self._waiters = waiters
        self._codec = rules.codec
        self._limits = rules.limits

    async def register(
        self,
        uuid: str,
        state: State,
        *,
        params: object = None,
        attached: bool = True,
        keep: float | None = None,
        head: int = 0,
    ) -> Status:
        if not 0 <= head <= LAST_ID:
            raise ValueError(f"head {head} is not between 0 and {LAST_ID}")
        if keep is not None and not keep >= 0:
            raise ValueError(f"keep {keep} is not a number of seconds")
        if not _is_storable(uuid):
            raise ValueError(f"a uuid is 1 to {LONGEST_UUID} printable ASCII characters")
        stored, asked = self._encode(state), self._encode(params)
        return await self._backend.work(
            uuid,
            lambda rows: self._rules.register(rows, uuid, stored, asked, attached=attached, keep=keep, head=head),
        )

    async def attach(self, uuid: str, *, takeover: bool = True) -> Status:
        return await self._work(uuid, lambda rows: self._rules.attach(rows, uuid, takeover=takeover))

    async def disconnect(self, uuid: str, *, epoch: int | None = None) -> None:
        await self._work(uuid, lambda rows: self._rules.disconnect(rows, uuid, epoch))

    async def put(
        self,
        uuid: str,
        transform: Transform[State, Data],
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
    ) -> Message[Data]:
        return (await self.put_many(uuid, transform, 1, epoch=epoch, is_final=is_final))[0]

    async def put_many(
        self,
        uuid: str,
        transform: Transform[State, Data],
        most: int = MOST,
        *,
        epoch: int | None = None,
        is_final: IsFinal[Data] | None = None,
    ) -> list[Message[Data]]:
        _check_most(most)
        return await self._work(uuid, lambda rows: self._rules.put(rows, uuid, transform, most, epoch, is_final))

    async def append(self, uuid: str, data: Data, *, time: float | None = None) -> Message[Data]:
        return (await self.append_many(uuid, (data,), time=time))[0]

    async def append_many(self, uuid: str, data: Sequence[Data], *, time: float | None = None) -> list[Message[Data]]:
        stored = [self._encode(each) for each in data]
        if time is not None:
            time = float(time) + 0.0  # no negative zero
            if not math.isfinite(time):
                raise ValueError(f"{time} is no time")
        if not stored:
            await self.status(uuid)
            return []
        first = await self._work(uuid, lambda rows: self._rules.append(rows, uuid, stored, time))
        return [Message(id, each, time) for id, each in enumerate(data, first)]

    async def finish(self, uuid: str) -> Status:
        return await self._work(uuid, lambda rows: self._rules.finish(rows, uuid))

    async def ack(self, uuid: str, id: int, *, epoch: int | None = None) -> None:
        await self._work(uuid, lambda rows: self._rules.ack(rows, uuid, id, epoch))

    async def after(self, uuid: str, id: int) -> Message[Data] | None:
        found = await self.replay(uuid, id, 1)
        return found[0] if found else None

    async def replay(
        self, uuid: str, after: int, most: int = MOST, *, most_bytes: int = 1 << 20
    ) -> list[Message[Data]]:
        _check_most(most)
        _check(uuid)
        wanted = Wanted(uuid, after, most, most_bytes)
        found = await self._backend.look(uuid, lambda rows: self._rules.replay(rows, wanted), wanted)
        decode = self._codec.data
        return [Message(row.id, decode(row.data), row.time) for row in found]

    async def status(self, uuid: str) -> Status:
        _check(uuid)
        return await self._backend.look(uuid, lambda rows: self._rules.status(rows, uuid))

    async def sessions(self, after: str = "", most: int = MOST) -> list[Status]:
        _check_most(most)
        return await self._backend.look("", lambda rows: self._rules.page(rows, after, most))

    async def wait(self, uuid: str, after: int, *, epoch: int | None = None) -> Status:
        while True:
            with self._waiters.watching(uuid) as changed:
                status = await self.status(uuid)
                if epoch is not None and epoch != status.epoch:
                    raise Superseded(uuid, held=epoch, current=status.epoch)
                if status.head > after or status.final:
                    return status
                await changed.wait()

    async def wait_room(self, uuid: str, count: int = 1) -> Status:
        if count > self._limits.messages:
            raise StoreFull(f"{count:,} messages never fit into StoreLimits(messages={self._limits.messages})")
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

    async def expire(self, now: float | None = None) -> int:
        moment = self._rules.now() if now is None else now
        total = 0
        swept = SWEPT_AT_ONCE
        while swept == SWEPT_AT_ONCE:
            swept = await self._backend.work("", lambda rows: self._rules.expire(rows, moment, SWEPT_AT_ONCE))
            total += swept
        while await self._backend.work("", lambda rows: rows.shrink()):
            pass
        return total

    # ------------------------------------------------------------------------ helpers

    async def _work(self, uuid: str, act: Callable[[Rows], T]) -> T:
        _check(uuid)
        return await self._backend.work(uuid, act)

    def _encode(self, value: object) -> bytes:
        return self._codec.encode(value, self._limits.message_bytes)


def _check(uuid: str) -> None:
    """Refuse a uuid that cannot have been registered: a database may fail on it in its own way."""
    if not _is_storable(uuid):
        raise UnknownSession(ascii(uuid[:LONGEST_UUID])[1:-1])


def _is_storable(uuid: str) -> bool:
    return 0 < len(uuid) <= LONGEST_UUID and uuid.isascii() and uuid.isprintable()


def _check_most(most: int) -> None:
    if most < 1:
        raise ValueError(f"most is {most}, and must be at least 1")

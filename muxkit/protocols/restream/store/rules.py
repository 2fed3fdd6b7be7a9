"""The rules of a session store: what each operation checks, and what it changes in the rows.

They are the same for every kind of store. Each function is one unit of work: it checks everything first and writes
last, so one that raises has changed nothing. There is no Trio and no disk here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic

import attrs
import msgspec

from muxkit.protocols.restream.store.errors import (
    IdsExhausted,
    MessageGone,
    NotJson,
    OutOfOrderAck,
    SessionBusy,
    SessionExists,
    SessionExpired,
    SessionFinished,
    Superseded,
    UnknownMessage,
    UnknownSession,
)
from muxkit.protocols.restream.store.rows import (
    LAST_ID,
    Data,
    IsFinal,
    Message,
    Now,
    Row,
    Rows,
    Session,
    State,
    Status,
    StoreLimits,
    Transform,
    Wanted,
)
from muxkit.storage import StoreCorrupt, StoreFull

if TYPE_CHECKING:
    from collections.abc import Sequence


@attrs.frozen(eq=False)
class Rules(Generic[State, Data]):
    """The rules, with the application's JSON, the limits and the clock."""

    codec: Codec[State, Data]
    limits: StoreLimits
    keep: float
    now: Now

    # ------------------------------------------------------------------------ beginning and leaving

    def register(
        self, rows: Rows, uuid: str, state: bytes, params: bytes, *, attached: bool, keep: float | None, head: int
    ) -> Status:
        old = rows.session(uuid)
        if old is not None:
            if not self._is_over(old):
                raise SessionExists(self._status(old))
            rows.remove(uuid)
        elif (count := rows.count()) >= self.limits.sessions:
            raise StoreFull(
                f"{count:,} sessions are all that StoreLimits(sessions={self.limits.sessions}) allows; "
                "wait until some expire, or raise it"
            )
        session = Session(uuid, params, state, head, head, False, False, 1 if attached else 0, keep, None)
        if not attached:
            session.due = self._due(session)
        rows.save(session)
        return self._status(session)

    def attach(self, rows: Rows, uuid: str, *, takeover: bool) -> Status:
        session = self._load(rows, uuid)
        if not takeover and session.due is None:
            raise SessionBusy(uuid)
        session.epoch += 1
        session.due = None
        rows.save(session)
        rows.changed(uuid, everywhere=session.epoch > 1)
        return self._status(session)

    def disconnect(self, rows: Rows, uuid: str, epoch: int | None) -> None:
        session = self._load(rows, uuid)
        if session.due is not None or (epoch is not None and epoch != session.epoch):
            return
        self.detach(rows, session)

    def detach(self, rows: Rows, session: Session) -> None:
        """Begin the absence of a session's client."""
        session.due = self._due(session)
        rows.save(session)

    def expire(self, rows: Rows, now: float, most: int) -> int:
        over = rows.overdue(now, most)
        for uuid in over:
            rows.remove(uuid)
            rows.changed(uuid, everywhere=True)
        return len(over)

    # ------------------------------------------------------------------------ messages

    def put(
        self,
        rows: Rows,
        uuid: str,
        transform: Transform[State, Data],
        most: int,
        epoch: int | None,
        is_final: IsFinal[Data] | None,
    ) -> list[Message[Data]]:
        session = self._load(rows, uuid, epoch)
        room = self._room(session, 1)
        state, final = session.state, False
        made: list[Message[Data]] = []
        new: list[Row] = []
        for id in range(session.head + 1, session.head + min(most, room) + 1):
            data, following = transform(self.codec.state(state))
            state = self.codec.encode(following, self.limits.message_bytes)
            new.append(Row(id, None, self.codec.encode(data, self.limits.message_bytes)))
            made.append(Message(id, data))
            if is_final is not None and is_final(data):
                final = True
                break
        rows.add(uuid, new)
        session.head, session.state, session.final = new[-1].id, state, final
        rows.save(session)
        rows.changed(uuid, everywhere=False)
        return made

    def append(self, rows: Rows, uuid: str, data: Sequence[bytes], time: float | None) -> int:
        """Add messages and return the id of the first."""
        session = self._load(rows, uuid)
        self._room(session, len(data))
        first = session.head + 1
        rows.add(uuid, [Row(id, time, each) for id, each in enumerate(data, first)])
        session.head += len(data)
        session.fed = True
        rows.save(session)
        rows.changed(uuid, everywhere=True)
        return first

    def finish(self, rows: Rows, uuid: str) -> Status:
        session = self._load(rows, uuid)
        if not session.final:
            session.final = True
            rows.save(session)
            rows.changed(uuid, everywhere=True)
        return self._status(session)

    def replay(self, rows: Rows, wanted: Wanted) -> list[Row]:
        uuid, after = wanted.uuid, wanted.after
        session = self._load(rows, uuid)
        if not 0 <= after <= session.head:
            raise UnknownMessage(uuid, after, session.head)
        if after < session.acknowledged:
            raise MessageGone(uuid, after, session.acknowledged)
        if after == session.head:
            return []
        found = rows.messages(wanted)
        if [row.id for row in found] != list(range(after + 1, after + 1 + len(found))) or not found:
            raise StoreCorrupt(
                f"session {uuid}: messages are missing behind {after}, though {session.head} were stored and only "
                f"{session.acknowledged} acknowledged; restore the store from a copy"
            )
        return found

    def ack(self, rows: Rows, uuid: str, id: int, epoch: int | None) -> None:
        session = self._load(rows, uuid, epoch)
        if not 1 <= id <= session.head:
            raise UnknownMessage(uuid, id, session.head)
        if id < session.acknowledged:
            raise OutOfOrderAck(uuid, id, session.acknowledged)
        if id == session.acknowledged:
            return
        rows.trim(uuid, session.acknowledged, id)
        session.acknowledged = id
        rows.save(session)
        rows.changed(uuid, everywhere=session.fed)

    # ------------------------------------------------------------------------ status

    def status(self, rows: Rows, uuid: str) -> Status:
        return self._status(self._load(rows, uuid))

    def page(self, rows: Rows, after: str, most: int) -> list[Status]:
        return [self._status(session) for session in rows.page(after, most, self.now())]

    # ------------------------------------------------------------------------ helpers

    def _load(self, rows: Rows, uuid: str, epoch: int | None = None) -> Session:
        session = rows.session(uuid)
        if session is None:
            raise UnknownSession(uuid)
        if self._is_over(session):
            raise SessionExpired(uuid)
        if epoch is not None and epoch != session.epoch:
            raise Superseded(uuid, held=epoch, current=session.epoch)
        return session

    def _is_over(self, session: Session) -> bool:
        return session.due is not None and session.due <= self.now()

    def _due(self, session: Session) -> float:
        return self.now() + (self.keep if session.keep is None else session.keep)

    def _room(self, session: Session, count: int) -> int:
        """Return for how many messages there is room; raises if it is less than `count`."""
        if session.final:
            raise SessionFinished(session.uuid, session.head)
        ids = LAST_ID - session.head
        if ids < count:
            raise IdsExhausted(session.uuid)
        waiting = session.head - session.acknowledged
        room = self.limits.messages - waiting
        if room < count:
            raise StoreFull(
                f"session {session.uuid}: {waiting:,} messages are not acknowledged and {count:,} more would pass "
                f"StoreLimits(messages={self.limits.messages}); wait for acks, or raise it"
            )
        return min(ids, room)

    def _status(self, session: Session) -> Status:
        return Status(
            session.uuid,
            session.head,
            session.acknowledged,
            session.final,
            session.epoch,
            self.codec.params(session.params),
            session.due is None,
            session.due,
        )


# ---------------------------------------------------------------------------- JSON


class Codec(Generic[State, Data]):
    """The JSON of one application; `state` and `data` are any types that msgspec can decode into.

    NaN and the infinities become null, as JSON has none; tuples become arrays.
    """

    __slots__ = ("_data", "_encoder", "_params", "_state")

    def __init__(self, state: type[State], data: type[Data]) -> None:
        self._state = msgspec.json.Decoder(state)
        self._data = msgspec.json.Decoder(data)
        self._params = msgspec.json.Decoder(object)
        self._encoder = msgspec.json.Encoder()

    def encode(self, value: object, most: int) -> bytes:
        """Return a value as JSON; raises `StoreFull` above `most` bytes."""
        try:
            encoded = self._encoder.encode(value)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise NotJson(f"a {type(value).__name__} cannot be written as JSON: {error}") from error
        if len(encoded) > most:
            raise StoreFull(
                f"{len(encoded):,} bytes of JSON are more than the {most:,} allowed; "
                "send less at once, or raise StoreLimits(message_bytes=…)"
            )
        return encoded

    def state(self, encoded: bytes) -> State:
        """Return a new copy, so that the application may change it."""
        return _decoded(self._state, encoded, "state")

    def data(self, encoded: bytes) -> Data:
        """Return the data of a message."""
        return _decoded(self._data, encoded, "data of a message")

    def params(self, encoded: bytes) -> object:
        """Return the params of a session."""
        return _decoded(self._params, encoded, "params")


def _decoded(decoder: msgspec.json.Decoder[State], encoded: bytes, what: str) -> State:
    try:
        return decoder.decode(encoded)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotJson(
            f"the stored {what} is not what this application stores: {error}; was the session made by another one?"
        ) from error

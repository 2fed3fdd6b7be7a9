"""The rules of a session store: what each operation checks, and what it changes in the rows; their values and errors.

They are the same for every kind of store. Each function is one unit of work: it checks everything first and writes
last, so one that raises has changed nothing. There is no Trio and no disk here.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, cast

import attrs
import msgspec

from muxkit._errors import LocalProtocolError, RemoteProtocolError
from muxkit._settings import ABOVE_ZERO_OR_NONE
from muxkit.protocols.restream.wire import Message, Record, StoredMessage, check_depth
from muxkit.protocols.restream.wire.records import is_encoded
from muxkit.storage import StoreCorrupt, StoreError, StoreFull

State = TypeVar("State")
Data = TypeVar("Data")

Transform = Callable[[State], tuple[Data, State]]
IsFinal = Callable[[Data], bool]
Now = Callable[[], float]  # seconds since 1970, like `time.time`; called in any thread

LAST_ID = 2**32 - 1  # ids are unsigned 32-bit integers and never wrap
KEEP = 30.0  # s, "if it fails to re-establish a connection within 30 seconds"
MARKS = 16  # of retention, in what a session keeps
NO_READERS = b"{}"
NO_MARKS = b"[]"
MOST = 256  # messages of one `replay` or `put_many` by default


@attrs.frozen
class Status:
    """The progress of a session. Messages up to `acknowledged` may be deleted; `head` is the last id that exists."""

    uuid: str
    head: int
    acknowledged: int
    final: bool  # no message will follow `head`
    epoch: int  # of the newest owner; 0 before the first
    params: object  # as given to `register`
    attached: bool
    expires: float | None  # when it expires; None while it is attached
    incarnation: str = ""  # drawn by `register`: another one means another session of the same uuid
    written: int = 0  # bytes of the data of all messages so far, as JSON
    readers: Mapping[str, int] = attrs.field(factory=dict)  # the last message that each named reader is done with

    @property
    def waiting(self) -> int:
        """How many messages are kept because they are not acknowledged."""
        return self.head - self.acknowledged


@attrs.frozen
class StoreLimits:
    """The limits of a store. Beyond one of them `StoreFull` is raised and nothing is changed."""

    sessions: int = 1_000_000  # memory and SQLite
    messages: int = 1_000_000  # unacknowledged ones of one session
    message_bytes: int = 1 << 20  # of one state, data or params, as JSON
    readers: int = 64  # named readers of one session
    bytes: int = 1 << 40  # memory: of all that is kept; SQLite: of the file


@attrs.frozen
class Retention:
    """How long a session keeps messages that are not acknowledged; None: until they are. Applied by appends.

    Messages that fall out count as acknowledged: a client or reader that had not read them is told so.
    """

    seconds: float | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)
    bytes: int | None = attrs.field(default=None, validator=ABOVE_ZERO_OR_NONE)

    def is_due(self, last: Mark | None, now: float, written: int) -> bool:
        """Return True if a mark is wanted after the last one; there are about `MARKS` in what is kept."""
        if last is None:
            return self.seconds is not None or self.bytes is not None
        if self.seconds is not None and now - last.time >= self.seconds / MARKS:
            return True
        return self.bytes is not None and written - last.written >= self.bytes / MARKS

    def is_past(self, mark: Mark, now: float, written: int) -> bool:
        """Return True if what was there at a mark is kept no longer."""
        if self.seconds is not None and mark.time <= now - self.seconds:
            return True
        return self.bytes is not None and written - mark.written >= self.bytes


class Mark(msgspec.Struct, array_like=True, frozen=True):
    """A session at some time: its last message, and the bytes of all messages up to it."""

    time: float
    id: int
    written: int


# ---------------------------------------------------------------------------- rows


@attrs.define(eq=True)
class Session:
    """One session as it is stored. Messages `acknowledged + 1` to `head` exist, and no others."""

    uuid: str
    params: bytes
    state: bytes
    head: int
    acknowledged: int
    final: bool
    fed: bool  # messages were appended: feeders in other processes may wait for acks
    epoch: int
    keep: float | None  # s of absence that it survives; None: the store's own number
    due: float | None  # when it expires; None while it is attached
    incarnation: str
    readers: bytes  # JSON: the last message that each named reader is done with
    written: int  # bytes of the data of all messages so far
    marks: bytes  # JSON: times, and the last message at each, for retention


class Wanted(NamedTuple):
    """Messages that a unit of work will read."""

    uuid: str
    after: int
    most: int
    most_bytes: int


class Rows(Protocol):
    """The rows during one unit of work, which reads its own writes.

    The rules write only after all their checks, and `save` is the last call about a session.
    """

    def session(self, uuid: str) -> Session | None:
        """Return the session, which the caller may change and `save`."""

    def save(self, session: Session) -> None:
        """Insert or update the session."""

    def remove(self, uuid: str) -> None:
        """Delete the session and all its messages."""

    def add(self, uuid: str, messages: Sequence[StoredMessage]) -> None:
        """Add messages after the last one."""

    def messages(self, wanted: Wanted) -> list[StoredMessage]:
        """Return messages in order; at least one if there is one."""

    def trim(self, uuid: str, above: int, upto: int) -> None:
        """Delete the messages with these ids."""

    def count(self) -> int:
        """Return how many sessions there are, for the limit; 0 from a store that does not count them."""

    def page(self, after: str, most: int, now: float) -> list[Session]:
        """Return sessions that have not expired, in the order of their uuids."""

    def several(self, uuids: Sequence[str]) -> list[Session]:
        """Return those of these sessions that exist, to be read only."""

    def overdue(self, now: float, most: int) -> list[Session]:
        """Return some of the expired sessions."""

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        """Wake the tasks that wait for this session when the work is durable; `everywhere`: also in other processes."""

    def shrink(self) -> bool:
        """Return some unused space to the disk; True if there is more."""


_positions = msgspec.json.Decoder(dict[str, int])
_marks = msgspec.json.Decoder(list[Mark])

# ---------------------------------------------------------------------------- the rules


@attrs.frozen(eq=False)
class Rules(Generic[State, Data]):
    """The rules, with the application's JSON, the limits and the clock."""

    codec: Codec[State, Data]
    limits: StoreLimits
    keep: float
    now: Now
    retention: Retention = Retention()

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
            raise TooManySessions(count, self.limits.sessions)
        epoch = 1 if attached else 0
        incarnation = secrets.token_hex(4)
        session = Session(
            uuid, params, state, head, head, False, False, epoch, keep, None, incarnation, NO_READERS, 0, NO_MARKS
        )
        if not attached:
            session.due = self._due(session)
        rows.save(session)
        rows.changed(uuid, everywhere=False)
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

    def expire(self, rows: Rows, now: float, most: int, messages: int) -> tuple[int, bool]:
        """Delete up to `most` expired sessions with about as many messages; return their number and if there are more.

        A session with more messages loses some of them first. Nobody can read an expired session any more.
        """
        over = rows.overdue(now, most)
        for removed, session in enumerate(over):
            kept = session.head - session.acknowledged
            if kept > messages:
                self._trim(rows, session, session.acknowledged + max(1, messages))
                rows.save(session)
                return removed, True
            messages -= kept
            rows.remove(session.uuid)
            rows.changed(session.uuid, everywhere=True)
        return len(over), len(over) == most

    def remove(self, rows: Rows, uuid: str) -> None:
        """Delete a session and its messages."""
        self._load(rows, uuid)
        rows.remove(uuid)
        rows.changed(uuid, everywhere=True)

    # ------------------------------------------------------------------------ messages

    def put(
        self,
        rows: Rows,
        uuid: str,
        transform: Transform[State, Data],
        most: int,
        epoch: int | None,
        is_final: IsFinal[Data] | None,
        timed: bool = False,
    ) -> list[Message[Data]]:
        time = self.now() if timed else None
        session = self._load(rows, uuid, epoch)
        room = self._room(session, 1)
        state, final = session.state, False
        made: list[Message[Data]] = []
        new: list[StoredMessage] = []
        for id in range(session.head + 1, session.head + min(most, room) + 1):
            data, following = transform(self.codec.state(state))
            state = self.codec.encode(following, self.limits.message_bytes)
            new.append(StoredMessage(id, time, self.codec.encode_data(data, self.limits.message_bytes)))
            made.append(Message(id, data, time))
            if is_final is not None and is_final(data):
                final = True
                break
        rows.add(uuid, new)
        session.written += sum(len(row.data) for row in new)
        session.head, session.state, session.final = new[-1].id, state, final
        rows.save(session)
        rows.changed(uuid, everywhere=False)
        return made

    def append(self, rows: Rows, uuid: str, data: Sequence[bytes], time: float | None) -> tuple[int, float]:
        """Add messages. Return the id of the first and their time, which is the present one by default."""
        if time is None:
            time = self.now()
        session = self._load(rows, uuid)
        self._room(session, len(data))
        first = session.head + 1
        rows.add(uuid, [StoredMessage(id, time, each) for id, each in enumerate(data, first)])
        session.head += len(data)
        session.written += sum(map(len, data))
        session.fed = True
        self._retain(rows, session)
        rows.save(session)
        rows.changed(uuid, everywhere=True)
        return first, time

    def finish(self, rows: Rows, uuid: str) -> Status:
        session = self._load(rows, uuid)
        if not session.final:
            session.final = True
            rows.save(session)
            rows.changed(uuid, everywhere=True)
        return self._status(session)

    def replay(self, rows: Rows, wanted: Wanted) -> list[StoredMessage]:
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
        if session.readers != NO_READERS:
            return  # the named readers decide what is deleted
        if id < session.acknowledged:
            raise OutOfOrderAck(uuid, id, session.acknowledged)
        if id > session.acknowledged:
            self._trim(rows, session, id)
            rows.save(session)
            rows.changed(uuid, everywhere=session.fed)

    # ------------------------------------------------------------------------ named readers

    def advance(self, rows: Rows, uuid: str, reader: str, id: int) -> Status:
        """Note that a reader is done with the messages up to `id`; the first call enrols it."""
        session = self._load(rows, uuid)
        if not 0 <= id <= session.head:
            raise UnknownMessage(uuid, id, session.head)
        positions = _positions.decode(session.readers)
        before = positions.get(reader)
        if before is None and len(positions) >= self.limits.readers:
            raise StoreFull(
                f"session {uuid} has {len(positions)} readers, all that StoreLimits(readers={self.limits.readers}) "
                "allows; remove one with remove_reader, or raise it",
                passes=False,
            )
        now = max(id, session.acknowledged, before or 0)
        if now != before:
            positions[reader] = now
            self._set_readers(rows, session, positions)
        return self._status(session)

    def remove_reader(self, rows: Rows, uuid: str, reader: str) -> Status:
        session = self._load(rows, uuid)
        positions = _positions.decode(session.readers)
        if positions.pop(reader, None) is not None:
            self._set_readers(rows, session, positions)
        return self._status(session)

    def touch(self, rows: Rows, uuid: str) -> None:
        """Begin the absence of a session's client anew, if its end is near."""
        session = self._load(rows, uuid)
        due = self._due(session)
        if session.due is not None and session.due < due - (due - self.now()) / 2:
            session.due = due
            rows.save(session)

    def _set_readers(self, rows: Rows, session: Session, positions: dict[str, int]) -> None:
        session.readers = msgspec.json.encode(positions) if positions else NO_READERS
        least = min(positions.values(), default=0)
        if least > session.acknowledged:
            self._trim(rows, session, least)
        rows.save(session)
        rows.changed(session.uuid, everywhere=session.fed)

    def _trim(self, rows: Rows, session: Session, id: int) -> None:
        rows.trim(session.uuid, session.acknowledged, id)
        session.acknowledged = id

    def _retain(self, rows: Rows, session: Session) -> None:
        """Delete what is kept no longer, after an append."""
        if self.retention.seconds is None and self.retention.bytes is None:
            return
        now, marks = self.now(), _marks.decode(session.marks)
        past = [mark for mark in marks if self.retention.is_past(mark, now, session.written)]
        marks = marks[len(past) :]
        is_due = self.retention.is_due(marks[-1] if marks else None, now, session.written)
        if is_due:
            marks.append(Mark(now, session.head, session.written))
        if past or is_due:
            session.marks = msgspec.json.encode(marks)
        if past and past[-1].id > session.acknowledged:
            self._trim(rows, session, past[-1].id)

    # ------------------------------------------------------------------------ status

    def status(self, rows: Rows, uuid: str) -> Status:
        return self._status(self._load(rows, uuid))

    def statuses(self, rows: Rows, uuids: Sequence[str]) -> dict[str, Status]:
        """Return the progress of those of these sessions that are known."""
        found = rows.several(uuids)
        return {session.uuid: self._status(session) for session in found if not self._is_over(session)}

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
                f"StoreLimits(messages={self.limits.messages}); wait for acks, or raise it",
                passes=count <= self.limits.messages,
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
            session.incarnation,
            session.written,
            {} if session.readers == NO_READERS else _positions.decode(session.readers),
        )


# ---------------------------------------------------------------------------- errors about one session


class UnknownSession(StoreError):
    """No session has this uuid; nothing was changed."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} is not known here; begin a new one with params")
        self.uuid = uuid


class SessionExpired(UnknownSession):
    """The client was absent for too long, and its session is deleted."""

    def __init__(self, uuid: str) -> None:
        StoreError.__init__(self, f"session {uuid} has expired; begin a new one with params")
        self.uuid = uuid


class SessionExists(StoreError):
    """`register` was called with the uuid of an existing session, whose `status` this is."""

    def __init__(self, status: Status) -> None:
        super().__init__(f"session {status.uuid} exists already; resume it with state, or choose another uuid")
        self.status = status


class TooManySessions(StoreFull):
    """There are as many sessions as `StoreLimits(sessions=)` allows; there is room when some of them expire."""

    def __init__(self, count: int, limit: int) -> None:
        super().__init__(
            f"{count:,} sessions are all that StoreLimits(sessions={limit}) allows; wait until some expire, or raise it"
        )

    @property
    def for_client(self) -> str:
        return "the server has no room for another session at the moment"


class SessionBusy(StoreError):
    """`attach(takeover=False)` while another connection has the session."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} has an open connection; close that one first")
        self.uuid = uuid


class Superseded(StoreError):
    """A newer connection has taken over the session; the old owner must stop and send nothing more."""

    def __init__(self, uuid: str, *, held: int, current: int) -> None:
        super().__init__(f"session {uuid} was taken over by a newer connection (epoch {current}, this one was {held})")
        self.uuid = uuid
        self.held = held
        self.current = current

    @property
    def for_client(self) -> str:
        return f"session {self.uuid} was taken over by a newer connection"


class SessionFinished(StoreError):
    """A message was to be added after the final one."""

    def __init__(self, uuid: str, head: int) -> None:
        super().__init__(f"session {uuid} is finished; nothing follows message {head}")
        self.uuid = uuid
        self.head = head


class UnknownMessage(StoreError):
    """No message of the session has this id: it is 0, or above the last one."""

    def __init__(self, uuid: str, id: int, head: int) -> None:
        known = f"its messages are 1 to {head}" if head else "it has no messages yet"
        super().__init__(f"session {uuid} has no message {id}; {known}")
        self.uuid = uuid
        self.id = id
        self.head = head


class OutOfOrderAck(StoreError):
    """An acknowledgement is below an earlier one."""

    def __init__(self, uuid: str, id: int, acknowledged: int) -> None:
        super().__init__(f"session {uuid}: ack {id} after ack {acknowledged}; acks never go back")
        self.uuid = uuid
        self.id = id
        self.acknowledged = acknowledged


class MessageGone(StoreError):
    """The requested messages were acknowledged, so they may be deleted."""

    def __init__(self, uuid: str, id: int, acknowledged: int) -> None:
        super().__init__(
            f"session {uuid}: messages after {id} were asked for, but all up to {acknowledged} are acknowledged; "
            f"resume with state {acknowledged} or later"
        )
        self.uuid = uuid
        self.id = id
        self.acknowledged = acknowledged


class IdsExhausted(StoreError):
    """The last of the 32-bit ids is used."""

    def __init__(self, uuid: str) -> None:
        super().__init__(f"session {uuid} has used all message ids up to 4294967295; go on in a new session")
        self.uuid = uuid


class NotJson(StoreError, ValueError):
    """A state, data or params has no form in JSON, or came back from JSON in another shape."""


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
        return self._checked_size(encoded, most)

    def _checked_size(self, encoded: bytes, most: int) -> bytes:
        if len(encoded) > most:
            raise StoreFull(
                f"{len(encoded):,} bytes are more than the {most:,} allowed; "
                "send less at once, or raise StoreLimits(message_bytes=…)",
                passes=False,
            )
        return encoded

    def encode_data(self, data: Data, most: int) -> bytes:
        """Return the data of a message as JSON that a line of the protocol may hold, or as an encoded record."""
        if isinstance(data, Record):
            return self._checked_size(data.encode(), most)
        encoded = self.encode(data, most)
        try:
            check_depth(encoded, around=1)
        except LocalProtocolError as error:
            raise NotJson(f"a {type(data).__name__} cannot be sent: {error}") from error
        return encoded

    def state(self, encoded: bytes) -> State:
        """Return a new copy, so that the application may change it."""
        return _decoded(self._state, encoded, "state")

    def data(self, encoded: bytes) -> Data:
        """Return the data of a message: a `Record` if it was appended as one, whatever the application's type is."""
        if is_encoded(encoded):
            try:
                return cast("Data", Record.decode(encoded))  # it has no other type than the application's
            except RemoteProtocolError as error:
                raise StoreCorrupt(f"a stored record is damaged: {error}; restore the store from a copy") from error
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

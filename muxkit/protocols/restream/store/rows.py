"""The values of a session store: messages, status and limits for its callers, rows for its backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeVar

import attrs

from muxkit.protocols.restream.wire.messages import Message as Message

State = TypeVar("State")
Data = TypeVar("Data")

Transform = Callable[[State], tuple[Data, State]]
IsFinal = Callable[[Data], bool]
Now = Callable[[], float]  # seconds since 1970, like `time.time`; called in any thread

LAST_ID = 2**32 - 1  # ids are unsigned 32-bit integers and never wrap
KEEP = 30.0  # s, "if it fails to re-establish a connection within 30 seconds"
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
    bytes: int = 1 << 40  # memory: of all that is kept; SQLite: of the file


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


class Row(NamedTuple):
    """One message as it is stored."""

    id: int
    time: float | None
    data: bytes


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

    def add(self, uuid: str, messages: Sequence[Row]) -> None:
        """Add messages after the last one."""

    def messages(self, wanted: Wanted) -> list[Row]:
        """Return messages in order; at least one if there is one."""

    def trim(self, uuid: str, above: int, upto: int) -> None:
        """Delete the messages with these ids."""

    def count(self) -> int:
        """Return how many sessions there are, for the limit; 0 from a store that does not count them."""

    def page(self, after: str, most: int, now: float) -> list[Session]:
        """Return sessions that have not expired, in the order of their uuids."""

    def overdue(self, now: float, most: int) -> list[str]:
        """Return some of the expired sessions."""

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        """Wake the tasks that wait for this session when the work is durable; `everywhere`: also in other processes."""

    def shrink(self) -> bool:
        """Return some unused space to the disk; True if there is more."""

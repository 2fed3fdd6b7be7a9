"""The rows of a session store, and the interface through which the rules read and write them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

import attrs

if TYPE_CHECKING:
    from collections.abc import Sequence


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

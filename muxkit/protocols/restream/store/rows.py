"""What does a store keep? The rows, and the few things that the rules do with them."""

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
    fed: bool  # something was appended: feeders in other processes may be waiting for acks
    epoch: int
    keep: float | None  # s of absence that it survives; None: as the store says
    due: float | None  # when it expires; None while it is attached


class Row(NamedTuple):
    """One message as it is stored."""

    id: int
    time: float | None
    data: bytes


class Rows(Protocol):
    """The rows during one unit of work. What is read here is what was written here, committed or not.

    Nothing is written unless the rules have been checked to the end; `save` is always the last word about a session.
    """

    def session(self, uuid: str) -> Session | None:
        """The session; the caller may change it and `save` it."""

    def save(self, session: Session) -> None:
        """Make it so, whether there was one or not."""

    def remove(self, uuid: str) -> None:
        """The session and all its messages."""

    def add(self, uuid: str, messages: Sequence[Row]) -> None:
        """Messages behind the last one."""

    def messages(self, uuid: str, after: int, most: int, most_bytes: int) -> list[Row]:
        """In order; at least one if there is one."""

    def trim(self, uuid: str, above: int, upto: int) -> None:
        """Delete the messages with these ids."""

    def count(self) -> int:
        """How many sessions there are, for the limit; 0 where nobody counts."""

    def page(self, after: str, most: int, now: float) -> list[Session]:
        """Sessions in the order of their uuids that are not due yet."""

    def overdue(self, now: float, most: int) -> list[str]:
        """Some of the sessions whose time is over."""

    def changed(self, uuid: str, *, everywhere: bool) -> None:
        """Wake who waits for this session when the work is durable; everywhere: in other processes as well."""

    def shrink(self) -> bool:
        """Give some unused room back to the disk; whether there is more to give."""

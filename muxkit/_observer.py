"""The observer of a connection, for traces, metrics and captures; without one it costs one test."""

from __future__ import annotations

from typing import Literal, Protocol, runtime_checkable

from muxkit._info import SessionInfo

Direction = Literal["in", "out"]


class Observer(Protocol):
    """Told what an engine and its pump do, as it happens; must not raise and must not block.

    `channel` names the channel as the protocol does (for bpmux: `"out-sink 7"`). Times are not passed: an
    observer that wants them brings its own clock.
    """

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        """One frame was parsed or written; `size` counts its payload bytes."""

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        """Credit came in, or was granted."""

    def state(self, channel: str, state: str) -> None:
        """A channel opened, ended, or went away."""

    def timer(self, name: str) -> None:
        """A deadline was reached."""

    def error(self, error: BaseException) -> None:
        """The connection failed."""

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        """Raw bytes went over the transport; the data belongs to the observer only during the call."""


class BaseObserver:
    """An observer that ignores everything; a subclass has the methods that it needs."""

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None: ...
    def credit(self, direction: Direction, channel: str, amount: int) -> None: ...
    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...
    def error(self, error: BaseException) -> None: ...
    def transport(self, direction: Direction, data: bytes | memoryview) -> None: ...

    def session_opened(self, info: SessionInfo) -> None:
        """A session began."""

    def session_closed(self, info: SessionInfo, error: BaseException | None) -> None:
        """A session is over; `error` is None if that was in order."""


@runtime_checkable
class ConnectionObserver(Observer, Protocol):
    """An observer of many connections, such as all those of a server, which makes one of its own for each."""

    def connection(self, name: str = "") -> Observer:
        """Make the observer of the connection that begins now; `name` is text for its reader."""


def for_connection(observer: Observer | None, name: str = "") -> Observer | None:
    """Return the observer of the connection that begins now; called once for each, so that two can be told apart."""
    return observer.connection(name) if isinstance(observer, ConnectionObserver) else observer

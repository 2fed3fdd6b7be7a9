"""Observers, which receive notifications about connections, for traces, metrics and captures.

`Observer` has the methods that engines and pumps call for each frame. `Facts` has those that sessions call for rarer
events, such as a sender that waits. If a connection has no observer, each of these places costs one `is None` check.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import ClassVar, Literal, Protocol, runtime_checkable

from muxkit._errors import RemoteProtocolError
from muxkit._info import SessionInfo
from muxkit._quick_check import QuickCheck

Direction = Literal["in", "out"]
Blocked = Literal["credit", "transport"]
"""The reason why a sender waits: "credit" of the peer, or "transport", which must take bytes from the outbox first."""


class Observer(Protocol):
    """Receives a call for everything that an engine and its pump do. The methods must not raise or block.

    The argument `channel` is the protocol's name for a channel or one of its directions, such as `"out-sink 7"` in
    bpmux. The calls happen immediately and contain no times, so an observer that needs them reads a clock.
    """

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None:
        """A frame was received or sent. `name` is its kind, and `size` the number of bytes of its payload."""

    def credit(self, direction: Direction, channel: str, amount: int) -> None:
        """The peer has granted credit ("in"), or this side has ("out")."""

    def state(self, channel: str, state: str) -> None:
        """The state of a channel has changed."""

    def timer(self, name: str) -> None:
        """A timer of the engine has fired."""

    def error(self, error: BaseException) -> None:
        """The connection has failed."""

    def transport(self, direction: Direction, data: bytes | memoryview) -> None:
        """Bytes were received from the transport or passed to it. `data` is valid only during the call."""


class Counters(Protocol):
    """The statistics of a session that metrics use. `muxkit.SessionStats` has them."""

    @property
    def bytes_received(self) -> int: ...
    @property
    def bytes_sent(self) -> int: ...
    @property
    def messages_received(self) -> int: ...
    @property
    def messages_sent(self) -> int: ...
    @property
    def channels(self) -> int: ...
    @property
    def queued(self) -> int: ...


class Counted(Protocol):
    """An object with statistics: a session, or a connection of restream."""

    @property
    def info(self) -> SessionInfo: ...
    def stats(self) -> Counters: ...


@runtime_checkable
class Facts(Protocol, metaclass=QuickCheck):
    """The methods of an observer for events that are rarer than frames. An observer has all of them or none."""

    def session_began(self, session: Counted) -> None:
        """A session or a connection of restream has begun. Its statistics can be read until `session_ended`."""

    def session_ended(self, session: Counted, error: BaseException | None) -> None:
        """It has ended, and its statistics are final. `error` is None if it ended in order."""

    def wait_began(self, on: Blocked) -> None:
        """A sender begins to wait."""

    def wait_ended(self, on: Blocked, seconds: float) -> None:
        """A sender has waited for this time. It can send now, or was cancelled."""

    def round_trip(self, seconds: float) -> None:
        """A ping was answered after this time."""

    def limit(self, name: str) -> None:
        """The peer has reached this limit of `muxkit.Limits`, so a channel was refused, or the session ends."""

    def broken(self) -> None:
        """A connection was lost because of the network."""

    def outage(self) -> None:
        """A session of Relink or a reader of restream has lost its connection, and waits for another one."""

    def resumed(self, seconds: float) -> None:
        """It has a connection again, after this time."""


class BaseObserver:
    """An observer that does nothing. Derive from it, and override the methods that you need."""

    wants_frames: ClassVar[bool] = True
    """If False, `frame`, `credit`, `state`, `timer`, `error` and `transport` aren't called, which saves time."""

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None: ...
    def credit(self, direction: Direction, channel: str, amount: int) -> None: ...
    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...
    def error(self, error: BaseException) -> None: ...
    def transport(self, direction: Direction, data: bytes | memoryview) -> None: ...

    def span(self, channel: str, trace_id: str, span_id: str) -> None:
        """A channel has this span of OpenTelemetry. Only called with `muxkit.spans.instrument`."""

    def session_opened(self, info: SessionInfo) -> None:
        """A session has begun."""

    def session_closed(self, info: SessionInfo, error: BaseException | None) -> None:
        """A session has ended. `error` is None if it ended in order."""

    def session_began(self, session: Counted) -> None: ...
    def session_ended(self, session: Counted, error: BaseException | None) -> None: ...
    def wait_began(self, on: Blocked) -> None: ...
    def wait_ended(self, on: Blocked, seconds: float) -> None: ...
    def round_trip(self, seconds: float) -> None: ...
    def limit(self, name: str) -> None: ...
    def broken(self) -> None: ...
    def outage(self) -> None: ...
    def resumed(self, seconds: float) -> None: ...

    def turned_away(self, limit: str, protocol: str, transport: str) -> None:
        """A listener has closed a connection, or doesn't accept one, because of this field of `muxkit.Limits`."""

    def reconnected(self, seconds: float, protocol: str, transport: str) -> None:
        """`muxkit.reconnecting` has opened a session. This time has passed since the last one ended."""


@runtime_checkable
class ConnectionObserver(Observer, Protocol, metaclass=QuickCheck):
    """An observer of several connections, such as all connections of a server. It creates an observer for each."""

    def connection(self, name: str = "") -> Observer:
        """Return the observer for a new connection. `name` describes the connection for people."""


def for_connection(observer: Observer | None, name: str = "") -> Observer | None:
    """Return the observer for a new connection. Call this once for each connection."""
    if observer is None:
        return None
    return observer.connection(name) if isinstance(observer, ConnectionObserver) else observer


def frames_of(observer: Observer | None) -> Observer | None:
    """Return the observer for the engine and the pump, or None if it doesn't want to know about frames and bytes."""
    return observer if getattr(observer, "wants_frames", True) else None


def facts_of(observer: Observer | None) -> Facts | None:
    """Return the observer for the events of `Facts`, or None if the observer doesn't have these methods.

    If it observes several connections and doesn't want frames, nobody has called `connection` for this one, so this
    does.
    """
    if observer is None:
        return None
    given: object = observer
    if isinstance(observer, ConnectionObserver) and not getattr(observer, "wants_frames", True):
        given = observer.connection()
    return given if isinstance(given, Facts) else None


def tell(observer: Observer | None, event: str, *arguments: object) -> None:
    """Call a method of an observer, if the observer has it."""
    method = getattr(observer, event, None)
    if method is not None:
        method(*arguments)


def tell_limit(facts: Facts | None, error: BaseException | None) -> None:
    """Tell which limit the peer reached, if that is what the error says."""
    if facts is not None and isinstance(error, RemoteProtocolError) and error.limit is not None:
        facts.limit(error.limit)


_turned_away: ContextVar[Callable[[str], None] | None] = ContextVar(
    "what tells of connections turned away", default=None
)


@contextmanager
def telling_of_listener(observer: Observer | None, protocol: str, transport: str) -> Iterator[None]:
    """Connect the function `turned_away` to an observer, for the tasks that are started in the block."""
    tell = getattr(observer, "turned_away", None)
    if tell is None:
        yield
        return
    token = _turned_away.set(partial(tell, protocol=protocol, transport=transport))
    try:
        yield
    finally:
        _turned_away.reset(token)


def turned_away(limit: str) -> None:
    """Notify the observer of this listener that it has closed or not accepted a connection because of a limit."""
    tell = _turned_away.get()
    if tell is not None:
        tell(limit)


@contextmanager
def measured(facts: Facts | None, session: Counted) -> Iterator[None]:
    """Notify an observer that a session begins, and at the end of the block that it has ended."""
    if facts is None:
        yield
        return
    facts.session_began(session)
    error: BaseException | None = None
    try:
        yield
    except BaseException as raised:
        error = raised
        raise
    finally:
        facts.session_ended(session, error)
        del error  # its traceback and this frame would form a reference cycle

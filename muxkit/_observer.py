"""The observer of a connection, for traces, metrics and captures; without one it costs one test."""

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
"""What a sender waited for: the peer's credit, or room in the outbox, which the transport empties."""


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


class Counters(Protocol):
    """What a session has sent, received and holds; `muxkit.SessionStats` has these and more."""

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
    """Something whose counters can be read at any time: a session, or one connection of restream."""

    @property
    def info(self) -> SessionInfo: ...
    def stats(self) -> Counters: ...


@runtime_checkable
class Facts(Protocol, metaclass=QuickCheck):
    """The part of an observer that is told what is rare: never of a frame, at most of a wait."""

    def session_began(self, session: Counted) -> None:
        """A session, a link or a connection of restream began; its counters can be read until `session_ended`."""

    def session_ended(self, session: Counted, error: BaseException | None) -> None:
        """It is over, and its counters are final; `error` is None if that was in order."""

    def wait_began(self, on: Blocked) -> None:
        """A sender has to wait."""

    def wait_ended(self, on: Blocked, seconds: float) -> None:
        """A sender goes on after so long, or gives up."""

    def round_trip(self, seconds: float) -> None:
        """A ping was answered."""

    def limit(self, name: str) -> None:
        """The peer reached this field of `muxkit.Limits`, which ended the session or refused a channel."""

    def broken(self) -> None:
        """The network ended a connection."""

    def outage(self) -> None:
        """A connection was lost, and its link waits for another."""

    def resumed(self, seconds: float) -> None:
        """The link has a connection again, after so long."""


class BaseObserver:
    """An observer that ignores everything; a subclass has the methods that it needs."""

    wants_frames: ClassVar[bool] = True
    """False if `frame`, `credit`, `state`, `timer`, `error` and `transport` need not be called: then engines do no work
    for this observer."""

    def frame(self, direction: Direction, channel: str, name: str, size: int) -> None: ...
    def credit(self, direction: Direction, channel: str, amount: int) -> None: ...
    def state(self, channel: str, state: str) -> None: ...
    def timer(self, name: str) -> None: ...
    def error(self, error: BaseException) -> None: ...
    def transport(self, direction: Direction, data: bytes | memoryview) -> None: ...

    def span(self, channel: str, trace_id: str, span_id: str) -> None:
        """A channel belongs to this span of OpenTelemetry; only with `muxkit.spans.instrument`."""

    def session_opened(self, info: SessionInfo) -> None:
        """A session began."""

    def session_closed(self, info: SessionInfo, error: BaseException | None) -> None:
        """A session is over; `error` is None if that was in order."""

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
        """A listener let a connection go, or does not take one for now, because of this field of `muxkit.Limits`."""

    def reconnected(self, seconds: float, protocol: str, transport: str) -> None:
        """`muxkit.reconnecting` has opened a session, so long after the one before was over."""


@runtime_checkable
class ConnectionObserver(Observer, Protocol, metaclass=QuickCheck):
    """An observer of many connections, such as all those of a server, which makes one of its own for each."""

    def connection(self, name: str = "") -> Observer:
        """Make the observer of the connection that begins now; `name` is text for its reader."""


def for_connection(observer: Observer | None, name: str = "") -> Observer | None:
    """Return the observer of the connection that begins now; called once for each, so that two can be told apart."""
    if observer is None:
        return None
    return observer.connection(name) if isinstance(observer, ConnectionObserver) else observer


def frames_of(observer: Observer | None) -> Observer | None:
    """Return the observer if it is to be told of frames and bytes, for the engine and the pump."""
    return observer if getattr(observer, "wants_frames", True) else None


def facts_of(observer: Observer | None) -> Facts | None:
    """Return what a session tells of waits, round trips, limits and outages; None if nothing is told.

    An observer of many connections that was not asked for one of its own is asked now.
    """
    if observer is None:
        return None
    given: object = observer
    if isinstance(observer, ConnectionObserver) and not getattr(observer, "wants_frames", True):
        given = observer.connection()
    return given if isinstance(given, Facts) else None


def tell(observer: Observer | None, event: str, *arguments: object) -> None:
    """Call a method that observers need not have."""
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
    """Let `turned_away` reach the observer from the tasks that are started in the block."""
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
    """Tell the observer of this listener that a connection had to go because of a limit."""
    tell = _turned_away.get()
    if tell is not None:
        tell(limit)


@contextmanager
def measured(facts: Facts | None, session: Counted) -> Iterator[None]:
    """Tell that a session begins, and at the end of the block that it is over."""
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
        del error  # or it and this frame would hold each other

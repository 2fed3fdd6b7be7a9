"""`muxkit.connect` and `muxkit.serve`: from a URL `protocol+transport://address`, both looked up, to sessions."""

from __future__ import annotations

import logging
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any, Literal, cast

import attrs
import trio

from muxkit._limits import Limits
from muxkit._observer import Observer, for_connection
from muxkit._plugins import PROTOCOLS, STREAMS, link_kind, load, load_transport
from muxkit.runtime import (
    Channel,
    Link,
    LinkLost,
    Listening,
    ProtocolPlugin,
    ResumingPlugin,
    Session,
    SlotQueue,
    bare_nursery,
    interruptible,
    leaves_of,
    peer_of,
    protect_package,
    protected_manager,
    run_interruptible,
)

SessionHandler = Callable[[Session], Awaitable[object]]
ChannelHandler = Callable[[Channel], Awaitable[object]]


LINGER_SECONDS = 5.0  # for taking leave
FORM = "protocol+transport://address, such as bpmux+tcp://127.0.0.1:7000"

_log = logging.getLogger("muxkit")


class _Door:
    """A URL taken apart, with its protocol plugin and its transport."""

    def __init__(
        self, url: str, limits: Limits | None, observer: Observer | None, linger: float, options: dict[str, Any]
    ) -> None:
        self.scheme, separator, self.address = url.partition("://")
        protocol, plus, self._transport_name = self.scheme.partition("+")
        if not (separator and plus and protocol and self._transport_name):
            raise ValueError(f"{url!r} is no URL of the form {FORM}")
        # What an entry point gives cannot be known to a type checker; `load` has looked at its attributes.
        self.protocol = cast("ProtocolPlugin", load(PROTOCOLS, protocol))
        links = getattr(self.protocol, "links", STREAMS)
        self.transport = load_transport(self._transport_name, protocol, links)
        self.limits = limits or Limits()
        ours = self.protocol.options
        self.link_options = {name: value for name, value in options.items() if name not in ours}
        self._session_options = {name: value for name, value in options.items() if name in ours}
        self._session_options |= {"limits": self.limits, "linger": linger}
        self._observer = observer
        self._endpoint: str | None = None
        if isinstance(self.protocol, ResumingPlugin):
            self.address, self._endpoint = self.protocol.split(self._transport_name, self.address)

    def dial(self) -> AbstractAsyncContextManager[Link]:
        # Credit for streams side by side is the link's business, so what bounds it has to go there.
        bounds = {"limits": self.limits} if link_kind(self.transport) == "multistream" else {}
        return self.transport.connect(self.address, **bounds, **self.link_options)

    def url(self, address: str) -> str:
        """Return the URL that a client connects to."""
        if isinstance(self.protocol, ResumingPlugin):
            address = self.protocol.join(self._transport_name, address, self._endpoint)
        return f"{self.scheme}://{address}"

    @protected_manager
    async def session_to(self) -> AsyncGenerator[Session, None]:
        if isinstance(self.protocol, ResumingPlugin):
            observer = for_connection(self._observer, f"client {self.address}")
            async with self.protocol.link(
                self.dial, endpoint=self._endpoint, observer=observer, **self._session_options
            ) as session:
                yield session
        else:
            async with self.dial() as link, self.session_on(link, "client") as session:
                yield session

    def session_on(self, link: Link, role: Literal["client", "server"]) -> AbstractAsyncContextManager[Session]:
        observer = for_connection(self._observer, f"{role} {peer_of(link) or self.address}")
        return self.protocol.session(link, role=role, address=self.address, observer=observer, **self._session_options)

    def listening(self, handler: SessionHandler) -> AbstractAsyncContextManager[Listening]:
        """Open what takes each connection, so that `handler` is called with each session."""
        if isinstance(self.protocol, ResumingPlugin):
            return self.protocol.listener(
                handler, endpoint=self._endpoint, observer=self._observer, **self._session_options
            )
        return nullcontext(_Connections(self.session_on, handler))


@attrs.define(eq=False)
class _Connections:
    """Serves a protocol whose sessions end with their connections."""

    _session_on: Callable[[Link, Literal["server"]], AbstractAsyncContextManager[Session]]
    _handler: SessionHandler
    _sessions: set[Session] = attrs.field(factory=set, init=False)
    _draining: bool = attrs.field(default=False, init=False)
    _ended: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot, init=False)

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    async def handle(self, link: Link) -> None:
        session: Session | None = None
        try:
            async with self._session_on(link, "server") as session:
                if not self._draining:
                    self._sessions.add(session)
                    await run_interruptible(self._handler, session)
        except Exception as error:
            if all(isinstance(leaf, LinkLost) for leaf in leaves_of(error)):
                _log.debug("session lost: %s", error)
                return
            _log.error("the handler of a session failed, the session was closed: %s", _where(error))
            _log.debug("in full", exc_info=error)
        finally:
            # After it has taken leave: what its handler sent last may still be on its way.
            if session is not None:
                self._sessions.discard(session)
            self._ended.unpark_all()

    async def shutdown(self, *, grace: float) -> None:
        self._draining = True
        with trio.move_on_after(grace):
            async with bare_nursery() as nursery:
                for session in [*self._sessions]:
                    nursery.start_soon(self._drain, session, grace)
            while self._sessions:
                await self._ended.park()

    async def _drain(self, session: Session, grace: float) -> None:
        with suppress(LinkLost):  # then the session is over as well
            await session.shutdown(grace=grace)


@protected_manager
async def connect(
    url: str,
    *,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> AsyncGenerator[Session, None]:
    """Open a session with the server at `url`; it ends with the block.

    Other keyword arguments are options of the protocol (`config=` for bpmux) or of the transport
    (`ssl_context=` for tls, `insecure=True` for plaintext off loopback). Time limits are yours to set
    (`trio.fail_after`); leaving the block takes at most `linger` seconds.
    """
    async with _Door(url, limits, observer, linger, options).session_to() as session:
        yield session


@attrs.define(eq=False)
class Served:
    """A running server."""

    _listening: Listening
    _scope: trio.CancelScope
    urls: tuple[str, ...]

    @property
    def url(self) -> str:
        """The URL that a client connects to; the first, if there are several addresses."""
        return self.urls[0]

    @property
    def sessions(self) -> int:
        """How many sessions there are now."""
        return self._listening.sessions

    async def shutdown(self, *, grace: float) -> None:
        """Take no new sessions and channels, let the live ones end for up to `grace` seconds, then stop."""
        await self._listening.shutdown(grace=grace)
        self._scope.cancel()


async def serve(
    handler: SessionHandler,
    url: str,
    *,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    task_status: trio.TaskStatus[Served] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Serve sessions at `url` until cancelled; `served = await nursery.start(muxkit.serve, handler, url)`.

    `handler` is called with each `Session`; when it returns, the session takes leave. What it raises ends its own
    session and is logged, the others go on. `muxkit.each_channel` makes one out of a function for a channel.
    """
    door = _Door(url, limits, observer, linger, options)

    with trio.CancelScope() as scope:
        async with door.listening(handler) as listening, bare_nursery() as nursery:
            addresses = await nursery.start(
                lambda task_status: door.transport.serve(
                    listening.handle, door.address, limits=door.limits, task_status=task_status, **door.link_options
                )
            )
            task_status.started(Served(listening, scope, tuple(map(door.url, addresses))))


def each_channel(handler: ChannelHandler, *, most: int | None = None) -> SessionHandler:
    """Make a session handler that calls `handler` with each channel that the peer opens, concurrently.

    At most `most` handlers run at the same time in one session, by default its `Limits.channels`: work that goes on
    after its channel is gone still counts, or a peer could start it without bound. A channel is closed when its
    handler returns. What a handler raises aborts its own channel and is logged, except when the peer stopped the
    channel or the connection was lost.
    """

    async def handle_session(session: Session) -> None:
        running: set[Channel] = set()
        bound = most or session.limits.channels
        slots = SlotQueue(lambda: bound - len(running))
        async with bare_nursery() as nursery:
            try:
                async for channel in session.incoming():
                    running.add(channel)
                    nursery.start_soon(handle_channel, channel, running, slots)
                    await slots.wait_for_slot()  # before the next channel is taken, which must not wait for a handler
            except LinkLost as error:
                _log.debug("session lost: %s", error)

    @interruptible
    async def handle_channel(channel: Channel, running: set[Channel], slots: SlotQueue) -> None:
        try:
            await handler(channel)
        except (trio.BrokenResourceError, trio.EndOfChannel):
            channel.abort()
        except Exception as error:
            channel.abort()
            _log.error("the handler of a channel failed, the channel was aborted: %s", _where(error))
            _log.debug("in full", exc_info=error)
        except BaseException:
            channel.abort()
            raise
        else:
            await channel.aclose()
        finally:
            running.discard(channel)
            slots.wake_waiters()

    return handle_session


def _where(error: BaseException) -> str:
    """Describe an error for the log: its type and traceback, but not its text, which may quote what a peer sent."""
    way = "".join(traceback.format_tb(error.__traceback__)).rstrip()
    inner = [_where(member) for member in error.exceptions] if isinstance(error, BaseExceptionGroup) else []
    return "\n".join([f"{type(error).__name__} (its text is left out, it may hold payload)", way, *inner])


protect_package(__name__)

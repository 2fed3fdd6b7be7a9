"""Servers: from URLs and a handler to sessions, as a block, as a task of a nursery, or as a whole program."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext, suppress
from functools import partial
from typing import Any, Literal

import trio

from muxkit._authorize import Authorize
from muxkit._door import LINGER_SECONDS, Door
from muxkit._errors import Refused
from muxkit._handlers import ChannelHandler, SessionHandler, is_loss, session_handler, takes_requests
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._tls import TLS
from muxkit.core import counted, printable
from muxkit.runtime import (
    Link,
    LinkLost,
    Listening,
    Session,
    Unsupported,
    background,
    bare_nursery,
    current_place,
    log_failure,
    may_log,
    owner,
    peer_of,
    protect_package,
    protected_manager,
    run_handler,
)

GRACE_SECONDS = 30.0  # for clients of a program that is told to end
REFUSAL_SECONDS = 1.0  # to wait for what a client wants that is sent away
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ABORTED = 1  # the exit code of a program that was told twice to end

_log = logging.getLogger("muxkit")


class Server:
    """A running server."""

    def __init__(
        self,
        urls: Sequence[str],
        listening: Sequence[Listening],
        tls: TLS | None,
        closed: trio.Event,
        observer: Observer | None = None,
    ) -> None:
        self.urls: tuple[str, ...] = tuple(urls)
        """What clients connect to, one URL for each address; a host for all addresses, as 0.0.0.0, stays as it is."""
        self.observer: Observer | None = observer
        """The observer that was given to it."""
        self.is_draining: bool = False
        """True from the begin of `shutdown`: it takes no new sessions."""
        self._owner = owner()
        self._listening = listening
        self._tls = tls
        self._closed = closed

    @property
    def url(self) -> str:
        """The first of `urls`."""
        return self.urls[0]

    def sessions(self) -> Sequence[Session]:
        """Return the sessions whose handlers run now."""
        return [session for each in self._listening for session in each.sessions]

    def reload(self) -> None:
        """Read the files of `tls` again, for new connections; faulty ones change nothing, and raise ValueError."""
        if self._tls is None:
            raise ValueError("this server has no tls=")
        self._tls.reload()

    async def shutdown(self, *, grace: float) -> None:
        """Take no new sessions and channels, let the live ones end for up to `grace` seconds, then stop."""
        self._owner.check()
        self.is_draining = True
        async with bare_nursery() as nursery:
            for each in self._listening:
                nursery.start_soon(partial(each.shutdown, grace=grace))
        self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until the server was shut down, or can serve no more, as with a transport for a single connection."""
        self._owner.check()
        await self._closed.wait()

    def __repr__(self) -> str:
        return f"<muxkit.Server {', '.join(self.urls)}: {counted(len(self.sessions()), 'session')}>"


@protected_manager
async def open_server(
    handler: SessionHandler | ChannelHandler,
    url: str | Sequence[str],
    *,
    tls: TLS | None = None,
    authorize: Authorize | None = None,
    listeners: Sequence[socket.socket] = (),
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> AsyncGenerator[Server, None]:
    """Serve at `url`, or at several, while the block runs.

    `authorize` is called with the `SessionInfo` of each new connection and the token that it showed, and returns the
    name of the user or raises `Refused`; `muxkit.tokens` makes one. `listeners` are sockets that were bound elsewhere,
    for a service manager for example: the server listens on them instead of binding the addresses of the URLs.

    With several URLs, `tls` is for those whose transport encrypts.

    `handler` is an async function with one parameter. It is called with each channel of each session, as by
    `each_channel`, and the channel is closed when it returns. If its parameter is annotated as a `Session`, it is
    called with each session instead, and the session ends in order when it returns. What a handler raises ends its own
    session or channel and is logged, and the others go on. A `Refused` is not logged as a failure: the peer reads its
    reason, also when a nursery has wrapped it in an exception group.

    Leaving the block normally takes no new sessions and gives the live ones `linger` seconds to end; leaving it by an
    error ends them immediately.

    Other keyword arguments are options of the protocol or of the transport. Raises TypeError for a handler that isn't
    async, doesn't take one argument, or is annotated as neither; ValueError for addresses and options that are invalid;
    OSError for addresses that cannot be used.
    """
    each_session = session_handler(handler)
    served = [url] if isinstance(url, str) else url
    if not served:
        raise ValueError("a server needs at least one URL")
    doors = [
        Door(
            each,
            limits=limits,
            observer=observer,
            linger=linger,
            tls=tls,
            authorize=authorize,
            options={**options, "listeners": given} if given else options,
        )
        for each, given in zip(served, _shared_out(listeners, served), strict=True)
    ]
    for door in doors:
        if takes_requests(handler) and not getattr(door.protocol, "has_requests", False):
            raise Unsupported(f"this handler takes requests, and {door.protocol_name} has no requests; bpmux has")
    if tls is not None and len(doors) > 1:
        encrypting = [door for door in doors if door.takes_tls()]
        if not encrypting:
            raise ValueError("tls=…: not one of these URLs has a transport that encrypts")
    live, closed = len(doors), trio.Event()

    async def serve_at(door: Door, each: Listening, task_status: trio.TaskStatus[list[str]]) -> None:
        nonlocal live
        await door.serve(each.handle, task_status=task_status)
        live -= 1
        if not live:
            closed.set()

    async with AsyncExitStack() as stack:
        listening = [await stack.enter_async_context(listening_at(door, each_session)) for door in doors]
        async with background() as nursery:
            urls: list[str] = []
            for door, each in zip(doors, listening, strict=True):
                addresses: list[str] = await nursery.start(serve_at, door, each)
                urls += map(door.url, addresses)
            server = Server(urls, listening, tls, closed, observer)
            yield server
            if not server._closed.is_set():
                await server.shutdown(grace=linger)


def _shared_out(listeners: Sequence[socket.socket], urls: Sequence[str]) -> list[Sequence[socket.socket]]:
    """Return the sockets of each URL: all of them for one, one each for several."""
    for each in listeners:
        given: object = each  # by programs that no type checker has seen
        if not isinstance(given, socket.socket):
            raise TypeError(f"listeners=…: sockets of the module `socket` are needed, not {given!r}")
    if len(urls) == 1:
        return [listeners]
    if listeners and len(listeners) != len(urls):
        raise ValueError(f"listeners=…: {counted(len(listeners), 'socket')} for {len(urls)} URLs; give one for each")
    return [[each] for each in listeners] or [()] * len(urls)


async def serve(
    handler: SessionHandler | ChannelHandler,
    url: str | Sequence[str],
    *,
    tls: TLS | None = None,
    authorize: Authorize | None = None,
    listeners: Sequence[socket.socket] = (),
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
    **options: Any,
) -> None:
    """Serve until cancelled or shut down: `server = await nursery.start(muxkit.serve, handler, url)`.

    The same as `open_server`, for a nursery that lives longer than a block could.
    """
    async with open_server(
        handler,
        url,
        tls=tls,
        authorize=authorize,
        listeners=listeners,
        limits=limits,
        observer=observer,
        linger=linger,
        **options,
    ) as server:
        task_status.started(server)
        await server.wait_closed()


def run_server(
    handler: SessionHandler | ChannelHandler,
    url: str | Sequence[str],
    *,
    grace: float = GRACE_SECONDS,
    on_started: Callable[[Server], object] | None = None,
    on_ending: Callable[[Server], object] | None = None,
    beside: Callable[[Server], AbstractAsyncContextManager[object]] | None = None,
    tls: TLS | None = None,
    authorize: Authorize | None = None,
    listeners: Sequence[socket.socket] = (),
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> int:
    """Run a server as a whole program, and return its exit code.

    SIGINT or SIGTERM takes no new sessions and lets the live ones end for up to `grace` seconds: then it returns 0. The
    next signal ends them at once: then it returns 1. SIGHUP reads the files of `tls` again. `on_started` is called with
    the server once it listens, `on_ending` when the first signal has come. The block that `beside` returns stands while
    the server runs and while it ends, for an endpoint of metrics for example.
    """
    session_handler(handler)  # a mistake in it is raised here, and not out of Trio's run
    start = partial(
        open_server,
        handler,
        url,
        tls=tls,
        authorize=authorize,
        listeners=listeners,
        limits=limits,
        observer=observer,
        linger=linger,
        **options,
    )
    return trio.run(_run_until_signal, start, grace, on_started, on_ending, beside)


async def _run_until_signal(
    start: Callable[[], AbstractAsyncContextManager[Server]],
    grace: float,
    on_started: Callable[[Server], object] | None,
    on_ending: Callable[[Server], object] | None,
    beside: Callable[[Server], AbstractAsyncContextManager[object]] | None,
) -> int:
    reload = {signal.SIGHUP} if hasattr(signal, "SIGHUP") else set()
    with trio.open_signal_receiver(*SIGNALS, *reload) as signals, trio.CancelScope() as scope:
        async with start() as server, nullcontext() if beside is None else beside(server), background() as nursery:
            for each in server.urls:
                _log.info("listening on %s", each)
            if on_started is not None:
                on_started(server)
            async for number in signals:
                if number in SIGNALS:
                    break
                _reload(server)
            _log.info("ending; %g s for what is left of %s", grace, counted(len(server.sessions()), "session"))
            if on_ending is not None:
                on_ending(server)

            async def abort_at_the_next() -> None:
                async for number in signals:
                    if number in SIGNALS:
                        scope.cancel()

            nursery.start_soon(abort_at_the_next)
            await server.shutdown(grace=grace)
    return ABORTED if scope.cancelled_caught else 0


def _reload(server: Server) -> None:
    try:
        server.reload()
    except ValueError as error:
        _log.error("nothing was read again: %s", error)
    else:
        _log.info("the certificates were read again", extra={"event": "reload"})


def listening_at(door: Door, handler: SessionHandler) -> AbstractAsyncContextManager[Listening]:
    """Open what takes each connection at a URL, so that `handler` is called with each session."""
    return door.listener(handler) or nullcontext(_Connections(door.session_on, handler))


class _Guest:
    """A session with the scope of its handler, as the place of its connection sees it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.scope = trio.CancelScope()
        self.refused: Refused | None = None
        """Why the session had to give way."""

    def activity(self) -> int | None:
        stats = self._session.stats()
        return None if stats.channels else stats.messages_received + stats.messages_sent

    def send_away(self, refused: Refused) -> None:
        self.refused = refused
        self.scope.cancel()


class _Connections:
    """Serves a protocol whose sessions end with their connections."""

    def __init__(
        self,
        session_on: Callable[[Link, Literal["server"]], AbstractAsyncContextManager[Session]],
        handler: Callable[[Session], Awaitable[object]],
    ) -> None:
        self._session_on = session_on
        self._handler = handler
        self._sessions: dict[Session, None] = {}
        self._draining = False
        self._ended = trio.lowlevel.ParkingLot()

    @property
    def sessions(self) -> Collection[Session]:
        return [*self._sessions]

    async def handle(self, link: Link, /, *, refused: Refused | None = None) -> None:
        session: Session | None = None
        place = current_place()
        if place is not None and refused is None:
            place.await_word()
        try:
            async with self._session_on(link, "server") as session:
                if refused is not None:
                    # A client is told within what it allows to be sent, which it says at the begin.
                    with trio.move_on_after(REFUSAL_SECONDS):
                        async for _ in session.incoming():
                            break
                    raise refused  # the session tells its peer why it ends
                if not self._draining:
                    self._sessions[session] = None
                    guest = _Guest(session)
                    with nullcontext() if place is None else place.occupy(guest), guest.scope:
                        await run_handler(self._handler, session)
                    if guest.refused is not None:
                        raise (refused := guest.refused)
        except Exception as error:
            if is_loss(error) or error is refused:
                _log.debug("session lost: %s", error)
            elif isinstance(error, Refused):
                if may_log("clients that were sent away"):
                    _log.info("a client was sent away: %s", printable(str(error)))
            else:
                log_failure("the handler of a session failed, the session was closed", error, {"peer": peer_of(link)})
        finally:
            # After it has taken leave: what its handler sent last may still be on its way.
            if session is not None:
                self._sessions.pop(session, None)
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


protect_package(__name__)

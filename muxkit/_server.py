"""Servers: `open_server` for a block, `serve` for a nursery, and `run_server` for a whole program.

All three listen at URLs and call the program's handler with each session or channel.
"""

from __future__ import annotations

import gc
import logging
import signal
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import Literal, Unpack

import trio

from muxkit._door import LINGER_SECONDS, Door
from muxkit._errors import Refused
from muxkit._handlers import ChannelHandler, SessionHandler, is_loss, session_handler, takes_requests
from muxkit._observer import Observer
from muxkit._options import ServeOptions
from muxkit._plugins import split_url
from muxkit._redirect import MAX_URL, moved_to, redirect_for
from muxkit._tls import TLS
from muxkit.core import Reason, counted, printable, without_secrets
from muxkit.runtime import (
    LOSSES,
    Channel,
    Link,
    LinkLost,
    Listening,
    Session,
    Unsupported,
    background,
    bare_nursery,
    current_place,
    home_thread,
    log_failure,
    may_log,
    peer_of,
    protect_package,
    protected_manager,
    run_handler,
)

GRACE_SECONDS = 30.0  # default of `run_server(grace=)`
REFUSAL_SECONDS = 1.0  # maximum time for sending a client the reason for its refusal
SIGNALS = (signal.SIGINT, signal.SIGTERM)
ABORTED = 1  # the exit code after a second signal
# Number of new objects after which Python's garbage collector starts, by default. It is 2,000 since Python 3.13.
DEFAULT_THRESHOLDS = (700, 2000)
MIN_NEW_OBJECTS = 50_000  # the same number while `run_server` runs; such objects take about 5 MB

_log = logging.getLogger("muxkit")


class Server:
    """A running server."""

    def __init__(
        self,
        urls: Sequence[str],
        listening: Sequence[tuple[str, Listening]],
        tls: TLS | None,
        closed: trio.Event,
        observer: Observer | None = None,
    ) -> None:
        self.urls: tuple[str, ...] = tuple(urls)
        """The URLs for clients, one for each address. A wildcard host such as 0.0.0.0 is left unchanged."""
        self.observer: Observer | None = observer
        """The observer of all sessions, or None."""
        self.is_draining: bool = False
        """True once `shutdown` has been called: the server accepts no new sessions."""
        self._thread = home_thread()
        self._listening = listening
        self._tls = tls
        self._closed = closed

    @property
    def url(self) -> str:
        """The first of `urls`."""
        return self.urls[0]

    def sessions(self) -> Sequence[Session]:
        """Return the live sessions, that is, those whose handlers are running."""
        return [session for _, each in self._listening for session in each.sessions]

    def reload(self) -> None:
        """Reload the files of `tls` for new connections. Open connections keep their certificates.

        Raises:
            ValueError: If a file can't be used, or the server has no `tls`. The old certificates stay in use.
        """
        if self._tls is None:
            raise ValueError("nothing to reload: this server has no tls=")
        self._tls.reload()

    async def shutdown(self, *, grace: float, redirect: str | Sequence[str] | None = None) -> None:
        """Stop accepting sessions and channels, wait for live sessions, then stop serving.

        With `redirect`, each session ends with the code 307 and a reason that names this URL. `muxkit.reconnecting`
        connects there if the client allows it; other clients see an ordinary end. A link of Relink isn't moved: it
        ends, and the client gets a new one at the other server. Links that carry the application's own messages, on
        senders and receivers, have no place for the reason and end without it.

        Args:
            grace: How many seconds live sessions get to finish. The server closes what is still open after that.
            redirect: The URL for clients, or several: the clients of each of `urls` get the one with the same protocol
                and transport, or else the first with the same protocol.

        Raises:
            ValueError: If `redirect` isn't a URL, or none of its protocols is served here.

        If cancelled, the server accepts no new sessions any more, but live sessions continue and it keeps serving.
        """
        self._thread.check()
        redirects = [] if redirect is None else [redirect] if isinstance(redirect, str) else [*redirect]
        served = {url.partition("+")[0] for url in self.urls}
        for url in redirects:
            protocol, _, _ = split_url(url)
            if protocol not in served:
                raise ValueError(f"redirect={without_secrets(url)!r}: expected a URL of {' or '.join(sorted(served))}")
            if len(url) > MAX_URL:
                raise ValueError(f"redirect=…: a URL of {len(url):,} characters; at most {MAX_URL:,} are allowed")
        self.is_draining = True
        async with bare_nursery() as nursery:
            for scheme, each in self._listening:
                target = redirect_for(scheme, redirects)
                reason = None if target is None else moved_to(target)
                nursery.start_soon(partial(each.shutdown, grace=grace, redirect=reason))
        self._closed.set()

    async def wait_closed(self) -> None:
        """Wait until the server was shut down, or can't serve any more, as with a transport for a single connection."""
        self._thread.check()
        await self._closed.wait()

    def __repr__(self) -> str:
        return f"<muxkit.Server {', '.join(self.urls)}: {counted(len(self.sessions()), 'session')}>"


@protected_manager
async def open_server(
    handler: SessionHandler | ChannelHandler, url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AsyncGenerator[Server, None]:
    """Serve at one or several URLs while the block runs.

        async def echo(channel: muxkit.Channel) -> None:
            async for message in channel:
                await channel.send(message)

        async with muxkit.open_server(echo, "bpmux+tcp://127.0.0.1:0") as server:
            print("listening on", server.url)
            await trio.sleep_forever()

    Leaving the block normally stops accepting sessions and gives live ones `linger` seconds to finish. If an error or a
    cancellation leaves the block, they end immediately.

    If a handler raises, its own session or channel ends and the error is logged. Other sessions and channels continue.
    If it raises `Refused`, alone or inside an exception group, nothing is logged and the peer receives the reason.

    Args:
        handler: An async function with one parameter. The server calls it with each channel, and closes the channel
            when it returns. If the parameter is annotated as a `Session`, the server calls it with each session
            instead, and ends the session when it returns. `by_name`, `each_channel` and `each_request` make handlers.
        url: `protocol+transport://address`, or a list of URLs. Port 0 picks a free port.
        **options: The options of `ServeOptions`, such as `tls`, `authorize` and `limits`.

    Returns:
        A context manager whose value is the running `Server`.

    Raises:
        TypeError: If the handler isn't async, doesn't take one argument, or has an unknown annotation. Also if there is
            no option of that name; the error suggests the nearest one.
        ValueError: If a URL or an option is invalid.
        OSError: If an address can't be used.
    """
    each_session = session_handler(handler)
    served = [url] if isinstance(url, str) else url
    if not served:
        raise ValueError("a server needs a URL: expected a URL or a list of URLs, got an empty list")
    tls, listeners = options.get("tls"), options.pop("listeners", ())
    doors = [
        Door(each, {**options, "listeners": given} if given else options, side="server")
        for each, given in zip(served, _shared_out(listeners, served), strict=True)
    ]
    for door in doors:
        if takes_requests(handler) and not getattr(door.protocol, "has_requests", False):
            raise Unsupported(f"this handler takes requests, and {door.protocol_name} has no requests; bpmux has")
    if tls is not None and len(doors) > 1:
        encrypting = [door for door in doors if door.takes_tls()]
        if not encrypting:
            raise ValueError(
                "tls=…: none of these URLs has a transport that encrypts; use one such as tls:// or wss://"
            )
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
                urls += map(door.url_at, addresses)
            accepting = [(door.scheme, each) for door, each in zip(doors, listening, strict=True)]
            server = Server(urls, accepting, tls, closed, options.get("observer"))
            yield server
            if not server._closed.is_set():
                await server.shutdown(grace=options.get("linger", LINGER_SECONDS))


def _shared_out(listeners: Sequence[socket.socket], urls: Sequence[str]) -> list[Sequence[socket.socket]]:
    """Return the sockets for each URL. A single URL gets all sockets, and several URLs get one each."""
    for each in listeners:
        given: object = each  # programs without a type checker may pass anything
        if not isinstance(given, socket.socket):
            raise TypeError(f"listeners=…: expected sockets of the module `socket`, got {given!r}")
    if len(urls) == 1:
        return [listeners]
    if listeners and len(listeners) != len(urls):
        raise ValueError(
            f"listeners=…: expected one socket for each of the {len(urls)} URLs, "
            f"got {counted(len(listeners), 'socket')}"
        )
    return [[each] for each in listeners] or [()] * len(urls)


async def serve(
    handler: SessionHandler | ChannelHandler,
    url: str | Sequence[str],
    *,
    task_status: trio.TaskStatus[Server] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ServeOptions],
) -> None:
    """Serve in a nursery, until cancelled or shut down.

        server = await nursery.start(muxkit.serve, handler, "bpmux+tcp://127.0.0.1:7000")

    Use this instead of `open_server` if the server should outlive a block. The arguments and errors are the same, with
    the options of `ServeOptions`. `nursery.start` returns the `Server` once it listens.
    """
    async with open_server(handler, url, **options) as server:
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
    **options: Unpack[ServeOptions],
) -> int:
    """Run a server as a whole program, and return its exit code.

        if __name__ == "__main__":
            sys.exit(muxkit.run_server(handler, "bpmux+tcp://127.0.0.1:7000", grace=30))

    On SIGINT or SIGTERM the server stops accepting sessions and waits for live ones to finish. A second signal ends
    them immediately. SIGHUP reloads the files of `tls`. This function starts Trio, so call it outside `trio.run`.

    While the server runs, Python's garbage collector starts after 50,000 new objects instead of 700, and skips the
    objects that existed before the server started (`gc.freeze`). That doesn't happen if the program has called
    `gc.set_threshold` or `gc.disable` itself.

    Args:
        handler: As for `open_server`.
        url: As for `open_server`.
        grace: How many seconds live sessions get to finish after the first signal.
        on_started: Called with the server once it listens.
        on_ending: Called with the server after the first signal.
        beside: Returns a context manager that is entered while the server runs and drains, for example
            `muxkit.metrics.endpoint(server, "127.0.0.1:9464")`.
        **options: The options of `ServeOptions`, as for `open_server`.

    Returns:
        0, or 1 if a second signal ended the sessions.
    """
    session_handler(handler)  # raise an error for an invalid handler here, and not inside Trio's run
    start = partial(open_server, handler, url, **options)
    with _collecting_seldom():
        return trio.run(_run_until_signal, start, grace, on_started, on_ending, beside)


@contextmanager
def _collecting_seldom() -> Iterator[None]:
    """Let the garbage collector start less often, unless the program has chosen thresholds of its own.

    Each task that waits for a message keeps some twenty objects alive that the collector counts as new. With 900
    sessions that wait, 700 objects are new in each pass of Trio's loop, although none of them is garbage. The collector
    then starts all the time, and promotes them until it examines the whole heap. With 900 active sessions that took
    40 % of the processor time (198 instead of 123 µs for a message and its echo, both ends), with 3,000 it took 60 %.

    The objects that exist before the server starts, mostly of imported modules, are frozen: the collector doesn't
    examine them. With the modules of a small server that makes each full collection 5 to 10 ms shorter, during which no
    session is served.
    """
    thresholds = gc.get_threshold()
    if not gc.isenabled() or thresholds[0] not in DEFAULT_THRESHOLDS:
        yield
        return
    gc.set_threshold(MIN_NEW_OBJECTS, *thresholds[1:])
    gc.collect()  # or the garbage of now would be frozen as well
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


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
                # log: A server of `run_server` accepts connections at this URL.
                _log.info("listening on %s", each)
            if on_started is not None:
                on_started(server)
            async for number in signals:
                if number in SIGNALS:
                    break
                _reload(server)
            # log: The server received SIGINT or SIGTERM. It accepts no new sessions, and live ones have this long to
            # finish.
            _log.info("shutting down; waiting up to %g s for %s", grace, counted(len(server.sessions()), "session"))
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
        # log: The server received SIGHUP, but a file of `tls` could not be used. The old certificates stay in use.
        _log.error("failed to reload certificates: %s", error)
    else:
        # log: The server received SIGHUP. New connections use the reloaded files of `tls`.
        _log.info("reloaded certificates", extra={"event": "reload"})


def listening_at(door: Door, handler: SessionHandler) -> AbstractAsyncContextManager[Listening]:
    """Return a context manager whose value serves the connections at a URL, and calls `handler` with each session."""
    return door.listener(handler) or nullcontext(_Connections(door.session_on, handler))


def _refused_for(reason: Reason) -> Refused:
    """Return a new error for each session, because sessions that raise the same one would share its traceback."""
    return Refused(reason.text, code=reason.code)


class _Guest:
    """A session and the cancel scope of its handler. It is the occupant of a `Place` (`muxkit.runtime.admission`)."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.scope = trio.CancelScope()
        self.refused: Refused | None = None
        """The reason, once the session has had to give way or was redirected."""

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
        self._sessions: dict[Session, _Guest] = {}
        self._redirect: Reason | None = None
        self._deadline = 0.0  # when the shutdown must be finished
        self._draining = False
        self._ended = trio.lowlevel.ParkingLot()

    @property
    def sessions(self) -> Collection[Session]:
        return [*self._sessions]

    async def handle(self, link: Link, /, *, refused: Refused | None = None) -> None:
        session: Session | None = None
        if refused is None and self._redirect is not None:
            refused = _refused_for(self._redirect)
        place = current_place()
        if place is not None and refused is None:
            place.await_word()
        try:
            async with self._session_on(link, "server") as session:
                if refused is not None:
                    # The client gets the reason only if it has granted credit, which it does at the beginning. So
                    # wait until something has arrived.
                    with trio.move_on_after(REFUSAL_SECONDS):
                        async for _ in session.incoming():
                            break
                    raise refused  # the session sends the reason to the peer
                if not self._draining:
                    guest = self._sessions[session] = _Guest(session)
                    with nullcontext() if place is None else place.occupy(guest), guest.scope:
                        await run_handler(self._handler, session)
                    if guest.refused is None and self._redirect is not None:
                        await self._finish(session)
                        guest.refused = _refused_for(self._redirect)
                    if guest.refused is not None:
                        raise (refused := guest.refused)
        except Exception as error:
            if is_loss(error) or error is refused:
                _log.debug("session lost: %s", error)
            elif isinstance(error, Refused):
                if may_log("clients that were sent away"):
                    # log: A handler raised `Refused` for a whole session. The client receives the reason.
                    _log.info("a client was sent away: %s", printable(str(error)))
            else:
                # log: Your handler raised an error, and the line says where. The other sessions continue.
                log_failure("the handler of a session failed, the session was closed", error, {"peer": peer_of(link)})
        finally:
            # Remove the session only now, after its block has ended, because `shutdown` waits for its last messages.
            if session is not None:
                self._sessions.pop(session, None)
            self._ended.unpark_all()

    async def shutdown(self, *, grace: float, redirect: Reason | None = None) -> None:
        self._draining, self._redirect = True, redirect
        self._deadline = trio.current_time() + grace
        with trio.move_on_after(grace):
            async with bare_nursery() as nursery:
                for session in [*self._sessions]:
                    nursery.start_soon(self._drain, session, grace)
            while self._sessions:
                await self._ended.park()
        if redirect is not None:
            for guest in self._sessions.values():
                guest.send_away(_refused_for(redirect))
            with trio.move_on_after(REFUSAL_SECONDS):  # a session sends its reason before it is closed
                while self._sessions:
                    await self._ended.park()

    async def _finish(self, session: Session) -> None:
        """Finish the channels of a session whose handler has returned, as leaving the session does.

        The redirect then ends the session immediately, so everything must have arrived before.
        """
        with trio.move_on_after(max(0.0, min(LINGER_SECONDS, self._deadline - trio.current_time()))):
            async with bare_nursery() as nursery:
                for channel in session.channels():
                    nursery.start_soon(self._close, channel)
            with suppress(LinkLost):
                await session.shutdown(grace=LINGER_SECONDS)

    async def _close(self, channel: Channel) -> None:
        with suppress(*LOSSES):
            await channel.aclose()

    async def _drain(self, session: Session, grace: float) -> None:
        with suppress(LinkLost):  # then the session is over as well
            await session.shutdown(grace=grace)


protect_package(__name__)

"""`muxkit.reconnecting`, which opens one session after another with the same server.

`_Sessions` is the loop with its pauses, and `_Opener` connects. It also follows redirects of a server. Each session
runs in a task of its own (`_Kept`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Unpack

import trio

from muxkit._door import client_doors, session_with
from muxkit._observer import tell
from muxkit._options import OF_RECONNECTING, ReconnectOptions
from muxkit._plugins import PROTOCOLS, SUFFIX, PluginError, load
from muxkit._racing import SessionAttempt
from muxkit._redirect import RedirectPolicy, check_hosts, redirected_by
from muxkit.core import printable, without_secrets
from muxkit.runtime import (
    Backoff,
    LinkLost,
    OutageLog,
    Session,
    background,
    called,
    can_heal,
    protect_package,
    protected_manager,
)

_log = logging.getLogger("muxkit")

MAX_MOVES = 5  # redirects in a row that are followed without a pause, so that two servers can't keep a client busy


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Session]]:
    """Open one session after another with the server at `url`.

        async with muxkit.reconnecting(url) as sessions:
            async for session in sessions:
                try:
                    ...
                except muxkit.LinkLost:
                    continue

    Each pass of the loop closes the last session and opens the next one. The first attempt is immediate, unless the
    last session was lost within a second. Before further attempts the loop pauses. An error that the body doesn't catch
    ends the loop, even if it is `LinkLost`.

    Leaving the block normally closes the current session like leaving `connect` does. If an error or a cancellation
    leaves the block, the connection is closed and the channels are lost.

    The first failure is logged as a WARNING, and another one each time that the outage has doubled in length.

    Relink reconnects by itself, and gets the options `backoff`, `patience` and `on_failed` too. Its session exists
    before its first connection. With `patience`, the loop waits for that connection.

    With a list of URLs, each attempt races them, as `connect` does.

    Args:
        url: The server's URL, or a list of URLs.
        **options: The options of `ReconnectOptions`: those of `connect`, and `backoff`,
            `patience`, `redirects` and `on_failed`.

    Raises:
        OSError, LinkLost: If there was no session for `patience` seconds. This is the error of the last attempt.
        HandshakeFailed, Refused, PluginError, ValueError: If another attempt would fail too, because the server rejects
            the certificate or the token, doesn't have the path, or speaks another protocol. The loop raises this even
            if the body has caught it.
    """
    given: dict[str, Any] = dict(options)
    ours = {name: given.pop(name, None) for name in OF_RECONNECTING}
    redirects = options.get("redirects", ())
    urls = [url] if isinstance(url, str) else url
    check_hosts(redirects)
    theirs: set[str] = set()
    for each in urls:
        with suppress(PluginError):  # the first attempt raises it
            theirs |= getattr(load(PROTOCOLS, each.partition("+")[0]), "options", frozenset[str]())
    given |= {name: value for name, value in ours.items() if value is not None and name in theirs}
    opener = _Opener(tuple(urls), given, RedirectPolicy(tuple(urls), redirects))
    return called("reconnecting", _sessions_of(opener, options))


@protected_manager
async def _sessions_of(opener: _Opener, options: ReconnectOptions) -> AsyncGenerator[AsyncIterator[Session], None]:
    """Run the sessions of `reconnecting` while the block runs."""
    async with background() as nursery:
        sessions = _Sessions(opener, options, nursery)
        try:
            yield sessions
        finally:
            sessions.is_closed = True
        await sessions.leave()  # without an error: otherwise the nursery cuts the session


class _Opener:
    """Opens sessions at the client's URLs, or at the one to which a server has redirected it."""

    def __init__(self, urls: tuple[str, ...], options: Mapping[str, Any], policy: RedirectPolicy) -> None:
        self.shown: str = ", ".join(map(without_secrets, urls))
        self._urls = urls
        self._options = options
        self._policy = policy
        self._target: str | None = None
        self._learnt: Mapping[str, Any] = {}  # options of the next session, which follow from the last one

    @property
    def is_redirected(self) -> bool:
        return self._target is not None

    def open(self) -> AbstractAsyncContextManager[Session]:
        """Return a block that connects."""
        if self._target is None:
            urls = self._urls if len(self._urls) != 1 else self._urls[0]
            return session_with(urls, {**self._options, **self._learnt}, own=OF_RECONNECTING)
        # The client's own URL may look its servers up in the DNS, and the URL of the redirect may not: then the option
        # `resolver=` isn't known there.
        given = {name: value for name, value in self._options.items() if name != "resolver" or SUFFIX in self._target}
        return _answered_session(self._target, given)

    def learn(self, session: Session) -> None:
        """Ask the protocol for options of the next session, such as bpmux's first credit, which this one knows."""
        if len(self._urls) == 1 and self._target is None:
            plugin = load(PROTOCOLS, self._urls[0].partition("+")[0])
            learn: Callable[[Session], Mapping[str, Any]] | None = getattr(plugin, "options_of_next", None)
            self._learnt = {} if learn is None else learn(session)

    def follow(self, error: Exception | None) -> bool:
        """Return True if the error is a redirect that the client may follow. The next session is opened there."""
        url = redirected_by(error)
        if url is None:
            return False
        shown = printable(without_secrets(url))
        objection = self._policy.objection(url)
        if objection is not None:
            # log: A server has named another URL for its clients, and this client doesn't go there. The line says why.
            _log.warning("%s: ignoring the redirect to %s: %s", self.shown, shown, printable(objection))
            return False
        # log: A server has named another URL for its clients, and this client goes there.
        _log.info("%s: following the redirect to %s", self.shown, shown)
        self._target = url
        return True

    def return_home(self, error: Exception) -> None:
        """Forget the redirect, because no session could be opened there."""
        # log: The URL to which a server redirected this client doesn't work. It connects to its own URLs again.
        _log.warning("%s: returning from a redirect: %s", self.shown, error)
        self._target = None


@protected_manager
async def _answered_session(url: str, options: Mapping[str, Any]) -> AsyncGenerator[Session, None]:
    """Connect to the URL of a redirect, and wait until the server there has answered.

    A session of Relink exists before its connection and dials forever. Without the answer it would keep the client at a
    server that doesn't exist.
    """
    [door] = client_doors(url, options, own=OF_RECONNECTING)
    async with SessionAttempt(door).open() as session:
        yield session


class _Sessions(AsyncIterator[Session]):
    """The sessions of a block of `reconnecting`, each of which runs in a task of the block.

    A session needs a task that enters and leaves its block, because the program may enter and leave cancel scopes
    between two steps of its loop, and Trio's scopes must be nested within one task.
    """

    def __init__(self, opener: _Opener, options: ReconnectOptions, nursery: trio.Nursery) -> None:
        self.is_closed: bool = False
        self._opener = opener
        self._url = opener.shown
        self._nursery = nursery
        self._observer = options.get("observer")
        self._is_first = True
        self._policy = options.get("backoff") or Backoff()
        self._patience = options.get("patience")
        self._outage = OutageLog(self._url, patience=self._patience)
        self._on_failed = options.get("on_failed") or self._outage.failed
        self._failures = 0
        self._moves = 0  # redirects in a row without a session that lived
        self._lost_at = 0.0
        self._began = 0.0
        self._kept: _Kept | None = None

    async def leave(self) -> None:
        """Close the current session in order, if there is one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            await kept.end()

    async def __anext__(self) -> Session:
        if self.is_closed:
            raise trio.ClosedResourceError("the block of these sessions was left")
        policy = self._policy
        failure: Exception | None = None
        if self._kept is None:
            self._lost_at = trio.current_time()
        else:
            await self._kept.end()
            self._lost_at = trio.current_time()
            lived = self._lost_at - self._began
            self._opener.learn(self._kept.session)
            lost, self._kept = self._kept.lost, None
            moved = self._opener.follow(lost)
            if lost is not None and not can_heal(lost):
                raise lost
            if lived >= policy.brief:
                self._failures = self._moves = 0
            elif moved and self._moves < MAX_MOVES:
                self._moves += 1
            else:  # pause, in case that the server hangs up on every client
                failure = ConnectionError(f"{self._url}: connection lost after {lived:.2f} s")
        while True:
            if failure is None:
                kept = _Kept(self._opener, connected=self._patience is not None)
                await kept.begin(self._nursery)
                failure = kept.failure
                if failure is None:
                    self._kept = kept
                    self._outage.over()
                    self._began = trio.current_time()
                    if not self._is_first:
                        info = kept.session.info
                        tell(self._observer, "reconnected", self._began - self._lost_at, info.protocol, info.transport)
                    self._is_first = False
                    return kept.session
                if self._opener.follow(failure) and self._moves < MAX_MOVES:
                    self._moves += 1
                    failure = None
                    continue
                if self._opener.is_redirected and redirected_by(failure) is None:
                    self._opener.return_home(failure)
                    failure = None
                    continue
            self._failures += 1
            pause = policy.wait(self._failures)
            ends = None if self._patience is None else self._lost_at + self._patience
            if not can_heal(failure) or (ends is not None and trio.current_time() + pause > ends):
                raise failure
            self._on_failed(failure, pause)
            failure = None
            await trio.sleep(pause)


class _Kept:
    """A session, and the task that enters and leaves its block."""

    def __init__(self, opener: _Opener, *, connected: bool) -> None:
        self._opener = opener
        self._connected = connected
        self._release = trio.Event()
        self._began = trio.Event()
        self._over = trio.Event()
        self._scope = trio.CancelScope()
        self.session: Session
        self.failure: Exception | None = None
        """Why the session couldn't be opened."""
        self.lost: LinkLost | None = None
        """Why the session was lost, if leaving its block raised that."""

    async def begin(self, nursery: trio.Nursery) -> None:
        """Open the session in a task of this nursery. Afterwards, either `session` or `failure` is set."""
        nursery.start_soon(self._run, name=f"session with {self._opener.shown}")
        try:
            await self._began.wait()
        except BaseException:
            self._scope.cancel()
            raise

    async def end(self) -> None:
        """Leave the session in order, and wait until it has ended."""
        self._release.set()
        await self._over.wait()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with self._opener.open() as self.session:
                    # Relink's session exists before its connection. Waiting here makes a missing connection a failure.
                    connected: Callable[[], Awaitable[None]] | None = getattr(self.session, "connected", None)
                    if self._connected and connected is not None:
                        await connected()
                    self._began.set()
                    await self._release.wait()
        except LinkLost as error:
            if self._began.is_set():
                self.lost = error
            else:
                self.failure = error
            _log.debug("session lost: %s", error)
        except Exception as error:
            self.failure = error
        finally:
            self._began.set()
            self._over.set()


protect_package(__name__)

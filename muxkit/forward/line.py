"""What carries forwards to a server: one session, or a `Line`, which is a session that is reopened when it is lost.

`muxkit forward` and the functions `open_local`, `open_remote` and `socks` use it. A line logs each outage twice: a
WARNING when it begins, and an INFO when the server is connected again.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import suppress
from typing import TypeAlias, Unpack

import trio

from muxkit._door import client_doors
from muxkit._errors import Refused
from muxkit._options import OF_RECONNECTING, ReconnectOptions
from muxkit._reconnecting import reconnecting
from muxkit.core import without_secrets
from muxkit.forward.relay import ForwardLimits, Tally, log
from muxkit.forward.wire import Code, Done, ForwardRefused, Request, ask
from muxkit.runtime import (
    Backoff,
    Channel,
    ChannelCancelled,
    ChannelStopped,
    LinkLost,
    OnFailed,
    Session,
    background,
    can_heal,
    protect_package,
    protected_manager,
)

PATIENCE = 30.0  # s that a new connection waits for a session
LONGEST_PAUSE = 5.0  # s between attempts, since connections wait
AGAIN = 0.2  # s until a session that has failed is tried again, if no other one has come
PROBE = "muxkit.forward.probe"  # the name of a channel that the server declines
FIRST_ANSWER = 10.0  # s for the answer to the channel that begins a session
ANSWER_SLACK = 5.0  # s that an answer may take beside the time of the server's connecting

LOST = (LinkLost, ChannelStopped, trio.ClosedResourceError)


class Line:
    """A sequence of sessions with the same server, created by `line`."""

    def __init__(self, url: str | Sequence[str], on_failed: OnFailed | None = None) -> None:
        self._on_failed = on_failed
        urls = [url] if isinstance(url, str) else url
        self.url: str = ", ".join(map(without_secrets, urls))
        """Where it leads, without what may be secret."""
        self._session: Session | None = None
        self._reported: Session | None = None  # the session whose first connection was logged
        self._changed = trio.lowlevel.ParkingLot()
        self._down_since: float | None = None
        self._sessions = 0
        self._users = Tally(most=1)

    @property
    def is_up(self) -> bool:
        """True while there is a session and, as far as the session knows, a connection."""
        return self._session is not None and getattr(self._session, "is_connected", True)

    @property
    def sessions(self) -> int:
        """How many sessions there have been."""
        return self._sessions

    async def session(self) -> Session:
        """Wait for a session. Use `trio.fail_after` for a time limit."""
        while self._session is None:
            await self._changed.park()
        return self._session

    async def other_than(self, failed: Session) -> None:
        """Wait a short time for a session other than this one."""
        with trio.move_on_after(AGAIN):
            while self._session is failed:
                await self._changed.park()
        await trio.lowlevel.checkpoint()

    def enter(self) -> None:
        """Count a connection. A server that shuts down is waited for while there are any."""
        self._users.enter()

    def leave(self) -> None:
        self._users.leave()

    async def run(self, sessions: AsyncIterator[Session]) -> None:
        """Keep a session until cancelled. Raises failures that waiting can't change."""
        async with background() as nursery:
            self._nursery = nursery
            async for session in sessions:
                self._session = session
                self._sessions += 1
                self._changed.unpark_all()
                reason = await self._live(session)
                self._session = None
                self._note_down(reason)

    async def _live(self, session: Session) -> str:
        """Wait for the end of a session, and return its reason."""
        try:
            connected = getattr(session, "connected", None)  # of a session that outlives its connections
            if connected is not None:
                await connected()
            with trio.move_on_after(FIRST_ANSWER) as scope:
                await _until_let_in(session)
            if scope.cancelled_caught:
                return f"the server did not answer within {FIRST_ANSWER:g} s; does it speak {session.info.protocol}?"
            self._note_up()
            self._reported = session
            async for channel in session.incoming():
                channel.abort("this side takes no channels", code=404)
        except LinkLost as error:
            if isinstance(error.__cause__, Refused):
                raise error.__cause__ from None
            if not can_heal(error):
                raise
            return str(error)
        await self._users.wait_idle()  # they may end in order as long as the server waits for them
        return "the server closed the session"

    def failed(self, error: Exception, pause: float) -> None:
        """Record a failed attempt to connect."""
        if self._on_failed is not None:
            self._on_failed(error, pause)
        is_first = self._down_since is None
        self._note_down(str(error) or type(error).__name__)
        # log: An attempt to connect failed. A WARNING has reported the outage before.
        log.debug("%s: %s; trying again in %.1f s", self.url, error, pause)
        # A Relink session redials on its own and lives on, so nothing else would report the end of the outage. One task
        # for each outage is enough. The first connection of a session is reported by `_live`.
        if is_first and self._session is not None and self._session is self._reported:
            self._nursery.start_soon(self._watch, self._session)

    async def _watch(self, session: Session) -> None:
        connected = getattr(session, "connected", None)
        try:
            if connected is not None:
                await connected()
        except LinkLost:
            return
        self._note_up()

    def _note_down(self, reason: str) -> None:
        if self._down_since is None:
            self._down_since = trio.current_time()
            # log: A forward has lost its connection to the server. Logged once for each outage.
            log.warning("no connection to %s: %s; retrying", self.url, reason, extra={"event": "disconnected"})

    def _note_up(self) -> None:
        if self._down_since is not None:
            lasted = trio.current_time() - self._down_since
            self._down_since = None
            # log: The outage has ended.
            log.info("connected to %s after %.1f s", self.url, lasted, extra={"event": "connected"})
        else:
            # log: Forwards are connected to their server.
            log.info("connected to %s", self.url, extra={"event": "connected"})


async def _until_let_in(session: Session) -> None:
    """Wait until the server has accepted this client. Raises `LinkLost` if it refuses the client.

    Some protocols begin before the server has accepted the client, or without a server that speaks them. A ping isn't
    enough, because the engine of a server answers it before the server refuses. Instead we open a channel that the
    server's handler declines. Its answer is the proof, because a server that refuses the client ends the session.
    """
    with suppress(trio.EndOfChannel, ChannelCancelled, ChannelStopped):
        async with session.open(PROBE) as channel:
            try:
                await channel.receive()
            finally:
                channel.abort("only checked whether the server accepts this client")


@protected_manager
async def line(url: str | Sequence[str], **options: Unpack[ReconnectOptions]) -> AsyncGenerator[Line, None]:
    """Keep a session with the server at `url` while the block runs, and reopen it whenever it is lost.

    Entering doesn't wait for the first session. Each outage logs a WARNING to `muxkit.forward`.

    Args:
        url: The server's URL, or a list of URLs.
        **options: The options of `ReconnectOptions`, as for `muxkit.reconnecting`.
            `on_failed` is called in addition to the log.

    Raises:
        ValueError: If plaintext may not be sent to this URL.
        LinkLost, OSError: If there was no session for `patience` seconds. The block is cancelled.
        HandshakeFailed, Refused: If connecting fails in a way that waiting can't change. The block is cancelled.
    """
    for door in client_doors(url, {name: value for name, value in options.items() if name not in OF_RECONNECTING}):
        await door.check_client()
    kept = Line(url, options.get("on_failed"))
    options["backoff"] = options.get("backoff") or Backoff(most=LONGEST_PAUSE)
    options["on_failed"] = kept.failed
    async with reconnecting(url, **options) as sessions, background() as nursery:
        nursery.start_soon(kept.run, sessions)
        yield kept


Carrier: TypeAlias = Session | Line
"""What forwards go over."""


async def request(
    carrier: Carrier, wanted: Request, *, patience: float, limits: ForwardLimits
) -> tuple[Channel, Done, Session]:
    """Send a request to the server. Over a line, try again on the next session if necessary.

    Raises `ForwardRefused`. Over a single session, it also raises the errors of a lost session.
    """
    if isinstance(carrier, Session):
        return *await ask(carrier, wanted), carrier
    with trio.move_on_after(patience) as scope:
        while True:
            session = await carrier.session()
            if carrier.is_up:
                answered = trio.current_time() + limits.connect + ANSWER_SLACK
                scope.deadline = max(scope.deadline, answered)
            try:
                return *await ask(session, wanted), session
            except LOST:
                await carrier.other_than(session)
    raise ForwardRefused(f"no connection to {carrier.url} within {patience:g} s", Code.UNREACHABLE)


protect_package(__name__)

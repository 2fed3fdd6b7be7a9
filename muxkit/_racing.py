"""One session from a list of URLs: which URL to try first, and when an attempt counts as a session.

`muxkit.connect` races the URLs of a list with `muxkit.runtime.first_of`. This module adds two rules to it:

- An attempt wins when the server has answered on a complete session, and not when only the connection below it has
  been opened. A proxy may accept TCP for a server that is down, and UDP has no connection at all. The attempt therefore
  sends a ping and waits for its answer.
- The winner is remembered for ten minutes, and tried first by the next call with the same list. After that the list's
  own order applies again, so that a client which has moved to a better network returns to its preferred carrier. (RFC
  6555, section 4.2, recommends to keep such a result for ten minutes.)
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from typing import Final, Literal, Protocol

import attrs
import trio

from muxkit._errors import Refused
from muxkit.core import without_secrets
from muxkit.runtime import (
    Attempt,
    Candidate,
    Link,
    LinkLost,
    Session,
    Unsupported,
    background,
    first_of,
    protect_package,
    protected_manager,
)

REMEMBERED_SECONDS: Final = 600.0
MAX_REMEMBERED: Final = 256  # lists; a program that makes up its lists must not fill the memory


class FirstDial:
    """How the first dial of a protocol that connects again by itself went.

    Such a session, Relink's for example, exists before its connection, and keeps dialling a server that is absent. In a
    race its attempt ends with the first dial that fails.
    """

    def __init__(self) -> None:
        self.failure: Exception | None = None
        self._failed: trio.Event = trio.Event()

    def fail(self, error: Exception) -> None:
        """Record why a dial has failed; the first one counts."""
        if self.failure is None:
            self.failure = error
            self._failed.set()

    async def cancel_if_failed(self, scope: trio.CancelScope) -> None:
        """Wait until a dial fails, then cancel the scope."""
        await self._failed.wait()
        scope.cancel()


class Opener(Protocol):
    """Opens sessions at one URL."""

    @property
    def url(self) -> str:
        """The URL as the caller wrote it."""

    @property
    def first_dial(self) -> FirstDial | None:
        """The first dial of a session that connects again by itself, None for all others."""

    def session_to(self) -> AbstractAsyncContextManager[Session]:
        """Open a session and keep it while the block runs."""


@attrs.frozen
class SessionAttempt:
    """One URL in a race."""

    opener: Opener

    @property
    def name(self) -> str:
        return without_secrets(self.opener.url)

    @protected_manager
    async def open(self) -> AsyncGenerator[Session, None]:
        """Open the session, and wait until the server has answered on it."""
        first_dial = self.opener.first_dial
        async with self.opener.session_to() as session:
            with trio.CancelScope() as scope:
                async with background() as nursery:
                    if first_dial is not None:
                        nursery.start_soon(first_dial.cancel_if_failed, scope)
                    await answered(session)
            if first_dial is not None and first_dial.failure is not None:
                raise first_dial.failure
            yield session


class Dialler(Protocol):
    """Connects to the candidates of one URL."""

    def dial_at(self, candidate: Candidate) -> AbstractAsyncContextManager[Link]:
        """Open a connection, and close it with the block."""

    def session_on(self, link: Link, role: Literal["client", "server"]) -> AbstractAsyncContextManager[Session]:
        """Run a session on a connection."""


@attrs.frozen
class LinkAttempt:
    """A connection to one candidate."""

    dialler: Dialler
    candidate: Candidate

    @property
    def name(self) -> str:
        return without_secrets(self.candidate.address)

    def open(self) -> AbstractAsyncContextManager[Link]:
        return self.dialler.dial_at(self.candidate)


@attrs.frozen
class CandidateAttempt:
    """A session with one candidate of several, which has to answer."""

    dialler: Dialler
    candidate: Candidate

    @property
    def name(self) -> str:
        return without_secrets(self.candidate.address)

    @protected_manager
    async def open(self) -> AsyncGenerator[Session, None]:
        async with self.dialler.dial_at(self.candidate) as link, self.dialler.session_on(link, "client") as session:
            await answered(session)
            yield session


@protected_manager
async def session_at(dialler: Dialler, groups: Sequence[Sequence[Candidate]]) -> AsyncGenerator[Session, None]:
    """Open a session with the first candidate that answers. A single one is trusted to answer, which saves the ping."""
    if sum(map(len, groups)) == 1:
        only = next(candidate for group in groups for candidate in group)
        async with dialler.dial_at(only) as link, dialler.session_on(link, "client") as session:
            yield session
        return
    async with first_of([[CandidateAttempt(dialler, each) for each in group] for group in groups]) as won:
        yield won.value


async def answered(session: Session) -> None:
    """Wait until the server has answered on this session; raises `LinkLost` if it refuses or is gone."""
    with suppress(Unsupported):
        await session.ping()


class Winners:
    """The URL that won for each list of URLs."""

    def __init__(self) -> None:
        self._won: dict[tuple[str, ...], tuple[str, float]] = {}

    def of(self, urls: tuple[str, ...], now: float) -> str | None:
        """Return the URL that won lately, None if there is none or it is too old."""
        url, until = self._won.get(urls, (None, now))
        return url if now < until else None

    def remember(self, urls: tuple[str, ...], url: str, now: float) -> None:
        """Remember a winner. One that only won again keeps its time, or its head start would never end."""
        if self.of(urls, now) == url:
            return
        self._won.pop(urls, None)
        self._won[urls] = (url, now + REMEMBERED_SECONDS)
        if len(self._won) > MAX_REMEMBERED:
            del self._won[next(iter(self._won))]

    def forget(self, urls: tuple[str, ...]) -> None:
        """Forget the winner of this list."""
        self._won.pop(urls, None)

    def clear(self) -> None:
        """Forget all winners."""
        self._won.clear()


winners: Final = Winners()
"""Those of this process. Its times are those of `time.monotonic`, since a process may run Trio more than once."""


@protected_manager
async def first_session(openers: Sequence[Opener], *, stagger: float) -> AsyncGenerator[Session, None]:
    """Race these URLs for a session, and remember the winner."""
    urls = tuple(opener.url for opener in openers)
    preferred = winners.of(urls, time.monotonic())
    attempts: list[Attempt[Session]] = [
        SessionAttempt(opener) for opener in sorted(openers, key=lambda opener: opener.url != preferred)
    ]
    try:
        async with first_of([attempts], stagger=stagger, what="URL") as won:
            assert isinstance(won.attempt, SessionAttempt)  # there are no others
            winners.remember(urls, won.attempt.opener.url, time.monotonic())
            yield won.value
    except (LinkLost, Refused):
        # A server that is going away gets no head start, nor does one that refuses this client after its engine has
        # answered the ping.
        winners.forget(urls)
        raise


protect_package(__name__)

"""One session after another with the same server: each is opened again after the last was lost."""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncGenerator
from typing import Any

import trio

from muxkit._door import LINGER_SECONDS, connect
from muxkit._limits import Limits
from muxkit._observer import Observer
from muxkit._tls import TLS
from muxkit.runtime import Backoff, LinkLost, OutageLog, Session, can_heal, protect_package

_log = logging.getLogger("muxkit")


async def reconnecting(
    url: str,
    *,
    backoff: Backoff | None = None,
    patience: float | None = None,
    tls: TLS | None = None,
    token: str | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LINGER_SECONDS,
    **options: Any,
) -> AsyncGenerator[Session, None]:
    """Iterate over sessions with the server at `url`, each of which is opened when the last one is over.

        async for session in muxkit.reconnecting(url):
            try:
                ...
            except muxkit.LinkLost:
                continue

    Failed attempts are repeated with the pauses of `backoff`; the first failure and each doubling of the outage is one
    WARNING in the log. After `patience` seconds without a session, None for ever, the last failure comes out, and so do
    failures that no later attempt can mend. What the body raises ends the loop, `LinkLost` too if it is not caught. A
    session that is left with the loop is closed without waiting; put `contextlib.aclosing` around to wait for it.
    """
    policy = backoff or Backoff()
    outage = OutageLog(url)
    failures = 0
    lost_at = trio.current_time()
    while True:
        async with _Kept(url, limits=limits, observer=observer, linger=linger, tls=tls, token=token, **options) as kept:
            if kept.failure is None:
                outage.over()
                began = trio.current_time()
                yield kept.session
                lost_at = trio.current_time()
                if lost_at - began >= policy.brief:
                    failures = 0
                    continue
                # A server that hangs up on every client would be dialled without a pause.
                kept.failure = ConnectionError(f"{url}: the session was over {lost_at - began:.2f} s after it began")
        failures += 1
        pause = policy.wait(failures)
        if not can_heal(kept.failure) or (patience is not None and trio.current_time() + pause - lost_at > patience):
            raise kept.failure
        outage.failed(kept.failure, pause)
        await trio.sleep(pause)


class _Kept:
    """A session in a task of its own, so that a loop may be left at any point without harm to the task it runs in."""

    def __init__(self, url: str, **options: Any) -> None:
        self._url = url
        self._options = options
        self._release = trio.Event()
        self._began = trio.Event()
        self._over = trio.Event()
        self._scope = trio.CancelScope()
        self.session: Session
        self.failure: Exception | None = None

    async def __aenter__(self) -> _Kept:
        trio.lowlevel.spawn_system_task(self._run, name=f"session with {self._url}", context=contextvars.copy_context())
        try:
            await self._began.wait()
        except BaseException:
            self._scope.cancel()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._release.set()
        if kind is not None:  # the loop was left, by an error or for good
            self._scope.cancel()
        else:
            await self._over.wait()

    async def _run(self) -> None:
        try:
            with self._scope:
                async with connect(self._url, **self._options) as self.session:
                    self._began.set()
                    await self._release.wait()
        except LinkLost as error:
            if not self._began.is_set():
                self.failure = error
            _log.debug("session lost: %s", error)
        except Exception as error:
            self.failure = error
        finally:
            self._began.set()
            self._over.set()


protect_package(__name__)

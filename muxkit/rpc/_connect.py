"""A client that outlives its connections."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar, Unpack

import trio

from muxkit._options import ReconnectOptions
from muxkit._reconnecting import reconnecting
from muxkit.codecs import DEFAULT_CODEC
from muxkit.rpc._call import Interceptor
from muxkit.rpc._client import client_over
from muxkit.runtime import LinkLost, Session, background, protected_manager

NOT_TAKEN = 405  # the code of a channel that the other side opened and this one doesn't take

ServiceT = TypeVar("ServiceT")


@protected_manager
async def connect(
    service: Callable[..., ServiceT],
    url: str | Sequence[str],
    *,
    codec: str = DEFAULT_CODEC,
    interceptors: Sequence[Interceptor] = (),
    **options: Unpack[ReconnectOptions],
) -> AsyncGenerator[ServiceT, None]:
    """Call a service at a URL, and connect again whenever the connection is lost.

        async with rpc.connect(Orders, url) as orders:
            order = await orders.get(7)

    A call that starts while there is no connection waits for one, until its deadline. A call that was under way when
    the connection was lost is repeated if its method is idempotent, and raises `LinkLost` otherwise.

    Args:
        service: As for `client`.
        url: As for `muxkit.connect`.
        codec: As for `client`.
        interceptors: As for `client`.
        **options: The options of `ReconnectOptions`, such as `backoff` and `tls`.

    If no connection can be made any more, for example because the server refuses the token, the block is cancelled and
    raises that error.
    """
    sessions = _Reconnecting()
    made = client_over(service, sessions, codec, tuple(interceptors))
    try:
        async with background() as nursery:
            nursery.start_soon(sessions.run, url, options)
            yield made
    finally:
        sessions.close()


class _Reconnecting:
    """The present session, and an event for the calls that wait for the next one."""

    def __init__(self) -> None:
        self._session: Session | None = None
        self._changed = trio.Event()
        self._is_closed = False

    async def run(self, url: str | Sequence[str], options: ReconnectOptions) -> None:
        """Connect again and again. Raises failures that another attempt can't change."""
        async with reconnecting(url, **options) as sessions:
            async for session in sessions:
                self._session = session
                self._changed.set()
                try:
                    async for channel in session.incoming():  # ends, or raises, with the session
                        channel.abort("this client takes no channels", code=NOT_TAKEN)
                except LinkLost:
                    pass
                self._session, self._changed = None, trio.Event()

    def close(self) -> None:
        """Fail the calls of tasks outside of the block, which its end doesn't cancel."""
        self._session, self._is_closed = None, True
        self._changed.set()

    async def get(self) -> Session:
        """Return the present session, or wait for the next one.

        Raises:
            trio.ClosedResourceError: If the block of the client was left. Tasks outside of it may still make calls.
        """
        while self._session is None:
            if self._is_closed:
                raise trio.ClosedResourceError("the block of this client was left")
            await self._changed.wait()
        return self._session

    @property
    def only(self) -> None:
        return None

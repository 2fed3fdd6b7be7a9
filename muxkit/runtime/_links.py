"""What carries a connection? A byte stream is `trio.abc.Stream` as it is; this adds one optional fast path."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from muxkit._limits import Limits
    from muxkit._observer import Observer
    from muxkit.runtime._session import Session

ByteLink = trio.abc.Stream


@runtime_checkable
class NowaitLink(Protocol):
    """A byte stream that can also write at once, without a checkpoint.

    The pump uses it when nothing is queued, and hands what the kernel did not take to its writer. It is never
    called while `send_all` runs.
    """

    def send_nowait(self, buffers: Sequence[bytes | memoryview]) -> int:
        """Write what fits now, in order; give the number of bytes taken (0 when the kernel is full).

        Raises `trio.BrokenResourceError` when the connection is gone, `trio.ClosedResourceError` when it was
        closed on our side.
        """

    async def send_buffers(self, buffers: Sequence[bytes | memoryview]) -> None:
        """`send_all` for several buffers, without joining them first."""


@runtime_checkable
class Described(Protocol):
    """A link that knows who is at its ends; the text goes into errors and `session.info`."""

    @property
    def peer(self) -> str:
        """The other end, for people: `tcp 127.0.0.1:7000`."""


class Transport(Protocol):
    """What an adapter offers to `muxkit.connect` and `muxkit.serve`, as an entry point of `muxkit.transports`.

    An address is what stands behind `://` in a URL. Options are the adapter's own, by keyword, and each adapter
    types them; so these are the shapes, as attributes, since a method would have to name all options:

        def connect(self, address: str, **options) -> AbstractAsyncContextManager[trio.abc.Stream]
        async def serve(self, handler: Callable[[trio.abc.Stream], Awaitable[None]], address: str, *,
                        limits: Limits, task_status: trio.TaskStatus[list[str]], **options) -> None

    `connect` gives one connection, closed with its block. `serve` listens until it is cancelled, and starts with
    the addresses that clients can use.
    """

    @property
    def connect(self) -> Callable[..., AbstractAsyncContextManager[trio.abc.Stream]]: ...

    @property
    def serve(self) -> Callable[..., Awaitable[None]]: ...


class ProtocolPlugin(Protocol):
    """What a protocol offers to `muxkit.connect` and `muxkit.serve`, as an entry point of `muxkit.protocols`."""

    options: frozenset[str]
    """The keyword options that are the protocol's; all others go to the transport."""

    def session(
        self,
        stream: trio.abc.Stream,
        *,
        role: Literal["client", "server"],
        address: str,
        limits: Limits,
        observer: Observer | None,
        linger: float,
        **options: Any,
    ) -> AbstractAsyncContextManager[Session]:
        """A session over a new connection, which it closes at its end."""

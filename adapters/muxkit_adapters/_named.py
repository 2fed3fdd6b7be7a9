"""Listeners that are found by a name inside the process, for the transports `mem` and `asgi`.

The names belong to one Trio run. They are released when their server ends.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, Generic, TypeVar

import trio

BACKLOG: Final = 128  # streams that a listener hasn't accepted yet; further clients wait

StreamT = TypeVar("StreamT", bound=trio.abc.Stream)
ListenerT = TypeVar("ListenerT", bound="NamedListener[Any]")


class NamedListener(trio.abc.Listener[StreamT]):
    """Accepts the streams that other tasks put into `arrivals`."""

    def __init__(self) -> None:
        self.arrivals, self._accepted = trio.open_memory_channel[StreamT](BACKLOG)

    async def accept(self) -> StreamT:
        return await self._accepted.receive()

    async def aclose(self) -> None:
        """Close the streams in the backlog. Tasks that wait to add one get `trio.BrokenResourceError`."""
        while True:
            try:
                await trio.aclose_forcefully(self._accepted.receive_nowait())
            except (trio.WouldBlock, trio.EndOfChannel, trio.ClosedResourceError):
                break
        await self._accepted.aclose()


class Names(Generic[ListenerT]):
    """The names at which a transport serves. Every `trio.run` has its own, because streams can't cross runs."""

    def __init__(self, scheme: str) -> None:
        self._scheme = scheme
        self._listeners: trio.lowlevel.RunVar[dict[str, ListenerT]] = trio.lowlevel.RunVar(f"muxkit {scheme} listeners")

    def find(self, name: str) -> ListenerT | None:
        """Return the listener of this name, or None."""
        return self._table().get(name)

    @contextmanager
    def taken(self, name: str, listener: ListenerT) -> Iterator[None]:
        """Give a listener a name inside the block. Raises OSError if the name is taken."""
        self.read(name)
        if name in self._table():
            raise OSError(errno.EADDRINUSE, f"{self._scheme} {name}: this name is served already")
        self._table()[name] = listener
        try:
            yield
        finally:
            del self._table()[name]

    def read(self, address: str) -> dict[str, object]:
        """Parse the address of a URL for `Transport`. Raises ValueError if it is empty."""
        if not address:
            raise ValueError(f"address '': expected a name, such as {self._scheme}://orders")
        return {"name": address}

    def _table(self) -> dict[str, ListenerT]:
        try:
            return self._listeners.get()
        except LookupError:
            self._listeners.set({})
            return self._listeners.get()

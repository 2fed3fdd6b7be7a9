"""Where do a server's connections come from? A URL's transport, or sockets that listen already."""

from __future__ import annotations

import errno
import logging
import os
from typing import TYPE_CHECKING, Any, Final

import trio

from muxkit._plugins import load_transport
from muxkit.protocols.restream.server.log import shown
from muxkit.runtime import background, close_at_once

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from muxkit._limits import Limits

    Listeners = Sequence[trio.abc.Listener[trio.abc.Stream]]
    Handler = Callable[[trio.abc.Stream], Awaitable[None]]
    Started = Callable[[list[str]], None]

PROTOCOL: Final = "restream"
FORM: Final = "restream+transport://address, such as restream+tcp://127.0.0.1:7000"

OUT_OF_DESCRIPTORS: Final = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}
BACK_OFF: Final = 0.1  # s

_log = logging.getLogger("muxkit")


async def listen_at(url: str, handler: Handler, *, limits: Limits, started: Started, options: dict[str, Any]) -> None:
    """Run `handler` for each connection to `url`, until cancelled."""
    scheme, separator, address = url.partition("://")
    protocol, _, name = scheme.partition("+")
    if not separator or protocol != PROTOCOL or not name:
        raise ValueError(f"{url!r} is no URL of the form {FORM}")
    transport = load_transport(name, PROTOCOL)
    status = _Started(lambda addresses: started([f"{scheme}://{each}" for each in addresses]))
    await transport.serve(handler, address, limits=limits, task_status=status, **options)


async def listen_on(listeners: Listeners, handler: Handler, *, limits: Limits, started: Started) -> None:
    """The same on sockets that listen already; they are closed at the end."""
    room = trio.Semaphore(limits.connections)
    try:
        async with background() as nursery:
            for listener in listeners:
                nursery.start_soon(_accept, listener, handler, room, nursery)
            started([_url(listener) for listener in listeners])
            await trio.sleep_forever()
    finally:
        for listener in listeners:
            await close_at_once(listener)


async def _accept(
    listener: trio.abc.Listener[trio.abc.Stream], handler: Handler, room: trio.Semaphore, nursery: trio.Nursery
) -> None:
    while True:
        await room.acquire()  # more wait in the kernel's backlog
        try:
            stream = await listener.accept()
        except OSError as error:
            room.release()
            if error.errno not in OUT_OF_DESCRIPTORS:
                raise
            _log.warning("accept: %s; trying again in %g s", os.strerror(error.errno), BACK_OFF)
            await trio.sleep(BACK_OFF)
        else:
            nursery.start_soon(_handle, stream, handler, room)


async def _handle(stream: trio.abc.Stream, handler: Handler, room: trio.Semaphore) -> None:
    try:
        await handler(stream)
    except Exception as error:
        # A message may hold what a peer sent, so it is for debugging only.
        _log.error("a connection's handler failed with %s", type(error).__name__)
        _log.debug("in full", exc_info=error)
    finally:
        room.release()
        await close_at_once(stream)


def _url(listener: trio.abc.Listener[trio.abc.Stream]) -> str:
    if not isinstance(listener, trio.SocketListener):
        return shown(repr(listener))
    name = listener.socket.getsockname()
    if listener.socket.family not in (trio.socket.AF_INET, trio.socket.AF_INET6):
        return f"{PROTOCOL}+unix://{os.fsdecode(name)}"
    host = f"[{name[0]}]" if ":" in name[0] else name[0]
    return f"{PROTOCOL}+tcp://{host}:{name[1]}"


class _Started(trio.TaskStatus[list[str]]):
    def __init__(self, started: Started) -> None:
        self._started = started

    def started(self, value: list[str] | None = None) -> None:
        self._started(value or [])

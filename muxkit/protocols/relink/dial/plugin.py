"""Links on a single connection, which end with it, and the plugin that `muxkit.connect` and `muxkit.serve` load."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import trio

from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit.protocols.relink._session.link import LEAVE_TIMEOUT, Link, living
from muxkit.protocols.relink.dial.connect import link
from muxkit.protocols.relink.dial.handshake import (
    RequestReader,
    answer,
    ask,
    new_epoch,
    new_link_id,
    unknown,
)
from muxkit.protocols.relink.dial.listen import Endpoint, Listener, listener
from muxkit.protocols.relink.dial.urls import config_for, join_endpoint, split_endpoint
from muxkit.protocols.relink.engine.events import Refused
from muxkit.protocols.relink.handshake import mismatch
from muxkit.runtime import HandshakeQueue, LinkLost, close_at_once, protect_package, protected_manager

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator
    from contextlib import AbstractAsyncContextManager

    from muxkit._observer import Observer
    from muxkit.protocols.relink._session.core import Core
    from muxkit.protocols.relink.config import Config
    from muxkit.protocols.relink.dial.listen import LinkHandler


Role = Literal["connector", "listener"]


@protected_manager
async def session(
    stream: trio.abc.Stream,
    *,
    role: Role,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LEAVE_TIMEOUT,
) -> AsyncGenerator[Link, None]:
    """A link on a connected byte stream, which it owns from now on and with which it is lost.

    A listener gives every connector a new link. `link` and `listen` are for links that outlive their connections.
    Raises `LinkLost` if the handshake fails.
    """
    mux = Link(config_for(config), limits or Limits(), observer, is_connector=role == "connector")
    core = mux.core
    try:
        stream, epoch, link_id = await (_ask if role == "connector" else _answer)(stream, core)
    except BaseException:
        await close_at_once(stream)
        raise

    async def run() -> None:
        await mux.run_connection(stream, epoch=epoch, link_id=link_id)
        mux.lose_because_of_last()

    async with living(mux, linger, run):
        while core.pump is None and core.error is None:
            await core.moved.park()
        yield mux


async def _ask(stream: trio.abc.Stream, core: Core) -> tuple[trio.abc.Stream, int, int]:
    try:
        event, stream = await ask(stream, core)
    except (RemoteProtocolError, OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
        by: Literal["peer", "network"] = "peer" if isinstance(error, RemoteProtocolError) else "network"
        raise LinkLost(str(error), by=by) from error
    if isinstance(event, Refused):
        raise AssertionError("no link was asked for, so none can be refused")
    return stream, event.epoch, event.link_id


async def _answer(stream: trio.abc.Stream, core: Core) -> tuple[trio.abc.Stream, int, int]:
    reader = RequestReader(core.limits, core.config.versions)
    try:
        request, stream = await HandshakeQueue(core.limits, most=RequestReader.MOST).read_handshake(stream, reader)
        error = unknown(request) if request.endpoint != core.config.endpoint else mismatch(request, core.config)
        if error is not None:
            raise error
    except RemoteProtocolError as error:
        raise LinkLost(str(error), by="peer") from error
    epoch, link_id = new_epoch(), new_link_id()
    if request.require_link and request.link_id:
        reader.handshake.refuse(epoch)
        await answer(stream, reader, core.limits)
        raise LinkLost("the connector requires a link that is not known here", by="peer")
    reader.handshake.accept(epoch, link_id)
    if not await answer(stream, reader, core.limits):
        raise LinkLost("the connection broke during the handshake", by="network")
    return stream, epoch, link_id


class _Protocol:
    """What `muxkit.connect` and `muxkit.serve` find under the name `relink`.

    `config` is for both; `backoff`, `patience`, `on_failed` and `on_changed` are for clients, as `link` has
    them, `keep` and `identify` for who serves, as `listener` has them.
    """

    options = frozenset({"backoff", "config", "identify", "keep", "on_changed", "on_failed", "patience"})

    def session(
        self,
        stream: trio.abc.Stream,
        /,
        *,
        role: Literal["client", "server"],
        address: str,
        config: Config | None = None,
        **options: Any,
    ) -> AbstractAsyncContextManager[Link]:
        """A link on one connection; a `?endpoint=` in the address names its endpoint."""
        _, endpoint = split_endpoint("ws", address)
        side: Role = "connector" if role == "client" else "listener"
        return session(stream, role=side, config=config_for(config, endpoint), **options)

    def listener(
        self, handler: LinkHandler, *, endpoint: str | None, config: Config | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Listener]:
        """For a door that hands each connection to the `handle` of one listener."""
        settings = config_for(config, endpoint)
        return listener({settings.endpoint: Endpoint(handler, settings)}, **options)

    link = staticmethod(link)  # for a door that gives a function that dials instead of one stream
    split = staticmethod(split_endpoint)
    join = staticmethod(join_endpoint)


protocol = _Protocol()


protect_package("muxkit.protocols.relink")

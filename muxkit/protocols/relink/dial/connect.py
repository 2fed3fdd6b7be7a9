"""Links that dial again after each loss, links on one connection, and the plugin of `connect` and `serve`."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Literal

import attrs
import trio

from muxkit._errors import Refused as NotLetIn
from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit._typed import Connect, OpenServer, Reconnecting
from muxkit.core import Reason, without_secrets
from muxkit.core.events import Failed
from muxkit.protocols.relink._channels import Channel
from muxkit.protocols.relink._connection import Connection, OnChanged, Supply
from muxkit.protocols.relink._session import LEAVE_TIMEOUT, Link
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.dial.listen import (
    Endpoint,
    LinkHandler,
    Listener,
    RequestReader,
    listener,
    named,
    new_epoch,
    new_link_id,
    unknown,
)
from muxkit.protocols.relink.dial.urls import config_for, dial_of, join_endpoint, split_endpoint
from muxkit.protocols.relink.engine import Engine
from muxkit.protocols.relink.events import Agreed, Refused
from muxkit.protocols.relink.handshake import MOST_BYTES, VERSION_SIZE, ConnectorHandshake, mismatch
from muxkit.runtime import (
    Backoff,
    Dial,
    Ended,
    HandshakeFailed,
    HandshakeQueue,
    LinkLost,
    OnFailed,
    Outage,
    OutageLog,
    Side,
    called,
    close_at_once,
    looks_like,
    peer_of,
    prefixed,
    protect_package,
    protected_manager,
    redial,
)
from muxkit.runtime.mux_session import connection_of, running
from muxkit.trace import traced

READ: Final = 64 * 1024  # bytes to ask for; packets may follow the answer at once
SHORT_PAUSE = 0.1  # s; the most between short connections in a row, each of which brought something forward
BROKEN = (trio.BrokenResourceError, trio.ClosedResourceError)


def link(
    where: str | Dial,
    endpoint: str | None = None,
    *,
    config: Config | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LEAVE_TIMEOUT,
    backoff: Backoff | None = None,
    patience: float | None = None,
    on_failed: OnFailed | None = None,
    on_changed: OnChanged | None = None,
    **options: Any,
) -> AbstractAsyncContextManager[Link]:
    """One link to the listener at `where`, over as many connections as it takes.

    `where` is a URL, `relink+tcp://127.0.0.1:7000/jobs`, or a function that dials. Entering does not wait: messages
    may be sent at once, and `Link.connected` waits for a connection. Without one for `patience` seconds (None: however
    long it takes) the link is lost; a certificate that is refused or a listener that breaks the rules ends it at once.

    When the listener no longer has the link, everything that used it raises `LinkChanged`, `on_changed` gets the event,
    and what is opened from then on uses the new link; with `Config(require_link=True)` the link is over instead.

    Leaving the block normally closes all channels, waits until the peer has consumed everything, and shuts the link
    down, all within `linger` seconds; if it cannot be known that nothing was lost, that raises. `on_failed` is told of
    each attempt that failed, and of the seconds until the next; without it the first failure and each doubling of an
    outage is a warning in the log. Other keyword arguments are options of the transport.
    """
    dial, named = dial_of(where, options)
    settings = config_for(config, endpoint, named)
    shown = without_secrets(where) if isinstance(where, str) else ""
    observer = traced(observer, f"client {shown or 'relink'}")
    name = shown or f"relink {settings.endpoint}".strip()
    supply = _Dialling(dial, backoff, on_failed, patience, OutageLog(name, patience=patience))

    def make() -> Link:
        engine = Engine(settings, is_connector=True, limits=limits, observer=frames_of(observer))
        return Link(Connection(engine, supply, observer=observer, on_changed=on_changed))

    return called("link", running(make, linger))


@attrs.define
class _Dialling(Supply):
    """Dials, runs the link on the connection, and dials again."""

    _dial: Dial
    _backoff: Backoff | None
    _on_failed: OnFailed | None
    _patience: float | None
    _log: OutageLog
    _outage: Outage = attrs.field(init=False, factory=Outage)

    def start(self, connection: Connection, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._run, connection)
        if self._patience is not None:
            nursery.start_soon(self._give_up, connection, self._patience)

    @property
    def outage(self) -> Exception | None:
        return self._outage.last

    async def _run(self, connection: Connection) -> None:
        try:
            await redial(
                self._dial,
                partial(self._connect, connection),
                backoff=self._backoff,
                on_failed=self._on_failed or self._log.failed,
                outage=self._outage,
                breath=SHORT_PAUSE,
            )
        except NotLetIn as error:
            said = Reason(error.reason, error.code)
            connection.end_because("the server refused", by="peer", cause=error, said=said)
        except Exception as error:  # whatever dialling raises, tasks that wait for the link raise it
            reason = str(error) or type(error).__name__
            by: Side = "peer" if isinstance(error, (RemoteProtocolError, HandshakeFailed)) else "network"
            connection.end_because(reason, by=by, cause=error)

    async def _connect(self, connection: Connection, stream: trio.abc.Stream) -> Ended | Exception:
        """Ask for the link on a new stream, and run it there; return what came of it."""
        if connection.error is not None:
            return Ended.DONE
        try:
            event, stream = await ask(stream, connection.link)
        except (RemoteProtocolError, OSError, trio.TooSlowError, *BROKEN) as error:
            return error
        if isinstance(event, Refused):
            connection.link.link_lost(trio.current_time(), epoch=event.epoch)
            connection.dispatch_events()
            return Ended.DONE
        self._outage.over()
        self._log.over()
        before, began = connection.progress, trio.current_time()
        await connection.run_on(stream, epoch=event.epoch, link_id=event.link_id)
        if connection.error is not None:
            return Ended.DONE
        if not connection.refusals:
            return Ended.LOST if connection.progress == before else Ended.WORKED
        lived = trio.current_time() - began
        failure = ConnectionError(f"connection lost after {lived:.2f} s: {connection.last_loss()}")
        failure.__cause__ = connection.last_loss()
        return failure

    async def _give_up(self, connection: Connection, patience: float) -> None:
        """Give the link up after `patience` seconds without a connection that works."""
        while True:
            with trio.move_on_after(patience) as scope:
                while not connection.works:
                    await connection.moved.park()
            if scope.cancelled_caught:
                while connection.carrier is not None and not connection.works:
                    await connection.moved.park()  # a moment more for one that has just begun
                if connection.carrier is None:
                    break
            while connection.carrier is not None:
                await connection.moved.park()
        last = self._outage.last
        because = "" if last is None else f": {last}"
        connection.end_because(f"no connection for {patience:g} s{because}", by="network", cause=last)


@attrs.define
class _OneStream(Supply):
    """One connection, with which the link is lost."""

    _stream: trio.abc.Stream
    _epoch: int
    _link_id: int

    def start(self, connection: Connection, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._run, connection)

    async def _run(self, connection: Connection) -> None:
        await connection.run_on(self._stream, epoch=self._epoch, link_id=self._link_id)
        connection.end(connection.last_loss)


async def ask(stream: trio.abc.Stream, engine: Engine) -> tuple[Agreed | Refused, trio.abc.Stream]:
    """Ask a listener for the link that `engine` has, or for a new one.

    Raises `RemoteProtocolError` for an answer that breaks the rules, `HandshakeFailed` when the answer looks like
    another protocol, ConnectionError when the listener hangs up, as it does for an endpoint that it doesn't know,
    TooSlowError, and Trio's errors of a stream that breaks.
    """
    handshake = ConnectorHandshake(
        engine.config, now=trio.current_time(), epoch=engine.epoch, link_id=engine.link_id, limits=engine.limits
    )
    head = b""
    with trio.move_on_after(engine.limits.handshake):
        while True:
            for buffer in handshake.buffers_to_send():
                await stream.send_all(buffer)
            data = await stream.receive_some(READ)
            if not data:
                raise ConnectionResetError(_why_hung_up(stream, engine, head))
            head += data
            handshake.receive_bytes(bytes(data), trio.current_time())
            for event in handshake.events():
                if isinstance(event, (Agreed, Refused)):
                    return event, prefixed(stream, handshake.rest())
                if isinstance(event, Failed):
                    raise named(event.error, head)
            # A foreign server may send less than an answer and then wait, or hang up.
            found = looks_like(head)
            if found not in (None, "Relink"):
                who = f"{peer}: " if (peer := peer_of(stream)) else ""
                raise HandshakeFailed(f"{who}the server doesn't speak Relink: its bytes look like {found}", found=found)
    raise trio.TooSlowError(f"the handshake was not done within {engine.limits.handshake:g} s")


def _why_hung_up(stream: trio.abc.Stream, engine: Engine, head: bytes) -> str:
    """Say what may be wrong when the listener ends the connection, which is all that a listener can say here."""
    who = f"{peer}: " if (peer := peer_of(stream)) else ""
    if len(head) >= VERSION_SIZE:
        endpoint = engine.config.endpoint
        hint = f"; it may not know the endpoint {endpoint!r}, or not in this form, or take no new links"
    else:
        hint = f". {getattr(stream, 'hint_if_silent', None) or 'It may speak another protocol'}"
    return f"{who}the listener hung up during the handshake{hint}"


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
    observer = traced(observer, "client relink" if role == "connector" else "server relink")
    engine = Engine(config_for(config), is_connector=role == "connector", limits=limits, observer=frames_of(observer))
    try:
        stream, epoch, link_id = await (_ask if role == "connector" else _answer)(stream, engine)
    except BaseException:
        await close_at_once(stream)
        raise

    def make() -> Link:
        return Link(Connection(engine, _OneStream(stream, epoch, link_id), observer=observer))

    async with running(make, linger) as mux:
        connection = connection_of(mux)
        while connection.carrier is None and connection.error is None:
            await connection.moved.park()
        yield mux


async def _ask(stream: trio.abc.Stream, engine: Engine) -> tuple[trio.abc.Stream, int, int]:
    try:
        event, stream = await ask(stream, engine)
    except (RemoteProtocolError, OSError, trio.TooSlowError, trio.BrokenResourceError) as error:
        by: Literal["peer", "network"] = "peer" if isinstance(error, RemoteProtocolError) else "network"
        raise LinkLost(str(error), by=by) from error
    if isinstance(event, Refused):
        raise AssertionError("no link was asked for, so none can be refused")
    return stream, event.epoch, event.link_id


async def _answer(stream: trio.abc.Stream, engine: Engine) -> tuple[trio.abc.Stream, int, int]:
    reader = RequestReader(engine.limits, engine.config.versions)
    try:
        request, stream = await HandshakeQueue(engine.limits, most=MOST_BYTES).read_handshake(stream, reader)
        error = unknown(request) if request.endpoint != engine.config.endpoint else mismatch(request, engine.config)
        if error is not None:
            raise error
    except RemoteProtocolError as error:
        raise LinkLost(str(error), by="peer") from error
    epoch, link_id = new_epoch(), new_link_id()
    if request.require_link and request.link_id:
        reader.handshake.refuse(epoch)
        await reader.answer(stream)
        raise LinkLost("the connector requires a link that is not known here", by="peer")
    reader.handshake.accept(epoch, link_id)
    if not await reader.answer(stream):
        raise LinkLost("the connection broke during the handshake", by="network")
    return stream, epoch, link_id


class _Protocol:
    """What `muxkit.connect` and `muxkit.serve` find under the name `relink`.

    `config` is for both; `backoff`, `patience`, `on_failed` and `on_changed` are for clients, as `link` has
    them, `keep` and `identify` for who serves, as `listener` has them.
    """

    options: frozenset[str] = frozenset(
        {"backoff", "config", "identify", "keep", "on_changed", "on_failed", "patience"}
    )

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

    link: Final = staticmethod(link)  # for a door that gives a function that dials instead of one stream
    split: Final = staticmethod(split_endpoint)
    join: Final = staticmethod(join_endpoint)


protocol: _Protocol = _Protocol()
connect: Connect[Link] = Connect("relink")
open_server: OpenServer[Link, Channel] = OpenServer("relink")
reconnecting: Reconnecting[Link] = Reconnecting("relink")

protect_package("muxkit.protocols.relink")

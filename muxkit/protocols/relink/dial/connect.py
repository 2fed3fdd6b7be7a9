"""Links of connectors: `link` dials again after each loss, and `session` runs a link on a single stream.

The module also has the protocol plugin for `muxkit.connect` and `muxkit.serve`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Collection, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, Final, Literal, Unpack

import attrs
import trio

from muxkit import _options
from muxkit._errors import Refused as NotLetIn
from muxkit._errors import RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, frames_of
from muxkit._server import Server
from muxkit._typed import Handler, connect_typed, open_server_typed, reconnecting_typed
from muxkit.core import Reason, without_secrets
from muxkit.core.events import Failed
from muxkit.protocols.relink._channels import Channel
from muxkit.protocols.relink._connection import Connection, OnChanged, Supply
from muxkit.protocols.relink._session import LEAVE_TIMEOUT, Link
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.dial.listen import (
    Endpoint,
    Identify,
    Keep,
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

# How many bytes to read at a time. The first packets may arrive together with the answer to the handshake.
READ: Final = 64 * 1024
# The longest pause in seconds before dialling again, as long as each connection ends soon but makes progress.
SHORT_PAUSE = 0.1
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
    **options: Unpack[_options.DialOptions],
) -> AbstractAsyncContextManager[Link]:
    """Open a link to the listener at `where`. The link dials again whenever its connection is lost.

    Entering the block doesn't wait for a connection. You can send messages immediately, and `Link.connected` waits for
    a connection. The link is lost if it has no connection for `patience` seconds. It is lost immediately if a
    certificate is refused or if the listener breaks a rule.

    If the listener no longer has the link, for example because it was restarted, the link is replaced by a new one. All
    calls on channels of the old link then raise `LinkChanged`. Channels that are opened afterwards use the new link.
    With `Config(require_link=True)` the link ends instead.

    Leaving the block normally closes all channels, waits until the peer has consumed all messages, and shuts the link
    down, all within `linger` seconds. If messages may have been lost, leaving the block raises an error.

    Args:
        where: A URL such as `relink+tcp://127.0.0.1:7000/jobs`, or a function that dials.
        endpoint: The name of the listener's endpoint, if neither the URL nor `config` names it.
        config: The settings, which must match those of the listener's endpoint.
        limits: The limits of the link.
        observer: Receives notifications about the link.
        linger: How many seconds leaving the block may take.
        backoff: How long to wait between attempts to connect.
        patience: How many seconds the link may be without a connection. None means that it never gives up.
        on_failed: Called for each failed attempt, with the error and the seconds until the next attempt. Without it,
            the first failure is logged as a warning, and again each time the outage has become twice as long.
        on_changed: Called with the event when the listener has replaced the link.
        **options: The options of `DialOptions`, for the transport.
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
    """A supply that dials, runs the link on the connection, and dials again when the connection is lost."""

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
        except Exception as error:  # tasks that wait for the link must raise any error that dialling has raised
            reason = str(error) or type(error).__name__
            by: Side = "peer" if isinstance(error, (RemoteProtocolError, HandshakeFailed)) else "network"
            connection.end_because(reason, by=by, cause=error)

    async def _connect(self, connection: Connection, stream: trio.abc.Stream) -> Ended | Exception:
        """Do the handshake on a new stream, and run the link on it. Returns how the connection ended, for `redial`."""
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
        """Give up the link after `patience` seconds without a working connection."""
        while True:
            with trio.move_on_after(patience) as scope:
                while not connection.works:
                    await connection.moved.park()
            if scope.cancelled_caught:
                while connection.carrier is not None and not connection.works:
                    # A connection has just begun. Wait until it works or is lost before giving up.
                    await connection.moved.park()
                if connection.carrier is None:
                    break
            while connection.carrier is not None:
                await connection.moved.park()
        last = self._outage.last
        because = "" if last is None else f": {last}"
        connection.end_because(f"no connection for {patience:g} s{because}", by="network", cause=last)


@attrs.define
class _OneStream(Supply):
    """A supply with a single stream. When the stream is lost, so is the link."""

    _stream: trio.abc.Stream
    _epoch: int
    _link_id: int

    def start(self, connection: Connection, nursery: trio.Nursery) -> None:
        nursery.start_soon(self._run, connection)

    async def _run(self, connection: Connection) -> None:
        await connection.run_on(self._stream, epoch=self._epoch, link_id=self._link_id)
        connection.end(connection.last_loss)


async def ask(stream: trio.abc.Stream, engine: Engine) -> tuple[Agreed | Refused, trio.abc.Stream]:
    """Do the connector's handshake on `stream`, to continue the engine's link or to get a new link.

    Returns the listener's answer, and a stream that begins with the first bytes after the handshake.

    Raises:
        RemoteProtocolError: The listener's answer breaks a rule.
        HandshakeFailed: The listener's answer looks like another protocol.
        ConnectionError: The listener hung up. It does that if it doesn't know the endpoint.
        trio.TooSlowError: The handshake took longer than `Limits.handshake`.
        trio.BrokenResourceError: The stream broke.
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
            # A server of another protocol may send fewer bytes than an answer has, and then wait. So check its bytes
            # for other protocols before the answer is complete.
            found = looks_like(head)
            if found not in (None, "Relink"):
                who = f"{peer}: " if (peer := peer_of(stream)) else ""
                raise HandshakeFailed(f"{who}the server doesn't speak Relink: its bytes look like {found}", found=found)
    raise trio.TooSlowError(f"the handshake was not done within {engine.limits.handshake:g} s")


def _why_hung_up(stream: trio.abc.Stream, engine: Engine, head: bytes) -> str:
    """Describe why the listener may have hung up. A listener can't send a reason during the handshake."""
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
    """Run a link on a connected byte stream. The link owns the stream, and ends when the stream is lost.

    With the role "listener", every connector gets a new link. Use `link` and `listen` for links that outlive their
    connections.

    Raises:
        LinkLost: The handshake failed.
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
    """The protocol plugin that `muxkit.connect` and `muxkit.serve` load under the name `relink`.

    Clients and servers accept the option `config`. Clients also accept `backoff`, `patience`, `on_failed` and
    `on_changed`, which `link` describes. Servers also accept `keep` and `identify`, which `listener` describes.
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
        """Run a link on a single connection. `?endpoint=` in the address names the endpoint."""
        _, endpoint = split_endpoint("ws", address)
        side: Role = "connector" if role == "client" else "listener"
        return session(stream, role=side, config=config_for(config, endpoint), **options)

    def listener(
        self, handler: LinkHandler, *, endpoint: str | None, config: Config | None = None, **options: Any
    ) -> AbstractAsyncContextManager[Listener]:
        """Create the listener to which `muxkit.serve` passes each connection, by calling `Listener.handle`."""
        settings = config_for(config, endpoint)
        return listener({settings.endpoint: Endpoint(handler, settings)}, **options)

    # `muxkit.connect` calls `link` with a function that dials. It uses `session` if it has only a single stream.
    link: Final = staticmethod(link)
    split: Final = staticmethod(split_endpoint)
    join: Final = staticmethod(join_endpoint)


protocol: _Protocol = _Protocol()


class ConnectOptions(_options.ConnectOptions, total=False):
    """Options of a client, for `relink.connect`."""

    config: Config | None
    """The settings of Relink. The server's settings must match."""
    backoff: Backoff | None
    """The pauses between attempts to connect."""
    patience: float | None
    """How many seconds the link may be without a connection. None, the default, means that it never gives up."""
    on_failed: OnFailed | None
    """Called with each failure and the seconds until the next attempt, instead of logging warnings."""
    on_changed: OnChanged | None
    """Called with the event when the server has replaced the link."""


class ReconnectOptions(ConnectOptions, total=False):
    """Options of a client that opens one link after the other, for `relink.reconnecting`."""

    redirects: Collection[str]
    """Hosts to which a server may send this client, as for `muxkit.reconnecting`."""


class ServeOptions(_options.ServeOptions, total=False):
    """Options of a server, for `relink.open_server`."""

    config: Config | None
    """The settings of Relink. The client's settings must match."""
    keep: Keep | None
    """Limits for links without a connection."""
    identify: Identify
    """Returns the authenticated identity of a stream's peer. Only this identity can resume a link."""


def connect(url: str | Sequence[str], **options: Unpack[ConnectOptions]) -> AbstractAsyncContextManager[Link]:
    """Open a link with the server at `url`, as `muxkit.connect` does.

    Args:
        url: A URL such as `relink+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ConnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return connect_typed("relink", Link, url, options)


def open_server(
    handler: Handler[Link, Channel], url: str | Sequence[str], **options: Unpack[ServeOptions]
) -> AbstractAsyncContextManager[Server]:
    """Serve Relink at `url`, or at several URLs, while the block runs, as `muxkit.open_server` does.

    Args:
        handler: An async function that takes the sessions or the channels of Relink.
        url: A URL such as `relink+tcp://127.0.0.1:0` or `tcp://127.0.0.1:0`, or a list of URLs.
        **options: The options of `ServeOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return open_server_typed("relink", handler, url, options)


def reconnecting(
    url: str | Sequence[str], **options: Unpack[ReconnectOptions]
) -> AbstractAsyncContextManager[AsyncIterator[Link]]:
    """Open one link after another with the server at `url`, as `muxkit.reconnecting` does.

    Args:
        url: A URL such as `relink+tcp://127.0.0.1:7000` or `tcp://127.0.0.1:7000`, or a list of URLs.
        **options: The options of `ReconnectOptions`.

    Raises:
        ValueError: If a URL names another protocol.
    """
    return reconnecting_typed("relink", Link, url, options)


protect_package("muxkit.protocols.relink")

"""Listeners: they accept connections, find or create the link for each connection, and run a handler for each link.

A link outlives its connections, so a `Listener` keeps a table of all of its links. A link without a connection is
called absent. `Keep` limits how many absent links a listener keeps, how much memory they take, and for how long.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import math
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Protocol, Unpack, runtime_checkable

import attrs
import trio

from muxkit._errors import Refused, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, for_connection, frames_of
from muxkit._options import ListenOptions, check_link_options
from muxkit._plugins import load_transport
from muxkit._signatures import check_handler
from muxkit.core import QuickCheck, Reason, printable
from muxkit.core.events import Failed
from muxkit.protocols.relink._connection import Connection, Supply
from muxkit.protocols.relink._session import LEAVE_TIMEOUT, Link
from muxkit.protocols.relink.config import Config
from muxkit.protocols.relink.dial.urls import PROTOCOL, config_for, place_of
from muxkit.protocols.relink.engine import Engine
from muxkit.protocols.relink.events import Requested
from muxkit.protocols.relink.handshake import LARGEST_LINK_ID, MOST_BYTES, ListenerHandshake, epoch_of, mismatch
from muxkit.runtime import (
    Adopted,
    Backoff,
    Forgotten,
    HandshakeQueue,
    Identity,
    LinkLost,
    Place,
    Registry,
    background,
    bare_nursery,
    close_at_once,
    current_place,
    log_failure,
    looks_like,
    may_log,
    peer_of,
    protect_package,
    protected_manager,
    run_handler,
)
from muxkit.runtime.mux_session import running
from muxkit.trace import traced

LinkHandler = Callable[[Link], Awaitable[object]]
Identify = Callable[[trio.abc.Stream], bytes | None]


MIB = 1024 * 1024
# How many bytes an absent link counts for `Keep.bytes` in addition to its messages and channels.
LINK_COST = 16 * 1024
# How many bytes each channel of an absent link counts. A link has at least one channel.
CHANNEL_COST = 3 * 1024
# The defaults for `Keep.bytes`: this many bytes for each link, but no less than `LEAST_KEPT` bytes in total.
LINK_KEPT = 64 * 1024
LEAST_KEPT = 64 * MIB

# The delay before a link is resumed for a connector that reconnects again and again without making progress.
RETURNS = Backoff(first=0.1, most=5.0)
FAREWELL_SECONDS = 1.0  # for handlers to end whose links have ended with a redirect

_log = logging.getLogger("muxkit")


# --- the handshake and the identity of the peer


class RequestReader:
    """Reads a connector's request, for `HandshakeQueue.read_handshake`.

    When the request has arrived, the caller decides by calling a method of `handshake`, and then calls `answer`.
    """

    def __init__(self, limits: Limits, versions: tuple[int, ...] = (0,)) -> None:
        self.handshake: ListenerHandshake = ListenerHandshake(now=trio.current_time(), versions=versions, limits=limits)
        self._seconds = limits.handshake

    def receive_bytes(self, data: bytes) -> Requested | None:
        self.handshake.receive_bytes(data, trio.current_time())
        for event in self.handshake.events():
            if isinstance(event, Failed):
                raise named(event.error, data)
            if isinstance(event, Requested):
                return event
        return None

    def bytes_to_send(self) -> bytes:
        return b"".join(self.handshake.buffers_to_send())

    def leftover(self) -> bytes:
        return self.handshake.rest()

    async def answer(self, stream: trio.abc.Stream) -> bool:
        """Write the listener's answer. Returns False if the stream is broken or too slow."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(self._seconds):
            await stream.send_all(self.bytes_to_send())
            return True
        return False


def unknown(request: Requested) -> RemoteProtocolError:
    return RemoteProtocolError(f"there is no endpoint {request.endpoint!r} here", rule="relink-H22")


def named(error: RemoteProtocolError, head: bytes) -> RemoteProtocolError:
    """Add the name of another protocol to the error of a handshake, if the peer's first bytes look like it."""
    found = looks_like(head)
    if found is None:
        return error
    text = f"{error.message}: these bytes look like {found}"
    return RemoteProtocolError(text, rule=error.rule, offset=error.offset, limit=error.limit)


UNIDENTIFIED = b""


@runtime_checkable
class Identified(Protocol, metaclass=QuickCheck):
    """A stream that knows the authenticated identity of its peer.

    For TLS the identity is the peer's certificate. The peer has proved that it owns the certificate's private key.
    """

    @property
    def identity(self) -> Identity | bytes | None: ...


def identity_of(stream: trio.abc.Stream) -> bytes | None:
    """Return the authenticated identity of a stream's peer, or None.

    This is the stream's `identity` if it has this attribute. For a `trio.SSLStream` it is the peer's certificate, if
    the certificate was verified.
    """
    if isinstance(stream, Identified):
        identity = stream.identity
        return identity.certificate if isinstance(identity, Identity) else identity
    # `trio.SSLStream` forwards these two attributes from its `ssl.SSLObject`.
    certificate = getattr(stream, "getpeercert", None)
    context = getattr(stream, "context", None)
    if certificate is None or context is None or context.verify_mode is ssl.CERT_NONE:
        return None
    proved: bytes | None = certificate(binary_form=True)
    return proved


def fingerprint(identity: bytes | None) -> bytes:
    """Hash an identity to a fixed size, because the listener stores the identity of the peer with each link."""
    return UNIDENTIFIED if identity is None else hashlib.sha256(identity).digest()


def new_epoch() -> int:
    return epoch_of(time.time())


def new_link_id() -> int:
    return 1 + secrets.randbelow(LARGEST_LINK_ID)


def is_same(link_id: int, asked: int, owner: bytes, who: bytes) -> bool:
    """Compare the ids and the identities in constant time."""
    same_id = hmac.compare_digest(link_id.to_bytes(8, "little"), asked.to_bytes(8, "little"))
    return hmac.compare_digest(owner, who) and same_id


# --- the table of links


@attrs.frozen
class Endpoint:
    """One service of a listener: the handler that runs for each link, and the settings that connectors must match."""

    handler: LinkHandler
    config: Config = attrs.field(factory=Config)


@attrs.frozen(kw_only=True)
class Keep:
    """Limits for the links that a listener keeps while they have no connection.

    If a limit is exceeded, the listener drops the link that has had no connection for the longest time.

    A failure of the network can end all connections in the same moment. So a listener should be able to keep as many
    links as it has connections. That is the default. With lower limits the listener logs a warning when it starts.
    """

    links: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    """How many links without a connection to keep. None means `Limits.connections`."""
    bytes: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    """How many bytes the links without a connection may take together.

    A link counts 16 KiB, its messages in both directions, and 3 KiB for each channel. None means 64 KiB for each of
    `links`, but at least 64 MiB.
    """
    age: float = attrs.field(default=300.0, validator=attrs.validators.ge(0.0))
    """How many seconds to keep a link without a connection."""

    def bounds(self, limits: Limits) -> tuple[int, int]:
        """Return the limits for links and bytes.

        Logs a warning if the limits are too low to keep all links when all connections are lost at the same time.
        """
        links = limits.connections if self.links is None else self.links
        size = max(LEAST_KEPT, links * LINK_KEPT) if self.bytes is None else self.bytes
        least = limits.connections * (LINK_COST + CHANNEL_COST)
        if 0 < links < limits.connections:
            # log: The listener starts, but it carries more links than it may keep without connections. Raise
            # `Keep.links`, or lower `Limits.connections`.
            _log.warning(
                "Keep(links=%d) is below Limits(connections=%d): links are lost if all connections are lost at once",
                links,
                limits.connections,
            )
        elif 0 < size < least and links:
            # log: The same for the bytes of links without connections: 19 KiB for each link is the least.
            _log.warning(
                "Keep(bytes=%d) is below %d of Limits(connections=%d): links are lost if all connections are lost "
                "at once",
                size,
                least,
                limits.connections,
            )
        return links, size


@attrs.define(eq=False)
class _Kept:
    """An entry of the listener's table of links."""

    link: Link
    connection: Connection
    link_id: int
    endpoint: str
    owner: bytes
    """The fingerprint of the identity of the peer that created the link."""
    requests: int = 0
    """How many connections have asked to resume the link."""

    def weigh(self) -> int:
        return LINK_COST + self.connection.retained_bytes

    def forgotten(self, why: Forgotten) -> None:
        self.connection.end_because(f"the link was absent: {why.value}", by="local")


@attrs.frozen
class _Arrivals(Supply):
    """The supply of a listener's link. It does nothing to get connections, because the connector makes them.

    It notifies the table of links when the link takes more or less memory.
    """

    _links: Registry[bytes, _Kept]
    _key: bytes

    def weight_changed(self) -> None:
        self._links.reweigh(self._key)


@attrs.frozen
class _Guest:
    """The occupant of a connection's place in the listener's admission control.

    If the admission control ends the connection, the link continues as an absent link.
    """

    _link: Link
    _place: Place

    def activity(self) -> int | None:
        stats = self._link.stats()
        return None if stats.channels else stats.messages_received + stats.messages_sent

    def send_away(self, refused: Refused) -> None:
        # Only cancel the connection. Sending the reason would end the link.
        self._place.scope.cancel()


@attrs.define(eq=False, kw_only=True)
class Listener:
    """Finds or creates the link for each connection. Created by `listener`."""

    _endpoints: Mapping[str, Endpoint]
    _links: Registry[bytes, _Kept]
    _nursery: trio.Nursery
    _limits: Limits
    _observer: Observer | None
    _linger: float
    _identify: Identify
    _handshakes: HandshakeQueue
    _secret: bytes = attrs.field(init=False, factory=partial(secrets.token_bytes, 32))
    _serving: dict[Link, Connection] = attrs.field(init=False, factory=dict)
    _ended: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _is_draining: bool = attrs.field(init=False, default=False)
    _redirect: Reason | None = attrs.field(init=False, default=None)
    _deadline: float = attrs.field(init=False, default=math.inf)  # of the shutdown
    epoch: int = attrs.field(init=False, factory=new_epoch)
    """When this listener was created, in microseconds since 1970.

    A connector compares epochs to find out whether it still talks to the same instance of the listener.
    """

    @property
    def links(self) -> int:
        """How many links the listener has, including those without a connection."""
        return len(self._links)

    @property
    def sessions(self) -> Collection[Link]:
        """The links whose handlers are running."""
        return [*self._serving]

    @property
    def absent(self) -> int:
        """How many links have no connection."""
        return self._links.absent

    @property
    def absent_bytes(self) -> int:
        """How many bytes the links without a connection take, as `Keep.bytes` counts them."""
        return self._links.absent_bytes

    async def handle(self, stream: trio.abc.Stream, *, refused: Refused | None = None) -> None:
        """Serve one connection until it ends, and close its stream. Pass this method to any server of streams.

        If `refused` is given, the connector gets a link that ends immediately with this reason.
        """
        try:
            reader = RequestReader(self._limits, self._versions)
            request, rest = await self._handshakes.read_handshake(stream, reader)
            if refused is None:
                await self._admit(rest, reader, request, fingerprint(self._identify(stream)))
            else:
                await self._send_away(rest, reader, request, Reason(refused.reason, refused.code))
        except (RemoteProtocolError, LinkLost) as error:
            level = logging.INFO if isinstance(error, RemoteProtocolError) else logging.DEBUG
            # log INFO, DEBUG: A handshake of Relink was wrong or too slow (INFO), or the peer hung up in it (DEBUG).
            _log.log(level, "a connection was not let in: %s: %s", peer_of(stream) or "a peer", error)
        finally:
            # `close_at_once` doesn't wait, but without the shield a cancellation would leave the stream open.
            with trio.CancelScope(shield=True):
                await close_at_once(stream)

    @property
    def _versions(self) -> tuple[int, ...]:
        return tuple({version for one in self._endpoints.values() for version in one.config.versions})

    async def _admit(self, stream: trio.abc.Stream, reader: RequestReader, request: Requested, who: bytes) -> None:
        endpoint = self._endpoints.get(request.endpoint)
        if endpoint is None:
            raise unknown(request)
        if (error := mismatch(request, endpoint.config)) is not None:
            raise error
        while (key := self._find(request, who)) is not None:
            if await self._resume(stream, reader, key):
                return
        if request.require_link and request.link_id:
            reader.handshake.refuse(self.epoch)
            await reader.answer(stream)
        elif not self._is_draining:
            await self._begin(stream, reader, endpoint, who)
        elif self._redirect is not None:
            await self._send_away(stream, reader, request, self._redirect)

    async def _send_away(
        self, stream: trio.abc.Stream, reader: RequestReader, request: Requested, reason: Reason
    ) -> None:
        """Send the reason of a refusal to a connector, on a new link that exists only for this purpose."""
        if (known := self._endpoints.get(request.endpoint)) is None:
            raise unknown(request)
        if (error := mismatch(request, known.config)) is not None:
            raise error
        link_id = new_link_id()
        reader.handshake.accept(self.epoch, link_id)
        if await reader.answer(stream):
            connection = Connection(Engine(known.config, is_connector=False, limits=self._limits), Supply())
            Link(connection)
            async with background() as nursery:
                nursery.start_soon(partial(connection.run_on, stream, epoch=self.epoch, link_id=link_id))
                await connection.connected()
                connection.lose("the connector was refused", by="local", told=reason)

    def _key(self, link_id: int) -> bytes:
        """Map a link id to a secret key, so that the time of a lookup reveals nothing about the ids in the table."""
        return hashlib.blake2b(link_id.to_bytes(8, "little"), key=self._secret).digest()

    def _find(self, request: Requested, who: bytes) -> bytes | None:
        """Return the key of the requested link, or None if it doesn't exist for this peer and endpoint."""
        if not request.link_id or request.epoch != self.epoch:
            return None
        key = self._key(request.link_id)
        kept = self._links.find(key)
        if kept is None or not is_same(kept.link_id, request.link_id, kept.owner, who):
            return None
        return key if kept.endpoint == request.endpoint else None

    async def _resume(self, stream: trio.abc.Stream, reader: RequestReader, key: bytes) -> bool:
        """Run the link with this key on a new connection.

        Returns False if the link has ended. Then the caller has to look for the link again. If an even newer connection
        asks for the link while this one is delayed, only the newest connection is used.
        """
        is_there = False
        kept = self._links.find(key)
        if kept is not None:
            kept.requests = request = kept.requests + 1
            if (refusals := kept.connection.refusals) > 1:
                await trio.sleep(RETURNS.wait(refusals))
                if kept.requests != request:
                    return True  # the connector has connected again during the sleep
        with suppress(LookupError):  # the link may end while `adopt` waits for its previous connection to end
            async with self._links.adopt(key) as adopted:
                if adopted.session.connection.error is None:
                    # Set this before the first checkpoint, because a newer connection may cancel the block at any time.
                    is_there = True
                    reader.handshake.resume()
                    if await reader.answer(stream):
                        await self._connect(stream, adopted)
                else:
                    adopted.forget()
        return is_there

    async def _begin(self, stream: trio.abc.Stream, reader: RequestReader, endpoint: Endpoint, who: bytes) -> None:
        link_id = new_link_id()
        key = self._key(link_id)
        name = endpoint.config.endpoint or "link"
        observer = traced(for_connection(self._observer, f"server {name}"), f"server {name}")
        engine = Engine(endpoint.config, is_connector=False, limits=self._limits, observer=frames_of(observer))
        connection = Connection(engine, _Arrivals(self._links, key), observer=observer)
        link = Link(connection)
        kept = _Kept(link, connection, link_id, endpoint.config.endpoint, who)
        async with self._links.adopt(key, make=lambda: kept) as adopted:
            reader.handshake.accept(self.epoch, link_id)
            if not await reader.answer(stream):
                adopted.forget()  # the connector hasn't received the id, so it can never resume the link
                return
            self._serving[link] = connection
            self._nursery.start_soon(self._run, link, connection, endpoint, key)
            await self._connect(stream, adopted)

    async def _connect(self, stream: trio.abc.Stream, adopted: Adopted[_Kept]) -> None:
        connection = adopted.session.connection
        if connection.error is None:
            place = current_place()
            with nullcontext() if place is None else place.occupy(_Guest(adopted.session.link, place)):
                await connection.run_on(stream, epoch=self.epoch, link_id=adopted.session.link_id)
        if connection.error is not None:
            adopted.forget()

    # --- links

    async def _run(self, link: Link, connection: Connection, endpoint: Endpoint, key: bytes) -> None:
        moved: Refused | None = None
        try:
            async with running(lambda: link, self._linger):
                await run_handler(endpoint.handler, link)
                if self._redirect is not None and connection.has_goodbye:
                    await connection.finish(max(0.0, min(self._linger, self._deadline - trio.current_time())))
                    raise (moved := Refused(self._redirect.text, code=self._redirect.code))
        except LinkLost as error:
            # log: A link ended while its handler ran.
            _log.debug("link lost: %s", error)
        except Refused as error:
            if error is moved:
                _log.debug("link lost: %s", error)
            elif may_log("clients that were sent away"):
                _log.info("a client was sent away: %s", printable(str(error)))
        except Exception as error:
            # log: Your handler raised; the line says where. The other links go on.
            log_failure("the handler of a link failed, the link was given up", error, {"peer": link.info.peer})
        finally:
            self._links.forget(key)
            self._serving.pop(link, None)
            self._ended.unpark_all()

    async def shutdown(self, *, grace: float, redirect: Reason | None = None) -> None:
        """Refuse new links and channels, and wait up to `grace` seconds for the open ones to end.

        With `redirect`, each link ends with this reason: a link whose handler has returned, after the peer has received
        everything, and the others after `grace` seconds. Connectors that come for a new link, or for one that has
        ended, receive the reason too.

        Relink sends a reason as a message on a new channel, and its shutdown packet promises not to open any more
        channels (section 3.6). So a link that ends with `redirect` sends no shutdown packet. It refuses the channels
        that the peer opens in the meantime. A link that carries the application's own messages has no place for the
        reason, and shuts down as it does without `redirect`.
        """
        self._is_draining, self._redirect = True, redirect
        self._deadline = trio.current_time() + grace
        with trio.move_on_after(grace):
            async with bare_nursery() as nursery:
                for link, connection in self._serving.items():
                    drains = redirect is not None and connection.has_goodbye
                    nursery.start_soon(connection.drain if drains else partial(_shut_down, link), grace)
            while self._serving:
                await self._ended.park()
        if redirect is not None:
            for connection in [*self._serving.values()]:
                connection.lose("the server has moved", by="local", told=redirect)
            with trio.move_on_after(FAREWELL_SECONDS):
                while self._serving:
                    await self._ended.park()


@protected_manager
async def listener(
    endpoints: Mapping[str, Endpoint],
    *,
    keep: Keep | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LEAVE_TIMEOUT,
    identify: Identify = identity_of,
) -> AsyncGenerator[Listener, None]:
    """Create a listener without a transport. Pass its `handle` to any server of streams.

    All links end when the block ends. `identify` returns the authenticated identity of a stream's peer. Only a peer
    with the same identity can resume a link. `keep` limits the links that have no connection.
    """
    named = {
        name: attrs.evolve(endpoint, config=config_for(endpoint.config, name)) for name, endpoint in endpoints.items()
    }
    for endpoint in named.values():
        check_handler(endpoint.handler)
    keep, limits = keep or Keep(), limits or Limits()
    most, most_bytes = keep.bounds(limits)
    links: Registry[bytes, _Kept] = Registry(
        weigh=_Kept.weigh, forgotten=_Kept.forgotten, most=most, most_bytes=most_bytes, most_age=keep.age
    )
    async with background() as nursery:
        nursery.start_soon(links.expire)
        yield Listener(
            endpoints=named,
            links=links,
            nursery=nursery,
            limits=limits,
            observer=observer,
            linger=linger,
            identify=identify,
            handshakes=HandshakeQueue(limits, most=MOST_BYTES),
        )


@attrs.define(eq=False)
class Listening:
    """A running listener with a transport. Created by `listen`."""

    listener: Listener
    urls: tuple[str, ...]
    _scope: trio.CancelScope

    @property
    def url(self) -> str:
        """The URL for connectors, or the first one if there are several.

        It contains the name of the endpoint if the listener has only one endpoint.
        """
        return self.urls[0]

    async def shutdown(self, *, grace: float, redirect: Reason | None = None) -> None:
        """Refuse new links and channels, wait up to `grace` seconds for the open ones to end, and stop listening.

        With `redirect`, links end with this reason, as `Listener.shutdown` describes.
        """
        await self.listener.shutdown(grace=grace, redirect=redirect)
        self._scope.cancel()


async def listen(
    endpoints: LinkHandler | Mapping[str, Endpoint],
    url: str,
    *,
    config: Config | None = None,
    keep: Keep | None = None,
    limits: Limits | None = None,
    observer: Observer | None = None,
    linger: float = LEAVE_TIMEOUT,
    identify: Identify = identity_of,
    task_status: trio.TaskStatus[Listening] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[ListenOptions],
) -> None:
    """Serve links at `url` until cancelled. Start it with `nursery.start`:

        listening = await nursery.start(relink.listen, handler, url)

    A handler is called once for each new `Link`. While it runs, the link may lose its connection and get another one.
    When the handler returns, its link is shut down. If the handler raises an exception, the exception is logged, and
    only this handler's link ends.

    Args:
        endpoints: The services by name. If there is only one service, you can pass its handler instead, and name the
            service in the URL or in `config`.
        url: The URL to listen on, such as `relink+tcp://127.0.0.1:7000/jobs`.
        config: The settings of the service, if `endpoints` is a handler.
        keep: Limits for links without a connection. If a link has to be dropped, its handler's calls raise `LinkLost`.
        limits: The limits of each link.
        observer: Receives notifications about all links.
        linger: How many seconds the shutdown of a link may take.
        identify: Returns the authenticated identity of a stream's peer. Only this identity can resume a link.
        task_status: Reports the `Listening` when the listener accepts connections.
        **options: The options of `ListenOptions`, for the transport.

    Raises:
        TypeError: A handler isn't an async function with one parameter.
    """
    place = place_of(url)
    transport = load_transport(place.transport, PROTOCOL)
    check_link_options(place.transport, transport, "server", options)
    services = _services(endpoints, config, place.endpoint)
    [only] = services if len(services) == 1 else [""]
    with trio.CancelScope() as scope:
        async with listener(
            services, keep=keep, limits=limits, observer=observer, linger=linger, identify=identify
        ) as ours:
            async with bare_nursery() as nursery:
                addresses: list[str] = await nursery.start(
                    lambda task_status: transport.serve(
                        ours.handle, place.address, limits=limits or Limits(), task_status=task_status, **options
                    )
                )
                urls = tuple(place.url(address, only) for address in addresses)
                task_status.started(Listening(ours, urls, scope))


def _services(
    endpoints: LinkHandler | Mapping[str, Endpoint], config: Config | None, named: str | None
) -> Mapping[str, Endpoint]:
    if callable(endpoints):
        settings = config_for(config, named)
        return {settings.endpoint: Endpoint(endpoints, settings)}
    if named is not None or config is not None:
        raise ValueError("several endpoints bring their own names and settings")
    if not endpoints:
        raise ValueError("a listener needs an endpoint")
    return endpoints


async def _shut_down(link: Link, grace: float) -> None:
    with suppress(LinkLost):  # a link that was lost needs no shutdown
        await link.shutdown(grace=grace)


protect_package("muxkit.protocols.relink")

"""A listener: the table of its links, connected or absent, within bounds, and the server that fills it."""

from __future__ import annotations

import hashlib
import hmac
import logging
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, Protocol, runtime_checkable

import attrs
import trio

from muxkit._errors import Refused, RemoteProtocolError
from muxkit._limits import Limits
from muxkit._observer import Observer, for_connection, frames_of
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
LINK_COST = 16 * 1024  # bytes that an absent link counts in addition to its messages and channels
CHANNEL_COST = 3 * 1024  # the same of a channel; a link has at least one
LINK_KEPT = 64 * 1024  # bytes for each link that is kept, unless `Keep.bytes` says otherwise
LEAST_KEPT = 64 * MIB

# For a connector that comes back over and over and gets nothing done: it is answered later each time.
RETURNS = Backoff(first=0.1, most=5.0)

_log = logging.getLogger("muxkit")


# --- the handshake, and who connects


class RequestReader:
    """Reads a connector's request, for `HandshakeQueue.read_handshake`; decide on `handshake`, then `answer`."""

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
        """Write the listener's answer; return False if the stream is broken or too slow."""
        with suppress(trio.BrokenResourceError, trio.ClosedResourceError), trio.move_on_after(self._seconds):
            await stream.send_all(self.bytes_to_send())
            return True
        return False


def unknown(request: Requested) -> RemoteProtocolError:
    return RemoteProtocolError(f"there is no endpoint {request.endpoint!r} here", rule="relink-H22")


def named(error: RemoteProtocolError, head: bytes) -> RemoteProtocolError:
    """Return the error of a handshake with what the peer probably speaks, if what it sent first tells."""
    found = looks_like(head)
    if found is None:
        return error
    text = f"{error.message}: these bytes look like {found}"
    return RemoteProtocolError(text, rule=error.rule, offset=error.offset, limit=error.limit)


UNIDENTIFIED = b""


@runtime_checkable
class Identified(Protocol, metaclass=QuickCheck):
    """A stream with an authenticated peer: for TLS, the certificate whose private key the peer proved to own."""

    @property
    def identity(self) -> Identity | bytes | None: ...


def identity_of(stream: trio.abc.Stream) -> bytes | None:
    """The certificate of the stream's `identity`; of a `trio.SSLStream` the peer's certificate, if it was verified."""
    if isinstance(stream, Identified):
        identity = stream.identity
        return identity.certificate if isinstance(identity, Identity) else identity
    certificate = getattr(stream, "getpeercert", None)  # these two are passed on by it
    context = getattr(stream, "context", None)
    if certificate is None or context is None or context.verify_mode is ssl.CERT_NONE:
        return None
    proved: bytes | None = certificate(binary_form=True)
    return proved


def fingerprint(identity: bytes | None) -> bytes:
    """Hash an identity to a fixed size, since one is kept with each link."""
    return UNIDENTIFIED if identity is None else hashlib.sha256(identity).digest()


def new_epoch() -> int:
    return epoch_of(time.time())


def new_link_id() -> int:
    return 1 + secrets.randbelow(LARGEST_LINK_ID)


def is_same(link_id: int, asked: int, owner: bytes, who: bytes) -> bool:
    """Compare id and identity in a time that does not depend on where they differ."""
    same_id = hmac.compare_digest(link_id.to_bytes(8, "little"), asked.to_bytes(8, "little"))
    return hmac.compare_digest(owner, who) and same_id


# --- the table of links


@attrs.frozen
class Endpoint:
    """One service of a listener: what runs for each link, and what its connectors must agree with."""

    handler: LinkHandler
    config: Config = attrs.field(factory=Config)


@attrs.frozen(kw_only=True)
class Keep:
    """How much state of absent links a listener keeps; the one that has been absent for longest goes first.

    All connections may be lost in the same moment, so a listener should keep as many links as it carries connections.
    By default it does; if it is told to keep fewer, it says so when it starts.
    """

    links: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    """None for `Limits.connections`."""
    bytes: int | None = attrs.field(default=None, validator=attrs.validators.optional(attrs.validators.ge(0)))
    """Of messages in both directions, with 3 KiB for each of a link's channels and 16 KiB for the link itself. None for
    64 KiB for each link, and at least 64 MiB."""
    age: float = attrs.field(default=300.0, validator=attrs.validators.ge(0.0))
    """Seconds without a connection."""

    def bounds(self, limits: Limits) -> tuple[int, int]:
        """Return how many links are kept, and how many bytes; warn if that is less than what may be lost at once."""
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
    """A link in the listener's table."""

    link: Link
    connection: Connection
    link_id: int
    endpoint: str
    owner: bytes  # identity of the peer that made the link
    requests: int = 0  # connections that asked for it

    def weigh(self) -> int:
        return LINK_COST + self.connection.retained_bytes

    def forgotten(self, why: Forgotten) -> None:
        self.connection.end_because(f"the link was absent: {why.value}", by="local")


@attrs.frozen
class _Arrivals(Supply):
    """The connections of a link that a listener keeps: its connector brings them, and the listener weighs the link."""

    _links: Registry[bytes, _Kept]
    _key: bytes

    def weight_changed(self) -> None:
        self._links.reweigh(self._key)


@attrs.frozen
class _Guest:
    """A connection of a link, as its place at the listener sees it; the link outlives it, if it is kept."""

    _link: Link
    _place: Place

    def activity(self) -> int | None:
        stats = self._link.stats()
        return None if stats.channels else stats.messages_received + stats.messages_sent

    def send_away(self, refused: Refused) -> None:
        self._place.scope.cancel()  # a reason would end the link, and not only its connection


@attrs.define(eq=False, kw_only=True)
class Listener:
    """Hands each connection to its link; made by `listener`."""

    _endpoints: Mapping[str, Endpoint]
    _links: Registry[bytes, _Kept]
    _nursery: trio.Nursery
    _limits: Limits
    _observer: Observer | None
    _linger: float
    _identify: Identify
    _handshakes: HandshakeQueue
    _secret: bytes = attrs.field(init=False, factory=partial(secrets.token_bytes, 32))
    _serving: set[Link] = attrs.field(init=False, factory=set)
    _ended: trio.lowlevel.ParkingLot = attrs.field(init=False, factory=trio.lowlevel.ParkingLot)
    _is_draining: bool = attrs.field(init=False, default=False)
    epoch: int = attrs.field(init=False, factory=new_epoch)
    """Microseconds since 1970 when this listener began; tells its connectors whether it is still the same."""

    @property
    def links(self) -> int:
        """How many there are, absent ones included."""
        return len(self._links)

    @property
    def sessions(self) -> Collection[Link]:
        """The links whose handlers run now."""
        return [*self._serving]

    @property
    def absent(self) -> int:
        """How many of them have no connection."""
        return self._links.absent

    @property
    def absent_bytes(self) -> int:
        """What these weigh."""
        return self._links.absent_bytes

    async def handle(self, stream: trio.abc.Stream, *, refused: Refused | None = None) -> None:
        """One connection, until it is over; the stream is closed then. To be given to a server of streams.

        A connector that is `refused` gets a link that ends at once, with this reason.
        """
        try:
            reader = RequestReader(self._limits, self._versions)
            request, rest = await self._handshakes.read_handshake(stream, reader)
            if refused is None:
                await self._admit(rest, reader, request, fingerprint(self._identify(stream)))
            else:
                await self._send_away(rest, reader, request, refused)
        except (RemoteProtocolError, LinkLost) as error:
            level = logging.INFO if isinstance(error, RemoteProtocolError) else logging.DEBUG
            # log INFO, DEBUG: A handshake of Relink was wrong or too slow (INFO), or the peer hung up in it (DEBUG).
            _log.log(level, "a connection was not let in: %s: %s", peer_of(stream) or "a peer", error)
        finally:
            # Shielded, though it does not wait: a cancellation from outside would leave it open.
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

    async def _send_away(
        self, stream: trio.abc.Stream, reader: RequestReader, request: Requested, refused: Refused
    ) -> None:
        """Tell a connector why it is not let in, on a link that is made for nothing else."""
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
                connection.lose(
                    "the connector was refused", by="local", cause=refused, told=Reason(refused.reason, refused.code)
                )

    def _key(self, link_id: int) -> bytes:
        """Map a link id to a secret key, so that lookup time reveals nothing about the ids in the table."""
        return hashlib.blake2b(link_id.to_bytes(8, "little"), key=self._secret).digest()

    def _find(self, request: Requested, who: bytes) -> bytes | None:
        """Give the key of the link that is asked for, if it exists and belongs to this identity and endpoint."""
        if not request.link_id or request.epoch != self.epoch:
            return None
        key = self._key(request.link_id)
        kept = self._links.find(key)
        if kept is None or not is_same(kept.link_id, request.link_id, kept.owner, who):
            return None
        return key if kept.endpoint == request.endpoint else None

    async def _resume(self, stream: trio.abc.Stream, reader: RequestReader, key: bytes) -> bool:
        """Run the connection on the link with this key, if it is the newest; False if the link is gone."""
        is_there = False
        kept = self._links.find(key)
        if kept is not None:
            kept.requests = request = kept.requests + 1
            if (refusals := kept.connection.refusals) > 1:
                await trio.sleep(RETURNS.wait(refusals))
                if kept.requests != request:
                    return True  # the connector has come again since, and the newest connection counts
        with suppress(LookupError):  # gone by the time when its last connection has let go of it
            async with self._links.adopt(key) as adopted:
                if adopted.session.connection.error is None:
                    is_there = True  # to be said first: a newer connection may end the block at any moment
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
                adopted.forget()  # the connector never learned of the link
                return
            self._serving.add(link)
            self._nursery.start_soon(self._run, link, endpoint, key)
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

    async def _run(self, link: Link, endpoint: Endpoint, key: bytes) -> None:
        try:
            async with running(lambda: link, self._linger):
                await run_handler(endpoint.handler, link)
        except LinkLost as error:
            # log: A link ended while its handler ran.
            _log.debug("link lost: %s", error)
        except Refused as error:
            if may_log("clients that were sent away"):
                _log.info("a client was sent away: %s", printable(str(error)))
        except Exception as error:
            # log: Your handler raised; the line says where. The other links go on.
            log_failure("the handler of a link failed, the link was given up", error, {"peer": link.info.peer})
        finally:
            self._links.forget(key)
            self._serving.discard(link)
            self._ended.unpark_all()

    async def shutdown(self, *, grace: float) -> None:
        """Take no new links and channels, and let the live ones end for up to `grace` seconds."""
        self._is_draining = True
        with trio.move_on_after(grace):
            async with bare_nursery() as nursery:
                for link in [*self._serving]:
                    nursery.start_soon(_shut_down, link, grace)
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
    """A listener without a transport: give its `handle` to any server of streams. All links end with the block.

    `identify` gives the authenticated identity of a stream's peer; only the same identity can resume a link.
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
    """A running listener; made by `listen`."""

    listener: Listener
    urls: tuple[str, ...]
    _scope: trio.CancelScope

    @property
    def url(self) -> str:
        """What a connector dials; the first, if there are several. It names the endpoint if there is only one."""
        return self.urls[0]

    async def shutdown(self, *, grace: float) -> None:
        """Take no new links and channels, let the live ones end for up to `grace` seconds, then stop."""
        await self.listener.shutdown(grace=grace)
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
    **options: Any,
) -> None:
    """Serve links at `url` until cancelled; `listening = await nursery.start(relink.listen, handler, url)`.

    `endpoints` are services by name, or the handler of the one that the URL or `config` names. A handler is called
    once for each new `Link`, which may lose its connection and get another one meanwhile; when it returns, the link
    takes leave. What it raises ends its own link and is logged. Absent links are kept within `keep`; one that has to
    go raises `LinkLost` wherever its handler waits. Other keyword arguments are options of the transport. Raises
    TypeError for a handler that isn't an async function with one parameter.
    """
    place = place_of(url)
    transport = load_transport(place.transport, PROTOCOL)
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
    with suppress(LinkLost):  # then it is over as well
        await link.shutdown(grace=grace)


protect_package("muxkit.protocols.relink")

"""Connecting and serving with QUIC.

`connect` and `serve` are the public functions of the transport `quic`. They check the options, prepare aioquic's
configuration, do the handshake, and turn failures into errors that name their reason.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Unpack

import attrs
import trio

from muxkit import TLS, Limits
from muxkit.runtime import ExtraNeeded, background, bare_nursery, protect_package, protected_manager

try:
    from .compatibility import check_aioquic
    from .connection import LimitedConnection

    check_aioquic()
except ModuleNotFoundError as _error:
    raise ExtraNeeded("quic", "quic", link="multistream") from _error
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from .._addresses import CERTIFICATE_NEEDED, CERTIFICATE_REQUIRED, join_host_port, one_of, one_place, several_places
from .._errors import HandshakeFailed, failed
from ..packets.candidates import PacketTransport
from ..packets.options import Address, PacketOptions
from ..packets.sockets import PacketSocket, bind_all, open_socket, resolve
from ..tcp import Hosts, each_host
from .link import ConnectionEnded, QuicLink, alert_name
from .options import IssuedTickets, QuicKeywords, QuicOptions, Renewed, Source, Tickets, identify, trust, trust_clients
from .server import Server

if TYPE_CHECKING:
    from aioquic.quic.configuration import QuicConfiguration

__all__ = ["ConnectionEnded", "HandshakeFailed", "QuicLink", "Tickets", "connect", "rebind", "serve", "transport"]

HANDSHAKE_TIMEOUT = 30.0  # s for clients; a server has Limits.handshake
SOCKETS = PacketOptions(send_buffer=4 * 1024 * 1024)


@protected_manager
async def connect(
    host: Hosts,
    port: int | None = None,
    *,
    tls: TLS | None = None,
    ca: Source | bytes | None = None,
    server_hostname: str | None = None,
    insecure: bool = False,
    limits: Limits | None = None,
    connect_timeout: float | None = None,
    handshake_timeout: float = HANDSHAKE_TIMEOUT,
    tickets: Tickets | None = None,
    **options: Unpack[QuicKeywords],
) -> AsyncIterator[QuicLink]:
    """Open a QUIC connection to a peer whose certificate is valid for `server_hostname`.

    Leaving the block normally closes the connection in order. Leaving it with an error closes it with an error code.

    Args:
        host: a host, or a list of `(host, port)`. All their addresses are tried in order.
            `muxkit.connect` races them.
        port: the port of a single host.
        tls: the certificates to trust and to present.
        ca: certificates to trust instead of the system's, as a PEM file or as PEM data. An alternative to `tls`.
        server_hostname: the name that the certificate must have. By default the host.
        insecure: don't verify the server. With `tls`, use `TLS(verify=False)` instead.
        limits: the flow-control windows and the number of streams.
        connect_timeout: another name for `handshake_timeout`, which it overrides.
        handshake_timeout: seconds for the handshake, for each address.
        tickets: a store for session tickets, which shorten later handshakes with the same servers.
        options: the other keywords, which `QuicOptions` describes.

    Raises:
        HandshakeFailed: if one side rejects the other, or if an address doesn't answer. The error has the reason.
        OSError: if no address can be resolved or reached.
        ValueError: if arguments contradict each other.
    """
    one_of(tls=tls, ca=ca)
    one_of(tls=tls, insecure=insecure or None)
    dialer = _Dialer(
        QuicOptions(limits=limits or Limits(), **options),
        tls,
        ca if tls is None else tls.ca,
        server_hostname,
        insecure if tls is None else not tls.verify,
        handshake_timeout if connect_timeout is None else connect_timeout,
        tickets,
    )
    places = each_host(host, port)
    async with background() as nursery:
        link = await dialer.first_of(places, nursery)
        try:
            yield link
        except BaseException:
            link.close(error="hung up")
            raise
        await link.aclose()


async def serve(
    handler: Callable[[QuicLink], Awaitable[None]],
    port: int = 0,
    *,
    tls: TLS | None = None,
    certificate: Source | None = None,
    key: Source | None = None,
    password: str | None = None,
    host: str = "127.0.0.1",
    limits: Limits | None = None,
    retry: bool = True,
    tickets: bool = False,
    task_status: trio.TaskStatus[list[str]] = trio.TASK_STATUS_IGNORED,
    **options: Unpack[QuicKeywords],
) -> None:
    """Run `handler(link)` for each connection whose handshake succeeds, until cancelled.

    Args:
        handler: gets each connection, which is closed afterwards.
        port: the port. 0 chooses a free one.
        tls: the server's certificate and key. After a reload, new connections use the new ones.
        certificate: a PEM file with the server's certificate chain. An alternative to `tls`.
        key: the file with its key. By default the key is in the file of the certificate.
        password: the password of the key.
        host: the address to bind, or a host with several addresses.
        limits: how many connections and handshakes are allowed, and the flow-control windows.
        retry: let clients prove their addresses before the server keeps anything for them. This takes one round trip.
        tickets: issue session tickets, which shorten the next handshakes of clients.
        task_status: gets a list of the bound addresses.
        options: the other keywords, which `QuicOptions` describes.

    Raises:
        ValueError: if there is no certificate, or if arguments contradict each other.
        OSError: if an address can't be bound.
    """
    quic_options = QuicOptions(limits=limits or Limits(), **options)
    one_of(tls=tls, certificate=certificate)

    def configure() -> QuicConfiguration:
        configuration = quic_options.configuration(is_client=False)
        shown = certificate if tls is None else tls.cert
        if shown is None:
            raise ValueError(CERTIFICATE_NEEDED)
        if tls is None:
            identify(configuration, certificate=shown, key=key, password=password)
        else:
            identify(configuration, certificate=shown, key=tls.key, password=tls.password)
            trust_clients(configuration, tls)
        return configuration

    if tickets and tls is not None and tls.client_ca is not None:
        raise ValueError("tickets=True and TLS(client_ca=…): a client that comes with a ticket shows no certificate")
    issued = IssuedTickets() if tickets else None
    fixed = configure()
    server = Server(
        (lambda: fixed) if tls is None else Renewed(tls, configure),
        handler,
        options=quic_options,
        retry=retry,
        tickets=issued,
    )
    sockets = [
        PacketSocket(sock, SOCKETS, refused=lambda *_: None)
        for sock in await bind_all("quic", host, port, one_port=True)
    ]
    addresses = [join_host_port(*wire.address[:2]) for wire in sockets]
    await server.serve(sockets, lambda: task_status.started(addresses))


def rebind(link: QuicLink, *, host: str | None = None) -> None:
    """Continue a client's connection on another port, or on another address of this machine.

    Call this when this machine's network has changed. If the path changes elsewhere, such as at a NAT, QUIC adapts
    without a call.

    Args:
        link: a client's connection.
        host: the local address to use. By default the system chooses one.

    Raises:
        ValueError: for a connection that a server accepted.
        OSError: if the local address can't be used.
    """
    if link.role != "client":
        raise ValueError("only a client can go on from another address")
    peer = link.wire.peer
    assert peer is not None
    link.replace_wire(_connected(link.wire.socket.family, peer, host=host)).close()


transport: Final = PacketTransport(
    "quic", connect, serve, several_places, one_place, "multistream", (QuicKeywords,), needed=("tls", "certificate")
)


@attrs.frozen
class _Dialer:
    """Tries addresses in order. Holds the arguments that apply to all of them."""

    options: QuicOptions
    tls: TLS | None
    ca: Source | bytes | None
    server_hostname: str | None
    insecure: bool
    timeout: float
    tickets: Tickets | None

    async def first_of(self, places: Sequence[tuple[str, int]], nursery: trio.Nursery) -> QuicLink:
        """Connect to the first address that answers. The tasks of the connection run in `nursery`."""
        failures: list[OSError] = []
        for host, port in places:
            configuration = self.options.configuration(is_client=True)
            name = self.server_hostname or host
            trust(configuration, ca=self.ca, name=name, insecure=self.insecure)
            if self.tls is not None and self.tls.cert is not None:
                identify(configuration, certificate=self.tls.cert, key=self.tls.key, password=self.tls.password)
            try:
                found = await resolve("quic", host, port)
            except OSError as error:
                failures.append(error)
                continue
            for family, address in found:
                configuration.session_ticket = self.tickets.take(name) if self.tickets is not None else None
                try:
                    client = _Client(
                        configuration, self.options, self.tickets, family, address, verified=not self.insecure
                    )
                    return await client.start(nursery, self.timeout)
                except OSError as error:  # `HandshakeFailed` is one too
                    failures.append(error)
        if len(failures) == 1:
            raise failures[0]
        kind = HandshakeFailed if any(isinstance(error, HandshakeFailed) for error in failures) else OSError
        raise kind("; ".join(str(error) for error in failures)) from failures[-1]


class _Client:
    """One attempt to connect, and its two tasks."""

    def __init__(
        self,
        configuration: QuicConfiguration,
        options: QuicOptions,
        tickets: Tickets | None,
        family: int,
        address: Address,
        *,
        verified: bool,
    ) -> None:
        self._address = address
        self._quic = LimitedConnection(
            configuration,
            streams=options.most_streams,
            window_most=options.limits.channel_bytes,
            session_ticket_handler=tickets.keep if tickets is not None else None,
        )
        self._name = f"quic {join_host_port(*address[:2])}{'' if verified else ' (not verified, insecure)'}"
        self._link = QuicLink(
            self._quic,
            _connected(family, address, refused=self._refused),
            role="client",
            name=self._name,
            options=options,
        )
        self._refusal: OSError | None = None

    async def start(self, nursery: trio.Nursery, within: float) -> QuicLink:
        """Do the handshake. Raises `HandshakeFailed` or OSError, after which neither tasks nor sockets remain."""
        scope = trio.CancelScope()
        nursery.start_soon(self._run, scope)
        try:
            with trio.move_on_after(within) as handshake:
                await self._link.established.wait()
            if self._refusal is not None:
                raise self._refusal
            if handshake.cancelled_caught:
                raise HandshakeFailed(f"{self._name}: no handshake within {within:g} s (handshake_timeout=)")
            if self._link.alpn is None:
                ended = self._link.ended
                alert = None if ended is None or ended.is_application else alert_name(ended.code)
                raise HandshakeFailed(f"{self._name}: {self._reason(alert)}", alert=alert)
        except BaseException:
            scope.cancel()
            raise
        return self._link

    def _reason(self, alert: str | None) -> str:
        ended = self._link.ended
        if alert == "certificate required" and ended is not None and ended.by == "peer":
            return CERTIFICATE_REQUIRED
        if ended is not None and ended.reason:
            return ended.reason
        return str(ended).partition(": ")[2] if ended is not None else "the peer hung up during the handshake"

    async def _run(self, scope: trio.CancelScope) -> None:
        try:
            with scope:
                self._quic.connect(self._address, now=trio.current_time())
                async with bare_nursery() as nursery:
                    nursery.start_soon(self._receive)
                    await self._link.run()
                    nursery.cancel_scope.cancel()
        finally:
            self._link.drop("hung up")
            self._link.wire.close()
            self._link.established.set()  # `start` then finds that no protocol was agreed on

    def _refused(self, _: Address, error: OSError) -> None:
        # After the handshake, the report may be forged. Before it, there is no peer that we would lose.
        if isinstance(error, ConnectionRefusedError) and not self._link.established.is_set():
            self._refusal = failed(self._name, error)
            self._refusal.__cause__ = error
            self._link.established.set()

    async def _receive(self) -> None:
        link = self._link
        while True:
            wire = link.wire
            try:
                await wire.wait_readable()
                burst = wire.receive()
            except trio.ClosedResourceError:
                if wire is not link.wire:
                    continue  # `rebind` replaced it
                raise
            for address, run in burst:
                for data in run:
                    link.feed((data, address))
            link.finish_feeding()
            burst = []  # don't keep the packets alive while waiting for more
            await trio.lowlevel.checkpoint()


def _connected(
    family: int,
    peer: Address,
    *,
    host: str | None = None,
    refused: Callable[[Address, OSError], None] = lambda peer, error: None,
) -> PacketSocket:
    """Open a socket that is connected to a server, from a free port, and from a certain local address if given."""
    try:
        sock = open_socket(family, bind=None if host is None else (host, 0), connect=peer)
    except OSError as error:
        where = join_host_port(host, 0) if host is not None else join_host_port(*peer[:2])
        raise failed(f"quic {where}", error) from error
    return PacketSocket(sock, SOCKETS, refused=refused, peer=peer)


protect_package("muxkit_adapters")

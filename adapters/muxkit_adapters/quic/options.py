"""Options of QUIC connections as aioquic takes them: limits, trust, certificates and tickets."""

from __future__ import annotations

import logging
import os
import ssl
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypedDict

import attrs
from aioquic.quic.configuration import SMALLEST_MAX_DATAGRAM_SIZE, QuicConfiguration
from aioquic.tls import CipherSuite

from muxkit import TLS, Limits

from .qlog import DirectoryLogger

if TYPE_CHECKING:
    from aioquic.tls import SessionTicket

log: Final = logging.getLogger("muxkit.adapters")

ALPN = "muxkit-aqueduct"
IDLE_TIMEOUT = 30.0  # s without a packet after which the peer counts as gone
KEEP_ALIVE = 10.0  # s of silence before a ping
STREAM_PRICE = 2 * 1024  # bytes of memory for a stream
DATAGRAM_MOST = 65_535  # bytes, the largest DATAGRAM frame that is accepted
QLOG_DIRECTORY = "MUXKIT_QLOGDIR"
TICKETS_MOST = 1024
CIPHERS = [CipherSuite.AES_128_GCM_SHA256, CipherSuite.AES_256_GCM_SHA384, CipherSuite.CHACHA20_POLY1305_SHA256]

Source = str | os.PathLike[str]


class QuicKeywords(TypedDict, total=False):
    """Keywords that both sides of QUIC take; `QuicOptions` has their meaning."""

    alpn: Sequence[str]
    streams: int | None
    idle_timeout: float
    keep_alive: float | None
    packet_size: int
    qlog: Source | None


@attrs.frozen(kw_only=True)
class QuicOptions:
    """Options of both sides; times in seconds, sizes in bytes."""

    alpn: Sequence[str] = (ALPN,)
    limits: Limits = attrs.field(factory=Limits)
    streams: int | None = None
    """Streams of the peer that may be open at once; by default twice `Limits.channels` and 256, or as many as
    `Limits.channel_memory` pays for."""
    idle_timeout: float = IDLE_TIMEOUT
    """Silence after which the peer counts as gone."""
    keep_alive: float | None = KEEP_ALIVE
    """Silence before a ping; None for no pings."""
    packet_size: int = attrs.field(
        default=SMALLEST_MAX_DATAGRAM_SIZE, validator=attrs.validators.ge(SMALLEST_MAX_DATAGRAM_SIZE)
    )
    """The UDP payload of packets that are sent; the path must take larger ones if this is raised."""
    qlog: Source | None = None
    """A directory for qlog files."""

    @property
    def most_streams(self) -> int:
        channels = self.limits.at_price(2 * STREAM_PRICE).channels
        return 2 * channels + 256 if self.streams is None else self.streams

    def configuration(self, *, is_client: bool) -> QuicConfiguration:
        if not self.alpn:
            raise ValueError("alpn=(): both sides have to agree on a protocol")
        limits = self.limits
        directory = self.qlog or os.environ.get(QLOG_DIRECTORY)
        return QuicConfiguration(
            is_client=is_client,
            alpn_protocols=list(self.alpn),
            idle_timeout=self.idle_timeout,
            max_data=limits.connection_bytes,
            max_stream_data=min(limits.channel_first, limits.channel_bytes, limits.connection_bytes),
            max_datagram_size=self.packet_size,
            max_datagram_frame_size=DATAGRAM_MOST,
            cipher_suites=CIPHERS,
            quic_logger=DirectoryLogger(Path(directory)) if directory else None,
        )


def trust(configuration: QuicConfiguration, *, ca: Source | bytes | None, name: str, insecure: bool) -> None:
    """Set which roots a client trusts: the system's, or the ones given, as a file or as PEM."""
    configuration.server_name = name
    configuration.verify_mode = ssl.CERT_NONE if insecure else ssl.CERT_REQUIRED
    if isinstance(ca, bytes):
        configuration.load_verify_locations(cadata=ca)
    elif ca is not None:
        _check_readable("ca", ca)
        configuration.load_verify_locations(cafile=os.fspath(ca))
    else:
        system = ssl.get_default_verify_paths()
        configuration.load_verify_locations(cafile=system.cafile, capath=system.capath)


def identify(
    configuration: QuicConfiguration, *, certificate: Source, key: Source | None, password: str | None
) -> None:
    """Set the certificates that one side shows: a chain and its key, which may be in the same file."""
    _check_readable("certificate", certificate)
    if key is not None:
        _check_readable("key", key)
    try:
        configuration.load_cert_chain(certificate, key or certificate, password)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"certificate={os.fspath(certificate)!r}: no chain with its key in PEM ({error})") from error


def trust_clients(configuration: QuicConfiguration, tls: TLS) -> None:
    """Set which authorities the certificates of a server's clients come from; without any, none is asked for."""
    if tls.client_ca is not None:
        configuration.verify_mode = ssl.CERT_REQUIRED
        configuration.load_verify_locations(
            cadata=tls.client_ca if isinstance(tls.client_ca, bytes) else Path(tls.client_ca).read_bytes()
        )


class Renewed:
    """The configuration of a server's next connection, made again after the files of its `TLS` were read again."""

    def __init__(self, tls: TLS, make: Callable[[], QuicConfiguration]) -> None:
        self._tls = tls
        self._make = make
        self._generation = tls.generation
        self._made = make()

    def __call__(self) -> QuicConfiguration:
        if self._generation != self._tls.generation:
            self._generation = self._tls.generation
            try:
                self._made = self._make()
            except (OSError, ValueError) as error:  # the files have changed once more
                # log: The certificate files have changed and can't be used.
                log.error("quic goes on with the certificates that it had: %s", error)
        return self._made


def _check_readable(what: str, path: Source) -> None:
    try:
        with Path(path).open("rb"):
            pass
    except OSError as error:
        raise ValueError(f"{what}={os.fspath(path)!r}: {os.strerror(error.errno or 0)}") from error


class Tickets:
    """Tickets that servers gave a client, which shorten its next handshakes; never used for early data."""

    def __init__(self, most: int = TICKETS_MOST) -> None:
        self._most = most
        self._tickets: OrderedDict[str, SessionTicket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def keep(self, ticket: SessionTicket) -> None:
        """Keep the newest ticket of each server."""
        ticket.max_early_data_size = None
        self._tickets[ticket.server_name] = ticket
        self._tickets.move_to_end(ticket.server_name)
        if len(self._tickets) > self._most:
            self._tickets.popitem(last=False)

    def take(self, name: str) -> SessionTicket | None:
        """Take a server's ticket, which works once."""
        return self._tickets.pop(name, None)


class IssuedTickets:
    """Tickets that a server gave its clients; each works once, and above the limit the oldest are dropped."""

    def __init__(self, most: int = TICKETS_MOST) -> None:
        self._most = most
        self._tickets: OrderedDict[bytes, SessionTicket] = OrderedDict()

    def keep(self, ticket: SessionTicket) -> None:
        self._tickets[ticket.ticket] = ticket
        if len(self._tickets) > self._most:
            self._tickets.popitem(last=False)

    def take(self, ticket: bytes) -> SessionTicket | None:
        return self._tickets.pop(ticket, None)
